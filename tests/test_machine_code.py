"""Machine code gives the numbers of torch, in the same memory, and only for ordinary policies."""

import copy
import importlib.util
import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import DiagGaussianDistribution, make_proba_distribution
from torch import nn

from sb3_grpo import GRPO, ActorPolicy, MultiInputPolicy, RecurrentGRPO, losses, normalization
from sb3_grpo.arithmetic.choice import choose_actor, machine_policy
from sb3_grpo.arithmetic.conditions import CELLS as CELLS_OF_TORCH
from sb3_grpo.arithmetic.conditions import FAMILIES
from sb3_grpo.arithmetic.first_layers import NO_ROWS, NO_STEPS, Convolution, FirstLayer, Recurrent
from sb3_grpo.arithmetic.kl_penalty import KLPenalty
from sb3_grpo.arithmetic.machine import MachinePolicy
from sb3_grpo.arithmetic.machine_code import distributions, jit, layers, linear_algebra, optimizer, recurrent
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint, compile_functions
from sb3_grpo.arithmetic.metrics import describe_update
from sb3_grpo.arithmetic.network import BERNOULLI, CATEGORICAL, GAUSSIAN, Network
from sb3_grpo.arithmetic.objective import ClipRange, Objective
from sb3_grpo.arithmetic.update import clipped_update, natural_update
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.compile import ENTRY_POINTS
from sb3_grpo.extractors import SmallCNN
from sb3_grpo.recurrent import MlpLstmPolicy

