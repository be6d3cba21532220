"""The command on real data: from the data folder to the table, killed and resumed."""

import math
import os
import signal

import pytest
from lab.processes import MAIN, Forked
from lab.stories import told
from lab.test_cli import error_of, invoke, wait_for_epoch

from deepmemory.lab import paper
from deepmemory.lab.cli.training import selection
from deepmemory.lab.records import Records
from deepmemory.lab.settings import PAPER_TASKS

DATA = os.environ.get("DEEPMEMORY_DATA")
needs_data = pytest.mark.missing("data sets", None if DATA else "$DEEPMEMORY_DATA says where they are")
SMALL = {
    "polymusic": ["--set=limit=6"],
    "natlang": ["--set=limit=300", "--set=hidden=10", "--set=batch=4", "--set=window=20"],
    "translation": ["--pairs", "120", "--pair", "spanish,german", "--set=hidden=10"],
    "pixel-mnist": ["--set=limit=40", "--set=hidden=8", "--pixels", "permuted"],
}
HERE = ["--runs", "2", "--device", "cpu", "--threads", "1"]


@needs_data
@pytest.mark.parametrize("task", SMALL)
def test_every_task_goes_from_the_data_to_the_table(task, tmp_path):
    command = ["paper", task, "--cells", "dmu,dmu-c", "--depths", "1", "--epochs", "2", *SMALL[task], *HERE]
    result = invoke(*command, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    opened = Records(tmp_path)
    studies = opened.studies()
    opened.close()
    assert {study.setting.module_rate for study in studies} == {"formula", "same"}
    for study in studies:
        assert study.setting.task == task
        assert [run.epochs for run in study.runs] == [2, 2]
        assert all(map(math.isfinite, (value for run in study.runs for value in run.at_epoch(2).values())))
        assert all(run.test is not None for run in study.runs)
    assert (tmp_path / "report" / "index.html").exists()


@needs_data
@pytest.mark.parametrize("music", ["jsb-chorales", "musedata", "piano-midi"])
def test_other_music(music, tmp_path):
    result = invoke("train", "polymusic", "--music", music, "--limit", 2, "--epochs", 1, *HERE, "--out", tmp_path)
    assert result.exit_code == 0, result.output


@needs_data
def test_killed_it_resumes_to_the_same_numbers(tmp_path):
    command = ["train", "polymusic", "--limit", "6", "--epochs", "6", "--json", *HERE, "--out"]
    killed = Forked(MAIN, *command, tmp_path / "killed")
    wait_for_epoch(killed, 2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    for folder in ("killed", "whole"):
        assert invoke(*command, tmp_path / folder).exit_code == 0
    assert told(tmp_path / "killed") == told(tmp_path / "whole")


def test_missing_data_is_told_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DEEPMEMORY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in (["paper", "natlang", "polymusic"], ["train", "natlang"]):
        assert "dmu data fetch ptb" in error_of(monkeypatch, capsys, *command, "--data", tmp_path, "--out", tmp_path)


def test_choices_of_the_paper_are_checked(monkeypatch, capsys, tmp_path):
    def wrong(*arguments):
        return error_of(monkeypatch, capsys, "paper", *arguments, "--out", tmp_path)

    assert "unknown depth '3'; choose from 1, 2, 5, 10" in wrong("natlang", "--depths", "3")
    assert "unknown pair 'latin'; choose from spanish, portuguese, german" in wrong("translation", "--pair", "latin")
    assert "unknown cell 'dmu-d'" in wrong("natlang", "--cells", "dmu-d")


def test_quick_is_one_small_dmu_for_each_task():
    chosen = selection(PAPER_TASKS, quick=True)
    assert {setting.task for setting in chosen} == set(PAPER_TASKS)
    assert {setting.cell for setting in chosen} == {"dmu"}
    assert len(chosen) == len(PAPER_TASKS)


def test_what_is_not_chosen_is_everything_the_paper_trains():
    assert selection(PAPER_TASKS) == paper.settings()
    assert len(selection(["natlang", "polymusic"], depths="1,10", cells="dmu,rhn")) == 8
    assert {setting.pixels for setting in selection(["pixel-mnist"], pixels="permuted")} == {"permuted"}
