"""Deep Memory Update: a recurrent layer with a deep transition, a drop-in replacement for ``nn.GRU``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmemory import export, gradients
    from deepmemory.nn import DMU, GRU, LSTM, RHN, RNN, DMUCell, RHNCell, matched_hidden_size
    from deepmemory.ops.engines import engines
    from deepmemory.optim import divide_rates, parameter_groups

__all__ = [
    "DMU",
    "GRU",
    "LSTM",
    "RHN",
    "RNN",
    "DMUCell",
    "RHNCell",
    "divide_rates",
    "engines",
    "export",
    "gradients",
    "matched_hidden_size",
    "parameter_groups",
]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, so that the command line responds without waiting for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("export", "gradients"):
            return import_module(f"{__name__}.{name}")
        homes = {"engines": "ops.engines", "divide_rates": "optim", "parameter_groups": "optim"}
        value = globals()[name] = getattr(import_module(f"{__name__}.{homes.get(name, 'nn')}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
