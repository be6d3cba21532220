"""Blocks that several pages share: statements of the paper, settings, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepmemory.lab.paper import Reading
from deepmemory.lab.records import Study
from deepmemory.lab.report import words
from deepmemory.lab.report.blocks import Block, Details, Heading, Items, Text
from deepmemory.lab.report.results.claims import Verdict
from deepmemory.lab.report.table import Column, Mark, Table, number
from deepmemory.lab.settings import SHARED_RATE, Setting

Sessions = Mapping[int, Mapping[str, Any]]  # machine, versions and commit of each session, by its number


def statements_text(verdicts: Sequence[Verdict]) -> str:
    """How many statements of the paper hold."""
    hold, fail = sum(v.decided and bool(v.agrees) for v in verdicts), sum(v.agrees is False for v in verdicts)
    undecided = len(verdicts) - hold - fail
    texts = [f"{hold} {'holds' if hold == 1 else 'hold'} here", f"{fail} {'does' if fail == 1 else 'do'} not"]
    texts += [f"{undecided} cannot be decided with these records"] if undecided else []
    return f"Of {words.count(len(verdicts), 'statement')} of the paper about these tasks, {', '.join(texts)}."


def holding(verdicts: Iterable[Verdict]) -> str:
    """How many of the decided statements hold, for a cell of a table."""
    decided = [v.agrees for v in verdicts if v.decided]
    return f"{sum(map(bool, decided))} of {len(decided)}" if decided else words.NOTHING


def differences(verdicts: Sequence[tuple[str, Verdict]], note: str = "") -> list[Block]:
    """Statements that do not hold here, each given with the name of its task."""
    items = [
        f"{task}: the paper says “{v.claim.text}”; here {v.seen}."
        + (" It does not hold in the paper's own table either." if v.in_paper is False else "")
        for task, v in verdicts
        if v.agrees is False
    ]
    return [Text(f"Where it differs{note}:"), Items(items)] if items else []


def statements(verdicts: Sequence[Verdict]) -> list[Block]:
    """The paper's statements, whether its own table confirms them, and what was seen; undecided ones are folded."""
    holds = {True: Mark("holds", True), False: Mark("does not hold", False)}
    columns = [
        Column("the paper says", lambda v: words.joined(v.claim.text, getattr(v.claim, "note", ""), by=". ")),
        Column("here", lambda v: v.seen),
        Column("verdict", lambda v: v.mark),
    ]
    if any(v.in_paper is not None for v in verdicts):
        columns.append(Column("in its own table", lambda v: holds[v.in_paper], brief=False))
    decided, undecided = ([v for v in verdicts if (v.agrees is None) is unknown] for unknown in (False, True))
    summary = f"{words.count(len(undecided), 'statement')} of the paper that cannot be decided"
    return [*([Table(columns, decided)] if decided else []), *folded(summary, Table(columns, undecided))]


def folded(summary: str, table: Table) -> list[Block]:
    """A table behind one line; nothing if it has no rows."""
    return [Details(summary, [table])] if table.items else []


def readings(
    open_settings: Iterable[Reading], compare: Callable[[Reading], tuple[str, list[Block], list[Block]]]
) -> tuple[list[Block], list[Block]]:
    """Both readings of every open setting; readings that were not run are folded, with the commands that run them.

    ``compare`` returns what a reading is about, the tables of both values (none if the other was not run) and figures.
    """
    compared: list[Block] = []
    not_run: list[Block] = []
    for one in open_settings:
        title, (why, tables, drawn) = f"{one.name}: {' or '.join(one.labels)}", compare(one)
        if tables:
            folded = Details(f"Figures with the reading “{one.labels[1]}”", drawn)
            compared += [Heading(title), Text(why), *tables, folded]
        else:
            told = Text(f"{why} “{one.labels[1]}” was not run; this runs it: `{one.command}`")
            not_run += [Text(f"**{title}**"), told]
    return compared, [Details("Readings that were not run", not_run)] if not_run else []


def biases(settings: Iterable[Setting]) -> str:
    """A sentence for a figure's caption: the initial gate biases of its cells."""
    texts = [words.joined(words.cell_title(s.cell), bias, by=" ") for s in settings if (bias := words.initial_bias(s))]
    return f" Initial gate biases: {', '.join(dict.fromkeys(texts))}." if texts else ""


def settings_table(settings: Mapping[str, Setting], weights: Mapping[str, int] | None = None) -> Details:
    """The settings of some studies by name, folded."""

    def block(s: Setting) -> str:
        widths = dict.fromkeys(s.transition)
        layers = words.joined(words.count(len(s.transition), "hidden layer"), ", ".join(map(str, widths)), by=" of ")
        rate = {"formula": "lr / 2n", SHARED_RATE: "lr"}.get(s.module_rate, s.module_rate)
        further = {"dmu": f"{layers}; module rate {rate}", "rhn": f"depth {s.depth}"}.get(s.cell, "")
        return words.joined(f"state {', '.join(map(str, s.hidden))}", further, by="; ")

    columns = [
        Column("study", lambda item: item[0]),
        Column("recurrent block", lambda item: block(item[1])),
        Column("initial bias", lambda item: words.initial_bias(item[1]) or "none"),
        *([number("weights", lambda item: str(weights[item[0]]))] if weights else []),
        number("learning rate", lambda item: f"{item[1].lr:g}"),
        number("decay per epoch", lambda item: f"{item[1].gamma:g}"),
        number("weight decay", lambda item: f"{item[1].weight_decay:g}"),
        number("batch", lambda item: str(item[1].batch)),
        number("epochs at most", lambda item: str(item[1].epochs)),
        Column("key", lambda item: f"`{item[1].key}`"),
    ]
    return Details("Settings", [Table(columns, list(settings.items()))])


def machines(studies: Iterable[Study], sessions: Sessions) -> Items:
    """Machine, versions and commit of every session that trained these studies, each combination once."""
    used = [sessions[number] for number in {run.session for study in studies for run in study.runs}]
    seen: dict[str, str] = {}
    for session in sorted(used, key=lambda session: session["started"]):
        own = {name: value for name, value in session.items() if name != "started" and value is not None}
        if own.get("deepmemory") == "not installed":
            own["deepmemory"] = "from source"
        seen.setdefault(", ".join(f"{name} {value}" for name, value in own.items()), session["started"])
    return Items([f"from {started[:16].replace('T', ' ')} UTC: {text}" for text, started in seen.items()])
