"""The sweeps of the nvrtc engine, and what happens around them."""

import pytest
import torch
from ops.emulation import (
    DEVICE,
    GLOBAL,
    GPU,
    MIXED,
    NEEDS_GPU_OR_COMPILER,
    REGISTERS,
    SHARED,
    draw_weights,
    small,
)
from tolerances import EXACT_FLOAT32, TF32, TOLERANCES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepmemory.ops import nvrtc, plain
from deepmemory.ops.nvrtc.plan import Shape, lay_out
from deepmemory.ops.nvrtc.spread import FMA, MMA, SPLIT, lane_tile
from deepmemory.ops.recurrence import Recurrence, Sequences, resets_of_sweep

pytestmark = NEEDS_GPU_OR_COMPILER


def compare(
    rec,
    d,
    hidden,
    *,
    layout,
    use_layout,
    steps=4,
    batch=3,
    m=3,
    lengths=None,
    gate_bias=0.0,
    nan_at=None,
    dtype=torch.float32,
    mixed=False,
    masks=False,
    resets=None,
):
    """y, final states and every gradient against the plain engine in float64."""
    from deepmemory import ops

    generator = torch.Generator().manual_seed(7)
    weights = draw_weights(rec, m, d, hidden, generator)
    if gate_bias:
        weights[-1][:d] += gate_bias * (-1.0) ** torch.arange(d)
    x = torch.randn(steps, batch, m, generator=generator, dtype=torch.float64)
    state = [torch.randn(batch, d, generator=generator, dtype=torch.float64).tanh() for _ in range(rec.states)]
    if lengths is not None:
        lengths = torch.tensor(lengths)
        x[torch.arange(steps)[:, None] >= lengths] = float("nan")
    if nan_at is not None:
        x[nan_at] = float("nan")
    probe = torch.randn(steps, batch, d, generator=generator, dtype=torch.float64)

    state_mask = hidden_mask = None
    if masks:
        state_mask = torch.rand(batch, d, generator=generator, dtype=torch.float64).gt(0.3) / 0.7
        if rec.cell == "dmu" and hidden:
            hidden_mask = torch.rand(batch, sum(hidden), generator=generator, dtype=torch.float64).gt(0.3) / 0.7
            rec = rec._replace(masked=True)
    if resets is not None:
        resets = resets_of_sweep(torch.tensor(resets).bool(), lengths, rec.reverse)

    if dtype is not torch.float32:  # what is rounded on the way in is not the engine's
        x, probe, *state = (t.to(dtype).double() for t in (x, probe, *state))
        weights = [w.to(dtype).double() for w in weights]
        state_mask, hidden_mask = (None if m is None else m.to(dtype).double() for m in (state_mask, hidden_mask))

    def run(function, dtype, device):
        of_weights = torch.float32 if mixed and dtype is not torch.float64 else dtype
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, *state)]
        leaves += [w.to(device, of_weights).requires_grad_() for w in weights]
        here = [None if t is None else t.to(device) for t in (lengths, resets)]
        here += [None if m is None else m.to(device, dtype) for m in (state_mask, hidden_mask)]
        y, final = function(
            rec, leaves[0], tuple(leaves[1 : 1 + rec.states]), leaves[1 + rec.states :], Sequences(*here)
        )
        loss = (y * probe.to(y)).sum() + sum((f * (k + 2.0)).sum() for k, f in enumerate(final))
        grads = torch.autograd.grad(loss, leaves)
        return [t.double().cpu() for t in (y.detach(), *(f.detach() for f in final), *grads)]

    use_layout(layout)
    expected = run(plain.scan, torch.float64, "cpu")
    given = run(lambda *args: ops.scan(*args, engine="nvrtc"), dtype, DEVICE)
    exact = dtype is torch.float32 and layout(Shape.of(rec, dtype, weights)).product != MMA
    for index, (a, b) in enumerate(zip(given, expected, strict=True)):
        rtol, atol = EXACT_FLOAT32 if exact else TF32 if dtype is torch.float32 else TOLERANCES[dtype]
        atol *= max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=index: f"{i}: {m}")


