"""The page itself: its files, the command that serves it, and what it does in a real browser."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.browser import CHROMIUM, PATIENCE, Browser
from lab.real_data import MEANT
from lab.use.play.asking import TRAINING

from deepmemory.lab.use.play import server

FOLDER = Path(server.__file__).parent
PAGE = "".join((FOLDER / f"page.{kind}").read_text() for kind in ("html", "css", "js"))


def test_it_needs_nothing_from_elsewhere():
    assert not re.search(r"https?:|url\(|@import|import\(", PAGE)
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", PAGE) == ["data:,", "page.css", "page.js"]


def test_text_stays_text():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE)


@pytest.mark.parametrize(("path", "file"), [("/", "page.html"), ("/page.css", "page.css"), ("/page.js", "page.js")])
def test_its_files_come_with_a_policy(serving, path, file):
    connection = http.client.HTTPConnection("127.0.0.1", serving().server_port, timeout=PATIENCE)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.read() == (FOLDER / file).read_bytes()
    assert answer.headers["Content-Security-Policy"].startswith(
        "default-src 'none'; style-src 'self'; script-src 'self';"
    )
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    connection.close()


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
