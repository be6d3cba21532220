"""Options that layers once had: who still asks for one is told why it is gone and what to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

REMOVED = {  # what to use instead
    "zoneout": "Use recurrent_dropout or, in a DMU, transition_dropout; with a cell, mix the old and the new state",
    "layer_norm": "For normalised hidden layers give transition= an nn.Module with nn.LayerNorm inside",
}


def refuse(name: str, given: Mapping[str, Any]) -> None:
    """Raise in the name of a module if one of these options was removed."""
    for option, instead in REMOVED.items():
        if option in given:
            raise TypeError(
                f"{name}: got {option}={given[option]!r}, an option that was removed: it gained little on language "
                f"models and ran as a Python loop. {instead}"
            )


def refuses(*options: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor refuse removed options, which its signature no longer lists."""

    def refusing(init: Callable[P, None]) -> Callable[P, None]:
        @wraps(init)
        def checked(*args: P.args, **given: P.kwargs) -> None:
            refuse(type(args[0]).__name__, {option: given[option] for option in options if option in given})
            init(*args, **given)

        return checked

    return refusing
