"""The Triton engine against the plain one in float64: outputs, final states and every gradient.

On a machine without a GPU the kernels run in Triton's interpreter. It has to be chosen before Triton is imported
and would offer the engine to every other test, so a child process runs this file then. To see each test by itself:
``TRITON_INTERPRET=1 pytest tests/ops/test_triton_engine.py``.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepmemory.ops import engines, fused, hoisted, plain, triton
from deepmemory.ops.recurrence import FULL_LENGTH, Recurrence, Sequences

ON_GPU = torch.cuda.is_available() and not triton.interpreted()
RUNS_HERE = ON_GPU or triton.interpreted()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

if not RUNS_HERE:

    @pytest.mark.parametrize("part", ["test_resets_masks_and_residuals", "not test_resets_masks_and_residuals"])
    def test_every_test_below_in_the_interpreter(part: str):
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", part, __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert child.returncode == 0, child.stdout + child.stderr


def here(test):
    why = "no GPU; a child process runs its tests in the interpreter"
    return test if RUNS_HERE else pytest.mark.missing("triton kernels", why)(test)


def gpu_only(test):
    return test if ON_GPU else pytest.mark.missing("large triton kernels", "too large for the interpreter")(test)


@dataclass(frozen=True)
class Case:
    """One layer in one direction and the size of its input."""

    cell: str
    d: int
    widths: tuple[int, ...] = ()  # of a dmu's hidden layers
    depth: int = 1  # of an rhn
    batch: int = 5
    steps: int = 7
    inputs: int = 3
    activation: str = "tanh"
    bias: bool = True
    reverse: bool = False
    lengths: bool = False
    resets: bool = False
    state_mask: bool = False
    hidden_mask: bool = False
    residual: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 0.5  # of the weights

    def __str__(self) -> str:
        depth = len(self.widths) + 1 if self.cell == "dmu" else self.depth
        choices = ("reverse", "lengths", "resets", "state_mask", "hidden_mask", "residual")
        options = [name for name in choices if getattr(self, name)]
        options += [] if self.bias else ["nobias"]
        options += [] if self.activation == "tanh" else [self.activation]
        options += [] if self.dtype == torch.float32 else [str(self.dtype).removeprefix("torch.")]
        return "-".join([self.cell, f"n{depth}", f"B{self.batch}", f"T{self.steps}", f"d{self.d}", *options])

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(self.cell, self.activation, self.bias, self.reverse, self.residual, self.hidden_mask)

    def weights(self) -> list[Tensor]:
        d, m, bias = self.d, self.inputs, self.bias
        if self.cell == "dmu":
            outputs = [*self.widths, 2 * d]
            shapes = [(outputs[0], m), (outputs[0], d), *([(outputs[0],)] if bias else [])]
            for columns, rows in pairwise(outputs):
                shapes += [(rows, columns), *([(rows,)] if bias else [])]
        elif self.cell == "rhn":
            shapes = [(2 * d, m)] + [(2 * d, d), *([(2 * d,)] if bias else [])] * self.depth
        else:
            rows = {"rnn": 1, "gru": 3, "lstm": 4}[self.cell] * d
            shapes = [(rows, m), (rows, d)] + [(rows,)] * (2 * bias)
        fan_in = [shape[-1] if len(shape) == 2 else 4 for shape in shapes]
        return [
            self.scale * 2 * (torch.rand(shape, device=DEVICE, dtype=torch.float64) - 0.5) * (12 / fan) ** 0.5
            for shape, fan in zip(shapes, fan_in, strict=True)
        ]

    def tensors(self) -> tuple[list[Tensor], Sequences]:
        """x, states and weights, representable in the case's dtype; lengths, resets and masks."""
        x = torch.randn(self.steps, self.batch, self.inputs, device=DEVICE, dtype=torch.float64)
        shape = (self.batch, self.d)
        states = [
            1.6 * torch.rand(shape, device=DEVICE, dtype=torch.float64) - 0.8 for _ in range(self.recurrence.states)
        ]
        lengths = None
        if self.lengths:
            lengths = torch.randint(0, self.steps + 1, (self.batch,), device=DEVICE)
            lengths[0] = 0
            lengths[-1] = self.steps
        tensors = [t.to(self.dtype).double() for t in (x, *states, *self.weights())]
        real = torch.full((self.steps, self.batch), True, device=DEVICE)
        if lengths is not None:
            real = torch.arange(self.steps, device=DEVICE)[:, None] < lengths
            tensors[0][~real] = float("nan")
        resets = (torch.rand(self.steps, self.batch, device=DEVICE) < 0.4) & real if self.resets else None
        return tensors, Sequences(lengths, resets, *self.masks())

    def masks(self) -> list[Tensor | None]:
        """Of the state, and of the hidden layers."""

        def draw(width: int) -> Tensor:
            return 2.0 * (torch.rand(self.batch, width, device=DEVICE, dtype=torch.float64) < 0.5)

        return [draw(self.d) if self.state_mask else None, draw(sum(self.widths)) if self.hidden_mask else None]