VECTOR = spaces.Box(-1.0, 1.0, (3,))
DISCRETE = spaces.Discrete(4)
BOX = spaces.Box(-1.0, 1.0, (2,))
ACTION_SPACES = {
    "Discrete": DISCRETE,
    "MultiDiscrete": spaces.MultiDiscrete([2, 3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": BOX,
    "matrix of actions": spaces.Box(-1.0, 1.0, (2, 2)),
}
N = 40

WITHOUT_NUMBA = compile_functions(ENTRY_POINTS)
needs_numba = pytest.mark.skipif(bool(WITHOUT_NUMBA), reason=WITHOUT_NUMBA)


class InTorch(ActorPolicy):
    """The same policy, without machine code."""

    def evaluate_actions(self, *args: Any) -> Any:  # type: ignore[override]
        return super().evaluate_actions(*args)


class InTorchWithMemory(MlpLstmPolicy):
    """The same with memory."""

    def evaluate_actions(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate_actions(*args, **kwargs)


#: Arguments of policies with memory
CELLS: dict[str, dict[str, Any]] = {name: dict(cell=name, lstm_hidden_size=9) for name in ("lstm", "gru")}


def make_policy(action_space: spaces.Space = DISCRETE, cls: type[ActorPolicy] = ActorPolicy, **kwargs: Any) -> ActorPolicy:
    # With orthogonal initialisation, the action layer and most gradients start near zero.
    arguments: dict[str, Any] = {"observation_space": VECTOR, "ortho_init": False, **kwargs}
    observation_space = arguments.pop("observation_space")
    return cls(observation_space, action_space, lambda _: 1e-3, **arguments)


def pair(action_space: spaces.Space, **kwargs: Any) -> tuple[ActorPolicy, ActorPolicy]:
    """A policy with random weights, and the same one that stays with torch."""
    classes = (MlpLstmPolicy, InTorchWithMemory) if "cell" in kwargs else (ActorPolicy, InTorch)
    policy, in_torch = (make_policy(action_space, cls, **kwargs) for cls in classes)
    if hasattr(policy, "log_std"):
        nn.init.normal_(policy.log_std, std=0.5)
    in_torch.load_state_dict(policy.state_dict())
    return policy, in_torch


class Samples(GroupRolloutBuffer):
    """A buffer that holds a given update."""

    def __init__(self, update: GroupRolloutBufferSamples):
        self._update = update
        self.has_images = False
        self.device = th.device("cpu")

    def _form_update(self, *args: Any) -> Any:
        raise NotImplementedError


def random_update(policy: ActorPolicy, n: int, weighted: bool = False, observations: Any = None) -> GroupRolloutBufferSamples:
    """Transitions of a policy that differs from the given one, so that some ratios are clipped."""
    observations = th.randn(n, *policy.observation_space.shape) if observations is None else observations  # type: ignore[misc]
    context: dict[str, Any] = {}
    if policy.state_size > 0:
        labels = np.repeat(np.arange(n), np.random.default_rng(0).integers(1, 30, n))[:n]
        context = dict(states=th.randn(n, policy.state_size).tanh(), sequences=th.as_tensor(labels))
    with th.no_grad():
        actions = policy(observations)[0].reshape(n, -1)
        log_prob = policy.evaluate_actions(observations, actions, **context)[0]
    return GroupRolloutBufferSamples(
        observations,
        actions.flatten() if isinstance(policy.action_space, spaces.Discrete) else actions.float(),
        log_prob + 0.2 * th.randn(n),
        th.randn(n),
        th.zeros(n, dtype=th.long),
        2.0 * th.rand(n) if weighted else None,
        **context,
    )


def distant_reference(policy: ActorPolicy) -> KLPenalty:
    """A KL penalty whose reference is at some distance from the policy."""
    penalty, kept = KLPenalty("initial", "exact"), copy.deepcopy(policy.state_dict())
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * th.randn_like(parameter))
        penalty.renew(policy)
        policy.load_state_dict(kept)
    return penalty


def numbers(policy: ActorPolicy) -> dict[str, th.Tensor]:
    """Parameters, moments and number of steps. Torch makes the moments when it takes the first step."""
    state = policy.optimizer.state
    return {
        **{name: parameter.detach().clone() for name, parameter in policy.named_parameters()},
        **{
            f"{key} of {name}": state.get(parameter, {}).get(key, th.zeros(1)).clone()
            for name, parameter in policy.named_parameters()
            for key in ("exp_avg", "exp_avg_sq", "step")
        },
    }


def differences(found: dict[str, th.Tensor], expected: dict[str, th.Tensor]) -> dict[str, float]:
    """
    Largest difference of each tensor, relative to its largest number, and for moments to the largest of all tensors: the
    gradient of a single bias may be a sum of numbers that cancel.
    """
    assert found.keys() == expected.keys()
    sizes = {name: expected[name].abs().max().item() for name in expected}
    kinds = {name: name.split(" of ")[0] for name in expected}
    largest = {kind: max(size for name, size in sizes.items() if kinds[name] == kind) for kind in kinds.values()}
    return {name: (found[name] - expected[name]).abs().max().item() / (largest[kinds[name]] + 1e-12) for name in expected}


# --- the functions ---


@needs_numba
def test_tanh_is_that_of_torch_to_rounding_and_keeps_nan():
    x = np.concatenate([np.linspace(-12, 12, 2001), np.logspace(-30, 0, 200), [0.0, np.inf, -np.inf]]).astype(np.float32)
    # The forward pass activates what a network of one layer, with a weight of one and no bias, gets as hidden values.
    sizes, one = np.array([1, 1]), np.array([1.0, 0.0], np.float32)

    def activated(values: np.ndarray, activation: int) -> np.ndarray:
        both = np.concatenate([values, np.empty_like(values)])
        layers.forward.run(sizes, activation, True, one, both, len(values))
        return both[len(values) :]

    np.testing.assert_allclose(activated(x, layers.TANH), th.from_numpy(x).tanh().numpy(), rtol=5e-7, atol=1e-37)
    nan = np.array([np.nan], np.float32)
    for activation in (layers.TANH, layers.RELU):
        assert np.isnan(activated(nan, activation)).all()


def test_limits_are_those_of_torch():
    assert (optimizer.MAX_LOG_RATIO, layers.MAX_STANDARDISED) == (losses.MAX_LOG_RATIO, normalization.MAX_STANDARDISED)


NO_NUMBERS, NO_CHOICES = np.zeros(0, np.float32), np.zeros(0, np.int64)


def close(found: np.ndarray, expected: th.Tensor | None) -> None:
    assert expected is not None
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=3e-5)


def torch_distribution(action_space: spaces.Space, outputs: th.Tensor, log_std: th.Tensor) -> Any:
    distribution: Any = make_proba_distribution(action_space)
    if isinstance(distribution, DiagGaussianDistribution):
        return distribution.proba_distribution(outputs, log_std)
    return distribution.proba_distribution(outputs)


@needs_numba
@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("has_reference", [False, True], ids=["alone", "with a reference"])
def test_values_and_gradients_of_distributions_are_those_of_autograd(space: spaces.Space, has_reference: bool):
    family = FAMILIES[type(make_proba_distribution(space))]
    choices = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 0))).astype(np.int64)
    k = int(choices.sum()) if family is CATEGORICAL else int(np.prod(space.shape))  # type: ignore[arg-type]
    outputs, reference_outputs = th.randn(N, k, requires_grad=True), th.randn(N, k)
    log_std, reference_log_std = th.randn(k, requires_grad=True), th.randn(k)
    pi, q = torch_distribution(space, outputs, log_std), torch_distribution(space, reference_outputs, reference_log_std)
    actions, up = pi.sample().detach(), th.randn(3, N)
    kl = losses.exact_kl(pi, q) if has_reference else th.zeros(N)
    expected = th.stack([pi.log_prob(actions), pi.entropy(), kl])
    (up * expected).sum().backward()

    terms, gradient, grad_log_std = np.zeros((3, N), np.float32), np.zeros((N, k), np.float32), np.zeros(k, np.float32)
    rows, reference = outputs.detach().numpy().copy(), reference_outputs.numpy() if has_reference else NO_ROWS
    for each in (rows, reference) if family is CATEGORICAL else ():
        distributions.log_softmax.run(each, choices)
    known = (
        rows,
        log_std.detach().numpy(),
        choices,
        reference,
        reference_log_std.numpy(),
        actions.reshape(N, -1).float().numpy(),
    )
    family.evaluate.run(*known, terms)
    family.backward.run(*known, up.numpy(), gradient, grad_log_std)
    close(terms, expected)
    close(gradient, outputs.grad)
    close(grad_log_std, th.zeros(k) if log_std.grad is None else log_std.grad)


@needs_numba
def test_a_forbidden_action_spoils_neither_entropy_nor_divergence_nor_gradient():
    log_p, choices = np.array([[0.0, 0.0, -np.inf]], np.float32), np.array([3])
    distributions.log_softmax.run(log_p, choices)
    terms, gradient, action = np.zeros((3, 1), np.float32), np.ones((1, 3), np.float32), np.zeros((1, 1), np.float32)
    known = log_p, NO_NUMBERS, choices, log_p.copy(), NO_NUMBERS, action
    CATEGORICAL.evaluate.run(*known, terms)
    CATEGORICAL.backward.run(*known, np.ones((3, 1), np.float32), gradient, NO_NUMBERS)
    assert terms[:, 0] == pytest.approx([-math.log(2.0), math.log(2.0), 0.0], abs=1e-6)
    assert gradient[0] == pytest.approx([0.5, -0.5, 0.0], abs=1e-6)


