"""Runs studies: finds what is already recorded, trains the rest, records every epoch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.records import (
    DIVERGED,
    REACHED,
    RUNNING,
    SPENT,
    Records,
    Run,
    Study,
    load_checkpoint,
    measures_in,
    save_checkpoint,
)
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training import distributed, loop
from deepmemory.lab.training.group import Group, checkpoint_of, fresh_group, group_from_checkpoint
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.stacks import stacks
from deepmemory.lab.training.trainer import Trainer, make_trainer, open_fabric

RUNS_PER_THREAD = 16
SMALL_NETWORK = 10_000  # weights
SAVING_SHARE = 10  # a checkpoint is written once this many times its writing time has passed
WATCHED = 10  # times in a study, besides those before and after its first epoch

Tracker = Callable[[Setting, Epoch], None]
Watch = Callable[[Trainer, Group], dict[str, list[float]]]  # numbers by name for each run of the stack


@dataclass(frozen=True)
class Callbacks:
    """What is called while a study trains."""

    display: Display
    track: Tracker | None = None
    watch: Watch | None = None
    sharers: Callable[[], int] = lambda: 1  # studies on the device at the moment, including this one


@dataclass(frozen=True)
class ActiveStudy:
    """A study that is being trained, and where it is recorded."""

    trainer: Trainer
    callbacks: Callbacks
    records: Records
    id: int  # in the records
    session: int


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
    """Train every setting with every seed that is not recorded yet; safe to kill and to repeat.

    If several processes share every batch, the first one writes the records and tells the others what to train.
    ``sharers`` returns how many studies share the device at the moment; recorded times are divided by it.
    """
    settings = list(settings)
    start_processes(settings, machine)
    if not distributed.is_first_process():
        return follow(settings, machine)
    threads = torch.get_num_threads()
    try:
        with Records(out, write=True) as records:
            display.plan(settings, seeds)
            for setting in settings:
                with records.lock(setting, display.say):
                    run_study(records, setting, seeds, machine, Callbacks(display, track, watch, sharers))
    finally:
        torch.set_num_threads(threads)


def run_study(records: Records, setting: Setting, seeds: Sequence[int], machine: Machine, callbacks: Callbacks) -> None:
    """Train one setting: first the groups of runs that have a checkpoint, then the seeds that are missing."""
    trainer, display = make_trainer(setting, machine), callbacks.display
    number = records.open_study(setting, trainer.series)
    known = {run.seed: run for run in recorded_runs(records, setting)}
    display.begin(setting, list(known.values()))
    missing = unfinished(known, setting, seeds)
    if missing:
        session = records.open_session(str(trainer.fabric.device), machine.engine)
        study = ActiveStudy(trainer, callbacks, records, number, session)
        for path, tensors, info in usable_checkpoints(records, setting, known, missing):
            group = group_from_checkpoint(trainer, tensors, info, path)
            missing = [seed for seed in missing if seed not in group.seeds]
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(study, group, path)
        missing = finish_recorded(records, setting, missing, display.say)
        if lost := [seed for seed in missing if seed in known]:
            display.say(f"{setting.task} {setting.cell}: no checkpoint for seeds {lost}; they start again")
        for stack in stacks(setting, missing):
            group = fresh_group(trainer, stack)
            path = records.checkpoint_folder(setting) / f"runs-{min(stack)}.safetensors"
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(study, group, path)
    send_group(trainer, None)
    display.end(setting, recorded_runs(records, setting))


def finish_study(records: Records, setting: Setting, seeds: Sequence[int], display: Display) -> bool:
    """Finish a study from the records alone, as :func:`run_study` would; false if runs are left to train or to test."""
    study = records.study(setting.key)
    if study is None:
        return False
    missing = unfinished({run.seed: run for run in study.runs}, setting, seeds)
    if missing and len(recorded_ends(study, setting, missing)) == len(missing):
        with records.lock(setting, display.say):
            missing = finish_recorded(records, setting, missing, display.say)
    if missing:
        return False
    records.open_study(setting, study.series)
    display.begin(setting, study.runs)
    display.end(setting, recorded_runs(records, setting))
    return True


def train_group(study: ActiveStudy, group: Group, path: Path) -> None:
    """Train one group to its end; after every epoch the database is written first, then the checkpoint at ``path``."""
    trainer, callbacks, records = study.trainer, study.callbacks, study.records
    send_group(trainer, group)
    records.begin(study.id, group.seeds, group.epoch, study.session)
    if callbacks.watch is not None and group.epoch == 0:
        write_watch(study, 0, group, group.seeds, callbacks.watch(trainer, group))
    schedule = CheckpointSchedule()
    for epoch in loop.train(trainer, group):
        states = dict(zip(group.seeds, group.state, strict=True))
        best_epochs = dict(zip(group.seeds, group.best_epoch, strict=True))
        seconds = epoch.seconds / callbacks.sharers()
        records.write_epoch(study.id, epoch.number, epoch.values, states, best_epochs, seconds)
        if callbacks.watch is not None and is_watched(epoch.number, trainer.setting.epochs):
            write_watch(study, epoch.number, group, epoch.values, callbacks.watch(trainer, group))
        if schedule.due(trainer, group):
            with schedule.saving():
                save_checkpoint(path, *checkpoint_of(group))
        if callbacks.track is not None:
            callbacks.track(trainer.setting, epoch)
        callbacks.display.epoch(trainer.setting, epoch, len(group.training))
    records.write_end(study.id, group.end_states, loop.test(trainer, group))


class CheckpointSchedule:
    """Makes slow checkpoints less frequent, so that they take a small part of the time; lost epochs are repeated."""

    def __init__(self) -> None:
        self.saved, self.took = -math.inf, 0.0

    def due(self, trainer: Trainer, group: Group) -> bool:
        """Whether to write a checkpoint after this epoch; always true after the last one."""
        ended = group.epoch == trainer.setting.epochs or not group.training
        return ended or time.monotonic() - self.saved >= SAVING_SHARE * self.took

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the writing of a checkpoint takes, inside this context."""
        started = time.monotonic()
        yield
        self.saved = time.monotonic()
        self.took = self.saved - started


