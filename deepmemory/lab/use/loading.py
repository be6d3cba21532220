"""Trained networks, from the checkpoints that training leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from deepmemory.lab.records import Records, best_weights, check_network, load_checkpoint
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import Task, task_of
from deepmemory.lab.training.network import weight_shapes

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Model:
    """One trained run."""

    network: nn.Module  # with the run's best weights, in evaluation, on the CPU
    setting: Setting
    seed: int
    task: Task


def load_model(
    checkpoint: Path | str, run: int | None = None, data: Path | str | None = None, engine: str = "auto"
) -> Model:
    """The best weights of one run and the task they were trained for; runs no code from the file.

    Args:
        checkpoint: ``OUT/checkpoints/STUDY/runs-*.safetensors``, or the study's folder for all its runs.
        run: Seed of the run; left out, the run with the lowest validation loss.
        data: Folder of local copies of the data, which has the words of a text; default ``$DEEPMEMORY_DATA``.
        engine: Of the recurrent layers.
    """
    path, seed, weights = best_run(Path(checkpoint), run)
    setting = setting_of(path)
    return assemble(setting, task_of(setting, None if data is None else str(data)), seed, weights, engine, path)


def best_run(checkpoint: Path, run: int | None = None) -> tuple[Path, int, dict[str, Tensor]]:
    """The file that holds a run, the run's seed and its best weights."""
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files or not files[0].exists():
        raise FileNotFoundError(
            f"no checkpoint at {checkpoint}; training leaves them in OUT/checkpoints/TASK-CELL-KEY/runs-*.safetensors"
        )
    found: dict[int, tuple[float, Path]] = {}  # loss and file of each run that can be used
    useless = []
    for file in files:
        tensors, info = load_checkpoint(file)
        for seed, epoch, loss in zip(info["seeds"], info["best_epoch"], tensors["best_loss"].tolist(), strict=True):
            if epoch is None:
                useless.append(seed)
            else:
                found[seed] = loss, file
    if run in useless or not found:
        told = useless if run is None else run
        raise ValueError(f"{checkpoint}: the loss of run {told} was never finite, so it has no best weights")
    if run is not None and run not in found:
        raise ValueError(f"{checkpoint} has no run with seed {run}; it has {sorted(found)}")
    seed = min(found, key=lambda one: (found[one][0], one)) if run is None else run
    file = found[seed][1]
    return file, seed, best_weights(file, seed)


def setting_of(path: Path) -> Setting:
    """What a checkpoint's study trained, from the records beside it."""
    folder = path.resolve().parent
    out, key = folder.parent.parent, folder.name.rpartition("-")[2]
    if not (out / "records.sqlite").exists():
        raise FileNotFoundError(
            f"the settings of {path} are not known: they stand in OUT/records.sqlite, with the checkpoint in "
            f"OUT/checkpoints/TASK-CELL-KEY, and {out / 'records.sqlite'} is not there; put both back"
        )
    opened = Records(out)
    try:
        study = opened.study(key)
    finally:
        opened.close()
    if study is None:
        raise ValueError(f"{out / 'records.sqlite'} knows no study {key}, which {path} belongs to")
    return study.setting


def assemble(
    setting: Setting, task: Task, seed: int, weights: dict[str, Tensor], engine: str = "auto", path: Path | None = None
) -> Model:
    """A network of the setting with these weights, which have to fit it."""
    dtype = torch.float64 if setting.precision == "64-true" else torch.float32
    check_network(weights, weight_shapes(setting, task), dtype, path or "what was given")
    network = task.network(setting, engine).to(dtype)
    network.load_state_dict(weights)
    return Model(network.eval(), setting, seed, task)


def wanted(model: Model, kind: type[Kind], task: str, command: str) -> Kind:
    """The model's task, which has to be of this kind."""
    if not isinstance(model.task, kind):
        raise ValueError(f"{command} takes a checkpoint of the task {task}, this one is of {model.setting.task}")
    return model.task
