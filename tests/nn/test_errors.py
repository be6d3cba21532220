"""Mistakes get the kind of error that torch's own layer raises, in words that name the module."""

import pytest
import torch
from layers import CELLS, LAYERS, PEERS
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import deepmemory as dm

X, H = torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)

CONSTRUCTION = {
    "input_size a float": ((3.0, 4), {}),
    "input_size a string": (("3", 4), {}),
    "input_size zero": ((0, 4), {}),
    "input_size negative": ((-3, 4), {}),
    "hidden_size a float": ((3, 4.0), {}),
    "hidden_size zero": ((3, 0), {}),
    "hidden_size negative": ((3, -1), {}),
    "hidden_size missing": ((3,), {}),
    "num_layers zero": ((3, 4), {"num_layers": 0}),
    "num_layers a float": ((3, 4), {"num_layers": 2.0}),
    "bias no bool": ((3, 4), {"bias": 1}),
    "batch_first no bool": ((3, 4), {"batch_first": "yes"}),
    "dropout above one": ((3, 4), {"num_layers": 2, "dropout": 1.5}),
    "dropout negative": ((3, 4), {"num_layers": 2, "dropout": -0.1}),
    "dropout a bool": ((3, 4), {"num_layers": 2, "dropout": True}),
    "unknown option": ((3, 4), {"widht": 3}),
}

CALLS = {
    "1-D input": ((torch.zeros(3),), "2D or 3D, got 1D"),
    "4-D input": ((torch.zeros(1, 5, 2, 3),), "2D or 3D, got 4D"),
    "wrong feature size": ((torch.zeros(5, 2, 7),), "Expected 3, got 7"),
    "wrong feature size, one sequence": ((torch.zeros(5, 7),), "Expected 3, got 7"),
    "wrong feature size, packed": ((pack_sequence([torch.zeros(5, 7)]),), "Expected 3, got 7"),
    "wrong dtype": ((X.double(),), r"float64.*float32"),
    "integers": ((X.long(),), r"int64.*float32"),
    "wrong device": ((X.to("meta"),), r"meta.*cpu"),
    "no time steps": ((torch.zeros(0, 2, 3),), "sequence length to be larger than 0"),
    "hx of too many layers": ((X, torch.zeros(2, 2, 4)), r"\(1, 2, 4\), got \[2, 2, 4\]"),
    "hx of another batch": ((X, torch.zeros(1, 3, 4)), r"\(1, 2, 4\), got \[1, 3, 4\]"),
    "hx of another width": ((X, torch.zeros(1, 2, 5)), r"\(1, 2, 4\), got \[1, 2, 5\]"),
    "hx unbatched, input batched": ((X, torch.zeros(1, 4)), "should also be 3-D but got 2-D"),
    "hx batched, input unbatched": ((X[:, 0], H), "should also be 2-D but got 3-D"),
    "hx of another dtype": ((X, H.double()), r"float64.*float32.*hx.to\(torch.float32\)"),
    "hx of integers": ((X, H.long()), r"int64.*float32"),
    "hx on another device": ((X, H.to("meta")), r"meta.*cpu"),
    "hx of another batch, packed": (
        (pack_sequence([X[:, 0], X[:3, 0]]), torch.zeros(1, 3, 4)),
        r"\(1, 2, 4\), got \[1, 3, 4\]",
    ),
}


