"""Lists and checks the datasets on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from deepmemory.lab.data import files
from deepmemory.lab.data.digits import load_digits
from deepmemory.lab.data.errors import DataError, MissingData
from deepmemory.lab.data.music import load_music
from deepmemory.lab.data.pairs import SPECIAL, load_pairs
from deepmemory.lab.data.registry import DATASETS, Dataset, File, dataset
from deepmemory.lab.data.text import load_text


@dataclass(frozen=True)
class Finding:
    """The outcome of a check or a fetch."""

    name: str
    state: str  # good; unverified: readable, but without a hash to compare with; missing; damaged; failed
    text: str  # counts, or what is wrong


def chosen(names: list[str] | None) -> list[Dataset]:
    """The datasets of these names, or all."""
    return [dataset(name) for name in names or DATASETS]


def where(entry: Dataset, data: Path | str | None = None) -> str:
    """The folders of a dataset's files; an empty string if a file is missing."""
    found = [files.find(file, data) for file in entry.files]
    return "" if None in found else ", ".join(dict.fromkeys(str(path.parent) for path in found if path))


def size(entry: Dataset) -> str:
    """The size of the download, as text."""
    sizes = [file.size for file in entry.files if file.size is not None]
    return f"{sum(sizes) / 1e6:.1f} MB" if len(sizes) == len(entry.files) else "size unknown"


def host(address: str) -> str:
    """The machine that serves a file."""
    return urlsplit(address).netloc


def describe(entry: Dataset, data: Path | str | None = None) -> str:
    """A few lines about a dataset: where it is, what it holds, its licence and who serves it."""
    place = where(entry, data)
    known = "; ".join(f"{number:,} {what}" for what, number in entry.counts.items()) or "counts unknown"
    hashed = all(file.sha256 for file in entry.files)
    addresses = [address for file in entry.files for address in file.addresses]
    lines = [
        f"{entry.name}  ({entry.task}, {size(entry)})  {f'in {place}' if place else 'not here'}",
        f"  {entry.about}; {known}",
        f"  licence: {entry.licence}",
        f"  from {', '.join(dict.fromkeys(map(host, addresses)))}",
    ]
    return "\n".join(lines if hashed else [*lines, "  its sha256 is not known; the first fetch records it"])


def check(entry: Dataset, data: Path | str | None = None) -> Finding:
    """Read a dataset as its task would, and compare the counts with the registry."""
    try:
        counts = count(entry, data)
    except MissingData as error:
        return Finding(entry.name, "missing", str(error))
    except DataError as error:
        return Finding(entry.name, "damaged", str(error))
    text = "; ".join(f"{number:,} {what}" for what, number in counts.items())
    if entry.counts and counts != entry.counts:
        return Finding(entry.name, "damaged", f"counted {text}; expected {dict(entry.counts)}")
    verified = all(file.sha256 or _recorded(file, data) for file in entry.files)
    return Finding(entry.name, "good" if verified else "unverified", text)


def count(entry: Dataset, data: Path | str | None = None) -> dict[str, int]:
    """The counts of a dataset, as the registry lists them."""
    if entry.task == "polymusic":
        music = load_music(entry.name, data)
        pieces = {split: len(rolls) for split, rolls in music.items()}
        return pieces | {f"{split} frames": sum(map(len, rolls)) for split, rolls in music.items()}
    if entry.task == "natlang":
        text = load_text(data)
        return {"train": len(text.train), "valid": len(text.valid), "test": len(text.test), "words": len(text.words)}
    if entry.task == "translation":
        pairs = load_pairs(entry.name, None, data)
        return {
            "pairs": len(pairs.english.ids),
            "foreign words": len(pairs.foreign.words) - len(SPECIAL),
            "english words": len(pairs.english.words) - len(SPECIAL),
        }
    return {split: len(digits.labels) for split, digits in load_digits(data).items()}


def _recorded(file: File, data: Path | str | None) -> bool:
    path = files.find(file, data)
    return path is not None and files.recorded_digest(file, path) is not None
