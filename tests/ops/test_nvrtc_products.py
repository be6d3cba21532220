"""Weight gradients of the nvrtc engine: products over all steps, in a launch or two where they are small."""

from unittest import mock

import pytest
import torch
from ops.emulation import DEVICE, NEEDS_GPU_OR_COMPILER, REGISTERS, Emulated, small
from tolerances import EXACT_FLOAT32

from deepmemory.ops import hoisted, nvrtc
from deepmemory.ops.layout import delta_features, trace_features
from deepmemory.ops.nvrtc import products
from deepmemory.ops.recurrence import Recurrence, Sequences

pytestmark = NEEDS_GPU_OR_COMPILER


def products_of(
    rec, weights, needs, use_layout, *, steps=5, batch=3, runs=None, lengths=None, transposed=False, zeros=False
):
    """Weight gradients by the kernel and by torch's products, from made-up records of the sweeps."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def draw(*shape):
        front = () if runs is None else (runs,)
        return torch.randn(*front, *shape, generator=generator, device=DEVICE)

    d = weights[1][-1]
    weights = [draw(*shape) for shape in weights]
    x = (
        draw(batch, steps, weights[0].shape[-1]).transpose(-3, -2)
        if transposed
        else draw(steps, batch, weights[0].shape[-1])
    )
    y, h0 = draw(steps, batch, d), draw(batch, d)
    if zeros:
        h0 = torch._efficientzerotensor(h0.shape, device=DEVICE)
    trace = draw(steps, batch, trace_features(rec, weights))
    deltas = draw(steps, batch, delta_features(rec, weights))
    if lengths is not None:
        lengths = torch.tensor(lengths, device=DEVICE).expand(*x.shape[:-3], batch)
        padding = torch.arange(steps, device=DEVICE)[:, None] >= lengths[..., None, :]
        for record in (y, trace, deltas):
            record[padding] = 0
        x[padding] = float("nan")
    use_layout(small(2, 1, REGISTERS))
    layer = nvrtc._layer(rec, x, weights)
    records = x, h0, weights, Sequences(lengths), y, trace, deltas, tuple(needs)
    given = nvrtc._weight_gradients(rec, layer, *records)
    exact = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in records]
    exact[2] = [w.double() for w in weights]
    expected = hoisted.weight_gradients(rec, *exact)
    assert [g is not None for g in given] == list(needs)
    for a, b in zip(given, expected, strict=True):
        if b is not None:
            rtol, atol = EXACT_FLOAT32
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol * b.abs().max().item())


WEIGHTS = {
    "dmu": [(4, 3), (4, 5), (4,), (10, 4), (10,)],
    "rhn": [(10, 3), (10, 5), (10,), (10, 5), (10,)],
    "rnn": [(5, 3), (5, 5), (5,), (5,)],
    "gru": [(15, 3), (15, 5), (15,), (15,)],
    "lstm": [(20, 3), (20, 5), (20,), (20,)],
}


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("cell", WEIGHTS)
def test_products_know_runs_lengths_and_direction(cell, reverse, use_layout):
    rec = Recurrence(cell, reverse=reverse)
    products_of(rec, WEIGHTS[cell], [True] * len(WEIGHTS[cell]), use_layout, runs=2, lengths=[5, 0, 2])


def tables_of(shapes, rec=None, needs=None):
    """The products of all weights of these shapes, with every tile that they can have."""
    weights, needs = [torch.empty(shape) for shape in shapes], tuple(needs or [True] * len(shapes))
    return products.tables(rec or Recurrence("dmu"), weights, 1, needs)


@pytest.mark.parametrize(("d", "size"), [(3, 8), (7, 16), (13, 32), (67, 64), (67, 32)])
def test_products_are_cut_into_tiles_that_fit_the_layer(d, size, use_layout, monkeypatch):
    weights = [(d + 1, 130), (d + 1, d), (d + 1,), (2 * d, d + 1), (2 * d,)]
    sizes = [table.tile.size for table in tables_of(weights)]
    assert sizes == ([64, 32] if d == 67 else [size])
    monkeypatch.setattr(products, "cut", lambda *_: products.Cut(sizes.index(size), 2))
    products_of(Recurrence("dmu"), weights, [True] * 5, use_layout)


def test_products_of_many_rows_are_cut_into_pieces(use_layout):
    assert products.cut(tables_of(WEIGHTS["dmu"]), 27 * 11, 1, multiprocessors=132).pieces == 3
    products_of(Recurrence("dmu"), WEIGHTS["dmu"], [True] * 5, use_layout, steps=27, batch=11)


def test_products_keep_a_gpu_busy_without_a_second_wave_of_blocks():
    layer = [(122, 64), (122, 122), (122,), (244, 122), (244,)]

    def chosen(rows):
        tables = tables_of(layer)
        number, pieces = products.cut(tables, rows, 1, 132)
        return tables[number].tile.size, tables[number].launches[0].tiles * pieces

    assert chosen(32) == (32, 56)  # few rows: small tiles, and nothing to add up
    assert chosen(3200) == (64, 252)  # that is less than two for each multiprocessor


@pytest.mark.parametrize("needs", [[True] * 5, [False, True, True, False, False]], ids=["all", "bias with the state"])
def test_a_single_step_from_zeros_sees_nothing_of_the_state(needs, use_layout):
    products_of(Recurrence("dmu"), WEIGHTS["dmu"], needs, use_layout, steps=1, zeros=True)


def test_products_nobody_asks_for_are_left_out(use_layout):
    products_of(Recurrence("gru"), WEIGHTS["gru"], [False, True, False, True], use_layout)


def test_products_read_x_where_it_lies(use_layout):
    products_of(Recurrence("dmu"), WEIGHTS["dmu"], [True] * 5, use_layout, transposed=True)


def test_large_products_are_left_to_the_library(use_layout, monkeypatch):
    monkeypatch.setattr(products, "MOST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(Emulated, "sum_products", None)
    for runs in (None, 2):
        products_of(
            Recurrence("gru"), WEIGHTS["gru"], [True, True, False, True], use_layout, runs=runs, lengths=[5, 0, 2]
        )


@pytest.mark.parametrize("share", [0.5, 0.49])
def test_a_very_deep_layer_takes_two_launches(share, use_layout, monkeypatch):
    shapes = [(4, 3), (4, 5), (4,), *[(4, 4), (4,)] * 40, (10, 4), (10,)]
    needs = [True] * len(shapes)
    (table,) = tables_of(shapes)
    assert [launch.terms[0] for launch in table.launches] == [22, 21]
    # A launch for so many multiplications; 5 steps of 3 sequences.
    monkeypatch.setattr(products, "MOST_MULTIPLICATIONS", share * 15 * table.multiplications)
    with mock.patch.object(hoisted, "weight_gradients", wraps=hoisted.weight_gradients) as library:
        products_of(Recurrence("dmu"), shapes, needs, use_layout)
    assert any(call.args[1].dtype is torch.float32 for call in library.call_args_list) == (share < 0.5)


@pytest.mark.parametrize("cell", WEIGHTS)
def test_biases_come_with_a_product_of_the_same_deltas(cell, use_layout):
    shapes, rec = WEIGHTS[cell], Recurrence(cell)
    biases = [len(shape) == 1 for shape in shapes]

    def terms(needs):
        return tables_of(shapes, rec, needs)[0].launches[0].terms[0]

    recurrent = 2 if cell == "gru" else 1  # what its candidate sees of the state is a product of its own
    assert terms((True,) * len(shapes)) == sum(len(shape) == 2 for shape in shapes) + recurrent - 1
    products_of(rec, shapes, biases, use_layout)  # or alone
