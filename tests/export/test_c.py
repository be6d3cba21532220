"""A model in C gives Python's numbers, on every compiler and machine, for as long as it runs."""

import re
import subprocess

import pytest
import torch
from export.compilers import MACHINES, STRICT, machine, needs, outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import LAYERS, OWN, randomise
from tolerances import assert_close
from torch import nn

import deepmemory as dm
from deepmemory import export
from deepmemory.export.c_cells import number
from deepmemory.export.rounding import round_rows
from deepmemory.ops import ACTIVATIONS

STEPS = 3000
MODELS = {
    **{name: lambda name=name: [LAYERS[name](3, 5, **OWN.get(name, {}))] for name in LAYERS},
    **{name: lambda name=name: [dm.DMU(3, 9, activation=name), nn.Linear(9, 2)] for name in ACTIVATIONS},
    "basic": lambda: [dm.DMU(3, 5, transition=[])],
    "residual": lambda: [dm.DMU(3, 5, transition=[6] * 4, residual=True)],
    "without bias": lambda: [dm.DMU(3, 5, transition=[8, 6], bias=False)],
    "relu": lambda: [dm.RNN(3, 5, nonlinearity="relu")],
    "projected": lambda: [dm.LSTM(3, 7, 2, proj_size=4)],
    "dropout": lambda: [dm.LSTM(3, 5, recurrent_dropout=0.3), dm.DMU(5, 4, transition_dropout=0.2)],
    "widths": lambda: [dm.DMU(3, [5, 7, 2]), nn.Linear(2, 3, bias=False)],
    "stacked": lambda: [dm.GRU(3, 5, 2), dm.RHN(5, 4, depth=2), nn.Dropout(), dm.LSTM(4, 6), nn.Linear(6, 1)],
    "cells": lambda: [dm.DMUCell(3, 5, transition=[4]), dm.RHNCell(5, 5, depth=2)],
    "readout": lambda: [
        nn.Linear(3, 4),
        nn.Tanh(),
        dm.DMU(4, 5, batch_first=True),
        nn.LeakyReLU(0.2),
        nn.Sequential(
            nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.SiLU(), nn.Identity(), nn.Linear(6, 2), nn.Sigmoid()
        ),
    ],
    "activation last": lambda: [dm.GRU(3, 5), nn.ReLU()],
}


def make(name: str) -> nn.ModuleList:
    """A model that forgets its past, so that rounding does not grow over thousands of steps."""
    return nn.ModuleList(MODELS[name]()).eval()


@torch.no_grad()
def expected(modules, x):
    """What Python gives at every step, for x (T, features) or words (T)."""
    for module in modules:
        if isinstance(module, dm.DMUCell | dm.RHNCell):
            h, states = None, []
            for x_t in x:
                h = module(x_t, h)
                states.append(h)
            x = torch.stack(states)
        else:
            x = module(x)
            x = x[0] if isinstance(x, tuple) else x
    return x


def written(modules, folder, **options):
    path = folder / "model.c"
    export.c(modules, path, **options)
    return path


@needs("gcc")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_thousands_of_steps_equal_python(name, weights, tmp_path):
    modules, x = make(name), torch.randn(STEPS, 3)
    path = written(modules, tmp_path, weights=weights)
    model = export.rounded(modules) if weights == "int8" else modules
    assert_close(outputs(path, x), expected(model, x))


@pytest.mark.parametrize("on", [machine(name) for name in MACHINES if name != "gcc"])
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("name", [*LAYERS, "gelu", "residual", "readout"])
def test_other_compilers_and_machines(name, weights, on, tmp_path):
    modules, x = make(name), torch.randn(STEPS, 3)
    path = written(modules, tmp_path, weights=weights)
    model = export.rounded(modules) if weights == "int8" else modules
    assert_close(outputs(path, x, on), expected(model, x))


@needs("gcc")
@settings(max_examples=10)
@given(data=st.data())
def test_odd_sizes(data, tmp_path_factory):
    size = st.integers(1, 19)
    features, hidden = data.draw(size), data.draw(st.lists(size, min_size=1, max_size=3))
    name, bias = data.draw(st.sampled_from(list(LAYERS))), data.draw(st.booleans())
    own = {"DMU": {"transition": data.draw(st.lists(size, max_size=3))}, "RHN": {"depth": data.draw(st.integers(1, 3))}}
    layer = LAYERS[name](features, hidden, bias=bias, **own.get(name, {}))
    modules, x = nn.ModuleList([layer, nn.Linear(hidden[-1], data.draw(size))]), torch.randn(20, features)
    path = written(randomise(modules), tmp_path_factory.mktemp("c"))
    assert_close(outputs(path, x), expected(modules, x))


@needs("gcc")
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("squashed", [False, True])
def test_words_in_and_words_out(weights, squashed, tmp_path):
    texts = ["the", "<unk>", "N", 'a "quoted" \\n', "Übergröße", "what??!", "*/", "@", "", "50 %s", "?"]
    modules = nn.ModuleList([nn.Embedding(11, 3), *([nn.Tanh()] if squashed else []), dm.DMU(3, 5), nn.Linear(5, 11)])
    words = torch.randint(0, 11, (500,))
    path = written(modules, tmp_path, weights=weights, words=texts)
    model = export.rounded(modules) if weights == "int8" else modules
    assert_close(outputs(path, words), expected(model, words))
    main = tmp_path / "main.c"
    main.write_text(
        '#include <stdio.h>\n#define MODEL_HEADER\n#include "model.c"\n'
        "int main(void) { for (int i = 0; i < MODEL_OUTPUTS; i++) puts(model_words[i]); return 0; }\n"
    )
    subprocess.run(["gcc", *STRICT, path, main, "-o", tmp_path / "say", "-lm"], check=True)
    said = subprocess.run([tmp_path / "say"], capture_output=True, check=True).stdout.decode()
    assert said.splitlines() == texts


