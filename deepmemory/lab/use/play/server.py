"""The server of the page: for this machine only, with one page and a few requests in JSON.

It listens on the loopback address. A page from another site, open in the same browser, could still reach it there, so
the host name, the origin and the content type of every request are checked first.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import webbrowser
from base64 import b64encode
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import torch

from deepmemory.lab.data.pairs import SPECIAL
from deepmemory.lab.tasks import PolyMusic, Translation
from deepmemory.lab.tasks.translation import until_end
from deepmemory.lab.training import random_streams
from deepmemory.lab.use import decoding, sound
from deepmemory.lab.use.loading import expect_task
from deepmemory.lab.use.play import requests
from deepmemory.lab.use.play.models import ModelSlot
from deepmemory.lab.use.play.requests import RequestError
from deepmemory.lab.use.play.training import BackgroundTrainer

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")  # under which the page may be opened
LARGEST_BODY = 4096  # bytes
LARGEST_DRAINED_BODY = 2**20  # bytes; a client that may send its whole body also reads the refusal
CONNECTION_TIMEOUT = 30.0  # seconds until a silent connection is closed
SENTENCES = 6  # test sentences to try
TUNES = 500  # of the test set to choose from, at most
JSON = "application/json"
FILES = {  # of the page, by address
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server(ThreadingHTTPServer):
    """Serves the page, its training and its two models."""

    daemon_threads = True

    def __init__(
        self, port: int, translation: ModelSlot, music: ModelSlot, trainer: BackgroundTrainer | None = None
    ) -> None:
        self.translation, self.music = translation, music
        self.trainer = trainer or BackgroundTrainer()
        self.busy = Lock()  # the models answer one request after the other
        folder = resources.files(__package__)
        self.files = {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise OSError(f"port {port} cannot be used ({error.strerror}); try another: dmu play --port 0") from error

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def server_close(self) -> None:
        """Close the socket and stop the training."""
        super().server_close()
        self.trainer.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors as usual, except if the browser has disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def state(self) -> dict[str, Any]:
        """What the page needs at the start: bounds, defaults, and which models there are."""
        return {
            "bounds": {name: bounds.for_page() for name, bounds in requests.BOUNDS.items()},
            "cells": {name: cell._asdict() for name, cell in requests.CELLS.items()},
            "weights": requests.weight_counts(),
            "longest_text": requests.LONGEST_TEXT,
            "training": self.trainer.training.number,
            "translation": self.about_translation(),
            "music": self.about_music(),
        }

    def about_translation(self) -> dict[str, Any]:
        """The model's language and some test sentences, or how to train a model."""
        if (model := self.translation.model) is None:
            return missing(self.translation)
        task = expect_task(model, Translation)
        foreign = task.pairs.foreign
        items = task.split(torch.tensor([model.seed]))[random_streams.TEST][0][:SENTENCES]
        sentences = [" ".join(foreign.words[word] for word in until_end(foreign.ids[item, 1:])) for item in items]
        words = len(foreign.words) - len(SPECIAL)
        return {
            "ready": True,
            "language": task.pairs.language,
            "cell": model.setting.cell,
            "words": words,
            "examples": sentences,
        }

    def about_music(self) -> dict[str, Any]:
        """The length of every test tune, or how to train a model."""
        if (model := self.music.model) is None:
            return missing(self.music)
        pieces = expect_task(model, PolyMusic).pieces["test"][:TUNES]
        return {
            "ready": True,
            "music": model.setting.music,
            "cell": model.setting.cell,
            "frames": [len(piece) for piece in pieces],
        }

    def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Start a training; one that is running is stopped."""
        return {"number": self.trainer.start(requests.training_request(fields))}

    def stop(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Stop the training."""
        requests.empty_request(fields)
        self.trainer.stop()
        return {}

    def translate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Translate a sentence by greedy and by beam search."""
        request = requests.translation_request(fields)
        model = self.translation.model
        if model is None:
            raise RequestError(HTTPStatus.NOT_FOUND, self.translation.problem)
        with self.busy:
            try:
                greedy, unknown = decoding.translate(model, request.text, 1)
                beam, _ = decoding.translate(model, request.text, request.beam)
            except ValueError as error:  # no word of it is known
                requests.reject(str(error))
        return {"greedy": greedy, "beam": beam, "unknown": unknown}

    def compose(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Continue a tune: notes to draw, a MIDI file and sound to play."""
        request = requests.music_request(fields)
        model = self.music.model
        if model is None:
            raise RequestError(HTTPStatus.NOT_FOUND, self.music.problem)
        with self.busy:
            try:
                given = decoding.piece(model, request.tune)[: request.given]
            except ValueError as error:
                requests.reject(str(error))
            roll = decoding.continue_tune(model, given, request.steps, request.temperature, request.seed)
            per_beat = sound.frames_per_beat(model.setting.music)
            return {
                "given": len(given),
                "frames": len(roll),
                "notes": sound.notes_of(roll),
                "midi": b64encode(sound.midi(roll, per_beat)).decode(),
                "wav": b64encode(sound.wav(roll, per_beat)).decode(),
            }


