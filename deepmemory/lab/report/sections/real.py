"""The page about real data: table by table, statement by statement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from deepmemory.lab import paper
from deepmemory.lab.bench.loop_time import STEPS, LoopTime, key_of
from deepmemory.lab.report import figures, words
from deepmemory.lab.report.blocks import Block, Commands, Details, Heading, Image, Items, Page, Section, Text
from deepmemory.lab.report.results import stats, table_claims, tables
from deepmemory.lab.report.results.claims import Verdict, rules_in_words
from deepmemory.lab.report.results.table_claims import tasks_of
from deepmemory.lab.report.results.tables import Experiment, RealResults, ResultTable, StudyResult, TableRow
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.sections.readings import readings_section, runs_text
from deepmemory.lab.report.table import Column, Table, number, text_columns
from deepmemory.lab.settings import REAL
from deepmemory.lab.tasks import chance_level
from deepmemory.lab.training.progress import duration

P_VALUE = (
    "p is the p-value of Welch's t-test on means, deviations and numbers of runs: how likely two means are at least as "
    "far apart if both come from the same distribution"
)
JUDGED = (
    f"A row is **{words.REPRODUCED}** if our mean test score is within two of the paper's standard deviations of the "
    f"paper's mean, either way. Beyond that it is **{words.BETTER}** or **{words.WORSE}**. For pixels the paper prints "
    f"one number, and our own deviation is taken. With fewer than {paper.REAL_RUNS} runs a verdict is marked as a hint."
)


def real_page(
    results: Sequence[RealResults], sessions: shared.Sessions, command: str, loops: Mapping[str, LoopTime]
) -> Page:
    """Tables, claims and readings; ``command`` is what writes the page, ``loops`` are times of Python loops by key."""
    verdicts = table_claims.table_verdicts(results)
    overall = [v for v in verdicts if len(tasks_of(v.claim)) > 1]
    judged: list[Block] = [Text(JUDGED), Items(rules_in_words(table_claims.RULES, paper.TABLE_CLAIMS))]
    sections = [
        Section("", introduction(results, verdicts)),
        *(task_section(one, verdicts, sessions, loops) for one in results),
        *([Section("Over all tasks", shared.statements(overall), REAL)] if overall else []),
        *differing_rows(results),
        *readings_section(results, images),
        Section("How rows and statements are judged", judged),
        Section("Where the numbers come from", provenance(results, sessions, command, bool(loops))),
    ]
    return Page("real", "Real data: the paper and this reproduction", sections)


def introduction(results: Sequence[RealResults], verdicts: Sequence[Verdict]) -> list[Block]:
    """What the paper did, and how much of it these records confirm."""
    choosers = {task: paper.measure_of(task) for task in REAL} | paper.EPOCH_BY
    chosen_by = words.listed([f"{measure} for {words.TITLES[task]}" for task, measure in choosers.items()])
    epochs = words.listed([f"{number} epochs of {words.TITLES[task]}" for task, number in paper.REAL_EPOCHS.items()])
    text = (
        f"The paper (arXiv:2105.14092) compares DMU and RHN at four depths, {paper.REAL_RUNS} runs of each, and prints "
        "best, mean and standard deviation over the runs. The best run is the one that is best on the test. Scores are "
        f"taken at the epoch that was best on validation: by {chosen_by}. The paper trains {epochs}; it gives no "
        f"recipe for pixels, which are trained here for {paper.PIXEL_RECIPE['epochs']} epochs."
    )
    summary = [summary_table(results)] if any(one.chosen for one in results) else []
    tasks = [(tasks_of(verdict.claim), verdict) for verdict in verdicts]
    named = [(words.TITLES[min(of)] if len(of) == 1 else "All tasks", verdict) for of, verdict in tasks]
    return [Text(text), Text(agreement(results, verdicts)), *summary, *shared.differences(named, f" ({P_VALUE})")]


def agreement(results: Sequence[RealResults], verdicts: Sequence[Verdict]) -> str:
    """How many rows and statements agree with the paper, in a few sentences."""
    judged = [verdict for one in results for verdict in one.verdicts()]
    if not judged:
        return "No study here has the paper's settings and all of its epochs; nothing is compared with the paper."
    counts = ", ".join(f"{judged.count(verdict)} {verdict}" for verdict in words.VERDICTS)
    said = [f"Rows of the paper's tables that were run: {len(judged)}, of them {counts}."]
    said.append(shared.statements_text(verdicts))
    neither = sum(v.agrees is False and v.in_paper is False for v in verdicts)
    if neither:
        said.append(f"Of those that do not hold, {neither} do not hold in the paper's own tables either.")
    few = sum(len(one.complete) < paper.REAL_RUNS for of_task in results for one in of_task.chosen.values())
    if few:
        said.append(f"Studies with fewer than {paper.REAL_RUNS} runs: {few}; their verdicts are hints.")
    return " ".join(said)


def summary_table(results: Sequence[RealResults]) -> Table:
    """One line per task and dataset: the best depth of RHN and DMU, paper and ours, and how many rows agree."""
    verdicts, lines = table_claims.table_verdicts(results), []
    for one in results:
        table, held = one.tables[0], shared.holding(v for v in verdicts if tasks_of(v.claim) == {one.task})
        for dataset in dict.fromkeys(row.experiment.dataset for row in table.rows):
            of_data = [row for row in table.rows if row.experiment.dataset == dataset]
            best = []
            for cell in ("rhn", "dmu"):
                rows = [row for row in of_data if row.experiment.cell == cell]
                best += [best_mean([(row.paper_test, row) for row in rows])]
                best += [best_mean([(row.scores.test, row) for row in rows if row.scores])]
            judged = one.verdicts(dataset)
            counted = " / ".join(str(judged.count(verdict)) for verdict in words.VERDICTS)
            unknown = words.NO_DATA if dataset in paper.NO_DATA else words.NOT_RUN
            title = words.joined(words.TITLES[one.task], words.dataset_title(dataset), by=" ")
            lines.append([title, table.measure, *best, counted if judged else unknown, held])
            held = ""  # once for each task
    heads = ["RHN, paper", "ours", "DMU, paper", "ours", f"rows {' / '.join(words.VERDICTS)}", "statements that hold"]
    return Table(text_columns(2, "best mean test score", "measure", *heads), lines)


def best_mean(scores: Sequence[tuple[paper.Spread | None, TableRow]]) -> str:
    """The best of some means, with its depth."""
    means = [(tables.mean(spread), row) for spread, row in scores if not math.isnan(tables.mean(spread))]
    if not means:
        return words.NOTHING
    value, row = tables.best_of(means[0][1].measure)(means, key=lambda pair: pair[0])
    return f"{words.number(value, row.format)} ({words.size_title(row.experiment.task, row.experiment.size)})"


def task_section(
    results: RealResults, verdicts: Sequence[Verdict], sessions: shared.Sessions, loops: Mapping[str, LoopTime]
) -> Section:
    """Figures, tables and statements of one task, then what was trained with other settings, then what was not run."""
    blocks = images(results, [one for one in results.studies if not one.drawn_with])
    shown: set[tuple[Experiment, str]] = set()
    for table in results.tables:
        run, missing = ([row for row in table.rows if bool(row.result) is there] for there in (True, False))
        if any((row.experiment, row.measure) not in shown for row in run):  # not only rows of the table before
            shown |= {(row.experiment, row.measure) for row in run}
            blocks += [Heading(table.title), Text(table_text(table)), Table(row_columns(table), run)]
            blocks.append(Text(time_text([row.result for row in run if row.result], sessions, loops)))
        summary = f"{table.title}; {words.count(len(missing), 'row')} of the paper not run"
        blocks += shared.folded(summary, Table(row_columns(table), missing))
    blocks += shared.statements([v for v in verdicts if tasks_of(v.claim) == {results.task}])
    blocks += others_blocks(results) if results.others else []
    chosen = sorted(results.chosen.values(), key=lambda one: one.experiment.order)
    settings = {one.experiment.title: one.study.setting for one in chosen}
    blocks += [shared.settings_table(settings)] if settings else []
    blocks += [other_networks()] if results.task == "pixel-mnist" else []
    folded_last = sorted(blocks, key=lambda block: isinstance(block, Details))
    return Section(words.TITLES[results.task], folded_last, (results.task,))


def images(results: RealResults, studies: Sequence[StudyResult]) -> list[Block]:
    """The figures that show these studies, each once."""
    drawn, found, measure = results.figures(), dict[str, Block](), paper.measure_of(results.task)
    for one in sorted(studies, key=lambda one: one.experiment.order):
        panels = drawn[one.figure]
        of = words.joined(words.TITLES[results.task], words.dataset_title(one.experiment.dataset), one.drawn_with)
        caption = f"{of}: {measure} of training (thin) and validation by epoch, mean and range of the runs."
        caption += shared.biases(shown.study.setting for panel in panels.values() for shown in panel)
        found.setdefault(one.figure, Image(one.figure, caption, partial(figures.draw_curves, panels)))
    return list(found.values())


def table_text(table: ResultTable) -> str:
    """What the numbers of a table are."""
    pixels = table.name == "pixel_mnist"
    unit = "percentage points" if pixels else "standard deviations of the paper"
    text = f"Test scores are mean ± standard deviation. The difference is our mean less the paper's, in {unit}."
    if pixels:
        text += " Units are the DMU's; the other cells have as many weights, and learn and start like its module."
    if table.measure == "perplexity":
        text += " The perplexity is the mean over batches of exp(cross-entropy), as the authors take it."
    return text


def row_columns(table: ResultTable) -> list[Column]:
    """Columns of a table of the paper beside ours, those that matter most first."""
    task = tables.task_of_table(table.name)
    dataset = {"translation": "from", "pixel-mnist": "order"}.get(task)

    def cell(row: TableRow) -> str:
        rate = dict(row.result.changes).get("lr") if row.result else None  # of a DMU-C, if it is not the DMU's
        return words.cell_title(row.experiment.cell) + (f" (lr {rate:g})" if rate else "")

    def difference(row: TableRow) -> str:
        points = None if row.difference is None else 100 * row.difference
        return words.number(points if row.deviations is None else row.deviations, "+z.1f")

    def best(row: TableRow, ours: bool) -> str:
        spread = (row.scores and row.scores.test) if ours else row.paper_test
        return words.number(spread.best if spread else None, row.format)

    def usual(row: TableRow) -> str:
        return words.number(tables.mean(row.usual_perplexity.test) if row.usual_perplexity else None, row.format)

    return [
        *([Column(dataset, lambda row: words.dataset_title(row.experiment.dataset))] if dataset else []),
        Column("units" if task == "pixel-mnist" else "depth", lambda row: str(row.experiment.size)),
        Column("cell", cell),
        number("test, paper", lambda row: words.mean_text(row.paper_test, row.format)),
        number("test, ours", lambda row: words.mean_text(row.scores and row.scores.test, row.format)),
        number("difference", difference),
        Column("verdict", lambda row: row.mark),
        number("runs", lambda row: runs_text(row.scores), brief=False),
        number("best test, paper", lambda row: best(row, False), brief=False),
        number("best test, ours", lambda row: best(row, True), brief=False),
        *([number("test, exp of mean loss", usual, brief=False)] if table.measure == "perplexity" else []),
        number("train, paper", lambda row: words.spread_text(row.paper_train, row.format), brief=False),
        number("train, ours", lambda row: words.spread_text(row.scores and row.scores.train, row.format), brief=False),
    ]


def time_text(ours: Sequence[StudyResult], sessions: shared.Sessions, loops: Mapping[str, LoopTime]) -> str:
    """How long the studies of a table trained, and how long a Python loop would have."""
    text = f"The studies in this table trained {training_time(ours, sessions)}."
    known = [(loops[key], one) for one in ours if (key := key_of(one.study.setting)) in loops]
    if known:
        seconds = sum(loop.run_seconds(one.epochs) * len(one.study.runs) for loop, one in known)
        which = "" if len(known) == len(ours) else f" for {len(known)} of them"
        text += f" As a Python loop, one run after another: about {seconds / 3600:.1f} hours{which}."
    return text


def training_time(studies: Iterable[StudyResult], sessions: shared.Sessions) -> str:
    """How long studies trained, on GPUs and on CPUs; a run that changed machines counts where it ended."""
    spent: dict[str, float] = {}
    for one in studies:
        for session, seconds in stats.seconds_by_session(one.study).items():
            kind = "GPUs" if str(sessions[session]["device"]).startswith("cuda") else "CPUs"
            spent[kind] = spent.get(kind, 0.0) + seconds
    return " and ".join(f"{duration(seconds)} on {kind}" for kind, seconds in sorted(spent.items(), reverse=True))


def other_networks() -> Details:
    """The paper's comparison with other networks on pixels."""
    rows = [
        [row.cell, f"{row.ordered:.1f}%", f"{row.permuted:.1f}%", str(row.units), row.params]
        for row in paper.PIXEL_MNIST
    ]
    table = Table(text_columns(1, "network", "ordered", "permuted", "units", "weights"), rows)
    text = Text("As printed in the paper; all numbers but the DMU's are those of other authors.")
    return Details("The paper's comparison with other networks", [text, table])


