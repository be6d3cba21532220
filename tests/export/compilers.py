"""C files compiled and run: here, and for ARM under qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic"]
# The command to compile with, and the one that runs the program; all but the first from Debian's packages.
MACHINES = {
    "gcc": (["gcc"], []),
    "clang": (["clang"], []),
    "arm": (["arm-linux-gnueabihf-gcc", "-static"], ["qemu-arm"]),
    "aarch64": (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]),
}
MAIN = """
#include <stdio.h>
#include <string.h>
#define {PREFIX}_HEADER
#include "{prefix}.c"

/* Runs over all inputs twice, with a reset between; the state starts with garbage. */
int main(void)
{{
    static {kind} x[{columns}];
    static float y[{PREFIX}_OUTPUTS];
    {prefix}_state state;
    memset(&state, 0x7f, sizeof state);
    for (int round = 0; round < 2; round++) {{
        {prefix}_reset(&state);
        rewind(stdin);
        while (fread(x, sizeof *x, {columns}, stdin) == {columns}) {{
            {prefix}_step(&state, {argument}, y);
            fwrite(y, sizeof *y, {PREFIX}_OUTPUTS, stdout);
        }}
    }}
    return 0;
}}
"""


def needs(*programs: str) -> pytest.MarkDecorator:
    """A mark for tests that run these programs: where one is missing, they are skipped."""
    missing = " and ".join(program for program in programs if shutil.which(program) is None)
    return pytest.mark.missing(missing, "not installed" if missing else None)


def machine(name: str) -> pytest.param:
    """A parameter for tests that compile for a machine and run there."""
    return pytest.param(name, marks=needs(*(command[0] for command in MACHINES[name] if command)))


def outputs(path: Path, x: Tensor, on: str = "gcc") -> Tensor:
    """What the steps of a compiled file give for inputs (T, features) or words (T), each round's (T, outputs)."""
    (compiler, *flags), runner = MACHINES[on]
    prefix, words = path.stem, not x.is_floating_point()
    text = MAIN.format(
        prefix=prefix,
        PREFIX=prefix.upper(),
        kind="int" if words else "float",
        columns=1 if words else x.shape[1],
        argument="*x" if words else "x",
    )
    main, program = path.with_name("main.c"), path.with_suffix("")
    main.write_text(text)
    command = [compiler, *flags, *STRICT, "-O2", path, main, "-o", program, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = path.with_suffix(".input")
    given.write_bytes((x.int() if words else x).contiguous().numpy().tobytes())
    with open(given, "rb") as file:
        said = subprocess.run([*runner, program], stdin=file, capture_output=True, check=True).stdout
    first, second = torch.frombuffer(bytearray(said), dtype=torch.float32).view(2, len(x), -1)
    assert torch.equal(first, second)  # a reset forgets everything
    return first
