"""Experiments beyond the paper, as the command carries them out: from settings to the page."""

import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from lab.real_data import TASKS as MADE
from typer.testing import CliRunner

from deepmemory.lab import beyond, cli, paper
from deepmemory.lab.beyond import EXPERIMENTS, cells, music, pixels
from deepmemory.lab.beyond import depth as of_depth
from deepmemory.lab.beyond.models import ENDS, SIZES, weights_of
from deepmemory.lab.data import Corpus
from deepmemory.lab.records import Records
from deepmemory.lab.settings import PAPER_TASKS
from deepmemory.lab.tasks import PTB, task_of

TINY = {
    "depth": ["hidden=4", "epochs=2", "batch=2", "window=5"],
    "state-tracking": ["epochs=2", "steps=2", "batch=4", "min_length=2", "max_length=2", "validation=3", "test=3"],
    "long-adding": ["epochs=2", "steps=2", "batch=2", "validation=3", "test=3"],
    "pixels": ["epochs=2", "batch=20"],
    "music": ["epochs=2", "batch=4"],
    "cells": ["epochs=2", "batch=4"],
}
DATA = os.environ.get("DEEPMEMORY_DATA")


@pytest.fixture
def made_data(monkeypatch):
    """All data is small and made, and available."""
    words = torch.arange(203) % 11
    corpus = Corpus(words, words[:51].clone(), words[:43].clone(), tuple(map(str, range(11))))

    def made(setting, data=None):
        if setting.task in MADE:
            return MADE[setting.task]()
        return PTB(corpus) if setting.task == "ptb" else task_of(setting, data)

    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", made)
    monkeypatch.setattr("deepmemory.lab.cli.training.with_data", lambda settings, data: settings)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_settings_belong_to_their_experiment(name):
    one = EXPERIMENTS[name]
    settings = one.settings()
    assert len({setting.key for setting in settings}) == len(settings)
    own = [setting for setting in settings if beyond.experiment_of(setting)]
    assert {beyond.experiment_of(setting) for setting in own} == {name}
    of_paper = {setting.key for setting in paper.settings()}
    assert all((setting in own) != (setting.key in of_paper) for setting in settings)
    assert {one.part_of(setting) for setting in settings} == set(one.parts)
    for setting in one.sample():
        assert setting in settings
        assert beyond.experiment_of(one.quick(setting)) == name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_parts_and_kinds_choose_studies(name):
    one = EXPERIMENTS[name]
    first = one.parts[0]
    chosen = beyond.selection([name], [first], ["dmu", "gru"])[name]
    assert {one.part_of(setting) for setting in chosen} == {first}
    assert {beyond.kind_of(setting) for setting in chosen} == {"dmu", "gru"}
    assert beyond.selection([name])[name] == one.settings()
    with pytest.raises(ValueError, match="unknown part"):
        beyond.selection([name], ["nothing"])
    with pytest.raises(ValueError, match="unknown kind 'nothing'; choose from"):
        beyond.selection([name], kinds=["nothing"])


@pytest.mark.parametrize("one", [pixels, music])
@pytest.mark.parametrize("size", SIZES)
def test_models_of_one_size_have_its_number_of_weights(one, size):
    for kind, depth in one.MODELS:
        assert weights_of(one.setting(kind, depth, size)) == pytest.approx(SIZES[size], rel=0.02)


def test_large_language_models_have_equally_many_rates_to_choose_from():
    rates = {}
    for setting in of_depth.settings("large"):
        rates.setdefault((beyond.kind_of(setting), paper.depth_of(setting)), []).append(setting.lr)
    assert len(rates) == 15
    assert all(found == pytest.approx([found[1] / 2, found[1], 2 * found[1]]) for found in rates.values())
    for (kind, n), found in rates.items():
        assert of_depth.setting(kind, n, "large").lr == found[1]


@pytest.mark.parametrize("part", cells.PARTS)
def test_a_gru_and_an_lstm_have_the_weights_of_the_papers_networks(part):
    like = weights_of(cells.papers(part, "dmu", 2))
    models = [cells.papers(part, "rhn", 2), *(cells.setting(cell, part) for cell in cells.CELLS)]
    assert [weights_of(model) for model in models] == pytest.approx([like] * 3, rel=0.02)


@pytest.mark.parametrize(("kind", "depth"), pixels.MODELS)
def test_gradients_over_784_steps_in_bfloat16_are_those_of_float32(kind, depth):
    network = MADE["pixel-mnist"]().network(pixels.quick(pixels.setting(kind, depth)))
    x, target = torch.rand(4, 784, 1).where(torch.rand(4, 784, 1) > 0.8, 0), torch.arange(4)

    def gradient(low: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = torch.nn.functional.cross_entropy(network(x), target)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])

    assert torch.cosine_similarity(gradient(True), gradient(False), 0) > 0.99


@pytest.mark.missing("data sets", None if DATA else "$DEEPMEMORY_DATA says where they are")
@pytest.mark.parametrize("data", ["mnist", "nottingham", "ptb", "spanish", "german", "german-2018"])
def test_weights_are_those_of_the_data(data):
    of = {"mnist": paper.setting("pixel-mnist", "gru"), "nottingham": paper.setting("polymusic", "gru")}
    of["ptb"] = paper.setting("natlang", "gru")
    language, _, release = data.partition("-")
    made = of.get(data) or replace(paper.setting("translation", "gru"), language=language, release=release or "2020")
    task = task_of(made, DATA)
    assert (task.input_size, task.output_size) == ENDS[data]


