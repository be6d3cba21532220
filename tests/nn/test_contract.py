"""What ``nn.GRU`` and ``nn.GRUCell`` promise, kept by every layer and cell here."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from layers import CELLS, LAYERS, OWN, PEERS, like, random_state, randomise, results, tensors
from tolerances import assert_close
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import deepmemory as dm

ORDER = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
POSITIONAL = {
    "DMU": [*ORDER, "device", "dtype"],
    "RHN": [*ORDER, "device", "dtype"],
    "GRU": [*ORDER, "device", "dtype"],
    "RNN": [*ORDER[:3], "nonlinearity", *ORDER[3:], "device", "dtype"],
    "LSTM": [*ORDER, "proj_size", "device", "dtype"],
}


@pytest.fixture(params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def build(name: str, engine: str):
    """Makes the layer under test, with its own options and weights that are nowhere zero."""

    def make(*args, **kwargs):
        return randomise(LAYERS[name](*args, **OWN.get(name, {}), engine=engine, **kwargs))

    return make


def shapes(result) -> list[torch.Size]:
    return [t.shape for t in tensors(result)]


def single(build, source: nn.Module, layer: int, direction: int, **options) -> nn.Module:
    """One layer and direction of ``source`` as a layer of its own."""
    suffix = f"_l{layer}" + "_reverse" * direction
    weights = {k.removesuffix(suffix) + "_l0": v for k, v in source.state_dict().items() if k.endswith(suffix)}
    alone = build(weights["weight_ih_l0"].shape[1], source.hidden_size, **options)
    alone.load_state_dict(weights)
    return alone


class TestArguments:
    def test_positional_order(self, name):
        parameters = inspect.signature(LAYERS[name]).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[name]

    def test_positional_and_keyword_agree(self, name):
        values = {"input_size": 3, "hidden_size": 4, "num_layers": 2, "bias": False, "batch_first": True}
        values |= {"dropout": 0.5, "bidirectional": True, "device": "meta", "dtype": torch.float64}
        values |= {"nonlinearity": "relu", "proj_size": 2}
        values = {key: values[key] for key in POSITIONAL[name]}
        for layer in (LAYERS[name](*values.values()), LAYERS[name](**values)):
            for key in set(values) - {"device", "dtype"}:
                assert getattr(layer, key) == values[key]
            assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}

    def test_attributes_are_those_of_the_peer(self, name):
        ours, peer = LAYERS[name](3, 4, 2, dropout=0.25), PEERS[name](3, 4, 2, dropout=0.25)
        for key in ORDER:
            assert getattr(ours, key) == getattr(peer, key)

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_layers": 2, "dropout": 0.1}, {"bias": False, "batch_first": True}, {"bidirectional": True}],
        ids=["defaults", "layers", "flags", "bidirectional"],
    )
    def test_repr_reads_like_the_peers(self, name, options):
        assert LAYERS[name](3, 4, **options).extra_repr() == PEERS[name](3, 4, **options).extra_repr()

    def test_repr_shows_what_is_our_own(self):
        dmu = dm.DMU(3, [4, 5], transition=[7], activation="tanh", memory_bias=3, engine="plain", recompute=True)
        assert repr(dmu) == (
            "DMU(3, [4, 5], engine='plain', recompute=True, transition=[7], activation='tanh', memory_bias=3.0)"
        )
        assert repr(dm.RHN(3, 4, depth=2)) == "RHN(3, 4, depth=2)"
        assert repr(dm.DMUCell(3, 4, transition=[], bias=False)) == "DMUCell(3, 4, bias=False, transition=[])"
        assert repr(dm.RHNCell(3, 4, depth=2)) == "RHNCell(3, 4, depth=2)"
        assert repr(dm.RNN(3, 4, nonlinearity="relu")) == "RNN(3, 4, nonlinearity='relu')"
        assert repr(dm.LSTM(3, 4, 2, proj_size=2)) == repr(nn.LSTM(3, 4, 2, proj_size=2))

    def test_dropout_on_one_layer_warns_like_the_peer(self, name):
        with pytest.warns(UserWarning, match="dropout") as theirs:
            PEERS[name](3, 4, dropout=0.5)
        with pytest.warns(UserWarning, match="dropout") as ours:
            LAYERS[name](3, 4, dropout=0.5)
        assert str(ours[0].message) == str(theirs[0].message)
        assert ours[0].filename == __file__

    def test_no_bias_has_no_bias(self, build):
        layer = build(3, 4, 2, bias=False)
        assert not [key for key in layer.state_dict() if "bias" in key]
        y, _ = layer(torch.zeros(5, 2, 3))
        assert (y == 0).all()  # nothing in, nothing out

    def test_all_weights_lists_each_layer_and_direction(self, name):
        layer = LAYERS[name](3, 4, 2, bidirectional=True)
        flat = [weight for weights in layer.all_weights for weight in weights]
        assert len(layer.all_weights) == 4
        assert [id(w) for w in flat] == [id(p) for p in layer.parameters()]
        layer.flatten_parameters()


class WeightDrop(nn.Module):
    """Dropout on a recurrent weight, the way that AWD-LSTM and fastai made common."""

    def __init__(self, module: nn.Module, name: str, p: float) -> None:
        super().__init__()
        self.module, self.name, self.p = module, name, p
        self.raw = nn.Parameter(getattr(module, name).detach().clone())
        delattr(module, name)
        self.place = module._flat_weights_names.index(name)

    def forward(self, x):
        dropped = F.dropout(self.raw, self.p, self.training).clone()
        setattr(self.module, self.name, dropped)
        self.module._flat_weights[self.place] = dropped
        return self.module(x)


class TestWhatProgramsRead:
    """Attributes and methods of ``nn.RNNBase`` that programs use, documented or not."""

    def test_mode_and_projection(self, name):
        ours, peer = LAYERS[name](3, 4), PEERS[name](3, 4)
        assert ours.mode == (name if name in ("DMU", "RHN") else peer.mode)
        assert ours.proj_size == peer.proj_size == 0
        assert dm.RNN(3, 4, nonlinearity="relu").mode == nn.RNN(3, 4, nonlinearity="relu").mode
        assert dm.LSTM(3, 4, proj_size=2).proj_size == 2

    def test_names_of_the_weights(self, name):
        ours, peer = LAYERS[name](3, 4, 2, bidirectional=True), PEERS[name](3, 4, 2, bidirectional=True)
        assert ours._flat_weights_names == list(dict(ours.named_parameters()))
        assert [name for names in ours._all_weights for name in names] == ours._flat_weights_names
        if name not in ("DMU", "RHN"):
            assert ours._flat_weights_names == peer._flat_weights_names
            assert ours._all_weights == peer._all_weights

    @pytest.mark.parametrize(
        "change",
        [
            lambda layer: layer,
            lambda layer: layer.to(torch.float64),
            lambda layer: layer.to("meta"),
            copy.deepcopy,
            lambda layer: pickle.loads(pickle.dumps(layer)),
            lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True) and layer,
            lambda layer: setattr(layer, "weight_hh_l0", nn.Parameter(torch.zeros_like(layer.weight_hh_l0))) or layer,
        ],
        ids=["made", "dtype", "device", "deepcopy", "pickle", "load_state_dict", "setattr"],
    )
    def test_flat_weights_are_the_parameters(self, build, change):
        layer = change(build(3, 4, 2, bidirectional=True))
        by_name = dict(layer.named_parameters())
        expected = [id(by_name[key]) for key in layer._flat_weights_names]
        assert [id(weight) for weight in layer._flat_weights] == expected
        assert [id(weight) for weights in layer.all_weights for weight in weights] == expected

    def test_weights_dropped_by_a_wrapper(self, build):
        layer, x = build(3, 4), torch.randn(5, 2, 3)
        whole = copy.deepcopy(layer)
        wrapped = WeightDrop(layer, "weight_hh_l0", 0.5)
        assert layer._flat_weights[wrapped.place] is None
        assert torch.equal(wrapped.eval()(x)[0], whole(x)[0])
        y, _ = wrapped.train()(x)
        assert layer._flat_weights[wrapped.place] is layer.weight_hh_l0
        assert 0 < (layer.weight_hh_l0 == 0).sum() < layer.weight_hh_l0.numel()
        assert torch.equal(y, torch.func.functional_call(whole, {"weight_hh_l0": layer.weight_hh_l0}, (x,))[0])
        y.sum().backward()
        assert wrapped.raw.grad.abs().sum() > 0

    def test_flat_weights_can_be_assigned(self, build):
        layer, other, x = build(3, 4), build(3, 4), torch.randn(5, 2, 3)
        layer._flat_weights = [getattr(layer, key) for key in layer._flat_weights_names]  # as many wrappers do
        layer._flat_weights = list(other.parameters())
        assert torch.equal(layer(x)[0], other(x)[0])
        assert layer.weight_hh_l0 is other.weight_hh_l0
        with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight_ih_l0'"):
            layer._flat_weights = [torch.zeros_like(w) for w in layer._flat_weights]

    @pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
    def test_sizes_of_the_state(self, name, batch_first):
        options = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
        ours, peer, x = LAYERS[name](3, 4, **options), PEERS[name](3, 4, **options), torch.randn(5, 2, 3)
        packed = pack_sequence([torch.randn(5, 3), torch.randn(2, 3), torch.randn(1, 3)])
        for args in ((x, None), (packed.data, packed.batch_sizes)):
            assert ours.get_expected_hidden_size(*args) == peer.get_expected_hidden_size(*args)
        wide = LAYERS[name](3, [4, 6], batch_first=batch_first)
        batch = 5 if batch_first else 2
        assert wide.get_expected_hidden_size(x, None) == ((1, batch, 4), (1, batch, 6))

    def test_sizes_of_a_projected_lstm(self):
        ours, peer, x = dm.LSTM(3, 4, proj_size=2), nn.LSTM(3, 4, proj_size=2), torch.randn(5, 2, 3)
        assert ours.get_expected_hidden_size(x, None) == peer.get_expected_hidden_size(x, None) == (1, 2, 2)
        assert ours.get_expected_cell_size(x, None) == peer.get_expected_cell_size(x, None) == (1, 2, 4)

    def test_a_packed_batch_by_its_parts(self, name, build):
        """What programs do that take a PackedSequence apart: order the state, then check both."""
        layer, peer = build(3, 4), PEERS[name](3, 4)
        data, batch_sizes, order, _ = pack_sequence([torch.randn(n, 3) for n in (2, 4, 1)], enforce_sorted=False)
        hx = random_state(layer, torch.zeros(1, 3, 3))
        permuted = layer.permute_hidden(hx, order)
        assert_close(tensors(permuted), tensors(peer.permute_hidden(hx, order)))
        assert layer.permute_hidden(hx, None) is hx
        layer.check_forward_args(data, permuted, batch_sizes)
        for wrong in ((data[:, :2], permuted), (data, like(permuted, lambda h: h[:, :2]))):
            with pytest.raises(RuntimeError, match=f"^{name}: .*xpected"):
                layer.check_forward_args(*wrong, batch_sizes)
            with pytest.raises(RuntimeError, match="xpected"):
                peer.check_forward_args(*wrong, batch_sizes)

    def test_a_class_of_their_own(self, name):
        """Torch's compiler refuses an nn.GRU, and programs that find an nn.RNNBase expect its gates."""
        layer = LAYERS[name](3, 4)
        assert not isinstance(layer, nn.RNNBase)
        x = torch.randn(5, 2, 3)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert_close(compiled(x)[0], layer(x)[0])

    @pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
    def test_dynamic_quantisation_leaves_them_alone(self, name, build):
        model, x = nn.Sequential(build(3, 4)).eval(), torch.randn(5, 2, 3)
        with pytest.warns(UserWarning, match=rf"^{name}: .* leaves it in float32"):
            quantised = torch.ao.quantization.quantize_dynamic(model, {nn.GRU, nn.LSTM, nn.RNNCell, nn.Linear})
        assert type(quantised[0]) is LAYERS[name]
        assert torch.equal(quantised(x)[0], model(x)[0])

    def test_symbolic_tracing_with_layers_as_leaves(self, name, build):
        class Tracer(torch.fx.Tracer):
            def is_leaf_module(self, module, path):
                return isinstance(module, LAYERS[name]) or super().is_leaf_module(module, path)

        model, x = nn.Sequential(build(3, 4)), torch.randn(5, 2, 3)
        traced = torch.fx.GraphModule(model, Tracer().trace(model))
        assert torch.equal(traced(x)[0], model(x)[0])


