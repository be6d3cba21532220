"""Cycles of a step of the GPU engine, estimated from its machine code, for layers in single blocks; needs no GPU.

pip install nvidia-cuda-nvrtc==13.0.* nvidia-cuda-nvdisasm
python benchmarks/cycles.py                       # results/cycles.json
python benchmarks/cycles.py ptb-2 --layouts 4     # also other layouts, and shows what a step waits for

A small layer's step is a chain of instructions that wait for one another, and the machine code says for what: how many
cycles until the next instruction, and which loads have to be complete. So the loop over the steps is simulated, for the
warps that share a scheduler. The latencies of memory are set below, as on an H200; other warps' use of shared memory is
not counted. The times of ``benchmarks/layouts.py`` are 0.6 to 0.85 ns for each cycle found here.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from ctypes import CDLL, RTLD_GLOBAL
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import layouts

from deepmemory.lab.records import git_commit
from deepmemory.lab.writing import put
from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import MANY_STEPS, Plan, Shape, plans
from deepmemory.ops.nvrtc.spread import FMA
from deepmemory.ops.recurrence import Recurrence

RESULTS = Path(__file__).parent / "results" / "cycles.json"
# Of dmu bench, and a deep one that fits into single blocks.
SHAPES = ("adding", "ptb-1", "ptb-2", "mnist", "forecast", "stream", "odd", "deep-5")
DEEP = layouts.Case(Recurrence("dmu", "tanh"), 64, 64, (64,) * 4, 32, 100)
MODES = ("float32", "bfloat16")
HOPPER = nvrtc.Device((9, 0), 132, 232448, {2: 64, 3: 42, 4: 30, 5: 22, 6: 20, 7: 18, 8: 14, 16: 7})  # an H200
SCHEDULERS = 4  # of a multiprocessor, among which a block's warps are divided
BARRIER = 28  # cycles until a block's warps continue
# Cycles until a result is there; BARRIERS is the number of barriers that an instruction can wait for.
LATENCIES = {"LDS": 29, "LDS.128": 33, "SHFL": 25, "MUFU": 23, "LDG": 290, "LDC": 30, "STS": 12, "STG": 15, "HMMA": 33}
OTHER_LATENCY, READ_LATENCY, BARRIERS = 25, 15, 6
SHOWN = 15  # cycles of a wait that is worth showing


class Instruction(NamedTuple):
    """An instruction with its control bits."""

    text: str
    stall: int  # cycles until the next one of the warp
    written: int | None  # the barrier that tells when its result is there,
    read: int | None  # and when its operands have been read
    waits: tuple[int, ...]  # barriers that it waits for

    @property
    def name(self) -> str:
        """Without a predicate and operands."""
        return self.text.split()[1 if self.text.startswith("@") else 0]

    @property
    def kind(self) -> str:
        """Without its options."""
        return self.name.split(".")[0]

    @property
    def latency(self) -> int:
        """Cycles until its result is there."""
        wide = f"{self.kind}.128" if ".128" in self.name else self.kind
        return LATENCIES.get(wide, LATENCIES.get(self.kind, OTHER_LATENCY))


def decoded(listing: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and where its labels are, from what ``nvdisasm -c -hex`` prints."""
    after = listing[listing.index(f".text.{kernel}:") + 1 :]
    following = re.search(r"\n\.text\.\w+:", after)
    found: list[Instruction] = []
    labels, text = dict[str, int](), ""
    for line in after[: following.start() if following else None].splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif first := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]+ \*/", line):
            text = first[1].strip()
        elif text and (second := re.match(r"\s+/\* (0x[0-9a-f]+) \*/", line)):
            bits = int(second[1], 16) >> 41
            places = [place if place < BARRIERS else None for place in (bits >> 5 & 7, bits >> 8 & 7)]
            waits = tuple(k for k in range(BARRIERS) if bits >> 11 + k & 1)
            found.append(Instruction(text, bits & 15, *places, waits))
            text = ""
    return found, labels


