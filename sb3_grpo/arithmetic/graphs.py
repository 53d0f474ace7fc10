"""
CUDA graphs of what a policy on a GPU does again and again with tensors of the same shapes.

A GPU waits for the CPU, which needs several microseconds to launch each of the hundreds of operations of a gradient step. A
graph launches all of them at once (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). The operations are the same,
and so are the numbers.

A graph repeats operations, not Python code, so it is for policies whose code is known: see
:func:`~sb3_grpo.arithmetic.conditions.is_capturable`.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch as th
from torch import nn

from sb3_grpo.policies import ActorPolicy

#: Runs before a capture, in which libraries choose their algorithms and allocate memory
N_WARM_UP = 3


@functools.cache
def side_stream(device: th.device) -> "th.cuda.Stream":
    """:return: The stream of all captures on a device. For each stream, cuBLAS keeps tens of megabytes"""
    return th.cuda.Stream(device)


class Captured:
    """
    A function as a graph.

    :param function: Function of tensors, which gives tensors. It must not wait for the GPU
    :param arguments: Arguments of the shapes that it will always have; their numbers are not used
    :param warm_up: What runs before the capture, and leaves everything as it is
    """

    def __init__(
        self, function: Callable[..., Sequence[th.Tensor]], arguments: Sequence[th.Tensor], warm_up: Callable[..., object]
    ):
        self._arguments = [argument.clone() for argument in arguments]
        device = self._arguments[0].device
        stream, present = side_stream(device), th.cuda.current_stream(device)
        stream.wait_stream(present)
        with th.cuda.stream(stream):
            for _ in range(N_WARM_UP):
                warm_up(*self._arguments)
        present.wait_stream(stream)
        self._graph = th.cuda.CUDAGraph()
        try:
            with th.cuda.graph(self._graph, stream=stream):
                self._results = function(*self._arguments)
        except RuntimeError:
            # The random generator still waits for the end of a capture.
            with th.cuda.graph(th.cuda.CUDAGraph(), stream=th.cuda.Stream(device)):
                th.zeros(1, device=device)
            raise

    def fits(self, arguments: Sequence[th.Tensor]) -> bool:
        """:return: Whether the arguments have the shapes and types of those of the capture"""
        ours, theirs = ([(each.shape, each.dtype) for each in tensors] for tensors in (self._arguments, arguments))
        return ours == theirs

    def __call__(self, arguments: Sequence[th.Tensor]) -> list[th.Tensor]:
        """:return: The results, as tensors of their own"""
        for own, given in zip(self._arguments, arguments, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return [result.clone() for result in self._results]


class Graphs:
    """The graphs of a policy, by name. A copy of the policy has none yet, because it has other memory."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Captured | None]] = {}

    def __reduce__(self) -> "tuple[type[Graphs], tuple[()]]":
        return Graphs, ()

    def get(
        self,
        name: str,
        state: Any,
        arguments: Sequence[th.Tensor],
        function: Callable[..., Sequence[th.Tensor]],
        warm_up: Callable[..., object],
    ) -> Captured | None:
        """
        Find a graph by its name, or capture it with the arguments of :class:`Captured`.

        :param state: What the function depends on besides the numbers of its arguments and in memory. If it has changed, or
            the shapes of the arguments, the graph is captured again
        :return: The graph, or ``None`` if there can be none, which is warned of once
        """
        known_state, graph = self._kept.get(name, (None, None))
        if known_state == state and (graph is None or graph.fits(arguments)):
            return graph
        self._kept.pop(name, None)  # its memory is free for the next
        graph = None
        try:
            graph = Captured(function, arguments, warm_up)
        except RuntimeError as error:
            warnings.warn(f"There is no CUDA graph for {name}, which goes on without one, more slowly: {error}", stacklevel=2)
        self._kept[name] = state, graph
        return graph


def graphs_of(policy: ActorPolicy) -> Graphs:
    """:return: The graphs that the policy keeps"""
    kept: Graphs = vars(policy).setdefault("_graphs", Graphs())
    return kept


def memory_of(tensors: Sequence[th.Tensor]) -> tuple[int, ...]:
    """:return: Where tensors are. A graph is for these addresses"""
    return tuple(tensor.data_ptr() for tensor in tensors)


class _Evaluation(nn.Module):
    """
    A function that uses the policy, as a module, so that it can be called with other tensors in the place of its parameters.
    """

    def __init__(self, policy: ActorPolicy, function: Callable[..., Sequence[th.Tensor]]):
        super().__init__()
        self.policy = policy
        self.function = function

    def forward(self, *arguments: th.Tensor) -> Sequence[th.Tensor]:
        return self.function(*arguments)


def gradient_step(
    policy: ActorPolicy,
    state: Any,
    max_grad_norm: float,
    numbers: th.Tensor,
    batch: Sequence[th.Tensor],
    evaluate: Callable[..., Sequence[th.Tensor]],
) -> Captured | None:
    """
    A gradient step as a graph.

    :param state: What ``evaluate`` depends on besides the numbers of its arguments and of the policy
    :param numbers: Learning rate of each parameter group, and further arguments of ``evaluate``, shape ``(k,)``
    :param evaluate: Function of ``batch``, a minibatch, and of the further numbers, which gives the loss and other tensors
    :return: The graph, or ``None`` if there can be none. Its arguments are ``batch`` and ``numbers``; its results are those of
        ``evaluate``, and the norm of the gradient before it was clipped
    """
    optimizer = policy.optimizer
    groups = optimizer.param_groups
    names, parameters = zip(*policy.named_parameters(), strict=True)
    evaluation = _Evaluation(policy, evaluate)

    def gradients(*arguments: th.Tensor) -> tuple[Sequence[th.Tensor], list[th.Tensor]]:
        # What accumulates the gradient of a parameter belongs to the stream in which an operation first used it, for as long
        # as anything remembers that operation. Tensors that are new here, in the same memory, belong to this stream.
        weights = [parameter.detach().requires_grad_() for parameter in parameters]
        of_policy = {f"policy.{name}": weight for name, weight in zip(names, weights, strict=True)}
        results = th.func.functional_call(evaluation, of_policy, (*arguments[:-1], *arguments[-1][len(groups) :]))
        return th.autograd.grad(results[0], weights), [result.detach() for result in results]

    def step(*arguments: th.Tensor) -> list[th.Tensor]:
        computed, results = gradients(*arguments)
        for parameter, gradient in zip(parameters, computed, strict=True):
            # The kernel of Adam needs both in the same order in memory.
            is_alike = gradient.stride() == parameter.stride()
            parameter.grad = gradient if is_alike else th.empty_like(parameter).copy_(gradient)
        norm = th.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, arguments[-1][: len(groups)], strict=True):
            group.update(lr=rate, capturable=True)
        try:
            optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group.update(lr=rate, capturable=False)
        return [*results, norm]

    moments = [each for parameter in parameters for each in optimizer.state[parameter].values()]
    options = [(group["betas"], group["eps"]) for group in groups]
    where = memory_of([*parameters, *policy.buffers(), *moments])
    state = state, max_grad_norm, options, where
    return graphs_of(policy).get("gradient steps", state, [*batch, numbers], step, gradients)
