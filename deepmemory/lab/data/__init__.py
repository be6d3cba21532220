"""Public data for the tasks: where it comes from, how it is checked, and what is read from it.

Loaders look in the folder given as ``data`` or named by ``$DEEPMEMORY_DATA``, then in the user's cache, which
``dmu data fetch`` fills. They never reach for the network, and what they read is compared with the registry's
sha256 before it is used.
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
