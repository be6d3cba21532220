"""Dropout inside the recurrence and residual transitions: what they compute, and where the masks come from."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from layers import LAYERS, OWN, random_state, randomise, results, tensors
from tolerances import assert_close
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import deepmemory as dm
from deepmemory import export

DTYPES = {"plain": torch.float64, "auto": torch.float32}  # the definition exactly, and what users run
every_layer = pytest.mark.parametrize("name", LAYERS)
every_engine = pytest.mark.parametrize("engine", DTYPES)  # hypothesis wants no function-scoped fixture
DROPPED = {"DMU": {"recurrent_dropout": 0.5, "transition_dropout": 0.4}}
ACTIVATIONS = {"leaky_relu": F.leaky_relu, "relu": F.relu, "tanh": torch.tanh, "silu": F.silu, "gelu": F.gelu}


def build(name: str, engine: str = "plain", *sizes: int, **options) -> nn.Module:
    options = {"dtype": DTYPES[engine], **OWN.get(name, {}), **options}
    return randomise(LAYERS[name](*(sizes or (3, 5)), engine=engine, **options))


def dropping(name: str, engine: str = "plain", *sizes: int, **options) -> nn.Module:
    return build(name, engine, *sizes, **DROPPED.get(name, {"recurrent_dropout": 0.5}), **options)


def step(name: str, layer: nn.Module, suffix: str, x: Tensor, state: list[Tensor], masks: dict[str, Tensor]):
    """One step of a layer in one direction, from its formula."""

    def linear(number, a):
        return F.linear(a, getattr(layer, f"weight_{number}{suffix}"), getattr(layer, f"bias_{number}{suffix}"))

    def split(parts):
        x_side, h_side = (getattr(layer, f"weight_{side}{suffix}") for side in ("ih", "hh"))
        b_x, b_h = (getattr(layer, f"bias_{side}{suffix}", None) for side in ("ih", "hh"))
        return [F.linear(x, x_side, b_x).chunk(parts, -1), F.linear(seen * h, h_side, b_h).chunk(parts, -1)]

    h = state[0]
    seen = masks.get(f"state{suffix}", torch.ones_like(h))
    if name == "DMU":
        widths = layer.transition
        hidden = iter(masks.get(f"hidden{suffix}", h.new_ones(len(h), sum(widths))).split(widths, -1))
        (of_x,), (of_h,) = split(1)
        v, a = of_x + of_h + getattr(layer, f"bias_1{suffix}"), None
        for number in range(2, layer.depth + 1):
            u = next(hidden) * ACTIVATIONS[layer.activation](v)
            a = a + u if layer.residual and a is not None else u
            v = linear(number, a)
        z, candidate = v.chunk(2, -1)
        return [h * torch.sigmoid(z) + torch.tanh(candidate) * (1 - torch.sigmoid(z))]
    if name == "RHN":
        for depth in range(1, layer.depth + 1):
            if depth == 1:
                (of_x,), (of_h,) = split(1)
                v = of_x + of_h + getattr(layer, f"bias_1{suffix}")
            else:
                v = linear(depth, seen * h)
            candidate, transform = v.chunk(2, -1)
            h = torch.tanh(candidate) * torch.sigmoid(transform) + h * (1 - torch.sigmoid(transform))
        return [h]
    if name == "RNN":
        (of_x,), (of_h,) = split(1)
        return [torch.tanh(of_x + of_h)]
    if name == "GRU":
        (r_x, z_x, n_x), (r_h, z_h, n_h) = split(3)
        z = torch.sigmoid(z_x + z_h)
        return [z * h + (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)]
    i, f, g, o = (a + b for a, b in zip(*split(4), strict=True))
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


class ByHand(nn.Module):
    """A layer as loops over its formula, step by step and direction by direction."""

    def __init__(self, name: str, layer: nn.Module):
        super().__init__()
        self.name, self.layer = name, layer

    def named_parameters(self, *args, **kwargs):
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, x, hx, lengths, resets, masks):
        final = []
        for number in range(self.layer.num_layers):
            outputs = []
            for direction in range(self.layer._directions):
                suffix = f"_l{number}" + ("_reverse" if direction else "")
                state, y = [h[len(final)] for h in tensors(hx)], [None] * len(x)
                for t in range(len(x))[:: -1 if direction else 1]:
                    if direction:
                        begins = resets[t + 1] & (t + 1 < lengths) if t + 1 < len(x) else torch.zeros_like(resets[0])
                    else:
                        begins = resets[t] & (t < lengths)
                    state = [torch.where(begins[:, None], 0, s) for s in state]
                    new = step(self.name, self.layer, suffix, x[t], state, masks)
                    real = (t < lengths)[:, None]
                    y[t] = torch.where(real, new[0], 0)
                    state = [torch.where(real, n, s) for n, s in zip(new, state, strict=True)]
                outputs.append(torch.stack(y))
                final.append(state)
            x = torch.cat(outputs, -1)
        return x, [torch.stack(part) for part in zip(*final, strict=True)]


@every_layer
@every_engine
@given(
    steps=st.integers(1, 6),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    options=st.fixed_dictionaries(
        {"num_layers": st.integers(1, 2), "bidirectional": st.booleans(), "recompute": st.booleans()}
    ),
    own=st.fixed_dictionaries(
        {
            "residual": st.booleans(),
            "transition": st.sampled_from([[], [4], [6, 6], [4, 4, 4]]),
            "activation": st.sampled_from(list(ACTIVATIONS)),
        }
    ),
)
def test_is_the_formula(name, engine, steps, batch, seed, options, own):
    """Masks, residuals, resets and lengths together, in every layer and direction."""
    torch.manual_seed(seed)
    layer = dropping(name, engine, **options, **(own if name == "DMU" else {}))
    x, lengths = torch.randn(steps, batch, 3, dtype=DTYPES[engine]), torch.randint(0, steps + 1, (batch,))
    hx = random_state(layer, x)
    given = {"lengths": lengths, "resets": torch.rand(steps, batch) < 0.3, "masks": layer.draw_masks(batch)}
    assert_close(results(layer, x, hx, **given), results(ByHand(name, layer), x, hx, **given))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_residual_transitions_alone(activation, bias, engine):
    layer = build("DMU", engine, transition=[6] * 4, residual=True, activation=activation, bias=bias)
    x = torch.randn(5, 3, 3, dtype=DTYPES[engine])
    y, _ = layer(x)
    h = x.new_zeros(3, 5)
    for t, x_t in enumerate(x):
        v = x_t @ layer.weight_ih_l0.T + h @ layer.weight_hh_l0.T + (layer.bias_1_l0 if bias else 0)
        a = ACTIVATIONS[activation](v)
        for k in (2, 3, 4):
            v = a @ getattr(layer, f"weight_{k}_l0").T + (getattr(layer, f"bias_{k}_l0") if bias else 0)
            a = a + ACTIVATIONS[activation](v)
        z, c = (a @ layer.weight_5_l0.T + (layer.bias_5_l0 if bias else 0)).chunk(2, -1)
        h = h * torch.sigmoid(z) + torch.tanh(c) * (1 - torch.sigmoid(z))
        assert_close(y[t], h)


@pytest.mark.parametrize("transition", [None, [], [6]], ids=str)
def test_residual_without_two_hidden_layers_is_the_plain_module(transition, engine):
    layer = build("DMU", engine, transition=transition, residual=True)
    other = build("DMU", engine, transition=transition)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 3, dtype=DTYPES[engine])
    assert torch.equal(layer(x)[0], other(x)[0])
    assert len(layer.transition_weights()) == layer.depth


def test_layers_that_add_start_smaller_by_the_root_of_the_depth():
    torch.manual_seed(1)
    layer = dm.DMU(3, 5, transition=[200] * 4, residual=True)
    torch.manual_seed(1)
    ordinary = dm.DMU(3, 5, transition=[200] * 4)
    for key, weight in layer.state_dict().items():
        adds = key in ("weight_2_l0", "weight_3_l0", "weight_4_l0")
        assert_close(weight, ordinary.state_dict()[key] / (5**0.5 if adds else 1))


class TestDerivatives:
    @every_layer
    def test_first_and_second(self, name):
        own = {"transition": [3, 3], "residual": True, "activation": "silu"} if name == "DMU" else {}
        layer = dropping(name, "plain", 2, 3, bidirectional=True, **own)
        x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
        hx = random_state(layer, x)
        names, masks = [key for key, _ in layer.named_parameters()], layer.draw_masks(2)
        resets, lengths = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]], dtype=torch.bool).T, torch.tensor([4, 3])

        def run(x, *weights):
            options = {"lengths": lengths, "resets": resets, "masks": masks}
            given = dict(zip(names, weights, strict=True))
            return tuple(tensors(functional_call(layer, given, (x, hx), options)))

        leaves = (x, *(p.detach().requires_grad_() for p in layer.parameters()))
        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)

    @every_layer
    def test_second_on_every_engine(self, name, engine):
        layer = dropping(name, engine, bidirectional=True)
        other = dropping(name, "plain", bidirectional=True, dtype=DTYPES[engine])
        other.load_state_dict(layer.state_dict())
        x, masks = torch.randn(4, 2, 3, dtype=DTYPES[engine]), layer.draw_masks(2)
        found = []
        for each in (layer, other):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(each(leaf, masks=masks)[0].sin().sum(), leaf, create_graph=True)
            found.append([first, *torch.autograd.grad(first.sin().sum(), [leaf, *each.parameters()])])
        assert_close(*found)

    @every_layer
    def test_what_is_dropped_gets_no_gradient(self, name, engine):
        layer, x = dropping(name, engine), torch.randn(6, 1, 3, dtype=DTYPES[engine])
        masks = layer.draw_masks(1)
        masks["state_l0"][0, 1] = 0.0
        masks["state_l0"][0, 2] = 2.0
        layer(x, masks=masks)[0].sum().backward()
        columns = layer.weight_hh_l0.grad.abs().sum(0)
        assert torch.equal(columns == 0, masks["state_l0"][0] == 0)


class TestDraws:
    @every_layer
    def test_one_for_each_sequence_layer_and_direction(self, name):
        layer = dropping(name, num_layers=2, bidirectional=True)
        masks = layer.draw_masks(64)
        suffixes = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
        widths = {"state": 5, "hidden": 13} if name == "DMU" else {"state": 5}
        assert {key: tuple(mask.shape) for key, mask in masks.items()} == {
            kind + suffix: (64, width) for suffix in suffixes for kind, width in widths.items()
        }
        for key, mask in masks.items():
            rate = 0.4 if key.startswith("hidden") else 0.5
            assert mask.dtype is torch.float64
            assert_close(mask.unique(), mask.new_tensor([0, 1 / (1 - rate)]))
            assert abs((mask == 0).double().mean() - rate) < 0.1
            assert len(mask.unique(dim=0)) > 20  # sequences have their own
        assert len({tuple(mask[:, 0].tolist()) for mask in masks.values()}) == len(masks)

    def test_of_widths_and_projections(self):
        masks = build("DMU", "plain", 3, [5, 4], transition=None, recurrent_dropout=0.1, transition_dropout=0.1)
        assert {key: mask.shape[1] for key, mask in masks.draw_masks(2).items()} == {
            "state_l0": 5,
            "hidden_l0": 5,
            "state_l1": 4,
            "hidden_l1": 4,
        }
        projected = build("LSTM", proj_size=2, recurrent_dropout=0.1)
        assert projected.draw_masks(3)["state_l0"].shape == (3, 2)
        one = build("GRU", recurrent_dropout=0.1)
        assert one.draw_masks()["state_l0"].shape == (5,)
        assert not build("GRU").draw_masks(3)
        assert not one.eval().draw_masks(3)
        basic = build("DMU", transition=[], transition_dropout=0.5)  # no hidden layer, nothing to drop
        assert not basic.draw_masks(3)
        assert basic(torch.randn(4, 2, 3, dtype=torch.float64))[0].isfinite().all()

    @every_layer
    def test_a_call_draws_them_first(self, name, engine):
        """So that a seed gives a call the masks that it gives draw_masks."""
        layer, x = dropping(name, engine, num_layers=2), torch.randn(6, 4, 3, dtype=DTYPES[engine])
        torch.manual_seed(3)
        y, _ = layer(x)
        torch.manual_seed(3)
        masks = layer.draw_masks(4)
        after = torch.get_rng_state()
        assert torch.equal(layer(x, masks=masks)[0], y)
        assert torch.equal(torch.get_rng_state(), after)  # masks= given: nothing is drawn
        assert not torch.equal(layer(x)[0], y)

    @every_layer
    def test_pieces_of_a_sequence_share_them(self, name, engine):
        layer, x = dropping(name, engine, num_layers=2), torch.randn(7, 4, 3, dtype=DTYPES[engine])
        masks = layer.draw_masks(4)
        y, h_n = layer(x, masks=masks)
        first, middle = layer(x[:3], masks=masks)
        rest, last = layer(x[3:], middle, masks=masks)
        assert_close(torch.cat([first, rest]), y)
        assert_close(tensors(last), tensors(h_n))

    @every_layer
    def test_sequences_keep_to_their_own(self, name, engine):
        layer, x = dropping(name, engine, bidirectional=True), torch.randn(6, 4, 3, dtype=DTYPES[engine])
        masks = layer.draw_masks(4)
        y, h_n = layer(x, masks=masks)
        for b in range(4):
            y_alone, h_alone = layer(x[:, b], masks={key: mask[b] for key, mask in masks.items()})
            assert_close(y_alone, y[:, b])
            assert_close(tensors(h_alone), [h[:, b] for h in tensors(h_n)])

    @every_layer
    def test_in_evaluation_there_are_none_but_those_given(self, name, engine):
        layer, x = dropping(name, engine), torch.randn(6, 4, 3, dtype=DTYPES[engine])
        off = build(name, engine)
        off.load_state_dict(layer.state_dict())
        masks = layer.draw_masks(4)
        expected = layer(x, masks=masks)[0]
        layer.eval()
        before = torch.get_rng_state()
        assert torch.equal(layer(x)[0], off(x)[0])
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(layer(x, masks=masks)[0], expected)
        assert torch.equal(off(x, masks=masks)[0], expected)
        assert torch.equal(layer(x, masks={})[0], off(x)[0])

    @every_layer
    def test_everything_dropped_is_a_transition_without_state(self, name, engine):
        layer = build(name, engine, recurrent_dropout=1.0)
        x = torch.randn(6, 4, 3, dtype=DTYPES[engine])
        off = build(name, engine)
        off.load_state_dict(layer.state_dict())
        with torch.no_grad():
            for key, weight in off.named_parameters():
                if key == "weight_hh_l0" or (name == "RHN" and key in ("weight_2_l0", "weight_3_l0")):
                    weight.zero_()
        assert_close(layer(x)[0], off(x)[0])

    @every_layer
    def test_packed_or_padded_a_seed_gives_the_same(self, name, engine):
        layer, x = dropping(name, engine, bidirectional=True), torch.randn(6, 4, 3, dtype=DTYPES[engine])
        lengths = torch.tensor([3, 6, 1, 4])
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        for masks in (None, layer.draw_masks(4)):
            torch.manual_seed(2)
            y, h_n = layer(packed, masks=masks)
            torch.manual_seed(2)
            y_padded, h_padded = layer(x, lengths=lengths, masks=masks)
            assert_close(pad_packed_sequence(y)[0], y_padded)
            assert_close(tensors(h_n), tensors(h_padded))

    def test_a_transition_given_as_a_module(self):
        module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10)).double()
        layer = dm.DMU(3, 5, transition=module, recurrent_dropout=0.5)
        x, h = torch.randn(6, 4, 3, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
        masks = layer.draw_masks(4)
        assert list(masks) == ["state_l0"]
        y, _ = layer(x, h[None], masks=masks)
        for t, x_t in enumerate(x):
            z, candidate = module(torch.cat([x_t, h * masks["state_l0"]], -1)).chunk(2, -1)
            h = h * torch.sigmoid(z) + torch.tanh(candidate) * (1 - torch.sigmoid(z))
            assert_close(y[t], h)


class TestTransforms:
    @every_layer
    def test_runs_side_by_side(self, name, engine):
        layers = [dropping(name, engine, bidirectional=True) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x = torch.randn(3, 6, 4, 3, dtype=DTYPES[engine])
        masks = [layer.draw_masks(4) for layer in layers]
        stacked = {key: torch.stack([of_run[key] for of_run in masks]) for key in masks[0]}

        def run(weights, x, masks):
            return tuple(tensors(functional_call(layers[0], weights, (x,), {"masks": masks})))

        together = vmap(run)(weights, x, stacked)
        alone = [tensors(layer(x[r], masks=masks[r])) for r, layer in enumerate(layers)]
        assert_close(list(together), [torch.stack(parts) for parts in zip(*alone, strict=True)])
        shared = vmap(run, (0, 0, None))(weights, x, masks[0])
        alone = [tensors(layer(x[r], masks=masks[0])) for r, layer in enumerate(layers)]
        assert_close(list(shared), [torch.stack(parts) for parts in zip(*alone, strict=True)])
        leaves = list(weights.values())
        of_runs = torch.autograd.grad(sum(t.sin().sum() for t in together), leaves)
        alone = sum(t.sin().sum() for r, layer in enumerate(layers) for t in tensors(layer(x[r], masks=masks[r])))
        grads = torch.autograd.grad(alone, [p for layer in layers for p in layer.parameters()])
        expected = [torch.stack(grads[k :: len(leaves)]) for k in range(len(leaves))]
        assert_close(list(of_runs), expected)

    @every_layer
    def test_randomness_of_a_map_over_sequences(self, name, engine):
        layer, x = dropping(name, engine), torch.randn(7, 1, 3, dtype=DTYPES[engine]).expand(7, 4, 3)
        y = vmap(lambda x: layer(x)[0], in_dims=1, out_dims=1, randomness="different")(x)
        assert not all(torch.allclose(y[:, 0], y[:, b]) for b in range(1, 4))
        y = vmap(lambda x: layer(x)[0], in_dims=1, out_dims=1, randomness="same")(x)
        assert_close(y, y[:, :1].expand_as(y))

    @pytest.mark.parametrize("name", ["DMU", "LSTM"])
    def test_compiled_in_one_graph(self, name, engine):
        torch.compiler.reset()
        layer = dropping(name, engine, bidirectional=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x, masks = torch.randn(4, 3, 3, dtype=DTYPES[engine]), layer.draw_masks(3)
        ours, theirs = (tensors(run(x, masks=masks)) for run in (compiled, layer))
        assert_close(ours, theirs)
        leaves = list(layer.parameters())
        assert_close(*(torch.autograd.grad(sum(t.sin().sum() for t in out), leaves) for out in (ours, theirs)))

    @pytest.mark.filterwarnings("ignore:.*is deprecated")
    @pytest.mark.parametrize("name", ["DMU", "LSTM"])
    def test_exported_as_an_input(self, name):
        layer = dropping(name, dtype=torch.float32, bidirectional=True)
        given = {"input": torch.randn(4, 2, 3), "masks": layer.draw_masks(2)}
        sizes = {"input": {0: "time", 1: "batch"}, "masks": {key: {0: "batch"} for key in given["masks"]}}
        exported = export.program(layer, given, sizes).module()
        given = {"input": torch.randn(9, 5, 3), "masks": layer.draw_masks(5)}
        assert_close(tensors(exported(**given)), [t.detach() for t in tensors(layer(**given))])

    @every_layer
    def test_half_the_bits(self, name):
        layer, x = dropping(name, "auto"), torch.randn(6, 4, 3)
        masks = layer.draw_masks(4)
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x, masks=masks)
        assert y.dtype is torch.bfloat16
        assert_close(y.float(), layer(x, masks=masks)[0], dtype=torch.bfloat16)


X = torch.zeros(5, 2, 3)
MISTAKES = {
    "no dict": (
        [torch.ones(2, 4)],
        TypeError,
        "masks should be a dict of tensors, as returned by draw_masks, got list",
    ),
    "an unknown name": ({"state_l1": torch.ones(2, 4)}, ValueError, "no mask 'state_l1'; this layer has state_l0"),
    "no tensor": ({"state_l0": [1.0] * 4}, TypeError, r"masks\['state_l0'\] should be a tensor, got list"),
    "another batch": ({"state_l0": torch.ones(3, 4)}, ValueError, r"the shape \(2, 4\), got \(3, 4\)"),
    "no batch": ({"state_l0": torch.ones(4)}, ValueError, r"the shape \(2, 4\), got \(4,\)"),
    "another width": ({"state_l0": torch.ones(2, 5)}, ValueError, r"the shape \(2, 4\), got \(2, 5\)"),
    "another dtype": (
        {"state_l0": torch.ones(2, 4).double()},
        RuntimeError,
        r"float64.*float32.*mask.to\(torch.float32",
    ),
    "bools": ({"state_l0": torch.ones(2, 4) > 0}, RuntimeError, r"bool.*float32"),
    "another device": ({"state_l0": torch.ones(2, 4, device="meta")}, RuntimeError, r"meta.*cpu"),
    "a variable": ({"state_l0": torch.ones(2, 4).requires_grad_()}, RuntimeError, "are constants.*mask.detach()"),
}


@every_layer
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake(name, mistake):
    masks, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=f"^{name}: .*{message}"):
        LAYERS[name](3, 4)(X, masks=masks)


def test_masks_of_an_unbatched_call():
    with pytest.raises(ValueError, match=r"the shape \(4,\), got \(1, 4\)"):
        dm.GRU(3, 4)(X[:, 0], masks={"state_l0": torch.ones(1, 4)})


def test_hidden_layers_are_a_dmus():
    with pytest.raises(ValueError, match=r"^GRU: there is no mask 'hidden_l0'"):
        dm.GRU(3, 4)(X, masks={"hidden_l0": torch.ones(2, 4)})
    with pytest.raises(ValueError, match=r"^DMU: transition_dropout=0.5 needs a transition given as a list of widths"):
        dm.DMU(3, 4, transition=nn.Linear(7, 8), transition_dropout=0.5)
