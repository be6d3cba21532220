"""What may be wrong with data."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is damaged, of another kind than expected, or cannot be had; it is not used."""


class MissingData(DataError):
    """No copy is at hand; the message says how to get one."""