def raised(call) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mistake", CONSTRUCTION)
def test_construction(name, mistake):
    args, kwargs = CONSTRUCTION[mistake]
    ours, theirs = (raised(lambda kind=kind: kind[name](*args, **kwargs)) for kind in (LAYERS, PEERS))
    assert type(ours) is type(theirs), (ours, theirs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mistake", CALLS)
def test_call(name, mistake):
    (x, *hx), message = CALLS[mistake]
    if name == "LSTM":
        hx = [(h, h) for h in hx]
    # nn.LSTM reads past the end of a packed input of the wrong width; there nn.GRU says what is right.
    peer = nn.GRU if mistake == "wrong feature size, packed" else PEERS[name]
    theirs = raised(lambda: peer(3, 4)(x, *hx))
    with pytest.raises(type(theirs), match=f"^{name}: .*{message}"):
        LAYERS[name](3, 4)(x, *hx)


def as_state(name: str, h: torch.Tensor):
    return (h, h) if name == "LSTM" else h


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64], ids=str)
def test_autocast_converts_no_dtype_that_nobody_meant(name, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=rf"^{name}: input dtype \({dtype}\)"):
            LAYERS[name](3, 4)(X.to(dtype))
        with pytest.raises(RuntimeError, match=f"^{name}: hx has dtype {dtype}"):
            LAYERS[name](3, 4)(X, as_state(name, H.to(dtype)))
        for args in ((X.to(dtype),), (X, as_state(name, H.to(dtype)))):
            assert type(raised(lambda: PEERS[name](3, 4)(*args))) is RuntimeError


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_of_another_device_converts_nothing(name, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch._C, "_is_any_autocast_enabled", lambda: True)
    with pytest.raises(ValueError, match=rf"^{name}: input dtype \(torch.bfloat16\)"):
        LAYERS[name](3, 4)(X.bfloat16())
    with pytest.raises(RuntimeError, match=f"^{name}: hx has dtype torch.float64"):
        LAYERS[name](3, 4)(X, as_state(name, H.double()))
    layer, h = LAYERS[name](3, 4), torch.rand(1, 2, 4).bfloat16()
    assert torch.equal(layer(X, as_state(name, h))[0], layer(X, as_state(name, h.float()))[0])


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_whole_numbers_are_sent_to_an_embedding(kind):
    with pytest.raises((ValueError, RuntimeError), match=rf"^{kind}: .*input.to\(torch.float32\), or .* nn.Embedding$"):
        {**LAYERS, **CELLS}[kind](3, 4)(torch.ones(5, 3, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_scripting_names_the_module_and_what_works(kind):
    model = nn.ModuleList([nn.Linear(2, 3), {**LAYERS, **CELLS}[kind](3, 4)])
    with pytest.raises(NotImplementedError, match=f"^{kind}: torch.jit.script .* use torch.compile"):
        torch.jit.script(model)


def test_lengths_are_waited_for_on_a_cpu(monkeypatch):
    """A copy from a GPU that nobody waits for could be read before it is there."""
    asked, copy = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **how: asked.append(how) or copy(*args, **how))
    LAYERS["DMU"](3, 4)(X, lengths=torch.tensor([5, 4]))
    assert not any(how.get("non_blocking") for how in asked)
    assert any(how.get("copy") for how in asked)


ROWS = torch.zeros(5, 3)
PACKED = {
    "too few rows": (PackedSequence(ROWS, torch.tensor([3, 3])), r"sum to the 5 rows of its data, got \[3, 3\]"),
    "too many rows": (PackedSequence(ROWS, torch.tensor([2, 2])), r"sum to the 5 rows of its data, got \[2, 2\]"),
    "a sequence that begins late": (PackedSequence(ROWS, torch.tensor([2, 1, 2])), "never increase"),
    "no steps": (PackedSequence(ROWS[:0], torch.tensor([], dtype=torch.int64)), r"got \[\]"),
    "an order of fewer sequences": (
        PackedSequence(ROWS, torch.tensor([3, 2]), torch.tensor([0, 1])),
        r"sorted_indices .* shape \(3,\), got \(2,\)",
    ),
    "an order back of fewer sequences": (
        PackedSequence(ROWS, torch.tensor([3, 2]), torch.tensor([2, 1, 0]), torch.tensor([0, 1])),
        r"unsorted_indices .* shape \(3,\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mistake", PACKED)
def test_packed_by_hand(name, mistake, engine):
    packed, message = PACKED[mistake]
    with pytest.raises(RuntimeError, match=f"^{name}: .*{message}"):
        LAYERS[name](3, 4, engine=engine)(packed, as_state(name, torch.zeros(1, 3, 4)))


@pytest.mark.parametrize("name", LAYERS)
def test_weight_of_another_shape(name, engine):
    """A fused engine would read past its end, and names it; torch's own operators say what they cannot multiply."""
    layer = LAYERS[name](3, 4, engine=engine)
    for key, weight in list(layer.named_parameters()):
        said = None if engine == "plain" else rf"^{name}: \w+ has the shape \(.*\), expected \("
        for wrong in (weight.detach()[:-1], torch.cat([weight.detach()] * 2, -1)):
            with pytest.raises(RuntimeError, match=said):
                torch.func.functional_call(layer, {key: wrong}, (torch.zeros(5, 2, 3),))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, 6], ValueError, "between 0 and the number of time steps, 5; got values from 5 to 6"),
        ([-1, 5], ValueError, "got values from -1 to 5"),
        ([5], ValueError, r"shape \(2,\), got \(1,\)"),
        ([[5, 5]], ValueError, r"shape \(2,\), got \(1, 2\)"),
        (5, ValueError, r"shape \(2,\), got \(\)"),
        ([5.0, 4.0], TypeError, "integers, got torch.float32"),
        ([True, False], TypeError, "integers, got torch.bool"),
    ],
    ids=["too long", "negative", "too few", "two-dimensional", "one number", "floats", "booleans"],
)
def test_lengths(name, lengths, error, message):
    with pytest.raises(error, match=f"^{name}.*{message}"):
        LAYERS[name](3, 4)(X, lengths=lengths)


