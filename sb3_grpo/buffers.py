"""
Group rollout buffers: what turns the rewards of a rollout into advantages.

A buffer stores what :class:`~sb3_grpo.grpo.GRPO` collects, forms the advantages once the rollout is complete, and hands out
the transitions to train on in minibatches. Every variant overrides one hook:

- :meth:`GroupRolloutBuffer._form_update` for all transitions of a rollout (the kernel baseline);
- :meth:`CompleteGroupRolloutBuffer._group_advantages` for whole groups of whole trajectories (the four others).
"""

import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space, preprocess_obs
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_grpo import functional as F
from sb3_grpo.baselines import KernelBaseline, eligibility_traces, predict_by_fold
from sb3_grpo.checks import require_at_least, require_between, require_device, require_flag, require_one_of, require_positive

#: A batch of observations: an array, or one array per key for a Dict space; the first axis counts observations.
Observations = np.ndarray | dict[str, np.ndarray]
ComponentAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
#: Key of ``info`` under which an environment reports several rewards.
REWARD_COMPONENTS = "reward_components"
#: Rewards are stored in single precision; beyond this they would be infinite.
LARGEST_REWARD = float(np.finfo(np.float32).max)
#: Below, the normal equations of features that depend on one another are singular in double precision.
SMALLEST_RIDGE = 1e-8
#: Episodes that LSTD looks ahead at most: with ``gamma=1`` and no end in sight, the level of returns would be anything.
EPISODES_AHEAD = 10