def results(scan, rec: Recurrence, tensors: list[Tensor], sequences: Sequences = FULL_LENGTH) -> dict[str, Tensor]:
    """Outputs of ``scan`` and the gradients of a loss that weighs each entry differently."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    n = rec.states
    lengths, resets, *masks = sequences
    fitting = Sequences(lengths, resets, *(None if mask is None else mask.to(leaves[0].dtype) for mask in masks))
    y, final = scan(rec, leaves[0], tuple(leaves[1 : 1 + n]), leaves[1 + n :], fitting)
    outputs = [y, *final]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    grads = torch.autograd.grad(loss, leaves)
    names = ["x", *(f"state {i}" for i in range(n)), *(f"weight {i}" for i in range(len(leaves) - 1 - n))]
    named = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    return named | {f"gradient of {name}": g for name, g in zip(names, grads, strict=True)}


def kernels(rec, x, state, weights, sequences=FULL_LENGTH, recompute=False):
    return fused.scan(rec, "triton", recompute, x, state, weights, sequences)


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: tuple[float, float]) -> None:
    """By the table; the absolute part is meant for entries of order one and grows with larger ones."""
    rtol, atol = tolerance
    for name, wanted in expected.items():
        size = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        torch.testing.assert_close(
            actual[name].double(), wanted, rtol=rtol, atol=atol * size, msg=lambda text, name=name: f"{name}: {text}"
        )


def check(case: Case, tolerance: tuple[float, float] | None = None) -> None:
    tensors, sequences = case.tensors()
    expected = results(plain.scan, case.recurrence, tensors, sequences)
    actual = results(kernels, case.recurrence, [t.to(case.dtype) for t in tensors], sequences)
    assert all(t.dtype == case.dtype for t in actual.values())
    assert_agree(actual, expected, tolerance or TOLERANCES[case.dtype])


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written is NaN."""
    new_empty = Tensor.new_empty

    def poisoned(self, *size, **options):
        out = new_empty(self, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoisted, "tf32_allowed", lambda: False)


