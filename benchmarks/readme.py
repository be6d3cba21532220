"""Fills the tables of the README and the docs from measurements and records: ``python benchmarks/readme.py``.

Each table is between two marks, ``<!-- its name -->`` and ``<!-- end -->``.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import authors_code
import cycles
import gru_study
import limits
import public_programs
import rates
import variations

from deepmemory.lab.bench.speed import PRECISIONS
from deepmemory.lab.bench.tables import markdown_table, speed_table
from deepmemory.lab.beyond import depth
from deepmemory.lab.beyond.models import DEEP
from deepmemory.lab.beyond.state_tracking import RUNS
from deepmemory.lab.records import Records
from deepmemory.lab.report.render import markdown
from deepmemory.lab.report.results.beyond import BeyondResults, Outcome, beyond_results
from deepmemory.lab.report.results.stats import perplexity
from deepmemory.lab.report.results.synthetic import synthetic_results
from deepmemory.lab.report.results.tables import real_results
from deepmemory.lab.report.sections import real, synthetic
from deepmemory.lab.report.words import mean_text
from deepmemory.lab.tasks import state_tracking

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/beyond.md",
    "docs/depth-and-rate.md",
    "docs/engines.md",
    "docs/faq.md",
    "docs/gpu-limits.md",
    "docs/paper.md",
    "docs/regularisation.md",
    "docs/why-dmu.md",
)
RESULTS = {"CPU": "cpu.json", "H200": "h200.json"}
LAYERS = {"`dm.DMU`": "dm.DMU", "`nn.GRU`": "nn.GRU, equal weights", "`nn.LSTM`": "nn.LSTM, equal weights"}
FRONT = {  # shapes in the README's table; those where a GRU is faster come last
    "CPU": ("adding",),
    "H200": ("large", "adding-51", "ptb-2", "deep-wide"),
}
LAST_ROUND = 5  # of the search for settings of the depth experiment
MODELS = {"dmu": "DMU, plain", "residual": "DMU, residual", "rhn": "RHN", "gru": "GRU", "lstm": "LSTM"}
DEPTHS = ("ptb-1", "ptb-2", "ptb-5", "ptb-10")


@cache
def tables() -> dict[str, str]:
    """The tables, by the mark before them: speeds, the reproduction beside the paper, DMU against GRU."""
    measured = {
        machine: json.loads((ROOT / "benchmarks" / "results" / file).read_text()) for machine, file in RESULTS.items()
    }
    records = Records(ROOT / "docs" / "reproduction")
    studies = records.studies()
    records.close()
    beside, swapped = gru_study.recorded(), json.loads(rates.RESULTS.read_text())
    chip = json.loads(limits.RESULTS.read_text())
    return {
        "speed": front_table(measured),
        "speed depth": depth_table(measured["H200"]),
        "speed gpu": speed_table(measured["H200"]),
        "speed behind": behind_table(measured["H200"]),
        "limits chip": markdown_table(["limit", "measured"], chip["limits"]),
        "limits floor": floor_table(measured["H200"], chip),
        "cycles": cycle_table(json.loads(cycles.RESULTS.read_text())),
        "speed cpu": speed_table(measured["CPU"]),
        "paper synthetic": markdown.show(synthetic.summary_table(synthetic_results(studies))),
        "paper real": markdown.show(real.summary_table(real_results(studies))),
        "authors code": authors_code.table(studies),
        "starts": gru_study.start_table(beside),
        "rates": gru_study.rate_table(beside),
        "rate ranges": gru_study.range_table(beside),
        "depth perplexity": perplexity_by_depth("small"),
        "depth perplexity large": perplexity_by_depth("large"),
        "depth front": perplexity_by_depth("small", DEEP) + "\n\n" + other_models(),
        "depth rates": rates_by_depth(),
        "depth trials": trials_at_large_size(),
        "state tracking": by_part(
            "state-study", f"runs of {RUNS}", lambda one: str(one.solved(f"accuracy_{max(state_tracking.LONGER)}"))
        ),
        "long adding": by_part("adding-study", "test loss by length", lambda one: mean_text(one.test(), "small loss")),
        "music": by_part("music-study", "nats per frame", lambda one: mean_text(one.score("test"), "loss")),
        "pixels": by_part("pixels-study", "test accuracy", learned),
        "swap rates": rates.rate_table(swapped),
        "swap advice": rates.advice_table(swapped),
        "swap starts": rates.start_table(swapped),
        "public programs": public_programs.table(),
        "variations": variations.table(json.loads(variations.RESULTS.read_text())),
    }


def recorded(folder: str) -> BeyondResults:
    """The results of an experiment beyond the paper, from its records among the docs."""
    records = Records(ROOT / "docs" / folder)
    (results,) = beyond_results(records.studies())
    records.close()
    return results


def by_part(folder: str, first: str, cell: Callable[[Outcome], str]) -> str:
    """An experiment's shown studies: one row for each model, one column for each part."""
    results = recorded(folder)
    found = {(one.title, one.part): cell(one) for one in results.shown}
    parts = list(results.by_part())
    titles = dict.fromkeys(title for title, _ in found)
    rows = [[title, *(found.get((title, part), "–") for part in parts)] for title in titles]  # noqa: RUF001
    return markdown_table([first, *parts], rows)


