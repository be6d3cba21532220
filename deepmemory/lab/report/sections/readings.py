"""What the paper leaves open about real data: both readings side by side, with their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepmemory.lab import paper
from deepmemory.lab.report import words
from deepmemory.lab.report.blocks import Block, Heading, Section, Text
from deepmemory.lab.report.results import tables
from deepmemory.lab.report.results.tables import RealResults, Scores, StudyResult, TableRow
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.table import Column, Table, number, text_columns

Images = Callable[[RealResults, Sequence[StudyResult]], list[Block]]


def readings_section(results: Sequence[RealResults], images: Images) -> list[Section]:
    """Both readings of every open setting, and what else the paper leaves open."""

    def compare(reading: paper.Reading) -> tuple[str, list[Block], list[Block]]:
        rows: list[tuple[TableRow, StudyResult]] = []
        drawn: list[Block] = []
        for one in results:
            by_experiment = {row.experiment: row for row in reversed(one.rows.values())}
            others = [of for of in one.studies if of.reading is reading and of.experiment in by_experiment]
            others.sort(key=lambda of: of.experiment.order)
            rows += [(by_experiment[other.experiment], other) for other in others]
            drawn += images(one, others)
        columns = [
            Column("test", lambda pair: pair[0].experiment.title),
            Column("measure", lambda pair: pair[0].measure),
            number("paper", lambda pair: words.spread_text(pair[0].paper_test, pair[0].format)),
            number(reading.labels[0], lambda pair: main_text(pair[0])),
            number(reading.labels[1], lambda pair: other_text(*pair)),
        ]
        return reading.why, [Table(columns, rows)] if rows else [], drawn

    tasks = {one.task for one in results}
    compared, not_run = shared.readings([one for one in paper.TABLE_READINGS if tasks & set(one.tasks)], compare)
    blocks = [*compared, *epoch_blocks(results), *perplexity_blocks(results), *rate_blocks(results), *not_run]
    return [Section("What the paper leaves open", blocks)] if blocks else []


def main_text(row: TableRow) -> str:
    """Test scores with the reading of the paper's tables."""
    return words.spread_text(row.scores.test, row.format) if row.scores else words.NOT_RUN


def other_text(row: TableRow, other: StudyResult) -> str:
    """Test scores with the other reading, and how far an incomplete study got."""
    return words.joined(words.spread_text(other.scores(row.measure).test, row.format), other.unfinished, by=" ")


def epoch_blocks(results: Sequence[RealResults]) -> list[Block]:
    """The epoch at which a perplexity of translation is taken."""
    lines, nearer = [], []
    for row in (row for one in results if one.task == "translation" for row in one.tables[0].rows):
        if row.result and row.paper_test:
            own, chosen = (row.result.scores(row.measure, by=by).test for by in (row.measure, "accuracy"))
            spreads = (row.paper_test, own, chosen, row.paper_train, row.result.final_validation(row.measure))
            lines.append([row.experiment.title, *(words.mean_text(of, row.format) for of in spreads)])
            nearer.append(distance(row, chosen) < distance(row, own))
    text = (
        "The paper takes its scores from the epoch that was best on validation and does not say by which score. The "
        "launcher of the authors' published code sets accuracy for translation, and so do the tables above. "
        f"In {sum(nearer)} of {len(nearer)} rows the paper's test perplexity is nearer to ours at the epoch of the "
        "best accuracy than at that of the best perplexity. What the paper prints as training perplexity stands beside "
        "our validation perplexity after the last epoch, which is the nearest to it here."
    )
    heads = ["test, paper", "best perplexity", "best accuracy", "train, paper", "validation at the end"]
    title = "Which epoch: that of the best perplexity or of the best accuracy"
    return [Heading(title), Text(text), Table(text_columns(1, "study", *heads), lines)] if lines else []


def distance(row: TableRow, ours: paper.Spread) -> float:
    """How far our mean test score is from the paper's."""
    return abs(tables.mean(ours) - tables.mean(row.paper_test))


def perplexity_blocks(results: Sequence[RealResults]) -> list[Block]:
    """The two definitions of perplexity."""
    pairs = [
        (distance(row, row.scores.test), distance(row, row.usual_perplexity.test))
        for one in results
        for row in one.rows.values()
        if row.paper_test and row.scores and row.usual_perplexity
    ]
    text = (
        "The paper calls it the exponent of the cross-entropy. The authors' published code takes the mean over batches "
        "of exp(cross-entropy of the batch), which is larger than the usual definition, exp(mean cross-entropy). Both "
        f"stand in the tables above. In {sum(authors < usual for authors, usual in pairs)} of {len(pairs)} rows the "
        "authors' definition is nearer to the paper's number."
    )
    return [Heading("Which perplexity: mean of exp or exp of mean"), Text(text)] if pairs else []


def rate_blocks(results: Sequence[RealResults]) -> list[Block]:
    """Learning rates of DMU-C that were tried."""
    lines = []
    for one in tables.tried_rates(results):
        measure = paper.MEASURES[tables.rate_table(one.experiment.task)]
        scores = one.scores(measure)
        of = [words.number(tables.mean(scores.valid), measure), words.spread_text(scores.test, measure)]
        name = f"{words.TITLES[one.experiment.task]}, {one.experiment.title}"
        lines.append([name, f"{one.study.setting.lr:g}", *of, runs_text(scores)])
    text = (
        "The paper searched a learning rate for DMU-C and does not print it. Of the rates that were trained to the end "
        "here, the tables above have the one with the most runs, and among those the one that is best on validation by "
        "the measure of the table. It is named where it is not the DMU's."
    )
    columns = text_columns(1, "study", "rate", "validation, mean", "test, as in the table", "runs")
    return [Heading("The learning rate of DMU-C"), Text(text), Table(columns, lines)] if lines else []


def runs_text(scores: Scores | None) -> str:
    """The number of runs that count, and how many others diverged or are unfinished."""
    if scores is None:
        return words.NOTHING
    others = {"diverged": scores.diverged, "unfinished": scores.unfinished}
    return words.joined(str(len(scores.tests)), *(f"{number} {what}" for what, number in others.items() if number))
