"""A checkpoint gives back the run that was trained, or says why it cannot."""

import os
import shutil

import pytest
import torch
from lab.checkpoints import made, small, train
from safetensors.torch import save_file
from tolerances import assert_close

from deepmemory.lab.data import MissingData, files
from deepmemory.lab.records import Records, RecordsError, load_checkpoint, save_checkpoint
from deepmemory.lab.settings import Machine
from deepmemory.lab.tasks import Translation
from deepmemory.lab.training import loop, random_streams
from deepmemory.lab.training.trainer import make_trainer
from deepmemory.lab.use import loading
from deepmemory.lab.use.loading import assemble, best_run, choose_checkpoint, list_models, load_model


@pytest.fixture(scope="module")
def adding(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), small(), range(3))


def recorded(path):
    opened = Records(path.parents[2])
    (study,) = opened.studies()
    opened.close()
    return {run.seed: run for run in study.runs}


def test_the_best_run_has_the_lowest_validation_loss(adding):
    model = load_model(adding)
    runs = recorded(adding)
    best = {seed: min(run.curves["valid_loss"]) for seed, run in runs.items()}
    assert model.seed == min(best, key=best.get)
    assert model.setting == small()
    assert load_model(adding.parent).seed == model.seed  # the folder of all checkpoints


@pytest.mark.parametrize("task", ["adding", "polymusic", "natlang", "translation"])
def test_a_run_measures_what_was_recorded_of_its_best_weights(task, tmp_path, monkeypatch):
    setting = small(task, precision="64-true")
    path = train(tmp_path, setting)
    task = made(setting)
    monkeypatch.setattr(loading, "task_of", lambda *_: task)
    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", lambda *_: task)
    trainer = make_trainer(setting, Machine("cpu"))
    for seed, run in recorded(path).items():
        model = load_model(path, seed)
        assert not model.network.training
        weights = {name: weight[None] for name, weight in model.network.state_dict().items()}
        measured = loop.evaluate(trainer, weights, random_streams.TEST, [seed])[0]
        assert_close(measured.float(), torch.tensor(list(run.test.values())))


def test_runs_in_several_files(tmp_path):
    train(tmp_path, small(), [0, 1])
    folder = train(tmp_path, small(), [0, 1, 5]).parent
    for seed in (0, 1, 5):
        path, found, _ = best_run(folder, seed)
        assert (path.name, found) == (f"runs-{0 if seed < 5 else 5}.safetensors", seed)


def test_what_is_missing_is_named(adding, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"no run with seed 7; it has \[0, 1, 2\]"):
        load_model(adding, 7)
    alone = tmp_path / "out" / "checkpoints" / adding.parent.name / adding.name
    alone.parent.mkdir(parents=True)
    shutil.copy(adding, alone)
    with pytest.raises(FileNotFoundError, match=r"settings of .* are not known.*records.sqlite does not exist"):
        load_model(alone)
    train(tmp_path / "out", small(hidden=(3,)))  # records, but of another study
    with pytest.raises(ValueError, match="has no study"):
        load_model(alone)


def test_data_that_is_not_here_is_named(tmp_path, monkeypatch):
    path = train(tmp_path, small("natlang"))
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("DEEPMEMORY_DATA", raising=False)
    with pytest.raises(MissingData, match="dmu data fetch ptb"):
        load_model(path)


def test_no_checkpoint_and_one_of_another_model_are_refused(adding, tmp_path):
    strange = tmp_path / "strange.safetensors"
    strange.write_bytes(b"\x80\x04 a pickle, or anything")
    with pytest.raises(RecordsError, match="cannot be used as a checkpoint"):
        load_model(strange)
    save_file({"weight": torch.zeros(3)}, strange)
    with pytest.raises(RecordsError, match="cannot be used as a checkpoint"):
        load_model(strange)
    tensors, info = load_checkpoint(adding)
    for name in ("best.{}", "weights.{}", "adam.{}.exp_avg", "adam.{}.exp_avg_sq"):
        tensors[name.format("output.weight")] = torch.zeros(3, 1, 9)
    altered = tmp_path / "checkpoints" / adding.parent.name / adding.name
    save_checkpoint(altered, tensors, info)
    shutil.copy(adding.parents[2] / "records.sqlite", tmp_path)
    with pytest.raises(RecordsError, match=r"'output.weight' is \(1, 9\) of float32, expected \(1, 5\) of float32"):
        load_model(altered)


