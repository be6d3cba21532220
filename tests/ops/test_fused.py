"""What users rely on from the fused engines as torch operators: transforms, compilation, memory.

``nn.GRU`` fails at most of this: vmap over weights, per-sample gradients, export with a dynamic length, compilation
without graph breaks.
"""

import shutil

import pytest
import torch
from fused_engines import DEVICES, close, draw, loss, make, pair
from layers import LAYERS, OWN, randomise, tensors
from tolerances import assert_close
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from deepmemory.ops import CELLS, Recurrence, Sequences, engines, fused


def draw_lengths(on: str, most: int, *shape: int) -> Tensor:
    return torch.randint(0, most + 1, shape, device=DEVICES[on])


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in layer.named_parameters()}


def call(layer: nn.Module, weights, x: Tensor, lengths=None) -> list[Tensor]:
    """y and the tensors of the final state."""
    y, state = functional_call(layer, weights, (x,), {"lengths": lengths})
    return [y, *tensors(state)]


class Spy:
    """An engine that tells what it was asked for."""

    def __init__(self, engine):
        self.engine, self.saves, self.traces, self.needs = engine, [], [], []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def forward(self, rec, x, state, weights, sequences, save):
        out = self.engine.forward(rec, x, state, weights, sequences, save)
        self.saves.append(save)
        self.traces.append(out[2].numel())
        return out

    def backward(self, *args):
        self.needs.append(args[-1])
        return self.engine.backward(*args)


@pytest.fixture
def spy(engine: str, monkeypatch: pytest.MonkeyPatch) -> Spy:
    monkeypatch.setitem(engines.FUSED, engine, Spy(engines.FUSED[engine]))
    return engines.FUSED[engine]


