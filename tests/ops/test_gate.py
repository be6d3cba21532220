"""Nothing gets to a fused engine that it would misread: wrong shapes, freed memory, views whose values lie elsewhere.

Engines read addresses, so what torch's own operators refuse or resolve has to be refused or resolved before them.
"""

import io

import numpy as np
import pytest
import torch
from fused_engines import DEVICES, close, draw, loss, make, missing, pair
from layers import tensors
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, stack_module_state, vmap

import deepmemory as dm
from deepmemory import ops
from deepmemory.ops import Recurrence, Sequences, engines, fused


def negative_view(t: Tensor) -> Tensor:
    """The values of t, of which memory holds the negative."""
    view = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert view.is_neg()
    return view


def grads_of(outputs: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(outputs), leaves)


def weight_names(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]


class TestShapes:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    @pytest.mark.parametrize("bias", [False, True], ids=["bare", "biased"])
    def test_every_weight_must_have_its_own(self, name, engine, bias, recompute):
        layer, x = make(name, engine, bias=bias, recompute=recompute), draw(engine, 6, 4, 3)
        for weight, value in layer.named_parameters():
            wrong = [value.new_zeros(1, 1), value[:-1], value.new_zeros(()), torch.cat([value, value])]
            for given in wrong:
                with pytest.raises(RuntimeError, match=rf"{name}: \w+ has the shape \(.*\), expected \("):
                    functional_call(layer, {weight: given}, (x,))

    def test_the_message_names_weight_and_shapes(self, engine):
        layer, x = make("GRU", engine), draw(engine, 10, 16, 3)
        with pytest.raises(RuntimeError, match=r"GRU: weight_hh has the shape \(1, 1\), expected \(15, 5\)"):
            functional_call(layer, {"weight_hh_l0": x.new_zeros(1, 1)}, (x,))
        layer = make("DMU", engine)
        with pytest.raises(RuntimeError, match=r"DMU: bias_3 has the shape \(4,\), expected \(10,\)"):
            functional_call(layer, {"bias_3_l0": x.new_zeros(4)}, (x,))

    def test_a_weight_may_not_change_before_the_backward_pass(self, name, engine):
        for weight in weight_names(make(name, engine)):
            layer = make(name, engine)
            y, _ = layer(draw(engine, 6, 4, 3))
            parameter = getattr(layer, weight)
            parameter.data = parameter.data[:1]
            with pytest.raises(RuntimeError, match="has the shape"):
                y.sum().backward()

    def test_of_runs(self, name, engine):
        layers = [make(name, engine) for _ in range(2)]
        weights, _ = stack_module_state(layers)
        weights["weight_hh_l0"] = weights["weight_hh_l0"][:, :1]
        with pytest.raises(RuntimeError, match=r"weight_hh has the shape \(2, 1, 5\), expected \(2, "):
            vmap(lambda w, x: functional_call(layers[0], w, (x,))[0])(weights, draw(engine, 2, 6, 4, 3))

    def test_of_states_and_lengths(self, name, engine):
        layer, x = make(name, engine), draw(engine, 6, 4, 3)
        rec, weights = layer.definition.recurrence(True), list(layer.parameters())
        right = [draw(engine, 4, 5) for _ in range(rec.states)]
        for wrong in (draw(engine, 3, 5), draw(engine, 4, 6), draw(engine, 5), draw(engine, 4, 5).float().half()):
            with pytest.raises(RuntimeError, match=f"{name}: "):
                ops.scan(rec, x, (*right[:-1], wrong), weights, engine=engine)
        for wrong in (torch.ones(3), torch.ones(4), torch.ones(1, 4), torch.ones(4, dtype=torch.int32)):
            with pytest.raises(RuntimeError, match=f"{name}: lengths "):
                ops.scan(rec, x, tuple(right), weights, Sequences(wrong.to(x.device)), engine=engine)


