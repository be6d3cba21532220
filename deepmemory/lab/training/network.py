"""The networks of the tasks: a recurrent block, the layers around it, and initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import deepmemory as dm
from deepmemory.lab.settings import Setting
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.min_gru import MinGRU
from deepmemory.lab.training.random_streams import derive, uniform
from deepmemory.ops import hoisted

if TYPE_CHECKING:
    from deepmemory.lab.tasks import Task


WORD_FEATURES, DENSE = 64, 100  # of the language model: embedding of a word, and layer before the output
EMBEDDED_WITHIN = 0.1  # bound of the initial weights of an embedding that also gives the output
WORDS = -2  # index of a sequence's key for word dropout; its masks use the indices 0, 1, 2 and so on
AROUND = ("input", "output")  # masks outside the recurrent block
NO_MASKS: Mapping[str, Tensor] = {}
SPLIT_PRODUCTS_ON = ("cuda",)  # devices that compute weight gradients in parts: see LinearOfRuns


class Sizes(Protocol):
    """The sizes of a task that a network depends on."""

    @property
    def input_size(self) -> int:
        """Features of x, or number of words in the vocabulary."""

    @property
    def output_size(self) -> int:
        """Number of output features."""


class Dropout:
    """The dropout masks of a network: one for each sequence, the same at every time step.

    They are drawn from a key for each sequence, so that a run has the same masks alone and among others.
    """

    def __init__(self, setting: Setting, input_size: int) -> None:
        around = {"input": (input_size, setting.input_dropout), "output": (setting.hidden[-1], setting.output_dropout)}
        inside: dict[str, tuple[int, float]] = {}  # by the names that the layers give their masks
        for layer, width in enumerate(setting.hidden):
            inside[f"state_l{layer}"] = width, setting.recurrent_dropout
            inside[f"hidden_l{layer}"] = sum(setting.transition), setting.transition_dropout
        self.masked = {name: (width, rate) for name, (width, rate) in (around | inside).items() if width and rate}

    def masks(self, keys: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Masks (B, width) by name for the sequences of these keys (B,); without keys, as in evaluation, none."""
        if keys is None or not self.masked:
            return {}
        widths = [width for width, _ in self.masked.values()]
        chances = uniform(derive(keys[:, None], torch.arange(sum(widths), device=keys.device))).split(widths, -1)
        return {
            name: dropout_mask(chance, rate).to(dtype)
            for (name, (_, rate)), chance in zip(self.masked.items(), chances, strict=True)
        }


def dropout_mask(chances: Tensor, rate: float) -> Tensor:
    """A factor for each uniform number: 0 with probability ``rate``, otherwise 1 / (1 - rate)."""
    return (chances >= rate).to(chances.dtype) / (1 - rate or 1)  # at rate 1 all is dropped


