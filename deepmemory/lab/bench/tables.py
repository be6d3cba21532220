"""Benchmark results as Markdown tables."""

from __future__ import annotations

from typing import Any

import deepmemory as dm
from deepmemory.lab.bench.speed import PRECISIONS, noisy

PEERS = ("nn.GRU, equal weights", "nn.LSTM, equal weights")
LOOP = "dm.DMU (plain)"

Row = dict[str, Any]


def times(result: dict[str, Any], mode: str) -> dict[str, dict[str, Row]]:
    """Rows of one precision for which a time was taken, by shape and contestant."""
    table: dict[str, dict[str, Row]] = {}
    for row in result["shapes"]:
        if row["precision"] == mode and "forward_backward" in row:
            table.setdefault(row["shape"]["name"], {})[row["contestant"]] = row
    return table


def chosen(rows: dict[str, Row], cell: str = "DMU") -> Row | None:
    """The row of our layer at one shape, on the engine that ``engine="auto"`` takes there."""
    plain, *fused = dm.engines()  # in the order of preference
    own = (rows.get(f"dm.{cell} ({engine})") for engine in (*fused, plain))
    return next((row for row in own if row), None)


def describe_shape(shape: dict[str, Any]) -> str:
    """A shape in a few words: input, hidden widths of the transition, state; batch, steps, runs."""
    hidden = shape["transition"]
    alike = len(hidden) > 1 and len(set(hidden)) == 1
    widths = f"{len(hidden)}x[{hidden[0]}]" if alike else f"[{', '.join(map(str, hidden))}]"
    text = f"{shape['input_size']} {widths} {shape['hidden_size']}, B {shape['batch']}, T {shape['steps']}"
    return text + (f", {shape['runs']} runs" if shape["runs"] > 1 else "")


def median(row: Row | None, way: str) -> float | None:
    """The median in milliseconds; None if no time was taken in this way, or it is noisy."""
    return row[way]["median_ms"] if row and way in row and not noisy(row, way) else None


def cell(row: Row | None, way: str, bold: bool = False) -> str:
    """A time as text: three digits, ``noisy`` if it was refused, a dash if there is none."""
    value = median(row, way)
    if value is None:
        return "noisy" if noisy(row, way) else "-"
    return f"**{value:.3g}**" if bold else f"{value:.3g}"


def ratio(row: Row | None, base: Row | None, way: str) -> str:
    """The ratio of two times as text; a dash if one is missing or noisy."""
    one, other = median(row, way), median(base, way)
    return f"{one / other:.3g}" if one and other else "-"


def fastest(rows: list[Row], way: str) -> Row | None:
    """The row with the shortest time; if one is noisy, that one, as it might have been the fastest."""
    unsure = next((row for row in rows if noisy(row, way)), None)
    return unsure or min((row for row in rows if way in row), key=lambda row: row[way]["median_ms"], default=None)


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def speed_table(result: dict[str, Any]) -> str:
    """Forward + backward in milliseconds."""
    table = gpu_table(result) if "gpu" in result["machine"] else cpu_table(result)
    note = "noisy: no number, as times varied or other processes ran; measure again on an idle machine"
    return f"{table}\n\n{note}" if "noisy" in table else table


def cpu_table(result: dict[str, Any]) -> str:
    """The Python loop, torch's layers of as many weights, our DMU, and ratios."""
    lines = []
    for name, rows in times(result, "float32").items():
        if best := chosen(rows):
            others = [rows.get(other) for other in (LOOP, *PEERS)]
            cells = [cell(row, "forward_backward") for row in others]
            ratios = [ratio(row, best, "forward_backward") for row in others[:2]]
            own = cell(best, "forward_backward", bold=True)
            lines.append([f"`{name}`: {describe_shape(best['shape'])}", *cells, own, *ratios])
    header = ["shape", "Python loop", "nn.GRU", "nn.LSTM", "dm.DMU", "loop / DMU", "nn.GRU / DMU"]
    return markdown_table(header, lines)


def gpu_table(result: dict[str, Any]) -> str:
    """Our DMU / the faster of torch's GRU and LSTM of as many weights: as CUDA graphs in each precision, and eager."""
    tables = {mode: times(result, mode) for mode in PRECISIONS}
    lines = []
    for name in tables["float32"]:
        shape = next(iter(tables["float32"][name].values()))["shape"]
        cells = [f"`{name}`: {describe_shape(shape)}"]
        for mode, way in [*((mode, "as_cuda_graph") for mode in PRECISIONS), ("float32", "forward_backward")]:
            rows = tables[mode].get(name, {})
            peer = fastest([rows[name] for name in PEERS if name in rows], way)
            cells.append(f"{cell(chosen(rows), way, bold=True)} / {cell(peer, way)}")
        lines.append(cells)
    return markdown_table(["shape", *("float32", "TF32", "bfloat16"), "float32, without a graph"], lines)
