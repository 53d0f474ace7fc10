"""The formulas of GRPO, held against numbers worked out by hand, limits, gradients and slow, obvious loops."""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
)

from sb3_grpo import advantages as A
from sb3_grpo import losses

SEEDS = [pytest.param(seed, id=f"draw {seed}") for seed in range(5)]
SCALES = [pytest.param(scale, id=f"scale {scale}") for scale in ("group", "batch", "none")]
MAGNITUDES = [pytest.param(10.0**exponent, id=f"1e{exponent}") for exponent in (-30, -6, 0, 6, 12, 30)]
GAMMA = 0.9
LN2 = math.log(2.0)

Advantages = Callable[[np.ndarray, np.ndarray, np.ndarray, A.Scale], np.ndarray]


class Rollout(NamedTuple):
    rewards: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray


def draw_rollout(seed: int) -> Rollout:
    """Four groups of five, three, two and one member, in random order; some trajectories have a single step."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([0, 1, 2, 3], [5, 3, 2, 1]))
    lengths = rng.integers(1, 9, size=len(groups))
    lengths[rng.choice(len(groups), size=2, replace=False)] = 1
    return Rollout(rng.normal(size=lengths.sum()), lengths, groups)


def by_trajectory(values: np.ndarray, lengths: np.ndarray) -> list[list[float]]:
    return [list(part) for part in np.split(values, np.cumsum(lengths)[:-1])]


def flat(values: list[list[float]]) -> list[float]:
    return [value for trajectory in values for value in trajectory]


# --- slow, obvious loops ----------------------------------------------------------------------------------------------


def loop_returns(trajectory: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * trajectory[k] for k in range(t, len(trajectory))) for t in range(len(trajectory))]


def loop_rescale(values: list[list[float]], groups: np.ndarray, scale: str) -> list[list[float]]:
    deviation = {
        "none": lambda g: 1.0,
        "batch": lambda g: statistics.pstdev(flat(values)) + 1e-8,
        "group": lambda g: statistics.pstdev(flat([v for v, h in zip(values, groups, strict=True) if h == g])) + 1e-8,
    }[scale]
    return [[value / deviation(g) for value in v] for v, g in zip(values, groups, strict=True)]


def loop_centre(values: list[list[float]], groups: np.ndarray) -> list[list[float]]:
    means = {g: statistics.fmean(flat([v for v, h in zip(values, groups, strict=True) if h == g])) for g in groups}
    return [[value - means[g] for value in v] for v, g in zip(values, groups, strict=True)]


def loop_outcome(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: str) -> list[float]:
    sums = [[sum(trajectory)] for trajectory in by_trajectory(rewards, lengths)]
    scores = loop_rescale(loop_centre(sums, groups), groups, scale)
    return flat([score * length for score, length in zip(scores, lengths, strict=True)])


def loop_rloo(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: str) -> list[float]:
    sums = [sum(trajectory) for trajectory in by_trajectory(rewards, lengths)]
    deviations = loop_rescale(loop_centre([[s] for s in sums], groups), groups, scale)
    advantages: list[list[float]] = []
    for i, length in enumerate(lengths):
        others = [sums[j] for j in range(len(sums)) if j != i and groups[j] == groups[i]]
        difference = sums[i] - statistics.fmean(others) if others else 0.0
        # The divisor is that of the plain formula: centred over rescaled
        centred = loop_centre([[s] for s in sums], groups)[i][0]
        advantages.append([difference / (centred / deviations[i][0]) if others else 0.0] * length)
    return flat(advantages)


def loop_process(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: str) -> list[float]:
    normalised = loop_rescale(loop_centre(by_trajectory(rewards, lengths), groups), groups, scale)
    return flat([[sum(steps[t:]) for t in range(len(steps))] for steps in normalised])


def loop_return_to_go(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: str) -> list[float]:
    returns = [loop_returns(trajectory, GAMMA) for trajectory in by_trajectory(rewards, lengths)]
    return flat(loop_rescale(loop_centre(returns, groups), groups, scale))


def loop_stepwise(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: str) -> list[float]:
    returns = [loop_returns(trajectory, GAMMA) for trajectory in by_trajectory(rewards, lengths)]
    differences: list[list[float]] = []
    for i, own in enumerate(returns):
        others = [returns[j] for j in range(len(returns)) if j != i and groups[j] == groups[i]]
        differences.append([])
        for t, value in enumerate(own):
            running = [other[t] for other in others if len(other) > t]
            differences[i].append(value - sum(running) / len(running) if running else 0.0)
    return flat(loop_rescale(differences, groups, scale))


def rloo_advantages(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: A.Scale) -> np.ndarray:
    return A.outcome_advantages(rewards, lengths, groups, scale, leave_one_out=True)


def return_to_go_advantages(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: A.Scale) -> np.ndarray:
    return A.return_to_go_advantages(rewards, lengths, groups, GAMMA, scale)


def stepwise_advantages(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray, scale: A.Scale) -> np.ndarray:
    return A.stepwise_advantages(rewards, lengths, groups, GAMMA, scale)


FORMULAS = [
    pytest.param(A.outcome_advantages, id="outcome"),
    pytest.param(rloo_advantages, id="outcome leave-one-out"),
    pytest.param(A.process_advantages, id="process"),
    pytest.param(return_to_go_advantages, id="return_to_go"),
    pytest.param(stepwise_advantages, id="stepwise"),
]
# The other two also compare the steps of one trajectory with each other
FORMULAS_ACROSS_MEMBERS = [FORMULAS[0], FORMULAS[1], FORMULAS[4]]
FORMULAS_AND_LOOPS = [
    pytest.param(*formula.values, loop, id=formula.id)
    for formula, loop in zip(FORMULAS, (loop_outcome, loop_rloo, loop_process, loop_return_to_go, loop_stepwise), strict=True)
]


# --- trajectories -----------------------------------------------------------------------------------------------------


def test_linear_recurrence_of_three_terms_is_as_worked_out_by_hand():
    # y_2 = 4; y_1 = 2 + 0.5 * 4 = 4; y_0 = 1 - 3 * 4 = -11; the last coefficient has nothing to act on
    np.testing.assert_array_equal(A.linear_recurrence(np.array([1, 2, 4]), np.array([-3.0, 0.5, 100.0])), [-11.0, 4.0, 4.0])


@pytest.mark.parametrize(
    "zeros", [pytest.param(0.0, id="no ends"), pytest.param(0.2, id="some ends"), pytest.param(0.9, id="mostly ends")]
)
def test_linear_recurrence_equals_a_loop_at_every_length(zeros):
    rng = np.random.default_rng(0)
    for n in range(1, 71):
        x, a = rng.normal(size=n), rng.normal(size=n) * (rng.uniform(size=n) >= zeros)
        expected = list(x)
        for t in reversed(range(n - 1)):
            expected[t] += a[t] * expected[t + 1]
        np.testing.assert_allclose(A.linear_recurrence(x, a), expected, rtol=1e-9, atol=1e-9, err_msg=f"length {n}")


def test_linear_recurrence_with_coefficients_one_is_a_suffix_sum_and_with_zero_the_input():
    x = np.arange(1.0, 38.0)
    np.testing.assert_array_equal(A.linear_recurrence(x, np.ones(37)), np.cumsum(x[::-1])[::-1])
    np.testing.assert_array_equal(A.linear_recurrence(x, np.zeros(37)), x)


def test_linear_recurrence_leaves_its_arguments_as_they_were_and_works_in_double_precision():
    x, a = np.full(5, 0.1, dtype=np.float32), np.full(5, 0.5)
    y = A.linear_recurrence(x, a)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(x, np.full(5, 0.1, dtype=np.float32))
    np.testing.assert_array_equal(a, np.full(5, 0.5))


def test_linear_recurrence_of_nothing_is_nothing():
    assert A.linear_recurrence(np.empty(0), np.empty(0)).shape == (0,)


def test_steps_and_continuations_count_within_each_trajectory():
    lengths = np.array([3, 1, 2])
    np.testing.assert_array_equal(A.steps_within_trajectories(lengths), [0, 1, 2, 0, 0, 1])
    np.testing.assert_array_equal(A.same_trajectory_continues(lengths), [1, 1, 0, 0, 1, 0])


def test_sum_by_label_is_as_worked_out_by_hand():
    # label 0: 1 - 8 = -7; label 1: 2; label 2: 4 + 16 = 20
    np.testing.assert_array_equal(A.sum_by_label(np.array([1.0, 2, 4, -8, 16]), np.array([0, 1, 2, 0, 2])), [-7, 2, 20])


def test_labels_by_appearance_are_as_worked_out_by_hand():
    # 7 appears first, then -3, then 9
    np.testing.assert_array_equal(A.label_by_appearance(np.array([7, -3, 7, 9, -3, 9])), [0, 1, 0, 2, 1, 2])


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_by_appearance_equal_a_loop_and_stay_as_they_are_the_second_time(seed):
    values = np.random.default_rng(seed).integers(-20, 20, size=60)
    seen = []
    for value in values:
        if value not in seen:
            seen.append(value)
    labels = A.label_by_appearance(values)
    np.testing.assert_array_equal(labels, [seen.index(value) for value in values])
    np.testing.assert_array_equal(A.label_by_appearance(labels), labels)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([42], [0], id="one value"),
        pytest.param([5, 5, 5], [0, 0, 0], id="all alike"),
        pytest.param([3, 2, 1], [0, 1, 2], id="all different"),
        pytest.param([], [], id="none"),
    ],
)
def test_labels_by_appearance_of_few_values_are_integers_from_zero_on(values, expected):
    labels = A.label_by_appearance(np.array(values, dtype=np.int64))
    assert np.issubdtype(labels.dtype, np.integer)
    np.testing.assert_array_equal(labels, expected)


# --- minibatches of whole trajectories --------------------------------------------------------------------------------


def deal(trajectories: np.ndarray, order: np.ndarray, batch_size: int) -> list[list[int]]:
    return [batch.tolist() for batch in A.deal_trajectories(trajectories, order, batch_size)]


def loop_deal(trajectories: np.ndarray, order: np.ndarray, batch_size: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for trajectory in order:
        if len(batches[-1]) >= batch_size:
            batches.append([])
        batches[-1] += [t for t, its_own in enumerate(trajectories) if its_own == trajectory]
    return batches


def draw_interleaved(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The trajectory of each transition, in no order, and an order of the trajectories."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=12)
    return rng.permutation(np.repeat(np.arange(12), lengths)), rng.permutation(12)


def test_trajectories_are_dealt_as_worked_out_by_hand():
    # transitions of trajectory 0: 0 and 3; of 1: 1 and 2; of 2: 4, 5 and 6; of 3: 7
    # trajectory 2 has 3 < 4, with trajectory 0 there are 5; trajectory 3 has 1 < 4, with trajectory 1 there are 3, the rest
    trajectories, order = np.array([0, 1, 1, 0, 2, 2, 2, 3]), np.array([2, 0, 3, 1])
    assert deal(trajectories, order, 4) == [[4, 5, 6, 0, 3], [7, 1, 2]]
    # exactly 3 are enough, and the rest is enough too
    assert deal(trajectories, order, 3) == [[4, 5, 6], [0, 3, 7], [1, 2]]
    assert deal(trajectories, order, 1) == [[4, 5, 6], [0, 3], [7], [1, 2]]


@pytest.mark.parametrize("seed", SEEDS)
def test_dealing_trajectories_equals_a_loop_at_every_batch_size(seed):
    trajectories, order = draw_interleaved(seed)
    for batch_size in range(1, len(trajectories) + 3):
        expected = loop_deal(trajectories, order, batch_size)
        assert deal(trajectories, order, batch_size) == expected, f"batch_size {batch_size}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("batch_size", [1, 7, 16, 1000])
def test_every_transition_is_dealt_once_with_its_trajectory_and_no_trajectory_more_than_enough(seed, batch_size):
    trajectories, order = draw_interleaved(seed)
    batches = A.deal_trajectories(trajectories, order, batch_size)
    assert sorted(np.concatenate(batches)) == list(range(len(trajectories)))
    dealt = [set(trajectories[batch]) for batch in batches]
    assert all(dealt) and sum(map(len, dealt)) == len(set(trajectories))
    assert all(len(batch) >= batch_size for batch in batches[:-1])
    without_the_last = [batch[trajectories[batch] != trajectories[batch[-1]]] for batch in batches]
    assert all(len(batch) < batch_size for batch in without_the_last)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 10, 11, 100])
def test_dealing_trajectories_of_one_step_is_splitting_the_permutation(batch_size):
    order = np.random.default_rng(0).permutation(10)
    expected = [batch.tolist() for batch in th.as_tensor(order).split(batch_size)]
    assert deal(np.arange(10), order, batch_size) == expected


@pytest.mark.parametrize("batch_size", [1, 4, 5, 6])
def test_one_trajectory_is_one_minibatch_however_long(batch_size):
    assert deal(np.zeros(5, dtype=np.int64), np.array([0]), batch_size) == [[0, 1, 2, 3, 4]]


# --- discounted returns -----------------------------------------------------------------------------------------------


def test_discounted_returns_are_as_worked_out_by_hand():
    # gamma 0.5, rewards [1, 4, 8] and [2]: 8; 4 + 0.5 * 8 = 8; 1 + 0.5 * 8 = 5; the second adds nothing to the first
    np.testing.assert_array_equal(A.discounted_returns(np.array([1, 4, 8, 2]), np.array([3, 1]), 0.5), [5, 8, 8, 2])


def test_discounted_returns_without_discount_are_suffix_sums_and_with_gamma_zero_the_rewards():
    rewards, lengths = np.array([1.0, 4.0, 8.0, 2.0, 3.0]), np.array([3, 2])
    np.testing.assert_array_equal(A.discounted_returns(rewards, lengths, 1.0), [13, 12, 8, 5, 3])
    np.testing.assert_array_equal(A.discounted_returns(rewards, lengths, 0.0), rewards)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0])
def test_discounted_returns_equal_a_loop(seed, gamma):
    rewards, lengths, _ = draw_rollout(seed)
    expected = flat([loop_returns(trajectory, gamma) for trajectory in by_trajectory(rewards, lengths)])
    np.testing.assert_allclose(A.discounted_returns(rewards, lengths, gamma), expected, rtol=1e-12, atol=1e-12)


# --- generalized advantages -------------------------------------------------------------------------------------------


def test_generalized_advantages_are_as_worked_out_by_hand():
    # gamma 0.5, lambda 0.5, b = [2, 4], then b(s_last) = 8 where the rollout cut:
    # delta_0 = 1 + 0.5 * 4 - 2 = 1; delta_1 = 3 + 0.5 * 8 - 4 = 3; A_1 = 3; A_0 = 1 + 0.25 * 3 = 1.75
    # a trajectory of one step that terminated: delta = 7 + 0 - 5 = 2
    advantages = A.generalized_advantages(
        rewards=np.array([1.0, 3.0, 7.0]),
        baseline=np.array([2.0, 4.0, 5.0]),
        next_baseline=np.array([4.0, 8.0, 0.0]),
        continues=np.array([1.0, 0.0, 0.0]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    np.testing.assert_array_equal(advantages, [1.75, 3.0, 2.0])


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_generalized_advantages_with_lambda_one_and_no_baseline_are_returns_to_go(gamma):
    rewards, lengths, _ = draw_rollout(0)
    zeros = np.zeros_like(rewards)
    advantages = A.generalized_advantages(rewards, zeros, zeros, A.same_trajectory_continues(lengths), gamma, 1.0)
    expected = flat([loop_returns(trajectory, gamma) for trajectory in by_trajectory(rewards, lengths)])
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)


def test_generalized_advantages_with_lambda_one_are_returns_less_the_baseline_whatever_the_baseline_in_between():
    rewards, lengths, _ = draw_rollout(1)
    continues = A.same_trajectory_continues(lengths)
    baseline = np.random.default_rng(2).normal(size=len(rewards))
    next_baseline = np.append(baseline[1:], 0.0) * continues
    advantages = A.generalized_advantages(rewards, baseline, next_baseline, continues, GAMMA, 1.0)
    np.testing.assert_allclose(advantages, A.discounted_returns(rewards, lengths, GAMMA) - baseline, rtol=1e-12, atol=1e-12)


def test_generalized_advantages_with_lambda_zero_are_the_errors_of_one_step():
    rng = np.random.default_rng(0)
    rewards, baseline, next_baseline = rng.normal(size=(3, 20))
    advantages = A.generalized_advantages(rewards, baseline, next_baseline, np.ones(20), 0.9, 0.0)
    np.testing.assert_allclose(advantages, rewards + 0.9 * next_baseline - baseline, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_generalized_advantages_equal_those_of_sb3(seed, n_envs):
    rng = np.random.default_rng(seed)
    n_steps, gamma, gae_lambda = 37, 0.97, 0.9
    buffer = RolloutBuffer(
        n_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs
    )
    rewards, values = rng.normal(size=(2, n_steps, n_envs))
    dones = rng.uniform(size=(n_steps, n_envs)) < 0.15
    last_values = rng.normal(size=n_envs)
    starts = np.vstack([np.ones((1, n_envs)), dones[:-1]])
    for t in range(n_steps):
        value, action = th.as_tensor(values[t]), np.zeros((n_envs, 1))
        buffer.add(np.zeros((n_envs, 1)), action, rewards[t], starts[t], value, th.zeros(n_envs))
    buffer.compute_returns_and_advantage(th.as_tensor(last_values), dones[-1])

    next_values = np.vstack([values[1:], last_values]) * ~dones
    continues = 1.0 - dones
    continues[-1] = 0.0
    advantages = A.generalized_advantages(
        *(array.T.ravel() for array in (rewards, values, next_values, continues)), gamma, gae_lambda
    )
    np.testing.assert_allclose(advantages, buffer.advantages.T.ravel(), rtol=1e-4, atol=1e-5)


# --- centring and scaling ---------------------------------------------------------------------------------------------


def test_centre_within_is_as_worked_out_by_hand():
    # label 0: (1 + 2 + 6) / 3 = 3; label 1: (10 + 20) / 2 = 15; label 2 has a single value
    values, labels = np.array([1.0, 10.0, 2.0, 20.0, 6.0, 42.0]), np.array([0, 1, 0, 1, 0, 2])
    np.testing.assert_array_equal(A.centre_within(values, labels), [-2, -5, -1, 5, 3, 0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_centre_within_equals_a_loop(seed, magnitude):
    values, _, labels = draw_rollout(seed)
    values = magnitude * values[: len(labels)]
    expected = flat(loop_centre([[value] for value in values], labels))
    np.testing.assert_allclose(A.centre_within(values, labels), expected, rtol=1e-9, atol=1e-12 * magnitude)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_centre_within_gives_exactly_zero_for_values_that_are_tied(magnitude):
    # Three equal values of 0.1 have a mean that is not 0.1
    values, labels = magnitude * np.array([0.1, 0.1, 0.7, 0.1]), np.array([0, 0, 1, 0])
    np.testing.assert_array_equal(A.centre_within(values, labels), np.zeros(4))


def test_a_large_common_offset_takes_no_precision_from_the_differences():
    # 1e8 + (0 + 1 + 3) / 3 is not a double, so that subtracting the mean itself would be off in the ninth digit
    centred = A.centre_within(1e8 + np.array([0.0, 1.0, 3.0]), np.array([0, 0, 0]))
    np.testing.assert_allclose(centred, [-4 / 3, -1 / 3, 5 / 3], rtol=1e-14)


def in_another_order(magnitude: float) -> np.ndarray:
    """Two sums of the same three rewards that differ by their rounding."""
    sums = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]) * magnitude
    assert sums[0] != sums[1]
    return sums


@pytest.mark.parametrize("sign", [pytest.param(1.0, id="gain"), pytest.param(-1.0, id="cost")])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_sums_taken_in_another_order_are_tied(magnitude, sign):
    np.testing.assert_array_equal(A.centre_within(sign * in_another_order(magnitude), np.array([0, 0])), [0.0, 0.0])


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_a_difference_in_the_sixth_digit_is_no_tie(magnitude):
    centred = A.centre_within(magnitude * np.array([1.000001, 1.000003]), np.array([0, 0]))
    np.testing.assert_allclose(centred, magnitude * np.array([-1e-6, 1e-6]), rtol=1e-6)


def test_rounding_is_not_blown_up_as_it_is_by_the_naive_formula():
    # A power of two scales without rounding
    rewards = 2.0**40 * np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    sums = np.array([sum(rewards[:3]), sum(rewards[3:])])
    naive = (sums - sums.mean()) / (sums.std() + 1e-8)
    assert np.abs(naive).max() > 0.9
    np.testing.assert_array_equal(A.outcome_advantages(rewards, np.array([3, 3]), np.array([0, 0])), np.zeros(6))


def test_rounding_in_single_precision_is_not_blown_up_as_it_is_by_the_naive_formula():
    rewards = np.array([0.1, 0.2, 0.3, 0.7, 0.7, 0.3, 0.2, 0.1], dtype=np.float32) * np.float32(3)
    sums = np.array([sum(rewards[:4], np.float32(0)), sum(rewards[4:], np.float32(0))], dtype=np.float32)
    naive = (sums - sums.mean()) / (sums.std() + np.float32(1e-8))
    assert np.abs(naive).max() > 0.7
    np.testing.assert_array_equal(A.outcome_advantages(rewards, np.array([4, 4]), np.array([0, 0])), np.zeros(8))


def test_leave_one_out_factor_is_as_worked_out_by_hand():
    # three values: 3 / 2; two: 2 / 1; one has no others
    np.testing.assert_array_equal(A.leave_one_out_factor(np.array([0, 1, 0, 2, 0, 1])), [1.5, 2, 1.5, 0, 1.5, 2])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # label 0: sqrt((9 + 0 + 9) / 3) = sqrt(6) = 2.449490, 3 / 2.449490 = 1.224745; label 1: sqrt((1 + 1) / 2) = 1
        pytest.param("group", [-1.224745, -1.0, 0.0, 1.0, 1.224745], id="group"),
        # sqrt((9 + 1 + 0 + 1 + 9) / 5) = sqrt(4) = 2
        pytest.param("batch", [-1.5, -0.5, 0.0, 0.5, 1.5], id="batch"),
        pytest.param("none", [-3.0, -1.0, 0.0, 1.0, 3.0], id="none"),
    ],
)
def test_rescale_is_as_worked_out_by_hand(scale, expected):
    rescaled = A.rescale(np.array([-3.0, -1.0, 0.0, 1.0, 3.0]), np.array([0, 1, 0, 1, 0]), scale)
    np.testing.assert_allclose(rescaled, expected, atol=1e-6)


# --- advantages within groups: literals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "leave_one_out", "expected"),
    [
        # group 0: R = 1 + 2 = 3, 5, 0.5 + 0.5 = 1, mean 3, differences 0, 2, -2; group 1: R = 10, 14, mean 12, -2, 2
        pytest.param("none", False, [0, -2, 2, 2, -2], id="none"),
        # group 0: sqrt((0 + 4 + 4) / 3) = 1.632993, 2 / 1.632993 = 1.224745; group 1: sqrt((4 + 4) / 2) = 2
        pytest.param("group", False, [0, -1, 1.224745, 1, -1.224745], id="group"),
        # sqrt((0 + 4 + 4 + 4 + 4) / 5) = 1.788854, 2 / 1.788854 = 1.118034
        pytest.param("batch", False, [0, -1.118034, 1.118034, 1.118034, -1.118034], id="batch"),
        # 3 - (5 + 1) / 2 = 0; 10 - 14 = -4; 5 - (3 + 1) / 2 = 3; 14 - 10 = 4; 1 - (3 + 5) / 2 = -3
        pytest.param("none", True, [0, -4, 3, 4, -3], id="none leave-one-out"),
        # the same over 1.632993 in group 0 and over 2 in group 1
        pytest.param("group", True, [0, -2, 1.837117, 2, -1.837117], id="group leave-one-out"),
        # the same over 1.788854
        pytest.param("batch", True, [0, -2.236068, 1.677051, 2.236068, -1.677051], id="batch leave-one-out"),
    ],
)
def test_outcome_advantages_are_as_worked_out_by_hand(scale, leave_one_out, expected):
    lengths, groups = np.array([2, 1, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
    advantages = A.outcome_advantages(np.array([1, 2, 10, 5, 14, 0.5, 0.5]), lengths, groups, scale, leave_one_out)
    np.testing.assert_allclose(advantages, np.repeat(expected, lengths), atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # group 0: rewards [1, 5] and [0], mean 2, differences [-1, 3] and [-2], sums from each step on [2, 3] and [-2]
        # group 1: rewards [4] and [6], mean 5, differences [-1] and [1]
        pytest.param("none", [2, 3, -1, -2, 1], id="none"),
        # group 0: sqrt((1 + 9 + 4) / 3) = 2.160247: 2 / 2.160247 = 0.925820, 3 / 2.160247 = 1.388730; group 1: 1
        pytest.param("group", [0.925820, 1.388730, -1, -0.925820, 1], id="group"),
        # sqrt((1 + 9 + 4 + 1 + 1) / 5) = 1.788854: 2 / 1.788854 = 1.118034, 3 / ... = 1.677051, 1 / ... = 0.559017
        pytest.param("batch", [1.118034, 1.677051, -0.559017, -1.118034, 0.559017], id="batch"),
    ],
)
def test_process_advantages_are_as_worked_out_by_hand(scale, expected):
    lengths, groups = np.array([2, 1, 1, 1]), np.array([0, 1, 0, 1])
    advantages = A.process_advantages(np.array([1.0, 5.0, 4.0, 0.0, 6.0]), lengths, groups, scale)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # gamma 0.5, group 0: rewards [1, 4] and [2], G = [1 + 2, 4] and [2], mean 3, differences [0, 1] and [-1]
        # group 1: rewards [2, 2] and [6, 2], G = [2 + 1, 2] and [6 + 1, 2], mean 3.5, [-0.5, -1.5] and [3.5, -1.5]
        pytest.param("none", [0, 1, -0.5, -1.5, -1, 3.5, -1.5], id="none"),
        # group 0: sqrt(2 / 3) = 0.816497, 1 / 0.816497 = 1.224745
        # group 1: sqrt((0.25 + 2.25 + 12.25 + 2.25) / 4) = sqrt(4.25) = 2.061553
        pytest.param("group", [0, 1.224745, -0.242536, -0.727607, -1.224745, 1.697749, -0.727607], id="group"),
        # sqrt((2 + 17) / 7) = 1.647509
        pytest.param("batch", [0, 0.606977, -0.303488, -0.910465, -0.606977, 2.124419, -0.910465], id="batch"),
    ],
)
def test_return_to_go_advantages_are_as_worked_out_by_hand(scale, expected):
    lengths, groups = np.array([2, 2, 1, 2]), np.array([0, 1, 0, 1])
    advantages = A.return_to_go_advantages(np.array([1.0, 4, 2, 2, 2, 6, 2]), lengths, groups, 0.5, scale)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


STEPWISE_LENGTHS, STEPWISE_GROUPS = np.array([3, 1, 2, 1]), np.array([0, 1, 0, 0])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # gamma 0.5, group 0: rewards [1, 4, 8], [2, 2], [1], G = [5, 8, 8], [3, 2], [1]; group 1 is a single [7]
        # step 0: 5 - (3 + 1) / 2 = 3, 3 - (5 + 1) / 2 = 0, 1 - (5 + 3) / 2 = -3; step 1: 8 - 2 = 6, 2 - 8 = -6; step 2: alone
        pytest.param("none", [3, 6, 0, 0, 0, -6, -3], id="none"),
        # sqrt((9 + 36 + 0 + 0 + 36 + 9) / 6) = sqrt(15) = 3.872983
        pytest.param("group", [0.774597, 1.549193, 0, 0, 0, -1.549193, -0.774597], id="group"),
        # sqrt((9 + 36 + 0 + 0 + 0 + 36 + 9) / 7) = 3.585686
        pytest.param("batch", [0.836660, 1.673320, 0, 0, 0, -1.673320, -0.836660], id="batch"),
    ],
)
def test_stepwise_advantages_are_as_worked_out_by_hand(scale, expected):
    rewards = np.array([1.0, 4, 8, 7, 2, 2, 1])
    advantages = A.stepwise_advantages(rewards, STEPWISE_LENGTHS, STEPWISE_GROUPS, 0.5, scale)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_steps_without_a_peer_are_counted():
    # the last step of the longest trajectory, and the only step of the only member of group 1
    assert A.count_steps_without_peer(STEPWISE_LENGTHS, STEPWISE_GROUPS) == 2
    assert A.count_steps_without_peer(np.array([2, 2]), np.array([0, 0])) == 0
    assert A.count_steps_without_peer(np.array([2, 2]), np.array([0, 1])) == 4


def test_peers_are_at_the_same_step_of_the_same_group():
    labels = A.peers_at_each_step(STEPWISE_LENGTHS, STEPWISE_GROUPS)
    # group 0 has steps 0, 1, 2 and group 1 has step 0
    np.testing.assert_array_equal(labels, [0, 1, 2, 3, 0, 1, 0])


# --- advantages within groups: what holds for all of them -------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("formula", "loop"), FORMULAS_AND_LOOPS)
def test_advantages_equal_a_loop(formula: Advantages, loop, scale, seed):
    rollout = draw_rollout(seed)
    np.testing.assert_allclose(formula(*rollout, scale), loop(*rollout, scale), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_permuting_the_members_permutes_their_advantages(formula: Advantages, scale):
    rewards, lengths, groups = draw_rollout(0)
    order = np.random.default_rng(1).permutation(len(lengths))
    parts = by_trajectory(rewards, lengths)
    advantages = by_trajectory(formula(rewards, lengths, groups, scale), lengths)
    permuted = formula(np.array(flat([parts[i] for i in order])), lengths[order], groups[order], scale)
    np.testing.assert_allclose(permuted, flat([advantages[i] for i in order]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_groups_of_one_member_and_one_step_get_exactly_zero(formula: Advantages, scale):
    advantages = formula(np.array([3.0, 7.0, -2.0]), np.array([1, 1, 1]), np.array([2, 0, 1]), scale)
    np.testing.assert_array_equal(advantages, np.zeros(3))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS_ACROSS_MEMBERS)
def test_a_trajectory_without_others_gets_exactly_zero_however_long(formula: Advantages, scale):
    rewards, lengths, groups = draw_rollout(0)
    alone = np.repeat(groups, lengths) == 3
    assert lengths[groups == 3] > 1
    np.testing.assert_array_equal(formula(rewards, lengths, groups, scale)[alone], 0.0)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_group_whose_members_are_tied_gets_exactly_zero_beside_one_that_is_not(formula: Advantages, scale, magnitude):
    # 0.1 per step: neither means nor sums of it are exact
    rewards = magnitude * np.array([0.1, 0.2, 0.1, 0.1, 0.1, 0.7])
    advantages = formula(rewards, np.ones(6, dtype=np.int64), np.array([0, 1, 0, 0, 0, 1]), scale)
    np.testing.assert_array_equal(advantages[[0, 2, 3, 4]], np.zeros(4))
    assert (advantages[[1, 5]] * [-1, 1] > 0).all()


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_advantages_are_finite_at_any_magnitude(formula: Advantages, scale, magnitude):
    rewards, lengths, groups = draw_rollout(0)
    assert np.isfinite(formula(magnitude * rewards, lengths, groups, scale)).all()


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_scaled_advantages_do_not_depend_on_the_unit_of_the_reward(formula: Advantages, scale):
    rewards, lengths, groups = draw_rollout(0)
    in_another_unit = formula(1000.0 * rewards, lengths, groups, scale)
    np.testing.assert_allclose(in_another_unit, formula(rewards, lengths, groups, scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_unscaled_advantages_have_the_unit_of_the_reward(formula: Advantages):
    rewards, lengths, groups = draw_rollout(0)
    in_another_unit = formula(1000.0 * rewards, lengths, groups, "none")
    np.testing.assert_allclose(in_another_unit, 1000.0 * formula(rewards, lengths, groups, "none"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "formula", [pytest.param(A.outcome_advantages, id="outcome"), pytest.param(rloo_advantages, id="leave-one-out")]
)
def test_outcome_advantages_ignore_what_all_members_of_a_group_gained(formula: Advantages, scale):
    rewards, lengths, groups = draw_rollout(0)
    shifted = rewards.copy()
    shifted[np.cumsum(lengths) - 1] += np.array([5.0, -3.0, 100.0, 7.0])[groups]
    expected = formula(rewards, lengths, groups, scale)
    np.testing.assert_allclose(formula(shifted, lengths, groups, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_process_advantages_ignore_what_every_step_of_a_group_gained(scale):
    rewards, lengths, groups = draw_rollout(0)
    shifted = rewards + np.repeat(np.array([5.0, -3.0, 100.0, 7.0])[groups], lengths)
    expected = A.process_advantages(rewards, lengths, groups, scale)
    np.testing.assert_allclose(A.process_advantages(shifted, lengths, groups, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", [A.return_to_go_advantages, A.stepwise_advantages], ids=["return_to_go", "stepwise"])
def test_undiscounted_returns_to_go_are_compared_without_what_all_members_of_a_group_gained_at_the_end(formula, scale):
    rewards, lengths, groups = draw_rollout(0)
    shifted = rewards.copy()
    shifted[np.cumsum(lengths) - 1] += np.array([5.0, -3.0, 100.0, 7.0])[groups]
    expected = formula(rewards, lengths, groups, 1.0, scale)
    np.testing.assert_allclose(formula(shifted, lengths, groups, 1.0, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_another_group_has_no_influence(formula: Advantages, scale):
    rewards, lengths, groups = draw_rollout(0)
    other = np.repeat(groups, lengths) == 1
    changed = np.where(other, -10.0 * rewards + 3.0, rewards)
    before, after = formula(rewards, lengths, groups, scale), formula(changed, lengths, groups, scale)
    np.testing.assert_array_equal(before[~other], after[~other])
    assert not np.allclose(before[other], after[other])


@pytest.mark.parametrize("formula", FORMULAS)
def test_another_group_changes_the_unit_alone_where_the_scale_is_that_of_the_batch(formula: Advantages):
    rewards, lengths, groups = draw_rollout(0)
    step_groups = np.repeat(groups, lengths)
    changed = np.where(step_groups == 1, -10.0 * rewards + 3.0, rewards)
    before, after = formula(rewards, lengths, groups, "batch"), formula(changed, lengths, groups, "batch")
    compared = (step_groups != 1) & (np.abs(before) > 1e-9)
    ratio = after[compared] / before[compared]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
    assert ratio[0] < 0.9


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_outcome_scores_have_zero_mean_and_unit_deviation_within_what_they_are_scaled_by(scale):
    rewards, lengths, groups = np.random.default_rng(0).normal(size=12), np.ones(12, dtype=np.int64), np.arange(12) % 3
    advantages = A.outcome_advantages(rewards, lengths, groups, scale)
    parts = {"group": [advantages[groups == g] for g in range(3)], "batch": [advantages]}[scale]
    np.testing.assert_allclose([part.mean() for part in parts], 0.0, atol=1e-12)
    np.testing.assert_allclose([part.std() for part in parts], 1.0, rtol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_is_the_plain_difference_times_k_over_k_less_one(seed):
    rewards, lengths, groups = draw_rollout(seed)
    factor = np.repeat(np.array([5 / 4, 3 / 2, 2 / 1, 0.0])[groups], lengths)
    expected = factor * A.outcome_advantages(rewards, lengths, groups, "none")
    np.testing.assert_allclose(rloo_advantages(rewards, lengths, groups, "none"), expected, rtol=1e-12)


def test_process_advantages_teach_nothing_from_a_constant_reward_but_do_from_a_varying_one():
    lengths, groups = np.array([4, 9, 2]), np.array([0, 0, 0])
    np.testing.assert_array_equal(A.process_advantages(np.full(15, 0.1), lengths, groups), np.zeros(15))
    # ... while the sum of that reward does tell the members apart
    assert (A.outcome_advantages(np.full(15, 0.1), lengths, groups) != 0).all()
    varying = np.full(15, 0.1)
    varying[-1] = 1.0
    assert (A.process_advantages(varying, lengths, groups) != 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_process_advantages_telescope_to_normalised_rewards(scale):
    rewards, lengths, groups = draw_rollout(0)
    advantages = A.process_advantages(rewards, lengths, groups, scale)
    increments = advantages - np.append(advantages[1:], 0.0) * A.same_trajectory_continues(lengths)
    # A one-step trajectory's advantage is its normalised reward
    singly = A.process_advantages(rewards, np.ones_like(rewards, dtype=np.int64), np.repeat(groups, lengths), scale)
    np.testing.assert_allclose(increments, singly, rtol=1e-9, atol=1e-9)


def test_all_unscaled_formulas_agree_on_members_of_one_step():
    rewards, lengths, groups = np.array([1.0, 5.0, 3.0, 8.0]), np.ones(4, dtype=np.int64), np.array([0, 0, 0, 0])
    # mean 17 / 4 = 4.25
    plain = [-3.25, 0.75, -1.25, 3.75]
    np.testing.assert_array_equal(A.outcome_advantages(rewards, lengths, groups, "none"), plain)
    np.testing.assert_array_equal(A.process_advantages(rewards, lengths, groups, "none"), plain)
    np.testing.assert_array_equal(return_to_go_advantages(rewards, lengths, groups, "none"), plain)
    np.testing.assert_allclose(stepwise_advantages(rewards, lengths, groups, "none"), 4 / 3 * np.array(plain), rtol=1e-12)
    np.testing.assert_allclose(rloo_advantages(rewards, lengths, groups, "none"), 4 / 3 * np.array(plain), rtol=1e-12)


def test_two_members_get_opposite_stepwise_advantages_where_both_run_and_none_after():
    rng = np.random.default_rng(0)
    rewards, lengths = rng.normal(size=8), np.array([5, 3])
    longer, shorter = (np.array(loop_returns(part, GAMMA)) for part in by_trajectory(rewards, lengths))
    advantages = stepwise_advantages(rewards, lengths, np.array([0, 0]), "none")
    difference = longer[:3] - shorter
    np.testing.assert_allclose(advantages, [*difference, 0.0, 0.0, *-difference], rtol=1e-12)


# --- the whole update -------------------------------------------------------------------------------------------------


def test_whitened_advantages_are_as_worked_out_by_hand():
    # mean 3, differences -2, -1, 3, deviation sqrt((4 + 1 + 9) / 3) = 2.160247
    np.testing.assert_allclose(A.whiten(np.array([1.0, 2.0, 6.0])), [-0.925820, -0.462910, 1.388730], atol=1e-6)


def test_whitening_gives_zero_mean_and_unit_deviation_and_changes_nothing_the_second_time():
    whitened = A.whiten(100.0 + 7.0 * np.random.default_rng(0).normal(size=1000))
    assert whitened.mean() == pytest.approx(0.0, abs=1e-12)
    assert whitened.std() == pytest.approx(1.0, rel=1e-6)
    np.testing.assert_allclose(A.whiten(whitened), whitened, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "advantages",
    [
        pytest.param(np.zeros(4), id="zeros"),
        pytest.param(np.full(7, 0.1), id="equal"),
        pytest.param(in_another_order(1e12), id="rounding"),
        pytest.param(np.array([3.0]), id="one"),
        pytest.param(np.empty(0), id="none"),
    ],
)
def test_whitening_advantages_that_are_all_equal_gives_exactly_zero(advantages):
    np.testing.assert_array_equal(A.whiten(advantages), np.zeros(len(advantages)))


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        # targets 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
        pytest.param([1.0, 2.0, 3.0, 6.0], 1.0, id="perfect"),
        pytest.param([9.0, 9.0, 9.0, 9.0], 0.0, id="constant"),
        pytest.param([2.0, 3.0, 4.0, 7.0], 1.0, id="perfect but for a constant"),
        # residuals 2, 4, 6, 12, twice the targets, variance 4 * 3.5
        pytest.param([-1.0, -2.0, -3.0, -6.0], -3.0, id="wrong sign"),
        # residuals 0, 0, 0, 4: mean 1, variance (1 + 1 + 1 + 9) / 4 = 3; 1 - 3 / 3.5 = 0.142857
        pytest.param([1.0, 2.0, 3.0, 2.0], 0.142857, id="partial"),
    ],
)
def test_explained_variance_is_as_worked_out_by_hand(predictions, expected):
    explained = A.explained_variance(np.array(predictions), np.array([1.0, 2.0, 3.0, 6.0]))
    assert explained == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(np.zeros(3), id="zeros"),
        # the mean of these is not 0.1, so that their computed variance is not zero
        pytest.param(np.full(7, 0.1), id="equal"),
        pytest.param(in_another_order(1.0), id="rounding"),
    ],
)
def test_explained_variance_of_targets_that_do_not_vary_is_undefined(targets):
    assert math.isnan(A.explained_variance(np.arange(float(len(targets))), targets))


# --- importance ratios ------------------------------------------------------------------------------------------------

CLIP = 0.2
IN_TWO = th.tensor([0, 1, 0])


def draw_trajectories(seed: int) -> tuple[np.ndarray, th.Tensor]:
    """Lengths of some trajectories, and the trajectory of each of their transitions, in no order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=30)
    return lengths, th.as_tensor(rng.permutation(np.repeat(np.arange(30), lengths)))


