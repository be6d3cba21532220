"""The run-time compiled engine: on a GPU as it is, elsewhere its CUDA source emulated thread by thread on the CPU."""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tolerances import EXACT_FLOAT32
from torch._subclasses.fake_tensor import FakeTensorMode

from deepmemory.ops import engines, nvrtc, plain
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import Plan, Shape, lay_out, plan
from deepmemory.ops.recurrence import Recurrence

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

pytestmark = pytest.mark.skipif(
    not GPU and shutil.which("g++") is None, reason="needs a GPU, or g++ to emulate one (see tests/ops/emulate.cpp)"
)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """Compiles ``sweep.cu`` for the host, once per set of constants."""
    folder = tmp_path_factory.mktemp("emulated")

    def build(defines: dict[str, str]) -> ctypes.CDLL:
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        library = folder / (hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16] + ".so")
        if not library.exists():
            source = Path(__file__).with_name("emulate.cpp")
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-w", "-include", "memory"]
            subprocess.run([*command, f"-I{compiler.SOURCE.parent}", *flags, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    return build


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
        monkeypatch.setattr(nvrtc, "_layout", lambda shape, x: layout_of(shape))
        if GPU:
            return

        def sweep(backward, shape, layout, save, x, arguments):
            library = emulator(layout.defines(shape, save))
            for back in (False, True):
                assert library.shared_bytes(int(back)) == layout.shared_bytes[back]
            blocks = -(-x.shape[2] // layout.rows) * layout.cluster
            run = library.sweep_back if backward else library.sweep_ahead
            run(ctypes.byref(arguments), blocks, x.shape[0])

        def sum_products(shape, layout, products, left):
            emulator(layout.defines(shape, True)).sum_products(ctypes.byref(products), left.shape[0])

        monkeypatch.setattr(nvrtc, "_sweep", sweep)
        monkeypatch.setattr(nvrtc, "_sum_products", sum_products)
        monkeypatch.setattr(nvrtc, "refuses", lambda rec, x, weights: None)
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


def compare(rec, d, hidden, *, layout, engine, steps=4, batch=3, m=3, lengths=None, gate_bias=0.0):
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
    probe = torch.randn(steps, batch, d, generator=generator, dtype=torch.float64)

    def run(function, dtype, device):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, *state, *weights)]
        here = None if lengths is None else lengths.to(device)
        y, final = function(rec, leaves[0], tuple(leaves[1 : 1 + rec.states]), leaves[1 + rec.states :], here)
        loss = (y * probe.to(y)).sum() + sum((f * (k + 2.0)).sum() for k, f in enumerate(final))
        grads = torch.autograd.grad(loss, leaves)
        return [t.double().cpu() for t in (y.detach(), *(f.detach() for f in final), *grads)]

    engine(layout)
    expected = run(plain.scan, torch.float64, "cpu")
    given = run(lambda *args: ops.scan(*args, engine="nvrtc"), torch.float32, DEVICE)
    for index, (a, b) in enumerate(zip(given, expected, strict=True)):
        rtol, atol = EXACT_FLOAT32
        atol *= max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, i=index: f"{i}: {m}")


REGISTERS, SHARED, GLOBAL, MIXED = range(4)
PLACES = ("kept", "shared", "streamed")


def small(rows, cluster, place, warps=1):
    """A layout that puts all weights in one place."""

    def layout_of(shape: Shape) -> Plan:
        registers = {REGISTERS: 10**6, MIXED: 4}.get(place, 0)
        layout = lay_out(shape, rows, cluster, warps, 0 if place == GLOBAL else 10**9, registers)
        if place == MIXED:
            layout = lay_out(shape, rows, cluster, warps, min(layout.shared_bytes) - 2048, registers)
        places = [sum(sum(getattr(sweep, name)) for sweep in (layout.ahead, layout.back)) for name in PLACES]
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
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), engine=engine)


@pytest.mark.parametrize("case", CASES)
def test_lengths_stop_each_sequence_and_padding_stays_outside(case, engine):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), engine=engine, lengths=[4, 0, 2])


@pytest.mark.parametrize("place", [SHARED, GLOBAL, MIXED])
@pytest.mark.parametrize("case", ["dmu-n2", "gru", "rhn-3-no-bias"])
def test_weights_may_stay_anywhere(case, place, engine):
    rec, d, hidden = CASES[case]
    if place == MIXED:  # there must be something to divide
        d, hidden = 24, [24] * len(hidden)
    compare(rec, d, hidden, layout=small(2, 2, place), engine=engine)


@pytest.mark.parametrize("case", ["dmu-n2", "lstm"])
def test_more_outputs_than_lanes_and_several_warps(case, engine):
    rec, _, hidden = CASES[case]
    compare(rec, 37, [41] * len(hidden), layout=small(1, 1, SHARED, warps=2), engine=engine, steps=2, batch=2)


def test_saturated_gates(engine):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), engine=engine, gate_bias=14.0)


def test_one_step(engine):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(4, 1, REGISTERS), engine=engine, steps=1, batch=1)


@pytest.mark.parametrize(
    ("d", "hidden"), [(5, [5]), (128, []), (136, [136] * 9), (200, [340]), (512, [1024]), (1024, [1024])]
)
@pytest.mark.parametrize("runs", [1, 51])
def test_every_plan_fits_the_chip(d, hidden, runs):
    shape = Shape("dmu", "leaky_relu", d, (*hidden, d))
    layout = plan(shape, runs, 32, multiprocessors=132, shared_limit=232448, largest_cluster=16)
    assert max(layout.shared_bytes) <= 232448
    assert layout.rows <= 16


@pytest.mark.parametrize(
    ("rec", "weights", "dtype", "reason"),
    [
        (Recurrence("rnn"), [(4, 3), (4, 4), (4,), (4,)], torch.bfloat16, "float32"),
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
