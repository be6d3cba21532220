"""Merged records hold what the sources hold, in less space."""

import sqlite3
from dataclasses import replace

import pytest
import torch
from lab.stories import TINY, carry_out, told

from deepmemory.lab.records import Records, merge
from deepmemory.lab.records.packing import pack
from deepmemory.lab.tasks import series_of

SERIES = series_of("adding")


def test_merged_records_take_less_room_and_lose_nothing(tmp_path):
    opened = Records(tmp_path / "rows", write=True)
    study = opened.open_study(TINY, SERIES)
    opened.begin(study, range(51), 0, opened.open_session("cpu", "plain"))
    for epoch in range(1, 101):
        losses = (1 + torch.rand(51, 2)) * 0.9**epoch  # like real ones: much the same size, and noise
        values = {seed: dict(zip(SERIES, [*of_run, 1.0], strict=True)) for seed, of_run in enumerate(losses.tolist())}
        states, best = dict.fromkeys(values, "spent"), dict.fromkeys(values, epoch)
        opened.write_epoch(study, epoch, values, states, best, 1.0)
    opened.close()
    merge([tmp_path / "rows"], tmp_path / "packed").close()
    assert told(tmp_path / "packed") == told(tmp_path / "rows")
    sizes = [(tmp_path / name / "records.sqlite").stat().st_size for name in ("rows", "packed")]
    assert sizes[1] < 0.7 * sizes[0]


def test_merged_machines_tell_what_one_machine_tells(tmp_path):
    carry_out(tmp_path / "a", seeds=[0, 1])
    carry_out(tmp_path / "b", seeds=[2, 3])
    carry_out(tmp_path / "b", replace(TINY, cell="gru", transition=()), seeds=[0])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c").close()
    assert told(tmp_path / "c") == told(tmp_path / "a") | told(tmp_path / "b")
    longer = replace(TINY, epochs=5)
    at_once = carry_out(tmp_path / "at once", longer, range(4))
    assert {
        key: story for key, story in carry_out(tmp_path / "c", longer, range(4)).items() if key in at_once
    } == at_once


def test_merging_the_same_run_twice_takes_the_longer_one(tmp_path):
    carry_out(tmp_path / "short", replace(TINY, epochs=2))
    whole = carry_out(tmp_path / "long")
    merge([tmp_path / "short", tmp_path / "long"], tmp_path / "merged").close()
    assert told(tmp_path / "merged") == whole


def test_contradictions_are_refused(tmp_path):
    carry_out(tmp_path / "a")
    carry_out(tmp_path / "b")
    with sqlite3.connect(tmp_path / "b" / "records.sqlite") as db:
        db.execute('UPDATE epoch SET "values" = ? WHERE run = 2 AND epoch = 3', (pack([1, 2, 3]),))
    db.close()
    with pytest.raises(ValueError, match=r"seed 1: .* differ at epoch 3"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(FileExistsError, match="has records already"):
        merge([tmp_path / "a"], tmp_path / "b")
