"""Our rows of the paper's tables: which study stands where, its scores, its verdict; and verdicts on statements."""

import math
from dataclasses import replace

import pytest
from lab.made_studies import made

from deepmemory.lab import paper
from deepmemory.lab.beyond import depth
from deepmemory.lab.records import Study
from deepmemory.lab.report.results.stats import seconds_by_session, welch
from deepmemory.lab.report.results.table_claims import RULES, judge, printed_scores, table_verdicts
from deepmemory.lab.report.results.tables import (
    Experiment,
    best_scores,
    nearest,
    printed_rows,
    real_results,
    study_result,
    tried_rates,
)
from deepmemory.lab.report.words import BETTER, NO_DATA, NOT_RUN, REPRODUCED, WORSE
from deepmemory.lab.settings import REAL, Setting, change

LANGUAGE = paper.setting("natlang", "dmu", 1)
TRANSLATION = paper.setting("translation", "dmu", 1)
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


def as_printed():
    """Five runs of every study in the paper's tables, with the paper's mean; what there is no data of is left out."""
    printed = {of: test for name in reversed(paper.MEASURES) for of, (_, test) in printed_rows(name).items()}
    for setting in paper.settings(("polymusic", "natlang", "translation"), ("rhn", "dmu", "dmu-c")):
        if setting.language not in paper.NO_DATA:
            mean = printed[nearest(setting)[0]].mean
            yield made(setting, [mean + shift for shift in (-0.01, 0, 0, 0, 0.01)])


def rows_of(studies):
    """Rows by table and experiment."""
    tables = [table for one in real_results(studies) for table in one.tables]
    return {(table.name, row.experiment): row for table in tables for row in table.rows}


def row_of(study, table=None):
    """The row of a study in a table of the paper, the main one of its task if not told."""
    experiment, _ = nearest(study.setting)
    return rows_of([study])[table or experiment.task.replace("-", "_"), experiment]


def with_first_epoch(study, **values):
    """The same study with other values in the first epoch of its first run."""
    run = study.runs[0]
    curves = {name: (values.get(name, curve[0]), *curve[1:]) for name, curve in run.curves.items()}
    return replace(study, runs=(replace(run, curves=curves), *study.runs[1:]))


def cut(run, epochs, state):
    """The run as it was after so many epochs."""
    return replace(run, curves={name: curve[:epochs] for name, curve in run.curves.items()}, state=state)


@pytest.mark.parametrize(
    ("measure", "by", "scores"),
    [
        ("loss", "loss", (1.2, 1.3, 1.6)),
        ("perplexity", "perplexity", (5.0, 4.0, 4.5)),
        ("accuracy", "accuracy", (0.8, 0.7, 0.4)),
        ("perplexity", "accuracy", (4.0, 4.1, 4.4)),
    ],
)
def test_a_score_is_taken_at_the_epoch_that_is_best_on_validation(measure, by, scores):
    run = replace(made(TRANSLATION, [6.0]).runs[0], curves=CURVES)
    assert best_scores(run, measure, 3, by=by) == scores


@pytest.mark.parametrize(("setting", "test"), [(TRANSLATION, 6.0), (LANGUAGE, 106.0)])
def test_perplexities_are_those_of_the_most_accurate_epoch_or_of_the_lowest_loss(setting, test):
    better = dict.fromkeys(("train_perplexity", "valid_perplexity", "test_perplexity"), 0.9 * test)
    assert row_of(with_first_epoch(made(setting, [test]), **better)).scores.test.mean == test


def test_best_is_the_run_that_is_best_on_the_test_and_its_train_score_goes_with_it():
    row = row_of(made(paper.setting("natlang", "rhn", 2), [110.0, 100.0, 105.0]))
    assert row.scores.test == pytest.approx((100.0, 105.0, 5.0))
    assert row.scores.train == pytest.approx((90.0, 94.5, 4.5))
    assert row.scores.valid.mean == pytest.approx(1.01 * 105)
    assert row.usual_perplexity.test.mean == pytest.approx(0.9 * 105)


def test_a_run_that_diverged_makes_the_mean_nan_and_the_row_worse():
    row = row_of(made(paper.setting("natlang", "rhn", 2), [110.0, math.nan, 105.0]))
    assert (row.scores.test.best, row.scores.test.mean, row.scores.diverged, row.verdict) == (105.0, None, 1, WORSE)
    lost = row_of(made(paper.setting("natlang", "rhn", 2), [math.nan, math.nan]))
    assert (len(lost.scores.tests), lost.scores.diverged, lost.verdict) == (2, 2, WORSE)


