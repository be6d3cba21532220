"""bfloat16 and float16: what engines do with them, and weights of another precision than the input's."""

import pytest
import torch
from layers import LAYERS, OWN
from tolerances import TOLERANCES

import deepmemory as dm
from deepmemory.ops import Recurrence, cpu, engines

HALF = (torch.bfloat16, torch.float16)
needs_cpu_engine = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"no CPU engine: {cpu.unavailable()}")


def run(layer, x, **options):
    """Output, final states and all gradients of a loss that weighs entries differently."""
    x = x.clone().requires_grad_()
    y, h_n = layer(x, **options)
    outputs = [y, *(h_n if isinstance(h_n, tuple) else (h_n,))]
    loss = sum((o.double() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outputs)
    return [t.detach() for t in outputs] + list(torch.autograd.grad(loss, [x, *layer.parameters()]))


@needs_cpu_engine
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_cpu_engine_takes_half_precision(name, dtype, recompute):
    torch.manual_seed(0)
    layer = LAYERS[name](6, 21, engine="cpu", recompute=recompute, dtype=dtype, **OWN.get(name, {}))
    law = LAYERS[name](6, 21, engine="plain", dtype=torch.float64, **OWN.get(name, {}))
    law.load_state_dict(layer.state_dict())
    x, lengths = torch.randn(9, 5, 6).to(dtype), torch.tensor([9, 0, 3, 8, 1])
    given, expected = run(layer, x, lengths=lengths), run(law, x.double(), lengths=lengths)
    rtol, atol = TOLERANCES[dtype]
    for a, b in zip(given, expected, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()))


@needs_cpu_engine
def test_half_precision_compiles_and_has_many_runs():
    torch.manual_seed(0)
    layers = [dm.DMU(3, 5, engine="cpu", dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(3, 4, 2, 3, dtype=torch.bfloat16)
    weights, _ = torch.func.stack_module_state(layers)
    together = torch.vmap(lambda w, x: torch.func.functional_call(layers[0], w, (x,))[0])(weights, x)
    for layer, one, y in zip(layers, x, together, strict=True):
        assert torch.equal(layer(one)[0], y)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(run(compiled, one), run(layer, one), strict=True))


@needs_cpu_engine
def test_autocast_stays_on_the_cpu_engine():
    layer = dm.GRU(3, 5, engine="cpu")  # which raises where it cannot
    with torch.autocast("cpu", torch.bfloat16):
        y, h_n = layer(torch.randn(4, 2, 3))
    assert y.dtype is h_n.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in layer.parameters())


@pytest.mark.parametrize(("engine", "mixes"), [("auto", True), ("nvrtc", True), ("cpu", False), ("plain", False)])
def test_weights_of_another_precision_go_as_they_are_to_an_engine_that_takes_them(engine, mixes, monkeypatch):
    monkeypatch.setattr(engines, "unavailable", lambda name: None if name == "nvrtc" else "not here")
    monkeypatch.setattr(engines.FUSED["nvrtc"], "refuses", lambda *case: None)
    x, weights = torch.empty(4, 2, 3, dtype=torch.bfloat16), [torch.empty(5, 3), torch.empty(5, 5)]
    rec = Recurrence("rnn", bias=False)
    assert engines.reads_as_they_are(engine, rec, x, weights) is mixes
    assert not engines.reads_as_they_are(engine, rec, x.float(), weights)
