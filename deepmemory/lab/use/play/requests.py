"""The requests of the page: JSON, checked field by field before it is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import weight_count

STEPS, VALIDATION = 50, 200  # short epochs, so that the curves are updated often
LONGEST_TEXT = 300  # characters of a sentence


class RequestError(Exception):
    """A request is refused: the HTTP status, and one sentence that says what is wrong."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Bounds(NamedTuple):
    """Smallest and largest value of a number, and its default on the page; whole numbers if the default is one."""

    low: float
    high: float
    default: float

    def for_page(self) -> dict[str, Any]:
        """The bounds as JSON, with whether numbers in between are allowed."""
        return {**self._asdict(), "whole": isinstance(self.default, int)}


BOUNDS = {
    "hidden": Bounds(1, 32, 5),
    "lr": Bounds(1e-5, 1.0, 0.02),
    "start": Bounds(-10.0, 10.0, 0.0),
    "runs": Bounds(1, 16, 8),
    "length": Bounds(24, 300, 100),
    "epochs": Bounds(1, 500, 40),
    "beam": Bounds(1, 10, 5),
    "tune": Bounds(0, 100_000, 0),
    "given": Bounds(1, 400, 50),
    "steps": Bounds(1, 400, 100),
    "temperature": Bounds(0.0, 5.0, 1.0),
    "seed": Bounds(0, 2**31 - 1, 0),
}


class CellRequest(NamedTuple):
    """One cell to train: its state size, learning rate and start bias."""

    hidden: int
    lr: float
    start: float  # initial bias of the gate that keeps the state: a new cell keeps sigmoid(start) of its state


# What the page starts with: about 100 weights each. The paper starts the DMU at 3 and leaves the GRU at 0.
CELLS = {"dmu": CellRequest(5, 0.02, 3.0), "gru": CellRequest(4, 0.05, 0.0), "lstm": CellRequest(3, 0.02, 0.0)}


def start_of(cell: str, bias: float) -> dict[str, Any]:
    """The settings that make a new cell keep sigmoid(bias) of its state.

    An LSTM has the forget bias in both of its bias vectors, and writes the less the more it keeps.
    """
    return {
        "dmu": {"memory_bias": bias},
        "gru": {"update_bias": bias},
        "lstm": {"forget_bias": bias / 2, "input_bias": -bias},
    }[cell]


@dataclass(frozen=True)
class TrainingRequest:
    """Cells to train side by side on Adding."""

    cells: dict[str, CellRequest]
    runs: int
    length: int
    epochs: int

    def setting(self, cell: str) -> Setting:
        """The lab's setting for one of the cells; a DMU gets one hidden layer as wide as its state."""
        hidden, lr, start = self.cells[cell]
        own: dict[str, Any] = {"transition": (hidden,)} if cell == "dmu" else {}
        return Setting(
            cell=cell,
            hidden=(hidden,),
            lr=lr,
            steps=STEPS,
            epochs=self.epochs,
            validation=VALIDATION,
            min_length=self.length,
            max_length=self.length,
            **own,
            **start_of(cell, start),
        )


@cache
def weight_counts() -> dict[str, list[int]]:
    """The number of weights of each cell, by state size from 1 on."""
    sizes = range(1, int(BOUNDS["hidden"].high) + 1)
    counts = {}
    for cell, default in CELLS.items():
        requests = [TrainingRequest({cell: default._replace(hidden=size)}, 1, 100, 1) for size in sizes]
        settings = [request.setting(cell) for request in requests]
        counts[cell] = [weight_count(setting, task_of(setting)) for setting in settings]
    return counts


@dataclass(frozen=True)
class TranslationRequest:
    """A sentence to translate into English."""

    text: str
    beam: int


@dataclass(frozen=True)
class MusicRequest:
    """A tune to continue."""

    tune: int
    given: int
    steps: int
    temperature: float
    seed: int


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object, without NaN and Infinity."""
    try:
        value = json.loads(raw, parse_constant=lambda name: reject(f"{name} is not a number that can be used here"))
    except (ValueError, RecursionError):
        reject("the body should be JSON in UTF-8")
    return as_object(value, "the body")


def training_request(fields: dict[str, Any]) -> TrainingRequest:
    """Read ``{"cells": {"dmu": {"hidden": 5, "lr": 0.02, "start": 3}}, "runs": 8, "length": 100, "epochs": 40}``."""
    check_names(fields, ("cells", "runs", "length", "epochs"), "the body")
    cells = {}
    for name, of_cell in as_object(fields["cells"], "cells").items():
        if name not in CELLS:
            reject(f"unknown cell {shown(name)}; choose from {', '.join(CELLS)}")
        check_names(as_object(of_cell, name), CellRequest._fields, name)
        cells[name] = CellRequest(
            whole(of_cell, "hidden", name), number(of_cell, "lr", name), number(of_cell, "start", name)
        )
    if not cells:
        reject(f"choose at least one cell of {', '.join(CELLS)}")
    ordered = {name: cells[name] for name in CELLS if name in cells}
    return TrainingRequest(ordered, whole(fields, "runs"), whole(fields, "length"), whole(fields, "epochs"))


def translation_request(fields: dict[str, Any]) -> TranslationRequest:
    """Read ``{"text": "¿ qué tal ?", "beam": 5}``."""
    check_names(fields, ("text", "beam"), "the body")
    text = fields["text"]
    if not isinstance(text, str) or not text.strip():
        reject("text should be a sentence")
    if len(text) > LONGEST_TEXT:
        reject(f"text should have at most {LONGEST_TEXT} characters, got {len(text)}")
    return TranslationRequest(text, whole(fields, "beam"))


def music_request(fields: dict[str, Any]) -> MusicRequest:
    """Read ``{"tune": 0, "given": 50, "steps": 100, "temperature": 1, "seed": 0}``."""
    check_names(fields, ("tune", "given", "steps", "temperature", "seed"), "the body")
    return MusicRequest(
        whole(fields, "tune"),
        whole(fields, "given"),
        whole(fields, "steps"),
        number(fields, "temperature"),
        whole(fields, "seed"),
    )


def empty_request(fields: dict[str, Any]) -> None:
    """Check that nothing but ``{}`` was sent."""
    check_names(fields, (), "the body")


def as_object(value: Any, what: str) -> dict[str, Any]:
    """The value, if it is a JSON object."""
    if not isinstance(value, dict):
        reject(f"{what} should be a JSON object, got {shown(value)}")
    return value


def check_names(fields: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    """Reject an object that does not have exactly these fields."""
    if missing := [name for name in names if name not in fields]:
        reject(f"{what} lacks {', '.join(missing)}")
    if extra := [name for name in fields if name not in names]:
        reject(f"{what} should have {', '.join(names) or 'nothing'}, not {shown(extra[0])}")


def number(fields: dict[str, Any], name: str, what: str = "") -> float:
    """A number within its bounds."""
    value, (low, high, _) = fields[name], BOUNDS[name]
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or not math.isfinite(value):
        reject(f"{f'{what}: ' if what else ''}{name} should be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def whole(fields: dict[str, Any], name: str, what: str = "") -> int:
    """A whole number within its bounds."""
    value, (low, high, _) = fields[name], BOUNDS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        told = f"{name} should be a whole number from {low:.0f} to {high:.0f}, got {shown(value)}"
        reject(f"{f'{what}: ' if what else ''}{told}")
    return value


def shown(value: Any) -> str:
    """A value as JSON, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def reject(text: str) -> NoReturn:
    """Refuse an invalid request."""
    raise RequestError(HTTPStatus.BAD_REQUEST, text)
