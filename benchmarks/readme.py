"""Makes the README's tables anew from what was measured: ``python benchmarks/readme.py``."""

import json
import re
from pathlib import Path

from deepmemory.lab.bench import speed
from deepmemory.lab.records import Records
from deepmemory.lab.report import markdown, real
from deepmemory.lab.report.scores import accounts
from deepmemory.lab.report.tables import pictures

ROOT = Path(__file__).parent.parent


def tables() -> dict[str, str]:
    """By the mark they stand after: speeds, and how close the reproduction comes to the paper."""
    results = ROOT / "benchmarks" / "results"
    made = {
        f"speed {device}": speed.speed_table(json.loads((results / file).read_text()))
        for device, file in {"gpu": "h200.json", "cpu": "cpu.json"}.items()
    }
    records = Records(ROOT / "docs" / "reproduction")
    studies = records.studies()
    records.close()
    made["paper synthetic"], made["paper real"] = markdown.summary(pictures(studies)), real.summary(accounts(studies))
    return made


def with_tables(text: str) -> str:
    """The README's text with each table between its two marks made anew."""
    for name, table in tables().items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(mark, lambda found, table=table: f"{found[1]}{table.rstrip()}\n{found[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
