"""The loss, as pure functions of tensors: importance ratios, the clipped surrogate, weights, KL estimators."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution

KLEstimator = Literal["exact", "k1", "k2", "k3"]
LossAggregation = Literal["step", "trajectory", "constant"]
ImportanceSamplingLevel = Literal["step", "trajectory"]

#: Log-ratios are clamped to this magnitude before they are exponentiated, so that no ratio overflows.
MAX_LOG_RATIO = 20.0
#: An adaptive coefficient of the KL penalty stays between these, so that it can always find its way back.
KL_COEF_BOUNDS = (1e-6, 1e6)
#: The most that a transition of an earlier rollout counts.
LARGEST_REUSE_WEIGHT = 2.0


def step_log_ratio(log_ratio: th.Tensor, trajectories: th.Tensor | None = None) -> th.Tensor:
    """
    The importance ratio of PPO and GRPO: each transition has its own.

    :param log_ratio: ``d_t = log pi(a_t|s_t) - log pi_old(a_t|s_t)``, shape ``(n,)``
    :param trajectories: not used
    :return: ``log_ratio`` as it came, shape ``(n,)``
    """
    return log_ratio


def trajectory_log_ratio(log_ratio: th.Tensor, trajectories: th.Tensor | None) -> th.Tensor:
    """
    ``log s_t = sg[mean_k d_k] + d_t - sg[d_t]`` with the mean over the trajectory and ``sg`` "stop gradient": all transitions
    of a trajectory have the value of its length-normalised ratio, and each the slope of its own. GSPO
    (https://arxiv.org/abs/2507.18071), equations 7 and 14: the variant that the paper calls GSPO-token, which is GSPO
    itself where all steps of a trajectory have the same advantage.

    :param log_ratio: ``d_t = log pi(a_t|s_t) - log pi_old(a_t|s_t)``, shape ``(n,)``
    :param trajectories: the trajectory of each transition, integers in ``[0, m)``, each of them used, shape ``(n,)``; all
        transitions of a trajectory have to be there
    :return: shape ``(n,)``
    """
    assert trajectories is not None, "minibatches of whole trajectories are needed"
    fixed = log_ratio.detach()
    counts = th.bincount(trajectories)
    means = th.zeros(len(counts), dtype=fixed.dtype, device=fixed.device).index_add(0, trajectories, fixed) / counts
    return log_ratio - fixed + means[trajectories]


LOG_RATIOS: dict[str, Callable[[th.Tensor, th.Tensor | None], th.Tensor]] = {
    "step": step_log_ratio,
    "trajectory": trajectory_log_ratio,
}


class Surrogate(NamedTuple):
    """
    The clipped surrogate of a batch of ``n`` transitions.

    :param loss: to be minimised, one entry per transition, shape ``(n,)``
    :param ratio: importance ratios, without gradient, shape ``(n,)``
    :param slope: derivative of each transition's loss with respect to its log-ratio, shape ``(n,)``
    """

    loss: th.Tensor
    ratio: th.Tensor
    slope: th.Tensor


def clipped_surrogate(
    log_ratio: th.Tensor,
    advantages: th.Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Surrogate:
    """
    ``-min(rho A, clip(rho, 1 - c, 1 + c_high) A)`` with ``rho = exp(log pi - log pi_old)``: PPO
    (https://arxiv.org/abs/1707.06347), equation 7, without its mean.

    A ``c_high`` of its own is DAPO's clip-higher (https://arxiv.org/abs/2503.14476, equation 10). With ``dual_clip = c_dual``
    the loss of transitions with ``A < 0`` is at most ``-c_dual A``, and flat beyond: dual-clip PPO
    (https://arxiv.org/abs/1912.09729, equation 5), where plain clipping leaves large ratios their full slope.

    Departure: the log-ratio is clamped to ``+-MAX_LOG_RATIO`` so that no ratio overflows; beyond, the slope is zero.

    :param log_ratio: ``log pi - log pi_old`` of the actions, ``pi_old`` being the policy that sampled them, shape ``(n,)``
    :param advantages: ``A``, shape ``(n,)``
    :param clip_range: ``c``
    :param clip_range_high: ``c_high``, ``None`` for ``c``
    :param dual_clip: ``c_dual``, greater than 1, ``None`` for no such bound
    """
    ratio = th.exp(th.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    gain = advantages * ratio
    clipped_gain = advantages * th.clamp(
        ratio, 1.0 - clip_range, 1.0 + (clip_range if clip_range_high is None else clip_range_high)
    )
    objective = th.min(gain, clipped_gain)
    # Where rho A is the smaller one, it is its own derivative with respect to log rho; elsewhere the loss is flat. NaN is
    # neither, so that it shows
    is_flat = (gain > clipped_gain) | (log_ratio.abs() > MAX_LOG_RATIO)
    if dual_clip is not None:
        bound = dual_clip * advantages
        is_bounded = (advantages < 0) & (objective < bound)
        objective = th.where(is_bounded, bound, objective)
        is_flat |= is_bounded
    loss = -objective
    return Surrogate(loss, ratio.detach(), th.where(is_flat, 0.0, loss.detach()))


def trajectory_loss_weights(lengths: np.ndarray, budget: int) -> np.ndarray:
    """
    Weights ``mean(|o|) / |o_i|``, with which the mean over transitions becomes ``1/m sum_i 1/|o_i| sum_t``: each trajectory
    counts alike, whatever its length. DeepSeekMath (https://arxiv.org/abs/2402.03300), equation 3.

    :param lengths: transitions ``|o_i|`` of each trajectory, shape ``(m,)``
    :param budget: not used
    :return: weight of each trajectory's transitions, shape ``(m,)``
    """
    return np.mean(lengths) / lengths


def constant_loss_weights(lengths: np.ndarray, budget: int) -> np.ndarray:
    """
    Weights ``mean(|o|) / L``, with which the mean over transitions becomes ``1/m sum_i 1/L sum_t``: sums over trajectories,
    divided by a constant. Dr. GRPO (https://arxiv.org/abs/2503.20783), section 3: a trajectory's gradient depends neither on
    its own length, as with ``trajectory``, nor on that of the others, as with ``step``.

    :param lengths: transitions ``|o_i|`` of each trajectory, shape ``(m,)``
    :param budget: ``L``, the transitions that a trajectory may have
    :return: weight of each trajectory's transitions, shape ``(m,)``
    """
    return np.full(len(lengths), np.mean(lengths) / budget)


#: What makes a weighted mean over transitions of the mean over ``step``; ``None`` for equal weights of one (DAPO,
#: https://arxiv.org/abs/2503.14476, equation 12; PPO).
LOSS_WEIGHTS: dict[str, Callable[[np.ndarray, int], np.ndarray] | None] = {
    "step": None,
    "trajectory": trajectory_loss_weights,
    "constant": constant_loss_weights,
}


def weighted_mean(values: th.Tensor, weights: th.Tensor | None) -> th.Tensor:
    """
    ``1/n sum_t w_t x_t``; not divided by the sum of weights, which are one on average where they should be.

    :param values: ``x``, shape ``(n,)``
    :param weights: ``w``, shape ``(n,)``, ``None`` for ones
    :return: a scalar
    """
    return values.mean() if weights is None else (weights * values).mean()


class ClipFractions(NamedTuple):
    """
    :param low: fraction of ratios below the clip range
    :param high: fraction of ratios above it
    """

    low: th.Tensor
    high: th.Tensor


def clip_fractions(ratio: th.Tensor, clip_range: float, clip_range_high: float | None = None) -> ClipFractions:
    """
    :param ratio: importance ratios, shape ``(n,)``
    :param clip_range: ``c`` of :func:`clipped_surrogate`
    :param clip_range_high: ``c_high``, ``None`` for ``c``
    """
    change = ratio - 1.0
    low = (change < -clip_range).float().mean()
    return ClipFractions(low, (change > (clip_range if clip_range_high is None else clip_range_high)).float().mean())


def effective_sample_size(ratio: th.Tensor) -> th.Tensor:
    """
    ``(sum rho)^2 / (n sum rho^2)``, as a fraction of ``n``: Kish's effective sample size of importance weights (A. Owen,
    "Monte Carlo theory, methods and examples", equation 9.13). 1 where all ratios are alike, ``1/n`` where one has all the
    weight.

    :param ratio: importance ratios, all positive, shape ``(n,)``
    :return: a scalar
    """
    ratio = ratio.double()  # the square of exp(MAX_LOG_RATIO) leaves single precision few digits
    return ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())


def reuse_weights(log_prob: th.Tensor, sampled_log_prob: th.Tensor) -> th.Tensor:
    """
    ``min(pi(a | s) / mu(a | s), 2)``: truncated importance weights (Ionides 2008, "Truncated Importance Sampling",
    https://doi.org/10.1198/106186008X320456) of transitions that a policy learns from once more. Reusing the samples of
    earlier policies in a clipped surrogate is Generalized PPO's idea (Queeney, Paschalidis, Cassandras 2021,
    https://arxiv.org/abs/2111.00072).

    :param log_prob: of the actions under the present policy ``pi``, shape ``(n,)``
    :param sampled_log_prob: under the policy ``mu`` that sampled them, shape ``(n,)``
    :return: shape ``(n,)``
    """
    return th.exp((log_prob - sampled_log_prob).clamp(-MAX_LOG_RATIO, math.log(LARGEST_REUSE_WEIGHT)))


def k1(log_prob: th.Tensor, reference_log_prob: th.Tensor) -> th.Tensor:
    """
    ``-d`` with ``d = log pi_ref - log pi``: unbiased for KL(pi || ref) when actions come from pi, of high variance
    (J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html).

    :param log_prob: of the actions under the policy being trained, shape ``(n,)``
    :param reference_log_prob: of the same actions under the reference, shape ``(n,)``
    :return: shape ``(n,)``
    """
    return log_prob - reference_log_prob


def k2(log_prob: th.Tensor, reference_log_prob: th.Tensor) -> th.Tensor:
    """
    ``d^2 / 2``: biased, of low variance, never negative. Arguments and source as for :func:`k1`.

    :param log_prob: shape ``(n,)``
    :param reference_log_prob: shape ``(n,)``
    :return: shape ``(n,)``
    """
    return 0.5 * (reference_log_prob - log_prob) ** 2


def k3(log_prob: th.Tensor, reference_log_prob: th.Tensor) -> th.Tensor:
    """
    ``exp(d) - d - 1``: unbiased, never negative; the estimator of DeepSeekMath (https://arxiv.org/abs/2402.03300),
    equation 4. Arguments and source as for :func:`k1`. Departure: ``d`` is clamped to ``MAX_LOG_RATIO`` from above.

    :param log_prob: shape ``(n,)``
    :param reference_log_prob: shape ``(n,)``
    :return: shape ``(n,)``
    """
    # Both terms are clamped: with the exponential alone flat, the slope of -d would drive the policies further apart
    d = th.clamp(reference_log_prob - log_prob, max=MAX_LOG_RATIO)
    return th.expm1(d) - d


def importance_weighted(estimate: th.Tensor, log_prob: th.Tensor, old_log_prob: th.Tensor) -> th.Tensor:
    """
    ``rho f`` with ``rho = exp(log pi - log pi_old)``: its mean over actions of ``pi_old`` is the mean of ``f`` over actions of
    ``pi``, in value and in gradient.

    :func:`k1` needs this as a loss: its own gradient, that of ``log pi``, does not depend on the reference and is zero in
    expectation, so that the penalty would pull nowhere (Tang & Munos 2025, https://arxiv.org/abs/2506.09477).

    :param estimate: ``f`` for each action, shape ``(n,)``
    :param log_prob: of the actions under the policy being trained, shape ``(n,)``
    :param old_log_prob: of the same actions under the policy that sampled them, shape ``(n,)``
    :return: shape ``(n,)``
    """
    return th.exp(th.clamp(log_prob - old_log_prob, max=MAX_LOG_RATIO)) * estimate


def approximate_kl(log_ratio: th.Tensor) -> th.Tensor:
    """
    Mean of :func:`k3` for KL(pi_old || pi): the actions come from ``pi_old``, which makes it the first argument.

    :param log_ratio: ``log pi - log pi_old`` of the actions, shape ``(n,)``
    :return: a scalar
    """
    return k3(th.zeros_like(log_ratio), log_ratio).mean()


KL_ESTIMATORS: dict[str, Callable[[th.Tensor, th.Tensor], th.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def exact_kl(policy: Distribution, reference: Distribution) -> th.Tensor:
    """
    KL(pi || ref) in closed form, summed over independent action dimensions.

    A squashed Gaussian has the divergence of the Gaussian beneath it, since ``tanh`` is invertible.

    :param policy: distributions of the policy being trained for ``n`` observations
    :param reference: those of the reference, of the same kind
    :return: shape ``(n,)``
    """
    # SB3 keeps one torch distribution per action dimension for MultiDiscrete spaces and a single one elsewhere
    parts = policy.distribution if isinstance(policy.distribution, list) else [policy.distribution]
    reference_parts = reference.distribution if isinstance(reference.distribution, list) else [reference.distribution]
    divergences = [th.distributions.kl_divergence(p, q) for p, q in zip(parts, reference_parts, strict=True)]
    return th.stack([d.flatten(start_dim=1).sum(dim=1) if d.dim() > 1 else d for d in divergences]).sum(dim=0)


def adapted_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    """
    Twice the coefficient where the divergence came out above ``1.5 target``, half of it below ``target / 1.5``: the adaptive
    penalty of PPO (https://arxiv.org/abs/1707.06347), section 4. Departures: it stays within ``KL_COEF_BOUNDS``, and the
    divergence is that of the penalty, KL(pi || reference), where the paper has KL(pi_old || pi).

    :param kl_coef: coefficient of the last update
    :param kl: divergence at its end
    :param target: divergence aimed at
    :return: coefficient of the next update
    """
    if kl > 1.5 * target:
        return min(2.0 * kl_coef, KL_COEF_BOUNDS[1])
    if kl < target / 1.5:
        return max(0.5 * kl_coef, KL_COEF_BOUNDS[0])
    return kl_coef