def inside(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks that a recurrent block takes."""
    return {name: mask for name, mask in masks.items() if name not in AROUND}


def at_all_times(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, T, features) times a mask (B, features)."""
    return x if mask is None else x * mask[:, None].to(x.dtype)


class RecurrentNetwork(nn.Module):
    """A recurrent block with dropout around it, and a linear layer."""

    def __init__(self, setting: Setting, task: Sizes, engine: str = "auto") -> None:
        super().__init__()
        self.recurrent = recurrent_block(setting, task.input_size, engine)
        self.output = nn.Linear(setting.hidden[-1], task.output_size)
        self.dropout = Dropout(setting, task.input_size)


class LastStateNetwork(RecurrentNetwork):
    """One output per sequence, from the state after its last real step."""

    def forward(self, x: Tensor, lengths: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """x (B, T, features) to (B, output_size); ``keys`` (B,) turn dropout on."""
        masks = self.dropout.masks(keys, x.dtype)
        x, output = at_all_times(x, masks.pop("input", None)), masks.pop("output", None)
        _, state = self.recurrent(x, lengths=lengths, masks=masks)
        h = state[0] if isinstance(self.recurrent, dm.LSTM) else state
        last = h[-1].flatten(0, -2)  # the last layer's; layers of different widths come as a tuple
        return self.output(last if output is None else last * output)


class StepwiseNetwork(RecurrentNetwork):
    """An output at every step; can resume from the state it ended with."""

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: Any = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """x (B, T, features) to (B, T, output_size) and the last state; ``keys`` (B,) turn dropout on."""
        masks = self.dropout.masks(keys, x.dtype)
        x, output = at_all_times(x, masks.pop("input", None)), masks.pop("output", None)
        y, state = self.recurrent(x, state, lengths=lengths, masks=masks)
        return at_every_step(partial(linear, self.output), at_all_times(y, output)), state


class WordNetwork(nn.Module):
    """Logits of the next word at every step of a text."""

    def __init__(self, setting: Setting, task: Sizes, engine: str = "auto") -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.input_size, WORD_FEATURES)
        self.recurrent = recurrent_block(setting, WORD_FEATURES, engine)
        self.dense = nn.Linear(setting.hidden[-1], DENSE)
        self.output = nn.Linear(DENSE, task.output_size)
        self.dropout = Dropout(setting, WORD_FEATURES)

    def forward(self, words: Tensor, state: Any = None, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        """words (B, T) to (B, T, words) and the last state; ``keys`` (B,) turn dropout on."""
        masks = self.dropout.masks(keys, self.embedding.weight.dtype)
        y, state = self.recurrent(in_time_order(self.embedding, words), state, masks=masks)
        return at_every_step(lambda rows: linear(self.output, linear(self.dense, rows).relu()), y), state


class TiedWordNetwork(nn.Module):
    """Logits of the next word at every step of a text; embedding and output share a matrix."""

    def __init__(self, setting: Setting, task: Sizes, engine: str = "auto") -> None:
        super().__init__()
        width = setting.hidden[-1]
        self.embedding = nn.Embedding(task.input_size, width)
        self.recurrent = recurrent_block(setting, width, engine)
        self.output_bias = nn.Parameter(torch.zeros(task.output_size))
        self.dropout, self.word_dropout = Dropout(setting, width), setting.word_dropout
        nn.init.uniform_(self.embedding.weight, -EMBEDDED_WITHIN, EMBEDDED_WITHIN)

    def forward(self, words: Tensor, state: Any = None, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        """words (B, T) to (B, T, words) and the last state; ``keys`` (B,) turn dropout on."""
        masks = self.dropout.masks(keys, self.embedding.weight.dtype)
        x = at_all_times(in_time_order(self.embedding, words), masks.pop("input", None))
        if keys is not None and self.word_dropout:  # drops all occurrences of a word in a sequence, or none
            x = x * dropout_mask(uniform(derive(derive(keys, WORDS)[:, None], words)), self.word_dropout)[..., None]
        output = masks.pop("output", None)
        y, state = self.recurrent(x, state, masks=masks)
        return at_every_step(self.logits, at_all_times(y, output)), state

    def logits(self, rows: Tensor) -> Tensor:
        """Logits of the next word, from states (..., features)."""
        return of_many_rows(rows, self.embedding.weight, self.output_bias)


class Translator(nn.Module):
    """An encoder reads a sentence, and a decoder translates it into English, starting from the encoder's last state.

    A decoder that ``runs_freely`` is fed its own words. These are chosen first, step by step and without gradients;
    then all steps run as one sequence. No gradient flows through the choice of a word, so outputs and gradients equal
    those of feeding back at every step.
    """

    def __init__(self, setting: Setting, foreign: int, english: int, engine: str = "auto") -> None:
        super().__init__()
        self.runs_freely = setting.feedback == "own"
        self.read = nn.Embedding(foreign, setting.features)
        self.encoder = recurrent_block(setting, setting.features, engine)
        self.said = nn.Embedding(english, setting.features)
        self.decoder = recurrent_block(setting, setting.features, engine)
        self.output = nn.Linear(setting.hidden[-1], english)
        self.dropout = Dropout(setting, setting.features)

    def forward(self, foreign: Tensor, lengths: Tensor, english: Tensor, keys: Tensor | None = None) -> Tensor:
        """foreign (B, T) and its lengths, english (B, S) from its start on, to (B, S - 1, words).

        A decoder that runs freely, as every decoder does in ``eval``, reads only the first word of ``english``.
        ``keys`` (B,) turn dropout on.
        """
        parts = (None, None) if keys is None else (derive(keys, 0), derive(keys, 1))
        of_encoder, masks = (self.dropout.masks(of_part, self.read.weight.dtype) for of_part in parts)
        state = self.encode(foreign, lengths, of_encoder)
        words = english[:, :-1]
        if self.runs_freely or not self.training:
            words = self.own_words(state, words, masks)
        x = at_all_times(in_time_order(self.said, words), masks.get("input"))
        y, _ = self.decoder(x, state, masks=inside(masks))
        return at_every_step(partial(linear, self.output), at_all_times(y, masks.get("output")))

    def encode(self, foreign: Tensor, lengths: Tensor, masks: Mapping[str, Tensor] = NO_MASKS) -> Any:
        """The state after the last word of each sentence."""
        x = at_all_times(in_time_order(self.read, foreign), masks.get("input"))
        return self.encoder(x, lengths=lengths, masks=inside(masks))[1]

    def step(self, word: Tensor, state: Any, masks: Mapping[str, Tensor] = NO_MASKS) -> tuple[Tensor, Any]:
        """One word (B,) of each sentence to the logits of the next, (B, words), and the state."""
        x = at_all_times(self.said(word)[:, None], masks.get("input"))
        y, state = self.decoder(x, state, masks=inside(masks))
        return self.output(at_all_times(y, masks.get("output"))[:, 0]), state

    @torch.no_grad()
    def own_words(self, state: Any, words: Tensor, masks: Mapping[str, Tensor] = NO_MASKS) -> Tensor:
        """The first of ``words`` (B, S), then S - 1 words by greedy decoding."""
        chosen = [words[:, 0]]
        for _ in range(words.shape[1] - 1):
            answer, state = self.step(chosen[-1], state, masks)
            chosen.append(answer.argmax(-1))
        return torch.stack(chosen, 1)


def in_time_order(embedding: nn.Embedding, words: Tensor) -> Tensor:
    """Embeddings (B, T, features) of words (B, T), time before batch in memory, as the layers read them."""
    return embedding(words.mT).transpose(0, 1)


def at_every_step(layer: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Apply a layer to y (B, T, features) as rows; without flattening, vmap would copy the weights B times."""
    return layer(y.flatten(0, 1)).unflatten(0, y.shape[:2])


def linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    """A linear layer on very many rows."""
    return of_many_rows(rows, layer.weight, layer.bias)


def of_many_rows(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``nn.functional.linear`` on very many rows; :class:`LinearOfRuns` computes it for runs on a GPU."""
    functorch = torch._C._functorch
    of_runs = functorch.is_batchedtensor(rows) and functorch.maybe_current_level() == 1  # vmap, and no other transform
    if of_runs and rows.device.type in SPLIT_PRODUCTS_ON:
        return LinearUnderVmap.apply(rows, weight, bias)
    return nn.functional.linear(rows, weight, bias)


class LinearUnderVmap(torch.autograd.Function):
    """``nn.functional.linear`` inside ``torch.vmap``: :class:`LinearOfRuns` computes all runs together."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute one run."""
        return nn.functional.linear(rows, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Save nothing: gradients are those of :class:`LinearOfRuns`."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        """All runs, in the first dimension."""
        runs = info.batch_size
        return LinearOfRuns.apply(
            *(
                t.expand(runs, *t.shape) if dim is None else t.movedim(dim, 0)
                for t, dim in zip(tensors, in_dims, strict=True)
            )
        ), 0


class LinearOfRuns(torch.autograd.Function):
    """Linear layers of many runs on very many rows: (R, I, K), (R, N, K), (R, N) to (R, I, N).

    The gradient of a weight is a sum over very many rows that gives a small matrix: an ordinary product keeps only a
    few multiprocessors busy. See :func:`deepmemory.ops.hoisted.product`. The gradient also has the layout of the
    weight here; torch's own batched product returns it transposed, and a large one is then slow to read.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """All runs in one product, in the precision of autocast where that is on."""
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weight, bias = rows.to(dtype), weight.to(dtype), bias.to(dtype)
        ctx.save_for_backward(rows, weight)
        return torch.baddbmm(bias[:, None], rows, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows, weight and bias."""
        rows, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            hoisted.product(grad, rows) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
        )


def recurrent_block(setting: Setting, input_size: int, engine: str = "auto") -> nn.Module:
    """The recurrent layers of a setting with their initial weights."""
    size, layers = (setting.hidden[0], 1) if len(setting.hidden) == 1 else (list(setting.hidden), len(setting.hidden))
    if setting.cell == "dmu":
        return dm.DMU(
            input_size,
            size,
            layers,
            batch_first=True,
            transition=setting.transition,
            residual=setting.residual,
            activation=setting.activation,
            memory_bias=setting.memory_bias,
            engine=engine,
        )
    if setting.cell == "rhn":
        rhn = dm.RHN(input_size, size, layers, batch_first=True, depth=setting.depth, engine=engine)
        add_transform_bias(rhn, setting.transform_bias)
        return rhn
    if setting.cell == "lstm":
        lstm = dm.LSTM(input_size, size, layers, batch_first=True, engine=engine)
        set_forget_bias(lstm, setting.forget_bias)
        add_input_bias(lstm, setting.input_bias)
        return lstm
    if setting.cell == "gru":
        return dm.GRU(input_size, size, layers, batch_first=True, memory_bias=setting.update_bias, engine=engine)
    if setting.cell == "mingru":
        return MinGRU(input_size, setting.hidden, setting.update_bias)
    return dm.RNN(input_size, size, layers, batch_first=True, engine=engine)


def zero_state(setting: Setting, runs: tuple[int, ...], batch: int, device: torch.device, dtype: torch.dtype) -> Any:
    """An initial state in the form that a recurrent block takes and returns: (*runs, layers, B, width)."""
    equal = len(set(setting.hidden)) == 1
    shapes = [(len(setting.hidden), setting.hidden[0])] if equal else [(1, width) for width in setting.hidden]

    def part() -> Any:
        tensors = tuple(torch.zeros(*runs, n, batch, width, device=device, dtype=dtype) for n, width in shapes)
        return tensors[0] if equal else tensors

    return (part(), part()) if setting.cell == "lstm" else part()


def tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a state: an LSTM has two, and layers of different widths have one each."""
    return [state] if isinstance(state, Tensor) else [tensor for part in state for tensor in tensors_in(part)]


@torch.no_grad()
def set_forget_bias(lstm: dm.LSTM, value: float) -> None:
    """Set the forget gate's part, the second of four, of both bias vectors of every layer."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            parameter.chunk(4)[1].fill_(value)


@torch.no_grad()
def add_input_bias(lstm: dm.LSTM, value: float) -> None:
    """Add to the input gate's part, the first of four, of every layer's ``bias_ih``."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_ih"):
            parameter.chunk(4)[0].add_(value)


@torch.no_grad()
def add_transform_bias(rhn: dm.RHN, value: float) -> None:
    """Add to the transform gate's half of every micro-layer's bias."""
    for name, parameter in rhn.named_parameters():
        if name.startswith("bias"):
            parameter.chunk(2)[1].add_(value)


def initial_weights(setting: Setting, task: Task, seeds: list[int]) -> dict[str, Tensor]:
    """The initial weights of each seed, stacked: (R, ...) on the CPU, independent of the other runs."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(int(random_streams.derive(torch.tensor(seed), random_streams.WEIGHTS)) & (2**63 - 1))
            drawn.append(dict(task.network(setting).named_parameters()))
    return {name: torch.stack([weights[name].detach() for weights in drawn]) for name in drawn[0]}


def weight_shapes(setting: Setting, task: Task) -> dict[str, tuple[int, ...]]:
    """The shape of every trained weight; no memory is allocated, however large the setting is."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in task.network(setting).named_parameters()}


def weight_count(setting: Setting, task: Task, output_layer: bool = True) -> int:
    """The number of trained weights, with or without the output layer."""
    shapes = weight_shapes(setting, task)
    return sum(math.prod(s) for name, s in shapes.items() if output_layer or not name.startswith("output."))
