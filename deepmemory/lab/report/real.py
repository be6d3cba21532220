"""The part of the report about real data: table by table, statement by statement, reading by reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.bench.loop_time import STEPS, LoopTime, key_of
from deepmemory.lab.paper import REAL_RUNS, Spread
from deepmemory.lab.report.blocks import Block, Commands, Heading, Items, Table, Text, table
from deepmemory.lab.report.cells import NOTHING, both, cell_name, difference, images, mean, runs_in_words, show
from deepmemory.lab.report.claims import (
    Scores,
    TableVerdict,
    our_scores,
    printed_scores,
    table_rules_in_words,
    table_verdicts,
)
from deepmemory.lab.report.readings import readings_part
from deepmemory.lab.report.scores import (
    NO_DATA,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    TITLES,
    Account,
    Board,
    Line,
    Trained,
    exp,
    outcome,
    part_name,
    size_in_words,
    task_of_table,
)
from deepmemory.lab.report.tables import machines
from deepmemory.lab.settings import REAL
from deepmemory.lab.training.progress import duration

TITLE = "Real data, paper and ours"
WORDS = {True: "agrees", False: "**differs**", None: "open"}
HOLDS = {True: "holds", False: "**does not hold**"}
CHANCE = (
    "“chance” is how likely two means are at least as far apart if both come from the same scores, by Welch's t-test "
    "on means, deviations and numbers of runs"
)
LOOP_IN_WORDS = (
    f"What a Python loop would take is extrapolated from {STEPS} training steps of one run of each study on the same "
    "kind of machine, with the plain engine, without CUDA graphs, evaluation not counted."
)
PARTS = {"translation": "from", "pixel-mnist": "order"}  # what Place.part is


def document(
    found: Sequence[Account],
    sessions: Mapping[int, Mapping[str, Any]],
    command: str,
    loops: Mapping[str, LoopTime] | None = None,
) -> list[Block]:
    """The whole part; ``command`` is what writes it, ``loops`` how long studies take otherwise, by key."""
    verdicts, loops = table_verdicts(found), loops or {}
    tasks: list[Block] = [block for account in found for block in task_part(account, verdicts, sessions, loops)]
    overall = [v for v in verdicts if len(tasks_of(v)) > 1]
    everywhere: list[Block] = [Heading("Over all tasks"), claims_table(overall)] if overall else []
    return [
        Text(
            f"The paper (arXiv 2105.14092) compares DMU and RHN at four depths, {REAL_RUNS} runs of each, and "
            "prints best, mean and standard deviation over the runs. Scores are taken at the epoch that was best on "
            f"validation ({choosers_in_words()}); the best run is the one that is best on the test. In the tables, "
            "“best; mean ± deviation” stand in one column (ours of a sample, n - 1). Epochs: "
            f"{epochs_in_words()}."
        ),
        Text(agreement(found, verdicts)),
        *([Table(*summary_table(found), left=2)] if any(account.chosen for account in found) else []),
        *differing(verdicts),
        *tasks,
        *everywhere,
        *missed_part(found),
        *readings_part(found),
        *others_part(found),
        Heading("How rows and statements are judged"),
        Text(
            f"A row is “{REPRODUCED}” if our mean test score is within two of the paper's standard deviations of the "
            "paper's mean, or better. For pixels, where the paper prints one number, it is our own deviation."
        ),
        Items(table_rules_in_words()),
        Heading("Where the numbers of real data come from"),
        Text(
            f"Training took {time_in_words((one for account in found for one in account.trained), sessions)}, all "
            f"studies together{of_tables(found, sessions)}. Of the time in which several studies shared a GPU, each "
            "counts its part; what changed machines counts where it ended." + (f" {LOOP_IN_WORDS}" if loops else "")
        ),
        Items(machines([one.study for account in found for one in account.trained], sessions)),
        Commands(
            [
                "dmu data fetch",
                f"dmu paper {' '.join(REAL)}",
                *(reading.command for reading in paper.TABLE_READINGS),
                command,
            ]
        ),
    ]


def of_tables(found: Sequence[Account], sessions: Mapping[int, Mapping[str, Any]]) -> str:
    """How much of it went into the tables, where not all of it did."""
    chosen = [one for account in found for one in account.chosen.values()]
    if not chosen or len(chosen) == sum(len(account.trained) for account in found):
        return ""
    return f"; {time_in_words(chosen, sessions)} without readings, searches and other settings"


def time_in_words(studies: Iterable[Trained], sessions: Mapping[int, Mapping[str, Any]]) -> str:
    """How long studies trained, on GPUs and on CPUs; a run that changed machines counts where it ended."""
    spent: dict[str, float] = {}
    for one in studies:
        for session, seconds in one.by_session.items():
            kind = "GPUs" if str(sessions[session]["device"]).startswith("cuda") else "CPUs"
            spent[kind] = spent.get(kind, 0.0) + seconds
    return " and ".join(f"{duration(seconds)} on {kind}" for kind, seconds in sorted(spent.items(), reverse=True))


def choosers_in_words() -> str:
    """By which measure an epoch is the best."""
    usual = {task: paper.measure_of(task) for task in REAL}
    return ", ".join(f"{TITLES[task].lower()} by {measure}" for task, measure in (usual | paper.EPOCH_BY).items())


def epochs_in_words() -> str:
    """What the paper trains."""
    return ", ".join(f"{TITLES[task].lower()} {epochs}" for task, epochs in paper.REAL_EPOCHS.items()) + (
        f"; of pixels, for which the paper gives no recipe, {paper.PIXEL_RECIPE['epochs']}"
    )


def agreement(found: Sequence[Account], verdicts: Sequence[TableVerdict]) -> str:
    """How many rows and statements hold, in a few sentences."""
    judged = [verdict for account in found for verdict in account.judged()]
    if not judged:
        return "No study here has the paper's settings and all of its epochs; nothing is compared with the paper."
    said = [f"{judged.count(REPRODUCED)} of {len(judged)} rows of the paper's tables that were run are reproduced."]
    decided = [v for v in verdicts if v.agrees is not None]
    if decided:
        hold, neither = sum(bool(v.agrees) for v in decided), sum(not v.agrees and not v.printed for v in decided)
        said.append(f"{hold} of {len(decided)} of its statements that these records can decide hold here.")
        if neither:
            said.append(
                f"{neither} of the others {'does' if neither == 1 else 'do'} not hold in its own tables either."
            )
    few = [one for account in found for one in account.chosen.values() if len(one.complete) < REAL_RUNS]
    if few:
        said.append(f"{len(few)} studies have fewer than {REAL_RUNS} runs: take their rows as a hint.")
    return " ".join(said)


def summary(found: Sequence[Account]) -> str:
    """One line per task and language, in Markdown: the best depth of RHN and DMU, paper and ours."""
    heads, rows = summary_table(found)
    return table(heads, rows, left=2)


def summary_table(found: Sequence[Account]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the summary."""
    printed, ours = printed_scores(), our_scores(found)
    verdicts = table_verdicts(found)
    rows = []
    for account in found:
        decided = [v.agrees for v in verdicts if v.agrees is not None and tasks_of(v) == {account.task}]
        board = account.boards[0]
        said = f"{sum(decided)} of {len(decided)}" if decided else NOTHING
        for part in dict.fromkeys(line.place.part for line in board.lines):
            judged = account.judged(part)
            unknown = NO_DATA if part in paper.NO_DATA else NOT_RUN
            rows.append(
                [
                    " ".join(filter(None, (TITLES[account.task], part_name(part)))),
                    board.measure,
                    *(best_mean(scores, board, part, cell) for cell in ("rhn", "dmu") for scores in (printed, ours)),
                    f"{judged.count(REPRODUCED)} of {len(judged)}" if judged else unknown,
                    said,
                ]
            )
            said = ""
    heads = ["best mean test score", "measure", "RHN, paper", "ours", "DMU, paper", "ours"]
    heads += ["rows reproduced", "statements that hold"]
    return heads, rows