class TestMemory:
    @pytest.mark.parametrize("left", [0, 8], ids=["freed", "cut"])
    def test_weights_whose_storage_is_gone(self, name, engine, left):
        x = draw(engine, 6, 4, 3)
        for weight in weight_names(make(name, engine)):
            layer = make(name, engine)
            y, _ = layer(x)
            getattr(layer, weight).untyped_storage().resize_(left)
            with pytest.raises(
                RuntimeError, match=rf"{name}: {weight.removesuffix('_l0')}.* reaches beyond its storage"
            ):
                y.sum().backward()
            with pytest.raises(RuntimeError, match="reaches beyond its storage"):
                layer(x)

    def test_input_state_and_gradient_whose_storage_is_gone(self, engine):
        layer = make("DMU", engine)
        for which in range(2):
            given = draw(engine, 6, 4, 3), draw(engine, 1, 4, 5)
            y, _ = layer(*given)
            given[which].untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match="reaches beyond its storage"):
                y.sum().backward()
        x = draw(engine, 6, 4, 3)
        strided = draw(engine, 6, 4, 6)[..., ::2]
        strided.untyped_storage().resize_(x.nbytes)  # room for as many elements, but not at their strides
        with pytest.raises(RuntimeError, match=r"x.* reaches beyond its storage"):
            layer(strided)
        y, _ = layer(x)
        gradient = torch.ones_like(y)
        gradient.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError):
            y.backward(gradient)

    def test_zeros_without_memory_are_zeros(self, name, engine):
        ours, plain = pair(name, engine)
        x = draw(engine, 6, 4, 3)
        weight = weight_names(ours)[1]
        zeros = torch._efficientzerotensor(getattr(ours, weight).shape, device=x.device, dtype=x.dtype)
        expected = functional_call(plain, {weight: torch.zeros_like(getattr(ours, weight))}, (x,))
        close(functional_call(ours, {weight: zeros}, (x,)), expected)
        y, _ = ours(x)
        zeros = torch._efficientzerotensor(y.shape, device=x.device, dtype=x.dtype)
        assert all((g == 0).all() for g in torch.autograd.grad(y, list(ours.parameters()), zeros))


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


HOOKS = {
    "dtype": lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t,
    "integers": lambda t: t if t.is_floating_point() else t.to(torch.int32),
    "shape": lambda t: t[:1],
    "dimensions": lambda t: t.flatten(),
    "longer": lambda t: torch.cat([t, t]),
    "freed": freed,
    "values": lambda t: torch.full_like(t, 1e18) if t.dim() == 1 and t.is_floating_point() else t,
}


class TestSavedTensors:
    """What hooks give back in the place of what was saved."""

    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    @pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "values"])
    def test_something_else_is_refused(self, name, engine, hook, recompute):
        layer = make(name, engine, recompute=recompute)
        with saved_tensors_hooks(lambda t: t, HOOKS[hook]):
            y, _ = layer(draw(engine, 6, 4, 3), lengths=[6, 1, 0, 3])
        with pytest.raises(RuntimeError, match=f"{name}: "):
            y.sum().backward()

    @pytest.mark.skipif(bool(missing("cpu")), reason="no CPU engine")
    @pytest.mark.parametrize("width", [5, 40])
    def test_a_trace_of_other_values_lays_out_no_memory(self, width):
        layer = dm.GRU(3, width, engine="cpu")
        with saved_tensors_hooks(lambda t: t, HOOKS["values"]):
            y, _ = layer(torch.randn(6, 4, 3))
        y.sum().backward()  # to wrong numbers, for which the hook is to blame
        assert layer.weight_hh_l0.grad.shape == layer.weight_hh_l0.shape

    def test_the_same_values_at_other_strides_are_taken(self, name, engine):
        layer, x = make(name, engine), draw(engine, 6, 4, 3)
        expected = grads_of([layer(x)[0]], list(layer.parameters()))
        with saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
            y, _ = layer(x)
        close(grads_of([y], list(layer.parameters())), expected)


def operands(engine: str, cell: str = "lstm") -> dict:
    layer = make(cell.upper(), engine)
    rec = layer.definition.recurrence(True)
    given = {"x": draw(engine, 6, 4, 3), "state": [draw(engine, 4, 5) for _ in range(rec.states)]}
    weights = [w.detach() for w in layer.parameters()]
    return given | {"weights": weights} | Sequences()._asdict() | rec._asdict() | {"engine": engine, "recompute": False}


