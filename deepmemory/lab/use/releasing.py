"""Making the file of a released network from a run of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.data import dataset
from deepmemory.lab.records import versions
from deepmemory.lab.records.releases import Release, save_release
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.tasks import data_of
from deepmemory.lab.training import loop, random_streams
from deepmemory.lab.training.trainer import Trainer, make_trainer
from deepmemory.lab.use.released import task_without_data, vocabularies


def make_release(
    setting: Setting, seed: int, weights: dict[str, Tensor], command: str, machine: Machine, to: Path
) -> dict[str, Any]:
    """Round the weights of a run to half precision and write them; returns how the file was made.

    Both precisions are measured on the validation and test data, computing in float32.
    """
    halves = {name: weight.half() for name, weight in weights.items()}
    trainer = make_trainer(replace(setting, precision="32-true"), machine)
    name = data_of(setting)
    made = {
        "command": command,
        "data": {file.path: file.sha256 for file in dataset(name).files} if name else {},
        "scores": {"float32": scores(trainer, weights, seed), "float16": scores(trainer, halves, seed)},
        "weights": sum(weight.numel() for weight in weights.values()),
        **versions(),
    }
    release = Release(halves, setting, seed, vocabularies(trainer.task), made)
    task_without_data(release)  # raises if there is none
    save_release(to, release)
    return made


def scores(trainer: Trainer, weights: dict[str, Tensor], seed: int) -> dict[str, float]:
    """Loss and measures of one run's weights on the validation and test data."""
    stacked = {name: weight[None].to(trainer.fabric.device, torch.float32) for name, weight in weights.items()}
    names = ("loss", *trainer.task.measures)
    return {
        f"{split}_{name}": value
        for split, number in (("valid", random_streams.VALIDATION), ("test", random_streams.TEST))
        for name, value in zip(names, loop.evaluate(trainer, stacked, number, [seed])[0].tolist(), strict=True)
    }
