"""Deep Memory Update: a recurrent layer with a deep transition, in the place of ``nn.GRU``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmemory import gradients
    from deepmemory.nn import DMU, GRU, LSTM, RHN, RNN, DMUCell, RHNCell
    from deepmemory.ops.engines import engines
    from deepmemory.optim import parameter_groups

__all__ = ["DMU", "GRU", "LSTM", "RHN", "RNN", "DMUCell", "RHNCell", "engines", "gradients", "parameter_groups"]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that the command line answers without waiting for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "gradients":
            return import_module("deepmemory.gradients")
        home = {"engines": "deepmemory.ops.engines", "parameter_groups": "deepmemory.optim"}.get(name, "deepmemory.nn")
        value = globals()[name] = getattr(import_module(home), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
