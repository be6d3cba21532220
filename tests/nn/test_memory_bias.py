"""A layer that starts out keeping its state: the same option of DMU, GRU and LSTM."""

import copy

import pytest
import torch
from layers import LAYERS, PEERS
from tolerances import assert_close
from torch import Tensor, nn

import deepmemory as dm

KINDS = {name: LAYERS[name] for name in ("DMU", "GRU", "LSTM")}
BIAS = 3.0


@pytest.fixture(params=KINDS)
def name(request) -> str:
    return request.param


@pytest.fixture
def kind(name):
    return KINDS[name]


def made(kind, *args, **options) -> nn.Module:
    torch.manual_seed(4)
    return kind(*args, **options)


def gate(name: str, bias_ih_or_last: Tensor, size: int) -> Tensor:
    """The bias of the gate that keeps the state: the first part of a DMU's last bias, the second of ``bias_ih``."""
    part = 0 if name == "DMU" else 1
    return bias_ih_or_last[part * size : (part + 1) * size]


def memory(name: str, layer: nn.Module) -> list[Tensor]:
    """That gate's bias in each layer and direction."""
    key = "bias_2_" if name == "DMU" else "bias_ih_"
    sizes = layer.hidden_size if isinstance(layer.hidden_size, tuple) else [layer.hidden_size] * layer.num_layers
    return [
        gate(name, bias.detach(), sizes[int(key_of.split("_l")[1][0])])
        for key_of, bias in layer.named_parameters()
        if key_of.startswith(key)
    ]


def test_it_is_added_to_one_gate_in_every_layer_and_direction(name, kind):
    plain, keeping = (made(kind, 3, [4, 5], bidirectional=True, memory_bias=bias) for bias in (0.0, BIAS))
    assert len(memory(name, keeping)) == 4
    for ours, theirs in zip(memory(name, keeping), memory(name, plain), strict=True):
        assert_close(ours, theirs + BIAS)
        ours.sub_(BIAS)
    assert_close(dict(keeping.state_dict()), dict(plain.state_dict()))  # nothing else differs


@torch.no_grad()
def test_a_fresh_layer_keeps_its_state(name, kind):
    x, h = torch.randn(20, 2, 3), torch.full((1, 2, 6), 0.5)

    def kept(bias: float) -> Tensor:
        """How far two states are from each other after 20 steps, relative to where they started."""
        layer = made(kind, 3, 6, memory_bias=bias)
        last = [layer(x, (state, state) if name == "LSTM" else state)[1] for state in (h, -h)]
        far, near = (state[1] if name == "LSTM" else state for state in last)
        return (far - near).mean()

    assert kept(6.0) > 0.8
    assert kept(0.0).abs() < 0.1


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_without_it_everything_is_as_in_torch(name):
    ours, theirs = (made(kinds[name], 3, 5, 2, bidirectional=True) for kinds in (LAYERS, PEERS))
    assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_weights_are_drawn_as_without_it(kind):
    after = []
    for bias in (0.0, BIAS):
        made(kind, 3, 5, memory_bias=bias)
        after.append(torch.rand(1))
    assert torch.equal(*after)


def test_reset_parameters_restores_it(name, kind):
    layer = made(kind, 3, 4, 2, memory_bias=BIAS)
    before = copy.deepcopy(layer.state_dict())
    nn.init.zeros_(layer.get_parameter("bias_2_l0" if name == "DMU" else "bias_ih_l0"))
    torch.manual_seed(4)
    layer.reset_parameters()
    assert_close(dict(layer.state_dict()), dict(before))


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_torchs_checkpoints_load_and_replace_it(name):
    theirs, ours = PEERS[name](3, 5, 2), LAYERS[name](3, 5, 2, memory_bias=BIAS)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 2, 3)
    assert_close(ours(x)[0], theirs(x)[0])


def test_the_layer_shows_it(kind):
    assert "memory_bias=3.0" in repr(kind(3, 4, memory_bias=3))
    assert "memory_bias" not in repr(kind(3, 4))


def test_it_needs_a_bias(kind):
    with pytest.raises(ValueError, match=r"memory_bias=3\.0 needs bias=True"):
        kind(3, 4, bias=False, memory_bias=BIAS)


class TestInitialisers:
    @staticmethod
    def zero_biases(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                nn.init.zeros_(parameter)

    def test_apply_with_one_that_zeroes_biases_leaves_it(self, name, kind):
        model = nn.Sequential(nn.Linear(3, 3), kind(3, 4, 2, bidirectional=True, memory_bias=BIAS))
        model.apply(self.zero_biases)
        assert not model[0].bias.any()
        for entries in memory(name, model[1]):
            assert_close(entries, torch.full_like(entries, BIAS))
        others = sum(int(weight.count_nonzero()) for key, weight in model[1].named_parameters() if "bias" in key)
        assert others == sum(entries.numel() for entries in memory(name, model[1]))

    def test_apply_with_anything_else_changes_nothing(self, kind):
        layer = kind(3, 4, memory_bias=BIAS)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()  # as a checkpoint may be
        layer.apply(lambda module: None)
        assert not any(parameter.any() for parameter in layer.parameters())
        layer.apply(lambda module: [nn.init.constant_(parameter, 0.5) for parameter in module.parameters()])
        assert all((parameter == 0.5).all() for parameter in layer.parameters())

    def test_apply_between_forward_and_backward(self, kind):
        layer = kind(3, 4, memory_bias=BIAS)
        y, _ = layer(torch.randn(5, 2, 3))
        layer.apply(lambda module: None)
        y.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())

    def test_cells_too(self):
        cell = dm.DMUCell(3, 4, memory_bias=BIAS)
        cell.apply(self.zero_biases)
        assert_close(cell.bias_2[:4].detach(), torch.full((4,), BIAS))

    def test_without_it_biases_become_zero(self, kind):
        layer = kind(3, 4)
        layer.apply(self.zero_biases)
        assert not any(parameter.any() for key, parameter in layer.named_parameters() if "bias" in key)


@pytest.mark.parametrize("layer", [dm.DMU, dm.GRU, dm.LSTM, dm.DMUCell])
def test_text_is_no_bias(layer):
    with pytest.raises(TypeError, match=r"memory_bias should be a number, got: str"):
        layer(3, 4, memory_bias="3")
