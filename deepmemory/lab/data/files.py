"""Finds and reads local copies of files, and refuses those that differ from the registry."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from deepmemory.lab.data.errors import DataError, MissingData
from deepmemory.lab.data.registry import File
from deepmemory.lab.data.unpacking import gunzip_if_packed, zip_member

VARIABLE = "DEEPMEMORY_DATA"
LARGEST = 2**26  # bytes read or fetched if the registry has no size: twice what is expected


def cache_folder() -> Path | None:
    """The folder of downloaded files, with the layout of any data folder; None without pooch."""
    try:
        import pooch
    except ModuleNotFoundError:
        return None
    return Path(pooch.os_cache("deepmemory"))


def data_folder(data: Path | str | None = None) -> Path | None:
    """The folder of local copies: the one given, else ``$DEEPMEMORY_DATA``, else None."""
    named = data or os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"no data folder {folder} (given as --data or ${VARIABLE})")
    return folder


def folders(data: Path | str | None = None) -> list[Path]:
    """The folders that are searched for data, in order."""
    return [folder for folder in (data_folder(data), cache_folder()) if folder is not None]


def find(file: File, data: Path | str | None = None) -> Path | None:
    """The path of the first copy of a file, unchecked; None if there is none."""
    for folder in folders(data):
        for name in file.names:
            if (folder / name).is_file():
                return folder / name
    return None


def read(file: File, data: Path | str | None = None) -> bytes:
    """The contents of a file, unpacked and checked."""
    path = find(file, data)
    if path is None:
        looked = ", ".join(map(str, folders(data))) or f"no folder (${VARIABLE} is not set, pooch is not installed)"
        raise MissingData(
            f"{file.path} is not here; looked in {looked}. "
            f"Run: dmu data fetch {file.dataset}, or point --data or ${VARIABLE} at a folder that holds it"
        )
    return read_copy(file, path)


def read_copy(file: File, path: Path) -> bytes:
    """The contents of one copy, unpacked and checked."""
    limit = file.expected_size or LARGEST
    if path.stat().st_size > 2 * limit + 2**20:  # room for other members of an archive
        raise _wrong(path, file, "far too large", digest_of(path), file.sha256)
    raw = path.read_bytes()
    recorded = recorded_digest(file, path)
    if recorded and (got := hashlib.sha256(raw).hexdigest()) != recorded:
        raise _wrong(path, file, "not the file that was recorded", got, recorded)
    try:
        contents = zip_member(raw, file.member, limit) if file.member else gunzip_if_packed(raw, limit)
    except DataError as error:
        raise _wrong(path, file, str(error), hashlib.sha256(raw).hexdigest(), recorded or file.sha256) from None
    if file.expected and (got := hashlib.sha256(contents).hexdigest()) != file.expected:
        what = f"{file.member} in it is not the one expected" if file.member else "not the contents expected"
        raise _wrong(path, file, what, got, file.expected)
    return contents


def digest_of(path: Path) -> str:
    """The sha256 of a file of any size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_path(path: Path) -> Path:
    """The file with the hash of a data file that has none in the registry; ``sha256sum -c`` reads it."""
    return path.with_name(f"{path.name}.sha256")


def recorded_digest(file: File, path: Path) -> str | None:
    """The hash that was recorded when the file was fetched, for a file without one in the registry."""
    if file.sha256 is not None or not record_path(path).is_file():
        return None
    words = record_path(path).read_text(encoding="ascii", errors="replace").split()
    if not words or len(words[0]) != 64:
        raise DataError(f"{record_path(path)} holds no sha256; delete it to record the file that is there")
    return words[0].lower()


def _wrong(path: Path, file: File, what: str, got: str, expected: str | None) -> DataError:
    return DataError(
        f"{path}: {what}; sha256 {got}, expected {expected or 'unknown'}. It is not used: the file is damaged or of "
        f"another release. Move it away and run: dmu data fetch {file.dataset}"
    )
