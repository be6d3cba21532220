"""Fetching from a server on this machine: whole or not at all, resumed, checked, and from a mirror if need be."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lab.data import making
from lab.data.making import digest, served

from deepmemory.lab.data import DATASETS, DataError, files
from deepmemory.lab.data.fetching import fetch, fetch_missing

BODY = bytes(range(256)) * 1000
NOTTINGHAM = DATASETS["nottingham"].files[0]
PORTUGUESE = DATASETS["portuguese"].files[0]


class Pages:
    """What the server has and does, and what it was asked."""

    def __init__(self):
        self.bodies = {}  # by path
        self.cut = {}  # by path: the connection breaks after so many bytes, once
        self.ranges = True  # False: sends the whole file whatever was asked
        self.refuses_ranges = False  # True: 416
        self.asked = []  # (path, the range asked for)
        self.address = ""

    def at(self, *paths):
        return tuple(self.address + path for path in paths)


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Pages()) as pages:
        yield pages


@contextmanager
def serving(pages):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            pages.asked.append((self.path, wanted))
            assert self.headers["Accept-Encoding"] == "identity"
            body = pages.bodies.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            if wanted and pages.refuses_ranges:
                self.send_error(416)
                return
            if wanted and pages.ranges:
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                body = body[start:]
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: pages.cut.pop(self.path, None)])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pages.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield pages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def names(folder):
    """Everything in a folder but locks."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_file_comes_checked_and_a_good_copy_is_left_alone(pages, tmp_path):
    pages.bodies["/a"] = BODY
    told = []
    file = served(NOTTINGHAM, BODY, pages.at("/a"))
    path = fetch(file, tmp_path, lambda done, total: told.append((done, total)))
    assert path == tmp_path / "polymusic/Nottingham.mat"
    assert path.read_bytes() == BODY
    assert names(tmp_path) == ["Nottingham.mat"]
    assert told[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    fetch(file, tmp_path)
    assert pages.asked == [("/a", None)]


def test_a_damaged_copy_is_replaced(pages, tmp_path):
    pages.bodies["/a"] = BODY
    making.place(tmp_path, {NOTTINGHAM.path: BODY[:-1] + b"?"})
    assert fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path).read_bytes() == BODY


def test_another_file_than_expected_is_refused_with_both_hashes(pages, tmp_path):
    other = BODY[:-1] + b"?"
    pages.bodies["/a"] = other
    with pytest.raises(DataError, match=f"expected {digest(BODY)} but got {digest(other)}"):
        fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path)
    assert names(tmp_path) == []
    assert len(pages.asked) == 1


def test_a_wrong_file_does_not_replace_what_was_there(pages, tmp_path):
    pages.bodies["/a"] = BODY[::-1]
    making.place(tmp_path, {NOTTINGHAM.path: b"damaged"})
    with pytest.raises(DataError, match="expected"):
        fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path)
    assert (tmp_path / NOTTINGHAM.path).read_bytes() == b"damaged"


def test_more_than_expected_is_not_even_stored(pages, tmp_path):
    pages.bodies["/a"] = BODY * 2
    with pytest.raises(DataError, match=f"more than {len(BODY)} bytes were received: not the expected file"):
        fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path)
    assert names(tmp_path) == []


def interrupt(pages, tmp_path, file):
    pages.bodies["/a"] = BODY
    pages.cut["/a"] = 150_000
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(file, tmp_path)
    assert names(tmp_path) == [".Nottingham.mat.part"]  # nothing under the final name
    size = (tmp_path / "polymusic/.Nottingham.mat.part").stat().st_size
    assert 0 < size <= 150_000
    return size


def test_an_interrupted_download_is_resumed(pages, tmp_path):
    file = served(NOTTINGHAM, BODY, pages.at("/a"))
    size = interrupt(pages, tmp_path, file)
    told = []
    assert fetch(file, tmp_path, lambda done, total: told.append(done)).read_bytes() == BODY
    assert pages.asked == [("/a", None), ("/a", f"bytes={size}-")]
    assert told[0] > size
    assert names(tmp_path) == ["Nottingham.mat"]


def test_a_download_stopped_by_hand_is_resumed(pages, tmp_path):
    pages.bodies["/a"] = BODY
    file = served(NOTTINGHAM, BODY, pages.at("/a"))

    def stop(done, total):
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(file, tmp_path, stop)
    assert names(tmp_path) == [".Nottingham.mat.part"]
    assert fetch(file, tmp_path).read_bytes() == BODY
    assert pages.asked[1][1].startswith("bytes=")


def test_a_server_without_ranges_is_listened_to_from_the_start(pages, tmp_path):
    file = served(NOTTINGHAM, BODY, pages.at("/a"))
    interrupt(pages, tmp_path, file)
    pages.ranges = False
    assert fetch(file, tmp_path).read_bytes() == BODY
    assert len(pages.asked) == 2


def test_a_server_that_refuses_ranges_is_asked_again(pages, tmp_path):
    file = served(NOTTINGHAM, BODY, pages.at("/a"))
    interrupt(pages, tmp_path, file)
    pages.refuses_ranges = True
    assert fetch(file, tmp_path).read_bytes() == BODY
    assert [wanted is None for _, wanted in pages.asked] == [True, False, True]


