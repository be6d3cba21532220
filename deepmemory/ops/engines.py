"""Which engine does a case: the one place that knows them and picks one."""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from deepmemory.ops.recurrence import Recurrence

# In order of preference. Each fused engine refuses what it cannot do, so the order is all the rule there is:
# where a fused engine accepts a case it was measured faster than plain (benchmarks/results).
FUSED = ("cuda", "cpu")
NAMES = ("plain", *FUSED)


class FusedEngine(Protocol):
    """What a module under ``deepmemory.ops`` must offer to be an engine.

    Tensors carry a leading dimension of R runs, each with its own weights: x (R, T, B, m), each state
    (R, B, d), weights (R, ...), lengths (R, B) int64 or None. ``trace`` is the engine's own record of
    the forward sweep, of the shape ``trace_shape`` tells; nobody else looks inside.
    """

    def unavailable(self) -> str | None:
        """Why this engine cannot run on this machine at all, or None."""

    def refuses(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
        """Why this engine cannot do this case, or None. Looks at device, dtype and shapes alone;
        x and weights come as the caller has them, without the dimension of runs."""

    def trace_shape(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
        """Shape of the trace for this case, all in ``x``'s dtype."""

    def forward(
        self,
        rec: Recurrence,
        x: Tensor,
        state: list[Tensor],
        weights: list[Tensor],
        lengths: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """y (R, T, B, d), final states, trace (empty unless ``save``)."""

    def backward(
        self,
        rec: Recurrence,
        grad_y: Tensor | None,
        grad_final: list[Tensor],
        x: Tensor,
        state: list[Tensor],
        weights: list[Tensor],
        lengths: Tensor | None,
        y: Tensor,
        trace: Tensor,
        needs: list[bool],
    ) -> list[Tensor | None]:
        """Gradients of x, each state and each weight, None where ``needs`` says nobody asks."""


class Availability(NamedTuple):
    available: bool
    reason: str


def load(name: str) -> FusedEngine:
    return cast(FusedEngine, importlib.import_module(f"deepmemory.ops.{name}"))


@cache
def unavailable(name: str) -> str | None:
    return load(name).unavailable()


def engines() -> dict[str, Availability]:
    """Which engines this machine has, and why not the others.

    >>> import deepmemory as dm
    >>> dm.engines()["plain"]
    Availability(available=True, reason='always there')
    """
    listing = {"plain": Availability(True, "always there")}
    for name in FUSED:
        why_not = unavailable(name)
        listing[name] = Availability(why_not is None, why_not or "ready")
    return listing


def check_name(engine: str) -> str:
    if engine != "auto" and engine not in NAMES:
        raise ValueError(f"unknown engine {engine!r}; choose from {', '.join(('auto', *NAMES))}")
    return engine


def choose(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str:
    """The engine for this case; an engine asked for by name never gives way in silence."""
    if engine == "plain":
        return engine
    for name in FUSED if engine == "auto" else (engine,):
        why_not = unavailable(name) or load(name).refuses(rec, x, weights)
        if why_not is None:
            return name
        if engine != "auto":
            raise RuntimeError(
                f"{rec.cell.upper()}: engine={engine!r} cannot do this: {why_not}. "
                "Use engine='auto' to let the fastest engine that can take it, or engine='plain'."
            )
    return "plain"


def forward_ad_active() -> bool:
    """Forward-mode differentiation is on: only the plain engine has tangents."""
    return torch.autograd.forward_ad._current_level >= 0
