"""What is told of a model is what the library measures on it."""

import json
import math
import signal
from dataclasses import replace

import pytest
import torch
from lab.checkpoints import made, small, train
from lab.processes import MAIN, Forked
from lab.test_cli import SMALL, error_of, invoke, wait_for_epoch

import deepmemory as dm
from deepmemory.lab.records import DIVERGED, Records, merge
from deepmemory.lab.settings import Machine
from deepmemory.lab.training import random_streams, studies
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.trainer import make_trainer
from deepmemory.lab.use import inspection, loading
from deepmemory.lab.use.inspection import as_data, ends, inspect, log_ratio, watch
from deepmemory.lab.use.loading import TrainedModel

CELLS = {
    "dmu": {"transition": (4,), "hidden": (5, 3)},
    "rhn": {"depth": 2},
    "rnn": {},
    "gru": {"hidden": (5, 5)},
    "lstm": {"hidden": (4, 3)},
}


def fresh(setting):
    torch.manual_seed(0)
    task = made(setting)
    return TrainedModel(task.network(setting).eval(), setting, 0, task)


def test_a_residual_transition_has_gates_but_no_gradient_condition(tmp_path):
    setting = small(transition=(4, 4), residual=True)
    found = inspect(fresh(setting))
    assert not found.conditions
    assert len(found.gates) == 1
    assert found.remarks == ["the gradient condition is not defined for a residual transition"]
    assert {path.stem for path in inspection.draw(found, tmp_path)} == {"flow", "gates"}
    trainer = make_trainer(setting, Machine("cpu", engine="plain"))
    watched = watch(trainer, fresh_group(trainer, [0]))
    assert watched.keys() == {f"recurrent.0.{what}" for what in ("flow", "gate", "saturated")}
    with pytest.raises(ValueError, match="the gradient condition is not defined for a residual transition"):
        replace(setting, condition="kept")


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell(cell, tmp_path, capsys):
    model = fresh(small(cell=cell, **CELLS[cell]))
    found = inspect(model)
    data = json.loads(json.dumps(as_data(found)))
    assert sum(data["weights"].values()) == sum(p.numel() for p in model.network.parameters())
    layers = len(model.setting.hidden)
    assert len(data["flow"]) == layers * (2 if cell == "lstm" else 1)
    assert all(part["steps"] == 26 for part in data["flow"])
    inspection.show(found)
    shown = capsys.readouterr().out
    assert "log10 ratio" in shown
    assert data["sizes"]["state"] == list(model.setting.hidden)
    assert f"state {', '.join(map(str, model.setting.hidden))}; " in shown
    assert all(f"{name} " in shown for name in ("recurrent", "output"))
    names = {path.stem for path in inspection.draw(found, tmp_path)}
    if cell == "dmu":
        assert len(data["condition"]) == 2 * len(data["gates"]) == 2 * layers
        assert names == {"flow", "gates", "eigenvalues"}
        assert "overwritten" in shown
        assert "hidden layers 4; linear layers 2" in shown
    else:
        assert names == {"flow"}
        assert data["condition"] == data["gates"] == []
        assert f"the cell here is {cell.upper()}" in " ".join(shown.split())
    assert all((tmp_path / f"{name}.{kind}").stat().st_size for name in names for kind in ("svg", "png", "pdf"))


def test_numbers_are_the_library_s():
    model = fresh(small(transition=(4,)))
    found = inspect(model)
    data = as_data(found)
    condition = dm.gradients.condition(model.network.recurrent)
    assert data["condition"][0]["radius"] == condition[0].gate.radius
    assert data["condition"][1]["inside"] == condition[0].candidate.satisfied
    feed = model.task.feed(random_streams.VALIDATION, model.setting, torch.tensor([0]), 32, torch.float32)
    (x, lengths), target, _ = feed.batch(0, feed.plan(0)[0])
    assert len(x) == model.setting.validation

    def loss(answer):
        return (answer[:, 0] - target[0]).square().mean()

    flow = dm.gradients.flow(model.network, (x, lengths), loss)
    assert data["loss"] == pytest.approx(flow.loss)
    first, last = ends(found.flow[0])
    norms = flow[0].norms
    at_end = torch.stack([norms[length - 1, row] for row, length in enumerate(lengths)])
    assert (first, last) == pytest.approx((norms[0].median().item(), at_end.median().item()))
    assert data["flow"][0]["log10 ratio"] == pytest.approx(math.log10(first / last))
    assert data["gates"][0]["mean"] == dm.gradients.gates(model.network, (x, lengths))[0].mean


