"""The verbs that train: ``paper``, ``beyond``, ``train`` and ``sweep``."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from deepmemory.lab.beyond import EXPERIMENTS
from deepmemory.lab.cli import results
from deepmemory.lab.cli.data import with_data
from deepmemory.lab.cli.options import (
    MOST_RUNS,
    RUNS,
    AnyMachine,
    AsJson,
    Assignments,
    CellName,
    ManyStudies,
    OneProcess,
    OneStudy,
    Out,
    PaperChanges,
    Quick,
    Recorded,
    RecordedUnwatched,
    Recording,
    Runs,
    Seed,
    SettingChanges,
    TaskName,
    check_engine,
    parse_assignments,
    split,
    stopped,
    tell,
)
from deepmemory.lab.settings import (
    CELLS,
    LANGUAGES,
    PAPER_TASKS,
    PIXELS,
    SYNTHETIC,
    TASKS,
    Launcher,
    Machine,
    Setting,
    change,
    check_choice,
    parse,
)

SAVED = "every finished epoch is saved"


def paper(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="TASK", help=", ".join(PAPER_TASKS))] = None,
    *,
    cells: Annotated[
        str | None, typer.Option(help=f"{', '.join(CELLS)}, dmu-c, separated by commas; default: those of the paper")
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="polymusic, natlang, translation: 1, 2, 5 and 10, separated by commas; default: all"),
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help=f"translation: {', '.join(LANGUAGES)}, separated by commas; default: all")
    ] = None,
    pixels: Annotated[
        str | None, typer.Option(help=f"pixel-mnist: {', '.join(PIXELS)}, separated by commas; default: both")
    ] = None,
    quick: Quick = False,
    runs: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RUNS, help="runs per cell, side by side; default: as many as in the paper"),
    ] = None,
    seed: Seed = 0,
    changes: PaperChanges,
    assignments: Assignments = None,
    machine: AnyMachine,
    launcher: ManyStudies,
    recording: Recorded,
) -> None:
    """Reproduce the paper's experiments with the paper's settings.

    Resumes where an earlier command stopped, writes the report and prints its results next to the paper's.
    """
    from deepmemory.lab import paper as published

    chosen = [check_choice("task", task, PAPER_TASKS) for task in tasks or PAPER_TASKS]
    selected = selection(chosen, cells=cells, depths=depths, pair=pair, pixels=pixels, quick=quick)
    settings = with_data(changed(selected, changes | parse_assignments(assignments)), machine.data)
    usual = {True: published.RUNS, False: published.REAL_RUNS}
    groups = [
        ([one for one in settings if (one.task in SYNTHETIC) is synthetic], published.QUICK_RUNS if quick else default)
        for synthetic, default in usual.items()
    ]
    counted = [(of_kind, runs or default) for of_kind, default in groups]
    train_and_report(counted, chosen, seed=seed, machine=machine, launcher=launcher, recording=recording)


def beyond(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help=", ".join(EXPERIMENTS))] = None,
    *,
    parts: Annotated[
        str | None,
        typer.Option(
            help="only these parts of an experiment, separated by commas: "
            + "; ".join(f"{name}: {', '.join(one.parts)}" for name, one in EXPERIMENTS.items())
        ),
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="only these kinds of model, separated by commas, such as residual,dmu,gru")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few small studies that train in minutes on a CPU")] = False,
    runs: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RUNS, help="runs per study; default: as many as the experiment has"),
    ] = None,
    seed: Seed = 0,
    assignments: Assignments = None,
    machine: AnyMachine,
    launcher: ManyStudies,
    recording: RecordedUnwatched,
) -> None:
    """Run experiments beyond the paper.

    Resumes where an earlier command stopped, writes the report and prints the results.
    """
    from deepmemory.lab import beyond as further
    from deepmemory.lab.beyond.rates import to_search

    chosen = list(names or EXPERIMENTS)
    selected = further.selection(chosen, split(parts) if parts else None, split(kinds) if kinds else None, quick)
    available = with_data([setting for settings in selected.values() for setting in settings], machine.data)
    trained = dict(zip(available, changed(available, parse_assignments(assignments)), strict=True))
    how: dict[str, Any] = {"seed": seed, "machine": machine, "launcher": launcher, "recording": recording}
    groups, failed = [], list[str]()
    for name, settings in selected.items():
        # A change can make studies equal, such as those at several rates.
        studies = list(dict.fromkeys(trained[setting] for setting in settings if setting in trained))
        all_runs, few = runs or (1 if quick else EXPERIMENTS[name].runs), EXPERIMENTS[name].search_runs
        searched = to_search(studies, EXPERIMENTS[name].part_of) if all_runs > few else []
        if searched:  # with a few runs at every rate; the best rates get the rest
            failed += train_groups([(searched, few)], **how)
            best = best_of(name, searched, recording.out)
            studies = [setting for setting in studies if setting in best or setting not in searched]
        groups.append((studies, all_runs))
    train_and_report(groups, chosen, failed=failed, **how)


def best_of(name: str, settings: Sequence[Setting], out: Path) -> list[Setting]:
    """The settings of an experiment that were best on validation, one for each model that has been trained.

    There is none for a model whose runs at its best rate all diverged.
    """
    from deepmemory.lab.beyond.rates import best_studies
    from deepmemory.lab.records import DIVERGED, Records

    if not settings:
        return []
    records = Records(out)
    studies = [study for setting in settings if (study := records.study(setting.key)) and study.runs]
    records.close()
    best = [
        study.setting.key
        for study in best_studies(studies, EXPERIMENTS[name].part_of)
        if any(run.state != DIVERGED for run in study.runs)
    ]
    return [setting for setting in settings if setting.key in best]


def changed(settings: Sequence[Setting], given: Mapping[str, str]) -> list[Setting]:
    """Apply the given values to the settings that have them; raise for a value that none of the settings has."""
    for name in given:
        if settings and not any(setting.has(name) for setting in settings):
            raise ValueError(f"none of the selected studies has the setting {name}; leave it out")
    return [
        change(setting, {name: value for name, value in given.items() if setting.has(name)}) for setting in settings
    ]


def train_and_report(
    groups: Sequence[tuple[Sequence[Setting], int]],
    shown: Sequence[str],
    *,
    seed: int,
    machine: Machine,
    launcher: Launcher,
    recording: Recording,
    failed: Sequence[str] = (),
) -> None:
    """Train settings with a number of runs each; then write the report and print what it says about ``shown``.

    ``failed`` names studies that failed before.
    """
    from deepmemory.lab.training.distributed import is_first_process

    failed = [*failed, *train_groups(groups, seed=seed, machine=machine, launcher=launcher, recording=recording)]
    if not is_first_process():
        return
    warn_of_divergence([setting for settings, _ in groups for setting in settings], recording.out)
    results.show_report(recording.out, tasks=shown, as_json=recording.json)
    tell_failed(failed)


def train_groups(
    groups: Sequence[tuple[Sequence[Setting], int]],
    *,
    seed: int,
    machine: Machine,
    launcher: Launcher,
    recording: Recording,
) -> list[str]:
    """Train settings with a number of runs each; returns a line for each study that failed."""
    failed = []
    for settings, runs in groups:
        seeds = range(seed, seed + runs)
        failed += train_studies(settings, seeds=seeds, machine=machine, launcher=launcher, recording=recording)
    return failed


def train(
    task: TaskName,
    *,
    cell: CellName = "dmu",
    quick: Quick = False,
    runs: Runs = 1,
    seed: Seed = 0,
    changes: SettingChanges,
    assignments: Assignments = None,
    machine: AnyMachine,
    launcher: OneStudy,
    recording: Recorded,
) -> None:
    """Train one study. Settings that are not given have the paper's values."""
    from deepmemory.lab.training.distributed import is_first_process

    setting = papers_setting(task, cell, changes | parse_assignments(assignments), quick=quick)
    seeds, out = range(seed, seed + runs), recording.out
    failed = train_studies([setting], seeds=seeds, machine=machine, launcher=launcher, recording=recording)
    if not is_first_process():
        return
    if not recording.json:
        tell_result(setting, out)
        print(f"recorded in {out}; for figures and tables: dmu report --out {shlex.quote(str(out))}")
    tell_failed(failed)
    if warn_of_divergence([setting], out):
        sys.exit(1)


