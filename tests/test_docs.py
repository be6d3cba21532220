"""The pages build without a warning, what they show runs, and what they quote is what was measured."""

import doctest
import importlib
import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from itertools import pairwise
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


def measured(name):
    """The module of a benchmark, and what it measured."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_latencies_are_those_measured():
    streaming, kept = measured("streaming")
    page = (DOCS / "deploy.md").read_text()
    assert streaming.with_table(page, kept) == page


def test_numbers_of_small_devices_are_those_measured():
    small_devices, kept = measured("small_devices")
    page = (DOCS / "deploy.md").read_text()
    assert all(table in page for table in small_devices.tables(kept).values())
    assert small_devices.with_tables(page, kept) == page


def test_use_cases_are_those_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # its modules import one another
    use_cases = importlib.import_module("use_cases")
    page = (DOCS / "use-cases.md").read_text()
    assert use_cases.filled(page) == page


def test_scores_of_the_trained_networks_are_those_measured():
    trained, kept = measured("trained")
    page = (DOCS / "trained.md").read_text()
    assert trained.with_tables(page, kept) == page


def test_the_front_page_shows_a_short_recording():
    (recording,) = re.findall(r"!\[[^]]+\]\((\w+\.gif)\)", (DOCS / "index.md").read_text())
    assert (DOCS / recording).stat().st_size < 400_000


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
    captured = [row for row in rows if "as_cuda_graph" in row]
    graphs = [row for row in captured if row["precision"] == "float32"]
    times = {(row["shape"]["name"], row["contestant"]): row["as_cuda_graph"]["median_ms"] for row in graphs}
    depths = {row["shape"]["name"]: len(row["shape"]["transition"]) + 1 for row in graphs}
    ours, gru = "dm.DMU (nvrtc)", "nn.GRU, equal weights"

    page = (DOCS / "engines.md").read_text()
    (many,) = re.findall(r"51 small networks take ([\d.]+) times as\s+long as one", page)
    assert float(many) == round(times["adding-51", ours] / times["adding", ours], 1)
    # Every shape in the table of those where torch's layers are faster is explained below it.
    (behind,) = re.findall(r"<!-- speed behind -->(.*?)<!-- end -->", page, re.DOTALL)
    (why,) = re.findall(r"<!-- end -->\s+(- \*\*`rl-step`.*?)\n\n", page, re.DOTALL)
    explained = [name for line in re.findall(r"\*\*(.*?)\*\*", why) for name in re.findall(r"`([\w-]+)`", line)]
    assert sorted(re.findall(r"^\| `([\w-]+)`", behind, re.MULTILINE)) == sorted(explained)

    faster = [times[name, ours] < times[name, gru] for name, depth in depths.items() if depth <= 2]
    assert sum(faster) > 0.75 * len(faster)  # why-dmu.md: "at most of the sizes measured"
    assert 0.9 < times["deep-wide", ours] / times["deep-wide", gru] < 1.1  # "as long as nn.GRU in float32"
    half = [row for row in captured if (row["shape"]["name"], row["precision"]) == ("deep-wide", "bfloat16")]
    half = {row["contestant"]: row["as_cuda_graph"]["median_ms"] for row in half}
    assert f"{half[ours] / half[gru]:.1f} times as long in bfloat16" in " ".join(
        (DOCS / "why-dmu.md").read_text().split()
    )


@pytest.fixture
def recorded(monkeypatch):
    """The shown studies of an experiment among the docs, by title and part."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    readme = importlib.import_module("readme")
    yield lambda folder: {(one.title, one.part): one for one in readme.recorded(folder).shown}
    for module in ("readme", "gru_study", "rates"):
        sys.modules.pop(module)


def test_three_layers_remember_as_much_better_as_the_pages_say(recorded):
    losses = {key: one.test().mean for key, one in recorded("adding-study").items() if one.tested}
    for other in ("DMU, n = 1", "GRU", "LSTM", "RHN, n = 3"):  # "fifty times smaller", "a fiftieth"
        assert 45 < losses[other, "5000"] / losses["DMU, n = 3", "5000"] < 65
    for length in ("1000", "5000", "10000"):
        assert min((loss, title) for (title, part), loss in losses.items() if part == length)[1] == "DMU, n = 3"
        assert losses["DMU, n = 5", length] < 4 * losses["DMU, n = 3", length]
    assert losses["DMU, n = 3", "10000"] < 1.5 * 6e-6  # "near LEM's 6e-6"
    assert losses["residual DMU, n = 3", "5000"] > 1e-3  # "some runs fail"
    assert losses["minGRU", "10000"] < min(losses["GRU", "10000"], losses["LSTM", "10000"])