@pytest.mark.parametrize("name", LAYERS)
class TestOwnOptions:
    def test_packed_input_has_its_own_lengths(self, name):
        with pytest.raises(ValueError, match=f"^{name}: a PackedSequence has its own lengths"):
            LAYERS[name](3, 4)(pack_sequence([X[:, 0]]), lengths=[5])

    def test_unknown_engine(self, name):
        with pytest.raises(ValueError, match=f"^{name}: unknown engine 'gpu'; choose from auto, plain"):
            LAYERS[name](3, 4, engine="gpu")

    def test_state_that_is_no_tensor(self, name):
        hx = ("h", "c") if name == "LSTM" else "h"
        with pytest.raises(TypeError, match=f"^{name}: hx should consist of tensors, got str"):
            LAYERS[name](3, 4)(X, hx)

    def test_state_of_an_lstm(self, name):
        hx = (H, (H, H)) if name == "LSTM" else (H, H)
        with pytest.raises(TypeError, match=f"^{name}: hx .* got tuple; only an LSTM has a pair"):
            LAYERS[name](3, 4)(X, hx)

    def test_lengths_in_the_place_of_the_state(self, name):
        with pytest.raises(RuntimeError, match=f"^{name}: hx has dtype torch.int64 .* lengths="):
            LAYERS[name](3, 4)(X, as_state(name, torch.tensor([5, 4])))

    def test_widths_and_layers_that_disagree(self, name):
        with pytest.raises(ValueError, match=rf"^{name}: hidden_size lists 2 widths.*num_layers=3"):
            LAYERS[name](3, [4, 5], 3)

    @pytest.mark.parametrize(
        ("widths", "error"), [([], ValueError), ([4, 0], ValueError), ([4, 2.5], TypeError), ({4, 5}, TypeError)]
    )
    def test_bad_widths(self, name, widths, error):
        with pytest.raises(error, match=f"^{name}: hidden_size"):
            LAYERS[name](3, widths)

    def test_different_widths_need_a_tuple(self, name):
        hx = (H, H) if name == "LSTM" else H
        with pytest.raises(RuntimeError, match=f"^{name}: layers of different widths take hx as a tuple of 2"):
            LAYERS[name](3, [4, 5])(X, hx)


def test_lstm_state_is_a_pair():
    for wrong in (H, (H, H, H), (H,)):
        with pytest.raises(RuntimeError, match=r"^LSTM: hx should be a tuple \(h_0, c_0\)"):
            dm.LSTM(3, 4)(X, wrong)


@pytest.mark.parametrize("proj_size", [-1, 4, 5])
def test_projection(proj_size):
    assert type(raised(lambda: nn.LSTM(3, 4, proj_size=proj_size))) is ValueError
    with pytest.raises(ValueError, match=r"^LSTM: proj_size"):
        dm.LSTM(3, 4, proj_size=proj_size)


