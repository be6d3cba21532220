"""The learning-rate rule, in any model."""

import math

import pytest
import torch
from torch import nn

import deepmemory as dm


def rates(model: nn.Module, groups) -> dict[str, float]:
    """Each parameter's learning rate by name; fails if one stands in no group or in two."""
    listed = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    assert len(listed) == len({key for key, _ in listed})
    by_id = dict(listed)
    assert by_id.keys() == {id(p) for p in model.parameters()}
    return {name: by_id[id(p)] for name, p in model.named_parameters()}


class Tagger(nn.Module):
    """DMUs of several depths in the places where people put layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.basic = dm.DMU(8, 8, transition=[])
        self.blocks = nn.ModuleList([nn.ModuleDict({"rnn": dm.DMU(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(2)])
        self.deep = nn.Sequential(dm.DMUCell(8, 8, transition=[8] * 4))
        self.given = dm.DMU(8, 8, transition=nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)))
        self.peers = nn.ModuleList([dm.RHN(8, 8, depth=4), dm.GRU(8, 8), nn.LSTM(8, 8)])
        self.scale = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("depth", [1, 2, 3, 10])
def test_a_residual_transition_counts_as_two_layers(depth):
    for layer in (dm.DMU, dm.DMUCell):
        made = layer(4, 8, transition=[8] * (depth - 1), residual=True)
        (group,) = dm.parameter_groups(made, lr=0.12)
        assert group["lr"] == pytest.approx(0.12 / (2 * min(depth, 2)))


def test_parameters_in_the_place_of_the_model_are_named():
    with pytest.raises(TypeError, match="not its parameters, got: generator"):
        dm.parameter_groups(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize("lr", ["1e-3", None])
def test_a_rate_that_is_no_number_is_named(lr):
    with pytest.raises(TypeError, match=f"lr should be a number, got: {type(lr).__name__}"):
        dm.parameter_groups(nn.Linear(2, 2), lr=lr)


@pytest.mark.parametrize("lr", [-0.1, math.nan, torch.tensor(-1.0)])
def test_a_rate_below_zero_is_refused(lr):
    with pytest.raises(ValueError, match="lr should be 0 or more, got"):
        dm.parameter_groups(nn.Linear(2, 2), lr=lr)


def test_arguments_in_the_wrong_order_are_named():
    model = nn.Linear(2, 2)
    optimiser = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"got: Linear; call it as divide_rates\(optimiser, model\)"):
        dm.divide_rates(model, optimiser)
    with pytest.raises(TypeError, match="not its parameters, got: generator"):
        dm.divide_rates(optimiser, model.parameters())


def test_every_dmu_gets_its_own_share():
    model = Tagger()
    by_name = rates(model, dm.parameter_groups(model, lr=0.12))
    for name, rate in by_name.items():
        depth = {"basic": 1, "deep": 5, "given": 2}.get(name.split(".")[0])
        if ".rnn." in name:
            depth = 2
        assert rate == pytest.approx(0.12 if depth is None else 0.12 / (2 * depth)), name


def test_weight_decay_follows_the_same_rule():
    groups = dm.parameter_groups(Tagger(), lr=0.12, weight_decay=0.5)
    assert len(groups) == 4
    for group in groups:
        assert group["weight_decay"] / 0.5 == pytest.approx(group["lr"] / 0.12)


@pytest.mark.parametrize(("options", "decay"), [({"weight_decay": 0.1}, 0.1), ({}, 0.01)], ids=["given", "AdamW's own"])
def test_weight_decay_that_is_left_out_is_the_optimisers(options, decay):
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(dm.parameter_groups(model, lr=0.04), **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in model.named_parameters():
        lr = 0.01 if name.startswith("rnn") else 0.04
        torch.testing.assert_close(parameter, before[name] * (1 - lr * decay))


def test_groups_of_ones_own_are_split_by_the_rule():
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    matrices, biases = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
    own = [{"params": matrices, "weight_decay": 0.4}, {"params": iter(biases), "weight_decay": 0.0, "lr": 0.8}]
    groups = dm.parameter_groups(model, lr=0.4, groups=own)
    assert rates(model, groups) == pytest.approx(
        {
            name: (0.8 if "bias" in name else 0.4) / (4 if name.startswith("rnn") else 1)
            for name, _ in model.named_parameters()
        }
    )
    assert [(g["weight_decay"], g["lr_divisor"]) for g in groups] == [(0.4, 1), (0.1, 4), (0.0, 1), (0.0, 4)]


def test_a_model_that_is_a_dmu_or_has_none():
    (group,) = dm.parameter_groups(dm.DMU(3, 4, transition=[4, 4]), lr=0.6)
    assert group["lr"] == pytest.approx(0.1)
    (group,) = dm.parameter_groups(nn.Linear(3, 4), lr=0.6, weight_decay=0.1)
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.6, 0.1, 2)


@pytest.mark.parametrize("order", [("shallow", "deep"), ("deep", "shallow")], ids="-".join)
def test_shared_weights_stand_once_and_follow_the_smaller_rate(order):
    transitions = {"shallow": [], "deep": [4, 4]}
    model = nn.ModuleDict({name: dm.DMU(4, 4, transition=transitions[name]) for name in order})
    model["out"] = nn.Linear(4, 4, bias=False)
    model["out"].weight = model["deep"].weight_2_l0
    model["deep"].weight_3_l0 = model["shallow"].weight_ih_l0  # of one shape: (8, 4)
    model["again"] = model["deep"]
    by_name = rates(model, dm.parameter_groups(model, lr=0.6))
    assert by_name["deep.weight_2_l0"] == pytest.approx(0.1)
    assert by_name[f"{order[0]}.{'weight_ih_l0' if order[0] == 'shallow' else 'weight_3_l0'}"] == pytest.approx(0.1)
    assert by_name["shallow.weight_hh_l0"] == pytest.approx(0.3)


def test_layers_and_directions_of_one_dmu_share_its_rate():
    model = dm.DMU(3, [4, 5], bidirectional=True, transition=[4])
    (group,) = dm.parameter_groups(model, lr=0.4)
    assert len(group["params"]) == 4 * 5
    assert group["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_feeds_an_optimiser_and_a_scheduler(optimiser):
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    optimise = optimiser(dm.parameter_groups(model, lr=0.04))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimise, gamma=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(5, 8, 3)
    losses = []
    for _ in range(3):
        loss = (model["out"](model["rnn"](x)[0][-1]) - 1).square().mean()
        optimise.zero_grad()
        loss.backward()
        optimise.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [group["lr"] for group in optimise.param_groups] == pytest.approx([0.04 / 8, 0.01 / 8])


def test_the_rule_is_what_moves_the_weights():
    """One step of plain SGD moves a DMU's weights by lr / 2n times the gradient."""
    model = dm.DMU(3, 4, transition=[4, 4])
    before = model.weight_3_l0.detach().clone()
    model(torch.randn(5, 2, 3))[0].sum().backward()
    torch.optim.SGD(dm.parameter_groups(model, lr=0.6)).step()
    torch.testing.assert_close(model.weight_3_l0, before - 0.1 * model.weight_3_l0.grad)


