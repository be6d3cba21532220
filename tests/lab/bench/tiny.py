"""A shape that takes no time, and its contestants."""

from deepmemory.lab.bench.contestants import further_entries, main_entries
from deepmemory.lab.bench.shapes import Shape
from deepmemory.ops.engines import NAMES

TINY = Shape("tiny", 2, (3,), 4, 2, 5)


def entries(shape=TINY, cells=("DMU",), engines=NAMES):
    """By name: the main ones, then the further ones."""
    found = [*main_entries(shape, "cpu", cells, engines), *further_entries(shape, "cpu", cells, engines)]
    return {entry.name: entry for entry in found}
