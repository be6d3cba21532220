"""The report on real data: the paper's tables beside ours, and never anything else in our place."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from lab.made_studies import made, record

from deepmemory.lab import paper
from deepmemory.lab.report import write_report
from deepmemory.lab.report.blocks import to_markdown
from deepmemory.lab.report.cells import runs_in_words
from deepmemory.lab.report.claims import RULES, judge, our_scores, printed_scores, table_verdicts
from deepmemory.lab.report.figures import curve, draw_curves, render
from deepmemory.lab.report.real import document, summary
from deepmemory.lab.report.scores import (
    NO_DATA,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    Place,
    accounts,
    both_readings,
    nearest,
    outcome,
    printed_rows,
    scores,
    trained,
    welch,
)
from deepmemory.lab.report.text import print_report
from deepmemory.lab.settings import REAL, Setting, change

SESSIONS = {1: {"started": "2026-01-01T00:00:00", "device": "cuda:0", "git": None}}


def as_printed():
    """Five runs of every study in the paper's tables, with the paper's mean and what there is no data of left out."""
    for setting in paper.settings(("polymusic", "natlang", "translation"), ("rhn", "dmu", "dmu-c")):
        if setting.language not in paper.NO_DATA:
            place, _ = nearest(setting)
            rows = [row for name in paper.MEASURES for row in printed_rows(name)]
            tests = [test for of, _, test in rows if of == place]
            yield made(setting, [tests[0].mean + shift for shift in (-0.01, 0, 0, 0, 0.01)])


def lines_of(studies):
    return {(b.name, line.place): line for a in accounts(studies) for b in a.boards for line in b.lines}


def line_of(study, table=None):
    """The line of a study in the paper's table."""
    place, _ = nearest(study.setting)
    return lines_of([study])[table or place.task.replace("-", "_"), place]


# --- numbers --------------------------------------------------------------------------------------


CURVES = {  # the last epoch comes after the paper has stopped
    "train_loss": (1.5, 1.2, 1.1, 0.9),
    "valid_loss": (1.4, 1.3, math.nan, 1.0),
    "test_loss": (1.3, 1.6, 1.2, 1.0),
    "train_perplexity": (5.0, 4.0, 3.0, 2.0),
    "valid_perplexity": (4.0, 4.1, math.inf, 2.0),
    "test_perplexity": (4.5, 4.4, 4.0, 2.0),
    "train_accuracy": (0.7, 0.8, 0.9, 1.0),
    "valid_accuracy": (0.6, 0.7, 0.5, 1.0),
    "test_accuracy": (0.5, 0.4, 0.6, 1.0),
}


def with_first_epoch(study, **values):
    """The same study with other values in the first epoch of its first run."""
    run = study.runs[0]
    curves = {name: (values.get(name, curve[0]), *curve[1:]) for name, curve in run.curves.items()}
    return replace(study, runs=(replace(run, curves=curves), *study.runs[1:]))


def cut(run, epochs, state):
    """The run as it was after so many epochs."""
    return replace(run, curves={name: curve[:epochs] for name, curve in run.curves.items()}, state=state)


def test_a_score_is_taken_at_the_epoch_that_is_best_on_validation():
    study = made(paper.setting("translation", "dmu", 1), [6.0])
    run = replace(study.runs[0], curves=CURVES)
    assert scores(run, "loss", 3, by="loss") == (1.2, 1.3, 1.6)
    assert scores(run, "perplexity", 3, by="perplexity") == (5.0, 4.0, 4.5)
    assert scores(run, "accuracy", 3, by="accuracy") == (0.8, 0.7, 0.4)
    assert scores(run, "perplexity", 3, by="accuracy") == (4.0, 4.1, 4.4)


