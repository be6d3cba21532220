"""Which learning rate of a model is its best, before and after that one has more runs than the others."""

from dataclasses import replace

from deepmemory.lab.beyond import state_tracking
from deepmemory.lab.beyond.rates import best_studies, to_search
from deepmemory.lab.records import DIVERGED, SPENT, Run, Study

SLOW, FAST = 0.001, 0.01
GRU = state_tracking.setting("gru", group="s3", lr=SLOW)


def study(setting, losses):
    """A study whose runs, by seed, have had these validation losses; None has diverged at once."""
    runs = [
        Run(seed, SPENT if loss is not None else DIVERGED, (), loss and 1, None, 1.0, 1, {"valid_loss": (loss or 9.9,)})
        for seed, loss in losses.items()
    ]
    return Study(setting, ("valid_loss",), (), tuple(runs))


def best_rates(*studies):
    return [best.setting.lr for best in best_studies(studies, lambda setting: setting.elements)]


def test_the_lowest_mean_validation_loss_of_each_model():
    slow, fast = study(GRU, {0: 0.5, 1: 0.7}), study(replace(GRU, lr=FAST), {0: 0.4, 1: 0.6})
    other = study(state_tracking.setting("dmu", 2, group="s3", lr=SLOW), {0: 2.0})
    assert best_rates(slow, fast, other) == [FAST, SLOW]
    assert best_rates(slow, study(replace(GRU, elements="s4", lr=FAST), {0: 0.1})) == [SLOW, FAST]


def test_only_seeds_of_all_rates_count():
    """What the best rate's further runs came to does not make another rate the best."""
    slow, fast = study(GRU, {0: 0.5, 1: 0.7}), study(replace(GRU, lr=FAST), {0: 0.4, 1: 0.6, 2: 5.0})
    assert best_rates(slow, fast) == [FAST]


def test_a_run_that_diverged_counts_against_its_rate():
    assert best_rates(study(GRU, {0: 0.5, 1: 0.7}), study(replace(GRU, lr=FAST), {0: 0.1, 1: None})) == [SLOW]


def test_a_model_with_one_rate_needs_no_search():
    several = [GRU, replace(GRU, lr=FAST)]
    alone = [replace(GRU, elements="s4"), state_tracking.setting("dmu", 2, group="s3")]
    assert to_search([*several, *alone], lambda setting: setting.elements) == several
