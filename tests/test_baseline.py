"""The kernel baseline, compared with numbers worked out by hand, with fits from scratch and with slow loops."""

import math
import pickle

import numpy as np
import pytest
import torch as th

from sb3_grpo.advantages import explained_variance
from sb3_grpo.baseline import (
    BLOCK_COLUMNS,
    BLOCK_STEPS,
    LEVEL_RIDGE,
    FitStatistics,
    KernelBaseline,
    calibration_slope,
    cholesky,
    eligibility_traces,
    fourier_features,
    lower_gram,
    lstd_weights,
    metric_factor,
    predict_by_fold,
)

RIDGE = 0.01


def tensor(values: object) -> th.Tensor:
    return th.as_tensor(values, dtype=th.float64)


# --- features ---------------------------------------------------------------------------------------------------------


def test_features_are_as_worked_out_by_hand():
    # z = 2, tau = 0.5, so that the arguments of the cosines are W [2, 1] + c, and sqrt(2 / D) = sqrt(2 / 2) = 1:
    # cos(2 * pi / 2 + 1 * 0 + 0) = -1; cos(2 * 0 + 1 * pi / 6 + pi / 6) = cos(pi / 3) = 0.5
    frequencies = tensor([[math.pi / 2, 0.0], [0.0, math.pi / 6]])
    features = fourier_features(tensor([[2.0]]), tensor([0.5]), frequencies, tensor([0.0, math.pi / 6]))
    th.testing.assert_close(features, tensor([[1.0, 2.0, 0.5, -1.0, 0.5]]))


@pytest.mark.parametrize("bandwidth", [0.5, 1.5])
def test_inner_products_of_many_cosines_approximate_the_gaussian_kernel_of_standardised_inputs(bandwidth: float):
    baseline = KernelBaseline(n_features=2000, bandwidth=bandwidth * math.sqrt(2), clip=np.inf)  # there are two inputs
    rng = np.random.default_rng(0)
    baseline.observe(1000.0 + 5.0 * rng.normal(size=(2000, 2)))
    standardised, times = rng.normal(size=(6, 2)), rng.uniform(size=6)
    cosines = baseline.features(1000.0 + 5.0 * standardised, times)[:, 4:]
    for i in range(6):
        for j in range(6):
            # Time enters doubled
            squared_distance = ((standardised[i] - standardised[j]) ** 2).sum() + 4 * (times[i] - times[j]) ** 2
            expected = math.exp(-(bandwidth**2) * squared_distance / 2)
            assert (cosines[i] @ cosines[j]).item() == pytest.approx(expected, abs=0.07)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_predictions_by_fold_are_as_worked_out_by_hand():
    # [1, 2] . [3, 4] = 11; [1, 2] . [5, 6] = 17; [7, 8] . [3, 4] = 53
    features, weights = tensor([[1.0, 2.0], [1.0, 2.0], [7.0, 8.0]]), tensor([[3.0, 4.0], [5.0, 6.0]])
    th.testing.assert_close(predict_by_fold(features, weights, th.tensor([0, 1, 0])), tensor([11.0, 17.0, 53.0]))


