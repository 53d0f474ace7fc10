"""Action masks: actions that are not allowed are never taken and never learned from, and allowing all changes nothing."""

import sys
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import SMALL, same, saved, weights
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.maskable.utils import get_action_masks
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from torch import nn

from sb3_grpo import GRPO, MaskableGRPO
from sb3_grpo.distributed import RayVecEnv
from sb3_grpo.masks import FORCED, checked_masks, choices_of, forced_logits, masked_logits

# Workers on Ray cannot import these modules
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(helpers)

KINDS = {
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
}
SPACES = [pytest.param(space, id=name) for name, space in KINDS.items()]
#: Both kinds of updates, in machine code and, for a policy that it does not take, in torch.
PATHS: dict[str, dict[str, Any]] = {
    f"{rule} in {path}": dict(update_rule=rule, policy_kwargs=policy)
    for rule in ("clipped", "natural")
    for path, policy in (("machine code", {}), ("torch", dict(activation_fn=nn.ELU)))
}
#: Each space with both updates in machine code, which has functions for each space, and with one of them in torch
SPACES_PATHS_BUFFERS = [
    pytest.param(KINDS[kind], PATHS[path], buffer, id=f"{kind}, {path}, {buffer}")
    for kind, path, buffer in [
        ("Discrete", "clipped in machine code", "kernel"),
        ("Discrete", "natural in machine code", "outcome"),
        ("Discrete", "clipped in torch", "outcome"),
        ("MultiDiscrete", "clipped in machine code", "outcome"),
        ("MultiDiscrete", "natural in machine code", "kernel"),
        ("MultiDiscrete", "natural in torch", "outcome"),
        ("MultiBinary", "clipped in machine code", "kernel"),
        ("MultiBinary", "natural in machine code", "outcome"),
        ("MultiBinary", "clipped in torch", "kernel"),
    ]
]


def one_hot(action: Any, choices: list[int]) -> np.ndarray:
    """:return: Which choices an action takes, in the layout of a mask"""
    return np.concatenate([np.arange(n) == chosen for chosen, n in zip(np.ravel(action), choices, strict=True)])


class Rules(gym.Env[np.ndarray, Any]):
    """
    Allows random choices in each step, sees one of them, and counts actions that were not allowed.

    :param action_space: Action space
    :param allow: Probability that a choice is allowed; one choice of each component is allowed anyway
    :param mask: Mask to return instead, or a function that makes one
    """

    def __init__(self, action_space: spaces.Space, allow: float = 0.5, mask: Any = None):
        self.action_space = action_space
        self.choices = choices_of(action_space)
        self.observation_space = spaces.Box(0.0, 1.0, (sum(self.choices) + 1,), np.float32)
        self.allow, self.mask = allow, mask
        self.n_forbidden = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._next(), {}

    def _next(self) -> np.ndarray:
        self.allowed = self.np_random.random(sum(self.choices)) < self.allow
        for first, n in zip(np.cumsum([0, *self.choices[:-1]]), self.choices, strict=True):
            self.allowed[first + self.np_random.integers(n)] = True
        return np.append(self.allowed, self.np_random.random()).astype(np.float32)

    def action_masks(self) -> Any:
        return self.allowed if self.mask is None else self.mask

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        taken = one_hot(action, self.choices)
        self.n_forbidden += int((taken & ~self.allowed).sum())
        self.n_steps += 1
        reward = float(taken[0])
        return self._next(), reward, False, self.n_steps == 20, {}


