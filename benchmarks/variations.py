"""Do zoneout and layer normalisation help a DMU? Small language models on the Penn Treebank, with and without them.

    python benchmarks/variations.py [--variants nothing "zoneout 0.05"] [--seeds 3]     # an hour on one core

Both are written here as a transition given as a module, which runs on the plain engine; models without them run on the
fused one. A long text is read a few times, and a short one many times, so that models overfit. With the same seed all
start from the same weights and read the same words. Every model is trained at each of four rates with one seed, then
with the other seeds at its best rate. The score is the validation perplexity at the end. Results go to
results/variations.json after every training, and trainings that are already there are not repeated. ``python
benchmarks/readme.py`` makes the table of docs/regularisation.md.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepmemory as dm
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.bench.tables import markdown_table
from deepmemory.lab.data.text import load_text
from deepmemory.lab.records import git_commit, now

RESULTS = Path(__file__).parent / "results" / "variations.json"
MOST_WORDS = 2000  # of the vocabulary; the last one stands for all others
BATCH, WINDOW, WIDTH = 20, 35, 80
EMBEDDING_RATE, WARM_UP, CLIP = 0.01, 0.1, 0.5
TRANSITIONS = {"n = 2": 1, "n = 3, residual": 2}  # hidden layers


@dataclass(frozen=True)
class Reading:
    """The training text, its rates, and the dropout around the layer."""

    words: int
    epochs: int
    rates: tuple[float, ...]  # of the DMU, at the peak of a cosine after a short warm-up
    input_dropout: float = 0.2
    output_dropout: float = 0.25


READINGS = {
    "long text": Reading(120_000, 6, (0.0015, 0.003, 0.006, 0.012)),
    "short text": Reading(25_000, 16, (0.0004, 0.00075, 0.0015, 0.003)),
}


@dataclass(frozen=True)
class Variant:
    """The regularisation inside the recurrence."""

    recurrent_dropout: float = 0.0
    zoneout: float = 0.0  # probability that a unit keeps its state for a step
    layer_norm: bool = False  # of the hidden layers, before their activation


VARIANTS = {
    "nothing": Variant(),
    "recurrent dropout 0.2": Variant(0.2),
    "zoneout 0.05": Variant(zoneout=0.05),
    "zoneout 0.15": Variant(zoneout=0.15),
    "recurrent dropout 0.2, zoneout 0.05": Variant(0.2, 0.05),
    "layer normalisation": Variant(layer_norm=True),
}


class Transition(nn.Module):
    """The residual transition of a DMU, with the DMU's weights and what a variant adds."""

    def __init__(self, layer: dm.DMU, variant: Variant) -> None:
        super().__init__()
        input_weight, state_weight, *others = layer.parameters()
        self.weights = nn.ParameterList([torch.cat([input_weight, state_weight], 1), *others[1::2]])
        self.biases = nn.ParameterList(others[::2])
        norm = nn.LayerNorm if variant.layer_norm else nn.Identity
        self.norms = nn.ModuleList(norm(len(bias)) for bias in self.biases[:-1])
        self.zoneout = variant.zoneout

    def forward(self, joined: Tensor) -> Tensor:
        *hidden, (weight, bias) = zip(self.weights, self.biases, strict=True)
        a = None
        for norm, layer in zip(self.norms, hidden, strict=True):
            new = F.leaky_relu(norm(F.linear(joined if a is None else a, *layer)))
            a = new if a is None else a + new
        transformed = F.linear(a, weight, bias)
        return self.zoned_out(transformed) if self.zoneout else transformed

    def zoned_out(self, transformed: Tensor) -> Tensor:
        """[z, candidate], where z makes some units keep their state; in evaluation, z keeps the average share."""
        z, candidate = transformed.chunk(2, -1)
        if self.training:
            z = z.masked_fill(torch.rand_like(z) < self.zoneout, math.inf)
        else:
            z = torch.logit(self.zoneout + (1 - self.zoneout) * torch.sigmoid(z))
        return torch.cat([z, candidate], -1)


