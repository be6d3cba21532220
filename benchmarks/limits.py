"""How fast a DMU could be on this GPU where torch's layers are faster: the chip's limits, and a floor for each shape.

python benchmarks/limits.py        # results/limits_h200.json: on a machine with an NVIDIA GPU, in under 25 seconds

Small kernels (``limits.cu``, compiled by NVRTC) measure what the engine's steps are made of: a barrier, a layer of a
step without its products, an exchange between multiprocessors, weights on their way from the L2 cache, products, a
kernel in a CUDA graph. Exchanges and copies check what they receive; the time of a kernel that found an error is
refused. ``floor`` adds up what the engine's layout needs of each.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p, cast
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from deepmemory.lab.bench.contestants import own_layer, torch_layer
from deepmemory.lab.bench.shapes import SHAPES, Shape
from deepmemory.lab.bench.speed import PRECISIONS, machine
from deepmemory.lab.bench.timing import describe_error, precision
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.writing import put
from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import MANY_STEPS, input_bytes, plans
from deepmemory.ops.nvrtc.plan import Shape as KernelShape
from deepmemory.ops.nvrtc.spread import EXACT, FMA, LOW, SPLIT, SPLIT_PRODUCTS, own_features

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "limits_h200.json"
BEHIND = ("ptb-1", "ptb-2", "ptb-10", "rl-step", "odd", "deep-30", "deep-wide", "deep-1000")
WARPS = (4, 8, 16)
CLUSTERS = (2, 4, 8, 16)  # whose exchange of 16 bytes is measured, whatever the layouts are
LAUNCHES = 7  # of which the median is taken
ROUNDS, EXCHANGES = 2**14, 2**11  # of a kernel's loop: enough to make the cost of the launch negligible
COPIED = 2**24  # bytes that a block copies at least
NODES = 1000  # kernels of a CUDA graph
LINES, LINE = 2**15, 128  # cache lines that dependent loads go through, and the bytes of one
COPIED_AT_ONCE = 16 * 4096  # bytes: a slot of each of a block's warps
COPY_SHARED = 16 * 2 * (8 + 4096)  # bytes: two slots of each warp, with a barrier
DEFINES = ("-DVALUE=1", "-DWEIGHT=0", "-DPRODUCT=1")  # that numbers.cuh requires; no kernel here depends on them
PARTS = {  # of a floor, as the table calls them
    "barriers": "barriers of a block",
    "exchanges": "exchanges between multiprocessors",
    "inputs": "inputs from the L2 cache",
    "weights": "weights from the L2 cache",
    "products": "products",
    "launches": "kernel launches",
}
Row = dict[str, Any]


class Exchange(NamedTuple):
    """What the blocks of a cluster send one another, for some clusters at once."""

    cluster: int
    number: str  # type of an element, in CUDA
    elements: int  # that a block sends to every block
    warps: int
    clusters: int

    @property
    def bytes(self) -> int:
        """Bytes that a block sends to every block."""
        return self.elements * (4 if self.number == "float" else 2)


class Copy(NamedTuple):
    """Weights that blocks read again and again: block b has slice b % slices of them."""

    slices: int
    bytes: int  # of a slice
    blocks: int


def case_of(shape: Shape, precision: str, device: nvrtc.Device) -> Row:
    """The layout that the engine takes for a shape, and the work of its sweeps, in numbers."""
    value = torch.bfloat16 if precision == "bfloat16" else torch.float32
    widths = (*shape.transition, shape.hidden_size)
    layer = KernelShape("dmu", "leaky_relu", shape.hidden_size, widths, value)
    products = EXACT if precision == "float32" else LOW
    steps = 1 if shape.steps == 1 else MANY_STEPS
    layout = plans(layer, products, 1, shape.batch, *device[1:], steps)[0]
    cluster, size = layout.cluster, input_bytes(layer, layout.product)
    clusters = -(-shape.batch // layout.rows)
    at_once = device.multiprocessors // cluster if cluster == 1 or layout.team else device.clusters_at_once[cluster]
    sent: dict[int, int] = {}  # elements that a block sends to every block: how many exchanges of a step, both sweeps
    for _, features, gates in layer.layers():
        own = layout.rows * own_features(features, cluster, layout.product, size)
        for elements in (own, gates * own):
            sent[elements] = sent.get(elements, 0) + 1
    weights = sum(inputs * features * gates for inputs, features, gates in layer.layers())
    received = sum(inputs + gates * features for inputs, features, gates in layer.layers()) * layout.rows * size
    of_x = shape.input_size * widths[0] * (2 if len(widths) == 1 else 1)
    rows = layout.rows if layout.product == FMA else -(-layout.rows // 8) * 8  # as the tensor cores take them
    return {
        "shape": shape.name,
        "precision": precision,
        "steps": shape.steps,
        "layers": len(widths),
        "sweep_product": {FMA: FMA, SPLIT: "tf32"}.get(layout.product, precision),
        "rows": layout.rows,
        "cluster": cluster,
        "team": layout.team,
        "warps": layout.warps,
        "clusters": clusters,
        "waves": -(-clusters // at_once),
        "number": "BFloat16" if size == 2 else "float",
        "sent": sorted(sent.items()) if cluster > 1 and not layout.team else [],
        "weight_bytes": 4 * weights,
        "streamed_bytes": [16 * sweep.streamed_quads for sweep in (layout.forward, layout.backward)],  # of a block
        # of a block, in one step, both sweeps
        "received_bytes": received if layout.team else 0,  # through the L2 cache
        "sweep_products": 2 * rows * weights // cluster * (SPLIT_PRODUCTS if layout.product == SPLIT else 1),
        # W_x X, the gradients of x, of W_x and of all other weights
        "other_products": shape.steps * shape.batch * (3 * of_x + weights),
    }


def exchanges_of(row: Row) -> list[Exchange]:
    return [Exchange(row["cluster"], row["number"], n, row["warps"], row["clusters"]) for n, _ in row["sent"]]


def copy_of(row: Row) -> Copy:
    """What a layout streams or, if all weights fit on the chip, what it loads when a sweep begins."""
    streamed = max(row["streamed_bytes"]) or row["weight_bytes"] / row["cluster"]
    size = max(1, round(streamed / COPIED_AT_ONCE)) * COPIED_AT_ONCE
    return Copy(row["cluster"], size, row["clusters"] * row["cluster"])


def node_of(row: Row) -> dict[str, int]:
    """The kernel of a sweep in a CUDA graph."""
    cluster = 1 if row["team"] else row["cluster"]
    return {"cluster": cluster, "blocks": row["clusters"] * row["cluster"], "warps": row["warps"]}


ONE_BLOCK = {"cluster": 1, "blocks": 1, "warps": 1}


def exchange_kernel(exchange: Exchange, work: bool) -> str:
    return f"exchanges_{exchange.cluster}_{exchange.number}_{'layer' if work else 'alone'}"


def source(exchanges: list[Exchange]) -> str:
    """The source of all kernels: the engine's exchange, the general kernels, and those for each cluster size."""
    lines = [compiler.FOLDER_OF_SOURCES.joinpath("numbers.cuh").read_text(), (HERE / "limits.cu").read_text()]
    for one in {(e.cluster, e.number): e for e in exchanges}.values():
        for work in (False, True):
            name = exchange_kernel(one, work)
            lines.append(f"EXCHANGES({name}, {one.cluster}, {one.number}, {str(work).lower()})")
    lines += [f"NOTHING(nothing_{cluster}, {cluster})" for cluster in sorted({e.cluster for e in exchanges})]
    return "\n".join(lines)


