"""Training in the background, and what the page starts with."""

import pytest
import torch
from lab.use.play.asking import CELL, EMPTY, TRAINING, ask, ended, follow

from deepmemory.lab import paper
from deepmemory.lab.settings import Machine
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training import loop
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.trainer import make_trainer
from deepmemory.lab.use.play import requests
from deepmemory.lab.use.play.requests import BOUNDS, CELLS
from deepmemory.lab.use.play.training import BackgroundTrainer


class TestTraining:
    def test_curves_and_gates_come_until_it_has_finished(self, serving):
        one = serving()
        request = TRAINING | {"cells": {"lstm": CELL, "dmu": CELL, "gru": CELL}}
        assert ask(one, "/start", request) == (200, {"number": 1})
        news, epochs, gates = follow(one, ended)
        assert (news["state"], news["reason"], news["total_epochs"]) == ("finished", "", 3)
        assert [(e["epoch"], e["cell"]) for e in epochs] == [
            (n, cell) for n in (1, 2, 3) for cell in ("dmu", "gru", "lstm")
        ]
        assert all(list(e["losses"]) == ["0", "1"] and min(e["losses"].values()) > 0 for e in epochs)
        keep = gates[-1]["keep"]
        assert (len(keep), len(keep[0]), gates[-1]["epoch"]) == (3, 24, 3)
        assert all(0 <= share <= 1 for unit in keep for share in unit)
        assert gates[0]["numbers"] == gates[-1]["numbers"]
        assert len(gates[-1]["marked"]) in (1, 2)  # a mark on the first step is invisible
        marked = [gates[-1]["numbers"][step] for step in gates[-1]["marked"]]
        assert gates[-1]["target"] == pytest.approx(0.5 + sum(marked) / 4, abs=1e-3)

    def test_the_losses_are_those_of_the_lab(self, serving):
        one = serving()
        ask(one, "/start", TRAINING)
        _, epochs, _ = follow(one, ended)
        trainer = make_trainer(requests.training_request(TRAINING).setting("dmu"), Machine("cpu"))
        alone = loop.train(trainer, fresh_group(trainer, [1]))
        assert [e["losses"]["1"] for e in epochs] == pytest.approx([e.values[1]["valid_loss"] for e in alone], rel=1e-4)

    def test_stop(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        follow(one, lambda _, epochs: len(epochs) >= 2)
        assert ask(one, "/stop", {}) == (200, {})
        news, epochs, _ = follow(one, ended)
        assert news["state"] == "stopped"
        assert len(epochs) < 500

    def test_a_stop_does_not_wait_for_the_epoch(self, serving, monkeypatch):
        monkeypatch.setattr("deepmemory.lab.use.play.requests.STEPS", 10**6)
        one = serving()
        ask(one, "/start", TRAINING)
        follow(one, lambda news, _: news["gates"])
        ask(one, "/stop", {})
        assert follow(one, ended)[0]["state"] == "stopped"

    def test_another_start_takes_its_place(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        first = one.trainer.training
        assert ask(one, "/start", TRAINING | {"cells": {"gru": CELL}})[1] == {"number": 2}
        news, epochs, gates = follow(one, ended)
        assert (news["number"], news["state"], news["cells"], gates) == (2, "finished", ["gru"], [])
        assert {e["cell"] for e in epochs} == {"gru"}
        assert first.state == "stopped"
        assert not first.thread.is_alive()

    def test_a_closed_page_ends_it(self, serving):
        one = serving(EMPTY, EMPTY, BackgroundTrainer(idle_timeout=0))
        ask(one, "/start", TRAINING | {"epochs": 500})
        one.trainer.training.thread.join()
        assert (one.trainer.training.state, one.trainer.training.reason) == ("stopped", "the page was closed")

    def test_what_goes_wrong_is_told(self, serving, monkeypatch):
        def broken(*_):
            raise RuntimeError("no room")

        monkeypatch.setattr("deepmemory.lab.use.play.training.fresh_group", broken)
        one = serving()
        ask(one, "/start", TRAINING)
        news, _, _ = follow(one, ended)
        assert (news["state"], news["reason"]) == ("failed", "RuntimeError: no room")

    def test_the_server_ends_with_it(self, serving):
        one = serving()
        ask(one, "/start", TRAINING | {"epochs": 500})
        one.trainer.close()
        assert not one.trainer.training.thread.is_alive()


class TestDefaults:
    def test_cells_have_about_equal_weights_at_the_papers_length(self, serving):
        state = ask(serving(), "/state")[1]
        weights = {cell: state["weights"][cell][of["hidden"] - 1] for cell, of in state["cells"].items()}
        assert weights["dmu"] == paper.WEIGHT_COUNTS["adding"]["dmu"]
        for cell in ("gru", "lstm"):  # no other state size comes closer
            distances = [abs(count - weights["dmu"]) for count in state["weights"][cell]]
            assert abs(weights[cell] - weights["dmu"]) == min(distances)
        assert state["bounds"]["length"]["default"] == paper.LENGTHS["adding"][0]

    def test_the_dmu_learns_within_a_few_epochs(self, serving):
        one = serving()
        defaults = {name: BOUNDS[name].default for name in ("runs", "length")}
        ask(one, "/start", {"cells": {"dmu": CELLS["dmu"]._asdict()}, "epochs": 15, **defaults})
        _, epochs, _ = follow(one, ended)
        learned = sum(loss < 0.01 for loss in epochs[-1]["losses"].values())
        assert learned > defaults["runs"] / 2

    @pytest.mark.parametrize("cell", CELLS)
    def test_the_start_bias_is_what_a_fresh_cell_keeps(self, cell):
        """Without input, a fresh cell whose gate starts at 9 keeps its state; at 0 it keeps about half of it."""
        kept = {}
        for start in (0.0, 9.0):
            request = requests.training_request(TRAINING | {"cells": {cell: CELL | {"start": start}}})
            setting = request.setting(cell)
            network = task_of(setting).network(setting)
            h = torch.ones(1, 1, 3)
            _, after = network.recurrent(torch.zeros(1, 1, 2), (h, h) if cell == "lstm" else h)
            kept[start] = (after[1] if cell == "lstm" else after).mean().item()
        assert kept[9.0] == pytest.approx(1, abs=0.02)
        assert 0.2 < kept[0.0] < 0.8
