"""Output of trained models: translations by greedy or beam search, sampled text and music."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepmemory.lab.data.music import KEYS
from deepmemory.lab.data.pairs import END, START, split_words
from deepmemory.lab.data.text import EOS
from deepmemory.lab.settings import check_choice
from deepmemory.lab.tasks import NatLang, PolyMusic, Translation
from deepmemory.lab.tasks.translation import until_end
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.network import Translator
from deepmemory.lab.use.loading import TrainedModel, expect_task

UNKNOWN, NUMBER = "<unk>", "N"  # how the Penn Treebank writes rare words and numbers
TOGETHER, ALONE = SAMPLINGS = ("together", "alone")  # how the keys of a frame are sampled
UNLIKELY = 0.2  # below this probability, a key of a chord hardly ever begins or ends
SENTENCES_AT_ONCE = 256  # in one batch, counting every beam


class Hypothesis(NamedTuple):
    """A translation found by a search."""

    words: tuple[int, ...]  # without start and end
    score: float  # log-probability of all words, including the end of the sentence if it was reached
    finished: bool  # ended by itself, not by reaching the word limit

    def rank(self, power: float) -> tuple[bool, float]:
        """The key for sorting: finished ones first, then by log-probability / words ** power."""
        return self.finished, self.score / (len(self.words) + self.finished) ** power


def word_limit(foreign: Tensor) -> int:
    """The number of words after which a translation is cut off."""
    return 2 * foreign.shape[1] + 10


@torch.no_grad()
def greedy(network: Translator, foreign: Tensor, lengths: Tensor, max_words: int | None = None) -> list[Hypothesis]:
    """Greedy search, for sentences (B, T) side by side: the most likely word at every step until each sentence ends."""
    state = network.encode(foreign, lengths)
    word = torch.full_like(lengths, START)
    going = torch.ones_like(lengths, dtype=torch.bool)
    score = torch.zeros(len(lengths), dtype=torch.float64)
    said = []
    for _ in range(word_limit(foreign) if max_words is None else max_words):
        answer, state = network.step(word, state)
        likely, word = answer.double().log_softmax(-1).max(-1)
        score += likely * going
        word = torch.where(going, word, END)
        said.append(word)
        going = going & (word != END)
        if not going.any():
            break
    words = torch.stack(said, 1)
    return [
        Hypothesis(tuple(until_end(row)), value, not open_)
        for row, value, open_ in zip(words, score.tolist(), going.tolist(), strict=True)
    ]


@torch.no_grad()
def beam_search(
    network: Translator, foreign: Tensor, lengths: Tensor, width: int, power: float = 1.0, max_words: int | None = None
) -> list[list[Hypothesis]]:
    """Beam search: up to ``width`` translations of each sentence (B, T), the best first.

    A finished hypothesis is set aside and narrows the beam by one, so a width of 1 is :func:`greedy`. ``power`` 1 ranks
    by log-probability per word, 0 by log-probability.
    """
    if width < 1:
        raise ValueError(f"the width of a beam should be at least 1, got {width}")
    batch, steps = len(lengths), word_limit(foreign) if max_words is None else max_words
    places = torch.arange(width).repeat(batch, 1)
    rows = torch.arange(batch)[:, None]
    state = tree_map(lambda tensor: tensor.repeat_interleave(width, 1), network.encode(foreign, lengths))
    score = torch.full((batch, width), -torch.inf, dtype=torch.float64)
    score[:, 0] = 0
    words = torch.full((batch, width, 1), START)
    ended: list[list[Hypothesis]] = [[] for _ in range(batch)]
    for _ in range(steps):
        answer, state = network.step(words[..., -1].flatten(), state)
        likely = score[..., None] + answer.double().log_softmax(-1).unflatten(0, (batch, width))
        score, best = likely.flatten(1).topk(width)  # [B, K], the best first
        parent, word = best // likely.shape[-1], best % likely.shape[-1]
        free = torch.tensor([[width - len(of_row)] for of_row in ended])
        score = score.masked_fill(places >= free, -torch.inf)
        words = torch.cat([words[rows, parent], word[..., None]], -1)
        moved = (rows * width + parent).flatten()
        state = tree_map(lambda tensor, moved=moved: tensor.index_select(1, moved), state)
        for row, place in ((word == END) & score.isfinite()).nonzero().tolist():
            said = tuple(words[row, place, 1:-1].tolist())
            ended[row].append(Hypothesis(said, score[row, place].item(), True))
        score = score.masked_fill(word == END, -torch.inf)
        if not score.isfinite().any():
            break
    for row, place in score.isfinite().nonzero().tolist():
        ended[row].append(Hypothesis(tuple(words[row, place, 1:].tolist()), score[row, place].item(), False))
    return [sorted(of_row, key=lambda one: one.rank(power), reverse=True) for of_row in ended]


def decode(
    network: Translator, foreign: Tensor, lengths: Tensor, width: int, power: float = 1.0, max_words: int | None = None
) -> list[Hypothesis]:
    """The best translation of each sentence by beam search, or the greedy one if that ranks higher."""
    simple = greedy(network, foreign, lengths, max_words)
    if width == 1:
        return simple
    found = beam_search(network, foreign, lengths, width, power, max_words)
    pairs = zip(found, simple, strict=True)
    return [max(of_row[0], plain, key=lambda one: one.rank(power)) for of_row, plain in pairs]


def translate(model: TrainedModel, text: str, width: int = 5, power: float = 1.0) -> tuple[str, list[str]]:
    """Translate a sentence into English; also returns the words that are not in the vocabulary and were left out."""
    task = expect_task(model, Translation)
    numbers = {word: number for number, word in enumerate(task.pairs.foreign.words)}
    given = split_words(text)
    known = [numbers[word] for word in given if word in numbers]
    unknown = [word for word in given if word not in numbers]
    if not any(letter.isalnum() for word in given if word in numbers for letter in word):  # at most punctuation
        raise ValueError(
            f"none of the words of {text!r} is in the {task.pairs.language} vocabulary of the training data"
        )
    foreign = torch.tensor([[START, *known, END]])
    network = translator(model)
    (found,) = decode(network, foreign, torch.tensor([foreign.shape[1]]), width, power)
    return " ".join(task.pairs.english.words[number] for number in found.words), unknown


class Scores(NamedTuple):
    """BLEU on the test split of a run."""

    sentences: int
    greedy: float
    beam: float | None  # None if the width is 1
    signature: str  # sacrebleu's description of what was computed


def bleu(model: TrainedModel, width: int = 5, limit: int = 0, power: float = 1.0) -> Scores:
    """Corpus BLEU of free-running translations on the run's own test split.

    Both sides are tokenised as in the data: lower case, punctuation apart, no accents.
    """
    try:
        from sacrebleu import BLEU
    except ModuleNotFoundError:
        raise ModuleNotFoundError("BLEU needs sacrebleu; run: pip install 'deepmemory[lab]'") from None

    task = expect_task(model, Translation)
    english = task.pairs.english
    items = task.split(torch.tensor([model.seed]))[random_streams.TEST][0][: limit or None]
    right = [" ".join(english.words[number] for number in until_end(english.ids[item, 1:])) for item in items]
    measure = BLEU(tokenize="none", force=True)

    def score(width: int) -> float:
        said = [
            " ".join(english.words[number] for number in words) for words in translations(model, items, width, power)
        ]
        return measure.corpus_score(said, [right]).score

    simple = score(1)
    return Scores(len(items), simple, None if width == 1 else score(width), str(measure.get_signature()))


def translations(model: TrainedModel, items: Tensor, width: int, power: float = 1.0) -> Iterator[tuple[int, ...]]:
    """The translations of pairs of the data, as word numbers, in the order of ``items``."""
    task, network = expect_task(model, Translation), translator(model)
    sentences = task.pairs.foreign
    order = sentences.lengths[items].argsort()  # sentences of similar length in one batch
    said: dict[int, tuple[int, ...]] = {}
    for part in order.split(max(1, SENTENCES_AT_ONCE // width)):
        lengths = sentences.lengths[items[part]]
        foreign = sentences.ids[items[part], : int(lengths.max())]
        for place, found in zip(part.tolist(), decode(network, foreign, lengths, width, power), strict=True):
            said[place] = found.words
    return (said[place] for place in range(len(items)))


def translator(model: TrainedModel) -> Translator:
    """The network of a model that translates."""
    assert isinstance(model.network, Translator)
    return model.network


@torch.no_grad()
def continue_text(
    model: TrainedModel, text: str, words: int = 50, temperature: float = 1.0, top: int = 40, seed: int = 0
) -> tuple[str, list[str]]:
    """Continue a text by sampling; also returns the words that are not in the vocabulary.

    The data's mark for rare words, :data:`UNKNOWN`, is never sampled.

    Args:
        model: A model of the task natlang or ptb.
        text: Beginning of the text; a new line ends a sentence.
        words: Number of words to add.
        temperature: Sampling temperature; 0 is greedy.
        top: Sample from this many of the most likely words; 0 for all.
        seed: Random seed for sampling.
    """
    task = expect_task(model, NatLang)
    check_temperature(temperature)
    numbers = {word: number for number, word in enumerate(task.words)}
    given = [word if word in numbers else as_number(word) for word in as_words(text)]
    unknown = [word for word in given if word not in numbers]
    given = [word if word in numbers else UNKNOWN for word in given]
    said = [numbers[word] for word in (EOS, *given) if word in numbers]  # a text begins after the end of another one
    if not said:
        raise ValueError(f"none of the words of {text!r} is in the vocabulary of the training data")
    begins = 1 if EOS in numbers else 0
    generator = torch.Generator().manual_seed(seed)
    answer, state = model.network(torch.tensor([said]))
    for _ in range(words):
        logits = answer[0, -1]
        if UNKNOWN in numbers:
            logits = logits.index_fill(0, torch.tensor(numbers[UNKNOWN]), -torch.inf)
        said.append(sample_word(logits, temperature, top, generator))
        answer, state = model.network(torch.tensor([said[-1:]]), state)
    return as_lines([task.words[number] for number in said[begins:]]), unknown


def as_words(text: str) -> list[str]:
    """The words of a text in lower case; the end of a line is a word of its own."""
    return text.lower().replace("\n", f" {EOS} ").split()


def as_number(word: str) -> str:
    """The Penn Treebank's word for numbers if the word has a digit, else the word itself."""
    return NUMBER if any(sign.isdigit() for sign in word) else word