class TestForward:
    @pytest.mark.parametrize("num_layers", [1, 3])
    @pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "both-ways"])
    @pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
    @pytest.mark.parametrize("batched", [False, True], ids=["unbatched", "batched"])
    def test_shapes_are_those_of_the_peer(self, name, build, num_layers, bidirectional, batch_first, batched):
        options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
        ours, peer = build(3, 4, **options), PEERS[name](3, 4, **options)
        x = torch.randn(5, 2, 3) if batched else torch.randn(5, 3)
        assert shapes(ours(x)) == shapes(peer(x))
        hx = random_state(peer, x)
        assert shapes(ours(x, hx)) == shapes(peer(x, hx))

    def test_layers_and_directions_are_composed_as_by_hand(self, build):
        layer = build(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
        x = torch.randn(6, 2, 3, dtype=torch.float64)
        hx = random_state(layer, x)
        y, h_n = layer(x, hx)
        inner, finals = x, []
        for number in range(2):
            row = 2 * number
            forward, back = (single(build, layer, number, way, dtype=torch.float64) for way in (0, 1))
            y_forward, h_forward = forward(inner, like(hx, lambda h: h[row : row + 1]))
            y_back, h_back = back(inner.flip(0), like(hx, lambda h: h[row + 1 : row + 2]))
            inner = torch.cat([y_forward, y_back.flip(0)], -1)
            finals += [h_forward, h_back]
        assert_close(y, inner)
        for index, part in enumerate(tensors(h_n)):
            assert_close(part, torch.cat([tensors(f)[index] for f in finals]))

    def test_batch_first_is_a_transpose(self, build):
        time_first, batch_first = build(3, 4, 2), build(3, 4, 2, batch_first=True)
        batch_first.load_state_dict(time_first.state_dict())
        x = torch.randn(5, 2, 3)
        hx = random_state(time_first, x)
        y, h_n = time_first(x, hx)
        y_first, h_first = batch_first(x.transpose(0, 1), hx)
        assert_close(y_first, y.transpose(0, 1))
        assert_close(tensors(h_first), tensors(h_n))

    def test_unbatched_is_a_batch_of_one(self, build):
        for batch_first in (False, True):
            layer = build(3, 4, 2, bidirectional=True, batch_first=batch_first)
            x, dim = torch.randn(5, 3), 0 if batch_first else 1
            hx = random_state(layer, x)
            y, h_n = layer(x, hx)
            y_one, h_one = layer(x.unsqueeze(dim), like(hx, lambda h: h.unsqueeze(1)))
            assert_close(y, y_one.squeeze(dim))
            assert_close(tensors(h_n), [h.squeeze(1) for h in tensors(h_one)])

    def test_no_state_is_a_state_of_zeros(self, build):
        layer, x = build(3, 4, 2), torch.randn(5, 2, 3)
        y, h_n = layer(x)
        zeros = like(h_n, torch.zeros_like)
        assert_close(layer(x, zeros)[0], y)
        assert_close(layer(x, hx=zeros)[0], y)
        assert not torch.allclose(layer(x, random_state(layer, x))[0][0], y[0])

    def test_last_output_is_the_final_state(self, build):
        layer, x = build(3, 4, 2, bidirectional=True), torch.randn(5, 2, 3)
        y, h_n = layer(x)
        h = tensors(h_n)[0]
        assert_close(y[-1, :, :4], h[2])
        assert_close(y[0, :, 4:], h[3])

    def test_dropout_falls_between_layers_alone(self, build):
        layer, x = build(3, 4, 2, dropout=0.5), torch.randn(5, 2, 3)
        first, second = single(build, layer, 0, 0), single(build, layer, 1, 0)
        inner, h_first = first(x)
        torch.manual_seed(7)
        y_expected, h_second = second(F.dropout(inner, 0.5))
        torch.manual_seed(7)
        y, h_n = layer(x)
        assert_close(y, y_expected)
        for part, a, b in zip(tensors(h_n), tensors(h_first), tensors(h_second), strict=True):
            assert_close(part, torch.cat([a, b]))
        assert_close(layer.eval()(x)[0], second(inner)[0])

    def test_empty_batch(self, name, build):
        x = torch.randn(5, 0, 3, requires_grad=True)
        layer = build(3, 4, 2)
        y, h_n = layer(x)
        assert shapes((y, h_n)) == shapes(PEERS[name](3, 4, 2)(x))
        y.sum().backward()
        assert all((p.grad == 0).all() for p in layer.parameters())

    def test_nan_in_a_weight_shows_as_in_the_peer(self, name, build):
        layer, peer, x = build(3, 4), PEERS[name](3, 4), torch.randn(5, 2, 3)
        for module in (layer, peer):
            with torch.no_grad():
                module.weight_ih_l0[0, 0] = float("nan")
            y, _ = module(x)
            assert y[-1].isnan().any()


class TestPacking:
    LENGTHS = (3, 6, 1, 4)

    @pytest.fixture
    def sequences(self):
        return [torch.randn(length, 3) for length in self.LENGTHS]

    @pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "any-order"])
    def test_each_sequence_as_if_alone(self, build, sequences, enforce_sorted):
        if enforce_sorted:
            sequences = sorted(sequences, key=len, reverse=True)
        layer = build(3, 4, 2, bidirectional=True)
        packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
        hx = random_state(layer, torch.zeros(1, len(sequences), 3))
        y, h_n = layer(packed, hx)
        assert torch.equal(y.batch_sizes, packed.batch_sizes)
        assert (y.sorted_indices is None) == enforce_sorted
        padded, lengths = pad_packed_sequence(y)
        assert lengths.tolist() == [len(s) for s in sequences]
        for b, sequence in enumerate(sequences):
            y_alone, h_alone = layer(sequence, like(hx, lambda h: h[:, b]))
            assert_close(padded[: len(sequence), b], y_alone)
            assert_close([h[:, b] for h in tensors(h_n)], tensors(h_alone))

    def test_layout_is_the_peers(self, name, build, sequences):
        packed = pack_sequence(sequences, enforce_sorted=False)
        for batch_first in (False, True):  # a packed batch has no layout to choose
            ours = build(3, 4, batch_first=batch_first)(packed)
            theirs = PEERS[name](3, 4, batch_first=batch_first)(packed)
            assert ours[0].data.shape == theirs[0].data.shape
            assert shapes(ours[1]) == shapes(theirs[1])
            for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
                assert torch.equal(getattr(ours[0], field), getattr(theirs[0], field))

    def test_packed_equals_lengths_with_every_gradient(self, build, sequences):
        layer = build(3, 4, 2, bidirectional=True, dtype=torch.float64)
        x, lengths = nn.utils.rnn.pad_sequence(sequences).double(), torch.tensor(self.LENGTHS)
        hx = random_state(layer, x)

        class Packing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = layer

            def forward(self, x, hx):
                y, h_n = self.inner(pack_padded_sequence(x, lengths, enforce_sorted=False), hx)
                return pad_packed_sequence(y)[0], h_n

        packed, padded = results(Packing(), x, hx), results(layer, x, hx, lengths=lengths)
        packed["gradients"] = {key.removeprefix("inner."): grad for key, grad in packed["gradients"].items()}
        assert_close(packed, padded)