class ActorFeatures(Protocol):
    """What the actor makes of observations."""

    def __call__(self, observations: Observations, hidden: bool = False) -> np.ndarray:
        """
        :param observations: a batch of ``n``
        :param hidden: the outputs of the actor's last hidden layer, instead of those of its features extractor
        :return: shape ``(n, dim)``
        """


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
    :param starts: index of the start (see :class:`~sb3_grpo.starts.StartQueue`) of the trajectory, shape ``(n,)``
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
        self.reward_weights = _checked_reward_weights(reward_weights)
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
            whitened = F.whiten(self._update.advantages.cpu().numpy()).astype(np.float32)
            self._update = self._update._replace(advantages=th.as_tensor(whitened, device=self.device))

    def reuse_earlier(self, n_rollouts: int, log_probs: Callable[[GroupRolloutBufferSamples], th.Tensor]) -> None:
        """
        Add to the update those of the rollouts before, as if the present policy had sampled them: their log-probabilities
        become the present ones, and their advantages are weighed by :func:`~sb3_grpo.functional.reuse_weights`. A rollout
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
            weights.append(F.reuse_weights(present, earlier.old_log_prob))
            updates.append(earlier._replace(old_log_prob=present, advantages=earlier.advantages * weights[-1]))
        if weights:
            self.metrics["train/reuse_effective_sample_size"] = F.effective_sample_size(th.cat(weights)).item()
            self._update = updates[0].map(lambda *parts: th.cat(parts), *updates[1:])
            self._update_starts = np.concatenate([self._update_starts, *(starts for _, starts in self._earlier)])
        self._earlier = [latest, *self._earlier][:n_rollouts]

    def weigh_transitions(self, aggregation: F.LossAggregation) -> None:
        """
        Give each transition of the update its weight in the loss. A trajectory is what the update holds of it.

        :param aggregation: see :data:`~sb3_grpo.functional.LOSS_WEIGHTS`; with ``"constant"`` the time limit is what a
            trajectory may have, or the steps of a rollout where no limit is known
        """
        loss_weights = F.LOSS_WEIGHTS[aggregation]
        if loss_weights is None or self._update is None or self.n_samples == 0:
            return
        trajectories = F.label_by_appearance(self._update_starts)
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
        trajectories = F.label_by_appearance(self._update_starts)
        order = np.random.permutation(len(np.unique(trajectories)))
        batches = F.deal_trajectories(trajectories, order, batch_size)
        for batch in batches:
            minibatch = update.take(th.as_tensor(batch, device=self.device))
            weights = th.ones_like(minibatch.advantages) if minibatch.weights is None else minibatch.weights
            yield minibatch._replace(
                weights=weights * (len(batch) * len(batches) / max(self.n_samples, 1)),
                trajectories=th.as_tensor(F.label_by_appearance(trajectories[batch]), device=self.device),
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


class KernelRolloutBuffer(GroupRolloutBuffer):
    """
    Generalized advantage estimation against a kernel baseline that is fitted in closed form: short name ``kernel``.

    Every rollout gives an update, whether or not episodes end. The baseline is the fixed point of lambda-returns, and judges
    no trajectory by a fit to itself: trajectories are dealt into folds, and each fold is judged by the fit to the others (and,
    through the statistics' memory, to earlier rollouts). With a single trajectory in the rollout that leaves the earlier
    rollouts alone.

    Its inputs are the observations, flattened and one-hot encoded where they are discrete; for spaces with images what the
    actor's features extractor makes of them takes their place.

    :param buffer_size: steps per environment and rollout
    :param observation_space: observation space
    :param action_space: action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: lambda of the advantages
    :param gamma: discount factor
    :param n_envs: number of environments
    :param group_size: trajectories per group
    :param horizon: number of steps that counts as one unit of time; ``None`` for the longest trajectory so far, rounded up
        to a power of two
    :param n_features: number of random Fourier features
    :param bandwidth: standard deviation of the random frequencies
    :param ridge: penalty on the squared weights, per sample. With ``fit="lstd"`` the same number weighs more, the more a
        feature persists: on the level of the returns as if ``(1 - gamma lambda) / (1 - gamma)`` times as large
    :param forgetting: weight that the statistics of earlier rollouts keep
    :param n_folds: number of folds
    :param time_feature: whether the baseline depends on the step within the episode
    :param actor_features: fit to the outputs of the actor's last hidden layer instead of the observations. They change with
        every update, what is kept of earlier rollouts does not
    :param target_lambda: lambda of the returns that the baseline is fitted to, ``None`` for ``gae_lambda``
    :param fit: with ``"lstd"``, what such a return leaves to the baseline is left to the new one itself, by least-squares
        temporal difference learning, LSTD(lambda) (Boyan 2002, https://doi.org/10.1023/A:1017936530646). That system can be
        close to singular: predictions are kept within what rewards such as those seen so far can add up to, and the
        discount factor is ``1 - 1 / (10 horizon)`` at most, so that ``gamma=1`` has a level. With ``gamma`` above
        ``1 - 1 / horizon`` time limits reset the clock. With ``"regression"`` it is left to the baseline of the rollout
        before, which then lags behind where ``target_lambda`` is less than 1; that wants a larger ``ridge``, such as 1e-4
    :param reward_weights: see :class:`GroupRolloutBuffer`
    """

    whitens = True

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
        n_features: int = 128,
        bandwidth: float = 0.5,
        ridge: float = 1e-5,
        forgetting: float = 0.8,
        n_folds: int = 4,
        time_feature: bool = True,
        actor_features: bool = False,
        target_lambda: float | None = None,
        fit: Literal["regression", "lstd"] = "lstd",
        reward_weights: Mapping[str, float] | None = None,
    ):
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            gae_lambda,
            gamma,
            n_envs,
            group_size,
            horizon,
            reward_weights,
        )
        require_at_least("n_features", n_features, 1)
        require_positive("bandwidth", bandwidth)
        require_positive("ridge", ridge)
        if ridge < SMALLEST_RIDGE:
            raise ValueError(
                f"`ridge` must be a number of at least {SMALLEST_RIDGE:g}, not {ridge!r}: with less, features that depend on "
                "one another make the fit fail."
            )
        require_at_least("n_folds", n_folds, 1)
        require_between("forgetting", forgetting, 0.0, 1.0)
        require_flag("time_feature", time_feature)
        require_flag("actor_features", actor_features)
        if target_lambda is not None:
            require_between("target_lambda", target_lambda, 0.0, 1.0)
        require_one_of("fit", fit, ("regression", "lstd"))
        self.target_lambda = gae_lambda if target_lambda is None else target_lambda
        self.n_folds = n_folds
        self.actor_features = actor_features
        # SB3 has seeded numpy's global generator with the model's seed at this point
        self.baseline = KernelBaseline(
            n_features,
            bandwidth,
            ridge,
            forgetting,
            time_feature,
            seed=np.random.randint(np.iinfo(np.int32).max),
            instrumented=fit == "lstd",
        )
        self._longest = 1
        self._reward_range = (0.0, 0.0)
        self._fitted_horizon = self.horizon
        # Of images, which are costly to encode a second time; shape (n_envs, buffer_size, features_dim)
        self._features = th.empty(0, 0, 0)
        self._n_features_kept = 0

    def keep_features(self, features: th.Tensor) -> None:
        if not self.has_images or self.actor_features:
            return
        shape = (self.n_envs, self.buffer_size, features.shape[1])
        if self._features.shape != shape:
            self._features = th.zeros(shape, dtype=features.dtype, device=features.device)
        self._features[:, self.pos] = features
        self._n_features_kept += 1

    def reset(self) -> None:
        super().reset()
        self._n_features_kept = 0

    def _form_update(
        self, rollout: Transitions, last_obs: Observations, actor_features: ActorFeatures
    ) -> tuple[Transitions, np.ndarray]:
        encode: Callable[[Observations], np.ndarray] = actor_features if self.has_images else self._encode
        if self.actor_features:
            encode = functools.partial(actor_features, hidden=True)
        time_unit = self._time_unit(rollout.steps)
        if self._n_features_kept == self.buffer_size:
            inputs = self._features.flatten(end_dim=1).double().cpu().numpy()
        else:
            inputs = encode(rollout.observations)
        self.baseline.observe(inputs)
        features = self.baseline.features(inputs, rollout.steps / time_unit)

        # Where a time limit or the end of the rollout cut a trajectory, the baseline stands for what would have followed
        cuts, cut_obs = self._cut_observations(last_obs)
        cut_times = rollout.steps[cuts] + 1
        # If the discount looks that far, what follows a time limit would be a level that no sample ties down: it has no time
        # of its own, so that the clock may as well begin anew
        if self.baseline.instrumented and self.gamma > 1.0 - 1.0 / time_unit:
            cut_times[rollout.dones[cuts]] = 0
        cut_features = self.baseline.features(encode(cut_obs), cut_times / time_unit)

        ends = rollout.dones.copy()
        ends[self.buffer_size - 1 :: self.buffer_size] = True
        continues = 1.0 - ends
        rewards = rollout.rewards.astype(np.float64)

        gamma = self._discount_factor(time_unit)

        def advantages_against(baseline: np.ndarray, cut_baseline: np.ndarray, lambda_: float) -> np.ndarray:
            next_baseline = np.append(baseline[1:], 0.0) * continues
            next_baseline[cuts] = cut_baseline
            return F.generalized_advantages(rewards, baseline, next_baseline, continues, gamma, lambda_)

        trajectory = np.cumsum(ends) - ends
        folds = th.as_tensor(trajectory % self.n_folds)
        bounds = self._attainable_returns(rewards, gamma)
        earlier = self.baseline.weights
        prior, cut_prior = (np.clip((each @ earlier).numpy(), *bounds) for each in (features, cut_features))
        targets = prior + advantages_against(prior, cut_prior, 1.0 if self.baseline.instrumented else self.target_lambda)
        if self.baseline.instrumented:
            weights = self._fit_differences(features, cut_features, cuts, rewards, continues, folds, gamma)
        else:
            weights = self.baseline.fit(features, th.as_tensor(targets), folds)
        baseline = np.clip(predict_by_fold(features, weights, folds).numpy(), *bounds)
        cut_baseline = np.clip(predict_by_fold(cut_features, weights, folds[cuts]).numpy(), *bounds)
        advantages = advantages_against(baseline, cut_baseline, self.gae_lambda)
        self.metrics["train/explained_variance"] = F.explained_variance(baseline, targets)
        # Without a baseline a transition would be judged by its lambda-return as it is
        self.metrics["train/baseline_variance_reduction"] = F.explained_variance(baseline, baseline + advantages)
        return rollout, advantages

    def _discount_factor(self, time_unit: float) -> float:
        """
        :param time_unit: steps of an episode
        :return: of fit and advantages alike: where they differed, each advantage would have a part of the baseline in it
        """
        return min(self.gamma, 1.0 - 1.0 / (EPISODES_AHEAD * time_unit)) if self.baseline.instrumented else self.gamma

    def _fit_differences(
        self,
        features: th.Tensor,
        cut_features: th.Tensor,
        cuts: np.ndarray,
        rewards: np.ndarray,
        continues: np.ndarray,
        folds: th.Tensor,
        gamma: float,
    ) -> th.Tensor:
        """
        LSTD(lambda): weights ``w`` for which ``sum_t e_t (r_t + gamma phi_{t+1} . w - phi_t . w)`` is zero, but for the
        penalty; with ``lambda = 1`` the regression of returns whose unseen rest is the prediction itself.

        :param features: ``phi``, shape ``(n, p)``
        :param cut_features: where a trajectory went on unseen, shape ``(n_cuts, p)``
        :param cuts: after which rows it did, shape ``(n_cuts,)``
        :param rewards: shape ``(n,)``
        :param continues: 0 where a trajectory or the rollout ended with the step, else 1, shape ``(n,)``
        :param folds: fold of each sample, shape ``(n,)``
        :param gamma: discount factor
        :return: shape ``(n_folds, p)``
        """
        goes_on = th.as_tensor(continues)
        following = features.roll(-1, dims=0) * goes_on[:, None]
        following[cuts] = cut_features
        by_env = features.view(self.n_envs, self.buffer_size, -1)
        traces = eligibility_traces(by_env, goes_on.view(self.n_envs, -1), gamma * self.target_lambda)
        differences = features - gamma * following
        return self.baseline.fit(differences, th.as_tensor(rewards), folds, traces.flatten(end_dim=1))

    def _attainable_returns(self, rewards: np.ndarray, gamma: float) -> tuple[float, float]:
        """
        :param rewards: of the rollout
        :param gamma: discount factor, less than 1
        :return: for LSTD, the least and the most that such rewards, or those of earlier rollouts, can add up to; else infinity
        """
        if not self.baseline.instrumented:
            return -np.inf, np.inf
        lowest, highest = self._reward_range
        self._reward_range = min(lowest, float(rewards.min())), max(highest, float(rewards.max()))
        return self._reward_range[0] / (1.0 - gamma), self._reward_range[1] / (1.0 - gamma)

    def _time_unit(self, steps: np.ndarray) -> float:
        if self._fitted_horizon is not None:
            return float(self._fitted_horizon)
        self._longest = max(self._longest, int(steps.max()) + 1)
        return float(2 ** np.ceil(np.log2(self._longest)))

    def _cut_observations(self, last_obs: Observations) -> tuple[np.ndarray, Observations]:
        """
        :param last_obs: observations after the last step, first axis environments
        :return: the rows (in the flat rollout) after which a trajectory went on unseen, and the observations there
        """
        running = np.flatnonzero(~self.dones[:, -1])
        cuts = [env * self.buffer_size + pos for env, pos, _ in self._final_observations]
        cuts += [int(env) * self.buffer_size + self.buffer_size - 1 for env in running]
        final = [obs for _, _, obs in self._final_observations]
        final += [take_observations(last_obs, env) for env in running]
        if not cuts:
            return np.empty(0, dtype=np.int64), take_observations(last_obs, slice(0))
        return np.array(cuts, dtype=np.int64), map_observations(lambda *arrays: np.stack(arrays), *final)

    def _encode(self, observations: Observations) -> np.ndarray:
        tensors = map_observations(th.as_tensor, observations)
        encoded = preprocess_obs(tensors, self.observation_space, normalize_images=False)
        parts = list(encoded.values()) if isinstance(encoded, dict) else [encoded]
        return th.cat([part.flatten(start_dim=1).double() for part in parts], dim=1).numpy()

    def get_state(self) -> dict[str, Any]:
        state = {"baseline": self.baseline.get_state(), "longest": self._longest, "horizon": self._fitted_horizon}
        state["reward_range"] = self._reward_range
        return {**state, "options": self._options_of_features()}

    def _options_of_features(self) -> dict[str, Any]:
        options = {name: getattr(self.baseline, name) for name in ("n_features", "bandwidth", "time_feature")}
        return {
            **options,
            "actor_features": self.actor_features,
            "fit": "lstd" if self.baseline.instrumented else "regression",
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # Files of the first commits have no options, or not all of them
        earlier = {**self._options_of_features(), "actor_features": False, "fit": "regression"}
        options = {**earlier, **state.get("options", {})}
        if options != self._options_of_features():
            warnings.warn(
                f"The saved kernel baseline was fitted with {options}, this buffer asks for {self._options_of_features()}: "
                "its fit begins afresh.",
                stacklevel=2,
            )
            return
        self.baseline.set_state(state["baseline"])
        self._longest = state["longest"]
        self._reward_range = state.get("reward_range", (0.0, 0.0))
        # The fit was to times in this unit, whatever the time limit of the present environment
        self._fitted_horizon = state["horizon"]


class CompleteGroupRolloutBuffer(GroupRolloutBuffer):
    """
    Base of the buffers that judge whole trajectories, and so train on a trajectory once its whole group has ended.

    Transitions of unfinished groups wait, across rollouts, with the log-probabilities they were sampled with. Each enters
    exactly one update; a rollout in which no group was completed makes none. When all environments are reset from outside
    (a new ``learn``, a loaded model) trajectories in flight end unseen, and the transitions of their groups are dropped.

    Rewards are the environments' own, not those that a ``VecNormalize`` divides by a running scale: equal members would have
    different returns for the moments they ran at.

    :param buffer_size: steps per environment and rollout
    :param observation_space: observation space
    :param action_space: action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: not used, trajectories are judged whole
    :param gamma: discount factor
    :param n_envs: number of environments
    :param group_size: trajectories per group
    :param horizon: time limit of the environment in steps, ``None`` where it is not known
    :param scale: by what the differences within a group are divided, see :func:`~sb3_grpo.functional.rescale`
    :param max_waiting: transitions that may wait before the oldest groups are dropped; ``None`` for 16 rollouts, but at least
        20,000 and enough for the episodes of a known ``horizon``
    :param tied_groups: groups whose members nothing tells apart, as this buffer compares them, so that all their advantages
        are zero: ``"keep"`` their transitions, which count in the means of the loss, or ``"skip"`` them as if they had not
        been sampled. That is the filter of DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, equation 11); no others
        are sampled in their place
    :param reward_weights: see :class:`GroupRolloutBuffer`
    :param component_aggregation: with ``reward_weights``, ``"sum_then_normalize"`` forms the sum and judges it,
        ``"normalize_then_sum"`` judges each component on its own, as if it were the reward, and adds the weighted advantages
        up: a component counts by its weight then, whatever its scale (GDPO, https://arxiv.org/abs/2601.05242, without its
        normalisation over the batch)
    """

    default_scale: ClassVar[F.Scale] = "group"
    takes_original_rewards = True

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
        scale: F.Scale | None = None,
        max_waiting: int | None = None,
        tied_groups: Literal["keep", "skip"] = "keep",
        reward_weights: Mapping[str, float] | None = None,
        component_aggregation: ComponentAggregation = "sum_then_normalize",
    ):
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            gae_lambda,
            gamma,
            n_envs,
            group_size,
            horizon,
            reward_weights,
        )
        if scale is not None:
            require_one_of("scale", scale, ("group", "batch", "none"))
        require_one_of("tied_groups", tied_groups, ("keep", "skip"))
        require_one_of("component_aggregation", component_aggregation, ("sum_then_normalize", "normalize_then_sum"))
        if component_aggregation == "normalize_then_sum" and not self.reward_weights:
            raise ValueError(
                "component_aggregation='normalize_then_sum' concerns several rewards: name them and their weights in "
                f"`reward_weights`, which is {reward_weights!r}."
            )
        self.tied_groups = tied_groups
        self.component_aggregation = component_aggregation
        if max_waiting is not None:
            require_at_least("max_waiting", max_waiting, 1)
        self.scale: F.Scale = scale or self.default_scale
        self._max_waiting = max_waiting
        self.dropped = 0
        self._waiting: Transitions | None = None
        self._first_live_group = 0
        self._warned_of_dropping = False

    @property
    def max_waiting(self) -> int:
        """Transitions that may wait for their group to end."""
        longest_wait = 2 * (self.horizon or 0) * (self.group_size + self.n_envs)
        return self._max_waiting or max(16 * self.buffer_size * self.n_envs, 20_000, longest_wait)

    def reset(self) -> None:
        if self.pos > 0:
            # The last rollout was stopped, half-way or at its last step: its trajectories go on, so it must be kept
            self._waiting = self._waiting_and(self._flatten(self.pos))
        super().reset()

    def start_afresh(self) -> None:
        self.dropped += self.pos * self.n_envs
        self._first_live_group = 0
        super().start_afresh()
        if self._waiting is not None:
            self.dropped += len(self._waiting)
            self._waiting = None

    def _waiting_and(self, rollout: Transitions) -> Transitions:
        live = rollout.starts // self.group_size >= self._first_live_group
        self.dropped += len(rollout) - int(live.sum())
        rollout = rollout.take(live)
        return rollout if self._waiting is None else self._waiting.followed_by(rollout)

    def _form_update(
        self, rollout: Transitions, last_obs: Observations, actor_features: ActorFeatures
    ) -> tuple[Transitions, np.ndarray]:
        collected = self._waiting_and(rollout)
        groups = collected.starts // self.group_size
        ended, n_ended = np.unique(groups[collected.dones], return_counts=True)
        complete = np.isin(groups, ended[n_ended == self.group_size])

        self._waiting = self._bounded(collected.take(~complete))
        update = collected.take(complete)
        update = update.take(np.lexsort((update.steps, update.starts)))
        age = self._rollout - self._waiting.rollouts
        self.metrics.update(
            {
                "rollout/groups_completed": float((n_ended == self.group_size).sum()),
                "rollout/transitions_waiting": float(len(self._waiting)),
                "rollout/transitions_waiting_age": float(age.max()) if len(age) else 0.0,
                "rollout/transitions_dropped": float(self.dropped),
            }
        )
        if len(update) == 0:
            return update, np.empty(0)
        advantages, tied = self._judge(update)
        groups = update.starts // self.group_size
        self.metrics["rollout/groups_tied"] = len(np.unique(groups[tied])) / len(np.unique(groups))
        if self.tied_groups == "skip" and tied.any():
            update = update.take(~tied)
            # Judged anew: what is skipped has no part in the scale of a batch either
            advantages, _ = self._judge(update)
        return update, advantages

    def _judge(self, update: Transitions) -> tuple[np.ndarray, np.ndarray]:
        """
        :param update: complete groups, trajectory by trajectory
        :return: advantages, and whether nothing can be learned from the transition's group, both of shape ``(n,)``
        """
        if len(update) == 0:
            return np.empty(0), np.empty(0, dtype=bool)
        lengths = update.steps[update.dones] + 1
        groups = np.unique(update.starts[update.dones] // self.group_size, return_inverse=True)[1]
        advantages = self._advantages(update, lengths, groups)
        labels = np.repeat(groups, lengths)
        return advantages, (F.sum_by_label(np.abs(advantages), labels) == 0.0)[labels]

    def _advantages(self, update: Transitions, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        if self.reward_weights and self.component_aggregation == "normalize_then_sum":
            weighted = (
                weight * self._group_advantages(component.astype(np.float64), lengths, groups)
                for weight, component in zip(self.reward_weights.values(), update.components.T, strict=True)
            )
            return np.sum(list(weighted), axis=0)
        return self._group_advantages(update.rewards.astype(np.float64), lengths, groups)

    def _bounded(self, waiting: Transitions) -> Transitions:
        """
        :param waiting: transitions of unfinished groups
        :return: no more than ``max_waiting`` of them, those of the groups that began last
        """
        if len(waiting) <= self.max_waiting:
            return waiting
        groups = waiting.starts // self.group_size
        labels, counts = np.unique(groups, return_counts=True)
        fits = np.cumsum(counts[::-1])[::-1] <= self.max_waiting
        self._first_live_group = int(labels[fits][0] if fits.any() else labels[-1] + 1)
        kept = waiting.take(groups >= self._first_live_group)
        self.dropped += len(waiting) - len(kept)
        if not self._warned_of_dropping:
            self._warned_of_dropping = True
            warnings.warn(
                f"{len(waiting)} transitions wait for their groups of {self.group_size} trajectories to end, more than the "
                f"{self.max_waiting} that may wait: the oldest groups are dropped, and nothing is learned from them. Episodes "
                "that never end, or hardly ever, cannot be judged whole. Give the environment a time limit "
                "(`gymnasium.make(..., max_episode_steps=...)`), use `rollout_buffer_class='kernel'`, which needs no ends, "
                "or, if the episodes are merely long, allow more with `rollout_buffer_kwargs=dict(max_waiting=...)`.",
                stacklevel=2,
            )
        return kept

    @abstractmethod
    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """
        The hook of buffers that judge whole groups.

        :param rewards: of all steps, trajectory by trajectory, shape ``(n,)``
        :param lengths: transitions of each trajectory, shape ``(m,)``
        :param groups: group of each trajectory, integers from 0 on, each with ``group_size`` members, shape ``(m,)``
        :return: advantages, shape ``(n,)``
        """


class OutcomeRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each trajectory is judged by its reward sum against its group's: short name ``outcome``, see
    :func:`~sb3_grpo.functional.outcome_advantages`.

    :param args: see :class:`CompleteGroupRolloutBuffer`
    :param leave_one_out: compare each member with the others instead of with all (RLOO)
    :param kwargs: see :class:`CompleteGroupRolloutBuffer`
    """

    def __init__(self, *args: Any, leave_one_out: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        require_flag("leave_one_out", leave_one_out)
        self.leave_one_out = leave_one_out

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return F.outcome_advantages(rewards, lengths, groups, self.scale, self.leave_one_out)


class ProcessRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by the normalised rewards from it on: short name ``process``, see
    :func:`~sb3_grpo.functional.process_advantages`. It learns nothing from a constant reward.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return F.process_advantages(rewards, lengths, groups, self.scale)


class ReturnToGoRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by its return-to-go against all of the group's: short name ``return_to_go``, see
    :func:`~sb3_grpo.functional.return_to_go_advantages`.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return F.return_to_go_advantages(rewards, lengths, groups, self.gamma, self.scale)


class StepwiseRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by its return-to-go against those of the other members at the same step: short name ``stepwise``, see
    :func:`~sb3_grpo.functional.stepwise_advantages`.
    """

    default_scale = "batch"

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        self.metrics["rollout/steps_without_peer"] = float(F.count_steps_without_peer(lengths, groups))
        return F.stepwise_advantages(rewards, lengths, groups, self.gamma, self.scale)


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


def _checked_reward_weights(reward_weights: Mapping[str, float] | None) -> dict[str, float]:
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


def _require_space(name: str, value: Any, or_else: str = "") -> None:
    """
    :param name: of the argument
    :param value: what came
    :param or_else: what else would have been accepted, for the message
    :raises ValueError: if it is no space of which transitions can be stored
    """
    if not isinstance(value, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(f"`{name}` must be a Box, Discrete, MultiDiscrete or MultiBinary space{or_else}, not {value!r}.")
