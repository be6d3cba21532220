"""Searching settings: what is drawn, cut short, resumed, shared between workers, and shown."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.processes import Forked
from typer.testing import CliRunner

pytest.importorskip("optuna", reason="the search needs Optuna: pip install 'deepmemory[search]'")

from optuna.trial import TrialState

from deepmemory.lab import cli
from deepmemory.lab.records import Records
from deepmemory.lab.scale.search import SPACES, Range, parse_space, results, run, searches_in, storage, trials
from deepmemory.lab.scale.search.space import grid_points
from deepmemory.lab.settings import Machine, Setting, change
from deepmemory.lab.training import loop, stacks
from deepmemory.lab.training.progress import PlainLines

ROOT = Path(__file__).parents[3]
CPU = Machine("cpu", engine="plain")
TINY = Setting(
    transition=(2,), hidden=(2,), min_length=24, max_length=25, batch=2, steps=1, epochs=2, validation=4, test=4
)
SMALL = [f"--set={name}={getattr(TINY, name)}" for name in ("min_length", "max_length", "steps", "validation", "test")]
SMALL += ["--device", "cpu", "--engine", "plain", "--set=batch=2"]
LR = parse_space("lr=log:1e-3..1e-1")


@pytest.fixture
def search(tmp_path):
    def search(space=LR, out="out", **options):
        usual = {"seeds": [0], "out": tmp_path / out, "machine": CPU, "display": PlainLines()}
        return run.run_search(TINY, space, **usual | options)

    search.out = tmp_path / "out"
    return search


def opened(out, space=LR, sampler="tpe"):
    """The study of the same search, for another worker."""
    return run.open_search(TINY, space, seeds=[0], out=out, sampler=sampler)


def drawn(study):
    return [(trial.params, trial.value) for trial in study.get_trials() if trial.state == TrialState.COMPLETE]


def test_spaces():
    space = parse_space("lr=log:1e-4..1e-1, batch=16|32|64,hidden=5|3,2,depth=1..4,memory-bias=0..4")
    assert space == {
        "lr": Range(1e-4, 1e-1, log=True),
        "batch": ("16", "32", "64"),
        "hidden": ("5", "3,2"),
        "depth": Range(1, 4, whole=True),
        "memory_bias": Range(0, 4),
    }


@pytest.mark.parametrize("name", SPACES)
def test_shipped_spaces_hold_the_papers_rates(name):
    from deepmemory.lab import paper

    space = parse_space(name)
    if name == "paper-grid":
        rates = {lr for cells in paper.SYNTHETIC_RECIPES.values() for _, lr in cells.values()}
        assert rates == {float(rate) for rate in space["lr"]}
    for point in grid_points(space) if "random" not in name else []:
        change(TINY, point)


def test_the_guide_names_every_shipped_space():
    guide = (ROOT / "docs" / "machines.md").read_text()
    assert all(f"`{name}`" in guide for name in SPACES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a space is NAME=LOW..HIGH"),
        ("lr", "a space is NAME=LOW..HIGH"),
        ("lr=", "a space is NAME=LOW..HIGH"),
        ("rate=1..2", "'rate' cannot be searched; choose from hidden"),
        ("epochs=1..2", "'epochs' cannot be searched"),
        ("lr=1..2,lr=2..3", "'lr' is given twice"),
        ("lr=2..1", "not a range of numbers"),
        ("lr=log:0..1", "not a range of numbers"),
        ("lr=nan..1", "not a range of numbers"),
        ("lr=1..2..3", "not a range of numbers"),
        ("activation=1..2", "not a range of numbers"),
        ("batch=1.5..4", "batch takes whole numbers"),
        ("batch=1||2", "empty choice"),
    ],
)
def test_spaces_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_space(text)


@given(st.text("lrbatchmodule_=.|:,0123456789e-+ "))
def test_any_text_is_a_space_or_a_mistake(text):
    with suppress(ValueError):
        assert parse_space(text)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_trials_count_towards_the_total_and_are_the_same_in_pieces(search, monkeypatch, sampler):
    whole = search(out="whole", sampler=sampler, trials=4, pruner="none")
    search(out="pieces", sampler=sampler, trials=2, pruner="none")
    pieces = search(out="pieces", sampler=sampler, trials=4, pruner="none")
    assert drawn(pieces) == drawn(whole)
    assert len(drawn(whole)) == 4
    monkeypatch.setattr(loop, "train", None)
    assert drawn(search(out="whole", sampler=sampler, trials=3, pruner="none")) == drawn(whole)


def test_a_grid_is_visited_once_each_point(search):
    study = search(parse_space("lr=0.01|0.02,batch=2|3"), sampler="grid")
    assert [params for params, _ in drawn(study)] == [
        {"lr": lr, "batch": batch} for lr in ("0.01", "0.02") for batch in ("2", "3")
    ]
    with pytest.raises(ValueError, match=r"a grid needs choices: give lr=A\|B\|C"):
        search(sampler="grid")


def test_what_cannot_be_trained_is_refused_before_anything_is(search, tmp_path):
    with pytest.raises(ValueError, match="depth belongs to the cell rhn"):
        search(parse_space("depth=2|3"))
    assert not list(tmp_path.rglob("*.sqlite"))


def losing(monkeypatch, losses):
    """Every trial's validation loss is what ``losses`` says of its learning rate."""
    original = loop.finish_epoch

    def finish(trainer, group, values, seconds):
        loss = losses(trainer.setting.lr)
        return original(trainer, group, [one | {"valid_loss": loss} for one in values], seconds)

    monkeypatch.setattr(loop, "finish_epoch", finish)


