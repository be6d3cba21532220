"""``benchmarks/limits.py`` asks for what the engine's layouts do, and its floors are the sums that it says they are."""

import importlib
import json
import re
from pathlib import Path

import pytest
from ops.hopper import HOPPER

from deepmemory.ops import nvrtc

ROOT = Path(__file__).parent.parent
TIMES = {  # made up, in microseconds
    "barrier": {"us": 0.02},
    "layer in a block": {"us": 0.25},
    "exchange": {"us": 1.0},
    "exchange of all": {"us": 2.0},
    "dependent load": {"us": 0.3},
    "product": {"per_us": 1e5},
    "copy": {"bytes_per_us": 1e12},
    "node": {"us": 0.0},
    "nodes": {"kernels": 10, "others": 0},
}


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("limits")


@pytest.fixture
def result(limits):
    """What a run would write whose times are those above."""
    cases = [limits.case_of(limits.SHAPES[name], mode, HOPPER) for name in limits.BEHIND for mode in limits.PRECISIONS]
    measuring = limits.Measuring.__new__(limits.Measuring)  # nothing is measured
    measuring.device = HOPPER
    rows = [row | TIMES[row["what"]] for row, _ in limits.measurements(measuring, cases)]
    return json.loads(json.dumps({"device": HOPPER._asdict(), "cases": cases, "rows": rows}))


def floor_of(limits, result, shape, precision):
    (parts,) = [parts for one, parts in limits.floors(result) if (one["shape"], one["precision"]) == (shape, precision)]
    return parts


def set_time(result, what, **times):
    for row in result["rows"]:
        if row["what"] == what:
            row |= times


def test_without_a_gpu_it_says_so(limits, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "torch sees no NVIDIA GPU")
    limits.main(tmp_path / "limits.json", 1.0)
    assert capsys.readouterr().out == "nothing to measure: torch sees no NVIDIA GPU\n"
    assert not list(tmp_path.iterdir())


def test_every_shape_where_torch_is_faster_has_a_floor(limits, result):
    page = (ROOT / "docs" / "engines.md").read_text()
    (behind,) = re.findall(r"<!-- speed behind -->(.*?)<!-- end -->", page, re.DOTALL)
    assert set(re.findall(r"^\| `([\w-]+)`", behind, re.MULTILINE)) <= set(limits.BEHIND)
    assert len(limits.floors(result)) == len(limits.BEHIND) * len(limits.PRECISIONS)
    assert all(parts for _, parts in limits.floors(result))


def test_every_layer_of_every_step_waits_in_both_sweeps(limits, result):
    assert floor_of(limits, result, "ptb-10", "bfloat16")["exchanges"] == pytest.approx(2 * 100 * 10 * 1e-3)
    # A team's exchange ends with one of the layer's two barriers.
    assert floor_of(limits, result, "deep-wide", "bfloat16")["exchanges"] == pytest.approx(2 * 35 * 10 * 2.23e-3)
    assert floor_of(limits, result, "ptb-2", "float32")["barriers"] == pytest.approx(2 * 100 * 2 * 0.25e-3)


def test_weights_come_while_layers_wait(limits, result):
    """The larger of the two counts, and where the weights are at home on the chip they come once."""
    fast = floor_of(limits, result, "deep-1000", "bfloat16")
    set_time(result, "copy", bytes_per_us=1e3)
    slow = floor_of(limits, result, "deep-1000", "bfloat16")
    assert fast["weights"] < fast["exchanges"] < slow["weights"] < slow["floor"]
    assert slow["floor"] < slow["weights"] + slow["inputs"] + slow["products"]
    small = floor_of(limits, result, "ptb-1", "float32")
    assert small["weights"] == pytest.approx(2 * 32 * 4 * 100 * 200 / 1e3 * 1e-3)


def test_every_block_of_a_team_receives_the_inputs_of_its_rows(limits, result):
    (wide,) = [one for one in result["cases"] if (one["shape"], one["precision"]) == ("deep-wide", "bfloat16")]
    assert wide["received_bytes"] == (10 * 830 + 11 * 830) * wide["rows"] * 2  # two gates come back
    set_time(result, "copy", bytes_per_us=1e6)
    inputs = floor_of(limits, result, "deep-wide", "bfloat16")["inputs"]
    assert inputs == pytest.approx(35 * wide["clusters"] * wide["cluster"] * wide["received_bytes"] / 1e6 * 1e-3)
    assert floor_of(limits, result, "ptb-10", "bfloat16")["inputs"] == 0  # clusters send to shared memory


