"""Models as C for small devices: bytes, microseconds per step, and what int8 weights cost on trained tasks.

python benchmarks/small_devices.py --data FOLDER

Needs gcc, and Debian's gcc-arm-linux-gnueabihf for the bytes of a Cortex-M4. Trains two small models, three minutes.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import deepmemory as dm
from deepmemory import export
from deepmemory.lab.bench.speed import machine
from deepmemory.lab.bench.tables import markdown_table
from deepmemory.lab.records import git_commit, now
from deepmemory.lab.training import random_streams
from deepmemory.lab.use.exporting import save_c
from deepmemory.lab.use.loading import choose_checkpoint, load_model

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "small_devices.json", HERE.parent / "docs" / "deploy.md"
SENSORS, SIZES, STEPS = 3, (16, 64), 2000
LAYERS = {"dm.DMU": dm.DMU, "dm.RHN": dm.RHN, "dm.RNN": dm.RNN, "dm.GRU": dm.GRU, "dm.LSTM": dm.LSTM}
KINDS = ("float32", "int8")
CORTEX_M4 = ["-Os", "-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"]
TRAINED = {  # options of each training
    "adding": ["--epochs", "20"],
    "polymusic": ["--hidden", "64", "--epochs", "12", "--lr", "0.01", "--batch", "16"],
}


class Compiled:
    """A model's C file, compiled as a shared library for this machine."""

    def __init__(self, path: Path, prefix: str, outputs: int) -> None:
        library = path.with_suffix(".so")
        subprocess.run(["gcc", "-std=c99", "-O3", "-shared", "-fPIC", path, "-o", library, "-lm"], check=True)
        loaded = ctypes.CDLL(library)
        self.reset, self.step = getattr(loaded, f"{prefix}_reset"), getattr(loaded, f"{prefix}_step")
        (state,) = re.findall(r"([\d,]+) bytes of state", path.read_text())
        self.state = ctypes.create_string_buffer(int(state.replace(",", "")))
        self.outputs = outputs

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs (T, outputs) for a sequence (T, features)."""
        x, y = x.contiguous(), torch.empty(len(x), self.outputs)
        self.reset(self.state)
        for t in range(len(x)):
            x_t, y_t = (rows.data_ptr() + 4 * t * rows.shape[1] for rows in (x, y))
            self.step(self.state, ctypes.c_void_p(x_t), ctypes.c_void_p(y_t))
        return y


def bytes_of(path: Path) -> int:
    """Code and weights on a Cortex-M4, without libm."""
    compiled = path.with_suffix(".o")
    subprocess.run(["arm-linux-gnueabihf-gcc", "-std=c99", *CORTEX_M4, "-c", path, "-o", compiled], check=True)
    shown = subprocess.run(["arm-linux-gnueabihf-size", compiled], capture_output=True, text=True, check=True).stdout
    text, data, bss = map(int, shown.splitlines()[1].split()[:3])
    assert data == bss == 0
    return text


def microseconds(path: Path, prefix: str) -> float:
    """The median time of a step, measured in C on this machine."""
    main, program = path.with_name("main.c"), path.with_suffix("")
    main.write_text(
        f"""
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <time.h>
#define {prefix.upper()}_HEADER
#include "{path.name}"

