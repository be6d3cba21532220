"""Fills the tables of docs/use-cases.md from the results: ``python benchmarks/use_cases.py``.

Each table is between two marks, ``<!-- its name -->`` and ``<!-- end -->``.
"""

import json
import re
from pathlib import Path

import recurrent_ppo
import resets
import t_maze

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "use-cases.md"
MACHINES = {"resets_cpu": "one CPU thread", "resets_h200": "H200"}


def read(*names: str) -> dict[str, dict]:
    """The results that have been measured, by name."""
    paths = {name: ROOT / "benchmarks" / "results" / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def tables() -> dict[str, str]:
    """The tables, by the mark before them."""
    found = {}
    if costs := read(*MACHINES):
        found["resets"] = resets.table({MACHINES[name]: result for name, result in costs.items()})
    modules = {"recurrent_ppo": recurrent_ppo, "t_maze": t_maze}
    return found | {name: modules[name].table(result) for name, result in read(*modules).items()}


def filled(page: str) -> str:
    """A page with its tables replaced."""
    for name, table in tables().items():
        mark = f"<!-- {name} -->\n"
        assert mark in page, name
        page = re.sub(
            re.escape(mark) + r".*?<!-- end -->", lambda _, t=mark + table: t + "<!-- end -->", page, flags=re.S
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
