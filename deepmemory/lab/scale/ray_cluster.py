"""Trains studies on a Ray cluster.

A study is divided into groups of runs. Each group is one Ray task that trains and, after every epoch, sends what it
measured and its checkpoint to the driver, which records both as :mod:`deepmemory.lab.training.studies` does: one
database, one display. A run depends on its seed alone, so the numbers are those of one machine. A group whose worker or
node dies resumes elsewhere from its last checkpoint; one that makes no progress in several attempts is given up, while
the others finish.

Read :func:`run_on_ray` first.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepmemory.lab.records import Records, Run, checkpoint_bytes, load_checkpoint, provenance, write_whole
from deepmemory.lab.settings import Launcher, Machine, Setting
from deepmemory.lab.training import loop
from deepmemory.lab.training.group import checkpoint_of, fresh_group, group_from_checkpoint
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.stacks import is_large
from deepmemory.lab.training.studies import (
    RUNS_PER_THREAD,
    CheckpointSchedule,
    Tracker,
    finish_recorded,
    recorded_runs,
    unfinished,
    usable_checkpoints,
)
from deepmemory.lab.training.trainer import make_trainer

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
try:
    import ray
except ModuleNotFoundError:
    raise ModuleNotFoundError("--on ray needs Ray: pip install 'deepmemory[ray]'") from None

ATTEMPTS = 3  # in a row without a new checkpoint before a group is given up
LOOPBACK = "127.0.0.1"
PATIENCE = 10.0  # seconds without a message before the driver checks whether any node is large enough


@dataclass(frozen=True)
class Started:
    """A worker has built the network and starts to train."""

    series: tuple[str, ...]
    machine: dict[str, str | None]  # its provenance
    worker: str  # process, host and Ray's name for the node
    epoch: int  # the last one finished


@dataclass(frozen=True)
class EpochFinished:
    """A worker has finished an epoch; with what is needed to resume after it."""

    epoch: Epoch
    states: dict[int, str]
    best_epochs: dict[int, int | None]
    training: int
    checkpoint: bytes | None  # None if sending one after every epoch would take too long


@dataclass(frozen=True)
class Finished:
    """A worker has trained and tested the runs of its group."""

    states: dict[int, str]
    tests: dict[int, dict[str, float] | None]


Message = Started | EpochFinished | Finished


@dataclass(eq=False)
class Job:
    """One group of runs and its progress, in the driver."""

    setting: Setting
    seeds: list[int]
    path: Path  # of its checkpoint
    resume: bool  # whether there is a checkpoint
    attempts: int = 0  # since the last new checkpoint
    training: int = 0
    epoch: int = 0
    saved: int = 0  # epoch of the checkpoint
    study: int = 0  # in the records, once it has started
    worker: str = "a worker"  # the last one to train it
    ended: bool = False
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        seeds = f"seeds {min(self.seeds)} to {max(self.seeds)}" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"{self.setting.task} {self.setting.cell}, {seeds}"


def run_on_ray(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    out: Path | str,
    machine: Machine,
    launcher: Launcher,
    display: Display,
    track: Tracker | None = None,
) -> list[str]:
    """Train as :func:`deepmemory.lab.training.studies.run_studies` does, on a Ray cluster.

    The cluster is the one at ``launcher.address``, or one started on this machine. Returns a line for each group that
    was given up.
    """
    if not launcher.gpus and machine.device.startswith("cuda"):
        launcher = replace(launcher, gpus=1.0)
    own = not ray.is_initialized()
    if own:
        connect(launcher.address, display.say)
    records = Records(out, write=True)
    jobs: list[Job] = []
    try:
        display.plan(settings, seeds, parallel=True)
        with ExitStack() as locks:
            for setting in settings:
                locks.enter_context(records.lock(setting, display.say))
                known = {run.seed: run for run in recorded_runs(records, setting)}
                display.begin(setting, list(known.values()))
                jobs += divide(records, setting, seeds, known, group_size(launcher, setting, len(seeds)), display.say)
                if not any(job.setting is setting for job in jobs):
                    display.end(setting, recorded_runs(records, setting))
            driver = Driver(jobs, records=records, machine=machine, launcher=launcher, display=display, track=track)
            return driver.run()
    finally:
        records.close()
        if own:
            ray.shutdown()


def connect(address: str | None, say: Callable[[str], None]) -> None:
    """Connect to a cluster, or start one on this machine that other machines cannot reach."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        dashboard = False if address == "local" else None
        with listening_on_loopback() if address == "local" else nullcontext():
            ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"no Ray cluster at {address} ({str(error).splitlines()[0]}); start one with ray start --head, "
            "or leave --address out to use only this machine"
        ) from None
    if address == "local" and (host := ray.util.get_node_ip_address()) != LOOPBACK:
        say(
            f"WARNING: Ray {ray.__version__} listens on {host} and may run code for anyone who can connect to it. "
            "Put a firewall in front of this machine, or train with --on local"
        )


