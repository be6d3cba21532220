"""The base class of all recurrent layers: arguments, layers, directions, packing and state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from deepmemory import ops
from deepmemory.nn.defined import Defined
from deepmemory.nn.definition import Definition
from deepmemory.nn.packing import unpack
from deepmemory.nn.precision import check_state, convert_input, runs_in
from deepmemory.nn.regularisation import check_probability, draw_mask
from deepmemory.nn.sequences import check_lengths, check_masks, check_resets
from deepmemory.ops import Sequences, Zeros, engines, resets_of_sweep
from deepmemory.ops.recurrence import FULL_LENGTH

State = tuple[Tensor, ...]
Run = Callable[[Tensor, State, Sequences], tuple[Tensor, State]]  # from x (T, B, m) and a state to y and the last state
Observer = Callable[[int, int, Run, Tensor, State, Sequences], tuple[Tensor, State]]


class Recurrent(Defined):
    """Layers and directions of one kind of cell, with the interface of ``nn.GRU``.

    Programs also read undocumented attributes of torch's layers: ``_flat_weights``, ``_all_weights``, ``mode`` and so
    on. This class has them, too. It is not a subclass of ``nn.RNNBase``, because that would promise torch's gates in
    torch's order.
    """

    mode: str  # the kind of cell, with torch's name if it has one
    proj_size = 0  # an LSTM may have one
    transition_dropout = 0.0  # a DMU may have it
    memory_bias = 0.0  # a DMU, GRU or LSTM may have one
    _observer: Observer | None = None  # see observed

    def __init__(
        self,
        definition: Definition,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        engine: str = "auto",
        recompute: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths, num_layers = self._check_sizes(input_size, hidden_size, num_layers)
        self._check_options(bias, batch_first, dropout, num_layers, engine)
        definition.check(type(self).__name__, widths)
        self.definition = definition
        self.input_size = input_size
        self.hidden_size = hidden_size if isinstance(hidden_size, int) else tuple(hidden_size)
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bool(bidirectional)
        self.engine = engine
        self.recompute = recompute
        meaning = "a unit of the state being zeroed for the transition"
        self.recurrent_dropout = check_probability(type(self).__name__, "recurrent_dropout", meaning, recurrent_dropout)
        self._widths = widths
        self._all_weights: list[list[str]] = []  # their names, for each layer and direction
        for layer, hidden in enumerate(widths):
            for direction in range(self._directions):
                names = []
                for name, shape in definition.shapes(self._layer_input_size(layer), hidden, bias).items():
                    names.append(name + self._suffix(layer, direction))
                    setattr(self, names[-1], nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
                self._all_weights.append(names)
        self.reset_parameters()

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _ragged(self) -> bool:
        """Whether layers differ in width; the state is then a tuple with one tensor per layer."""
        return len(set(self._widths)) > 1

    @property
    def _takes_states(self) -> bool:
        """Whether anything but ``ops.scan`` reads states; zeros must then be ordinary tensors."""
        return self._observer is not None

    def _layer_input_size(self, layer: int) -> int:
        if layer == 0:
            return self.input_size
        return self._directions * self.definition.state_sizes(self._widths[layer - 1])[0]

    @staticmethod
    def _suffix(layer: int, direction: int) -> str:
        return f"_l{layer}" + ("_reverse" if direction else "")

    def _weights(self, layer: int, direction: int) -> list[Tensor]:
        own: Mapping[str, Any] = self._parameters  # looked up first: nn.Module.__getattr__ is slower
        names = self._all_weights[layer * self._directions + direction]
        return [own[name] if name in own else getattr(self, name) for name in names]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, as ``nn.GRU`` lists them."""
        return [[getattr(self, name) for name in names] for names in self._all_weights]

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for names in self._all_weights for name in names]

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        """All weights in one list, None for a missing one; built on every access, so never out of date."""
        return [getattr(self, name, None) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: Sequence[Tensor | None]) -> None:
        for name, weight in zip(self._flat_weights_names, weights, strict=True):
            if weight is not getattr(self, name, None):
                setattr(self, name, weight)

    def flatten_parameters(self) -> None:
        """Do nothing: no engine needs contiguous weights. This is for code written for ``nn.GRU``."""

    def _weights_by_layer(self) -> Iterator[tuple[dict[str, Tensor], int, int]]:
        for index, names in enumerate(self._all_weights):
            layer, direction = divmod(index, self._directions)
            suffix = self._suffix(layer, direction)
            weights = {name.removesuffix(suffix): getattr(self, name) for name in names if hasattr(self, name)}
            yield weights, self._layer_input_size(layer), self._widths[layer]

    def _check_sizes(self, input_size: int, hidden_size: int | Sequence[int], num_layers: int) -> tuple[list[int], int]:
        name = type(self).__name__
        widths = [hidden_size] if isinstance(hidden_size, int) else hidden_size
        if isinstance(input_size, bool) or not isinstance(input_size, int):
            raise TypeError(f"{name}: input_size should be of type int, got: {type(input_size).__name__}")
        if not isinstance(widths, list | tuple) or not all(type(width) is int for width in widths):
            given = hidden_size if isinstance(hidden_size, list | tuple) else type(hidden_size).__name__
            raise TypeError(f"{name}: hidden_size should be an int, or a list of ints, one per layer, got: {given}")
        if input_size <= 0:
            raise ValueError(f"{name}: input_size must be greater than zero, got {input_size}")
        if not widths or min(widths) <= 0:
            raise ValueError(f"{name}: hidden_size must be greater than zero, got {hidden_size}")
        if num_layers <= 0:
            raise ValueError(f"{name}: num_layers must be greater than zero, got {num_layers}")
        if isinstance(hidden_size, int):
            return [hidden_size] * num_layers, num_layers
        if num_layers not in (1, len(widths)):
            raise ValueError(
                f"{name}: hidden_size lists {len(widths)} widths, one per layer, but num_layers={num_layers}; "
                "leave num_layers out or make them agree"
            )
        return list(widths), len(widths)

    def _check_options(self, bias: bool, batch_first: bool, dropout: float, num_layers: int, engine: str) -> None:
        name = type(self).__name__
        for option, value in (("bias", bias), ("batch_first", batch_first)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: {option} should be of type bool, got: {type(value).__name__}")
        check_probability(name, "dropout", "an element being zeroed", dropout)
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                "dropout option adds dropout after all but last recurrent layer, so non-zero dropout expects "
                f"num_layers greater than 1, but got dropout={dropout} and num_layers={num_layers}",
                stacklevel=4,
            )
        if engine not in ("auto", *engines.NAMES):
            raise ValueError(f"{name}: unknown engine {engine!r}; choose from {', '.join(('auto', *engines.NAMES))}")

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        size = self.hidden_size if isinstance(self.hidden_size, int) else list(self.hidden_size)
        parts = [f"{self.input_size}, {size}"]
        parts += [f"proj_size={self.proj_size}"] if self.proj_size else []
        parts += [f"num_layers={self.num_layers}"] if self.num_layers != 1 and isinstance(size, int) else []
        defaults: dict[str, Any] = {"bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        defaults |= {"engine": "auto", "recompute": False, "recurrent_dropout": 0.0}
        parts += [f"{key}={getattr(self, key)!r}" for key, default in defaults.items() if getattr(self, key) != default]
        return ", ".join(parts)

    def draw_masks(self, batch_size: int | None = None) -> dict[str, Tensor]:
        """Draw the dropout masks of one call, so that several calls can share them.

        To read a sequence in pieces with the same masks, pass them to each call as ``masks=``. Each layer and direction
        has its own: ``state_l0`` (B, d) multiplies the state on its way into the weights, and ``hidden_l0`` (B, sum of
        widths) multiplies the hidden layers of a DMU's transition. The names have the same endings as those of the
        weights. Without dropout, as in evaluation mode, there are no masks.

        Args:
            batch_size: Number of sequences B; ``None`` for one sequence without a batch dimension.
        """
        like = next(self.parameters(), torch.empty(0))
        return self._draw_masks(() if batch_size is None else (batch_size,), like)

    def _draw_masks(self, shape: tuple[int, ...], like: Tensor) -> dict[str, Tensor]:
        if not (self.training and (self.recurrent_dropout or self.transition_dropout)):
            return {}
        rates = {"state": self.recurrent_dropout, "hidden": self.transition_dropout}
        return {
            name: draw_mask((*shape, width), rates[kind], like) for name, kind, width in self._masked() if rates[kind]
        }

    def _masked(self) -> Iterator[tuple[str, str, int]]:
        """Yield name, kind and number of features of every mask that a call can have."""
        for layer, width in enumerate(self._widths):
            for direction in range(self._directions):
                for kind, size in self.definition.mask_sizes(width).items():
                    yield kind + self._suffix(layer, direction), kind, size

    @overload
    def forward(
        self, input: Tensor, hx: Any = None, lengths: Any = None, resets: Any = None, masks: Any = None
    ) -> tuple[Tensor, Any]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Any = None, lengths: None = None, resets: None = None, masks: Any = None
    ) -> tuple[PackedSequence, Any]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        lengths: Tensor | Sequence[int] | int | None = None,
        resets: Tensor | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor | PackedSequence, Any]:
        """Run over whole sequences; the shapes are listed in the class docstring."""
        name = type(self).__name__
        if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                f"{name}: torch.onnx.export(..., dynamo=False) cannot export this layer: its tracer records no loop "
                "over time. Use deepmemory.export.save(model, inputs, path) or torch.onnx.export(..., dynamo=True)"
            )
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError(f"{name}: a PackedSequence has its own lengths; leave lengths= out")
            if resets is not None:
                raise ValueError(f"{name}: resets= needs a padded batch with lengths=, not a PackedSequence")
            self.check_input(input.data, input.batch_sizes)
            unpacked = unpack(name, input)
            batch = unpacked.x.shape[1]
            own = self._masks(masks, unpacked.x, batched=True, order=input.sorted_indices)
            state = self._initial_state(hx, unpacked.x, batch, batched=True, order=input.sorted_indices)
            y, final = self._layers(unpacked.x, state, unpacked.lengths, None, own)
            return unpacked.pack(y), self._final_state(final, batched=True, order=input.unsorted_indices)

        if input.dim() not in (2, 3):
            raise ValueError(f"{name}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        batched = input.dim() == 3
        x = (input.transpose(0, 1) if self.batch_first else input) if batched else input.unsqueeze(1)
        self.check_input(x, None)
        steps, batch = x.shape[:2]
        if steps == 0:
            raise RuntimeError(f"{name}: Expected sequence length to be larger than 0")
        own = self._masks(masks, x, batched)
        state = self._initial_state(hx, x, batch, batched)
        cuts = check_resets(name, resets, x, batched, self.batch_first)
        y, final = self._layers(x, state, check_lengths(name, lengths, x), cuts, own)
        if not batched:
            y = y.squeeze(1)
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, self._final_state(final, batched)

    def _masks(
        self, masks: Mapping[str, Tensor] | None, x: Tensor, batched: bool, order: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the caller's masks, or new ones, for the sequences of x (T, B, m).

        They are drawn before anything else, so that a seed gives the same masks for any sequence length.
        """
        if masks is None:
            masks = self._draw_masks((x.shape[1],) if batched else (), x)
            if not masks:
                return masks
        widths = {name: width for name, _, width in self._masked()}
        return check_masks(type(self).__name__, masks, widths, x, batched, order)

    def _layers(
        self,
        x: Tensor,
        state: Sequence[State | Zeros],
        lengths: Tensor | None,
        resets: Tensor | None,
        masks: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[State]]:
        """Run all layers and directions over x (T, B, m); ``state`` has one entry for each of them."""
        final: list[State] = []
        cuts: list[Tensor | None] = [None] * self._directions
        if resets is not None:
            cuts = [resets_of_sweep(resets, lengths, reverse=bool(direction)) for direction in range(self._directions)]
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self._directions):
                sequences = self._sequences(layer, direction, lengths, cuts[direction], masks)
                if self._observer is None:
                    y, last = self._run(layer, direction, x, state[len(final)], sequences)
                else:
                    run = partial(self._run, layer, direction)
                    given = cast(State, state[len(final)])  # see _takes_states
                    y, last = self._observer(layer, direction, run, x, given, sequences)
                outputs.append(y)
                final.append(last)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, final

    def _sequences(
        self, layer: int, direction: int, lengths: Tensor | None, cuts: Tensor | None, masks: Mapping[str, Tensor]
    ) -> Sequences:
        """Lengths, resets and the masks of one layer in one direction."""
        if lengths is None and cuts is None and not masks:
            return FULL_LENGTH
        suffix = self._suffix(layer, direction)
        return Sequences(lengths, cuts, masks.get("state" + suffix), masks.get("hidden" + suffix))

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Let an observer run every layer and direction while the context lasts.

        ``observer(layer, direction, run, x, state, sequences)`` is called instead of ``run(x, state, sequences)``. It
        returns the output (T, B, d) and the final state, as ``run`` does, and may call ``run`` on pieces of x.
        """
        self._observer, before = observer, self._observer
        try:
            yield
        finally:
            self._observer = before

    def _run(
        self, layer: int, direction: int, x: Tensor, state: State | Zeros, sequences: Sequences
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction."""
        return ops.scan(
            self.definition.recurrence(self.bias, reverse=bool(direction)),
            x,
            state,
            self._weights(layer, direction),
            sequences,
            engine=self.engine,
            recompute=self.recompute,
        )

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Raise if this input does not fit the weights; with ``batch_sizes`` it is packed data."""
        name, dims = type(self).__name__, 3 if batch_sizes is None else 2
        if input.dim() != dims:
            raise RuntimeError(f"{name}: input must have {dims} dimensions, got {input.dim()}")
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{name}: input.size(-1) must be equal to input_size. Expected {self.input_size}, got {input.shape[-1]}"
            )
        weight = next(iter(self._parameters.values()), None)
        if weight is None:
            weight = next(self.parameters(), None)
        if weight is None:  # a transition given as a module may have none
            return
        if input.device != weight.device:
            raise RuntimeError(
                f"{name}: input is on {input.device} but the weights are on {weight.device}; move one with .to(...)"
            )
        if input.dtype != weight.dtype and runs_in(input) != runs_in(weight):
            raise ValueError(
                f"{name}: input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). "
                f"{convert_input(input, weight)}"
            )

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        """Raise if this input, or this state in the order of the batch, does not fit the layer."""
        self.check_input(input, batch_sizes)
        self._initial_state(hidden, input, self._batch(input, batch_sizes), batched=True)

    def get_expected_hidden_size(self, input: Tensor, batch_sizes: Tensor | None) -> tuple[Any, ...]:
        """Shape of h for this batch; a tuple of one shape per layer if layers differ in width."""
        return self._expected_size(0, input, batch_sizes)

    def _expected_size(self, index: int, input: Tensor, batch_sizes: Tensor | None) -> tuple[Any, ...]:
        shapes = self._state_shapes(index, self._batch(input, batch_sizes))
        return tuple(shapes) if self._ragged else shapes[0]

    def _batch(self, input: Tensor, batch_sizes: Tensor | None) -> int:
        return input.shape[0 if self.batch_first else 1] if batch_sizes is None else int(batch_sizes[0])

    def permute_hidden(self, hx: Any, permutation: Tensor | None) -> Any:
        """The state with its sequences in another order."""
        if permutation is None:
            return hx
        if isinstance(hx, Tensor):
            return hx.index_select(1, permutation)
        return tuple(self.permute_hidden(part, permutation) for part in hx)

    def _initial_state(
        self, hx: Any, x: Tensor, batch: int, batched: bool, order: Tensor | None = None
    ) -> Sequence[State | Zeros]:
        """Return the initial state as one tuple of (B, d) tensors for each layer and direction.

        If ``hx`` is None, ``ops.scan`` creates the zeros; they are created here if anything else reads them.
        """
        if hx is None:
            starts: dict[int, State | Zeros] = {}  # never written to, so layers of equal width share them
            for width in set(self._widths):
                sizes = self.definition.state_sizes(width)
                made = tuple([x.new_zeros(batch, size) for size in sizes]) if self._takes_states else Zeros(sizes)
                starts[width] = made
            return [starts[width] for width in self._widths for _ in range(self._directions)]
        parts = len(self.definition.state_sizes(1))
        given = (hx,) if parts == 1 else hx
        if not isinstance(given, (tuple, list)) or len(given) != parts:
            raise RuntimeError(f"{type(self).__name__}: hx should be a tuple (h_0, c_0), got {type(hx).__name__}")
        rows = [self._state_rows(part, index, x, batch, batched, order) for index, part in enumerate(given)]
        return list(zip(*rows, strict=True))

    def _state_shapes(self, index: int, batch: int) -> list[tuple[int, int, int]]:
        """The shape of one of the state's tensors, h or c; if widths differ, one shape for each layer."""
        sizes = [self.definition.state_sizes(width)[index] for width in self._widths]
        if self._ragged:
            return [(self._directions, batch, size) for size in sizes]
        return [(self.num_layers * self._directions, batch, sizes[0])]

    def _state_rows(
        self, part: Any, index: int, x: Tensor, batch: int, batched: bool, order: Tensor | None
    ) -> list[Tensor]:
        """Check one of the state's tensors (one per layer if widths differ) and split it by layer and direction."""
        name, expected = type(self).__name__, self._state_shapes(index, batch)
        if not self._ragged:
            part = [part]
        elif not isinstance(part, (tuple, list)) or len(part) != len(expected):
            raise RuntimeError(
                f"{name}: layers of different widths take hx as a tuple of {len(expected)} tensors, one per "
                f"layer, got {type(part).__name__}"
            )
        rows: list[Tensor] = []
        for tensor, (count, _, size) in zip(part, expected, strict=True):
            tensor = check_state(name, tensor, x)
            dims = 3 if batched else 2
            if tensor.dim() != dims:
                kind = "batched 3-D" if batched else "unbatched 2-D"
                raise RuntimeError(
                    f"{name}: For {kind} input, hx should also be {dims}-D but got {tensor.dim()}-D tensor"
                )
            shape = (count, batch, size) if batched else (count, size)
            if tensor.shape != shape:
                raise RuntimeError(f"{name}: Expected hidden size {shape}, got {list(tensor.shape)}")
            if not batched:
                tensor = tensor.unsqueeze(1)
            rows.extend(self.permute_hidden(tensor, order).unbind(0))
        return rows

    def _final_state(self, final: list[State], batched: bool, order: Tensor | None = None) -> Any:
        """The reverse of :meth:`_initial_state`."""
        parts = [self._joined(rows, batched, order) for rows in zip(*final, strict=True)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _joined(self, rows: Sequence[Tensor], batched: bool, order: Tensor | None) -> Any:
        """One of the state's tensors (one per layer if widths differ) from its rows, by layer and direction."""
        if len(rows) > self._directions and self._ragged:
            starts = range(0, len(rows), self._directions)
            return tuple(self._stacked(rows[i : i + self._directions], batched, order) for i in starts)
        return self._stacked(rows, batched, order)

    def _stacked(self, rows: Sequence[Tensor], batched: bool, order: Tensor | None) -> Tensor:
        stacked: Tensor = rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))
        if order is not None:
            stacked = self.permute_hidden(stacked, order)
        return stacked if batched else stacked.squeeze(1)
