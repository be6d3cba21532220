"""What a model says is what its network finds likely; a search never loses what it had."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import real_data
from lab.checkpoints import made, small, train
from lab.test_cli import error_of, invoke

from deepmemory.lab.data import END, EOS, START, Corpus, MissingData, Pairs
from deepmemory.lab.data.pairs import as_sentences
from deepmemory.lab.tasks import NatLang, Translation, task_of
from deepmemory.lab.training.network import Translator
from deepmemory.lab.use import decoding, loading
from deepmemory.lab.use.decoding import (
    beam_search,
    bleu,
    continue_text,
    continue_tune,
    decode,
    greedy,
    sample_keys,
    translate,
)
from deepmemory.lab.use.loading import TrainedModel, load_model
from deepmemory.lab.use.sound import midi, roll_of

CELLS = {
    "dmu": {"transition": (6,)},
    "lstm": {"hidden": (4, 3)},
    "rhn": {"depth": 2},
    "gru": {"hidden": (5, 5)},
}


def random_translator(seed, cell="dmu", words=6):
    """One whose words differ in likelihood and whose sentences end now and then."""
    torch.manual_seed(seed)
    network = Translator(small("translation", cell=cell, **CELLS[cell]), 9, words).double().eval()
    with torch.no_grad():
        network.output.weight.mul_(6)
        network.output.bias[END] = 0.5
    return network


def sentences(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (count,), generator=generator)
    return torch.randint(0, 9, (count, 6), generator=generator), lengths


def score(network, foreign, length, words):
    """The log-probability of words, all at once instead of step by step."""
    state = network.encode(foreign[None], length[None])
    total = 0.0
    for before, word in itertools.pairwise([START, *words]):
        answer, state = network.step(torch.tensor([before]), state)
        total += answer.log_softmax(-1)[0, word].item()
    return total


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from(list(CELLS)), st.integers(1, 7), st.sampled_from([0.0, 0.7, 1.0]))
def test_searches(seed, cell, width, power):
    network, (foreign, lengths) = random_translator(seed, cell), sentences(seed)
    simple = greedy(network, foreign, lengths, 12)
    for found, one in zip(beam_search(network, foreign, lengths, 1, power, 12), simple, strict=True):
        assert [found[0].words, found[0].finished] == [one.words, one.finished]
        assert found[0].score == pytest.approx(one.score)
    together = beam_search(network, foreign, lengths, width, power, 12)
    best = decode(network, foreign, lengths, width, power, 12)
    for row, found in enumerate(together):
        assert len({one.words for one in found}) == len(found) <= width
        assert [one.rank(power) for one in found] == sorted((one.rank(power) for one in found), reverse=True)
        assert best[row].rank(power) >= simple[row].rank(power)
        assert best[row].rank(power) >= found[0].rank(power)
        alone = beam_search(network, foreign[row : row + 1], lengths[row : row + 1], width, power, 12)[0]
        assert [one.words for one in alone] == [one.words for one in found]
        for one in found:
            said = [*one.words, END] if one.finished else one.words
            assert END not in one.words
            assert one.finished or len(one.words) == 12
            assert one.score == pytest.approx(score(network, foreign[row], lengths[row], said))


def test_a_wide_beam_finds_and_keeps_everything():
    network, (foreign, lengths) = random_translator(3, words=4), sentences(3, 2)
    others = [word for word in range(4) if word != END]
    everything = {words for count in range(4) for words in itertools.product(others, repeat=count)}
    for found in beam_search(network, foreign, lengths, 100, 0.0, 3):
        assert {one.words for one in found} == everything
        assert all(one.finished == (len(one.words) < 3) for one in found)
        assert math.fsum(math.exp(one.score) for one in found) == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        beam_search(network, foreign, lengths, 0)


def counting():
    """Sentences that count: from any number on, four to seven words."""
    counts = [[(i + k) % 4 for k in range(4 + i // 4 % 4)] for i in range(48)]
    foreign, english = (
        as_sentences([[words[n] for n in row] for row in counts]) for words in (real_data.SPOKEN, real_data.MEANT)
    )
    return Translation(Pairs("spanish", foreign, english, "made"))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A translator that has learnt to count."""
    setting = small("translation", cell="gru", hidden=(48,), lr=0.002, epochs=60, batch=8, feedback="teacher")
    return train(tmp_path_factory.mktemp("runs"), setting, [3], counting())


