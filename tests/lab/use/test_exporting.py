"""A trained run leaves the lab with the numbers it had there."""

import inspect
import json
import os
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from tolerances import assert_close
from typer.testing import CliRunner

from deepmemory.lab import cli
from deepmemory.lab.training.network import LastStateNetwork, StepwiseNetwork, Translator, WordNetwork
from deepmemory.lab.use import exporting
from deepmemory.lab.use.loading import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
SMALL = {"runs": 3, "epochs": 1, "steps": 5, "batch": 8, "validation": 20, "test": 20}


def invoke(*arguments):
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of three runs each, by task and cell."""
    out = tmp_path_factory.mktemp("runs")
    options = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    for task, cell in (("adding", "dmu"), ("noisy-sequence", "lstm")):
        invoke("train", task, "--cell", cell, *options, "--device", "cpu", "--out", out, "--json")
    return {path.parent.name.rpartition("-")[0]: path for path in out.glob("checkpoints/*/*.safetensors")}


@pytest.mark.parametrize("study", ["adding-dmu", "noisy-sequence-lstm"])
def test_onnx_by_the_command(trained, study):
    ort = pytest.importorskip("onnxruntime")
    told = json.loads(invoke("export", trained[study], "--json"))
    run = load_model(trained[study])
    assert told["seed"] == run.seed
    inputs = exporting.example_inputs(run)
    assert told["inputs"] == list(inputs)
    runtime = ort.InferenceSession(told["path"])
    x = torch.randn(5, 77, inputs["x"].shape[-1])
    given = {"x": x, "lengths": torch.tensor([77, 3, 0, 50, 10])} if "lengths" in inputs else {"x": x}
    (output,) = runtime.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    with torch.no_grad():
        assert_close(torch.from_numpy(output), run.network(**given))


def test_any_run_in_any_format(trained, tmp_path):
    checkpoint = trained["adding-dmu"]
    best = load_model(checkpoint)
    runs = [load_model(checkpoint, seed) for seed in range(3)]
    assert sum(torch.equal(run.network.output.weight, best.network.output.weight) for run in runs) == 1
    told = json.loads(invoke("export", checkpoint.parent, "--format", "safetensors", "--json"))  # a study's folder
    assert told["seed"] == best.seed
    for format in ("pt2", "safetensors"):
        invoke("export", checkpoint, "--run", 1, "--format", format, "--to", tmp_path / f"model.{format}")
    inputs = exporting.example_inputs(runs[1])
    with torch.no_grad():
        expected = runs[1].network(**inputs)
        assert_close(torch.export.load(tmp_path / "model.pt2").module()(**inputs), expected)
    weights = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert_close(weights, {name: t.detach() for name, t in runs[1].network.state_dict().items()})


def test_dynamic_sizes_of_every_network_are_known():
    for network in (LastStateNetwork, StepwiseNetwork, WordNetwork, Translator):
        assert set(inspect.signature(network.forward).parameters) - {"self"} <= set(exporting.DYNAMIC)


def test_mistakes_are_named(trained, tmp_path, monkeypatch):
    checkpoint = trained["adding-dmu"]
    with pytest.raises(ValueError, match=r"no run with seed 7; it has \[0, 1, 2\]"):
        load_model(checkpoint, 7)
    with pytest.raises(ValueError, match="choose from onnx, pt2, safetensors"):
        invoke("export", checkpoint, "--format", "caffe")
    with pytest.raises(OSError, match="File name too long"):
        invoke("export", checkpoint, "--format", "safetensors", "--to", tmp_path / ("a" * 300))
    device = tmp_path / "null"
    os.mkfifo(device)  # as a device, nothing that a file may take the place of
    with pytest.raises(ValueError, match=f"--to {device} is not a file"):
        invoke("export", checkpoint, "--format", "safetensors", "--to", device)
    assert device.is_fifo()
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr(exporting, "save", full)
    with pytest.raises(ValueError, match=r"m\.safetensors cannot be written: No space left on device"):
        invoke("export", checkpoint, "--format", "safetensors", "--to", tmp_path / "m.safetensors")
