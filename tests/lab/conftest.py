import pytest
import torch
from lab.real_data import TASKS

from deepmemory.lab.tasks import task_of


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_shipped(monkeypatch, tmp_path):
    """A package that comes without trained networks."""
    monkeypatch.setattr("deepmemory.lab.use.released.SHIPPED", tmp_path / "nothing shipped")


@pytest.fixture
def made_data(monkeypatch):
    """Tasks with real data train on small made data."""

    def made(setting, data=None):
        return TASKS[setting.task]() if setting.task in TASKS else task_of(setting, data)

    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", made)
