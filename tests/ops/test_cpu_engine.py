"""The CPU engine gives what the plain engine gives: outputs, final states and every gradient."""

import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from copy import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close
from torch import Tensor

from deepmemory.ops import ACTIVATIONS, CELLS, Recurrence, Sequences, cpu, plain, resets_of_sweep, scan

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no CPU engine: {cpu.unavailable()}")

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
DTYPES = (torch.float64, torch.float32)
ALL_EXTRAS = {"masks": True, "resets": True}


def make_weights(rec: Recurrence, m: int, d: int, hidden: list[int], runs: tuple[int, ...] = ()) -> list[Tensor]:
    """Weights of a layer that neither dies nor explodes; an RHN is as deep as ``hidden`` is long, plus one."""

    def linear(out: int, *ins: int) -> list[Tensor]:
        weights = [torch.randn(*runs, out, i, dtype=torch.float64) * (1.2 / sum(ins) ** 0.5) for i in ins]
        biases = [torch.randn(*runs, out, dtype=torch.float64) * 0.3 for _ in range(1 + (rec.cell in GATES))]
        return weights + (biases if rec.bias else [])

    if rec.cell in GATES:
        return linear(GATES[rec.cell] * d, m, d)
    outs = [*hidden, 2 * d] if rec.cell == "dmu" else [2 * d] * (len(hidden) + 1)
    added = len(outs) ** 0.5 if rec.residual else 1  # a sum of hidden layers is as large as one
    ins = outs if rec.cell == "dmu" else [d] * len(outs)
    weights = linear(outs[0], m, d)
    for out, before in zip(outs[1:], ins, strict=False):
        weights += [w / added for w in linear(out, before)]
    return weights


def make_mask(*shape: int) -> Tensor:
    """A dropout mask: zeros, and the same factor everywhere else."""
    return (torch.rand(shape, dtype=torch.float64) < 0.7).double() / 0.7


class Case:
    """One layer, its input and what the plain engine makes of it in float64."""

    def __init__(self, rec, m, d, hidden=(), batch=3, steps=4, lengths=None, weights=None, masks=False, resets=False):
        self.rec = rec
        self.lengths = torch.randint(0, steps + 1, (batch,)) if lengths == "random" else lengths
        self.weights = make_weights(rec, m, d, list(hidden)) if weights is None else weights
        self.x = torch.randn(steps, batch, m, dtype=torch.float64)
        self.state = tuple(torch.rand(batch, d, dtype=torch.float64) * 1.8 - 0.9 for _ in range(rec.states))
        self.grads = [weighting(o) for o in (self.x.new_empty(steps, batch, d), *self.state)]  # of y and final states
        self.state_mask = make_mask(batch, d) if masks else None
        self.hidden_mask = make_mask(batch, sum(hidden)) if masks and rec.cell == "dmu" else None
        begins = torch.rand(steps, batch) < 0.2
        self.resets = resets_of_sweep(begins, self.lengths, rec.reverse) if resets else None

    def sequences(self, dtype) -> Sequences:
        masks = (None if mask is None else mask.to(dtype) for mask in (self.state_mask, self.hidden_mask))
        return Sequences(self.lengths, self.resets, *masks)

    def results(self, dtype, engine="cpu", **options) -> list[Tensor]:
        """y, final states, then the gradients of x, states and weights."""
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (self.x, *self.state, *self.weights)]
        n = 1 + self.rec.states
        args = (self.rec, inputs[0], tuple(inputs[1:n]), inputs[n:], self.sequences(dtype))
        y, final = plain.scan(*args) if engine == "plain" else scan(*args, engine=engine, **options)
        grads = torch.autograd.grad([y, *final], inputs, [g.to(dtype) for g in self.grads])
        return [y.detach(), *(f.detach() for f in final), *grads]

    def each_alone(self) -> list[Tensor]:
        """What the plain engine gives in float64, one sequence at a time, so that no step is padding."""
        out = [torch.zeros_like(t) for t in (*self.grads, self.x, *self.state, *self.weights)]
        for b, length in enumerate(self.lengths):
            row, steps = slice(b, b + 1), (slice(length), slice(b, b + 1))
            one = copy(self)
            one.x, one.state, one.lengths = self.x[steps], tuple(s[row] for s in self.state), None
            one.resets = None if self.resets is None else self.resets[steps]
            masks = self.state_mask, self.hidden_mask
            one.state_mask, one.hidden_mask = (None if mask is None else mask[row] for mask in masks)
            one.grads = [self.grads[0][steps], *(g[row] for g in self.grads[1:])]
            where = [steps, *[row] * self.rec.states] * 2 + [...] * len(self.weights)
            for total, at, part in zip(out, where, one.results(torch.float64, "plain"), strict=True):
                total[at] += part
        return out

    def check(self, dtypes=DTYPES, **options) -> None:
        expected = self.results(torch.float64, "plain")
        for dtype in dtypes:
            close(self.results(dtype, **options), expected, dtype)


