"""What a rollout consists of: observations, transitions, minibatches, reward components, and the returns of groups."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_grpo.validation import require_between

#: A batch of observations: an array, or one array per key for a Dict space; the first axis counts observations.
Observations = np.ndarray | dict[str, np.ndarray]
#: Key of ``info`` under which an environment reports several rewards.
REWARD_COMPONENTS = "reward_components"
#: Rewards are stored in single precision; beyond this they would be infinite.
LARGEST_REWARD = float(np.finfo(np.float32).max)


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """
    Apply a function to the array, or to each array of the dict, of one or several batches of observations.

    :param function: of as many arrays as there are batches
    :param observations: batches of the same observation space
    :return: what the function returns, under the same keys if observations are dicts
    """
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(batch[key] for batch in observations)) for key in first}
    return function(*observations)


def take_observations(observations: Any, index: Any) -> Any:
    """
    :param observations: a batch of observations, arrays or tensors
    :param index: anything that indexes the first axis
    :return: the observations chosen
    """
    return map_observations(lambda array: array[index], observations)


class GroupRolloutBufferSamples(NamedTuple):
    """
    A minibatch of ``n`` transitions.

    :param observations: shape ``(n, *obs_shape)``, or a dict of such
    :param actions: as ``evaluate_actions`` takes them, shape ``(n, action_dim)``, for Discrete ``(n,)``
    :param old_log_prob: under the policy that sampled the actions, of a reused rollout under the one that the update starts
        from, shape ``(n,)``
    :param advantages: shape ``(n,)``
    :param weights: in the loss, shape ``(n,)``, ``None`` for ones
    :param trajectories: the trajectory of each transition, integers from 0 on, shape ``(n,)``, ``None`` unless the minibatch
        is made of whole trajectories
    """

    observations: PyTorchObs
    actions: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    weights: th.Tensor | None = None
    trajectories: th.Tensor | None = None

    def take(self, index: th.Tensor | slice) -> "GroupRolloutBufferSamples":
        """
        :param index: of transitions
        :return: the transitions chosen
        """
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[..., th.Tensor], *others: "GroupRolloutBufferSamples") -> "GroupRolloutBufferSamples":
        """
        :param function: of a tensor of these transitions, and of the same of each of the others
        :param others: transitions of the same spaces, which lack what these lack
        :return: its results
        """
        return GroupRolloutBufferSamples(
            *(
                None if fields[0] is None else map_observations(function, *fields)  # type: ignore[arg-type]
                for fields in zip(self, *others, strict=True)
            )
        )

    def split(self, size: int) -> Iterator["GroupRolloutBufferSamples"]:
        """
        :param size: transitions of each part, the last may have fewer
        :return: the parts, at least one, which share the memory of the whole
        """
        for first in range(0, max(len(self.advantages), 1), size):
            yield self.take(slice(first, first + size))


@dataclass(frozen=True)
class Transitions:
    """
    Transitions in one row each, those of an environment one after the other.

    :param observations: shape ``(n, *obs_shape)``, or a dict of such
    :param actions: shape ``(n, action_dim)``
    :param rewards: shape ``(n,)``
    :param log_probs: under the policy that sampled the actions, shape ``(n,)``
    :param starts: index of the start (see :class:`~sb3_grpo.seeding.StartQueue`) of the trajectory, shape ``(n,)``
    :param steps: step within the trajectory, shape ``(n,)``
    :param dones: whether the trajectory ended with this transition, shape ``(n,)``
    :param rollouts: number of the rollout in which the transition was sampled, shape ``(n,)``
    :param components: rewards of which ``rewards`` is the weighted sum, shape ``(n, n_components)``; none where the
        environment's own reward is used
    """

    observations: Observations
    actions: np.ndarray
    rewards: np.ndarray
    log_probs: np.ndarray
    starts: np.ndarray
    steps: np.ndarray
    dones: np.ndarray
    rollouts: np.ndarray
    components: np.ndarray

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, index: np.ndarray) -> "Transitions":
        """
        :param index: integers or a mask
        :return: a copy of the rows chosen
        """
        return Transitions(*(take_observations(field, index) for field in vars(self).values()))

    def followed_by(self, other: "Transitions") -> "Transitions":
        """
        :param other: transitions of the same spaces
        :return: both, these first
        """
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Transitions(*(map_observations(lambda *arrays: np.concatenate(arrays), *pair) for pair in pairs))


class GroupReturns:
    """
    The returns of the groups of a run, as trajectories end.

    :param n_envs: number of environments
    :param group_size: trajectories per group
    """

    def __init__(self, n_envs: int, group_size: int):
        self.group_size = group_size
        self._running = np.zeros(n_envs)
        self._ended: dict[int, list[float]] = {}
        self._complete: list[list[float]] = []

    def add(self, reward: np.ndarray, done: np.ndarray, start: np.ndarray) -> None:
        """
        :param reward: of one step, shape ``(n_envs,)``
        :param done: whether the trajectory ended with it, shape ``(n_envs,)``
        :param start: index of the start of each trajectory, shape ``(n_envs,)``
        """
        self._running += reward
        for env in np.flatnonzero(done):
            group = int(start[env]) // self.group_size
            members = self._ended.setdefault(group, [])
            members.append(float(self._running[env]))
            self._running[env] = 0.0
            if len(members) == self.group_size:
                self._complete.append(self._ended.pop(group))

    def start_afresh(self) -> None:
        """All environments are being reset: the groups in flight will not be completed, nor those before be trained on."""
        self._running[:] = 0.0
        self._ended.clear()
        self._complete.clear()

    def pop_complete(self) -> np.ndarray:
        """:return: returns of the groups that were completed since the last call, shape ``(n_groups, group_size)``"""
        complete, self._complete = self._complete, []
        return np.array(complete).reshape(-1, self.group_size)


def reward_components(info: Mapping[str, Any], names: list[str], env: int) -> list[float]:
    """
    :param info: what an environment returned with a step
    :param names: of the components wanted
    :param env: index of the environment
    :return: the components, in the order of their names
    :raises ValueError: if one of them is missing, or not a finite number
    """
    components = info.get(REWARD_COMPONENTS)
    if not isinstance(components, Mapping):
        raise ValueError(
            f"`reward_weights` names {names}, but environment {env} returned {components!r} as info[{REWARD_COMPONENTS!r}]: "
            "it must be a mapping from these names to numbers, in every step. Without `reward_weights` the reward is used."
        )
    missing = [name for name in names if name not in components]
    if missing:
        raise ValueError(
            f"Environment {env} returned info[{REWARD_COMPONENTS!r}] without {missing}: `reward_weights` names {names}, "
            f"and the environment reports {list(components)}."
        )
    values = []
    for name in names:
        value = np.asarray(components[name])
        if value.size != 1 or value.dtype.kind not in "fiub" or not (abs(float(value.item())) <= LARGEST_REWARD):
            raise ValueError(
                f"Environment {env} returned {components[name]!r} as info[{REWARD_COMPONENTS!r}][{name!r}]: it must be one "
                "finite number, in every step."
            )
        values.append(value.item())
    return values


def checked_reward_weights(reward_weights: Mapping[str, float] | None) -> dict[str, float]:
    """
    :param reward_weights: as passed to a buffer
    :return: a copy, empty for ``None``
    :raises ValueError: if it is not a mapping from names to finite numbers, or is empty
    """
    if reward_weights is None:
        return {}
    if not isinstance(reward_weights, Mapping) or not reward_weights:
        raise ValueError(
            "`reward_weights` must be a mapping from the names of reward components to their weights, such as "
            f"{{'progress': 1.0, 'energy': 0.1}}, not {reward_weights!r}."
        )
    for name, weight in reward_weights.items():
        require_between(f"reward_weights[{name!r}]", weight, -np.inf, np.inf)
    return dict(reward_weights)