CASES = {
    "dmu-n1": (Recurrence("dmu", "tanh"), 7, []),
    "dmu-n2": (Recurrence("dmu", "leaky_relu"), 7, [9]),
    "dmu-n3-silu": (Recurrence("dmu", "silu"), 5, [9, 4]),
    "dmu-n2-gelu-no-bias": (Recurrence("dmu", "gelu", bias=False), 5, [6]),
    "dmu-n2-reverse": (Recurrence("dmu", "tanh", reverse=True), 7, [9]),
    "rhn-1": (Recurrence("rhn"), 7, []),
    "rhn-3-no-bias": (Recurrence("rhn", bias=False), 6, [6, 6]),
    "rhn-3-reverse": (Recurrence("rhn", reverse=True), 6, [6, 6]),
    "dmu-n5": (Recurrence("dmu", "leaky_relu"), 7, [9] * 4),
    "dmu-n6-silu-reverse": (Recurrence("dmu", "silu", reverse=True), 5, [6, 6, 6, 4, 4]),
    "rnn": (Recurrence("rnn", "tanh"), 7, []),
    "rnn-relu-reverse": (Recurrence("rnn", "relu", reverse=True), 7, []),
    "gru": (Recurrence("gru"), 7, []),
    "gru-no-bias-reverse": (Recurrence("gru", bias=False, reverse=True), 7, []),
    "lstm": (Recurrence("lstm"), 7, []),
    "lstm-reverse": (Recurrence("lstm", reverse=True), 7, []),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_definition(case, use_layout):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), use_layout=use_layout)


@pytest.mark.parametrize("case", CASES)
def test_lengths_stop_each_sequence_and_padding_stays_outside(case, use_layout):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), use_layout=use_layout, lengths=[4, 0, 2])


MORE_CASES = CASES | {
    "dmu-n2-residual": (Recurrence("dmu", "leaky_relu", residual=True), 7, [9]),
    "dmu-n3-residual-gelu": (Recurrence("dmu", "gelu", residual=True), 5, [9, 9]),
    "dmu-n5-residual": (Recurrence("dmu", "leaky_relu", residual=True), 7, [9] * 4),
    "dmu-n5-residual-relu-reverse": (Recurrence("dmu", "relu", reverse=True, residual=True), 7, [7] * 4),
    "dmu-n4-residual-tanh-no-bias": (Recurrence("dmu", "tanh", bias=False, residual=True), 6, [11] * 3),
}
RESETS = [[0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]]  # in the padding too, where they mean nothing


# With masks, and with resets, every one of these cases is compiled below.
@pytest.mark.parametrize("case", ["dmu-n3-residual-gelu", "dmu-n5-residual"])
def test_residual_transitions(case, use_layout):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), use_layout=use_layout)


@pytest.mark.parametrize("case", MORE_CASES)
def test_masks_are_each_sequences_own(case, use_layout):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), use_layout=use_layout, masks=True, lengths=[4, 0, 2])


@pytest.mark.parametrize("case", MORE_CASES)
def test_resets_cut_sequences(case, use_layout):
    rec, d, hidden = MORE_CASES[case]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), use_layout=use_layout, resets=RESETS, lengths=[4, 2, 3])


@pytest.mark.parametrize(
    ("cluster", "product", "dtype", "team"),
    [(1, FMA, torch.float32, False), (2, MMA, torch.bfloat16, False), (3, MMA, torch.bfloat16, True)],
)
def test_a_reset_makes_an_end_of_nan(cluster, product, dtype, team, use_layout):
    """Also where a narrow layer follows a wider one, whose inputs stay behind its own."""
    resets = [[int(sequence == 0 and 1 <= step <= 3) for sequence in range(3)] for step in range(6)]
    options = {"steps": 6, "nan_at": (2, 0, 0), "resets": resets, "dtype": dtype}
    layout = small(4, cluster, SHARED, product=product, team=team)
    compare(Recurrence("dmu", "tanh"), 5, [9, 9], layout=layout, use_layout=use_layout, **options)