@pytest.mark.parametrize("task", ["polymusic", "natlang", "translation", "pixel-mnist"])
def test_every_task(task, tmp_path):
    model = fresh(small(task))
    data = as_data(inspect(model))
    modules = ["encoder", "decoder"] if task == "translation" else ["recurrent"]
    assert [part["module"] for part in data["flow"]] == [part["module"] for part in data["gates"]] == modules
    assert all(math.isfinite(part["log10 ratio"]) and part["first"] > 0 for part in data["flow"])
    assert math.isfinite(data["loss"])


def test_pictures_show_what_they_should():
    found = inspect(fresh(small(transition=(4,), hidden=(5, 3))))
    (panel,) = inspection.draw_flow(found).axes
    assert panel.get_yscale() == "log"
    assert [len(line.get_ydata()) for line in panel.get_lines()] == [26, 26]  # a curve over time for each layer
    images = [image for axes in inspection.draw_gates(found).axes for image in axes.get_images()]
    shares = [image.get_array() for image in images]
    assert [share.shape for share in shares] == [(5, 26), (3, 26)]  # unit by step
    ends = min(share.min() for share in shares), max(share.max() for share in shares)
    assert {image.get_clim() for image in images} == {ends}  # the colours of both span what occurs
    for panel, layer in zip(inspection.draw_eigenvalues(found).axes, found.conditions["recurrent"], strict=True):
        radii = [math.hypot(line.get_xdata()[0], line.get_ydata()[0]) for line in panel.get_lines()]
        assert radii == pytest.approx([1.0, 0.5])
        places = [complex(*place) for points in panel.collections for place in points.get_offsets()]
        values = [*layer.candidate.eigenvalues.tolist(), *layer.gate.eigenvalues.tolist()]
        assert places == pytest.approx(values)


def test_ratios():
    assert log_ratio(1e-200, 1e-3) == pytest.approx(-197)
    assert log_ratio(0.0, 1.0) == -math.inf
    assert log_ratio(1.0, 0.0) == math.inf
    assert math.isnan(log_ratio(0.0, 0.0))
    assert math.isnan(log_ratio(math.nan, 1.0))


def test_inspect_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "task_of", lambda setting, data: made(setting))
    path = train(tmp_path, small(transition=(4,)))
    told = json.loads(invoke("inspect", path, "--run", 1, "--json").stdout)
    assert (told["task"], told["cell"], told["run"]) == ("adding", "dmu", 1)
    shown = invoke("inspect", path.parent, "--to", tmp_path / "seen").stdout
    assert "Gradient condition" in shown
    kept = json.loads((tmp_path / "seen" / "inspection.json").read_text())
    assert sorted(path.name for path in (tmp_path / "seen").glob("*.svg")) == [
        "eigenvalues.svg",
        "flow.svg",
        "gates.svg",
    ]
    assert kept["run"] in (0, 1)


@pytest.mark.parametrize("task", ["adding", "translation"])
@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_watching_tells_each_run_s_own_numbers(task, cell, monkeypatch):
    setting = small(task, cell=cell)
    of_task = made(setting)
    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", lambda *_: of_task)
    trainer = make_trainer(setting, Machine("cpu"))
    group = fresh_group(trainer, [4, 7, 9])
    before = {name: weight.detach().clone() for name, weight in group.weights.items()}
    chance = torch.get_rng_state()
    together = watch(trainer, group)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(group.weights[name], weight) for name, weight in before.items())
    modules = ["encoder", "decoder"] if task == "translation" else ["recurrent"]
    told = ["flow", "z radius", "candidate radius", "gate", "saturated"] if cell == "dmu" else ["flow"]
    assert set(together) == {f"{module}.0.{what}" for module in modules for what in told}
    assert {len(values) for values in together.values()} == {3}
    assert watch(trainer, fresh_group(trainer, [7])) == {name: [of[1]] for name, of in together.items()}
    group.rows, group.weights = [0, 2], {name: weight[[0, 2]] for name, weight in group.weights.items()}
    assert watch(trainer, group) == {name: [of[0], of[2]] for name, of in together.items()}


