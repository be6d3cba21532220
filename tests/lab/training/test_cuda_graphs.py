"""Captured training steps, with CUDA's graphs replaced: there is no GPU here."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepmemory.lab.training.cuda_graphs import capture


class OlderGraph:
    """A captured step of a larger stack, which only the garbage collector can free."""

    def __init__(self):
        self.steps = self


@pytest.fixture
def captured(monkeypatch):
    """Whether garbage could be collected while a step was captured, for each capture."""
    collecting = []

    def graph(_graph, pool=None):
        collecting.append(gc.isenabled())
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return collecting


def test_older_graphs_are_freed_before_a_capture_and_not_during_it(captured):
    """Freeing a graph is not permitted while a stream is captured; the capture would fail."""
    older = OlderGraph()
    gone, seen = weakref.ref(older), []
    del older
    capture(lambda: seen.append(gone() is None), [])
    assert seen[-1]
    assert captured == [False]
    assert gc.isenabled()


def test_a_step_that_fails_leaves_the_garbage_collector_on(captured):
    def step():
        if not gc.isenabled():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"could not be captured .* try --no-graph \(out of memory\)"):
        capture(step, [])
    assert gc.isenabled()


def test_steps_that_warm_up_leave_no_trace(captured):
    weights = torch.zeros(3)
    capture(lambda: weights.add_(1), [weights])
    assert weights.tolist() == [1.0] * 3  # by the step under capture alone, which a real graph would only record