def step_loop(code: Sequence[Instruction], labels: dict[str, int], layers: int = 1) -> Sequence[Instruction]:
    """The loop over the steps: the one with most block barriers, the longest of those.

    An inner loop with barriers goes over ``layers`` layers, which share their code.
    """
    found = []
    for last, instruction in enumerate(code):
        target = re.search(r"BRA\b.*`\((\.L_\w+)\)", instruction.text)
        if target and labels.get(target[1], last + 1) <= last:
            first = labels[target[1]]
            found.append((sum(one.kind == "BAR" for one in code[first : last + 1]), last - first, first, last))
    _, _, begin, end = max(found)
    inner = min((loop for loop in found if loop[0] and begin < loop[2] and loop[3] < end), default=None)
    if inner is None:
        return code[begin : end + 1]
    *_, first, last = inner
    return [*code[begin:first], *(layers * [*code[first : last + 1]]), *code[last + 1 : end + 1]]


def before_the_steps(code: Sequence[Instruction]) -> int:
    """Instructions that bring weights to the chip, up to the first barrier; those of a loop count once."""
    return next(place for place, one in enumerate(code) if one.kind == "BAR")


@dataclass
class Warp:
    """The progress of a warp."""

    at: int = 0  # instruction of the loop
    free: int = 0  # cycle from which on it may continue
    ready: list[int] = field(default_factory=lambda: [0] * BARRIERS)  # cycle at which each barrier is released,
    why: list[str] = field(default_factory=lambda: [""] * BARRIERS)  # and the instruction that releases it
    waits_since: int | None = None  # at the block's barrier
    rounds: list[int] = field(default_factory=list)  # cycle at which each round ended


class Wait(NamedTuple):
    """A wait for a result."""

    cycle: int  # of the step
    cycles: int
    text: str
    cause: str


def run(loop: Sequence[Instruction], warps: int, rounds: int = 4) -> tuple[int, list[Wait]]:
    """Cycles of the last round of some warps that share a scheduler, and what the first of them waits for in it."""
    all_warps, cycle, last = [Warp() for _ in range(warps)], 0, None
    waited: list[Wait] = []
    while going := [warp for warp in all_warps if len(warp.rounds) < rounds]:
        ready = [warp for warp in going if warp.waits_since is None]
        if not ready:
            free = max(warp.waits_since or 0 for warp in going) + BARRIER
            for warp in going:
                warp.free, warp.waits_since = max(warp.free, free), None
            continue

        def begin(warp: Warp, cycle: int = cycle) -> int:
            return max(cycle, warp.free, *(warp.ready[k] for k in loop[warp.at].waits), 0)

        warp = min(ready, key=lambda one: (begin(one), one is not last))
        now, one = begin(warp), loop[warp.at]
        if warp is all_warps[0] and len(warp.rounds) == rounds - 1 and now - warp.free >= SHOWN:
            cause = max(one.waits, key=lambda k: warp.ready[k], default=None)
            if cause is not None and warp.ready[cause] == now:
                waited.append(Wait(now - warp.rounds[-1], now - warp.free, one.text, warp.why[cause]))
        for barrier, latency in ((one.written, one.latency), (one.read, min(one.latency, READ_LATENCY))):
            if barrier is not None and now + latency > warp.ready[barrier]:
                warp.ready[barrier], warp.why[barrier] = now + latency, one.text
        cycle, last, warp.free, warp.at = now + 1, warp, now + max(one.stall, 1), warp.at + 1
        if one.kind == "BAR":
            warp.waits_since = now
        if warp.at == len(loop):
            warp.at = 0
            warp.rounds.append(warp.free)
    first = all_warps[0].rounds
    return first[-1] - first[-2], waited


