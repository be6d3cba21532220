"""The run-time compiled engine: on a GPU as it is, elsewhere its CUDA source emulated thread by thread on the CPU."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ops.hopper import HOPPER
from tolerances import EXACT_FLOAT32, TF32, TOLERANCES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepmemory.ops import engines, hoisted, nvrtc, plain
from deepmemory.ops.layout import delta_features, trace_features
from deepmemory.ops.nvrtc import compiler, products
from deepmemory.ops.nvrtc.plan import Plan, Shape, lay_out
from deepmemory.ops.nvrtc.spread import FMA, MMA, SPLIT, lane_tile
from deepmemory.ops.recurrence import Recurrence, Sequences, resets_of_sweep

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

pytestmark = pytest.mark.skipif(
    not GPU and shutil.which("g++") is None, reason="needs a GPU, or g++ to emulate one (see tests/ops/emulate.cpp)"
)


@pytest.fixture(scope="session")
def emulator(pytestconfig):
    """Compiles the CUDA source for the host, once per set of constants, for all workers and for later sessions."""
    here = Path(__file__).parent
    emulation = [here / name for name in ("emulate.cpp", "emulated_gpu.cpp", "emulated_gpu.h")]
    sources = b"".join(path.read_bytes() for path in (*emulation, *sorted(compiler.FOLDER_OF_SOURCES.glob("*.cuh"))))
    folder = pytestconfig.cache.mkdir("emulated") / hashlib.sha256(sources).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    for other in set(folder.parent.iterdir()) - {folder}:  # of sources that have changed
        shutil.rmtree(other, ignore_errors=True)

    def compiled(name: str, *arguments: str | Path) -> Path:
        file = folder / name
        if not file.exists():
            new = file.with_suffix(f".{os.getpid()}")
            subprocess.run(["g++", "-std=c++17", "-O0", "-fPIC", "-w", *arguments, "-o", new], check=True)
            new.replace(file)  # at once: another worker may be about to use it
        return file

    def build(defines: dict[str, str]) -> ctypes.CDLL:
        gpu = compiled("gpu.o", "-c", here / "emulated_gpu.cpp")
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        name = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16] + ".so"
        sources = [f"-I{compiler.FOLDER_OF_SOURCES}", here / "emulate.cpp", gpu]
        return ctypes.CDLL(str(compiled(name, "-shared", *flags, *sources)))

    return build


class Emulated:
    """In the place of ``compiler.Kernels``."""

    def __init__(self, emulator, shape, layout, save, index):
        self.library = emulator(layout.defines(shape, save))
        self.layout = layout

    def sweep(self, backward, arguments, blocks, runs, threads):
        assert threads == 32 * self.layout.warps
        assert self.library.shared_bytes(int(backward)) == self.layout.shared_bytes[backward]
        sweep = self.layout.backward if backward else self.layout.forward
        assert self.library.quads_in_global(int(backward)) == sweep.streamed_quads
        assert self.library.quads_exchanged(int(backward)) == sweep.exchanged_quads
        assert self.library.arguments_bytes() == 8 * len(arguments)
        run = self.library.sweep_backward if backward else self.library.sweep_forward
        run(ctypes.c_void_p(arguments.buffer_info()[0]), blocks, runs)

    def sum_products(self, arguments, blocks, runs, shared_bytes):
        assert self.library.products_bytes() == 8 * len(arguments)
        assert self.library.products_shared_bytes() == shared_bytes
        self.library.sum_products(ctypes.c_void_p(arguments.buffer_info()[0]), blocks, runs)


@pytest.fixture(autouse=True)
def no_tf32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def engine(monkeypatch, emulator):
    """Force a layout; off the GPU put the emulator in the place of the compiler."""

    def use(layout_of) -> None:
        monkeypatch.setattr(nvrtc, "_layers", {})
        monkeypatch.setattr(nvrtc, "_layout", lambda shape, *_: layout_of(shape))
        if GPU:
            return
        monkeypatch.setattr(nvrtc, "_device", lambda index: HOPPER)
        monkeypatch.setattr(nvrtc, "_kernels", lambda *which: Emulated(emulator, *which))
        monkeypatch.setattr(nvrtc, "refuses", lambda *case: None)
        monkeypatch.setattr(engines, "unavailable", lambda name: None)

    return use


def draw_weights(rec: Recurrence, m: int, d: int, hidden: list[int], generator) -> list[torch.Tensor]:
    gates = {"rnn": 1, "gru": 3, "lstm": 4}

    def matrix(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    if rec.cell in gates:
        rows = gates[rec.cell] * d
        return [matrix(rows, m), matrix(rows, d), *([matrix(rows), matrix(rows)] if rec.bias else [])]
    widths = [*hidden, 2 * d] if rec.cell == "dmu" else [2 * d] * (len(hidden) + 1)
    inner = hidden if rec.cell == "dmu" else [d] * len(hidden)
    weights = [matrix(widths[0], m), matrix(widths[0], d), *([matrix(widths[0])] if rec.bias else [])]
    for out, into in zip(widths[1:], inner, strict=True):
        weights += [matrix(out, into), *([matrix(out)] if rec.bias else [])]
    return weights


def compare(
    rec,
    d,
    hidden,
    *,
    layout,
    engine,
    steps=4,
    batch=3,
    m=3,
    lengths=None,
    gate_bias=0.0,
    nan_at=None,
    dtype=torch.float32,
    mixed=False,
    masks=False,
    resets=None,
):
    """y, final states and every gradient against the plain engine in float64."""
    from deepmemory import ops

    generator = torch.Generator().manual_seed(7)
    weights = draw_weights(rec, m, d, hidden, generator)
    if gate_bias:
        weights[-1][:d] += gate_bias * (-1.0) ** torch.arange(d)
    x = torch.randn(steps, batch, m, generator=generator, dtype=torch.float64)
    state = [torch.randn(batch, d, generator=generator, dtype=torch.float64).tanh() for _ in range(rec.states)]
    if lengths is not None:
        lengths = torch.tensor(lengths)
        x[torch.arange(steps)[:, None] >= lengths] = float("nan")
    if nan_at is not None:
        x[nan_at] = float("nan")
    probe = torch.randn(steps, batch, d, generator=generator, dtype=torch.float64)

    state_mask = hidden_mask = None
    if masks:
        state_mask = torch.rand(batch, d, generator=generator, dtype=torch.float64).gt(0.3) / 0.7
        if rec.cell == "dmu" and hidden:
            hidden_mask = torch.rand(batch, sum(hidden), generator=generator, dtype=torch.float64).gt(0.3) / 0.7
            rec = rec._replace(masked=True)
    if resets is not None:
        resets = resets_of_sweep(torch.tensor(resets).bool(), lengths, rec.reverse)

    if dtype is not torch.float32:  # what is rounded on the way in is not the engine's
        x, probe, *state = (t.to(dtype).double() for t in (x, probe, *state))
        weights = [w.to(dtype).double() for w in weights]
        state_mask, hidden_mask = (None if m is None else m.to(dtype).double() for m in (state_mask, hidden_mask))

    def run(function, dtype, device):
        of_weights = torch.float32 if mixed and dtype is not torch.float64 else dtype
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, *state)]
        leaves += [w.to(device, of_weights).requires_grad_() for w in weights]
        here = [None if t is None else t.to(device) for t in (lengths, resets)]
        here += [None if m is None else m.to(device, dtype) for m in (state_mask, hidden_mask)]
        y, final = function(
            rec, leaves[0], tuple(leaves[1 : 1 + rec.states]), leaves[1 + rec.states :], Sequences(*here)
        )
        loss = (y * probe.to(y)).sum() + sum((f * (k + 2.0)).sum() for k, f in enumerate(final))
        grads = torch.autograd.grad(loss, leaves)
        return [t.double().cpu() for t in (y.detach(), *(f.detach() for f in final), *grads)]

    engine(layout)
    expected = run(plain.scan, torch.float64, "cpu")
    given = run(lambda *args: ops.scan(*args, engine="nvrtc"), dtype, DEVICE)
    exact = dtype is torch.float32 and layout(Shape.of(rec, dtype, weights)).product != MMA
    for index, (a, b) in enumerate(zip(given, expected, strict=True)):
        rtol, atol = EXACT_FLOAT32 if exact else TF32 if dtype is torch.float32 else TOLERANCES[dtype]
        atol *= max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=index: f"{i}: {m}")


REGISTERS, SHARED, GLOBAL, MIXED = range(4)
PLACES = ("kept", "shared", "streamed")


def places_of(layout: Plan) -> list[int]:
    """Units of weights in each place."""
    return [sum(sum(getattr(sweep, name)) for sweep in (layout.forward, layout.backward)) for name in PLACES]


def small(rows, cluster, place, warps=1, product=FMA, **options):
    """A layout that puts all weights in one place, or some in each (MIXED)."""

    def layout_of(shape: Shape) -> Plan:
        registers = {REGISTERS: 10**6, MIXED: 4 if product == FMA else 32}.get(place, 0)
        case = shape, product, rows, cluster, warps
        layout = lay_out(*case, 0 if place == GLOBAL else 10**9, registers, **options)
        if place == MIXED:
            limits = range(max(layout.shared_bytes), 0, -512)
            tried = (lay_out(*case, limit, registers, **options) for limit in limits)
            layout = next(mixed for mixed in tried if all(places_of(mixed)))
        places = places_of(layout)
        if place == REGISTERS:  # layers that share their code have none of their own
            assert places[place]
            assert len(shape.stages()) < len(shape.widths) or places[place] == sum(places)
        else:
            assert all(places) if place == MIXED else places[place] == sum(places)
        return layout

    return layout_of


CASES = {
    "dmu-n1": (Recurrence("dmu", "tanh"), 7, []),
    "dmu-n2": (Recurrence("dmu", "leaky_relu"), 7, [9]),
    "dmu-n3-silu": (Recurrence("dmu", "silu"), 5, [9, 4]),
    "dmu-n2-gelu-no-bias": (Recurrence("dmu", "gelu", bias=False), 5, [6]),
    "dmu-n2-reverse": (Recurrence("dmu", "tanh", reverse=True), 7, [9]),
    "rhn-1": (Recurrence("rhn"), 7, []),
    "rhn-3-no-bias": (Recurrence("rhn", bias=False), 6, [6, 6]),
    "rhn-3-reverse": (Recurrence("rhn", reverse=True), 6, [6, 6]),
    "dmu-n5": (Recurrence("dmu", "leaky_relu"), 7, [9] * 4),
    "dmu-n6-silu-reverse": (Recurrence("dmu", "silu", reverse=True), 5, [6, 6, 6, 4, 4]),
    "rnn": (Recurrence("rnn", "tanh"), 7, []),
    "rnn-relu-reverse": (Recurrence("rnn", "relu", reverse=True), 7, []),
    "gru": (Recurrence("gru"), 7, []),
    "gru-no-bias-reverse": (Recurrence("gru", bias=False, reverse=True), 7, []),
    "lstm": (Recurrence("lstm"), 7, []),
    "lstm-reverse": (Recurrence("lstm", reverse=True), 7, []),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_definition(case, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), engine=engine)


@pytest.mark.parametrize("case", CASES)
def test_lengths_stop_each_sequence_and_padding_stays_outside(case, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), engine=engine, lengths=[4, 0, 2])


MORE_CASES = CASES | {
    "dmu-n2-residual": (Recurrence("dmu", "leaky_relu", residual=True), 7, [9]),
    "dmu-n3-residual-gelu": (Recurrence("dmu", "gelu", residual=True), 5, [9, 9]),
    "dmu-n5-residual": (Recurrence("dmu", "leaky_relu", residual=True), 7, [9] * 4),
    "dmu-n5-residual-relu-reverse": (Recurrence("dmu", "relu", reverse=True, residual=True), 7, [7] * 4),
    "dmu-n4-residual-tanh-no-bias": (Recurrence("dmu", "tanh", bias=False, residual=True), 6, [11] * 3),
}
RESETS = [[0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]]  # in the padding too, where they mean nothing


# With masks, and with resets, every one of these cases is compiled below.
@pytest.mark.parametrize("case", ["dmu-n3-residual-gelu", "dmu-n5-residual"])
def test_residual_transitions(case, engine):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), engine=engine)


@pytest.mark.parametrize("case", MORE_CASES)
def test_masks_are_each_sequences_own(case, engine):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), engine=engine, masks=True, lengths=[4, 0, 2])


@pytest.mark.parametrize("case", MORE_CASES)
def test_resets_cut_sequences(case, engine):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), engine=engine, resets=RESETS, lengths=[4, 2, 3])


@pytest.mark.parametrize(
    ("cluster", "product", "dtype", "team"),
    [(1, FMA, torch.float32, False), (2, MMA, torch.bfloat16, False), (3, MMA, torch.bfloat16, True)],
)
def test_a_reset_makes_an_end_of_nan(cluster, product, dtype, team, engine):
    """Also where a narrow layer follows a wider one, whose inputs stay behind its own."""
    resets = [[int(sequence == 0 and 1 <= step <= 3) for sequence in range(3)] for step in range(6)]
    options = {"steps": 6, "nan_at": (2, 0, 0), "resets": resets, "dtype": dtype}
    layout = small(4, cluster, SHARED, product=product, team=team)
    compare(Recurrence("dmu", "tanh"), 5, [9, 9], layout=layout, engine=engine, **options)


# Smooth activations: half precision moves units across the kink of a leaky ReLU.
@pytest.mark.parametrize("case", ["dmu-n4-residual-tanh-no-bias", "rhn-3-reverse", "gru", "lstm-reverse"])
def test_all_of_it_on_the_tensor_cores(case, engine):
    rec, d, hidden = MORE_CASES[case]
    layout = small(8, 2, REGISTERS, product=MMA)
    options = {"dtype": torch.bfloat16, "lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    compare(rec, d, hidden, layout=layout, engine=engine, **options)


# Two teams, blocks that own nothing, and rows beyond the batch.
@pytest.mark.parametrize("case", MORE_CASES)
def test_teams_exchange_through_global_memory(case, engine):
    rec, d, hidden = MORE_CASES[case]
    rec = rec._replace(activation="tanh") if rec.activation in ("relu", "leaky_relu") else rec
    options = {"dtype": torch.bfloat16, "lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    compare(rec, d, hidden, layout=small(2, 3, SHARED, product=MMA, team=True), engine=engine, **options)


@pytest.mark.parametrize("place", [REGISTERS, GLOBAL, MIXED])
@pytest.mark.parametrize(
    ("case", "product", "dtype"),
    [
        ("dmu-n3-residual-gelu", MMA, torch.float32),
        ("lstm", MMA, torch.float16),
        ("dmu-n5", FMA, torch.float32),
        ("gru", FMA, torch.bfloat16),
    ],
)
def test_teams_take_weights_from_anywhere(case, product, dtype, place, engine):
    rec, _, hidden = MORE_CASES[case]
    layout = small(4, 5, place, warps=2, product=product, team=True)
    compare(rec, 101, [85] * len(hidden), layout=layout, engine=engine, dtype=dtype, batch=7, steps=7)


def test_teams_send_the_nan_that_stands_for_missing_words(engine):
    rec, d = Recurrence("rnn", "tanh"), 6
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, d, [], torch.Generator().manual_seed(0))]
    h0 = torch.full((3, d), nvrtc.POISON, dtype=torch.int32, device=DEVICE).view(torch.float32)
    engine(small(2, 3, SHARED, product=MMA, team=True))
    y, _, _ = nvrtc.forward(rec, torch.zeros(2, 3, 3, device=DEVICE), [h0], weights, Sequences(), False)
    assert y.isnan().all()


@pytest.mark.parametrize(("case", "steps"), [("dmu-n5", 16), ("gru", 40)])
def test_teams_use_their_buffers_again(case, steps, engine):
    rec, d, hidden = CASES[case]
    layout = small(2, 3, SHARED, product=MMA, team=True)
    compare(rec._replace(activation="tanh"), d, hidden, layout=layout, engine=engine, steps=steps)


@pytest.mark.parametrize("case", ["dmu-n5-residual", "rhn-3-reverse"])
def test_teams_are_larger_than_clusters(case, engine):
    rec, _, hidden = MORE_CASES[case]
    layout = small(5, 20, SHARED, product=MMA, team=True)
    options = {"dtype": torch.float16, "batch": 7, "steps": 3, "lengths": [3, 1, 0, 2, 3, 3, 2], "masks": True}
    compare(rec._replace(activation="tanh"), 150, [150] * len(hidden), layout=layout, engine=engine, **options)


IN_OTHER_TYPES = ("dmu-n2", "dmu-n5", "gru", "lstm-reverse")  # each is compiled for a second or two


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES]
    + [(case, dtype) for dtype in (torch.float32, torch.float16) for case in IN_OTHER_TYPES],
)
def test_tensor_cores_agree_with_the_definition(case, dtype, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(8, 2, REGISTERS, product=MMA), engine=engine, dtype=dtype, lengths=[4, 0, 2])


# With the tolerance of exact multiplications; sums of one tile are kept apart, those of four are not.
@pytest.mark.parametrize("case", ["rhn-3-reverse", *IN_OTHER_TYPES])
def test_three_products_in_tf32_have_the_accuracy_of_float32(case, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(8, 2, REGISTERS, product=SPLIT), engine=engine, lengths=[4, 0, 2])


@pytest.mark.parametrize(("place", "rows", "team"), [(SHARED, 4, True), (GLOBAL, 32, False), (MIXED, 16, True)])
def test_weights_of_split_products_may_stay_anywhere(place, rows, team, engine):
    rec, layout = Recurrence("dmu", "tanh", residual=True), small(rows, 2, place, warps=2, product=SPLIT, team=team)
    compare(rec, 45, [70, 70], layout=layout, engine=engine, batch=rows - 1, steps=3, masks=True)


@pytest.mark.parametrize("case", ["dmu-n2", "gru-no-bias-reverse"])
def test_lengths_beyond_the_sequence_mean_the_nearest_within(case, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), engine=engine, lengths=[5, -1, 2**33 + 1])


def test_negative_views_are_read_as_what_they_say(engine):
    from deepmemory import ops

    rec, results = Recurrence("gru"), []
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 7, [], torch.Generator().manual_seed(0))]
    x, h0 = torch.rand(4, 3, 3, device=DEVICE), torch.rand(3, 7, device=DEVICE)
    engine(small(2, 1, REGISTERS))
    for view in (torch.clone, lambda t: torch._neg_view(-t)):
        leaves = [t.clone().requires_grad_() for t in (x, h0, *weights)]
        seen = [view(leaf) for leaf in leaves]
        y, (h_n,) = ops.scan(rec, seen[0], (seen[1],), seen[2:], engine="nvrtc")
        incoming = [view(t.detach()) for t in (y, h_n)]
        results.append([y, h_n, *torch.autograd.grad([y, h_n], leaves, incoming)])
    for given, expected in zip(*results, strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("place", [SHARED, GLOBAL, MIXED])
def test_tensor_cores_take_weights_from_anywhere(place, engine):
    rec, d, hidden = Recurrence("dmu", "tanh"), 45, [170]
    layout = small(16, 2, place, warps=2, product=MMA)
    compare(rec, d, hidden, layout=layout, engine=engine, dtype=torch.bfloat16, batch=11, steps=2)


@pytest.mark.parametrize("mixed", [False, True], ids=["", "float32-weights"])
@pytest.mark.parametrize("case", ["dmu-n2", "lstm"])
def test_half_precision_without_tensor_cores(case, mixed, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), engine=engine, dtype=torch.bfloat16, mixed=mixed)


@pytest.mark.parametrize("place", [SHARED, GLOBAL, MIXED])
@pytest.mark.parametrize("case", ["dmu-n2", "gru", "rhn-3-no-bias", "dmu-n5"])
def test_weights_may_stay_anywhere(case, place, engine):
    rec, d, hidden = CASES[case]
    if place == MIXED:  # there must be something to divide
        d, hidden = 40, [40] * len(hidden)
    compare(rec, d, hidden, layout=small(2, 2, place), engine=engine)


@pytest.mark.skipif(GPU, reason="looks into the emulated kernel")
@pytest.mark.parametrize("case", ["dmu-n5", "dmu-n2-reverse", "rhn-3-reverse"])
@pytest.mark.parametrize("place", [GLOBAL, MIXED])
def test_what_a_thin_layer_reads_at_every_step_is_held_early(case, place, engine, emulator):
    rec, d, hidden = CASES[case]
    layout_of = small(1, 1, place)
    compare(rec, d, hidden, layout=layout_of, engine=engine, steps=6, lengths=[6, 0, 2])
    weights = [w.float() for w in draw_weights(rec, 3, d, hidden, torch.Generator())]
    layout = layout_of(shape := Shape.of(rec, torch.float32, weights))
    assert layout.streams
    assert emulator(layout.defines(shape, True)).holds(1)


@pytest.mark.parametrize("place", [REGISTERS, SHARED])
@pytest.mark.parametrize("case", ["dmu-n2", "rhn-3-reverse"])
def test_lanes_that_share_rows(case, place, engine):
    rec, d, hidden = CASES[case]
    assert lane_tile(2 * -(-d // 2), rows=8)[0] == 4
    compare(
        rec, d, hidden, layout=small(8, 2, place), engine=engine, batch=11, steps=3, lengths=[3, 1, 0, 2] * 2 + [3] * 3
    )


@pytest.mark.parametrize("case", ["dmu-n2", "lstm"])
def test_more_outputs_than_lanes_and_several_warps(case, engine):
    rec, _, hidden = CASES[case]
    compare(rec, 37, [41] * len(hidden), layout=small(1, 1, SHARED, warps=2), engine=engine, steps=2, batch=2)


def test_saturated_gates(engine):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), engine=engine, gate_bias=14.0)


def test_relu_lets_gradients_through_at_nan_as_torch_does(engine):
    rec, d, hidden = CASES["rnn-relu-reverse"]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), engine=engine, nan_at=(1, 0, 0))


def test_one_step(engine):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(4, 1, REGISTERS), engine=engine, steps=1, batch=1)


DIRECT_CASES = {name: case for name, case in MORE_CASES.items() if len(case[2]) + (case[0].cell == "rhn") < 3} | {
    "rhn-2": (Recurrence("rhn"), 6, [6]),
}


# Warps that finish their own sums, with lanes that share the inputs of an output, in stages of one layer.
@pytest.mark.parametrize("case", DIRECT_CASES)
def test_direct_sums_agree_with_the_definition(case, engine):
    rec, d, hidden = DIRECT_CASES[case]
    options = {"lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    compare(rec, d, hidden, layout=small(2, 1, SHARED, warps=2, direct=4), engine=engine, **options)


# Features that fill no group, parts of rows, more items than warps, warps without any, and lanes without a sum.
@pytest.mark.parametrize(
    ("direct", "dtype", "rows", "warps", "place"),
    [
        (1, torch.float32, 2, 2, REGISTERS),
        (2, torch.float32, 6, 4, SHARED),
        (4, torch.float32, 5, 3, REGISTERS),
        (8, torch.float32, 1, 8, REGISTERS),
        (8, torch.bfloat16, 12, 8, SHARED),
        (4, torch.float16, 1, 4, SHARED),
    ],
)
def test_direct_sums_of_odd_widths(direct, dtype, rows, warps, place, engine):
    layout = small(rows, 1, place, warps=warps, direct=direct)
    options = {"dtype": dtype, "batch": 7, "steps": 2, "lengths": [2, 1, 0, 2, 2, 1, 2], "masks": True}
    compare(Recurrence("dmu", "tanh"), 77, [93, 51], layout=layout, engine=engine, **options)


# Shared memory that is written too early is wrong in the emulator, which runs warps in any order: 20 exchanges of two
# buffers, with nothing but a barrier for each between warps that take long and others that have nothing to do.
def test_direct_sums_need_one_barrier_for_a_layer(engine):
    layout = small(2, 1, SHARED, warps=4, direct=8)
    compare(Recurrence("rhn"), 37, [37], layout=layout, engine=engine, steps=10, batch=2)


def products_of(rec, weights, needs, engine, *, steps=5, batch=3, runs=None, lengths=None, transposed=False):
    """Weight gradients by the kernel and by torch's products, from made-up records of the sweeps."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def draw(*shape):
        front = () if runs is None else (runs,)
        return torch.randn(*front, *shape, generator=generator, device=DEVICE)

    d = weights[1][-1]
    weights = [draw(*shape) for shape in weights]
    x = (
        draw(batch, steps, weights[0].shape[-1]).transpose(-3, -2)
        if transposed
        else draw(steps, batch, weights[0].shape[-1])
    )
    y, h0 = draw(steps, batch, d), draw(batch, d)
    trace = draw(steps, batch, trace_features(rec, weights))
    deltas = draw(steps, batch, delta_features(rec, weights))
    if lengths is not None:
        lengths = torch.tensor(lengths, device=DEVICE).expand(*x.shape[:-3], batch)
        padding = torch.arange(steps, device=DEVICE)[:, None] >= lengths[..., None, :]
        for record in (y, trace, deltas):
            record[padding] = 0
        x[padding] = float("nan")
    engine(small(2, 1, REGISTERS))
    layer = nvrtc._layer(rec, x, weights)
    records = x, h0, weights, Sequences(lengths), y, trace, deltas, tuple(needs)
    given = nvrtc._weight_gradients(rec, layer, *records)
    exact = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in records]
    exact[2] = [w.double() for w in weights]
    expected = hoisted.weight_gradients(rec, *exact)
    assert [g is not None for g in given] == list(needs)
    for a, b in zip(given, expected, strict=True):
        if b is not None:
            rtol, atol = EXACT_FLOAT32
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol * b.abs().max().item())


