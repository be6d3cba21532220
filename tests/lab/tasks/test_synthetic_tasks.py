"""The tasks' definitions, read back from the data they make."""

import pytest
import torch

from deepmemory.lab import settings
from deepmemory.lab.tasks import TASK_CLASSES, Adding, NoisySequence, TemporalOrder
from deepmemory.lab.training import random_streams

TASKS = [Adding(), TemporalOrder(), NoisySequence(), NoisySequence(fixed=True)]


def batch(task, runs=4, sequences=500):
    return task.make(random_streams.sequence_keys(torch.arange(runs), random_streams.TRAINING, 3, sequences))


def lengths_of(task, made):
    if made.lengths is not None:
        return made.lengths
    return torch.full(made.x.shape[:2], task.longest)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_shapes_and_padding(task):
    made = batch(task)
    assert made.x.shape == (4, 500, task.longest, task.input_size)
    assert made.target.shape == (4, 500)
    padding = torch.arange(task.longest) >= lengths_of(task, made)[..., None]
    assert (made.x[padding] == 0).all()


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_run_k_gets_the_same_data_alone(task):
    together = batch(task)
    alone = task.make(random_streams.sequence_keys(torch.tensor([2]), random_streams.TRAINING, torch.tensor(3), 500))
    assert torch.equal(together.x[2], alone.x[0])
    assert torch.equal(together.target[2], alone.target[0])


@pytest.mark.parametrize("task", TASKS[:2], ids=repr)
def test_lengths_run_from_100_to_110(task):
    counts = batch(task).lengths.flatten().bincount(minlength=111)
    assert counts[:100].sum() == 0
    assert counts.numel() == 111
    assert (counts[100:] > 100).all()  # 2,000 sequences over 11 lengths


def test_adding_target_is_the_sum_of_what_is_marked():
    x, _, target = batch(Adding())
    value, marker = x.unbind(-1)
    torch.testing.assert_close(target, 0.5 + (value * (marker == 1)).sum(-1) / 4)
    assert value.abs().max() <= 1
    assert abs(value[marker == 0].mean()) < 0.01


def test_adding_marks():
    x, lengths, _ = batch(Adding())
    marker = x[..., 1]
    steps = torch.arange(110)
    ends = (steps == 0) | (steps == lengths[..., None] - 1)
    assert torch.equal(marker == -1, ends)
    marks = (marker == 1).sum(-1)
    assert set(marks.unique().tolist()) == {1, 2}  # one where the other fell on step 0
    assert 0.05 < (marks == 1).double().mean() < 0.2  # 1/10 + 1/50
    first = (marker == 1).double().argmax(-1)
    last = 109 - (marker == 1).flip(-1).double().argmax(-1)
    assert (first[marks == 2] <= 48).all()
    assert (last <= lengths // 2 - 2).all()
    assert last.max() == 53  # 110 / 2 - 2
    both = marks == 2
    assert (torch.minimum(first, last)[both] <= 9).all()


def test_temporal_order_class_is_the_order_of_the_marks():
    x, lengths, target = batch(TemporalOrder())
    symbols = x.argmax(-1)
    real = torch.arange(110) < lengths[..., None]
    assert torch.equal(x.sum(-1), real.float())
    is_mark = real & ((symbols == 2) | (symbols == 3))
    assert (is_mark.sum(-1) == 3).all()
    positions = is_mark.nonzero()[:, 2].view(4, 500, 3)
    for index, (low, high) in enumerate(((10, 19), (33, 42), (66, 75))):
        counts = positions[..., index].flatten().bincount(minlength=high + 1)
        assert counts.numel() == high + 1
        assert counts[:low].sum() == 0
        assert (counts[low:] > 100).all()  # 2,000 sequences over ten positions
    is_y = (symbols.gather(-1, positions) == 3).long()
    assert torch.equal(target, 4 * is_y[..., 0] + 2 * is_y[..., 1] + is_y[..., 2])
    assert target.flatten().bincount(minlength=8).min() > 150
    assert (symbols[..., 0] == 0).all()
    assert (symbols.gather(-1, lengths[..., None] - 1) == 1).all()
    middle = symbols[real & ~is_mark & (torch.arange(110) > 0) & (torch.arange(110) < lengths[..., None] - 1)]
    assert set(middle.unique().tolist()) == {4, 5, 6, 7}


def test_noisy_sequence_asks_for_its_first_symbol():
    x, lengths, target = batch(NoisySequence())
    symbols = x.argmax(-1)
    assert lengths is None
    assert (x.sum(-1) == 1).all()
    assert torch.equal(symbols[..., 0], target)
    assert 0.45 < target.double().mean() < 0.55
    counts = symbols[..., 1:].flatten().bincount(minlength=100)
    assert counts[:2].sum() == 0
    assert counts.numel() == 100
    assert ((counts[2:] / counts[2:].double().mean() - 1).abs() < 0.15).all()


def test_fixed_noise_is_the_same_in_every_sequence_and_run():
    x, _, target = batch(NoisySequence(fixed=True))
    assert (x[:, :, 1:] == x[:1, :1, 1:]).all()
    assert set(target.unique().tolist()) == {0, 1}


def test_losses_and_right_answers():
    output, target = torch.tensor([[0.5], [0.7]]), torch.tensor([0.51, 0.5])
    torch.testing.assert_close(Adding().losses(output, target), torch.tensor([1e-4, 0.04]))
    assert Adding().correct(output, target).tolist() == [1, 0]
    logits, classes = torch.randn(5, 8), torch.tensor([0, 1, 2, 7, 7])
    theirs = torch.nn.functional.cross_entropy(logits, classes, reduction="none")
    torch.testing.assert_close(TemporalOrder().losses(logits, classes), theirs)
    assert TemporalOrder().correct(logits, logits.argmax(-1)).tolist() == [1] * 5


def test_too_short_sequences_are_refused():
    with pytest.raises(ValueError, match="min_length should be at least 24"):
        Adding(10, 20)
    with pytest.raises(ValueError, match="min_length should be at least 77"):
        TemporalOrder(50, 60)


def test_every_task_of_the_settings_has_a_class():
    assert tuple(TASK_CLASSES) == settings.TASKS
