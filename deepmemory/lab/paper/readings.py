"""What the paper leaves open: settings that can be read in two ways, and data that is not available."""

from __future__ import annotations

from dataclasses import dataclass

from deepmemory.lab.paper.recipes import COMPARED
from deepmemory.lab.settings import CELLS, SYNTHETIC

NO_DATA = ("portuguese",)  # its file is not available; see deepmemory.lab.data.registry


@dataclass(frozen=True)
class Reading:
    """A setting that the paper leaves open: the main study has one value, and another is possible."""

    name: str
    field: str  # of Setting; its default is the value of the main study
    other: str | int  # the other value
    labels: tuple[str, str]  # of the main value and the other one, in few words
    why: str
    command: str  # that trains the other reading
    tasks: tuple[str, ...] = SYNTHETIC
    cells: tuple[str, ...] = CELLS


READINGS: tuple[Reading, ...] = (
    Reading(
        "Learning rate of the DMU module",
        "module_rate",
        "0.001",
        ("lr / 2n", "0.001"),
        "The text gives lr / 2n, with n the number of linear layers in the module. The launcher of the authors' "
        "published code sets the table's rate for the output layer alone and leaves the module at its default, 0.001.",
        "dmu paper --cells dmu --module-rate 0.001",
        cells=("dmu",),
    ),
    Reading(
        "Noise of the noisy sequence",
        "noise",
        "fixed",
        ("drawn for every sequence", "drawn once"),
        "The text has the symbols after the first one fixed before the experiment; the authors' published code draws "
        "them anew for every sequence.",
        "dmu paper noisy-sequence --noise fixed",
        tasks=("noisy-sequence",),
    ),
    Reading(
        "Epochs under 1e-6 before a run stops",
        "patience",
        1,
        ("5", "1"),
        "The text stops a run whose loss is under 1e-6; the authors' published code waits until it has stayed there "
        "for five epochs. No figure and no count can tell the two apart: at its first epoch under 1e-6 a run is under "
        "every threshold, and a run that was counted stays counted. What it changes is how long such runs go on, and "
        "with that their best weights and test loss.",
        "dmu paper --patience 1",
    ),
)

TABLE_READINGS: tuple[Reading, ...] = (
    Reading(
        "What the decoder is fed while it learns",
        "feedback",
        "teacher",
        ("its own words", "the right words"),
        "The paper gives a teacher forcing ratio of 1.0, which reads as if the decoder were always fed the right "
        "words. In the authors' published code the ratio works the other way round: at 1.0 it is fed its own.",
        "dmu paper translation --feedback teacher",
        tasks=("translation",),
        cells=COMPARED,
    ),
    Reading(
        "How many pairs of sentences",
        "pairs",
        0,
        ("the first 30,000", "all"),
        "The paper's numbers of weights are those of the vocabularies of whole files. The authors' published code "
        "reads the first 30,000 lines of each, which are its shortest sentences.",
        "dmu paper translation --pairs all",
        tasks=("translation",),
        cells=COMPARED,
    ),
    Reading(
        "Which release of the German sentences",
        "release",
        "2018",
        ("December 2020", "May 2018"),
        "The paper does not name the release. The sizes of the vocabularies in the authors' published code fit a file "
        "of about 210,000 pairs. The release of May 2018 has 169,813; that of December 2020 has about 220,000, of "
        "which the first 50,001 are available.",
        "dmu paper translation --pair german --release 2018",
        tasks=("translation",),
        cells=COMPARED,
    ),
)
