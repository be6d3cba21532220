"""The models that the page uses: which are chosen, and what they answer."""

import io
import wave
from base64 import b64decode

import pytest
from lab.checkpoints import made, small, train
from lab.real_data import MEANT
from lab.use.play.asking import MUSIC, ask

from deepmemory.lab.use import loading, sound
from deepmemory.lab.use.play import server
from deepmemory.lab.use.play.models import find_model


def test_a_sentence(serving, models):
    one = serving(*models)
    status, answer = ask(one, "/translate", {"text": "¿Tres <b>gatos</b>?", "beam": 3})
    assert status == 200
    assert set(answer["greedy"].split()) <= set(MEANT)
    assert answer["unknown"] == ["¿", "b", "gatos", "b", "?"]
    about = ask(one, "/state")[1]["translation"]
    assert (about["language"], about["words"], len(about["examples"])) == ("spanish", 4, 6)


def test_a_tune(serving, models):
    one = serving(*models)
    status, answer = ask(one, "/compose", MUSIC)
    assert status == 200
    assert (answer["given"], answer["frames"]) == (2, 7)
    assert ask(one, "/compose", MUSIC)[1] == answer
    roll = sound.roll_of(b64decode(answer["midi"]))
    assert [list(note) for note in sound.notes_of(roll)] == answer["notes"]
    with wave.open(io.BytesIO(b64decode(answer["wav"]))) as heard:
        assert heard.getnframes() / heard.getframerate() == pytest.approx(7 / 4, abs=0.2)


def test_a_fault_of_ours_is_told_and_survived(serving, models, monkeypatch, capsys):
    one = serving(*models)
    monkeypatch.setattr(server.sound, "wav", lambda *_: 1 / 0)
    status, answer = ask(one, "/compose", MUSIC)
    assert (status, answer["error"]) == (500, "something went wrong; see the terminal of dmu play")
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert ask(one, "/state")[0] == 200


def test_without_them_the_page_says_what_to_do(serving, tmp_path, nothing_shipped):
    one = serving(*(find_model(task, None, tmp_path / "my runs", None) for task in ("translation", "polymusic")))
    state = ask(one, "/state")[1]
    assert state["music"] == {
        "ready": False,
        "problem": f"There is no trained model of polymusic in {tmp_path}/my runs yet.",
        "commands": ["dmu data fetch nottingham", f"dmu train polymusic --quick --out '{tmp_path}/my runs'"],
    }
    assert ask(one, "/translate", {"text": "uno", "beam": 1})[0] == 404
    assert ask(one, "/compose", MUSIC)[0] == 404


def test_the_newest_that_works_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "task_of", lambda setting, data: made(setting))
    older, newer = (small("translation", hidden=(width,)) for width in (4, 3))
    first, second = (train(tmp_path, setting, seeds=(0,)) for setting in (older, newer))
    assert find_model("translation", None, tmp_path, None).model.setting == newer
    second.write_bytes(b"damaged")
    assert find_model("translation", None, tmp_path, None).model.setting == older
    with pytest.raises(ValueError, match="cannot be used as a checkpoint"):
        find_model("translation", second, tmp_path, None)
    with pytest.raises(ValueError, match="expected a model of polymusic, but this one was trained on translation"):
        find_model("polymusic", first, tmp_path, None)
    first.unlink()
    assert "cannot be used as a checkpoint" in find_model("translation", None, tmp_path, None).problem
