"""The parts of a report: pages of sections of blocks, which the modules in ``render`` show.

Texts may hold ``code`` between backticks and **bold** between asterisks, as Markdown has them; an ``arXiv:`` number
becomes a link. Some texts come from records, which may come from anybody, so everything else that Markdown, HTML or a
terminal would interpret is made harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepmemory.lab.report.table import Table


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
class Details:
    """Blocks folded behind one line, none of them a heading; a terminal leaves them out, Markdown their figures."""

    summary: str
    blocks: Sequence[Block]


Block = Heading | Text | Items | Commands | Image | Table | Details


@dataclass(frozen=True)
class Section:
    """A titled part of a page. A section about some tasks is also shown in the terminal after training them."""

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
