"""Pairs of sentences in English and another language."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from deepmemory.lab.data import files, vocabulary
from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.registry import dataset, names_for
from deepmemory.lab.settings import check_choice

START, END = 0, 1  # ids of the words that open and close every sentence
SPECIAL = ("<start>", "<end>")
PUNCTUATION = frozenset("?.!,¿")  # tokens of their own; every other character becomes white space, including ¡
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

# Limits, since the text may be any file; the largest release in the registry, German of 2018, needs at most a third.
MOST_LINES = 2**19
LONGEST_LINE = 2**12  # characters
MOST_WORDS, MOST_KINDS = 2**22, 2**18  # words of one language: all, and different ones
LARGEST = 2**25  # numbers in one padded tensor, which takes 256 MB


@dataclass(frozen=True)
class Sentences:
    """Sentences of one language as ids of words."""

    ids: Tensor  # int64 (N, longest); each row START, words, END, and END again as padding
    lengths: Tensor  # int64 (N,), including START and END
    words: tuple[str, ...]  # word i has id i: the two special ones, then most frequent first, then by code points


@dataclass(frozen=True)
class Pairs:
    """Sentences in two languages: row i of both has the same meaning."""

    language: str
    foreign: Sentences
    english: Sentences
    sha256: str  # of the whole file, which identifies the release


def load_pairs(
    name: str = "spanish", limit: int | None = None, data: Path | str | None = None, min_count: int = 1
) -> Pairs:
    """The first ``limit`` pairs (None: all), which are the shortest; words are counted only in these.

    Pairs with a word that occurs fewer than ``min_count`` times are left out.
    """
    check_choice("language", name, names_for("translation"))
    (file,) = dataset(name).files
    language, _, _ = name.partition("-")  # german-2018 is another release of german
    return parse_pairs(files.read(file, data), language, limit, file.header, min_count)


def parse_pairs(raw: bytes, language: str, limit: int | None = None, header: int = 0, min_count: int = 1) -> Pairs:
    """Read lines of English, a tab, the other language, and optionally another tab and text that is ignored.

    ``header`` is the number of lines before the first pair.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of pairs should be at least 1, got {limit}")
    if raw.count(b"\n") > MOST_LINES:
        raise DataError(f"the {language} pairs have more than the limit of {MOST_LINES} lines")
    try:
        last = None if limit is None else header + limit
        lines = raw.decode("utf-8").removesuffix("\n").split("\n", -1 if last is None else last)[header:last]
    except UnicodeDecodeError as error:
        raise DataError(f"not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    if len(lines) < (limit or 1):
        raise DataError(f"{limit or 1} pairs were requested, but the {language} file has {len(lines)}")
    english, foreign = [], []
    for number, line in enumerate(lines, header + 1):
        if len(line) > LONGEST_LINE:
            raise DataError(f"line {number} of the {language} pairs is longer than {LONGEST_LINE} characters")
        columns = line.split("\t", 2)
        if len(columns) < 2:
            raise DataError(f"line {number} of the {language} pairs has no tab between two sentences")
        english.append(columns[0])
        foreign.append(columns[1])
    digest = hashlib.sha256(raw).hexdigest()
    kept = without_rare_words(list(zip(split_all(foreign), split_all(english), strict=True)), min_count)
    if not kept:
        raise ValueError(f"every {language} pair has a word that occurs fewer than {min_count} times")
    return Pairs(language, as_sentences([pair[0] for pair in kept]), as_sentences([pair[1] for pair in kept]), digest)


def without_rare_words(pairs: list[tuple[list[str], list[str]]], min_count: int) -> list[tuple[list[str], list[str]]]:
    """The pairs whose words all occur at least ``min_count`` times in the sentences of their language."""
    counts = [Counter(chain.from_iterable(sentences)) for sentences in zip(*pairs, strict=True)]
    return [
        pair
        for pair in pairs
        if all(count[word] >= min_count for count, words in zip(counts, pair, strict=True) for word in words)
    ]


def split_all(sentences: list[str]) -> list[list[str]]:
    """The words of each sentence; equal words share their memory."""
    known: dict[str, str] = {}
    found, count = [], 0
    for sentence in sentences:
        found.append([known.setdefault(word, word) for word in split_words(sentence)])
        count += len(found[-1])
        if count > MOST_WORDS or len(known) > MOST_KINDS:
            raise DataError(
                f"more than {MOST_WORDS} words, or {MOST_KINDS} different ones, in one language: not the kind of text "
                "expected here"
            )
    return found


def as_sentences(sentences: list[list[str]]) -> Sentences:
    """Ids of all words, one row for each sentence."""
    return encode(sentences, (*SPECIAL, *vocabulary.in_order(Counter(chain.from_iterable(sentences)))))


def encode(sentences: list[list[str]], words: tuple[str, ...]) -> Sentences:
    """Ids of all words in a vocabulary, one row for each sentence."""
    numbers = {word: number for number, word in enumerate(words)}
    lengths = torch.tensor([len(sentence) + 2 for sentence in sentences])
    longest = int(lengths.max())
    if len(sentences) * longest > LARGEST:
        raise DataError(f"{len(sentences)} sentences, one of {longest} words: not the kind of text expected here")
    ids = torch.full((len(sentences), longest), END)
    ids[:, 0] = START
    of_word = (torch.arange(longest) > 0) & (torch.arange(longest) < lengths[:, None] - 1)
    ids[of_word] = torch.tensor([numbers[word] for word in chain.from_iterable(sentences)], dtype=torch.int64)
    return Sentences(ids, lengths, words)


def split_words(sentence: str) -> list[str]:
    """The words of a sentence: lower case, no accents, punctuation split off, all other characters turned to spaces.

    >>> split_words("¡Hola! ¿Cómo está usted, Sr. O'Neill?")
    ['hola', '!', '¿', 'como', 'esta', 'usted', ',', 'sr', '.', 'o', 'neill', '?']
    """
    return sentence.translate(_SPELLING).split()


class _Spelling(dict[int, str]):
    """The replacement of each character, computed when it is first needed."""

    def __missing__(self, code: int) -> str:
        parts = unicodedata.normalize("NFD", chr(code).lower())
        letters = (part for part in parts if unicodedata.category(part) != "Mn")
        self[code] = "".join(p if p in LETTERS else f" {p} " if p in PUNCTUATION else " " for p in letters)
        return self[code]


_SPELLING = _Spelling()
