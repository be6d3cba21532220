"""The plain engine is the definition: it must work under every transform and to any order of derivative."""

import pytest
import torch
from layers import LAYERS, OWN, like, random_state, randomise, tensors
from tolerances import assert_close
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from deepmemory import ops
from deepmemory.ops import plain

SMALL = {"DMU": {"transition": [3], "activation": "tanh"}, "RHN": {"depth": 2}}


@pytest.fixture(params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def build(name: str, *sizes, **options) -> torch.nn.Module:
    options = {**OWN.get(name, {}), **options}
    return randomise(LAYERS[name](*sizes, engine="plain", dtype=torch.float64, **options))


def loss(layer, weights, x, hx=None, **options):
    return sum(t.square().sum() for t in tensors(functional_call(layer, weights, (x, hx), options)))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "both-ways"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
class TestDerivatives:
    def case(self, name, bidirectional, padded):
        layer = build(name, 2, 2, bidirectional=bidirectional, **SMALL.get(name, {}))
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        hx = like(random_state(layer, x), lambda h: h.requires_grad_())
        lengths = torch.tensor([3, 1]) if padded else None
        names = [key for key, _ in layer.named_parameters()]
        structure = isinstance(hx, tuple)

        def run(x, *rest):
            state, weights = rest[: len(tensors(hx))], rest[len(tensors(hx)) :]
            state = tuple(state) if structure else state[0]
            out = functional_call(layer, dict(zip(names, weights, strict=True)), (x, state), {"lengths": lengths})
            return tuple(tensors(out))

        return run, (x, *tensors(hx), *(p.detach().requires_grad_() for p in layer.parameters()))

    def test_first(self, name, bidirectional, padded):
        run, inputs = self.case(name, bidirectional, padded)
        assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)

    def test_second(self, name, bidirectional, padded):
        run, inputs = self.case(name, bidirectional, padded)
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


