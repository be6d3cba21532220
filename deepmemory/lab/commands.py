"""What the commands do, once the command line has been read."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from deepmemory.lab import paper as published
from deepmemory.lab import records
from deepmemory.lab.settings import (
    CELLS,
    LANGUAGES,
    OWNERS,
    PIXELS,
    SYNTHETIC,
    TASKS,
    Machine,
    Setting,
    change,
    check_choice,
)
from deepmemory.lab.training.progress import choose_display
from deepmemory.lab.training.trackers import open_tracker
from deepmemory.lab.writing import put, without_links

if TYPE_CHECKING:
    from deepmemory.lab.data.inventory import Finding


def guard(app: Callable[[], Any]) -> None:
    """Run the command line; a mistake, or a machine that fails, gets one line that says what is wrong."""
    from deepmemory.lab.training.distributed import ProcessLost

    try:
        app()
    except ProcessLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # whatever else is done at the end of a process would wait for the one that is gone
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
        print(
            "error: the GPU or the machine has too little memory for this. Train fewer runs at once: --runs 10, then "
            "the same with --seed 10; or keep less: --recompute; or take smaller batches. "
            "Every finished epoch is saved",
            file=sys.stderr,
        )
        sys.exit(2)


def memory_ran_out(error: BaseException | None) -> bool:
    """Whether a GPU or a machine without room is at the bottom of an error."""
    import torch

    if error is None:
        return False
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
    return full or memory_ran_out(error.__cause__)


WATCHES = ("none", "gradients")


class Eyes(NamedTuple):
    """What else is written down while studies train."""

    tracker: str = "none"
    watch: str = "none"


class Cluster(NamedTuple):
    """Who trains; all but the first two concerns Ray alone."""

    on: str = "here"
    at_once: int = 1  # studies on this machine's device
    address: str | None = None
    group: int = 0  # runs in one task at most
    cpus: float = 1
    gpus: float = 0


class Choice(NamedTuple):
    """Which of the paper's settings, as given on the command line: names and numbers between commas.

    What is left out is everything the paper trains, or, quickly, one DMU for each task.
    """

    cells: str | None = None
    depths: str | None = None
    pair: str | None = None
    pixels: str | None = None
    quick: bool = False

    def settings(self, tasks: Sequence[str]) -> list[Setting]:
        """In the paper's order."""

        def chosen(name: str, given: str | None, everything: Sequence[str], first: Sequence[str]) -> list[str]:
            if given is None:
                return list(first if self.quick else everything)
            return [check_choice(name, value.lower(), tuple(everything)) for value in split(given)]

        cells = chosen("cell", self.cells, published.KINDS, ["dmu"])
        depths = chosen("depth", self.depths, [str(depth) for depth in published.DEPTHS], ["1"])
        languages = chosen("pair", self.pair, LANGUAGES, LANGUAGES[:1])
        pixels = chosen("pixels", self.pixels, PIXELS, PIXELS[:1])
        papers = self.cells is None and not self.quick
        found = [
            setting
            for setting in published.settings(tasks, None if papers else cells, [int(depth) for depth in depths])
            if (setting.task != "translation" or setting.language in languages)
            and (setting.task != "pixel-mnist" or setting.pixels in pixels)
        ]
        return [published.quick(setting) for setting in found] if self.quick else found


def machine(
    device: str,
    engine: str,
    graph: bool,
    threads: int,
    data: Path | None = None,
    devices: int = 1,
    nodes: int = 1,
    recompute: bool = False,
) -> Machine:
    """Where to compute; an engine that does not exist is refused before anything is made."""
    import deepmemory as dm

    check_choice("engine", engine, ("auto", *dm.engines()))
    return Machine(device, engine, graph, threads, devices, nodes, recompute, None if data is None else str(data))


def paper(
    tasks: Sequence[str] | None,
    choice: Choice,
    changes: Mapping[str, Any],
    assignments: Sequence[str] | None,
    runs: int | None,
    seed: int,
    machine: Machine,
    out: Path,
    eyes: Eyes,
    as_json: bool,
    cluster: Cluster | None = None,
) -> None:
    """Train the paper's settings, write the report and print it."""
    from deepmemory.lab.training.studies import is_follower

    chosen = [check_choice("task", task, TASKS) for task in tasks or TASKS]
    given = {name: value for name, value in changes.items() if value is not None} | parse_assignments(assignments)
    settings = [
        change(setting, {name: value for name, value in given.items() if concerns(name, setting)})
        for setting in choice.settings(chosen)
    ]
    ready = with_data(settings, machine.data)
    lost = []
    for synthetic in (True, False):
        of_kind = [setting for setting in ready if (setting.task in SYNTHETIC) is synthetic]
        count = runs or (published.QUICK_RUNS if choice.quick else published.RUNS if synthetic else published.REAL_RUNS)
        if of_kind:
            lost += carry_out(of_kind, count, seed, machine, out, eyes, as_json, cluster)
    if is_follower(ready, machine):
        return
    tell_diverged(ready, out)
    report(out, None, as_json, tasks=chosen)
    tell_lost(lost)


