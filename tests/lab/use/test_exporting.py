"""A trained run leaves the lab with the numbers it had there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from export.compilers import needs, outputs
from lab import real_data
from lab.checkpoints import made, small, train
from safetensors import SafetensorError, safe_open
from tolerances import assert_close
from typer.testing import CliRunner

from deepmemory.export import rounded
from deepmemory.lab import cli
from deepmemory.lab.data.pairs import parse_pairs
from deepmemory.lab.settings import setting_from_json
from deepmemory.lab.tasks import Translation
from deepmemory.lab.training.network import initial_weights, tensors_in
from deepmemory.lab.use import exporting, loading
from deepmemory.lab.use.decoding import beam_search
from deepmemory.lab.use.loading import TrainedModel, assemble, load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
ROOT = Path(__file__).parents[3]
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


@pytest.mark.parametrize(("study", "output"), [("adding-dmu", "sum"), ("noisy-sequence-lstm", "logits")])
def test_onnx_by_the_command(trained, study, output):
    ort = pytest.importorskip("onnxruntime")
    told = json.loads(invoke("export", trained[study], "--json"))
    run = load_model(trained[study])
    assert told["seed"] == run.seed
    inputs = exporting.example_inputs(run)
    runtime = ort.InferenceSession(told["path"])
    assert [given.name for given in runtime.get_inputs()] == told["inputs"] == list(inputs)
    assert [given.name for given in runtime.get_outputs()] == told["outputs"] == [output]
    x = torch.randn(5, 77, inputs["x"].shape[-1])
    given = {"x": x, "lengths": torch.tensor([77, 3, 0, 50, 10])} if "lengths" in inputs else {"x": x}
    (answer,) = runtime.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    with torch.no_grad():
        assert_close(torch.from_numpy(answer), run.network(**given))
    about = runtime.get_modelmeta().custom_metadata_map
    assert about == exporting.metadata(run)
    assert f"{about['task']}-{about['cell']}" == study
    assert setting_from_json(about["settings"]) == run.setting


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


def run_onnx(path, inputs):
    """All outputs, for tensors by name."""
    import onnxruntime as ort

    outputs = ort.InferenceSession(path).run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return [torch.from_numpy(output) for output in outputs]


@pytest.mark.parametrize(
    ("task", "cell", "options"),
    [
        ("polymusic", "dmu", {"transition": (6,)}),
        ("polymusic", "lstm", {"hidden": (4, 3)}),  # four tensors of state
        ("natlang", "gru", {"hidden": (5, 5)}),
        ("natlang", "lstm", {}),
        ("ptb", "dmu", {"transition": (6,)}),
        ("state-tracking", "gru", {}),
    ],
)
def test_pieces_with_their_state_equal_the_network(task, cell, options, tmp_path):
    pytest.importorskip("onnxruntime")
    setting = small(task, cell=cell, **options)
    model = assemble(setting, made(setting), 0, random_weights(setting))
    (written,) = exporting.save(model, tmp_path / "m.onnx", "onnx")
    given, *states = written.inputs
    assert written.outputs == ["logits", *(f"next_{name}" for name in states)]
    features = {"polymusic": 88, "state-tracking": 6}
    x = torch.rand(3, 9, features[task]).round() if task in features else torch.randint(0, 11, (3, 9))
    with torch.no_grad():
        logits, final = model.network(x)
    carried = [torch.zeros_like(part) for part in tensors_in(final)]
    said = []
    for piece in x.split([1, 1, 4, 3], 1):  # a step, another one, several
        answer, *carried = run_onnx(written.path, {given: piece, **dict(zip(states, carried, strict=True))})
        said.append(answer)
    assert_close(torch.cat(said, 1), logits)
    assert_close(carried, tensors_in(final))


def random_weights(setting):
    return {name: weight[0] for name, weight in initial_weights(setting, made(setting), [3]).items()}


SENTENCES = """
Go.\tVe.
I'm tired.\tEstoy cansado.
I'm cold.\tTengo frío.
I'm hungry.\tTengo hambre.
He is tired.\tÉl está cansado.
He is cold.\tÉl tiene frío.
We are tired!\t¡Estamos cansados!
Are you tired?\t¿Estás cansado?
Are you cold?\t¿Tienes frío?
You're hungry.\tTienes hambre.
""".strip()


def spanish():
    return Translation(parse_pairs(SENTENCES.encode(), "spanish"))


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A checkpoint that says something, and its graphs."""
    setting = small("translation", cell="lstm", hidden=(24, 16), lr=0.005, epochs=30, batch=4, feedback="teacher")
    return train(tmp_path_factory.mktemp("runs"), setting, [0], spanish())


