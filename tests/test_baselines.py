"""The kernel baseline, held against numbers worked out by hand, refits from scratch and slow, obvious loops."""

import math
import pickle

import numpy as np
import pytest
import torch as th

from sb3_grpo.advantages import explained_variance
from sb3_grpo.kernel import (
    KernelBaseline,
    RidgeStatistics,
    eligibility_traces,
    fourier_features,
    predict_by_fold,
    ridge_weights,
)

RIDGE = 0.01


def tensor(values: object) -> th.Tensor:
    return th.as_tensor(values, dtype=th.float64)


def weighted_ridge(features: np.ndarray, targets: np.ndarray, sample_weights: np.ndarray, ridge: float) -> np.ndarray:
    """Ridge regression as ordinary least squares with one further row per feature, which asks for a weight of zero."""
    n_features = features.shape[1]
    root = np.sqrt(sample_weights)[:, None]
    penalty = math.sqrt(ridge * max(sample_weights.sum(), 1.0)) * np.eye(n_features)
    rows = np.vstack([root * features, penalty])
    return np.linalg.lstsq(rows, np.append(root[:, 0] * targets, np.zeros(n_features)), rcond=None)[0]


# --- features ---------------------------------------------------------------------------------------------------------


def test_features_with_time_are_as_worked_out_by_hand():
    # z = 2, tau = 0.5, so that the arguments of the cosines are W [2, 1] + c, and sqrt(2 / D) = sqrt(2 / 2) = 1:
    # cos(2 * pi / 2 + 1 * 0 + 0) = -1; cos(2 * 0 + 1 * pi / 6 + pi / 6) = cos(pi / 3) = 0.5
    frequencies = tensor([[math.pi / 2, 0.0], [0.0, math.pi / 6]])
    features = fourier_features(tensor([[2.0]]), tensor([0.5]), frequencies, tensor([0.0, math.pi / 6]))
    th.testing.assert_close(features, tensor([[1.0, 2.0, 0.5, -1.0, 0.5]]))


def test_features_without_time_are_as_worked_out_by_hand_and_ignore_it():
    # sqrt(2 / 8) = 0.5; arguments 3 * 0 + c with c = 0 four times and pi four times
    frequencies, phases = th.zeros(1, 8, dtype=th.float64), tensor([0.0, math.pi]).repeat(4)
    features = fourier_features(tensor([[3.0], [3.0]]), tensor([0.1, 0.9]), frequencies, phases, time_feature=False)
    th.testing.assert_close(features, tensor([[1.0, 3.0] + [0.5, -0.5] * 4] * 2))


@pytest.mark.parametrize(
    ("time_feature", "shape"),
    [pytest.param(True, (7, 3 + 2 + 16), id="time"), pytest.param(False, (7, 3 + 1 + 16), id="no time")],
)
def test_features_have_the_documented_shape(time_feature, shape):
    frequencies = th.randn(3 + time_feature, 16, dtype=th.float64)
    phases = th.rand(16, dtype=th.float64)
    inputs, times = th.randn(7, 3, dtype=th.float64), th.rand(7, dtype=th.float64)
    assert fourier_features(inputs, times, frequencies, phases, time_feature).shape == shape


@pytest.mark.parametrize("sigma", [0.5, 1.5])
@pytest.mark.parametrize("time_feature", [pytest.param(True, id="time"), pytest.param(False, id="no time")])
def test_inner_products_of_many_cosines_approximate_the_gaussian_kernel(time_feature, sigma):
    n_features = 100_000
    inputs, times = th.randn(6, 2, dtype=th.float64), th.rand(6, dtype=th.float64)
    frequencies = sigma * th.randn(2 + time_feature, n_features, dtype=th.float64)
    phases = 2 * math.pi * th.rand(n_features, dtype=th.float64)
    cosines = fourier_features(inputs, times, frequencies, phases, time_feature)[:, -n_features:]

    kernel = np.empty((6, 6))
    for i in range(6):
        for j in range(6):
            # Time enters doubled
            squared_distance = float(((inputs[i] - inputs[j]) ** 2).sum() + time_feature * (2 * (times[i] - times[j])) ** 2)
            kernel[i, j] = math.exp(-(sigma**2) * squared_distance / 2)
    # The standard error of a mean of 100,000 products is below 0.005
    np.testing.assert_allclose((cosines @ cosines.T).numpy(), kernel, atol=0.02)


