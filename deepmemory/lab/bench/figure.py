"""Benchmark results as a figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from deepmemory.lab.bench.shapes import GROWTH
from deepmemory.lab.bench.tables import chosen, median, times

LOOKS = {  # line and colour of a curve, by how its name begins
    "dm.DMU (cpu": ("o-", "#0072B2"),
    "dm.DMU (nvrtc": ("o-", "#0072B2"),
    "dm.DMU (triton": ("d-.", "#56B4E9"),
    "dm.DMU (plain": ("x-", "#999999"),
    "nn.GRU": ("s--", "#D55E00"),
    "nn.LSTM": ("^:", "#009E73"),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time relative to nn.GRU of as many weights at every shape, and how time grows with each size.

    Noisy times are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = [size for size in GROWTH if any(row["shape"]["name"].startswith(size + "=") for row in result["growth"])]
    width = 4.5 + 2.6 * len(sizes)
    figure, axes = plt.subplots(1, 1 + len(sizes), figsize=(width, 3.6), layout="constrained", squeeze=False)
    draw_ratios(axes[0][0], result)
    for axis, size in zip(axes[0][1:], sizes, strict=True):
        draw_growth(axis, result, size)
    figure.savefig(path)
    plt.close(figure)


def draw_ratios(axis: Any, result: dict[str, Any]) -> None:
    """Bars: nn.LSTM and our DMU relative to nn.GRU."""
    table, way = times(result, "float32"), "forward_backward"
    for offset, label in enumerate(("nn.LSTM", "dm.DMU")):
        ratios = []
        for rows in table.values():
            base = rows.get("nn.GRU, equal weights")
            row = chosen(rows) if label == "dm.DMU" else rows.get(f"{label}, equal weights")
            ratios.append((median(row, way) or math.nan) / (median(base, way) or math.nan))
        places = [place + 0.4 * offset - 0.2 for place in range(len(table))]
        axis.barh(places, ratios, 0.38, label=label, color=("#999999", "#0072B2")[offset])
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(table)), list(table))
    axis.invert_yaxis()
    axis.set_xlabel("time, relative to nn.GRU of as many weights")
    axis.set_title("forward + backward, float32", fontsize=10)
    axis.legend(fontsize=8)


def draw_growth(axis: Any, result: dict[str, Any], size: str) -> None:
    """Curves: time by one size."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in result["growth"]:
        name, _, value = row["shape"]["name"].partition("=")
        if name == size and (time := median(row, "forward_backward")):
            curves.setdefault(row["contestant"], []).append((int(value), time))
    for name, points in sorted(curves.items()):
        style, color = next(look for start, look in LOOKS.items() if name.startswith(start))
        style = style if "recompute" not in name else "x"
        axis.loglog(*zip(*points, strict=True), style, label=name, color=color, markersize=4)
    axis.set_xticks(GROWTH[size], [str(value) for value in GROWTH[size]], fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel(size.replace("_", " "))
    axis.set_ylabel("ms")
    if curves:
        axis.legend(fontsize=6)
