"""Small files that would cost a lot: what they may cost is bounded, and they are refused in a line that says why."""

import json
import sqlite3
import struct
import zlib

import pytest
import torch
from lab.checkpoints import small, train
from typer.testing import CliRunner

from deepmemory.lab import cli
from deepmemory.lab.data import DataError, files
from deepmemory.lab.data import pairs as sentences
from deepmemory.lab.data.pairs import parse_pairs
from deepmemory.lab.records import Records, RecordsError, merge
from deepmemory.lab.records.packing import LARGEST_UNPACKED, UnpackingLimit, unpack_curves
from deepmemory.lab.report import write_report
from deepmemory.lab.settings import MOST, MOST_LAYERS, Setting
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import weight_count
from deepmemory.lab.use import sound
from deepmemory.lab.use.loading import load_model
from deepmemory.lab.use.sound import midi, roll_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("limits")
    path = train(out, small())
    merge([out], out / "merged").close()
    return path


@pytest.fixture
def received(recorded, tmp_path):
    """A copy of a folder, its records packed, that may be spoilt."""
    source = recorded.parents[2] / "merged"
    for path in (p for p in source.rglob("*") if p.is_file() and "locks" not in p.parts):
        copy = tmp_path / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


def spoil(out, *statements):
    db = sqlite3.connect(out / "records.sqlite")
    with db:
        for statement in statements:
            db.execute(*statement if isinstance(statement, tuple) else (statement,))
    db.close()


def refusal(out):
    """What the report says, in a short message."""
    result = CliRunner().invoke(cli.app, ["report", "--out", str(out)])
    assert isinstance(result.exception, ValueError), result.exception
    assert len(str(result.exception)) < 2000
    return str(result.exception)


@pytest.mark.parametrize("table", ["packed", "packed_watch"])
def test_packed_runs_have_a_limit(received, table):
    bomb = zlib.compress(bytes(LARGEST_UNPACKED + 4), 9)
    assert len(bomb) < 2**18
    spoil(received, (f'INSERT OR REPLACE INTO {table} ("values", run) SELECT ?, id FROM run', (bomb,)))
    assert f"unpacks to more than the expected {LARGEST_UNPACKED} bytes" in refusal(received)


def test_the_limit_is_for_all_of_them_together():
    limit = UnpackingLimit(40)
    blob = zlib.compress(bytes(24))
    assert unpack_curves(blob, ["a", "b"], limit) == {"a": (0, 0, 0), "b": (0, 0, 0)}
    with pytest.raises(ValueError, match="more than the expected 16 bytes"):
        unpack_curves(blob, ["a", "b"], limit)


FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i"
SCHEMES = {
    "a view of studies": ["DROP TABLE study", f"CREATE VIEW study AS {FOREVER} AS id, i AS key FROM n"],
    "a view of epochs": ["DROP TABLE epoch", f"CREATE VIEW epoch AS {FOREVER} AS run, i AS epoch FROM n"],
    "a view of versions": [f"CREATE VIEW version AS {FOREVER} FROM n"],
    "a trigger": ["CREATE TRIGGER often AFTER INSERT ON epoch BEGIN DELETE FROM run; END"],
    "a computed column": ["ALTER TABLE run ADD COLUMN more AS (hex(zeroblob(500000000)))"],
    "a virtual table": ["CREATE VIRTUAL TABLE more USING fts5(a)"],
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("write", [False, True])
def test_a_database_holds_values_and_computes_none(received, scheme, write):
    spoil(received, *SCHEMES[scheme])
    before = (received / "records.sqlite").read_bytes()
    with pytest.raises(RecordsError, match=r"records.sqlite was not written by deepmemory"):
        Records(received, write=write)
    assert (received / "records.sqlite").read_bytes() == before


def test_neither_does_one_of_searches(tmp_path):
    pytest.importorskip("optuna")
    from deepmemory.lab.scale import search

    search.open_storage(search.default_storage(tmp_path))
    (tmp_path / "sweeps.sqlite").rename(tmp_path / "records.sqlite")
    spoil(tmp_path, "DROP TABLE trials", f"CREATE VIEW trials AS {FOREVER} AS trial_id, i AS study_id FROM n")
    (tmp_path / "records.sqlite").rename(tmp_path / "sweeps.sqlite")
    assert "'trials' should be a table of values, got a view" in refusal(tmp_path)


def settings_with(out, **changes):
    (text,) = sqlite3.connect(out / "records.sqlite").execute("SELECT settings FROM study").fetchone()
    spoil(out, ("UPDATE study SET settings = ?", (json.dumps(json.loads(text) | changes),)))


@pytest.mark.parametrize("name", [name for name in MOST if name not in ("depth", "window", "pairs", "limit")])
def test_absurd_settings_are_refused(received, name):
    most = MOST[name]
    settings_with(received, **{name: [2**40] if name in ("hidden", "transition") else most + 1})
    assert f"{name} should be at most {most}" in refusal(received)
    (checkpoint,) = received.glob("checkpoints/*/*.safetensors")
    with pytest.raises(RecordsError, match=f"{name} should be at most"):
        load_model(checkpoint)


def test_so_are_very_many_layers(received):
    settings_with(received, hidden=[1] * 10**5)
    assert f"hidden should list at most {MOST_LAYERS} layers, got 100000" in refusal(received)


def test_a_network_is_made_only_where_its_weights_are_there(received):
    """64 layers of 65,536 units would take terabytes."""
    settings_with(received, hidden=[2**16] * 64, transition=[2**16] * 8)
    (checkpoint,) = received.glob("checkpoints/*/*.safetensors")
    with pytest.raises(RecordsError, match="does not fit this network"):
        load_model(checkpoint)
    write_report(received)
    large = Setting(cell="gru", hidden=(2**16,) * 64)
    assert weight_count(large, task_of(large)) > 2**40


VALUES = {
    "seed": "<script>",
    "state": "fine",
    "first_under": '["<b>", null, null, null, null]',
    "best_epoch": "soon",
    "seconds": 1e999,
    "session": 99,
}


@pytest.mark.parametrize("column", VALUES)
def test_a_row_has_the_values_of_a_run(received, column):
    spoil(received, (f"UPDATE run SET {column} = ? WHERE seed = 0", (VALUES[column],)))
    assert "is not a valid run" in refusal(received)


SEVEN = b"\0\0\0\0" * 7


@pytest.mark.parametrize(
    "statement", ["UPDATE run SET test = ?", 'INSERT INTO epoch (run, epoch, "values") SELECT id, 1, ? FROM run']
)
def test_values_are_as_many_as_their_names(received, statement):
    spoil(received, (statement, (SEVEN,)))
    error = refusal(received)
    assert "expected one value for each of " in error
    assert "got 7 values" in error


def test_texts_from_records_are_texts_on_every_page(received):
    said = 'x86 <script>alert(1)</script> [a](javascript:b) ![p](http://q) | c\n\n# D <img src="x">'
    (machine,) = sqlite3.connect(received / "records.sqlite").execute("SELECT machine FROM session").fetchone()
    spoil(received, ("UPDATE session SET machine = ?", (json.dumps(json.loads(machine) | {"system": said}),)))
    written = write_report(received)
    for page in (written.page, written.markdown):
        text = page.read_text()
        assert "alert(1)" in text
        assert "<script>alert" not in text
        assert "<img src=" not in text
    text = written.markdown.read_text()
    assert "](javascript" not in text
    assert "](http://q" not in text
    assert "\n# D" not in text


PAIRS = {
    "lines": (lambda: b"a\tb\n" * (sentences.MOST_LINES + 1), f"more than the limit of {sentences.MOST_LINES} lines"),
    "empty lines": (lambda: b"\n" * (sentences.MOST_LINES + 1), f"more than the limit of {sentences.MOST_LINES} lines"),
    "a long line": (lambda: b"a\tb\n" + b"a" * (sentences.LONGEST_LINE + 1), "line 2 .* is longer than"),
    "words": (lambda: (b"a\t" + b"b " * 2000 + b"\n") * 2200, "more than .* words"),
    "different words": (
        lambda: "\n".join(f"a\t{letters(n)}" for n in range(sentences.MOST_KINDS + 1)).encode(),
        "different ones",
    ),
}


def letters(number):
    return "".join(chr(97 + int(digit)) for digit in str(number))


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_are_bounded(kind):
    make, message = PAIRS[kind]
    with pytest.raises(DataError, match=message):
        parse_pairs(make(), "portuguese")


def test_words_of_pairs_share_their_memory():
    (first, second) = sentences.split_all(["some words", "words and some"])
    assert first[1] is second[0]


def test_a_file_of_unknown_size_is_bounded():
    assert files.LARGEST <= 2**26


def song(*tracks):
    head = b"MThd" + struct.pack(">IHHH", 6, 1, len(tracks), 96)
    return head + b"".join(b"MTrk" + struct.pack(">I", len(track)) + track for track in tracks)


def test_a_time_in_midi_has_four_bytes():
    """A longer one takes a time that grows with the square of its length, and no float can hold it."""
    with pytest.raises(DataError, match="longer than 4 bytes"):
        roll_of(song(b"\0\x90\x30\x40" + b"\xff" * 2**20 + b"\x7f\x80\x30\0"))


def test_a_midi_file_is_bounded(tmp_path):
    (tmp_path / "large.mid").write_bytes(b"MThd" + bytes(sound.LARGEST))
    with pytest.raises(DataError, match=f"more than the limit of {sound.LARGEST} bytes"):
        sound.read_roll(tmp_path / "large.mid")


def test_many_long_notes_make_one():
    roll = roll_of(song(*[b"\0\x90\x30\x40\xdf\xff\x7f\x80\x30\0"] * 60_000))
    assert roll[:, 27].all()
    assert int(roll.sum()) == len(roll)


def test_notes_that_overlap_and_meet():
    made = torch.zeros(8, 88, dtype=torch.uint8)
    made[1:4, 5] = made[4:6, 9] = made[7, 5] = 1
    assert torch.equal(roll_of(midi(made)), made)
    both = song(b"\0\x90\x30\x40\x60\x80\x30\0", b"\x30\x90\x30\x40\x81\x40\x80\x30\0")
    assert roll_of(both)[:, 27].tolist() == [1] * 5
