"""The Deep Memory Update layer and cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepmemory.nn.cell import Cell
from deepmemory.nn.definition import DeepMemory, GivenTransition, check_memory_bias
from deepmemory.nn.recurrent import Recurrent, State
from deepmemory.nn.regularisation import check_probability
from deepmemory.ops import plain
from deepmemory.ops.recurrence import Recurrence, Sequences, Zeros

Transition = Sequence[int] | nn.Module | Sequence[nn.Module] | None


def linear_layers(transition: nn.Module) -> int:
    """The depth n of a transition given as a module: the number of its weight matrices, each counted once."""
    return max(1, sum(parameter.dim() >= 2 for parameter in transition.parameters()))


def check_widths(name: str, transition: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the hidden widths as a tuple; raise if ``transition`` is not valid."""
    if transition is None:
        return None
    if isinstance(transition, str) or not isinstance(transition, Sequence):
        raise TypeError(
            f"{name}: transition should be a list of widths, an nn.Module or None, got: {type(transition).__name__}"
        )
    if not all(type(width) is int and width > 0 for width in transition):
        raise ValueError(f"{name}: transition should list positive integer widths, got {list(transition)}")
    return tuple(transition)


def check_own_bias(name: str, memory_bias: float) -> None:
    """Raise if ``memory_bias`` is set for a transition given as a module: its biases belong to the caller."""
    if memory_bias:
        raise ValueError(
            f"{name}: memory_bias={memory_bias} cannot be set on a transition given as a module; "
            "add it to the first hidden_size entries of that module's last bias"
        )


def check_own_layers(name: str, **options: bool | float) -> None:
    """Raise if an option for hidden layers is set for a transition given as a module, which defines its own."""
    for option, value in options.items():
        if value:
            raise ValueError(
                f"{name}: {option}={value} needs a transition given as a list of widths; "
                "implement it in the module instead"
            )


def check_transformed(name: str, transformed: Tensor, hidden_size: int) -> Tensor:
    """Return the output of a transition given as a module; raise if its size is not that of [z, candidate]."""
    if transformed.shape[-1] != 2 * hidden_size:
        raise RuntimeError(
            f"{name}: the transition should return 2 * hidden_size = {2 * hidden_size} features, "
            f"[z, candidate], got {transformed.shape[-1]}"
        )
    return transformed


