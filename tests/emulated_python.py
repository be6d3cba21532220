"""Runs pytest in an emulated Python, where tests that start another one get an emulated one, too.

qemu-aarch64 ... python3 tests/emulated_python.py "qemu-aarch64 ... python3" tests/ops
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        python.chmod(0o755)
        sys.executable = os.fspath(python)
        raise SystemExit(pytest.main(arguments))
