"""What was observed of gradients while training: folded over layers, grouped by figure, told in two tables."""

import math
import shlex
from dataclasses import replace

import pytest
from lab.made_studies import record_losses

from deepmemory.lab import paper
from deepmemory.lab.records import Records, Study, merge
from deepmemory.lab.report.figures import rate_styles
from deepmemory.lab.report.results.gradients import QUANTITIES, GradientStudy, gradient_results, published
from deepmemory.lab.report.sections.gradients import association_table, summary_table
from deepmemory.lab.report.words import NOTHING
from deepmemory.lab.settings import Setting, change

DMU = replace(paper.setting("adding", "dmu"), epochs=4)
DMU_C = replace(paper.setting("adding", "dmu-c"), epochs=4)


def observe(out, setting, numbers, layer=0):
    """Write numbers down as if they had been observed: by name, then by epoch, one for each run."""
    records = Records(out, write=True)
    study = records.open_study(setting, [])
    for name, by_epoch in numbers.items():
        for epoch, values in by_epoch.items():
            records.write_watch(study, epoch, range(len(values)), {f"recurrent.{layer}.{name}": values})
    records.close()


def results_of(out):
    records = Records(out)
    studies = records.studies()
    observations = {study.setting.key: records.watched(study.setting.key) for study in studies}
    records.close()
    return gradient_results(studies, observations)


def lines(table):
    """The table's rows by the titles of its columns."""
    return [dict(zip((column.title for column in table.columns), row, strict=True)) for row in table.rows]


@pytest.fixture
def recorded(tmp_path):
    """Of the DMU's runs the first learns and leaves the condition, the second stays inside and does not learn."""
    record_losses(tmp_path, DMU, [[0.04, 5e-3], [0.04, 0.04], [0.04, 0.03]])
    numbers = {
        "z radius": {0: [0.2, 0.2, 0.6], 1: [0.3, 0.3, 0.7], 2: [2.0, 0.4, 0.8]},
        "candidate radius": {0: [0.5] * 3, 1: [0.5] * 3, 2: [0.9] * 3},
        "gate": {0: [0.95] * 3, 2: [0.9] * 3},
        "saturated": {0: [0.5] * 3, 2: [1.0] * 3},
        "flow": {0: [-2.0, -math.inf, math.nan], 2: [0.0, -1.0, -2.0]},
    }
    observe(tmp_path, DMU, numbers)
    record_losses(tmp_path, DMU_C, [[0.04, 1e-3]])
    observe(tmp_path, DMU_C, {"z radius": {0: [0.1]}, "candidate radius": {0: [2.0]}, "flow": {0: [-1.0]}})
    return tmp_path


def test_tables_say_what_was_recorded(recorded):
    (results,) = results_of(recorded)
    dmu, dmu_c = lines(summary_table(results))
    assert [dmu[name] for name in ("depth", "cell", "rate")] == ["2", "DMU", "0.005, rest 0.02"]
    assert [dmu_c[name] for name in ("depth", "cell", "rate")] == ["2", "DMU-C", "0.02"]
    assert [dmu[name] for name in ("runs", "learned", "loss")] == ["3", "1", "3.0e-02"]
    assert [dmu[f"inside {when}"] for when in ("first", "last", "always")] == ["2", "1", "1"]
    assert [dmu[name] for name in ("radius z", "radius candidate")] == ["0.2 → 0.8", "0.5 → 0.9"]
    assert [dmu[name] for name in ("saturated", "log10 first / last")] == ["0.5 → 1", "-2 → -1"]
    assert [dmu_c[name] for name in ("inside first", "gate")] == ["0", NOTHING]

    dmu, dmu_c, both = lines(association_table(results))
    assert [dmu[f"{side} last: learned"] for side in ("inside", "outside")] == ["0 of 1", "1 of 2"]
    assert dmu["correlation over runs"] == "-1.00"  # 4, 0.9, 1.6 with 0.005, 0.04, 0.03
    assert dmu["log10 first / last: learned / not"] == "0 / -1.5"
    assert dmu["saturated last: learned / not"] == "1 / 1"
    assert dmu_c["correlation over runs"] == NOTHING
    assert (both["cell"], both["outside last: learned"]) == ("all", "2 of 3")


def test_merged_records_say_the_same(recorded, tmp_path):
    merge([recorded], tmp_path / "merged").close()
    for before, after in zip(results_of(recorded), results_of(tmp_path / "merged"), strict=True):
        assert summary_table(before).rows == summary_table(after).rows
        assert association_table(before).rows == association_table(after).rows


def test_the_worst_layer_counts(tmp_path):
    setting = replace(DMU, hidden=(3, 2))
    record_losses(tmp_path, setting, [[0.04]])
    of_layers = {"z radius": (0.1, 0.4), "candidate radius": (0.9, 0.2), "flow": (-1.0, -3.0), "gate": (0.5, 1.0)}
    for layer in (0, 1):
        observe(tmp_path, setting, {name: {1: [values[layer]]} for name, values in of_layers.items()}, layer)
    (study,) = results_of(tmp_path)[0].studies
    assert study.excess(0) == {1: 0.9}
    by_name = {quantity.name: quantity for quantity in QUANTITIES}
    assert study.observed(0, by_name["flow"]) == {1: -3.0}
    assert study.observed(0, by_name["gate"]) == {1: 0.75}


def test_depths_and_rates_stand_side_by_side_and_other_changes_apart(tmp_path):
    deep, kept = replace(DMU, transition=(5,) * 4), replace(DMU_C, condition="kept")
    for setting in (DMU_C, DMU, replace(DMU_C, lr=0.005), deep, kept, paper.setting("adding", "gru")):
        record_losses(tmp_path, setting, [[0.04]])
        observe(tmp_path, setting, {"flow": {1: [-1.0]}})
    record_losses(tmp_path, replace(DMU, batch=16), [[0.04]])  # not observed
    main, other = results_of(tmp_path)
    assert (main.figure, main.title) == ("gradients-adding", "Adding")
    assert (other.figure, other.title) == ("gradients-adding-condition-kept", "Adding, with condition = kept")
    assert [(one.depth, one.cell, one.rates) for one in main.studies] == [
        (1, "gru", "0.05"),
        (2, "dmu", "0.005, rest 0.02"),
        (2, "dmu-c", "0.02"),
        (2, "dmu-c", "0.005"),
        (5, "dmu", "0.002, rest 0.02"),
    ]
    assert list(main.by_depth) == [1, 2, 5]
    assert len({style["color"] for style in rate_styles(main.by_depth[2])}) == 3


def test_commands_train_the_studies_they_stand_for():
    natlang = replace(paper.setting("natlang", "dmu-c", 5), lr=0.004)
    for setting in (DMU_C, replace(DMU, transition=(), lr=0.01), natlang, Setting(cell="dmu", module_rate="0.5")):
        one = GradientStudy(Study(setting, ("valid_loss",), (), ()), {})
        words = shlex.split(one.command)
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[:3] == ["dmu", "train", setting.task]
        assert [options.pop(name) for name in ("--cell", "--runs", "--watch")] == [one.cell, "0", "gradients"]
        assert options.pop("--depth", "5") == "5"
        given = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
        assert change(published(setting), given) == setting
