"""What was watched while training: the gradient condition, gates and gradients by epoch, beside the loss."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepmemory.gradients import CANDIDATE_LIMIT, GATE_LIMIT
from deepmemory.lab import paper
from deepmemory.lab.records import Run, Study
from deepmemory.lab.report import scores, tables
from deepmemory.lab.report.blocks import Block, Commands, Heading, Image, Items, Table, Text, to_markdown
from deepmemory.lab.report.figures import STYLES
from deepmemory.lab.settings import SYNTHETIC, TASKS, THRESHOLDS, Setting, threshold_label

TITLE = "Gradients while training"
TITLES = {**tables.TITLES, **scores.TITLES}
NOTHING = "–"  # noqa: RUF001
ARROW = "→"
SHOWN_TOGETHER = ("hidden", "transition", "depth", "lr", "module_rate", "gamma", "epochs")  # may differ in a figure
FURTHER_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#000000")  # of one cell at further rates

Numbers = dict[int, dict[str, dict[int, float]]]  # by seed, by MODULE.LAYER.WHAT, by epoch


@dataclass(frozen=True)
class Quantity:
    """One row of a figure."""

    name: str  # the last part of what was watched, or a series
    label: str
    fold: str  # over layers: the largest, the smallest or the mean
    limit: float | None = None
    log: bool = False


QUANTITIES = (
    Quantity("z radius", "spectral radius\ntowards z", "max", GATE_LIMIT, log=True),
    Quantity("candidate radius", "spectral radius\nto the candidate", "max", CANDIDATE_LIMIT, log=True),
    Quantity("gate", "mean gate", "mean"),
    Quantity("saturated", "gates within 0.05\nof 0 or 1", "mean"),
    Quantity("flow", "log10 |dL/dh|,\nfirst / last step", "min", 0.0),
)
FOLDS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}
LOSS = Quantity("valid_loss", "validation loss", "mean", log=True)


@dataclass(frozen=True)
class Watched:
    """A study and what was watched of its runs."""

    study: Study
    numbers: Numbers

    @property
    def setting(self) -> Setting:
        """What was trained."""
        return self.study.setting

    @property
    def kind(self) -> str:
        """dmu, dmu-c, lstm, ..."""
        return paper.kind_of(self.setting)

    @property
    def depth(self) -> int:
        """Linear layers from one state to the next."""
        return paper.depth_of(self.setting)

    @property
    def rates(self) -> str:
        """Of the DMU, and of the rest where it is another."""
        setting = self.setting
        if setting.cell != "dmu" or self.kind == paper.DMU_C:
            return f"{setting.lr:g}"
        own = setting.lr / (2 * self.depth) if setting.module_rate == "formula" else float(setting.module_rate)
        return f"{own:g}, rest {setting.lr:g}"

    @property
    def runs(self) -> list[Run]:
        """Those that were watched."""
        return [run for run in self.study.runs if run.seed in self.numbers and run.epochs]

    def of_run(self, seed: int, quantity: Quantity) -> dict[int, float]:
        """A quantity by epoch, folded over the layers; what is nan is left out."""
        by_epoch: dict[int, list[float]] = {}
        for name, values in self.numbers[seed].items():
            if name.rpartition(".")[2] == quantity.name:
                for epoch, value in values.items():
                    by_epoch.setdefault(epoch, []).append(value)
        whole = {e: values for e, values in by_epoch.items() if not any(map(math.isnan, values))}
        return {epoch: FOLDS[quantity.fold](values) for epoch, values in sorted(whole.items())}

    def excess(self, seed: int) -> dict[int, float]:
        """How far a run is from the condition, by epoch: the largest ratio of a radius and its limit."""
        by_limit = [(self.of_run(seed, q), q.limit) for q in QUANTITIES if q.limit]
        return {epoch: max(of[epoch] / limit for of, limit in by_limit if limit) for epoch in by_limit[0][0]}

    def losses(self, run: Run) -> dict[int, float]:
        """Finite validation losses by epoch."""
        return {epoch: loss for epoch, loss in enumerate(run.curves[LOSS.name], 1) if math.isfinite(loss)}

    def curves(self, quantity: Quantity) -> list[dict[int, float]]:
        """Of every run, by epoch."""
        if quantity is LOSS:
            return [self.losses(run) for run in self.runs]
        return [of for run in self.runs if (of := self.of_run(run.seed, quantity))]


@dataclass(frozen=True)
class Scene:
    """One figure: studies that differ in depth, rate and cell alone."""

    task: str
    changes: tuple[tuple[str, object], ...]  # to the paper's settings, in all of them
    studies: list[Watched]  # by depth; the DMU first, and the largest rate of each cell

    @property
    def name(self) -> str:
        """For files."""
        return tables.figure_name(f"gradients-{self.task}", self.changes)

    @property
    def title(self) -> str:
        """For people."""
        changed = ", ".join(f"{name} = {value}" for name, value in self.changes)
        return TITLES[self.task] + (f", with {changed}" if changed else "")

    @property
    def depths(self) -> dict[int, list[Watched]]:
        """A panel for each."""
        return {
            depth: [one for one in self.studies if one.depth == depth]
            for depth in dict.fromkeys(one.depth for one in self.studies)
        }


def scenes(studies: Iterable[Study], numbers: Mapping[str, Numbers]) -> list[Scene]:
    """Sort what was watched, by the key of its study, into figures; nothing where nothing was."""
    found: dict[tuple[str, tuple], list[Watched]] = {}
    for study in studies:
        one = Watched(study, numbers.get(study.setting.key, {}))
        if one.runs:
            found.setdefault((study.setting.task, changes(study.setting)), []).append(one)
    kinds = sorted(paper.KINDS, key=lambda kind: not kind.startswith("dmu"))
    made = [
        Scene(task, changed, sorted(of, key=lambda one: (one.depth, kinds.index(one.kind), -one.setting.lr)))
        for (task, changed), of in found.items()
    ]
    return sorted(made, key=lambda scene: (TASKS.index(scene.task), len(scene.changes), scene.title))


def published(setting: Setting) -> Setting:
    """The paper's setting of the same cell, at the same depth where it has one."""
    kind, depth = paper.kind_of(setting), paper.depth_of(setting)
    real = setting.task not in SYNTHETIC
    return paper.setting(setting.task, kind, depth if real and depth in paper.DEPTHS else 1)


