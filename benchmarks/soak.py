"""Several hundred small studies in a row in one process: memory, file handles and threads do not grow.

python benchmarks/soak.py --studies 400 --out benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import deepmemory as dm
from deepmemory.lab.records import Records, versions
from deepmemory.lab.report import write_report
from deepmemory.lab.settings import CELLS, Machine, Setting
from deepmemory.lab.training.progress import PlannedStudies
from deepmemory.lab.training.studies import run_studies

WARM_UP = 50  # studies before the first reading: caches fill, libraries load
GROWTH = 16.0  # MiB that may come and go with the allocator
EVERY = 10  # studies between two readings
TINY = Setting(
    hidden=(4,), min_length=24, max_length=30, batch=4, steps=3, epochs=2, validation=16, test=16, stop_below=1e-9
)


class Silent(PlannedStudies):
    def say(self, text: str) -> None:
        pass


def reading(studies: int) -> dict[str, Any]:
    """Memory, file handles and threads of this process now."""
    gc.collect()
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "studies": studies,
        "resident_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "file_handles": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count(),
    }


def soak(studies: int, machine: Machine) -> list[dict[str, Any]]:
    """Train, read back and report; every study has settings of its own, and one in ten diverges."""
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(studies):
            reported = number % 25 == 24
            out = Path(folder) / (f"reported-{number}" if reported else "joint")
            rate = 1e38 if number % 10 == 9 else 0.01 + number * 1e-5
            setting = replace(TINY, cell=CELLS[number % len(CELLS)], lr=rate)
            run_studies([setting], range(2), out, machine, Silent())
            opened = Records(out)
            found = opened.study(setting.key)
            opened.close()
            assert found is not None
            assert len(found.runs) == 2
            if reported:
                write_report(out)
            if number % EVERY == 0:
                readings.append(reading(number))
    return readings


def verdict(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the first and the last quarter after the warm-up; only memory may grow, by a little."""
    settled = [one for one in readings if one["studies"] >= WARM_UP]
    quarter = max(1, len(settled) // 4)
    names = ("resident_mib", "file_handles", "threads", "python_threads")
    first, last = (
        {name: statistics.median(one[name] for one in part) for name in names}
        for part in (settled[:quarter], settled[-quarter:])
    )
    grown = {name: round(last[name] - first[name], 1) for name in names}
    steady = grown["resident_mib"] <= GROWTH and all(grown[name] <= 0 for name in names[1:])
    return {"first_quarter": first, "last_quarter": last, "grown": grown, "steady": steady}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--engine", default="auto", choices=["auto", *dm.engines()])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    readings = soak(options.studies, Machine(options.device, options.engine, threads=1))
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), **versions()},
        "studies": options.studies,
        "seconds": round(time.monotonic() - started, 1),
        **verdict(readings),
        "readings": readings,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "readings"}, indent=1))
    sys.exit(0 if result["steady"] else 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
