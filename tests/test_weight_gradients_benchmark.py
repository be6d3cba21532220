"""What ``benchmarks/weight_gradients.py`` measured is what the engine's choice rests on."""

import importlib
import json
from pathlib import Path

import pytest

from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc import products

ROOT = Path(__file__).parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("weight_gradients")


@pytest.fixture
def kept(benchmark):
    return json.loads(benchmark.RESULTS.read_text())


def test_the_engine_cuts_weight_gradients_as_was_fastest(benchmark, kept):
    for row in kept["rows"]:
        taken, best = benchmark.chosen(row, kept["multiprocessors"])["us"], min(cut["us"] for cut in row["cuts"])
        assert taken < 1.03 * best, (row["shape"], row["precision"])


def test_large_products_are_left_to_the_library_where_it_is_faster(benchmark, kept):
    for row in kept["rows"]:
        shape, best = benchmark.SHAPES[row["shape"]], min(cut["us"] for cut in row["cuts"])
        multiplications = shape.runs * shape.batch * shape.steps * benchmark.tables(shape)[0].multiplications
        if row["precision"] == "float32":  # in half precision, some are slower and save a dozen launches
            assert (multiplications > products.MOST_MULTIPLICATIONS) == (row["library_us"] < best), row["shape"]


def test_every_way_to_cut_has_rows_for_each_piece(benchmark):
    for name in benchmark.TIMED:
        shape = benchmark.SHAPES[name]
        found = benchmark.tables(shape)
        for cut in benchmark.cuts(shape, found, 132):
            assert 1 <= cut.pieces <= shape.batch * shape.steps


def test_without_a_gpu_it_says_so(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "torch sees no NVIDIA GPU")
    benchmark.main([], tmp_path / "out.json")
    assert capsys.readouterr().out == "nothing to measure: torch sees no NVIDIA GPU\n"
    assert not list(tmp_path.iterdir())
