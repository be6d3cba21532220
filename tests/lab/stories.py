"""What records tell, in a form that can be compared."""

from deepmemory.lab.records.database import Records, story


def told(out):
    """Everything recorded but times: numbers as bits, so that nan equals nan."""
    opened = Records(out)
    stories = {(study.setting.key, run.seed): story(run) for study in opened.studies() for run in study.runs}
    opened.close()
    return stories