def test_perplexities_of_translation_are_those_of_the_most_accurate_epoch():
    study = made(paper.setting("translation", "dmu", 1), [6.0])
    better = dict.fromkeys(("train_perplexity", "valid_perplexity", "test_perplexity"), 5.0)
    study = with_first_epoch(study, **better)  # but not as accurate
    assert line_of(study).outcome.test.mean == 6.0
    text = to_markdown(document(accounts([study]), SESSIONS, "dmu report"))
    paper_and_ours = "| DMU, depth 1, Spanish | 6.04 ± 0.14 | 5.00 | 6.00 | 7.24 ± 0.17 | 9.09 |"
    assert paper_and_ours in text.split("### Which epoch")[1]


def test_perplexities_of_language_are_those_of_the_epoch_with_the_lowest_loss():
    study = made(paper.setting("natlang", "dmu", 1), [106.0])
    better = dict.fromkeys(("train_perplexity", "valid_perplexity", "test_perplexity"), 100.0)
    study = with_first_epoch(study, **better)  # at a higher loss
    assert line_of(study).outcome.test.mean == 106.0


def test_pixels_in_another_way_than_ours_are_told_over_all_epochs_that_were_trained():
    ours = paper.setting("pixel-mnist", "dmu")
    longer = replace(ours, lr=0.5, epochs=ours.epochs + 9)
    told = trained(made(longer, [0.99], epochs=longer.epochs))
    assert outcome(told, "accuracy").test.mean == 0.99
    assert told.words == f"lr = 0.5, epochs = {longer.epochs}"
    same = replace(ours, epochs=longer.epochs)
    assert outcome(trained(made(same, [0.99], epochs=longer.epochs)), "accuracy").test.mean == pytest.approx(0.891)


def test_another_release_of_the_data_is_another_reading_and_no_row_of_the_tables():
    german = change(paper.setting("translation", "dmu", 1), {"language": "german"})
    older = made(change(german, {"release": "2018"}), [4.75])
    (account,) = accounts([older])
    assert account.judged() == []
    (account,) = accounts([made(german, [4.2]), older])
    line = next(line for line in account.boards[0].lines if line.ours)
    assert (line.place.part, line.our_test.mean) == ("german", 4.2)
    reading = next(reading for reading in paper.TABLE_READINGS if reading.field == "release")
    assert [other.study for _, other in both_readings(reading, [account])] == [older]


def test_best_is_the_run_that_is_best_on_the_test_and_its_train_score_goes_with_it():
    study = made(paper.setting("natlang", "rhn", 2), [110.0, 100.0, 105.0])
    of = outcome(trained(study), "perplexity")
    assert of.test == pytest.approx((100.0, 105.0, 5.0))
    assert of.train == pytest.approx((90.0, 94.5, 4.5))
    assert of.valid.mean == pytest.approx(1.01 * 105)
    usual = line_of(study).usual
    assert usual.test.mean == pytest.approx(0.9 * 105)


def test_a_run_that_diverged_makes_the_mean_nan_and_is_counted():
    line = line_of(made(paper.setting("natlang", "rhn", 2), [110.0, math.nan, 105.0]))
    assert line.outcome.test.best == 105.0
    assert line.outcome.test.mean is None
    assert line.outcome.diverged == 1
    assert line.verdict == NOT_REPRODUCED
    lost = line_of(made(paper.setting("natlang", "rhn", 2), [math.nan, math.nan]))
    assert (lost.outcome.runs, lost.outcome.diverged, lost.verdict) == (2, 2, NOT_REPRODUCED)


@pytest.mark.parametrize(
    ("task", "cell", "mean", "verdict"),
    [
        ("polymusic", "dmu", 3.631 + 2 * 0.05 - 0.001, REPRODUCED),
        ("polymusic", "dmu", 3.631 + 2 * 0.05 + 0.001, NOT_REPRODUCED),
        ("polymusic", "dmu", 2.0, REPRODUCED),  # better
        ("pixel-mnist", "dmu", 0.99, REPRODUCED),
        ("pixel-mnist", "dmu", 0.98, NOT_REPRODUCED),
    ],
)
def test_two_standard_deviations_or_better(task, cell, mean, verdict):
    line = line_of(made(paper.setting(task, cell), [mean, mean]))
    assert line.verdict == verdict