def test_rnn_nonlinearity():
    assert type(raised(lambda: nn.RNN(3, 4, nonlinearity="gelu"))) is ValueError
    with pytest.raises(ValueError, match=r"^RNN: unknown nonlinearity 'gelu'; choose from tanh, relu"):
        dm.RNN(3, 4, nonlinearity="gelu")


@pytest.mark.parametrize("depth", [0, -1, 1.5])
@pytest.mark.parametrize("kind", [dm.RHN, dm.RHNCell])
def test_highway_depth(kind, depth):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: depth should be .* got {depth}"):
        kind(3, 4, depth=depth)


@pytest.mark.parametrize("kind", [dm.DMU, dm.DMUCell])
class TestTransition:
    def test_unknown_activation(self, kind):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: unknown activation 'swish'; choose from leaky_relu,"):
            kind(3, 4, activation="swish")

    @pytest.mark.parametrize(("given", "error"), [(5, TypeError), ("55", TypeError), ([0], ValueError)])
    def test_no_widths(self, kind, given, error):
        with pytest.raises(error, match=f"^{kind.__name__}: transition should"):
            kind(3, 4, transition=given)

    def test_module_of_the_wrong_size(self, kind):
        layer = kind(3, 4, transition=nn.Linear(7, 9))
        with pytest.raises(RuntimeError, match=rf"^{kind.__name__}: .* 2 \* hidden_size = 8 features.* got 9"):
            layer(X[0] if kind is dm.DMUCell else X)

    def test_memory_bias_needs_a_bias_to_set(self, kind):
        with pytest.raises(ValueError, match=f"^{kind.__name__}: memory_bias=3 needs bias=True"):
            kind(3, 4, bias=False, memory_bias=3)
        with pytest.raises(ValueError, match=f"^{kind.__name__}: memory_bias=3 cannot be set on a transition given"):
            kind(3, 4, transition=nn.Linear(7, 8), memory_bias=3)


def test_transition_modules():
    with pytest.raises(ValueError, match=r"2 layer\(s\) in 2 direction\(s\) need a list of 4 .* got 1"):
        dm.DMU(3, 4, 2, bidirectional=True, transition=nn.Linear(7, 8))
    with pytest.raises(ValueError, match="runs on the plain engine, not on 'cpu'"):
        dm.DMU(3, 4, transition=nn.Linear(7, 8), engine="cpu")
    with pytest.raises(TypeError, match="no fixed list of weights"):
        dm.DMU(3, 4, transition=nn.Linear(7, 8)).transition_weights()


@pytest.mark.parametrize("place", [(1, 0), (0, 1), (-1, 0)])
def test_transition_weights_of_no_layer(place):
    with pytest.raises(IndexError, match=f"^DMU: no layer {place[0]}, direction {place[1]}"):
        dm.DMU(3, 4).transition_weights(*place)


CELL_CALLS = {
    "3-D input": (torch.zeros(1, 2, 3),),
    "3-D state": (X[0], H),
    "wrong feature size": (torch.zeros(2, 7),),
    "state of another width": (X[0], torch.zeros(2, 5)),
    "state of another batch": (X[0], torch.zeros(3, 4)),
    "state unbatched, input batched": (X[0], torch.zeros(4)),
    "state batched, input unbatched": (X[0, 0], torch.zeros(2, 4)),
    "wrong dtype": (X[0].double(),),
    "wrong device": (X[0].to("meta"),),
    "state on another device": (X[0], H[0].to("meta")),
    "state of another dtype": (X[0], torch.zeros(2, 4).double()),
    "state of integers": (X[0], torch.zeros(2, 4).long()),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("mistake", CELL_CALLS)
def test_cell(name, mistake):
    args = CELL_CALLS[mistake]
    ours, theirs = raised(lambda: CELLS[name](3, 4)(*args)), raised(lambda: nn.GRUCell(3, 4)(*args))
    assert type(ours) is type(theirs), (ours, theirs)
    assert str(ours).startswith(name)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(
    ("sizes", "error"), [((3.0, 4), TypeError), ((3, "4"), TypeError), ((0, 4), ValueError), ((3, -4), ValueError)]
)
def test_cell_sizes(name, sizes, error):
    with pytest.raises(error, match=f"^{name}: "):
        CELLS[name](*sizes)
