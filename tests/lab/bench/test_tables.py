"""The tables of benchmark results; noisy times give no number and no ratio."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from lab.bench.tiny import TINY

from deepmemory.lab.bench.figure import draw
from deepmemory.lab.bench.speed import WAYS, noisy
from deepmemory.lab.bench.tables import speed_table

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def row(contestant, eager, graph=None, precision="float32", **also):
    times = {"forward_backward": {"median_ms": eager, **also}}
    captured = {"as_cuda_graph": {"median_ms": graph}} if graph else {}
    return {"shape": asdict(TINY), "precision": precision, "contestant": contestant, **times, **captured}


def test_the_table_of_a_gpu_has_every_precision_beside_the_better_peer():
    rows = [
        row("dm.DMU (nvrtc)", 1.0, 0.25),
        row("nn.GRU, equal weights", 2.0, 0.5),
        row("nn.LSTM, equal weights", 1.5, 0.75),
        row("dm.DMU (nvrtc)", 9.0, 0.2, "bfloat16"),
        row("nn.LSTM, equal weights", 8.0, 0.125, "bfloat16"),
    ]
    head, _, line = speed_table({"machine": {"gpu": "one"}, "shapes": rows}).splitlines()
    assert head == "| shape | float32 | TF32 | bfloat16 | float32, without a graph |"
    assert line.endswith("| **0.25** / 0.5 | - / - | **0.2** / 0.125 | **1** / 1.5 |")


CPU_ROWS = [row("dm.DMU (plain)", 50.0), row("dm.DMU (cpu)", 1.0), row("nn.GRU, equal weights", 2.0)]


def test_the_table_of_a_cpu_has_the_loop_and_ratios():
    assert speed_table({"machine": {}, "shapes": CPU_ROWS}).splitlines()[2].endswith("| 50 | 2 | - | **1** | 50 | 2 |")


NOISY = {"noisy": "timed once", "samples": 1}
REFUSED = row("nn.GRU, equal weights", None) | {"forward_backward": NOISY}
MARKED = row("nn.GRU, equal weights", 44417.0, noisy="timed once")  # as older files have it


@pytest.mark.parametrize("gru", [REFUSED, MARKED], ids=["refused", "marked"])
def test_noisy_times_give_no_number_and_no_ratio(gru):
    _, _, line, *note = speed_table({"machine": {}, "shapes": [*CPU_ROWS[:2], gru]}).splitlines()
    assert line.endswith("| 50 | noisy | - | **1** | 50 | - |")
    assert "measure again on an idle machine" in note[-1]


@pytest.mark.parametrize("way", ["forward_backward", "as_cuda_graph"])
def test_a_noisy_peer_may_have_been_the_faster_one(way):
    rows = [row("dm.DMU (nvrtc)", 1.0, 0.25), row("nn.LSTM, equal weights", 1.5, 0.75)]
    rows.append(row("nn.GRU, equal weights", 2.0, 0.5) | {way: NOISY})
    line = speed_table({"machine": {"gpu": "one"}, "shapes": rows}).splitlines()[2]
    captured, eager = ("0.5", "noisy") if way == "forward_backward" else ("noisy", "1.5")
    assert line.endswith(f"| **0.25** / {captured} | - / - | - / - | **1** / {eager} |")


@pytest.mark.parametrize("name", ["cpu.json", "h200.json"])
def test_no_noisy_time_is_among_the_results_kept_here(name):
    result = json.loads((RESULTS / name).read_text())
    assert not any(noisy(row, way) for row in (*result["shapes"], *result["growth"]) for way in WAYS)
    assert "noisy" not in speed_table(result)


def test_the_figure_leaves_noisy_times_out(tmp_path):
    rows = [*CPU_ROWS[:2], REFUSED]
    grown = [{**one, "shape": {**one["shape"], "name": f"steps={n}"}} for one in rows for n in (32, 128)]
    draw({"machine": {}, "shapes": rows, "growth": grown}, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert "dm.DMU (cpu)" in text
    assert "nn.GRU, equal weights" not in text
