"""The defaults, the direction of a natural-gradient step, the metrics of a rejected one, and what the defaults learn."""

import inspect
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, AnyEnv, mean_return, weights
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.vec_env import DummyVecEnv
from test_machine_code import InTorch
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.utils import parameters_to_vector

from sb3_grpo import (
    GRPO,
    ActorPolicy,
    ObjectiveOptions,
    advantages,
    baseline,
    buffers,
    losses,
    normalization,
    policies,
    relative,
)
from sb3_grpo.arithmetic import natural
from sb3_grpo.buffers import base, kernel

# --- defaults -----------------------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
OF_EVERY_BUFFER = dict(
    gae_lambda=0.98, gamma=0.99, n_envs=1, group_size=2, horizon=None, reward_weights=None, sequence_length=None
)
OF_COMPLETE_GROUPS = dict(scale=None, max_waiting=None, tied_groups="keep", component_aggregation="sum_then_normalize")
#: ``test_pages.py`` has those of GRPO.
DEFAULTS: dict[Any, dict[str, Any]] = {
    ObjectiveOptions: dict(
        clip_range_high=None,
        importance_sampling_level="step",
        loss_aggregation="step",
        kl_coef=0.0,
        adaptive_kl_target=None,
        kl_reference="initial",
        kl_estimator="exact",
    ),
    buffers.GroupRolloutBuffer: dict(
        buffer_size=REQUIRED, observation_space=REQUIRED, action_space=REQUIRED, device="auto", **OF_EVERY_BUFFER
    ),
    buffers.KernelRolloutBuffer: dict(
        n_features=128,
        bandwidth=1.1,
        ridge=1e-5,
        forgetting=0.8,
        n_folds=4,
        learn_metric=False,
        use_time=True,
        relative=True,
    ),
    buffers.CompleteGroupRolloutBuffer: OF_COMPLETE_GROUPS,
    buffers.OutcomeRolloutBuffer: dict(leave_one_out=False),
    ActorPolicy: dict(
        observation_space=REQUIRED,
        action_space=REQUIRED,
        lr_schedule=REQUIRED,
        net_arch=None,
        activation_fn=th.nn.Tanh,
        ortho_init=True,
        use_sde=False,
        log_std_init=None,
        full_std=True,
        use_expln=False,
        squash_output=False,
        features_extractor_class=None,
        features_extractor_kwargs=None,
        normalize_images=True,
        normalize_observations=False,
        optimizer_class=th.optim.Adam,
        optimizer_kwargs=None,
        log_std_lr_factor=1.0,
        lr_follows_std=True,
    ),
}
CONSTANTS: dict[Any, dict[str, Any]] = {
    natural: dict(
        LIMIT=0.02,
        CONSTANT_UNTIL=300_000,
        DAMPING=0.1,
        FISHER_SAMPLES=512,
        CG_STEPS=15,
        CG_TOLERANCE=1e-10,
        SHRINKING=0.8,
        N_SIZES=10,
    ),
    advantages: dict(EPS=1e-8, TIE_TOLERANCE=1e-9),
    losses: dict(MAX_LOG_RATIO=20.0),
    baseline: dict(LEVEL_RIDGE=1e-12, MAX_CORRECTION=1e-2),
    relative: dict(FORGETTING=0.95, N_STANDARD_ERRORS=2.0, MAX_AGE=16),
    kernel: dict(LARGE_GROUP=4, LARGE_GROUP_ABOVE=1 / 3, MIN_RIDGE=1e-6, RESOLUTION=1e-4, MAX_UNSEEN=0.5),
    base: dict(DEFAULT_GROUP_SIZE=2),
    normalization: dict(MAX_STANDARDISED=10.0, MIN_VARIATION=1e-6),
    policies: dict(LOG_STD_SHARE=0.02),
}


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
def test_the_defaults_of_a_constructor_are_those_of_the_table(cls: Any):
    own = inspect.signature(cls.__init__).parameters.values()
    named = {
        each.name: each.default for each in own if each.kind is each.POSITIONAL_OR_KEYWORD or each.kind is each.KEYWORD_ONLY
    }
    del named["self"]
    assert named == DEFAULTS[cls]


@pytest.mark.parametrize("module", CONSTANTS, ids=lambda module: module.__name__)
def test_the_constants_of_a_module_are_those_of_the_table(module: Any):
    assert {name: getattr(module, name) for name in CONSTANTS[module]} == CONSTANTS[module]


# --- natural-gradient steps -----------------------------------------------------------------------------------------------


BY_BOTH_PATHS = pytest.mark.parametrize("policy", ["MlpPolicy", InTorch], ids=["machine code", "torch"])