def weighting(output: Tensor) -> Tensor:
    """Weighs every entry differently."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def loss(*outputs: Tensor) -> Tensor:
    return sum((o * weighting(o)).sum() for o in outputs)


def close(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """By the table, each tensor measured against its own largest entry: gradients are sums over many steps."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        scale = e.abs().max().clamp(min=1) if e.numel() else 1
        assert_close(a.double() / scale, e.double() / scale, dtype, f"result {i}")


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread():
    """Unless a test asks for more: torch's own threads, in the plain engine, only get into each other's way here."""
    with threads(1):
        yield


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["onward", "reverse"])
def reverse(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[True, False], ids=["bias", "no-bias"])
def bias(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[5, 40], ids=["lanes", "features"])
def width(request: pytest.FixtureRequest) -> int:
    """One state small enough for the batch to go in lanes, one for which the features do."""
    return request.param


class TestAgainstPlain:
    @pytest.mark.parametrize("lengths", [None, "random"], ids=["full", "padded"])
    def test_every_cell(self, cell, width, bias, reverse, lengths):
        rec = Recurrence(cell, "tanh", bias, reverse)
        Case(rec, 3, width, [width + 2, width - 1], batch=19, steps=18, lengths=lengths).check()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("cell_", ["dmu", "rnn"])
    def test_activations(self, cell_, activation, width):
        Case(Recurrence(cell_, activation), 3, width, [width + 1], batch=5, steps=4).check()

    @pytest.mark.parametrize("d", [1, 7, 15, 16, 17, 31, 32, 33, 63, 100, 131, 136, 257])
    def test_odd_widths(self, d, cell):
        Case(Recurrence(cell), 5, d, [d + 3], batch=3, steps=3).check()

    @pytest.mark.parametrize("m", [1, 16, 88])
    @pytest.mark.parametrize("batch", [1, 16, 33, 64])
    def test_odd_batches_and_inputs(self, m, batch, width):
        Case(Recurrence("dmu", "tanh"), m, width, [width], batch=batch, steps=3).check()

    @pytest.mark.parametrize("depth", [1, 2, 10])
    @pytest.mark.parametrize("cell_", ["dmu", "rhn"])
    def test_depth(self, cell_, depth, width):
        widths = [width + k % 3 for k in range(depth - 1)]
        Case(Recurrence(cell_, "tanh"), 3, width, widths, batch=9, steps=5).check()

    @pytest.mark.parametrize("steps", [1, 1000])
    def test_steps(self, steps, width):
        Case(Recurrence("dmu", "tanh"), 2, width, [width], batch=2, steps=steps).check((torch.float64,))

    @pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["bare", "masks-resets"])
    def test_recompute(self, cell, width, reverse, extras):
        rec = Recurrence(cell, reverse=reverse)
        Case(rec, 3, width, [width], steps=21, lengths="random", **extras).check(recompute=True)

    @given(
        st.sampled_from(CELLS), st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(1, 40), max_size=3),
        st.integers(1, 20), st.integers(1, 20), *[st.booleans()] * 5,
    )  # fmt: skip
    def test_any_shape(self, cell, m, d, hidden, batch, steps, reverse, padded, residual, masks, resets):
        rec = Recurrence(cell, "tanh", reverse=reverse, residual=residual and cell == "dmu")
        hidden = hidden[:1] * len(hidden) if rec.residual else hidden
        lengths = "random" if padded else None
        case = Case(rec, m, d, hidden, batch, steps, lengths, masks=masks, resets=resets)
        case.check((torch.float64,))


