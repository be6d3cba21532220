"""``benchmarks/resets.py`` times right results only, and the kept ones are those of its contestants."""

import importlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tolerances import assert_close

ROOT = Path(__file__).parent.parent
KEPT = sorted((ROOT / "benchmarks" / "results").glob("resets_*.json"))
OURS = {f"dm.{name}, {way}" for name in ("DMU", "GRU", "LSTM") for way in ("no resets", "resets=")}


@pytest.fixture
def resets(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("resets")
    monkeypatch.setattr(module, "util", SimpleNamespace(find_spec=lambda name: None))  # TorchRL's scan takes long
    return module


def test_split_is_one_call_for_each_episode(resets):
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(3, 4), torch.randn(7, 5, 3)
    begins = torch.rand(7, 5) < 0.3
    found = resets.split(layer, x, begins)
    for b in range(5):
        cuts = [0, *(t for t in range(1, 7) if begins[t, b]), 7]
        for first, end in pairwise(cuts):
            assert_close(found[first:end, b], layer(x[first:end, b])[0])


def test_every_way_gives_the_split_sequences(resets):
    rows = resets.measure("cpu", seconds=0, resets_rate=0.3, batch=3, steps=5)
    assert len(rows) == 12
    for row in rows:
        assert not {"wrong", "failed"} & row.keys(), row
        assert len(row["ms"]) >= 3


def test_a_wrong_result_gets_no_time(resets, monkeypatch):
    late = lambda layer, x, resets: layer(x, resets=resets.roll(1, 0))[0]  # noqa: E731, one step late
    monkeypatch.setattr(resets, "ours", late)
    torch.manual_seed(0)
    rows = resets.measure("cpu", seconds=0, resets_rate=0.3, batch=3, steps=5)
    assert {row["contestant"] for row in rows if "ms" not in row} == {name for name in OURS if "resets=" in name}


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_kept_result(path, resets):
    result = json.loads(path.read_text())
    assert {row["contestant"] for row in result["rows"]} >= OURS
    assert resets.table({"here": result}).count("\n") == 2 + len(result["rows"])
