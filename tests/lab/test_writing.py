"""Files that several processes may write at once."""

import os
import threading
import time

from deepmemory.lab.writing import ABANDONED, put


def test_many_writers_leave_a_whole_file_and_nothing_else(tmp_path):
    path, texts = tmp_path / "page", [bytes([letter]) * 200_000 for letter in b"abcd"]
    seen, failed = set(), []

    def write(text):
        try:
            for _ in range(30):
                put(path, text)
                seen.add(path.read_bytes())
        except OSError as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed
    assert seen <= set(texts)
    assert [file.name for file in tmp_path.iterdir()] == ["page"]


def test_what_a_killed_process_left_is_cleared_and_what_another_writes_is_not(tmp_path):
    left, writing = tmp_path / ".page.1-2.partial", tmp_path / ".page.3-4.partial"
    for file in (left, writing):
        file.write_bytes(b"half")
    long_ago = time.time() - 2 * ABANDONED
    os.utime(left, (long_ago, long_ago))
    put(tmp_path / "page", b"whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == [writing.name, "page"]
