"""Buffers that compare whole trajectories with the other members of their group."""

import warnings
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_grpo import advantages as A
from sb3_grpo.buffers.base import GroupRolloutBuffer
from sb3_grpo.buffers.rollout import Transitions
from sb3_grpo.observations import Observations
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.validation import require_at_least, require_bool, require_one_of
from sb3_grpo.vec_wrappers import reward_normalizer

ComponentAggregation = Literal["sum_then_normalize", "normalize_then_sum"]


class CompleteGroupRolloutBuffer(GroupRolloutBuffer):
    """
    Base of the buffers that train on a trajectory once all members of its group have ended.

    Transitions of incomplete groups wait across rollouts, with the log-probabilities they were sampled with. Each transition
    is used in exactly one update, and a rollout that completes no group makes no update. When all environments are reset (by a
    new ``learn``, or after loading a model), the transitions of unfinished groups are dropped.

    The rewards are the environments' own, or those of a ``VecEnvWrapper`` that may change them, but not those of a
    ``VecNormalize``: its running scale changes while the members of a group run, so equal members would differ.

    :param args: See :class:`GroupRolloutBuffer`
    :param scale: Divisor of the differences within a group, see :func:`~sb3_grpo.advantages.rescale`
    :param max_waiting: Number of transitions that may wait before the oldest groups are dropped. ``None`` for 16 rollouts, but
        at least 20,000 and enough for episodes of length ``horizon``
    :param tied_groups: What to do with groups whose members cannot be told apart, so that all their advantages are zero.
        ``"keep"`` keeps their transitions, which count in the mean of the loss; ``"skip"`` drops them, which is the filter of
        DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, equation 11) without sampling others in their place
    :param component_aggregation: How several reward components are combined. ``"sum_then_normalize"`` compares their weighted
        sum. ``"normalize_then_sum"`` compares each component separately and adds up the weighted advantages, so that the scale
        of a component does not matter (GDPO, https://arxiv.org/abs/2601.05242, without its normalisation over the batch)
    :param kwargs: See :class:`GroupRolloutBuffer`; ``gae_lambda`` has no effect
    :raises ValueError: If an argument is out of range
    """

    default_scale: ClassVar[A.Scale] = "group"

    def __init__(
        self,
        *args: Any,
        scale: A.Scale | None = None,
        max_waiting: int | None = None,
        tied_groups: Literal["keep", "skip"] = "keep",
        component_aggregation: ComponentAggregation = "sum_then_normalize",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if scale is not None:
            require_one_of("scale", scale, ("group", "batch", "none"))
        require_one_of("tied_groups", tied_groups, ("keep", "skip"))
        require_one_of("component_aggregation", component_aggregation, ("sum_then_normalize", "normalize_then_sum"))
        if component_aggregation == "normalize_then_sum" and not self.reward_weights:
            raise ValueError(
                "component_aggregation='normalize_then_sum' needs several rewards: pass their names and weights as "
                f"`reward_weights`, not {kwargs.get('reward_weights')!r}."
            )
        if max_waiting is not None:
            require_at_least("max_waiting", max_waiting, 1)
        self.scale: A.Scale = scale or self.default_scale
        self.tied_groups = tied_groups
        self.component_aggregation = component_aggregation
        self.dropped = 0  # number of transitions whose group could not be completed
        self._max_waiting = max_waiting
        self._waiting: Transitions | None = None
        self._dropped_groups: set[int] = set()  # those of which further members may come
        self._has_warned = False

    @property
    def max_waiting(self) -> int:
        """Number of transitions that may wait for their group."""
        longest_wait = 2 * (self.horizon or 0) * (self.group_size + self.n_envs)
        return self._max_waiting or max(16 * self.buffer_size * self.n_envs, 20_000, longest_wait)

    def reward_normalizer(self, env: VecEnv) -> VecNormalize | None:
        return reward_normalizer(env)

    def obstacle(self) -> str:
        if self.n_samples > 0:
            return super().obstacle()
        return (
            f"No group of {self.group_size} trajectories was completed, and this buffer learns from complete groups. Train "
            "longer, use a smaller `group_size`, fewer environments or shorter episodes "
            "(`gymnasium.make(..., max_episode_steps=...)`), or `rollout_buffer_class='kernel'`."
        )

    def reset(self) -> None:
        if self.pos > 0:
            # The last rollout was interrupted. Its trajectories continue, so their beginnings are kept.
            self._waiting = self._waiting_and(self._flatten(self.pos))
        super().reset()

    def forget_trajectories(self) -> None:
        self.dropped += self.pos * self.n_envs + (0 if self._waiting is None else len(self._waiting))
        self._waiting = None
        self._dropped_groups = set()
        super().forget_trajectories()

    def _waiting_and(self, rollout: Transitions) -> Transitions:
        rollout = self._without_dropped(rollout)
        return rollout if self._waiting is None else self._waiting.followed_by(rollout)

    def _without_dropped(self, transitions: Transitions) -> Transitions:
        is_live = ~np.isin(transitions.groups, list(self._dropped_groups))
        self.dropped += len(transitions) - int(is_live.sum())
        return transitions.take(is_live)

    def _form_update(
        self, rollout: Transitions, last_obs: Observations, policy: ActorPolicy
    ) -> tuple[Transitions, np.ndarray]:
        collected = self._waiting_and(rollout)
        self._dropped_groups &= self.open_groups.keys()
        is_complete = ~np.isin(collected.groups, list(self.open_groups))

        self._waiting = self._drop_excess(collected.take(~is_complete))
        ages = self._rollout - self._waiting.rollouts
        self.metrics["rollout/groups_completed"] = float(len(np.unique(collected.groups[is_complete])))
        self.metrics["rollout/transitions_waiting"] = float(len(ages))
        self.metrics["rollout/transitions_waiting_age"] = float(ages.max(initial=0))
        self.metrics["rollout/transitions_dropped"] = float(self.dropped)
        update = collected.take(is_complete)
        update = update.take(np.lexsort((update.steps, update.members, update.groups)))
        return self._compare_groups(update) if len(update) > 0 else (update, np.empty(0))

    def _compare_groups(self, update: Transitions) -> tuple[Transitions, np.ndarray]:
        """:return: The transitions to train on, and their advantages, from complete groups, trajectory by trajectory"""
        advantages, groups = self._advantages(update)
        is_tied = (A.sum_by_label(np.abs(advantages), groups) == 0.0)[groups]
        self.metrics["rollout/groups_tied"] = len(np.unique(groups[is_tied])) / len(np.unique(groups))
        if self.tied_groups == "skip" and is_tied.any():
            update = update.take(~is_tied)
            # The advantages are formed again, because tied groups must not enter the scale of a batch either.
            advantages = self._advantages(update)[0] if len(update) > 0 else np.empty(0)
        return update, advantages

    def _advantages(self, update: Transitions) -> tuple[np.ndarray, np.ndarray]:
        """:return: Advantage and group of each transition, both of shape ``(n,)``"""
        lengths, groups = self._lengths_and_groups(update)

        def compare(rewards: np.ndarray) -> np.ndarray:
            advantages = self._group_advantages(rewards.astype(np.float64), lengths, groups)
            self._check_advantages("_group_advantages", advantages, len(update))
            return advantages

        if self.component_aggregation == "normalize_then_sum":
            weighted = zip(self.reward_weights.values(), update.components.T, strict=True)
            advantages = np.sum([weight * compare(component) for weight, component in weighted], axis=0)
        else:
            advantages = compare(update.rewards)
        return advantages, np.repeat(groups, lengths)

    def _lengths_and_groups(self, update: Transitions) -> tuple[np.ndarray, np.ndarray]:
        """:return: Number of transitions and group of each trajectory, groups as integers from 0 on, both of shape ``(m,)``"""
        _, first, lengths = np.unique(update.trajectories, return_index=True, return_counts=True)
        return lengths, np.unique(update.groups[first], return_inverse=True)[1]

    def _drop_excess(self, waiting: Transitions) -> Transitions:
        """:return: At most ``max_waiting`` of the transitions: those of the groups that started last"""
        if len(waiting) <= self.max_waiting:
            return waiting
        groups, counts = np.unique(waiting.groups, return_counts=True)  # in the order in which they began
        fits = np.cumsum(counts[::-1])[::-1] <= self.max_waiting
        self._dropped_groups.update(groups[~fits].tolist())
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(waiting)} transitions wait for the other trajectories of their groups of {self.group_size}, and only "
                f"{self.max_waiting} may wait: the oldest groups are dropped, and nothing is learned from them. This buffer "
                "needs episodes that end. Give the environment a time limit "
                "(`gymnasium.make(..., max_episode_steps=...)`), or use `rollout_buffer_class='kernel'`. If episodes do end "
                "and are only long, raise the limit: `rollout_buffer_kwargs=dict(max_waiting=...)`.",
                stacklevel=2,
            )
        return self._without_dropped(waiting)

    @abstractmethod
    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """
        The hook of buffers that compare whole groups.

        :param rewards: Rewards of all steps, trajectory by trajectory, shape ``(n,)``
        :param lengths: Number of transitions of each trajectory, shape ``(m,)``
        :param groups: Group of each trajectory, integers from 0 on, each with ``group_size`` members, shape ``(m,)``
        :return: Advantages, shape ``(n,)``
        """


class OutcomeRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Compares the return of a trajectory with the returns of its group, see :func:`~sb3_grpo.advantages.outcome_advantages`.
    This is the estimator of DeepSeek's GRPO. Short name: ``outcome``.

    :param args: See :class:`CompleteGroupRolloutBuffer`
    :param leave_one_out: Whether to compare each member with the others instead of with all (RLOO)
    :param kwargs: See :class:`CompleteGroupRolloutBuffer`
    """

    def __init__(self, *args: Any, leave_one_out: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        require_bool("leave_one_out", leave_one_out)
        self.leave_one_out = leave_one_out

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.outcome_advantages(rewards, lengths, groups, self.scale, self.leave_one_out)


class ProcessRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Adds up the normalised rewards from each step on, see :func:`~sb3_grpo.advantages.process_advantages`. It learns nothing
    from a constant reward. Short name: ``process``.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.process_advantages(rewards, lengths, groups, self.scale)


class ReturnToGoRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Compares the return-to-go of each step with all returns-to-go of its group, see
    :func:`~sb3_grpo.advantages.return_to_go_advantages`. Short name: ``return_to_go``.
    """

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.return_to_go_advantages(rewards, lengths, groups, self.gamma, self.scale)


class StepwiseRolloutBuffer(CompleteGroupRolloutBuffer):
    """
    Compares the return-to-go of each step with those of the other members at the same step, see
    :func:`~sb3_grpo.advantages.stepwise_advantages`. Short name: ``stepwise``.
    """

    default_scale = "batch"

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return A.stepwise_advantages(rewards, lengths, groups, self.gamma, self.scale)

    def _compare_groups(self, update: Transitions) -> tuple[Transitions, np.ndarray]:
        lengths, groups = self._lengths_and_groups(update)
        self.metrics["rollout/steps_without_peer"] = float(A.count_steps_without_peer(lengths, groups))
        return super()._compare_groups(update)
