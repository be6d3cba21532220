"""The CPU engine: loops over time in C++, built with the package and loaded with ctypes.

``DEEPMEMORY_CPU_LEVEL`` forces an instruction-set level: baseline (SSE2, or NEON on ARM), avx2 or avx512. Without
it the best one this processor has is taken.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shlex
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from torch import Tensor

from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, Recurrence, Sequences

reads_zeros = False
LEVEL_VARIABLE = "DEEPMEMORY_CPU_LEVEL"

_CELL = {name: i for i, name in enumerate(CELLS)}
_ACTIVATION = {name: i for i, name in enumerate(ACTIVATIONS)}
_DTYPE = {torch.float32: 0, torch.float64: 1}
_HALF = (torch.bfloat16, torch.float16)  # computed in float32
_TILE = 16  # kLanes in plan.h
_HEADER = 16  # kTraceHeader in plan.h


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled engine, or why there is none."""
    found = [p for p in Path(__file__).parent.glob("engine.*") if p.suffix in (".so", ".dylib", ".dll")]
    if not found:
        return (
            "its compiled library is missing: no C++ compiler (GCC or Clang) was found when deepmemory was installed; "
            f"install one and run `{_build_again()}`"
        )
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"its compiled library does not load ({error}); reinstall deepmemory"
    for name in ("dm_forward", "dm_backward", "dm_record"):
        function = getattr(lib, name)
        function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int64
    lib.dm_level.argtypes, lib.dm_level.restype = (ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)), ctypes.c_char_p
    lib.dm_use_level.argtypes, lib.dm_use_level.restype = (ctypes.c_int64,), None
    wanted = os.environ.get(LEVEL_VARIABLE)
    if wanted:
        names = _levels(lib)
        if wanted not in names:
            return f"{LEVEL_VARIABLE}={wanted!r}, but this processor has {', '.join(names)}"
        lib.dm_use_level(names[wanted])
    return lib


