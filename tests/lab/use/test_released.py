"""A released network needs its file alone; those that come with the package work at once."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from lab.checkpoints import made, small, train
from lab.test_cli import error_of, invoke
from safetensors.torch import save_file

from deepmemory.lab.cli.training import papers_setting
from deepmemory.lab.data import MissingData, files
from deepmemory.lab.records import RecordsError
from deepmemory.lab.records.checkpoints import last_weights
from deepmemory.lab.records.releases import Release, load_release, save_release
from deepmemory.lab.settings import Machine
from deepmemory.lab.use import decoding, examples, inspection, loading, released, releasing
from deepmemory.lab.use.loading import best_run, choose_checkpoint, list_shipped, load_model
from deepmemory.lab.use.play.models import find_model
from deepmemory.lab.use.sound import notes_of, roll_of

LARGEST = 6_000_000  # bytes of all networks that come with the package


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    """A machine without datasets, in an empty folder."""
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("DEEPMEMORY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def release(path, to, monkeypatch, **changes):
    """The file of a released network, from a checkpoint of a study on made data."""
    setting = loading.setting_of(path)
    monkeypatch.setattr("deepmemory.lab.training.trainer.task_of", lambda setting, data: made(setting))
    _, seed, weights = best_run(path)
    releasing.make_release(setting, seed, weights | changes, "dmu train", Machine("cpu", threads=1), to)
    return to


class TestFiles:
    @pytest.mark.parametrize("task", ["adding", "polymusic", "natlang", "translation"])
    def test_a_network_comes_back_in_half_precision(self, task, tmp_path, monkeypatch, no_data):
        path = train(tmp_path, small(task, precision="bf16-mixed" if task == "natlang" else "32-true"))
        file = release(path, tmp_path / "one.safetensors", monkeypatch)
        model = load_model(file)
        _, seed, weights = best_run(path)
        assert model.seed == seed
        for name, weight in model.network.state_dict().items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, weights[name].half().float())
        assert released.vocabularies(model.task) == released.vocabularies(made(model.setting))
        assert invoke("inspect", file).exit_code == 0

    def test_it_tells_how_it_was_made(self, tmp_path, made_data):
        path = train(tmp_path, small("polymusic"), range(3))
        file = tmp_path / "made" / "music.safetensors"
        told = json.loads(
            invoke("release", path, "--to", file, "--run", 1, "--last", "--device", "cpu", "--json").stdout
        )
        made_how = load_release(file).made
        assert made_how == json.loads(file.with_suffix(".json").read_text())
        assert told == {"event": "release", "path": str(file), **made_how}
        assert made_how["command"].startswith("dmu train polymusic --cell dmu --seed 1 --set ")
        assert "--set hidden=5 " in made_how["command"]
        assert made_how["command"].endswith("; dmu release --last")
        exact, rounded = made_how["scores"]["float32"], made_how["scores"]["float16"]
        assert set(exact) == {"valid_loss", "test_loss"}
        assert rounded["test_loss"] == pytest.approx(exact["test_loss"], rel=1e-3)
        weights = load_release(file).weights
        assert all(torch.equal(weights[name], weight.half()) for name, weight in last_weights(path, 1).items())

    def test_with_its_data_where_that_is_asked_for(self, tmp_path, monkeypatch, no_data):
        path = train(tmp_path, small("translation"))
        file = release(path, tmp_path / "one.safetensors", monkeypatch)
        with pytest.raises(MissingData, match="dmu data fetch spanish"):
            load_model(file, with_data=True)
        monkeypatch.setattr(released, "task_of", lambda setting, data: made(setting))
        assert len(load_model(file, with_data=True).task.pairs.english.lengths) == 40
        changed = made(small("translation"))
        changed.pairs.english.__dict__["words"] = ("other",)
        monkeypatch.setattr(released, "task_of", lambda setting, data: changed)
        with pytest.raises(ValueError, match=r"words of the data are not those .* dmu data check spanish"):
            load_model(file, with_data=True)

    def test_a_damaged_file_is_refused(self, tmp_path, monkeypatch):
        file = release(train(tmp_path, small("natlang")), tmp_path / "one.safetensors", monkeypatch)
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RecordsError, match=r"do not match its sha256.* make it again with dmu release"):
            load_model(file)
        file.write_bytes(whole)
        assert load_model(file).setting.task == "natlang"
        with pytest.raises(ValueError, match="has no run with seed 7"):
            load_model(file, 7)
        intact = load_release(file)
        for changes, reason in (
            ({"weights": intact.weights | {"more": torch.zeros(1).half()}}, "no tensor of that name"),
            ({"words": {"text": intact.words["text"][:-1]}}, "'embedding.weight' is"),
            ({"words": {}}, "'text'"),
            ({"words": {"text": ("\x1b[2J", *intact.words["text"][1:])}}, "characters that cannot be shown"),
        ):
            save_release(file, Release(**{**vars(intact), **changes}))
            with pytest.raises(RecordsError, match=f"cannot be used as a released network.*{reason}"):
                load_model(file)

    def test_what_does_not_fit_into_half_precision_is_not_written(self, tmp_path, monkeypatch):
        path = train(tmp_path, small("adding"))
        _, _, weights = best_run(path)
        with pytest.raises(ValueError, match=r"output.bias does not fit into half precision"):
            release(path, tmp_path / "one.safetensors", monkeypatch, **{"output.bias": weights["output.bias"] + 1e5})
        assert not (tmp_path / "one.safetensors").exists()


class TestExamples:
    def test_tunes_are_chords_with_one_note_above(self):
        for tune in examples.tunes().pieces["test"]:
            assert set(tune.sum(1).tolist()) == {4}
            assert len(tune) >= 50  # as many frames as dmu compose starts from

    def test_sentences_of_another_vocabulary(self):
        task = examples.sentences("german", ("<start>", "<end>", "eins"), ("<start>", "<end>", "one"))
        assert task.pairs.foreign.ids.tolist() == [[0, 2, 1]]
        assert len(task.split(torch.tensor([0, 1]))[0]) == 2


class TestShipped:
    def test_they_are_small_and_say_how_they_were_made(self):
        found = sorted(path for path in released.SHIPPED.iterdir() if path.suffix == ".safetensors")
        assert [path.stem for path in found] == sorted(released.SHIPPED_TASKS)
        assert sum(path.stat().st_size for path in released.SHIPPED.iterdir()) <= LARGEST
        for path in found:
            release = load_release(path)
            assert release.setting.task == path.stem
            train, then = release.made["command"].split("; ")
            words = shlex.split(train)
            assert words[:7] == f"dmu train {path.stem} --cell {release.setting.cell} --seed {release.seed}".split()
            assert then.startswith("dmu release")
            changes = dict(change.split("=") for change in words[8::2])
            assert papers_setting(path.stem, release.setting.cell, changes) == release.setting
            assert release.made == json.loads(path.with_suffix(".json").read_text())
            exact, rounded = release.made["scores"]["float32"], release.made["scores"]["float16"]
            assert rounded["test_loss"] == pytest.approx(exact["test_loss"], rel=1e-3)

    def test_the_verbs_work_at_once(self, no_data, tmp_path):
        assert json.loads(invoke("compose", "--steps", 8, "--json").stdout)["composed"] == 8
        assert roll_of(Path("tune.mid").read_bytes()).shape[0] == 58
        assert "music" in invoke("translate", "Me gusta la música.").stdout
        assert invoke("generate", "the company said", "--words", 5).stdout.startswith("the company said ")
        assert "polymusic" in invoke("inspect").stdout
        listed = [json.loads(line) for line in invoke("list", "--json").stdout.splitlines()]
        assert [model["task"] for model in listed] == list(released.SHIPPED_TASKS)
        told = json.loads(invoke("export", "--format", "safetensors", "--json").stdout)
        assert (tmp_path / told["path"]).resolve().parent == tmp_path / "runs" / "export"

    def test_the_loss_says_what_it_was_measured_on(self, no_data, tmp_path, monkeypatch):
        told = json.loads(invoke("inspect", "polymusic", "--json").stdout)
        assert told["measured on"] == inspection.EXAMPLES
        shown = " ".join(invoke("inspect", "polymusic").stdout.split())
        assert f"loss {told['loss']:.4g} on examples that come with the package; --data: on validation data" in shown
        monkeypatch.setattr(released, "task_of", lambda setting, data: made(setting))
        shown = " ".join(invoke("inspect", "polymusic", "--data", tmp_path).stdout.split())
        assert "on the first sequences of the validation data; dmu list: on all" in shown

    def test_the_list_says_what_scores_are_of_and_leaves_paths_whole(self, no_data, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        listed = invoke("list").stdout.splitlines()
        assert listed[0].split()[:2] == ["polymusic", "dmu,"]
        assert listed[1].strip().startswith("best on validation data: loss ")
        assert [Path(line.strip()) for line in listed[2::3]] == [released.shipped(t) for t in released.SHIPPED_TASKS]

    def test_the_page_has_them(self, no_data, tmp_path):
        for task in ("translation", "polymusic"):
            assert find_model(task, None, tmp_path / "runs", None).model.setting.task == task

    def test_a_task_names_one(self, no_data, tmp_path):
        assert choose_checkpoint(Path("translation"), tmp_path) == released.SHIPPED / "translation.safetensors"
        assert choose_checkpoint(Path("ptb"), tmp_path) == released.SHIPPED / "ptb.safetensors"
        with pytest.raises(FileNotFoundError, match="no trained model of adding"):
            choose_checkpoint(Path("adding"), tmp_path)

    def test_what_was_trained_comes_first(self, tmp_path):
        path = train(tmp_path, small("natlang"))
        assert choose_checkpoint(None, tmp_path, "natlang", "ptb") == path.parent
        assert choose_checkpoint(None, tmp_path / "empty", "natlang", "ptb").name == "ptb.safetensors"
        assert choose_checkpoint(None, tmp_path / "empty").name == "polymusic.safetensors"

    def test_a_damaged_or_missing_one_is_told(self, no_data, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "trained"
        shutil.copytree(released.SHIPPED, folder)
        for module in (released, loading):
            monkeypatch.setattr(module, "SHIPPED", folder)
        (folder / "ptb.safetensors").write_bytes(b"damaged")
        assert "reinstall deepmemory" in error_of(monkeypatch, capsys, "generate", "the")
        save_file({"weight": torch.zeros(3)}, folder / "ptb.safetensors")
        assert "reinstall deepmemory" in error_of(monkeypatch, capsys, "generate", "the")
        assert "ptb" not in [model.task for model in list_shipped()]
        (folder / "translation.safetensors").unlink()
        assert "dmu train translation --quick" in error_of(monkeypatch, capsys, "translate", "hola")

    def test_a_composed_tune_has_whole_chords(self):
        """Sampled together, keys make chords of one size that hold; alone, their number varies and they flicker."""
        model = load_model(released.shipped("polymusic"))
        begun = decoding.piece(model, 0)[:50]
        together, alone = (
            torch.cat([decoding.continue_tune(model, begun, 100, seed=s, sampling=how)[50:] for s in range(3)])
            for how in decoding.SAMPLINGS
        )
        assert together.sum(1).double().std() < 0.8 * alone.sum(1).double().std()
        held = torch.tensor([note.end - note.start for note in notes_of(together)]).double()
        assert held.mean() > 3
        changes, scattered = (
            (lowest[1:] != lowest[:-1]).any(1).double().mean()
            for roll in (together, alone)
            for lowest in [roll * (roll.cumsum(1) <= 3)]
        )
        assert changes < 0.8 * scattered
