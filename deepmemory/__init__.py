"""Deep Memory Update: a recurrent layer with a deep transition, in the place of ``nn.GRU``."""

from deepmemory import gradients
from deepmemory.nn import DMU, GRU, LSTM, RHN, RNN, DMUCell, RHNCell
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
    "gradients",
    "parameter_groups",
]

__version__ = "0.1.0"