def best_mean(scores: Scores, board: Board, part: str, cell: str) -> str:
    """The best mean over all depths, with the depth."""
    found = {
        case.size: score.mean
        for (case, of), score in scores.items()
        if (case.table, case.part, of) == (board.name, part, cell) and not math.isnan(score.mean)
    }
    if not found:
        return NOTHING
    size = (max if board.measure == "accuracy" else min)(found, key=lambda size: found[size])
    return f"{show(found[size], board)} ({size_in_words(board.task, size)})"


def differing(verdicts: Sequence[TableVerdict]) -> list[Block]:
    """Where paper and records part, before anything else."""
    items = [
        f"{about(v)}: the paper says “{v.claim.text}”; here {v.seen}."
        + ("" if v.printed else " It does not hold in the paper's own table either.")
        for v in verdicts
        if v.agrees is False
    ]
    return [Text(f"Where it differs ({CHANCE}):"), Items(items)] if items else []


def about(verdict: TableVerdict) -> str:
    """What a statement is about, for people."""
    tasks = tasks_of(verdict)
    return TITLES[tasks.pop()] if len(tasks) == 1 else "All tasks"


def tasks_of(verdict: TableVerdict) -> set[str]:
    """What a statement is about."""
    return {task_of_table(name) for name in verdict.claim.tables}


