"""What torch tests of its own recurrent layers, with torch's inputs for them, of ours."""

import copy
import hashlib
import io
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from layers import CELLS, LAYERS, PEERS, randomise
from tolerances import assert_close
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MODULES = LAYERS | CELLS
# Torch's module for whose arguments inputs are made.
GIVEN_FOR = {name: peer.__name__ for name, peer in PEERS.items()} | dict.fromkeys(CELLS, "GRUCell")
# Importing torch's test code freezes torch's flags and loads a profile of hypothesis: it is for another process.
GENERATE = """
import sys, torch
from torch.testing._internal.common_modules import module_db

def calls(given):
    parts = given.constructor_input, given.forward_input
    return [None if part is None else (part.args, part.kwargs) for part in parts]

found = {}
for info in module_db:
    if info.module_cls.__module__ != "torch.nn.modules.rnn":
        continue
    packed = {} if info.module_cls.__name__ not in ("RNN", "GRU") else {"with_packed_sequence": True}
    options = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": True}
    inputs = [calls(given) for given in info.module_inputs_func(info, **options, **packed)]
    errors = info.module_error_inputs_func(info, **options)
    errors = [(*calls(error.module_error_input), error.error_type, error.error_regex) for error in errors]
    found[info.module_cls.__name__] = {"inputs": inputs, "errors": errors}
torch.save(found, sys.argv[1])
"""


class Case(NamedTuple):
    """A module with random weights, and arguments for its forward method."""

    module: nn.Module
    args: tuple
    constructor: dict

    def floats(self) -> list[Tensor]:
        return floats(self.args)

    def with_floats(self, tensors) -> tuple:
        """The arguments with other tensors in the place of all that are no integers."""
        leaves, structure = tree_flatten(self.args)
        replacements = iter(tensors)
        return tree_unflatten([next(replacements) if is_float(leaf) else leaf for leaf in leaves], structure)


def is_float(leaf) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def floats(tree) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if is_float(leaf)]


@pytest.fixture(scope="module")
def from_torch(pytestconfig) -> dict:
    """Made once per version of torch and of the code above."""
    version = hashlib.sha256(f"{torch.__version__} {GENERATE}".encode()).hexdigest()[:16]
    path = pytestconfig.cache.mkdir("module_info") / f"{version}.pt"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        subprocess.run([sys.executable, "-c", GENERATE, str(new)], check=True)
        new.replace(path)  # at once: another worker may be about to load it
    return torch.load(path, weights_only=False)


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine() -> str:
    return "auto"


every_engine = pytest.mark.parametrize("engine", ["plain", "auto"])


@pytest.fixture
def cases(name, engine, from_torch) -> list[Case]:
    """All of torch's inputs."""
    if name in CELLS and engine == "plain":
        pytest.skip("cells have no engine to choose")
    own = {} if name in CELLS else {"engine": engine}
    made = []
    for (args, constructor), (inputs, keywords) in from_torch[GIVEN_FOR[name]]["inputs"]:
        assert not keywords
        module = randomise(MODULES[name](*args, **constructor, **own, dtype=torch.float64))
        made.append(Case(module, inputs, constructor))
    assert len(made) >= (2 if name in CELLS else 32)
    return made


@every_engine
def test_outputs_are_those_of_the_peer_or_of_a_batch_of_one(name, cases):
    for module, args, constructor in cases:
        outputs = floats(module(*args))
        if name in ("RNN", "GRU", "LSTM"):
            peer = PEERS[name](**constructor, dtype=torch.float64)
            peer.load_state_dict(module.state_dict())
            assert_close(outputs, floats(peer(*args)))
        elif not isinstance(args[0], PackedSequence):
            dims = (0, 0) if name in CELLS else (0 if constructor["batch_first"] else 1, 1)  # of x and y, of h
            one = floats(module(*(t.unsqueeze(dim) for t, dim in zip(args, dims, strict=False))))
            assert_close(outputs, [t.squeeze(dim) for t, dim in zip(one, dims, strict=False)])


