"""The table of docs/gradients-findings.md is what the records of the study say."""

import re
import statistics
from pathlib import Path

from deepmemory.lab.records import Records

DOCS = Path(__file__).parents[3] / "docs"
RATES = {("formula", 0.02): "rule", ("same", 0.02): "full"}  # everything else is small


def test_the_table_comes_from_the_records():
    records = Records(DOCS / "gradients-study")
    learned, radii = {}, {}
    for study in records.studies():
        setting, watched = study.setting, records.watched(study.setting.key)
        row = len(setting.transition) + 1, RATES.get((setting.module_rate, setting.lr), "small")
        count = sum(min(run.curves["valid_loss"]) < 1e-2 for run in study.runs)
        learned[*row, setting.condition] = f"{count} of {len(study.runs)}"
        if setting.condition == "free":
            series = [[run[f"recurrent.0.{name} radius"] for run in watched.values()] for name in ("z", "candidate")]
            ends = [[statistics.median(run[end(run)] for run in of) for end in (min, max)] for of in series]
            radii[row] = [f"{first:.2g} → {last:.2g}" for first, last in ends]
    records.close()
    expected = [
        [str(depth), rates, learned[depth, rates, "free"], *radii[depth, rates], learned.get((depth, rates, "kept"))]
        for depth in (1, 5, 10)
        for rates in ("rule", "full", "small")
    ]
    page = (DOCS / "gradients-findings.md").read_text()
    rows = [
        re.split(r" \| ", row) for row in re.findall(r"^\| (\d+ \| (?:rule|full|small) \|.*) \|$", page, re.MULTILINE)
    ]
    assert rows == [[cell or "not run" for cell in row] for row in expected]
