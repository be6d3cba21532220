"""Seeds, threads and signals for every test."""

import os
import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("deepmemory", max_examples=15, deadline=None, derandomize=True, print_blob=False)
settings.load_profile("deepmemory")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a script with &; children would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["plain", "auto"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param