@pytest.fixture(params=["usual", "small"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as they usually are, and so small that every loop over them has several turns."""
    from deepmemory.ops.triton import sweeps

    if request.param == "small":
        usual, small = sweeps.plan, {"rows": 32, "hidden": 16, "gates": 16, "inner": 16}
        monkeypatch.setattr(sweeps, "plan", lambda *args, **kw: usual(*args, **kw)._replace(**small))


SMALL = [
    Case("dmu", 20, steps=4),
    Case("dmu", 20, (33,), steps=3),
    Case("rhn", 20, steps=3),
    Case("rhn", 20, depth=2, steps=3),
    Case("rnn", 20, steps=4),
    Case("gru", 20, steps=3),
    Case("lstm", 20, steps=3),
]


@here
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_agrees_with_plain(case: Case):
    check(case)


@here
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_negative_views_and_lengths_beyond_the_sequence(reverse: bool):
    case = Case("gru", 5, steps=4, reverse=reverse)
    tensors, _ = case.tensors()
    lengths = torch.tensor([-2, 9, 3, 4, 0], device=DEVICE)

    def from_views(rec, x, state, weights, sequences):
        return kernels(rec, torch._neg_view(-x), state, [torch._neg_view(-w) for w in weights], sequences)

    expected = results(plain.scan, case.recurrence, tensors, Sequences(lengths.clamp(0, 4)))
    actual = results(from_views, case.recurrence, [t.float() for t in tensors], Sequences(lengths))
    assert_agree(actual, expected, TOLERANCES[torch.float32])


@here
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_lengths_without_bias(case: Case, reverse: bool):
    check(replace(case, d=5, widths=(7,) * len(case.widths), reverse=reverse, lengths=True, bias=False))


OF_A_DMU = ("hidden_mask", "residual")
OPTIONS = ("resets", "state_mask", *OF_A_DMU)
ASKED = {name: (name,) for name in OPTIONS} | {"all": OPTIONS}


@here
@pytest.mark.parametrize(
    ("case", "asked", "reverse", "tiles"),
    [
        (case, asked, reverse, tiles)
        for case in [Case("dmu", 20, (20, 20, 20)), *SMALL[2:]]
        for asked in ASKED
        if case.cell == "dmu" or asked not in OF_A_DMU
        for reverse in ([False, True] if asked in ("resets", "all") else [False])  # masks know no direction
        for tiles in (["usual", "small"] if asked == "all" else ["usual"])
    ],
    indirect=["tiles"],
    ids=str,
)
@pytest.mark.usefixtures("tiles")
def test_resets_masks_and_residuals(case: Case, asked: str, reverse: bool):
    options = {name: True for name in ASKED[asked] if case.cell == "dmu" or name not in OF_A_DMU}
    check(replace(case, batch=3, steps=4, reverse=reverse, lengths=True, **options))


@here
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "leaky_relu"])
def test_slopes_of_masked_and_added_layers(activation: str):
    check(Case("dmu", 6, (7, 7, 7), batch=2, steps=2, activation=activation, hidden_mask=True, residual=True))


SIZES = [
    Case("dmu", 1, (1,), batch=1, steps=1, inputs=1),
    Case("dmu", 5, (5,), batch=18, steps=2),
    Case("dmu", 20, (7, 63)),
    Case("dmu", 131, (100,), batch=17, steps=2),
    Case("dmu", 9, (12,) * 9, batch=2, steps=2, scale=0.9),
    Case("rhn", 7, depth=5, batch=2, steps=2),
    Case("rhn", 63, depth=3, batch=2, steps=2, reverse=True, lengths=True),
    Case("rnn", 63, batch=1, steps=2),
    Case("gru", 100, batch=2, steps=2),
    Case("lstm", 100, batch=2, steps=2),
]


@here
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_odd_sizes(case: Case):
    check(case)


@here
@pytest.mark.parametrize("widths", [(7,), (7, 6)], ids=["n2", "n3"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "leaky_relu"])
def test_activations(activation: str, widths: tuple[int, ...]):
    check(Case("dmu", 6, widths, batch=2, steps=2, activation=activation))


@here
def test_rnn_with_relu():
    check(Case("rnn", 6, batch=2, steps=3, activation="relu"))


@here
def test_relu_lets_gradients_through_at_nan_as_torch_does():
    case = Case("rnn", 6, batch=2, steps=3, activation="relu")
    tensors, _ = case.tensors()
    tensors[0][1, 0, 0] = float("nan")
    expected = results(plain.scan, case.recurrence, tensors)
    actual = results(kernels, case.recurrence, [t.float() for t in tensors])
    finite = {name: wanted for name, wanted in expected.items() if wanted.isfinite().all()}
    assert {"gradient of x", "gradient of weight 2", "gradient of weight 3"} <= finite.keys()
    assert_agree(actual, finite, TOLERANCES[torch.float32])


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", [SMALL[1], SMALL[3], SMALL[5], SMALL[6], Case("dmu", 9, (12,) * 3)], ids=str)
def test_half_precision(case: Case, dtype: torch.dtype):
    check(replace(case, steps=3, dtype=dtype))


@here
@pytest.mark.parametrize("cell", ["dmu", "rhn", "gru", "lstm"])
def test_saturated_gates(cell: str):
    """Gates far in their tails: float32 must not lose the gradients that pass through a closed gate."""
    case = Case(cell, 6, batch=2, steps=3)
    tensors, _ = case.tensors()
    bias = tensors[1 + case.recurrence.states + 2]
    bias += torch.where(torch.arange(len(bias), device=DEVICE) % 2 == 0, 25.0, -25.0)
    tensors = [t.float().double() for t in tensors]
    expected = results(plain.scan, case.recurrence, tensors)
    actual = results(kernels, case.recurrence, [t.float() for t in tensors])
    assert_agree(actual, expected, TOLERANCES[torch.float32])


@here
@pytest.mark.parametrize("cell", ["dmu", "gru", "lstm"])
def test_runs_side_by_side(cell: str):
    """Under vmap every run has its own weights, lengths, resets and masks, and all share x."""
    own = {"widths": (7, 7), "hidden_mask": True, "residual": True} if cell == "dmu" else {}
    case = Case(cell, 6, batch=3, steps=4, lengths=True, resets=True, state_mask=True, **own)
    rec = case.recurrence
    n = rec.states
    several = [case.tensors() for _ in range(3)]
    of_runs = zip(*(sequences for _, sequences in several), strict=True)
    sequences = Sequences(*(None if parts[0] is None else torch.stack(parts) for parts in of_runs))
    x = torch.randn_like(several[0][0][0])
    stacked = [torch.stack(parts) for parts in zip(*(tensors[1:] for tensors, _ in several), strict=True)]

    def side_by_side(rec, x, state, weights, sequences):
        given = {key: t for key, t in sequences._asdict().items() if t is not None}
        return torch.vmap(lambda s, w, own: kernels(rec, x, s, w, Sequences(**own)))(state, weights, given)

    def one_by_one(rec, x, state, weights, sequences):
        each = []
        for r in range(3):
            own = Sequences(*(None if t is None else t[r] for t in sequences))
            each.append(plain.scan(rec, x, tuple(s[r] for s in state), [w[r] for w in weights], own))
        return torch.stack([y for y, _ in each]), tuple(torch.stack([f[i] for _, f in each]) for i in range(n))

    tensors = [t.float().double() for t in (x, *stacked)]
    expected = results(one_by_one, rec, tensors, sequences)
    actual = results(side_by_side, rec, [t.float() for t in tensors], sequences)
    assert_agree(actual, expected, TOLERANCES[torch.float32])


@here
def test_only_what_is_asked_for():
    """Without a gradient of y, and with frozen weights."""
    case = Case("dmu", 5, (7,), batch=3, steps=3)
    (x, h0, *weights), _ = case.tensors()
    found = []
    for scan, dtype in ((plain.scan, torch.float64), (kernels, torch.float32)):
        x_, h_, *w = (t.to(dtype) for t in (x, h0, *weights))
        w[1].requires_grad_()
        _, (h_n,) = scan(case.recurrence, x_, (h_,), w)
        found.append(torch.autograd.grad(h_n.square().sum(), w[1])[0].double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@here
def test_recomputed_equals_kept():
    case = Case("lstm", 6, batch=3, steps=9, lengths=True, reverse=True, resets=True, state_mask=True)
    tensors, sequences = case.tensors()
    tensors = [t.float() for t in tensors]
    kept = results(kernels, case.recurrence, tensors, sequences)

    def recomputed(*args):
        return kernels(*args, recompute=True)

    again = results(recomputed, case.recurrence, tensors, sequences)
    assert_agree(again, {name: t.double() for name, t in kept.items()}, TOLERANCES[torch.float32])


@here
@pytest.mark.parametrize(
    "case",
    [
        SMALL[1],
        Case("rhn", 5, depth=3),
        Case("dmu", 5, (6, 7), activation="gelu"),
        Case("dmu", 5, (6, 6), residual=True),
    ],
    ids=str,
)
def test_shape_of_the_trace_is_known_without_data(case: Case):
    (x, h0, *weights), _ = case.tensors()
    _, _, trace = triton.forward(
        case.recurrence, x[None].float(), [h0[None].float()], [w[None].float() for w in weights], FULL_LENGTH, True
    )
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in (x[None], *weights)]
    with mode:
        assert triton.trace_shape(case.recurrence, fake[0], fake[1:]) == tuple(trace.shape)


@here
def test_no_sequences():
    case = Case("gru", 5, batch=0)
    (x, h0, *weights), _ = case.tensors()
    y, (h_n,) = kernels(case.recurrence, x.float(), (h0.float(),), [w.float() for w in weights])
    assert y.shape == (7, 0, 5)
    assert h_n.shape == (0, 5)


@here
def test_refuses_with_a_reason():
    case = Case("lstm", 5)
    (x, _, _, *weights), _ = case.tensors()
    assert "float64" in triton.refuses(case.recurrence, x, weights)
    x, weights = x.float(), [w.float() for w in weights]
    assert triton.refuses(case.recurrence, x, weights) is None
    assert "proj_size" in triton.refuses(case.recurrence, x, [*weights, weights[1][:2]])
    assert "dtype" in triton.refuses(case.recurrence, x, [w.half() for w in weights])
    assert engines.choose("triton", case.recurrence, x, weights) == "triton"
    with pytest.raises(RuntimeError, match="engine='triton' cannot be used here"):
        engines.choose("triton", case.recurrence, x.double(), weights)


def test_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in triton.unavailable()


def test_kernels_are_imported_when_first_used():
    code = "import sys, deepmemory.ops.triton; sys.exit('deepmemory.ops.triton.sweeps' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Compiled for a GPU that is not here.


class Recorder:
    """Stands for a kernel and compiles what it is launched with instead of running it."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *positional, num_warps: int, num_stages: int, enable_fp_fusion: bool, **named) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
        types[torch.bool] = "*i1"
        values = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
        signature, constants, hints = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            else:
                signature[parameter.name] = types[value.dtype] if isinstance(value, Tensor) else "i32"
                if isinstance(value, Tensor) or (not parameter.do_not_specialize and value % 16 == 0):
                    hints[(index,)] = [["tt.divisibility", 16]]
        compiled = triton.compile(
            triton.compiler.ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=hints),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion},
        )
        assert compiled.metadata.shared <= HOPPER_SHARED_MEMORY


