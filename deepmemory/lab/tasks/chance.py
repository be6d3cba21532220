"""What a network scores that ignores its input: a score that is no better shows nothing learnt."""

from __future__ import annotations

import math
from typing import NamedTuple

from deepmemory.lab.settings import DEFAULTS, Setting
from deepmemory.lab.tasks.state_tracking import product_table


class Level(NamedTuple):
    """The scores of the best answer that is always the same."""

    answer: str  # what it is
    scores: dict[str, float]  # by measure


# Of real data, with the frequencies of the whole training set, or of all pairs; tests/lab/tasks/test_chance.py
# computes them again where the data is. Limits of the data change them little.
MUSIC = {"nottingham": 10.261, "jsb-chorales": 11.090, "musedata": 11.515, "piano-midi": 11.052}
WORDS = 639.30
PAIRS: dict[tuple[str, int], tuple[float, float]] = {  # perplexity and accuracy, by language and number of pairs
    ("spanish", 5000): (71.17, 0.203),
    ("spanish", 30000): (129.79, 0.167),
    ("german", 30000): (109.12, 0.177),
}
ADDING = 0.039  # the variance of the target: a mark on the first step counts for nothing


def chance_level(setting: Setting) -> Level | None:
    """The chance level of a study; None where it is not known."""
    if setting.task == "adding":
        return Level("always the mean", {"loss": ADDING})
    if setting.task == "temporal-order":
        return Level("eight equal classes", {"loss": math.log(8), "accuracy": 1 / 8})
    if setting.task == "noisy-sequence":
        return Level("two equal symbols", {"loss": math.log(2), "accuracy": 1 / 2})
    if setting.task == "polymusic":
        return Level("the frequency of each key", {"loss": MUSIC[setting.music]})
    if setting.task in ("natlang", "ptb"):
        return Level("the frequency of each word", {"perplexity": WORDS, "loss": math.log(WORDS)})
    if setting.task == "translation":
        known = PAIRS.get((setting.language, setting.pairs)) if setting.release == DEFAULTS["release"] else None
        if known is None:
            return None
        perplexity, accuracy = known
        scores = {"perplexity": perplexity, "loss": math.log(perplexity), "accuracy": accuracy}
        return Level("the frequency of each word", scores)
    if setting.task == "state-tracking":
        size, _ = product_table(setting.elements)
        return Level(f"{size} equal elements", {"loss": math.log(size), "accuracy": 1 / size})
    return Level("ten equal classes", {"loss": math.log(10), "accuracy": 1 / 10})