def changes(setting: Setting) -> tuple[tuple[str, object], ...]:
    """What differs from the paper's setting, but for what a figure shows side by side."""
    own, theirs = asdict(setting), asdict(published(setting))
    return tuple((name, own[name]) for name in own if own[name] != theirs[name] and name not in SHOWN_TOGETHER)


# --- the picture ----------------------------------------------------------------------------------


def draw(scene: Scene) -> Any:
    """One column per depth, one row per quantity: the median of the runs, and a band from lowest to highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = scene.depths
    rows = [q for q in (*QUANTITIES, LOSS) if any(one.curves(q) for one in scene.studies)]
    figure = Figure(figsize=(1.0 + 3.0 * len(columns), 0.6 + 1.75 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex="col", sharey="row")
    for column, (depth, studies) in enumerate(columns.items()):
        styles = styles_of(studies)
        for quantity, panel in zip(rows, panels[:, column], strict=True):
            for one, style in zip(studies, styles, strict=True):
                epochs, low, middle, high = over_runs(one.curves(quantity))
                if epochs:
                    panel.plot(epochs, middle, linewidth=1.5, markersize=3.5, markevery=marks(epochs), **style)
                    panel.fill_between(epochs, low, high, color=style["color"], alpha=0.12, linewidth=0)
            if quantity.limit is not None:
                panel.axhline(quantity.limit, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)))
            if quantity.log:
                panel.set_yscale("log")
            if column == 0:
                panel.set_ylabel(quantity.label, fontsize=9)
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        top, bottom = panels[0, column], panels[-1, column]
        top.set_title(f"depth {depth}", fontsize=11)
        bottom.legend(
            [Line2D([], [], linewidth=1.5, markersize=3.5, **style) for style in styles],
            [f"{one.kind.upper()}, rate {one.rates}" for one in studies],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.32),
            frameon=False,
            fontsize=8,
            handlelength=4,
        )
        bottom.set_xlabel("epoch")
        bottom.xaxis.get_major_locator().set_params(integer=True)
    return figure


def styles_of(studies: Sequence[Watched]) -> list[dict[str, Any]]:
    """A cell's own style for its largest rate, other colours for further ones."""
    further = iter(FURTHER_COLOURS * len(studies))
    seen: set[str] = set()
    styles = []
    for one in studies:
        style = STYLES[one.kind]
        styles.append({**style, "color": next(further), "marker": "."} if one.kind in seen else style)
        seen.add(one.kind)
    return styles


