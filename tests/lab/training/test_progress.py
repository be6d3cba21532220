"""What is shown while studies of real data train."""

import json
import os
from dataclasses import replace

import pytest
from lab.made_studies import made
from rich.console import Console

from deepmemory.lab import paper
from deepmemory.lab.beyond import depth
from deepmemory.lab.records import DIVERGED, RUNNING
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import JsonLines, LiveTable, PlainLines, PlannedStudies

DMU_C = replace(paper.setting("translation", "dmu-c", 5), language="german")


def epoch_of(setting, number, scores):
    """Runs whose validation score is just above these."""
    study = made(setting, scores, epochs=1)
    return Epoch(number, {run.seed: run.at_epoch(1) for run in study.runs}, 2.0)


LINES = {
    "polymusic rhn depth 2  epoch 1/500  median valid loss 4.0400 (chance 10.3)": (
        paper.setting("polymusic", "rhn", 2),
        [3, 4, 8],
    ),
    "translation german dmu-c depth 5  epoch 1/50  median valid perplexity 6.06 (chance 109)": (DMU_C, [6, 5, 9]),
    "pixel-mnist ordered dmu 128 units  epoch 1/36  median valid accuracy 0.8000 (chance 0.1)": (
        paper.setting("pixel-mnist", "dmu"),
        [0.9, 0.8, 0.7],
    ),
}


@pytest.mark.parametrize("shown", LINES)
def test_lines_show_the_measure_of_the_task(shown, capsys):
    setting, scores = LINES[shown]
    display = PlainLines()
    display.plan([setting], range(3))
    display.epoch(setting, epoch_of(setting, 1, scores), 3)
    line = capsys.readouterr().out
    assert line.startswith(shown)
    assert "3 of 3 runs training  0.5 epochs/s  left " in line
    display.end(setting, made(setting, scores, epochs=4).runs)
    assert capsys.readouterr().out.rstrip().endswith("done")


@pytest.mark.parametrize(("number", "training"), [(500, 2), (7, 0)], ids=["last epoch", "stopped early"])
def test_after_the_last_epoch_lines_say_that_the_runs_are_tested(number, training, capsys, monkeypatch):
    setting = paper.setting("polymusic", "rhn", 2)
    display, table = PlainLines(), LiveTable()
    monkeypatch.setattr(table.live, "start", lambda: None)
    for one in (display, table):
        one.plan([setting], range(2))
        one.begin(setting, made(setting, [3.0, 4.0], epochs=6).runs)
        assert not one.studies[setting.key].testing  # resumed
        one.epoch(setting, epoch_of(setting, 6, [3.0, 4.0]), 2)
    capsys.readouterr()
    for one in (display, table):
        one.epoch(setting, epoch_of(setting, number, [3.0, 4.0]), training)
    assert capsys.readouterr().out.endswith("2 runs  0.5 epochs/s  testing\n")  # at once
    assert any("testing" in row for row in printed(table))
    display.end(setting, made(setting, [3.0], epochs=4).runs)
    assert capsys.readouterr().out.endswith("done\n")


def test_json_names_cell_depth_and_part(capsys):
    display = JsonLines()
    display.plan([DMU_C], range(2))
    display.epoch(DMU_C, epoch_of(DMU_C, 1, [6.0, float("nan")]), 1)
    told = json.loads(capsys.readouterr().out)
    assert (told["cell"], told["depth"], told["part"], told["epochs"]) == ("dmu-c", 5, "german", 50)
    assert told["median_valid_perplexity"] == pytest.approx(6.06)
    assert told["chance"] == 109.12
    assert told["seconds_left"] == 98.0
    assert "under" not in told


LARGE, LONGER = depth.setting("residual", 5), depth.setting("residual", 5, "long")  # 50 and 150 epochs


