"""Dropout inside the recurrence and residual transitions: off by default, and what they say they are."""

import inspect

import pytest
import torch
from fused_engines import missing
from layers import LAYERS, OWN, random_state, randomise, results, tensors
from tolerances import assert_close
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import deepmemory as dm
from deepmemory import export
from deepmemory.ops import plain

exporting = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

RESIDUAL = {
    "residual": {"residual": True, "transition": [6, 6, 6]},
    "residual, tanh": {"residual": True, "transition": [6, 6, 6], "activation": "tanh"},
    "residual, no bias": {"residual": True, "transition": [6, 6], "bias": False},
}
# Everything that a layer may be asked for, with what else it needs.
OPTIONS = {
    **{f"{name}-recurrent_dropout": (name, {"recurrent_dropout": 0.5, **OWN.get(name, {})}) for name in LAYERS},
    **{f"DMU-{key}": ("DMU", options) for key, options in RESIDUAL.items()},
    "DMU-transition_dropout": ("DMU", {"transition_dropout": 0.5, **OWN["DMU"]}),
    "DMU-all": ("DMU", {"recurrent_dropout": 0.3, "transition_dropout": 0.2, **RESIDUAL["residual, tanh"]}),
    "DMU-all, plain engine": (
        "DMU",
        {"recurrent_dropout": 0.3, "transition_dropout": 0.2, **RESIDUAL["residual"], "engine": "plain"},
    ),
    "LSTM-projected": ("LSTM", {"recurrent_dropout": 0.4, "proj_size": 2}),
}
DRAWN = {"recurrent_dropout", "transition_dropout"}

every_layer = pytest.mark.parametrize("name", LAYERS)
every_option = pytest.mark.parametrize(("name", "options"), OPTIONS.values(), ids=OPTIONS)


def build(name: str, *sizes: int, **options) -> nn.Module:
    options = {"engine": "auto", "dtype": torch.float64, **options}
    return randomise(LAYERS[name](*(sizes or (3, 5)), **options))


def seeded(seed: int, run, *args, **options):
    torch.manual_seed(seed)
    return run(*args, **options)


def grads(outputs, leaves) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(sum(t.sin().sum() for t in tensors(outputs)), leaves)


