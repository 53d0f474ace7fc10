"""
CUDA graphs of what a policy does again and again with tensors of the same shapes.

With small networks, a GPU waits for the CPU, which needs several microseconds to launch each of the hundreds of operations of
a gradient step. A graph launches all of them at once (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). The
operations are the same, and so are the numbers.

A graph repeats operations, not Python code, so it is for policies whose code is known: see :func:`is_capturable`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn

from sb3_grpo.compiled import ACTING, EVALUATING, Actor, compiled_policy, has_hooks, is_unaltered, unusual_optimizer
from sb3_grpo.extractors import SmallCNN
from sb3_grpo.policies import ActorPolicy

#: Modules whose operations depend on the shapes of their inputs alone, besides those of ``torch.nn``. Exact classes
KNOWN_MODULES = (CombinedExtractor, FlattenExtractor, NatureCNN, SmallCNN)
#: Devices that have such graphs
DEVICES = ("cuda",)
#: Runs before a capture, in which libraries choose their algorithms and allocate memory
N_WARM_UP = 3


def is_capturable(policy: ActorPolicy) -> bool:
    """
    :param policy: Policy
    :return: Whether it is on a GPU of NVIDIA or AMD, and acts, evaluates and is optimised in the ordinary way, by modules that
        are known
    """
    if policy.device.type not in DEVICES or not is_unaltered(policy, (*ACTING, *EVALUATING)) or unusual_optimizer(policy):
        return False
    parts = [module for module in policy.modules() if module is not policy and module is not policy.normalizer]
    known = all(type(part) in KNOWN_MODULES or type(part).__module__.startswith("torch.nn.modules.") for part in parts)
    return known and not any(map(has_hooks, policy.modules()))


class Captured:
    """
    A function as a graph.

    :param function: Function of tensors, which gives tensors. It must not wait for the GPU
    :param arguments: Arguments of the shapes that it will always have; their numbers are not used
    :param warm_up: What runs before the capture and leaves everything as it is; ``None`` for the function itself
    """

    def __init__(
        self,
        function: Callable[..., Sequence[th.Tensor]],
        arguments: Sequence[th.Tensor],
        warm_up: Callable[..., Any] | None = None,
    ):
        self._arguments = [argument.clone() for argument in arguments]
        stream = th.cuda.Stream()
        stream.wait_stream(th.cuda.current_stream())
        with th.cuda.stream(stream):
            for _ in range(N_WARM_UP):
                (warm_up or function)(*self._arguments)
        th.cuda.current_stream().wait_stream(stream)
        self._graph = th.cuda.CUDAGraph()
        with th.cuda.graph(self._graph):
            self._results = function(*self._arguments)

    def fits(self, arguments: Sequence[th.Tensor]) -> bool:
        """:return: Whether the arguments have the shapes of those of the capture"""
        own = [(argument.shape, argument.dtype) for argument in self._arguments]
        return own == [(argument.shape, argument.dtype) for argument in arguments]

    def __call__(self, arguments: Sequence[th.Tensor]) -> list[th.Tensor]:
        """:return: The results, as tensors of their own"""
        for own, given in zip(self._arguments, arguments, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return [result.clone() for result in self._results]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a policy has its own memory, so this object is not for it.
        return type(None), ()


def captured(
    holder: nn.Module,
    name: str,
    state: Any,
    function: Callable[..., Sequence[th.Tensor]],
    arguments: Sequence[th.Tensor],
    warm_up: Callable[..., Any] | None = None,
) -> Captured | None:
    """
    :param holder: The policy, which keeps the graph for later calls
    :param name: Name of the graph
    :param state: What the function depends on besides the numbers of its arguments and in memory
    :param function: See :class:`Captured`
    :param arguments: See :class:`Captured`
    :param warm_up: See :class:`Captured`
    :return: The graph, or ``None`` if there can be none
    """
    kept: dict[str, tuple[Any, Captured | None]] = vars(holder).setdefault("_graphs", {})
    if name in kept and kept[name][0] == state and (kept[name][1] is None or kept[name][1].fits(arguments)):  # type: ignore[union-attr]
        return kept[name][1]
    kept.pop(name, None)  # its memory is free for the next
    try:
        graph = Captured(function, arguments, warm_up)
    except RuntimeError as error:
        graph = None
        warnings.warn(f"No CUDA graph of `{name}`, which goes on without one, more slowly: {error}", stacklevel=2)
    kept[name] = state, graph
    return graph


def memory_of(policy: ActorPolicy) -> tuple[int, ...]:
    """:return: Where the weights and the state of the optimizer are. A graph is for these addresses"""
    state = policy.optimizer.state
    moments = [each for parameter in policy.parameters() for each in state.get(parameter, {}).values()]
    return tuple(each.data_ptr() for each in (*policy.parameters(), *policy.buffers(), *moments))


def actor(policy: ActorPolicy) -> Actor:
    """
    :param policy: Policy
    :return: The function that chooses actions during a rollout: in machine code if that is possible, else in torch, and on a
        GPU by a CUDA graph if that is possible
    """
    compiled = compiled_policy(policy)
    if not isinstance(compiled, str):
        return compiled.actor(policy)
    names = list(policy.observation_space.spaces) if isinstance(policy.observation_space, spaces.Dict) else []

    def outputs(*tensors: th.Tensor) -> Sequence[th.Tensor]:
        latent = policy._latent(dict(zip(names, tensors, strict=True)) if names else tensors[0])
        return policy.action_net(latent), latent

    graph: Captured | None = None
    may_capture = is_capturable(policy)

    @th.no_grad()
    def act(_: Any, obs_tensor: Any, **masking: Any) -> tuple[np.ndarray, th.Tensor]:
        nonlocal graph, may_capture
        tensors = [obs_tensor[name] for name in names] or [obs_tensor]
        if may_capture and graph is None:
            graph = captured(policy, "acting", memory_of(policy), outputs, tensors)
            may_capture = graph is not None
        if graph is None:
            actions, log_prob = policy(obs_tensor, **masking)
        else:
            actions, log_prob = policy._sample(policy._distribution_of(*graph(tensors), **masking))
        return actions.cpu().numpy(), log_prob.cpu()

    return act
