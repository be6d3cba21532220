"""The examples run, and learn what they say."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from deepmemory.lab.data.pairs import split_words

ROOT = Path(__file__).parent.parent


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    with_packages = {"darts_forecast", "neuralforecast_model", "recurrent_ppo", "t_maze", "torchrl_module"}
    assert names == {"sequential", "lightning_module", "rl_step_loop", "streaming", "translate_onnx"} | with_packages
    tests = (ROOT / "tests" / "test_example_packages.py").read_text()
    assert all(f'load("{name}")' in tests for name in with_packages)


def test_translate_onnx_splits_words_as_the_lab_does():
    """What it says is compared with ``dmu translate`` in tests/lab/use/test_exporting.py."""
    pytest.importorskip("onnxruntime")
    for text in ("¡Hola! ¿Cómo está usted, Sr. O'Neill?", "Ünïcode: ß, Å, 3 años…", ""):
        assert load("translate_onnx").split_words(text) == split_words(text)


def test_sequential():
    assert load("sequential").main() > 0.8


@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec)")  # Lightning's own, where it is installed
def test_lightning_module():
    assert load("lightning_module").main() < 0.15


def test_rl_step_loop():
    assert load("rl_step_loop").main() > 0.9


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # the ONNX exporter's own
def test_streaming():
    example = load("streaming")
    seen = example.forecast_errors(example.train(150), 500)
    quiet = statistics.median(error for error, jumped in seen if not jumped)
    assert quiet < 0.1
    assert min(error for error, jumped in seen if jumped) > 1
    assert set(example.latencies(16, steps=50)) >= {"nn.GRUCell", "dm.DMUCell", "dm.DMU, one step"}


def test_the_kept_latencies_are_those_of_the_example():
    kept = json.loads((ROOT / "benchmarks" / "results" / "streaming.json").read_text())
    ways = {"nn.GRUCell", "dm.DMUCell", "dm.DMU, one step", "dm.GRU in ONNX Runtime", "dm.DMU in ONNX Runtime"}
    assert all(set(times) == ways for times in kept["microseconds"].values())
