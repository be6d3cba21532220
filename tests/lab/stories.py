"""A tiny study, and what records hold in a form that can be compared."""

from deepmemory.lab.records import Records, comparable
from deepmemory.lab.settings import Machine, Setting
from deepmemory.lab.training.progress import PlainLines
from deepmemory.lab.training.studies import run_studies

CPU = Machine("cpu", engine="plain")
TINY = Setting(
    transition=(3,), hidden=(3,), min_length=24, max_length=26, batch=4, steps=2, epochs=4, validation=8, test=8
)


def told(out):
    """Everything recorded except times: numbers as bits, so that nan equals nan."""
    with Records(out) as records:
        return {(study.setting.key, run.seed): comparable(run) for study in records.studies() for run in study.runs}


def carry_out(out, setting=TINY, seeds=range(3)):
    """Train a study, and return what is recorded then."""
    run_studies([setting], seeds, out, CPU, PlainLines())
    return told(out)
