"""Logs every epoch to an experiment tracker: TensorBoard or MLflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepmemory.lab.settings import Setting, check_choice
from deepmemory.lab.training.loop import Epoch
from deepmemory.lab.writing import without_links

TRACKERS = ("none", "tensorboard", "mlflow")


def open_tracker(name: str, out: Path | str) -> Callable[[Setting, Epoch], None] | None:
    """A function that logs an epoch, or None; the tracker is imported only here."""
    check_choice("tracker", name, TRACKERS)
    if name == "tensorboard":
        return tensorboard(Path(out))
    if name == "mlflow":
        return mlflow()
    return None


def tensorboard(out: Path) -> Callable[[Setting, Epoch], None]:
    """Curves of every run under OUT/tensorboard, one folder per study."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ModuleNotFoundError(
            "tracker tensorboard is not installed: pip install tensorboard, or use --tracker none"
        ) from None
    writers: dict[str, Any] = {}

    def track(setting: Setting, epoch: Epoch) -> None:
        if setting.key not in writers:
            name = f"{setting.task}-{setting.cell}-{setting.key}"
            writers[setting.key] = SummaryWriter(str(without_links(out, "tensorboard", name)))
        for seed, values in epoch.values.items():
            for series, value in values.items():
                writers[setting.key].add_scalar(f"{series}/seed-{seed}", value, epoch.number)
        writers[setting.key].flush()

    return track


def mlflow() -> Callable[[Setting, Epoch], None]:
    """One MLflow run per study, in the tracking store that MLflow is configured to use."""
    try:
        import mlflow  # type: ignore[import-not-found]
    except ImportError:
        raise ModuleNotFoundError(
            "tracker mlflow is not installed: pip install mlflow, or use --tracker none"
        ) from None
    client = mlflow.MlflowClient()
    runs: dict[str, str] = {}

    def track(setting: Setting, epoch: Epoch) -> None:
        if setting.key not in runs:
            experiment = mlflow.set_experiment(f"deepmemory {setting.task}").experiment_id
            run = client.create_run(experiment, run_name=f"{setting.cell}-{setting.key}")
            runs[setting.key] = run.info.run_id
            for name, value in asdict(setting).items():
                client.log_param(run.info.run_id, name, value)
        for seed, values in epoch.values.items():
            for series, value in values.items():
                client.log_metric(runs[setting.key], f"{series}.seed-{seed}", value, step=epoch.number)

    return track
