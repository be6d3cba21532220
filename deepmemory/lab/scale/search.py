"""Searches settings with Optuna: random, grid or TPE, with trials that lag behind cut short.

A trial is a setting with one or several seeds side by side, trained by :mod:`deepmemory.lab.training.studies` like any
other study, so it goes on from its checkpoint. Trials are kept in SQLite under the output folder, or in any database
that Optuna can use: then every machine that runs the same command takes part in the same search.

Read :func:`run_sweep` first.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from deepmemory.lab.records import MALFORMED, Records, Run, check_tables
from deepmemory.lab.settings import Machine, Setting, change, check_choice
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.training.progress import Display
from deepmemory.lab.training.studies import run_studies
from deepmemory.lab.writing import file_name, put, without_links

try:
    import optuna
except ModuleNotFoundError:
    raise ModuleNotFoundError("searching needs Optuna: pip install 'deepmemory[sweep]'") from None

from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")
TRIALS = 50  # where neither the user nor a grid says how many
MOST_PANELS = 20  # of a picture, which shows no more of the settings searched than that
ATTEMPTS = 3  # at a trial whose worker dies or fails
HEARTBEAT, SILENCE, POLL = 10, 60, 2.0  # seconds: between signs of life; until a worker counts as dead; between looks

# The paper: "selected based on the random and grid searches and then fine-tuned manually". It prints no spaces. All
# rates, decays and gammas of its tables lie on these grids; the random ones span a little more.
SPACES = {
    "paper-grid": "lr=0.001|0.002|0.005|0.01|0.02|0.05",
    "paper-random": "lr=log:1e-4..1e-1",
    "paper-grid-data": "lr=0.002|0.005|0.01|0.02,weight_decay=0.0001|0.001,gamma=0.9|0.98|1.0",
    "paper-random-data": "lr=log:1e-3..1e-1,weight_decay=log:1e-5..1e-2,gamma=0.9..1.0",
    "paper-ablation": "lr=0.001|0.002|0.005|0.01|0.02|0.05,module_rate=formula|same",  # DMU and DMU-C
}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False  # drawn evenly in the logarithm
    whole: bool = False  # whole numbers only


Space = dict[str, Range | tuple[str, ...]]  # by field of Setting: a range, or choices as they are written


def parse_space(text: str) -> Space:
    """A shipped space by name, or fields with their values.

    >>> parse_space("lr=log:1e-4..1e-1,batch=16|32")
    {'lr': Range(low=0.0001, high=0.1, log=True, whole=False), 'batch': ('16', '32')}
    """
    space: Space = {}
    kinds = get_type_hints(Setting)
    for part in re.split(r",(?=\s*[A-Za-z_-]+\s*=)", SPACES.get(text.strip(), text)):
        name, equals, values = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or not values:
            raise ValueError(
                f"a space is NAME=LOW..HIGH, NAME=log:LOW..HIGH or NAME=A|B|C, separated by commas, or one of "
                f"{', '.join(SPACES)}; got {part!r}"
            )
        if name not in kinds or name in ("task", "cell", "epochs") or name in space:
            why = "comes twice" if name in space else "cannot be searched"
            choices = ", ".join(field for field in kinds if field not in ("task", "cell", "epochs"))
            raise ValueError(f"space: {name!r} {why}; choose from {choices}")
        space[name] = parse_range(name, values, kinds[name]) if ".." in values else parse_choices(name, values)
    return space


def parse_range(name: str, text: str, kind: Any) -> Range:
    """LOW..HIGH or log:LOW..HIGH."""
    log = text.startswith("log:")
    try:
        low, high = (float(end) for end in text.removeprefix("log:").split(".."))
    except ValueError:
        low = high = math.nan
    whole = kind is int
    if kind not in (int, float) or not (math.isfinite(high - low) and low < high) or (log and low <= 0):
        raise ValueError(
            f"space: {name}={text} is no range of numbers; expected LOW..HIGH with LOW below HIGH, "
            "and above 0 after log:, for a setting that is a number"
        )
    if whole and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"space: {name} takes whole numbers, got {text}")
    return Range(low, high, log, whole)


def parse_choices(name: str, text: str) -> tuple[str, ...]:
    """A|B|C."""
    choices = tuple(dict.fromkeys(choice.strip() for choice in text.split("|")))
    if "" in choices:
        raise ValueError(f"space: {name}={text} has an empty choice")
    return choices


def grid_points(space: Space) -> list[dict[str, str]]:
    """Every combination of choices, the last field fastest."""
    choices = {name: values for name, values in space.items() if isinstance(values, tuple)}
    for name in space.keys() - choices.keys():
        raise ValueError(f"a grid needs choices: give {name}=A|B|C in the place of a range, or --sampler random")
    return [dict(zip(choices, point, strict=True)) for point in product(*choices.values())]


def run_sweep(
    base: Setting,
    space: Space,
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
    """Search until there are ``trials`` of them, those of earlier calls and of other workers counted.

    Returns Optuna's study; its value is the median over the seeds of each run's lowest validation loss. A trial
    whose worker died goes on from its checkpoint in the worker that finds it.
    """
    out = Path(out)
    points = grid_points(space) if sampler == "grid" else []
    total = min(trials or len(points), len(points)) if points else trials or TRIALS
    for params in (points or [{name: v[0] for name, v in space.items() if isinstance(v, tuple)}])[:100]:
        change(base, params)  # what cannot be trained is refused before anything is
    study = open_sweep(base, space, seeds, out, sampler, pruner, storage, search_seed)
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
            return train_trial(trial, setting, seeds, folder, machine, display)
        except (optuna.TrialPruned, optuna.exceptions.UpdateFinishedTrialError):
            raise
        except RuntimeError as error:  # this trial's own: too large for the GPU, say
            display.say(f"trial {trial.number} failed ({error}); {ATTEMPTS} attempts are made in all")
            raise
        except BaseException:  # stopped by hand, a full disk: the whole command ends, and the trial is not to blame
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr("stopped", True)
            raise

    def tell(_: optuna.Study, trial: FrozenTrial) -> None:
        if trial.state != TrialState.FAIL:
            display.say(describe(trial, study))

    while True:
        with experimental():
            optuna.storages.fail_stale_trials(study)
        known = study.get_trials(deepcopy=False)  # one look for all that follows: others take and end trials meanwhile
        states = {trial.state for trial in known}
        counted, again, _ = tally(known)
        absent = absent_points(known, points[:total])
        for trial in again:
            enqueue_again(study, trial, points)
        for place in absent:
            study.enqueue_trial(points[place], {"point": place})
        if again or absent or TrialState.WAITING in states or counted < total:
            try:
                study.optimize(objective, n_trials=1, catch=(Surplus, RuntimeError), callbacks=[tell])
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                if not taken_over(study, current):
                    raise
                display.say(f"trial {current} was without a sign of life for {SILENCE} s; another worker has it now")
        elif TrialState.RUNNING in states:
            if not waited:
                display.say("waiting for trials that other workers train; one that is silent for long is taken over")
                waited = True
            time.sleep(POLL)
        else:
            return study


class Surplus(Exception):
    """A trial that another worker makes, too; it is dropped."""


def train_trial(
    trial: Trial, setting: Setting, seeds: Sequence[int], folder: Path, machine: Machine, display: Display
) -> float:
    """Train, telling Optuna the loss after every epoch, unless it says that enough has been seen."""
    best = dict.fromkeys(seeds, math.inf)
    reported = 0

    def see(number: int, losses: Mapping[int, float]) -> None:
        nonlocal reported
        for seed in best.keys() & losses.keys():
            if losses[seed] < best[seed]:  # never with nan
                best[seed] = losses[seed]
        if number > reported:
            trial.report(statistics.median(best.values()), number)
            reported = number

    def track(_: Setting, epoch: Epoch) -> None:
        see(epoch.number, {seed: values["valid_loss"] for seed, values in epoch.values.items()})
        if trial.should_prune():
            raise optuna.TrialPruned

    runs = recorded(folder, setting)
    for number in range(1, max((run.epochs for run in runs), default=0) + 1):
        see(number, {run.seed: run.curves["valid_loss"][number - 1] for run in runs if run.epochs >= number})
    run_studies([setting], seeds, folder, machine, display, track)
    return statistics.median(best.values())


def recorded(folder: Path, setting: Setting) -> tuple[Run, ...]:
    """What an earlier attempt at a trial left."""
    if not (folder / "records.sqlite").exists():
        return ()
    records = Records(folder)
    try:
        study = records.study(setting.key)
    finally:
        records.close()
    return study.runs if study else ()


# --- trials of several workers ----------------------------------------------------------------------


def root(trial: FrozenTrial) -> int:
    """The number of the first attempt at a trial."""
    return int(trial.user_attrs.get("retries", trial.number))


def place_of(trial: FrozenTrial) -> int | None:
    """Which point of the grid a trial is, where there is a grid."""
    return trial.user_attrs.get("point")


def work_of(trial: FrozenTrial) -> tuple[str, int]:
    """What a trial has in common with others of which one is enough: its point, or its first attempt."""
    place = place_of(trial)
    return ("trial", root(trial)) if place is None else ("point", place)


def is_real(trial: FrozenTrial) -> bool:
    """Whether a trial stands for something: it was not dropped, and its worker did not die before its first setting."""
    return "surplus" not in trial.user_attrs and bool(trial.params or trial.state != TrialState.FAIL)


def tally(trials: Sequence[FrozenTrial]) -> tuple[int, list[FrozenTrial], list[FrozenTrial]]:
    """How many trials count, those to be tried again, and those given up, which count as well."""
    attempts: dict[tuple[str, int], list[FrozenTrial]] = {}
    for trial in trials:
        if is_real(trial):
            attempts.setdefault(work_of(trial), []).append(trial)
    failed = [group for group in attempts.values() if all(trial.state == TrialState.FAIL for trial in group)]
    lost = [group[-1] for group in failed if sum("stopped" not in t.user_attrs for t in group) >= ATTEMPTS]
    again = [group[-1] for group in failed if group[-1] not in lost]
    return len(attempts) - len(again), again, lost


def is_surplus(trials: Sequence[FrozenTrial], number: int, total: int, grid: bool = False) -> bool:
    """Whether trials with lower numbers do all that is to be done: two workers may begin the last one at once."""
    own = next(trial for trial in trials if trial.number == number)
    before = [trial for trial in trials if trial.number < number and is_real(trial)]
    if any(work_of(trial) == work_of(own) for trial in before if trial.state != TrialState.FAIL):
        return True
    if "retries" in own.user_attrs:  # what was begun is ended
        return False
    if grid:  # without a point where another worker took the last one from the queue
        place = place_of(own)
        return place is None or place >= total
    counted, again, _ = tally(before)
    return counted + len(again) >= total


def taken_over(study: optuna.Study, number: int) -> bool:
    """Whether others have ended a trial of ours: this worker was asleep, or the storage very slow."""
    own = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    return any(trial.state == TrialState.FAIL and "stopped" not in trial.user_attrs for trial in own)


def absent_points(trials: Sequence[FrozenTrial], points: Sequence[dict[str, str]]) -> list[int]:
    """Those points of a grid that no trial stands for."""
    there = {place_of(trial) for trial in trials if is_real(trial)}
    return [place for place in range(len(points)) if place not in there]


def enqueue_again(study: optuna.Study, trial: FrozenTrial, points: Sequence[dict[str, str]]) -> None:
    """Put a trial in the queue once more; on a grid all of its point, as its worker may have known a part only."""
    place = place_of(trial)
    if place is None:
        study.enqueue_trial(trial.params, {"retries": root(trial)})
    else:
        study.enqueue_trial(points[place], {"point": place, "retries": root(trial)})


class SeededByTrial(optuna.samplers.BaseSampler):
    """A sampler made anew for every trial: its draws depend on the trial's number, not on who asks or when."""

    def __init__(self, make: Callable[[int], optuna.samplers.BaseSampler], seed: int) -> None:
        self.make, self.seed, self.inner = make, seed, make(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See Optuna."""
        digest = hashlib.sha256(f"{self.seed} {trial.number}".encode()).digest()
        self.inner = self.make(int.from_bytes(digest[:4], "little"))
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See Optuna."""
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See Optuna."""
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, values: BaseDistribution) -> Any:
        """See Optuna."""
        return self.inner.sample_independent(study, trial, name, values)


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """A grid's points are queued, so what samples beside them does not matter."""
    if check_choice("sampler", name, SAMPLERS) == "tpe":
        return SeededByTrial(make_tpe, seed)
    return SeededByTrial(lambda seed: optuna.samplers.RandomSampler(seed=seed), seed)


def make_tpe(seed: int) -> optuna.samplers.BaseSampler:
    """Other workers' unfinished trials count as bad ones, so that nobody repeats them."""
    with experimental():
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def make_pruner(name: str, epochs: int) -> optuna.pruners.BasePruner:
    """Who is cut short: worse than the median of others at the same epoch, or not among the best of its rung."""
    if check_choice("pruner", name, PRUNERS) == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=epochs // 10)  # the first epochs tell little
    return optuna.pruners.SuccessiveHalvingPruner() if name == "halving" else optuna.pruners.NopPruner()


def suggest(trial: Trial, name: str, values: Range | tuple[str, ...]) -> Any:
    """One value from the space."""
    if isinstance(values, tuple):
        return trial.suggest_categorical(name, values)
    if values.whole:
        return trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(name, values.low, values.high, log=values.log)


# --- storage --------------------------------------------------------------------------------------


def open_sweep(
    base: Setting,
    space: Space,
    seeds: Sequence[int],
    out: Path,
    sampler: str = "tpe",
    pruner: str = "median",
    storage: str | None = None,
    search_seed: int = 0,
) -> optuna.Study:
    """The search of these settings, made if it is new: the same command finds the same one."""
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
        storage=take_turns(open_storage(storage or default_storage(out))),
        sampler=make_sampler(sampler, search_seed),
        pruner=make_pruner(pruner, base.epochs),
        study_name=f"{base.task}-{base.cell}-{digest}",
        load_if_exists=True,
    )
    if not study.user_attrs:
        for name, value in what.items():
            study.set_user_attr(name, value)
    return study


