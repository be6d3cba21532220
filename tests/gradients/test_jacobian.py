"""The Jacobian of one step is autograd's, and its terms are the paper's."""

import pytest
import torch
from gradients.transitions import ACTIVATIONS, TRANSITIONS
from layers import randomise
from tolerances import assert_close
from torch import nn

import deepmemory as dm
from deepmemory.ops import Sequences


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
