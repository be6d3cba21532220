"""Trains R runs of one setting side by side.

The weights of all runs are stacked, (R, ...), and the network is called under ``torch.vmap``; Adam works
element by element, so every run follows the course it would take alone. A step asks the task's feed for
the batch of a number that lies on the device, so it needs no input: on a GPU it is captured once for every
shape of batch as a CUDA graph, and replayed.

Read :func:`train` first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.func import functional_call

import deepmemory as dm
from deepmemory.lab.records import DIVERGED, REACHED, RUNNING, SPENT, check_network
from deepmemory.lab.settings import SHARED_RATE, Machine, Setting
from deepmemory.lab.tasks import Shape, Tally, Task, series_of, task_of
from deepmemory.lab.training import distributed, random_streams
from deepmemory.lab.training.network import initial_weights

DROP_FINISHED = 0.75  # the stack is made smaller when at most this part of it is still training
EVALUATED_AT_ONCE = {"cpu": 2**25, "cuda": 2**29}  # numbers in the largest tensor of an evaluation, all runs together
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
    values: dict[int, dict[str, float]]  # of each series, such as valid_loss
    seconds: float


@dataclass(frozen=True)
class Trainer:
    """What stays the same while a group trains."""

    setting: Setting
    task: Task
    network: nn.Module  # its own weights are never used, only its shape
    fabric: Fabric
    dtype: torch.dtype
    graph: bool

    @property
    def series(self) -> tuple[str, ...]:
        """Names of an epoch's values."""
        return series_of(self.setting.task)


