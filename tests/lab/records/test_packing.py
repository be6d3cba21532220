"""Packed values are unpacked bit by bit."""

import math

import torch

from deepmemory.lab.records.packing import pack, pack_curves, unpack, unpack_curves


def test_numbers_survive_packing():
    values = (0.1, math.inf, 3e-40, -2.0)
    exact = tuple(torch.tensor(values).tolist())
    assert unpack(pack(values)) == exact
    curves = {"train_loss": exact, "valid_loss": exact[::-1], "valid_accuracy": exact}
    assert unpack_curves(pack_curves(curves), list(curves)) == curves
    assert math.isnan(unpack(pack([math.nan]))[0])
