"""Lengths, resets and masks of a call: checked, and brought into the layout that the layers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmemory.nn.precision import runs_in
from deepmemory.ops.fused import in_functorch


def check_lengths(name: str, lengths: Tensor | Sequence[int] | int | None, x: Tensor) -> Tensor | None:
    """Return a copy of the lengths (B,) as int64 on the device of x (T, B, m)."""
    if lengths is None:
        return None
    steps, batch = x.shape[:2]
    if not isinstance(lengths, Tensor):  # as_tensor would make a tensor a constant in torch.jit.trace
        lengths = torch.as_tensor(lengths)
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype is torch.bool:
        raise TypeError(f"{name}: lengths should be integers, got {lengths.dtype}")
    if lengths.dim() == 0 and batch == 1:
        lengths = lengths[None]
    if lengths.shape != (batch,):
        raise ValueError(
            f"{name}: lengths should have one entry per sequence, shape ({batch},), got {tuple(lengths.shape)}"
        )
    # Reading values back would stall a GPU and is impossible inside a transform or a compiled graph.
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and not in_functorch():
        low, high = (int(v) for v in lengths.aminmax()) if batch else (0, 0)
        if low < 0 or high > steps:
            raise ValueError(
                f"{name}: lengths should lie between 0 and the number of time steps, {steps}; "
                f"got values from {low} to {high}"
            )
    wait = x.device.type == "cpu"  # else a copy from a GPU could be read before it is complete
    return lengths.to(x.device, torch.int64, non_blocking=not wait, copy=True)  # the caller may change theirs later


def check_resets(name: str, resets: Any, x: Tensor, batched: bool, batch_first: bool) -> Tensor | None:
    """Return the resets as (T, B) for x (T, B, m); they are given in the layout of the input."""
    if resets is None:
        return None
    if not isinstance(resets, Tensor) or resets.dtype is not torch.bool:
        given = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"{name}: resets should be a tensor of bools, got {given}")
    steps, batch = x.shape[:2]
    expected = ((batch, steps) if batch_first else (steps, batch)) if batched else (steps,)
    if resets.shape != expected:
        layout = ("(batch, time)" if batch_first else "(time, batch)") if batched else "(time,)"
        raise ValueError(
            f"{name}: resets should be laid out like the input, {layout} = {expected}, got {tuple(resets.shape)}"
        )
    resets = resets.to(x.device, non_blocking=True)
    if not batched:
        return resets[:, None]
    return resets.transpose(0, 1) if batch_first else resets


def check_masks(
    name: str, masks: Any, widths: Mapping[str, int], x: Tensor, batched: bool, order: Tensor | None
) -> dict[str, Tensor]:
    """Return the masks (B, width) by name, in the order of the sequences of x (T, B, m)."""
    if not isinstance(masks, Mapping):
        raise TypeError(
            f"{name}: masks should be a dict of tensors, as returned by draw_masks, got {type(masks).__name__}"
        )
    unknown = masks.keys() - widths.keys()
    if unknown:
        raise ValueError(f"{name}: there is no mask {sorted(unknown)[0]!r}; this layer has {', '.join(widths)}")
    return {key: _check_mask(name, key, mask, widths[key], x, batched, order) for key, mask in masks.items()}


def _check_mask(name: str, key: str, mask: Any, width: int, x: Tensor, batched: bool, order: Tensor | None) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: masks[{key!r}] should be a tensor, got {type(mask).__name__}")
    expected = (x.shape[1], width) if batched else (width,)
    if mask.shape != expected:
        raise ValueError(f"{name}: masks[{key!r}] should have the shape {expected}, got {tuple(mask.shape)}")
    if mask.device != x.device:
        raise RuntimeError(
            f"{name}: masks[{key!r}] is on {mask.device} but the input is on {x.device}; move one with .to(...)"
        )
    if mask.dtype != x.dtype and runs_in(mask) != runs_in(x):
        raise RuntimeError(
            f"{name}: masks[{key!r}] has dtype {mask.dtype} but the input has {x.dtype}. Convert it: mask.to({x.dtype})"
        )
    if mask.requires_grad:
        raise RuntimeError(f"{name}: masks are constants, and masks[{key!r}] requires a gradient; pass mask.detach()")
    if not batched:
        return mask[None]
    return mask if order is None else mask.index_select(0, order)
