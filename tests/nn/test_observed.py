"""An observer sees what goes through every layer and direction, and changes nothing."""

import pytest
import torch
from layers import LAYERS, OWN
from tolerances import assert_close
from torch.nn.utils.rnn import pack_padded_sequence

import deepmemory as dm


def build(kind, **options):
    return LAYERS[kind](3, 4, num_layers=2, bidirectional=True, **OWN.get(kind, {}), **options)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_and_direction_is_seen(kind):
    layer, x = build(kind, batch_first=True), torch.randn(2, 5, 3)
    lengths = torch.tensor([5, 3])
    seen = []

    def observer(layer, direction, run, x, state, sequences):
        y, final = run(x, state, sequences)
        seen.append((layer, direction, tuple(x.shape), [tuple(s.shape) for s in state], tuple(y.shape)))
        assert torch.equal(sequences.lengths, lengths)
        return y, final

    packed = pack_padded_sequence(x, lengths, batch_first=True)
    with layer.observed(observer):
        y, h = layer(x, lengths=lengths)
        layer(packed)
    states = [(2, 4)] * (2 if kind == "LSTM" else 1)
    once = [(n, way, (5, 2, 8 if n else 3), states, (5, 2, 4)) for n in (0, 1) for way in (0, 1)]
    assert seen == once * 2
    assert_close((y, h), layer(x, lengths=lengths))
    assert len(seen) == 8  # nothing more once the context has ended


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_can_run_in_pieces(kind):
    layer, x = LAYERS[kind](3, 4, **OWN.get(kind, {})), torch.randn(6, 2, 3)
    expected = layer(x)

    def halves(layer, direction, run, x, state, sequences):
        first, state = run(x[:4], state, sequences.piece(0, 4))
        second, state = run(x[4:], state, sequences.piece(4, 6))
        return torch.cat([first, second]), state

    with layer.observed(halves):
        assert_close(layer(x), expected)


def test_it_ends_with_its_context():
    layer, x = dm.DMU(3, 4), torch.randn(5, 2, 3)

    def fail(*_):
        raise ArithmeticError

    def double(layer, direction, run, x, state, sequences):
        y, final = run(x, state, sequences)
        return 2 * y, final

    expected, _ = layer(x)
    with layer.observed(double):
        with pytest.raises(ArithmeticError), layer.observed(fail):
            layer(x)
        assert_close(layer(x)[0], 2 * expected)
    assert_close(layer(x)[0], expected)
