"""Reads the part of MATLAB's version 5 files that the piano-rolls use: cells of real matrices.

An element is a tag (type and size, 4 bytes each) and its data, padded to 8 bytes; up to 4 bytes of data may be in
the tag itself. A matrix element holds further elements: flags, sizes, name, and its numbers in column order, often
stored in a smaller type than the matrix has. A compressed element is one matrix element in a zlib stream.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.unpacking import inflate

HEADER = 128
LARGEST = 2**28  # bytes that all compressed elements of a file may unpack to
COMPRESSED, MATRIX, INT8, INT32, UINT32 = 15, 14, 1, 5, 6  # types of elements
STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
CELL, NUMERIC = 1, range(6, 14)  # classes of matrices: double to uint32
COMPLEX = 0x0800

Array = np.ndarray[Any, np.dtype[Any]]


def read_cells(raw: bytes) -> dict[str, list[Array]]:
    """The variables of a file by name: the matrices in their cells."""
    if len(raw) < HEADER or not raw.startswith(b"MATLAB 5.0 MAT-file"):
        raise DataError("not a MATLAB version 5 file")
    if raw[124:128] != b"\x00\x01IM":
        raise DataError("a MATLAB file of another version or byte order than little-endian version 5")
    variables: dict[str, list[Array]] = {}
    room = LARGEST
    elements = Elements(memoryview(raw)[HEADER:], padded=False)
    while not elements.done:
        kind, data = elements.next()
        if kind == COMPRESSED:
            inflated, _ = inflate(data, room)
            room -= len(inflated)
            kind, data = Elements(memoryview(inflated)).next()
        if kind != MATRIX:
            raise DataError(f"a variable should be a matrix, found an element of type {kind}")
        name, cells = read_cell_array(data)
        if name in variables:
            raise DataError(f"the variable {name!r} occurs twice")
        variables[name] = cells
    return variables


def read_cell_array(data: memoryview) -> tuple[str, list[Array]]:
    """Name and cells of a cell array of real matrices."""
    elements = Elements(data)
    kind, (rows, columns), name = read_head(elements)
    if kind != CELL:
        raise DataError(f"the variable {name!r} should be a cell array, is of class {kind}")
    if 8 * rows * columns > elements.left:  # each cell has a tag at least
        raise DataError(f"the variable {name!r} declares {rows} x {columns} cells, more than it can hold")
    return name, [read_matrix(elements.next(MATRIX)[1]) for _ in range(rows * columns)]


def read_matrix(data: memoryview) -> Array:
    """One real matrix, in the type that its numbers are stored in."""
    elements = Elements(data)
    kind, (rows, columns), _ = read_head(elements)
    if kind not in NUMERIC:
        raise DataError(f"a cell should hold a matrix of numbers, holds class {kind}")
    stored, numbers = elements.next()
    if stored not in STORED:
        raise DataError(f"numbers stored as type {stored} are not supported")
    dtype = np.dtype(STORED[stored])
    if rows * columns * dtype.itemsize != len(numbers):
        raise DataError(f"a matrix of {rows} x {columns} does not fit its {len(numbers)} bytes of {dtype.name}")
    return np.frombuffer(numbers, dtype).reshape((rows, columns), order="F")


def read_head(elements: Elements) -> tuple[int, tuple[int, int], str]:
    """Class, sizes and name of a matrix."""
    _, flags = elements.next(UINT32)
    _, sizes = elements.next(INT32)
    _, name = elements.next(INT8)
    if len(flags) != 8 or len(sizes) != 8:
        raise DataError(f"matrices should have 8 bytes of flags and two sizes, got {len(flags)} and {len(sizes) / 4:g}")
    (bits,) = struct.unpack_from("<I", flags)
    if bits & COMPLEX:
        raise DataError("complex numbers are not supported")
    rows, columns = struct.unpack("<ii", sizes)
    if rows < 0 or columns < 0:
        raise DataError(f"a matrix cannot have {rows} x {columns} elements")
    return bits & 0xFF, (rows, columns), bytes(name).decode("ascii", "replace")


class Elements:
    """Reads the elements in a range of bytes one after another, never past its end."""

    def __init__(self, data: memoryview, padded: bool = True) -> None:
        self.data, self.padded, self.at = data, padded, 0

    @property
    def left(self) -> int:
        """Number of bytes that have not been read yet."""
        return len(self.data) - self.at

    @property
    def done(self) -> bool:
        """Whether every element has been read."""
        return self.left == 0

    def next(self, expected: int | None = None) -> tuple[int, memoryview]:
        """Type and data of the next element."""
        if self.left < 8:
            raise DataError(f"the file ends inside an element, {self.left} bytes before its tag is complete")
        kind, size = struct.unpack_from("<II", self.data, self.at)
        start, after = self.at + 8, 8 + size
        if kind >> 16:
            kind, size, start, after = kind & 0xFFFF, kind >> 16, self.at + 4, 8
            if size > 4:
                raise DataError(f"a tag cannot hold {size} bytes of data")
        elif size > self.left - 8:
            raise DataError(f"an element declares {size} bytes, {self.left - 8} are left")
        if expected is not None and kind != expected:
            raise DataError(f"expected an element of type {expected}, found type {kind}")
        if self.padded or kind != COMPRESSED:
            after += -after % 8
        self.at = min(self.at + after, len(self.data))
        return kind, self.data[start : start + size]
