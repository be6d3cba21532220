"""Peers are of equal size, and our results are compared with the definition."""

import torch
from lab.bench.tiny import TINY, entries

from deepmemory.lab.bench.contestants import count_weights, dmu_weights, own_layer, size_for_weights
from deepmemory.lab.bench.shapes import SHAPES
from deepmemory.lab.bench.speed import TOLERANCE


def test_no_other_size_comes_closer_to_as_many_weights():
    for shape in SHAPES.values():
        weights = dmu_weights(shape)

        def gru(d, m=shape.input_size):
            return torch.nn.GRU(m, d, device="meta")

        size = size_for_weights(gru, weights)
        distances = [abs(count_weights(gru(d)) - weights) for d in (size - 1, size, size + 1)]
        assert distances[1] == min(distances)


def test_the_engines_asked_for():
    assert [name for name in entries(engines=["plain"]) if name.startswith("dm.")] == ["dm.DMU (plain)"]
    names = list(entries(cells=["DMU", "GRU"]))
    assert {"dm.DMU (plain)", "nn.GRU, equal weights", "nn.RNN, equal size"} <= set(names)
    assert len(set(names)) == len(names)


def test_our_error_is_against_the_definition():
    contestant = own_layer(TINY, "DMU", "auto", "cpu")
    assert contestant.error(torch.randn(5, 2, 2)) < TOLERANCE["float32"]
