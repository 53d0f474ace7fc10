"""What is refused at the door, one row per way to be wrong, and what is accepted at the boundary."""

import re
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, HWC, VECTOR, AnyEnv, assert_trained, make_envs, make_model, weights
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from sb3_grpo import GRPO
from sb3_grpo.settings import BUILT_ONCE, chosen_n_steps


def one_env(**kwargs: Any) -> dict[str, Any]:
    return dict(env=AnyEnv(), **kwargs)


def buffer(name: str, **kwargs: Any) -> dict[str, Any]:
    return dict(rollout_buffer_class=name, rollout_buffer_kwargs=kwargs)


def kernel(**kwargs: Any) -> dict[str, Any]:
    return buffer("kernel", **kwargs)


def policy(**kwargs: Any) -> dict[str, Any]:
    return dict(policy_kwargs=kwargs)


SCHEDULE = "must be a finite number of at least 0, or a function that maps the remaining progress"
POSITIVE = "must be a positive number, not"
FROM_0_TO_1 = "must be a finite number from 0 to 1, not"

#: Arguments, and a part of the message: for each argument one value, and for each kind of check all ways to be wrong
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(policy="mlp"), "`policy` must be 'MlpPolicy', 'CnnPolicy', 'MultiInputPolicy' or a subclass"),
    (dict(policy=ActorCriticPolicy), "SB3's own policies have a critic"),
    (dict(learning_rate=-0.1), f"`learning_rate` {SCHEDULE} (from 1 to 0) to one, not -0.1"),
    (dict(clip_range=None), f"`clip_range` {SCHEDULE}"),
    (dict(clip_range=lambda progress: np.nan), "to one, not nan"),
    (dict(objective=dict(clip_range_high=-0.1)), f"`clip_range_high` {SCHEDULE}"),
    (dict(n_steps=0), "`n_steps` must be an integer of at least 1, not 0"),
    (dict(batch_size=None), "`batch_size` must be an integer of at least 1, not None"),
    (dict(n_epochs=True), "`n_epochs` must be an integer of at least 1, not True"),
    (dict(group_size=1), "`group_size` must be an integer of at least 2, not 1"),
    (dict(seed=-1), "`seed` must be an integer of at least 0, not -1"),
    (dict(sde_sample_freq="x"), "`sde_sample_freq` must be an integer of at least -1, not 'x'"),
    (dict(gamma=1.01), f"`gamma` {FROM_0_TO_1} 1.01"),
    (dict(gae_lambda=-0.1), f"`gae_lambda` {FROM_0_TO_1} -0.1"),
    (dict(ent_coef=np.nan), "`ent_coef` must be a finite number, not nan"),
    (dict(objective=dict(kl_coef=-0.5)), "`kl_coef` must be a finite number of at least 0, not -0.5"),
    (dict(max_grad_norm=0), f"`max_grad_norm` {POSITIVE} 0"),
    (dict(target_kl=np.nan), f"`target_kl` {POSITIVE} nan"),
    (dict(objective=dict(kl_coef=0.1, adaptive_kl_target=0)), f"`adaptive_kl_target` {POSITIVE} 0"),
    (
        dict(objective=dict(adaptive_kl_target=0.02)),
        "between 1e-06 and 1e+06: start with a value in this range, such as kl_coef=0.1, not 0.0",
    ),
    (dict(normalize_advantage="False"), "`normalize_advantage` must be True or False, not 'False'"),
    (dict(share_starts=0), "`share_starts` must be True or False, not 0"),
    (dict(normalize_observations="False"), "`normalize_observations` must be True or False, not 'False'"),
    (dict(use_sde="yes", env=AnyEnv(action_space=BOX)), "`use_sde` must be True or False, not 'yes'"),
    (dict(objective=[1]), "`objective` must be a dictionary of arguments, such as dict(...), not [1]"),
    (
        dict(objective=dict(importance_sampling_level="token")),
        "`importance_sampling_level` must be 'step' or 'trajectory', not 'token'",
    ),
    (
        dict(objective=dict(loss_aggregation="token")),
        "`loss_aggregation` must be 'step', 'trajectory' or 'constant', not 'token'",
    ),
    (dict(update_rule="trpo"), "`update_rule` must be 'clipped' or 'natural', not 'trpo'"),
    (dict(objective=dict(kl_reference=0)), "`kl_reference` must be an integer of at least 1 or 'old' or 'initial', not 0"),
    (dict(objective=dict(kl_estimator="k4")), "`kl_estimator` must be 'exact' or 'k3', not 'k4'"),
    (one_env(n_steps=1), "n_steps=1 with 1 environment gives rollouts of one transition"),
    (dict(use_sde=True), "can only be used with continuous actions"),
    # Buffers
    (dict(rollout_buffer_class=RolloutBuffer), "buffers.RolloutBuffer'>: SB3's own rollout buffers need a critic"),
    (dict(rollout_buffer_class=3), "subclass of `sb3_grpo.GroupRolloutBuffer`, not 3"),
    (kernel(reward_weights="progress"), "`reward_weights` must map the names of reward components to their weights"),
    (kernel(reward_weights={"a": np.inf}), "`reward_weights['a']` must be a finite number, not inf"),
    (kernel(horizon=0), "`horizon` must be an integer of at least 1 or None, not 0"),
    (kernel(sequence_length=0), "`sequence_length` must be an integer of at least 1 or None, not 0"),
    (kernel(n_features=0), "`n_features` must be an integer of at least 1, not 0"),
    (kernel(bandwidth=0.0), f"`bandwidth` {POSITIVE} 0.0"),
    (kernel(ridge=-1), "`ridge` must be a finite number of at least 1e-06, not -1"),
    (kernel(forgetting=1.5), f"`forgetting` {FROM_0_TO_1} 1.5"),
    (kernel(n_folds=0), "`n_folds` must be an integer of at least 1, not 0"),
    (kernel(relative="no"), "`relative` must be True or False, not 'no'"),
    (buffer("outcome", leave_one_out="no"), "`leave_one_out` must be True or False, not 'no'"),
    (buffer("outcome", scale="std"), "`scale` must be 'group', 'batch' or 'none', not 'std'"),
    (buffer("process", tied_groups="drop"), "`tied_groups` must be 'keep' or 'skip', not 'drop'"),
    (buffer("stepwise", max_waiting=0), "`max_waiting` must be an integer of at least 1, not 0"),
    (
        buffer("return_to_go", component_aggregation="sum"),
        "`component_aggregation` must be 'sum_then_normalize' or 'normalize_then_sum', not 'sum'",
    ),
    (
        buffer("return_to_go", component_aggregation="normalize_then_sum"),
        "component_aggregation='normalize_then_sum' needs several rewards",
    ),
    # Policies, whose own tests have the others
    (policy(activation_fn="relu"), "`activation_fn` must be a class such as `torch.nn.ReLU`, not 'relu'."),
    (policy(features_extractor_class=CombinedExtractor), "`MultiInputPolicy` needs a Dict observation space"),
    *(
        (policy(**{name: "False"}), f"`{name}` must be True or False, not 'False'")
        for name in ("ortho_init", "full_std", "use_expln", "squash_output", "normalize_images", "lr_follows_std")
    ),
]


