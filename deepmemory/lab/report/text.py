"""The report's tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from deepmemory.lab.report.tables import Picture, count_texts, row, verdicts
from deepmemory.lab.settings import THRESHOLDS, threshold_label

WORDS = {True: "agrees", False: "differs", None: "open"}


def print_report(pictures: Sequence[Picture]) -> None:
    """Counts and claims of each picture."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for picture in pictures:
        counts = Table(title=f"{picture.title}: runs under each threshold (median epoch)", title_justify="left")
        counts.add_column("cell")
        for threshold in THRESHOLDS:
            counts.add_column(threshold_label(threshold), justify="right")
        for study in picture.studies.values():
            counts.add_row(
                study.setting.cell.upper(),
                *count_texts(row(study)),
            )
        console.print(counts)
        claims = Table("paper", "here", "agreement")
        for verdict in verdicts(picture):
            claims.add_row(verdict.claim.text, verdict.seen, WORDS[verdict.agrees])
        console.print(claims)
