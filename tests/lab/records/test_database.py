"""Records survive what happens to processes, and tell the same story afterwards."""

import math
import shutil
import sqlite3
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from lab.stories import told

from deepmemory.lab.records import Records, best_weights, database, first_under, hold_lock, merge
from deepmemory.lab.records.packing import pack, pack_curves, unpack, unpack_curves
from deepmemory.lab.records.sqlite_files import lacks_its_log
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.tasks import series_of
from deepmemory.lab.training import loop, studies
from deepmemory.lab.training.progress import PlainLines

CPU = Machine("cpu", engine="plain")
TINY = Setting(
    transition=(3,), hidden=(3,), min_length=24, max_length=26, batch=4, steps=2, epochs=4, validation=8, test=8
)

SERIES = series_of("adding")
VALUES = dict(zip(SERIES, (0.1, 0.2, 0.3), strict=True))


def carry_out(out, setting=TINY, seeds=range(3)):
    studies.run_studies([setting], seeds, out, CPU, PlainLines())
    return told(out)


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
        patch.setattr(studies.SavingTimes, "due", lambda *_: True)  # however slow this machine is at the moment
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
    assert "no checkpoint for seeds [0, 1, 2]; finished from the records" in capsys.readouterr().out


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


def test_a_diverged_run_is_recorded(tmp_path):
    story = carry_out(tmp_path, replace(TINY, lr=1e38, module_rate="1e38"))
    assert {state for state, *_ in story.values()} == {"diverged"}
    study = Records(tmp_path).studies()[0]
    assert not any(math.isfinite(run.curves["train_loss"][-1]) for run in study.runs)


def test_first_epoch_under_each_threshold():
    losses = [0.5, 0.005, 0.02, math.nan, 2e-6, 5e-7]
    assert first_under(losses, [1e-2, 1e-3, 1e-5, 1e-6, 1e-8]) == [2, 5, 5, 6, None]


def test_recorded_first_epochs_follow_from_the_recorded_losses(tmp_path):
    carry_out(tmp_path, replace(TINY, epochs=6, lr=0.05))
    for study in Records(tmp_path).studies():
        for run in study.runs:
            assert list(run.first_under) == first_under(run.curves["valid_loss"], study.thresholds)


def test_provenance_is_kept(tmp_path):
    carry_out(tmp_path)
    opened = Records(tmp_path)
    (session,) = opened.sessions().values()
    assert session["device"] == "cpu"
    assert session["torch"] == torch.__version__
    run = opened.studies()[0].runs[0]
    assert run.session in opened.sessions()
    assert run.seconds > 0
    assert opened.studies()[0].setting == TINY


def test_checkpoints_hold_the_best_weights_and_no_code(tmp_path):
    carry_out(tmp_path)
    (path,) = tmp_path.glob("checkpoints/*/*.safetensors")
    weights = best_weights(path, 1)
    trainer = loop.make_trainer(TINY, CPU)
    trainer.network.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"no run with seed 9; it has \[0, 1, 2\]"):
        best_weights(path, 9)
    assert not list(tmp_path.rglob("*.partial"))


def test_numbers_survive_packing():
    values = (0.1, math.inf, 3e-40, -2.0)
    exact = tuple(torch.tensor(values).tolist())
    assert unpack(pack(values)) == exact
    curves = {"train_loss": exact, "valid_loss": exact[::-1], "valid_accuracy": exact}
    assert unpack_curves(pack_curves(curves), list(curves)) == curves
    assert math.isnan(unpack(pack([math.nan]))[0])


def test_a_study_is_held_by_one_process_at_a_time(tmp_path):
    said, order, path = [], [], tmp_path / "locks" / "study.lock"

    def second():
        with hold_lock(path, said.append):
            order.append("second")

    with hold_lock(path, print):
        thread = threading.Thread(target=second)
        thread.start()
        while not said:
            pass
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting: study is being trained by process" in said[0]


@pytest.mark.parametrize("version", [3, 99])
@pytest.mark.parametrize("write", [False, True])
def test_records_of_another_version_are_refused(tmp_path, version, write):
    Records(tmp_path, write=True).close()
    with sqlite3.connect(tmp_path / "records.sqlite") as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = (tmp_path / "records.sqlite").read_bytes()
    with pytest.raises(ValueError, match=f"has format {version}, this version reads format 4"):
        Records(tmp_path, write)
    assert (tmp_path / "records.sqlite").read_bytes() == before


def write_some(out):
    """Two epochs by a process that is still at work."""
    opened = Records(out, write=True)
    study = opened.open_study(TINY, SERIES)
    opened.begin(study, [0], 0, opened.open_session("cpu", "plain"))
    for epoch in (1, 2):
        opened.write_epoch(study, epoch, {0: VALUES}, {0: "running"}, {0: 1}, 1.0)
    return opened


