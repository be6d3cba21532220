"""Samplers, which choose the settings of a trial, and pruners, which stop bad trials early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optuna

from deepmemory.lab.scale.search.storage import experimental
from deepmemory.lab.settings import check_choice

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")


class SeededByTrial(optuna.samplers.BaseSampler):
    """A new sampler for every trial: what it draws depends on the trial's number, not on which worker asks or when."""

    def __init__(self, make: Callable[[int], optuna.samplers.BaseSampler], seed: int) -> None:
        self.make, self.seed, self.inner = make, seed, make(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See :class:`optuna.samplers.BaseSampler`."""
        digest = hashlib.sha256(f"{self.seed} {trial.number}".encode()).digest()
        self.inner = self.make(int.from_bytes(digest[:4], "little"))
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See :class:`optuna.samplers.BaseSampler`."""
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See :class:`optuna.samplers.BaseSampler`."""
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, values: BaseDistribution) -> Any:
        """See :class:`optuna.samplers.BaseSampler`."""
        return self.inner.sample_independent(study, trial, name, values)


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler of this name; the points of a grid are queued, so its sampler is never asked."""
    if check_choice("sampler", name, SAMPLERS) == "tpe":
        return SeededByTrial(make_tpe, seed)
    return SeededByTrial(lambda seed: optuna.samplers.RandomSampler(seed=seed), seed)


def make_tpe(seed: int) -> optuna.samplers.BaseSampler:
    """TPE that counts unfinished trials as bad ones, so that workers do not repeat each other's trials."""
    with experimental():
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def make_pruner(name: str, epochs: int) -> optuna.pruners.BasePruner:
    """The rule that stops a trial early: worse than the median at the same epoch, or not among the best of its rung."""
    if check_choice("pruner", name, PRUNERS) == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=epochs // 10)  # the first epochs tell little
    return optuna.pruners.SuccessiveHalvingPruner() if name == "halving" else optuna.pruners.NopPruner()
