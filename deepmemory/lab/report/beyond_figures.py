"""The figures of the experiments beyond the paper."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from deepmemory.lab.beyond.depth import SIZES
from deepmemory.lab.beyond.models import DEEP
from deepmemory.lab.report import words
from deepmemory.lab.report.figures import STYLES as PAPER_STYLES
from deepmemory.lab.report.figures import draw_band, legend_line, new_figure, put_legend
from deepmemory.lab.report.results.beyond import BeyondResults, Outcome
from deepmemory.lab.report.results.stats import perplexity

STYLES: dict[str, dict[str, Any]] = {
    **PAPER_STYLES,
    "residual": {"color": "#E69F00", "linestyle": (0, (3, 1)), "marker": "X"},
    "mingru": {"color": "#777777", "linestyle": (0, (1, 1)), "marker": "*"},
}
MARKERS = {1: "o", 2: "s", 3: "^", 5: "D"}  # by depth, of DMUs,
SHADES = {1: 0.35, 2: 0.55, 3: 0.75}  # and opacity
MEASURED = "accuracy_8"  # of the figure about state tracking
PUBLISHED_LINES = ("--", ":")  # of the figures with a dot for each run
LEM = (10_000, 2.4e-5 / 4)  # length and loss of LEM, with the targets used here


def draw_depth(results: BeyondResults) -> Any:
    """Test perplexity by depth, one panel per part with several depths; models without depth are horizontal lines."""
    all_parts = results.by_part()
    parts = {part: of for part, of in all_parts.items() if len({one.depth for one in of if one.depth}) > 1} or all_parts
    figure, panels = new_figure(1, len(parts), 2.2 + 3.4 * len(parts), 3.8)
    shown: dict[str, Any] = {}
    for panel, (part, outcomes) in zip(panels.flat, parts.items(), strict=True):
        kinds = dict.fromkeys(one.kind for one in outcomes)
        for kind in kinds:
            chosen = {one.depth or 0: one for one in outcomes if one.kind == kind}
            if kind == "residual":  # below depth 3 it is a plain one
                chosen |= {one.depth: one for one in outcomes if one.kind == "dmu" and one.depth and one.depth < 3}
            points = {n: tests for n, one in sorted(chosen.items()) if (tests := perplexities(one))}
            if not points:
                continue
            style = STYLES[kind]
            shown[words.cell_title(kind)] = legend_line(**style)
            if kind not in DEEP:
                mean = statistics.fmean(points[0])
                panel.axhline(mean, linewidth=1.4, color=style["color"], linestyle=style["linestyle"])
                continue
            draw_band(panel, list(points), bounds_of(points.values()), 0.15, **style)
        depths = sorted({one.depth for one in outcomes if one.depth})
        panel.set_xscale("log")
        panel.set_xticks(depths, [str(n) for n in depths])
        panel.minorticks_off()
        panel.set_xlabel("linear layers n of the transition")
        panel.set_title(f"{part}: {SIZES[part] / 1e6:g} million weights", fontsize=11)
    panels[0, 0].set_ylabel("test perplexity")
    put_legend(figure, shown)
    return figure


def draw_state_tracking(results: BeyondResults) -> Any:
    """Share of runs that have learned a group by optimiser step, one panel for each group."""
    parts = results.by_part()
    columns = min(3, len(parts))
    rows = -(-len(parts) // columns)
    figure, panels = new_figure(rows, columns, 2.2 + 2.8 * columns, 0.6 + 2.6 * rows, sharey=True)
    for panel in panels.flat[len(parts) :]:
        panel.remove()
    shown: dict[str, Any] = {}
    for panel, (part, outcomes) in zip(panels.flat, parts.items(), strict=False):
        for place, one in enumerate(outcomes):
            solved, runs = one.solved_by_epoch(MEASURED), len(one.study.runs)
            steps = [epoch * one.setting.steps for epoch in range(len(solved))]
            style = style_of(one)
            marks = [epoch for epoch in range(len(solved)) if (epoch + place) % max(1, len(solved) // 6) == 0]
            shares = [count / runs for count in solved]
            panel.step(steps, shares, where="post", linewidth=1.4, markersize=4, markevery=marks, **style)
            shown[one.title] = legend_line(**style)
        panel.set_title(part.upper() if part != "parity" else part, fontsize=11)
        panel.set_ylim(-0.03, 1.05)
    for panel in panels[:, 0]:
        panel.set_ylabel("share of runs")
    for panel in figure.axes:
        panel.set_xlabel("optimiser step")
    put_legend(figure, shown)
    return figure


def draw_long_adding(results: BeyondResults) -> Any:
    """Test loss by length, one curve for each model, and the published number of LEM."""
    figure, panels = new_figure(1, 1, 7.4, 4.4)
    panel = panels[0, 0]
    models: dict[str, list[Outcome]] = {}
    for one in results.shown:
        if one.tested:
            models.setdefault(one.title, []).append(one)
    shown: dict[str, Any] = {}
    for title, outcomes in models.items():
        ordered = sorted(outcomes, key=lambda one: one.setting.max_length)
        lengths = [one.setting.max_length for one in ordered]
        losses = [[run.test["loss"] for run in one.tested if run.test] for one in ordered]
        style = style_of(outcomes[0])
        draw_band(panel, lengths, bounds_of(losses), 0.1, **style)
        shown[title] = legend_line(**style)
    panel.plot(*LEM, color="#000000", marker="x", linestyle="none")
    shown["LEM, published"] = legend_line(color="#000000", marker="x", linestyle="none")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("time steps")
    panel.set_ylabel("test loss")
    put_legend(figure, shown)
    return figure


def draw_scores(results: BeyondResults) -> Any:
    """Test scores, one panel for each part: a dot for each run, a bar for the mean, a line for each published score."""
    parts = {part: [one for one in of if one.tested] for part, of in results.by_part().items()}
    width = 1.6 + 2.6 * len(parts) + 2.4 * bool(results.experiment.published)  # room for a legend
    figure, panels = new_figure(1, len(parts), width, 4.2)
    published: dict[str, Any] = {}
    for panel, (part, outcomes) in zip(panels.flat, parts.items(), strict=True):
        for place, one in enumerate(outcomes):
            tests, colour = one.scores["test"], STYLES[one.kind]["color"]
            panel.plot([place] * len(tests), tests, color=colour, marker="o", markersize=4, linestyle="none", alpha=0.6)
            middle = statistics.fmean(tests)
            panel.plot([place - 0.3, place + 0.3], [middle, middle], color=colour, linewidth=2.4)
        for style, (model, score) in zip(PUBLISHED_LINES, results.experiment.published.items(), strict=False):
            panel.axhline(score, color="#000000", linewidth=1.2, linestyle=style)
            published[f"{model}, published"] = legend_line(color="#000000", linestyle=style)
        panel.set_xticks(range(len(outcomes)), [one.title for one in outcomes], rotation=90)
        panel.set_title(part, fontsize=11)
        panel.set_ylabel(f"test {outcomes[0].measure}" if outcomes else "")
    if published:
        put_legend(figure, published)
    return figure


def bounds_of(values: Iterable[Sequence[float]]) -> list[list[float]]:
    """Lowest, mean and highest of the values at each place."""
    found = list(values)
    return [[fold(of) for of in found] for fold in (min, statistics.fmean, max)]


def style_of(outcome: Outcome) -> dict[str, Any]:
    """The style of a model's kind; marker and opacity of a DMU show its depth."""
    style, depth = STYLES[outcome.kind], outcome.depth or 1
    if outcome.setting.cell != "dmu":
        return style
    return style | {"marker": MARKERS.get(depth, "."), "alpha": SHADES.get(depth, 1.0)}


def perplexities(outcome: Outcome) -> list[float]:
    """The finite test perplexities of a study's runs."""
    found: Sequence[float] = [perplexity(run.test["loss"]) for run in outcome.tested if run.test]
    return [value for value in found if isfinite(value)]
