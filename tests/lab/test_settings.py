"""Settings: what can be changed, and what a mistake is told."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from deepmemory.lab import paper
from deepmemory.lab.data.registry import names_for
from deepmemory.lab.records import Records
from deepmemory.lab.settings import (
    LANGUAGES,
    MUSIC,
    RELEASES,
    SYNTHETIC,
    Launcher,
    Machine,
    Setting,
    change,
    setting_from_json,
)
from deepmemory.lab.tasks import data_of


@pytest.mark.parametrize("kind", [Setting, Machine, Launcher])
def test_every_field_has_one_line_of_help(kind):
    assert all(of.metadata["help"] and "\n" not in of.metadata["help"] for of in fields(kind))


def test_text_becomes_the_type_of_the_field():
    changed = change(Setting(), {"hidden": "3,2", "lr": "1e-3", "epochs": "7", "cell": "gru"})
    assert (changed.hidden, changed.lr, changed.epochs) == ((3, 2), 0.001, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "tru"}, "unknown cell 'tru'; choose from rnn, lstm, gru, rhn, dmu"),
        ({"task": "add"}, "choose from adding, temporal-order, noisy-sequence"),
        ({"rate": 1}, "unknown setting 'rate'; choose from task, cell, hidden"),
        ({"lr": "fast"}, "lr should be a number, got 'fast'"),
        ({"lr": -1}, "lr should be positive, got -1"),
        ({"hidden": "a"}, "hidden should be whole numbers separated by commas"),
        ({"module_rate": "slow"}, "module_rate should be formula, same or a positive number"),
        ({"cell": "gru", "depth": 3}, "depth belongs to the cell rhn; leave it out for the cell gru"),
        ({"noise": "fixed"}, "noise belongs to the task noisy-sequence"),
        ({"max_length": 5}, "max_length 5 is shorter than min_length 100"),
        ({"task": "natlang", "steps": 5}, "steps belongs to the task adding or temporal-order or noisy-sequence"),
        ({"task": "translation", "language": "latin"}, "unknown language 'latin'; choose from spanish"),
        ({"task": "polymusic", "limit": -1}, "limit should be at least 0"),
        ({"epochs": 0}, "epochs should be at least 1"),
    ],
)
def test_mistakes_are_told_the_choices(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        change(Setting(), changes)


def test_a_setting_survives_its_record():
    for setting in paper.settings():
        assert setting_from_json(setting.to_json()) == setting


def test_german_studies_of_the_older_release_are_recorded_as_such():
    kept = Records(Path(__file__).parents[2] / "docs" / "reproduction")
    for setting in paper.settings(["translation"]):
        if setting.language == "german":
            assert kept.study(replace(setting, release="2018").key) is not None, setting
    kept.close()


def test_the_key_knows_everything_but_the_number_of_epochs():
    setting = paper.setting("adding", "dmu")
    assert replace(setting, epochs=7).key == setting.key
    assert replace(setting, lr=0.03).key != setting.key
    assert len({s.key for s in paper.settings()}) == len(paper.settings())
    assert replace(setting, module_rate="1e-3").key == replace(setting, module_rate="0.001").key


def test_studies_recorded_before_a_setting_was_added_keep_their_names():
    records = Records(Path(__file__).parents[2] / "docs" / "reproduction")
    for setting in paper.settings(SYNTHETIC):
        assert records.study(setting.key) is not None, setting
    records.close()


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0])
def test_a_launcher_is_checked(amount):
    with pytest.raises(ValueError, match="gpus should be "):
        Launcher(gpus=amount)
    with pytest.raises(ValueError, match="unknown --on 'slurm'; choose from local, ray"):
        Launcher(on="slurm")


def test_all_pairs_can_be_asked_for_in_a_word():
    setting = paper.setting("translation", "dmu")
    assert change(setting, {"pairs": "all"}).pairs == 0
    assert change(setting, {"pairs": "500"}).pairs == 500


def test_choices_of_data_are_the_registrys():
    assert set(MUSIC) == set(names_for("polymusic"))
    german = {data_of(Setting("translation", language="german", release=release)) for release in RELEASES}
    others = {data_of(Setting("translation", language=language)) for language in LANGUAGES}
    assert german | others == set(names_for("translation"))


def test_only_german_has_releases():
    assert data_of(Setting("translation", language="german", release="2018")) == "german-2018"
    with pytest.raises(ValueError, match="release belongs to the language german"):
        Setting("translation", language="spanish", release="2018")
    with pytest.raises(ValueError, match="unknown release '2019'; choose from 2020, 2018"):
        Setting("translation", language="german", release="2019")
