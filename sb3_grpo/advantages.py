"""
Advantages, as pure functions of numpy arrays in double precision.

Trajectories are *flat*: the transitions of all trajectories lie one after the other in arrays of shape ``(n,)``, and
``lengths`` of shape ``(m,)`` says how many belong to each of the ``m`` trajectories. ``groups`` of shape ``(m,)`` holds the
group of each trajectory as an integer in ``[0, n_groups)``.

Symbols: ``r_t`` reward, ``G_t`` discounted return from step ``t`` (return-to-go), ``R`` undiscounted sum of a
trajectory's rewards, ``A_t`` advantage.
"""

from typing import Literal

import numpy as np

Scale = Literal["group", "batch", "none"]

#: Added to a standard deviation before dividing by it.
EPS = 1e-8
#: Scores count as tied when they differ by no more than this fraction of the largest: rounding, not merit.
TIE_TOLERANCE = 1e-9


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
