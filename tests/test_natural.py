"""A natural-gradient step goes as far as its limit allows, in the direction of steepest ascent per divergence."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import CHW, SMALL_CNN, AnyEnv
from stable_baselines3.common.env_util import make_vec_env
from test_machine_code import ACTION_SPACES, InTorch, Samples, distant_reference, make_policy, needs_numba, random_update

from sb3_grpo import GRPO, ActorPolicy
from sb3_grpo.arithmetic.choice import choose_learner
from sb3_grpo.arithmetic.machine import MachineLearner
from sb3_grpo.arithmetic.natural import DAMPING, LIMIT, N_SIZES, SHRINKING, conjugate_gradient, fisher_stride, natural_step
from sb3_grpo.arithmetic.objective import NO_CLIPPING, Objective
from sb3_grpo.arithmetic.torch_learner import TorchLearner
from sb3_grpo.losses import exact_kl


def test_conjugate_gradients_solve_a_system_of_two_unknowns_in_two_steps():
    matrix, right = th.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=th.float64), th.tensor([1.0, 2.0], dtype=th.float64)
    solution = conjugate_gradient(lambda vector: matrix @ vector, right, n_steps=2)
    th.testing.assert_close(solution, th.tensor([1.0, 7.0], dtype=th.float64) / 11.0)
    one_step = conjugate_gradient(lambda vector: matrix @ vector, right, n_steps=1)
    th.testing.assert_close(one_step, th.tensor([0.25, 0.5], dtype=th.float64))  # along the right-hand side


class Quadratic:
    """
    Two weights ``x``, the loss ``slope . x`` and the divergence ``factor (x' F x) / 2`` with ``F`` diagonal, for two
    components of an action. With a factor above one, the quadratic model of the divergence is too small.
    """

    n_components = 2

    def __init__(
        self, fisher: list[float], slope: list[float], factor: float = 1.0, loss: Callable[[th.Tensor], float] | None = None
    ):
        self._fisher, self._slope, self._factor = th.tensor(fisher), th.tensor(slope), factor
        self._loss = loss or (lambda x: float(self._slope.dot(x)))
        self.largest = th.full((2,), math.inf)
        self.x = th.zeros(2)

    def loss_and_gradient(self) -> tuple[float, th.Tensor]:
        return self.loss(), self._slope.clone()

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        return self._fisher * vector

    def largest_changes(self, limit: float) -> th.Tensor:
        return self.largest

    def weights(self) -> th.Tensor:
        return self.x.clone()

    def move(self, weights: th.Tensor) -> None:
        self.x = weights.clone()

    def loss(self) -> float:
        return self._loss(self.x)

    def divergence(self) -> float:
        return 0.5 * self._factor * float(self.x.dot(self._fisher * self.x))


def test_a_step_goes_against_the_gradient_divided_by_the_fisher_matrix_up_to_the_limit():
    problem = Quadratic([0.2, 1.8], [3.0, -1.0])
    step = natural_step(problem, limit=0.02)
    # Per component, the matrix is diag(0.1, 0.9) + DAMPING, so the direction is (-3 / 0.2, 1 / 1.0) = (-15, 1). Its length
    # along the matrix is sqrt(0.2 * 15^2 + 1) = sqrt(46), and the step is sqrt(2 * 0.02 / 46) times the direction.
    assert DAMPING == 0.1
    th.testing.assert_close(problem.x, math.sqrt(0.04 / 46) * th.tensor([-15.0, 1.0]))
    assert step.is_accepted and step.n_tried == 1
    assert step.grad_norm == pytest.approx(math.sqrt(10))
    assert step.divergence == pytest.approx(0.25 * 0.04 / 46 * (0.2 * 225 + 1.8)) and step.divergence < 0.02


@pytest.mark.parametrize("slope, change", [(3.0, -0.01), (-3.0, 0.01), (0.001, -0.001)])
def test_a_weight_with_a_largest_change_keeps_to_it_and_the_others_use_the_whole_limit(slope: float, change: float):
    problem = Quadratic([0.2, 1.8], [slope, -1.0])
    problem.largest = th.tensor([0.01, math.inf])
    natural_step(problem, limit=0.02)
    # The direction of the second is 1, with the length 1 along the matrix. So the size is sqrt(2 * 0.02) = 0.2, with which
    # the first would move by -slope / 0.2 * 0.2.
    th.testing.assert_close(problem.x, th.tensor([change, 0.2]))


def test_a_step_is_shortened_as_a_whole():
    problem = Quadratic([0.2, 1.8], [3.0, -1.0], factor=1.4)  # a divergence of 1.26 times the limit at full size
    problem.largest = th.tensor([0.01, math.inf])
    step = natural_step(problem, limit=0.02)
    assert step.n_tried == 2
    th.testing.assert_close(problem.x, SHRINKING * th.tensor([-0.01, 0.2]))


def test_a_step_is_shortened_until_the_divergence_itself_is_within_the_limit():
    full, shorter = Quadratic([2000.0, 2000.0], [1.0, 1.0]), Quadratic([2000.0, 2000.0], [1.0, 1.0], factor=2.0)
    natural_step(full, limit=0.01)
    step = natural_step(shorter, limit=0.01)
    # The divergence falls with the square of the size: 0.8^2 is above a half, and 0.8^4 is below.
    assert step.n_tried == 3 and step.is_accepted
    th.testing.assert_close(shorter.x, SHRINKING**2 * full.x)
    assert 0 < step.divergence <= 0.01


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(Quadratic([1.0, 1.0], [1.0, 0.0], loss=lambda x: float(x.dot(x))), id="the loss rises"),
        pytest.param(Quadratic([1.0, 1.0], [1.0, 0.0], loss=lambda x: math.nan), id="the loss is NaN"),
        pytest.param(Quadratic([1.0, 1.0], [1.0, 0.0], factor=1e9), id="the divergence is far larger than its model"),
        pytest.param(Quadratic([1.0, 1.0], [1.0, 0.0], factor=math.nan), id="the divergence is NaN"),
    ],
)
def test_a_step_that_does_not_help_is_rejected_and_the_weights_stay(problem: Quadratic):
    step = natural_step(problem, limit=0.01)
    assert (step.is_accepted, step.divergence, step.n_tried) == (False, 0.0, N_SIZES)
    assert (problem.x == 0).all()


@pytest.mark.parametrize("slope", [0.0, math.nan])
def test_without_a_gradient_no_step_is_tried(slope: float):
    problem = Quadratic([1.0, 1.0], [slope, 0.0])
    step = natural_step(problem, limit=0.01)
    assert (step.is_accepted, step.n_tried) == (False, 0) and (problem.x == 0).all()
    assert step.grad_norm == pytest.approx(slope, nan_ok=True)


@pytest.mark.parametrize(("n", "n_taken"), [(1, 1), (512, 512), (1023, 1023), (1024, 512), (2048, 512), (2500, 625)])
def test_the_fisher_matrix_is_a_mean_over_512_to_1023_transitions_of_many(n: int, n_taken: int):
    assert len(range(0, n, fisher_stride(n))) == n_taken


# --- the Fisher matrix ---


def score_covariance(policy: ActorPolicy, observations: th.Tensor, actions: list[th.Tensor]) -> th.Tensor:
    """``E[s s']`` of the scores ``s = d log pi(a) / d theta``, by summing over all actions: the definition of the matrix."""
    total: Any = 0.0
    for observation in observations.split(1):
        for action in actions:
            log_prob = policy.evaluate_actions(observation, action.unsqueeze(0))[0]
            score = th.cat([each.flatten() for each in th.autograd.grad(log_prob.sum(), list(policy.parameters()))])
            total = total + log_prob.exp().item() * th.outer(score, score)
    return total / len(observations)


def all_actions(space: Any) -> list[th.Tensor]:
    if isinstance(space, spaces.Discrete):
        return [th.tensor(each) for each in range(int(space.n))]
    sizes = [2] * space.n if isinstance(space, spaces.MultiBinary) else space.nvec.tolist()  # type: ignore[operator]
    return list(th.cartesian_prod(*(th.arange(size) for size in sizes)).float())


@needs_numba
@pytest.mark.parametrize("cls", [ActorPolicy, InTorch], ids=["machine code", "torch"])
@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiBinary"])
def test_products_are_those_of_the_covariance_of_the_scores(name: str, cls: type[ActorPolicy]):
    policy = make_policy(ACTION_SPACES[name], cls, net_arch=[4])
    data = random_update(policy, 5)
    objective = Objective(NO_CLIPPING, "step", 0.0, 0.0, distant_reference(policy), 0.5)
    learner = choose_learner(objective, policy, Samples(data), "natural", math.inf)
    learner.loss_and_gradient()
    assert type(learner) is (MachineLearner if cls is ActorPolicy else TorchLearner)
    matrix = score_covariance(policy, data.observations, all_actions(ACTION_SPACES[name]))  # type: ignore[arg-type]
    for vector in th.randn(3, len(matrix)):
        th.testing.assert_close(learner.fisher_product(vector), matrix @ vector, rtol=1e-3, atol=1e-5)


# --- a whole update ---


def make_model(env: Any = "Pendulum-v1", policy: Any = "MlpPolicy", **options: Any) -> GRPO:
    settings: dict[str, Any] = dict(n_steps=256, update_rule="natural", seed=0, device="cpu")
    return GRPO(policy, env, **{**settings, **options})


@pytest.mark.parametrize("limit", [0.001, 0.02])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_update_moves_the_policy_almost_to_the_limit(env: str, limit: float):
    model = make_model(env, target_kl=limit, normalize_observations=False)
    model.learn(256)
    observations = model.rollout_buffer.update.observations
    before, after = make_model(env, target_kl=limit, normalize_observations=False).policy, model.policy
    with th.no_grad():
        moved = exact_kl(after.get_distribution(observations), before.get_distribution(observations)).mean().item()
    assert 0.3 * limit < moved <= limit
    assert model.update_metrics["train/kl_divergence_loss"] == pytest.approx(moved, rel=1e-3)
    assert model.update_metrics["train/is_line_search_success"] == 1.0


@pytest.mark.parametrize(
    ("target_kl", "num_timesteps", "limit"),
    [(None, 100_000, 0.02), (None, 1_200_000, 0.005), (None, 6_000_000, 0.001), (0.02, 1_200_000, 0.02)],
)
def test_the_default_limit_falls_in_long_runs_and_a_limit_that_was_set_does_not(
    target_kl: float | None, num_timesteps: int, limit: float
):
    model = make_model(target_kl=target_kl, normalize_observations=False).learn(256)
    model.num_timesteps = num_timesteps - 256  # as if it had learned for so long
    model.learn(256, reset_num_timesteps=False)
    assert 0.3 * limit < model.update_metrics["train/kl_divergence_loss"] <= limit


@pytest.mark.parametrize(
    ("options", "num_timesteps", "expected"),
    [
        ({}, 300_000, 0.9),
        ({}, 600_000, 0.95),
        ({}, 6_000_000, 0.98),
        (dict(gae_lambda=0.9), 600_000, 0.9),
        (dict(update_rule="clipped"), 600_000, 0.98),
    ],
)
def test_lambda_rises_in_long_runs_unless_it_was_set(
    options: dict[str, Any], num_timesteps: int, expected: float, tmp_path: Path
):
    def learned_at(model: GRPO, num_timesteps: int) -> float:
        model.num_timesteps = num_timesteps  # as if it had learned for so long
        return model.learn(256, reset_num_timesteps=False).rollout_buffer.gae_lambda

    model = make_model(make_vec_env("Pendulum-v1", n_envs=2), n_steps=128, **options)
    assert learned_at(model, num_timesteps) == pytest.approx(expected)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=model.get_env())
    assert learned_at(loaded, num_timesteps) == pytest.approx(expected)
    assert learned_at(GRPO.load(tmp_path / "model", env=model.get_env(), gae_lambda=0.7), num_timesteps) == 0.7
    loaded.gae_lambda = 0.8
    assert learned_at(loaded, num_timesteps) == 0.8


def test_steps_become_short_where_all_actions_have_become_nearly_as_good():
    class Calm(AnyEnv):
        """The best action is 0.3."""

        scale = 100.0

        def step(self, action: np.ndarray) -> Any:
            observation, _, *others = super().step(action)
            return observation, -self.scale * float((action[0] - 0.3) ** 2), *others

    env = Calm(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,)))
    # A fit to earlier rollouts as well would take a while to notice
    model = make_model(env, normalize_observations=False, rollout_buffer_kwargs=dict(forgetting=0.0)).learn(2048)
    assert model.update_metrics["train/kl_divergence_loss"] > 0.3 * LIMIT
    env.scale = 0.1
    for target_kl in (None, LIMIT):
        model.target_kl = target_kl
        model.learn(1024, reset_num_timesteps=False)
        assert 0 < model.update_metrics["train/kl_divergence_loss"] <= 0.01 * LIMIT


