"""The command ``dmu``: signatures and help. What they do stands in :mod:`deepmemory.lab.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepmemory.lab import commands, paper
from deepmemory.lab.settings import HELP, LANGUAGES, LARGEST, PIXELS, TASKS
from deepmemory.lab.training.trackers import TRACKERS

app = typer.Typer(
    name="dmu",
    help="Trains with deepmemory, repeats the paper's experiments and shows what came out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

data_app = typer.Typer(help="Public data: what there is, fetching it, checking it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Out = Annotated[Path, typer.Option("--out", help="folder for everything that is written")]
MOST_RUNS = MOST_STEPS = 10**6
Runs = Annotated[int, typer.Option(min=1, max=MOST_RUNS, help="runs of each cell, side by side")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST, help="seed of the first run; the others count up from it")]
Device = Annotated[str, typer.Option(help=HELP["device"])]
Engine = Annotated[str, typer.Option(help=HELP["engine"])]
Graph = Annotated[bool, typer.Option("--graph/--no-graph", help=HELP["graph"])]
Threads = Annotated[int, typer.Option(min=0, max=10_000, help=HELP["threads"])]
TrackerName = Annotated[str, typer.Option("--tracker", help=f"also log to: {', '.join(TRACKERS)}")]
Data = Annotated[Path | None, typer.Option("--data", help="folder of local copies; default: $DEEPMEMORY_DATA")]
DataNames = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="which; default: all")]
Devices = Annotated[int, typer.Option(min=1, max=1000, help=HELP["devices"])]
Nodes = Annotated[int, typer.Option(min=1, max=10_000, help=HELP["nodes"])]
Recompute = Annotated[bool, typer.Option("--recompute", help=HELP["recompute"])]
Quick = Annotated[bool, typer.Option("--quick", help="one small DMU that learns something in two minutes on a CPU")]
Checkpoint = Annotated[Path, typer.Argument(help="OUT/checkpoints/STUDY/runs-*.safetensors, or the study's folder")]
OneRun = Annotated[
    int | None, typer.Option("--run", min=0, help="seed of the run; default: the one with the least loss")
]
Temperature = Annotated[
    float, typer.Option(min=0, help="below 1 what is likely gets likelier; 0: always the likeliest")
]
DrawSeed = Annotated[int, typer.Option("--seed", min=0, help="another one draws something else")]
Json = Annotated[bool, typer.Option("--json", help="print JSON lines for machines")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="change any setting; repeatable")]
WatchName = Annotated[str, typer.Option("--watch", help=f"record more every few epochs: {', '.join(commands.WATCHES)}")]
AtOnce = Annotated[
    int, typer.Option(min=1, help="studies that train at the same time on the device, each in its own process")
]
On = Annotated[str, typer.Option("--on", help="who trains: here, or ray for a cluster")]
Address = Annotated[str | None, typer.Option(help="ray: of the cluster, or auto; left out: this machine alone")]
Group = Annotated[int, typer.Option(min=0, help="ray: runs in one task at most; 0: all on a GPU, 16 for each CPU")]
Cpus = Annotated[float, typer.Option(min=0, help="ray: CPUs for each task")]
Gpus = Annotated[float, typer.Option(min=0, help="ray: GPUs for each task, 0.5 for two tasks on one")]


@app.command("paper")
def paper_command(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help=", ".join(TASKS))] = None,
    cells: Annotated[
        str | None, typer.Option(help=f"of {', '.join(paper.KINDS)}, separated by commas; default: the paper's")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="music, language, translation: of 1, 2, 5, 10, separated by commas; default: all")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help=f"translation into English, from: {', '.join(LANGUAGES)}; default: all")
    ] = None,
    pixels: Annotated[
        str | None, typer.Option(help=f"pixel-mnist: {', '.join(PIXELS)}, separated by commas; default: both")
    ] = None,
    quick: Quick = False,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RUNS,
            help=f"of each cell, side by side; default: {paper.RUNS}, and {paper.REAL_RUNS} with real data",
        ),
    ] = None,
    seed: Seed = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help=HELP["epochs"])] = None,
    module_rate: Annotated[str | None, typer.Option(help=HELP["module_rate"])] = None,
    patience: Annotated[int | None, typer.Option(min=1, help=HELP["patience"])] = None,
    noise: Annotated[str | None, typer.Option(help=HELP["noise"])] = None,
    music: Annotated[str | None, typer.Option(help=HELP["music"])] = None,
    release: Annotated[str | None, typer.Option(help=HELP["release"])] = None,
    pairs: Annotated[str | None, typer.Option(help=HELP["pairs"])] = None,
    feedback: Annotated[str | None, typer.Option(help=HELP["feedback"])] = None,
    set_: Set = None,
    data: Data = None,
    device: Device = "auto",
    engine: Engine = "auto",
    graph: Graph = True,
    threads: Threads = 0,
    devices: Devices = 1,
    nodes: Nodes = 1,
    recompute: Recompute = False,
    out: Out = Path("runs"),
    tracker: TrackerName = "none",
    watch: WatchName = "none",
    at_once: AtOnce = 1,
    on: On = "here",
    address: Address = None,
    group: Group = 0,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    json: Json = False,
) -> None:
    """The paper's experiments with the paper's settings. Goes on where it was stopped; prints paper and ours."""
    changes = {
        "epochs": epochs,
        "module_rate": module_rate,
        "patience": patience,
        "noise": noise,
        "music": music,
        "release": release,
        "pairs": pairs,
        "feedback": feedback,
    }
    machine = commands.machine(device, engine, graph, threads, data, devices, nodes, recompute)
    choice = commands.Choice(cells, depths, pair, pixels, quick)
    cluster = commands.Cluster(on, at_once, address, group, cpus, gpus)
    commands.paper(tasks, choice, changes, set_, runs, seed, machine, out, commands.Eyes(tracker, watch), json, cluster)


@app.command("train")
def train_command(
    task: Annotated[str, typer.Argument(help=HELP["task"])],
    cell: Annotated[str, typer.Option(help=f"kind of recurrent layer: {', '.join(paper.KINDS)}")] = "dmu",
    hidden: Annotated[str | None, typer.Option(help=HELP["hidden"])] = None,
    transition: Annotated[str | None, typer.Option(help=HELP["transition"])] = None,
    depth: Annotated[
        int | None, typer.Option(help="RHN: micro-layers per time step; real data: linear layers of an RHN or DMU")
    ] = None,
    activation: Annotated[str | None, typer.Option(help=HELP["activation"])] = None,
    memory_bias: Annotated[float | None, typer.Option(help=HELP["memory_bias"])] = None,
    forget_bias: Annotated[float | None, typer.Option(help=HELP["forget_bias"])] = None,
    input_bias: Annotated[float | None, typer.Option(help=HELP["input_bias"])] = None,
    update_bias: Annotated[float | None, typer.Option(help=HELP["update_bias"])] = None,
    lr: Annotated[float | None, typer.Option(help=HELP["lr"])] = None,
    module_rate: Annotated[str | None, typer.Option(help=HELP["module_rate"])] = None,
    condition: Annotated[str | None, typer.Option(help=HELP["condition"])] = None,
    weight_decay: Annotated[float | None, typer.Option(help=HELP["weight_decay"])] = None,
    gamma: Annotated[float | None, typer.Option(help=HELP["gamma"])] = None,
    batch: Annotated[int | None, typer.Option(help=HELP["batch"])] = None,
    steps: Annotated[int | None, typer.Option(help=HELP["steps"])] = None,
    epochs: Annotated[int | None, typer.Option(help=HELP["epochs"])] = None,
    stop_below: Annotated[float | None, typer.Option(help=HELP["stop_below"])] = None,
    patience: Annotated[int | None, typer.Option(help=HELP["patience"])] = None,
    validation: Annotated[int | None, typer.Option(help=HELP["validation"])] = None,
    test: Annotated[int | None, typer.Option(help=HELP["test"])] = None,
    min_length: Annotated[int | None, typer.Option(help=HELP["min_length"])] = None,
    max_length: Annotated[int | None, typer.Option(help=HELP["max_length"])] = None,
    noise: Annotated[str | None, typer.Option(help=HELP["noise"])] = None,
    precision: Annotated[str | None, typer.Option(help=HELP["precision"])] = None,
    music: Annotated[str | None, typer.Option(help=HELP["music"])] = None,
    window: Annotated[int | None, typer.Option(help=HELP["window"])] = None,
    language: Annotated[str | None, typer.Option(help=HELP["language"])] = None,
    release: Annotated[str | None, typer.Option(help=HELP["release"])] = None,
    pairs: Annotated[str | None, typer.Option(help=HELP["pairs"])] = None,
    feedback: Annotated[str | None, typer.Option(help=HELP["feedback"])] = None,
    pixels: Annotated[str | None, typer.Option(help=HELP["pixels"])] = None,
    limit: Annotated[int | None, typer.Option(help=HELP["limit"])] = None,
    quick: Quick = False,
    runs: Runs = 1,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    engine: Engine = "auto",
    graph: Graph = True,
    threads: Threads = 0,
    devices: Devices = 1,
    nodes: Nodes = 1,
    recompute: Recompute = False,
    out: Out = Path("runs"),
    tracker: TrackerName = "none",
    watch: WatchName = "none",
    on: On = "here",
    address: Address = None,
    group: Group = 0,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    json: Json = False,
) -> None:
    """One study with any settings; what is left out stays as in the paper."""
    changes = {
        "hidden": hidden,
        "transition": transition,
        "depth": depth,
        "activation": activation,
        "memory_bias": memory_bias,
        "forget_bias": forget_bias,
        "input_bias": input_bias,
        "update_bias": update_bias,
        "lr": lr,
        "module_rate": module_rate,
        "condition": condition,
        "weight_decay": weight_decay,
        "gamma": gamma,
        "batch": batch,
        "steps": steps,
        "epochs": epochs,
        "stop_below": stop_below,
        "patience": patience,
        "validation": validation,
        "test": test,
        "min_length": min_length,
        "max_length": max_length,
        "noise": noise,
        "precision": precision,
        "music": music,
        "window": window,
        "language": language,
        "release": release,
        "pairs": pairs,
        "feedback": feedback,
        "pixels": pixels,
        "limit": limit,
    }
    machine = commands.machine(device, engine, graph, threads, data, devices, nodes, recompute)
    cluster = commands.Cluster(on, 1, address, group, cpus, gpus)
    commands.train(task, cell, quick, changes, runs, seed, machine, out, commands.Eyes(tracker, watch), json, cluster)


@app.command("report")
def report_command(
    out: Out = Path("runs"),
    to: Annotated[Path | None, typer.Option(help="folder for pages and figures; default: OUT/report")] = None,
    json: Json = False,
) -> None:
    """The page (HTML and Markdown), figures and tables of what has been recorded."""
    commands.report(out, to, json)


@app.command("merge")
def merge_command(
    sources: Annotated[list[Path], typer.Argument(help="folders with records")],
    out: Annotated[Path, typer.Option("--out", help="a new folder for all of them")],
) -> None:
    """Join and pack what several machines recorded; refuses records that contradict one another."""
    commands.merge(sources, out)


@app.command("bench")
def bench_command(
    device: Device = "auto",
    shapes: Annotated[str | None, typer.Option(help="separated by commas; left out: all for this device")] = None,
    precisions: Annotated[str, typer.Option(help="separated by commas: float32, tf32, bfloat16")] = "float32",
    cells: Annotated[
        str, typer.Option(help="which of our layers, separated by commas: DMU, RHN, RNN, GRU, LSTM")
    ] = "DMU",
    seconds: Annotated[float, typer.Option(min=0, max=3600, help="for each contestant at each shape")] = 1.0,
    growth: Annotated[bool, typer.Option(help="also let one size grow at a time")] = False,
    loop: Annotated[bool, typer.Option(help="time the Python loop too")] = True,
    engines: Annotated[
        str | None, typer.Option(help="which of our engines, separated by commas; left out: all that work here")
    ] = None,
    studies: Annotated[
        str | None,
        typer.Option(help="instead: how long the paper's studies of these tasks would take as a Python loop"),
    ] = None,
    data: Data = None,
    out: Out = Path("runs"),
) -> None:
    """Speed against peers on this machine; checks every result before it prints a time."""
    if studies:
        commands.bench_studies(studies, commands.machine(device, "plain", False, 0, data), out)
    else:
        commands.bench(device, shapes, precisions, cells, seconds, growth, loop, out, engines)


@data_app.command("list")
def data_list_command(data: Data = None, json: Json = False) -> None:
    """What data there is: contents, licence, addresses, and where a copy lies."""
    commands.data_list(data, json)


@data_app.command("fetch")
def data_fetch_command(names: DataNames = None, data: Data = None, json: Json = False) -> None:
    """Fetch what is not here into the user's cache, checked; goes on where it was stopped."""
    commands.data_fetch(names, data, json)


