"""Speed is measured side by side, only of right results, and within its time limit."""

import json
from dataclasses import replace

import pytest
import torch
from lab.bench.tiny import TINY, entries

from deepmemory.lab.bench import contestants, speed, timing
from deepmemory.lab.bench.contestants import own_entry
from deepmemory.lab.bench.shapes import SHAPES
from deepmemory.lab.bench.speed import Benchmark, Job, bench, jobs, line, time_job
from deepmemory.lab.cli import results
from deepmemory.lab.records import git_commit
from deepmemory.lab.settings import Machine

PLAN = Benchmark(shapes=("tiny",), seconds=0.0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(speed, "warn_if_busy", lambda say: None)


QUIET = {"median_ms": 1.0, "quartile_1_ms": 1.0, "quartile_3_ms": 1.0, "samples": 5}
NOISY = {"noisy": "timed once", "samples": 1}


@pytest.fixture
def quiet(monkeypatch):
    """Every call is made once, and is said to take a millisecond."""

    def timings(call, *_):
        call()
        return QUIET

    monkeypatch.setattr(timing, "timings", timings)
    monkeypatch.setattr(speed, "timings", timings)


def test_every_contestant_is_timed(tmp_path, quiet):
    told = []
    rows = bench(PLAN, tmp_path / "bench.json", told.append)["shapes"]
    assert [row["contestant"] for row in rows] == [job.entry.name for job in jobs(PLAN)]
    assert all(row["forward"] == row["forward_backward"] == QUIET for row in rows)
    assert told == [line(row) for row in rows]


def in_turn(monkeypatch, *found):
    """Let each measurement find one of these, the last of them from then on; and take a second."""
    now, left = [0.0], list(found)

    def measure(*_):
        now[0] += 1.0
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(timing, "clock", lambda: now[0])
    monkeypatch.setattr(speed, "measure", measure)
    return now


def test_noisy_times_are_measured_again_at_the_end(tmp_path, monkeypatch):
    names = [job.entry.name for job in jobs(PLAN)]
    first = {"forward": NOISY, "forward_backward": {**QUIET, "median_ms": 2.0}}
    now, told = in_turn(monkeypatch, first, {"forward": QUIET, "forward_backward": QUIET}), []
    result = bench(PLAN, tmp_path / "bench.json", told.append)
    assert now == [len(names) + 1.0]
    assert result["shapes"][0]["forward"] == QUIET
    assert result["shapes"][0]["forward_backward"]["median_ms"] == 2.0  # quiet the first time
    assert "too noisy: timed once" in told[0]
    assert told[len(names) :] == ["measuring 1 noisy result again:", line(result["shapes"][0])]
    assert json.loads((tmp_path / "bench.json").read_text())["shapes"][0]["forward"] == QUIET


def test_what_stays_noisy_is_refused(tmp_path, monkeypatch):
    names = [job.entry.name for job in jobs(PLAN)]
    now, told = in_turn(monkeypatch, {"forward": NOISY, "forward_backward": NOISY}), []
    result = bench(PLAN, tmp_path / "bench.json", told.append)
    assert now == [len(names) * (1.0 + speed.ROUNDS)]
    assert told[-1].startswith(f"{len(names)} of {len(names)} are too noisy for a number")
    assert "median_ms" not in json.dumps(result)
    assert not any(" ms" in text for text in told)


def test_noisy_times_are_measured_again_within_the_limit_alone(tmp_path, monkeypatch):
    names = [job.entry.name for job in jobs(PLAN)]
    now = in_turn(monkeypatch, {"forward": NOISY, "forward_backward": NOISY})
    result = bench(replace(PLAN, minutes=(len(names) + 2) / 60), tmp_path / "bench.json", lambda text: None)
    assert now == [len(names) + 2.0]
    assert result["skipped"] == []


def test_what_the_tables_need_comes_first():
    names = [job.entry.name for job in jobs(PLAN)]
    assert names.index("nn.LSTM, equal weights") < names.index("nn.GRU, equal size")
    many = [(job.precision, job.part, job.shape.name) for job in jobs(replace(PLAN, growth=True))]
    assert many.index(("float32", "growth", "steps=32")) < many.index(("float32", "shapes", "tiny"), -4)
    short = [job.entry.name for job in jobs(replace(PLAN, loop=False))]
    assert set(short) == set(names[: len(short)]) < set(names)


def test_a_wrong_result_gets_no_time(monkeypatch):
    forward = contestants.dm.DMU.forward
    monkeypatch.setattr(
        contestants.dm.DMU,
        "forward",
        lambda self, x: (forward(self, x)[0] * (1 if self.engine == "plain" else 1.01), None),
    )
    row = time_job(Job("shapes", TINY, "float32", own_entry(TINY, "DMU", "auto", "cpu"), 0.0), "cpu")
    assert "forward_backward" not in row
    assert row["error"] > speed.TOLERANCE["float32"]
    assert "relative error" in row["wrong"]


def test_after_the_time_limit_the_rest_is_skipped_and_named(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "clock", lambda: now[0])
    times = {"median_ms": 1.0, "quartile_1_ms": 1.0, "quartile_3_ms": 1.0}

    def measure(*_):
        now[0] += 25.0
        return {"forward": times, "forward_backward": times}

    monkeypatch.setattr(speed, "measure", measure)
    told = []
    result = bench(replace(PLAN, minutes=1.0), tmp_path / "bench.json", told.append)
    names = [job.entry.name for job in jobs(PLAN)]
    assert [row["contestant"] for row in result["shapes"]] == names[:3]
    assert [row["contestant"] for row in result["skipped"]] == names[3:]
    assert all(name in told[-1] for name in names[3:])
    assert json.loads((tmp_path / "bench.json").read_text())["skipped"] == result["skipped"]
    assert bench(replace(PLAN, minutes=0), tmp_path / "bench.json", told.append)["skipped"] == []


def test_a_cut_at_any_moment_leaves_what_was_measured(tmp_path, quiet):
    out, seen = tmp_path / "bench.json", []

    def cut_after_two(text):
        seen.append(len(json.loads(out.read_text())["shapes"]))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(PLAN, out, cut_after_two)
    assert seen == [0, 1, 2]
    assert "forward_backward" in json.loads(out.read_text())["shapes"][-1]


def test_a_line_has_the_spread_or_why_there_is_no_time(quiet):
    row = time_job(Job("shapes", TINY, "float32", entries()["nn.GRU, equal weights"], 0.0), "cpu")
    row["forward_backward"] = {"median_ms": 2.5, "quartile_1_ms": 2.25, "quartile_3_ms": 3.0}
    assert line(row).endswith("2.500 ms [2.25, 3]   forward     1.000 ms [1, 1]")
    row["forward"] = NOISY
    assert line(row).endswith("2.500 ms [2.25, 3]   forward too noisy: timed once")


def test_command_leaves_numbers_picture_and_table(tmp_path, capsys, quiet):
    results.bench(machine=Machine("cpu"), shapes="tiny", seconds=0.0, out=tmp_path)
    result = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert result["plan"] | {"shapes": ["tiny"], "seconds": 0.0, "device": "cpu"} == result["plan"]
    assert result["git"] == git_commit()
    assert result["machine"]["torch"] in torch.__version__
    assert result["machine"]["threads"] == str(torch.get_num_threads())
    assert "<svg" in (tmp_path / "bench-cpu.svg").read_text()
    assert "| `tiny`: 2 [3] 4, B 2, T 5 |" in capsys.readouterr().out


def test_command_names_the_choices(tmp_path):
    with pytest.raises(ValueError, match="adding"):
        results.bench(machine=Machine("cpu"), shapes="unheard-of", out=tmp_path)
    with pytest.raises(ValueError, match="nvrtc"):
        results.bench(machine=Machine("cpu"), engines="unheard-of", out=tmp_path)
