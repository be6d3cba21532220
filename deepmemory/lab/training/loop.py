"""The training loop: trains R runs of one setting side by side.

The weights of all runs are stacked, (R, ...), and the network is called under ``torch.vmap``; Adam works
element by element, so every run trains as it would alone. The only input of a step is a counter on the
device, by which it gets a batch from the task's feed: on a GPU the step is captured as a CUDA graph, once
for every shape of batch, and replayed.

Read from top to bottom: :func:`train`, the steps of an epoch, evaluation, the end of an epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepmemory.lab.records import DIVERGED, REACHED, RUNNING
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import Shape, Tally, Task
from deepmemory.lab.training import distributed
from deepmemory.lab.training.condition import enforce_condition
from deepmemory.lab.training.cuda_graphs import capture
from deepmemory.lab.training.group import Group, Weights, drop_finished, state_tensors
from deepmemory.lab.training.random_streams import DROPOUT, TEST, TRAINING, VALIDATION, derive, sequence_keys
from deepmemory.lab.training.trainer import Trainer

DROP_FINISHED = 0.75  # the stack is made smaller when at most this share of it still trains
EVALUATED_AT_ONCE = {"cpu": 2**25, "cuda": 2**29}  # numbers in the largest tensor of an evaluation, all runs together


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch, by seed."""

    number: int  # from 1
    values: dict[int, dict[str, float]]  # of each series, such as valid_loss
    seconds: float


def train(trainer: Trainer, group: Group) -> Iterator[Epoch]:
    """Train until every run has stopped or used up its epochs; yields after every epoch, ready to be saved."""
    steps: Steps | None = None
    while group.training and group.epoch < trainer.setting.epochs:
        started = time.perf_counter()
        set_learning_rates(group, rate_factor(trainer.setting, group.epoch))
        if steps is None or steps.adam is not group.adam:  # at the start, and when the stack has become smaller
            steps = Steps(trainer, group)
        trained = steps.run_epoch(group.epoch)
        # The only place in an epoch where the host waits for the device.
        values = measure_epoch(trainer, group, trained) if trainer.fabric.is_global_zero else None
        if trainer.fabric.world_size > 1:
            values = distributed.broadcast(trainer.fabric, values)
        assert values is not None
        yield finish_epoch(trainer, group, values, time.perf_counter() - started)


def rate_factor(setting: Setting, epoch: int) -> float:
    """Factor of the learning rates in an epoch (from 0): product of warm-up, power of gamma and cosine decay."""
    factor = min(1.0, (epoch + 1) / (setting.warmup + 1)) * setting.gamma**epoch
    if setting.cosine:
        factor *= (1 + math.cos(math.pi * min(1.0, (epoch + 0.5) / setting.cosine))) / 2
    return factor


def set_learning_rates(group: Group, factor: float) -> None:
    """Set the learning rates to a multiple of the initial ones, in place if a captured optimiser reads them."""
    for parameters in group.adam.param_groups:
        rate = parameters["initial_lr"] * factor
        if isinstance(parameters["lr"], Tensor):
            parameters["lr"].fill_(rate)
        else:
            parameters["lr"] = rate


