"""Speed against peers on this machine: side by side in one process, medians, ratios, checked results."""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata, util
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepmemory as dm
from deepmemory.lab.writing import put
from deepmemory.ops.engines import NAMES

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One case: a DMU layer and what goes through it."""

    name: str
    input_size: int
    transition: tuple[int, ...]
    hidden_size: int
    batch: int
    steps: int
    runs: int = 1


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("adding", 2, (5,), 5, 32, 105),
        Shape("adding-51", 2, (5,), 5, 32, 105, runs=51),
        Shape("music-2", 88, (122,), 122, 32, 200),
        Shape("music-10", 88, (136,) * 9, 136, 32, 200),
        Shape("ptb-1", 64, (), 100, 32, 100),
        Shape("ptb-2", 64, (122,), 122, 32, 100),
        Shape("ptb-5", 64, (131,) * 4, 131, 32, 100),
        Shape("ptb-10", 64, (136,) * 9, 136, 32, 100),
        Shape("mnist-64", 1, (), 128, 64, 784),
        Shape("mnist", 1, (), 128, 128, 784),
        Shape("mt-2", 650, (340,), 200, 32, 16),
        Shape("large", 512, (1024,), 512, 64, 512),
        Shape("wide", 768, (), 768, 16, 1024),
        Shape("rl", 256, (256,), 256, 1024, 16),
        Shape("rl-step", 256, (256,), 256, 256, 1),
        Shape("forecast", 16, (128,), 128, 256, 168),
        Shape("stream", 40, (64,), 64, 8, 4096),
        Shape("odd", 37, (93, 51), 77, 19, 211),
        Shape("deep-30", 32, (64,) * 29, 64, 64, 64),
        Shape("deep-wide", 830, (830,) * 9, 830, 20, 35),
        Shape("deep-1000", 1000, (1000,) * 9, 1000, 64, 70),
    )
}
CPU_SHAPES = ("adding", "adding-51", "music-2", "mnist-64", "music-10")
GPU_SHAPES = tuple(name for name in SHAPES if name not in ("music-2", "music-10", "mnist-64"))

# One size grows at a time from this shape.
GROWTH_FROM = Shape("growth", 64, (128,), 128, 32, 128)
GROWTH: dict[str, tuple[int, ...]] = {
    "steps": (32, 128, 512, 2048),
    "batch": (1, 8, 32, 128),
    "hidden_size": (16, 32, 64, 128, 256, 512),
    "depth": (1, 2, 5, 10),
    "runs": (1, 5, 20),
}

PRECISIONS = ("float32", "tf32", "bfloat16")
CALMER = 0.7  # times the initial weights, where results are compared
TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "bfloat16": 2e-1}  # of y and gradients, relative in norm


def grown(size: str, value: int) -> Shape:
    """:data:`GROWTH_FROM` with one size changed."""
    name = f"{size}={value}"
    if size == "depth":
        return replace(GROWTH_FROM, name=name, transition=(GROWTH_FROM.hidden_size,) * (value - 1))
    if size == "hidden_size":
        return replace(GROWTH_FROM, name=name, hidden_size=value, transition=(value,))
    sizes: dict[str, Any] = {size: value}
    return replace(GROWTH_FROM, name=name, **sizes)


def weights_of(module: nn.Module) -> int:
    """How many weights a module has."""
    return sum(parameter.numel() for parameter in module.parameters())


def equal_weights(make: Callable[[int], nn.Module], wanted: int) -> int:
    """The state size at which ``make`` comes closest to this many weights."""
    low, high = 1, 2
    while weights_of(make(high)) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if weights_of(make(middle)) < wanted else (low, middle)
    return min((low, high), key=lambda size: abs(weights_of(make(size)) - wanted))


# --- contestants -----------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """Something to be timed: ``run(x)`` gives y, ``leaves`` are what gradients are asked for.

    ``error(x)`` is the largest relative error of y and of the weights' gradients against the definition in float64.
    """

    name: str
    run: Model
    leaves: list[Tensor]
    weights: int
    hidden_size: int
    error: Callable[[Tensor], float] | None = None


def ours(shape: Shape, cell: str, engine: str, device: str, recompute: bool = False) -> Contestant:
    """One of our layers on one engine; with several runs, all of them in one call."""

    def make(engine: str, activation: str = "leaky_relu", **options: Any) -> Any:
        m, d, hidden = shape.input_size, shape.hidden_size, list(shape.transition)
        if cell == "DMU":
            return dm.DMU(m, d, transition=hidden, activation=activation, engine=engine, **options)
        if cell == "RHN":
            return dm.RHN(m, rhn_size(shape), depth=len(hidden) + 1, engine=engine, **options)
        return getattr(dm, cell)(m, d, engine=engine, **options)

    torch.manual_seed(0)
    options: dict[str, Any] = {"recompute": recompute, "device": device}
    name = f"dm.{cell} ({engine}{', recompute' if recompute else ''})"
    if shape.runs > 1:
        modules = [make(engine, **options) for _ in range(shape.runs)]
        stacked, _ = torch.func.stack_module_state(modules)
        skeleton = make(engine, device="meta", recompute=recompute)
        call = torch.vmap(lambda p, x: torch.func.functional_call(skeleton, p, (x,))[0])
        weights, size = weights_of(modules[0]), modules[0].hidden_size
        return Contestant(name, lambda x: call(stacked, x), list(stacked.values()), weights, size)

    module = make(engine, **options)

    def error(x: Tensor) -> float:
        # With tanh: a leaky ReLU whose input rounds to the other side of zero is off by more than any arithmetic.
        # With smaller weights: thirty layers as they start out are chaotic, and no two ways to compute them agree.
        given = make(engine, "tanh", **options)
        with torch.no_grad():
            for parameter in given.parameters():
                parameter.mul_(CALMER)
        law = make("plain", "tanh", device=device, dtype=torch.float64)
        law.load_state_dict(given.state_dict())
        y = given(x)[0]
        results = [y, *torch.autograd.grad(y.float().sum(), list(given.parameters()))]
        with torch.autocast(device, enabled=False):
            y = law(x.double())[0]
        expected = [y, *torch.autograd.grad(y.sum(), list(law.parameters()))]
        pairs = zip(results, expected, strict=True)
        return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)

    return Contestant(
        name, lambda x: module(x)[0], list(module.parameters()), weights_of(module), module.hidden_size, error
    )


def rhn_size(shape: Shape) -> int:
    """The state size of an RHN of the same depth and as many weights."""
    dmu = dm.DMU(shape.input_size, shape.hidden_size, transition=list(shape.transition), engine="plain")
    depth = len(shape.transition) + 1
    return equal_weights(lambda d: dm.RHN(shape.input_size, d, depth=depth, device="meta"), weights_of(dmu))


def torch_peer(shape: Shape, kind: str, device: str, equal: str) -> Contestant:
    """torch.nn's layer with as many weights as the DMU, or with the same state size; runs are a Python loop."""
    make = getattr(nn, kind)
    size = shape.hidden_size
    if equal == "weights":
        dmu = dm.DMU(shape.input_size, size, transition=list(shape.transition), engine="plain", device="meta")
        size = equal_weights(lambda d: make(shape.input_size, d, device="meta"), weights_of(dmu))
    modules = [make(shape.input_size, size).to(device) for _ in range(shape.runs)]

    def run(x: Tensor) -> Tensor:
        if shape.runs == 1:
            return modules[0](x)[0]
        return torch.stack([module(one)[0] for module, one in zip(modules, x, strict=True)])

    leaves = [parameter for module in modules for parameter in module.parameters()]
    return Contestant(f"nn.{kind}, equal {equal}", run, leaves, weights_of(modules[0]), size)