WRONG = {
    "two dimensions": lambda a: {"x": a["x"][0]},
    "five dimensions": lambda a: {"x": a["x"][None, None]},
    "no state": lambda a: {"state": []},
    "one state": lambda a: {"state": a["state"][:1]},
    "state without dimensions": lambda a: {"state": [s.new_zeros(()) for s in a["state"]]},
    "states that differ": lambda a: {"state": [a["state"][0], a["state"][1][:, :1]]},
    "smaller state": lambda a: {"state": [s[:, :2] for s in a["state"]]},
    "no weights": lambda a: {"weights": []},
    "too few weights": lambda a: {"weights": a["weights"][:3]},
    "too many weights": lambda a: {"weights": [*a["weights"], *a["weights"]]},
    "other weights": lambda a: {"weights": a["weights"][::-1]},
    "weights of runs": lambda a: {"weights": [w[None] for w in a["weights"]]},
    "weights as integers": lambda a: {"weights": [w.to(torch.int64) for w in a["weights"]]},
    "half precision": lambda a: {k: v.to(torch.complex64) for k, v in a.items() if k == "x"},
    "unknown cell": lambda a: {"cell": "gruu"},
    "unknown activation": lambda a: {"activation": "sine"},
    "unknown engine": lambda a: {"engine": "gpu"},
    "no fused engine": lambda a: {"engine": "plain"},
    "residual of another cell": lambda a: {"residual": True},
    "a mask that is not there": lambda a: {"masked": True},
    "resets": lambda a: {"resets": torch.zeros(9, 4, dtype=torch.bool, device=a["x"].device)},
    "another cell": lambda a: {"cell": "gru"},
    "lengths": lambda a: {"lengths": torch.ones(9, dtype=torch.int64, device=a["x"].device)},
}


class TestOperators:
    @pytest.mark.parametrize("wrong", WRONG)
    def test_forward(self, engine, wrong):
        args = operands(engine)
        with pytest.raises(RuntimeError):
            torch.ops.deepmemory.scan(**(args | WRONG[wrong](args)), save=True)

    @pytest.mark.parametrize("wrong", WRONG)
    def test_backward_of_what_went_well(self, engine, wrong):
        args = operands(engine)
        y, h, c, trace = torch.ops.deepmemory.scan(**args, save=True)
        records = {"grad_y": y, "grad_final": [h, c], "y": y, "trace": trace, "needs": [True] * 7}
        assert len(torch.ops.deepmemory.scan_backward(**args, **records)) == 7
        with pytest.raises(RuntimeError):
            torch.ops.deepmemory.scan_backward(**(args | WRONG[wrong](args)), **records)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"grad_y": lambda t: t[:1]},
            {"grad_y": lambda t: t.half()},
            {"grad_final": lambda t: t[:1]},
            {"grad_final": lambda t: [t[0], t[1][:, :1]]},
            {"grad_final": lambda t: [*t, t[0]]},
            {"y": lambda t: None},
            {"y": lambda t: t[:, :1]},
            {"trace": lambda t: t[..., :-1]},
            {"trace": lambda t: t.new_empty(0)},
            {"needs": lambda t: t[1:]},
        ],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_records(self, engine, wrong):
        args = operands(engine)
        y, h, c, trace = torch.ops.deepmemory.scan(**args, save=True)
        records = {"grad_y": y, "grad_final": [h, c], "y": y, "trace": trace, "needs": [True] * 7}
        ((key, change),) = wrong.items()
        with pytest.raises(RuntimeError):
            torch.ops.deepmemory.scan_backward(**args, **(records | {key: change(records[key])}))

    @pytest.mark.parametrize("name", engines.FUSED)
    def test_no_engine_is_asked_before_the_gate(self, name, monkeypatch):
        """Of every engine, those included that this machine cannot run."""
        for pass_ in ("forward", "backward"):
            monkeypatch.setattr(engines.FUSED[name], pass_, lambda *_: pytest.fail("got past the gate"))
        rec, x, h0 = Recurrence("rnn"), torch.zeros(6, 4, 3), torch.zeros(4, 5)
        weights = [torch.zeros(5, 3), torch.zeros(1, 1), torch.zeros(5), torch.zeros(5)]
        with pytest.raises(RuntimeError, match="weight_hh has the shape"):
            fused.run_forward(rec, name, False, True, x, [h0], weights, Sequences())
        with pytest.raises(RuntimeError, match="weight_hh has the shape"):
            fused.run_backward(rec, name, False, x, [h0], x, [h0], weights, Sequences(), x, x, [True] * 6)