@contextmanager
def listening_on_loopback() -> Iterator[None]:
    """Let Ray bind its ports to 127.0.0.1, as it does on macOS; ``ray.init`` has no option for that on Linux."""
    constants = ray._private.ray_constants
    clusters = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def group_size(launcher: Launcher, setting: Setting, runs: int) -> int:
    """Runs per group, unless the user has chosen: see :mod:`deepmemory.lab.training.stacks`.

    A GPU trains all runs of a small network in about the time of one; a CPU gets ``RUNS_PER_THREAD`` for each thread.
    """
    most = runs if launcher.gpus else max(1, round(launcher.cpus)) * RUNS_PER_THREAD
    return launcher.group or (1 if is_large(setting) else most)


def divide(
    records: Records,
    setting: Setting,
    seeds: Sequence[int],
    known: dict[int, Run],
    size: int,
    say: Callable[[str], None],
) -> list[Job]:
    """Divide a study into groups: those with a checkpoint resume as they are, new seeds are divided evenly."""
    missing = unfinished(known, setting, seeds)
    folder, jobs = records.checkpoint_folder(setting), []
    for path, _, info in usable_checkpoints(records, setting, known, missing):
        jobs.append(Job(setting, info["seeds"], path, resume=True, epoch=info["epoch"], saved=info["epoch"]))
        missing = [seed for seed in missing if seed not in info["seeds"]]
    missing = finish_recorded(records, setting, missing, say)
    groups = -(-len(missing) // size)
    for group in range(groups):
        part = missing[group * len(missing) // groups : (group + 1) * len(missing) // groups]
        jobs.append(Job(setting, part, folder / f"runs-{min(part)}.safetensors", resume=False))
    return jobs


class Driver:
    """Submits groups to Ray and records what their workers send."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        records: Records,
        machine: Machine,
        launcher: Launcher,
        display: Display,
        track: Tracker | None,
    ) -> None:
        self.jobs, self.records, self.machine, self.launcher = jobs, records, machine, launcher
        self.display, self.track = display, track
        self.warned = False
        self.latest: dict[str, dict[int, dict[str, float]]] = {}  # values of the last epoch, by study and seed
        options: dict[str, Any] = {
            "num_cpus": launcher.cpus,
            "num_gpus": launcher.gpus,
            "max_retries": 0,  # Ray would start from the beginning; a retry here resumes from the checkpoint
            "num_returns": "streaming",
            "scheduling_strategy": "SPREAD",
            "_generator_backpressure_num_objects": 4,  # a worker does not run far ahead of what is recorded
        }
        self.task: Any = ray.remote(**options)(train_group)

    def run(self) -> list[str]:
        """Train until every group has finished or was given up; returns a line for each given up."""
        streams: dict[Any, Job] = {self.submit(job): job for job in self.jobs}
        try:
            while streams:
                self.receive(streams)
        finally:
            for stream in streams:  # after Ctrl-C, or if the records cannot be written
                with suppress(ray.exceptions.RayError, TypeError, ValueError):  # some end by themselves meanwhile
                    ray.cancel(stream, force=True)
        return [f"{job}: {job.errors[-1]}" for job in self.jobs if not job.ended]

    def receive(self, streams: dict[Any, Job]) -> None:
        """Wait for messages and record them; a group that failed is submitted again."""
        ready: list[Any]
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=PATIENCE, fetch_local=False)
        if not ready and not self.warned and not self.is_feasible():
            self.display.say(f"waiting: no node of the cluster has the {self.resources} that a group needs")
            self.warned = True
        for stream in ready:
            job = streams[stream]
            try:
                message = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
            except ray.exceptions.RayError as error:
                del streams[stream]
                if self.should_retry(job, error):
                    streams[self.submit(job)] = job
            else:
                self.record(job, message)

    def submit(self, job: Job) -> Any:
        """Submit a group to Ray; returns the stream of its messages."""
        checkpoint = job.path.read_bytes() if job.resume else None
        study, threads = job.path.parent.name, max(1, round(self.launcher.cpus))
        return self.task.remote(job.setting, self.machine, job.seeds, checkpoint, study, threads)

    def record(self, job: Job, message: Message) -> None:
        """Record a message; the database first, then the checkpoint."""
        if isinstance(message, Started):
            job.worker = message.worker
            job.study = self.records.open_study(job.setting, message.series)
            self.records.begin(job.study, job.seeds, message.epoch, self.records.add_session(message.machine))
        elif isinstance(message, EpochFinished):
            epoch = message.epoch
            self.records.write_epoch(
                job.study, epoch.number, epoch.values, message.states, message.best_epochs, epoch.seconds
            )
            job.epoch, job.training = epoch.number, message.training
            if message.checkpoint is not None:
                write_whole(job.path, message.checkpoint)
                job.resume, job.attempts, job.saved = True, 0, epoch.number
            if self.track is not None:
                self.track(job.setting, epoch)
            self.show(job, epoch)
        else:
            self.records.write_end(job.study, message.states, message.tests)
            job.ended, job.training = True, 0
            if all(other.ended for other in self.jobs if other.setting is job.setting):
                self.display.end(job.setting, recorded_runs(self.records, job.setting))

    def show(self, job: Job, epoch: Epoch) -> None:
        """Show the groups of a study that train as one: the epoch of the slowest, the values of all their runs."""
        group = [other for other in self.jobs if other.setting is job.setting and not other.ended]
        values = self.latest.setdefault(job.setting.key, {})
        values |= epoch.values
        training = {seed: values[seed] for other in group for seed in other.seeds if seed in values}
        slowest = min(other.epoch for other in group if other.epoch)
        whole = Epoch(slowest, training, epoch.seconds)
        self.display.epoch(job.setting, whole, sum(other.training for other in group))

    def should_retry(self, job: Job, error: Exception) -> bool:
        """Report a failed group, and return whether it gets another attempt."""
        job.attempts += 1
        job.errors.append(reason(error))
        retry = job.attempts < ATTEMPTS
        where = f"resumes from epoch {job.saved}" if job.resume else "starts again"
        self.display.say(f"{job}: {job.errors[-1]} ({job.worker}); {where if retry else 'given up'}")
        return retry

    def is_feasible(self) -> bool:
        """Whether a node of the cluster is large enough for a group."""
        needs = {"CPU": self.launcher.cpus, "GPU": self.launcher.gpus}
        return any(
            node["Alive"] and all(node["Resources"].get(kind, 0) >= amount for kind, amount in needs.items())
            for node in ray.nodes()
        )

    @property
    def resources(self) -> str:
        """What a group needs, for a message."""
        gpus = f" and {self.launcher.gpus:g} GPUs" if self.launcher.gpus else ""
        return f"{self.launcher.cpus:g} CPUs{gpus}"


def reason(error: Exception) -> str:
    """The cause of a failure in one line; Ray's own messages are long."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause else str(error).strip().splitlines()[-1]
    return {"WorkerCrashedError": "its worker died", "NodeDiedError": "its node died"}.get(
        type(error).__name__, f"it was lost with its worker or node ({type(error).__name__})"
    )


def train_group(
    setting: Setting, machine: Machine, seeds: list[int], checkpoint: bytes | None, study: str, threads: int
) -> Iterator[Message]:
    """Train a group to its end; runs on a worker and sends a message after every epoch."""
    torch.set_num_threads(machine.threads or threads)
    trainer = make_trainer(setting, machine)
    if checkpoint is None:
        group = fresh_group(trainer, seeds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs.safetensors"
            path.write_bytes(checkpoint)
            group = group_from_checkpoint(trainer, *load_checkpoint(path))
    worker = f"process {os.getpid()} on {platform.node()}, node {ray.get_runtime_context().get_node_id()}"
    yield Started(trainer.series, provenance(str(trainer.fabric.device), machine.engine), worker, group.epoch)
    schedule = CheckpointSchedule()
    for epoch in loop.train(trainer, group):
        states = dict(zip(group.seeds, group.state, strict=True))
        best_epochs = dict(zip(group.seeds, group.best_epoch, strict=True))
        data = checkpoint_bytes(*checkpoint_of(group), study) if (due := schedule.due(trainer, group)) else None
        with schedule.saving() if due else nullcontext():
            yield EpochFinished(epoch, states, best_epochs, len(group.training), data)
    yield Finished(group.end_states, loop.test(trainer, group))
