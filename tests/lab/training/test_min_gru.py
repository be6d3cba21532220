"""minGRU equals its definition: step by step, under vmap, resumed, padded, and in its gradients."""

import pytest
import torch

from deepmemory.lab.settings import Setting
from deepmemory.lab.training.min_gru import CHUNK, MinGRU, Scan

LENGTHS = [1, 2, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 3, CHUNK**2, CHUNK**2 + CHUNK + 2]


def by_definition(network, x, state=None):
    """One time step after the other."""
    finals = []
    for place, (layer, width) in enumerate(zip(network.layers, network.hidden, strict=True)):
        h = torch.zeros(len(x), width, dtype=x.dtype) if state is None else state[place]
        outputs = []
        for step in range(x.shape[1]):
            z = 1 - torch.sigmoid(x[:, step] @ layer.weight[:width].T + layer.bias[:width])
            candidate = x[:, step] @ layer.weight[width:].T + layer.bias[width:]
            h = (1 - z) * h + z * candidate
            outputs.append(h)
        x = torch.stack(outputs, 1)
        finals.append(h)
    return x, finals


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("resumed", [False, True])
def test_it_equals_its_definition(length, resumed):
    torch.manual_seed(0)
    network = MinGRU(3, (5, 5)).double()
    x = torch.randn(4, length, 3, dtype=torch.float64)
    state = torch.randn(2, 4, 5, dtype=torch.float64) if resumed else None
    y, final = network(x, state)
    theirs, finals = by_definition(network, x, state)
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(final, torch.stack(finals))
    ours = torch.autograd.grad(y.square().sum(), list(network.parameters()))
    for grad, expected in zip(
        ours, torch.autograd.grad(theirs.square().sum(), list(network.parameters())), strict=True
    ):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("length", [1, 9, CHUNK + 2])
def test_gradients_of_the_scan(length):
    keep = torch.rand(2, length - 1, 2, dtype=torch.float64, requires_grad=True)
    added = torch.randn(2, length, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Scan.apply, (keep, added))
    assert torch.autograd.gradgradcheck(Scan.apply, (keep, added))


@pytest.mark.parametrize("least", [0.0, 0.99])
def test_a_scan_of_float32_is_as_exact_as_a_loop(least):
    """Also with gates near 1, whose states are sums over hundreds of steps."""
    torch.manual_seed(0)
    keep, added = least + (1 - least) * torch.rand(2, 1000, 8), torch.randn(2, 1000, 8)

    def loop(keep, added):
        states = [added[:, 0]]
        for step in range(1, added.shape[1]):
            states.append(keep[:, step] * states[-1] + added[:, step])
        return torch.stack(states, 1)

    exact = loop(keep.double(), added.double())
    error, of_loop = ((y - exact).square().mean().sqrt() for y in (Scan.apply(keep[:, 1:], added), loop(keep, added)))
    assert error <= 1.1 * of_loop


def test_a_scan_never_gives_back_what_it_was_given():
    added = torch.randn(2, 1, 3)
    states = Scan.apply(torch.rand(2, 0, 3), added)
    assert torch.equal(states, added)
    assert states.data_ptr() != added.data_ptr()


def test_runs_side_by_side_may_share_what_is_added():
    keep, added = torch.rand(3, 2, 5, 4), torch.randn(2, 6, 4)
    states = torch.vmap(Scan.apply, in_dims=(0, None))(keep, added)
    torch.testing.assert_close(states, torch.stack([Scan.apply(of_run, added) for of_run in keep]))


@pytest.mark.parametrize("length", [6, 2 * CHUNK + 3])
def test_runs_side_by_side_have_their_own_gradients(length):
    networks = [MinGRU(3, (4, 4)).double() for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(networks)
    x = torch.randn(3, 2, length, 3, dtype=torch.float64)

    def output(weights, x):
        return torch.func.functional_call(networks[0], weights, (x,))[0]

    y = torch.vmap(output)(stacked, x)
    grads = torch.autograd.grad(y.square().sum(), list(stacked.values()))
    for run, network in enumerate(networks):
        alone, _ = network(x[run])
        torch.testing.assert_close(y[run], alone)
        own = torch.autograd.grad(alone.square().sum(), list(network.parameters()))
        for grad, expected in zip(grads, own, strict=True):
            torch.testing.assert_close(grad[run], expected)


def test_the_state_is_that_of_the_last_real_step():
    network = MinGRU(2, (3, 4))
    x, lengths = torch.randn(3, 6, 2), torch.tensor([6, 1, 4])
    _, state = network(x, lengths=lengths)
    for place, length in enumerate(lengths):
        _, alone = network(x[place : place + 1, :length])
        for of, own in zip(state, alone, strict=True):
            torch.testing.assert_close(of[:, place], own[:, 0])


def test_a_keep_bias_keeps_the_state():
    network = MinGRU(2, (3,), keep_bias=20.0)
    before = torch.randn(1, 4, 3)
    _, after = network(torch.randn(4, 50, 2), before)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_dropout_inside_is_refused():
    with pytest.raises(ValueError, match="mingru has no dropout inside"):
        Setting(cell="mingru", recurrent_dropout=0.5)
