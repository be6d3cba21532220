# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"
"""Loads, stores and products of the sweeps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def get(pointer, at, mask):
    """Load as float32, zero where masked."""
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def put(pointer, at, value, mask):
    """Store in the dtype of the tensor."""
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def continues(resets, row, rows, mask, ON: tl.constexpr, BM: tl.constexpr):
    """Which sequences go on at a step instead of beginning anew, [BM, 1]; ``row`` is the step's first in (R, T, B)."""
    out = tl.full((BM,), 1, tl.int1)
    if ON:
        out = tl.load(resets + row + rows, mask=mask, other=0) == 0
    return out[:, None]


@triton.jit
def before(earlier, of_earlier, start, of_start, has_before, columns, mask):
    """The state before this step, [BM, BN]: what stands one step earlier, or the initial state."""
    one = get(earlier, of_earlier + columns[None, :], mask & has_before)
    other = get(start, of_start + columns[None, :], mask & (has_before == 0))
    return one + other  # one of the two is a masked zero


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32."""
    if PRECISION == "upcast":  # Triton's interpreter takes bfloat16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
