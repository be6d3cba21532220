"""The order of words in a vocabulary, the same on every machine."""

from __future__ import annotations

from collections import Counter


def in_order(counts: Counter[str]) -> list[str]:
    """Words by frequency, most frequent first, then by code points."""
    return sorted(counts, key=lambda word: (-counts[word], word))
