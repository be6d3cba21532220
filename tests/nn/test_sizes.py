"""Layers with equally many weights."""

import pytest
import torch
from layers import CELLS, LAYERS, OWN
from torch import nn

import deepmemory as dm


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


LIKE = {
    "one layer": nn.GRU(10, 64),
    "stacked": nn.LSTM(7, 33, num_layers=3),
    "both ways, no bias": nn.GRU(5, 20, 2, bias=False, bidirectional=True),
    "projected": nn.LSTM(6, 40, proj_size=9),
    "tiny": nn.RNN(1, 2),
    "different widths": dm.GRU(8, [30, 10]),
}


@pytest.mark.parametrize("name", [*LAYERS, "nn.GRU", "nn.LSTM"])
@pytest.mark.parametrize("like", LIKE.values(), ids=LIKE)
def test_no_other_size_comes_closer(name, like):
    kind, options = getattr(nn, name[3:]) if name.startswith("nn.") else LAYERS[name], OWN.get(name, {})
    size = dm.matched_hidden_size(kind, like, **options)
    shared = {"num_layers": like.num_layers, "bias": like.bias, "bidirectional": like.bidirectional}

    def distance(size: int) -> int:
        return abs(count(kind(like.input_size, size, **shared, **options)) - count(like))

    assert distance(size) == min(distance(near) for near in range(max(1, size - 2), size + 3))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in OWN])
def test_a_layer_matches_itself(name):
    assert dm.matched_hidden_size(LAYERS[name], LAYERS[name](10, 77, 2)) == 77


@pytest.mark.parametrize("kind", CELLS.values(), ids=CELLS)
def test_cells(kind):
    cell = nn.GRUCell(10, 64)
    size = dm.matched_hidden_size(kind, cell)
    assert abs(count(kind(10, size)) / count(cell) - 1) < 0.02


def test_arguments_come_before_those_of_the_other_layer():
    like = nn.GRU(10, 64)
    assert dm.matched_hidden_size(dm.GRU, like, num_layers=2) < 64 < dm.matched_hidden_size(dm.GRU, like, input_size=2)


def test_no_random_number_is_drawn():
    like = nn.GRU(10, 64)
    state = torch.get_rng_state()
    dm.matched_hidden_size(dm.DMU, like)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_size_in_the_place_of_a_layer_is_an_error():
    with pytest.raises(TypeError, match=r"like should be a recurrent layer.* got: int"):
        dm.matched_hidden_size(dm.DMU, 64)