def test_levels_and_aggregations_are_those_of_the_types():
    assert set(losses.LOG_RATIOS) == set(get_args(losses.ImportanceSamplingLevel))
    assert set(losses.LOSS_WEIGHTS) == set(get_args(losses.LossAggregation))


@pytest.mark.parametrize("trajectories", [None, IN_TWO], ids=["without trajectories", "with trajectories"])
def test_log_ratio_of_a_step_is_its_own(trajectories):
    log_ratio = th.randn(3, requires_grad=True)
    assert losses.LOG_RATIOS["step"](log_ratio, trajectories) is log_ratio


def test_log_ratio_of_a_trajectory_is_the_mean_with_the_slope_of_each_step_as_worked_out_by_hand():
    log_ratio = th.tensor([1.0, 0.5, 2.0], dtype=th.float64, requires_grad=True)
    of_trajectory = losses.LOG_RATIOS["trajectory"](log_ratio, IN_TWO)
    # (1 + 2) / 2 = 1.5 for the first and the last, 0.5 for the one between
    assert of_trajectory.tolist() == [1.5, 0.5, 1.5]
    # Each entry has slope 1 in its own step and 0 in the others, not 1/2 in both steps of the trajectory
    weights = th.tensor([1.0, 10.0, 100.0], dtype=th.float64)
    assert th.autograd.grad((weights * of_trajectory).sum(), log_ratio)[0].tolist() == [1.0, 10.0, 100.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_log_ratio_of_trajectories_equals_a_loop(seed):
    _, trajectories = draw_trajectories(seed)
    log_ratio = th.randn(len(trajectories), dtype=th.float64)
    expected = [
        statistics.fmean([d.item() for d, its_own in zip(log_ratio, trajectories, strict=True) if its_own == trajectory])
        for trajectory in trajectories
    ]
    th.testing.assert_close(losses.trajectory_log_ratio(log_ratio, trajectories).tolist(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [th.float32, th.float64], ids=["single", "double"])
def test_loss_of_trajectories_of_one_step_is_that_of_steps_bit_for_bit(dtype):
    log_ratio, advantages = th.randn(100, dtype=dtype, requires_grad=True), th.randn(100, dtype=dtype)
    levels = [log_ratio, losses.trajectory_log_ratio(log_ratio, th.randperm(100))]
    per_level = [losses.clipped_surrogate(level, advantages, CLIP).loss for level in levels]
    gradients = [th.autograd.grad(loss.sum(), log_ratio)[0] for loss in per_level]
    assert levels[1].dtype == dtype
    assert th.equal(*levels) and th.equal(*per_level) and th.equal(*gradients)


def test_log_ratio_of_one_trajectory_is_the_same_for_all_of_its_steps_and_of_none_there_is_none():
    log_ratio = losses.trajectory_log_ratio(th.tensor([0.5, 1.0, 3.0]), th.zeros(3, dtype=th.int64))
    assert log_ratio.tolist() == [1.5, 1.5, 1.5]
    # ... without rounding: 0.1 + (mean - 0.1) would not be the mean
    assert len(set(losses.trajectory_log_ratio(th.logspace(-3, 3, 50), th.zeros(50, dtype=th.int64)).tolist())) == 1
    assert losses.trajectory_log_ratio(th.empty(0), th.empty(0, dtype=th.int64)).shape == (0,)


def test_log_ratio_of_trajectories_cannot_do_without_them():
    with pytest.raises(AssertionError, match="whole trajectories"):
        losses.trajectory_log_ratio(th.zeros(3), None)


def loop_gspo(
    log_ratio: th.Tensor, trajectories: th.Tensor, advantages: th.Tensor, clip_range: float, clip_range_high: float
) -> th.Tensor:
    """``-1/m sum_i min(s_i A_i, clip(s_i) A_i)``: GSPO, https://arxiv.org/abs/2507.18071, equations 5 to 7."""
    objective = th.zeros((), dtype=log_ratio.dtype)
    for i, advantage in enumerate(advantages):
        ratio = th.exp(log_ratio[trajectories == i].mean())
        clipped = th.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range_high)
        objective = objective + th.min(ratio * advantage, clipped * advantage)
    return -objective / len(advantages)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip_range_high", [pytest.param(CLIP, id="symmetric"), pytest.param(0.4, id="clip higher")])
def test_outcome_advantages_aggregated_by_trajectory_at_the_level_of_trajectories_are_gspo(seed, clip_range_high):
    lengths, trajectories = draw_trajectories(seed)
    log_ratio = (0.5 * th.randn(len(trajectories), dtype=th.float64)).requires_grad_()
    advantages = th.randn(len(lengths), dtype=th.float64)
    weights = th.as_tensor(losses.trajectory_loss_weights(lengths, 0))[trajectories]

    def loss_of(level: str) -> th.Tensor:
        ratios = losses.LOG_RATIOS[level](log_ratio, trajectories)
        surrogate = losses.clipped_surrogate(ratios, advantages[trajectories], CLIP, clip_range_high)
        return losses.weighted_mean(surrogate.loss, weights)

    expected = loop_gspo(log_ratio, trajectories, advantages, CLIP, clip_range_high)
    gradient, expected_gradient, step_gradient = (
        th.autograd.grad(loss, log_ratio)[0] for loss in (loss_of("trajectory"), expected, loss_of("step"))
    )
    assert (expected_gradient == 0.0).any() and (expected_gradient != 0.0).any()
    th.testing.assert_close(loss_of("trajectory"), expected, rtol=1e-12, atol=1e-12)
    th.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert not th.allclose(step_gradient, expected_gradient, rtol=0.01)


# --- the clipped surrogate --------------------------------------------------------------------------------------------


def surrogate_of_ratio(
    ratio: float, advantage: float, clip_range_high: float | None = None, dual_clip: float | None = None
) -> tuple[float, float, float]:
    """The loss of one transition, its derivative by the ratio, and whether it counts as clipped."""
    log_prob = th.tensor([math.log(ratio)], dtype=th.float64, requires_grad=True)
    surrogate = losses.clipped_surrogate(log_prob, th.tensor([advantage], dtype=th.float64), CLIP, clip_range_high, dual_clip)
    surrogate.loss.sum().backward()
    assert log_prob.grad is not None
    clipped = losses.clip_fractions(surrogate.ratio, CLIP, clip_range_high)
    return surrogate.loss.item(), log_prob.grad.item() / ratio, float(sum(clipped))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # gain: -min(1.5 * 2, 1.2 * 2) = -2.4, flat
        pytest.param(1.5, 2.0, -2.4, 0.0, 1.0, id="good action, above: clipped"),
        # -min(0.5 * 2, 0.8 * 2) = -1.0, still pulled up
        pytest.param(0.5, 2.0, -1.0, -2.0, 1.0, id="good action, below: pulled back"),
        # -min(1.5 * -2, 1.2 * -2) = 3.0, still pushed down
        pytest.param(1.5, -2.0, 3.0, 2.0, 1.0, id="bad action, above: pulled back"),
        # -min(0.5 * -2, 0.8 * -2) = 1.6, flat
        pytest.param(0.5, -2.0, 1.6, 0.0, 1.0, id="bad action, below: clipped"),
        # -min(1.1 * 2, 1.1 * 2) = -2.2
        pytest.param(1.1, 2.0, -2.2, -2.0, 0.0, id="good action, inside"),
        pytest.param(0.9, -2.0, 1.8, 2.0, 0.0, id="bad action, inside"),
        pytest.param(1.5, 0.0, 0.0, 0.0, 1.0, id="indifferent action"),
    ],
)
def test_clipped_surrogate_and_its_slope_are_as_worked_out_by_hand(ratio, advantage, loss, slope, clipped):
    assert surrogate_of_ratio(ratio, advantage) == pytest.approx((loss, slope, clipped), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # -min(1.4 * 2, 1.4 * 2) = -2.8: 1.4 is above 1.2, but not above 1.5
        pytest.param(1.4, 2.0, -2.8, -2.0, 0.0, id="good action, above the lower range: not clipped"),
        # -min(1.6 * 2, 1.5 * 2) = -3.0, flat
        pytest.param(1.6, 2.0, -3.0, 0.0, 1.0, id="good action, above: clipped"),
        # -min(1.6 * -2, 1.5 * -2) = 3.2
        pytest.param(1.6, -2.0, 3.2, 2.0, 1.0, id="bad action, above: pulled back"),
        # -min(0.7 * -2, 0.8 * -2) = 1.6, flat: below, the range is the lower one
        pytest.param(0.7, -2.0, 1.6, 0.0, 1.0, id="bad action, below: clipped"),
        # -min(0.7 * 2, 0.8 * 2) = -1.4
        pytest.param(0.7, 2.0, -1.4, -2.0, 1.0, id="good action, below: pulled back"),
    ],
)
def test_clip_range_of_its_own_above_is_as_worked_out_by_hand(ratio, advantage, loss, slope, clipped):
    outcome = surrogate_of_ratio(ratio, advantage, clip_range_high=0.5)
    assert outcome == pytest.approx((loss, slope, clipped), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # -max(min(2.9 * -2, 1.2 * -2), 3 * -2) = 5.8: above 1.2, and still pulled back with full slope
        pytest.param(2.9, -2.0, 5.8, 2.0, id="bad action, above: pulled back"),
        # -max(min(4 * -2, 1.2 * -2), 3 * -2) = 6.0, flat
        pytest.param(4.0, -2.0, 6.0, 0.0, id="bad action, far above: given up"),
        pytest.param(1.1, -2.0, 2.2, 2.0, id="bad action, inside"),
        # -max(min(0.5 * -2, 0.8 * -2), 3 * -2) = 1.6, flat
        pytest.param(0.5, -2.0, 1.6, 0.0, id="bad action, below: clipped"),
        # as without: -min(4 * 2, 1.2 * 2) = -2.4 and -min(0.5 * 2, 0.8 * 2) = -1.0
        pytest.param(4.0, 2.0, -2.4, 0.0, id="good action, far above: clipped"),
        pytest.param(0.5, 2.0, -1.0, -2.0, id="good action, below: pulled back"),
        pytest.param(1.1, 2.0, -2.2, -2.0, id="good action, inside"),
        pytest.param(4.0, 0.0, 0.0, 0.0, id="indifferent action"),
    ],
)
def test_dual_clip_is_as_worked_out_by_hand(ratio, advantage, loss, slope):
    assert surrogate_of_ratio(ratio, advantage, dual_clip=3.0)[:2] == pytest.approx((loss, slope), abs=1e-12)


