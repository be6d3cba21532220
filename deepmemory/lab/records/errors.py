"""Errors of records and checkpoints, and how their messages show values from a file."""

from __future__ import annotations

import zlib


class RecordsError(ValueError):
    """Records or a checkpoint are damaged, of another kind, or cannot be written."""


# Errors from reading a well-formed file whose values are not such as the lab writes.
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError, zlib.error)


def shown(value: object) -> str:
    """A value from a file, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