# --- ridge regression -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        # one feature, A = 2, B = 6, lambda = 1: 6 / (2 + 1 * 4) = 1
        pytest.param(4.0, 1.0, id="four samples"),
        # 6 / (2 + 1 * 1) = 2
        pytest.param(1.0, 2.0, id="one sample"),
        pytest.param(0.25, 2.0, id="less than one sample counts as one"),
        pytest.param(0.0, 2.0, id="none counts as one"),
    ],
)
def test_ridge_weights_are_as_worked_out_by_hand(count, expected):
    assert ridge_weights(tensor([[2.0]]), tensor([6.0]), tensor(count), ridge=1.0).item() == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_ridge_weights_are_least_squares_with_a_penalty(n):
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(n, 4)), rng.normal(size=n)
    weights = ridge_weights(tensor(features.T @ features), tensor(features.T @ targets), tensor(n), RIDGE)
    np.testing.assert_allclose(weights.numpy(), weighted_ridge(features, targets, np.ones(n), RIDGE), rtol=1e-9, atol=1e-12)


def test_a_vanishing_penalty_gives_least_squares_and_a_huge_one_gives_zero():
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(50, 4)), rng.normal(size=50)
    statistics = tensor(features.T @ features), tensor(features.T @ targets), tensor(50.0)
    least_squares = np.linalg.lstsq(features, targets, rcond=None)[0]
    np.testing.assert_allclose(ridge_weights(*statistics, ridge=1e-12).numpy(), least_squares, rtol=1e-6)
    np.testing.assert_allclose(ridge_weights(*statistics, ridge=1e12).numpy(), np.zeros(4), atol=1e-9)


def test_ridge_weights_without_samples_are_zero():
    weights = ridge_weights(th.zeros(3, 3, dtype=th.float64), th.zeros(3, dtype=th.float64), tensor(0.0), RIDGE)
    np.testing.assert_array_equal(weights.numpy(), np.zeros(3))


def test_ridge_weights_of_a_batch_of_problems_are_those_of_each():
    factors, moments = th.randn(5, 8, 3, dtype=th.float64), th.randn(5, 3, dtype=th.float64)
    grams, counts = factors.mT @ factors, tensor([0.0, 1.0, 2.0, 30.0, 400.0])
    weights = ridge_weights(grams, moments, counts, RIDGE)
    assert weights.shape == (5, 3)
    for k in range(5):
        th.testing.assert_close(weights[k], ridge_weights(grams[k], moments[k], counts[k], RIDGE))


def test_predictions_by_fold_are_as_worked_out_by_hand():
    # [1, 2] . [3, 4] = 11; [1, 2] . [5, 6] = 17; [7, 8] . [3, 4] = 53
    features, weights = tensor([[1.0, 2.0], [1.0, 2.0], [7.0, 8.0]]), tensor([[3.0, 4.0], [5.0, 6.0]])
    th.testing.assert_close(predict_by_fold(features, weights, th.tensor([0, 1, 0])), tensor([11.0, 17.0, 53.0]))


def test_predictions_by_fold_equal_a_loop():
    features, weights = th.randn(40, 6, dtype=th.float64), th.randn(5, 6, dtype=th.float64)
    folds = th.randint(0, 5, (40,))
    expected = [sum(float(features[i, j]) * float(weights[folds[i], j]) for j in range(6)) for i in range(40)]
    np.testing.assert_allclose(predict_by_fold(features, weights, folds).numpy(), expected, rtol=1e-9)


