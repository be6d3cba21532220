"""Use of released networks without the data they were trained on, and the networks that come with the package."""

from __future__ import annotations

from pathlib import Path

import torch

from deepmemory.lab.records.checkpoints import compare_tensors
from deepmemory.lab.records.releases import Release, load_release, unusable
from deepmemory.lab.tasks import NatLang, Task, Translation, data_of, task_of
from deepmemory.lab.training.network import weight_shapes
from deepmemory.lab.use import examples

SHIPPED = Path(__file__).with_name("trained")  # the networks that come with the package: TASK.safetensors
SHIPPED_TASKS = ("polymusic", "translation", "ptb")


def shipped(*tasks: str) -> Path | None:
    """The released network of one of these tasks that comes with the package; without tasks, the first there is."""
    files = (SHIPPED / f"{task}.safetensors" for task in SHIPPED_TASKS if not tasks or task in tasks)
    return next(filter(Path.exists, files), None)


def vocabularies(task: Task) -> dict[str, tuple[str, ...]]:
    """The vocabularies of a task, without which a network cannot be used."""
    if isinstance(task, Translation):
        return {"foreign": task.pairs.foreign.words, "english": task.pairs.english.words}
    return {"text": task.words} if isinstance(task, NatLang) else {}


def task_without_data(release: Release) -> Task:
    """The task of a released network, with examples instead of its data."""
    setting, words = release.setting, release.words
    if data_of(setting) is None:
        return task_of(setting)
    if setting.task == "polymusic":
        return examples.tunes()
    if setting.task == "translation":
        return examples.sentences(setting.language, words["foreign"], words["english"])
    if setting.task in ("natlang", "ptb"):
        return examples.text(setting, words["text"])
    raise ValueError(f"networks of {setting.task} cannot be released: there are no examples of its data")


def task_with_data(release: Release, data: str | None) -> Task:
    """The task of a released network, with the data it was trained on."""
    task = task_of(release.setting, data)
    if vocabularies(task) != release.words:
        raise ValueError(
            f"the words of the data are not those of the released network; dmu data check {data_of(release.setting)} "
            "tells whether the data is the expected one"
        )
    return task


def open_released(path: Path, data: str | None = None, with_data: bool = False) -> tuple[Release, Task]:
    """A released network and its task, which has examples instead of its data unless ``with_data``."""
    release = load_release(path)
    try:
        task = task_without_data(release)
        found = {name: (tuple(weight.shape), weight.dtype) for name, weight in release.weights.items()}
        shapes = weight_shapes(release.setting, task)
        compare_tensors(found, {name: (shape, torch.float16) for name, shape in shapes.items()})
    except (KeyError, ValueError) as error:
        raise unusable(path, str(error)) from error
    return release, task_with_data(release, data) if with_data else task
