"""Two processes never train the same study."""

import threading

from deepmemory.lab.records import hold_lock


def test_a_study_is_held_by_one_process_at_a_time(tmp_path):
    said, order, path = [], [], tmp_path / "locks" / "study.lock"

    def second():
        with hold_lock(path, said.append):
            order.append("second")

    with hold_lock(path, print):
        thread = threading.Thread(target=second)
        thread.start()
        while not said:
            pass
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting: study is being trained by process" in said[0]