# --- leave-fold-out and forgetting ------------------------------------------------------------------------------------

FOLDS = [
    pytest.param([0, 1, 2, 0, 1, 2, 2, 2, 0, 1, 0, 1], id="interleaved"),
    pytest.param([0] * 6 + [1] * 5 + [2], id="a fold of one sample"),
    pytest.param(list(range(12)), id="every fold one sample"),
    pytest.param([0] * 12, id="a single fold"),
    pytest.param([0, 3] * 6, id="folds without samples"),
]


def draw_rollouts(folds: list[int], n_features: int = 4) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two rollouts of other sizes, then one with these folds."""
    rng = np.random.default_rng(0)
    sizes = [20, 7, len(folds)]
    fold_lists = [np.arange(20) % 3, np.arange(7) % 2, np.array(folds)]
    return [(rng.normal(size=(n, n_features)), rng.normal(size=n), f) for n, f in zip(sizes, fold_lists, strict=True)]


@pytest.mark.parametrize("forgetting", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("folds", FOLDS)
def test_leaving_a_fold_out_equals_a_weighted_refit_from_scratch_without_it(folds, forgetting):
    rollouts = draw_rollouts(folds)
    statistics = RidgeStatistics(4)
    for features, targets, labels in rollouts:
        statistics.decay(forgetting)
        weights = statistics.leave_fold_out(tensor(features), tensor(targets), th.as_tensor(labels), RIDGE)

    all_features, all_targets = np.vstack([r[0] for r in rollouts]), np.hstack([r[1] for r in rollouts])
    ages = np.repeat([2, 1, 0], [len(r[1]) for r in rollouts])
    assert weights.shape == (max(folds) + 1, 4)
    for fold in range(max(folds) + 1):
        kept = np.append(np.full(27, True), np.array(folds) != fold)
        expected = weighted_ridge(all_features[kept], all_targets[kept], forgetting ** ages[kept], RIDGE)
        np.testing.assert_allclose(weights[fold].numpy(), expected, rtol=1e-8, atol=1e-10, err_msg=f"fold {fold}")


def test_a_single_fold_is_judged_by_the_weights_of_the_rollouts_before():
    baseline = KernelBaseline(forgetting=0.8)
    baseline.observe(np.random.default_rng(0).normal(size=(50, 2)))
    features = baseline.features(np.random.default_rng(1).normal(size=(50, 2)), np.linspace(0, 1, 50))
    one_fold = th.zeros(50, dtype=th.int64)
    first = baseline.fit(features, th.randn(50, dtype=th.float64), one_fold)
    th.testing.assert_close(first, th.zeros_like(first), rtol=0.0, atol=0.0)
    before = baseline.weights
    second = baseline.fit(features, th.randn(50, dtype=th.float64), one_fold)
    th.testing.assert_close(second[0], before, rtol=1e-6, atol=1e-9)
    assert not th.allclose(baseline.weights, before)


@pytest.mark.parametrize(
    ("forgetting", "expected"),
    [
        # a constant feature, 10 samples of target 0 and then 10 of target 1, no penalty to speak of:
        pytest.param(0.0, 1.0, id="all"),
        # 10 / (10 + 0.25 * 10) = 0.8
        pytest.param(0.25, 0.8, id="three quarters"),
        pytest.param(1.0, 0.5, id="nothing"),
    ],
)
def test_forgetting_weighs_the_rollouts_before(forgetting, expected):
    statistics = RidgeStatistics(1)
    ones, folds = th.ones(10, 1, dtype=th.float64), th.zeros(10, dtype=th.int64)
    for target in (0.0, 1.0):
        statistics.decay(forgetting)
        statistics.leave_fold_out(ones, tensor([target] * 10), folds, RIDGE)
    weights = ridge_weights(statistics.gram, statistics.moment, statistics.count, 1e-12)
    assert weights.item() == pytest.approx(expected, rel=1e-9)
    assert statistics.count.item() == 10 + 10 * forgetting


def test_no_trajectory_is_judged_by_a_fit_to_itself():
    rng = np.random.default_rng(0)
    inputs, times, targets = rng.normal(size=(60, 2)), rng.uniform(size=60), rng.normal(size=60)
    folds = th.arange(60) % 4
    changed = th.where(folds == 2, tensor(targets) + 100.0, tensor(targets))
    by_fold, by_all = [], []
    for y in (tensor(targets), changed):
        baseline = KernelBaseline()
        baseline.observe(inputs)
        features = baseline.features(inputs, times)
        by_fold.append(predict_by_fold(features, baseline.fit(features, y, folds), folds))
        by_all.append(features @ baseline.weights)
    own, others = folds == 2, folds != 2
    th.testing.assert_close(by_fold[0][own], by_fold[1][own], rtol=0.0, atol=1e-6)
    assert ((by_all[0] - by_all[1])[own].abs() > 1.0).all()
    # What happened to the others does tell something about a trajectory
    assert (by_fold[0] - by_fold[1])[others].abs().max() > 1.0


# --- temporal differences ---------------------------------------------------------------------------------------------


def test_traces_are_as_worked_out_by_hand_and_end_with_the_trajectory():
    # decay 0.5: 1; 2 + 0.5 * 1; 4 + 0.5 * 2.5; the trajectory ended: 8. The other environment goes on throughout
    features = tensor([[[1.0], [2.0], [4.0], [8.0]], [[1.0], [0.0], [0.0], [0.0]]])
    continues = tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    traces = eligibility_traces(features, continues, decay=0.5)
    th.testing.assert_close(traces[..., 0], tensor([[1.0, 2.5, 5.25, 8.0], [1.0, 0.5, 0.25, 0.125]]))
    assert features[0, 1] == 2.0


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_with_instruments_the_fit_is_the_value_of_a_chain(lambda_):
    # States 0 -> 1 -> 2 -> end, rewards 1, 2, 3, gamma 0.5: V(2) = 3, V(1) = 2 + 0.5 * 3 = 3.5, V(0) = 1 + 0.5 * 3.5 = 2.75
    features = th.eye(3, dtype=th.float64)
    following = tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    traces = eligibility_traces(features[None], tensor([[1.0, 1.0, 0.0]]), 0.5 * lambda_)[0]
    statistics = RidgeStatistics(3, instrumented=True)
    rewards, fold = tensor([1.0, 2.0, 3.0]), th.zeros(3, dtype=th.int64)
    statistics.leave_fold_out(features - 0.5 * following, rewards, fold, 1e-3, traces)
    th.testing.assert_close(statistics.weights(1e-12), tensor([2.75, 3.5, 3.0]))


def test_a_singular_system_is_solved_as_well_as_it_can_be():
    # A = [[-2, 0], [0, 1]] and lambda N = 2: the sum is [[0, 0], [0, 3]]
    weights = ridge_weights(tensor([[-2.0, 0.0], [0.0, 1.0]]), tensor([5.0, 6.0]), tensor(2.0), ridge=1.0, symmetric=False)
    th.testing.assert_close(weights[1], tensor(2.0))
    assert weights.isfinite().all()


def test_inputs_that_begin_to_vary_leave_the_fit_with_instruments_as_it_is():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 2))
    inputs[:20, 1] = 1.0
    baseline = KernelBaseline(n_features=4, instrumented=True, ridge=1e-2)
    times, fold = np.zeros(20), th.zeros(20, dtype=th.int64)
    baseline.observe(inputs[:20])
    features = baseline.features(inputs[:20], times)
    baseline.fit(features, th.randn(20, dtype=th.float64), fold, features + 0.1)
    narrow = baseline.weights
    baseline.observe(inputs[20:])
    wide = baseline.weights
    # [1, z0, tau, cosines] becomes [1, z0, z1, tau, cosines]
    th.testing.assert_close(th.cat([wide[:2], wide[3:]]), narrow)
    assert wide[2] == 0.0


@pytest.mark.parametrize("instrumented", [False, True])
def test_instruments_where_none_belong_or_none_where_they_do_are_refused(instrumented):
    baseline = KernelBaseline(instrumented=instrumented)
    baseline.observe(np.random.default_rng(0).normal(size=(5, 2)))
    features = baseline.features(np.zeros((5, 2)), np.zeros(5))
    instruments = None if instrumented else features
    with pytest.raises(ValueError, match="if and only if"):
        baseline.fit(features, th.zeros(5, dtype=th.float64), th.zeros(5, dtype=th.int64), instruments)


@pytest.mark.parametrize("folds", FOLDS)
def test_with_instruments_leaving_a_fold_out_equals_a_fit_without_it(folds):
    rng = np.random.default_rng(0)
    n, labels = len(folds), np.array(folds)
    features, targets = rng.normal(size=(n, 3)), rng.normal(size=n)
    instruments = features + 0.3 * rng.normal(size=(n, 3))
    statistics = RidgeStatistics(3, instrumented=True)
    weights = statistics.leave_fold_out(tensor(features), tensor(targets), th.as_tensor(labels), RIDGE, tensor(instruments))
    for fold in range(max(folds) + 1):
        kept = labels != fold
        left = instruments[kept].T @ features[kept] + RIDGE * max(kept.sum(), 1) * np.eye(3)
        expected = np.linalg.solve(left, instruments[kept].T @ targets[kept])
        np.testing.assert_allclose(weights[fold].numpy(), expected, rtol=1e-8, atol=1e-10, err_msg=f"fold {fold}")


# --- the baseline as a whole ------------------------------------------------------------------------------------------


def fitted(inputs: np.ndarray, times: np.ndarray, targets: np.ndarray, **kwargs: object) -> KernelBaseline:
    baseline = KernelBaseline(**kwargs)  # type: ignore[arg-type]
    baseline.observe(inputs)
    baseline.fit(baseline.features(inputs, times), tensor(targets), th.arange(len(targets)) % 5)
    return baseline


def predict(baseline: KernelBaseline, inputs: np.ndarray, times: np.ndarray) -> np.ndarray:
    return (baseline.features(inputs, times) @ baseline.weights).numpy()


def draw_regression(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A target that neither its inputs nor the time explain linearly; the inputs have odd units."""
    rng = np.random.default_rng(seed)
    standard, times = rng.normal(size=(n, 2)), rng.uniform(size=n)
    targets = np.cos(1.5 * standard[:, 0]) + standard[:, 1] ** 2 + 4 * (times - 0.5) ** 2 * standard[:, 1]
    return 100.0 + np.array([1000.0, 0.01]) * standard, times, targets


