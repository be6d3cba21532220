"""How long a call is timed, and which times are called noisy; by a clock that the tests advance themselves."""

import pytest
import torch
from lab.bench.tiny import TINY, entries

from deepmemory.lab.bench import timing
from deepmemory.lab.bench.timing import OutOfTime, TimeLimit, measure, summary, timings


class Call:
    """Takes the seconds it is told, the last of them from then on."""

    def __init__(self, monkeypatch, *seconds):
        self.now, self.count, self.seconds = 0.0, 0, seconds
        monkeypatch.setattr(timing, "clock", lambda: self.now)
        monkeypatch.setattr(timing, "count_preemptions", lambda: lambda: 0.0)

    def __call__(self):
        self.now += self.seconds[min(self.count, len(self.seconds) - 1)]
        self.count += 1


def test_the_first_call_does_not_count(monkeypatch):
    found = timings(Call(monkeypatch, 100.0, 0.5), "cpu", 1.0)
    assert found == {"median_ms": 500.0, "quartile_1_ms": 500.0, "quartile_3_ms": 500.0, "samples": 5}


@pytest.mark.parametrize(
    ("call", "seconds", "samples", "calls"),
    [
        (0.5, 1.0, 5, 3 + 5),  # five samples at least
        (0.5, 10.0, 20, 3 + 20),  # as many as fit
        (0.001, 1.0, 100, 3 + 10 * 100),  # ten calls in a row are a sample
        (0.001, 10.0, 200, 3 + 10 * 200),  # no more than two hundred
        (3.0, 1.0, 3, 1 + 3),  # over five times the seconds, fewer
        (60.0, 1.0, 2, 1 + 2),  # two at least, to see a spread
    ],
)
def test_slow_calls_are_made_less_often(monkeypatch, call, seconds, samples, calls):
    timed = Call(monkeypatch, call)
    assert (timings(timed, "cpu", seconds)["samples"], timed.count) == (samples, calls)


def test_a_limit_ends_the_samples(monkeypatch):
    call = Call(monkeypatch, 1.0)
    assert timings(call, "cpu", 100.0, TimeLimit(10.0))["samples"] == 7  # after three that do not count
    assert call.now == 10.0


def test_a_limit_may_leave_one_sample(monkeypatch):
    assert timings(Call(monkeypatch, 6.0), "cpu", 1.0, TimeLimit(10.0)) == {"noisy": "timed once", "samples": 1}


def test_a_limit_reached_before_a_sample_is_out_of_time(monkeypatch):
    call = Call(monkeypatch, 20.0)
    with pytest.raises(OutOfTime):
        timings(call, "cpu", 1.0, TimeLimit(10.0))
    assert call.count == 1
    assert not TimeLimit(0).passed


@pytest.mark.parametrize(
    ("samples", "preemptions", "noisy"),
    [
        ([1.0] * 9, 0, None),
        ([1.0, 1.1, 1.2, 1.3, 1.4], 0, None),
        ([1.0, 1.1, 1.2, 1.9, 2.0], 0, "the quartiles are 75 % of the median apart"),
        ([1.0] * 9, 300, "other processes took the processor"),
        ([1.0], 0, "timed once"),
    ],
)
def test_noisy_times_say_why_and_give_no_number(samples, preemptions, noisy):
    found = summary(samples, preemptions)
    assert found.get("noisy") == noisy
    assert ("median_ms" in found) is (noisy is None)
    assert found["samples"] == len(samples)


def test_what_no_graph_can_hold_keeps_its_eager_time(monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "captured", refuse)
    monkeypatch.setattr(timing, "timings", lambda call, device, seconds, limit: {"median_ms": 1.0})
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    contestant = entries()["nn.GRU, equal weights"].build()
    row = measure(contestant, torch.randn(TINY.steps, TINY.batch, TINY.input_size), "cuda", 0.0, graph=True)
    assert row["forward_backward"] == {"median_ms": 1.0}
    assert "capturing" in row["graph_failed"]
    assert "as_cuda_graph" not in row