class Kernels:
    """The compiled kernels, and a count of the errors that they find."""

    def __init__(self, text: str, capability: tuple[int, int]) -> None:
        self.context, self.module = compiler._enter_context(torch.cuda.current_device()), c_void_p()
        cubin = compiler._compile(text, [*compiler._options(capability), *DEFINES])
        self.call("cuModuleLoadData", byref(self.module), cubin)
        self.errors = torch.zeros(1, dtype=torch.int64, device="cuda")

    @staticmethod
    def call(name: str, *arguments: object) -> None:
        compiler._check(getattr(compiler.driver(), name)(*arguments), name)

    def launcher(
        self, name: str, blocks: int, threads: int, *arguments: Any, shared: int = 0, together: bool = False
    ) -> Callable[[], None]:
        """A call that queues a kernel on the current stream; ``together``: all blocks are resident, or it fails."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), self.module, name.encode())
        if shared:
            self.call("cuFuncSetAttribute", function, compiler.MAX_DYNAMIC_SHARED_SIZE_BYTES, c_int(shared))
        if "16" in name.split("_"):
            self.call("cuFuncSetAttribute", function, compiler.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, c_int(1))
        values = [one if isinstance(one, c_float) else c_int64(one) for one in arguments]
        pointers = (c_void_p * max(1, len(values)))(*(cast(byref(value), c_void_p) for value in values))
        sizes = [c_uint(size) for size in (blocks, 1, 1, threads, 1, 1, shared)]

        def launch(_kept: object = values) -> None:  # by address
            self.call("cuCtxSetCurrent", self.context)  # autograd's thread has none at first
            stream = c_void_p(torch.cuda.current_stream().cuda_stream)
            if together:
                self.call("cuLaunchCooperativeKernel", function, *sizes, stream, pointers)
            else:
                self.call("cuLaunchKernel", function, *sizes, stream, pointers, None)

        return launch

    def microseconds(self, launch: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """The median of several launches, of which the first does not count; raises if a kernel found errors."""
        self.errors.zero_()
        times = []
        for _ in range(1 + LAUNCHES):
            before()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
            if found := int(self.errors.item()):
                raise RuntimeError(f"{found} wrong or lost messages")
        return median(times[1:])


ONE, ZERO = c_float(1.0), c_float(0.0)


class Measuring:
    """How each row of the results is measured."""

    def __init__(self, kernels: Kernels, device: nvrtc.Device) -> None:
        self.kernels, self.device = kernels, device
        self.errors = kernels.errors.data_ptr()
        self.all_of_it = device.shared_limit  # of the shared memory: a block has a multiprocessor to itself

    def warm_up(self, seconds: float = 0.5) -> None:
        """Multiply until the clock is as fast as it gets."""
        launch = self.kernels.launcher("multiply_fma", self.device.multiprocessors, 512, ROUNDS, ONE, ZERO, self.errors)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            launch()
            torch.cuda.synchronize()

    def barrier(self, warps: int) -> Row:
        launch = self.kernels.launcher("barriers", 1, 32 * warps, ROUNDS)
        return {"us": self.kernels.microseconds(launch) / ROUNDS}

    def layer_in_a_block(self, kind: str, warps: int) -> Row:
        arguments, shared = (ROUNDS, ONE, ZERO, self.errors), 32 * warps * 12
        launch = self.kernels.launcher(f"layers_in_a_block_{kind}", 1, 32 * warps, *arguments, shared=shared)
        return {"us": self.kernels.microseconds(launch) / ROUNDS}

    def exchange(self, exchange: Exchange, work: bool) -> Row:
        threads, blocks = 32 * exchange.warps, exchange.cluster * exchange.clusters
        arguments = EXCHANGES, exchange.elements, ONE, ZERO, self.errors
        launch = self.kernels.launcher(
            exchange_kernel(exchange, work), blocks, threads, *arguments, shared=self.all_of_it
        )
        return {"us": self.kernels.microseconds(launch) / EXCHANGES}

    def exchange_of_all(self, apart: int) -> Row:
        blocks = self.device.multiprocessors
        slots = torch.zeros(2 * blocks * apart // 4, dtype=torch.int32, device="cuda")
        threads, arguments = -(-blocks // 32) * 32, (EXCHANGES, slots.data_ptr(), apart // 16, self.errors)
        launch = self.kernels.launcher(
            "exchanges_of_all", blocks, threads, *arguments, shared=self.all_of_it, together=True
        )
        return {"us": self.kernels.microseconds(launch, before=slots.zero_) / EXCHANGES}

    def dependent_load(self) -> Row:
        order = torch.randperm(LINES, generator=torch.Generator().manual_seed(0))
        memory = torch.zeros(LINES, LINE // 8, dtype=torch.int64)
        address = torch.empty(LINES, LINE // 8, dtype=torch.int64, device="cuda")
        memory[order, 0] = address.data_ptr() + LINE * order.roll(-1)
        address.copy_(memory)
        first, last = (address.data_ptr() + LINE * int(order[at]) for at in (0, ROUNDS))
        launch = self.kernels.launcher("dependent_loads", 1, 1, ROUNDS, first, last, self.errors)
        return {"us": self.kernels.microseconds(launch) / ROUNDS}

    def product(self, kind: str) -> Row:
        """Multiplications of one multiprocessor, while all of them multiply."""
        warps, rounds = 16, 2 * ROUNDS
        arguments = rounds, ONE, ZERO, self.errors
        blocks = self.device.multiprocessors
        launch = self.kernels.launcher(f"multiply_{kind}", blocks, 32 * warps, *arguments, shared=self.all_of_it)
        of_warp = {"fma": 32, "tf32": 16 * 8 * 8, "bfloat16": 16 * 8 * 16}[kind]
        return {"per_us": rounds * warps * 8 * of_warp / self.kernels.microseconds(launch)}

    def copy(self, copy: Copy) -> Row:
        words = torch.arange(copy.slices * copy.bytes // 4, dtype=torch.int32, device="cuda")
        passes = -(-COPIED // copy.bytes)
        arguments = passes, words.data_ptr(), copy.slices, copy.bytes // 16, self.errors
        launch = self.kernels.launcher("copies", copy.blocks, 512, *arguments, shared=COPY_SHARED)
        return {"bytes_per_us": passes * copy.blocks * copy.bytes / self.kernels.microseconds(launch)}

    def node(self, cluster: int, blocks: int, warps: int) -> Row:
        launch = self.kernels.launcher("nothing" if cluster == 1 else f"nothing_{cluster}", blocks, 32 * warps)
        launch()
        graph = capture(lambda: [launch() for _ in range(NODES)])
        return {"us": self.kernels.microseconds(graph.replay) / NODES}

    def nodes(self, layer: str, shape: str, mode: str) -> Row:
        """The nodes of forward and backward pass in a CUDA graph.

        Kernels of the engine, which would have to be compiled for each shape, are replaced by empty ones.
        """
        nothing = self.kernels.launcher("nothing", 1, 32)
        stand_in = SimpleNamespace(sweep=lambda *_: nothing(), sum_products=lambda *_: nothing())
        with (
            mock.patch.object(nvrtc, "_kernels", return_value=stand_in),
            mock.patch.dict(nvrtc._layers, clear=True),
            precision(mode, "cuda"),
        ):
            size = SHAPES[shape]
            if layer == "dm.DMU":
                contestant = own_layer(size, "DMU", "nvrtc", "cuda")
            else:
                contestant = torch_layer(size, layer.removeprefix("nn."), "cuda", "weights")
            x = torch.zeros(size.steps, size.batch, size.input_size, device="cuda", requires_grad=True)
            leaves = [x, *contestant.leaves]
            return count_nodes(lambda: torch.autograd.grad(contestant.run(x).sum(), leaves))


def capture(call: Callable[[], object], **options: bool) -> torch.cuda.CUDAGraph:
    graph, current = torch.cuda.CUDAGraph(**options), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
    return graph


def count_nodes(call: Callable[[], object]) -> Row:
    """How many kernels, and how many nodes of other kinds, a CUDA graph of a call has."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = capture(call, keep_graph=True)
    handle, count = c_void_p(graph.raw_cuda_graph()), c_size_t()
    Kernels.call("cuGraphGetNodes", handle, None, byref(count))
    nodes, kinds = (c_void_p * count.value)(), []
    Kernels.call("cuGraphGetNodes", handle, nodes, byref(count))
    for node in nodes:
        kind = c_int()
        Kernels.call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        kinds.append(kind.value)
    return {"kernels": kinds.count(0), "others": len(kinds) - kinds.count(0)}  # 0: CU_GRAPH_NODE_TYPE_KERNEL


