"""What the GPU engines compute before and after a sweep."""

import pytest
import torch

from deepmemory.ops import hoisted
from deepmemory.ops.layout import delta_features, trace_features
from deepmemory.ops.recurrence import Recurrence, Sequences


@pytest.mark.parametrize(
    ("runs", "rows", "gap", "batches"),
    [
        pytest.param(1, 4096, 0, [16], id="one run"),
        pytest.param(3, 32 * 513, 0, [96], id="runs that follow one another"),
        pytest.param(3, 32 * 513, 8, [32, 32, 32], id="runs with gaps between them"),
        pytest.param(17, 4096, 8, [17], id="more runs than pieces"),
        pytest.param(2, 1001, 0, [2], id="few rows"),
    ],
)
def test_a_product_in_pieces_is_the_product(runs, rows, gap, batches, monkeypatch):
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(runs, rows + gap, 33, generator=generator)
    left, right = wide[:, gap:, :30], torch.randn(runs, rows, 20, generator=generator)  # strided, as deltas are
    taken = []

    def bmm(a, b, bmm=torch.bmm):
        taken.append(len(a))
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", bmm)
    found = hoisted.product(left, right)
    assert taken == batches
    expected = left.double().mT @ right.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("rec", "shapes", "batches"),
    [
        (Recurrence("dmu", "tanh"), [(9, 7)] + [(9, 9)] * 3 + [(14, 9)], [3]),
        (
            Recurrence("dmu", "tanh", residual=True),
            [(8, 6)] + [(8, 8)] * 2 + [(5, 8)] + [(5, 5)] * 2 + [(12, 5)],
            [2, 2],
        ),
        (Recurrence("rhn"), [(12, 6)] * 5, [4]),
    ],
    ids=["dmu", "two widths", "rhn"],
)
def test_layers_of_one_shape_have_one_product(rec, shapes, batches, masked, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows, d = shapes[0]
    weights = [torch.empty(rows, 3), torch.empty(rows, d), torch.empty(rows)]
    weights += [tensor for out, into in shapes[1:] for tensor in (torch.empty(out, into), torch.empty(out))]

    def record(features):
        return torch.randn(512, 2, features, generator=generator, dtype=torch.float64)

    sequences = Sequences(state_mask=torch.rand(2, d, generator=generator).gt(0.5).double() if masked else None)
    records = record(d), record(trace_features(rec, weights)), record(delta_features(rec, weights))
    case = rec, record(3), record(d)[0], weights, sequences, *records, [True] * len(weights)
    taken = []

    def together(left, right, dtype, products=hoisted.products_of_equals):
        taken.append(left.shape[1])
        return products(left, right, dtype)

    monkeypatch.setattr(hoisted, "products_of_equals", together)
    found = hoisted.weight_gradients(*case)
    assert taken == batches
    monkeypatch.setattr(hoisted, "_equals", lambda parts: ())
    for given, expected in zip(found, hoisted.weight_gradients(*case), strict=True):
        torch.testing.assert_close(given, expected)


def test_gradients_of_float32_biases_are_not_rounded():
    generator = torch.Generator().manual_seed(0)
    rec, weights = Recurrence("dmu", "tanh"), [torch.empty(9, 3), torch.empty(9, 7), torch.empty(9)]
    weights += [torch.empty(14, 9), torch.empty(14)]

    def record(features):
        return torch.randn(64, 2, features, generator=generator).bfloat16()

    deltas = record(delta_features(rec, weights))
    records = record(7), record(trace_features(rec, weights)), deltas
    found = hoisted.weight_gradients(rec, record(3), record(7)[0], weights, Sequences(), *records, [True] * 5)
    exact = deltas.double().sum((0, 1))
    torch.testing.assert_close(torch.cat([found[2], found[4]]).double(), exact, rtol=1e-5, atol=1e-5)


def test_products_of_equals_round_once_in_half_precision():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16384, 2, 64, generator=generator).bfloat16() for _ in range(2))
    expected = torch.einsum("iln,ilk->lnk", left.double(), right.double())
    error = (hoisted.products_of_equals(left, right).double() - expected).norm() / expected.norm()
    assert error < 0.003


@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", hoisted.HALF, ids=str)
def test_sums_of_half_precision_are_not_rounded_on_a_gpu(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    rec, shapes = Recurrence("dmu", "tanh"), [(9, 3), (9, 7), (9,), *[(9, 9), (9,)] * 2, (14, 9), (14,)]
    weights = [torch.empty(shape, device="cuda") for shape in shapes]

    def record(features):
        return torch.randn(512, 8, features, generator=generator, device="cuda").to(dtype)

    records = record(7), record(trace_features(rec, weights)), record(delta_features(rec, weights))
    case = record(3), record(7)[0], weights, Sequences(), *records
    exact = [[w.double() for w in one] if one is weights else one.double() for one in case if one is not case[3]]
    expected = hoisted.weight_gradients(rec, *exact[:3], Sequences(), *exact[3:], [True] * len(weights))
    for a, b in zip(hoisted.weight_gradients(rec, *case, [True] * len(weights)), expected, strict=True):
        assert (a.double() - b).norm() < 1e-5 * b.norm()