def test_dual_clip_and_a_clip_range_of_its_own_above_act_on_different_signs():
    # range 0.8 to 1.5, c_dual 2. Good: -min(1.9 * 2, 1.5 * 2) = -3.0. Bad: -max(min(1.9 * -2, 1.5 * -2), 2 * -2) = 3.8 and
    # -max(min(2.1 * -2, 1.5 * -2), 2 * -2) = 4.0
    assert surrogate_of_ratio(1.9, 2.0, 0.5, 2.0)[:2] == pytest.approx((-3.0, 0.0), abs=1e-12)
    assert surrogate_of_ratio(1.9, -2.0, 0.5, 2.0)[:2] == pytest.approx((3.8, 2.0), abs=1e-12)
    assert surrogate_of_ratio(2.1, -2.0, 0.5, 2.0)[:2] == pytest.approx((4.0, 0.0), abs=1e-12)
    # c_dual inside the range is the tighter bound: -max(1.4 * -2, 1.25 * -2) = 2.5
    assert surrogate_of_ratio(1.4, -2.0, 0.5, 1.25)[:2] == pytest.approx((2.5, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"clip_range_high": None, "dual_clip": None}, id="None"),
        pytest.param({"clip_range_high": CLIP}, id="the same range above"),
        # exp(MAX_LOG_RATIO) = 4.9e8
        pytest.param({"dual_clip": 1e9}, id="dual clip beyond any ratio"),
    ],
)
def test_options_of_the_surrogate_that_bound_nothing_more_change_nothing_bit_for_bit(options):
    spread = th.tensor([0.1, 1.0, 100.0]).repeat_interleave(1000)
    log_ratio, advantages = (spread * th.randn(3000)).requires_grad_(), th.randn(3000)
    advantages[::100] = 0.0
    plain, optional = (losses.clipped_surrogate(log_ratio, advantages, CLIP, **given) for given in ({}, options))
    assert th.equal(plain.loss, optional.loss) and th.equal(plain.ratio, optional.ratio)
    assert th.equal(*(th.autograd.grad(surrogate.loss.sum(), log_ratio)[0] for surrogate in (plain, optional)))


