"""The report on what was watched says what the records say."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from lab.report.test_synthetic import record

from deepmemory.lab import paper
from deepmemory.lab.records import Records, Study, merge
from deepmemory.lab.report import watched, write_report
from deepmemory.lab.settings import Setting, change

DMU = replace(paper.setting("adding", "dmu"), epochs=4)
DMU_C = replace(paper.setting("adding", "dmu-c"), epochs=4)
ROOT = Path(__file__).parents[3]


def watch(out, setting, numbers):
    """Write numbers down as if they had been watched: by name, then by epoch, one for each run."""
    opened = Records(out, write=True)
    study = opened.open_study(setting, [])
    for name, by_epoch in numbers.items():
        for epoch, values in by_epoch.items():
            opened.write_watch(study, epoch, range(len(values)), {f"recurrent.0.{name}": values})
    opened.close()


def seen(out):
    opened = Records(out)
    studies = opened.studies()
    numbers = {study.setting.key: opened.watched(study.setting.key) for study in studies}
    opened.close()
    return watched.scenes(studies, numbers)


@pytest.fixture
def recorded(tmp_path):
    """Of the DMU's runs the first learns and leaves the condition, the second stays inside and does not learn."""
    record(tmp_path, DMU, [[0.04, 5e-3], [0.04, 0.04], [0.04, 0.03]])
    watch(
        tmp_path,
        DMU,
        {
            "z radius": {0: [0.2, 0.2, 0.6], 1: [0.3, 0.3, 0.7], 2: [2.0, 0.4, 0.8]},
            "candidate radius": {0: [0.5] * 3, 1: [0.5] * 3, 2: [0.9] * 3},
            "gate": {0: [0.95] * 3, 2: [0.9] * 3},
            "saturated": {0: [0.5] * 3, 2: [1.0] * 3},
            "flow": {0: [-2.0, -math.inf, math.nan], 2: [0.0, -1.0, -2.0]},
        },
    )
    record(tmp_path, DMU_C, [[0.04, 1e-3]])
    watch(tmp_path, DMU_C, {"z radius": {0: [0.1]}, "candidate radius": {0: [2.0]}, "flow": {0: [-1.0]}})
    return tmp_path


def as_dicts(heads, rows):
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_tables_are_what_was_recorded(recorded):
    (scene,) = seen(recorded)
    dmu, dmu_c = as_dicts(*watched.summary_table(scene))
    assert (dmu["depth"], dmu["cell"], dmu["rate"]) == ("2", "DMU", "0.005, rest 0.02")
    assert (dmu_c["depth"], dmu_c["cell"], dmu_c["rate"]) == ("2", "DMU-C", "0.02")
    assert (dmu["runs"], dmu["learned"], dmu["loss"]) == ("3", "1", "3.0e-02")
    assert [dmu[f"inside {when}"] for when in ("first", "last", "always")] == ["2", "1", "1"]
    assert dmu["radius z"] == "0.2 → 0.8"
    assert dmu["radius candidate"] == "0.5 → 0.9"
    assert dmu["saturated"] == "0.5 → 1"
    assert dmu["log10 first / last"] == "-2 → -1"
    assert [dmu_c[name] for name in ("inside first", "gate")] == ["0", "–"]  # noqa: RUF001

    dmu, dmu_c, both = as_dicts(*watched.association_table(scene))
    assert (dmu["inside last: learned"], dmu["outside last: learned"]) == ("0 of 1", "1 of 2")
    assert dmu["correlation over runs"] == "-1.00"  # 4, 0.9, 1.6 with 0.005, 0.04, 0.03
    assert dmu["log10 first / last: learned / not"] == "0 / -1.5"
    assert dmu["saturated last: learned / not"] == "1 / 1"
    assert dmu_c["correlation over runs"] == "–"  # noqa: RUF001
    assert (both["cell"], both["outside last: learned"]) == ("all", "2 of 3")


def test_the_worst_layer_counts(tmp_path):
    setting = replace(DMU, hidden=(3, 2))
    record(tmp_path, setting, [[0.04]])
    opened = Records(tmp_path, write=True)
    study = opened.open_study(setting, [])
    values = {"0.z radius": [0.1], "1.z radius": [0.4], "0.candidate radius": [0.9], "1.candidate radius": [0.2]}
    values |= {"0.flow": [-1.0], "1.flow": [-3.0], "0.gate": [0.5], "1.gate": [1.0]}
    opened.write_watch(study, 1, [0], {f"recurrent.{name}": of for name, of in values.items()})
    opened.close()
    ((one,),) = [scene.studies for scene in seen(tmp_path)]
    assert one.excess(0) == {1: 0.9}
    by_name = {quantity.name: quantity for quantity in watched.QUANTITIES}
    assert one.of_run(0, by_name["flow"]) == {1: -3.0}
    assert one.of_run(0, by_name["gate"]) == {1: 0.75}


