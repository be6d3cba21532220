"""Released networks: the weights of one run in half precision and everything needed to use them, in one file.

The file may come from somebody else. Loading it runs no code, and its sha256 is checked before anything uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.records.checkpoints import read_signed, signed_bytes, write_whole
from deepmemory.lab.records.errors import MALFORMED, RecordsError, shown
from deepmemory.lab.settings import Setting, setting_from_json

RELEASE_FORMAT = "release 1"


@dataclass(frozen=True)
class Release:
    """The contents of a released network's file."""

    weights: dict[str, Tensor]  # float16
    setting: Setting
    seed: int  # of the run
    words: dict[str, tuple[str, ...]]  # vocabularies, by their names in the task
    made: dict[str, Any]  # how it was made: command, data, scores, versions


def save_release(path: Path, release: Release) -> None:
    """Write a released network atomically."""
    for name, weight in release.weights.items():
        if weight.dtype != torch.float16 or not weight.isfinite().all():
            raise ValueError(f"{name} does not fit into half precision")
    noted = {
        "format": RELEASE_FORMAT,
        "setting": release.setting.to_json(),
        "seed": str(release.seed),
        "words": json.dumps({name: " ".join(words) for name, words in release.words.items()}),
        "made": json.dumps(release.made),
    }
    write_whole(path, signed_bytes(release.weights, noted))


def load_release(path: Path) -> Release:
    """Read a released network; raise if it is missing, damaged or of another kind."""
    from safetensors import SafetensorError

    try:
        weights, noted = read_signed(path, RELEASE_FORMAT)
        return Release(
            weights,
            setting_from_json(noted["setting"]),
            int(noted["seed"]),
            {name: vocabulary(words) for name, words in json.loads(noted["words"]).items()},
            dict(json.loads(noted["made"])),
        )
    except FileNotFoundError:
        raise unusable(path, "there is no such file") from None
    except (OSError, SafetensorError, RuntimeError, *MALFORMED) as error:
        raise unusable(path, next(iter(str(error).splitlines()), type(error).__name__)) from error


def vocabulary(words: str) -> tuple[str, ...]:
    """The words of a vocabulary; raise if a terminal cannot show them."""
    if not words.isprintable():
        raise ValueError(f"a vocabulary has characters that cannot be shown: {shown(words)}")
    return tuple(words.split(" "))


def unusable(path: Path, reason: str) -> RecordsError:
    """The error for a file that cannot be used."""
    return RecordsError(
        f"{path} cannot be used as a released network: {reason}. It was not loaded. If it came with deepmemory, "
        "reinstall deepmemory; otherwise make it again with dmu release"
    )


def is_release(path: Path) -> bool:
    """Whether a file claims to be a released network; false if it cannot be read."""
    return header_notes(path).get("format") == RELEASE_FORMAT


def header_notes(path: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file; empty if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError):
        return {}
