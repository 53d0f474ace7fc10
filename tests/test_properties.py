"""What holds for any rollout, any log-ratio and any features: properties, tried on cases that hypothesis makes up."""

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch as th
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
)

from sb3_grpo import advantages as A
from sb3_grpo import losses
from sb3_grpo.kernel import KernelBaseline, RidgeStatistics, fourier_features, predict_by_fold, ridge_weights

# The same cases in every run, and no clock: a test that depends on either fails on a busy machine for no fault of the code.
# The fixture of conftest runs once for all cases of a test; nothing here draws from the global state that it seeds.
settings.register_profile(
    "properties",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("properties")

SCALES: list[A.Scale] = ["group", "batch", "none"]
BY_SCALE = pytest.mark.parametrize("scale", [pytest.param(scale, id=f"scale {scale}") for scale in SCALES])
# What one trajectory returns to the other by rounding; a spread of TIE_TOLERANCE, the smallest there is, blows it up
ROUNDING, SCALED_ROUNDING = 1e-12, 1e-5

Formula = Callable[..., np.ndarray]
Shape = tuple[np.ndarray, np.ndarray]
Labelled = tuple[np.ndarray, np.ndarray]


class Rollout(NamedTuple):
    rewards: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray


# --- made-up cases ----------------------------------------------------------------------------------------------------


def extreme_numbers() -> st.SearchStrategy[float]:
    """Numbers of either sign from 1e-30 to 1e30, and zero."""
    magnitudes = st.one_of(st.floats(1e-30, 1e30), st.integers(-30, 30).map(lambda exponent: 10.0**exponent))
    return st.one_of(
        st.just(0.0), st.builds(lambda sign, magnitude: sign * magnitude, st.sampled_from([-1.0, 1.0]), magnitudes)
    )


def finite_numbers(largest: float) -> st.SearchStrategy[float]:
    """Numbers up to a largest magnitude, none of them so small that products of them lose their digits."""
    return st.floats(-largest, largest, allow_subnormal=False)


def tensor(values: object) -> th.Tensor:
    return th.as_tensor(values, dtype=th.float64)


@st.composite
def shapes(draw: st.DrawFn, max_members: int = 8, max_length: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and groups of some trajectories, of one member and of one step at the least, in no order."""
    members = draw(st.lists(st.tuples(st.integers(1, max_length), st.integers(0, 3)), min_size=1, max_size=max_members))
    lengths, names = np.array(members).T
    return lengths, np.unique(names, return_inverse=True)[1]


@st.composite
def extreme_rollouts(draw: st.DrawFn) -> Rollout:
    """Rewards of any magnitude: each of its own, all of the same, all alike or alike with alternating signs."""
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
def exact_rollouts(draw: st.DrawFn) -> Rollout:
    """Whole rewards, so that no sum of them is rounded, in a unit beside which the epsilon of a division is nothing."""
    lengths, groups = draw(shapes())
    n = int(lengths.sum())
    return Rollout(1024.0 * np.array(draw(st.lists(st.integers(-50, 50), min_size=n, max_size=n))), lengths, groups)


@st.composite
def tied_rollouts(draw: st.DrawFn) -> Rollout:
    """All members of a group have the same rewards as the others."""
    by_group = draw(st.lists(st.lists(extreme_numbers(), min_size=1, max_size=5), min_size=1, max_size=3))
    extra = draw(st.lists(st.integers(0, len(by_group) - 1), max_size=6))
    groups = np.array(draw(st.permutations([*range(len(by_group)), *extra])))
    rewards = np.concatenate([by_group[group] for group in groups])
    return Rollout(rewards, np.array([len(by_group[group]) for group in groups]), groups)


@st.composite
def labelled(draw: st.DrawFn, numbers: st.SearchStrategy[float]) -> tuple[np.ndarray, np.ndarray]:
    """Values, and labels from zero on, each of them used."""
    pairs = draw(st.lists(st.tuples(numbers, st.integers(0, 4)), min_size=1, max_size=30))
    return np.array([value for value, _ in pairs]), np.unique([label for _, label in pairs], return_inverse=True)[1]


def scales() -> st.SearchStrategy[A.Scale]:
    return st.sampled_from(SCALES)


def discounts() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.5, 0.75, 1.0])


def in_order(rollout: Rollout, order: np.ndarray) -> Rollout:
    """The same members in another order."""
    return Rollout(flat_in_order(rollout.rewards, rollout.lengths, order), rollout.lengths[order], rollout.groups[order])


def flat_in_order(values: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    parts = np.split(values, np.cumsum(lengths)[:-1])
    return np.concatenate([parts[i] for i in order])


def orders_of(rollout: Rollout, data: st.DataObject) -> np.ndarray:
    return np.array(data.draw(st.permutations(range(len(rollout.lengths)))))


def outcome(rollout: Rollout, scale: A.Scale, gamma: float) -> np.ndarray:
    return A.outcome_advantages(*rollout, scale)


def leave_one_out(rollout: Rollout, scale: A.Scale, gamma: float) -> np.ndarray:
    return A.outcome_advantages(*rollout, scale, leave_one_out=True)


def process(rollout: Rollout, scale: A.Scale, gamma: float) -> np.ndarray:
    return A.process_advantages(*rollout, scale)


def return_to_go(rollout: Rollout, scale: A.Scale, gamma: float) -> np.ndarray:
    return A.return_to_go_advantages(*rollout, gamma, scale)


def stepwise(rollout: Rollout, scale: A.Scale, gamma: float) -> np.ndarray:
    return A.stepwise_advantages(*rollout, gamma, scale)


def formulas(*which: Formula) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("formula", [pytest.param(formula, id=formula.__name__) for formula in which])


ALL_FORMULAS = formulas(outcome, leave_one_out, process, return_to_go, stepwise)


def rounding_of(rewards: np.ndarray, scale: A.Scale) -> float:
    """By how much two ways to take the same sums may differ."""
    return ROUNDING * (1e-30 + float(np.abs(rewards).sum())) if scale == "none" else SCALED_ROUNDING


# --- trajectories -----------------------------------------------------------------------------------------------------


def loop_recurrence(inputs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    y = np.append(np.zeros(len(inputs)), 0.0)
    for t in reversed(range(len(inputs))):
        y[t] = inputs[t] + (coefficients[t] * y[t + 1] if t + 1 < len(inputs) else 0.0)
    return y[:-1]


@given(st.lists(st.tuples(extreme_numbers(), st.one_of(st.just(0.0), st.floats(-2.0, 2.0))), max_size=40))
def test_linear_recurrence_equals_a_plain_loop(terms: list[tuple[float, float]]):
    x, a = np.array([term[0] for term in terms]), np.array([term[1] for term in terms])
    # Terms that cancel leave the rounding of what they were
    tolerance = ROUNDING * loop_recurrence(np.abs(x), np.abs(a)) + 1e-300
    assert (np.abs(A.linear_recurrence(x, a) - loop_recurrence(x, a)) <= tolerance).all()


@given(extreme_rollouts(), st.floats(0.0, 1.0))
def test_discounted_returns_equal_a_plain_loop_within_each_trajectory(rollout: Rollout, gamma: float):
    rewards, lengths, _ = rollout
    parts = np.split(rewards, np.cumsum(lengths)[:-1])
    expected = np.concatenate([loop_recurrence(part, np.full(len(part), gamma)) for part in parts])
    magnitude = np.concatenate([loop_recurrence(np.abs(part), np.full(len(part), gamma)) for part in parts])
    assert (np.abs(A.discounted_returns(rewards, lengths, gamma) - expected) <= ROUNDING * magnitude + 1e-300).all()


@given(st.data(), shapes(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_generalized_advantages_equal_a_plain_loop(data: st.DataObject, shape: Shape, gamma: float, gae_lambda: float):
    lengths, _ = shape
    n = int(lengths.sum())
    rewards, baseline, next_baseline = np.array(
        data.draw(st.lists(extreme_numbers(), min_size=3 * n, max_size=3 * n))
    ).reshape(3, n)
    continues = A.same_trajectory_continues(lengths)
    advantages = A.generalized_advantages(rewards, baseline, next_baseline, continues, gamma, gae_lambda)
    expected, magnitude = 0.0, 0.0
    for t in reversed(range(n)):
        expected = rewards[t] + gamma * next_baseline[t] - baseline[t] + gamma * gae_lambda * continues[t] * expected
        magnitude = abs(rewards[t]) + abs(next_baseline[t]) + abs(baseline[t]) + gamma * gae_lambda * continues[t] * magnitude
        assert abs(advantages[t] - expected) <= ROUNDING * magnitude


@given(shapes(max_members=20, max_length=12))
def test_steps_count_up_until_a_trajectory_does_not_continue(shape: Shape):
    lengths, _ = shape
    steps, continues = A.steps_within_trajectories(lengths), A.same_trajectory_continues(lengths)
    assert steps[0] == 0
    np.testing.assert_array_equal(steps[1:], np.where(continues[:-1] == 1.0, steps[:-1] + 1, 0))
    np.testing.assert_array_equal(steps[continues == 0.0] + 1, lengths)
    assert set(continues) <= {0.0, 1.0}


@given(labelled(st.integers(-1000, 1000).map(float)))
def test_sums_by_label_are_those_of_the_values_picked_out_and_add_up(case: Labelled):
    values, labels = case
    sums = A.sum_by_label(values, labels)
    assert sums.tolist() == [values[labels == label].sum() for label in range(labels.max() + 1)]
    assert sums.sum() == values.sum()


@given(
    st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(extreme_numbers()), st.lists(st.text("ab", max_size=2))
    ).filter(len)
)
def test_labels_by_appearance_give_back_the_values_and_are_new_only_as_the_next_integer(values: list[Any]):
    array = np.array(values)
    labels = A.label_by_appearance(array)
    _, firsts = np.unique(labels, return_index=True)
    np.testing.assert_array_equal(array[firsts][labels], array)
    assert len(firsts) == len(np.unique(array))
    # A label is one more than any before it where it appears for the first time
    highest = np.maximum.accumulate(labels)
    np.testing.assert_array_equal(np.diff(highest, prepend=-1) == 1, np.isin(np.arange(len(labels)), firsts))
    assert (np.diff(highest, prepend=-1) <= 1).all()


@given(st.data(), shapes(max_members=20, max_length=12), st.integers(1, 60))
def test_dealing_trajectories_takes_every_transition_once_and_no_trajectory_apart(
    data: st.DataObject, shape: Shape, batch_size: int
):
    lengths, _ = shape
    m = len(lengths)
    trajectories = np.array(data.draw(st.permutations(np.repeat(np.arange(m), lengths).tolist())))
    order = np.array(data.draw(st.permutations(range(m))))
    batches = A.deal_trajectories(trajectories, order, batch_size)
    dealt = np.concatenate(batches)
    assert sorted(dealt) == list(range(len(trajectories)))
    # One trajectory after the other as ordered, its transitions as they came
    np.testing.assert_array_equal(trajectories[dealt], np.repeat(order, lengths[order]))
    assert all((np.diff(dealt[trajectories[dealt] == i]) > 0).all() for i in range(m))
    # No minibatch begins within a trajectory, and each but the last is full with its last trajectory and not before
    begins = np.cumsum([len(batch) for batch in batches])[:-1]
    assert all(trajectories[dealt[begin - 1]] != trajectories[dealt[begin]] for begin in begins)
    assert all(len(batch) >= batch_size > len(batch) - lengths[trajectories[batch[-1]]] for batch in batches[:-1])
    assert 0 < len(batches[-1]) < batch_size + lengths[trajectories[batches[-1][-1]]]


# --- centring and scaling ---------------------------------------------------------------------------------------------


@given(labelled(extreme_numbers()))
def test_centred_values_are_finite_keep_their_order_and_have_no_mean(case: Labelled):
    values, labels = case
    centred = A.centre_within(values, labels)
    assert np.isfinite(centred).all()
    for label in range(labels.max() + 1):
        own, of_own = values[labels == label], centred[labels == label]
        assert abs(of_own.sum()) <= ROUNDING * np.abs(own).max()
        assert (np.diff(of_own[np.argsort(own)]) >= 0).all()
        if np.ptp(own) > 1e-8 * np.abs(own).max():
            assert of_own.min() < 0 < of_own.max()


@given(labelled(extreme_numbers()), st.data())
def test_values_that_are_tied_by_label_are_centred_to_exactly_zero(case: Labelled, data: st.DataObject):
    values, labels = case
    of_label = np.array(data.draw(st.lists(extreme_numbers(), min_size=5, max_size=5)))
    np.testing.assert_array_equal(A.centre_within(of_label[labels], labels), np.zeros(len(values)))
    # Rounding is no merit, at any magnitude
    rounded = of_label[labels] * np.where(np.arange(len(values)) % 2, 1.0 + 2.0**-50, 1.0)
    np.testing.assert_array_equal(A.centre_within(rounded, labels), np.zeros(len(values)))


@given(labelled(extreme_numbers()), st.integers(-60, 60))
def test_centring_commutes_with_a_change_of_unit(case: Labelled, exponent: int):
    values, labels = case
    # Powers of two scale without rounding
    np.testing.assert_array_equal(
        A.centre_within(2.0**exponent * values, labels), 2.0**exponent * A.centre_within(values, labels)
    )


@given(labelled(st.integers(-100, 100).map(float)), st.lists(st.integers(-1000, 1000), min_size=5, max_size=5))
def test_centring_takes_away_what_is_common_to_a_label(case: Labelled, shifts: list[int]):
    values, labels = case
    shifted = values + np.array(shifts)[labels]
    np.testing.assert_array_equal(A.centre_within(shifted, labels), A.centre_within(values, labels))


@given(labelled(extreme_numbers()))
def test_the_leave_one_out_factor_turns_the_mean_into_that_of_the_others(case: Labelled):
    values, labels = case
    differences = A.centre_within(values, labels) * A.leave_one_out_factor(labels)
    for i in range(len(values)):
        others = values[(labels == labels[i]) & (np.arange(len(values)) != i)]
        expected = values[i] - math.fsum(others) / len(others) if len(others) else 0.0
        assert len(others) or A.leave_one_out_factor(labels)[i] == 0.0
        # A tie is one up to TIE_TOLERANCE
        assert abs(differences[i] - expected) <= 2 * A.TIE_TOLERANCE * np.abs(values[labels == labels[i]]).max()


@BY_SCALE
@given(case=labelled(st.one_of(finite_numbers(9.0), extreme_numbers())))
def test_rescaling_is_finite_keeps_signs_and_leaves_no_deviation_above_one(case: Labelled, scale: A.Scale):
    values, labels = case
    centred = A.centre_within(values, labels)
    rescaled = A.rescale(centred, labels, scale)
    assert np.isfinite(rescaled).all()
    np.testing.assert_array_equal(np.sign(rescaled), np.sign(centred))
    if scale == "none":
        np.testing.assert_array_equal(rescaled, centred)
    else:
        parts = [labels >= 0] if scale == "batch" else [labels == label for label in range(labels.max() + 1)]
        for part in parts:
            deviation, before = np.sqrt(np.mean(rescaled[part] ** 2)), np.sqrt(np.mean(centred[part] ** 2))
            assert deviation <= 1.0 + ROUNDING
            assert deviation == pytest.approx(before / (before + A.EPS), rel=1e-9)


# --- advantages within groups -----------------------------------------------------------------------------------------


@ALL_FORMULAS
@given(scale=scales(), rollout=extreme_rollouts(), gamma=discounts())
def test_advantages_are_finite_whatever_the_rewards(formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float):
    advantages = formula(rollout, scale, gamma)
    assert advantages.shape == rollout.rewards.shape and advantages.dtype == np.float64
    assert np.isfinite(advantages).all()


@formulas(outcome, leave_one_out, stepwise)
@given(scale=scales(), rollout=tied_rollouts(), gamma=discounts())
def test_groups_whose_members_are_tied_get_exactly_zero(formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float):
    np.testing.assert_array_equal(formula(rollout, scale, gamma), np.zeros(len(rollout.rewards)))


@ALL_FORMULAS
@given(scale=scales(), shape=shapes(), rewards=st.lists(extreme_numbers(), min_size=4, max_size=4), gamma=discounts())
def test_groups_of_tied_steps_get_exactly_zero(
    formula: Formula, scale: A.Scale, shape: Shape, rewards: list[float], gamma: float
):
    # Where each step pays the same, a longer trajectory still returns more: other formulas are given one step
    lengths, groups = shape
    if formula is not process:
        lengths = np.ones_like(lengths)
    rollout = Rollout(np.repeat(np.array(rewards)[groups], lengths), lengths, groups)
    np.testing.assert_array_equal(formula(rollout, scale, gamma), np.zeros(len(rollout.rewards)))


@formulas(outcome, leave_one_out, stepwise)
@given(scale=scales(), rollout=extreme_rollouts(), gamma=discounts())
def test_a_member_left_alone_gets_exactly_zero(formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float):
    alone = (np.bincount(rollout.groups) == 1)[np.repeat(rollout.groups, rollout.lengths)]
    np.testing.assert_array_equal(formula(rollout, scale, gamma)[alone], 0.0)


def reorderings(rewards: list[float]) -> Rollout:
    """Two members with the same rewards, the second with its last reward first."""
    return Rollout(np.array([*rewards, rewards[-1], *rewards[:-1]]), np.full(2, len(rewards)), np.zeros(2, dtype=np.int64))


@given(
    scale=scales(),
    rewards=st.lists(st.one_of(st.floats(1e-30, 1e30), st.floats(0.1, 10.0)), min_size=1, max_size=50),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_members_that_gained_the_same_in_another_order_are_tied(scale: A.Scale, rewards: list[float], sign: float):
    rollout = reorderings([sign * reward for reward in rewards])
    np.testing.assert_array_equal(outcome(rollout, scale, 1.0), np.zeros(len(rollout.rewards)))


def test_members_that_gained_the_same_in_another_order_are_tied_even_where_the_rewards_cancel():
    # 2^40 (0.1 + 0.2 - 0.3) is 3e-5 one way and 6e-5 the other: far above EPS, so that the advantages are -1 and 1
    rollout = reorderings([2.0**40 * reward for reward in (0.1, 0.2, -0.3)])
    np.testing.assert_array_equal(outcome(rollout, "group", 1.0), np.zeros(6))


@ALL_FORMULAS
@given(scale=scales(), rollout=extreme_rollouts(), gamma=discounts(), data=st.data())
def test_another_order_of_the_members_only_reorders_their_advantages(
    formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float, data: st.DataObject
):
    order = orders_of(rollout, data)
    expected = flat_in_order(formula(rollout, scale, gamma), rollout.lengths, order)
    reordered = formula(in_order(rollout, order), scale, gamma)
    np.testing.assert_allclose(reordered, expected, rtol=1e-9, atol=rounding_of(rollout.rewards, scale))


@ALL_FORMULAS
@given(scale=scales(), rollout=extreme_rollouts(), gamma=discounts(), data=st.data())
def test_the_number_that_a_group_goes_by_changes_nothing(
    formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float, data: st.DataObject
):
    names = np.array(data.draw(st.permutations(range(int(rollout.groups.max()) + 1))))
    renamed = rollout._replace(groups=names[rollout.groups])
    np.testing.assert_array_equal(formula(renamed, scale, gamma), formula(rollout, scale, gamma))


@ALL_FORMULAS
@given(scale=scales(), rollout=exact_rollouts(), gamma=discounts(), exponent=st.integers(0, 60))
def test_a_larger_unit_of_reward_scales_unscaled_advantages_and_no_others(
    formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float, exponent: int
):
    factor = 2.0**exponent
    before, after = (formula(rollout._replace(rewards=unit * rollout.rewards), scale, gamma) for unit in (1.0, factor))
    if scale == "none":
        # Powers of two scale without rounding
        np.testing.assert_array_equal(after, factor * before)
    else:
        np.testing.assert_allclose(after, before, rtol=SCALED_ROUNDING, atol=1e-9)


@ALL_FORMULAS
@given(scale=scales(), rollout=extreme_rollouts(), gamma=discounts())
def test_rewards_of_the_opposite_sign_give_advantages_of_the_opposite_sign(
    formula: Formula, scale: A.Scale, rollout: Rollout, gamma: float
):
    opposite = rollout._replace(rewards=-rollout.rewards)
    np.testing.assert_array_equal(formula(opposite, scale, gamma), -formula(rollout, scale, gamma))


GAINS = st.lists(st.integers(-1000, 1000), min_size=4, max_size=4).map(lambda gains: 1024.0 * np.array(gains))


def gained_at(rollout: Rollout, step: str, gains: np.ndarray) -> Rollout:
    """What each member gains more, by group: at its first step, at its last or at every one."""
    rewards, ends = rollout.rewards.copy(), np.cumsum(rollout.lengths)
    if step == "every":
        rewards += np.repeat(gains[rollout.groups], rollout.lengths)
    else:
        rewards[ends - rollout.lengths if step == "first" else ends - 1] += gains[rollout.groups]
    return rollout._replace(rewards=rewards)


@pytest.mark.parametrize(
    ("formula", "step", "gamma"),
    [
        pytest.param(outcome, "first", 0.0, id="outcome: at the first step"),
        pytest.param(outcome, "last", 0.0, id="outcome: at the last step"),
        pytest.param(leave_one_out, "first", 0.0, id="leave_one_out: at the first step"),
        pytest.param(leave_one_out, "last", 0.0, id="leave_one_out: at the last step"),
        pytest.param(process, "every", 0.0, id="process: at every step"),
        # Undiscounted, all returns-to-go change by the gain at the end
        pytest.param(return_to_go, "last", 1.0, id="return_to_go: at the last step, undiscounted"),
        pytest.param(stepwise, "last", 1.0, id="stepwise: at the last step, undiscounted"),
        # No return but the first contains the gain, and peers are at the same step
        pytest.param(stepwise, "first", 0.75, id="stepwise: at the first step"),
    ],
)
@given(scale=scales(), rollout=exact_rollouts(), gains=GAINS)
def test_what_all_members_of_a_group_gain_gives_none_an_advantage(
    formula: Formula, step: str, gamma: float, scale: A.Scale, rollout: Rollout, gains: np.ndarray
):
    before, after = (formula(r, scale, gamma) for r in (rollout, gained_at(rollout, step, gains)))
    np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-9)


@given(scale=scales(), rollout=extreme_rollouts())
def test_outcome_advantages_follow_the_returns_of_the_group(scale: A.Scale, rollout: Rollout):
    rewards, lengths, groups = rollout
    firsts = np.cumsum(lengths) - lengths
    returns = np.add.reduceat(rewards, firsts)
    advantages = outcome(rollout, scale, 1.0)
    np.testing.assert_array_equal(advantages, np.repeat(advantages[firsts], lengths))
    for group in range(groups.max() + 1):
        ranked = advantages[firsts][groups == group][np.argsort(returns[groups == group])]
        assert (np.diff(ranked) >= 0).all()


@formulas(outcome, leave_one_out)
@given(rollout=extreme_rollouts())
def test_one_outcome_in_a_group_of_k_is_never_more_than_the_root_of_k_less_one_deviations_off(
    formula: Formula, rollout: Rollout
):
    # Samuelson's inequality; compared with the others, the distance is k / (k - 1) as large
    k = np.repeat(np.bincount(rollout.groups)[rollout.groups], rollout.lengths)
    bound = np.sqrt(k - 1) * (1.0 if formula is outcome else k / np.maximum(k - 1, 1))
    assert (np.abs(formula(rollout, "group", 1.0)) <= bound + SCALED_ROUNDING).all()


@ALL_FORMULAS
@given(scale=st.sampled_from(["group", "none"]), rollout=exact_rollouts(), data=st.data(), gamma=discounts())
def test_what_other_groups_gain_has_no_influence(
    formula: Formula, scale: A.Scale, rollout: Rollout, data: st.DataObject, gamma: float
):
    own = np.repeat(rollout.groups, rollout.lengths) == 0
    others = data.draw(st.lists(extreme_numbers(), min_size=len(own), max_size=len(own)))
    changed = rollout._replace(rewards=np.where(own, rollout.rewards, others))
    before, after = (formula(r, scale, gamma)[own] for r in (rollout, changed))
    np.testing.assert_array_equal(after, before)


@given(scale=scales(), rollout=exact_rollouts())
def test_process_advantages_of_first_steps_add_up_to_zero(scale: A.Scale, rollout: Rollout):
    # They are the sums of all normalised rewards, the mean of which is zero in each group
    firsts = np.cumsum(rollout.lengths) - rollout.lengths
    sums = A.sum_by_label(process(rollout, scale, 1.0)[firsts], rollout.groups)
    np.testing.assert_allclose(sums, 0.0, atol=rounding_of(rollout.rewards, scale))


@pytest.mark.parametrize("magnitude", [pytest.param(10.0**e, id=f"1e{e}") for e in (-30, 0, 30)])
@ALL_FORMULAS
@settings(max_examples=1)
@given(scale=scales(), seed=st.integers(0, 2**32 - 1))
def test_thousands_of_groups_are_those_of_each_alone(formula: Formula, magnitude: float, scale: A.Scale, seed: int):
    rng = np.random.default_rng(seed)
    n_groups = 3000
    groups = rng.permutation(np.append(np.arange(n_groups), rng.integers(0, n_groups, size=2 * n_groups)))
    lengths = rng.integers(1, 5, size=len(groups))
    rollout = Rollout(magnitude * rng.integers(-3, 4, size=lengths.sum()), lengths, groups)
    advantages = formula(rollout, scale, 0.75)
    assert np.isfinite(advantages).all()
    if scale != "batch":
        for group in rng.integers(0, n_groups, size=5):
            members = groups == group
            own = np.repeat(members, lengths)
            alone = Rollout(rollout.rewards[own], lengths[members], np.zeros(members.sum(), dtype=np.int64))
            np.testing.assert_array_equal(advantages[own], formula(alone, scale, 0.75))


@given(shapes(max_members=20, max_length=12))
def test_peers_are_those_at_the_same_step_of_the_same_group_and_no_label_is_left_out(shape: Shape):
    lengths, groups = shape
    labels = A.peers_at_each_step(lengths, groups)
    places = [(group, t) for length, group in zip(lengths, groups, strict=True) for t in range(length)]
    assert len(set(zip(labels, places, strict=True))) == len(set(labels)) == len(set(places))
    assert set(labels) == set(range(labels.max() + 1))
    assert A.count_steps_without_peer(lengths, groups) == sum(count == 1 for count in Counter(places).values())


@formulas(outcome, stepwise, return_to_go)
@given(rollout=exact_rollouts(), gamma=discounts())
def test_a_group_is_scaled_by_the_deviation_of_all_it_compares(formula: Formula, rollout: Rollout, gamma: float):
    unscaled, scaled = (formula(rollout, scale, gamma) for scale in ("none", "group"))
    firsts = np.cumsum(rollout.lengths) - rollout.lengths
    # Outcomes are compared by trajectory, what is compared at each step by transition
    compared = firsts if formula is outcome else np.arange(len(unscaled))
    labels = np.repeat(rollout.groups, rollout.lengths)
    for group in range(rollout.groups.max() + 1):
        deviation = unscaled[compared][labels[compared] == group].std()
        own = labels == group
        np.testing.assert_allclose(scaled[own] * deviation, unscaled[own], rtol=SCALED_ROUNDING, atol=1e-9)


@given(rollout=extreme_rollouts(), gamma=discounts())
def test_a_step_without_a_peer_gets_exactly_zero(rollout: Rollout, gamma: float):
    labels = A.peers_at_each_step(rollout.lengths, rollout.groups)
    alone = (np.bincount(labels) == 1)[labels]
    assert alone.sum() == A.count_steps_without_peer(rollout.lengths, rollout.groups)
    np.testing.assert_array_equal(stepwise(rollout, "group", gamma)[alone], 0.0)


# --- the whole update -------------------------------------------------------------------------------------------------


@given(st.lists(extreme_numbers(), min_size=1, max_size=50))
def test_whitened_advantages_have_no_mean_at_most_unit_deviation_and_their_order(values: list[float]):
    advantages = np.array(values)
    whitened = A.whiten(advantages)
    assert np.isfinite(whitened).all()
    assert abs(whitened.mean()) <= SCALED_ROUNDING and whitened.std() <= 1.0 + ROUNDING
    assert (np.diff(whitened[np.argsort(advantages)]) >= 0).all()


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=50), st.integers(-1000, 1000), st.integers(0, 60))
def test_whitening_knows_neither_unit_nor_origin(values: list[int], shift: int, exponent: int):
    advantages = 1024.0 * np.array(values)
    whitened = A.whiten(2.0**exponent * (advantages + 1024.0 * shift))
    np.testing.assert_allclose(whitened, A.whiten(advantages), rtol=1e-9, atol=1e-300)


@given(st.lists(st.tuples(extreme_numbers(), extreme_numbers()), min_size=1, max_size=30))
def test_explained_variance_is_at_most_one_and_undefined_only_where_targets_do_not_vary(pairs: list[tuple[float, float]]):
    predictions, targets = np.array(pairs).T
    explained = A.explained_variance(predictions, targets)
    varies = np.ptp(targets) > A.TIE_TOLERANCE * np.abs(targets).max()
    assert math.isnan(explained) != varies
    if varies:
        assert -math.inf < explained <= 1.0
        assert A.explained_variance(targets, targets) == 1.0
        assert A.explained_variance(np.zeros_like(targets), targets) == pytest.approx(0.0, abs=1e-6)


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=2, max_size=30), st.integers(-9, 9))
def test_explained_variance_knows_neither_unit_nor_what_predictions_are_off_by_in_common(
    pairs: list[tuple[float, float]], shift: int
):
    predictions, targets = np.array(pairs, dtype=np.float64).T
    assume(np.ptp(targets) > 0)
    explained = A.explained_variance(predictions, targets)
    assert A.explained_variance(8.0 * (predictions + shift), 8.0 * targets) == pytest.approx(explained, rel=1e-9, abs=1e-9)


# --- importance ratios ------------------------------------------------------------------------------------------------

BOTH_DTYPES = pytest.mark.parametrize("dtype", [pytest.param(th.float32, id="single"), pytest.param(th.float64, id="double")])


class Update(NamedTuple):
    """What a surrogate is given, with its options."""

    log_ratio: list[float]
    advantages: list[float]
    clip_range: float
    clip_range_high: float | None
    dual_clip: float | None

    def tensors(self, dtype: th.dtype) -> tuple[th.Tensor, th.Tensor]:
        return th.tensor(self.log_ratio, dtype=dtype, requires_grad=True), th.tensor(self.advantages, dtype=dtype)

    def options(self) -> dict[str, Any]:
        return {"clip_range_high": self.clip_range_high, "dual_clip": self.dual_clip}

    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


def log_ratios(largest: float) -> st.SearchStrategy[float]:
    """Close to zero, at the edge of the clamp and far beyond."""
    edge = losses.MAX_LOG_RATIO
    return st.one_of(
        st.floats(-1.0, 1.0, width=32), st.sampled_from([-edge, edge, -largest, largest]), finite_numbers(largest)
    )


@st.composite
def updates(draw: st.DrawFn) -> Update:
    # Single precision ends at 3.4e38, and the largest ratio is exp(20) = 4.9e8: advantages beyond 7e29 have no finite loss
    largest = float(np.float32(1e29))
    signed = st.one_of(st.floats(-3.0, 3.0, allow_subnormal=False), finite_numbers(largest), st.just(0.0))
    pairs = draw(st.lists(st.tuples(log_ratios(1e38), signed), min_size=1, max_size=10))
    high = draw(st.one_of(st.none(), st.floats(0.0, 2.0)))
    dual = draw(st.one_of(st.none(), st.floats(1.01, 100.0)))
    return Update([d for d, _ in pairs], [a for _, a in pairs], draw(st.floats(0.01, 0.99)), high, dual)


@BOTH_DTYPES
@given(update=updates())
def test_the_surrogate_and_its_gradient_are_finite_and_the_slope_is_that_gradient(update: Update, dtype: th.dtype):
    log_ratio, advantages = update.tensors(dtype)
    surrogate = losses.clipped_surrogate(log_ratio, advantages, update.clip_range, **update.options())
    (gradient,) = th.autograd.grad(surrogate.loss.sum(), log_ratio)
    for values in (*surrogate, gradient):
        assert values.shape == log_ratio.shape and values.dtype == dtype and values.isfinite().all()
    assert (surrogate.ratio > 0).all() and not surrogate.ratio.requires_grad
    th.testing.assert_close(surrogate.slope, gradient, rtol=1e-6, atol=0.0)
    # Beyond the clamp the ratio does not move
    assert (gradient[log_ratio.detach().abs() > losses.MAX_LOG_RATIO] == 0).all()
    # Descent never makes a good action less likely, nor a bad one more
    assert (gradient * advantages <= 0).all()


@BOTH_DTYPES
def test_the_slope_beyond_the_clamp_is_zero_even_where_the_loss_overflows(dtype: th.dtype):
    log_ratio = th.tensor([30.0], dtype=dtype, requires_grad=True)
    surrogate = losses.clipped_surrogate(log_ratio, th.full_like(log_ratio, -th.finfo(dtype).max / 100), 0.2)
    assert surrogate.loss.isinf().all()
    # Autograd finds zero
    (gradient,) = th.autograd.grad(surrogate.loss.sum(), log_ratio)
    th.testing.assert_close(surrogate.slope, gradient)


@BOTH_DTYPES
@given(update=updates())
def test_the_clipped_surrogate_never_promises_more_than_the_unclipped_objective_and_stays_in_its_bounds(
    update: Update, dtype: th.dtype
):
    log_ratio, advantages = update.tensors(dtype)
    loss, ratio, _ = losses.clipped_surrogate(log_ratio.detach(), advantages, update.clip_range, update.clip_range_high)
    rounding = 1e-5 * advantages.abs()
    low, high = 1.0 - update.clip_range, 1.0 + update.high()
    assert (-loss <= ratio * advantages).all()
    good = advantages >= 0
    # A good action gains from nothing to 1 + c_high; a bad one costs 1 - c or more, however unlikely it has become
    assert (loss[good] <= 0).all() and (-loss <= high * advantages + rounding)[good].all()
    assert (loss >= low * -advantages - rounding)[~good].all()
    # Where nothing is clipped, it is the unclipped objective
    inside = (ratio > low + 1e-5) & (ratio < high - 1e-5)
    th.testing.assert_close(-loss[inside], (ratio * advantages)[inside], rtol=0.0, atol=0.0)


@BOTH_DTYPES
@given(update=updates(), dual_clip=st.floats(1.01, 100.0))
def test_dual_clip_bounds_what_a_bad_action_costs_and_leaves_good_ones_alone(
    update: Update, dual_clip: float, dtype: th.dtype
):
    log_ratio, advantages = (values.detach() for values in update.tensors(dtype))
    plain = losses.clipped_surrogate(log_ratio, advantages, update.clip_range, update.clip_range_high)
    bounded = losses.clipped_surrogate(log_ratio, advantages, update.clip_range, update.clip_range_high, dual_clip)
    good = advantages >= 0
    assert th.equal(bounded.loss[good], plain.loss[good]) and th.equal(bounded.slope[good], plain.slope[good])
    assert th.equal(bounded.loss[~good], th.min(plain.loss, dual_clip * -advantages)[~good])
    # Flat where the bound holds, as before elsewhere
    assert th.equal(bounded.slope, th.where(bounded.loss < plain.loss, 0.0, plain.slope))


@given(update=updates(), wider=st.floats(0.0, 2.0))
def test_a_wider_range_above_never_costs_more(update: Update, wider: float):
    log_ratio, advantages = update.tensors(th.float64)
    narrow, wide = (
        losses.clipped_surrogate(log_ratio.detach(), advantages, update.clip_range, high, update.dual_clip)
        for high in (update.high(), update.high() + wider)
    )
    assert (wide.loss <= narrow.loss).all()


@given(update=updates())
def test_the_surrogate_of_an_unchanged_policy_is_less_the_advantage_with_less_the_advantage_as_slope(update: Update):
    _, advantages = update.tensors(th.float64)
    surrogate = losses.clipped_surrogate(th.zeros_like(advantages), advantages, update.clip_range, **update.options())
    assert th.equal(surrogate.loss, -advantages) and th.equal(surrogate.slope, -advantages)


@given(log_ratio=st.lists(log_ratios(1e30), min_size=1, max_size=20), data=st.data())
def test_log_ratios_of_steps_are_as_they_came_and_those_of_trajectories_agree_within_and_stay_between(
    log_ratio: list[float], data: st.DataObject
):
    names = data.draw(st.lists(st.integers(0, 4), min_size=len(log_ratio), max_size=len(log_ratio)))
    trajectories = th.as_tensor(A.label_by_appearance(np.array(names)))
    d = tensor(log_ratio).requires_grad_()
    assert losses.step_log_ratio(d, trajectories) is d and losses.step_log_ratio(d) is d
    level = losses.trajectory_log_ratio(d, trajectories)
    for trajectory in range(int(trajectories.max()) + 1):
        own, of_own = d[trajectories == trajectory].detach(), level[trajectories == trajectory].detach()
        assert (of_own == of_own[0]).all()
        rounding = ROUNDING * own.abs().max()
        assert own.min() - rounding <= of_own[0] <= own.max() + rounding
    # Each step has the slope of its own
    (gradient,) = th.autograd.grad((th.arange(len(d)) * level).sum(), d)
    assert gradient.tolist() == list(range(len(d)))
    order = th.as_tensor(data.draw(st.permutations(range(len(d)))))
    reordered = losses.trajectory_log_ratio(d[order], trajectories[order])
    th.testing.assert_close(reordered, level[order], rtol=1e-12, atol=ROUNDING * d.abs().max().item())


# --- the mean over transitions ----------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 10_000), min_size=1, max_size=50).map(np.array)


@given(LENGTHS)
def test_weights_of_trajectories_are_one_on_average_and_give_each_trajectory_the_same_share(lengths: np.ndarray):
    weights = losses.trajectory_loss_weights(lengths, 1)
    assert np.average(weights, weights=lengths) == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(weights * lengths, lengths.sum() / len(lengths), rtol=1e-12)


@given(LENGTHS, st.integers(0, 10_000))
def test_constant_weights_are_alike_at_most_one_and_add_up_to_the_budgets_used(lengths: np.ndarray, unused: int):
    budget = int(lengths.max()) + unused
    weights = losses.constant_loss_weights(lengths, budget)
    assert weights.shape == lengths.shape and len(set(weights)) == 1 and 0 < weights[0] <= 1.0
    # Each transition counts for 1 / (m L), whatever the lengths
    np.testing.assert_allclose(weights / lengths.sum(), 1 / (len(lengths) * budget), rtol=1e-12)


@given(st.lists(st.tuples(finite_numbers(1e30), st.floats(0.0, 1e4)), min_size=1, max_size=30))
def test_a_weighted_mean_is_that_of_the_products_linear_in_values_and_plain_without_weights(pairs: list[tuple[float, float]]):
    values, weights = tensor(pairs).T
    products = [value * weight for value, weight in pairs]
    tolerance = ROUNDING * max(map(abs, products)) + 1e-300
    mean = losses.weighted_mean(values, weights)
    assert mean.shape == () and mean.item() == pytest.approx(math.fsum(products) / len(pairs), rel=0, abs=tolerance)
    assert th.equal(losses.weighted_mean(values, None), losses.weighted_mean(values, th.ones_like(values)))
    assert losses.weighted_mean(-2.0 * values, weights).item() == -2.0 * mean.item()


# --- diagnostics of ratios --------------------------------------------------------------------------------------------


@BOTH_DTYPES
@given(update=updates(), wider=st.floats(0.0, 1.0))
def test_clip_fractions_are_fractions_of_the_ratios_that_shrink_with_a_wider_range(
    update: Update, wider: float, dtype: th.dtype
):
    ratio = losses.clipped_surrogate(*update.tensors(dtype), update.clip_range).ratio
    low, high = losses.clip_fractions(ratio, update.clip_range, update.clip_range_high)
    assert 0.0 <= low <= 1.0 and 0.0 <= high <= 1.0 and low + high <= 1.0 + 1e-6
    n = len(ratio)
    assert round(low.item() * n) == sum(change < -update.clip_range for change in (ratio - 1.0).tolist())
    wider_low, wider_high = losses.clip_fractions(ratio, update.clip_range + wider, update.high() + wider)
    assert wider_low <= low and wider_high <= high


@BOTH_DTYPES
@given(log_ratio=st.lists(st.floats(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO), min_size=1, max_size=50), data=st.data())
def test_effective_sample_size_is_from_one_of_n_to_one_and_knows_neither_order_nor_unit(
    log_ratio: list[float], data: st.DataObject, dtype: th.dtype
):
    ratio = th.tensor(log_ratio, dtype=dtype).exp()
    n, size = len(ratio), losses.effective_sample_size(ratio)
    assert size.shape == () and 1 / n - ROUNDING <= size.item() <= 1.0 + ROUNDING
    assert losses.effective_sample_size(2.0**-20 * ratio).item() == size.item()
    order = th.as_tensor(data.draw(st.permutations(range(n))))
    assert losses.effective_sample_size(ratio[order]).item() == pytest.approx(size.item(), rel=1e-9)
    # Samples that come twice are twice as many
    assert losses.effective_sample_size(ratio.repeat(2)).item() == pytest.approx(size.item(), rel=1e-9)


# --- estimates of the divergence --------------------------------------------------------------------------------------

# The square of more than 1.8e19 overflows in single precision
LOG_PROBS = st.one_of(st.floats(-3.0, 3.0, allow_subnormal=False), finite_numbers(1e-6), finite_numbers(1e18))
PAIRS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=20)


@BOTH_DTYPES
@pytest.mark.parametrize("estimator", [pytest.param(estimator, id=name) for name, estimator in losses.KL_ESTIMATORS.items()])
@given(pairs=PAIRS)
def test_estimators_and_their_gradients_are_finite_and_zero_where_the_policies_agree(
    pairs: list[tuple[float, float]], estimator: Callable[..., th.Tensor], dtype: th.dtype
):
    log_prob, reference = (values.clone() for values in th.tensor(pairs, dtype=dtype).T)
    log_prob.requires_grad_()
    estimate = estimator(log_prob, reference)
    (gradient,) = th.autograd.grad(estimate.sum(), log_prob)
    assert estimate.shape == log_prob.shape and estimate.isfinite().all() and gradient.isfinite().all()
    assert (estimator(log_prob, log_prob) == 0).all()


@BOTH_DTYPES
@given(pairs=PAIRS)
def test_k1_changes_its_sign_with_the_policies_k2_does_not_and_neither_k2_nor_k3_is_ever_negative(
    pairs: list[tuple[float, float]], dtype: th.dtype
):
    log_prob, reference = th.tensor(pairs, dtype=dtype).T
    assert th.equal(losses.k1(log_prob, reference), -losses.k1(reference, log_prob))
    assert th.equal(losses.k2(log_prob, reference), losses.k2(reference, log_prob))
    assert (losses.k2(log_prob, reference) >= 0).all() and (losses.k3(log_prob, reference) >= 0).all()


@given(pairs=PAIRS)
def test_k3_exceeds_k2_where_the_reference_is_the_larger_and_is_below_where_it_is_the_smaller(
    pairs: list[tuple[float, float]],
):
    # exp(d) - d - 1 is d^2 / 2 + d^3 / 6 + ...
    log_prob, reference = tensor(pairs).T
    d = reference - log_prob
    squares, estimates = losses.k2(log_prob, reference), losses.k3(log_prob, reference)
    # expm1(d) - d loses the digits of d
    rounding = 1e-15 * d.abs()
    up_to_the_clamp = (d >= 0) & (d <= losses.MAX_LOG_RATIO)
    assert (estimates >= squares - rounding)[up_to_the_clamp].all() and (estimates <= squares + rounding)[d <= 0].all()


@BOTH_DTYPES
@given(pairs=PAIRS)
def test_descent_on_k2_and_k3_never_drives_the_policies_apart(pairs: list[tuple[float, float]], dtype: th.dtype):
    log_prob, reference = (values.clone() for values in th.tensor(pairs, dtype=dtype).T)
    log_prob.requires_grad_()
    for estimator in (losses.k2, losses.k3):
        (gradient,) = th.autograd.grad(estimator(log_prob, reference).sum(), log_prob)
        assert (gradient.sign() * (log_prob - reference).sign() >= 0).all()


@BOTH_DTYPES
@given(cases=st.lists(st.tuples(finite_numbers(1e18), finite_numbers(1e18), finite_numbers(1e18)), min_size=1, max_size=20))
def test_weighting_by_the_ratio_is_finite_keeps_the_sign_and_does_nothing_for_the_policy_that_sampled(
    cases: list[tuple[float, float, float]], dtype: th.dtype
):
    log_prob, old_log_prob, estimate = (values.clone().requires_grad_() for values in th.tensor(cases, dtype=dtype).T)
    weighted = losses.importance_weighted(estimate, log_prob, old_log_prob)
    for gradient in th.autograd.grad(weighted.sum(), (estimate, log_prob)):
        assert gradient.isfinite().all()
    assert weighted.isfinite().all() and (weighted * estimate.sign() >= 0).all()
    assert (weighted.abs() <= math.exp(losses.MAX_LOG_RATIO) * estimate.abs() * (1 + 1e-5)).all()
    assert th.equal(losses.importance_weighted(estimate, log_prob, log_prob), estimate)


@BOTH_DTYPES
@given(log_ratio=st.lists(log_ratios(1e30), min_size=1, max_size=20))
def test_the_approximate_divergence_is_finite_never_negative_and_zero_for_an_unchanged_policy(
    log_ratio: list[float], dtype: th.dtype
):
    d = th.tensor(log_ratio, dtype=dtype)
    divergence = losses.approximate_kl(d)
    assert divergence.shape == () and divergence.isfinite() and divergence >= 0
    assert losses.approximate_kl(th.zeros_like(d)) == 0
    assert th.equal(divergence, losses.k3(th.zeros_like(d), d).mean())


# --- the divergence in closed form ------------------------------------------------------------------------------------

N_PARAMS = 4


def gaussian(distribution: type[DiagGaussianDistribution], params: th.Tensor) -> Distribution:
    # One deviation for all observations, as in SB3's policies
    return distribution(2).proba_distribution(params[:, :2], params[:, 2:].mean(dim=0) / 10)


def discrete(make: Callable[[], Any], params: th.Tensor) -> Distribution:
    distribution: Distribution = make().proba_distribution(params)
    return distribution


KINDS = pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(gaussian, DiagGaussianDistribution), id="DiagGaussian"),
        pytest.param(partial(gaussian, SquashedDiagGaussianDistribution), id="squashed"),
        pytest.param(partial(discrete, partial(CategoricalDistribution, N_PARAMS)), id="Categorical"),
        pytest.param(partial(discrete, partial(MultiCategoricalDistribution, [2, 2])), id="MultiCategorical"),
        pytest.param(partial(discrete, partial(BernoulliDistribution, N_PARAMS)), id="Bernoulli"),
    ],
)
# Beyond 36 a probability of one less that of the logit is one in double precision, and what is impossible is infinitely far
PARAMS = st.lists(st.lists(st.floats(-30.0, 30.0), min_size=N_PARAMS, max_size=N_PARAMS), min_size=1, max_size=4)


@KINDS
@given(params=PARAMS, data=st.data())
def test_the_exact_divergence_is_finite_never_negative_and_that_of_each_observation(
    make: Callable[[th.Tensor], Distribution], params: list[list[float]], data: st.DataObject
):
    others = data.draw(st.lists(st.permutations(params[0]), min_size=len(params), max_size=len(params)))
    p, q = tensor(params).requires_grad_(), tensor(others)
    divergence = losses.exact_kl(make(p), make(q))
    (gradient,) = th.autograd.grad(divergence.sum(), p)
    assert divergence.shape == (len(params),) and divergence.isfinite().all() and gradient.isfinite().all()
    # Sums over actions round; so does the deviation that the observations of a Gaussian share
    assert (divergence >= -1e-9).all()
    backwards = losses.exact_kl(make(p.flip(0)), make(q.flip(0)))
    th.testing.assert_close(backwards, divergence.flip(0), rtol=1e-9, atol=1e-9)


@KINDS
@given(params=PARAMS)
def test_the_exact_divergence_of_equal_distributions_is_zero(
    make: Callable[[th.Tensor], Distribution], params: list[list[float]]
):
    divergence = losses.exact_kl(make(tensor(params)), make(tensor(params)))
    th.testing.assert_close(divergence, th.zeros(len(params), dtype=th.float64), rtol=0.0, atol=1e-12)


@given(PARAMS)
def test_the_exact_divergence_of_independent_actions_is_the_sum_of_theirs(params: list[list[float]]):
    p = tensor(params)
    q = p.flip(1)
    joint = losses.exact_kl(*(MultiCategoricalDistribution([2, 2]).proba_distribution(x) for x in (p, q)))
    parts = [
        losses.exact_kl(*(CategoricalDistribution(2).proba_distribution(x[:, part]) for x in (p, q)))
        for part in (slice(0, 2), slice(2, 4))
    ]
    th.testing.assert_close(joint, parts[0] + parts[1], rtol=1e-9, atol=1e-12)


# --- the adaptive coefficient -----------------------------------------------------------------------------------------

COEFS = st.one_of(st.sampled_from(losses.KL_COEF_BOUNDS), st.floats(*losses.KL_COEF_BOUNDS))
ANY_KL = st.one_of(st.floats(-1.0, 1.0), st.floats(allow_nan=False))


@given(COEFS, ANY_KL, ANY_KL, st.floats(0.0, sys.float_info.max))
def test_the_adapted_coefficient_stays_in_bounds_moves_by_two_at_most_and_grows_with_the_divergence(
    coef: float, kl: float, other: float, target: float
):
    low, high = losses.KL_COEF_BOUNDS
    small, large = (losses.adapted_kl_coef(coef, x, target) for x in sorted((kl, other)))
    for adapted in (small, large):
        assert low <= adapted <= high and 0.5 * coef <= adapted <= 2.0 * coef
    assert small <= large
    assert losses.adapted_kl_coef(coef, target, target) == coef


# --- features of the kernel baseline ----------------------------------------------------------------------------------


class Samples(NamedTuple):
    """Inputs of any magnitude, times from 0 to 1, targets and folds."""

    inputs: np.ndarray
    times: np.ndarray
    targets: np.ndarray
    folds: np.ndarray

    def tensors(self) -> tuple[th.Tensor, th.Tensor]:
        return tensor(self.targets), th.as_tensor(self.folds)


def random_numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


MODERATE = st.floats(-10.0, 10.0)


@st.composite
def samples(draw: st.DrawFn, targets: st.SearchStrategy[float] = MODERATE, max_dim: int = 3) -> Samples:
    n, d = draw(st.integers(1, 25)), draw(st.integers(1, max_dim))
    rows = draw(st.sampled_from(["all different", "all alike", "few different", "columns alike"]))
    inputs = random_numbers(draw(st.integers(0, 99)), n, d)
    if rows == "columns alike":
        inputs[:] = inputs[:, :1]
    elif rows != "all different":
        inputs = inputs[np.arange(n) % (1 if rows == "all alike" else 2)]
    inputs = draw(extreme_numbers()) * inputs + draw(extreme_numbers())
    y = np.array(draw(st.lists(targets, min_size=n, max_size=n)))
    return Samples(inputs, np.linspace(0.0, 1.0, n), y, np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))))


TIME_OR_NOT = pytest.mark.parametrize("time_feature", [pytest.param(True, id="time"), pytest.param(False, id="no time")])
N_FOURIER = 6


@TIME_OR_NOT
@given(seed=st.integers(0, 99), n=st.integers(1, 10), d=st.integers(1, 4), unit=extreme_numbers())
def test_fourier_features_are_finite_the_cosines_bounded_and_the_rest_as_given(
    time_feature: bool, seed: int, n: int, d: int, unit: float
):
    inputs, times = tensor(unit * random_numbers(seed, n, d)), tensor(np.linspace(0.0, 1.0, n))
    frequencies, phases = tensor(random_numbers(seed, d + time_feature, N_FOURIER)), tensor(random_numbers(seed, N_FOURIER))
    features = fourier_features(inputs, times, frequencies, phases, time_feature)
    assert features.isfinite().all() and features.shape == (n, 1 + d + time_feature + N_FOURIER)
    assert (features[:, 0] == 1).all() and th.equal(features[:, 1 : 1 + d], inputs)
    assert not time_feature or th.equal(features[:, 1 + d], times)
    assert (features[:, -N_FOURIER:].abs() <= math.sqrt(2 / N_FOURIER) + ROUNDING).all()
    # Without the time feature nothing depends on time
    later = fourier_features(inputs, times + 1.0, frequencies, phases, time_feature)
    assert time_feature or th.equal(later, features)


@TIME_OR_NOT
@given(seed=st.integers(0, 99), n=st.integers(2, 10), d=st.integers(1, 4))
def test_fourier_features_of_a_sample_depend_on_it_alone_and_repeat_after_a_full_turn(
    time_feature: bool, seed: int, n: int, d: int
):
    inputs, times = tensor(random_numbers(seed, n, d)), tensor(np.linspace(0.0, 1.0, n))
    frequencies, phases = tensor(random_numbers(seed, d + time_feature, N_FOURIER)), tensor(random_numbers(seed, N_FOURIER))
    features = fourier_features(inputs, times, frequencies, phases, time_feature)
    last = fourier_features(inputs[-1:], times[-1:], frequencies, phases, time_feature)
    th.testing.assert_close(last, features[-1:], rtol=0.0, atol=ROUNDING)
    turned = fourier_features(inputs, times, frequencies, phases + 2 * math.pi, time_feature)
    th.testing.assert_close(turned, features, rtol=0.0, atol=ROUNDING)


@TIME_OR_NOT
@given(case=samples(), more=extreme_numbers(), clip=st.floats(0.1, 10.0))
def test_features_of_the_baseline_are_finite_and_bounded_whatever_was_observed(
    time_feature: bool, case: Samples, more: float, clip: float
):
    baseline = KernelBaseline(N_FOURIER, time_feature=time_feature, clip=clip)
    baseline.observe(case.inputs)
    for inputs in (case.inputs, np.full_like(case.inputs, more)):
        features = baseline.features(inputs, case.times)
        assert features.isfinite().all() and features.dtype == th.float64
        # One, times and cosines with D = 6 are at most one
        assert features.abs().max() <= max(clip, 1.0) + ROUNDING
        baseline.observe(inputs)


# --- ridge regression -------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), n=st.integers(0, 30), p=st.integers(1, 8), rank=st.integers(0, 8), unit=extreme_numbers())
def test_ridge_weights_are_finite_however_singular_the_gram_matrix_and_no_larger_than_the_penalty_allows(
    seed: int, n: int, p: int, rank: int, unit: float
):
    phi = random_numbers(seed, n, rank) @ random_numbers(seed + 1, rank, p)
    y = unit * random_numbers(seed + 2, n)
    ridge = 1e-3
    gram, moment, count = tensor(phi.T @ phi), tensor(phi.T @ y), tensor(float(n))
    weights = ridge_weights(gram, moment, count, ridge)
    assert weights.shape == (p,) and weights.isfinite().all()
    # The minimum of |y - Phi w|^2 + lambda N |w|^2 is no larger than at w = 0
    penalty = ridge * max(n, 1) * weights.square().sum().item()
    residual = np.square(y - phi @ weights.numpy()).sum()
    assert penalty + residual <= np.square(y).sum() * (1 + 1e-6)
    # ... and it is where the gradient is zero
    gradient = gram @ weights + ridge * max(n, 1) * weights - moment
    assert gradient.abs().max().item() <= 1e-9 * (np.abs(phi).max(initial=0.0) * np.abs(y).sum())


@given(seed=st.integers(0, 99), n=st.integers(1, 20), p=st.integers(1, 6), data=st.data())
def test_predictions_by_fold_are_plain_where_folds_agree_and_follow_the_samples_in_any_order(
    seed: int, n: int, p: int, data: st.DataObject
):
    features, weights = tensor(random_numbers(seed, n, p)), tensor(random_numbers(seed + 1, 4, p))
    folds = th.as_tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    predictions = predict_by_fold(features, weights, folds)
    assert predictions.shape == (n,)
    for fold in range(4):
        plain = features @ weights[fold]
        th.testing.assert_close(predictions[folds == fold], plain[folds == fold], rtol=0.0, atol=ROUNDING)
        th.testing.assert_close(predict_by_fold(features, weights[[fold] * 4], folds), plain, rtol=0.0, atol=ROUNDING)
    order = th.as_tensor(data.draw(st.permutations(range(n))))
    reordered = predict_by_fold(features[order], weights, folds[order])
    th.testing.assert_close(reordered, predictions[order], rtol=0.0, atol=ROUNDING)


def plain_fit(features: th.Tensor, targets: th.Tensor, sample_weights: th.Tensor, ridge: float) -> th.Tensor:
    """The normal equations, written down and solved."""
    weighted = features * sample_weights[:, None]
    penalty = ridge * max(sample_weights.sum().item(), 1.0) * th.eye(features.shape[1], dtype=th.float64)
    return th.linalg.solve(features.T @ weighted + penalty, weighted.T @ targets)


def features_of(case: Samples) -> th.Tensor:
    baseline = KernelBaseline(N_FOURIER)
    baseline.observe(case.inputs)
    return baseline.features(case.inputs, case.times)


@given(before=samples(max_dim=1), case=samples(max_dim=1), forgetting=st.sampled_from([0.0, 0.5, 1.0]), unit=extreme_numbers())
def test_weights_without_a_fold_are_those_of_a_plain_fit_to_all_other_folds(
    before: Samples, case: Samples, forgetting: float, unit: float
):
    ridge = 1e-2
    baseline = KernelBaseline(N_FOURIER)
    baseline.observe(np.vstack([before.inputs, case.inputs]))
    features = [baseline.features(each.inputs, each.times) for each in (before, case)]
    targets = [unit * before.tensors()[0], unit * case.tensors()[0]]
    folds = case.tensors()[1]
    statistics = RidgeStatistics(features[0].shape[1])
    statistics.leave_fold_out(features[0], targets[0], before.tensors()[1], ridge)
    statistics.decay(forgetting)
    weights = statistics.leave_fold_out(features[1], targets[1], folds, ridge)
    assert weights.shape == (int(folds.max()) + 1, features[0].shape[1])
    kept_before = th.full((len(features[0]),), forgetting, dtype=th.float64)
    largest = max(y.abs().max().item() for y in targets)
    for fold in range(len(weights)):
        sample_weights = th.cat([kept_before, (folds != fold).double()])
        expected = plain_fit(th.cat(features), th.cat(targets), sample_weights, ridge)
        # Targets of another magnitude than those of the fold itself lose its digits when it is subtracted
        th.testing.assert_close(weights[fold], expected, rtol=0.0, atol=1e-9 * largest + 1e-300)


@given(case=samples(), order_of=st.randoms(use_true_random=False))
def test_the_statistics_are_those_of_all_samples_in_any_order_however_they_were_folded(case: Samples, order_of: random.Random):
    phi, (y, folds) = features_of(case), case.tensors()
    order = list(range(len(y)))
    order_of.shuffle(order)
    one, other = RidgeStatistics(phi.shape[1]), RidgeStatistics(phi.shape[1])
    one.leave_fold_out(phi, y, folds, 1e-2)
    other.leave_fold_out(phi[order], y[order], th.zeros_like(folds), 1e-2)
    for name in ("gram", "moment", "count"):
        th.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0.0, atol=1e-9)
    assert one.count.item() == len(y)
    th.testing.assert_close(one.gram, phi.T @ phi, rtol=0.0, atol=1e-9)
    th.testing.assert_close(one.moment, phi.T @ y, rtol=0.0, atol=1e-9)
    assert th.linalg.eigvalsh(one.gram).min() >= -1e-9


@given(case=samples(), forgetting=st.floats(0.0, 1.0))
def test_decay_makes_all_statistics_count_for_less_alike(case: Samples, forgetting: float):
    statistics = RidgeStatistics(features_of(case).shape[1])
    statistics.leave_fold_out(features_of(case), *case.tensors(), 1e-2)
    before = copy.deepcopy(statistics)
    statistics.decay(forgetting)
    for name in ("gram", "moment", "count"):
        assert th.equal(getattr(statistics, name), forgetting * getattr(before, name))


# --- the baseline as a whole ------------------------------------------------------------------------------------------


def fit_and_predict(baseline: KernelBaseline, case: Samples, targets: np.ndarray) -> tuple[th.Tensor, th.Tensor]:
    """Predictions of each sample without its fold, and by the fit to all."""
    baseline.observe(case.inputs)
    features = baseline.features(case.inputs, case.times)
    _, folds = case.tensors()
    return predict_by_fold(features, baseline.fit(features, tensor(targets), folds), folds), features @ baseline.weights


@TIME_OR_NOT
@given(case=samples(targets=extreme_numbers()))
def test_predictions_of_the_baseline_are_finite_whatever_inputs_and_targets(time_feature: bool, case: Samples):
    baseline = KernelBaseline(N_FOURIER, time_feature=time_feature)
    # The second time there is something to forget
    for _ in range(2):
        for predictions in fit_and_predict(baseline, case, case.targets):
            assert predictions.isfinite().all()
        # No weight is above |y| / (2 sqrt(lambda N)), the largest s / (s^2 + lambda N) times |y|, and |y| <= sqrt(N) max y
        assert baseline.weights.abs().max() <= np.abs(case.targets).max() / (2 * math.sqrt(baseline.ridge)) * (1 + 1e-6)


@given(case=samples(), exponent=st.integers(-60, 60))
def test_predictions_of_the_baseline_have_the_unit_of_the_targets(case: Samples, exponent: int):
    plain = fit_and_predict(KernelBaseline(N_FOURIER), case, case.targets)
    scaled = fit_and_predict(KernelBaseline(N_FOURIER), case, 2.0**exponent * case.targets)
    for one, other in zip(plain, scaled, strict=True):
        th.testing.assert_close(other / 2.0**exponent, one, rtol=1e-9, atol=1e-12)


@given(case=samples(), other=st.floats(-1000.0, 1000.0))
def test_the_targets_of_a_fold_leave_its_own_predictions_as_they_were(case: Samples, other: float):
    own = case.folds == case.folds[0]
    before, _ = fit_and_predict(KernelBaseline(N_FOURIER), case, case.targets)
    after, _ = fit_and_predict(KernelBaseline(N_FOURIER), case, np.where(own, other, case.targets))
    th.testing.assert_close(after[own], before[own], rtol=0.0, atol=1e-6)


@TIME_OR_NOT
@given(case=samples(), seed=st.integers(0, 2**31), n_rollouts=st.integers(0, 2))
def test_a_baseline_given_the_state_of_another_goes_on_as_it_does(
    time_feature: bool, case: Samples, seed: int, n_rollouts: int
):
    # Before the first rollout no features have been drawn: that is left to the seed of each
    other_seed = seed + 1 if n_rollouts > 0 else seed
    baseline, restored = (KernelBaseline(N_FOURIER, time_feature=time_feature, seed=s) for s in (seed, other_seed))
    for _ in range(n_rollouts):
        fit_and_predict(baseline, case, case.targets)
    restored.set_state(copy.deepcopy(baseline.get_state()))
    assert th.equal(restored.weights, baseline.weights)
    for one, other in zip(*(fit_and_predict(b, case, -case.targets) for b in (baseline, restored)), strict=True):
        assert th.equal(one, other)


@given(case=samples(), seed=st.integers(0, 2**31))
def test_a_baseline_is_decided_by_its_seed_and_what_it_was_given(case: Samples, seed: int):
    first, second = (fit_and_predict(KernelBaseline(N_FOURIER, seed=seed), case, case.targets) for _ in range(2))
    assert all(map(th.equal, first, second))


@given(case=samples())
def test_a_baseline_that_has_fitted_nothing_has_no_weights(case: Samples):
    baseline = KernelBaseline(N_FOURIER)
    baseline.observe(case.inputs)
    assert (baseline.weights == 0).all() and baseline.weights.shape == baseline.features(case.inputs, case.times).shape[1:]
    # What there is for a single fold is what there was before
    features = baseline.features(case.inputs, case.times)
    first = baseline.fit(features, case.tensors()[0], th.zeros(len(features), dtype=th.int64))
    assert (first == 0).all()