def test_better_means_higher_for_accuracy():
    study = made(paper.setting("translation", "dmu", 1), [0.5 / 0.66])  # accuracy 0.66; the paper has 0.692, 0.005
    line = line_of(study, "translation_lr_ablation")
    assert line.outcome.test.mean == pytest.approx(0.66)
    assert line.deviations == pytest.approx(-6.4, abs=0.01)
    assert line.verdict == NOT_REPRODUCED


def test_seconds_of_runs_that_trained_side_by_side_count_once():
    study = made(paper.setting("natlang", "dmu", 1), [100.0] * 3)
    later = [replace(run, seed=run.seed + 3, session=2, seconds=5.0) for run in study.runs]
    assert trained(replace(study, runs=study.runs + tuple(later))).seconds == 65.0


# --- what stands in the paper's tables ------------------------------------------------------------


def test_every_setting_of_the_paper_has_its_place():
    for setting in paper.settings(REAL):
        one = trained(made(setting, [1.0], epochs=1))
        assert one.changes == (), setting
        assert one.epochs == setting.epochs
    places = {nearest(setting)[0] for setting in paper.settings(REAL)}
    assert len(places) == len(paper.settings(REAL))
    assert {place for name in paper.MEASURES for place, *_ in printed_rows(name)} <= places


@pytest.mark.parametrize(
    ("setting", "epochs", "words"),
    [
        (replace(paper.setting("polymusic", "dmu", 2), music="jsb-chorales"), 500, "music = jsb-chorales"),
        (replace(paper.setting("natlang", "dmu", 1), limit=30000), 3, "limit = 30000; after 3 of 40 epochs"),
        (paper.setting("natlang", "rhn", 5), 39, "after 39 of 40 epochs"),
        (replace(paper.setting("natlang", "dmu", 1), lr=0.1), 40, "lr = 0.1"),
        (replace(paper.setting("natlang", "rhn", 1), depth=3), 40, "depth = 3"),
        (replace(paper.setting("pixel-mnist", "dmu"), hidden=(64,)), 60, "hidden = (64,)"),
        (replace(paper.setting("translation", "dmu", 1), pairs=2000), 50, "pairs = 2000"),
    ],
)
def test_shortened_or_changed_studies_never_stand_in_the_papers_tables(setting, epochs, words):
    (account,) = found = accounts([made(setting, [1.0], epochs)])
    assert account.chosen == {}
    assert [one.words for one in account.others] == [words]
    assert {line.verdict for board in account.boards for line in board.lines} <= {NOT_RUN, NO_DATA}
    text = to_markdown(document(found, SESSIONS, "dmu report"))
    assert "nothing is compared with the paper" in text
    section = text.split("## Other settings of the real-data part")[1]
    assert words in section
    assert "paper" not in section.split("\n## ")[0].replace("not the paper's", "")


def test_a_longer_study_is_cut_where_the_paper_stops():
    study = made(paper.setting("natlang", "dmu", 1), [100.0], epochs=60)
    assert line_of(study).outcome.test.mean == 150.0  # the good epoch came later


def test_unfinished_runs_are_left_out_until_they_are_done():
    study = made(paper.setting("natlang", "dmu", 1), [106.0, 107.0])
    short = cut(study.runs[1], 5, "running")
    line = line_of(replace(study, runs=(study.runs[0], short)))
    assert (line.outcome.runs, line.outcome.training, line.outcome.test.mean) == (1, 1, 106.0)
    assert runs_in_words(line.outcome) == "1, 1 unfinished"
    diverged = replace(short, state="diverged")
    first = cut(study.runs[0], 5, "running")
    assert not trained(replace(study, runs=(first, diverged))).is_papers


