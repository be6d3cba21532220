"""What the commands do, once the command line has been read."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmemory.lab import paper as published
from deepmemory.lab import records
from deepmemory.lab.progress import choose_display
from deepmemory.lab.settings import CELLS, OWNERS, TASKS, Machine, Setting, change, check_choice
from deepmemory.lab.tracking import open_tracker

if TYPE_CHECKING:
    from deepmemory.lab.data.inventory import Finding


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
    """Write pages and figures and say what they say."""
    from deepmemory.lab.report import write_report
    from deepmemory.lab.report.text import print_report

    written = write_report(out, to)
    if as_json:
        places = {"page": str(written.page), "markdown": str(written.markdown)}
        print(json.dumps({"event": "report", **places, "pictures": written.as_data()}))
    else:
        print_report([picture for picture in written.pictures if picture.task in tasks])
        print(f"page: {written.page.resolve()}")


def merge(sources: Sequence[Path], out: Path) -> None:
    """Join folders."""
    merged = records.merge(sources, out)
    studies = merged.studies()
    merged.close()
    print(f"{out}: {len(studies)} studies, {sum(len(study.runs) for study in studies)} runs")


def data_list(data: Path | None, as_json: bool) -> None:
    """Say what data there is and where it lies."""
    from dataclasses import asdict

    from deepmemory.lab.data import inventory

    for entry in inventory.chosen(None):
        place = inventory.where(entry, data)
        print(json.dumps({**asdict(entry), "where": place}) if as_json else inventory.describe(entry, data) + "\n")


def data_fetch(names: list[str] | None, data: Path | None, as_json: bool) -> None:
    """Bring what is not here into the user's cache; what fails does not keep the rest back."""
    from deepmemory.lab.data import inventory
    from deepmemory.lab.data.fetching import fetch_missing

    failed = 0
    try:
        for entry in inventory.chosen(names):
            for finding in fetch_missing(entry, data, bar=not as_json):
                tell_finding(finding, as_json)
                failed += finding.state == "failed"
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    if failed:
        sys.exit(1)


def data_check(names: list[str] | None, data: Path | None, as_json: bool) -> None:
    """Read and count everything that is here; what is missing counts as a fault only if it was named."""
    from deepmemory.lab.data import inventory

    findings = [inventory.check(entry, data) for entry in inventory.chosen(names)]
    for finding in findings:
        tell_finding(finding, as_json)
    if any(f.state == "damaged" or (names and f.state == "missing") for f in findings):
        sys.exit(1)


def tell_finding(finding: Finding, as_json: bool) -> None:
    """One line on one dataset or file."""
    if as_json:
        print(json.dumps({"event": "data", "name": finding.name, "state": finding.state, "text": finding.text}))
    else:
        print(f"{finding.name}: {finding.state}; {finding.text}")


def bench(
    device: str,
    shapes: str | None,
    precisions: str,
    cells: str,
    seconds: float,
    growth: bool,
    loop: bool,
    out: Path,
) -> None:
    """Time our engines and their peers, and leave numbers, picture and table in ``out``."""
    import torch

    from deepmemory.lab import bench as timing

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("device", device, ("cpu", "cuda"))
    everything = timing.GPU_SHAPES if device == "cuda" else timing.CPU_SHAPES
    names = split(shapes) if shapes else list(everything)
    for name in names:
        check_choice("shape", name, tuple(timing.SHAPES))
    modes = [check_choice("precision", name, timing.PRECISIONS) for name in split(precisions)]
    layers = [check_choice("cell", name.lower(), CELLS).upper() for name in split(cells)]
    file = out / f"bench-{device}.json"
    result = timing.bench(device, names, modes, layers, seconds, growth, loop, file)
    timing.draw(result, file.with_suffix(".svg"))
    print(timing.speed_table(result, modes[0]))
    print(f"numbers: {file}\npicture: {file.with_suffix('.svg')}")


def split(names: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in names.split(",")]


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