def default_storage(out: Path | str) -> str:
    """SQLite under the output folder."""
    return f"sqlite:///{without_links(Path(out), 'sweeps.sqlite').absolute()}"


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Optuna's storage, with signs of life from every worker; made in turn where several come at once."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    check_storage(url)
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    template = url.replace("{", "{{").replace("}", "}}")  # Optuna fills in what stands in braces
    for attempt in range(5):
        try:
            with experimental():
                return optuna.storages.RDBStorage(
                    template, engine_kwargs=options, heartbeat_interval=HEARTBEAT, grace_period=SILENCE
                )
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ValueError(
                f"--storage {without_password(url)} cannot be used ({error}); expected "
                "postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE, and pip install 'deepmemory[sweep]'"
            ) from None
        except SQLAlchemyError as error:  # another worker makes the tables just now, or nobody answers
            if attempt == 4:
                raise ValueError(f"{without_password(url)} cannot be opened: {str(error).splitlines()[0]}") from None
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


def check_storage(url: str) -> None:
    """Refuse an SQLite file that computes when it is read or written to, before Optuna does either."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and path.is_file():
        opened = closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True))
        with suppress(sqlite3.DatabaseError), opened as db:  # of a file that is no database Optuna says so
            check_tables(db, path)


def take_turns(storage: optuna.storages.RDBStorage) -> optuna.storages.RDBStorage:
    """Have SQLite lock where a transaction begins: Python's driver begins it after the reading, so that two workers
    that find the same trial in the queue both take it. Other databases lock the rows that Optuna reads."""
    if storage.engine.dialect.name == "sqlite":
        storage.engine.dispose()  # connections made so far
        event.listen(storage.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def storage_failure(error: BaseException | None) -> str | None:
    """What the database said, if it is what an error comes from; Optuna may trip over it on the way."""
    while error is not None and not isinstance(error, (optuna.exceptions.StorageInternalError, SQLAlchemyError)):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if error is None else str(error).splitlines()[0]


def without_password(url: str) -> str:
    """An address that may be shown."""
    return re.sub(r"(?<=://)([^:/@]*):[^@]*@", r"\1:***@", url)


@contextmanager
def experimental() -> Iterator[None]:
    """Optuna calls signs of life experimental, every time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


