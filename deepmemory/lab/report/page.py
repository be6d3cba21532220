"""One page that opens from disk and needs nothing else: figures, tables, readings, settings, provenance."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from deepmemory.lab import paper
from deepmemory.lab.bench import loop_time
from deepmemory.lab.records import Records
from deepmemory.lab.report import blocks, figures, markdown, real, watched
from deepmemory.lab.report.scores import Account, accounts
from deepmemory.lab.report.tables import (
    TITLES,
    Comparison,
    Picture,
    Row,
    Verdict,
    agreement,
    compare_readings,
    count_texts,
    machines,
    minutes,
    number,
    patience_note,
    pictures,
    row,
    rules_in_words,
    shortfall,
    verdict_pairs,
    verdicts,
)
from deepmemory.lab.settings import THRESHOLDS, threshold_label
from deepmemory.lab.writing import put, without_links

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; }
figure { margin: 1rem 0; } figure img { width: 100%; max-width: 62rem; height: auto; }
figcaption, .note { color: #555; font-size: .9rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .92rem; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.yes::before { content: "✓ "; } td.no::before { content: "✗ "; } td.open::before { content: "· "; }
td.yes, td.no, td.open { white-space: nowrap; }
td.yes { color: #005a3c; } td.no { color: #9a3b00; font-weight: 600; } td.open { color: #555; }
code { font-size: .9em; }
table.real { display: block; overflow-x: auto; }
@media (max-width: 60rem) { table { display: block; overflow-x: auto; } }
@media print { body { max-width: none; margin: 0; }
  h2 { break-before: page; } h2:first-of-type { break-before: auto; } }
"""


WORDS = {True: ("yes", "agrees"), False: ("no", "differs"), None: ("open", "open")}  # CSS class and text


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    page: Path  # HTML, with everything in it
    markdown: (
        Path  # the same for people who read it in the repository; where both kinds of task are, the synthetic ones
    )
    files: list[Path]
    pictures: list[
        Picture | Account
    ]  # what was recorded: a picture of each synthetic task, an account of each real one

    def as_data(self) -> list[dict]:
        """The tables, for machines."""
        found = [one for one in self.pictures if isinstance(one, Account)]
        return [real.as_data(one, found) if isinstance(one, Account) else picture_data(one) for one in self.pictures]


def picture_data(picture: Picture) -> dict:
    """One picture as plain data."""
    return {
        "task": picture.task,
        "changes": dict(picture.variant),
        "cells": [asdict(row(study)) for study in picture.studies.values()],
        "claims": [{"claim": v.claim.text, "seen": v.seen, "agrees": v.agrees} for v in verdicts(picture)],
    }


def write_report(out: Path | str, to: Path | str | None = None) -> Report:
    """Read the records under ``out`` and write the pages and the figures to ``to`` (default: OUT/report)."""
    records = Records(out)
    try:
        studies, sessions = records.studies(), records.sessions()
        numbers = {study.setting.key: records.watched(study.setting.key) for study in studies}
    finally:
        records.close()
    drawn, told, seen = pictures(studies), accounts(studies), watched.scenes(studies, numbers)
    if not drawn and not told:
        raise ValueError(f"{out} has no finished epoch to report; train first: dmu paper adding")
    folder = Path(to) if to is not None else without_links(Path(out), "report")
    command = shlex.join(["dmu", "report", "--out", str(out), *(["--to", str(to)] if to is not None else [])])
    made = {picture.name: figures.draw(picture) for picture in drawn}
    made |= {name: figures.draw_curves(panels) for one in told for name, panels in one.curves().items()}
    made |= {scene.name: watched.draw(scene) for scene in seen}
    files = {name: figures.save(figure, without_links(folder, "figures"), name) for name, figure in made.items()}
    svg = {name: paths["svg"].read_bytes() for name, paths in files.items()}

    parts, pages = [], []
    if drawn:
        computed_on = machines([study for picture in drawn for study in picture.studies.values()], sessions)
        parts.append(synthetic_part(drawn, computed_on, svg))
        pages.append(folder / "synthetic.md")
        put(pages[-1], markdown.document(drawn, computed_on, command).encode())
    if told:
        content = real.document(told, sessions, command, {one.key: one for one in loop_time.read(out)})
        parts.append(f'<h1 id="real">{real.TITLE}</h1>\n{blocks.to_html(content, svg)}')
        pages.append(folder / "real.md")
        put(pages[-1], blocks.to_markdown([blocks.Heading(real.TITLE, 1), *content]).encode())
    if seen:
        content = watched.document(seen, sessions, command)
        parts.append(f'<h1 id="gradients">{watched.TITLE}</h1>\n{blocks.to_html(content, svg)}')
        pages.append(folder / "gradients.md")
        put(pages[-1], watched.page(seen, sessions, command).encode())
    report = Report(
        folder / "index.html", pages[0], [path for paths in files.values() for path in paths.values()], [*drawn, *told]
    )
    put(report.page, document(parts, report).encode())
    return report


