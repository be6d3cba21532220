"""Layers on the fused engines that this machine has, for tests that hold for all of them."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from layers import LAYERS, OWN, randomise
from tolerances import assert_close
from torch import Tensor, nn

from deepmemory.ops import Sequences, engines, plain, triton

DEVICES = {"cpu": "cpu", "triton": "cpu" if triton.interpreted() else "cuda", "nvrtc": "cuda", "reference": "cpu"}
DTYPES = {"cpu": torch.float64, "triton": torch.float32, "nvrtc": torch.float32, "reference": torch.float64}


def missing(name: str) -> str | None:
    """Why tests cannot run on an engine, or None."""
    if name in ("plain", "reference"):
        return None
    if DEVICES[name] == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    return engines.unavailable(name)


def on_engines(names: Iterable[str]) -> list[Any]:
    """Parameters of tests that run on each of these engines, those that are missing marked so."""
    return [pytest.param(name, marks=pytest.mark.missing(name, missing(name))) for name in names]


needs_gpu = pytest.mark.missing("GPU", None if torch.cuda.is_available() else "not on this machine")


def make(name: str, engine: str, *sizes: int, **options) -> nn.Module:
    """A layer with random weights on an engine, where and in the precision in which it runs."""
    own = {"device": DEVICES[engine], "dtype": DTYPES[engine], "engine": engine} | OWN.get(name, {})
    return randomise(LAYERS[name](*(sizes or (3, 5)), **(own | options)))


def pair(name: str, engine: str, *sizes: int, **options) -> tuple[nn.Module, nn.Module]:
    """The same layer on a fused engine and on the plain one."""
    ours, plain = (make(name, engine, *sizes, **options) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    plain.engine = "plain"
    return ours, plain


def draw(engine: str, *shape: int) -> Tensor:
    """Numbers for a layer on this engine."""
    return torch.randn(*shape, device=DEVICES[engine], dtype=DTYPES[engine])


def loss(outputs: list[Tensor]) -> Tensor:
    """Neither linear nor symmetric, so that every entry's gradient differs and second derivatives are not zero."""
    return sum((o.sin() * torch.linspace(-1, 1, o.shape[-1]).to(o)).sum() for o in outputs)


def close(actual, expected) -> None:
    """By the table, each tensor measured against its own largest entry: gradients are sums over many steps."""
    actual, expected = torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        size = e.detach().abs().max().clamp(min=1) if e.numel() else 1
        assert_close(a.detach() / size, e.detach() / size, what=f"result {index}")


class Reference:
    """A fused engine made of the plain one: what the operators do is tested apart from any kernel.

    It keeps no trace, and in the backward pass computes and differentiates again. That happens in a thread of its own,
    since inside an operator torch records nothing. As on a GPU, a state that nobody gave is zeros without memory.
    """

    reads_zeros = True

    def unavailable(self) -> None:
        return None

    def refuses(self, *case) -> None:
        return None

    def trace_shape(self, rec, x, weights) -> tuple[int, ...]:
        return (1,)

    def forward(self, rec, x, state, weights, sequences, save):
        y, *final = run_by_run(rec, x, state, weights, sequences)
        return y, [f.clone() for f in final], x.new_zeros(1 if save else 0)

    def backward(self, rec, grad_y, grad_final, x, state, weights, sequences, y, trace, needs):
        def differentiate() -> list[Tensor | None]:
            leaves = [t.detach().requires_grad_() for t in (x, *state, *weights)]
            n = 1 + len(state)
            outputs = run_by_run(rec, leaves[0], leaves[1:n], leaves[n:], sequences)
            asked = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
            given = [(o, g) for o, g in zip(outputs, (grad_y, *grad_final), strict=True) if g is not None]
            outputs, grads = zip(*given, strict=True)
            found = iter(torch.autograd.grad(outputs, asked, grads, materialize_grads=True))
            return [next(found) if needed else None for needed in needs]

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(differentiate).result()


def run_by_run(rec, x: Tensor, state, weights, sequences: Sequences) -> list[Tensor]:
    """y and final states by the plain engine, with or without a dimension of runs."""
    state = [torch.zeros_like(s) if s._is_zerotensor() else s for s in state]
    if x.dim() == 3:
        y, final = plain.scan(rec, x, tuple(state), list(weights), sequences)
        return [y, *final]
    runs = [
        run_by_run(
            rec,
            x[r],
            [s[r] for s in state],
            [w[r] for w in weights],
            Sequences(*(t if t is None else t[r] for t in sequences)),
        )
        for r in range(len(x))
    ]
    return [torch.stack(parts) for parts in zip(*runs, strict=True)]