def others_blocks(results: RealResults) -> list[Block]:
    """Shortened, unfinished and changed studies, which are never compared with the paper's numbers."""
    first = results.tables[0].rows[0]
    measure, how = first.measure, first.format

    def usual(one: StudyResult) -> str:
        return words.number(tables.mean(one.scores("loss", stats.perplexity).test), how)

    def chance(one: StudyResult) -> str:
        level = chance_level(one.study.setting)
        return words.number(level and level.scores[measure], how)

    columns = [
        Column("study", lambda one: one.experiment.title),
        Column("changed", lambda one: one.title),
        number(f"test {measure}", lambda one: words.spread_text(one.scores(measure).test, how)),
        number("chance", chance),
        number("runs", lambda one: runs_text(one.scores(measure))),
        *([number("test, exp of mean loss", usual, brief=False)] if measure == "perplexity" else []),
        number(f"train {measure}", lambda one: words.spread_text(one.scores(measure).train, how), brief=False),
    ]
    why = (
        "Settings that are not the published ones, or fewer epochs: not to be compared with the published tables. "
        f"Chance is the best answer that ignores the input: {answers(results)}."
    )
    drawn = images(results, [one for one in results.others if one.changes])
    title = f"{words.TITLES[results.task]} with other settings"
    if drawn and results.chosen:  # else they are all there is to see
        drawn = [Details(f"Figures of {title}", drawn)]
    return [Heading(title), Text(why), Table(columns, results.others), *drawn]


