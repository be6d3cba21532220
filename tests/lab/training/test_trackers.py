"""What trackers are told of an epoch is what the records hold of it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from lab.checkpoints import small

from deepmemory.lab.records import Records
from deepmemory.lab.settings import Machine
from deepmemory.lab.training import studies
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.trackers import open_tracker

pytestmark = pytest.mark.usefixtures("made_data")


class SummaryWriter:
    """Stands in for TensorBoard's: notes every value under (series, seed, epoch)."""

    logged: dict

    def __init__(self, folder):
        self.folder = folder

    def add_scalar(self, tag, value, epoch):
        series, seed = tag.split("/seed-")
        self.logged[series, int(seed), epoch] = value

    def flush(self):
        pass


class MlflowClient:
    """Stands in for MLflow's in the same way."""

    logged: dict

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_param(self, run, name, value):
        pass

    def log_metric(self, run, key, value, step):
        series, seed = key.split(".seed-")
        self.logged[series, int(seed), step] = value


@pytest.fixture(params=["tensorboard", "mlflow"])
def tracked(request, tmp_path, monkeypatch):
    """A tracker, and what it has been told."""
    logged = {}
    monkeypatch.setattr(SummaryWriter, "logged", logged, raising=False)
    monkeypatch.setattr(MlflowClient, "logged", logged, raising=False)
    tensorboard, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("mlflow")
    tensorboard.SummaryWriter, mlflow.MlflowClient = SummaryWriter, MlflowClient
    mlflow.set_experiment = lambda name: SimpleNamespace(experiment_id=name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return open_tracker(request.param, tmp_path), logged


@pytest.mark.parametrize("task", ["adding", "polymusic", "natlang", "translation", "pixel-mnist"])
def test_every_value_is_logged_under_its_name(task, tracked, tmp_path):
    track, logged = tracked
    studies.run_studies([small(task)], range(2), tmp_path, Machine("cpu", threads=1), PlainLines(), track)
    records = Records(tmp_path)
    (study,) = records.studies()
    records.close()
    assert logged == {
        (name, run.seed, epoch): pytest.approx(value, rel=1e-6)
        for run in study.runs
        for name, values in run.curves.items()
        for epoch, value in enumerate(values, 1)
    }


def test_the_losses_of_a_real_task_are_no_accuracies(tracked, tmp_path):
    track, logged = tracked
    studies.run_studies([small("pixel-mnist")], [0], tmp_path, Machine("cpu", threads=1), PlainLines(), track)
    names = {name for name, _, _ in logged}
    assert names == {f"{split}_{measure}" for split in ("train", "valid", "test") for measure in ("loss", "accuracy")}
    assert 0 <= logged["valid_accuracy", 0, 2] <= 1 < logged["test_loss", 0, 2]
