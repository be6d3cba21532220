"""Example inputs for networks that come without their data: tunes, sentences and a text."""

from __future__ import annotations

import torch
from torch import Tensor

from deepmemory.lab.data import Corpus, Pairs
from deepmemory.lab.data.music import KEYS
from deepmemory.lab.data.pairs import SPECIAL, encode, split_words
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import PTB, NatLang, PolyMusic, Translation
from deepmemory.lab.training.random_streams import TEST, TRAINING, VALIDATION

# Traditional tunes in eighths: a chord, the notes above it (- holds a note), the next chord and so on.
TUNES = (
    "C c-d-e-c- C c-d-e-c- C e-f-g--- C e-f-g--- C gagfe-c- C gagfe-c- G c-G- C c--- G c-G- C c---",
    "C c-c- C g-g- F a-a- C g--- F f-f- C e-e- G d-d- C c--- C g-g- F f-f- C e-e- G d--- C g-g- F f-f- C e-e- G d---",
    "C cd C e-g-g--a C g-e-c--d C e-e-d-c- G d-----cd C e-g-g--a C g-e-c--d G e-e-d-d- C c-------",
)
CHORDS = {"C": (27, 31, 34), "F": (32, 36, 39), "G": (34, 38, 41)}  # numbers of piano keys
NOTES = {"G": 46, "c": 51, "d": 53, "e": 55, "f": 56, "g": 58, "a": 60, "b": 62}

SENTENCES = {
    "spanish": (
        ("Buenos días.", "Good morning."),
        ("¿Dónde está mi libro?", "Where is my book?"),
        ("Me gusta la música.", "I like music."),
        ("Ella tiene dos hermanos.", "She has two brothers."),
        ("No sé qué decir.", "I don't know what to say."),
        ("Hoy hace mucho frío.", "It is very cold today."),
    )
}
TEXT = (
    "the company said it expects to report a loss for the third quarter because of higher costs\n"
    "analysts said the shares of the bank fell after the news\n"
    "the president told the house that the plan would cut taxes next year\n"
)
FEW = 8  # words, for a vocabulary that has none of these


class ExamplePairs(Translation):
    """A few pairs, all of them in every split."""

    def split(self, seeds: Tensor) -> dict[int, Tensor]:
        """The numbers of all pairs, (R, pairs)."""
        everything = torch.arange(len(self.pairs.english.lengths)).expand(len(seeds), -1)
        return dict.fromkeys((TRAINING, VALIDATION, TEST), everything)


def tunes() -> PolyMusic:
    """The tunes as a task, all of them in every split."""
    return PolyMusic({split: [as_roll(tune) for tune in TUNES] for split in ("train", "valid", "test")})


def as_roll(tune: str) -> Tensor:
    """The piano-roll (frames, keys) of a tune."""
    parts = tune.split()
    note, frames = NOTES[parts[1][0]], []
    for chord, melody in zip(parts[::2], parts[1::2], strict=True):
        for sign in melody:
            note = note if sign == "-" else NOTES[sign]
            frame = torch.zeros(KEYS, dtype=torch.uint8)
            frame[[*CHORDS[chord], note]] = 1
            frames.append(frame)
    return torch.stack(frames)


def sentences(language: str, foreign: tuple[str, ...], english: tuple[str, ...]) -> ExamplePairs:
    """Pairs of sentences with the words of these two vocabularies."""
    both = [(split_words(theirs), split_words(ours)) for theirs, ours in SENTENCES.get(language, ())]
    known = [pair for pair in both if set(pair[0]) <= set(foreign) and set(pair[1]) <= set(english)]
    first = slice(len(SPECIAL), len(SPECIAL) + FEW)
    known = known or [(list(foreign[first]), list(english[first]))]
    return ExamplePairs(
        Pairs(language, encode([pair[0] for pair in known], foreign), encode([pair[1] for pair in known], english), "")
    )


def text(setting: Setting, words: tuple[str, ...]) -> NatLang:
    """A text with the words of this vocabulary, as long as a batch."""
    from deepmemory.lab.use.decoding import as_words

    numbers = {word: number for number, word in enumerate(words)}
    known = torch.tensor([numbers[word] for word in as_words(TEXT) if word in numbers] or list(range(len(words)))[:FEW])
    long = known.repeat(-(-(setting.batch * setting.window + 1) // len(known)))
    return (PTB if setting.task == "ptb" else NatLang)(Corpus(long, long, long, words))