def learned(one: Outcome) -> str:
    """The test accuracy of a model; or that it did not learn."""
    if one.diverged == len(one.study.runs):
        return "every run diverged"
    return mean_text(one.score("test"), ".2%")


def perplexity_by_depth(size: str, kinds: Collection[str] = tuple(MODELS)) -> str:
    """Test perplexity of the depth experiment at one of its sizes: a row for each kind of model that was trained."""
    found = {key: mean_text(one.test(scale=perplexity), "perplexity") for key, one in by_kind_and_depth(size).items()}
    rows = [
        [name, *(found.get((kind, n), "–") for n in depth.DEPTHS)]  # noqa: RUF001
        for kind, name in MODELS.items()
        if kind in kinds and any(trained == kind for trained, _ in found)
    ]
    return markdown_table(["model", *(f"n = {n}" for n in depth.DEPTHS)], rows)


def by_kind_and_depth(part: str) -> dict[tuple[str, int], Outcome]:
    """The models of a part of the depth experiment; up to depth 2, a residual DMU is a plain one."""
    found = {(one.kind, one.depth or 1): one for one in recorded("depth-study").outcomes if one.part == part}
    return found | {("residual", n): found["dmu", n] for n in (1, 2) if ("dmu", n) in found}


def other_models() -> str:
    """The README's sentences about small models without depth, and about large ones."""
    small, large, long = (
        {key: f"{perplexity(one.test().mean):.1f}" for key, one in by_kind_and_depth(part).items()}
        for part in depth.SIZES
    )
    scores = ", ".join(large["residual", n] for n in depth.DEPTHS)
    return (
        f"GRU {small['gru', 1]}, LSTM {small['lstm', 1]}. With 23 million weights, one to three runs: "
        f"residual DMU {scores}; RHN (n = 5) {large['rhn', 5]}; GRU {large['gru', 1]}; LSTM {large['lstm', 1]}; "
        f"residual DMU (n = 5) trained longer {long['residual', 5]}."
    )


def rates_by_depth() -> str:
    """Validation perplexity at each rate of the first round of the search, for plain and residual transitions."""
    trials = json.loads((ROOT / "docs" / "depth-study" / "search.json").read_text())["trials"]
    rows = []
    for kind in ("dmu", "residual"):
        for n in depth.DEPTHS:
            scores = {
                t["lr"]: t["valid_perplexity"] for t in trials if (t["kind"], t["depth"], t["round"]) == (kind, n, 1)
            }
            if scores:
                best = min(scores.values())
                cells = [f"**{score:.0f}**" if score == best else f"{score:.0f}" for _, score in sorted(scores.items())]
                rows.append([MODELS[kind], str(n), *cells])
    rates = sorted({t["lr"] for t in trials if t["round"] == 1})
    return markdown_table(["transition", "n", *(f"rate {rate:g}" for rate in rates)], rows)


def trials_at_large_size() -> str:
    """The last round of the search at the large size, best first."""
    trials = json.loads((ROOT / "docs" / "depth-study" / "search.json").read_text())["trials"]
    rows = []
    for t in sorted((t for t in trials if t["round"] == LAST_ROUND), key=lambda t: t["valid_perplexity"]):
        name = MODELS[t["kind"]] + (f", n = {t['depth']}" if t["kind"] in DEEP else "")
        of_state = [f"{t[share]:g}" for share in ("recurrent_dropout", "transition_dropout")]
        around = [f"{t[share]:g}" for share in ("input_dropout", "output_dropout")]
        rates = [f"{t['lr']:g}", f"{t['embedding_rate']:g}", f"{t['weight_decay']:g}"]
        scores = [f"{t[of]:.1f}" for of in ("valid_perplexity", "test_perplexity")]
        bias = f"{t['memory_bias']:g}" if t["kind"] in ("dmu", "residual") else "–"  # noqa: RUF001
        rows.append([name, *rates, bias, " ".join(around), " ".join(of_state), str(t["epochs"]), *scores])
    shares = "dropout of input, output", "of state, transition"
    scores = "valid perplexity", "test perplexity"
    head = ["model", "rate", "of embedding", "weight decay", "memory bias", *shares, "epochs", *scores]
    return markdown_table(head, rows)


