"""What the README shows runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPRODUCTION = ROOT / "docs" / "reproduction"
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def recipe(target: str) -> list[str]:
    """What ``make target`` would run once the environment is there."""
    command = ["make", "--no-print-directory", "-n", target]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dry.stdout.strip().splitlines()


def test_python_blocks_in_order(capsys):
    assert len(blocks("python")) >= 3
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert "Availability" in capsys.readouterr().out
    assert names["outputs"].shape == (50, 20, 32, 8)


def test_the_first_block_trains():
    """The six lines, stepped a few times, bring the loss down."""
    set_up, step = blocks("python")[0].split("output, h_n", 1)
    names: dict[str, object] = {}
    exec(set_up, names)
    names["torch"].manual_seed(0)
    losses = []
    for _ in range(10):
        names["optimiser"].zero_grad()
        exec("output, h_n" + step, names)
        losses.append(names["loss"].item())
    assert losses[-1] < 0.5 * losses[0]


def test_every_command_is_checked_here():
    here = ["make demo", "make test"]
    in_the_lab = ["dmu bench", "dmu paper natlang --cells dmu --depths 1", "dmu paper polymusic --quick"]
    assert commands() == here + in_the_lab  # shorter ones in tests/lab/test_bench.py and test_real_cli.py


def test_make_test_runs_these_tests():
    assert recipe("test")[-1].split()[1:] == ["-m", "pytest", "-n", "2"]


def test_make_demo_in_short(tmp_path):
    program, *arguments = recipe("demo")[-1].split()
    assert program == ".venv/bin/dmu"
    assert arguments[-2:] == ["--out", "runs/demo"]
    shorter = ["--runs", "2", "--epochs", "1", "--set", "steps=2", "--set", "test=20", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "deepmemory.lab", *arguments[:-2], *shorter]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"page: {tmp_path / 'report' / 'index.html'}"
    text = (tmp_path / "report" / "index.html").read_text()
    assert all(name in text for name in ("DMU", "GRU", "LSTM"))


def test_tables_are_what_was_recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    assert all(f"<!-- {name} -->" in README for name in readme.tables())
    assert readme.with_tables(README) == README
    sys.modules.pop("readme")


def test_how_long_a_study_takes_is_what_the_records_say():
    from deepmemory.lab import paper
    from deepmemory.lab.records import Records

    kept = Records(REPRODUCTION)
    language = kept.study(paper.setting("natlang", "dmu").key)
    kept.close()
    (seconds,) = re.findall(r"about (\d+) seconds on an H200", README)
    assert abs(int(seconds) - max(run.seconds for run in language.runs)) < 5


def test_the_reproduction_pages_are_what_the_records_say(tmp_path):
    from deepmemory.lab.report import write_report

    write_report(REPRODUCTION, tmp_path)
    written_with = f"dmu report --out {shlex.quote(str(REPRODUCTION))} --to {shlex.quote(str(tmp_path))}"
    folder = REPRODUCTION.relative_to(ROOT)
    shown = set()
    for page in ("synthetic.md", "real.md"):
        made = (tmp_path / page).read_text()
        kept = made.replace(written_with, f"dmu report --out {folder} --to {folder}")
        assert (REPRODUCTION / page).read_text() == kept, page
        shown |= {Path(name).stem for name in re.findall(r"\((figures/[^)]+)\)", made)}
    assert {path.stem for path in (REPRODUCTION / "figures").iterdir()} == shown
    assert (REPRODUCTION / "records.sqlite").stat().st_size < 2.5e6


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