WEIGHTS = {
    "dmu": [(4, 3), (4, 5), (4,), (10, 4), (10,)],
    "rhn": [(10, 3), (10, 5), (10,), (10, 5), (10,)],
    "rnn": [(5, 3), (5, 5), (5,), (5,)],
    "gru": [(15, 3), (15, 5), (15,), (15,)],
    "lstm": [(20, 3), (20, 5), (20,), (20,)],
}


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("cell", WEIGHTS)
def test_products_know_runs_lengths_and_direction(cell, reverse, engine):
    rec = Recurrence(cell, reverse=reverse)
    products_of(rec, WEIGHTS[cell], [True] * len(WEIGHTS[cell]), engine, runs=2, lengths=[5, 0, 2])


@pytest.mark.parametrize(("d", "size"), [(3, 8), (7, 16), (13, 32), (67, 64)])
def test_products_are_cut_into_tiles_that_fit_the_layer(d, size, engine):
    weights = [(d + 1, 2 * size + 2), (d + 1, d), (d + 1,), (2 * d, d + 1), (2 * d,)]
    assert products.table(Recurrence("dmu"), [torch.empty(w) for w in weights], 1, (True,) * 5).tile.size == size
    products_of(Recurrence("dmu"), weights, [True] * 5, engine)


def test_products_of_many_rows_are_cut_into_pieces(engine):
    layer = products.table(Recurrence("dmu"), [torch.empty(shape) for shape in WEIGHTS["dmu"]], 1, (True,) * 5)
    assert layer.pieces(27 * 11, 1, multiprocessors=132) == 3
    products_of(Recurrence("dmu"), WEIGHTS["dmu"], [True] * 5, engine, steps=27, batch=11)


