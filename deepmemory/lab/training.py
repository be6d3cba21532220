"""Trains R runs of one setting side by side.

The weights of all runs are stacked, (R, ...), and the network is called under ``torch.vmap``; Adam works
element by element, so every run follows the course it would take alone. A step asks the task for fresh
data by (seed of the run, number of the step), so it needs no input: on a GPU it is captured once as a
CUDA graph and replayed.

Read :func:`train` first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.func import functional_call

import deepmemory as dm
from deepmemory.lab import draws
from deepmemory.lab.network import Network, initial_weights
from deepmemory.lab.records import DIVERGED, REACHED, RUNNING, SPENT
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.tasks import Task, task_of

DROP_FINISHED = 0.75  # the stack is made smaller when at most this part of it is still training
EVALUATED_AT_ONCE = 2**26  # numbers in the input of one evaluation call, all runs together
WARM_UP = 3  # steps before a capture: kernels get compiled, memory gets its place

Weights = dict[str, Tensor]


@dataclass
class Group:
    """Runs that train side by side: all that changes while they do, and all that a checkpoint holds."""

    seeds: list[int]
    epoch: int  # finished ones
    rows: list[int]  # which of the runs the stack holds
    weights: Weights  # of the stack, (len(rows), ...)
    adam: torch.optim.Adam  # its state is stacked the same way
    best: Weights  # of all runs, (R, ...): at the lowest validation loss so far
    best_loss: list[float]
    best_epoch: list[int | None]
    under: list[int]  # epochs in a row with a validation loss under stop_below
    state: list[str]

    @property
    def training(self) -> list[int]:
        """Runs that are neither stopped nor diverged."""
        return [run for run, state in enumerate(self.state) if state == RUNNING]


@dataclass(frozen=True)
class Epoch:
    """What one epoch brought, by seed."""

    number: int  # from 1
    values: dict[int, list[float]]  # train_loss, valid_loss, then metrics
    seconds: float


@dataclass(frozen=True)
class Trainer:
    """What stays the same while a group trains."""

    setting: Setting
    task: Task
    network: Network  # its own weights are never used, only its shape
    fabric: Fabric
    dtype: torch.dtype
    graph: bool

    @property
    def series(self) -> list[str]:
        """Names of an epoch's values."""
        one = torch.zeros(1, self.task.output_size)
        metrics = self.task.metrics(one, torch.zeros(1, dtype=torch.int64))
        return ["train_loss", "valid_loss", *(f"valid_{name}" for name in metrics)]