def label(kwargs: dict[str, Any]) -> str:
    """:return: An id that is the same in every process: without addresses"""
    return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(f"{name}={value!r}" for name, value in kwargs.items()))[:70]


def cases(rows: list[tuple[dict[str, Any], str]]) -> list[Any]:
    return [pytest.param(kwargs, message, id=label(kwargs)) for kwargs, message in rows]


@pytest.mark.parametrize(("kwargs", "message"), cases(REFUSED))
def test_a_wrong_value_is_refused_with_what_is_accepted(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_model(**kwargs)


def test_a_model_needs_an_environment():
    with pytest.raises(ValueError, match="`env` is None: pass an environment"):
        GRPO("MlpPolicy", None)


# --- Unknown arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    cases(
        [
            *(
                (dict([(name, 0.5)]), f"GRPO does not take `{name}=0.5`: GRPO has no value network, so leave it out.")
                for name in ("vf_coef", "clip_range_vf", "clip_vloss", "value_clip", "critic_lr")
            ),
            (policy(share_features_extractor=True), "GRPO has no value network, so leave it out."),
            (dict(beta=0.04), "GRPO does not take `beta=0.04`: write `GRPO(..., objective=dict(kl_coef=0.04))`."),
            (dict(kl_estimator="k3"), "write `GRPO(..., objective=dict(kl_estimator='k3'))`."),
            (
                dict(objective=dict(clip_range=0.1)),
                "The objective does not take `clip_range=0.1`: write `GRPO(..., clip_range=0.1)`.",
            ),
            (dict(num_envs=4), "such as `make_vec_env('CartPole-v1', n_envs=4)`."),
            (dict(total_timesteps=100), "is an argument of `learn`, as in `learn(total_timesteps=100_000)`."),
            (dict(net_arch=[8]), "write `GRPO(..., policy_kwargs=dict(net_arch=[8]))`."),
            (policy(use_sde=True), "ActorPolicy does not take `use_sde=True`: write `GRPO(..., use_sde=True)`."),
            (kernel(rigde=0.1), "KernelRolloutBuffer does not take `rigde=0.1`: did you mean `ridge`?"),
            (buffer("outcome", ridge=0.1), "OutcomeRolloutBuffer does not take `ridge=0.1`: it takes component_aggregation, "),
            *(
                (dict([(wrong, 1)]), f"GRPO does not take `{wrong}=1`: did you mean `{right}`?")
                for wrong, right in (("n_epcohs", "n_epochs"), ("nsteps", "n_steps"), ("batchsize", "batch_size"))
            ),
            # No hint is better than a wrong one
            *(
                (dict([(name, 1)]), f"GRPO does not take `{name}=1`: it takes batch_size, clip_range, ")
                for name in ("temperature", "train_batch_size", "norm_adv", "anneal_lr", "dual_clip", "use_rms_prop", "xyzzy")
            ),
        ]
    ),
)
def test_an_unknown_argument_is_refused_with_what_was_meant_or_with_what_there_is(kwargs: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_model(**kwargs)


# --- Spaces -----------------------------------------------------------------------------------------------------------


def dict_with(**parts: Any) -> spaces.Dict:
    return spaces.Dict({**parts, "v": VECTOR})


TEXT = spaces.Text(5)
TABLE = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))

