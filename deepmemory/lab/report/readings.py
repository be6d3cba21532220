"""What the paper leaves open about real data: each reading beside the other, and what both come to."""

from __future__ import annotations

from collections.abc import Sequence

from deepmemory.lab import paper
from deepmemory.lab.report.blocks import Block, Heading, Table, Text
from deepmemory.lab.report.cells import both, images, mean, runs_in_words, show
from deepmemory.lab.report.scores import (
    NOT_RUN,
    TITLES,
    Account,
    Board,
    Line,
    Outcome,
    Place,
    board_of_rates,
    both_readings,
    in_the_end,
    is_ablated,
    outcome,
    rates,
    value,
)


def readings_part(found: Sequence[Account]) -> list[Block]:
    """What the paper leaves open, in both readings."""
    tasks = {account.task for account in found}
    blocks: list[Block] = []
    for reading in paper.TABLE_READINGS:
        if not tasks & set(reading.tasks):
            continue
        blocks += [Heading(f"{reading.name}: {' or '.join(reading.labels)}", 3), Text(reading.why)]
        pairs = both_readings(reading, found)
        if not pairs:
            blocks.append(Text(f"“{reading.labels[1]}”: not run. `{reading.command}` runs it."))
            continue
        rows = []
        for line, other in pairs:
            so_far = "" if other.complete else f" after {other.reached} of {other.epochs} epochs"
            ours = both(line.our_test, line) if line.ours else NOT_RUN
            theirs = both(outcome(other, line.measure).test, line) + so_far
            rows.append([line.place.words, line.measure, both(line.test, line), ours, theirs])
        blocks.append(Table(["test", "measure", "paper", *reading.labels], rows, left=2))
        blocks += images([other for _, other in pairs])
    blocks += epoch_part(found) + perplexity_part(found) + rates_part(found)
    return [Heading("Other readings of the real-data part"), *blocks] if blocks else []


def epoch_part(found: Sequence[Account]) -> list[Block]:
    """The epoch at which a perplexity of translation is taken."""
    by, rows, nearer = paper.EPOCH_BY["translation"], [], list[bool]()
    for line in (line for account in found if account.task == "translation" for line in account.boards[0].lines):
        if line.ours is None or line.test is None:
            continue
        own, chosen = (outcome(line.ours, line.measure, by=measure).test for measure in (line.measure, by))
        end = in_the_end(line.ours, line.measure)
        rows.append([line.place.words, *(mean(of, line) for of in (line.test, own, chosen, line.train, end))])
        theirs = value(line.test.mean)
        nearer.append(abs(value(chosen.mean) - theirs) < abs(value(own.mean) - theirs))
    if not rows:
        return []
    heads = ["study", "test, paper", "best perplexity", "best accuracy", "train, paper", "validation in the end"]
    compared = (
        f"In {sum(nearer)} of {len(nearer)} rows its perplexity on the test is nearer to ours at the epoch "
        "of the best accuracy than at that of the best perplexity. "
    )
    return [
        Heading("Which epoch: that of the best perplexity or of the best accuracy", 3),
        Text(
            "The paper takes its scores from the epoch that was best on validation and does not say by which score. "
            "The launcher of the authors' published code sets accuracy for translation: that is how the tables above "
            f"have it. {compared}What the paper prints as perplexity of training stands beside ours "
            "on validation after the last epoch, the nearest to it here."
        ),
        Table(heads, rows),
    ]


def perplexity_part(found: Sequence[Account]) -> list[Block]:
    """The two perplexities."""
    every = [line for account in found for board in account.boards for line in board.lines]
    lines = list({line.place: line for line in every if line.usual and line.test}.values())
    if not lines:
        return []

    def away(line: Line, of: Outcome | None) -> float:
        """From the paper's mean."""
        return abs(value(of.test.mean if of else None) - value(line.test.mean if line.test else None))

    nearer = sum(away(line, line.outcome) < away(line, line.usual) for line in lines)
    return [
        Heading("Which perplexity: mean of exp or exp of mean", 3),
        Text(
            "The paper calls it the exponent of the cross-entropy; the authors' published code takes the mean over "
            "batches of exp(cross-entropy of the batch), which is larger than exp(mean cross-entropy), the usual "
            f"definition. Both stand in the tables above. In {nearer} of {len(lines)} rows the authors' way is nearer "
            "to the paper's number."
        ),
    ]


def rates_part(found: Sequence[Account]) -> list[Block]:
    """Learning rates of DMU-C."""
    if not any(is_ablated(Place(account.task, paper.DMU_C, 1)) for account in found):
        return []
    blocks: list[Block] = [
        Heading("The learning rate of DMU-C", 3),
        Text(
            "The paper searched a rate for DMU-C and does not print it. The tables above have a rate that was trained "
            "to the end, of several the one with the most runs and then the one that is best on validation, in what "
            "the table is about. Where it is not the DMU's, it is named."
        ),
    ]
    rows = []
    for one in rates(found):
        board = Board(board_of_rates(one.place), [])
        of = outcome(one, board.measure)
        name = f"{TITLES[one.place.task]}, {one.place.words}"
        rate = f"{one.study.setting.lr:g}"
        rows.append([name, rate, show(of.valid.mean, board), both(of.test, board), runs_in_words(of)])
    if rows:
        blocks.append(Table(["study", "rate", "validation, mean", "test, as in the table", "runs"], rows))
    return blocks
