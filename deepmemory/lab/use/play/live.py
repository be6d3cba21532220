"""The one training that the page shows, epoch by epoch, on a thread of its own."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from typing import Any

import torch
from torch import nn

import deepmemory as dm
from deepmemory.lab.settings import Machine
from deepmemory.lab.training import loop, random_streams, studies
from deepmemory.lab.training.loop import Group, Trainer
from deepmemory.lab.use import inspection
from deepmemory.lab.use.play.wishes import TrainingWish

IDLE, RUNNING, FINISHED, STOPPED, FAILED = "idle", "running", "finished", "stopped", "failed"
ANSWERED_AFTER = 10.0  # seconds that a question waits for news
ABSENCE = 30.0  # seconds without a question until nobody is there


@dataclass
class Course:
    """What has become of one training so far."""

    number: int
    wish: TrainingWish | None = None
    state: str = IDLE
    why: str = ""
    epochs: list[dict[str, Any]] = field(default_factory=list)  # in the order in which they were trained
    gates: dict[str, Any] | None = None  # of the DMU, the latest
    gates_news: int = 0  # what news was when they came
    news: int = 0  # how often any of this has changed
    stop: Event = field(default_factory=Event)
    thread: Thread | None = None


class Ended(Exception):
    """Somebody has stopped it, or nobody is looking."""


class Live:
    """Starts, stops and tells. A new training takes the place of the one before it."""

    def __init__(self, absence: float = ABSENCE) -> None:
        self.absence = absence
        self.changed = Condition()
        self.course = Course(0)
        self.asked = time.monotonic()  # when somebody last wanted to know

    def start(self, wish: TrainingWish) -> int:
        """Begin; the number of the training."""
        with self.changed:
            before = self.course
            before.stop.set()
            course = self.course = Course(before.number + 1, wish, RUNNING)
            self.asked = time.monotonic()
            course.thread = Thread(target=self.run, args=(course, before.thread), daemon=True)
            course.thread.start()
            self.changed.notify_all()
            return course.number

    def stop(self) -> None:
        """End after the step that is being trained."""
        with self.changed:
            self.course.stop.set()

    def close(self) -> None:
        """Stop, and wait for it."""
        self.stop()
        if self.course.thread is not None:
            self.course.thread.join()

    def told(self, number: int, news: int, epochs: int, patience: float = ANSWERED_AFTER) -> dict[str, Any]:
        """How things stand, as soon as they differ from what the asker has seen.

        Args:
            number: Of the training that the asker knows; another one is told from its start.
            news: What it was told last, as ``news``.
            epochs: How many epochs it has.
            patience: Seconds to wait for a change.
        """
        with self.changed:
            self.asked = time.monotonic()
            self.changed.wait_for(lambda: (self.course.number, self.course.news) != (number, news), patience)
            self.asked = time.monotonic()
            course = self.course
            if number != course.number:
                news = epochs = 0
            return {
                "number": course.number,
                "news": course.news,
                "state": course.state,
                "why": course.why,
                "cells": list(course.wish.cells) if course.wish else [],
                "of": course.wish.epochs if course.wish else 0,
                "epochs": course.epochs[epochs:],
                "gates": course.gates if course.gates_news > news else None,
            }

    def run(self, course: Course, before: Thread | None) -> None:
        """The thread: one training, once the one before it has ended."""
        if before is not None:
            before.join()
        try:
            self.train(course)
            ended = FINISHED, ""
        except Ended as reason:
            ended = STOPPED, str(reason)
        except Exception as error:  # the page says what went wrong, and the server lives on
            ended = FAILED, f"{type(error).__name__}: {error}"
        self.change(course, state=ended)

    def train(self, course: Course) -> None:
        """All cells in turns, an epoch each."""
        assert course.wish is not None

        def check(*_: Any) -> None:
            if course.stop.is_set():
                raise Ended
            if time.monotonic() - self.asked > self.absence:
                raise Ended("nobody was looking")

        going = {}
        for cell in course.wish.cells:
            check()
            trainer = loop.make_trainer(course.wish.setting(cell), Machine("cpu"))
            trainer.network.register_forward_pre_hook(check)  # before every step: an epoch may take seconds
            group = loop.fresh_group(trainer, range(course.wish.runs))
            going[cell] = trainer, group, loop.train(trainer, group)
        torch.set_num_threads(max(studies.fitting_threads(group) for _, group, _ in going.values()))
        watched = None
        if "dmu" in going:
            watched = Example(going["dmu"][0])
            self.change(course, gates=watched.gates(going["dmu"][1]))  # before anything is learnt
        while going:
            for cell, (_, group, epochs) in list(going.items()):
                epoch = next(epochs, None)
                if epoch is None:
                    del going[cell]
                    continue
                told = {
                    "cell": cell,
                    "epoch": epoch.number,
                    "losses": {seed: finite(values["valid_loss"]) for seed, values in epoch.values.items()},
                }
                seen = watched.gates(group) if cell == "dmu" and watched is not None else None
                self.change(course, told, seen)

    def change(
        self,
        course: Course,
        epoch: dict[str, Any] | None = None,
        gates: dict[str, Any] | None = None,
        state: tuple[str, str] | None = None,
    ) -> None:
        """Write something down and tell everybody who waits."""
        with self.changed:
            course.news += 1
            if epoch is not None:
                course.epochs.append(epoch)
            if gates is not None:
                course.gates, course.gates_news = gates, course.news
            if state is not None:
                course.state, course.why = state
            self.changed.notify_all()


class Example:
    """One sequence of Adding that nobody trains on, and what the first run makes of it."""

    def __init__(self, trainer: Trainer) -> None:
        with torch.random.fork_rng(devices=[]):  # its fresh weights are of no interest to anybody
            self.network: nn.Module = trainer.task.network(trainer.setting).to(trainer.dtype).eval()
        self.inputs, batch = inspection.one_batch(
            self.network, trainer.task, trainer.setting, random_streams.VALIDATION, seed=0, size=1
        )
        self.target = batch.target.flatten()[0].item()

    @torch.no_grad()
    def gates(self, group: Group) -> dict[str, Any] | None:
        """What the DMU keeps at each step, (units, steps); None once the run has left the stack."""
        if 0 not in group.rows:
            return None
        row = group.rows.index(0)
        self.network.load_state_dict({name: weight[row] for name, weight in group.weights.items()})
        x = self.inputs[0][0]  # [T, 2]
        (layer,) = inspection.last_calls(dm.gradients.gates(self.network, self.inputs))
        return {
            "epoch": group.epoch,
            "keep": [[finite(round(share, 3)) for share in unit] for unit in layer.keep[:, 0].mT.tolist()],
            "numbers": [round(value, 3) for value in x[:, 0].tolist()],
            "marked": [step for step, mark in enumerate(x[:, 1].tolist()) if mark > 0],
            "answer": finite(self.network(*self.inputs).flatten()[0].item()),
            "right": self.target,
        }


def finite(value: float) -> float | None:
    """None where JSON has no word for it."""
    return value if math.isfinite(value) else None
