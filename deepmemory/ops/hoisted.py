"""The work outside of the recurrence, for GPU engines: matrix products over all steps, before and after the sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmemory.ops import layout
from deepmemory.ops.layout import Source
from deepmemory.ops.plain import without_padding
from deepmemory.ops.recurrence import Recurrence, Sequences

# Largest number of blocks of 64 x 64 sums: eight for each multiprocessor of a large GPU, because a block waits for
# memory. In half precision cuBLAS uses larger blocks.
BLOCKS, BLOCKS_IN_HALF = 1024, 256
FEWEST_ROWS = 256  # of a piece
HALF = (torch.bfloat16, torch.float16)


def product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over rows of left times right: (R, I, N), (R, I, K) to (R, N, K), in the inputs' dtype or another.

    A sum over very many rows that results in a small matrix leaves most of a GPU idle, so it is cut into pieces: for
    all runs at once if they follow one another in memory, else run by run.
    """
    runs, rows, n = left.shape
    blocks = -(-n // 64) * -(-right.shape[2] // 64)
    together = all(t.stride(0) == rows * t.stride(1) for t in (left, right))
    pieces = pieces_of(rows, blocks * runs if together else blocks, left.dtype)
    if pieces == 1 or (not together and runs >= pieces):
        return _bmm(left.mT, right, dtype)
    a, b = (t.unflatten(1, (pieces, -1)) for t in (left, right))
    if together:
        return _bmm(a.flatten(0, 1).mT, b.flatten(0, 1), dtype).unflatten(0, (runs, pieces)).sum(1)
    return torch.stack([_bmm(of_a.mT, of_b, dtype).sum(0) for of_a, of_b in zip(a, b, strict=True)])


def _bmm(left: Tensor, right: Tensor, dtype: torch.dtype | None) -> Tensor:  # torch's refuses None as its out_dtype
    return torch.bmm(left, right) if dtype is None else torch.bmm(left, right, out_dtype=dtype)


def products_of_equals(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Like :func:`product`, for layers of one shape whose features are adjacent: (I, L, N), (I, L, K) to (L, N, K)."""
    rows, layers, n = left.shape
    blocks = layers * -(-n // 64) * -(-right.shape[2] // 64)
    a, b = (t.unflatten(0, (pieces_of(rows, blocks, left.dtype), -1)) for t in (left, right))
    parts = [_bmm(of_a.permute(1, 2, 0), of_b.transpose(0, 1), dtype) for of_a, of_b in zip(a, b, strict=True)]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]  # at once: half precision rounds every sum


def pieces_of(rows: int, blocks: int, dtype: torch.dtype = torch.float32) -> int:
    """The number of equal pieces into which a sum over ``rows`` is cut, if one piece is ``blocks`` blocks of work."""
    pieces = math.gcd(rows, 64)  # a power of two
    most = BLOCKS if dtype.itemsize >= 4 else BLOCKS_IN_HALF
    while pieces > 1 and (pieces * blocks > most or rows < pieces * FEWEST_ROWS):
        pieces //= 2
    return pieces


PRECISION_BY_NAME = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # newer torch; the two ways do not mix
# The functions behind torch.backends.cudnn.rnn.fp32_precision and ...cuda.matmul.allow_tf32 are called directly,
# because every pass of a layer reads these settings.
_precision_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_AS_IT_IS = nullcontext()


def tf32_allowed() -> bool:
    """Whether torch lets cuDNN's recurrent layers use TF32; this library's layers follow the same setting."""
    if _precision_of is not None:
        return bool(_precision_of("cuda", "rnn") == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


def matmul_like_the_sweep(x: Tensor) -> AbstractContextManager[None]:
    """Run float32 matrix products in the precision of the sweep over x, whatever torch's setting for products is."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return _AS_IT_IS
    wanted = tf32_allowed()
    return _AS_IT_IS if wanted == torch._C._get_cublas_allow_tf32() else _matmul_with_tf32(wanted)


@contextmanager
def _matmul_with_tf32(wanted: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32" if wanted else "ieee") if PRECISION_BY_NAME else ("allow_tf32", wanted)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The input's part of the first linear layer, for all steps: (R, T, B, features), or without runs."""
    x = without_padding(x, lengths)
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with matmul_like_the_sweep(x):
        if x.dim() == 3:
            return F.linear(x, weight, bias)
        flat = x.flatten(1, 2)
        out = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
    return out.unflatten(1, x.shape[1:3])


def input_gradient(x: Tensor, weight: Tensor, deltas: Tensor) -> Tensor:
    """The gradient of x, with or without runs."""
    rows = weight.shape[-2]
    delta = deltas if deltas.shape[-1] == rows else deltas.narrow(-1, 0, rows)
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    with matmul_like_the_sweep(x):
        if x.dim() == 3:
            return delta @ weight
        return torch.bmm(delta.flatten(1, 2), weight).view(x.shape)


def weight_gradients(
    rec: Recurrence,
    x: Tensor,
    h0: Tensor,
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
    deltas: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that ``needs`` asks for, from the records of both sweeps; with or without runs."""
    if x.dim() == 3:
        x, h0, y, trace, deltas = (t[None] for t in (x, h0, y, trace, deltas))
        weights = [w[None] for w in weights]
        grads = weight_gradients(rec, x, h0, weights, sequences.with_run(), y, trace, deltas, needs)
        return [None if g is None else g[0] for g in grads]
    out: list[list[Tensor]] = [[] for _ in weights]  # rows of each, in their order
    wanted = [part for part in layout.products(rec, weights) if needs[part.weight]]
    # Sums of products are float32 on a GPU; rounded, they would have to be converted back.
    half = x.is_cuda and x.dtype in HALF and not torch.version.hip
    dtype = torch.float32 if half and weights[1].dtype is torch.float32 else None
    sources = {part.source for part in wanted}
    if Source.ONES in sources:
        of_ones = deltas.sum((1, 2), dtype=weights[1].dtype)  # [R, features], one pass for all biases
    if Source.STATE in sources:
        start, before = _states_before(rec, h0, sequences, y)
    with matmul_like_the_sweep(x):
        for equal in list(_equals(wanted)) if x.shape[0] == 1 else ():
            delta, seen = _of_equals(deltas, trace, equal)
            if rec.cell == "rhn" and sequences.state_mask is not None:
                seen = seen * sequences.state_mask[0, :, None]
            together = products_of_equals(delta.flatten(0, 1), seen.flatten(0, 1), dtype).to(weights[1].dtype)
            for part, rows in zip(equal, together, strict=True):
                out[part.weight].append(rows[None])
                wanted.remove(part)
        for part in wanted:
            columns = slice(part.left, part.left + part.lefts)
            delta = deltas[..., columns]  # [R, T, B, rows]
            if part.source is Source.ONES:
                # Both biases of torch's own cells may have the same gradient, and each wants memory of its own.
                rows = of_ones[:, columns].clone() if rec.classic and part.weight == 3 else of_ones[:, columns]
            elif part.source is Source.STATE:
                later = delta[:, :-1] if rec.reverse else delta[:, 1:]
                sums = [product(later.flatten(1, 2), before.flatten(1, 2), dtype)] if later.shape[1] else []
                if not (sums and start._is_zerotensor()):
                    sums.append(product(_first_visited(delta, rec.reverse, sequences.lengths), start, dtype))
                rows = sums[0] + sums[1] if len(sums) > 1 else sums[0]
            else:
                if part.source is Source.X:
                    seen = without_padding(x, sequences.lengths)
                else:
                    seen = trace[..., part.right : part.right + part.rights]
                    if rec.cell == "rhn" and sequences.state_mask is not None:
                        seen = seen * sequences.state_mask[:, None]
                rows = product(delta.flatten(1, 2), seen.flatten(1, 2), dtype)
            out[part.weight].append(rows)
    joined = [torch.cat(rows, 1) if len(rows) > 1 else rows[0] if rows else None for rows in out]
    return [None if g is None else g.to(weight.dtype) for g, weight in zip(joined, weights, strict=True)]


def _equals(parts: Sequence[layout.Product]) -> Iterator[list[layout.Product]]:
    """Products of several layers of one shape that follow one another in deltas and trace."""
    equal: list[layout.Product] = []
    for part in (part for part in parts if part.source is Source.TRACE):
        last = equal[-1] if equal else None
        follows = last and (part.left, part.right) == (last.left + last.lefts, last.right + last.rights)
        if last and not (follows and (part.lefts, part.rights) == (last.lefts, last.rights)):
            if len(equal) > 1:
                yield equal
            equal = []
        equal.append(part)
    if len(equal) > 1:
        yield equal


def _of_equals(deltas: Tensor, trace: Tensor, equal: Sequence[layout.Product]) -> tuple[Tensor, Tensor]:
    """The factors of products of equal layers, (T, B, layers, features) each."""
    first, layers = equal[0], len(equal)
    delta = deltas[0].narrow(-1, first.left, layers * first.lefts)
    seen = trace[0].narrow(-1, first.right, layers * first.rights)
    return delta.unflatten(-1, (layers, first.lefts)), seen.unflatten(-1, (layers, first.rights))


def _states_before(rec: Recurrence, h0: Tensor, sequences: Sequences, y: Tensor) -> tuple[Tensor, Tensor]:
    """The states before the steps as weights see them: before each sequence's first, and before all others."""
    lengths, resets, mask, _ = sequences
    before = y[:, 1:] if rec.reverse else y[:, :-1]  # past its end a sequence's y is zero and adds nothing
    if resets is not None:
        # Each in one pass; masked_fill would copy first.
        h0 = torch.where(_first_visited(resets[..., None], rec.reverse, lengths), 0, h0)
        before = torch.where((resets[:, :-1] if rec.reverse else resets[:, 1:])[..., None], 0, before)
    return (h0, before) if mask is None else (h0 * mask, before * mask[:, None])


def _first_visited(record: Tensor, reverse: bool, lengths: Tensor | None) -> Tensor:
    """The step of a record (R, T, B, features) that each sequence begins with."""
    if not reverse:
        return record[:, 0]
    if lengths is None:
        return record[:, -1]
    last = (lengths - 1).clamp(min=0)[:, None, :, None]
    return record.gather(1, last.expand(-1, 1, -1, record.shape[-1]))[:, 0]