# Smooth activations: half precision moves units across the kink of a leaky ReLU.
@pytest.mark.parametrize("case", ["dmu-n4-residual-tanh-no-bias", "rhn-3-reverse", "gru", "lstm-reverse"])
def test_all_of_it_on_the_tensor_cores(case, use_layout):
    rec, d, hidden = MORE_CASES[case]
    layout = small(8, 2, REGISTERS, product=MMA)
    options = {"dtype": torch.bfloat16, "lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    compare(rec, d, hidden, layout=layout, use_layout=use_layout, **options)


STAGED = ("dmu-n2-reverse", "dmu-n5-residual", "rhn-3-reverse", "gru", "lstm-reverse")


# Two teams, blocks that own nothing, and rows beyond the batch; inputs go to registers, or by way of shared memory.
@pytest.mark.parametrize(
    ("case", "straight"), [*((case, True) for case in MORE_CASES), *((case, False) for case in STAGED)]
)
def test_teams_exchange_through_global_memory(case, straight, use_layout):
    rec, d, hidden = MORE_CASES[case]
    rec = rec._replace(activation="tanh") if rec.activation in ("relu", "leaky_relu") else rec
    options = {"dtype": torch.bfloat16, "lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    layout = small(2, 3, SHARED, product=MMA, team=True, straight=straight)
    compare(rec, d, hidden, layout=layout, use_layout=use_layout, **options)


def test_a_team_waits_for_blocks_that_own_padding_alone(use_layout):
    """Or they fall behind, and wait for words that were sent and lost. The state is narrower than a unit of inputs."""
    layout = small(2, 9, SHARED, product=MMA, team=True, straight=True)
    compare(Recurrence("dmu", "tanh"), 4, [36], layout=layout, use_layout=use_layout, batch=2, steps=30)


@pytest.mark.parametrize("place", [REGISTERS, GLOBAL, MIXED])
@pytest.mark.parametrize(
    ("case", "product", "dtype", "straight"),
    [
        ("dmu-n3-residual-gelu", MMA, torch.float32, True),
        ("dmu-n5-residual", MMA, torch.bfloat16, True),
        ("lstm", MMA, torch.float16, False),
        ("dmu-n5", FMA, torch.float32, False),
        ("gru", FMA, torch.bfloat16, False),
    ],
)
def test_teams_take_weights_from_anywhere(case, product, dtype, straight, place, use_layout):
    rec, _, hidden = MORE_CASES[case]
    rec = rec._replace(activation="tanh") if dtype is torch.bfloat16 else rec
    layout = small(4, 5, place, warps=2, product=product, team=True, straight=straight)
    compare(rec, 101, [85] * len(hidden), layout=layout, use_layout=use_layout, dtype=dtype, batch=7, steps=7)


# More of a warp's inputs than it takes at once, and tiles that are not full.
@pytest.mark.parametrize("place", [SHARED, GLOBAL])
def test_warps_of_a_team_take_their_inputs_in_parts(place, use_layout):
    rec, layout = Recurrence("dmu", "tanh"), small(20, 3, place, warps=2, product=MMA, team=True, straight=True)
    compare(rec, 101, [85, 85], layout=layout, use_layout=use_layout, batch=22, steps=3)


def test_warps_of_a_team_give_back_slots_that_are_not_full(use_layout):
    def layout(shape):
        found = lay_out(shape, MMA, 4, 5, 1, 7000, team=True, straight=True)
        for sweep in (found.forward, found.backward):  # a slot has two units, and a layer three
            assert (sweep.slot, sweep.units[1], sweep.outputs[1], sweep.streamed[1]) == (4, 3, 1, 12)
        return found

    rec = Recurrence("dmu", "tanh")
    compare(rec, 80, [80] * 5, layout=layout, use_layout=use_layout, dtype=torch.bfloat16, batch=5, steps=5)


@pytest.mark.parametrize("straight", [True, False])
def test_teams_send_the_nan_that_stands_for_missing_words(straight, use_layout):
    rec, d = Recurrence("rnn", "tanh"), 6
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, d, [], torch.Generator().manual_seed(0))]
    h0 = torch.full((3, d), nvrtc.POISON, dtype=torch.int32, device=DEVICE).view(torch.float32)
    use_layout(small(2, 3, SHARED, product=MMA, team=True, straight=straight))
    y, _, _ = nvrtc.forward(rec, torch.zeros(2, 3, 3, device=DEVICE), [h0], weights, Sequences(), False)
    assert y.isnan().all()


