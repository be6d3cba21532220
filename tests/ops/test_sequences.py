"""Resets, masks and residual transitions on every fused engine, by each of the ways that lead to it."""

from contextlib import nullcontext

import pytest
import torch
from fused_engines import DEVICES, DTYPES, Reference, close, draw, loss, make, on_engines
from layers import tensors
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from deepmemory.ops import CELLS, Recurrence, Sequences, Zeros, engines, fused, scan

OF_A_DMU = {"activation": "gelu", "residual": True, "transition": [6, 6, 6]}
OF_A_TRANSITION = ("hidden_mask", "residual")
# What a call may have beside lengths, alone and together.
ASKED = {
    "resets": ("resets",),
    "state_mask": ("state_mask",),
    "hidden_mask": ("hidden_mask",),
    "residual": ("residual",),
    "all": ("resets", "state_mask", "hidden_mask", "residual"),
}


@pytest.fixture(params=on_engines(["reference", *engines.FUSED]))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every fused engine, and one without kernels."""
    name = request.param
    if name == "reference":
        monkeypatch.setitem(engines.FUSED, name, Reference())
        monkeypatch.setattr(engines, "NAMES", (*engines.NAMES, name))
    return name


def draw_weights(engine: str, rec: Recurrence, m: int, d: int, hidden: list[int], *runs: int) -> list[Tensor]:
    """As ``Recurrence`` lays them out."""
    rows = {"rnn": d, "gru": 3 * d, "lstm": 4 * d}.get(rec.cell)
    if rows is not None:
        shapes = [(rows, m), (rows, d), (rows,), (rows,)]
    else:
        outputs = [*hidden, 2 * d] if rec.cell == "dmu" else [2 * d] * (1 + len(hidden))
        inputs = hidden if rec.cell == "dmu" else [d] * len(hidden)
        shapes = [(outputs[0], m), (outputs[0], d), (outputs[0],)]
        for rows, columns in zip(outputs[1:], inputs, strict=True):
            shapes += [(rows, columns), (rows,)]
    if not rec.bias:
        shapes = [shape for shape in shapes if len(shape) == 2]
    return [draw(engine, *runs, *shape) / (shape[-1] ** 0.5 if len(shape) == 2 else 2) for shape in shapes]


def draw_sequences(
    engine: str, asked: tuple[str, ...], steps: int, batch: int, d: int, hidden: list[int], *runs: int
) -> Sequences:
    """Lengths, and what is asked for of the rest."""
    device, shape = DEVICES[engine], (*runs, batch)

    def mask(width: int) -> Tensor:
        return 2.0 * (draw(engine, *shape, width) > 0)

    lengths = torch.randint(0, steps + 1, shape, device=device)
    real = torch.arange(steps, device=device)[:, None] < lengths[..., None, :]
    resets = (torch.rand(*runs, steps, batch, device=device) < 0.3) & real
    drawn = Sequences(lengths, resets, mask(d).to(DTYPES[engine]), mask(sum(hidden)).to(DTYPES[engine]))
    return drawn._replace(**{key: None for key in drawn._fields[1:] if key not in asked})


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    ("cell", "asked"),
    [(cell, asked) for cell in CELLS for asked in ASKED if cell == "dmu" or asked not in OF_A_TRANSITION],
)
@pytest.mark.parametrize("d", [5, 37])
def test_equals_the_definition(engine, cell, asked, reverse, recompute, d):
    names = tuple(name for name in ASKED[asked] if cell == "dmu" or name not in OF_A_TRANSITION)
    hidden = [d + 1] * 3
    rec = Recurrence(cell, "leaky_relu" if cell == "dmu" else "tanh", reverse=reverse, residual="residual" in names)
    x, state = draw(engine, 11, 7, 3), tuple(draw(engine, 7, d) for _ in range(rec.states))
    weights = draw_weights(engine, rec, 3, d, hidden)
    sequences = draw_sequences(engine, names, 11, 7, d, hidden)

    def results(**options):
        leaves = [t.clone().requires_grad_() for t in (x, *state, *weights)]
        n = 1 + rec.states
        y, final = scan(rec, leaves[0], tuple(leaves[1:n]), leaves[n:], sequences, **options)
        outputs = [y, *final]
        return [*outputs, *torch.autograd.grad(loss(outputs), leaves)]

    close(results(engine=engine, recompute=recompute), results(engine="plain"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("cell", CELLS)
def test_without_a_state_it_begins_with_zeros(engine, cell, reverse, recompute):
    rec, hidden = Recurrence(cell, "tanh", reverse=reverse), [6, 6]
    x, weights = draw(engine, 11, 7, 3), draw_weights(engine, rec, 3, 5, hidden)
    zeros = tuple(torch.zeros_like(draw(engine, 7, 5)) for _ in range(rec.states))
    sequences = draw_sequences(engine, ("resets",), 11, 7, 5, hidden)

    def results(state):
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        y, final = scan(rec, leaves[0], state, leaves[1:], sequences, engine=engine, recompute=recompute)
        first = torch.autograd.grad(loss([y, *final]), leaves, create_graph=True)
        second = torch.autograd.grad(loss(first), leaves)
        return [y, *final, *first, *second]

    for found, expected in zip(results(Zeros((5,) * rec.states)), results(zeros), strict=True):
        assert torch.equal(found, expected)


class Subclass(torch.nn.Parameter):
    """Its calls go through the operators, which have no second derivative."""


@pytest.mark.parametrize(("weight", "twice"), [(torch.nn.Parameter, True), (Subclass, False)])
def test_hooks_of_saved_tensors_may_look_at_all_of_them(engine, weight, twice):
    rec = Recurrence("lstm")
    x, weights = draw(engine, 6, 4, 3).requires_grad_(), draw_weights(engine, rec, 3, 5, [])

    def looked_at(t):
        return t.device, t.detach().cpu().numpy().copy()

    def given_back(saved):
        return torch.from_numpy(saved[1]).to(saved[0])

    def results(hooks):
        leaves = [weight(w) for w in weights]
        with hooks:
            y, _ = scan(rec, x, Zeros((5, 5)), leaves, engine=engine)
            first = torch.autograd.grad(y.sin().sum(), [x, *leaves], create_graph=twice)
        return [*first, *(torch.autograd.grad(first[0].square().sum(), leaves) if twice else ())]

    found = results(torch.autograd.graph.saved_tensors_hooks(looked_at, given_back))
    for ours, theirs in zip(found, results(nullcontext()), strict=True):
        assert torch.equal(ours, theirs)


def case(name: str, engine: str, **options):
    """A layer that drops, resets and adds, on an engine; the same on the plain one; and arguments of a call."""
    own = OF_A_DMU | {"transition_dropout": 0.5} if name == "DMU" else {}
    ours, plain = (make(name, engine, bidirectional=True, recurrent_dropout=0.5, **own, **options) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    plain.engine = "plain"
    return ours, plain


def arguments(layer, engine: str, steps: int = 6, batch: int = 4, runs: int | None = None) -> dict:
    """lengths, resets and masks of a call, or of several runs."""
    front = () if runs is None else (runs,)
    device = DEVICES[engine]
    masks = [layer.draw_masks(batch) for _ in range(runs or 1)]
    return {
        "lengths": torch.randint(0, steps + 1, (*front, batch), device=device),
        "resets": torch.rand(*front, steps, batch, device=device) < 0.3,
        "masks": masks[0] if runs is None else {key: torch.stack([of[key] for of in masks]) for key in masks[0]},
    }


def call(layer, weights, x: Tensor, options: dict) -> list[Tensor]:
    y, state = functional_call(layer, weights, (x,), options)
    return [y, *tensors(state)]


def weights_of(layer) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in layer.named_parameters()}


class TestRunsSideBySide:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_each_with_its_own(self, name, engine, recompute):
        ours, plain = case(name, engine, recompute=recompute)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x, options = draw(engine, 2, 6, 4, 3), arguments(ours, engine, runs=2)

        def results(layer):
            leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
            mine = x.clone().requires_grad_()
            outputs = vmap(lambda *args: tuple(call(layer, *args)))(leaves, mine, options)
            return *outputs, *torch.autograd.grad(loss(outputs), [mine, *leaves.values()])

        close(results(ours), results(plain))

    @pytest.mark.parametrize("own", ["weights", "input", "lengths", "resets", "masks"])
    def test_what_runs_share_need_not_be_copied(self, engine, own):
        """Only one thing differs from run to run."""
        ours, plain = case("DMU", engine)
        weights, x, options = weights_of(ours), draw(engine, 6, 4, 3), arguments(ours, engine)
        of_weights, of_x, of_options = None, None, dict.fromkeys(options)
        if own == "weights":
            weights, of_weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights.items()}, 0
        elif own == "input":
            x, of_x = draw(engine, 2, 6, 4, 3), 0
        else:
            options[own], of_options[own] = arguments(ours, engine, runs=2)[own], 0

        def results(layer):
            leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
            in_dims = of_weights, of_x, of_options
            outputs = vmap(lambda *args: tuple(call(layer, *args)), in_dims)(leaves, x, options)
            return *outputs, *torch.autograd.grad(loss(outputs), list(leaves.values()))

        close(results(ours), results(plain))

    def test_nested(self, engine):
        """Weights by the outer map; inputs, resets and masks by the inner one."""
        ours, plain = case("DMU", engine)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x, options = draw(engine, 3, 6, 4, 3), arguments(ours, engine, runs=3)

        def results(layer):
            leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
            inner = vmap(lambda *args: tuple(call(layer, *args)), (None, 0, 0))
            outputs = vmap(inner, (0, None, None))(leaves, x, options)
            return *outputs, *torch.autograd.grad(loss(outputs), list(leaves.values()))

        close(results(ours), results(plain))

    def test_gradients_inside(self, name, engine):
        ours, plain = case(name, engine)
        weights = {key: torch.stack([value, 0.5 * value]) for key, value in weights_of(ours).items()}
        x, options = draw(engine, 2, 6, 4, 3), arguments(ours, engine, runs=2)

        def results(layer):
            return vmap(grad(lambda *args: loss(call(layer, *args)), argnums=(0, 1)))(weights, x, options)

        close(results(ours), results(plain))


class TestDerivatives:
    def test_second(self, name, engine):
        ours, plain = case(name, engine)
        x, options = draw(engine, 5, 3, 3), arguments(ours, engine, 5, 3)

        def results(layer):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            first = torch.autograd.grad(loss(call(layer, {}, leaves[0], options)), leaves, create_graph=True)
            return *first, *torch.autograd.grad(loss(first), leaves)

        close(results(ours), results(plain))

    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_jacobians(self, engine, recompute):
        """Many gradients of one forward pass."""
        ours, plain = case("DMU", engine, recompute=recompute)
        weights, x, options = weights_of(ours), draw(engine, 5, 2, 3), arguments(ours, engine, 5, 2)

        def of(layer):
            return lambda w, x: call(layer, w, x, options)[0]

        close(jacrev(of(ours), (0, 1))(weights, x), jacrev(of(plain), (0, 1))(weights, x))

    def test_of_an_output_that_was_changed(self, engine):
        ours, plain = case("DMU", engine)
        x, options = draw(engine, 5, 2, 3), arguments(ours, engine, 5, 2)

        def results(layer):
            y, _ = layer(x, **options)
            y.mul_(2)
            return torch.autograd.grad(y.sin().sum(), list(layer.parameters()))

        close(results(ours), results(plain))

    def test_of_a_mask_are_refused(self, engine):
        rec = Recurrence("gru")
        x, h, mask = draw(engine, 4, 2, 3), draw(engine, 2, 5), draw(engine, 2, 5).requires_grad_()
        for name in ("plain", engine):
            with pytest.raises(RuntimeError, match=r"GRU: masks are constants.* pass mask.detach\(\)"):
                scan(rec, x, (h,), draw_weights(engine, rec, 3, 5, []), Sequences(state_mask=mask), engine=name)


class TestOperators:
    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    @pytest.mark.parametrize("runs", [(), (2,)], ids=["one", "runs"])
    def test_are_registered_as_torch_wants_them(self, engine, recompute, runs):
        hidden = [40, 40]
        rec = Recurrence("dmu", "tanh", reverse=recompute, residual=True, masked=True)
        weights = [w.requires_grad_() for w in draw_weights(engine, rec, 3, 40, hidden, *runs)]
        x, state = draw(engine, *runs, 9, 4, 3).requires_grad_(), [draw(engine, *runs, 4, 40).requires_grad_()]
        sequences = draw_sequences(engine, ASKED["all"], 9, 4, 40, hidden, *runs)
        spec = *rec, engine, recompute
        torch.library.opcheck(fused.scan_op, (x, state, weights, *sequences, *spec, True))
        with torch.no_grad():
            y, *final, trace = fused.scan_op(x, state, weights, *sequences, *spec, True)
        grads, needs = (torch.randn_like(y), [torch.randn_like(f) for f in final]), [True] * (2 + len(weights))
        args = (*grads, x, state, weights, *sequences, None if recompute else y, trace, *spec, needs)
        torch.library.opcheck(fused.scan_backward_op, torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, args))

    def test_compiled_once_for_all_lengths_and_batches(self, engine):
        torch._dynamo.reset()
        layer, _ = case("DMU", engine)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for steps, batch in ((9, 4), (7, 11), (12, 17)):  # no size is a width, which torch would take for the same
                x, options = draw(engine, steps, batch, 3), arguments(layer, engine, steps, batch)
                results = []
                for run in (compiled, layer):
                    y, state = run(x, **options)
                    results.append([y, state, *torch.autograd.grad(loss([y, state]), list(layer.parameters()))])
                close(*results)

    def test_masks_that_are_drawn_inside_a_compiled_graph(self, engine):
        torch._dynamo.reset()
        layer, _ = case("DMU", engine)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = draw(engine, 6, 4, 3)
        found = []
        for run in (compiled, layer):
            torch.manual_seed(3)
            y, state = run(x)
            found.append([y, state, *torch.autograd.grad(loss([y, state]), list(layer.parameters()))])
        close(*found)


WRONG = {
    "resets of another length": lambda s: {"resets": s.resets[1:]},
    "resets of another batch": lambda s: {"resets": s.resets[:, 1:]},
    "resets as numbers": lambda s: {"resets": s.resets.long()},
    "a state mask of another width": lambda s: {"state_mask": s.state_mask[:, 1:]},
    "a state mask for all": lambda s: {"state_mask": s.state_mask[0]},
    "a state mask of another precision": lambda s: {"state_mask": s.state_mask.half()},
    "a state mask elsewhere": lambda s: {"state_mask": s.state_mask.to("meta")},
    "a hidden mask of another width": lambda s: {"hidden_mask": s.hidden_mask[:, :-1]},
    "a hidden mask of another precision": lambda s: {"hidden_mask": s.hidden_mask.half()},
    "no hidden mask": lambda s: {"hidden_mask": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_gate_lets_nothing_else_through(engine, wrong):
    rec, hidden = Recurrence("dmu", masked=True), [6, 7]
    x, h, weights = draw(engine, 5, 4, 3), draw(engine, 4, 5), draw_weights(engine, rec, 3, 5, hidden)
    right = draw_sequences(engine, ASKED["all"], 5, 4, 5, hidden)
    y, final, trace = fused.run_forward(rec, engine, False, True, x, [h], weights, right)
    given = right._replace(**WRONG[wrong](right))
    needs = [True] * (2 + len(weights))
    with pytest.raises(RuntimeError, match=r"^DMU: "):
        fused.run_forward(rec, engine, False, True, x, [h], weights, given)
    with pytest.raises(RuntimeError, match=r"^DMU: "):
        fused.run_backward(rec, engine, False, y, [final], x, [h], weights, given, y, trace, needs)


def test_the_gate_knows_which_layers_add(engine):
    x, h = draw(engine, 5, 4, 3), draw(engine, 4, 5)
    rec = Recurrence("dmu", residual=True)
    with pytest.raises(RuntimeError, match=r"^DMU: residual needs hidden layers of equal width, got \[6, 7\]"):
        scan(rec, x, (h,), draw_weights(engine, rec, 3, 5, [6, 7]), engine=engine)
    rec = Recurrence("gru", residual=True)
    with pytest.raises(RuntimeError, match=r"^GRU: residual .* dmu"):
        scan(rec, x, (h,), draw_weights(engine, rec, 3, 5, []), engine=engine)