@pytest.mark.parametrize("time_feature", [pytest.param(True, id="time"), pytest.param(False, id="no time")])
def test_inputs_are_standardised_by_what_was_observed(time_feature):
    baseline = KernelBaseline(time_feature=time_feature)
    rng = np.random.default_rng(0)
    first, second = 50.0 + 3.0 * rng.normal(size=(300, 2)), 60.0 + 7.0 * rng.normal(size=(200, 2))
    baseline.observe(first)
    baseline.observe(second)
    both = np.vstack([first, second])
    features = baseline.features(both, np.zeros(500)).numpy()
    np.testing.assert_allclose(features[:, 1:3], (both - both.mean(axis=0)) / both.std(axis=0), atol=1e-3)
    assert features.shape == (500, 1 + 2 + time_feature + 128)


def test_an_outlier_counts_no_more_than_the_clip_while_without_a_clip_it_does():
    rng = np.random.default_rng(0)
    inputs, times = rng.normal(size=(200, 1)), rng.uniform(size=200)
    at_clip, outlier = np.full((1, 1), 20.0), np.full((1, 1), -1e6)
    clipped = fitted(inputs, times, 3.0 * inputs[:, 0])
    unclipped = fitted(inputs, times, 3.0 * inputs[:, 0], clip=np.inf)
    np.testing.assert_array_equal(clipped.features(outlier, np.zeros(1))[:, :2], [[1.0, -5.0]])
    np.testing.assert_array_equal(predict(clipped, at_clip, np.zeros(1)), predict(clipped, 1000 * at_clip, np.zeros(1)))
    assert abs(predict(clipped, outlier, np.zeros(1))[0]) < 30.0
    assert abs(predict(unclipped, outlier, np.zeros(1))[0]) > 1e6