@pytest.mark.parametrize(("case", "steps"), [("dmu-n5", 16), ("gru", 40)])
@pytest.mark.parametrize("straight", [True, False])
def test_teams_use_their_buffers_again(case, steps, straight, use_layout):
    rec, d, hidden = CASES[case]
    layout = small(2, 3, SHARED, product=MMA, team=True, straight=straight)
    compare(rec._replace(activation="tanh"), d, hidden, layout=layout, use_layout=use_layout, steps=steps)


@pytest.mark.parametrize("case", ["dmu-n5-residual", "rhn-3-reverse"])
def test_teams_are_larger_than_clusters(case, use_layout):
    rec, _, hidden = MORE_CASES[case]
    layout = small(5, 20, SHARED, product=MMA, team=True)
    options = {"dtype": torch.float16, "batch": 7, "steps": 3, "lengths": [3, 1, 0, 2, 3, 3, 2], "masks": True}
    compare(rec._replace(activation="tanh"), 150, [150] * len(hidden), layout=layout, use_layout=use_layout, **options)


IN_OTHER_TYPES = ("dmu-n2", "dmu-n5", "gru", "lstm-reverse")  # each is compiled for a second or two


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES]
    + [(case, dtype) for dtype in (torch.float32, torch.float16) for case in IN_OTHER_TYPES],
)
def test_tensor_cores_agree_with_the_definition(case, dtype, use_layout):
    rec, d, hidden = CASES[case]
    compare(
        rec,
        d,
        hidden,
        layout=small(8, 2, REGISTERS, product=MMA),
        use_layout=use_layout,
        dtype=dtype,
        lengths=[4, 0, 2],
    )


# With the tolerance of exact multiplications; sums of one tile are kept apart, those of four are not.
@pytest.mark.parametrize("case", ["rhn-3-reverse", *IN_OTHER_TYPES])
def test_three_products_in_tf32_have_the_accuracy_of_float32(case, use_layout):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(8, 2, REGISTERS, product=SPLIT), use_layout=use_layout, lengths=[4, 0, 2])


@pytest.mark.parametrize(("place", "rows", "team"), [(SHARED, 4, True), (GLOBAL, 32, False), (MIXED, 16, True)])
def test_weights_of_split_products_may_stay_anywhere(place, rows, team, use_layout):
    rec = Recurrence("dmu", "tanh", residual=True)
    layout = small(rows, 2, place, warps=2, product=SPLIT, team=team, straight=place == MIXED)
    compare(rec, 45, [70, 70], layout=layout, use_layout=use_layout, batch=rows - 1, steps=3, masks=True)


@pytest.mark.parametrize("case", ["dmu-n2", "gru-no-bias-reverse"])
def test_lengths_beyond_the_sequence_mean_the_nearest_within(case, use_layout):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, REGISTERS), use_layout=use_layout, lengths=[5, -1, 2**33 + 1])


