"""The paper's figures, runs under each threshold by epoch; and for real data, which it shows none of, the curves."""

from __future__ import annotations

from io import BytesIO
from math import isfinite, log10
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.report import scores
from deepmemory.lab.report.tables import TITLES, Picture, counts_by_epoch, longest
from deepmemory.lab.settings import THRESHOLDS
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import weight_count
from deepmemory.lab.writing import put

# Okabe and Ito's colours, told apart by colour-blind readers; dashes and markers tell them apart in black and white.
STYLES: dict[str, dict[str, Any]] = {
    "dmu": {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    "gru": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "lstm": {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    "rhn": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "D"},
    "rnn": {"color": "#000000", "linestyle": ":", "marker": "v"},
    "dmu-c": {"color": "#56B4E9", "linestyle": (0, (7, 2)), "marker": "P"},
}
FORMATS = ("svg", "png", "pdf")
MOST_COLUMNS = 4  # of panels
MOST_POINTS = 125  # of a learning curve: more would be closer than a line is wide, and fill megabytes


def draw(picture: Picture) -> Any:
    """One panel per threshold, one curve per cell with its name at its end, and a sixth panel that explains them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3, sharey=True).flat
    epochs = longest(picture.studies)
    most = max(len(study.runs) for study in picture.studies.values())
    for index, (panel, threshold) in enumerate(zip(panels, THRESHOLDS, strict=False)):
        ends = {}
        for place, (cell, study) in enumerate(picture.studies.items()):
            counts = counts_by_epoch(study, index, epochs)
            marks = [epoch for epoch in range(epochs + 1) if (epoch + 2 * place) % max(1, epochs // 8) == 0]
            panel.step(
                range(epochs + 1), counts, where="post", linewidth=1.6, markersize=4, markevery=marks, **STYLES[cell]
            )
            if counts[-1]:
                ends[cell] = float(counts[-1])
        for cell, height in spread_out(ends, most * 0.08, most * 1.03).items():
            panel.annotate(
                cell.upper(),
                (epochs, height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5,
                color=STYLES[cell]["color"],
                annotation_clip=False,
            )
        panel.set_title(f"loss under $10^{{{round(log10(threshold))}}}$", fontsize=11)
        panel.set_xlim(0, epochs)
        panel.set_ylim(-0.03 * most, most * 1.05)
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.tick_params(labelbottom=True)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        if index >= 2:
            panel.set_xlabel("epoch")
        if index % 3 == 0:
            panel.set_ylabel(f"runs (of {most})")
    explain(figure.axes[-1], picture)
    return figure


def explain(panel: Any, picture: Picture) -> None:
    """Names, weights and line styles of all cells, also of those that no run of theirs labels."""
    from matplotlib.lines import Line2D

    panel.set_axis_off()
    drawn = {cell: Line2D([], [], linewidth=1.6, markersize=4, **STYLES[cell]) for cell in picture.studies}
    names = [
        f"{cell.upper()}, {weight_count(study.setting, task_of(study.setting))} weights"
        for cell, study in picture.studies.items()
    ]
    panel.legend(
        drawn.values(),
        names,
        title="\n".join([TITLES[picture.task], *wrap(picture.changes, 36)]),
        title_fontproperties={"weight": "bold"},
        loc="upper left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        handlelength=4,
        alignment="left",
    )
    panel.text(
        0.03,
        0.0,
        "no name at the end of a curve:\nno run got there",
        fontsize=9,
        color="#555555",
        transform=panel.transAxes,
    )


def spread_out(heights: dict[str, float], gap: float, highest: float = float("inf")) -> dict[str, float]:
    """Move labels, in their order, just until no two are closer than the gap and none is above the highest."""
    clusters: list[tuple[list[str], float]] = []  # labels that touch, and the height of the lowest
    for cell, height in sorted(heights.items(), key=lambda item: item[1]):
        cells, bottom = [cell], min(height, highest)
        while clusters and bottom < clusters[-1][1] + gap * len(clusters[-1][0]):
            cells = clusters.pop()[0] + cells
            middle = sum(heights[one] for one in cells) / len(cells)
            bottom = min(middle - gap * (len(cells) - 1) / 2, highest - gap * (len(cells) - 1))
        clusters.append((cells, bottom))
    return {cell: bottom + gap * place for cells, bottom in clusters for place, cell in enumerate(cells)}


def draw_curves(panels: dict[tuple[str, int], list[scores.Trained]]) -> Any:
    """One panel per depth or setting: the measure by epoch, mean of the runs and a band from lowest to highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    place = next(iter(panels.values()))[0].place
    measure = paper.measure_of(place.task)
    changes = {changed for changed, _ in panels}
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.2 + 2.6 * max(2, columns), 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.remove()
    shown: dict[str, Any] = {}
    top = 0.0  # of the axis, where the first epochs would take up most of it
    for panel, ((changed, size), studies) in zip(axes.flat[: len(panels)], panels.items(), strict=True):
        for one in studies:
            style = STYLES[one.place.cell]
            for split, width, marker in (("train", 0.8, None), ("valid", 1.7, style["marker"])):
                epochs, mean, lowest, highest = curve(one, f"{split}_{measure}")
                look = {**style, "marker": marker, "linewidth": width, "markersize": 4}
                panel.plot(epochs, mean, markevery=max(1, len(epochs) // 8), **look)
                top = max([top, *highest[len(epochs) // 25 :]])
                panel.fill_between(epochs, lowest, highest, color=style["color"], alpha=0.15, linewidth=0)
            shown[one.place.cell.upper()] = Line2D([], [], linewidth=1.7, markersize=4, **style)
        own = narrow(changed) if len(changes) > 1 else []
        panel.set_title("\n".join([scores.size_in_words(place.task, size), *own]), fontsize=9 if own else 11)
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]  # the others share its axis
    if top and not scores.higher_is_better(measure):
        first.set_yscale("log")
        first.set_ylim(top=1.1 * top)
        first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 7)))
        first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        first.yaxis.set_minor_formatter(NullFormatter())
    for panel in axes[:, 0]:
        panel.set_ylabel(measure)
    shown["training"] = Line2D([], [], color="#555555", linewidth=0.8)
    shown["validation"] = Line2D([], [], color="#555555", linewidth=1.7)
    title = ", ".join(filter(None, (scores.TITLES[place.task], scores.part_name(place.part))))
    title = "\n".join([title, *narrow("other settings" if len(changes) > 1 else changes.pop())])
    figure.legend(
        shown.values(),
        shown.keys(),
        title=title,
        loc="outside right upper",
        frameon=False,
        handlelength=4,
        alignment="left",
    )
    return figure


def narrow(changed: str) -> list[str]:
    """In lines of a panel's width, no value apart from its name."""
    return wrap(changed.replace(" = ", "\u00a0=\u00a0"), 28)


def curve(one: scores.Trained, series: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Epochs, mean, lowest and highest over the runs that had a finite value there; of very many epochs, some."""
    found: list[tuple[int, list[float]]] = []
    for epoch in range(min(one.reached, one.epochs)):
        values = [run.curves[series][epoch] for run in one.begun if epoch < run.epochs]
        if finite := [value for value in values if isfinite(value)]:
            found.append((epoch + 1, finite))
    apart = -(-len(found) // MOST_POINTS)
    found = found[(len(found) - 1) % apart :: apart] if found else []  # the last one among them
    epochs = [epoch for epoch, _ in found]
    return epochs, [fmean(v) for _, v in found], [min(v) for _, v in found], [max(v) for _, v in found]


def save(figure: Any, folder: Path, name: str) -> dict[str, Path]:
    """As SVG, PNG and PDF; the same records give the same files."""
    paths = {kind: folder / f"{name}.{kind}" for kind in FORMATS}
    for kind, path in paths.items():
        put(path, render(figure, kind))
    return paths


def render(figure: Any, kind: str) -> bytes:
    """The bytes of one picture, without the date matplotlib would add."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "deepmemory", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, metadata=dates[kind], dpi=150)
    return buffer.getvalue()
