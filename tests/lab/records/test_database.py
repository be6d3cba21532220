"""What is written to the database is read from it, whatever happens to the file meanwhile."""

import math
import shutil
import sqlite3
from dataclasses import replace

import pytest
import torch
from lab.stories import CPU, TINY, carry_out, told

from deepmemory.lab.records import Records, best_weights, database, first_under
from deepmemory.lab.records.sqlite_files import lacks_its_log
from deepmemory.lab.tasks import series_of
from deepmemory.lab.training.trainer import make_trainer

SERIES = series_of("adding")
VALUES = dict(zip(SERIES, (0.1, 0.2, 0.3), strict=True))


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
    trainer = make_trainer(TINY, CPU)
    trainer.network.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"no run with seed 9; it has \[0, 1, 2\]"):
        best_weights(path, 9)
    assert not list(tmp_path.rglob("*.partial"))


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
        assert "records.sqlite-wal" in error
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


def test_reading_changes_nothing_on_disk(tmp_path):
    carry_out(tmp_path)
    assert not list(tmp_path.glob("records.sqlite-*"))
    before = (tmp_path / "records.sqlite").read_bytes()
    told(tmp_path)
    assert (tmp_path / "records.sqlite").read_bytes() == before
