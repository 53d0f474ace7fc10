"""The data of a rollout: observations, transitions, minibatches, reward components, and the returns of groups."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_grpo.observations import Observations, map_observations, take_observations
from sb3_grpo.validation import require_between

#: Columns that are keyword arguments of the policy's methods
CONTEXT = {"action_masks", "states", "sequences"}
#: Rewards are stored in single precision; larger ones would become infinite.
MAX_REWARD = float(np.finfo(np.float32).max)


class GroupRolloutBufferSamples(NamedTuple):
    """
    Transitions to train on: a minibatch, or a whole update. ``n`` is their number, and tensors have shape ``(n,)`` if nothing
    else is said.

    :param observations: Observations, shape ``(n, *obs_shape)`` or a dict of such
    :param actions: Actions as ``evaluate_actions`` takes them, shape ``(n, action_dim)``, or ``(n,)`` for Discrete
    :param old_log_prob: Log-probabilities under the policy that sampled the actions
    :param trajectories: Label of each transition's trajectory
    :param weights: Weights in the loss; ``None`` for ones
    :param action_masks: The choices that were allowed, shape ``(n, n_choices)``; ``None`` without masks
    :param states: States of the policy's memory before each step, shape ``(n, state_size)``; ``None`` without memory
    :param sequences: Label of the sequence of each transition, see :meth:`Transitions.sequences`; ``None`` without memory
    """

    observations: PyTorchObs
    actions: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    trajectories: th.Tensor
    weights: th.Tensor | None = None
    action_masks: th.Tensor | None = None
    states: th.Tensor | None = None
    sequences: th.Tensor | None = None

    @property
    def context(self) -> dict[str, Any]:
        """What the policy needs besides observations, as keyword arguments of its methods."""
        columns = zip(self._fields, self, strict=True)
        return {name: column for name, column in columns if name in CONTEXT and column is not None}

    def map(self, function: Callable[..., th.Tensor], *others: "GroupRolloutBufferSamples") -> "GroupRolloutBufferSamples":
        """:return: Results of a function, which gets one tensor of these samples and the same tensor of each of the others"""
        fields = zip(self, *others, strict=True)
        results = (None if each[0] is None else map_observations(function, *each) for each in fields)
        return GroupRolloutBufferSamples(*results)  # type: ignore[arg-type]

    def tensors(self) -> list[th.Tensor]:
        """:return: All tensors, in the order in which :meth:`map` passes them to its function"""
        found: list[th.Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def take(self, index: th.Tensor | slice) -> "GroupRolloutBufferSamples":
        """:return: The transitions at an index"""
        return self.map(lambda tensor: tensor[index])

    def thin(self, stride: int) -> "GroupRolloutBufferSamples":
        """:return: Every ``stride``-th transition, or with memory the transitions of every ``stride``-th sequence"""
        return self.take(slice(None, None, stride) if self.sequences is None else self.sequences % stride == 0)

    def split(self, size: int) -> Iterator["GroupRolloutBufferSamples"]:
        """:return: Parts of ``size`` transitions; the last may have fewer. They share the memory of the whole"""
        for first in range(0, max(len(self.advantages), 1), size):
            yield self.take(slice(first, first + size))


class Column(NamedTuple):
    """
    How a buffer stores a column: type and shape of an entry, and the number that stands where nothing is given. A column of
    shape ``(0,)`` is optional: it is empty until :meth:`GroupRolloutBuffer.keep` is called.
    """

    dtype: Any
    shape: tuple[int, ...] = ()
    fill: Any = 0


@dataclass(init=False, eq=False)
class Columns:
    """
    The columns of a transition. A buffer stores them as arrays whose first axes are environments and steps, and
    :class:`Transitions` has them with a single axis of ``n`` transitions.

    To add what is known when the policy acts, declare an optional column here, put it into ``optional`` of the steps of
    :func:`~sb3_grpo.collection.run_policy`, and call :meth:`GroupRolloutBuffer.keep` with its name and shape. If
    :class:`GroupRolloutBufferSamples` has a field of that name, the update gets it too.

    :param observations: Observations, shape ``(n, *obs_shape)`` or a dict of such
    :param actions: Actions, shape ``(n, action_dim)``
    :param rewards: Rewards, shape ``(n,)``
    :param log_probs: Log-probabilities under the policy that sampled the actions, shape ``(n,)``
    :param groups: Group of each trajectory (see :class:`~sb3_grpo.starts.Ledger`), shape ``(n,)``
    :param members: Member of the group, shape ``(n,)``
    :param steps: Step within the trajectory, shape ``(n,)``
    :param dones: Whether the trajectory ended with this transition, shape ``(n,)``
    :param rollouts: Number of the rollout in which the transition was sampled, shape ``(n,)``
    :param components: Reward components, of which ``rewards`` is the weighted sum, shape ``(n, n_components)``, or ``(n, 0)``
    :param action_masks: The choices that were allowed, shape ``(n, n_choices)``, or ``(n, 0)`` without masks
    :param states: States of the policy's memory before each step, shape ``(n, state_size)``, or ``(n, 0)`` without memory
    """

    observations: Observations
    actions: np.ndarray
    rewards: Annotated[np.ndarray, Column(np.float32)]
    log_probs: Annotated[np.ndarray, Column(np.float32)]
    groups: Annotated[np.ndarray, Column(np.int64)]
    members: Annotated[np.ndarray, Column(np.int64)]
    steps: Annotated[np.ndarray, Column(np.int64)]
    dones: Annotated[np.ndarray, Column(bool)]
    rollouts: Annotated[np.ndarray, Column(np.int64)]
    components: Annotated[np.ndarray, Column(np.float32, (0,))]
    action_masks: Annotated[np.ndarray, Column(bool, (0,), fill=True)]
    states: Annotated[np.ndarray, Column(np.float32, (0,))]


#: Names of all columns; how those are stored that do not follow from the spaces; and names of those that may be missing.
NAMES = [each.name for each in fields(Columns)]
STORED: dict[str, Column] = {
    each.name: column for each in fields(Columns) for column in getattr(each.type, "__metadata__", ())
}
OPTIONAL = [name for name, column in STORED.items() if column.shape == (0,)]


@dataclass(eq=False)
class Transitions(Columns):
    """Transitions as they were collected, environment by environment, in order of time, see :class:`Columns`."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def trajectories(self) -> np.ndarray:
        """Label of each transition's trajectory, an integer, shape ``(n,)``."""
        return self.groups * (self.members.max(initial=0) + 1) + self.members

    def sequences(self, longest: int | None = None) -> np.ndarray:
        """
        :param longest: Largest number of transitions in a sequence; ``None`` for no limit
        :return: Label of each transition's sequence, from 0, shape ``(n,)``. A sequence is the part of a trajectory that lies
            in one rollout. Those that are too long are divided into parts of about the same length
        """
        n, labels = len(self), self.trajectories
        follows = (np.diff(labels) == 0) & (np.diff(self.steps) == 1) & (np.diff(self.rollouts) == 0)
        first = np.flatnonzero(np.append(True, ~follows)[:n])
        lengths = np.diff(np.append(first, n))
        size = lengths if longest is None else np.ceil(lengths / np.ceil(lengths / longest)).astype(int)
        within = np.arange(n) - np.repeat(first, lengths)
        return np.cumsum(within % np.repeat(size, lengths) == 0) - 1

    def take(self, index: np.ndarray) -> "Transitions":
        """:return: A copy of the transitions at integers or a mask"""
        return Transitions(*(take_observations(field, index) for field in vars(self).values()))

    def followed_by(self, other: "Transitions") -> "Transitions":
        """:return: These transitions and others of the same spaces"""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Transitions(*(map_observations(lambda *arrays: np.concatenate(arrays), *pair) for pair in pairs))


