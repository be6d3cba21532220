"""Unpacks gzip and zip files in memory, with a limit on the size of the result."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import PurePosixPath

from deepmemory.lab.data.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"


def inflate(packed: bytes | memoryview, limit: int, wbits: int = zlib.MAX_WBITS) -> tuple[bytes, bytes]:
    """The contents of one complete zlib stream, at most ``limit`` bytes, and the bytes after it."""
    stream = zlib.decompressobj(wbits)
    try:
        contents = stream.decompress(packed, limit + 1)
    except zlib.error as error:
        raise DataError(f"damaged compressed data ({error})") from None
    if len(contents) > limit:
        raise DataError(f"the compressed data unpacks to more than the expected {limit} bytes")
    if not stream.eof:
        raise DataError("the compressed data ends too early")
    return contents, stream.unused_data


def gunzip_if_packed(raw: bytes, limit: int) -> bytes:
    """The contents of a gzip file; anything else unchanged."""
    if not raw.startswith(GZIP_MAGIC):
        return raw
    contents, rest = inflate(raw, limit, 16 + zlib.MAX_WBITS)
    if rest:
        raise DataError("there are bytes after the compressed data")
    return contents


def zip_member(raw: bytes, member: str, limit: int) -> bytes:
    """The one file of that name in a zip archive, in any folder.

    Nothing is written to disk; an archive with a name that leads out of its folder is refused nevertheless.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
            for entry in entries:
                if leads_outside(entry.filename):
                    raise DataError(f"the archive holds {entry.filename!r}, a name that leads out of its folder")
            found = [entry for entry in entries if PurePosixPath(entry.filename).name == member and not entry.is_dir()]
            if len(found) != 1:
                raise DataError(f"the archive should hold one {member}, got {len(found)}")
            (entry,) = found
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"{member} is compressed with an unsupported method ({entry.compress_type})")
            if entry.file_size > limit:
                raise DataError(f"{member} has {entry.file_size} bytes, at most {limit} are expected")
            with archive.open(entry) as file:
                contents = file.read(limit + 1)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, OverflowError) as error:
        raise DataError(f"not a whole zip archive ({error})") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"not a whole zip archive ({error})") from None
    if len(contents) > limit:
        raise DataError(f"{member} unpacks to more than the expected {limit} bytes")
    return contents


def leads_outside(name: str) -> bool:
    """Whether unpacking a file of that name could write outside the target folder."""
    parts = name.replace("\\", "/").split("/")
    return parts[0] == "" or ".." in parts or ":" in parts[0] or "\0" in name
