"""The paper's settings and numbers, compared with the paper."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.real_data import digits

from deepmemory.lab import paper
from deepmemory.lab.settings import CELLS, LANGUAGES, PIXELS, SYNTHETIC, Setting
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import LastStateNetwork, initial_weights, weight_count

TABLES = Path(__file__).parents[3] / "shared" / "paper" / "tables.json"


@pytest.mark.parametrize("setting", paper.settings(SYNTHETIC), ids=lambda s: f"{s.task}-{s.cell}")
def test_weight_counts_are_the_printed_ones(setting):
    with_output = setting.task != "noisy-sequence" and (setting.task, setting.cell) != ("adding", "rhn")
    ours = weight_count(setting, task_of(setting), output_layer=with_output)
    assert ours == paper.WEIGHT_COUNTS[setting.task][setting.cell]


def test_forget_gates_start_at_2_in_both_bias_vectors():
    network = LastStateNetwork(setting := paper.setting("adding", "lstm"), task_of(setting))
    for name, bias in network.recurrent.named_parameters():
        if name.startswith("bias"):
            assert bias.chunk(4)[1].tolist() == [2.0, 2.0]
            assert (bias.chunk(4)[0] < 1).all()


@pytest.mark.parametrize(("cell", "name", "gate", "value"), [("gru", "update", 1, 40.0), ("lstm", "input", 0, -40.0)])
def test_a_gru_and_an_lstm_can_start_out_keeping_their_state(cell, name, gate, value):
    plain = Setting(cell=cell, hidden=(6, 5), **({"forget_bias": 20.0} if cell == "lstm" else {}))
    keeping = replace(plain, **{f"{name}_bias": value})
    weights = [initial_weights(setting, task_of(setting), [3]) for setting in (plain, keeping)]
    for key in weights[0]:
        moved = torch.zeros_like(weights[0][key])
        if ".bias_ih" in key:
            moved.chunk(3 if cell == "gru" else 4, 1)[gate].fill_(value)
        torch.testing.assert_close(weights[1][key] - weights[0][key], moved, msg=key)
    network = LastStateNetwork(keeping, task_of(keeping)).recurrent
    state = tuple(torch.randn(1, 2, width) for width in keeping.hidden)
    before = (state, state) if cell == "lstm" else state
    after = network(torch.randn(2, 7, 2), before)[1]
    for kept, given in zip(after[1] if cell == "lstm" else after, state, strict=True):  # of an LSTM, c
        torch.testing.assert_close(kept, given)


def test_memory_gates_start_at_3():
    network = LastStateNetwork(setting := paper.setting("adding", "dmu"), task_of(setting))
    assert network.recurrent.transition_weights()[-1][1].tolist() == [3.0] * 5 + [0.0] * 5


@pytest.mark.parametrize("cell", CELLS)
def test_initial_weights_depend_on_the_seed_alone(cell):
    setting = paper.setting("temporal-order", cell)
    task = task_of(setting)
    torch.manual_seed(1)
    several = initial_weights(setting, task, [4, 5, 6])
    torch.manual_seed(2)
    alone = initial_weights(setting, task, [5])
    for name, weight in alone.items():
        assert torch.equal(several[name][1], weight[0])
        assert name.endswith("bias_1_l0") or "bias" in name or not torch.equal(several[name][0], several[name][1])


def test_every_synthetic_task_has_claims_about_every_cell():
    for task in SYNTHETIC:
        assert {cell for claim in paper.CLAIMS[task] for cell in claim.cells} == set(CELLS)


def test_the_paper_has_this_many_settings():
    def count(*tasks, **choice):
        return len(paper.settings(tasks, **choice))

    assert count(*SYNTHETIC) == 15
    assert count("polymusic") == count("natlang") == 3 * 4  # rhn, dmu, dmu-c at four depths
    assert count("translation") == 3 * 4 * len(LANGUAGES)
    assert count("pixel-mnist") == 2 * 2 * 3
    assert count("natlang", cells=CELLS, depths=[1, 10]) == 5 + 2
    with pytest.raises(ValueError, match="depths 1, 2, 5, 10, got 3"):
        paper.setting("natlang", "dmu", 3)


def test_architectures_of_real_data():
    assert paper.setting("natlang", "dmu", 5).transition == (131,) * 4
    deep = paper.setting("translation", "dmu-c", 10)
    assert (deep.hidden, deep.transition, deep.module_rate, deep.memory_bias) == ((200,), (300,) * 9, "same", 0.0)
    rhn = paper.setting("polymusic", "rhn", 10)
    assert (rhn.hidden, rhn.depth, rhn.lr, rhn.weight_decay, rhn.epochs) == ((100,), 10, 0.005, 1e-3, 500)


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("units", paper.UNITS)
def test_cells_for_pixels_have_equal_weights_and_learn_and_start_like_the_module(units, pixels):
    dmu, gru, lstm = (paper.setting("pixel-mnist", c, units=units, pixels=pixels) for c in ("dmu", "gru", "lstm"))
    assert dmu.pixels == gru.pixels == lstm.pixels == pixels
    assert dmu.weight_decay == {"ordered": 1e-4, "permuted": 3e-4}[pixels]
    assert gru.lr == lstm.lr == dmu.lr / 2  # lr / 2n with n = 1
    assert gru.weight_decay == lstm.weight_decay == dmu.weight_decay / 2
    assert dmu.memory_bias == gru.update_bias == 2 * lstm.forget_bias == -lstm.input_bias == 4  # forget: twice
    counts = [weight_count(setting, digits()) for setting in (dmu, gru, lstm)]
    assert counts[0] == {96: 19_786, 128: 34_570}[units]
    assert all(abs(count - counts[0]) < 0.03 * counts[0] for count in counts)


def test_an_unknown_order_of_pixels_is_named():
    with pytest.raises(ValueError, match="unknown pixels 'mixed'; choose from ordered, permuted"):
        paper.setting("pixel-mnist", "dmu", pixels="mixed")


def test_real_data_tables_are_complete():
    for task in ("polymusic", "natlang", "translation"):
        for cell in ("rhn", "dmu"):
            assert tuple(paper.REAL_RECIPES[task][cell]) == paper.DEPTHS


@pytest.mark.skipif(not TABLES.exists(), reason="the paper's tables are not beside this checkout")
def test_published_numbers_are_the_papers():
    tables = json.loads(TABLES.read_text())
    for name, results in paper.RESULTS.items():
        ours = [
            {"cell": r.cell, "depth": r.depth, "train": r.train._asdict(), "test": r.test._asdict()}
            | ({"pair": r.pair} if r.pair else {})
            for r in results
        ]
        assert ours == tables[name]["rows"]
    assert [r._asdict() for r in paper.PIXEL_MNIST] == tables["pixel_mnist"]["rows"]
    assert set(paper.RESULTS) | {"pixel_mnist"} == set(tables)
