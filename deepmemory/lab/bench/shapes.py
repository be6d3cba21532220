"""The shapes that are timed: sizes of a DMU layer and of what goes through it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One case: the sizes of a DMU layer, of its batch, and how many runs are trained side by side."""

    name: str
    input_size: int
    transition: tuple[int, ...]
    hidden_size: int
    batch: int
    steps: int
    runs: int = 1


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("adding", 2, (5,), 5, 32, 105),
        Shape("adding-51", 2, (5,), 5, 32, 105, runs=51),
        Shape("music-2", 88, (122,), 122, 32, 200),
        Shape("music-10", 88, (136,) * 9, 136, 32, 200),
        Shape("ptb-1", 64, (), 100, 32, 100),
        Shape("ptb-2", 64, (122,), 122, 32, 100),
        Shape("ptb-5", 64, (131,) * 4, 131, 32, 100),
        Shape("ptb-10", 64, (136,) * 9, 136, 32, 100),
        Shape("mnist-64", 1, (), 128, 64, 784),
        Shape("mnist", 1, (), 128, 128, 784),
        Shape("mt-2", 650, (340,), 200, 32, 16),
        Shape("large", 512, (1024,), 512, 64, 512),
        Shape("wide", 768, (), 768, 16, 1024),
        Shape("rl", 256, (256,), 256, 1024, 16),
        Shape("rl-step", 256, (256,), 256, 256, 1),
        Shape("forecast", 16, (128,), 128, 256, 168),
        Shape("stream", 40, (64,), 64, 8, 4096),
        Shape("odd", 37, (93, 51), 77, 19, 211),
        Shape("deep-30", 32, (64,) * 29, 64, 64, 64),
        Shape("deep-wide", 830, (830,) * 9, 830, 20, 35),
        Shape("deep-1000", 1000, (1000,) * 9, 1000, 64, 70),
    )
}
CPU_SHAPES = ("adding", "adding-51", "music-2", "mnist-64", "music-10")
GPU_SHAPES = tuple(name for name in SHAPES if name not in ("music-2", "music-10", "mnist-64"))

# One size grows at a time from this shape.
GROWTH_FROM = Shape("growth", 64, (128,), 128, 32, 128)
GROWTH: dict[str, tuple[int, ...]] = {
    "steps": (32, 128, 512, 2048),
    "batch": (1, 8, 32, 128),
    "hidden_size": (16, 32, 64, 128, 256, 512),
    "depth": (1, 2, 5, 10),
    "runs": (1, 5, 20),
}


def grown(size: str, value: int) -> Shape:
    """:data:`GROWTH_FROM` with one size changed."""
    name = f"{size}={value}"
    if size == "depth":
        return replace(GROWTH_FROM, name=name, transition=(GROWTH_FROM.hidden_size,) * (value - 1))
    if size == "hidden_size":
        return replace(GROWTH_FROM, name=name, hidden_size=value, transition=(value,))
    sizes: dict[str, Any] = {size: value}
    return replace(GROWTH_FROM, name=name, **sizes)
