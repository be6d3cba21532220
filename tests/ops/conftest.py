"""What tests of the engines share."""

import pytest
import torch
from fused_engines import on_engines
from layers import LAYERS
from ops.emulation import emulator, use_layout  # noqa: F401  (fixtures)

from deepmemory.ops.engines import FUSED


@pytest.fixture(params=on_engines(FUSED))
def engine(request: pytest.FixtureRequest) -> str:
    """Every fused engine."""
    return request.param


@pytest.fixture(params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    """Every layer."""
    return request.param


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on the GPU means float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
