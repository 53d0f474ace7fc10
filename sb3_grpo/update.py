"""The gradient steps of an update, and the metrics of all of them. The loss itself is in :mod:`sb3_grpo.losses`."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch as th

from sb3_grpo import losses
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.fast_actor import FastActor, fast_actor, is_unaltered
from sb3_grpo.kl_penalty import KLPenalty
from sb3_grpo.losses import MinibatchLoss
from sb3_grpo.policies import ActorPolicy


class ClipRange(NamedTuple):
    """
    Current limits of the importance ratio: from ``1 - low`` to ``1 + high``.
    """

    low: float
    high: float


@dataclass(frozen=True)
class Objective:
    """
    The objective of an update: clipped surrogate, entropy bonus and KL penalty. :meth:`optimize` improves a policy by it.

    :param clip_range: Current clip range
    :param importance_sampling_level: ``"step"`` or ``"trajectory"``
    :param ent_coef: Coefficient of the entropy bonus
    :param kl_coef: Coefficient of the KL penalty
    :param kl_penalty: Divergence from the reference policy
    :param max_grad_norm: Maximum norm of the gradient
    """

    clip_range: ClipRange
    importance_sampling_level: losses.ImportanceSamplingLevel
    ent_coef: float
    kl_coef: float
    kl_penalty: KLPenalty
    max_grad_norm: float

    def optimize(
        self,
        policy: ActorPolicy,
        rollout_buffer: GroupRolloutBuffer,
        n_epochs: int,
        batch_size: int,
        target_kl: float | None = None,
    ) -> "GradientSteps":
        """
        Take a gradient step with each minibatch of several epochs.

        :param policy: Policy
        :param rollout_buffer: Buffer with the transitions of the update
        :param n_epochs: Number of epochs
        :param batch_size: Minibatch size
        :param target_kl: The update ends at a minibatch whose approximate KL divergence exceeds 1.5 times this value; ``None``
            for no limit
        :return: The steps that were taken
        """
        fast = fast_actor(policy) if self.kl_coef == 0 else None  # the gradient of the penalty is left to autograd
        whole_trajectories = self.importance_sampling_level == "trajectory"
        epochs: list[list[MinibatchLoss]] = []
        gradient_norms: list[th.Tensor] = []
        with th.set_grad_enabled(fast is None):
            for _ in range(n_epochs):
                epochs.append([])
                for rollout_data in rollout_buffer.get(batch_size, whole_trajectories):
                    minibatch = self.evaluate(policy, rollout_data, fast)
                    epochs[-1].append(minibatch.detached())
                    if target_kl is not None:
                        approx_kl = losses.approximate_kl(minibatch.log_ratio).item()
                        if approx_kl > 1.5 * target_kl:  # not NaN, which is left to the check of the gradient
                            return GradientSteps(epochs, gradient_norms, approx_kl)
                    gradient_norms.append(self.set_gradient(policy, minibatch, rollout_data.weights, fast))
                    policy.optimizer.step()
        return GradientSteps(epochs, gradient_norms)

    def evaluate(self, policy: ActorPolicy, rollout_data: GroupRolloutBufferSamples, fast: FastActor | None) -> MinibatchLoss:
        """
        :param policy: Policy
        :param rollout_data: Minibatch of ``n`` transitions
        :param fast: Actor without autograd; ``None`` to use autograd
        :return: The loss and its parts
        """
        observations, actions = rollout_data.observations, rollout_data.actions
        distribution = policy.get_distribution(observations) if self.kl_coef > 0 and self.kl_penalty.is_exact else None
        if fast is not None:
            log_prob, entropy = fast.evaluate(policy.extract_features(observations), actions)
        elif distribution is not None and is_unaltered(policy, ("evaluate_actions",)):
            # One pass of the policy serves the surrogate and the divergence.
            log_prob, entropy = policy.evaluate_distribution(distribution, actions)  # type: ignore[assignment]
        else:
            log_prob, entropy = policy.evaluate_actions(observations, actions)  # type: ignore[assignment]
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

    def set_gradient(
        self, policy: ActorPolicy, minibatch: MinibatchLoss, weights: th.Tensor | None, fast: FastActor | None
    ) -> th.Tensor:
        """
        Set the gradients of the policy to those of the loss, and clip them.

        :param policy: Policy
        :param minibatch: Loss of a minibatch of ``n`` transitions
        :param weights: Weights of the transitions in the loss, shape ``(n,)``; ``None`` for ones
        :param fast: Actor that evaluated the actions; ``None`` if autograd did
        :return: Norm of the gradient before clipping, a scalar
        """
        if fast is None:
            policy.optimizer.zero_grad()
            minibatch.loss.backward()
            return th.nn.utils.clip_grad_norm_(policy.parameters(), self.max_grad_norm)
        n = len(minibatch.slope)
        grad_log_prob = minibatch.slope / n if weights is None else weights * minibatch.slope / n
        grad_entropy = None
        if self.ent_coef != 0:
            grad_entropy = th.full_like(grad_log_prob, -self.ent_coef / n)
            if weights is not None:
                grad_entropy *= weights
        fast.backward(grad_log_prob, grad_entropy)
        return fast.clip_gradient(self.max_grad_norm)


class GradientSteps(NamedTuple):
    """
    The gradient steps of an update.

    :param epochs: Losses of the minibatches of each epoch
    :param gradient_norms: Norms of the gradients before clipping; none if the update stopped at once
    :param excessive_kl: The approximate KL divergence that ended the update early, if one did
    """

    epochs: list[list[MinibatchLoss]]
    gradient_norms: list[th.Tensor]
    excessive_kl: float | None = None


def _joined(minibatches: list[MinibatchLoss]) -> MinibatchLoss:
    """
    :param minibatches: Losses of at least one minibatch
    :return: Scalars stacked to shape ``(n_minibatches,)``, and other entries concatenated
    """
    return MinibatchLoss(
        *(th.stack(field) if field[0].dim() == 0 else th.cat(field) for field in zip(*minibatches, strict=True))
    )


def describe_update(steps: GradientSteps, clip_range: ClipRange) -> dict[str, float]:
    """
    :param steps: The gradient steps of an update
    :param clip_range: Current clip range
    :return: Metrics of the update
    """
    all_epochs = _joined(list(chain(*steps.epochs)))
    last_epoch = _joined(steps.epochs[-1])
    clipped = losses.clip_fractions(all_epochs.ratio, *clip_range)
    metrics = {
        "train/entropy_loss": -all_epochs.entropy.mean(),
        "train/policy_gradient_loss": all_epochs.policy_gradient_loss.mean(),
        "train/approx_kl": losses.approximate_kl(last_epoch.log_ratio),
        "train/clip_fraction": clipped.low + clipped.high,
        "train/clip_fraction_low": clipped.low,
        "train/clip_fraction_high": clipped.high,
        "train/effective_sample_size": losses.effective_sample_size(last_epoch.ratio),
        "train/loss": last_epoch.loss[-1],
    }
    if steps.gradient_norms:
        metrics["train/grad_norm"] = th.stack(steps.gradient_norms).mean()
    if len(all_epochs.kl) > 0:
        metrics["train/kl_loss"] = all_epochs.kl.mean()
    return {name: value.item() for name, value in metrics.items()}


def check_update(policy: ActorPolicy, gradient_norms: list[th.Tensor]) -> None:
    """
    :param policy: Policy after an update
    :param gradient_norms: Norms of the gradients of its minibatches
    :raises ValueError: If a gradient or a parameter is NaN or infinite
    """
    is_finite = not gradient_norms or math.isfinite(th.stack(gradient_norms).sum().item())
    if is_finite and all(bool(th.isfinite(parameter).all()) for parameter in policy.parameters()):
        return
    what = "weights after the update are" if is_finite else "gradient of the update is"
    raise ValueError(
        f"The {what} not finite. The update has been undone, so the model can be saved. Lower `learning_rate`, or limit the "
        "scale of observations and advantages (`normalize_observations`, `normalize_advantage`, `scale`)."
    )
