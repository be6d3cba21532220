"""The DMU's own options: transitions, activations, initial weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from layers import randomise, results
from tolerances import assert_close
from torch import nn

import deepmemory as dm

ACTIVATIONS = {
    "leaky_relu": lambda a: F.leaky_relu(a, 0.01),
    "relu": F.relu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
}


def by_hand(pairs, activation, x, h):
    """The paper's equations from (weight, bias) pairs, over x (T, B, m) from h (B, d)."""
    outputs = []
    for x_t in x:
        a = torch.cat([x_t, h], -1)
        for number, (weight, bias) in enumerate(pairs, 1):
            a = a @ weight.T + (0 if bias is None else bias)
            if number < len(pairs):
                a = activation(a)
        d = h.shape[-1]
        z, candidate = a[..., :d], a[..., d:]
        h = h * torch.sigmoid(z) + torch.tanh(candidate) * (1 - torch.sigmoid(z))
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transition", [None, [], [7], [7, 3, 6]], ids=["default", "basic", "wide", "deep"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_forward_is_the_formula_on_transition_weights(activation, transition, bias, engine):
    options = {"transition": transition, "activation": activation, "bias": bias, "engine": engine}
    dmu = randomise(dm.DMU(3, 4, 2, bidirectional=True, dtype=torch.float64, **options))
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    inner = x
    for layer in range(2):
        pairs = dmu.transition_weights(layer)
        assert len(pairs) == dmu.depth == (2 if transition is None else len(transition) + 1)
        assert pairs[0][0].shape[1] == inner.shape[-1] + 4
        assert pairs[-1][0].shape[0] == 8
        forward = by_hand(pairs, ACTIVATIONS[activation], inner, torch.zeros(2, 4, dtype=x.dtype))
        pairs = dmu.transition_weights(layer, 1)
        back = by_hand(pairs, ACTIVATIONS[activation], inner.flip(0), torch.zeros(2, 4, dtype=x.dtype)).flip(0)
        inner = torch.cat([forward, back], -1)
    assert_close(dmu(x)[0], inner)
    grads = torch.autograd.grad(dmu(x)[0].square().sum(), list(dmu.parameters()))
    assert_close(grads, torch.autograd.grad(inner.square().sum(), list(dmu.parameters())))


def test_default_transition_is_one_hidden_layer_as_wide_as_the_state():
    default, written = dm.DMU(3, 5), dm.DMU(3, 5, transition=[5])
    assert default.depth == 2
    assert {k: v.shape for k, v in default.state_dict().items()} == {
        k: v.shape for k, v in written.state_dict().items()
    }
    layers = dm.DMU(3, [5, 8])
    assert layers.transition_weights(0)[0][0].shape == (5, 8)
    assert layers.transition_weights(1)[0][0].shape == (8, 13)


class TestTransitionGivenAsModule:
    @staticmethod
    def dense(dmu: dm.DMU, layer: int = 0, direction: int = 0) -> nn.Sequential:
        """The module that does what the DMU's own weights do."""
        modules: list[nn.Module] = []
        for weight, bias in dmu.transition_weights(layer, direction):
            linear = nn.Linear(*reversed(weight.shape), dtype=weight.dtype)
            linear.load_state_dict({"weight": weight, "bias": bias})
            modules += [linear, nn.Tanh()]
        return nn.Sequential(*modules[:-1])

    @pytest.mark.parametrize("container", [list, tuple, nn.ModuleList])
    def test_one_per_layer_and_direction(self, container):
        own = randomise(dm.DMU(3, 4, 2, bidirectional=True, transition=[5], activation="tanh", dtype=torch.float64))
        given = container([self.dense(own, layer, way) for layer in range(2) for way in range(2)])
        dmu = dm.DMU(3, 4, 2, bidirectional=True, transition=given, dtype=torch.float64)
        assert dmu.depth == 2
        x, hx = torch.randn(6, 3, 3, dtype=torch.float64), torch.rand(4, 3, 4, dtype=torch.float64)
        lengths = torch.tensor([6, 0, 4])
        x[:, 1], x[4:, 2] = float("nan"), float("nan")  # padding
        ours, theirs = (results(module, x, hx, lengths=lengths) for module in (dmu, own))
        assert_close(ours["outputs"], theirs["outputs"])
        for key in ("x", "hx0"):
            assert_close(ours["gradients"][key], theirs["gradients"][key])

    def test_a_single_module_and_the_cell(self):
        own = randomise(dm.DMU(3, 4, transition=[5], activation="tanh"))
        dmu, cell = dm.DMU(3, 4, transition=self.dense(own)), dm.DMUCell(3, 4, transition=self.dense(own))
        x = torch.randn(5, 2, 3)
        y, _ = dmu(x)
        assert_close(y, own(x)[0])
        h = None
        for t, x_t in enumerate(x):
            h = cell(x_t, h)
            assert_close(h, y[t])
        assert dmu.depth == cell.depth == 2

    def test_any_kind_of_module(self):
        class Bilinear(nn.Module):
            def __init__(self):
                super().__init__()
                self.mix = nn.Bilinear(7, 7, 8)

            def forward(self, xh):
                return self.mix(xh, xh)

        for transition in (Bilinear(), nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 8))):
            dmu = dm.DMU(3, 4, transition=transition)
            y, _ = dmu(torch.randn(5, 2, 3))
            y.sum().backward()
            assert all(p.grad is not None for p in dmu.parameters())
            assert {id(p) for p in dmu.parameters()} == {id(p) for p in transition.parameters()}

    def test_a_module_without_weights(self):
        class Fixed(nn.Module):
            def forward(self, xh):
                return torch.cat([xh, xh], -1)[..., :8]

        assert dm.DMU(3, 4, transition=Fixed())(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)
        assert dm.DMUCell(3, 4, transition=Fixed())(torch.randn(2, 3)).shape == (2, 4)
        assert dm.DMU(3, 4, transition=Fixed()).depth == 1

    def test_under_autocast_the_state_stays_float32(self):
        dmu, x = dm.DMU(3, 4, 2, transition=[nn.Linear(7, 8), nn.Linear(8, 8)]), torch.randn(50, 2, 3)
        with torch.autocast("cpu", torch.bfloat16):
            y, h_n = dmu(x)
            same, _ = dmu(x, torch.zeros(2, 2, 4))
        assert y.dtype == h_n.dtype == torch.float32
        assert torch.equal(y, same)

    def test_moves_with_the_layer(self):
        dmu = dm.DMU(3, 4, transition=nn.Linear(7, 8), dtype=torch.float64)
        assert dmu(torch.randn(5, 2, 3).double())[0].dtype == torch.float64
        assert dmu.float()(torch.randn(5, 2, 3))[0].dtype == torch.float32