# --- telling --------------------------------------------------------------------------------------


def describe(trial: FrozenTrial, study: optuna.Study) -> str:
    """One line on a finished trial."""
    shown = ", ".join(f"{name} {short(value)}" for name, value in trial.params.items())
    cut = f", cut short at epoch {trial.last_step}" if trial.state == TrialState.PRUNED else ""
    complete = [t for t in finished(study) if t.state == TrialState.COMPLETE]
    best = min(complete, key=lambda t: (loss_of(t), t.number), default=trial)
    return (
        f"trial {trial.number}: {shown}; loss {loss_of(trial):.2e}{cut}; best {loss_of(best):.2e} (trial {best.number})"
    )


def short(value: Any) -> str:
    """A number in three digits, a word as it is."""
    return f"{value:.3g}" if isinstance(value, float) else "none" if value is None else str(value)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that ran to their end, or were cut short."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def loss_of(trial: FrozenTrial) -> float:
    """The final loss, or the last one seen."""
    last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
    value = trial.values[0] if trial.state == TrialState.COMPLETE and trial.values else last
    return math.inf if value is None or math.isnan(value) else float(value)


def table(study: optuna.Study) -> list[dict[str, Any]]:
    """Trials, best first: number, state, loss, epochs, parameters."""
    rows = [
        {
            "trial": trial.number,
            "state": "cut short" if trial.state == TrialState.PRUNED else "complete",
            "loss": loss_of(trial) if math.isfinite(loss_of(trial)) else None,  # JSON knows no inf
            "epochs": trial.last_step or 0,
            **trial.params,
        }
        for trial in finished(study)
    ]
    return sorted(rows, key=lambda row: (row["state"] != "complete", math.inf if row["loss"] is None else row["loss"]))


