"""How scores, runs and figures of real data look on a page or in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepmemory.lab import paper
from deepmemory.lab.paper import Spread
from deepmemory.lab.report.blocks import Block, Image
from deepmemory.lab.report.scores import TITLES, Board, Line, Outcome, Trained, part_name

NOTHING = "–"  # noqa: RUF001
FORMATS = {"loss": ".3f", "perplexity": ".2f", "accuracy": ".3f"}


def cell_name(line: Line) -> str:
    """The rate of a DMU-C, where it is not the DMU's."""
    changed = dict(line.ours.changes) if line.ours else {}
    return line.place.cell.upper() + (f" (lr {changed['lr']:g})" if "lr" in changed else "")


def show(number: float | None, of: Board | Line) -> str:
    """One score as its table has it."""
    if number is None or math.isnan(number):
        return "nan"
    return f"{number:.1%}" if of.task == "pixel-mnist" else format(number, FORMATS[of.measure])


def both(spread: Spread | None, of: Board | Line) -> str:
    """Best; mean and deviation. One run has the one number only."""
    if spread is None or (spread.std is None and spread.mean == spread.best):
        return mean(spread, of)
    return f"{show(spread.best, of)}; {mean(spread, of)}"


def mean(spread: Spread | None, of: Board | Line) -> str:
    """Mean and deviation."""
    if spread is None:
        return NOTHING
    deviation = "" if spread.std is None else f" ± {show(spread.std, of).removesuffix('%')}"
    return show(spread.mean, of) + deviation


def difference(line: Line) -> str:
    """In deviations of the paper; in points of a per cent where it prints none."""
    if line.excess is None:
        return NOTHING
    if math.isnan(line.excess):
        return "nan"
    return f"{100 * line.excess:+z.1f}" if line.deviations is None else f"{line.deviations:+z.1f}"


def runs_in_words(of: Outcome | None) -> str:
    """How many there are, and what became of the others."""
    if of is None:
        return NOTHING
    diverged = f", {of.diverged} diverged" if of.diverged else ""
    return f"{of.runs}{diverged}" + (f", {of.training} unfinished" if of.training else "")


def images(studies: Sequence[Trained]) -> list[Block]:
    """The figures that show these studies, each once."""
    found: dict[str, Block] = {}
    for one in sorted(studies, key=lambda one: one.place.order):
        measure = paper.measure_of(one.place.task)
        of = ", ".join(filter(None, (TITLES[one.place.task], part_name(one.place.part), one.apart)))
        alt = f"{of}: {measure} of training (thin) and validation by epoch, mean and range of runs"
        found.setdefault(one.figure, Image(one.figure, alt))
    return list(found.values())
