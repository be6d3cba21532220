"""Safe writing into folders that may come from somebody else: names are never paths, and links are not followed."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")  # no capitals: some file systems do not distinguish them
ABANDONED = 3600.0  # age in seconds from which on no process is taken to be writing a partial file
LONGEST = 120  # characters of a name; file systems allow 255 bytes, and dots and endings are added


class LinkError(ValueError):
    """The lab would write through a link, which may lead anywhere."""


def file_name(text: str) -> str:
    """A valid file name for any text: plain names stay as they are, and different texts have different names.

    >>> file_name("adding-dmu-0123456789ab")
    'adding-dmu-0123456789ab'
    >>> file_name("../../x")
    '_.._x~9cdf6a50100a862e14286c7a334296da'
    """
    cleaned = "".join(c if c in PLAIN else "_" for c in text[: LONGEST + 1])
    if cleaned == text and len(text) <= LONGEST and text and not text.startswith("."):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{cleaned[: LONGEST - 33].lstrip('.')}~{digest}"  # no plain name has a ~


def without_links(root: Path, *names: str) -> Path:
    """A path under a folder, after checking that no part of it below the folder is a link."""
    path = root
    for name in names:
        path = path / name
        if path.is_symlink():
            raise LinkError(
                f"{path} is a link, and files written there would end up elsewhere; replace it by a folder or file "
                f"of its own, or choose another folder than {root}"
            )
    return path


def put(path: Path, data: bytes, lasting: bool = False) -> None:
    """Write a file atomically, even if several processes write it; a link of that name is replaced, not followed.

    ``lasting`` waits until the file would survive a power failure.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):  # by processes that were killed
        with suppress(FileNotFoundError):  # another process may have removed it
            if left == partial or time.time() - left.lstat().st_mtime > ABANDONED:
                left.unlink()
    try:
        with open(partial, "xb") as file:  # never through a link
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    if lasting:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file in place, such as a lock file; symbolic and hard links are refused."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    without_links(path.parent, path.name)
    file = open(path, mode, buffering, opener=opener)  # noqa: SIM115 (the caller closes it)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise LinkError(f"{path} is a hard link: another file would be written to; remove it")
    return file