class TestLengths:
    def test_past_its_end_a_sequence_keeps_its_state_and_gives_zero(self, build):
        layer, x = build(3, 4), torch.randn(6, 4, 3)
        hx = random_state(layer, x)
        y, h_n = layer(x, hx, lengths=torch.tensor([6, 2, 0, 1]))
        for b, length in enumerate([6, 2, 0, 1]):
            assert (y[length:, b] == 0).all()
            if length:
                alone, h_alone = layer(x[:length, b], like(hx, lambda h: h[:, b]))
                assert_close(y[:length, b], alone)
                assert_close([h[:, b] for h in tensors(h_n)], tensors(h_alone))
        assert torch.equal(tensors(h_n)[0][:, 2], tensors(hx)[0][:, 2])

    @pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32)])
    def test_any_kind_of_integers(self, build, kind):
        layer, x = build(3, 4, batch_first=True), torch.randn(2, 5, 3)
        expected = layer(x, lengths=torch.tensor([4, 2]))[0]
        assert torch.equal(layer(x, lengths=kind([4, 2]))[0], expected)
        assert torch.equal(layer(x, None, kind([4, 2]))[0], expected)

    def test_one_sequence_takes_a_plain_number(self, build):
        layer, x = build(3, 4), torch.randn(5, 3)
        y, h_n = layer(x, lengths=3)
        assert_close(y[:3], layer(x[:3])[0])
        assert_close(tensors(h_n), tensors(layer(x[:3])[1]))
        assert (y[3:] == 0).all()


