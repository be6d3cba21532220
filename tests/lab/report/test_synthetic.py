"""The report says what the records say, and opens in a real browser."""

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from lab.browser import CHROMIUM, FLAGS

from deepmemory.lab import paper
from deepmemory.lab.records import Records, first_under
from deepmemory.lab.report import write_report
from deepmemory.lab.report.figures import STYLES, spread_out
from deepmemory.lab.report.tables import compare_readings, counts_by_epoch, pictures, row, verdicts
from deepmemory.lab.settings import CELLS, SYNTHETIC, THRESHOLDS, threshold_label
from deepmemory.lab.tasks import series_of


def record(out, setting, losses_of_runs):
    """A study as if it had been trained: one list of validation losses per run."""
    records = Records(out, write=True)
    study = records.open_study(setting, series_of(setting.task))
    session = records.open_session("cpu", "plain")
    records.begin(study, range(len(losses_of_runs)), 0, session)
    for epoch in range(1, max(map(len, losses_of_runs)) + 1):
        values = {
            seed: {"train_loss": 1.0, "valid_loss": losses[epoch - 1], "valid_accuracy": 0.5}
            for seed, losses in enumerate(losses_of_runs)
            if epoch <= len(losses)
        }
        records.write_epoch(study, epoch, values, dict.fromkeys(values, "spent"), dict.fromkeys(values, epoch), 1.0)
    records.close()


@pytest.fixture
def recorded(tmp_path):
    """All fifteen studies; what the paper says of adding holds in them."""
    falls = [0.5, 5e-3, 5e-4, 5e-5, 5e-6, 5e-7]
    slow, high = [x for x in falls for _ in range(2)], [0.5] * 8
    of_cell = {
        "dmu": [falls, falls, falls, slow],
        "gru": [slow, slow, slow, high],
        "lstm": [[0.5, 0.5, 5e-3], high, high, high],
        "rhn": [high] * 4,
        "rnn": [high] * 4,
    }
    for setting in paper.settings(SYNTHETIC):
        record(tmp_path, setting, of_cell[setting.cell])
    record(tmp_path, replace(paper.setting("adding", "dmu"), module_rate="0.001"), [slow])
    return tmp_path


def test_curves_count_runs_in_or_before_each_epoch(recorded):
    study = pictures(Records(recorded).studies())[0].studies["dmu"]
    assert counts_by_epoch(study, 0, 4) == [0, 0, 3, 4, 4]
    assert counts_by_epoch(study, 4, 12) == [0] * 6 + [3] * 5 + [4] * 2
    numbers = row(study)
    assert numbers.under == (4, 4, 4, 4, 4)
    assert numbers.median_epoch == (2, 3, 4, 5, 6)


def test_claims_are_decided_by_the_records(recorded):
    found = {p.name: {v.claim.text: v for v in verdicts(p)} for p in pictures(Records(recorded).studies())}
    assert all(v.agrees for v in found["adding"].values())
    order = found["temporal-order"]
    assert order["DMU converges faster than GRU"].agrees
    assert order["DMU and GRU are similar down to 1e-4"].agrees is False
    assert order["DMU outperforms GRU at lower thresholds"].seen.startswith("DMU 4/4, 4/4; GRU 3/4, 3/4")
    assert order["LSTM has partial success at higher thresholds"].agrees
    noisy = found["noisy-sequence"]
    assert noisy["GRU trains faster than DMU"].agrees is False
    assert noisy["LSTM performs worse than RNN"].agrees is False


def test_a_claim_about_a_cell_that_was_not_run_stays_open(tmp_path):
    record(tmp_path, paper.setting("adding", "dmu"), [[0.5]])
    (picture,) = pictures(Records(tmp_path).studies())
    assert {v.agrees for v in verdicts(picture)} == {None}
    assert verdicts(picture)[1].seen == "not run: GRU, LSTM"


def test_a_variant_of_one_cell_stands_beside_the_other_cells(recorded):
    found = pictures(Records(recorded).studies())
    assert [p.name for p in found] == ["adding", "adding-module_rate-0.001", "temporal-order", "noisy-sequence"]
    assert list(found[1].studies) == list(CELLS)
    assert found[1].studies["dmu"].setting.module_rate == "0.001"
    assert found[1].studies["gru"] == found[0].studies["gru"]


def readings(found):
    return {comparison.reading.field: comparison for comparison in compare_readings(found)}


def test_an_open_reading_stands_beside_the_main_one(recorded):
    record(recorded, replace(paper.setting("noisy-sequence", "gru"), noise="fixed"), [[5e-3], [0.5]])
    found = readings(pictures(Records(recorded).studies()))
    assert [
        (task, cell, main.under[4], other and other.under[4]) for task, cell, main, other in found["module_rate"].rows
    ] == [
        ("adding", "dmu", 4, 1),
        ("temporal-order", "dmu", 4, None),
        ("noisy-sequence", "dmu", 4, None),
    ]
    noise = {cell: other and other.under for _, cell, _, other in found["noise"].rows}
    assert noise == {"rnn": None, "lstm": None, "gru": (1, 0, 0, 0, 0), "rhn": None, "dmu": None}
    assert not found["patience"].recorded


def test_readings_of_tasks_that_nobody_trained_are_left_out(tmp_path):
    record(tmp_path, paper.setting("adding", "dmu"), [[0.5]])
    found = readings(pictures(Records(tmp_path).studies()))
    assert list(found) == ["module_rate", "patience"]
    assert {task for task, *_ in found["patience"].rows} == {"adding"}


