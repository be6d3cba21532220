"""The nvrtc engine in tests: on a GPU as it is, elsewhere its CUDA source emulated thread by thread on the CPU."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ops.hopper import HOPPER

from deepmemory.ops import engines, nvrtc
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import Plan, Shape, lay_out
from deepmemory.ops.nvrtc.spread import FMA
from deepmemory.ops.recurrence import Recurrence

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-w", *os.environ.get("EMULATOR_FLAGS", "").split())
NEEDS_GPU_OR_COMPILER = pytest.mark.skipif(
    not GPU and shutil.which("g++") is None, reason="needs a GPU, or g++ to emulate one (see tests/ops/emulate.cpp)"
)


@pytest.fixture(scope="session")
def emulator(pytestconfig):
    """Compiles the CUDA source for the host, once per set of constants, for all workers and for later sessions."""
    here = Path(__file__).parent
    emulation = [here / name for name in ("emulate.cpp", "emulated_gpu.cpp", "emulated_gpu.h")]
    sources = b"".join(path.read_bytes() for path in (*emulation, *sorted(compiler.FOLDER_OF_SOURCES.glob("*.cuh"))))
    key = hashlib.sha256(sources + " ".join(FLAGS).encode()).hexdigest()
    folder = pytestconfig.cache.mkdir("emulated") / key[:16]
    folder.mkdir(exist_ok=True)
    for other in set(folder.parent.iterdir()) - {folder}:  # of sources that have changed
        shutil.rmtree(other, ignore_errors=True)

    def compiled(name: str, *arguments: str | Path) -> Path:
        file = folder / name
        if not file.exists():
            new = file.with_suffix(f".{os.getpid()}")
            subprocess.run(["g++", *FLAGS, *arguments, "-o", new], check=True)
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
        address = ctypes.c_void_p(arguments.buffer_info()[0])
        assert self.library.products_shared_bytes(address) == shared_bytes
        self.library.sum_products(address, blocks, runs)


@pytest.fixture
def use_layout(monkeypatch, emulator):
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
            assert len(layout.stages(shape)) < len(shape.widths) or places[place] == sum(places)
        else:
            assert all(places) if place == MIXED else places[place] == sum(places)
        return layout

    return layout_of
