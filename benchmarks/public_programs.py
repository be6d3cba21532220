"""Public programs in which a GRU was replaced by a DMU: the table of docs/faq.md, which readme.py fills.

``results/public_programs.json`` holds the score of every run. The programs are their authors', so they are not in this
repository. In each, ``nn.GRU`` became ``dm.DMU`` with as many weights (``dm.matched_hidden_size``), the optimiser got
``dm.parameter_groups`` or the parameters as before, and nothing else changed but what old code needs to run today and
the number of epochs, which is the same for all layers.
"""

import json
from pathlib import Path
from statistics import fmean, stdev

from deepmemory.lab.bench.tables import markdown_table

RESULTS = Path(__file__).parent / "results" / "public_programs.json"
# Column: layer, linear layers of its transition, rate.
COLUMNS = {
    "`nn.GRU`": ("gru", None, "the program's"),
    "`nn.GRU`, three times the rate": ("gru", None, "three times"),
    "DMU, n = 1": ("dmu", 1, "rule, three times"),
    "DMU, n = 2": ("dmu", 2, "rule, three times"),
}


def table() -> str:
    """Mean and deviation of each program's own score, for the GRU at two rates and for two DMUs."""
    measured = json.loads(RESULTS.read_text())
    rows = []
    for name, program in measured["programs"].items():
        cells = []
        for column in COLUMNS.values():
            scores = [
                run["score"]
                for run in measured["runs"]
                if (run["program"], run["layer"], run["n"], run["rate"]) == (name, *column)
            ]
            cells.append(f"{fmean(scores):.{program['digits']}f} ± {stdev(scores):.{program['digits']}f}")
        link = f"[{program['title']}](https://github.com/{program['repository']})"
        better = "higher" if program["higher_is_better"] else "lower"
        rows.append([link, f"{program['score']}; {better} is better", *cells])
    return markdown_table(["program", "score", *COLUMNS], rows)
