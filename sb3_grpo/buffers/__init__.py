"""
Group rollout buffers: what turns the rewards of a rollout into advantages.

A buffer stores what :class:`~sb3_grpo.grpo.GRPO` collects, forms the advantages once the rollout is complete, and hands out
the transitions to train on in minibatches. Every variant overrides one hook:

- :meth:`GroupRolloutBuffer._form_update` for all transitions of a rollout (the kernel baseline);
- :meth:`CompleteGroupRolloutBuffer._group_advantages` for whole groups of whole trajectories (the four others).
"""

import inspect
from collections.abc import Mapping
from typing import Any

from sb3_grpo.buffers.base import ActorFeatures, GroupRolloutBuffer
from sb3_grpo.buffers.groups import (
    CompleteGroupRolloutBuffer,
    OutcomeRolloutBuffer,
    ProcessRolloutBuffer,
    ReturnToGoRolloutBuffer,
    StepwiseRolloutBuffer,
)
from sb3_grpo.buffers.kernel import KernelRolloutBuffer
from sb3_grpo.buffers.rollout import (
    GroupReturns,
    GroupRolloutBufferSamples,
    Observations,
    Transitions,
    map_observations,
    take_observations,
)

__all__ = [
    "BUFFERS",
    "ActorFeatures",
    "CompleteGroupRolloutBuffer",
    "GroupReturns",
    "GroupRolloutBuffer",
    "GroupRolloutBufferSamples",
    "KernelRolloutBuffer",
    "Observations",
    "OutcomeRolloutBuffer",
    "ProcessRolloutBuffer",
    "ReturnToGoRolloutBuffer",
    "StepwiseRolloutBuffer",
    "Transitions",
    "check_buffer_arguments",
    "map_observations",
    "resolve_buffer_class",
    "take_observations",
]

BUFFERS: dict[str, type[GroupRolloutBuffer]] = {
    "kernel": KernelRolloutBuffer,
    "outcome": OutcomeRolloutBuffer,
    "process": ProcessRolloutBuffer,
    "return_to_go": ReturnToGoRolloutBuffer,
    "stepwise": StepwiseRolloutBuffer,
}


def resolve_buffer_class(buffer: str | type[GroupRolloutBuffer] | None) -> type[GroupRolloutBuffer]:
    """
    :param buffer: a buffer class, the short name of one, or ``None`` for the default (``kernel``)
    :return: the class
    :raises ValueError: if there is no buffer of that name, or the class is not a :class:`GroupRolloutBuffer`
    """
    if buffer is None:
        return KernelRolloutBuffer
    if isinstance(buffer, str):
        if buffer not in BUFFERS:
            raise ValueError(f"There is no rollout buffer {buffer!r}: `rollout_buffer_class` is one of {', '.join(BUFFERS)}.")
        return BUFFERS[buffer]
    if not (isinstance(buffer, type) and issubclass(buffer, GroupRolloutBuffer)):
        raise ValueError(
            f"`rollout_buffer_class` is {buffer!r}: pass one of {', '.join(BUFFERS)}, or a subclass of "
            "`sb3_grpo.buffers.GroupRolloutBuffer` (SB3's own rollout buffers need a critic)."
        )
    return buffer


def check_buffer_arguments(buffer_class: type[GroupRolloutBuffer], kwargs: Mapping[str, Any]) -> None:
    """
    :param buffer_class: of the rollout buffer
    :param kwargs: what it is to be constructed with
    :raises ValueError: if it is no mapping, or the buffer's constructor does not take one of these
    """
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"`rollout_buffer_kwargs` must be a dict or None, not {kwargs!r}.")
    accepted: set[str] = set()
    for each in buffer_class.__mro__:
        parameters = inspect.signature(each).parameters
        accepted |= {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    accepted -= {"args", "buffer_size", "observation_space", "action_space", "device", "gae_lambda", "gamma", "n_envs"}
    unknown = sorted(set(kwargs) - accepted, key=str)
    if unknown:
        raise ValueError(
            f"{buffer_class.__name__} does not take {unknown} of `rollout_buffer_kwargs`: it takes "
            f"{sorted(accepted - {'group_size'})}. Another `rollout_buffer_class` may."
        )
