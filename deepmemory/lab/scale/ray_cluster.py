"""Carries studies to many machines with Ray.

A study is cut into groups of runs. Each group is one Ray task that trains and, after every epoch, hands what it
measured and its checkpoint to the driver, which records both as :mod:`deepmemory.lab.training.studies` does: one store,
one display. A run depends on its seed alone, so the numbers are those of one machine. A group whose worker or node dies
goes on elsewhere from its last checkpoint; one that gets nowhere in several attempts is given up, the rest finishes.

Read :func:`run_on_ray` first.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepmemory.lab.records import Records, Run, checkpoint_bytes, load_checkpoint, provenance, write_whole
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training import loop
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.studies import (
    RUNS_PER_THREAD,
    SavingTimes,
    Tracker,
    finish_recorded,
    is_done,
    recorded_runs,
    usable_checkpoints,
)

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
try:
    import ray
except ModuleNotFoundError:
    raise ModuleNotFoundError("--on ray needs Ray: pip install 'deepmemory[ray]'") from None

ATTEMPTS = 3  # in a row without a new checkpoint, before a group is given up
LOOPBACK = "127.0.0.1"
PATIENCE = 10.0  # seconds without news before the driver looks whether anybody can do what is left


@dataclass(frozen=True)
class Share:
    """What one group asks of the cluster."""

    runs: int = 0  # at most so many in one group; 0: all of a study on a GPU, 16 on CPUs
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0 <= amount < math.inf:
                raise ValueError(f"--{name} should be a number from 0 on, got {amount}")


@dataclass(frozen=True)
class Begun:
    """A worker has made the network."""

    series: tuple[str, ...]
    machine: dict[str, str | None]  # its provenance
    worker: str  # process, host and Ray's name for the node
    epoch: int  # finished ones


@dataclass(frozen=True)
class Trained:
    """An epoch, and how to go on after it."""

    epoch: Epoch
    states: dict[int, str]
    best_epochs: dict[int, int | None]
    training: int
    checkpoint: bytes | None  # None where writing so large a one every time would cost too much


@dataclass(frozen=True)
class Ended:
    """How the runs of a group ended."""

    states: dict[int, str]
    tests: dict[int, dict[str, float] | None]


News = Begun | Trained | Ended


@dataclass(eq=False)
class Job:
    """One group of runs, as the driver sees it."""

    setting: Setting
    seeds: list[int]
    path: Path  # of its checkpoint
    resume: bool  # whether the checkpoint is there
    attempts: int = 0  # since the last new checkpoint
    training: int = 0
    epoch: int = 0
    saved: int = 0  # epoch of the checkpoint
    study: int = 0  # in the records, once it has begun
    worker: str = "a worker"  # that has it, or had it last
    ended: bool = False
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        seeds = f"seeds {min(self.seeds)} to {max(self.seeds)}" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"{self.setting.task} {self.setting.cell}, {seeds}"


def run_on_ray(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    out: Path | str,
    machine: Machine,
    display: Display,
    track: Tracker | None = None,
    address: str | None = None,
    share: Share = Share(),  # noqa: B008 (frozen)
) -> list[str]:
    """As :func:`deepmemory.lab.training.studies.run_studies`, on the Ray cluster ``address``, or one started here.

    Returns a line for each group that was given up.
    """
    own = not ray.is_initialized()
    if own:
        connect(address, display.say)
    records = Records(out, write=True)
    jobs: list[Job] = []
    try:
        display.plan(settings, seeds)
        with ExitStack() as held:
            for setting in settings:
                held.enter_context(records.lock(setting, display.say))
                known = {run.seed: run for run in recorded_runs(records, setting)}
                display.begin(setting, list(known.values()))
                size = share.runs or fitting_runs(share, len(seeds))
                jobs += cut(records, setting, seeds, known, size, display.say)
                if not any(job.setting is setting for job in jobs):
                    display.end(setting, recorded_runs(records, setting))
            return Driver(records, jobs, machine, share, display, track).drive()
    finally:
        records.close()
        if own:
            ray.shutdown()


def connect(address: str | None, say: Callable[[str], None]) -> None:
    """Join a cluster, or start one of this machine's processors that nobody else can reach."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        dashboard = False if address == "local" else None
        with listening_here_alone() if address == "local" else nullcontext():
            ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"no Ray cluster at {address} ({str(error).splitlines()[0]}); start one with ray start --head, "
            "or leave --address out to use this machine alone"
        ) from None
    if address == "local" and (host := ray.util.get_node_ip_address()) != LOOPBACK:
        say(
            f"WARNING: Ray {ray.__version__} listens on {host} and may run code for whoever can connect to it. "
            "Put a firewall in front of this machine, or train with --on here"
        )