def xavier(weight: torch.Tensor, gain: float) -> float:
    return gain * math.sqrt(6 / sum(weight.shape))


def fills(weight: torch.Tensor, bound: float) -> bool:
    """Uniform in [-bound, bound]: never beyond it, near it somewhere, of its variance."""
    return bool(
        weight.abs().max() <= bound
        and weight.abs().max() > 0.97 * bound
        and abs(weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.05
    )


@pytest.mark.parametrize(
    ("activation", "gain"),
    [("leaky_relu", math.sqrt(2 / (1 + 0.01**2))), ("relu", math.sqrt(2)), ("tanh", 5 / 3)],
)
@pytest.mark.parametrize("kind", [dm.DMU, dm.DMUCell])
def test_initial_weights_are_xaviers_on_the_joined_matrix(kind, activation, gain):
    module = kind(30, 50, transition=[60, 40], activation=activation, memory_bias=3.0)
    weights = dict(module.named_parameters())
    weights = {name.removesuffix("_l0"): weight.detach() for name, weight in weights.items()}
    joined = torch.cat([weights["weight_ih"], weights["weight_hh"]], -1)
    assert joined.shape == (60, 80)
    assert fills(joined, xavier(joined, gain))
    assert fills(weights["weight_ih"], xavier(joined, gain))
    assert fills(weights["weight_hh"], xavier(joined, gain))
    assert fills(weights["weight_2"], xavier(weights["weight_2"], gain))
    assert fills(weights["weight_3"], xavier(weights["weight_3"], 1.0))
    assert (weights["bias_1"] == 0).all()
    assert (weights["bias_2"] == 0).all()
    assert (weights["bias_3"][:50] == 3).all()
    assert (weights["bias_3"][50:] == 0).all()


def test_the_basic_modules_only_layer_is_an_output_layer():
    dmu = dm.DMU(30, 50, transition=[], memory_bias=1.0)
    ((joined, bias),) = dmu.transition_weights()
    assert fills(joined, xavier(joined, 1.0))
    assert bias.tolist() == [1.0] * 50 + [0.0] * 50


def test_memory_bias_is_set_in_every_layer_and_direction():
    dmu = dm.DMU(3, [4, 5], bidirectional=True, memory_bias=2.5)
    for layer, width in enumerate([4, 5]):
        for direction in range(2):
            bias = dmu.transition_weights(layer, direction)[-1][1]
            assert bias.tolist() == [2.5] * width + [0.0] * width


def test_memory_bias_makes_a_fresh_module_remember():
    x, h = torch.randn(20, 8, 3), torch.rand(1, 8, 6) * 2 - 1
    forgets, remembers = (dm.DMU(3, 6, memory_bias=bias)(x, h)[1] for bias in (0.0, 6.0))
    assert (remembers - h).abs().max() < 0.2
    assert (forgets - h).abs().max() > 0.5


def test_highway_starts_like_linear_layers():
    rhn = dm.RHN(25, 64, depth=2)
    assert fills(rhn.weight_ih_l0, 1 / 5)
    for name in ("weight_hh_l0", "weight_2_l0"):
        assert fills(getattr(rhn, name), 1 / 8)
    for name in ("bias_1_l0", "bias_2_l0"):
        assert 0.9 / 8 < getattr(rhn, name).abs().max() <= 1 / 8


def test_highway_is_its_formula(engine):
    rhn = randomise(dm.RHN(3, 4, depth=3, dtype=torch.float64, engine=engine))
    x, s = torch.randn(5, 2, 3, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    y, _ = rhn(x, s[None])
    for t, x_t in enumerate(x):
        for micro in (1, 2, 3):
            recurrent = rhn.weight_hh_l0 if micro == 1 else getattr(rhn, f"weight_{micro}_l0")
            a = s @ recurrent.T + getattr(rhn, f"bias_{micro}_l0") + (x_t @ rhn.weight_ih_l0.T if micro == 1 else 0)
            candidate, gate = torch.tanh(a[:, :4]), torch.sigmoid(a[:, 4:])
            s = candidate * gate + s * (1 - gate)
        assert_close(y[t], s)
