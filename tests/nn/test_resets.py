"""Resets: a batch in which sequences follow one another gives what each of them gives alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import LAYERS, OWN, like, random_state, randomise, results, tensors
from tolerances import assert_close
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.rnn import pack_sequence

import deepmemory as dm
from deepmemory import export, ops

DTYPES = {"plain": torch.float64, "auto": torch.float32}  # the definition exactly, and what users run
every_layer = pytest.mark.parametrize("name", LAYERS)
every_engine = pytest.mark.parametrize("engine", DTYPES)  # hypothesis wants no function-scoped fixture


def build(name: str, engine: str = "plain", *sizes: int, **options) -> nn.Module:
    options = {"dtype": DTYPES[engine], **OWN.get(name, {}), **options}
    return randomise(LAYERS[name](*(sizes or (3, 5)), engine=engine, **options))


class OneByOne(nn.Module):
    """A layer that gets every sequence alone; ``resets`` (T, B) tell where one begins."""

    def __init__(self, layer: nn.Module, lengths: list[int], resets: torch.Tensor):
        super().__init__()
        self.layer, self.lengths, self.resets = layer, lengths, resets

    def named_parameters(self, *args, **kwargs):
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, x, hx):
        directions = self.layer._directions
        y = x.new_zeros(*x.shape[:2], 5 * directions) + 0 * sum(t.sum() for t in (x, *self.layer.parameters()))
        final = [h.clone() for h in tensors(hx)]
        for b, length in enumerate(self.lengths):
            begins = [0, *(t for t in range(1, length) if self.resets[t, b])] if length else []
            for begin, end in itertools.pairwise([*begins, length]):
                first, last = begin == 0, end == length
                start = like(hx, lambda h: torch.zeros_like(h[:, [b]]))
                for mine, whole in zip(tensors(start), tensors(hx), strict=True):
                    if first and not self.resets[0, b]:
                        mine[::directions] = whole[::directions, [b]]
                    if last and directions == 2:
                        mine[1::2] = whole[1::2, [b]]
                part, state = self.layer(x[begin:end, [b]], start)
                y[begin:end, [b]] = part
                for whole, mine in zip(final, tensors(state), strict=True):
                    if last:
                        whole[::directions, b] = mine[::directions, 0]
                    if first and directions == 2:
                        whole[1::2, b] = mine[1::2, 0]
        return y, final


@every_layer
@every_engine
@given(
    steps=st.integers(1, 8),
    batch=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    options=st.fixed_dictionaries(
        {"num_layers": st.integers(1, 2), "bidirectional": st.booleans(), "recompute": st.booleans()}
    ),
    data=st.data(),
)
def test_a_batch_with_resets_equals_the_split_sequences(name, engine, steps, batch, seed, options, data):
    torch.manual_seed(seed)
    layer = build(name, engine, **options)
    lengths = data.draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    resets = torch.rand(steps, batch) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    x = torch.randn(steps, batch, 3, dtype=DTYPES[engine])
    hx = random_state(layer, x)
    together = results(layer, x, hx, lengths=lengths, resets=resets)
    assert_close(together, results(OneByOne(layer, lengths, resets), x, hx))
    full = results(layer, x, hx, resets=resets)
    assert_close(full, results(OneByOne(layer, [steps] * batch, resets), x, hx))


class TestWhere:
    """By hand, at single steps: a reset one step late or early shows."""

    @every_layer
    def test_forwards_the_state_is_zero_before_the_step(self, name, engine):
        layer, x = build(name, engine), torch.randn(5, 1, 3, dtype=DTYPES[engine])
        hx = random_state(layer, x)
        resets = torch.zeros(5, 1, dtype=torch.bool)
        resets[2] = True
        y, h_n = layer(x, hx, resets=resets)
        assert_close(y[:2], layer(x[:2], hx)[0])
        y_rest, h_rest = layer(x[2:])
        assert_close(y[2:], y_rest)
        assert_close(tensors(h_n), tensors(h_rest))
        resets = torch.zeros(5, 1, dtype=torch.bool)
        resets[0] = True  # the caller's state goes
        assert_close(layer(x, hx, resets=resets)[0], layer(x)[0])

    @every_layer
    def test_backwards_the_cut_is_at_the_same_place(self, name, engine):
        layer, x = build(name, engine, bidirectional=True), torch.randn(5, 1, 3, dtype=DTYPES[engine])
        hx = random_state(layer, x)
        resets = torch.zeros(5, 1, dtype=torch.bool)
        resets[2] = True
        y, _ = layer(x, hx, resets=resets)
        assert_close(y[2:, :, 5:], layer(x[2:], hx)[0][..., 5:])
        assert_close(y[:2, :, 5:], layer(x[:2])[0][..., 5:])
        resets = torch.zeros(5, 1, dtype=torch.bool)
        resets[0] = True  # read backwards nothing lies before the first step
        assert_close(layer(x, hx, resets=resets)[0][..., 5:], layer(x, hx)[0][..., 5:])

    @every_layer
    def test_no_gradient_passes(self, name, engine):
        layer, x = build(name, engine, bidirectional=True), torch.randn(5, 2, 3, dtype=DTYPES[engine])
        x.requires_grad_()
        resets = torch.zeros(5, 2, dtype=torch.bool)
        resets[3, 0] = True
        y, _ = layer(x, resets=resets)
        (later,) = torch.autograd.grad(y[3:].sum(), x, retain_graph=True)
        (earlier,) = torch.autograd.grad(y[:3].sum(), x)
        assert not later[:3, 0].any()
        assert not earlier[3:, 0].any()
        assert later[:3, 1].all(-1).all()
        assert earlier[3:, 1].all(-1).all()

    def test_what_is_reset_may_be_nan(self, engine):
        """A state that went wrong does not reach the sequence after it, nor do its gradients."""
        layer, x = build("GRU", engine), torch.randn(4, 2, 3, dtype=DTYPES[engine])
        x[1, 0] = float("nan")
        resets = torch.zeros(4, 2, dtype=torch.bool)
        resets[2, 0] = True
        x.requires_grad_()
        y, _ = layer(x, resets=resets)
        assert_close(y[2:, 0], layer(x[2:, 0])[0])
        (grad,) = torch.autograd.grad(y[2:].sum(), x)
        assert grad[2:].isfinite().all()

    def test_values_in_the_padding_do_not_matter(self, engine):
        layer, x = build("LSTM", engine, bidirectional=True), torch.randn(6, 3, 3, dtype=DTYPES[engine])
        lengths, resets = torch.tensor([6, 0, 3]), torch.rand(6, 3) < 0.4
        padding = torch.arange(6)[:, None] >= lengths
        runs = [results(layer, x, lengths=lengths, resets=resets.masked_fill(padding, value)) for value in (0, 1)]
        assert_close(*runs)

    def test_the_tensor_may_be_changed_before_the_backward_pass(self, engine):
        layer, x = build("DMU", engine), torch.randn(5, 2, 3, dtype=DTYPES[engine])
        resets = torch.rand(5, 2) < 0.5
        expected = results(layer, x, resets=resets.clone())
        y, h_n = layer(x, resets=resets)
        resets.fill_(False)
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in (y, h_n))
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        assert_close(list(grads), [expected["gradients"][key] for key, _ in layer.named_parameters()])


class TestLayouts:
    def test_batch_first_and_one_sequence(self, engine):
        layer, x = build("GRU", engine), torch.randn(6, 4, 3, dtype=DTYPES[engine])
        resets = torch.rand(6, 4) < 0.3
        y, h_n = layer(x, resets=resets)
        first = build("GRU", engine, batch_first=True)
        first.load_state_dict(layer.state_dict())
        y_first, h_first = first(x.transpose(0, 1), resets=resets.T)
        assert_close(y_first.transpose(0, 1), y)
        assert_close(h_first, h_n)
        for each in (layer, first):
            y_one, h_one = each(x[:, 1], resets=resets[:, 1])
            assert_close(y_one, y[:, 1])
            assert_close(h_one, h_n[:, 1])

    def test_layers_of_different_widths(self, engine):
        layer, x = build("DMU", engine, 3, [5, 4], bidirectional=True), torch.randn(6, 2, 3, dtype=DTYPES[engine])
        resets = torch.zeros(6, 2, dtype=torch.bool)
        resets[4] = True
        y, h_n = layer(x, resets=resets)
        first, rest = layer(x[:4]), layer(x[4:])
        assert_close(y, torch.cat([first[0], rest[0]]))
        for whole, early, late in zip(h_n, first[1], rest[1], strict=True):
            assert_close(whole, torch.stack([late[0], early[1]]))

    def test_projected_states(self):
        layer, x = build("LSTM", proj_size=2), torch.randn(6, 2, 3, dtype=torch.float64)
        resets = torch.zeros(6, 2, dtype=torch.bool)
        resets[4] = True
        assert_close(layer(x, resets=resets)[0], torch.cat([layer(x[:4])[0], layer(x[4:])[0]]))

    def test_a_transition_given_as_a_module(self):
        module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10)).double()
        layer, x = dm.DMU(3, 5, transition=module), torch.randn(6, 2, 3, dtype=torch.float64)
        resets = torch.zeros(6, 2, dtype=torch.bool)
        resets[4] = True
        assert_close(layer(x, resets=resets)[0], torch.cat([layer(x[:4])[0], layer(x[4:])[0]]))


@pytest.mark.parametrize("name", ["DMU", "LSTM"])
class TestTransforms:
    def test_runs_side_by_side(self, name, engine):
        layers = [build(name, engine, bidirectional=True) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x, resets = torch.randn(3, 6, 4, 3, dtype=DTYPES[engine]), torch.rand(3, 6, 4) < 0.4
        lengths = torch.randint(0, 7, (3, 4))

        def run(weights, x, resets, lengths):
            return tuple(tensors(functional_call(layers[0], weights, (x,), {"lengths": lengths, "resets": resets})))

        together = vmap(run)(weights, x, resets, lengths)
        alone = [tensors(layer(x[r], resets=resets[r], lengths=lengths[r])) for r, layer in enumerate(layers)]
        assert_close(list(together), [torch.stack(parts) for parts in zip(*alone, strict=True)])
        shared = vmap(run, (0, 0, None, None))(weights, x, resets[0], lengths[0])
        alone = [tensors(layer(x[r], resets=resets[0], lengths=lengths[0])) for r, layer in enumerate(layers)]
        assert_close(list(shared), [torch.stack(parts) for parts in zip(*alone, strict=True)])

    def test_compiled_in_one_graph(self, name, engine):
        torch.compiler.reset()
        layer = build(name, engine, bidirectional=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x, resets = torch.randn(4, 3, 3, dtype=DTYPES[engine]), torch.rand(4, 3) < 0.4
        lengths = torch.tensor([4, 2, 3])
        ours, theirs = (tensors(run(x, resets=resets, lengths=lengths)) for run in (compiled, layer))
        assert_close(ours, theirs)
        leaves = list(layer.parameters())
        assert_close(*(torch.autograd.grad(sum(t.sin().sum() for t in out), leaves) for out in (ours, theirs)))

    @pytest.mark.filterwarnings("ignore:.*is deprecated")
    def test_exported(self, name):
        layer = build(name, dtype=torch.float32, bidirectional=True)
        given = {"input": torch.randn(4, 2, 3), "resets": torch.rand(4, 2) < 0.4}
        sizes = {"input": {0: "time", 1: "batch"}, "resets": {0: "time", 1: "batch"}}
        exported = export.program(layer, given, sizes).module()
        given = {"input": torch.randn(9, 5, 3), "resets": torch.rand(9, 5) < 0.4}
        assert_close(tensors(exported(**given)), [t.detach() for t in tensors(layer(**given))])

    @pytest.mark.filterwarnings("ignore:.*is deprecated")
    def test_in_onnx_runtime(self, name, tmp_path):
        ort = pytest.importorskip("onnxruntime")
        layer = build(name, dtype=torch.float32)
        given = {"input": torch.randn(4, 2, 3), "lengths": torch.tensor([4, 2]), "resets": torch.rand(4, 2) < 0.4}
        sizes = {"input": {0: "time", 1: "batch"}, "lengths": {0: "batch"}, "resets": {0: "time", 1: "batch"}}
        export.save(layer, given, tmp_path / "m.onnx", sizes=sizes)
        given = {
            "input": torch.randn(9, 5, 3),
            "lengths": torch.randint(1, 10, (5,)),
            "resets": torch.rand(9, 5) < 0.4,
        }
        found = ort.InferenceSession(tmp_path / "m.onnx").run(None, {key: t.numpy() for key, t in given.items()})
        assert_close([torch.from_numpy(f) for f in found], [t.detach() for t in tensors(layer(**given))])

    def test_half_the_bits(self, name):
        layer, x, resets = build(name, "auto"), torch.randn(6, 4, 3), torch.rand(6, 4) < 0.4
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x, resets=resets)
            parts = layer(x, resets=torch.zeros_like(resets))[0]
        assert y.dtype is torch.bfloat16
        assert not torch.equal(y, parts)
        assert_close(y.float(), layer(x, resets=resets)[0], dtype=torch.bfloat16)

    def test_second_derivatives(self, name, engine):
        layer = build(name, engine, bidirectional=True)
        other = build(name, "plain", bidirectional=True, dtype=DTYPES[engine])
        other.load_state_dict(layer.state_dict())
        x, resets = torch.randn(4, 2, 3, dtype=DTYPES[engine]), torch.rand(4, 2) < 0.4
        found = []
        for each in (layer, other):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(each(leaf, resets=resets)[0].sin().sum(), leaf, create_graph=True)
            found.append([first, *torch.autograd.grad(first.sin().sum(), [leaf, *each.parameters()])])
        assert_close(*found)


X = torch.zeros(5, 2, 3)
MISTAKES = {
    "a list": ([[False] * 2] * 5, TypeError, "resets should be a tensor of bools, got list"),
    "integers": (torch.zeros(5, 2, dtype=torch.int64), TypeError, "tensor of bools, got torch.int64"),
    "another length": (
        torch.zeros(4, 2, dtype=torch.bool),
        ValueError,
        r"\(time, batch\) = \(5, 2\), got \(4, 2\)",
    ),
    "batch first": (torch.zeros(2, 5, dtype=torch.bool), ValueError, r"= \(5, 2\), got \(2, 5\)"),
    "one dimension": (torch.zeros(5, dtype=torch.bool), ValueError, r"= \(5, 2\), got \(5,\)"),
}


class TestErrors:
    @every_layer
    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_a_mistake(self, name, mistake):
        resets, kind, message = MISTAKES[mistake]
        with pytest.raises(kind, match=f"^{name}: .*{message}"):
            LAYERS[name](3, 4)(X, resets=resets)

    def test_other_layouts(self):
        with pytest.raises(ValueError, match=r"\(batch, time\) = \(5, 2\), got \(2, 5\)"):
            dm.GRU(3, 4, batch_first=True)(X, resets=torch.zeros(2, 5, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"\(time,\) = \(5,\), got \(5, 1\)"):
            dm.GRU(3, 4)(X[:, 0], resets=torch.zeros(5, 1, dtype=torch.bool))

    @every_layer
    def test_packed_input(self, name):
        packed = pack_sequence([X[:, 0], X[:3, 0]])
        with pytest.raises(ValueError, match=f"^{name}: resets= needs a padded batch with lengths="):
            LAYERS[name](3, 4)(packed, resets=torch.zeros(5, 2, dtype=torch.bool))


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_where_a_sweep_zeroes_the_state(reverse):
    resets = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1]], dtype=torch.bool).T  # two sequences
    found = ops.resets_of_sweep(resets, torch.tensor([6, 4]), reverse).T.long().tolist()
    forwards = [[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    backwards = [[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert found == (backwards if reverse else forwards)