@pytest.fixture
def on_spanish(monkeypatch):
    monkeypatch.setattr(loading, "task_of", lambda *_: spanish())


@pytest.fixture(scope="module")
def exported(translator, tmp_path_factory):
    """The same in every format."""
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "task_of", lambda *_: spanish())
        model = load_model(translator)
    return {format: exporting.save(model, folder / f"m.{format}", format) for format in ("onnx", "pt2", "safetensors")}


def test_a_sentence_goes_in_and_words_come_out(translator, exported, on_spanish):
    """In a process without torch and without this library."""
    pytest.importorskip("onnxruntime")
    encoder, decoder = exported["onnx"]
    states = [f"state_{index}" for index in range(4)]  # h and c of two layers
    assert encoder[1:] == (["foreign", "lengths"], states)
    assert decoder[1:] == (["word", *states], ["logits", *(f"next_{name}" for name in states)])
    code = f"""
import sys; sys.modules["torch"] = sys.modules["deepmemory"] = None
sys.path.insert(0, {str(ROOT / "examples")!r})
import onnxruntime
from translate_onnx import translate
sessions = [onnxruntime.InferenceSession(path) for path in {[str(encoder.path), str(decoder.path)]}]
for text in sys.argv[1:]: print(translate(*sessions, text))
"""
    texts = ["Estoy cansado.", "¿TIENES frío?", "Él está ¡cansado!", "Tom tiene hambre; Ve"]
    done = subprocess.run([sys.executable, "-c", code, *texts], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said == [invoke("translate", translator, text, "--beam", 1).strip() for text in texts]
    assert said[0]
    assert len(set(said)) > 1


def test_a_translator_is_two_files_by_the_command(translator, on_spanish, tmp_path):
    said = invoke("export", translator, "--format", "pt2", "--to", tmp_path / "m.pt2", "--json")
    told = [json.loads(line) for line in said.splitlines()]
    assert [one["path"] for one in told] == [str(tmp_path / f"m-{part}.pt2") for part in ("encoder", "decoder")]


class InRuntime:
    """The exported graphs as the network that a search walks through."""

    def __init__(self, encoder, decoder):
        self.encoder, self.decoder = encoder, decoder

    def encode(self, foreign, lengths):
        return tuple(self.encoder({"foreign": foreign, "lengths": lengths}))

    def step(self, word, state):
        answer, *state = self.decoder({"word": word, **{f"state_{i}": part for i, part in enumerate(state)}})
        return answer, tuple(state)


def loaded(path):
    """A graph of either format, from tensors by name to a list of tensors."""
    if path.suffix == ".onnx":
        return lambda inputs: run_onnx(path, inputs)
    program = torch.export.load(path).module()

    def run(inputs):
        state = tuple(tensor for name, tensor in inputs.items() if name.startswith("state"))
        rest = {name: tensor for name, tensor in inputs.items() if not name.startswith("state")}
        with torch.no_grad():
            return list(program(**rest, **({"state": state} if state else {})))

    return run


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_beam_search_over_the_graphs_is_that_of_the_network(format, translator, exported, on_spanish):
    pytest.importorskip("onnxruntime")
    model = load_model(translator)
    network = InRuntime(*(loaded(one.path) for one in exported[format]))
    sentences = model.task.pairs.foreign
    found = beam_search(network, sentences.ids, sentences.lengths, 4)
    expected = beam_search(model.network, sentences.ids, sentences.lengths, 4)
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.words for one in ours] == [one.words for one in theirs]
        assert_close(torch.tensor([one.score for one in ours]), torch.tensor([one.score for one in theirs]))


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_each_graph_has_its_own_weights_alone(format, translator, exported, on_spanish):
    whole = sum(weight.nbytes for weight in load_model(translator).network.parameters())
    assert whole < sum(one.path.stat().st_size for one in exported[format]) < 1.5 * whole


