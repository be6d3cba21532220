"""Recurrent layers and cells with the interface of ``nn.GRU`` and ``nn.GRUCell``."""

from deepmemory.nn.classic import GRU, LSTM, RNN
from deepmemory.nn.dmu import DMU, DMUCell
from deepmemory.nn.rhn import RHN, RHNCell
from deepmemory.nn.sizes import matched_hidden_size

__all__ = ["DMU", "GRU", "LSTM", "RHN", "RNN", "DMUCell", "RHNCell", "matched_hidden_size"]
