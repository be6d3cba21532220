"""How the plan of the nvrtc engine lays out a sweep; needs neither a GPU nor its emulator."""

import pytest
import torch
from ops.hopper import HOPPER

from deepmemory.ops import nvrtc
from deepmemory.ops.nvrtc.plan import Shape, lay_out, layouts, plans, teams
from deepmemory.ops.nvrtc.spread import FMA, MMA, SPLIT, lane_tile
from deepmemory.ops.recurrence import Recurrence


def test_float32_is_split_for_the_tensor_cores_where_layers_are_wide(monkeypatch):
    def product(width, exact, device):
        monkeypatch.setattr(nvrtc, "_device", lambda index: device)
        return nvrtc._layout(Shape("dmu", "tanh", width, (width,) * 10), exact, 1, 20, False, 0).product

    assert [product(830, exact, HOPPER) for exact in (True, False)] == [SPLIT, MMA]
    assert product(16, True, HOPPER) == FMA
    for capability, in_tf32 in ((7, 5), FMA), ((8, 9), MMA), ((12, 0), MMA):
        other = HOPPER._replace(capability=capability, clusters_at_once={})
        assert [product(830, exact, other) for exact in (True, False)] == [FMA, in_tf32]


def test_layers_with_direct_sums_are_small():
    def offered(cell, widths, value=torch.float32):
        """Which: with layers that share their code, and streamed weights; or nothing."""
        shape = Shape(cell, "tanh", widths[-1], widths, value)
        found = [layout for layout in layouts(shape, (FMA, MMA), 64, HOPPER.shared_limit, ()) if layout.direct]
        assert all(layout.product == FMA and layout.cluster == 1 for layout in found)
        return {(len(layout.stages(shape)) < len(widths), layout.streams) for layout in found}

    pixels = Shape("dmu", "leaky_relu", 128, (128,))
    assert plans(pixels, (FMA,), 1, 128, *HOPPER[1:])[0].direct
    assert offered("dmu", (128,)) == offered("dmu", (93, 51, 77)) == {(False, False)}
    # Compiled for each of them, or with code that they share, for many rows.
    assert offered("dmu", (64,) * 6) == offered("rhn", (64,) * 6) == {(False, False), (True, False)}
    assert offered("dmu", (64,) * 7) == {(True, False)}
    assert offered("dmu", (64,) * 30) == {(True, True)}  # each layer's weights are fetched while others are multiplied
    assert not offered("dmu", (128,) * 7)  # which are too many for that
    # In half precision, weights take half of the shared memory.
    assert offered("dmu", (128,) * 7, torch.bfloat16) == {(True, False)}
    assert not offered("dmu", (256, 256))
    assert not offered("lstm", (512,))


@pytest.mark.parametrize(
    ("d", "hidden"), [(5, [5]), (128, []), (136, [136] * 9), (200, [340]), (512, [1024]), (1024, [1024])]
)
@pytest.mark.parametrize("runs", [1, 51])
@pytest.mark.parametrize("products", [(FMA,), (MMA,), (SPLIT,)])
def test_every_plan_fits_the_chip(d, hidden, products, runs):
    shape = Shape("dmu", "leaky_relu", d, (*hidden, d))
    layout = plans(shape, products, runs, 32, *HOPPER[1:])[0]
    assert max(layout.shared_bytes) <= HOPPER.shared_limit
    assert layout.rows <= 32


