"""Pages as Markdown for the repository, with figures from ``figures/``; folded figures are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepmemory.lab.report.blocks import Block, Commands, Details, Heading, Image, Items, Page, Text
from deepmemory.lab.report.table import Cell, Mark, Table


def render(page: Page) -> str:
    """A page as Markdown."""
    parts = [f"# {inline(page.title)}"]
    for section in page.sections:
        parts += [f"## {inline(section.title)}"] if section.title else []
        parts += map(show, section.blocks)
    return "\n\n".join(filter(None, parts)) + "\n"


def show(block: Block) -> str:
    """A block as Markdown."""
    match block:
        case Heading(text):
            return f"### {inline(text)}"
        case Text(text):
            return inline(text)
        case Items(texts):
            return "\n".join(f"- {inline(text)}" for text in texts)
        case Commands(lines):
            return "\n".join(["```sh", *lines, "```"])
        case Image(name, caption):
            return f"![{inline(caption)}](figures/{name}.svg)"
        case Table(columns):
            rule = ["---:" if column.numeric else "---" for column in columns]
            heads = [cell(column.title) for column in columns]
            return "\n".join(map(line, [heads, rule, *([cell(of) for of in row] for row in block.rows)]))
        case Details(summary, blocks):
            inside = "\n\n".join(show(one) for one in blocks if not isinstance(one, Image))
            return f"<details>\n<summary>{inline(summary)}</summary>\n\n{inside}\n\n</details>" if inside else ""


def line(cells: Sequence[str]) -> str:
    """One row of a table."""
    return "| " + " | ".join(cells) + " |"


def cell(of: Cell) -> str:
    """One cell of a table; a bad mark is bold."""
    text = of.text if isinstance(of, Mark) else of
    shown = inline(text).replace("|", r"\|")
    return f"**{shown}**" if isinstance(of, Mark) and of.good is False else shown


def inline(text: str) -> str:
    """One line without HTML, links and images of its own.

    >>> inline("**1 < 2**\\n![x](http://y)")
    '**1 &lt; 2** ![x]&#40;http://y)'
    >>> inline("arXiv:2105.14092")
    '[arXiv:2105.14092](https://arxiv.org/abs/2105.14092)'
    """
    safe = " ".join(text.splitlines()).replace("<", "&lt;").replace("](", "]&#40;")
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", safe)
