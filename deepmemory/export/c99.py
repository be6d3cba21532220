"""A model as one C99 file: its weights, its state, ``step`` and ``reset``, for devices without Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import torch
from torch import nn

from deepmemory import __version__
from deepmemory.export.c_cells import Constants, Layer, copied, layers_of, number, step_of
from deepmemory.export.c_templates import FILE, FUNCTIONS, LAYER
from deepmemory.nn.cell import Cell
from deepmemory.nn.recurrent import Recurrent

WEIGHTS = ("float32", "int8")
SKIPPED = (nn.Dropout, nn.Identity)  # they do nothing in evaluation mode
ELEMENTWISE: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Sigmoid: "sigmoids",
}


def c(
    model: nn.Module | Sequence[nn.Module],
    path: Path | str,
    *,
    weights: str = "float32",
    prefix: str | None = None,
    words: Sequence[str] | None = None,
    note: str = "",
) -> None:
    """Write a model as one C99 file that computes one step of one sequence and needs only the C library.

    The file declares ``PREFIX_state``, ``PREFIX_reset(&state)`` and ``PREFIX_step(&state, x, y)``; the comment at its
    start shows how to use them. Arithmetic is float32. With ``weights="int8"``, each row of a matrix is stored as
    integers from -127 to 127 and one scale; :func:`rounded` returns the same model in Python.

    >>> import tempfile, deepmemory as dm
    >>> from pathlib import Path
    >>> from torch import nn
    >>> from deepmemory import export
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "sensor.c")
    ...     export.c([dm.DMU(3, 16), nn.Linear(16, 2)], path, weights="int8")
    ...     "void sensor_step(sensor_state *state" in path.read_text()
    True

    Args:
        model: One of this library's layers or cells, or a list (or ``nn.Sequential``) of the modules that are applied
            at every step: optionally ``nn.Embedding`` at the start, then layers, cells, ``nn.Linear`` and the
            activations ReLU, LeakyReLU, Tanh, SiLU, GELU and Sigmoid in any order. Dropout and Identity do nothing. A
            layer passes on its output. Bidirectional layers and transitions given as modules cannot be written.
        path: File to write.
        weights: ``"float32"`` or ``"int8"``.
        prefix: Prefix of all names in the file; default: the file's name.
        words: One string for each output, such as the words of a vocabulary, written as the array ``PREFIX_words``.
        note: Lines to add to the comment at the start.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"c: unknown weights {weights!r}; choose from {', '.join(WEIGHTS)}")
    path = Path(path)
    prefix = check_prefix(re.sub(r"^(?=\d)|\W", "_", path.stem, flags=re.ASCII) if prefix is None else prefix)
    source = Source(Constants(weights == "int8"))
    with torch.no_grad():
        source.add(list(flattened(model)))
    if words is not None and len(words) != source.size:
        raise ValueError(f"c: words should have one string for each of {source.size} outputs, got {len(words)}")
    path.write_text(source.text(path.name, prefix, words, note), encoding="utf-8")


def check_prefix(prefix: str) -> str:
    """Return the prefix; raise if no C identifier can begin with it."""
    if not re.fullmatch(r"[A-Za-z_]\w*", prefix, re.ASCII):
        raise ValueError(f"c: prefix should be a C identifier of letters, digits and underscores, got {prefix!r}")
    return prefix