def test_bad_trials_are_stopped_early(search, monkeypatch):
    losing(monkeypatch, lambda lr: lr)
    study = search(parse_space("lr=0.01|0.02|0.03|0.04|0.05|0.9|0.015"), sampler="grid")
    states = {float(trial.params["lr"]): (trial.state, trial.last_step) for trial in study.get_trials()}
    assert states[0.9] == (TrialState.PRUNED, 1)
    assert states[0.015] == (TrialState.COMPLETE, 2)
    assert study.best_value == pytest.approx(0.01)
    assert [row["lr"] for row in results.table(study)][-1] == "0.9"


def test_of_large_networks_the_first_run_reports_and_may_be_stopped(search, monkeypatch):
    monkeypatch.setattr(stacks, "LARGE_NETWORK", 1)
    losing(monkeypatch, lambda lr: lr)
    study = search(parse_space("lr=0.01|0.02|0.03|0.04|0.05|0.9"), sampler="grid", seeds=[0, 1])
    for trial in study.get_trials():
        lr = float(trial.params["lr"])
        state, epochs = (TrialState.PRUNED, [1]) if lr == 0.9 else (TrialState.COMPLETE, [1, 2])
        assert (trial.state, trial.value) == (state, pytest.approx(lr))
        assert trial.intermediate_values == pytest.approx(dict.fromkeys(epochs, lr))


def test_a_trial_of_large_networks_is_worth_the_median_of_its_runs(search, monkeypatch):
    monkeypatch.setattr(stacks, "LARGE_NETWORK", 1)
    together, train = [], loop.train

    def of_one(trainer, group):
        together.append(len(group.seeds))
        return train(trainer, group)

    monkeypatch.setattr(loop, "train", of_one)
    study = search(sampler="random", trials=2, seeds=[0, 1, 2], pruner="none")
    assert together == [1] * 6
    with Records(search.out / "sweeps" / study.study_name) as records:
        for trial in study.get_trials():
            curves = [one.curves["valid_loss"] for one in records.study(trial.user_attrs["study"]).runs]
            assert trial.value == pytest.approx(sorted(map(min, curves))[1])
            assert trial.intermediate_values == pytest.approx({1: curves[0][0], 2: min(curves[0])})


def test_a_trial_whose_loss_is_no_number_is_the_worst(search, monkeypatch):
    losing(monkeypatch, lambda lr: math.nan if lr > 0.015 else lr)
    study = search(parse_space("lr=0.02|0.01"), sampler="grid")
    assert [trial.value for trial in study.get_trials()] == [math.inf, pytest.approx(0.01)]
    assert results.draw(study) is not None


