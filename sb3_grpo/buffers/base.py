"""The base of all group rollout buffers: it stores a rollout and hands out the minibatches of an update."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_grpo import advantages as A
from sb3_grpo import losses
from sb3_grpo.buffers.rollout import (
    MAX_REWARD,
    NAMES,
    OPTIONAL,
    STORED,
    Columns,
    GroupReturns,
    GroupRolloutBufferSamples,
    Transitions,
    checked_reward_weights,
    reward_components,
)
from sb3_grpo.observations import Observations, has_images, map_observations, one_in_form
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.starts import Position
from sb3_grpo.validation import require_at_least

#: The smallest groups, because they give a rollout the most distinct starts.
DEFAULT_GROUP_SIZE = 2


class Defaults(NamedTuple):
    """
    Settings that suit a buffer and an update rule: transitions per rollout, lambda at first and late in a long run, and
    arguments of the buffer.
    """

    rollout_size: int = 2048
    gae_lambda: float = 0.98
    arguments: Mapping[str, Any] = MappingProxyType({})
    late_gae_lambda: float | None = None  # None: lambda stays


class GroupRolloutBuffer(BaseBuffer, Columns, ABC):
    """
    Stores a rollout of ``buffer_size * n_envs`` transitions, forms the update, and hands out its minibatches.

    :param buffer_size: Number of steps per environment and rollout
    :param observation_space: Observation space
    :param action_space: Action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: Lambda of generalized advantage estimation; only ``kernel`` uses it
    :param gamma: Discount factor
    :param n_envs: Number of environments
    :param group_size: Number of trajectories per group
    :param horizon: Time limit of the environment in steps; ``None`` if it is unknown
    :param reward_weights: Weights of the components in ``info["reward_components"]``. Their weighted sum replaces the reward
    :param sequence_length: Largest number of steps through which the gradient of a policy with memory goes back; ``None`` for
        all steps of an episode in a rollout. Policies without memory do not use it
    :raises ValueError: If ``horizon``, ``reward_weights`` or ``sequence_length`` is invalid; in :meth:`add`, if components are
        not reported
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        gae_lambda: float = 0.98,
        gamma: float = 0.99,
        n_envs: int = 1,
        group_size: int = 2,
        horizon: int | None = None,
        reward_weights: Mapping[str, float] | None = None,
        sequence_length: int | None = None,
    ):
        super().__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if horizon is not None:
            require_at_least("horizon", horizon, 1, "or None")
        if sequence_length is not None:
            require_at_least("sequence_length", sequence_length, 1, "or None")
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self.group_size = group_size
        self.horizon = horizon  # of the current environments
        self.reward_weights = checked_reward_weights(reward_weights)
        self.sequence_length = sequence_length
        #: Metrics of the last rollout. GRPO logs those under ``rollout/`` at once and those under ``train/`` with the update.
        self.metrics: dict[str, float] = {}
        #: Factor of the limit of a natural-gradient step, which a buffer lowers where its advantages are mostly errors.
        self.limit_factor = 1.0
        #: Returns of the members of each group that was completed in the last rollout, by the number of the group.
        self.group_returns: dict[int, list[float]] = {}
        #: For each group that may still get transitions the last step that all of its members have taken.
        self.open_groups: Mapping[int, int] = {}
        self._rollout = 0
        self._running_returns = GroupReturns(n_envs)
        self._update: GroupRolloutBufferSamples | None = None
        self.has_images = has_images(observation_space)
        # The first axis counts environments: trajectories are then contiguous, and flattening a full rollout copies nothing.
        shape = (n_envs, buffer_size)

        def storage(space: spaces.Space) -> np.ndarray:
            # VecNormalize does not change the type of an integer space, whose observations are floats then.
            is_integer = isinstance(space, spaces.Box) and space.dtype.kind in "iu" and not is_image_space(space)
            return np.zeros((*shape, *get_obs_shape(space)), dtype=np.float32 if is_integer else space.dtype)

        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else observation_space
        self.observations = map_observations(storage, parts)
        # Samples of a Gaussian are not integers, even if the bounds of the space are.
        dtype = np.float32 if isinstance(action_space, spaces.Box) else action_space.dtype
        self.actions = np.zeros((*shape, self.action_dim), dtype=dtype)
        for name, column in STORED.items():
            self._store(name, *column.shape)
        self._kept: set[str] = set()
        if self.reward_weights:
            self.keep("components", len(self.reward_weights))

    def _store(self, name: str, *shape: int) -> None:
        column = STORED[name]
        setattr(self, name, np.full((self.n_envs, self.buffer_size, *shape), column.fill, column.dtype))

    def keep(self, name: str, *shape: int) -> None:
        """Store an optional column, such as ``action_masks``, from now on. ``shape`` is that of one of its entries."""
        self._store(name, *shape)
        self._kept.add(name)

    @property
    def n_samples(self) -> int:
        """Number of transitions in the update; zero if there is nothing to train on."""
        return 0 if self._update is None else len(self._update.advantages)

    @property
    def episode_starts(self) -> np.ndarray:
        """1 where a step is the first of its episode, else 0, as in SB3, shape ``(n_envs, n_steps)``"""
        return (self.steps == 0).astype(np.float32)

    @property
    def has_differences(self) -> bool:
        """Whether the update prefers some actions to others."""
        return self._update is not None and bool((self._update.advantages != 0).any())

    def reset(self) -> None:
        """Prepare for the next rollout."""
        super().reset()
        self._rollout += 1
        self._update = None
        self._final_observations: list[tuple[int, int, Any]] = []

    def forget_trajectories(self) -> None:
        """Forget the unfinished trajectories, because all environments were reset."""
        self._running_returns.clear()
        self.pos = 0

    @classmethod
    def update_rule(cls, is_continuous: bool, has_boards: bool) -> losses.UpdateRule:
        """:return: ``update_rule`` for ``None``, which may depend on the kind of actions and observations"""
        return "clipped"

    @classmethod
    def defaults(cls, update_rule: losses.UpdateRule, is_continuous: bool) -> Defaults:
        """:return: The settings for an update rule, and actions that are continuous or not, that are left to the buffer"""
        return Defaults()

    @classmethod
    def update_size(cls, rollout_size: int) -> int | None:
        """:return: Number of transitions per update; ``None`` if it varies"""
        return None

    def reward_normalizer(self, env: VecEnv) -> VecNormalize | None:
        """:return: The ``VecNormalize`` whose original rewards the buffer takes; ``None`` for the rewards as they come"""
        return None

    def suggested_group_size(self) -> int:
        """:return: The group size that suits the task so far. GRPO follows it without ``group_size`` and with shared starts"""
        return DEFAULT_GROUP_SIZE

    def obstacle(self) -> str:
        """:return: Why the last rollout gave nothing to learn from, if it did not, and what to change"""
        return (
            "All rewards that were compared are equal, so all advantages are zero. Check the reward of the environment. If "
            "rewards are rare, explore more (`ent_coef`), use larger groups (`group_size`), or train longer."
        )

    def _scaled(self, advantages: np.ndarray, normalize_advantage: bool) -> np.ndarray:
        """
        :return: The advantages that the loss gets, from those of the update, at least one, shape ``(n,)``. A buffer that
            compares within groups leaves them as they are, whatever ``normalize_advantage`` of GRPO says, because a shift of
            the whole rollout would give tied groups an advantage
        """
        return advantages

    def _describe_groups(self, returns: list[list[float]]) -> dict[str, float]:
        """:return: Metrics of the groups that were completed in the rollout"""
        metrics = {"rollout/groups_completed": float(len(returns))}
        if len(returns) > 0:
            metrics["rollout/group_return_mean"] = float(np.mean(np.concatenate(returns)))
            metrics["rollout/group_return_spread"] = float(np.mean([max(members) - min(members) for members in returns]))
        return metrics

    def add(
        self,
        obs: Observations,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        log_prob: th.Tensor,
        position: Position,
        infos: Sequence[dict[str, Any]],
        **optional: np.ndarray,
    ) -> None:
        """
        Store one step of all environments, which are the first axis of each array.

        :param action: Actions as sampled, before clipping, shape ``(n_envs, *action_shape)``
        :param position: Group, member and step of each environment before the step
        :param infos: Infos of the step, with ``terminal_observation`` and ``TimeLimit.truncated``
        :param optional: Columns that :meth:`keep` has announced, such as ``action_masks``, shape ``(n_envs, *shape)``
        """

        def store(storage: np.ndarray, batch: np.ndarray) -> None:
            column = storage[:, self.pos]
            column[...] = batch if np.shape(batch) == column.shape else np.reshape(batch, column.shape)

        if self.reward_weights:
            optional["components"], reward = self._components_and_their_sum(infos)
        map_observations(store, self.observations, obs)
        store(self.actions, action)
        self.rewards[:, self.pos] = reward
        self.log_probs[:, self.pos] = log_prob.tolist()
        self.groups[:, self.pos], self.members[:, self.pos], self.steps[:, self.pos] = position
        self.dones[:, self.pos] = done
        for name in self._kept:
            getattr(self, name)[:, self.pos] = optional.pop(name, STORED[name].fill)
        if optional:
            raise TypeError(f"The buffer does not keep {sorted(optional)}: call `keep` with the name and the shape before.")
        self._running_returns.add(reward, done, position.groups)
        for env in np.flatnonzero(done).tolist() if np.count_nonzero(done) else ():
            if infos[env].get("TimeLimit.truncated", False) and infos[env].get("terminal_observation") is not None:
                final = one_in_form(infos[env]["terminal_observation"], self.observation_space)
                self._final_observations.append((env, self.pos, final))
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def _components_and_their_sum(self, infos: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        names, weights = list(self.reward_weights), np.array(list(self.reward_weights.values()))
        components = np.array([reward_components(info, names, env) for env, info in enumerate(infos)])
        sums = components @ weights
        if not (np.abs(sums) <= MAX_REWARD).all():
            raise ValueError(
                f"The weighted sums of the reward components are {sums}: choose smaller weights than {self.reward_weights}."
            )
        return components, sums

    def finish_rollout(
        self,
        last_obs: Observations,
        policy: ActorPolicy,
        open_groups: Mapping[int, int],
        normalize_advantage: bool = False,
        loss_aggregation: losses.LossAggregation = "step",
    ) -> None:
        """
        Form the update from a full rollout, for the policy that is about to be updated.

        :param last_obs: Observations after the last step, shape ``(n_envs, *obs_shape)`` or a dict of such
        :param open_groups: See :meth:`~sb3_grpo.starts.Ledger.open_groups`
        :param normalize_advantage: Whether to standardise the advantages, for buffers that do so
        """
        self.open_groups = open_groups
        self.group_returns = self._running_returns.pop_complete(open_groups)
        self.metrics = self._describe_groups(list(self.group_returns.values()))
        rollout = self._flatten(self.pos)
        self.pos = 0  # transitions of an interrupted rollout are recognised by a position above zero
        transitions, advantages = self._form_update(rollout, last_obs, policy)
        self._check_advantages("_form_update", advantages, len(transitions))
        if len(advantages) > 0:
            self.metrics["train/advantage_std"] = float(np.std(advantages))
            advantages = self._scaled(advantages.astype(np.float32), normalize_advantage)
        update = self._to_samples(transitions, advantages.astype(np.float32))
        self._update = update._replace(weights=self._loss_weights(update.trajectories, loss_aggregation))

    def _check_advantages(self, hook: str, advantages: np.ndarray, n_transitions: int) -> None:
        """Raise a ``ValueError`` if ``hook`` has not returned one finite advantage for each transition."""
        fault = ""
        if np.shape(advantages) != (n_transitions,):
            fault = f"of shape {np.shape(advantages)} for {n_transitions} transitions: return shape ({n_transitions},)"
        elif not np.isfinite(advantages).all():
            fault = f"of which {(~np.isfinite(advantages)).sum()} are NaN or infinite: return finite numbers"
        if fault:
            raise ValueError(f"`{type(self).__name__}.{hook}` returned advantages {fault}.")

    @th.no_grad()
    def policy_changed(self, policy: ActorPolicy) -> None:
        """Go on as if the present policy had sampled the rollout: the log-probabilities of the actions become its own."""
        rollout = self._flatten(self.pos)
        samples = self._to_samples(rollout, np.zeros(len(rollout), dtype=np.float32))
        size = policy.encoding_batch() if samples.sequences is None else len(rollout)  # sequences stay whole
        batches = samples.split(size)
        log_probs = [policy.evaluate_actions(each.observations, each.actions, **each.context)[0] for each in batches]
        self.log_probs[:, : self.pos] = th.cat(log_probs).cpu().numpy().reshape(self.n_envs, self.pos)

    @abstractmethod
    def _form_update(
        self, rollout: Transitions, last_obs: Observations, policy: ActorPolicy
    ) -> tuple[Transitions, np.ndarray]:
        """
        The hook of buffers that use a rollout as soon as it is complete.

        :param rollout: All transitions, environment by environment
        :param last_obs: Observations after the last step
        :param policy: The policy that is about to be updated; :meth:`~sb3_grpo.policies.ActorPolicy.encode` gives its features
        :return: The transitions to train on, and their advantages, shape ``(n,)``
        """

    def _flatten(self, n_steps: int) -> Transitions:
        def flat(array: np.ndarray) -> np.ndarray:
            return array[:, :n_steps].reshape(self.n_envs * n_steps, *array.shape[2:])

        self.rollouts[:] = self._rollout
        return Transitions(**{name: map_observations(flat, getattr(self, name)) for name in NAMES})

    def _to_samples(self, transitions: Transitions, advantages: np.ndarray) -> GroupRolloutBufferSamples:
        def to_device(array: np.ndarray) -> th.Tensor:
            return th.as_tensor(array, device=self.device)

        actions = to_device(transitions.actions)
        # The log-probability of a Bernoulli distribution needs floats, and the other distributions accept them.
        actions = actions.long().flatten() if isinstance(self.action_space, spaces.Discrete) else actions.float()
        kept = {name: getattr(transitions, name) for name in OPTIONAL if name in GroupRolloutBufferSamples._fields}
        has_memory = transitions.states.shape[-1] > 0
        return GroupRolloutBufferSamples(
            map_observations(to_device, transitions.observations),
            actions,
            to_device(transitions.log_probs),
            to_device(advantages),
            to_device(transitions.trajectories),
            **{name: to_device(column) for name, column in kept.items() if column.shape[-1] > 0},
            sequences=to_device(transitions.sequences(self.sequence_length)) if has_memory else None,
        )

    def _loss_weights(self, trajectories: th.Tensor, aggregation: losses.LossAggregation) -> th.Tensor | None:
        if aggregation == "step" or len(trajectories) == 0:
            return None
        _, labels, lengths = th.unique(trajectories.cpu(), return_inverse=True, return_counts=True)
        if aggregation == "trajectory":
            weights = losses.trajectory_loss_weights(lengths.double())
        else:  # over the time limit, or if it is unknown the length of a rollout
            weights = losses.constant_loss_weights(lengths.double(), self.horizon or self.buffer_size)
        return weights[labels].float().to(self.device)

    @property
    def update(self) -> GroupRolloutBufferSamples:
        """The transitions of the update."""
        assert self._update is not None, "finish_rollout() comes before the update"
        return self._update

    def permutation(self) -> np.ndarray:
        """:return: A random order of the transitions of the update"""
        return np.random.permutation(self.n_samples)

    def whole_batches(self, labels: np.ndarray, batch_size: int) -> list[np.ndarray]:
        """:return: Indices of the transitions of minibatches of whole sequences or trajectories, in random order"""
        appearance = A.label_by_appearance(labels)
        order = np.random.permutation(len(np.unique(appearance)))
        return A.batch_trajectories(appearance, order, batch_size)

    def get(self, batch_size: int | None = None, whole_trajectories: bool = False) -> Iterator[GroupRolloutBufferSamples]:
        """
        One pass over the update in random order. With memory, minibatches consist of whole sequences.

        :param batch_size: Number of transitions per minibatch; the last may have fewer. ``None`` for a single minibatch
        :param whole_trajectories: Whether each minibatch has as many whole trajectories as it needs for ``batch_size``
            transitions. Weights then make the mean of the losses of minibatches equal to the loss of the update
        """
        size = batch_size or max(self.n_samples, 1)
        labels = self.update.trajectories if whole_trajectories else self.update.sequences
        if labels is not None:
            batches = self.whole_batches(labels.cpu().numpy(), size)
            for batch in batches:
                minibatch = self.update.take(th.as_tensor(batch, device=self.device))
                if whole_trajectories:
                    weights = th.ones_like(minibatch.advantages) if minibatch.weights is None else minibatch.weights
                    minibatch = minibatch._replace(weights=weights * (len(batch) * len(batches) / max(self.n_samples, 1)))
                yield minibatch
            return
        permutation = th.as_tensor(self.permutation(), device=self.device)
        if self.has_images:  # a permuted copy of all images would take as much memory again
            yield from map(self.update.take, permutation.split(size))
        else:
            yield from self.update.take(permutation).split(size)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        raise NotImplementedError("A group rollout buffer is read in whole passes: use get().")

    def get_state(self) -> dict[str, Any]:
        """:return: State that is saved with a model, for :meth:`set_state`"""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """:param state: State from :meth:`get_state` of a buffer of the same class"""