UNREADABLE = [
    pytest.param(spaces.Discrete(3, start=-1), r"observation of space Discrete.* starts at -1 instead", "Flatten", id="start"),
    pytest.param(spaces.Tuple([VECTOR, VECTOR]), "observation of space Tuple.* is no Box", "Flatten", id="Tuple"),
    pytest.param(dict_with(a=dict_with()), "observation 'a' of space Dict.* is no Box", "Flatten", id="Dict in Dict"),
    pytest.param(dict_with(mission=TEXT), "observation 'mission' of space Text.* is no Box", "Filter", id="Text in Dict"),
]


@pytest.mark.parametrize(("space", "fault", "remedy"), UNREADABLE)
def test_an_observation_that_no_network_can_read_is_refused_with_a_remedy_that_works(
    space: spaces.Space, fault: str, remedy: str
):
    env: Any = AnyEnv(space)
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    with pytest.raises(ValueError, match=f"{fault}.*, so no network can read it.*{remedy}"):
        make_model(env, policy)
    if remedy == "Flatten":
        make_model(gym.wrappers.FlattenObservation(env)).learn(16)
    if remedy == "Filter":
        make_model(gym.wrappers.FilterObservation(env, ["v"]), policy).learn(16)


@pytest.mark.parametrize(
    ("action_space", "error", "message"),
    [
        pytest.param(
            spaces.Discrete(2, start=1), ValueError, "Discrete.* starts at 1 instead of 0, and no policy", id="start"
        ),
        pytest.param(TABLE, ValueError, "has several axes, and no policy can act in it", id="MultiDiscrete 2D"),
        # The errors of SB3
        pytest.param(spaces.Tuple([BOX]), AssertionError, r"only supports .* but Tuple\(", id="Tuple"),
    ],
)
def test_an_action_space_that_no_policy_supports_is_refused(action_space: spaces.Space, error: Any, message: str):
    with pytest.raises(error, match=message):
        make_model(AnyEnv(VECTOR, action_space))


SCALAR = spaces.Box(-np.inf, np.inf, (), np.float64)


@pytest.mark.parametrize("buffer_class", ["kernel", "outcome"])
@pytest.mark.parametrize("standardises", [True, False])
@pytest.mark.parametrize(
    "space", [SCALAR, dict_with(height=SCALAR, floor=spaces.Box(0, 10, (), np.int64))], ids=["Box", "Dict"]
)
def test_a_number_without_an_axis_is_an_input_like_any_other(space: spaces.Space, standardises: bool, buffer_class: str):
    envs = make_envs(observation_space=space, action_space=BOX)
    settings: dict[str, Any] = dict(
        rollout_buffer_class=buffer_class, normalize_observations=standardises, objective=dict(kl_coef=0.1)
    )
    model = make_model(envs, "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy", **settings)
    before = weights(model)
    assert_trained(model.learn(64), before)
    assert model.policy.policy_net[0].in_features == (5 if isinstance(space, spaces.Dict) else 1)
    assert model.predict(space.sample())[0].shape == (2,) and model.predict(envs.reset())[0].shape == (2, 2)


