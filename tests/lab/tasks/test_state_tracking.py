"""State tracking: tables that are groups, products that are right, and lengths that count for their own measure."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from deepmemory.lab.beyond import state_tracking
from deepmemory.lab.settings import GROUPS, Machine, Setting
from deepmemory.lab.tasks import StateTracking, Tally
from deepmemory.lab.tasks.state_tracking import LONGER, product_table
from deepmemory.lab.training import loop
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.random_streams import TEST, TRAINING, VALIDATION, sequence_keys
from deepmemory.lab.training.trainer import make_trainer

SIZES = {"parity": 2, "z60": 60, "s3": 6, "s4": 24, "a5": 60, "s5": 120}
SMALL = Setting(
    "state-tracking", hidden=(5,), elements="s3", min_length=4, max_length=4, batch=6, steps=3, epochs=2, validation=7
)


def table(group):
    size, products = product_table(group)
    return products.on(torch.device("cpu"))["products"].view(size, size)


@pytest.mark.parametrize("group", GROUPS)
def test_tables_are_groups(group):
    products = table(group)
    size = len(products)
    everything = torch.arange(size)
    assert size == SIZES[group]
    assert torch.equal(products[0], everything)  # 0 is the identity, from both sides
    assert torch.equal(products[:, 0], everything)
    for sides in (products, products.T):  # every element occurs once in every row and column: there are inverses
        assert torch.equal(sides.sort(1).values, everything.expand(size, size))
    associated = products[products[:, :, None].expand(size, size, size), everything.expand(size, size, size)]
    other = products[everything[:, None, None].expand(size, size, size), products[None].expand(size, size, size)]
    assert torch.equal(associated, other)


def test_which_groups_commute():
    assert {group for group in GROUPS if torch.equal(table(group), table(group).T)} == {"parity", "z60"}


def test_permutations_are_multiplied_as_functions():
    elements = list(permutations(range(4)))
    for a in (1, 7, 13):
        for b in (2, 10, 23):
            product = elements[table("s4")[a, b]]
            assert product == tuple(elements[a][elements[b][i]] for i in range(4))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("length", [1, 2, 16, 37])
def test_targets_are_running_products(group, length):
    task = StateTracking(group, length)
    x, lengths, target = task.make(sequence_keys(torch.tensor([3, 4]), TRAINING, 5, 6))
    assert x.shape == (2, 6, length, task.size)
    assert target.shape == (2, 6, length)
    assert lengths is None
    assert (x.sum(-1) == 1).all()
    products, elements = table(group).tolist(), x.argmax(-1)
    for run in range(2):
        for sequence in range(6):
            state = 0
            for step in range(length):
                state = products[state][elements[run, sequence, step]]
                assert target[run, sequence, step] == state


def test_elements_are_uniform():
    x, *_ = StateTracking("s3", 50).make(sequence_keys(torch.tensor([0]), TRAINING, 0, 400))
    shares = x.argmax(-1).flatten().bincount(minlength=6) / 20_000
    assert ((shares - 1 / 6).abs() < 0.01).all()


@pytest.mark.parametrize("split", [VALIDATION, TEST])
def test_each_length_counts_for_its_own_accuracy(split):
    trainer = make_trainer(replace(SMALL, test=7), Machine("cpu", engine="plain"))
    task = trainer.task
    feed = task.feed(split, trainer.setting, torch.tensor([0]), 5, torch.float32)
    shapes = feed.plan(0)
    longest = [256, 256] if split == TEST else [256]  # after every epoch, fewer of the longest
    assert [shape[0] for shape in shapes] == [4, 4, 32, 32, *longest]  # seven sequences, five at a time
    tallies = []
    for step, shape in enumerate(shapes):
        batch = feed.batch(step, shape)
        output = 10 * torch.nn.functional.one_hot(batch.target, task.size).float()  # all right
        wrong_from = {32: 0, 256: 128}.get(shape[0], shape[0])
        output[:, :, wrong_from:] = output[:, :, wrong_from:].roll(1, -1)
        tallies.append(task.tally((output, None), batch))
    loss, *accuracies = loop.measures_of(task, tallies)[0].tolist()
    assert accuracies == [1, 0, 0.5]
    assert loss == pytest.approx(loop.measures_of(task, tallies[:2])[0, 0])


def test_measures_of_other_tasks_use_every_sequence():
    tally = Tally(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert loop.measures_of(StateTracking("s3"), [tally, tally])[0].tolist() == [2, 0.5, *[0.5] * len(LONGER)]


def trained(setting, seeds, engine="plain"):
    trainer = make_trainer(setting, Machine("cpu", engine=engine))
    group = fresh_group(trainer, seeds)
    return group, list(loop.train(trainer, group)), loop.test(trainer, group)


@pytest.mark.parametrize("cell", ["dmu", "mingru"])
def test_a_run_alone_equals_the_run_among_others(cell):
    setting = replace(SMALL, cell=cell, hidden=(5, 5), test=5, clip=1.0)
    among, epochs, tests = trained(setting, [0, 1, 2])
    alone, own, test = trained(setting, [1])
    for one, all_ in zip(own, epochs, strict=True):
        assert all_.values[1] == pytest.approx(one.values[1], rel=1e-4, abs=1e-6)
    assert tests[1] == pytest.approx(test[1], rel=1e-4, abs=1e-6)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(among.weights[name][1], weight[0], rtol=1e-3, atol=1e-5)


def test_a_gru_learns_parity():
    setting = replace(state_tracking.setting("gru", 1, "parity", 0.01), hidden=(8,), batch=32, epochs=5)
    setting = replace(setting, min_length=8, max_length=8, validation=8, test=8)
    _, epochs, _ = trained(setting, [0, 1], "auto")
    assert max(values["valid_accuracy_8"] for values in epochs[-1].values.values()) > 0.99


def test_lengths_are_one():
    with pytest.raises(ValueError, match="state-tracking has one length"):
        replace(SMALL, max_length=5)