def test_negative_views_are_read_as_what_they_say(use_layout):
    from deepmemory import ops

    rec, results = Recurrence("gru"), []
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 7, [], torch.Generator().manual_seed(0))]
    x, h0 = torch.rand(4, 3, 3, device=DEVICE), torch.rand(3, 7, device=DEVICE)
    use_layout(small(2, 1, REGISTERS))
    for view in (torch.clone, lambda t: torch._neg_view(-t)):
        leaves = [t.clone().requires_grad_() for t in (x, h0, *weights)]
        seen = [view(leaf) for leaf in leaves]
        y, (h_n,) = ops.scan(rec, seen[0], (seen[1],), seen[2:], engine="nvrtc")
        incoming = [view(t.detach()) for t in (y, h_n)]
        results.append([y, h_n, *torch.autograd.grad([y, h_n], leaves, incoming)])
    for given, expected in zip(*results, strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("place", [SHARED, GLOBAL, MIXED])
def test_tensor_cores_take_weights_from_anywhere(place, use_layout):
    rec, d, hidden = Recurrence("dmu", "tanh"), 45, [170]
    layout = small(16, 2, place, warps=2, product=MMA)
    compare(rec, d, hidden, layout=layout, use_layout=use_layout, dtype=torch.bfloat16, batch=11, steps=2)


@pytest.mark.parametrize("mixed", [False, True], ids=["", "float32-weights"])
@pytest.mark.parametrize("case", ["dmu-n2", "lstm"])
def test_half_precision_without_tensor_cores(case, mixed, use_layout):
    rec, d, hidden = CASES[case]
    compare(rec, d, hidden, layout=small(2, 2, SHARED), use_layout=use_layout, dtype=torch.bfloat16, mixed=mixed)


@pytest.mark.parametrize("place", [REGISTERS, SHARED, GLOBAL])
@pytest.mark.parametrize("product", [FMA, MMA])
def test_float32_weights_are_rounded_wherever_they_stay(product, place, use_layout):
    """As torch's autocast does; else a result would depend on the layout, and so on the size of a batch."""
    from deepmemory import ops

    use_layout(small(1, 1, place, product=product))
    recurrent = torch.tensor([[1 + 2**-10, -1.0], [0.5, -0.5 - 2**-11]], device=DEVICE)  # rounded: nothing is left
    weights = [
        torch.zeros(2, 1, device=DEVICE),
        recurrent,
        torch.zeros(2, device=DEVICE),
        torch.zeros(2, device=DEVICE),
    ]
    x, h = (torch.full(size, 1.0, dtype=torch.bfloat16, device=DEVICE) for size in ((1, 1, 1), (1, 2)))
    y, _ = ops.scan(Recurrence("rnn", "tanh"), x, (h,), weights, engine="nvrtc")
    assert y.tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize("place", [SHARED, GLOBAL, MIXED])
@pytest.mark.parametrize("case", ["dmu-n2", "gru", "rhn-3-no-bias", "dmu-n5"])
def test_weights_may_stay_anywhere(case, place, use_layout):
    rec, d, hidden = CASES[case]
    if place == MIXED:  # there must be something to divide
        d, hidden = 40, [40] * len(hidden)
    compare(rec, d, hidden, layout=small(2, 2, place), use_layout=use_layout)


@pytest.mark.skipif(GPU, reason="looks into the emulated kernel")
@pytest.mark.parametrize("case", ["dmu-n5", "dmu-n2-reverse", "rhn-3-reverse"])
@pytest.mark.parametrize("place", [GLOBAL, MIXED])
def test_what_a_thin_layer_reads_at_every_step_is_held_early(case, place, use_layout, emulator):
    rec, d, hidden = CASES[case]
    layout_of = small(1, 1, place)
    compare(rec, d, hidden, layout=layout_of, use_layout=use_layout, steps=6, lengths=[6, 0, 2])
    weights = [w.float() for w in draw_weights(rec, 3, d, hidden, torch.Generator())]
    layout = layout_of(shape := Shape.of(rec, torch.float32, weights))
    assert layout.streams
    assert emulator(layout.defines(shape, True)).holds(1)


@pytest.mark.parametrize("place", [REGISTERS, SHARED])
@pytest.mark.parametrize("case", ["dmu-n2", "rhn-3-reverse"])
def test_lanes_that_share_rows(case, place, use_layout):
    rec, d, hidden = CASES[case]
    assert lane_tile(2 * -(-d // 2), rows=8)[0] == 4
    compare(
        rec,
        d,
        hidden,
        layout=small(8, 2, place),
        use_layout=use_layout,
        batch=11,
        steps=3,
        lengths=[3, 1, 0, 2] * 2 + [3] * 3,
    )


@pytest.mark.parametrize("case", ["dmu-n2", "lstm"])
def test_more_outputs_than_lanes_and_several_warps(case, use_layout):
    rec, _, hidden = CASES[case]
    compare(rec, 37, [41] * len(hidden), layout=small(1, 1, SHARED, warps=2), use_layout=use_layout, steps=2, batch=2)


def test_saturated_gates(use_layout):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), use_layout=use_layout, gate_bias=14.0)


def test_relu_lets_gradients_through_at_nan_as_torch_does(use_layout):
    rec, d, hidden = CASES["rnn-relu-reverse"]
    compare(rec, d, hidden, layout=small(2, 1, REGISTERS), use_layout=use_layout, nan_at=(1, 0, 0))


def test_one_step(use_layout):
    rec, d, hidden = CASES["dmu-n2"]
    compare(rec, d, hidden, layout=small(4, 1, REGISTERS), use_layout=use_layout, steps=1, batch=1)


SHARING_CODE = [name for name, (_, _, hidden) in MORE_CASES.items() if len(hidden) > 1 and len(set(hidden)) == 1]


# Warps that finish their own sums, with lanes that share the inputs of an output; `apart`, no layers share their code.
@pytest.mark.parametrize(
    ("case", "apart"), [*[(case, False) for case in MORE_CASES], *[(case, True) for case in SHARING_CODE]]
)
def test_direct_sums_agree_with_the_definition(case, apart, use_layout):
    rec, d, hidden = MORE_CASES[case]
    options = {"lengths": [4, 0, 3], "masks": True, "resets": RESETS}
    layout = small(2, 1, SHARED, warps=2, direct=4, apart=apart)
    compare(rec, d, hidden, layout=layout, use_layout=use_layout, **options)


# Of the layers that share their code some are on the chip, and the weights of the others are on their way meanwhile.
@pytest.mark.parametrize(
    ("on_chip", "warps", "dtype"),
    [
        (0, 2, torch.float32),
        (1, 2, torch.bfloat16),
        (2, 2, torch.float32),
        (3, 2, torch.float32),
        (2, 4, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("cell", ["dmu", "rhn"])
def test_direct_sums_of_weights_that_find_no_room(cell, on_chip, warps, dtype, use_layout):
    def layout_of(shape):  # with more warps they share the rows, and the weights
        tried = (lay_out(shape, FMA, 2, 1, warps, limit, 10**6, direct=4) for limit in range(0, 100_000, 64))
        chosen = next(one for one in tried if one.forward.shared[1] == on_chip * one.forward.units[1])
        assert chosen.forward.streamed[1]
        assert chosen.backward.streamed[1]
        return chosen

    rec = Recurrence(cell, "tanh", residual=cell == "dmu")
    options = {"lengths": [4, 0, 3], "masks": True, "resets": RESETS, "dtype": dtype}
    compare(rec, 16, [16] * 5, layout=layout_of, use_layout=use_layout, **options)


# Features that fill no group, parts of rows, more items than warps, warps without any, and lanes without a sum.
@pytest.mark.parametrize(
    ("direct", "dtype", "rows", "warps", "place"),
    [
        (1, torch.float32, 2, 2, REGISTERS),
        (2, torch.float32, 6, 4, SHARED),
        (4, torch.float32, 5, 3, REGISTERS),
        (8, torch.float32, 1, 8, REGISTERS),
        (8, torch.bfloat16, 12, 8, SHARED),
        (4, torch.float16, 1, 4, SHARED),
    ],
)
def test_direct_sums_of_odd_widths(direct, dtype, rows, warps, place, use_layout):
    layout = small(rows, 1, place, warps=warps, direct=direct)
    options = {"dtype": dtype, "batch": 7, "steps": 2, "lengths": [2, 1, 0, 2, 2, 1, 2], "masks": True}
    compare(Recurrence("dmu", "tanh"), 77, [93, 51], layout=layout, use_layout=use_layout, **options)


# Shared memory that is written too early is wrong in the emulator, which runs warps in any order: 20 exchanges of two
# buffers, with nothing but a barrier for each between warps that take long and others that have nothing to do.
def test_direct_sums_need_one_barrier_for_a_layer(use_layout):
    layout = small(2, 1, SHARED, warps=4, direct=8)
    compare(Recurrence("rhn"), 37, [37], layout=layout, use_layout=use_layout, steps=10, batch=2)


@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_gradients_come_in_at_any_stride_and_may_be_missing(cell, use_layout):
    from deepmemory import ops

    rec = Recurrence(cell, "tanh")
    generator = torch.Generator().manual_seed(5)
    drawn = draw_weights(rec, 3, 5, [4] if cell == "dmu" else [], generator)
    use_layout(small(2, 2, REGISTERS))

    def grads(run, dtype, device):
        weights = [w.to(device, dtype).requires_grad_() for w in drawn]
        x = torch.linspace(-1, 1, 4 * 3 * 3).view(3, 4, 3).to(device, dtype).transpose(0, 1).requires_grad_()
        y, final = run(rec, x, tuple(x.new_zeros(3, 5) for _ in range(rec.states)), weights)
        losses = [y.sum(), y.transpose(0, 1).contiguous().square().sum(), final[0].sum()]
        return [
            g.double().cpu() for loss in losses for g in torch.autograd.grad(loss, [x, *weights], retain_graph=True)
        ]

    expected = grads(plain.scan, torch.float64, "cpu")
    given = grads(lambda *args: ops.scan(*args, engine="nvrtc"), torch.float32, DEVICE)
    for a, b in zip(given, expected, strict=True):
        rtol, atol = EXACT_FLOAT32
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("library", [False, True], ids=["", "library"])
@pytest.mark.parametrize("case", ["dmu-n1", "dmu-n2-reverse", "dmu-n5", "rhn-3-reverse", "gru", "lstm-reverse"])
def test_zeros_without_memory_are_a_state(case, library, use_layout, monkeypatch):
    """The same numbers as with zeros, in the sweeps and in either way to weight gradients."""
    from deepmemory import ops

    rec, d, hidden = CASES[case]
    generator = torch.Generator().manual_seed(7)
    weights = [w.float().to(DEVICE).requires_grad_() for w in draw_weights(rec, 3, d, hidden, generator)]
    x = torch.randn(4, 3, 3, generator=generator).to(DEVICE).requires_grad_()
    mask = torch.rand(3, d, generator=generator).gt(0.3).float().to(DEVICE)
    use_layout(small(2, 2, REGISTERS))
    if library:
        monkeypatch.setattr(nvrtc.products, "MOST_MULTIPLICATIONS", 0)
    results = []
    for make in torch.zeros, torch._efficientzerotensor:
        state = tuple(make((3, d), device=DEVICE, dtype=torch.float32) for _ in range(rec.states))
        sequences = Sequences(torch.tensor([4, 0, 2], device=DEVICE), state_mask=mask)
        y, final = ops.scan(rec, x, state, weights, sequences, engine="nvrtc")
        results.append([y, *final, *torch.autograd.grad(y.square().sum(), [x, *weights])])
    for zeros, without_memory in zip(*results, strict=True):
        assert torch.equal(zeros, without_memory)


@pytest.mark.parametrize(
    ("dtype", "launched"),
    [(torch.float32, ["mm", "mm", "sum"]), (torch.bfloat16, ["_to_copy", "mm", "_to_copy", "mm", "sum"])],
)
def test_little_is_left_to_launch_one_by_one(dtype, launched, use_layout):
    """A small layer waits for the host: beside our kernels torch launches the products with x and one sum."""
    from deepmemory.ops import fused

    class Launched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if not function.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "_reshape_alias")):
                names.append(name)
            return function(*args, **(kwargs or {}))

    rec, names = Recurrence("dmu", "tanh"), []
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 5, [4], torch.Generator().manual_seed(0))]
    x = torch.ones(60, 3, 3, device=DEVICE, dtype=dtype)
    h0 = torch._efficientzerotensor((3, 5), device=DEVICE, dtype=dtype)  # nobody makes them
    use_layout(small(2, 1, REGISTERS))
    with Launched():
        y, _, trace = fused.run_forward(rec, "nvrtc", False, True, x, [h0], weights, Sequences())
        grad_y, needs = y.new_empty(()).expand(y.shape), [True, False, *[True] * 5]
        fused.run_backward(rec, "nvrtc", False, grad_y, [None], x, [h0], weights, Sequences(), y, trace, needs)
    assert names == launched  # a float32 weight of x is rounded for either product


