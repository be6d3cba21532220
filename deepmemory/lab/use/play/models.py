"""The trained models of the page: those named on the command line, else the newest, else those of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepmemory.lab.tasks import PolyMusic, Translation
from deepmemory.lab.use.loading import TrainedModel, expect_task, load_model, newest_checkpoints, training_commands
from deepmemory.lab.use.released import shipped

KINDS = {"translation": Translation, "polymusic": PolyMusic}


@dataclass(frozen=True)
class ModelSlot:
    """The place of a model on the page: filled, or empty with advice on how to train one."""

    model: TrainedModel | None
    problem: str = ""  # why there is no model
    commands: tuple[str, ...] = ()  # that train one


def find_model(task: str, named: Path | None, out: Path, data: Path | None) -> ModelSlot:
    """The named model, which must exist and be of this task; without one, the newest under ``out`` that loads.

    If nothing was trained, it is the model that comes with the package.
    """
    if named is not None:
        model = load_model(named, data=data)
        expect_task(model, KINDS[task])
        return ModelSlot(model)
    problem = f"There is no trained model of {task} in {out} yet."
    for path in newest_checkpoints(out, task) or filter(None, [shipped(task)]):
        try:
            return ModelSlot(load_model(path, data=data))
        except (ValueError, OSError) as error:  # an older one may load
            problem = f"{path.name} cannot be used: {error}"
    return ModelSlot(None, problem, tuple(training_commands(task, out)))