def test_traces_are_as_worked_out_by_hand_and_end_with_the_trajectory():
    # Decay 0.5: 1; 2 + 0.5 * 1; 4 + 0.5 * 2.5; the trajectory ended: 8. The other environment goes on throughout
    features = tensor([[[1.0], [2.0], [4.0], [8.0]], [[1.0], [0.0], [0.0], [0.0]]])
    continues = tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    traces = eligibility_traces(features, continues, decay=0.5)
    th.testing.assert_close(traces[..., 0], tensor([[1.0, 2.5, 5.25, 8.0], [1.0, 0.5, 0.25, 0.125]]))
    assert features[0, 1] == 2.0


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("n_steps", [1, BLOCK_STEPS, BLOCK_STEPS + 1, 3 * BLOCK_STEPS + 5])
def test_traces_over_any_number_of_steps_equal_a_loop(n_steps: int, decay: float):
    rng = np.random.default_rng(0)
    features, continues = rng.normal(size=(3, n_steps, 2)), 1.0 * (rng.random((3, n_steps)) < [[0.5], [0.95], [1.0]])
    expected = features.copy()
    for t in range(1, n_steps):
        expected[:, t] += decay * continues[:, t - 1, None] * expected[:, t - 1]
    traces = eligibility_traces(th.from_numpy(features), th.from_numpy(continues), decay)
    np.testing.assert_allclose(traces.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_features", [1, BLOCK_COLUMNS, 2 * BLOCK_COLUMNS + 3])
def test_the_lower_triangle_of_a_gram_matrix_is_that_of_the_whole_product(n_features: int):
    features = tensor(np.random.default_rng(0).normal(size=(20, n_features)))
    th.testing.assert_close(lower_gram(features).tril(), (features.T @ features).tril())


def test_lstd_weights_are_as_worked_out_by_hand():
    # N = 2, A = diag(1, 2), b = (3, 4), C + ridge I = diag(1, 2) with ridge = 0.5.
    # The constant has no penalty: 3. The other minimises (4 - 2 w)^2 / 2 + 0.5 w^2: -2 (4 - 2 w) + w = 0, w = 1.6
    count = tensor(2.0)
    factor = metric_factor(tensor([[1.0, 0.0], [0.0, 3.0]]), count, 0.5)
    weights = lstd_weights(tensor([[2.0, 0.0], [0.0, 4.0]]), tensor([6.0, 8.0]), count, factor, 0.5)
    th.testing.assert_close(weights, tensor([3.0, 1.6]))


@pytest.mark.parametrize("ridge", [1e-3, 1e-5, 1e-7, 1e-9], ids=str)
def test_lstd_weights_are_those_of_double_precision_however_close_to_singular_the_system_is(ridge: float):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 30)) @ np.diag(np.logspace(0, -5, 30)) @ rng.normal(size=(30, 30))
    differences = features - 0.9 * np.roll(features, -1, axis=0)
    gram, moment, metric = features.T @ differences, features.T @ rng.normal(size=200), features.T @ features
    penalties = np.diag([LEVEL_RIDGE] + [ridge] * 29)
    inverse = np.linalg.inv(metric / 200 + ridge * np.eye(30))
    expected = np.linalg.solve(gram.T @ inverse @ gram / 200**2 + penalties, gram.T @ inverse @ moment / 200**2)
    count = tensor(200.0)
    weights = lstd_weights(tensor(gram), tensor(moment), count, metric_factor(tensor(metric), count, ridge), ridge).numpy()
    assert np.std(features @ (weights - expected)) < 1e-4 * np.std(features @ expected)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_lstd_finds_the_value_of_a_chain(lambda_: float):
    # States 0 -> 1 -> 2 -> end, rewards 1, 2, 3, gamma 0.5: V(2) = 3, V(1) = 2 + 0.5 * 3 = 3.5, V(0) = 1 + 0.5 * 3.5 = 2.75
    features = th.eye(3, dtype=th.float64)
    following = tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    traces = eligibility_traces(features[None], tensor([[1.0, 1.0, 0.0]]), 0.5 * lambda_)[0]
    statistics = FitStatistics(3)
    rewards, fold = tensor([1.0, 2.0, 3.0]), th.zeros(3, dtype=th.int64)
    statistics.add(features, rewards, fold, traces, features - 0.5 * following)
    th.testing.assert_close(statistics.weights(1e-12), tensor([2.75, 3.5, 3.0]))


@pytest.mark.parametrize(
    "system",
    [
        # With a multiple of the identity added to A, as LSTD is often solved, there would be no solution
        pytest.param(-RIDGE * np.eye(3), id="the negative of the penalty"),
        pytest.param(np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]), id="singular"),
        pytest.param(np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]), id="skew"),
        pytest.param(np.zeros((3, 3)), id="zero"),
    ],
)
def test_lstd_has_small_weights_however_singular_its_system_is(system: np.ndarray):
    moment = tensor([5.0, 6.0, 7.0])
    factor = metric_factor(th.zeros(3, 3, dtype=th.float64), tensor(1.0), RIDGE)
    weights = lstd_weights(tensor(system), moment, tensor(1.0), factor, RIDGE)
    # sqrt(ridge) |w| <= |L^-1 b| / 2, since x / (x^2 + ridge) <= 1 / (2 sqrt(ridge)); the constant may be larger
    assert weights.isfinite().all()
    # Where nothing tells the level, as with gamma = 1 and no terminations, it is zero
    assert weights[0] == 0.0 or system[0, 0] != 0.0
    assert weights[1:].norm() <= moment.norm() / (2 * RIDGE) * (1 + 1e-9)


