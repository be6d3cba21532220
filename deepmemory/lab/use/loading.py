"""Trained models: finding them in a folder of studies, and loading one from its checkpoint."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from deepmemory.lab import paper
from deepmemory.lab.records import Records, Study, best_weights, check_network, load_checkpoint
from deepmemory.lab.records.releases import is_release, load_release
from deepmemory.lab.settings import TASKS, Setting
from deepmemory.lab.tasks import NatLang, PolyMusic, Task, Translation, data_of, task_of
from deepmemory.lab.training.network import weight_shapes
from deepmemory.lab.use.released import SHIPPED, SHIPPED_TASKS, open_released, shipped

DECODABLE = {Translation: "translation", NatLang: "natlang", PolyMusic: "polymusic"}  # tasks with something to decode
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class TrainedModel:
    """A network with the best weights of one run, and what it was trained on."""

    network: nn.Module  # in evaluation mode, on the CPU
    setting: Setting
    seed: int  # of the run
    task: Task
    has_data: bool = True  # False if the task has a few examples instead of its data


@dataclass(frozen=True)
class ModelSummary:
    """One line of the list of trained models: a study that has checkpoints."""

    task: str
    cell: str
    hidden: tuple[int, ...]  # state size of each layer
    depth: int  # linear layers between one state and the next
    weights: int | None  # of one network; None if the checkpoint cannot be read
    runs: int
    scores: dict[str, float]  # validation loss and metrics of the best run, at its best epoch
    path: Path  # what load_model takes


def list_models(out: Path) -> list[ModelSummary]:
    """Every trained model under ``out``, the most recently written first."""
    folders = {folder.name: folder for folder in newest_checkpoints(out)}
    if not folders:
        return []
    records = Records(out)
    try:
        studies = {records.checkpoint_folder(study.setting).name: study for study in records.studies()}
    finally:
        records.close()
    return [summary(studies[name], folder) for name, folder in folders.items() if name in studies]


def list_shipped() -> list[ModelSummary]:
    """The released networks that come with the package, those that can be read."""
    return [summary_of_release(path) for task in SHIPPED_TASKS if (path := shipped(task)) and is_release(path)]


def summary_of_release(path: Path) -> ModelSummary:
    """A released network in one line."""
    release = load_release(path)
    setting, scores = release.setting, release.made["scores"]["float16"]
    of_validation = {name: value for name, value in scores.items() if name.startswith("valid_")}
    weights = sum(weight.numel() for weight in release.weights.values())
    depth = paper.depth_of(setting)
    return ModelSummary(setting.task, setting.cell, setting.hidden, depth, weights, 1, of_validation, path)


def summary(study: Study, folder: Path) -> ModelSummary:
    """A study and its checkpoints in one line."""
    setting = study.setting
    epochs = [run.at_epoch(number) for run in study.runs for number in run.numbers]
    finite = (epoch for epoch in epochs if math.isfinite(epoch["valid_loss"]))
    best = min(finite, key=lambda epoch: epoch["valid_loss"], default={})
    scores = {name: value for name, value in best.items() if name.startswith("valid_")}
    weights = count_weights(min(folder.glob("*.safetensors")))
    depth = paper.depth_of(setting)
    return ModelSummary(setting.task, setting.cell, setting.hidden, depth, weights, len(study.runs), scores, folder)


def count_weights(checkpoint: Path) -> int | None:
    """Number of weights of one run's network, from the header of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith("best.")]  # noqa: SIM118
            return sum(math.prod(opened.get_slice(name).get_shape()[1:]) for name in names)
    except (OSError, SafetensorError):
        return None


def newest_checkpoints(out: Path, *tasks: str) -> list[Path]:
    """Folders of studies that have checkpoints, of these tasks or of all, the most recently written first."""
    written: dict[Path, float] = {}
    for task in tasks or ("*",):
        for file in filter(Path.is_file, out.glob(f"checkpoints/{task}-*/*.safetensors")):
            written[file.parent] = max(file.stat().st_mtime, written.get(file.parent, 0))
    return sorted(written, key=lambda folder: written[folder], reverse=True)


def choose_checkpoint(named: Path | None, out: Path, *tasks: str) -> Path:
    """The checkpoint that the user named, else the newest under ``out``, else the network that comes with the package.

    If tasks are given, only networks of these are considered. Instead of a checkpoint, the user may name a task.
    """
    if named is not None and str(named) in TASKS and not named.exists():
        if tasks and str(named) not in tasks:
            raise ValueError(f"expected a network trained on {' or '.join(tasks)}, got the task {named}")
        named, tasks = None, (str(named),)
    comes_along = None if named or newest_checkpoints(out, *tasks) else shipped(*tasks)
    return comes_along or trained_checkpoint(named, out, *tasks)


def trained_checkpoint(named: Path | None, out: Path, *tasks: str) -> Path:
    """The checkpoint that the user named, else the newest under ``out``."""
    if named is not None:
        return named
    if newest := newest_checkpoints(out, *tasks):
        return newest[0]
    what = f"model of {' or '.join(tasks)}" if tasks else "model"
    commands = "; ".join(training_commands(tasks[0] if tasks else "adding", out))
    raise FileNotFoundError(f"there is no trained {what} in {out}; train one: {commands}; or name a checkpoint")


