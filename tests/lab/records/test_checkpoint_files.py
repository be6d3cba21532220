"""A checkpoint that was changed since it was written is refused by name, whoever loads it; nothing crashes."""

import json
import math
import random
import struct

import pytest
import torch
from lab.checkpoints import small, train
from lab.processes import MAIN, Forked
from safetensors import safe_open
from safetensors.torch import save
from typer.testing import CliRunner

from deepmemory.lab import cli
from deepmemory.lab.records import RecordsError, checkpoint_bytes, load_checkpoint, save_checkpoint
from deepmemory.lab.records.checkpoints import checkpoint_digest
from deepmemory.lab.settings import Machine
from deepmemory.lab.training.group import group_from_checkpoint
from deepmemory.lab.training.trainer import make_trainer
from deepmemory.lab.use.loading import load_model

SETTING = small()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of two runs, one of which is out of the stack."""
    path = train(tmp_path_factory.mktemp("runs"), SETTING)
    tensors, info = load_checkpoint(path)
    info |= {"rows": [0], "state": ["running", "diverged"]}
    for name, tensor in tensors.items():
        if name.startswith(("weights.", "adam.")) and tensor.dim():
            tensors[name] = tensor[:1].clone()
    save_checkpoint(path, tensors, info)
    return path


def test_a_flipped_bit_is_refused_or_changes_nothing(checkpoint, tmp_path):
    whole, (tensors, info) = checkpoint.read_bytes(), load_checkpoint(checkpoint)
    path = tmp_path / checkpoint.name
    draw = random.Random(0)
    places = [draw.randrange(len(whole)) for _ in range(200)] + [8 + draw.randrange(1500) for _ in range(100)]
    refused = []
    for place in places:
        raw = bytearray(whole)
        raw[place] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        try:
            found, noted = load_checkpoint(path)
        except RecordsError as error:
            refused.append(str(error))
            continue
        assert noted == info
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name].view(-1), tensors[name].view(-1)) for name in tensors)
    assert len(refused) > 0.9 * len(places)
    assert all(line.startswith(f"{path} cannot be used as a checkpoint") and "\n" not in line for line in refused)


def renamed(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def changed(name, how):
    return lambda tensors: tensors.update({name: how(tensors[name])})


WEIGHT = "recurrent.weight_hh_l0"
EDITS = {
    "weights reshaped": changed(f"weights.{WEIGHT}", lambda t: t.reshape(1, -1)),
    "weights of one number": changed(f"weights.{WEIGHT}", lambda t: t[..., :1, :1]),
    "weights too large": changed(f"weights.{WEIGHT}", lambda t: torch.cat([t, t], 1)),
    "weights without a row": changed(f"weights.{WEIGHT}", lambda t: t[:0]),
    "weights transposed": changed("weights.recurrent.weight_ih_l0", lambda t: t.mT),
    "weights without dimensions": changed(f"weights.{WEIGHT}", lambda t: t.sum()),
    "bias reshaped": changed("weights.output.bias", lambda t: t[:, :0]),
    "first moment reshaped": changed(f"adam.{WEIGHT}.exp_avg", lambda t: t[..., :1]),
    "second moment reshaped": changed(f"adam.{WEIGHT}.exp_avg_sq", lambda t: t[..., :1]),
    "second moment without a row": changed(f"adam.{WEIGHT}.exp_avg_sq", lambda t: t[:0]),
    "steps of another shape": changed(f"adam.{WEIGHT}.step", lambda t: t.expand(3)),
    "steps of another type": changed(f"adam.{WEIGHT}.step", torch.Tensor.double),
    "best reshaped": changed(f"best.{WEIGHT}", lambda t: t[..., :1]),
    "best loss of another shape": changed("best_loss", lambda t: t[:, None]),
    "best loss of another type": changed("best_loss", torch.Tensor.float),
    "a weight left out": lambda tensors: tensors.pop(f"weights.{WEIGHT}"),
    "a moment left out": lambda tensors: tensors.pop(f"adam.{WEIGHT}.exp_avg"),
    "the best weights left out": lambda tensors: [tensors.pop(name) for name in list(tensors) if "best." in name],
    "one more": lambda tensors: tensors.update(more=torch.zeros(2)),
    "one more weight": lambda tensors: tensors.update({"weights.more": torch.zeros(1, 2)}),
    "a name with a line's end": lambda tensors: tensors.update({"more\nlines": torch.zeros(2)}),
    "a weight renamed": renamed(f"weights.{WEIGHT}", "weights.other"),
    "a moment renamed": renamed(f"adam.{WEIGHT}.exp_avg", f"adam.{WEIGHT}.average"),
    **{
        f"{of} of {str(dtype)[6:]}": changed(f"{of}.{WEIGHT}{rest}", lambda t, dtype=dtype: t.to(dtype))
        for of, rest in (("weights", ""), ("best", ""), ("adam", ".exp_avg"))
        for dtype in (torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.bool)
    },
}


def everywhere(how):
    """Consistent in itself, so that only the network tells."""

    def edit(tensors):
        for name in ("weights.{}", "best.{}", "adam.{}.exp_avg", "adam.{}.exp_avg_sq"):
            tensors[name.format(WEIGHT)] = how(tensors[name.format(WEIGHT)]).contiguous()

    return edit


OF_ANOTHER_NETWORK = {
    "narrower": everywhere(lambda t: t[..., :1]),
    "flat": everywhere(lambda t: t.flatten(1)),
    "transposed": everywhere(lambda t: t.mT[:, :3]),
    "of float64": everywhere(torch.Tensor.double),
}


def all_of(dtype):
    """Every weight and moment of that type."""
    return lambda tensors: tensors.update(
        {name: t.to(dtype) for name, t in tensors.items() if name != "best_loss" and not name.endswith(".step")}
    )


EDITS |= OF_ANOTHER_NETWORK | {f"all of {str(d)[6:]}": all_of(d) for d in (torch.int8, torch.bfloat16, torch.float64)}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_checkpoint_is_refused_by_name(checkpoint, tmp_path, edit):
    """With a digest that fits: whoever edits a file can write that too."""
    tensors, info = load_checkpoint(checkpoint)
    EDITS[edit](tensors)
    path = tmp_path / checkpoint.name
    path.write_bytes(checkpoint_bytes(tensors, info, checkpoint.parent.name))
    trainer = make_trainer(SETTING, Machine("cpu"))
    with pytest.raises(RecordsError) as refused:
        group_from_checkpoint(trainer, *load_checkpoint(path), path)
    assert str(refused.value).startswith(f"{path} ")
    assert "\n" not in str(refused.value)


def test_numbers_that_are_none_are_no_damage(checkpoint, tmp_path):
    tensors, info = load_checkpoint(checkpoint)
    tensors[f"best.{WEIGHT}"].fill_(math.nan)
    save_checkpoint(tmp_path / checkpoint.name, tensors, info)
    assert load_checkpoint(tmp_path / checkpoint.name)[0][f"best.{WEIGHT}"].isnan().all()


NOTES = {
    "seeds": [2**80, 1],
    "rows": [2**70],
    "epoch": 2**90,
    "best_epoch": [2**64, None],
    "under": [-1, 0],
    "state": ["running", "x" * 10**6],
}


@pytest.mark.parametrize("name", NOTES)
def test_absurd_notes_are_refused_in_a_line(checkpoint, tmp_path, name):
    tensors, info = load_checkpoint(checkpoint)
    path = tmp_path / checkpoint.name
    save_checkpoint(path, tensors, info | {name: NOTES[name]})
    with pytest.raises(RecordsError, match=name) as refused:
        load_checkpoint(path)
    assert len(str(refused.value)) < 1000


def with_header(raw, header):
    """The same tensors after another header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :]


