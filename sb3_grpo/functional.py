"""
The mathematics of GRPO: pure functions on arrays and tensors.

Trajectories are *flat*: the transitions of all trajectories lie one after the other in arrays of shape ``(n,)``, and
``lengths`` of shape ``(m,)`` says how many belong to each of the ``m`` trajectories. ``groups`` of shape ``(m,)`` holds the
group of each trajectory as an integer in ``[0, n_groups)``. Advantages are computed by numpy in double precision, losses by
torch.

Symbols: ``r_t`` reward, ``G_t`` discounted return from step ``t`` (return-to-go), ``R`` undiscounted sum of a
trajectory's rewards, ``A_t`` advantage.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution

Scale = Literal["group", "batch", "none"]
KLEstimator = Literal["exact", "k1", "k2", "k3"]
LossAggregation = Literal["step", "trajectory", "constant"]
ImportanceSamplingLevel = Literal["step", "trajectory"]

#: Added to a standard deviation before dividing by it.
EPS = 1e-8
#: Scores count as tied when they differ by no more than this fraction of the largest: rounding, not merit.
TIE_TOLERANCE = 1e-9
#: Log-ratios are clamped to this magnitude before they are exponentiated, so that no ratio overflows.
MAX_LOG_RATIO = 20.0
#: An adaptive coefficient of the KL penalty stays between these, so that it can always find its way back.
KL_COEF_BOUNDS = (1e-6, 1e6)
#: The most that a transition of an earlier rollout counts.
LARGEST_REUSE_WEIGHT = 2.0


# --- trajectories -----------------------------------------------------------------------------------------------------


def linear_recurrence(inputs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """
    Solve ``y_t = x_t + a_t y_{t+1}`` with ``y_n = 0`` for all ``t`` at once.

    The recurrence is a prefix sum of affine maps, so that it can be evaluated by doubling (Hillis & Steele 1986): after
    pass ``k``, ``y_t`` covers ``2^k`` terms. A coefficient of zero ends a trajectory; passes stop when none reaches
    further, which makes the cost ``O(n log(longest trajectory))`` without a Python loop over time.

    :param inputs: ``x``, shape ``(n,)``
    :param coefficients: ``a``, shape ``(n,)``; ``a_{n-1}`` has no effect
    :return: ``y``, shape ``(n,)``, double precision
    """
    y = np.array(inputs, dtype=np.float64)
    a = np.array(coefficients, dtype=np.float64)
    stride = 1
    while stride < len(y) and a[:-stride].any():
        y[:-stride] += a[:-stride] * y[stride:]
        a[:-stride] *= a[stride:]
        a[-stride:] = 0.0
        stride *= 2
    return y


def same_trajectory_continues(lengths: np.ndarray) -> np.ndarray:
    """
    :param lengths: transitions of each trajectory, shape ``(m,)``, all positive
    :return: 1.0 where the next transition belongs to the same trajectory, 0.0 at each trajectory's last, shape ``(n,)``
    """
    continues = np.ones(int(np.sum(lengths)))
    continues[np.cumsum(lengths) - 1] = 0.0
    return continues


def steps_within_trajectories(lengths: np.ndarray) -> np.ndarray:
    """
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :return: the step ``t = 0, 1, ...`` of each transition within its trajectory, shape ``(n,)``
    """
    firsts = np.cumsum(lengths) - lengths
    return np.arange(int(np.sum(lengths))) - np.repeat(firsts, lengths)


def sum_by_label(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """
    :param values: shape ``(n,)``
    :param labels: integers in ``[0, n_labels)``, shape ``(n,)``
    :return: the sum of the values of each label, shape ``(n_labels,)``
    """
    return np.bincount(labels, weights=values)


def label_by_appearance(values: np.ndarray) -> np.ndarray:
    """
    :param values: shape ``(n,)``
    :return: integers from 0 on, the same for equal values, in the order in which values first appear, shape ``(n,)``
    """
    _, firsts, labels = np.unique(values, return_index=True, return_inverse=True)
    position = np.argsort(np.argsort(firsts))
    return np.take(position, labels)


def deal_trajectories(trajectories: np.ndarray, order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """
    Deal out whole trajectories to minibatches, each of which takes as many as it needs to have ``batch_size`` transitions.

    :param trajectories: the trajectory of each transition, integers in ``[0, m)``, each of them used, shape ``(n,)``
    :param order: in which trajectories are dealt, a permutation of them, shape ``(m,)``
    :param batch_size: transitions that a minibatch has at least; the last may have fewer
    :return: the transitions of each minibatch, those of a trajectory one after the other
    """
    position = np.argsort(order)[trajectories]
    ends = np.cumsum(np.bincount(trajectories)[order])
    cuts = [0]
    while cuts[-1] < len(trajectories):
        enough = int(np.searchsorted(ends, cuts[-1] + batch_size))
        cuts.append(int(ends[min(enough, len(ends) - 1)]))
    return np.split(np.argsort(position, kind="stable"), cuts[1:-1])


def discounted_returns(rewards: np.ndarray, lengths: np.ndarray, gamma: float) -> np.ndarray:
    """
    Return-to-go ``G_t = sum_{k>=t} gamma^{k-t} r_k`` within each trajectory.

    :param rewards: shape ``(n,)``
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param gamma: discount factor
    :return: shape ``(n,)``
    """
    return linear_recurrence(rewards, gamma * same_trajectory_continues(lengths))


def generalized_advantages(
    rewards: np.ndarray,
    baseline: np.ndarray,
    next_baseline: np.ndarray,
    continues: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """
    ``A_t = delta_t + gamma lambda A_{t+1}`` with ``delta_t = r_t + gamma b(s_{t+1}) - b(s_t)``: generalized advantage
    estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16) against any baseline ``b``.

    ``A_t + b(s_t)`` is the lambda-return, the target to which a baseline is fitted.

    :param rewards: shape ``(n,)``
    :param baseline: ``b(s_t)``, shape ``(n,)``
    :param next_baseline: ``b(s_{t+1})``, zero after a termination, shape ``(n,)``
    :param continues: 1.0 where the next transition belongs to the same trajectory, else 0.0, shape ``(n,)``
    :param gamma: discount factor
    :param gae_lambda: from 0 (one step) to 1 (whole return)
    :return: shape ``(n,)``
    """
    deltas = rewards + gamma * next_baseline - baseline
    return linear_recurrence(deltas, gamma * gae_lambda * continues)


# --- advantages within groups -----------------------------------------------------------------------------------------


def centre_within(values: np.ndarray, labels: np.ndarray, magnitudes: np.ndarray | None = None) -> np.ndarray:
    """
    Subtract from each value the mean of those that share its label; tied values give exactly zero.

    Values are first shifted by their label's first value, so that equal values cancel without rounding; what still
    differs by less than ``TIE_TOLERANCE`` of the largest magnitude (sums taken in another order) is a tie too. Testing the
    spread in this way, rather than ``std == 0``, keeps rounding residue from being blown up when it is later divided by its
    own standard deviation.

    :param values: shape ``(n,)``
    :param labels: integers in ``[0, n_labels)``, each of them used, shape ``(n,)``
    :param magnitudes: of what was added up to each value, shape ``(n,)``; ``None`` for that of the value itself. Where terms
        cancel, a sum may be nothing but their rounding
    :return: shape ``(n,)``
    """
    values = np.asarray(values, dtype=np.float64)
    counts = np.bincount(labels)
    first_values = np.empty(len(counts))
    first_values[labels[::-1]] = values[::-1]
    shifted = values - first_values[labels]
    centred = shifted - (sum_by_label(shifted, labels) / counts)[labels]
    smallest, largest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(smallest, labels, values)
    np.maximum.at(largest, labels, values)
    magnitude = np.zeros(len(counts))
    np.maximum.at(magnitude, labels, np.abs(values) if magnitudes is None else magnitudes)
    tied = largest - smallest <= TIE_TOLERANCE * magnitude
    return np.where(tied[labels], 0.0, centred)


def leave_one_out_factor(labels: np.ndarray) -> np.ndarray:
    """
    What turns ``x_i - mean(x)`` into ``x_i - mean of the other x``: ``k / (k - 1)`` for a label with ``k`` values.

    :param labels: integers in ``[0, n_labels)``, each of them used, shape ``(n,)``
    :return: shape ``(n,)``; 0.0 for a value that has no others
    """
    counts = np.bincount(labels)
    return np.where(counts > 1, counts / np.maximum(counts - 1, 1), 0.0)[labels]


def rescale(centred: np.ndarray, labels: np.ndarray, scale: Scale) -> np.ndarray:
    """
    Divide centred values by their (population) standard deviation.

    :param centred: values with zero mean within each label, shape ``(n,)``
    :param labels: integers in ``[0, n_labels)``, each of them used, shape ``(n,)``
    :param scale: ``"group"`` divides by the deviation within the label, ``"batch"`` by that over all values, ``"none"`` leaves
        the values as they are (Dr. GRPO, https://arxiv.org/abs/2503.20783)
    :return: shape ``(n,)``
    """
    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (np.sqrt(np.mean(centred**2)) + EPS)
    variance = sum_by_label(centred**2, labels) / np.bincount(labels)
    return centred / (np.sqrt(variance)[labels] + EPS)


def outcome_advantages(
    rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: Scale = "group", leave_one_out: bool = False
) -> np.ndarray:
    """
    ``A_t = (R_i - mean_g R) / (std_g R + eps)`` for every step ``t`` of trajectory ``i``: outcome supervision,
    DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.2.

    With ``leave_one_out`` the mean is taken over the *other* members (RLOO, https://arxiv.org/abs/2402.14740, equation 7).
    Departures: the standard deviation is the population's, a tied or single-member group gives zero.

    :param rewards: shape ``(n,)``
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :param scale: see :func:`rescale`
    :param leave_one_out: compare each member with the others instead of with all
    :return: shape ``(n,)``
    """
    rewards, firsts = np.asarray(rewards, dtype=np.float64), np.cumsum(lengths) - lengths
    trajectory_returns, magnitudes = np.add.reduceat(rewards, firsts), np.add.reduceat(np.abs(rewards), firsts)
    advantages = rescale(centre_within(trajectory_returns, groups, magnitudes), groups, scale)
    if leave_one_out:
        advantages = advantages * leave_one_out_factor(groups)
    return np.repeat(advantages, lengths)


def process_advantages(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: Scale = "group") -> np.ndarray:
    """
    ``A_t = sum_{k>=t} (r_k - mean_g r) / (std_g r + eps)`` with mean and standard deviation over all step rewards of the
    group: process supervision, DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.3.

    A constant reward (CartPole's 1 per step) normalises to zero, so that nothing can be learned from it: a property of the
    published formula, kept. Departures: as for :func:`outcome_advantages`.

    :param rewards: shape ``(n,)``
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :param scale: see :func:`rescale`
    :return: shape ``(n,)``
    """
    labels = np.repeat(groups, lengths)
    return linear_recurrence(rescale(centre_within(rewards, labels), labels, scale), same_trajectory_continues(lengths))


def _centred_returns(rewards: np.ndarray, lengths: np.ndarray, gamma: float, labels: np.ndarray) -> np.ndarray:
    magnitudes = discounted_returns(np.abs(rewards), lengths, gamma)
    return centre_within(discounted_returns(rewards, lengths, gamma), labels, magnitudes)


def return_to_go_advantages(
    rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, gamma: float, scale: Scale = "group"
) -> np.ndarray:
    """
    ``A_t = (G_t - mean_g G) / (std_g G + eps)`` with mean and standard deviation over the returns-to-go of all steps of the
    group: proposed for sb3-contrib (https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/301).

    :param rewards: shape ``(n,)``
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :param gamma: discount factor
    :param scale: see :func:`rescale`
    :return: shape ``(n,)``
    """
    labels = np.repeat(groups, lengths)
    return rescale(_centred_returns(rewards, lengths, gamma, labels), labels, scale)


def peers_at_each_step(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """
    Label transitions so that two share a label when they are at the same step of trajectories of the same group.

    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :return: integers in ``[0, n_labels)``, each of them used, shape ``(n,)``
    """
    longest = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, groups, lengths)
    first_label = np.cumsum(longest) - longest
    return np.repeat(first_label[groups], lengths) + steps_within_trajectories(lengths)


def stepwise_advantages(
    rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, gamma: float, scale: Scale = "batch"
) -> np.ndarray:
    """
    ``A_t = G_t - mean of G_t over the other members still running at t``: Group Policy Gradient
    (https://arxiv.org/abs/2510.03679) with bins by time and a leave-one-out mean. A step without a peer gives zero.

    :param rewards: shape ``(n,)``
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :param gamma: discount factor
    :param scale: see :func:`rescale`; ``"group"`` takes the deviation over all steps of the group
    :return: shape ``(n,)``
    """
    peers = peers_at_each_step(lengths, groups)
    centred = _centred_returns(rewards, lengths, gamma, peers) * leave_one_out_factor(peers)
    return rescale(centred, np.repeat(groups, lengths), scale)


def count_steps_without_peer(lengths: np.ndarray, groups: np.ndarray) -> int:
    """
    :param lengths: transitions of each trajectory, shape ``(m,)``
    :param groups: group of each trajectory, shape ``(m,)``
    :return: the number of transitions at a step which no other member of the group has reached
    """
    return int((np.bincount(peers_at_each_step(lengths, groups)) == 1).sum())


def whiten(advantages: np.ndarray) -> np.ndarray:
    """
    Shift and scale advantages to zero mean and unit standard deviation over the whole update. SB3's PPO does the same per
    minibatch; over the update the scale is less noisy and the same for every minibatch.

    :param advantages: shape ``(n,)``
    :return: shape ``(n,)``; all zero where all advantages are equal
    """
    one_label = np.zeros(len(advantages), dtype=np.int64)
    return rescale(centre_within(advantages, one_label), one_label, "group")


def explained_variance(predictions: np.ndarray, targets: np.ndarray) -> float:
    """
    ``1 - Var(y - b) / Var(y)``: 1 is perfect, 0 no better than a constant, negative worse.

    :param predictions: ``b``, shape ``(n,)``
    :param targets: ``y``, shape ``(n,)``
    :return: NaN where the targets do not vary
    """
    variance = np.mean(centre_within(targets, np.zeros(len(targets), dtype=np.int64)) ** 2)
    return float("nan") if variance == 0 else float(1.0 - np.var(targets - predictions) / variance)


# --- losses -----------------------------------------------------------------------------------------------------------


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
