"""The paper's figures: for each threshold, how many runs have got under it by each epoch."""

from __future__ import annotations

from io import BytesIO
from math import log10
from pathlib import Path
from textwrap import wrap
from typing import Any

from deepmemory.lab.network import weight_count
from deepmemory.lab.report.tables import TITLES, Picture, counts_by_epoch, longest
from deepmemory.lab.settings import THRESHOLDS
from deepmemory.lab.tasks import task_of

# Okabe and Ito's colours, told apart by colour-blind readers; dashes and markers tell them apart in black and white.
STYLES: dict[str, dict[str, Any]] = {
    "dmu": {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    "gru": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "lstm": {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    "rhn": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "D"},
    "rnn": {"color": "#000000", "linestyle": ":", "marker": "v"},
}
FORMATS = ("svg", "png", "pdf")


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


def save(figure: Any, folder: Path, name: str) -> dict[str, Path]:
    """As SVG, PNG and PDF; the same records give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: folder / f"{name}.{kind}" for kind in FORMATS}
    for kind, path in paths.items():
        path.write_bytes(render(figure, kind))
    return paths


def render(figure: Any, kind: str) -> bytes:
    """The bytes of one picture, without the date matplotlib would add."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "deepmemory", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, metadata=dates[kind], dpi=150)
    return buffer.getvalue()
