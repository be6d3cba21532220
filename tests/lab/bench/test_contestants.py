"""Peers are of equal size, and our results are compared with the definition."""

import torch
from lab.bench.tiny import TINY, entries

from deepmemory.lab.bench.contestants import count_weights, dmu, own_layer, torch_layer
from deepmemory.lab.bench.shapes import SHAPES
from deepmemory.lab.bench.speed import TOLERANCE


def test_no_other_size_comes_closer_to_as_many_weights():
    for shape in SHAPES.values():
        weights = count_weights(dmu(shape))
        size = torch_layer(shape, "GRU", "meta", "weights").hidden_size
        distances = [
            abs(count_weights(torch.nn.GRU(shape.input_size, d, device="meta")) - weights)
            for d in (size - 1, size, size + 1)
        ]
        assert distances[1] == min(distances)


def test_the_engines_asked_for():
    assert [name for name in entries(engines=["plain"]) if name.startswith("dm.")] == ["dm.DMU (plain)"]
    names = list(entries(cells=["DMU", "GRU"]))
    assert {"dm.DMU (plain)", "nn.GRU, equal weights", "nn.RNN, equal size"} <= set(names)
    assert len(set(names)) == len(names)


def test_our_error_is_against_the_definition():
    contestant = own_layer(TINY, "DMU", "auto", "cpu")
    assert contestant.error(torch.randn(5, 2, 2)) < TOLERANCE["float32"]
