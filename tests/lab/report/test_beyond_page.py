"""The page about experiments beyond the paper: what it says of runs that are known."""

import math
from dataclasses import replace

import pytest
from lab.made_studies import made as made_of_paper
from lab.made_studies import record

from deepmemory.lab.beyond import EXPERIMENTS, cells, depth, long_adding, music, pixels, state_tracking
from deepmemory.lab.beyond.models import kind_of, weights_of
from deepmemory.lab.records import DIVERGED, SPENT, Records, Run, Study
from deepmemory.lab.report.beyond_figures import STYLES, draw_depth, draw_long_adding, draw_scores, draw_state_tracking
from deepmemory.lab.report.render import markdown
from deepmemory.lab.report.report import make_report
from deepmemory.lab.report.results.beyond import beyond_results
from deepmemory.lab.report.sections.beyond import experiment_blocks
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import TASK_CLASSES, series_of


def made(setting, tests, valid=None):
    """A study with one run for each dictionary of test measures; None is a run that diverged."""
    runs = []
    for seed, test in enumerate(tests):
        values = dict.fromkeys(series_of(setting.task), 0.5)
        values |= {f"valid_{name}": value for name, value in (valid or test or {"loss": math.nan}).items()}
        state, best = (SPENT, 1) if test else (DIVERGED, None)
        curves = {name: (value,) for name, value in values.items()}
        runs.append(Run(seed, state, (None,) * 5, best, test, 60.0, 1, curves))
    return Study(setting, series_of(setting.task), (), tuple(runs))


def losses(*perplexities):
    return [None if p is None else {"loss": math.log(p)} for p in perplexities]


DEPTH = [
    made(depth.setting("dmu", 2, "small"), losses(80, 82, 84)),
    made(depth.setting("residual", 3, "small"), losses(70, 72, 74)),
    made(depth.setting("dmu", 3, "small"), losses(90, None, 94)),
    made(depth.setting("gru", 1, "small"), losses(85, 85, 85)),
]


def test_perplexities_are_means_over_runs_of_exp_of_the_loss():
    (results,) = beyond_results(DEPTH)
    assert [one.title for one in results.outcomes] == ["DMU, n = 2", "DMU, n = 3", "residual DMU, n = 3", "GRU"]
    plain = results.outcomes[0]
    assert plain.test(scale=math.exp).mean == pytest.approx(82)
    assert plain.test(scale=math.exp).std == pytest.approx(2)
    assert results.outcomes[1].diverged == 1
    assert len(results.outcomes[1].tested) == 2


def test_models_of_one_size_have_its_number_of_weights():
    for setting in depth.settings("small"):
        assert weights_of(setting) == pytest.approx(depth.SIZES["small"], rel=0.02)


def test_a_study_with_other_settings_stands_apart(tmp_path):
    other = made(replace(DEPTH[0].setting, lr=0.5), losses(300))
    (results,) = beyond_results([*DEPTH, other])
    assert [one.study for one in results.changed] == [other]
    assert other not in [one.study for one in results.shown]
    (alone,) = beyond_results([other])
    assert [one.study for one in alone.shown] == [other]


def test_the_residual_curve_begins_with_the_plain_ones():
    (results,) = beyond_results(DEPTH)
    (panel,) = draw_depth(results).axes
    curves = sorted(tuple(line.get_xdata()) for line in panel.lines)
    assert curves == [(0, 1), (2, 3), (2, 3)]  # the GRU's level line, plain, residual


def test_the_page_names_what_is_missing(tmp_path):
    record(tmp_path, DEPTH)
    (page,) = make_report(tmp_path, "dmu report").pages
    text = markdown.render(page)
    total = len(depth.all_settings())
    assert f"So far there are 4 of {total} studies." in text
    assert "Every large model is tried at several learning rates, one run each;" in text
    assert "models in the table" not in text  # all of them have all runs
    assert "| small | residual DMU | 3 |" in text


def test_every_task_has_a_title():
    from deepmemory.lab.report.words import TITLES

    assert set(TITLES) == set(TASK_CLASSES)


def tracked(setting, curves):
    """A study of state tracking: the validation accuracy at 8 times the length by epoch, for each run."""
    runs = []
    for seed, curve in enumerate(curves):
        values = {name: (1 - setting.lr,) * len(curve) for name in series_of(setting.task)}
        values["valid_accuracy_8"] = tuple(curve)
        test = {"loss": 0.1, "accuracy": 1.0, "accuracy_8": curve[-1], "accuracy_64": 0.5}
        runs.append(Run(seed, SPENT, (None,) * 5, len(curve), test, 60.0, 1, values))
    return Study(setting, series_of(setting.task), (), tuple(runs))


