"""The tables of a report: one row for each item, one column for each of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A cell with a verdict: good, bad, or neither (None)."""

    text: str
    good: bool | None


Cell = str | Mark


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and the cell it has for an item."""

    title: str
    cell: Callable[[Any], Cell]
    numeric: bool = False
    brief: bool = True  # shown in a terminal too, which has less room


@dataclass(frozen=True)
class Table:
    """A table with one row for each item."""

    columns: Sequence[Column]
    items: Sequence[Any]

    @property
    def rows(self) -> list[list[Cell]]:
        """The cells of every row."""
        return [[column.cell(item) for column in self.columns] for item in self.items]


def number(title: str, cell: Callable[[Any], str], brief: bool = True) -> Column:
    """A column of numbers."""
    return Column(title, cell, True, brief)


def text_columns(left: int, *titles: str) -> list[Column]:
    """Columns for rows that are lists of cells; the first ``left`` columns hold words, the others numbers."""
    return [Column(title, itemgetter(place), place >= left) for place, title in enumerate(titles)]
