"""What layers and cells share: initialisation of the weights, pickling, and the use with torch's tools."""

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
        """Yield the weights by name, the input size and the hidden size of each layer and direction."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Reset all weights to new initial values."""
        for weights, input_size, hidden_size in self._weights_by_layer():
            self.definition.reset(weights, input_size, hidden_size)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Like ``nn.Module.apply``; if ``fn`` sets biases to zero, as many initialisers do, restore ``memory_bias``."""
        entries = list(self._memory_entries())
        before = [part != 0 for part in entries]
        super().apply(fn)
        for part, were_set in zip(entries, before, strict=True):
            part.masked_fill_(were_set & (part == 0), self.memory_bias)
        return self

    def _memory_entries(self) -> Iterator[Tensor]:
        """Yield the bias entries that ``memory_bias`` is added to, for each layer and direction; nothing if it is 0."""
        for weights, _, hidden_size in self._weights_by_layer():
            if self.memory_bias:
                # .data, so that autograd does not refuse a call of apply between forward and backward
                yield self.definition.memory_entries(weights, hidden_size).data

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by ``torch.jit.script``, which would otherwise raise an error that does not name the module."""
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script does not work with this module; "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Replace the definition by plain values: ``torch.load(weights_only=True)`` then needs only public classes."""
        plain = (type(self.definition).__name__, dict(vars(self.definition)))
        return self.__dict__ | {"definition": plain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`__getstate__`."""
        name, values = state["definition"]
        super().__setstate__(state | {"definition": DEFINITIONS[name](**values)})