def draw(study: optuna.Study) -> Any:
    """The loss of every trial in turn, and against each setting that was searched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trials = [trial for trial in finished(study) if math.isfinite(loss_of(trial))]
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))[:MOST_PANELS]
    figure = Figure(figsize=(3.2 * (1 + len(names)), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(1, 1 + len(names), sharey=True, squeeze=False)[0]
    lowest = [min((loss_of(t) for t in trials[: n + 1] if t.values), default=math.nan) for n in range(len(trials))]
    first.step([t.number for t in trials], lowest, where="post", color="#0072B2", linewidth=1.2, label="best so far")
    first.set_xlabel("trial")
    first.xaxis.get_major_locator().set_params(integer=True)
    first.set_ylabel("validation loss")
    if trials:
        first.set_yscale("log")
    for panel, name in zip((first, *others), (None, *names), strict=True):
        for state, look in (
            (TrialState.COMPLETE, {"color": "#D55E00", "marker": "o", "label": "complete"}),
            (TrialState.PRUNED, {"color": "#777777", "marker": "x", "label": "cut short"}),
        ):
            chosen = [t for t in trials if t.state == state and (name is None or name in t.params)]
            places = [t.number if name is None else as_number(t.params[name]) for t in chosen]
            panel.plot(places, [loss_of(t) for t in chosen], linestyle="", markersize=4, **look)
        if name is not None:
            panel.set_xlabel(name, parse_math=False)
            values = [as_number(t.params[name]) for t in trials if name in t.params]
            numbers = [value for value in values if isinstance(value, float)]
            if len(numbers) == len(values) and min(numbers) > 0 and max(numbers) > 20 * min(numbers):
                panel.set_xscale("log")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    first.legend(frameon=False, fontsize=8)
    return figure


def as_number(value: Any) -> float | str:
    """Choices are kept as they were written; numbers among them are drawn as numbers."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value).replace("$", r"\$")  # no formula