def flattened(model: nn.Module | Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The modules in the order in which they are applied, without those that do nothing."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        if not isinstance(model, SKIPPED):
            yield model
        return
    for part in model:
        yield from flattened(part)


@dataclass
class Source:
    """The C file, built module by module; in names, ``@`` stands for the prefix."""

    constants: Constants
    modules: list[nn.Module] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)  # of the state
    layers: list[str] = field(default_factory=list)  # functions
    body: list[str] = field(default_factory=list)  # of step
    input_size: int = 0  # features, or words of an embedding
    size: int = 0  # features of the last module's output
    state_size: int = 0
    step_buffers: int = 0  # floats
    layer_buffers: int = 0  # floats, of the layer with the most

    def add(self, modules: list[nn.Module]) -> None:
        """Write all modules, from ``x`` to ``y``."""
        self.modules, at = modules, "x"
        for index, module in enumerate(modules):
            later = modules[index + 1 :]
            to = f"v{index}" if any(isinstance(part, nn.Linear | Recurrent | Cell) for part in later) else "y"
            if isinstance(module, Recurrent | Cell):
                self.check_size(module, module.input_size)
                for layer in layers_of(module):
                    at = self.recurrent(layer, at)
            elif isinstance(module, nn.Linear):
                self.check_size(module, module.in_features)
                bias = self.constants.vector(f"bias{index}", module.bias)
                self.declare(to, module.out_features)
                self.body.append(self.constants.linear(to, bias, f"weight{index}", module.weight, at))
                at, self.size = to, module.out_features
            elif type(module) in ELEMENTWISE and self.size:
                if at == "word" or at.startswith("state->"):
                    self.declare(to, self.size)
                    self.body.append(copied(to, at, self.size))
                    at = to
                self.body.append(f"@_{ELEMENTWISE[type(module)]}({', '.join([at, str(self.size), *options(module)])});")
            elif isinstance(module, nn.Embedding) and index == 0:
                at = self.embedding(module)
            else:
                raise TypeError(cannot_write(module))
        if not self.layers:
            raise ValueError("c: expected at least one of deepmemory's layers or cells")
        if at.startswith("state->"):
            self.body.append(copied("y", at, self.size))

    def check_size(self, module: nn.Module, expected: int) -> None:
        """Raise if a module does not fit its input; the first module sets the model's input size."""
        if not self.input_size:
            self.input_size = self.size = expected
        if self.size != expected:
            raise ValueError(
                f"c: {type(module).__name__} takes {expected} features, but the module before it returns {self.size}"
            )

    def declare(self, name: str, size: int) -> None:
        """Declare a buffer of step, unless it is the caller's output."""
        if name != "y":
            self.body.append(f"float {name}[{size}];")
            self.step_buffers += size

    def embedding(self, module: nn.Embedding) -> str:
        """Look up the word x; return the name of its features."""
        self.input_size, self.size = module.weight.shape
        table = self.constants.matrix("embedding", module.weight)
        if not self.constants.int8:
            self.body.append(f"const float *word = {table} + (size_t)x * {self.size};")
            return "word"
        self.declare("word", self.size)
        self.body.append(f"@_row(word, {table}, x, {self.size});")
        return "word"

    def recurrent(self, layer: Layer, x: str) -> str:
        """Write the function of a layer and call it; return the name of its output."""
        index = len(self.layers)
        name = f"{layer.cell}{index}"
        step = step_of(self.constants, name, layer)
        buffers = ", ".join(f"{buffer}[{size}]" for buffer, size in step.buffers.items())
        written = {
            "title": f"{layer.cell.upper()}: {layer.input_size} inputs, a state of {layer.hidden_size}",
            "name": name,
            "parameters": ", ".join(["const float *x", *(f"float *{state}" for state in layer.states)]),
            "body": indented([f"float {buffers};", *step.lines]),
        }
        self.layers.append(Template(LAYER).substitute(written))
        self.fields += [f"float {state}{index}[{size}];" for state, size in layer.states.items()]
        self.body.append(f"@_{name}({', '.join([x, *(f'state->{state}{index}' for state in layer.states)])});")
        self.size, self.state_size = layer.states["h"], self.state_size + sum(layer.states.values())
        self.layer_buffers = max(self.layer_buffers, sum(step.buffers.values()))
        return f"state->h{index}"

    def text(self, file: str, prefix: str, words: Sequence[str] | None, note: str) -> str:
        """The C source as one text."""
        reads_words = isinstance(self.modules[0], nn.Embedding)
        parts = [f"    {part!r}" for part in self.modules] + ([""] if note else []) + note.splitlines()
        arrays = [*self.constants.arrays, *([word_array(words)] if words is not None else [])]
        code = {
            "input_example": "int x;" if reads_words else "float x[@@_INPUTS];",
            "input_parameter": "int x" if reads_words else "const float x[@@_INPUTS]",
            "fields": indented(self.fields),
            "words": "" if words is None else "extern const char *const @_words[@@_OUTPUTS];\n",
            "integers": "#include <stdint.h>\n" if self.constants.int8 else "",
            "arrays": "\n\n".join(arrays),
            "functions": "\n\n".join([*self.shared(), *self.layers]),
            "body": indented(self.body),
        }
        numbers = {
            "version": __version__,
            "input_size": self.input_size,
            "output_size": self.size,
            "state_bytes": 4 * self.state_size,
            "weight_bytes": f"{self.constants.bytes:,}",
            "stack_bytes": 4 * (self.step_buffers + self.layer_buffers),
        }
        prose = {
            "file": file,
            "parts": "\n".join(f" * {part}".rstrip() for part in parts).replace("*/", "* /"),
            "inputs": f"a number from 0 to {self.input_size - 1}" if reads_words else f"{self.input_size} floats",
            "input_rule": "x is not checked." if reads_words else "x and y must not overlap.",
            "kind": "int8" if self.constants.int8 else "float32",
        }

        def named(text: str) -> str:
            return text.replace("@@", prefix.upper()).replace("@", prefix)

        return Template(named(FILE)).substitute({name: named(text) for name, text in code.items()}, **numbers, **prose)

    def shared(self) -> list[str]:
        """The shared functions that layers, step and other shared functions call."""
        variant = "_int8" if self.constants.int8 else ""
        known = {name: FUNCTIONS.get(name + variant, text) for name, text in FUNCTIONS.items() if "_int8" not in name}
        if self.constants.int8:
            known["row"] = FUNCTIONS["row_int8"]
        needed: set[str] = set()
        calling = [*self.layers, *self.body]
        while calling:
            called = set(re.findall(r"@_(\w+)\(", calling.pop())) & (set(known) - needed)
            needed |= called
            calling += [known[name] for name in called]
        return [text for name, text in known.items() if name in needed]