def make_trainer(setting: Setting, machine: Machine = Machine()) -> Trainer:  # noqa: B008 (frozen)
    """Pick device and precision; TF32 stays off, the losses studied here go below its resolution."""
    fabric = open_fabric(machine.device, setting.precision)
    if machine.threads:
        torch.set_num_threads(machine.threads)
    if fabric.device.type == "cuda":
        torch.cuda.set_device(fabric.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    task = task_of(setting)
    network = Network(setting, task, machine.engine)
    with fabric.init_tensor():
        dtype = torch.empty(0).dtype
    return Trainer(setting, task, network, fabric, dtype, machine.graph and fabric.device.type == "cuda")


def open_fabric(device: str, precision: str) -> Fabric:
    """Lightning's Fabric on one device."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise ValueError(f"unknown device {device!r}; choose from auto, cpu, cuda, cuda:1 (any number), mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA GPU that torch can use; choose cpu or auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device mps: this machine has no Apple GPU that torch can use; choose cpu or auto")
    devices: Any = [int(index)] if index and kind == "cuda" else 1
    return Fabric(accelerator=kind, devices=devices, precision=precision)  # type: ignore[arg-type]


def train(trainer: Trainer, group: Group) -> Iterator[Epoch]:
    """Train until every run has stopped or used up its epochs; yields after every epoch, ready to be saved."""
    setting, device = trainer.setting, trainer.fabric.device
    stacked, step = None, None
    while group.training and group.epoch < setting.epochs:
        started = time.perf_counter()
        for settings in group.adam.param_groups:
            set_rate(settings, settings["initial_lr"] * setting.gamma**group.epoch)
        if stacked is not group.adam:  # at the start, and when the stack has become smaller
            seeds = torch.tensor([group.seeds[row] for row in group.rows], device=device)
            counter = torch.zeros((), dtype=torch.int64, device=device)
            train_loss = torch.zeros(len(group.rows), dtype=trainer.dtype, device=device)
            stacked, step = group.adam, make_step(trainer, group, seeds, counter, train_loss)
        counter.fill_(group.epoch * setting.steps)
        train_loss.zero_()
        assert step is not None
        for _ in range(setting.steps):
            step()
        measured = evaluate(trainer, group.weights, draws.VALIDATION, setting.validation)
        # The only place in an epoch where the host waits for the device.
        values = torch.stack((train_loss / setting.steps, *measured), 1).tolist()
        yield finish_epoch(trainer, group, values, time.perf_counter() - started)


def make_step(trainer: Trainer, group: Group, seeds: Tensor, counter: Tensor, train_loss: Tensor) -> Callable[[], None]:
    """One optimiser step of every run in the stack; adds each run's loss to ``train_loss`` and 1 to ``counter``."""
    task, weights, adam = trainer.task, group.weights, group.adam
    leaves = list(weights.values())

    def step() -> None:
        keys = draws.sequence_keys(seeds, draws.TRAINING, counter, trainer.setting.batch)
        x, lengths, target = task.make(keys, trainer.dtype)
        with trainer.fabric.autocast():
            output = forward(trainer.network, weights, x, lengths)
            losses = task.losses(output, target).mean(1)
        # No run's loss depends on another run's weights, so the gradient of the sum is each run's own.
        for weight, grad in zip(leaves, torch.autograd.grad(losses.sum(), leaves), strict=True):
            weight.grad = grad.contiguous()  # fused Adam reads it in the weight's own layout
        adam.step()
        train_loss.add_(losses.detach())
        counter.add_(1)

    if not trainer.graph:
        return step
    return capture(step, [*state_tensors(group).values(), counter, train_loss])


def capture(step: Callable[[], None], changed: list[Tensor]) -> Callable[[], None]:
    """The step as a CUDA graph; ``changed`` are the tensors it works on, which come out as they went in."""
    before = [tensor.detach().clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        raise RuntimeError(
            f"a training step could not be captured as a CUDA graph; try --no-graph ({error})"
        ) from error
    with torch.no_grad():
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    def replay(_read: tuple = (step, changed)) -> None:  # the graph reads memory that must live as long as it does
        graph.replay()

    return replay


def forward(network: Network, weights: Weights, x: Tensor, lengths: Tensor | None, shared: bool = False) -> Tensor:
    """All runs' outputs (R, B, outputs), each with its own weights; ``shared`` input is the same for all."""

    def one_run(weights: Weights, x: Tensor, lengths: Tensor | None) -> Tensor:
        return functional_call(network, weights, (x, lengths))

    of_data = None if shared else 0
    return torch.vmap(one_run, in_dims=(0, of_data, None if lengths is None else of_data))(weights, x, lengths)


@torch.no_grad()
def evaluate(trainer: Trainer, weights: Weights, stream: int, count: int) -> list[Tensor]:
    """Mean loss and mean metrics (R,) on ``count`` sequences that are the same for every run and study."""
    task, device = trainer.task, trainer.fabric.device
    runs = len(next(iter(weights.values())))
    at_once = max(1, EVALUATED_AT_ONCE // (runs * task.longest * task.input_size))
    parts: list[list[Tensor]] = []
    anyone = torch.zeros(1, dtype=torch.int64, device=device)
    for first in range(0, count, at_once):
        keys = draws.sequence_keys(anyone, stream, 0, min(at_once, count - first), first)
        x, lengths, target = task.make(keys, trainer.dtype)
        with trainer.fabric.autocast():
            output = forward(trainer.network, weights, x[0], None if lengths is None else lengths[0], shared=True)
            target = target.expand(runs, -1)
            parts.append([task.losses(output, target), *task.metrics(output, target).values()])
    return [torch.cat(series, 1).mean(1) for series in zip(*parts, strict=True)]


def finish_epoch(trainer: Trainer, group: Group, values: list[list[float]], seconds: float) -> Epoch:
    """Decide what becomes of each run, keep the best weights, and drop finished runs from the stack."""
    setting = trainer.setting
    group.epoch += 1
    recorded: dict[int, list[float]] = {}
    improved: list[tuple[int, int]] = []  # place in the stack, run
    for place, (run, of_run) in enumerate(zip(group.rows, values, strict=True)):
        if group.state[run] != RUNNING:
            continue  # finished, and still in the stack only because it costs little there
        recorded[group.seeds[run]] = of_run
        train_loss, valid_loss = of_run[:2]
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


def test(trainer: Trainer, group: Group) -> dict[int, list[float] | None]:
    """Loss and metrics of each run's best weights on the test set; None for a run that never had a finite loss."""
    measured = torch.stack(evaluate(trainer, group.best, draws.TEST, trainer.setting.test), 1).tolist()
    return {
        seed: values if best is not None else None
        for seed, best, values in zip(group.seeds, group.best_epoch, measured, strict=True)
    }


def end_states(group: Group) -> dict[int, str]:
    """States by seed once a group has ended: what still trains has used up its epochs."""
    return {seed: SPENT if state == RUNNING else state for seed, state in zip(group.seeds, group.state, strict=True)}


# --- making a group, fresh, smaller or from a checkpoint ------------------------------------------------


def fresh_group(trainer: Trainer, seeds: Sequence[int]) -> Group:
    """Runs at epoch 0, each with the initial weights of its seed."""
    weights = to_device(trainer, initial_weights(trainer.setting, trainer.task, list(seeds)))
    count = len(seeds)
    return Group(
        seeds=list(seeds),
        epoch=0,
        rows=list(range(count)),
        weights=weights,
        adam=make_adam(trainer, weights),
        best={name: weight.detach().clone() for name, weight in weights.items()},
        best_loss=[math.inf] * count,
        best_epoch=[None] * count,
        under=[0] * count,
        state=[RUNNING] * count,
    )


def to_device(trainer: Trainer, weights: Weights) -> Weights:
    """Leaves of the graph, where and how the trainer computes."""
    device, dtype = trainer.fabric.device, trainer.dtype
    return {name: w.to(device, dtype, copy=True).requires_grad_() for name, w in weights.items()}


def make_adam(trainer: Trainer, weights: Weights, state: dict[str, Tensor] | None = None) -> torch.optim.Adam:
    """Adam over the stack, with the rates of ``dm.parameter_groups`` and the state given, else a new one."""
    setting, device = trainer.setting, trainer.fabric.device
    names = {parameter: name for name, parameter in trainer.network.named_parameters()}
    groups = dm.parameter_groups(trainer.network, setting.lr, setting.weight_decay)
    if setting.module_rate != "formula":
        for of_module in groups[1:]:  # the first group is the output layer
            of_module["lr"] = float(setting.module_rate)
    for group in groups:
        group["params"] = [weights[names[parameter]] for parameter in group["params"]]
        group["initial_lr"] = group["lr"]
        if trainer.graph:  # a captured step reads the rate from memory
            group["lr"] = torch.tensor(group["lr"], device=device)
    adam = torch.optim.Adam(groups, fused=device.type in ("cpu", "cuda"), capturable=trainer.graph)
    for name, weight in weights.items():
        if state is None:
            adam.state[weight] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(weight, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
            }
        else:
            adam.state[weight] = {
                kind: state[f"adam.{name}.{kind}"].to(device, copy=True) for kind in ("step", "exp_avg", "exp_avg_sq")
            }
    return adam


def set_rate(settings: dict[str, Any], lr: float) -> None:
    """Change the learning rate where the optimiser, captured or not, reads it."""
    if isinstance(settings["lr"], Tensor):
        settings["lr"].fill_(lr)
    else:
        settings["lr"] = lr


def state_tensors(group: Group) -> dict[str, Tensor]:
    """What a step changes, by name: stacked weights and Adam's state."""
    tensors = {f"weights.{name}": weight for name, weight in group.weights.items()}
    for name, weight in group.weights.items():
        tensors |= {f"adam.{name}.{kind}": value for kind, value in group.adam.state[weight].items()}
    return tensors


def drop_finished(trainer: Trainer, group: Group) -> None:
    """Leave only runs that still train in the stack."""
    keep = [place for place, run in enumerate(group.rows) if group.state[run] == RUNNING]
    index = torch.tensor(keep, device=trainer.fabric.device)
    tensors = {
        name: tensor.detach() if tensor.dim() == 0 else tensor.detach().index_select(0, index)
        for name, tensor in state_tensors(group).items()
    }
    group.rows = [group.rows[place] for place in keep]
    restore(trainer, group, tensors)


def restore(trainer: Trainer, group: Group, tensors: dict[str, Tensor]) -> None:
    """Put a stack and its optimiser state into a group."""
    prefix = "weights."
    stacked = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    group.weights = to_device(trainer, stacked)
    group.adam = make_adam(trainer, group.weights, tensors)


def checkpoint_of(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything needed to go on, as tensors and as plain numbers."""
    tensors = state_tensors(group) | {f"best.{name}": weight for name, weight in group.best.items()}
    tensors["best_loss"] = torch.tensor(group.best_loss, dtype=torch.float64)
    names = ("seeds", "epoch", "rows", "best_epoch", "under", "state")
    return tensors, {name: getattr(group, name) for name in names}


def group_from_checkpoint(trainer: Trainer, tensors: dict[str, Tensor], info: dict[str, Any]) -> Group:
    """The reverse of :func:`checkpoint_of`."""
    group = fresh_group(trainer, info["seeds"])
    for name, value in info.items():
        setattr(group, name, value)
    group.best_loss = tensors["best_loss"].tolist()
    group.best = {name: tensors[f"best.{name}"].to(weight.device) for name, weight in group.best.items()}
    restore(trainer, group, tensors)
    return group