HOPPER_SHARED_MEMORY = 227 * 1024


@pytest.mark.skipif(RUNS_HERE, reason="the kernels themselves run")
@pytest.mark.parametrize(
    "case",
    [
        Case("dmu", 5, (5,), batch=32, steps=2),
        Case("dmu", 122, (122,), batch=32, steps=2, dtype=torch.bfloat16),
        Case("dmu", 136, (136,) * 9, batch=32, steps=2, activation="gelu"),
        Case("gru", 128, batch=32, steps=2, lengths=True, reverse=True),
        Case("lstm", 64, batch=32, steps=2),
        Case("dmu", 40, (48,) * 3, batch=32, resets=True, state_mask=True, hidden_mask=True, residual=True),
        Case("rhn", 20, depth=2, reverse=True, lengths=True, resets=True, state_mask=True),
    ],
    ids=str,
)
def test_compiles_for_hopper(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path):
    pytest.importorskip("triton")
    from deepmemory.ops.triton import sweeps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sweeps, "_shared_memory", lambda _: HOPPER_SHARED_MEMORY)
    monkeypatch.setattr(sweeps, "precision", lambda t: "tf32x3" if t.dtype == torch.float32 else "tf32")
    for name in ("forward_streamed", "backward_streamed"):
        monkeypatch.setattr(sweeps, name, Recorder(getattr(sweeps, name)))
    tensors, (lengths, resets, *masks) = case.tensors()
    x, *rest = (t.to(case.dtype)[None] for t in tensors)
    state, weights = rest[: case.recurrence.states], rest[case.recurrence.states :]
    own = Sequences(lengths, resets, *(None if mask is None else mask.to(case.dtype) for mask in masks)).with_run()
    y, final, trace = triton.forward(case.recurrence, x, state, weights, own, True)
    sweeps.backward(case.recurrence, y, final, state, weights, own, y, trace)