def milliseconds(result: dict, shape: str, precision: str = "float32") -> tuple[dict, dict[str, float]]:
    """A shape, and forward + backward for each layer, as a CUDA graph if there is a GPU; without those not measured."""
    way = "as_cuda_graph" if "gpu" in result["machine"] else "forward_backward"
    of_shape = [row for row in result["shapes"] if row["shape"]["name"] == shape]
    rows = [row for row in of_shape if row["precision"] == precision and way in row]
    times = {}
    for name, contestant in LAYERS.items():
        found = [row for row in rows if row["contestant"].startswith(contestant)]
        fused = [row[way]["median_ms"] for row in found if not re.search("plain|recompute", row["contestant"])]
        times |= {name: fused[0]} if fused else {}
    return of_shape[0]["shape"], times


def front_table(measured: dict[str, dict]) -> str:
    """The README's table: a DMU beside the faster of torch's layers, in two precisions."""
    rows = []
    for machine, shapes in FRONT.items():
        for name in shapes:
            cells: list[str] = []
            for precision in ("float32", "bfloat16"):
                shape, times = milliseconds(measured[machine], name, precision)
                own, *others = times.values() or (math.inf, math.inf)
                pair = own, min(others)
                shown = [f"**{time:.3g}**" if time == min(pair) else f"{time:.3g}" for time in pair]
                cells += shown if times else ["–", "–"]  # noqa: RUF001
            sizes = f"{shape['input_size']} → {shape['hidden_size']}, n = {len(shape['transition']) + 1}"
            text = f"{machine}, `{name}`: {sizes}, {shape['batch']} x {shape['steps']}"
            rows.append([text + (f", {shape['runs']} networks" if shape["runs"] > 1 else ""), *cells])
    return markdown_table(["layer", "`dm.DMU`", "GRU or LSTM", "`dm.DMU`, bfloat16", "GRU or LSTM, bfloat16"], rows)


def depth_table(result: dict) -> str:
    rows = []
    for name in DEPTHS:
        shape, times = milliseconds(result, name)
        rows.append([str(len(shape["transition"]) + 1), *(f"{time:.3g}" for time in times.values())])
    return markdown_table(["n", *LAYERS], rows)


def behind_table(result: dict) -> str:
    """The time of a DMU relative to the faster of torch's layers, at shapes where it is slower."""
    rows = []
    for name in dict.fromkeys(row["shape"]["name"] for row in result["shapes"]):
        ratios = []
        for precision in PRECISIONS:
            own, *others = milliseconds(result, name, precision)[1].values()
            ratios.append(own / min(others))
        if max(ratios) > 1:
            rows.append([f"`{name}`", *(f"**{one:.2f}**" if one > 1 else f"{one:.2f}" for one in ratios)])
    return markdown_table(["shape", *PRECISIONS], rows)


def floor_table(result: dict, chip: dict) -> str:
    """Milliseconds of a DMU and of torch's layers, the least that a DMU could take, and the largest part of that."""
    rows = []
    for one in chip["floors"]:
        parts = dict(one["parts"] or {})
        own, *others = milliseconds(result, one["shape"], one["precision"])[1].values()
        cells = [f"`{one['shape']}`", one["precision"], f"{own:.3g}", f"{min(others):.3g}"]
        if parts:
            floor = parts.pop("floor")
            cells += [f"{floor:.3g}", f"{own / floor:.1f}", limits.PARTS[max(parts, key=lambda name: parts[name])]]
        rows.append(cells if parts else [*cells, *["–"] * 3])  # noqa: RUF001
    header = ["shape", "precision", "`dm.DMU`", "GRU or LSTM", "floor", "`dm.DMU` / floor", "largest part of the floor"]
    return markdown_table(header, rows)


def cycle_table(result: dict) -> str:
    """Cycles of a step and instructions before the first one, of both sweeps together, at the two commits counted."""
    counted = {
        title: [cycles.of_both_sweeps(rows, kind) for rows in result["commits"].values()]
        for title, kind in (("cycles of a step", ""), ("instructions before the first one", "start_"))
    }
    keys = [(title, mode) for title in counted for mode in cycles.MODES]
    rows = []
    for shape in cycles.SHAPES:
        cells = [" → ".join(str(of[shape, mode]) for of in counted[title]) for title, mode in keys]
        rows.append([f"`{shape}`", *cells])
    return markdown_table(["both sweeps", *[f"{title}, {mode}" for title, mode in keys]], rows)


def with_tables(text: str) -> str:
    """A page's text with each table between its two marks replaced."""
    for name, table in tables().items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(mark, lambda found, table=table: f"{found[1]}{table.rstrip()}\n{found[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text()))