class TestNegativeViews:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_of_inputs(self, name, engine, recompute):
        ours, plain = pair(name, engine, recompute=recompute)
        states, results = 2 if name == "LSTM" else 1, []
        drawn = draw(engine, 7, 4, 3), *(draw(engine, 1, 4, 5) for _ in range(states))
        for layer, view in ((ours, negative_view), (plain, torch.clone)):
            leaves = [*(t.clone().requires_grad_() for t in drawn), *layer.parameters()]
            x, *rest = map(view, leaves)
            state = tuple(rest[:states]) if states == 2 else rest[0]
            y, final = functional_call(layer, dict(zip(weight_names(layer), rest[states:], strict=True)), (x, state))
            outputs = [y, *tensors(final)]
            results.append([*outputs, *grads_of(outputs, leaves)])
        close(*results)

    def test_of_incoming_gradients(self, name, engine):
        """Autograd hands them out after a product with a conjugate."""
        ours, plain = pair(name, engine)
        x, results = draw(engine, 7, 4, 3), []
        for layer in (ours, plain):
            y, state = layer(x)
            leaves = list(layer.parameters())
            outputs = [y, *tensors(state)]
            incoming = [negative_view(o.detach()) for o in outputs]
            given = torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)
            product = torch.complex(torch.zeros_like(y), y).conj() * torch.complex(y.detach(), y.detach())
            results.append([*given, *torch.autograd.grad(product.real.sum(), leaves)])
        close(*results)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")  # as for nn.GRU