int main(void)
{{
    static float x[{prefix.upper()}_INPUTS], y[{prefix.upper()}_OUTPUTS];
    static {prefix}_state state;
    {prefix}_reset(&state);
    for (int block = 0; block < 400; block++) {{
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        for (int t = 0; t < 100; t++) {{
            x[0] = (float)(t % 7) / 7.0f;
            {prefix}_step(&state, x, y);
        }}
        clock_gettime(CLOCK_MONOTONIC, &after);
        const double passed = (double)(after.tv_sec - before.tv_sec) * 1e9 + (double)(after.tv_nsec - before.tv_nsec);
        printf("%f\\n", passed / 1e5);
    }}
    return 0;
}}
"""
    )
    subprocess.run(["gcc", "-std=c99", "-O3", path, main, "-o", program, "-lm"], check=True)
    times = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return statistics.median(map(float, times))


@torch.no_grad()
def measure_layers(folder: Path) -> list[dict]:
    """Every layer at every size, float32 and int8, and ONNX Runtime beside them."""
    spec = importlib.util.spec_from_file_location("streaming", HERE.parent / "examples" / "streaming.py")
    streaming = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(streaming)
    rows = []
    for name, make in LAYERS.items():
        for size in SIZES:
            torch.manual_seed(0)
            layer, x = make(SENSORS, size).eval(), torch.randn(STEPS, SENSORS)
            row = {"layer": name, "hidden": size, "weights": sum(weight.numel() for weight in layer.parameters())}
            for kind in KINDS:
                path = folder / f"{make.__name__}-{size}-{kind}.c"  # a library is loaded once for each path
                export.c(layer, path, weights=kind, prefix="model")
                expected = (export.rounded(layer) if kind == "int8" else layer)(x)[0]
                torch.testing.assert_close(Compiled(path, "model", size).run(x), expected, rtol=1e-4, atol=1e-5)
                row[kind] = {"bytes": bytes_of(path), "microseconds": microseconds(path, "model")}
            advance = streaming.onnx_step(layer, folder)
            row["onnxruntime"] = {"microseconds": statistics.median(streaming_times(advance, x))}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def streaming_times(advance, x: torch.Tensor) -> list[float]:
    """Microseconds of each step, called from Python."""
    times = []
    for x_t in x[:, None]:
        started = time.perf_counter()
        advance(x_t)
        times.append((time.perf_counter() - started) * 1e6)
    return times[len(times) // 10 :]


@torch.no_grad()
def measure_task(task_name: str, options: list[str], folder: Path, data: Path) -> dict:
    """Train a model, and measure its test score in Python and in C."""
    out = folder / task_name
    train = [sys.executable, "-m", "deepmemory.lab", "train", task_name, *options, "--device", "cpu"]
    subprocess.run([*train, "--data", data, "--out", out, "--json"], check=True, stdout=subprocess.DEVNULL)
    model = load_model(choose_checkpoint(None, out, task_name), data=data)
    row = {"task": task_name, "options": " ".join(options), "settings": json.loads(model.setting.to_json())}
    row["weights"] = sum(weight.numel() for weight in model.network.parameters())
    paths = {kind: folder / f"{task_name}-{kind}.c" for kind in KINDS}
    for kind, path in paths.items():
        save_c(model, path, kind)
    ways = {kind: Compiled(path, task_name, model.network.output.out_features) for kind, path in paths.items()}
    sums = {way: torch.zeros(3, dtype=torch.float64) for way in ("python", *ways)}
    feed = model.task.feed(random_streams.TEST, model.setting, torch.tensor([model.seed]), 500, torch.float32)
    for index, shape in enumerate(feed.plan(0)):
        batch = feed.batch(index, shape)
        x, lengths = (value[0] if dim == 0 else value for value, dim in zip(batch.inputs, feed.in_dims, strict=True))
        answers = {"python": model.network(x, lengths)}
        every_step = isinstance(answers["python"], tuple)
        if every_step:
            answers["python"] = answers["python"][0]
        for way, compiled in ways.items():
            answers[way] = torch.zeros_like(answers["python"])
            for place, length in enumerate(lengths.tolist()):
                y = compiled.run(x[place, :length])
                if every_step:
                    answers[way][place, :length] = y
                elif length:
                    answers[way][place] = y[-1]
        for way, answer in answers.items():
            output = (answer[None], None) if every_step else answer[None]
            tally = model.task.tally(output, batch)
            parts = [tally.loss, tally.counts] + ([] if tally.correct is None else [tally.correct])
            sums[way][: len(parts)] += torch.stack([part.double().sum() for part in parts])
    row["loss"] = {way: (total[0] / total[1]).item() for way, total in sums.items()}
    if "accuracy" in model.task.measures:
        row["accuracy"] = {way: (total[2] / total[1]).item() for way, total in sums.items()}
    row["bytes"] = {kind: bytes_of(path) for kind, path in paths.items()}
    print(json.dumps(row), flush=True)
    return row


def tables(result: dict) -> dict[str, str]:
    """The tables of docs/deploy.md, by the mark before them."""
    layers = [
        [
            f"`{row['layer']}`",
            str(row["hidden"]),
            *(f"{row[kind]['bytes']:,}" for kind in KINDS),
            *(f"{row[way]['microseconds']:.2g}" for way in (*KINDS, "onnxruntime")),
        ]
        for row in result["layers"]
    ]
    head = ["layer", "hidden", "bytes, float32", "bytes, int8", "µs, float32", "µs, int8", "µs, ONNX Runtime"]
    names = {"adding": "Adding", "polymusic": "Nottingham"}
    measures = {"accuracy": ("right answers", "{:.2%}"), "loss": ("loss", "{:.4g}")}
    scores = [
        [
            f"{names[row['task']]}, {words}",
            f"{row['weights']:,}",
            *(f"{row['bytes'][kind]:,}" for kind in KINDS),
            *(shown.format(row[measure][way]) for way in ("python", *KINDS)),
        ]
        for row in result["tasks"]
        for measure, (words, shown) in measures.items()
        if measure in row
    ]
    columns = ["test set", "weights", "bytes, float32", "bytes, int8", "Python", "C, float32", "C, int8"]
    return {"small devices": markdown_table(head, layers), "int8": markdown_table(columns, scores)}


def with_tables(text: str, result: dict) -> str:
    """The page with each table between its marks replaced."""
    for name, table in tables(result).items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(mark, lambda found, table=table: f"{found[1]}{table.rstrip()}\n{found[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, default=os.environ.get("DEEPMEMORY_DATA"), help="as for dmu")
    data = options.parse_args().data
    compilers = ("gcc", "arm-linux-gnueabihf-gcc")
    versions = {name: subprocess.run([name, "-dumpfullversion"], capture_output=True, text=True) for name in compilers}
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "what": "dm layers of 3 inputs as C: bytes of code and weights on a Cortex-M4 (gcc -Os, without libm); "
            "microseconds of one step here (gcc -O3, one thread), median of 400 blocks of 100; ONNX Runtime called "
            "from Python; test scores of trained models",
            "when": now(),
            "machine": machine("cpu") | {name: version.stdout.strip() for name, version in versions.items()},
            "load": os.getloadavg()[0],
            "git": git_commit(),
            "layers": measure_layers(Path(folder)),
            "tasks": [measure_task(name, chosen, Path(folder), data) for name, chosen in TRAINED.items()],
        }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), result))
    for table in tables(result).values():
        print(table)


if __name__ == "__main__":
    main()
