"""Experiments beyond the paper: the studies of each, in one file.

Importing this module does not import torch, so that the command line can list the experiments at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deepmemory.lab.beyond import cells, depth, long_adding, music, pixels, state_tracking
from deepmemory.lab.beyond.models import SIZES, kind_of, size_of
from deepmemory.lab.settings import GROUPS, Setting, check_choice


@dataclass(frozen=True)
class Experiment:
    """Studies that are compared with one another."""

    title: str
    runs: int  # per model in the report
    search_runs: int  # per study while the best learning rate of a model is searched
    parts: tuple[str, ...]  # that can be trained separately, such as the sizes of a model
    settings: Callable[[], list[Setting]]  # of all studies; those of the paper among them are shown, but not owned
    part_of: Callable[[Setting], str]
    owns: Callable[[Setting], bool]  # whether a recorded study belongs to the experiment, also with changed settings
    sample: Callable[[], list[Setting]]  # a few of the studies,
    quick: Callable[[Setting], Setting]  # and the small version of a study
    published: Mapping[str, float] = field(default_factory=dict)  # test scores of other papers, by model


EXPERIMENTS: dict[str, Experiment] = {
    "depth": Experiment(
        title="Depth: language models of equal size",
        runs=depth.RUNS,
        search_runs=depth.SEARCH_RUNS,
        parts=tuple(depth.SIZES),
        settings=depth.all_settings,
        part_of=depth.part_of,
        owns=lambda setting: setting.task == "ptb",
        sample=depth.sample,
        quick=depth.quick,
    ),
    "state-tracking": Experiment(
        title="State tracking: products of permutations",
        runs=state_tracking.RUNS,
        search_runs=state_tracking.SEARCH_RUNS,
        parts=GROUPS,
        settings=state_tracking.settings,
        part_of=lambda setting: setting.elements,
        owns=lambda setting: setting.task == "state-tracking",
        sample=state_tracking.sample,
        quick=state_tracking.quick,
    ),
    "long-adding": Experiment(
        title="Long memory: Adding over thousands of steps",
        runs=long_adding.RUNS,
        search_runs=long_adding.RUNS,
        parts=tuple(map(str, long_adding.LENGTHS)),
        settings=long_adding.settings,
        part_of=lambda setting: str(setting.max_length),
        owns=lambda setting: setting.task == "adding" and setting.max_length >= long_adding.LONG,
        sample=long_adding.sample,
        quick=long_adding.quick,
    ),
    "pixels": Experiment(
        title="Pixels: permuted MNIST with more weights",
        runs=pixels.RUNS,
        search_runs=pixels.SEARCH_RUNS,
        parts=tuple(SIZES),
        settings=pixels.settings,
        part_of=size_of,
        owns=pixels.owns,
        sample=pixels.sample,
        quick=pixels.quick,
        published=pixels.PUBLISHED,
    ),
    "music": Experiment(
        title="Music: Nottingham with more weights",
        runs=music.RUNS,
        search_runs=music.SEARCH_RUNS,
        parts=tuple(SIZES),
        settings=music.settings,
        part_of=size_of,
        owns=music.owns,
        sample=music.sample,
        quick=music.quick,
        published=music.PUBLISHED,
    ),
    "cells": Experiment(
        title="GRU and LSTM on the paper's data",
        runs=cells.RUNS,
        search_runs=cells.SEARCH_RUNS,
        parts=tuple(cells.PARTS),
        settings=cells.settings,
        part_of=cells.part_of,
        owns=cells.owns,
        sample=cells.sample,
        quick=cells.quick,
    ),
}
OF_TASK: dict[str, tuple[str, Callable[[str, int], Setting]]] = {  # experiment and setting of a kind and depth
    "ptb": ("depth", depth.setting),
    "state-tracking": ("state-tracking", state_tracking.setting),
}


def setting(task: str, kind: str, depth: int = 1, quick: bool = False) -> Setting:
    """The setting of a task beyond the paper's, for one kind of model."""
    name, of_kind = OF_TASK[check_choice("task", task, tuple(OF_TASK))]
    made = of_kind(kind, depth)
    return EXPERIMENTS[name].quick(made) if quick else made


def experiment_of(setting: Setting) -> str | None:
    """The experiment that owns a study; None for those of the paper."""
    return next((name for name, one in EXPERIMENTS.items() if one.owns(setting)), None)


def selection(
    names: list[str], parts: list[str] | None = None, kinds: list[str] | None = None, quick: bool = False
) -> dict[str, list[Setting]]:
    """The settings of some experiments, of all parts and kinds or only of these; with ``quick``, a few small ones."""
    experiments = {name: EXPERIMENTS[check_choice("experiment", name, tuple(EXPERIMENTS))] for name in names}
    for part in parts or ():
        check_choice("part", part, tuple(part for one in experiments.values() for part in one.parts))
    known = dict.fromkeys(kind_of(setting) for one in experiments.values() for setting in one.settings())
    for kind in kinds or ():
        check_choice("kind", kind, tuple(known))
    found: dict[str, list[Setting]] = {}
    for name, one in experiments.items():
        settings = one.sample() if quick and parts is None and kinds is None else one.settings()
        chosen = [
            setting
            for setting in settings
            if (parts is None or one.part_of(setting) in parts) and (kinds is None or kind_of(setting) in kinds)
        ]
        found[name] = list(dict.fromkeys(one.quick(setting) if quick else setting for setting in chosen))
    return found
