"""The signal of updates: cosines that are known, and steps that GRPO takes."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_util import make_vec_env

from benchmarks import gradients
from benchmarks.gradients import Direction, directions, signals
from sb3_grpo import GRPO

RNG = np.random.default_rng(0)
FISHER = np.diag(RNG.uniform(0.1, 10.0, size=30))


def direction(gradient: np.ndarray) -> Direction:
    return Direction(gradient, np.linalg.solve(FISHER, gradient))


def test_the_signal_is_one_along_the_gradient_and_none_across_it_in_the_metric_of_the_fisher_matrix() -> None:
    gradient, other = RNG.normal(size=(2, 30))
    across = other - gradient * (other @ np.linalg.solve(FISHER, gradient)) / (gradient @ np.linalg.solve(FISHER, gradient))
    found = signals([direction(gradient)] * 3, [direction(5 * gradient), direction(-gradient), direction(across)])
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0], atol=1e-9)


def test_errors_of_the_gradient_do_not_change_the_mean_signal() -> None:
    gradient = np.linalg.cholesky(FISHER) @ np.ones(30)
    noise = RNG.normal(size=(2000, 30)) @ np.linalg.cholesky(FISHER).T
    updates = [direction(gradient + 2 * each) for each in noise[:1000]]
    exact = signals([direction(gradient)] * 2, updates)
    estimated = signals([direction(gradient + 5 * each) for each in noise[1000:]], updates)
    assert 0.35 < exact.mean() < 0.5  # about 1 / sqrt(1 + 2^2)
    assert estimated.mean() == pytest.approx(exact.mean(), rel=0.1)


def test_a_gradient_that_its_estimates_do_not_share_is_an_error() -> None:
    gradient = RNG.normal(size=30)
    for truth in ([gradient], [gradient, -gradient]):
        with pytest.raises(ValueError, match=rf"^{len(truth)} long .* more `--rollouts`"):
            signals([direction(each) for each in truth], [direction(gradient)])


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> dict[str, th.Tensor]:
    """A policy that has learned for a rollout."""
    monkeypatch.setattr(gradients, "N_UNSEEN", 0)
    model = GRPO("MlpPolicy", make_vec_env("Pendulum-v1", 8, seed=0), n_steps=256, seed=1).learn(2048)
    return {name: each.clone() for name, each in model.policy.state_dict().items()}


def test_grpo_would_move_along_the_noted_direction(before: dict[str, th.Tensor]) -> None:
    [noted] = directions("Pendulum-v1", 0, before, n_rollouts=1, size=2048)
    model = GRPO("MlpPolicy", make_vec_env("Pendulum-v1", 8, seed=0), n_steps=256, seed=0)
    model.policy.load_state_dict(before)
    model.learn(2048)
    names = [name for name, _ in model.policy.named_parameters() if name != "log_std"]
    step = th.cat([(model.policy.state_dict()[name] - before[name]).flatten() for name in names]).numpy()
    *means, std = noted.natural
    assert std == noted.gradient[-1] == 0.0  # whose step has a limit of its own
    assert -step @ means == pytest.approx(np.linalg.norm(step) * np.linalg.norm(means), rel=1e-4)


def test_other_options_form_updates_from_the_same_rollouts(
    before: dict[str, th.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards: list[np.ndarray] = []
    train = gradients.FrozenGRPO.train

    def noting(self: gradients.FrozenGRPO) -> None:
        rewards.append(self.rollout_buffer.rewards.copy())
        train(self)

    monkeypatch.setattr(gradients.FrozenGRPO, "train", noting)
    by_default = directions("Pendulum-v1", 0, before, n_rollouts=2, size=2048)
    others = directions("Pendulum-v1", 0, before, n_rollouts=2, size=2048, gae_lambda=0.5)
    assert len(by_default) == len(others) == 2
    np.testing.assert_array_equal(rewards[:2], rewards[2:])
    assert not np.allclose(by_default[0].gradient, others[0].gradient)


def test_rollouts_may_have_another_length(before: dict[str, th.Tensor]) -> None:
    assert len(directions("Pendulum-v1", 0, before, n_rollouts=3, size=2048, n_steps=64)) == 3


def test_updates_that_only_the_fit_sees_are_left_out(before: dict[str, th.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    everything = directions("Pendulum-v1", 0, before, n_rollouts=3, size=512)
    monkeypatch.setattr(gradients, "N_UNSEEN", 2)
    [last] = directions("Pendulum-v1", 0, before, n_rollouts=1, size=512)
    np.testing.assert_array_equal(last.gradient, everything[2].gradient)