def nvidia_package(name: str) -> Path:
    """A file of NVIDIA's Python packages."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob(f"*/*/{name}"):
            return path
    raise SystemExit(f"{name} was not found: pip install nvidia-cuda-nvrtc==13.0.* nvidia-cuda-nvdisasm")


def disassembled(shape: Shape, layout: Plan) -> str:
    """The machine code of a layout's kernels."""
    nvdisasm = nvidia_package("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiler.compile_to_cubin(layout.defines(shape, True), HOPPER.capability))
        file.flush()
        return subprocess.run([nvdisasm, "-c", "-hex", file.name], capture_output=True, text=True, check=True).stdout


def single_blocks(name: str, mode: str, count: int) -> Iterator[tuple[Shape, Plan]]:
    """The layouts of a shape in single blocks, the plan's favourite first; activations as in ``dmu bench``."""
    case = (layouts.cases() | {"deep-5": DEEP})[name]
    shape = case.shape(mode)
    if case.rec.cell == "dmu":
        shape = replace(shape, activation="leaky_relu")
    seen: set[tuple[int, int]] = set()
    for layout in plans(shape, (FMA,), 1, case.batch, *HOPPER[1:], MANY_STEPS):
        kind = layout.warps, layout.direct
        if layout.cluster == 1 and kind not in seen and len(seen) < count:
            seen.add(kind)
            yield shape, layout


def measure(names: Sequence[str], count: int) -> Iterator[tuple[dict[str, Any], list[Wait]]]:
    """A row for each layout, and the waits of both sweeps."""
    for name in names:
        for mode in MODES:
            for shape, layout in single_blocks(name, mode, count):
                listing, all_waits = disassembled(shape, layout), list[Wait]()
                row = {"shape": name, "precision": mode}
                row |= {key: getattr(layout, key) for key in ("rows", "warps", "direct")}
                for sweep in ("forward", "backward"):
                    code, labels = decoded(listing, f"sweep_{sweep}")
                    layers = max(repeat for _, repeat in layout.stages(shape))
                    row[sweep], waits = run(step_loop(code, labels, layers), -(-layout.warps // SCHEDULERS))
                    row[f"start_{sweep}"] = before_the_steps(code)
                    all_waits += waits
                yield row, all_waits


def of_both_sweeps(rows: Sequence[dict[str, Any]], kind: str = "") -> dict[tuple[str, str], int]:
    """Cycles of a step by shape and precision; with ``kind="start_"``, instructions before the first one."""
    return {(row["shape"], row["precision"]): row[f"{kind}forward"] + row[f"{kind}backward"] for row in rows}


def main(names: Sequence[str], count: int, out: Path) -> None:
    """Print and keep cycles of a step; for shapes that are named, print what the steps wait for instead."""
    CDLL(str(nvidia_package("libnvrtc-builtins.so.13.0")), mode=RTLD_GLOBAL)
    library = CDLL(str(nvidia_package("libnvrtc.so.13")))
    compiler.nvrtc = lambda: library  # type: ignore[assignment]  # torch without CUDA has none
    rows = []
    for row, waits in measure(names or SHAPES, count):
        rows.append(row)
        layout = f"rows {row['rows']} warps {row['warps']} direct {row['direct']}"
        numbers = "".join(f"{row[key]:6}" for key in ("forward", "backward", "start_forward", "start_backward"))
        print(f"{row['shape']:10} {row['precision']:9} {layout:26}{numbers}", flush=True)
        for wait in waits if names else ():
            print(f"    at {wait.cycle:4}: {wait.cycles:3} cycles  {wait.text:50} for {wait.cause}")
    if not names:
        what = "by the machine code for Hopper GPUs: cycles of a step of both sweeps, instructions before the first one"
        commits = json.loads(out.read_text())["commits"] if out.exists() else {}
        result = {"what": what, "commits": commits | {git_commit(): rows}}
        put(out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shapes", nargs="*", help="of dmu bench; default: some that fit into single blocks, written to a file"
    )
    parser.add_argument("--layouts", type=int, default=1, help="of every shape and precision, the best ones first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    main(given.shapes, given.layouts, given.out)
