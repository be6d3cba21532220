"""A recurrent policy step by step, in the style of TorchRL: the state is in a dictionary and is reset at a new episode.

    python examples/rl_step_loop.py

A sign at the entrance of a corridor says at which end the reward is; at the far end the policy must remember it.
"""

import argparse

import torch
from torch import Tensor, nn

import deepmemory as dm

CORRIDOR = 10


class Corridors:
    """Many corridors at once. Observation: the sign (+1 or -1, at the entrance only), and whether this is the end."""

    def __init__(self, count: int) -> None:
        self.sign = torch.zeros(count)
        self.position = torch.full((count,), CORRIDOR - 1)
        self.start()

    def start(self) -> None:
        """Start a new episode in every corridor."""
        self.sign = torch.randint(0, 2, self.sign.shape) * 2.0 - 1
        self.position.zero_()

    def observe(self) -> dict[str, Tensor]:
        """The policy's observation; ``is_init`` marks the first step of an episode."""
        first, last = self.position == 0, self.position == CORRIDOR - 1
        return {"observation": torch.stack([self.sign * first, last.float()], -1), "is_init": first[:, None]}

    def step(self, action: Tensor) -> tuple[Tensor, bool]:
        """Take one step; at the end the action (0 or 1) earns +1 or -1 and the episode is over."""
        done = bool((self.position == CORRIDOR - 1).all())
        reward = torch.where(action * 2 - 1 == self.sign, 1.0, -1.0) if done else torch.zeros_like(self.sign)
        self.position += 1
        return reward, done


class Policy(nn.Module):
    """Reads ``observation``, ``is_init`` and ``state`` of a dictionary and adds ``logits`` and the new ``state``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = dm.DMUCell(2, 16, memory_bias=3.0)
        self.head = nn.Linear(16, 2)

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step in every corridor."""
        state = data.get("state", data["observation"].new_zeros(len(data["observation"]), 16))
        state = self.cell(data["observation"], torch.where(data["is_init"], 0.0, state))
        return {**data, "state": state, "logits": self.head(state)}


def episode(policy: Policy, corridors: Corridors) -> tuple[Tensor, Tensor]:
    """Walk all corridors once; returns log-probabilities of the last actions, and rewards."""
    corridors.start()
    carried: dict[str, Tensor] = {}
    while True:
        carried = policy({**carried, **corridors.observe()})
        chosen = torch.distributions.Categorical(logits=carried["logits"])
        action = chosen.sample()
        reward, done = corridors.step(action)
        if done:
            return chosen.log_prob(action), reward


def main(steps: int = 80) -> float:
    """Train with REINFORCE; returns the mean reward of a hundred episodes afterwards."""
    torch.manual_seed(0)
    policy, corridors = Policy(), Corridors(64)
    optimiser = torch.optim.Adam(dm.parameter_groups(policy, lr=0.05))
    for _ in range(steps):
        log_prob, reward = episode(policy, corridors)
        loss = -(log_prob * (reward - reward.mean())).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return episode(policy, Corridors(100))[1].mean().item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=80, help="optimiser steps")
    print(f"mean reward: {main(options.parse_args().steps):+.2f} (without memory: 0, best: +1)")
