"""Processes that share every batch: starting them, what they tell one another, and who of them is gone."""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

TIMEOUT = "DEEPMEMORY_TIMEOUT"  # environment variable: seconds that a process waits for the others
DEFAULT_TIMEOUT = 1800.0  # the first process measures alone, which may take long
STARTING = 120.0  # seconds that the processes have at least to find one another
ROLL_CALL = 2.0  # seconds; whoever waited with us has the same reason to come at this moment


class ProcessLost(ConnectionError):
    """One of several processes does not answer."""


def seconds_to_wait() -> float:
    """How long a process waits for the others before it gives up."""
    given = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:
        raise ValueError(f"${TIMEOUT} should be a number of seconds from 0 to a million, got {given!r}")
    return seconds


def strategy() -> DDPStrategy:
    """How Fabric starts the processes; they may take a while, whatever the patience afterwards."""
    return DDPStrategy(timeout=timedelta(seconds=max(STARTING, seconds_to_wait())))


def launch(fabric: Fabric) -> None:
    """Start the other processes, or find them started, and learn their names."""
    try:
        fabric.launch()
        everybody(fabric)
    except RuntimeError as error:
        raise ProcessLost(
            f"not all of the {fabric.world_size} processes that share every batch have started: "
            f"{str(error).splitlines()[0]} Start the same command on every machine, or change --devices and --nodes"
        ) from error
    _set_pg_timeout(timedelta(seconds=seconds_to_wait()))


@lru_cache(maxsize=1)
def everybody(fabric: Fabric) -> list[str]:
    """Each process, by rank, as a person finds it."""
    store = PrefixStore("name", _get_default_store())
    store.set(str(fabric.global_rank), f"process {os.getpid()} on {platform.node()}")
    return [store.get(str(rank)).decode() for rank in range(fabric.world_size)]


def broadcast(fabric: Fabric, value: Any) -> Any:
    """What the first process has, for all of them."""
    with exchanging(fabric):
        return fabric.broadcast(value)


def sum_over_all(fabric: Fabric, tensor: Tensor) -> None:
    """Put the sum over all processes in the place of what each one has."""
    with exchanging(fabric):
        torch.distributed.all_reduce(tensor)


@contextmanager
def exchanging(fabric: Fabric) -> Iterator[None]:
    """Around whatever needs all processes: an error names those that are gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        names = [f"rank {rank} ({everybody(fabric)[rank]})" for rank in missing(fabric)]
        if names:
            lost = f"{', '.join(names)} did not answer: frozen, dead or cut off. (${TIMEOUT}: {seconds_to_wait():g} s.)"
        else:
            lost = f"the processes lost touch: {str(error).splitlines()[0]}."
        raise ProcessLost(
            f"{lost} Every finished epoch is saved; end what is left of these processes, and the same command goes on"
        ) from error


def missing(fabric: Fabric) -> list[int]:
    """Ranks that do not come to a roll call; the first one, whose process holds it, if it cannot be held."""
    store, answers = PrefixStore("here", _get_default_store()), list[bool]()

    def call() -> None:
        with suppress(DistNetworkError):
            store.set(str(fabric.global_rank), "")
            for rank in range(fabric.world_size):
                try:
                    store.wait([str(rank)], timedelta(seconds=ROLL_CALL))
                    answers.append(True)
                except DistStoreError:
                    answers.append(False)

    caller = threading.Thread(target=call, daemon=True)  # left behind where a frozen store never answers
    caller.start()
    caller.join(ROLL_CALL * (fabric.world_size + 1))
    if len(answers) < fabric.world_size:
        return [0]
    return [rank for rank, came in enumerate(answers) if not came]