@pytest.mark.parametrize(
    ("cell", "d", "hidden", "batch"), [("rhn", 100, [100] * 9, 32), ("dmu", 512, [1024], 64), ("rhn", 607, [607], 64)]
)
def test_no_cluster_waits_for_another_to_end(cell, d, hidden, batch):
    layout = plans(Shape(cell, "tanh", d, (*hidden, d)), (FMA,), 1, batch, *HOPPER[1:])[0]
    assert layout.cluster > 1
    groups = -(-batch // layout.rows)
    if layout.team:
        assert groups * layout.cluster <= HOPPER.multiprocessors
    else:
        assert groups <= HOPPER.clusters_at_once[layout.cluster]


def test_blocks_of_teams_all_run_at_once():
    shape = Shape("dmu", "tanh", 830, (830,) * 10, torch.bfloat16)
    for runs, batch in ((1, 20), (1, 64), (3, 64), (8, 20), (1, 1000)):
        layouts = list(teams(shape, runs, batch, HOPPER.multiprocessors))
        assert bool(layouts) is (runs <= 3 and batch <= 64)
        for team, rows in layouts:
            assert team > max(HOPPER.clusters_at_once)
            assert runs * -(-batch // rows) * team <= HOPPER.multiprocessors


@pytest.mark.parametrize("product", [FMA, MMA])
@pytest.mark.parametrize(("width", "depth", "team"), [(136, 10, False), (830, 10, True)])
def test_wide_layers_are_spread_over_more_blocks_than_a_cluster_has(width, depth, team, product):
    shape = Shape("dmu", "tanh", width, (width,) * depth, torch.bfloat16)
    layout = plans(shape, (product,), 1, 20, *HOPPER[1:])[0]
    assert layout.team is team
    assert max(layout.shared_bytes) <= HOPPER.shared_limit
    without_clusters = HOPPER._replace(clusters_at_once={})  # GPUs before Hopper
    assert not any(one.team for one in plans(shape, (product,), 1, 20, *without_clusters[1:]))


@pytest.mark.parametrize(("rows", "most"), [(13, 2), (22, 1), (32, 1)])
def test_many_warps_have_few_sums_in_registers(rows, most):
    """A lane of 16 warps spills where it has sums of more than four tiles of several outputs."""
    shape = Shape("rhn", "tanh", 1184, (1184,) * 3, torch.bfloat16)
    limit, how = HOPPER.shared_limit, {"team": True, "straight": False}
    few, many = (lay_out(shape, MMA, rows, 37, warps, limit, **how) for warps in (8, 16))
    assert max(many.forward.outputs) <= most < max(few.forward.outputs)


@pytest.mark.parametrize(
    ("cell", "widths", "rows", "team", "forward", "backward"),
    [
        ("dmu", (830,) * 10, 10, 52, True, True),
        ("dmu", (1000,) * 10, 32, 63, True, True),
        ("dmu", (1232,) * 5, 22, 39, False, False),  # too many sums in registers
        ("lstm", (1184,), 22, 37, False, True),  # more of them are no harm in a single layer
        ("dmu", (1024, 512), 16, 32, False, False),  # all weights find room
    ],
)
def test_inputs_of_teams_come_straight_where_weights_are_short_of_room(cell, widths, rows, team, forward, backward):
    shape = Shape(cell, "tanh", widths[-1], widths, torch.bfloat16)
    layout = lay_out(shape, MMA, rows, team, 16, HOPPER.shared_limit, team=True)
    assert (layout.forward.straight, layout.backward.straight) == (forward, backward)


def test_only_hopper_and_newer_fetch_weights_ahead():
    shape = Shape("dmu", "tanh", 1000, (1000,) * 10, torch.bfloat16)
    for clusters, fetches in ((HOPPER.clusters_at_once, True), ({}, False)):
        layout = plans(shape, (MMA,), 1, 32, HOPPER.multiprocessors, HOPPER.shared_limit, clusters)[0]
        for sweep in (layout.forward, layout.backward):
            assert any(sweep.streamed)
            assert bool(sweep.ahead) is fetches


TURING = nvrtc.Device((7, 5), 40, 65536, {})  # with the least shared memory of all that are supported


@pytest.mark.parametrize(
    ("cell", "widths"),
    [
        ("lstm", (1024,)),
        ("gru", (1365,)),
        ("dmu", (2048, 1024)),
        ("dmu", (1024, 1024, 1024)),
        ("dmu", (64,) * 62),
        ("rhn", (1024, 1024)),
        ("rhn", (64,) * 32),
    ],
)
def test_layers_with_few_outputs_fit_into_every_gpu(cell, widths):
    shape = Shape(cell, "tanh", widths[-1], widths)
    outputs = sum(layer.gates * layer.features for layer in shape.layers())
    assert 0.9 * nvrtc.FEW_OUTPUTS < outputs <= nvrtc.FEW_OUTPUTS
    assert all(plans(shape, (FMA,), 1, batch, *TURING[1:]) for batch in (1, 100))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("device", "fits"), [(TURING, False), (HOPPER, True)])
def test_a_layer_whose_biases_find_no_room_is_refused(device, fits, compiled, monkeypatch):
    monkeypatch.setattr(nvrtc, "_device", lambda index: device)
    rec = Recurrence("rhn")
    nvrtc._has_layout.cache_clear()

    def has_room(x, *weights):
        return x + (nvrtc._finds_no_room(rec, x, list(weights)) is None)

    ask = torch.compile(has_room, fullgraph=True, backend="eager") if compiled else has_room
    weights = [torch.empty(shape) for shape in [(2048, 8), (2048, 1024), (2048,), *[(2048, 1024), (2048,)] * 11]]
    x = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert bool(ask(x, *weights)) is fits
    assert ask(x, *weights[:3])
    nvrtc._has_layout.cache_clear()


def test_a_single_step_shares_the_loading_of_weights():
    case = Shape("dmu", "tanh", 256, (256, 256)), (FMA,), 1, 256, *HOPPER[1:]
    assert plans(*case, steps=1)[0].cluster > plans(*case)[0].cluster


@pytest.mark.parametrize(("depth", "floats"), [(1, 64), (2, 64), (3, 32), (10, 32)])
def test_a_deep_transition_leaves_registers_to_the_rest(depth, floats):
    case = Shape("dmu", "tanh", 128, (128,) * depth), FMA, 2, 1, 16, HOPPER.shared_limit
    assert lay_out(*case) == lay_out(*case, floats)
    assert lay_out(*case) != lay_out(*case, floats // 2)


@pytest.mark.parametrize(("outputs", "lanes"), [(25, 1), (50, 2), (76, 3), (128, 4), (136, 3), (192, 3), (250, 4)])
def test_lanes_share_inputs_without_much_padding(outputs, lanes):
    assert lane_tile(outputs, rows=1) == (1, lanes)


@pytest.mark.parametrize(
    ("outputs", "rows", "tile"), [(28, 8, (2, 2)), (28, 5, (1, 1)), (25, 6, (2, 2)), (50, 6, (1, 2)), (17, 16, (4, 3))]
)
def test_lanes_share_rows_too_where_outputs_are_few(outputs, rows, tile):
    assert lane_tile(outputs, rows) == tile
