"""What is timed at a shape: our layers on their engines, and the peers they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import util
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import deepmemory as dm
from deepmemory.lab.bench.shapes import Shape

CELLS = ("DMU", "RHN", "RNN", "GRU", "LSTM")
WEIGHT_SCALE = 0.7  # factor of the initial weights when results are compared


@dataclass
class Contestant:
    """Something to be timed: ``run(x)`` returns y, ``leaves`` are the tensors whose gradients are taken.

    ``error(x)`` is the largest relative error of y and of the weights' gradients against the definition in float64.
    """

    run: Callable[[Tensor], Tensor]
    leaves: list[Tensor]
    weights: int
    hidden_size: int
    error: Callable[[Tensor], float] | None = None


@dataclass(frozen=True)
class Entry:
    """A contestant's name; ``build`` returns the contestant, or a function that runs its forward and backward pass."""

    name: str
    build: Callable[[], Contestant | Callable[[], None]]


def main_entries(shape: Shape, device: str, cells: Container[str], engines: Container[str]) -> Iterator[Entry]:
    """The entries every table needs: our layers on fused engines, and torch's GRU and LSTM of as many weights."""
    usable = usable_engines(device, engines)
    for cell in CELLS:
        if cell not in cells:
            continue
        fused = [engine for engine in usable if engine != "plain"]
        for engine in fused or (usable if cell == "DMU" else []):
            yield own_entry(shape, cell, engine, device)
            if cell == "DMU" and engine != "plain" and shape.runs == 1 and len(shape.transition) == 9:
                yield own_entry(shape, cell, engine, device, recompute=True)
    for kind in ("GRU", "LSTM"):
        yield torch_entry(shape, kind, device, "weights")


def further_entries(shape: Shape, device: str, cells: Container[str], engines: Container[str]) -> Iterator[Entry]:
    """Entries that take longer or matter less: the Python loop, torch's layers of the same state size, an RNN."""
    usable = usable_engines(device, engines)
    if "DMU" in cells and "plain" in usable and len(usable) > 1:
        yield own_entry(shape, "DMU", "plain", device)
    for kind, equal in (("GRU", "size"), ("LSTM", "size"), ("RNN", "weights"), ("RNN", "size")):
        yield torch_entry(shape, kind, device, equal)
    if device == "cpu" and shape.runs == 1 and util.find_spec("jax"):
        yield Entry("JAX lax.scan of the DMU", partial(jax_loop, shape))


def usable_engines(device: str, engines: Container[str]) -> list[str]:
    """Those of ``engines`` that this machine has for a device."""
    return [
        name
        for name, status in dm.engines().items()
        if name in engines and status.available and (name == "plain" or (name == "cpu") == (device == "cpu"))
    ]


def own_entry(shape: Shape, cell: str, engine: str, device: str, recompute: bool = False) -> Entry:
    """One of our layers on one engine."""
    name = f"dm.{cell} ({engine}{', recompute' if recompute else ''})"
    return Entry(name, partial(own_layer, shape, cell, engine, device, recompute))


def torch_entry(shape: Shape, kind: str, device: str, equal: str) -> Entry:
    """torch.nn's layer with as many weights as the DMU, or with the same state size."""
    return Entry(f"nn.{kind}, equal {equal}", partial(torch_layer, shape, kind, device, equal))