@pytest.mark.parametrize("time_feature", [pytest.param(True, id="time"), pytest.param(False, id="no time")])
def test_the_seed_decides_the_features(time_feature):
    inputs, times, _ = draw_regression(20, seed=0)
    drawn = []
    for seed in (3, 3, 4):
        # Not from the global state
        np.random.default_rng().normal()
        np.random.rand()
        baseline = KernelBaseline(seed=seed, time_feature=time_feature)
        baseline.observe(inputs)
        drawn.append(baseline.features(inputs, times))
    th.testing.assert_close(drawn[0], drawn[1], rtol=0.0, atol=0.0)
    assert not th.allclose(drawn[0], drawn[2])


@pytest.mark.parametrize("bandwidth", [0.25, 2.0])
def test_bandwidth_and_number_of_features_shape_the_kernel(bandwidth):
    baseline = KernelBaseline(n_features=2000, bandwidth=bandwidth, time_feature=False)
    inputs = np.random.default_rng(0).normal(size=(1000, 1))
    baseline.observe(inputs)
    features = baseline.features(np.array([[inputs.mean()], [inputs.mean() + inputs.std()]]), np.zeros(2))
    assert features.shape == (2, 2 + 2000)
    # One standard deviation apart: exp(-sigma^2 / 2)
    product = (features[0, 2:] @ features[1, 2:]).item()
    assert product == pytest.approx(math.exp(-(bandwidth**2) / 2), abs=0.06)


