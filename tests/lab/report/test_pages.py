"""Pages: what the committed ones say, what comes first, what is folded, and how each renderer shows it."""

import json
import math
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from lab.browser import CHROMIUM, Browser
from lab.made_studies import made, record, record_losses

from deepmemory.lab import paper
from deepmemory.lab.records import Records
from deepmemory.lab.report import print_report, write_report
from deepmemory.lab.report.blocks import Details, Heading, Items, Page, Section, Text
from deepmemory.lab.report.figures import STYLES, draw_curves, over_runs, render, spread_out
from deepmemory.lab.report.render import html, markdown, terminal
from deepmemory.lab.report.report import make_report
from deepmemory.lab.report.results.tables import real_results
from deepmemory.lab.report.table import Column, Mark, Table
from deepmemory.lab.settings import CELLS

ROOT = Path(__file__).parents[3]
KEPT = {
    "docs/reproduction": ["synthetic", "real"],
    "docs/gradients-study": ["gradients"],
    "docs/depth-study": ["beyond"],
    "docs/state-study": ["beyond"],
    "docs/adding-study": ["beyond"],
    "docs/music-study": ["beyond"],
    "docs/pixels-study": ["beyond"],
}


@pytest.fixture(scope="module")
def committed():
    """The pages of the committed records, by their path."""
    pages = {}
    for folder, names in KEPT.items():
        report = make_report(ROOT / folder, f"dmu report --out {folder} --to {folder}")
        pages |= {f"{folder}/{page.name}.md": markdown.render(page) for page in report.pages if page.name in names}
    return pages


def test_committed_pages_are_what_the_records_say(committed):
    assert sorted(committed) == sorted(f"{folder}/{name}.md" for folder, names in KEPT.items() for name in names)
    for path, text in committed.items():
        assert (ROOT / path).read_text() == text, f"{path}: run `make report`"