# --- one task -------------------------------------------------------------------------------------


def task_part(
    account: Account,
    verdicts: Sequence[TableVerdict],
    sessions: Mapping[int, Mapping[str, Any]],
    loops: Mapping[str, LoopTime],
) -> list[Block]:
    """Figures, tables and statements."""
    blocks: list[Block] = [Heading(TITLES[account.task])]
    blocks += images([one for one in account.trained if one.is_papers or not one.changes])
    for board in account.boards:
        blocks += board_part(board, sessions, loops)
    if account.task == "pixel-mnist":
        blocks += [Text("As printed in the paper; all but the DMU's are other authors' numbers."), pixels_table()]
    own = [v for v in verdicts if tasks_of(v) == {account.task}]
    return [*blocks, *([claims_table(own)] if own else [])]


def board_part(board: Board, sessions: Mapping[int, Mapping[str, Any]], loops: Mapping[str, LoopTime]) -> list[Block]:
    """One table of the paper beside ours."""
    perplexity = board.measure == "perplexity"
    pixels = board.task == "pixel-mnist"
    extra = ["test, exp of mean loss"] if perplexity else []
    heads = [
        *([PARTS[board.task]] if board.task in PARTS else []),
        "units" if pixels else "depth",
        "cell",
        "train, paper",
        "train, ours",
        "test, paper",
        "test, ours",
        *extra,
        "difference",
        "runs",
        "",
    ]
    left = heads.index("cell") + 1
    rows = [
        [
            *([part_name(line.place.part)] if board.task in PARTS else []),
            str(line.place.size),
            cell_name(line),
            both(line.train, board),
            both(line.our_train, board),
            both(line.test, board),
            both(line.our_test, board),
            *([show(line.usual.test.mean, board) if line.usual else NOTHING] if perplexity else []),
            difference(line),
            runs_in_words(line.outcome),
            f"**{line.verdict}**" if line.verdict == NOT_REPRODUCED else line.verdict,
        ]
        for line in board.lines
    ]
    unit = "points" if pixels else "standard deviations of the paper"
    text = f"The difference is ours less the paper's mean on the test, in {unit}."
    if pixels:
        text += " Units are the DMU's; the other cells have as many weights and learn and start like its module."
    if perplexity:
        text += " The perplexity is the mean over batches of exp(cross-entropy), as the authors take it."
    return [Heading(board.title, 3), Text(text), Table(heads, rows, left), *time_part(board.ours, sessions, loops)]


def time_part(
    ours: Sequence[Trained], sessions: Mapping[int, Mapping[str, Any]], loops: Mapping[str, LoopTime]
) -> list[Block]:
    """How long the studies of a table trained, and how long a Python loop would have."""
    if not ours:
        return []
    text = f"The studies in this table trained {time_in_words(ours, sessions)}."
    known = [(loops[key], one) for one in ours if (key := key_of(one.study.setting)) in loops]
    if known:
        seconds = sum(loop.run_seconds(one.epochs) * len(one.study.runs) for loop, one in known)
        which = "" if len(known) == len(ours) else f" for {len(known)} of them"
        text += f" As a Python loop, one run after another: about {seconds / 3600:.1f} hours{which}."
    return [Text(text)]


def claims_table(verdicts: Sequence[TableVerdict]) -> Table:
    """What the paper says, whether its own table bears it out, and what was seen here."""
    rows = [
        [f"{v.claim.text}. {v.claim.note}" if v.claim.note else v.claim.text, HOLDS[v.printed], v.seen, WORDS[v.agrees]]
        for v in verdicts
    ]
    return Table(["the paper says", "in its own table", "here", ""], rows, left=4)


