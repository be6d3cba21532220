"""Runs a search: asks for trials, trains them, and shares them with other workers."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from deepmemory.lab.records import Records, Run
from deepmemory.lab.scale.search import storage as storages
from deepmemory.lab.scale.search.results import describe
from deepmemory.lab.scale.search.samplers import PRUNERS, SAMPLERS, make_pruner, make_sampler
from deepmemory.lab.scale.search.space import Space, grid_points, suggest
from deepmemory.lab.scale.search.trials import (
    ATTEMPTS,
    absent_points,
    count_trials,
    enqueue_again,
    is_surplus,
    taken_over,
)
from deepmemory.lab.settings import Machine, Setting, change, check_choice
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.stacks import stacks
from deepmemory.lab.training.studies import run_studies
from deepmemory.lab.writing import without_links

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

TRIALS = 50  # if neither the user nor a grid says how many
POLL = 2.0  # seconds between two checks of the other workers' trials


def run_search(
    base: Setting,
    space: Space,
    *,
    seeds: Sequence[int],
    out: Path | str,
    machine: Machine,
    display: Display,
    sampler: str = "tpe",
    pruner: str = "median",
    trials: int | None = None,
    storage: str | None = None,
    search_seed: int = 0,
) -> optuna.Study:
    """Search until there are ``trials`` trials, including those of earlier calls and of other workers.

    Returns Optuna's study; its value is the median over the seeds of each run's lowest validation loss. A trial
    whose worker died is resumed from its checkpoint by the worker that finds it.
    """
    out = Path(out)
    check_choice("sampler", sampler, SAMPLERS)
    check_choice("pruner", pruner, PRUNERS)
    points = grid_points(space) if sampler == "grid" else []
    total = min(trials or len(points), len(points)) if points else trials or TRIALS
    for params in (points or [{name: v[0] for name, v in space.items() if isinstance(v, tuple)}])[:100]:
        change(base, params)  # refuses a setting that cannot be trained before any is trained
    with storages.named_failures():
        study = open_search(
            base,
            space,
            seeds=seeds,
            out=out,
            sampler=sampler,
            pruner=pruner,
            storage=storage,
            search_seed=search_seed,
        )
        return work(study, base, space, points, total, seeds=seeds, out=out, machine=machine, display=display)


def work(
    study: optuna.Study,
    base: Setting,
    space: Space,
    points: Sequence[dict[str, str]],
    total: int,
    *,
    seeds: Sequence[int],
    out: Path,
    machine: Machine,
    display: Display,
) -> optuna.Study:
    """Take part in a search until all of its trials are done, by this worker or by others."""
    folder, waited = without_links(out, "sweeps", study.study_name), False
    current = -1

    def objective(trial: Trial) -> float:
        nonlocal current
        current = trial.number
        if is_surplus(study.get_trials(deepcopy=False), trial.number, total, grid=bool(points)):
            trial.set_user_attr("surplus", True)
            raise Surplus
        setting = change(base, {name: suggest(trial, name, values) for name, values in space.items()})
        trial.set_user_attr("study", setting.key)
        try:
            return train_trial(trial, setting, seeds=seeds, folder=folder, machine=machine, display=display)
        except (optuna.TrialPruned, optuna.exceptions.UpdateFinishedTrialError):
            raise
        except RuntimeError as error:  # of this trial only: too large for the GPU, for example
            display.say(f"trial {trial.number} failed ({error}); a trial gets {ATTEMPTS} attempts")
            raise
        except BaseException:  # Ctrl-C, a full disk: the command ends, and the trial has not failed
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr("stopped", True)
            raise

    def tell(_: optuna.Study, trial: FrozenTrial) -> None:
        if trial.state != TrialState.FAIL:
            display.say(describe(trial, study))

    while True:
        with storages.experimental():
            optuna.storages.fail_stale_trials(study)
        known = study.get_trials(deepcopy=False)  # read only once: other workers take and end trials meanwhile
        states = {trial.state for trial in known}
        counts = count_trials(known)
        absent = absent_points(known, points[:total])
        for trial in counts.to_retry:
            enqueue_again(study, trial, points)
        for point in absent:
            study.enqueue_trial(points[point], {"point": point})
        if counts.to_retry or absent or TrialState.WAITING in states or counts.counted < total:
            try:
                study.optimize(objective, n_trials=1, catch=(Surplus, RuntimeError), callbacks=[tell])
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                if not taken_over(study, current):
                    raise
                display.say(
                    f"trial {current} sent no heartbeat for {storages.SILENCE} s; another worker has taken it over"
                )
        elif TrialState.RUNNING in states:
            if not waited:
                display.say("waiting for the trials of other workers; those of a dead worker are taken over")
                waited = True
            time.sleep(POLL)
        else:
            return study


class Surplus(Exception):
    """Another worker trains the same trial; this one is dropped."""


def train_trial(
    trial: Trial, setting: Setting, *, seeds: Sequence[int], folder: Path, machine: Machine, display: Display
) -> float:
    """Train a trial and report its loss to Optuna after every epoch; Optuna may stop it early.

    The loss is the median over the runs that have begun. Every epoch is reported once: by the first run to get there,
    if large networks train one after another.
    """
    best: dict[int, float] = {}
    reported = 0

    def report(number: int, losses: Mapping[int, float]) -> None:
        nonlocal reported
        for seed, loss in losses.items():
            best.setdefault(seed, math.inf)
            if loss < best[seed]:  # never with nan
                best[seed] = loss
        if number > reported:
            trial.report(statistics.median(best.values()), number)
            reported = number

    def track(_: Setting, epoch: Epoch) -> None:
        report(epoch.number, {seed: values["valid_loss"] for seed, values in epoch.values.items()})
        if trial.should_prune():
            raise optuna.TrialPruned

    runs = recorded(folder, setting)
    for stack in stacks(setting, seeds):
        begun = [run for run in runs if run.seed in stack]
        for number in range(1, max((run.epochs for run in begun), default=0) + 1):
            report(number, {run.seed: run.curves["valid_loss"][number - 1] for run in begun if run.epochs >= number})
    run_studies([setting], seeds, out=folder, machine=machine, display=display, track=track)
    return statistics.median(best.values())


def recorded(folder: Path, setting: Setting) -> tuple[Run, ...]:
    """The runs that an earlier attempt at a trial recorded."""
    if not (folder / "records.sqlite").exists():
        return ()
    records = Records(folder)
    try:
        study = records.study(setting.key)
    finally:
        records.close()
    return study.runs if study else ()


def open_search(
    base: Setting,
    space: Space,
    *,
    seeds: Sequence[int],
    out: Path,
    sampler: str = "tpe",
    pruner: str = "median",
    storage: str | None = None,
    search_seed: int = 0,
) -> optuna.Study:
    """Open the search of these settings, or create it: the same command finds the same search."""
    what = {
        "setting": base.to_json(),
        "space": repr(space),
        "seeds": list(seeds),
        "sampler": sampler,
        "search_seed": search_seed,
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    if storage is None:
        out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=storages.take_turns(storages.open_storage(storage or storages.default_storage(out))),
        sampler=make_sampler(sampler, search_seed),
        pruner=make_pruner(pruner, base.epochs),
        study_name=f"{base.task}-{base.cell}-{digest}",
        load_if_exists=True,
    )
    if not study.user_attrs:
        for name, value in what.items():
            study.set_user_attr(name, value)
    return study
