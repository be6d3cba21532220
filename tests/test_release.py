"""What a user gets: the wheel, the source archive, the types, a quick import."""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import deepmemory as dm

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]

# Runs what lies in the current folder, not the checkout that the environment knows.
ELSEWHERE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "deepmemory" not in type(f).__module__]
sys.path.insert(0, ".")
import torch, deepmemory as dm
assert dm.__file__.startswith(sys.argv[1]), dm.__file__
y, h = dm.DMU(3, 5)(torch.randn(7, 2, 3))
assert y.shape == (7, 2, 5) and y.isfinite().all()
available, reason = dm.engines()["cpu"]
print(dm.__version__, available, reason)
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(archive: Path, folder: Path) -> str:
    """Put a wheel into an empty folder and run it from there."""
    run(*PIP, "install", "--no-deps", "--no-index", "--target", folder, archive)
    return run(sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(folder), cwd=folder)


def build_wheel(sdist: Path, folder: Path, **environment: str) -> Path:
    """Without optimisation, which takes a while and changes nothing that is looked at here."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--config-settings=cmake.build-type=Debug"]
    run(*PIP, "wheel", *options, "--wheel-dir", folder, sdist, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, folder)
    (archive,) = folder.glob("*.tar.gz")
    return archive


class TestArchives:
    def test_the_source_archive_holds_what_is_needed(self, sdist):
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {
            "LICENSE",
            "README.md",
            "CMakeLists.txt",
            "deepmemory/py.typed",
            "deepmemory/ops/cpu/sweep.cpp",
        } <= names
        unwanted = (".ci/", ".venv/", "build/", "runs/", "carry/")
        assert not [name for name in names if name.startswith(unwanted) or name.endswith((".so", ".pyc"))]
        assert sdist.stat().st_size < 8e6

    @pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs CMake and g++")
    def test_the_wheel_fits_every_python_and_works_from_anywhere(self, sdist, tmp_path):
        wheel = build_wheel(sdist, tmp_path)
        assert re.fullmatch(rf"deepmemory-{re.escape(dm.__version__)}-py3-none-(?!any).+\.whl", wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert any(name.startswith("deepmemory/ops/cpu/engine.") for name in names)
        assert {"deepmemory/py.typed", "deepmemory/ops/nvrtc/sweeps.cuh", "deepmemory/lab/use/play/page.html"} <= set(
            names
        )
        assert not [name for name in names if name.endswith((".cpp", ".h"))]
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"deepmemory"}
        assert install(wheel, tmp_path / "site").split() == [dm.__version__, "True", "ready"]

    def test_without_a_compiler_the_install_succeeds_and_says_what_is_missing(self, sdist, tmp_path):
        wheel = build_wheel(sdist, tmp_path, CC="false", CXX="false")
        said = install(wheel, tmp_path / "site")
        assert said.startswith(f"{dm.__version__} False ")
        assert "C++ compiler" in said
        assert "pip install" in said


def test_requirements_agree():
    run(*PIP, "check")


def test_the_version_stands_in_one_place():
    assert dm.__version__ not in (ROOT / "pyproject.toml").read_text()
    assert f"## {dm.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {dm.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_import_is_quick():
    code = "import time, torch; t = time.perf_counter(); from deepmemory import *; print(time.perf_counter() - t)"
    seconds = [float(run(sys.executable, "-c", code)) for _ in range(3)]
    assert statistics.median(seconds) < 0.3


SCRIPT = """
import torch
import deepmemory as dm
from deepmemory import export

rnn = dm.DMU(10, 64, batch_first=True, transition=[32], activation="silu")
output, h_n = rnn(torch.randn(2, 5, 10), lengths=torch.tensor([5, 3]))
h: torch.Tensor = dm.DMUCell(3, 4)(torch.zeros(1, 3))
optimiser = torch.optim.Adam(dm.parameter_groups(rnn, lr=0.1))
layers: list[torch.nn.Module] = [dm.RHN(3, 4, depth=2), dm.RNN(3, 4), dm.GRU(3, [4, 5]), dm.LSTM(3, 4, proj_size=2)]
ready: bool = dm.engines()["cpu"].available
satisfied: bool = dm.gradients.condition(rnn).satisfied
program: torch.export.ExportedProgram = export.program(rnn, {"input": torch.zeros(2, 5, 10)})
export.save(rnn, {"input": torch.zeros(2, 5, 10)}, "model.onnx", sizes={"input": {0: "batch"}})
version: str = dm.__version__
"""


def test_a_users_script_is_checked_strictly(tmp_path):
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text("import deepmemory as dm\ndm.DMU(10, '64')\ndm.DMU(10, 64, transitions=[3])\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line.split(":")[:2] for line in lines if ": error:" in line] == [["wrong.py", "2"], ["wrong.py", "3"]], (
        lines
    )