def answers(results: RealResults) -> str:
    """Descriptions of the best answers that ignore the input."""
    levels = [chance_level(one.study.setting) for one in results.others]
    return words.listed(list(dict.fromkeys(level.answer for level in levels if level)))


def differing_rows(results: Sequence[RealResults]) -> list[Section]:
    """Rows that are not reproduced: whether chance explains the difference, and the results of other settings."""
    items = [(one, row) for one in results for row in one.rows.values() if row.verdict in (words.BETTER, words.WORSE)]

    def tried(one: RealResults, row: TableRow) -> str:
        others = [of for of in one.studies if of.experiment == row.experiment and of is not row.result]
        means = [f"{of.title}: {words.mean_text(of.scores(row.measure).test, row.format)}" for of in others]
        return "; ".join(means) or words.NOTHING

    columns = [
        Column("test", lambda of: f"{words.TITLES[of[0].task]}, {of[1].experiment.title}"),
        Column("measure", lambda of: of[1].measure),
        number("paper", lambda of: words.mean_text(of[1].paper_test, of[1].format)),
        number("ours", lambda of: words.mean_text(of[1].scores.test, of[1].format)),
        Column("verdict", lambda of: of[1].mark),
        number("runs as good as the paper's mean", lambda of: f"{of[1].at_least_as_good} of {runs_text(of[1].scores)}"),
        number("p", lambda of: words.number(of[1].p_value, ".3f")),
        Column("other settings", lambda of: tried(*of)),
    ]
    text = f"Here, {P_VALUE}. Above 0.05 these may be too few runs to tell; below, something differs."
    return [Section("Rows that differ from the paper", [Text(text), Table(columns, items)])] if items else []


def provenance(results: Sequence[RealResults], sessions: shared.Sessions, command: str, loops: bool) -> list[Block]:
    """Time, machines and commands."""
    studies = [one for of_task in results for one in of_task.studies]
    chosen = [one for of_task in results for one in of_task.chosen.values()]
    text = f"Training took {training_time(studies, sessions)}, all studies together"
    if chosen and len(chosen) < len(studies):
        text += f"; {training_time(chosen, sessions)} without readings, searches and other settings"
    text += (
        ". Where several studies shared a GPU, each counts its part of the time; a run that changed machines counts "
        "where it ended."
    )
    if loops:
        text += (
            f" What a Python loop would take is extrapolated from {STEPS} training steps of one run of each study on "
            "the same kind of machine, with the plain engine, without CUDA graphs; evaluation does not count."
        )
    commands = ["dmu data fetch", f"dmu paper {' '.join(REAL)}"]
    commands += [*(reading.command for reading in paper.TABLE_READINGS), command]
    return [Text(text), shared.machines([one.study for one in studies], sessions), Commands(commands)]
