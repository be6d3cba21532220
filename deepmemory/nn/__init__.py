"""Recurrent layers with the contract of ``nn.GRU``."""

from deepmemory.nn.classic import GRU, LSTM, RNN
from deepmemory.nn.dmu import DMU, DMUCell
from deepmemory.nn.rhn import RHN, RHNCell
from deepmemory.nn.sizes import matched_hidden_size

__all__ = ["DMU", "GRU", "LSTM", "RHN", "RNN", "DMUCell", "RHNCell", "matched_hidden_size"]
