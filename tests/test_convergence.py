"""Training goes the same way on every engine: the same seed gives the same curve of losses."""

from functools import cache
from pathlib import Path

import pytest
import torch
from fused_engines import DEVICES, on_engines
from tolerances import assert_close
from torch import nn

import deepmemory as dm
from deepmemory.lab.tasks import Adding
from deepmemory.lab.training import random_streams
from deepmemory.ops import engines

STEPS, BATCH = 300, 16
LICENCE, LETTER_STEPS = Path(__file__).parent.parent / "LICENSE", 150


@cache
def curve(engine: str, device: str, autocast: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    task = Adding(24, 28)
    block, output = dm.DMU(2, 5, memory_bias=2.0, batch_first=True, engine=engine), nn.Linear(5, 1)
    model = nn.ModuleList([block, output]).to(device)
    optimiser = torch.optim.Adam(dm.parameter_groups(model, lr=0.03))
    seeds, losses = torch.tensor([7], device=device), []
    for step in range(STEPS):
        batch = task.make(random_streams.sequence_keys(seeds, random_streams.TRAINING, step, BATCH))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            _, h = block(batch.x[0], lengths=batch.lengths[0])
        loss = task.losses(output(h[-1].float()), batch.target[0]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@cache
def language_curve(engine: str, device: str, autocast: bool) -> torch.Tensor:
    """Losses of a small residual DMU that predicts the next letter of the licence."""
    torch.manual_seed(0)
    letters = torch.tensor(list(LICENCE.read_bytes()), device=device)
    embedding, output = nn.Embedding(128, 32), nn.Linear(32, 128)
    block = dm.DMU(32, 32, transition=[32] * 3, residual=True, engine=engine)
    model = nn.ModuleList([embedding, block, output]).to(device)
    optimiser, losses = torch.optim.Adam(dm.parameter_groups(model, lr=0.02)), []
    starts = torch.arange(16, device=device) * 500
    for step in range(LETTER_STEPS):
        at = (starts + 37 * step + torch.arange(33, device=device)[:, None]) % len(letters)  # [T + 1, B]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = output(block(embedding(letters[at[:-1]]))[0])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), letters[at[1:]].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("engine", on_engines(engines.FUSED))
def test_same_curve_as_on_the_plain_engine(engine, monkeypatch):
    """Every one of 300 losses, while they fall to a twentieth, by the table's row for float32."""
    device = DEVICES[engine]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # float32 on the GPU means float32
    expected = curve("plain", device)
    assert expected[-20:].mean() < expected[:20].mean() / 20
    assert_close(curve(engine, device), expected)


@pytest.mark.parametrize("engine", on_engines(engines.FUSED))
def test_autocast_to_bfloat16_learns_as_much(engine):
    """300 steps on Adding end within a third of the loss that float32 ends with."""
    device = DEVICES[engine]
    exact, lower = (curve(engine, device, autocast)[-20:].mean() for autocast in (False, True))
    assert lower < exact * 4 / 3


@pytest.mark.parametrize("engine", on_engines(engines.FUSED))
def test_autocast_to_bfloat16_learns_language_as_well(engine):
    """150 steps on letters fall from 5 to under 2.2 nats, and end within 2 % of float32's loss."""
    device = DEVICES[engine]
    exact, lower = (language_curve(engine, device, autocast)[-20:].mean() for autocast in (False, True))
    assert exact < 2.2
    assert lower < 1.02 * exact
