"""Advantages, compared with numbers worked out by hand, limits, SB3, slow and obvious loops, and invariances."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_grpo import advantages as A

GAMMA = 0.9
SEEDS = range(5)
#: Only rounding may differ.
ROUNDING = 1e-12
SCALES: list[A.Scale] = ["group", "batch", "none"]
BY_SCALE = pytest.mark.parametrize("scale", SCALES)


class Rollout(NamedTuple):
    rewards: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray

    @property
    def trajectories(self) -> list[list[float]]:
        """The rewards of each trajectory."""
        return split(self.rewards, self.lengths)

    @property
    def step_groups(self) -> np.ndarray:
        """The group of each step."""
        return np.repeat(self.groups, self.lengths)


def split(values: np.ndarray, lengths: np.ndarray) -> list[list[float]]:
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


def flat(values: list[list[float]]) -> list[float]:
    return [value for trajectory in values for value in trajectory]


def draw_rollout(seed: int) -> Rollout:
    """Four groups of five, three, two and one member, in random order; some trajectories have a single step."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([0, 1, 2, 3], [5, 3, 2, 1]))
    lengths = rng.integers(2, 9, size=len(groups))
    lengths[rng.choice(np.flatnonzero(groups != 3), size=2, replace=False)] = 1
    return Rollout(rng.normal(size=lengths.sum()), lengths, groups)


def outcome(rollout: Rollout, scale: A.Scale, gamma: float = GAMMA) -> np.ndarray:
    return A.outcome_advantages(*rollout, scale)


def leave_one_out(rollout: Rollout, scale: A.Scale, gamma: float = GAMMA) -> np.ndarray:
    return A.outcome_advantages(*rollout, scale, leave_one_out=True)


def process(rollout: Rollout, scale: A.Scale, gamma: float = GAMMA) -> np.ndarray:
    return A.process_advantages(*rollout, scale)


def return_to_go(rollout: Rollout, scale: A.Scale, gamma: float = GAMMA) -> np.ndarray:
    return A.return_to_go_advantages(*rollout, gamma, scale)


def stepwise(rollout: Rollout, scale: A.Scale, gamma: float = GAMMA) -> np.ndarray:
    return A.stepwise_advantages(*rollout, gamma, scale)


Formula = Callable[..., np.ndarray]


def by_formula(*which: Formula) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("formula", [pytest.param(formula, id=formula.__name__) for formula in which])


ALL_FORMULAS = by_formula(outcome, leave_one_out, process, return_to_go, stepwise)
#: The other two also compare the steps of one trajectory with each other.
FORMULAS_ACROSS_MEMBERS = by_formula(outcome, leave_one_out, stepwise)


# --- made-up cases ----------------------------------------------------------------------------------------------------


