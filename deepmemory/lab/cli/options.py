"""What the verbs share: their common options, options made from the fields of a dataclass, and what Ctrl-C prints."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from deepmemory.lab.settings import LARGEST, Launcher, Machine, Setting, check_choice, option

MOST_RUNS = 10**6
OUTPUT = "Output"
RUNS = Path("runs")
WATCHES = ("none", "gradients")
OUT_HELP = "output folder"
JSON_HELP = "print JSON lines for other programs"

TaskName = Annotated[str, typer.Argument(help=Setting.__dataclass_fields__["task"].metadata["help"])]
CellName = Annotated[
    str, typer.Option(help=f"{Setting.__dataclass_fields__['cell'].metadata['help']}; also dmu-c, the paper's DMU-C")
]
Runs = Annotated[
    int, typer.Option(min=1, max=MOST_RUNS, help="number of runs, trained side by side unless one fills a GPU")
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST, help="seed of the first run; the other runs count up from it")]
Quick = Annotated[bool, typer.Option("--quick", help="small settings that train in two minutes or less on a CPU")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="change any setting; repeatable")
]
Out = Annotated[Path, typer.Option("--out", rich_help_panel=OUTPUT, help=OUT_HELP)]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help=JSON_HELP)]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="folder with local copies of the data; default: $DEEPMEMORY_DATA")
]
Checkpoint = Annotated[
    Path | None,
    typer.Argument(
        help="OUT/checkpoints/STUDY, a file in it, or a task; default: the newest in OUT, else one that comes with the "
        "package"
    ),
]


def existing(out: Path) -> Path:
    """Return the folder; raise if the user named one that does not exist."""
    if out != RUNS and not out.exists():
        raise ValueError(f"--out {out}: there is no such folder")
    return out


TrainedIn = Annotated[Path, typer.Option("--out", help="folder with trained networks", callback=existing)]
RunSeed = Annotated[
    int | None, typer.Option("--run", min=0, help="seed of the run; default: the one with the lowest validation loss")
]


@dataclass(frozen=True)
class Recording:
    """The options of a training command for its records and its display."""

    out: Path = option(RUNS, OUT_HELP, OUTPUT)  # noqa: RUF009 (it gives a field)
    tracker: str = option("none", "also log every epoch to tensorboard or mlflow", OUTPUT)
    watch: str = option("none", "gradients: also record gates and gradients every few epochs", OUTPUT)
    json: bool = option(False, JSON_HELP, OUTPUT)

    def __post_init__(self) -> None:
        check_choice("--watch", self.watch, WATCHES)


@dataclass(frozen=True)
class OptionsOf:
    """Annotation of a verb's parameter: each of these fields of a dataclass becomes an option.

    The verb gets the dataclass or, with ``changes_only``, a dict of the options that were given.
    """

    kind: type
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    changes_only: bool = False

    @property
    def fields(self) -> list[Field[Any]]:
        """The fields that are options."""
        chosen = [of for of in fields(self.kind) if not self.only or of.name in self.only]
        return [of for of in chosen if of.name not in self.without]

    def parameters(self) -> list[inspect.Parameter]:
        """One option for each field, for a function's signature."""
        make = text_option if self.changes_only else typed_option
        types = get_type_hints(self.kind)
        return [make(of, types[of.name]) for of in self.fields]

    def collect(self, given: Mapping[str, Any]) -> Any:
        """The verb's argument for the values of these options."""
        if self.changes_only:
            return {name: text for name, text in given.items() if text is not None}
        return self.kind(**given)


def text_option(of: Field[Any], kind: Any) -> inspect.Parameter:
    """An option that may be left out and is read by :func:`deepmemory.lab.settings.change`."""
    if kind is bool:
        flag = of.name.replace("_", "-")
        how = typer.Option(f"--{flag}/--no-{flag}", help=of.metadata["help"], rich_help_panel=of.metadata["panel"])
        return keyword(of.name, Annotated[bool | None, how], None)
    shown = {int: "<int>", float: "<float>", str: "<str>"}.get(kind, "<int,...>")
    how = typer.Option(help=of.metadata["help"], rich_help_panel=of.metadata["panel"], metavar=shown)
    return keyword(of.name, Annotated[str | None, how], None)


def typed_option(of: Field[Any], kind: Any) -> inspect.Parameter:
    """An option of the field's type, with its default and limits."""
    flag = f"--{of.name.replace('_', '-')}"
    name = f"{flag}/--no-{flag[2:]}" if of.default is True else flag
    limits = {"min": of.metadata["least"], "max": of.metadata["most"]} if kind in (int, float) else {}
    how = typer.Option(name, help=of.metadata["help"], rich_help_panel=of.metadata["panel"], **limits)
    return keyword(of.name, Annotated[kind, how], of.default)


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A keyword-only parameter."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


SettingChanges = Annotated[dict[str, str], OptionsOf(Setting, without=("task", "cell"), changes_only=True)]
PaperChanges = Annotated[
    dict[str, str],
    OptionsOf(
        Setting,
        only=("epochs", "module_rate", "patience", "noise", "music", "pairs", "feedback"),
        changes_only=True,
    ),
]
AnyMachine = Annotated[Machine, OptionsOf(Machine)]
OneProcess = Annotated[Machine, OptionsOf(Machine, without=("devices", "nodes", "recompute"))]
DeviceAndData = Annotated[Machine, OptionsOf(Machine, only=("device", "data"))]
ManyStudies = Annotated[Launcher, OptionsOf(Launcher)]
OneStudy = Annotated[Launcher, OptionsOf(Launcher, without=("at_once",))]
Recorded = Annotated[Recording, OptionsOf(Recording)]
RecordedUnwatched = Annotated[Recording, OptionsOf(Recording, without=("watch",))]


def as_command(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn a verb into a typer command: parameters annotated with :class:`OptionsOf` become options, one per field."""
    parameters: list[inspect.Parameter] = []
    expanded: dict[str, OptionsOf] = {}
    hints = get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        options = [note for note in getattr(hints[name], "__metadata__", ()) if isinstance(note, OptionsOf)]
        if options:
            expanded[name] = options[0]
            parameters += options[0].parameters()
        else:
            parameters.append(keyword(name, hints[name], parameter.default))

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        for name, options in expanded.items():
            given[name] = options.collect({of.name: given.pop(of.name) for of in options.fields})
        try:
            verb(**given)
        except KeyboardInterrupt:
            stopped()

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def stopped(saved: str = "") -> NoReturn:
    """Exit after Ctrl-C, and say how to resume the command."""
    again = shlex.join(["dmu", *sys.argv[1:]])
    print(f"\nstopped{saved and f'; {saved}'}. To resume, run the same command: {again}", file=sys.stderr)
    sys.exit(130)


def tell(as_json: bool, event: Mapping[str, Any], text: str) -> None:
    """Print a result: a line of JSON for programs, or text for people."""
    print(json.dumps(event) if as_json else text)


def split(names: str) -> list[str]:
    """Split names that are separated by commas."""
    return [name.strip() for name in names.split(",")]


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, str]:
    """The values of ``--set NAME=VALUE``, by name."""
    parsed = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, got {assignment!r}")
        parsed[name.strip().replace("-", "_")] = value
    return parsed


def check_engine(name: str, needed_here: bool = True) -> None:
    """Raise if an engine does not exist, or if it is needed on this machine but not available."""
    import deepmemory as dm

    engines = dm.engines()
    if check_choice("engine", name, ("auto", *engines)) == "auto" or not needed_here:
        return
    if not engines[name].available:
        raise ValueError(f"engine {name} cannot be used on this machine: {engines[name].reason}")