class TestDifferentWidths:
    def test_states_come_and_go_as_one_tensor_per_layer(self, name, build):
        layer, x = build(3, [4, 6, 5], bidirectional=True), torch.randn(5, 2, 3)
        y, h_n = layer(x)
        assert layer.num_layers == 3
        assert y.shape == (5, 2, 10)
        parts = h_n if name == "LSTM" else (h_n,)
        for part in parts:
            assert isinstance(part, tuple)
            assert [h.shape for h in part] == [(2, 2, 4), (2, 2, 6), (2, 2, 5)]
        y_first, middle = layer(x[:3], lengths=[3, 3])
        assert y_first.shape == (3, 2, 10)
        one_way = build(3, [4, 6])
        y_whole, whole = one_way(x)
        _, middle = one_way(x[:3])
        y_rest, rest = one_way(x[3:], middle)
        assert_close(y_rest, y_whole[3:])
        assert_close(tensors(rest), tensors(whole))

    def test_equal_widths_are_one_tensor(self, build):
        listed, counted = build(3, [4, 4]), build(3, 4, 2)
        counted.load_state_dict(listed.state_dict())
        x = torch.randn(5, 2, 3)
        assert_close(tensors(listed(x)), tensors(counted(x)))
        assert shapes(listed(x)) == shapes(counted(x))

    def test_same_as_stacked_layers(self, build):
        stack, x = build(3, [4, 6]), torch.randn(5, 2, 3)
        first, second = build(3, 4), build(4, 6)
        for number, layer in enumerate((first, second)):
            suffix = f"_l{number}"
            layer.load_state_dict(
                {k.replace(suffix, "_l0"): v for k, v in stack.state_dict().items() if k.endswith(suffix)}
            )
        assert_close(stack(x)[0], second(first(x)[0])[0])

    def test_packed_and_unbatched(self, build):
        layer = build(3, [4, 6])
        sequences = [torch.randn(2, 3), torch.randn(4, 3)]
        hx = random_state(layer, torch.zeros(1, 2, 3))
        _, h_n = layer(pack_sequence(sequences, enforce_sorted=False), hx)
        for b, sequence in enumerate(sequences):
            _, alone = layer(sequence, like(hx, lambda h: h[:, b]))
            assert_close([h[:, b] for h in tensors(h_n)], tensors(alone))


