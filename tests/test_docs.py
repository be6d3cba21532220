"""The pages build without a warning, what they show runs, and what they quote is what was measured."""

import doctest
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"(?<!<!-- not run: takes long -->\n)```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning"
)  # torch's own
def test_python_on_a_page_runs_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for block in blocks(page, "python"):
        if ">>>" in block:
            example = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
            assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0, capsys.readouterr().out
            names = example.globs
        else:
            exec(compile(block, page, "exec"), names)


def test_commands_exist():
    """Every ``dmu`` on a page names a command, and options that it has."""
    import typer

    from deepmemory.lab import cli

    root = typer.main.get_command(cli.app)
    found = 0
    for page in PAGES:
        text = (DOCS / page).read_text()
        shown = [line for block in blocks(page, "sh") for line in block.splitlines()] + re.findall(
            r"`(dmu [^`]+)`", text
        )
        for line in shown:
            words = shlex.split(line, comments=True)
            if words[:1] != ["dmu"]:
                continue
            command, rest = root, words[1:]
            while rest and hasattr(command, "commands"):
                assert rest[0] in command.commands, f"{page}: {line}"
                command, rest = command.commands[rest[0]], rest[1:]
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, f"{page}: {line}"
            found += 1
    assert found >= 5


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", (DOCS / page).read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
            if not target.startswith("http"):
                assert (DOCS / target).exists(), f"{page}: {target}"


def test_latencies_are_those_measured():
    path = ROOT / "benchmarks" / "streaming.py"
    spec = importlib.util.spec_from_file_location("benchmarks_streaming", path)
    streaming = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(streaming)
    kept = json.loads((ROOT / "benchmarks" / "results" / "streaming.json").read_text())
    page = (DOCS / "deploy.md").read_text()
    assert streaming.with_table(page, kept) == page


def test_every_public_name_is_in_the_reference():
    import deepmemory as dm

    reference = (DOCS / "api.md").read_text()
    for name in dm.__all__:
        assert re.search(rf":: (deepmemory\.)?{name}\n", reference), name


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees", DOCS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "parameter_groups" in (tmp_path / "api.html").read_text()


def test_ratios_in_words_come_from_the_file():
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())["shapes"]
    times = {
        (row["precision"], row["shape"]["name"], row["contestant"]): row["as_cuda_graph"]["median_ms"]
        for row in rows
        if "as_cuda_graph" in row and "recompute" not in row["contestant"]
    }
    ours, peers = "dm.DMU (nvrtc)", ("nn.GRU, equal weights", "nn.LSTM, equal weights")
    shapes = [shape for mode, shape, name in times if mode == "float32" and name == ours]

    def ratio(mode, shape):
        return times[mode, shape, ours] / min(times[mode, shape, peer] for peer in peers)

    (many,) = re.findall(r"51 small networks take ([\d.]+) times as long as\s+one", (DOCS / "engines.md").read_text())
    assert float(many) == round(times["float32", "adding-51", ours] / times["float32", "adding", ours], 1)
    readme = (ROOT / "README.md").read_text()
    (behind,) = re.findall(r"behind in float32 at (.*?):", readme, re.DOTALL)
    assert re.findall(r"`([\w-]+)`", behind) == [shape for shape in shapes if ratio("float32", shape) > 1]
    for mode in ("float32", "tf32", "bfloat16"):  # "two to three times faster"
        assert 1.9 < ratio(mode, "deep-wide") < 3.1
