"""Statistics of runs: spreads, Welch's t-test, rank correlation, training times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from deepmemory.lab.paper import Spread
from deepmemory.lab.records import Study
from deepmemory.lab.training.stacks import is_large


def median(values: Iterable[float]) -> float | None:
    """The median; None if there are no values."""
    found = list(values)
    return statistics.median(found) if found else None


def seconds_by_session(study: Study) -> dict[int, float]:
    """Seconds that a study trained in each session: the longest of runs side by side, the sum over large networks.

    Large networks with exactly equal times are assumed to have trained side by side and count once. If one of them
    ended before the others, its time is counted twice.
    """
    found: dict[int, set[float]] = {}
    for run in study.runs:
        found.setdefault(run.session, set()).add(run.seconds)
    together = math.fsum if is_large(study.setting) else max
    return {session: together(seconds) for session, seconds in found.items()}


def spread(values: Sequence[float], best: int) -> Spread:
    """The value at index ``best``, mean and sample deviation; both None, nan in the paper, if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return Spread(values[best], None, None)
    return Spread(values[best], statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def perplexity(loss: float) -> float:
    """The usual perplexity of a cross-entropy; inf if it is too large for a float."""
    return math.exp(loss) if not loss > 700 else math.inf


def welch(difference: float, *samples: tuple[float, int]) -> float:
    """The two-sided p-value of Welch's t-test, for two samples of (standard deviation, runs).

    >>> round(welch(1.55, (1.74, 5), (0.47, 5)), 3)
    0.118
    """
    parts = [deviation**2 / runs for deviation, runs in samples]
    freedom = sum(parts) ** 2 / sum(part**2 / (runs - 1) for part, (_, runs) in zip(parts, samples, strict=True))
    t = abs(difference) / math.sqrt(sum(parts))
    # Integrates Student's density from -t to t. With x = sqrt(freedom) tan(angle) it is a power of the cosine: smooth.
    steps, end = 1000, math.atan(t / math.sqrt(freedom))
    heights = [math.cos(end * step / steps) ** (freedom - 1) for step in range(steps + 1)]
    area = (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])) * end / steps / 3
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - 2 * scale * area)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation; equal values share their ranks. None for few pairs, or if one side does not vary.

    >>> rank_correlation([(1, 10), (2, 100), (3, 1000)]), rank_correlation([(1, 3), (2, 2), (3, 1)])
    (1.0, -1.0)
    """
    if len(pairs) < 3:
        return None
    try:
        return statistics.correlation(*(ranks(side) for side in zip(*pairs, strict=True)))
    except statistics.StatisticsError:
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values get the mean of their places.

    >>> ranks([5, 1, 5])
    [2.5, 1.0, 2.5]
    """
    ordered = sorted(values)
    places = {value: ordered.index(value) + (ordered.count(value) + 1) / 2 for value in set(values)}
    return [places[value] for value in values]