def test_large_networks_are_left_one_after_another():
    display = PlannedStudies()
    display.plan([LARGE, LONGER], range(3))
    for number, seed, left in (1, 0, 1198), (50, 0, 1100), (1, 1, 1098), (7, 1, 1086), (1, 2, 998), (50, 2, 900):
        display.epoch(LARGE, Epoch(number, {seed: {"valid_loss": 4.0}}, 2.0), 1)
        assert display.seconds_left() == left  # the third run begins after the second has stopped early


def test_on_several_machines_large_networks_do_not_wait_for_one_another():
    display = PlannedStudies()
    display.plan([LARGE], range(3), parallel=True)
    display.epoch(LARGE, Epoch(22, {seed: {"valid_loss": 4.0} for seed in range(3)}, 2.0), 3)
    assert display.seconds_left() == 2 * (50 - 22)


def test_runs_that_are_resumed_and_new_ones_are_two_stacks():
    display = PlannedStudies()
    display.plan([DMU_C], range(51))
    display.begin(DMU_C, made(DMU_C, [6.0], epochs=25, state=RUNNING).runs)
    display.epoch(DMU_C, epoch_of(DMU_C, 26, [6.0]), 1)
    assert display.seconds_left() == 2 * (24 + 50)
    display.epoch(DMU_C, Epoch(50, epoch_of(DMU_C, 50, [6.0]).values, 2.0), 1)
    assert display.seconds_left() == 2 * 50


def test_runs_that_join_finished_ones_train_side_by_side():
    display, other = PlannedStudies(), replace(DMU_C, lr=0.5)
    display.plan([DMU_C, other], range(6))
    display.epoch(other, epoch_of(other, 50, [6.0] * 6), 6)
    display.begin(DMU_C, made(DMU_C, [6.0] * 3, epochs=50).runs)
    assert display.seconds_left() == 2 * 50


def test_runs_that_stopped_early_are_not_waited_for():
    display = PlannedStudies()
    display.plan([DMU_C], range(4))
    display.begin(DMU_C, made(DMU_C, [6.0], epochs=3, state=DIVERGED).runs)
    values = epoch_of(DMU_C, 1, [6.0] * 4).values
    for number, seeds in (3, (1, 2, 3)), (4, (1, 2)):
        display.epoch(DMU_C, Epoch(number, {seed: values[seed] for seed in seeds}, 2.0), len(seeds) - 1)
    assert display.seconds_left() == 2 * 46
    display.epoch(DMU_C, Epoch(5, {2: values[2]}, 2.0), 0)
    assert display.seconds_left() == 0


def test_the_live_table_shows_synthetic_and_real_tasks(monkeypatch):
    settings = [paper.setting("adding", "dmu"), paper.setting("natlang", "dmu", 10), paper.setting("natlang", "rhn", 1)]
    table = LiveTable()
    monkeypatch.setattr(table.live, "start", lambda: None)
    table.plan(settings, range(2))
    table.epoch(settings[1], epoch_of(settings[1], 7, [100.0, 120.0]), 2)
    lines = printed(table)
    assert ["natlang", "DMU", "depth", "10", "7/40", "111.10", "perplexity", "639", "2", "0.5"] in lines
    assert ["natlang", "RHN", "depth", "1"] in lines
    assert ["adding", "DMU"] in lines
    assert lines[-1][:2] == ["time", "left"]


def test_the_live_table_fits_the_terminal(monkeypatch):
    settings = paper.settings(["polymusic", "natlang", "translation"])
    table = LiveTable()
    monkeypatch.setattr(table.live, "start", lambda: None)
    table.plan(settings, range(2))
    for setting in settings[:30]:
        table.end(setting, made(setting, [3.0], epochs=1).runs)
    title, *rows = printed(table)
    assert " ".join(title).endswith(f"30 of {len(settings)} studies done")
    assert 4 < len(rows) < table.live.console.height
    assert sum("done" in row for row in rows) == 1  # the last finished one, then those to come


def printed(table):
    with open(os.devnull, "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(table.table())
        return [line.split() for line in console.export_text().splitlines() if line.strip()]
