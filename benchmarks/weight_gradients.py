"""Whether the GPU engine cuts weight gradients well: times every tile and many numbers of pieces.

python benchmarks/weight_gradients.py        # results/weight_gradients_h200.json: on a machine with an NVIDIA GPU
python benchmarks/weight_gradients.py odd ptb-2

Shapes are those of ``dmu bench``. The weight gradients of a layer are timed as a CUDA graph, without the sweeps before
them, and beside torch's own matrix products. The constants of ``deepmemory/ops/nvrtc/products.py`` are chosen so that
the engine takes what is fastest here, or nearly so.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepmemory.lab.bench.contestants import own_layer
from deepmemory.lab.bench.shapes import SHAPES, Shape
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.bench.timing import captured, precision, timings
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.writing import put
from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc import products
from deepmemory.ops.recurrence import Recurrence

RESULTS = Path(__file__).parent / "results" / "weight_gradients_h200.json"
TIMED = (
    "adding",
    "adding-51",
    "ptb-1",
    "ptb-2",
    "ptb-5",
    "ptb-10",
    "mt-2",
    "rl-step",
    "forecast",
    "stream",
    "odd",
    "deep-30",
)
MODES = ("float32", "bfloat16")
BLOCKS = (1, 2, 3, 4, 6, 9, 12)  # of a multiprocessor, as far as the rows suffice
SECONDS = 0.015  # for which each is timed
Row = dict[str, Any]


def tables(shape: Shape) -> list[products.Table]:
    """The products of a DMU's weights, with every tile that they can have."""
    runs = [shape.runs] if shape.runs > 1 else []
    outputs, hidden = [*shape.transition, 2 * shape.hidden_size], list(shape.transition)
    sizes = [(outputs[0], shape.input_size), (outputs[0], shape.hidden_size), (outputs[0],)]
    for rows, columns in zip(outputs[1:], hidden, strict=True):
        sizes += [(rows, columns), (rows,)]
    weights = [torch.empty(*runs, *size, device="meta") for size in sizes]
    return products.tables(Recurrence("dmu"), weights, shape.runs, (True,) * len(weights))


def cuts(shape: Shape, found: Sequence[products.Table], multiprocessors: int) -> Iterator[products.Cut]:
    """The ways to cut the products that are timed."""
    for number, table in enumerate(found):
        blocks, chunks = table.launches[0].tiles * shape.runs, -(-shape.batch * shape.steps // table.tile.chunk)
        for pieces in sorted({min(max(1, each * multiprocessors // blocks), chunks) for each in BLOCKS}):
            yield products.Cut(number, pieces)


def measure(name: str, mode: str) -> Row:
    """Microseconds of the weight gradients of a shape: with every cut, and by torch's products."""
    shape, found, times = SHAPES[name], tables(SHAPES[name]), []
    runs = [shape.runs] if shape.runs > 1 else []
    with precision(mode, "cuda"), mock.patch.object(nvrtc, "_weight_gradients", wraps=nvrtc._weight_gradients) as call:
        layer = own_layer(shape, "DMU", "nvrtc", "cuda")
        x = torch.randn(*runs, shape.steps, shape.batch, shape.input_size, device="cuda").requires_grad_()
        torch.autograd.grad(layer.run(x).sum(), [x, *layer.leaves])
        gradients = partial(nvrtc._weight_gradients, *call.call_args.args)

        def microseconds() -> float:
            with torch.no_grad():
                return 1e3 * timings(captured(gradients), "cuda", SECONDS)["median_ms"]

        for cut in cuts(shape, found, torch.cuda.get_device_properties(0).multi_processor_count):
            with (
                mock.patch.object(products, "MOST_MULTIPLICATIONS", 10**15),
                mock.patch.object(products, "cut", return_value=cut),
            ):
                call.call_args.args[1].cuts.clear()
                times.append({"tile": found[cut.table].tile.size, "pieces": cut.pieces, "us": microseconds()})
        call.call_args.args[1].cuts.clear()
        with mock.patch.object(products, "MOST_MULTIPLICATIONS", 0):
            return {"shape": name, "precision": mode, "library_us": microseconds(), "cuts": times}


def chosen(row: Row, multiprocessors: int) -> Row:
    """What the engine takes among the cuts that were timed."""
    shape = SHAPES[row["shape"]]
    by_tile = {table.tile.size: table for table in tables(shape)}
    rows = shape.batch * shape.steps
    return min(
        row["cuts"],
        key=lambda cut: by_tile[cut["tile"]].microseconds(cut["pieces"], rows, shape.runs, multiprocessors),
    )


def main(shapes: Sequence[str], out: Path) -> None:
    if why := nvrtc.unavailable():
        print(f"nothing to measure: {why}")
        return
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    result: Row = {
        "what": "microseconds of all weight gradients of a layer by tile and pieces of rows, and with torch's products",
        "when": now(),
        "machine": machine("cuda"),
        "git": git_commit(),
        "multiprocessors": multiprocessors,
        "rows": [],
    }
    for name in shapes or TIMED:
        for mode in MODES:
            row = measure(name, mode)
            result["rows"].append(row)
            taken, best = chosen(row, multiprocessors), min(row["cuts"], key=lambda cut: cut["us"])
            print(
                f"{name:10} {mode:9} takes tile {taken['tile']}, {taken['pieces']} pieces: {taken['us']:.1f} us; best: "
                f"{best['tile']}, {best['pieces']}: {best['us']:.1f}; torch's products {row['library_us']:.1f}",
                flush=True,
            )
            put(out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("shapes", nargs="*", help=f"default: {', '.join(TIMED)}")
    options.add_argument("--out", type=Path, default=RESULTS)
    main(**vars(options.parse_args()))