def test_products_nobody_asks_for_are_left_out(engine):
    products_of(Recurrence("gru"), WEIGHTS["gru"], [False, True, False, True], engine)


def test_products_read_x_where_it_lies(engine):
    products_of(Recurrence("dmu"), WEIGHTS["dmu"], [True] * 5, engine, transposed=True)


def test_large_products_are_left_to_the_library(engine, monkeypatch):
    monkeypatch.setattr(products, "MOST_MULTIPLICATIONS", (0, 0))
    monkeypatch.setattr(Emulated, "sum_products", None)
    for runs in (None, 2):
        products_of(Recurrence("gru"), WEIGHTS["gru"], [True, True, False, True], engine, runs=runs, lengths=[5, 0, 2])


def test_a_very_deep_layer_has_too_many_products_for_one_launch():
    shapes = [(4, 3), (4, 5), (4,), *[(4, 4), (4,)] * 30, (10, 4), (10,)]
    weights = [torch.empty(shape) for shape in shapes]
    assert products.table(Recurrence("dmu"), weights, 1, (True,) * len(weights)) is None


@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_gradients_come_in_at_any_stride_and_may_be_missing(cell, engine):
    from deepmemory import ops

    rec = Recurrence(cell, "tanh")
    generator = torch.Generator().manual_seed(5)
    drawn = draw_weights(rec, 3, 5, [4] if cell == "dmu" else [], generator)
    engine(small(2, 2, REGISTERS))

    def grads(run, dtype, device):
        weights = [w.to(device, dtype).requires_grad_() for w in drawn]
        x = torch.linspace(-1, 1, 4 * 3 * 3).view(3, 4, 3).to(device, dtype).transpose(0, 1).requires_grad_()
        y, final = run(rec, x, tuple(x.new_zeros(3, 5) for _ in range(rec.states)), weights)
        losses = [y.sum(), y.transpose(0, 1).contiguous().square().sum(), final[0].sum()]
        return [
            g.double().cpu() for loss in losses for g in torch.autograd.grad(loss, [x, *weights], retain_graph=True)
        ]

    expected = grads(plain.scan, torch.float64, "cpu")
    given = grads(lambda *args: ops.scan(*args, engine="nvrtc"), torch.float32, DEVICE)
    for a, b in zip(given, expected, strict=True):
        rtol, atol = EXACT_FLOAT32
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()))


