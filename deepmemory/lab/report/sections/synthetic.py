"""The page about the synthetic tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.report import figures, words
from deepmemory.lab.report.blocks import Block, Commands, Image, Items, Page, Section, Text
from deepmemory.lab.report.results import synthetic
from deepmemory.lab.report.results.claims import rules_in_words
from deepmemory.lab.report.results.synthetic import CellResults, SyntheticResults
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.table import Column, Table, number
from deepmemory.lab.settings import CELLS, THRESHOLDS, threshold_label
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import weight_count
from deepmemory.lab.training.progress import duration

SUMMED_UP = 1e-4  # the threshold of the summary, the middle one


def synthetic_page(results: Sequence[SyntheticResults], sessions: shared.Sessions, command: str) -> Page:
    """Counts, claims and readings; ``command`` is what writes the page."""
    main = [one for one in results if not one.changes]
    others = [one for one in results if one.changes and not any(map(one.is_reading, paper.READINGS))]
    claims = sorted((claim for of_task in paper.CLAIMS.values() for claim in of_task), key=lambda claim: claim.text)
    sections = [
        Section("", introduction(main)),
        *map(task_section, [*main, *others]),
        readings_section(results),
        Section("How statements are judged", [Items(rules_in_words(synthetic.RULES, claims))]),
        Section("Where the numbers come from", provenance(results, sessions, command)),
    ]
    return Page("synthetic", "Synthetic tasks: the paper and this reproduction", sections)


def introduction(main: Sequence[SyntheticResults]) -> list[Block]:
    """What the paper did, and how much of it these records confirm."""
    text = (
        f"The paper (arXiv:2105.14092) trains {paper.RUNS} runs of each cell for at most {paper.EPOCHS} epochs. For "
        "five thresholds of the validation loss it counts how many runs have got under the threshold by each epoch. "
        "Its figures carry no numbers, so its statements about them are checked here, one by one."
    )
    if not main:
        changed = "No study here has the paper's settings unchanged; each section says what was changed."
        return [Text(text), Text(changed)]
    verdicts = [(words.TITLES[one.task], verdict) for one in main for verdict in one.verdicts]
    agreement = shared.statements_text([verdict for _, verdict in verdicts])
    if any(0 < verdict.runs < paper.RUNS for _, verdict in verdicts):
        agreement += f" Verdicts on fewer than {paper.RUNS} runs are hints."
    return [Text(text), Text(agreement), summary_table(main), *shared.differences(verdicts)]


def summary_table(results: Sequence[SyntheticResults]) -> Table:
    """One line per task with the paper's settings: runs under one threshold, and how many of its statements hold."""
    place = THRESHOLDS.index(SUMMED_UP)

    def share(cell: str, one: SyntheticResults) -> str:
        return f"{one.cells[cell].under[place]}/{one.cells[cell].runs}" if cell in one.cells else words.NOT_RUN

    columns = [
        Column(f"runs under {threshold_label(SUMMED_UP)}", lambda one: words.TITLES[one.task]),
        *(number(words.cell_title(cell), partial(share, cell)) for cell in CELLS),
        number("statements that hold", lambda one: shared.holding(one.verdicts)),
    ]
    return Table(columns, [one for one in results if not one.changes])


def task_section(results: SyntheticResults) -> Section:
    """One task with the paper's settings, or with a change to them."""
    settings = {words.cell_title(cell): study.setting for cell, study in results.studies.items()}
    weights = {name: weight_count(setting, task_of(setting)) for name, setting in settings.items()}
    runs, epochs = min(cell.runs for cell in results.cells.values()), max(one.epochs for one in settings.values())
    text = (
        "Runs that got under each threshold, and the median epoch at which they did. Test scores are medians. Learning "
        "rates and initial biases differ among the cells: see Settings. "
    )
    text += words.chance_text(next(iter(settings.values())))
    if runs < paper.RUNS or epochs < paper.EPOCHS:
        text += (
            f" Runs of each cell: {runs} or more, with at most {epochs} epochs. The paper has {paper.RUNS} runs with "
            f"{paper.EPOCHS} epochs, so read the comparison as a hint."
        )
    unfinished = any(cell.unfinished for cell in results.cells.values())
    columns = [
        Column("cell", lambda cell: cell.name),
        *counts(lambda cell: cell),
        number("test loss", lambda cell: words.number(cell.test_loss, "small loss"), brief=False),
        number("test accuracy", lambda cell: words.number(cell.test_accuracy, "percent"), brief=False),
        number("diverged", lambda cell: str(cell.diverged), brief=False),
        *([number("unfinished", lambda cell: str(cell.unfinished))] if unfinished else []),
        number("training time", lambda cell: f"{cell.seconds:.0f} s", brief=False),
    ]
    counted = Table(columns, list(results.cells.values()))
    statements = shared.statements(results.verdicts)
    blocks = [figure(results), Text(text), counted, *statements, shared.settings_table(settings, weights)]
    return Section(results.title, blocks, (results.task,))