class TestOff:
    @every_layer
    def test_is_the_default_and_the_same_to_the_bit(self, name, engine):
        own = OWN.get(name, {})
        zeros = {"recurrent_dropout": 0.0}
        if name == "DMU":
            zeros |= {"residual": False, "transition_dropout": 0.0}
        for key, value in zeros.items():
            parameter = inspect.signature(LAYERS[name]).parameters[key]
            assert (parameter.default, parameter.kind) == (value, parameter.KEYWORD_ONLY)
        given, default = (
            seeded(3, LAYERS[name], 3, 5, 2, bidirectional=True, engine=engine, **own, **o) for o in (zeros, {})
        )
        assert list(given.state_dict()) == list(default.state_dict())
        assert repr(given) == repr(default)
        x = torch.randn(6, 4, 3)
        before = torch.get_rng_state()
        for a, b in zip(tensors(given(x)), tensors(default(x)), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn

    @pytest.mark.skipif(bool(missing("cpu")), reason="no CPU engine")
    @every_layer
    def test_runs_on_fused_engines(self, name):
        layer = LAYERS[name](3, 5, recurrent_dropout=0, engine="cpu")
        assert layer(torch.randn(6, 4, 3))[0].isfinite().all()

    def test_shown_where_on(self):
        assert repr(dm.GRU(3, 4, recurrent_dropout=0.2)) == "GRU(3, 4, recurrent_dropout=0.2)"
        dmu = dm.DMU(3, 4, transition=[4, 4], residual=True, transition_dropout=0.1)
        assert repr(dmu) == "DMU(3, 4, transition=[4, 4], residual=True, transition_dropout=0.1)"
        cell = dm.DMUCell(3, 4, transition=[4, 4], residual=True)
        assert repr(cell) == "DMUCell(3, 4, transition=[4, 4], residual=True)"


class TestErrors:
    @pytest.mark.parametrize("value", [-0.1, 1.5, True, "half", None, float("nan")], ids=str)
    @pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
    def test_probabilities(self, kind, value):
        for option in ("recurrent_dropout", "transition_dropout"):
            if option in inspect.signature(kind).parameters:
                message = rf"^{kind.__name__}: {option} should be a number in range \[0, 1\].* got {value!r}"
                with pytest.raises(ValueError, match=message):
                    kind(3, 4, **{option: value})

    @pytest.mark.parametrize("kind", [dm.DMU, dm.DMUCell])
    def test_transitions(self, kind):
        name = kind.__name__
        with pytest.raises(TypeError, match=f"^{name}: residual should be of type bool, got: int"):
            kind(3, 4, transition=[4, 4], residual=1)
        with pytest.raises(ValueError, match=f"^{name}: residual=True needs a transition given as a list of widths"):
            kind(3, 4, transition=nn.Linear(7, 8), residual=True)
        message = rf"^{name}: residual=True needs hidden layers of equal width, .* got the widths \[4, 5\]"
        with pytest.raises(ValueError, match=message):
            kind(3, 4, transition=[4, 5], residual=True)


@every_option
class TestEveryOption:
    def test_a_seed_gives_the_same_numbers(self, name, options):
        layer, x = build(name, **options, num_layers=2, bidirectional=True), torch.randn(6, 4, 3, dtype=torch.float64)
        random = not DRAWN.isdisjoint(options)
        first, again, other = (seeded(seed, layer, x)[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert torch.equal(first, other) != random
        layer.eval()
        assert torch.equal(seeded(1, layer, x)[0], seeded(2, layer, x)[0])

    @pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
    def test_derivatives(self, name, options, padded):
        layer = build(name, 2, 3, bidirectional=True, **options)
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        hx = random_state(layer, x)
        names = [key for key, _ in layer.named_parameters()]
        lengths = torch.tensor([3, 1]) if padded else None

        def run(x, *weights):
            torch.manual_seed(4)
            given = dict(zip(names, weights, strict=True))
            return tuple(tensors(functional_call(layer, given, (x, hx), {"lengths": lengths})))

        weights = [p.detach().requires_grad_() for p in layer.parameters()]
        for training in (True, False):
            layer.train(training)
            assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)

    def test_each_sequence_as_if_alone(self, name, options):
        layer = build(name, **options, num_layers=2, bidirectional=True).eval()
        sequences = [torch.randn(length, 3, dtype=torch.float64) for length in (3, 6, 1, 4)]
        packed = pack_sequence(sequences, enforce_sorted=False)
        y, h_n = layer(packed)
        padded, lengths = pad_packed_sequence(packed)
        y_padded, h_padded = layer(padded, lengths=lengths)
        assert_close(pad_packed_sequence(y)[0], y_padded)
        assert_close(tensors(h_n), tensors(h_padded))
        for b, sequence in enumerate(sequences):
            y_alone, h_alone = layer(sequence)
            assert_close(y_padded[: len(sequence), b], y_alone)
            assert_close([h[:, b] for h in tensors(h_padded)], tensors(h_alone))

    def test_padding_never_reaches_a_state_or_a_gradient(self, name, options):
        layer = build(name, **options, num_layers=2, bidirectional=True)
        x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([6, 0, 3, 5])
        padding = (torch.arange(6)[:, None] >= lengths)[..., None]
        for training in (True, False):
            layer.train(training)
            clean, dirty = (
                seeded(2, results, layer, x.masked_fill(padding, rubbish), lengths=lengths)
                for rubbish in (0.0, float("nan"))
            )
            assert_close(dirty, clean)

    def test_layers_of_different_widths_and_an_empty_batch(self, name, options):
        widths = [6, 5] if "proj_size" not in options else [6, 6]
        layer = build(name, 3, widths, **options)
        assert layer(torch.randn(4, 2, 3, dtype=torch.float64))[0].isfinite().all()
        assert layer(torch.randn(4, 0, 3, dtype=torch.float64))[0].shape[:2] == (4, 0)

    def test_runs_side_by_side(self, name, options):
        layers = [build(name, **options) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x = torch.randn(3, 6, 4, 3, dtype=torch.float64)

        def run(weights, x):
            return tuple(tensors(functional_call(layers[0], weights, (x,))))

        together = seeded(1, vmap(run, randomness="same"), weights, x)
        alone = [tensors(seeded(1, layer, x[r])) for r, layer in enumerate(layers)]
        assert_close(list(together), [torch.stack(parts) for parts in zip(*alone, strict=True)])
        random = not DRAWN.isdisjoint(options)
        if random:
            copies = {key: value[:1].expand(3, *value.shape[1:]) for key, value in weights.items()}
            same_input = x[:1].expand_as(x)
            drawn = vmap(run, randomness="different")(copies, same_input)[0]
            assert not torch.allclose(drawn[0], drawn[1])
            with pytest.raises(RuntimeError, match="randomness"):
                vmap(run)(weights, x)
        layers[0].eval()
        evaluated = vmap(run)(weights, x)[0]
        assert_close(evaluated, torch.stack([layer.eval()(x[r])[0] for r, layer in enumerate(layers)]))

    def test_half_the_bits(self, name, options):
        layer, x = build(name, **options, dtype=torch.float32), torch.randn(6, 4, 3)
        for training in (True, False):
            with torch.autocast("cpu", torch.bfloat16):
                y, _ = layer.train(training)(x)
            assert y.dtype is torch.bfloat16
            assert all(g.isfinite().all() for g in grads(y, list(layer.parameters())))

    def test_recomputed_by_torch(self, name, options):
        """Activation checkpointing draws the same masks again."""
        layer, x = build(name, **options), torch.randn(6, 4, 3, dtype=torch.float64)
        leaves = list(layer.parameters())
        expected = grads(seeded(1, layer, x), leaves)
        torch.manual_seed(1)
        assert_close(grads(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), leaves), expected)


@every_option
class TestTraced:
    def test_compiled_in_one_graph(self, name, options):
        layer = build(name, **options)
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(3, 2, 3, dtype=torch.float64)
        leaves = list(layer.parameters())
        ours, theirs = seeded(3, compiled, x), seeded(3, layer, x)
        assert_close(tensors(ours), tensors(theirs))
        assert_close(grads(ours, leaves), grads(theirs, leaves))

    @exporting[0]
    @exporting[1]
    def test_exported(self, name, options):
        layer = build(name, **options, dtype=torch.float32)
        x = torch.randn(4, 2, 3)
        exported = export.program(layer, {"input": x}, {"input": {0: "time", 1: "batch"}}).module()
        assert layer.training
        x = torch.randn(9, 5, 3)
        assert_close(tensors(exported(input=x)), [t.detach() for t in tensors(layer.eval()(x))])

    @exporting[0]
    @exporting[1]
    def test_exported_in_training_it_goes_on_drawing(self, name, options):
        layer = build(name, **options, dtype=torch.float32)
        sizes = {"input": {0: torch.export.Dim("time", min=2), 1: torch.export.Dim("batch", min=2)}}
        exported = torch.export.export(layer, (torch.randn(4, 2, 3),), dynamic_shapes=sizes).module()
        x = torch.randn(9, 7, 3)
        assert_close(tensors(seeded(1, exported, x)), tensors(seeded(1, layer, x)))


def own_network(layer, number: int = 0) -> nn.Module:
    """The residual transition of a DMU, written with torch's modules."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = {k.removesuffix(f"_l{number}"): v for k, v in layer.state_dict().items() if f"_l{number}" in k}
            first = torch.cat([weights["weight_ih"], weights["weight_hh"]], 1)
            matrices = [first, *(weights[f"weight_{k}"] for k in range(2, layer.depth + 1))]
            self.linear = nn.ModuleList(nn.Linear(*w.shape[::-1], bias=layer.bias, dtype=w.dtype) for w in matrices)
            for k, (linear, matrix) in enumerate(zip(self.linear, matrices, strict=True), start=1):
                linear.weight.data.copy_(matrix)
                if layer.bias:
                    linear.bias.data.copy_(weights[f"bias_{k}"])

        def forward(self, joined):
            hidden = None
            for linear in self.linear[:-1]:
                a = plain.ACTIVATION[layer.activation](linear(joined if hidden is None else hidden))
                hidden = a if hidden is None else hidden + a
            return self.linear[-1](hidden)

    return Network()


@pytest.mark.parametrize("options", RESIDUAL.values(), ids=RESIDUAL)
class TestTransition:
    def test_is_the_formula(self, options):
        layer = build("DMU", 3, 5, num_layers=2, **options)
        given = dm.DMU(3, 5, 2, transition=[own_network(layer, number) for number in range(2)])
        x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([6, 0, 3, 5])
        assert_close(tensors(layer(x, lengths=lengths)), tensors(given(x, lengths=lengths)))

    def test_step_by_step_equals_all_at_once(self, options):
        layer = build("DMU", **options)
        cell = dm.DMUCell(3, 5, dtype=torch.float64, **options)
        cell.load_state_dict({key.removesuffix("_l0"): value for key, value in layer.state_dict().items()})
        x = torch.randn(6, 4, 3, dtype=torch.float64)
        h, steps = None, []
        for x_t in x:
            h = cell(x_t, h)
            steps.append(h)
        y, _ = layer(x)
        assert_close(torch.stack(steps), y)
        assert_close(grads(torch.stack(steps), list(cell.parameters())), grads(y, list(layer.parameters())))

    def test_weights_depth_and_rate(self, options):
        layer, plain_one = (seeded(1, dm.DMU, 3, 5, 2, **options | {"residual": on}) for on in (True, False))
        assert layer.state_dict().keys() == plain_one.state_dict().keys()
        hidden = len(options["transition"])
        adds = {f"weight_{k}_l{n}" for k in range(2, hidden + 1) for n in range(2)}
        for key, value in layer.state_dict().items():  # what is drawn is drawn as ever
            assert_close(value, plain_one.state_dict()[key] / (layer.depth**0.5 if key in adds else 1))
        assert layer.depth == plain_one.depth == hidden + 1
        (group,) = dm.parameter_groups(layer, lr=1.0)
        assert group["lr"] == pytest.approx(1 / 4)
        assert len(group["params"]) == len(list(layer.parameters()))

    def test_what_needs_a_list_of_weights_refuses(self, options):
        layer, cell = dm.DMU(3, 5, **options), dm.DMUCell(3, 5, **options)
        for call in (layer.transition_weights, *(lambda m=m: dm.gradients.condition(m) for m in (layer, cell))):
            with pytest.raises(TypeError, match=r"^DMU(Cell)?: with residual=True the transition is more than"):
                call()


class TestGradients:
    @every_layer
    def test_flow_sees_one_mask(self, name):
        layer, x = build(name, recurrent_dropout=0.5, num_layers=2), torch.randn(6, 4, 3, dtype=torch.float64)
        found = seeded(3, dm.gradients.flow, layer, x, lambda out: out[0].square().sum())
        assert found.loss == pytest.approx(seeded(3, layer, x)[0].square().sum().item())

    @pytest.mark.parametrize("kind", ["dense", "module", *RESIDUAL])
    def test_the_jacobian_of_a_step_is_that_of_the_average(self, kind):
        options = RESIDUAL.get(kind, {"transition": [6], "transition_dropout": 0.4})
        if kind == "module":
            options = {"transition": nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10)).double()}
        layer = build("DMU", recurrent_dropout=0.5, **options).eval()
        x, h = torch.randn(3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
        found = dm.gradients.step_jacobian(layer, x, h)
        expected = torch.autograd.functional.jacobian(lambda h: layer(x[None], h[None])[1][0], h)
        assert_close(found.total, expected)
        assert_close(found.kept.diagonal(), dm.gradients.gates(layer, (x[None], h[None]))[0].keep[0, 0])

    @pytest.mark.parametrize("option", sorted(DRAWN))
    def test_steps_that_are_drawn_have_no_jacobian(self, option):
        layer, x = dm.DMU(3, 5, **{option: 0.1}), torch.randn(6, 3)
        for call in (
            lambda: dm.gradients.step_jacobian(layer, x[0], torch.zeros(5)),
            lambda: dm.gradients.gates(layer, x),
        ):
            with pytest.raises(ValueError, match=r"makes this DMU's steps random; call \.eval\(\) first"):
                call()
        dm.gradients.condition(layer)  # of the weights, whatever is drawn


@exporting[0]
@exporting[1]
@pytest.mark.parametrize(("name", "options"), [OPTIONS["DMU-all"], OPTIONS["LSTM-projected"]], ids=["DMU", "LSTM"])
def test_in_onnx_runtime(name, options, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    layer = build(name, **options, dtype=torch.float32)
    export.save(layer, {"input": torch.randn(4, 2, 3)}, tmp_path / "m.onnx", sizes={"input": {0: "time", 1: "batch"}})
    x = torch.randn(9, 5, 3)
    found = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()})
    assert_close([torch.from_numpy(f) for f in found], [t.detach() for t in tensors(layer.eval()(x))])