class Masked(AnyEnv):
    """Has action masks."""

    def action_masks(self) -> np.ndarray:
        return np.array([True, True, False])


@pytest.mark.parametrize("wrap", [lambda make: make(), lambda make: DummyVecEnv([make]), lambda make: SubprocVecEnv([make])])
@pytest.mark.parametrize("env_class", [Masked, AnyEnv])
def test_masks_that_are_ignored_are_warned_of(wrap: Any, env_class: Any):
    env = wrap(lambda: Monitor(env_class()))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_model(env)
    finally:
        env.close()
    seen = [str(each.message) for each in caught if "action_masks" in str(each.message)]
    assert len(seen) == (env_class is Masked)
    assert all("Use `MaskableGRPO`" in message for message in seen)


# --- What is accepted -------------------------------------------------------------------------------------------------


def constant(progress_remaining: float) -> float:
    return 0.1


ACCEPTED: list[dict[str, Any]] = [
    dict(learning_rate=LinearSchedule(1e-3, 0.0, 1.0), clip_range=constant, objective=dict(clip_range_high=constant)),
    one_env(n_steps=2, batch_size=2),
    one_env(n_steps=1, batch_size=1, normalize_advantage=False),
    dict(n_steps=np.int64(8), batch_size=np.int32(4), n_epochs=np.uint8(1), group_size=np.int16(2), seed=np.uint32(7)),
    dict(gamma=1, gae_lambda=np.float32(1), ent_coef=-0.1, max_grad_norm=np.inf),
    dict(objective=dict(kl_coef=0.1, adaptive_kl_target=1e-9, kl_reference=np.int64(3)), target_kl=1),
    dict(use_sde=True, env=AnyEnv(action_space=BOX), policy_kwargs=dict(squash_output=True)),
    dict(rollout_buffer_class=None, seed=None, share_starts=np.bool_(False), sde_sample_freq=np.int64(1)),
    dict(clip_range=lambda _: th.tensor(0.2), learning_rate=lambda _: np.array(1e-3)),
    dict(env=AnyEnv(action_space=spaces.Box(-5e8, 5e8, (2,), np.float64))),
    kernel(forgetting=0, n_folds=1, n_features=1, horizon=None, reward_weights=None),
    buffer("outcome", scale="none", max_waiting=1, leave_one_out=True, tied_groups="skip"),
]


@pytest.mark.parametrize("kwargs", [pytest.param(kwargs, id=label(kwargs)) for kwargs in ACCEPTED])
def test_a_value_on_the_boundary_is_accepted_and_the_model_acts(kwargs: dict[str, Any]):
    model = make_model(**kwargs)
    assert model.action_space.contains(model.predict(np.zeros(3, dtype=np.float32))[0])


# --- What is chosen, and what stays -------------------------------------------------------------------------------------


