"""The report's figures, drawn by matplotlib."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from math import isfinite, log10
from pathlib import Path
from textwrap import wrap
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.report import words
from deepmemory.lab.report.results.gradients import LOSS, QUANTITIES, GradientResults, GradientStudy
from deepmemory.lab.report.results.synthetic import SyntheticResults
from deepmemory.lab.report.results.tables import StudyResult, best_of
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
FURTHER_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#000000")  # of one cell at further rates
FORMATS = ("svg", "png", "pdf")
MOST_COLUMNS = 4  # of panels
MOST_POINTS = 64  # of a learning curve: more would be closer together than a line is wide
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 4}


def new_figure(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Any, Any]:
    """An empty figure and its panels, as an array of rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def legend_line(**style: Any) -> Any:
    """A line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"linewidth": 1.6, "markersize": 4, **style})


def put_legend(figure: Any, lines: Mapping[str, Any], **options: Any) -> None:
    """A legend to the right of all panels."""
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", **options, **LEGEND)


def draw_band(
    panel: Any, places: Sequence[float], bounds: Sequence[Sequence[float]], shade: float, **line: Any
) -> None:
    """A curve and the range around it; ``bounds`` are the lowest, middle and highest value at each place."""
    low, middle, high = bounds
    panel.plot(places, middle, **{"linewidth": 1.6, "markersize": 4, **line})
    panel.fill_between(places, low, high, color=line["color"], alpha=shade, linewidth=0)


def draw_counts(results: SyntheticResults) -> Any:
    """A synthetic task: one panel per threshold, one curve per cell, and a sixth panel that explains them."""
    figure, panels = new_figure(2, 3, 10, 5.4, sharey=True)
    epochs, most = results.epochs, max(cell.runs for cell in results.cells.values())
    for index, (panel, threshold) in enumerate(zip(panels.flat, THRESHOLDS, strict=False)):
        ends = {}
        for place, (name, cell) in enumerate(results.cells.items()):
            counts = cell.by_epoch(index, epochs)
            marks = [epoch for epoch in range(epochs + 1) if (epoch + 2 * place) % max(1, epochs // 8) == 0]
            panel.step(
                range(epochs + 1), counts, where="post", linewidth=1.6, markersize=4, markevery=marks, **STYLES[name]
            )
            if counts[-1]:
                ends[name] = float(counts[-1])
        for name, height in spread_out(ends, most * 0.08, most * 1.03).items():
            panel.annotate(
                words.cell_title(name),
                (epochs, height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5,
                color=STYLES[name]["color"],
                annotation_clip=False,
            )
        panel.set_title(f"loss under $10^{{{round(log10(threshold))}}}$", fontsize=11)
        panel.set_xlim(0, epochs)
        panel.set_ylim(-0.03 * most, most * 1.05)
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.tick_params(labelbottom=True)
        if index >= 2:
            panel.set_xlabel("epoch")
        if index % 3 == 0:
            panel.set_ylabel(f"runs (of {most})")
    explain_counts(panels[-1, -1], results)
    return figure


def explain_counts(panel: Any, results: SyntheticResults) -> None:
    """Names, weights, initial biases and line styles of all cells, also of those that no curve labels."""
    panel.set_axis_off()
    names = []
    for name, cell in results.cells.items():
        setting = cell.study.setting
        weights = f"{words.cell_title(name)}, {weight_count(setting, task_of(setting))} weights"
        names.append(words.joined(weights, words.initial_bias(setting), by="\n"))
    title = "\n".join([words.TITLES[results.task], *wrap(words.changes_title(results.changes), 36)])
    bold = {"weight": "bold"}
    panel.legend(
        [legend_line(**STYLES[name]) for name in results.cells],
        names,
        title=title,
        title_fontproperties=bold,
        loc="upper left",
        bbox_to_anchor=(0, 1.08),
        fontsize=9,
        alignment="left",
        **LEGEND,
    )
    note = "no name at the end of a curve:\nno run got under the threshold"
    panel.text(0.03, -0.1, note, fontsize=8.5, color="#555555", transform=panel.transAxes)


def spread_out(heights: dict[str, float], gap: float, highest: float = float("inf")) -> dict[str, float]:
    """Move labels, in order, just far enough that no two are closer than the gap and none is above the highest."""
    clusters: list[tuple[list[str], float]] = []  # labels that touch, and the height of the lowest
    for cell, height in sorted(heights.items(), key=lambda item: item[1]):
        cells, bottom = [cell], min(height, highest)
        while clusters and bottom < clusters[-1][1] + gap * len(clusters[-1][0]):
            cells = clusters.pop()[0] + cells
            middle = sum(heights[one] for one in cells) / len(cells)
            bottom = min(middle - gap * (len(cells) - 1) / 2, highest - gap * (len(cells) - 1))
        clusters.append((cells, bottom))
    return {cell: bottom + gap * place for cells, bottom in clusters for place, cell in enumerate(cells)}


def draw_curves(panels: dict[tuple[str, int], list[StudyResult]]) -> Any:
    """Real data: one panel per depth or setting, the measure by epoch as mean and range of the runs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    experiment = next(iter(panels.values()))[0].experiment
    measure = paper.measure_of(experiment.task)
    changes = {changed for changed, _ in panels}
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(rows, columns, 2.2 + 2.6 * max(2, columns), 3.6 * rows, sharey=True)
    for panel in axes.flat[len(panels) :]:
        panel.remove()
    shown: dict[str, Any] = {}
    top = 0.0  # of the axis, without the first epochs, which would take up most of it
    for panel, ((changed, size), studies) in zip(axes.flat[: len(panels)], panels.items(), strict=True):
        for one in studies:
            style = STYLES[one.experiment.cell]
            for split, width, marker in (("train", 0.8, None), ("valid", 1.7, style["marker"])):
                curves = [run.curves[f"{split}_{measure}"][: one.epochs] for run in one.begun]
                epochs, *bounds = over_runs([dict(enumerate(of, 1)) for of in curves], statistics.fmean)
                look = {**style, "marker": marker, "linewidth": width, "markevery": max(1, len(epochs) // 8)}
                draw_band(panel, epochs, bounds, 0.15, **look)
                top = max([top, *bounds[-1][len(epochs) // 25 :]])
            shown[words.cell_title(one.experiment.cell)] = legend_line(**style)
        own = narrow(changed) if len(changes) > 1 else []
        panel.set_title("\n".join([words.size_title(experiment.task, size), *own]), fontsize=9 if own else 11)
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
    first = figure.axes[0]  # the others share its axis
    if top and best_of(measure) is min:
        first.set_yscale("log")
        first.set_ylim(top=1.1 * top)
        first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 7)))
        first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        first.yaxis.set_minor_formatter(NullFormatter())
    for panel in axes[:, 0]:
        panel.set_ylabel(measure)
    shown["training"] = legend_line(color="#555555", linewidth=0.8)
    shown["validation"] = legend_line(color="#555555", linewidth=1.7)
    title = words.joined(words.TITLES[experiment.task], words.dataset_title(experiment.dataset))
    title = "\n".join([title, *narrow("other settings" if len(changes) > 1 else changes.pop())])
    put_legend(figure, shown, title=title, alignment="left")
    return figure


def narrow(changed: str) -> list[str]:
    """Lines of a panel's width; a value stays on the line of its name."""
    return wrap(changed.replace(" = ", "\u00a0=\u00a0"), 28)


def draw_gradients(results: GradientResults) -> Any:
    """Gradients: one column per depth, one row per quantity, as median and range of the runs."""
    columns = results.by_depth
    rows = [quantity for quantity in (*QUANTITIES, LOSS) if any(one.curves(quantity) for one in results.studies)]
    width, height = 1.0 + 3.0 * len(columns), 0.6 + 1.75 * len(rows)
    figure, panels = new_figure(len(rows), len(columns), width, height, sharex="col", sharey="row")
    for column, (depth, studies) in enumerate(columns.items()):
        styles = rate_styles(studies)
        for quantity, panel in zip(rows, panels[:, column], strict=True):
            for one, style in zip(studies, styles, strict=True):
                epochs, *bounds = over_runs(one.curves(quantity), statistics.median)
                if epochs:
                    look = {"linewidth": 1.5, "markersize": 3.5, "markevery": max(1, len(epochs) // 8), **style}
                    draw_band(panel, epochs, bounds, 0.12, **look)
            if quantity.limit is not None:
                panel.axhline(quantity.limit, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)))
            if quantity.log:
                panel.set_yscale("log")
            if column == 0:
                panel.set_ylabel(quantity.label, fontsize=9)
        top, bottom = panels[0, column], panels[-1, column]
        top.set_title(f"depth {depth}", fontsize=11)
        bottom.legend(
            [legend_line(**style) for style in styles],
            [f"{words.cell_title(one.cell)}, rate {one.rates}" for one in studies],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.32),
            fontsize=8,
            **LEGEND,
        )
        bottom.set_xlabel("epoch")
        bottom.xaxis.get_major_locator().set_params(integer=True)
    return figure


def rate_styles(studies: Sequence[GradientStudy]) -> list[dict[str, Any]]:
    """A cell's own style for its largest rate, other colours for further ones."""
    further = iter(FURTHER_COLOURS * len(studies))
    seen: set[str] = set()
    styles = []
    for one in studies:
        style = STYLES[one.cell]
        styles.append({**style, "color": next(further), "marker": "."} if one.cell in seen else style)
        seen.add(one.cell)
    return styles


def over_runs(curves: Iterable[Mapping[int, float]], middle: Any) -> tuple[list[int], *tuple[list[float], ...]]:
    """Epochs, and the lowest, middle and highest finite value of the runs; many epochs are thinned, except the last."""
    found: dict[int, list[float]] = {}
    for curve in curves:
        for epoch, value in curve.items():
            if isfinite(value):
                found.setdefault(epoch, []).append(value)
    apart = -(-len(found) // MOST_POINTS)
    epochs = sorted(found)[(len(found) - 1) % apart :: apart] if found else []
    low, mid, high = ([fold(found[epoch]) for epoch in epochs] for fold in (min, middle, max))
    return epochs, low, mid, high


def save(figure: Any, folder: Path, name: str) -> dict[str, Path]:
    """Write a figure as SVG, PNG and PDF; the same records give the same files."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not once for every format
    paths = {kind: folder / f"{name}.{kind}" for kind in FORMATS}
    for kind, path in paths.items():
        put(path, render(figure, kind))
    return paths


def render(figure: Any, kind: str) -> bytes:
    """The bytes of a figure's file, without the date that matplotlib would add."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "deepmemory", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, metadata=dates[kind], dpi=150)
    return compact(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def compact(svg: bytes) -> bytes:
    """An SVG of half the size: coordinates in tenths of a point, short names, and each style once, as a class.

    >>> compact(b'<g id="a">\\n  <!-- 30 -->\\n  <path id="b" d="M 12.345 0.5 \\nL 7 8.96 \\nz"/>\\n</g>')
    b'<g>\\n<path id="a" d="M12.3 0.5L7 9z"/>\\n</g>'
    """

    def shorter(attribute: re.Match[bytes]) -> bytes:
        numbers = re.sub(rb"\d+\.\d+", lambda found: b"%.1f" % float(found[0]), attribute[0])
        return re.sub(rb"(\d)\.0(?!\d)", rb"\1", numbers)

    svg = re.sub(rb'<!--.*?-->|<metadata>.*?</metadata>|(?<=<g) id="[^"]*"', b"", svg, flags=re.DOTALL)
    svg = re.sub(rb' (?:d|x|y)="[^"]*"|translate\([^)]*\)', shorter, svg)
    svg = re.sub(rb' d="[^"]*"', lambda path: b" d" + re.sub(rb"\s*([A-Za-z])\s*", rb"\1", path[0][2:]), svg)
    names = {name: short_name(place) for place, name in enumerate(dict.fromkeys(re.findall(rb' id="([^"]*)"', svg)))}
    svg = re.sub(rb'( id="|href="#|url\(#)([^")]*)', lambda found: found[1] + names.get(found[2], found[2]), svg)
    styles = dict.fromkeys(re.findall(rb' style="([^"]*)"', svg))
    classes = {style: short_name(place) for place, style in enumerate(styles)}
    svg = re.sub(rb' style="([^"]*)"', lambda found: b' class="%s"' % classes[found[1]], svg)
    rules = b"".join(
        b".%s{%s}" % (name, style.replace(b"; ", b";").replace(b": ", b":")) for style, name in classes.items()
    )
    svg = svg.replace(b"</style>", rules + b"</style>", 1)
    return re.sub(rb"\s*\n\s*", b"\n", svg)


def short_name(place: int) -> bytes:
    """The names a, b, ..., z, aa, ab, ...

    >>> [short_name(place) for place in (0, 25, 26, 27)]
    [b'a', b'z', b'aa', b'ab']
    """
    first = short_name(place // 26 - 1) if place >= 26 else b""
    return first + b"abcdefghijklmnopqrstuvwxyz"[place % 26 :][:1]
