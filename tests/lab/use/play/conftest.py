"""Servers on free ports, and small models for them."""

from threading import Thread

import pytest
from lab.checkpoints import made, small, train
from lab.use.play.asking import EMPTY

from deepmemory.lab.use import loading
from deepmemory.lab.use.play.models import find_model
from deepmemory.lab.use.play.server import Server


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a model that translates and one that composes, on made data."""
    out = tmp_path_factory.mktemp("runs")
    for task, changes in (("translation", {"hidden": (16,), "lr": 0.02, "epochs": 12}), ("polymusic", {})):
        train(out, small(task, **changes), seeds=(0,))
    return out


@pytest.fixture(scope="session")
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
