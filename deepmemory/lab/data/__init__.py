"""Public data for the tasks: a registry of files, fetching, checking, and loaders.

Loaders look in the folder given as ``data`` or named by ``$DEEPMEMORY_DATA``, then in the user's cache, which
``dmu data fetch`` fills. They never use the network, and compare what they read with the registry's sha256 first.
"""

from __future__ import annotations

from deepmemory.lab.data.digits import Digits, load_digits
from deepmemory.lab.data.errors import DataError, MissingData
from deepmemory.lab.data.music import load_music
from deepmemory.lab.data.pairs import END, START, Pairs, Sentences, load_pairs
from deepmemory.lab.data.registry import DATASETS, Dataset, File, dataset
from deepmemory.lab.data.text import EOS, Corpus, load_text

__all__ = [
    "DATASETS",
    "END",
    "EOS",
    "START",
    "Corpus",
    "DataError",
    "Dataset",
    "Digits",
    "File",
    "MissingData",
    "Pairs",
    "Sentences",
    "dataset",
    "load_digits",
    "load_music",
    "load_pairs",
    "load_text",
]