BOARD = spaces.Box(0.0, 1.0, (5, 4, 3), np.float32)
#: Number of features, bandwidth, ridge and forgetting of the kernel buffer, and whether it learns a metric and uses the time
SMALL_FIT, FIT, FIT_OF_CONTINUOUS = (
    (128, 1.1, 1e-5, 0.8, False, True),
    (512, 1.1, 1e-5, 0.9, True, True),
    (512, 1.8, 1e-6, 0.9, True, False),
)
#: Update rule, lambda, number of steps and of epochs, and the fit
CLIPPED, NATURAL = ("clipped", 0.98, 1024, 10, *SMALL_FIT), ("natural", 0.9, 2048, 10, *FIT_OF_CONTINUOUS)
NATURAL_ON_DISCRETE, NATURAL_ON_BOARDS = ("natural", 0.95, 2048, 10, *FIT), ("natural", 0.95, 2048, 4, *FIT)
ON_PICTURES = ("clipped", 0.98, 1024, 4, *SMALL_FIT)
CHOICES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "discrete actions": (dict(env="CartPole-v1"), CLIPPED),
    "continuous actions": (dict(), NATURAL),
    "the limit is for both": (dict(target_kl=0.05, gamma=0.9), NATURAL),
    "a learning rate": (dict(learning_rate=1e-3), CLIPPED),
    "minibatches": (dict(batch_size=128), CLIPPED),
    "clipping above": (dict(objective=dict(clip_range_high=0.3)), CLIPPED),
    "an optimizer": (dict(policy_kwargs=dict(optimizer_class=th.optim.SGD)), CLIPPED),
    "a rate of its own for the deviation": (dict(policy_kwargs=dict(log_std_lr_factor=0.3)), NATURAL),
    "gSDE": (dict(use_sde=True), CLIPPED),
    "asked for with discrete actions": (dict(env="CartPole-v1", update_rule="natural"), NATURAL_ON_DISCRETE),
    "boards": (dict(policy="CnnPolicy", env=AnyEnv(BOARD)), NATURAL_ON_BOARDS),
    "boards beside an image": (dict(policy="MultiInputPolicy", env=AnyEnv(spaces.Dict(board=BOARD, eye=HWC))), ON_PICTURES),
    "images": (dict(policy="CnnPolicy", env=AnyEnv(HWC)), ON_PICTURES),
    "complete groups": (dict(rollout_buffer_class="outcome"), ("clipped", 0.98, 2048, 10, *[None] * 6)),
    "own lambda and steps": (dict(gae_lambda=0.8, n_steps=64), ("natural", 0.8, 64, 10, *FIT_OF_CONTINUOUS)),
}


@pytest.mark.parametrize(("options", "expected"), CHOICES.values(), ids=CHOICES)
def test_the_update_rule_suits_the_actions_and_everything_that_was_asked_for(
    options: dict[str, Any], expected: tuple[Any, ...]
):
    model = GRPO(**{"policy": "MlpPolicy", "env": "Pendulum-v1", **options})
    buffer = model.rollout_buffer
    found = model.update_rule, buffer.gae_lambda, model.n_steps, model.n_epochs
    baseline = getattr(buffer, "baseline", None)
    of_fit = (getattr(baseline, name, None) for name in ("n_features", "bandwidth", "ridge", "forgetting"))
    assert (*found, *of_fit, *(getattr(buffer, name, None) for name in ("learn_metric", "use_time"))) == expected


def test_a_change_that_natural_gradient_steps_do_not_use_is_named(tmp_path: Path):
    model = GRPO("MlpPolicy", "Pendulum-v1", n_steps=32).learn(32)
    model.save(tmp_path / "model")
    model.clip_range = 0.1
    model.n_epochs = 5
    with pytest.warns(UserWarning, match="clip_range, n_epochs changed, and natural-gradient steps do not use them"):
        model.learn(32)
    with pytest.warns(UserWarning, match="learning_rate changed, and natural-gradient steps do not use it"):
        GRPO.load(tmp_path / "model", learning_rate=1e-4)


@pytest.mark.parametrize(
    ("rollout_size", "n_envs", "batch_size", "n_steps"),
    [
        pytest.param(1024, 8, 64, 128, id="of the size"),
        pytest.param(1024, 64, 64, 16, id="many environments"),
        pytest.param(1024, 256, 64, 16, id="longer than 4 steps"),
        pytest.param(1024, 1024, 64, 16, id="longer than one step"),
        pytest.param(1024, 50, 64, 20, id="a multiple would be longer"),
    ],
)
def test_a_chosen_rollout_has_its_size_or_sixteen_steps_which_is_said(
    rollout_size: int, n_envs: int, batch_size: int, n_steps: int
):
    chosen, notice = chosen_n_steps(rollout_size, n_envs, batch_size)
    assert chosen == n_steps
    expected = f"a rollout has {16 * n_envs} transitions instead of about 1024" if n_envs >= 256 else ""
    assert expected in notice and bool(notice) == bool(expected)


@pytest.mark.parametrize("name", BUILT_ONCE)
def test_a_setting_that_is_built_in_cannot_be_assigned_and_the_message_says_what_to_do(name: str):
    model = make_model()
    setattr(model, name, "new")
    instead = r"(pass it to GRPO, or to|pass it to a new GRPO, .*`load_actor`|call `set_random_seed`)"
    with pytest.raises(ValueError, match=rf"`{name}` was changed to 'new' after the model was built.*: {instead}"):
        model.learn(32)