# Rows of 8, 6 and 7 float32 weights are read 16, 8 and 4 bytes at a time, those of the second layer likewise.
@pytest.mark.parametrize(("dtype", "mixed"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(("d", "hidden", "place"), [(8, 12, REGISTERS), (6, 10, SHARED), (7, 9, GLOBAL)])
@pytest.mark.parametrize("product", [FMA, MMA])
def test_rows_of_any_width_are_read_as_far_as_they_go(product, d, hidden, place, dtype, mixed, use_layout):
    layout = small(2, 2 if place == SHARED else 1, place, product=product)
    compare(
        Recurrence("dmu", "tanh"), d, [hidden], layout=layout, use_layout=use_layout, dtype=dtype, mixed=mixed, steps=2
    )


@pytest.mark.parametrize("place", [REGISTERS, SHARED, GLOBAL])
def test_weights_may_begin_at_any_address(place, use_layout):
    rec = Recurrence("dmu", "tanh")
    generator = torch.Generator().manual_seed(3)
    weights = [w.float().to(DEVICE) for w in draw_weights(rec, 3, 8, [8], generator)]
    moved = [torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape) for w in weights]
    assert any(w.data_ptr() % 16 for w in moved)
    x, h0 = torch.randn(4, 2, 3, generator=generator).to(DEVICE), torch.zeros(2, 8, device=DEVICE)
    use_layout(small(2, 1, place))
    expected, given = (nvrtc.forward(rec, x, [h0], ws, Sequences(), False)[0] for ws in (weights, moved))
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    ("cluster", "place", "product", "options"),
    [(1, REGISTERS, FMA, {}), (2, GLOBAL, FMA, {}), (3, GLOBAL, MMA, {"team": True}), (1, SHARED, FMA, {"direct": 2})],
)
def test_runs_side_by_side_equal_each_alone(cluster, place, product, options, use_layout):
    rec = Recurrence("dmu", "tanh")
    generator = torch.Generator().manual_seed(9)
    weights = [
        torch.stack(ws).float().to(DEVICE)
        for ws in zip(*(draw_weights(rec, 3, 5, [4], generator) for _ in range(3)), strict=True)
    ]
    x = torch.randn(3, 4, 3, 3, generator=generator).to(DEVICE)
    use_layout(small(2, cluster, place, product=product, **options))

    def loss(x, *weights):
        from deepmemory import ops

        y, _ = ops.scan(rec, x, (x.new_zeros(3, 5),), list(weights), engine="nvrtc")
        return y.square().sum()

    leaves = [t.requires_grad_() for t in (x, *weights)]
    together = torch.autograd.grad(torch.vmap(loss)(*leaves).sum(), leaves)
    alone = torch.autograd.grad(sum(loss(*(t[run] for t in leaves)) for run in range(3)), leaves)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_more_rows_than_the_kernels_can_count_are_refused():
    rec, weights = Recurrence("rnn", bias=False), [torch.empty(4, 3), torch.empty(4, 4)]
    x = torch.empty(1, 1, 1, 3).expand(2, 2**16, 2**15, 3)
    with pytest.raises(RuntimeError, match=r"fewer than 4294967296 runs x steps x sequences, got 2 x 65536 x 32768"):
        nvrtc._layer(rec, x, weights)


