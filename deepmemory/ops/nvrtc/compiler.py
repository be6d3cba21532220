"""From CUDA source to kernels that can be launched: NVRTC, which comes with torch, and the driver, through ctypes."""

from __future__ import annotations

import ctypes
import glob
import os
from array import array
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch

from deepmemory.ops.nvrtc import products

FOLDER_OF_SOURCES = Path(__file__).parent
# One program, in this order: nothing has to look for headers.
SOURCES = ("numbers.cuh", "layout.cuh", "panels.cuh", "elementwise.cuh", "sweeps.cuh", "products.cuh", "kernels.cuh")
FOLDER = "DEEPMEMORY_KERNELS"  # environment variable: the cache folder of compiled kernels; empty: no cache
DIGEST = 32  # bytes of checksum at the start of a cached kernel

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
INVALID_CONTEXT = 201  # CUresult

ONE_POINTER = c_void_p * 1


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
    """The library of NVIDIA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        message = c_char_p()
        driver().cuGetErrorString(status, byref(message))
        raise RuntimeError(f"{what} failed: {(message.value or b'unknown error').decode()} ({status})")


def compile_to_cubin(defines: dict[str, str], capability: tuple[int, int]) -> bytes:
    """Machine code for one shape and layout, compiled unless it was before."""
    defined = [f"-D{name}={value}" for name, value in defines.items()]
    return _cached(source(), [*_options(capability), *defined])


@cache
def source() -> str:
    """The CUDA source of all kernels."""
    return "\n".join(FOLDER_OF_SOURCES.joinpath(name).read_text() for name in SOURCES)


def kernel_folder() -> Path | None:
    """The cache folder of compiled kernels; compiling one for a deep transition takes several seconds."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER]).expanduser() if os.environ[FOLDER] else None
    with suppress(RuntimeError):  # somebody without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepmemory" / "kernels"
    return None


def _cached(source: str, options: list[str]) -> bytes:
    """Read a kernel from the cache folder; compile it and store it there if it is missing or damaged."""
    folder = kernel_folder()
    if folder is None:
        return _compile(source, options)
    name = sha256("\0".join([source, *options, *map(str, nvrtc_version())]).encode()).hexdigest()
    path = folder / f"{name[:40]}.cubin"
    with suppress(OSError):
        content = path.read_bytes()
        if sha256(content[DIGEST:]).digest() == content[:DIGEST]:
            return content[DIGEST:]
    cubin = _compile(source, options)
    part = path.with_suffix(f".{os.getpid()}.part")  # whole at once under its name: another process may be reading
    with suppress(OSError):  # a disk that is full or may not be written to costs time and no more
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(sha256(cubin).digest() + cubin)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return cubin


def nvrtc_version() -> tuple[int, int]:
    """The version of NVRTC: major, minor."""
    major, minor = c_int(), c_int()
    nvrtc().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def _options(capability: tuple[int, int]) -> list[str]:
    return [f"-arch=sm_{capability[0]}{capability[1]}", "-std=c++17", "-default-device"]


