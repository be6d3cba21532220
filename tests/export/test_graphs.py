"""A trained model leaves Python, or this library, with its numbers unchanged at every length and batch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import LAYERS, OWN, random_state, randomise, tensors
from tolerances import assert_close
from torch import nn

import deepmemory as dm
from deepmemory import export
from deepmemory.ops import ACTIVATIONS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # torch's own, when it copies a graph
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # inductor's and the ONNX exporter's own
]

OWN_TRANSITION = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10))
MODELS = {
    **{name: lambda name=name: LAYERS[name](3, 5, **OWN.get(name, {})) for name in ("RHN", "RNN", "GRU")},
    **{name: lambda name=name: LAYERS[name](3, 5, bidirectional=True, **OWN.get(name, {})) for name in ("DMU", "LSTM")},
    "basic": lambda: dm.DMU(3, 5, transition=[], batch_first=True, num_layers=2, dropout=0.5),
    "module": lambda: dm.DMU(3, 5, transition=OWN_TRANSITION),
    "projected": lambda: dm.LSTM(3, 5, proj_size=2),
}
SIZES = [(1, 1), (2, 3), (17, 1), (31, 8)]  # time steps, batch


@pytest.fixture(params=MODELS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    return randomise(MODELS[request.param]())


def example(layer: nn.Module, steps: int, batch: int) -> dict:
    x = torch.randn((batch, steps, 3) if layer.batch_first else (steps, batch, 3))
    lengths = torch.randint(0, steps + 1, (batch,))
    return {"input": x, "hx": random_state(layer, x), "lengths": lengths}


def open_sizes(layer: nn.Module) -> dict:
    batch, time = (0, 1) if layer.batch_first else (1, 0)
    state = ({1: "batch"}, {1: "batch"}) if isinstance(layer, dm.LSTM) else {1: "batch"}
    return {"input": {time: "time", batch: "batch"}, "hx": state, "lengths": {0: "batch"}}


def close(actual, expected) -> None:
    for a, e in zip(actual, tensors(expected), strict=True):
        assert_close(torch.as_tensor(a), e.detach())


def test_onnx_gives_the_same_numbers_at_every_length_and_batch(layer, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    names = ["y", "h", "c"] if isinstance(layer, dm.LSTM) else ["y", "h"]
    export.save(layer, example(layer, 4, 2), tmp_path / "m.onnx", sizes=open_sizes(layer), outputs=names)
    runtime = ort.InferenceSession(tmp_path / "m.onnx")
    assert [output.name for output in runtime.get_outputs()] == names
    assert set(runtime.get_inputs()[0].shape) == {"time", "batch", 3}
    layer.eval()
    for steps, batch in SIZES:
        inputs = example(layer, steps, batch)
        given = [t.numpy() for t in tensors(tuple(inputs.values()))]
        outputs = runtime.run(None, {i.name: t for i, t in zip(runtime.get_inputs(), given, strict=True)})
        close(outputs, layer(**inputs))


def test_every_activation_in_onnx(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    cells = nn.ModuleList([dm.DMUCell(3, 3, activation=name) for name in ACTIVATIONS])
    chain, x = nn.Sequential(*randomise(cells)), torch.randn(7, 3)
    export.save(chain, {"input": x[:2]}, tmp_path / "m.onnx", sizes={"input": {0: "batch"}})
    close(ort.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()}), chain(x))


def test_torchs_own_call_exports_too():
    ort = pytest.importorskip("onnxruntime")
    layer, x = dm.GRU(3, 5).eval(), torch.randn(9, 2, 3)
    shapes = ({0: "time", 1: "batch"},)
    translated = torch.onnx.export(layer, (torch.zeros(4, 3, 3),), dynamic_shapes=shapes, dynamo=True, verbose=False)
    runtime = ort.InferenceSession(translated.model_proto.SerializeToString())
    close(runtime.run(None, {"input": x.numpy()}), layer(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the exporter's own
@pytest.mark.parametrize("engine", ["auto", "plain", "cpu"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
def test_the_exporter_without_a_loop_is_refused(engine, inside, tmp_path):
    """It would write a graph of one length, or, without gradients, one that computes nothing."""
    layer = dm.LSTM(3, 5, engine=engine).eval()
    model = nn.Sequential(layer) if inside else layer
    for gradients in (False, True):
        message = r"^LSTM: torch.onnx.export\(.*dynamo=False\) .* deepmemory.export.save.* dynamo=True"
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=message):
            torch.onnx.export(model, (torch.zeros(4, 3, 3),), tmp_path / "m.onnx", dynamo=False)
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the exporter's own
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # checks of sizes are not recorded
def test_the_exporter_without_a_loop_takes_cells(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    cell, x, h = randomise(dm.DMUCell(3, 5)).eval(), torch.randn(7, 3), torch.randn(7, 5)
    names, axes = ["x", "h"], {"x": {0: "batch"}, "h": {0: "batch"}}
    torch.onnx.export(cell, (x[:2], h[:2]), tmp_path / "m.onnx", input_names=names, dynamic_axes=axes, dynamo=False)
    close(ort.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy(), "h": h.numpy()}), cell(x, h))


@torch.no_grad()
def test_exported_programs_give_the_same_numbers_by_torchs_own_operators(layer):
    exported = export.program(layer, example(layer, 4, 2), open_sizes(layer)).module()
    assert "deepmemory" not in exported.code
    layer.eval()
    for steps, batch in SIZES:
        inputs = example(layer, steps, batch)
        close(tensors(exported(**inputs)), layer(**inputs))


def test_a_saved_program_runs_where_this_library_is_not_a_fused_operator_where_it_is(tmp_path):
    portable, fused = dm.DMU(3, 5, transition=[7, 6]), dm.DMU(3, 5)
    x, short = torch.randn(40, 8, 3), torch.randn(9, 1, 3)
    sizes = {"input": {0: "time", 1: "batch"}}
    export.save(portable, {"input": x}, tmp_path / "portable.pt2", format="pt2", sizes=sizes)
    with torch.no_grad():
        torch.export.save(torch.export.export(fused, (x,)), tmp_path / "fused.pt2")
    torch.save((x, short), tmp_path / "inputs.pt")
    code = """
