"""Whatever comes from outside is read, or refused with an error of ours: no crash, no endless loop, nothing executed.

The parsers of public data have their own fuzzing beside them, in ``tests/lab/data/test_parsers.py``.
"""

import json
import sqlite3
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deepmemory.lab import cli
from deepmemory.lab.records import Records, RecordsError, load_checkpoint, merge, save_checkpoint
from deepmemory.lab.records.packing import unpack_curves
from deepmemory.lab.settings import Machine, Setting, change, setting_from_json
from deepmemory.lab.training import studies
from deepmemory.lab.training.group import group_from_checkpoint
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.trainer import make_trainer

TINY = Setting(
    transition=(2,), hidden=(2,), min_length=24, max_length=25, batch=2, steps=1, epochs=2, validation=4, test=4
)
CPU = Machine("cpu", engine="plain")

FIELDS = list(Setting.__dataclass_fields__)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@st.composite
def damaged(draw, whole):
    """A good file cut short, with bytes changed, left out or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded")
    studies.run_studies([TINY], range(2), out, CPU, PlainLines())
    merge([out], out / "merged").close()
    return out


def tell_everything(out):
    opened = Records(out)
    try:
        opened.studies()
        opened.sessions()
    finally:
        opened.close()


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_records(recorded, tmp_path, kind):
    whole = (recorded / ("merged" if kind == "packed" else "") / "records.sqlite").read_bytes()

    @settings(max_examples=150)
    @given(damaged(whole))
    @example(b"")
    @example(whole[:100])
    def fuzz(raw):
        (tmp_path / "records.sqlite").write_bytes(raw)
        with suppress(ValueError):  # RecordsError, or written in another format
            tell_everything(tmp_path)

    fuzz()


COLUMNS = [("study", column) for column in ("settings", "series", "thresholds")] + [
    *(("run", column) for column in ("seed", "state", "first_under", "best_epoch", "seconds", "session")),
    ("run", "test"),
    ("epoch", '"values"'),
    ("packed", '"values"'),
    *(("session", column) for column in ("started", "machine", "git")),
]


@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=[f"{t}.{c}" for t, c in COLUMNS])
def test_what_stands_in_records(recorded, tmp_path, table, column):
    """A database that is whole, with one column replaced by something else."""
    whole = (recorded / ("merged" if table == "packed" else "") / "records.sqlite").read_bytes()

    @settings(max_examples=25)
    @given(st.binary(max_size=40) | st.integers(-9, 9) | st.floats() | JSON.map(json.dumps))
    def fuzz(value):
        (tmp_path / "records.sqlite").write_bytes(whole)
        db = sqlite3.connect(tmp_path / "records.sqlite")
        with suppress(sqlite3.IntegrityError), db:
            db.execute(f"UPDATE {table} SET {column} = ?", (value,))
        db.close()
        with suppress(RecordsError):
            tell_everything(tmp_path)

    fuzz()


@given(st.binary(max_size=60), st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True))
def test_packed_curves(blob, series):
    import zlib

    with suppress(ValueError, zlib.error):
        unpack_curves(blob, series)
    with suppress(ValueError):
        unpack_curves(zlib.compress(blob), series)


def test_checkpoints(recorded, tmp_path):
    (path,) = recorded.glob("checkpoints/*/*.safetensors")
    whole = path.read_bytes()
    trainer = make_trainer(TINY, CPU)

    @settings(max_examples=150)
    @given(damaged(whole))
    @example(b"")
    @example(struct.pack("<Q", 2**63))
    def fuzz(raw):
        (tmp_path / "runs-0.safetensors").write_bytes(raw)
        with suppress(RecordsError):
            group_from_checkpoint(trainer, *load_checkpoint(tmp_path / "runs-0.safetensors"))

    fuzz()


@settings(max_examples=100)
@given(JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(("seeds", "rows", "epoch", "state", "under"), JSON)))
def test_notes_of_a_checkpoint(tmp_path_factory, info):
    path = tmp_path_factory.getbasetemp() / "noted.safetensors"
    save_checkpoint(path, {"best_loss": torch.zeros(1)}, info)
    with pytest.raises(RecordsError):
        load_checkpoint(path)


VALUES = st.integers(-3, 9) | st.floats() | st.text("0123456789e.,-+_ ()[]naif", max_size=8) | JSON


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES, max_size=4))
@example({"epochs": float("inf")})
@example({"epochs": float("nan")})
@example({"lr": "nan"})
@example({"lr": "inf"})
@example({"memory_bias": "nan"})
@example({"hidden": "1e9"})
@example({"hidden": [1.5]})
@example({"epochs": True})
def test_settings(changes):
    """A setting that was taken is one that can be written down and read back."""
    with suppress(ValueError):
        setting = change(Setting(), changes)
        assert setting_from_json(setting.to_json()) == setting
        assert setting_from_json(setting.to_json()).key == setting.key


@given(st.text(max_size=30) | JSON.map(json.dumps))
def test_settings_from_anything(text):
    with suppress(ValueError):
        setting_from_json(text)


WORDS = "paper train report merge data list check sweep bench inspect export adding polymusic nottingham --out nowhere "
WORDS += "--runs 0 -1 --set lr= = --cells --epochs --json --help -- --space --storage --on ray --sampler --quick "
WORDS += "lr=log:1e-4..1e-1 paper-grid"


@pytest.fixture(scope="module")
def nothing_runs(tmp_path_factory):
    """An empty folder, and commands that read their line and do nothing else."""
    from deepmemory.lab.bench import speed
    from deepmemory.lab.data import fetching
    from deepmemory.lab.scale import launch, search

    def not_here(*_, **__):
        raise ValueError("not in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        patch.delenv("DEEPMEMORY_DATA", raising=False)
        patch.setattr(launch, "launch", not_here)
        patch.setattr(search, "run_search", not_here)
        patch.setattr(fetching, "fetch_missing", lambda *_, **__: ())
        patch.setattr(speed, "bench", not_here)
        yield


@settings(max_examples=60)
@given(st.lists(st.sampled_from(WORDS.split()) | st.text(max_size=6), max_size=5))
def test_command_lines(nothing_runs, words):
    """Every line ends in a message and an exit code."""
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code in (0, 1, 2)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, (ValueError, OSError, ModuleNotFoundError)), result.exception