@pytest.mark.parametrize(
    ("task", "cell", "mean", "verdict"),
    [
        ("polymusic", "dmu", 3.631 + 2 * 0.05 - 0.001, REPRODUCED),
        ("polymusic", "dmu", 3.631 + 2 * 0.05 + 0.001, WORSE),
        ("polymusic", "dmu", 3.631 - 2 * 0.05 + 0.001, REPRODUCED),
        ("polymusic", "dmu", 3.631 - 2 * 0.05 - 0.001, BETTER),
        ("pixel-mnist", "dmu", 0.99, BETTER),
        ("pixel-mnist", "dmu", 0.98, WORSE),
    ],
)
def test_within_two_standard_deviations_either_way_is_reproduced(task, cell, mean, verdict):
    row = row_of(made(paper.setting(task, cell), [mean] * 5))
    assert (row.verdict, row.mark.text, row.mark.good) == (verdict, verdict, verdict != WORSE)
    assert row_of(made(paper.setting(task, cell), [mean] * 2)).mark.text == f"{verdict} (a hint: 2 runs)"


def test_accuracies_are_better_when_they_are_high():
    tests = [0.5 / accuracy for accuracy in (0.61, 0.62, 0.626)]  # the paper: 0.625 ± 0.003
    row = row_of(made(paper.setting("translation", "dmu", 10), tests), "translation_lr_ablation")
    assert row.scores.test.mean == pytest.approx(0.6187, abs=1e-4)
    assert row.deviations == pytest.approx(-2.1, abs=0.02)
    assert (row.verdict, row.at_least_as_good) == (WORSE, 1)


def test_seconds_of_runs_that_trained_side_by_side_count_once():
    study = made(LANGUAGE, [100.0] * 3)
    later = [replace(run, seed=run.seed + 3, session=2, seconds=5.0) for run in study.runs]
    assert seconds_by_session(replace(study, runs=study.runs + tuple(later))) == {1: 60.0, 2: 5.0}


def test_seconds_of_large_networks_that_trained_one_after_another_are_added():
    (run,) = made(LANGUAGE, [100.0]).runs
    times = [(1, 60.0), (1, 70.0), (2, 80.0), (2, 80.0)]  # the last two in one stack
    runs = [replace(run, seed=seed, session=session, seconds=took) for seed, (session, took) in enumerate(times)]
    assert seconds_by_session(Study(depth.setting("lstm"), (), (), tuple(runs))) == {1: 130.0, 2: 80.0}


def test_every_setting_of_the_paper_has_its_row():
    settings = paper.settings(REAL)
    for one in (study_result(made(setting, [1.0], epochs=1)) for setting in settings):
        assert (one.changes, one.epochs) == ((), one.study.setting.epochs)
    experiments = {nearest(setting)[0] for setting in settings}
    assert len(experiments) == len(settings)
    assert {experiment for name in paper.MEASURES for experiment in printed_rows(name)} <= experiments


@pytest.mark.parametrize(
    ("setting", "epochs", "title"),
    [
        (replace(paper.setting("polymusic", "dmu", 2), music="jsb-chorales"), 500, "music = jsb-chorales"),
        (replace(LANGUAGE, limit=30000), 3, "limit = 30000; after 3 of 40 epochs"),
        (paper.setting("natlang", "rhn", 5), 39, "after 39 of 40 epochs"),
        (replace(LANGUAGE, lr=0.1), 40, "lr = 0.1"),
        (replace(paper.setting("natlang", "rhn", 1), depth=3), 40, "depth = 3"),
        (replace(paper.setting("pixel-mnist", "dmu"), hidden=(64,)), 60, "hidden = (64,)"),
        (replace(TRANSLATION, pairs=2000), 50, "pairs = 2000"),
        (replace(paper.setting("pixel-mnist", "dmu-c"), lr=0.1), 36, "lr = 0.1"),  # a DMU-C that is not the paper's
    ],
)
def test_shortened_or_changed_studies_never_stand_in_the_papers_tables(setting, epochs, title):
    (results,) = real_results([made(setting, [1.0], epochs)])
    assert results.chosen == {}
    assert [one.title for one in results.others] == [title]
    assert {row.verdict for row in results.rows.values()} <= {NOT_RUN, NO_DATA}