def test_dual_clip_bounds_the_loss_of_bad_actions_where_the_ratio_overflows():
    log_ratio, advantages = th.tensor([1000.0, 15.0, 1000.0], requires_grad=True), th.tensor([-2.0, -0.5, 2.0])
    loss = losses.clipped_surrogate(log_ratio, advantages, CLIP, dual_clip=3.0).loss
    # 3 * 2, 3 * 0.5 and -1.2 * 2
    th.testing.assert_close(loss, th.tensor([6.0, 1.5, -2.4]))
    assert th.autograd.grad(loss.sum(), log_ratio)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="plain"), pytest.param({"clip_range_high": 0.5, "dual_clip": 3.0}, id="clip higher and dual clip")],
)
@pytest.mark.parametrize("advantage", [2.5, -2.5, 0.0])
def test_clipped_surrogate_of_an_unchanged_policy_is_the_plain_policy_gradient(advantage, options):
    log_prob = th.tensor([-1.7], dtype=th.float64, requires_grad=True)
    advantages = th.tensor([advantage], dtype=th.float64)
    surrogate = losses.clipped_surrogate(log_prob - log_prob.detach(), advantages, CLIP, **options)
    surrogate.loss.sum().backward()
    assert surrogate.loss.item() == -advantage
    assert log_prob.grad is not None and log_prob.grad.item() == -advantage
    assert surrogate.ratio.item() == 1.0