def one_rate_for_all(optimiser, step):
    for group in optimiser.param_groups:
        group["lr"] = 0.01 * (step + 1)


SCHEDULES = {
    "OneCycleLR": lambda optimiser: torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.4, total_steps=5),
    "LambdaLR": lambda optimiser: torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 / (1 + step)),
    "one rate for all": lambda optimiser: None,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divided_rates_survive_schedules(schedule):
    """Each step of SGD moves the weights of a DMU by the rate of the moment / 2n, everything else by the rate."""
    model = nn.ModuleDict({"out": nn.Linear(4, 1), "rnn": dm.DMU(3, 4)})
    optimiser = dm.divide_rates(torch.optim.SGD(model.parameters(), lr=0.2), model)
    scheduler = SCHEDULES[schedule](optimiser)
    for step in range(4):
        if scheduler is None:
            one_rate_for_all(optimiser, step)
        (lr,) = {group["lr"] for group in optimiser.param_groups}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if schedule == "OneCycleLR":  # it changes the momentum, too
            optimiser.state.clear()
        optimiser.step()
        for name, parameter in model.named_parameters():
            moved = before[name] - parameter
            torch.testing.assert_close(moved, torch.full_like(moved, lr / 4 if name.startswith("rnn") else lr))
        if scheduler is not None:
            scheduler.step()


