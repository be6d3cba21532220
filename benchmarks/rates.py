"""Which learning rate after replacing a GRU? GRU and DMU of equal weights, with several optimisers, in five programs.

    python benchmarks/rates.py [--optimisers Adam SGD] [--programs words adding] [--layers GRU "DMU, lr"] [--seeds 2]

Each program is one that people write with ``nn.GRU``. All rates train side by side, from the same weights and on the
same batches; the score is measured on other data, after the last step. Results go to results/rates.json after every
study, and finished studies are not trained again. ``python benchmarks/readme.py`` makes the table of docs/faq.md.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import deepmemory as dm
from deepmemory.lab.bench.tables import markdown_table
from deepmemory.lab.data import digits, text
from deepmemory.lab.records import git_commit, now, versions

RESULTS = Path(__file__).parent / "results" / "rates.json"
RATES = {
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "AdamW": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "SGD": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
}
CLIP = 0.25  # largest norm of a gradient, as in pytorch/examples' word_language_model
MOST_WORDS = 1000  # of the word model's vocabulary; the last one stands for all others


@dataclass(frozen=True)
class Program:
    """A small program: its data, the network around the layer, its score."""

    hidden: int  # of the GRU; other layers get as many weights
    steps: int  # of the optimiser
    batch: Callable[[torch.Generator, bool], tuple[Tensor, Tensor]]  # of training or of other data: x, target
    network: Callable[[nn.Module, int], nn.Module]  # around a layer of some size
    features: int  # of the layer's input
    loss: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], Tensor]  # the score; lower is better


@dataclass(frozen=True)
class Layer:
    """A layer that replaces the program's GRU."""

    kind: type
    memory_bias: float
    rule: bool  # whether dm.parameter_groups sets the rates


LAYERS = {
    "GRU": Layer(dm.GRU, 0.0, False),
    "DMU, lr / 2n": Layer(dm.DMU, 0.0, True),
    "DMU, lr / 2n, memory_bias=1": Layer(dm.DMU, 1.0, True),
    "DMU, lr / 2n, memory_bias=3": Layer(dm.DMU, 3.0, True),
    "DMU, lr": Layer(dm.DMU, 0.0, False),
}


# Of the tables.
TITLES = {
    "characters": ("characters", "bits per character"),
    "words": ("words", "perplexity"),
    "rows_of_digits": ("MNIST by rows", "wrong, %"),
    "forecast": ("forecast", "squared error"),
    "adding": ("Adding, 60 steps", "squared error"),
}
SWAPS = ("GRU", "DMU, lr / 2n", "DMU, lr")
FACTORS = (1, 3)  # of the GRU's rate: the same, or the next of RATES
ADVICE = {
    "lr / 2n, the GRU's rate": ("DMU, lr / 2n", 1),
    "lr / 2n, three times the rate": ("DMU, lr / 2n", 3),
    "lr, the GRU's rate": ("DMU, lr", 1),
}
STARTS = {
    "`memory_bias=0`": "DMU, lr / 2n",
    "1": "DMU, lr / 2n, memory_bias=1",
    "3": "DMU, lr / 2n, memory_bias=3",
}


class Network(nn.Module):
    """An input layer, the recurrent layer, and an output layer for every step or the last one."""

    def __init__(self, layer: nn.Module, size: int, read: nn.Module, answers: int, every_step: bool) -> None:
        super().__init__()
        self.read, self.layer, self.every_step = read, layer, every_step
        self.answer = nn.Linear(size, answers)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(self.read(x))  # (T, B, size)
        return self.answer(output if self.every_step else output[-1])


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.squeeze(-1) - target).square().mean()


def wrong(output: Tensor, target: Tensor) -> Tensor:
    return 100 * (output.argmax(-1) != target).float().mean()


def text_windows(train: Tensor, valid: Tensor, length: int, count: int) -> Callable:
    def batch(generator: torch.Generator, training: bool) -> tuple[Tensor, Tensor]:
        ids, size = (train, count) if training else (valid, 256)
        starts = torch.randint(len(ids) - length - 1, (size,), generator=generator)
        windows = ids[starts + torch.arange(length + 1)[:, None]]  # (T + 1, B)
        return windows[:-1], windows[1:]

    return batch


