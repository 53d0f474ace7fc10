"""What a policy and its optimizer consist of: the conditions of machine code, of CUDA graphs and of export."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn

from sb3_grpo.arithmetic.first_layers import Convolution, FirstLayer, Recurrent
from sb3_grpo.arithmetic.machine_code.layers import RELU, TANH
from sb3_grpo.arithmetic.machine_code.recurrent import GRU, LSTM
from sb3_grpo.arithmetic.network import BERNOULLI, CATEGORICAL, GAUSSIAN, Family, Network
from sb3_grpo.extractors import SmallCNN
from sb3_grpo.policies import EXTRACTORS, ActorPolicy

#: Keys are exact classes: a subclass may mean something else.
FAMILIES: dict[type[Distribution], Family] = {
    DiagGaussianDistribution: GAUSSIAN,
    CategoricalDistribution: CATEGORICAL,
    MultiCategoricalDistribution: CATEGORICAL,
    BernoulliDistribution: BERNOULLI,
}
#: Keys are exact classes, as above.
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}
#: Keys are exact classes, as above.
CELLS: dict[type[nn.Module], int] = {nn.LSTM: LSTM, nn.GRU: GRU}
#: With more weights, torch is faster. On one core of a server, machine code took 0.95 times torch's time with hidden layers of
#: 512 and 512 units, and 1.4 times with 768 and 768; 0.87 times with ``SmallCNN`` on boards of 14 x 14, and 1.2 on 20 x 20.
MAX_WEIGHTS = 300_000

#: Methods that choose actions. A subclass that overrides one of them acts in its own way.
ACTING = (
    *("__call__", "forward", "preprocess", "extract_features", "get_distribution"),
    *("_distribution", "_distribution_of", "_latent", "_sample", "remember", "_run"),
)
#: Methods that evaluate actions.
EVALUATING = ("evaluate_actions", "evaluate_distribution")
#: Options of Adam that neither machine code nor CUDA graphs have
OTHER_OPTIONS = ("amsgrad", "weight_decay", "maximize", "capturable", "differentiable")

#: Modules whose operations depend on the shapes of their inputs alone, without randomness or a state. Exact classes
KNOWN_MODULES = {
    *EXTRACTORS,
    *(nn.Sequential, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Linear, nn.Conv2d, nn.LayerNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
}
#: Types of devices that have CUDA graphs
DEVICES = {"cuda"}


class Parts(NamedTuple):
    """
    A policy's network, and its parameters: those of a recurrent layer, weight and bias of each other layer, and ``log_std``.
    """

    network: Network
    tensors: list[nn.Parameter]


def is_unaltered(policy: ActorPolicy, methods: Sequence[str]) -> bool:
    """
    :param methods: Names of methods of ``ActorPolicy`` and of policies with memory
    :return: Whether no subclass, no attribute of the policy and no wrapper of ``torch.compile`` replaces one of them
    """
    if not isinstance(policy, ActorPolicy):
        return False
    package = __name__.split(".")[0]
    own = next(each for each in type(policy).__mro__ if each.__module__.split(".")[0] == package)
    return all(is_from(policy, own, name) for name in methods if hasattr(own, name))


def is_from(instance: object, base: type, method: str) -> bool:
    """:return: Whether a method is that of a base class, and neither a subclass nor the instance has replaced it"""
    return getattr(getattr(instance, method), "__func__", None) is getattr(base, method)


def has_hooks(module: nn.Module) -> bool:
    """:return: Whether there are hooks on a module, on all modules or on its own parameters, or its ``forward`` is replaced"""
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module.parameters(recurse=False):
        hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # type: ignore[list-item]
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


def parts_of(policy: ActorPolicy) -> Parts | str:
    """:return: The parts of which a policy consists, or a reason why they are not suitable for machine code"""
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
    memory: list[Any] = [policy.memory] if policy.state_size > 0 else []
    if any(has_hooks(module) for module in (policy, *extractor.modules(), *memory, policy.policy_net, *modules)):
        return "there are hooks on the policy"
    tensors = [tensor for layer in memory for tensor in layer.all_weights[0]]
    tensors += [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    if family is GAUSSIAN:
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
    first = _first_layer(policy, linear[0].in_features)
    sizes = [
        *([first.n_inputs] if first.n_layers > 0 else []),
        linear[0].in_features,
        *(layer.out_features for layer in linear),
    ]
    choices = np.array(n_categories, dtype=np.int64)
    return Parts(Network(np.array(sizes), first, ACTIVATIONS[kinds.pop()], family, choices), tensors)


def _first_layer(policy: ActorPolicy, n_units: int) -> FirstLayer:
    """:return: What comes before the linear layers, with ``n_units`` outputs"""
    if isinstance(policy.features_extractor, SmallCNN):
        n_inputs = get_flattened_obs_dim(policy.observation_space)
        return Convolution(n_inputs, n_units, policy.features_extractor.patches())
    if policy.state_size > 0:
        memory: Any = policy.memory
        return Recurrent(memory.input_size, n_units, CELLS[type(memory)])
    return FirstLayer()


def _layers(policy: ActorPolicy) -> list[Any] | str:
    """
    :return: The layers of a policy's network that are not recurrent, with what is between them, or a reason why they or the
        memory are not suitable
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
    memory: Any = policy.memory if policy.state_size > 0 else None
    if memory is not None and type(memory) not in CELLS:
        return f"the memory is a {type(memory).__name__}"
    if memory is not None and ([len(each) for each in memory.all_weights] != [4] or memory.batch_first):
        return "the memory is not a single layer with a bias"
    if memory is not None and isinstance(extractor, SmallCNN):
        return "there is a convolution before the memory"
    first = [extractor.cnn[0], extractor.cnn[1], *extractor.linear] if isinstance(extractor, SmallCNN) else []
    return [*first, *policy.policy_net, policy.action_net]


def unusual_optimizer(policy: ActorPolicy) -> str:
    """:return: A reason why the optimizer of a policy is not suitable; empty if it is"""
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


def is_capturable(policy: ActorPolicy) -> bool:
    """
    :return: Whether a policy is on a GPU of NVIDIA or AMD, acts and evaluates in the ordinary way, and consists of known
        modules without hooks
    """
    if policy.device.type not in DEVICES or type(policy.action_dist) not in FAMILIES:
        return False
    if not is_unaltered(policy, (*ACTING, *EVALUATING)):
        return False
    parts = [part for part in policy.modules() if part is not policy and part is not policy.normalizer]
    return all(type(part) in KNOWN_MODULES for part in parts) and not any(map(has_hooks, policy.modules()))


def may_capture_steps(policy: ActorPolicy) -> bool:
    """:return: Whether a policy is capturable, and its optimizer is Adam without extras, on the GPU, which has taken a step"""
    if not is_capturable(policy) or unusual_optimizer(policy):
        return False
    if not all(parameter.requires_grad for parameter in policy.parameters()):
        return False
    return bool(policy.optimizer.state) and all(group.get("fused") for group in policy.optimizer.param_groups)