class Steps:
    """The optimiser steps of an epoch, for all runs of a stack."""

    def __init__(self, trainer: Trainer, group: Group) -> None:
        self.trainer, self.group, self.adam = trainer, group, group.adam
        device = trainer.fabric.device
        self.seeds = seeds = torch.tensor(group.stacked_seeds, device=device)
        self.shard = trainer.fabric.global_rank, trainer.fabric.world_size
        self.feed = trainer.task.feed(
            TRAINING, trainer.setting, seeds, trainer.setting.batch, trainer.dtype, self.shard
        )
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)  # of steps in this epoch
        self.sums = torch.zeros(len(seeds), 1 + len(trainer.task.measures), dtype=trainer.dtype, device=device)
        self.captured: dict[Shape, Callable[[], None]] = {}
        self.pool: Any = None  # of memory, shared by all captured steps, which never run at the same time

    def run_epoch(self, number: int) -> Tensor:
        """Train for one epoch (from 0); returns loss and measures, averaged over its batches, (R, measures)."""
        shapes = self.feed.plan(number)
        self.epoch.fill_(number)
        self.counter.zero_()
        self.sums.zero_()
        for shape in shapes:
            self.step_of(shape)()
        return self.sums / len(shapes)

    def step_of(self, shape: Shape) -> Callable[[], None]:
        """A step with batches of this shape, as a CUDA graph if the trainer captures steps."""
        if not self.trainer.graph:
            return lambda: self.step(shape)
        if shape not in self.captured:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            changed = [*state_tensors(self.group).values(), self.counter, self.sums, *self.feed.memory]
            self.captured[shape] = capture(lambda: self.step(shape), changed, self.pool)
        return self.captured[shape]

    def step(self, shape: Shape) -> None:
        """Make a batch, take the gradient of each run's loss, update the weights, add up the measures."""
        trainer, group = self.trainer, self.group
        leaves = list(group.weights.values())
        batch = self.feed.batch(self.counter, shape)
        with trainer.fabric.autocast():
            output = forward(trainer.network, group.weights, batch.inputs, self.feed.in_dims, self.dropout_keys())
            tally = trainer.task.tally(output, batch)
            totals = self.over_processes(tally)
            losses = tally.loss.sum(1) / totals.counts.sum(1)
        # No run's loss depends on another run's weights, so the gradient of the sum is each run's own.
        grads = self.summed(torch.autograd.grad(losses.sum(), leaves))
        if trainer.setting.clip:
            grads = clipped(grads, trainer.setting.clip)
        for weight, grad in zip(leaves, grads, strict=True):
            weight.grad = grad.contiguous()  # fused Adam reads it in the weight's own layout
        group.adam.step()
        with torch.no_grad():
            if trainer.setting.condition == "kept":
                enforce_condition(trainer.network, group.weights)
            self.feed.carry(output)
            self.sums.add_(measures_of(trainer.task, [totals]))
            self.counter.add_(1)

    def dropout_keys(self) -> Tensor | None:
        """A key for each run and sequence of this step, (R, B), from which dropout masks are drawn."""
        setting = self.trainer.setting
        if not setting.drops:
            return None
        first, step = self.shard
        of_epoch = derive(self.seeds, self.epoch)
        return sequence_keys(of_epoch, DROPOUT, self.counter, setting.batch)[:, first::step]

    def over_processes(self, tally: Tally) -> Tally:
        """The sums over all sequences of the batch, in all processes."""
        if self.trainer.fabric.world_size == 1:
            return tally
        parts = [part.detach().sum(1, keepdim=True) for part in tally if isinstance(part, Tensor)]
        loss, counts, *correct = self.summed(parts)
        return Tally(loss, counts, correct[0] if correct else None)

    def summed(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors summed over all processes, in one exchange."""
        if self.trainer.fabric.world_size == 1:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.sum_over_all(self.trainer.fabric, flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def clipped(grads: Sequence[Tensor], longest: float) -> list[Tensor]:
    """Gradients (R, ...), scaled down for each run whose gradient of all weights has a norm above ``longest``."""
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)  # (R,)
    factors = longest / norms.clamp(min=longest)
    if len(factors) == 1:
        return list(torch._foreach_mul(list(grads), factors[0]))  # all at once
    return [grad * factors.view(-1, *[1] * (grad.dim() - 1)) for grad in grads]


def forward(
    network: nn.Module,
    weights: Weights,
    inputs: tuple[Any, ...],
    in_dims: tuple[int | None, ...],
    keys: Tensor | None = None,
) -> Any:
    """The outputs of all runs, (R, B, ...), each with its own weights, and its own inputs where ``in_dims`` is 0.

    ``keys`` (R, B) are the keys of dropout masks.
    """

    def one_run(weights: Weights, inputs: tuple[Any, ...], dropout: dict[str, Tensor]) -> Any:
        return functional_call(network, weights, inputs, dropout)

    dims = tuple(None if value is None else dim for value, dim in zip(inputs, in_dims, strict=True))
    return torch.vmap(one_run, in_dims=(0, dims, 0))(weights, inputs, {} if keys is None else {"keys": keys})


def measure_epoch(trainer: Trainer, group: Group, trained: Tensor) -> list[dict[str, float]]:
    """The value of each series for every run of the stack; ``trained`` is what :meth:`Steps.run_epoch` returned."""
    valid = evaluate(trainer, group.weights, VALIDATION, group.stacked_seeds)
    if trainer.task.every_epoch:
        test = evaluate(trainer, group.weights, TEST, group.stacked_seeds)
        values = torch.stack((trained, valid, test), 2).flatten(1)
    else:
        values = torch.cat((trained[:, :1], valid), 1)
    return [dict(zip(trainer.series, of_run, strict=True)) for of_run in values.tolist()]


def test(trainer: Trainer, group: Group) -> dict[int, dict[str, float] | None]:
    """Loss and measures of each run's best weights on the test set; None for a run that never had a finite loss."""
    names = ("loss", *trainer.task.measures)
    measured = evaluate(trainer, group.best, TEST, group.seeds).tolist()
    return {
        seed: dict(zip(names, values, strict=True)) if best is not None else None
        for seed, best, values in zip(group.seeds, group.best_epoch, measured, strict=True)
    }


@torch.no_grad()
def evaluate(trainer: Trainer, weights: Weights, split: int, seeds: Sequence[int]) -> Tensor:
    """Loss and measures (R, measures) of the runs with these seeds on one split."""
    task, device, setting = trainer.task, trainer.fabric.device, trainer.setting
    room = EVALUATED_AT_ONCE["cuda" if device.type == "cuda" else "cpu"]
    batches = max(1, room // (len(seeds) * task.largest_tensor * setting.batch))
    feed = task.feed(split, setting, torch.tensor(seeds, device=device), batches * setting.batch, trainer.dtype)
    trainer.network.eval()
    tallies = []
    for step, shape in enumerate(feed.plan(0)):
        batch = feed.batch(step, shape)
        with trainer.fabric.autocast():
            output = forward(trainer.network, weights, batch.inputs, feed.in_dims)
            tallies.append(task.tally(output, batch))
        feed.carry(output)
    trainer.network.train()
    return measures_of(task, tallies, setting.batch)


def joined(tallies: Sequence[Tally]) -> Tally:
    """The sequences of several batches in a row, (R, N)."""
    correct = [tally.correct for tally in tallies if tally.correct is not None]
    return Tally(
        torch.cat([tally.loss for tally in tallies], 1),
        torch.cat([tally.counts for tally in tallies], 1),
        torch.cat(correct, 1) if correct else None,
    )


def measures_of(task: Task, tallies: Sequence[Tally], batch: int | None = None) -> Tensor:
    """Loss and measures of each run, (R, measures), from sums over sequences.

    A perplexity is the mean over batches of exp(loss of the batch); every other value is a ratio of sums.
    """
    usual = joined([tally for tally in tallies if tally.only is None])
    values = [usual.loss.sum(1) / usual.counts.sum(1)]
    for name in task.measures:
        own = [tally for tally in tallies if tally.only == name]
        tally = joined(own) if own else usual
        if name == "perplexity":
            losses, counts = (in_batches(sums, batch) for sums in (tally.loss, tally.counts))
            some = counts > 0  # a batch may consist of padding
            values.append(((losses / counts.clamp(min=1)).exp() * some).sum(1) / some.sum(1))
        else:
            assert tally.correct is not None
            values.append(tally.correct.sum(1) / tally.counts.sum(1))
    return torch.stack(values, 1)


def in_batches(sums: Tensor, batch: int | None) -> Tensor:
    """(R, N) to sums over every ``batch`` consecutive sequences, (R, batches); None puts all in one batch."""
    if batch is None:
        return sums.sum(1, keepdim=True)
    return torch.stack([part.sum(1) for part in sums.split(batch, 1)], 1)


def finish_epoch(trainer: Trainer, group: Group, values: list[dict[str, float]], seconds: float) -> Epoch:
    """Decide which runs have stopped, copy the best weights, and drop finished runs from the stack."""
    setting = trainer.setting
    group.epoch += 1
    recorded: dict[int, dict[str, float]] = {}
    improved: list[tuple[int, int]] = []  # place in the stack, run
    for place, (run, of_run) in enumerate(zip(group.rows, values, strict=True)):
        if group.state[run] != RUNNING:
            continue  # finished, but still in the stack, where it costs little
        recorded[group.seeds[run]] = of_run
        train_loss, valid_loss = of_run["train_loss"], of_run["valid_loss"]
        if not (math.isfinite(train_loss) and math.isfinite(valid_loss)):
            group.state[run] = DIVERGED
            continue
        if valid_loss < group.best_loss[run]:
            group.best_loss[run], group.best_epoch[run] = valid_loss, group.epoch
            improved.append((place, run))
        group.under[run] = group.under[run] + 1 if valid_loss < setting.stop_below else 0
        if group.under[run] >= setting.patience:
            group.state[run] = REACHED
    if improved:
        device = trainer.fabric.device
        places, runs = (torch.tensor(column, device=device) for column in zip(*improved, strict=True))
        for name, weight in group.weights.items():
            group.best[name].index_copy_(0, runs, weight.detach().index_select(0, places))
    if 0 < len(group.training) <= DROP_FINISHED * len(group.rows):
        drop_finished(trainer, group)
    return Epoch(group.epoch, recorded, seconds)
