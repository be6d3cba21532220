"""Pages as one HTML document that opens from disk and needs nothing else."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deepmemory.lab.report.blocks import Block, Commands, Details, Heading, Image, Items, Page, Text
from deepmemory.lab.report.table import Cell, Mark, Table

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: break-word; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.5rem; margin-top: 3.5rem; } h3 { font-size: 1.25rem; margin-top: 2.5rem; }
h4 { font-size: 1.05rem; }
nav > ul { padding: 0; list-style: none; columns: 20rem; } nav ul ul { padding-left: 1.2rem; }
nav li { break-inside: avoid-column; }
p, ul, figcaption { max-width: 56rem; }
figure { margin: 1rem 0; } figure img { width: 100%; max-width: 62rem; min-width: 36rem; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.wide, pre { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: left; vertical-align: top; min-width: 3rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
td.long { min-width: 14rem; }
td.good::before { content: "✓ "; } td.bad::before { content: "✗ "; } td.open::before { content: "· "; }
td.good, td.bad, td.open { min-width: 6.5rem; }
td.good { color: #005a3c; } td.bad { color: #9a3b00; font-weight: 600; } td.open { color: #555; }
code { font-size: .9em; }
details { margin: 1rem 0; } summary { cursor: pointer; color: #0a4b78; }
@media (max-width: 40rem) { body { margin: 1rem auto; } th, td { padding: .3rem .4rem; } }
@media print { body { max-width: none; margin: 0; } nav { display: none; } h3 { break-before: page; } }
"""
LONG = 40  # characters; cells with more of them get more room


def render(
    title: str,
    pages: Sequence[Page],
    figures: Mapping[str, bytes],
    data: Any = None,
    links: Mapping[str, str] | None = None,
) -> str:
    """The document: contents, then page after page.

    ``figures`` are SVG by name, ``data`` is for machines, ``links`` are further pages by title.
    """
    content = "\n".join(part(page, figures) for page in pages)
    further = "".join(f'<li><a href="{escape(to)}">{escape(name)}</a></li>' for name, to in (links or {}).items())
    script = ""
    if data is not None:
        as_json = json.dumps(data).replace("<", r"\u003c")
        script = f'<script type="application/json" id="report-data">{as_json}</script>\n'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="Contents"><ul>{"".join(map(contents, pages))}{further}</ul></nav>
{content}
{script}</body>
</html>
"""


def contents(page: Page) -> str:
    """The page's lines in the table of contents."""
    inner = "".join(
        f'<li><a href="#{anchor(page, number)}">{inline(section.title)}</a></li>'
        for number, section in enumerate(page.sections)
        if section.title
    )
    return f'<li><a href="#{escape(page.name)}">{inline(page.title)}</a><ul>{inner}</ul></li>'


def anchor(page: Page, number: int) -> str:
    """The id of a section, for links."""
    return f"{escape(page.name)}-{number}"


def part(page: Page, figures: Mapping[str, bytes]) -> str:
    """One page within the document."""
    lines = [f'<h2 id="{escape(page.name)}">{inline(page.title)}</h2>']
    for number, section in enumerate(page.sections):
        head = f"<h3>{inline(section.title)}</h3>" if section.title else ""
        blocks = "\n".join(show(block, figures) for block in section.blocks)
        lines.append(f'<section id="{anchor(page, number)}">\n{head}\n{blocks}\n</section>')
    return "\n".join(lines)


def show(block: Block, figures: Mapping[str, bytes]) -> str:
    """A block as HTML."""
    match block:
        case Heading(text):
            return f"<h4>{inline(text)}</h4>"
        case Text(text):
            return f"<p>{inline(text)}</p>"
        case Items(texts):
            return f"<ul>{''.join(f'<li>{inline(text)}</li>' for text in texts)}</ul>"
        case Commands(lines):
            return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'
        case Image(name, caption):
            source = b64encode(figures[name]).decode()
            image = f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{source}">'
            return f'<figure><div class="wide">{image}</div><figcaption>{inline(caption)}</figcaption></figure>'
        case Table(columns):
            head = "".join(cell(column.title, column.numeric, "th") for column in columns)
            body = "".join(
                f"<tr>{''.join(cell(of, column.numeric) for of, column in zip(row, columns, strict=True))}</tr>"
                for row in block.rows
            )
            # A table that is wider than the screen scrolls in its own box, which the keyboard can reach.
            return (
                f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>"
            )
        case Details(summary, blocks):
            inside = "\n".join(show(one, figures) for one in blocks)
            return f"<details><summary>{inline(summary)}</summary>\n{inside}\n</details>"


def cell(of: Cell, numeric: bool, tag: str = "td") -> str:
    """One cell of a table: a number, a mark in colour, or words, with room for long ones."""
    if isinstance(of, Mark):
        kind, text = {True: "good", False: "bad", None: "open" if of.text else ""}[of.good], of.text
    else:
        kind, text = "number" if numeric else "long" if len(of) > LONG else "", of
    return f'<{tag} class="{kind}">{inline(text)}</{tag}>' if kind else f"<{tag}>{inline(text)}</{tag}>"


def inline(text: str) -> str:
    """Code, bold and links to the arXiv.

    >>> inline("**1 < 2** says `dmu`")
    '<strong>1 &lt; 2</strong> says <code>dmu</code>'
    """
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', text)