def test_clipped_surrogate_and_its_gradient_equal_those_of_ppo():
    log_prob = th.randn(1000, dtype=th.float64, requires_grad=True)
    old_log_prob, advantages = th.randn(2, 1000, dtype=th.float64)
    loss, our_ratio, _ = losses.clipped_surrogate(log_prob - old_log_prob, advantages, CLIP)

    ratio = th.exp(log_prob - old_log_prob)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * th.clamp(ratio, 1 - CLIP, 1 + CLIP)
    ppo_loss = -th.min(policy_loss_1, policy_loss_2).mean()
    ppo_clip_fraction = th.mean((th.abs(ratio - 1) > CLIP).float()).item()
    assert loss.shape == our_ratio.shape == (1000,)
    assert loss.mean().item() == pytest.approx(ppo_loss.item(), rel=1e-12)
    assert float(sum(losses.clip_fractions(our_ratio, CLIP))) == pytest.approx(ppo_clip_fraction, rel=1e-6)
    gradients = [th.autograd.grad(value, log_prob)[0] for value in (loss.mean(), ppo_loss)]
    th.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="plain"), pytest.param({"clip_range_high": 0.5, "dual_clip": 3.0}, id="clip higher and dual clip")],
)
def test_the_slope_of_the_clipped_surrogate_is_what_autograd_finds(options):
    log_ratio = 2.0 * th.randn(2000, dtype=th.float64)
    log_ratio[:4] = th.tensor([30.0, -30.0, 0.0, losses.MAX_LOG_RATIO])
    log_ratio.requires_grad_()
    advantages = th.randn(2000, dtype=th.float64)
    advantages[:1] = -1.0
    surrogate = losses.clipped_surrogate(log_ratio, advantages, CLIP, **options)
    (expected,) = th.autograd.grad(surrogate.loss.sum(), log_ratio)
    th.testing.assert_close(surrogate.slope, expected)
    assert not surrogate.slope.requires_grad
    assert 0.1 < (surrogate.slope == 0).double().mean() < 0.9