def jax_peer(shape: Shape) -> Callable[[], None] | None:
    """JAX's ``lax.scan`` of the same DMU, forward and backward, compiled; None where JAX is not installed."""
    if util.find_spec("jax") is None or shape.runs > 1:
        return None
    import jax
    import jax.numpy as jnp

    sizes = [shape.input_size + shape.hidden_size, *shape.transition, 2 * shape.hidden_size]
    key = jax.random.key(0)
    weights = [(jax.random.normal(key, (i, o)) / math.sqrt(i), jnp.zeros(o)) for i, o in pairwise(sizes)]
    x = jax.random.normal(key, (shape.steps, shape.batch, shape.input_size))

    def loss(weights: Any, x: Any) -> Any:
        def step(h: Any, x_t: Any) -> Any:
            a = jnp.concatenate([x_t, h], -1) @ weights[0][0] + weights[0][1]
            for weight, bias in weights[1:]:
                a = jax.nn.leaky_relu(a, 0.01) @ weight + bias
            z, candidate = jnp.split(a, 2, -1)
            keep = jax.nn.sigmoid(z)
            h = h * keep + jnp.tanh(candidate) * (1 - keep)
            return h, h

        return jax.lax.scan(step, jnp.zeros((shape.batch, shape.hidden_size)), x)[1].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(compiled(weights, x))


