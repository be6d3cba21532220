"""What a trained model says: translations, texts and tunes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepmemory.lab.data.music import KEYS
from deepmemory.lab.data.pairs import END, START, split_words
from deepmemory.lab.data.text import EOS
from deepmemory.lab.tasks import NatLang, PolyMusic, Translation
from deepmemory.lab.tasks.translation import until_end
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.network import Translator
from deepmemory.lab.use.loading import Model, wanted

UNKNOWN, NUMBER = "<unk>", "N"  # how the Penn Treebank writes rare words and numbers
AT_ONCE = 256  # sentences, all beams counted

# --- translation ----------------------------------------------------------------------------------


class Hypothesis(NamedTuple):
    """A translation that a search came to."""

    words: tuple[int, ...]  # without start and end
    score: float  # log-probability of all words, the end included where it was said
    finished: bool  # said its end, rather than reaching the limit

    def rank(self, power: float) -> tuple[bool, float]:
        """What is finished comes first, then what is likelier for its length."""
        return self.finished, self.score / (len(self.words) + self.finished) ** power


def most_words(foreign: Tensor) -> int:
    """Where a translation is cut off that does not end by itself."""
    return 2 * foreign.shape[1] + 10


@torch.no_grad()
def greedy(network: Translator, foreign: Tensor, lengths: Tensor, most: int | None = None) -> list[Hypothesis]:
    """The likeliest word at every step, for sentences (B, T) side by side, until each has said its end."""
    state = network.encode(foreign, lengths)
    word = torch.full_like(lengths, START)
    going = torch.ones_like(lengths, dtype=torch.bool)
    score = torch.zeros(len(lengths), dtype=torch.float64)
    said = []
    for _ in range(most_words(foreign) if most is None else most):
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
    network: Translator, foreign: Tensor, lengths: Tensor, width: int, power: float = 1.0, most: int | None = None
) -> list[list[Hypothesis]]:
    """For each sentence (B, T) up to ``width`` translations, the best first.

    A hypothesis that has said its end is kept and leaves one place less to the others, so a width of 1 is
    :func:`greedy`. ``power`` 1 ranks by log-probability per word, 0 by log-probability.
    """
    if width < 1:
        raise ValueError(f"the width of a beam should be at least 1, got {width}")
    batch, steps = len(lengths), most_words(foreign) if most is None else most
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
    network: Translator, foreign: Tensor, lengths: Tensor, width: int, power: float = 1.0, most: int | None = None
) -> list[Hypothesis]:
    """The best translation of each sentence; never one worse than the greedy one, which a beam may lose."""
    simple = greedy(network, foreign, lengths, most)
    if width == 1:
        return simple
    found = beam_search(network, foreign, lengths, width, power, most)
    pairs = zip(found, simple, strict=True)
    return [max(of_row[0], plain, key=lambda one: one.rank(power)) for of_row, plain in pairs]


def translate(model: Model, text: str, width: int = 5, power: float = 1.0) -> tuple[str, list[str]]:
    """A sentence in English, and its words that the model does not know, which were left out."""
    task = wanted(model, Translation, "translation", "translate")
    numbers = {word: number for number, word in enumerate(task.pairs.foreign.words)}
    given = split_words(text)
    known = [numbers[word] for word in given if word in numbers]
    unknown = [word for word in given if word not in numbers]
    if not known:
        raise ValueError(f"none of the words of {text!r} was in the {task.pairs.language} text of the training")
    foreign = torch.tensor([[START, *known, END]])
    network = translator(model)
    (found,) = decode(network, foreign, torch.tensor([foreign.shape[1]]), width, power)
    return " ".join(task.pairs.english.words[number] for number in found.words), unknown


class Scores(NamedTuple):
    """BLEU on the test split of a run."""

    sentences: int
    greedy: float
    beam: float | None  # None for a width of 1
    signature: str  # what exactly was computed, as sacrebleu puts it


def bleu(model: Model, width: int = 5, limit: int = 0, power: float = 1.0) -> Scores:
    """Corpus BLEU of whole translations, ended by the model itself, on the run's own test split.

    The words are those of the data on both sides: lower case, punctuation apart, no accents.
    """
    try:
        from sacrebleu import BLEU
    except ModuleNotFoundError:
        raise ModuleNotFoundError("BLEU needs sacrebleu; run: pip install 'deepmemory[lab]'") from None

    task = wanted(model, Translation, "translation", "translate")
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


def translations(model: Model, items: Tensor, width: int, power: float = 1.0) -> Iterator[tuple[int, ...]]:
    """The words said for pairs of the data, in their order."""
    task, network = wanted(model, Translation, "translation", "translate"), translator(model)
    sentences = task.pairs.foreign
    order = sentences.lengths[items].argsort()  # like beside like: short ones end soon
    said: dict[int, tuple[int, ...]] = {}
    for part in order.split(max(1, AT_ONCE // width)):
        lengths = sentences.lengths[items[part]]
        foreign = sentences.ids[items[part], : int(lengths.max())]
        for place, found in zip(part.tolist(), decode(network, foreign, lengths, width, power), strict=True):
            said[place] = found.words
    return (said[place] for place in range(len(items)))


def translator(model: Model) -> Translator:
    """The network of a model that translates."""
    assert isinstance(model.network, Translator)
    return model.network


# --- text -----------------------------------------------------------------------------------------


@torch.no_grad()
def continue_text(
    model: Model, text: str, words: int = 50, temperature: float = 1.0, top: int = 40, seed: int = 0
) -> tuple[str, list[str]]:
    """The text, gone on with for so many words, and its words that the model does not know.

    Args:
        model: Of the task natlang.
        text: How it begins; a new line ends a sentence.
        words: How many follow.
        temperature: Below 1 likely words become likelier; 0 takes the likeliest.
        top: Draw from so many of the likeliest words; 0 is all.
        seed: Another one gives another text.
    """
    task = wanted(model, NatLang, "natlang", "generate")
    check_temperature(temperature)
    numbers = {word: number for number, word in enumerate(task.words)}
    given = [word if word in numbers else as_number(word) for word in as_words(text)]
    unknown = [word for word in given if word not in numbers]
    given = [word if word in numbers else UNKNOWN for word in given]
    said = [numbers[word] for word in (EOS, *given) if word in numbers]  # a text begins where another one ended
    if not said:
        raise ValueError(f"none of the words of {text!r} was in the text of the training")
    begins = 1 if EOS in numbers else 0
    generator = torch.Generator().manual_seed(seed)
    answer, state = model.network(torch.tensor([said]))
    for _ in range(words):
        said.append(draw(answer[0, -1], temperature, top, generator))
        answer, state = model.network(torch.tensor([said[-1:]]), state)
    return as_lines([task.words[number] for number in said[begins:]]), unknown


def as_words(text: str) -> list[str]:
    """In lower case; the end of a line is a word."""
    return text.lower().replace("\n", f" {EOS} ").split()


def as_number(word: str) -> str:
    """The Penn Treebank's word for numbers, if it is one."""
    return NUMBER if any(sign.isdigit() for sign in word) else word


