"""What came from somebody else decides neither where files are written nor what a page does."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab.checkpoints import small, train
from lab.data.making import served
from lab.data.test_fetching import BODY, NOTTINGHAM, Pages, serving

from deepmemory.lab.cli import results, use
from deepmemory.lab.data.fetching import fetch
from deepmemory.lab.records import hold_lock, load_checkpoint, save_checkpoint
from deepmemory.lab.report import write_report
from deepmemory.lab.report.words import figure_name
from deepmemory.lab.settings import Machine
from deepmemory.lab.training import studies
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.writing import LinkError, file_name

CPU = Machine("cpu", engine="plain", threads=1)
STRANGE = ["../../x", "/etc/x", "..", ".", "", ".hidden", "a/b", "a\\b", "a\0b", "a\nb", "A", "x" * 300, "é", "\ud800"]


@pytest.mark.parametrize("name", ["adding-dmu-0123456789ab", "gradients-adding-max_length-55", "x", "1e-05", "a.b_c"])
def test_ordinary_names_stay(name):
    assert file_name(name) == name


@given(st.lists(st.text(max_size=200) | st.sampled_from(STRANGE), unique=True, max_size=30))
@example(STRANGE)
@example([file_name(name) for name in STRANGE if name != "x"] + STRANGE)
def test_names_never_leave_their_folder_nor_meet(names):
    made = {file_name(name).lower() for name in dict.fromkeys(names)}  # also where A and a are one file
    assert len(made) == len(set(names))
    for name in made:
        assert Path(name).name == name
        assert len(name) <= 120
        assert not name.startswith(".")


def test_figures_have_the_names_they_had():
    assert figure_name("adding", [("hidden", (7,)), ("module_rate", "0.001")]) == "adding-hidden-_7__-module_rate-0.001"
    assert figure_name("a", [("hidden", (7, 2)), ("lr", 1e-05)]) == "a-hidden-_7__2_-lr-1e-05"
    assert len(figure_name("adding", [("hidden", (7,) * 500)])) <= 120


def searches(out, names):
    optuna = pytest.importorskip("optuna")
    from deepmemory.lab.scale import search

    storage = search.open_storage(search.default_storage(out))
    for name in names:
        study = optuna.create_study(storage=storage, study_name=name)
        study.enqueue_trial({"x": 1.0})
        study.optimize(lambda trial: trial.suggest_float("x", 0, 2), n_trials=1)


def test_the_name_of_a_search_is_no_path(tmp_path):
    out = tmp_path / "a" / "b" / "received"
    out.mkdir(parents=True)
    names = ["../../../x", str(tmp_path / "y"), "adding-dmu-0123456789ab", "a/b", "a_b", "<script>alert(1)</script>"]
    searches(out, names)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    results.report(out, as_json=True)
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent for path in written} == {out / "report"}
    assert len(written) == len(names) + 1
    assert out / "report" / "adding-dmu-0123456789ab.svg" in written
    assert "<script>alert" not in (out / "report" / "sweeps.html").read_text()


@pytest.fixture
def precious(tmp_path):
    """A file outside of the folder that was received; it is there, and the same, in the end."""
    path = tmp_path / "precious"
    path.write_bytes(b"kept")
    yield path
    assert path.read_bytes() == b"kept"
    assert path.stat().st_nlink <= 2


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    out = tmp_path_factory.mktemp("received")
    return out, train(out, small())


def copied(received, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(received[0], out)
    return out, out / received[1].relative_to(received[0])


def unfinished(path):
    """Where this process writes a file before it has its name."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")


def test_a_checkpoint_is_written_beside_a_link(received, tmp_path, precious):
    _, path = copied(received, tmp_path)
    tensors, info = load_checkpoint(path)
    unfinished(path).symlink_to(precious)
    path.unlink()
    path.symlink_to(precious)
    save_checkpoint(path, tensors, info)
    assert not path.is_symlink()
    assert load_checkpoint(path)[1] == info


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_is_a_link_is_refused(tmp_path, precious, link):
    path = tmp_path / "out" / "locks" / "study.lock"
    path.parent.mkdir(parents=True)
    link(path, precious)
    with pytest.raises(LinkError, match=r"study.lock is a "), hold_lock(path, print):
        pass


@pytest.mark.parametrize("name", ["checkpoints", "locks", "records.sqlite"])
def test_training_refuses_links_that_lead_out_of_its_folder(received, tmp_path, name):
    out, _ = copied(received, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (out / name).rename(elsewhere)
    (out / name).symlink_to(elsewhere)
    before = {path: path.stat().st_mtime_ns for path in [elsewhere, *elsewhere.rglob("*")]}
    with pytest.raises(LinkError, match=f"{name} is a link"):
        studies.run_studies([small(epochs=3)], range(2), out, CPU, PlainLines())
    assert {path: path.stat().st_mtime_ns for path in [elsewhere, *elsewhere.rglob("*")]} == before


def test_a_report_replaces_links_and_does_not_follow_them(received, tmp_path, precious):
    out, _ = copied(received, tmp_path)
    written = write_report(out)
    files = [written.page, written.markdown, *written.files]
    for path in files:
        path.unlink()
        path.symlink_to(precious)
        unfinished(path).symlink_to(precious)
    write_report(out)
    assert not any(path.is_symlink() for path in files)


@pytest.mark.parametrize("name", ["report", "report/figures"])
def test_a_report_refuses_a_folder_that_is_a_link(received, tmp_path, name):
    out, _ = copied(received, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkError, match="is a link"):
        write_report(out)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_export_refuses_a_link(received, tmp_path, precious):
    out, path = copied(received, tmp_path)
    target = out / "export" / f"{path.parent.name}-0.safetensors"
    target.parent.mkdir()
    target.symlink_to(precious)
    with pytest.raises(LinkError, match="is a link"):
        use.export(path, format="safetensors", run=0)


def test_searches_refuse_a_database_that_is_a_link(tmp_path, precious):
    pytest.importorskip("optuna")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweeps.sqlite").symlink_to(precious)
    with pytest.raises(LinkError, match=r"sweeps.sqlite is a link"):
        results.report(tmp_path / "out", as_json=True)


@pytest.mark.parametrize("name", [".Nottingham.mat.part", ".Nottingham.mat.lock"])
@pytest.mark.parametrize("there", [True, False])
def test_a_download_follows_no_link(tmp_path, monkeypatch, precious, name, there):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    target = precious if there else tmp_path / "nothing"
    link = tmp_path / "data" / "polymusic" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    with serving(Pages()) as pages:
        pages.bodies["/a"] = BODY
        file = served(NOTTINGHAM, BODY, pages.at("/a"))
        if name.endswith(".lock"):
            with pytest.raises(LinkError, match="is a link"):
                fetch(file, tmp_path / "data")
        else:
            assert fetch(file, tmp_path / "data").read_bytes() == BODY
    assert not os.path.lexists(tmp_path / "nothing")