def test_of_several_rates_of_a_dmu_c_the_best_on_validation_stands_in_the_table():
    base = paper.setting("natlang", "dmu-c", 1)
    studies = [made(base, [120.0] * 2), made(replace(base, lr=0.005), [111.0] * 2), made(replace(base, lr=1.0), [90.0])]
    (account,) = found = accounts(studies)
    assert account.chosen[Place("natlang", "dmu-c", 1)].study.setting.lr == 0.005  # of those with the most runs
    assert account.others == []
    text = to_markdown(document(found, SESSIONS, "dmu report"))
    assert "| 1 | DMU-C (lr 0.005) |" in text
    assert "| Language, DMU-C, depth 1 | 0.02 | 121.20 | 120.00; 120.00 ± 0.00 | 2 |" in text


def test_a_rate_is_the_best_in_what_its_table_is_about():
    base = paper.setting("translation", "dmu-c", 1)
    accurate, likely = made(base, [6.2]), made(replace(base, lr=0.0025), [6.1])
    (run,) = likely.runs  # its perplexity is the lower one; its accuracy becomes lower too
    lower = dict.fromkeys(("valid_accuracy", "test_accuracy"), (0.07,) * run.epochs)
    likely = replace(likely, runs=(replace(run, curves=run.curves | lower),))
    for studies in ([accurate, likely], [likely, accurate]):
        (account,) = found = accounts(studies)
        assert account.chosen[Place("translation", "dmu-c", 1, "spanish")].study.setting.lr == base.lr
        assert "| Translation, DMU-C, depth 1, Spanish | 0.0025 | 0.070 |" in to_markdown(
            document(found, SESSIONS, "dmu report")
        )


def test_a_rate_of_a_dmu_c_that_the_paper_did_not_train_is_another_setting():
    base = paper.setting("pixel-mnist", "dmu-c")
    studies = [made(replace(base, lr=lr), [right, right]) for lr, right in ((base.lr, 0.9), (0.005, 0.8), (0.1, 0.7))]
    language = made(paper.setting("natlang", "dmu-c"), [111.0])  # whose rates have a section of their own
    text = to_markdown(document(accounts([*studies, language]), SESSIONS, "dmu report"))
    for rate, right in ("0.005", "80.0%"), ("0.1", "70.0%"):
        assert f"| DMU-C, 128 units, ordered | lr = {rate} |" in text
        assert f"{right}; {right} ± 0.0 | 2 |" in text


def test_cells_that_the_paper_did_not_train_stand_without_its_numbers():
    line = line_of(made(paper.setting("polymusic", "gru"), [3.5]))
    assert (line.train, line.test, line.verdict) == (None, None, "")


def test_portuguese_has_no_data():
    lines = lines_of([made(paper.setting("translation", "dmu", 1), [6.0])])
    verdicts = {place.part: line.verdict for (_, place), line in lines.items() if place.size == 10}
    assert verdicts == {"spanish": NOT_RUN, "portuguese": NO_DATA, "german": NOT_RUN}


# --- statements -----------------------------------------------------------------------------------


def test_where_the_papers_text_and_its_tables_disagree():
    printed = printed_scores()
    judged = [judge(claim, printed, printed) for claim in paper.TABLE_CLAIMS]
    assert {v.claim.text for v in judged if not v.printed} == {
        "DMU is better than RHN at every depth for Spanish and German",
        "DMU is better than RHN at every depth but 1 for Portuguese",
        "Reducing the module's learning rate helps in music",
    }
    assert all(v.agrees == v.printed for v in judged)
    counted = next(v for v in judged if "15 of 20" in v.claim.text)
    assert counted.seen.startswith("DMU better in 15 of 20; not: Music depth 1 (3.631 against 3.598, chance 0.27), ")


