"""Which trials count, which are tried again and which are surplus, when several workers share a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from optuna.trial import TrialState

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

ATTEMPTS = 3  # at a trial whose worker dies or fails


def first_attempt(trial: FrozenTrial) -> int:
    """The number of the first attempt at a trial."""
    return int(trial.user_attrs.get("retries", trial.number))


def point_of(trial: FrozenTrial) -> int | None:
    """The grid point of a trial, by its place in the grid; None if there is no grid."""
    return trial.user_attrs.get("point")


def work_of(trial: FrozenTrial) -> tuple[str, int]:
    """What a trial trains: its grid point, or its first attempt. Among trials with the same work, one is enough."""
    point = point_of(trial)
    return ("trial", first_attempt(trial)) if point is None else ("point", point)


def is_real(trial: FrozenTrial) -> bool:
    """Whether a trial counts: it was not dropped, and its worker lived long enough to choose a setting."""
    return "surplus" not in trial.user_attrs and bool(trial.params or trial.state != TrialState.FAIL)


class TrialCounts(NamedTuple):
    """How many trials a search has, by state."""

    counted: int  # trials that count towards the total, including those given up
    to_retry: list[FrozenTrial]
    given_up: list[FrozenTrial]


def count_trials(trials: Sequence[FrozenTrial]) -> TrialCounts:
    """Count trials; several attempts at the same trial count once."""
    attempts: dict[tuple[str, int], list[FrozenTrial]] = {}
    for trial in trials:
        if is_real(trial):
            attempts.setdefault(work_of(trial), []).append(trial)
    failed = [group for group in attempts.values() if all(trial.state == TrialState.FAIL for trial in group)]
    given_up = [group[-1] for group in failed if sum("stopped" not in t.user_attrs for t in group) >= ATTEMPTS]
    to_retry = [group[-1] for group in failed if group[-1] not in given_up]
    return TrialCounts(len(attempts) - len(to_retry), to_retry, given_up)


def failed_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a search that were given up after several attempts."""
    return count_trials(study.get_trials(deepcopy=False)).given_up


def is_surplus(trials: Sequence[FrozenTrial], number: int, total: int, grid: bool = False) -> bool:
    """Whether trials with lower numbers do all the work: two workers may start the last trial at the same time."""
    own = next(trial for trial in trials if trial.number == number)
    before = [trial for trial in trials if trial.number < number and is_real(trial)]
    if any(work_of(trial) == work_of(own) for trial in before if trial.state != TrialState.FAIL):
        return True
    if "retries" in own.user_attrs:  # a trial that was started has to be finished
        return False
    if grid:  # it has no point if another worker took the last one from the queue
        point = point_of(own)
        return point is None or point >= total
    counts = count_trials(before)
    return counts.counted + len(counts.to_retry) >= total


def taken_over(study: optuna.Study, number: int) -> bool:
    """Whether another worker has ended our trial, because this one was suspended or the storage very slow."""
    own = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    return any(trial.state == TrialState.FAIL and "stopped" not in trial.user_attrs for trial in own)


def absent_points(trials: Sequence[FrozenTrial], points: Sequence[dict[str, str]]) -> list[int]:
    """The grid points without a trial."""
    there = {point_of(trial) for trial in trials if is_real(trial)}
    return [point for point in range(len(points)) if point not in there]


def enqueue_again(study: optuna.Study, trial: FrozenTrial, points: Sequence[dict[str, str]]) -> None:
    """Queue a trial again; on a grid with its whole point, since a worker that died may have chosen only a part."""
    point = point_of(trial)
    if point is None:
        study.enqueue_trial(trial.params, {"retries": first_attempt(trial)})
    else:
        study.enqueue_trial(points[point], {"point": point, "retries": first_attempt(trial)})