class TestModule:
    def test_state_dict_round_trip(self, build):
        a, b = build(3, 4, 2, bidirectional=True), build(3, 4, 2, bidirectional=True)
        x = torch.randn(5, 2, 3)
        assert not torch.allclose(a(x)[0], b(x)[0])
        buffer = io.BytesIO()
        torch.save(a.state_dict(), buffer)
        buffer.seek(0)
        b.load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(a(x)[0], b(x)[0])

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
    def test_copies_compute_the_same_and_share_nothing(self, build, copied):
        layer, x = build(3, 4, 2), torch.randn(5, 2, 3)
        twin, expected = copied(layer), layer(x)[0]
        assert repr(twin) == repr(layer)
        assert torch.equal(twin(x)[0], expected)
        randomise(twin)
        assert torch.equal(layer(x)[0], expected)

    def test_to_another_dtype(self, build):
        layer, x = build(3, 4, 2), torch.randn(5, 2, 3)
        expected = layer(x)[0]
        y, h_n = layer.to(torch.float64)(x.double())
        assert {t.dtype for t in tensors((y, h_n))} == {torch.float64}
        assert_close(y, expected, torch.float32)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_every_dtype_forward_and_backward(self, name, build, dtype):
        exact, layer = build(3, 4, 2, dtype=torch.float64), build(3, 4, 2, dtype=dtype)
        layer.load_state_dict(exact.state_dict())
        exact.load_state_dict(layer.state_dict())  # the same rounded weights in both
        x = torch.randn(5, 2, 3).to(dtype)
        y, h_n = layer(x)
        assert shapes((y, h_n)) == shapes(PEERS[name](3, 4, 2)(x.float()))
        assert {t.dtype for t in tensors((y, h_n))} == {dtype}
        assert_close(y, exact(x.double())[0], dtype)
        y.sum().backward()
        exact(x.double())[0].sum().backward()
        scale = {torch.bfloat16: 8, torch.float16: 8}.get(dtype, 1)  # gradients are sums over steps and sequences
        for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
            assert_close(ours.grad / scale, theirs.grad / scale, dtype)

    def test_autocast(self, build):
        layer, x = build(3, 4, 2), torch.randn(5, 2, 3, requires_grad=True)
        hx = random_state(layer, x)
        expected = layer(x, hx)[0]
        with torch.autocast("cpu", torch.bfloat16):
            y, h_n = layer(x, hx)
            again, _ = layer(x, h_n)  # its own state comes back in the lower precision
            mixed, _ = layer(x.bfloat16(), hx)
        assert {t.dtype for t in tensors((y, h_n, again, mixed))} == {torch.bfloat16}
        assert_close(y, expected, torch.bfloat16)
        y.float().sum().backward()
        assert {t.grad.dtype for t in (x, *layer.parameters())} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            assert layer.double()(x.double())[0].dtype == torch.float64

    def test_a_state_that_nobody_gave_is_not_converted_under_autocast(self, build):
        class Converted(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is torch.ops.aten._to_copy.default:
                    shapes.append(tuple(args[0].shape))
                return function(*args, **(kwargs or {}))

        shapes, layer, x = [], build(3, 4, 2), torch.randn(5, 23, 3)
        with Converted(), torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert (5, 23, 3) in shapes
        assert (23, 4) not in shapes

    @pytest.mark.parametrize("autocast", [False, True])
    def test_a_state_that_nobody_gave_is_zeros(self, build, autocast):
        layer, x = build(3, 4, 2, bidirectional=True), torch.randn(9, 5, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, final = layer(x)
            same, same_final = layer(x, like(final, lambda h: torch.zeros(h.shape)))
        assert y.dtype == same.dtype
        assert all(map(torch.equal, [y, *tensors(final)], [same, *tensors(same_final)]))

    def test_an_observer_sees_zeros_where_no_state_was_given(self, build):
        seen, layer = [], build(3, 4, 2)

        def observer(layer, direction, run, x, state, sequences):
            seen.extend(state)
            return run(x, state, sequences)

        with layer.observed(observer):
            layer(torch.randn(9, 5, 3))
        assert seen
        assert all(state.data_ptr() and not state.any() for state in seen)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_state_that_autocast_left_goes_on_outside(self, build, dtype):
        layer, x = build(3, 4, 2), torch.randn(5, 2, 3)
        with torch.autocast("cpu", dtype):
            _, hx = layer(x)
        assert {h.dtype for h in tensors(hx)} == {dtype}
        y, h_n = layer(x, hx)
        exact, exact_n = layer(x, like(hx, torch.Tensor.float))  # nothing is lost on the way
        assert torch.equal(y, exact)
        assert all(map(torch.equal, tensors(h_n), tensors(exact_n)))
        y.sum().backward()
        assert layer.weight_hh_l0.grad.isfinite().all()

    def test_meta_device_tells_shapes_and_can_be_filled(self, name, build):
        layer = build(3, 4, 2, bidirectional=True, device="meta")
        x = torch.randn(5, 2, 3)
        y, h_n = layer(x.to("meta"), lengths=torch.tensor([5, 3]))
        assert y.is_meta
        assert shapes((y, h_n)) == shapes(PEERS[name](3, 4, 2, bidirectional=True)(x))
        real = layer.to_empty(device="cpu")
        real.reset_parameters()
        assert real(x)[0].isfinite().all()

    def test_tied_weights_stay_tied(self, build):
        layer = build(4, 4, 2)
        layer.weight_hh_l1 = layer.weight_hh_l0
        x = torch.randn(5, 2, 4)
        before = layer(x)[0]
        with torch.no_grad():
            layer.weight_hh_l0.mul_(0.5)
        assert layer.weight_hh_l1 is layer.weight_hh_l0
        assert not torch.allclose(layer(x)[0], before)
        untied = build(4, 4, 2)
        untied.load_state_dict(layer.state_dict())
        (tied_grad,) = torch.autograd.grad(layer(x)[0].sum(), layer.weight_hh_l0)
        parts = torch.autograd.grad(untied(x)[0].sum(), (untied.weight_hh_l0, untied.weight_hh_l1))
        assert_close(tied_grad, sum(parts))

    def test_functional_call_uses_the_weights_given(self, build):
        layer, other, x = build(3, 4, 2), build(3, 4, 2), torch.randn(5, 2, 3)
        y, _ = torch.func.functional_call(layer, other.state_dict(), (x,))
        assert_close(y, other(x)[0])

    def test_frozen_weights_and_no_grad(self, build):
        layer, x = build(3, 4, 2).requires_grad_(False), torch.randn(5, 2, 3)
        assert not layer(x)[0].requires_grad
        layer.weight_hh_l1.requires_grad_(True)
        layer(x)[0].sum().backward()
        assert [p.grad is not None for p in layer.parameters()] == [p is layer.weight_hh_l1 for p in layer.parameters()]
        with torch.no_grad():
            assert not layer(x)[0].requires_grad

    def test_reset_parameters_starts_again(self, name):
        torch.manual_seed(3)
        layer = LAYERS[name](3, 4, 2, bidirectional=True, **OWN.get(name, {}))
        before = copy.deepcopy(layer.state_dict())
        randomise(layer)
        torch.manual_seed(3)
        layer.reset_parameters()
        assert_close(dict(layer.state_dict()), dict(before))


@pytest.fixture(params=CELLS)
def cell_name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestCell:
    def test_positional_order(self, cell_name):
        parameters = inspect.signature(CELLS[cell_name]).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        peer = inspect.signature(nn.GRUCell).parameters
        assert positional == list(peer)
        cell = CELLS[cell_name](3, 4, False, "meta", torch.float64)
        assert cell.bias is False
        assert {(p.device.type, p.dtype) for p in cell.parameters()} == {("meta", torch.float64)}
        assert not [key for key in cell.state_dict() if "bias" in key]

    @pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3)], ids=["unbatched", "batched", "empty"])
    def test_shapes_are_those_of_the_peer(self, cell_name, shape):
        cell, peer, x = CELLS[cell_name](3, 4), nn.GRUCell(3, 4), torch.randn(shape)
        assert cell(x).shape == peer(x).shape
        h = torch.randn(*shape[:-1], 4)
        assert cell(x, h).shape == cell(x, hx=h).shape == peer(x, h).shape

    def test_no_state_is_a_state_of_zeros(self, cell_name):
        cell, x = randomise(CELLS[cell_name](3, 4)), torch.randn(2, 3)
        assert torch.equal(cell(x), cell(x, torch.zeros(2, 4)))
        assert not torch.allclose(cell(x), cell(x, torch.ones(2, 4)))

    def test_copies_state_dict_and_dtypes(self, cell_name):
        cell, x = randomise(CELLS[cell_name](3, 4)), torch.randn(2, 3)
        twin = CELLS[cell_name](3, 4)
        twin.load_state_dict(cell.state_dict())
        for same in (twin, copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
            assert torch.equal(same(x), cell(x))
        expected = cell(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(cell(x), expected, torch.bfloat16)
        half = torch.randn(2, 4, dtype=torch.bfloat16)  # as a layer under autocast leaves it
        assert torch.equal(cell(x, half), cell(x, half.float()))
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            h = cell.to(dtype)(x.to(dtype))
            assert h.dtype == dtype
            assert_close(h.float(), expected, torch.float32 if dtype is torch.float64 else dtype)
