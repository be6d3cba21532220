"""DMU, GRU and LSTM learn the T-maze of ``examples/t_maze.py``: five seeds, equal weights, two starts.

python benchmarks/t_maze.py          # trains what results/t_maze.json lacks; draws docs/t-maze.svg
python benchmarks/t_maze.py --draw   # the figure alone, from the results
"""

import argparse
import importlib.util
import json
import multiprocessing
import time
from contextlib import nullcontext
from importlib import metadata
from math import isnan, nan
from pathlib import Path
from statistics import median

import torch
from torch import nn

import deepmemory as dm
from deepmemory.lab.bench.contestants import count_weights
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.report.figures import render
from deepmemory.lab.writing import put

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "t_maze.json"
FIGURE = ROOT / "docs" / "t-maze.svg"
CORRIDOR, ROLLOUTS, SEEDS = 20, 60, 5
LR = 0.01  # of all layers; no rate was searched
FRAMES = 128 * 32  # of a rollout
DMU_SIZE = 32
SOLVED = 0.9  # mean reward of the episodes that end in a rollout
BIAS = 3.0
STARTS = {  # name: layer, whether it keeps its state at first, line
    "DMU, `memory_bias=3`": ("DMU", True, "-"),
    "DMU, `memory_bias=0`": ("DMU", False, "--"),
    "GRU, update-gate bias 3": ("GRU", True, "-"),
    "GRU as torch starts it": ("GRU", False, "--"),
    "LSTM, forget-gate bias 3, input-gate bias -3": ("LSTM", True, "-"),
    "LSTM as torch starts it": ("LSTM", False, "--"),
}
COLOURS = {"DMU": "#D55E00", "GRU": "#0072B2", "LSTM": "#009E73"}  # Okabe and Ito's


def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("t_maze_example", ROOT / "examples" / "t_maze.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_state(layer: nn.Module) -> None:
    """Set a layer's initial bias so that it keeps its state at first."""
    size = layer.hidden_size
    with torch.no_grad():
        if isinstance(layer, dm.DMU):
            layer.transition_weights()[-1][1][:size] += BIAS
        else:  # of a GRU the second gate is z, of an LSTM the first two are input and forget
            layer.bias_ih_l0[size : 2 * size] += BIAS
            if isinstance(layer, dm.LSTM):
                layer.bias_ih_l0[:size] -= BIAS


def hidden_size(program, name: str) -> int:
    """The state size at which an agent has about as many weights as that of the DMU."""
    weights = count_weights(program.Agent(dm.DMU(3, DMU_SIZE)))
    sizes = range(1, 2 * DMU_SIZE)
    return min(sizes, key=lambda size: abs(count_weights(program.Agent(getattr(dm, name)(3, size))) - weights))


def train(job: tuple[str, int]) -> dict:
    """One run: the mean reward of the episodes that ended in each rollout, None if none did."""
    torch.set_num_threads(1)
    start, seed = job
    name, keeps, _ = STARTS[start]
    program = example()
    size = hidden_size(program, name)
    torch.manual_seed(seed)
    agent = program.Agent(getattr(dm, name)(3, size))
    if keeps:
        keep_state(agent.layer)
    row = {"start": start, "lr": LR, "seed": seed, "hidden_size": size, "weights": count_weights(agent)}
    begin = time.process_time()
    rewards = program.train(agent, ROLLOUTS, CORRIDOR, LR, seed)
    curve = [None if isnan(reward) else round(reward, 3) for reward in rewards]
    return row | {"cpu_seconds": round(time.process_time() - begin, 1), "curve": curve}


def solved(run: dict) -> int | None:
    """The number of frames after which a run had solved the maze; None if it has not."""
    return next((FRAMES * (at + 1) for at, reward in enumerate(run["curve"]) if (reward or 0) >= SOLVED), None)


def runs_of(result: dict, start: str) -> list[dict]:
    return [run for run in result["runs"] if run["start"] == start]


def table(result: dict) -> str:
    """One row for each start, for docs/use-cases.md."""
    header = ["layer and start", "weights", "runs that solve it", "median frames", "solved at the end"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for start in STARTS:
        runs = runs_of(result, start)
        frames = [found for run in runs if (found := solved(run)) is not None]
        kept = sum(run["curve"][-1] >= SOLVED for run in runs)
        of = f"of {len(runs)}"
        middle = f"{median(frames):,.0f}" if frames else ""
        rows.append(
            [start, f"{runs[0]['weights']:,}", f"{len(frames)} {of}", middle, f"{kept} {of}"],
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def draw(result: dict) -> None:
    """Every run as a thin line, the median of each start as a thick one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(COLOURS), sharey=True)
    frames = [FRAMES * (at + 1) / 1000 for at in range(ROLLOUTS)]
    for panel, layer in zip(panels, COLOURS, strict=True):
        for start, (name, _, line) in STARTS.items():
            if name != layer:
                continue
            curves = [[nan if reward is None else reward for reward in run["curve"]] for run in runs_of(result, start)]
            for curve in curves:
                panel.plot(frames, curve, line, color=COLOURS[layer], linewidth=0.5, alpha=0.5)
            middle = [median(at) for at in zip(*curves, strict=True)]
            label = start.replace("`", "").partition(", ")[2] or "as torch starts it"
            panel.plot(frames, middle, line, color=COLOURS[layer], linewidth=2.2, label=label)
        panel.set_title(layer, fontsize=12)
        panel.set_xlabel("thousand frames")
        panel.set_ylim(-4, 1.2)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="lower right", frameon=False, fontsize=8)
    panels[0].set_ylabel("reward of an episode")
    FIGURE.write_bytes(render(figure, "svg"))


def write(result: dict) -> None:
    put(RESULT, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())


def main(processes: int) -> None:
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}
    result = {
        "what": f"PPO in a T-maze with a corridor of {CORRIDOR}: mean reward of the episodes that end in each rollout "
        f"of {FRAMES} frames; equal weights",
        "when": now(),
        "machine": machine("cpu") | {"gymnasium": metadata.version("gymnasium")},
        "git": git_commit(),
        "runs": result["runs"],
    }
    there = {(run["start"], run["seed"]) for run in result["runs"]}
    jobs = [(start, seed) for seed in range(SEEDS) for start in STARTS]
    missing = [job for job in jobs if job not in there]
    with multiprocessing.get_context("spawn").Pool(processes) if missing else nullcontext() as pool:
        for run in pool.imap(train, missing) if missing else ():
            result["runs"].append(run)
            write(result)
            print(f"{run['start']}, seed {run['seed']}: {solved(run)}, {run['curve'][-1]}", flush=True)
    write(result)
    draw(result)
    print(table(result))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    options.add_argument("--draw", action="store_true", help="draw the figure from the results and stop")
    given = options.parse_args()
    if given.draw:
        draw(json.loads(RESULT.read_text()))
    else:
        main(given.processes)