def test_trials_at_the_large_size_came_out_as_the_page_says():
    page = " ".join((DOCS / "depth-and-rate.md").read_text().split())
    trials = json.loads((DOCS / "depth-study" / "search.json").read_text())["trials"]
    large = [trial for trial in trials if trial.get("size") == "large"]
    best_after_12 = min((trial for trial in large if trial["round"] == 4), key=lambda trial: trial["valid_perplexity"])
    best, *others = sorted(
        (trial for trial in large if trial["round"] == 5), key=lambda trial: trial["valid_perplexity"]
    )
    same = ("lr", "embedding_rate", "memory_bias", "recurrent_dropout", "transition_dropout")
    (longer,) = [
        trial for trial in others if trial["input_dropout"] == 0.65 and all(trial[k] == best_after_12[k] for k in same)
    ]
    said = f"(0.002, embedding 0.005) ends after {longer['epochs']} epochs at a validation perplexity of "
    reached = f"{longer['valid_perplexity']:.1f} and a training perplexity of {longer['train_perplexity']:.0f}."
    assert said + reached in page
    assert f"take the validation perplexity to {best['valid_perplexity']:.1f} in {best['epochs']} epochs" in page


def test_depth_pays_at_the_large_size_as_the_page_says(recorded):
    page = " ".join((DOCS / "depth-and-rate.md").read_text().split())
    found = {key: one for key, one in recorded("depth-study").items() if one.part in ("large", "long")}
    tests = {key: math.exp(one.test().mean) for key, one in found.items()}
    trials = json.loads((DOCS / "depth-study" / "search.json").read_text())["trials"]
    searched = [trial["kind"] for trial in trials if trial.get("size") == "large" and trial["depth"] == 5]
    assert searched == ["residual"] * 12  # "twelve earlier trials"
    deeper = ["DMU, n = 1", "DMU, n = 2", "residual DMU, n = 3", "residual DMU, n = 5"]
    scores = [tests[title, "large"] for title in deeper]
    spread = max(found[title, "large"].test(scale=math.exp).std for title in deeper[1:])
    assert all(shallow - deep > 4 * spread for shallow, deep in pairwise(scores))  # "several times"
    assert [len(found[title, "large"].study.runs) for title in (*deeper, "LSTM")] == [1, 2, 3, 3, 3]
    best = tests["residual DMU, n = 5", "large"]
    assert tests["residual DMU, n = 10", "large"] == pytest.approx(best, abs=0.1)  # "no gain"
    trained = {key: one.study.runs[0].at_epoch(one.epochs)["train_loss"] for key, one in found.items()}
    assert trained["residual DMU, n = 10", "large"] > trained["residual DMU, n = 5", "large"]
    assert tests["DMU, n = 5", "large"] > tests["DMU, n = 2", "large"]
    said = "from {:.1f} at n = 1 to {:.1f} at n = 2 and {:.1f} at n = 5; an LSTM has {:.1f}, a GRU {:.1f}."
    named = [tests[title, "large"] for title in ("DMU, n = 1", "DMU, n = 2", "residual DMU, n = 5", "LSTM", "GRU")]
    assert said.format(*named) in (DOCS / "why-dmu.md").read_text()
    behind = [tests[title, "large"] - best for title in ("LSTM", "GRU", "RHN, n = 5")]
    assert behind == pytest.approx([6, 10, -0.5], abs=0.4)
    (half,) = [one for one in sys.modules["readme"].recorded("depth-study").rest if one.setting.lr == 0.0005]
    valid = [math.exp(one.valid().mean) for one in (found["residual DMU, n = 10", "large"], half)]
    assert half.title == "residual DMU, n = 10"
    assert "0.001, than with half of it: {:.1f} against {:.1f} on validation".format(*valid) in page
    longer = found["residual DMU, n = 5", "long"]
    assert (longer.epochs, round(longer.seconds / 60)) == (150, 3)
    assert f"perplexity of {tests['residual DMU, n = 5', 'long']:.1f}, in three minutes" in page