def test_a_baseline_before_its_first_fit_predicts_zero():
    inputs, times, _ = draw_regression(20, seed=0)
    baseline = KernelBaseline()
    baseline.observe(inputs)
    np.testing.assert_array_equal(predict(baseline, inputs, times), np.zeros(20))


def test_a_nonlinear_return_is_foreseen_while_a_constant_or_linear_baseline_does_not():
    inputs, times, targets = draw_regression(3000, seed=0)
    unseen_inputs, unseen_times, unseen_targets = draw_regression(1000, seed=1)
    baseline = fitted(inputs, times, targets, ridge=1e-5)
    linear = np.column_stack([np.ones(3000), inputs, times])
    weights = np.linalg.lstsq(linear, targets, rcond=None)[0]
    linear_predictions = np.column_stack([np.ones(1000), unseen_inputs, unseen_times]) @ weights
    assert explained_variance(predict(baseline, unseen_inputs, unseen_times), unseen_targets) > 0.9
    assert explained_variance(linear_predictions, unseen_targets) < 0.3
    assert explained_variance(np.full(1000, targets.mean()), unseen_targets) == pytest.approx(0.0, abs=1e-12)


def test_a_return_that_depends_on_time_is_foreseen_with_the_time_feature_alone():
    rng = np.random.default_rng(0)
    inputs, times = rng.normal(size=(1000, 2)), rng.uniform(size=1000)
    with_time, without_time = (fitted(inputs, times, 1 - times, time_feature=feature) for feature in (True, False))
    assert explained_variance(predict(with_time, inputs, times), 1 - times) > 0.98
    assert explained_variance(predict(without_time, inputs, times), 1 - times) < 0.3