@needs("gcc")
def test_two_models_in_one_program(tmp_path):
    """All names begin with the prefix, also where files are included."""
    export.c(dm.DMU(3, 5), tmp_path / "one.c")
    export.c(dm.DMU(3, 5), tmp_path / "two.c", prefix="other", weights="int8")
    (tmp_path / "main.c").write_text('#include "one.c"\n#include "two.c"\nint main(void) { return 0; }\n')
    subprocess.run(["gcc", *STRICT, "main.c", "-o", "both", "-lm"], cwd=tmp_path, check=True)


@needs("gcc", "g++")
def test_a_header_for_cplusplus(tmp_path):
    export.c(dm.DMU(3, 5), tmp_path / "one.c")
    (tmp_path / "main.cpp").write_text(
        '#define ONE_HEADER\n#include "one.c"\nint main() { one_state s; one_reset(&s); return s.h0[0] != 0; }\n'
    )
    subprocess.run(["gcc", *STRICT, "-c", "one.c"], cwd=tmp_path, check=True)
    subprocess.run(["g++", "-Wall", "-Wextra", "-Werror", "main.cpp", "one.o", "-o", "both"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "both"], check=True)


def test_the_comment_tells_the_truth(tmp_path):
    modules = nn.ModuleList([dm.LSTM(3, 5, 2), nn.Linear(5, 4)])
    text = written(modules, tmp_path, note="Trained on a */ bus.\nSeed 3.").read_text()
    joint = 2 * 20  # both biases of a layer are one
    bytes_ = 4 * (sum(p.numel() for p in modules.parameters()) - joint)
    assert f"{4 * 4 * 5} bytes of state, {bytes_:,} bytes of weights (float32), {4 * 20} bytes of buffers" in text
    assert " * Trained on a * / bus.\n * Seed 3.\n" in text
    assert " *     LSTM(3, 5, num_layers=2)\n" in text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=200)
def test_numbers_come_back_exactly(value):
    text = number(value)
    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?f", text)
    assert re.search(r"[.e]", text)
    assert torch.tensor(float(text[:-1]), dtype=torch.float32).item() == value


def test_rounding_moves_no_weight_by_more_than_half_a_step():
    weight = torch.randn(50, 30) * torch.logspace(-6, 6, 50)[:, None]
    weight[7] = 0
    whole, scale = round_rows(weight)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(-1).tolist() == [0 if row == 7 else 127 for row in range(50)]
    assert ((whole * scale[:, None] - weight).abs() <= weight.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)).all()


def test_rounded_leaves_the_model_and_its_biases_alone():
    layer = randomise(dm.DMU(3, 5))
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    after = export.rounded(layer).state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())
    assert [name for name in before if torch.equal(after[name], before[name])] == ["bias_1_l0", "bias_2_l0"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dm.GRU(3, 5, bidirectional=True), ValueError, "GRU is bidirectional .* bidirectional=False"),
        (lambda: dm.DMU(3, 5, transition=nn.Linear(8, 10)), ValueError, "DMU has a transition given as a module"),
        (lambda: nn.GRU(3, 5), TypeError, r"cannot write GRU as C; .*export.c\(\[model.recurrent, model.output\]"),
        (lambda: [dm.GRU(3, 5), nn.Linear(4, 2)], ValueError, "Linear takes 4 features, .* returns 5"),
        (lambda: [dm.GRU(3, 5), nn.Embedding(4, 2)], TypeError, "Embedding can only be used at the start"),
        (lambda: [nn.ReLU(), dm.GRU(3, 5)], TypeError, "ReLU can only be used after a layer or Linear"),
        (lambda: [dm.GRU(3, 5), nn.GELU("tanh")], ValueError, "GELU with approximate='tanh'"),
        (lambda: [nn.Linear(3, 5)], ValueError, "expected at least one of deepmemory's layers"),
        (list, ValueError, "expected at least one of deepmemory's layers"),
    ],
)
def test_what_cannot_be_written_says_so(make, error, message, tmp_path):
    with pytest.raises(error, match=f"^c: {message}"):
        export.c(make(), tmp_path / "m.c")
    assert not (tmp_path / "m.c").exists()


def test_mistakes_are_named(tmp_path):
    layer, path = dm.GRU(3, 5), tmp_path / "m.c"
    with pytest.raises(ValueError, match="choose from float32, int8"):
        export.c(layer, path, weights="int4")
    with pytest.raises(ValueError, match=r"prefix should be .* got '3d'"):
        export.c(layer, path, prefix="3d")
    with pytest.raises(ValueError, match="one string for each of 5 outputs, got 2"):
        export.c(layer, path, words=["a", "b"])
    with torch.no_grad():
        layer.weight_hh_l0[2, 3] = torch.nan
    with pytest.raises(ValueError, match="gru0_weight_hh has entries that are not finite"):
        export.c(layer, path)


def test_a_file_name_becomes_a_prefix(tmp_path):
    export.c(dm.GRU(3, 5), tmp_path / "2nd-gate v1.c")
    assert "void _2nd_gate_v1_reset(" in (tmp_path / "2nd-gate v1.c").read_text()
