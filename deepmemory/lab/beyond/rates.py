"""Which learning rate is a model's best: the same rule for what is trained further and for what is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from deepmemory.lab.beyond.models import kind_of
from deepmemory.lab.paper import depth_of
from deepmemory.lab.records import Study
from deepmemory.lab.settings import Setting


def best_studies(studies: Iterable[Study], part_of: Callable[[Setting], str]) -> list[Study]:
    """Of the studies of each model of a part, such as those at several rates, the one with the lowest validation loss.

    The loss is the mean over the seeds that all of them have, so that runs that only the best one was given do not
    count for or against it. A run whose loss was never finite counts as infinite.
    """
    models: dict[tuple[str, str, int], list[Study]] = {}
    for study in studies:
        setting = study.setting
        models.setdefault((part_of(setting), kind_of(setting), depth_of(setting)), []).append(study)
    return [min(of_model, key=lambda study: mean_loss(study, common_seeds(of_model))) for of_model in models.values()]


def common_seeds(studies: Sequence[Study]) -> set[int]:
    """The seeds that every study has."""
    return set.intersection(*({run.seed for run in study.runs} for study in studies))


def mean_loss(study: Study, seeds: set[int]) -> float:
    """The mean over some runs of each one's lowest validation loss; inf where there is none."""
    losses = [
        run.at_epoch(run.best_epoch)["valid_loss"] if run.best_epoch else math.inf
        for run in study.runs
        if run.seed in seeds
    ]
    return fmean(losses) if losses else math.inf
