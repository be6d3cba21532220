"""How a call is timed: for how long, with which spread, and whether the machine was quiet enough."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.bench.contestants import Contestant

SAMPLES = range(5, 201)
SLOW = 5  # multiple of the requested seconds after which fewer samples are enough
SAMPLE_MS = 20  # calls in a row are one sample, up to this time or ten calls
WIDEST_SPREAD = 0.5  # of the quartiles, relative to the median; times that spread more are refused
MOST_PREEMPTIONS = 50  # per second of CPU time; an idle machine has a few, a busy one hundreds
SHORTEST_USE = 0.05  # seconds of CPU time under which preemptions are not counted

clock = time.perf_counter


@dataclass
class TimeLimit:
    """The time that a benchmark may take in all; 0 is no limit."""

    seconds: float
    started: float = field(default_factory=lambda: clock())

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return 0 < self.seconds <= clock() - self.started

    def check(self) -> None:
        """Raise :class:`OutOfTime` if the time is up."""
        if self.passed:
            raise OutOfTime


class OutOfTime(Exception):
    """The time limit was reached before a time could be taken."""


NO_LIMIT = TimeLimit(0)


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """float32 without TF32, float32 with TF32, or autocast to bfloat16."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, enabled=name == "bfloat16"):
            yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def timings(call: Callable[[], object], device: str, seconds: float, limit: TimeLimit = NO_LIMIT) -> dict[str, Any]:
    """Median and quartiles of one call in milliseconds, or why there are none: see :func:`summary`.

    A sample is as many calls in a row as fit into 20 ms, ten at most, as in a training loop: on a GPU the host
    runs ahead, and only the end of the sample is waited for. A call that takes very long is timed twice. The first
    call, which may compile something, never counts.
    """

    def sample(calls: int) -> float:
        begin = clock()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (clock() - begin) / calls

    def enough(count: int, elapsed: float) -> bool:
        if limit.passed or elapsed > SLOW * seconds:
            return count >= (1 if limit.passed else 2)
        return count >= SAMPLES[0] and (elapsed >= seconds or count >= SAMPLES[-1])

    sample(1)
    limit.check()
    preemptions, once = count_preemptions(), sample(1)
    if once >= 1e3 * seconds:  # as good a sample as any
        calls, samples = 1, [once]
    else:
        calls, samples = max(1, min(10, int(SAMPLE_MS / max(sample(1), 1e-6)))), []
    started = clock()
    while not enough(len(samples), clock() - started):
        samples.append(sample(calls))
    return summary(samples, preemptions())


def summary(samples: list[float], preemptions: float) -> dict[str, Any]:
    """Median and quartiles of some samples, or the reason why they are too noisy."""
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    spread, count = (high - low) / max(median, 1e-9), {"samples": len(samples)}
    if len(samples) == 1:
        return {"noisy": "timed once", **count}
    if preemptions > MOST_PREEMPTIONS:
        return {"noisy": "other processes took the processor", **count}
    if spread > WIDEST_SPREAD:
        return {"noisy": f"the quartiles are {100 * spread:.0f} % of the median apart", **count}
    return {"median_ms": median, "quartile_1_ms": low, "quartile_3_ms": high, **count}


def count_preemptions() -> Callable[[], float]:
    """Start counting how often other processes take the processor; the result returns it per second of CPU time.

    Only Linux counts this; on other systems it is 0.
    """
    if sys.platform != "linux":
        return lambda: 0.0
    from resource import RUSAGE_SELF, getrusage

    def usage() -> tuple[int, float]:
        now = getrusage(RUSAGE_SELF)
        return now.ru_nivcsw, now.ru_utime + now.ru_stime

    before = usage()

    def per_second() -> float:
        count, seconds = (after - start for after, start in zip(usage(), before, strict=True))
        return count / seconds if seconds > SHORTEST_USE else 0.0

    return per_second


def measure(
    contestant: Contestant, x: Tensor, device: str, seconds: float, graph: bool, limit: TimeLimit = NO_LIMIT
) -> dict[str, Any]:
    """Time the forward pass, forward and backward together, and on a GPU the latter replayed as a CUDA graph."""
    leaves = [x, *contestant.leaves]

    def both() -> object:
        return torch.autograd.grad(contestant.run(x).sum(), leaves)

    def forward() -> object:
        with torch.no_grad():
            return contestant.run(x)

    row: dict[str, Any] = {"forward": timings(forward, device, seconds / 2, limit)}
    limit.check()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    row["forward_backward"] = timings(both, device, seconds, limit)
    if device == "cuda":
        row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if graph:
            try:
                replay = captured(both)
            except RuntimeError as error:  # a peer may do what a graph does not support; its eager time is kept
                row["graph_failed"] = describe_error(error)
            else:
                row["as_cuda_graph"] = timings(replay, device, seconds / 2, limit)
    return row


def describe_error(error: Exception) -> str:
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