def document(parts: list[str], report: Report) -> str:
    """The whole page."""
    data = json.dumps(report.as_data()).replace("<", r"\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Deep Memory Update: paper and ours</title>
<style>{STYLE}</style>
</head>
<body>
{"".join(parts)}
<script type="application/json" id="report-data">{data}</script>
</body>
</html>
"""


def synthetic_part(found: list[Picture], computed_on: list[str], svg: dict[str, bytes]) -> str:
    """The synthetic tasks."""
    main = "".join(section(picture, svg[picture.name]) for picture in found if not picture.variant)
    variants = "".join(section(picture, svg[picture.name]) for picture in found if picture.variant)
    items = "".join(f"<li>{escape(text)}</li>" for text in computed_on)
    return f"""<h1 id="synthetic">Deep Memory Update: the synthetic tasks, paper and ours</h1>
<p>The paper counts, for five thresholds of the validation loss, how many of {paper.RUNS} runs have got under the
threshold by each epoch (<a href="https://arxiv.org/abs/2105.14092">arXiv 2105.14092</a>). Its figures
carry no numbers, so what its text says of them is checked here.</p>
<p>{escape(agreement(found))}</p>
{main}
<h2>Other readings</h2>
<p>What the paper leaves open, read in both ways.</p>
{"".join(comparison_part(comparison, found) for comparison in compare_readings(found))}
{variants}
<h2>How a statement is decided</h2>
<ul class="note">{"".join(f"<li>{escape(text)}</li>" for text in rules_in_words())}</ul>
<h2>Where the numbers come from</h2>
<p class="note">Training took {minutes(found)}, all studies together.</p>
<ul class="note">{items}</ul>
"""


def comparison_part(comparison: Comparison, found: list[Picture]) -> str:
    """Both readings of one open setting, or what to do to get the other one."""
    reading = comparison.reading
    heading = f"<h3>{escape(reading.name)}: {escape(' or '.join(reading.labels))}</h3><p>{escape(reading.why)}</p>"
    if reading.field == "patience":
        heading += f"<p>{escape(patience_note(found))}</p>"
    if not comparison.recorded:
        return (
            f"{heading}<p>“{escape(reading.labels[1])}”: not run. <code>{escape(reading.command)}</code> runs it.</p>"
        )
    counts = "".join(
        f"<tr><td>{TITLES[task]}</td><td>{cell.upper()}</td><td>{escape(label)}</td>"
        + "".join(f'<td class="number">{text}</td>' for text in count_texts(numbers))
        + "</tr>"
        for task, cell, *both in comparison.rows
        for label, numbers in zip(reading.labels, both, strict=True)
    )
    claims = "".join(
        f"<tr><td>{TITLES[main.task]}</td><td>{escape(one.claim.text)}</td>"
        + "".join(f'<td class="{WORDS[v.agrees][0]}">{WORDS[v.agrees][1]}</td>' for v in (one, two))
        + "</tr>"
        for main, other in comparison.pictures
        for one, two in verdict_pairs(reading, main, other)
    )
    heads = "".join(f'<th class="number">under {threshold_label(t)}</th>' for t in THRESHOLDS)
    return f"""{heading}
<table class="readings"><thead><tr><th>task</th><th>cell</th><th>reading</th>{heads}</tr></thead>
<tbody>{counts}</tbody></table>
<table class="readings"><thead><tr><th>task</th><th>paper</th>{"".join(f"<th>{escape(x)}</th>" for x in reading.labels)}
</tr></thead><tbody>{claims}</tbody></table>"""


def section(picture: Picture, svg: bytes) -> str:
    """One task, or one variant of it."""
    rows = [row(study) for study in picture.studies.values()]
    image = b64encode(svg).decode()
    said = "; ".join(
        f"{r.cell.upper()} "
        + ", ".join(f"{n} under {threshold_label(t)}" for n, t in zip(r.under, THRESHOLDS, strict=True))
        for r in rows
    )
    return f"""
<section id="{escape(picture.name)}">
<h2>{escape(picture.title)}</h2>
<figure>
<img alt="Runs under each threshold at the end: {escape(said)}" src="data:image/svg+xml;base64,{image}">
<figcaption>Runs that have got under each threshold of the validation loss by each epoch.</figcaption>
</figure>
{caveat(picture)}
{counts_table(rows)}
{claims_table(verdicts(picture))}
{settings_table(picture)}
</section>"""


def caveat(picture: Picture) -> str:
    """Fewer runs or epochs than the paper's: say so before anything is compared."""
    warning = shortfall(picture)
    return f'<p class="note">{warning}</p>' if warning else ""


def counts_table(rows: list[Row]) -> str:
    """Runs and median epoch at each threshold."""
    heads = "".join(f'<th class="number">under {threshold_label(t)}</th>' for t in THRESHOLDS)
    body = ""
    for r in rows:
        cells = "".join(
            f'<td class="number" data-cell="{r.cell}" data-threshold="{threshold_label(t)}">{n}'
            + (f" <span class='note'>({m:g})</span>" if m is not None else "")
            + "</td>"
            for n, m, t in zip(r.under, r.median_epoch, THRESHOLDS, strict=True)
        )
        state = f"{r.diverged}" + (f", {r.training} still training" if r.training else "")
        body += (
            f'<tr><td>{r.cell.upper()}</td><td class="number">{r.runs}</td>{cells}'
            f'<td class="number">{state}</td><td class="number">{r.epochs}</td>'
            f'<td class="number">{number(r.test_loss, ".1e")}</td>'
            f'<td class="number">{number(r.test_accuracy, ".1%")}</td><td class="number">{r.seconds:.0f}</td></tr>'
        )
    return (
        f'<h3>Runs under each threshold (median epoch at which they got there)</h3><table class="counts"><thead>'
        f'<tr><th>cell</th><th class="number">runs</th>{heads}<th class="number">diverged</th>'
        f'<th class="number">epochs</th><th class="number">test loss</th>'
        '<th class="number">test accuracy</th><th class="number">seconds</th>'
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def claims_table(found: list[Verdict]) -> str:
    """The paper's claim, what we saw, agreement."""
    body = "".join(
        f"<tr><td>{escape(v.claim.text)}</td><td>{escape(v.seen)}</td>"
        f'<td class="{WORDS[v.agrees][0]}">{WORDS[v.agrees][1]}</td></tr>'
        for v in found
    )
    return (
        '<h3>What the paper says, and what we saw</h3><table class="claims"><thead><tr><th>paper</th><th>here</th>'
        f"<th>agreement</th></tr></thead><tbody>{body}</tbody></table>"
    )


def settings_table(picture: Picture) -> str:
    """Block, rates and weights of each cell."""
    from deepmemory.lab.tasks import task_of
    from deepmemory.lab.training.network import weight_count

    body = ""
    for study in picture.studies.values():
        s = study.setting
        block = f"state {', '.join(map(str, s.hidden))}"
        if s.cell == "dmu":
            block += f"; hidden layers {', '.join(map(str, s.transition)) or 'none'}; module rate {s.module_rate}"
        elif s.cell == "rhn":
            block += f"; depth {s.depth}"
        body += (
            f'<tr><td>{s.cell.upper()}</td><td>{block}</td><td class="number">{weight_count(s, task_of(s))}</td>'
            f'<td class="number">{s.lr:g}</td><td class="number">{s.epochs}</td><td>{s.steps} of {s.batch}</td>'
            f"<td>{s.patience} under {threshold_label(s.stop_below)}</td><td><code>{s.key}</code></td></tr>"
        )
    return (
        '<details><summary>Settings</summary><table class="settings"><thead><tr><th>cell</th><th>recurrent block</th>'
        '<th class="number">weights</th><th class="number">learning rate</th><th class="number">epochs at most</th>'
        "<th>steps per epoch</th><th>stops after epochs</th><th>study</th></tr></thead>"
        f"<tbody>{body}</tbody></table></details>"
    )
