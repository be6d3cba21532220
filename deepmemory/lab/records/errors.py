"""What may be wrong with records and checkpoints, and how much of a foreign value an error message shows."""

from __future__ import annotations

import zlib


class RecordsError(ValueError):
    """Records or a checkpoint that are damaged, of another kind, or cannot be written."""


# Raised by reading a well-formed file whose values are not of the kind that the lab writes.
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError, zlib.error)


def shown(value: object) -> str:
    """A value from a file, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
