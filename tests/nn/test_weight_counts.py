"""The weight counts of the paper's architecture tables, exactly."""

import pytest
from torch import nn

import deepmemory as dm


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def dmu(inputs: int, *block: int) -> dm.DMU:
    """The paper's spec (w_1, ..., d): hidden widths, then memory cells."""
    *hidden, state = block
    return dm.DMU(inputs, state, transition=hidden)


# The output layer is part of the table's count except in NoiseSeq's row and in Adding's RHN.
SYNTHETIC = [
    ("NoiseSeq", dm.RNN(100, [5, 5]), None, 595),
    ("NoiseSeq", dm.LSTM(100, [2, 2]), None, 880),
    ("NoiseSeq", dm.GRU(100, [2, 3]), None, 687),
    ("NoiseSeq", dm.RHN(100, 3, depth=3), None, 672),
    ("NoiseSeq", dmu(100, 5, 4), None, 573),
    ("Adding", dm.RNN(2, [5, 5]), (5, 1), 111),
    ("Adding", dm.LSTM(2, [2, 2]), (2, 1), 99),
    ("Adding", dm.GRU(2, [3, 2]), (2, 1), 108),
    ("Adding", dm.RHN(2, 4, depth=3), None, 136),
    ("Adding", dmu(2, 5, 5), (5, 1), 106),
    ("TempOrd", dm.RNN(8, [6, 6]), (6, 8), 236),
    ("TempOrd", dm.LSTM(8, [2, 3]), (3, 8), 212),
    ("TempOrd", dm.GRU(8, [2, 4]), (4, 8), 208),
    ("TempOrd", dm.RHN(8, 4, depth=3), (4, 8), 224),
    ("TempOrd", dmu(8, 5, 6), (6, 8), 203),
]


@pytest.mark.parametrize(
    ("block", "output", "weights"),
    [pytest.param(*case, id=f"{task}-{type(case[0]).__name__}") for task, *case in SYNTHETIC],
)
def test_synthetic_tasks(block, output, weights):
    assert count(block, *([nn.Linear(*output)] if output else [])) == weights


DEPTHS = [1, 2, 5, 10]
WIDTHS = dict(zip(DEPTHS, [100, 122, 131, 136], strict=True))


def within(count: int, reference: float, tolerance: float) -> bool:
    return abs(count / reference - 1) < tolerance


@pytest.mark.parametrize(("depth", "thousands"), list(zip(DEPTHS, ["46.7", "66.9", "127", "228"], strict=True)))
def test_polymusic(depth, thousands):
    rhn = count(dm.RHN(88, 100, depth=depth), nn.Linear(100, 88))
    digits = len(thousands.partition(".")[2])
    assert f"{rhn / 1e3:.{digits}f}" == thousands
    width = WIDTHS[depth]
    ours = count(dmu(88, *[width] * depth), nn.Linear(width, 88))
    assert within(ours, rhn, 0.01)
    assert depth != 2 or ours == 66_578


@pytest.mark.parametrize(("depth", "millions"), list(zip(DEPTHS, ["1.7", "1.7", "1.8", "1.9"], strict=True)))
def test_natlang(depth, millions):
    def whole(block: nn.Module) -> int:
        return count(nn.Embedding(10_000, 64), block, nn.Linear(block.hidden_size, 100), nn.Linear(100, 10_000))

    rhn, ours = whole(dm.RHN(64, 100, depth=depth)), whole(dmu(64, *[WIDTHS[depth]] * depth))
    assert f"{rhn / 1e6:.1f}" == millions
    assert within(ours, rhn, 0.01)


VOCABULARIES = [(24_793, 12_933), (34_628, 15_781), (20_655, 12_267)]
TRANSLATION = {
    1: ["27.8", "36.6", "24.5"],
    2: ["28.0", "36.8", "24.7"],
    5: ["28.4", "37.3", "25.2"],
    10: ["29.2", "38.1", "26.0"],
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("language", range(3), ids=["spa", "ger", "por"])
def test_translation(depth, language):
    source, target = VOCABULARIES[language]
    embeddings = (source + target) * 650

    def whole(block: nn.Module) -> int:
        return embeddings + 2 * count(block) + count(nn.Linear(200, target, device="meta"))

    rhn = whole(dm.RHN(650, 200, depth=depth))
    assert f"{rhn / 1e6:.1f}" == TRANSLATION[depth][language]
    width = {1: [], 2: [340], 5: [300] * 4, 10: [300] * 9}[depth]
    assert within(whole(dm.DMU(650, 200, transition=width)), rhn, 0.02)


@pytest.mark.parametrize(("cells", "weights"), [(96, 19_786), (128, 34_570)])
def test_pixel_mnist(cells, weights):
    assert count(dmu(1, cells), nn.Linear(cells, 10)) == weights
