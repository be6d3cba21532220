"""The examples that need a package of others: run by ``make test-examples``, and wherever that package is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from layers import LAYERS, OWN, randomise
from test_examples import load
from tolerances import assert_close
from torch import nn

import deepmemory as dm

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small gain nothing from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a package is missing."""
    if importlib.util.find_spec(package):
        return pytest.mark.filterwarnings("ignore")
    return pytest.mark.missing(package, "not installed: make test-examples")


def own(name: str, *sizes: int) -> nn.Module:
    return randomise(LAYERS[name](*sizes, batch_first=True, **OWN.get(name, {})))


@needs("gymnasium")
class TestTMaze:
    def test_what_the_maze_says(self):
        import numpy as np

        mazes = load("t_maze").TMaze(num_envs=2, corridor=3)
        seen, _ = mazes.reset(seed=0)
        signs = seen[:, 0]
        assert set(signs) <= {-1, 1}
        for step in range(3):
            seen, reward, over, late, _ = mazes.step(np.array([0, 0]))
            assert not reward.any()
            assert not (over | late).any()
            assert not seen[:, 0].any()
            assert (seen[:, 1] == (step == 2)).all()
        _, reward, over, _, _ = mazes.step(np.array([0, 0]))
        assert (reward == np.float32(-0.1)).all()
        assert not over.any()
        seen, reward, over, late, _ = mazes.step(np.where(signs > 0, [2, 1], [1, 2]))
        assert reward.tolist() == [1, -1]
        assert over.all()
        assert not late.any()
        assert seen[:, 0].all()  # the next episode has begun

    def test_an_episode_ends_late(self):
        import numpy as np

        mazes = load("t_maze").TMaze(num_envs=1, corridor=3)
        mazes.reset(seed=0)
        ends = [mazes.step(np.array([1]))[3].item() for _ in range(8)]
        assert ends == [False] * 7 + [True]

    def test_a_dmu_learns_it(self):
        assert load("t_maze").main() > 0.9


@needs("sb3_contrib")
class TestRecurrentPPO:
    def batch(self, size: int, layers: int = 1):
        """Three sequences of five steps, laid out as sb3-contrib's buffer does, with starts at and after the first."""
        from sb3_contrib.common.recurrent.type_aliases import RNNStates

        starts = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).float()
        states = [torch.randn(layers, 3, size) for _ in range(4)]
        return torch.randn(15, 2), torch.randint(0, 2, (15,)), RNNStates(tuple(states[:2]), tuple(states[2:])), starts

    def policy(self, kind, **options):
        program = load("recurrent_ppo")
        spaces = program.make_environment(count=1)
        kind = kind or program.Policy
        return kind(spaces.observation_space, spaces.action_space, lambda _: 1e-3, lstm_hidden_size=8, **options)

    def test_it_is_the_policy_of_sb3_contrib(self):
        from sb3_contrib.ppo_recurrent import MlpLstmPolicy

        theirs = self.policy(MlpLstmPolicy, n_lstm_layers=2)
        ours = self.policy(None, n_lstm_layers=2, layer=dm.LSTM)
        ours.load_state_dict(theirs.state_dict())
        seen, actions, states, starts = self.batch(8, 2)
        results = []
        for policy in (theirs, ours):
            values, log_prob, entropy = policy.evaluate_actions(seen, actions, states, starts.flatten())
            loss = (values.flatten() * torch.linspace(0, 1, 15) + log_prob.sin()).sum()
            gradients = torch.autograd.grad(loss, list(policy.parameters()))
            last = policy(seen, states, starts.flatten(), deterministic=True)[3]
            results.append([values, log_prob, entropy, *gradients, *last.pi, *last.vf])
        assert_close(*results)

    @pytest.mark.parametrize("name", ["DMU", "GRU", "RHN", "RNN"])
    def test_starts_split_the_sequences(self, name):
        layer = own(name, 2, 8)
        policy = self.policy(None, layer=type(layer))
        seen, _, states, starts = self.batch(8)
        found, (h, _) = policy._process_sequence(seen, states.pi, starts.flatten(), layer)
        found, x = found.view(3, 5, 8), seen.view(3, 5, 2)
        assert_close(found[0], layer(x[0])[0])
        assert_close(found[1, :2], layer(x[1, :2], states.pi[0][:, 1])[0])
        assert_close(found[1, 2], layer(x[1, 2:3])[0][0])
        assert_close(found[1, 3:], layer(x[1, 3:])[0])
        assert_close(found[2], layer(x[2], states.pi[0][:, 2])[0])
        assert_close(h[0], found[:, -1])

    def test_training_keeps_the_rate_rule_and_an_agent_can_be_saved(self, tmp_path):
        program = load("recurrent_ppo")
        _, agent = program.main(steps=1024)
        assert [group["lr_divisor"] for group in agent.policy.optimizer.param_groups] == [1, 4]
        assert isinstance(agent.policy.lstm_actor, dm.DMU)
        agent.save(tmp_path / "agent")
        loaded = program.RecurrentPPO.load(tmp_path / "agent", device="cpu")
        seen = agent.env.reset()
        (first, state), (same, kept) = (each.predict(seen, deterministic=True) for each in (agent, loaded))
        assert (first == same).all()
        assert_close(torch.from_numpy(state[0]), torch.from_numpy(kept[0]))


