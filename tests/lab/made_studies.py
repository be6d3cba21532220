"""Studies as if they had been trained."""

import math

from deepmemory.lab.records import DIVERGED, RUNNING, SPENT, Records, Run, Study
from deepmemory.lab.report.results.tables import nearest
from deepmemory.lab.tasks import TASK_CLASSES, series_of


def made(setting, tests, epochs=None, train=None, state=SPENT):
    """One run for each test score, which is that of the best epoch, the last but one; nan diverges in epoch 2.

    A score is a loss where the task measures nothing else, an accuracy for pixels, and else a perplexity.
    """
    epochs = epochs or nearest(setting)[1].epochs
    runs = []
    for seed, test in enumerate(tests):
        diverged = math.isnan(test)
        scores = [test * (0.9 if setting.task == "pixel-mnist" else 1.5)] * epochs
        scores[max(0, epochs - 2)] = test
        rows = [row(setting, train or score * 0.9, score) for score in scores][: 2 if diverged else None]
        end = DIVERGED if diverged else state
        runs.append(Run(seed, end, (None,) * 5, 1, None, 60.0, 1, in_columns(setting, rows)))
    return Study(setting, series_of(setting.task), (), tuple(runs))


def in_columns(setting, rows):
    """The curves of a run, from one row of values for each epoch."""
    return dict(zip(series_of(setting.task), zip(*rows, strict=True), strict=True))


def row(setting, train, test):
    """An epoch; the perplexity of exp(loss) is a tenth under the other one, and validation just above the test."""
    measures = TASK_CLASSES[setting.task].measures
    loss = [math.log(0.9 * score) for score in (train, test * 1.01, test)] if "perplexity" in measures else None
    plain = [train, test * 1.01, test]
    accuracy = [0.9, 0.5 / test, 0.5 / test] if setting.task == "translation" else [train, test, test]
    named = {"loss": loss or plain, "perplexity": plain, "accuracy": accuracy}
    return tuple(value for name in ("loss", *measures) for value in named[name])


def record(out, studies, device="cuda:0"):
    """Put studies into a database."""
    records = Records(out, write=True)
    session = records.open_session(device, "plain")
    for study in studies:
        key = records.open_study(study.setting, study.series)
        records.begin(key, [run.seed for run in study.runs], 0, session)
        for epoch in range(1, max(run.epochs for run in study.runs) + 1):
            runs = [run for run in study.runs if run.epochs >= epoch]
            values = {run.seed: run.at_epoch(epoch) for run in runs}
            states = {run.seed: run.state if epoch == run.epochs else RUNNING for run in runs}
            records.write_epoch(key, epoch, values, states, dict.fromkeys(values, epoch), 1.5)
    records.close()


def record_losses(out, setting, losses_of_runs, device="cpu"):
    """A study of a synthetic task as if it had been trained: one list of validation losses per run."""
    runs = []
    for seed, losses in enumerate(losses_of_runs):
        rest = {"train_loss": (1.0,) * len(losses), "valid_accuracy": (0.5,) * len(losses)}
        runs.append(Run(seed, SPENT, (), None, None, 0.0, 1, {"valid_loss": tuple(losses), **rest}))
    record(out, [Study(setting, series_of(setting.task), (), tuple(runs))], device)
