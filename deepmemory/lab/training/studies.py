"""Carries out studies: finds what is already there, trains the rest, records every epoch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmemory.lab.records import (
    DIVERGED,
    REACHED,
    RUNNING,
    SPENT,
    Records,
    Run,
    load_checkpoint,
    measures_in,
    save_checkpoint,
)
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training import distributed, loop
from deepmemory.lab.training.loop import Epoch, Group, Trainer
from deepmemory.lab.training.progress import Display

RUNS_PER_THREAD = 16
SMALL_NETWORK = 10_000  # weights
SAVING_SHARE = 10  # a checkpoint is written when this many times as long has passed as writing takes

WATCHED = 10  # times in a study, and before and after its first epoch

Tracker = Callable[[Setting, Epoch], None]
Watch = Callable[[Trainer, Group], dict[str, list[float]]]  # numbers by name for each run of the stack


class Callbacks(NamedTuple):
    """What is called while a study trains."""

    display: Display
    track: Tracker | None = None
    watch: Watch | None = None
    sharers: Callable[[], int] = lambda: 1  # studies on the device at the moment, this one among them


def write_watch(
    records: Records, study: int, epoch: int, group: Group, trained: Container[int], values: dict[str, list[float]]
) -> None:
    """Record what was seen of the runs, by seed, that trained in this epoch; others may still be in the stack."""
    places = [place for place, row in enumerate(group.rows) if group.seeds[row] in trained]
    seeds = [group.seeds[group.rows[place]] for place in places]
    records.write_watch(study, epoch, seeds, {name: [of[place] for place in places] for name, of in values.items()})


def watched(epoch: int, epochs: int) -> bool:
    """Whether to look closer after this epoch."""
    return epoch == 1 or epoch % max(1, epochs // WATCHED) == 0


def run_studies(
    settings: Iterable[Setting],
    seeds: Sequence[int],
    out: Path | str,
    machine: Machine,
    display: Display,
    track: Tracker | None = None,
    watch: Watch | None = None,
    sharers: Callable[[], int] = lambda: 1,
) -> None:
    """Train every setting with every seed, unless the records have it already; safe to kill and to repeat.

    Where several processes share every batch, the first one keeps the records and tells the others what to train.
    ``sharers`` says how many studies share the device at the moment: each counts as its own that part of the time.
    """
    settings = list(settings)
    start_processes(settings, machine)
    if not distributed.is_first_process():
        return follow(settings, machine)
    records = Records(out, write=True)
    threads = torch.get_num_threads()
    try:
        display.plan(settings, seeds)
        for setting in settings:
            with records.lock(setting, display.say):
                run_study(records, setting, seeds, machine, Callbacks(display, track, watch, sharers))
    finally:
        torch.set_num_threads(threads)
        records.close()


def run_study(
    records: Records,
    setting: Setting,
    seeds: Sequence[int],
    machine: Machine,
    callbacks: Callbacks,
) -> None:
    """One setting: first the groups of runs that were begun, then the seeds nobody has."""
    trainer = loop.make_trainer(setting, machine)
    study = records.open_study(setting, trainer.series)
    known = {run.seed: run for run in recorded_runs(records, setting)}
    callbacks.display.begin(setting, list(known.values()))
    missing = [seed for seed in seeds if seed not in known or not is_done(known[seed], setting)]
    if missing:
        session = records.open_session(str(trainer.fabric.device), machine.engine)
        for path, tensors, info in usable_checkpoints(records, setting, known, missing):
            group = loop.group_from_checkpoint(trainer, tensors, info, path)
            missing = [seed for seed in missing if seed not in group.seeds]
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(records, study, session, trainer, group, path, callbacks)
        missing = finish_recorded(records, setting, missing, callbacks.display.say)
        if missing:
            lost = [seed for seed in missing if seed in known]
            if lost:
                callbacks.display.say(
                    f"{setting.task} {setting.cell}: no checkpoint for seeds {lost}; they start again"
                )
            group = loop.fresh_group(trainer, missing)
            path = records.checkpoint_folder(setting) / f"runs-{min(missing)}.safetensors"
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(records, study, session, trainer, group, path, callbacks)
    share(trainer, None)
    callbacks.display.end(setting, recorded_runs(records, setting))


def start_processes(settings: Sequence[Setting], machine: Machine) -> None:
    """Start the processes that share every batch, or join those that are there; nothing to do where there is one."""
    if machine.devices * machine.nodes > 1:
        loop.open_fabric(machine.device, settings[0].precision, machine.devices, machine.nodes)


def follow(settings: Sequence[Setting], machine: Machine) -> None:
    """Train what the first process trains, and leave recording to it."""
    for setting in settings:
        trainer = loop.make_trainer(setting, machine)
        while (told := distributed.broadcast(trainer.fabric, None)) is not None:
            for _ in loop.train(trainer, loop.group_from_checkpoint(trainer, *told)):
                pass


def share(trainer: Trainer, group: Group | None) -> None:
    """Tell the other processes, where there are any, what is trained next; None ends a study."""
    if trainer.fabric.world_size > 1:
        told = None
        if group is not None:
            tensors, info = loop.checkpoint_of(group)
            told = ({name: tensor.detach().cpu() for name, tensor in tensors.items()}, info)
        distributed.broadcast(trainer.fabric, told)


def fitting_threads(group: Group) -> int:
    """A few small networks are slower on many threads, far slower where other programs run too."""
    cores = os.cpu_count() or 1
    if sum(weight[0].numel() for weight in group.weights.values()) > SMALL_NETWORK:
        return max(1, cores // 2)
    return max(1, min(cores, len(group.seeds) // RUNS_PER_THREAD))


def recorded_runs(records: Records, setting: Setting) -> list[Run]:
    """The runs of a setting that the records know."""
    study = records.study(setting.key)
    return list(study.runs) if study else []


def is_done(run: Run, setting: Setting) -> bool:
    """Nothing left to train or to test."""
    if run.state == RUNNING or (run.state == SPENT and run.epochs < setting.epochs):
        return False
    return run.test is not None or run.best_epoch is None


def finish_recorded(records: Records, setting: Setting, seeds: Sequence[int], say: Callable[[str], None]) -> list[int]:
    """End runs that have lost their weights after their last epoch, where every epoch is tested; returns the others."""
    study = records.study(setting.key)
    if study is None or "test_loss" not in study.series:
        return list(seeds)
    states, tests = dict[int, str](), dict[int, dict[str, float]]()
    for run in study.runs:
        ended = run.state in (REACHED, DIVERGED) or run.epochs >= setting.epochs
        if run.seed in seeds and ended and run.best_epoch and run.best_epoch <= run.epochs:
            states[run.seed] = SPENT if run.state == RUNNING else run.state
            best = run.at_epoch(run.best_epoch)
            tests[run.seed] = {name: best[f"test_{name}"] for name in measures_in(study.series)}
    if tests:
        records.write_end(records.open_study(setting, study.series), states, tests)
        say(f"{setting.task} {setting.cell}: no checkpoint for seeds {sorted(tests)}; finished from the records")
    return [seed for seed in seeds if seed not in tests]


def usable_checkpoints(
    records: Records, setting: Setting, known: dict[int, Run], missing: Sequence[int]
) -> Iterator[tuple[Path, dict[str, Tensor], dict[str, Any]]]:
    """Checkpoints of groups with a missing seed, whose epochs are all recorded."""
    for path in sorted(records.checkpoint_folder(setting).glob("*.safetensors")):
        tensors, info = load_checkpoint(path)
        told = [known[seed].epochs if seed in known else -1 for seed in info["seeds"]]
        recorded = all(
            epochs >= (info["epoch"] if state == RUNNING else 1)
            for epochs, state in zip(told, info["state"], strict=True)
        )
        if recorded and set(info["seeds"]) & set(missing):
            yield path, tensors, info


class SavingTimes:
    """Large checkpoints are left out until they are a small part of the time; what is lost is computed again."""

    def __init__(self) -> None:
        self.saved, self.took = -math.inf, 0.0

    def due(self, trainer: Trainer, group: Group) -> bool:
        """Whether this epoch's checkpoint is worth its time; the last one always is."""
        ended = group.epoch == trainer.setting.epochs or not group.training
        return ended or time.monotonic() - self.saved >= SAVING_SHARE * self.took

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around what takes time."""
        started = time.monotonic()
        yield
        self.saved = time.monotonic()
        self.took = self.saved - started


def train_group(
    records: Records,
    study: int,
    session: int,
    trainer: Trainer,
    group: Group,
    path: Path,
    callbacks: Callbacks,
) -> None:
    """Train one group to its end; after every epoch the database first, then the checkpoint."""
    share(trainer, group)
    records.begin(study, group.seeds, group.epoch, session)
    if callbacks.watch is not None and group.epoch == 0:
        write_watch(records, study, 0, group, group.seeds, callbacks.watch(trainer, group))
    times = SavingTimes()
    for epoch in loop.train(trainer, group):
        states = dict(zip(group.seeds, group.state, strict=True))
        best_epochs = dict(zip(group.seeds, group.best_epoch, strict=True))
        seconds = epoch.seconds / callbacks.sharers()
        records.write_epoch(study, epoch.number, epoch.values, states, best_epochs, seconds)
        if callbacks.watch is not None and watched(epoch.number, trainer.setting.epochs):
            write_watch(records, study, epoch.number, group, epoch.values, callbacks.watch(trainer, group))
        if times.due(trainer, group):
            with times.saving():
                save_checkpoint(path, *loop.checkpoint_of(group))
        if callbacks.track is not None:
            callbacks.track(trainer.setting, epoch)
        callbacks.display.epoch(trainer.setting, epoch, len(group.training))
    records.write_end(study, loop.end_states(group), loop.test(trainer, group))