def sweep(
    task: TaskName,
    *,
    cell: CellName = "dmu",
    space: Annotated[
        str,
        typer.Option(help="search space: lr=log:1e-4..1e-1,batch=16|32|64, or a named space such as paper-grid"),
    ] = "paper-random",
    assignments: Assignments = None,
    sampler: Annotated[str, typer.Option(help="tpe, random or grid")] = "tpe",
    pruner: Annotated[str, typer.Option(help="rule that stops bad trials early: median, halving or none")] = "median",
    trials: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RUNS, help="number of trials, including earlier ones; default: the grid, or 50"),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="postgresql://... to share a search between machines; default: SQLite in OUT")
    ] = None,
    search_seed: Annotated[int, typer.Option(min=0, help="random seed of the sampler")] = 0,
    runs: Runs = 1,
    seed: Seed = 0,
    machine: OneProcess,
    out: Out = RUNS,
    as_json: AsJson = False,
) -> None:
    """Search hyperparameters.

    The same command resumes a search. Several processes, also on several machines, can share the work of one search.
    """
    from deepmemory.lab.scale import search
    from deepmemory.lab.training.progress import JsonLines, PlainLines
    from deepmemory.lab.writing import without_links

    check_engine(machine.engine)
    try:
        study = search.run_search(
            papers_setting(task, cell, parse_assignments(assignments)),
            search.parse_space(space),
            seeds=range(seed, seed + runs),
            out=out,
            machine=machine,
            display=JsonLines() if as_json else PlainLines(),
            sampler=sampler,
            pruner=pruner,
            trials=trials,
            storage=storage,
            search_seed=search_seed,
        )
    except KeyboardInterrupt:
        stopped(SAVED)
    rows = search.table(study)
    page = search.write_page([study], without_links(out, "report"))
    best = ["  ".join(f"{name} {search.short(value)}" for name, value in row.items()) for row in rows[:10]]
    event = {"event": "sweep", "name": study.study_name, "page": str(page), "trials": rows}
    tell(as_json, event, "\n".join([*best, f"page: {page.resolve()}"]))
    if failed := search.failed_trials(study):
        named = ", ".join(f"trial {trial.number} {trial.params}" for trial in failed)
        print(f"given up after several attempts: {named}", file=sys.stderr)
        sys.exit(1)


