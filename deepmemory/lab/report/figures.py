"""The paper's figures: for each threshold, how many runs have got under it by each epoch."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from deepmemory.lab.report.tables import Picture, counts_by_epoch, longest
from deepmemory.lab.settings import THRESHOLDS

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
    """One panel per threshold, one curve per cell, its name at its end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(THRESHOLDS), sharey=True)
    epochs = longest(picture.studies)
    most = max(len(study.runs) for study in picture.studies.values())
    for index, (panel, threshold) in enumerate(zip(panels, THRESHOLDS, strict=True)):
        ends = {}
        for place, (cell, study) in enumerate(picture.studies.items()):
            counts = counts_by_epoch(study, index, epochs)
            marks = [epoch for epoch in range(epochs + 1) if (epoch + 2 * place) % max(1, epochs // 8) == 0]
            panel.step(
                range(epochs + 1), counts, where="post", linewidth=1.6, markersize=4, markevery=marks, **STYLES[cell]
            )
            ends[cell] = float(counts[-1])
        for cell, height in spread_out(ends, most * 0.075).items():
            panel.annotate(
                cell.upper(),
                (epochs, height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=STYLES[cell]["color"],
                annotation_clip=False,
            )
        panel.set_title(f"loss under $10^{{{round(-len(str(round(1 / threshold))) + 1)}}}$", fontsize=11)
        panel.set_xlim(0, epochs)
        panel.set_ylim(-0.03 * most, most * 1.05)
        panel.set_xlabel("epoch")
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"runs (of {most})")
    return figure


def spread_out(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Move labels up until no two are closer than the gap, keeping their order."""
    placed: dict[str, float] = {}
    lowest = float("-inf")
    for cell, height in sorted(heights.items(), key=lambda item: item[1]):
        lowest = max(height, lowest + gap)
        placed[cell] = lowest
    return placed


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
