"""dmu play: what its server refuses, what it answers, and the page itself in a real browser."""

import contextlib
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import wave
from base64 import b64decode
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab.browser import CHROMIUM, PATIENCE, Browser
from lab.checkpoints import made, small, train
from lab.real_data import MEANT

from deepmemory.lab import paper
from deepmemory.lab.tasks import task_of
from deepmemory.lab.use import loading, sound
from deepmemory.lab.use.play import requests, server
from deepmemory.lab.use.play.models import ModelSlot, find_model
from deepmemory.lab.use.play.requests import BOUNDS, CELLS, RequestError
from deepmemory.lab.use.play.server import Server
from deepmemory.lab.use.play.training import BackgroundTrainer

FOLDER = Path(server.__file__).parent
PAGE = "".join((FOLDER / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
CELL = {"hidden": 3, "lr": 0.02, "start": 3.0}
TRAINING = {"cells": {"dmu": CELL}, "runs": 2, "length": 24, "epochs": 3}
MUSIC = {"tune": 0, "given": 2, "steps": 5, "temperature": 1.0, "seed": 0}
NAMES = {*BOUNDS, *CELLS, "cells", "text"}
EMPTY = ModelSlot(None, "There is none.", ("dmu train",))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model that translates and one that composes, on made data."""
    out = tmp_path_factory.mktemp("runs")
    for task, changes in (("translation", {"hidden": (16,), "lr": 0.02, "epochs": 12}), ("polymusic", {})):
        train(out, small(task, **changes), seeds=(0,))
    return out


@pytest.fixture(scope="module")
def models(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "task_of", lambda setting, data: made(setting))
        return [find_model(task, None, trained, None) for task in ("translation", "polymusic")]


@pytest.fixture
def serving():
    """Starts servers on free ports, and ends them."""
    started = []

    def start(*arguments):
        one = Server(0, *(arguments or (EMPTY, EMPTY)))
        thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        started.append((one, thread))
        return one

    yield start
    for one, thread in started:
        one.shutdown()
        thread.join()
        one.server_close()


def ask(one, path, request=None, method=None, **headers):
    """Status and answer; ``request`` is sent as JSON, or as it is if it is bytes."""
    body = request if request is None or isinstance(request, bytes) else json.dumps(request).encode()
    if body is not None:
        headers = {"Content-Type": "application/json", **headers}
    connection = http.client.HTTPConnection("127.0.0.1", one.server_port, timeout=PATIENCE)
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if answer.headers.get_content_type() == "application/json" else content


def follow(one, until):
    """The news of a training until a condition on them holds: the last, all epochs, all gates."""
    number = version = 0
    epochs, gates = [], []
    for _ in range(500):
        status, news = ask(one, f"/training?number={number}&version={version}&epochs={len(epochs)}")
        assert status == 200
        number, version = news["number"], news["version"]
        epochs += news["epochs"]
        gates += [news["gates"]] if news["gates"] else []
        if until(news, epochs):
            return news, epochs, gates
    raise AssertionError(news)


def ended(news, _):
    return news["state"] != "running"


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
        ("/start", b'{"a": NaN}', "NaN is no number that can be used here"),
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


class TestTraining:
    def test_curves_and_gates_come_until_it_has_finished(self, serving):
        one = serving()
        request = TRAINING | {"cells": {"lstm": CELL, "dmu": CELL, "gru": CELL}}
        assert ask(one, "/start", request) == (200, {"number": 1})
        news, epochs, gates = follow(one, ended)
        assert (news["state"], news["reason"], news["total_epochs"]) == ("finished", "", 3)
        assert [(e["epoch"], e["cell"]) for e in epochs] == [
            (n, cell) for n in (1, 2, 3) for cell in ("dmu", "gru", "lstm")
        ]
        assert all(list(e["losses"]) == ["0", "1"] and min(e["losses"].values()) > 0 for e in epochs)
        keep = gates[-1]["keep"]
        assert (len(keep), len(keep[0]), gates[-1]["epoch"]) == (3, 24, 3)
        assert all(0 <= share <= 1 for unit in keep for share in unit)
        assert gates[0]["numbers"] == gates[-1]["numbers"]
        assert len(gates[-1]["marked"]) in (1, 2)  # a mark on the first step is invisible
        marked = [gates[-1]["numbers"][step] for step in gates[-1]["marked"]]
        assert gates[-1]["target"] == pytest.approx(0.5 + sum(marked) / 4, abs=1e-3)

    def test_the_losses_are_those_of_the_lab(self, serving):
        from deepmemory.lab.settings import Machine
        from deepmemory.lab.training import loop
        from deepmemory.lab.training.group import fresh_group
        from deepmemory.lab.training.trainer import make_trainer

        one = serving()
        ask(one, "/start", TRAINING)
        _, epochs, _ = follow(one, ended)
        trainer = make_trainer(requests.training_request(TRAINING).setting("dmu"), Machine("cpu"))
        alone = loop.train(trainer, fresh_group(trainer, [1]))
        assert [e["losses"]["1"] for e in epochs] == pytest.approx([e.values[1]["valid_loss"] for e in alone], rel=1e-4)

    def test_stop(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        follow(one, lambda _, epochs: len(epochs) >= 2)
        assert ask(one, "/stop", {}) == (200, {})
        news, epochs, _ = follow(one, ended)
        assert news["state"] == "stopped"
        assert len(epochs) < 500

    def test_a_stop_does_not_wait_for_the_epoch(self, serving, monkeypatch):
        monkeypatch.setattr("deepmemory.lab.use.play.requests.STEPS", 10**6)
        one = serving()
        ask(one, "/start", TRAINING)
        follow(one, lambda news, _: news["gates"])
        ask(one, "/stop", {})
        assert follow(one, ended)[0]["state"] == "stopped"

    def test_another_start_takes_its_place(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        first = one.trainer.training
        assert ask(one, "/start", TRAINING | {"cells": {"gru": CELL}})[1] == {"number": 2}
        news, epochs, gates = follow(one, ended)
        assert (news["number"], news["state"], news["cells"], gates) == (2, "finished", ["gru"], [])
        assert {e["cell"] for e in epochs} == {"gru"}
        assert first.state == "stopped"
        assert not first.thread.is_alive()

    def test_a_closed_page_ends_it(self, serving):
        one = serving(EMPTY, EMPTY, BackgroundTrainer(idle_timeout=0))
        ask(one, "/start", TRAINING | {"epochs": 500})
        one.trainer.training.thread.join()
        assert (one.trainer.training.state, one.trainer.training.reason) == ("stopped", "the page was closed")

    def test_what_goes_wrong_is_told(self, serving, monkeypatch):
        def broken(*_):
            raise RuntimeError("no room")

        monkeypatch.setattr("deepmemory.lab.use.play.training.fresh_group", broken)
        one = serving()
        ask(one, "/start", TRAINING)
        news, _, _ = follow(one, ended)
        assert (news["state"], news["reason"]) == ("failed", "RuntimeError: no room")

    def test_the_server_ends_with_it(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        one.trainer.close()
        assert not one.trainer.training.thread.is_alive()


class TestModels:
    def test_a_sentence(self, serving, models):
        one = serving(*models)
        status, answer = ask(one, "/translate", {"text": "¿Tres <b>gatos</b>?", "beam": 3})
        assert status == 200
        assert set(answer["greedy"].split()) <= set(MEANT)
        assert answer["unknown"] == ["¿", "b", "gatos", "b", "?"]
        about = ask(one, "/state")[1]["translation"]
        assert (about["language"], about["words"], len(about["examples"])) == ("spanish", 4, 6)

    def test_a_tune(self, serving, models):
        one = serving(*models)
        status, answer = ask(one, "/compose", MUSIC)
        assert status == 200
        assert (answer["given"], answer["frames"]) == (2, 7)
        assert ask(one, "/compose", MUSIC)[1] == answer
        roll = sound.roll_of(b64decode(answer["midi"]))
        assert [list(note) for note in sound.notes_of(roll)] == answer["notes"]
        with wave.open(io.BytesIO(b64decode(answer["wav"]))) as heard:
            assert heard.getnframes() / heard.getframerate() == pytest.approx(7 / 4, abs=0.2)

    def test_a_fault_of_ours_is_told_and_survived(self, serving, models, monkeypatch, capsys):
        one = serving(*models)
        monkeypatch.setattr(server.sound, "wav", lambda *_: 1 / 0)
        status, answer = ask(one, "/compose", MUSIC)
        assert (status, answer["error"]) == (500, "something went wrong; see the terminal of dmu play")
        assert "ZeroDivisionError" in capsys.readouterr().err
        assert ask(one, "/state")[0] == 200

    def test_without_them_the_page_says_what_to_do(self, serving, tmp_path):
        one = serving(*(find_model(task, None, tmp_path / "my runs", None) for task in ("translation", "polymusic")))
        state = ask(one, "/state")[1]
        assert state["music"] == {
            "ready": False,
            "problem": f"There is no trained model of polymusic in {tmp_path}/my runs yet.",
            "commands": ["dmu data fetch nottingham", f"dmu train polymusic --quick --out '{tmp_path}/my runs'"],
        }
        assert ask(one, "/translate", {"text": "uno", "beam": 1})[0] == 404
        assert ask(one, "/compose", MUSIC)[0] == 404

    def test_the_newest_that_works_is_taken(self, tmp_path, monkeypatch):
        monkeypatch.setattr(loading, "task_of", lambda setting, data: made(setting))
        older, newer = (small("translation", hidden=(width,)) for width in (4, 3))
        first, second = (train(tmp_path, setting, seeds=(0,)) for setting in (older, newer))
        assert find_model("translation", None, tmp_path, None).model.setting == newer
        second.write_bytes(b"damaged")
        assert find_model("translation", None, tmp_path, None).model.setting == older
        with pytest.raises(ValueError, match="is not a checkpoint that can be used here"):
            find_model("translation", second, tmp_path, None)
        with pytest.raises(ValueError, match="expected a model of polymusic, this one was trained on translation"):
            find_model("polymusic", first, tmp_path, None)
        first.unlink()
        assert "is not a checkpoint" in find_model("translation", None, tmp_path, None).problem


class TestPage:
    def test_it_needs_nothing_from_elsewhere(self):
        assert not re.search(r"https?:|url\(|@import|import\(", PAGE)
        assert re.findall(r"(?:src|href)=\"([^\"]*)\"", PAGE) == ["data:,", "page.css", "page.js"]

    def test_text_stays_text(self):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE)

    @pytest.mark.parametrize(("path", "file"), [("/", "page.html"), ("/page.css", "page.css"), ("/page.js", "page.js")])
    def test_its_files_come_with_a_policy(self, serving, path, file):
        connection = http.client.HTTPConnection("127.0.0.1", serving().server_port, timeout=PATIENCE)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.read() == (FOLDER / file).read_bytes()
        assert answer.headers["Content-Security-Policy"].startswith(
            "default-src 'none'; style-src 'self'; script-src 'self';"
        )
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        connection.close()


class TestDefaults:
    def test_cells_have_about_equal_weights_at_the_papers_length(self, serving):
        state = ask(serving(), "/state")[1]
        weights = {cell: state["weights"][cell][of["hidden"] - 1] for cell, of in state["cells"].items()}
        assert weights["dmu"] == paper.WEIGHT_COUNTS["adding"]["dmu"]
        for cell in ("gru", "lstm"):  # no other state size comes closer
            distances = [abs(count - weights["dmu"]) for count in state["weights"][cell]]
            assert abs(weights[cell] - weights["dmu"]) == min(distances)
        assert state["bounds"]["length"]["default"] == paper.LENGTHS["adding"][0]

    def test_the_dmu_learns_within_a_few_epochs(self, serving):
        one = serving()
        defaults = {name: BOUNDS[name].default for name in ("runs", "length")}
        ask(one, "/start", {"cells": {"dmu": CELLS["dmu"]._asdict()}, "epochs": 15, **defaults})
        _, epochs, _ = follow(one, ended)
        learned = sum(loss < 0.01 for loss in epochs[-1]["losses"].values())
        assert learned > defaults["runs"] / 2

    @pytest.mark.parametrize("cell", CELLS)
    def test_the_start_bias_is_what_a_fresh_cell_keeps(self, cell):
        """Without input, a fresh cell whose gate starts at 9 keeps its state; at 0 it keeps about half of it."""
        kept = {}
        for start in (0.0, 9.0):
            request = requests.training_request(TRAINING | {"cells": {cell: CELL | {"start": start}}})
            setting = request.setting(cell)
            network = task_of(setting).network(setting)
            h = torch.ones(1, 1, 3)
            _, after = network.recurrent(torch.zeros(1, 1, 2), (h, h) if cell == "lstm" else h)
            kept[start] = (after[1] if cell == "lstm" else after).mean().item()
        assert kept[9.0] == pytest.approx(1, abs=0.02)
        assert 0.2 < kept[0.0] < 0.8


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    command = [sys.executable, "-m", "deepmemory.lab", "play", "--port", "0", "--no-open", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    try:
        line = process.stdout.readline()
        port = int(re.fullmatch(r"page: http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", line)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request(
            "POST", "/start", json.dumps(TRAINING | {"epochs": 500}), {"Content-Type": "application/json"}
        )
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0
    assert errors.strip() == "stopped"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(serving, models, tmp_path):
    one = serving(*models)
    with Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=one.address)
        browser.wait("document.body?.dataset.ready === 'yes'")

        assert browser.run("document.getElementById('weights-dmu').textContent") == "106"
        browser.type("#hidden-gru", "5")
        assert browser.run("document.getElementById('weights-gru').textContent") == "141"
        browser.type("#start-gru", "3")
        browser.type("#runs", "2")
        browser.type("#length", "24")
        browser.type("#epochs", "400")
        browser.click("#use-lstm")
        browser.click("#start")
        points = "Math.min(...[...document.querySelectorAll('#curves .median')].map((path) => +path.dataset.points))"
        browser.wait(f"document.querySelectorAll('#curves .median').length === 2 && {points} >= 3")
        assert browser.run("document.querySelectorAll('#curves .dmu .run').length") == 2
        assert browser.run("document.querySelectorAll('#curves .lstm').length") == 0
        before = browser.wait("+document.getElementById('gates').dataset.epoch")
        pixels = "[...new Set(document.getElementById('gates').getContext('2d').getImageData(0, 0, 24, 5).data)].length"
        assert browser.run(pixels) > 10
        browser.wait(f"+document.getElementById('gates').dataset.epoch > {before}")
        browser.click("#stop")
        browser.wait("document.getElementById('training-state').textContent === 'Stopped.'")
        assert one.trainer.training.state == "stopped"

        browser.type("#epochs", "3")
        browser.click("#start")
        browser.wait("document.getElementById('training-state').textContent === 'Finished.'")
        assert browser.run(points) == 3

        browser.type("#sentence", "uno <i>gato</i> dos")
        browser.click("#translation button.main")
        browser.wait("!document.getElementById('translations').hidden")
        greedy, unknown = browser.run("['greedy', 'unknown'].map((id) => document.getElementById(id).textContent)")
        assert greedy
        assert set(greedy.split()) <= set(MEANT)
        assert unknown.split() == ["i", "gato", "i"]
        browser.type("#sentence", "<img src=x onerror=alert(1)>")
        browser.click("#translation button.main")
        problem = browser.wait("document.getElementById('translation-error').textContent")
        assert problem.startswith("none of the words of '<img src=x onerror=alert(1)>' is in")
        browser.click("#examples button")
        browser.wait("!document.getElementById('translations').hidden")

        browser.type("#given", "3")
        browser.type("#steps", "9")
        browser.click("#compose")
        browser.wait("document.getElementById('audio').duration > 2")
        assert browser.run("document.getElementById('music-state').textContent") == "3 frames given, 9 composed."
        assert browser.run("document.querySelectorAll('#roll rect.given').length") == 3
        assert browser.run("document.getElementById('midi').href").startswith("blob:")
        browser.run("document.getElementById('audio').play()")
        browser.wait("+document.getElementById('now').getAttribute('x1') > 0")

        refused = [entry for entry in browser.console if "400" not in str(entry)]
        assert refused == []  # but for the sentence that cannot be translated
        assert {address.partition(":")[0] for address in browser.addresses} <= {"http", "blob", "data"}
        assert all(a.startswith(one.address) for a in browser.addresses if a.startswith("http"))