def header_of(raw):
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def lie(**changes):
    def damage(raw):
        header = header_of(raw)
        header["best_loss"] |= changes
        return with_header(raw, header)

    return damage


def deep(raw):
    return with_header(raw, b'{"__metadata__":{"info":"x"},"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def giant(raw):
    header = header_of(raw)
    header["__metadata__"]["info"] = "[" + "0," * 2**24 + "0]"
    return with_header(raw, header)


LIES = {
    "cut in the tensors": lambda raw: raw[:-5],
    "cut in the header": lambda raw: raw[:100],
    "cut in the size": lambda raw: raw[:5],
    "longer": lambda raw: raw + b"more",
    "a size of 2**63": lambda raw: struct.pack("<Q", 2**63) + raw[8:],
    "a size past the end": lambda raw: struct.pack("<Q", len(raw)) + raw[8:],
    "a shape that is too large": lie(shape=[2**40]),
    "a negative shape": lie(shape=[-2]),
    "a shape that overflows": lie(shape=[2**33, 2**33]),
    "offsets backwards": lie(data_offsets=[16, 0]),
    "negative offsets": lie(data_offsets=[-16, 0]),
    "offsets past the end": lie(data_offsets=[0, 2**50]),
    "no type": lie(dtype="F31"),
    "another type of the same size": lie(dtype="I64"),
    "no tensors": lambda raw: with_header(raw, {"__metadata__": {}}),
    "no object": lambda raw: with_header(raw, b"[]"),
    "no JSON": lambda raw: with_header(raw, b"\xff\xfe" * 50),
    "deep": deep,
    "giant notes": giant,
}


@pytest.mark.parametrize("damage", LIES)
def test_a_header_that_lies_is_refused(checkpoint, tmp_path, damage):
    path = tmp_path / checkpoint.name
    path.write_bytes(LIES[damage](checkpoint.read_bytes()))
    with pytest.raises(RecordsError, match="cannot be used as a checkpoint") as refused:
        load_checkpoint(path)
    assert len(str(refused.value).splitlines()) == 1


def guarded(*arguments):
    """What a command line ends with: its code, and what it says where that is an error of ours."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, (SystemExit, ValueError, OSError)), result.exception
    return str(result.exception or "")


@pytest.mark.parametrize("edit", ["second moment reshaped", "best reshaped", "narrower", "all of int8"])
def test_every_command_refuses_it(checkpoint, tmp_path, edit):
    out = tmp_path / "out"
    path = train(out, SETTING)
    tensors, info = load_checkpoint(path)
    EDITS[edit](tensors)
    path.write_bytes(checkpoint_bytes(tensors, info, path.parent.name))
    for command in ("inspect", "export", "compose", "translate", "generate"):
        arguments = {"export": ["--format", "safetensors"], "translate": ["text"], "generate": ["text"]}
        told = guarded(command, path.parent, *arguments.get(command, []))
        assert told.startswith(f"{path} "), (command, told)
        assert "It was not loaded" in told
    with pytest.raises(RecordsError, match="It was not loaded"):
        load_model(path)


def test_resuming_ends_in_one_line_and_no_crash(tmp_path):
    """The command in a process of its own: this file used to write past the end of Adam's moments."""
    small_run = ["--runs", "2", "--steps", "3", "--batch", "4", "--validation", "8", "--test", "8"]
    small_run += ["--min-length", "24", "--max-length", "26", "--threads", "1", "--device", "cpu", "--out", tmp_path]

    def run(epochs):
        process = Forked(MAIN, "train", "adding", *small_run, "--epochs", epochs)
        _, errors = process.communicate()
        return process.returncode, errors

    assert run(1)[0] == 0
    (path,) = tmp_path.glob("checkpoints/*/*.safetensors")
    with safe_open(path, framework="pt") as file:
        tensors, noted = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for name in tensors:
        if name.endswith("exp_avg_sq"):
            tensors[name] = tensors[name].flatten(1)[:, :1].contiguous()
    del noted["sha256"]
    noted["sha256"] = checkpoint_digest(tensors, noted)
    path.write_bytes(save(tensors, noted))
    code, errors = run(40)
    assert code == 2, errors[-300:]
    assert errors.startswith(f"error: {path} cannot be used as a checkpoint")
    assert "exp_avg_sq" in errors
    assert len(errors.splitlines()) == 1