@pytest.mark.parametrize("format", ["onnx", "pt2", "safetensors"])
def test_vocabularies_travel_with_the_weights(format, exported):
    words = spanish().pairs
    for one in exported[format]:
        about = metadata_in(one.path)
        assert json.loads(about["foreign_words"]) == list(words.foreign.words)
        assert json.loads(about["english_words"]) == list(words.english.words)


def test_what_an_input_means_travels_along(tmp_path):
    text = assemble(small("natlang"), made(small("natlang")), 0, random_weights(small("natlang")))
    (one,) = exporting.save(text, tmp_path / "text.safetensors", "safetensors")
    assert json.loads(metadata_in(one.path)["words"]) == list(text.task.words)
    permuted = small("pixel-mnist", pixels="permuted")
    digits = TrainedModel(None, permuted, 0, real_data.digits(permuted=True))
    assert sorted(json.loads(exporting.metadata(digits)["pixel_order"])) == list(range(25))


def metadata_in(path):
    if path.suffix == ".onnx":
        return pytest.importorskip("onnxruntime").InferenceSession(path).get_modelmeta().custom_metadata_map
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return file.metadata()
    extra = {"metadata.json": ""}
    torch.export.load(path, extra_files=extra)
    return json.loads(extra["metadata.json"])


@needs("gcc")
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("task", ["adding", "polymusic", "natlang", "pixel-mnist", "ptb", "state-tracking"])
def test_networks_as_c(task, weights, tmp_path):
    setting = small(task, cell="dmu", transition=(6,))
    model = assemble(setting, made(setting), 0, random_weights(setting))
    name = task.replace("-", "_")
    (written,) = exporting.save(model, tmp_path / f"{name}.c", "c", weights)
    features = {"adding": 2, "polymusic": 88, "pixel-mnist": 1, "state-tracking": 6}
    x = torch.rand(40, features[task]) if task in features else torch.randint(0, 11, (40,))
    network = rounded(model.network) if weights == "int8" else model.network
    with torch.no_grad():
        if task in ("adding", "pixel-mnist"):  # one output for each sequence; in C, for as much as has been read
            expected = torch.cat([network(x[None, : t + 1]) for t in range(len(x))])
        else:
            expected = network(x[None])[0][0]
    assert_close(outputs(written.path, x), expected)
    assert f"task {task}, cell dmu, hidden (5,)" in written.path.read_text()
    assert ('"10",' in written.path.read_text()) == (task not in features)  # the vocabulary


def test_c_by_the_command(trained, translator, tmp_path, monkeypatch):
    path = tmp_path / "small.c"
    invoke("export", trained["noisy-sequence-lstm"], "--format", "c", "--weights", "int8", "--to", path)
    assert "void noisy_sequence_step(" in path.read_text()
    with pytest.raises(ValueError, match="weights in int8 are only for the format c"):
        invoke("export", trained["adding-dmu"], "--weights", "int8", "--to", tmp_path / "m.onnx")
    monkeypatch.setattr(loading, "task_of", lambda *_: spanish())
    with pytest.raises(ValueError, match="a translator cannot be written as C"):
        invoke("export", translator, "--format", "c", "--to", path)


def test_mistakes_are_named(trained, tmp_path, monkeypatch):
    checkpoint = trained["adding-dmu"]
    with pytest.raises(ValueError, match=r"no run with seed 7; it has \[0, 1, 2\]"):
        load_model(checkpoint, 7)
    with pytest.raises(ValueError, match="choose from onnx, pt2, safetensors, c"):
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
