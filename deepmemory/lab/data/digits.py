"""MNIST's handwritten digits."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepmemory.lab.data import files
from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.registry import dataset

UNSIGNED_BYTES = 0x08  # idx's type code


class Digits(NamedTuple):
    """Images and their labels."""

    images: Tensor  # uint8 (N, 28, 28), 0 is paper and 255 ink
    labels: Tensor  # int64 (N,), 0 to 9


def load_digits(data: Path | str | None = None) -> dict[str, Digits]:
    """MNIST: 60,000 digits as ``train``, 10,000 as ``test``."""
    train_images, train_labels, test_images, test_labels = (
        parse_idx(files.read(file, data)) for file in dataset("mnist").files
    )
    return {"train": as_digits(train_images, train_labels), "test": as_digits(test_images, test_labels)}


def as_digits(images: Tensor, labels: Tensor) -> Digits:
    """Images and labels, checked to match each other."""
    if images.dim() != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"expected images (N, rows, columns) and N labels, got {tuple(images.shape)} and {tuple(labels.shape)}"
        )
    if labels.max() > 9:
        raise DataError(f"labels should be 0 to 9, found {labels.max()}")
    return Digits(images, labels.long())


def parse_idx(raw: bytes) -> Tensor:
    """Read an idx file of unsigned bytes: two zeros, the type, the number of sizes, the sizes, the bytes."""
    if len(raw) < 4 or raw[:3] != bytes((0, 0, UNSIGNED_BYTES)):
        raise DataError(f"not an idx file of unsigned bytes: it starts with {raw[:4].hex(' ') or 'nothing'}")
    head = 4 + 4 * raw[3]
    if not 1 <= raw[3] <= 3 or len(raw) < head:
        raise DataError(f"an idx file should have 1 to 3 sizes, this one says {raw[3]} and has {len(raw)} bytes")
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    if len(raw) == head or math.prod(shape) != len(raw) - head:
        raise DataError(f"idx sizes {shape} do not fit the {len(raw) - head} bytes after them")
    return torch.frombuffer(bytearray(raw[head:]), dtype=torch.uint8).reshape(shape)