def with_data(settings: Sequence[Setting], data: str | None) -> list[Setting]:
    """The settings whose data is here; says what is left out, and raises if that is everything."""
    from deepmemory.lab.data import inventory
    from deepmemory.lab.tasks import data_of

    wanted = {setting: data_of(setting) for setting in settings}
    missing = {name for name in wanted.values() if name and not inventory.where(inventory.dataset(name), data)}
    ready = [setting for setting, name in wanted.items() if name not in missing]
    for name in sorted(missing):
        print(f"left out: the data {name} is not here; dmu data fetch {name} brings it", file=sys.stderr)
    if not ready:
        raise FileNotFoundError("nothing left to train; fetch the data, or say where it is with --data")
    return ready


def train(
    task: str,
    cell: str,
    quick: bool,
    changes: Mapping[str, Any],
    runs: int,
    seed: int,
    machine: Machine,
    out: Path,
    eyes: Eyes,
    as_json: bool,
    cluster: Cluster | None = None,
) -> None:
    """Train one setting and print what came out."""
    from deepmemory.lab.training.studies import is_follower

    given = {name: value for name, value in changes.items() if value is not None}
    setting = published.setting(task, cell, given.pop("depth", 1) if task in published.REAL_DATA else 1)
    setting = change(published.quick(setting) if quick else setting, given)
    lost = carry_out([setting], runs, seed, machine, out, eyes, as_json, cluster)
    if is_follower([setting], machine):
        return
    if not as_json:
        print(f"recorded in {out}; for the page: dmu report --out {out}")
    tell_lost(lost)
    if tell_diverged([setting], out):
        sys.exit(1)


def report(out: Path, to: Path | None, as_json: bool, tasks: Sequence[str] = TASKS) -> None:
    """Write pages and figures and say what they say."""
    from deepmemory.lab.report import write_report
    from deepmemory.lab.report.text import print_report

    if (out / "sweeps.sqlite").exists():
        report_sweeps(out, to, as_json)
        if not (out / "records.sqlite").exists():
            return
    written = write_report(out, to)
    if as_json:
        places = {"page": str(written.page), "markdown": str(written.markdown)}
        print(json.dumps({"event": "report", **places, "pictures": written.as_data()}))
    else:
        print_report([picture for picture in written.pictures if picture.task in tasks])
        print(f"page: {written.page.resolve()}")


def report_sweeps(out: Path, to: Path | None, as_json: bool) -> None:
    """Write the page of the searches, where Optuna can read them."""
    try:
        from deepmemory.lab.scale import search
    except ModuleNotFoundError as error:
        print(f"left out: the searches in {out}; {error}", file=sys.stderr)
        return

    page = search.write_page(search.sweeps_in(search.default_storage(out)), to or without_links(out, "report"))
    print(json.dumps({"event": "sweeps", "page": str(page)}) if as_json else f"searches: {page.resolve()}")


def merge(sources: Sequence[Path], out: Path) -> None:
    """Join folders."""
    merged = records.merge(sources, out)
    studies = merged.studies()
    merged.close()
    print(f"{out}: {len(studies)} studies, {sum(len(study.runs) for study in studies)} runs")


def data_list(data: Path | None, as_json: bool) -> None:
    """Say what data there is and where it lies."""
    from dataclasses import asdict

    from deepmemory.lab.data import inventory

    for entry in inventory.chosen(None):
        place = inventory.where(entry, data)
        print(json.dumps({**asdict(entry), "where": place}) if as_json else inventory.describe(entry, data) + "\n")


def data_fetch(names: list[str] | None, data: Path | None, as_json: bool) -> None:
    """Bring what is not here into the user's cache; what fails does not keep the rest back."""
    from deepmemory.lab.data import inventory
    from deepmemory.lab.data.fetching import fetch_missing

    failed = 0
    try:
        for entry in inventory.chosen(names):
            for finding in fetch_missing(entry, data, bar=not as_json):
                tell_finding(finding, as_json)
                failed += finding.state == "failed"
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    if failed:
        sys.exit(1)


