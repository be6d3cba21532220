"""The gradient by every state, whatever the layer, its engine and the layout of its input."""

import pytest
import torch
from fused_engines import needs_gpu
from layers import LAYERS, OWN, randomise
from tolerances import assert_close
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import deepmemory as dm

KINDS = list(LAYERS)


def double(kind: str, *sizes: int, **options) -> nn.Module:
    return randomise(LAYERS[kind](*sizes, dtype=torch.float64, **OWN.get(kind, {}), **options))


def weighed(out) -> torch.Tensor:
    """A loss in which every entry of the output counts differently."""
    y = out[0].data if isinstance(out[0], nn.utils.rnn.PackedSequence) else out[0]
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def whole_derivatives(layer: nn.Module, x: torch.Tensor, loss) -> list[torch.Tensor]:
    """dL/dh_t of a one-layer network, by cutting the sequence and asking for the gradient of the state there."""
    norms = []
    for t in range(1, len(x)):
        y1, state = layer(x[:t])
        state = [s.detach().requires_grad_() for s in (state if isinstance(state, tuple) else (state,))]
        y2, _ = layer(x[t:], tuple(state) if len(state) > 1 else state[0])
        output = torch.cat([y1[:-1].detach(), state[0], y2])
        grads = torch.autograd.grad(loss((output,)), state)
        norms.append(torch.stack([grad[0].norm(dim=-1) for grad in grads]))
    return norms


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_are_those_of_a_sequence_cut_there(kind, engine):
    layer = double(kind, 3, 5, engine=engine)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    found = dm.gradients.flow(layer, x, weighed)
    assert [part.state for part in found] == (["h", "c"] if kind == "LSTM" else ["h"])
    expected = torch.stack(whole_derivatives(layer, x, weighed))  # [T - 1, parts, B]
    for index, part in enumerate(found):
        assert_close(part.norms[:-1], expected[:, index])
    direct = torch.linspace(-1, 2, 7 * 4 * 5, dtype=torch.float64).view(7, 4, 5)[-1].norm(dim=-1)
    assert_close(found[0].norms[-1], direct)


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_layout_and_packing_tells_the_same(kind):
    """Layers, directions, batch_first, lengths= and packed input, sorted or not."""
    plain_layer = double(kind, 3, 4, num_layers=2, bidirectional=True, engine="plain")
    layer = double(kind, 3, 4, num_layers=2, bidirectional=True, batch_first=True)
    layer.load_state_dict(plain_layer.state_dict())
    lengths = torch.tensor([3, 6, 1])
    x = torch.randn(3, 6, 3, dtype=torch.float64)

    def squares(out):
        y = out[0].data if isinstance(out[0], nn.utils.rnn.PackedSequence) else out[0]
        return y.square().sum() + sum(state.square().sum() for state in (out[1] if kind == "LSTM" else (out[1],)))

    flows = [
        dm.gradients.flow(plain_layer, x.transpose(0, 1), squares, lengths=lengths),
        dm.gradients.flow(layer, x, squares, lengths=lengths),
        dm.gradients.flow(layer, pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), squares),
    ]
    parts = 4 * (2 if kind == "LSTM" else 1)
    for found in flows[1:]:
        assert found.loss == pytest.approx(flows[0].loss)
        assert len(found) == parts
        for part, expected in zip(found, flows[0], strict=True):
            assert (part.layer, part.direction, part.state) == (expected.layer, expected.direction, expected.state)
            torch.testing.assert_close(part.norms, expected.norms, equal_nan=True)
    for b, length in enumerate(lengths):
        alone = dm.gradients.flow(layer, x[b, :length], squares)
        for part, expected in zip(alone, flows[0], strict=True):
            assert_close(part.norms[:, 0], expected.norms[:length, b])
            assert expected.norms[length:, b].isnan().all()


