"""The cost of resets inside a sequence: our layers with and without them, and the ways of other programs.

python benchmarks/resets.py                                # results/resets_cpu.json
python benchmarks/resets.py --device cuda --out X.json     # the same on a GPU, in under a minute

Forward and backward pass of 128 sequences of 128 steps with 256 units, 3 % of the steps being resets. All contestants
take turns. On a CPU the processor time of one thread is measured, which is valid on a busy machine too. Each contestant
must return the outputs and gradients of the split sequences.
"""

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata, util
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import deepmemory as dm
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.bench.timing import captured, describe_error
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.writing import put

RESULTS = Path(__file__).parent / "results"
BATCH, STEPS, INPUT, HIDDEN, RESETS = 128, 128, 64, 256, 0.03
SLOW = 10.0  # seconds: such a contestant is timed once
TOLERANCE = 1e-3  # of outputs and gradients, relative in norm, against the layer's own split sequences
Run = Callable[[Tensor, Tensor], Tensor]  # from x (T, B, m) and resets (T, B) to y (T, B, d)


def ours(layer: nn.Module, x: Tensor, resets: Tensor) -> Tensor:
    """One call with ``resets=``."""
    return layer(x, resets=resets)[0]


def without(layer: nn.Module, x: Tensor, resets: Tensor) -> Tensor:
    """One call that ignores the resets."""
    return layer(x)[0]


def split(layer: nn.Module, x: Tensor, resets: Tensor) -> Tensor:
    """Cut into episodes, packed without padding, run at once, and put back into place."""
    begins = resets.T.clone()
    begins[:, 0] = True
    begins = begins.flatten()  # [B * T], one sequence after the other
    first = begins.nonzero().flatten()
    episode, place = begins.cumsum(0) - 1, torch.arange(len(begins), device=x.device)
    step = place - first[episode]
    longest_first = (-first.diff(append=first.new_tensor([len(begins)]))).argsort().argsort()
    order = (step * len(first) + longest_first[episode]).argsort()
    packed = PackedSequence(x.transpose(0, 1).flatten(0, 1).index_select(0, order), step.bincount().cpu())
    y = layer(packed)[0].data.index_select(0, order.argsort())
    return y.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def loop(layer: nn.Module, x: Tensor, resets: Tensor) -> Tensor:
    """A Python loop over time that masks the state before every step, as sb3-contrib does."""
    two = isinstance(layer, nn.LSTM)
    state = [x.new_zeros(1, x.shape[1], layer.hidden_size) for _ in range(1 + two)]
    outputs = []
    for x_t, reset in zip(x, resets, strict=True):
        keep = (~reset).to(x.dtype).view(1, -1, 1)
        kept = [keep * part for part in state]
        y, h = layer(x_t[None], tuple(kept) if two else kept[0])
        state = list(h) if two else [h]
        outputs.append(y)
    return torch.cat(outputs)


def torchrl(module: nn.Module, states: int, x: Tensor, resets: Tensor) -> Tensor:
    """TorchRL's module with ``is_init``."""
    from tensordict import TensorDict
    from torchrl.modules import set_recurrent_mode

    shape = (x.shape[1], x.shape[0])
    data = {"x": x.transpose(0, 1), "is_init": resets.T[..., None]}
    data |= {f"s{i}": x.new_zeros(*shape, 1, HIDDEN) for i in range(states)}
    with set_recurrent_mode(True):
        return module(TensorDict(data, shape))["y"].transpose(0, 1)


def contestants(device: str) -> dict[str, tuple[Run, nn.Module]]:
    """By name: how it runs, and the layer whose weights get gradients. GRUs share weights, and so do LSTMs."""
    found: dict[str, tuple[Run, nn.Module]] = {}
    for name in ("DMU", "GRU", "LSTM"):
        torch.manual_seed(0)
        layer = getattr(dm, name)(INPUT, HIDDEN).to(device)
        found[f"dm.{name}, no resets"] = partial(without, layer), layer
        found[f"dm.{name}, resets="] = partial(ours, layer), layer
        if name == "DMU":
            continue
        theirs = getattr(nn, name)(INPUT, HIDDEN).to(device)
        theirs.load_state_dict(layer.state_dict())
        found[f"nn.{name}, no resets"] = partial(without, theirs), theirs
        found[f"nn.{name}, split and packed"] = partial(split, theirs), theirs
        found[f"nn.{name}, Python loop"] = partial(loop, theirs), theirs
        if util.find_spec("torchrl"):
            for backend in ("pad", "scan", "triton") if device == "cuda" else ("pad", "scan"):
                found[f"torchrl {name}Module, {backend}"] = torchrl_contestant(name, backend, layer, device)
    return found


def torchrl_contestant(name: str, backend: str, layer: nn.Module, device: str) -> tuple[Run, nn.Module]:
    """TorchRL's module with the weights of a layer."""
    from torchrl import modules

    states = 2 if name == "LSTM" else 1
    keys = {"in_keys": ["x", *(f"s{i}" for i in range(states))]}
    keys |= {"out_keys": ["y", *(("next", f"s{i}") for i in range(states))]}
    make = getattr(modules, f"{name}Module")
    module = make(INPUT, HIDDEN, device=device, recurrent_backend=backend, **keys)
    inner = getattr(module, name.lower())
    inner.load_state_dict(layer.state_dict())
    return partial(torchrl, module, states), inner


