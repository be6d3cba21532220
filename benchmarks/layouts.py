"""Checks whether the GPU engine's plan takes the fastest layout: times those with the best estimates, for many shapes.

python benchmarks/layouts.py                          # results/layouts_h200.json: on a machine with an NVIDIA GPU
python benchmarks/layouts.py deep-wide residual-5 --precision bfloat16 --layouts 12

Shapes are those of ``dmu bench`` and the language models of ``dmu beyond depth --parts large``. Every layout is
compiled, checked against the definition and timed as a CUDA graph, forward and backward sweep separately. The
constants of ``plan.py`` and ``spread.py`` in ``deepmemory/ops/nvrtc`` are chosen so that the plan takes the layout
that is fastest here.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from deepmemory.lab.bench.contestants import WEIGHT_SCALE
from deepmemory.lab.bench.shapes import GPU_SHAPES, SHAPES
from deepmemory.lab.bench.speed import PRECISIONS, TOLERANCE, machine
from deepmemory.lab.bench.timing import captured, describe_error, precision, timings
from deepmemory.lab.beyond import depth
from deepmemory.lab.beyond.models import kind_of
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.writing import put
from deepmemory.ops import nvrtc, plain
from deepmemory.ops.layout import GATES
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import MANY_STEPS, Plan, Shape, microseconds, plans
from deepmemory.ops.nvrtc.spread import EXACT, LOW
from deepmemory.ops.recurrence import Recurrence, Sequences

RESULTS = Path(__file__).parent / "results" / "layouts_h200.json"
SECONDS = 0.05  # for which a sweep is timed
CHECKED_STEPS = 6
Row = dict[str, Any]


class Case(NamedTuple):
    """A layer and the size of its input; hidden layers have tanh, which has no kink that rounding could cross."""

    rec: Recurrence
    inputs: int
    hidden_size: int
    hidden: tuple[int, ...]  # widths between two states
    batch: int
    steps: int
    masked: bool = False  # the state

    def shape(self, mode: str) -> Shape:
        """What kernels are compiled for."""
        value = torch.bfloat16 if mode == "bfloat16" else torch.float32
        rec, widths = self.rec, (*self.hidden, self.hidden_size)
        options = {"residual": rec.residual, "state_mask": self.masked}
        return Shape(rec.cell, rec.activation, self.hidden_size, widths, value, torch.float32, **options)


def cases() -> dict[str, Case]:
    """The shapes of ``dmu bench`` that have one run, and the large language models, by kind and depth."""
    found = {
        name: Case(Recurrence("dmu", "tanh"), s.input_size, s.hidden_size, s.transition, s.batch, s.steps)
        for name, s in SHAPES.items()
        if name in GPU_SHAPES and s.runs == 1
    }
    for setting in depth.settings("large"):
        (width,) = setting.hidden
        hidden = setting.transition if setting.cell == "dmu" else (width,) * (setting.depth - 1)
        rec = Recurrence(setting.cell, "tanh", residual=setting.residual)
        name = f"{kind_of(setting)}-{len(hidden) + 1}" if setting.cell in ("dmu", "rhn") else setting.cell
        found[name] = Case(rec, width, width, hidden, setting.batch, setting.window, masked=True)
    return found


def candidates(case: Case, mode: str, device: nvrtc.Device, count: int) -> list[Plan]:
    """The layouts with the smallest estimates, the one that the plan takes first; no two that differ only in rows."""
    steps, products = 1 if case.steps == 1 else MANY_STEPS, EXACT if mode == "float32" else LOW
    different: dict[tuple, Plan] = {}
    for layout in plans(case.shape(mode), products, 1, case.batch, *device[1:], steps):
        kind = layout.product, layout.cluster, layout.team, layout.warps, layout.direct
        different.setdefault(kind, layout)
    return list(different.values())[:count]


def tensors(case: Case, mode: str, steps: int) -> tuple[Tensor, list[Tensor], list[Tensor], Sequences, Tensor]:
    """x, states, weights, a mask if there is one, and a gradient of y."""
    generator = torch.Generator().manual_seed(0)
    value = torch.bfloat16 if mode == "bfloat16" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", value)

    def matrix(*shape: int) -> Tensor:  # of values that the type can hold: rounding weights is no error of a sweep
        return (draw(*shape) * (WEIGHT_SCALE / shape[-1] ** 0.5)).to(value).float()

    rec, d = case.rec, case.hidden_size
    outputs = [GATES[rec.cell] * d if rec.cell != "dmu" else width for width in case.hidden] + [GATES[rec.cell] * d]
    weights = [matrix(outputs[0], case.inputs), matrix(outputs[0], d), matrix(outputs[0])]
    weights += [matrix(outputs[0])] if rec.classic else []
    for width, inputs in zip(outputs[1:], case.hidden, strict=True):
        weights += [matrix(width, inputs), matrix(width)]
    states = [draw(case.batch, d).tanh() for _ in range(rec.states)]
    mask = draw(case.batch, d).gt(-0.5).to(value) if case.masked else None
    return draw(steps, case.batch, case.inputs), states, weights, Sequences(state_mask=mask), draw(steps, case.batch, d)


def error(case: Case, mode: str) -> float:
    """The largest relative error, in norm, of y and of every gradient against the definition in float64."""
    x, states, weights, sequences, probe = tensors(case, mode, min(CHECKED_STEPS, case.steps))
    y, _, trace = nvrtc.forward(case.rec, x, states, weights, sequences, True)
    needs = [True] * (1 + len(states) + len(weights))
    given = [y, *nvrtc.backward(case.rec, probe, [None] * len(states), x, states, weights, sequences, y, trace, needs)]
    leaves = [t.double().requires_grad_() for t in (x, *states, *weights)]
    first = 1 + len(states)
    mask = sequences.state_mask
    exact = Sequences(state_mask=None if mask is None else mask.double())
    y, _ = plain.scan(case.rec, leaves[0], tuple(leaves[1:first]), leaves[first:], exact)
    wanted = [y, *torch.autograd.grad((y * probe.double()).sum(), leaves)]
    pairs = zip(given, wanted, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs if a is not None)


def sweep_times(case: Case, mode: str) -> list[float]:
    """Milliseconds of the forward and of the backward sweep."""
    x, states, weights, sequences, probe = tensors(case, mode, case.steps)
    with mock.patch.object(nvrtc, "_sweep", wraps=nvrtc._sweep) as sweep:
        y, _, trace = nvrtc.forward(case.rec, x, states, weights, sequences, True)
        needs = [True] * (1 + len(states)) + [False] * len(weights)
        nvrtc.backward(case.rec, probe, [None] * len(states), x, states, weights, sequences, y, trace, needs)
    return [replayed(call) for call in sweep.call_args_list]


def replayed(call: Any) -> float:
    """The median time of a recorded sweep, as a CUDA graph."""
    layer, given = call.args[1], call.args[3]
    exchanged = given[len(layer.weights) + 1]  # the memory of teams, which is allocated for every sweep

    def once() -> None:
        if exchanged is not None:
            exchanged.fill_(nvrtc.POISON)
        nvrtc._sweep(*call.args, **call.kwargs)

    found = timings(captured(once), "cuda", SECONDS)
    if "noisy" in found:
        raise RuntimeError(f"no time: {found['noisy']}")
    return found["median_ms"]


def measure_layout(case: Case, mode: str, layout: Plan) -> Row:
    """Check and time one layout."""
    with (
        mock.patch.object(nvrtc, "_layout", return_value=layout),
        mock.patch.dict(nvrtc._layers, clear=True),
        precision(mode, "cuda"),
    ):
        wrong = error(case, mode)
        if not wrong < TOLERANCE[mode]:
            return {"error": wrong, "failed": f"relative error {wrong:.1e} is over {TOLERANCE[mode]:.0e}: no time"}
        forward, backward = sweep_times(case, mode)
    return {"error": wrong, "forward_ms": forward, "backward_ms": backward}


def described(case: Case, mode: str, layout: Plan) -> Row:
    """A layout in numbers, and its estimate."""
    blocks = -(-case.batch // layout.rows) * layout.cluster
    names = ("product", "cluster", "team", "rows", "warps", "direct")
    estimates = [microseconds(case.shape(mode), layout, blocks, backward) for backward in (False, True)]
    return {name: getattr(layout, name) for name in names} | {"estimated_us_of_step": estimates}


def compiled(job: tuple[dict[str, str], tuple[int, int]]) -> str | None:
    """Compile a kernel into the cache; returns what went wrong."""
    try:
        compiler.compile_to_cubin(*job)
    except Exception as problem:
        return describe_error(problem)
    return None


def measure(names: Sequence[str], modes: Sequence[str], count: int, seconds: float, out: Path) -> Iterator[Row]:
    """All rows, each written as soon as it is measured; those that no time is left for are missing."""
    begin, device, found = time.monotonic(), nvrtc._device(torch.cuda.current_device()), cases()
    jobs = [
        (name, mode, layout)
        for name in names
        for mode in modes
        for layout in candidates(found[name], mode, device, count)
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        sources = [(layout.defines(found[name].shape(mode), True), device.capability) for name, mode, layout in jobs]
        problems = list(pool.map(compiled, sources))
    result: Row = {
        "what": "milliseconds of the sweeps of layouts, the ones with the smallest estimates for each shape; the first "
        "of a shape and precision is the one that the plan takes",
        "when": now(),
        "machine": machine("cuda") | {"nvrtc": ".".join(map(str, compiler.nvrtc_version()))},
        "git": git_commit(),
        "rows": [],
    }
    for (name, mode, layout), problem in zip(jobs, problems, strict=True):
        if time.monotonic() - begin > seconds:
            return
        row = {"shape": name, "precision": mode} | described(found[name], mode, layout)
        try:
            row |= {"failed": problem} if problem else measure_layout(found[name], mode, layout)
        except Exception as failure:
            row["failed"] = describe_error(failure)
        result["rows"].append(row)
        put(out, (json.dumps(result, indent=1) + "\n").encode())
        yield row


def lost(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """How much longer the plan's layout takes than the fastest that was timed, by shape and precision."""
    times: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        total = row["forward_ms"] + row["backward_ms"] if "forward_ms" in row else float("inf")
        times.setdefault((row["shape"], row["precision"]), []).append(total)
    return {key: of_key[0] / min(of_key) for key, of_key in times.items() if min(of_key) < float("inf")}


