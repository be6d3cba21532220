"""A DMU in Darts: forecast a wave whose beat is longer than the input of a forecast.

    pip install "deepmemory[examples-darts]"
    python examples/darts_forecast.py

Covariates, likelihoods, backtests and saving work as with Darts' own RNNModel.
"""

import argparse
from typing import Any

import torch
from darts import TimeSeries
from darts.metrics import mae
from darts.models import RNNModel
from darts.models.forecasting.rnn_model import _RNNModule
from darts.utils.timeseries_generation import sine_timeseries

import deepmemory as dm

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


class DMUModule(_RNNModule):
    """Darts' recurrent module, a ``CustomRNNModule``, with a DMU inside; made by ``RNNModel(model=DMUModule)``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"name": "GRU", **kwargs})
        self.rnn = dm.DMU(self.input_size, self.hidden_dim, self.num_layers, batch_first=True, dropout=self.dropout)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Darts' optimiser with the rates of the DMU divided."""
        return dm.divide_rates(super().configure_optimizers(), self)


def make_series(length: int = 400) -> TimeSeries:
    """Two waves, with periods of 12 and 17 steps."""
    waves = (sine_timeseries(value_frequency=1 / period, length=length) for period in (12, 17))
    return sum(waves, start=0 * sine_timeseries(length=length)).astype("float32")


def main(epochs: int = 20) -> tuple[float, float]:
    """Forecast the last 60 steps; returns the mean absolute error, and that of repeating the last 60 steps."""
    past, future = make_series().split_before(340)
    options: dict[str, Any] = {"optimizer_kwargs": {"lr": 1e-2}, "pl_trainer_kwargs": QUIET, "random_state": 0}
    model = RNNModel(30, model=DMUModule, hidden_dim=32, training_length=60, n_epochs=epochs, batch_size=32, **options)
    model.fit(past)
    repeated = past[-60:].with_times_and_values(future.time_index, past[-60:].values())
    return float(mae(future, model.predict(60))), float(mae(future, repeated))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=20, help="passes over the series")
    print(
        "mean absolute error of 60 steps: {:.3f} (the last ones repeated: {:.3f})".format(
            *main(**vars(options.parse_args()))
        )
    )
