"""The programs in ``benchmarks`` fit the library that they measure."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_everything_that_a_benchmark_imports_is_there(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])  # they import one another
    runpy.run_path(str(script), run_name="imported")