class TestMasks:
    """Factors of the state and of the hidden layers, one for each sequence and unit."""

    @pytest.mark.parametrize("lengths", [None, "random"], ids=["full", "padded"])
    def test_every_cell(self, cell, width, bias, reverse, lengths):
        rec = Recurrence(cell, "tanh", bias, reverse)
        Case(rec, 3, width, [width + 2, width - 1], batch=19, steps=18, lengths=lengths, masks=True).check()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation, width):
        Case(Recurrence("dmu", activation), 3, width, [width + 1, width], batch=5, masks=True).check()

    @pytest.mark.parametrize("alone", ["state_mask", "hidden_mask"])
    @pytest.mark.parametrize("residual", [False, True])
    def test_one_without_the_other(self, alone, residual, width):
        case = Case(Recurrence("dmu", residual=residual), 3, width, [width] * 3, batch=18, masks=True)
        setattr(case, alone, None)
        case.check()

    def test_without_hidden_layers(self, width):
        Case(Recurrence("dmu"), 3, width, batch=18, masks=True).check()

    def test_ones_change_nothing(self, cell, width):
        case = Case(Recurrence(cell), 3, width, [width] * 2, batch=18, steps=9, lengths="random")
        expected = case.results(torch.float64)
        case.state_mask = torch.ones(18, width)
        case.hidden_mask = torch.ones(18, 2 * width) if cell == "dmu" else None
        close(case.results(torch.float64), expected, torch.float64)

    def test_of_any_strides(self, width):
        case = Case(Recurrence("dmu"), 3, width, [width] * 2, batch=18, steps=9, **ALL_EXTRAS)
        expected = case.results(torch.float64)
        case.resets = case.resets.mT.contiguous().mT
        case.state_mask = case.state_mask.mT.contiguous().mT
        case.hidden_mask = torch.stack([case.hidden_mask] * 2, -1)[..., 0]
        assert all(map(torch.equal, case.results(torch.float64), expected))


class TestResiduals:
    """From the second one on, a hidden layer adds to the one before it."""

    @pytest.mark.parametrize("depth", [2, 3, 10])
    @pytest.mark.parametrize("masks", [False, True])
    def test_depth(self, depth, width, masks, bias, reverse):
        rec = Recurrence("dmu", "tanh", bias, reverse, residual=True)
        Case(rec, 3, width, [width + 1] * depth, batch=19, steps=18, lengths="random", masks=masks).check()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("masks", [False, True])
    def test_activations(self, activation, width, masks):
        Case(Recurrence("dmu", activation, residual=True), 3, width, [width + 1] * 3, batch=5, masks=masks).check()

    @pytest.mark.parametrize("d", [1, 7, 16, 17, 28, 29, 63, 136])
    def test_odd_widths(self, d):
        Case(Recurrence("dmu", residual=True), 5, d, [d + 3] * 3, masks=True).check()

    @pytest.mark.parametrize("hidden", [0, 1])
    def test_there_is_nothing_to_add_to(self, hidden, width):
        case = Case(Recurrence("dmu", residual=True), 3, width, [width] * hidden, batch=18)
        expected = case.results(torch.float32)
        case.rec = Recurrence("dmu")
        assert all(map(torch.equal, case.results(torch.float32), expected))


