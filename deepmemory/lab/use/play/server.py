"""The server behind the page: this machine alone, one page, a few questions in JSON.

It listens on the loopback address. A page of somebody else that runs in the same browser could still reach it there,
so the name it was asked under, where a question comes from and what kind of content it has are checked first.
"""

from __future__ import annotations

import hashlib
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
from deepmemory.lab.use.loading import wanted
from deepmemory.lab.use.play import wishes
from deepmemory.lab.use.play.checkpoints import Offer
from deepmemory.lab.use.play.live import Live
from deepmemory.lab.use.play.wishes import Refused

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")  # under which the page may be opened
LARGEST_BODY = 4096  # bytes
DRAINED = 2**20  # bytes up to which a body too large is read nevertheless, so that the answer is read too
SILENCE = 30.0  # seconds until a connection that says nothing is closed
SENTENCES = 6  # to try
TUNES = 500  # to choose from, at most


class Server(ThreadingHTTPServer):
    """What the page needs, in one place."""

    daemon_threads = True

    def __init__(self, port: int, translation: Offer, music: Offer, live: Live | None = None) -> None:
        self.translation, self.music = translation, music
        self.live = live or Live()
        self.busy = Lock()  # the models answer one question after the other
        self.page = resources.files(__package__).joinpath("page.html").read_bytes()
        self.policy = content_policy(self.page.decode())
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise OSError(f"port {port} cannot be used ({error.strerror}); try another: dmu play --port 0") from error

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def server_close(self) -> None:
        """Stop the training too."""
        super().server_close()
        self.live.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; everything else is told as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    # --- answers ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What there is to play with."""
        return {
            "bounds": {name: bounds.for_page() for name, bounds in wishes.BOUNDS.items()},
            "rates": wishes.CELLS,
            "longest": wishes.LONGEST_TEXT,
            "training": self.live.course.number,
            "translation": self.about_translation(),
            "music": self.about_music(),
        }

    def about_translation(self) -> dict[str, Any]:
        """Language and some sentences to try, or how to get a model."""
        if (model := self.translation.model) is None:
            return {"ready": False, "why": self.translation.why, "commands": self.translation.commands}
        task = wanted(model, Translation, "translation", "play")
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
        """How long each tune is, or how to get a model."""
        if (model := self.music.model) is None:
            return {"ready": False, "why": self.music.why, "commands": self.music.commands}
        pieces = wanted(model, PolyMusic, "polymusic", "play").pieces["test"][:TUNES]
        return {
            "ready": True,
            "music": model.setting.music,
            "cell": model.setting.cell,
            "frames": [len(piece) for piece in pieces],
        }

    def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A training, in the place of the one before."""
        return {"number": self.live.start(wishes.training_wish(fields))}

    def stop(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The training."""
        wishes.nothing(fields)
        self.live.stop()
        return {}

    def translate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A sentence, word by word the likeliest and by a beam."""
        wish = wishes.translation_wish(fields)
        model = self.translation.model
        if model is None:
            raise Refused(HTTPStatus.NOT_FOUND, self.translation.why)
        with self.busy:
            try:
                greedy, unknown = decoding.translate(model, wish.text, 1)
                beam, _ = decoding.translate(model, wish.text, wish.beam)
            except ValueError as error:  # no word of it is known
                wishes.refuse(str(error))
        return {"greedy": greedy, "beam": beam, "unknown": unknown}

    def compose(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A tune gone on with: notes to draw, MIDI to keep, sound to play."""
        wish = wishes.music_wish(fields)
        model = self.music.model
        if model is None:
            raise Refused(HTTPStatus.NOT_FOUND, self.music.why)
        with self.busy:
            try:
                given = decoding.piece(model, wish.tune)[: wish.given]
            except ValueError as error:
                wishes.refuse(str(error))
            roll = decoding.continue_tune(model, given, wish.steps, wish.temperature, wish.seed)
            per_beat = sound.frames_per_beat(model.setting.music)
            return {
                "given": len(given),
                "frames": len(roll),
                "notes": sound.notes_of(roll),
                "midi": b64encode(sound.midi(roll, per_beat)).decode(),
                "wav": b64encode(sound.wav(roll, per_beat)).decode(),
            }


