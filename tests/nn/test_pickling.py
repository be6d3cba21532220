"""Whole modules through ``torch.save``: only classes that a user knows by name have to be trusted."""

import io

import pytest
import torch
from layers import CELLS, LAYERS, OWN
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import deepmemory as dm

MADE = {
    **{name: lambda name=name: LAYERS[name](3, 4, 2, bidirectional=True, **OWN.get(name, {})) for name in LAYERS},
    **{name: lambda name=name: CELLS[name](3, 4) for name in CELLS},
    "options": lambda: dm.DMU(3, 4, memory_bias=2.0, residual=True, transition=[5, 5, 5]),
    "projected": lambda: dm.LSTM(3, 4, proj_size=2, memory_bias=1.0),
    "module given": lambda: dm.DMU(3, 4, transition=nn.Linear(7, 8)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_whole_module_needs_its_public_class_alone(make):
    layer = make()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    needed = get_unsafe_globals_in_checkpoint(file)
    ours = [name for name in needed if name.startswith("deepmemory")]
    assert ours == [f"{type(layer).__module__}.{type(layer).__name__}"]
    assert type(layer) is getattr(dm, type(layer).__name__)
    file.seek(0)
    with safe_globals([type(layer), nn.ModuleList, nn.Linear]):
        loaded = torch.load(file, weights_only=True)
    x = torch.randn(2, 3) if type(layer) in CELLS.values() else torch.randn(5, 2, 3)
    assert torch.equal(loaded(x)[0], layer(x)[0])
    assert repr(loaded) == repr(layer)
    torch.manual_seed(0)
    loaded.reset_parameters()
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), layer.parameters(), strict=True))
