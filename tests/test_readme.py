"""What the README shows runs."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def recipe(target: str) -> list[str]:
    """What ``make target`` would run once the environment is there."""
    dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
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
    assert commands() == ["make demo", "make test"]


def test_make_test_runs_these_tests():
    assert recipe("test")[-1].split()[1:] == ["-m", "pytest", "-n", "2"]


def test_make_demo_in_short(tmp_path):
    _, script = recipe("demo")[-1].split()
    command = [sys.executable, script, "--epochs", "2", "--runs", "2", "--minutes", "0.05", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "index.html"
    assert str(page) in done.stdout
    text = page.read_text()
    assert "<svg" in text
    assert not re.search(r"""(src|href)=["']http""", text)  # self-contained
    assert all(name in text for name in ("DMU", "GRU", "LSTM"))
    assert (tmp_path / "demo.svg").stat().st_size > 1000
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
