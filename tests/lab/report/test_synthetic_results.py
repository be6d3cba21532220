"""Counts of runs under each threshold, and verdicts on the paper's claims about them."""

from dataclasses import replace

import pytest
from lab.made_studies import record_losses

from deepmemory.lab import paper
from deepmemory.lab.records import Records, first_under
from deepmemory.lab.report.results.synthetic import RULES, epochs_with_patience, synthetic_results
from deepmemory.lab.settings import CELLS, DEFAULTS, SYNTHETIC, THRESHOLDS, change

FALLS = [0.5, 5e-3, 5e-4, 5e-5, 5e-6, 5e-7]  # under one threshold more in every epoch
SLOW = [loss for loss in FALLS for _ in range(2)]
HIGH = [0.5] * 8


@pytest.fixture
def recorded(tmp_path):
    """All fifteen studies; what the paper says of adding holds in them."""
    of_cell = {
        "dmu": [FALLS, FALLS, FALLS, SLOW],
        "gru": [SLOW, SLOW, SLOW, HIGH],
        "lstm": [[0.5, 0.5, 5e-3], HIGH, HIGH, HIGH],
        "rhn": [HIGH] * 4,
        "rnn": [HIGH] * 4,
    }
    for setting in paper.settings(SYNTHETIC):
        record_losses(tmp_path, setting, of_cell[setting.cell])
    record_losses(tmp_path, replace(paper.setting("adding", "dmu"), module_rate="0.001"), [SLOW])
    return tmp_path


def results_of(out):
    records = Records(out)
    studies = records.studies()
    records.close()
    return synthetic_results(studies)


def verdicts_of(results):
    return {verdict.claim.text: verdict for verdict in results.verdicts}


def test_curves_count_runs_in_or_before_each_epoch(recorded):
    dmu = results_of(recorded)[0].cells["dmu"]
    assert dmu.by_epoch(0, 4) == [0, 0, 3, 4, 4]
    assert dmu.by_epoch(4, 12) == [0] * 6 + [3] * 5 + [4] * 2
    assert (dmu.runs, dmu.under, dmu.median_epoch) == (4, (4, 4, 4, 4, 4), (2, 3, 4, 5, 6))
    for study in (study for one in results_of(recorded) for study in one.studies.values()):
        for index, threshold in enumerate(THRESHOLDS):
            lowest = [min(run.curves["valid_loss"]) for run in study.runs]
            assert sum(loss < threshold for loss in lowest) == sum(
                run.first_under[index] is not None for run in study.runs
            )


def test_claims_are_decided_by_the_records(recorded):
    adding, _, order, noisy = map(verdicts_of, results_of(recorded))
    assert all(verdict.agrees and verdict.decided for verdict in adding.values())
    assert order["DMU converges faster than GRU"].agrees
    assert order["DMU and GRU are similar down to 1e-4"].agrees is False
    assert order["DMU outperforms GRU at lower thresholds"].seen.startswith(
        "DMU 4/4, 4/4; GRU 3/4, 3/4 under 1e-5, 1e-6"
    )
    assert order["LSTM has partial success at higher thresholds"].agrees
    assert noisy["GRU trains faster than DMU"].agrees is False
    assert noisy["LSTM performs worse than RNN"].agrees is False
    assert adding["GRU scores better than LSTM"].mark.text == "agrees (a hint: 4 runs)"
    assert {claim.check for claims in paper.CLAIMS.values() for claim in claims} == set(RULES)


def test_a_claim_about_a_cell_that_was_not_run_stays_open(tmp_path):
    record_losses(tmp_path, paper.setting("adding", "dmu"), [[0.5]])
    (results,) = results_of(tmp_path)
    assert {verdict.agrees for verdict in results.verdicts} == {None}
    assert results.verdicts[1].seen == "not run: GRU, LSTM"


def test_better_than_all_others_is_judged_among_those_that_were_run(tmp_path):
    record_losses(tmp_path, paper.setting("adding", "dmu"), [FALLS] * 3)
    record_losses(tmp_path, paper.setting("adding", "gru"), [SLOW] * 3)
    first = results_of(tmp_path)[0].verdicts[0]
    assert (first.agrees, first.decided, first.missing) == (True, False, ("lstm", "rnn", "rhn"))
    assert first.mark.text == "agrees so far, LSTM, RNN and RHN not run (a hint: 3 runs)"
    record_losses(tmp_path, paper.setting("adding", "lstm"), [[5e-7] * 6] * 3)
    first = results_of(tmp_path)[0].verdicts[0]
    assert (first.agrees, first.decided, first.missing) == (False, True, ())  # whatever the others will do


def test_a_change_of_one_cell_stands_beside_the_other_cells(recorded):
    main, changed, *_ = results_of(recorded)
    assert (main.title, changed.title) == ("Adding", "Adding, with module_rate = 0.001")
    assert list(changed.studies) == list(CELLS)
    assert changed.studies["dmu"].setting.module_rate == "0.001"
    assert changed.studies["gru"] == main.studies["gru"]
    assert [reading.field for reading in paper.READINGS if changed.is_reading(reading)] == ["module_rate"]


def test_every_reading_is_a_setting_with_a_command_that_gives_it():
    for reading in paper.READINGS:
        for task in reading.tasks:
            for cell in reading.cells:
                setting = change(paper.setting(task, cell), {reading.field: reading.other})
                assert getattr(setting, reading.field) == reading.other != DEFAULTS[reading.field]
        assert reading.command.endswith(f"--{reading.field.replace('_', '-')} {reading.other}")


def test_patience_changes_no_count(recorded):
    """Runs cut at their first epoch under the last threshold give the same figures."""
    results = results_of(recorded)
    for run in (run for one in results for study in one.studies.values() for run in study.runs):
        stop = run.first_under[-1] or run.epochs
        assert first_under(run.curves["valid_loss"][:stop], THRESHOLDS) == list(run.first_under)
    assert epochs_with_patience(results) == (3 * 165, 3 * 161)  # a slow run stays under 1e-6 for one more epoch
