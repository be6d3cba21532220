"""Polyphonic music as piano-rolls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmemory.lab.data import files, matlab
from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.registry import dataset, names_for
from deepmemory.lab.settings import check_choice

KEYS = 88  # of a piano
SPLITS = {"train": "traindata", "valid": "validdata", "test": "testdata"}  # our names, and those in the file


def load_music(name: str = "nottingham", data: Path | str | None = None) -> dict[str, list[Tensor]]:
    """The pieces of ``train``, ``valid`` and ``test``: uint8 (frames, 88) each, 1 where a key sounds."""
    check_choice("music", name, names_for("polymusic"))
    (file,) = dataset(name).files
    return parse_music(files.read(file, data))


def parse_music(raw: bytes) -> dict[str, list[Tensor]]:
    """Piano-rolls from a MATLAB file with cell arrays traindata, validdata and testdata."""
    cells = matlab.read_cells(raw)
    missing = [variable for variable in SPLITS.values() if not cells.get(variable)]
    if missing:
        raise DataError(f"no {' and '.join(missing)} in the file, which has {', '.join(cells) or 'nothing'}")
    return {split: [as_roll(cell) for cell in cells[variable]] for split, variable in SPLITS.items()}


def as_roll(cell: matlab.Array) -> Tensor:
    """A matrix of zeros and ones as a tensor."""
    if cell.shape[0] == 0 or cell.shape[1] != KEYS:
        raise DataError(f"a piano-roll should be (frames, {KEYS}), got {cell.shape}")
    if not ((cell == 0) | (cell == 1)).all():
        raise DataError("a piano-roll should hold zeros and ones only")
    return torch.from_numpy(np.array(cell, dtype=np.uint8, order="C"))
