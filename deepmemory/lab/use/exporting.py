"""Exports of trained networks, for programs without the lab."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map

from deepmemory import export
from deepmemory.lab.training import random_streams
from deepmemory.lab.use.inspection import one_batch
from deepmemory.lab.use.loading import TrainedModel

# Dynamic dimensions of the networks' arguments, by name; those of a state hold for each of its tensors.
DYNAMIC: dict[str, dict[int, str]] = {
    "x": {0: "batch", 1: "time"},
    "words": {0: "batch", 1: "time"},
    "lengths": {0: "batch"},
    "state": {1: "batch"},
    "foreign": {0: "batch", 1: "time"},
    "english": {0: "batch"},  # as many words as the example has: each is said before the next is chosen
}


def example_inputs(model: TrainedModel) -> dict[str, Any]:
    """Example arguments of the network, by name: two sequences of its task."""
    setting = replace(model.setting, batch=2)
    inputs, _ = one_batch(model.network, model.task, setting, random_streams.VALIDATION, model.seed, 2)
    names = inspect.signature(model.network.forward).parameters
    return {name: given for name, given in zip(names, inputs, strict=False) if given is not None}


def save(model: TrainedModel, path: Path, format: str) -> dict[str, Any]:
    """Write the network to a file; returns the example inputs it was traced with."""
    inputs = example_inputs(model)
    sizes = {name: tree_map(lambda _, name=name: DYNAMIC[name], given) for name, given in inputs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    export.save(model.network, inputs, path, format=format, sizes=sizes)
    return inputs
