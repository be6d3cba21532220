"""Sections in a terminal: a short report on what was just trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from deepmemory.lab.report.blocks import Block, Details, Heading, Items, Page, Text
from deepmemory.lab.report.table import Cell, Mark, Table

COLOURS = {True: "green", False: "bold red", None: "dim"}


def show(pages: Iterable[Page], tasks: Collection[str]) -> None:
    """Print the sections about these tasks, without figures; folded parts are only named."""
    console = Console(highlight=False)
    for section in (section for page in pages for section in page.sections if set(section.tasks) & set(tasks)):
        if any(isinstance(block, Table) for block in section.blocks):
            console.print(styled(section.title, "bold underline"))
            folded = [block.summary for block in section.blocks if isinstance(block, Details)]
            rest = [styled(f"The report also has: {'; '.join(folded)}", "dim")] if folded else []
            for one in [*filter(None, map(renderable, section.blocks)), *rest]:
                console.print(one)
                console.print()


def renderable(block: Block) -> Any:
    """A block as rich prints it; None if a terminal leaves it out."""
    match block:
        case Heading(text):
            return styled(text, "bold")
        case Text(text):
            return styled(text)
        case Items(texts):
            return styled("\n".join(f"- {text}" for text in texts))
        case Table(columns):
            table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
            brief = [place for place, column in enumerate(columns) if column.brief]
            for place in brief:
                column = columns[place]
                table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=column.numeric)
            for row in block.rows:
                table.add_row(*(cell(row[place]) for place in brief))
            return table
    return None


def cell(of: Cell) -> Any:
    """One cell of a table, in colour if it is a mark."""
    return styled(of.text, COLOURS[of.good]) if isinstance(of, Mark) else styled(of)


def styled(text: str, style: str = "") -> Any:
    """Text without Markdown's signs; brackets in it are not taken for markup."""
    return RichText(text.replace("**", "").replace("`", ""), style=style)
