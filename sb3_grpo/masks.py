"""
Action masks: pure functions of the actions that an environment allows.

A mask has an entry for each choice of each component of an action, as in sb3-contrib's ``MaskablePPO``: the actions of a
``Discrete`` space, the choices of each component of a ``MultiDiscrete`` space one after the other, and for each component of a
``MultiBinary`` space "0 is allowed" and "1 is allowed". True allows a choice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

#: Magnitude of a logit that leaves no choice. In single precision, the probability of what it excludes is exactly zero. It is
#: finite, because zero times infinity is not a number.
FORCED = 1e8


def choices_of(action_space: spaces.Space) -> list[int]:
    """:return: Number of choices of each component of an action. A ``ValueError`` says if the space cannot be masked"""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(n) for n in np.ravel(action_space.nvec)]
    if isinstance(action_space, spaces.MultiBinary):
        return [2] * int(np.prod(action_space.shape))
    raise ValueError(
        f"Actions of {action_space} cannot be masked: use Discrete, MultiDiscrete or MultiBinary ones, or no `action_masks`."
    )


def checked_masks(action_masks: Any, choices: Sequence[int]) -> np.ndarray | tuple[int, str]:
    """
    :return: The masks, booleans of shape ``(n, sum(choices))``, or the index of an environment and what is wrong, a clause
    """
    n_choices = sum(choices)
    try:
        masks = np.asarray(action_masks, dtype=bool).reshape(len(action_masks), -1)
    except ValueError:  # the masks differ in their shapes
        masks = np.empty((0, 0), dtype=bool)
    if masks.shape != (len(action_masks), n_choices):
        sizes = [0 if mask is None else np.size(mask) for mask in action_masks]
        env = next(env for env, size in enumerate(sizes) if size != n_choices)
        what = "None" if action_masks[env] is None else f"{sizes[env]} entries"
        return env, f"{what} as its action mask: return {n_choices} entries, one for each choice"
    is_possible = np.logical_or.reduceat(masks, np.cumsum([0, *choices[:-1]]), axis=1)
    if not is_possible.all():
        env, component = (int(index) for index in np.argwhere(~is_possible)[0])
        what = "action" if len(choices) == 1 else f"choice for component {component} of the action"
        fault = f"an action mask that allows no {what}: allow one, such as one that does nothing, or end the episode before"
        return env, fault
    return masks


def forced_logits(action_masks: Any, action_space: spaces.Space, n: int) -> th.Tensor:
    """
    :param action_masks: ``n`` masks, an array or a tensor of any shape; a ``ValueError`` says if there are not as many entries
    :return: The logit that a mask puts in the place of the policy's, and zero where the policy is free, shape ``(n, k)`` for
        ``k`` logits: ``-FORCED`` for a choice that is not allowed. MultiBinary actions have one logit for each component, that
        of a one, which is ``FORCED`` if a zero is not allowed
    """
    n_choices = sum(choices_of(action_space))
    masks = th.as_tensor(action_masks).bool()
    if masks.numel() != n * n_choices:
        raise ValueError(
            f"`action_masks` of shape {tuple(masks.shape)} do not fit {n} observation(s) and {action_space}: pass an "
            f"array of shape ({n}, {n_choices}), an entry for each choice."
        )
    masks = masks.reshape(n, n_choices)
    if not isinstance(action_space, spaces.MultiBinary):
        return masks.logical_not() * -FORCED
    zero_allowed, one_allowed = masks[:, ::2], masks[:, 1::2]
    return (one_allowed.int() - zero_allowed.int()) * FORCED


def masked_logits(logits: th.Tensor, action_masks: Any, action_space: spaces.Space) -> th.Tensor:
    """:return: The logits, shape ``(n, k)``, but choices that masks exclude have probability zero and get no gradient"""
    forced = forced_logits(action_masks, action_space, logits.shape[0]).to(logits)
    return th.where(forced == 0, logits, forced)
