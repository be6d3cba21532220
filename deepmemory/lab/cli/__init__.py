"""The command ``dmu``. Each verb is one typed function, grouped by file; this module puts them together.

A verb's parameters are its arguments and options. Options that are fields of a settings dataclass are made from it
(:mod:`deepmemory.lab.cli.options`). What takes time to import, torch above all, is imported inside the verbs, so that
``--help`` responds at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from deepmemory.lab.cli import data, results, training, use
from deepmemory.lab.cli.options import as_command

VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (training.paper, training.beyond, training.train, training.sweep),
    "Look at results": (results.report, results.merge, results.bench),
    "Use a trained network": (
        use.list_,
        use.inspect,
        use.export,
        use.release,
        use.compose,
        use.translate,
        use.generate,
        use.play,
    ),
}
DATA_VERBS: dict[str, Callable[..., None]] = {"list": data.list_, "fetch": data.fetch, "check": data.check}

app = typer.Typer(name="dmu", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
data_app = typer.Typer(help="Public datasets: list, fetch and check them.", no_args_is_help=True)
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(verb.__name__.rstrip("_"), rich_help_panel=panel)(as_command(verb))
for name, verb in DATA_VERBS.items():
    data_app.command(name)(as_command(verb))
app.add_typer(data_app, name="data", rich_help_panel="Data")


def show_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        import deepmemory as dm

        print(f"deepmemory {dm.__version__}")
        raise typer.Exit


@app.callback()
def dmu(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train with deepmemory, reproduce the paper's experiments and look at the results."""


def main() -> None:
    """Run the command line; report user errors and machine failures in one line."""
    try:
        app()
    except ModuleNotFoundError as error:
        install = f"dmu needs {error.name}; install the lab with: pip install 'deepmemory[lab]'"
        own = not error.name or "pip install" in str(error)  # such as the package of an export format
        print(f"error: {error if own else install}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if lost_a_process(error):
            os._exit(2)  # a normal exit would wait for the process that is gone
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        print(
            "error: not enough memory on the GPU or the machine. Train fewer runs at once (--runs 10, then the "
            "same with --seed 10), store less (--recompute) or use smaller batches. Every finished epoch is saved",
            file=sys.stderr,
        )
        sys.exit(2)


def lost_a_process(error: Exception) -> bool:
    """Whether one of the processes that share every batch does not respond."""
    if not isinstance(error, ConnectionError):
        return False
    from deepmemory.lab.training.distributed import ProcessLost

    return isinstance(error, ProcessLost)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error was caused by a GPU or a machine without enough memory."""
    import torch

    if error is None:
        return False
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
    return full or ran_out_of_memory(error.__cause__)
