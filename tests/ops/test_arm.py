"""The CPU engine for ARM, compiled here and run by an emulator: a part of what `make test-arm` runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepmemory.ops import Recurrence, Sequences, cpu

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
ABSENT = [tool for tool in TOOLS if shutil.which(tool) is None]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}; see `make test-arm`")
def test_the_engine_for_arm_gives_what_the_plain_engine_gives(tmp_path):
    settings = [f"ARM={tmp_path}", "ARM_FLAGS=-O1", f"ARM_PYTHON={sys.executable}"]
    tests = "ARM_TESTS=-k 'test_activations or test_depth or test_accuracy'"
    made = run("make", "--no-print-directory", "test-arm", *settings, tests)
    (calls,) = re.findall(r"^(\d+) calls of the emulated engine", made, re.MULTILINE)
    assert int(calls) > 100
    header = (tmp_path / "engine.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # aarch64


def test_the_emulated_engine_knows_the_layout_of_a_call():
    import emulated_engine

    call, _ = cpu._call(Recurrence("dmu"), torch.zeros(1, 1, 1), 1, Sequences())
    outputs, states, weights = 2 + len(cpu._NO_GRAD_Y) + 1, 2 * len(cpu._NO_STATE), 1
    assert len(call) + outputs + states + weights == emulated_engine.FIXED
