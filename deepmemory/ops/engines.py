"""Which engine does a case: the one place that knows them and picks one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from deepmemory.ops import cpu, nvrtc, triton
from deepmemory.ops.recurrence import FULL_LENGTH, Recurrence, Sequences, Variation


class FusedEngine(Protocol):
    """What a module under ``deepmemory.ops`` must offer to be an engine.

    Tensors carry a leading dimension of R runs, each with its own weights: x (R, T, B, m), each state
    (R, B, d), weights (R, ...), and what is in ``sequences``. All come without it where there is one run,
    x (T, B, m) and so on, and so do the results. ``trace`` is the engine's own record of the forward sweep,
    of the shape ``trace_shape`` tells; nobody else looks inside.
    """

    def unavailable(self) -> str | None:
        """Why this engine cannot run on this machine at all, or None."""

    def refuses(self, rec: Recurrence, x: Tensor, weights: list[Tensor], sequences: Sequences) -> str | None:
        """Why this engine cannot do this case, or None. Looks at device, dtype and shapes alone;
        tensors come as the caller has them, without the dimension of runs."""

    def trace_shape(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
        """Shape of the trace for this case, all in ``x``'s dtype."""

    def forward(
        self,
        rec: Recurrence,
        x: Tensor,
        state: list[Tensor],
        weights: list[Tensor],
        sequences: Sequences,
        save: bool,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """y (R, T, B, d), final states, trace (empty unless ``save``)."""

    def backward(
        self,
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
        """Gradients of x, each state and each weight, None where ``needs`` says nobody asks.

        ``grad_y`` and entries of ``grad_final`` are None where no gradient comes in."""


# In order of preference. Each engine refuses what it cannot do, so the order is all the rule there is: where an engine
# accepts a case, its kernels are faster than those of the ones after it (benchmarks/results, as CUDA graph).
FUSED: dict[str, FusedEngine] = {
    "nvrtc": cast(FusedEngine, nvrtc),
    "triton": cast(FusedEngine, triton),
    "cpu": cast(FusedEngine, cpu),
}
NAMES = ("plain", *FUSED)


class Availability(NamedTuple):
    """Whether an engine can run on this machine, and why not."""

    available: bool
    reason: str


@cache
def _ask(name: str) -> str | None:
    return FUSED[name].unavailable()


def unavailable(name: str) -> str | None:
    """Why this engine cannot run on this machine, or None; asked once."""
    return _ask(name)


# What torch.compiler.assume_constant_result does, without importing the compiler together with this package.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def choose(
    engine: str,
    rec: Recurrence,
    x: Tensor,
    weights: list[Tensor],
    sequences: Sequences = FULL_LENGTH,
    variation: Variation | None = None,
) -> str:
    """The engine for this case; an engine asked for by name never gives way in silence."""
    if engine == "plain":
        return engine
    if variation is not None:
        if engine == "auto":
            return "plain"
        raise RuntimeError(
            f"{rec.cell.upper()}: engine={engine!r} cannot do this: only the plain engine has {variation.named}. "
            "Use engine='auto' or engine='plain'."
        )
    if torch.autograd.forward_ad._current_level >= 0:  # forward-mode differentiation: only plain code has tangents
        if engine == "auto":
            return "plain"
        raise RuntimeError(f"{rec.cell.upper()}: engine={engine!r} has no forward-mode derivative; use engine='plain'")
    if engine != "auto":
        check(engine, rec, x, weights, sequences)
        return engine
    case = rec, x, weights, sequences
    return next((name for name in FUSED if unavailable(name) is None and FUSED[name].refuses(*case) is None), "plain")


def takes_as_they_are(
    engine: str,
    rec: Recurrence,
    x: Tensor,
    weights: list[Tensor],
    sequences: Sequences,
    variation: Variation | None,
) -> bool:
    """Whether an engine reads weights of another precision than x's as they are, and rounds them itself."""
    if weights[0].dtype is x.dtype or variation is not None or engine not in ("auto", *FUSED):
        return False
    return choose("auto", rec, x, weights, sequences) in (FUSED if engine == "auto" else (engine,))


def check(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor], sequences: Sequences = FULL_LENGTH) -> None:
    """Raise if this is no fused engine, or one that cannot do this case."""
    if engine not in FUSED:
        raise RuntimeError(f"{rec.cell.upper()}: no fused engine {engine!r}; choose from {', '.join(FUSED)}")
    why_not = unavailable(engine) or FUSED[engine].refuses(rec, x, weights, sequences)
    if why_not is not None:
        raise RuntimeError(
            f"{rec.cell.upper()}: engine={engine!r} cannot do this: {why_not}. "
            "Use engine='auto' to let the fastest engine that can take it, or engine='plain'."
        )
