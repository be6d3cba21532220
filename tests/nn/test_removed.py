"""Options that are gone: asking for one, or loading what had one, is never silently something else."""

import copy
import inspect

import pytest
import torch
from layers import CELLS, LAYERS

import deepmemory as dm
from deepmemory.nn.removed import REMOVED

ZONEOUT = [*LAYERS.values(), *CELLS.values()]
LAYER_NORM = [dm.DMU, dm.DMUCell]
CASES = [*((kind, "zoneout", 0.1) for kind in ZONEOUT), *((kind, "layer_norm", True) for kind in LAYER_NORM)]
every_case = pytest.mark.parametrize(
    ("kind", "option", "value"), CASES, ids=lambda part: getattr(part, "__name__", None)
)


@every_case
def test_the_error_says_what_was_given_why_it_is_gone_and_what_to_use(kind, option, value):
    instead = {"zoneout": "Use recurrent_dropout", "layer_norm": "nn.LayerNorm"}[option]
    message = rf"^{kind.__name__}: got {option}={value}, an option that was removed: .* Python loop.*{instead}"
    for given in (value, type(value)()):
        with pytest.raises(TypeError, match=message.replace(f"={value}", f"={given}")):
            kind(3, 4, **{option: given})


@pytest.mark.parametrize("kind", ZONEOUT, ids=lambda kind: kind.__name__)
def test_signatures_are_those_of_the_layers(kind):
    parameters = inspect.signature(kind).parameters
    assert "input_size" in parameters
    assert REMOVED.keys().isdisjoint(parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'zone'"):
        kind(3, 4, zone=0.1)


def loaded(layer: torch.nn.Module, **removed) -> torch.nn.Module:
    """What a file gives that was pickled when layers had these options."""
    state = layer.__getstate__() | removed
    name, values = state["definition"]
    if "layer_norm" in removed:
        values = values | {"layer_norm": removed["layer_norm"]}
    found = type(layer).__new__(type(layer))
    found.__setstate__(state | {"definition": (name, values)})
    return found


@every_case
def test_an_old_pickle_that_had_one_is_refused(kind, option, value):
    with pytest.raises(TypeError, match=f"^{kind.__name__}: got {option}={value}, an option that was removed"):
        loaded(kind(3, 4), **{option: value})


def test_an_old_pickle_without_them_loads():
    layer, x = dm.DMU(3, 4, transition=[4, 4], residual=True), torch.randn(6, 2, 3)
    assert torch.equal(loaded(layer, zoneout=0.0, layer_norm=False)(x)[0], layer(x)[0])


def test_the_weights_of_a_normalised_layer_do_not_fit():
    layer = dm.DMU(3, 4)
    old = layer.state_dict() | {"norm_weight_1_l0": torch.ones(4), "norm_bias_1_l0": torch.zeros(4)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "norm_weight_1_l0", "norm_bias_1_l0"'):
        layer.load_state_dict(old)


class OwnZoneout(dm.GRU):
    """A subclass that has such an option itself."""

    def __init__(self, *sizes: int, zoneout: float) -> None:
        super().__init__(*sizes)
        self.zoneout = zoneout


def test_a_subclass_may_have_its_own():
    assert copy.deepcopy(OwnZoneout(3, 4, zoneout=0.1)).zoneout == 0.1
