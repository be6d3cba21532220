"""Microseconds per step of a stream, as ``examples/streaming.py`` measures them, kept in git.

python benchmarks/streaming.py
"""

import importlib.util
import json
import os
from importlib import metadata
from pathlib import Path

from deepmemory.lab.bench.speed import machine
from deepmemory.lab.records import git_commit, now

HERE = Path(__file__).parent
SIZES = (16, 64, 256)
STEPS, ROUNDS = 3000, 5


def table(result: dict) -> str:
    """One column per size, one row per way, for docs/deploy.md."""
    times = result["microseconds"]
    rows = [["", *times], ["---", *("---:" for _ in times)]]
    rows += [[f"`{name}`", *(f"{times[size][name]:.0f}" for size in times)] for name in next(iter(times.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def with_table(text: str, result: dict) -> str:
    """The page with the table between its marks replaced."""
    start, end = "<!-- latencies -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    return before + start + table(result) + end + rest.partition(end)[2]


def main():
    spec = importlib.util.spec_from_file_location("streaming", HERE.parent / "examples" / "streaming.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rounds = [{f"hidden {size}": example.latencies(size, STEPS) for size in SIZES} for _ in range(ROUNDS)]
    best = {size: {way: min(r[size][way] for r in rounds) for way in times} for size, times in rounds[0].items()}
    result = {
        "what": "microseconds of one step of one stream of 3 sensors, float32: "
        f"median of {STEPS} steps, best of {ROUNDS} rounds",
        "when": now(),
        "machine": machine("cpu") | {name: metadata.version(name) for name in ("onnxruntime", "deepmemory")},
        "load": os.getloadavg()[0],
        "git": git_commit(),
        "microseconds": best,
    }
    (HERE / "results" / "streaming.json").write_text(json.dumps(result, indent=1) + "\n")
    page = HERE.parent / "docs" / "deploy.md"
    page.write_text(with_table(page.read_text(), result))
    print(table(result))


if __name__ == "__main__":
    main()