def test_depths_and_rates_stand_side_by_side_and_other_changes_apart(tmp_path):
    deep = {"transition": (5,) * 4}
    kept = replace(DMU_C, condition="kept")
    for setting in (DMU_C, DMU, replace(DMU_C, lr=0.005), replace(DMU, **deep), kept, paper.setting("adding", "gru")):
        record(tmp_path, setting, [[0.04]])
        watch(tmp_path, setting, {"flow": {1: [-1.0]}})
    record(tmp_path, replace(DMU, batch=16), [[0.04]])
    main, other = seen(tmp_path)
    assert (main.name, main.title) == ("gradients-adding", "Adding")
    assert (other.name, other.title) == ("gradients-adding-condition-kept", "Adding, with condition = kept")
    told = [(one.depth, one.kind, one.rates) for one in main.studies]
    assert told == [
        (1, "gru", "0.05"),
        (2, "dmu", "0.005, rest 0.02"),
        (2, "dmu-c", "0.02"),
        (2, "dmu-c", "0.005"),
        (5, "dmu", "0.002, rest 0.02"),
    ]
    assert list(main.depths) == [1, 2, 5]
    styles = watched.styles_of(main.depths[2])
    assert len({style["color"] for style in styles}) == 3


def test_pages_and_figures(recorded):
    report = write_report(recorded)
    folder = report.page.parent
    page = (folder / "gradients.md").read_text()
    (name,) = re.findall(r"\((figures/[^)]+)\)", page)
    assert (folder / name).stat().st_size > 1000
    assert "| 2 | DMU | 0.005, rest 0.02 | 3 | 1 |" in page
    assert "dmu train adding --cell dmu-c --epochs 4 --runs 1 --watch gradients" in page
    html = report.page.read_text()
    assert '<h1 id="gradients">' in html
    assert "0.005, rest 0.02" in html
    assert (folder / "synthetic.md").exists()


def test_nothing_changes_where_nothing_was_watched(recorded, tmp_path):
    opened = Records(recorded, write=True)
    opened.db.execute("DELETE FROM watch")
    opened.close()
    report = write_report(recorded)
    assert not (report.page.parent / "gradients.md").exists()
    assert 'id="gradients"' not in report.page.read_text()
    assert not [path for path in report.files if path.name.startswith("gradients")]


def test_merged_records_tell_the_same(recorded, tmp_path):
    merge([recorded], tmp_path / "merged").close()
    for before, after in zip(seen(recorded), seen(tmp_path / "merged"), strict=True):
        assert watched.summary_table(before) == watched.summary_table(after)
        assert watched.association_table(before) == watched.association_table(after)


def test_commands_train_the_studies_they_stand_for():
    natlang = replace(paper.setting("natlang", "dmu-c", 5), lr=0.004)
    for setting in (DMU_C, replace(DMU, transition=(), lr=0.01), natlang, Setting(cell="dmu", module_rate="0.5")):
        one = watched.Watched(Study(setting, ("valid_loss",), (), ()), {})
        words = shlex.split(watched.training_command(one))
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[:3] == ["dmu", "train", setting.task]
        assert [options.pop(name) for name in ("--cell", "--runs", "--watch")] == [one.kind, "0", "gradients"]
        assert options.pop("--depth", "5") == "5"
        given = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
        assert watched.published(setting).task == setting.task
        assert change(watched.published(setting), given) == setting


def test_what_is_kept_of_the_study_is_what_its_records_say():
    kept = ROOT / "docs" / "gradients-study"
    opened = Records(kept)
    sessions = opened.sessions()
    opened.close()
    command = "dmu report --out docs/gradients-study --to docs/gradients-study"
    page = watched.page(seen(kept), sessions, command)
    assert (kept / "gradients.md").read_text() == page
    for name in re.findall(r"\((figures/[^)]+)\)", page):
        assert (kept / name).exists(), name
    assert (kept / "records.sqlite").stat().st_size < 300_000
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    quoted = re.findall(r"^\| (?:depth|\d+) \|.*$", (ROOT / "docs" / "gradients.md").read_text(), re.MULTILINE)
    assert quoted
    assert set(quoted) <= set(rows)
