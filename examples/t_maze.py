"""A maze that requires memory, written with gymnasium, and PPO on sequences in which episodes begin.

    pip install "deepmemory[examples-gymnasium]"
    python examples/t_maze.py

Many mazes run side by side, and a rollout continues where the last one ended. ``resets=`` marks the steps at which an
episode begins, so that the layer reads a whole rollout in one call.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical

import deepmemory as dm

MAZES, ROLLOUT = 128, 32  # side by side, and steps
EPOCHS, CLIP, DISCOUNT, TRACE = 4, 0.2, 0.99, 0.95  # of PPO


class TMaze(gym.vector.VectorEnv):
    """Corridors with a sign at the entrance, which tells where to turn at the junction at the end.

    Observation: the sign (+1 or -1, at the entrance only), whether this is the junction, and noise.
    Actions: go on, turn left, turn right. At the junction the right turn earns 1 and the wrong one -1; anywhere, a bump
    into a wall costs 0.1. An episode ends with a turn at the junction, or after twice the steps it takes.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012, as gymnasium has it
    single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
    single_action_space = spaces.Discrete(3)

    def __init__(self, num_envs: int = MAZES, corridor: int = 20) -> None:
        self.num_envs, self.corridor = num_envs, corridor
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.sign, self.position, self.steps = (np.zeros(num_envs, int) for _ in range(3))

    def _begin(self, chosen: np.ndarray) -> None:
        self.sign[chosen] = self.np_random.choice([-1, 1], chosen.sum())
        self.position[chosen] = self.steps[chosen] = 0

    def _observe(self) -> np.ndarray:
        sign = self.sign * (self.position == 0)
        noise = self.np_random.uniform(-1, 1, self.num_envs)
        return np.stack([sign, self.position == self.corridor, noise], -1).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in every maze."""
        super().reset(seed=seed)
        self._begin(np.ones(self.num_envs, bool))
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """One step in every maze; where an episode ends the next one begins, and its first observation is returned."""
        self.steps += 1
        turned = actions > 0
        junction = self.position == self.corridor
        over = junction & turned
        reward = np.where(over, np.where((actions == 2) == (self.sign > 0), 1.0, -1.0), -0.1 * (junction | turned))
        self.position += ~junction & ~turned
        late = ~over & (self.steps >= 2 * (self.corridor + 1))
        self._begin(over | late)
        return self._observe(), reward.astype(np.float32), over, late, {}


class Agent(nn.Module):
    """A recurrent layer with a head for the actions and one for the value."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.actor, self.critic = nn.Linear(layer.hidden_size, 3), nn.Linear(layer.hidden_size, 1)

    def forward(self, x: Tensor, state: Any, starts: Tensor) -> tuple[Categorical, Tensor, Any]:
        """Actions and values of observations (T, B, 3), and the last state; ``starts`` (T, B) begin an episode."""
        y, state = self.layer(x, state, resets=starts)
        return Categorical(logits=self.actor(y), validate_args=False), self.critic(y).squeeze(-1), state


def advantages(rewards: Tensor, values: Tensor, starts: Tensor) -> Tensor:
    """Generalised advantage estimation; values and starts have one step more than the rewards."""
    found, total = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        ahead = ~starts[t + 1]
        total = rewards[t] + DISCOUNT * ahead * values[t + 1] - values[t] + DISCOUNT * TRACE * ahead * total
        found[t] = total
    return found


def train(agent: Agent, rollouts: int, corridor: int = 20, lr: float = 0.01, seed: int = 0) -> Iterator[float]:
    """Train with PPO; yields the mean reward of the episodes that ended in each rollout."""
    torch.manual_seed(seed)
    mazes = TMaze(corridor=corridor)
    count = mazes.num_envs
    optimiser = torch.optim.Adam(dm.parameter_groups(agent, lr=lr))
    seen, starts = torch.from_numpy(mazes.reset(seed=seed)[0]), torch.ones(count, dtype=torch.bool)
    state, gained = None, torch.zeros(count)
    for _ in range(rollouts):
        first, steps, ended = state, [], []
        with torch.no_grad():
            for _ in range(ROLLOUT):
                policy, _, state = agent(seen[None], state, starts[None])
                action = policy.sample()[0]
                observed, reward, over, late, _ = mazes.step(action.numpy())
                reward, done = torch.from_numpy(reward), torch.from_numpy(over | late)
                steps.append((seen, starts, action, reward))
                gained += reward
                ended.append(gained[done])
                gained = gained * ~done
                seen, starts = torch.from_numpy(observed), done
            x, begins, actions, rewards = (torch.stack(each) for each in zip(*steps, strict=True))
            policy, values, _ = agent(torch.cat([x, seen[None]]), first, torch.cat([begins, starts[None]]))
            before = policy.log_prob(torch.cat([actions, actions[:1]]))[:-1]
        gains = advantages(rewards, values, torch.cat([begins, starts[None]]))
        values, weights = values[:-1], (gains - gains.mean()) / (gains.std() + 1e-8)
        for _ in range(EPOCHS):
            policy, estimate, _ = agent(x, first, begins)  # the whole rollout at once
            ratio = (policy.log_prob(actions) - before).exp()
            gain = torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights).mean()
            loss = 0.5 * (gains + values - estimate).square().mean() - gain - 0.01 * policy.entropy().mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimiser.step()
        yield torch.cat(ended).mean().item()


def main(corridor: int = 20, rollouts: int = 50) -> float:
    """Train a DMU; returns the mean reward of the last five rollouts."""
    torch.manual_seed(0)
    agent = Agent(dm.DMU(3, 32, memory_bias=3.0))
    return float(np.mean(list(train(agent, rollouts, corridor))[-5:]))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--corridor", type=int, default=20, help="length of the corridor")
    options.add_argument("--rollouts", type=int, default=50, help="rollouts of 32 steps in 128 mazes")
    print(f"mean reward: {main(**vars(options.parse_args())):+.2f} (without memory: 0, best: +1)")
