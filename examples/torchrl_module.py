"""Our layers in TorchRL: a module that reads ``is_init``, trained on CartPole with hidden velocities.

    pip install "deepmemory[examples-torchrl]"
    python examples/torchrl_module.py

TorchRL's GRUModule splits and pads a batch if an episode begins inside a sequence. Here ``resets=`` marks the step.
"""

import argparse

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, InitTracker, ObservationTransform, RewardSum, TensorDictPrimer, TransformedEnv
from torchrl.modules import ProbabilisticActor, recurrent_mode, set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module
from torchrl.objectives.value.functional import reward2go

import deepmemory as dm


class RecurrentModule(TensorDictModuleBase):
    """One of our layers, with ``batch_first=True``, as a module of TorchRL.

    Outside ``set_recurrent_mode(True)``, a call is one step. Inside, the last dimension of the tensordict is time:
    the state comes from its first step, is zero where ``is_init``, and goes into its last step.
    """

    def __init__(self, layer: nn.Module, in_key: str, out_key: str, state_key: str = "recurrent_state") -> None:
        if not layer.batch_first:
            raise ValueError(f"RecurrentModule: needs {type(layer).__name__}(..., batch_first=True)")
        super().__init__()
        self.layer = layer
        self.states = [f"{state_key}_h", f"{state_key}_c"] if isinstance(layer, dm.LSTM) else [state_key]
        self.in_keys = [in_key, *self.states, "is_init"]
        self.out_keys = [out_key, *(("next", key) for key in self.states)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """One step, or all steps of a sequence."""
        shape = tensordict.shape
        rows = (-1, shape[-1]) if recurrent_mode() else (-1, 1)
        x = tensordict[self.in_keys[0]]
        resets = tensordict["is_init"].reshape(rows)
        given = [tensordict.get(key, None) for key in self.states]
        hx = None
        if None not in given:
            hx = [state.reshape(*rows, *state.shape[-2:])[:, 0].transpose(0, 1) for state in given]
        y, h = self.layer(
            x.reshape(*rows, x.shape[-1]), hx if hx is None or len(hx) == 2 else hx[0], resets=resets.bool()
        )
        tensordict[self.out_keys[0]] = y.reshape(*shape, -1)
        for key, last in zip(self.out_keys[1:], h if isinstance(h, tuple) else (h,), strict=True):
            states = last.new_zeros(*resets.shape, *last.transpose(0, 1).shape[1:])
            states[:, -1] = last.transpose(0, 1)
            tensordict[key] = states.reshape(*shape, *states.shape[-2:])
        return tensordict

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that gives an environment's first step its state; collectors ask for it themselves."""
        shape = (self.layer.num_layers, self.layer.hidden_size)
        return TensorDictPrimer({key: Unbounded(shape=shape) for key in self.states}, expand_specs=True)


class HideVelocities(ObservationTransform):
    """Keeps only position and angle, the first and the third number of CartPole's observation."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., ::2]

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec):
        """The policy's observation has two numbers."""
        observation_spec["observation"] = Unbounded(shape=(*observation_spec["observation"].shape[:-1], 2))
        return observation_spec


def make_policy(layer: nn.Module) -> ProbabilisticActor:
    """Observation, layer, logits of two actions."""
    head = TensorDictModule(nn.Linear(layer.hidden_size, 2), ["features"], ["logits"])
    return ProbabilisticActor(
        TensorDictSequential(RecurrentModule(layer, "observation", "features"), head),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def make_environment() -> TransformedEnv:
    """CartPole without velocities, with ``is_init`` and the sum of rewards of every episode."""
    environment = GymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(environment, Compose(HideVelocities(), InitTracker(), RewardSum()))


def main(batches: int = 30, frames: int = 1000) -> float:
    """Train with REINFORCE; returns how long the pole stands, on average, in the last five batches."""
    torch.manual_seed(0)
    policy = make_policy(dm.DMU(2, 32, batch_first=True))
    optimiser = torch.optim.Adam(dm.parameter_groups(policy, lr=0.02))
    lengths = []
    environment = make_environment().append_transform(get_primers_from_module(policy))
    environment.set_seed(0)
    for data in Collector(environment, policy, frames_per_batch=frames, total_frames=batches * frames):
        gains = reward2go(data["next", "reward"], data["next", "done"], gamma=0.98, time_dim=-2).squeeze(-1)
        advantage = (gains - gains.mean()) / gains.std()
        with set_recurrent_mode(True):  # all steps at once, with the episodes' beginnings inside
            log_prob = policy.get_dist(data).log_prob(data["action"])
        optimiser.zero_grad()
        (-log_prob * advantage).mean().backward()
        optimiser.step()
        over = data["next", "done"].squeeze(-1)
        lengths.append(data["next", "episode_reward"].squeeze(-1)[over].mean().item())
    return sum(lengths[-5:]) / 5


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batches", type=int, default=30, help="batches of 1,000 frames")
    print(f"the pole stands for {main(options.parse_args().batches):.0f} steps (random actions: about 22)")