# --- leave-fold-out and forgetting ------------------------------------------------------------------------------------


def fit_from_scratch(samples: list[np.ndarray], kept: np.ndarray) -> np.ndarray:
    """:return: The minimum of ``(b - A w)' (C + ridge I)^-1 (b - A w) + ridge |w|^2``"""
    _, weights, features, traces, differences, targets = samples
    penalty = math.sqrt(RIDGE) * np.eye(4)
    left, right, count = np.zeros((4, 4)), np.zeros(4), max(weights[kept].sum(), 1.0)
    for i in np.flatnonzero(kept):
        left += weights[i] * np.outer(traces[i], differences[i]) / count
        right += weights[i] * traces[i] * targets[i] / count
    metric = sum(w * np.outer(phi, phi) for w, phi in zip(weights, features, strict=True)) / max(weights.sum(), 1.0)
    root = np.linalg.inv(np.linalg.cholesky(metric + RIDGE * np.eye(4)))
    penalty[0, 0] = math.sqrt(LEVEL_RIDGE)
    return np.linalg.lstsq(np.vstack([root @ left, penalty]), np.append(root @ right, np.zeros(4)), rcond=None)[0]


@pytest.mark.parametrize("forgetting", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "folds",
    [
        pytest.param([0, 1, 2, 0, 1, 2, 2, 2, 0, 1, 0, 1], id="interleaved"),
        pytest.param([0] * 6 + [1] * 5 + [2], id="a fold of one sample"),
        pytest.param([0] * 12, id="a single fold"),
        pytest.param([0, 3] * 6, id="folds without samples"),
    ],
)
def test_leaving_a_fold_out_equals_a_weighted_fit_from_scratch_without_it(folds: list[int], forgetting: float):
    rng = np.random.default_rng(0)
    statistics, samples = FitStatistics(4), [np.zeros(0), np.zeros(0), *np.zeros((3, 0, 4)), np.zeros(0)]
    for labels in (np.arange(20) % 3, np.arange(7) % 2, np.array(folds)):
        n = len(labels)
        features, targets = rng.normal(size=(n, 4)), rng.normal(size=n)
        traces, differences = features + rng.normal(size=(2, n, 4))
        statistics.decay(forgetting)
        given = (tensor(each) for each in (traces, differences))
        own = statistics.add(tensor(features), tensor(targets), th.as_tensor(labels), *given)
        weights = statistics.leave_fold_out(own, RIDGE)
        samples[0][:], samples[1] = -1, forgetting * samples[1]
        samples = [
            np.concatenate(p) for p in zip(samples, [labels, np.ones(n), features, traces, differences, targets], strict=True)
        ]
    for fold in range(max(folds) + 1):
        expected = fit_from_scratch(samples, samples[0] != fold)
        np.testing.assert_allclose(weights[fold].numpy(), expected, rtol=1e-7, atol=1e-9, err_msg=f"fold {fold}")
    expected = fit_from_scratch(samples, samples[0] != 9)
    np.testing.assert_allclose(statistics.weights(RIDGE).numpy(), expected, rtol=1e-7, atol=1e-9)


# --- shrinkage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "targets", "slope"),
    [
        # Centred predictions -1, 0, 1 of variance 2 / 3; Cov = (-1 * 1 + 1 * 2) / 3 = 1 / 3
        pytest.param([3.0, 4.0, 5.0], [1.0, 7.0, 2.0], 0.5, id="half"),
        pytest.param([3.0, 4.0, 5.0], [13.0, 14.0, 15.0], 1.0, id="right but for the mean"),
        pytest.param([3.0, 4.0, 5.0], [0.0, 5.0, 10.0], 1.0, id="never more than the prediction"),
        pytest.param([3.0, 4.0, 5.0], [2.0, 0.0, 1.0], 0.0, id="never its opposite"),
        pytest.param([4.0, 4.0, 4.0], [1.0, 2.0, 3.0], 0.0, id="predictions that do not vary"),
    ],
)
def test_the_calibration_slope_is_as_worked_out_by_hand(predictions: list[float], targets: list[float], slope: float):
    assert calibration_slope(np.array(predictions), np.array(targets)) == pytest.approx(slope)


