"""``dmu data list``, ``fetch`` and ``check``."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab.data import making
from lab.data.test_fetching import Pages, serving
from typer.testing import CliRunner

from deepmemory.lab import cli
from deepmemory.lab.data import DATASETS, files, registry

ROOT = Path(__file__).parents[3]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["data", *map(str, arguments)], catch_exceptions=False)


def test_list_says_what_there_is_and_where(tiny):
    (tiny / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    told = invoke("list", "--data", tiny).output
    for entry in DATASETS.values():
        assert f"{entry.name}  ({entry.task}, " in told
        assert entry.licence in told
    assert "http" not in told.replace(str(tiny), "")  # no walls of addresses
    assert f"in {tiny / 'ptb'}" in told
    assert "mnist  (pixel-mnist, 0.0 MB)  not here" in told
    assert told.count("its sha256 is not known; the first fetch records it") == 1
    rows = [json.loads(line) for line in invoke("list", "--data", tiny, "--json").output.splitlines()]
    assert [row["name"] for row in rows] == list(DATASETS)
    assert rows[0]["files"][0]["sha256"] == DATASETS["nottingham"].files[0].sha256
    assert rows[0]["where"] == str(tiny / "polymusic")
    assert rows[0]["files"][0]["addresses"] == list(DATASETS["nottingham"].files[0].addresses)


def test_check_reads_and_counts(tiny, monkeypatch):
    result = invoke("check", "--data", tiny)
    assert result.exit_code == 0
    assert "nottingham: good; 3 train; 1 valid; 2 test; 9 train frames" in result.output
    assert "ptb: good; 10 train; 4 valid; 2 test; 6 words" in result.output
    assert "mnist: good; 5 train; 2 test" in result.output
    assert "spanish: good; 3 pairs; 7 foreign words; 4 english words" in result.output
    assert "portuguese: unverified; 3 pairs" in result.output
    archive = tiny / "translation/por-eng.zip"
    files.record_path(archive).write_text(making.digest(archive.read_bytes()))
    assert "portuguese: good" in invoke("check", "portuguese", "--data", tiny).output
    monkeypatch.setitem(registry.DATASETS, "spanish", replace(DATASETS["spanish"], counts={"pairs": 4}))
    result = invoke("check", "spanish", "--data", tiny)
    assert result.exit_code == 1
    assert "spanish: damaged; counted 3 pairs" in result.output


def test_check_fails_on_what_is_missing_or_damaged(tiny):
    (tiny / "polymusic/MuseData.mat").unlink()
    assert invoke("check", "--data", tiny).exit_code == 1
    assert invoke("check", "nottingham", "--data", tiny).exit_code == 0
    result = invoke("check", "musedata", "--data", tiny, "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["state"] == "missing"
    (tiny / "polymusic/Piano_midi.mat").write_bytes(b"")
    result = invoke("check", "--data", tiny)
    assert result.exit_code == 1
    assert (
        f"piano-midi: damaged; {tiny / 'polymusic/Piano_midi.mat'}: not the contents expected; sha256" in result.output
    )


def test_fetch_fills_the_cache_and_goes_on_after_a_failure(tiny, cache, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _, contents = making.tiny_datasets()
    with serving(Pages()) as pages:
        for name in ("german", "nottingham"):
            (file,) = DATASETS[name].files
            file = replace(file, addresses=pages.at(f"/{name}"))
            monkeypatch.setitem(registry.DATASETS, name, replace(DATASETS[name], files=(file,)))
            pages.bodies[f"/{name}"] = contents[file.path]
        del pages.bodies["/german"]
        result = invoke("fetch", "german", "nottingham")
        assert result.exit_code == 1
        assert "german: failed; translation/deu-2020-12.txt could not be fetched" in result.output
        assert f"nottingham: good; {cache / 'polymusic/Nottingham.mat'}, sha256 " in result.output
        assert invoke("fetch", "nottingham", "--json").exit_code == 0
        assert len(pages.asked) == 2
    assert "nottingham: good" in invoke("check", "nottingham").output


@pytest.mark.parametrize("command", ["fetch", "check"])
def test_a_name_that_does_not_exist_is_told_the_choices(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", ["dmu", "data", command, "mnits"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "error: unknown dataset 'mnits'; choose from nottingham" in capsys.readouterr().err


def test_without_pooch_fetching_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setattr(sys, "argv", ["dmu", "data", "fetch", "ptb"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "error: fetching data needs pooch: pip install deepmemory[lab]" in capsys.readouterr().err


def test_pooch_is_imported_only_to_fetch():
    code = (
        "import sys, deepmemory.lab.cli, deepmemory.lab.data, deepmemory.lab.data.fetching; "
        "print(sorted(sys.modules.keys() & {'pooch', 'requests', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
