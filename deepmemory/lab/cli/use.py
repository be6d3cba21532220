"""The verbs that use a trained network: the one named, else the newest, else one that comes with the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmemory.lab.cli.options import (
    RUNS,
    AsJson,
    Checkpoint,
    DataFolder,
    DeviceAndData,
    RunSeed,
    TrainedIn,
    tell,
)
from deepmemory.lab.settings import TASKS, check_choice

if TYPE_CHECKING:
    from deepmemory.lab.use.loading import TrainedModel

MOST_STEPS = 10**6

Temperature = Annotated[float, typer.Option(min=0, help="sampling temperature; 0 is greedy")]
SamplingSeed = Annotated[int, typer.Option("--seed", min=0, help="random seed for sampling")]
CheckpointAndText = Annotated[
    list[str],
    typer.Argument(
        metavar="[CHECKPOINT] TEXT",
        help="a trained network (default: the newest in OUT, else one that comes with the package) and a text",
    ),
]


def list_(out: TrainedIn = RUNS, as_json: AsJson = False) -> None:
    """List trained networks, the newest first, and those that come with the package."""
    from deepmemory.lab.use.loading import list_models, list_shipped

    models = list_models(out) + list_shipped()
    if as_json:
        for model in models:
            print(json.dumps({"event": "model", **asdict(model), "path": str(model.path)}))
        return
    if not models:
        print(f"no trained networks in {out}; train one with: dmu train adding --quick --out {out}")
        return
    for model in models:
        size = ", ".join(map(str, model.hidden))
        weights = "weights cannot be read" if model.weights is None else f"{model.weights:,} weights"
        runs = f"{model.runs} run{'s' if model.runs > 1 else ''}"
        print(f"{model.task:<16}{model.cell}, state {size}, depth {model.depth}, {weights}, {runs}")
        scores = ", ".join(f"{name.removeprefix('valid_')} {value:.4g}" for name, value in model.scores.items())
        print(f"{'':<16}best on validation data: {scores or 'nothing finite'}")
        print(f"{'':<16}{model.path}")  # never wrapped, so that it can be copied


def inspect(
    checkpoint: Checkpoint = None,
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    to: Annotated[Path | None, typer.Option(help="folder for figures and numbers; default: print tables only")] = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Inspect a trained network: sizes, gradient condition, gates, gradient flow."""
    from deepmemory.lab.use import inspection
    from deepmemory.lab.use.loading import choose_checkpoint, load_model
    from deepmemory.lab.writing import put

    found = inspection.inspect(load_model(choose_checkpoint(checkpoint, out), run, data, with_data=data is not None))
    told = {"event": "inspect", **inspection.as_data(found)}
    if to is not None:
        told["figures"] = [str(path) for path in inspection.draw(found, to)]
        put(to / "inspection.json", f"{json.dumps(told)}\n".encode())
    if as_json:
        print(json.dumps(told))
    else:
        inspection.show(found)
        if to is not None:
            print(f"figures: {', '.join(told['figures'])}; numbers: {to / 'inspection.json'}")