def test_words_that_changed_since_the_training_are_noticed(tmp_path):
    setting = small("translation")
    _, seed, weights = best_run(train(tmp_path, setting))
    task = made(setting)
    assert isinstance(assemble(setting, task, seed, weights).task, Translation)
    task.input_size += 1
    with pytest.raises(RecordsError, match=r"'read.weight' is .* or the data has changed"):
        assemble(setting, task, seed, weights)


def test_a_run_that_diverged_has_no_best_weights(adding, tmp_path):
    tensors, info = load_checkpoint(adding)
    info["best_epoch"][1] = None
    tensors["best_loss"][1] = torch.inf
    path = tmp_path / adding.name
    save_checkpoint(path, tensors, info)
    assert best_run(path)[1] != 1
    with pytest.raises(ValueError, match="loss of run 1 was never finite"):
        best_run(path, 1)
    info["best_epoch"] = [None] * 3
    save_checkpoint(path, tensors, info)
    with pytest.raises(ValueError, match=r"loss of run \[0, 1, 2\] was never finite"):
        best_run(path)


class TestFinding:
    @pytest.fixture
    def out(self, tmp_path):
        """Three studies, each written ten seconds after the one before."""
        settings = [small(cell="gru"), small("natlang"), small(transition=(4,), hidden=(5, 3))]
        for age, setting in enumerate(settings):
            path = train(tmp_path, setting)
            os.utime(path, (1e9 + 10 * age,) * 2)
        return tmp_path

    def test_the_newest_checkpoint_of_a_task_is_chosen(self, out):
        chosen = [choose_checkpoint(None, out, *tasks) for tasks in ([], ["adding"], ["natlang"])]
        names = [path.name.rpartition("-")[0] for path in chosen]
        assert names == ["adding-dmu", "adding-dmu", "natlang-dmu"]
        assert load_model(choose_checkpoint(None, out, "adding")).setting.hidden == (5, 3)
        named = out / "whatever was named"
        assert choose_checkpoint(named, out, "adding") == named

    def test_without_one_the_error_says_how_to_train_it(self, out, tmp_path, nothing_shipped):
        commands = f"dmu data fetch nottingham; dmu train polymusic --quick --out {tmp_path}"
        with pytest.raises(FileNotFoundError, match="no trained model of polymusic") as raised:
            choose_checkpoint(None, out, "polymusic")
        assert commands in str(raised.value)
        with pytest.raises(FileNotFoundError, match="dmu train adding --quick"):
            choose_checkpoint(None, tmp_path / "empty")

    def test_the_list_has_task_size_and_score_of_every_model(self, out):
        first, second, third = list_models(out)
        assert [(m.task, m.cell, m.hidden, m.depth, m.runs) for m in (first, second, third)] == [
            ("adding", "dmu", (5, 3), 2, 2),
            ("natlang", "dmu", (5,), 1, 2),
            ("adding", "gru", (5,), 1, 2),
        ]
        model = load_model(first.path)
        assert first.weights == sum(weight.numel() for weight in model.network.parameters())
        runs = recorded_in(out, model.setting)
        assert first.scores["valid_loss"] == min(min(run.curves["valid_loss"]) for run in runs)
        assert set(second.scores) == {"valid_loss", "valid_perplexity"}
        assert list_models(out / "empty") == []

    def test_a_damaged_checkpoint_is_listed_without_its_weights(self, out):
        newest = choose_checkpoint(None, out)
        next(newest.glob("*.safetensors")).write_bytes(b"damaged")
        (damaged,) = [model for model in list_models(out) if model.path == newest]
        assert damaged.weights is None


def recorded_in(out, setting):
    opened = Records(out)
    study = opened.study(setting.key)
    opened.close()
    return study.runs
