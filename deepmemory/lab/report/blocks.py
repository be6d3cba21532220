"""What a report is made of: pages of sections of blocks, which the modules in ``render`` show.

Texts may hold ``code`` between backticks and **bold** between asterisks, as Markdown has them; an ``arXiv:`` number
becomes a link. Some texts come from records, which may come from anybody, so nothing else that Markdown, HTML or a
terminal would act on gets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class Heading:
    """The title of a part of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Image:
    """A figure; its caption also serves readers who do not see it."""

    name: str  # of its files
    caption: str
    draw: Callable[[], Any]  # makes the matplotlib figure


@dataclass(frozen=True)
class Mark:
    """A table's cell that says how something turned out: well, badly, or neither (None)."""

    text: str
    good: bool | None


Cell = str | Mark


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and what it says of an item."""

    title: str
    cell: Callable[[Any], Cell]
    numeric: bool = False
    brief: bool = True  # shown in a terminal too, which has less room


@dataclass(frozen=True)
class Table:
    """One row for each item, one column for each thing to say of it."""

    columns: Sequence[Column]
    items: Sequence[Any]

    @property
    def rows(self) -> list[list[Cell]]:
        """The cells of every row."""
        return [[column.cell(item) for column in self.columns] for item in self.items]


@dataclass(frozen=True)
class Details:
    """Blocks folded behind one line, none of them a heading; a terminal leaves them out, Markdown their figures."""

    summary: str
    blocks: Sequence[Block]


Block = Heading | Text | Items | Commands | Image | Table | Details


@dataclass(frozen=True)
class Section:
    """A titled part of a page. What is about some tasks is also shown in the terminal that trained them."""

    title: str
    blocks: Sequence[Block]
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """One Markdown file, and a part of the HTML page."""

    name: str  # of the file
    title: str
    sections: Sequence[Section]  # the first one may have no title

    def images(self) -> list[Image]:
        """Every figure on the page, folded ones too, each once."""
        found = (image for section in self.sections for image in images_in(section.blocks))
        return list({image.name: image for image in found}.values())


def images_in(blocks: Sequence[Block]) -> Iterator[Image]:
    """The figures among some blocks, folded ones too."""
    for block in blocks:
        if isinstance(block, Image):
            yield block
        elif isinstance(block, Details):
            yield from images_in(block.blocks)


def number(title: str, cell: Callable[[Any], str], brief: bool = True) -> Column:
    """A column of numbers."""
    return Column(title, cell, True, brief)


def text_columns(left: int, *titles: str) -> list[Column]:
    """Columns of rows that are lists of cells already; the first ``left`` of them hold words, the others numbers."""
    return [Column(title, itemgetter(place), place >= left) for place, title in enumerate(titles)]