class TestResets:
    """A sequence that begins anew inside of another one."""

    @pytest.mark.parametrize("lengths", [None, "random"], ids=["full", "padded"])
    def test_every_cell(self, cell, width, bias, reverse, lengths):
        rec = Recurrence(cell, "tanh", bias, reverse)
        Case(rec, 3, width, [width + 2, width - 1], batch=19, steps=18, lengths=lengths, resets=True).check()

    def test_parts_are_sequences_of_their_own(self, cell, width, reverse):
        case = Case(Recurrence(cell, reverse=reverse), 3, width, [width], batch=17, steps=9)
        begins = torch.zeros(9, 17, dtype=torch.bool)
        begins[[4, 7]] = True
        case.resets = resets_of_sweep(begins, None, reverse)
        whole = case.results(torch.float64)
        cuts, first = [(0, 4), (4, 7), (7, 9)], (2 if reverse else 0)
        states = case.rec.states
        parts = []
        for k, (start, stop) in enumerate(cuts):
            part = copy(case)
            part.x, part.resets = case.x[start:stop], None
            part.state = case.state if k == first else tuple(torch.zeros_like(s) for s in case.state)
            ends = [g if k == 2 - first else torch.zeros_like(g) for g in case.grads[1:]]
            part.grads = [case.grads[0][start:stop], *ends]
            parts.append(part.results(torch.float64))
        of_x = 1 + states
        for i, result in enumerate(whole):
            each = [part[i] for part in parts]
            if i in (0, of_x):
                expected = torch.cat(each)
            elif i < of_x:
                expected = each[2 - first]
            else:
                expected = each[first] if i <= of_x + states else sum(each)
            assert_close(result, expected, what=f"result {i}")

    def test_what_was_before_reaches_nothing(self, cell, width, reverse):
        case = Case(Recurrence(cell, reverse=reverse), 3, width, [width], batch=17, steps=6, resets=True)
        case.resets[3] = True
        expected = case.results(torch.float64)
        before, after = (slice(4, 6), slice(0, 4)) if reverse else (slice(0, 3), slice(3, 6))
        case.x[before] = torch.nan
        actual = case.results(torch.float64)
        of_x, states = 1 + case.rec.states, case.rec.states
        assert torch.equal(actual[0][after], expected[0][after])
        assert all(torch.equal(actual[i], expected[i]) for i in range(1, of_x))
        assert torch.equal(actual[of_x][after], expected[of_x][after])
        case.x[before] = 0
        case.grads[0][after] = torch.nan
        assert all(g.isfinite().all() for g in case.results(torch.float64)[of_x + 1 : of_x + 1 + states])


class TestPadding:
    @pytest.mark.parametrize("length", [0, -1, -5])
    def test_lengths_of_zero_and_less_keep_the_state(self, cell, width, reverse, length):
        case = Case(Recurrence(cell, reverse=reverse), 3, width, [width], lengths=torch.full((3,), length))
        case.check()
        y, *final = case.results(torch.float64)[: 1 + case.rec.states]
        assert not y.any()
        assert torch.equal(final[0], case.state[0])

    def test_nothing_in_the_padding_reaches_a_result(self, cell, width, reverse):
        case = Case(Recurrence(cell, reverse=reverse), 3, width, [width], 18, 20, torch.arange(18) + 1)
        expected = case.results(torch.float32)
        padding = torch.arange(20)[:, None] >= case.lengths
        case.x[padding] = torch.nan
        actual = case.results(torch.float32)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
        assert not actual[1 + case.rec.states][padding].any()

    def test_nan_in_the_gradient_of_a_padded_output_stays_there(self, width):
        rec, lengths = Recurrence("dmu"), torch.tensor([2, 4, 0])
        case = Case(rec, 3, width, lengths=lengths)
        inputs = [t.requires_grad_() for t in (case.x, *case.state, *case.weights)]
        y, _ = scan(rec, inputs[0], (inputs[1],), inputs[2:], Sequences(lengths), engine="cpu")
        grad_y = torch.randn_like(y)
        padding = torch.arange(4)[:, None] >= lengths
        expected = torch.autograd.grad(y, inputs, grad_y, retain_graph=True)
        actual = torch.autograd.grad(y, inputs, grad_y.masked_fill(padding[..., None], torch.nan))
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["bare", "masks-resets"])
    def test_every_element_of_a_result_is_written(self, cell, width, extras):
        rec = Recurrence(cell, residual=cell == "dmu" and bool(extras))
        case = Case(rec, 3, width, [width] * 2, batch=18, steps=5, lengths="random", **extras)
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            case.check()
        finally:
            torch.use_deterministic_algorithms(False)


