"""A DMU in a Lightning module: the running mean of a noisy signal of any length.

    python examples/lightning_module.py

Trains with Lightning's Trainer if ``lightning`` is installed, and with Lightning Fabric otherwise.
"""

import argparse
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import deepmemory as dm

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
if TYPE_CHECKING or not HAS_LIGHTNING:
    Module = nn.Module
else:
    from lightning import LightningModule as Module


class Signals(Dataset[tuple[Tensor, Tensor]]):
    """Noise of 20 to 40 steps around a level, which is different for each sequence, and that level."""

    def __len__(self) -> int:
        return 5000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(20, 41, (), generator=generator))
        level = torch.randn((), generator=generator)
        return level + torch.randn(length, 1, generator=generator), level


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded signals, their lengths, their levels."""
    signals = [signal for signal, _ in items]
    lengths = torch.tensor([len(signal) for signal in signals])
    return pad_sequence(signals, batch_first=True), lengths, torch.stack([level for _, level in items])


class Level(Module):
    """One DMU and one linear layer; ``lengths`` keeps padding out of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = dm.DMU(1, 16, batch_first=True)
        self.output = nn.Linear(16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        """The mean squared error."""
        signals, lengths, levels = batch
        _, h = self.recurrent(signals, lengths=lengths)
        return nn.functional.mse_loss(self.output(h[-1]).squeeze(-1), levels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with the DMU at lr / 2n."""
        return torch.optim.Adam(dm.parameter_groups(self, lr=0.02))


def main(steps: int = 150) -> float:
    """Train; returns the mean squared error on new signals."""
    torch.manual_seed(0)
    model: Any = Level()
    loader = DataLoader(Signals(), batch_size=32, collate_fn=collate)
    if HAS_LIGHTNING:
        from lightning import Trainer

        trainer = Trainer(
            accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        trainer.fit(model, loader)
    else:
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        wrapped, optimiser = fabric.setup(model, model.configure_optimizers())
        wrapped.mark_forward_method("training_step")
        for _, batch in zip(range(steps), fabric.setup_dataloaders(loader), strict=False):
            optimiser.zero_grad()
            fabric.backward(wrapped.training_step(batch))
            optimiser.step()
    signals = Signals()
    with torch.no_grad():
        return float(
            model.training_step(collate([signals[index] for index in range(len(signals), len(signals) + 200)]))
        )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=150, help="optimiser steps")
    print(f"mean squared error: {main(options.parse_args().steps):.3f} (of a guess of zero: 1)")