def test_little_is_left_to_launch_one_by_one(engine):
    """A small layer waits for the host: beside our kernels torch launches the products with x and one sum."""
    from deepmemory.ops import fused

    class Launched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if not function.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "_reshape_alias")):
                names.append(name)
            return function(*args, **(kwargs or {}))

    rec, names = Recurrence("dmu", "tanh"), []
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 5, [4], torch.Generator().manual_seed(0))]
    x, h0 = torch.ones(60, 3, 3, device=DEVICE), torch.zeros(3, 5, device=DEVICE)
    engine(small(2, 1, REGISTERS))
    with Launched():
        y, _, trace = fused.run_forward(rec, "nvrtc", False, True, x, [h0], weights, Sequences())
        grad_y, needs = y.new_empty(()).expand(y.shape), [True, False, *[True] * 5]
        fused.run_backward(rec, "nvrtc", False, grad_y, [None], x, [h0], weights, Sequences(), y, trace, needs)
    assert names == ["addmm", "mm", "sum"]


@pytest.mark.parametrize("place", [REGISTERS, SHARED, GLOBAL])
def test_weights_may_begin_at_any_address(place, engine):
    rec = Recurrence("dmu", "tanh")
    generator = torch.Generator().manual_seed(3)
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 8, [8], generator)]
    moved = [torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape) for w in weights]
    assert any(w.data_ptr() % 16 for w in moved)
    x, h0 = torch.randn(4, 2, 3, generator=generator).to(DEVICE), torch.zeros(2, 8, device=DEVICE)
    engine(small(2, 1, place))
    expected, given = (nvrtc.forward(rec, x, [h0], ws, Sequences(), False)[0] for ws in (weights, moved))
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    ("cluster", "place", "product", "options"),
    [(1, REGISTERS, FMA, {}), (2, GLOBAL, FMA, {}), (3, GLOBAL, MMA, {"team": True}), (1, SHARED, FMA, {"direct": 2})],
)
def test_runs_side_by_side_equal_each_alone(cluster, place, product, options, engine):
    rec = Recurrence("dmu", "tanh")
    generator = torch.Generator().manual_seed(9)
    weights = [
        torch.stack(ws).float().to(DEVICE)
        for ws in zip(*(draw_weights(rec, 3, 5, [4], generator) for _ in range(3)), strict=True)
    ]
    x = torch.randn(3, 4, 3, 3, generator=generator).to(DEVICE)
    engine(small(2, cluster, place, product=product, **options))

    def loss(x, *weights):
        from deepmemory import ops

        y, _ = ops.scan(rec, x, (x.new_zeros(3, 5),), list(weights), engine="nvrtc")
        return y.square().sum()

    leaves = [t.requires_grad_() for t in (x, *weights)]
    together = torch.autograd.grad(torch.vmap(loss)(*leaves).sum(), leaves)
    alone = torch.autograd.grad(sum(loss(*(t[run] for t in leaves)) for run in range(3)), leaves)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_more_rows_than_the_kernels_can_count_are_refused():
    rec, weights = Recurrence("rnn", bias=False), [torch.empty(4, 3), torch.empty(4, 4)]
    x = torch.empty(1, 1, 1, 3).expand(2, 2**16, 2**15, 3)
    with pytest.raises(RuntimeError, match=r"fewer than 4294967296 runs x steps x sequences, got 2 x 65536 x 32768"):
        nvrtc._layer(rec, x, weights)