def all_exchanges(cases: list[Row], device: nvrtc.Device) -> list[Exchange]:
    small = [Exchange(size, "BFloat16", 8, 16, 1) for size in CLUSTERS if size in device.clusters_at_once]
    return list(dict.fromkeys([*small, *(one for row in cases for one in exchanges_of(row))]))


def measurements(measuring: Measuring, cases: list[Row]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """The settings of each row of the results, and how to measure it; what could leave the GPU unusable comes last."""
    device = measuring.device

    def row(what: str, call: Callable[..., Row], **settings: Any) -> tuple[Row, Callable[[], Row]]:
        return {"what": what, **settings}, partial(call, **settings)

    for warps in WARPS:
        yield row("barrier", measuring.barrier, warps=warps)
    for kind in ("hidden", "gate"):
        for warps in WARPS:
            yield row("layer in a block", measuring.layer_in_a_block, kind=kind, warps=warps)
    yield row("dependent load", measuring.dependent_load)
    for kind in ("fma", *(("tf32", "bfloat16") if device.capability >= (8, 0) else ())):
        yield row("product", measuring.product, kind=kind)
    sizes = [ONE_BLOCK, *(node_of(one) for one in cases)]
    for size in {tuple(size.items()): size for size in sizes}.values():
        yield row("node", measuring.node, **size)
    for one in cases:
        yield row("nodes", measuring.nodes, layer="dm.DMU", shape=one["shape"], mode=one["precision"])
    for mode in PRECISIONS:
        yield row("nodes", measuring.nodes, layer="nn.GRU", shape="rl-step", mode=mode)
    if device.clusters_at_once:
        for copy in dict.fromkeys(copy_of(one) for one in cases):
            yield {"what": "copy", **copy._asdict()}, partial(measuring.copy, copy)
        for exchange in all_exchanges(cases, device):
            for work in (False, True):
                settings = {"what": "exchange", **exchange._asdict(), "sent_bytes": exchange.bytes, "work": work}
                yield settings, partial(measuring.exchange, exchange, work)
    for apart in (16, 128):
        yield row("exchange of all", measuring.exchange_of_all, apart=apart)


def find(rows: list[Row], **settings: Any) -> Row:
    """The row that was measured with these settings; LookupError if there is none, or it failed."""
    for row in rows:
        if "failed" not in row and all(row.get(name) == value for name, value in settings.items()):
            return row
    raise LookupError(f"not measured: {settings}")


def floor(one: Row, rows: list[Row], multiprocessors: int) -> dict[str, float]:
    """Least time in milliseconds of forward and backward pass with this layout: its parts, and the total.

    Layers follow one another, and each waits, receives its inputs and multiplies. Weights that do not fit on the chip
    are streamed meanwhile. Loading the weights that fit, products that do not recur, and launches come before or after.
    """
    steps = one["steps"] * one["waves"]
    hidden, gate = (find(rows, what="layer in a block", kind=k, warps=one["warps"])["us"] for k in ("hidden", "gate"))
    if one["cluster"] == 1:
        of_step = 2 * one["layers"] * hidden
    elif one["team"]:  # an exchange ends with one of the two barriers of a layer
        barrier = find(rows, what="barrier", warps=one["warps"])["us"]
        exchange = find(rows, what="exchange of all", apart=128)["us"]
        of_step = 2 * one["layers"] * (exchange + hidden - barrier)
    else:
        found = [find(rows, what="exchange", work=True, **sent._asdict())["us"] for sent in exchanges_of(one)]
        of_step = sum(count * us for (_, count), us in zip(one["sent"], found, strict=True))
    waiting = steps * (of_step + gate - hidden)
    multiplying = steps * one["sweep_products"] / find(rows, what="product", kind=one["sweep_product"])["per_us"]
    kind = "fma" if one["precision"] == "float32" else one["precision"]
    hoisted = one["other_products"] / multiprocessors / find(rows, what="product", kind=kind)["per_us"]
    rate = find(rows, what="copy", **copy_of(one)._asdict())["bytes_per_us"]
    blocks = one["clusters"] * one["cluster"]
    receiving = one["steps"] * blocks * one["received_bytes"] / rate
    streaming = one["steps"] * blocks * sum(one["streamed_bytes"]) / rate
    loading = 2 * one["clusters"] * one["weight_bytes"] / rate
    kernels = find(rows, what="nodes", layer="dm.DMU", shape=one["shape"], mode=one["precision"])["kernels"]
    node, sweep = (find(rows, what="node", **size)["us"] for size in (ONE_BLOCK, node_of(one)))
    launches = (kernels - 2) * node + 2 * sweep
    parts = {
        "barriers" if one["cluster"] == 1 else "exchanges": waiting,
        "inputs": receiving,
        "weights": loading + streaming,
        "products": multiplying + hoisted,
        "launches": launches,
    }
    total = launches + loading + hoisted + max(streaming + receiving, waiting + receiving + multiplying)
    return {name: us / 1e3 for name, us in (parts | {"floor": total}).items()}


def floors(result: Row) -> list[tuple[Row, dict[str, float] | None]]:
    """The floor of each case, None if something that it needs could not be measured."""
    found: list[tuple[Row, dict[str, float] | None]] = []
    for one in result["cases"]:
        try:
            found.append((one, floor(one, result["rows"], result["device"]["multiprocessors"])))
        except LookupError:
            found.append((one, None))
    return found


def summary(result: Row) -> Row:
    """The summary of the measurements: the chip's limits as cells of a table, and the parts of every floor."""
    found = [{"shape": one["shape"], "precision": one["precision"], "parts": parts} for one, parts in floors(result)]
    return {"limits": chip_rows(result["rows"]), "floors": found}


def chip_rows(rows: list[Row]) -> list[list[str]]:
    """The chip's limits as cells of a table; those that were not measured are left out."""

    def time(us: float) -> str:
        return f"{us:.2f} µs" if us >= 1 else f"{1e3 * us:.0f} ns"

    cells = []
    for row in (row for row in rows if "failed" not in row):
        if row["what"] == "barrier":
            cells.append([f"barrier of a block of {row['warps']} warps", time(row["us"])])
        elif row["what"] == "layer in a block" and row["kind"] == "hidden":
            cells.append([f"layer in a block of {row['warps']} warps, without its products", time(row["us"])])
        elif row["what"] == "exchange" and not row["work"] and row["clusters"] == 1:
            cells.append([f"exchange of {row['sent_bytes']} bytes between {row['cluster']} blocks", time(row["us"])])
        elif row["what"] == "exchange" and row["work"] and row["cluster"] == 16 and row["number"] == "BFloat16":
            name = f"layer in clusters of 16 blocks, without its products, {row['sent_bytes']} bytes to each block"
            cells.append([name, time(row["us"])])
        elif row["what"] == "dependent load":
            cells.append(["dependent load from the L2 cache", time(row["us"])])
        elif row["what"] == "node" and row["warps"] == 1:
            cells.append(["kernel in a CUDA graph, one block", time(row["us"])])
        elif row["what"] == "node" and row["cluster"] == 16:
            name = f"kernel in a CUDA graph, {row['blocks']} blocks in clusters of 16"
            cells.append([name, time(row["us"])])
    of_all = [row["us"] for row in rows if row["what"] == "exchange of all" and "us" in row]
    rates = [row["bytes_per_us"] for row in rows if row["what"] == "copy" and "bytes_per_us" in row]
    cells += [["exchange of 16 bytes between all multiprocessors", time(min(of_all))]] if of_all else []
    if rates:
        text = f"{min(rates) / 1e6:.1f} to {max(rates) / 1e6:.1f} TB/s"
        cells.append(["weights from the L2 cache to all multiprocessors of a layout", text])
    counted = [row for row in rows if row["what"] == "nodes" and "kernels" in row]
    both = [row["kernels"] for row in counted if (row["shape"], row["mode"]) == ("rl-step", "float32")]
    if len(both) == 2:
        cells.append(["kernels of `rl-step` in float32, `dm.DMU` / `nn.GRU`", " / ".join(map(str, both))])
    return cells


def measure(device: nvrtc.Device, out: Path, seconds: float) -> Row:
    """Measure everything; the file is complete after every kind of row, and a row that failed says why."""
    begin = time.monotonic()
    cases = [case_of(SHAPES[name], mode, device) for name in BEHIND for mode in PRECISIONS]
    result: Row = {
        "what": "limits of a GPU, in microseconds (us) for each round of a kernel's loop, median of "
        f"{LAUNCHES} launches; what the layouts of the nvrtc engine need of each, for forward and backward pass",
        "when": now(),
        "machine": machine("cuda") | {"nvrtc": ".".join(map(str, compiler.nvrtc_version()))},
        "git": git_commit(),
        "device": device._asdict(),
        "cases": cases,
        "rows": [],
    }
    if not device.clusters_at_once:
        result["note"] = "this GPU has no clusters of blocks: no exchanges inside of them, no copies, few floors"
    measuring = Measuring(Kernels(source(all_exchanges(cases, device)), device.capability), device)
    measuring.warm_up()
    for _, group in groupby(measurements(measuring, cases), lambda pair: pair[0]["what"]):
        for row, call in group:
            try:
                if time.monotonic() - begin > seconds:
                    raise TimeoutError(f"not measured after {seconds:g} seconds")
                row |= call()
            except Exception as problem:
                row["failed"] = describe_error(problem)
            result["rows"].append(row)
        put(out, (json.dumps(result | summary(result), indent=1) + "\n").encode())
    return result | summary(result)


def main(out: Path, seconds: float) -> None:
    if why := nvrtc.unavailable():
        print(f"nothing to measure: {why}")
        return
    result = measure(nvrtc._device(torch.cuda.current_device()), out, seconds)
    for name, value in result["limits"]:
        print(f"{value:>16}  {name}")
    for one in result["floors"]:
        parts = one["parts"] or {}
        shown = " ".join(f"{name} {ms:.4f}" for name, ms in parts.items()) or "not all was measured"
        print(f"{one['shape']:>12} {one['precision']:>8}  {shown}")
    for row in result["rows"]:
        if "failed" in row:
            print(row)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--seconds", type=float, default=16.0, help="after which nothing more is measured")
    main(**vars(options.parse_args()))
