"""The synthetic tasks as Markdown, for people who read it in the repository: claim by claim, reading by reading."""

from __future__ import annotations

from collections.abc import Sequence

from deepmemory.lab import paper
from deepmemory.lab.report.blocks import escaped, table
from deepmemory.lab.report.tables import (
    TITLES,
    Comparison,
    Picture,
    agreement,
    compare_readings,
    count_texts,
    is_reading,
    minutes,
    number,
    patience_note,
    row,
    rules_in_words,
    shortfall,
    verdict_pairs,
    verdicts,
)
from deepmemory.lab.settings import CELLS, THRESHOLDS, threshold_label

WORDS = {True: "agrees", False: "**differs**", None: "open"}
SUMMED_UP = 1e-4  # the threshold of the summary, the middle one


def document(found: Sequence[Picture], computed_on: Sequence[str], command: str) -> str:
    """The whole page; ``command`` is what writes it."""
    main = [picture for picture in found if not picture.variant]
    others = [picture for picture in found if picture.variant and not is_reading(picture)]
    parts = [
        "# The synthetic tasks, paper and ours",
        f"The paper ([arXiv 2105.14092](https://arxiv.org/abs/2105.14092)) trains {paper.RUNS} runs of each cell for "
        f"at most {paper.EPOCHS} epochs and counts, for five thresholds of the validation loss, how many runs have got "
        "under the threshold by each epoch. Its figures carry no numbers, so what its text says of them is checked "
        "here, statement by statement.",
        agreement(found),
        *([summary(found)] if main else []),
        *differing(main),
        *(part for picture in main for part in task_part(picture)),
        "## Other readings",
        "What the paper leaves open, and what came out of each way to read it.",
        *(part for comparison in compare_readings(found) for part in reading_part(comparison, found)),
        *(["## Other settings"] if others else []),
        *(part for picture in others for part in task_part(picture, "###")),
        "## How a statement is decided",
        "\n".join(f"- {text}" for text in rules_in_words()),
        "## Where the numbers come from",
        f"Training took {minutes(found)}, all studies together:",
        "\n".join(f"- {escaped(text)}" for text in computed_on),
        "One epoch is 200 steps of 32 fresh sequences, as in the authors' published code; the paper's table says “seq. "
        "per epoch 200”. Validation takes 1,000 fixed sequences, the test 10,000, with each run's best weights.",
        "\n".join(["```sh", "dmu paper", *(reading.command for reading in paper.READINGS), command, "```"]),
        "`dmu paper` trains into `runs/`, goes on where it was stopped and skips what is recorded. `dmu merge A B "
        "--out C` joins the records of folders and packs them. The last line writes this page, `index.html` and "
        "`figures/` from `records.sqlite` alone.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(found: Sequence[Picture]) -> str:
    """One line per task: runs under the middle threshold, and how many of the paper's statements hold."""
    index = THRESHOLDS.index(SUMMED_UP)
    body = []
    for picture in found:
        if picture.variant:
            continue
        counts = [
            f"{row(picture.studies[cell]).under[index]}/{len(picture.studies[cell].runs)}"
            if cell in picture.studies
            else "not run"
            for cell in CELLS
        ]
        decided = [v.agrees for v in verdicts(picture) if v.agrees is not None]
        body.append([TITLES[picture.task], *counts, f"{sum(decided)} of {len(decided)}"])
    heads = [f"runs under {threshold_label(SUMMED_UP)}", *(cell.upper() for cell in CELLS), "statements that hold"]
    return table(heads, body)


def differing(main: Sequence[Picture]) -> list[str]:
    """Where paper and records part, before anything else."""
    items = [
        f"- {TITLES[picture.task]}: the paper says “{v.claim.text}”; here {v.seen}."
        for picture in main
        for v in verdicts(picture)
        if v.agrees is False
    ]
    return ["Where it differs:", "\n".join(items)] if items else []


def task_part(picture: Picture, level: str = "##") -> list[str]:
    """One task, or one variant of it: figure, counts, claims."""
    warning = shortfall(picture)
    return [
        f"{level} {escaped(picture.title)}",
        f"![Runs under each threshold of the validation loss by epoch](figures/{picture.name}.svg)",
        *([warning] if warning else []),
        "Runs that got under each threshold, and the median epoch at which they did. Test figures are medians.",
        counts_table(picture),
        claims_table(picture),
    ]


def counts_table(picture: Picture) -> str:
    """Every cell at every threshold."""
    heads = [
        "cell",
        *(f"under {threshold_label(t)}" for t in THRESHOLDS),
        "test loss",
        "test accuracy",
        "diverged",
        "time",
    ]
    body = []
    for study in picture.studies.values():
        numbers = row(study)
        body.append(
            [
                numbers.cell.upper(),
                *count_texts(numbers),
                number(numbers.test_loss, ".1e"),
                number(numbers.test_accuracy, ".1%"),
                str(numbers.diverged),
                f"{numbers.seconds:.0f} s",
            ]
        )
    return table(heads, body)


def claims_table(picture: Picture) -> str:
    """What the paper says, what was seen, and whether they agree."""
    return table(
        ["the paper says", "here", ""], [[v.claim.text, v.seen, WORDS[v.agrees]] for v in verdicts(picture)], left=3
    )


def reading_part(comparison: Comparison, found: Sequence[Picture]) -> list[str]:
    """Both readings of one open setting side by side, or how to get the other one."""
    reading = comparison.reading
    parts = [f"### {reading.name}: {' or '.join(reading.labels)}", reading.why]
    if reading.field == "patience":
        parts.append(patience_note(found))
    if not comparison.recorded:
        return [*parts, f"“{reading.labels[1]}”: not run. `{reading.command}` runs it."]
    counts = [
        [TITLES[task], cell.upper(), label, *count_texts(numbers)]
        for task, cell, *both in comparison.rows
        for label, numbers in zip(reading.labels, both, strict=True)
    ]
    claims = [
        [TITLES[main.task], one.claim.text, WORDS[one.agrees], WORDS[two.agrees]]
        for main, other in comparison.pictures
        for one, two in verdict_pairs(comparison.reading, main, other)
    ]
    drawn = [f"[{TITLES[other.task]}](figures/{other.name}.svg)" for _, other in comparison.pictures]
    return [
        *parts,
        table(["task", "cell", "reading", *(f"under {threshold_label(t)}" for t in THRESHOLDS)], counts, left=3),
        *([table(["task", "the paper says", *reading.labels], claims, left=4)] if claims else []),
        *([f"Figures with the reading “{reading.labels[1]}”: {', '.join(drawn)}."] if drawn else []),
    ]