def pixels_table() -> Table:
    """The paper's comparison with other networks."""
    rows = [
        [row.cell, f"{row.ordered:.1f}%", f"{row.permuted:.1f}%", str(row.units), row.params]
        for row in paper.PIXEL_MNIST
    ]
    return Table(["network", "ordered", "permuted", "units", "weights"], rows)


# --- rows that are not reproduced -------------------------------------------------------------------


def missed_part(found: Sequence[Account]) -> list[Block]:
    """What can be said of them: whether chance could make the difference, and what other settings came to."""
    missed = {
        (line.place, line.measure): (line, account)
        for account in found
        for board in account.boards
        for line in board.lines
        if line.verdict == NOT_REPRODUCED
    }
    rows = []
    for line, account in missed.values():
        others = [one for one in account.trained if one.place == line.place and one is not line.ours]
        rows.append(
            [
                f"{TITLES[line.task]}, {line.place.words}",
                line.measure,
                mean(line.test, line),
                mean(line.our_test, line),
                f"{line.at_least_as_good} of {runs_in_words(line.outcome)}",
                NOTHING if line.chance is None else f"{line.chance:.3f}",
                "; ".join(f"{one.words}: {mean(outcome(one, line.measure).test, line)}" for one in others) or NOTHING,
            ]
        )
    if not rows:
        return []
    heads = ["test", "measure", "paper", "ours", "runs as good as the paper's mean", "chance", "other settings"]
    return [
        Heading("Rows that are not reproduced"),
        Text(f"Here, {CHANCE}. Above 0.05 these may be too few runs to tell; below, something differs."),
        Table(heads, rows, left=2),
    ]


# --- other settings -------------------------------------------------------------------------------


def others_part(found: Sequence[Account]) -> list[Block]:
    """Shortened, unfinished and changed studies, never beside the paper's numbers."""
    blocks: list[Block] = []
    for account in found:
        if not account.others:
            continue
        board = account.boards[0]
        rows = []
        for one in account.others:
            of = outcome(one, board.measure)
            usual = [show(outcome(one, "loss", exp).test.mean, board)] if board.measure == "perplexity" else []
            rows.append(
                [one.place.words, one.words, both(of.train, board), both(of.test, board), *usual, runs_in_words(of)]
            )
        extra = ["test, exp of mean loss"] if board.measure == "perplexity" else []
        heads = ["study", "changed", f"train {board.measure}", f"test {board.measure}", *extra, "runs"]
        changed = images([one for one in account.others if one.changes])
        blocks += [Heading(TITLES[account.task], 3), Table(heads, rows, left=2), *changed]
    if not blocks:
        return []
    why = "Studies with settings that are not the paper's, or with fewer epochs: not to be compared with its tables."
    return [Heading("Other settings of the real-data part"), Text(why), *blocks]


# --- for machines ---------------------------------------------------------------------------------


def as_data(account: Account, found: Sequence[Account]) -> dict[str, Any]:
    """One task as plain data; nan and inf are null."""
    verdicts = [v for v in table_verdicts(found) if account.task in tasks_of(v)]
    return {
        "task": account.task,
        "tables": [
            {"table": board.name, "measure": board.measure, "rows": [line_data(line) for line in board.lines]}
            for board in account.boards
        ],
        "claims": [
            {"claim": v.claim.text, "in_the_table": v.printed, "seen": v.seen, "agrees": v.agrees} for v in verdicts
        ],
        "other": [
            {"study": one.place.words, "changed": one.words, "test": finite(outcome(one, measure_of(account)).test)}
            for one in account.others
        ],
    }


def measure_of(account: Account) -> str:
    """Of the task's main table."""
    return account.boards[0].measure


def line_data(line: Line) -> dict[str, Any]:
    """One row."""
    ours = line.outcome
    return {
        **line.place._asdict(),
        "paper": {"train": finite(line.train), "test": finite(line.test)},
        "ours": ours and {"train": finite(ours.train), "test": finite(ours.test), "runs": ours.runs},
        "diverged": ours and ours.diverged,
        "deviations": clean(line.deviations),
        "verdict": line.verdict,
        "study": line.ours and line.ours.study.setting.key,
    }


def finite(spread: Spread | None) -> dict[str, float | None] | None:
    """Numbers that JSON knows."""
    return spread and {name: clean(number) for name, number in spread._asdict().items()}


def clean(number: float | None) -> float | None:
    """None in the place of nan and inf."""
    return number if number is not None and math.isfinite(number) else None
