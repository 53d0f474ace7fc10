"""
Advantages: pure functions of numpy arrays, in double precision.

The transitions of all trajectories are concatenated in arrays of shape ``(n,)``, which is the shape of arguments and results
unless something else is said. ``lengths``, of shape ``(m,)``, holds the number of transitions of each trajectory, and
``groups``, of shape ``(m,)``, the group of each trajectory as an integer in ``[0, n_groups)``. Labels are integers in
``[0, n_labels)``, and each of them is used. ``gamma`` is the discount factor.

Symbols: ``r_t`` is the reward, ``G_t`` the discounted return from step ``t`` (return-to-go), ``R`` the undiscounted sum of the
rewards of a trajectory, ``A_t`` the advantage.
"""

from typing import Literal

import numpy as np

Scale = Literal["group", "batch", "none"]

#: Added to a standard deviation before dividing by it.
EPS = 1e-8
#: Values whose differences are below this fraction of the largest are tied: the differences are due to rounding.
TIE_TOLERANCE = 1e-9


def linear_recurrence(inputs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """
    Solve ``y_t = x_t + a_t y_{t+1}`` with ``y_n = 0`` for all ``t`` at once, where ``x`` are the inputs and ``a`` the
    coefficients.

    The recurrence is a prefix sum of affine maps, which doubling evaluates (Hillis & Steele 1986): after pass ``k``, ``y_t``
    covers ``2^k`` terms. A coefficient of zero ends a trajectory, and the passes stop once all trajectories are covered. The
    cost is ``O(n log(longest trajectory))`` without a Python loop over time.
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
    """:return: 1.0 where the next transition belongs to the same trajectory, else 0.0"""
    continues = np.ones(int(np.sum(lengths)))
    continues[np.cumsum(lengths) - 1] = 0.0
    return continues


def steps_within_trajectories(lengths: np.ndarray) -> np.ndarray:
    """:return: Step ``t = 0, 1, ...`` of each transition within its trajectory"""
    firsts = np.cumsum(lengths) - lengths
    return np.arange(int(np.sum(lengths))) - np.repeat(firsts, lengths)


def sum_by_label(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """:return: Sum of the values of each label, shape ``(n_labels,)``"""
    return np.bincount(labels, weights=values)


def label_by_appearance(values: np.ndarray) -> np.ndarray:
    """:return: Label of each value: equal values share a label, and labels are numbered by first appearance"""
    _, firsts, labels = np.unique(values, return_index=True, return_inverse=True)
    position = np.argsort(np.argsort(firsts))
    return np.take(position, labels)


def batch_trajectories(trajectories: np.ndarray, order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """
    Distribute whole trajectories over minibatches, in an order that is a permutation of their labels. Each minibatch has as
    many as it needs to have ``batch_size`` transitions; the last may have fewer.

    :param trajectories: Label of the trajectory of each transition
    :return: Indices of the transitions of each minibatch
    """
    position = np.argsort(order)[trajectories]
    ends = np.cumsum(np.bincount(trajectories)[order])
    cuts = [0]
    while cuts[-1] < len(trajectories):
        enough = int(np.searchsorted(ends, cuts[-1] + batch_size))
        cuts.append(int(ends[min(enough, len(ends) - 1)]))
    return np.split(np.argsort(position, kind="stable"), cuts[1:-1])


def discounted_returns(rewards: np.ndarray, lengths: np.ndarray, gamma: float) -> np.ndarray:
    """:return: Returns-to-go ``G_t = sum_{k>=t} gamma^{k-t} r_k`` within each trajectory"""
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
    Generalized advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16) with any baseline
    ``b``: ``A_t = delta_t + gamma lambda A_{t+1}`` with ``delta_t = r_t + gamma b(s_{t+1}) - b(s_t)``. ``A_t + b(s_t)`` is the
    lambda-return.

    :param baseline: ``b(s_t)``
    :param next_baseline: ``b(s_{t+1})``, zero after a termination
    :param continues: 1.0 where the next transition belongs to the same trajectory, else 0.0
    :param gae_lambda: ``lambda``, from 0 (one step) to 1 (whole return)
    :return: ``A``
    """
    deltas = rewards + gamma * next_baseline - baseline
    return linear_recurrence(deltas, gamma * gae_lambda * continues)


def centre_within(values: np.ndarray, labels: np.ndarray, magnitudes: np.ndarray | None = None) -> np.ndarray:
    """
    Subtract from each value the mean of the values with the same label. Tied values give exactly zero.

    The values are first shifted by the first value of their label, so equal values cancel without rounding errors. Values
    whose range is below ``TIE_TOLERANCE`` of the largest magnitude, such as sums in different orders, are tied as well. This
    test, instead of ``std == 0``, prevents rounding errors from being divided by their own standard deviation.

    :param magnitudes: Magnitude of the terms of each value; ``None`` for that of the value itself. If terms cancel, the value
        may be nothing but their rounding error
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
    """:return: ``k / (k - 1)`` for each value of a label with ``k`` values, 0.0 for one without others"""
    counts = np.bincount(labels)
    return np.where(counts > 1, counts / np.maximum(counts - 1, 1), 0.0)[labels]


def differences_from_others(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Each value minus the mean of the *other* values with its label; 0.0 for tied values, and for one without others."""
    return centre_within(values, labels) * leave_one_out_factor(labels)


def rescale(centred: np.ndarray, labels: np.ndarray, scale: Scale) -> np.ndarray:
    """
    Divide centred values by their standard deviation (that of the population).

    :param centred: Values with mean zero within each label
    :param labels: Label of each value
    :param scale: ``"group"`` divides by the standard deviation within the label, ``"batch"`` by that of all values, and
        ``"none"`` does not divide (Dr. GRPO, https://arxiv.org/abs/2503.20783)
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
    Outcome supervision, DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.2:
    ``A_t = (R_i - mean_g R) / (std_g R + eps)`` for every step ``t`` of trajectory ``i``.

    With ``leave_one_out``, the mean is over the *other* members (RLOO, https://arxiv.org/abs/2402.14740, equation 7).
    Departures: the standard deviation is that of the population, and a tied or single-member group gives zero. ``scale`` is
    that of :func:`rescale`.
    """
    rewards, firsts = np.asarray(rewards, dtype=np.float64), np.cumsum(lengths) - lengths
    trajectory_returns, magnitudes = np.add.reduceat(rewards, firsts), np.add.reduceat(np.abs(rewards), firsts)
    advantages = rescale(centre_within(trajectory_returns, groups, magnitudes), groups, scale)
    if leave_one_out:
        advantages = advantages * leave_one_out_factor(groups)
    return np.repeat(advantages, lengths)


def process_advantages(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: Scale = "group") -> np.ndarray:
    """
    Process supervision, DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.3:
    ``A_t = sum_{k>=t} (r_k - mean_g r) / (std_g r + eps)``, with mean and standard deviation over all rewards of the group.
    Departures: as for :func:`outcome_advantages`.

    A constant reward (1 per step in CartPole) becomes zero, so nothing is learned from it. This is a property of the published
    formula.
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
    The proposal for sb3-contrib (https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/301):
    ``A_t = (G_t - mean_g G) / (std_g G + eps)``, with mean and standard deviation over all returns-to-go of the group.
    """
    labels = np.repeat(groups, lengths)
    return rescale(_centred_returns(rewards, lengths, gamma, labels), labels, scale)


def peers_at_each_step(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """:return: Labels that two transitions share if they are at the same step of trajectories of the same group"""
    longest = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, groups, lengths)
    first_label = np.cumsum(longest) - longest
    return np.repeat(first_label[groups], lengths) + steps_within_trajectories(lengths)


def stepwise_advantages(
    rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, gamma: float, scale: Scale = "batch"
) -> np.ndarray:
    """
    Group Policy Gradient (https://arxiv.org/abs/2510.03679) with bins by time and a leave-one-out mean:
    ``A_t = G_t - mean of G_t over the other members still running at t``. A step without a peer gives zero. The ``scale``
    ``"group"`` takes the standard deviation over all steps of the group, see :func:`rescale`.
    """
    peers = peers_at_each_step(lengths, groups)
    centred = _centred_returns(rewards, lengths, gamma, peers) * leave_one_out_factor(peers)
    return rescale(centred, np.repeat(groups, lengths), scale)


def relative_advantages(advantages: np.ndarray, peers: np.ndarray, coefficient: np.ndarray | float) -> np.ndarray:
    """
    The relative term: ``A_i - c x_i``, where ``x_i`` is the mean advantage of the other members of the group at the same step.
    Without peers, an advantage stays as it is.

    :param peers: Label of each transition: those at the same step of trajectories of the same group share it
    :param coefficient: ``c``, from 0 to 1, of each transition or one number
    """
    has_peers = np.bincount(peers)[peers] > 1
    # Not `A - c x`: with a coefficient of 1, tied members get exactly zero.
    relative = (1 - coefficient) * advantages + coefficient * differences_from_others(advantages, peers)
    return np.where(has_peers, relative, advantages)


def relative_coefficient(correlation: np.ndarray, n_others: np.ndarray) -> np.ndarray:
    """
    The coefficient with which :func:`relative_advantages` leaves the least variance: ``c = eta m / (1 + (m - 1) eta)``, 0
    without other members.

    It is the coefficient of the best linear prediction of one member from the mean of ``m`` others, if each advantage is the
    sum of a part that all members share and a part of its own, and the shared part has the share ``eta`` of the variance.

    :param correlation: Intraclass correlation ``eta``, from 0 to 1
    :param n_others: Number of other members ``m``
    """
    return correlation * n_others / (1 + np.maximum(n_others - 1, 0) * correlation)


def count_steps_without_peer(lengths: np.ndarray, groups: np.ndarray) -> int:
    """:return: Number of transitions at a step that no other member of the group has reached"""
    return int((np.bincount(peers_at_each_step(lengths, groups)) == 1).sum())


def whiten(advantages: np.ndarray) -> np.ndarray:
    """
    Shift and scale the advantages of a rollout to mean zero and standard deviation one; equal ones become zero. SB3's PPO does
    this for each minibatch; over the whole rollout the scale is less noisy, and the same for all minibatches.
    """
    one_label = np.zeros(len(advantages), dtype=np.int64)
    return rescale(centre_within(advantages, one_label), one_label, "group")


def explained_variance(predictions: np.ndarray, targets: np.ndarray) -> float:
    """
    :return: ``1 - Var(y - b) / Var(y)`` for predictions ``b`` of targets ``y``: 1 is perfect, 0 is as good as a constant, and
        negative values are worse. NaN if the targets do not vary
    """
    one_group = np.zeros(len(targets), dtype=np.int64)
    variance, residual = (np.mean(centre_within(each, one_group) ** 2) for each in (targets, targets - predictions))
    return float("nan") if variance == 0 else float(1.0 - residual / variance)
