"""What happened, crash-safe: studies, runs, epochs and metrics in SQLite, checkpoints in safetensors files.

Everything lies under one folder::

    records.sqlite                     all numbers; reports need nothing else
    checkpoints/STUDY/runs-0.safetensors   weights and optimiser state, to go on from
    locks/STUDY.lock                   held by the process that trains the study

An epoch is written to the database first and to the checkpoint after it, so a process killed in
between repeats that epoch and writes the same numbers again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepmemory as dm
from deepmemory.lab.data.unpacking import inflate
from deepmemory.lab.settings import THRESHOLDS, Setting, setting_from_json
from deepmemory.lab.writing import open_own, put, without_links

SCHEMA_VERSION = 4  # older ones are read, and brought up to date when written to: each adds one of the tables below
SCHEMA = """
CREATE TABLE study (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,      -- of the settings
    settings TEXT NOT NULL,        -- JSON
    series TEXT NOT NULL,          -- JSON: names of an epoch's values
    thresholds TEXT NOT NULL       -- JSON: of the validation loss
);
CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    started TEXT NOT NULL,
    machine TEXT NOT NULL,         -- JSON: device, engine, versions
    git TEXT                       -- commit of the code, where it is known
);
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    study INTEGER NOT NULL REFERENCES study,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,           -- running, reached, spent or diverged
    first_under TEXT NOT NULL,     -- JSON: first epoch under each threshold, or null
    best_epoch INTEGER,
    test BLOB,                     -- float32: loss and metrics of the best weights
    seconds REAL NOT NULL,         -- wall time of the group the run trained in
    session INTEGER NOT NULL REFERENCES session,
    UNIQUE (study, seed)
);
CREATE TABLE epoch (
    run INTEGER NOT NULL REFERENCES run,
    epoch INTEGER NOT NULL,        -- from 1
    "values" BLOB NOT NULL,        -- float32, named in study.series
    PRIMARY KEY (run, epoch)
) WITHOUT ROWID;
"""
PACKED = """
CREATE TABLE packed (
    run INTEGER PRIMARY KEY REFERENCES run,
    "values" BLOB NOT NULL         -- all epochs of a merged run, in the place of its rows in epoch; see pack_curves
)
"""
WATCH = """
CREATE TABLE IF NOT EXISTS watch (
    run INTEGER NOT NULL REFERENCES run,
    epoch INTEGER NOT NULL,        -- 0 is before the first
    name TEXT NOT NULL,            -- MODULE.LAYER.WHAT; see inspection.watch
    value REAL,                    -- null where it is nan
    PRIMARY KEY (run, epoch, name)
) WITHOUT ROWID
"""
PACKED_WATCH = """
CREATE TABLE IF NOT EXISTS packed_watch (
    run INTEGER PRIMARY KEY REFERENCES run,
    "values" BLOB NOT NULL         -- all that was watched of a merged run, in the place of its rows; see pack_watch
)
"""

STATES = RUNNING, REACHED, SPENT, DIVERGED = "running", "reached", "spent", "diverged"
CHECKPOINT_FORMAT = 2  # the first had no sha256

# Of files that may come from somebody else.
LARGEST_HEADER = 2**24  # bytes of a checkpoint's header: names, shapes and notes, with room for 100,000 runs
LARGEST_UNPACKED = 2**27  # bytes that all packed runs may come to: fifty times the paper's; as Python's floats 1 GB
LARGEST_VALUE = 2**26  # bytes of one text or blob in a database, and of one statement


@dataclass(frozen=True)
class Run:
    """One seed of a study, as recorded."""

    seed: int
    state: str
    first_under: tuple[int | None, ...]  # epoch, for each threshold
    best_epoch: int | None
    test: dict[str, float] | None  # loss and measures of the best weights on the test set
    seconds: float
    session: int
    curves: dict[str, tuple[float, ...]]  # one value per epoch of each of the study's series

    @property
    def epochs(self) -> int:
        """How many epochs are recorded."""
        return len(self.curves["valid_loss"])

    def at_epoch(self, number: int) -> dict[str, float]:
        """The values of one epoch, from 1, by series."""
        return {name: values[number - 1] for name, values in self.curves.items()}


@dataclass(frozen=True)
class Study:
    """One setting and its runs, as recorded."""

    setting: Setting
    series: tuple[str, ...]  # names of an epoch's values, such as valid_loss
    thresholds: tuple[float, ...]
    runs: tuple[Run, ...]


class RecordsError(ValueError):
    """Records or a checkpoint that are damaged, of another kind, or cannot be written."""


# What a file brings about that is well-formed on the outside and holds something else than we write.
GARBAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError, zlib.error)


class Records:
    """The database of one output folder. Every change is one transaction; reading changes nothing on disk."""

    def __init__(self, out: Path | str, write: bool = False) -> None:
        self.out = Path(out)
        self.path = path = self.out / "records.sqlite"
        if not write and not path.exists():
            raise FileNotFoundError(f"no records in {self.out}: {path.name} is not there; give --out or train first")
        if write:
            without_links(self.out, path.name)
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RecordsError(f"--out {self.out} is no folder that can be written to ({error})") from None
        self.write = False  # until the file is known to be ours
        mode = "rwc" if write else "ro"
        if lacks_its_log(path):
            print(
                f"warning: {path} was copied while a command was writing to it, or after one was killed, and without "
                f"{path.name}-wal, which has the newest numbers: some may be missing. Copy both files",
                file=sys.stderr,
            )
        with explained(path):
            self.db = connect(path, mode)
        try:
            with explained(path):
                check_tables(self.db, path)
                self.version = version = self.db.execute("PRAGMA user_version").fetchone()[0]
                self.write = write and 0 <= version <= SCHEMA_VERSION
                if self.write:
                    self._prepare()
                    self.version = version = SCHEMA_VERSION
            if not 1 <= version <= SCHEMA_VERSION:
                raise ValueError(
                    f"{path} was written in format {version}, this version reads 1 to {SCHEMA_VERSION}; "
                    "use the deepmemory version that wrote it, or another --out"
                )
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Readers and one writer at a time, nothing lost when the power goes; tables where there are none."""
        patiently(lambda: self.db.execute("PRAGMA journal_mode=WAL"))
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=1")  # after every commit: a copy of the file alone lacks little
        with self.transaction():
            version = self.db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in SCHEMA.split(";"):
                    self.db.execute(statement)
            if version < 2:
                self.db.execute(PACKED)
            if version < 3:
                self.db.execute(WATCH)
            if version < 4:
                self.db.execute(PACKED_WATCH)
            self.db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")  # always: see lacks_its_log

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, also when the process dies or the disk is full; waits for other writers."""
        with explained(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # already undone where SQLite could not go on
                    self.db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Leave one file behind that can be copied and kept."""
        if self.write:
            self.db.execute("PRAGMA busy_timeout=0")
            for pause in (0, os.getpid() % 97 / 1000):  # two that close at once are in each other's way, but once only
                time.sleep(pause)
                with suppress(sqlite3.Error):  # another process is at work and will do it, or the file is damaged
                    self.db.execute("PRAGMA journal_mode=DELETE")
                    break
        self.db.close()

    # --- writing ---------------------------------------------------------------------------------

    def open_study(self, setting: Setting, series: Sequence[str]) -> int:
        """The study of these settings, made if it is new; a longer one takes over its number of epochs."""
        with self.transaction():
            row = self.db.execute("SELECT id, settings FROM study WHERE key = ?", (setting.key,)).fetchone()
            if row is None:
                return self._insert(
                    "study",
                    key=setting.key,
                    settings=setting.to_json(),
                    series=json.dumps(list(series)),
                    thresholds=json.dumps(THRESHOLDS),
                )
            if setting_from_json(row[1]).epochs < setting.epochs:
                self.db.execute("UPDATE study SET settings = ? WHERE id = ?", (setting.to_json(), row[0]))
            return int(row[0])

    def open_session(self, device: str, engine: str) -> int:
        """This machine computes from now on."""
        return self.add_session(provenance(device, engine))

    def add_session(self, machine: Mapping[str, str | None]) -> int:
        """Who computes from now on, and with which versions: the ``provenance`` of any machine."""
        told = dict(machine)
        git = told.pop("git")
        with self.transaction():
            return self._insert("session", started=now(), machine=json.dumps(told), git=git)

    def begin(self, study: int, seeds: Sequence[int], epoch: int, session: int) -> None:
        """These runs go on after ``epoch``; whatever was written of later epochs will be computed again."""
        with self.transaction():
            for seed in seeds:
                run = self._run_id(study, seed)
                if run is None:
                    nowhere = json.dumps([None] * len(self._series_and_thresholds(study)[1]))
                    self._insert(
                        "run", study=study, seed=seed, state=RUNNING, first_under=nowhere, seconds=0.0, session=session
                    )
                else:
                    self._unpack_epochs(study, run)
                    self._unpack_watch(run)
                    for table in ("epoch", "watch"):
                        self.db.execute(f"DELETE FROM {table} WHERE run = ? AND epoch > ?", (run, epoch))
                    self.db.execute(
                        "UPDATE run SET session = ?, first_under = ?, seconds = iif(?, seconds, 0) WHERE id = ?",
                        (session, json.dumps(self._first_under(study, run)), epoch > 0, run),
                    )

    def write_epoch(
        self,
        study: int,
        epoch: int,
        values: Mapping[int, Mapping[str, float]],
        states: Mapping[int, str],
        best_epochs: Mapping[int, int | None],
        seconds: float,
    ) -> None:
        """One epoch of a group of runs: by seed the value of each series, and what became of the runs."""
        with self.transaction():
            series, thresholds = self._series_and_thresholds(study)
            for seed, of_run in values.items():
                run, so_far = self.db.execute(
                    "SELECT id, first_under FROM run WHERE study = ? AND seed = ?", (study, seed)
                ).fetchone()
                first = [
                    epoch if before is None and of_run["valid_loss"] < threshold else before
                    for before, threshold in zip(json.loads(so_far), thresholds, strict=True)
                ]
                self.db.execute(
                    "INSERT OR REPLACE INTO epoch VALUES (?, ?, ?)", (run, epoch, pack([of_run[n] for n in series]))
                )
                self.db.execute(
                    "UPDATE run SET state = ?, first_under = ?, best_epoch = ?, test = NULL, seconds = seconds + ? "
                    "WHERE id = ?",
                    (states[seed], json.dumps(first), best_epochs[seed], seconds, run),
                )

    def write_watch(self, study: int, epoch: int, seeds: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """What was watched after an epoch: by name, one number for each of the seeds."""
        with self.transaction():
            for place, seed in enumerate(seeds):
                run = self._run_id(study, seed)
                rows = [(run, epoch, name, of_runs[place]) for name, of_runs in values.items()]
                self.db.executemany("INSERT OR REPLACE INTO watch VALUES (?, ?, ?, ?)", rows)

    def write_end(self, study: int, states: Mapping[int, str], tests: Mapping[int, Mapping[str, float] | None]) -> None:
        """How a group ended: states of its runs, and loss and measures of their best weights on the test set."""
        with self.transaction():
            measures = measures_in(self._series_and_thresholds(study)[0])
            for seed, state in states.items():
                test = tests[seed]
                self.db.execute(
                    "UPDATE run SET state = ?, test = ? WHERE study = ? AND seed = ?",
                    (state, None if test is None else pack([test[name] for name in measures]), study, seed),
                )

    def _insert(self, table: str, **columns: Any) -> int:
        marks = ", ".join("?" * len(columns))
        cursor = self.db.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", tuple(columns.values())
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _run_id(self, study: int, seed: int) -> int | None:
        row = self.db.execute("SELECT id FROM run WHERE study = ? AND seed = ?", (study, seed)).fetchone()
        return row and row[0]

    def _series_and_thresholds(self, study: int) -> tuple[list[str], list[float]]:
        series, thresholds = self.db.execute("SELECT series, thresholds FROM study WHERE id = ?", (study,)).fetchone()
        return json.loads(series), json.loads(thresholds)

    def _first_under(self, study: int, run: int) -> list[int | None]:
        series, thresholds = self._series_and_thresholds(study)
        rows = self.db.execute('SELECT "values" FROM epoch WHERE run = ? ORDER BY epoch', (run,))
        losses = [unpack(blob)[series.index("valid_loss")] for (blob,) in rows]
        return first_under(losses, thresholds)

    def _unpack_epochs(self, study: int, run: int) -> None:
        """A merged run that goes on has its epochs in rows again."""
        series, _ = self._series_and_thresholds(study)
        for (blob,) in self.db.execute('SELECT "values" FROM packed WHERE run = ?', (run,)).fetchall():
            rows = zip(*unpack_curves(blob, series).values(), strict=True)
            self.db.executemany(
                "INSERT OR REPLACE INTO epoch VALUES (?, ?, ?)",
                [(run, epoch, pack(values)) for epoch, values in enumerate(rows, 1)],
            )
            self.db.execute("DELETE FROM packed WHERE run = ?", (run,))

    def _unpack_watch(self, run: int) -> None:
        """What was watched of a merged run that goes on is in rows again."""
        for (blob,) in self.db.execute('SELECT "values" FROM packed_watch WHERE run = ?', (run,)).fetchall():
            rows = [(run, epoch, name, value) for name, of in unpack_watch(blob).items() for epoch, value in of.items()]
            self.db.executemany("INSERT OR REPLACE INTO watch VALUES (?, ?, ?, ?)", rows)
            self.db.execute("DELETE FROM packed_watch WHERE run = ?", (run,))

    # --- reading ---------------------------------------------------------------------------------

    def studies(self) -> list[Study]:
        """Everything recorded, studies in the order they were begun, runs by seed."""
        with explained(self.path, GARBAGE):
            self.db.execute("BEGIN")  # one moment in time, whatever is being written
            room = Room()
            try:
                keys = [key for (key,) in self.db.execute("SELECT key FROM study ORDER BY id")]
                return [study for key in keys if (study := self._study(key, room)) is not None]
            finally:
                self.db.execute("COMMIT")

    def study(self, key: str) -> Study | None:
        """One study by the key of its settings."""
        with explained(self.path, GARBAGE):
            return self._study(key, Room())

    def _study(self, key: str, room: Room) -> Study | None:
        row = self.db.execute("SELECT id, settings, series, thresholds FROM study WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        study, settings, series, thresholds = row[0], row[1], json.loads(row[2]), json.loads(row[3])
        rows: dict[int, list[dict[str, float]]] = {}
        for run, blob in self.db.execute(
            'SELECT run, "values" FROM epoch JOIN run ON run.id = epoch.run WHERE study = ? ORDER BY run, epoch',
            (study,),
        ):
            rows.setdefault(run, []).append(by_name(series, unpack(blob)))
        curves = {run: {name: tuple(row[name] for row in of_run) for name in series} for run, of_run in rows.items()}
        if self.version >= 2:
            for run, blob in self.db.execute(
                'SELECT run, "values" FROM packed JOIN run ON run.id = packed.run WHERE study = ?', (study,)
            ):
                curves[run] = unpack_curves(blob, series, room)
        runs = [
            Run(
                seed,
                state,
                tuple(json.loads(under)),
                best,
                None if test is None else by_name(measures_in(series), unpack(test)),
                secs,
                session,
                curves.get(run, dict.fromkeys(series, ())),
            )
            for run, seed, state, under, best, test, secs, session in self.db.execute(
                "SELECT id, seed, state, first_under, best_epoch, test, seconds, session FROM run "
                "WHERE study = ? ORDER BY seed",
                (study,),
            )
        ]
        found = Study(setting_from_json(settings), tuple(series), tuple(thresholds), tuple(runs))
        check_study(found, {session for (session,) in self.db.execute("SELECT id FROM session")})
        return found

    def watched(self, key: str) -> dict[int, dict[str, dict[int, float]]]:
        """What was watched in a study: by seed, by name, by epoch."""
        found: dict[int, dict[str, dict[int, float]]] = {}
        room = Room()
        if self.version < 3:
            return found
        with explained(self.path, GARBAGE):
            for seed, name, epoch, value in self.db.execute(
                "SELECT seed, name, epoch, value FROM watch JOIN run ON run.id = watch.run "
                "JOIN study ON study.id = run.study WHERE key = ? ORDER BY seed, epoch, name",
                (key,),
            ):
                of_name = found.setdefault(seed, {}).setdefault(str(name), {})
                of_name[int(epoch)] = math.nan if value is None else float(value)
            if self.version >= 4:
                for seed, blob in self.db.execute(
                    'SELECT seed, "values" FROM packed_watch JOIN run ON run.id = packed_watch.run '
                    "JOIN study ON study.id = run.study WHERE key = ? ORDER BY seed",
                    (key,),
                ):
                    found[seed] = unpack_watch(blob, room)
        return found

    def sessions(self) -> dict[int, dict[str, Any]]:
        """Machine, versions and commit of every session."""
        with explained(self.path, GARBAGE):
            rows = self.db.execute("SELECT id, started, machine, git FROM session ORDER BY id")
            found = {
                key: {"started": started, **json.loads(machine), "git": git} for key, started, machine, git in rows
            }
            for session in found.values():
                texts = all(isinstance(value, str) for name, value in session.items() if name != "git" or value)
                if not texts or "device" not in session:
                    raise ValueError(f"a session should say what computed, in texts, it says {shown(session)}")
            return found

    # --- checkpoints and locks -------------------------------------------------------------------

    def checkpoint_folder(self, setting: Setting) -> Path:
        """Where the checkpoints of a study lie."""
        return without_links(self.out, "checkpoints", f"{setting.task}-{setting.cell}-{setting.key}")

    def lock(self, setting: Setting, say: Callable[[str], None] = print) -> Any:
        """Hold a study for this process; waits, and says so, while another process trains it."""
        name = f"{setting.task}-{setting.cell}-{setting.key}.lock"
        return hold_lock(without_links(self.out, "locks", name), say)


def check_tables(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a database with anything else than tables of values: views, triggers and the like compute, maybe for ever.

    A new one has no tables yet.
    """
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    db.execute("PRAGMA trusted_schema=OFF")
    for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        if kind not in ("table", "index") or str(sql).upper().startswith("CREATE VIRTUAL"):
            raise RecordsError(
                f"{path} is no database of ours: {shown(name)} should be a table of values, is a "
                f"{'virtual table' if kind == 'table' else kind}. Nothing in it was used"
            )
        if kind == "table" and any(column[6] for column in db.execute("SELECT * FROM pragma_table_xinfo(?)", (name,))):
            raise RecordsError(f"{path} is no database of ours: the table {shown(name)} computes some of its columns")


def check_study(study: Study, sessions: Container[int]) -> None:
    """Refuse values that are none of ours: SQLite keeps any type in any column, and JSON anything at all."""

    def numbers(*values: Any) -> bool:
        return all(type(value) in (int, float) and math.isfinite(value) for value in values)

    def epochs(*values: Any) -> bool:
        return all(value is None or (type(value) is int and value > 0) for value in values)

    names = set(study.series)
    if not ({"train_loss", "valid_loss"} <= names and len(names) == len(study.series) and numbers(*study.thresholds)):
        raise ValueError(f"series and thresholds are {shown(study.series)} and {shown(study.thresholds)}")
    for run in study.runs:
        if not (
            type(run.seed) is int
            and run.state in STATES
            and len(run.first_under) == len(study.thresholds)
            and epochs(*run.first_under, run.best_epoch)
            and numbers(run.seconds)
            and run.session in sessions
        ):
            raise ValueError(f"what stands at seed {shown(run.seed)} of {study.setting.task} is not what a run has")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A database, to be read (ro), or written and made where it is not there (rwc)."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=60, isolation_level=None)


def lacks_its_log(path: Path) -> bool:
    """Whether records are open for writing, or were when a process was killed, and their write-ahead log is not here.

    The header tells the first: closing them puts it back. A writer has something in the log from the start, and a
    log that is empty is one that SQLite made for a reader.
    """

    def seems_so() -> bool:
        with suppress(OSError):
            if os.stat(f"{path}-wal").st_size:
                return False
        with suppress(OSError), open(path, "rb") as file:
            header = file.read(20)
            return header.startswith(b"SQLite format 3") and header[18:] == b"\x02\x02"  # format.html, 1.3.3
        return False

    if seems_so():
        time.sleep(0.2)  # somebody may be opening or closing them at this moment
        return seems_so()
    return False


@contextmanager
def explained(path: Path, garbage: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What SQLite has against a records file, or ``garbage`` in it, with the file's name and what to do."""
    unreadable: tuple[type[Exception], ...] = (sqlite3.Error, *garbage)
    try:
        yield
    except RecordsError:
        raise
    except sqlite3.OperationalError as error:  # a full or read-only disk, another writer, a missing table
        raise RecordsError(
            f"{path} cannot be used: {error}. What was recorded before is kept; when the cause is gone, "
            "the same command goes on"
        ) from error
    except unreadable as error:
        raise RecordsError(
            f"{path} cannot be read: {error}. It is damaged, or from a newer version of deepmemory; put a good copy "
            "in its place, or move it away and train again"
        ) from error


def patiently(act: Callable[[], Any], seconds: float = 60.0) -> None:
    """Try again while another process is in the way; SQLite's own patience does not cover every case."""
    until = time.monotonic() + seconds
    while True:
        try:
            act()
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def measures_in(series: Sequence[str]) -> list[str]:
    """What the test set is measured by, the loss among them: whatever validation is.

    >>> measures_in(["train_loss", "valid_loss", "valid_accuracy"])
    ['loss', 'accuracy']
    """
    return [name.removeprefix("valid_") for name in series if name.startswith("valid_")]


def first_under(losses: Sequence[float], thresholds: Sequence[float]) -> list[int | None]:
    """First epoch, from 1, whose loss is under each threshold."""
    return [next((e for e, loss in enumerate(losses, 1) if loss < threshold), None) for threshold in thresholds]


def by_name(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Each value under its name."""
    if len(names) != len(values):
        raise ValueError(f"{len(values)} values, where there should be one for each of {shown(names)}")
    return dict(zip(names, values, strict=True))


def pack(values: Sequence[float]) -> bytes:
    """Numbers as little-endian float32, NaN included."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(blob: bytes) -> tuple[float, ...]:
    """The reverse of :func:`pack`."""
    packed = array("f")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def pack_curves(curves: Mapping[str, Sequence[float]]) -> bytes:
    """All epochs of a run, exactly, in half the room: series by series, like bytes beside like bytes, deflated."""
    plain = pack([value for values in curves.values() for value in values])
    return zlib.compress(b"".join(plain[place::4] for place in range(4)), 9)


class Room:
    """What packed runs, however small they are packed, may come to in all."""

    def __init__(self, size: int = LARGEST_UNPACKED) -> None:
        self.left = size

    def inflate(self, blob: bytes) -> bytes:
        """What was deflated, where there is room for it."""
        contents, _ = inflate(blob, self.left)
        self.left -= len(contents)
        return contents


def unpack_curves(blob: bytes, series: Sequence[str], room: Room | None = None) -> dict[str, tuple[float, ...]]:
    """The reverse of :func:`pack_curves`."""
    sorted_bytes = (room or Room()).inflate(blob)
    count = len(sorted_bytes) // 4
    plain = bytearray(len(sorted_bytes))
    for place in range(4):
        plain[place::4] = sorted_bytes[place * count : (place + 1) * count]
    values, epochs = unpack(bytes(plain)), count // len(series)
    if not epochs or epochs * len(series) != count:
        raise ValueError(f"{count} packed values are no whole number of epochs of {len(series)} series")
    return {name: values[place * epochs : (place + 1) * epochs] for place, name in enumerate(series)}


def pack_watch(values: Mapping[str, Mapping[int, float]]) -> bytes:
    """What was watched of a run, by name and epoch, in a third of the room."""
    return zlib.compress(json.dumps(values).encode(), 9)


def unpack_watch(blob: bytes, room: Room | None = None) -> dict[str, dict[int, float]]:
    """The reverse of :func:`pack_watch`."""
    found = json.loads((room or Room()).inflate(blob))
    return {name: {int(epoch): float(value) for epoch, value in of.items()} for name, of in found.items()}


@contextmanager
def hold_lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """An exclusive lock that the system frees when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        raise RuntimeError("training needs file locks of the kind Linux and macOS have; on Windows use WSL") from None

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
                f"{path} cannot be written: {error.strerror or error}. When the cause is gone, the same command goes on"
            ) from error
        yield


def save_checkpoint(path: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    write_whole(path, checkpoint_bytes(tensors, info, path.parent.name))


def checkpoint_bytes(tensors: dict[str, Tensor], info: dict[str, Any], study: str) -> bytes:
    """A checkpoint as it is written; ``study`` is the folder it belongs in."""
    from safetensors.torch import save

    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    noted = {"info": json.dumps(info), "format": str(CHECKPOINT_FORMAT), "study": study}
    return save(stored, noted | {"sha256": checkpoint_digest(stored, noted)})


def checkpoint_digest(tensors: Mapping[str, Tensor], noted: Mapping[str, str]) -> str:
    """The sha256 of everything that a checkpoint says: the notes, and each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(json.dumps(noted, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in place whole or not at all, safe from a loss of power."""
    try:
        put(path, data, lasting=True)
    except OSError as error:
        raise RecordsError(
            f"{path} cannot be written: {error.strerror or error}. The one before it is kept; when there is room, "
            "the same command goes on from there"
        ) from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors on the CPU and what was noted beside them, as they were written; runs no code from the file."""
    from safetensors import SafetensorError

    try:
        tensors, info = read_checkpoint(path)
        check_checkpoint(tensors, info)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, RuntimeError, *GARBAGE) as error:
        raise unusable_checkpoint(path, error) from error
    return tensors, info


def unusable_checkpoint(path: Path | str, error: Exception) -> RecordsError:
    """What is wrong with a checkpoint, in one line, and what to do."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    reason = f"it notes no {first}" if isinstance(error, KeyError) else first
    return RecordsError(
        f"{path} is not a checkpoint that can be used here: {reason}. It was not loaded. "
        "Move it away, and its runs start again, but for those that have ended; the records stay as they are"
    )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file holds, if it is a checkpoint, of the study in whose folder it lies, and nothing in it was changed."""
    from safetensors import safe_open

    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > LARGEST_HEADER:
        raise ValueError(f"its header says {header} bytes, more than the {LARGEST_HEADER} that are read")
    with safe_open(path, framework="pt") as opened:
        noted = dict(opened.metadata() or {})
        if (version := noted.get("format")) != str(CHECKPOINT_FORMAT):
            raise ValueError(f"its format is {shown(version)}, this version reads format {CHECKPOINT_FORMAT}")
        if noted["study"] != path.parent.name and path.parent.parent.name == "checkpoints":
            raise ValueError(f"it belongs to the study {shown(noted['study'])}")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if noted.pop("sha256") != checkpoint_digest(tensors, noted):
        raise ValueError("its contents are not those that were written, by the sha256 it notes: it was changed since")
    return tensors, json.loads(noted["info"])


def shown(value: object) -> str:
    """Of a value from a file, as much as an error message should hold."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


Kind = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


def check_checkpoint(tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Whether a group of runs can be made of it: a list for each run, a row for each in the stack.

    Every tensor has the name, shape and type that follow from those of the best weights, and no other is there: what
    reads them, Adam among them, trusts that.
    """
    seeds, rows, epoch = info["seeds"], info["rows"], info["epoch"]
    runs = range(len(seeds))

    def whole(*numbers: Any) -> bool:
        return all(type(number) is int and 0 <= number < 2**63 for number in numbers)

    if not (seeds and whole(epoch, *seeds, *rows) and len(set(seeds)) == len(seeds)):
        raise ValueError(
            f"seeds, rows and epoch should be whole numbers, are {shown(seeds)}, {shown(rows)} and {shown(epoch)}"
        )
    if not (rows and sorted(set(rows)) == rows and rows[-1] in runs):
        raise ValueError(f"rows should name some of {len(seeds)} runs in their order, are {shown(rows)}")
    for name, valid in (
        ("state", lambda state: state in STATES),
        ("under", whole),
        ("best_epoch", lambda number: number is None or whole(number)),
    ):
        values = info[name]
        if not (isinstance(values, list) and len(values) == len(seeds) and all(map(valid, values))):
            raise ValueError(f"{name} should be a list of {len(seeds)}, is {shown(values)}")
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    expected: dict[str, Kind] = {"best_loss": ((len(seeds),), torch.float64)}
    for name, (shape, dtype) in found.items():
        if name.startswith("best."):
            if dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{shown(name)} should be of float32 or float64, is of {dtype}")
            own = name.removeprefix("best.")
            stack = (len(rows), *shape[1:]), dtype
            expected |= {name: ((len(seeds), *shape[1:]), dtype), f"weights.{own}": stack}
            expected |= {f"adam.{own}.{kind}": stack for kind in ("exp_avg", "exp_avg_sq")}
            expected[f"adam.{own}.step"] = (), torch.float32
    compare_tensors(found, expected)


def compare_tensors(found: Mapping[str, Kind], expected: Mapping[str, Kind]) -> None:
    """Raise with the first name whose tensor is not the one expected."""

    def words(kind: Kind | None) -> str:
        return "missing" if kind is None else f"{kind[0]} of {str(kind[1]).removeprefix('torch.')}"

    for name in sorted({*found, *expected}):
        if name not in expected:
            raise ValueError(f"{shown(name)} is {words(found[name])}, nothing of that name is expected")
        if found.get(name) != expected[name]:
            raise ValueError(f"{shown(name)} is {words(found.get(name))}, expected {words(expected[name])}")


def check_network(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, path: Path | str
) -> None:
    """Whether one run's weights, from a checkpoint at ``path``, are those of a network with these shapes."""
    found = {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
    try:
        compare_tensors(found, {name: (shape, dtype) for name, shape in shapes.items()})
    except ValueError as error:
        raise RecordsError(
            f"{path} is not of this network: {error}. It is of another study, or the data has changed since it was "
            "trained. It was not loaded; move it away, and its runs start again"
        ) from None


def best_weights(path: Path, seed: int) -> dict[str, Tensor]:
    """The state_dict of one run's best epoch, from a checkpoint of several runs."""
    tensors, info = load_checkpoint(path)
    if seed not in info["seeds"]:
        raise ValueError(f"{path} has no run with seed {seed}; it has {info['seeds']}")
    row = info["seeds"].index(seed)
    return {name.removeprefix("best."): t[row].clone() for name, t in tensors.items() if name.startswith("best.")}


# --- merging --------------------------------------------------------------------------------------


def merge(sources: Sequence[Path | str], out: Path | str) -> Records:
    """Join what several machines recorded into a new folder, in as little room as goes.

    The same run twice must tell the same story. Killed at any moment, it can be repeated: nothing counts as
    merged before the one transaction ends that writes all rows, and checkpoints come before its end.
    """
    with ExitStack() as held:
        opened = [held.enter_context(closing(Records(source))) for source in sources]
        studies, chosen = choose(opened)
        target = Path(out)
        taken = FileExistsError(f"{target} has records already; give --out a new folder")
        finished = not nothing_recorded(target / "records.sqlite")
        if finished and not is_merged(target, studies, chosen):
            raise taken
        merged = Records(target, write=True)
        try:
            if not finished:
                with merged.transaction():
                    if merged.db.execute("SELECT 1 FROM study").fetchone():  # of another process, just now
                        raise taken
                    _copy_chosen(merged, studies, chosen)
                    for records, study, run in chosen.values():
                        _copy_checkpoint(records, merged, study.setting, run.seed)
            with explained(merged.path):
                merged.db.execute("VACUUM")
        except BaseException:
            merged.close()
            raise
    return merged


Chosen = dict[tuple[str, int], tuple[Records, Study, Run]]  # by the key of a study and by seed


def choose(opened: Sequence[Records]) -> tuple[dict[str, Study], Chosen]:
    """Every study, and the record of each run that has come furthest."""
    studies, chosen = dict[str, Study](), Chosen()
    for records in opened:
        for study in records.studies():
            key = study.setting.key
            known = studies.setdefault(key, study)
            if (known.series, known.thresholds) != (study.series, study.thresholds):
                raise ValueError(f"study {key} has other series or thresholds in {records.out} than elsewhere")
            if study.setting.epochs > known.setting.epochs:
                studies[key] = study
            for run in study.runs:
                other = chosen.get((key, run.seed))
                if other is not None:
                    check_same_story(study, run, records.out, other[2], other[0].out)
                if other is None or progress(run) > progress(other[2]):
                    chosen[key, run.seed] = (records, study, run)
    return studies, chosen


def nothing_recorded(path: Path) -> bool:
    """Whether a file of records is not there, or as it was made: without a study."""
    if not path.exists():
        return True
    with explained(path), closing(connect(path, "ro")) as db:
        made = db.execute("PRAGMA user_version").fetchone()[0] > 0
        return not made or db.execute("SELECT count(*) FROM study").fetchone()[0] == 0


def is_merged(target: Path, studies: dict[str, Study], chosen: Chosen) -> bool:
    """Whether records are what a merge would write, as after one that was killed just before it could say so."""
    if target.resolve() in {records.out.resolve() for records, *_ in chosen.values()}:
        return False
    with closing(Records(target)) as merged:
        found = merged.studies()
    settings = {study.setting.key: study.setting for study in found}
    stories = {(study.setting.key, run.seed): story(run) for study in found for run in study.runs}
    return settings == {key: study.setting for key, study in studies.items()} and stories == {
        which: story(run) for which, (_, _, run) in chosen.items()
    }


def story(run: Run) -> tuple[Any, ...]:
    """What is recorded of a run but for times; numbers as bits, so that nan equals nan."""
    test = None if run.test is None else pack(list(run.test.values()))
    return run.state, run.first_under, run.best_epoch, test, *map(pack, run.curves.values()), run.epochs


def progress(run: Run) -> tuple[int, bool]:
    """How far a run has come."""
    return run.epochs, run.test is not None


def check_same_story(study: Study, run: Run, where: Path, other: Run, elsewhere: Path) -> None:
    """Two records of one run may differ in how far they got, in nothing else."""
    for epoch in range(1, min(run.epochs, other.epochs) + 1):
        mine, theirs = run.at_epoch(epoch), other.at_epoch(epoch)
        if pack(list(mine.values())) != pack(list(theirs.values())):
            raise ValueError(
                f"{study.setting.task}, {study.setting.cell}, seed {run.seed}: {where} and {elsewhere} differ at epoch "
                f"{epoch}: {mine} and {theirs}. The same seed was trained twice with different results; "
                "delete one of the two, or train with other seeds (--seed)"
            )
    if run.epochs == other.epochs and None not in (run.test, other.test) and run.test != other.test:
        raise ValueError(
            f"{study.setting.task}, {study.setting.cell}, seed {run.seed}: {where} and {elsewhere} differ in the test: "
            f"{run.test} and {other.test}"
        )


def _copy_chosen(merged: Records, studies: dict[str, Study], chosen: Chosen) -> None:
    sessions: dict[tuple[Path, int], int] = {}
    watched: dict[tuple[Path, str], dict[int, dict[str, dict[int, float]]]] = {}
    ids = {
        key: merged._insert(
            "study",
            key=key,
            settings=study.setting.to_json(),
            series=json.dumps(study.series),
            thresholds=json.dumps(study.thresholds),
        )
        for key, study in studies.items()
    }
    for (key, seed), (records, _, run) in sorted(chosen.items(), key=lambda item: item[0]):
        origin = (records.out, run.session)
        if origin not in sessions:
            row = records.db.execute(
                "SELECT started, machine, git FROM session WHERE id = ?", (run.session,)
            ).fetchone()
            sessions[origin] = merged._insert("session", started=row[0], machine=row[1], git=row[2])
        run_id = merged._insert(
            "run",
            study=ids[key],
            seed=seed,
            state=run.state,
            first_under=json.dumps(run.first_under),
            best_epoch=run.best_epoch,
            test=None if run.test is None else pack(list(run.test.values())),
            seconds=run.seconds,
            session=sessions[origin],
        )
        if run.epochs:
            merged._insert("packed", run=run_id, **{'"values"': pack_curves(run.curves)})
        if (records.out, key) not in watched:
            watched[records.out, key] = records.watched(key)
        if values := watched[records.out, key].get(seed):
            merged._insert("packed_watch", run=run_id, **{'"values"': pack_watch(values)})


def _copy_checkpoint(records: Records, merged: Records, setting: Setting, seed: int) -> None:
    """Bring along the file that holds this run, so that the study can go on from the merged folder."""
    for path in sorted(records.checkpoint_folder(setting).glob("*.safetensors")):
        target = merged.checkpoint_folder(setting) / path.name
        if seed in load_checkpoint(path)[1]["seeds"] and not target.exists():
            write_whole(target, path.read_bytes())
            shutil.copystat(path, target)


# --- provenance -----------------------------------------------------------------------------------


def provenance(device: str, engine: str) -> dict[str, str | None]:
    """What computes here, with which versions, from which commit."""
    return {"device": device, "engine": engine, **versions(), "git": git_commit()}


def versions() -> dict[str, str]:
    """Of everything that may change a number."""
    try:
        own = metadata.version("deepmemory")
    except metadata.PackageNotFoundError:
        own = "not installed"
    found = {"deepmemory": own, "python": platform.python_version(), "torch": torch.__version__}
    found["engines"] = " ".join(name for name, engine in dm.engines().items() if engine.available)
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def git_commit() -> str | None:
    """Commit of the code that runs, marked + if it was changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(("git", *args), cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parents[1])).strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    """This moment, UTC."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
