"""The page about experiments beyond the paper: what it says of runs that are known."""

import math
from dataclasses import replace

import pytest
from lab.made_studies import record

from deepmemory.lab.beyond import depth
from deepmemory.lab.records import DIVERGED, SPENT, Run, Study
from deepmemory.lab.report.beyond_figures import draw_depth
from deepmemory.lab.report.render import markdown
from deepmemory.lab.report.report import make_report
from deepmemory.lab.report.results.beyond import beyond_results, weights_of
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
    assert "| small | residual DMU | 3 |" in text


def test_every_task_has_a_title():
    from deepmemory.lab.report.words import TITLES

    assert set(TITLES) == set(TASK_CLASSES)
