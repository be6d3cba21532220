"""Runs side by side follow the course each would take alone."""

import logging
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from fused_engines import needs_gpu

import deepmemory as dm
from deepmemory.lab import paper
from deepmemory.lab.records import DIVERGED, REACHED, RUNNING
from deepmemory.lab.settings import CELLS, SYNTHETIC, Machine, Setting
from deepmemory.lab.training import loop, random_streams, studies
from deepmemory.lab.training.condition import enforce_condition
from deepmemory.lab.training.group import checkpoint_of, fresh_group, group_from_checkpoint, state_tensors
from deepmemory.lab.training.loop import Steps, finish_epoch
from deepmemory.lab.training.network import LastStateNetwork, initial_weights
from deepmemory.lab.training.trainer import make_trainer, open_fabric

CPU = Machine("cpu", engine="plain")
SMALL = Setting(
    transition=(5,), lr=0.02, min_length=24, max_length=30, batch=8, steps=4, epochs=3, validation=40, test=50
)


def train_all(setting, seeds, machine=CPU):
    trainer = make_trainer(setting, machine)
    group = fresh_group(trainer, seeds)
    return trainer, group, list(loop.train(trainer, group))


def test_a_run_beside_50_others_follows_the_run_alone_for_100_steps():
    setting = replace(SMALL, steps=25, epochs=4, gamma=0.9, weight_decay=1e-4)
    _, beside, among = train_all(setting, range(51))
    _, single, alone = train_all(setting, [17])
    for one, all_ in zip(alone, among, strict=True):
        assert all_.values[17] == pytest.approx(one.values[17], rel=1e-4, abs=1e-6)
    for name, weight in single.weights.items():
        torch.testing.assert_close(beside.weights[name][17], weight[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_equals_an_ordinary_training_loop(cell):
    changes = {"steps": 30, "epochs": 1, "min_length": 24, "max_length": 26, "validation": 10, "weight_decay": 1e-3}
    setting = replace(paper.setting("adding", cell), **changes)
    trainer, group, (epoch,) = train_all(setting, [3, 4])

    network = LastStateNetwork(setting, trainer.task, "plain")
    start = initial_weights(setting, trainer.task, [4])
    network.load_state_dict({name: weight[0] for name, weight in start.items()})
    adam = torch.optim.Adam(dm.parameter_groups(network, setting.lr, setting.weight_decay))
    losses = []
    for step in range(30):
        x, lengths, target = trainer.task.make(
            random_streams.sequence_keys(torch.tensor([4]), random_streams.TRAINING, step, setting.batch)
        )
        loss = torch.nn.functional.mse_loss(network(x[0], lengths[0]).squeeze(-1), target[0])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert epoch.values[4]["train_loss"] == pytest.approx(sum(losses) / 30, rel=1e-4)
    for name, weight in network.named_parameters():
        torch.testing.assert_close(group.weights[name][1], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", SYNTHETIC)
@pytest.mark.parametrize("cell", CELLS)
def test_every_task_trains_with_every_cell(task, cell):
    short, long = {"adding": (24, 26), "temporal-order": (77, 78), "noisy-sequence": (12, 12)}[task]
    small = {"steps": 2, "epochs": 1, "validation": 10, "test": 10}
    setting = replace(paper.setting(task, cell), min_length=short, max_length=long, **small)
    trainer, group, (epoch,) = train_all(setting, [0, 1])
    assert all(math.isfinite(value) for values in epoch.values.values() for value in values.values())
    assert list(epoch.values[0]) == ["train_loss", "valid_loss", "valid_accuracy"]
    assert loop.test(trainer, group)[0].keys() == {"loss", "accuracy"}


def test_learning_rates():
    def rates(**changes):
        adam = fresh_group(make_trainer(replace(SMALL, **changes), CPU), [0]).adam
        return {len(g["params"]): (g["lr"], g["weight_decay"]) for g in adam.param_groups}

    # The output layer has 2 parameters, a DMU of n = 2 has 5.
    assert rates(weight_decay=0.4) == {2: (0.02, 0.4), 5: (0.005, 0.1)}
    assert rates(module_rate="0.001") == {2: (0.02, 0.0), 5: (0.001, 0.0)}


def test_gamma_is_applied_after_every_epoch():
    setting = replace(SMALL, gamma=0.5, epochs=3)
    trainer = make_trainer(setting, CPU)
    group = fresh_group(trainer, [0])
    seen = [group.adam.param_groups[0]["lr"] for _ in loop.train(trainer, group)]
    assert seen == [0.02, 0.01, 0.005]


def test_a_diverging_run_disturbs_no_other():
    trainer, undisturbed, _ = train_all(SMALL, [0, 1, 2])
    group = fresh_group(trainer, [0, 1, 2])
    with torch.no_grad():
        group.weights["output.weight"][1] = math.nan
    epochs = list(loop.train(trainer, group))
    assert group.state == [RUNNING, DIVERGED, RUNNING]
    assert math.isnan(epochs[0].values[1]["valid_loss"])
    assert all(1 not in epoch.values for epoch in epochs[1:])
    assert group.rows == [0, 2]  # and it stopped costing anything
    assert loop.test(trainer, group)[1] is None
    for name, weight in undisturbed.weights.items():
        torch.testing.assert_close(group.weights[name], weight[[0, 2]], rtol=1e-4, atol=1e-6)


def test_early_stop_best_weights_and_dropping():
    setting = replace(SMALL, patience=2, stop_below=1e-3)
    trainer = make_trainer(setting, CPU)
    group = fresh_group(trainer, [10, 11, 12, 13])
    before = {name: weight.detach().clone() for name, weight in group.weights.items()}
    other, under = {"train_loss": 1.0, "valid_loss": 0.5}, {"train_loss": 1.0, "valid_loss": 1e-4}
    finish_epoch(trainer, group, [under, other, under, under], 0.0)
    assert group.state == [RUNNING] * 4
    with torch.no_grad():
        for weight in group.weights.values():
            weight += 1
    worse, better = {"train_loss": 1.0, "valid_loss": 2e-4}, {"train_loss": 1.0, "valid_loss": 0.4}
    epoch = finish_epoch(trainer, group, [worse, better, other, worse], 0.0)
    assert group.state == [REACHED, RUNNING, RUNNING, REACHED]
    assert group.under == [2, 0, 0, 2]
    assert group.best_epoch == [1, 2, 1, 1]
    assert group.rows == [1, 2]  # half of the stack was finished
    assert list(epoch.values) == [10, 11, 12, 13]
    for name, best in group.best.items():
        torch.testing.assert_close(best[[0, 2, 3]], before[name][[0, 2, 3]])
        torch.testing.assert_close(best[1], before[name][1] + 1)
    assert list(finish_epoch(trainer, group, [other, other], 0.0).values) == [11, 12]


def test_training_goes_on_after_dropping_as_if_the_others_had_never_been_there():
    setting = replace(SMALL, epochs=4)
    trainer, alone, _ = train_all(setting, [1])
    group = fresh_group(trainer, [0, 1, 2])
    epochs_left = loop.train(trainer, group)
    next(epochs_left)
    group.state[0] = group.state[2] = REACHED
    next(epochs_left)
    assert group.rows == [1]
    list(epochs_left)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(group.weights[name], weight, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_goes_on_bit_for_bit():
    trainer, whole, epochs = train_all(replace(SMALL, epochs=4), range(3))
    group = fresh_group(trainer, range(3))
    epochs_left = loop.train(trainer, group)
    next(epochs_left)
    next(epochs_left)
    tensors, info = checkpoint_of(group)
    again = group_from_checkpoint(trainer, {n: t.detach().clone() for n, t in tensors.items()}, info)
    rest = list(loop.train(trainer, again))
    assert [epoch.values for epoch in rest] == [epoch.values for epoch in epochs[2:]]
    for name, weight in whole.weights.items():
        assert torch.equal(again.weights[name], weight)
        assert torch.equal(again.best[name], whole.best[name])


def test_evaluation_in_pieces_is_evaluation_at_once(monkeypatch):
    trainer, group, _ = train_all(replace(SMALL, epochs=1), range(3))
    whole = loop.evaluate(trainer, group.weights, random_streams.VALIDATION, range(3))
    monkeypatch.setattr(loop, "EVALUATED_AT_ONCE", {"cpu": 3 * 30 * 2 * 17})
    torch.testing.assert_close(loop.evaluate(trainer, group.weights, random_streams.VALIDATION, range(3)), whole)


def test_opening_a_device_says_nothing(caplog):
    with caplog.at_level(logging.INFO):
        open_fabric("cpu", "bf16-mixed")
    assert not caplog.records


def test_double_precision():
    _, group, (epoch, *_) = train_all(replace(SMALL, precision="64-true"), [0])
    assert group.weights["output.weight"].dtype == torch.float64
    _, _, (single, *_) = train_all(SMALL, [0])
    assert epoch.values[0] == pytest.approx(single.values[0], rel=1e-3)


def test_adding_is_learnt():
    setting = replace(SMALL, steps=150, batch=32, epochs=6, stop_below=1e-3, patience=1)
    _, group, _ = train_all(setting, range(3), Machine("cpu"))
    assert min(group.best_loss) < 0.01


def test_unknown_devices_are_told_the_choices():
    with pytest.raises(ValueError, match="choose from auto, cpu, cuda"):
        make_trainer(SMALL, Machine("gpu"))


@needs_gpu
@pytest.mark.parametrize("task", SYNTHETIC)
@pytest.mark.parametrize("cell", CELLS)
def test_a_captured_step_equals_a_step(task, cell):
    setting = replace(paper.setting(task, cell), steps=20, epochs=2, gamma=0.5, validation=50)
    _, plain, eager = train_all(setting, range(5), Machine("cuda", graph=False))
    _, captured, replayed = train_all(setting, range(5), Machine("cuda"))
    for one, other in zip(eager, replayed, strict=True):
        for seed in range(5):
            assert other.values[seed] == pytest.approx(one.values[seed], rel=1e-3, abs=1e-5)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(captured.weights[name], weight, rtol=1e-3, atol=1e-4)


@needs_gpu
def test_a_gpu_run_follows_the_cpu_run():
    _, _, host = train_all(SMALL, range(3))
    _, _, device = train_all(SMALL, range(3), Machine("cuda"))
    for one, other in zip(host, device, strict=True):
        for seed in range(3):
            assert other.values[seed] == pytest.approx(one.values[seed], rel=1e-3, abs=1e-5)


def test_a_capture_leaves_everything_as_it_was(monkeypatch):
    """The order of a capture, with the GPU's part played by the CPU."""
    played = []

    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        def replay(self):
            played.append("replay")

    @contextmanager
    def not_executed(graph, pool):
        """A capture writes down what a step would do; nothing changes."""
        tensors = [*state_tensors(group).values(), steps.counter, steps.sums]
        before = [tensor.detach().clone() for tensor in tensors]
        yield
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", not_executed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    trainer = replace(make_trainer(replace(SMALL, gamma=0.5), CPU), graph=True)
    group, untouched = fresh_group(trainer, [0, 1]), fresh_group(trainer, [0, 1])
    steps = Steps(trainer, group)
    steps.counter.fill_(5)
    step = steps.step_of((30,))
    assert (steps.counter.item(), steps.sums.tolist()) == (5, [[0, 0], [0, 0]])
    for name, tensor in state_tensors(untouched).items():
        assert torch.equal(state_tensors(group)[name], tensor), name
    step()
    assert played == ["replay"]
    loop.set_learning_rates(group, 0.5)
    assert isinstance(group.adam.param_groups[0]["lr"], torch.Tensor)  # where a captured step reads it
    assert group.adam.param_groups[0]["lr"] == 0.01


def test_a_step_takes_its_number_from_a_tensor():
    """What a replayed graph relies on: fresh data comes from the counter, nothing from the host."""
    trainer = make_trainer(SMALL, CPU)
    group = fresh_group(trainer, [0, 1])
    steps = Steps(trainer, group)
    steps.feed.plan(3)
    steps.counter.fill_(1)
    steps.step((30,))
    assert steps.counter == 2
    number = 3 * SMALL.steps + 1
    x, lengths, target = trainer.task.make(
        random_streams.sequence_keys(torch.tensor([0, 1]), random_streams.TRAINING, number, 8)
    )
    fresh = fresh_group(trainer, [0, 1])
    output = loop.forward(trainer.network, fresh.weights, (x, lengths), (0, 0))
    torch.testing.assert_close(steps.sums[:, 0], trainer.task.losses(output, target).mean(1).detach())


@pytest.mark.parametrize("transition", [(), (4,), (3, 6, 5)])
@pytest.mark.parametrize("hidden", [(5,), (4, 3)])
def test_a_condition_that_is_kept_holds_after_every_step(transition, hidden):
    setting = replace(SMALL, transition=transition, hidden=hidden, lr=0.3, module_rate="same")
    assert outside(setting)
    assert not outside(replace(setting, condition="kept"))


def outside(setting):
    """Runs that do not satisfy the gradient condition, after a few steps."""
    trainer, group, _ = train_all(setting, range(3))
    found = []
    for row, seed in enumerate(group.seeds):
        network = trainer.task.network(setting)
        network.load_state_dict({name: weight[row].detach() for name, weight in group.weights.items()})
        if not dm.gradients.condition(network.recurrent).satisfied:
            found.append(seed)
    return found


def test_a_condition_that_is_satisfied_changes_nothing():
    network = dm.DMU(2, 4, transition=[3, 5])
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(0.3)
    weights = {name: torch.stack([weight, 10 * weight]) for name, weight in network.state_dict().items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    enforce_condition(network, weights)
    for name, weight in weights.items():
        assert torch.equal(weight[0], before[name][0])
        assert torch.equal(weight[1], before[name][1]) == (name != "weight_3_l0")


@pytest.mark.parametrize("depth", [2, 5, 10])
def test_a_condition_is_kept_where_the_norm_is_far_above_the_radius(depth):
    torch.manual_seed(0)
    network = dm.DMU(2, 5, transition=[5] * (depth - 1))
    weights = {name: 3 * weight.detach()[None] for name, weight in network.named_parameters()}
    weights["weight_hh_l0"][:, :, 0] *= 1e3
    weights["weight_hh_l0"][:, 0] *= 1e-3
    enforce_condition(network, weights)
    network.load_state_dict({name: weight[0] for name, weight in weights.items()})
    found = dm.gradients.condition(network)[0]
    assert found.satisfied
    assert found.gate.radius > 0.4  # not scaled down by more than it takes
    assert found.candidate.radius > 0.8


def test_large_checkpoints_are_written_less_often(monkeypatch):
    now = 0.0
    monkeypatch.setattr(studies.time, "monotonic", lambda: now)
    trainer = make_trainer(SMALL, CPU)
    group = fresh_group(trainer, [0])
    times = studies.CheckpointSchedule()
    assert times.due(trainer, group)  # the first epoch always
    with times.saving():
        now += 2.0
    now += studies.SAVING_SHARE * 2.0 - 1
    assert not times.due(trainer, group)
    group.epoch = SMALL.epochs
    assert times.due(trainer, group)  # and the last
    group.epoch, now = 1, now + 2
    assert times.due(trainer, group)


def test_recomputed_values_train_the_same_way():
    trainer, kept, _ = train_all(SMALL, [0, 1], Machine("cpu"))
    again, recomputed, _ = train_all(SMALL, [0, 1], Machine("cpu", recompute=True))
    assert (trainer.network.recurrent.recompute, again.network.recurrent.recompute) == (False, True)
    for name, weight in kept.weights.items():
        torch.testing.assert_close(recomputed.weights[name], weight, rtol=1e-3, atol=1e-5)
