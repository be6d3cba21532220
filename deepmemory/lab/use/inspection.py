"""Inspection of a trained model: its size, the paper's gradient condition, gates, and gradients through time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import deepmemory as dm
from deepmemory.gradients import Condition, LayerGates, StateFlow
from deepmemory.lab import paper
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import Batch, Task
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.group import Group
from deepmemory.lab.training.trainer import Trainer
from deepmemory.lab.use.loading import TrainedModel

VALIDATION = "the first sequences of the validation data"  # what a model is measured on
EXAMPLES = "examples that come with the package"
SEQUENCES = 32  # of the validation set that gates and gradients are measured on
SATURATED = 0.05  # a gate this close to 0 or 1 counts as saturated
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")

Part = TypeVar("Part", LayerGates, StateFlow)


@dataclass(frozen=True)
class Inspection:
    """The measurements of one model; :func:`show`, :func:`as_data` and :func:`draw` present them."""

    model: TrainedModel
    weights: dict[str, int]  # counts of each part of the network
    conditions: dict[str, Condition]  # of every DMU, by its name inside the network
    gates: list[LayerGates]  # of every DMU layer
    flow: list[StateFlow]  # of every recurrent layer
    loss: float  # on the sequences that gates and flow were measured on
    remarks: list[str]  # on measurements that do not apply to this model


def inspect(model: TrainedModel, size: int = SEQUENCES) -> Inspection:
    """Measure a model on up to ``size`` validation sequences of its task, or on the examples that it has instead."""
    network, setting = model.network, model.setting
    weights = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    inputs, batch = one_batch(network, model.task, setting, random_streams.VALIDATION, model.seed, size)
    flow = dm.gradients.flow(network, inputs, loss_on(model.task, batch))
    conditions, gates, remarks = {}, [], []
    dmus = {name: module for name, module in network.named_modules() if isinstance(module, dm.DMU)}
    if setting.residual:
        remarks.append("the gradient condition is not defined for a residual transition")
    elif dmus:
        conditions = {name: dm.gradients.condition(dmu) for name, dmu in dmus.items()}
    if dmus:
        gates = last_calls(dm.gradients.gates(network, inputs))
    else:
        remarks.append(
            f"the gradient condition and the gates are measured for a DMU only; the cell here is {setting.cell.upper()}"
        )
    return Inspection(model, weights, conditions, gates, last_calls(flow), flow.loss, remarks)


def one_batch(
    network: nn.Module, task: Task, setting: Setting, split: int, seed: int, size: int
) -> tuple[tuple[Any, ...], Batch]:
    """The first sequences of a split, at most ``size`` if the task does not set the number, for one run's network."""
    weight = next(network.parameters())
    feed = task.feed(split, setting, torch.tensor([seed], device=weight.device), size, weight.dtype)
    batch = feed.batch(0, feed.plan(0)[0])
    inputs = tuple(
        value if dim is None or value is None else tree_map(lambda tensor: tensor[0], value)
        for value, dim in zip(batch.inputs, feed.in_dims, strict=True)
    )
    return inputs, batch


def loss_on(task: Task, batch: Batch) -> Any:
    """A function from the output of one run's network to its loss."""

    def loss(output: Any) -> Tensor:
        tally = task.tally(tree_map(lambda tensor: tensor[None], output), batch)
        return tally.loss.sum() / tally.counts.sum()

    return loss


def last_calls(parts: Iterable[Part]) -> list[Part]:
    """The results of every module's last call: a decoder that feeds back its own words is called many times before."""
    parts = list(parts)
    last = {part.name: part.call for part in parts}
    return [part for part in parts if part.call == last[part.name]]


def place(part: LayerGates | StateFlow) -> str:
    """The name of a layer, MODULE.LAYER."""
    return f"{part.name}.{part.layer}"


def ends(part: StateFlow) -> tuple[float, float]:
    """The gradient norm at the first step and at the last step that the loss depends on; medians over sequences."""
    norms = part.norms[:, ~part.norms[0].isnan()]
    steps = torch.arange(len(norms))[:, None]
    last = torch.where(norms > 0, steps, 0).amax(0)
    return norms[0].median().item(), norms.gather(0, last[None])[0].median().item()


def log_ratio(first: float, last: float) -> float:
    """log10 of first / last; below 0 if the gradient fades on its way back."""
    if not (first >= 0 and last >= 0) or first == last == 0:
        return math.nan
    if first == 0 or last == 0:
        return -math.inf if first == 0 else math.inf
    return math.log10(first) - math.log10(last)