def test_the_rate_that_is_best_on_validation_is_shown():
    one = state_tracking.setting("dmu", 2, "a5")
    studies = [tracked(replace(one, lr=lr), [[0.5, 0.6]]) for lr in state_tracking.RATES]
    (results,) = beyond_results(studies)
    assert [of.setting.lr for of in results.shown] == [max(state_tracking.RATES)]  # its made loss is the lowest
    assert sorted(of.setting.lr for of in results.rest) == sorted(state_tracking.RATES)[:-1]


def test_the_training_time_is_that_of_all_runs(tmp_path):
    setting = depth.setting("residual", 5)
    study = made(setting, losses(70, 71, 72))
    times = [(1, 57.0), (2, 68.0), (2, 69.0)]
    runs = [replace(run, session=of, seconds=took) for run, (of, took) in zip(study.runs, times, strict=True)]
    (results,) = beyond_results(
        [replace(study, runs=tuple(runs)), made(depth.setting("gru", 1, "small"), losses(85, 86))]
    )
    assert [one.seconds for one in results.outcomes] == [60.0, 57.0 + 68.0 + 69.0]


def test_runs_at_99_percent_are_counted_from_the_first_time(tmp_path):
    study = tracked(state_tracking.setting("gru", 1, "s3"), [[0.5, 0.995, 0.9], [0.2, 0.3, 0.99], [0.1, 0.1, 0.1]])
    (results,) = beyond_results([study])
    (outcome,) = results.shown
    assert outcome.solved_by_epoch("accuracy_8") == [0, 0, 1, 2]
    assert outcome.solved("accuracy_8") == 1  # of the best weights on the test set
    (panel,) = draw_state_tracking(results).axes
    assert panel.lines[0].get_xdata().tolist() == [0, 100, 200, 300]
    assert panel.lines[0].get_ydata().tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3])


def test_the_page_tells_the_length_in_training():
    (results,) = beyond_results([tracked(state_tracking.quick(state_tracking.setting("gru", 1, "s3")), [[0.5]])])
    assert "training have T = 8 steps" in str(experiment_blocks(results))


def test_a_control_on_a_task_of_the_paper_leaves_its_page_to_the_others(tmp_path):
    record(tmp_path, [made(Setting(cell=cell), [{"loss": 1e-3, "accuracy": 0.5}]) for cell in ("dmu", "mingru")])
    assert [page.name for page in make_report(tmp_path, "dmu report").pages] == ["synthetic"]


def test_loss_by_length():
    lengths = long_adding.LENGTHS
    tests = {length: [{"loss": length * 1e-6, "accuracy": 1.0}] * 2 for length in lengths}
    (results,) = beyond_results([made(long_adding.setting("dmu", 1, length), tests[length]) for length in lengths])
    (panel,) = draw_long_adding(results).axes
    curve, lem = panel.lines
    assert tuple(curve.get_xdata()) == lengths
    assert curve.get_ydata().tolist() == pytest.approx([1e-3, 5e-3, 1e-2])
    assert lem.get_ydata().tolist() == pytest.approx([6e-6])


def test_long_sequences_of_the_paper_leave_its_own_page(tmp_path):
    record(tmp_path, [made(long_adding.setting("mingru"), [{"loss": 1e-3, "accuracy": 0.5}])])
    assert [page.name for page in make_report(tmp_path, "dmu report").pages] == ["beyond"]


def scored(setting, tests, valid=None):
    """A finished study of a task of the paper; the score is that of its table, and the validation's, too."""
    study = made_of_paper(setting, tests, epochs=3)
    runs = []
    for run, test in zip(study.runs, tests, strict=True):
        curves = dict(run.curves)
        if valid is not None:
            curves["valid_loss"] = curves["valid_accuracy"] = (valid,) * 3
        measures = dict.fromkeys(("loss", *TASK_CLASSES[setting.task].measures), test)
        runs.append(replace(run, best_epoch=2, test=measures, curves=curves))
    return replace(study, runs=tuple(runs))


