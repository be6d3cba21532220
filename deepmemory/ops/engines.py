"""Which engine does a case: the one place that knows them and picks one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from deepmemory.ops import cpu, nvrtc, triton
from deepmemory.ops.recurrence import Recurrence, Sequences


class FusedEngine(Protocol):
    """What a module under ``deepmemory.ops`` must offer to be an engine.

    Tensors carry a leading dimension of R runs, each with its own weights: x (R, T, B, m), each state
    (R, B, d), weights (R, ...), and what is in ``sequences``. All come without it where there is one run,
    x (T, B, m) and so on, and so do the results. ``trace`` is the engine's own record of the forward sweep,
    of the shape ``trace_shape`` tells; nobody else looks inside.
    """

    reads_zeros: bool  # whether states may be torch's zeros without memory

    def unavailable(self) -> str | None:
        """Why this engine cannot run on this machine at all, or None."""

    def refuses(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
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
LONG = 100  # steps from which a Python loop on the CPU is worth a warning where the CPU engine is missing


class Availability(NamedTuple):
    """Whether an engine can run on this machine, and why not."""

    available: bool
    reason: str


class Listing(dict[str, Availability]):
    """Engines by name; printed, one line for each."""

    def __str__(self) -> str:
        marks = {True: "yes", False: "no "}
        return "\n".join(f"{name:6} {marks[available]}  {reason}" for name, (available, reason) in self.items())


@cache
def _ask(name: str) -> str | None:
    return FUSED[name].unavailable()


def unavailable(name: str) -> str | None:
    """Why this engine cannot run on this machine, or None; asked once."""
    return _ask(name)


# What torch.compiler.assume_constant_result does, without importing the compiler together with this package.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def engines() -> Listing:
    """Which engines this machine has, and why not the others: a dictionary that prints as a list.

    >>> import deepmemory as dm
    >>> print(str(dm.engines()).splitlines()[0])
    plain  yes  always there
    >>> dm.engines()["plain"]
    Availability(available=True, reason='always there')
    """
    listing = Listing(plain=Availability(True, "always there"))
    for name in FUSED:
        why_not = unavailable(name)
        listing[name] = Availability(why_not is None, why_not or "ready")
    return listing


def refusal(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """Why a fused engine cannot do this case on this machine, or None."""
    if engine not in FUSED:
        return f"the fused engines are {', '.join(FUSED)}"
    if torch.autograd.forward_ad._current_level >= 0:
        return "only the plain engine has forward-mode derivatives"
    return unavailable(engine) or FUSED[engine].refuses(rec, x, weights)


def check(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> None:
    """Raise if this is no fused engine, or one that cannot do this case."""
    why_not = refusal(engine, rec, x, weights)
    if why_not is not None:
        raise RuntimeError(
            f"{rec.cell.upper()}: engine={engine!r} cannot do this: {why_not}. "
            "Use engine='auto' to let the fastest engine that can take it, or engine='plain'."
        )


def choose(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str:
    """The engine for this case; an engine asked for by name never gives way in silence."""
    if engine == "plain" or not x.shape[-2]:  # an empty batch has nothing to be fast about
        return "plain"
    if engine != "auto":
        check(engine, rec, x, weights)
        return engine
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return "plain"  # ONNX knows torch's operators alone
    for name in FUSED:
        if refusal(name, rec, x, weights) is None:
            return name
    if not torch.compiler.is_compiling() and x.shape[-3] >= LONG:
        why_not = refusal("cpu", rec, x, weights)
        if why_not == unavailable("cpu") and cpu.refuses(rec, x, weights) is None:
            _warn_of_the_loop(str(why_not))
    return "plain"


@cache
def _warn_of_the_loop(why_not: str) -> None:
    """Say once in a process what every long sequence on the CPU waits for."""
    warnings.warn(
        "deepmemory: long sequences run as a Python loop on the CPU, many times slower than the CPU engine, which is "
        f"not available: {why_not}. Layers with engine='plain' run that loop without this warning.",
        RuntimeWarning,
        stacklevel=3,
    )


def reads_as_they_are(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> bool:
    """Whether a fused engine reads weights of another precision than x's as they are, and rounds them itself."""
    if weights[0].dtype is x.dtype:
        return False
    asked = FUSED if engine == "auto" else (engine,)
    return any(refusal(name, rec, x, weights) is None for name in asked)
