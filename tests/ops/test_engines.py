"""Which engine takes a case, and what a user hears where none can."""

import warnings

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
        with pytest.raises(
            RuntimeError, match=f"engine='{name}' cannot be used here: {name} is on holiday.*engine='auto'"
        ):
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


class TestWithoutTheCpuEngine:
    """A long sequence then takes a Python loop, and nobody is left to wonder why that is slow."""

    @pytest.fixture(autouse=True)
    def _gone(self, monkeypatch):
        monkeypatch.setattr(engines, "unavailable", lambda name: f"{name} is on holiday")
        engines._warn_of_the_loop.cache_clear()
        yield
        engines._warn_of_the_loop.cache_clear()

    def test_the_first_long_sequence_warns_and_no_other(self):
        layer, x = dm.DMU(3, 4), torch.randn(engines.LONG, 2, 3)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            layer(x[1:])
            assert not heard
            layer(x)
            dm.GRU(3, 4, bidirectional=True)(x)
        (warning,) = heard
        assert warning.category is RuntimeWarning
        assert "cpu is on holiday" in str(warning.message)
        assert "engine='plain'" in str(warning.message)

    def test_what_no_engine_would_change_is_silent(self):
        x = torch.randn(engines.LONG, 2, 3)
        layers = [
            dm.DMU(3, 4, engine="plain"),
            dm.DMU(3, 4, transition=torch.nn.Linear(7, 8)),
            dm.LSTM(3, 4, proj_size=2),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # torch has warnings of its own on first use
            for layer in layers:
                layer(x)
            with torch.autograd.forward_ad.dual_level():
                dm.DMU(3, 4)(torch.autograd.forward_ad.make_dual(x, x))

    def test_a_compiled_graph_stays_whole(self, monkeypatch):
        monkeypatch.setattr(engines, "LONG", 8)  # the graph has all steps
        layer, x = dm.GRU(3, 4), torch.randn(engines.LONG, 2, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            y, _ = torch.compile(layer, fullgraph=True, backend="eager")(x)
        layer.engine = "plain"
        torch.testing.assert_close(y, layer(x)[0])
