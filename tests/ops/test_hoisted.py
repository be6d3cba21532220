"""What the GPU engines compute before and after a sweep."""

import pytest
import torch

from deepmemory.ops import hoisted


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
