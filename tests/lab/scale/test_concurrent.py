"""Several studies at the same time: the numbers of one after another, whatever happens to one of them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from lab.made_studies import made, record
from lab.stories import told

from deepmemory.lab import __main__, cli, paper
from deepmemory.lab.records import RUNNING, SPENT, Records
from deepmemory.lab.scale import concurrent
from deepmemory.lab.scale.concurrent import LOGS, PIPES, run_concurrently, shared_gpu, take_next
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training import loop
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.studies import run_studies

CPU = Machine("cpu", engine="plain", threads=1)
DMU = Setting(
    transition=(3,), hidden=(3,), min_length=24, max_length=26, batch=4, steps=2, epochs=3, validation=8, test=8
)
GRU = replace(DMU, cell="gru", transition=())
RNN = replace(DMU, cell="rnn", transition=())
SEEDS = range(2)


class Recorder(PlainLines):
    """A display that records what it was told."""

    def __init__(self):
        super().__init__()
        self.said, self.ended, self.epochs = [], [], 0

    def say(self, text):
        self.said.append(text)

    def epoch(self, setting, epoch, training):
        super().epoch(setting, epoch, training)
        self.epochs += 1

    def end(self, setting, runs):
        super().end(setting, runs)
        self.ended.append((setting.cell, len(runs)))


def run(settings, out, machine=CPU, display=None, **options):
    """Two at a time."""
    display = display or Recorder()
    return run_concurrently(settings, SEEDS, at_once=2, out=out, machine=machine, display=display, **options)


def test_three_studies_two_at_a_time_record_what_one_after_another_would(tmp_path):
    """The first one fails, which leaves the others alone; the third one takes its place."""
    run_studies([DMU, GRU], SEEDS, tmp_path / "one", CPU, Recorder())
    display, tracked = Recorder(), []
    (failed,) = run(
        [Setting("polymusic", hidden=(3,), epochs=1), DMU, GRU],
        tmp_path / "two",
        machine=replace(CPU, data=str(tmp_path / "nothing")),
        display=display,
        track=lambda setting, epoch: tracked.append((setting.cell, epoch.number)),
    )
    assert failed.startswith("polymusic dmu: ")
    assert f"failed: {failed}" in display.said
    assert told(tmp_path / "two") == told(tmp_path / "one")
    assert sorted(display.ended) == [("dmu", 2), ("gru", 2)]
    assert display.epochs == 2 * DMU.epochs
    assert sorted(tracked) == [(cell, number) for cell in ("dmu", "gru") for number in (1, 2, 3)]


@pytest.fixture
def processes(monkeypatch):
    """The cells for whose studies a process is started."""
    context, started = multiprocessing.get_context("spawn"), []
    original = context.Process

    def process(**how):
        started.append(how["args"][0].cell)
        return original(**how)

    monkeypatch.setattr(context, "Process", process)
    return started


def test_only_what_is_missing_starts_a_process(tmp_path, processes):
    run([DMU], tmp_path)
    run_studies([GRU], SEEDS[:1], tmp_path, CPU, Recorder())
    assert processes == ["dmu"]
    display = Recorder()
    assert run([DMU, GRU], tmp_path, display=display) == []
    assert processes == ["dmu", "gru"]
    assert display.ended == [("dmu", 2), ("gru", 2)]
    before, display = told(tmp_path), Recorder()
    assert run([DMU, GRU], tmp_path, display=display) == []
    assert processes == ["dmu", "gru"]
    assert display.ended == [("dmu", 2), ("gru", 2)]
    assert all(study.finished for study in display.studies.values())
    assert told(tmp_path) == before
    run([replace(DMU, epochs=4), GRU], tmp_path)
    assert processes == ["dmu", "gru", "dmu"]


@pytest.mark.parametrize("epochs", [None, 3])
def test_runs_that_only_lack_their_end_start_no_process(epochs, tmp_path, processes):
    setting = paper.setting("pixel-mnist", "dmu")
    record(tmp_path, [made(setting, [0.98] * 2, state=RUNNING, epochs=epochs)])
    display = Recorder()
    failed = run([setting], tmp_path, replace(CPU, data=str(tmp_path / "nothing")), display)
    if epochs:
        assert processes == ["dmu"]
        assert len(failed) == 1  # for want of data
    else:
        assert processes == failed == []
        assert display.ended == [("dmu", 2)]
        assert {run.state for run in Records(tmp_path).studies()[0].runs} == {SPENT}


def test_without_studies_to_train_a_gpu_is_left_alone(tmp_path, service):
    run_studies([DMU], SEEDS, tmp_path, CPU, Recorder())
    assert run([DMU], tmp_path, replace(CPU, device="cuda")) == []
    assert not service.exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_a_study_of_another_task_waits(device, tmp_path, monkeypatch):
    other = replace(GRU, task="temporal-order")
    taken = []

    def take(waiting, tasks):
        setting = take_next(waiting, tasks)
        taken.append(setting and setting.task)
        return setting

    monkeypatch.setattr(concurrent, "take_next", take)
    ends_at_once = Mock(exitcode=0)
    context = Mock(Process=lambda **_: ends_at_once, Pipe=multiprocessing.Pipe, Value=multiprocessing.Value)
    monkeypatch.setattr(concurrent, "get_context", lambda method: context)
    assert run([DMU, other], tmp_path, replace(CPU, device=device)) == []
    assert ends_at_once.start.call_count == 2
    begun = [task for task in taken if task]
    assert begun == ["adding", "temporal-order"]
    together = taken[:2] == begun
    assert together == (device == "cpu")


def test_of_those_that_wait_the_first_of_a_task_is_taken():
    other = replace(GRU, task="temporal-order")
    waiting = [other, DMU, RNN]
    assert take_next(waiting, {"adding"}) == DMU
    assert take_next(waiting, {"adding"}) == RNN
    assert take_next(waiting, {"adding"}) is None
    assert waiting == [other]
    assert take_next(waiting, set()) == other
    assert take_next(waiting, set()) is None


class Killing(Recorder):
    """Kills the first worker that reports an epoch of the DMU."""

    def epoch(self, setting, epoch, training):
        super().epoch(setting, epoch, training)
        if setting.cell == "dmu" and not self.said:
            self.said.append("killed")
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            for child in children:
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds its children in Linux's /proc")
def test_a_worker_that_is_killed_is_named_and_the_same_call_resumes(tmp_path):
    long = replace(DMU, epochs=40)
    failed = run([long], tmp_path / "killed", display=Killing())
    assert failed == ["adding dmu: its process died (-9)"]
    assert run([long], tmp_path / "killed") == []
    run_studies([long], SEEDS, tmp_path / "whole", CPU, Recorder())
    assert told(tmp_path / "killed") == told(tmp_path / "whole")


def test_studies_that_share_a_device_share_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "time", Mock(perf_counter=count().__next__))  # an epoch takes a second
    run_studies([GRU], SEEDS, tmp_path / "alone", CPU, Recorder())
    run_studies([GRU], SEEDS, tmp_path / "shared", CPU, Recorder(), sharers=lambda: 1000)
    alone, shared = (Records(tmp_path / name).studies()[0].runs[0].seconds for name in ("alone", "shared"))
    assert alone > 0
    assert shared == pytest.approx(alone / 1000)


def test_time_left_counts_that_studies_run_at_the_same_time():
    display = Recorder()
    display.plan([DMU, GRU, RNN], SEEDS, 3)
    for study in display.studies.values():
        study.trained, study.seconds, study.epochs_timed = dict.fromkeys(SEEDS, 1), 10.0, 1
    assert display.seconds_left() == pytest.approx(20)
    display.at_once = 1
    assert display.seconds_left() == pytest.approx(60)


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A control program that writes down what it is asked to do."""
    log = tmp_path / "log"
    program = tmp_path / concurrent.CONTROL
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $1 $([ -n "$1" ] || cat)" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(concurrent, "PROBE", "")
    monkeypatch.delenv(PIPES, raising=False)
    return log