def options(module: nn.Module) -> list[str]:
    """The further C arguments of an activation, after its values and their number."""
    if isinstance(module, nn.GELU) and module.approximate != "none":
        raise ValueError(
            f"c: GELU with approximate={module.approximate!r} cannot be written as C; use approximate='none'"
        )
    return [number(module.negative_slope)] if isinstance(module, nn.LeakyReLU) else []


def cannot_write(module: nn.Module) -> str:
    """The error message for a module that cannot be written."""
    if isinstance(module, nn.Embedding) or type(module) in ELEMENTWISE:
        where = "at the start" if isinstance(module, nn.Embedding) else "after a layer or Linear"
        return f"c: {type(module).__name__} can only be used {where}"
    return (
        f"c: cannot write {type(module).__name__} as C; pass the modules that are applied at every step, as in "
        "export.c([model.recurrent, model.output], path). Supported modules: deepmemory's layers and cells, "
        f"Embedding, Linear, {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
    )


def word_array(words: Sequence[str]) -> str:
    """Strings as a C array; what is not plain ASCII is written as its bytes in UTF-8."""

    def escaped(word: str) -> str:
        plain = [chr(b) if 32 <= b < 127 and chr(b) not in '"\\?@' else f"\\{b:03o}" for b in word.encode()]
        return f'    "{"".join(plain)}",'

    return "\n".join(["const char *const @_words[@@_OUTPUTS] = {", *map(escaped, words), "};"])


def indented(lines: Sequence[str]) -> str:
    """Indent the lines of a function body."""
    return "\n".join(f"    {line}" for line in lines)
