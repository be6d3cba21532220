"""A policy with our layers for sb3-contrib's RecurrentPPO, trained on CartPole with hidden velocities.

    pip install "deepmemory[examples-sb3]"
    python examples/recurrent_ppo.py

sb3-contrib's own policy loops over time in Python wherever an episode begins. Here ``resets=`` marks these steps, and
a batch is one call of the layer.
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

import deepmemory as dm

State = tuple[Tensor, Tensor]


class Policy(RecurrentActorCriticPolicy):
    """The policy of sb3-contrib with another recurrent layer: ``policy_kwargs={"layer": dm.DMU}``.

    ``layer_kwargs`` go to the layer. All other arguments are those of ``MlpLstmPolicy``: ``lstm_hidden_size``,
    ``n_lstm_layers`` and so on. With ``dm.LSTM`` it is the same network and takes the same ``state_dict``.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Any,
        *args: Any,
        layer: type[nn.Module] = dm.DMU,
        layer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

        def like(lstm: nn.LSTM) -> nn.Module:
            sizes = lstm.input_size, lstm.hidden_size, lstm.num_layers
            return layer(*sizes, batch_first=True, **(layer_kwargs or {}))

        self.lstm_actor = like(self.lstm_actor)
        if self.lstm_critic is not None:
            self.lstm_critic = like(self.lstm_critic)
        optimiser = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)
        self.optimizer = dm.divide_rates(optimiser, self)  # PPO writes one rate into every group

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: State, episode_starts: Tensor, lstm: nn.Module
    ) -> tuple[Tensor, State]:
        """All steps of all sequences in one call; the buffer has one sequence after the other."""
        h, c = lstm_states
        x = features.view(h.shape[1], -1, lstm.input_size)
        resets = episode_starts.view(x.shape[:2]) > 0
        if isinstance(lstm, dm.LSTM):
            output, (h, c) = lstm(x, (h, c), resets=resets)
        else:
            output, h = lstm(x, h, resets=resets)  # the buffer stores a second state, which is not used
        return output.flatten(0, 1), (h, c)


def make_environment(seed: int = 0, count: int = 8) -> VecEnv:
    """CartPole that hides its velocities, so that one observation does not show where the pole is going."""

    def hide(environment: gym.Env) -> gym.Env:
        low, high = (bound[::2] for bound in (environment.observation_space.low, environment.observation_space.high))
        return gym.wrappers.TransformObservation(environment, lambda seen: seen[::2], spaces.Box(low, high))

    return make_vec_env("CartPole-v1", n_envs=count, seed=seed, wrapper_class=hide)


def main(steps: int = 40_000, layer: type[nn.Module] = dm.DMU) -> tuple[float, RecurrentPPO]:
    """Train; returns how long the pole stands, on average of the last hundred episodes, and the agent."""
    options = {"layer": layer, "lstm_hidden_size": 64}
    agent = RecurrentPPO(
        Policy, make_environment(), learning_rate=2e-3, policy_kwargs=options, seed=0, device="cpu", batch_size=256
    )
    agent.learn(steps)
    return float(np.mean([episode["l"] for episode in agent.ep_info_buffer])), agent


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=40_000, help="steps in all environments together")
    print(f"the pole stands for {main(options.parse_args().steps)[0]:.0f} steps (random actions: about 22)")