@pytest.fixture
def on_made_data(monkeypatch):
    """Loaders find made data."""
    monkeypatch.setattr(loading, "task_of", lambda setting, data: made(setting))


def test_a_trained_model_translates(numbers, monkeypatch, capsys):
    monkeypatch.setattr(loading, "task_of", lambda *_: counting())
    model = load_model(numbers)
    said, unknown = translate(model, "¡Uno, dos trés once CUATRO!")
    assert said.startswith("one two three four")
    assert unknown == [",", "once", "!"]
    assert translate(model, "uno dos tres cuatro") == (said, [])
    with pytest.raises(ValueError, match="none of the words of 'once'"):
        translate(model, "once")
    scores = bleu(model, width=3)
    assert scores.sentences == 7
    assert min(scores.greedy, scores.beam) > 80
    assert "tok:none" in scores.signature
    assert bleu(model, width=1, limit=2)[::2] == (2, None)

    result = invoke("translate", numbers, "once uno dos tres cuatro")
    assert result.stdout == said + "\n"
    assert "left out: once" in result.stderr
    told = json.loads(invoke("translate", numbers, "--bleu", "--json").stdout)
    assert told["greedy"] == scores.greedy
    assert "beam of 5" in invoke("translate", numbers.parent, "--bleu", "--limit", 3).stdout
    assert "a sentence or --bleu" in error_of(monkeypatch, capsys, "translate", numbers)
    assert "expected a model of polymusic" in error_of(monkeypatch, capsys, "compose", numbers)


def test_translations_are_in_the_order_that_was_asked_for(numbers, monkeypatch):
    monkeypatch.setattr(loading, "task_of", lambda *_: counting())
    model = load_model(numbers)
    items = torch.tensor([12, 0, 1, 9, 4])
    together = list(decoding.translations(model, items, 2))
    monkeypatch.setattr(decoding, "SENTENCES_AT_ONCE", 1)
    assert together == list(decoding.translations(model, items, 2))
    assert together == [next(decoding.translations(model, item[None], 2)) for item in items]


WORDS = ("the", EOS, "cat", "<unk>", "N", "sat")


def speaker(cell="lstm", words=WORDS):
    torch.manual_seed(0)
    text = torch.arange(50) % len(words)
    setting = small("natlang", cell=cell)
    task = NatLang(Corpus(text, text, text, words))
    return TrainedModel(task.network(setting).eval(), setting, 0, task)


def test_text_goes_on_as_the_network_finds_likely():
    model = speaker()
    said, unknown = continue_text(model, "The dog sat 17\n", 12, temperature=0)
    assert unknown == ["dog"]
    words = [EOS, "the", "<unk>", "sat", "N", EOS]
    numbers = [WORDS.index(word) for word in words]
    for _ in range(12):  # from the beginning every time, without a state
        with torch.no_grad():
            logits = model.network(torch.tensor([numbers]))[0][0, -1]
        logits[WORDS.index("<unk>")] = -math.inf  # no word, and never said
        numbers.append(int(logits.argmax()))
    shown = " ".join(WORDS[number] for number in numbers[1:])
    assert said == "\n".join(line.strip() for line in shown.split(EOS))
    assert continue_text(model, "the dog sat 17\n", 12, top=1, seed=5)[0] == said
    assert continue_text(model, "", 3)[1] == []


def test_the_mark_of_rare_words_is_never_said():
    model = speaker()
    with torch.no_grad():
        model.network.output.bias[WORDS.index("<unk>")] = 50
    for temperature in (0, 1):
        assert "<unk>" not in continue_text(model, "the", 50, temperature=temperature, top=0)[0]


