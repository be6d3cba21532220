"""What is told of a model is what the library measures on it."""

import json
import math
import sqlite3

import pytest
import torch
from lab.checkpoints import made, small, train
from lab.test_cli import invoke

import deepmemory as dm
from deepmemory.lab import draws, inspection, models, training
from deepmemory.lab.inspection import as_data, ends, inspect, log_ratio, watch
from deepmemory.lab.models import Model
from deepmemory.lab.records import Records, merge
from deepmemory.lab.settings import Machine

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
    return Model(task.network(setting).eval(), setting, 0, task)


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
    names = {path.stem for path in inspection.draw(found, tmp_path)}
    if cell == "dmu":
        assert len(data["condition"]) == 2 * len(data["gates"]) == 2 * layers
        assert names == {"flow", "gates", "eigenvalues"}
        assert "overwritten" in shown
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
    feed = model.task.feed(draws.VALIDATION, model.setting, torch.tensor([0]), 32, torch.float32)
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


def test_ratios():
    assert log_ratio(1e-200, 1e-3) == pytest.approx(-197)
    assert log_ratio(0.0, 1.0) == -math.inf
    assert log_ratio(1.0, 0.0) == math.inf
    assert math.isnan(log_ratio(0.0, 0.0))
    assert math.isnan(log_ratio(math.nan, 1.0))


def test_inspect_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "task_of", lambda setting, data: made(setting))
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


# --- while training -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["adding", "translation"])
@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_watching_tells_each_run_s_own_numbers(task, cell, monkeypatch):
    setting = small(task, cell=cell)
    of_task = made(setting)
    monkeypatch.setattr(training, "task_of", lambda *_: of_task)
    trainer = training.make_trainer(setting, Machine("cpu"))
    group = training.fresh_group(trainer, [4, 7, 9])
    before = {name: weight.detach().clone() for name, weight in group.weights.items()}
    chance = torch.get_rng_state()
    together = watch(trainer, group)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(group.weights[name], weight) for name, weight in before.items())
    modules = ["encoder", "decoder"] if task == "translation" else ["recurrent"]
    told = ["flow", "z radius", "candidate radius", "gate", "saturated"] if cell == "dmu" else ["flow"]
    assert set(together) == {f"{module}.0.{what}" for module in modules for what in told}
    assert {len(values) for values in together.values()} == {3}
    assert watch(trainer, training.fresh_group(trainer, [7])) == {name: [of[1]] for name, of in together.items()}
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
    merged.close()


@pytest.mark.parametrize("version", [1, 2])
def test_records_from_before_watching_are_read_and_gone_on_with(tmp_path, version):
    setting = small()
    train(tmp_path, setting)
    with sqlite3.connect(tmp_path / "records.sqlite") as db:
        db.execute("DROP TABLE watch")
        if version == 1:
            db.execute("DROP TABLE packed")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    opened = Records(tmp_path)
    assert opened.watched(setting.key) == {}
    assert len(opened.studies()) == 1
    opened.close()
    opened = Records(tmp_path, write=True)
    opened.write_watch(opened.open_study(setting, []), 1, [0], {"a": [1.0]})
    assert opened.watched(setting.key) == {0: {"a": {1: 1.0}}}
    opened.close()
