"""The report's tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD

from deepmemory.lab.report.cells import cell_name, difference, mean, runs_in_words
from deepmemory.lab.report.claims import table_verdicts
from deepmemory.lab.report.real import about
from deepmemory.lab.report.scores import Account, outcome, part_name
from deepmemory.lab.report.tables import Picture, count_texts, row, verdicts
from deepmemory.lab.settings import THRESHOLDS, threshold_label

COMPACT: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
WORDS = {True: "agrees", False: "differs", None: "open"}


def print_report(pictures: Sequence[Picture | Account]) -> None:
    """Numbers and claims of what was recorded, the paper's and ours."""
    from rich.console import Console

    console = Console()
    told = [one for one in pictures if isinstance(one, Account)]
    for picture in pictures:
        if isinstance(picture, Account):
            print_account(console, picture)
        else:
            print_picture(console, picture)
    decided = [v for v in table_verdicts(told) if v.agrees is not None]
    if decided:
        print_claims(console, [(f"{about(v)}: {v.claim.text}", v.seen, v.agrees) for v in decided])


def print_picture(console: Any, picture: Picture) -> None:
    """Counts and claims of a synthetic task."""
    from rich.table import Table

    counts = Table(title=f"{picture.title}: runs under each threshold (median epoch)", title_justify="left")
    counts.add_column("cell")
    for threshold in THRESHOLDS:
        counts.add_column(threshold_label(threshold), justify="right")
    for study in picture.studies.values():
        counts.add_row(study.setting.cell.upper(), *count_texts(row(study)))
    console.print(counts)
    print_claims(console, [(v.claim.text, v.seen, v.agrees) for v in verdicts(picture)])


def print_claims(console: Any, claims: Sequence[tuple[str, str, bool | None]]) -> None:
    """What the paper says and what was seen."""
    from rich.table import Table

    table = Table("paper", "here", "agreement")
    for text, seen, agrees in claims:
        table.add_row(text, seen, WORDS[agrees])
    console.print(table)


def print_account(console: Any, account: Account) -> None:
    """Rows of the paper's tables that were run, then studies with other settings, without the paper's numbers."""
    from rich.table import Table

    for board in account.boards:
        rows = [line for line in board.lines if line.ours]
        if not rows:
            continue
        table = Table(title=f"{board.title}; test, mean ± deviation", title_justify="left", **COMPACT)
        for head in ("cell", "units" if board.task == "pixel-mnist" else "depth"):
            table.add_column(head, no_wrap=True)
        for head in ("paper", "ours", "diff", "runs"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for line in rows:
            size = " ".join(filter(None, (str(line.place.size), part_name(line.place.part))))
            numbers = (mean(line.test, board), mean(line.our_test, board), difference(line))
            table.add_row(cell_name(line), size, *numbers, runs_in_words(line.outcome), line.verdict)
        console.print(table)
    other = [one for one in account.trained if not one.is_papers]
    if other:
        board = account.boards[0]
        title = f"{board.title}; other settings, not to be compared with the paper"
        table = Table("study", "changed", "test", "runs", title=title, title_justify="left", **COMPACT)
        for one in other:
            of = outcome(one, board.measure)
            table.add_row(one.place.words, one.words, mean(of.test, board), runs_in_words(of))
        console.print(table)
