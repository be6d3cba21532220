"""The Penn Treebank as a stream: dropout, rates, and what is read."""

import math
from dataclasses import replace

import pytest
import torch
from lab.real_data import text

from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.tasks import PTB
from deepmemory.lab.tasks.batch import cross_entropy
from deepmemory.lab.training import loop, trainer
from deepmemory.lab.training.group import checkpoint_of, fresh_group, group_from_checkpoint
from deepmemory.lab.training.network import Dropout, TiedWordNetwork, dropout_mask
from deepmemory.lab.training.random_streams import TEST, VALIDATION

DROPOUT = {f"{where}_dropout": 0.3 for where in ("word", "input", "output", "recurrent", "transition")}
SMALL = Setting("ptb", "dmu", (6,), (6, 6), lr=0.01, batch=4, window=10, epochs=2, cosine=2, **DROPOUT)


def corpus():
    return text(task=PTB)


@pytest.fixture(autouse=True)
def _made_data(monkeypatch):
    monkeypatch.setattr(trainer, "task_of", lambda setting, data=None: corpus())


def train_all(setting, seeds, engine="plain"):
    made = trainer.make_trainer(setting, Machine("cpu", engine=engine))
    group = fresh_group(made, seeds)
    return made, group, list(loop.train(made, group))


def test_a_run_beside_others_follows_the_run_alone_with_the_same_dropout():
    _, beside, among = train_all(SMALL, [3, 17, 8])
    _, single, alone = train_all(SMALL, [17])
    for one, all_ in zip(alone, among, strict=True):
        assert all_.values[17] == pytest.approx(one.values[17], rel=1e-4)
    for name, weight in single.weights.items():
        torch.testing.assert_close(beside.weights[name][1], weight[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("option", DROPOUT)
def test_every_dropout_changes_training_and_none_changes_evaluation(option):
    without = replace(SMALL, **dict.fromkeys(DROPOUT, 0.0), epochs=1)
    made, group, (plain,) = train_all(without, [0])
    changed, _, (dropped,) = train_all(replace(without, **{option: 0.3}), [0])
    assert dropped.values[0]["train_loss"] != plain.values[0]["train_loss"]
    for split in (VALIDATION, TEST):
        torch.testing.assert_close(
            loop.evaluate(changed, group.weights, split, [0]), loop.evaluate(made, group.weights, split, [0])
        )


def test_masks_keep_the_mean_and_differ_between_sequences():
    keys = torch.arange(400) * 7919
    masks = Dropout(SMALL, 6).masks(keys, torch.float32)
    assert {name: mask.shape for name, mask in masks.items()} == {
        "input": (400, 6),
        "output": (400, 6),
        "state_l0": (400, 6),
        "hidden_l0": (400, 12),
    }
    for mask in masks.values():
        assert mask.unique().tolist() == pytest.approx([0, 1 / 0.7])
        assert mask.mean().item() == pytest.approx(1, abs=0.1)
        assert len(mask.unique(dim=0)) > 10
    assert Dropout(SMALL, 6).masks(None, torch.float32) == {}


@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_dropout_in_double_precision(cell):
    options = DROPOUT if cell == "dmu" else DROPOUT | {"transition_dropout": 0.0}
    setting = Setting("ptb", cell, (6,), batch=4, window=10, epochs=1, precision="64-true", **options)
    _, group, (epoch,) = train_all(setting, [0])
    assert {weight.dtype for weight in group.weights.values()} == {torch.float64}
    assert math.isfinite(epoch.values[0]["train_loss"])


def test_a_share_of_one_drops_everything():
    assert dropout_mask(torch.tensor([0.0, 0.9]), 1.0).tolist() == [0, 0]
    _, _, (epoch,) = train_all(replace(SMALL, input_dropout=1.0, epochs=1), [0])
    assert math.isfinite(epoch.values[0]["train_loss"])


def test_resumed_dropout_is_that_of_a_run_that_was_never_stopped():
    setting = replace(SMALL, warmup=1, clip=0.1, epochs=3, cosine=3)
    made, whole, (_, *later) = train_all(setting, [3, 17])
    _, stopped, _ = train_all(replace(setting, epochs=1), [3, 17])
    tensors, notes = checkpoint_of(stopped)
    resumed = group_from_checkpoint(made, {name: tensor.detach() for name, tensor in tensors.items()}, notes)
    assert [epoch.values for epoch in loop.train(made, resumed)] == [epoch.values for epoch in later]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_word_has_one_fate_in_a_sequence():
    network = TiedWordNetwork(replace(SMALL, **dict.fromkeys(DROPOUT, 0.0) | {"word_dropout": 0.5}), corpus(), "plain")
    words, seen = torch.tensor([[1, 2, 1, 3, 2, 1]]), []
    network.recurrent.forward = lambda x, state, masks: (seen.append(x), (x, None))[1]
    for key in range(20):
        network(words, None, keys=torch.tensor([key * 7919]))
    fates = torch.cat(seen).ne(0).any(-1)
    assert (fates[:, 0] == fates[:, 2]).all()
    assert (fates[:, 1] == fates[:, 4]).all()
    assert 0.2 < fates.float().mean() < 0.8
    torch.testing.assert_close(dropout_mask(torch.tensor([0.1, 0.9]), 0.5), torch.tensor([0.0, 2.0]))


def test_the_test_text_is_one_stream_and_every_word_counts_once():
    made, setting = corpus(), replace(SMALL, window=3)
    feed = made.feed(TEST, setting, torch.tensor([0]), 4, torch.float32)
    batches = [feed.batch(step, shape) for step, shape in enumerate(feed.plan(0))]
    read = torch.cat([batch.target[0, batch.real[0]] for batch in batches])
    assert batches[0].inputs[0].shape == (1, 12)  # as many words at once as in training
    assert read.tolist() == made.texts.on(torch.device("cpu"))["test"][1:].tolist()


def test_one_matrix_embeds_and_predicts():
    network = TiedWordNetwork(SMALL, corpus(), "plain")
    assert {name for name, _ in network.named_parameters() if not name.startswith("recurrent")} == {
        "embedding.weight",
        "output_bias",
    }
    rows = torch.randn(2, 6)
    torch.testing.assert_close(network.logits(rows), rows @ network.embedding.weight.T + network.output_bias)


def test_rates_rise_and_fall():
    setting = replace(SMALL, warmup=3, cosine=8, gamma=0.5)
    factors = [loop.rate_factor(setting, epoch) for epoch in range(9)]
    cosine = [(1 + math.cos(math.pi * (epoch + 0.5) / 8)) / 2 for epoch in range(8)]
    expected = [min(1, (epoch + 1) / 4) * 0.5**epoch * cosine[epoch] for epoch in range(8)]
    assert factors[:8] == pytest.approx(expected)
    assert factors[8] == pytest.approx(0, abs=1e-12)
    assert loop.rate_factor(Setting(gamma=0.9), 3) == pytest.approx(0.9**3)


def test_the_embedding_has_a_rate_of_its_own():
    setting = replace(SMALL, lr=0.01, embedding_rate=0.03, module_rate="same", cosine=0, epochs=1)
    _, group, _ = train_all(setting, [0])
    rates = {id(p): part["initial_lr"] for part in group.adam.param_groups for p in part["params"]}
    for name, weight in group.weights.items():
        assert rates[id(weight)] == (0.03 if name.startswith("embedding") else 0.01), name


@pytest.mark.parametrize("option", [{"clip": 0.01}, {"beta2": 0.9}, {"cosine": 2}, {"warmup": 1}])
def test_every_option_of_the_optimiser_changes_training(option):
    without = replace(SMALL, **dict.fromkeys(DROPOUT, 0.0), epochs=1, cosine=0)
    _, plain, _ = train_all(without, [0])
    _, changed, _ = train_all(replace(without, **option), [0])
    assert not torch.equal(changed.weights["output_bias"], plain.weights["output_bias"])


def test_no_gradient_is_longer_than_the_setting_allows():
    lengths = {}
    for clip in (0.0, 0.01):
        _, group, _ = train_all(replace(SMALL, clip=clip, epochs=1), [0, 1])
        grads = [weight.grad.flatten(1) for weight in group.weights.values()]  # of the last step
        lengths[clip] = torch.cat(grads, 1).norm(dim=1)
    assert (lengths[0.0] > 0.02).all()
    torch.testing.assert_close(lengths[0.01], torch.full((2,), 0.01))


def test_clipping_is_for_each_run():
    grads = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[[4.0]], [[0.4]]])]
    first, second = loop.clipped(grads, 1.0)
    torch.testing.assert_close(first, torch.tensor([[0.6, 0.0], [0.3, 0.0]]))
    torch.testing.assert_close(second, torch.tensor([[[0.8]], [[0.4]]]))
    for run in range(2):  # alone as among others
        alone = loop.clipped([grad[run : run + 1] for grad in grads], 1.0)
        assert [torch.equal(one[0], both[run]) for one, both in zip(alone, (first, second), strict=True)] == [True] * 2