class TestSaturation:
    """A DMU lives on gates near one; what leaks through them must be right to the last digits."""

    @pytest.mark.parametrize("z", [-80.0, -30.0, -5.0, 0.0, 5.0, 30.0, 80.0])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_gradients_of_saturated_gates_are_relatively_accurate(self, z, dtype, width):
        h, candidate = torch.full((1, width), 0.9, dtype=dtype), torch.full((width,), 0.5, dtype=dtype)
        bias = torch.cat([torch.full((width,), z, dtype=dtype), candidate]).requires_grad_()
        weights = [torch.zeros(2 * width, k, dtype=dtype) for k in (1, width)]
        y, _ = scan(Recurrence("dmu"), torch.zeros(1, 1, 1, dtype=dtype), (h,), [*weights, bias], engine="cpu")
        (actual,) = torch.autograd.grad(y.sum(), [bias])
        # 1 - sigmoid(z) as sigmoid(-z): the plain engine's difference is zero long before this is.
        h, n = h[0].double(), torch.tanh(candidate.double())
        open_, shut = torch.sigmoid(torch.full_like(h, z)), torch.sigmoid(torch.full_like(h, -z))
        expected = torch.cat([(h - n) * open_ * shut, shut * (1 - n * n)])
        torch.testing.assert_close(actual.double(), expected, rtol=10 * torch.finfo(dtype).eps, atol=0)

    @pytest.mark.parametrize("z", [100.0, 1e4, torch.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_closed_cell_keeps_its_state_exactly(self, z, dtype, width):
        h = torch.randn(3, width, dtype=dtype)
        bias = torch.cat([torch.full((width,), z), torch.full((width,), 0.5)]).to(dtype)
        weights = [torch.zeros(2 * width, k, dtype=dtype) for k in (1, width)]
        x = torch.zeros(50, 3, 1, dtype=dtype)
        assert torch.equal(scan(Recurrence("dmu"), x, (h,), [*weights, bias], engine="cpu")[1][0], h)

    def test_nan_is_not_hidden(self, cell, width):
        case = Case(Recurrence(cell, "relu"), 2, width)
        case.x[1, 0, 0] = torch.nan
        y = case.results(torch.float32)[0]
        assert y[1:, 0].isnan().all()
        assert not y[:, 1:].isnan().any()


class TestNotFinite:
    """inf and NaN reach what they reach in the plain engine: nothing else through padding of rows or features."""

    @pytest.mark.parametrize("cell_", CELLS)
    @settings(max_examples=60)
    @given(st.data())
    def test_anywhere(self, cell_, data):
        def draw(*values):
            return data.draw(st.sampled_from(values))

        torch.manual_seed(0)
        residual = cell_ == "dmu" and draw(False, True)
        rec = Recurrence(cell_, draw(*ACTIVATIONS), reverse=draw(False, True), residual=residual)
        d, batch, steps = draw(29, 40, 100, 5, 16), draw(1, 3, 16, 19), draw(1, 4)
        lengths = draw(None, torch.randint(1, steps + 1, (batch,)))
        hidden = draw([], [17, 17], [d] * 3) if residual else draw([], [d], [17, 3])
        extras = {"masks": draw(False, True), "resets": draw(False, True)}
        case = Case(rec, draw(1, 3, 17), d, hidden, batch, steps, lengths, **extras)
        masks = [mask for mask in (case.state_mask, case.hidden_mask) if mask is not None and mask.numel()]
        tensor = draw(case.x, *case.state, *case.weights, *case.grads, *masks)
        tensor.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = draw(torch.inf, -torch.inf, torch.nan)
        dtype = draw(*DTYPES)
        with cpu.use_level(draw(*cpu.levels())):
            actual = case.results(dtype)
        expected = case.results(torch.float64, "plain") if lengths is None else case.each_alone()
        assert [a.isfinite().tolist() for a in actual] == [e.isfinite().tolist() for e in expected]
        finite = [[t.where(e.isfinite(), 0) for t, e in zip(r, expected, strict=True)] for r in (actual, expected)]
        close(*finite, dtype)

    def test_a_sequence_without_steps_reaches_no_gradient(self, cell, width):
        case = Case(Recurrence(cell), 3, width, [width], lengths=torch.tensor([4, 0, 2]), masks=True)
        expected = case.results(torch.float64)
        for own in (case.state[-1], case.state_mask, case.hidden_mask):
            if own is not None:
                own[1] = torch.nan
        first = 2 * (1 + case.rec.states)
        assert_close(case.results(torch.float64)[first:], expected[first:])


class TestFunctions:
    """The engine's own tanh, sigmoid and erf, seen through layers that do nothing else."""

    z = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-30, 0, 400), -torch.logspace(-30, 0, 400)]).double()

    def through(self, cell, activation, dtype, rows):
        rec = Recurrence(cell, activation, bias=False)
        weights = [torch.ones(rows, 1).to(dtype), torch.zeros(rows, 1).to(dtype)]
        return lambda h: scan(rec, self.z.to(dtype).view(1, -1, 1), (h,), weights, engine="cpu")[0].flatten()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("level", cpu.levels())
    def test_accuracy(self, dtype, level):
        z, eps = self.z.to(dtype), torch.finfo(dtype).eps
        zero = torch.zeros(len(z), 1, dtype=dtype)
        with cpu.use_level(level):
            for activation in ("tanh", "silu", "gelu"):
                actual = self.through("rnn", activation, dtype, 1)(zero).double()
                expected = plain.ACTIVATION[activation](z.double())
                assert ((actual - expected).abs() <= 3 * eps * expected.abs().clamp(min=1)).all(), activation
            rec = Recurrence("dmu", bias=False)  # candidate 0, so y = h * sigmoid(z)
            weights = [torch.tensor([[1.0], [0.0]]).to(dtype), torch.zeros(2, 1, dtype=dtype)]
            y, _ = scan(rec, z.view(1, -1, 1), (zero + 1,), weights, engine="cpu")
            expected = torch.sigmoid(z.double())
            assert ((y.flatten().double() - expected).abs() <= 4 * eps * expected).all()


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_masks_and_resets(self, dtype, cell, width):
        rec = Recurrence(cell, residual=cell == "dmu")
        case = Case(rec, 3, width, [width] * 2, batch=18, steps=5, lengths="random", **ALL_EXTRAS)
        case.check((dtype,))


