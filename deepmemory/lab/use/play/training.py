"""The training that the page shows: one at a time, epoch by epoch, on a thread of its own."""

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
from deepmemory.lab.training.group import Group, fresh_group
from deepmemory.lab.training.trainer import Trainer, make_trainer
from deepmemory.lab.use import inspection
from deepmemory.lab.use.play.requests import TrainingRequest

IDLE, RUNNING, FINISHED, STOPPED, FAILED = "idle", "running", "finished", "stopped", "failed"
LONGEST_WAIT = 10.0  # seconds that a request for news waits; then it is answered without any
IDLE_TIMEOUT = 30.0  # seconds without a request until the page counts as closed


@dataclass
class Training:
    """One training: the request, and the results so far."""

    number: int  # counts the trainings of a server
    request: TrainingRequest | None = None
    state: str = IDLE
    reason: str = ""  # why it stopped or failed
    epochs: list[dict[str, Any]] = field(default_factory=list)  # in the order in which they were trained
    gates: dict[str, Any] | None = None  # of the DMU, after its latest epoch
    gates_version: int = 0  # the version in which the gates were set
    version: int = 0  # counts the changes to any of this
    stop: Event = field(default_factory=Event)
    thread: Thread | None = None


class TrainingStopped(Exception):
    """The training was stopped by the user, or because the page was closed."""


class BackgroundTrainer:
    """Runs one training at a time in the background; starting another one stops it."""

    def __init__(self, idle_timeout: float = IDLE_TIMEOUT) -> None:
        self.idle_timeout = idle_timeout
        self.changed = Condition()
        self.training = Training(0)
        self.last_request = time.monotonic()

    def start(self, request: TrainingRequest) -> int:
        """Start a training; returns its number."""
        with self.changed:
            before = self.training
            before.stop.set()
            training = self.training = Training(before.number + 1, request, RUNNING)
            self.last_request = time.monotonic()
            training.thread = Thread(target=self.run, args=(training, before.thread), daemon=True)
            training.thread.start()
            self.changed.notify_all()
            return training.number

    def stop(self) -> None:
        """Stop after the current optimiser step."""
        with self.changed:
            self.training.stop.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self.training.thread is not None:
            self.training.thread.join()

    def news(self, number: int, version: int, epochs: int, wait: float = LONGEST_WAIT) -> dict[str, Any]:
        """The state of the training and the epochs that the client does not have, as soon as something has changed.

        Args:
            number: The training that the client knows; it gets everything about a newer one.
            version: The version that the client knows.
            epochs: How many epochs the client has.
            wait: Seconds to wait for a change.
        """
        with self.changed:
            self.last_request = time.monotonic()
            self.changed.wait_for(lambda: (self.training.number, self.training.version) != (number, version), wait)
            self.last_request = time.monotonic()
            training = self.training
            if number != training.number:
                version = epochs = 0
            return {
                "number": training.number,
                "version": training.version,
                "state": training.state,
                "reason": training.reason,
                "cells": list(training.request.cells) if training.request else [],
                "total_epochs": training.request.epochs if training.request else 0,
                "epochs": training.epochs[epochs:],
                "gates": training.gates if training.gates_version > version else None,
            }

    def run(self, training: Training, before: Thread | None) -> None:
        """Run one training, in its thread, once the previous one has ended."""
        if before is not None:
            before.join()
        try:
            self.train(training)
            ended = FINISHED, ""
        except TrainingStopped as reason:
            ended = STOPPED, str(reason)
        except Exception as error:  # the page shows what went wrong, and the server keeps running
            ended = FAILED, f"{type(error).__name__}: {error}"
        self.update(training, state=ended)

    def train(self, training: Training) -> None:
        """Train all cells in turns, one epoch at a time."""
        assert training.request is not None

        def check(*_: Any) -> None:
            if training.stop.is_set():
                raise TrainingStopped
            if time.monotonic() - self.last_request > self.idle_timeout:
                raise TrainingStopped("the page was closed")

        running = {}
        for cell in training.request.cells:
            check()
            trainer = make_trainer(training.request.setting(cell), Machine("cpu"))
            trainer.network.register_forward_pre_hook(check)  # before every step: an epoch may take seconds
            group = fresh_group(trainer, range(training.request.runs))
            running[cell] = trainer, group, loop.train(trainer, group)
        torch.set_num_threads(max(studies.fitting_threads(group) for _, group, _ in running.values()))
        example = None
        if "dmu" in running:
            example = Example(running["dmu"][0])
            self.update(training, gates=example.gates(running["dmu"][1]))  # before anything is learnt
        while running:
            for cell, (_, group, epochs) in list(running.items()):
                epoch = next(epochs, None)
                if epoch is None:
                    del running[cell]
                    continue
                losses = {seed: finite(values["valid_loss"]) for seed, values in epoch.values.items()}
                gates = example.gates(group) if cell == "dmu" and example is not None else None
                self.update(training, {"cell": cell, "epoch": epoch.number, "losses": losses}, gates)

    def update(
        self,
        training: Training,
        epoch: dict[str, Any] | None = None,
        gates: dict[str, Any] | None = None,
        state: tuple[str, str] | None = None,
    ) -> None:
        """Record a change and wake every request that waits for news."""
        with self.changed:
            training.version += 1
            if epoch is not None:
                training.epochs.append(epoch)
            if gates is not None:
                training.gates, training.gates_version = gates, training.version
            if state is not None:
                training.state, training.reason = state
            self.changed.notify_all()


class Example:
    """One validation sequence of Adding, and the gates of the first run's DMU while it reads it."""

    def __init__(self, trainer: Trainer) -> None:
        with torch.random.fork_rng(devices=[]):  # making the network draws random weights
            self.network: nn.Module = trainer.task.network(trainer.setting).to(trainer.dtype).eval()
        self.inputs, batch = inspection.one_batch(
            self.network, trainer.task, trainer.setting, random_streams.VALIDATION, seed=0, size=1
        )
        self.target = batch.target.flatten()[0].item()

    @torch.no_grad()
    def gates(self, group: Group) -> dict[str, Any] | None:
        """The share of its state that each unit keeps at each step, (units, steps); None once the run has ended."""
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
            "target": self.target,
        }


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