def data_check(names: list[str] | None, data: Path | None, as_json: bool) -> None:
    """Read and count everything that is here; what is missing counts as a fault only if it was named."""
    from deepmemory.lab.data import inventory

    findings = [inventory.check(entry, data) for entry in inventory.chosen(names)]
    for finding in findings:
        tell_finding(finding, as_json)
    if any(f.state == "damaged" or (names and f.state == "missing") for f in findings):
        sys.exit(1)


def tell_finding(finding: Finding, as_json: bool) -> None:
    """One line on one dataset or file."""
    if as_json:
        print(json.dumps({"event": "data", "name": finding.name, "state": finding.state, "text": finding.text}))
    else:
        print(f"{finding.name}: {finding.state}; {finding.text}")


def bench(
    device: str,
    shapes: str | None,
    precisions: str,
    cells: str,
    seconds: float,
    growth: bool,
    loop: bool,
    out: Path,
    engines: str | None = None,
) -> None:
    """Time our engines and their peers, and leave numbers, picture and table in ``out``."""
    import torch

    from deepmemory.lab.bench import speed

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("device", device, ("cpu", "cuda"))
    everything = speed.GPU_SHAPES if device == "cuda" else speed.CPU_SHAPES
    names = split(shapes) if shapes else list(everything)
    for name in names:
        check_choice("shape", name, tuple(speed.SHAPES))
    modes = [check_choice("precision", name, speed.PRECISIONS) for name in split(precisions)]
    layers = [check_choice("cell", name.lower(), CELLS).upper() for name in split(cells)]
    ours = [check_choice("engine", name, speed.NAMES) for name in split(engines)] if engines else speed.NAMES
    file = out / f"bench-{device}.json"
    result = speed.bench(device, names, modes, layers, seconds, growth, loop, file, engines=ours)
    speed.draw(result, file.with_suffix(".svg"))
    print(speed.speed_table(result))
    print(f"numbers: {file}\npicture: {file.with_suffix('.svg')}")


def bench_studies(tasks: str, machine: Machine, out: Path) -> None:
    """Time a few steps of the paper's studies as a Python loop, for the report on the records in ``out``."""
    from deepmemory.lab.bench import loop_time

    chosen = [check_choice("task", task, TASKS) for task in split(tasks)]
    print(f"written: {loop_time.write(with_data(published.settings(chosen), machine.data), machine, out)}")


def sweep(
    task: str,
    cell: str,
    space: str,
    assignments: Sequence[str] | None,
    sampler: str,
    pruner: str,
    trials: int | None,
    storage: str | None,
    search_seed: int,
    runs: int,
    seed: int,
    machine: Machine,
    out: Path,
    as_json: bool,
) -> None:
    """Search, then print the best trials and write the page of the search."""
    from deepmemory.lab.scale import search
    from deepmemory.lab.training.progress import JsonLines, PlainLines

    given = parse_assignments(assignments)
    depth = int(given.pop("depth", "1")) if task in published.REAL_DATA else 1
    base = change(published.setting(task, cell, depth), given)
    display = JsonLines() if as_json else PlainLines()
    try:
        study = search.run_sweep(
            base,
            search.parse_space(space),
            range(seed, seed + runs),
            out,
            machine,
            display,
            check_choice("sampler", sampler, search.SAMPLERS),
            check_choice("pruner", pruner, search.PRUNERS),
            trials,
            storage,
            search_seed,
        )
    except Exception as error:
        if (said := search.storage_failure(error)) is None:
            raise
        raise ValueError(
            f"the search's storage cannot be used: {said}. When the cause is gone, the same command goes on"
        ) from error
    except KeyboardInterrupt:
        tell_stopped()
    rows = search.table(study)
    page = search.write_page([study], without_links(out, "report"))
    if as_json:
        print(json.dumps({"event": "sweep", "name": study.study_name, "page": str(page), "trials": rows}))
    else:
        for row in rows[:10]:
            print("  ".join(f"{name} {search.short(value)}" for name, value in row.items()))
        print(f"page: {page.resolve()}")
    if lost := search.tally(study.get_trials(deepcopy=False))[2]:
        print(f"given up: {', '.join(f'trial {trial.number} {trial.params}' for trial in lost)}", file=sys.stderr)
        sys.exit(1)