class TestNothingToDo:
    def test_no_steps(self, width):
        case = Case(Recurrence("dmu"), 3, width, steps=0)
        y, final, *grads = case.results(torch.float64)
        assert y.shape == (0, 3, width)
        assert torch.equal(final, case.state[0])
        assert not any(g.any() for g in grads[2:])

    def test_no_rows(self, width):
        y, final, *grads = Case(Recurrence("gru"), 3, width, batch=0).results(torch.float64)
        assert y.shape == (4, 0, width)
        assert final.shape == (0, width)
        assert not any(g.any() for g in grads)


class TestRuns:
    @pytest.mark.parametrize("extras", [False, True], ids=["bare", "masks-resets"])
    def test_stacked_weights_under_vmap(self, cell, width, reverse, extras):
        runs, rec = 5, Recurrence(cell, "tanh", reverse=reverse, residual=extras and cell == "dmu")
        weights = make_weights(rec, 3, width, [width] * 2, (runs,))
        x = torch.randn(runs, 7, 18, 3, dtype=torch.float64)
        state = [torch.randn(runs, 18, width, dtype=torch.float64) for _ in range(rec.states)]
        sequences = Sequences(torch.randint(0, 8, (runs, 18)))
        if extras:
            begins = torch.rand(runs, 7, 18) < 0.2
            resets = torch.stack([resets_of_sweep(*one, reverse) for one in zip(begins, sequences[0], strict=True)])
            hidden_mask = make_mask(runs, 18, 2 * width) if cell == "dmu" else None
            sequences = Sequences(sequences.lengths, resets, make_mask(1, 18, width).expand(runs, -1, -1), hidden_mask)

        def results(run, inputs):
            inputs = [t.clone().requires_grad_() for t in inputs]
            outputs = run(*inputs)
            return [*(o.detach() for o in outputs), *torch.autograd.grad(loss(*outputs), inputs)]

        def one(engine):
            def run(sequences, x, *rest):
                state, weights = rest[: rec.states], list(rest[rec.states :])
                y, final = scan(rec, x, tuple(state), weights, sequences, engine=engine)
                return y, *final

            dims = Sequences(*(None if t is None else 0 for t in sequences))
            return lambda *inputs: torch.vmap(run, (dims, *[0] * len(inputs)))(sequences, *inputs)

        inputs = [x, *state, *weights]
        close(results(one("cpu"), inputs), results(one("plain"), inputs), torch.float64)

    def test_weights_shared_by_all_runs(self, width):
        rec = Recurrence("dmu")
        weights = make_weights(rec, 2, width, [width])
        x, h = torch.randn(4, 3, 6, 2, dtype=torch.float64), torch.randn(6, width, dtype=torch.float64)
        y = torch.vmap(lambda x: scan(rec, x, (h,), weights, engine="cpu")[0])(x)
        assert_close(y, torch.stack([plain.scan(rec, one, (h,), weights)[0] for one in x]))

    def test_strided_input(self, width):
        case = Case(Recurrence("gru"), 4, width, batch=6, steps=5)
        expected = case.results(torch.float64, "plain")
        case.x = case.x.transpose(0, 1).contiguous().transpose(0, 1)
        close(case.results(torch.float64), expected, torch.float64)
        case.x = torch.stack([case.x, case.x], -1)[..., 0]
        close(case.results(torch.float64), expected, torch.float64)