def test_a_longer_study_is_cut_where_the_paper_stops():
    assert row_of(made(LANGUAGE, [100.0], epochs=60)).scores.test.mean == 150.0  # the good epoch came later
    pixels = paper.setting("pixel-mnist", "dmu")
    longer = replace(pixels, lr=0.5, epochs=pixels.epochs + 9)  # another recipe: all that was trained counts
    told = study_result(made(longer, [0.99], epochs=longer.epochs))
    assert told.scores("accuracy").test.mean == 0.99
    assert told.title == f"lr = 0.5, epochs = {longer.epochs}"
    same = study_result(made(replace(pixels, epochs=longer.epochs), [0.99], epochs=longer.epochs))
    assert same.scores("accuracy").test.mean == pytest.approx(0.891)


def test_unfinished_runs_are_left_out_until_they_are_done():
    study = made(LANGUAGE, [106.0, 107.0])
    row = row_of(replace(study, runs=(study.runs[0], cut(study.runs[1], 5, "running"))))
    assert (row.scores.tests, row.scores.unfinished) == ((106.0,), 1)
    both = (cut(study.runs[0], 5, "running"), cut(study.runs[1], 5, "diverged"))
    assert not study_result(replace(study, runs=both)).is_papers


def test_of_several_rates_of_a_dmu_c_the_best_on_validation_stands_in_the_table():
    base = paper.setting("natlang", "dmu-c", 1)
    rates = {0.02: [120.0] * 2, 0.005: [111.0] * 2, 1.0: [90.0]}
    (results,) = found = real_results([made(replace(base, lr=lr), tests) for lr, tests in rates.items()])
    assert results.chosen[Experiment("natlang", "dmu-c", 1)].study.setting.lr == 0.005  # of those with the most runs
    assert results.others == []
    assert [one.study.setting.lr for one in tried_rates(found)] == [0.005, 0.02, 1.0]


def test_a_rate_is_the_best_by_the_measure_of_its_table():
    base = paper.setting("translation", "dmu-c", 1)
    accurate, likely = made(base, [6.2]), made(replace(base, lr=0.0025), [6.1])
    (run,) = likely.runs  # its perplexity is the lower one; its accuracy becomes lower too
    low = dict.fromkeys(("valid_accuracy", "test_accuracy"), (0.07,) * run.epochs)
    likely = replace(likely, runs=(replace(run, curves={**run.curves, **low}),))
    for studies in ([accurate, likely], [likely, accurate]):
        (results,) = real_results(studies)
        assert results.chosen[Experiment("translation", "dmu-c", 1, "spanish")].study.setting.lr == base.lr


def test_cells_that_the_paper_did_not_train_stand_without_its_numbers():
    row = row_of(made(paper.setting("polymusic", "gru"), [3.5]))
    assert (row.paper_train, row.paper_test, row.verdict) == (None, None, "")


def test_portuguese_has_no_data():
    rows = rows_of([made(TRANSLATION, [6.0])])
    verdicts = {experiment.dataset: row.verdict for (_, experiment), row in rows.items() if experiment.size == 10}
    assert verdicts == {"spanish": NOT_RUN, "portuguese": NO_DATA, "german": NOT_RUN}


def test_where_the_papers_text_and_its_tables_disagree():
    judged = [judge(claim, printed_scores(claim.tables)) for claim in paper.TABLE_CLAIMS]
    assert {v.claim.text for v in judged if not v.in_paper} == {
        "DMU is better than RHN at every depth for Spanish and German",
        "DMU is better than RHN at every depth but 1 for Portuguese",
        "Reducing the module's learning rate helps in music",
    }
    assert all(v.agrees == v.in_paper for v in judged)
    assert {claim.check for claim in paper.TABLE_CLAIMS} == set(RULES)
    counted = next(v for v in judged if "15 of 20" in v.claim.text)
    assert counted.seen.startswith("DMU better in 15 of 20; not: Music depth 1 (3.631 against 3.598, p = 0.27), ")