def test_a_file_of_records_without_its_log_is_told_of(tmp_path, capsys):
    """What ``cp database.sqlite`` brings from a command that writes, or that was killed."""
    opened, copied = write_some(tmp_path / "a"), tmp_path / "b" / "records.sqlite"
    copied.parent.mkdir()
    shutil.copy(opened.path, copied)
    for write in (False, False, True):
        Records(copied.parent, write=write).close()
        error = capsys.readouterr().err
        assert error.startswith(f"warning: {copied} was copied while a command was writing to it")
        assert "records.sqlite-wal, which holds the newest numbers: some may be missing" in error
    Records(copied.parent).close()  # a writer has closed it
    both = tmp_path / "c"
    both.mkdir()
    for path in tmp_path.glob("a/records.sqlite*"):
        shutil.copy(path, both)
    assert told(both) == told(tmp_path / "a")
    opened.close()
    shutil.copy(opened.path, copied)
    assert told(copied.parent) == told(tmp_path / "a")
    Records(tmp_path / "a", write=True).close()
    told(tmp_path / "a")
    assert capsys.readouterr().err == ""


def test_every_epoch_is_in_the_file_itself(tmp_path):
    """Even without its log, a copy of a command that writes has what is committed."""
    opened = write_some(tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copy(opened.path, tmp_path / "b")
    assert told(tmp_path / "b") == told(tmp_path / "a")
    (run,) = told(tmp_path / "b").values()
    assert run[-1] == 2
    opened.close()


def test_writers_that_close_at_the_same_moment_leave_one_file(tmp_path, monkeypatch):
    opened, other = (Records(tmp_path, write=True) for _ in range(2))
    monkeypatch.setattr(database.time, "sleep", lambda pause: pause and other.db.close())
    opened.close()
    assert [path.name for path in tmp_path.iterdir()] == ["records.sqlite"]
    assert not lacks_its_log(tmp_path / "records.sqlite")


def test_a_full_study_is_compact(tmp_path):
    opened = Records(tmp_path, write=True)
    study = opened.open_study(TINY, SERIES)
    session = opened.open_session("cpu", "plain")
    seeds = range(51)
    opened.begin(study, seeds, 0, session)
    values, states, best = dict.fromkeys(seeds, VALUES), dict.fromkeys(seeds, "spent"), dict.fromkeys(seeds, 1)
    for epoch in range(1, 101):
        opened.write_epoch(study, epoch, values, states, best, 1.0)
    opened.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 250_000


def test_merged_records_take_less_room_and_lose_nothing(tmp_path):
    opened = Records(tmp_path / "rows", write=True)
    study = opened.open_study(TINY, SERIES)
    opened.begin(study, range(51), 0, opened.open_session("cpu", "plain"))
    for epoch in range(1, 101):
        losses = (1 + torch.rand(51, 2)) * 0.9**epoch  # like real ones: much the same size, and noise
        values = {seed: dict(zip(SERIES, [*of_run, 1.0], strict=True)) for seed, of_run in enumerate(losses.tolist())}
        states, best = dict.fromkeys(values, "spent"), dict.fromkeys(values, epoch)
        opened.write_epoch(study, epoch, values, states, best, 1.0)
    opened.close()
    merge([tmp_path / "rows"], tmp_path / "packed").close()
    assert told(tmp_path / "packed") == told(tmp_path / "rows")
    sizes = [(tmp_path / name / "records.sqlite").stat().st_size for name in ("rows", "packed")]
    assert sizes[1] < 0.7 * sizes[0]


def test_reading_changes_nothing_on_disk(tmp_path):
    carry_out(tmp_path)
    assert not list(tmp_path.glob("records.sqlite-*"))
    before = (tmp_path / "records.sqlite").read_bytes()
    told(tmp_path)
    assert (tmp_path / "records.sqlite").read_bytes() == before


def test_merged_machines_tell_what_one_machine_tells(tmp_path):
    carry_out(tmp_path / "a", seeds=[0, 1])
    carry_out(tmp_path / "b", seeds=[2, 3])
    carry_out(tmp_path / "b", replace(TINY, cell="gru", transition=()), seeds=[0])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c").close()
    assert told(tmp_path / "c") == told(tmp_path / "a") | told(tmp_path / "b")
    longer = replace(TINY, epochs=5)
    at_once = carry_out(tmp_path / "at once", longer, range(4))
    assert {
        key: story for key, story in carry_out(tmp_path / "c", longer, range(4)).items() if key in at_once
    } == at_once


def test_merging_the_same_run_twice_takes_the_longer_one(tmp_path):
    carry_out(tmp_path / "short", replace(TINY, epochs=2))
    whole = carry_out(tmp_path / "long")
    merge([tmp_path / "short", tmp_path / "long"], tmp_path / "merged").close()
    assert told(tmp_path / "merged") == whole


def test_contradictions_are_refused(tmp_path):
    carry_out(tmp_path / "a")
    carry_out(tmp_path / "b")
    with sqlite3.connect(tmp_path / "b" / "records.sqlite") as db:
        db.execute('UPDATE epoch SET "values" = ? WHERE run = 2 AND epoch = 3', (pack([1, 2, 3]),))
    db.close()
    with pytest.raises(ValueError, match=r"seed 1: .* differ at epoch 3"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(FileExistsError, match="has records already"):
        merge([tmp_path / "a"], tmp_path / "b")
