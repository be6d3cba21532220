"""A DMU inside ``nn.Sequential``: which symbol came first, forty steps ago?

    python examples/sequential.py

A layer returns ``(output, h_n)``, as ``nn.GRU`` does; one small module picks the final state for the next layer.
"""

import argparse

import torch
from torch import Tensor, nn

import deepmemory as dm

SYMBOLS, LENGTH = 4, 40


class FinalState(nn.Module):
    """Picks the last layer's final state out of ``(output, h_n)``."""

    def forward(self, result: tuple[Tensor, Tensor]) -> Tensor:
        """The final state, (B, d)."""
        return result[1][-1]


def draw(batch: int) -> tuple[Tensor, Tensor]:
    """Sequences of symbols (B, T), and the first of each."""
    words = torch.randint(SYMBOLS, (batch, LENGTH))
    return words, words[:, 0]


def main(steps: int = 200) -> float:
    """Train; returns the share of right answers on new sequences."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, 8),
        dm.DMU(8, 16, batch_first=True, memory_bias=3.0),
        FinalState(),
        nn.Linear(16, SYMBOLS),
    )
    optimiser = torch.optim.Adam(dm.parameter_groups(model, lr=0.02))
    for _ in range(steps):
        words, first = draw(64)
        loss = nn.functional.cross_entropy(model(words), first)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    words, first = draw(1000)
    with torch.no_grad():
        return (model(words).argmax(-1) == first).float().mean().item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200, help="optimiser steps")
    print(f"right answers: {main(options.parse_args().steps):.1%} (chance: {1 / SYMBOLS:.0%})")
