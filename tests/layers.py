"""The five layers, their peers in torch, and what tests do with all of them alike."""

import torch
from torch import Tensor, nn

import deepmemory as dm

LAYERS = {"DMU": dm.DMU, "RHN": dm.RHN, "RNN": dm.RNN, "GRU": dm.GRU, "LSTM": dm.LSTM}
PEERS = {"DMU": nn.GRU, "RHN": nn.GRU, "RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
CELLS = {"DMUCell": dm.DMUCell, "RHNCell": dm.RHNCell}
# Options that only one layer has, and that change what it computes.
OWN = {"DMU": {"transition": [7, 6], "activation": "tanh"}, "RHN": {"depth": 3}}


def tensors(state) -> list[Tensor]:
    """The tensors of a state: h, or h and c, or one of these per layer."""
    if state is None:
        return []
    return [state] if isinstance(state, Tensor) else [t for part in state for t in tensors(part)]


def like(state, make):
    """A state of the same structure with every tensor put through ``make``."""
    return make(state) if isinstance(state, Tensor) else tuple(like(part, make) for part in state)


def random_state(layer: nn.Module, x, **options):
    """A state for this input that is nowhere zero."""
    with torch.no_grad():
        _, h_n = layer(x, **options)
    return like(h_n, lambda h: torch.rand_like(h) * 1.8 - 0.9)


def results(layer: nn.Module, x: Tensor, hx=None, **options) -> dict[str, list[Tensor]]:
    """Output, final state and all gradients of a loss that weighs each entry differently."""
    x = x.detach().clone().requires_grad_()
    hx = None if hx is None else like(hx, lambda h: h.detach().clone().requires_grad_())
    y, h_n = layer(x, hx, **options)
    outputs = [y, *tensors(h_n)]
    loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs)
    inputs = [x, *tensors(hx), *layer.parameters()]
    grads = torch.autograd.grad(loss, inputs)
    names = ["x", *(f"hx{i}" for i in range(len(tensors(hx)))), *(name for name, _ in layer.named_parameters())]
    return {
        "outputs": [o.detach() for o in outputs],
        "gradients": dict(zip(names, grads, strict=True)),
    }


def randomise(module: nn.Module) -> nn.Module:
    """Weights without a zero, so that a forgotten bias shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.6, 0.6)
    return module