def test_music_and_pixels_came_out_as_the_page_says(recorded):
    page = (DOCS / "beyond.md").read_text()
    music = {title: one for (title, _), one in recorded("music-study").items()}
    losses = {title: one.score("test").mean for title, one in music.items()}
    first, second = sorted(losses, key=losses.get)[:2]
    assert (first, second) == ("DMU, n = 2", "LSTM")
    (of_music,) = sys.modules["readme"].recorded("music-study").comparisons()
    assert f"clearly ahead of the LSTM (p = {of_music.p_value:.3f})" in page
    assert 3.07 < losses[first] < 3.29
    assert losses["DMU, n = 2"] < losses["residual DMU, n = 3"] < losses["residual DMU, n = 5"]
    results = sys.modules["readme"].recorded("pixels-study")
    pixels = {title: one for (title, _), one in recorded("pixels-study").items()}
    scores = {title: one.score("test").mean for title, one in pixels.items() if one.diverged < len(one.study.runs)}
    assert scores.keys() == {"DMU, n = 1", "GRU", "LSTM"}
    assert 0 < 0.966 - min(scores["DMU, n = 1"], scores["GRU"]) < 0.002  # "within 0.2 points"
    deep = [run for one in results.outcomes if one.setting.transition for run in one.study.runs]
    assert (len(deep), {run.state for run in deep}) == (14, {"diverged"})
    assert {one.setting.lr for one in results.outcomes} == {0.005, 0.01}  # 0.002 "has not been trained"
    why = " ".join((DOCS / "why-dmu.md").read_text().split())
    said = "{DMU, n = 2:.2f} nats per frame, against {LSTM:.2f} of an LSTM and {GRU:.2f} of a GRU"
    assert said.format(**losses) in why
    assert abs(scores["DMU, n = 1"] - scores["GRU"]) < 0.001  # "within 0.1 points"


def test_states_are_tracked_as_reliably_as_the_page_says(recorded):
    kept = {key: one.solved("accuracy_64") for key, one in recorded("state-study").items()}
    one_layer, two_layers, rhn = "DMU, n = 1", "DMU, n = 2", "RHN, n = 3"
    assert kept[one_layer, "s3"] < 51 / 3  # "in few"
    assert kept[one_layer, "s4"] == 0
    assert kept[two_layers, "parity"] == kept[two_layers, "s3"] == 51
    assert kept[two_layers, "s4"] > kept["LSTM", "s4"] > kept["GRU", "s4"]
    assert [kept[rhn, group] for group in ("parity", "s3", "s4")] == [51] * 3
    assert {title: runs for (title, group), runs in kept.items() if group == "z60" and runs} == {two_layers: 1, rhn: 3}
    assert not any(runs for (title, group), runs in kept.items() if title == "minGRU" or group in ("a5", "s5"))


def test_accuracies_of_pixels_are_those_of_the_report():
    report = (DOCS / "reproduction" / "real.md").read_text()
    table = re.findall(
        r"^\| (in order|permuted), (20K|34K) weights \| (.*) \|$", (DOCS / "why-dmu.md").read_text(), re.M
    )
    assert len(table) == 4
    for order, weights, cells in table:
        row = f"{'ordered' if order == 'in order' else order} | {96 if weights == '20K' else 128}"
        for cell, accuracy in zip(("DMU", "GRU", "LSTM"), cells.split(" | "), strict=True):
            (line,) = re.findall(rf"^\| {re.escape(row)} \| {cell} \| .*$", report, re.M)
            assert any(text.startswith(f"{accuracy} ±") for text in line.split(" | ")), (row, cell)


class TestDesign:
    """What docs/design.md says of the project is so."""

    page = (DOCS / "design.md").read_text()

    def test_where_to_add_something_exists(self):
        (table,) = re.findall(r"## Where to add something\n\n(.*?)\n\n", self.page, re.DOTALL)
        places = [place for place in re.findall(r"`([\w/.]+)`", table) if "/" in place]
        assert len(places) >= 12
        for place in places:
            root = ROOT if place.startswith("deepmemory/") else ROOT / "deepmemory"
            assert (root / place).exists() or (root / f"{place}.py").exists(), place

    def test_the_library_never_imports_the_lab(self):
        package = ROOT / "deepmemory"
        library = [path for path in package.rglob("*.py") if package / "lab" not in path.parents]
        assert not [path for path in library if re.search(r"(from|import) deepmemory\.lab", path.read_text())]

    def test_the_lab_looks_inside_the_library_where_it_is_said(self):
        inside = {
            str(path.relative_to(ROOT / "deepmemory" / "lab"))
            for path in (ROOT / "deepmemory" / "lab").rglob("*.py")
            if re.search(r"(from|import) deepmemory\.(nn|ops)", path.read_text())
        }
        (said,) = re.findall(r"with two\s+exceptions(.*?)`gradients`", self.page, re.DOTALL)
        assert inside == {"bench/speed.py", "training/network.py"}
        assert all(
            name in said for name in ("`bench`", "`training/network.py`", "ops.engines.NAMES", "ops.hoisted.product")
        )
