"""The choice of a model's best learning rate: the same rule for further training and for the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from deepmemory.lab.beyond.models import kind_of
from deepmemory.lab.paper import depth_of
from deepmemory.lab.records import Study
from deepmemory.lab.settings import Setting


def model_of(setting: Setting, part_of: Callable[[Setting], str]) -> tuple[str, str, int]:
    """What the studies of a model at several rates have in common: part, kind and depth."""
    return part_of(setting), kind_of(setting), depth_of(setting)


def to_search(settings: Iterable[Setting], part_of: Callable[[Setting], str]) -> list[Setting]:
    """The settings of models that have more than one, such as several rates."""
    found = list(settings)
    counts = Counter(model_of(setting, part_of) for setting in found)
    return [setting for setting in found if counts[model_of(setting, part_of)] > 1]


def best_studies(studies: Iterable[Study], part_of: Callable[[Setting], str]) -> list[Study]:
    """For each model of a part, the study with the lowest validation loss, such as the one at the best rate.

    The loss is the mean over the seeds that all studies of the model have, so that further runs of one of them do not
    count for or against it. A run whose loss was never finite counts as infinite.
    """
    models: dict[tuple[str, str, int], list[Study]] = {}
    for study in studies:
        models.setdefault(model_of(study.setting, part_of), []).append(study)
    return [min(of_model, key=lambda study: mean_loss(study, common_seeds(of_model))) for of_model in models.values()]


def common_seeds(studies: Sequence[Study]) -> set[int]:
    """The seeds that every study has."""
    return set.intersection(*({run.seed for run in study.runs} for study in studies))


def mean_loss(study: Study, seeds: set[int]) -> float:
    """The mean of the lowest validation losses of the runs with these seeds; inf if there is none."""
    losses = [
        run.at_epoch(run.best_epoch)["valid_loss"] if run.best_epoch else math.inf
        for run in study.runs
        if run.seed in seeds
    ]
    return fmean(losses) if losses else math.inf
