"""The trained models that the page uses: those named, else the newest there are."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from deepmemory.lab import paper
from deepmemory.lab.tasks import PolyMusic, Translation, data_of
from deepmemory.lab.use.loading import Model, load_model, wanted

KINDS = {"translation": Translation, "polymusic": PolyMusic}


@dataclass(frozen=True)
class Offer:
    """A model, or what to do to get one."""

    model: Model | None
    why: str  # there is none; empty where there is one
    commands: tuple[str, ...]  # that make one


def offer(task: str, named: Path | None, out: Path, data: Path | None) -> Offer:
    """A model of the task; one that was named has to be there and to fit."""
    fetch = f"dmu data fetch {data_of(paper.setting(task, 'dmu'))}"
    commands = (fetch, f"dmu train {task} --quick --out {shlex.quote(str(out))}")
    if named is not None:
        model = load_model(named, data=data)
        wanted(model, KINDS[task], task, f"this part of dmu play ({task})")
        return Offer(model, "", commands)
    why = f"There is no trained model of {task} in {out} yet."
    for folder in newest(task, out):
        try:
            return Offer(load_model(folder, data=data), "", commands)
        except (ValueError, OSError) as error:  # an older one may do
            why = f"{folder.name} cannot be used: {error}"
    return Offer(None, why, commands)


def newest(task: str, out: Path) -> list[Path]:
    """Folders with checkpoints of a task, the newest first."""
    files = out.glob(f"checkpoints/{task}-*/*.safetensors")
    written: dict[Path, float] = {}
    for file in filter(Path.is_file, files):
        written[file.parent] = max(file.stat().st_mtime, written.get(file.parent, 0))
    return sorted(written, key=lambda folder: written[folder], reverse=True)