@pytest.mark.parametrize(
    ("rec", "weights", "dtype", "reason"),
    [
        (Recurrence("rnn"), [(4, 3), (4, 4), (4,), (4,)], torch.float64, "bfloat16"),
        (Recurrence("lstm"), [(16, 3), (16, 2), (16,), (16,), (2, 4)], torch.float32, "projections"),
        (Recurrence("rnn", "silu"), [(4, 3), (4, 4), (4,), (4,)], torch.float32, "silu"),
        (Recurrence("dmu", bias=False), [(4096, 3), (4096, 4), (8, 4096)], torch.float32, "2048"),
    ],
)
def test_refuses_what_it_cannot_do_and_says_why(rec, weights, dtype, reason):
    with FakeTensorMode():
        x = torch.empty(5, 2, 3, dtype=dtype, device="cuda")
        assert reason in nvrtc.refuses(rec, x, [torch.empty(shape, dtype=dtype, device="cuda") for shape in weights])
        fits = [torch.empty(shape, device="cuda") for shape in ((4, 3), (4, 4), (4,), (4,))]
        assert nvrtc.refuses(Recurrence("rnn"), x.float(), fits) is None


def test_what_it_refuses_can_be_asked_inside_a_compiled_graph():
    rec = Recurrence("dmu")
    asked = torch.compile(
        lambda x, *weights: x + (nvrtc._refuses_anywhere(rec, x, list(weights)) is None),
        fullgraph=True,
        backend="eager",
    )
    shapes = (4, 3), (4, 5), (4,), (10, 4), (10,)
    assert asked(torch.zeros(2), *map(torch.zeros, shapes)).all()
    assert not asked(torch.zeros(2, dtype=torch.float64), *map(torch.zeros, shapes)).any()
