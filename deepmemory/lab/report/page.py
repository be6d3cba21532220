"""One page that opens from disk and needs nothing else: figures, tables, readings, settings, provenance."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from deepmemory.lab import paper
from deepmemory.lab.records import Records
from deepmemory.lab.report import figures, markdown
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
@media (max-width: 60rem) { table { display: block; overflow-x: auto; } }
@media print { body { max-width: none; margin: 0; }
  h2 { break-before: page; } h2:first-of-type { break-before: auto; } }
"""


WORDS = {True: ("yes", "agrees"), False: ("no", "differs"), None: ("open", "open")}  # CSS class and text


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    page: Path  # HTML, with everything in it
    markdown: Path  # the same for people who read it in the repository
    files: list[Path]
    pictures: list[Picture]

    def as_data(self) -> list[dict]:
        """The tables, for machines."""
        return [
            {
                "task": picture.task,
                "changes": dict(picture.variant),
                "cells": [asdict(row(study)) for study in picture.studies.values()],
                "claims": [{"claim": v.claim.text, "seen": v.seen, "agrees": v.agrees} for v in verdicts(picture)],
            }
            for picture in self.pictures
        ]


def write_report(out: Path | str, to: Path | str | None = None) -> Report:
    """Read the records under ``out`` and write both pages and the figures to ``to`` (default: OUT/report)."""
    records = Records(out)
    try:
        found, sessions = pictures(records.studies()), records.sessions()
    finally:
        records.close()
    if not found:
        raise ValueError(f"{out} has no finished epoch to report; train first: dmu paper adding")
    folder = Path(to) if to is not None else Path(out) / "report"
    files: list[Path] = []
    sections: dict[str, str] = {}
    for picture in found:
        drawn = figures.save(figures.draw(picture), folder / "figures", picture.name)
        sections[picture.name] = section(picture, drawn["svg"].read_bytes())
        files += drawn.values()
    report = Report(folder / "index.html", folder / "synthetic.md", files, found)
    report.page.write_text(document(sections, report, machines(sessions)), encoding="utf-8")
    command = shlex.join(["dmu", "report", "--out", str(out), *(["--to", str(to)] if to is not None else [])])
    report.markdown.write_text(markdown.document(found, machines(sessions), command), encoding="utf-8")
    return report


def document(sections: dict[str, str], report: Report, computed_on: list[str]) -> str:
    """The whole page."""
    data = json.dumps(report.as_data()).replace("</", "<\\/")
    main = "".join(sections[picture.name] for picture in report.pictures if not picture.variant)
    variants = "".join(sections[picture.name] for picture in report.pictures if picture.variant)
    items = "".join(f"<li>{escape(text)}</li>" for text in computed_on)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Deep Memory Update: the synthetic tasks, paper and ours</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Deep Memory Update: the synthetic tasks, paper and ours</h1>
<p>The paper counts, for five thresholds of the validation loss, how many of {paper.RUNS} runs have got under the
threshold by each epoch (<a href="https://arxiv.org/abs/2105.14092">arXiv 2105.14092</a>). Its figures
carry no numbers, so what its text says of them is checked here.</p>
<p>{escape(agreement(report.pictures))}</p>
{main}
<h2>Other readings</h2>
<p>What the paper leaves open, read in both ways.</p>
{"".join(comparison_part(comparison, report.pictures) for comparison in compare_readings(report.pictures))}
{variants}
<h2>How a statement is decided</h2>
<ul class="note">{"".join(f"<li>{escape(text)}</li>" for text in rules_in_words())}</ul>
<h2>Where the numbers come from</h2>
<p class="note">Training took {minutes(report.pictures)}, all studies together.</p>
<ul class="note">{items}</ul>
<script type="application/json" id="report-data">{data}</script>
</body>
</html>
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
    from deepmemory.lab.network import weight_count
    from deepmemory.lab.tasks import task_of

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
