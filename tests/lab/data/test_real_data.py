"""The counts of the registry and of the paper's authors, where the data is at hand."""

import pytest
import torch

from deepmemory.lab.data import DATASETS, EOS, MissingData, inventory, load_digits, load_music, load_pairs, load_text


def at_hand(load, *arguments):
    try:
        return load(*arguments)
    except MissingData as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["nottingham", "jsb-chorales", "musedata", "piano-midi", "ptb", "mnist"])
def test_counts(name):
    assert at_hand(inventory.count, DATASETS[name]) == DATASETS[name].counts


@pytest.mark.parametrize(
    ("name", "sounding"),
    [("nottingham", 699403), ("jsb-chorales", 53824), ("musedata", 856543), ("piano-midi", 231089)],
)
def test_music_has_as_many_sounding_keys_as_other_readers_find(name, sounding):
    music = at_hand(load_music, name)
    assert sum(int(roll.sum()) for roll in music["train"]) == sounding
    assert all(roll.dtype == torch.uint8 and roll.shape[1] == 88 for rolls in music.values() for roll in rolls)


def test_text_begins_as_the_file_does():
    corpus = at_hand(load_text)
    assert [corpus.words[i] for i in corpus.train[:4]] == ["aer", "banknote", "berlitz", "calloway"]
    assert corpus.words[:4] == ("the", "<unk>", EOS, "N")
    assert int((corpus.train == corpus.words.index(EOS)).sum()) == 42068
    assert int((corpus.train == corpus.words.index("<unk>")).sum()) == 45020


def test_digits_look_like_digits():
    digits = at_hand(load_digits)
    assert digits["train"].images.shape == (60000, 28, 28)
    assert digits["train"].labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert digits["train"].labels.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert digits["train"].images.float().mean().item() == pytest.approx(33.3184, abs=1e-3)  # 0.1307 of 255


def test_spanish_has_the_vocabularies_of_the_papers_authors():
    pairs = at_hand(load_pairs, "spanish")
    assert len(pairs.english.ids) == len(pairs.foreign.ids) == 118_964
    assert (len(pairs.foreign.words), len(pairs.english.words)) == (24_793, 12_933)
    assert pairs.sha256 == DATASETS["spanish"].files[0].contents_sha256


FIRST_30000 = [("spanish", 9_411, 4_932), ("german", 7_218, 4_546), ("german-2018", 7_524, 4_671)]


@pytest.mark.parametrize(("name", "foreign", "english"), FIRST_30000)
def test_the_first_30000_pairs(name, foreign, english):
    """In Spanish one word fewer than with ¡ as a word of its own, which the authors' numbers say it is not."""
    pairs = at_hand(load_pairs, name, 30_000)
    assert len(pairs.english.ids) == 30_000
    assert (len(pairs.foreign.words) - 2, len(pairs.english.words) - 2) == (foreign, english)
    assert pairs.english.lengths.max() < 12  # the shortest sentences


def test_german_begins_with_its_first_pair():
    pairs = at_hand(load_pairs, "german", 1)
    assert [pairs.english.words[i] for i in pairs.english.ids[0]] == ["<start>", "go", ".", "<end>"]
    assert [pairs.foreign.words[i] for i in pairs.foreign.ids[0]] == ["<start>", "geh", ".", "<end>"]


@pytest.mark.parametrize("name", ["german", "german-2018"])
def test_german_whole(name):
    assert at_hand(inventory.count, DATASETS[name]) == DATASETS[name].counts
