"""Errors of data files."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is damaged, of another kind than expected, or cannot be fetched; it is not used."""


class MissingData(DataError):
    """There is no copy of a file on this machine; the message says how to get one."""