def as_data(found: Inspection) -> dict[str, Any]:
    """All measurements as plain numbers for JSON, with None for numbers that are not finite."""
    model = found.model
    conditions = [
        {
            "module": name,
            "layer": layer.layer,
            "matrix": matrix,
            "radius": passage.radius,
            "limit": passage.limit,
            "norm": passage.norm,
            "inside": passage.satisfied,
            "growth": layer.growth,
        }
        for name, condition in found.conditions.items()
        for layer in condition
        for matrix, passage in (("z", layer.gate), ("candidate", layer.candidate))
    ]
    gates = [
        {
            "module": part.name,
            "layer": part.layer,
            "mean": part.mean,
            **dict(zip(("5%", "50%", "95%"), part.quantiles().tolist(), strict=True)),
            **dict(zip(("overwritten", "held"), part.saturated(SATURATED), strict=True)),
        }
        for part in found.gates
    ]
    flow = [
        {
            "module": part.name,
            "layer": part.layer,
            "state": part.state,
            "steps": len(part.norms),
            **dict(zip(("first", "last"), ends(part), strict=True)),
            "log10 ratio": log_ratio(*ends(part)),
            "median": part.median.tolist(),
        }
        for part in found.flow
    ]
    data = {
        "task": model.setting.task,
        "cell": model.setting.cell,
        "run": model.seed,
        "loss": found.loss,
        "measured on": VALIDATION if model.has_data else EXAMPLES,
        "sizes": sizes(model.setting),
        "weights": found.weights,
        "condition": conditions,
        "gates": gates,
        "flow": flow,
        "remarks": found.remarks,
    }
    return tree_map(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, data)


def sizes(setting: Setting) -> dict[str, list[int] | int]:
    """Sizes of the recurrent block: each layer's state, and the layers between one state and the next."""
    found: dict[str, list[int] | int] = {"state": list(setting.hidden)}
    if setting.cell == "dmu":
        found["hidden layers"] = list(setting.transition)
    return found | {"linear layers": paper.depth_of(setting)}


TABLES = {
    "condition": "Gradient condition: eigenvalues of the weights from a state to the gate z and to the next candidate",
    "gates": f"Gates: share of the state that is kept; overwritten is below {SATURATED}, held above {1 - SATURATED}",
    "flow": "Gradient flow: median norm of the gradient by the state, at the first step and at the last that matters",
}


def show(found: Inspection) -> None:
    """Print the measurements as tables."""
    from rich.console import Console
    from rich.table import Table

    console, data = Console(), as_data(found)
    parts = [{"part": name, "weights": f"{count:,}"} for name, count in found.weights.items()]
    everything = {"part": "all", "weights": f"{sum(found.weights.values()):,}"}
    title = "{task}, {cell}, run {run}\nloss {loss:.4g} on {measured on}".format(**data)
    title += "; dmu list: on all" if found.model.has_data else "; --data: on validation data"
    of_block = (
        f"{name} {', '.join(map(str, size)) or 'none' if isinstance(size, list) else size}"
        for name, size in data["sizes"].items()
    )
    title += f"\n{'; '.join(of_block)}"
    for heading, rows in ((title, [*parts, everything]), *((TABLES[name], data[name]) for name in TABLES)):
        if rows:
            shown = [name for name, value in rows[0].items() if not isinstance(value, list)]
            table = Table(*shown)
            for row in rows:
                table.add_row(*(as_text(row[name]) for name in shown))
            console.print(heading, table, sep="\n")
    for remark in found.remarks:
        console.print(remark)