def assert_the_network_is_that_of_torch(
    network: Network,
    parts: Sequence[nn.Module],
    x: th.Tensor,
    torch_network: Callable[[th.Tensor], th.Tensor],
    running: np.ndarray = NO_STEPS,
    states: np.ndarray = NO_ROWS,
) -> None:
    """Compare outputs, the gradient, and the derivative in a direction of parameters, with those of autograd."""
    tensors: list[Any] = [tensor for layer in parts for tensor in layer.parameters()]

    def flat(of: Callable[[Any], Any]) -> np.ndarray:
        return th.cat([of(tensor).flatten() for tensor in tensors]).detach().numpy()

    expected = torch_network(x)
    up, vector, n = th.randn_like(expected), [th.randn_like(tensor) for tensor in tensors], len(x)
    (up * expected).sum().backward()
    parameters, values = flat(lambda tensor: tensor), network.new_values(n, len(states))
    values[: x.numel()] = x.flatten().numpy()
    outputs = network.forward(parameters, values, n, NO_ROWS, running, states)
    np.testing.assert_allclose(outputs, expected.detach(), rtol=1e-5, atol=1e-6)
    tangent = network.tangent(parameters, values, th.cat([each.flatten() for each in vector]).numpy(), n, running)
    gradient = np.full_like(parameters, np.nan)
    network.backward(parameters, values, up.numpy(), gradient, running)
    np.testing.assert_allclose(gradient, flat(lambda tensor: tensor.grad), rtol=1e-4, atol=1e-6)
    # Two derivatives backward are one forward: of v' J' u with respect to u
    weights = th.zeros_like(expected, requires_grad=True)
    pulled = th.autograd.grad(torch_network(x), tensors, weights, create_graph=True)
    along = sum((one * other).sum() for one, other in zip(pulled, vector, strict=True))
    close(tangent, th.autograd.grad(along, weights)[0])  # type: ignore[arg-type]


@needs_numba
@pytest.mark.parametrize("activation", [layers.TANH, layers.RELU], ids=["tanh", "relu"])
@pytest.mark.parametrize("hidden", [[], [5], [4, 6, 3]], ids=str)
def test_a_network_and_its_derivatives_are_those_of_torch(activation: int, hidden: list[int]):
    sizes = [3, *hidden, 2]
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    between = nn.Tanh if activation == layers.TANH else nn.ReLU
    in_torch = nn.Sequential(linear[0], *(each for layer in linear[1:] for each in (between(), layer)))
    network = Network(np.array(sizes), FirstLayer(), activation, BERNOULLI, NO_CHOICES)
    assert_the_network_is_that_of_torch(network, linear, th.randn(7, 3), in_torch)


@needs_numba
@pytest.mark.parametrize("shape", [(4, 5, 2), (2, 4, 5)], ids=["channels last", "channels first"])
def test_a_convolution_and_its_derivatives_are_those_of_torch(shape: tuple[int, int, int]):
    extractor = SmallCNN(spaces.Box(0.0, 1.0, shape), features_dim=3, n_channels=4)
    convolution, linear = extractor.cnn[0], extractor.linear[0]
    assert isinstance(linear, nn.Linear)

    def in_torch(x: th.Tensor) -> th.Tensor:
        return linear(extractor.cnn(x if extractor.channels_first else x.permute(0, 3, 1, 2)))

    network = Network(
        np.array([40, 4 * 6, 3]), Convolution(40, 4 * 6, extractor.patches()), layers.RELU, BERNOULLI, NO_CHOICES
    )
    assert_the_network_is_that_of_torch(network, [convolution, linear], th.randn(7, *shape), in_torch)


@needs_numba
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("running", [[1], [1] * 6, [20, 5, 3, 3, 1]], ids=["step", "sequence", "sequences"])
def test_a_recurrent_layer_and_its_derivatives_are_those_of_torch(layer: Any, running: list[int]):
    memory, linear, m = layer(3, 5), nn.Linear(5, 2), running[0]
    network = Network(np.array([3, 5, 2]), Recurrent(3, 5, CELLS_OF_TORCH[layer]), layers.TANH, BERNOULLI, NO_CHOICES)
    states = th.randn(m, network.first.state_size).tanh()
    before = tuple(part[None].contiguous() for part in states.split(5, dim=1))

    def in_torch(x: th.Tensor) -> th.Tensor:
        packed = nn.utils.rnn.PackedSequence(x, th.as_tensor(running))  # the same order of rows
        return linear(memory(packed, before if layer is nn.LSTM else before[0])[0].data)

    x = th.randn(sum(running), 3)
    assert_the_network_is_that_of_torch(network, [memory, linear], x, in_torch, np.array(running), states.numpy())


# --- the same numbers ---

#: Action spaces, activations and hidden layers
NETWORKS = (
    st.sampled_from(list(ACTION_SPACES)),
    st.sampled_from([nn.Tanh, nn.ReLU]),
    st.lists(st.integers(1, 20), max_size=3),
)
#: A policy for pictures of 4 x 5 with two channels, which has ReLU everywhere
BOARD: dict[str, Any] = dict(
    observation_space=spaces.Box(-1.0, 1.0, (4, 5, 2)),
    features_extractor_class=SmallCNN,
    features_extractor_kwargs=dict(features_dim=6, n_channels=3),
    activation_fn=nn.ReLU,
    normalize_observations=False,
)
#: A picture or a recurrent layer before the linear layers, or neither
FIRST_LAYERS: dict[str, dict[str, Any]] = {"none": {}, "board": BOARD, **CELLS}
PENALTIES = dict(ent_coef=st.sampled_from([0.0, 0.05]), kl_coef=st.sampled_from([0.0, 0.3]))


def assert_each_its_way(objective: Objective, policies: tuple[ActorPolicy, ActorPolicy], update: Any) -> None:
    ours, theirs = (machine_policy(policy, (objective, Samples(update), "clipped")) for policy in policies)
    assert isinstance(ours, MachinePolicy) and isinstance(theirs, str)