def make_trainer(setting: Setting, machine: Machine = Machine()) -> Trainer:  # noqa: B008 (frozen)
    """Pick device and precision; TF32 stays off, the losses studied here go below its resolution."""
    fabric = open_fabric(machine.device, setting.precision, machine.devices, machine.nodes)
    if machine.threads:
        torch.set_num_threads(machine.threads)
    if fabric.device.type == "cuda":
        torch.cuda.set_device(fabric.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    task = task_of(setting, machine.data)
    network = task.network(setting, machine.engine)
    for layer in network.modules():
        if isinstance(layer, dm.DMU | dm.RHN | dm.RNN | dm.GRU | dm.LSTM):
            layer.recompute = machine.recompute
    with fabric.init_tensor():
        dtype = torch.empty(0).dtype
    graph = machine.graph and fabric.device.type == "cuda" and fabric.world_size == 1
    return Trainer(setting, task, network, fabric, dtype, graph)


@lru_cache(maxsize=1)
def open_fabric(device: str, precision: str, devices: int = 1, nodes: int = 1) -> Fabric:
    """Lightning's Fabric on one device, or on several processes that it starts or finds started."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise ValueError(f"unknown device {device!r}; choose from auto, cpu, cuda, cuda:1 (any number), mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA GPU that torch can use; choose cpu or auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device mps: this machine has no Apple GPU that torch can use; choose cpu or auto")
    several = devices * nodes > 1
    if several and index:
        raise ValueError(f"device {device!r} is one device; leave the number out to use {devices * nodes}")
    chosen: Any = [int(index)] if index and kind == "cuda" else devices
    how: dict[str, Any] = {"strategy": distributed.strategy(), "num_nodes": nodes} if several else {}
    fabric = Fabric(accelerator=kind, devices=chosen, precision=precision, **how)  # type: ignore[arg-type]
    if several:
        distributed.launch(fabric)
    return fabric


def train(trainer: Trainer, group: Group) -> Iterator[Epoch]:
    """Train until every run has stopped or used up its epochs; yields after every epoch, ready to be saved."""
    setting = trainer.setting
    stacked, steps = None, None
    while group.training and group.epoch < setting.epochs:
        started = time.perf_counter()
        for settings in group.adam.param_groups:
            set_rate(settings, settings["initial_lr"] * setting.gamma**group.epoch)
        if stacked is not group.adam:  # at the start, and when the stack has become smaller
            stacked, steps = group.adam, Steps(trainer, group)
        assert steps is not None
        trained = steps.epoch(group.epoch)
        # The only place in an epoch where the host waits for the device.
        values = measure_epoch(trainer, group, trained) if trainer.fabric.is_global_zero else None
        if trainer.fabric.world_size > 1:
            values = distributed.broadcast(trainer.fabric, values)
        assert values is not None
        yield finish_epoch(trainer, group, values, time.perf_counter() - started)


def measure_epoch(trainer: Trainer, group: Group, trained: Tensor) -> list[dict[str, float]]:
    """The value of each series for every run of the stack; ``trained`` is what its training batches gave on average."""
    seeds = [group.seeds[row] for row in group.rows]
    valid = evaluate(trainer, group.weights, random_streams.VALIDATION, seeds)
    if trainer.task.every_epoch:
        test = evaluate(trainer, group.weights, random_streams.TEST, seeds)
        values = torch.stack((trained, valid, test), 2).flatten(1)
    else:
        values = torch.cat((trained[:, :1], valid), 1)
    return [dict(zip(trainer.series, of_run, strict=True)) for of_run in values.tolist()]


class Steps:
    """One optimiser step after another for all runs of a stack."""

    def __init__(self, trainer: Trainer, group: Group) -> None:
        self.trainer, self.group = trainer, group
        device = trainer.fabric.device
        seeds = torch.tensor([group.seeds[row] for row in group.rows], device=device)
        shard = trainer.fabric.global_rank, trainer.fabric.world_size
        batch = trainer.setting.batch
        self.feed = trainer.task.feed(random_streams.TRAINING, trainer.setting, seeds, batch, trainer.dtype, shard)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)  # of steps in this epoch
        self.sums = torch.zeros(len(seeds), 1 + len(trainer.task.measures), dtype=trainer.dtype, device=device)
        self.captured: dict[Shape, Callable[[], None]] = {}
        self.pool: Any = None  # of memory, for all captured steps: they never run at the same time

    def epoch(self, number: int) -> Tensor:
        """Train for an epoch (from 0); what the batches measured on average, (R, measures)."""
        shapes = self.feed.plan(number)
        self.counter.zero_()
        self.sums.zero_()
        for shape in shapes:
            self.step_of(shape)()
        return self.sums / len(shapes)

    def step_of(self, shape: Shape) -> Callable[[], None]:
        """A step with batches of this shape, captured if the trainer wants it so."""
        if not self.trainer.graph:
            return lambda: self.step(shape)
        if shape not in self.captured:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            changed = [*state_tensors(self.group).values(), self.counter, self.sums, *self.feed.memory]
            self.captured[shape] = capture(lambda: self.step(shape), changed, self.pool)
        return self.captured[shape]

    def step(self, shape: Shape) -> None:
        """Make a batch, take the gradient of each run's loss, change the weights, count."""
        trainer, group = self.trainer, self.group
        leaves = list(group.weights.values())
        batch = self.feed.batch(self.counter, shape)
        with trainer.fabric.autocast():
            output = forward(trainer.network, group.weights, batch.inputs, self.feed.in_dims)
            tally = trainer.task.tally(output, batch)
            totals = self.over_processes(tally)
            losses = tally.loss.sum(1) / totals.counts.sum(1)
        # No run's loss depends on another run's weights, so the gradient of the sum is each run's own.
        grads = torch.autograd.grad(losses.sum(), leaves)
        for weight, grad in zip(leaves, self.summed(grads), strict=True):
            weight.grad = grad.contiguous()  # fused Adam reads it in the weight's own layout
        group.adam.step()
        with torch.no_grad():
            if trainer.setting.condition == "kept":
                keep_condition(trainer.network, group.weights)
            self.feed.keep(output)
            self.sums.add_(measures_of(trainer.task, totals))
            self.counter.add_(1)

    def over_processes(self, tally: Tally) -> Tally:
        """Sums over all sequences of the batch, wherever they are."""
        if self.trainer.fabric.world_size == 1:
            return tally
        parts = [part.detach().sum(1, keepdim=True) for part in tally if part is not None]
        return Tally(*self.summed(parts))

    def summed(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Over all processes, in one exchange."""
        if self.trainer.fabric.world_size == 1:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.sum_over_all(self.trainer.fabric, flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def keep_condition(network: nn.Module, weights: Weights) -> None:
    """Scale the rows of z and of the candidate down until the eigenvalues of both products are inside their limits.

    The radius is bounded from above by ``norm(M ** 64) ** (1 / 64)``, which asks nothing of the host.
    """
    for name, dmu in network.named_modules():
        if not isinstance(dmu, dm.DMU):
            continue
        prefix = f"{name}." if name else ""
        for layer in range(dmu.num_layers):
            later = [weights[f"{prefix}weight_{index}_l{layer}"] for index in range(2, dmu.depth + 1)]
            *inner, last = [weights[f"{prefix}weight_hh_l{layer}"], *later]
            limits = (dm.gradients.GATE_LIMIT, dm.gradients.CANDIDATE_LIMIT)
            for rows, limit in zip(last.chunk(2, 1), limits, strict=True):
                power = rows.double()  # a product whose norm is far above its radius leaves float32 few digits
                for matrix in reversed(inner):
                    power = power @ matrix.double()  # [R, d, d]
                log_radius = torch.zeros_like(power[:, :1, :1])
                for squarings in range(7):
                    norm = torch.linalg.matrix_norm(power)[:, None, None].clamp(min=1e-300)
                    log_radius += norm.log() / 2**squarings
                    power = (power / norm) @ (power / norm)
                rows.mul_((0.999 * limit * torch.exp(-log_radius)).clamp(max=1).to(rows.dtype))


def capture(step: Callable[[], None], changed: list[Tensor], pool: Any = None) -> Callable[[], None]:
    """The step as a CUDA graph; ``changed`` are the tensors it works on, which come out as they went in."""
    before = [tensor.detach().clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                with torch.no_grad():  # each time: the step after an epoch's last one has no data
                    for tensor, value in zip(changed, before, strict=True):
                        tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
    except RuntimeError as error:
        raise RuntimeError(
            f"a training step could not be captured as a CUDA graph; try --no-graph ({error})"
        ) from error

    def replay(_read: tuple = (step, changed)) -> None:  # the graph reads memory that must live as long as it does
        graph.replay()

    return replay


def forward(network: nn.Module, weights: Weights, inputs: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> Any:
    """All runs' outputs (R, B, ...), each with its own weights, and its own inputs where ``in_dims`` is 0."""

    def one_run(weights: Weights, inputs: tuple[Any, ...]) -> Any:
        return functional_call(network, weights, inputs)

    dims = tuple(None if value is None else dim for value, dim in zip(inputs, in_dims, strict=True))
    return torch.vmap(one_run, in_dims=(0, dims))(weights, inputs)


@torch.no_grad()
def evaluate(trainer: Trainer, weights: Weights, split: int, seeds: Sequence[int]) -> Tensor:
    """Loss and measures (R, measures) of the runs with these seeds on one split."""
    task, device, setting = trainer.task, trainer.fabric.device, trainer.setting
    room = EVALUATED_AT_ONCE["cuda" if device.type == "cuda" else "cpu"]
    batches = max(1, room // (len(seeds) * task.numbers * setting.batch))
    feed = task.feed(split, setting, torch.tensor(seeds, device=device), batches * setting.batch, trainer.dtype)
    trainer.network.eval()
    tallies = []
    for step, shape in enumerate(feed.plan(0)):
        batch = feed.batch(step, shape)
        with trainer.fabric.autocast():
            output = forward(trainer.network, weights, batch.inputs, feed.in_dims)
            tallies.append(task.tally(output, batch))
        feed.keep(output)
    trainer.network.train()
    return measures_of(task, joined(tallies), setting.batch)


def joined(tallies: Sequence[Tally]) -> Tally:
    """Sequences of several batches in a row, (R, N)."""
    right = [tally.correct for tally in tallies if tally.correct is not None]
    return Tally(
        torch.cat([tally.loss for tally in tallies], 1),
        torch.cat([tally.counts for tally in tallies], 1),
        torch.cat(right, 1) if right else None,
    )


def measures_of(task: Task, tally: Tally, batch: int | None = None) -> Tensor:
    """Loss and measures of each run, (R, measures), from sums (R, N) over N sequences.

    A perplexity is the mean over batches of exp(loss of the batch); everything else is over all that counts.
    """
    count = tally.counts.sum(1)
    values = [tally.loss.sum(1) / count]
    for name in task.measures:
        if name == "perplexity":
            losses, counts = (in_batches(sums, batch) for sums in (tally.loss, tally.counts))
            some = counts > 0  # a batch may be padding alone
            values.append(((losses / counts.clamp(min=1)).exp() * some).sum(1) / some.sum(1))
        else:
            assert tally.correct is not None
            values.append(tally.correct.sum(1) / count)
    return torch.stack(values, 1)


def in_batches(sums: Tensor, batch: int | None) -> Tensor:
    """(R, N) to the sums of every ``batch`` in a row, (R, batches); None is all in one."""
    if batch is None:
        return sums.sum(1, keepdim=True)
    return torch.stack([part.sum(1) for part in sums.split(batch, 1)], 1)


def finish_epoch(trainer: Trainer, group: Group, values: list[dict[str, float]], seconds: float) -> Epoch:
    """Decide what becomes of each run, keep the best weights, and drop finished runs from the stack."""
    setting = trainer.setting
    group.epoch += 1
    recorded: dict[int, dict[str, float]] = {}
    improved: list[tuple[int, int]] = []  # place in the stack, run
    for place, (run, of_run) in enumerate(zip(group.rows, values, strict=True)):
        if group.state[run] != RUNNING:
            continue  # finished, and still in the stack only because it costs little there
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


def test(trainer: Trainer, group: Group) -> dict[int, dict[str, float] | None]:
    """Loss and measures of each run's best weights on the test set; None for a run that never had a finite loss."""
    names = ("loss", *trainer.task.measures)
    measured = evaluate(trainer, group.best, random_streams.TEST, group.seeds).tolist()
    return {
        seed: dict(zip(names, values, strict=True)) if best is not None else None
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
    for of_module in groups[1:]:  # the first group is everything that is no DMU
        if setting.module_rate == SHARED_RATE:
            of_module |= {"lr": setting.lr, "weight_decay": setting.weight_decay}
        elif setting.module_rate != "formula":
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


NUMBERS = ("seeds", "epoch", "rows", "best_epoch", "under", "state")  # of a group, that a checkpoint notes


def checkpoint_of(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything needed to go on, as tensors and as plain numbers."""
    tensors = state_tensors(group) | {f"best.{name}": weight for name, weight in group.best.items()}
    tensors["best_loss"] = torch.tensor(group.best_loss, dtype=torch.float64)
    return tensors, {name: getattr(group, name) for name in NUMBERS}


def group_from_checkpoint(
    trainer: Trainer, tensors: dict[str, Tensor], info: dict[str, Any], path: Path | str = "what was handed over"
) -> Group:
    """The reverse of :func:`checkpoint_of`, for tensors that :func:`check_checkpoint` takes; ``path`` is for errors."""
    check_network(
        {name[5:]: tensor[0] for name, tensor in tensors.items() if name.startswith("best.")},
        {name: tuple(parameter.shape) for name, parameter in trainer.network.named_parameters()},
        trainer.dtype,
        path,
    )
    group = fresh_group(trainer, info["seeds"])
    for name in NUMBERS:
        setattr(group, name, info[name])
    group.best_loss = tensors["best_loss"].tolist()
    group.best = {name: tensors[f"best.{name}"].to(weight.device) for name, weight in group.best.items()}
    restore(trainer, group, tensors)
    return group