class GroupReturns:
    """Collects the returns of groups while their trajectories end one by one."""

    def __init__(self, n_envs: int):
        self._running = np.zeros(n_envs)
        self._ended: dict[int, list[float]] = {}

    def add(self, reward: np.ndarray, done: np.ndarray, groups: np.ndarray) -> None:
        """Add rewards of one step. ``done`` says which trajectories ended with it, ``groups`` to which group each belongs."""
        self._running += reward
        for env in np.flatnonzero(done) if np.count_nonzero(done) else ():
            self._ended.setdefault(int(groups[env]), []).append(float(self._running[env]))
            self._running[env] = 0.0

    def clear(self) -> None:
        """Forget everything, because all environments were reset."""
        self._running[:] = 0.0
        self._ended.clear()

    def pop_complete(self, open_groups: Container[int]) -> dict[int, list[float]]:
        """:return: Returns of the members of each group that was completed since the last call and is not open"""
        return {group: self._ended.pop(group) for group in [each for each in self._ended if each not in open_groups]}


def reward_components(info: Mapping[str, Any], names: list[str], env: int) -> list[float]:
    """:return: The components of these names in an ``info``; a ``ValueError`` says if one of them is no finite number"""
    components = info.get("reward_components")
    if not isinstance(components, Mapping):
        raise ValueError(
            f"`reward_weights` names {names}, but environment {env} returned {components!r} as info['reward_components']: "
            "return a mapping from these names to numbers in every step, or leave `reward_weights` out."
        )
    if missing := [name for name in names if name not in components]:
        raise ValueError(
            f"Environment {env} returned info['reward_components'] without {missing}: `reward_weights` names {names}, "
            f"and the environment reports {list(components)}."
        )
    values = [np.asarray(components[name]) for name in names]
    for name, value in zip(names, values, strict=True):
        if value.size != 1 or value.dtype.kind not in "fiub" or not (abs(float(value.item())) <= MAX_REWARD):
            raise ValueError(
                f"Environment {env} returned {components[name]!r} as info['reward_components'][{name!r}]: return one finite "
                "number in every step."
            )
    return [value.item() for value in values]


def checked_reward_weights(reward_weights: Mapping[str, float] | None) -> dict[str, float]:
    """:return: A copy of the weights, ``{}`` for ``None``; a ``ValueError`` if they are no mapping to finite numbers"""
    if reward_weights is None:
        return {}
    if not isinstance(reward_weights, Mapping) or not reward_weights:
        raise ValueError(
            "`reward_weights` must map the names of reward components to their weights, such as "
            f"{{'progress': 1.0, 'energy': 0.1}}, not {reward_weights!r}."
        )
    for name, weight in reward_weights.items():
        require_between(f"reward_weights[{name!r}]", weight, -np.inf, np.inf)
    return dict(reward_weights)