@needs_numba
@settings(max_examples=60)
@given(
    *NETWORKS,
    st.fixed_dictionaries(
        dict(
            **PENALTIES,
            clip=st.sampled_from([(0.2, 0.2), (0.1, 0.4)]),
            max_grad_norm=st.sampled_from([0.1, 1e6]),
            target_kl=st.sampled_from([None, 0.002, 1.0]),
            weighted=st.booleans(),
            normalize=st.booleans(),
            first=st.sampled_from(list(FIRST_LAYERS)),
            log_std_lr_factor=st.sampled_from([1.0, 3.0]),
            batch_size=st.sampled_from([7, 16, 64]),
            seed=st.integers(0, 100),
        )
    ),
)
def test_an_update_gives_the_parameters_moments_and_metrics_of_torch(
    space: str, activation_fn: type[nn.Module], net_arch: list[int], options: dict[str, Any]
):
    with th.random.fork_rng():
        th.manual_seed(options["seed"])
        kwargs: dict[str, Any] = dict(net_arch=net_arch, activation_fn=activation_fn)
        kwargs["normalize_observations"] = options["normalize"]
        if space in ("Box", "matrix of actions"):
            kwargs["log_std_lr_factor"] = options["log_std_lr_factor"]
        kwargs.update(FIRST_LAYERS[options["first"]])
        policies = pair(ACTION_SPACES[space], **kwargs)
        for policy in policies:
            policy.set_learning_rate(1e-3)
            if policy.normalizer is not None:
                policy.normalizer.observe(np.random.default_rng(1).normal(1.0, 3.0, size=(50, 3)))
        update = random_update(policies[1], N, options["weighted"])
        penalty = distant_reference(policies[1])
        arguments = options["ent_coef"], options["kl_coef"], penalty, options["max_grad_norm"]
        objective = Objective(ClipRange(*options["clip"]), "step", *arguments)
        results = []
        for policy in policies:
            state = np.random.get_state()
            np.random.seed(options["seed"])
            report = clipped_update(objective, policy, Samples(update), 2, options["batch_size"], options["target_kl"])
            np.random.set_state(state)
            results.append((describe_update(report), report.excessive_kl, len(report.epochs)))
    assert_each_its_way(objective, policies, update)
    far = {name: each for name, each in differences(numbers(policies[0]), numbers(policies[1])).items() if each > 1e-5}
    assert not far
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-6)
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-4)


@needs_numba
@settings(max_examples=40)
@given(
    *NETWORKS,
    st.fixed_dictionaries(
        dict(
            **PENALTIES,
            weighted=st.booleans(),
            first=st.sampled_from(list(FIRST_LAYERS)),
            limit=st.sampled_from([0.001, 0.02]),
            n=st.sampled_from([1, 40, 1500]),
            seed=st.integers(0, 100),
        )
    ),
)
def test_a_natural_gradient_step_gives_the_parameters_and_metrics_of_torch(
    space: str, activation_fn: type[nn.Module], net_arch: list[int], options: dict[str, Any]
):
    with th.random.fork_rng():
        th.manual_seed(options["seed"])
        kwargs = {"net_arch": net_arch, "activation_fn": activation_fn, **FIRST_LAYERS[options["first"]]}
        policies = pair(ACTION_SPACES[space], **kwargs)
        update = random_update(policies[1], options["n"], options["weighted"])
        penalty = distant_reference(policies[1])
        objective = Objective(ClipRange(0.2, 0.2), "step", options["ent_coef"], options["kl_coef"], penalty, 0.5)
        before = copy.deepcopy(policies[1])
        results = [natural_update(objective, policy, Samples(update), options["limit"]) for policy in policies]
    assert_each_its_way(objective, policies, update)
    tried = [(result.natural.n_tried, result.natural.is_accepted) for result in results if result.natural is not None]
    if tried[0] == tried[1]:  # rounding may decide whether a step that is about as long as allowed is taken
        found, expected = (dict(policy.named_parameters()) for policy in policies)
        assert tried[0][1]
        changes = {name: (expected[name] - old).abs().max().item() for name, old in before.named_parameters()}
        for name, change in changes.items():
            assert (found[name] - expected[name]).abs().max().item() <= 0.01 * max(changes.values()), (name, change)
        assert describe_update(results[0]) == pytest.approx(describe_update(results[1]), rel=1e-2, abs=1e-4)


OBSERVATION_SPACES = {
    "vector": VECTOR,
    "matrix": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "integers": spaces.Box(0, 9, (3,), np.int64),
    "Discrete": spaces.Discrete(5),
    "MultiBinary": spaces.MultiBinary(3),
    "board": spaces.Box(0.0, 1.0, (5, 4, 3), np.float32),
    "board of bytes": spaces.Box(0, 255, (3, 5, 4), np.uint8),
    "image": spaces.Box(0, 255, (1, 36, 36), np.uint8),
}


@needs_numba
@pytest.mark.parametrize("observations", OBSERVATION_SPACES.values(), ids=OBSERVATION_SPACES)
@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("n", [1, 30])
def test_the_same_random_numbers_give_the_same_actions(space: spaces.Space, observations: spaces.Space, n: int):
    kwargs = BOARD if len(observations.shape or ()) == 3 else {}
    policy, in_torch = pair(space, **{**kwargs, "observation_space": observations, "normalize_observations": True})
    observations.seed(0)
    obs = np.stack([observations.sample() for _ in range(n)])
    if policy.normalizer is not None:
        policy.normalizer.observe((3.0 * obs + 1.0).astype(obs.dtype))
        in_torch.load_state_dict(policy.state_dict())
    results = []
    for act in (choose_actor(in_torch), choose_actor(policy)):
        th.manual_seed(1)
        actions, log_prob = act(obs, th.as_tensor(obs))
        results.append([th.as_tensor(actions), log_prob, th.randn(1)])
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and not theirs.requires_grad
        th.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert isinstance(machine_policy(in_torch), str) and isinstance(machine_policy(policy), MachinePolicy)


