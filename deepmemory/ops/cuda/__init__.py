"""Fused loops over time for NVIDIA GPUs, in Triton."""

from __future__ import annotations


def unavailable() -> str | None:
    """Why this engine cannot run on this machine at all, or None."""
    return "not built yet"
