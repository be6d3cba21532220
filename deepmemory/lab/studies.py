"""Carries out studies: finds what is already there, trains the rest, records every epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from deepmemory.lab import training
from deepmemory.lab.progress import Display
from deepmemory.lab.records import RUNNING, SPENT, Records, Run, load_checkpoint, save_checkpoint
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training import Epoch, Group, Trainer

RUNS_PER_THREAD = 16

Tracker = Callable[[Setting, Epoch], None]


def run_studies(
    settings: Iterable[Setting],
    seeds: Sequence[int],
    out: Path | str,
    machine: Machine,
    display: Display,
    track: Tracker | None = None,
) -> None:
    """Train every setting with every seed, unless the records have it already; safe to kill and to repeat."""
    records = Records(out, write=True)
    settings = list(settings)
    threads = torch.get_num_threads()
    try:
        display.plan(settings, seeds)
        for setting in settings:
            with records.lock(setting, display.say):
                run_study(records, setting, seeds, machine, display, track)
    finally:
        torch.set_num_threads(threads)
        records.close()


def run_study(
    records: Records,
    setting: Setting,
    seeds: Sequence[int],
    machine: Machine,
    display: Display,
    track: Tracker | None = None,
) -> None:
    """One setting: first the groups of runs that were begun, then the seeds nobody has."""
    trainer = training.make_trainer(setting, machine)
    study = records.open_study(setting, trainer.series)
    known = {run.seed: run for run in recorded_runs(records, setting)}
    display.begin(setting, list(known.values()))
    missing = [seed for seed in seeds if seed not in known or not is_done(known[seed], setting)]
    if missing:
        session = records.open_session(str(trainer.fabric.device), machine.engine)
        for path, group in begun_groups(records, trainer, known, missing):
            missing = [seed for seed in missing if seed not in group.seeds]
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(records, study, session, trainer, group, path, display, track)
        if missing:
            lost = [seed for seed in missing if seed in known]
            if lost:
                display.say(f"{setting.task} {setting.cell}: no checkpoint for seeds {lost}; they start again")
            group = training.fresh_group(trainer, missing)
            path = records.checkpoint_folder(setting) / f"runs-{min(missing)}.safetensors"
            torch.set_num_threads(machine.threads or fitting_threads(group))
            train_group(records, study, session, trainer, group, path, display, track)
    display.end(setting, recorded_runs(records, setting))


def fitting_threads(group: Group) -> int:
    """A few small networks are slower on many threads, far slower where other programs run too."""
    return max(1, min(os.cpu_count() or 1, len(group.seeds) // RUNS_PER_THREAD))


def recorded_runs(records: Records, setting: Setting) -> list[Run]:
    """The runs of a setting that the records know."""
    study = records.study(setting.key)
    return list(study.runs) if study else []


def is_done(run: Run, setting: Setting) -> bool:
    """Nothing left to train or to test."""
    if run.state == RUNNING or (run.state == SPENT and len(run.curves) < setting.epochs):
        return False
    return run.test is not None or run.best_epoch is None


def begun_groups(
    records: Records, trainer: Trainer, known: dict[int, Run], missing: Sequence[int]
) -> Iterable[tuple[Path, Group]]:
    """Groups with a missing seed that can go on from their checkpoint."""
    for path in sorted(records.checkpoint_folder(trainer.setting).glob("*.safetensors")):
        tensors, info = load_checkpoint(path)
        told = [len(known[seed].curves) if seed in known else -1 for seed in info["seeds"]]
        recorded = all(
            epochs >= (info["epoch"] if state == RUNNING else 1)
            for epochs, state in zip(told, info["state"], strict=True)
        )
        if recorded and set(info["seeds"]) & set(missing):
            yield path, training.group_from_checkpoint(trainer, tensors, info)


def train_group(
    records: Records,
    study: int,
    session: int,
    trainer: Trainer,
    group: Group,
    path: Path,
    display: Display,
    track: Tracker | None,
) -> None:
    """Train one group to its end; after every epoch the database first, then the checkpoint."""
    records.begin(study, group.seeds, group.epoch, session)
    for epoch in training.train(trainer, group):
        states = dict(zip(group.seeds, group.state, strict=True))
        best_epochs = dict(zip(group.seeds, group.best_epoch, strict=True))
        records.write_epoch(study, epoch.number, epoch.values, states, best_epochs, epoch.seconds)
        save_checkpoint(path, *training.checkpoint_of(group))
        if track is not None:
            track(trainer.setting, epoch)
        display.epoch(trainer.setting, epoch, len(group.training))
    records.write_end(study, training.end_states(group), training.test(trainer, group))