@pytest.mark.parametrize("options", [{}, {"dual_clip": 3.0}], ids=["plain", "dual clip"])
def test_what_is_no_number_shows_in_the_slope(options):
    log_ratio, advantages = th.tensor([0.0, float("nan"), 0.0]), th.tensor([float("nan"), 1.0, 1.0])
    assert losses.clipped_surrogate(log_ratio, advantages, CLIP, **options).slope.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_clipped_surrogate_is_finite_where_the_ratio_overflows(log_ratio, advantage):
    log_prob = th.tensor([log_ratio], requires_grad=True)
    assert not th.exp(log_prob.abs()).isfinite()
    surrogate = losses.clipped_surrogate(log_prob, th.tensor([advantage]), CLIP)
    surrogate.loss.sum().backward()
    assert log_prob.grad is not None
    assert surrogate.loss.isfinite() and log_prob.grad.isfinite()
    assert float(sum(losses.clip_fractions(surrogate.ratio, CLIP))) == 1.0


# --- the mean over transitions ----------------------------------------------------------------------------------------


def test_weights_of_trajectories_are_as_worked_out_by_hand():
    # mean length (1 + 2 + 6) / 3 = 3: 3 / 1, 3 / 2, 3 / 6, and 3 / 12 where trajectories may have 12 steps
    lengths = np.array([1, 2, 6])
    np.testing.assert_array_equal(losses.trajectory_loss_weights(lengths, 12), [3.0, 1.5, 0.5])
    np.testing.assert_array_equal(losses.constant_loss_weights(lengths, 12), [0.25, 0.25, 0.25])
    assert losses.LOSS_WEIGHTS["step"] is None


def test_weighted_mean_is_as_worked_out_by_hand_and_not_divided_by_the_sum_of_weights():
    # (1 * 4 + 2 * 10 + 0 * 100) / 3 = 8; (2 * 1 + 2 * 3) / 2 = 4; (4 + 10 + 100) / 3 = 38
    values = th.tensor([4.0, 10.0, 100.0], requires_grad=True)
    weighted = losses.weighted_mean(values, th.tensor([1.0, 2.0, 0.0]))
    assert weighted.item() == pytest.approx(8.0)
    th.testing.assert_close(th.autograd.grad(weighted, values)[0], th.tensor([1 / 3, 2 / 3, 0.0]))
    assert losses.weighted_mean(th.tensor([1.0, 3.0]), th.tensor([2.0, 2.0])).item() == pytest.approx(4.0)
    assert losses.weighted_mean(values, None).item() == pytest.approx(38.0)
    assert losses.weighted_mean(th.tensor([7.0]), th.tensor([0.5])).item() == 3.5


BUDGET = 10


def loop_mean_over_steps(trajectories: list[th.Tensor]) -> th.Tensor:
    return sum((x.sum() for x in trajectories), th.zeros(())) / sum(map(len, trajectories))


def loop_mean_over_trajectories(trajectories: list[th.Tensor]) -> th.Tensor:
    return sum((1 / len(x) * x.sum() for x in trajectories), th.zeros(())) / len(trajectories)


def loop_mean_over_budgets(trajectories: list[th.Tensor]) -> th.Tensor:
    return sum((1 / BUDGET * x.sum() for x in trajectories), th.zeros(())) / len(trajectories)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("aggregation", "loop"),
    [
        pytest.param("step", loop_mean_over_steps, id="step"),
        pytest.param("trajectory", loop_mean_over_trajectories, id="trajectory"),
        pytest.param("constant", loop_mean_over_budgets, id="constant"),
    ],
)
def test_weighted_mean_and_its_gradient_equal_a_double_loop(aggregation, loop, seed):
    lengths, trajectories = draw_trajectories(seed)
    values = th.randn(len(trajectories), dtype=th.float64, requires_grad=True)
    weigh = losses.LOSS_WEIGHTS[aggregation]
    weights = None if weigh is None else th.as_tensor(weigh(lengths, BUDGET))[trajectories]
    means = losses.weighted_mean(values, weights), loop([values[trajectories == i] for i in range(len(lengths))])
    assert means[0].shape == ()
    th.testing.assert_close(*means, rtol=1e-12, atol=1e-12)
    th.testing.assert_close(*(th.autograd.grad(mean, values)[0] for mean in means), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["trajectory", "constant"])
@pytest.mark.parametrize("m", [1, 3, 7, 49])
def test_weights_of_trajectories_of_equal_lengths_are_exactly_one_and_change_nothing(m, aggregation):
    weigh = losses.LOSS_WEIGHTS[aggregation]
    assert weigh is not None
    for length in range(1, 101):
        # ... where all have used up their budget
        weights = weigh(np.full(m, length), length)
        np.testing.assert_array_equal(weights, np.ones(m))
        values = th.randn(m * length, requires_grad=True)
        means = values.mean(), losses.weighted_mean(values, th.as_tensor(np.repeat(weights, length).astype(np.float32)))
        assert th.equal(*means)
        assert th.equal(*(th.autograd.grad(mean, values)[0] for mean in means))


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_of_trajectories_are_one_on_average_whatever_their_lengths(seed):
    lengths, _ = draw_trajectories(seed)
    assert np.repeat(losses.trajectory_loss_weights(lengths, 0), lengths).mean() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [1, BUDGET, 1000])
def test_mean_over_budgets_is_the_mean_over_steps_times_mean_length_over_budget(seed, budget):
    lengths, trajectories = draw_trajectories(seed)
    values = th.randn(len(trajectories), dtype=th.float64)
    constant = losses.weighted_mean(values, th.as_tensor(losses.constant_loss_weights(lengths, budget))[trajectories])
    assert constant.item() == pytest.approx(values.mean().item() * lengths.mean() / budget, rel=1e-12)


# --- diagnostics of ratios --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_range_high", "low", "high"),
    [
        # below 0.8: 0.5 and 0.7; above 1.2: 1.3, 1.6 and 2
        pytest.param(None, 2 / 8, 3 / 8, id="symmetric"),
        # above 1.5: 1.6 and 2
        pytest.param(0.5, 2 / 8, 2 / 8, id="clip higher"),
        # above 1.05: 1.1, 1.3, 1.6 and 2
        pytest.param(0.05, 2 / 8, 4 / 8, id="clip lower"),
        pytest.param(0.0, 2 / 8, 4 / 8, id="none above"),
    ],
)
def test_clip_fractions_are_as_worked_out_by_hand(clip_range_high, low, high):
    ratio = th.tensor([0.5, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 0.7])
    fractions = losses.clip_fractions(ratio, CLIP, clip_range_high)
    assert (fractions.low.item(), fractions.high.item()) == (low, high)


def test_ratios_at_the_edge_of_the_clip_range_do_not_count_as_clipped():
    # Differences of 1 and these are exact
    assert [float(f) for f in losses.clip_fractions(th.tensor([0.75, 1.0, 1.25, 1.5]), 0.25, 0.5)] == [0.0, 0.0]
    assert [float(f) for f in losses.clip_fractions(th.tensor([1.0]), 0.0)] == [0.0, 0.0]
    assert [float(f) for f in losses.clip_fractions(th.tensor([0.7499]), 0.25)] == [1.0, 0.0]
    assert [float(f) for f in losses.clip_fractions(th.tensor([1.2501]), 0.25)] == [0.0, 1.0]


@pytest.mark.parametrize("clip_range", [0.0, 0.1, CLIP, 0.9])
def test_clip_fractions_add_up_to_that_of_ppo(clip_range):
    # A count over 1024 is exact
    ratio = th.exp(0.3 * th.randn(1024))
    low, high = losses.clip_fractions(ratio, clip_range)
    assert (low + high).item() == th.mean((th.abs(ratio - 1) > clip_range).float()).item()
    assert high > 0


def test_what_is_reused_counts_by_its_importance_weight_up_to_two():
    log_prob, sampled = th.tensor([-1.0, -3.0, -1.0, 0.0, -2000.0]), th.tensor([-1.0, -2.0, -1.5, -50.0, 0.0])
    # 1, 1/e, sqrt(e) = 1.6487, e^50 truncated, nothing
    assert losses.reuse_weights(log_prob, sampled).tolist() == pytest.approx([1.0, 0.367879, 1.648721, 2.0, 0.0], abs=1e-6)
    assert (losses.reuse_weights(log_prob, sampled) > 0).all()


