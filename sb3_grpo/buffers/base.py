"""The base of all buffers: storage of a rollout, minibatches of an update."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space

from sb3_grpo import advantages as A
from sb3_grpo import losses
from sb3_grpo.buffers.rollout import (
    LARGEST_REWARD,
    GroupReturns,
    GroupRolloutBufferSamples,
    Observations,
    Transitions,
    checked_reward_weights,
    map_observations,
    reward_components,
)
from sb3_grpo.validation import require_at_least, require_between, require_device


class ActorFeatures(Protocol):
    """What the actor makes of observations."""

    def __call__(self, observations: Observations, hidden: bool = False) -> np.ndarray:
        """
        :param observations: a batch of ``n``
        :param hidden: the outputs of the actor's last hidden layer, instead of those of its features extractor
        :return: shape ``(n, dim)``
        """


class GroupRolloutBuffer(BaseBuffer, ABC):
    """
    Base of all buffers: storage of a rollout of ``buffer_size * n_envs`` transitions, minibatches of an update.

    :param buffer_size: steps per environment and rollout
    :param observation_space: observation space
    :param action_space: action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: lambda of generalized advantage estimation, for the buffers that use it
    :param gamma: discount factor
    :param n_envs: number of environments
    :param group_size: trajectories per group
    :param horizon: time limit of the environment in steps, ``None`` where it is not known
    :param reward_weights: train on ``info["reward_components"]`` instead of the reward: on the sum of the components named
        here, each with its weight
    :raises ValueError: if an argument is out of range; from :meth:`add`, if an environment does not report the components
    """

    #: Whether :class:`~sb3_grpo.grpo.GRPO` may whiten the advantages (``normalize_advantage``). False for those that compare
    #: within groups: a shift over the whole update would give tied groups an advantage.
    whitens: ClassVar[bool] = False
    #: Whether rewards are to be those of the environments, where a ``VecNormalize`` would give normalised ones.
    takes_original_rewards: ClassVar[bool] = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        gae_lambda: float = 1.0,
        gamma: float = 0.99,
        n_envs: int = 1,
        group_size: int = 2,
        horizon: int | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ):
        require_at_least("buffer_size", buffer_size, 1)
        require_at_least("n_envs", n_envs, 1)
        parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
        for part in parts:
            _require_space("observation_space", part, " or a Dict of these")
        _require_space("action_space", action_space)
        require_device("device", device)
        super().__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if horizon is not None:
            require_at_least("horizon", horizon, 1)
        require_at_least("group_size", group_size, 2)
        require_between("gamma", gamma, 0.0, 1.0)
        require_between("gae_lambda", gae_lambda, 0.0, 1.0)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self.group_size = group_size
        #: Of the present environments; a kernel baseline keeps the unit of time that it has been fitted with.
        self.horizon = horizon
        self.reward_weights = checked_reward_weights(reward_weights)
        #: Figures on the last rollout, recorded by GRPO under these names.
        self.metrics: dict[str, float] = {}
        self._rollout = 0
        self._elapsed = np.zeros(n_envs, dtype=np.int64)
        self._group_returns = GroupReturns(n_envs, group_size)
        self._update: GroupRolloutBufferSamples | None = None
        self._update_starts = np.empty(0, dtype=np.int64)
        # Of the rollouts before, the latest first: what each gave rise to, and from which starts
        self._earlier: list[tuple[GroupRolloutBufferSamples, np.ndarray]] = []
        #: Whether observations, or parts of them, are images, of which the actor's features take the place.
        self.has_images = any(is_image_space(part) for part in parts)
        self._allocate()

    def _allocate(self) -> None:
        # Environments come first: a trajectory is then contiguous, and flattening a full rollout copies nothing
        shape = (self.n_envs, self.buffer_size)

        def storage(space: spaces.Space) -> np.ndarray:
            return np.zeros((*shape, *get_obs_shape(space)), dtype=space.dtype)

        space = self.observation_space
        self.observations: Observations = (
            {key: storage(part) for key, part in space.spaces.items()} if isinstance(space, spaces.Dict) else storage(space)
        )
        # A Gaussian's sample is no integer, even where the space's bounds are
        dtype = np.float32 if isinstance(self.action_space, spaces.Box) else self.action_space.dtype
        self.actions = np.zeros((*shape, self.action_dim), dtype=dtype)
        self.rewards = np.zeros(shape, dtype=np.float32)
        self.log_probs = np.zeros(shape, dtype=np.float32)
        self.starts = np.zeros(shape, dtype=np.int64)
        self.steps = np.zeros(shape, dtype=np.int64)
        self.dones = np.zeros(shape, dtype=bool)
        self.components = np.zeros((*shape, len(self.reward_weights)), dtype=np.float32)

    @property
    def n_samples(self) -> int:
        """Number of transitions in the update that the last rollout gave rise to; zero where there is nothing to train on."""
        return 0 if self._update is None else len(self._update.advantages)

    def reset(self) -> None:
        """Get ready for the next rollout."""
        super().reset()
        self._update = None
        self._final_observations: list[tuple[int, int, Any]] = []

    def start_afresh(self) -> None:
        """All environments are being reset: nothing collected before will be continued."""
        self._elapsed[:] = 0
        self._group_returns.start_afresh()
        self._earlier = []
        self.pos = 0

    def add(
        self,
        obs: Observations,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        log_prob: th.Tensor,
        start: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one step of all environments.

        :param obs: observations in which the actions were chosen, shape ``(n_envs, *obs_shape)`` or a dict of such
        :param action: as sampled (not clipped), shape ``(n_envs, *action_shape)``
        :param reward: shape ``(n_envs,)``
        :param done: whether the episode ended with this step, shape ``(n_envs,)``
        :param log_prob: of the actions, shape ``(n_envs,)``
        :param start: index of the start from which each environment's trajectory began, shape ``(n_envs,)``
        :param infos: as the environments returned them, with ``terminal_observation`` and ``TimeLimit.truncated``
        """

        def store(storage: np.ndarray, batch: np.ndarray) -> None:
            storage[:, self.pos] = np.reshape(batch, (self.n_envs, *storage.shape[2:]))

        if self.reward_weights:
            self.components[:, self.pos], reward = self._components_and_their_sum(infos)
        map_observations(store, self.observations, obs)
        store(self.actions, action)
        self.rewards[:, self.pos] = reward
        self.log_probs[:, self.pos] = log_prob.detach().cpu().numpy().reshape(-1)
        self.starts[:, self.pos] = start
        self.steps[:, self.pos] = self._elapsed
        self.dones[:, self.pos] = done
        self._group_returns.add(reward, done, start)
        self._elapsed += 1
        for env in np.flatnonzero(done):
            self._elapsed[env] = 0
            if infos[env].get("TimeLimit.truncated", False) and infos[env].get("terminal_observation") is not None:
                self._final_observations.append((int(env), self.pos, infos[env]["terminal_observation"]))
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def keep_features(self, features: th.Tensor) -> None:
        """
        What the actor's features extractor has made of the observations of the step about to be added. A buffer that would
        ask for them again can keep them.

        :param features: shape ``(n_envs, features_dim)``
        """

    def _components_and_their_sum(self, infos: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        names, weights = list(self.reward_weights), np.array(list(self.reward_weights.values()))
        components = np.array([reward_components(info, names, env) for env, info in enumerate(infos)])
        sums = components @ weights
        if not (np.abs(sums) <= LARGEST_REWARD).all():
            raise ValueError(
                f"The weighted sums of the reward components are {sums}: choose smaller `reward_weights` than "
                f"{self.reward_weights}, or scale the components down."
            )
        return components, sums

    def finish_rollout(self, last_obs: Observations, actor_features: ActorFeatures) -> None:
        """
        Form the update from a full rollout.

        :param last_obs: observations after the last step, shape ``(n_envs, *obs_shape)`` or a dict of such
        :param actor_features: the actor's features of a batch of observations
        """
        self._rollout += 1
        self.metrics = self._describe_groups(self._group_returns.pop_complete())
        rollout = self._flatten(self.pos)
        self.pos = 0  # what a stop leaves in the storage is told from what has been used by this
        transitions, advantages = self._form_update(rollout, last_obs, actor_features)
        if len(advantages) > 0:
            self.metrics["train/advantage_mean"] = float(np.mean(advantages))
            self.metrics["train/advantage_std"] = float(np.std(advantages))
        self._update_starts = transitions.starts
        self._update = self._to_samples(transitions, advantages)

    @staticmethod
    def _describe_groups(returns: np.ndarray) -> dict[str, float]:
        """
        :param returns: of the groups completed in a rollout, shape ``(n_groups, group_size)``
        :return: what is logged about them
        """
        metrics = {"rollout/groups_completed": float(len(returns))}
        if len(returns) > 0:
            metrics["rollout/group_return_mean"] = float(returns.mean())
            metrics["rollout/group_return_spread"] = float(np.ptp(returns, axis=1).mean())
        return metrics

    @abstractmethod
    def _form_update(
        self, rollout: Transitions, last_obs: Observations, actor_features: ActorFeatures
    ) -> tuple[Transitions, np.ndarray]:
        """
        The hook of buffers that judge a rollout as it comes.

        :param rollout: all transitions, environment by environment
        :param last_obs: see :meth:`finish_rollout`
        :param actor_features: see :meth:`finish_rollout`
        :return: the transitions to train on, and their advantages, shape ``(n,)``
        """

    def _flatten(self, n_steps: int) -> Transitions:
        def flat(array: np.ndarray) -> np.ndarray:
            return array[:, :n_steps].reshape(self.n_envs * n_steps, *array.shape[2:])

        return Transitions(
            observations=map_observations(flat, self.observations),
            actions=flat(self.actions),
            rewards=flat(self.rewards),
            log_probs=flat(self.log_probs),
            starts=flat(self.starts),
            steps=flat(self.steps),
            dones=flat(self.dones),
            rollouts=np.full(self.n_envs * n_steps, self._rollout, dtype=np.int64),
            components=flat(self.components),
        )

    def _to_samples(self, transitions: Transitions, advantages: np.ndarray) -> GroupRolloutBufferSamples:
        def to_device(array: np.ndarray) -> th.Tensor:
            return th.as_tensor(array, device=self.device)

        if isinstance(self.action_space, spaces.Discrete):
            actions = to_device(transitions.actions).long().flatten()
        else:
            # Bernoulli's log-probability wants floats, the other distributions take them too
            actions = to_device(transitions.actions).float()
        return GroupRolloutBufferSamples(
            map_observations(to_device, transitions.observations),
            actions,
            to_device(transitions.log_probs),
            to_device(advantages.astype(np.float32)),
        )

    def whiten_advantages(self) -> None:
        """Standardise the advantages over the whole update, where the formula leaves their scale open."""
        if self.whitens and self._update is not None:
            whitened = A.whiten(self._update.advantages.cpu().numpy()).astype(np.float32)
            self._update = self._update._replace(advantages=th.as_tensor(whitened, device=self.device))

    def reuse_earlier(self, n_rollouts: int, log_probs: Callable[[GroupRolloutBufferSamples], th.Tensor]) -> None:
        """
        Add to the update those of the rollouts before, as if the present policy had sampled them: their log-probabilities
        become the present ones, and their advantages are weighed by :func:`~sb3_grpo.losses.reuse_weights`. A rollout
        that has nothing to train on is left so.

        :param n_rollouts: how many of them; the memory of as many is held from one rollout to the next
        :param log_probs: of the actions of ``n`` transitions under the present policy, shape ``(n,)``
        """
        if self._update is None or self.n_samples == 0:
            return
        # A copy: the update shares the memory of the storage, which the next rollout fills
        latest = self._update.map(th.clone), self._update_starts
        updates, weights = [self._update], []
        for earlier, _ in self._earlier:
            present = log_probs(earlier)
            weights.append(losses.reuse_weights(present, earlier.old_log_prob))
            updates.append(earlier._replace(old_log_prob=present, advantages=earlier.advantages * weights[-1]))
        if weights:
            self.metrics["train/reuse_effective_sample_size"] = losses.effective_sample_size(th.cat(weights)).item()
            self._update = updates[0].map(lambda *parts: th.cat(parts), *updates[1:])
            self._update_starts = np.concatenate([self._update_starts, *(starts for _, starts in self._earlier)])
        self._earlier = [latest, *self._earlier][:n_rollouts]

    def weigh_transitions(self, aggregation: losses.LossAggregation) -> None:
        """
        Give each transition of the update its weight in the loss. A trajectory is what the update holds of it.

        :param aggregation: see :data:`~sb3_grpo.losses.LOSS_WEIGHTS`; with ``"constant"`` the time limit is what a
            trajectory may have, or the steps of a rollout where no limit is known
        """
        loss_weights = losses.LOSS_WEIGHTS[aggregation]
        if loss_weights is None or self._update is None or self.n_samples == 0:
            return
        trajectories = A.label_by_appearance(self._update_starts)
        lengths = np.bincount(trajectories)
        weights = loss_weights(lengths, self.horizon or self.buffer_size)[trajectories].astype(np.float32)
        self._update = self._update._replace(weights=th.as_tensor(weights, device=self.device))

    def get(
        self, batch_size: int | None = None, whole_trajectories: bool = False
    ) -> Generator[GroupRolloutBufferSamples, None, None]:
        """
        One pass over the update in random order.

        :param batch_size: transitions per minibatch, the last may have fewer; ``None`` for a single batch
        :param whole_trajectories: deal out trajectories instead of transitions: each minibatch has as many as are needed for
            ``batch_size`` transitions. Since minibatches then differ in size, their weights are such that the losses of a
            pass average to the loss of the update, as those of equal minibatches do
        """
        assert self._update is not None, "finish_rollout() comes before get()"
        if whole_trajectories:
            yield from self._whole_trajectories(self._update, batch_size or max(self.n_samples, 1))
            return
        permutation = th.as_tensor(np.random.permutation(self.n_samples), device=self.device)
        size = batch_size or max(self.n_samples, 1)
        if self.has_images:  # which are not to be held twice
            yield from map(self._update.take, permutation.split(size))
        else:
            yield from self._update.take(permutation).split(size)

    def _whole_trajectories(self, update: GroupRolloutBufferSamples, batch_size: int) -> Iterator[GroupRolloutBufferSamples]:
        trajectories = A.label_by_appearance(self._update_starts)
        order = np.random.permutation(len(np.unique(trajectories)))
        batches = A.deal_trajectories(trajectories, order, batch_size)
        for batch in batches:
            minibatch = update.take(th.as_tensor(batch, device=self.device))
            weights = th.ones_like(minibatch.advantages) if minibatch.weights is None else minibatch.weights
            yield minibatch._replace(
                weights=weights * (len(batch) * len(batches) / max(self.n_samples, 1)),
                trajectories=th.as_tensor(A.label_by_appearance(trajectories[batch]), device=self.device),
            )

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        raise NotImplementedError("A group rollout buffer is read in whole passes: use get().")

    def get_state(self) -> dict[str, Any]:
        """:return: what has to be saved with a model, to be given to :meth:`set_state`"""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """
        :param state: from :meth:`get_state` of a buffer of the same class
        """


def _require_space(name: str, value: Any, or_else: str = "") -> None:
    """
    :param name: of the argument
    :param value: what came
    :param or_else: what else would have been accepted, for the message
    :raises ValueError: if it is no space of which transitions can be stored
    """
    if not isinstance(value, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(f"`{name}` must be a Box, Discrete, MultiDiscrete or MultiBinary space{or_else}, not {value!r}.")