class TestRunsSideBySide:
    def test_equal_a_loop_over_runs(self, name, engine):
        layers = [make(name, engine, num_layers=2, bidirectional=True) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x, lengths = draw(engine, 3, 7, 4, 3).requires_grad_(), draw_lengths(engine, 7, 3, 4)
        together = vmap(lambda w, x, n: tuple(call(layers[0], w, x, n)))(weights, x, lengths)
        runs = list(zip(layers, x, lengths, strict=True))
        alone = [call(layer, {}, *run) for layer, *run in runs]
        close(together, [torch.stack(outputs) for outputs in zip(*alone, strict=True)])
        grads = torch.autograd.grad(loss(together), [x, *weights.values()])
        of_runs = [torch.autograd.grad(loss(call(layer, {}, *run)), list(layer.parameters())) for layer, *run in runs]
        of_x = torch.autograd.grad(sum(map(loss, alone)), x)
        close(grads, [*of_x, *(torch.stack(of_weight) for of_weight in zip(*of_runs, strict=True))])

    @pytest.mark.parametrize("shared", ["input", "weights", "lengths"])
    def test_what_runs_share_need_not_be_copied(self, name, engine, shared):
        ours, plain = pair(name, engine)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x, lengths = draw(engine, 2, 6, 4, 3), draw_lengths(engine, 6, 2, 4)
        in_dims = [0, 0, 0]
        if shared == "input":
            x, in_dims[1] = x[0], None
        elif shared == "weights":
            weights, in_dims[0] = {key: value[0] for key, value in weights.items()}, None
        else:
            lengths, in_dims[2] = lengths[0], None

        def results(layer):
            leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
            mine = x.clone().requires_grad_()
            outputs = vmap(lambda *args: tuple(call(layer, *args)), tuple(in_dims))(leaves, mine, lengths)
            return *outputs, *torch.autograd.grad(loss(outputs), [mine, *leaves.values()])

        close(results(ours), results(plain))

    def test_nested(self, name, engine):
        """Weights by the outer map, inputs by the inner one."""
        ours, plain = pair(name, engine, bidirectional=True)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x = draw(engine, 3, 6, 4, 3)

        def results(layer):
            leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
            inner = vmap(lambda w, x: tuple(call(layer, w, x)), (None, 0))
            outputs = vmap(inner, (0, None))(leaves, x)
            return *outputs, *torch.autograd.grad(loss(outputs), list(leaves.values()))

        close(results(ours), results(plain))

    def test_gradients_inside(self, name, engine):
        ours, plain = pair(name, engine, num_layers=2)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x, lengths = draw(engine, 2, 6, 4, 3), draw_lengths(engine, 6, 2, 4)

        def results(layer):
            return vmap(grad(lambda *args: loss(call(layer, *args)), argnums=(0, 1)))(weights, x, lengths)

        close(results(ours), results(plain))

    def test_per_sample_gradients(self, name, engine):
        layer = make(name, engine, bidirectional=True)
        x = draw(engine, 6, 4, 3)
        weights = weights_of(layer)
        together = vmap(grad(lambda w, x: loss(call(layer, w, x[:, None]))), (None, 1))(weights, x)
        alone = [torch.autograd.grad(loss(call(layer, {}, x[:, [b]])), list(layer.parameters())) for b in range(4)]
        close(list(together.values()), [torch.stack(of_weight) for of_weight in zip(*alone, strict=True)])

    def test_without_gradients_nothing_is_kept(self, engine, spy):
        layers = [make("DMU", engine) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        with torch.no_grad():
            vmap(lambda w, x: tuple(call(layers[0], w, x)))(weights, draw(engine, 3, 6, 4, 3))
        assert spy.traces == [0]


class TestDerivatives:
    def test_second_by_autograd(self, name, engine):
        ours, plain = pair(name, engine, bidirectional=True)
        x, lengths = draw(engine, 5, 3, 3), draw_lengths(engine, 5, 3)

        def results(layer):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            first = torch.autograd.grad(loss(call(layer, {}, leaves[0], lengths)), leaves, create_graph=True)
            return *first, *torch.autograd.grad(loss(first), leaves)

        close(results(ours), results(plain))

    def test_second_of_the_final_state_alone(self, name, engine):
        ours, plain = pair(name, engine)
        x = draw(engine, 5, 3, 3)

        def results(layer):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            first = torch.autograd.grad(loss(call(layer, {}, leaves[0])[1:]), leaves, create_graph=True)
            return *first, *torch.autograd.grad(loss(first), leaves)

        close(results(ours), results(plain))

    def test_third(self, engine):
        ours, plain = pair("DMU", engine)
        x = draw(engine, 4, 2, 3)

        def result(layer):
            leaf = x.clone().requires_grad_()
            value = loss(call(layer, {}, leaf))
            for _ in range(3):
                (value,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
            return value

        close(result(ours), result(plain))

    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_jacobians(self, name, engine, recompute):
        """Many gradients of one forward pass."""
        ours, plain = pair(name, engine, recompute=recompute)
        weights, x, lengths = weights_of(ours), draw(engine, 5, 2, 3), draw_lengths(engine, 5, 2)

        def of(layer):
            return lambda w, x: call(layer, w, x, lengths)[0]

        close(jacrev(of(ours), (0, 1))(weights, x), jacrev(of(plain), (0, 1))(weights, x))

    def test_jacobians_inside_and_outside_of_other_transforms(self, engine):
        ours, plain = pair("DMU", engine)
        weights, x = weights_of(ours), draw(engine, 2, 4, 2, 3)

        def results(layer):
            def y(w, x):
                return call(layer, w, x)[0]

            return (
                vmap(jacrev(y, 1), (None, 0))(weights, x),
                jacrev(vmap(y, (None, 0)))(weights, x),
                jacrev(grad(lambda w, x: loss([y(w, x)])))(weights, x[0]),
                grad(lambda w, x: jacrev(y, 1)(w, x).square().sum())(weights, x[0]),
            )

        close(results(ours), results(plain))

    @pytest.mark.parametrize("asked", [True, False], ids=["with gradients", "without"])
    def test_tensors_that_have_left_a_transform_are_read_all_the_same(self, name, engine, asked):
        layer, left = make(name, engine), []

        def keeps(x: Tensor) -> Tensor:
            left.append(2 * x)
            return x.sum()

        given = draw(engine, 6, 4, 3), draw(engine, 1, 4, 5)
        for t in given:
            grad(keeps)(t)
        assert all(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in left)
        with torch.set_grad_enabled(asked):
            results = [layer(x, (h, h) if name == "LSTM" else h) for x, h in (left, [2 * t for t in given])]
        close(*results)

    def test_forward_mode_is_plain_or_refused(self, name, engine):
        automatic, plain = pair(name, engine)
        named = make(name, engine)
        automatic.engine = "auto"
        weights, x = weights_of(automatic), draw(engine, 3, 2, 3)

        def of(layer):
            return lambda x: loss(call(layer, weights, x))

        close(jvp(of(automatic), (x,), (x,)), jvp(of(plain), (x,), (x,)))
        close(hessian(of(automatic))(x), hessian(of(plain))(x))
        for derivative in (lambda: jvp(of(named), (x,), (x,)), lambda: hessian(of(named))(x)):
            with pytest.raises(
                RuntimeError, match=f"engine='{engine}' cannot be used here: only .* forward-mode .*engine='plain'"
            ):
                derivative()


def operands(engine: str, cell: str, recompute: bool, runs: tuple[int, ...] = ()) -> tuple:
    """Arguments of the operator for a small layer of a cell, with a width at which the CPU engine pads its records."""
    rec = Recurrence(cell, "tanh", reverse=recompute)
    layer = make({key.lower(): key for key in LAYERS}[cell], engine, 3, 40)
    weights = [w.detach().expand(*runs, *w.shape).clone().requires_grad_() for w in layer.parameters()]
    x, lengths = draw(engine, *runs, 9, 4, 3).requires_grad_(), draw_lengths(engine, 7, *runs, 4)
    state = [draw(engine, *runs, 4, 40).requires_grad_() for _ in range(rec.states)]
    return x, state, weights, *Sequences(lengths), *rec, engine, recompute, True


class TestOperators:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    @pytest.mark.parametrize("cell", CELLS)
    def test_are_registered_as_torch_wants_them(self, cell, engine, recompute):
        args = operands(engine, cell, recompute, (2,) if cell == "gru" else ())
        torch.library.opcheck(fused.scan_op, args)
        with torch.no_grad():
            y, *final, trace = fused.scan_op(*args)
        x, state, weights, *rest, _ = args
        sequences, spec = rest[: fused.OF_SEQUENCES], rest[fused.OF_SEQUENCES :]
        needs = [True] * (1 + len(state) + len(weights))
        grads = torch.randn_like(y), [torch.randn_like(f) for f in final]
        args = (*grads, x, state, weights, *sequences, None if recompute else y, trace, *spec, needs)
        args = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, args)
        torch.library.opcheck(fused.scan_backward_op, args)

    def test_a_call_traced_without_gradients_has_them_all_the_same(self, engine):
        *args, _ = operands(engine, "dmu", False)
        x, state, weights, *_ = args
        grads = [
            torch.autograd.grad(fused.scan_op(*args, save)[0].sin().sum(), [x, *state, *weights])
            for save in (True, False)
        ]
        close(grads[1], grads[0])

    def test_second_derivatives_of_the_bare_operator_are_refused(self, engine):
        args = operands(engine, "dmu", False)
        (first,) = torch.autograd.grad(fused.scan_op(*args)[0].sin().sum(), args[0], create_graph=True)
        with pytest.raises(RuntimeError, match="autograd"):
            first.sum().backward()

    def test_shapes_are_known_without_data(self, name, engine):
        layer = make(name, engine, num_layers=2, bidirectional=True)
        x = draw(engine, 6, 4, 3)
        mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            y, state = layer(mode.from_tensor(x))
            y.sum().backward()
        expected, expected_state = layer(x)
        assert isinstance(y, torch._subclasses.FakeTensor)
        for fake, real in zip([y, *tensors(state)], [expected, *tensors(expected_state)], strict=True):
            assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


SIZES = ((9, 4), (7, 6), (12, 17), (2, 11))  # steps, batch; none is a width, which torch would take for the same symbol


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(error_on_recompile=True):
            yield
        torch._dynamo.reset()

    def check(self, layer, compiled, x, **options):
        results = []
        for run in (compiled, layer):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            y, state = run(leaves[0], **options)
            outputs = [y, *tensors(state)]
            results.append([*outputs, *torch.autograd.grad(loss(outputs), leaves)])
        close(*results)

    def test_once_for_all_lengths_and_batches(self, name, engine):
        layer = make(name, engine, num_layers=2, bidirectional=True)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for steps, batch in SIZES:
            self.check(layer, compiled, draw(engine, steps, batch, 3))

    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_padded_batches(self, engine, recompute):
        layer = make("DMU", engine, bidirectional=True, batch_first=True, recompute=recompute)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for steps, batch in SIZES:
            lengths = draw_lengths(engine, steps, batch)
            self.check(layer, compiled, draw(engine, batch, steps, 3), lengths=lengths)

    def test_without_gradients(self, engine, spy):
        layer = make("LSTM", engine)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        x = draw(engine, 6, 4, 3)
        with torch.no_grad():
            close(compiled(x), layer(x))
        assert spy.traces == [0, 0]

    def test_frozen_weights(self, engine, spy):
        layer = make("DMU", engine)
        layer.weight_ih_l0.requires_grad_(False)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        compiled(draw(engine, 6, 4, 3))[0].sum().backward()
        assert spy.needs == [[False, False, False, *([True] * (len(list(layer.parameters())) - 1))]]

    def test_runs_side_by_side(self, engine):
        layers = [make("DMU", engine) for _ in range(2)]
        weights, _ = stack_module_state(layers)

        def run(weights, x):
            return vmap(lambda w, x: tuple(call(layers[0], w, x)))(weights, x)

        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        x = draw(engine, 2, 6, 4, 3)
        grads = [torch.autograd.grad(loss(f(weights, x)), list(weights.values())) for f in (compiled, run)]
        close(*grads)

    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    @pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor's own
    def test_with_the_default_backend(self, engine):
        layer = make("DMU", engine)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for steps, batch in SIZES[:2]:
            self.check(layer, compiled, draw(engine, steps, batch, 3))

    def test_exported_with_dynamic_length_and_batch(self, name, engine):
        layer = make(name, engine, num_layers=2, bidirectional=True)
        steps, batch = torch.export.Dim("steps", min=2), torch.export.Dim("batch", min=2)
        lengths = draw_lengths(engine, 6, 4)
        shapes = {"input": {0: steps, 1: batch}, "lengths": {0: batch}}
        exported = torch.export.export(
            layer, (draw(engine, 6, 4, 3),), {"lengths": lengths}, dynamic_shapes=shapes
        ).module()
        x, lengths = draw(engine, 11, 7, 3), draw_lengths(engine, 11, 7)
        close(exported(x, lengths=lengths), layer(x, lengths=lengths))


def kept_bytes(run) -> int:
    """Bytes that the graph of ``run`` keeps for the backward pass, each piece of memory counted once."""
    kept = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = run()
    assert all(o.requires_grad for o in outputs)
    return sum(kept.values())


class TestMemory:
    @pytest.mark.parametrize("steps", [1, 5, 16, 21])
    def test_recomputed_equals_kept(self, name, engine, steps):
        layer = make(name, engine, num_layers=2, bidirectional=True)
        x, lengths = draw(engine, steps, 4, 3), draw_lengths(engine, steps, 4)
        results = []
        for layer.recompute in (False, True):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            outputs = call(layer, {}, leaves[0], lengths)
            results.append([*outputs, *torch.autograd.grad(loss(outputs), leaves)])
        close(*results)

    @pytest.mark.parametrize("name", ["DMU", "RHN"])
    def test_recomputation_keeps_a_third_of_what_the_plain_engine_does(self, name, engine):
        depth = {"transition": [24] * 9} if name == "DMU" else {"depth": 10}
        x = draw(engine, 200, 16, 3)
        kept = {}
        for key, options in {
            "plain": {"engine": "plain"},
            "fused": {"engine": engine},
            "recomputed": {"engine": engine, "recompute": True},
        }.items():
            layer = LAYERS[name](3, 24, device=x.device, dtype=x.dtype, **depth, **options)
            kept[key] = kept_bytes(lambda: call(layer, {}, x))
        assert kept["recomputed"] < kept["fused"] / 4 < kept["plain"]
        assert kept["recomputed"] < kept["plain"] / 3

    def test_nothing_is_kept_without_gradients(self, name, engine, spy):
        layer, x = make(name, engine), draw(engine, 6, 4, 3)
        with torch.no_grad():
            layer(x)
        layer.requires_grad_(False)
        layer(x)
        assert spy.saves == [False, False]
        assert spy.traces == [0, 0]

    def test_gradients_only_for_what_asks(self, name, engine, spy):
        layer, x = make(name, engine), draw(engine, 6, 4, 3)
        first, *others = layer.parameters()
        first.requires_grad_(False)
        layer(x)[0].sum().backward()
        states = 2 if name == "LSTM" else 1
        assert spy.needs == [[False, *([False] * states), False, *([True] * len(others))]]
        assert first.grad is None
        for other in others:
            other.requires_grad_(False)
        layer(x.requires_grad_())[0].sum().backward()
        assert spy.needs[1] == [True, *([False] * (states + 1 + len(others)))]
        assert x.grad is not None

    def test_the_gradient_of_the_state_flows_through_pieces_nobody_asks_about(self, engine):
        """Recomputed, a layer hands the state's gradient from piece to piece even if h0 needs none."""
        ours, plain = pair("DMU", engine, recompute=True)
        x = draw(engine, 20, 4, 3)
        results = [torch.autograd.grad(r(x)[1].sum(), list(r.parameters())) for r in (ours, plain)]
        close(*results)

    def test_pieces_have_no_weight_gradients_to_add_where_all_are_frozen(self, engine):
        ours, plain = pair("DMU", engine, recompute=True)
        x = draw(engine, 20, 4, 3).requires_grad_()
        results = [torch.autograd.grad(layer.requires_grad_(False)(x)[0].sum(), x) for layer in (ours, plain)]
        close(*results)


class TestAutocast:
    def test_half_the_bits_by_an_engine_that_knows_them(self, name, engine):
        device = DEVICES[engine]
        layer, plain = (LAYERS[name](3, 5, engine=e, device=device, **OWN.get(name, {})) for e in ("auto", "plain"))
        plain.load_state_dict(randomise(layer).state_dict())
        x = draw(engine, 6, 4, 3).float()
        results = []
        for run in (layer, plain):
            with torch.autocast(device, torch.bfloat16):
                y, _ = run(x)
            assert y.dtype is torch.bfloat16
            grads = torch.autograd.grad(y.float().sum(), list(run.parameters()))
            assert all(g.dtype is torch.float32 for g in grads)
            results.append([y.float(), *grads])
        for a, e in zip(*results, strict=True):
            size = e.abs().max().clamp(min=1)
            assert_close(a.detach() / size, e.detach() / size, torch.bfloat16)