def characters() -> Program:
    corpus = text.load_text()
    spelled = [" ".join(corpus.words[i] for i in ids[:100_000].tolist()) for ids in (corpus.train, corpus.valid)]
    letters = {letter: number for number, letter in enumerate(sorted(set("".join(spelled))))}
    train, valid = (torch.tensor([letters[letter] for letter in part]) for part in spelled)
    return Program(
        48,
        300,
        text_windows(train, valid, 32, 32),
        lambda layer, size: Network(layer, size, nn.Embedding(len(letters), 24), len(letters), True),
        24,
        cross_entropy,
        lambda output, target: cross_entropy(output, target) / math.log(2),
    )


def words() -> Program:
    corpus = text.load_text()
    train, valid = (ids.clamp(max=MOST_WORDS - 1) for ids in (corpus.train[:100_000], corpus.valid))
    return Program(
        40,
        300,
        text_windows(train, valid, 20, 16),
        lambda layer, size: Network(layer, size, nn.Embedding(MOST_WORDS, 40), MOST_WORDS, True),
        40,
        cross_entropy,
        lambda output, target: cross_entropy(output, target).exp(),
    )


def rows_of_digits() -> Program:
    splits = digits.load_digits()

    def batch(generator: torch.Generator, training: bool) -> tuple[Tensor, Tensor]:
        split = splits["train"] if training else splits["test"]
        chosen = torch.randint(len(split.labels), (32 if training else 1000,), generator=generator)
        return split.images[chosen].view(-1, 28, 28).transpose(0, 1) / 255, split.labels[chosen]

    return Program(
        32,
        250,
        batch,
        lambda layer, size: Network(layer, size, nn.Identity(), 10, False),
        28,
        cross_entropy,
        wrong,
    )


def forecast() -> Program:
    """A daily and a slower rhythm of random phase and size with noise; the series 12 hours ahead, at every hour."""

    def batch(generator: torch.Generator, training: bool) -> tuple[Tensor, Tensor]:
        size, hours, ahead = (16 if training else 512), 96, 12
        time = torch.arange(hours + ahead)[:, None]
        phase, scale = (torch.rand(2, size, generator=generator) for _ in range(2))
        waves = [torch.sin(2 * math.pi * (time / period + phase[i])) for i, period in enumerate((24, 84))]
        series = sum(wave * (0.3 + scale[i]) for i, wave in enumerate(waves))
        noisy = series + 0.2 * torch.randn(series.shape, generator=generator)
        return noisy[:hours, :, None], series[ahead:]

    return Program(
        24,
        300,
        batch,
        lambda layer, size: Network(layer, size, nn.Identity(), 1, True),
        1,
        squared_error,
        squared_error,
    )


def adding() -> Program:
    def batch(generator: torch.Generator, training: bool) -> tuple[Tensor, Tensor]:
        size, length = (32 if training else 1000), 60
        numbers = torch.rand(length, size, generator=generator)
        marked = torch.rand(length, size, generator=generator).topk(2, 0).indices
        marks = torch.zeros(length, size).scatter(0, marked, 1.0)
        return torch.stack([numbers, marks], -1), (numbers * marks).sum(0)

    return Program(
        24,
        500,
        batch,
        lambda layer, size: Network(layer, size, nn.Identity(), 1, False),
        2,
        squared_error,
        squared_error,
    )


PROGRAMS = {of.__name__: of for of in (characters, words, rows_of_digits, forecast, adding)}


