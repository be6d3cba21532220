"""What the recurrent layers of a model do during a call: inputs, states and outputs of each layer and direction."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from deepmemory.gradients.summary import LayerCall
from deepmemory.nn.recurrent import Recurrent, State
from deepmemory.ops import Sequences

Run = Callable[[int, int, Tensor, State, Sequences], tuple[Tensor, State]]


@dataclass(frozen=True, eq=False, repr=False)
class Observed(LayerCall):
    """What one layer in one direction did during one call; time first, batch as the layer has it inside."""

    x: Tensor  # (T, B, m)
    start: State
    sequences: Sequences
    order: Tensor | None  # puts a sorted batch back into the caller's order
    y: Tensor  # (T, B, d)
    steps: list[State]  # the state after each time step; empty unless asked for

    def in_order(self, values: Tensor) -> Tensor:
        """Values (T, B, ...) in the caller's order, NaN at padding."""
        lengths = self.sequences.lengths
        if lengths is not None:
            padding = torch.arange(len(values), device=lengths.device)[:, None] >= lengths
            padding = padding.to(values.device)
            values = values.masked_fill(padding[(...,) + (None,) * (values.dim() - 2)], math.nan)
        return values if self.order is None else values.index_select(1, self.order.to(values.device))

    def states_before(self) -> Tensor:
        """The state h that each step starts from, (T, B, d)."""
        start, y = self.start[0].to(self.y.dtype)[None], self.y
        lengths, resets = self.sequences.lengths, self.sequences.resets
        before = torch.cat([y[1:], start]) if self.direction else torch.cat([start, y[:-1]])
        if self.direction and lengths is not None:
            last = torch.arange(len(y), device=y.device)[:, None] == lengths - 1
            before = torch.where(last[..., None], start, before)
        return before if resets is None else before.masked_fill(resets[..., None], 0)


@contextmanager
def observe(model: nn.Module, kind: type[Recurrent], stepwise: bool) -> Iterator[list[Observed]]:
    """Record every call of the layers of this kind inside the model; leaves the model as it was."""
    observed: list[Observed] = []
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # compiled code does not ask again what a layer runs
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if isinstance(module, kind):
                observe_one(name, module, stepwise, observed, undo)
        yield observed


def observe_one(name: str, module: Recurrent, stepwise: bool, observed: list[Observed], undo: ExitStack) -> None:
    """Record the calls of one module until ``undo`` is called."""
    original: Run = module._run
    order: list[Tensor | None] = [None]
    calls = -1

    def note_order(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        order[0] = given.unsorted_indices if isinstance(given, PackedSequence) else None

    def run(layer: int, direction: int, x: Tensor, state: State, sequences: Sequences) -> tuple[Tensor, State]:
        nonlocal calls
        calls += layer == direction == 0
        steps: list[State] = []
        if stepwise:
            y, final, steps = step_by_step(original, layer, direction, x, state, sequences)
        else:
            y, final = original(layer, direction, x, state, sequences)
        observed.append(Observed(name, calls, layer, direction, x, state, sequences, order[0], y, steps))
        return y, final

    undo.callback(module.register_forward_pre_hook(note_order, with_kwargs=True).remove)
    # On this one object: its class and its parameters stay as they are.
    replaced: dict[str, Any] = {"_run": run}
    if stepwise:  # nobody asks for gradients of weights, which would be taken at every step
        weights = module._weights
        replaced["_weights"] = lambda layer, direction: [weight.detach() for weight in weights(layer, direction)]
    for attribute, function in replaced.items():
        undo.callback(vars(module).pop, attribute)
        vars(module)[attribute] = function


def step_by_step(
    run: Run, layer: int, direction: int, x: Tensor, state: State, sequences: Sequences
) -> tuple[Tensor, State, list[State]]:
    """What ``run`` does in one go, as one call per time step; returns the states in between as well.

    Each state is a tensor of its own on which everything later depends, the output included, so that the gradient
    by it is the total derivative.
    """
    steps: list[State] = [() for _ in range(len(x))]
    outputs: list[Tensor] = [x for _ in range(len(x))]
    inputs = x.unbind(0)  # slices would each pass back a gradient of the length of x
    for t in reversed(range(len(x))) if direction else range(len(x)):
        real = None if sequences.lengths is None else sequences.lengths > t
        _, state = run(layer, direction, inputs[t][None], state, sequences.piece(t, t + 1))
        state = tuple(s.view_as(s) if s.requires_grad else s.detach().requires_grad_() for s in state)
        steps[t] = state
        outputs[t] = state[0] if real is None else torch.where(real[:, None], state[0], 0)
    return torch.stack(outputs), state, steps


def call(model: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
    """Call the model with one argument, or with a tuple of several."""
    args = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
    return model(*args, **options)


def check_contains(model: nn.Module, kind: type[Recurrent], function: str, what: str) -> None:
    """Raise where the model has no layer of this kind."""
    if not any(isinstance(module, kind) for module in model.modules()):
        raise ValueError(f"{function}: {type(model).__name__} is not and does not contain {what}")
