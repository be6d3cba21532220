"""How long studies would take as an ordinary Python loop over time, one run after another.

A few training steps of one run are timed with the plain engine, without CUDA graphs and without runs side by side:
this is how such networks are usually written, including the paper's. A study's time is extrapolated from that.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from deepmemory.lab.records import versions, write_whole
from deepmemory.lab.settings import DEFAULTS, Machine, Setting
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.progress import StudyProgress

FILE = "loop.json"  # in the folder of the records
STEPS = 3  # timed, after one for warming up
RATES = ("lr", "module_rate", "weight_decay", "gamma")
STARTS = ("memory_bias", "forget_bias", "input_bias", "update_bias")


@dataclass(frozen=True)
class LoopTime:
    """The measured time of one study's training steps."""

    key: str  # see key_of
    name: str
    step_seconds: float  # median
    steps: int  # per epoch

    def run_seconds(self, epochs: int) -> float:
        """The time of one run of this many epochs, without evaluation."""
        return self.step_seconds * self.steps * epochs


def key_of(setting: Setting) -> str:
    """A key that studies share if their steps take the same time: learning rates and initial biases do not count."""
    alike: dict[str, Any] = {name: DEFAULTS[name] for name in RATES + STARTS}
    return replace(setting, **alike).key


def measure(setting: Setting, machine: Machine, steps: int = STEPS) -> LoopTime:
    """Time a few training steps.

    Translation is timed with teacher forcing, where the loop does not choose its own words.
    """
    from deepmemory.lab.training.trainer import make_trainer  # the report, which only reads, does not need it

    timed = replace(setting, feedback="teacher") if setting.task == "translation" else setting
    trainer = make_trainer(timed, replace(machine, engine="plain", graph=False, recompute=False))
    device, network = trainer.fabric.device, trainer.network.to(trainer.fabric.device, trainer.dtype)
    adam = torch.optim.Adam(network.parameters(), timed.lr, fused=device.type in ("cpu", "cuda"))
    feed = trainer.task.feed(
        random_streams.TRAINING, timed, torch.zeros(1, dtype=torch.int64, device=device), timed.batch, trainer.dtype
    )
    shapes, seconds = feed.plan(0), []
    for number in range(min(steps + 1, len(shapes))):
        batch = feed.batch(torch.tensor(number, device=device), shapes[number])
        inputs = [
            value if dim is None else tree_map(first, value)
            for value, dim in zip(batch.inputs, feed.in_dims, strict=True)
        ]
        started = clock(device)
        output = tree_map(lambda t: t[None], network(*inputs))
        tally = trainer.task.tally(output, batch)
        adam.zero_grad()
        (tally.loss.sum() / tally.counts.sum()).backward()
        adam.step()
        seconds.append(clock(device) - started)
        feed.carry(tree_map(lambda t: t.detach(), output))
    name = " ".join(StudyProgress(setting, [0]).label)
    return LoopTime(key_of(setting), name, statistics.median(seconds[1:] or seconds), len(shapes))


def first(value: Any) -> Any:
    """A batch's value for its only run."""
    return value[0] if isinstance(value, torch.Tensor) else value


def clock(device: torch.device) -> float:
    """The time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def write(settings: Iterable[Setting], machine: Machine, out: Path, say: Callable[[str], None] = print) -> Path:
    """Time these studies and add them to the file in ``out``, which is complete after every study."""
    path = out / FILE
    known = {one.key: one for one in read(out)}
    wanted: dict[str, Setting] = {}
    for setting in settings:
        wanted.setdefault(key_of(setting), setting)
    for key, setting in wanted.items():
        known[key] = one = measure(setting, machine)
        hours = one.run_seconds(setting.epochs) / 3600
        say(f"{one.name}: {one.step_seconds:.3f} s for a step, {hours:.1f} hours for a run")
        told = {"machine": versions(), "timed_steps": STEPS, "studies": [asdict(each) for each in known.values()]}
        write_whole(path, (json.dumps(told, indent=1) + "\n").encode())
    return path


def read(out: Path | str) -> Sequence[LoopTime]:
    """The times in the file of a folder; none if there is no file."""
    path = Path(out) / FILE
    if not path.exists():
        return []
    try:
        found = [LoopTime(**one) for one in json.loads(path.read_text(encoding="utf-8"))["studies"]]
        if not all(isinstance(one.key, str) and isinstance(one.run_seconds(1), int | float) for one in found):
            raise ValueError("a study should have a key and numbers")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove it, and measure again with dmu bench --studies"
        ) from None
