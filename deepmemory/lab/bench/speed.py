"""Speed against peers on this machine: side by side in one process, medians and ratios, every result checked.

A time that is too noisy is measured again at the end, if the time limit allows it; one that stays noisy is refused.
"""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepmemory.lab.bench.contestants import Contestant, Entry, further_entries, main_entries
from deepmemory.lab.bench.shapes import CPU_SHAPES, GROWTH, SHAPES, Shape, grown
from deepmemory.lab.bench.timing import NO_LIMIT, OutOfTime, TimeLimit, describe_error, measure, precision, timings
from deepmemory.lab.records import git_commit
from deepmemory.lab.records.provenance import now
from deepmemory.lab.writing import put
from deepmemory.ops.engines import NAMES

PRECISIONS = ("float32", "tf32", "bfloat16")
WAYS = ("forward_backward", "forward", "as_cuda_graph")  # in which a contestant is timed
ROUNDS = 2  # in which noisy times are measured again
TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "bfloat16": 2e-1}  # of y and gradients, relative in norm


@dataclass(frozen=True)
class Benchmark:
    """What to time, and for how long."""

    device: str = "cpu"
    shapes: tuple[str, ...] = CPU_SHAPES
    precisions: tuple[str, ...] = ("float32",)
    cells: tuple[str, ...] = ("DMU",)  # which of our layers
    engines: tuple[str, ...] = NAMES  # which of our engines, if this machine has them
    seconds: float = 1.0  # for each contestant at each shape
    minutes: float = 10.0  # in all, 0 for no limit; the most important comes first, and what does not fit is skipped
    growth: bool = False  # also let one size grow at a time
    loop: bool = True  # also time the Python loop and other peers


class Job(NamedTuple):
    """One contestant to be timed at one shape."""

    part: str  # of the results: shapes or growth
    shape: Shape
    precision: str
    entry: Entry
    seconds: float


def jobs(plan: Benchmark) -> Iterator[Job]:
    """Everything to be timed, the most important first: the tables' columns at every shape, then the rest."""
    for mode in plan.precisions:
        for shape in (SHAPES[name] for name in plan.shapes):
            for entry in main_entries(shape, plan.device, plan.cells, plan.engines):
                yield Job("shapes", shape, mode, entry, plan.seconds)
    if plan.growth:
        for shape in (grown(size, value) for size, values in GROWTH.items() for value in values):
            for entry in main_entries(shape, plan.device, ("DMU",), plan.engines):
                yield Job("growth", shape, plan.precisions[0], entry, plan.seconds / 2)
    if plan.loop and "float32" in plan.precisions:
        for shape in (SHAPES[name] for name in plan.shapes):
            for entry in further_entries(shape, plan.device, plan.cells, plan.engines):
                yield Job("shapes", shape, "float32", entry, plan.seconds)