def test_text_is_drawn_by_its_likelihood():
    model = speaker()
    said = {continue_text(model, "the cat", 8, seed=seed)[0] for seed in (0, 0, 1, 2)}
    assert len(said) == 3
    with torch.no_grad():
        model.network.output.weight.zero_()
        model.network.output.bias.copy_(torch.tensor([0.0, -50, math.log(3), -50, -50, -50]))
    drawn = continue_text(model, "the", 4000, top=0)[0].split()[1:]
    assert set(drawn) == {"the", "cat"}
    assert drawn.count("cat") / 4000 == pytest.approx(0.75, abs=0.03)
    drawn = continue_text(model, "the", 2000, temperature=0.5)[0].split()[1:]
    assert drawn.count("cat") / 2000 == pytest.approx(0.9, abs=0.03)
    greedy, almost = (continue_text(model, "the", 9, temperature=low)[0] for low in (0, 1e-320))
    assert almost == greedy
    with pytest.raises(ValueError, match=r"temperature should be .* got -1"):
        continue_text(model, "the", 1, temperature=-1)
    with pytest.raises(ValueError, match="none of the words"):
        continue_text(speaker(words=("a", "b")), "dog")


def test_generate_by_the_command(tmp_path, on_made_data):
    path = train(tmp_path, small("natlang"), [0])
    result = invoke("generate", path, "1 2 spam", "--words", 5, "--seed", 3)
    assert result.stdout.startswith("1 2 ")
    assert len(result.stdout.split()) == 7  # made data has no word for unknown ones
    assert "spam" in result.stderr
    newest = ["generate", "1 2 spam", "--out", tmp_path]  # without a checkpoint: the newest model of the task
    again = json.loads(invoke(*newest, "--words", 5, "--seed", 3, "--json").stdout)
    assert again["text"] == result.stdout.strip()
    told = json.loads(invoke("list", "--out", tmp_path, "--json").stdout.splitlines()[0])
    assert (told["task"], told["cell"], told["runs"], told["path"]) == ("natlang", "dmu", 1, str(path.parent))


def test_without_a_trained_model_the_error_says_how_to_train_one(tmp_path, monkeypatch, capsys, nothing_shipped):
    for command in (["inspect"], ["export"], ["compose"], ["translate", "hola"], ["generate", "the"]):
        assert "dmu train " in error_of(monkeypatch, capsys, *command, "--out", tmp_path)
    assert "dmu train " in invoke("list", "--out", tmp_path).stdout
    assert "in quotes, got 3" in error_of(monkeypatch, capsys, "generate", "two", "words", "more", "--out", tmp_path)


@pytest.mark.parametrize("cell", CELLS)
def test_a_tune_goes_on_as_the_network_finds_likely(cell):
    torch.manual_seed(0)
    task, setting = real_data.music(), small("polymusic", cell=cell, **CELLS[cell])
    model = TrainedModel(task.network(setting).eval(), setting, 0, task)
    begun = decoding.piece(model, 3)[:4]
    roll = continue_tune(model, begun, 6, temperature=0)
    assert roll.dtype == torch.uint8
    assert torch.equal(roll[:4], begun)
    for end in range(4, 10):
        with torch.no_grad():
            answer = model.network(roll[:end].float()[None])[0][0, -1]
        assert torch.equal(roll[end].bool(), answer > 0)
    assert torch.equal(continue_tune(model, begun, 20, seed=1), continue_tune(model, begun, 20, seed=1))
    assert not torch.equal(continue_tune(model, begun, 20, seed=1), continue_tune(model, begun, 20, seed=2))
    with pytest.raises(ValueError, match="no tune 7; the test split of nottingham has 0 to 6"):
        decoding.piece(model, 7)
    with pytest.raises(ValueError, match="at least one frame"):
        continue_tune(model, begun[:0])


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 2**31))
def test_keys_sampled_together_are_as_many_as_expected(chances, seed):
    chance = torch.tensor(chances, dtype=torch.float64)
    keys = sample_keys(chance, torch.Generator().manual_seed(seed))
    assert keys.dtype == torch.uint8
    assert abs(keys.sum().item() - chance.sum().item()) < 1
    assert not keys[chance == 0].any()
    assert keys[chance == 1].all()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20), st.integers(0, 2**31))
