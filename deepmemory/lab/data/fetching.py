"""Downloads files with pooch: checked, written atomically, and resumed if interrupted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepmemory.lab.data import files
from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.inventory import Finding
from deepmemory.lab.data.registry import Dataset, File
from deepmemory.lab.data.unpacking import zip_member
from deepmemory.lab.writing import open_own, put, without_links

CHUNK = 2**16  # bytes read at a time
TIMEOUT = 30  # seconds without a byte

NEEDS_POOCH = "fetching data needs pooch: pip install deepmemory[lab]"
RECORDED = " (the registry has none; recorded beside the file)"

Progress = Callable[[int, int | None], None]  # called with the bytes so far, and the total if it is known


def fetch(file: File, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """Download a file into a data folder, unless it is there, from the first address that serves the right one.

    Until it is complete and checked, a download is in ``.NAME.part``, from which the next call resumes.
    """
    from filelock import FileLock

    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(without_links(path.parent, f".{path.name}.lock")):  # another process may fetch the same file
        expected = file.sha256 or files.recorded_digest(file, path)
        if not (path.is_file() and expected and files.digest_of(path) == expected):
            _retrieve(file, path, expected, progress)
        if file.sha256 is None and expected is None:
            put(files.record_path(path), f"{files.digest_of(path)}  {path.name}\n".encode())
    return path


def fetch_missing(entry: Dataset, data: Path | str | None = None, bar: bool = True) -> Iterator[Finding]:
    """Fetch the missing files of a dataset into the user's cache, and yield the outcome for each."""
    cache = files.cache_folder()
    if cache is None:
        raise ModuleNotFoundError(NEEDS_POOCH)
    for file in entry.files:
        try:
            path = files.find(file, data)
            if path is not None and not path.is_relative_to(cache):
                files.read_copy(file, path)
                yield Finding(entry.name, "good", f"{path} is here")
                continue
            with progress_bar(file.path, bar) as progress:
                path = fetch(file, cache, progress)
            told = f"{path}, sha256 {files.digest_of(path)}"
            yield Finding(entry.name, "good", told if file.sha256 else told + RECORDED)
        except DataError as error:
            yield Finding(entry.name, "failed", str(error))


@contextmanager
def progress_bar(title: str, wanted: bool) -> Iterator[Progress]:
    """A progress bar, if ``wanted`` and the output is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _retrieve(file: File, path: Path, expected: str | None, progress: Progress) -> None:
    try:
        import pooch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(NEEDS_POOCH) from None

    pooch.get_logger().setLevel(logging.WARNING)
    if expected is None and path.is_file():  # put there by hand: accepted, and recorded, if it can be read
        files.read_copy(file, path)
        return
    failures = []
    for address in file.addresses:
        download = Download(file, path.with_name(f".{path.name}.part"), progress)
        for _ in range(2):  # a part that cannot be resumed, or turns out wrong, is fetched again from its start
            try:
                pooch.retrieve(address, expected, path.name, path.parent, downloader=download)
                return
            except (OSError, ValueError) as error:  # no connection, an error page; another file than expected
                failures.append(f"{address}: {error}")
                if not download.resumed or download.part.is_file():
                    break
    reasons = "\n  ".join(failures)
    raise DataError(f"{file.path} could not be fetched:\n  {reasons}\nPut a copy from elsewhere into {path.parent}")


class Download:
    """The downloader that pooch calls: resumes from a partial file, if the server supports that."""

    def __init__(self, file: File, part: Path, progress: Progress) -> None:
        self.file, self.part, self.progress = file, part, progress
        self.limit = file.size or files.LARGEST
        self.resumed = False  # whether the last call found a partial file

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Download to the partial file and, once that is complete, move it to where pooch checks it."""
        from pooch import HTTPDownloader

        if self.file.sha256 is None or self.part.is_symlink():
            self.part.unlink(missing_ok=True)  # without a hash, two halves of different releases would go unnoticed
        self.start = self.part.stat().st_size if self.part.is_file() else 0
        self.resumed = self.start > 0
        try:
            with open_own(self.part, "ab") as self.stream:
                if self.start < self.limit:
                    headers = {"User-Agent": "deepmemory", "Accept-Encoding": "identity"}  # a range of the file itself
                    if self.start:
                        headers["Range"] = f"bytes={self.start}-"
                    download = HTTPDownloader(
                        chunk_size=CHUNK, timeout=TIMEOUT, headers=headers, hooks={"response": self.see_answer}
                    )
                    download(url, self, pooch)
        finally:
            if not self.part.stat().st_size:
                self.part.unlink()
        size = self.part.stat().st_size
        if self.file.size is not None and size < self.file.size:
            raise OSError(f"only {size} of {self.file.size} bytes were received; the next try resumes from there")
        if self.file.sha256 is None and self.file.member:
            zip_member(self.part.read_bytes(), self.file.member, files.LARGEST)  # refuses an error page
        os.replace(self.part, output_file)

    def see_answer(self, answer: Any, **_: Any) -> None:
        """Start over if the server sends the whole file although only the rest was requested."""
        offered = answer.headers.get("Content-Range", "")
        rest = answer.status_code == 206 and offered.startswith(f"bytes {self.start}-")
        if self.start and (answer.ok or answer.status_code == 416) and not answer.is_redirect and not rest:
            self.begin_again()
            if answer.status_code != 200:
                raise OSError(f"asked for the rest of the file, but the server sent {answer.status_code} {offered}")

    def begin_again(self) -> None:
        """Empty the partial file."""
        self.stream.seek(0)
        self.stream.truncate()
        self.start = 0

    def write(self, chunk: bytes) -> None:
        """Write bytes that pooch received."""
        done = self.stream.tell() + len(chunk)
        if done > self.limit:
            self.begin_again()
            raise DataError(f"more than {self.limit} bytes were received: not the expected file")
        self.stream.write(chunk)
        self.progress(done, self.file.size)

    def flush(self) -> None:
        """Write buffered bytes to the file, so that they survive if the process is killed."""
        self.stream.flush()