@needs_numba
@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_same_states_give_the_same_actions_and_the_same_next_states(space: spaces.Space, cell: dict[str, Any]):
    policies, obs, results = pair(space, **cell), np.random.default_rng(0).normal(size=(30, 3)), []
    for policy in policies:
        states = np.linspace(-0.9, 0.9, 30 * policy.state_size, dtype=np.float32).reshape(30, -1)
        th.manual_seed(1)
        results.append(choose_actor(policy)(obs, th.as_tensor(obs), states=states))
    for ours, theirs in zip(*results, strict=True):
        th.testing.assert_close(th.as_tensor(ours), th.as_tensor(theirs), rtol=1e-5, atol=1e-5)
    assert results[0][2].dtype == np.float32 and isinstance(machine_policy(policies[0]), MachinePolicy)


@needs_numba
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_state_of_an_environment_does_not_depend_on_how_many_others_act(cell: dict[str, Any]):
    policy, obs = make_policy(cls=MlpLstmPolicy, **cell), np.random.default_rng(0).normal(size=(15, 3))
    states, act = np.full((15, policy.state_size), 0.5, np.float32), choose_actor(policy)
    together = act(obs, obs, states=states)[2]
    alone = [act(obs[i : i + 1], obs, states=states[:1])[2] for i in range(15)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@needs_numba
def test_actions_are_as_frequent_as_they_are_probable():
    policy = make_policy(spaces.Discrete(3), net_arch=[])
    policy.action_net.weight.data.zero_()
    policy.action_net.bias.data.copy_(th.tensor([0.0, math.log(3.0), -math.inf]))
    actions, log_prob = choose_actor(policy)(np.zeros((20_000, 3)), th.zeros(20_000, 3))
    assert np.bincount(actions, minlength=3) / 20_000 == pytest.approx([0.25, 0.75, 0.0], abs=0.01)
    th.testing.assert_close(log_prob.exp(), th.tensor([0.25, 0.75, 0.0])[actions])


class Actions(BaseCallback):
    """Remembers the actions and the log-probabilities of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.actions.append(self.locals["actions"])
        self.log_probs.append(self.locals["log_probs"].numpy())
        return True


class Lamp(gym.Env):
    """A board of random numbers. The second action is right if the first of them is positive, and the first one else."""

    observation_space, action_space = BOARD["observation_space"], spaces.Discrete(2)

    def _board(self) -> np.ndarray:
        self.board = self.np_random.uniform(-1.0, 1.0, size=(4, 5, 2)).astype(np.float32)
        return self.board

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._board(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t, reward = self.t + 1, float(action == (self.board[0, 0, 0] > 0))
        return self._board(), reward, self.t == 20, False, {}


gym.register("Lamp-v0", lambda **_: Lamp())

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "Discrete, entropy, weights": ("CartPole-v1", dict(ent_coef=0.01, objective=dict(loss_aggregation="trajectory"))),
    "Discrete, old policy": ("CartPole-v1", dict(objective=dict(kl_coef=0.1, kl_reference="old"))),
    "Box, clipping": ("Pendulum-v1", dict(objective=dict(clip_range_high=0.3), target_kl=0.5)),
    "board": (
        "Lamp-v0",
        dict(policy_kwargs={name: BOARD[name] for name in BOARD.keys() - {"observation_space", "normalize_observations"}}),
    ),
    "Box, first policy, schedule": (
        "Pendulum-v1",
        dict(objective=dict(kl_coef=0.1), learning_rate=lambda progress: 1e-3 * progress),
    ),
}


@needs_numba
@pytest.mark.parametrize(("env", "options"), RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("memory", [False, True], ids=["no memory", "memory"])
def test_runs_are_the_same_in_machine_code_and_in_torch(env: str, options: dict[str, Any], memory: bool):
    if memory:
        options = dict(options, policy_kwargs=CELLS["lstm"], update_rule="clipped")
    algorithm: Any = RecurrentGRPO if memory else GRPO
    # Few and small steps: rounding grows with every update, and a single other action would make another run.
    settings: dict[str, Any] = dict(n_steps=64, batch_size=32, n_epochs=4, seed=3, device="cpu", **options)
    watchers = [Actions(), Actions()]
    policies: list[Any] = ["MlpLstmPolicy", InTorchWithMemory] if memory else ["MlpPolicy", InTorch]
    models = [
        algorithm(policy, env, **settings).learn(192, callback=watcher)
        for policy, watcher in zip(policies, watchers, strict=True)
    ]
    assert [isinstance(machine_policy(model.policy), str) for model in models] == [False, True]
    np.testing.assert_allclose(watchers[0].actions, watchers[1].actions, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(watchers[0].log_probs, watchers[1].log_probs, rtol=1e-3, atol=1e-4)
    th.testing.assert_close(*(dict(model.policy.named_parameters()) for model in models), rtol=1e-3, atol=1e-5)
    assert models[0].update_metrics == pytest.approx(models[1].update_metrics, rel=1e-2, abs=1e-4)
    initial = algorithm(policies[0], env, **settings).policy
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(initial.parameters(), models[0].policy.parameters(), strict=True))


@needs_numba
def test_nothing_is_compiled_after_the_warm_up():
    for env, options in RUNS.values():
        GRPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0, device="cpu", **options).learn(32)
    GRPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, update_rule="natural", seed=0, device="cpu").learn(32)
    assert [len(each.run.signatures) for each in ENTRY_POINTS] == [1] * len(ENTRY_POINTS)


INNER = [
    each for of in (linear_algebra, layers, recurrent, distributions) for each in vars(of).values() if hasattr(each, "py_func")
]


@needs_numba
def test_inner_functions_are_compiled_once_each():
    """Each specialisation costs every user seconds at the first run. Functions from the cache do not count."""
    for each in ENTRY_POINTS:
        if each.function.__module__ in (layers.__name__, recurrent.__name__):
            each._compile(uses_cache=False)
    counts = {each.py_func.__name__: len(each.signatures) for each in INNER}
    assert max(counts.values()) == 1, counts
    assert counts["matmul"] == counts["add_products"] == counts["dot_products"] == 1


def needed(network: Network, rule: Any) -> set[str]:
    """:return: Names of functions; those of recurrent layers have the name of their module in front"""
    functions = [each.function for each in network.update_entry_points(rule)]
    return {("recurrent " if each.__module__ == recurrent.__name__ else "") + each.__name__ for each in functions}


def test_a_run_needs_only_the_functions_of_its_policy_and_its_update():
    families = {"gaussian": GAUSSIAN, "categorical": CATEGORICAL, "bernoulli": BERNOULLI}
    networks = {
        name: Network(np.array([3, 4, 2]), FirstLayer(), layers.TANH, family, NO_CHOICES) for name, family in families.items()
    }
    common = {"standardise", "forward", "surrogate", "backward"}
    for name, network in networks.items():
        own = {f"{each}_{name}" for each in ("sample", "evaluate", "backward")}
        own |= {"log_softmax"} if name == "categorical" else set()
        assert needed(network, "clipped") == common | own | {"clip_gradient", "adam"}
        assert needed(network, "natural") == common | own | {"forward_tangent", f"fisher_{name}"}
    pictures = Network(
        np.array([40, 24, 3]), Convolution(40, 24, np.zeros((18, 6), np.int64)), layers.RELU, GAUSSIAN, NO_CHOICES
    )
    assert needed(pictures, "clipped") - needed(networks["gaussian"], "clipped") == {"convolve", "convolve_backward"}
    memory = Network(np.array([3, 4, 2]), Recurrent(3, 4, recurrent.GRU), layers.TANH, GAUSSIAN, NO_CHOICES)
    extra = {rule: needed(memory, rule) - needed(networks["gaussian"], rule) for rule in ("clipped", "natural")}
    assert extra["clipped"] == {"recurrent forward", "recurrent backward"}
    assert extra["natural"] == {*extra["clipped"], "recurrent forward_tangent"}


# --- one memory ---


def trained(cls: str | type[ActorPolicy] = "MlpPolicy", **options: Any) -> GRPO:
    return GRPO(cls, "Pendulum-v1", n_steps=32, batch_size=16, n_epochs=2, seed=0, device="cpu", **options).learn(32)


def set_alone(policy: ActorPolicy) -> None:
    policy.load_state_dict({name: 1.01 * value for name, value in policy.state_dict().items()}, assign=True)


def replace_data(policy: ActorPolicy) -> None:
    for parameter in policy.parameters():
        parameter.data = 1.01 * parameter.data


def write(policy: ActorPolicy) -> None:
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)


def reload_optimizer(policy: ActorPolicy) -> None:
    state = copy.deepcopy(policy.optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"] *= 2.0
    policy.optimizer.load_state_dict(state)


def change_decay(policy: ActorPolicy) -> None:
    for group in policy.optimizer.param_groups:
        group["betas"], group["eps"] = (0.5, 0.9), 1e-3


CHANGES: dict[str, Callable[[ActorPolicy], None]] = {
    "load_state_dict with assign": set_alone,
    "new data": replace_data,
    "in place": write,
    "load_state_dict of the optimizer": reload_optimizer,
    "options of Adam": change_decay,
}


@needs_numba
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_from_outside_reach_machine_code_and_its_changes_reach_torch(change: Callable[[ActorPolicy], None]):
    found = []
    classes: list[Any] = ["MlpPolicy", InTorch]
    for cls in classes:
        model = trained(cls)
        change(model.policy)
        model.learn(64, reset_num_timesteps=False)
        found.append(numbers(model.policy))
    assert max(differences(*found).values()) < 3e-3


@needs_numba
def test_weights_that_change_during_a_rollout_act_at_once():
    class Freeze(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 16:
                with th.no_grad():
                    self.model.policy.log_std.fill_(-20.0)  # type: ignore[operator]
                    self.model.policy.action_net.weight.zero_()  # type: ignore[operator, union-attr]
                    self.model.policy.action_net.bias.fill_(0.5)  # type: ignore[operator, union-attr]
            return True

    model, seen = GRPO("MlpPolicy", "Pendulum-v1", n_steps=32, batch_size=16, seed=0, device="cpu"), Actions()
    model.learn(32, callback=[Freeze(), seen])
    np.testing.assert_allclose(np.ravel(seen.actions[16:]), 0.5, atol=1e-6)
    assert np.ptp(seen.actions[:16]) > 0.1


@needs_numba
def test_a_copy_and_a_pickle_of_a_policy_have_their_own_memory():
    policy = trained().policy
    before = numbers(policy)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        th.testing.assert_close(dict(other.named_parameters()), dict(policy.named_parameters()), rtol=0, atol=0)
        assert isinstance(machine_policy(other), MachinePolicy)
        write(other)
        assert max(differences(numbers(policy), before).values()) == 0.0


# --- which policies ---


class OwnForward(ActorPolicy):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnLatent(ActorPolicy):
    def _latent(self, obs: Any) -> Any:
        return super()._latent(2.0 * obs)


class OwnEvaluation(ActorPolicy):
    def evaluate_distribution(self, *args: Any) -> Any:
        log_prob, entropy = super().evaluate_distribution(*args)
        assert entropy is not None
        return log_prob, 2.0 * entropy


class OwnCNN(SmallCNN):
    pass


class OwnMemory(MlpLstmPolicy):
    def remember(self, obs: Any, states: Any, sequences: Any = None) -> Any:
        return super().remember(2.0 * obs, states, sequences)


def with_memory(cls: type[ActorPolicy] = MlpLstmPolicy, **kwargs: Any) -> Callable[[], ActorPolicy]:
    return lambda: make_policy(cls=cls, **kwargs)


def altered(change: Callable[[Any], Any], **kwargs: Any) -> Callable[[], ActorPolicy]:
    """:return: Function that makes a policy and changes it in place"""

    def make() -> ActorPolicy:
        policy = make_policy(**kwargs)
        change(policy)
        return policy

    return make


def with_net(*modules: nn.Module) -> Callable[[], ActorPolicy]:
    return altered(lambda policy: setattr(policy, "policy_net", nn.Sequential(*modules)))


def listen(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


ACTS_IN_ITS_OWN_WAY = {
    "forward": lambda: make_policy(cls=OwnForward),
    "_latent": lambda: make_policy(cls=OwnLatent),
    "hook on the policy": altered(listen),
}
NOT_FOR_MACHINE_CODE = {
    **ACTS_IN_ITS_OWN_WAY,
    "evaluate_distribution": lambda: make_policy(cls=OwnEvaluation),
    "method of the object": altered(lambda policy: setattr(policy, "evaluate_actions", lambda obs, actions: None)),
    "activation": lambda: make_policy(activation_fn=nn.ELU),
    "several activations": with_net(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU()),
    "normalisation": with_net(nn.Linear(3, 64), nn.LayerNorm(64), nn.Tanh()),
    "no bias": altered(lambda policy: setattr(policy, "action_net", nn.Linear(64, 4, bias=False))),
    "tied weights": altered(
        lambda policy: setattr(policy.policy_net[4], "weight", policy.policy_net[2].weight), net_arch=[8] * 3
    ),
    "frozen weight": altered(lambda policy: policy.policy_net[0].requires_grad_(False)),
    "another parameter": altered(lambda policy: setattr(policy, "bonus", nn.Linear(1, 1))),
    "forward of a layer": altered(lambda policy: setattr(policy.policy_net[0], "forward", lambda x: x)),
    "hook on a layer": altered(lambda policy: listen(policy.action_net)),
    "hook on a gradient": altered(lambda policy: policy.action_net.weight.register_hook(lambda gradient: gradient)),
    "double precision": altered(lambda policy: policy.double()),
    "shared memory": altered(lambda policy: policy.share_memory()),
    "torch.compile": lambda: th.compile(make_policy(), backend="eager"),
    "gSDE": lambda: make_policy(BOX, use_sde=True),
    "many weights": lambda: make_policy(net_arch=[512, 600]),
    "another convolution": altered(
        lambda policy: setattr(policy.features_extractor.cnn[0], "padding_mode", "circular"), **BOARD
    ),
    "subclass of the extractor": lambda: make_policy(**{**BOARD, "features_extractor_class": OwnCNN}),
    "remember": with_memory(OwnMemory),
    "two recurrent layers": with_memory(n_lstm_layers=2),
    "recurrent layer without a bias": with_memory(lstm_kwargs=dict(bias=False)),
    "memory after a convolution": with_memory(**BOARD),
    "another memory": altered(lambda policy: setattr(policy, "memory", nn.RNN(3, 64)), cls=MlpLstmPolicy),
    "hook on the memory": altered(lambda policy: listen(policy.memory), cls=MlpLstmPolicy),
    "images": lambda: make_policy(observation_space=spaces.Box(0, 255, (1, 36, 36), np.uint8)),
    "Dict observations": lambda: MultiInputPolicy(spaces.Dict({"a": VECTOR}), DISCRETE, lambda _: 1e-3),
}


@needs_numba
@pytest.mark.parametrize("make", NOT_FOR_MACHINE_CODE.values(), ids=NOT_FOR_MACHINE_CODE)
def test_an_unusual_policy_stays_with_torch(make: Callable[[], Any]):
    assert isinstance(machine_policy(make_policy()), MachinePolicy)
    assert isinstance(machine_policy(make_policy(cls=MlpLstmPolicy)), MachinePolicy)
    assert isinstance(machine_policy(make()), str)


@needs_numba
def test_a_hook_on_all_modules_is_noticed():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert machine_policy(make_policy()) == "there are hooks on the policy"
    finally:
        handle.remove()
    assert isinstance(machine_policy(make_policy()), MachinePolicy)


@pytest.mark.parametrize("make", ACTS_IN_ITS_OWN_WAY.values(), ids=ACTS_IN_ITS_OWN_WAY)
def test_a_policy_that_acts_in_its_own_way_is_asked_itself(make: Callable[[], ActorPolicy]):
    policy, obs = make(), th.randn(N, 3)
    th.manual_seed(1)
    actions, log_prob = choose_actor(policy)(obs.numpy(), obs)
    th.manual_seed(1)
    th.testing.assert_close((th.as_tensor(actions), log_prob), policy(obs), rtol=0, atol=0)


class OwnMinibatches(Samples):
    def get(self, *args: Any, **kwargs: Any) -> Iterator[GroupRolloutBufferSamples]:
        yield self.update


def with_optimizer(optimizer_class: type[th.optim.Optimizer] = th.optim.Adam, **kwargs: Any) -> ActorPolicy:
    return make_policy(optimizer_class=optimizer_class, optimizer_kwargs=kwargs)


def with_scheduler() -> ActorPolicy:
    policy = make_policy()
    th.optim.lr_scheduler.StepLR(policy.optimizer, 1)
    return policy


def an_update(level: Any = "step", estimator: Any = "exact") -> Objective:
    return Objective(ClipRange(0.2, 0.2), level, 0.0, 0.1, KLPenalty("initial", estimator), 0.5)


UNUSUAL_UPDATES: dict[str, tuple[Callable[[], ActorPolicy], type[Samples], Objective, str]] = {
    "optimizer": (lambda: with_optimizer(th.optim.AdamW), Samples, an_update(), "the optimizer is AdamW"),
    "weight decay": (lambda: with_optimizer(weight_decay=0.1), Samples, an_update(), "the optimizer has weight_decay=0.1"),
    "scheduler": (with_scheduler, Samples, an_update(), "there are hooks on the optimizer"),
    "minibatches": (make_policy, OwnMinibatches, an_update(), "OwnMinibatches overrides `get`"),
    "GSPO": (make_policy, Samples, an_update("trajectory"), "`importance_sampling_level` is 'trajectory'"),
    "estimated divergence": (make_policy, Samples, an_update(estimator="k3"), "`kl_estimator` is 'k3'"),
}


@needs_numba
@pytest.mark.parametrize(("make", "buffer", "objective", "reason"), UNUSUAL_UPDATES.values(), ids=UNUSUAL_UPDATES)
def test_an_unusual_update_is_left_to_torch_and_acting_is_not(
    make: Callable[[], ActorPolicy], buffer: type[Samples], objective: Objective, reason: str
):
    policy = make()
    samples = buffer(random_update(policy, N))
    assert machine_policy(policy, (objective, samples, "clipped")) == reason
    assert isinstance(machine_policy(policy), MachinePolicy)
    usual = with_optimizer(eps=1e-7, fused=True)
    assert isinstance(machine_policy(usual, (an_update(), Samples(samples.update), "clipped")), MachinePolicy)


# --- what the user is told ---

SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "usual": ({}, "Acting and updating in machine code\n"),
    "estimated divergence": (
        dict(objective=dict(kl_coef=0.1, kl_estimator="k3")),
        "Acting in machine code, and updating with torch, because `kl_estimator` is 'k3'\n",
    ),
    "activation": (
        dict(policy_kwargs=dict(activation_fn=nn.ELU)),
        "Acting and updating with torch, because the activation is ELU, not Tanh or ReLU\n",
    ),
}


@needs_numba
@pytest.mark.parametrize(("options", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_one_sentence_says_who_does_the_arithmetic(options: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]):
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=1, verbose=1, device="cpu", **options)
    for _ in range(2):
        model.learn(32, log_interval=None)  # type: ignore[arg-type]
    assert capsys.readouterr().out.count(sentence) == 1


@needs_numba
def test_a_wait_for_the_compiler_is_announced_once_and_a_function_from_the_cache_is_not(capsys: Any, monkeypatch: Any):
    def learn() -> str:
        GRPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=1, verbose=1, device="cpu").learn(32)
        return capsys.readouterr().out

    assert "Compiling" not in learn()
    monkeypatch.setattr(EntryPoint, "compile", lambda self: True)
    output = learn()
    assert output.count("Compiling machine code") == 1
    assert output.index("Compiling machine code") < output.index("Acting and updating")


TRAINING = """
import torch
from sb3_grpo import GRPO
torch.set_num_threads(1)
model = GRPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=3, device="cpu", verbose=1)
model.learn(128, log_interval=None)
print("sum", sum(parameter.abs().sum().item() for parameter in model.policy.parameters()))
"""


def output_of(**environment: str) -> tuple[str, float]:
    """What a training in a new process prints, and the sum of its weights."""
    result = subprocess.run(
        [sys.executable, "-c", TRAINING], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout, float(result.stdout.split()[-1])


@pytest.fixture(scope="module")
def expected_sum() -> float:
    model = GRPO(InTorch, "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=3, device="cpu").learn(128)
    return sum(parameter.abs().sum().item() for parameter in model.policy.parameters())


def test_where_numba_is_missing_or_disabled_functions_stay_as_they_are_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch):
    def imported_again() -> Any:
        spec = importlib.util.spec_from_file_location("imported_again", jit.__file__)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    numba = pytest.importorskip("numba")
    with monkeypatch.context() as disabled:
        disabled.setattr(numba.config, "DISABLE_JIT", True)
        found = [imported_again()]
    monkeypatch.setitem(sys.modules, "numba", None)
    found.append(imported_again())
    assert [module.UNAVAILABLE for module in found] == ["NUMBA_DISABLE_JIT is set", "numba is not installed"]
    assert all(module.inner(len) is len for module in found)


def test_a_broken_numba_leaves_everything_to_torch_which_gives_the_same(tmp_path: Path, expected_sum: float):
    (tmp_path / "numba.py").write_text("raise RuntimeError('needs another numpy')", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    output, total = output_of(PYTHONPATH=path)
    assert "Acting and updating with torch, because numba cannot be imported (needs another numpy)\n" in output
    assert total == pytest.approx(expected_sum, rel=1e-6)


NOWHERE = dict(NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator")


@needs_numba
@pytest.mark.slow
def test_code_that_was_just_compiled_gives_the_numbers_of_code_from_the_cache(tmp_path: Path):
    totals = [output_of(NUMBA_CACHE_DIR=str(tmp_path))[1] for _ in range(2)]
    assert totals[0] == totals[1]


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("case", ["damaged", "nowhere", "two at once", "another CPU"])
def test_whatever_happens_to_the_cache_machine_code_works(case: str, tmp_path: Path, expected_sum: float):
    environment = dict(NUMBA_CACHE_DIR=str(tmp_path))
    if case == "damaged":
        output_of(**environment)
        kept = [file for file in tmp_path.rglob("*") if file.suffix in (".nbi", ".nbc")]
        assert kept
        for file in kept:
            file.write_bytes(b"damaged")
    elif case == "nowhere":
        (tmp_path / "file").touch()
        environment = dict(NUMBA_CACHE_DIR=str(tmp_path / "file" / "folder"), **NOWHERE)
    elif case == "another CPU":
        output_of(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", **environment)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(output_of, **environment) for _ in range(1 + (case == "two at once"))]
    for run in runs:
        output, total = run.result()
        assert "Acting and updating in machine code" in output
        assert total == pytest.approx(expected_sum, rel=1e-6)