def as_text(value: Any) -> str:
    """The text of one table cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(found: Inspection, folder: Path) -> list[Path]:
    """Write a figure of each measurement as SVG, PNG and PDF; returns the paths of the SVG files."""
    from deepmemory.lab.report.figures import save

    figures = {"flow": draw_flow(found)}
    if found.gates:
        figures["gates"] = draw_gates(found)
    if found.conditions:
        figures["eigenvalues"] = draw_eigenvalues(found)
    return [save(figure, folder, name)["svg"] for name, figure in figures.items()]


def panels(titles: Sequence[str], width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure with one panel for each title, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_flow(found: Inspection) -> Any:
    """The gradient norm over time: one panel for each module, one curve for each state of each layer."""
    names = list(dict.fromkeys(part.name for part in found.flow))
    figure, axes = panels(names, 5.5, 3.8)
    for panel, name in zip(axes, names, strict=True):
        for index, part in enumerate(part for part in found.flow if part.name == name):
            some = replace(part, norms=part.norms.where(part.norms > 0, math.nan))  # zero has no place on a log axis
            low, middle, high = some.quantiles().numpy()
            colour, steps = COLOURS[index % len(COLOURS)], range(len(middle))
            label = f"layer {part.layer}, {part.state}"
            panel.plot(steps, middle, color=colour, linestyle=DASHES[index % len(DASHES)], label=label, linewidth=1.6)
            panel.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        panel.set_yscale("log")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_xlabel("time step")
        panel.set_ylabel("norm of dL/dh: median, 5% to 95%")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.legend(frameon=False)
    return figure


def draw_gates(found: Inspection) -> Any:
    """A heat map of what each unit keeps at each step, averaged over the sequences; units that keep most on top.

    The colours span the values that occur: most gates are near 1.
    """
    figure, axes = panels([place(part) for part in found.gates], 5.0, 3.8)
    shares = [part.keep.double().nanmean(1) for part in found.gates]  # [T, d] each
    known = torch.cat([share[share.isfinite()] for share in shares])
    colours = {"vmin": known.min().item(), "vmax": known.max().item(), "cmap": "viridis"} if len(known) else {}
    for panel, share in zip(axes, shares, strict=True):
        order = share.nanmean(0).argsort(descending=True)
        image = panel.imshow(share[:, order].mT.numpy(), aspect="auto", interpolation="nearest", **colours)
        panel.set_xlabel("time step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.set_ylabel("unit, ordered by share kept")
    figure.colorbar(image, ax=axes, label="share of the state kept")
    return figure


def draw_eigenvalues(found: Inspection) -> Any:
    """The eigenvalues of both products in the complex plane, with the limits of the condition as circles."""
    layers = [(f"{name}.{layer.layer}", layer) for name, condition in found.conditions.items() for layer in condition]
    figure, axes = panels([title for title, _ in layers], 4.4, 4.4)
    angle = torch.linspace(0, 2 * math.pi, 200)
    for panel, (_, layer) in zip(axes, layers, strict=True):
        for passage, name, colour, marker in (
            (layer.candidate, "to the candidate", COLOURS[0], "o"),
            (layer.gate, "to z", COLOURS[1], "^"),
        ):
            values = passage.eigenvalues
            panel.plot(passage.limit * angle.cos(), passage.limit * angle.sin(), color=colour, linewidth=1)
            panel.scatter(values.real, values.imag, s=18, color=colour, marker=marker, label=name, alpha=0.8)
        panel.set_aspect("equal", adjustable="datalim")
        panel.set_xlabel("real part")
        panel.set_ylabel("imaginary part")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def watch(trainer: Trainer, group: Group, size: int = SEQUENCES) -> dict[str, list[float]]:
    """Gradient measurements of each run during training, in the order of ``group.rows``, by name: MODULE.LAYER.WHAT.

    A DMU has ``gate``, the mean share of the state that is kept, and ``saturated``, the share of gates within 0.05 of
    0 or 1; unless it is residual, also ``z radius`` and ``candidate radius``, the spectral radii of the gradient
    condition. Every layer has ``flow``, log10 of the median |dL/dh| at the first step over that at the last.

    All are taken with the current weights on the first validation sequences, on the CPU, run by run; each run costs
    one short call per time step.
    """
    with torch.random.fork_rng(devices=[]):  # making the network draws random weights
        network = trainer.task.network(trainer.setting).to(trainer.dtype).eval()
    weights = {name: weight.detach().cpu() for name, weight in group.weights.items()}
    found: dict[str, list[float]] = {}
    for row, run in enumerate(group.rows):
        network.load_state_dict({name: weight[row] for name, weight in weights.items()})
        for name, value in watch_run(network, trainer.task, trainer.setting, group.seeds[run], size).items():
            found.setdefault(name, []).append(value)
    return found


def watch_run(network: nn.Module, task: Task, setting: Setting, seed: int, size: int) -> dict[str, float]:
    """The numbers of :func:`watch` for one run."""
    inputs, batch = one_batch(network, task, setting, random_streams.VALIDATION, seed, size)
    found: dict[str, float] = {}
    for part in last_calls(dm.gradients.flow(network, inputs, loss_on(task, batch))):
        if part.state == "h":  # the last c of an LSTM has no gradient except through h
            found[f"{place(part)}.flow"] = log_ratio(*ends(part))
    for name, module in network.named_modules():
        if isinstance(module, dm.DMU) and not setting.residual:
            for layer in dm.gradients.condition(module):
                found[f"{name}.{layer.layer}.z radius"] = layer.gate.radius
                found[f"{name}.{layer.layer}.candidate radius"] = layer.candidate.radius
    if setting.cell == "dmu":
        for gates in last_calls(dm.gradients.gates(network, inputs)):
            found[f"{place(gates)}.gate"] = gates.mean
            found[f"{place(gates)}.saturated"] = sum(gates.saturated(SATURATED))
    return found
