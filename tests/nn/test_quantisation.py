"""torch's quantisation, which does not know these layers, never skips one in silence."""

import copy
import warnings

import pytest
import torch
from layers import CELLS, LAYERS
from torch import nn

quantisation = pytest.importorskip("torch.ao.quantization")  # torch is moving it elsewhere
pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning"),
]


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
@pytest.mark.parametrize("asked", ["everything", "by name"])
def test_a_layer_that_stays_in_float32_says_so(kind, asked):
    module = {**LAYERS, **CELLS}[kind](3, 5).eval()
    model = nn.ModuleList([module, nn.Linear(5, 2)])
    which = None if asked == "everything" else {type(module), nn.Linear}
    message = rf"^{kind}: torch.ao.quantization .* leaves it in float32; deepmemory.export.c\(.*'int8'"
    with pytest.warns(UserWarning, match=message):
        quantised = quantisation.quantize_dynamic(model, which)
    x = torch.randn(4, 3)
    with torch.no_grad():
        expected, result = module(x), quantised[0](x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not isinstance(quantised[1], nn.Linear)


def test_nothing_is_said_without_quantisation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = copy.deepcopy(LAYERS["DMU"](3, 5))
        assert not hasattr(layer, "qconfig")
        assert layer.state_dict().keys() == LAYERS["DMU"](3, 5).state_dict().keys()