def export(checkpoint: Path, format: str, run: int | None, to: Path | None, data: Path | None, as_json: bool) -> None:
    """Write one run's network in a format that others read."""
    import logging

    from safetensors import SafetensorError

    from deepmemory.export import FORMATS
    from deepmemory.lab.use import exporting
    from deepmemory.lab.use.loading import load_model

    check_choice("format", format, tuple(FORMATS))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision, which nobody needs, is missing
    model = load_model(checkpoint, run, data)
    study = (checkpoint if checkpoint.is_dir() else checkpoint.parent).resolve()
    path = to or without_links(study.parents[1], "export", f"{study.name}-{model.seed}.{format}")
    if path.exists() and not path.is_file():  # a device, say, which a new file would take the place of
        raise ValueError(f"--to {path} is no file that can be written; give the name of a new one")
    try:
        inputs = exporting.save(model, path, format)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    if as_json:
        print(json.dumps({"event": "export", "path": str(path), "seed": model.seed, "inputs": list(inputs)}))
    else:
        print(f"{path}: {model.setting.cell} on {model.setting.task}, seed {model.seed}; takes {', '.join(inputs)}")


def compose(
    checkpoint: Path,
    run: int | None,
    tune: int | None,
    source: Path | None,
    given: int,
    steps: int,
    temperature: float,
    tempo: float,
    seed: int,
    to: Path,
    data: Path | None,
    as_json: bool,
) -> None:
    """Go on with a tune and write it as MIDI and as sound."""
    from deepmemory.lab.use import decoding, sound
    from deepmemory.lab.use.loading import load_model

    if tune is not None and source is not None:
        raise ValueError("a tune begins with --tune or with --from; give one of them")
    model = load_model(checkpoint, run, data)
    per_beat = sound.frames_per_beat(model.setting.music)
    whole = sound.read_roll(source, per_beat) if source else decoding.piece(model, tune or 0)
    begun = whole[: given or None]
    roll = decoding.continue_tune(model, begun, steps, temperature, seed)
    to.parent.mkdir(parents=True, exist_ok=True)
    written = {to.with_suffix(".mid"): sound.midi, to.with_suffix(".wav"): sound.wav}
    for path, make in written.items():
        path.write_bytes(make(roll, per_beat, tempo))
    frames = {"given": len(begun), "composed": len(roll) - len(begun), "notes": len(sound.notes_of(roll))}
    if as_json:
        print(json.dumps({"event": "compose", "run": model.seed, "files": [str(path) for path in written], **frames}))
    else:
        told = "{given} frames given, {composed} composed, {notes} notes".format(**frames)
        print(f"{', '.join(map(str, written))}: {told}")


def translate(
    checkpoint: Path,
    text: str | None,
    run: int | None,
    beam: int,
    length_power: float,
    bleu: bool,
    limit: int,
    data: Path | None,
    as_json: bool,
) -> None:
    """Say a sentence in English, or measure how well a whole test split is said."""
    from deepmemory.lab.use import decoding
    from deepmemory.lab.use.loading import load_model

    if (text is None) != bleu:
        raise ValueError("translate takes a sentence or --bleu, one of the two")
    model = load_model(checkpoint, run, data)
    if text is not None:
        said, unknown = decoding.translate(model, text, beam, length_power)
        tell_unknown(unknown, "left out")
        print(json.dumps({"event": "translate", "text": said, "unknown": unknown}) if as_json else said)
        return
    scores = decoding.bleu(model, beam, limit, length_power)
    if as_json:
        print(json.dumps({"event": "bleu", "run": model.seed, "width": beam, **scores._asdict()}))
    else:
        print(f"BLEU on {scores.sentences} test sentences of run {model.seed}: greedy {scores.greedy:.2f}", end="")
        print("" if scores.beam is None else f", beam of {beam} {scores.beam:.2f}", f" ({scores.signature})", sep="")


def generate(
    checkpoint: Path,
    text: str,
    run: int | None,
    words: int,
    temperature: float,
    top: int,
    seed: int,
    data: Path | None,
    as_json: bool,
) -> None:
    """Go on with a text."""
    from deepmemory.lab.use import decoding
    from deepmemory.lab.use.loading import load_model

    said, unknown = decoding.continue_text(load_model(checkpoint, run, data), text, words, temperature, top, seed)
    tell_unknown(unknown, f"read as {decoding.UNKNOWN}")
    print(json.dumps({"event": "generate", "text": said, "unknown": unknown}) if as_json else said)


def tell_unknown(words: Sequence[str], what: str) -> None:
    """Words that a model never saw."""
    if words:
        print(f"not in the training text, {what}: {', '.join(words)}", file=sys.stderr)