def gradients(run: Run, layer: nn.Module, x: Tensor, resets: Tensor) -> list[Tensor]:
    y = run(x, resets)
    weights = torch.linspace(0.5, 1.5, y.shape[-1], device=x.device)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def measure(
    device: str, seconds: float, resets_rate: float = RESETS, batch: int = BATCH, steps: int = STEPS
) -> list[dict]:
    """One row for each contestant: its error, and milliseconds of every round."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, batch, INPUT, generator=generator).to(device).requires_grad_()
    resets = (torch.rand(steps, batch, generator=generator) < resets_rate).to(device)
    rows, calls = [], []
    for name, (run, layer) in contestants(device).items():
        row: dict = {"contestant": name}
        rows.append(row)
        call = partial(gradients, run, layer, x, resets)
        try:
            if not name.endswith("no resets"):
                start = clock_of(device)()
                found = call()
                once = clock_of(device)() - start
                row["error"] = error(found, gradients(partial(split, layer), layer, x, resets))
                if not row["error"] < TOLERANCE:
                    row["wrong"] = "not the result of the split sequences: no time"
                    continue
                if once > SLOW:
                    row["once_ms"] = 1e3 * once  # the first call, which may compile something
                    continue
            calls.append((row, "ms", call))
            if device == "cuda" and not any(way in name for way in ("split", "loop", "torchrl")):
                calls.append((row, "graph_ms", captured(call)))
        except Exception as problem:
            row["failed"] = describe_error(problem)
    take_turns(calls, device, seconds)
    return rows


def clock_of(device: str) -> Callable[[], float]:
    """Wall time for a GPU, processor time for a CPU."""
    return time.perf_counter if device == "cuda" else time.process_time


def keep_memory() -> None:
    """Let the C library keep what is freed: otherwise some contestants spend most of their time on page faults."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        library.mallopt(-4, 0)  # M_MMAP_MAX: large blocks are on the heap, too
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def take_turns(calls: list[tuple[dict, str, Callable[[], object]]], device: str, seconds: float) -> None:
    """Time all calls one after the other, again and again; the first round does not count."""
    clock = clock_of(device)
    begin, rounds = clock(), -1
    while rounds < 3 or clock() - begin < seconds:
        for row, key, call in calls:
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if rounds >= 0:
                row.setdefault(key, []).append(round(1e3 * (clock() - start), 4))
        rounds += 1


def summarise(rows: list[dict]) -> None:
    """Add medians, quartiles, and the ratio of resets to none, round by round."""
    by_name = {row["contestant"]: row for row in rows}
    for row in rows:
        for key in ("ms", "graph_ms"):
            if key in row:
                low, middle, high = quantiles(row[key], n=4)
                row[f"median_{key}"], row[f"quartiles_{key}"] = middle, [low, high]
    for name, row in by_name.items():
        base = by_name.get(f"{name.partition(',')[0]}, no resets")
        for key in ("ms", "graph_ms"):
            if base is not None and base is not row and key in row and key in base:
                row[f"ratio_{key}"] = median(a / b for a, b in zip(row[key], base[key], strict=True))


def entry(result: dict, name: str) -> list[str]:
    """Milliseconds, as a CUDA graph if there is one, and the ratio to the same layer without resets."""
    row = next((row for row in result["rows"] if row["contestant"] == name), {})
    key = "graph_ms" if "graph_ms" in row else "ms"
    if key not in row:
        return [f"{row['once_ms']:,.0f}" if "once_ms" in row else "", ""]
    median_ms, ratio = row[f"median_{key}"], row.get(f"ratio_{key}")
    return [f"{median_ms:,.0f}" if median_ms >= 10 else f"{median_ms:.2f}", f"{ratio:.2f}" if ratio else ""]


def quoted(name: str) -> str:
    """The layer's name as code."""
    layer, comma, way = name.partition(", ")
    return f"`{layer}`{comma}{way.replace('resets=', '`resets=`')}"


def table(results: dict[str, dict]) -> str:
    """One row per contestant, two columns per machine, for docs/use-cases.md."""
    names = list(dict.fromkeys(row["contestant"] for result in results.values() for row in result["rows"]))
    rows = [["", *(text for machine in results for text in (f"{machine}, ms", "against no resets"))]]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    rows += [[quoted(name), *(text for result in results.values() for text in entry(result, name))] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main(device: str, out: Path, seconds: float) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    if device == "cpu":
        keep_memory()
    rows = measure(device, seconds)
    summarise(rows)
    result = {
        "what": f"forward + backward in float32, batch {BATCH}, {STEPS} steps, {INPUT} inputs, {HIDDEN} units, "
        f"{RESETS:.0%} resets: milliseconds of rounds in which all take turns"
        + ("" if device == "cuda" else ", processor time of one thread, in a process that keeps its memory"),
        "when": now(),
        "device": device,
        "machine": machine(device) | ({"torchrl": metadata.version("torchrl")} if util.find_spec("torchrl") else {}),
        "load": os.getloadavg()[0],
        "git": git_commit(),
        "rows": rows,
    }
    put(out, (json.dumps(result, indent=1) + "\n").encode())
    print(table({device: result}))
    for row in rows:
        print(*(f"{row['contestant']}: {row[key]}" for key in ("wrong", "failed") if key in row))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--out", type=Path, default=RESULTS / "resets_cpu.json")
    options.add_argument("--seconds", type=float, default=25.0, help="of timing, three rounds at least")
    main(**vars(options.parse_args()))
