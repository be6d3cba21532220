"""What a user gets: the wheel and the source archive."""

import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
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
    return run_from(folder)


def run_from(folder: Path) -> str:
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
        assert sdist.stat().st_size < 8e6 + 6e6  # the latter for the trained networks

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
        trained = {f"deepmemory/lab/use/trained/{task}" for task in ("polymusic", "translation", "ptb")}
        assert {f"{name}.{ending}" for name in trained for ending in ("json", "safetensors")} <= set(names)
        assert not [name for name in names if name.endswith((".cpp", ".h"))]
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"deepmemory"}
        assert install(wheel, tmp_path / "site").split() == [dm.__version__, "True", "ready"]

    def test_without_a_compiler_the_install_succeeds_and_says_what_to_do(self, sdist, tmp_path):
        """What it says works even where pip has kept the wheel that it built without a compiler."""
        pip = {f"PIP_{name}": str(tmp_path / name.lower()) for name in ("CACHE_DIR", "TARGET")}
        pip |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(sdist.parent), "PIP_NO_BUILD_ISOLATION": "0"}
        pip |= {"SKBUILD_CMAKE_BUILD_TYPE": "Debug"}
        site = tmp_path / "target"
        run(*PIP, "install", "--no-deps", "deepmemory", **pip, CC="false", CXX="false")
        said = run_from(site)
        assert said.startswith(f"{dm.__version__} False ")
        assert "C++ compiler" in said
        (advice,) = re.findall("`pip (.*)`", said)
        if shutil.which("g++"):
            shutil.rmtree(site)
            run(*PIP, *advice.split(), **pip)
            assert run_from(site).split() == [dm.__version__, "True", "ready"]


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("wheels")
    sys.modules.pop("wheels")


def mach_o(*libraries: str) -> bytes:
    """A library for a Mac as far as its load commands, with one of another kind before them."""
    commands = [struct.pack("<4I", 0x1B, 24, 1, 2).ljust(24, b"\0")]  # LC_UUID
    for name in libraries:
        commands.append(struct.pack("<6I", 0xC, 24 + 48, 24, 0, 0, 0) + name.encode().ljust(48, b"\0"))
    body = b"".join(commands)
    return struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, len(commands), len(body), 0, 0) + body


def pe(*libraries: str) -> bytes:
    """A library for Windows with its imports in the second of two sections."""
    names = b"".join(name.encode() + b"\0" for name in libraries)
    places = [0x2000 + 20 * (len(libraries) + 1) + names.index(name.encode() + b"\0") for name in libraries]
    imports = b"".join(struct.pack("<5I", 0, 0, 0, place, 0) for place in places) + bytes(20) + names
    optional = struct.pack("<H110x4I", 0x20B, 0, 0, 0x2000, len(imports))
    sections = [struct.pack("<8s4I16x", name, 0x100, start, 0x200, at) for name, start, at in SECTIONS]
    header = b"PE\0\0" + struct.pack("<HH12xHH", 0x8664, 2, len(optional), 0x2000) + optional + b"".join(sections)
    return (struct.pack("<2s58xI", b"MZ", 64) + header).ljust(0x400, b"\0") + imports


SECTIONS = [(b".text", 0x1000, 0x200), (b".rdata", 0x2000, 0x400)]


class TestPlatforms:
    def test_they_are_those_on_the_page(self, wheels):
        page = (ROOT / "docs" / "engines.md").read_text()
        said = re.findall(r"`((?:manylinux|musllinux|macosx|win)_\w+)`", page)
        assert said == [platform.tag for platform in wheels.PLATFORMS.values()]
        for name, platform in wheels.PLATFORMS.items():
            assert platform.target.startswith(name.partition("-")[2].replace("arm64", "aarch64")), name

    @pytest.mark.parametrize("file", [mach_o, pe])
    @pytest.mark.parametrize("names", [[], ["one"], ["first.dll", "/usr/lib/second.dylib"]])
    def test_libraries_that_a_file_loads(self, wheels, file, names):
        assert wheels.dynamic_libraries(file(*names)) == names

    def test_a_library_that_a_system_lacks_ends_the_build(self, wheels):
        wheels.check("macos-arm64", mach_o("/usr/lib/libSystem.B.dylib"))
        wheels.check("windows-x86_64", pe("KERNEL32.dll", "api-ms-win-crt-math-l1-1-0.dll"))
        with pytest.raises(SystemExit, match=r"^windows-x86_64: the CPU engine needs libstdc\+\+-6\.dll$"):
            wheels.check("windows-x86_64", pe("KERNEL32.dll", "libstdc++-6.dll"))
        with pytest.raises(SystemExit, match=r"^macos-arm64: the CPU engine needs @rpath/libomp\.dylib$"):
            wheels.check("macos-arm64", mach_o("/usr/lib/libSystem.B.dylib", "@rpath/libomp.dylib"))

    def test_another_kind_of_file(self, wheels):
        with pytest.raises(ValueError, match="neither a Mach-O nor a PE"):
            wheels.dynamic_libraries(b"\x7fELF")


def test_requirements_agree():
    run(*PIP, "check")


def test_the_version_stands_in_one_place():
    assert dm.__version__ not in (ROOT / "pyproject.toml").read_text()
    assert f"## {dm.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {dm.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_everything_public_is_there_after_one_import():
    code = "import deepmemory as dm; print(dm.export.program.__name__, dm.gradients.condition.__name__)"
    assert run(sys.executable, "-c", code).split() == ["program", "condition"]


def test_the_extra_for_export_brings_what_its_page_imports():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split("[<>=]", requirement)[0] for requirement in extras["export"]} | {"deepmemory", "torch"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    assert set(re.findall(r"^(?:import|from) (\w+)", "\n".join(blocks), re.MULTILINE)) <= brought
