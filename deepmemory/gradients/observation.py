"""Records the recurrent layers of a model during a call: inputs, states and outputs of each layer and direction."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from deepmemory.gradients.summary import LayerCall
from deepmemory.nn.recurrent import Recurrent, Run, State
from deepmemory.ops import Sequences


@dataclass(frozen=True, eq=False, repr=False)
class Observed(LayerCall):
    """The record of one call of one layer in one direction: time first, the batch in the layer's internal order."""

    x: Tensor  # (T, B, m)
    start: State
    sequences: Sequences
    order: Tensor | None  # puts a sorted batch back into the caller's order
    y: Tensor  # (T, B, d)
    steps: list[State]  # the state after each time step; empty unless recorded stepwise

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
    """Record every call of the layers of this kind inside the model.

    With ``stepwise`` the layers run one step at a time, so that every state is recorded; their weights then get no
    gradients, which would have to be computed at every step.
    """
    observed: list[Observed] = []
    with ExitStack() as contexts:
        if "torch._dynamo" in sys.modules:  # code that was compiled without an observer would not call it
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if isinstance(module, kind):
                recorder = Recorder(name, stepwise, observed)
                contexts.callback(module.register_forward_pre_hook(recorder.begin, with_kwargs=True).remove)
                contexts.enter_context(module.observed(recorder.run))
                if stepwise:
                    contexts.enter_context(frozen(module))
        yield observed


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Switch off the gradients of the module's weights."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@dataclass
class Recorder:
    """Records the calls of one module."""

    name: str
    stepwise: bool
    observed: list[Observed]
    calls: int = -1
    order: Tensor | None = None  # of the call's sequences if they are packed

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count a new call of the module and note the order of its sequences."""
        self.calls += 1
        given = args[0] if args else kwargs.get("input")
        self.order = given.unsorted_indices if isinstance(given, PackedSequence) else None

    def run(
        self, layer: int, direction: int, run: Run, x: Tensor, state: State, sequences: Sequences
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction and record it."""
        if self.stepwise:
            y, final, steps = step_by_step(run, x, state, sequences, reverse=bool(direction))
        else:
            (y, final), steps = run(x, state, sequences), []
        where = self.name, self.calls, layer, direction
        self.observed.append(Observed(*where, x, state, sequences, self.order, y, steps))
        return y, final


def step_by_step(
    run: Run, x: Tensor, state: State, sequences: Sequences, reverse: bool
) -> tuple[Tensor, State, list[State]]:
    """Call ``run`` once per time step instead of once; also return the states in between.

    Each state is a separate tensor, and everything later depends on it, including the output, so that the gradient
    with respect to it is the total derivative.
    """
    steps: list[State] = [() for _ in range(len(x))]
    outputs: list[Tensor] = [x for _ in range(len(x))]
    inputs = x.unbind(0)  # the gradient of each slice would be as long as x
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        real = None if sequences.lengths is None else sequences.lengths > t
        _, state = run(inputs[t][None], state, sequences.piece(t, t + 1))
        state = tuple(s.view_as(s) if s.requires_grad else s.detach().requires_grad_() for s in state)
        steps[t] = state
        outputs[t] = state[0] if real is None else torch.where(real[:, None], state[0], 0)
    return torch.stack(outputs), state, steps


def call(model: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
    """Call the model with one argument, or with a tuple of several."""
    args = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
    return model(*args, **options)


def check_contains(model: nn.Module, kind: type[Recurrent], function: str, what: str) -> None:
    """Raise if the model has no layer of this kind."""
    if not any(isinstance(module, kind) for module in model.modules()):
        raise ValueError(f"{function}: model should be or contain {what}, got {type(model).__name__}")
