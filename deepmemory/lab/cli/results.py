"""The verbs that show what was recorded or measure speed: ``report``, ``merge`` and ``bench``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from deepmemory.lab.beyond import EXPERIMENTS
from deepmemory.lab.cli.data import with_data
from deepmemory.lab.cli.options import RUNS, AsJson, DeviceAndData, Out, split
from deepmemory.lab.settings import CELLS, PAPER_TASKS, Machine, check_choice


def report(
    out: Out = RUNS,
    to: Annotated[Path | None, typer.Option(help="folder for pages and figures; default: OUT/report")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report on everything recorded: pages (HTML and Markdown), figures and tables."""
    show_report(out, to, as_json=as_json)


def show_report(
    out: Path, to: Path | None = None, *, tasks: Sequence[str] = (*PAPER_TASKS, *EXPERIMENTS), as_json: bool
) -> None:
    """Write pages and figures, and print the results of these tasks of the paper and experiments beyond it."""
    from deepmemory.lab.report import print_report, write_report

    if (out / "sweeps.sqlite").exists():
        report_searches(out, to, as_json=as_json)
        if not (out / "records.sqlite").exists():
            return
    if not as_json and (out / "records.sqlite").exists():
        print("writing the report", flush=True)
    written = write_report(out, to)
    if as_json:
        places = {"page": str(written.page), "markdown": str(written.markdown)}
        print(json.dumps({"event": "report", **places, "tasks": written.data}))
    else:
        print_report(written, tasks)
        print(f"page: {written.page.resolve()}")


def report_searches(out: Path, to: Path | None, *, as_json: bool) -> None:
    """Write the page of the hyperparameter searches, if Optuna is installed."""
    from deepmemory.lab.writing import without_links

    try:
        from deepmemory.lab.scale import search
    except ModuleNotFoundError as error:
        print(f"left out: the searches in {out}; {error}", file=sys.stderr)
        return
    page = search.write_page(search.searches_in(search.default_storage(out)), to or without_links(out, "report"))
    print(json.dumps({"event": "sweeps", "page": str(page)}) if as_json else f"searches: {page.resolve()}")


def merge(
    sources: Annotated[list[Path], typer.Argument(help="folders with records")],
    out: Annotated[Path, typer.Option("--out", help="new folder for the merged records")],
) -> None:
    """Merge and compact the records of several machines. Contradictory records are refused."""
    from deepmemory.lab import records

    merged = records.merge(sources, out)
    studies = merged.studies()
    merged.close()
    print(f"{out}: {len(studies)} studies, {sum(len(study.runs) for study in studies)} runs")


def bench(
    *,
    machine: DeviceAndData,
    shapes: Annotated[
        str | None, typer.Option(help="shapes, separated by commas; default: all for this device")
    ] = None,
    precisions: Annotated[
        str, typer.Option(help="precisions, separated by commas: float32, tf32, bfloat16")
    ] = "float32",
    cells: Annotated[str, typer.Option(help="layers to time, separated by commas: DMU, RHN, RNN, GRU, LSTM")] = "DMU",
    seconds: Annotated[float, typer.Option(min=0, max=3600, help="time for each layer and engine at each shape")] = 1.0,
    minutes: Annotated[
        float, typer.Option(min=0, max=10_000, help="time limit in all; the rest is skipped and listed; 0 for none")
    ] = 10.0,
    growth: Annotated[bool, typer.Option(help="also vary one size at a time")] = False,
    loop: Annotated[bool, typer.Option(help="also time the Python loop and other peers")] = True,
    engines: Annotated[
        str | None, typer.Option(help="engines to time, separated by commas; default: all available ones")
    ] = None,
    studies: Annotated[
        str | None,
        typer.Option(help="instead, estimate how long the paper's studies of these tasks take as a Python loop"),
    ] = None,
    out: Out = RUNS,
) -> None:
    """Time the engines and their peers on this machine. No time is shown for a wrong or noisy result."""
    import torch

    from deepmemory.lab.bench import speed
    from deepmemory.lab.bench.figure import draw
    from deepmemory.lab.bench.shapes import CPU_SHAPES, GPU_SHAPES, SHAPES
    from deepmemory.lab.bench.tables import speed_table

    if studies:
        return time_loops(studies, machine, out)
    device = machine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("device", device, ("cpu", "cuda"))
    usual, known = GPU_SHAPES if device == "cuda" else CPU_SHAPES, speed.Benchmark.engines
    plan = speed.Benchmark(
        device,
        tuple(check_choice("shape", name, tuple(SHAPES)) for name in (split(shapes) if shapes else usual)),
        tuple(check_choice("precision", name, speed.PRECISIONS) for name in split(precisions)),
        tuple(check_choice("cell", name.lower(), CELLS).upper() for name in split(cells)),
        tuple(check_choice("engine", name, known) for name in split(engines)) if engines else known,
        seconds=seconds,
        minutes=minutes,
        growth=growth,
        loop=loop,
    )
    file = out / f"bench-{device}.json"
    result = speed.bench(plan, file)
    draw(result, file.with_suffix(".svg"))
    print(speed_table(result))
    print(f"numbers: {file}\nfigure: {file.with_suffix('.svg')}")


def time_loops(tasks: str, machine: Machine, out: Path) -> None:
    """Time a few steps of the paper's studies as a Python loop, for the report on the records in ``out``."""
    from deepmemory.lab import paper
    from deepmemory.lab.bench import loop_time

    chosen = [check_choice("task", task, PAPER_TASKS) for task in split(tasks)]
    print(f"written: {loop_time.write(with_data(paper.settings(chosen), machine.data), machine, out)}")