# On a real GPU alone.

SHAPES = {
    "adding": Case("dmu", 5, (5,), batch=32, steps=105, inputs=2),
    "ptb-1": Case("dmu", 100, batch=32, steps=100, inputs=64),
    "ptb-2": Case("dmu", 122, (122,), batch=32, steps=100, inputs=64),
    "ptb-5": Case("dmu", 131, (131,) * 4, batch=32, steps=100, inputs=64),
    "ptb-10": Case("dmu", 136, (136,) * 9, batch=32, steps=100, inputs=64),
    "mnist": Case("dmu", 128, batch=128, steps=784, inputs=1),
    "mt-2": Case("dmu", 200, (340,), batch=32, steps=16, inputs=650),
    "large": Case("dmu", 512, (1024,), batch=64, steps=32, inputs=512),
    "T2000": Case("dmu", 20, (20,), batch=3, steps=2000),
    "gru-128": Case("gru", 128, batch=33, steps=50, inputs=64),
    "lstm-128": Case("lstm", 128, batch=33, steps=50, inputs=64),
    "rhn-5": Case("rhn", 100, depth=5, batch=33, steps=50, inputs=64),
    "gru-1024": Case("gru", 1024, batch=5, steps=4, inputs=8),
    "many-runs-of-rows": Case("dmu", 40, (40, 40), batch=5000, steps=3),
}