def test_a_trial_that_fails_is_tried_again_then_given_up_and_the_rest_goes_on(search, monkeypatch, capsys):
    original, failures = loop.finish_epoch, []

    def finish(trainer, *args):
        if trainer.setting.lr == 0.02:
            failures.append(1)
            raise RuntimeError("no room")
        return original(trainer, *args)

    monkeypatch.setattr(loop, "finish_epoch", finish)
    study = search(parse_space("lr=0.01|0.02|0.03"), sampler="grid")
    assert len(failures) == trials.ATTEMPTS
    assert [params["lr"] for params, _ in drawn(study)] == ["0.01", "0.03"]
    counts = trials.count_trials(study.get_trials())
    assert (counts.counted, counts.to_retry) == (3, [])
    assert [trial.params["lr"] for trial in trials.failed_trials(study)] == ["0.02"]
    assert "failed (no room)" in capsys.readouterr().out


def test_stopped_by_hand_a_trial_resumes_from_its_checkpoint(search, monkeypatch):
    undisturbed = drawn(search(out="undisturbed", sampler="random", trials=2))
    original, epochs = loop.finish_epoch, []

    def finish(*args):
        epochs.append(1)
        if len(epochs) == 4:  # the last one of the second trial
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(loop, "finish_epoch", finish)
    for _ in range(2):
        try:
            study = search(out="stopped", sampler="random", trials=2)
        except KeyboardInterrupt:
            continue
    assert drawn(study) == undisturbed
    assert len(epochs) == 5


WORKER = """
from deepmemory.lab import cli
from deepmemory.lab.scale.search import run, storage
storage.HEARTBEAT, storage.SILENCE, run.POLL = 1, 3, 0.2
cli.main()
"""


def start(*arguments):
    return Forked(WORKER, "sweep", "adding", *SMALL, *arguments)