def test_committed_figures_are_those_that_a_page_shows(committed):
    tracked = subprocess.run(["git", "ls-files", *KEPT], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not in a git repository")
    images = [(Path(path).parent, re.findall(r"\((figures/[^)]+)\)", text)) for path, text in committed.items()]
    linked = {str(folder / name) for folder, names in images for name in names}
    assert {path for path in tracked.stdout.splitlines() if "figures" in path} == linked


@pytest.fixture
def recorded(tmp_path):
    """Some of language, a quick look at music, and two cells of adding."""
    studies = [
        made(paper.setting("natlang", "dmu", 1), [105.5, 106.5]),
        made(paper.setting("natlang", "rhn", 1), [130.0, math.nan]),
        made(replace(paper.setting("polymusic", "dmu", 1), limit=64), [5.0], 4),
    ]
    record(tmp_path, studies)
    record_losses(tmp_path, paper.setting("adding", "dmu"), [[0.5, 5e-3], [0.5, 5e-3]])
    record_losses(tmp_path, paper.setting("adding", "gru"), [[0.5, 0.5], [0.5, 5e-3]])
    return tmp_path


def section_of(out, title):
    pages = make_report(out, "dmu report").pages
    return next(section for page in pages for section in page.sections if section.title == title)


def tables_of(section):
    return [block for block in section.blocks if isinstance(block, Table)]


def test_what_was_run_comes_first_and_the_rest_is_folded(recorded):
    language = section_of(recorded, "Language")
    (table,) = tables_of(language)
    assert [row[:6] for row in table.rows] == [
        ["1", "RHN", "110.39 ± 4.36", "nan", "nan", Mark("worse (a hint: 2 runs)", False)],
        ["1", "DMU", "106.13 ± 0.47", "106.00 ± 0.71", "-0.3", Mark("reproduced (a hint: 2 runs)", True)],
    ]
    folded = [block for block in language.blocks if isinstance(block, Details)]
    assert language.blocks[-len(folded) :] == folded
    assert [len(block.blocks[0].items) for block in folded] == [6, 7, 3, 2]  # rows of two tables, statements, settings
    music = section_of(recorded, "Music")
    (table,) = tables_of(music)
    assert table.rows == [["DMU, depth 1", "limit = 64; after 4 of 500 epochs", "5.000", "10.261", "1", "4.500"]]
    adding = section_of(recorded, "Adding")
    assert [row[0] for row in tables_of(adding)[0].rows] == ["GRU", "DMU"]


def test_the_start_is_named_in_captions_and_settings(recorded):
    report = make_report(recorded, "dmu report")
    captions = {image.name: image.caption for page in report.pages for image in page.images()}
    assert "GRU update bias 0, DMU memory bias 3" in captions["adding"]
    assert "DMU memory bias 0" in captions["natlang"]
    settings = [block for block in section_of(recorded, "Adding").blocks if isinstance(block, Details)][-1].blocks[0]
    assert [row[2] for row in settings.rows] == ["update bias 0", "memory bias 3"]


def test_files_and_data(recorded, tmp_path):
    first, second = (write_report(recorded, tmp_path / name) for name in ("one", "two"))
    assert "sweeps.html" not in second.page.read_text()
    (second.page.parent / "sweeps.html").touch()  # a page of searches is linked where there is one
    assert first.page == tmp_path / "one" / "index.html"
    assert first.markdown.name == "synthetic.md"
    names = sorted(path.name for path in first.files if path.suffix == ".svg")
    assert names == ["adding.svg", "natlang.svg", "polymusic-other.svg"]
    for one, two in zip(first.files, second.files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    assert '<a href="sweeps.html">' in write_report(recorded, tmp_path / "two").page.read_text()
    page = first.page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#|https://arxiv\.org/)', page)
    data = json.loads(re.search(r'id="report-data">(.*)</script>', page)[1])
    assert data == json.loads(json.dumps(first.data))
    adding, music, language = data
    assert [(cell["cell"], cell["under"][0]) for cell in adding["cells"]] == [("gru", 1), ("dmu", 2)]
    assert music["other"][0]["test"]["mean"] == 5.0
    row = language["tables"][0]["rows"][1]
    assert (row["cell"], row["verdict"], row["ours"]["test"]["mean"], row["runs"]) == ("dmu", "reproduced", 106.0, 2)
    assert language["tables"][0]["rows"][0]["ours"]["test"]["mean"] is None  # nan is no JSON


def test_the_terminal_shows_what_was_trained_and_that_few_runs_are_a_hint(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    print_report(make_report(recorded, "dmu report"), ["natlang", "adding"])
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    row = "1 DMU 106.13 ± 0.47 106.00 ± 0.71 -0.3 reproduced (a hint: 2 runs)"
    assert row.split() in lines
    assert "agrees so far" in said
    assert "Chance (always the mean) is a loss of 0.039." in " ".join(said.split())
    assert "Music" not in said


def test_open_readings(recorded):
    record_losses(recorded, replace(paper.setting("adding", "dmu"), module_rate="0.001"), [[5e-3], [0.5]])
    table, *_ = tables_of(section_of(recorded, "What the paper leaves open"))
    assert [row[1:4] for row in table.rows] == [["DMU", "lr / 2n", "2/2 (2)"], ["DMU", "0.001", "1/2 (1)"]]
    translation = paper.setting("translation", "dmu", 1)
    record(recorded, [made(translation, [6.0, 6.2]), made(replace(translation, feedback="teacher"), [7.0], 10)])
    page = next(page for page in make_report(recorded, "dmu report").pages if page.name == "real")
    text = markdown.render(page)
    assert "| perplexity | 5.89; 6.04 ± 0.14 | 6.00; 6.10 ± 0.14 | 7.00 after 10 of 50 epochs |" in text
    assert "| DMU, depth 1, Spanish | 6.04 ± 0.14 | 6.10 ± 0.14 | 6.10 ± 0.14 | 7.24 ± 0.17 | 9.24 ± 0.21 |" in text
    assert "“all” was not run; this runs it: `dmu paper translation --pairs all`" in text


def test_rows_that_differ_say_whether_it_may_be_luck(recorded):
    setting = paper.setting("natlang", "dmu", 2)  # the paper: 110.13 with a deviation of 0.47
    record(recorded, [made(setting, [109.5, 110.0, 112.0, 113.0, 113.5]), made(replace(setting, lr=0.5), [130.0] * 5)])
    (table,) = tables_of(section_of(recorded, "Rows that differ from the paper"))
    (row,) = [row for row in table.rows if row[0] == "Language, DMU, depth 2"]
    assert row[1:] == [
        *("perplexity", "110.13 ± 0.47", "111.60 ± 1.78", Mark("worse", False)),
        *("2 of 5", "0.140", "lr = 0.5: 130.00 ± 0.00"),
    ]


def test_time_on_gpus_and_on_cpus_is_told_apart(recorded):
    record(recorded, [made(paper.setting("natlang", "dmu", 2), [110.0] * 5)], device="cpu")
    said = [block.text for block in section_of(recorded, "Language").blocks if isinstance(block, Text)]
    assert "The studies in this table trained 2:00 on GPUs and 1:00 on CPUs." in said


def test_no_study_of_the_papers_is_nothing_to_compare(tmp_path):
    record_losses(tmp_path, replace(paper.setting("adding", "dmu"), steps=10), [[5e-7]])
    record(tmp_path, [made(replace(paper.setting("polymusic", "dmu", 1), limit=64), [5.0], 4)])
    synthetic, real = make_report(tmp_path, "dmu report").pages
    for page in (synthetic, real):
        assert not tables_of(page.sections[0])  # no summary
        assert any(block.text.startswith("No study here has the paper's settings") for block in page.sections[0].blocks)


def test_no_data_is_read_for_a_report(recorded, monkeypatch):
    import deepmemory.lab.tasks

    monkeypatch.setattr(deepmemory.lab.tasks, "real_task", None)
    make_report(recorded, "dmu report")


def test_an_empty_folder_is_told_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first, or name another folder"):
        write_report(tmp_path / "nothing")
    Records(tmp_path, write=True).close()
    with pytest.raises(ValueError, match="has no finished epoch to report"):
        write_report(tmp_path)


EXAMPLE = Page(
    "example",
    "An example",
    [
        Section(
            "First [bold]",
            [
                Heading("Part"),
                Text("says `dmu`"),
                Items(["one", "two"]),
                Table(
                    [
                        Column("word", lambda row: row[0]),
                        Column("number", lambda row: row[1], numeric=True, brief=False),
                        Column("mark", lambda row: row[2]),
                    ],
                    [["a|b", "1", Mark("agrees", True)], ["c", "2", Mark("differs", False)]],
                ),
                Details("More", [Text("hidden")]),
            ],
            ("adding",),
        )
    ],
)


def test_markdown():
    assert markdown.render(EXAMPLE).split("\n\n") == [
        "# An example",
        "## First [bold]",
        "### Part",
        "says `dmu`",
        "- one\n- two",
        "| word | number | mark |\n| --- | ---: | --- |\n| a\\|b | 1 | agrees |\n| c | 2 | **differs** |",
        "<details>\n<summary>More</summary>",
        "hidden",
        "</details>\n",
    ]


def test_html():
    text = html.render("Title", [EXAMPLE], {})
    assert '<li><a href="#example-0">First [bold]</a></li>' in text
    assert '<section id="example-0">' in text
    assert '<tr><td>c</td><td class="number">2</td><td class="bad">differs</td></tr>' in text
    assert "<details><summary>More</summary>\n<p>hidden</p>\n</details>" in text


def test_terminal(capsys):
    terminal.show([EXAMPLE], ["adding"])
    said = capsys.readouterr().out
    assert "First [bold]" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["a|b", "agrees"] in lines
    assert ["c", "differs"] in lines
    assert "hidden" not in said
    assert "The report also has: More" in said
    terminal.show([EXAMPLE], ["natlang"])
    assert capsys.readouterr().out == ""


def test_curves_are_told_apart_without_colour():
    assert set(STYLES) == set(paper.KINDS) >= set(CELLS)
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


def test_curves_are_middle_and_range_of_the_runs_that_are_there():
    curves = [{1: 1.0, 2: 4.0}, {1: 2.0, 2: math.nan}, {1: 6.0}]
    assert over_runs(curves, max) == ([1, 2], [1.0, 4.0], [6.0, 4.0], [6.0, 4.0])
    epochs, *_ = over_runs([dict.fromkeys(range(1, 501), 1.0)], max)
    assert (epochs[0], epochs[1], epochs[-1], len(epochs)) == (4, 12, 500, 63)  # the last one among them


def test_runs_that_never_had_a_number_can_be_drawn():
    (results,) = real_results([made(paper.setting("natlang", "dmu", 1), [math.nan])])
    (panels,) = results.figures().values()
    assert render(draw_curves(panels), "svg")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser_wide_and_on_a_phone(recorded, tmp_path):
    report = write_report(recorded)
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 390):
            metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.call("Emulation.setDeviceMetricsOverride", **metrics)
            browser.call("Page.navigate", url=report.page.as_uri())
            browser.wait("document.readyState == 'complete' && document.images.length == 3")
            assert browser.run("[...document.images].every(image => image.naturalWidth > 500)")
            assert browser.run("document.documentElement.scrollWidth") <= width  # only tables and figures scroll
            assert browser.run("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
        assert browser.console == []