def test_what_was_watched_is_recorded(tmp_path):
    setting = small()
    train(tmp_path, setting, [0, 1])
    opened = Records(tmp_path, write=True)
    study = opened.open_study(setting, [])
    for epoch in (1, 2):
        opened.write_watch(study, epoch, [0, 1], {"a": [0.25 * epoch, -math.inf], "b": [math.nan, 1e-300]})
    opened.write_watch(study, 2, [0], {"a": [0.75]})
    told = opened.watched(setting.key)
    assert told[0]["a"] == {1: 0.25, 2: 0.75}
    assert told[1] == {"a": {1: -math.inf, 2: -math.inf}, "b": {1: 1e-300, 2: 1e-300}}
    assert math.isnan(told[0]["b"][1])
    assert opened.watched("nothing") == {}
    opened.begin(study, [0], 1, opened.open_session("cpu", "plain"))  # a run that goes on after epoch 1
    assert opened.watched(setting.key)[0]["a"] == {1: 0.25}
    assert opened.watched(setting.key)[1]["a"].keys() == {1, 2}
    opened.close()
    merged = merge([tmp_path], tmp_path / "merged")
    assert merged.watched(setting.key)[1] == told[1]
    merged.begin(study, [1], 1, merged.open_session("cpu", "plain"))  # goes on after it was packed
    assert merged.watched(setting.key)[1] == {"a": {1: -math.inf}, "b": {1: 1e-300}}
    merged.close()
    again = merge([tmp_path / "merged"], tmp_path / "again")
    assert again.watched(setting.key)[1]["a"] == {1: -math.inf}
    assert math.isnan(again.watched(setting.key)[0]["b"][1])
    again.close()


def watched_in(out):
    """Everything watched, and the seeds of all runs."""
    opened = Records(out)
    (study,) = opened.studies()
    told = opened.watched(study.setting.key)
    opened.close()
    return told, [run.seed for run in study.runs]


def test_watched_from_the_command_line_killed_or_not(tmp_path):
    command = ["paper", "adding", "--cells", "dmu", "--epochs", "25", "--json", *SMALL, "--set=steps=3"]
    killed = Forked(MAIN, *command, "--watch", "gradients", "--out", tmp_path / "killed")
    wait_for_epoch(killed, 5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before, _ = watched_in(tmp_path / "killed")
    assert before
    assert 24 not in before[0]["recurrent.0.gate"]
    for name in ("killed", "whole"):
        assert invoke(*command, "--watch", "gradients", "--out", tmp_path / name).exit_code == 0
    told, seeds = watched_in(tmp_path / "whole")
    assert watched_in(tmp_path / "killed") == (told, seeds)
    assert list(told) == seeds == [0, 1]
    names = {f"recurrent.0.{what}" for what in ("z radius", "candidate radius", "gate", "saturated", "flow")}
    for of_run in told.values():
        assert set(of_run) == names
        assert all(list(values) == [0, 1, *range(2, 26, 2)] for values in of_run.values())
    assert told[0] != told[1]
    assert (tmp_path / "whole" / "report" / "gradients.md").exists()

    assert invoke(*command, "--out", tmp_path / "plain").exit_code == 0
    assert watched_in(tmp_path / "plain") == ({}, seeds)
    assert not (tmp_path / "plain" / "report" / "gradients.md").exists()


def test_what_cannot_be_watched(tmp_path, monkeypatch, capsys):
    command = ["train", "adding", "--quick", "--out", tmp_path / "runs"]
    said = error_of(monkeypatch, capsys, *command, "--watch", "gradients", "--on", "ray")
    assert said.startswith("error: --watch ")
    said = error_of(monkeypatch, capsys, *command, "--watch", "weights")
    assert "unknown --watch 'weights'; choose from none, gradients" in said
    assert not (tmp_path / "runs" / "records.sqlite").exists()


def test_a_run_that_diverges_is_watched_to_its_end(tmp_path):
    setting = small(lr=1e30, epochs=3)
    task = made(setting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmemory.lab.training.trainer.task_of", lambda *_: task)
        studies.run_studies([setting], [0, 1], tmp_path, Machine("cpu", threads=1), PlainLines(), watch=watch)
    opened = Records(tmp_path)
    assert {run.state for run in opened.study(setting.key).runs} == {DIVERGED}
    told = opened.watched(setting.key)
    opened.close()
    for of_run in told.values():
        assert math.isfinite(of_run["recurrent.0.z radius"][0])
        assert math.isnan(of_run["recurrent.0.z radius"][1])
