"""The metric of the value estimate: which inputs its features follow, when it is learned, and that a run continues with it."""

import math
from typing import Any

import numpy as np
import pytest
import torch as th
from helpers import make_envs, make_model, same, saved, weights

from sb3_grpo import GRPO
from sb3_grpo.baseline import ISOTROPIC, KernelBaseline, fourier_features, gradient_metric
from sb3_grpo.buffers.kernel import FIRST_METRIC, MAX_ADVANTAGE
from sb3_grpo.persistence import random_state, set_random_state

LEARNS: dict[str, Any] = dict(rollout_buffer_kwargs=dict(learn_metric=True))


def numbers(*shape: int, seed: int = 0) -> th.Tensor:
    return th.randn(*shape, dtype=th.float64, generator=th.Generator().manual_seed(seed))


def test_the_metric_is_the_outer_product_of_the_gradients_that_autograd_finds():
    inputs, doubled, phases = numbers(20, 3).requires_grad_(), numbers(20).abs().requires_grad_(), numbers(7)
    frequencies, value = numbers(4, 7), numbers(1 + 4 + 7)
    given = doubled / 2, frequencies, phases
    gradients = th.autograd.grad((fourier_features(inputs, *given) @ value).sum(), (inputs, doubled))
    outer = th.stack([th.outer(each, each) for each in th.hstack([each.view(20, -1) for each in gradients])]).sum(dim=0)
    with th.no_grad():
        metric = gradient_metric(value, inputs, *given)
    assert metric is not None
    th.testing.assert_close(metric, 0.9 * 4 * outer / outer.trace() + 0.1 * th.eye(4))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_value_without_gradient_has_no_metric(value: float):
    weights = th.full((5,), value, dtype=th.float64)
    assert gradient_metric(weights, numbers(5, 1), numbers(5), numbers(2, 2), numbers(2)) is None


def unexplained(n_metrics: int) -> tuple[float, KernelBaseline]:
    """
    Fit a function of one of ten inputs, which falls off sharply.

    :return: Share of its variance that a fit with a metric learned so often leaves in other samples, and the fit
    """
    baseline = KernelBaseline(n_features=200, seed=1)
    inputs = numbers(1200, 10).numpy()
    values = np.tanh(4 * inputs[:, 3])
    times, folds = np.zeros(600), th.zeros(600, dtype=th.int64)
    baseline.observe(inputs)

    def fit() -> None:
        features = baseline.features(inputs[:600], times, th.float64)
        baseline.fit(features, th.from_numpy(values[:600]), folds, features, features)

    fit()
    for _ in range(n_metrics):
        with_metric = baseline.with_metric(inputs[:600], times)
        assert with_metric is not None
        baseline = with_metric
        fit()
    predictions = (baseline.features(inputs[600:], times, th.float64) @ baseline.weights).numpy()
    return float(np.var(values[600:] - predictions) / np.var(values)), baseline


def test_features_follow_the_input_that_matters_and_explain_more_with_it():
    (without, _), (with_metric, baseline) = unexplained(0), unexplained(2)
    assert with_metric < 0.5 * without and without < 0.5
    spread = baseline._frequencies.std(dim=1)
    assert spread.argmax() == 3 and spread[3] > 3 * spread[[each for each in range(10) if each != 3]].max()


def test_directions_that_do_not_matter_keep_a_part_of_their_frequencies():
    _, baseline = unexplained(1)
    shares = baseline._frequencies.var(dim=1) / baseline._draws.var(dim=1)
    assert shares.min() >= 0.9 * ISOTROPIC


