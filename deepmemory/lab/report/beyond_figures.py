"""The figures of the experiments beyond the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import isfinite
from typing import Any

from deepmemory.lab.report import words
from deepmemory.lab.report.figures import LEGEND, legend_line, new_figure
from deepmemory.lab.report.figures import STYLES as PAPER_STYLES
from deepmemory.lab.report.results.beyond import BeyondResults, Outcome, perplexity

STYLES: dict[str, dict[str, Any]] = {
    **PAPER_STYLES,
    "residual": {"color": "#E69F00", "linestyle": (0, (3, 1)), "marker": "X"},
}
WITHOUT_DEPTH = ("gru", "lstm", "rnn")


def draw_depth(results: BeyondResults) -> Any:
    """Test perplexity by depth, one panel for each size; models without depth are level lines."""
    parts = results.by_part()
    figure, panels = new_figure(1, len(parts), 2.2 + 3.4 * len(parts), 3.8)
    shown: dict[str, Any] = {}
    for panel, (part, outcomes) in zip(panels.flat, parts.items(), strict=True):
        kinds = dict.fromkeys(one.kind for one in outcomes)
        for kind in kinds:
            chosen = {one.depth or 0: one for one in outcomes if one.kind == kind}
            if kind == "residual":  # where nothing is added, it is a plain one
                chosen |= {one.depth: one for one in outcomes if one.kind == "dmu" and one.depth and one.depth < 3}
            points = {n: tests for n, one in sorted(chosen.items()) if (tests := perplexities(one))}
            if not points:
                continue
            style = STYLES[kind]
            shown[words.cell_title(kind)] = legend_line(**style)
            means = [statistics.fmean(tests) for tests in points.values()]
            if kind in WITHOUT_DEPTH:
                panel.axhline(means[0], linewidth=1.4, color=style["color"], linestyle=style["linestyle"])
                continue
            low, high = ([fold(tests) for tests in points.values()] for fold in (min, max))
            panel.plot(list(points), means, linewidth=1.6, markersize=4, **style)
            panel.fill_between(list(points), low, high, color=style["color"], alpha=0.15, linewidth=0)
        depths = sorted({one.depth for one in outcomes if one.depth})
        panel.set_xscale("log")
        panel.set_xticks(depths, [str(n) for n in depths])
        panel.minorticks_off()
        panel.set_xlabel("linear layers n of the transition")
        panel.set_title(part, fontsize=11)
    panels[0, 0].set_ylabel("test perplexity")
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", **LEGEND)
    return figure


def perplexities(outcome: Outcome) -> list[float]:
    """The finite test perplexities of a study's runs."""
    found: Sequence[float] = [perplexity(run.test["loss"]) for run in outcome.tested if run.test]
    return [value for value in found if isfinite(value)]