class TestOnlyWhatIsAskedFor:
    @pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["bare", "masks-resets"])
    def test_gradients(self, cell, width, extras):
        rec = Recurrence(cell, residual=cell == "dmu" and bool(extras))
        case = Case(rec, 3, width, [width] * 2, batch=17, steps=4, **extras)
        tensors = (case.x, *case.state, *case.weights)
        expected = case.results(torch.float64)[-len(tensors) :]
        first = 1 + case.rec.states
        for asked in range(len(tensors)):
            inputs = [t.clone().requires_grad_(i == asked) for i, t in enumerate(tensors)]
            args = case.rec, inputs[0], tuple(inputs[1:first]), inputs[first:], case.sequences(torch.float64)
            y, final = scan(*args, engine="cpu")
            (grad,) = torch.autograd.grad(loss(y, *final), [inputs[asked]])
            assert_close(grad, expected[asked], what=str(asked))

    def test_nothing_is_kept_without_gradients(self, width):
        rec = Recurrence("dmu")
        weights = [w[None] for w in make_weights(rec, 2, width, [width])]
        x, h = torch.randn(1, 4, 3, 2, dtype=torch.float64), torch.zeros(1, 3, width, dtype=torch.float64)
        for sequences in (Sequences(), Sequences(None, torch.rand(1, 4, 3) < 0.3, *[make_mask(1, 3, width)] * 2)):
            y, _, trace = cpu.forward(rec, x, [h], weights, sequences, True)
            assert trace.shape == cpu.trace_shape(rec, x, weights)
            y_alone, _, nothing = cpu.forward(rec, x, [h], weights, sequences, False)
            assert nothing.numel() == 0
            assert_close(y_alone, y)

    def test_a_projected_lstm_is_refused_with_the_reason(self):
        rec = Recurrence("lstm")
        weights = [*make_weights(rec, 2, 4, []), torch.zeros(3, 4)]
        assert "proj_size" in str(
            cpu.refuses(rec, torch.zeros(1, 1, 2, dtype=torch.float64), [w.double() for w in weights])
        )

    def test_other_dtypes_are_refused_with_the_reason(self):
        rec = Recurrence("rnn")
        weights = make_weights(rec, 2, 4, [])
        assert "complex64" in str(cpu.refuses(rec, torch.zeros(1, 1, 2, dtype=torch.complex64), weights))
        assert "float64" in str(cpu.refuses(rec, torch.zeros(1, 1, 2).half(), weights))


