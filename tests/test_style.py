"""Lint, format and types hold over the whole project, and in a user's program (typed_script.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=["lint", "format", "types"]
)
def test_clean(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_documented_with_an_example():
    import deepmemory as dm

    for name in dm.__all__:
        if isinstance(getattr(dm, name), type) or callable(getattr(dm, name)):
            assert ">>>" in getattr(dm, name).__doc__, name


def test_public_names_are_imported_when_they_are_used():
    code = "import sys, deepmemory as dm; print('torch' in sys.modules, set(dm.__all__) <= set(dir(dm))); "
    code += "dm.DMU; print('torch' in sys.modules); dm.absent"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True"]
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'deepmemory' has no attribute 'absent'"


def test_importing_the_library_needs_torch_alone():
    """Neither an engine's compiler nor the lab's tools are imported before they are used."""
    code = (
        "import sys, torch; before = set(sys.modules); from deepmemory import *; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['deepmemory']"
