"""What the commands do, once the command line has been read."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmemory.lab import paper as published
from deepmemory.lab import records
from deepmemory.lab.progress import choose_display
from deepmemory.lab.settings import CELLS, OWNERS, TASKS, Machine, Setting, change, check_choice
from deepmemory.lab.tracking import open_tracker


def guard(app: Callable[[], Any]) -> None:
    """Run the command line; a mistake gets one line that says what is wrong."""
    try:
        app()
    except (ValueError, ModuleNotFoundError, FileNotFoundError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def machine(device: str, engine: str, graph: bool, threads: int) -> Machine:
    """Where to compute; an engine that does not exist is refused before anything is made."""
    import deepmemory as dm

    check_choice("engine", engine, ("auto", *dm.engines()))
    return Machine(device, engine, graph, threads)


def paper(
    tasks: Sequence[str] | None,
    cells: str,
    changes: Mapping[str, Any],
    assignments: Sequence[str] | None,
    runs: int,
    seed: int,
    machine: Machine,
    out: Path,
    tracker: str,
    as_json: bool,
) -> None:
    """Train the paper's settings, write the report and print it."""
    chosen_tasks = [check_choice("task", task, TASKS) for task in tasks or TASKS]
    chosen_cells = [check_choice("cell", cell.strip().lower(), CELLS) for cell in cells.split(",")]
    given = {name: value for name, value in changes.items() if value is not None} | parse_assignments(assignments)
    settings = []
    for setting in published.settings(chosen_tasks, chosen_cells):
        settings.append(change(setting, {k: v for k, v in given.items() if concerns(k, setting)}))
    carry_out(settings, runs, seed, machine, out, tracker, as_json)
    report(out, None, as_json, tasks=chosen_tasks)


def train(
    task: str,
    cell: str,
    changes: Mapping[str, Any],
    runs: int,
    seed: int,
    machine: Machine,
    out: Path,
    tracker: str,
    as_json: bool,
) -> None:
    """Train one setting and print what came out."""
    given = {name: value for name, value in changes.items() if value is not None}
    setting = change(published.setting(task, cell), given)
    carry_out([setting], runs, seed, machine, out, tracker, as_json)
    if not as_json:
        print(f"recorded in {out}; for the page: dmu report --out {out}")


def report(out: Path, to: Path | None, as_json: bool, tasks: Sequence[str] = TASKS) -> None:
    """Write page and figures and say what they say."""
    from deepmemory.lab.report import write_report
    from deepmemory.lab.report.text import print_report

    written = write_report(out, to)
    if as_json:
        print(json.dumps({"event": "report", "page": str(written.page), "pictures": written.as_data()}))
    else:
        print_report([picture for picture in written.pictures if picture.task in tasks])
        print(f"page: {written.page.resolve()}")


def merge(sources: Sequence[Path], out: Path) -> None:
    """Join folders."""
    merged = records.merge(sources, out)
    studies = merged.studies()
    merged.close()
    print(f"{out}: {len(studies)} studies, {sum(len(study.runs) for study in studies)} runs")


def carry_out(
    settings: Sequence[Setting], runs: int, seed: int, machine: Machine, out: Path, tracker: str, as_json: bool
) -> None:
    """Train with a display that fits the output."""
    from deepmemory.lab.studies import run_studies

    track = open_tracker(tracker, out)
    display = choose_display(as_json)
    try:
        run_studies(settings, range(seed, seed + runs), out, machine, display, track)
    except KeyboardInterrupt:
        display.close()
        again = " ".join(["dmu", *(shlex.quote(argument) for argument in sys.argv[1:])])
        print(f"\nstopped; every finished epoch is saved. To go on: {again}", file=sys.stderr)
        sys.exit(130)
    finally:
        display.close()


def concerns(name: str, setting: Setting) -> bool:
    """A change to what belongs to one cell or task leaves the others as they are."""
    if name not in OWNERS:
        return True
    owner, value = OWNERS[name]
    return bool(getattr(setting, owner) == value)


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE, several times."""
    parsed = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, got {assignment!r}")
        parsed[name.strip().replace("-", "_")] = value
    return parsed
