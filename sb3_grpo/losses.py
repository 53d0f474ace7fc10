"""
The loss of GRPO: pure functions of tensors.

Symbols: ``pi`` is the policy being trained, ``pi_old`` the policy that sampled the actions, ``pi_ref`` the reference of the KL
penalty, ``rho = pi / pi_old`` the importance ratio, ``A`` the advantage. All of them belong to the actions that were taken;
``n`` is the number of transitions. Arguments and results are tensors of shape ``(n,)``, or scalars if they are means, unless
something else is said. ``clip_range`` and ``clip_range_high`` are ``c`` and ``c_high``.
"""

from typing import Literal, NamedTuple

import torch as th
from stable_baselines3.common.distributions import Distribution

#: Which mean the loss is. ``"step"``: all transitions count alike, as in PPO and in DAPO (https://arxiv.org/abs/2503.14476,
#: equation 12). ``"trajectory"`` and ``"constant"``: see :func:`trajectory_loss_weights` and :func:`constant_loss_weights`.
LossAggregation = Literal["step", "trajectory", "constant"]
#: Level of the importance ratios. ``"step"``: one for each transition. ``"trajectory"``: see :func:`trajectory_log_ratio`.
ImportanceSamplingLevel = Literal["step", "trajectory"]
#: How an update improves the policy. ``"clipped"``: by gradient steps of :func:`clipped_surrogate`. ``"natural"``: by a
#: natural-gradient step, see :func:`sb3_grpo.arithmetic.natural.natural_step`.
UpdateRule = Literal["clipped", "natural"]

#: Log-ratios are clamped to this magnitude before they are exponentiated, so that no ratio overflows.
MAX_LOG_RATIO = 20.0


class MinibatchLoss(NamedTuple):
    """
    The loss of a minibatch, and its parts: the mean of the clipped surrogate, ``log rho``, the ratios before clipping (of
    steps or of trajectories), entropies, and divergences from the reference, which are empty without a penalty.
    """

    loss: th.Tensor
    policy_gradient_loss: th.Tensor
    log_ratio: th.Tensor
    ratio: th.Tensor
    entropy: th.Tensor
    kl: th.Tensor


def minibatch_loss(
    log_prob: th.Tensor,
    old_log_prob: th.Tensor,
    advantages: th.Tensor,
    clip_range: float,
    clip_range_high: float,
    entropy: th.Tensor | None = None,
    ent_coef: float = 0.0,
    kl: th.Tensor | None = None,
    kl_coef: float = 0.0,
    weights: th.Tensor | None = None,
    trajectories: th.Tensor | None = None,
) -> MinibatchLoss:
    """
    ``mean_t w_t (-min(rho_t A_t, clip(rho_t, 1 - c, 1 + c_high) A_t) - c_ent H_t + c_kl KL_t)``: the objective of GRPO
    (DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3) as a loss, with an entropy bonus.

    :param entropy: ``H``, the entropies of ``pi``; ``None`` if they have no closed form, for ``-log pi``
    :param ent_coef: ``c_ent``
    :param kl: ``KL``, the divergences from ``pi_ref`` or their estimates; ``None`` for no penalty
    :param kl_coef: ``c_kl``
    :param weights: ``w``; ``None`` for ones
    :param trajectories: Labels of trajectories, for :func:`trajectory_log_ratio`; ``None`` for ratios of steps
    """
    entropy = -log_prob if entropy is None else entropy
    log_ratio = log_prob - old_log_prob
    level_log_ratio = log_ratio if trajectories is None else trajectory_log_ratio(log_ratio, trajectories)
    surrogate = clipped_surrogate(level_log_ratio, advantages, clip_range, clip_range_high)

    loss = policy_gradient_loss = weighted_mean(surrogate.loss, weights)
    if ent_coef != 0:
        loss = loss - ent_coef * weighted_mean(entropy, weights)
    if kl is not None:
        loss = loss + kl_coef * weighted_mean(kl, weights)
    kl = log_prob.new_empty(0) if kl is None else kl
    return MinibatchLoss(loss, policy_gradient_loss, log_ratio, surrogate.ratio, entropy, kl)


class Surrogate(NamedTuple):
    """Loss and importance ratio, which has no gradient, of each transition."""

    loss: th.Tensor
    ratio: th.Tensor


def clipped_surrogate(log_ratio: th.Tensor, advantages: th.Tensor, clip_range: float, clip_range_high: float) -> Surrogate:
    """
    The surrogate of PPO (https://arxiv.org/abs/1707.06347, equation 7) before the mean is taken:
    ``-min(rho A, clip(rho, 1 - c, 1 + c_high) A)``, from ``log rho``.

    A separate ``c_high`` is the clip-higher of DAPO (https://arxiv.org/abs/2503.14476, equation 10). Departure: log-ratios are
    clamped to ``+-MAX_LOG_RATIO``, and the gradient is zero beyond.
    """
    ratio = th.exp(th.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss = -th.min(advantages * ratio, advantages * th.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range_high))
    return Surrogate(loss, ratio.detach())