def test_effective_sample_size_is_as_worked_out_by_hand():
    # (1 + 3)^2 / (2 * (1 + 9)) = 0.8; (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18 = 0.888889
    assert losses.effective_sample_size(th.tensor([1.0, 3.0])).item() == pytest.approx(0.8, rel=1e-12)
    assert losses.effective_sample_size(th.tensor([1.0, 1.0, 2.0])).item() == pytest.approx(0.888889, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
@pytest.mark.parametrize("log_ratio", [-losses.MAX_LOG_RATIO, 0.0, 0.1, losses.MAX_LOG_RATIO])
def test_effective_sample_size_of_ratios_that_are_all_alike_is_one(n, log_ratio):
    assert losses.effective_sample_size(th.full((n,), math.exp(log_ratio))).item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_effective_sample_size_where_one_ratio_has_all_the_weight_is_one_of_n(n):
    log_ratio = th.full((n,), -losses.MAX_LOG_RATIO)
    log_ratio[n // 2] = losses.MAX_LOG_RATIO
    assert losses.effective_sample_size(log_ratio.exp()).item() == pytest.approx(1 / n, rel=1e-9)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_effective_sample_size_follows_from_the_coefficient_of_variation_and_knows_no_unit(spread):
    ratio = th.exp(spread * th.randn(1000))
    size = losses.effective_sample_size(ratio)
    # E[x]^2 / E[x^2] = 1 / (1 + Var[x] / E[x]^2), in double precision whatever that of the ratios
    exact = ratio.double().numpy()
    assert size.item() == pytest.approx(1 / (1 + exact.var() / exact.mean() ** 2), rel=1e-12)
    # Powers of two scale without rounding
    assert losses.effective_sample_size(2.0**20 * ratio).item() == size.item()
    assert losses.effective_sample_size(2.0**-20 * ratio).item() == size.item()
    assert 1 / 1000 < size < 1.0


# --- estimates of the divergence --------------------------------------------------------------------------------------

ESTIMATORS = [pytest.param(estimator, id=name) for name, estimator in losses.KL_ESTIMATORS.items()]


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # pi = 1/4, ref = 1/2: d = log 2 = 0.693147
        pytest.param(losses.k1, -0.693147, 1.0, id="k1"),
        # 0.693147^2 / 2 = 0.240227; slope -d
        pytest.param(losses.k2, 0.240227, -0.693147, id="k2"),
        # 2 - 0.693147 - 1 = 0.306853; slope 1 - exp(d) = 1 - 2
        pytest.param(losses.k3, 0.306853, -1.0, id="k3"),
    ],
)
def test_estimators_and_their_slopes_are_as_worked_out_by_hand(estimator, value, slope):
    log_prob = th.tensor([math.log(0.25)], dtype=th.float64, requires_grad=True)
    estimate = estimator(log_prob, th.tensor([math.log(0.5)], dtype=th.float64))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert log_prob.grad is not None and log_prob.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_are_zero_where_the_policies_agree(estimator):
    log_prob = th.randn(10)
    th.testing.assert_close(estimator(log_prob, log_prob), th.zeros(10), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0])
def test_k2_and_k3_are_never_negative_while_k1_is(scale):
    log_prob, reference_log_prob = scale * th.randn(2, 100_000)
    assert (losses.k2(log_prob, reference_log_prob) >= 0).all()
    assert (losses.k3(log_prob, reference_log_prob) >= 0).all()
    assert (losses.k1(log_prob, reference_log_prob) < 0).any()


def sampled_estimate(estimator, policy: th.distributions.Normal, reference: th.distributions.Normal) -> float:
    actions = policy.sample(th.Size((400_000,)))
    return float(estimator(policy.log_prob(actions), reference.log_prob(actions)).mean())


# KL(pi || ref) = log(1 / 2) + (2^2 + 1^2) / (2 * 1^2) - 1/2 = 1.306853; KL(ref || pi) = log(2 / 1) + (1 + 1) / (2 * 4) - 1/2
# = 0.443147. pi is the wider one: the other way round the ratio, and so the variance of k3, is unbounded.
WIDE, NARROW = th.distributions.Normal(0.0, 2.0), th.distributions.Normal(1.0, 1.0)


@pytest.mark.parametrize("estimator", [losses.k1, losses.k3], ids=["k1", "k3"])
def test_samples_from_pi_estimate_the_divergence_of_pi_from_the_reference_and_not_the_reverse(estimator):
    estimate = sampled_estimate(estimator, WIDE, NARROW)
    assert estimate == pytest.approx(1.306853, abs=0.03)
    assert estimate != pytest.approx(0.443147, abs=0.5)


def test_k2_is_close_for_policies_that_are_close_and_biased_for_others():
    # KL = 0.1^2 / 2 = 0.005
    assert sampled_estimate(losses.k2, NARROW, th.distributions.Normal(1.1, 1.0)) == pytest.approx(0.005, rel=0.03)
    assert sampled_estimate(losses.k2, WIDE, NARROW) > 1.5 * 1.306853


@pytest.mark.parametrize("estimator", [losses.k1, losses.k3], ids=["k1", "k3"])
def test_the_expected_estimate_over_all_actions_is_the_divergence(estimator):
    pi, ref = th.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]], dtype=th.float64)
    expected = (pi * (pi / ref).log()).sum().item()
    assert (pi * estimator(pi.log(), ref.log())).sum().item() == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx((ref * (ref / pi).log()).sum().item(), rel=0.02)


@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        # E[grad log pi] = 0: averaged over actions, this penalty does not move the policy
        pytest.param(losses.k1, lambda pi, ref: 0.0 * pi.sum(), id="k1: none"),
        pytest.param(losses.k2, lambda pi, ref: (pi * (pi / ref).log()).sum(), id="k2: that of KL(pi || ref)"),
        pytest.param(losses.k3, lambda pi, ref: (ref * (ref / pi).log()).sum(), id="k3: that of KL(ref || pi)"),
    ],
)
def test_expected_gradient_of_an_estimate_used_as_a_loss(estimator, objective):
    # A mean over sampled actions has fixed weights: see https://arxiv.org/abs/2506.09477 for what follows from this
    logits = th.tensor([0.3, -1.0, 0.5], dtype=th.float64, requires_grad=True)
    reference = th.tensor([0.2, 0.3, 0.5], dtype=th.float64)
    policy = logits.softmax(dim=0)
    loss = (policy.detach() * estimator(policy.log(), reference.log())).sum()
    gradient = th.autograd.grad(loss, logits, retain_graph=True)[0]
    th.testing.assert_close(gradient, th.autograd.grad(objective(policy, reference), logits)[0], rtol=1e-9, atol=1e-12)


def test_weighting_with_the_ratio_gives_k1_the_value_and_the_gradient_of_the_divergence():
    logits = th.tensor([0.3, -1.0, 0.5], dtype=th.float64, requires_grad=True)
    old, reference = th.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=th.float64)
    policy = logits.softmax(dim=0)
    # The mean over actions of the old policy, which sampled them
    penalty = (old * losses.importance_weighted(losses.k1(policy.log(), reference.log()), policy.log(), old.log())).sum()
    divergence = (policy * (policy / reference).log()).sum()
    assert penalty.item() == pytest.approx(divergence.item(), rel=1e-12)
    gradients = [th.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (penalty, divergence)]
    th.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_weighting_is_as_worked_out_by_hand_and_never_overflows():
    # pi = 1/2, pi_old = 1/4: the ratio is 2
    weighted = losses.importance_weighted(th.tensor([3.0]), th.tensor([0.5]).log(), th.tensor([0.25]).log())
    assert weighted.item() == pytest.approx(6.0)
    assert losses.importance_weighted(th.ones(1), th.tensor([0.0]), th.tensor([-1000.0])).isfinite().all()


@pytest.mark.parametrize("d", [1000.0, 25.0, -25.0, -1000.0])
def test_k3_is_finite_never_negative_and_never_drives_the_policies_apart_where_the_ratio_overflows(d):
    log_prob = th.tensor([-d], dtype=th.float64, requires_grad=True)
    estimate = losses.k3(log_prob, th.zeros(1, dtype=th.float64))
    estimate.sum().backward()
    assert log_prob.grad is not None
    assert estimate.isfinite() and estimate.item() >= 0.0
    # Where pi falls short of the reference, d > 0, descent on the penalty must not lower log pi further
    assert log_prob.grad.isfinite() and log_prob.grad.item() * d <= 0.0


def test_k3_far_above_the_reference_is_exact():
    # d = -30: exp(-30) + 30 - 1 = 29 + 9.4e-14, slope 1 - exp(-30)
    log_prob = th.tensor([30.0], dtype=th.float64, requires_grad=True)
    estimate = losses.k3(log_prob, th.zeros(1, dtype=th.float64))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(29.0, abs=1e-12)
    assert log_prob.grad is not None and log_prob.grad.item() == pytest.approx(1.0, abs=1e-12)


def test_approximate_divergence_is_as_worked_out_by_hand():
    # ratio 2: 2 - 1 - log 2 = 0.306853; ratio 1/2: -1/2 + log 2 = 0.193147; ratio 1: 0; (0.306853 + 0.193147 + 0) / 3
    assert losses.approximate_kl(th.tensor([LN2, -LN2, 0.0])).item() == pytest.approx(0.166667, abs=1e-6)
    assert losses.approximate_kl(th.tensor([LN2])).item() == pytest.approx(0.306853, abs=1e-6)
    assert losses.approximate_kl(th.zeros(5)).item() == 0.0


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0])
def test_approximate_divergence_is_k3_of_the_old_policy_from_the_new_and_that_of_ppo(spread):
    old_log_prob = th.randn(1000, dtype=th.float64)
    log_prob = old_log_prob + spread * th.randn(1000, dtype=th.float64)
    log_ratio = log_prob - old_log_prob
    divergence = losses.approximate_kl(log_ratio).item()
    assert divergence == pytest.approx(losses.k3(old_log_prob, log_prob).mean().item(), rel=1e-12)
    assert divergence == pytest.approx(th.mean((th.exp(log_ratio) - 1) - log_ratio).item(), rel=1e-9)
    assert divergence != pytest.approx(losses.k3(log_prob, old_log_prob).mean().item(), rel=1e-5)


def test_approximate_divergence_of_samples_from_the_old_policy_is_that_of_the_old_policy_from_the_new():
    # the old policy is the wide one: KL(old || new) = 1.306853, not 0.443147
    def approximate(log_prob: th.Tensor, reference_log_prob: th.Tensor) -> th.Tensor:
        return losses.approximate_kl(reference_log_prob - log_prob)

    assert sampled_estimate(approximate, WIDE, NARROW) == pytest.approx(1.306853, abs=0.03)


@pytest.mark.parametrize("log_ratio", [1000.0, 25.0, -1000.0])
def test_approximate_divergence_is_finite_and_positive_where_the_ratio_overflows(log_ratio):
    divergence = losses.approximate_kl(th.tensor([log_ratio, 0.0]))
    assert divergence.isfinite() and divergence > 1.0


# --- the divergence in closed form ------------------------------------------------------------------------------------