def selection(
    tasks: Sequence[str],
    *,
    cells: str | None = None,
    depths: str | None = None,
    pair: str | None = None,
    pixels: str | None = None,
    quick: bool = False,
) -> list[Setting]:
    """The paper's settings that match the choices, which are separated by commas, in the paper's order.

    A choice that is left out means everything that the paper trains; with ``quick``, one small DMU for each task.
    """
    from deepmemory.lab import paper as published

    def chosen(name: str, given: str | None, everything: Sequence[str], first: Sequence[str]) -> list[str]:
        if given is None:
            return list(first if quick else everything)
        return [check_choice(name, value.lower(), tuple(everything)) for value in split(given)]

    of_cells = chosen("cell", cells, published.KINDS, ["dmu"])
    of_depths = chosen("depth", depths, [str(depth) for depth in published.DEPTHS], ["1"])
    of_languages = chosen("pair", pair, LANGUAGES, LANGUAGES[:1])
    of_pixels = chosen("pixels", pixels, PIXELS, PIXELS[:1])
    all_cells = cells is None and not quick
    of_units = published.UNITS[:1] if quick else published.UNITS
    found = [
        setting
        for setting in published.settings(tasks, None if all_cells else of_cells, list(map(int, of_depths)), of_units)
        if (setting.task != "translation" or setting.language in of_languages)
        and (setting.task != "pixel-mnist" or setting.pixels in of_pixels)
    ]
    return [published.quick(setting) for setting in found] if quick else found