def make_rules(action_space: spaces.Space, n_envs: int = 4, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([partial(Rules, action_space, **kwargs)] * n_envs)


def make_model(env: Any, cls: type[GRPO] = MaskableGRPO, policy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    small: dict[str, Any] = dict(n_steps=32, batch_size=32, n_epochs=2, learning_rate=0.01, seed=0, device="cpu")
    return cls("MlpPolicy", env, policy_kwargs={**SMALL, **(policy_kwargs or {})}, **{**small, **kwargs})


def n_forbidden(env: Any) -> int:
    return sum(env.get_attr("n_forbidden"))


# --- the pure functions ---


def test_a_choice_that_is_not_allowed_has_a_logit_that_excludes_it():
    assert forced_logits([[1, 0, 1]], spaces.Discrete(3), 1).tolist() == [[0, -FORCED, 0]]
    assert forced_logits([[1, 0, 0, 1, 1]], spaces.MultiDiscrete([2, 3]), 1).tolist() == [[0, -FORCED, -FORCED, 0, 0]]
    # Each component of MultiBinary: "0 is allowed", "1 is allowed"
    assert forced_logits([[1, 1, 0, 1, 1, 0]], spaces.MultiBinary(3), 1).tolist() == [[0, FORCED, -FORCED]]


def test_logits_of_allowed_choices_keep_their_values_and_their_gradient():
    logits = th.tensor([[0.1, -0.2, 0.3]], requires_grad=True)
    masked = masked_logits(logits, np.array([True, False, True]), spaces.Discrete(3))
    assert masked[0, [0, 2]].tolist() == logits[0, [0, 2]].tolist()
    th.distributions.Categorical(logits=masked).log_prob(th.tensor([0])).sum().backward()
    gradient = logits.grad
    assert gradient is not None and gradient[0, 1] == 0
    p = th.softmax(th.tensor([0.1, 0.3]), dim=0)
    assert th.allclose(gradient[0, [0, 2]], th.stack([1 - p[0], -p[1]]))


@pytest.mark.parametrize(
    ("masks", "choices", "expected"),
    [
        pytest.param([[1, 1], [0, 0]], [2], (1, "allows no action"), id="nothing"),
        pytest.param([[1, 1, 1, 0, 0]], [3, 2], (0, "allows no choice for component 1 of the action"), id="no choice"),
        pytest.param([[1, 1], [1, 1, 1]], [2], (1, "3 entries as its action mask: return 2 entries"), id="one is longer"),
        pytest.param([[1, 1], None], [2], (1, "None as its action mask"), id="None"),
    ],
)
def test_a_mask_that_cannot_be_used_is_explained(masks: Any, choices: list[int], expected: tuple[int, str]):
    env, what = checked_masks(masks, choices)
    assert env == expected[0] and expected[1] in str(what)


# --- learning ---


@pytest.mark.parametrize(("action_space", "path", "buffer"), SPACES_PATHS_BUFFERS)
def test_actions_that_are_not_allowed_are_never_taken(action_space: spaces.Space, path: dict[str, Any], buffer: str):
    env = make_rules(action_space)
    options: dict[str, Any] = dict(rollout_buffer_class=buffer, ent_coef=0.1, objective=dict(kl_coef=0.1))
    model = make_model(env, **options, **path).learn(1000)
    assert n_forbidden(env) == 0
    model.learn(500, use_masking=False)
    assert n_forbidden(env) > 0  # so the environment counts


@pytest.mark.parametrize(
    ("path", "estimator"),
    [*((name, "exact") for name in PATHS), ("clipped in torch", "k3"), ("natural in torch", "k3")],
)
@pytest.mark.parametrize(
    ("action_space", "mask", "unused"),
    [
        pytest.param(spaces.Discrete(5), [1, 1, 0, 1, 0], [2, 4], id="Discrete"),
        pytest.param(spaces.MultiDiscrete([2, 3]), [1, 1, 0, 1, 1], [2], id="MultiDiscrete"),
        pytest.param(spaces.MultiBinary(3), [1, 1, 1, 0, 0, 1], [1, 2], id="MultiBinary"),
    ],
)
def test_outputs_without_a_choice_get_no_gradient(
    action_space: spaces.Space, mask: list[int], unused: list[int], estimator: str, path: str
):
    env = make_rules(action_space, allow=1.0, mask=mask)
    model = make_model(env, ent_coef=0.1, objective=dict(kl_coef=0.1, kl_estimator=estimator), **PATHS[path])
    layer = model.policy.action_net
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    model.learn(256)
    for old, new in zip(before, (layer.weight, layer.bias), strict=True):
        changed = (old != new).reshape(len(old), -1).any(dim=1)
        assert [i for i in range(len(old)) if not changed[i]] == unused


@pytest.mark.filterwarnings("ignore:The environment has `action_masks`, which GRPO ignores")
@pytest.mark.parametrize(("action_space", "path", "buffer"), SPACES_PATHS_BUFFERS)
def test_masks_that_allow_everything_change_nothing(action_space: spaces.Space, path: dict[str, Any], buffer: str):
    options: dict[str, Any] = dict(
        rollout_buffer_class=buffer, ent_coef=0.01, objective=dict(kl_coef=0.1, adaptive_kl_target=0.01), **path
    )
    masked = make_model(make_rules(action_space, allow=1.0), **options).learn(512)
    plain = make_model(make_rules(action_space, allow=1.0), GRPO, **options).learn(512)
    assert all(th.equal(old, new) for old, new in zip(weights(masked).values(), weights(plain).values(), strict=True))
    unmasked = make_model(make_rules(action_space, allow=1.0), **options).learn(512, use_masking=False)
    assert same(weights(masked), weights(unmasked))


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_an_update_evaluates_actions_with_the_masks_of_their_own_step(buffer: str):
    options: dict[str, Any] = dict(rollout_buffer_class=buffer, learning_rate=0.0, normalize_observations=False)
    model = make_model(make_rules(spaces.Discrete(5)), **options).learn(512)
    update = model.rollout_buffer.update
    with th.no_grad():
        log_prob, _ = model.policy.evaluate_actions(update.observations, update.actions, action_masks=update.action_masks)
        unmasked, _ = model.policy.evaluate_actions(update.observations, update.actions)
    # Observations show the masks.
    assert th.equal(update.action_masks, update.observations[:, :-1] > 0.5)
    assert th.allclose(log_prob, update.old_log_prob, atol=1e-5)
    assert not th.allclose(unmasked, update.old_log_prob, atol=1e-1)


@pytest.mark.parametrize("rule", ["clipped", "natural"])
@pytest.mark.parametrize("action_space", SPACES)
def test_both_paths_learn_the_same(action_space: spaces.Space, rule: str, monkeypatch: pytest.MonkeyPatch):
    def train() -> dict[str, th.Tensor]:
        options: dict[str, Any] = dict(ent_coef=0.01, objective=dict(kl_coef=0.1), learning_rate=1e-3, update_rule=rule)
        return weights(make_model(make_rules(action_space), **options).learn(256))

    compiled = train()
    monkeypatch.setattr("sb3_grpo.arithmetic.choice.compile_functions", lambda *_: "the test wants torch")
    by_torch = train()
    assert all(th.allclose(compiled[key], by_torch[key], atol=1e-4) for key in compiled)
    assert not same(compiled, by_torch)


# --- neighbours ---


def test_evaluation_and_callback_of_sb3_contrib_take_the_model():
    env, eval_env = make_rules(spaces.Discrete(5)), make_rules(spaces.Discrete(5), n_envs=2)
    callback = MaskableEvalCallback(eval_env, eval_freq=64, n_eval_episodes=4, warn=False, verbose=0)
    model = make_model(env).learn(512, callback=callback)
    assert callback.last_mean_reward > 0
    evaluate_policy(model, eval_env, n_eval_episodes=4, warn=False)
    assert n_forbidden(eval_env) == 0
    evaluate_policy(model, eval_env, n_eval_episodes=4, warn=False, use_masking=False)
    assert n_forbidden(eval_env) > 0


def test_predict_takes_the_mask_of_one_observation_and_those_of_a_batch():
    env = make_rules(spaces.Discrete(5))
    model = make_model(env)
    obs = env.reset()
    for deterministic in (True, False):
        actions, _ = model.predict(obs, action_masks=get_action_masks(env), deterministic=deterministic)
        assert all(get_action_masks(env)[range(4), actions])
        assert model.predict(obs[0], action_masks=[0, 0, 0, 1, 0], deterministic=deterministic)[0] == 3
    with pytest.raises(ValueError, match=r"`action_masks` of shape \(4,\) do not fit 1 observation.s. and Discrete\(5\)"):
        model.predict(obs[0], action_masks=[0, 0, 0, 1])
    plain = [model.predict(obs, deterministic=True)[0].tolist() for _ in range(2)]  # an error leaves no mask behind
    assert plain[0] == plain[1]


def test_an_action_masker_around_an_environment_is_enough():
    masker = partial(ActionMasker, action_mask_fn=lambda env: [True, False, False])
    env = make_vec_env("Acrobot-v1", 2, wrapper_class=masker)
    model = make_model(env)

    seen: list[bool] = []

    def watch(local: dict[str, Any], _: dict[str, Any]) -> bool:
        seen.append(not local["actions"].any() and local["action_masks"].tolist() == [[True, False, False]] * 2)
        return True

    model.learn(64, callback=watch)
    assert len(seen) == 32 and all(seen)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_masks_come_from_environments_in_other_processes(start_method: str):
    results = []
    for make in (DummyVecEnv, partial(SubprocVecEnv, start_method=start_method)):
        env = make([partial(Rules, spaces.Discrete(5))] * 2)
        results.append(weights(make_model(env).learn(128)))
        assert n_forbidden(env) == 0
        env.close()
    assert same(*results)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_ends_with_the_module")
def test_workers_on_ray_act_with_masks():
    env = RayVecEnv([partial(Rules, spaces.Discrete(5))] * 4, n_workers=2)
    model = make_model(env).learn(256)
    assert n_forbidden(env) == 0
    assert not model.rollout_buffer.action_masks.all()
    env.set_attr("mask", [0] * 5, indices=[2])
    with pytest.raises(ValueError, match=r"Environment 2 \('Rules'\) returned an action mask that allows no action"):
        model.learn(256)
    env.close()


def test_a_model_with_normalisation_and_masks_continues_bit_for_bit():
    options: dict[str, Any] = dict(objective=dict(kl_coef=0.1, kl_reference=2))
    model = make_model(make_rules(spaces.Discrete(5)), **options).learn(256)
    file = saved(model)
    model.set_env(make_rules(spaces.Discrete(5)))  # a loaded model begins with a reset
    model.learn(256, reset_num_timesteps=False)
    loaded = MaskableGRPO.load(file, env=make_rules(spaces.Discrete(5)), device="cpu")
    assert loaded.policy.normalizer is not None
    loaded.learn(256, reset_num_timesteps=False)
    assert weights(loaded).keys() == weights(model).keys()
    assert all(th.equal(each, weights(model)[key]) for key, each in weights(loaded).items())


# --- at the door ---


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        pytest.param([0] * 5, r"Environment 0 \('Rules'\) returned an action mask that allows no action", id="nothing"),
        pytest.param([1] * 4, r"Environment 0 \('Rules'\) returned 4 entries as its action mask: return 5", id="shape"),
    ],
)
def test_a_mask_that_cannot_be_used_names_the_environment(mask: list[int], message: str):
    model = make_model(make_rules(spaces.Discrete(5), mask=mask))
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        model.learn(64)
    assert same(before, weights(model))


