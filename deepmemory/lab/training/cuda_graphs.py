"""Captures a training step as a CUDA graph, which is replayed without the overhead of Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # steps before a capture: kernels get compiled, and memory is allocated


def capture(step: Callable[[], None], changed: list[Tensor], pool: Any = None) -> Callable[[], None]:
    """Return a function that replays the step; capturing restores ``changed``, the tensors that the step changes."""
    before = [tensor.detach().clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                with torch.no_grad():  # after every step: past the last one of an epoch there is no data
                    for tensor, value in zip(changed, before, strict=True):
                        tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with nothing_freed(), torch.cuda.graph(graph, pool=pool):
            step()
    except RuntimeError as error:
        raise RuntimeError(
            f"a training step could not be captured as a CUDA graph; try --no-graph ({error})"
        ) from error

    def replay(_read: tuple = (step, changed)) -> None:  # the graph reads memory that must live as long as it does
        graph.replay()

    return replay


@contextmanager
def nothing_freed() -> Iterator[None]:
    """Collect garbage now and then not until the end: freeing an older graph during a capture would break it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
