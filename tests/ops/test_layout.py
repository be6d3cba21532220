"""Where trace and deltas lie is written once; here it is compared with what a step computes."""

import pytest
import torch

from deepmemory.ops import Recurrence, Sequences, hoisted, layout
from deepmemory.ops.layout import Source

SHAPES = {
    "dmu n=1": (Recurrence("dmu"), [(10, 3), (10, 5), (10,)]),
    "dmu": (Recurrence("dmu"), [(7, 3), (7, 5), (7,), (6, 7), (6,), (10, 6), (10,)]),
    "dmu gelu": (Recurrence("dmu", "gelu", bias=False), [(7, 3), (7, 5), (6, 7), (10, 6)]),
    "dmu residual": (Recurrence("dmu", residual=True), [(7, 3), (7, 5), (7,), (7, 7), (7,), (10, 7), (10,)]),
    "rhn": (Recurrence("rhn"), [(10, 3), (10, 5), (10,), (10, 5), (10,), (10, 5), (10,)]),
    "rnn": (Recurrence("rnn"), [(5, 3), (5, 5), (5,), (5,)]),
    "gru": (Recurrence("gru"), [(15, 3), (15, 5), (15,), (15,)]),
    "lstm": (Recurrence("lstm", bias=False), [(20, 3), (20, 5)]),
}


@pytest.mark.parametrize(("rec", "shapes"), SHAPES.values(), ids=SHAPES)
def test_every_row_of_every_weight_has_one_product(rec, shapes):
    weights = [torch.zeros(shape) for shape in shapes]
    rows = [torch.zeros(len(weight)) for weight in weights]
    for part in layout.products(rec, weights):
        rows[part.weight][part.row : part.row + part.lefts] += 1
        assert part.left + part.lefts <= layout.delta_features(rec, weights)
        expected = 1 if part.source is Source.ONES else weights[part.weight].shape[1]
        assert part.rights == expected
        if part.source is Source.TRACE:
            assert part.right + part.rights <= layout.trace_features(rec, weights)
    assert all((of == 1).all() for of in rows)


@pytest.mark.parametrize(("rec", "shapes"), SHAPES.values(), ids=SHAPES)
def test_layers_follow_one_another_in_the_deltas(rec, shapes):
    weights = [torch.zeros(shape) for shape in shapes]
    layers, end = layout.linear_layers(rec, weights), 0
    for layer in layers:
        assert (layer.outputs, layer.inputs) == tuple(weights[layer.weight].shape)
        assert layer.delta == end
        end += layer.outputs
    assert layout.delta_features(rec, weights) == end + (5 if rec.cell == "gru" else 0)


def test_a_runs_dimension_changes_no_place():
    rec, shapes = SHAPES["dmu residual"]
    one, several = ([torch.zeros(*runs, *shape) for shape in shapes] for runs in ((), (2,)))
    assert list(layout.products(rec, one)) == list(layout.products(rec, several))


def test_the_places_of_a_dmu():
    rec, shapes = SHAPES["dmu residual"]
    first, second, last = layout.linear_layers(rec, [torch.zeros(shape) for shape in shapes])
    assert (first.seen, first.made, first.after, first.delta) == (None, 0, 14, 0)
    assert (second.seen, second.made, second.after, second.delta) == (0, 7, 21, 7)
    assert (last.seen, last.made, last.delta, last.groups) == (7, 28, 14, 2)  # after activations and slopes


@pytest.mark.parametrize("name", ["rnn", "lstm"])
def test_both_biases_have_gradients_of_their_own(name):
    """torch may add to one in place."""
    rec, shapes = SHAPES[name]
    rec = rec._replace(bias=True)
    weights = [torch.randn(shape) for shape in (*shapes[:2], shapes[0][:1], shapes[0][:1])]
    x, h0, y = torch.randn(4, 2, 3), torch.randn(2, 5), torch.randn(4, 2, 5)
    trace = torch.randn(4, 2, layout.trace_features(rec, weights))
    deltas = torch.randn(4, 2, layout.delta_features(rec, weights))
    *_, first, second = hoisted.weight_gradients(rec, x, h0, weights, Sequences(), y, trace, deltas, [True] * 4)
    assert torch.equal(first, second)
    first.zero_()
    assert second.any()
