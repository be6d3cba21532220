"""The network of the synthetic tasks: a recurrent block and one linear layer on its last state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deepmemory as dm
from deepmemory.lab import draws
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import Task


class Network(nn.Module):
    """Answers once per sequence, from the state after its last real step."""

    def __init__(self, setting: Setting, task: Task, engine: str = "auto") -> None:
        super().__init__()
        self.recurrent = recurrent_block(setting, task.input_size, engine)
        self.output = nn.Linear(setting.hidden[-1], task.output_size)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x (B, T, features) to (B, output_size)."""
        _, state = self.recurrent(x, lengths=lengths)
        h = state[0] if isinstance(self.recurrent, dm.LSTM) else state
        return self.output(h[-1].flatten(0, -2))  # the last layer's; layers of different widths come as a tuple


def recurrent_block(setting: Setting, input_size: int, engine: str = "auto") -> nn.Module:
    """The cell of a setting with its initial weights."""
    size, layers = (setting.hidden[0], 1) if len(setting.hidden) == 1 else (list(setting.hidden), len(setting.hidden))
    if setting.cell == "dmu":
        return dm.DMU(
            input_size,
            size,
            layers,
            batch_first=True,
            transition=setting.transition,
            activation=setting.activation,
            memory_bias=setting.memory_bias,
            engine=engine,
        )
    if setting.cell == "rhn":
        return dm.RHN(input_size, size, layers, batch_first=True, depth=setting.depth, engine=engine)
    if setting.cell == "lstm":
        lstm = dm.LSTM(input_size, size, layers, batch_first=True, engine=engine)
        set_forget_bias(lstm, setting.forget_bias)
        return lstm
    classic = dm.GRU if setting.cell == "gru" else dm.RNN
    return classic(input_size, size, layers, batch_first=True, engine=engine)


@torch.no_grad()
def set_forget_bias(lstm: dm.LSTM, value: float) -> None:
    """Set the forget gate's part, the second of four, of both bias vectors of every layer."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            parameter.chunk(4)[1].fill_(value)


def initial_weights(setting: Setting, task: Task, seeds: list[int]) -> dict[str, Tensor]:
    """Each run's own initial weights, stacked: (R, ...) on the CPU, the same whatever other runs there are."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(int(draws.derive(torch.tensor(seed), draws.WEIGHTS)) & (2**63 - 1))
            drawn.append(dict(Network(setting, task).named_parameters()))
    return {name: torch.stack([weights[name].detach() for weights in drawn]) for name in drawn[0]}


def weight_count(setting: Setting, task: Task, output_layer: bool = True) -> int:
    """Trained weights of the network, with or without its output layer."""
    network = Network(setting, task)
    counted = network if output_layer else network.recurrent
    return sum(parameter.numel() for parameter in counted.parameters())
