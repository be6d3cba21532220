"""The database of an output folder: studies, runs, epochs and measures in SQLite, safe from crashes.

Everything is in one folder::

    records.sqlite                     all numbers; reports need nothing else
    checkpoints/STUDY/runs-0.safetensors   weights and optimiser state, to resume from
    locks/STUDY.lock                   held by the process that trains the study

An epoch is written to the database first and to the checkpoint after it, so a process killed in
between repeats that epoch and writes the same numbers again.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from deepmemory.lab.records.errors import MALFORMED, RecordsError, shown
from deepmemory.lab.records.locks import hold_lock
from deepmemory.lab.records.packing import UnpackingLimit, by_name, pack, unpack, unpack_curves, unpack_watch
from deepmemory.lab.records.provenance import now, provenance
from deepmemory.lab.records.sqlite_files import check_tables, connect, explained, lacks_its_log, retry_while_locked
from deepmemory.lab.settings import THRESHOLDS, Setting, setting_from_json
from deepmemory.lab.writing import without_links

SCHEMA_VERSION = 4
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
    test BLOB,                     -- float32: loss and measures of the best weights
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
CREATE TABLE packed (
    run INTEGER PRIMARY KEY REFERENCES run,
    "values" BLOB NOT NULL         -- all epochs of a merged run, in place of its rows in epoch; see pack_curves
);
CREATE TABLE watch (
    run INTEGER NOT NULL REFERENCES run,
    epoch INTEGER NOT NULL,        -- 0 is before the first
    name TEXT NOT NULL,            -- MODULE.LAYER.WHAT; see inspection.watch
    value REAL,                    -- null where it is nan
    PRIMARY KEY (run, epoch, name)
) WITHOUT ROWID;
CREATE TABLE packed_watch (
    run INTEGER PRIMARY KEY REFERENCES run,
    "values" BLOB NOT NULL         -- all that was watched of a merged run, in place of its rows; see pack_watch
)
"""

STATES = RUNNING, REACHED, SPENT, DIVERGED = "running", "reached", "spent", "diverged"  # of a run


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

    @property
    def numbers(self) -> range:
        """The numbers of the epochs that are recorded, from 1."""
        return range(1, self.epochs + 1)

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


