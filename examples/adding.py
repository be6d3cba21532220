"""Train a DMU, a GRU and an LSTM of about a hundred weights on the Adding problem and draw who learns it.

Two of some hundred numbers are marked; at the end the network must say their sum. Several runs of each network
train side by side, as one batch of weight sets under ``torch.vmap``.
"""

from __future__ import annotations

import argparse
import html
import time
from pathlib import Path

import matplotlib as mpl
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import deepmemory as dm

STEPS_PER_EPOCH, BATCH, LONGEST = 200, 32, 110
COLOURS = {"DMU": "#d62728", "GRU": "#1f77b4", "LSTM": "#7f7f7f"}


class Network(nn.Module):
    """A recurrent block and a linear output on its last state."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.out = block, nn.Linear(width, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The answer to each sequence of x (T, B, 2)."""
        y, _ = self.block(x, lengths=lengths)
        return self.out(y[lengths - 1, torch.arange(x.shape[1])]).squeeze(-1)


def long_memory_lstm() -> dm.LSTM:
    """Starts with its forget gates open."""
    lstm = dm.LSTM(2, [2, 2])
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if name.startswith("bias"):
                bias[2:4] = 2
    return lstm


# The sizes, learning rates and biases of the paper: 106, 108 and 99 weights.
NETWORKS = {
    "DMU": (lambda: Network(dm.DMU(2, 5, transition=[5], memory_bias=3.0), 5), 0.02),
    "GRU": (lambda: Network(dm.GRU(2, [3, 2]), 2), 0.05),
    "LSTM": (lambda: Network(long_memory_lstm(), 2), 0.001),
}


def adding(runs: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh sequences (runs, T, batch, 2) of numbers and marks, their lengths and their targets."""
    shape = (runs, batch)
    lengths = torch.randint(100, LONGEST + 1, shape, generator=generator)
    numbers = torch.rand(runs, LONGEST, batch, generator=generator) * 2 - 1
    first = torch.randint(0, 10, shape, generator=generator)
    choices = lengths // 2 - 2  # positions 0 to length / 2 - 2 without the first one
    second = (torch.rand(shape, generator=generator) * choices).long()
    second += second >= first

    marks = torch.zeros_like(numbers)
    for position in (first, second):
        marks.scatter_(1, position[:, None], 1.0)
    marks[:, 0] = -1  # the first and the last element; a mark that falls on the first is lost
    total = (numbers * (marks == 1)).sum(1)
    marks.scatter_(1, lengths[:, None] - 1, -1.0)
    return torch.stack([numbers, marks], -1), lengths, 0.5 + total / 4


class Study:
    """Several runs of one network, trained side by side."""

    def __init__(self, name: str, runs: int) -> None:
        make, rate = NETWORKS[name]
        networks = [make() for _ in range(runs)]
        self.model, self.weights = networks[0], stack_module_state(networks)[0]
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = dm.parameter_groups(self.model, rate)
        for group in groups:
            group["params"] = [self.weights[names[id(parameter)]] for parameter in group["params"]]
        self.optimiser = torch.optim.Adam(groups)
        self.losses: list[Tensor] = []  # of every run, on the test sequences, epoch by epoch

    def errors(self, x: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of each run."""
        run = torch.vmap(lambda weights, x, lengths: functional_call(self.model, weights, (x, lengths)))
        return (run(self.weights, x, lengths) - target).square().mean(-1)

    def train(self, *batch: Tensor) -> None:
        """One step of every run on its own batch."""
        self.optimiser.zero_grad()
        self.errors(*batch).sum().backward()
        self.optimiser.step()

    @torch.no_grad()
    def test(self, *batch: Tensor) -> None:
        """Note each run's loss; a run that broke counts as the worst there is."""
        self.losses.append(self.errors(*batch).nan_to_num(1.0))

    def quartiles(self) -> Tensor:
        """Lower quartile, median and upper quartile of the runs, each epoch by epoch: (3, epochs)."""
        return torch.stack(self.losses).quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1)

    def median(self) -> float:
        """Of the runs' last losses."""
        return self.quartiles()[1, -1].item()


def compare(epochs: int, runs: int, minutes: float, console: Console) -> dict[str, Study]:
    """Train all networks on the same sequences, until the epochs are done or the time is up."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    studies = {name: Study(name, runs) for name in NETWORKS}
    test = [part.expand(runs, *part.shape[1:]).contiguous() for part in adding(1, 500, generator)]
    deadline = time.monotonic() + 60 * minutes
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("time left"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Adding", total=epochs * STEPS_PER_EPOCH)
        for step in range(epochs * STEPS_PER_EPOCH):
            if step % STEPS_PER_EPOCH == 0:
                for study in studies.values():
                    study.test(*test)
                medians = ", ".join(f"{name} {study.median():.0e}" for name, study in studies.items())
                progress.update(bar, description=f"epoch {step // STEPS_PER_EPOCH}: {medians}")
            if time.monotonic() > deadline:
                console.print(f"Stopped after {step // STEPS_PER_EPOCH} of {epochs} epochs: {minutes:g} min are over.")
                return studies
            batch = adding(runs, BATCH, generator)
            for study in studies.values():
                study.train(*batch)
            progress.advance(bar)
    for study in studies.values():
        study.test(*test)
    return studies


def draw(studies: dict[str, Study], folder: Path) -> None:
    """The median run of each network, and the band in which the middle half of the runs lies."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "deepmemory"  # the same picture is the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, study in studies.items():
        low, middle, high = study.quartiles()
        epochs = range(len(middle))
        axes.fill_between(epochs, low, high, color=COLOURS[name], alpha=0.2, linewidth=0)
        weights = sum(parameter.numel() for parameter in study.model.parameters())
        axes.plot(epochs, middle, color=COLOURS[name], label=f"{name}, {weights} weights")
    axes.set(yscale="log", xlabel=f"epochs of {STEPS_PER_EPOCH} steps", ylabel="test loss (median, middle half)")
    axes.set_title(f"Adding problem, {len(study.losses[0])} runs each", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "demo.svg", metadata={"Date": None})
    figure.savefig(folder / "demo.png", dpi=150)
    plt.close(figure)


def write_page(studies: dict[str, Study], folder: Path) -> Path:
    """One HTML file with the picture and the numbers in it."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{study.median():.1e}</td>"
        f"<td>{int((study.losses[-1] < 1e-3).sum())} of {len(study.losses[-1])}</td></tr>"
        for name, study in studies.items()
    )
    svg = (folder / "demo.svg").read_text()
    page = folder / "index.html"
    page.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Adding problem</title>"
        "<style>body{font:16px system-ui;max-width:48em;margin:2em auto;padding:0 1em}"
        "td,th{padding:.2em 1em;text-align:left}svg{max-width:100%;height:auto}</style>"
        "<h1>The Adding problem</h1><p>Two of some hundred numbers are marked; at the end of the sequence the network "
        "must say their sum. Every network has about a hundred weights and the learning rate that the paper chose for "
        "it, for 100 epochs. The line is the median run, the band holds the middle half of the runs.</p>"
        f"{svg[svg.index('<svg') :]}<table><tr><th>network</th><th>median loss</th><th>runs below 1e-3</th></tr>"
        f"{rows}</table></html>"
    )
    return page


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of 200 steps (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=8, help="runs of each network (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=3, help="stop after this long (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    studies = compare(options.epochs, options.runs, options.minutes, console)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(studies, options.out)
    console.print(f"Done. Open {write_page(studies, options.out).resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