def marks(epochs: Sequence[int]) -> int:
    """Some eight markers on a curve."""
    return max(1, len(epochs) // 8)


def over_runs(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Epochs, and lowest, median and highest of the runs that have a finite value there."""
    found: dict[int, list[float]] = {}
    for curve in curves:
        for epoch, value in curve.items():
            if math.isfinite(value):
                found.setdefault(epoch, []).append(value)
    epochs = sorted(found)
    low, middle, high = ([fold(found[e]) for e in epochs] for fold in (min, statistics.median, max))
    return epochs, low, middle, high


# --- the page -------------------------------------------------------------------------------------


def document(found: Sequence[Scene], sessions: Mapping[int, Mapping[str, Any]], command: str) -> list[Block]:
    """The whole part; ``command`` is what writes it."""
    studies = [one for scene in found for one in scene.studies]
    return [
        Text(
            "`--watch gradients` looks at every run before the first epoch, after it, and some ten times more: at the "
            "spectral radii of the two products of condition (star), which should stay below "
            f"{GATE_LIMIT:g} and {CANDIDATE_LIMIT:g}, at the gates, and at the gradient that arrives at the first "
            "step. A run is inside where all its layers satisfy the condition. Of several layers the farthest outside "
            "counts, and the one that passes back least; gates are averaged."
        ),
        *(block for scene in found for block in scene_part(scene)),
        Heading("How to read the tables"),
        Items(
            [
                f"a {ARROW} b: median over the runs of the first value and of the last one watched",
                f"learned: the validation loss got under {threshold_label(THRESHOLDS[0])}; loss: the median over the "
                "runs of each run's least validation loss",
                "excess: the larger of both radii, each divided by its limit; below 1 the condition is satisfied",
                "correlations are Spearman's; a positive one says that a run farther outside has the larger loss. "
                "Over runs: the largest excess of a run and its least loss. Over epochs: excess and loss of the same "
                "epoch, all runs and watched epochs from the first on. "
                "All runs of a depth together mix the settings, so that what sets these apart counts too",
            ]
        ),
        Heading("Where the numbers of what was watched come from"),
        Items(tables.machines([one.study for one in studies], sessions)),
        Commands([*(training_command(one) for one in studies), command]),
    ]


def page(found: Sequence[Scene], sessions: Mapping[int, Mapping[str, Any]], command: str) -> str:
    """The same for the repository."""
    return to_markdown([Heading(TITLE, 1), *document(found, sessions, command)])


def scene_part(scene: Scene) -> list[Block]:
    """Figure, numbers and correlations."""
    said = "Spectral radii, gates, gradients and validation loss by epoch: median and range of the runs"
    parts: list[Block] = [Heading(scene.title), Image(scene.name, said), Table(*summary_table(scene), left=3)]
    judged = [one for one in scene.studies if one.setting.cell == "dmu"]
    if judged:
        parts += [
            Heading("Condition and success", 3),
            Table(*association_table(scene), left=3),
        ]
    return parts


def summary_table(scene: Scene) -> tuple[list[str], list[list[str]]]:
    """What became of the runs, and of what was watched."""
    synthetic = scene.task in SYNTHETIC
    heads = ["depth", "cell", "rate", "runs", *(["learned"] if synthetic else []), "loss"]
    heads += ["inside first", "inside last", "inside always", "radius z", "radius candidate", "gate", "saturated"]
    heads += ["log10 first / last"]
    rows = []
    for one in scene.studies:
        runs = one.runs
        row = [str(one.depth), one.kind.upper(), one.rates, str(len(runs))]
        if synthetic:
            row.append(str(sum(map(learned, runs))))
        row.append(number(median(least for run in runs if (least := least_loss(one, run)) is not None), ".1e"))
        if one.setting.cell == "dmu":
            inside = [[value < 1 for value in one.excess(run.seed).values()] for run in runs]
            inside = [of for of in inside if of]
            row += [str(sum(of[0] for of in inside)), str(sum(of[-1] for of in inside)), str(sum(map(all, inside)))]
        else:
            row += [NOTHING] * 3
        row += [first_and_last(one, quantity) for quantity in QUANTITIES]
        rows.append(row)
    return heads, rows


def association_table(scene: Scene) -> tuple[list[str], list[list[str]]]:
    """Whether the condition goes with success, study by study and for all runs of a depth."""
    synthetic = scene.task in SYNTHETIC
    heads = ["depth", "cell", "rate", *(["inside last: learned", "outside last: learned"] if synthetic else [])]
    heads += ["correlation over runs", "over epochs"]
    told_apart = [quantity for quantity in QUANTITIES if quantity.name in ("saturated", "flow")]
    if synthetic:
        heads += ["saturated last: learned / not", "log10 first / last: learned / not"]
    rows = []
    for depth, studies in scene.depths.items():
        dmus = [one for one in studies if one.setting.cell == "dmu"]
        groups = [(one.kind.upper(), one.rates, [one]) for one in dmus]
        if len(dmus) > 1:
            groups.append(("all", "", dmus))
        for cell, rates, of in groups:
            pairs = [(one, run) for one in of for run in one.runs if one.excess(run.seed)]
            row = [str(depth), cell, rates]
            if synthetic:
                last = [(list(one.excess(run.seed).values())[-1] < 1, learned(run)) for one, run in pairs]
                for side in (True, False):
                    chosen = [success for inside, success in last if inside is side]
                    row.append(f"{sum(chosen)} of {len(chosen)}" if chosen else NOTHING)
            worst = [
                (max(one.excess(run.seed).values()), least)
                for one, run in pairs
                if (least := least_loss(one, run)) is not None
            ]
            moments = [
                (value, loss)
                for one, run in pairs
                for epoch, value in one.excess(run.seed).items()
                if (loss := one.losses(run).get(epoch)) is not None
            ]
            row += [number(rank_correlation(worst), "+.2f"), number(rank_correlation(moments), "+.2f")]
            if synthetic:
                row += [" / ".join(last_of(pairs, quantity, how) for how in (True, False)) for quantity in told_apart]
            rows.append(row)
    return heads, rows


def last_of(pairs: Sequence[tuple[Watched, Run]], quantity: Quantity, success: bool) -> str:
    """The median of the last value watched, over the runs that learned or over the others."""
    curves = [one.of_run(run.seed, quantity) for one, run in pairs if learned(run) is success]
    return number(median(list(curve.values())[-1] for curve in curves if curve), ".2g")


def learned(run: Run) -> bool:
    """It got under the first threshold."""
    return tables.under(run, 0)


def least_loss(one: Watched, run: Run) -> float | None:
    """Of validation; None where it was never finite."""
    return min(one.losses(run).values(), default=None)


def first_and_last(one: Watched, quantity: Quantity) -> str:
    """Medians over the runs of the first and of the last value that was watched."""
    curves = one.curves(quantity)
    ends = [median(list(curve.values())[place] for curve in curves) for place in (0, -1)]
    return NOTHING if None in ends else f" {ARROW} ".join(number(end, ".2g") for end in ends)


def median(values: Iterable[float]) -> float | None:
    """None of nothing."""
    return tables.median_of(list(values))


def number(value: float | None, how: str) -> str:
    """A number, or a dash where there is none."""
    return NOTHING if value is None else format(value, how)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; equal values share their ranks. None where one side does not vary.

    >>> rank_correlation([(1, 10), (2, 100), (3, 1000)]), rank_correlation([(1, 3), (2, 2), (3, 1)])
    (1.0, -1.0)
    """
    if len(pairs) < 3:
        return None
    try:
        return statistics.correlation(*(ranks(side) for side in zip(*pairs, strict=True)))
    except statistics.StatisticsError:
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values get the mean of their places.

    >>> ranks([5, 1, 5])
    [2.5, 1.0, 2.5]
    """
    ordered = sorted(values)
    places = {value: ordered.index(value) + (ordered.count(value) + 1) / 2 for value in set(values)}
    return [places[value] for value in values]


def training_command(one: Watched) -> str:
    """What trains a study like this one."""
    setting, theirs = asdict(one.setting), asdict(published(one.setting))
    words = ["dmu", "train", setting["task"], "--cell", one.kind]
    if setting["task"] not in SYNTHETIC and one.depth in paper.DEPTHS:
        words += ["--depth", str(one.depth)]
    for name, value in setting.items():
        if value != theirs[name] and name not in ("task", "cell"):
            said = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", said]
    return shlex.join([*words, "--runs", str(len(one.study.runs)), "--watch", "gradients"])
