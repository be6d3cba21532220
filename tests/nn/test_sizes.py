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


@pytest.mark.parametrize(
    ("like", "given"), [(64, "int"), ([], "none"), ([nn.GRU(2, 3), nn.Linear(2, 3)], "GRU, Linear")], ids=str
)
def test_what_is_no_layer_is_an_error(like, given):
    with pytest.raises(TypeError, match=rf"like should be a recurrent layer or several, got: {given}; .*function"):
        dm.matched_hidden_size(dm.DMU, like)


def test_several_layers_share_one_size():
    encoder, decoder = nn.GRU(10, 64, 2, bidirectional=True), nn.GRU(24, 64, bias=False)

    def distance(size: int) -> int:
        made = count(dm.DMU(10, size, 2, bidirectional=True)) + count(dm.DMU(24, size, bias=False))
        return abs(made - count(encoder) - count(decoder))

    size = dm.matched_hidden_size(dm.DMU, [encoder, decoder])
    assert distance(size) == min(distance(near) for near in range(size - 2, size + 3))
    assert size == dm.matched_hidden_size(dm.DMU, nn.ModuleList([encoder, decoder]))
    assert dm.matched_hidden_size(dm.DMU, [encoder]) == dm.matched_hidden_size(dm.DMU, encoder)


class Tagger(nn.Module):
    """Stacked cells, whose input is the state below, and an output layer: all grow with the size."""

    def __init__(self, cell: type[nn.Module], size: int, words: int = 500):
        super().__init__()
        self.input_size = 10
        self.cells = nn.ModuleList([cell(10, size), cell(size, size)])
        self.out = nn.Linear(size, words)


def test_a_function_matches_whole_models():
    old = Tagger(nn.GRUCell, 64)
    size = dm.matched_hidden_size(lambda size: Tagger(dm.DMUCell, size), old)

    def distance(size: int) -> int:
        return abs(count(Tagger(dm.DMUCell, size)) - count(old))

    assert distance(size) == min(distance(near) for near in range(size - 2, size + 3))
    of_layers = dm.matched_hidden_size(dm.DMUCell, old.cells)
    assert of_layers != size
    assert dm.matched_hidden_size(lambda size, words: Tagger(nn.GRUCell, size, words), old, words=500) == 64


def test_a_function_that_ignores_the_size_is_an_error():
    with pytest.raises(ValueError, match="size 2 has no more weights than size 1"):
        dm.matched_hidden_size(lambda size: nn.Linear(2, 2), nn.GRU(10, 64))


def test_a_layer_in_the_place_of_its_class_is_named():
    with pytest.raises(TypeError, match=r"got a module: DMU; call it as in matched_hidden_size\(dm.DMU, nn.GRU"):
        dm.matched_hidden_size(dm.DMU(10, 16), nn.GRU(10, 64))
