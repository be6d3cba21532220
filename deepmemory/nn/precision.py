"""Which precision a call runs in, and which inputs and states fit it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from deepmemory import ops

HALF, WIDER = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)


def runs_in(tensor: Tensor) -> torch.dtype:
    """The dtype after autocast, which leaves float64, integers and tensors on other devices unchanged."""
    device, dtype = tensor.device.type, tensor.dtype
    if dtype is torch.float64 or not dtype.is_floating_point:
        return dtype
    autocast = device in ops.AUTOCAST and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else dtype


def warn_of_float32(module: nn.Module, qconfig: Any) -> None:
    """Warn that ``torch.ao.quantization``, which first sets a module's ``qconfig``, leaves the module in float32."""
    warnings.warn(
        f"{type(module).__name__}: torch.ao.quantization does not support this module and leaves it in float32; "
        "deepmemory.export.c(model, path, weights='int8') exports it with int8 weights",
        stacklevel=3,
    )


UNQUANTISED = property(fset=warn_of_float32)  # write-only: setting it warns, and hasattr(module, "qconfig") stays false


def check_state(name: str, hx: Any, like: Tensor) -> Tensor:
    """Return a tensor of the state in the precision of ``like``, or raise an error that names the module.

    A half-precision state, for instance from autocast, is widened, which is exact. Any other mix of precisions is an
    error, as in ``nn.GRU``.
    """
    if not isinstance(hx, Tensor):
        pair = "; only an LSTM has a pair (h, c) as its state" if isinstance(hx, tuple) else ""
        raise TypeError(f"{name}: hx should consist of tensors, got {type(hx).__name__}{pair}")
    if hx.device != like.device:
        raise RuntimeError(f"{name}: hx is on {hx.device} but the input is on {like.device}; move one with .to(...)")
    if hx.dtype == like.dtype or runs_in(hx) == runs_in(like):
        return hx
    if hx.dtype in HALF and like.dtype in WIDER:
        return hx.to(like.dtype)
    todo = f"Convert it: hx.to({like.dtype})" if hx.is_floating_point() else "Pass lengths by name: lengths=..."
    raise RuntimeError(f"{name}: hx has dtype {hx.dtype} but the input has {like.dtype}. {todo}")


def convert_input(input: Tensor, weight: Tensor) -> str:
    """Advice for an input whose dtype is not that of the weights."""
    change = f"Convert input: input.to({weight.dtype}), or "
    if input.is_floating_point():
        return f"{change}convert model: model.to({input.dtype})"
    return f"{change}convert indices, such as those of words, to vectors with an nn.Embedding"
