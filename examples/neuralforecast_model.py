"""A DMU as a model of neuralforecast: forecast two dozen series of one kind with one network.

    pip install "deepmemory[examples-neuralforecast]"
    python examples/neuralforecast_model.py

The model takes the arguments of neuralforecast's GRU: exogenous variables, losses, scalers and so on. Its optimiser is
always Adam.
"""

import argparse
from typing import Any

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import GRU

import deepmemory as dm

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
HORIZON = 24


class DMU(GRU):
    """neuralforecast's GRU with a DMU as its encoder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        old = self.hist_encoder
        self.hist_encoder = dm.DMU(
            old.input_size, old.hidden_size, old.num_layers, old.bias, batch_first=True, dropout=old.dropout
        )

    def configure_optimizers(self) -> dict[str, Any]:
        """Adam with the rates of the DMU divided, and the schedule of neuralforecast's models."""
        optimiser = torch.optim.Adam(dm.parameter_groups(self, lr=self.learning_rate))
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=self.lr_decay_steps, gamma=0.5)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_series(count: int = 24, length: int = 240) -> pd.DataFrame:
    """Hourly series with a daily and a faster wave of random strength and phase, and some noise."""
    random = np.random.default_rng(0)
    time = np.arange(length)
    hours = pd.date_range("2025-01-01", periods=length, freq="h")
    frames = []
    for number in range(count):
        strength, phase = random.uniform(0.5, 1.5, 2), random.uniform(0, 2 * np.pi, 2)
        waves = sum(s * np.sin(2 * np.pi * time / p + f) for s, p, f in zip(strength, (24, 9), phase, strict=True))
        noisy = 10 + waves + random.normal(0, 0.05, length)
        frames.append(pd.DataFrame({"unique_id": f"sensor {number}", "ds": hours, "y": noisy}))
    return pd.concat(frames, ignore_index=True)


def main(steps: int = 200) -> tuple[float, float]:
    """Forecast the last day; returns the mean absolute error, and that of repeating the day before it."""
    series = make_series()
    last = series["ds"] > series["ds"].max() - pd.Timedelta(hours=HORIZON)
    day_before = (series["ds"] > series["ds"].max() - pd.Timedelta(hours=2 * HORIZON)) & ~last
    model = DMU(
        HORIZON,
        input_size=3 * HORIZON,
        encoder_n_layers=1,
        encoder_hidden_size=64,
        decoder_hidden_size=64,
        learning_rate=1e-2,
        max_steps=steps,
        **QUIET,
    )
    forecaster = NeuralForecast([model], freq="h")
    forecaster.fit(series[~last])
    found = series[last].merge(forecaster.predict(), on=["unique_id", "ds"])
    error = (found["y"] - found["DMU"]).abs().mean()
    repeated = np.abs(series["y"][last].to_numpy() - series["y"][day_before].to_numpy()).mean()
    return float(error), float(repeated)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200, help="training steps")
    print(
        "mean absolute error of a day: {:.3f} (the day before repeated: {:.3f})".format(
            *main(**vars(options.parse_args()))
        )
    )
