"""``benchmarks/layouts.py`` times what the plan takes and other layouts, and says how much the plan's choice costs."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from ops.hopper import HOPPER

from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc.plan import plans
from deepmemory.ops.nvrtc.spread import EXACT, LOW

ROOT = Path(__file__).parent.parent


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("layouts")


def test_without_a_gpu_it_says_so(layouts, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "torch sees no NVIDIA GPU")
    layouts.main([], ["float32"], 2, 1.0, tmp_path / "layouts.json")
    assert capsys.readouterr().out == "nothing to measure: torch sees no NVIDIA GPU\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["adding", "deep-wide", "residual-5", "rhn-3", "gru", "lstm"])
def test_the_layout_that_the_plan_takes_comes_first_and_others_differ(layouts, name):
    case = layouts.cases()[name]
    for mode, products in ("float32", EXACT), ("bfloat16", LOW):
        first, *others = layouts.candidates(case, mode, HOPPER, 5)
        assert first == plans(case.shape(mode), products, 1, case.batch, *HOPPER[1:])[0]
        assert others
        assert len({(one.product, one.cluster, one.team, one.warps, one.direct) for one in (first, *others)}) == 5
        row = layouts.described(case, mode, first)
        assert json.loads(json.dumps(row))["rows"] == first.rows
        assert all(us > 0 for us in row["estimated_us_of_step"])


@pytest.mark.parametrize("name", ["odd", "residual-3", "rhn-2", "gru", "lstm"])
def test_tensors_are_those_of_the_shape(layouts, name, monkeypatch):
    case = layouts.cases()[name]
    small = case._replace(
        inputs=3, hidden_size=4, hidden=(5,) * len(case.hidden) if case.rec.cell == "dmu" else case.hidden
    )
    small = small._replace(hidden=(4,) * len(case.hidden)) if case.rec.cell == "rhn" else small
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a: to(t, *(one for one in a if one != "cuda")))
    x, states, weights, sequences, probe = layouts.tensors(small._replace(batch=2), "float32", 3)
    y, final = layouts.plain.scan(small.rec, x, tuple(states), weights, sequences)
    assert y.shape == probe.shape == (3, 2, 4)
    assert len(final) == len(states)
    assert (sequences.state_mask is not None) is case.masked


def test_what_the_choice_of_the_plan_costs(layouts):
    rows = [
        {"shape": "odd", "precision": "tf32", "forward_ms": 1.0, "backward_ms": 2.0},
        {"shape": "odd", "precision": "tf32", "forward_ms": 0.5, "backward_ms": 1.5},
        {"shape": "odd", "precision": "tf32", "failed": "does not compile"},
        {"shape": "rl", "precision": "tf32", "failed": "does not compile"},
    ]
    assert layouts.lost(rows) == {("odd", "tf32"): 1.5}