# --- the baseline as a whole ------------------------------------------------------------------------------------------


def regress(baseline: KernelBaseline, features: th.Tensor, targets: th.Tensor, folds: th.Tensor) -> th.Tensor:
    """With a discount factor of zero nothing follows a step, and the fit is a regression on the rewards."""
    return baseline.fit(features, targets, folds, features, features)


def fitted(inputs: np.ndarray, times: np.ndarray, targets: np.ndarray, **kwargs: object) -> KernelBaseline:
    baseline = KernelBaseline(**kwargs)  # type: ignore[arg-type]
    baseline.observe(inputs)
    regress(baseline, baseline.features(inputs, times), tensor(targets), th.arange(len(targets)) % 5)
    return baseline


def predict(baseline: KernelBaseline, inputs: np.ndarray, times: np.ndarray) -> np.ndarray:
    return (baseline.features(inputs, times).double() @ baseline.weights).numpy()


def draw_regression(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A target that neither its inputs nor the time explain linearly; the inputs have odd units."""
    rng = np.random.default_rng(seed)
    standard, times = rng.normal(size=(n, 2)), rng.uniform(size=n)
    targets = np.cos(1.5 * standard[:, 0]) + standard[:, 1] ** 2 + 4 * (times - 0.5) ** 2 * standard[:, 1]
    return 100.0 + np.array([1000.0, 0.01]) * standard, times, targets


def test_a_fit_that_fails_leaves_the_one_before():
    inputs, times, targets = draw_regression(200, seed=0)
    baseline = fitted(inputs, times, targets)
    before = baseline.weights
    features, folds = baseline.features(inputs, times), th.zeros(200, dtype=th.int64)
    with pytest.raises(th.linalg.LinAlgError):
        regress(baseline, th.full_like(features, th.nan), tensor(targets), folds)
    assert th.equal(baseline.weights, before)


def test_inputs_are_standardised_by_what_was_observed_and_clipped():
    rng = np.random.default_rng(0)
    first, second = 50.0 + 3.0 * rng.normal(size=(300, 2)), 60.0 + 7.0 * rng.normal(size=(200, 2))
    baseline = KernelBaseline()
    baseline.observe(first)
    baseline.observe(second)
    both = np.vstack([first, second])
    features = baseline.features(np.vstack([both, [[-1e6, 1e6]]]), np.zeros(501)).numpy()
    np.testing.assert_allclose(features[:-1, 1:3], (both - both.mean(axis=0)) / both.std(axis=0), atol=1e-3)
    np.testing.assert_array_equal(features[-1, 1:3], [-5.0, 5.0])
    assert features.shape == (501, 1 + 2 + 1 + 128)


@pytest.mark.parametrize(("n_varying", "expected"), [(0, 1.1), (1, 1.1), (4, 0.55), (16, 0.275)])
def test_frequencies_fall_with_the_root_of_the_number_of_inputs_that_vary(n_varying: int, expected: float):
    inputs = np.zeros((50, 20))
    inputs[:, :n_varying] = np.random.default_rng(0).normal(size=(50, n_varying))
    baseline = KernelBaseline(n_features=2000, bandwidth=1.1)
    baseline.observe(inputs)
    assert baseline.get_state()["frequencies"].std().item() == pytest.approx(expected, rel=0.03)


def test_a_nonlinear_return_is_foreseen_while_a_linear_baseline_does_not():
    inputs, times, targets = draw_regression(3000, seed=0)
    unseen_inputs, unseen_times, unseen_targets = draw_regression(1000, seed=1)
    weights = np.linalg.lstsq(np.column_stack([np.ones(3000), inputs, times]), targets, rcond=None)[0]
    linear_predictions = np.column_stack([np.ones(1000), unseen_inputs, unseen_times]) @ weights
    assert explained_variance(predict(fitted(inputs, times, targets), unseen_inputs, unseen_times), unseen_targets) > 0.9
    assert explained_variance(linear_predictions, unseen_targets) < 0.3


# --- inputs that do not vary ------------------------------------------------------------------------------------------


def test_inputs_that_never_vary_do_not_change_the_fit():
    inputs, times, _ = draw_regression(300, seed=0)
    wide_inputs = np.tile([3.0, 0.0, -1e6, 0.1, 0.0, 255.0], (300, 1))
    wide_inputs[:, [1, 4]] = inputs
    wide, narrow = KernelBaseline(), KernelBaseline()
    wide.observe(wide_inputs)
    narrow.observe(inputs)
    # The same random features for the inputs that vary
    narrow.set_state({"frequencies": wide.get_state()["frequencies"][[1, 4, 6]], "phases": wide.get_state()["phases"]})
    features = wide.features(wide_inputs, times), narrow.features(inputs, times)
    assert features[0].shape == (300, 1 + 2 + 1 + 128)
    th.testing.assert_close(*features, rtol=0.0, atol=0.0)


def test_an_input_that_begins_to_vary_joins_a_fit_that_keeps_what_it_knew():
    inputs = np.random.default_rng(0).normal(size=(40, 2))
    inputs[:20, 1] = 1.0
    baseline = KernelBaseline(n_features=4, ridge=1e-2)
    baseline.observe(inputs[:20])
    features = baseline.features(inputs[:20], np.zeros(20))
    baseline.fit(features, th.randn(20, dtype=th.float64), th.zeros(20, dtype=th.int64), features + 0.1, 0.5 * features)
    narrow = baseline.weights
    baseline.observe(inputs[20:])
    wide = baseline.weights
    # [1, z0, tau, cosines] becomes [1, z0, z1, tau, cosines]
    th.testing.assert_close(th.cat([wide[:2], wide[3:]]), narrow)
    assert wide[2] == 0.0


# --- the state --------------------------------------------------------------------------------------------------------


def test_a_state_that_went_through_pickle_predicts_and_goes_on_identically():
    inputs, times, targets = draw_regression(200, seed=0)
    inputs = np.column_stack([inputs, np.ones(200)])
    baseline = fitted(inputs, times, targets, seed=3)
    restored, other = KernelBaseline(seed=4), fitted(inputs, times, targets, seed=4)
    # The seed of the restored one differs: the random features are part of the state
    restored.set_state(pickle.loads(pickle.dumps(baseline.get_state())))
    np.testing.assert_array_equal(predict(restored, inputs, times), predict(baseline, inputs, times))
    assert not np.array_equal(predict(other, inputs, times), predict(baseline, inputs, times))
    inputs[:100, 2] = 2.0
    for one in (baseline, restored):
        one.observe(inputs)
        regress(one, one.features(inputs, times), tensor(targets), th.arange(200) % 3)
    np.testing.assert_array_equal(predict(restored, inputs, times), predict(baseline, inputs, times))


def test_dependent_features_in_single_precision_have_a_fit_that_predicts():
    # Copies of three inputs: the error of the products, about 1e-7 times the largest of them, exceeds the
    # penalty, and the matrix has negative eigenvalues.
    rng = np.random.default_rng(0)
    features = th.as_tensor(5.0 * np.sign(rng.standard_normal((1024, 3)))[:, rng.integers(3, size=300)], dtype=th.float32)
    gram = (features.T @ features).double()
    rounded = gram - 4e-6 * gram.diagonal().mean() * th.eye(300, dtype=th.float64)
    count = th.tensor(1024.0, dtype=th.float64)
    with pytest.raises(th.linalg.LinAlgError):
        th.linalg.cholesky(rounded / count + 1e-5 * th.eye(300, dtype=th.float64))
    targets = features[:, 0].double()
    factor = metric_factor(rounded, count, 1e-5)
    assert th.isfinite(factor).all()
    weights = lstd_weights(rounded, features.T.double() @ targets, count, factor, 1e-5)
    assert (features.double() @ weights - targets).pow(2).mean() < 0.05 * targets.pow(2).mean()


def test_a_matrix_with_nan_has_no_factor():
    with pytest.raises(th.linalg.LinAlgError):
        cholesky(th.full((2, 2), th.nan))
