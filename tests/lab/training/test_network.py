"""The networks of the tasks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call, stack_module_state

from deepmemory.lab.settings import Setting
from deepmemory.lab.training import network
from deepmemory.ops import hoisted

SIZES = SimpleNamespace(input_size=5, output_size=7)


def gradients(made, *inputs):
    """Outputs and gradients of three runs, each with its own inputs."""
    weights, _ = stack_module_state(made)

    def one_run(weights, inputs):
        out = functional_call(made[0], weights, inputs)
        return out[0] if isinstance(out, tuple) else out

    out = torch.vmap(one_run)(weights, inputs)
    scale = torch.linspace(-1, 1, out.numel()).view(out.shape)
    leaves = [weight for weight in weights.values() if weight.requires_grad]
    return [out, *torch.autograd.grad((out * scale).sum(), leaves)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("task", ["polymusic", "natlang", "translation"])
def test_runs_whose_products_are_cut_learn_as_ever(task, frozen, monkeypatch):
    torch.manual_seed(0)
    setting = Setting(task, "dmu", (4,))
    if task == "polymusic":
        made = [network.StepwiseNetwork(setting, SIZES) for _ in range(3)]
        inputs = [torch.randn(3, 2, 6, 5)]
    elif task == "natlang":
        made = [network.WordNetwork(setting, SIZES) for _ in range(3)]
        inputs = [torch.randint(5, (3, 2, 6))]
    else:
        made = [network.Translator(setting, 5, 7) for _ in range(3)]
        inputs = [torch.randint(5, (3, 2, 6)), torch.randint(1, 7, (3, 2)), torch.randint(7, (3, 2, 4))]
    if frozen:
        for one in made:
            one.output.requires_grad_(False)
    expected = gradients(made, *inputs)
    cut = []
    product = hoisted.product
    monkeypatch.setattr(hoisted, "product", lambda left, right: cut.append(left.shape) or product(left, right))
    monkeypatch.setattr(network, "SPLIT_PRODUCTS_ON", ("cpu",))
    torch.testing.assert_close(gradients(made, *inputs), expected)
    layers = 2 if task == "natlang" else 1
    assert len(cut) == layers - frozen


def test_one_network_alone_and_other_transforms_stay_with_torch(monkeypatch):
    monkeypatch.setattr(network, "SPLIT_PRODUCTS_ON", ("cpu",))
    monkeypatch.setattr(network.LinearOfRuns, "forward", None)
    layer, rows = torch.nn.Linear(3, 2), torch.randn(4, 3)
    assert torch.equal(network.linear(layer, rows), layer(rows))
    summed = torch.func.grad(lambda rows: torch.vmap(lambda one: network.linear(layer, one))(rows).sum())
    torch.testing.assert_close(summed(rows[None]), layer.weight.sum(0).expand(1, 4, 3))


def test_under_autocast_the_gradient_of_a_tied_embedding_is_as_ever_and_lies_as_the_embedding_does(monkeypatch):
    monkeypatch.setattr(network, "SPLIT_PRODUCTS_ON", ("cpu",))
    torch.manual_seed(0)
    leaves = [torch.randn(size, requires_grad=True) for size in ((2, 9, 3), (2, 5, 3), (2, 5))]  # rows, weight, bias

    def results(function):
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.vmap(function)(*leaves)
        return [out.float(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    given, expected = results(network.of_many_rows), results(torch.nn.functional.linear)
    torch.testing.assert_close(given, expected, rtol=0.02, atol=0.1)
    assert given[2].is_contiguous()


@torch.no_grad()
@pytest.mark.parametrize(("cell", "bias"), [("rhn", {"transform_bias": -40.0}), ("mingru", {"update_bias": 40.0})])
def test_an_rhn_and_a_min_gru_can_start_out_keeping_their_state(cell, bias):
    depth = {"depth": 3} if cell == "rhn" else {}
    block = network.recurrent_block(Setting(cell=cell, hidden=(6, 5), **depth, **bias), 2)
    before = tuple(torch.randn(1, 2, width) for width in (6, 5))
    torch.testing.assert_close(block(torch.randn(2, 7, 2), before)[1], before)


def test_a_residual_setting_makes_a_residual_transition():
    setting = Setting(cell="dmu", hidden=(6,), transition=(5, 5))
    assert [network.recurrent_block(replace(setting, residual=of), 2).residual for of in (False, True)] == [False, True]
