"""What records tell, in a form that can be compared."""

from deepmemory.lab.records import Records, comparable


def told(out):
    """Everything recorded but times: numbers as bits, so that nan equals nan."""
    opened = Records(out)
    stories = {(study.setting.key, run.seed): comparable(run) for study in opened.studies() for run in study.runs}
    opened.close()
    return stories
