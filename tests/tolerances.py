"""How close two results must be: one table, for every test."""

import torch
from torch import Tensor

#                    relative, absolute
TOLERANCES = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}
TF32 = (3e-3, 3e-3)  # float32 whose products have 11 bits; absolute: times the largest entry
EXACT_FLOAT32 = (2e-5, 2e-6)  # for short sequences in plain float32 arithmetic; absolute: times the largest entry


def assert_close(actual, expected, dtype: torch.dtype | None = None, what: str = "") -> None:
    """Compare tensors, or lists, tuples and dicts of them, by the table's row for ``dtype`` (default: their own)."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_close(actual[key], expected[key], dtype, f"{what}[{key}]")
    elif isinstance(expected, Tensor):
        rtol, atol = TOLERANCES[dtype or expected.dtype]
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, check_dtype=dtype is None, msg=lambda text: f"{what} {text}"
        )
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, dtype, f"{what}[{index}]")
    else:
        assert actual is expected is None, (what, actual, expected)
