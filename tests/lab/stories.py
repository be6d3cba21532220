"""What records tell, in a form that can be compared."""

from deepmemory.lab.records import Records, pack


def told(out):
    """Everything recorded but times: numbers as bits, so that nan equals nan."""
    opened = Records(out)
    story = {
        (study.setting.key, run.seed): (
            run.state,
            run.first_under,
            run.best_epoch,
            run.test and pack(run.test),
            [pack(values) for values in run.curves],
        )
        for study in opened.studies()
        for run in study.runs
    }
    opened.close()
    return story