def test_the_service_that_shares_a_gpu_lives_as_long_as_it_is_needed(service):
    with shared_gpu(pytest.fail):
        pipes = os.environ[PIPES]
        assert Path(pipes).is_dir()
        assert service.read_text().split() == [pipes, "-d"]
    assert PIPES not in os.environ
    assert LOGS not in os.environ
    assert service.read_text().splitlines()[-1].split() == [pipes, "quit"]


def test_a_service_that_is_there_already_is_used(service, monkeypatch):
    monkeypatch.setenv(PIPES, "elsewhere")
    with shared_gpu(pytest.fail):
        assert os.environ[PIPES] == "elsewhere"
    assert not service.exists()


def test_a_service_that_lets_nobody_in_is_not_used(service, monkeypatch):
    monkeypatch.setattr(concurrent, "PROBE", "raise SystemExit(1)")
    said = []
    with shared_gpu(said.append):
        assert PIPES not in os.environ
    assert "take turns" in said[0]


def test_without_the_service_studies_take_turns_and_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PIPES, raising=False)
    said = []
    with shared_gpu(said.append):
        assert PIPES not in os.environ
    assert concurrent.CONTROL in said[0]


@pytest.mark.parametrize("how_stopped", [signal.SIGINT, signal.SIGTERM], ids=["by hand", "by timeout"])
def test_stopped_every_process_ends_in_good_order(tmp_path, how_stopped):
    """Ctrl-C in a terminal reaches all of them, and impatient people press it twice; so does the program timeout."""
    command = [sys.executable, "-m", "deepmemory.lab", "paper", "adding", "--cells", "dmu,gru", "--at-once", "2"]
    command += ["--runs", "1", "--epochs", "99999", "--set=steps=2", "--set=batch=4", "--set=validation=8", "--json"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*command, "--device", "cpu", "--out", tmp_path], **how) as process:
        seen = set()
        while len(seen) < 2:
            seen.add(json.loads(process.stdout.readline())["cell"])
        for _ in range(2):
            os.killpg(process.pid, how_stopped)
            time.sleep(0.01)  # two signals at the same moment would be one
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "every finished epoch is saved" in errors
    said = errors.split("\n\n") if how_stopped == signal.SIGINT else [errors]  # Ctrl-C twice asks for patience
    assert len(said[-1].strip().splitlines()) == 1, errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.glob("records*")] == ["records.sqlite"]
    assert len(told(tmp_path)) == 2


def test_a_second_interruption_asks_for_patience_and_a_third_ends_the_command(monkeypatch, capfd):
    monkeypatch.setattr(__main__, "interruptions", 0)
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code))
    ended = []
    with pytest.raises(KeyboardInterrupt):
        __main__.interrupt(signal.SIGINT, None)
    __main__.interrupt(signal.SIGINT, None)
    assert "press Ctrl-C again to exit at once" in capfd.readouterr().err
    assert not ended
    __main__.interrupt(signal.SIGINT, None)
    assert ended == [130]


def test_at_once_shares_the_device_of_this_machine(tmp_path):
    with pytest.raises(ValueError, match="--at-once shares one device"):
        cli.app(["paper", "adding", "--at-once", "2", "--on", "ray", "--out", str(tmp_path)], standalone_mode=False)
