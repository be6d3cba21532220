"""The paper's statements about gradients, and the functions that measure them."""

import doctest
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import LAYERS, OWN, randomise
from tolerances import assert_close
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import deepmemory as dm
from deepmemory.ops import Sequences, plain

PAGE = Path(__file__).parent.parent / "docs" / "gradients.md"
KINDS = list(LAYERS)
ACTIVATIONS = ["leaky_relu", "relu", "tanh", "silu", "gelu"]
TRANSITIONS = {"n1": [], "n2": None, "deep": [5, 4, 6], "narrow": [7, 2, 9]}


def double(kind: str, *sizes: int, **options) -> nn.Module:
    return randomise(LAYERS[kind](*sizes, dtype=torch.float64, **OWN.get(kind, {}), **options))


def weighed(out) -> torch.Tensor:
    """A loss in which every entry of the output counts differently."""
    y = out[0].data if isinstance(out[0], nn.utils.rnn.PackedSequence) else out[0]
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def fill(dmu: dm.DMU, **values) -> dm.DMU:
    with torch.no_grad():
        for name, value in values.items():
            parameter = getattr(dmu, f"{name}_l0")
            parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype))
    return dmu


# --- condition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS)
def test_the_two_products_are_the_derivatives_of_the_linear_network(transition):
    """With activations left out, what comes out of the transition is the product times the state."""
    dmu = dm.DMU(3, [4, 5], bidirectional=True, transition=transition, dtype=torch.float64)
    found = dm.gradients.condition(dmu)
    assert [(c.layer, c.direction) for c in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for part in found:
        h = torch.randn([4, 5][part.layer], dtype=torch.float64)
        m = dmu._layer_input_size(part.layer)
        a = torch.cat([h.new_zeros(m), h])
        for weight, _ in dmu.transition_weights(part.layer, part.direction):
            a = weight @ a
        assert_close(torch.cat([part.gate.matrix @ h, part.candidate.matrix @ h]), a.detach())


@pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS)
def test_eigenvalues_radius_and_norm(transition):
    found = dm.gradients.condition(dm.DMU(3, 6, transition=transition, dtype=torch.float64))
    for passage in (found[0].gate, found[0].candidate):
        dense = torch.linalg.eigvals(passage.matrix).abs().sort().values
        assert passage.eigenvalues.shape == (6,)
        torch.testing.assert_close(passage.eigenvalues.abs().sort().values, dense, rtol=1e-6, atol=1e-7)
        true = dense.max().item()
        assert true * (1 - 1e-9) <= passage.radius <= true * (1 + 1e-4)
        assert passage.norm == pytest.approx(torch.linalg.svdvals(passage.matrix)[0].item())
        assert passage.norm >= true * (1 - 1e-9)
        assert passage.margin == pytest.approx(passage.limit - passage.radius)
        assert passage.norm_margin == pytest.approx(passage.limit - passage.norm)
    assert (found[0].gate.limit, found[0].candidate.limit) == (0.5, 1.0)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_the_radius_of_a_rotation_and_of_a_nilpotent_matrix(n):
    """No gap between eigenvalues, and no eigenvalue but zero."""
    angle = torch.tensor(0.7, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    passage = dm.gradients.Passage((torch.block_diag(*[0.9 * turn] * n),), 1.0)
    assert passage.radius == pytest.approx(0.9, rel=1e-4)
    assert passage.satisfied
    assert dm.gradients.Passage((torch.full((n, n), 3.0, dtype=torch.float64).triu(1),), 1.0).radius == 0


def test_the_verdict_follows_the_weights_it_was_made_from():
    dmu = fill(dm.DMU(1, 1, transition=[]), weight_hh=[[0.4], [0.9]])
    before = dm.gradients.condition(dmu)
    fill(dmu, weight_hh=[[0.6], [-0.9]])
    after = dm.gradients.condition(dmu)
    assert before.satisfied
    assert not after.satisfied
    assert (after[0].gate.satisfied, after[0].candidate.satisfied) == (False, True)
    assert "not satisfied" in str(after)
    assert after[0].gate.margin == pytest.approx(-0.1)


def test_a_cell_is_a_layer():
    layer, cell = dm.DMU(3, 4, transition=[5]), dm.DMUCell(3, 4, transition=[5])
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    of_layer, of_cell = dm.gradients.condition(layer)[0], dm.gradients.condition(cell)[0]
    assert_close(of_cell.gate.matrix, of_layer.gate.matrix)
    x, h = torch.randn(2, 3), torch.rand(2, 4)
    assert_close(dm.gradients.step_jacobian(cell, x, h).total, dm.gradients.step_jacobian(layer, x, h).total)


def test_where_there_are_no_matrices():
    given_module = dm.DMU(3, 4, transition=nn.Linear(7, 8))
    with pytest.raises(TypeError, match="given as a module"):
        dm.gradients.condition(given_module)
    with pytest.raises(TypeError, match="expected a DMU or a DMUCell, got GRU"):
        dm.gradients.condition(dm.GRU(3, 4))


def test_hundreds_of_units_and_ten_layers():
    found = dm.gradients.condition(dm.DMU(8, 300, transition=[300] * 8 + [20]))
    assert found[0].gate.radius == pytest.approx(found[0].gate.eigenvalues.abs().max().item(), rel=1e-4)
    assert len(found[0].gate.eigenvalues) == 300


# --- one step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS)
def test_the_three_terms_add_up_to_autograds_jacobian(transition, activation):
    cell = randomise(dm.DMUCell(3, 4, transition=transition, activation=activation, dtype=torch.float64))
    x, h = torch.randn(3, dtype=torch.float64), torch.rand(4, dtype=torch.float64) * 2 - 1
    step = dm.gradients.step_jacobian(cell, x, h)
    assert_close(step.total, torch.autograd.functional.jacobian(lambda h: cell(x, h), h))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "two-way"])