class TestTransforms:
    def test_vmap_over_stacked_weights(self, name):
        layers = [build(name, 3, 4, 2, bidirectional=True) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x = torch.randn(3, 5, 2, 3, dtype=torch.float64)
        hx = [random_state(layer, x[0]) for layer in layers]
        stacked_hx = torch.stack(hx) if name != "LSTM" else tuple(torch.stack(part) for part in zip(*hx, strict=True))
        lengths = torch.tensor([[5, 2], [0, 4], [3, 3]])

        def run(weights, x, hx, lengths):
            return functional_call(layers[0], weights, (x, hx), {"lengths": lengths})

        out = vmap(run)(weights, x, stacked_hx, lengths)
        for r, layer in enumerate(layers):
            expected = layer(x[r], hx[r], lengths=lengths[r])
            assert_close([t[r] for t in tensors(out)], tensors(expected))
        sum(t.square().sum() for t in tensors(out)).backward()
        for r, layer in enumerate(layers):
            layer.zero_grad()
            sum(t.square().sum() for t in tensors(layer(x[r], hx[r], lengths=lengths[r]))).backward()
            for key, parameter in layer.named_parameters():
                assert_close(weights[key].grad[r], parameter.grad)

    def test_one_batch_for_all_runs(self, name):
        layers = [build(name, 3, 4) for _ in range(3)]
        weights, _ = stack_module_state(layers)
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        y = vmap(lambda w: functional_call(layers[0], w, (x,))[0])(weights)
        assert_close(y, torch.stack([layer(x)[0] for layer in layers]))

    def test_grad_and_gradients_per_sample(self, name):
        layer = build(name, 3, 4, 2)
        weights = dict(layer.named_parameters())
        x = torch.randn(5, 3, 3, dtype=torch.float64)
        whole = grad(lambda w: loss(layer, w, x))(weights)
        loss(layer, weights, x).backward()
        assert_close(whole, {key: p.grad for key, p in layer.named_parameters()})
        per_sample = vmap(grad(lambda w, x: loss(layer, w, x)), in_dims=(None, 1))(weights, x)
        for b in range(3):
            alone = grad(lambda w: loss(layer, w, x[:, b]))(weights)
            assert_close({key: g[b] for key, g in per_sample.items()}, alone)

    def test_vmap_of_grad_over_runs(self, name):
        layers = [build(name, 3, 4) for _ in range(2)]
        weights, _ = stack_module_state(layers)
        x = torch.randn(2, 5, 2, 3, dtype=torch.float64)
        stacked = vmap(grad(lambda w, x: loss(layers[0], w, x)))({k: w.detach() for k, w in weights.items()}, x)
        for r, layer in enumerate(layers):
            alone = grad(lambda w: loss(layer, w, x[r]))(dict(layer.named_parameters()))
            assert_close({key: g[r] for key, g in stacked.items()}, alone)

    def test_jvp_agrees_with_the_gradient(self, name):
        layer = build(name, 3, 4, 2)
        weights = {key: p.detach() for key, p in layer.named_parameters()}
        tangents = {key: torch.randn_like(w) for key, w in weights.items()}
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        _, directional = jvp(lambda w: loss(layer, w, x), (weights,), (tangents,))
        gradient = grad(lambda w: loss(layer, w, x))(weights)
        assert_close(directional, sum((gradient[key] * tangents[key]).sum() for key in weights))

    def test_hessian_vector_product(self, name):
        layer = build(name, 2, 3)
        x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(loss(layer, dict(layer.named_parameters()), x), x, create_graph=True)
        v = torch.randn_like(x)
        (second,) = torch.autograd.grad((first * v).sum(), x)
        step = 1e-5
        ahead, behind = (
            grad(lambda x: loss(layer, dict(layer.named_parameters()), x))(x.detach() + sign * step * v)
            for sign in (1, -1)
        )
        torch.testing.assert_close(second, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
    def test_compile_in_one_graph(self, name, padded):
        layer = build(name, 3, 4, bidirectional=True) if padded else build(name, 3, 4, num_layers=2)
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
        options = {"lengths": torch.tensor([3, 1])} if padded else {}
        hx = random_state(layer, x)
        ours, theirs = compiled(x, hx, **options), layer(x, hx, **options)
        assert_close(tensors(ours), tensors(theirs))
        leaves = [x, *layer.parameters()]
        grads = [torch.autograd.grad(sum(t.square().sum() for t in tensors(out)), leaves) for out in (ours, theirs)]
        assert_close(*grads)


class TestScan:
    """``ops.scan`` itself, below the modules."""

    def test_is_what_the_modules_run_on(self, name):
        layer = build(name, 3, 4)
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        state = tuple(h[0] for h in tensors(random_state(layer, x)))
        rec = layer.definition.recurrence(True)
        y, final = ops.scan(rec, x, state, layer.all_weights[0], engine="plain")
        expected, h_n = layer(x, state[0][None] if name != "LSTM" else tuple(s[None] for s in state))
        assert_close(y, expected)
        assert_close(list(final), [h[0] for h in tensors(h_n)])

    def test_reverse_reads_from_the_last_real_step(self, name):
        layer = build(name, 3, 4)
        rec = layer.definition.recurrence(True)
        x, lengths = torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([5, 3])
        state = tuple(h[0] for h in tensors(random_state(layer, x)))
        y, final = plain.scan(rec._replace(reverse=True), x, state, layer.all_weights[0], ops.Sequences(lengths))
        for b, length in enumerate([5, 3]):
            alone = tuple(s[b : b + 1] for s in state)
            flipped, last = plain.scan(rec, x[:length, b : b + 1].flip(0), alone, layer.all_weights[0])
            assert_close(y[:length, b : b + 1], flipped.flip(0))
            assert_close([f[b : b + 1] for f in final], list(last))

    def test_extreme_gates_have_finite_gradients(self, name):
        layer = build(name, 3, 4)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1e3)
        x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
        y, _ = layer(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