@contextmanager
def listening_here_alone() -> Iterator[None]:
    """Let Ray bind its ports to 127.0.0.1, as it does on macOS; ``ray.init`` has no option for that on Linux."""
    constants = ray._private.ray_constants
    clusters = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def fitting_runs(share: Share, runs: int) -> int:
    """A GPU trains all runs in about the time of one; a few processors take as many as a thread is worth."""
    return runs if share.gpus else max(1, round(share.cpus)) * RUNS_PER_THREAD


def cut(
    records: Records,
    setting: Setting,
    seeds: Sequence[int],
    known: dict[int, Run],
    size: int,
    say: Callable[[str], None],
) -> list[Job]:
    """Groups that were begun go on as they are; the seeds nobody has are cut evenly."""
    missing = [seed for seed in seeds if seed not in known or not is_done(known[seed], setting)]
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
    """Hands out groups and records what comes back."""

    def __init__(
        self,
        records: Records,
        jobs: Sequence[Job],
        machine: Machine,
        share: Share,
        display: Display,
        track: Tracker | None,
    ) -> None:
        self.records, self.jobs, self.machine, self.share = records, jobs, machine, share
        self.display, self.track = display, track
        self.warned = False
        self.latest: dict[str, dict[int, dict[str, float]]] = {}  # values of the last epoch, by study and seed
        options: dict[str, Any] = {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            "max_retries": 0,  # Ray would begin again; we go on from the checkpoint
            "num_returns": "streaming",
            "scheduling_strategy": "SPREAD",
            "_generator_backpressure_num_objects": 4,  # a worker does not run far ahead of what is recorded
        }
        self.task: Any = ray.remote(**options)(train_elsewhere)

    def drive(self) -> list[str]:
        """Until every group has ended or was given up."""
        streams: dict[Any, Job] = {self.submit(job): job for job in self.jobs}
        try:
            while streams:
                self.hear(streams)
        finally:
            for stream in streams:  # stopped by hand, or the records cannot be written
                with suppress(ray.exceptions.RayError, TypeError, ValueError):  # some end by themselves meanwhile
                    ray.cancel(stream, force=True)
        return [f"{job}: {job.errors[-1]}" for job in self.jobs if not job.ended]

    def hear(self, streams: dict[Any, Job]) -> None:
        """Take news from whoever has some."""
        ready: list[Any]
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=PATIENCE, fetch_local=False)
        if not ready and not self.warned and not self.somebody_can():
            self.display.say(f"waiting: no node of the cluster has the {self.asked()} that a group asks for")
            self.warned = True
        for stream in ready:
            job = streams[stream]
            try:
                news = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
            except ray.exceptions.RayError as error:
                del streams[stream]
                if self.try_again(job, error):
                    streams[self.submit(job)] = job
            else:
                self.take(job, news)

    def submit(self, job: Job) -> Any:
        """A stream of news from a worker that Ray finds."""
        checkpoint = job.path.read_bytes() if job.resume else None
        study = job.path.parent.name
        return self.task.remote(job.setting, self.machine, job.seeds, checkpoint, study, max(1, round(self.share.cpus)))

    def take(self, job: Job, news: News) -> None:
        """Record; the database first, then the checkpoint."""
        if isinstance(news, Begun):
            job.worker = news.worker
            job.study = self.records.open_study(job.setting, news.series)
            self.records.begin(job.study, job.seeds, news.epoch, self.records.add_session(news.machine))
        elif isinstance(news, Trained):
            epoch = news.epoch
            self.records.write_epoch(
                job.study, epoch.number, epoch.values, news.states, news.best_epochs, epoch.seconds
            )
            job.epoch, job.training = epoch.number, news.training
            if news.checkpoint is not None:
                write_whole(job.path, news.checkpoint)
                job.resume, job.attempts, job.saved = True, 0, epoch.number
            if self.track is not None:
                self.track(job.setting, epoch)
            self.show(job, epoch)
        else:
            self.records.write_end(job.study, news.states, news.tests)
            job.ended, job.training = True, 0
            if all(other.ended for other in self.jobs if other.setting is job.setting):
                self.display.end(job.setting, recorded_runs(self.records, job.setting))

    def show(self, job: Job, epoch: Epoch) -> None:
        """One study on the display, whatever it was cut into: its slowest group, all of its runs."""
        group = [other for other in self.jobs if other.setting is job.setting and not other.ended]
        values = self.latest.setdefault(job.setting.key, {})
        values |= epoch.values
        whole = Epoch(min(other.epoch for other in group) or epoch.number, dict(values), epoch.seconds)
        self.display.epoch(job.setting, whole, sum(other.training for other in group))

    def try_again(self, job: Job, error: Exception) -> bool:
        """Whether a group that failed gets another attempt."""
        job.attempts += 1
        job.errors.append(reason(error))
        again = job.attempts < ATTEMPTS
        where = f"goes on from epoch {job.saved}" if job.resume else "starts again"
        self.display.say(f"{job}: {job.errors[-1]} ({job.worker}); {where if again else 'given up'}")
        return again

    def somebody_can(self) -> bool:
        """Whether a node of the cluster is large enough for a group."""
        needs = {"CPU": self.share.cpus, "GPU": self.share.gpus}
        return any(
            node["Alive"] and all(node["Resources"].get(kind, 0) >= amount for kind, amount in needs.items())
            for node in ray.nodes()
        )

    def asked(self) -> str:
        """In words."""
        return f"{self.share.cpus:g} CPUs" + (f" and {self.share.gpus:g} GPUs" if self.share.gpus else "")