def test_first_and_second_derivatives(cases):
    """Of all outputs with respect to all inputs and weights, each as one vector, along a random direction."""
    for case in cases:
        if case.constructor.get("batch_first"):
            continue  # a transpose, and half of the time
        weights = dict(case.module.named_parameters())
        leaves = [t.detach() for t in (*case.floats(), *weights.values())]

        def outputs(vector):
            parts = vector.split([t.numel() for t in leaves])
            parts = [part.view(t.shape) for part, t in zip(parts, leaves, strict=True)]
            given = dict(zip(weights, parts[-len(weights) :], strict=True))
            result = torch.func.functional_call(case.module, given, case.with_floats(parts))
            return nn.utils.parameters_to_vector(floats(result))

        vector = nn.utils.parameters_to_vector(leaves).requires_grad_()
        assert gradcheck(outputs, vector, fast_mode=True)
        assert gradgradcheck(outputs, vector, fast_mode=True, gen_non_contig_grad_outputs=True)


def scattered(t: Tensor) -> Tensor:
    """The same numbers, no two of them side by side."""
    return torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0]


@every_engine
def test_tensors_that_are_not_contiguous(cases):
    for case in cases:
        results = []
        for make in (torch.clone, scattered):
            inputs = [make(t.detach()).requires_grad_() for t in case.floats()]
            weights = {key: make(p.detach()).requires_grad_() for key, p in case.module.named_parameters()}
            outputs = floats(torch.func.functional_call(case.module, weights, case.with_floats(inputs)))
            grad_outputs = [make(torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)) for o in outputs]
            grads = torch.autograd.grad(outputs, [*inputs, *weights.values()], grad_outputs)
            results.append([*outputs, *grads])
        assert_close(results[1], results[0])


def through_a_file(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def test_copies_and_files(cases):
    for module, args, _ in cases:
        expected = floats(module(*args))
        for twin in (copy.deepcopy(module), through_a_file(module)):
            assert repr(twin) == repr(module)
            assert all(map(torch.equal, floats(twin(*args)), expected))


def test_training_and_evaluation_are_the_same(cases):
    """Torch's inputs ask for no dropout."""
    for module, args, _ in cases:
        assert all(map(torch.equal, floats(module.train()(*args)), floats(module.eval()(*args))))


def single(tree):
    """The same in float32."""
    return tree_map(lambda leaf: leaf.float() if is_float(leaf) else leaf, tree)


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap"])
def test_moved_to_another_dtype_or_memory_format(cases, swap):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for module, args, _ in cases:
            with torch.no_grad():
                expected = floats(module(*args))
            parameters = list(module.parameters())
            module.to(memory_format=torch.channels_last)
            with torch.no_grad():
                assert all(map(torch.equal, floats(module(*args)), expected))
            module.to(torch.float32)
            assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]
            outputs = floats(module(*single(args)))
            assert {t.dtype for t in (*outputs, *parameters)} == {torch.float32}
            assert_close(outputs, expected, torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_device_and_dtype_of_new_weights(name, from_torch):
    for (args, constructor), _ in from_torch[GIVEN_FOR[name]]["inputs"]:
        given = MODULES[name](*args, **constructor, device="meta", dtype=torch.float64)
        with torch.device("meta"):
            inside = MODULES[name](*args, **constructor)
        for module, dtype in ((given, torch.float64), (inside, torch.float32)):
            assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {("meta", dtype, True)}
            names = list(module.state_dict())
            module.to_empty(device="cpu")
            assert list(module.state_dict()) == names
            assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {("cpu", dtype, True)}


# Where our words are others: widths may differ from layer to layer, and an error begins with the layer's own name.
OUR_WORDS = {
    "hidden_size should be of type int, got: float": "hidden_size should be an int, or a list of ints.*, got: float",
    "RNN input dtype": "input dtype",
    "input has inconsistent input_size: got 11 expected 10": "input has 11 features, expected 10",
    "hidden0 has inconsistent hidden_size: got 21, expected 20": r"Expected hidden size \(3, 20\), got \[3, 21\]",
    "Input batch size 3 doesn't match hidden0 batch size 5": r"Expected hidden size \(3, 20\), got \[5, 20\]",
}


def test_errors_are_of_torchs_kind(name, from_torch):
    for (args, constructor), forward, kind, words in from_torch[GIVEN_FOR[name]]["errors"]:
        if "relu" in args or "tanh" in args:
            continue  # for nn.RNNCell alone
        for theirs, ours in OUR_WORDS.items():
            words = words.replace(theirs, ours)

        def build_and_call():
            module = MODULES[name](*args, **constructor)
            module(*forward[0] if name in LAYERS else single(forward[0]))

        with pytest.raises(kind, match=f"^{name}: .*{words}"):
            build_and_call()