def test_numbers_like_the_papers_give_the_papers_verdicts():
    found = accounts(list(as_printed()))
    verdicts = {v.claim.text: v for v in table_verdicts(found)}
    assert len(our_scores(found)) == 8 + 8 + 16 + 8 + 8 + 16
    assert verdicts["DMU outperforms RHN in 15 of 20 mean test scores"].seen.startswith("DMU better in 12 of 16; not: ")
    assert verdicts["DMU is better than RHN at every depth but 1 for Portuguese"].seen == "no data: Portuguese"
    for text, v in verdicts.items():
        if "helps in translation" not in text:  # accuracies made up from perplexities
            assert v.agrees == (None if "Portuguese" in text else v.printed), text
    judged = [line.verdict for line in lines_of(as_printed()).values() if line.measure != "accuracy"]
    assert judged.count(NO_DATA) == 8
    assert judged.count(REPRODUCED) == len(judged) - 8


def test_a_statement_stays_open_until_everything_it_is_about_was_run():
    found = accounts([made(paper.setting("natlang", "dmu", 1), [100.0])])
    (first, *_) = table_verdicts(found)
    assert first.claim.tables == ("natlang",)
    assert (first.agrees, first.seen) == (None, "not run: depth 1; depth 5 and 1 more")


def test_every_statement_has_a_rule_in_words():
    assert {claim.check for claim in paper.TABLE_CLAIMS} == set(RULES)
    assert all(rule.__doc__ for rule in RULES.values())


@pytest.mark.parametrize(
    ("more", "chance"),
    [([], ""), ([-1.0, 1.0], ", chance 0.29")],  # scipy.stats.ttest_ind with equal_var=False: 0.288
    ids=["one run each", "three runs each"],
)
def test_a_statement_that_differs_tells_the_chance_of_it(more, chance):
    means = {"rhn": 110.0, "dmu": 109.0}
    pair = [made(paper.setting("natlang", cell, 2), [mean + by for by in [0.0, *more]]) for cell, mean in means.items()]
    (verdict,) = [v for v in table_verdicts(accounts(pair)) if v.claim.check == "slightly"]
    assert verdict.seen == f"RHN better in 0 of 1; not: depth 2 (110 against 109{chance}); 0.9% apart"


def test_diverged_runs_lose_against_numbers():
    pair = [made(paper.setting("natlang", cell, 2), [test]) for cell, test in (("rhn", 110.0), ("dmu", math.nan))]
    (verdict,) = [v for v in table_verdicts(accounts(pair)) if v.claim.check == "slightly"]
    assert verdict.agrees is False  # better, but by more than slightly


# --- readings -------------------------------------------------------------------------------------


def test_both_readings_stand_side_by_side():
    base = paper.setting("translation", "dmu", 1)
    studies = [made(base, [6.0, 6.2]), made(replace(base, feedback="teacher"), [7.0, 7.2])]
    (account,) = found = accounts(studies)
    assert account.others == []
    text = to_markdown(document(found, SESSIONS, "dmu report"))
    row = "| DMU, depth 1, Spanish | perplexity | 5.89; 6.04 ± 0.14 | 6.00; 6.10 ± 0.14 | 7.00; 7.10 ± 0.14 |"
    assert row in text
    assert "“all”: not run. `dmu paper translation --pairs all` runs it." in text
    assert "In 1 of 1 rows the authors' way is nearer to the paper's number." in text


def test_an_unfinished_reading_says_so():
    base = replace(paper.setting("translation", "dmu", 1), pairs=0)
    text = to_markdown(document(accounts([made(base, [6.0], 10)]), SESSIONS, "dmu report"))
    assert "| perplexity | 5.89; 6.04 ± 0.14 | not run | 6.00 after 10 of 50 epochs |" in text


