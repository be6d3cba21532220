"""Pieces of a page that is written once and shown twice: as Markdown in the repository, as HTML in a browser.

Texts may hold ``code`` between backticks and **bold** between asterisks, as Markdown has them. Some of them come from
records, which may come from anybody, so nothing else that Markdown or HTML would act on gets through.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# What a cell of a table may say, and how HTML marks it.
MARKS = {
    "agrees": "yes",
    "holds": "yes",
    "reproduced": "yes",
    "differs": "no",
    "does not hold": "no",
    "not reproduced": "no",
    "open": "open",
    "not run": "open",
    "no data": "open",
}


@dataclass(frozen=True)
class Heading:
    """Of a section (level 2) or a part of one (3)."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Image:
    """A figure by its name; ``alt`` is for people who do not see it."""

    name: str
    alt: str


@dataclass(frozen=True)
class Table:
    """Rows of text; the first ``left`` columns hold words, the others numbers or marks."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


Block = Heading | Text | Items | Commands | Image | Table


def to_markdown(blocks: Sequence[Block]) -> str:
    """The page for the repository; its figures lie in ``figures/``."""
    return "\n\n".join(map(markdown_of, blocks)) + "\n"


def markdown_of(block: Block) -> str:
    """One piece."""
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escaped(text)}"
        case Text(text):
            return escaped(text)
        case Items(texts):
            return "\n".join(f"- {escaped(text)}" for text in texts)
        case Commands(lines):
            return "\n".join(["```sh", *lines, "```"])
        case Image(name, alt):
            return f"![{escaped(alt)}](figures/{name}.svg)"
        case Table(heads, rows, left):
            return table(heads, rows, left)


def table(heads: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of text; the first ``left`` columns to the left, numbers to the right."""
    rule = ["---" if place < left else "---:" for place in range(len(heads))]
    lines = [[escaped(text).replace("|", r"\|") for text in line] for line in (heads, *body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def escaped(text: str) -> str:
    """One line of Markdown without HTML, links and pictures of its own.

    >>> escaped("**1 < 2**\\n![x](http://y)")
    '**1 &lt; 2** ![x]&#40;http://y)'
    """
    return " ".join(text.splitlines()).replace("<", "&lt;").replace("](", "]&#40;")


def to_html(blocks: Sequence[Block], drawn: Mapping[str, bytes]) -> str:
    """A part of the page that needs nothing else; ``drawn`` are its figures as SVG, by name."""
    return "\n".join(html_of(block, drawn) for block in blocks)


def html_of(block: Block, drawn: Mapping[str, bytes]) -> str:
    """One piece."""
    match block:
        case Heading(text, level):
            return f"<h{level}>{inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{inline(text)}</p>"
        case Items(texts):
            return f'<ul class="note">{"".join(f"<li>{inline(text)}</li>" for text in texts)}</ul>'
        case Commands(lines):
            return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"
        case Image(name, alt):
            source = b64encode(drawn[name]).decode()
            return (
                f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{source}">'
                f"<figcaption>{escape(alt)}.</figcaption></figure>"
            )
        case Table(heads, rows, left):
            head = "".join(html_cell(text, place < left, "th") for place, text in enumerate(heads))
            body = "".join(
                f"<tr>{''.join(html_cell(text, place < left) for place, text in enumerate(row))}</tr>" for row in rows
            )
            return f'<table class="real"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def html_cell(text: str, words: bool, tag: str = "td") -> str:
    """Words to the left, numbers to the right, marks in colour."""
    kind = MARKS.get(text.strip("*"), "" if words else "number")
    return f'<{tag} class="{kind}">{inline(text)}</{tag}>' if kind else f"<{tag}>{inline(text)}</{tag}>"


def inline(text: str) -> str:
    """Code and bold.

    >>> inline("**1 < 2** says `dmu`")
    '<strong>1 &lt; 2</strong> says <code>dmu</code>'
    """
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