class LanguageModel(nn.Module):
    """Logits of the next word at every step; embedding and output share a matrix."""

    def __init__(self, reading: Reading, hidden_layers: int, variant: Variant) -> None:
        super().__init__()
        self.reading = reading
        self.embedding = nn.Embedding(MOST_WORDS, WIDTH)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.bias = nn.Parameter(torch.zeros(MOST_WORDS))
        dropout = {"recurrent_dropout": variant.recurrent_dropout}
        self.layer = dm.DMU(WIDTH, WIDTH, transition=[WIDTH] * hidden_layers, residual=True, **dropout)
        if variant.zoneout or variant.layer_norm:
            self.layer = dm.DMU(WIDTH, WIDTH, transition=Transition(self.layer, variant), **dropout)

    def forward(self, words: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """words (T, B) to (T, B, words) and the last state."""
        y, state = self.layer(self.dropped(self.embedding(words), self.reading.input_dropout), state)
        return F.linear(self.dropped(y, self.reading.output_dropout), self.embedding.weight, self.bias), state

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Dropout with one mask for all time steps."""
        return x * F.dropout(torch.ones_like(x[0]), p, self.training)


def streams(text: Tensor) -> Tensor:
    """A text cut into ``BATCH`` columns, (T, BATCH)."""
    return text[: len(text) // BATCH * BATCH].view(BATCH, -1).T.contiguous()


def loss_of(network: LanguageModel, text: Tensor, start: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss of the window from ``start`` on, which continues from the last window's state; and the new state."""
    window = text[start : start + WINDOW + 1]
    logits, state = network(window[:-1], state)
    return F.cross_entropy(logits.flatten(0, 1), window[1:].flatten()), state.detach()


def train(network: LanguageModel, rate: float, text: Tensor, valid: Tensor) -> dict:
    """Validation perplexity after training, and the median processor time of a step in seconds."""
    inner = list(network.layer.parameters())
    groups = [{"params": inner, "lr": rate}, {"params": [network.embedding.weight, network.bias], "lr": EMBEDDING_RATE}]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    text, valid = streams(text[: network.reading.words]), streams(valid)
    starts = range(0, len(text) - WINDOW, WINDOW)
    total = network.reading.epochs * len(starts)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (WARM_UP * total)) * (1 + math.cos(math.pi * step / total)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    seconds = []
    for _ in range(network.reading.epochs):
        state = None
        for start in starts:
            begin = time.process_time()
            optimiser.zero_grad()
            loss, state = loss_of(network, text, start, state)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimiser.step()
            schedule.step()
            seconds.append(time.process_time() - begin)
    network.eval()
    losses, state = [], None
    with torch.no_grad():
        for start in range(0, len(valid) - WINDOW, WINDOW):
            loss, state = loss_of(network, valid, start, state)
            losses.append(loss.item())
    return {"perplexity": math.exp(mean(losses)), "seconds_per_step": median(seconds)}


def best_rate(study: dict[str, dict[str, dict]]) -> str:
    """The best rate of a study, by the first seed."""
    return min(study, key=lambda rate: study[rate]["0"]["perplexity"])


def rates_and_seeds(study: dict[str, dict[str, dict]], seeds: int) -> Iterator[tuple[str, str]]:
    """All rates with the first seed, then the others at the rate that was best."""
    yield from ((rate, "0") for rate in study)
    yield from ((best_rate(study), str(seed)) for seed in range(1, seeds))


def score(study: dict[str, dict[str, dict]]) -> str:
    """Mean and standard deviation of the perplexity over seeds at the best rate."""
    if not study:
        return "–"  # noqa: RUF001
    perplexities = [run["perplexity"] for run in study[best_rate(study)].values()]
    return f"{mean(perplexities):.1f} ± {stdev(perplexities):.1f}"


def table(result: dict) -> str:
    """Perplexities and milliseconds of a step, for every variant."""
    places = list(dict.fromkeys(name.rpartition(" | ")[0] for name in result["trainings"]))
    rows = []
    for variant in VARIANTS:
        studies = [result["trainings"].get(f"{place} | {variant}", {}) for place in places]
        seconds = [run["seconds_per_step"] for study in studies for runs in study.values() for run in runs.values()]
        rows.append([variant, *map(score, studies), f"{1e3 * median(seconds):.0f}"])
    return markdown_table(
        ["inside the recurrence", *(place.replace(" |", ",") for place in places), "ms per step"], rows
    )


def main(variants: list[str], seeds: int) -> None:
    torch.set_num_threads(1)
    corpus = load_text()
    texts = [text.clamp(max=MOST_WORDS - 1) for text in (corpus.train, corpus.valid)]
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"trainings": {}}
    for reading, transition, variant in product(READINGS, TRANSITIONS, variants):
        name = f"{reading} | {transition} | {variant}"
        study = result["trainings"].setdefault(name, {f"{rate:g}": {} for rate in READINGS[reading].rates})
        for rate, seed in rates_and_seeds(study, seeds):
            if seed not in study[rate]:
                torch.manual_seed(int(seed))
                network = LanguageModel(READINGS[reading], TRANSITIONS[transition], VARIANTS[variant])
                study[rate][seed] = train(network, float(rate), *texts)
                print(name, rate, seed, study[rate][seed], flush=True)
                result |= {"commit": git_commit(), "time": now(), "machine": machine("cpu")}
                RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
