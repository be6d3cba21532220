"""Which engine takes a case, and what a user hears where none can."""

import pytest
import torch

import deepmemory as dm
from deepmemory.ops import engines


def test_every_engine_is_listed_with_a_reason():
    listing = dm.engines()
    assert tuple(listing) == engines.NAMES
    assert listing["plain"].available
    assert all(entry.reason for entry in listing.values())


def test_an_engine_asked_for_by_name_never_gives_way(monkeypatch):
    monkeypatch.setattr(engines, "unavailable", lambda name: f"{name} is on holiday")
    x = torch.randn(5, 2, 3)
    for name in engines.FUSED:
        assert not dm.engines()[name].available
        with pytest.raises(RuntimeError, match=f"engine='{name}' cannot do this: {name} is on holiday.*engine='auto'"):
            dm.DMU(3, 4, engine=name)(x)
    layer = dm.DMU(3, 4)
    expected = layer(x)[0]
    layer.engine = "plain"
    assert torch.equal(layer(x)[0], expected)


def test_forward_mode_takes_the_plain_engine(monkeypatch):
    def refuse(name):
        raise AssertionError(f"{name} was asked inside forward mode")

    layer, x = dm.DMU(3, 4), torch.randn(5, 2, 3)
    monkeypatch.setattr(engines, "unavailable", refuse)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y, _ = layer(dual)
        assert torch.autograd.forward_ad.unpack_dual(y).tangent.abs().sum() > 0


@pytest.mark.parametrize("engine", ["auto", *engines.NAMES])
def test_an_empty_batch_needs_no_fused_engine(engine, monkeypatch):
    monkeypatch.setattr(engines, "unavailable", lambda name: "gone")
    assert dm.DMU(3, 4, engine=engine)(torch.randn(5, 0, 3))[0].shape == (5, 0, 4)
