"""A lock file for each study, so that two processes never train the same study."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deepmemory.lab.records.errors import RecordsError
from deepmemory.lab.writing import open_own


@contextmanager
def hold_lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock; if another process holds it, say so and wait. It is freed even if the process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        raise RuntimeError("training needs the file locks of Linux and macOS; on Windows, use WSL") from None

    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open_own(path, "ab+", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                say(f"waiting: {path.stem} is being trained by {file.read().decode().strip() or 'another process'}")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}".encode())
        except OSError as error:
            raise RecordsError(
                f"{path} cannot be written: {error.strerror or error}. Once this is solved, the same command resumes"
            ) from error
        yield