def rolled_out(env: Any, policy: Any, **options: Any) -> GRPO:
    """:return: A model that has collected a rollout, and is about to update"""
    settings: dict[str, Any] = dict(n_steps=256, update_rule="natural", seed=0, normalize_observations=False, device="cpu")
    model = GRPO(policy, env, **{**settings, **options})
    _, callback = model._setup_learn(256)
    assert model.env is not None
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def exact_step(model: GRPO, damping: float, limit: float) -> th.Tensor:
    """
    :return: The step along ``-(F / n_components + damping I)^-1 g`` whose divergence is the limit by the quadratic model, from
        the gradient and from the whole matrix of second derivatives in double precision. Without standard deviations
    """
    update: Any = model.rollout_buffer.update
    named = {name: each.detach().double() for name, each in model.policy.named_parameters()}
    sizes = [each.numel() for each in named.values()]
    is_mean = th.cat([th.full((each.numel(),), name != "log_std") for name, each in named.items()])
    is_continuous = isinstance(model.action_space, spaces.Box)
    observations, actions, advantages = (each.double() for each in (update.observations, update.actions, update.advantages))

    def distribution(vector: th.Tensor) -> Any:
        state = {name: part.view_as(named[name]) for name, part in zip(named, vector.split(sizes), strict=True)}
        hidden = (observations @ state["policy_net.0.weight"].T + state["policy_net.0.bias"]).tanh()
        output = hidden @ state["action_net.weight"].T + state["action_net.bias"]
        return Normal(output, state["log_std"].exp()) if is_continuous else Categorical(logits=output)

    def summed(each: th.Tensor) -> th.Tensor:
        return each.sum(dim=1) if is_continuous else each

    now = parameters_to_vector(named.values())
    before = distribution(now)
    taken = actions if is_continuous else actions.flatten()

    def loss(vector: th.Tensor) -> th.Tensor:
        ratio = summed(distribution(vector).log_prob(taken) - before.log_prob(taken)).exp()
        return -(ratio * advantages).mean()

    def divergence(vector: th.Tensor) -> th.Tensor:
        return summed(kl_divergence(distribution(vector), before)).mean()

    gradient = th.autograd.functional.jacobian(loss, now)
    fisher = th.autograd.functional.hessian(divergence, now)
    matrix = fisher / get_action_dim(model.action_space) + damping * th.eye(len(now))
    step = th.linalg.solve(matrix, -gradient) * is_mean
    return (step * (2.0 * limit / step.dot(matrix @ step)).sqrt())[is_mean]


@BY_BOTH_PATHS
@pytest.mark.parametrize("env", ["CartPole-v1", AnyEnv(action_space=BOX)], ids=["Discrete", "Box of two"])
def test_a_natural_step_is_that_of_an_exact_solution(env: Any, policy: Any):
    model = rolled_out(env, policy, policy_kwargs=dict(net_arch=[4], ortho_init=False))
    expected = exact_step(model, damping=0.1, limit=0.02)
    before = mean_weights(model)
    model.train()
    shortened = 0.8 ** (model.logger.name_to_value["train/line_search_steps"] - 1)
    th.testing.assert_close(mean_weights(model) - before, shortened * expected, rtol=1e-3, atol=1e-4 * expected.norm().item())


def mean_weights(model: GRPO) -> th.Tensor:
    named = model.policy.named_parameters()
    return parameters_to_vector([each.detach().double() for name, each in named if name != "log_std"])


@BY_BOTH_PATHS
def test_the_metrics_of_a_rejected_step_are_those_of_the_weights_that_stay(policy: Any):
    # A step of this size makes the policy deterministic, and the bonus for entropy outweighs what is gained.
    model = rolled_out("CartPole-v1", policy, target_kl=1e6, ent_coef=100.0)
    update, before = model.rollout_buffer.update, weights(model)
    with th.no_grad():
        entropy: Any = model.policy.evaluate_actions(update.observations, update.actions)[1]
    model.train()
    logged = model.logger.name_to_value
    assert all(th.equal(each, before[name]) for name, each in weights(model).items())
    assert (logged["train/is_line_search_success"], logged["train/line_search_steps"]) == (0.0, 10)
    assert logged["train/entropy_loss"] == pytest.approx(-entropy.mean().item(), rel=1e-5)
    assert logged["train/loss"] == pytest.approx(-(update.advantages.mean() + 100.0 * entropy.mean()).item(), rel=1e-5)
    surrogate = -update.advantages.mean().item()
    expected = {"approx_kl": 0.0, "kl_divergence_loss": 0.0, "policy_gradient_loss": surrogate, "effective_sample_size": 1.0}
    assert {name: logged[f"train/{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)


# --- learning -------------------------------------------------------------------------------------------------------------


class Pole(gym.Env):
    """A damped pendulum that starts near the top and falls. The reward is the cosine of its angle, over 32 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.angle, self.velocity = self.np_random.uniform(-1.0, 1.0, 2)
        self.steps_left = 32
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.velocity += 0.1 * (3.0 * math.sin(self.angle) + 10.0 * float(action[0]) - 0.5 * self.velocity)
        self.angle += 0.1 * self.velocity
        self.steps_left -= 1
        return self._observe(), math.cos(self.angle), False, self.steps_left == 0, {}

    def _observe(self) -> np.ndarray:
        return np.array([math.cos(self.angle), math.sin(self.angle), self.velocity], np.float32)


class Random:
    """Acts by chance."""

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        return np.random.uniform(-1.0, 1.0, (len(observation), 1)), None


def test_the_default_learns_to_balance_a_pole_in_five_updates():
    model = GRPO("MlpPolicy", DummyVecEnv([Pole] * 8), seed=0, device="cpu")
    assert mean_return(Random(), Pole()) < 5.0 and mean_return(model, Pole()) < 5.0
    # Ten seeds reached 31.0 to 31.4 of 32; three with 16 features and forgetting 0.1 reached 26.5, 11.0 and 24.7.
    assert mean_return(model.learn(5 * 2048), Pole()) > 29.5