def own_layer(shape: Shape, cell: str, engine: str, device: str, recompute: bool = False) -> Contestant:
    """Build one of our layers; with several runs, all of them in one call."""

    def make(engine: str, activation: str = "leaky_relu", **options: Any) -> Any:
        m, d, hidden = shape.input_size, shape.hidden_size, list(shape.transition)
        if cell == "DMU":
            return dm.DMU(m, d, transition=hidden, activation=activation, engine=engine, **options)
        if cell == "RHN":
            return dm.RHN(m, rhn_size(shape), depth=len(hidden) + 1, engine=engine, **options)
        return getattr(dm, cell)(m, d, engine=engine, **options)

    torch.manual_seed(0)
    options: dict[str, Any] = {"recompute": recompute, "device": device}
    if shape.runs > 1:
        modules = [make(engine, **options) for _ in range(shape.runs)]
        stacked, _ = torch.func.stack_module_state(modules)
        skeleton = make(engine, device="meta", recompute=recompute)
        call = torch.vmap(lambda p, x: torch.func.functional_call(skeleton, p, (x,))[0])
        weights, size = count_weights(modules[0]), modules[0].hidden_size
        return Contestant(lambda x: call(stacked, x), list(stacked.values()), weights, size)

    module = make(engine, **options)

    def error(x: Tensor) -> float:
        # With tanh: a leaky ReLU whose input rounds to the other side of zero adds an error larger than rounding.
        # With smaller weights: thirty layers with their initial weights are chaotic, and no two programs agree.
        given = make(engine, "tanh", **options)
        with torch.no_grad():
            for parameter in given.parameters():
                parameter.mul_(WEIGHT_SCALE)
        definition = make("plain", "tanh", device=device, dtype=torch.float64)
        definition.load_state_dict(given.state_dict())
        y = given(x)[0]
        results = [y, *torch.autograd.grad(y.float().sum(), list(given.parameters()))]
        with torch.autocast(device, enabled=False):
            y = definition(x.double())[0]
        expected = [y, *torch.autograd.grad(y.sum(), list(definition.parameters()))]
        pairs = zip(results, expected, strict=True)
        return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)

    return Contestant(
        lambda x: module(x)[0], list(module.parameters()), count_weights(module), module.hidden_size, error
    )


def torch_layer(shape: Shape, kind: str, device: str, equal: str) -> Contestant:
    """Build torch.nn's layer; several runs are a Python loop over layers."""
    make = getattr(nn, kind)
    size = shape.hidden_size
    if equal == "weights":
        size = dm.matched_hidden_size(make, dmu(shape))
    modules = [make(shape.input_size, size).to(device) for _ in range(shape.runs)]

    def run(x: Tensor) -> Tensor:
        if shape.runs == 1:
            return modules[0](x)[0]
        return torch.stack([module(one)[0] for module, one in zip(modules, x, strict=True)])

    leaves = [parameter for module in modules for parameter in module.parameters()]
    return Contestant(run, leaves, count_weights(modules[0]), size)


def jax_loop(shape: Shape) -> Callable[[], None]:
    """JAX's ``lax.scan`` of the same DMU, forward and backward, compiled."""
    import jax
    import jax.numpy as jnp

    sizes = [shape.input_size + shape.hidden_size, *shape.transition, 2 * shape.hidden_size]
    key = jax.random.key(0)
    weights = [(jax.random.normal(key, (i, o)) / math.sqrt(i), jnp.zeros(o)) for i, o in pairwise(sizes)]
    x = jax.random.normal(key, (shape.steps, shape.batch, shape.input_size))

    def loss(weights: Any, x: Any) -> Any:
        def step(h: Any, x_t: Any) -> Any:
            a = jnp.concatenate([x_t, h], -1) @ weights[0][0] + weights[0][1]
            for weight, bias in weights[1:]:
                a = jax.nn.leaky_relu(a, 0.01) @ weight + bias
            z, candidate = jnp.split(a, 2, -1)
            keep = jax.nn.sigmoid(z)
            h = h * keep + jnp.tanh(candidate) * (1 - keep)
            return h, h

        return jax.lax.scan(step, jnp.zeros((shape.batch, shape.hidden_size)), x)[1].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(compiled(weights, x))


def count_weights(module: nn.Module) -> int:
    """How many weights a module has."""
    return sum(parameter.numel() for parameter in module.parameters())


def dmu(shape: Shape) -> dm.DMU:
    """The DMU of a shape, without memory for its weights."""
    return dm.DMU(shape.input_size, shape.hidden_size, transition=list(shape.transition), device="meta")


def rhn_size(shape: Shape) -> int:
    """The state size of an RHN of the same depth and as many weights."""
    return dm.matched_hidden_size(dm.RHN, dmu(shape), depth=len(shape.transition) + 1)
