"""Exports of trained networks, for programs without the lab: graphs with named tensors, their state and vocabulary."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from deepmemory import __version__, export
from deepmemory.lab.data.pairs import END, START
from deepmemory.lab.settings import CONTROLS, Setting
from deepmemory.lab.tasks import NatLang, PixelMNIST, PolyMusic, StateTracking, Translation
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.network import (
    StepwiseNetwork,
    TiedWordNetwork,
    Translator,
    WordNetwork,
    in_time_order,
    tensors_in,
    zero_state,
)
from deepmemory.lab.use.inspection import one_batch
from deepmemory.lab.use.loading import TrainedModel

FORMATS = (*export.FORMATS, "c")
# Dynamic dimensions of the graphs' inputs, by name; those of a state hold for each of its tensors.
DYNAMIC: dict[str, dict[int, str]] = {
    "x": {0: "batch", 1: "time"},
    "words": {0: "batch", 1: "time"},
    "word": {0: "batch"},
    "lengths": {0: "batch"},
    "state": {1: "batch"},
    "foreign": {0: "batch", 1: "time"},
}


class Graph(NamedTuple):
    """A module to export: the whole network or a part of it."""

    module: nn.Module
    inputs: dict[str, Any]  # examples, by name
    outputs: list[str]


class WithState(nn.Module):
    """A network, or parts of one, whose state is a flat tuple of tensors, whatever the cell and its layers."""

    def __init__(self, setting: Setting, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        weight = next(self.parameters())
        zeros, self.structure = tree_flatten(zero_state(setting, (), 2, weight.device, weight.dtype))
        self.example = tuple(zeros)

    def packed(self, state: Sequence[Tensor]) -> Any:
        """The state in the form that the network takes."""
        return tree_unflatten(list(state), self.structure)


class Stepper(WithState):
    """Features of every step to logits at that step: of the keys that sound next, or of a product so far."""

    network: nn.Module

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """x (B, T, features) and a state to logits (B, T, outputs) and the state after the last step."""
        logits, new = self.network(x, state=self.packed(state))
        return logits, *tensors_in(new)


class Writer(WithState):
    """Words of a text to the logits of the word after each."""

    network: nn.Module

    def forward(self, words: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """words (B, T) and a state to logits (B, T, words) and the state after the last word."""
        logits, new = self.network(words, self.packed(state))
        return logits, *tensors_in(new)


class Encoder(WithState):
    """A foreign sentence to the state that its translation starts from: :meth:`Translator.encode`."""

    read: nn.Embedding
    encoder: nn.Module

    def forward(self, foreign: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """foreign (B, T) and lengths (B,) to a state."""
        _, state = self.encoder(in_time_order(self.read, foreign), lengths=lengths)
        return tuple(tensors_in(state))


class Decoder(WithState):
    """One word of the translation to the logits of the next: :meth:`Translator.step`."""

    said: nn.Embedding
    decoder: nn.Module
    output: nn.Module

    def forward(self, word: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """word (B,) and a state to logits (B, words) and the state after that word."""
        y, new = self.decoder(self.said(word)[:, None], self.packed(state))
        return self.output(y[:, 0]), *tensors_in(new)


def graphs(model: TrainedModel) -> list[Graph]:
    """The graphs to export: two for a network that translates, else one."""
    network, setting = model.network, model.setting
    if isinstance(network, Translator):
        encoder = Encoder(setting, read=network.read, encoder=network.encoder)
        decoder = Decoder(setting, said=network.said, decoder=network.decoder, output=network.output)
        foreign = {"foreign": torch.zeros(2, 3, dtype=torch.int64), "lengths": torch.tensor([3, 2])}
        word = {"word": torch.zeros(2, dtype=torch.int64), "state": decoder.example}
        states = state_names(decoder.example)
        return [
            Graph(encoder, foreign, states),
            Graph(decoder, word, ["logits", *(f"next_{name}" for name in states)]),
        ]
    if isinstance(network, StepwiseNetwork | WordNetwork | TiedWordNetwork):
        stepwise: Stepper | Writer
        if isinstance(network, StepwiseNetwork):
            assert isinstance(model.task, PolyMusic | StateTracking)
            stepwise = Stepper(setting, network=network)
            given = {"x": stepwise.example[0].new_zeros(2, 3, model.task.input_size)}
        else:
            stepwise, given = Writer(setting, network=network), {"words": torch.zeros(2, 3, dtype=torch.int64)}
        outputs = ["logits", *(f"next_{name}" for name in state_names(stepwise.example))]
        return [Graph(stepwise, {**given, "state": stepwise.example}, outputs)]
    return [Graph(network, example_inputs(model), ["sum" if setting.task == "adding" else "logits"])]


def state_names(state: Sequence[Tensor]) -> list[str]:
    """The name of each tensor of a state."""
    return [f"state_{index}" for index in range(len(state))]


def example_inputs(model: TrainedModel) -> dict[str, Any]:
    """Example arguments of a whole network, by name: two sequences of its task."""
    setting = replace(model.setting, batch=2)
    inputs, _ = one_batch(model.network, model.task, setting, random_streams.VALIDATION, model.seed, 2)
    names = inspect.signature(model.network.forward).parameters
    return {name: given for name, given in zip(names, inputs, strict=False) if given is not None}


def metadata(model: TrainedModel) -> dict[str, str]:
    """The metadata of the file: what was trained on what, and the vocabulary; lists and settings are JSON."""
    setting, task = model.setting, model.task
    found = {
        "task": setting.task,
        "cell": setting.cell,
        "hidden": json.dumps(setting.hidden),
        "seed": str(model.seed),
        "settings": setting.to_json(),
        "deepmemory": __version__,
    }
    if isinstance(task, Translation):
        found |= {"start": str(START), "end": str(END), "language": task.pairs.language}
        found |= {
            "foreign_words": json.dumps(task.pairs.foreign.words),
            "english_words": json.dumps(task.pairs.english.words),
        }
    elif isinstance(task, NatLang):
        found["words"] = json.dumps(task.words)
    elif isinstance(task, PixelMNIST) and setting.pixels == "permuted":
        found["pixel_order"] = json.dumps(task.order(permuted=True).tolist())
    return found


class Written(NamedTuple):
    """A file, and the names of its inputs and outputs."""

    path: Path
    inputs: list[str]
    outputs: list[str]


def paths(model: TrainedModel, path: Path, format: str) -> list[Path]:
    """The files that an export writes: NAME-encoder and NAME-decoder instead of NAME if a network translates."""
    if format in ("onnx", "pt2") and isinstance(model.network, Translator):
        return [path.with_name(f"{path.stem}-{part}{path.suffix}") for part in ("encoder", "decoder")]
    return [path]


def save(model: TrainedModel, path: Path, format: str, weights: str = "float32") -> list[Written]:
    """Write the network; returns its files."""
    if model.setting.cell in CONTROLS:
        raise ValueError(f"{model.setting.cell} is a control for comparisons in the lab; it cannot be exported")
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "c":
        return [save_c(model, path, weights)]
    if weights != "float32":
        raise ValueError(f"weights in {weights} are only for the format c; {format} keeps those of the network")
    about = metadata(model)
    if format == "safetensors":
        export.save(model.network, {}, path, format=format, metadata=about)
        return [Written(path, [], [])]
    written = []
    for graph, to in zip(graphs(model), paths(model, path, format), strict=True):
        sizes = {name: tree_map(lambda _, name=name: DYNAMIC[name], given) for name, given in graph.inputs.items()}
        export.save(graph.module, graph.inputs, to, format=format, sizes=sizes, outputs=graph.outputs, metadata=about)
        names = [state_names(given) if name == "state" else [name] for name, given in graph.inputs.items()]
        written.append(Written(to, list(chain.from_iterable(names)), graph.outputs))
    return written


def save_c(model: TrainedModel, path: Path, weights: str) -> Written:
    """Write the network as C: one step of one sequence."""
    network, setting, words = model.network, model.setting, None
    if isinstance(network, Translator):
        raise ValueError("a translator cannot be written as C: it is two networks; export it as onnx or pt2")
    if isinstance(model.task, NatLang):
        words = model.task.words
    parts: list[nn.Module]
    if isinstance(network, WordNetwork):
        parts = [network.embedding, network.recurrent, network.dense, nn.ReLU(), network.output]
    elif isinstance(network, TiedWordNetwork):
        parts = [network.embedding, network.recurrent, tied_output(network)]
    else:
        parts = [network.recurrent, network.output]  # type: ignore[list-item]
    settings = ", ".join(f"{name} {value}" for name, value in asdict(setting).items() if setting.has(name))
    note = textwrap.fill(f"Trained with seed {model.seed} and {settings}.", 110)
    export.c(parts, path, weights=weights, prefix=setting.task.replace("-", "_"), words=words, note=note)
    return Written(path, ["x"], ["y"])


def tied_output(network: TiedWordNetwork) -> nn.Linear:
    """The output of a network whose embedding and output share a matrix, as a layer."""
    words, features = network.embedding.weight.shape
    layer = nn.Linear(features, words, device="meta")
    layer.weight, layer.bias = network.embedding.weight, network.output_bias
    return layer
