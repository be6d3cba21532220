"""The chance levels are those of the data."""

import math
import os
from dataclasses import replace

import pytest
import torch

from deepmemory.lab import paper
from deepmemory.lab.data import load_music, load_pairs, load_text
from deepmemory.lab.settings import GROUPS, MUSIC, PAPER_TASKS, SYNTHETIC, Setting
from deepmemory.lab.tasks import chance_level, task_of
from deepmemory.lab.tasks.translation import CHANCE as PAIRS
from deepmemory.lab.training.random_streams import TEST, sequence_keys

DATA = os.environ.get("DEEPMEMORY_DATA")
needs_data = pytest.mark.missing("data sets", None if DATA else "$DEEPMEMORY_DATA says where they are")


def entropy(counts: torch.Tensor, words: torch.Tensor) -> float:
    """Mean cross-entropy of words under these frequencies."""
    return float(-(counts / counts.sum()).log()[words].mean())


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_every_quick_study_has_one(task):
    level = chance_level(paper.quick(paper.setting(task, "dmu")))
    assert level.scores["loss"] > 0
    assert task in SYNTHETIC or paper.measure_of(task) in level.scores


@pytest.mark.parametrize("task", SYNTHETIC)
def test_synthetic_tasks(task):
    setting = paper.setting(task, "dmu")
    target = task_of(setting).make(sequence_keys(torch.zeros(1, dtype=torch.int64), TEST, 0, 20_000)).target[0]
    scores = chance_level(setting).scores
    if task == "adding":
        assert float(target.var()) == pytest.approx(scores["loss"], rel=0.03)
        return
    shares = target.bincount().double() / len(target)
    assert float(-(shares * shares.log()).sum()) == pytest.approx(scores["loss"], rel=0.01)
    assert float(shares.max()) == pytest.approx(scores["accuracy"], rel=0.1)


@pytest.mark.parametrize("group", GROUPS)
def test_state_tracking(group):
    setting = Setting("state-tracking", elements=group, min_length=16, max_length=16)
    target = task_of(setting).make(sequence_keys(torch.zeros(1, dtype=torch.int64), TEST, 0, 20_000)).target[0]
    shares = target.flatten().bincount().double() / target.numel()
    scores = chance_level(setting).scores
    assert float(-(shares * shares.log()).sum()) == pytest.approx(scores["loss"], rel=0.01)
    assert float(shares.max()) == pytest.approx(scores["accuracy"], rel=0.1)


@needs_data
@pytest.mark.parametrize("name", MUSIC)
def test_music(name):
    pieces = load_music(name, DATA)
    train, test = (torch.cat([piece[1:] for piece in pieces[split]]).double() for split in ("train", "test"))
    shares = train.mean(0).clamp(1e-6, 1 - 1e-6)  # a key that never sounds may sound in the test
    loss = -(test * shares.log() + (1 - test) * (1 - shares).log()).sum(1).mean()
    assert float(loss) == pytest.approx(chance_level(Setting("polymusic", music=name)).scores["loss"], abs=0.001)


@needs_data
def test_language():
    corpus = load_text(DATA)
    loss = entropy(corpus.train.bincount().double(), corpus.test)
    for task in ("natlang", "ptb"):
        assert math.exp(loss) == pytest.approx(chance_level(Setting(task)).scores["perplexity"], abs=0.01)


@needs_data
@pytest.mark.parametrize(("language", "count"), PAIRS)
def test_translation(language, count):
    english = load_pairs(language, count, DATA).english
    places = torch.arange(english.ids.shape[1])
    words = english.ids[(places > 0) & (places < english.lengths[:, None])]
    counts = words.bincount().double()
    scores = chance_level(replace(Setting("translation"), language=language, pairs=count)).scores
    assert math.exp(entropy(counts, words)) == pytest.approx(scores["perplexity"], abs=0.01)
    assert float(counts.max() / counts.sum()) == pytest.approx(scores["accuracy"], abs=0.001)
