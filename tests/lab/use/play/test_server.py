"""Whom the server answers, and which requests it refuses."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.use.play.asking import CELL, EMPTY, MUSIC, TRAINING, ask

from deepmemory.lab.use.play import requests
from deepmemory.lab.use.play.requests import BOUNDS, CELLS, RequestError
from deepmemory.lab.use.play.server import Server

NAMES = {*BOUNDS, *CELLS, "cells", "text"}


class TestWhoMayAsk:
    def test_it_listens_to_this_machine_alone(self, serving):
        assert serving().server_address[0] == "127.0.0.1"

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "0.0.0.0", ""])
    @pytest.mark.parametrize("path", ["/", "/state"])
    def test_another_name_is_refused(self, serving, host, path):
        status, answer = ask(serving(), path, Host=host)
        assert status == 403
        assert answer["error"].startswith("open this page as http://127.0.0.1:")

    def test_localhost_is_this_machine(self, serving):
        one = serving()
        assert ask(one, "/", Host=f"localhost:{one.server_port}")[0] == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://127.0.0.1:1"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ],
        ids=str,
    )
    def test_another_page_is_refused(self, serving, headers):
        one = serving()
        assert ask(one, "/start", TRAINING, **headers)[0] == 403
        assert ask(one, "/training?number=0&version=1&epochs=0", **headers)[0] == 403
        assert one.trainer.training.number == 0

    def test_the_page_itself_is_not(self, serving):
        one = serving()
        own = {"Origin": f"http://127.0.0.1:{one.server_port}", "Sec-Fetch-Site": "same-origin"}
        assert ask(one, "/stop", {}, **own) == (200, {})

    def test_other_content_is_refused(self, serving):
        """Pages elsewhere may send forms and plain text without asking first."""
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            assert ask(serving(), "/stop", {}, **{"Content-Type": kind})[0] == 415

    def test_a_large_body_is_refused(self, serving):
        one = serving()
        status, answer = ask(one, "/translate", b" " * 100_000)
        assert (status, answer["error"]) == (413, "at most 4096 bytes, got 100000")
        assert ask(one, "/stop", **{"Content-Length": "9" * 15}, method="POST")[0] == 413
        assert ask(one, "/stop", **{"Content-Length": "-1"}, method="POST")[0] == 411
        assert ask(one, "/stop", **{"Transfer-Encoding": "chunked"}, method="POST")[0] == 411

    def test_there_is_nothing_else(self, serving):
        one = serving()
        for path in ("/page.html", "/../server.py", "/%2e%2e/server.py", "/state/", "//etc/passwd"):
            assert ask(one, path)[0] == 404
        assert ask(one, "/state", {})[0] == 404
        assert ask(one, "/", method="DELETE")[0] == 501


@pytest.mark.parametrize(
    ("path", "request_", "problem"),
    [
        ("/start", b"{", "the body should be JSON in UTF-8"),
        ("/start", b"[" * 4000, "the body should be JSON in UTF-8"),
        ("/start", b'{"a": NaN}', "NaN is not a number that can be used here"),
        ("/start", [1], "the body should be a JSON object, got [1]"),
        ("/start", {}, "the body lacks cells, runs, length, epochs"),
        ("/start", TRAINING | {"out": "/etc"}, 'the body should have cells, runs, length, epochs, not "out"'),
        ("/start", TRAINING | {"cells": {}}, "choose at least one cell of dmu, gru, lstm"),
        ("/start", TRAINING | {"cells": {"<b>": CELL}}, 'unknown cell "<b>"; choose from dmu, gru, lstm'),
        ("/start", TRAINING | {"cells": {"gru": 3}}, "gru should be a JSON object, got 3"),
        ("/start", TRAINING | {"runs": 17}, "runs should be a whole number from 1 to 16, got 17"),
        ("/start", TRAINING | {"runs": True}, "runs should be a whole number from 1 to 16, got true"),
        ("/start", TRAINING | {"length": 23}, "length should be a whole number from 24 to 300, got 23"),
        ("/start", TRAINING | {"epochs": 2.5}, "epochs should be a whole number from 1 to 500, got 2.5"),
        (
            "/start",
            TRAINING | {"cells": {"dmu": CELL | {"hidden": 33}}},
            "dmu: hidden should be a whole number from 1 to 32, got 33",
        ),
        (
            "/start",
            TRAINING | {"cells": {"dmu": CELL | {"lr": 0}}},
            "dmu: lr should be a number from 1e-05 to 1, got 0",
        ),
        ("/start", TRAINING | {"cells": {"dmu": CELL | {"lr": 10**400}}}, "dmu: lr should be a number"),
        (
            "/start",
            TRAINING | {"cells": {"gru": CELL | {"start": 11}}},
            "gru: start should be a number from -10 to 10, got 11",
        ),
        ("/stop", {"now": 1}, 'the body should have nothing, not "now"'),
        ("/translate", {"text": " ", "beam": 1}, "text should be a sentence"),
        ("/translate", {"text": "a" * 301, "beam": 1}, "text should have at most 300 characters, got 301"),
        ("/translate", {"text": "uno", "beam": 11}, "beam should be a whole number from 1 to 10, got 11"),
        ("/translate", {"text": "nada", "beam": 1}, "none of the words of 'nada' is in the spanish vocabulary"),
        ("/compose", MUSIC | {"tune": "../secret"}, "tune should be a whole number from 0"),
        ("/compose", MUSIC | {"tune": 7}, "no tune 7; the test split of nottingham has 0 to 6"),
        ("/compose", MUSIC | {"temperature": -1}, "temperature should be a number from 0 to 5, got -1"),
        ("/compose", MUSIC | {"steps": 401}, "steps should be a whole number from 1 to 400, got 401"),
        ("/training?number=0&version=0", None, "epochs should be a whole number"),
        ("/training?number=x&version=0&epochs=0", None, "number should be a whole number"),
    ],
)
def test_invalid_requests_are_refused(serving, models, path, request_, problem):
    one = serving(*models)
    status, answer = ask(one, path, request_)
    assert status == 400
    assert answer["error"].startswith(problem)
    assert one.trainer.training.number == 0


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(sorted(NAMES)), parts, max_size=6),
)


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), ANYTHING, max_size=6) | ANYTHING, st.booleans())
def test_any_request_is_within_bounds_or_refused(request_, garbled):
    raw = json.dumps(request_).encode()
    readers = (
        requests.training_request,
        requests.translation_request,
        requests.music_request,
        requests.empty_request,
    )
    for read in readers:
        with contextlib.suppress(RequestError):
            found = read(requests.read_json(raw[:-1] + b"\xff" if garbled else raw))
            if isinstance(found, requests.TrainingRequest):
                assert all(found.setting(cell).hidden[0] <= 32 for cell in found.cells)


def test_a_port_that_is_taken_is_named(serving):
    port = serving().server_port
    with pytest.raises(OSError, match=rf"^port {port} cannot be used \(.+\); try another: dmu play --port 0$"):
        Server(port, EMPTY, EMPTY)
