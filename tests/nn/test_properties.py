"""What a user relies on whatever the sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import LAYERS, OWN, like, random_state, randomise, results, tensors
from tolerances import assert_close
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import deepmemory as dm

DTYPES = {"plain": torch.float64, "auto": torch.float32}  # the definition exactly, and what users run
sizes = st.fixed_dictionaries(
    {
        "features": st.integers(1, 5),
        "hidden": st.integers(1, 9),
        "steps": st.integers(1, 9),
        "batch": st.integers(1, 6),
        "seed": st.integers(0, 2**16),
    }
)
every_layer = pytest.mark.parametrize("name", LAYERS)
every_engine = pytest.mark.parametrize("engine", DTYPES)  # hypothesis wants no function-scoped fixture


def case(name: str, engine: str, size: dict[str, int], **options):
    """A layer with random weights, an input and a state for these sizes."""
    torch.manual_seed(size["seed"])
    options = {"dtype": DTYPES[engine], **OWN.get(name, {}), **options}
    layer = LAYERS[name](size["features"], size["hidden"], engine=engine, **options)
    x = torch.randn(size["steps"], size["batch"], size["features"], dtype=DTYPES[engine])
    return randomise(layer), x, random_state(layer, x)


@every_layer
@every_engine
@given(size=sizes, data=st.data(), num_layers=st.integers(1, 2))
def test_cut_anywhere_equals_the_whole(name, engine, size, data, num_layers):
    layer, x, hx = case(name, engine, size, num_layers=num_layers)
    cut = data.draw(st.integers(1, len(x)))

    def in_two(x, hx):
        y_first, middle = layer(x[:cut], hx)
        if cut == len(x):
            return y_first, middle
        y_rest, last = layer(x[cut:], middle)
        return torch.cat([y_first, y_rest]), last

    y, h_n = layer(x, hx)
    y_cut, h_cut = in_two(x, hx)
    assert_close(y_cut, y)
    assert_close(tensors(h_cut), tensors(h_n))
    leaves = [x.requires_grad_(), *(h.requires_grad_() for h in tensors(hx)), *layer.parameters()]
    whole, cut_up = (
        torch.autograd.grad(sum(t.square().sum() for t in tensors(run(x, hx))), leaves) for run in (layer, in_two)
    )
    assert_close(cut_up, whole)


def transitions():
    return st.one_of(st.none(), st.lists(st.integers(1, 6), max_size=3))


@every_engine
@given(
    size=sizes,
    bias=st.booleans(),
    transition=transitions(),
    activation=st.sampled_from(["leaky_relu", "relu", "tanh", "silu", "gelu"]),
)
def test_dmu_step_by_step_equals_all_at_once(engine, size, bias, transition, activation):
    options = {"bias": bias, "transition": transition, "activation": activation}
    layer, x, hx = case("DMU", engine, size, **options)
    cell = dm.DMUCell(size["features"], size["hidden"], dtype=x.dtype, **options)
    check_steps(layer, cell, x, hx)


@every_engine
@given(size=sizes, bias=st.booleans(), depth=st.integers(1, 4))
def test_rhn_step_by_step_equals_all_at_once(engine, size, bias, depth):
    layer, x, hx = case("RHN", engine, size, bias=bias, depth=depth)
    check_steps(layer, dm.RHNCell(size["features"], size["hidden"], bias, dtype=x.dtype, depth=depth), x, hx)


def check_steps(layer, cell, x, hx):
    cell.load_state_dict({key.removesuffix("_l0"): value for key, value in layer.state_dict().items()})
    y, h_n = layer(x, hx)
    h, steps = hx[0], []
    for x_t in x:
        h = cell(x_t, h)
        steps.append(h)
    assert_close(y, torch.stack(steps))
    assert_close(h_n[0], h)
    grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    by_step = torch.autograd.grad(torch.stack(steps).square().sum(), list(cell.parameters()))
    assert_close(by_step, grads)


@every_layer
@every_engine
@given(size=sizes, data=st.data(), bidirectional=st.booleans())
def test_padding_never_reaches_a_state_or_a_gradient(name, engine, size, data, bidirectional):
    layer, x, hx = case(name, engine, size, num_layers=2, bidirectional=bidirectional)
    steps, batch = x.shape[:2]
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch)))
    padding = (torch.arange(steps)[:, None] >= lengths)[..., None]
    clean = results(layer, x.masked_fill(padding, 0.0), hx, lengths=lengths)
    for rubbish in (float("nan"), float("inf"), 1e30):
        dirty = results(layer, x.masked_fill(padding, rubbish), hx, lengths=lengths)
        assert_close(dirty, clean)
    assert (clean["gradients"]["x"].masked_select(padding) == 0).all()
    assert all(t.isfinite().all() for t in clean["gradients"].values())
    longer = torch.cat([x, torch.full((3, *x.shape[1:]), float("nan"), dtype=x.dtype)])
    y, h_n = layer(longer, hx, lengths=lengths)
    assert_close([y[:steps], *tensors(h_n)], clean["outputs"])
    assert (y[steps:] == 0).all()


@every_layer
@every_engine
@given(size=sizes, data=st.data(), bidirectional=st.booleans())
def test_packing_never_changes_a_state(name, engine, size, data, bidirectional):
    layer, x, hx = case(name, engine, size, bidirectional=bidirectional)
    steps, batch = x.shape[:2]
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, h_n = layer(packed, hx)
    y_padded, h_padded = layer(x, hx, lengths=lengths)
    assert_close(pad_packed_sequence(y, total_length=steps)[0], y_padded)
    assert_close(tensors(h_n), tensors(h_padded))


@every_layer
@every_engine
@given(size=sizes, data=st.data())
def test_permuting_a_batch_permutes_the_result(name, engine, size, data):
    layer, x, hx = case(name, engine, size, num_layers=2)
    order = data.draw(st.permutations(range(size["batch"])))
    y, h_n = layer(x, hx)
    y_permuted, h_permuted = layer(x[:, order], like(hx, lambda h: h[:, order]))
    assert_close(y_permuted, y[:, order])
    assert_close(tensors(h_permuted), [h[:, order] for h in tensors(h_n)])


@pytest.mark.parametrize("name", ["DMU", "RHN", "GRU"])
@every_engine
@given(size=sizes, scale=st.floats(0.1, 50))
def test_state_stays_between_minus_one_and_one(name, engine, size, scale):
    layer, x, hx = case(name, engine, size)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(scale)
    y, _ = layer(scale * x, like(hx, lambda h: h.sign()))
    assert y.abs().max() <= 1


@every_engine
@given(size=sizes, transition=transitions())
def test_large_z_keeps_the_state_exactly(engine, size, transition):
    layer, x, hx = case("DMU", engine, size, transition=transition)
    last_bias = layer.transition_weights()[-1][1]
    with torch.no_grad():
        last_bias[: size["hidden"]] = 1e4
    y, h_n = layer(x, hx)
    assert torch.equal(h_n, hx)
    assert torch.equal(y, hx.expand_as(y))


@every_engine
@given(size=sizes)
def test_very_negative_z_replaces_the_state_by_the_candidate(engine, size):
    layer, x, hx = case("DMU", engine, size, transition=[])
    hidden = size["hidden"]
    ((weight, bias),) = layer.transition_weights()
    with torch.no_grad():
        bias[:hidden] = -1e4
    y, _ = layer(x[:1], hx)
    expected = torch.tanh(torch.cat([x[0], hx[0]], -1) @ weight[hidden:].T + bias[hidden:])
    assert_close(y[0], expected)


@every_engine
@given(size=sizes)
def test_basic_dmu_is_a_gru_with_its_reset_gate_open(engine, size):
    dmu, x, hx = case("DMU", engine, size, transition=[])
    hidden = size["hidden"]
    gru = torch.nn.GRU(size["features"], hidden, dtype=x.dtype)
    with torch.no_grad():
        for weight, ours in ((gru.weight_ih_l0, dmu.weight_ih_l0), (gru.weight_hh_l0, dmu.weight_hh_l0)):
            weight[:hidden] = 0
            weight[hidden:] = ours  # rows of r, then z, then candidate; ours are z, then candidate
        gru.bias_ih_l0.copy_(torch.cat([torch.full((hidden,), 1e4), dmu.bias_1_l0]))
        gru.bias_hh_l0.zero_()
    ours, theirs = results(dmu, x, hx), results(gru, x, hx)
    assert_close(ours["outputs"], theirs["outputs"])
    for key in ("x", "hx0"):
        assert_close(ours["gradients"][key], theirs["gradients"][key])
    for key, of_gru in (
        ("weight_ih_l0", "weight_ih_l0"),
        ("weight_hh_l0", "weight_hh_l0"),
        ("bias_1_l0", "bias_ih_l0"),
    ):
        assert_close(ours["gradients"][key], theirs["gradients"][of_gru][hidden:])


@every_layer
@every_engine
@given(size=sizes)
def test_reverse_direction_is_the_forward_layer_on_flipped_input(name, engine, size):
    both, x, hx = case(name, engine, size, bidirectional=True)
    one, *_ = case(name, engine, size)
    back = {k.removesuffix("_reverse"): v for k, v in both.state_dict().items() if k.endswith("_reverse")}
    one.load_state_dict(back)
    y, h_n = both(x, hx)
    y_one, h_one = one(x.flip(0), like(hx, lambda h: h[1:]))
    assert_close(y[..., size["hidden"] :], y_one.flip(0))
    assert_close([h[1:] for h in tensors(h_n)], tensors(h_one))