def test_the_page_says_where_the_dmu_wins_and_where_it_does_not(tmp_path):
    studies = [
        scored(pixels.setting("residual", 3), [0.965, 0.967, 0.968, 0.966, 0.969]),
        scored(pixels.setting("gru"), [0.955, 0.957, 0.958, 0.956, 0.959]),
        scored(pixels.setting("dmu", 2, "1m"), [0.95, 0.951]),
        scored(pixels.setting("lstm", 1, "1m"), [0.97, 0.971]),
    ]
    (results,) = beyond_results(studies)
    assert [one.verdict(5).text for one in results.comparisons()] == ["DMU better", "DMU worse (a hint: 2 runs)"]
    text = markdown.render(page_of(tmp_path, studies))
    assert "| 100k | residual DMU, n = 3 | 96.70% ± 0.16 | GRU | 95.70% ± 0.16 |" in text
    assert "| DMU better | DMU better |" in text  # than the GRU, and than the published number
    assert "So far there are 4 of 25 studies. All 5 runs are there for 2 of the 4 models in the table, and at" in text
    assert "at least 2 for the others." in text
    assert "the same learning rates, 2 runs each;" in text


def test_the_best_dmu_is_chosen_on_validation():
    one = scored(music.setting("dmu", 2), [3.3, 3.4], valid=3.1)
    two = scored(music.setting("residual", 3), [3.1, 3.2], valid=3.2)
    (results,) = beyond_results([one, two, scored(music.setting("lstm"), [3.3, 3.5], valid=3.3)])
    (compared,) = results.comparisons()
    assert compared.dmu.title == "DMU, n = 2"
    assert compared.verdict(2).text == "no clear difference"
    (alone,) = beyond_results([one])
    assert alone.comparisons() == []


def test_scores_of_every_run_and_what_is_published():
    (results,) = beyond_results([scored(music.setting("gru", 1, size), [3.3, 3.5]) for size in ("100k", "1m")])
    first, _ = draw_scores(results).axes
    runs, mean, *published = [line.get_ydata() for line in first.lines]
    assert list(runs) == [3.3, 3.5]
    assert list(mean) == pytest.approx([3.4, 3.4])
    assert [line[0] for line in published] == list(music.PUBLISHED.values())


def test_a_page_of_runs_that_have_not_finished(tmp_path):
    begun = [made_of_paper(setting, [3.3], 2) for setting in (music.setting("gru"), music.setting("dmu", 2))]
    text = markdown.render(page_of(tmp_path, begun))
    assert "the same learning rates, one run each;" in text
    assert "| 100k | GRU | – | 99," in text  # noqa: RUF001
    (results,) = beyond_results(begun)
    assert draw_scores(results).axes


def test_the_papers_own_studies_stand_beside_gru_and_lstm_and_on_its_page(tmp_path):
    ours, theirs = cells.setting("gru", "language"), cells.papers("language", "dmu", 2)
    alone = make_report(recorded(tmp_path / "alone", [scored(theirs, [110.0, 112.0])]), "dmu report")
    assert [page.name for page in alone.pages] == ["real"]
    studies = [scored(theirs, [110.0, 112.0]), scored(ours, [104.0, 104.5])]
    report = make_report(recorded(tmp_path / "joined", studies), "dmu report")
    assert [page.name for page in report.pages] == ["real", "beyond"]
    real, beyond = map(markdown.render, report.pages)
    assert "GRU" not in real
    assert "| language | DMU | 2 | 1,715,126 | 0.02 | perplexity | 112.11 ± 1.43 | 111.00 ± 1.41 |" in beyond
    assert "| language | DMU, n = 2 | 111.00 ± 1.41 | GRU | 104.25 ± 0.35 |" in beyond


def recorded(out, studies):
    """A folder with these studies, finished."""
    record(out, studies)
    records = Records(out, write=True)
    for study in studies:
        tests = {run.seed: run.test for run in study.runs if run.test}
        if tests:
            records.write_end(records.open_study(study.setting, study.series), dict.fromkeys(tests, SPENT), tests)
    records.close()
    return out


def page_of(out, studies):
    (page,) = make_report(recorded(out, studies), "dmu report").pages
    return page


def test_every_kind_has_a_style_of_its_own():
    looks = [(str(style["color"]), str(style["linestyle"])) for style in STYLES.values()]
    assert len(set(looks)) == len(looks)
    kinds = {kind_of(setting) for one in EXPERIMENTS.values() for setting in one.settings()}
    assert kinds <= set(STYLES)