@pytest.mark.parametrize(
    ("rec", "weights", "dtype", "reason"),
    [
        (Recurrence("rnn"), [(4, 3), (4, 4), (4,), (4,)], torch.float64, "bfloat16"),
        (Recurrence("lstm"), [(16, 3), (16, 2), (16,), (16,), (2, 4)], torch.float32, "projections"),
        (Recurrence("rnn", "silu"), [(4, 3), (4, 4), (4,), (4,)], torch.float32, "silu"),
        (Recurrence("dmu", bias=False), [(4096, 3), (4096, 4), (8, 4096)], torch.float32, "2048"),
    ],
)
def test_refuses_what_it_cannot_do_and_says_why(rec, weights, dtype, reason):
    with FakeTensorMode():
        x = torch.empty(5, 2, 3, dtype=dtype, device="cuda")
        assert reason in nvrtc.refuses(rec, x, [torch.empty(shape, dtype=dtype, device="cuda") for shape in weights])
        fits = [torch.empty(shape, device="cuda") for shape in ((4, 3), (4, 4), (4,), (4,))]
        assert nvrtc.refuses(Recurrence("rnn"), x.float(), fits) is None


def test_what_it_refuses_can_be_asked_inside_a_compiled_graph():
    rec = Recurrence("dmu")
    asked = torch.compile(
        lambda x, *weights: x + (nvrtc._refuses_anywhere(rec, x, list(weights)) is None),
        fullgraph=True,
        backend="eager",
    )
    shapes = (4, 3), (4, 5), (4,), (10, 4), (10,)
    assert asked(torch.zeros(2), *map(torch.zeros, shapes)).all()
    assert not asked(torch.zeros(2, dtype=torch.float64), *map(torch.zeros, shapes)).any()
