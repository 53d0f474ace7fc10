"""The buffers that judge whole trajectories against those of their group."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_grpo import advantages as A
from sb3_grpo.buffers.base import ActorFeatures, GroupRolloutBuffer
from sb3_grpo.buffers.rollout import Observations, Transitions
from sb3_grpo.validation import require_at_least, require_flag, require_one_of

ComponentAggregation = Literal["sum_then_normalize", "normalize_then_sum"]


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
    :param scale: by what the differences within a group are divided, see :func:`~sb3_grpo.advantages.rescale`
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

    default_scale: ClassVar[A.Scale] = "group"
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
        scale: A.Scale | None = None,
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
        self.scale: A.Scale = scale or self.default_scale
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
        return advantages, (A.sum_by_label(np.abs(advantages), labels) == 0.0)[labels]

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
    :func:`~sb3_grpo.advantages.outcome_advantages`.

    :param args: see :class:`CompleteGroupRolloutBuffer`
    :param leave_one_out: compare each member with the others instead of with all (RLOO)
    :param kwargs: see :class:`CompleteGroupRolloutBuffer`
    """

    def __init__(self, *args: Any, leave_one_out: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        require_flag("leave_one_out", leave_one_out)
        self.leave_one_out = leave_one_out

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.outcome_advantages(rewards, lengths, groups, self.scale, self.leave_one_out)


class ProcessRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by the normalised rewards from it on: short name ``process``, see
    :func:`~sb3_grpo.advantages.process_advantages`. It learns nothing from a constant reward.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.process_advantages(rewards, lengths, groups, self.scale)


class ReturnToGoRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by its return-to-go against all of the group's: short name ``return_to_go``, see
    :func:`~sb3_grpo.advantages.return_to_go_advantages`.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.return_to_go_advantages(rewards, lengths, groups, self.gamma, self.scale)


class StepwiseRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Each step is judged by its return-to-go against those of the other members at the same step: short name ``stepwise``, see
    :func:`~sb3_grpo.advantages.stepwise_advantages`.
    """

    default_scale = "batch"

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        self.metrics["rollout/steps_without_peer"] = float(A.count_steps_without_peer(lengths, groups))
        return A.stepwise_advantages(rewards, lengths, groups, self.gamma, self.scale)