@needs("torchrl")
class TestTorchRL:
    shape = (3, 7)

    def data(self, layer: nn.Module, states: list[str]):
        from tensordict import TensorDict

        is_init = torch.zeros(*self.shape, 1, dtype=torch.bool)
        is_init[0, 0] = is_init[1, 3] = is_init[1, 4] = is_init[2, 6] = True
        kept = torch.randn(*self.shape, layer.num_layers, layer.hidden_size) * ~is_init[..., None]
        return TensorDict(
            {"x": torch.randn(*self.shape, 2), "is_init": is_init} | dict.fromkeys(states, kept), self.shape
        )

    @pytest.mark.parametrize("name", ["GRU", "LSTM"])
    def test_it_is_the_module_of_torchrl(self, name):
        from torchrl import modules
        from torchrl.modules import set_recurrent_mode

        layer = own(name, 2, 5, 2)
        ours = load("torchrl_module").RecurrentModule(layer, "x", "y", "s")
        keys = {"in_keys": ["x", *ours.states], "out_keys": ours.out_keys}
        theirs = getattr(modules, f"{name}Module")(2, 5, num_layers=2, **keys)
        inner = getattr(theirs, name.lower())
        inner.load_state_dict(layer.state_dict())
        data = self.data(layer, ours.states)
        with set_recurrent_mode(True):
            found, expected = ours(data.clone()), theirs(data.clone())
        last = [[each["next", key][:, -1] for key in ours.states] for each in (found, expected)]
        assert_close([found["y"], *last[0]], [expected["y"], *last[1]])
        weights = torch.linspace(-1, 1, 5)
        gradients = [
            list(torch.autograd.grad((each["y"] * weights).sum(), list(module.parameters())))
            for each, module in ((found, layer), (expected, inner))
        ]
        assert_close(*gradients)

    @pytest.mark.parametrize("name", LAYERS)
    def test_a_sequence_with_resets_equals_the_split_ones_and_single_steps(self, name):
        from torchrl.modules import set_recurrent_mode

        layer = own(name, 2, 5)
        module = load("torchrl_module").RecurrentModule(layer, "x", "y", "s")
        data = self.data(layer, module.states)
        with set_recurrent_mode(True):
            whole = module(data.clone())
            assert_close(whole["y"][1, 4:], module(data.clone()[1:2, 4:])["y"][0])
            assert_close(whole["y"][1, 3], module(data.clone()[1:2, 3:4])["y"][0, 0])
            assert_close(whole["y"][0], layer(data["x"][0])[0])
        step, outputs = data[:, 0].clone(), []
        for t in range(self.shape[1]):
            step.update(data[:, t].select("x", "is_init"))
            step = module(step)
            outputs.append(step["y"])
            for key in module.states:
                step[key] = step["next", key]
        assert_close(whole["y"], torch.stack(outputs, 1))
        for key in module.states:
            assert_close(whole["next", key][:, -1], step[key])

    def test_a_rollout_read_at_once_gives_the_probabilities_of_its_steps(self):
        from torchrl.collectors import Collector
        from torchrl.modules import set_recurrent_mode
        from torchrl.modules.utils import get_primers_from_module

        torch.manual_seed(0)
        program = load("torchrl_module")
        policy = program.make_policy(dm.DMU(2, 8, batch_first=True))
        environment = program.make_environment().append_transform(get_primers_from_module(policy))
        environment.set_seed(0)
        for data in Collector(environment, policy, frames_per_batch=60, total_frames=120):
            assert data["is_init"].sum() > 1
            with set_recurrent_mode(True):
                log_prob = policy.get_dist(data.clone()).log_prob(data["action"])
            assert_close(log_prob.detach(), data["action_log_prob"])
        assert program.main(batches=5, frames=60) > 5

    def test_time_first_is_an_error(self):
        with pytest.raises(ValueError, match=r"needs DMU.*batch_first=True"):
            load("torchrl_module").RecurrentModule(dm.DMU(2, 3), "x", "y")


@needs("darts")
def test_darts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Lightning may write
    program = load("darts_forecast")
    error, repeated = program.main()
    assert error < 0.5 * repeated


@needs("neuralforecast")
def test_neuralforecast(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    program = load("neuralforecast_model")
    error, repeated = program.main()
    assert error < 0.5 * repeated
    assert isinstance(program.DMU(4, input_size=8, encoder_hidden_size=6, max_steps=1).hist_encoder, dm.DMU)