def test_a_state_that_went_through_pickle_predicts_and_goes_on_identically():
    inputs, times, targets = draw_regression(200, seed=0)
    baseline = fitted(inputs, times, targets, seed=3)
    # The seed of the restored one differs: the features are part of the state
    restored = KernelBaseline(seed=4)
    restored.set_state(pickle.loads(pickle.dumps(baseline.get_state())))
    np.testing.assert_array_equal(predict(restored, inputs, times), predict(baseline, inputs, times))

    more_inputs, more_times, more_targets = draw_regression(100, seed=1)
    predictions = []
    for one in (baseline, restored):
        one.observe(more_inputs)
        features = one.features(more_inputs, more_times)
        folds = th.arange(100) % 3
        predictions.append(predict_by_fold(features, one.fit(features, tensor(more_targets), folds), folds))
        predictions.append(tensor(predict(one, inputs, times)))
    th.testing.assert_close(predictions[:2], predictions[2:], rtol=0.0, atol=0.0)


def test_the_state_of_a_baseline_that_has_seen_nothing_can_be_restored():
    inputs, times, targets = draw_regression(50, seed=0)
    restored = KernelBaseline()
    restored.set_state(pickle.loads(pickle.dumps(KernelBaseline().get_state())))
    restored.observe(inputs)
    restored.fit(restored.features(inputs, times), tensor(targets), th.arange(50) % 5)
    np.testing.assert_array_equal(predict(restored, inputs, times), predict(fitted(inputs, times, targets), inputs, times))


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(np.full((40, 3), 7.0), id="constant"),
        pytest.param(np.zeros((40, 3)), id="zeros"),
        pytest.param(np.full((40, 3), 1e8), id="constant and huge"),
        pytest.param(np.repeat(np.random.default_rng(0).normal(size=(1, 3)), 40, axis=0), id="one row repeated"),
        pytest.param(np.repeat(np.random.default_rng(0).normal(size=(20, 1)), 6).reshape(40, 3), id="repeated columns"),
        pytest.param(1e-20 * np.random.default_rng(0).normal(size=(40, 3)), id="tiny"),
    ],
)
def test_inputs_that_tell_nothing_leave_the_mean_as_a_finite_prediction(inputs):
    times, targets = np.zeros(40), np.random.default_rng(1).normal(5.0, 1.0, size=40)
    baseline = KernelBaseline()
    folds = th.arange(40) % 4
    for _ in range(5):
        baseline.observe(inputs)
        features = baseline.features(inputs, times)
        by_fold = predict_by_fold(features, baseline.fit(features, tensor(targets), folds), folds)
        assert features.isfinite().all() and by_fold.isfinite().all()
    np.testing.assert_allclose(predict(baseline, inputs, times).mean(), targets.mean(), rtol=0.02)
    assert np.abs(predict(baseline, inputs, times)).max() < 10.0


# --- inputs that do not vary ------------------------------------------------------------------------------------------


def widened(inputs: np.ndarray, columns: tuple[int, ...], constants: np.ndarray) -> np.ndarray:
    """The inputs in some columns, and constants in the others."""
    wide = np.tile(constants, (len(inputs), 1))
    wide[:, columns] = inputs
    return wide


@pytest.mark.parametrize("time_feature", [True, False])
def test_inputs_that_never_vary_are_as_if_they_were_not_there(time_feature):
    inputs, times, targets = draw_regression(300, seed=0)
    columns, constants = (1, 4), np.array([3.0, 0.0, -1e6, 0.1, 0.0, 255.0])
    wide = KernelBaseline(time_feature=time_feature)
    wide.observe(widened(inputs, columns, constants))
    narrow = KernelBaseline(time_feature=time_feature)
    narrow.observe(inputs)
    # The same random features for the inputs that there are
    frequencies = wide._frequencies[[*columns, 6][: 2 + time_feature]]
    narrow._frequencies, narrow._phases = frequencies, wide._phases
    features = [
        wide.features(widened(inputs, columns, constants), times),
        narrow.features(inputs, times),
    ]
    assert features[0].shape == (300, 1 + 2 + time_feature + 128)
    th.testing.assert_close(features[0], features[1], rtol=0.0, atol=0.0)
    folds = th.arange(300) % 4
    fits = [one.fit(each, tensor(targets), folds) for one, each in zip((wide, narrow), features, strict=True)]
    th.testing.assert_close(*fits, rtol=0.0, atol=0.0)


