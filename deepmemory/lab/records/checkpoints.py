"""Checkpoints: weights and optimiser state of a group of runs, in safetensors files.

A checkpoint may come from somebody else. Loading one runs no code; its sha256, and the name, shape and type of every
tensor, are checked before anything uses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.records.database import STATES
from deepmemory.lab.records.errors import MALFORMED, RecordsError, shown
from deepmemory.lab.writing import put

CHECKPOINT_FORMAT = 2
LARGEST_HEADER = 2**24  # bytes of names, shapes and metadata: enough for 100,000 runs

Kind = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


def save_checkpoint(path: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    write_whole(path, checkpoint_bytes(tensors, info, path.parent.name))


def checkpoint_bytes(tensors: dict[str, Tensor], info: dict[str, Any], study: str) -> bytes:
    """The contents of a checkpoint file; ``study`` is the name of the folder it belongs in."""
    return signed_bytes(tensors, {"info": json.dumps(info), "format": str(CHECKPOINT_FORMAT), "study": study})


def signed_bytes(tensors: Mapping[str, Tensor], noted: dict[str, str]) -> bytes:
    """The contents of a safetensors file with this metadata and the sha256 of everything."""
    from safetensors.torch import save

    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return save(stored, noted | {"sha256": checkpoint_digest(stored, noted)})


def checkpoint_digest(tensors: Mapping[str, Tensor], noted: Mapping[str, str]) -> str:
    """The sha256 of a checkpoint's contents: the metadata, and each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(json.dumps(noted, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, safe from power failures."""
    try:
        put(path, data, lasting=True)
    except OSError as error:
        raise RecordsError(
            f"{path} cannot be written: {error.strerror or error}. The previous file is safe; once this is solved, "
            "the same command resumes"
        ) from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, on the CPU, and its metadata."""
    from safetensors import SafetensorError

    try:
        tensors, info = read_checkpoint(path)
        check_checkpoint(tensors, info)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, RuntimeError, *MALFORMED) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        reason = f"it has no {first}" if isinstance(error, KeyError) else first
        raise RecordsError(
            f"{path} cannot be used as a checkpoint: {reason}. It was not loaded. Move it away, and its runs start "
            "again, except those that have finished; the records stay as they are"
        ) from error
    return tensors, info


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint; raise if it was changed after it was written, or is in the folder of another study."""
    tensors, noted = read_signed(path, str(CHECKPOINT_FORMAT))
    if noted["study"] != path.parent.name and path.parent.parent.name == "checkpoints":
        raise ValueError(f"it belongs to the study {shown(noted['study'])}")
    return tensors, json.loads(noted["info"])


def read_signed(path: Path, format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata; raise if the file has another format or was changed after it was written."""
    from safetensors import safe_open

    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > LARGEST_HEADER:
        raise ValueError(f"its header has {header} bytes, at most {LARGEST_HEADER} are read")
    with safe_open(path, framework="pt") as opened:
        noted = dict(opened.metadata() or {})
        if (version := noted.get("format")) != format:
            raise ValueError(f"its format is {shown(version)}, this version reads format {format}")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if noted.pop("sha256") != checkpoint_digest(tensors, noted):
        raise ValueError("its contents do not match its sha256: it was changed after it was written")
    return tensors, noted


def check_checkpoint(tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Raise if a group of runs cannot be restored from a checkpoint.

    The metadata must have an entry for each run, and the stacked tensors a row for each run in ``rows``. Every tensor
    must have the name, shape and type that follow from the best weights, with no tensor beyond these, as Adam needs.
    """
    seeds, rows, epoch = info["seeds"], info["rows"], info["epoch"]
    runs = range(len(seeds))

    def whole(*numbers: Any) -> bool:
        return all(type(number) is int and 0 <= number < 2**63 for number in numbers)

    if not (seeds and whole(epoch, *seeds, *rows) and len(set(seeds)) == len(seeds)):
        raise ValueError(
            f"seeds, rows and epoch should be whole numbers, got {shown(seeds)}, {shown(rows)} and {shown(epoch)}"
        )
    if not (rows and sorted(set(rows)) == rows and rows[-1] in runs):
        raise ValueError(f"rows should list some of {len(seeds)} runs in order, got {shown(rows)}")
    for name, valid in (
        ("state", lambda state: state in STATES),
        ("under", whole),
        ("best_epoch", lambda number: number is None or whole(number)),
    ):
        values = info[name]
        if not (isinstance(values, list) and len(values) == len(seeds) and all(map(valid, values))):
            raise ValueError(f"{name} should be a list of {len(seeds)} valid values, got {shown(values)}")
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    expected: dict[str, Kind] = {"best_loss": ((len(seeds),), torch.float64)}
    for name, (shape, dtype) in found.items():
        if name.startswith("best."):
            if dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{shown(name)} should be float32 or float64, got {dtype}")
            own = name.removeprefix("best.")
            stack = (len(rows), *shape[1:]), dtype
            expected |= {name: ((len(seeds), *shape[1:]), dtype), f"weights.{own}": stack}
            expected |= {f"adam.{own}.{kind}": stack for kind in ("exp_avg", "exp_avg_sq")}
            expected[f"adam.{own}.step"] = (), torch.float32
    compare_tensors(found, expected)


def compare_tensors(found: Mapping[str, Kind], expected: Mapping[str, Kind]) -> None:
    """Raise an error with the name of the first tensor that is not as expected."""

    def words(kind: Kind | None) -> str:
        return "missing" if kind is None else f"{kind[0]} of {str(kind[1]).removeprefix('torch.')}"

    for name in sorted({*found, *expected}):
        if name not in expected:
            raise ValueError(f"{shown(name)} is {words(found[name])}, no tensor of that name is expected")
        if found.get(name) != expected[name]:
            raise ValueError(f"{shown(name)} is {words(found.get(name))}, expected {words(expected[name])}")


def check_network(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, path: Path | str
) -> None:
    """Raise if the weights of one run, from the checkpoint ``path``, do not fit a network with these shapes."""
    found = {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
    try:
        compare_tensors(found, {name: (shape, dtype) for name, shape in shapes.items()})
    except ValueError as error:
        raise RecordsError(
            f"{path} does not fit this network: {error}. It belongs to another study, or the data has changed since it "
            "was trained. It was not loaded; move it away, and its runs start again"
        ) from None


def best_weights(path: Path, seed: int) -> dict[str, Tensor]:
    """The state_dict of one run's best epoch, from a checkpoint of several runs."""
    tensors, info = load_checkpoint(path)
    if seed not in info["seeds"]:
        raise ValueError(f"{path} has no run with seed {seed}; it has {info['seeds']}")
    return row_of(tensors, "best.", info["seeds"].index(seed))


def last_weights(path: Path, seed: int) -> dict[str, Tensor]:
    """The state_dict of one run's last epoch, from a checkpoint of several runs."""
    tensors, info = load_checkpoint(path)
    stacked = [info["seeds"][run] for run in info["rows"]]
    if seed not in stacked:
        raise ValueError(f"{path} has no weights of the last epoch of run {seed}; it has those of {stacked}")
    return row_of(tensors, "weights.", stacked.index(seed))


def row_of(tensors: Mapping[str, Tensor], prefix: str, row: int) -> dict[str, Tensor]:
    """One row of all tensors whose names start with ``prefix``, by name without the prefix."""
    return {name.removeprefix(prefix): t[row].clone() for name, t in tensors.items() if name.startswith(prefix)}