@pytest.mark.parametrize(
    ("options", "expected"),
    [(LEARNS, [4, 8, 16]), (dict(update_rule="natural"), [4, 8, 16]), (dict(update_rule="clipped"), [])],
)
def test_a_metric_is_learned_each_time_that_the_number_of_rollouts_has_doubled(
    options: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    model, learned = make_model(n_steps=64, **options), []
    with_metric = KernelBaseline.with_metric

    def noted(*args: Any) -> KernelBaseline | None:
        learned.append(model.rollout_buffer._n_fits)
        return with_metric(*args)

    monkeypatch.setattr(KernelBaseline, "with_metric", noted)
    model.learn(64 * model.n_envs * 17)
    assert learned == expected
    assert bool(model.rollout_buffer._recent) is bool(expected)


def test_a_run_without_a_metric_learns_one_once_it_is_asked_to_and_has_rollouts_for_it():
    model = make_model(n_steps=64).learn(128 * 4)
    loaded: Any = GRPO.load(saved(model), env=make_envs(), device="cpu", **LEARNS)
    loaded.learn(128 * 4, reset_num_timesteps=False)
    baseline = loaded.rollout_buffer.baseline
    assert th.equal(baseline._frequencies, baseline._draws)  # before the fifth fit, there were no rollouts for it
    loaded.learn(128, reset_num_timesteps=False)
    baseline = loaded.rollout_buffer.baseline
    assert not th.equal(baseline._frequencies, baseline._draws)


def test_a_new_metric_is_fitted_to_the_rollouts_before():
    model = make_model(n_steps=64, **LEARNS)
    model.learn(64 * model.n_envs * (FIRST_METRIC + 1))
    count = model.rollout_buffer.baseline._statistics.count.item()
    forgetting, n = model.rollout_buffer.baseline.forgetting, 64 * model.n_envs
    assert count == pytest.approx(n * sum(forgetting**age for age in range(FIRST_METRIC + 1)))


@pytest.mark.parametrize("n_before", [3, 5])
def test_a_saved_run_continues_with_the_same_metric(n_before: int):
    model = make_model(n_steps=64, **LEARNS).learn(128 * n_before)
    file, state = saved(model), random_state()
    model.set_env(make_envs(), force_reset=True)  # as a loaded model, the saved one continues from a reset
    loaded = GRPO.load(file, env=make_envs(), device="cpu")
    loaded.learn(128 * 5, reset_num_timesteps=False)
    set_random_state(state)
    model.learn(128 * 5, reset_num_timesteps=False)
    buffers: list[Any] = [model.rollout_buffer, loaded.rollout_buffer]
    fits = [buffer.baseline for buffer in buffers]
    assert th.equal(*(fit._frequencies for fit in fits)) and not th.equal(fits[0]._frequencies, fits[0]._draws)
    assert same(weights(model), weights(loaded))


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_run_continues_with_other_environments_and_the_rollouts_before(n_envs: int):
    model = make_model(n_steps=64, **LEARNS).learn(128 * 3)
    loaded: Any = GRPO.load(saved(model), env=make_envs(n_envs), device="cpu")
    loaded.learn(64 * n_envs * 2, reset_num_timesteps=False)  # the second fit is with a new metric
    assert [len(data.steps) for data in loaded.rollout_buffer._recent] == [128] * 3 + [64 * n_envs] * 2
    baseline = loaded.rollout_buffer.baseline
    assert not th.equal(baseline._frequencies, baseline._draws)


def test_an_advantage_far_from_the_others_counts_as_three_standard_deviations():
    buffer = make_model().rollout_buffer
    advantages = np.r_[np.zeros(99), 50.0]
    assert buffer._scaled(advantages, True).max() == MAX_ADVANTAGE < (50 - 0.5) / np.std(advantages)
    assert buffer._scaled(advantages, False).max() == 50
    assert buffer._scaled(np.r_[-1.0, 1.0], True).std() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("use_time", "horizon", "expected"), [(False, 1000, False), (False, 20, True), (True, 1000, True)], ids=str
)
def test_a_fit_uses_the_time_where_time_limits_are_ends_and_otherwise_if_it_should(
    use_time: bool, horizon: int, expected: bool
):
    model = make_model(n_steps=64, rollout_buffer_kwargs=dict(use_time=use_time, horizon=horizon)).learn(128 * 2)
    baseline = model.rollout_buffer.baseline
    weight_of_time = baseline.weights[-baseline.n_features - 1]
    assert bool(weight_of_time != 0) is expected
