"""
Group rollout buffers turn the rewards of a rollout into advantages.

A buffer stores the transitions that :class:`~sb3_grpo.grpo.GRPO` collects, computes the advantages once the rollout is
complete, and hands out minibatches. A buffer overrides one of two hooks:

- :meth:`GroupRolloutBuffer._form_update` uses all transitions of a rollout (``kernel``);
- :meth:`CompleteGroupRolloutBuffer._group_advantages` compares whole trajectories of complete groups (the four others).
"""

from sb3_grpo.buffers.base import DEFAULT_GROUP_SIZE, Defaults, GroupRolloutBuffer
from sb3_grpo.buffers.groups import (
    CompleteGroupRolloutBuffer,
    OutcomeRolloutBuffer,
    ProcessRolloutBuffer,
    ReturnToGoRolloutBuffer,
    StepwiseRolloutBuffer,
)
from sb3_grpo.buffers.kernel import KernelRolloutBuffer
from sb3_grpo.buffers.rollout import Columns, GroupRolloutBufferSamples, Transitions
from sb3_grpo.validation import constructor_arguments

__all__ = [
    "BUFFERS",
    "DEFAULT_GROUP_SIZE",
    "Columns",
    "CompleteGroupRolloutBuffer",
    "Defaults",
    "GroupRolloutBuffer",
    "GroupRolloutBufferSamples",
    "KernelRolloutBuffer",
    "OutcomeRolloutBuffer",
    "ProcessRolloutBuffer",
    "ReturnToGoRolloutBuffer",
    "StepwiseRolloutBuffer",
    "Transitions",
    "buffer_options",
    "resolve_buffer_class",
]

BUFFERS: dict[str, type[GroupRolloutBuffer]] = {
    "kernel": KernelRolloutBuffer,
    "outcome": OutcomeRolloutBuffer,
    "process": ProcessRolloutBuffer,
    "return_to_go": ReturnToGoRolloutBuffer,
    "stepwise": StepwiseRolloutBuffer,
}


def resolve_buffer_class(buffer: str | type[GroupRolloutBuffer] | None) -> type[GroupRolloutBuffer]:
    """:return: The class of a buffer; ``kernel`` for ``None``. A ``ValueError`` says what else to pass"""
    if buffer is None:
        return KernelRolloutBuffer
    if isinstance(buffer, str) and buffer in BUFFERS:
        return BUFFERS[buffer]
    if not (isinstance(buffer, type) and issubclass(buffer, GroupRolloutBuffer)):
        raise ValueError(
            f"`rollout_buffer_class` must be {', '.join(map(repr, BUFFERS))} or a subclass of "
            f"`sb3_grpo.GroupRolloutBuffer`, not {buffer!r}: SB3's own rollout buffers need a critic."
        )
    return buffer


def buffer_options(buffer_class: type[GroupRolloutBuffer]) -> set[str]:
    """:return: Names of the arguments that users may pass in ``rollout_buffer_kwargs``"""
    by_grpo = {"buffer_size", "observation_space", "action_space", "device", "gae_lambda", "gamma", "n_envs", "group_size"}
    return constructor_arguments(buffer_class) - by_grpo
