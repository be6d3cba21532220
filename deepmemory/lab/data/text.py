"""Running text: the Penn Treebank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepmemory.lab.data import files, vocabulary
from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.registry import dataset

EOS = "<eos>"  # the word at the end of every line


@dataclass(frozen=True)
class Corpus:
    """A text as ids of words."""

    train: Tensor  # int64 (tokens,)
    valid: Tensor  # likewise
    test: Tensor  # likewise
    words: tuple[str, ...]  # word i has id i: most frequent in ``train`` first, then by code points


def load_text(data: Path | str | None = None) -> Corpus:
    """The Penn Treebank in the form of Mikolov and Zaremba: 10,000 words, including the end of a line."""
    train, valid, test = (tokens(files.read(file, data)) for file in dataset("ptb").files)
    return as_corpus(train, valid, test)


def tokens(raw: bytes) -> list[str]:
    """The words between white space, and :data:`EOS` after every line."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    found: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        found += line.split()
        found.append(EOS)
    return found


def as_corpus(train: list[str], valid: list[str], test: list[str]) -> Corpus:
    """Texts as ids of words, all of which must occur in ``train``."""
    words = vocabulary.in_order(Counter(train))
    numbers = {word: number for number, word in enumerate(words)}

    def encode(part: str, text: list[str]) -> Tensor:
        try:
            return torch.tensor([numbers[word] for word in text], dtype=torch.int64)
        except KeyError as error:
            raise DataError(f"the {part} text has {error}, a word that the training text lacks") from None

    return Corpus(encode("training", train), encode("validation", valid), encode("test", test), tuple(words))