import sys; sys.modules["deepmemory"] = None
import torch
x, short = torch.load("inputs.pt")
torch.save(torch.export.load("portable.pt2").module()(input=short), "portable.pt")
del sys.modules["deepmemory"]
import deepmemory.ops
torch.save(torch.export.load("fused.pt2").module()(x), "fused.pt")
"""
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, env=paths, check=True)
    close(torch.load(tmp_path / "portable.pt"), portable(short))
    close(torch.load(tmp_path / "fused.pt"), fused(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("where", ["anywhere", "beside this library"])
def test_compiled_ahead_of_time(where, tmp_path):
    layer = randomise(dm.DMU(3, 5, transition=[7]))
    inputs, sizes = {"input": torch.randn(6, 4, 3)}, {"input": {0: "time", 1: "batch"}}
    if where == "anywhere":
        exported = export.program(layer, inputs, sizes)
    else:  # the recurrence is one call of an engine
        shapes = {"input": {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}}
        with torch.no_grad():
            exported = torch.export.export(layer, (), inputs, dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "m.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for steps, batch in SIZES[1:]:
        x = torch.randn(steps, batch, 3)
        close(tensors(compiled(input=x)), layer(x))


def test_static_sizes_and_modules_around_it(tmp_path):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.recurrent, self.out = nn.Embedding(11, 3), dm.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.recurrent(self.embed(words))[1][-1])

    network, words = Network(), torch.randint(0, 11, (4, 9))
    exported = export.program(network, {"words": words})
    assert_close(exported.module()(words=words), network(words).detach())
    assert network.training
    assert network.recurrent.engine == "auto"
    export.save(network, {}, tmp_path / "weights.safetensors", format="safetensors")
    safetensors = pytest.importorskip("safetensors.torch")
    assert_close(safetensors.load_file(tmp_path / "weights.safetensors"), dict(network.state_dict()))


STREAMED = {
    "DMU": lambda: dm.DMU(3, 5, 2, transition=[7]),
    "RHN": lambda: dm.RHN(3, 5, depth=2, batch_first=True),
    "RNN": lambda: dm.RNN(3, 5),
    "GRU": lambda: dm.GRU(3, 5),
    "LSTM": lambda: dm.LSTM(3, 5, 2),
    "DMUCell": lambda: dm.DMUCell(3, 5, transition=[7, 6]),
    "RHNCell": lambda: dm.RHNCell(3, 5, depth=2),
}


@pytest.mark.parametrize("name", STREAMED)
def test_step_by_step_in_onnx_runtime_equals_all_at_once(name, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    layer = randomise(STREAMED[name]())
    step, x = export.Step(layer), torch.randn(12, 1, 3)
    state = step.initial_state()
    names = [f"state_{index}" for index in range(len(state))]
    export.save(step, {"x": x[0], "state": state}, tmp_path / "m.onnx", outputs=["y", *(f"next_{n}" for n in names)])
    runtime = ort.InferenceSession(tmp_path / "m.onnx")
    assert [i.name for i in runtime.get_inputs()] == ["x", *names]
    carried, outputs = [s.numpy() for s in state], []
    for x_t in x:
        y, *carried = runtime.run(None, dict(zip(["x", *names], [x_t.numpy(), *carried], strict=True)))
        outputs.append(torch.from_numpy(y))
    if isinstance(layer, dm.DMUCell | dm.RHNCell):
        h, expected = state[0], []
        for x_t in x:
            h = layer(x_t, h)
            expected.append(h)
        close([torch.stack(outputs)], torch.stack(expected))
    else:
        y, final = layer(x.transpose(0, 1) if layer.batch_first else x)
        close([torch.stack(outputs), *carried], (y.transpose(0, 1) if layer.batch_first else y, *tensors(final)))


@pytest.mark.parametrize("format", ["onnx", "pt2", "safetensors"])
def test_metadata_travels_inside_the_file(format, tmp_path):
    said, path = {"words": '["uno", "años"]', "task": "counting"}, tmp_path / "m"
    export.save(dm.GRU(3, 5), {"input": torch.zeros(4, 2, 3)}, path, format=format, metadata=said)
    if format == "onnx":
        found = pytest.importorskip("onnxruntime").InferenceSession(path).get_modelmeta().custom_metadata_map
    elif format == "pt2":
        extra = {"metadata.json": ""}
        torch.export.load(path, extra_files=extra)
        found = json.loads(extra["metadata.json"])
    else:
        with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
            found = file.metadata()
    assert found == said


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("deepmemory.export.graphs.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnx; .* 'deepmemory\[export\]'"):
        export.save(dm.GRU(3, 5), {"input": torch.randn(4, 2, 3)}, tmp_path / "m.onnx")


def test_what_cannot_be_exported_says_so(tmp_path):
    layer, x = dm.GRU(3, 5, bidirectional=True), torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="bidirectional layer cannot run step by step"):
        export.Step(layer)
    with pytest.raises(ValueError, match="different widths"):
        export.Step(dm.GRU(3, [5, 4]))
    with pytest.raises(TypeError, match="got GRU"):
        export.Step(nn.GRU(3, 5))
    with pytest.raises(ValueError, match="choose from onnx, pt2, safetensors"):
        export.save(layer, {"input": x}, tmp_path / "m", format="tflite")
    with pytest.raises(ValueError, match="sizes are given for x, which is not among the inputs"):
        export.program(layer, {"input": x}, {"x": {0: "time"}})
