"""Speed is measured side by side, and only of right results."""

import json
from dataclasses import asdict

import pytest
import torch

import deepmemory as dm
from deepmemory.lab.bench import speed
from deepmemory.lab.cli.results import bench
from deepmemory.lab.settings import Machine

TINY = speed.Shape("tiny", 2, (3,), 4, 2, 5)


def test_peers_have_as_many_weights():
    for shape in speed.SHAPES.values():
        dmu = dm.DMU(shape.input_size, shape.hidden_size, transition=list(shape.transition), device="meta")
        wanted = speed.weights_of(dmu)

        def gru(d, m=shape.input_size):
            return torch.nn.GRU(m, d, device="meta")

        size = speed.equal_weights(gru, wanted)
        distances = [abs(speed.weights_of(gru(d)) - wanted) for d in (size - 1, size, size + 1)]
        assert distances[1] == min(distances)


def test_every_contestant_is_timed():
    told = []
    rows = speed.bench_shape(TINY, "cpu", "float32", 0.0, ["DMU"], done=told.append)
    names = [row["contestant"] for row in rows]
    assert "dm.DMU (plain)" in names
    assert "nn.LSTM, equal weights" in names
    assert all(row["forward_backward"]["median_ms"] > 0 for row in rows)
    assert told == rows


def test_a_wrong_result_gets_no_time(monkeypatch):
    right = speed.ours(TINY, "DMU", "plain", "cpu")
    assert right.error(torch.randn(5, 2, 2)) < speed.TOLERANCE["float32"]
    step = speed.dm.DMU.forward
    monkeypatch.setattr(
        speed.dm.DMU, "forward", lambda self, x: (step(self, x)[0] * (1 if self.engine == "plain" else 1.01), None)
    )
    monkeypatch.setattr(speed, "contestants", lambda *_: [speed.ours(TINY, "DMU", "auto", "cpu")])
    (row, *_) = speed.bench_shape(TINY, "cpu", "float32", 0.0, ["DMU"], done=lambda _: None)
    assert "forward_backward" not in row
    assert "relative error" in row["wrong"]


def test_command_leaves_numbers_picture_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(speed.SHAPES, "tiny", TINY)
    bench(machine=Machine("cpu"), shapes="tiny", seconds=0.0, out=tmp_path)
    result = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert result["machine"]["torch"] in torch.__version__
    assert result["machine"]["threads"] == str(torch.get_num_threads())
    assert "<svg" in (tmp_path / "bench-cpu.svg").read_text()
    assert "| `tiny`: 2 [3] 4, B 2, T 5 |" in capsys.readouterr().out


def test_times_the_engines_asked_for(monkeypatch):
    names = [c.name for c in speed.contestants(TINY, "cpu", "float32", ["DMU"], True, ["plain"])]
    assert [name for name in names if name.startswith("dm.")] == ["dm.DMU (plain)"]
    assert "nn.GRU, equal weights" in names


def test_a_cut_at_any_moment_leaves_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(speed.SHAPES, "tiny", TINY)
    out, seen = tmp_path / "bench.json", []

    def cut_after_two(text):
        seen.append(json.loads(out.read_text())["shapes"] if out.exists() else None)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        speed.bench("cpu", ["tiny"], ["float32"], ["DMU"], 0.0, False, True, out, cut_after_two)
    assert [len(rows) for rows in seen] == [0, 1, 2]
    assert "forward_backward" in json.loads(out.read_text())["shapes"][-1]


def row(contestant, eager, graph=None, precision="float32"):
    times = {"forward_backward": {"median_ms": eager}}
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
    head, _, line = speed.speed_table({"machine": {"gpu": "one"}, "shapes": rows}).splitlines()
    assert head == "| shape | float32 | TF32 | bfloat16 | float32, without a graph |"
    assert line.endswith("| **0.25** / 0.5 | - / - | **0.2** / 0.125 | **1** / 1.5 |")


def test_the_table_of_a_cpu_has_the_loop_and_ratios():
    rows = [row("dm.DMU (plain)", 50.0), row("dm.DMU (cpu)", 1.0), row("nn.GRU, equal weights", 2.0)]
    table = speed.speed_table({"machine": {}, "shapes": rows})
    assert table.splitlines()[2].endswith("| 50 | 2 | - | **1** | 50 | 2 |")


def test_what_no_graph_can_hold_keeps_its_eager_time(monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(speed, "captured", refuse)
    monkeypatch.setattr(speed, "timings", lambda call, device, seconds: {"median_ms": 1.0})
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    contestant = speed.torch_peer(TINY, "GRU", "cpu", "weights")
    row = speed.measure(contestant, torch.randn(5, 2, 2), "cuda", 0.0, graph=True)
    assert row["forward_backward"] == {"median_ms": 1.0}
    assert "capturing" in row["graph_failed"]
    assert "as_cuda_graph" not in row


def test_command_names_the_choices(tmp_path):
    with pytest.raises(ValueError, match="adding"):
        bench(machine=Machine("cpu"), shapes="unheard-of", out=tmp_path)
    with pytest.raises(ValueError, match="nvrtc"):
        bench(machine=Machine("cpu"), engines="unheard-of", out=tmp_path)