def figure(results: SyntheticResults) -> Image:
    """Runs under each threshold by epoch."""
    caption = f"{results.title}: runs whose validation loss has got under each threshold by each epoch."
    caption += shared.biases(study.setting for study in results.studies.values())
    name = words.figure_name(results.task, results.changes)
    return Image(name, caption, partial(figures.draw_counts, results))


def counts(cell_of: Callable[[Any], CellResults]) -> list[Column]:
    """Columns of runs under each threshold, with their median epoch."""

    def text(place: int, item: Any) -> str:
        cell = cell_of(item)
        epoch = cell.median_epoch[place]
        return f"{cell.under[place]}/{cell.runs}" + ("" if epoch is None else f" ({epoch:g})")

    return [number(f"under {threshold_label(t)}", partial(text, place)) for place, t in enumerate(THRESHOLDS)]


def readings_section(results: Sequence[SyntheticResults]) -> Section:
    """What the paper leaves open, in both readings."""
    main, trained = {one.task: one for one in results if not one.changes}, dict[str, None]()

    def compare(reading: paper.Reading) -> tuple[str, list[Block], list[Block]]:
        others = {one.task: one for one in results if one.is_reading(reading)}
        trained.update(dict.fromkeys(others))
        why = reading.why
        if reading.field == "patience":
            epochs, needed = synthetic.epochs_with_patience(results)
            why += f" The runs with the paper's settings trained {epochs:,} epochs; stopped at once, {needed:,}."
        return why, reading_tables(reading, main, others) if others else [], [figure(of) for of in others.values()]

    tasks = {one.task for one in results}
    compared, not_run = shared.readings([one for one in paper.READINGS if tasks & set(one.tasks)], compare)
    return Section("What the paper leaves open", [*compared, *not_run], tuple(trained))


def reading_tables(
    reading: paper.Reading, main: Mapping[str, SyntheticResults], others: Mapping[str, SyntheticResults]
) -> list[Block]:
    """Counts and statements of both readings side by side."""
    rows, missing, verdicts = [], [], []
    for task, other in others.items():
        pairs = [(reading.labels[0], main.get(task)), (reading.labels[1], other)]
        trained = [cell for cell in reading.cells if cell in other.studies]
        rows += [(label, one.cells[cell]) for cell in trained for label, one in pairs if one and cell in one.cells]
        untrained = [words.cell_title(cell) for cell in reading.cells if cell not in trained]
        missing += [f"{words.TITLES[task]} with {words.listed(untrained)}"] if untrained else []
        both = zip(main[task].verdicts, other.verdicts, strict=True) if task in main else ()
        changeable = [pair for pair in both if set(pair[0].claim.cells) & set(reading.cells)]
        verdicts += [(task, *pair) for pair in changeable if pair[1].agrees is not None]
    columns = [
        Column("task", lambda row: words.TITLES[row[1].study.setting.task]),
        Column("cell", lambda row: row[1].name),
        Column("reading", lambda row: row[0]),
        *counts(lambda row: row[1]),
    ]
    claims = [
        Column("task", lambda row: words.TITLES[row[0]]),
        Column("the paper says", lambda row: row[1].claim.text),
        Column(reading.labels[0], lambda row: row[1].mark),
        Column(reading.labels[1], lambda row: row[2].mark),
    ]
    return [
        Table(columns, rows),
        *([Text(f"Not run with “{reading.labels[1]}”: {'; '.join(missing)}.")] if missing else []),
        *([Table(claims, verdicts)] if verdicts else []),
    ]


def provenance(results: Sequence[SyntheticResults], sessions: shared.Sessions, command: str) -> list[Block]:
    """Time, machines and commands."""
    cells = {cell.study.setting.key: cell for one in results for cell in one.cells.values()}
    took = duration(sum(cell.seconds for cell in cells.values()))
    return [
        Text(f"Training took {took} (minutes and seconds), all studies together:"),
        shared.machines([cell.study for cell in cells.values()], sessions),
        Text(
            "One epoch is 200 steps of 32 fresh sequences, as in the authors' published code; the paper's table says "
            "“seq. per epoch 200”. Validation takes 1,000 fixed sequences. The test takes 10,000, with each run's best "
            "weights."
        ),
        Commands(["dmu paper", *(reading.command for reading in paper.READINGS), command]),
        Text(
            "`dmu paper` trains into `runs/`, resumes where it was stopped and skips what is recorded. `dmu merge A B "
            "--out C` joins the records of folders. The last line writes this page, `index.html` and `figures/` from "
            "`records.sqlite` alone."
        ),
    ]