def extreme_numbers() -> st.SearchStrategy[float]:
    """Numbers of either sign from 1e-30 to 1e30, and zero."""
    magnitudes = st.one_of(st.floats(1e-30, 1e30), st.integers(-30, 30).map(lambda exponent: 10.0**exponent))
    return st.one_of(st.just(0.0), st.builds(lambda sign, size: sign * size, st.sampled_from([-1.0, 1.0]), magnitudes))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and groups of some trajectories, in no order; a group may have one member, a trajectory one step."""
    members = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8))
    lengths, names = np.array(members).T
    return lengths, np.unique(names, return_inverse=True)[1]


@st.composite
def extreme_rollouts(draw: st.DrawFn) -> Rollout:
    """Rewards of any magnitude: each of its own, all of the same, all alike, or alike with alternating signs."""
    lengths, groups = draw(shapes())
    n = int(lengths.sum())
    kind = draw(st.sampled_from(["each of its own", "the same magnitude", "constant", "alternating"]))
    unit = draw(extreme_numbers())
    if kind == "each of its own":
        rewards = np.array(draw(st.lists(extreme_numbers(), min_size=n, max_size=n)))
    elif kind == "the same magnitude":
        rewards = unit * np.array(draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)))
    else:
        rewards = np.full(n, unit)
        rewards[1::2] *= -1.0 if kind == "alternating" else 1.0
    return Rollout(rewards, lengths, groups)


@st.composite
def tied_rollouts(draw: st.DrawFn) -> Rollout:
    """All members of a group have the same rewards."""
    by_group = draw(st.lists(st.lists(extreme_numbers(), min_size=1, max_size=5), min_size=1, max_size=3))
    extra = draw(st.lists(st.integers(0, len(by_group) - 1), max_size=6))
    groups = np.array(draw(st.permutations([*range(len(by_group)), *extra])))
    rewards = np.concatenate([by_group[group] for group in groups])
    return Rollout(rewards, np.array([len(by_group[group]) for group in groups]), groups)


scales, gammas = st.sampled_from(SCALES), st.sampled_from([0.0, 0.5, 0.75, 1.0])


# --- trajectories -----------------------------------------------------------------------------------------------------


def test_linear_recurrence_is_as_worked_out_by_hand_and_leaves_its_arguments_alone():
    # y_2 = 4; y_1 = 2 + 0.5 * 4 = 4; y_0 = 1 - 3 * 4 = -11; the last coefficient has nothing to act on
    x, a = np.array([1, 2, 4], dtype=np.float32), np.array([-3.0, 0.5, 100.0])
    y = A.linear_recurrence(x, a)
    assert y.tolist() == [-11.0, 4.0, 4.0] and y.dtype == np.float64
    assert x.tolist() == [1, 2, 4] and a.tolist() == [-3.0, 0.5, 100.0]
    assert A.linear_recurrence(np.empty(0), np.empty(0)).shape == (0,)


@pytest.mark.parametrize("zeros", [0.0, 0.2, 0.9])
def test_linear_recurrence_equals_a_loop_at_every_length(zeros: float):
    rng = np.random.default_rng(0)
    for n in range(1, 71):
        x, a = rng.normal(size=n), rng.normal(size=n) * (rng.uniform(size=n) >= zeros)
        expected = x.tolist()
        for t in reversed(range(n - 1)):
            expected[t] += a[t] * expected[t + 1]
        np.testing.assert_allclose(A.linear_recurrence(x, a), expected, rtol=1e-9, atol=1e-9, err_msg=f"length {n}")


def test_steps_continuations_sums_and_labels_are_as_worked_out_by_hand():
    lengths = np.array([3, 1, 2])
    assert A.steps_within_trajectories(lengths).tolist() == [0, 1, 2, 0, 0, 1]
    assert A.same_trajectory_continues(lengths).tolist() == [1, 1, 0, 0, 1, 0]
    # label 0: 1 - 8 = -7; label 1: 2; label 2: 4 + 16 = 20
    assert A.sum_by_label(np.array([1.0, 2, 4, -8, 16]), np.array([0, 1, 2, 0, 2])).tolist() == [-7, 2, 20]
    # 7 appears first, then -3, then 9
    assert A.label_by_appearance(np.array([7, -3, 7, 9, -3, 9])).tolist() == [0, 1, 0, 2, 1, 2]
    assert A.label_by_appearance(np.array([], dtype=np.int64)).tolist() == []


# --- minibatches of whole trajectories --------------------------------------------------------------------------------


def deal(trajectories: np.ndarray, order: np.ndarray, batch_size: int) -> list[list[int]]:
    return [batch.tolist() for batch in A.batch_trajectories(trajectories, order, batch_size)]


def test_trajectories_are_dealt_as_worked_out_by_hand():
    # transitions of trajectory 0: 0 and 3; of 1: 1 and 2; of 2: 4, 5 and 6; of 3: 7
    # trajectory 2 has 3 < 4, with trajectory 0 there are 5; trajectory 3 has 1 < 4, with trajectory 1 there are 3, the rest
    trajectories, order = np.array([0, 1, 1, 0, 2, 2, 2, 3]), np.array([2, 0, 3, 1])
    assert deal(trajectories, order, 4) == [[4, 5, 6, 0, 3], [7, 1, 2]]
    # exactly 3 are enough, and the rest is enough too
    assert deal(trajectories, order, 3) == [[4, 5, 6], [0, 3, 7], [1, 2]]
    assert deal(trajectories, order, 1) == [[4, 5, 6], [0, 3], [7], [1, 2]]
    assert deal(trajectories, order, 100) == [[4, 5, 6, 0, 3, 7, 1, 2]]


# --- returns and generalized advantages -------------------------------------------------------------------------------


def loop_returns(trajectory: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * trajectory[k] for k in range(t, len(trajectory))) for t in range(len(trajectory))]


def test_discounted_returns_are_as_worked_out_by_hand():
    # gamma 0.5, rewards [1, 4, 8] and [2]: 8; 4 + 0.5 * 8 = 8; 1 + 0.5 * 8 = 5; the second adds nothing to the first
    rewards, lengths = np.array([1.0, 4, 8, 2]), np.array([3, 1])
    assert A.discounted_returns(rewards, lengths, 0.5).tolist() == [5, 8, 8, 2]
    assert A.discounted_returns(rewards, lengths, 1.0).tolist() == [13, 12, 8, 2]
    assert A.discounted_returns(rewards, lengths, 0.0).tolist() == rewards.tolist()


@given(rollout=extreme_rollouts(), gamma=st.floats(0.0, 1.0))
def test_discounted_returns_equal_a_loop_whatever_the_rewards(rollout: Rollout, gamma: float):
    expected = flat([loop_returns(trajectory, gamma) for trajectory in rollout.trajectories])
    magnitudes = flat([loop_returns([abs(r) for r in trajectory], gamma) for trajectory in rollout.trajectories])
    error = np.abs(A.discounted_returns(rollout.rewards, rollout.lengths, gamma) - expected)
    assert (error <= ROUNDING * np.array(magnitudes) + 1e-300).all()


def test_generalized_advantages_are_as_worked_out_by_hand():
    # gamma 0.5, lambda 0.5, b = [2, 4], then b(s_last) = 8 where the rollout was cut:
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
    assert advantages.tolist() == [1.75, 3.0, 2.0]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_generalized_advantages_equal_those_of_sb3(n_envs: int):
    rng = np.random.default_rng(0)
    n_steps, gamma, gae_lambda = 37, 0.97, 0.9
    buffer = RolloutBuffer(
        n_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs
    )
    rewards, values = rng.normal(size=(2, n_steps, n_envs))
    dones = rng.uniform(size=(n_steps, n_envs)) < 0.15
    last_values = rng.normal(size=n_envs)
    starts = np.vstack([np.ones((1, n_envs)), dones[:-1]])
    for t in range(n_steps):
        zeros = np.zeros((n_envs, 1))
        buffer.add(zeros, zeros, rewards[t], starts[t], th.as_tensor(values[t]), th.zeros(n_envs))
    buffer.compute_returns_and_advantage(th.as_tensor(last_values), dones[-1])

    next_values = np.vstack([values[1:], last_values]) * ~dones
    continues = 1.0 - dones
    continues[-1] = 0.0
    advantages = A.generalized_advantages(
        rewards.T.ravel(), values.T.ravel(), next_values.T.ravel(), continues.T.ravel(), gamma, gae_lambda
    )
    np.testing.assert_allclose(advantages, buffer.advantages.T.ravel(), rtol=1e-4, atol=1e-5)


# --- centring and scaling ---------------------------------------------------------------------------------------------


def test_centring_and_the_leave_one_out_factor_are_as_worked_out_by_hand():
    # label 0: (1 + 2 + 6) / 3 = 3; label 1: (10 + 20) / 2 = 15; label 2 has a single value
    values, labels = np.array([1.0, 10.0, 2.0, 20.0, 6.0, 42.0]), np.array([0, 1, 0, 1, 0, 2])
    assert A.centre_within(values, labels).tolist() == [-2, -5, -1, 5, 3, 0]
    # three values: 3 / 2; two: 2 / 1; one has no others
    assert A.leave_one_out_factor(labels).tolist() == [1.5, 2, 1.5, 2, 1.5, 0]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # label 0: sqrt((9 + 0 + 9) / 3) = sqrt(6) = 2.449490, 3 / 2.449490 = 1.224745; label 1: sqrt((1 + 1) / 2) = 1
        ("group", [-1.224745, -1.0, 0.0, 1.0, 1.224745]),
        # sqrt((9 + 1 + 0 + 1 + 9) / 5) = sqrt(4) = 2
        ("batch", [-1.5, -0.5, 0.0, 0.5, 1.5]),
        ("none", [-3.0, -1.0, 0.0, 1.0, 3.0]),
    ],
)
def test_rescaling_is_as_worked_out_by_hand(scale: A.Scale, expected: list[float]):
    rescaled = A.rescale(np.array([-3.0, -1.0, 0.0, 1.0, 3.0]), np.array([0, 1, 0, 1, 0]), scale)
    np.testing.assert_allclose(rescaled, expected, atol=1e-6)


@given(
    pairs=st.lists(st.tuples(extreme_numbers(), st.integers(0, 4)), min_size=1, max_size=30),
    of_label=st.lists(extreme_numbers(), min_size=5, max_size=5),
)
def test_centred_values_keep_their_order_and_sum_to_zero_and_ties_give_exactly_zero(
    pairs: list[tuple[float, int]], of_label: list[float]
):
    values = np.array([value for value, _ in pairs])
    labels = np.unique([label for _, label in pairs], return_inverse=True)[1]
    centred = A.centre_within(values, labels)
    for label in range(labels.max() + 1):
        own, of_own = values[labels == label], centred[labels == label]
        assert abs(of_own.sum()) <= ROUNDING * np.abs(own).max()
        assert (np.diff(of_own[np.argsort(own)]) >= 0).all()
        if np.ptp(own) > 1e-8 * np.abs(own).max():
            assert of_own.min() < 0 < of_own.max()
    # Equal values are tied, and so are values that differ by their rounding, at any magnitude
    tied = np.array(of_label)[labels]
    rounded = tied * np.where(np.arange(len(values)) % 2, 1.0 + 2.0**-50, 1.0)
    assert not A.centre_within(tied, labels).any() and not A.centre_within(rounded, labels).any()


def test_a_large_common_offset_takes_no_precision_from_the_differences():
    # 1e8 + (0 + 1 + 3) / 3 is not a double, so that subtracting the mean itself would be off in the ninth digit
    centred = A.centre_within(1e8 + np.array([0.0, 1.0, 3.0]), np.array([0, 0, 0]))
    np.testing.assert_allclose(centred, [-4 / 3, -1 / 3, 5 / 3], rtol=1e-14)


# --- advantages within groups: numbers worked out by hand -------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "formula", "expected"),
    [
        # group 0: R = 1 + 2 = 3, 5, 0.5 + 0.5 = 1, mean 3, differences 0, 2, -2; group 1: R = 10, 14, mean 12, -2, 2
        ("none", outcome, [0, -2, 2, 2, -2]),
        # group 0: sqrt((0 + 4 + 4) / 3) = 1.632993, 2 / 1.632993 = 1.224745; group 1: sqrt((4 + 4) / 2) = 2
        ("group", outcome, [0, -1, 1.224745, 1, -1.224745]),
        # sqrt((0 + 4 + 4 + 4 + 4) / 5) = 1.788854, 2 / 1.788854 = 1.118034
        ("batch", outcome, [0, -1.118034, 1.118034, 1.118034, -1.118034]),
        # 3 - (5 + 1) / 2 = 0; 10 - 14 = -4; 5 - (3 + 1) / 2 = 3; 14 - 10 = 4; 1 - (3 + 5) / 2 = -3
        ("none", leave_one_out, [0, -4, 3, 4, -3]),
        # the same over 1.632993 in group 0 and over 2 in group 1
        ("group", leave_one_out, [0, -2, 1.837117, 2, -1.837117]),
        # the same over 1.788854
        ("batch", leave_one_out, [0, -2.236068, 1.677051, 2.236068, -1.677051]),
    ],
)
def test_outcome_advantages_are_as_worked_out_by_hand(scale: A.Scale, formula: Formula, expected: list[float]):
    lengths = np.array([2, 1, 1, 1, 2])
    advantages = formula(Rollout(np.array([1, 2, 10, 5, 14, 0.5, 0.5]), lengths, np.array([0, 1, 0, 1, 0])), scale)
    np.testing.assert_allclose(advantages, np.repeat(expected, lengths), atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # group 0: rewards [1, 5] and [0], mean 2, differences [-1, 3] and [-2], sums from each step on [2, 3] and [-2]
        # group 1: rewards [4] and [6], mean 5, differences [-1] and [1]
        ("none", [2, 3, -1, -2, 1]),
        # group 0: sqrt((1 + 9 + 4) / 3) = 2.160247: 2 / 2.160247 = 0.925820, 3 / 2.160247 = 1.388730; group 1: 1
        ("group", [0.925820, 1.388730, -1, -0.925820, 1]),
        # sqrt((1 + 9 + 4 + 1 + 1) / 5) = 1.788854: 2 / 1.788854 = 1.118034, 3 / ... = 1.677051, 1 / ... = 0.559017
        ("batch", [1.118034, 1.677051, -0.559017, -1.118034, 0.559017]),
    ],
)
def test_process_advantages_are_as_worked_out_by_hand(scale: A.Scale, expected: list[float]):
    rollout = Rollout(np.array([1.0, 5.0, 4.0, 0.0, 6.0]), np.array([2, 1, 1, 1]), np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(process(rollout, scale), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # gamma 0.5, group 0: rewards [1, 4] and [2], G = [1 + 2, 4] and [2], mean 3, differences [0, 1] and [-1]
        # group 1: rewards [2, 2] and [6, 2], G = [2 + 1, 2] and [6 + 1, 2], mean 3.5, [-0.5, -1.5] and [3.5, -1.5]
        ("none", [0, 1, -0.5, -1.5, -1, 3.5, -1.5]),
        # group 0: sqrt(2 / 3) = 0.816497, 1 / 0.816497 = 1.224745
        # group 1: sqrt((0.25 + 2.25 + 12.25 + 2.25) / 4) = sqrt(4.25) = 2.061553
        ("group", [0, 1.224745, -0.242536, -0.727607, -1.224745, 1.697749, -0.727607]),
        # sqrt((2 + 17) / 7) = 1.647509
        ("batch", [0, 0.606977, -0.303488, -0.910465, -0.606977, 2.124419, -0.910465]),
    ],
)
def test_return_to_go_advantages_are_as_worked_out_by_hand(scale: A.Scale, expected: list[float]):
    rollout = Rollout(np.array([1.0, 4, 2, 2, 2, 6, 2]), np.array([2, 2, 1, 2]), np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(return_to_go(rollout, scale, 0.5), expected, atol=1e-6)


STEPWISE = Rollout(np.array([1.0, 4, 8, 7, 2, 2, 1]), np.array([3, 1, 2, 1]), np.array([0, 1, 0, 0]))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # gamma 0.5, group 0: rewards [1, 4, 8], [2, 2], [1], G = [5, 8, 8], [3, 2], [1]; group 1 is a single [7]
        # step 0: 5 - (3 + 1) / 2 = 3, 3 - (5 + 1) / 2 = 0, 1 - (5 + 3) / 2 = -3; step 1: 8 - 2 = 6, 2 - 8 = -6; step 2: alone
        ("none", [3, 6, 0, 0, 0, -6, -3]),
        # sqrt((9 + 36 + 0 + 0 + 36 + 9) / 6) = sqrt(15) = 3.872983
        ("group", [0.774597, 1.549193, 0, 0, 0, -1.549193, -0.774597]),
        # sqrt((9 + 36 + 0 + 0 + 0 + 36 + 9) / 7) = 3.585686
        ("batch", [0.836660, 1.673320, 0, 0, 0, -1.673320, -0.836660]),
    ],
)
def test_stepwise_advantages_are_as_worked_out_by_hand(scale: A.Scale, expected: list[float]):
    np.testing.assert_allclose(stepwise(STEPWISE, scale, 0.5), expected, atol=1e-6)


def test_peers_are_at_the_same_step_of_the_same_group_and_steps_without_one_are_counted():
    # group 0 has steps 0, 1, 2 and group 1 has step 0
    assert A.peers_at_each_step(STEPWISE.lengths, STEPWISE.groups).tolist() == [0, 1, 2, 3, 0, 1, 0]
    # the last step of the longest trajectory, and the only step of the only member of group 1
    assert A.count_steps_without_peer(STEPWISE.lengths, STEPWISE.groups) == 2
    assert A.count_steps_without_peer(np.array([2, 2]), np.array([0, 0])) == 0
    assert A.count_steps_without_peer(np.array([2, 2]), np.array([0, 1])) == 4


# --- advantages within groups: slow, obvious loops --------------------------------------------------------------------


def others_of(i: int, values: list, groups: np.ndarray) -> list:
    return [values[j] for j in range(len(values)) if j != i and groups[j] == groups[i]]


def loop_centre(values: list[list[float]], groups: np.ndarray) -> list[list[float]]:
    means = [statistics.fmean(flat([own, *others_of(i, values, groups)])) for i, own in enumerate(values)]
    return [[value - mean for value in own] for own, mean in zip(values, means, strict=True)]


def loop_scale(values: list[list[float]], centred: list[list[float]], groups: np.ndarray, scale: str) -> list[list[float]]:
    """Divide by the deviation of the centred values."""
    deviations = {
        "none": lambda i: 1.0,
        "batch": lambda i: statistics.pstdev(flat(centred)) + 1e-8,
        "group": lambda i: statistics.pstdev(flat([centred[i], *others_of(i, centred, groups)])) + 1e-8,
    }[scale]
    return [[value / deviations(i) for value in own] for i, own in enumerate(values)]


def loop_outcome(rollout: Rollout, scale: str) -> list[float]:
    centred = loop_centre([[sum(trajectory)] for trajectory in rollout.trajectories], rollout.groups)
    return np.repeat(flat(loop_scale(centred, centred, rollout.groups, scale)), rollout.lengths).tolist()


def loop_leave_one_out(rollout: Rollout, scale: str) -> list[float]:
    sums = [sum(trajectory) for trajectory in rollout.trajectories]
    others = [others_of(i, sums, rollout.groups) for i in range(len(sums))]
    differences = [[own - statistics.fmean(rest) if rest else 0.0] for own, rest in zip(sums, others, strict=True)]
    centred = loop_centre([[value] for value in sums], rollout.groups)
    return np.repeat(flat(loop_scale(differences, centred, rollout.groups, scale)), rollout.lengths).tolist()


def loop_process(rollout: Rollout, scale: str) -> list[float]:
    centred = loop_centre(rollout.trajectories, rollout.groups)
    normalised = loop_scale(centred, centred, rollout.groups, scale)
    return flat([loop_returns(steps, 1.0) for steps in normalised])


def loop_return_to_go(rollout: Rollout, scale: str) -> list[float]:
    centred = loop_centre([loop_returns(trajectory, GAMMA) for trajectory in rollout.trajectories], rollout.groups)
    return flat(loop_scale(centred, centred, rollout.groups, scale))


def loop_stepwise(rollout: Rollout, scale: str) -> list[float]:
    returns = [loop_returns(trajectory, GAMMA) for trajectory in rollout.trajectories]
    differences: list[list[float]] = []
    for i, own in enumerate(returns):
        differences.append([])
        for t, value in enumerate(own):
            running = [other[t] for other in others_of(i, returns, rollout.groups) if len(other) > t]
            differences[i].append(value - statistics.fmean(running) if running else 0.0)
    return flat(loop_scale(differences, differences, rollout.groups, scale))


@BY_SCALE
@pytest.mark.parametrize(
    ("formula", "loop"),
    [
        (outcome, loop_outcome),
        (leave_one_out, loop_leave_one_out),
        (process, loop_process),
        (return_to_go, loop_return_to_go),
        (stepwise, loop_stepwise),
    ],
)
def test_advantages_equal_a_loop(formula: Formula, loop: Callable[[Rollout, str], list[float]], scale: A.Scale):
    for seed in SEEDS:
        rollout = draw_rollout(seed)
        np.testing.assert_allclose(formula(rollout, scale), loop(rollout, scale), rtol=1e-9, atol=1e-9)


# --- advantages within groups: what holds for any rollout -------------------------------------------------------------


@ALL_FORMULAS
@given(scale=scales, rollout=extreme_rollouts(), gamma=gammas, data=st.data())
def test_advantages_are_finite_follow_the_sign_of_the_rewards_and_ignore_names_and_order(
    formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float, data: st.DataObject
):
    rewards, lengths, groups = rollout
    advantages = formula(rollout, scale, gamma)
    assert advantages.shape == rewards.shape and advantages.dtype == np.float64 and np.isfinite(advantages).all()
    np.testing.assert_array_equal(formula(rollout._replace(rewards=-rewards), scale, gamma), -advantages)
    names = np.array(data.draw(st.permutations(range(int(groups.max()) + 1))))
    np.testing.assert_array_equal(formula(rollout._replace(groups=names[groups]), scale, gamma), advantages)
    order = data.draw(st.permutations(range(len(lengths))))
    shuffled = Rollout(np.array(flat([rollout.trajectories[i] for i in order])), lengths[order], groups[order])
    expected = flat([split(advantages, lengths)[i] for i in order])
    # What two ways to take a sum leave is blown up where a spread is the smallest that is no tie
    atol = 1e-12 * float(np.abs(rewards).sum()) + 1e-300 if scale == "none" else 1e-5
    np.testing.assert_allclose(formula(shuffled, scale, gamma), expected, rtol=1e-9, atol=atol)


@FORMULAS_ACROSS_MEMBERS
@given(scale=scales, tied=tied_rollouts(), rollout=extreme_rollouts(), gamma=gammas)
def test_members_that_are_tied_or_alone_get_exactly_zero(
    formula: Formula, scale: A.Scale, tied: Rollout, rollout: Rollout, gamma: float
):
    assert not formula(tied, scale, gamma).any()
    is_alone = (np.bincount(rollout.groups) == 1)[rollout.step_groups]
    assert not formula(rollout, scale, gamma)[is_alone].any()


@BY_SCALE
@ALL_FORMULAS
def test_a_tied_group_gets_exactly_zero_beside_one_that_is_not(formula: Formula, scale: A.Scale):
    # Neither means nor sums of 0.1 are exact
    rewards, groups = np.array([0.1, 0.2, 0.1, 0.1, 0.1, 0.7]), np.array([0, 1, 0, 0, 0, 1])
    for magnitude in (1e-30, 1.0, 1e30):
        advantages = formula(Rollout(magnitude * rewards, np.ones(6, dtype=np.int64), groups), scale)
        assert not advantages[[0, 2, 3, 4]].any()
        assert (advantages[[1, 5]] * [-1, 1] > 0).all()


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param(2.0**40 * np.array([0.1, 0.2, 0.3]), id="large"),
        # 0.1 + 0.2 - 0.3 is not zero, and depends on the order
        pytest.param(2.0**40 * np.array([0.1, 0.2, -0.3]), id="cancelling"),
        pytest.param(np.array([0.1, 0.2, 0.3, 0.7], dtype=np.float32) * np.float32(3), id="single precision"),
    ],
)
def test_rounding_is_not_blown_up_as_it_is_by_the_naive_formula(rewards: np.ndarray):
    zero = rewards.dtype.type(0)
    sums = np.array([sum(rewards, zero), sum(rewards[::-1], zero)])
    naive = (sums - sums.mean()) / (sums.std() + rewards.dtype.type(1e-8))
    assert np.abs(naive).max() > 0.7
    both = Rollout(np.append(rewards, rewards[::-1]), np.full(2, len(rewards)), np.array([0, 0]))
    assert not outcome(both, "group").any()


# --- the whole update -------------------------------------------------------------------------------------------------


def test_whitened_advantages_are_as_worked_out_by_hand():
    # mean 3, differences -2, -1, 3, deviation sqrt((4 + 1 + 9) / 3) = 2.160247
    np.testing.assert_allclose(A.whiten(np.array([1.0, 2.0, 6.0])), [-0.925820, -0.462910, 1.388730], atol=1e-6)


@pytest.mark.parametrize("advantages", [[0.0] * 4, [0.1] * 7, [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], [3.0], []])
def test_whitening_advantages_that_are_all_equal_gives_exactly_zero(advantages: list[float]):
    assert A.whiten(1e12 * np.array(advantages)).tolist() == [0.0] * len(advantages)


@given(st.lists(extreme_numbers(), min_size=1, max_size=50))
def test_whitened_advantages_keep_their_order_have_no_mean_and_at_most_unit_deviation(values: list[float]):
    whitened = A.whiten(np.array(values))
    assert abs(whitened.mean()) <= 1e-5 and whitened.std() <= 1.0 + ROUNDING
    assert (np.diff(whitened[np.argsort(values)]) >= 0).all()


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
def test_explained_variance_is_as_worked_out_by_hand(predictions: list[float], expected: float):
    explained = A.explained_variance(np.array(predictions), np.array([1.0, 2.0, 3.0, 6.0]))
    assert explained == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("targets", [[0.0] * 3, [0.1] * 7, [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]])
def test_explained_variance_of_targets_that_do_not_vary_is_undefined(targets: list[float]):
    assert math.isnan(A.explained_variance(np.arange(float(len(targets))), np.array(targets)))
