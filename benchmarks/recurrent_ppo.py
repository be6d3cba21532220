"""Frames per second of sb3-contrib's RecurrentPPO with its own policy and with that of ``examples/recurrent_ppo.py``.

python benchmarks/recurrent_ppo.py   # results/recurrent_ppo.json

With ``--threads 1``, processor time is measured, which is valid on a busy machine too; otherwise, wall time.
"""

import argparse
import importlib.util
import json
import os
import time
from importlib import metadata
from pathlib import Path
from statistics import median

import torch

import deepmemory as dm
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.writing import put

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "recurrent_ppo.json"
ENVIRONMENTS = 1
FRAMES = 128 * ENVIRONMENTS  # of a round: one rollout of 128 steps, and its ten epochs
POLICIES = {"MlpLstmPolicy of sb3-contrib": None, "`dm.LSTM`": dm.LSTM, "`dm.GRU`": dm.GRU, "`dm.DMU`": dm.DMU}


def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("recurrent_ppo_example", ROOT / "examples" / "recurrent_ppo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(rounds: int, frames: int = FRAMES) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round and policy, side by side; everything else is RecurrentPPO's default, with 256 units."""
    program = example()

    def agent(layer):
        policy, options = ("MlpLstmPolicy", {}) if layer is None else (program.Policy, {"layer": layer})
        return program.RecurrentPPO(
            policy, program.make_environment(count=ENVIRONMENTS), policy_kwargs=options, seed=0, device="cpu"
        )

    agents = {name: agent(layer) for name, layer in POLICIES.items()}
    taken: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_seconds": []} for name in agents}
    for number in range(rounds + 1):
        for name, each in agents.items():
            begin, cpu = time.perf_counter(), time.process_time()
            each.learn(frames, reset_num_timesteps=False)
            if number > 0:  # the first round warms up
                taken[name]["seconds"].append(time.perf_counter() - begin)
                taken[name]["cpu_seconds"].append(time.process_time() - cpu)
    return taken


def ratios(result: dict) -> dict[str, float]:
    """Frames per second relative to the first policy: the median over rounds."""
    clock = result["clock"]
    first = result["rounds"][next(iter(POLICIES))][clock]
    return {
        name: median(a / b for a, b in zip(first, times[clock], strict=True))
        for name, times in result["rounds"].items()
    }


def table(result: dict) -> str:
    """One row for each policy, for docs/use-cases.md."""
    speed = "frames per second" if result["clock"] == "seconds" else "frames per second of processor time, one thread"
    lines = [f"| policy | {speed} | against the first |", "| --- | ---: | ---: |"]
    times, faster = result["rounds"], ratios(result)
    for name in times:
        frames = result["frames"] / median(times[name][result["clock"]])
        lines.append(f"| {name} | {frames:,.0f} | {faster[name]:.1f} |")
    return "\n".join(lines) + "\n"


def main(rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    packages = ("sb3-contrib", "stable-baselines3", "gymnasium")
    result = {
        "what": f"RecurrentPPO with its defaults on CartPole without velocities, {ENVIRONMENTS} environment: "
        f"seconds of a rollout of {FRAMES} frames and its training",
        "when": now(),
        "machine": machine("cpu") | {name: metadata.version(name) for name in packages},
        "threads": threads,
        "clock": "seconds" if threads > 1 else "cpu_seconds",
        "load": os.getloadavg()[0],
        "git": git_commit(),
        "frames": FRAMES,
        "rounds": measure(rounds),
    }
    put(RESULT, (json.dumps(result, indent=1) + "\n").encode())
    print(table(result))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    main(**vars(options.parse_args()))
