"""Speed is measured side by side, and only of right results."""

import json
import sys
from pathlib import Path

import pytest
import torch

import deepmemory as dm
from deepmemory.lab import bench, commands

ROOT = Path(__file__).parents[2]
TINY = bench.Shape("tiny", 2, (3,), 4, 2, 5)


def test_peers_have_as_many_weights():
    for shape in bench.SHAPES.values():
        dmu = dm.DMU(shape.input_size, shape.hidden_size, transition=list(shape.transition), device="meta")
        wanted = bench.weights_of(dmu)

        def gru(d, m=shape.input_size):
            return torch.nn.GRU(m, d, device="meta")

        size = bench.equal_weights(gru, wanted)
        distances = [abs(bench.weights_of(gru(d)) - wanted) for d in (size - 1, size, size + 1)]
        assert distances[1] == min(distances)


def test_every_contestant_is_timed():
    said = []
    rows = bench.bench_shape(TINY, "cpu", "float32", 0.0, ["DMU"], say=said.append)
    names = [row["contestant"] for row in rows]
    assert "dm.DMU (plain)" in names
    assert "nn.LSTM, equal weights" in names
    assert all(row["forward_backward"]["median_ms"] > 0 for row in rows)
    assert len(said) == len(rows)


def test_a_wrong_result_gets_no_time(monkeypatch):
    right = bench.ours(TINY, "DMU", "plain", "cpu")
    assert right.error(torch.randn(5, 2, 2)) < bench.TOLERANCE["float32"]
    step = bench.dm.DMU.forward
    monkeypatch.setattr(
        bench.dm.DMU, "forward", lambda self, x: (step(self, x)[0] * (1 if self.engine == "plain" else 1.01), None)
    )
    monkeypatch.setattr(bench, "contestants", lambda *_: [bench.ours(TINY, "DMU", "auto", "cpu")])
    (row, *_) = bench.bench_shape(TINY, "cpu", "float32", 0.0, ["DMU"], say=lambda _: None)
    assert "forward_backward" not in row
    assert "relative error" in row["wrong"]


def test_command_leaves_numbers_picture_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    commands.bench("cpu", "tiny", "float32", "dmu", 0.0, False, True, tmp_path)
    result = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert result["machine"]["torch"] in torch.__version__
    assert result["machine"]["threads"] == str(torch.get_num_threads())
    assert "<svg" in (tmp_path / "bench-cpu.svg").read_text()
    assert "| `tiny`: 2 [3] 4, B 2, T 5 |" in capsys.readouterr().out


def test_command_names_the_choices(tmp_path):
    with pytest.raises(ValueError, match="adding"):
        commands.bench("cpu", "unheard-of", "float32", "dmu", 0.0, False, True, tmp_path)


def test_readme_shows_the_recorded_speed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    text = (ROOT / "README.md").read_text()
    assert "<!-- speed gpu -->" in text
    assert "<!-- speed cpu -->" in text
    assert readme.with_tables(text) == text
    sys.modules.pop("readme")
