"""Seeds, threads, signals and memory for every test."""

import gc
import os
import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("deepmemory", max_examples=15, deadline=None, derandomize=True, print_blob=False)
settings.load_profile("deepmemory")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "missing(what, why): this test needs what is not here; why is None where it is")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a script with &; children would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of hundreds of tests that need what is missing, one is skipped for all to see; the others are left out."""
    skipped: dict[str, pytest.Item] = {}
    left_out = []
    for item in items:
        missing = [mark.args for mark in item.iter_markers("missing") if mark.args[1] is not None]
        if not missing:
            continue
        what, why = missing[0]
        if what in skipped:
            left_out.append(item)
        else:
            skipped[what] = item
            item.add_marker(pytest.mark.skip(reason=f"{what}: {why}; so for all tests that need it"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What is imported and cached by now stays. Torch's tracing collects garbage often, and would look through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for modules that complain about what is left when Python ends


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["plain", "auto"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param