def test_numbers_like_the_papers_give_the_papers_verdicts():
    results = real_results(list(as_printed()))
    for v in table_verdicts(results):
        if "helps in translation" not in v.claim.text:  # accuracies made up from perplexities
            assert v.agrees == (None if "Portuguese" in v.claim.text else v.in_paper), v.claim.text
        if "15 of 20" in v.claim.text:
            assert v.seen.startswith("DMU better in 12 of 16; not: ")
            assert v.seen.endswith("; without Portuguese")
    verdicts = [row.verdict for one in results for row in one.rows.values() if row.measure != "accuracy"]
    assert (verdicts.count(NO_DATA), verdicts.count(REPRODUCED)) == (8, len(verdicts) - 8)
    assert [one.verdicts("german").count(REPRODUCED) for one in results] == [0, 0, 8]


def test_a_statement_stays_open_until_everything_it_is_about_was_run():
    first = table_verdicts(real_results([made(LANGUAGE, [100.0])]))[0]
    assert first.claim.tables == ("natlang",)
    assert (first.agrees, first.seen) == (None, "not run: depth 1; depth 5 and 1 more")


@pytest.mark.parametrize(
    ("dmu", "seen"),
    [
        ([109.0], "depth 2 (110 against 109); 0.9% apart"),
        ([108.0, 109.0, 110.0], "depth 2 (110 against 109, p = 0.29); 0.9% apart"),  # scipy's ttest_ind: 0.288
        ([math.nan], "RHN better in 1 of 1; inf% apart"),  # better, but by more than slightly
    ],
)
def test_a_statement_that_differs_tells_its_p_value(dmu, seen):
    rhn = [109.0, 110.0, 111.0] if len(dmu) > 1 else [110.0]
    pair = [made(paper.setting("natlang", cell, 2), tests) for cell, tests in (("rhn", rhn), ("dmu", dmu))]
    (verdict,) = [v for v in table_verdicts(real_results(pair)) if v.claim.check == "slightly"]
    assert verdict.agrees is False
    assert verdict.seen.endswith(seen)
    assert verdict.mark.text == f"differs (a hint: {len(dmu)} run{'s' * (len(dmu) > 1)})"


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


def test_every_reading_is_a_setting_with_a_command_that_gives_it():
    for reading in paper.TABLE_READINGS:
        option, given = reading.command.split()[-2:]
        for cell in reading.cells:
            german = change(paper.setting("translation", cell), {"language": "german"})
            setting = change(german, {option.removeprefix("--"): given})
            assert getattr(setting, reading.field) == reading.other != getattr(Setting(), reading.field)
            assert study_result(made(setting, [6.0])).reading is reading


def test_panels_of_a_figure_are_depths_and_hold_what_has_the_papers_settings():
    cells = ("dmu", "rhn", "dmu-c")
    (results,) = real_results([made(paper.setting("translation", cell, d), [6.0], 3) for d in (5, 1) for cell in cells])
    panels = results.figures()["translation-spanish"]
    assert {panel: [one.experiment.cell for one in ones] for panel, ones in panels.items()} == {
        ("", 1): ["rhn", "dmu", "dmu-c"],
        ("", 5): ["rhn", "dmu", "dmu-c"],
    }


def test_other_settings_of_a_dataset_share_a_figure_and_a_reading_has_its_own():
    changed = [{"lr": 1.0}, {"lr": 1.0, "batch": 2}, {"batch": 2}]
    others = [replace(TRANSLATION, **change) for change in changed]
    others.append(replace(paper.setting("translation", "rhn", 1), lr=1.0))
    settings = [TRANSLATION, *others, replace(TRANSLATION, feedback="teacher")]
    (results,) = real_results([made(setting, [6.0]) for setting in settings])
    figures = results.figures()
    assert set(figures) == {f"translation-spanish{end}" for end in ("", "-other", "-feedback-teacher")}
    panels = figures["translation-spanish-other"]
    assert list(panels) == [("lr = 1.0", 1), ("lr = 1.0, batch = 2", 1), ("batch = 2", 1)]
    assert [one.experiment.cell for one in panels["lr = 1.0", 1]] == ["rhn", "dmu"]


def test_a_study_that_stopped_early_is_drawn_until_another_is_done():
    setting = paper.setting("natlang", "dmu-c", 2)
    early, whole = made(setting, [300.0], 20), made(replace(setting, lr=0.004), [120.0])
    for studies, drawn in (([early], early), ([early, whole], whole)):
        (results,) = real_results(studies)
        assert [one.study for one in results.figures()["natlang"]["", 2]] == [drawn]