def test_every_reading_is_a_setting_with_a_command_that_gives_it():
    for reading in paper.TABLE_READINGS:
        option, given = reading.command.split()[-2:]
        for cell in reading.cells:
            german = change(paper.setting("translation", cell), {"language": "german"})
            setting = change(german, {option.removeprefix("--"): given})
            assert getattr(setting, reading.field) == reading.other != getattr(Setting(), reading.field)


# --- pages ----------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    """Some of language, and a quick look at music."""
    studies = [
        made(paper.setting("natlang", "dmu", 1), [105.5, 106.5]),
        made(paper.setting("natlang", "rhn", 1), [130.0, math.nan]),
        made(replace(paper.setting("polymusic", "dmu", 1), limit=64), [5.0], 4),
    ]
    record(tmp_path, studies)
    return tmp_path


class Tables(HTMLParser):
    """The rows of all tables of a page, and the data in it."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.data, self.inside = [], "", None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self.inside = "data" if dict(attributes).get("id") == "report-data" else tag

    def handle_data(self, text):
        if self.inside == "data":
            self.data += text
        elif self.rows and self.rows[-1] and self.inside in ("td", "strong", "code"):
            self.rows[-1][-1] += text


def test_both_pages_say_the_same(recorded):
    report = write_report(recorded)
    assert report.markdown.name == "real.md"
    text = report.markdown.read_text()
    assert "1 of 2 rows of the paper's tables that were run are reproduced." in text
    assert "2 studies have fewer than 5 runs" in text
    dmu = ["1", "DMU", "56.62; 59.42 ± 3.14", "94.95; 95.40 ± 0.64", "105.35; 106.13 ± 0.47"]
    dmu += ["105.50; 106.00 ± 0.71", "95.40", "-0.3", "2", "reproduced"]
    assert "| " + " | ".join(dmu) + " |" in text
    rhn = "| 106.11; 110.39 ± 4.36 | 130.00; nan | nan | nan | 2, 1 diverged | **not reproduced** |"
    assert rhn in text
    assert "The studies in this table trained 2:00 on GPUs." in text
    assert "| DMU, depth 1 | limit = 64; after 4 of 500 epochs | 4.500 | 5.000 | 1 |" in text
    shown = Tables(report.page.read_text())
    assert dmu in shown.rows
    data = {entry["task"]: entry for entry in json.loads(shown.data)}
    assert list(data) == ["polymusic", "natlang"]
    assert data["natlang"]["tables"][0]["rows"][1]["verdict"] == REPRODUCED
    assert data["polymusic"]["other"][0]["test"]["mean"] == 5.0
    assert {path.name for path in report.files if path.suffix == ".svg"} == {"natlang.svg", "polymusic-other.svg"}
    for figure in re.findall(r"\((figures/[^)]+)\)", text):
        assert (report.page.parent / figure).exists()
    assert "NaN" not in shown.data


def test_synthetic_and_real_share_one_page(recorded):
    from lab.report.test_synthetic import record as record_synthetic

    record_synthetic(recorded, paper.setting("adding", "dmu"), [[0.5, 5e-3]])
    report = write_report(recorded)
    assert report.markdown.name == "synthetic.md"
    assert "polymusic" not in report.markdown.read_text()
    assert "cuda:0" not in report.markdown.read_text()  # the other part's machine
    assert (report.page.parent / "real.md").exists()
    page = report.page.read_text()
    assert page.index('id="synthetic"') < page.index('id="real"')
    assert [entry["task"] for entry in report.as_data()] == ["adding", "polymusic", "natlang"]


def test_a_quick_look_has_a_figure_of_its_own(tmp_path):
    record(tmp_path, [made(replace(paper.setting("polymusic", "dmu", 1), limit=64), [5.0], 4)], device="cpu")
    report = write_report(tmp_path)
    assert {path.stem for path in report.files} == {"polymusic-other"}
    section = report.markdown.read_text().split("## Other settings of the real-data part")[1]
    assert "| DMU, depth 1 | limit = 64; after 4 of 500 epochs |" in section
    assert "(figures/polymusic-other.svg)" in section


def test_no_data_is_read_for_a_report(recorded, monkeypatch):
    import deepmemory.lab.tasks

    monkeypatch.setattr(deepmemory.lab.tasks, "real_task", None)
    write_report(recorded)


def test_curves_are_mean_and_range_of_the_runs_that_are_there():
    study = made(paper.setting("natlang", "dmu", 1), [100.0, 110.0, math.nan])
    epochs, mean, lowest, highest = curve(trained(study), "valid_perplexity")
    assert (epochs[0], epochs[-1], len(epochs)) == (1, 40, 40)
    assert (mean[38], lowest[38], highest[38]) == pytest.approx((106.05, 101.0, 111.1))


def test_of_a_long_curve_some_epochs_are_drawn_the_last_among_them():
    epochs, mean, *_ = curve(trained(made(paper.setting("polymusic", "dmu", 1), [3.6, 3.7])), "valid_loss")
    assert (epochs[0], epochs[1], epochs[-1], len(epochs)) == (4, 8, 500, 125)
    assert len(mean) == 125


def test_runs_that_never_had_a_number_can_be_drawn():
    (account,) = accounts([made(paper.setting("natlang", "dmu", 1), [math.nan])])
    (panels,) = account.curves().values()
    assert render(draw_curves(panels), "svg")


def cells_of(panels):
    return {panel: [one.place.cell for one in ones] for panel, ones in panels.items()}


def test_panels_of_a_figure_are_depths_and_hold_what_has_the_papers_settings():
    studies = [
        made(paper.setting("translation", cell, d), [6.0], 3) for d in (5, 1) for cell in ("dmu", "rhn", "dmu-c")
    ]
    (account,) = accounts(studies)
    ((name, panels),) = account.curves().items()
    assert name == "translation-spanish"
    assert cells_of(panels) == {("", 1): ["rhn", "dmu", "dmu-c"], ("", 5): ["rhn", "dmu", "dmu-c"]}


def test_other_settings_of_a_part_share_a_figure_and_a_reading_has_its_own():
    base, rhn = paper.setting("translation", "dmu", 1), paper.setting("translation", "rhn", 1)
    changed = [{"lr": 1.0}, {"lr": 1.0, "batch": 2}, {"batch": 2}, {"gamma": 0.5}, {"weight_decay": 0.1}]
    others = [replace(base, **change) for change in changed]
    reading = replace(base, feedback="teacher")
    (account,) = accounts([made(setting, [6.0]) for setting in (base, replace(rhn, lr=1.0), *others, reading)])
    drawn = account.curves()
    reading_alone = drawn.pop("translation-spanish-feedback-teacher")
    assert set(drawn) == {"translation-spanish", "translation-spanish-other"}
    panels = drawn["translation-spanish-other"]
    assert len(panels) == len(changed)  # more than a row
    assert cells_of(panels)["lr = 1.0", 1] == ["rhn", "dmu"]
    titles = [panel.get_title().replace("\u00a0", " ") for panel in draw_curves(panels).axes]
    assert titles[:2] == ["depth 1\nlr = 1.0", "depth 1\nlr = 1.0, batch = 2"]
    assert [panel.get_title() for panel in draw_curves(reading_alone).axes] == ["depth 1"]


def test_a_study_that_stopped_early_is_drawn_until_another_is_done():
    setting = paper.setting("natlang", "dmu-c", 2)
    early = made(setting, [300.0], 20)
    (account,) = accounts([early])
    assert [one.study for one in account.curves()["natlang"]["", 2]] == [early]
    whole = made(replace(setting, lr=0.004), [120.0])
    (account,) = accounts([early, whole])
    assert {name: [one.study for one in p["", 2]] for name, p in account.curves().items()} == {"natlang": [whole]}


def test_the_terminal_shows_paper_and_ours(recorded, capsys):
    from deepmemory.lab.records import Records

    print_report(accounts(Records(recorded).studies()))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["DMU", "1", "106.13", "±", "0.47", "106.00", "±", "0.71", "-0.3", "2", "reproduced"] in lines
    assert any(line[:3] == ["DMU,", "depth", "1"] and "500" in line for line in lines)


def test_the_summary_has_a_line_for_each_task_and_language():
    rows = summary(accounts(list(as_printed()))).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        "Music",
        "Language",
        "Translation Spanish",
        "Translation Portuguese",
        "Translation German",
    ]
    assert rows[0].startswith(
        "| Music | loss | 3.598 (depth 1) | 3.598 (depth 1) | 3.551 (depth 2) | 3.551 (depth 2) |"
    )
    assert "| – | no data |" in rows[3]  # noqa: RUF001


# --- rows that are not reproduced -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "samples", "expected"),
    [  # from scipy.stats.ttest_ind_from_stats(equal_var=False)
        (1.55, ((1.74, 5), (0.47, 5)), 0.11777),
        (-0.015, ((0.007, 5), (0.005, 5)), 0.00553),
        (4.0, ((1.5, 5), (0.6, 5)), 0.00226),
        (0.0, ((1.0, 5), (2.0, 3)), 1.0),
        (0.3, ((1.0, 30), (2.0, 51)), 0.37231),
    ],
)
def test_how_likely_a_difference_is_by_chance(difference, samples, expected):
    assert welch(difference, *samples) == pytest.approx(expected, abs=2e-5)


def test_a_row_that_is_not_reproduced_says_whether_it_may_be_luck():
    setting = paper.setting("natlang", "dmu", 2)  # the paper: 110.13 with a deviation of 0.47
    scattered = made(setting, [109.5, 110.0, 112.0, 113.0, 113.5])
    other = made(change(setting, {"weight_decay": "0"}), [130.0] * 5)
    text = to_markdown(document(accounts([scattered, other]), SESSIONS, "dmu report"))
    (row,) = re.findall(r"\| Language, DMU, depth 2 \| perplexity \|.*", text)
    assert "| 110.13 ± 0.47 | 111.60 ± 1.78 | 2 of 5 | 0.140 | weight_decay = 0.0: 130.00 ± 0.00 |" in row
    assert line_of(scattered).at_least_as_good == 2
    reproduced = to_markdown(document(accounts([made(setting, [110.0] * 5)]), SESSIONS, "dmu report"))
    assert "Rows that are not reproduced" not in reproduced


def test_accuracies_are_as_good_when_they_are_high():
    setting = paper.setting("translation", "dmu", 10)
    tests = [0.5 / accuracy for accuracy in (0.61, 0.62, 0.626)]  # the paper: 0.625
    line = line_of(made(setting, tests), "translation_lr_ablation")
    assert line.measure == "accuracy"
    assert line.at_least_as_good == 1


def test_time_on_gpus_and_on_cpus_is_told_apart(tmp_path):
    record(tmp_path, [made(paper.setting("natlang", "dmu", 1), [106.0] * 5)])
    text = (write_report(tmp_path).page.parent / "real.md").read_text()
    assert "Training took 1:00 on GPUs, all studies together." in text
    record(tmp_path, [made(paper.setting("natlang", "rhn", 1), [110.0] * 5)], device="cpu")
    text = (write_report(tmp_path).page.parent / "real.md").read_text()
    assert "Training took 1:00 on GPUs and 1:00 on CPUs, all studies together." in text
    record(tmp_path, [made(change(paper.setting("natlang", "rhn", 1), {"weight_decay": "0"}), [110.0] * 5)])
    text = (write_report(tmp_path).page.parent / "real.md").read_text()
    assert "Training took 2:00 on GPUs and 1:00 on CPUs, all studies together; 1:00 on GPUs and 1:00 on CPUs" in text