def papers_setting(task: str, cell: str, changes: Mapping[str, str], quick: bool = False) -> Setting:
    """The paper's setting of a task and cell, or that of an experiment beyond it, with some values changed.

    A task that neither of them has starts from the defaults of :class:`Setting`. With real data, and for a DMU beyond
    the paper, ``depth`` selects one of the settings instead, because the width changes with it.
    """
    from deepmemory.lab import beyond as further
    from deepmemory.lab import paper as published

    check_choice("task", task, TASKS)
    rest = dict(changes)
    by_depth = task in published.REAL_RECIPES or task in further.OF_TASK
    depth = parse("depth", int, rest.pop("depth", 1)) if by_depth else 1
    if task in further.OF_TASK:
        usual = further.setting(task, cell, depth, quick)
    elif task not in PAPER_TASKS:
        usual = change(Setting(task), {"cell": cell})
    else:
        usual = published.setting(task, cell, depth)
        usual = published.quick(usual) if quick else usual
    setting = change(usual, rest)
    setting.check_has(rest)
    return setting


def training_command(setting: Setting, seed: int) -> str:
    """The command that trains this setting."""
    usual = papers_setting(setting.task, setting.cell, {})

    def text(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    changed = [
        f"--set {of.name}={shlex.quote(text(getattr(setting, of.name)))}"
        for of in fields(setting)
        if getattr(setting, of.name) != getattr(usual, of.name)
    ]
    return " ".join([f"dmu train {setting.task} --cell {setting.cell} --seed {seed}", *changed])


def train_studies(
    settings: Sequence[Setting],
    *,
    seeds: Sequence[int],
    machine: Machine,
    launcher: Launcher,
    recording: Recording,
) -> list[str]:
    """Train with a display that fits the output; returns a line for each study that failed."""
    from deepmemory.lab.scale.launch import launch
    from deepmemory.lab.training.progress import choose_display
    from deepmemory.lab.training.trackers import open_tracker
    from deepmemory.lab.use import inspection

    check_engine(machine.engine, needed_here=launcher.on == "local")
    if not settings:
        return []
    if len(settings) > 1 and not recording.json:
        runs = f"{len(seeds)} run{'s' if len(seeds) > 1 else ''}"
        print(f"{len(settings)} studies of {runs}; Ctrl-C stops, and the same command resumes", flush=True)
    display = choose_display(recording.json)
    try:
        return launch(
            settings,
            seeds,
            out=recording.out,
            machine=machine,
            launcher=launcher,
            display=display,
            track=open_tracker(recording.tracker, recording.out),
            watch=inspection.watch if recording.watch == "gradients" else None,
        )
    except KeyboardInterrupt:
        display.close()
        stopped(SAVED)
    finally:
        display.close()


def tell_failed(failed: Sequence[str]) -> None:
    """Name the studies that failed and make the command fail, after everything else is done."""
    if failed:
        told = "failed; everything else is recorded, and the same command tries these again:"
        print(told, *failed, sep="\n  ", file=sys.stderr)
        sys.exit(1)


def tell_result(setting: Setting, out: Path) -> None:
    """Print the scores of a study's best epoch on validation data."""
    from deepmemory.lab.records import Records

    with Records(out) as records:
        study = records.study(setting.key)
    epochs = [(run.at_epoch(number), number, run) for run in (study.runs if study else ()) for number in run.numbers]
    finite = [one for one in epochs if math.isfinite(one[0]["valid_loss"])]
    if finite:
        values, number, run = min(finite, key=lambda one: one[0]["valid_loss"])
        tested = run.test or {name.removeprefix("test_"): of for name, of in values.items() if name.startswith("test_")}
        test = "".join(f", test {name} {value:.4g}" for name, value in tested.items())
        print(f"best epoch: {number} of seed {run.seed}: validation loss {values['valid_loss']:.4g}{test}")


def warn_of_divergence(settings: Sequence[Setting], out: Path) -> bool:
    """Name the settings whose loss became nan or inf; return whether every run of a setting diverged."""
    from deepmemory.lab.records import DIVERGED, Records

    records = Records(out)
    hopeless = False
    for study in (records.study(setting.key) for setting in settings):
        states = [run.state for run in study.runs] if study else []
        if study and (diverged := states.count(DIVERGED)):
            hopeless |= diverged == len(states)
            print(
                f"{study.setting.task} {study.setting.cell}: {diverged} of {len(states)} runs diverged: their loss "
                f"became nan or inf. A learning rate below {study.setting.lr:g} may help (--set lr=...)",
                file=sys.stderr,
            )
    records.close()
    return hopeless