def is_watched(epoch: int, epochs: int) -> bool:
    """Whether ``Callbacks.watch`` is called after this epoch."""
    return epoch == 1 or epoch % max(1, epochs // WATCHED) == 0


def write_watch(
    study: ActiveStudy, epoch: int, group: Group, trained: Container[int], values: dict[str, list[float]]
) -> None:
    """Record what ``--watch`` measured for the seeds that trained in this epoch; the stack may hold others."""
    places = [place for place, seed in enumerate(group.stacked_seeds) if seed in trained]
    seeds = [group.stacked_seeds[place] for place in places]
    of_seeds = {name: [of_stack[place] for place in places] for name, of_stack in values.items()}
    study.records.write_watch(study.id, epoch, seeds, of_seeds)


def recorded_runs(records: Records, setting: Setting) -> list[Run]:
    """The runs of a setting that are in the records."""
    study = records.study(setting.key)
    return list(study.runs) if study else []


def unfinished(known: Mapping[int, Run], setting: Setting, seeds: Sequence[int]) -> list[int]:
    """The seeds whose runs are not finished; ``known`` are the recorded runs."""
    return [seed for seed in seeds if seed not in known or not is_done(known[seed], setting)]


def is_done(run: Run, setting: Setting) -> bool:
    """Whether there is nothing left to train or to test."""
    if run.state == RUNNING or (run.state == SPENT and run.epochs < setting.epochs):
        return False
    return run.test is not None or run.best_epoch is None


def usable_checkpoints(
    records: Records, setting: Setting, known: dict[int, Run], missing: Sequence[int]
) -> Iterator[tuple[Path, dict[str, Tensor], dict[str, Any]]]:
    """Checkpoints of groups with a missing seed whose epochs are all recorded."""
    for path in sorted(records.checkpoint_folder(setting).glob("*.safetensors")):
        tensors, info = load_checkpoint(path)
        epochs = [known[seed].epochs if seed in known else -1 for seed in info["seeds"]]
        recorded = all(
            count >= (info["epoch"] if state == RUNNING else 1)
            for count, state in zip(epochs, info["state"], strict=True)
        )
        if recorded and set(info["seeds"]) & set(missing):
            yield path, tensors, info


def finish_recorded(records: Records, setting: Setting, seeds: Sequence[int], say: Callable[[str], None]) -> list[int]:
    """Finish the runs that need no weights for that; return the other seeds."""
    study = records.study(setting.key)
    ends = recorded_ends(study, setting, seeds) if study else {}
    if study and ends:
        states = {seed: state for seed, (state, _) in ends.items()}
        tests = {seed: test for seed, (_, test) in ends.items()}
        records.write_end(records.open_study(setting, study.series), states, tests)
        say(f"{setting.task} {setting.cell}: seeds {sorted(ends)} finished from the records")
    return [seed for seed in seeds if seed not in ends]


def recorded_ends(study: Study, setting: Setting, seeds: Sequence[int]) -> dict[int, tuple[str, dict[str, float]]]:
    """By seed, the state and the best epoch's test results of runs that have ended, if every epoch was tested."""
    ends = {}
    for run in study.runs if "test_loss" in study.series else ():
        ended = run.state in (REACHED, DIVERGED) or run.epochs >= setting.epochs
        if run.seed in seeds and ended and run.best_epoch and run.best_epoch <= run.epochs:
            best = run.at_epoch(run.best_epoch)
            test = {name: best[f"test_{name}"] for name in measures_in(study.series)}
            ends[run.seed] = (SPENT if run.state == RUNNING else run.state, test)
    return ends


def fitting_threads(group: Group) -> int:
    """Number of CPU threads for a group: a few small networks are slower on many threads, above all on a busy CPU."""
    cores = os.cpu_count() or 1
    if sum(weight[0].numel() for weight in group.weights.values()) > SMALL_NETWORK:
        return max(1, cores // 2)
    return max(1, min(cores, len(group.seeds) // RUNS_PER_THREAD))


def start_processes(settings: Sequence[Setting], machine: Machine) -> None:
    """Start the processes that share every batch, or join those that run already; with one process, do nothing."""
    if machine.devices * machine.nodes > 1:
        open_fabric(machine.device, settings[0].precision, machine.devices, machine.nodes)


def send_group(trainer: Trainer, group: Group | None) -> None:
    """Send the next group to train to the other processes, if there are any; None ends a study."""
    if trainer.fabric.world_size > 1:
        message = None
        if group is not None:
            tensors, info = checkpoint_of(group)
            message = ({name: tensor.detach().cpu() for name, tensor in tensors.items()}, info)
        distributed.broadcast(trainer.fabric, message)


def follow(settings: Sequence[Setting], machine: Machine) -> None:
    """Train the groups that the first process sends, without recording anything."""
    for setting in settings:
        trainer = make_trainer(setting, machine)
        while (message := distributed.broadcast(trainer.fabric, None)) is not None:
            for _ in loop.train(trainer, group_from_checkpoint(trainer, *message)):
                pass