class DMU(Recurrent):
    r"""Deep Memory Update: a recurrent layer whose state update is a feedforward network of any depth.

    .. math::
        \langle z_t, \hat h_t \rangle &= \mathrm{FNN}([x_t, h_{t-1}]) \\
        h_t &= h_{t-1} \circ \sigma(z_t) + \tanh(\hat h_t) \circ (1 - \sigma(z_t))

    A drop-in replacement for ``nn.GRU``. Train it with :func:`deepmemory.parameter_groups`, which sets its learning
    rate to lr / 2n, where n is the number of linear layers in the feedforward network. With the activation f, this
    network is

    .. math::
        v_1 &= W_1 [x_t, s \circ h_{t-1}] + b_1 \\
        a_k &= m_k \circ f(v_k) \qquad (+\ a_{k-1} \text{ if residual and } k > 1) \\
        v_{k+1} &= W_{k+1} a_k + b_{k+1}, \qquad v_n = \langle z_t, \hat h_t \rangle

    The dropout masks s and m are drawn once per call for each sequence and are the same at every step.

    >>> import torch, deepmemory as dm
    >>> rnn = dm.DMU(10, 20, num_layers=2)
    >>> output, h_n = rnn(torch.randn(5, 3, 10))
    >>> output.shape, h_n.shape
    (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))

    Args:
        input_size: Number of features of x.
        hidden_size: Number d of features of the state, or a list with one width per layer.
        num_layers: Number of stacked layers.
        bias: ``False`` leaves out all biases.
        batch_first: ``True`` for input and output of shape (batch, time, features).
        dropout: Probability of dropout on the output of every layer but the last.
        bidirectional: ``True`` adds a second direction, which reads the sequence backwards.
        device: Device of the weights.
        dtype: Data type of the weights.
        transition: Hidden layers of the feedforward network: a list of widths (``[]`` for none, n = 1), ``None`` for
            one hidden layer as wide as the state (n = 2), or any ``nn.Module`` from ``[x, h]`` to ``[z, candidate]``,
            which runs on the plain engine. Several layers or directions need a list of modules, one for each.
        residual: ``True`` adds a skip connection around every hidden layer from the second on. All hidden layers must
            have the same width.
        activation: Activation of the hidden layers: leaky_relu, relu, tanh, silu or gelu.
        memory_bias: Initial gate bias, added to the bias of z at initialisation. With 0, a new layer replaces about
            half of its state at every step, which suits text and other tasks with a short memory. With 3, it keeps
            95 % of its state, which suits tasks with a memory of a hundred steps or more. The layer restores
            ``memory_bias`` if an initialiser in ``model.apply`` sets biases to zero. A loop over ``named_parameters``
            overwrites it; call ``reset_parameters`` afterwards.
        recurrent_dropout: Probability of dropping a unit of the state on its way into the transition. The mask is drawn
            once per call for each sequence. The state that is carried over to the next step is not masked.
        transition_dropout: Probability of dropping a unit of a hidden layer. The masks are drawn once per call for each
            sequence.
        engine: ``"auto"`` or a name from :func:`deepmemory.engines`.
        recompute: ``True`` recomputes inner activations in the backward pass instead of storing them.

    Shapes, with D = 2 if bidirectional, else 1:

    ==========  ===========================================================================
    input       (T, B, input_size), (B, T, input_size) with batch_first, (T, input_size) for
                one sequence, or a ``PackedSequence``
    hx          (D * num_layers, B, d), without B for one sequence; zeros by default. If layers
                differ in width, a tuple of one (D, B, d_l) tensor per layer. A half-precision
                state, for instance from autocast, is widened to the dtype of the input
    lengths     (B,): step t of sequence b is padding if ``t >= lengths[b]``. In the padding the
                state does not change and the output is zero
    resets      (T, B) bool, laid out like the input: true where a new sequence begins. The state
                is set to zero before that step, and no gradient flows back across the cut. The
                backward direction is cut at the same place. Not available for packed input
    masks       dropout masks from :meth:`draw_masks`, for calls that share them; by default, new
                masks are drawn
    output      (T, B, D * d), laid out like the input
    h_n         like hx
    ==========  ===========================================================================
    """

    mode = "DMU"

    def __init__(
        self,
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
        transition: Transition = None,
        residual: bool = False,
        activation: str = "leaky_relu",
        memory_bias: float = 0.0,
        recurrent_dropout: float = 0.0,
        transition_dropout: float = 0.0,
        engine: str = "auto",
        recompute: bool = False,
    ) -> None:
        modules = self._modules_given(transition)
        if modules is not None:
            check_own_bias("DMU", memory_bias)
            check_own_layers("DMU", residual=residual, transition_dropout=transition_dropout)
        widths = None if modules is not None else check_widths("DMU", transition)  # type: ignore[arg-type]
        memory_bias = check_memory_bias("DMU", memory_bias, bias)
        kind = DeepMemory if modules is None else GivenTransition
        super().__init__(
            kind(widths, activation, memory_bias, residual),
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            engine=engine,
            recompute=recompute,
            recurrent_dropout=recurrent_dropout,
        )
        self.residual = residual
        self.transition_dropout = check_probability(
            "DMU", "transition_dropout", "a unit of a hidden layer being zeroed", transition_dropout
        )
        self.activation = activation
        self.memory_bias = memory_bias
        self.transition: list[int] | nn.ModuleList | None
        if modules is None:
            self.transition = None if widths is None else list(widths)
            return
        if len(modules) != self.num_layers * self._directions:
            raise ValueError(
                f"DMU: {self.num_layers} layer(s) in {self._directions} direction(s) need a list of "
                f"{self.num_layers * self._directions} transition modules, layer by layer, got {len(modules)}"
            )
        if engine not in ("auto", "plain"):
            raise ValueError(f"DMU: a transition given as a module runs on the plain engine, not on {engine!r}")
        self.transition = nn.ModuleList(modules).to(device=device, dtype=dtype)

    @staticmethod
    def _modules_given(transition: Transition) -> list[nn.Module] | None:
        if isinstance(transition, nn.ModuleList):
            return list(transition)
        if isinstance(transition, nn.Module):
            return [transition]
        if isinstance(transition, Sequence) and any(isinstance(part, nn.Module) for part in transition):
            return list(transition)  # type: ignore[arg-type]
        return None

    @property
    def depth(self) -> int:
        """The number n of linear layers in the transition; the largest n if layers differ."""
        if isinstance(self.transition, nn.ModuleList):
            return max(linear_layers(module) for module in self.transition)
        assert isinstance(self.definition, DeepMemory)
        return self.definition.depth

    def transition_weights(self, layer: int = 0, direction: int = 0) -> list[tuple[Tensor, Tensor | None]]:
        """The feedforward network as (weight, bias) pairs; the first acts on [x, h], the last gives [z, candidate]."""
        check_listed(self)
        if not (0 <= layer < self.num_layers and 0 <= direction < self._directions):
            raise IndexError(
                f"DMU: no layer {layer}, direction {direction}; there are {self.num_layers} layer(s) "
                f"and {self._directions} direction(s)"
            )
        return joined_weights(self._weights(layer, direction), self.bias)

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + own_repr(self)

    @property
    def _takes_states(self) -> bool:
        return super()._takes_states or isinstance(self.transition, nn.ModuleList)

    def _run(
        self, layer: int, direction: int, x: Tensor, state: State | Zeros, sequences: Sequences
    ) -> tuple[Tensor, State]:
        if not isinstance(self.transition, nn.ModuleList):
            return super()._run(layer, direction, x, state, sequences)
        assert not isinstance(state, Zeros)  # see _takes_states
        transition, width = self.transition[layer * self._directions + direction], self._widths[layer]

        exporting = torch.compiler.is_exporting()  # the loop in a graph can only use its operands
        given = {**dict(transition.named_parameters()), **dict(transition.named_buffers())} if exporting else {}

        def step(x_t: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
            (h,) = state
            joined = torch.cat([x_t, plain.seen(h, sequences)], -1)
            weights_given = dict(zip(given, weights, strict=True))
            transformed = functional_call(transition, weights_given, (joined,)) if exporting else transition(joined)
            return (plain.memory_update(check_transformed("DMU", transformed, width), h),)

        x = plain.without_padding(x, sequences.lengths)
        return plain.iterate(step, x, state, list(given.values()), sequences, reverse=bool(direction))


def is_dense(module: DMU | DMUCell) -> bool:
    """Whether the feedforward network consists only of linear layers with activations between them."""
    definition = module.definition
    assert isinstance(definition, DeepMemory)
    return not (isinstance(module.transition, nn.Module) or definition.adds_layers)


def check_listed(module: DMU | DMUCell) -> None:
    """Raise if the feedforward network is more than a list of linear layers."""
    name = type(module).__name__
    if isinstance(module.transition, nn.Module):
        raise TypeError(
            f"{name}: a transition given as a module has no fixed list of weights; read them from .transition"
        )
    if not is_dense(module):
        raise TypeError(
            f"{name}: with residual=True the transition is more than a list of weights; read them from .parameters()"
        )


def own_repr(module: DMU | DMUCell) -> str:
    """The options that only a DMU has, where they differ from their defaults."""
    own = f", transition={module.transition}" if isinstance(module.transition, list) else ""
    own += f", activation={module.activation!r}" if module.activation != "leaky_relu" else ""
    own += f", memory_bias={module.memory_bias}" if module.memory_bias else ""
    own += ", residual=True" if module.residual else ""
    dropped = module.transition_dropout if isinstance(module, DMU) else 0.0
    return own + (f", transition_dropout={dropped}" if dropped else "")


def joined_weights(weights: list[Tensor], bias: bool) -> list[tuple[Tensor, Tensor | None]]:
    """The flat weights of a layer as (weight, bias) pairs; the first weight acts on [x, h]."""
    first = (torch.cat(weights[:2], -1), weights[2] if bias else None)
    return [first, *Recurrence("dmu", bias=bias).deeper(weights)]


class DMUCell(Cell):
    r"""One step of :class:`DMU`, with the interface of ``nn.GRUCell``: ``h = cell(x, h)``.

    .. math::
        \langle z, \hat h \rangle &= \mathrm{FNN}([x, h]) \\
        h' &= h \circ \sigma(z) + \tanh(\hat h) \circ (1 - \sigma(z))

    >>> import torch, deepmemory as dm
    >>> cell = dm.DMUCell(10, 20)
    >>> cell(torch.randn(3, 10)).shape
    torch.Size([3, 20])

    Args:
        input_size: Number of features of x.
        hidden_size: Number of features of the state.
        bias: ``False`` leaves out all biases.
        device: Device of the weights.
        dtype: Data type of the weights.
        transition: As for :class:`DMU`: a list of widths, ``None`` or one ``nn.Module``.
        activation: Activation of the hidden layers.
        memory_bias: Initial gate bias, added to the bias of z at initialisation.
        residual: ``True`` adds a skip connection around every hidden layer from the second on. All hidden layers must
            have the same width.

    Shapes: x (B, input_size), h and the result (B, hidden_size), all without B for one sequence. h defaults
    to zeros.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        transition: Sequence[int] | nn.Module | None = None,
        activation: str = "leaky_relu",
        memory_bias: float = 0.0,
        residual: bool = False,
    ) -> None:
        given = isinstance(transition, nn.Module)
        if given:
            check_own_bias("DMUCell", memory_bias)
            check_own_layers("DMUCell", residual=residual)
        widths = None if isinstance(transition, nn.Module) else check_widths("DMUCell", transition)
        memory_bias = check_memory_bias("DMUCell", memory_bias, bias)
        super().__init__(
            (GivenTransition if given else DeepMemory)(widths, activation, memory_bias, residual),
            input_size,
            hidden_size,
            bias,
            device,
            dtype,
        )
        self.residual = residual
        self.activation = activation
        self.memory_bias = memory_bias
        self.transition: nn.Module | list[int] | None
        if isinstance(transition, nn.Module):
            self.transition = transition.to(device=device, dtype=dtype)
        else:
            self.transition = None if widths is None else list(widths)

    @property
    def depth(self) -> int:
        """The number n of linear layers in the transition."""
        if isinstance(self.transition, nn.Module):
            return linear_layers(self.transition)
        assert isinstance(self.definition, DeepMemory)
        return self.definition.depth

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + own_repr(self)

    def _step(self, x: Tensor, h: Tensor) -> Tensor:
        if not isinstance(self.transition, nn.Module):
            return super()._step(x, h)
        transformed = self.transition(torch.cat([x, h], -1))
        return plain.memory_update(check_transformed("DMUCell", transformed, self.hidden_size), h)