def share_a_search(tmp_path, storage):
    """Three workers; one is killed in the middle of a trial. All points are visited once, and somebody ends it."""
    command = ["--space", "lr=0.001|0.01|0.02|0.05", "--sampler", "grid", "--pruner", "none"]
    command += ["--set=epochs=4", "--json", *storage]
    killed = start(*command, "--out", tmp_path / "a")
    for line in killed.stdout:
        if json.loads(line)["event"] == "epoch":
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    workers = [start(*command, "--out", tmp_path / name) for name in ("a", "b" if storage else "a")]
    try:
        ended = [(worker, *worker.communicate(timeout=120)) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output, errors in ended:
        assert worker.returncode == 0, errors
        result = json.loads(output.splitlines()[-1])
        assert sorted(row["lr"] for row in result["trials"]) == ["0.001", "0.01", "0.02", "0.05"]
        assert {row["state"] for row in result["trials"]} == {"complete"}


def test_workers_share_a_search_in_sqlite(tmp_path):
    share_a_search(tmp_path, [])
    (study,) = searches_in(storage.default_storage(tmp_path / "a"))
    all_trials = study.get_trials()
    (heir, *_) = [trial for trial in all_trials if "retries" in trial.user_attrs]
    dead = all_trials[heir.user_attrs["retries"]]
    assert dead.state == TrialState.FAIL
    assert heir.params == dead.params


def test_no_two_workers_take_the_same_trial(tmp_path):
    """Both look at once, over and over: SQLite by itself lets both of them have what they see."""
    studies = [opened(tmp_path) for _ in range(2)]
    for _ in range(40):
        studies[0].enqueue_trial({"lr": 0.01}, skip_if_exists=False)
    taken, together = [], threading.Barrier(2)

    def take(study):
        together.wait()
        while (number := study.ask().number) < 40:
            taken.append(number)

    with ThreadPoolExecutor() as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna: no signs of life without optimize
        list(pool.map(take, studies))
    assert sorted(taken) == list(range(40))


def ask(study):
    """What another worker would take from the queue."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna: no signs of life without optimize
        return study.ask()


def test_a_worker_waits_for_the_trial_that_another_takes_while_it_looks(search, monkeypatch):
    space = parse_space("lr=0.01|0.02")
    other = opened(search.out, space, "grid")
    original, taken = trials.count_trials, []

    def count(known):  # called right after a look at the trials
        seen = original(known)
        if not taken and [trial.state for trial in known] == [TrialState.COMPLETE, TrialState.WAITING]:
            taken.append(ask(other))
        return seen

    def sleep(_):
        taken[0].suggest_categorical("lr", space["lr"])
        other.tell(taken[0], 0.5)

    monkeypatch.setattr(run, "count_trials", count)
    monkeypatch.setattr(run, "time", SimpleNamespace(sleep=sleep))
    study = search(space, sampler="grid")
    assert [params["lr"] for params, _ in drawn(study)] == ["0.01", "0.02"]
    assert drawn(study)[1][1] == 0.5


@pytest.mark.parametrize("known", [[], ["lr"]], ids=["none", "one"])
def test_a_worker_that_died_before_it_knew_all_settings_takes_no_point_with_it(search, known):
    gammas = ["0.5", "0.6", "0.7", "0.8", "0.9", "1.0"]
    space = parse_space(f"lr=0.01,gamma={'|'.join(gammas)}")
    study = opened(search.out, space, "grid")
    study.enqueue_trial({"lr": "0.01", "gamma": "0.8"}, {"point": 3})
    dead = ask(study)
    for name in known:
        dead.suggest_categorical(name, space[name])
    study.tell(dead, state=TrialState.FAIL)
    assert sorted(params["gamma"] for params, _ in drawn(search(space, sampler="grid"))) == gammas


def test_a_point_that_two_workers_queued_is_trained_once_though_one_of_them_dies(search):
    space = parse_space("lr=0.01|0.02")
    study = opened(search.out, space, "grid")
    for _ in range(2):
        study.enqueue_trial({"lr": "0.01"}, {"point": 0})
    dead = ask(study)
    dead.suggest_categorical("lr", space["lr"])
    study.tell(dead, state=TrialState.FAIL)
    assert sorted(params["lr"] for params, _ in drawn(search(space, sampler="grid"))) == ["0.01", "0.02"]


@pytest.mark.parametrize("known", [[], ["lr"]], ids=["none", "all"])
def test_fewer_trials_than_before_end_what_was_begun(search, known):
    """A call for all points, of which one fails and the others are trained, then a call for the first point alone."""
    space = parse_space("lr=0.01|0.02")
    study = opened(search.out, space, "grid")
    failed = "0.02" if known else "0.01"
    for place, lr in enumerate(space["lr"]):
        study.enqueue_trial({"lr": lr}, {"point": place})
        trial = ask(study)
        for name in known if lr == failed else ["lr"]:
            trial.suggest_categorical(name, space[name])
        study.tell(trial, *([None, TrialState.FAIL] if lr == failed else [0.5]))
    assert sorted(params["lr"] for params, _ in drawn(search(space, sampler="grid", trials=1))) == ["0.01", "0.02"]


def test_no_trial_is_made_up_for_one_that_is_about_to_be_tried_again(search):
    study = opened(search.out)
    dead, new = ask(study), ask(study)
    dead.suggest_float("lr", 1e-3, 1e-1)
    study.tell(dead, state=TrialState.FAIL)
    assert trials.is_surplus(study.get_trials(), new.number, total=1)
    assert not trials.is_surplus(study.get_trials(), new.number, total=2)


def test_a_worker_that_was_taken_for_dead_goes_on_with_the_next_trial(search, monkeypatch, capsys):
    original, taken = loop.finish_epoch, []

    def finish(*args):
        if not taken:
            (study,) = searches_in(storage.default_storage(search.out))
            taken.append(study.tell(0, state=TrialState.FAIL))
        return original(*args)

    monkeypatch.setattr(loop, "finish_epoch", finish)
    study = search(parse_space("lr=0.01|0.02"), sampler="grid")
    assert sorted(params["lr"] for params, _ in drawn(study)) == ["0.01", "0.02"]
    assert "trial 0 sent no heartbeat" in capsys.readouterr().out


@pytest.fixture
def postgres(tmp_path):
    """A server of this test's own; it refuses to run as root."""
    programs = [shutil.which(name) for name in ("initdb", "pg_ctl", "runuser")]
    if not all(programs[:2]) or (os.getuid() == 0 and not programs[2]):
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg", reason="needs pip install 'deepmemory[search]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    as_user = ["runuser", "-u", "nobody", "--"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        place = Path(folder) / "data"

        def tell(*command):
            done = subprocess.run([*as_user, *command], cwd=folder, capture_output=True, text=True, timeout=60)
            if done.returncode:
                pytest.skip(f"PostgreSQL does not start here: {done.stderr.strip()[-200:]}")

        tell(programs[0], "-D", str(place), "-U", "searcher", "--auth=trust", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        tell(programs[1], "-D", str(place), "-o", options, "-l", f"{folder}/log", "-w", "start")
        try:
            yield f"postgresql://searcher@127.0.0.1:{port}/postgres"
        finally:
            tell(programs[1], "-D", str(place), "-m", "immediate", "stop")


def test_machines_share_a_search_in_postgresql(tmp_path, postgres):
    share_a_search(tmp_path, ["--storage", postgres])


def test_the_command_searches_reports_and_resumes(tmp_path):
    command = ["sweep", "adding", *SMALL, "--set=epochs=2", "--space", "paper-random", "--sampler", "random"]
    done = CliRunner().invoke(cli.app, [*command, "--trials", "3", "--runs", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("; best ") == 3
    page = tmp_path / "report" / "sweeps.html"
    assert f"page: {page}" in done.output
    page.unlink()
    again = CliRunner().invoke(cli.app, [*command, "--trials", "3", "--runs", "2", "--out", str(tmp_path)])
    assert "; best " not in again.output
    page.unlink()
    report = CliRunner().invoke(cli.app, ["report", "--out", str(tmp_path)])
    assert report.exit_code == 0
    text = page.read_text()
    assert "data:image/svg+xml" in text
    assert text.count("<tr><td>") == 3
    assert list(page.parent.glob("adding-dmu-*.svg"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampler", "best"], "unknown sampler 'best'; choose from tpe, random, grid"),
        (["--pruner", "harsh"], "unknown pruner 'harsh'; choose from median, halving, none"),
        (["--storage", "nowhere"], "--storage nowhere cannot be used"),
        (["--storage", "oracle9://x"], "--storage oracle9://x cannot be used"),
        (["--space", "lr=a..b"], "not a range of numbers"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["dmu", "sweep", "adding", *SMALL, "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_damaged_storage_is_named_and_passwords_are_not(tmp_path):
    (tmp_path / "sweeps.sqlite").write_bytes(b"garbage" * 999)
    with pytest.raises(ValueError, match=r"sweeps.sqlite cannot be opened: .*file is not a database"):
        searches_in(storage.default_storage(tmp_path))
    shown = storage.without_password("postgresql+psycopg://me:secret@host:5432/name")
    assert shown == "postgresql+psycopg://me:***@host:5432/name"


def test_a_storage_may_have_braces_in_its_name(tmp_path):
    storage.open_storage(f"sqlite:///{tmp_path}/a{{}}b.sqlite")
    assert (tmp_path / "a{}b.sqlite").exists()


def test_a_storage_that_fails_in_the_middle(tmp_path, monkeypatch, capsys):
    """The last page of the database is gone while a trial trains."""
    original = loop.finish_epoch

    def finish(*args):
        path = tmp_path / "sweeps.sqlite"
        path.write_bytes(b"garbage" * 999)
        return original(*args)

    monkeypatch.setattr(loop, "finish_epoch", finish)
    monkeypatch.setattr(sys, "argv", ["dmu", "sweep", "adding", *SMALL, "--set=epochs=2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "error: the search's storage cannot be used" in capsys.readouterr().err


def test_without_optuna_the_command_says_what_to_install():
    hide = "import sys; sys.modules['optuna'] = None; sys.argv = ['dmu', 'sweep', 'adding']; "
    code = hide + "from deepmemory.lab import cli; cli.main()"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "error: the search needs Optuna: pip install 'deepmemory[search]'" in told.stderr