class Network(nn.Module):
    """Two recurrent layers of different kinds, one of them called twice, and something on top."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.encoder = dm.DMU(4, 5, transition=nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 10)))
        self.decoder = nn.ModuleDict({"rnn": dm.LSTM(5, 5)})
        self.out = nn.Linear(5, 1)

    def forward(self, ids, scale=1.0):
        y, _ = self.encoder(self.embed(ids))
        first, state = self.decoder["rnn"](y)
        second, _ = self.decoder["rnn"](first, state)
        return scale * self.out(second).mean()


def test_a_whole_model_is_left_as_it_was():
    model = Network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(10, (6, 3))
    found = dm.gradients.flow(model, (ids,), lambda out: out, scale=2.0)
    assert [(part.name, part.call, part.state) for part in found] == [
        ("encoder", 0, "h"),
        *(("decoder.rnn", call, state) for call in (0, 1) for state in "hc"),
    ]
    assert found.pick(name="decoder.rnn", call=1, state="c").norms.shape == (6, 3)
    with pytest.raises(LookupError, match="2 of 5 parts"):
        found.pick(state="c")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert found.loss == pytest.approx(model(ids, scale=2.0).item())
    assert "encoder" in str(found)


def test_frozen_weights_and_no_grad_change_nothing():
    layer, x = dm.GRU(3, 4), torch.randn(5, 2, 3)
    expected = dm.gradients.flow(layer, x, weighed)[0].norms
    layer.requires_grad_(False)
    with torch.no_grad():
        assert_close(dm.gradients.flow(layer, x, weighed)[0].norms, expected)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_compiled_model_is_watched_uncompiled():
    layer, x = dm.DMU(3, 4), torch.randn(5, 2, 3)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    (part,) = dm.gradients.flow(compiled, x, weighed)
    assert_close(part.norms, dm.gradients.flow(layer, x, weighed)[0].norms)
    assert len(dm.gradients.gates(compiled, x)) == 1


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_tells_the_same(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # float32 on the GPU means float32
    layer, x = randomise(LAYERS[kind](3, 4, num_layers=2)), torch.randn(6, 3, 3)
    expected = dm.gradients.flow(layer, x, weighed)
    weights = torch.linspace(-1, 2, 6 * 3 * 4).view(6, 3, 4).cuda()
    found = dm.gradients.flow(layer.cuda(), x.cuda(), lambda out: (out[0] * weights).sum())
    for part, other in zip(found, expected, strict=True):
        assert_close(part.norms, other.norms, torch.float32)


def test_a_failing_model_is_left_as_it_was():
    layer = dm.GRU(3, 4)

    def fail(out):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        dm.gradients.flow(layer, torch.randn(5, 2, 3), fail)
    assert all(parameter.requires_grad for parameter in layer.parameters())
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \(5, 2, 4\)"):
        dm.gradients.flow(layer, torch.randn(5, 2, 3), lambda out: out[0])
    with pytest.raises(ValueError, match="should be or contain a recurrent layer of deepmemory"):
        dm.gradients.flow(nn.GRU(3, 4), torch.randn(5, 2, 3), weighed)
    with pytest.raises(ValueError, match="does not depend"):
        dm.gradients.flow(layer, torch.randn(5, 2, 3), lambda out: torch.ones(()))


def test_a_gradient_too_small_to_square_is_still_told():
    """In float32 a norm of 1e-30 must not come out as zero."""
    layer = dm.RNN(1, 2)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.eye(2) * 0.1)
    norms = dm.gradients.flow(layer, torch.zeros(31, 1, 1), lambda out: out[0][-1].sum())[0].norms[:, 0]
    assert (norms > 0).all()
    assert norms[0] < 1e-30


def test_quantiles_leave_padding_out():
    norms = torch.tensor([[1.0, 3.0, 2.0, 10.0], [4.0, torch.nan, 2.0, torch.nan], [torch.nan] * 4])
    part = dm.gradients.StateFlow("", 0, 0, 0, "h", norms)
    expected = norms.nanquantile(torch.tensor([0.0, 0.25, 0.5, 1.0]), dim=1)
    torch.testing.assert_close(part.quantiles([0.0, 0.25, 0.5, 1.0]), expected, equal_nan=True)
    with pytest.raises(ValueError, match="between 0 and 1"):
        part.quantiles([5])