def training_commands(task: str, out: Path) -> list[str]:
    """The commands that train a small model of a task, including those that fetch its data."""
    data = data_of(paper.setting(task, "dmu"))
    fetch = [f"dmu data fetch {data}"] if data else []
    return [*fetch, f"dmu train {task} --quick --out {shlex.quote(str(out))}"]


def load_model(
    checkpoint: Path | str,
    run: int | None = None,
    data: Path | str | None = None,
    engine: str = "auto",
    with_data: bool = False,
) -> TrainedModel:
    """Load the best weights of one run; runs no code from the file.

    Args:
        checkpoint: ``OUT/checkpoints/STUDY/runs-*.safetensors``, or the study's folder for all its runs; or the file
            of a released network.
        run: Seed of the run; default: the run with the lowest validation loss.
        data: Folder of local copies of the data, from which the vocabulary of a text is read; default
            ``$DEEPMEMORY_DATA``.
        engine: Engine of the recurrent layers.
        with_data: For a released network, which needs no data: whether to read the data nevertheless.
    """
    if is_release(Path(checkpoint)) or Path(checkpoint).parent == SHIPPED:
        return load_released(Path(checkpoint), run, data, engine, with_data)
    path, seed, weights = best_run(Path(checkpoint), run)
    setting = setting_of(path)
    return assemble(setting, task_of(setting, None if data is None else str(data)), seed, weights, engine, path)


def load_released(path: Path, run: int | None, data: Path | str | None, engine: str, with_data: bool) -> TrainedModel:
    """A released network, in float32; its task has examples instead of the data unless ``with_data``."""
    folder = None if data is None else str(data)
    release, task = open_released(path, folder, with_data)
    if run not in (None, release.seed):
        raise ValueError(f"{path} has no run with seed {run}; it has [{release.seed}]")
    setting = replace(release.setting, precision="32-true")
    weights = {name: weight.float() for name, weight in release.weights.items()}
    return replace(assemble(setting, task, release.seed, weights, engine, path), has_data=with_data)


def best_run(checkpoint: Path, run: int | None = None) -> tuple[Path, int, dict[str, Tensor]]:
    """The file that holds a run, the run's seed and its best weights."""
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files or not files[0].exists():
        raise FileNotFoundError(
            f"no checkpoint at {checkpoint}; training writes them to OUT/checkpoints/TASK-CELL-KEY/runs-*.safetensors"
        )
    found: dict[int, tuple[float, Path]] = {}  # loss and file of each run with a finite loss
    diverged = []
    for file in files:
        tensors, info = load_checkpoint(file)
        for seed, epoch, loss in zip(info["seeds"], info["best_epoch"], tensors["best_loss"].tolist(), strict=True):
            if epoch is None:
                diverged.append(seed)
            else:
                found[seed] = loss, file
    if run in diverged or not found:
        runs = diverged if run is None else run
        raise ValueError(f"{checkpoint}: the loss of run {runs} was never finite, so it has no best weights")
    if run is not None and run not in found:
        raise ValueError(f"{checkpoint} has no run with seed {run}; it has {sorted(found)}")
    seed = min(found, key=lambda one: (found[one][0], one)) if run is None else run
    file = found[seed][1]
    return file, seed, best_weights(file, seed)


def setting_of(path: Path) -> Setting:
    """The setting that a checkpoint was trained with, from the records beside it."""
    folder = path.resolve().parent
    out, key = folder.parent.parent, folder.name.rpartition("-")[2]
    if not (out / "records.sqlite").exists():
        raise FileNotFoundError(
            f"the settings of {path} are not known: they are in OUT/records.sqlite, with the checkpoint in "
            f"OUT/checkpoints/TASK-CELL-KEY, but {out / 'records.sqlite'} does not exist; put both back"
        )
    opened = Records(out)
    try:
        study = opened.study(key)
    finally:
        opened.close()
    if study is None:
        raise ValueError(f"{out / 'records.sqlite'} has no study {key}, which {path} belongs to")
    return study.setting


def assemble(
    setting: Setting, task: Task, seed: int, weights: dict[str, Tensor], engine: str = "auto", path: Path | None = None
) -> TrainedModel:
    """A network of the setting with these weights; raises if they do not fit it."""
    dtype = torch.float64 if setting.precision == "64-true" else torch.float32
    check_network(weights, weight_shapes(setting, task), dtype, path or "what was given")
    network = task.network(setting, engine).to(dtype)
    network.load_state_dict(weights)
    return TrainedModel(network.eval(), setting, seed, task)


def expect_task(model: TrainedModel, kind: type[Kind]) -> Kind:
    """The model's task; raises if it is another one."""
    if not isinstance(model.task, kind):
        raise ValueError(f"expected a model of {DECODABLE[kind]}, but this one was trained on {model.setting.task}")
    return model.task