def as_lines(words: list[str]) -> str:
    """The text of a list of words, with a line break at every end of a sentence."""
    return "\n".join(line.strip() for line in " ".join(words).split(EOS))


def sample_word(answer: Tensor, temperature: float, top: int, generator: torch.Generator) -> int:
    """One word, sampled from the logits (words,)."""
    if temperature == 0:
        return int(answer.argmax())
    likely, words = ((answer.double() - answer.max()) / temperature).topk(min(top or len(answer), len(answer)))
    return int(words[torch.multinomial(likely.softmax(-1), 1, generator=generator)])


def check_temperature(temperature: float) -> None:
    """Raise unless the sampling temperature is a finite number from 0 up."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature should be a number from 0 (greedy) up, got {temperature}")


def piece(model: TrainedModel, number: int) -> Tensor:
    """One piece of the test split, (frames, keys)."""
    pieces = expect_task(model, PolyMusic).pieces["test"]
    if not 0 <= number < len(pieces):
        raise ValueError(f"no tune {number}; the test split of {model.setting.music} has 0 to {len(pieces) - 1}")
    return pieces[number]


@torch.no_grad()
def continue_tune(
    model: TrainedModel,
    given: Tensor,
    steps: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    sampling: str = TOGETHER,
) -> Tensor:
    """Continue a piano-roll (frames, keys) by ``steps`` frames, uint8.

    ``temperature`` is the sampling temperature; at 0 a key sounds where its probability is above one half. ``sampling``
    is that of :func:`sample_keys`.
    """
    expect_task(model, PolyMusic)
    check_temperature(temperature)
    check_choice("sampling", sampling, SAMPLINGS)
    if given.dim() != 2 or given.shape[1] != KEYS or not len(given):
        raise ValueError(
            f"a tune to continue should be (frames, {KEYS}) with at least one frame, got {tuple(given.shape)}"
        )
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.network.parameters()).dtype
    frames = [given.to(torch.uint8)]
    answer, state = step_of_tune(model, given.to(dtype), None)
    for _ in range(steps):
        logits = answer[0, -1].double()
        chance = (logits > 0).double() if temperature == 0 else (logits / temperature).sigmoid()
        frames.append(sample_keys(chance, generator, sampling, frames[-1][-1])[None])
        answer, state = step_of_tune(model, frames[-1].to(dtype), state)
    return torch.cat(frames)


def sample_keys(
    chance: Tensor, generator: torch.Generator, sampling: str = TOGETHER, before: Tensor | None = None
) -> Tensor:
    """Which keys sound, uint8 (keys,), given their probabilities ``chance`` (keys,) and the frame ``before``, if any.

    ``alone`` draws a random number for every key: of two notes that are equally likely to follow, both may sound, or
    none. ``together`` makes chords hold or change as a whole:

    - One random number decides for all keys that already sound: those that are more likely than this number continue.
      Keys more likely than ``1 - UNLIKELY`` always do.
    - New keys make up for the rest of the expected number of notes. They are sampled systematically: their
      probabilities lie end to end on a line, and the keys at u, u + 1, u + 2 and so on sound, for one random u below 1.
      So likely alternatives exclude each other. Keys less likely than ``UNLIKELY`` are left out if there are enough
      others.

    >>> either = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5])  # C, and above it E and G or F and A
    >>> drawn = [sample_keys(either, torch.Generator().manual_seed(seed)) for seed in range(9)]
    >>> sorted({tuple(keys.tolist()) for keys in drawn})
    [(1, 0, 1, 0, 1), (1, 1, 0, 1, 0)]
    """
    if sampling == ALONE:
        return torch.bernoulli(chance, generator=generator).to(torch.uint8)
    chance = chance.double()
    sounding = torch.zeros_like(chance, dtype=torch.bool) if before is None else before.bool()
    least = torch.rand((), generator=generator, dtype=torch.float64).clamp(UNLIKELY, 1 - UNLIKELY)
    held = sounding & (chance > least)
    missing = (chance.sum() - held.sum()).clamp(min=0)
    new = chance.masked_fill(sounding, 0)
    enough = new.sort(descending=True).values[: int(missing.ceil().clamp(min=1))][-1]  # as many keys as are missing
    share = scaled(new.masked_fill(new < enough.clamp(max=UNLIKELY), 0), missing)
    start = torch.rand((), generator=generator, dtype=torch.float64)
    below = (share.cumsum(0) - start).ceil()  # points below the end of each key's part of the line
    return (held | (below.diff(prepend=below.new_zeros(1)) > 0)).to(torch.uint8)


def scaled(chance: Tensor, total: Tensor) -> Tensor:
    """Probabilities in proportion to ``chance``, none above 1, with the sum ``total``, or as much as there is."""
    full = torch.zeros_like(chance, dtype=torch.bool)
    while True:
        rest = chance.masked_fill(full, 0)
        share = rest * ((total - full.sum()).clamp(min=0) / rest.sum().clamp(min=1e-300))
        if not (share > 1).any():
            return share.masked_fill(full, 1)
        full |= share >= 1


def step_of_tune(model: TrainedModel, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Logits (1, T, keys) of the frame after each of frames (T, keys), from a state; and the state after them."""
    return model.network(frames[None], None, state)
