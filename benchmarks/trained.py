"""Quality of the networks that come with the package, measured on the data they were trained on.

python benchmarks/trained.py --data DATA writes benchmarks/results/trained.json and the tables of docs/trained.md: how
composed music differs from real music, with the keys of a frame sampled together and each one alone; and the BLEU of
the translator.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from deepmemory.lab.records import now
from deepmemory.lab.tasks import PolyMusic
from deepmemory.lab.use import decoding, released, sound
from deepmemory.lab.use.loading import expect_task, load_model

RESULTS = Path(__file__).with_name("results") / "trained.json"
PAGE = Path(__file__).parent.parent / "docs" / "trained.md"
GIVEN, COMPOSED = 50, 200  # frames
CHORD = 3  # a chord is the lowest keys of a frame, as many as this
BAR = 4 * sound.frames_per_beat("nottingham")  # frames
NAMES = {
    "polymusic": ("composer", "Nottingham"),
    "translation": ("translator", "Spanish and English sentences of Tatoeba"),
    "ptb": ("generator", "Penn Treebank"),
}
WAYS = {"real": "real", "together": "keys sampled together", "alone": "each key alone"}


def describe(rolls: list[Tensor], known: set[bytes]) -> dict[str, float]:
    """Notes of piano-rolls; ``known`` are the sets of keys that sound together in the training pieces."""
    frames = torch.cat(rolls)
    chords = [roll * (roll.cumsum(1) <= CHORD) for roll in rolls]  # without the melody above
    changes = torch.cat([(chord[1:] != chord[:-1]).any(1) for chord in chords]).double().mean().item()
    begun = torch.cat([(roll[1:] > roll[:-1]).sum(1) for roll in rolls]).double().mean().item()
    held = torch.tensor([note.end - note.start for roll in rolls for note in sound.notes_of(roll)]).double()
    counts = frames.sum(1).double()
    return {
        "frames": len(frames),
        "frames of a note": held.mean().item(),
        "notes of one frame": (held == 1).double().mean().item(),
        "notes that begin in a frame": begun,
        "frames of a chord": 1 / changes,
        "chord changes in a bar": BAR * changes,
        "notes in a frame": counts.mean().item(),
        "their standard deviation": counts.std().item(),
        "chords of the training pieces": sum(frame.numpy().tobytes() in known for frame in frames) / len(frames),
    }


def measure_music(path: Path, data: str | None, pieces: int) -> dict[str, dict[str, float]]:
    """Real continuations of test pieces, and composed ones."""
    model = load_model(path, data=data, with_data=True)
    task = expect_task(model, PolyMusic)
    known = {frame.numpy().tobytes() for piece in task.pieces["train"] for frame in piece}
    begun = [piece for piece in task.pieces["test"] if len(piece) >= GIVEN + COMPOSED][:pieces]
    found = {"real": describe([piece[GIVEN : GIVEN + COMPOSED] for piece in begun], known)}
    for sampling in decoding.SAMPLINGS:
        rolls = [
            decoding.continue_tune(model, piece[:GIVEN], COMPOSED, seed=seed, sampling=sampling)[GIVEN:]
            for seed, piece in enumerate(begun)
        ]
        found[sampling] = describe(rolls, known)
    return found


def measure_translation(path: Path, data: str | None, sentences: int) -> dict[str, float | str | None]:
    """BLEU on test sentences."""
    return decoding.bleu(load_model(path, data=data, with_data=True), limit=sentences)._asdict()


def networks_table() -> str:
    """The networks and their scores, from the JSON files beside them."""
    rows = [["network", "data", "bytes", "weights", "test loss in float32", "as shipped"], ["---"] * 2 + ["---:"] * 4]
    for task, (what, data) in NAMES.items():
        file = released.SHIPPED / f"{task}.safetensors"
        made = json.loads(file.with_suffix(".json").read_text())
        losses = [f"{made['scores'][precision]['test_loss']:.4f}" for precision in ("float32", "float16")]
        rows.append([what, data, f"{file.stat().st_size:,}", f"{made['weights']:,}", *losses])
    return lines(rows)


def music_table(music: dict[str, dict[str, float]]) -> str:
    """Real and composed music, side by side."""
    rows = [["", *WAYS.values()], ["---", *("---:" for _ in WAYS)]]
    for name, how in (
        ("frames of a note", ".2f"),
        ("notes of one frame", ".0%"),
        ("notes that begin in a frame", ".2f"),
        ("frames of a chord", ".1f"),
        ("chord changes in a bar", ".1f"),
        ("notes in a frame", ".2f"),
        ("their standard deviation", ".2f"),
        ("chords of the training pieces", ".0%"),
    ):
        rows.append([name, *(f"{music[way][name]:{how}}".replace("%", " %") for way in WAYS)])
    return lines(rows)


def lines(rows: list[list[str]]) -> str:
    """Rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def with_tables(text: str, found: dict[str, dict]) -> str:
    """The page with the text between its marks replaced."""
    bleu = found["translation"]
    scores = f"{bleu['greedy']:.1f}, and {bleu['beam']:.1f} with a beam of 5"
    said = f"On {bleu['sentences']:,} test sentences its BLEU is {scores}.\n"
    for name, made in (("networks", networks_table()), ("music", music_table(found["music"])), ("bleu", said)):
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        text = before + start + made + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of the data sets; default: $DEEPMEMORY_DATA")
    parser.add_argument("--pieces", type=int, default=40, help="pieces to continue")
    parser.add_argument(
        "--sentences", type=int, default=2000, help="sentences to translate; 0 for all of the test split"
    )
    parser.add_argument("--music", type=Path, default=released.shipped("polymusic"))
    parser.add_argument("--translation", type=Path, default=released.shipped("translation"))
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = {
        "what": f"{GIVEN} frames of test pieces continued by {COMPOSED}, at temperature 1; BLEU of test sentences",
        "when": now(),
        "music": measure_music(given.music, given.data, given.pieces),
        "translation": measure_translation(given.translation, given.data, given.sentences),
    }
    given.to.write_text(f"{json.dumps(found, indent=1)}\n")
    if given.to == RESULTS:
        PAGE.write_text(with_tables(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
