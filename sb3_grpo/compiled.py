"""
Acting and updating in machine code, for policies that are small networks on a CPU.

With such networks, most of the time goes into calling torch, not into arithmetic. :mod:`sb3_grpo.machine_code` has the
arithmetic, numba compiles it, and this module connects it with a policy and its optimizer: :func:`compiled_policy` says which
policies it is for. The numbers are those of torch up to rounding, and actions are drawn from the same random numbers.

**One memory.** The parameters of a policy, their gradients and Adam's moments lie in flat arrays, of which torch's tensors
are views. So saving, loading, ``predict`` and callbacks see the same numbers, and a run may change between both ways at any
update. Whatever replaces a tensor (``policy.to()``, ``optimizer.load_state_dict()``) is noticed before the next rollout or
update, and the flat arrays take over its numbers.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_grpo import machine_code
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.extractors import SmallCNN
from sb3_grpo.machine_code import BERNOULLI, CATEGORICAL, GAUSSIAN, RELU, TANH, Batch, Metrics, Network, Optimizer, Settings
from sb3_grpo.masks import forced_logits
from sb3_grpo.policies import ActorPolicy

#: Maps observations, as arrays and as tensors, and ``action_masks`` if there are any, to actions, shape
#: ``(n, *action_shape)``, and their log-probabilities, shape ``(n,)``.
Actor = Callable[..., tuple[np.ndarray, th.Tensor]]

#: Keys are exact classes: a subclass may mean something else.
FAMILIES: dict[type[Distribution], int] = {
    DiagGaussianDistribution: GAUSSIAN,
    CategoricalDistribution: CATEGORICAL,
    MultiCategoricalDistribution: CATEGORICAL,
    BernoulliDistribution: BERNOULLI,
}
#: Of a network without a convolution
NO_PATCHES = np.zeros((0, 0), np.int64)
#: Keys are exact classes, as above.
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}

#: With more weights, torch is faster. On one core of a server, machine code took 0.95 times torch's time with hidden layers of
#: 512 and 512 units, and 1.4 times with 768 and 768; 0.87 times with ``SmallCNN`` on boards of 14 x 14, and 1.2 on 20 x 20.
MAX_WEIGHTS = 300_000

#: Seconds of compiling that are worth a word. Loading from numba's cache takes about half a second.
LONG = 3.0

#: Methods that choose actions. A subclass that overrides one of them acts in its own way.
ACTING = (
    *("__call__", "forward", "extract_features", "get_distribution"),
    *("_distribution", "_distribution_of", "_latent", "_sample"),
)
#: Methods that evaluate actions.
EVALUATING = ("evaluate_actions", "evaluate_distribution")
#: Options of Adam that :func:`~sb3_grpo.machine_code.adam` does not have.
OTHER_OPTIONS = ("amsgrad", "weight_decay", "maximize", "capturable", "differentiable")


# --- numba ------------------------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """
    The compiled functions.

    :param act: :func:`~sb3_grpo.machine_code.act`
    :param update: :func:`~sb3_grpo.machine_code.update`
    :param evaluate_all: :func:`~sb3_grpo.machine_code.evaluate_all`
    :param linearize: :func:`~sb3_grpo.machine_code.linearize`
    :param fisher_product: :func:`~sb3_grpo.machine_code.fisher_product`
    :param divergence: :func:`~sb3_grpo.machine_code.divergence`
    :param seconds: Time that compiling them took
    """

    act: Callable[..., Any]
    update: Callable[..., Any]
    evaluate_all: Callable[..., Any]
    linearize: Callable[..., Any]
    fisher_product: Callable[..., Any]
    divergence: Callable[..., Any]
    seconds: float


#: The functions of :mod:`~sb3_grpo.machine_code` that are compiled, in the order of :class:`Compiled`
ENTRY_POINTS = Compiled._fields[:-1]


@functools.cache
def compile_functions() -> Compiled | str:
    """
    Compile the functions, or load them from numba's cache. Later calls do nothing.

    :return: The functions, or the reason why there are none
    """
    began = time.perf_counter()
    try:
        import numba
    except ImportError:
        return "numba is not installed"
    except Exception as error:  # for example a numpy that is newer than numba knows
        return f"numba cannot be imported ({error})"
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    reason = ""
    for cache in (True, False):  # the folders of the cache may be read-only, full or damaged
        try:
            jit = numba.njit(cache=cache, **machine_code.OPTIONS)
            functions = Compiled._make([*(jit(getattr(machine_code, name)) for name in ENTRY_POINTS), 0.0])
            _warm_up(functions)
            return functions._replace(seconds=time.perf_counter() - began)
        except Exception as error:
            reason = f"numba cannot compile it ({error})"
    return reason


def _warm_up(functions: Compiled) -> None:
    """Call the functions once with arguments of the types that they always have, so that numba compiles them now."""
    one, two, none = np.ones(1, np.float32), np.ones(2, np.float32), np.zeros((0, 1), np.float32)
    column = one.reshape(1, 1)
    network = Network(np.ones(2, np.int64), NO_PATCHES, TANH, BERNOULLI, np.ones(0, np.int64))
    optimizer = Optimizer(two, two, two, two, np.array([0, 1, 2]), np.full((2, 4), 0.5))
    batch = Batch(column, column, one, one, one, none, none.reshape(-1), none)
    settings = Settings(0.2, 0.2, 0.0, 0.0, 0.5, np.inf)
    metrics, values = np.zeros(len(Metrics._fields)), np.ones(2, np.float32)
    functions.act(network, two, one, one, np.ones((1, 1)), column, none, column.copy(), column.copy(), one.copy())
    functions.update(network, two.copy(), optimizer, batch, np.zeros(1, np.int64), 1, settings, metrics)
    functions.evaluate_all(network, two, batch, settings, two.copy(), metrics)
    functions.linearize(network, two, column, none, values)
    functions.fisher_product(network, two, values, 1, two, two.copy())
    functions.divergence(network, two, two, column, none)


# --- which policies ---------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """
    :param network: Description of a policy's network
    :param tensors: Its parameters: weight and bias of each layer, and ``log_std`` if there is one
    """

    network: Network
    tensors: list[nn.Parameter]


def is_unaltered(policy: ActorPolicy, methods: Sequence[str]) -> bool:
    """
    :param policy: Policy
    :param methods: Names of methods of ``ActorPolicy``
    :return: Whether no subclass, no attribute of the policy and no wrapper of ``torch.compile`` replaces one of them
    """
    return isinstance(policy, ActorPolicy) and all(_is_from(policy, ActorPolicy, name) for name in methods)


def _is_from(instance: object, base: type, method: str) -> bool:
    """
    :param instance: Instance of a class
    :param base: One of its base classes
    :param method: Name of a method
    :return: Whether the method is that of the base class, and neither a subclass nor the instance has replaced it
    """
    return getattr(getattr(instance, method), "__func__", None) is getattr(base, method)


def has_hooks(module: nn.Module) -> bool:
    """
    :param module: Any module
    :return: Whether there are hooks on it, on all modules, or on one of its own parameters, or its ``forward`` is replaced
    """
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module.parameters(recurse=False):
        hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # type: ignore[list-item]
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


def compiled_policy(
    policy: ActorPolicy,
    rollout_buffer: GroupRolloutBuffer | None = None,
    importance_sampling_level: str = "step",
    kl_estimator: str = "exact",
) -> "CompiledPolicy | str":
    """
    The conditions of machine code. It is for policies that

    - have linear layers with a bias, and tanh or ReLU between them, on a CPU and in single precision;
    - are not so large that torch is faster;
    - have a ``FlattenExtractor`` and no images, or a ``SmallCNN``, and distributions from ``FAMILIES``, so no gSDE;
    - choose and evaluate actions as :class:`~sb3_grpo.policies.ActorPolicy` does, without hooks;
    - have no other parameters, and train all of them;

    and for updates by Adam without extras, from minibatches that the buffer does not choose in its own way, with importance
    ratios of steps and the exact KL penalty.

    :param policy: Policy
    :param rollout_buffer: Buffer of an update; ``None`` for acting, for which the other arguments do not matter
    :param importance_sampling_level: Level of the importance ratios
    :param kl_estimator: Estimator of the KL penalty
    :return: The policy in machine code, which shares its memory, or a reason why torch is used, a clause
    """
    parts = _parts(policy)
    if isinstance(parts, str):
        return parts
    if rollout_buffer is not None:
        own = [name for name in ("get", "permutation") if not _is_from(rollout_buffer, GroupRolloutBuffer, name)]
        if own:
            return f"{type(rollout_buffer).__name__} overrides `{own[0]}`"
        if importance_sampling_level != "step":
            return f"`importance_sampling_level` is {importance_sampling_level!r}"
        if kl_estimator != "exact":
            return f"`kl_estimator` is {kl_estimator!r}"
        if reason := unusual_optimizer(policy):
            return reason
    functions = compile_functions()
    if isinstance(functions, str):
        return functions
    compiled: CompiledPolicy | None = vars(policy).get("_compiled")
    if compiled is None or not compiled.fits(parts):
        compiled = vars(policy)["_compiled"] = CompiledPolicy(functions, parts)
    compiled.take_over(None if rollout_buffer is None else policy.optimizer)
    return compiled


def describe_arithmetic(acting: "CompiledPolicy | str", updating: "CompiledPolicy | str") -> str:
    """
    :param acting: What :func:`compiled_policy` has found for acting
    :param updating: What it has found for updates
    :return: A sentence about who does the arithmetic of a run
    """
    if isinstance(acting, str):
        return f"Acting and updating with torch, because {acting}"
    if isinstance(updating, str):
        return f"Acting in machine code, and updating with torch, because {updating}"
    seconds = compile_functions().seconds  # type: ignore[union-attr]
    return "Acting and updating in machine code" + (f", compiled in {seconds:.0f} s" if seconds >= LONG else "")


def _parts(policy: ActorPolicy) -> Parts | str:
    """
    :param policy: Policy
    :return: The parts of which it consists, or a reason why they are not suitable
    """
    if not is_unaltered(policy, (*ACTING, *EVALUATING)):
        return f"{type(policy).__name__} chooses or evaluates actions in its own way"
    family = FAMILIES.get(type(policy.action_dist))
    if family is None:
        return f"the action distribution is {type(policy.action_dist).__name__}"
    modules = _layers(policy)
    if isinstance(modules, str):
        return modules
    layers, between = modules[::2], modules[1::2]
    extractor = policy.features_extractor
    linear = layers[1:] if isinstance(extractor, SmallCNN) else layers
    kinds = {type(module) for module in between} or {nn.Tanh}
    if any(type(module) is not nn.Linear or module.bias is None for module in linear) or len(layers) != len(between) + 1:
        return "the layers are not linear with a bias and an activation between them"
    if len(kinds) > 1 or not kinds <= set(ACTIVATIONS):
        return f"the activation is {' and '.join(sorted(kind.__name__ for kind in kinds))}, not Tanh or ReLU"
    if any(has_hooks(module) for module in (policy, *extractor.modules(), policy.policy_net, *modules)):
        return "there are hooks on the policy"
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    if family == GAUSSIAN:
        tensors.append(policy.log_std)
    if len(tensors) != len(set(tensors)) or set(tensors) != set(policy.parameters()):
        return "the policy has other parameters than those of its layers"
    if not all(tensor.requires_grad for tensor in tensors):
        return "some parameters are frozen"
    if any(tensor.device.type != "cpu" or tensor.dtype != th.float32 or tensor.is_shared() for tensor in tensors):
        return "the parameters are not in single precision in the memory of this process"
    if (n_weights := sum(tensor.numel() for tensor in tensors)) > MAX_WEIGHTS:
        return f"its products of large matrices are faster: the policy has {n_weights:,} weights"
    n_categories = []
    if isinstance(policy.action_dist, CategoricalDistribution):
        n_categories = [policy.action_dist.action_dim]
    elif isinstance(policy.action_dist, MultiCategoricalDistribution):
        n_categories = list(policy.action_dist.action_dims)
    sizes, patches = [linear[0].in_features, *(layer.out_features for layer in linear)], NO_PATCHES
    if isinstance(extractor, SmallCNN):
        sizes, patches = [get_flattened_obs_dim(policy.observation_space), *sizes], extractor.patches()
    network = Network(np.array(sizes), patches, ACTIVATIONS[kinds.pop()], family, np.array(n_categories, dtype=np.int64))
    return Parts(network, tensors)


def _layers(policy: ActorPolicy) -> list[Any] | str:
    """
    :param policy: Policy
    :return: The layers of its network, with what is between them, or a reason why they are not suitable
    """
    extractor = policy.features_extractor
    if type(extractor) is SmallCNN:
        if not extractor.is_as_built():
            return "the convolution has been replaced"
    elif type(extractor) is not FlattenExtractor:
        return f"the features extractor is {type(extractor).__name__}"
    elif is_image_space(policy.observation_space):
        return "the observations are images"
    if type(policy.policy_net) is not nn.Sequential:
        return f"the hidden layers are a {type(policy.policy_net).__name__}"
    first = [extractor.cnn[0], extractor.cnn[1], *extractor.linear] if isinstance(extractor, SmallCNN) else []
    return [*first, *policy.policy_net, policy.action_net]


def _inputs(policy: ActorPolicy, observations: PyTorchObs) -> th.Tensor:
    """:return: Inputs of the network: flattened pictures for ``SmallCNN``, else features, shape ``(n, n_inputs)``"""
    if not isinstance(policy.features_extractor, SmallCNN):
        return policy.extract_features(observations)
    pictures = policy.preprocess(observations)
    assert isinstance(pictures, th.Tensor)
    return pictures.flatten(start_dim=1)


def unusual_optimizer(policy: ActorPolicy) -> str:
    """
    :param policy: Policy
    :return: A reason why its optimizer is not suitable; empty if it is
    """
    optimizer = policy.optimizer
    if type(optimizer) is not th.optim.Adam:
        return f"the optimizer is {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in OTHER_OPTIONS:
            if group.get(option):
                return f"the optimizer has {option}={group[option]}"
    if {tensor for group in optimizer.param_groups for tensor in group["params"]} != set(policy.parameters()):
        return "the optimizer is not for all parameters"
    if "step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "there are hooks on the optimizer"
    return ""


# --- the policy in machine code ---------------------------------------------------------------------------------------


class CompiledPolicy:
    """
    A policy and its optimizer in machine code, in one memory with those of torch.

    :param functions: Compiled functions
    :param parts: Parts of the policy
    """

    def __init__(self, functions: Compiled, parts: Parts):
        self._functions = functions
        self._parts = parts
        shapes = [tensor.shape for tensor in parts.tensors]
        bounds = np.cumsum([0, *(shape.numel() for shape in shapes)])
        self._views: dict[str, list[th.Tensor]] = {}
        arrays = {}
        for name in ("parameter", "grad", "exp_avg", "exp_avg_sq"):
            flat = th.zeros(int(bounds[-1]), dtype=th.float32)
            arrays[name] = flat.numpy()
            pieces = flat.split(np.diff(bounds).tolist())
            self._views[name] = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        steps = th.zeros(len(shapes), dtype=th.float32)
        self._views["step"] = list(steps.unbind())
        self._parameters = arrays["parameter"]
        self._optimizer = Optimizer(
            arrays["grad"], arrays["exp_avg"], arrays["exp_avg_sq"], steps.numpy(), bounds, np.zeros((len(shapes), 4))
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the policy has its own memory, so this object is not for it.
        return type(None), ()

    def fits(self, parts: Parts) -> bool:
        """
        :param parts: Parts of the policy as it is now
        :return: Whether they are still the same parameters with the same shapes, and the same activation
        """
        tensors = list(map(id, self._parts.tensors)) == list(map(id, parts.tensors))
        ours, theirs = (np.concatenate([np.ravel(each) for each in of.network]) for of in (self._parts, parts))
        return tensors and np.array_equal(ours, theirs)

    def take_over(self, optimizer: th.optim.Optimizer | None) -> None:
        """
        Make views of the flat arrays of those tensors that are none, and copy their numbers.

        :param optimizer: Optimizer; ``None`` for the parameters alone
        """
        for i, tensor in enumerate(self._parts.tensors):
            view = self._views["parameter"][i]
            if not tensor.is_set_to(view):
                view.copy_(tensor.detach())
                tensor.data = view
            if optimizer is None:
                continue
            state = optimizer.state[tensor]
            for name in ("exp_avg", "exp_avg_sq", "step"):
                view = self._views[name][i]
                if name not in state:
                    view.zero_()
                elif state[name].is_set_to(view):
                    continue
                else:
                    view.copy_(state[name])
                state[name] = view
        if optimizer is not None:
            groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
            for i, tensor in enumerate(self._parts.tensors):
                group = groups[id(tensor)]
                self._optimizer.rates[i] = [float(each) for each in (group["lr"], *group["betas"], group["eps"])]

    def actor(self, policy: ActorPolicy) -> Actor:
        """
        :param policy: The policy
        :return: A function that chooses actions as the policy does now: with its weights of any time, and with its present
            statistics of observations
        """
        act, network, parameters = self._functions.act, self._parts.network, self._parameters
        draw = self._noise()
        is_vector = isinstance(policy.observation_space, spaces.Box) and not len(network.patches)
        shift = scale = np.zeros(0, np.float32)
        if is_vector and policy.normalizer is not None:
            shift, scale = policy.normalizer.shift.numpy(), policy.normalizer.scale.numpy()
        is_categorical = network.family == CATEGORICAL
        n_components = len(network.n_categories) if is_categorical else int(network.sizes[-1])
        dtype: type[np.generic] = np.int64 if is_categorical else np.float32
        shape = (-1, *policy.action_space.shape)  # type: ignore[misc]

        def choose(obs: Any, obs_tensor: Any, action_masks: Any = None) -> tuple[np.ndarray, th.Tensor]:
            if not is_vector:  # numbers of categories, which the policy encodes, or pictures
                obs = _inputs(policy, obs_tensor)
            inputs = np.ascontiguousarray(obs, dtype=np.float64).reshape(len(obs), -1)
            n = len(inputs)
            # The function returns nothing, because numba runs Python code to return arrays, in which Ctrl-C would be lost.
            features, actions = np.empty(inputs.shape, np.float32), np.empty((n, n_components), np.float32)
            log_prob = np.empty(n, np.float32)
            forced = self._forced(action_masks, policy.action_space, n)
            act(network, parameters, shift, scale, inputs, draw(n), forced, features, actions, log_prob)
            return actions.astype(dtype, copy=False).reshape(shape), th.from_numpy(log_prob)

        return choose

    def _forced(self, action_masks: Any, action_space: spaces.Space, n: int) -> np.ndarray:
        """
        :return: The logits that ``n`` masks put in the place of outputs, shape ``(n, k)``; no rows without masks
        """
        if action_masks is None:
            return np.empty((0, int(self._parts.network.sizes[-1])), np.float32)
        return np.ascontiguousarray(forced_logits(action_masks, action_space, n), dtype=np.float32)

    def _noise(self) -> Callable[[int], np.ndarray]:
        """
        :return: A function that draws the noise of ``n`` actions, as SB3's distributions draw it
        """
        network = self._parts.network
        choices = network.n_categories.tolist()
        if len(choices) > 1:
            return lambda n: th.cat([th.empty(n, each).exponential_() for each in choices], dim=1).numpy()
        k = int(network.sizes[-1])
        fill = {GAUSSIAN: "normal_", BERNOULLI: "uniform_", CATEGORICAL: "exponential_"}[network.family]
        memory = functools.cache(lambda n: (noise := th.empty(n, k), noise.numpy()))

        def draw(n: int) -> np.ndarray:
            noise, array = memory(n)
            getattr(noise, fill)()
            return array

        return draw

    @th.no_grad()
    def batch(self, policy: ActorPolicy, samples: GroupRolloutBufferSamples, reference: ActorPolicy | None) -> Batch:
        """
        :param policy: The policy
        :param samples: Transitions of an update
        :param reference: Reference of the KL penalty, a policy of the same kind; ``None`` without a penalty
        :return: The transitions in the form that :meth:`epoch` takes
        """

        def array(tensor: th.Tensor) -> np.ndarray:
            return np.ascontiguousarray(tensor.numpy(), dtype=np.float32)

        n = len(samples.advantages)
        forced = self._forced(samples.action_masks, policy.action_space, n)
        outputs = np.zeros((0, int(self._parts.network.sizes[-1])), np.float32)
        log_std = np.zeros(0, np.float32)
        if reference is not None:
            outputs = array(reference.action_net(reference._latent(samples.observations)))
            outputs = np.where(forced == 0, outputs, forced) if len(forced) > 0 else outputs
            log_std = array(reference.log_std) if self._parts.network.family == GAUSSIAN else log_std
        return Batch(
            array(_inputs(policy, samples.observations)),
            array(samples.actions.reshape(n, -1)),
            array(samples.old_log_prob),
            array(samples.advantages),
            np.ones(n, np.float32) if samples.weights is None else array(samples.weights),
            outputs,
            log_std,
            forced,
        )

    def epoch(self, batch: Batch, permutation: np.ndarray, batch_size: int, settings: Settings) -> tuple[Metrics, float]:
        """
        Take a gradient step with each minibatch of an epoch. The last gradient is left in the parameters' ``grad``.

        :param batch: Transitions of the update
        :param permutation: Their order
        :param batch_size: Minibatch size
        :param settings: Objective
        :return: Metrics of the epoch, and the approximate divergence of the last minibatch from the old policy. The epoch has
            ended early if it is above the limit
        """
        metrics = np.zeros(len(Metrics._fields))
        arguments = self._optimizer, batch, permutation, batch_size, settings, metrics
        approx_kl = self._functions.update(self._parts.network, self._parameters, *arguments)
        for tensor, gradient in zip(self._parts.tensors, self._views["grad"], strict=True):
            tensor.grad = gradient
        return Metrics(*metrics.tolist()), approx_kl

    # --- natural-gradient steps ---------------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The policy's parameters, in the order of :attr:`parameters`."""
        return self._parts.tensors

    @property
    def parameters(self) -> np.ndarray:
        """All parameters in one array, which is the policy's memory."""
        return self._parameters

    def evaluate(self, batch: Batch, settings: Settings, gradient: np.ndarray | None = None) -> Metrics:
        """
        :param batch: Transitions of the update
        :param settings: Objective
        :param gradient: Receives the gradient of the loss, shape of :attr:`parameters`
        :return: Metrics of all transitions as one minibatch
        """
        metrics = np.zeros(len(Metrics._fields))
        wanted = np.empty(0, np.float32) if gradient is None else gradient
        self._functions.evaluate_all(self._parts.network, self._parameters, batch, settings, wanted, metrics)
        return Metrics(*metrics.tolist())

    def fisher(self, batch: Batch, stride: int) -> Callable[[np.ndarray], np.ndarray]:
        """
        :param batch: Transitions of the update
        :param stride: Distance of those that the matrix is a mean over
        :return: A function that multiplies a vector by the Fisher matrix of the policy as it is now
        """
        network, parameters = self._parts.network, self._parameters.copy()
        features, forced = (np.ascontiguousarray(array[::stride]) for array in (batch.features, batch.forced))
        n = len(features)
        values = np.empty(n * int(network.sizes.sum()), np.float32)
        self._functions.linearize(network, parameters, features, forced, values)

        def multiply(vector: np.ndarray) -> np.ndarray:
            product = np.empty_like(parameters)
            self._functions.fisher_product(network, parameters, values, n, vector, product)
            return product

        return multiply

    def divergence(self, before: np.ndarray, batch: Batch) -> float:
        """
        :param before: Other parameters
        :param batch: Transitions of the update
        :return: Mean divergence from the policy with these parameters, summed over the components of an action
        """
        arguments = self._parameters, before, batch.features, batch.forced
        return float(self._functions.divergence(self._parts.network, *arguments))