def main(shapes: Sequence[str], modes: Sequence[str], layouts: int, seconds: float, out: Path) -> None:
    if why := nvrtc.unavailable():
        print(f"nothing to measure: {why}")
        return
    rows = []
    for row in measure(shapes or list(cases()), modes, layouts, seconds, out):
        rows.append(row)
        kind = "team" if row["team"] else "cluster"
        direct = f" direct {row['direct']}" if row["direct"] else ""
        layout = f"{row['product']} {kind} {row['cluster']} rows {row['rows']} warps {row['warps']}{direct}"
        times = row.get("failed") or f"{row['forward_ms']:8.3f} {row['backward_ms']:8.3f} ms  error {row['error']:.1e}"
        print(f"{row['shape']:12} {row['precision']:8} {layout:44} {times}", flush=True)
    for (name, mode), share in lost(rows).items():
        print(f"{name:12} {mode:8} the plan's layout takes {share:.2f} times as long as the fastest")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("shapes", nargs="*", help="all if none is given")
    options.add_argument("--precision", dest="modes", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    options.add_argument("--layouts", type=int, default=6, help="of each shape and precision")
    options.add_argument("--seconds", type=float, default=300.0, help="after which nothing more is measured")
    options.add_argument("--out", type=Path, default=RESULTS)
    main(**vars(options.parse_args()))
