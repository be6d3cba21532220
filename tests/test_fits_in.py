"""The layers go where people put ``nn.GRU``: parametrisations, optimisers, averaging, wrappers for many devices."""

import copy
import pickle

import pytest
import torch
from layers import LAYERS, OWN, randomise
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import deepmemory as dm


class Model(nn.Module):
    """A layer as people use one."""

    def __init__(self, name: str = "DMU", **options) -> None:
        super().__init__()
        self.recurrent = LAYERS[name](3, 6, batch_first=True, **OWN.get(name, {}), **options)
        self.output = nn.Linear(6, 2)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.recurrent(x, lengths=lengths)[0])


@pytest.fixture(params=LAYERS)
def model(request: pytest.FixtureRequest) -> Model:
    return randomise(Model(request.param))


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x, lengths = torch.randn(4, 9, 3, generator=generator), torch.tensor([9, 5, 0, 7])
    return model(x, lengths=lengths).square().mean()


def steps(model: nn.Module, optimiser: torch.optim.Optimizer, count: int = 3, clip: float | None = None) -> list[float]:
    """Losses before each step."""
    losses = []
    for _ in range(count):
        optimiser.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=True)
        optimiser.step()
        losses.append(loss.item())
    return losses


class TestParametrised:
    """The weight an engine reads is the one that the parametrisation computes, and its gradient arrives."""

    def test_weight_norm(self, model):
        expected = loss_of(model)
        expected.backward()
        gradients = model.recurrent.weight_hh_l0.grad.clone()
        parametrizations.weight_norm(model.recurrent, "weight_hh_l0")
        assert_close(loss_of(model), expected)
        loss_of(model).backward()
        direction = model.recurrent.parametrizations.weight_hh_l0.original1
        assert direction.grad.abs().sum() > 0
        # Weight norm takes the part of the gradient along each row away.
        weight = direction.detach()
        along = (gradients * weight).sum(1, keepdim=True) / weight.square().sum(1, keepdim=True)
        assert_close(direction.grad, gradients - along * weight)

    def test_spectral_norm_of_the_recurrent_weight(self, model):
        parametrizations.spectral_norm(model.recurrent, "weight_hh_l0", n_power_iterations=20)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.5))
        assert torch.linalg.matrix_norm(model.recurrent.weight_hh_l0.detach(), 2) == pytest.approx(1, abs=0.02)

    def test_orthogonal(self, model):
        parametrizations.orthogonal(model.recurrent, "weight_hh_l0")
        losses = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 5)
        weight = model.recurrent.weight_hh_l0
        gram = weight.T @ weight
        assert_close(gram, torch.eye(len(gram)))
        assert losses[-1] < losses[0]

    def test_the_rate_follows_the_weights(self):
        model = Model("DMU")
        parametrizations.weight_norm(model.recurrent, "weight_hh_l0")
        by_id = {id(p): group["lr"] for group in dm.parameter_groups(model, lr=0.6) for p in group["params"]}
        assert by_id[id(model.recurrent.parametrizations.weight_hh_l0.original1)] == pytest.approx(0.1)
        parametrize.remove_parametrizations(model.recurrent, "weight_hh_l0")
        assert type(model.recurrent) is dm.DMU


class TestOptimised:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], ids=lambda k: k.__name__)
    def test_foreach_and_fused_go_the_same_way(self, model, kind):
        curves = []
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            twin = copy.deepcopy(model)
            curves.append(steps(twin, kind(dm.parameter_groups(twin, lr=0.05), **options)))
        assert curves[1] == pytest.approx(curves[0], rel=1e-5)
        assert curves[2] == pytest.approx(curves[0], rel=1e-5)
        assert curves[0][-1] < curves[0][0]

    def test_clipped(self, model):
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        steps(model, optimiser, 1, clip=0.01)
        moved = nn.utils.parameters_to_vector(model.parameters()) - before
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)

    def test_averaged(self, model):
        """The moving average of weights is a model like any other."""
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = None
        for _ in range(3):
            steps(model, optimiser, 1)
            averaged.update_parameters(model)
            now = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            expected = now if expected is None else 0.5 * expected + 0.5 * now
        assert_close(nn.utils.parameters_to_vector(averaged.parameters()).detach(), expected)
        assert loss_of(averaged).isfinite()

    def test_stopped_and_gone_on_with(self, model):
        """Copies, pickles and state_dicts, with the optimiser's, in the middle of training."""
        optimiser = torch.optim.Adam(dm.parameter_groups(model, lr=0.05))
        steps(model, optimiser)
        kept = pickle.dumps({"model": model.state_dict(), "optimiser": optimiser.state_dict()})
        twin = pickle.loads(pickle.dumps(model))
        expected = steps(model, optimiser)
        again = torch.optim.Adam(dm.parameter_groups(twin, lr=0.05))
        for _ in range(2):
            states = pickle.loads(kept)
            twin.load_state_dict(states["model"])
            again.load_state_dict(states["optimiser"])
            assert steps(twin, again) == expected


@pytest.fixture
def _one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class TestWrapped:
    def train(self, model: nn.Module) -> list[float]:
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def test_data_parallel(self, model):
        expected = self.train(copy.deepcopy(model))
        assert self.train(nn.DataParallel(model)) == expected  # without a GPU, the module itself

    @pytest.mark.usefixtures("_one_process")
    def test_distributed_data_parallel(self, model):
        expected = self.train(copy.deepcopy(model))
        assert self.train(nn.parallel.DistributedDataParallel(model)) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.usefixtures("_one_process")
    @pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # with batch_first the output is a view
    def test_fully_sharded(self, model):
        from torch.distributed.fsdp import fully_shard

        expected = self.train(copy.deepcopy(model))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model.recurrent, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert self.train(model) == pytest.approx(expected, rel=1e-6)

    def test_fabric(self, model):
        fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        wrapped, optimiser = fabric.setup(model, torch.optim.Adam(dm.parameter_groups(model, lr=0.02)))
        losses = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = loss_of(wrapped)
            fabric.backward(loss)
            fabric.clip_gradients(wrapped, optimiser, max_norm=1.0)
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    def test_recomputed_by_torch(self, model):
        """Activation checkpointing around a layer."""
        x = torch.randn(4, 9, 3)
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        assert_close(list(torch.autograd.grad(y.sum(), list(model.parameters()))), list(expected))