class TestTraced:
    class Padded(nn.Module):
        """For torch.jit.trace, which does not know arguments by keyword alone."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, lengths: Tensor):
            return self.layer(x, lengths=lengths)

    @pytest.mark.parametrize("with_gradients", [False, True])
    def test_for_any_length_and_batch(self, name, engine, with_gradients):
        layer = make(name, engine, num_layers=2, bidirectional=True)
        with torch.set_grad_enabled(with_gradients):
            traced = torch.jit.trace(layer, (draw(engine, 6, 4, 3),))
        for steps, batch in ((6, 4), (9, 2), (3, 5)):
            x = draw(engine, steps, batch, 3)
            given, expected = traced(x), layer(x)
            close(given, expected)
            leaves = list(layer.parameters())
            close(*(grads_of([y, *tensors(state)], leaves) for y, state in (given, expected)))

    def test_with_lengths_and_saved(self, engine):
        layer = make("DMU", engine, batch_first=True, recompute=True)
        traced = torch.jit.trace(self.Padded(layer), (draw(engine, 4, 6, 3), torch.tensor([6, 0, 2, 5])))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        x, lengths = draw(engine, 3, 8, 3), torch.tensor([1, 8, 4])
        for run in (traced, torch.jit.load(file)):
            close(run(x, lengths), layer(x, lengths=lengths))


class TestLengths:
    @pytest.mark.parametrize("kind", [np.array, torch.tensor])
    def test_are_those_of_the_call(self, engine, kind):
        """As with a packed sequence, what happens to them later is of no importance."""
        layer, x, lengths = make("GRU", engine), draw(engine, 6, 4, 3), kind([6, 2, 0, 3])
        expected = grads_of([layer(x, lengths=[6, 2, 0, 3])[0]], list(layer.parameters()))
        y, _ = layer(x, lengths=lengths)
        lengths[:] = 1
        close(grads_of([y], list(layer.parameters())), expected)

    def compiled(self, layer, x, hx, lengths) -> list[Tensor]:
        """Outputs and gradients where values of lengths cannot be checked."""
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        y, state = compiled(x, hx, lengths=torch.tensor(lengths, device=x.device))
        outputs = [y, *tensors(state)]
        return [*outputs, *grads_of(outputs, list(layer.parameters()))]

    def test_beyond_the_sequence_mean_the_nearest_within(self, name, engine):
        layer, x = make(name, engine, bidirectional=True), draw(engine, 3, 4, 3)
        hx = [draw(engine, 2, 4, 5) for _ in range(2)]
        hx = tuple(hx) if name == "LSTM" else hx[0]
        expected = self.compiled(layer, x, hx, [0, 3, 0, 2])
        close(self.compiled(layer, x, hx, [-1, 4, -(2**40), 2]), expected)
        if name == "GRU":
            layer.engine = "plain"
            close(self.compiled(layer, x, hx, [-1, 4, -(2**40), 2]), expected)

    def test_are_checked_where_nobody_has_to_wait(self, engine):
        for lengths in ([-1, 6, 2, 3], [1, 7, 2, 3]):
            with pytest.raises(ValueError, match="lengths should lie between 0 and the number of time steps, 6"):
                make("GRU", engine)(draw(engine, 6, 4, 3), lengths=lengths)

    def test_of_runs_beyond_the_sequence(self, engine):
        ours, plain = pair("GRU", engine)
        lengths = torch.tensor([[-3, 9, 2], [6, -1, 100]], device=DEVICES[engine])
        x = draw(engine, 2, 6, 3, 3)
        close(*(vmap(lambda x, n, layer=layer: layer(x, lengths=n))(x, lengths) for layer in (ours, plain)))


class TestChangedInPlace:
    @pytest.mark.parametrize("options", [{}, {"num_layers": 2, "batch_first": True}, {"recompute": True}], ids=str)
    def test_the_output_may_be(self, name, engine, options):
        ours, plain = pair(name, engine, **options)
        x = draw(engine, 6, 4, 3).requires_grad_()
        (y, _), (expected, _) = ours(x), plain(x)
        given = grads_of([y.sub_(0.1).relu_()], [x, *ours.parameters()])
        close(given, grads_of([(expected - 0.1).relu()], [x, *plain.parameters()]))

    def test_and_differentiated_twice(self, engine):
        results = []
        for layer in pair("GRU", engine):
            x = draw(engine, 4, 2, 3).fill_(0.3).requires_grad_()
            y, _ = layer(x)
            (first,) = torch.autograd.grad(y.mul_(2).sin().sum(), x, create_graph=True)
            results.append([first, *torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])])
        close(*results)

    def test_an_input_may_not_be(self, engine):
        layer, x = make("GRU", engine), draw(engine, 6, 4, 3)
        y, _ = layer(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class TestGradientsInBatches:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_equal_the_plain_engines(self, name, engine, recompute):
        x, results = draw(engine, 5, 2, 3).requires_grad_(), []
        ours, plain = pair(name, engine, num_layers=2, bidirectional=True, recompute=recompute)
        of_y, of_state = draw(engine, 3, 5, 2, 10), draw(engine, 3, 4, 2, 5)
        for layer in (ours, plain):
            y, state = layer(x, lengths=[5, 2])
            outputs, leaves = [y, tensors(state)[-1]], [x, *layer.parameters()]
            options = {"is_grads_batched": True, "retain_graph": True}
            results.append(
                [
                    *torch.autograd.grad(outputs, leaves, [of_y, of_state], **options),
                    *torch.autograd.grad(outputs[1], leaves[:1], of_state, **options),
                ]
            )
        close(*results)

    def test_jacobians_and_hessians(self, name, engine):
        x, results = draw(engine, 2, 2, 3), []
        for layer in pair(name, engine):
            y = jacobian(lambda x, layer=layer: layer(x, lengths=[2, 1])[0], x, vectorize=True)
            results.append([y, hessian(lambda x, layer=layer: layer(x)[0].sin().sum(), x, vectorize=True)])
        close(*results)