def export(
    checkpoint: Checkpoint = None,
    format: Annotated[str, typer.Option(help="onnx, pt2 (for torch.export.load), safetensors or c")] = "onnx",
    weights: Annotated[str, typer.Option(help="c: float32, or int8 with a scale for each row")] = "float32",
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    to: Annotated[
        Path | None,
        typer.Option(
            help="file to write; default: OUT/export/STUDY-SEED.FORMAT. A translator is two files, NAME-encoder and "
            "NAME-decoder"
        ),
    ] = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Export a trained network, with the weights of its best epoch, to use it without the lab."""
    import logging

    from safetensors import SafetensorError

    from deepmemory.lab.records.releases import is_release
    from deepmemory.lab.use import exporting
    from deepmemory.lab.use.loading import choose_checkpoint, load_model
    from deepmemory.lab.writing import without_links

    check_choice("format", format, exporting.FORMATS)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing, which is not needed
    checkpoint = choose_checkpoint(checkpoint, out)
    model = load_model(checkpoint, run, data, with_data=data is not None)
    study = (checkpoint if checkpoint.is_dir() else checkpoint.parent).resolve()
    place, name = (out, checkpoint.stem) if is_release(checkpoint) else (study.parents[1], study.name)
    path = to or place / "export" / f"{name}-{model.seed}.{format}"
    for file in exporting.paths(model, path, format):
        if to is None:
            without_links(place, "export", file.name)
        if file.exists() and not file.is_file():  # for example a device, which a new file would replace
            raise ValueError(f"--to {file} is not a file that can be written; give the name of a new one")
    try:
        written = exporting.save(model, path, format, weights)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    for file, inputs, outputs in written:
        names = f"; inputs: {', '.join(inputs)}; outputs: {', '.join(outputs)}" if inputs else ""
        tell(
            as_json,
            {"event": "export", "path": str(file), "seed": model.seed, "inputs": inputs, "outputs": outputs},
            f"{file}: {model.setting.cell} on {model.setting.task}, seed {model.seed}{names}",
        )


def release(
    checkpoint: Checkpoint = None,
    *,
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    last: Annotated[
        bool, typer.Option("--last", help="use the weights of the last epoch; default: those of the best epoch")
    ] = False,
    to: Annotated[Path | None, typer.Option(help="file to write; default: OUT/release/TASK.safetensors")] = None,
    machine: DeviceAndData,
    as_json: AsJson = False,
) -> None:
    """Write a trained network to one small file, in half precision, that can be used without records and data."""
    from deepmemory.lab.cli.training import training_command
    from deepmemory.lab.records.checkpoints import last_weights
    from deepmemory.lab.use import releasing
    from deepmemory.lab.use.loading import best_run, setting_of, trained_checkpoint
    from deepmemory.lab.writing import put, without_links

    path, seed, weights = best_run(trained_checkpoint(checkpoint, out), run)
    setting = setting_of(path)
    to = to or without_links(out, "release", f"{setting.task}.safetensors")
    command = f"{training_command(setting, seed)}; dmu release{' --last' if last else ''}"
    made = releasing.make_release(setting, seed, last_weights(path, seed) if last else weights, command, machine, to)
    put(to.with_suffix(".json"), f"{json.dumps(made, indent=1)}\n".encode())
    exact, rounded = (made["scores"][precision] for precision in ("float32", "float16"))
    told = ", ".join(f"{name} {exact[name]:.4f} in float32, {rounded[name]:.4f} in this file" for name in exact)
    tell(as_json, {"event": "release", "path": str(to), **made}, f"{to}: {to.stat().st_size:,} bytes; {told}")


def compose(
    checkpoint: Checkpoint = None,
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    tune: Annotated[
        int | None,
        typer.Option(
            min=0, help="number of the test piece to continue; default: the first, or an example if no data is read"
        ),
    ] = None,
    source: Annotated[Path | None, typer.Option("--from", help="MIDI file to continue")] = None,
    given: Annotated[int, typer.Option(min=0, help="frames of the piece to start from; 0 for all")] = 50,
    steps: Annotated[int, typer.Option(min=0, max=MOST_STEPS, help="frames to compose")] = 200,
    temperature: Temperature = 1.0,
    sampling: Annotated[
        str, typer.Option(help="together: the keys of a frame are sampled as a chord; alone: each key by itself")
    ] = "together",
    tempo: Annotated[float, typer.Option(min=10, max=1000, help="beats per minute")] = 120.0,
    seed: SamplingSeed = 0,
    to: Annotated[Path, typer.Option(help="file to write, once as .mid and once as .wav")] = Path("tune.mid"),
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Continue a piece of music with a network trained on polymusic; writes MIDI and WAV."""
    from deepmemory.lab.use import decoding, sound

    if tune is not None and source is not None:
        raise ValueError("--tune and --from both name a piece to continue; give one of them")
    with_data = tune is not None or data is not None
    model = trained_on("polymusic", named=checkpoint, out=out, run=run, data=data, with_data=with_data)
    per_beat = sound.frames_per_beat(model.setting.music)
    whole = sound.read_roll(source, per_beat) if source else decoding.piece(model, tune or 0)
    begun = whole[: given or None]
    roll = decoding.continue_tune(model, begun, steps, temperature, seed, sampling)
    to.parent.mkdir(parents=True, exist_ok=True)
    written = {to.with_suffix(".mid"): sound.midi, to.with_suffix(".wav"): sound.wav}
    for path, make in written.items():
        path.write_bytes(make(roll, per_beat, tempo))
    frames = {"given": len(begun), "composed": len(roll) - len(begun), "notes": len(sound.notes_of(roll))}
    tell(
        as_json,
        {"event": "compose", "run": model.seed, "files": [str(path) for path in written], **frames},
        f"{', '.join(map(str, written))}: "
        + "{given} frames given, {composed} composed, {notes} notes".format(**frames),
    )


def translate(
    given: CheckpointAndText = [],  # noqa: B006 (never changed)
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    beam: Annotated[int, typer.Option(min=1, max=1000, help="beam width; 1 is greedy")] = 5,
    length_power: Annotated[
        float, typer.Option(min=0, max=100, help="beam: rank by log-probability / length ** this; 0 ignores the length")
    ] = 1.0,
    bleu: Annotated[
        bool, typer.Option("--bleu", help="measure BLEU on the run's test split, greedy and with the beam")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="--bleu: number of sentences to measure; 0 for all")] = 0,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Translate a sentence into English with a network trained on translation, or measure its BLEU."""
    from deepmemory.lab.use import decoding

    checkpoint, text = checkpoint_and_text(given, text_expected=not bleu)
    if (text is None) != bleu:
        raise ValueError("translate takes either a sentence or --bleu")
    with_data = bleu or data is not None
    model = trained_on("translation", named=checkpoint, out=out, run=run, data=data, with_data=with_data)
    if text is not None:
        said, unknown = decoding.translate(model, text, beam, length_power)
        warn_of_unknown(unknown, "left out")
        tell(as_json, {"event": "translate", "text": said, "unknown": unknown}, said)
        return
    scores = decoding.bleu(model, beam, limit, length_power)
    with_beam = "" if scores.beam is None else f", beam of {beam} {scores.beam:.2f}"
    tell(
        as_json,
        {"event": "bleu", "run": model.seed, "width": beam, **scores._asdict()},
        f"BLEU on {scores.sentences} test sentences of run {model.seed}: greedy {scores.greedy:.2f}{with_beam} "
        f"({scores.signature})",
    )


def generate(
    given: CheckpointAndText,
    run: RunSeed = None,
    out: TrainedIn = RUNS,
    words: Annotated[int, typer.Option(min=0, max=MOST_STEPS, help="number of words to generate")] = 50,
    temperature: Temperature = 1.0,
    top: Annotated[int, typer.Option(min=0, help="sample from this many of the most likely words; 0 for all")] = 40,
    seed: SamplingSeed = 0,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a network trained on natlang or ptb."""
    from deepmemory.lab.use import decoding

    checkpoint, text = checkpoint_and_text(given)
    if text is None:
        raise ValueError("generate needs the beginning of a text, in quotes")
    model = trained_on("natlang", "ptb", named=checkpoint, out=out, run=run, data=data)
    said, unknown = decoding.continue_text(model, text, words, temperature, top, seed)
    warn_of_unknown(unknown, f"read as {decoding.UNKNOWN}")
    tell(as_json, {"event": "generate", "text": said, "unknown": unknown}, said)


def trained_on(
    *tasks: str, named: Path | None, out: Path, run: int | None, data: Path | None, with_data: bool = False
) -> TrainedModel:
    """Load a network for one of these tasks; print which one if the user named none."""
    from deepmemory.lab.use.loading import choose_checkpoint, load_model

    path = choose_checkpoint(named, out, *tasks)
    if path != named:
        print(f"network: {path}", file=sys.stderr)
    return load_model(path, run, data, with_data=with_data)


def checkpoint_and_text(given: Sequence[str], text_expected: bool = True) -> tuple[Path | None, str | None]:
    """The checkpoint and the text from the command line; either may be left out."""
    if len(given) > 2:
        raise ValueError(f"expected a checkpoint and one text in quotes, got {len(given)} arguments: {' '.join(given)}")
    if len(given) == 2:
        if given[0] not in TASKS and not Path(given[0]).exists():
            raise ValueError(f"there is no checkpoint {given[0]}; put a text of several words in quotes")
        return Path(given[0]), given[1]
    if not given:
        return None, None
    is_text = text_expected and not Path(given[0]).exists()
    return (None, given[0]) if is_text else (Path(given[0]), None)


def warn_of_unknown(words: Sequence[str], what: str) -> None:
    """Name the words that were not in the training text."""
    if words:
        print(f"not in the training text, {what}: {', '.join(words)}", file=sys.stderr)


def play(
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the page on this machine; 0 for any")] = 8765,
    out: TrainedIn = RUNS,
    translation: Annotated[
        Path | None, typer.Option(help="checkpoint that translates; default: the newest in OUT")
    ] = None,
    music: Annotated[Path | None, typer.Option(help="checkpoint that composes; default: the newest in OUT")] = None,
    data: DataFolder = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="open the page in the browser")] = True,
) -> None:
    """Open a local web page to train, translate and compose. Only this machine can reach it. Stop with Ctrl-C."""
    from deepmemory.lab.use.play.models import find_model
    from deepmemory.lab.use.play.server import Server, open_in_browser

    translator, composer = find_model("translation", translation, out, data), find_model("polymusic", music, out, data)
    with Server(port, translator, composer) as server:
        print(f"page: {server.address} (Ctrl-C ends it)", flush=True)
        if open_page:
            open_in_browser(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