OPTIMISERS = [
    "SGD",
    "ASGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adadelta",
    "Adagrad",
    "RMSprop",
    "Rprop",
    "Adafactor",
]


@pytest.mark.parametrize("way", ["parameter_groups", "divide_rates"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_first_step_of_every_optimiser_is_divided(name, way):
    """From equal gradients a DMU moves by 1 / 2n of what the rest moves; later steps depend on what came before."""
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)}).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # no weight decay
        parameter.grad = torch.ones_like(parameter)
    kind = getattr(torch.optim, name)
    if way == "parameter_groups":
        optimiser = kind(dm.parameter_groups(model, lr=0.2))
    else:
        optimiser = dm.divide_rates(kind(model.parameters(), lr=0.2), model)
    optimiser.step()
    (whole,) = model["out"].bias.tolist()
    assert whole < 0
    for parameter in model["rnn"].parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, whole / 4))


@pytest.mark.parametrize(
    "model", [dm.DMU(3, 4), nn.Sequential(dm.DMUCell(3, 4), nn.Linear(4, 1))], ids=["DMU", "mixed"]
)
def test_lbfgs_is_told_to_do_without_the_rule(model):
    with pytest.raises(ValueError, match=r"LBFGS has one rate for all parameters.* use it without the rule"):
        dm.divide_rates(torch.optim.LBFGS(model.parameters()), model)


def test_lbfgs_trains_a_dmu_without_the_rule():
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    optimiser = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    x, y = torch.randn(5, 8, 3), torch.randn(8, 1)

    def loss():
        optimiser.zero_grad()
        value = (model["out"](model["rnn"](x)[0][-1]) - y).square().mean()
        value.backward()
        return value

    before = optimiser.step(loss)
    assert loss() < 0.1 * before


def ends_by_an_error():
    raise KeyboardInterrupt


@pytest.mark.parametrize("lr", [0.2, torch.tensor(0.2)], ids=["number", "tensor"])
@pytest.mark.parametrize("after", ["a step", "a state", "a new rate"])
def test_a_step_that_ends_by_an_error_leaves_no_divided_rate(after, lr):
    """Ctrl-C in a notebook, for instance, and then the cell once more."""
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    optimiser = dm.divide_rates(torch.optim.SGD(model.parameters(), lr=lr), model)
    with pytest.raises(KeyboardInterrupt):
        optimiser.step(ends_by_an_error)
    rate = 0.2
    if after == "a state":
        assert [float(group["lr"]) for group in optimiser.state_dict()["param_groups"]] == pytest.approx([rate] * 2)
    elif after == "a new rate":
        rate = 0.05  # what the DMU had in the step that was cut off
        for group in optimiser.param_groups:
            group["lr"] = rate
    before = model["rnn"].bias_1_l0.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    torch.testing.assert_close(model["rnn"].bias_1_l0, before - rate / 4)
    assert [float(group["lr"]) for group in optimiser.param_groups] == pytest.approx([rate] * 2)


def test_divided_rates_resume_from_a_state():
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    optimiser = dm.divide_rates(torch.optim.Adam(model.parameters(), lr=0.2), model)
    again = dm.divide_rates(torch.optim.Adam(model.parameters(), lr=0.1), model)
    again.load_state_dict(optimiser.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.2, 0.2]
    assert [group["lr_divisor"] for group in again.param_groups] == [1, 4]


def test_rates_are_divided_once():
    model = nn.ModuleDict({"rnn": dm.DMU(3, 4), "out": nn.Linear(4, 1)})
    with pytest.raises(ValueError, match="already divided"):
        dm.divide_rates(torch.optim.SGD(dm.parameter_groups(model, lr=0.1)), model)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    with pytest.raises(ValueError, match="before creating the scheduler"):
        dm.divide_rates(scheduled, model)
