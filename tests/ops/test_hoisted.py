"""What the GPU engines compute before and after a sweep."""

import pytest
import torch

from deepmemory.ops import hoisted


@pytest.mark.parametrize(("runs", "rows", "n", "k"), [(1, 4096, 30, 20), (3, 32 * 513, 70, 5), (2, 1001, 7, 9)])
def test_a_product_in_pieces_is_the_product(runs, rows, n, k, monkeypatch):
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(runs, rows + 8, n + 3, generator=generator)
    left, right = wide[:, 8:, :n], torch.randn(runs, rows, k, generator=generator)  # strided, as deltas are
    cut = []
    monkeypatch.setattr(torch, "stack", lambda sums, stack=torch.stack: cut.append(len(sums)) or stack(sums))
    found = hoisted.product(left, right)
    assert bool(cut) == (rows != 1001)  # few rows stay whole
    expected = left.double().mT @ right.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
