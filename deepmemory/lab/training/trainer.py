"""What stays the same while runs train: settings, task, network, device and precision."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

import deepmemory as dm
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.tasks import Task, series_of, task_of
from deepmemory.lab.training import distributed


@dataclass(frozen=True)
class Trainer:
    """What stays the same while a group of runs trains."""

    setting: Setting
    task: Task
    network: nn.Module  # defines the forward pass; its own weights are never used
    fabric: Fabric
    dtype: torch.dtype
    graph: bool  # whether training steps are captured as CUDA graphs

    @property
    def series(self) -> tuple[str, ...]:
        """Names of an epoch's values."""
        return series_of(self.setting.task)


def make_trainer(setting: Setting, machine: Machine = Machine()) -> Trainer:  # noqa: B008 (frozen)
    """Choose device and precision. TF32 stays off: the losses studied here go below its resolution."""
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
    """Lightning's Fabric on one device, or in several processes that it starts or joins."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise ValueError(f"unknown device {device!r}; choose from auto, cpu, cuda, cuda:1 (any number), mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA GPU that torch can use; choose cpu or auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device mps: this machine has no Apple GPU that torch can use; choose cpu or auto")
    several = devices * nodes > 1
    if several and index:
        raise ValueError(f"device {device!r} is one device; leave out the number to use {devices * nodes}")
    chosen: Any = [int(index)] if index and kind == "cuda" else devices
    how: dict[str, Any] = {"strategy": distributed.strategy(), "num_nodes": nodes} if several else {}
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs the precision that it was given
    fabric = Fabric(accelerator=kind, devices=chosen, precision=precision, **how)  # type: ignore[arg-type]
    if several:
        distributed.launch(fabric)
    return fabric