Pair = tuple[Distribution, Distribution]
LOG_STD, REFERENCE_LOG_STD = th.tensor([-0.5, 0.2], dtype=th.float64), th.tensor([0.1, -0.3], dtype=th.float64)
EXPLORATION = th.tensor([[-0.5, 0.2], [0.1, -0.4], [-1.0, 0.3]], dtype=th.float64)
LATENT = th.tensor([[0.5, -1.0, 0.3]], dtype=th.float64)
REFERENCE_SHIFT = 0.7
# The noise of gSDE has variance sum_j latent_j^2 std_j^2, plus SB3's 1e-6
EXPLORATION_STDS = [
    ((LATENT**2 @ (EXPLORATION + shift).exp() ** 2)[0] + 1e-6).sqrt().tolist() for shift in (0.0, REFERENCE_SHIFT)
]


def gaussian_pair(distribution: type[DiagGaussianDistribution], p: th.Tensor, q: th.Tensor) -> Pair:
    return distribution(2).proba_distribution(p, LOG_STD), distribution(2).proba_distribution(q, REFERENCE_LOG_STD)


def gsde_pair(squash_output: bool, p: th.Tensor, q: th.Tensor) -> Pair:
    def make(mean: th.Tensor, log_std: th.Tensor) -> Distribution:
        distribution = StateDependentNoiseDistribution(2, squash_output=squash_output)
        distribution.sample_weights(log_std, batch_size=len(mean))
        return distribution.proba_distribution(mean, log_std, LATENT.expand(len(mean), -1))

    return make(p, EXPLORATION), make(q, EXPLORATION + REFERENCE_SHIFT)


def discrete_pair(make: Callable[[], Distribution], p: th.Tensor, q: th.Tensor) -> Pair:
    return make().proba_distribution(p), make().proba_distribution(q)


def normal_kl(mean: float, std: float, reference_mean: float, reference_std: float) -> float:
    return math.log(reference_std / std) + (std**2 + (mean - reference_mean) ** 2) / (2 * reference_std**2) - 1 / 2


def gaussian_kl(p: list[float], q: list[float], stds: list[list[float]]) -> float:
    return sum(normal_kl(p[k], stds[0][k], q[k], stds[1][k]) for k in range(2))


def categorical_kl(p: list[float], q: list[float]) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, logits)) for x in logits] for logits in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def multi_categorical_kl(p: list[float], q: list[float]) -> float:
    return categorical_kl(p[:2], q[:2]) + categorical_kl(p[2:], q[2:])


def bernoulli_kl(p: list[float], q: list[float]) -> float:
    return sum(categorical_kl([a, 0.0], [b, 0.0]) for a, b in zip(p, q, strict=True))


GAUSSIAN_STDS = [LOG_STD.exp().tolist(), REFERENCE_LOG_STD.exp().tolist()]
MEANS, REFERENCE_MEANS = [[0.5, -0.2], [-0.4, 0.3], [0.0, 0.0]], [[0.1, 0.4], [0.2, -0.3], [0.0, 0.0]]
LOGITS, REFERENCE_LOGITS = [[1.0, -0.5, 0.3, 2.0, 0.0], [0.2, 0.9, -1.0, 0.5, 0.7]], [[0, 1, 0, -1, 0.5], [1, 1, 1, 0, -1]]
GAUSSIAN, GSDE = partial(gaussian_kl, stds=GAUSSIAN_STDS), partial(gaussian_kl, stds=EXPLORATION_STDS)
FIVE_WAY, TWO_AND_THREE_WAY = partial(CategoricalDistribution, 5), partial(MultiCategoricalDistribution, [2, 3])
KINDS = [
    pytest.param(partial(gaussian_pair, DiagGaussianDistribution), GAUSSIAN, MEANS, REFERENCE_MEANS, id="DiagGaussian"),
    pytest.param(partial(gaussian_pair, SquashedDiagGaussianDistribution), GAUSSIAN, MEANS, REFERENCE_MEANS, id="squashed"),
    pytest.param(partial(gsde_pair, False), GSDE, MEANS, REFERENCE_MEANS, id="gSDE"),
    pytest.param(partial(gsde_pair, True), GSDE, MEANS, REFERENCE_MEANS, id="squashed gSDE"),
    pytest.param(partial(discrete_pair, FIVE_WAY), categorical_kl, LOGITS, REFERENCE_LOGITS, id="Categorical"),
    pytest.param(
        partial(discrete_pair, TWO_AND_THREE_WAY), multi_categorical_kl, LOGITS, REFERENCE_LOGITS, id="MultiCategorical"
    ),
    pytest.param(
        partial(discrete_pair, partial(BernoulliDistribution, 5)), bernoulli_kl, LOGITS, REFERENCE_LOGITS, id="Bernoulli"
    ),
]


@pytest.mark.parametrize(("pair", "closed_form", "params", "reference_params"), KINDS)
def test_exact_divergence_is_the_closed_form_and_not_its_reverse(pair, closed_form, params, reference_params):
    policy, reference = pair(th.tensor(params, dtype=th.float64), th.tensor(reference_params, dtype=th.float64))
    divergence = losses.exact_kl(policy, reference)
    expected = th.tensor([closed_form(p, q) for p, q in zip(params, reference_params, strict=True)], dtype=th.float64)
    assert divergence.shape == (len(params),)
    th.testing.assert_close(divergence, expected, rtol=1e-6, atol=1e-9)
    assert not th.allclose(divergence, losses.exact_kl(reference, policy), rtol=1e-3)


@pytest.mark.parametrize(("pair", "closed_form", "params", "reference_params"), KINDS)
def test_exact_divergence_is_the_mean_log_ratio_of_sampled_actions(pair, closed_form, params, reference_params):
    p, q = (th.tensor(rows[:1], dtype=th.float64).expand(40_000, -1) for rows in (params, reference_params))
    policy, reference = pair(p, q)
    actions = policy.sample()
    log_ratio = policy.log_prob(actions) - reference.log_prob(actions)
    error = log_ratio.std().item() / math.sqrt(len(log_ratio))
    assert log_ratio.mean().item() == pytest.approx(losses.exact_kl(policy, reference)[0].item(), abs=5 * error)
    assert log_ratio.mean().item() != pytest.approx(losses.exact_kl(reference, policy)[0].item(), abs=5 * error)


@pytest.mark.parametrize(("pair", "closed_form", "params", "reference_params"), KINDS)
def test_exact_divergence_of_one_observation_keeps_its_shape(pair, closed_form, params, reference_params):
    policy, reference = pair(th.tensor(params[:1], dtype=th.float64), th.tensor(reference_params[:1], dtype=th.float64))
    assert losses.exact_kl(policy, reference).shape == (1,)


def test_exact_divergence_of_normals_is_as_worked_out_by_hand():
    # N(1, 1) from N(0, 2): log(2 / 1) + (1 + 1) / (2 * 4) - 1/2 = 0.443147; the second dimension N(0, 2) from N(1, 1):
    # log(1 / 2) + (4 + 1) / 2 - 1/2 = 1.306853; together 1.75
    policy = DiagGaussianDistribution(2).proba_distribution(th.tensor([[1.0, 0.0]]), th.tensor([0.0, LN2]))
    reference = DiagGaussianDistribution(2).proba_distribution(th.tensor([[0.0, 1.0]]), th.tensor([LN2, 0.0]))
    th.testing.assert_close(losses.exact_kl(policy, reference), th.tensor([1.75]))


def test_gradient_of_the_exact_divergence_of_normals_is_as_worked_out_by_hand():
    mean = th.tensor([[1.0]], dtype=th.float64, requires_grad=True)
    log_std = th.tensor([0.0], dtype=th.float64, requires_grad=True)
    policy = DiagGaussianDistribution(1).proba_distribution(mean, log_std)
    reference = DiagGaussianDistribution(1).proba_distribution(th.zeros(1, 1).double(), th.tensor([LN2], dtype=th.float64))
    losses.exact_kl(policy, reference).sum().backward()
    # by the mean: (1 - 0) / 2^2 = 0.25; by log std: -1 + 1^2 / 2^2 = -0.75
    assert mean.grad is not None and mean.grad.item() == pytest.approx(0.25)
    assert log_std.grad is not None and log_std.grad.item() == pytest.approx(-0.75)


@pytest.mark.parametrize(
    ("make", "n_logits"),
    [
        pytest.param(partial(CategoricalDistribution, 5), 5, id="Categorical"),
        pytest.param(partial(MultiCategoricalDistribution, [2, 3]), 5, id="MultiCategorical"),
        pytest.param(partial(BernoulliDistribution, 5), 5, id="Bernoulli"),
    ],
)
def test_exact_divergence_from_itself_is_zero_and_flat(make, n_logits):
    logits = th.randn(3, n_logits, dtype=th.float64, requires_grad=True)
    divergence = losses.exact_kl(make().proba_distribution(logits), make().proba_distribution(logits.detach()))
    gradient = th.autograd.grad(divergence.sum(), logits)[0]
    th.testing.assert_close(divergence, th.zeros(3, dtype=th.float64), rtol=0.0, atol=1e-12)
    th.testing.assert_close(gradient, th.zeros_like(logits), rtol=0.0, atol=1e-12)


# --- the adaptive coefficient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "target", "expected"),
    [
        # 1.5 * 0.5 = 0.75 and 0.75 / 1.5 = 0.5 are exact
        pytest.param(0.75, 0.5, 0.3, id="kept at the upper edge"),
        pytest.param(math.nextafter(0.75, 1.0), 0.5, 0.6, id="doubled just above the upper edge"),
        pytest.param(0.5, 0.75, 0.3, id="kept at the lower edge"),
        pytest.param(math.nextafter(0.5, 0.0), 0.75, 0.15, id="halved just below the lower edge"),
        pytest.param(0.02, 0.02, 0.3, id="kept on target"),
        pytest.param(0.0, 0.02, 0.15, id="halved without divergence"),
        pytest.param(-0.001, 0.02, 0.15, id="halved where an estimate is negative"),
        pytest.param(math.inf, 0.02, 0.6, id="doubled where the policies have nothing in common"),
    ],
)
def test_adapted_coefficient_is_as_worked_out_by_hand(kl, target, expected):
    assert losses.adapted_kl_coef(0.3, kl, target) == expected


def test_adapted_coefficient_stays_within_its_bounds_and_finds_its_way_back():
    low, high = losses.KL_COEF_BOUNDS
    # the last step is shortened: 2 * 6e5 = 1.2e6, 1.5e-6 / 2 = 7.5e-7
    assert losses.adapted_kl_coef(6e5, 1.0, 0.01) == high
    assert losses.adapted_kl_coef(1.5e-6, 0.0, 0.01) == low
    coefs = [0.3]
    for kl in [1.0] * 100 + [0.0] * 100 + [1.0]:
        coefs.append(losses.adapted_kl_coef(coefs[-1], kl, 0.01))
    assert (coefs[100], coefs[101]) == (high, 0.5 * high)
    assert (coefs[200], coefs[201]) == (low, 2.0 * low)
    assert low <= min(coefs) and max(coefs) <= high
