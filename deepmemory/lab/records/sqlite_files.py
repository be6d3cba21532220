"""Access to SQLite files that other processes may be writing, that may be damaged or come from somebody else."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepmemory.lab.records.errors import RecordsError, shown

LARGEST_VALUE = 2**26  # bytes of one text or blob in a database, and of one statement


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a database for reading (mode ro), or for writing, creating it if there is none (rwc)."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=60, isolation_level=None)


def check_tables(db: sqlite3.Connection, path: Path) -> None:
    """Raise unless a database has only tables of values: views, triggers and the like could compute without end.

    A new database has no tables yet.
    """
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    db.execute("PRAGMA trusted_schema=OFF")
    for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        if kind not in ("table", "index") or str(sql).upper().startswith("CREATE VIRTUAL"):
            raise RecordsError(
                f"{path} was not written by deepmemory: {shown(name)} should be a table of values, got a "
                f"{'virtual table' if kind == 'table' else kind}. Nothing in it was used"
            )
        if kind == "table" and any(column[6] for column in db.execute("SELECT * FROM pragma_table_xinfo(?)", (name,))):
            raise RecordsError(f"{path} was not written by deepmemory: the table {shown(name)} has computed columns")


def lacks_its_log(path: Path) -> bool:
    """Whether a process is writing a database, or was killed while writing, and the write-ahead log is missing.

    The header says whether the database is open for writing; closing it resets that. The log of a writer is never
    empty; an empty log was made by SQLite for a reader.
    """

    def seems_so() -> bool:
        with suppress(OSError):
            if os.stat(f"{path}-wal").st_size:
                return False
        with suppress(OSError), open(path, "rb") as file:
            header = file.read(20)
            return header.startswith(b"SQLite format 3") and header[18:] == b"\x02\x02"  # fileformat.html, 1.3.3
        return False

    if seems_so():
        time.sleep(0.2)  # another process may just be opening or closing it
        return seems_so()
    return False


@contextmanager
def explained(path: Path, malformed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn SQLite's errors, and those of ``malformed`` values, into errors that name the file and say what to do."""
    unreadable: tuple[type[Exception], ...] = (sqlite3.Error, *malformed)
    try:
        yield
    except RecordsError:
        raise
    except sqlite3.OperationalError as error:  # a full or read-only disk, another writer, a missing table
        raise RecordsError(
            f"{path} cannot be used: {error}. All records so far are safe; once this is solved, the same command "
            "resumes"
        ) from error
    except unreadable as error:
        raise RecordsError(
            f"{path} cannot be read: {error}. It is damaged, or from a newer version of deepmemory; put a good copy "
            "in its place, or move it away and train again"
        ) from error


def retry_while_locked(act: Callable[[], Any], seconds: float = 60.0) -> None:
    """Try again while another process holds the database; SQLite's own timeout does not cover every case."""
    until = time.monotonic() + seconds
    while True:
        try:
            act()
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
