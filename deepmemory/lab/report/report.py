"""Writes the report on a folder of records: one HTML page, a Markdown page for each part, and the figures."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmemory.lab.bench import loop_time
from deepmemory.lab.beyond import experiment_of
from deepmemory.lab.records import Records
from deepmemory.lab.report import figures, words
from deepmemory.lab.report.blocks import Page
from deepmemory.lab.report.render import html, markdown
from deepmemory.lab.report.results.beyond import beyond_results
from deepmemory.lab.report.results.gradients import gradient_results
from deepmemory.lab.report.results.synthetic import synthetic_results
from deepmemory.lab.report.results.table_claims import table_verdicts, tasks_of
from deepmemory.lab.report.results.tables import real_results
from deepmemory.lab.report.sections.beyond import beyond_page
from deepmemory.lab.report.sections.gradients import gradients_page
from deepmemory.lab.report.sections.real import real_page
from deepmemory.lab.report.sections.synthetic import synthetic_page
from deepmemory.lab.settings import CELLS, PAPER_TASKS, Setting
from deepmemory.lab.writing import put, without_links

TITLE = "Deep Memory Update: the paper and this reproduction"
SEARCHES = "sweeps.html"  # a page of its own, written before this one


@dataclass(frozen=True)
class Report:
    """What the records say, as pages and as plain data."""

    pages: list[Page]
    data: list[dict[str, Any]]  # one entry for each task of the paper and each experiment beyond it


@dataclass(frozen=True)
class WrittenReport(Report):
    """A report and the files it was written to."""

    page: Path  # HTML, with everything in it
    markdown: Path  # the first of the Markdown pages
    files: list[Path]  # of the figures


def make_report(out: Path | str, command: str) -> Report:
    """Read the records under ``out``; ``command`` is what the pages name as their origin."""
    records = Records(out)
    try:
        studies, sessions = records.studies(), records.sessions()
        observations = {study.setting.key: records.watched(study.setting.key) for study in studies}
    finally:
        records.close()
    of_paper = [study for study in studies if in_paper(study.setting) and experiment_of(study.setting) is None]
    synthetic, real = synthetic_results(of_paper), real_results(of_paper)
    observed = gradient_results([study for study in studies if in_paper(study.setting)], observations)
    further = beyond_results(studies)
    if not synthetic and not real and not further:
        if any(run.epochs for study in studies for run in study.runs):
            tasks = words.listed(sorted({study.setting.task for study in studies}))
            raise ValueError(f"{out} has studies of {tasks}; no page shows them: they belong to no experiment")
        raise ValueError(f"{out} has no finished epoch to report; train first: dmu paper adding")
    loops = {one.key: one for one in loop_time.read(Path(out))}
    pages = [synthetic_page(synthetic, sessions, command)] if synthetic else []
    pages += [real_page(real, sessions, command, loops)] if real else []
    pages += [gradients_page(observed, sessions, command)] if observed else []
    pages += [beyond_page(further, sessions, command)] if further else []
    verdicts = table_verdicts(real)
    claims = {one.task: [v.as_data() for v in verdicts if one.task in tasks_of(v.claim)] for one in real}
    data = [one.as_data() for one in synthetic] + [one.as_data() | {"claims": claims[one.task]} for one in real]
    return Report(pages, data + [one.as_data() for one in further])


def in_paper(setting: Setting) -> bool:
    """Whether the paper has a setting of this task and cell."""
    return setting.task in PAPER_TASKS and setting.cell in CELLS


def write_report(out: Path | str, to: Path | str | None = None) -> WrittenReport:
    """Read the records under ``out`` and write pages and figures to ``to`` (default: OUT/report)."""
    folder = Path(to) if to is not None else without_links(Path(out), "report")
    report = make_report(out, shlex.join(["dmu", "report", "--out", str(out), *(["--to", str(to)] if to else [])]))
    images = {image.name: image for page in report.pages for image in page.images()}
    files = {name: figures.save(image.draw(), without_links(folder, "figures"), name) for name, image in images.items()}
    for page in report.pages:
        put(folder / f"{page.name}.md", markdown.render(page).encode())
    svg = {name: paths["svg"].read_bytes() for name, paths in files.items()}
    links = {"Hyperparameter searches": SEARCHES} if (folder / SEARCHES).exists() else {}
    put(folder / "index.html", html.render(TITLE, report.pages, svg, report.data, links).encode())
    written = [path for paths in files.values() for path in paths.values()]
    return WrittenReport(
        report.pages, report.data, folder / "index.html", folder / f"{report.pages[0].name}.md", written
    )


def print_report(report: Report, tasks: Collection[str]) -> None:
    """Show in the terminal what the report says about some tasks."""
    from deepmemory.lab.report.render import terminal

    terminal.show(report.pages, tasks)