def inspect(checkpoint: Path, run: int | None, to: Path | None, data: Path | None, as_json: bool) -> None:
    """Say what is inside a model; pictures and numbers go to a folder."""
    from deepmemory.lab.use import inspection
    from deepmemory.lab.use.loading import load_model

    found = inspection.inspect(load_model(checkpoint, run, data))
    told = {"event": "inspect", **inspection.as_data(found)}
    if to is not None:
        told["pictures"] = [str(path) for path in inspection.draw(found, to)]
        put(to / "inspection.json", f"{json.dumps(told)}\n".encode())
    if as_json:
        print(json.dumps(told))
    else:
        inspection.show(found)
        if to is not None:
            print(f"pictures: {', '.join(told['pictures'])}; numbers: {to / 'inspection.json'}")


def play(
    port: int, out: Path, translation: Path | None, music: Path | None, data: Path | None, open_page: bool
) -> None:
    """Serve the page to this machine until Ctrl-C."""
    from deepmemory.lab.use.play.checkpoints import offer
    from deepmemory.lab.use.play.server import Server, open_in_browser

    with Server(port, offer("translation", translation, out, data), offer("polymusic", music, out, data)) as server:
        print(f"page: {server.address} (Ctrl-C ends it)", flush=True)
        if open_page:
            open_in_browser(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)


def split(names: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in names.split(",")]


def carry_out(
    settings: Sequence[Setting],
    runs: int,
    seed: int,
    machine: Machine,
    out: Path,
    eyes: Eyes,
    as_json: bool,
    cluster: Cluster | None = None,
) -> list[str]:
    """Train with a display that fits the output, here or on a cluster; says what was given up."""
    from deepmemory.lab.training.studies import Watch, is_follower, run_studies
    from deepmemory.lab.use import inspection

    track = open_tracker("none" if is_follower(settings, machine) else eyes.tracker, out)
    watch: Watch | None = None
    if check_choice("--watch", eyes.watch, WATCHES) == "gradients":
        watch = inspection.watch
    display = choose_display(as_json)
    seeds = range(seed, seed + runs)
    lost: list[str] = []
    try:
        cluster = cluster or Cluster()
        if cluster.at_once > 1 and (cluster.on != "here" or machine.devices * machine.nodes > 1):
            raise ValueError("--at-once shares one device; leave it out with --on ray, --devices and --nodes")
        if check_choice("--on", cluster.on, ("here", "ray")) == "ray":
            if watch is not None:
                raise ValueError("--watch needs the weights here; leave it out with --on ray")
            from deepmemory.lab.scale.ray_cluster import Share, run_on_ray

            share = Share(cluster.group, cluster.cpus, cluster.gpus or float(machine.device.startswith("cuda")))
            lost = run_on_ray(settings, seeds, out, machine, display, track, cluster.address, share)
        elif cluster.at_once > 1:
            from deepmemory.lab.scale.concurrent import run_at_once

            lost = run_at_once(cluster.at_once, settings, seeds, out, machine, display, track, watch)
        else:
            run_studies(settings, seeds, out, machine, display, track, watch)
    except KeyboardInterrupt:
        display.close()
        tell_stopped()
    finally:
        display.close()
    return lost


def tell_lost(lost: Sequence[str]) -> None:
    """Whatever was given up makes the command fail, when all else is done."""
    if lost:
        told = "given up; the rest is recorded, and the same command tries these again:"
        print(told, *lost, sep="\n  ", file=sys.stderr)
        sys.exit(1)


def tell_stopped() -> NoReturn:
    """The command ends by hand, and says how it goes on."""
    again = " ".join(["dmu", *(shlex.quote(argument) for argument in sys.argv[1:])])
    print(f"\nstopped; every finished epoch is saved. To go on: {again}", file=sys.stderr)
    sys.exit(130)


def tell_diverged(settings: Sequence[Setting], out: Path) -> bool:
    """Say whose loss became nan or inf; true where that happened to every run of a setting."""
    opened = records.Records(out)
    hopeless = False
    for study in (opened.study(setting.key) for setting in settings):
        states = [run.state for run in study.runs] if study else []
        if study and (lost := states.count(records.DIVERGED)):
            hopeless |= lost == len(states)
            print(
                f"{study.setting.task} {study.setting.cell}: {lost} of {len(states)} runs diverged, their loss became "
                f"nan or inf; recorded as such. A learning rate below {study.setting.lr:g} may help (--set lr=...)",
                file=sys.stderr,
            )
    opened.close()
    return hopeless


def concerns(name: str, setting: Setting) -> bool:
    """A change to what belongs to one cell or task leaves the others as they are."""
    if name not in OWNERS:
        return True
    owner, values = OWNERS[name]
    return getattr(setting, owner) in values


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE, several times."""
    parsed = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, got {assignment!r}")
        parsed[name.strip().replace("-", "_")] = value
    return parsed