class TestLevelsAndThreads:
    @pytest.mark.parametrize("level", cpu.levels())
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["bare", "masks-resets"])
    def test_every_level(self, level, count, cell, width, extras):
        case = Case(Recurrence(cell, "tanh"), 3, width, [width, width + 5], 37, 40, "random", **extras)
        expected = case.results(torch.float64, "plain")
        for dtype in DTYPES:
            with cpu.use_level(level), threads(count):
                actual = case.results(dtype)
            close(actual, expected, dtype)

    def test_forward_and_backward_may_have_different_threads(self, width):
        case = Case(Recurrence("dmu", "tanh"), 3, width, [width], batch=37, steps=60)
        expected = case.results(torch.float64)[3:]
        inputs = [t.clone().requires_grad_() for t in case.weights]
        with threads(2):
            y, (final,) = scan(case.rec, case.x, case.state, inputs, engine="cpu")
        close(list(torch.autograd.grad(loss(y, final), inputs)), expected[1:], torch.float64)

    @pytest.mark.parametrize("lengths", [None, "random"], ids=["full", "padded"])
    @pytest.mark.parametrize("d", [20, 40], ids=["lanes", "features"])
    @pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["bare", "masks-resets"])
    def test_no_bit_depends_on_the_number_of_threads(self, d, lengths, reverse, extras):
        rec = Recurrence("dmu", reverse=reverse, residual=bool(extras))
        case = Case(rec, 3, d, [d] * 2, batch=70, steps=100, lengths=lengths, **extras)
        expected = case.results(torch.float32)
        for count in (1, 2, 3, 4, 8):
            with threads(count):
                assert all(map(torch.equal, case.results(torch.float32), expected)), count

    @pytest.mark.parametrize("d", [20, 40], ids=["lanes", "features"])
    def test_no_bit_of_a_run_depends_on_threads_or_on_other_runs(self, d):
        rec, runs = Recurrence("gru"), 3
        weights = [w.float() for w in make_weights(rec, 3, d, [], (runs,))]
        x, h = torch.randn(runs, 100, 70, 3), torch.zeros(70, d)

        def gradients(weights, x):
            def squares(weights):
                return scan(rec, x, (h,), weights, engine="cpu")[0].square().sum()

            return torch.func.grad(squares)(weights)

        alone = [gradients([w[run] for w in weights], x[run]) for run in range(runs)]
        for count in (1, 2, 3, 4, 8):
            with threads(count):
                together = torch.vmap(gradients)(weights, x)
            assert all(map(torch.equal, together, map(torch.stack, zip(*alone, strict=True)))), count

    def test_two_callers_at_once(self, width):
        case = Case(Recurrence("dmu"), 3, width, [width], batch=64, steps=100)
        expected, wrong = case.results(torch.float64), []

        def caller():
            for _ in range(8):
                actual = case.results(torch.float64)
                wrong.extend(i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if not a.allclose(e))

        callers = [threading.Thread(target=caller) for _ in range(3)]
        for c in callers:
            c.start()
        for c in callers:
            c.join()
        assert not wrong

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_child_computes_the_same(self, width):
        case = Case(Recurrence("dmu"), 3, width, [width], batch=64, steps=100)
        with threads(2):
            expected = case.results(torch.float64)[0]  # the pool is alive when the child is made
            context = multiprocessing.get_context("fork")
            receive, send = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(case, send))
            child.start()
            assert receive.poll(60), "the child hangs"
            assert_close(torch.tensor(receive.recv(), dtype=torch.float64).view(expected.shape), expected)
            child.join()

    def test_a_level_can_be_forced_from_outside(self):
        code = "from deepmemory.ops import cpu; print(cpu.unavailable())"
        for level, answer in (("baseline", "None"), ("abacus", "'abacus', but this processor has baseline")):
            environment = {**os.environ, cpu.LEVEL_VARIABLE: level}
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert answer in done.stdout, done.stderr


def test_a_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "__init__.py"))
    cpu._library.cache_clear()
    try:
        assert "install one and run `pip install" in str(cpu.unavailable())
        assert cpu.levels() == []
    finally:
        monkeypatch.undo()
        cpu._library.cache_clear()
    assert cpu.unavailable() is None


def in_child(case: Case, send) -> None:
    with torch.no_grad():
        for _ in range(3):
            y, _ = scan(case.rec, case.x, case.state, case.weights, engine="cpu")
    send.send(y.flatten().tolist())


def test_offsets_do_not_overflow():
    """Element 2**31 of a tensor is reached: rows far apart in an expanded view of little memory."""
    steps, gap = 3, 2**31 + 7
    try:
        storage = torch.empty(2 * gap + 8, dtype=torch.float32)  # touched in three places only
    except RuntimeError:
        pytest.skip("17 GB of address space are not to be had here")
    x = storage.as_strided((steps, 1, 2), (gap, 2, 1))
    x.copy_(torch.randn(steps, 1, 2))
    rec = Recurrence("rnn")
    weights = [w.float() for w in make_weights(rec, 2, 5, [])]
    h = torch.zeros(1, 5)
    y, _ = scan(rec, x, (h,), weights, engine="cpu")
    assert_close(y, plain.scan(rec, x.contiguous(), (h,), weights)[0])
