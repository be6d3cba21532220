"""Trains several studies at the same time on one device, each in a process of its own.

A study of small networks, or of sequences of different lengths, leaves most of a GPU idle, so training another one
beside it costs little. Every process records its own study and sends its progress to the process that started it, which
shows it. Processes share a GPU through NVIDIA's Multi-Process Service (MPS), which is started and stopped here. Only
studies of one task share a GPU: kernels wait for those that are running, and a task with many short kernels would
mostly wait for a task with few long ones. (On an H200 an epoch of translation at depth 5 took 2.8 s alone, 11 s beside
seven other translations, 45 s beside three of them and four studies of pixels and language.)

Read :func:`run_concurrently` first.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from deepmemory.lab.records import Records, Run
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.studies import Tracker, Watch, finish_study, run_studies

CONTROL = "nvidia-cuda-mps-control"
STOPPING = 10.0  # seconds that a worker has to close the records
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# Checks in a process of its own that a GPU can be used.
PROBE = """
import ctypes
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


def run_concurrently(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    at_once: int,
    out: Path | str,
    machine: Machine,
    display: Display,
    track: Tracker | None = None,
    watch: Watch | None = None,
) -> list[str]:
    """Train as :func:`deepmemory.lab.training.studies.run_studies` does, ``at_once`` settings at a time.

    A study that is completely recorded starts no process. Returns a line for each study that failed; a failure does not
    stop the others.
    """
    display.plan(settings, seeds, at_once)
    on_gpu = machine.device.startswith("cuda") or (machine.device == "auto" and torch.cuda.is_available())
    if not on_gpu and not machine.threads:
        machine = replace(machine, threads=max(1, (os.cpu_count() or 1) // at_once))
    context = get_context("spawn")  # a process that has used CUDA cannot be forked
    running = context.Value("i", 0)
    with Records(out, write=True) as records:  # closed before the workers open it
        waiting = [setting for setting in settings if not finish_study(records, setting, seeds, display)]
    workers, failed = dict[Connection, tuple[Setting, Any]](), list[str]()

    def give_up(setting: Setting, why: str) -> None:  # also reported at once: the other studies may take hours
        failed.append(f"{setting.task} {setting.cell}: {why}")
        display.say(f"failed: {failed[-1]}")

    sharing = shared_gpu(display.say) if on_gpu and waiting else nullcontext()
    with handled(signal.SIGTERM, interrupt_once), sharing:  # timeout and schedulers send it
        try:
            while waiting or workers:
                while len(workers) < at_once:
                    tasks = {setting.task for setting, _ in workers.values()} if on_gpu else set[str]()
                    next_setting = take_next(waiting, tasks)
                    if next_setting is None:
                        break
                    here, there = context.Pipe(duplex=False)
                    work = (next_setting, seeds, out, machine, watch, there, running)
                    process = context.Process(target=train_one, args=work, daemon=True)
                    with handled(signal.SIGINT, signal.SIG_IGN):  # which a terminal sends to all processes
                        process.start()
                    there.close()  # only the worker's copy is left, which closes when the worker ends
                    workers[here] = next_setting, process
                running.value = len(workers)
                for connection in wait(list(workers)):
                    assert isinstance(connection, Connection)
                    setting, process = workers[connection]
                    try:
                        call, arguments = connection.recv()
                    except EOFError:
                        del workers[connection]
                        process.join()
                        if process.exitcode:
                            give_up(setting, f"its process died ({process.exitcode})")
                        continue
                    if call == "failed":
                        give_up(setting, arguments[0])
                    else:
                        getattr(display, call)(*arguments)
                    if call == "epoch" and track is not None:
                        track(setting, arguments[1])
        finally:
            for _, process in workers.values():  # some are left after Ctrl-C or SIGTERM
                process.terminate()
            for _, process in workers.values():
                process.join(STOPPING)
                process.kill()
                process.join()
    return failed


def take_next(waiting: list[Setting], tasks: set[str]) -> Setting | None:
    """Remove the first setting of one of these tasks from the list, or of any task if none is given."""
    for setting in waiting:
        if not tasks or setting.task in tasks:
            waiting.remove(setting)
            return setting
    return None


class Relay:
    """The display of a worker: sends every call to the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int], at_once: int = 1, parallel: bool = False) -> None:
        """Do nothing: the process that started the workers has planned all studies."""

    def say(self, text: str) -> None:
        """See :class:`Display`, also for the methods below."""
        self.connection.send(("say", (text,)))

    def begin(self, setting: Setting, known: Sequence[Run]) -> None:  # noqa: D102
        self.connection.send(("begin", (setting, known)))

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:  # noqa: D102
        self.connection.send(("epoch", (setting, epoch, training)))

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:  # noqa: D102
        self.connection.send(("end", (setting, runs)))

    def close(self) -> None:  # noqa: D102
        self.connection.close()


def train_one(
    setting: Setting,
    seeds: Sequence[int],
    out: Path | str,
    machine: Machine,
    watch: Watch | None,
    connection: Connection,
    running: Synchronized[int],
) -> None:
    """Train one study in a process of its own; ``running`` counts those that share the device."""
    relay = Relay(connection)
    try:
        with handled(signal.SIGTERM, interrupt_once):  # sent by the process that started this one
            run_studies(
                [setting],
                seeds,
                out=out,
                machine=machine,
                display=relay,
                watch=watch,
                sharers=lambda: max(1, running.value),
            )
    except KeyboardInterrupt:
        pass  # the process that started this one says so
    except Exception as error:
        with suppress(OSError):  # that process is gone
            connection.send(("failed", (f"{type(error).__name__}: {error}",)))
    finally:
        relay.close()


@contextmanager
def handled(number: signal.Signals, handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Handle a signal differently inside this context; a process started inside inherits an ignored signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def interrupt_once(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal like Ctrl-C; from then on it is ignored, so that the process can end in an orderly way."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def shared_gpu(say: Callable[[str], None]) -> Iterator[None]:
    """Start MPS, unless it is running already: without it processes take turns on a GPU."""
    if PIPES in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {PIPES: folder, LOGS: folder}
        if why := start_service(os.environ | places):
            say(f"studies will take turns on the GPU, which is slower: {why}")
            yield
            return
        os.environ.update(places)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input=b"quit\n", timeout=60, check=False, capture_output=True)
            for name in places:
                del os.environ[name]


def start_service(environment: dict[str, str]) -> str | None:
    """Start MPS; returns why it cannot be used, or None."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL}, which comes with NVIDIA's driver, was not found"
    how: dict[str, Any] = {"env": environment, "timeout": 60, "check": True, "capture_output": True}
    try:
        subprocess.run([CONTROL, "-d"], start_new_session=True, **how)  # out of reach of Ctrl-C
        subprocess.run([sys.executable, "-c", PROBE], **how)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{CONTROL} does not work here ({error})"
    return None
