"""The engines, and the choice of one for each case."""

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

    Tensors have a leading dimension of R runs, each with its own weights: x (R, T, B, m), each state
    (R, B, d), weights (R, ...), and the tensors in ``sequences``. For one run, all inputs and results come
    without this dimension: x is (T, B, m) and so on. ``trace`` is the engine's own record of the forward
    sweep. Its shape is what ``trace_shape`` returns; only the engine reads it.
    """

    reads_zeros: bool  # whether states may be torch's zero tensors without memory

    def unavailable(self) -> str | None:
        """Why this engine cannot run on this machine at all, or None."""

    def refuses(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
        """Why this engine does not support this case, or None. Depends on device, dtype and shapes only;
        the tensors are the caller's, without the dimension of runs."""

    def trace_shape(self, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
        """Shape of the trace for this case; its dtype is that of ``x``."""

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
        """Gradients of x, each state and each weight, None where ``needs`` is false.

        ``grad_y`` and entries of ``grad_final`` are None where there is no gradient."""


# In order of preference. Each engine refuses the cases that it does not support, so no other rule is needed: where an
# engine accepts a case, its kernels are faster than those of the engines after it (benchmarks/results, as CUDA graph).
FUSED: dict[str, FusedEngine] = {
    "nvrtc": cast(FusedEngine, nvrtc),
    "triton": cast(FusedEngine, triton),
    "cpu": cast(FusedEngine, cpu),
}
NAMES = ("plain", *FUSED)
LONG = 100  # number of steps from which a missing CPU engine is worth a warning


class Availability(NamedTuple):
    """Whether an engine can run on this machine, and if not, why."""

    available: bool
    reason: str


class Listing(dict[str, Availability]):
    """Engines by name; prints one line for each."""

    def __str__(self) -> str:
        marks = {True: "yes", False: "no "}
        return "\n".join(f"{name:6} {marks[available]}  {reason}" for name, (available, reason) in self.items())


@cache
def _ask(name: str) -> str | None:
    return FUSED[name].unavailable()


def unavailable(name: str) -> str | None:
    """Why this engine cannot run on this machine, or None; determined once."""
    return _ask(name)


# Like torch.compiler.assume_constant_result, but without importing the compiler together with this package.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def engines() -> Listing:
    """Which engines this machine can use, and why not the others: a dictionary that prints as a list.

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
    """Why a fused engine cannot be used for this case on this machine, or None."""
    if engine not in FUSED:
        return f"the fused engines are {', '.join(FUSED)}"
    if torch.autograd.forward_ad._current_level >= 0:
        return "only the plain engine supports forward-mode derivatives"
    return unavailable(engine) or FUSED[engine].refuses(rec, x, weights)


def check(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> None:
    """Raise if this is not a fused engine, or if it cannot be used for this case."""
    why_not = refusal(engine, rec, x, weights)
    if why_not is not None:
        raise RuntimeError(
            f"{rec.cell.upper()}: engine={engine!r} cannot be used here: {why_not}. "
            "Use engine='auto' to choose the fastest engine that supports this case, or engine='plain'."
        )


def choose(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str:
    """Choose the engine for this case; one requested by name is never replaced, except by plain for an empty batch."""
    if engine == "plain" or not x.shape[-2]:  # an empty batch needs no fast engine
        return "plain"
    if engine != "auto":
        check(engine, rec, x, weights)
        return engine
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return "plain"  # ONNX supports only torch's own operators
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
    """Warn once in a process that long sequences on the CPU run without the CPU engine."""
    warnings.warn(
        "deepmemory: long sequences run as a Python loop on the CPU, many times slower than the CPU engine, which is "
        f"not available: {why_not}. Use engine='plain' to run the loop without this warning.",
        RuntimeWarning,
        stacklevel=3,
    )


def reads_as_they_are(engine: str, rec: Recurrence, x: Tensor, weights: list[Tensor]) -> bool:
    """Whether a fused engine reads weights in another precision than that of x, and rounds them itself."""
    if weights[0].dtype is x.dtype:
        return False
    asked = FUSED if engine == "auto" else (engine,)
    return any(refusal(name, rec, x, weights) is None for name in asked)
