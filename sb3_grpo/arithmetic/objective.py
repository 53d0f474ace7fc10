"""The objective of an update."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sb3_grpo import losses
from sb3_grpo.arithmetic.conditions import is_unaltered
from sb3_grpo.arithmetic.kl_penalty import KLPenalty
from sb3_grpo.buffers import GroupRolloutBufferSamples
from sb3_grpo.losses import MinibatchLoss
from sb3_grpo.policies import ActorPolicy


class ClipRange(NamedTuple):
    """Current limits of the importance ratio: from ``1 - low`` to ``1 + high``."""

    low: float
    high: float


NO_CLIPPING = ClipRange(math.inf, math.inf)


@dataclass(frozen=True)
class Objective:
    """
    The objective of an update: surrogate, entropy bonus and KL penalty, with the present values of GRPO's arguments.
    :func:`~sb3_grpo.arithmetic.update.clipped_update` and :func:`~sb3_grpo.arithmetic.update.natural_update` improve a policy
    by it.
    """

    clip_range: ClipRange
    importance_sampling_level: losses.ImportanceSamplingLevel
    ent_coef: float
    kl_coef: float
    kl_penalty: KLPenalty
    max_grad_norm: float

    def evaluate(self, policy: ActorPolicy, rollout_data: GroupRolloutBufferSamples) -> MinibatchLoss:
        """:return: The loss of a minibatch of ``n`` transitions, and its parts"""
        observations, actions, context = rollout_data.observations, rollout_data.actions, rollout_data.context
        is_exact = self.kl_coef > 0 and self.kl_penalty.is_exact
        distribution = policy.get_distribution(observations, **context) if is_exact else None
        if distribution is not None and is_unaltered(policy, ("evaluate_actions",)):
            # One pass of the policy serves the surrogate and the divergence.
            log_prob, entropy = policy.evaluate_distribution(distribution, actions)
        else:
            log_prob, entropy = policy.evaluate_actions(observations, actions, **context)
        return losses.minibatch_loss(
            log_prob,
            rollout_data.old_log_prob,
            rollout_data.advantages,
            *self.clip_range,
            entropy=entropy,
            ent_coef=self.ent_coef,
            kl=self.kl_penalty.estimate(rollout_data, log_prob, distribution) if self.kl_coef > 0 else None,
            kl_coef=self.kl_coef,
            weights=rollout_data.weights,
            trajectories=rollout_data.trajectories if self.importance_sampling_level == "trajectory" else None,
        )
