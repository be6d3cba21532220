"""A stream of measurements, one step at a time: the state is carried along, and no step is computed twice.

    python examples/streaming.py

Three sensors, one of which jumps now and then. A small DMU learns to predict the next measurement; its error shows the
jumps while the stream runs. Then the time per step is compared with ``nn.GRUCell`` and, if it is installed, ONNX
Runtime.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import deepmemory as dm
from deepmemory import export

SENSORS = 3
Stepper = Callable[[Tensor], Tensor]  # takes the next measurement and keeps the state inside


def sensor_stream(seed: int, jumps: bool = True) -> Iterator[tuple[Tensor, bool]]:
    """An endless stream of measurements (1, 3), each with whether it jumped."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(SENSORS, generator=generator) * 6.3
    for t in range(10**9):
        values = torch.sin(phase + t * torch.tensor([0.1, 0.17, 0.05])) * 0.5
        values += 0.02 * torch.randn(SENSORS, generator=generator)
        jumped = jumps and bool(torch.rand((), generator=generator) < 0.01)
        values[0] += 1.5 * jumped
        yield values[None], jumped


class Forecaster(nn.Module):
    """Predicts the next measurement from the state after each one."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.recurrent = dm.DMU(SENSORS, hidden_size)
        self.output = nn.Linear(hidden_size, SENSORS)

    def forward(self, x: Tensor) -> Tensor:
        """x (T, B, 3) to forecasts of the step after each."""
        return self.output(self.recurrent(x)[0])


def train(steps: int, length: int = 60) -> Forecaster:
    """Train on whole sequences, with fused loops over time."""
    torch.manual_seed(0)
    model = Forecaster()
    optimiser = torch.optim.Adam(dm.parameter_groups(model, lr=0.02))
    signals = [zip(range(length), sensor_stream(seed, jumps=False), strict=False) for seed in range(32)]
    x = torch.stack([torch.cat([values for _, (values, _) in signal]) for signal in signals], 1)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x[:-1]), x[1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@torch.no_grad()
def forecast_errors(model: Forecaster, steps: int, seed: int = 999) -> list[tuple[float, bool]]:
    """Run step by step: how far the first sensor was from its forecast, and whether it had jumped."""
    step = export.Step(model.recurrent)
    state, forecast, seen = step.initial_state(), torch.zeros(1, SENSORS), []
    for _, (x, jumped) in zip(range(steps), sensor_stream(seed), strict=False):
        seen.append((float((x - forecast)[0, 0].abs()), jumped))
        y, state = step(x, state)
        forecast = model.output(y)
    return seen


def eager_cell(cell: nn.Module) -> Stepper:
    """A cell, called step by step: ``h = cell(x, h)``."""
    h: Tensor | None = None

    def advance(x: Tensor) -> Tensor:
        nonlocal h
        h = cell(x, h)
        return h

    return advance


def eager_layer(layer: nn.Module) -> Stepper:
    """A layer, called with sequences of one step."""
    h: Tensor | None = None

    def advance(x: Tensor) -> Tensor:
        nonlocal h
        y, h = layer(x[None], h)
        return y[0]

    return advance


def onnx_step(layer: nn.Module, folder: Path) -> Stepper:
    """One step with its state in and out, exported, in ONNX Runtime on one thread."""
    import onnxruntime as ort

    step, path = export.Step(layer), folder / f"{type(layer).__name__}.onnx"
    state = step.initial_state()
    export.save(step, {"x": torch.zeros(1, SENSORS), "state": state}, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    runtime = ort.InferenceSession(path, options)
    x_name, *state_names = (given.name for given in runtime.get_inputs())
    carried = [part.numpy() for part in state]

    def advance(x: Tensor) -> Tensor:
        nonlocal carried
        y, *carried = runtime.run(None, {x_name: x.numpy(), **dict(zip(state_names, carried, strict=True))})
        return torch.from_numpy(y)

    return advance


@torch.no_grad()
def latencies(hidden_size: int = 64, steps: int = 2000) -> dict[str, float]:
    """Median microseconds per step of one stream; raises unless all ways give the same numbers."""
    torch.manual_seed(0)
    dmu, gru = dm.DMU(SENSORS, hidden_size), nn.GRUCell(SENSORS, hidden_size)
    cell = dm.DMUCell(SENSORS, hidden_size)
    cell.load_state_dict({name: dmu.state_dict()[f"{name}_l0"] for name in cell.state_dict()})
    same_gru = dm.GRU(SENSORS, hidden_size)
    same_gru.load_state_dict({f"{name}_l0": weight for name, weight in gru.state_dict().items()})
    signal = [x for _, (x, _) in zip(range(steps), sensor_stream(1), strict=False)]

    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "nn.GRUCell": eager_cell(gru),
            "dm.DMUCell": eager_cell(cell),
            "dm.DMU, one step": eager_layer(dmu),
        }
        if all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnxscript")):
            ways["dm.GRU in ONNX Runtime"] = onnx_step(same_gru, Path(folder))
            ways["dm.DMU in ONNX Runtime"] = onnx_step(dmu, Path(folder))
        times: dict[str, list[float]] = {name: [] for name in ways}
        first: dict[str, Tensor] = {}
        for x in signal:  # in turns, so that a busy moment slows all ways alike
            for name, advance in ways.items():
                started = time.perf_counter()
                h = advance(x)
                times[name].append((time.perf_counter() - started) * 1e6)
                kind = "GRU" if "GRU" in name else "DMU"
                if not torch.allclose(first.setdefault(f"{kind} {len(times[name])}", h), h, rtol=1e-4, atol=1e-5):
                    raise SystemExit(f"{name} differs from the others at step {len(times[name])}; no times shown")
    return {name: statistics.median(values[steps // 10 :]) for name, values in times.items()}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--train", type=int, default=300, help="optimiser steps before the stream begins")
    options.add_argument("--steps", type=int, default=2000, help="of the stream")
    given = options.parse_args()
    seen = forecast_errors(train(given.train), given.steps)
    quiet = statistics.median(error for error, jumped in seen if not jumped)
    print(f"error of a forecast: {quiet:.3f}; where the sensor jumped: {[round(e, 2) for e, jumped in seen if jumped]}")
    for name, microseconds in latencies(steps=given.steps).items():
        print(f"{microseconds:8.1f} us per step  {name}")
