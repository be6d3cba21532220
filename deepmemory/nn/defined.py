"""What layers and cells share: how their weights start, how they are pickled, what torch's tools make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from deepmemory.nn.definition import DEFINITIONS, Definition
from deepmemory.nn.precision import UNQUANTISED


class Defined(nn.Module):
    """A module whose weights have names, shapes and initial values from a :class:`Definition`."""

    definition: Definition
    memory_bias: float
    qconfig = UNQUANTISED

    def _weights_by_layer(self) -> Iterator[tuple[dict[str, Tensor], int, int]]:
        """Weights by name, input size and hidden size of each layer and direction."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start again from fresh initial weights."""
        for weights, input_size, hidden_size in self._weights_by_layer():
            self.definition.reset(weights, input_size, hidden_size)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """``nn.Module.apply``; where ``fn`` sets a bias to zero, as many initialisers do, ``memory_bias`` stays."""
        entries = list(self._memory_entries())
        before = [part != 0 for part in entries]
        super().apply(fn)
        for part, were_set in zip(entries, before, strict=True):
            part.masked_fill_(were_set & (part == 0), self.memory_bias)
        return self

    def _memory_entries(self) -> Iterator[Tensor]:
        """The entries of biases that start with ``memory_bias``, of each layer and direction; without it, none."""
        for weights, _, hidden_size in self._weights_by_layer():
            if self.memory_bias:
                # .data, so that a call of apply between forward and backward is no change that autograd refuses
                yield self.definition.memory_entries(weights, hidden_size).data

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by ``torch.jit.script``, which would otherwise end in an error that names no module."""
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script does not work with this module; "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The definition as plain values, so that ``torch.load(weights_only=True)`` need trust public classes only."""
        plain = (type(self.definition).__name__, dict(vars(self.definition)))
        return self.__dict__ | {"definition": plain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`__getstate__`."""
        name, values = state["definition"]
        super().__setstate__(state | {"definition": DEFINITIONS[name](**values)})