# --- measuring -------------------------------------------------------------------------------------------


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Float32 in earnest, with TF32, or autocast to bfloat16."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, enabled=name == "bfloat16"):
            yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def timings(call: Callable[[], object], device: str, seconds: float) -> dict[str, float]:
    """Median and quartiles of one call, in milliseconds.

    A sample is as many calls in a row as fit into 20 ms, ten at most, as in a training loop: on a GPU the host
    runs ahead and only the end of the sample is waited for.
    """

    def sample(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / calls

    for _ in range(3):
        once = sample(1)
    calls = max(1, min(10, int(20 / once)))
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - started < seconds and len(samples) < 200):
        samples.append(sample(calls))
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median_ms": median, "quartile_1_ms": low, "quartile_3_ms": high, "samples": len(samples)}


def measure(contestant: Contestant, x: Tensor, device: str, seconds: float, graph: bool) -> dict[str, Any]:
    """Forward alone, forward and backward, and on a GPU the same replayed as a CUDA graph."""
    leaves = [x, *contestant.leaves]

    def both() -> object:
        return torch.autograd.grad(contestant.run(x).sum(), leaves)

    def forward() -> object:
        with torch.no_grad():
            return contestant.run(x)

    row: dict[str, Any] = {"forward": timings(forward, device, seconds / 2)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    row["forward_backward"] = timings(both, device, seconds)
    if device == "cuda":
        row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if graph:
            try:
                replay = captured(both)
            except RuntimeError as error:  # a peer may do what no graph can hold; its eager time stands
                row["graph_failed"] = described_error(error)
            else:
                row["as_cuda_graph"] = timings(replay, device, seconds / 2)
    return row


def described_error(error: Exception) -> str:
    """An exception as one entry of the results."""
    return f"{type(error).__name__}: {error}"[:400]


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
    return graph.replay


def contestants(
    shape: Shape, device: str, mode: str, cells: list[str], slow: bool, engines: Container[str]
) -> Iterator[Contestant]:
    """Those of our ``engines`` that can do the case, and the peers."""
    for cell in cells:
        for engine, status in dm.engines().items():
            other_device = engine != "plain" and (engine == "cpu") != (device == "cpu")
            if engine not in engines or not status.available or other_device:
                continue
            if engine == "plain" and not (slow and cell == "DMU"):
                continue
            yield ours(shape, cell, engine, device)
            if cell == "DMU" and engine != "plain" and shape.runs == 1 and len(shape.transition) == 9:
                yield ours(shape, cell, engine, device, recompute=True)
    for kind in ("GRU", "LSTM", "RNN") if slow else ("GRU", "LSTM"):
        for equal in ("weights", "size") if slow else ("weights",):
            yield torch_peer(shape, kind, device, equal)


def bench_shape(
    shape: Shape,
    device: str,
    mode: str,
    seconds: float,
    cells: list[str],
    slow: bool = True,
    done: Callable[[dict[str, Any]], None] = lambda row: print(line(row)),
    engines: Container[str] = NAMES,
) -> list[dict[str, Any]]:
    """Time every contestant at one shape and hand each result to ``done`` at once; a wrong result gets no time."""
    generator = torch.Generator(device).manual_seed(1)
    runs = [shape.runs] if shape.runs > 1 else []
    size = [*runs, shape.steps, shape.batch, shape.input_size]
    x = torch.randn(size, generator=generator, device=device).requires_grad_()
    rows = []
    with precision(mode, device):
        for contestant in contestants(shape, device, mode, cells, slow, engines):
            row: dict[str, Any] = {
                "shape": asdict(shape),
                "precision": mode,
                "contestant": contestant.name,
                "weights": contestant.weights,
                "hidden_size": contestant.hidden_size,
            }
            try:
                row["error"] = contestant.error(x) if contestant.error else None
                if row["error"] is not None and not row["error"] < TOLERANCE[mode]:
                    row["wrong"] = f"relative error {row['error']:.1e} is over {TOLERANCE[mode]:.0e}: no time"
                else:
                    row |= measure(contestant, x, device, seconds, graph="plain" not in contestant.name)
            except Exception as error:
                row["failed"] = described_error(error)
            rows.append(row)
            done(row)
            gc.collect()
    call = jax_peer(shape) if device == "cpu" and mode == "float32" and slow else None
    if call is not None:
        row = {"shape": asdict(shape), "precision": mode, "contestant": "JAX lax.scan of the DMU"}
        rows.append(row | {"forward_backward": timings(call, "cpu", seconds)})
        done(rows[-1])
    return rows


def line(row: dict[str, Any]) -> str:
    """One result as text."""
    head = f"{row['shape']['name']:>12} {row['precision']:>8} {row['contestant']:<26}"
    if "forward_backward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    text = f"{head} {row['forward_backward']['median_ms']:9.3f} ms"
    if "forward" in row:
        text += f"   forward {row['forward']['median_ms']:8.3f}"
    if "as_cuda_graph" in row:
        text += f"   graph {row['as_cuda_graph']['median_ms']:8.3f}"
    if "graph_failed" in row:
        text += f"   no graph: {row['graph_failed']}"
    return text


def machine(device: str) -> dict[str, str]:
    """What the times were taken on."""
    names = ("torch", "triton", "jax")
    versions = {name: metadata.version(name) for name in names if util.find_spec(name)}
    where = {"python": platform.python_version(), "system": platform.system(), **versions}
    if device == "cuda":
        where |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        where["cudnn"] = str(torch.backends.cudnn.version())
    else:
        where |= {"cpu": cpu_name(), "threads": str(torch.get_num_threads())}
        where["instructions"] = torch.backends.cpu.get_cpu_capability()
    return where


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for entry in info.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def bench(
    device: str,
    shapes: list[str],
    modes: list[str],
    cells: list[str],
    seconds: float,
    growth: bool,
    slow: bool,
    out: Path,
    say: Callable[[str], None] = print,
    engines: Container[str] = NAMES,
) -> dict[str, Any]:
    """Time all of it; the JSON file is there from the start and whole after every single result."""
    result: dict[str, Any] = {"machine": machine(device), "shapes": [], "growth": []}

    def keep(to: str, row: dict[str, Any] | None = None) -> None:
        if row is not None:
            result[to].append(row)
            say(line(row))
        put(out, f"{json.dumps(result, indent=1)}\n".encode())  # a cut while writing leaves the last whole file

    keep("shapes")
    for mode in modes:
        for name in shapes:
            everything = slow and mode == "float32"
            bench_shape(SHAPES[name], device, mode, seconds, cells, everything, partial(keep, "shapes"), engines)
    if growth:
        for size, values in GROWTH.items():
            for value in values:
                done = partial(keep, "growth")
                bench_shape(grown(size, value), device, modes[0], seconds / 2, ["DMU"], False, done, engines)
    return result


# --- tables and pictures -----------------------------------------------------------------------------------


def times(result: dict[str, Any], mode: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of one precision by shape and contestant, where a time was taken."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["shapes"]:
        if row["precision"] == mode and "forward_backward" in row:
            table.setdefault(row["shape"]["name"], {})[row["contestant"]] = row
    return table


def chosen(rows: dict[str, dict[str, Any]], cell: str = "DMU") -> dict[str, Any] | None:
    """Our time at one shape, on the engine that ``engine="auto"`` takes there."""
    plain, *fused = dm.engines()  # which lists them in the order of preference
    own = (rows.get(f"dm.{cell} ({engine})") for engine in (*fused, plain))
    return next((row for row in own if row), None)


def described(shape: dict[str, Any]) -> str:
    """A shape in a few words: input, hidden widths of the transition, state; batch, steps, runs."""
    hidden = shape["transition"]
    alike = len(hidden) > 1 and len(set(hidden)) == 1
    widths = f"{len(hidden)}x[{hidden[0]}]" if alike else f"[{', '.join(map(str, hidden))}]"
    text = f"{shape['input_size']} {widths} {shape['hidden_size']}, B {shape['batch']}, T {shape['steps']}"
    return text + (f", {shape['runs']} runs" if shape["runs"] > 1 else "")


def median(row: dict[str, Any] | None, way: str) -> float | None:
    """Milliseconds of one result, where they were taken in this way."""
    return row[way]["median_ms"] if row and way in row else None


def written(value: float | None, bold: bool = False) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"**{value:.3g}**" if bold else f"{value:.3g}"


def table_of(header: list[str], lines: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def speed_table(result: dict[str, Any]) -> str:
    """Forward + backward in milliseconds, as Markdown."""
    return gpu_table(result) if "gpu" in result["machine"] else cpu_table(result)


PEERS = ("nn.GRU, equal weights", "nn.LSTM, equal weights")


def cpu_table(result: dict[str, Any]) -> str:
    """The Python loop, torch's layers of as many weights, ours, and ratios."""
    lines = []
    for name, rows in times(result, "float32").items():
        if best := chosen(rows):
            mine = median(best, "forward_backward")
            others = [median(rows.get(peer), "forward_backward") for peer in ("dm.DMU (plain)", *PEERS)]
            cells = [f"`{name}`: {described(best['shape'])}", *map(written, others), written(mine, bold=True)]
            lines.append([*cells, *(written(other / mine if other and mine else None) for other in others[:2])])
    header = ["shape", "Python loop", "nn.GRU", "nn.LSTM", "dm.DMU", "loop / DMU", "nn.GRU / DMU"]
    return table_of(header, lines)


def gpu_table(result: dict[str, Any]) -> str:
    """Ours, and the better of torch's GRU and LSTM of as many weights: as CUDA graphs in each precision, and eager."""
    tables = {mode: times(result, mode) for mode in PRECISIONS}
    lines = []
    for name in tables["float32"]:
        shape = next(iter(tables["float32"][name].values()))["shape"]
        cells = [f"`{name}`: {described(shape)}"]
        for mode, way in [*((mode, "as_cuda_graph") for mode in PRECISIONS), ("float32", "forward_backward")]:
            rows = tables[mode].get(name, {})
            peers = [time for peer in PEERS if (time := median(rows.get(peer), way)) is not None]
            cells.append(f"{written(median(chosen(rows), way), bold=True)} / {written(min(peers, default=None))}")
        lines.append(cells)
    return table_of(["shape", *("float32", "TF32", "bfloat16"), "float32, without a graph"], lines)


LOOKS = {  # line and colour of a curve, by how its name begins
    "dm.DMU (cpu": ("o-", "#0072B2"),
    "dm.DMU (nvrtc": ("o-", "#0072B2"),
    "dm.DMU (triton": ("d-.", "#56B4E9"),
    "nn.GRU": ("s--", "#D55E00"),
    "nn.LSTM": ("^:", "#009E73"),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Time relative to nn.GRU of as many weights at every shape, and how time grows with each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    table = times(result, "float32")
    sizes = [size for size in GROWTH if any(row["shape"]["name"].startswith(size + "=") for row in result["growth"])]
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(4.5 + 2.6 * len(sizes), 3.6), layout="constrained")
    first = axes[0] if sizes else axes
    series = {"nn.LSTM": "nn.LSTM, equal weights", "dm.DMU": None}
    for offset, (label, name) in enumerate(series.items()):
        ratios = []
        for rows in table.values():
            row, base = rows.get(name) if name else chosen(rows), rows.get("nn.GRU, equal weights")
            times_of = [r["forward_backward"]["median_ms"] for r in (row, base) if r]
            ratios.append(times_of[0] / times_of[1] if len(times_of) == 2 else math.nan)
        places = [place + 0.4 * offset - 0.2 for place in range(len(table))]
        first.barh(places, ratios, 0.38, label=label, color=("#999999", "#0072B2")[offset])
    first.axvline(1, color="black", linewidth=1)
    first.set_yticks(range(len(table)), list(table))
    first.invert_yaxis()
    first.set_xlabel("time of nn.GRU of as many weights = 1")
    first.set_title("forward + backward, float32", fontsize=10)
    first.legend(fontsize=8)
    for axis, size in zip(axes[1:] if sizes else [], sizes, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in result["growth"]:
            if row["shape"]["name"].startswith(size + "=") and "forward_backward" in row:
                value = int(row["shape"]["name"].split("=")[1])
                curves.setdefault(row["contestant"], []).append((value, row["forward_backward"]["median_ms"]))
        for name, points in sorted(curves.items()):
            style, color = next(look for start, look in LOOKS.items() if name.startswith(start))
            style = style if "recompute" not in name else "x"
            axis.loglog(*zip(*points, strict=True), style, label=name, color=color, markersize=4)
        axis.set_xticks(GROWTH[size], [str(value) for value in GROWTH[size]], fontsize=7)
        axis.minorticks_off()
        axis.set_xlabel(size.replace("_", " "))
        axis.set_ylabel("ms")
        axis.legend(fontsize=6)
    figure.savefig(path)
    plt.close(figure)
