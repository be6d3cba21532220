"""What the README shows runs."""

import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
REPRODUCTION = ROOT / "docs" / "reproduction"
README = (ROOT / "README.md").read_text()
LEARNED = float(re.findall(r"# under ([\d.]+), as with the GRU", README)[0])


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def recipe(target: str, *options: str) -> list[str]:
    """What ``make target`` would run once the environment is there."""
    command = ["make", "--no-print-directory", "-n", *options, target]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dry.stdout.strip().splitlines()


def final_loss(printed: str) -> float:
    return float(printed.splitlines()[0])


def test_python_blocks_in_order(capsys):
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert final_loss(printed) < LEARNED
    assert "plain  yes" in printed
    assert names["output"].shape == (100, 32, 64)


def test_a_gru_learns_what_the_first_block_learns(capsys):
    """``dm.GRU`` computes what ``nn.GRU`` does, in less time."""
    block, swaps = blocks("python")[0], 0
    for now, was in re.findall(r" = (\S[^#\n]*\S)  # was: (.*)", block):
        block = block.replace(now, was.replace("nn.GRU", "dm.GRU").replace("Adam", "torch.optim.Adam"))
        swaps += 1
    assert swaps == 2
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), names)
    assert type(names["rnn"]).__name__ == "GRU"
    assert final_loss(capsys.readouterr().out) < LEARNED


def test_every_command_is_checked_here():
    install = ["pip install .", 'pip install ".[lab]"']  # tests/test_release.py builds and installs the archives
    trained = 'dmu translate "Estoy cansado."'  # tests/lab/use/test_released.py
    in_the_lab = ["dmu paper natlang --cells dmu --depths 1"]  # a shorter one in tests/lab/test_real_cli.py
    assert commands() == [*install, trained, "make demo", *in_the_lab]


def test_make_test_runs_these_tests():
    assert recipe("test")[-1].split()[1:] == ["-m", "pytest", "-n", "2", "--dist", "worksteal"]


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


def test_make_demo_says_how_long_it_takes_and_installs_the_lab_alone():
    assert "about two minutes" in recipe("demo")[-2]
    for target, extra in (("demo", "lab"), ("test", "test")):
        assert re.findall(r'-e "\.\[(\w+)\]"', "\n".join(recipe(target, "--always-make"))) == [extra]


def test_make_report_builds_the_committed_pages():
    experiments = ["depth", "state", "adding", "music", "pixels"]
    folders = ["docs/reproduction", "docs/gradients-study", *(f"docs/{name}-study" for name in experiments)]
    assert recipe("report")[-len(folders) :] == [
        f".venv/bin/dmu report --out {folder} --to {folder}" for folder in folders
    ]


def test_tables_are_what_was_recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    pages = {page: (ROOT / page).read_text() for page in readme.PAGES}
    for name in readme.tables():
        assert any(f"<!-- {name} -->" in text for text in pages.values()), name
    for page, text in pages.items():
        assert readme.with_tables(text) == text, page
    for module in ("readme", "gru_study", "rates", "variations"):
        sys.modules.pop(module)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 110


def test_how_long_a_study_takes_is_what_the_records_say():
    from deepmemory.lab import paper
    from deepmemory.lab.records import Records

    kept = Records(REPRODUCTION)
    language = kept.study(paper.setting("natlang", "dmu").key)
    kept.close()
    (seconds,) = re.findall(r"about (\d+) seconds on an H200", README)
    assert abs(int(seconds) - max(run.seconds for run in language.runs)) < 5


def test_links_lead_somewhere():
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", README, flags=re.DOTALL)
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in target]
    assert len(targets) > 10
    for path, _, anchor in targets:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, (path, anchor)
