"""What goes wrong on real machines, done for real: a clear message, an exit code, nothing lost that was recorded."""

import math
import os
import pickle
import resource
import signal
import socket
import sqlite3
import sys
import time

import pytest
import torch
from lab.data import making
from lab.data.making import served
from lab.data.test_fetching import BODY, NOTTINGHAM, Pages, serving
from lab.processes import MAIN, Forked
from lab.stories import told
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepmemory.lab import cli
from deepmemory.lab.data import DataError, files, registry
from deepmemory.lab.data.fetching import fetch
from deepmemory.lab.records import (
    Records,
    RecordsError,
    checkpoint_bytes,
    checkpoints,
    hold_lock,
    load_checkpoint,
    save_checkpoint,
    write_whole,
)
from deepmemory.lab.training import loop

SMALL = ["--runs", "2", "--epochs", "3", "--steps", "3", "--batch", "4", "--validation", "8", "--test", "8"]
SMALL += ["--min-length", "24", "--max-length", "26", "--threads", "1", "--device", "cpu", "--engine", "plain"]
TRAIN = ["train", "adding", *SMALL]


def dmu(monkeypatch, capsys, *arguments):
    """The command in this process: exit code and what it printed as errors."""
    monkeypatch.setattr(sys, "argv", ["dmu", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    return code, capsys.readouterr().err


def checkpoint_in(out):
    (path,) = out.glob("checkpoints/*/*.safetensors")
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: dmu(monkeypatch, capsys, *arguments)


@pytest.fixture
def trained(tmp_path, run):
    """A finished study; its story."""
    assert run(*TRAIN, "--out", tmp_path / "whole") == (0, "")
    return told(tmp_path / "whole")


DIES_AT = """
import os, signal, sys
from deepmemory.lab import cli
from deepmemory.lab.records import Records
owner, name, call = sys.argv.pop(1).split()
owner, calls = {"os": os, "records": Records}[owner], 0
original = getattr(owner, name)
def die(*args):
    global calls
    calls += "checkpoints" in str(args[0]) or owner is not os
    if calls == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
setattr(owner, name, die)
cli.main()
"""


@pytest.mark.parametrize("moment", ["records write_epoch 2", "os replace 2"], ids=["training", "a checkpoint"])
def test_killed_while(tmp_path, run, trained, moment):
    out = tmp_path / "killed"
    process = Forked(DIES_AT, moment, *TRAIN, "--out", out)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    before = told(out)
    assert all(epochs >= 1 for *_, epochs in before.values())
    assert list(out.rglob("*.partial")) or moment.startswith("records")
    load_checkpoint(checkpoint_in(out))
    assert run(*TRAIN, "--out", out) == (0, "")
    assert told(out) == trained


DIES_IN_A_MERGE = """
import os, signal, sys
from deepmemory.lab import records
*sources, work = sys.argv[1:]
def merge_until(out, last):
    lines = 0
    def count(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename.startswith(os.path.dirname(records.__file__)):
            lines += 1
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return count
    sys.settrace(count)
    records.merge(sources, out).close()
    sys.settrace(None)
    return lines
whole, killed = merge_until(f"{work}/whole", 0), 0
for last in [*range(1, whole, whole // 20), *range(whole - 4, whole)]:
    if (process := os.fork()) == 0:
        merge_until(f"{work}/{last}", last)
        os._exit(0)  # what is done once in a process makes the first merge a few lines longer
    killed += os.waitpid(process, 0)[1] == signal.SIGKILL
    records.merge(sources, f"{work}/{last}").close()
assert killed >= 20, killed
"""


def test_killed_while_merging(tmp_path, run):
    """Everywhere on its way and just before its end: the same merge again gives what an undisturbed one does."""
    assert run(*TRAIN, "--out", tmp_path / "a") == (0, "")
    assert run(*TRAIN, "--seed", 2, "--out", tmp_path / "b") == (0, "")
    training_on = Records(tmp_path / "b", write=True)  # its newest rows are in the log
    training_on.open_session("cpu", "plain")

    def contents(*folders):
        files = [path for folder in folders for path in folder.rglob("*") if path.suffix != ".sqlite-shm"]
        return {path: path.read_bytes() for path in files if path.is_file()}

    sources = [tmp_path / "a", tmp_path / "b"]
    before = contents(*sources)
    assert any(path.name == "records.sqlite-wal" for path in before)
    process = Forked(DIES_IN_A_MERGE, *sources, tmp_path / "merged")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert contents(*sources) == before
    training_on.close()
    whole = tmp_path / "merged" / "whole"
    assert told(whole) == told(tmp_path / "a") | told(tmp_path / "b")
    checkpoints = sorted(path.read_bytes() for path in whole.rglob("*.safetensors"))
    assert len(checkpoints) == 2
    for again in whole.parent.iterdir():
        assert told(again) == told(whole)
        assert sorted(path.read_bytes() for path in again.rglob("*.safetensors")) == checkpoints
        assert not list(again.glob("records.sqlite-*"))


FETCHES = """
import sys
from pathlib import Path
from dataclasses import replace
from deepmemory.lab.data import DATASETS
from deepmemory.lab.data.fetching import fetch
address, size, sha256, folder = sys.argv[1:]
file = replace(DATASETS["nottingham"].files[0], addresses=(address,), size=int(size), sha256=sha256)
fetch(file, Path(folder), lambda done, total: print(done, flush=True))
"""


def test_killed_while_downloading(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as stalling:
        address = f"http://127.0.0.1:{stalling.getsockname()[1]}/a"
        file = served(NOTTINGHAM, BODY, [address])
        process = Forked(FETCHES, address, file.size, file.sha256, tmp_path)
        connection, _ = stalling.accept()
        with connection:
            connection.sendall(head + BODY[: len(BODY) // 2])
            assert int(process.stdout.readline()) > 0  # some of it is here, and no more will come
            process.kill()
            process.communicate(timeout=60)
    assert not (tmp_path / file.path).exists()
    with serving(Pages()) as pages:
        pages.bodies["/a"] = BODY
        assert fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path).read_bytes() == BODY
    left = [path.name for path in (tmp_path / "polymusic").iterdir() if path.stat().st_size]
    assert left == ["Nottingham.mat"]  # beside empty ones: locks, and the temporary file that pooch had opened


@pytest.mark.parametrize(
    ("limit", "width", "named"), [(30_000, 3, "records.sqlite"), (150_000, 50, "runs-0.safetensors")]
)
def test_a_full_disk(tmp_path, run, limit, width, named):
    command = [*TRAIN, "--transition", width, "--hidden", width]
    assert run(*command, "--out", tmp_path / "whole") == (0, "")
    process = Forked(MAIN, *command, "--out", tmp_path / "full", limit=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.startswith("error: ")
    assert named in errors
    assert "the same command resumes" in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "full").rglob("*.partial"))
    assert run(*command, "--out", tmp_path / "full") == (0, "")
    assert told(tmp_path / "full") == told(tmp_path / "whole")


def test_a_full_disk_while_a_lock_is_written(tmp_path):
    path = tmp_path / "locks" / "study.lock"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(RecordsError) as error, hold_lock(path, print):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value).startswith(f"{path} cannot be written: File too large")
    with hold_lock(path, pytest.fail):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("garbage", ["cut", "text", "emptied", "holes", "values"])
def test_damaged_records(tmp_path, run, trained, garbage):
    out = tmp_path / "whole"
    path = out / "records.sqlite"
    raw = path.read_bytes()
    if garbage == "values":
        with sqlite3.connect(path) as db:
            db.execute('UPDATE epoch SET "values" = ?', (b"abc",))
        db.close()
    else:
        path.write_bytes(
            {
                "cut": raw[: len(raw) // 3],
                "text": b"not a database" * 999,
                "emptied": b"",
                "holes": raw[:4096] + bytes(len(raw) - 4096),
            }[garbage]
        )
    before = path.read_bytes()
    for command in (["report", "--out", out], [*TRAIN, "--out", out]):
        if garbage == "emptied" and command[0] == "train":
            continue  # an empty file is a new database, for SQLite and for us
        code, error = run(*command)
        assert code == 2
        assert str(path) in error
    assert path.read_bytes()[100:] == before[100:]  # all but SQLite's own header
    path.write_bytes(raw)
    assert told(out) == trained


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def other_version(path, out):
    before = load_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "CHECKPOINT_FORMAT", 99)
        written = checkpoint_bytes(*before, path.parent.name)
    path.write_bytes(written)


def other_study(path, out):
    assert dmu_quietly("train", "adding", *SMALL, "--hidden", 7, "--out", out / "other") == 0
    path.write_bytes(checkpoint_in(out / "other").read_bytes())


def dmu_quietly(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments]).exit_code


def notes_of(path):
    """All but the digest."""
    with safe_open(path, framework="pt") as file:
        return {name: text for name, text in file.metadata().items() if name != "sha256"}


def noted(**changes):
    def damage(path, out):
        tensors, info = load_checkpoint(path)
        save_checkpoint(path, tensors, info | changes)

    return damage


DAMAGES = {
    "pickle": (lambda path, out: path.write_bytes(pickle.dumps(Payload())), "cannot be used as a checkpoint"),
    "torch.save": (lambda path, out: torch.save({"weights": Payload()}, path), "cannot be used as a checkpoint"),
    "cut": (lambda path, out: path.write_bytes(path.read_bytes()[:-9]), "cannot be used as a checkpoint"),
    "empty": (lambda path, out: path.write_bytes(b""), "cannot be used as a checkpoint"),
    "a folder": (lambda path, out: (path.unlink(), path.mkdir()), "cannot be used as a checkpoint"),
    "version": (other_version, "its format is '99', this version reads format 2"),
    "study": (other_study, "it belongs to the study 'adding-dmu-"),
    "rows": (noted(rows=[0, 1, 2]), "rows should list some of 2 runs"),
    "states": (noted(state=["fine", "fine"]), "state should be a list of 2 valid values"),
    "no note": (lambda path, out: save_file(load_file(path), path), "its format is None"),
    "no digest": (lambda path, out: save_file(load_file(path), path, notes_of(path)), "it has no 'sha256'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_none_of_ours(tmp_path, run, trained, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "whole"
    path = checkpoint_in(out)
    spoil, message = DAMAGES[damage]
    spoil(path, tmp_path)
    code, error = run(*TRAIN, "--epochs", 4, "--out", out)
    assert code == 2
    assert error.startswith(f"error: {path} ")
    assert message in error
    assert "Move it away, and its runs start again" in error
    assert not (tmp_path / "executed").exists()
    assert told(out) == trained


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_any_more(tmp_path, run, monkeypatch, loss):
    original = loop.finish_epoch

    def finish(trainer, group, values, seconds):
        return original(trainer, group, [dict.fromkeys(of_run, loss) for of_run in values], seconds)

    monkeypatch.setattr(loop, "finish_epoch", finish)
    code, error = run(*TRAIN, "--out", tmp_path)
    assert code == 1
    assert "2 of 2 runs diverged" in error
    assert {state for state, *_ in told(tmp_path).values()} == {"diverged"}


def no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def under_a_file(tmp_path):
    return no_folder(tmp_path) / "out"


def locked(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may write to every folder")
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path / "locked"


@pytest.mark.parametrize("place", [no_folder, under_a_file, locked])
def test_a_place_that_cannot_be_written_to(tmp_path, run, place):
    out = place(tmp_path)
    code, error = run(*TRAIN, "--out", out)
    assert code == 2
    assert error.startswith("error: ")
    assert str(out) in error


def test_records_that_may_only_be_read(tmp_path):
    """A database on a read-only disk, as SQLite sees it; file modes would not stop root."""
    Records(tmp_path, write=True).close()
    opened = Records(tmp_path, write=True)
    opened.db.execute("PRAGMA query_only=1")
    with pytest.raises(RecordsError, match="attempt to write a readonly database"):
        opened.open_session("cpu", "plain")
    opened.close()


def test_a_clock_that_goes_backwards(tmp_path, run, trained, monkeypatch):
    clock = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert run(*TRAIN, "--epochs", 2, "--out", tmp_path / "back") == (0, "")
    assert run(*TRAIN, "--out", tmp_path / "back") == (0, "")
    assert told(tmp_path / "back") == trained
    opened = Records(tmp_path / "back")
    started = [session["started"] for session in opened.sessions().values()]
    assert len(started) == 2
    assert started[1] < started[0]
    assert all(run.seconds > 0 for study in opened.studies() for run in study.runs)
    opened.close()


def test_no_gpu(tmp_path, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, error = run(*TRAIN[:-4], "--device", "cuda", "--out", tmp_path / "out")
    assert code == 2
    assert "no CUDA GPU that torch can use; choose cpu or auto" in error


@pytest.mark.parametrize("captured", [False, True])
def test_a_gpu_without_room(tmp_path, run, trained, monkeypatch, captured):
    """After two epochs; also where the error comes out of a capture."""
    original, epochs = loop.finish_epoch, 0

    def no_room(*args):
        nonlocal epochs
        epochs += 1
        if epochs < 3:
            return original(*args)
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if not captured:
            raise full
        raise RuntimeError("a training step could not be captured") from full

    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_epoch", no_room)
        code, error = run(*TRAIN, "--out", tmp_path / "full")
    assert code == 2
    assert "fewer runs at once (--runs 10" in error
    assert all(epochs == 2 for *_, epochs in told(tmp_path / "full").values())
    assert run(*TRAIN, "--out", tmp_path / "full") == (0, "")
    assert told(tmp_path / "full") == trained


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_data_that_changed_between_two_runs(tmp_path, run, monkeypatch):
    """The registry's hash tells, and where it has none, the one recorded when the data first came."""
    datasets, contents = making.tiny_datasets()
    for name, entry in datasets.items():
        monkeypatch.setitem(registry.DATASETS, name, entry)
    music = ["train", "polymusic", "--hidden", "3", "--threads", "1", "--device", "cpu", "--engine", "plain"]
    music += ["--out", tmp_path / "out"]
    data = tmp_path / "first"
    making.place(data, contents)
    assert run(*music, "--epochs", 1, "--data", data) == (0, "")
    before = told(tmp_path / "out")
    data = data.rename(tmp_path / "later")  # a process reads a folder's data once
    changed = data / NOTTINGHAM.path
    changed.write_bytes(making.mat({**making.MUSIC, "testdata": making.rolls(3, (4, 4))}))
    code, error = run(*music, "--epochs", 2, "--data", data)
    assert code == 2
    assert error.startswith(f"error: {changed}: not the contents expected; sha256 ")
    assert told(tmp_path / "out") == before

    portuguese = registry.DATASETS["portuguese"].files[0]
    path = data / portuguese.path
    files.record_path(path).write_text(f"{files.digest_of(path)}  {path.name}\n")
    files.read(portuguese, data)
    path.write_bytes(making.zipped({"por.txt": making.PAIRS + b"New.\tNovo.\n"}))
    with pytest.raises(DataError, match="not the file that was recorded"):
        files.read(portuguese, data)


def test_write_whole_keeps_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    write_whole(path, b"before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RecordsError, match="No space left on device"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["kept"]