@pytest.mark.parametrize("policy", ["MlpPolicy", InTorch], ids=["machine code", "torch"])
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_the_deviation_changes_by_no_more_than_its_part_of_the_limit(policy: Any, factor: float):
    model = make_model(policy=policy, policy_kwargs=dict(log_std_lr_factor=factor), target_kl=0.01)
    before: Any = model.policy.get_distribution(th.zeros(1, 3)).distribution
    model.learn(256)
    change = model.policy.log_std.item() - before.stddev.log().item()
    # A change by d has the divergence d^2: a fiftieth of the limit, or with the factor a hundredth of that.
    sizes = SHRINKING ** th.arange(N_SIZES)
    allowed = factor * math.sqrt(0.01 / 50) * sizes
    assert (abs(abs(change) - allowed) < 1e-6).any()
    after = th.distributions.Normal(before.mean, before.stddev * math.exp(change))
    assert th.distributions.kl_divergence(before, after).item() < 1.01 * factor**2 * 0.01 / 50


OTHER_POLICIES: dict[str, Callable[[], GRPO]] = {
    "images": lambda: make_model(AnyEnv(CHW), "CnnPolicy", n_steps=64, policy_kwargs=SMALL_CNN),
    "gSDE": lambda: make_model(use_sde=True),
    "squashed": lambda: make_model(use_sde=True, policy_kwargs=dict(squash_output=True), ent_coef=0.0),
    "ratios of trajectories": lambda: make_model("CartPole-v1", objective=dict(importance_sampling_level="trajectory")),
    "complete groups": lambda: make_model("CartPole-v1", rollout_buffer_class="outcome"),
    "frozen layer": lambda: frozen(make_model()),
}


def frozen(model: GRPO) -> GRPO:
    model.policy.policy_net[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", OTHER_POLICIES.values(), ids=OTHER_POLICIES)
def test_every_policy_takes_natural_gradient_steps(make: Callable[[], GRPO]):
    model = make()
    kept = {name: each.clone() for name, each in model.policy.named_parameters()}
    model.learn(model.n_steps * 2)
    assert 0 < model.update_metrics["train/kl_divergence_loss"] <= LIMIT
    for name, parameter in model.policy.named_parameters():
        assert bool((parameter != kept[name]).any()) == parameter.requires_grad, name


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["MlpPolicy", InTorch], ids=["machine code", "torch"])
def test_it_solves_cart_pole(policy: Any):
    model = make_model("CartPole-v1", policy, n_steps=1024, gae_lambda=0.95, target_kl=0.02).learn(60_000)
    assert np.mean([each["r"] for each in model.ep_info_buffer]) > 300  # type: ignore[union-attr]
