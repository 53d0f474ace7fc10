"""The loss of a minibatch, the clipping of its gradient, and Adam."""

import math
from typing import NamedTuple

import numpy as np

from sb3_grpo.arithmetic.machine_code.jit import entry_point

ZERO, ONE = np.float32(0.0), np.float32(1.0)
#: As in ``losses``, which a test compares
MAX_LOG_RATIO = 20.0


class Sums(NamedTuple):
    """
    Sums over the minibatches of an epoch, except for ``loss``.

    :param n: Number of transitions
    :param approx_kl: Sum of the estimates of the divergence from the old policy
    :param clipped_low: Number of ratios below the clip range
    :param clipped_high: Number of ratios above the clip range
    :param kl: Sum of the divergences from the reference
    :param surrogate: Sum of the minibatches' mean surrogates
    :param loss: Loss of the last minibatch
    """

    n_minibatches: float
    n: float
    entropy: float
    approx_kl: float
    clipped_low: float
    clipped_high: float
    ratio: float
    ratio_squared: float
    kl: float
    surrogate: float
    loss: float


N_SUMS = len(Sums._fields)
N_MINIBATCHES, N, ENTROPY, APPROX_KL, CLIPPED_LOW, CLIPPED_HIGH, RATIO, RATIO_SQUARED, KL, SURROGATE, LOSS = range(N_SUMS)


@entry_point("f8(f4[:, ::1], f4[::1], f4[::1], f4[::1], f8, f8, f8, f8, f4[:, ::1], f8[::1])")
def surrogate(
    terms: np.ndarray,
    old_log_prob: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    clip_range: float,
    clip_range_high: float,
    ent_coef: float,
    kl_coef: float,
    grad_terms: np.ndarray,
    sums: np.ndarray,
) -> float:
    """
    The loss ``1/n sum_t w_t (S_t - c_ent H_t + c_kl KL_t)`` of a minibatch, its derivatives with respect to log-probabilities,
    entropies and divergences, and its metrics. ``S`` is :func:`sb3_grpo.losses.clipped_surrogate`; with ``rho`` the ratio and
    ``A`` the advantage, ``dS / dlog p = -rho A`` where it is not clipped, and 0 elsewhere.

    :param terms: Log-probabilities, entropies and divergences, shape ``(3, n)``
    :param old_log_prob: Log-probabilities under the policy that sampled the actions, shape ``(n,)``
    :param advantages: ``A``, shape ``(n,)``
    :param weights: ``w``, shape ``(n,)``
    :param clip_range: Lower limit of the importance ratio, as the distance from 1
    :param clip_range_high: Upper limit, likewise
    :param grad_terms: Receives the derivatives, shape ``(3, n)``
    :param sums: The :class:`Sums` of the epoch, to which those of the minibatch are added, shape ``(N_SUMS,)``
    :return: Estimate of the divergence from the old policy
    """
    n = terms.shape[1]
    low, high = np.float32(1.0 - clip_range), np.float32(1.0 + clip_range_high)
    change_low, change_high = np.float32(-clip_range), np.float32(clip_range_high)
    limit = np.float32(MAX_LOG_RATIO)
    total_loss, total_entropy, total_kl = 0.0, 0.0, 0.0
    total_approx_kl = 0.0
    for i in range(n):
        log_ratio = terms[0, i] - old_log_prob[i]
        bounded = limit if log_ratio > limit else log_ratio
        approx_kl = math.expm1(bounded) - bounded
        bounded = -limit if bounded < -limit else bounded
        ratio = math.exp(bounded)
        clipped = low if ratio < low else ratio
        clipped = high if clipped > high else clipped
        gain, clipped_gain = advantages[i] * ratio, advantages[i] * clipped
        # NaN compares as false, so it stays visible.
        is_flat = gain > clipped_gain or abs(log_ratio) > limit
        loss = -clipped_gain if gain > clipped_gain else -gain
        share = weights[i] / np.float32(n)
        grad_terms[0, i] = ZERO if is_flat else -gain * share
        grad_terms[1, i] = -np.float32(ent_coef) * share
        grad_terms[2, i] = np.float32(kl_coef) * share
        total_loss += share * loss
        total_entropy += share * terms[1, i]
        total_kl += share * terms[2, i]
        sums[ENTROPY] += terms[1, i]
        sums[KL] += terms[2, i]
        total_approx_kl += float(approx_kl)
        sums[RATIO] += ratio
        sums[RATIO_SQUARED] += np.float64(ratio) * ratio
        sums[CLIPPED_LOW] += ratio - ONE < change_low
        sums[CLIPPED_HIGH] += ratio - ONE > change_high
    sums[N_MINIBATCHES] += 1.0
    sums[N] += n
    sums[APPROX_KL] += total_approx_kl
    sums[SURROGATE] += total_loss
    sums[LOSS] = total_loss
    # A coefficient of zero removes its term, also one that is infinite.
    if ent_coef != 0.0:
        sums[LOSS] -= ent_coef * total_entropy
    if kl_coef != 0.0:
        sums[LOSS] += kl_coef * total_kl
    return total_approx_kl / n


@entry_point("f8(f4[::1], f8)")
def clip_gradient(gradient: np.ndarray, max_norm: float) -> float:
    """Clip the gradient in place, as :func:`torch.nn.utils.clip_grad_norm_` does, and return its norm before clipping."""
    squares = ZERO
    for i in range(len(gradient)):
        squares += gradient[i] * gradient[i]
    norm = math.sqrt(squares)
    factor = np.float32(max_norm) / (norm + np.float32(1e-6))
    if not factor >= ONE:  # also NaN
        for i in range(len(gradient)):
            gradient[i] *= factor
    return norm


@entry_point("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], i8[::1], f8[:, ::1])")
def adam(
    parameters: np.ndarray,
    gradient: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    steps: np.ndarray,
    bounds: np.ndarray,
    rates: np.ndarray,
) -> None:
    """
    A step of Adam (https://arxiv.org/abs/1412.6980, algorithm 1) as :class:`torch.optim.Adam` takes it:
    ``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``,
    ``theta <- theta - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``.

    :param parameters: Parameters ``theta``, tensor after tensor, changed in place, shape ``(n_parameters,)``
    :param gradient: Gradient ``g``, same shape
    :param exp_avg: First moments ``m``, changed in place, same shape
    :param exp_avg_sq: Second moments ``v``, changed in place, same shape
    :param steps: Number of steps ``t`` of each tensor so far, changed in place, shape ``(n_tensors,)``
    :param bounds: Index of the first number of each tensor, and their total
    :param rates: For each tensor the learning rate, the two decay rates and ``eps``, shape ``(n_tensors, 4)``
    """
    for tensor in range(len(steps)):
        steps[tensor] += ONE
        t = np.float64(steps[tensor])
        lr, beta1, beta2 = rates[tensor, 0], rates[tensor, 1], rates[tensor, 2]
        eps = np.float32(rates[tensor, 3])
        step_size = np.float32(lr / (1.0 - beta1**t))
        root = np.float32(math.sqrt(1.0 - beta2**t))
        new1, new2, decay2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2), np.float32(beta2)
        first, stop = bounds[tensor], bounds[tensor + 1]
        theta, g, m, v = parameters[first:stop], gradient[first:stop], exp_avg[first:stop], exp_avg_sq[first:stop]
        for i in range(len(theta)):
            m[i] += new1 * (g[i] - m[i])
            v[i] = decay2 * v[i] + new2 * g[i] * g[i]
            theta[i] -= step_size * m[i] / (np.sqrt(v[i]) / root + eps)
