"""How the values of runs are stored: rows of float32 while a run trains, one compressed blob after a merge."""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence

from deepmemory.lab.data.unpacking import inflate
from deepmemory.lab.records.errors import shown

LARGEST_UNPACKED = 2**27  # bytes of all packed runs of a database: fifty times the paper's; 1 GB as Python floats


class UnpackingLimit:
    """How many bytes the packed runs of a database may still unpack to: the file may come from somebody else."""

    def __init__(self, size: int = LARGEST_UNPACKED) -> None:
        self.left = size

    def inflate(self, blob: bytes) -> bytes:
        """Decompress a blob, or raise if it would exceed what is left."""
        contents, _ = inflate(blob, self.left)
        self.left -= len(contents)
        return contents


def pack(values: Sequence[float]) -> bytes:
    """Numbers as little-endian float32, NaN included."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(blob: bytes) -> tuple[float, ...]:
    """The reverse of :func:`pack`."""
    packed = array("f")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def by_name(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Values by name."""
    if len(names) != len(values):
        raise ValueError(f"expected one value for each of {shown(names)}, got {len(values)} values")
    return dict(zip(names, values, strict=True))


def pack_curves(curves: Mapping[str, Sequence[float]]) -> bytes:
    """Pack all epochs of a run without loss into half the space.

    The numbers are ordered by series, then written as all first bytes, all second bytes and so on: similar bytes
    side by side compress well.
    """
    plain = pack([value for values in curves.values() for value in values])
    return zlib.compress(b"".join(plain[place::4] for place in range(4)), 9)


def unpack_curves(
    blob: bytes, series: Sequence[str], limit: UnpackingLimit | None = None
) -> dict[str, tuple[float, ...]]:
    """The reverse of :func:`pack_curves`."""
    sorted_bytes = (limit or UnpackingLimit()).inflate(blob)
    count = len(sorted_bytes) // 4
    plain = bytearray(len(sorted_bytes))
    for place in range(4):
        plain[place::4] = sorted_bytes[place * count : (place + 1) * count]
    values, epochs = unpack(bytes(plain)), count // len(series)
    if not epochs or epochs * len(series) != count:
        raise ValueError(f"{count} packed values do not make whole epochs of {len(series)} series")
    return {name: values[place * epochs : (place + 1) * epochs] for place, name in enumerate(series)}


def pack_watch(values: Mapping[str, Mapping[int, float]]) -> bytes:
    """Pack what ``--watch`` measured in a run, by name and epoch, into a third of the space."""
    return zlib.compress(json.dumps(values).encode(), 9)


def unpack_watch(blob: bytes, limit: UnpackingLimit | None = None) -> dict[str, dict[int, float]]:
    """The reverse of :func:`pack_watch`."""
    found = json.loads((limit or UnpackingLimit()).inflate(blob))
    return {name: {int(epoch): float(value) for epoch, value in of.items()} for name, of in found.items()}
