"""51 runs of the DMU on Adding, one epoch: side by side, and one after another.

    python benchmarks/lab_epoch.py [--device cuda] [--runs 51] [--steps 200]

One after another is measured on a few steps of a few runs and extrapolated; the result says so. No speed is
printed unless the runs side by side have the losses of the same runs alone. Both ways are timed on one thread and on
torch's own number of threads, and the shorter time counts.
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import deepmemory as dm
from deepmemory.lab import paper
from deepmemory.lab.records import git_commit, now, versions
from deepmemory.lab.settings import Machine
from deepmemory.lab.training import loop, random_streams
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.network import LastStateNetwork, initial_weights
from deepmemory.lab.training.trainer import make_trainer

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1e-3  # of the mean loss over the measured steps, relative


def side_by_side(setting, runs, machine):
    """Seconds of one epoch's steps, after a short warm-up, and the mean loss of each run."""
    trainer = make_trainer(setting, machine)
    group = fresh_group(trainer, range(runs))
    steps = loop.Steps(trainer, group)
    started = time.perf_counter()
    (shape, *_) = steps.feed.plan(0)
    steps.step_of(shape)  # captured, on a GPU
    prepared = time.perf_counter() - started
    losses = steps.run_epoch(0)[:, 0].tolist()  # waits for the device
    return time.perf_counter() - started - prepared, losses


def alone(setting, seed, steps, machine):
    """Seconds per step of an ordinary training loop over one run, and its mean loss."""
    trainer = make_trainer(setting, machine)
    device = trainer.fabric.device
    start = initial_weights(setting, trainer.task, [seed])
    network = LastStateNetwork(setting, trainer.task, machine.engine)
    network.load_state_dict({name: weight[0] for name, weight in start.items()})
    network.to(device)
    adam = torch.optim.Adam(dm.parameter_groups(network, setting.lr))
    seeds, total = torch.tensor([seed], device=device), torch.zeros((), device=device)
    started = time.perf_counter()
    for step in range(steps):
        x, lengths, target = trainer.task.make(
            random_streams.sequence_keys(seeds, random_streams.TRAINING, step, setting.batch)
        )
        loss = trainer.task.losses(network(x[0], lengths[0]), target[0]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        total += loss.detach()
    mean = (total / steps).item()
    return (time.perf_counter() - started) / steps, mean


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--runs", type=int, default=51)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--repeats", type=int, default=3, help="of the epoch side by side; the median counts")
    options.add_argument("--alone-runs", type=int, default=3, help="runs measured one after another")
    options.add_argument("--alone-steps", type=int, default=20, help="steps measured of each of them")
    given = options.parse_args()
    setting = replace(paper.setting("adding", "dmu"), steps=given.steps)
    few = replace(setting, steps=given.alone_steps)

    _, expected = side_by_side(few, given.runs, Machine(given.device))
    loops = {}
    threads = torch.get_num_threads()
    for engine in ("plain", "auto"):
        measured = []
        for count in {1, threads}:
            machine = Machine(given.device, engine, threads=count)
            alone(few, 0, 3, machine)
            measured += [alone(few, seed, given.alone_steps, machine) for seed in range(given.alone_runs)]
        for index, (_, loss) in enumerate(measured):
            seed = index % given.alone_runs
            if abs(loss - expected[seed]) > TOLERANCE * abs(expected[seed]):
                raise SystemExit(
                    f"seed {seed}: loss {loss} alone ({engine}), {expected[seed]} side by side; no speed shown"
                )
        seconds = [seconds for seconds, _ in measured]
        settled = [seconds[i : i + given.alone_runs] for i in range(0, len(seconds), given.alone_runs)]
        loops[engine] = min(map(statistics.median, settled)) * given.steps * given.runs

    epochs = {}
    for count in {1, threads}:
        machine = Machine(given.device, threads=count)
        epochs[f"{count} threads"] = [side_by_side(setting, given.runs, machine)[0] for _ in range(given.repeats)]
    together = min(map(statistics.median, epochs.values()))
    result = {
        "what": f"{given.runs} runs of the DMU on Adding, one epoch of {given.steps} steps of {setting.batch}",
        "when": now(),
        "device": given.device,
        "processor": platform.processor() or platform.machine(),
        "threads": threads,
        "load": os.getloadavg()[0],
        **versions(),
        "git": git_commit(),
        "side_by_side_seconds": together,
        "side_by_side_all": epochs,
        "one_after_another_seconds": {"python loop (plain engine)": loops["plain"], "fused engine": loops["auto"]},
        "extrapolated": f"one after another: from {given.alone_steps} steps of {given.alone_runs} runs",
        "ratio_to_python_loop": loops["plain"] / together,
        "ratio_to_fused_one_after_another": loops["auto"] / together,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"lab_epoch_{given.device.replace(':', '')}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
