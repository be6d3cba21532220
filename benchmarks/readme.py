"""Puts the speed tables of ``benchmarks/results`` into the README: ``python benchmarks/readme.py``."""

import json
import re
from pathlib import Path

from deepmemory.lab import bench

ROOT = Path(__file__).parent.parent
TABLES = {"gpu": "h200.json", "cpu": "cpu.json"}


def with_tables(text: str) -> str:
    """The README's text with each table between its two marks made anew."""
    for name, file in TABLES.items():
        result = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
        mark = rf"(<!-- speed {name} -->\n).*?(<!-- end -->)"
        table = bench.speed_table(result) + "\n"
        text = re.sub(mark, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