def trajectory_log_ratio(log_ratio: th.Tensor, trajectories: th.Tensor) -> th.Tensor:
    """
    The importance ratio of GSPO-token (https://arxiv.org/abs/2507.18071, equations 7 and 14):
    ``log s_t = sg[mean_k d_k] + d_t - sg[d_t]`` with ``d_t = log pi(a_t|s_t) - log pi_old(a_t|s_t)``, where ``sg`` stops the
    gradient and the mean is over the trajectory.

    All transitions of a trajectory have the value of its length-normalised ratio, and each has the gradient of its own ratio.
    Where all steps of a trajectory have the same advantage, this is GSPO itself.

    :param trajectories: Integers that tell trajectories apart. Whole trajectories must be present
    """
    fixed = log_ratio.detach()
    _, labels, counts = th.unique(trajectories, return_inverse=True, return_counts=True)
    sums = th.zeros(len(counts), dtype=fixed.dtype, device=fixed.device).index_add(0, labels, fixed)
    return log_ratio - fixed + (sums / counts)[labels]


def weighted_mean(values: th.Tensor, weights: th.Tensor | None) -> th.Tensor:
    """
    ``1/n sum_t w_t x_t``, with ``None`` for ones. It is not divided by the sum of the weights, whose mean need not be one.
    """
    return values.mean() if weights is None else (weights * values).mean()


def trajectory_loss_weights(lengths: th.Tensor) -> th.Tensor:
    """
    Weights ``mean(|o|) / |o_i|``. They turn the mean over transitions into ``1/m sum_i 1/|o_i| sum_t``, in which all
    trajectories count alike: DeepSeekMath (https://arxiv.org/abs/2402.03300), equation 3.

    :param lengths: Number of transitions ``|o_i|`` of each trajectory, shape ``(m,)``
    :return: Weight of the transitions of each trajectory, shape ``(m,)``
    """
    return lengths.sum() / len(lengths) / lengths


def constant_loss_weights(lengths: th.Tensor, horizon: int) -> th.Tensor:
    """
    Weights ``mean(|o|) / L``, where the horizon ``L`` is the largest number of transitions of a trajectory. They turn the mean
    over transitions into ``1/m sum_i 1/L sum_t``: Dr. GRPO (https://arxiv.org/abs/2503.20783), section 3. The gradient of a
    trajectory then depends neither on its own length, as with ``trajectory``, nor on the lengths of the others, as with
    ``step``. ``lengths`` and result: see :func:`trajectory_loss_weights`.
    """
    return (lengths.sum() / len(lengths) / horizon).expand(len(lengths))


def clip_fractions(ratio: th.Tensor, clip_range: float, clip_range_high: float) -> tuple[th.Tensor, th.Tensor]:
    """:return: Fractions of the ratios below the clip range of :func:`clipped_surrogate` and above it"""
    change = ratio - 1.0
    return (change < -clip_range).float().mean(), (change > clip_range_high).float().mean()


def effective_sample_size(ratio: th.Tensor) -> th.Tensor:
    """
    ``(sum rho)^2 / (n sum rho^2)``: Kish's effective sample size as a fraction of ``n`` (A. Owen, "Monte Carlo theory, methods
    and examples", equation 9.13). It is 1 if all ratios are equal, and ``1/n`` if one of them has all the weight.
    """
    relative = ratio / ratio.max()  # the square of a large ratio would overflow single precision
    return relative.sum() ** 2 / (len(ratio) * (relative**2).sum())


def k3(log_prob: th.Tensor, reference_log_prob: th.Tensor) -> th.Tensor:
    """
    ``exp(d) - d - 1`` with ``d = log pi_ref - log pi``: an unbiased estimate of KL(pi || pi_ref) that is never negative, from
    actions that ``pi`` has sampled (J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html), used
    by DeepSeekMath (https://arxiv.org/abs/2402.03300, equation 4). Departure: ``d`` is at most ``MAX_LOG_RATIO``.
    """
    # Both terms use the clamped value: if only the exponential were flat, the slope of -d would push the policies apart.
    d = th.clamp(reference_log_prob - log_prob, max=MAX_LOG_RATIO)
    return th.expm1(d) - d


def approximate_kl(log_ratio: th.Tensor) -> th.Tensor:
    """
    Mean of :func:`k3` for KL(pi_old || pi), the divergence that SB3 logs as ``approx_kl``, from ``log rho`` of actions that
    ``pi_old`` has sampled.
    """
    return k3(th.zeros_like(log_ratio), log_ratio).mean()


def exact_kl(policy: Distribution, reference: Distribution) -> th.Tensor:
    """
    KL(pi || pi_ref) in closed form for the same observations, summed over independent dimensions of the action.

    A squashed Gaussian has the divergence of the Gaussian before squashing, because ``tanh`` is invertible.
    """
    # SB3 keeps one torch distribution per action dimension for MultiDiscrete spaces, and a single one elsewhere.
    parts = policy.distribution if isinstance(policy.distribution, list) else [policy.distribution]
    reference_parts = reference.distribution if isinstance(reference.distribution, list) else [reference.distribution]
    divergences = [th.distributions.kl_divergence(p, q) for p, q in zip(parts, reference_parts, strict=True)]
    return th.stack([d.flatten(start_dim=1).sum(dim=1) if d.dim() > 1 else d for d in divergences]).sum(dim=0)
