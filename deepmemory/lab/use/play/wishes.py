"""What the page may ask for: JSON, checked field by field before anything is done with it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

from deepmemory.lab.settings import Setting

CELLS = {"dmu": 0.02, "gru": 0.05, "lstm": 0.02}  # that train side by side, with the rate each begins with
STEPS, VALIDATION = 50, 200  # short epochs: something moves five times a second
LONGEST_TEXT = 300  # characters of a sentence


class Refused(Exception):
    """An answer that is no success: what is wrong, in one sentence."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Bounds(NamedTuple):
    """Smallest, largest, and what the page begins with; whole numbers where these are."""

    low: float
    high: float
    default: float

    def for_page(self) -> dict[str, Any]:
        """With whether numbers in between are allowed."""
        return {**self._asdict(), "whole": isinstance(self.default, int)}


BOUNDS = {
    "hidden": Bounds(1, 32, 5),
    "lr": Bounds(1e-5, 1.0, 0.02),
    "runs": Bounds(1, 16, 8),
    "length": Bounds(24, 100, 30),
    "epochs": Bounds(1, 500, 60),
    "beam": Bounds(1, 10, 5),
    "tune": Bounds(0, 100_000, 0),
    "given": Bounds(1, 400, 50),
    "steps": Bounds(1, 400, 100),
    "temperature": Bounds(0.0, 5.0, 1.0),
    "seed": Bounds(0, 2**31 - 1, 0),
}


@dataclass(frozen=True)
class TrainingWish:
    """Cells to train side by side on Adding."""

    cells: dict[str, tuple[int, float]]  # state size and learning rate of each
    runs: int
    length: int
    epochs: int

    def setting(self, cell: str) -> Setting:
        """As the lab's trainer takes it; a DMU gets one hidden layer as wide as its state."""
        hidden, lr = self.cells[cell]
        return Setting(
            cell=cell,
            hidden=(hidden,),
            transition=(hidden,) if cell == "dmu" else (),
            lr=lr,
            steps=STEPS,
            epochs=self.epochs,
            validation=VALIDATION,
            min_length=self.length,
            max_length=self.length,
        )


@dataclass(frozen=True)
class TranslationWish:
    """A sentence to say in English."""

    text: str
    beam: int


@dataclass(frozen=True)
class MusicWish:
    """A tune to go on with."""

    tune: int
    given: int
    steps: int
    temperature: float
    seed: int


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object, without NaN and Infinity."""
    try:
        value = json.loads(raw, parse_constant=lambda name: refuse(f"{name} is no number that can be used here"))
    except (ValueError, RecursionError):
        refuse("the body should be JSON in UTF-8")
    return as_object(value, "the body")


def training_wish(fields: dict[str, Any]) -> TrainingWish:
    """``{"cells": {"dmu": {"hidden": 5, "lr": 0.02}}, "runs": 8, "length": 30, "epochs": 60}``."""
    check_names(fields, ("cells", "runs", "length", "epochs"), "the body")
    cells = {}
    for name, of_cell in as_object(fields["cells"], "cells").items():
        if name not in CELLS:
            refuse(f"unknown cell {shown(name)}; choose from {', '.join(CELLS)}")
        check_names(as_object(of_cell, name), ("hidden", "lr"), name)
        cells[name] = whole(of_cell, "hidden", name), number(of_cell, "lr", name)
    if not cells:
        refuse(f"choose at least one cell of {', '.join(CELLS)}")
    ordered = {name: cells[name] for name in CELLS if name in cells}
    return TrainingWish(ordered, whole(fields, "runs"), whole(fields, "length"), whole(fields, "epochs"))


def translation_wish(fields: dict[str, Any]) -> TranslationWish:
    """``{"text": "¿ qué tal ?", "beam": 5}``."""
    check_names(fields, ("text", "beam"), "the body")
    text = fields["text"]
    if not isinstance(text, str) or not text.strip():
        refuse("text should be a sentence")
    if len(text) > LONGEST_TEXT:
        refuse(f"text should have at most {LONGEST_TEXT} characters, got {len(text)}")
    return TranslationWish(text, whole(fields, "beam"))


def music_wish(fields: dict[str, Any]) -> MusicWish:
    """``{"tune": 0, "given": 50, "steps": 100, "temperature": 1, "seed": 0}``."""
    check_names(fields, ("tune", "given", "steps", "temperature", "seed"), "the body")
    return MusicWish(
        whole(fields, "tune"),
        whole(fields, "given"),
        whole(fields, "steps"),
        number(fields, "temperature"),
        whole(fields, "seed"),
    )


def nothing(fields: dict[str, Any]) -> None:
    """``{}``."""
    check_names(fields, (), "the body")


def as_object(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        refuse(f"{what} should be a JSON object, got {shown(value)}")
    return value


def check_names(fields: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    """All of these and no others."""
    if missing := [name for name in names if name not in fields]:
        refuse(f"{what} lacks {', '.join(missing)}")
    if extra := [name for name in fields if name not in names]:
        refuse(f"{what} should have {', '.join(names) or 'nothing'}, not {shown(extra[0])}")


def number(fields: dict[str, Any], name: str, what: str = "") -> float:
    """A number within its bounds."""
    value, (low, high, _) = fields[name], BOUNDS[name]
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or not math.isfinite(value):
        refuse(f"{f'{what}: ' if what else ''}{name} should be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def whole(fields: dict[str, Any], name: str, what: str = "") -> int:
    """A whole number within its bounds."""
    value, (low, high, _) = fields[name], BOUNDS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        told = f"{name} should be a whole number from {low:.0f} to {high:.0f}, got {shown(value)}"
        refuse(f"{f'{what}: ' if what else ''}{told}")
    return value


def shown(value: Any) -> str:
    """What was given, short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def refuse(text: str) -> NoReturn:
    """The client's mistake."""
    raise Refused(HTTPStatus.BAD_REQUEST, text)
