"""The tables of benchmark results; noisy times are marked and give no ratio."""

from dataclasses import asdict

from lab.bench.tiny import TINY

from deepmemory.lab.bench.figure import draw
from deepmemory.lab.bench.tables import speed_table


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


def test_noisy_times_are_marked_and_give_no_ratio():
    rows = [*CPU_ROWS[:2], row("nn.GRU, equal weights", 44417.0, noisy="timed once")]
    _, _, line, *note = speed_table({"machine": {}, "shapes": rows}).splitlines()
    assert line.endswith("| 50 | 4.44e+04? | - | **1** | 50 | - |")
    assert "noisy" in note[-1]


def test_the_figure_leaves_noisy_times_out(tmp_path):
    rows = [*CPU_ROWS[:2], row("nn.GRU, equal weights", 44417.0, noisy="timed once")]
    grown = [{**one, "shape": {**one["shape"], "name": f"steps={n}"}} for one in rows for n in (32, 128)]
    draw({"machine": {}, "shapes": rows, "growth": grown}, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert "dm.DMU (cpu)" in text
    assert "nn.GRU, equal weights" not in text
