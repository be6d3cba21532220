"""Makes the README's tables anew from what was measured: ``python benchmarks/readme.py``."""

import json
import re
from pathlib import Path

from deepmemory.lab.bench import speed
from deepmemory.lab.records.database import Records
from deepmemory.lab.report.render import markdown
from deepmemory.lab.report.results.synthetic import synthetic_results
from deepmemory.lab.report.results.tables import real_results
from deepmemory.lab.report.sections import real, synthetic

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
    unchanged = [one for one in synthetic_results(studies) if not one.changes]
    made["paper synthetic"] = markdown.show(synthetic.summary_table(unchanged))
    made["paper real"] = markdown.show(real.summary_table(real_results(studies)))
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
