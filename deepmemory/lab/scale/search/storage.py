"""Optuna's storage: SQLite under the output folder, or a database that several machines share."""

from __future__ import annotations

import re
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import optuna
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from deepmemory.lab.records import MALFORMED, check_tables
from deepmemory.lab.writing import without_links

HEARTBEAT = 10  # seconds between a worker's heartbeats
SILENCE = 60  # seconds without a heartbeat until a worker counts as dead


def default_storage(out: Path | str) -> str:
    """The address of the SQLite file under the output folder."""
    return f"sqlite:///{without_links(Path(out), 'sweeps.sqlite').absolute()}"


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open Optuna's storage, with a heartbeat from every worker; several workers may create it at the same time."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    check_storage(url)
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    template = url.replace("{", "{{").replace("}", "}}")  # Optuna formats the address
    for attempt in range(5):
        try:
            with experimental():
                return optuna.storages.RDBStorage(
                    template, engine_kwargs=options, heartbeat_interval=HEARTBEAT, grace_period=SILENCE
                )
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ValueError(
                f"--storage {without_password(url)} cannot be used ({error}); expected "
                "postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE, and pip install 'deepmemory[search]'"
            ) from None
        except SQLAlchemyError as error:  # another worker is creating the tables, or the server does not respond
            if attempt == 4:
                raise ValueError(f"{without_password(url)} cannot be opened: {str(error).splitlines()[0]}") from None
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


def check_storage(url: str) -> None:
    """Refuse an SQLite file with triggers or views, which run code when read or written, before Optuna opens it."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and path.is_file():
        opened = closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True))
        with suppress(sqlite3.DatabaseError), opened as db:  # Optuna reports a file that is not a database
            check_tables(db, path)


def take_turns(storage: optuna.storages.RDBStorage) -> optuna.storages.RDBStorage:
    """Make SQLite lock when a transaction begins, so that no two workers take the same trial.

    Python's driver begins a transaction only after the first read, when both have seen the trial in the queue. Other
    databases lock the rows that Optuna reads.
    """
    if storage.engine.dialect.name == "sqlite":
        storage.engine.dispose()  # connections made so far
        event.listen(storage.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def searches_in(storage: str) -> list[optuna.Study]:
    """Read all searches of a storage."""
    opened = open_storage(storage)
    try:
        names = optuna.get_all_study_names(storage=opened)
        studies = [optuna.load_study(study_name=name, storage=opened) for name in names]
        for study in studies:
            study.get_trials(deepcopy=False)
        return studies
    except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError, AssertionError, *MALFORMED) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the searches in {without_password(storage)} cannot be read: {said}") from error


@contextmanager
def named_failures() -> Iterator[None]:
    """Turn an error of the storage into one line that says so."""
    try:
        yield
    except Exception as error:
        if (said := storage_failure(error)) is None:
            raise
        raise ValueError(
            f"the search's storage cannot be used: {said}. When the cause is gone, run the same command to resume"
        ) from error


def storage_failure(error: BaseException | None) -> str | None:
    """The database's own message if it caused an error, also if Optuna raised another one because of it; else None."""
    while error is not None and not isinstance(error, (optuna.exceptions.StorageInternalError, SQLAlchemyError)):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if error is None else str(error).splitlines()[0]


def without_password(url: str) -> str:
    """The address of a database with its password hidden."""
    return re.sub(r"(?<=://)([^:/@]*):[^@]*@", r"\1:***@", url)


@contextmanager
def experimental() -> Iterator[None]:
    """Silence Optuna's warning that heartbeats are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
