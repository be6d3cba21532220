"""The paper's authors' code beside this project's records, epoch by epoch on the same files; readme.py fills the table.

``results/authors_code.json`` holds what their code logged. It has no licence, so it was run outside this repository.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from deepmemory.lab import paper
from deepmemory.lab.bench.tables import markdown_table
from deepmemory.lab.records import Study
from deepmemory.lab.report.results.stats import spread
from deepmemory.lab.report.words import mean_text

RESULTS = Path(__file__).parent / "results" / "authors_code.json"
EPOCHS = (2, 5, 10)
MEASURES = ("valid_accuracy", "test_accuracy")


def table(studies: Sequence[Study]) -> str:
    """Accuracy of a DMU with one linear layer, by language and epoch: their runs, our mean and deviation."""
    theirs = json.loads(RESULTS.read_text())["translation"]
    rows = []
    for language in dict.fromkeys(run["language"] for run in theirs):
        setting = next(one for one in paper.settings(["translation"], ["dmu"], [1]) if one.language == language)
        (study,) = (study for study in studies if study.setting.key == setting.key)
        runs = [{one["epoch"]: one for one in run["epochs"]} for run in theirs if run["language"] == language]
        for epoch in EPOCHS:
            cells = []
            for measure in MEASURES:
                ours = [run.at_epoch(epoch)[measure] for run in study.runs]
                cells.append(", ".join(f"{run[epoch][measure]:.3f}" for run in runs))
                cells.append(mean_text(spread(ours, 0), "accuracy"))
            rows.append([language.capitalize(), str(epoch), *cells])
    head = ["from", "epoch", "validation, authors' code", "ours", "test, authors' code", "ours"]
    return markdown_table(head, rows)