def test_environments_without_masks_are_refused_by_name():
    model = make_model(make_vec_env("CartPole-v1"))
    with pytest.raises(ValueError, match="The environment 'CartPole-v1' has no method `action_masks`"):
        model.learn(64)
    model.learn(32, use_masking=False)


@pytest.mark.parametrize("env", ["Pendulum-v1"])
def test_continuous_actions_are_refused(env: str):
    with pytest.raises(AssertionError, match="The algorithm only supports"):
        make_model(env)
    model = make_model(env, GRPO)
    with pytest.raises(ValueError, match="cannot be masked"):
        model.policy.predict(np.zeros(3, np.float32), action_masks=[True])


@pytest.mark.parametrize("space", SPACES)
def test_the_policy_takes_masks_where_sb3_contribs_does(space: spaces.Space):
    policy: Any = MaskableGRPO("MlpPolicy", DummyVecEnv([lambda: Rules(space)] * 2), n_steps=32, policy_kwargs=SMALL).policy
    obs, masks = th.zeros(2, *policy.observation_space.shape), np.zeros((2, sum(choices_of(space))), bool)
    masks[:, np.cumsum([0, *choices_of(space)[:-1]])] = True  # the first choice of each part
    (only,) = np.unique(policy(obs, False, masks)[0].numpy(), axis=0)
    assert np.allclose(policy.evaluate_actions(obs, th.as_tensor(np.stack([only] * 2)), masks)[0].detach(), 0.0, atol=1e-5)
    assert np.array_equal(policy.get_distribution(obs, masks).mode()[0].detach().numpy().reshape(only.shape), only)
