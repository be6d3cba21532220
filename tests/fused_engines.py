"""Layers on the fused engines that this machine has, for tests that hold for all of them."""

import torch
from layers import LAYERS, OWN, randomise
from torch import Tensor, nn

from deepmemory.ops import engines

DEVICES = {"cpu": "cpu", "triton": "cuda", "nvrtc": "cuda"}
DTYPES = {"cpu": torch.float64, "triton": torch.float32, "nvrtc": torch.float32}


def missing(name: str) -> str | None:
    """Why tests cannot run on an engine, or None."""
    if DEVICES[name] == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    return engines.unavailable(name)


def make(name: str, engine: str, *sizes: int, **options) -> nn.Module:
    """A layer with random weights on an engine, where and in the precision in which it runs."""
    own = {"device": DEVICES[engine], "dtype": DTYPES[engine], "engine": engine} | OWN.get(name, {})
    return randomise(LAYERS[name](*(sizes or (3, 5)), **own, **options))


def pair(name: str, engine: str, *sizes: int, **options) -> tuple[nn.Module, nn.Module]:
    """The same layer on a fused engine and on the plain one."""
    ours, plain = (make(name, engine, *sizes, **options) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    plain.engine = "plain"
    return ours, plain


def draw(engine: str, *shape: int) -> Tensor:
    """Numbers for a layer on this engine."""
    return torch.randn(*shape, device=DEVICES[engine], dtype=DTYPES[engine])
