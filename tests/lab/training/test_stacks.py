"""Which runs train side by side."""

import pytest

from deepmemory.lab import paper
from deepmemory.lab.beyond import EXPERIMENTS, depth
from deepmemory.lab.training import stacks


@pytest.mark.parametrize("part", ["large", "long"])
def test_language_models_of_23_million_weights_train_alone(part):
    for setting in depth.settings(part):
        assert stacks.stacks(setting, range(3)) == [[0], [1], [2]]
        assert stacks.stacks(setting, []) == []


def test_all_others_train_side_by_side():
    settings = [*paper.settings(), *depth.settings("small")]
    settings += [setting for name, one in EXPERIMENTS.items() if name != "depth" for setting in one.settings()]
    assert [setting for setting in settings if stacks.is_large(setting)] == []
    assert stacks.stacks(settings[0], [3, 4]) == [[3, 4]]
    assert stacks.stacks(settings[0], []) == []


def test_the_recurrent_block_alone_is_counted():
    setting = depth.setting("residual", 5)  # 7 matrices and 6 biases, as wide as its states
    (width,) = setting.hidden
    assert stacks.recurrent_weights(setting) == pytest.approx(7 * width**2, rel=0.01)