def test_a_chord_is_held_or_makes_room_for_as_many_new_keys(keys, seed):
    chance, before = torch.tensor([key[0] for key in keys], dtype=torch.float64), torch.tensor([key[1] for key in keys])
    drawn = sample_keys(chance, torch.Generator().manual_seed(seed), before=before).bool()
    held = drawn & before
    assert (drawn & ~before).sum() < max(chance.sum() - held.sum(), 0) + 1
    assert drawn[before & (chance > 1 - decoding.UNLIKELY)].all()
    assert not drawn[before & (chance < decoding.UNLIKELY)].any()
    for ended in chance[before & ~drawn]:  # the least likely ones
        assert (ended <= chance[held]).all()


@pytest.mark.parametrize(
    ("chance", "before", "sampling"),
    [
        ([0.9, 0.1, 0.5, 0.0, 0.25, 1.0], None, "alone"),
        ([0.9, 0.5, 0.0, 0.25, 1.0], None, "together"),
        ([0.6, 0.6, 0.4, 0.4], [1, 1, 0, 0], "together"),
    ],
)
def test_every_key_sounds_as_often_as_its_probability_says(chance, before, sampling):
    chance, before = torch.tensor(chance), None if before is None else torch.tensor(before)
    generator = torch.Generator().manual_seed(0)
    often = torch.stack([sample_keys(chance, generator, sampling, before) for _ in range(4000)]).double().mean(0)
    assert (often - chance).abs().max() < 4 * 0.5 / 4000**0.5  # four standard errors


def test_a_chord_changes_as_a_whole():
    chance, before = torch.tensor([0.6, 0.6, 0.4, 0.4]), torch.tensor([1, 1, 0, 0])
    drawn = [sample_keys(chance, torch.Generator().manual_seed(seed), before=before) for seed in range(50)]
    assert {tuple(keys.tolist()) for keys in drawn} == {(1, 1, 0, 0), (0, 0, 1, 1)}


def test_compose_by_the_command(tmp_path, on_made_data, monkeypatch, capsys):
    path = train(tmp_path, small("polymusic"), [0])
    told = json.loads(invoke("compose", path, "--steps", 30, "--to", tmp_path / "a" / "tune.mid", "--json").stdout)
    assert told["composed"] == 30
    roll = roll_of((tmp_path / "a" / "tune.mid").read_bytes())
    assert torch.equal(roll[: told["given"]], real_data.music().pieces["test"][0])
    assert (tmp_path / "a" / "tune.wav").read_bytes()[:4] == b"RIFF"

    begun = torch.zeros(3, 88)
    begun[:, 40] = 1
    (tmp_path / "mine.mid").write_bytes(midi(begun))
    mine = ["compose", path, "--from", tmp_path / "mine.mid"]
    assert "2 frames given, 5 composed" in invoke(*mine, "--steps", 5, "--given", 2, "--to", tmp_path / "tune").stdout
    assert torch.equal(roll_of((tmp_path / "tune.mid").read_bytes())[:2], begun[:2].byte())
    assert "give one of them" in error_of(monkeypatch, capsys, *mine, "--tune", 1)


def test_real_words_make_a_round_trip():
    """The tasks' own data, where it is at hand."""
    setting = small("translation", pairs=50)
    try:
        task = task_of(setting)
    except MissingData as error:
        pytest.skip(str(error))
    model = TrainedModel(task.network(setting).eval(), setting, 0, task)
    assert translate(model, "¡Vete!")[1] == []