def reason(error: Exception) -> str:
    """What a person needs to know of Ray's long messages."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause else str(error).strip().splitlines()[-1]
    return {"WorkerCrashedError": "its worker died", "NodeDiedError": "its node died"}.get(
        type(error).__name__, f"it was lost with its worker or node ({type(error).__name__})"
    )


def train_elsewhere(
    setting: Setting, machine: Machine, seeds: list[int], checkpoint: bytes | None, study: str, threads: int
) -> Iterator[News]:
    """Runs on a worker: train a group to its end, and say so epoch by epoch."""
    torch.set_num_threads(machine.threads or threads)
    trainer = loop.make_trainer(setting, machine)
    if checkpoint is None:
        group = loop.fresh_group(trainer, seeds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs.safetensors"
            path.write_bytes(checkpoint)
            group = loop.group_from_checkpoint(trainer, *load_checkpoint(path))
    worker = f"process {os.getpid()} on {platform.node()}, node {ray.get_runtime_context().get_node_id()}"
    yield Begun(trainer.series, provenance(str(trainer.fabric.device), machine.engine), worker, group.epoch)
    times = SavingTimes()
    for epoch in loop.train(trainer, group):
        states = dict(zip(group.seeds, group.state, strict=True))
        best_epochs = dict(zip(group.seeds, group.best_epoch, strict=True))
        data = checkpoint_bytes(*loop.checkpoint_of(group), study) if (due := times.due(trainer, group)) else None
        with times.saving() if due else nullcontext():
            yield Trained(epoch, states, best_epochs, len(group.training), data)
    yield Ended(loop.end_states(group), loop.test(trainer, group))
