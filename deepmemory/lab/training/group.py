"""Runs that train side by side: their stacked weights, optimiser and progress, and their checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepmemory as dm
from deepmemory.lab.records import RUNNING, SPENT, check_network
from deepmemory.lab.settings import SHARED_RATE
from deepmemory.lab.training.network import initial_weights
from deepmemory.lab.training.trainer import Trainer

NOTED = ("seeds", "epoch", "rows", "best_epoch", "under", "state")  # fields of a group in a checkpoint's metadata

Weights = dict[str, Tensor]


@dataclass
class Group:
    """Runs that train side by side: everything that changes while they train and that a checkpoint holds."""

    seeds: list[int]
    epoch: int  # number of finished epochs
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

    @property
    def stacked_seeds(self) -> list[int]:
        """The seeds of the runs in the stack."""
        return [self.seeds[row] for row in self.rows]

    @property
    def end_states(self) -> dict[int, str]:
        """States by seed once the group has ended: runs that still train have used up their epochs."""
        return {seed: SPENT if state == RUNNING else state for seed, state in zip(self.seeds, self.state, strict=True)}


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
    """Copies that take gradients, on the trainer's device and in its precision."""
    device, dtype = trainer.fabric.device, trainer.dtype
    return {name: w.to(device, dtype, copy=True).requires_grad_() for name, w in weights.items()}


def make_adam(trainer: Trainer, weights: Weights, state: dict[str, Tensor] | None = None) -> torch.optim.Adam:
    """Adam over the stack with the learning rates of ``dm.parameter_groups``, in the given state or a new one."""
    setting, device = trainer.setting, trainer.fabric.device
    names = {parameter: name for name, parameter in trainer.network.named_parameters()}
    of_words = {name: weight for name, weight in trainer.network.named_parameters() if name.startswith("embedding")}
    rest = [weight for name, weight in trainer.network.named_parameters() if name not in of_words]
    split: list[dict[str, Any]] = [{"params": rest}]
    if of_words:
        split.append({"params": list(of_words.values()), "lr": setting.embedding_rate or setting.lr})
    groups = dm.parameter_groups(trainer.network, setting.lr, setting.weight_decay, groups=split)
    for group in groups:
        if group["lr_divisor"] == 1:
            continue  # no DMU
        if setting.module_rate == SHARED_RATE:
            group |= {"lr": setting.lr, "weight_decay": setting.weight_decay}
        elif setting.module_rate != "formula":
            group["lr"] = float(setting.module_rate)
    for group in groups:
        group["params"] = [weights[names[parameter]] for parameter in group["params"]]
        group["initial_lr"] = group["lr"]
        if trainer.graph:  # a captured step reads the rate from memory
            group["lr"] = torch.tensor(group["lr"], device=device)
    betas = 0.9, setting.beta2
    adam = torch.optim.Adam(groups, betas=betas, fused=device.type in ("cpu", "cuda"), capturable=trainer.graph)
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


def state_tensors(group: Group) -> dict[str, Tensor]:
    """The tensors that a training step changes, by name: stacked weights and Adam's state."""
    tensors = {f"weights.{name}": weight for name, weight in group.weights.items()}
    for name, weight in group.weights.items():
        tensors |= {f"adam.{name}.{kind}": value for kind, value in group.adam.state[weight].items()}
    return tensors


def drop_finished(trainer: Trainer, group: Group) -> None:
    """Remove finished runs from the stack."""
    places = [place for place, run in enumerate(group.rows) if group.state[run] == RUNNING]
    index = torch.tensor(places, device=trainer.fabric.device)
    tensors = {
        name: tensor.detach() if tensor.dim() == 0 else tensor.detach().index_select(0, index)
        for name, tensor in state_tensors(group).items()
    }
    group.rows = [group.rows[place] for place in places]
    restore(trainer, group, tensors)


def restore(trainer: Trainer, group: Group, tensors: dict[str, Tensor]) -> None:
    """Replace the stack and its optimiser by these :func:`state_tensors`."""
    prefix = "weights."
    stacked = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    group.weights = to_device(trainer, stacked)
    group.adam = make_adam(trainer, group.weights, tensors)


def checkpoint_of(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that is needed to resume: tensors and metadata."""
    tensors = state_tensors(group) | {f"best.{name}": weight for name, weight in group.best.items()}
    tensors["best_loss"] = torch.tensor(group.best_loss, dtype=torch.float64)
    return tensors, {name: getattr(group, name) for name in NOTED}


def group_from_checkpoint(
    trainer: Trainer, tensors: dict[str, Tensor], info: dict[str, Any], path: Path | str = "the checkpoint"
) -> Group:
    """The reverse of :func:`checkpoint_of`, for tensors from :func:`load_checkpoint`; ``path`` is for errors."""
    check_network(
        {name[5:]: tensor[0] for name, tensor in tensors.items() if name.startswith("best.")},
        {name: tuple(parameter.shape) for name, parameter in trainer.network.named_parameters()},
        trainer.dtype,
        path,
    )
    group = fresh_group(trainer, info["seeds"])
    for name in NOTED:
        setattr(group, name, info[name])
    group.best_loss = tensors["best_loss"].tolist()
    group.best = {name: tensors[f"best.{name}"].to(weight.device) for name, weight in group.best.items()}
    restore(trainer, group, tensors)
    return group
