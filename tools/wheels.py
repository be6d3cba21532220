"""One wheel per platform, all built on this machine: Zig's C++ compiler brings every system's headers and libraries.

make wheels                                  # every platform, into dist/
make wheels PLATFORMS="linux-aarch64"        # some of them
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Platform(NamedTuple):
    """How a platform is called, and the oldest system that its wheel runs on."""

    target: str  # Zig
    system: str  # CMake
    processor: str  # CMake
    tag: str  # wheels


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "Linux", "x86_64", "manylinux_2_17_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "Linux", "aarch64", "manylinux_2_17_aarch64"),
    "musl-x86_64": Platform("x86_64-linux-musl", "Linux", "x86_64", "musllinux_1_2_x86_64"),
    "musl-aarch64": Platform("aarch64-linux-musl", "Linux", "aarch64", "musllinux_1_2_aarch64"),
    "macos-arm64": Platform("aarch64-macos.13.0", "Darwin", "arm64", "macosx_13_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos.13.0", "Darwin", "x86_64", "macosx_13_0_x86_64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "Windows", "AMD64", "win_amd64"),
    "windows-arm64": Platform("aarch64-windows-gnu", "Windows", "ARM64", "win_arm64"),
}


def run(*command: str | Path, **environment: str) -> None:
    """Run a tool of this Python's environment; what it says is shown if it fails."""
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tool = [sys.executable, "-m", *command]
    done = subprocess.run(tool, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def build(name: str, folder: Path, build_type: str = "Release") -> Path:
    """The wheel of one platform, in ``folder``."""
    platform = PLATFORMS[name]
    compiler = f"{sys.executable} -m ziglang c++ -target {platform.target}"
    if "musl" in platform.target:
        compiler += " -dynamic"  # the C library of the machine, not a second one inside
    defines = {
        "CMAKE_SYSTEM_NAME": platform.system,
        "CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "CMAKE_MODULE_LINKER_FLAGS": "-s",  # without debugging symbols; the host's `strip` knows its own format alone
    }
    settings = {f"cmake.define.{key}": value for key, value in defines.items()}
    settings |= {
        "build-dir": f"build/wheels/{name}-{build_type}",
        "cmake.build-type": build_type,
        "install.strip": "false",
    }
    options = [f"--config-settings={key}={value}" for key, value in settings.items()]
    with tempfile.TemporaryDirectory() as temporary:
        made = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", temporary]
        run("pip", "wheel", *made, *options, ROOT, CXX=compiler)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if not any(file.startswith("deepmemory/ops/cpu/engine.") for file in archive.namelist()):
                raise SystemExit(f"{name}: the CPU engine was not built; try it with `{compiler}`")
        local = f"linux_{platform.processor}" if platform.system == "Linux" else platform.tag
        run("wheel", "tags", "--remove", "--platform-tag", local, wheel)
        (wheel,) = Path(temporary).glob("*.whl")
        if platform.system == "Linux":  # the tag follows from what the library needs of the system
            repaired = Path(temporary) / "repaired"
            run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", repaired, wheel)
            (wheel,) = repaired.glob("*.whl")
            if platform.tag not in wheel.name:
                raise SystemExit(f"{name}: {wheel.name} is not {platform.tag}")
        return Path(shutil.copy(wheel, folder))


def main() -> None:
    """Build what is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"of {', '.join(PLATFORMS)}; default: all")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder for the wheels")
    arguments = parser.parse_args()
    unknown = set(arguments.platforms) - set(PLATFORMS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; platforms are {', '.join(PLATFORMS)}")
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name in arguments.platforms or PLATFORMS:
        print(build(name, arguments.to.resolve()), flush=True)


if __name__ == "__main__":
    main()
