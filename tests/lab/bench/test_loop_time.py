"""How long studies would take as a Python loop: timed on a few steps, kept beside the records, told by the report."""

from dataclasses import replace

import pytest
import torch
from lab import real_data
from lab.made_studies import made, record

from deepmemory.lab import cli, paper
from deepmemory.lab.bench import loop_time
from deepmemory.lab.bench.loop_time import LoopTime, key_of, measure, read, write
from deepmemory.lab.report import write_report
from deepmemory.lab.settings import Machine, Setting, change
from deepmemory.lab.training import trainer

CPU = Machine("cpu", threads=1)
SMALL = Setting(hidden=(3,), min_length=24, max_length=26, batch=4, steps=6, epochs=7)
REAL = {task: Setting(task, hidden=(4,), batch=4) for task in real_data.TASKS}


@pytest.mark.parametrize("cell", ["dmu", "lstm"])
@pytest.mark.parametrize("task", REAL)
def test_every_task_can_be_timed(task, cell, monkeypatch):
    made_task = real_data.TASKS[task]()
    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", lambda setting, data: made_task)
    setting = change(REAL[task], {"cell": cell} | ({"window": 5} if task == "natlang" else {}))
    found = measure(setting, CPU)
    assert found.key == key_of(setting)
    feed = made_task.feed(0, setting, torch.zeros(1, dtype=torch.int64), 4, torch.float32)
    assert found.steps == len(feed.plan(0))
    assert found.step_seconds > 0


def test_a_run_is_all_of_its_steps():
    assert LoopTime("key", "name", step_seconds=0.5, steps=20).run_seconds(epochs=3) == 30


def test_what_is_timed_is_a_plain_loop_that_learns(monkeypatch):
    """The same weights change as in any training step: none is left out, and no fused engine takes part."""
    seen = []
    original = trainer.make_trainer

    def watched(setting, machine):
        made = original(setting, machine)
        seen.append((machine, made.network, [p.detach().clone() for p in made.network.parameters()]))
        return made

    monkeypatch.setattr(trainer, "make_trainer", watched)
    found = measure(SMALL, CPU, steps=2)
    (machine, network, before) = seen[0]
    assert machine.engine == "plain"
    assert not machine.graph
    assert all((old != new).any() for old, new in zip(before, network.parameters(), strict=True))
    assert found.steps == 6


def test_times_accumulate_in_a_file_beside_the_records(tmp_path):
    gru = change(SMALL, {"cell": "gru"})
    assert read(tmp_path) == []
    write([SMALL], CPU, tmp_path)
    write([gru], CPU, tmp_path)
    assert [one.key for one in read(tmp_path)] == [key_of(SMALL), key_of(gru)]
    write([SMALL], CPU, tmp_path)
    assert len(read(tmp_path)) == 2


def test_studies_that_differ_in_their_rates_or_start_are_timed_once(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(loop_time, "measure", lambda s, machine: timed.append(s) or LoopTime(key_of(s), "", 0.9, 1))
    deep = paper.setting("natlang", "dmu", 5)
    others = [paper.setting("natlang", "dmu-c", 5), change(deep, {"lr": 0.5, "weight_decay": 0.1, "gamma": 0.5})]
    kept = [paper.setting("pixel-mnist", cell) for cell in ("dmu", "gru", "lstm")]
    plain = [
        replace(kept[0], memory_bias=0),
        replace(kept[1], update_bias=0),
        replace(kept[2], forget_bias=0, input_bias=0),
    ]
    write([deep, *others, *kept, *plain], CPU, tmp_path, lambda text: None)
    assert timed == [deep, *kept]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / loop_time.FILE).write_text('{"studies": [{"key": 1}]}')
    with pytest.raises(ValueError, match=r"loop\.json cannot be read"):
        read(tmp_path)


def test_the_report_sets_a_loops_hours_beside_ours(tmp_path, monkeypatch):
    setting, other = paper.setting("natlang", "dmu", 1), paper.setting("natlang", "rhn", 1)
    record(tmp_path, [made(setting, [106.0] * 5), made(other, [110.0] * 5)])
    monkeypatch.setattr(loop_time, "measure", lambda setting, machine: LoopTime(key_of(setting), "", 0.9, 1000))
    write([setting], CPU, tmp_path, say=lambda text: None)
    text = (write_report(tmp_path).page.parent / "real.md").read_text()
    assert "As a Python loop, one run after another: about 50.0 hours for 1 of them." in text
    assert f"extrapolated from {loop_time.STEPS} training steps" in text


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper, "settings", lambda tasks: [SMALL])
    cli.app(["bench", "--studies", "adding", "--device", "cpu", "--out", str(tmp_path)], standalone_mode=False)
    assert [one.key for one in read(tmp_path)] == [key_of(SMALL)]
    assert "hours for a run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="task"):
        cli.app(["bench", "--studies", "singing", "--out", str(tmp_path)], standalone_mode=False)