def test_every_reading_is_a_setting_with_a_command_that_gives_it():
    from deepmemory.lab.settings import DEFAULTS, change

    for reading in paper.READINGS:
        for task in reading.tasks:
            for cell in reading.cells:
                setting = change(paper.setting(task, cell), {reading.field: reading.other})
                assert getattr(setting, reading.field) == reading.other != DEFAULTS[reading.field]
        assert reading.command.endswith(f"--{reading.field.replace('_', '-')} {reading.other}")


def test_patience_changes_no_count(recorded):
    """Runs cut at their first epoch under the last threshold give the same figures."""
    for study in Records(recorded).studies():
        for run in study.runs:
            stop = run.first_under[-1] or run.epochs
            assert first_under(run.curves["valid_loss"][:stop], THRESHOLDS) == list(run.first_under)


def test_the_markdown_page_says_what_was_seen_and_what_was_not_run(recorded):
    record(recorded, replace(paper.setting("adding", "dmu"), hidden=(7,)), [[5e-3]])
    text = write_report(recorded).markdown.read_text()
    assert "| Adding | 0/4 | 0/4 | 3/4 | 0/4 | 4/4 | 4 of 4 |" in text
    assert "- Temporal order: the paper says “DMU and GRU are similar down to 1e-4”; here DMU 4/4" in text
    assert "| Adding | DMU | 0.001 | 1/1 (3) | 1/1 (5) | 1/1 (7) | 1/1 (9) | 1/1 (11) |" in text
    assert "| Temporal order | DMU | 0.001 | not run |" in text
    assert "“drawn once”: not run. `dmu paper noisy-sequence --noise fixed` runs it." in text
    assert "### Adding, with hidden = (7,)" in text.split("## Other settings")[1]
    assert "These are 4 or more runs per cell of at most 100 epochs; the paper has 51 of 100." in text
    for picture in re.findall(r"\((figures/[^)]+)\)", text):
        assert (recorded / "report" / picture).exists(), picture


def test_a_variant_alone_is_not_taken_for_the_paper(tmp_path):
    record(tmp_path, replace(paper.setting("adding", "dmu"), steps=10), [[5e-7]])
    text = write_report(tmp_path).markdown.read_text()
    assert "No study here has the paper's settings unchanged" in text
    assert "statements that hold" not in text


def test_files_and_their_sameness(tmp_path):
    record(tmp_path, paper.setting("adding", "dmu"), [[0.5, 5e-3, 5e-7], [0.5]])
    first = write_report(tmp_path, tmp_path / "one")
    second = write_report(tmp_path, tmp_path / "two")
    assert first.markdown.read_text() == second.markdown.read_text().replace(
        str(tmp_path / "two"), str(tmp_path / "one")
    )
    assert sorted(path.name for path in first.files) == ["adding.pdf", "adding.png", "adding.svg"]
    for one, two in zip(first.files, second.files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    assert not re.search(r'(src|href)="(?!data:|https://arxiv\.org/)', first.page.read_text())


def test_curves_are_told_apart_without_colour():
    assert set(STYLES) == set(paper.KINDS)
    for part in ("color", "linestyle", "marker"):
        assert len({str(style[part]) for style in STYLES.values()}) == len(paper.KINDS)


def test_labels_never_cover_one_another():
    ends = {"a": 1, "b": 1, "c": 1.5, "d": 30, "e": 50, "f": 51}
    placed = spread_out(ends, 4, highest=52)
    heights = [placed[name] for name in ends]
    assert all(high - low >= 4 for low, high in pairwise(heights))
    assert max(heights) <= 52
    assert placed["d"] == 30
    assert sum(heights[:3]) == pytest.approx(sum(list(ends.values())[:3]))  # moved up and down alike


def test_an_empty_folder_is_told_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="give --out or train first"):
        write_report(tmp_path / "nothing")
    Records(tmp_path, write=True).close()
    with pytest.raises(ValueError, match="has no finished epoch to report"):
        write_report(tmp_path)


class Page(HTMLParser):
    """Counts cells of the tables, pictures and the data inside a page."""

    def __init__(self, html):
        super().__init__()
        self.section, self.cell, self.data, self.in_data = None, None, "", False
        self.counts, self.widths = {}, []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if tag == "section":
            self.section = named["id"]
        if "data-threshold" in named:
            self.cell = (self.section, named["data-cell"], named["data-threshold"])
        if tag == "img":
            self.widths.append(int(named["data-natural-width"]))
        self.in_data = named.get("id") == "report-data"

    def handle_data(self, text):
        if self.cell is not None:
            self.counts[self.cell] = int(text)
            self.cell = None
        if self.in_data:
            self.data += text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(recorded, tmp_path):
    report = write_report(recorded)
    # A script notes in the page what only a browser knows: how wide each picture turned out to be.
    note = (
        "<script>addEventListener('load', () => { for (const image of document.images) "
        "image.dataset.naturalWidth = image.naturalWidth })</script>"
    )
    page = report.page.with_name("noted.html")
    page.write_text(report.page.read_text().replace("</body>", note + "</body>"))
    profile = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, profile, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    shown = Page(done.stdout)
    assert len(shown.widths) == 4
    assert min(shown.widths) > 500
    expected = {}
    studies = Records(recorded).studies()
    for picture in pictures(studies):
        for cell, study in picture.studies.items():
            for index, threshold in enumerate(THRESHOLDS):
                under = sum(min(run.curves["valid_loss"], default=1) < threshold for run in study.runs)
                expected[picture.name, cell, threshold_label(threshold)] = under
                assert row(study).under[index] == under
    assert shown.counts == expected
    assert len(json.loads(shown.data)) == 4
    assert {entry["task"] for entry in json.loads(shown.data)} == set(SYNTHETIC)
