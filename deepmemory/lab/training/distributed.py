"""Data-parallel training: processes that share every batch, their communication, and detection of lost ones."""

from __future__ import annotations

import atexit
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
DEFAULT_TIMEOUT = 1800.0  # the first process evaluates alone, which may take long
STARTING = 120.0  # seconds that the processes have at least to find one another
ROLL_CALL = 2.0  # seconds; processes that waited for the same one time out at the same moment


class ProcessLost(ConnectionError):
    """One of the processes that share every batch does not respond."""


def seconds_to_wait() -> float:
    """How many seconds a process waits for the others before it gives up."""
    given = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:
        raise ValueError(f"${TIMEOUT} should be a number of seconds from 0 to a million, got {given!r}")
    return seconds


def strategy() -> DDPStrategy:
    """How Fabric starts the processes; starting may take longer than the timeout set for training."""
    return DDPStrategy(timeout=timedelta(seconds=max(STARTING, seconds_to_wait())))


def is_first_process() -> bool:
    """Whether this process records and prints: the first of those that share every batch, or the only one."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def leave() -> None:
    """Close the connections to the other processes: threads that still wait on them can abort a process that ends."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(fabric: Fabric) -> None:
    """Start the other processes, or join those that are running, and learn their names."""
    try:
        fabric.launch()
        atexit.register(leave)
        process_names(fabric)
    except RuntimeError as error:
        raise ProcessLost(
            f"not all of the {fabric.world_size} processes that share every batch have started: "
            f"{str(error).splitlines()[0]} Start the same command on every machine, or change --devices and --nodes"
        ) from error
    _set_pg_timeout(timedelta(seconds=seconds_to_wait()))


@lru_cache(maxsize=1)
def process_names(fabric: Fabric) -> list[str]:
    """The process id and machine of each process, by rank."""
    store = PrefixStore("name", _get_default_store())
    store.set(str(fabric.global_rank), f"process {os.getpid()} on {platform.node()}")
    return [store.get(str(rank)).decode() for rank in range(fabric.world_size)]


def broadcast(fabric: Fabric, value: Any) -> Any:
    """Send a value from the first process to all of them."""
    with naming_lost_processes(fabric):
        return fabric.broadcast(value)


def sum_over_all(fabric: Fabric, tensor: Tensor) -> None:
    """Replace a tensor by its sum over all processes."""
    with naming_lost_processes(fabric):
        torch.distributed.all_reduce(tensor)


@contextmanager
def naming_lost_processes(fabric: Fabric) -> Iterator[None]:
    """Run communication between all processes inside this context; an error names those that do not respond."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        names = [f"rank {rank} ({process_names(fabric)[rank]})" for rank in missing_ranks(fabric)]
        if names:
            waited = f"${TIMEOUT}: {seconds_to_wait():g} s."
            lost = f"{', '.join(names)} did not respond: frozen, dead or disconnected. ({waited})"
        else:
            lost = f"the processes lost their connection: {str(error).splitlines()[0]}."
        raise ProcessLost(
            f"{lost} Every finished epoch is saved; end the other processes and run the same command to resume"
        ) from error


def missing_ranks(fabric: Fabric) -> list[int]:
    """Ranks that do not answer a roll call; rank 0, whose process holds the store, if the store does not respond."""
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

    caller = threading.Thread(target=call, daemon=True)  # left running if a frozen store never responds
    caller.start()
    caller.join(ROLL_CALL * (fabric.world_size + 1))
    if len(answers) < fabric.world_size:
        return [0]
    return [rank for rank, came in enumerate(answers) if not came]