def bench(plan: Benchmark, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Time everything; the JSON file exists from the start and is complete after every result."""
    made: dict[str, Any] = {"when": now(), "git": git_commit(), "plan": asdict(plan)}
    result = {**made, "machine": machine(plan.device), "shapes": [], "growth": [], "skipped": []}
    limit = TimeLimit(60 * plan.minutes)
    timed: list[tuple[Job, dict[str, Any]]] = []
    warn_if_busy(say)
    write(result, out)
    for job in jobs(plan):
        try:
            row = time_job(job, plan.device, limit)
        except OutOfTime:
            where = {"shape": job.shape.name, "precision": job.precision, "contestant": job.entry.name}
            result["skipped"].append(where)
        else:
            result[job.part].append(row)
            timed.append((job, row))
            say(line(row))
        write(result, out)
    for row in measured_again(timed, plan.device, limit, say):
        say(line(row))
        write(result, out)
    refused = sum(any(noisy(row, way) for way in WAYS) for _, row in timed)
    if refused:
        say(f"{refused} of {len(timed)} are too noisy for a number; measure again on an idle machine")
    if result["skipped"]:
        say(f"skipped after {plan.minutes:g} min (--minutes):")
        for (name, mode), rows in groupby(result["skipped"], lambda row: (row["shape"], row["precision"])):
            say(f"{name:>12} {mode:>8} {'; '.join(row['contestant'] for row in rows)}")
    return result


def measured_again(
    timed: list[tuple[Job, dict[str, Any]]], device: str, limit: TimeLimit, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure noisy times again, in a few rounds within the time limit; yields each row that was tried."""
    for _ in range(ROUNDS):
        left = [(job, row) for job, row in timed if any(noisy(row, way) for way in WAYS)]
        if left and not limit.passed:
            say(f"measuring {len(left)} noisy {'result' if len(left) == 1 else 'results'} again:")
        for job, row in left:
            try:
                again = time_job(job, device, limit)
            except OutOfTime:
                return
            row |= {way: again[way] for way in WAYS if noisy(row, way) and way in again}
            yield row


def write(result: dict[str, Any], out: Path) -> None:
    """Replace the file of the results; if the process is killed meanwhile, the previous one stays."""
    put(out, f"{json.dumps(result, indent=1)}\n".encode())


def time_job(job: Job, device: str, limit: TimeLimit = NO_LIMIT) -> dict[str, Any]:
    """Time one contestant at one shape; one whose result is wrong gets no time. Raises OutOfTime."""
    limit.check()
    shape, mode = job.shape, job.precision
    row: dict[str, Any] = {"shape": asdict(shape), "precision": mode, "contestant": job.entry.name}
    generator = torch.Generator(device).manual_seed(1)
    runs = [shape.runs] if shape.runs > 1 else []
    size = [*runs, shape.steps, shape.batch, shape.input_size]
    x = torch.randn(size, generator=generator, device=device).requires_grad_()
    with precision(mode, device):
        try:
            contestant = job.entry.build()
            if not isinstance(contestant, Contestant):
                return row | {"forward_backward": timings(contestant, device, job.seconds, limit)}
            row |= {"weights": contestant.weights, "hidden_size": contestant.hidden_size}
            row["error"] = contestant.error(x) if contestant.error else None
            if row["error"] is not None and not row["error"] < TOLERANCE[mode]:
                row["wrong"] = f"relative error {row['error']:.1e} is over {TOLERANCE[mode]:.0e}: no time"
            else:
                row |= measure(contestant, x, device, job.seconds, "plain" not in job.entry.name, limit)
        except OutOfTime:
            raise
        except Exception as error:
            row["failed"] = describe_error(error)
        finally:
            gc.collect()
    return row


def line(row: dict[str, Any]) -> str:
    """One result as text: medians with the quartiles in brackets, or why there is no time."""
    head = f"{row['shape']['name']:>12} {row['precision']:>8} {row['contestant']:<26}"
    if "forward_backward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    text = f"{head} {with_spread(row['forward_backward'])}"
    if "forward" in row:
        text += f"   forward {with_spread(row['forward'])}"
    if "as_cuda_graph" in row:
        text += f"   graph {with_spread(row['as_cuda_graph'])}"
    if "graph_failed" in row:
        text += f"   no graph: {row['graph_failed']}"
    return text


def with_spread(times: dict[str, Any]) -> str:
    """Median and quartiles in milliseconds; a noisy time says why it is refused."""
    if "noisy" in times:
        return f"too noisy: {times['noisy']}"
    return "{median_ms:9.3f} ms [{quartile_1_ms:.3g}, {quartile_3_ms:.3g}]".format(**times)


def noisy(row: dict[str, Any] | None, way: str) -> bool:
    """Whether the time of this kind, such as ``forward``, was refused as noisy."""
    return bool(row and "noisy" in row.get(way, {}))


def warn_if_busy(say: Callable[[str], None]) -> None:
    """Say so if other programs keep half of the processor busy or more."""
    if not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        say(f"the machine is busy (load average {load:.1f} on {cores} cores); expect noisy times")


def machine(device: str) -> dict[str, str]:
    """The hardware and the versions that the times were taken with."""
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
    """The processor's name, if the system provides it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for entry in info.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