@data_app.command("check")
def data_check_command(names: DataNames = None, data: Data = None, json: Json = False) -> None:
    """Read what is here as the tasks do, and compare hashes and counts with the registry."""
    commands.data_check(names, data, json)


@app.command("sweep")
def sweep_command(
    task: Annotated[str, typer.Argument(help=HELP["task"])],
    cell: Annotated[str, typer.Option(help=HELP["cell"])] = "dmu",
    space: Annotated[
        str,
        typer.Option(help="what to search: lr=log:1e-4..1e-1,batch=16|32|64, or a shipped space such as paper-grid"),
    ] = "paper-random",
    set_: Set = None,
    sampler: Annotated[str, typer.Option(help="tpe, random or grid")] = "tpe",
    pruner: Annotated[str, typer.Option(help="which trials to cut short: median, halving or none")] = "median",
    trials: Annotated[
        int | None, typer.Option(min=1, max=MOST_RUNS, help="in all, earlier ones counted; default: the grid, or 50")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="postgresql://... for many machines; default: SQLite in OUT")
    ] = None,
    search_seed: Annotated[int, typer.Option(min=0, help="another one draws other trials")] = 0,
    runs: Runs = 1,
    seed: Seed = 0,
    data: Data = None,
    device: Device = "auto",
    engine: Engine = "auto",
    graph: Graph = True,
    threads: Threads = 0,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Hyperparameter search. The same command goes on where it was stopped; several at once share the work."""
    machine = commands.machine(device, engine, graph, threads, data)
    commands.sweep(
        task, cell, space, set_, sampler, pruner, trials, storage, search_seed, runs, seed, machine, out, json
    )


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="OUT/checkpoints/STUDY, or one of the files in it")],
    format: Annotated[str, typer.Option(help="onnx, pt2 (for torch.export.load) or safetensors")] = "onnx",
    run: Annotated[
        int | None, typer.Option(min=0, help="seed of the run; default: the one with the least loss")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="file to write; default: OUT/export/STUDY-SEED.FORMAT")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """A trained network for places without the lab, with the weights of its best epoch."""
    commands.export(checkpoint, format, run, to, data, json)


@app.command("compose")
def compose_command(
    checkpoint: Checkpoint,
    run: OneRun = None,
    tune: Annotated[
        int | None, typer.Option(min=0, help="go on with this piece of the test split; default: the first")
    ] = None,
    from_: Annotated[Path | None, typer.Option("--from", help="go on with a MIDI file")] = None,
    given: Annotated[int, typer.Option(min=0, help="frames of it to begin with; 0 is all")] = 50,
    steps: Annotated[int, typer.Option(min=0, max=MOST_STEPS, help="frames to compose")] = 200,
    temperature: Temperature = 1.0,
    tempo: Annotated[float, typer.Option(min=10, max=1000, help="beats per minute")] = 120.0,
    seed: DrawSeed = 0,
    to: Annotated[Path, typer.Option(help="file to write, as .mid and as .wav")] = Path("tune.mid"),
    data: Data = None,
    json: Json = False,
) -> None:
    """Go on with a tune, by a model of polymusic; writes MIDI and sound."""
    commands.compose(checkpoint, run, tune, from_, given, steps, temperature, tempo, seed, to, data, json)


@app.command("translate")
def translate_command(
    checkpoint: Checkpoint,
    text: Annotated[str | None, typer.Argument(help="a sentence in the language of the checkpoint")] = None,
    run: OneRun = None,
    beam: Annotated[int, typer.Option(min=1, max=1000, help="translations followed at once; 1 is greedy")] = 5,
    length_power: Annotated[
        float,
        typer.Option(min=0, max=100, help="beam: rank by log-probability / words ** this; 0 leaves the length out"),
    ] = 1.0,
    bleu: Annotated[
        bool, typer.Option("--bleu", help="measure the run's test split, greedy and with the beam")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="--bleu: the first so many sentences; 0 is all")] = 0,
    data: Data = None,
    json: Json = False,
) -> None:
    """Say a sentence in English, by a model of translation; or its BLEU."""
    commands.translate(checkpoint, text, run, beam, length_power, bleu, limit, data, json)


@app.command("generate")
def generate_command(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(help="how the text begins")],
    run: OneRun = None,
    words: Annotated[int, typer.Option(min=0, max=MOST_STEPS, help="how many follow")] = 50,
    temperature: Temperature = 1.0,
    top: Annotated[int, typer.Option(min=0, help="draw from so many of the likeliest words; 0 is all")] = 40,
    seed: DrawSeed = 0,
    data: Data = None,
    json: Json = False,
) -> None:
    """Go on with a text, by a model of natlang."""
    commands.generate(checkpoint, text, run, words, temperature, top, seed, data, json)


@app.command("inspect")
def inspect_command(
    checkpoint: Checkpoint,
    run: OneRun = None,
    to: Annotated[Path | None, typer.Option(help="folder for pictures and numbers; left out: tables alone")] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """What is inside a trained model: sizes, gradient condition, gates, gradient flow."""
    commands.inspect(checkpoint, run, to, data, json)


@app.command("play")
def play_command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page on this machine; 0: any free one")] = 8765,
    out: Annotated[Path, typer.Option("--out", help="folder where trained models are looked for")] = Path("runs"),
    translation: Annotated[
        Path | None, typer.Option(help="checkpoint that translates; default: the newest in OUT")
    ] = None,
    music: Annotated[Path | None, typer.Option(help="checkpoint that composes; default: the newest in OUT")] = None,
    data: Data = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="open the page in the browser")] = True,
) -> None:
    """A page to try things out in a browser: train, translate, compose. This machine alone, until Ctrl-C."""
    commands.play(port, out, translation, music, data, open_)


def main() -> None:
    """Entry point of the command."""
    commands.guard(app)