def missing(slot: ModelSlot) -> dict[str, Any]:
    """What the page shows if there is no model."""
    return {"ready": False, "problem": slot.problem, "commands": slot.commands}


def open_in_browser(address: str) -> None:
    """Open the page if there is a screen; without one, a text-mode browser would take over the terminal."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    Thread(target=webbrowser.open, args=(address,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Checks a request and answers it."""

    server: Server
    timeout = CONNECTION_TIMEOUT
    server_version = "deepmemory"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request that changes nothing: the page, its state, news of the training."""
        self.reply(self.get)

    def do_POST(self) -> None:
        """Answer a request that does something."""
        self.reply(self.post)

    def reply(self, answer: Callable[[], tuple[bytes, str]]) -> None:
        """Send the answer, or what is wrong with the request."""
        try:
            self.check_sender()
            content, kind = answer()
            status = HTTPStatus.OK
        except RequestError as error:
            content, kind, status = as_json({"error": str(error)}), JSON, error.status
        except (ConnectionError, TimeoutError):  # the client is gone
            raise
        except Exception:
            traceback.print_exc()
            problem = {"error": "something went wrong; see the terminal of dmu play"}
            content, kind, status = as_json(problem), JSON, HTTPStatus.INTERNAL_SERVER_ERROR
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(content)

    def check_sender(self) -> None:
        """Refuse requests under another host name, and those from other pages."""
        hosts = [f"{name}:{self.server.server_port}" for name in NAMES]
        if self.headers.get("Host") not in hosts:  # a DNS name that was rebound to this machine
            raise RequestError(HTTPStatus.FORBIDDEN, f"open this page as {self.server.address}")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        own = origin is None or origin in [f"http://{host}" for host in hosts]
        if not own or (self.path != "/" and site not in ("same-origin", "none")):
            raise RequestError(HTTPStatus.FORBIDDEN, "only the page itself may send this request")

    def get(self) -> tuple[bytes, str]:
        """The files of the page, its state, and news of the training."""
        address = urlsplit(self.path)
        if address.path in self.server.files:
            return self.server.files[address.path]
        if address.path == "/state":
            return as_json(self.server.state()), JSON
        if address.path == "/training":
            query = dict(part.partition("=")[::2] for part in address.query[:100].split("&"))
            counts = [counted(query, name) for name in ("number", "version", "epochs")]
            return as_json(self.server.trainer.news(*counts)), JSON
        raise RequestError(HTTPStatus.NOT_FOUND, "there is no such address")

    def post(self) -> tuple[bytes, str]:
        """Read the body and do what the address says."""
        fields = requests.read_json(self.body())
        actions = {
            "/start": self.server.start,
            "/stop": self.server.stop,
            "/translate": self.server.translate,
            "/compose": self.server.compose,
        }
        if self.path not in actions:
            raise RequestError(HTTPStatus.NOT_FOUND, "there is no such address")
        return as_json(actions[self.path](fields)), JSON

    def body(self) -> bytes:
        """The body of the request, which must state its length and be short JSON."""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,15}", length):
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "the length of the body should be given")
        if int(length) > LARGEST_BODY:
            if int(length) <= LARGEST_DRAINED_BODY:
                self.rfile.read(int(length))
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST_BODY} bytes, got {length}")
        sent = self.rfile.read(int(length))
        if self.headers.get_content_type() != JSON:  # other pages may send other content types without asking first
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body should be {JSON}")
        return sent

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""


def as_json(value: Any) -> bytes:
    """JSON for the page; NaN and infinity raise."""
    return json.dumps(value, allow_nan=False).encode()


def counted(query: dict[str, str], name: str) -> int:
    """A whole number from the query of a URL."""
    text = query.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        requests.reject(f"{name} should be a whole number")
    return int(text)
