"""From ``sweep.cu`` to kernels that can be launched: NVRTC, which comes with torch, and the driver, through ctypes."""

from __future__ import annotations

import ctypes
import glob
import os
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

SOURCE = Path(__file__).with_name("sweep.cu")

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


@cache
def arguments_type(layers: int) -> type[ctypes.Structure]:
    """``struct Arguments`` of ``sweep.cu`` for this many linear layers."""
    fields: list[tuple[str, type]] = [(name, c_void_p * layers) for name in ("weight", "turned", "bias")]
    fields += [(name, c_void_p) for name in ("projected", "h0", "c0", "lengths", "y", "h_n", "c_n", "trace")]
    fields += [(name, c_void_p) for name in ("grad_y", "deltas", "grad_h0", "grad_c0")]
    fields += [(name, c_int64) for name in ("steps", "batch", "reverse")]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class Products(ctypes.Structure):
    """``struct Products`` of ``sweep.cu``."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("left", "right", "out")),
        *((name, c_int64) for name in ("left_run", "left_row", "right_run", "right_row")),
        *((name, c_int64) for name in ("count", "splits", "lefts", "rights")),
    ]


MOST_PAIRS, PAIR_THREADS, ROWS_AT_ONCE = 1024, 128, 128  # as in ``sweep.cu``


@cache
def nvrtc() -> ctypes.CDLL:
    """The run-time compiler of torch's own CUDA version."""
    major = str(torch.version.cuda).split(".")[0]
    beside_torch = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia")
    names = [f"libnvrtc.so.{major}", *sorted(glob.glob(f"{beside_torch}/*/lib/libnvrtc.so.{major}"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(names)} could be loaded")


@cache
def driver() -> ctypes.CDLL:
    """NVIDIA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        message = c_char_p()
        driver().cuGetErrorString(status, byref(message))
        raise RuntimeError(f"{what} failed: {(message.value or b'unknown error').decode()} ({status})")


def compile_to_cubin(defines: dict[str, str], capability: tuple[int, int]) -> bytes:
    """Machine code for one shape and layout."""
    lib, program = nvrtc(), c_void_p()
    source = SOURCE.read_text().encode()
    status = lib.nvrtcCreateProgram(byref(program), source, b"sweep.cu", 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram failed with {status}")
    try:
        options = [f"-arch=sm_{capability[0]}{capability[1]}", "-std=c++17", "-default-device"]
        options += [f"-D{name}={value}" for name, value in defines.items()]
        array = (c_char_p * len(options))(*(option.encode() for option in options))
        status, size = lib.nvrtcCompileProgram(program, len(options), array), c_size_t()
        if status:
            lib.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"compiling sweep.cu with {defines} failed:\n{log.value.decode()}")
        lib.nvrtcGetCUBINSize(program, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(byref(program))


class Kernels:
    """The kernels for one shape and layout, loaded on one device."""

    def __init__(self, cubin: bytes, cluster: int, shared_bytes: tuple[int, int], device: int) -> None:
        self._module, self._device = c_void_p(), device
        _check(driver().cuModuleLoadData(byref(self._module), cubin), "loading a kernel")
        self._ahead, self._back, self._products = map(self._find, (b"sweep_ahead", b"sweep_back", b"sum_products"))
        self._shared = shared_bytes
        for function, size in zip((self._ahead, self._back), shared_bytes, strict=True):
            _check(
                driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, c_int(size)),
                f"reserving {size} bytes of shared memory",
            )
            if cluster > 8:
                _check(
                    driver().cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, c_int(1)),
                    "allowing a cluster of 16",
                )

    def _find(self, name: bytes) -> c_void_p:
        function = c_void_p()
        _check(driver().cuModuleGetFunction(byref(function), self._module, name), "finding a kernel")
        return function

    def sweep(self, backward: bool, arguments: ctypes.Structure, blocks: int, runs: int, threads: int) -> None:
        """Queue one sweep on the current stream."""
        function = self._back if backward else self._ahead
        self._launch(function, (blocks, runs), threads, self._shared[backward], arguments)

    def sum_products(self, products: Products, runs: int) -> None:
        """Queue sums of outer products on the current stream."""
        shared = 4 * ROWS_AT_ONCE * (products.lefts + products.rights)
        self._launch(self._products, (products.splits, runs), PAIR_THREADS, shared, products)

    def _launch(
        self, function: c_void_p, grid: tuple[int, int], threads: int, shared: int, arguments: ctypes.Structure
    ) -> None:
        parameters = (c_void_p * 1)(ctypes.addressof(arguments))
        stream = c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
        status = driver().cuLaunchKernel(function, *grid, 1, threads, 1, 1, shared, stream, parameters, None)
        _check(status, "launching a kernel")
