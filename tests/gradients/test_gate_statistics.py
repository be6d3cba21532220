"""The share of its state that a DMU keeps is the one that explains its states."""

import pytest
import torch
from layers import randomise
from tolerances import assert_close
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import deepmemory as dm


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "two-way"])
@pytest.mark.parametrize("given_module", [False, True], ids=["dense", "module"])
def test_gates_are_those_that_explain_the_states(given_module, bidirectional, engine):
    """h_t = keep * h_t-1 + (1 - keep) * new, and the keep is the diagonal of the Jacobian's first term."""
    transition = [nn.Linear(7, 8) for _ in range(1 + bidirectional)] if given_module else [6]
    engine = "auto" if given_module else engine
    dmu = dm.DMU(3, 4, bidirectional=bidirectional, transition=transition, engine=engine, dtype=torch.float64)
    randomise(dmu)
    lengths = torch.tensor([5, 2, 4])
    x, h = torch.randn(5, 3, 3, dtype=torch.float64), torch.rand(1 + bidirectional, 3, 4, dtype=torch.float64)
    found = dm.gradients.gates(dmu, (x, h), lengths=lengths)
    y, _ = dmu(x, h, lengths=lengths)
    for direction, part in enumerate(found):
        states = y[..., 4 * direction : 4 * direction + 4]
        for b, length in enumerate(lengths.tolist()):
            times = list(range(length))[:: -1 if direction else 1]
            before = [h[direction, b], *(states[t, b] for t in times[:-1])]
            for t, previous in zip(times, before, strict=True):
                step = dm.gradients.step_jacobian(dmu, x[t, b], previous.detach(), direction=direction)
                assert_close(part.keep[t, b], step.kept.diagonal().detach())
            assert part.keep[length:, b].isnan().all()


def test_gate_statistics():
    keep = torch.tensor([0.01, 0.5, 0.97, 0.99, torch.nan]).view(5, 1, 1)
    part = dm.gradients.LayerGates("", 0, 0, 0, keep)
    assert part.mean == pytest.approx((0.01 + 0.5 + 0.97 + 0.99) / 4)
    assert part.saturated() == (0.25, 0.5)
    assert part.saturated(within=0.02) == (0.25, 0.25)
    assert part.quantiles([0.5])[0] == pytest.approx((0.5 + 0.97) / 2)


def test_gates_of_a_packed_batch_in_the_callers_order():
    model = nn.ModuleDict({"a": dm.DMU(3, 4, num_layers=2)})
    model.forward = lambda x: model["a"](x)
    sequences = [torch.randn(n, 3) for n in (2, 5, 3)]
    found = dm.gradients.gates(model, pack_sequence(sequences, enforce_sorted=False))
    assert [(part.name, part.layer) for part in found] == [("a", 0), ("a", 1)]
    for b, sequence in enumerate(sequences):
        alone = dm.gradients.gates(model, sequence)
        for part, expected in zip(found, alone, strict=True):
            assert_close(part.keep[: len(sequence), b], expected.keep[:, 0])
    assert "a" in str(found)
    with pytest.raises(ValueError, match="model should be or contain a DMU, got GRU"):
        dm.gradients.gates(dm.GRU(3, 4), sequences[0])


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "two-way"])
def test_gates_and_flow_of_sequences_that_follow_one_another_are_those_of_each_alone(bidirectional):
    """With resets, masks and a residual transition."""
    dmu = dm.DMU(3, 4, bidirectional=bidirectional, transition=[5, 5], residual=True, dtype=torch.float64)
    randomise(dmu).recurrent_dropout = dmu.transition_dropout = 0.5
    masks, x = dmu.draw_masks(2), torch.randn(5, 2, 3, dtype=torch.float64)
    dmu.eval()
    resets = torch.zeros(5, 2, dtype=torch.bool)
    resets[3] = True

    def squares(out):
        return out[0].square().sum()

    whole = dm.gradients.gates(dmu, x, resets=resets, masks=masks)
    parts = [dm.gradients.gates(dmu, part, masks=masks) for part in x.split([3, 2])]
    for found, *alone in zip(whole, *parts, strict=True):
        assert_close(found.keep, torch.cat([part.keep for part in alone]))
    whole = dm.gradients.flow(dmu, x, squares, resets=resets, masks=masks)
    parts = [dm.gradients.flow(dmu, part, squares, masks=masks) for part in x.split([3, 2])]
    for found, *alone in zip(whole, *parts, strict=True):
        assert_close(found.norms, torch.cat([part.norms for part in alone]))
