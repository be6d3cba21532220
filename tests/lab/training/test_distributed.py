"""One model on several processes: the numbers of one process, and checkpoints that either can resume."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lab.stories import told
from lab.test_cli import ENVIRONMENT, ROOT, invoke, start
from lab.training.two_processes import TASKS, trained

from deepmemory.lab.records import Records, load_checkpoint
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training import distributed

SMALL = ["train", "adding", "--transition", "5", "--steps", "6", "--batch", "7", "--validation", "20", "--test", "20"]
SMALL += ["--min-length", "24", "--max-length", "30", "--runs", "2", "--device", "cpu", "--threads", "1", "--json"]
SMALL += ["--recurrent-dropout", "0.3", "--transition-dropout", "0.3", "--clip", "0.1"]


def train(out, epochs, devices):
    command = [*SMALL, "--epochs", epochs, "--devices", devices, "--out", out]
    if devices == 1:
        output = invoke(*command).output
    else:
        process = start(*command)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def curves(out):
    opened = Records(out)
    (study,) = opened.studies()
    opened.close()
    return [value for run in study.runs for values in run.curves.values() for value in values]


def weights(out):
    (path,) = (out / "checkpoints").glob("*/*.safetensors")
    tensors, _ = load_checkpoint(path)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("weights.")}


def test_two_processes_train_what_one_does_and_resume_each_other(tmp_path):
    train(tmp_path / "one", 4, devices=1)
    events = train(tmp_path / "two", 2, devices=2)
    assert [event["event"] for event in events] == ["epoch", "epoch", "study"]  # the first process alone speaks
    train(tmp_path / "two", 3, devices=1)
    train(tmp_path / "two", 4, devices=2)
    assert told(tmp_path / "one").keys() == told(tmp_path / "two").keys()
    whole, shared = curves(tmp_path / "one"), curves(tmp_path / "two")
    assert all(map(math.isfinite, whole))
    assert shared == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, rtol=1e-3, atol=1e-5)


def look_at(process):
    """State and parent of a process."""
    state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def child_of(parent):
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if look_at(process)[1] == parent:
                return int(process)
    return pytest.fail("no second process")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in Linux's /proc")
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_by_the_other(tmp_path, frozen):
    command = [sys.executable, "-m", "deepmemory.lab", *SMALL, "--epochs", "9999", "--devices", "2"]
    how = {"cwd": ROOT, "env": ENVIRONMENT | {distributed.TIMEOUT: "5"}, "stdout": subprocess.PIPE}
    with (
        open(tmp_path / "errors", "w+") as errors,  # a pipe would stay open in the frozen process
        subprocess.Popen([*command, "--out", tmp_path / "out"], stderr=errors, **how) as first,
    ):
        ranks = [first.pid]
        try:
            assert json.loads(first.stdout.readline())["event"] == "epoch"
            ranks.append(child_of(first.pid))
            os.kill(ranks[frozen], signal.SIGSTOP)
            until = time.monotonic() + 60
            while first.poll() is None and look_at(ranks[1])[0] != "Z" and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        errors.seek(0)
        error, *_ = [line for line in errors.read().splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: rank {frozen} (process {ranks[frozen]} on ")
    assert "did not respond" in error
    assert told(tmp_path / "out")


def test_processes_that_do_not_come_are_told_of(monkeypatch):
    class Alone:
        world_size = 2

        def launch(self):
            raise torch.distributed.DistStoreError("Timed out after 121 seconds waiting for clients. 1/2 joined.")

    with pytest.raises(ConnectionError, match=r"not all of the 2 processes .* 1/2 joined. Start the same command on"):
        distributed.launch(Alone())
    monkeypatch.setenv(distributed.TIMEOUT, "soon")
    with pytest.raises(ValueError, match=r"DEEPMEMORY_TIMEOUT should be a number of seconds .* got 'soon'"):
        distributed.seconds_to_wait()


def test_every_task_shares_its_batches(monkeypatch):
    """Started by torchrun, two processes tell the numbers of one."""
    script = ROOT / "tests" / "lab" / "training" / "two_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=ENVIRONMENT | paths, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told_by_two = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told_by_two |= json.loads(line)
    assert set(told_by_two) == set(TASKS)
    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", task_of)  # put back what trained() changes
    for task, values in told_by_two.items():
        _, alone = trained(task, devices=1)
        torch.testing.assert_close(torch.tensor(values), torch.tensor(alone), rtol=1e-3, atol=1e-4)
