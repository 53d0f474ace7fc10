"""The gradient steps of an update, and the metrics of all of them. The loss itself is in :mod:`sb3_grpo.losses`."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch as th

from sb3_grpo import losses
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.compiled import CompiledPolicy, compiled_policy, is_unaltered
from sb3_grpo.kl_penalty import KLPenalty
from sb3_grpo.losses import MinibatchLoss
from sb3_grpo.machine_code import Settings
from sb3_grpo.policies import ActorPolicy


class ClipRange(NamedTuple):
    """Current limits of the importance ratio: from ``1 - low`` to ``1 + high``."""

    low: float
    high: float


@dataclass(frozen=True)
class Objective:
    """
    The objective of an update: clipped surrogate, entropy bonus and KL penalty, with the present values of GRPO's arguments.
    :meth:`optimize` improves a policy by it.
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
        Take a gradient step with each minibatch of several epochs. The update ends at a minibatch whose approximate KL
        divergence exceeds ``1.5 target_kl``.

        :return: The steps that were taken
        """
        max_kl = math.inf if target_kl is None else 1.5 * target_kl
        compiled = self.compiled_policy(policy, rollout_buffer)
        take_epoch: Callable[[], tuple[Epoch, float]] = partial(self._take_epoch, policy, rollout_buffer, batch_size, max_kl)
        if not isinstance(compiled, str):
            take_epoch = self._compiled_epoch(compiled, policy, rollout_buffer, batch_size, max_kl)
        epochs: list[Epoch] = []
        for _ in range(n_epochs):
            epoch, approx_kl = take_epoch()
            epochs.append(epoch)
            if approx_kl > max_kl:
                return GradientSteps(epochs, approx_kl)
        return GradientSteps(epochs)

    def compiled_policy(self, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer) -> CompiledPolicy | str:
        """:return: The policy in machine code, or a reason why it is updated by torch"""
        estimator = self.kl_penalty.estimator if self.kl_coef > 0 else "exact"
        return compiled_policy(policy, rollout_buffer, self.importance_sampling_level, estimator)

    def _compiled_epoch(
        self,
        compiled: CompiledPolicy,
        policy: ActorPolicy,
        rollout_buffer: GroupRolloutBuffer,
        batch_size: int,
        max_kl: float,
    ) -> "Callable[[], tuple[Epoch, float]]":
        """:return: A function that does what :meth:`_take_epoch` does, in machine code"""
        settings = Settings(*map(float, (*self.clip_range, self.ent_coef, self.kl_coef, self.max_grad_norm, max_kl)))
        batch = compiled.batch(policy, rollout_buffer.update, self.kl_penalty.policy if self.kl_coef > 0 else None)

        def take_epoch() -> tuple[Epoch, float]:
            sums, approx_kl = compiled.epoch(batch, rollout_buffer.permutation(), batch_size, settings)
            epoch = Epoch(
                n=sums.n,
                n_minibatches=sums.n_minibatches,
                n_steps=sums.n_steps,
                entropy=sums.entropy / sums.n,
                policy_gradient_loss=sums.surrogate / sums.n_minibatches,
                approx_kl=sums.approx_kl / sums.n,
                clip_fraction_low=sums.clipped_low / sums.n,
                clip_fraction_high=sums.clipped_high / sums.n,
                effective_sample_size=sums.ratio**2 / (sums.n * sums.ratio_squared),
                kl=sums.kl / sums.n if self.kl_coef > 0 else None,
                grad_norm=sums.grad_norm / max(sums.n_steps, 1.0),
                loss=sums.loss,
            )
            return epoch, approx_kl

        return take_epoch

    def _take_epoch(
        self, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, batch_size: int, max_kl: float
    ) -> "tuple[Epoch, float]":
        """
        Take a gradient step with each minibatch of an epoch, up to one whose approximate KL divergence exceeds a limit.

        :return: Metrics of the epoch, and the divergence of the last minibatch, if there is a limit
        """
        minibatches: list[MinibatchLoss] = []
        gradient_norms: list[th.Tensor] = []
        approx_kl = 0.0
        for rollout_data in rollout_buffer.get(batch_size, self.importance_sampling_level == "trajectory"):
            minibatch = self.evaluate(policy, rollout_data)
            minibatches.append(MinibatchLoss(*(field.detach() for field in minibatch)))
            if max_kl < math.inf:
                approx_kl = losses.approximate_kl(minibatches[-1].log_ratio).item()
                if approx_kl > max_kl:  # not NaN, which is left to the check of the gradient
                    break
            policy.optimizer.zero_grad()
            minibatch.loss.backward()
            gradient_norms.append(th.nn.utils.clip_grad_norm_(policy.parameters(), self.max_grad_norm))
            policy.optimizer.step()
        return _epoch(minibatches, gradient_norms, self.clip_range), approx_kl

    def evaluate(self, policy: ActorPolicy, rollout_data: GroupRolloutBufferSamples) -> MinibatchLoss:
        """:return: The loss of a minibatch of ``n`` transitions, and its parts"""
        observations, actions = rollout_data.observations, rollout_data.actions
        distribution = policy.get_distribution(observations) if self.kl_coef > 0 and self.kl_penalty.is_exact else None
        if distribution is not None and is_unaltered(policy, ("evaluate_actions",)):
            # One pass of the policy serves the surrogate and the divergence.
            log_prob, entropy = policy.evaluate_distribution(distribution, actions)
        else:
            log_prob, entropy = policy.evaluate_actions(observations, actions)
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


class Epoch(NamedTuple):
    """
    Means over the transitions of an epoch, if nothing else is said.

    :param n: Number of transitions
    :param n_minibatches: Number of minibatches
    :param n_steps: Number of gradient steps, which is smaller if the update ended early
    :param entropy: Entropy of the policy
    :param policy_gradient_loss: Clipped surrogate, a mean over minibatches
    :param approx_kl: :func:`~sb3_grpo.losses.approximate_kl`
    :param clip_fraction_low: See :func:`~sb3_grpo.losses.clip_fractions`
    :param clip_fraction_high: Likewise
    :param effective_sample_size: :func:`~sb3_grpo.losses.effective_sample_size`
    :param kl: Divergence from the reference; ``None`` without a penalty
    :param grad_norm: Norm of the gradient before clipping, a mean over gradient steps
    :param loss: Loss of the last minibatch
    """

    n: float
    n_minibatches: float
    n_steps: float
    entropy: float
    policy_gradient_loss: float
    approx_kl: float
    clip_fraction_low: float
    clip_fraction_high: float
    effective_sample_size: float
    kl: float | None
    grad_norm: float
    loss: float


class GradientSteps(NamedTuple):
    """
    The gradient steps of an update.

    :param epochs: Metrics of each epoch
    :param excessive_kl: The approximate KL divergence that ended the update early, if one did
    """

    epochs: list[Epoch]
    excessive_kl: float | None = None


def _epoch(minibatches: list[MinibatchLoss], gradient_norms: list[th.Tensor], clip_range: ClipRange) -> Epoch:
    """:return: Metrics of an epoch, from the losses of its minibatches and the norms of their gradients"""
    every = MinibatchLoss(
        *(th.stack(field) if field[0].dim() == 0 else th.cat(field) for field in zip(*minibatches, strict=True))
    )
    clipped_low, clipped_high = losses.clip_fractions(every.ratio, *clip_range)
    return Epoch(
        n=len(every.ratio),
        n_minibatches=len(minibatches),
        n_steps=len(gradient_norms),
        entropy=every.entropy.mean().item(),
        policy_gradient_loss=every.policy_gradient_loss.mean().item(),
        approx_kl=losses.approximate_kl(every.log_ratio).item(),
        clip_fraction_low=clipped_low.item(),
        clip_fraction_high=clipped_high.item(),
        effective_sample_size=losses.effective_sample_size(every.ratio).item(),
        kl=every.kl.mean().item() if len(every.kl) > 0 else None,
        grad_norm=th.stack(gradient_norms).mean().item() if gradient_norms else 0.0,
        loss=every.loss[-1].item(),
    )


def describe_update(epochs: list[Epoch]) -> dict[str, float]:
    """:return: Metrics of the update, from those of its epochs"""

    def mean(name: str, weight: str = "n") -> float:
        weights = [getattr(epoch, weight) for epoch in epochs]
        return sum(w * getattr(epoch, name) for w, epoch in zip(weights, epochs, strict=True)) / sum(weights)

    low, high, last = mean("clip_fraction_low"), mean("clip_fraction_high"), epochs[-1]
    metrics = {
        "train/entropy_loss": -mean("entropy"),
        "train/policy_gradient_loss": mean("policy_gradient_loss", "n_minibatches"),
        "train/approx_kl": last.approx_kl,
        "train/clip_fraction": low + high,
        "train/clip_fraction_low": low,
        "train/clip_fraction_high": high,
        "train/effective_sample_size": last.effective_sample_size,
        "train/loss": last.loss,
    }
    if any(epoch.n_steps > 0 for epoch in epochs):
        metrics["train/grad_norm"] = mean("grad_norm", "n_steps")
    if last.kl is not None:
        metrics["train/kl_loss"] = mean("kl")
    return metrics


@contextmanager
def rolled_back_on_error(policy: ActorPolicy, kl_penalty: KLPenalty) -> Iterator[None]:
    """Undo an update that fails or is interrupted: the model is that before the update or after it, never in between."""
    before = _copied(policy.state_dict()), _copied(policy.optimizer.state_dict())
    kl_state = kl_penalty.get_state()
    try:
        yield
    except BaseException:
        policy.load_state_dict(before[0])
        policy.optimizer.load_state_dict(before[1])
        kl_penalty.set_state(kl_state, policy)
        raise


def _copied(state: Any) -> Any:
    """:return: What ``copy.deepcopy`` gives for the state of a module or an optimizer, in a fraction of its time"""
    if isinstance(state, th.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the versions of a module's parts, which are an attribute
        copied.update((key, _copied(value)) for key, value in state.items())
        return copied
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return copy.deepcopy(state)


def check_update(policy: ActorPolicy, epochs: list[Epoch]) -> None:
    """Raise a ``ValueError`` if a gradient or a parameter is NaN or infinite."""
    is_finite = all(math.isfinite(epoch.grad_norm) for epoch in epochs)
    if is_finite and all(bool(th.isfinite(parameter).all()) for parameter in policy.parameters()):
        return
    what = "weights after the update are" if is_finite else "gradient of the update is"
    raise ValueError(
        f"The {what} not finite. The update has been undone, so the model can be saved. Lower `learning_rate`, or limit the "
        "scale of observations and advantages (`normalize_observations`, `normalize_advantage`, `scale`)."
    )