@pytest.mark.parametrize("size", [1000, len(BODY), len(BODY) + 1])
def test_a_part_of_another_file_is_given_up(pages, tmp_path, size):
    pages.bodies["/a"] = BODY
    part = "polymusic/.Nottingham.mat.part"
    making.place(tmp_path, {part: b"x" * size})
    assert fetch(served(NOTTINGHAM, BODY, pages.at("/a")), tmp_path).read_bytes() == BODY
    assert names(tmp_path) == ["Nottingham.mat"]


def test_a_part_that_is_whole_needs_no_server(tmp_path):
    making.place(tmp_path, {"polymusic/.Nottingham.mat.part": BODY})
    assert fetch(served(NOTTINGHAM, BODY), tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("first", ["/missing", "/wrong", "/cut"])
def test_a_mirror_is_used_when_the_first_address_fails(pages, tmp_path, first):
    pages.bodies |= {"/wrong": BODY[::-1], "/cut": BODY, "/mirror": BODY}
    pages.cut["/cut"] = 100_000
    assert fetch(served(NOTTINGHAM, BODY, pages.at(first, "/mirror")), tmp_path).read_bytes() == BODY
    assert [path for path, _ in pages.asked] == [first, "/mirror"]
    assert (pages.asked[1][1] is None) == (first != "/cut")  # the mirror goes on where the other stopped


def test_every_failure_is_told(pages, tmp_path):
    addresses = (*pages.at("/a", "/b"), "http://127.0.0.1:9/nothing")
    with pytest.raises(DataError) as error:
        fetch(served(NOTTINGHAM, BODY, addresses), tmp_path)
    assert all(address in str(error.value) for address in addresses)
    assert "404" in str(error.value)
    assert names(tmp_path) == []


def test_two_at_once_fetch_once(pages, tmp_path):
    pages.bodies["/a"] = BODY
    file = served(NOTTINGHAM, BODY, pages.at("/a"))
    threads = [threading.Thread(target=fetch, args=(file, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / NOTTINGHAM.path).read_bytes() == BODY
    assert len(pages.asked) == 1


def of_unknown_hash(addresses):
    from dataclasses import replace

    return replace(PORTUGUESE, addresses=addresses)


def test_an_unknown_hash_is_recorded_at_the_first_fetch_and_holds_from_then_on(pages, tmp_path):
    archive = making.zipped({"por.txt": making.PAIRS})
    pages.bodies["/p"] = archive
    file = of_unknown_hash(pages.at("/p"))
    path = fetch(file, tmp_path)
    assert files.record_path(path).read_text() == f"{digest(archive)}  por-eng.zip\n"
    fetch(file, tmp_path)
    assert len(pages.asked) == 1

    path.write_bytes(archive[:-1])
    pages.bodies["/p"] = making.zipped({"por.txt": making.PAIRS * 2})  # a new release
    with pytest.raises(DataError, match=f"expected {digest(archive)} but got"):
        fetch(file, tmp_path)
    pages.bodies["/p"] = archive
    assert fetch(file, tmp_path).read_bytes() == archive


def test_of_an_unknown_hash_halves_are_never_joined_and_an_error_page_is_no_archive(pages, tmp_path):
    making.place(tmp_path, {"translation/.por-eng.zip.part": b"old"})
    pages.bodies["/p"] = b"<html>moved</html>"
    with pytest.raises(DataError, match="not a whole zip archive"):
        fetch(of_unknown_hash(pages.at("/p")), tmp_path)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == []
    pages.bodies["/p"] = making.zipped({"por.txt": making.PAIRS})
    assert fetch(of_unknown_hash(pages.at("/p")), tmp_path).read_bytes() == pages.bodies["/p"]
    assert {wanted for _, wanted in pages.asked} == {None}


def test_a_copy_put_there_by_hand_is_recorded_if_it_reads_well(tmp_path):
    archive = making.zipped({"por-eng/por.txt": making.PAIRS})
    making.place(tmp_path, {PORTUGUESE.path: archive})
    path = fetch(of_unknown_hash(()), tmp_path)
    assert digest(archive) in files.record_path(path).read_text()
    files.record_path(path).unlink()
    path.write_bytes(b"garbage")
    with pytest.raises(DataError, match="not a whole zip archive"):
        fetch(of_unknown_hash(()), tmp_path)


def test_only_what_is_not_here_is_fetched(pages, tiny, cache, monkeypatch):
    from dataclasses import replace

    _, contents = making.tiny_datasets()
    (tiny / "ptb/ptb.valid.txt").unlink()
    pages.bodies["/valid"] = contents["ptb/ptb.valid.txt"]
    entry = DATASETS["ptb"]
    ptb = replace(entry, files=tuple(replace(file, addresses=pages.at("/valid")) for file in entry.files))
    findings = list(fetch_missing(ptb, tiny))
    assert [finding.state for finding in findings] == ["good"] * 3
    assert [str(cache) in finding.text for finding in findings] == [False, True, False]
    assert len(pages.asked) == 1
    (tiny / "ptb/ptb.test.txt").write_bytes(b"wrong")
    assert [finding.state for finding in fetch_missing(ptb, tiny)] == ["good", "good", "failed"]