def as_lines(words: list[str]) -> str:
    """Words with ends of lines among them as a text."""
    return "\n".join(line.strip() for line in " ".join(words).split(EOS))


def draw(answer: Tensor, temperature: float, top: int, generator: torch.Generator) -> int:
    """One of the words (words,), by their likelihood."""
    if temperature == 0:
        return int(answer.argmax())
    likely, words = ((answer.double() - answer.max()) / temperature).topk(min(top or len(answer), len(answer)))
    return int(words[torch.multinomial(likely.softmax(-1), 1, generator=generator)])


def check_temperature(temperature: float) -> None:
    """Zero or more."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature should be a number from 0 (always the likeliest) up, got {temperature}")


# --- music ----------------------------------------------------------------------------------------


def piece(model: Model, number: int) -> Tensor:
    """One piece of the test split, (frames, keys)."""
    pieces = wanted(model, PolyMusic, "polymusic", "compose").pieces["test"]
    if not 0 <= number < len(pieces):
        raise ValueError(f"no tune {number}; the test split of {model.setting.music} has 0 to {len(pieces) - 1}")
    return pieces[number]


@torch.no_grad()
def continue_tune(model: Model, given: Tensor, steps: int = 200, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """A piano-roll (frames, keys) gone on with for so many frames, uint8; every key is drawn for itself.

    A temperature below 1 makes likely keys likelier; 0 strikes those that are likelier than not.
    """
    wanted(model, PolyMusic, "polymusic", "compose")
    check_temperature(temperature)
    if given.dim() != 2 or given.shape[1] != KEYS or not len(given):
        raise ValueError(
            f"a tune to go on with should be (frames, {KEYS}) with at least one frame, got {tuple(given.shape)}"
        )
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.network.parameters()).dtype
    frames = [given.to(torch.uint8)]
    answer, state = step_of_tune(model, given.to(dtype), None)
    for _ in range(steps):
        logits = answer[0, -1].double()
        chance = (logits > 0).double() if temperature == 0 else (logits / temperature).sigmoid()
        frames.append(torch.bernoulli(chance, generator=generator).to(torch.uint8)[None])
        answer, state = step_of_tune(model, frames[-1].to(dtype), state)
    return torch.cat(frames)


def step_of_tune(model: Model, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Frames (T, keys) after a state to what may follow, (1, T, keys), and the state."""
    return model.network(frames[None], None, state)
