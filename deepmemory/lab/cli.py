"""The command ``dmu``: signatures and help. What they do stands in :mod:`deepmemory.lab.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepmemory.lab import commands, paper
from deepmemory.lab.settings import CELLS, HELP, TASKS
from deepmemory.lab.tracking import TRACKERS

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
Runs = Annotated[int, typer.Option(min=1, help="runs of each cell, side by side")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the first run; the others count up from it")]
Device = Annotated[str, typer.Option(help=HELP["device"])]
Engine = Annotated[str, typer.Option(help=HELP["engine"])]
Graph = Annotated[bool, typer.Option("--graph/--no-graph", help=HELP["graph"])]
Threads = Annotated[int, typer.Option(min=0, help=HELP["threads"])]
TrackerName = Annotated[str, typer.Option("--tracker", help=f"also log to: {', '.join(TRACKERS)}")]
Data = Annotated[Path | None, typer.Option("--data", help="folder of local copies; default: $DEEPMEMORY_DATA")]
DataNames = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="which; default: all")]
Json = Annotated[bool, typer.Option("--json", help="print JSON lines for machines")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="change any setting; repeatable")]


@app.command("paper")
def paper_command(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help=", ".join(TASKS))] = None,
    cells: Annotated[str, typer.Option(help="which cells, separated by commas")] = ",".join(CELLS),
    runs: Runs = paper.RUNS,
    seed: Seed = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help=HELP["epochs"])] = None,
    module_rate: Annotated[str | None, typer.Option(help=HELP["module_rate"])] = None,
    patience: Annotated[int | None, typer.Option(min=1, help=HELP["patience"])] = None,
    noise: Annotated[str | None, typer.Option(help=HELP["noise"])] = None,
    set_: Set = None,
    device: Device = "auto",
    engine: Engine = "auto",
    graph: Graph = True,
    threads: Threads = 0,
    out: Out = Path("runs"),
    tracker: TrackerName = "none",
    json: Json = False,
) -> None:
    """The paper's experiments with the paper's settings. Goes on where it was stopped; prints paper and ours."""
    changes = {"epochs": epochs, "module_rate": module_rate, "patience": patience, "noise": noise}
    machine = commands.machine(device, engine, graph, threads)
    commands.paper(tasks, cells, changes, set_, runs, seed, machine, out, tracker, json)


@app.command("train")
def train_command(
    task: Annotated[str, typer.Argument(help=HELP["task"])],
    cell: Annotated[str, typer.Option(help=HELP["cell"])] = "dmu",
    hidden: Annotated[str | None, typer.Option(help=HELP["hidden"])] = None,
    transition: Annotated[str | None, typer.Option(help=HELP["transition"])] = None,
    depth: Annotated[int | None, typer.Option(help=HELP["depth"])] = None,
    activation: Annotated[str | None, typer.Option(help=HELP["activation"])] = None,
    memory_bias: Annotated[float | None, typer.Option(help=HELP["memory_bias"])] = None,
    forget_bias: Annotated[float | None, typer.Option(help=HELP["forget_bias"])] = None,
    lr: Annotated[float | None, typer.Option(help=HELP["lr"])] = None,
    module_rate: Annotated[str | None, typer.Option(help=HELP["module_rate"])] = None,
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
    runs: Runs = 1,
    seed: Seed = 0,
    device: Device = "auto",
    engine: Engine = "auto",
    graph: Graph = True,
    threads: Threads = 0,
    out: Out = Path("runs"),
    tracker: TrackerName = "none",
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
        "lr": lr,
        "module_rate": module_rate,
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
    }
    machine = commands.machine(device, engine, graph, threads)
    commands.train(task, cell, changes, runs, seed, machine, out, tracker, json)


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
    seconds: Annotated[float, typer.Option(min=0, help="for each contestant at each shape")] = 1.0,
    growth: Annotated[bool, typer.Option(help="also let one size grow at a time")] = False,
    loop: Annotated[bool, typer.Option(help="time the Python loop too")] = True,
    out: Out = Path("runs"),
) -> None:
    """Speed against peers on this machine; checks every result before it prints a time."""
    commands.bench(device, shapes, precisions, cells, seconds, growth, loop, out)


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


def main() -> None:
    """Entry point of the command."""
    commands.guard(app)