def train(program: Program, layer: Layer, optimiser: str, seed: int) -> dict[str, float]:
    """Scores by learning rate, after ordinary training: one network and one optimiser for each rate."""
    size = dm.matched_hidden_size(layer.kind, nn.GRU(program.features, program.hidden))

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return program.network(layer.kind(program.features, size, memory_bias=layer.memory_bias), size)

    networks = [build() for _ in RATES[optimiser]]
    make = getattr(torch.optim, optimiser)
    optimisers = [
        make(dm.parameter_groups(network, rate) if layer.rule else network.parameters(), lr=rate)
        for network, rate in zip(networks, RATES[optimiser], strict=True)
    ]
    skeleton = build().to("meta")

    def call(weights: dict[str, Tensor], x: Tensor, target: Tensor, measure: Callable) -> Tensor:
        return measure(functional_call(skeleton, weights, (x,)), target)

    gradients = torch.vmap(grad_and_value(lambda *args: call(*args, program.loss)), (0, None, None))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(program.steps):
        weights = [dict(network.named_parameters()) for network in networks]
        stacked = {name: torch.stack([one[name].detach() for one in weights]) for name in weights[0]}
        grads, _ = gradients(stacked, *program.batch(generator, True))
        for run, (network, stepper) in enumerate(zip(networks, optimisers, strict=True)):
            for name, weight in weights[run].items():
                weight.grad = grads[name][run]
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            stepper.step()
    x, target = program.batch(torch.Generator().manual_seed(-1 - seed), False)
    with torch.no_grad():
        scores = [float(program.measure(network(x), target)) for network in networks]
    return {f"{rate:g}": score for rate, score in zip(RATES[optimiser], scores, strict=True)}


def scores_of(result: dict, optimiser: str, program: str, layer: str) -> dict[float, float]:
    """Mean over seeds by rate; a rate at which a run diverged scores infinity."""
    runs = list(result["scores"][f"{optimiser} | {program} | {layer}"].values())
    means = {rate: mean(run[rate] for run in runs) for rate in runs[0]}
    return {float(rate): score if math.isfinite(score) else math.inf for rate, score in means.items()}


def best_rate(scores: dict[float, float]) -> float:
    return min(scores, key=scores.__getitem__)


def rate_table(result: dict) -> str:
    """The best rate of each layer and its score, by optimiser and program."""
    rows = []
    for optimiser in RATES:
        for name, (title, measure) in TITLES.items():
            found = [scores_of(result, optimiser, name, layer) for layer in SWAPS]
            rates = [best_rate(scores) for scores in found]
            best = [f"{rate:g} ({scores[rate]:.3g})" for rate, scores in zip(rates, found, strict=True)]
            rows.append([optimiser, f"{title}: {measure}", *best])
    return markdown_table(["optimiser", "program: score", *SWAPS], rows)


def advice_table(result: dict) -> str:
    """In how many programs a DMU with a rate derived from the GRU's best rate is at least as good as the GRU at it."""
    rows = []
    for optimiser in RATES:
        counts = []
        for layer, factor in ADVICE.values():
            good = 0
            for name in TITLES:
                gru, dmu = (scores_of(result, optimiser, name, of) for of in ("GRU", layer))
                place = list(gru).index(best_rate(gru)) + FACTORS.index(factor)
                good += place < len(dmu) and list(dmu.values())[place] <= min(gru.values())
            counts.append(f"{good} of {len(TITLES)}")
        rows.append([optimiser, *counts])
    return markdown_table(["optimiser", *ADVICE], rows)


def start_table(result: dict) -> str:
    """The best score of a DMU by its initial bias, with Adam and the rule."""
    rows = []
    for name, (title, measure) in TITLES.items():
        best = [min(scores_of(result, "Adam", name, layer).values()) for layer in STARTS.values()]
        rows.append([f"{title}: {measure}", *(f"{score:.3g}" for score in best)])
    return markdown_table(["program: score", *STARTS], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimisers", nargs="+", default=list(RATES), choices=RATES)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scores": {}}
    for optimiser in chosen.optimisers:
        for name in chosen.programs:
            program = PROGRAMS[name]()
            for layer in chosen.layers:
                study = result["scores"].setdefault(f"{optimiser} | {name} | {layer}", {})
                for seed in range(chosen.seeds):
                    if str(seed) not in study:
                        study[str(seed)] = train(program, LAYERS[layer], optimiser, seed)
                        print(optimiser, name, layer, seed, study[str(seed)], flush=True)
                        result |= {"commit": git_commit(), "time": now(), "versions": versions()}
                        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
