"""The lab in processes of its own, to be killed or stopped, without importing torch for seconds in each.

They are forked from a server that has imported everything. What this leaves out, the start and the end of an
interpreter, is tested where a command is run by its name.
"""

import os
import resource
import signal
import sys
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile

import torch

ROOT = Path(__file__).parents[2]
MAIN = "from deepmemory.lab.__main__ import main; main()"

context = get_context("forkserver")
context.set_forkserver_preload(
    [f"deepmemory.lab.{module}" for module in ("cli", "report.report", "scale.search", "training.studies")]
)


class Forked:
    """Runs ``code`` with these arguments; has what the tests use of ``subprocess.Popen``.

    It may write files of ``limit`` bytes at most.
    """

    def __init__(self, code: str, *arguments: object, limit: int | None = None) -> None:
        self._errors = TemporaryFile("w+")  # noqa: SIM115
        reading, writing = context.Pipe(duplex=False)
        with writing, _copied(self._errors.fileno()) as errors:
            case = code, [str(argument) for argument in arguments], dict(os.environ), limit, writing, errors
            self._process = context.Process(target=_run, args=case)
            self._process.start()
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        reading.close()

    @property
    def returncode(self) -> int | None:
        """Of a process killed by a signal, minus the signal."""
        return self._process.exitcode

    @property
    def stderr(self):
        self._errors.seek(0)
        return self._errors

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """What it says until it ends; it is killed when the time is up."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with self.stdout, self._errors:
            output = self.stdout.read()
            self._process.join()
            timer.cancel()
            return output, self.stderr.read()


def _copied(descriptor: int) -> Connection:
    """A file in the form in which a process can be given it."""
    return Connection(os.dup(descriptor), readable=False)


def _run(
    code: str,
    arguments: list[str],
    environment: dict[str, str],
    limit: int | None,
    stdout: Connection,
    stderr: Connection,
) -> None:
    for connection, number, name in ((stdout, 1, "stdout"), (stderr, 2, "stderr")):
        os.dup2(connection.fileno(), number)
        connection.close()
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = ["dmu", *arguments]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    exec(code, {"__name__": "__main__"})