class Records:
    """The database of one output folder. Every change is one transaction; reading changes nothing on disk."""

    def __init__(self, out: Path | str, write: bool = False) -> None:
        self.out = Path(out)
        self.path = path = self.out / "records.sqlite"
        if not write and not path.exists():
            raise FileNotFoundError(
                f"no records in {self.out}: {path.name} is not there; train first, or name another folder with --out"
            )
        if write:
            without_links(self.out, path.name)
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RecordsError(f"--out {self.out} is not a folder that can be written to ({error})") from None
        self.write = False  # until the file is known to have our format
        if lacks_its_log(path):
            print(
                f"warning: {path} was copied while a command was writing to it, or after one was killed, but "
                f"{path.name}-wal was not. The newest numbers may be missing; copy both files",
                file=sys.stderr,
            )
        with explained(path):
            self.db = connect(path, "rwc" if write else "ro")
        try:
            with explained(path):
                check_tables(self.db, path)
                version = self.db.execute("PRAGMA user_version").fetchone()[0]
                self.write = write and version in (0, SCHEMA_VERSION)
                if self.write:
                    self._prepare()
                    version = SCHEMA_VERSION
            if version != SCHEMA_VERSION:
                raise ValueError(
                    f"{path} has format {version}, this version reads format {SCHEMA_VERSION}; use the version of "
                    "deepmemory that wrote it, or another --out"
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and leave a single file that can be copied."""
        if self.write:
            self.db.execute("PRAGMA busy_timeout=0")
            for pause in (0, os.getpid() % 97 / 1000):  # two that close at once block each other, but only once
                time.sleep(pause)
                with suppress(sqlite3.Error):  # another process is writing and will do it, or the file is damaged
                    self.db.execute("PRAGMA journal_mode=DELETE")
                    break
        self.db.close()

    def _prepare(self) -> None:
        """Allow readers beside one writer, survive power failures, and create missing tables."""
        retry_while_locked(lambda: self.db.execute("PRAGMA journal_mode=WAL"))
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=1")  # after every commit: a copy of the file alone lacks little
        with self.transaction():
            if self.db.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in SCHEMA.split(";\n"):
                    self.db.execute(statement)
            self.db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")  # always: see lacks_its_log

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: all of it is written or nothing, even if the process dies or the disk is full."""
        with explained(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite may have rolled back already
                    self.db.execute("ROLLBACK")
                raise

    def open_study(self, setting: Setting, series: Sequence[str]) -> int:
        """The id of the study of these settings, created if it is new; it keeps the larger number of epochs."""
        with self.transaction():
            row = self.db.execute("SELECT id, settings FROM study WHERE key = ?", (setting.key,)).fetchone()
            if row is None:
                return self.insert(
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
        """The id of a new session, for what this machine computes from now on."""
        return self.add_session(provenance(device, engine))

    def add_session(self, machine: Mapping[str, str | None]) -> int:
        """The id of a new session on a machine with this ``provenance``."""
        described = dict(machine)
        git = described.pop("git")
        with self.transaction():
            return self.insert("session", started=now(), machine=json.dumps(described), git=git)

    def begin(self, study: int, seeds: Sequence[int], epoch: int, session: int) -> None:
        """Let runs start or resume after ``epoch``; later epochs are deleted and will be computed again."""
        with self.transaction():
            for seed in seeds:
                run = self._run_id(study, seed)
                if run is None:
                    never = json.dumps([None] * len(self._series_and_thresholds(study)[1]))
                    self.insert(
                        "run", study=study, seed=seed, state=RUNNING, first_under=never, seconds=0.0, session=session
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
        """Record one epoch of a group of runs: by seed, the value of each series, the state and the best epoch."""
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
        """Record what ``--watch`` measured after an epoch: by name, one number for each of the seeds."""
        with self.transaction():
            for place, seed in enumerate(seeds):
                run = self._run_id(study, seed)
                rows = [(run, epoch, name, of_runs[place]) for name, of_runs in values.items()]
                self.db.executemany("INSERT OR REPLACE INTO watch VALUES (?, ?, ?, ?)", rows)

    def write_end(self, study: int, states: Mapping[int, str], tests: Mapping[int, Mapping[str, float] | None]) -> None:
        """Record the end of a group: states of its runs, and test loss and measures of their best weights."""
        with self.transaction():
            measures = measures_in(self._series_and_thresholds(study)[0])
            for seed, state in states.items():
                test = tests[seed]
                self.db.execute(
                    "UPDATE run SET state = ?, test = ? WHERE study = ? AND seed = ?",
                    (state, None if test is None else pack([test[name] for name in measures]), study, seed),
                )

    def insert(self, table: str, **columns: Any) -> int:
        """Insert a row, inside a transaction, and return its id."""
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
        """Unpack the epochs of a merged run that resumes into rows."""
        series, _ = self._series_and_thresholds(study)
        for (blob,) in self.db.execute('SELECT "values" FROM packed WHERE run = ?', (run,)).fetchall():
            rows = zip(*unpack_curves(blob, series).values(), strict=True)
            self.db.executemany(
                "INSERT OR REPLACE INTO epoch VALUES (?, ?, ?)",
                [(run, epoch, pack(values)) for epoch, values in enumerate(rows, 1)],
            )
            self.db.execute("DELETE FROM packed WHERE run = ?", (run,))

    def _unpack_watch(self, run: int) -> None:
        """Unpack what ``--watch`` measured in a merged run that resumes into rows."""
        for (blob,) in self.db.execute('SELECT "values" FROM packed_watch WHERE run = ?', (run,)).fetchall():
            rows = [(run, epoch, name, value) for name, of in unpack_watch(blob).items() for epoch, value in of.items()]
            self.db.executemany("INSERT OR REPLACE INTO watch VALUES (?, ?, ?, ?)", rows)
            self.db.execute("DELETE FROM packed_watch WHERE run = ?", (run,))

    def studies(self) -> list[Study]:
        """All studies in the order in which they were begun, their runs by seed."""
        with explained(self.path, MALFORMED):
            self.db.execute("BEGIN")  # a consistent snapshot, even while another process writes
            limit = UnpackingLimit()
            try:
                keys = [key for (key,) in self.db.execute("SELECT key FROM study ORDER BY id")]
                return [study for key in keys if (study := self._study(key, limit)) is not None]
            finally:
                self.db.execute("COMMIT")

    def study(self, key: str) -> Study | None:
        """One study by the key of its settings."""
        with explained(self.path, MALFORMED):
            return self._study(key, UnpackingLimit())

    def _study(self, key: str, limit: UnpackingLimit) -> Study | None:
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
        for run, blob in self.db.execute(
            'SELECT run, "values" FROM packed JOIN run ON run.id = packed.run WHERE study = ?', (study,)
        ):
            curves[run] = unpack_curves(blob, series, limit)
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
        """What ``--watch`` measured in a study: by seed, by name, by epoch."""
        found: dict[int, dict[str, dict[int, float]]] = {}
        limit = UnpackingLimit()
        with explained(self.path, MALFORMED):
            for seed, name, epoch, value in self.db.execute(
                "SELECT seed, name, epoch, value FROM watch JOIN run ON run.id = watch.run "
                "JOIN study ON study.id = run.study WHERE key = ? ORDER BY seed, epoch, name",
                (key,),
            ):
                of_name = found.setdefault(seed, {}).setdefault(str(name), {})
                of_name[int(epoch)] = math.nan if value is None else float(value)
            for seed, blob in self.db.execute(
                'SELECT seed, "values" FROM packed_watch JOIN run ON run.id = packed_watch.run '
                "JOIN study ON study.id = run.study WHERE key = ? ORDER BY seed",
                (key,),
            ):
                found[seed] = unpack_watch(blob, limit)
        return found

    def sessions(self) -> dict[int, dict[str, Any]]:
        """Machine, versions and commit of every session."""
        with explained(self.path, MALFORMED):
            rows = self.db.execute("SELECT id, started, machine, git FROM session ORDER BY id")
            found = {
                key: {"started": started, **json.loads(machine), "git": git} for key, started, machine, git in rows
            }
            for session in found.values():
                texts = all(isinstance(value, str) for name, value in session.items() if name != "git" or value)
                if not texts or "device" not in session:
                    raise ValueError(f"a session should describe a machine in strings, got {shown(session)}")
            return found

    def checkpoint_folder(self, setting: Setting) -> Path:
        """The folder of a study's checkpoints."""
        return without_links(self.out, "checkpoints", f"{setting.task}-{setting.cell}-{setting.key}")

    def lock(self, setting: Setting, say: Callable[[str], None] = print) -> Any:
        """Lock a study for this process; if another process trains it, say so and wait."""
        name = f"{setting.task}-{setting.cell}-{setting.key}.lock"
        return hold_lock(without_links(self.out, "locks", name), say)


def check_study(study: Study, sessions: Container[int]) -> None:
    """Raise on values that the lab does not write: SQLite and JSON accept any type in any place."""

    def numbers(*values: Any) -> bool:
        return all(type(value) in (int, float) and math.isfinite(value) for value in values)

    def epochs(*values: Any) -> bool:
        return all(value is None or (type(value) is int and value > 0) for value in values)

    names = set(study.series)
    if not ({"train_loss", "valid_loss"} <= names and len(names) == len(study.series) and numbers(*study.thresholds)):
        raise ValueError(f"series and thresholds are not valid: {shown(study.series)} and {shown(study.thresholds)}")
    for run in study.runs:
        if not (
            type(run.seed) is int
            and run.state in STATES
            and len(run.first_under) == len(study.thresholds)
            and epochs(*run.first_under, run.best_epoch)
            and numbers(run.seconds)
            and run.session in sessions
        ):
            raise ValueError(f"the row of seed {shown(run.seed)} of {study.setting.task} is not a valid run")


def measures_in(series: Sequence[str]) -> list[str]:
    """The names of the test set's loss and measures, which are those of validation.

    >>> measures_in(["train_loss", "valid_loss", "valid_accuracy"])
    ['loss', 'accuracy']
    """
    return [name.removeprefix("valid_") for name in series if name.startswith("valid_")]


def first_under(losses: Sequence[float], thresholds: Sequence[float]) -> list[int | None]:
    """The first epoch, from 1, whose loss is below each threshold."""
    return [next((e for e, loss in enumerate(losses, 1) if loss < threshold), None) for threshold in thresholds]