def test_the_loss_of_half_precision_outputs_is_not_rounded_to_it():
    output = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    target = torch.tensor([[0, 1, 2], [3, 4, 0]])
    loss = cross_entropy(output, target)
    torch.testing.assert_close(loss, cross_entropy(output.float(), target), rtol=0, atol=0)
    loss.sum().backward()
    assert output.grad.dtype is torch.bfloat16


def test_the_loss_and_its_gradient_are_those_of_torch():
    output = 30 * torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output[0, 0, 7] = 1000.0  # the probability of every other class vanishes
    target, weight = torch.arange(6).view(2, 3), torch.arange(1.0, 7.0).view(2, 3)
    ours, theirs = (output.clone().requires_grad_() for _ in range(2))
    loss = cross_entropy(ours, target)
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(loss, expected)
    for result in (loss, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_gradient_of_half_precision_outputs_is_rounded_once():
    output = (5 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1))).bfloat16().requires_grad_()
    target = output.detach().argmax(-1)  # where the gradient is a small difference of large numbers
    exact = output.detach().double().requires_grad_()
    cross_entropy(output, target).sum().backward()
    cross_entropy(exact, target).sum().backward()
    torch.testing.assert_close(output.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


def test_a_study_without_the_new_settings_keeps_its_name():
    assert Setting().key == Setting(clip=0.0, beta2=0.999, residual=False, cosine=0).key
    assert Setting().key != Setting(clip=0.5).key