def _compile(text: str, options: list[str]) -> bytes:
    lib, program, source = nvrtc(), c_void_p(), text.encode()
    status = lib.nvrtcCreateProgram(byref(program), source, b"deepmemory.cu", 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram failed with {status}")
    try:
        array = (c_char_p * len(options))(*(option.encode() for option in options))
        status, size = lib.nvrtcCompileProgram(program, len(options), array), c_size_t()
        if status:
            lib.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"compiling a kernel with {options} failed:\n{log.value.decode()}")
        lib.nvrtcGetCUBINSize(program, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(byref(program))


class LaunchAttribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute`` that sets the number of blocks in a cluster."""

    _fields_: ClassVar = [("id", c_int), ("pad", c_int), ("cluster", c_uint * 3), ("rest", c_uint * 13)]


class LaunchConfig(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_: ClassVar = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    ]


@cache
def _empty_kernel(capability: tuple[int, int]) -> bytes:
    return _compile('extern "C" __global__ void empty() {}', _options(capability))


def clusters_at_once(cluster: int, threads: int, shared_bytes: int, capability: tuple[int, int], device: int) -> int:
    """How many clusters this GPU runs at the same time, if each of their blocks fills a multiprocessor.

    Fewer than there are multiprocessors for: a cluster lies inside one group of them, and groups differ in size.
    None at all where the GPU has no clusters of this size.
    """
    _enter_context(device)
    module, function, count = c_void_p(), c_void_p(), c_int()
    _check(driver().cuModuleLoadData(byref(module), _empty_kernel(capability)), "loading a kernel")
    try:
        _check(driver().cuModuleGetFunction(byref(function), module, b"empty"), "finding a kernel")
        for attribute, value in (MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes), (NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1):
            _check(driver().cuFuncSetAttribute(function, attribute, c_int(value)), "setting up a kernel")
        size = LaunchAttribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1))
        config = LaunchConfig((cluster, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(size), 1)
        refused = driver().cuOccupancyMaxActiveClusters(byref(count), function, byref(config))
    finally:
        driver().cuModuleUnload(module)
    return 0 if refused else count.value


def _enter_context(device: int) -> c_void_p:
    """Make torch's context on a device this thread's own."""
    context = c_void_p()
    _check(driver().cuDevicePrimaryCtxRetain(byref(context), device), "asking for torch's context")
    _check(driver().cuCtxSetCurrent(context), "entering torch's context")
    return context


class Kernels:
    """The kernels for one shape and layout, loaded on one device; only those that ``save`` can go back.

    The blocks of a sweep of teams wait for one another, so that all of them must run at the same time.
    """

    def __init__(
        self, cubin: bytes, cluster: int, shared_bytes: tuple[int, int], save: bool, device: int, team: bool = False
    ) -> None:
        self._context, self._module, self._device, self._team = _enter_context(device), c_void_p(), device, team
        _check(driver().cuModuleLoadData(byref(self._module), cubin), "loading a kernel")
        self._sweeps = [self._find(b"sweep_forward"), *([self._find(b"sweep_backward")] if save else [])]
        self._products = self._find(b"sum_products") if save else None
        self._shared = shared_bytes
        for function, size in zip(self._sweeps, shared_bytes, strict=False):
            _check(
                driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, c_int(size)),
                f"reserving {size} bytes of shared memory",
            )
            if cluster > 8 and not team:
                _check(
                    driver().cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, c_int(1)),
                    "allowing a cluster of 16",
                )

    def _find(self, name: bytes) -> c_void_p:
        function = c_void_p()
        _check(driver().cuModuleGetFunction(byref(function), self._module, name), "finding a kernel")
        return function

    def sweep(self, backward: bool, arguments: array[int], blocks: int, runs: int, threads: int) -> None:
        """Queue one sweep on the current stream."""
        self._launch(self._sweeps[backward], blocks, runs, threads, self._shared[backward], arguments, self._team)

    def sum_products(self, arguments: array[int], blocks: int, runs: int, shared_bytes: int) -> None:
        """Queue all products of a layer on the current stream."""
        assert self._products is not None, "compiled for sweeps that save nothing"
        self._launch(self._products, blocks, runs, products.THREADS, shared_bytes, arguments)

    def _launch(
        self,
        function: c_void_p,
        blocks: int,
        runs: int,
        threads: int,
        shared: int,
        arguments: array[int],
        at_once: bool = False,
    ) -> None:
        """``arguments`` is the kernel's one struct, all of whose fields have 8 bytes; ``at_once``: all or no blocks."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self._launch(function, blocks, runs, threads, shared, arguments, at_once)
        parameters = ONE_POINTER(arguments.buffer_info()[0])
        stream = c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
        launch = function, blocks, runs, 1, threads, 1, 1, shared, stream, parameters, *(() if at_once else (None,))
        queue = driver().cuLaunchCooperativeKernel if at_once else driver().cuLaunchKernel
        status = queue(*launch)
        if status == INVALID_CONTEXT:  # autograd's thread has none until something of torch's ran there
            _check(driver().cuCtxSetCurrent(self._context), "entering torch's context")
            status = queue(*launch)
        if status:
            _check(status, "launching a kernel")
        return None