@here
@pytest.mark.parametrize("case", [SMALL[0], SMALL[-1]], ids=str)
def test_results_may_be_changed_in_place(case: Case):
    tensors, _ = case.tensors()
    x, *rest = [t.float().requires_grad_() for t in tensors]
    states = case.recurrence.states
    y, (h_n, *_) = kernels(case.recurrence, x, tuple(rest[:states]), rest[states:])
    before = h_n.detach().clone()
    h_n.mul_(2)
    torch.testing.assert_close(h_n, 2 * before)
    h_n.sum().backward()
    assert x.grad is not None
    y.detach().zero_()
    assert not y.any()


@gpu_only
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_the_benchmarks(name: str):
    check(SHAPES[name])


@gpu_only
@pytest.mark.parametrize("name", ["adding", "ptb-1", "ptb-10"])
def test_tf32_where_it_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hoisted, "tf32_allowed", lambda: True)
    check(SHAPES[name], TOLERANCES[torch.float16])


@gpu_only
@pytest.mark.parametrize("name", ["adding", "ptb-5"])
def test_captured_in_a_cuda_graph(name: str):
    case = replace(SHAPES[name], steps=11)
    tensors, _ = case.tensors()
    leaves = [t.float().requires_grad_() for t in tensors]

    def both_passes():
        y, (h_n,) = kernels(case.recurrence, leaves[0], (leaves[1],), leaves[2:])
        return [y, *torch.autograd.grad(y.square().sum() + h_n.sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = [t.detach().clone() for t in both_passes()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes()
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    for a, e in zip(captured, expected, strict=True):
        torch.testing.assert_close(a, e)


@gpu_only
def test_neither_batch_nor_length_recompiles():
    from deepmemory.ops.triton import streamed

    def compiled() -> int:
        return sum(len(caches[0]) for caches in streamed.forward_streamed.device_caches.values())

    for batch, steps in ((3, 4), (16, 16), (1, 1), (33, 7)):
        check(replace(SMALL[0], batch=batch, steps=steps))
        if batch == 3:
            once = compiled()
    assert compiled() == once


@gpu_only
def test_more_than_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch):
    """The last sequence of a huge batch gives what it gives alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free memory")
    case = Case("rnn", 16, batch=2048, steps=70_000, inputs=1, dtype=torch.bfloat16)
    rec, weights = case.recurrence, [w.bfloat16() for w in case.weights()]
    x = torch.randn(case.steps, case.batch, 1, device=DEVICE, dtype=torch.bfloat16)
    h0 = torch.zeros(case.batch, 16, device=DEVICE, dtype=torch.bfloat16)
    y, (h_n,) = kernels(rec, x, (h0,), weights)
    alone, (h_alone,) = kernels(rec, x[:, -1:].contiguous(), (h0[-1:],), weights)
    assert y.numel() > 2**31
    torch.testing.assert_close(h_n[-1:], h_alone)
    torch.testing.assert_close(y[-100:, -1:], alone[-100:])
