"""Requests as the page sends them, and their answers."""

import http.client
import json

from lab.browser import PATIENCE

from deepmemory.lab.use.play.models import ModelSlot

CELL = {"hidden": 3, "lr": 0.02, "start": 3.0}
TRAINING = {"cells": {"dmu": CELL}, "runs": 2, "length": 24, "epochs": 3}
MUSIC = {"tune": 0, "given": 2, "steps": 5, "temperature": 1.0, "seed": 0}
EMPTY = ModelSlot(None, "There is none.", ("dmu train",))


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
