"""RNN, GRU and LSTM: torch's checkpoints, torch's numbers."""

import pytest
import torch
from layers import LAYERS, PEERS, like, random_state, results, tensors
from tolerances import assert_close
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import deepmemory as dm

OPTIONS = {
    "one layer": {},
    "no bias": {"bias": False},
    "three layers, batch first": {"num_layers": 3, "batch_first": True},
    "both ways": {"num_layers": 2, "bidirectional": True},
}
CASES = [
    *[
        pytest.param(name, {}, options, id=f"{name}-{key}")
        for name in ("RNN", "GRU", "LSTM")
        for key, options in OPTIONS.items()
    ],
    pytest.param("RNN", {"nonlinearity": "relu"}, OPTIONS["both ways"], id="RNN-relu"),
    pytest.param("LSTM", {"proj_size": 2}, OPTIONS["one layer"], id="LSTM-projected"),
    pytest.param("LSTM", {"proj_size": 2}, OPTIONS["both ways"], id="LSTM-projected, both ways"),
    pytest.param("LSTM", {"proj_size": 2}, OPTIONS["no bias"], id="LSTM-projected, no bias"),
]


def pair(name: str, *args, engine: str = "auto", **options) -> tuple[nn.Module, nn.Module]:
    """Torch's layer and ours."""
    return PEERS[name](*args, **options), LAYERS[name](*args, engine=engine, **options)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("direction", ["torch's checkpoint", "our checkpoint"])
@pytest.mark.parametrize(("name", "own", "options"), CASES)
def test_checkpoints_load_both_ways_with_the_same_results(name, own, options, direction, dtype, engine):
    theirs, ours = pair(name, 3, 5, engine=engine, dtype=dtype, **own, **options)
    source, target = (theirs, ours) if direction == "torch's checkpoint" else (ours, theirs)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    target.load_state_dict(source.state_dict())
    x = torch.randn(7, 4, 3, dtype=dtype)
    hx = random_state(theirs, x)
    assert_close(results(ours, x, hx), results(theirs, x, hx))
    assert_close(results(ours, x), results(theirs, x))


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_packed_and_unbatched_as_torch(name, engine):
    theirs, ours = pair(name, 3, 5, 2, bidirectional=True, engine=engine)
    ours.load_state_dict(theirs.state_dict())
    packed = pack_sequence([torch.randn(n, 3) for n in (2, 6, 1, 4)], enforce_sorted=False)
    hx = random_state(theirs, packed)
    (y, h_n), (y_theirs, h_theirs) = ours(packed, hx), theirs(packed, hx)
    assert_close(y.data, y_theirs.data)
    assert_close(tensors(h_n), tensors(h_theirs))
    x, hx = torch.randn(6, 3), like(hx, lambda h: h[:, 0])
    assert_close(tensors(ours(x, hx)), tensors(theirs(x, hx)))


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_the_same_seed_gives_the_same_weights(name):
    modules = []
    for kind in (LAYERS, PEERS):
        torch.manual_seed(5)
        modules.append(kind[name](3, 5, 2, bidirectional=True))
    assert_close(dict(modules[0].state_dict()), dict(modules[1].state_dict()))


def test_dropout_as_torch():
    for p, training in ((1.0, True), (0.5, False)):
        theirs, ours = pair("GRU", 3, 5, 2, dropout=p)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(7, 4, 3)
        assert_close(ours.train(training)(x)[0], theirs.train(training)(x)[0])


def test_training_goes_the_same_way():
    theirs, ours = pair("GRU", 2, 6)
    ours.load_state_dict(theirs.state_dict())
    x, target = torch.randn(9, 8, 2), torch.randn(8, 6)
    losses = []
    for layer in (theirs, ours):
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
        for _ in range(30):
            loss = (layer(x)[1][0] - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(loss.detach())
    assert losses[1] < 0.9 * (ours.reset_parameters() or (ours(x)[1][0] - target).square().mean())
    assert_close(losses[1], losses[0])


def test_their_vmap_fails_where_ours_works():
    """The reason these layers exist; if torch learns it, their docstrings need new words."""

    def outputs(kind):
        layers = [kind(3, 5) for _ in range(4)]
        weights, _ = torch.func.stack_module_state(layers)
        x = torch.randn(4, 7, 2, 3)
        y = torch.vmap(lambda w, x: torch.func.functional_call(layers[0], w, (x,))[0])(weights, x)
        return y, [layer(x[i])[0] for i, layer in enumerate(layers)]

    stacked, alone = outputs(dm.GRU)
    assert_close(stacked, torch.stack(alone))
    with pytest.raises(RuntimeError):
        outputs(nn.GRU)