def sweeps_in(storage: str) -> list[optuna.Study]:
    """All searches of a storage, read whole."""
    opened = open_storage(storage)
    try:
        names = optuna.get_all_study_names(storage=opened)
        studies = [optuna.load_study(study_name=name, storage=opened) for name in names]
        for study in studies:
            study.get_trials(deepcopy=False)
        return studies
    except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError, AssertionError, *MALFORMED) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the searches in {without_password(storage)} cannot be read: {said}") from error


def write_page(studies: Sequence[optuna.Study], folder: Path) -> Path:
    """One page with a picture and a table for each search, and each picture as a file."""
    from deepmemory.lab.report import figures
    from deepmemory.lab.report.page import STYLE

    parts = []
    for study in studies:
        picture = figures.render(draw(study), "svg")
        put(folder / f"{file_name(study.study_name)}.svg", picture)
        rows = table(study)
        names = list(dict.fromkeys(name for row in rows for name in row))
        heads = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(short(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
        )
        sampler, seeds, setting = (escape(str(study.user_attrs.get(name))) for name in ("sampler", "seeds", "setting"))
        parts.append(
            f"<h2>{escape(study.study_name)}</h2><p>{len(rows)} trials, sampler {sampler}, seeds {seeds}.</p>"
            f"<figure>{picture.decode().split('?>', 1)[-1]}</figure>"
            f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
            f"<details><summary>Settings</summary><p><code>{setting}</code></p></details>"
        )
    page = folder / "sweeps.html"
    put(
        page,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Searches</title><style>{STYLE}</style>'
        f"</head><body><h1>Searches</h1>{''.join(parts)}</body></html>\n".encode(),
    )
    return page