@pytest.mark.parametrize("task", ["polymusic", "natlang", "translation", "pixel-mnist"])
def test_other_studies_of_the_papers_tasks_stay_on_its_pages(task):
    for setting in paper.settings([task], paper.KINDS):
        assert beyond.experiment_of(setting) is None
        assert beyond.experiment_of(paper.quick(setting)) is None
        assert beyond.experiment_of(replace(setting, lr=0.5, hidden=(77,))) is None


def test_an_unknown_experiment_gets_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dmu", "beyond", "width"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "error: unknown experiment 'width'; choose from depth" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_from_training_to_its_page(name, made_data, tmp_path):
    changes = [f"--set={change}" for change in TINY[name]]
    result = invoke("beyond", name, "--quick", "--runs", 2, *changes, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    studies = Records(tmp_path).studies()
    assert len(studies) == len(EXPERIMENTS[name].sample())
    assert all(len(study.runs) == 2 and all(run.test for run in study.runs) for study in studies)
    page = (tmp_path / "report" / "beyond.md").read_text()
    assert f"## {EXPERIMENTS[name].title}" in page
    assert "No study here has the settings of the experiment unchanged" in page
    assert (tmp_path / "report" / "figures" / f"beyond-{name}.svg").exists()
    assert EXPERIMENTS[name].title in result.output
    assert not (tmp_path / "report" / "synthetic.md").exists()


def test_json_tells_the_studies_of_an_experiment(made_data, tmp_path):
    changes = [f"--set={change}" for change in TINY["depth"]]
    result = invoke("beyond", "depth", "--quick", "--kinds", "gru", *changes, "--json", "--out", tmp_path)
    (told,) = json.loads(result.output.splitlines()[-1])["tasks"]
    assert told["experiment"] == "depth"
    assert {study["kind"] for study in told["changed"]} == {"gru"}


@pytest.mark.parametrize("task", beyond.OF_TASK)
def test_train_takes_the_tasks_of_experiments(task, made_data, tmp_path):
    name, _ = beyond.OF_TASK[task]
    changes = [f"--set={change}" for change in TINY[name]]
    result = invoke("train", task, "--cell", "gru", "--quick", *changes, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (study,) = Records(tmp_path).studies()
    assert (study.setting.task, study.setting.cell) == (task, "gru")
    assert task in invoke("list", "--json", "--out", tmp_path).output


def test_one_rate_for_all_trains_each_model_once(tmp_path, monkeypatch, capsys):
    chosen = ["--parts", "s3", "--kinds", "mingru", "--runs", 1, "--set", "lr=0.003", "--set", "epochs=1"]
    changes = [f"--set={change}" for change in TINY["state-tracking"]]
    result = invoke("beyond", "state-tracking", *changes, *chosen, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (study,) = Records(tmp_path).studies()
    assert (study.setting.cell, study.setting.lr) == ("mingru", 0.003)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    monkeypatch.setattr(sys, "argv", ["dmu", "export", str(folder), "--to", str(tmp_path / "network.onnx")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "error: mingru is a control for comparisons in the lab; it cannot be exported" in capsys.readouterr().err


def test_rates_are_searched_with_few_runs_and_the_best_gets_all(tmp_path, monkeypatch):
    few = replace(EXPERIMENTS["state-tracking"], search_runs=1)
    monkeypatch.setitem(EXPERIMENTS, "state-tracking", few)
    chosen = ["--parts", "parity", "--kinds", "gru", "--runs", 3]
    changes = [f"--set={change}" for change in TINY["state-tracking"]]
    result = invoke("beyond", "state-tracking", *changes, *chosen, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    studies = {study.setting.lr: study for study in Records(tmp_path).studies()}
    assert set(studies) == set(beyond.state_tracking.RATES)
    best = min(studies.values(), key=lambda study: min(study.runs[0].curves["valid_loss"]))
    assert {lr: len(study.runs) for lr, study in studies.items()} == dict.fromkeys(studies, 1) | {best.setting.lr: 3}


def test_a_model_that_diverges_at_every_rate_gets_no_more_runs(tmp_path, monkeypatch):
    few = replace(EXPERIMENTS["state-tracking"], search_runs=1)
    monkeypatch.setitem(EXPERIMENTS, "state-tracking", few)
    monkeypatch.setattr(beyond.state_tracking, "RATES", (1e30, 1e31))
    chosen = ["--parts", "parity", "--kinds", "residual", "--runs", 3]
    changes = [f"--set={change}" for change in TINY["state-tracking"]]
    result = invoke("beyond", "state-tracking", *changes, *chosen, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert [[run.state for run in study.runs] for study in Records(tmp_path).studies()] == [["diverged"]] * 4


@pytest.mark.parametrize("arguments", ["beyond long-adding --kinds gru", "paper adding --cells gru"])
def test_a_change_that_no_study_has_is_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match="none of the selected studies has the setting transition_dropout"):
        invoke(*arguments.split(), "--set", "transition_dropout=0.5", "--out", tmp_path)


def test_the_paper_has_no_such_tasks(monkeypatch, capsys):
    assert not set(PAPER_TASKS) & set(beyond.OF_TASK)
    monkeypatch.setattr(sys, "argv", ["dmu", "paper", "ptb"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "unknown task 'ptb'" in capsys.readouterr().err