def test_launches_are_counted(limits, result):
    set_time(result, "node", us=1.5)
    assert floor_of(limits, result, "rl-step", "float32")["launches"] == pytest.approx(10 * 1.5e-3)


def test_what_failed_leaves_a_gap_and_no_number(limits, result):
    for row in result["rows"]:
        if row["what"] in ("exchange", "exchange of all"):
            row["failed"] = "RuntimeError: 3 wrong or lost messages"
    assert floor_of(limits, result, "ptb-10", "float32") is None
    assert floor_of(limits, result, "deep-wide", "float32") is None
    assert floor_of(limits, result, "ptb-1", "float32")
    assert not [
        name for name, _ in limits.chip_rows(result["rows"]) if "exchange of 16 bytes between 16 blocks" in name
    ]


def test_every_exchange_has_its_kernel(limits, result):
    exchanges = limits.all_exchanges(result["cases"], HOPPER)
    text = limits.source(exchanges)
    assert {16, 7} <= {one.cluster for one in exchanges}
    for one in exchanges:
        assert (one.elements * (4 if one.number == "float" else 2)) % 16 == 0
        for work in (False, True):
            assert f"EXCHANGES({limits.exchange_kernel(one, work)}, {one.cluster}, {one.number}, " in text


def test_a_table_of_all_shapes(limits, result):
    readme = importlib.import_module("readme")
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    table = readme.floor_table(measured, limits.summary(result)).splitlines()
    assert len(table) == 2 + len(result["cases"])
    assert all(line.count("|") == table[0].count("|") for line in table)


def test_kept_floors_are_below_what_was_measured(limits):
    """Nothing is faster than its floor."""
    readme = importlib.import_module("readme")
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    kept = json.loads(limits.RESULTS.read_text())
    for one in kept["floors"]:
        assert one["parts"]["floor"] < readme.milliseconds(measured, one["shape"], one["precision"])[1]["`dm.DMU`"]


def test_what_the_page_says_of_the_limits_in_words(limits):
    readme = importlib.import_module("readme")
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    kept = json.loads(limits.RESULTS.read_text())
    page = " ".join((ROOT / "docs" / "gpu-limits.md").read_text().split())

    def times(one):
        own, *others = readme.milliseconds(measured, one["shape"], one["precision"])[1].values()
        return own, min(others)

    cases = [(one["shape"], one["precision"], one["parts"], *times(one)) for one in kept["floors"]]
    for shape, precision, parts, own, best in cases:
        if shape in ("ptb-1", "ptb-2", "odd", "deep-30"):
            assert 1.9 < own / parts["floor"] < 3.3  # "two to three times"
        elif shape == "rl-step":
            assert 2.9 < own / parts["floor"] < 4.5  # "a third or a quarter"
            if precision == "float32":
                assert f"GRU is {own - best:.3f} ms faster" in page
        elif shape == "ptb-10":
            assert parts["exchanges"] > 0.5 * own  # "more than half"
        elif (shape, precision) == ("deep-wide", "bfloat16"):
            text = "exchanges take {exchanges:.2f} ms and the inputs {inputs:.2f} ms. The floor of {floor:.2f} ms is"
            assert text.format(**parts) in page
            assert f"as long as the whole GRU takes, {best:.2f} ms" in page
        elif precision == "tf32":
            assert f"{parts['floor'] / best:.1f}" == {"deep-wide": "0.7", "deep-1000": "0.6"}[shape]
    (wide,) = [one for one in kept["cases"] if (one["shape"], one["precision"]) == ("deep-1000", "tf32")]
    blocks = wide["clusters"] * wide["cluster"]
    assert f"each of {blocks} multiprocessors reads the inputs of its {wide['rows']} rows" in page
    assert f"together {blocks * wide['rows'] * 4 * 1000 / 1e6:.0f} MB" in page


def test_errors_of_products_on_tensor_cores_are_those_of_the_page():
    timed = json.loads((ROOT / "benchmarks" / "results" / "layouts_h200.json").read_text())["rows"]
    errors = {
        product: max(row["error"] for row in timed if (row["precision"], row["product"]) == ("float32", product))
        for product in ("split", "fma")
    }
    assert errors["split"] < 4e-6  # "up to four millionths"
    assert errors["fma"] < 1e-6  # "under one"
