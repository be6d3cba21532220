"""DMU and GRU with the same initial bias and over learning rates: tables for the docs, and the README's figure.

Reads the records of the paper's settings and those in docs/gru-study. docs/why-dmu.md has the commands that train them.

python benchmarks/gru_study.py   # draws docs/gru-study/figure.svg; benchmarks/readme.py writes the tables
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

from deepmemory.lab import paper
from deepmemory.lab.records import Records, Study
from deepmemory.lab.report.figures import render
from deepmemory.lab.report.render import markdown
from deepmemory.lab.report.table import Table, text_columns
from deepmemory.lab.settings import THRESHOLDS, Setting, threshold_label

DOCS = Path(__file__).parent.parent / "docs"
FIGURE = DOCS / "gru-study" / "figure.svg"
TASKS = {"adding": "Adding", "temporal-order": "Temporal order", "noisy-sequence": "Noisy sequence"}
START = 3.0  # the paper's memory_bias
STARTS = {  # how a cell starts: its name in the table, the cell, and what differs from the paper's settings
    "DMU, `memory_bias=3` (the paper)": ("dmu", {}),
    "DMU, `memory_bias=0`": ("dmu", {"memory_bias": 0.0}),
    "GRU as torch starts it (the paper)": ("gru", {}),
    "GRU, update-gate bias 3": ("gru", {"update_bias": START}),
    "LSTM, forget-gate bias 4 (the paper)": ("lstm", {}),
    "LSTM, forget-gate bias 3, input-gate bias -3": ("lstm", {"forget_bias": START / 2, "input_bias": -START}),
}
COUNTED = (1e-4, 1e-6)  # thresholds of the first table
CURVES = {  # of the figure: name, start, colour (Okabe and Ito's), line
    "DMU": ("DMU, `memory_bias=3` (the paper)", "#D55E00", "-"),
    "GRU, same start": ("GRU, update-gate bias 3", "#0072B2", "-"),
    "GRU": ("GRU as torch starts it (the paper)", "#0072B2", "--"),
    "LSTM": ("LSTM, forget-gate bias 4 (the paper)", "#009E73", ":"),
}
DRAWN = 1e-4

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
RULES = {  # of the second table, by name
    "GRU": ("gru", {"update_bias": START}),
    "DMU, lr / 2n": ("dmu", {}),
    "DMU, lr": ("dmu", {"module_rate": "same"}),
}
RATE_RUNS, RATE_EPOCHS, RATE_THRESHOLD = 10, 40, 1e-3
ENOUGH = 9  # of ten runs: a rate that works


def recorded() -> dict[str, Study]:
    """All studies, by key; docs/gru-study holds none of the paper's."""
    found = {}
    for folder in ("reproduction", "gru-study"):
        records = Records(DOCS / folder)
        found |= {study.setting.key: study for study in records.studies()}
        records.close()
    return found


def setting(task: str, cell: str, changes: dict) -> Setting:
    return replace(paper.setting(task, cell), **changes)


def reached(study: Study, threshold: float, runs: int = paper.RUNS, epochs: int = paper.EPOCHS) -> list[int]:
    """Epochs at which the first runs got under a threshold of the validation loss, up to the last epoch that counts."""
    place = THRESHOLDS.index(threshold)
    first = [run.first_under[place] for run in study.runs if run.seed < runs]
    assert len(first) == runs, study.setting
    return sorted(epoch for epoch in first if epoch is not None and epoch <= epochs)


def counted(epochs: list[int]) -> str:
    return f"{len(epochs)} ({median(epochs):g})" if epochs else "0"


def table(header: list[str], rows: list[list[str]]) -> str:
    return markdown.show(Table(text_columns(1, *header), rows))


def start_table(studies: dict[str, Study]) -> str:
    """Runs of 51 under each threshold, and the median epoch, for each initial bias."""
    rows = []
    for name, (cell, changes) in STARTS.items():
        found = [studies[setting(task, cell, changes).key] for task in TASKS]
        rows.append([name, *(counted(reached(study, under)) for study in found for under in COUNTED)])
    header = [f"{title}, {threshold_label(under)}" for title in TASKS.values() for under in COUNTED]
    return table(["start", *header], rows)


def learned(studies: dict[str, Study], task: str, name: str) -> dict[float, int]:
    """How many of ten runs have learned after 40 epochs, by learning rate."""
    cell, changes = RULES[name]
    found = {rate: studies[setting(task, cell, changes | {"lr": rate}).key] for rate in RATES}
    return {rate: len(reached(study, RATE_THRESHOLD, RATE_RUNS, RATE_EPOCHS)) for rate, study in found.items()}


def rate_table(studies: dict[str, Study]) -> str:
    """Runs of ten that have learned, at each rate."""
    rows = [
        [title, name, *map(str, learned(studies, task, name).values())]
        for task, title in TASKS.items()
        for name in RULES
    ]
    return table(["task", "layer", *(f"lr {rate:g}" for rate in RATES)], rows)


def range_table(studies: dict[str, Study]) -> str:
    """The rates at which nearly all runs have learned."""
    rows = []
    for task, title in TASKS.items():
        works = [[rate for rate, runs in learned(studies, task, name).items() if runs >= ENOUGH] for name in RULES]
        rows.append([title, *(f"{min(rates):g} to {max(rates):g}" if rates else "none" for rates in works)])
    return table(["task", *RULES], rows)


def draw(studies: dict[str, Study]) -> None:
    """How many of 51 runs have solved each task by each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.1), layout="constrained")
    for panel, (task, title) in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS.items(), strict=True):
        for name, (start, colour, line) in CURVES.items():
            epochs = reached(studies[setting(task, *STARTS[start]).key], DRAWN)
            counts = [sum(epoch <= now for epoch in epochs) for now in range(paper.EPOCHS + 1)]
            width = 2.6 if name == "DMU" else 1.6
            panel.step(range(paper.EPOCHS + 1), counts, line, where="post", color=colour, linewidth=width, label=name)
        panel.set_title(title, fontsize=12)
        panel.set_xlabel("epoch")
        panel.set_xlim(0, paper.EPOCHS)
        panel.set_ylim(0, 53)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("runs of 51 that solved it")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    FIGURE.write_bytes(render(figure, "svg"))


if __name__ == "__main__":
    draw(recorded())