def test_an_input_that_begins_to_vary_joins_a_fit_that_keeps_what_it_knew():
    rng = np.random.default_rng(0)
    inputs, times = rng.normal(size=(2000, 3)), rng.uniform(size=2000)
    inputs[:1000, 1] = 0.0
    targets = inputs[:, 0] - 2.0 * inputs[:, 1]
    baseline = KernelBaseline(forgetting=1.0, ridge=1e-6)
    folds = th.zeros(1000, dtype=th.int64)
    for half in (slice(0, 1000), slice(1000, 2000)):
        before = baseline._statistics
        baseline.observe(inputs[half])
        if half.start:
            # What was fitted is where it was, in the order constant, inputs, time, cosines; the new input has said nothing yet
            known = np.r_[0, 1, 3 : len(baseline._statistics.moment)]
            th.testing.assert_close(baseline._statistics.gram[np.ix_(known, known)], before.gram, rtol=0.0, atol=0.0)
            th.testing.assert_close(baseline._statistics.moment[known], before.moment, rtol=0.0, atol=0.0)
            assert not baseline._statistics.gram[2].any() and not baseline._statistics.gram[:, 2].any()
            assert baseline._statistics.count == before.count == 1000
        features = baseline.features(inputs[half], times[half])
        baseline.fit(features, tensor(targets[half]), folds)
    # The first half's zeros are still zero after standardisation by both halves, because the mean is close to zero
    assert explained_variance(predict(baseline, inputs[1000:], times[1000:]), targets[1000:]) > 0.99


def test_what_varies_is_part_of_the_state():
    inputs, times, targets = draw_regression(100, seed=0)
    wide = widened(inputs, (0, 2), np.ones(4))
    baseline = fitted(wide, times, targets)
    restored = KernelBaseline(seed=9)
    restored.set_state(pickle.loads(pickle.dumps(baseline.get_state())))
    np.testing.assert_array_equal(predict(restored, wide, times), predict(baseline, wide, times))
    for one in (baseline, restored):
        one.observe(widened(inputs, (0, 3), np.ones(4)))
        assert one._varies.tolist() == [True, False, True, True]
        assert len(one.weights) == 1 + 3 + 1 + 128


def test_an_interrupt_of_the_first_look_at_inputs_leaves_a_baseline_that_can_begin(monkeypatch):
    inputs, times, targets = draw_regression(50, seed=0)
    baseline = KernelBaseline()
    original = baseline._feature_columns

    def interrupted(varies: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(baseline, "_feature_columns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        baseline.observe(inputs)
    monkeypatch.setattr(baseline, "_feature_columns", original)
    baseline.observe(inputs)
    baseline.fit(baseline.features(inputs, times), tensor(targets), th.zeros(50, dtype=th.int64))
    assert predict(baseline, inputs, times).shape == (50,)


def test_a_state_from_before_inputs_could_be_left_out_is_one_where_all_are_used():
    inputs, times, targets = draw_regression(50, seed=0)
    baseline = fitted(inputs, times, targets)
    state = {key: value for key, value in baseline.get_state().items() if key not in ("varies", "first_input")}
    restored = KernelBaseline(seed=9)
    restored.set_state(state)
    np.testing.assert_array_equal(predict(restored, inputs, times), predict(baseline, inputs, times))
    restored.observe(inputs)
    assert len(restored.weights) == len(baseline.weights)
