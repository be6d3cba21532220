"""Hyperparameter search with Optuna: random, grid or TPE, with bad trials stopped early.

A trial is a setting with one or several seeds, trained by :mod:`deepmemory.lab.training.studies` like any
other study, so it resumes from its checkpoint. Trials are recorded in SQLite under the output folder, or in any
database that Optuna can use: then every machine that runs the same command takes part in the same search.

Read :func:`deepmemory.lab.scale.search.run.run_search` first.
"""

from __future__ import annotations

try:
    import optuna  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError("the search needs Optuna: pip install 'deepmemory[search]'") from None

from deepmemory.lab.scale.search.results import short, table, write_page
from deepmemory.lab.scale.search.run import open_search, run_search
from deepmemory.lab.scale.search.space import SPACES, Range, Space, parse_space
from deepmemory.lab.scale.search.storage import default_storage, open_storage, searches_in
from deepmemory.lab.scale.search.trials import failed_trials

__all__ = [
    "SPACES",
    "Range",
    "Space",
    "default_storage",
    "failed_trials",
    "open_search",
    "open_storage",
    "parse_space",
    "run_search",
    "searches_in",
    "short",
    "table",
    "write_page",
]
