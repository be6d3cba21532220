"""The verbs about public data: ``dmu data list``, ``fetch`` and ``check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deepmemory.lab.cli.options import AsJson, DataFolder, tell
from deepmemory.lab.settings import Setting

if TYPE_CHECKING:
    from deepmemory.lab.data.inventory import Finding

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="datasets; default: all")]


def list_(data: DataFolder = None, as_json: AsJson = False) -> None:
    """List the datasets with contents, licence and local copies; --json includes the full addresses."""
    from deepmemory.lab.data import inventory

    for entry in inventory.chosen(None):
        place = inventory.where(entry, data)
        tell(as_json, {**asdict(entry), "where": place}, inventory.describe(entry, data) + "\n")


def fetch(names: Names = None, data: DataFolder = None, as_json: AsJson = False) -> None:
    """Download missing datasets into the user's cache and check them. Interrupted downloads resume."""
    from deepmemory.lab.data import inventory
    from deepmemory.lab.data.fetching import fetch_missing

    failed = False
    for entry in inventory.chosen(names):
        for finding in fetch_missing(entry, data, bar=not as_json):
            tell_finding(finding, as_json)
            failed |= finding.state == "failed"
    if failed:
        sys.exit(1)


def check(names: Names = None, data: DataFolder = None, as_json: AsJson = False) -> None:
    """Read the datasets as the tasks do, and compare hashes and counts with the registry.

    The exit code is 1 if a dataset is missing or damaged.
    """
    from deepmemory.lab.data import inventory

    findings = [inventory.check(entry, data) for entry in inventory.chosen(names)]
    for finding in findings:
        tell_finding(finding, as_json)
    if any(finding.state in ("missing", "damaged") for finding in findings):
        sys.exit(1)


def with_data(settings: Sequence[Setting], data: str | None) -> list[Setting]:
    """Return the settings whose data is available; print what is left out, and raise if nothing remains."""
    from deepmemory.lab.data import inventory
    from deepmemory.lab.data.registry import dataset
    from deepmemory.lab.tasks import data_of

    needed = {setting: data_of(setting) for setting in settings}
    missing = {name for name in needed.values() if name and not inventory.where(dataset(name), data)}
    available = [setting for setting, name in needed.items() if name not in missing]
    for name in sorted(missing):
        print(f"left out: the dataset {name} is not available; fetch it with: dmu data fetch {name}", file=sys.stderr)
    if not available:
        raise FileNotFoundError("nothing left to train; fetch the data, or name its folder with --data")
    return available


def tell_finding(finding: Finding, as_json: bool) -> None:
    """Print one line about a dataset or file."""
    event = {"event": "data", "name": finding.name, "state": finding.state, "text": finding.text}
    tell(as_json, event, f"{finding.name}: {finding.state}; {finding.text}")
