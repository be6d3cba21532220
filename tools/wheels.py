"""One wheel per platform, all built on this machine: Zig's C++ compiler brings every system's headers and libraries.

make wheels                                  # every platform, into dist/
make wheels PLATFORMS="linux-aarch64"        # some of them
"""

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# Libraries that every macOS, and every Windows since 10, has. For Linux, auditwheel has a list.
SYSTEM_LIBRARIES = re.compile(
    r"/usr/lib/lib(System\.B|c\+\+\.1)\.dylib|KERNEL32\.dll|ntdll\.dll|api-ms-win-[\w-]+\.dll"
)


class Platform(NamedTuple):
    """The names of a platform, with the oldest system that its wheel runs on."""

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
    """Run a tool of this Python's environment; its output is shown if it fails."""
    tools = Path(sys.executable).parent
    environment["PATH"] = os.pathsep.join([str(tools), os.environ["PATH"]])
    done = subprocess.run(
        [tools / command[0], *command[1:]], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def dynamic_libraries(library: bytes) -> list[str]:
    """Names of the libraries that a Mach-O or PE library for a 64-bit machine loads."""
    if library[:4] == b"\xcf\xfa\xed\xfe":
        return _mach_o_libraries(library)
    if library[:2] == b"MZ":
        return _pe_libraries(library)
    raise ValueError(f"neither a Mach-O nor a PE library: it begins with {library[:4]!r}")


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _mach_o_libraries(data: bytes) -> list[str]:
    load_dylib = 0xC  # LC_LOAD_DYLIB; the weak and re-exported kinds have the same layout
    kinds, found, at = {load_dylib, 0x80000018, 0x8000001F}, [], 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        kind, size, name = struct.unpack_from("<III", data, at)
        if kind in kinds:
            found.append(_text(data, at + name))
        at += size
    return found


def _pe_libraries(data: bytes) -> list[str]:
    (header,) = struct.unpack_from("<I", data, 0x3C)
    (count,), (optional,) = struct.unpack_from("<H", data, header + 6), struct.unpack_from("<H", data, header + 20)
    sections = [struct.unpack_from("<IIII", data, header + 24 + optional + 40 * i + 8) for i in range(count)]

    def offset(address: int) -> int:
        for virtual_size, start, size, at in sections:
            if start <= address < start + max(virtual_size, size):
                return address - start + at
        raise ValueError(f"no section holds the address {address:#x}")

    (imports,) = struct.unpack_from("<I", data, header + 24 + 112 + 8)  # the second directory of a PE32+ header
    found, at = [], offset(imports) if imports else 0
    while at and (name := struct.unpack_from("<I", data, at + 12)[0]):
        found.append(_text(data, offset(name)))
        at += 20
    return found


def check(name: str, library: bytes) -> None:
    """Exit if a library needs another that its system does not have."""
    foreign = [needed for needed in dynamic_libraries(library) if not SYSTEM_LIBRARIES.fullmatch(needed)]
    if foreign:
        raise SystemExit(f"{name}: the CPU engine needs {', '.join(foreign)}")


def name_musl(wheel: Path, processor: str) -> None:
    """Change the C library's name inside a wheel to that of Alpine, by which auditwheel recognises musl.

    musl's loader accepts both names.
    """
    with tempfile.TemporaryDirectory() as temporary:
        run("wheel", "unpack", "--dest", temporary, wheel)
        (contents,) = Path(temporary).iterdir()
        engine = contents / "deepmemory/ops/cpu/engine.so"
        run("patchelf", "--replace-needed", "libc.so", f"libc.musl-{processor}.so.1", engine)
        run("wheel", "pack", "--dest-dir", wheel.parent, contents)


def build(name: str, folder: Path, build_type: str = "Release") -> Path:
    """The wheel of one platform, in ``folder``."""
    platform = PLATFORMS[name]
    compiler = f"{sys.executable} -m ziglang c++ -target {platform.target}"
    if "musl" in platform.target:
        compiler += " -dynamic"  # the C library of the machine, not a second one inside
    defines = {
        "CMAKE_SYSTEM_NAME": platform.system,
        "CMAKE_SYSTEM_PROCESSOR": platform.processor,
    }
    for kind in ("MODULE", "SHARED"):  # without debugging symbols; the host's `strip` only knows its own format
        defines[f"CMAKE_{kind}_LINKER_FLAGS"] = "-s"
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
            engine = [file for file in archive.namelist() if file.startswith("deepmemory/ops/cpu/engine.")]
            if not engine:
                raise SystemExit(f"{name}: the CPU engine was not built; try it with `{compiler}`")
            if platform.system != "Linux":
                check(name, archive.read(engine[0]))
        if "musl" in platform.target:
            name_musl(wheel, platform.processor)
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
    """Build the wheels that are named on the command line."""
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
