"""Runs the tests of the CPU engine with a library that was compiled for another processor.

    python -m pytest -p emulated_engine --emulator "qemu-aarch64 ... replay engine.so" tests/ops/test_cpu_engine.py

Everything but the engine runs here; its calls go to ``tests/ops/replay.cpp``, compiled and emulated with it.
"""

import ctypes
import shlex
import subprocess
from array import array

import pytest
import torch
from torch import Tensor

from deepmemory.ops import cpu

FIXED = 46  # values of plan.h's struct Call up to the number of weights, which is the last of them
FUNCTIONS = ("dm_forward", "dm_backward", "dm_record")


class EmulatedLibrary:
    """What ``cpu._library`` returns, for a library that this processor cannot run."""

    def __init__(self, command: str) -> None:
        self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.passed: dict[int, Tensor] = {}  # by address: every tensor whose address was asked for
        self.calls = 0

    def __getattr__(self, name: str):
        function = FUNCTIONS.index(name)
        return lambda address: self._run(function, address)

    def dm_level(self, i: int, usable) -> bytes | None:
        usable._obj.value = 1
        return b"baseline" if i == 0 else None

    def dm_use_level(self, i: int) -> None:
        assert i <= 0

    def _run(self, function: int, address: int) -> int:
        weights = ctypes.c_int64.from_address(address + 8 * (FIXED - 1)).value
        call = list((ctypes.c_int64 * (FIXED + 4 * weights)).from_address(address))
        tensors = [(i, self.passed[value]) for i, value in enumerate(call) if value in self.passed]
        sizes = [t.untyped_storage().nbytes() - t.storage_offset() * t.element_size() for _, t in tensors]
        request = array("q", [function, len(call), len(tensors)])
        for (i, _), size in zip(tensors, sizes, strict=True):
            request.extend((size, i))
        request.extend(call)
        memory = [ctypes.string_at(call[i], size) for (i, _), size in zip(tensors, sizes, strict=True)]
        self.process.stdin.write(b"".join([request.tobytes(), *memory]))
        self.process.stdin.flush()
        (result,) = array("q", self.process.stdout.read(8))
        for (i, _), size in zip(tensors, sizes, strict=True):
            ctypes.memmove(call[i], self.process.stdout.read(size), size)
        self.passed.clear()
        self.calls += 1
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulator", required=True, help="command that runs replay.cpp with the engine")


def pytest_configure(config: pytest.Config) -> None:
    config.emulated = library = EmulatedLibrary(config.getoption("--emulator"))
    address_of = Tensor.data_ptr

    def data_ptr(self: Tensor) -> int:
        address = address_of(self)
        if address:
            library.passed[address] = self
        return address

    torch.Tensor.data_ptr = data_ptr
    cpu._library = lambda: library


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"{config.emulated.calls} calls of the emulated engine")
