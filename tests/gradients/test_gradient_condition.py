"""The paper's condition on the weights: what it computes, what it does not say, and a bound that holds."""

import pytest
import torch
from gradients.transitions import ACTIVATIONS, TRANSITIONS
from hypothesis import given
from hypothesis import strategies as st
from layers import randomise
from tolerances import assert_close
from torch import nn

import deepmemory as dm
from deepmemory.ops import plain


def fill(dmu: dm.DMU, **values) -> dm.DMU:
    with torch.no_grad():
        for name, value in values.items():
            parameter = getattr(dmu, f"{name}_l0")
            parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype))
    return dmu


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
    found = dm.gradients.flow(dmu, torch.randn(30, 5, 3, dtype=torch.float64), lambda out: out[0][-1].sum())
    assert_close(found[0].norms, found[0].norms[-1:].expand(30, 5))
    step = dm.gradients.step_jacobian(dmu, torch.randn(3, dtype=torch.float64), torch.rand(4, dtype=torch.float64))
    assert_close(step.total, torch.eye(4, dtype=torch.float64))


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
