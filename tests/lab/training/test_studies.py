"""Studies resume after whatever happens to processes, and end with the same numbers."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
from lab.stories import TINY, carry_out, told

from deepmemory.lab.records import Records
from deepmemory.lab.settings import Setting
from deepmemory.lab.training import loop, stacks, studies


class Crash(Exception):
    pass


@pytest.mark.parametrize("moment", ["before the records", "between records and checkpoint", "in the test"])
@pytest.mark.parametrize("epoch", [1, 3])
def test_a_crash_at_any_moment_changes_no_number(tmp_path, monkeypatch, moment, epoch):
    undisturbed = carry_out(tmp_path / "undisturbed")
    owner, name = {
        "before the records": (Records, "write_epoch"),
        "between records and checkpoint": (studies, "save_checkpoint"),
        "in the test": (loop, "test"),
    }[moment]
    calls = 0
    original = getattr(owner, name)

    def crash(*args):
        nonlocal calls
        calls += 1
        if calls == epoch or name == "test":
            raise Crash
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        patch.setattr(studies.CheckpointSchedule, "due", lambda *_: True)  # however slow this machine is at the moment
        with pytest.raises(Crash):
            carry_out(tmp_path / "crashed")
    assert told(tmp_path / "crashed") != undisturbed
    assert carry_out(tmp_path / "crashed") == undisturbed


def test_a_finished_study_is_not_trained_again(tmp_path, monkeypatch):
    before = carry_out(tmp_path)
    monkeypatch.setattr(loop, "train", None)
    assert carry_out(tmp_path) == before


def test_more_epochs_go_on_where_fewer_ended(tmp_path):
    carry_out(tmp_path / "a", replace(TINY, epochs=2))
    assert carry_out(tmp_path / "a") == carry_out(tmp_path / "b")


def test_more_runs_join_those_that_are_there(tmp_path):
    first = carry_out(tmp_path / "a", seeds=range(2))
    more = carry_out(tmp_path / "a", seeds=range(4))
    assert {key: more[key] for key in first} == first
    assert sorted(seed for _, seed in more) == [0, 1, 2, 3]


def test_large_networks_train_one_after_another(tmp_path, monkeypatch):
    together = carry_out(tmp_path / "together")
    sizes, train = [], loop.train

    def counted(trainer, group):
        sizes.append(len(group.seeds))
        return train(trainer, group)

    monkeypatch.setattr(loop, "train", counted)
    monkeypatch.setattr(stacks, "LARGE_NETWORK", 1)
    alone = carry_out(tmp_path / "alone")
    assert sizes == [1, 1, 1]
    assert alone.keys() == together.keys()
    first = carry_out(tmp_path / "more", seeds=range(1))
    assert {key: alone[key] for key in first} == first
    assert carry_out(tmp_path / "more") == alone


def test_without_its_checkpoint_a_run_starts_again_and_says_so(tmp_path, capsys):
    whole = carry_out(tmp_path / "b")
    carry_out(tmp_path / "a", replace(TINY, epochs=2))
    next(tmp_path.glob("a/checkpoints/*/*.safetensors")).unlink()
    assert carry_out(tmp_path / "a") == whole
    assert "no checkpoint for seeds [0, 1, 2]; they start again" in capsys.readouterr().out


def lose_the_weights_after_the_last_epoch(out, setting, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "test", Mock(side_effect=Crash))
        with pytest.raises(Crash):
            carry_out(out, setting)
    next(out.glob("checkpoints/*/*.safetensors")).unlink()


@pytest.mark.usefixtures("made_data")
@pytest.mark.parametrize("diverged", [0, 1, 3])
def test_a_run_needs_no_weights_to_end_where_every_epoch_is_tested(tmp_path, monkeypatch, capsys, diverged):
    original = loop.finish_epoch

    def diverge(trainer, group, values, seconds):
        for place, run in enumerate(group.rows):
            if group.epoch == 1 and run < diverged:
                values[place] = dict.fromkeys(values[place], math.nan)
        return original(trainer, group, values, seconds)

    monkeypatch.setattr(loop, "finish_epoch", diverge)
    setting = Setting("translation", hidden=(4,), batch=4, epochs=3)
    whole = carry_out(tmp_path / "b", setting)
    assert [state for state, *_ in whole.values()].count("diverged") == diverged
    lose_the_weights_after_the_last_epoch(tmp_path / "a", setting, monkeypatch)
    assert told(tmp_path / "a") != whole
    capsys.readouterr()
    monkeypatch.setattr(loop, "train", None)
    assert carry_out(tmp_path / "a", setting) == whole
    assert "seeds [0, 1, 2] finished from the records" in capsys.readouterr().out


@pytest.mark.usefixtures("made_data")
def test_fewer_epochs_than_recorded_are_no_reason_to_start_again(tmp_path, monkeypatch):
    setting = Setting("translation", hidden=(4,), batch=4, epochs=3)
    lose_the_weights_after_the_last_epoch(tmp_path, setting, monkeypatch)
    monkeypatch.setattr(loop, "train", None)
    assert {epochs for *_, epochs in carry_out(tmp_path, replace(setting, epochs=2)).values()} == {3}


def test_where_epochs_are_not_tested_a_run_without_weights_starts_again(tmp_path, monkeypatch, capsys):
    whole = carry_out(tmp_path / "b")
    lose_the_weights_after_the_last_epoch(tmp_path / "a", TINY, monkeypatch)
    assert carry_out(tmp_path / "a") == whole
    assert "they start again" in capsys.readouterr().out
