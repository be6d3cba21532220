"""The records of studies on disk: database, checkpoints, merging, provenance."""

from deepmemory.lab.records.checkpoints import (
    best_weights,
    check_network,
    checkpoint_bytes,
    load_checkpoint,
    save_checkpoint,
    write_whole,
)
from deepmemory.lab.records.database import (
    DIVERGED,
    REACHED,
    RUNNING,
    SPENT,
    STATES,
    Records,
    Run,
    Study,
    first_under,
    measures_in,
)
from deepmemory.lab.records.errors import MALFORMED, RecordsError
from deepmemory.lab.records.locks import hold_lock
from deepmemory.lab.records.merging import comparable, merge
from deepmemory.lab.records.provenance import git_commit, now, provenance, versions
from deepmemory.lab.records.sqlite_files import check_tables

__all__ = [
    "DIVERGED",
    "MALFORMED",
    "REACHED",
    "RUNNING",
    "SPENT",
    "STATES",
    "Records",
    "RecordsError",
    "Run",
    "Study",
    "best_weights",
    "check_network",
    "check_tables",
    "checkpoint_bytes",
    "comparable",
    "first_under",
    "git_commit",
    "hold_lock",
    "load_checkpoint",
    "measures_in",
    "merge",
    "now",
    "provenance",
    "save_checkpoint",
    "versions",
    "write_whole",
]
