"""Statements of the paper checked against records: what was seen, and whether it agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepmemory.lab import paper
from deepmemory.lab.paper import Claim, TableClaim
from deepmemory.lab.report import words
from deepmemory.lab.report.table import Mark


class Rule(NamedTuple):
    """How a kind of statement is decided: in words for the report, and as a function that returns (agrees, seen)."""

    words: str
    decide: Callable[..., tuple[bool | None, str]]

    @classmethod
    def of(cls, decide: Callable[..., tuple[bool | None, str]]) -> Rule:
        """The rule that a function applies and its docstring describes."""
        text = str(decide.__doc__)
        return cls(text[0].lower() + text[1:].rstrip("."), decide)


@dataclass(frozen=True)
class Verdict:
    """One statement of the paper beside what the records say."""

    claim: Claim | TableClaim
    seen: str
    agrees: bool | None  # None if it cannot be decided
    runs: int = 0  # of the cell with the fewest
    missing: tuple[str, ...] = ()  # cells of the statement that were not run and may still change the verdict
    in_paper: bool | None = None  # whether it holds in the paper's own table; None if the paper has a figure

    @property
    def decided(self) -> bool:
        """Whether it could be decided and every cell that it needs was run."""
        return self.agrees is not None and not self.missing

    @property
    def mark(self) -> Mark:
        """The verdict in a word, marked as a hint if there are few runs."""
        word = {True: "agrees", False: "differs", None: "open"}[self.agrees]
        if self.missing:
            word += f" so far, {words.listed([words.cell_title(cell) for cell in self.missing])} not run"
        enough = paper.RUNS if self.in_paper is None else paper.REAL_RUNS
        return words.with_hint(word, self.agrees, self.runs, enough)

    def as_data(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return {"claim": self.claim.text, "seen": self.seen, "agrees": self.agrees, "runs": self.runs}


def rules_in_words(rules: Mapping[str, Rule], claims: Iterable[Claim | TableClaim]) -> list[str]:
    """Every rule with the statements that it decides."""
    by_rule: dict[str, dict[str, None]] = {name: {} for name in rules}
    for claim in claims:
        by_rule[claim.check][f"“{claim.text}”"] = None
    return [f"{'; '.join(texts)}: {rules[name].words}." for name, texts in by_rule.items() if texts]