def content_policy(page: str) -> str:
    """The page's own style and script, known by their hashes, and nothing from anywhere else."""

    def hashes(element: str) -> str:
        texts = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)

    return (
        f"default-src 'none'; style-src {hashes('style')}; script-src {hashes('script')}; connect-src 'self'; "
        "img-src data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def open_in_browser(address: str) -> None:
    """Where there is a screen; without one, a browser in text mode would take the terminal."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    Thread(target=webbrowser.open, args=(address,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Checks a request, finds its answer, writes it."""

    server: Server
    timeout = SILENCE
    server_version = "deepmemory"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, or a question that changes nothing."""
        self.reply(self.get)

    def do_POST(self) -> None:
        """Something to do."""
        self.reply(self.post)

    def reply(self, answer: Callable[[], tuple[bytes, str]]) -> None:
        """The answer, or what was wrong with the question."""
        try:
            self.check_sender()
            content, kind = answer()
            status = HTTPStatus.OK
        except Refused as error:
            content, kind, status = as_json({"error": str(error)}), JSON, error.status
        except (ConnectionError, TimeoutError):  # nobody is left to answer
            raise
        except Exception:
            traceback.print_exc()
            told = {"error": "something went wrong; the terminal of dmu play says what"}
            content, kind, status = as_json(told), JSON, HTTPStatus.INTERNAL_SERVER_ERROR
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        self.wfile.write(content)

    def check_sender(self) -> None:
        """This machine under its own name, and no page but ours."""
        hosts = [f"{name}:{self.server.server_port}" for name in NAMES]
        if self.headers.get("Host") not in hosts:  # a stranger's name that was made to lead here
            raise Refused(HTTPStatus.FORBIDDEN, f"open this page as {self.server.address}")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        own = origin is None or origin in [f"http://{host}" for host in hosts]
        if not own or (self.path != "/" and site not in ("same-origin", "none")):
            raise Refused(HTTPStatus.FORBIDDEN, "this may be asked by the page itself alone")

    def get(self) -> tuple[bytes, str]:
        """The page, what there is, and how the training goes."""
        address = urlsplit(self.path)
        if address.path == "/":
            return self.server.page, "text/html; charset=utf-8"
        if address.path == "/state":
            return as_json(self.server.state()), JSON
        if address.path == "/training":
            query = dict(part.partition("=")[::2] for part in address.query[:100].split("&"))
            counts = [counted(query, name) for name in ("number", "news", "epochs")]
            return as_json(self.server.live.told(*counts)), JSON
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")

    def post(self) -> tuple[bytes, str]:
        """Do what is wished, once it has been read whole."""
        fields = wishes.read_json(self.body())
        actions = {
            "/start": self.server.start,
            "/stop": self.server.stop,
            "/translate": self.server.translate,
            "/compose": self.server.compose,
        }
        if self.path not in actions:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")
        return as_json(actions[self.path](fields)), JSON

    def body(self) -> bytes:
        """What was sent, which has to say how long it is, and be short."""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,15}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the body should be given")
        if int(length) > LARGEST_BODY:
            if int(length) <= DRAINED:
                self.rfile.read(int(length))
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST_BODY} bytes, got {length}")
        sent = self.rfile.read(int(length))
        if self.headers.get_content_type() != JSON:  # another page may send other kinds unasked
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body should be {JSON}")
        return sent

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays quiet."""


JSON = "application/json"


def as_json(value: Any) -> bytes:
    """For the page."""
    return json.dumps(value, allow_nan=False).encode()


def counted(query: dict[str, str], name: str) -> int:
    """A number of the question's address."""
    text = query.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        wishes.refuse(f"{name} should be a whole number")
    return int(text)
