"""Words and their numbers, the same on every machine."""

from __future__ import annotations

from collections import Counter


def in_order(counts: Counter[str]) -> list[str]:
    """The most frequent word first; of equally frequent ones, the one with the smaller code points."""
    return sorted(counts, key=lambda word: (-counts[word], word))