def _build_again() -> str:
    """The command that compiles this package: by itself pip would take the wheel that it built without a compiler."""
    try:
        origin = json.loads(distribution("deepmemory").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a folder on the path
        origin = {}
    source = "deepmemory"
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{origin['url']}"
    elif "dir_info" in origin:
        folder = shlex.quote(url2pathname(urlsplit(origin["url"]).path))
        source = f"-e {folder}" if origin["dir_info"].get("editable") else folder
    return f"pip install --force-reinstall --no-deps --no-cache-dir --no-binary deepmemory {source}"


def _levels(lib: ctypes.CDLL) -> dict[str, int]:
    usable, found, i = ctypes.c_int64(), {}, 0
    while (name := lib.dm_level(i, ctypes.byref(usable))) is not None:
        if usable.value:
            found[name.decode()] = i
        i += 1
    return found


def levels() -> list[str]:
    """Instruction-set levels that this build has and this processor runs, slowest first."""
    lib = _library()
    return [] if isinstance(lib, str) else list(_levels(lib))


@contextmanager
def use_level(name: str) -> Iterator[None]:
    """Run everything inside at one instruction-set level; for tests and benchmarks."""
    lib = _library()
    if isinstance(lib, str):
        raise RuntimeError(f"no CPU engine: {lib}")
    lib.dm_use_level(_levels(lib)[name])
    try:
        yield
    finally:
        lib.dm_use_level(_levels(lib).get(os.environ.get(LEVEL_VARIABLE, ""), -1))


# The engine, as deepmemory.ops.engines.FusedEngine describes it.


def unavailable() -> str | None:
    """Why this engine cannot run on this machine at all, or None."""
    lib = _library()
    return lib if isinstance(lib, str) else None


def refuses(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """Why this engine cannot do this case, or None."""
    if x.device.type != "cpu":
        return f"it runs on the CPU and x is on {x.device}"
    if x.dtype not in _DTYPE and x.dtype not in _HALF:
        return f"it takes float32, float64, bfloat16 and float16, not {x.dtype}"
    if weights and weights[0].dtype is not x.dtype:
        return f"its weights are {weights[0].dtype}, and the input is {x.dtype}"
    if rec.projects(weights):
        return "it has no LSTM with a projected state (proj_size)"
    return None


def trace_shape(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """Shape of the trace: a header, then a record per row and step."""
    *runs, steps, batch, _ = x.shape
    record = _record(rec, len(runs), tuple([w.shape for w in weights]))
    rows_stored = batch if record > 0 else (batch + _TILE - 1) // _TILE * _TILE
    numbers = _HEADER + math.prod(runs) * steps * rows_stored * abs(record)
    return (2 * numbers if x.dtype in _HALF else numbers,)  # a float32 fills the place of two


def forward(
    rec: Recurrence, x: Tensor, state: list[Tensor], weights: list[Tensor], sequences: Sequences, save: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y (R, T, B, d), final states, trace (empty unless ``save``)."""
    if x.dtype in _HALF:
        wide_state, wide_weights = ([t.float() for t in tensors] for tensors in (state, weights))
        y, final, trace = forward(rec, x.float(), wide_state, wide_weights, _widened(sequences), save)
        return y.to(x.dtype), [end.to(x.dtype) for end in final], trace.view(x.dtype)
    width = state[0].shape[-1]
    first = x.dim() - 3  # dimension after the runs
    state, weights = _within_runs(state, first), _within_runs(weights, first)
    y = x.new_empty(*x.shape[:-1], width)
    final = [_empty_like(start) for start in state]
    trace = x.new_empty(*trace_shape(rec, x, weights)) if save else x.new_empty(0)
    call, _kept = _call(rec, x, width, sequences)
    call += (y.data_ptr(), trace.data_ptr() if save else 0, *_NO_GRAD_Y, 0)
    for start, end in zip(state, final, strict=True):
        call += (start.data_ptr(), start.stride(0) if first else 0, end.data_ptr(), 0, 0, 0)
    if len(state) == 1:
        call += _NO_STATE
    call.append(len(weights))
    for w in weights:
        call += (w.data_ptr(), w.stride(0) if first else 0, 0, w.shape[first])
    _run("dm_forward", call)
    return y, final, trace


def backward(
    rec: Recurrence,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor | None],
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of x, each state and each weight, None where ``needs`` says nobody asks."""
    if x.dtype in _HALF:
        grad_y, *ends = (None if g is None else g.float() for g in (grad_y, *grad_final))
        wide_state, wide_weights = ([t.float() for t in tensors] for tensors in (state, weights))
        record = y.float(), trace.view(torch.float32)
        own = _widened(sequences)
        wide = backward(rec, grad_y, ends, x.float(), wide_state, wide_weights, own, *record, needs)
        return [None if g is None else g.to(x.dtype) for g in wide]
    tensors = (x, *state, *weights)
    grads = [_empty_like(t) if needed else None for t, needed in zip(tensors, needs, strict=True)]
    first = x.dim() - 3  # dimension after the runs
    state, weights = _within_runs(state, first), _within_runs(weights, first)
    ends = [None if g is None else _within_runs([g], first)[0] for g in grad_final]
    y = y.contiguous()
    call, _kept = _call(rec, x, y.shape[-1], sequences)
    call += (y.data_ptr(), trace.data_ptr())
    call += _NO_GRAD_Y if grad_y is None else (grad_y.data_ptr(), *_strides(grad_y))
    grad_x, *grad = [0 if g is None else g.data_ptr() for g in grads]
    call.append(grad_x)
    for start, end, g in zip(state, ends, grad, strict=False):
        call += (start.data_ptr(), start.stride(0) if first else 0, 0)
        call += (0, 0, g) if end is None else (end.data_ptr(), end.stride(0) if first else 0, g)
    if len(state) == 1:
        call += _NO_STATE
    call.append(len(weights))
    for w, g in zip(weights, grad[len(state) :], strict=True):
        call += (w.data_ptr(), w.stride(0) if first else 0, g, w.shape[first])
    _run("dm_backward", call)
    return grads


# The call as plan.h's struct Call: a row of int64.

_NO_GRAD_Y = (0,) * 5
_NO_STATE = (0,) * 6


def _call(rec: Recurrence, x: Tensor, width: int, sequences: Sequences) -> tuple[list[int], list[Tensor | None]]:
    """The first fields of the call, up to those of the sequences, and tensors that must stay alive until it returns."""
    steps, batch, inputs = x.shape[-3:]
    call = [_DTYPE[x.dtype], _CELL[rec.cell], _ACTIVATION[rec.activation], rec.bias, rec.reverse, rec.residual]
    call += (_runs(x), steps, batch, inputs, width, torch.get_num_threads(), x.data_ptr(), *_strides(x))
    kept = [t if t is None or t.is_contiguous() else _within_runs([t], x.dim() - 3)[0] for t in sequences]
    for t in kept:
        call += (0, 0) if t is None else (t.data_ptr(), t.stride(0))
    return call, kept


def _widened(sequences: Sequences) -> Sequences:
    lengths, resets, *masks = sequences
    return Sequences(lengths, resets, *(None if mask is None else mask.float() for mask in masks))


def _empty_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _runs(x: Tensor) -> int:
    return x.shape[0] if x.dim() == 4 else 1


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides of runs, steps, rows and features."""
    return t.stride() if t.dim() == 4 else (0, *t.stride())


def _within_runs(tensors: list[Tensor], first: int) -> list[Tensor]:
    """Make tensors contiguous, except in the dimension of runs, which may be expanded; ``first`` is the next one."""
    return [t if t.is_contiguous() or _shared(t, first) else t.contiguous() for t in tensors]


def _shared(t: Tensor, first: int) -> bool:
    """Whether all runs have the same contiguous values."""
    return first == 1 and t.stride(0) == 0 and t[0].is_contiguous()


def _run(function: str, call: list[int]) -> None:
    row = array("q", call)
    if getattr(_library(), function)(row.buffer_info()[0]):
        raise MemoryError("deepmemory: the CPU engine found no memory for its scratch")


@lru_cache(maxsize=1024)
def _record(rec: Recurrence, first: int, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Elements of the trace per row and step; negative where rows come in whole tiles."""
    width = shapes[1][-1]
    call = [0, _CELL[rec.cell], _ACTIVATION[rec.activation], rec.bias, rec.reverse, 0, 1, 1, 1, 1, width, 1]
    call += (0,) * (5 + 8) + (0, 1) + (0,) * (5 + 1 + 12)  # nothing but a trace, which is not looked at
    call.append(len(shapes))
    for shape in shapes:
        call += (0, 0, 0, shape[first])
    record = array("q", call)
    lib = _library()
    assert not isinstance(lib, str), lib
    return int(lib.dm_record(record.buffer_info()[0]))