@pytest.mark.parametrize("module", [False, True], ids=["dense", "module"])
def test_the_jacobian_of_any_layer_and_direction(module, bidirectional):
    places = 2 * (1 + bidirectional)
    sizes = [3 + 4] * (places // 2) + [4 * (1 + bidirectional) + 4] * (places // 2)
    transition = [nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, 8)) for n in sizes] if module else [5]
    dmu = dm.DMU(3, 4, 2, bidirectional=bidirectional, transition=transition, dtype=torch.float64)
    randomise(dmu)
    for layer in range(2):
        for direction in range(1 + bidirectional):
            x = torch.randn(6, dmu._layer_input_size(layer), dtype=torch.float64)
            h = torch.rand(6, 4, dtype=torch.float64) * 2 - 1
            step = dm.gradients.step_jacobian(dmu, x, h, layer, direction)
            for b in range(6):

                def run(h):
                    return dmu._run(layer, direction, x[None, b : b + 1], (h[None],), Sequences())[0][0, 0]

                assert_close(step.total[b], torch.autograd.functional.jacobian(run, h[b]))


def test_each_term_is_the_papers():
    dmu = randomise(dm.DMU(2, 3, transition=[], dtype=torch.float64))
    x, h = torch.randn(2, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    ((weight, bias),) = dmu.transition_weights()
    z, candidate = (weight @ torch.cat([x, h]) + bias).detach().chunk(2)
    s, new = z.sigmoid(), candidate.tanh()
    step, found = dm.gradients.step_jacobian(dmu, x, h), dm.gradients.condition(dmu)[0]
    assert_close(step.kept, torch.diag(s))
    assert_close(step.gate, torch.diag((h - new) * s * (1 - s)) @ found.gate.matrix)
    assert_close(step.candidate, torch.diag((1 - new**2) * (1 - s)) @ found.candidate.matrix)


def test_shapes_that_do_not_fit_are_named():
    dmu = dm.DMU(3, 4)
    with pytest.raises(ValueError, match=r"expected x \(3,\) and h \(4,\).*got \(4,\) and \(4,\)"):
        dm.gradients.step_jacobian(dmu, torch.zeros(4), torch.zeros(4))
    with pytest.raises(IndexError, match="no layer 1, direction 0"):
        dm.gradients.step_jacobian(dmu, torch.zeros(3), torch.zeros(4), layer=1)


# --- the paper's statements -----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0.1, 100), st.sampled_from(list(TRANSITIONS)), st.sampled_from(ACTIVATIONS))
def test_states_never_leave_the_interval(seed, size, transition, activation):
    """h_t is a weighted average of h_0 and values of tanh; rounded, it may reach the end points but not pass."""
    torch.manual_seed(seed)
    dmu = dm.DMU(3, 4, transition=TRANSITIONS[transition], activation=activation, dtype=torch.float64)
    with torch.no_grad():
        for parameter in dmu.parameters():
            parameter.uniform_(-size, size)
    h = torch.rand(1, 5, 4, dtype=torch.float64) * 2 - 1
    y, _ = dmu(torch.randn(12, 5, 3, dtype=torch.float64), h)
    assert y.abs().max() <= 1
    if size < 0.5:
        assert y.abs().max() < 1


@given(
    st.integers(0, 10**6),
    st.sampled_from(list(TRANSITIONS)),
    st.sampled_from(ACTIVATIONS),
    st.floats(0.3, 1.0),
    st.floats(0, 1),
)
def test_below_the_bound_the_gradient_never_grows(seed, transition, activation, growth, share):
    """For any input, any gate, any state in [-1, 1]: sum(scale * abs(dL/dh)) falls on every step back."""
    torch.manual_seed(seed)
    dmu = dm.DMU(3, 4, transition=TRANSITIONS[transition], activation=activation, dtype=torch.float64)
    randomise(dmu)
    with torch.no_grad():
        last = getattr(dmu, "weight_hh_l0" if dmu.depth == 1 else f"weight_{dmu.depth}_l0")
        last[:4] *= share
        low, high = 0.0, 10.0  # the factor on the last matrix that brings the bound where it is wanted
        original = last.clone()
        for _ in range(40):
            middle = (low + high) / 2
            last.copy_(original * middle)
            low, high = (middle, high) if dm.gradients.condition(dmu)[0].growth <= growth else (low, middle)
        last.copy_(original * low)
        for name, parameter in dmu.named_parameters():
            if name.startswith(("bias", "weight_ih")):
                parameter.uniform_(-4, 4)
    found = dm.gradients.condition(dmu)[0]
    assert found.never_grows
    assert found.growth == pytest.approx(growth, rel=1e-3)
    x, h = torch.randn(50, 3, dtype=torch.float64), torch.rand(50, 4, dtype=torch.float64) * 2 - 1
    jacobian = dm.gradients.step_jacobian(dmu, x, h).total
    grad = torch.randn(50, 1, 4, dtype=torch.float64)
    after, before = ((g.abs() * found.scale).sum(-1) for g in (grad, grad @ jacobian))
    assert (before <= after * (1 + 1e-12)).all()


def test_the_bound_is_sharp():
    """One unit: the state, the gate and the candidate that reach it exist."""
    for gate, candidate in ((0.3, 0.5), (0.5, 0.9), (0.4, 0.1)):
        dmu = fill(dm.DMU(2, 1, transition=[], dtype=torch.float64), weight_hh=[[gate], [candidate]])
        fill(dmu, weight_ih=[[1, 0], [0, 1]], bias_1=[0, 0])
        h = 1.0
        u = min(gate / (2 * candidate), 1 - 1e-12)
        x = torch.tensor([16.0 - gate * h, torch.atanh(torch.tensor(-u, dtype=torch.float64)) - candidate * h])
        step = dm.gradients.step_jacobian(dmu, x.double(), torch.tensor([h], dtype=torch.float64))
        keep = step.kept.item()
        reached = (step.total.item() - keep) / (1 - keep)
        assert reached == pytest.approx(dm.gradients.condition(dmu)[0].growth, rel=1e-5)


def test_slopes_are_the_largest():
    a = torch.linspace(-10, 10, 200001, dtype=torch.float64, requires_grad=True)
    for activation in ACTIVATIONS:
        (slope,) = torch.autograd.grad(plain.ACTIVATION[activation](a).sum(), a)
        told = dm.gradients.SLOPE.get(activation, 1.0)
        assert told - 1e-8 <= slope.abs().max() <= told


@pytest.mark.parametrize("kind", ["n1", "deep"])
def test_a_large_z_passes_the_gradient_unchanged(kind):
    dmu = dm.DMU(3, 4, transition=TRANSITIONS[kind], memory_bias=60.0, dtype=torch.float64)
    found = dm.gradients.flow(dmu, torch.randn(30, 5, 3, dtype=torch.float64), lambda out: weighed((out[0][-1],)))
    assert_close(found[0].norms, found[0].norms[-1:].expand(30, 5))
    step = dm.gradients.step_jacobian(dmu, torch.randn(3, dtype=torch.float64), torch.rand(4, dtype=torch.float64))
    assert_close(step.total, torch.eye(4, dtype=torch.float64))


# --- where eigenvalues do not tell ------------------------------------------------------------------------------


def growth_over(dmu: dm.DMU, steps: int) -> torch.Tensor:
    """Norms of dL/dh_t for a loss on the last state, from zero input and zero state."""
    x = torch.zeros(steps, 1, dmu.input_size, dtype=torch.float64)
    found = dm.gradients.flow(dmu, x, lambda out: out[0][-1].sum())
    return found[0].norms[:, 0]


def test_eigenvalues_of_zero_and_an_exploding_gradient():
    """Non-normal: both products have no eigenvalue but zero, and the gates keep one unit and renew the other."""
    dmu = dm.DMU(1, 2, transition=[], dtype=torch.float64)
    fill(dmu, weight_hh=[[0, 0], [0, 0], [1.5, 1.5], [-1.5, -1.5]], bias_1=[-60, 60, 0, 0])
    found = dm.gradients.condition(dmu)
    assert found.satisfied
    assert (found[0].gate.radius, found[0].candidate.radius) == (0, 0)
    assert not found.never_grows
    norms = growth_over(dmu, 101)
    assert norms[0] > 1.5**100
    assert (norms[:-1] > 1.3 * norms[1:]).all()


def test_hidden_units_that_cancel_in_the_product_alone():
    """Two hidden units undo each other in the linear product; one is saturated, so in truth nothing is undone."""
    dmu = dm.DMU(1, 1, transition=[2], activation="tanh", dtype=torch.float64)
    fill(dmu, weight_hh=[[2], [2]], bias_1=[0, 40], weight_2=[[0, 0], [1, -1]], bias_2=[-60, 1])
    found = dm.gradients.condition(dmu)
    assert found.satisfied
    assert (found[0].gate.norm, found[0].candidate.norm) == (0, 0)  # norms of the product do not tell either
    assert found[0].growth > 2
    assert_close(growth_over(dmu, 51)[0], torch.tensor(2.0**50, dtype=torch.float64))


def test_two_terms_within_their_limits_add_up():
    """One unit, one layer: eigenvalue, norm and weight are the same number, and still the gradient grows."""
    dmu = dm.DMU(2, 1, transition=[], dtype=torch.float64)
    fill(dmu, weight_hh=[[0.49], [0.99]], weight_ih=[[1, 0], [0, 1]], bias_1=[0, 0])
    assert dm.gradients.condition(dmu).satisfied
    step = dm.gradients.step_jacobian(
        dmu, torch.tensor([-0.06, -1.1], dtype=torch.float64), torch.tensor([0.95], dtype=torch.float64)
    )
    assert step.total.item() > 1.1


def test_no_bound_on_the_weights_holds_for_the_euclidean_norm():
    """A unit that is kept and one that is renewed from it: two ways back, however weak the second one."""
    for weight in (0.1, 0.001):
        dmu = dm.DMU(1, 2, transition=[], dtype=torch.float64)
        fill(dmu, weight_hh=[[0, 0], [0, 0], [0, 0], [weight, 0]], bias_1=[60, -60, 0, 0])
        assert dm.gradients.condition(dmu).never_grows
        zero = torch.zeros(2, dtype=torch.float64)
        jacobian = dm.gradients.step_jacobian(dmu, zero[:1], zero).total
        assert torch.linalg.matrix_norm(jacobian, 2) > 1
        assert torch.linalg.matrix_norm(jacobian, torch.inf) <= 1


# --- flow -----------------------------------------------------------------------------------------------------


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
    assert not any({"_run", "_weights"} & vars(module).keys() for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert found.loss == pytest.approx(model(ids, scale=2.0).item())
    assert "encoder" in str(found)


def test_frozen_weights_and_no_grad_change_nothing():
    layer, x = dm.GRU(3, 4), torch.randn(5, 2, 3)
    expected = dm.gradients.flow(layer, x, weighed)[0].norms
    layer.requires_grad_(False)
    with torch.no_grad():
        assert_close(dm.gradients.flow(layer, x, weighed)[0].norms, expected)


def test_a_compiled_model_is_watched_uncompiled():
    layer, x = dm.DMU(3, 4), torch.randn(5, 2, 3)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    (part,) = dm.gradients.flow(compiled, x, weighed)
    assert_close(part.norms, dm.gradients.flow(layer, x, weighed)[0].norms)
    assert len(dm.gradients.gates(compiled, x)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
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
    assert "_run" not in vars(layer)
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \(5, 2, 4\)"):
        dm.gradients.flow(layer, torch.randn(5, 2, 3), lambda out: out[0])
    with pytest.raises(ValueError, match="does not contain a recurrent layer of deepmemory"):
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


# --- gates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "two-way"])
@pytest.mark.parametrize("given_module", [False, True], ids=["dense", "module"])
def test_gates_are_those_that_explain_the_states(given_module, bidirectional, engine):
    """h_t = keep * h_t-1 + (1 - keep) * new, and the keep is the diagonal of the Jacobian's first term."""
    transition = [nn.Linear(7, 8) for _ in range(1 + bidirectional)] if given_module else [6]
    engine = "auto" if given_module else engine
    dmu = dm.DMU(3, 4, bidirectional=bidirectional, transition=transition, engine=engine, dtype=torch.float64)
    randomise(dmu)
    lengths = torch.tensor([5, 2, 4])
    x, h = torch.randn(5, 3, 3, dtype=torch.float64), torch.rand(1 + bidirectional, 3, 4, dtype=torch.float64)
    found = dm.gradients.gates(dmu, (x, h), lengths=lengths)
    y, _ = dmu(x, h, lengths=lengths)
    for direction, part in enumerate(found):
        states = y[..., 4 * direction : 4 * direction + 4]
        for b, length in enumerate(lengths.tolist()):
            times = list(range(length))[:: -1 if direction else 1]
            before = [h[direction, b], *(states[t, b] for t in times[:-1])]
            for t, previous in zip(times, before, strict=True):
                step = dm.gradients.step_jacobian(dmu, x[t, b], previous.detach(), direction=direction)
                assert_close(part.keep[t, b], step.kept.diagonal().detach())
            assert part.keep[length:, b].isnan().all()


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "two-way"])
def test_gates_and_flow_know_resets_and_masks(bidirectional):
    """Of sequences that follow one another they tell what they tell of each alone."""
    dmu = dm.DMU(3, 4, bidirectional=bidirectional, transition=[5, 5], residual=True, dtype=torch.float64)
    randomise(dmu).recurrent_dropout = dmu.transition_dropout = 0.5
    masks, x = dmu.draw_masks(2), torch.randn(5, 2, 3, dtype=torch.float64)
    dmu.eval()
    resets = torch.zeros(5, 2, dtype=torch.bool)
    resets[3] = True

    def squares(out):
        return out[0].square().sum()

    whole = dm.gradients.gates(dmu, x, resets=resets, masks=masks)
    parts = [dm.gradients.gates(dmu, part, masks=masks) for part in x.split([3, 2])]
    for found, *alone in zip(whole, *parts, strict=True):
        assert_close(found.keep, torch.cat([part.keep for part in alone]))
    whole = dm.gradients.flow(dmu, x, squares, resets=resets, masks=masks)
    parts = [dm.gradients.flow(dmu, part, squares, masks=masks) for part in x.split([3, 2])]
    for found, *alone in zip(whole, *parts, strict=True):
        assert_close(found.norms, torch.cat([part.norms for part in alone]))


def test_gate_statistics():
    keep = torch.tensor([0.01, 0.5, 0.97, 0.99, torch.nan]).view(5, 1, 1)
    part = dm.gradients.LayerGates("", 0, 0, 0, keep)
    assert part.mean == pytest.approx((0.01 + 0.5 + 0.97 + 0.99) / 4)
    assert part.saturated() == (0.25, 0.5)
    assert part.saturated(within=0.02) == (0.25, 0.25)
    assert part.quantiles([0.5])[0] == pytest.approx((0.5 + 0.97) / 2)


def test_gates_of_a_packed_batch_in_the_callers_order():
    model = nn.ModuleDict({"a": dm.DMU(3, 4, num_layers=2)})
    model.forward = lambda x: model["a"](x)
    sequences = [torch.randn(n, 3) for n in (2, 5, 3)]
    found = dm.gradients.gates(model, pack_sequence(sequences, enforce_sorted=False))
    assert [(part.name, part.layer) for part in found] == [("a", 0), ("a", 1)]
    for b, sequence in enumerate(sequences):
        alone = dm.gradients.gates(model, sequence)
        for part, expected in zip(found, alone, strict=True):
            assert_close(part.keep[: len(sequence), b], expected.keep[:, 0])
    assert "a" in str(found)
    with pytest.raises(ValueError, match="GRU is not and does not contain a DMU"):
        dm.gradients.gates(dm.GRU(3, 4), sequences[0])


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    problems: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=problems.append)
    assert not problems, "".join(problems)
