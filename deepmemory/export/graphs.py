"""Export of models to run without this library: ONNX, ``torch.export`` and AOTInductor, for sequences or steps.

A recurrence on the plain engine is exported as one loop of torch's own operators, for any length and batch size.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from deepmemory.nn.cell import Cell
from deepmemory.nn.recurrent import Recurrent

__all__ = ["FORMATS", "Step", "portable", "program", "save"]

FORMATS = {"onnx": ("onnx", "onnxscript"), "pt2": (), "safetensors": ("safetensors",)}  # and the packages they need
Sizes = Mapping[str, Any]  # {"x": {0: "batch"}}; for an input that is a tuple, a tuple of these


@contextmanager
def portable(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model into evaluation mode, without gradients and on the plain engine; restore it afterwards.

    A model that is exported inside this context runs without ``deepmemory``. Outside of it, a layer is exported as an
    operator of the engine that would run it, which is faster in Python but needs this library.
    """
    modes = {module: module.training for module in model.modules()}
    engines = {module: module.engine for module in modes if isinstance(module, Recurrent)}
    try:
        model.eval()
        for layer in engines:
            layer.engine = "plain"
        with torch.no_grad():
            yield model
    finally:
        for layer, engine in engines.items():
            layer.engine = engine
        for module, training in modes.items():
            module.training = training


def program(model: nn.Module, inputs: Mapping[str, Any], sizes: Sizes | None = None) -> torch.export.ExportedProgram:
    """Export the model with ``torch.export``, for use without this library and with some dynamic sizes.

    >>> import torch, deepmemory as dm
    >>> from deepmemory import export
    >>> layer = dm.DMU(3, 5)
    >>> exported = export.program(layer, {"input": torch.zeros(4, 2, 3)}, {"input": {0: "time", 1: "batch"}})
    >>> y, h = exported.module()(input=torch.randn(30, 7, 3))
    >>> y.shape, h.shape
    (torch.Size([30, 7, 5]), torch.Size([1, 7, 5]))

    Args:
        model: Any module, with any kinds of recurrent layers inside.
        inputs: Examples of the forward method's arguments, by name. No dynamic size may be below 2 in them.
        sizes: For each input, the names of its dynamic dimensions. Dimensions with the same name have the same size.
    """
    shapes = open_sizes(inputs, sizes)
    symbols = {name: torch.export.Dim(name, min=1) for name in tree_leaves(shapes) if name is not None}
    shapes = tree_map(lambda name: None if name is None else symbols[name], shapes)
    # Strides of a view would become conditions on sizes.
    examples = tree_map(lambda t: t.contiguous() if isinstance(t, Tensor) else t, dict(inputs))
    with portable(model):
        return torch.export.export(model, (), examples, dynamic_shapes=shapes)


def open_sizes(inputs: Mapping[str, Any], sizes: Sizes | None) -> dict[str, Any]:
    """The dynamic shapes for ``torch.export``: one entry for every input, in their order."""
    unknown = set(sizes or {}) - set(inputs)
    if unknown:
        raise ValueError(
            f"sizes are given for {', '.join(sorted(unknown))}, which is not among the inputs {list(inputs)}"
        )
    fixed = {name: tree_map(lambda _: None, given) for name, given in inputs.items()}
    return fixed | dict(sizes or {})


def save(
    model: nn.Module,
    inputs: Mapping[str, Any],
    path: Path | str,
    *,
    format: str = "onnx",
    sizes: Sizes | None = None,
    outputs: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the model as ``onnx``, as ``pt2`` (for ``torch.export.load``) or its weights as ``safetensors``.

    Args:
        model: Any module.
        inputs: As for :func:`program`.
        path: File to write.
        format: ``"onnx"``, ``"pt2"`` or ``"safetensors"``.
        sizes: As for :func:`program`.
        outputs: Names of the outputs, for ONNX.
        metadata: Strings to store in the file, by name. ONNX Runtime returns them as
            ``session.get_modelmeta().custom_metadata_map``, a pt2 file holds them as JSON in the extra file
            ``metadata.json``, and a safetensors file as its own metadata.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; choose from {', '.join(FORMATS)}")
    for package in FORMATS[format]:
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"format {format!r} needs {package}; install it with: pip install 'deepmemory[export]'", name=package
            )
    if format == "safetensors":
        from safetensors.torch import save_model

        save_model(model, str(path), metadata=dict(metadata or {}))
    elif format == "pt2":
        extra = {"metadata.json": json.dumps(dict(metadata))} if metadata else None
        torch.export.save(program(model, inputs, sizes), path, extra_files=extra)
    else:
        exported = program(model, inputs, sizes)
        with torch.no_grad(), warnings.catch_warnings():  # else every loop's backward pass is traced, and thrown away
            warnings.filterwarnings("ignore", ".*The axis name")  # about a size that several inputs share
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own
            names = open_sizes(inputs, sizes)
            translated = torch.onnx.export(
                exported, dynamo=True, verbose=False, output_names=outputs, dynamic_shapes=names
            )
        assert translated is not None
        translated.model.metadata_props.update(metadata or {})
        translated.save(str(path))


class Step(nn.Module):
    """One time step of a recurrent layer or cell, with its state as input and output, for streaming.

    >>> import torch, deepmemory as dm
    >>> from deepmemory import export
    >>> step = export.Step(dm.LSTM(3, 5, num_layers=2))
    >>> x, state = torch.randn(1, 3), step.initial_state(batch=1)
    >>> y, state = step(x, state)
    >>> y.shape, [tuple(part.shape) for part in state]
    (torch.Size([1, 5]), [(2, 1, 5), (2, 1, 5)])

    Args:
        layer: Any unidirectional layer of this library, or one of its cells.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if not isinstance(layer, Recurrent | Cell):
            raise TypeError(f"Step: expected one of deepmemory's layers or cells, got {type(layer).__name__}")
        if isinstance(layer, Recurrent) and layer.bidirectional:
            raise ValueError("Step: a bidirectional layer cannot run step by step; use bidirectional=False")
        if isinstance(layer, Recurrent) and layer._ragged:
            raise ValueError(
                "Step: layers of different widths have states of different sizes; use single layers with one Step each"
            )
        self.layer = layer

    def initial_state(self, batch: int = 1) -> tuple[Tensor, ...]:
        """The state that a sequence starts from: zeros."""
        weight = next(self.layer.parameters())
        if isinstance(self.layer, Cell):
            return (weight.new_zeros(batch, self.layer.hidden_size),)
        assert isinstance(self.layer, Recurrent)
        sizes = self.layer.definition.state_sizes(self.layer._widths[0])
        return tuple(weight.new_zeros(self.layer.num_layers, batch, size) for size in sizes)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one step: from x (B, m) and the state's tensors to the output (B, d) and the new state's tensors."""
        if isinstance(self.layer, Cell):
            h = self.layer(x, *state)
            return h, (h.clone(),)
        time = 1 if self.layer.batch_first else 0
        y, new = self.layer(x.unsqueeze(time), state[0] if len(state) == 1 else state)
        return y.squeeze(time), new if isinstance(new, tuple) else (new,)
