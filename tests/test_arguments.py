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

from sb3_grpo import GRPO, KernelRolloutBuffer
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.settings import BUILT_ONCE, chosen_n_steps, time_limit
from sb3_grpo.validation import check_finite


def one_env(**kwargs: Any) -> dict[str, Any]:
    return dict(env=AnyEnv(), **kwargs)


def buffer(name: str, **kwargs: Any) -> dict[str, Any]:
    return dict(rollout_buffer_class=name, rollout_buffer_kwargs=kwargs)


def kernel(**kwargs: Any) -> dict[str, Any]:
    return buffer("kernel", **kwargs)


def policy(**kwargs: Any) -> dict[str, Any]:
    return dict(policy_kwargs=kwargs)


def gives_nan(progress_remaining: float) -> float:
    return np.nan


NO_CRITIC = "GRPO has no value network, so leave it out."
SCHEDULE = "must be a finite number of at least 0, or a function that maps the remaining progress"
POSITIVE = "must be a positive number, not"
FROM_0_TO_1 = "must be a finite number from 0 to 1, not"

FLAGS = ("normalize_advantage", "share_starts", "normalize_observations")
POLICY_FLAGS = ("ortho_init", "full_std", "use_expln", "squash_output", "normalize_images", "lr_follows_std")
KERNEL_FLAGS = ("time_feature", "relative")

#: Arguments, and a part of the message. Values are integers, numbers, flags, texts and containers where others are expected.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(policy="mlp"), "`policy` must be 'MlpPolicy', 'CnnPolicy' or 'MultiInputPolicy', not 'mlp'"),
    (dict(policy=ActorCriticPolicy), "SB3's own policies have a critic"),
    (dict(policy=None), "`policy` must be 'MlpPolicy', 'CnnPolicy', 'MultiInputPolicy' or a subclass"),
    (dict(learning_rate=-0.1), f"`learning_rate` {SCHEDULE}"),
    (dict(learning_rate="0.1"), f"`learning_rate` {SCHEDULE}"),
    (dict(learning_rate=None), f"`learning_rate` {SCHEDULE}"),
    (dict(learning_rate=gives_nan), "which gives nan at 1"),
    (dict(clip_range=-0.1), f"`clip_range` {SCHEDULE}"),
    (dict(clip_range=np.inf), f"`clip_range` {SCHEDULE}"),
    (dict(clip_range=gives_nan), "which gives nan at 1"),
    (dict(clip_range_high=-0.1), f"`clip_range_high` {SCHEDULE}"),
    (dict(clip_range_high="0.3"), f"`clip_range_high` {SCHEDULE}"),
    (dict(n_steps=0), "`n_steps` must be an integer of at least 1, not 0"),
    (dict(n_steps=2.5), "`n_steps` must be an integer of at least 1, not 2.5"),
    (dict(n_steps=128.0), "`n_steps` must be an integer of at least 1, not 128.0"),  # as PPO fails for it
    (one_env(n_steps=1), "n_steps=1 with 1 environment gives rollouts of one transition"),
    (policy(use_sde=True), "pass it there, as GRPO(..., use_sde=True)"),
    (policy(lr_schedule=0.1), "pass it there, as GRPO(..., learning_rate=0.1)"),
    (dict(policy_kwargs="net_arch"), "`policy_kwargs` must be a dictionary of arguments, such as dict(...), not 'net_arch'"),
    (dict(rollout_buffer_kwargs="ridge"), "`rollout_buffer_kwargs` must be a dictionary of arguments, such as dict(...), not"),
    (dict(batch_size=0), "`batch_size` must be an integer of at least 1, not 0"),
    (dict(batch_size=None), "`batch_size` must be an integer of at least 1, not None"),
    (dict(n_epochs=0), "`n_epochs` must be an integer of at least 1, not 0"),
    (dict(n_epochs=True), "`n_epochs` must be an integer of at least 1, not True"),
    (dict(gamma=1.01), f"`gamma` {FROM_0_TO_1} 1.01"),
    (dict(gamma="0.9"), f"`gamma` {FROM_0_TO_1} '0.9'"),
    (dict(gamma=np.nan), f"`gamma` {FROM_0_TO_1} nan"),
    (dict(gae_lambda=-0.1), f"`gae_lambda` {FROM_0_TO_1} -0.1"),
    (dict(ent_coef=np.nan), "`ent_coef` must be a finite number, not nan"),
    (dict(ent_coef="auto"), "`ent_coef` must be a finite number, not 'auto'"),
    (dict(max_grad_norm=0), f"`max_grad_norm` {POSITIVE} 0"),
    (dict(max_grad_norm=None), f"`max_grad_norm` {POSITIVE} None"),
    (dict(target_kl=-1), f"`target_kl` {POSITIVE} -1"),
    (dict(group_size=1), "`group_size` must be an integer of at least 2, not 1"),
    (dict(group_size=[4]), "`group_size` must be an integer of at least 2, not [4]"),
    (dict(importance_sampling_level="token"), "`importance_sampling_level` must be 'step' or 'trajectory', not 'token'"),
    (dict(update_rule="trpo"), "`update_rule` must be 'clipped' or 'natural', not 'trpo'"),
    (dict(loss_aggregation="token"), "`loss_aggregation` must be 'step', 'trajectory' or 'constant', not 'token'"),
    (dict(kl_coef=-0.5), "`kl_coef` must be a finite number of at least 0, not -0.5"),
    (dict(kl_coef=np.nan), "`kl_coef` must be a finite number of at least 0, not nan"),
    (dict(kl_coef=0.1, adaptive_kl_target=0), f"`adaptive_kl_target` {POSITIVE} 0"),
    (dict(adaptive_kl_target=0.02), "adapts `kl_coef` between 1e-06 and 1e+06: start with a value in this range"),
    (dict(kl_coef=1e12, adaptive_kl_target=0.02), "such as kl_coef=0.1, not 1000000000000.0"),
    *((dict(kl_reference=value), "`kl_reference` must be") for value in ("new", 0, None)),
    (dict(kl_estimator="k4"), "`kl_estimator` must be 'exact', 'k1', 'k2' or 'k3', not 'k4'"),
    *((dict([(name, "False")]), f"`{name}` must be True or False, not 'False'") for name in FLAGS),
    (dict(repeat_starts=1.1), f"`repeat_starts` {FROM_0_TO_1} 1.1"),
    (dict(repeat_starts=True), f"`repeat_starts` {FROM_0_TO_1} True"),
    (dict(share_starts=0), "`share_starts` must be True or False, not 0"),
    (dict(sde_sample_freq=0), "`sde_sample_freq` must be an integer of at least 1 or -1, not 0"),
    (dict(sde_sample_freq="x"), "`sde_sample_freq` must be an integer of at least 1 or -1, not 'x'"),
    (dict(seed=-1), "`seed` must be an integer of at least 0, not -1"),
    (dict(seed=0.5), "`seed` must be an integer of at least 0, not 0.5"),
    # Buffers
    (dict(rollout_buffer_class=RolloutBuffer), "SB3's own rollout buffers need a critic"),
    (kernel(rigde=0.1), "KernelRolloutBuffer does not take ['rigde'] in `rollout_buffer_kwargs`: it takes ['bandwidth'"),
    (kernel(tied_groups="skip"), "KernelRolloutBuffer does not take ['tied_groups']"),
    (kernel(gamma=0.9, n_envs=2), "does not take ['gamma', 'n_envs']"),
    (kernel(group_size=3), "Settings such as `gamma` and `group_size` are arguments of GRPO itself"),
    (kernel(reward_weights={}), "`reward_weights` must map the names of reward components to their weights"),
    (kernel(reward_weights=["a"]), "`reward_weights` must map the names of reward components to their weights"),
    (kernel(reward_weights={"a": np.inf}), "`reward_weights['a']` must be a finite number, not inf"),
    (kernel(n_features=0), "`n_features` must be an integer of at least 1, not 0"),
    (kernel(bandwidth=0.0), f"`bandwidth` {POSITIVE} 0.0"),
    (kernel(ridge=-1), "`ridge` must be a finite number of at least 1e-05, not -1"),
    (kernel(forgetting=1.5), f"`forgetting` {FROM_0_TO_1} 1.5"),
    *((kernel(**{name: "no"}), f"`{name}` must be True or False, not 'no'") for name in KERNEL_FLAGS),
    (buffer("outcome", leave_one_out="no"), "`leave_one_out` must be True or False, not 'no'"),
    *(
        (buffer(name, horizon=horizon), f"`horizon` must be an integer of at least 1 or None, not {horizon}")
        for name in ("kernel", "outcome")
        for horizon in (0, -5, 2.5, True)
    ),
    (kernel(n_folds=0), "`n_folds` must be an integer of at least 1, not 0"),
    (buffer("outcome", leave_one=True), "OutcomeRolloutBuffer does not take ['leave_one']"),
    (buffer("outcome", ridge=0.1), "OutcomeRolloutBuffer does not take ['ridge']"),
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
    # Policies
    (dict(use_sde=True), "can only be used with continuous actions"),
    (policy(net_arch=dict(pi=[8], vf=[8])), "asks for a value network, which GRPO does not have"),
    (dict(use_sde="yes", env=AnyEnv(action_space=BOX)), "`use_sde` must be True or False, not 'yes'"),
    (policy(normalize_observations=False), "pass it there, as GRPO(..., normalize_observations=False)"),
    (policy(net_arch=[8, 0]), "net_arch=[8, 0] is no list of positive integers"),
    (policy(activation_fn="relu"), "`activation_fn` must be a class such as `torch.nn.ReLU`, not 'relu'."),
    (policy(net_arch=8), "net_arch=8 is no list of positive integers"),
    *((policy(**{name: "False"}), f"`{name}` must be True or False, not 'False'") for name in POLICY_FLAGS),
    (policy(net_arch=dict(shared=[8])), "is no list of positive integers"),
    (policy(log_std_init=np.nan), "`log_std_init` must be a finite number, not nan"),
    (policy(log_std_lr_factor=0), f"`log_std_lr_factor` {POSITIVE} 0"),
    (policy(log_std_lr_factor=2.0), "log_std_lr_factor=2.0 is for Box actions, and Discrete(3) has no standard deviation"),
    (policy(squash_output=True), "squash_output=True needs gSDE: pass use_sde=True"),
    (policy(features_extractor_class=CombinedExtractor), "`MultiInputPolicy` needs a Dict observation space"),
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

#: Names from PPO, TRL, CleanRL, RLlib and Tianshou, and typing errors, by what is meant.
CRITICS = "vf_coef clip_range_vf vf_loss_coeff vf_clip_param clip_vloss value_clip critic_lr"
ELSEWHERE = {
    "kl_coef": "beta kl_beta",
    "clip_range": "epsilon clip_coef clip_param eps_clip",
    "clip_range_high": "epsilon_high",
    "n_epochs": "num_iterations update_epochs",
    "learning_rate": "lr policy_lr lr_schedule",
    "gae_lambda": "lam lambda_",
    "group_size": "num_generations",
    "loss_aggregation": "loss_type",
    "ent_coef": "entropy_coeff",
    "adaptive_kl_target": "kl_target",
    "n_steps": "num_steps",
}
TYPOS = {
    "n_steps": "n_step nsteps",
    "n_epochs": "n_epoch epochs n_epcohs",
    "batch_size": "batchsize batch",
    "learning_rate": "learning_rat",
    "clip_range": "cliprange clip_rnge",
    "ent_coef": "ent_coeff entcoef",
    "kl_coef": "kl_coeff",
    "max_grad_norm": "max_grad",
    "normalize_observations": "normalize_obs",
    "normalize_advantage": "normalise_advantage normalize_advantages",
    "use_sde": "use_gsde",
    "group_size": "group",
    "env": "envs",
}
NO_HINT = (
    "temperature max_completion_length scale_rewards num_minibatches train_batch_size gae norm_adv anneal_lr discount tau "
    "repeat_per_collect dual_clip reward_scale target_kl_div use_rms_prop xyzzy"
)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    cases(
        [
            *((dict([(name, 1)]), NO_CRITIC) for name in CRITICS.split()),
            (policy(share_features_extractor=True), NO_CRITIC),
            *((dict([(name, 1)]), f"here it is `{ours}`.") for ours, names in ELSEWHERE.items() for name in names.split()),
            *(
                (dict([(name, 4)]), "such as `make_vec_env('CartPole-v1', n_envs=4)`.")
                for name in ("n_env", "n_envs", "num_envs")
            ),
            (dict(total_timesteps=100), "is an argument of `learn`, as in `learn(total_timesteps=100_000)`."),
            (dict(reward_weights=[1.0]), "write `rollout_buffer_kwargs=dict(reward_weights=...)`."),
            (dict(scale="none"), "write `rollout_buffer_kwargs=dict(scale=...)`."),
            (dict(net_arch=[8]), "write `policy_kwargs=dict(net_arch=...)`."),
            (policy(net_acrh=[8]), "ActorPolicy does not take `net_acrh=[8]`: did you mean `net_arch`?"),
            (policy(scale=1), "ActorPolicy does not take `scale=1`: see `help(ActorPolicy)`"),
            *(
                (dict([(wrong, 1)]), f"GRPO does not take `{wrong}=1`: did you mean `{ours}`?")
                for ours, names in TYPOS.items()
                for wrong in names.split()
            ),
            *((dict([(name, 1)]), f"not take `{name}=1`: see `help(GRPO)` for its arguments.") for name in NO_HINT.split()),
        ]
    ),
)
def test_an_unknown_argument_is_refused_with_what_was_meant_or_without_a_hint(kwargs: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_model(**kwargs)


# --- Spaces -----------------------------------------------------------------------------------------------------------


def dict_with(**parts: Any) -> spaces.Dict:
    return spaces.Dict({**parts, "v": VECTOR})


TEXT, SEQUENCE = spaces.Text(5), spaces.Sequence(VECTOR)
EMPTY = spaces.Box(-1, 1, (0,))
TABLE = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))

UNREADABLE = [
    pytest.param(spaces.Discrete(3, start=-1), r"observation space Discrete.* starts at -1 instead", "Flatten", id="start"),
    pytest.param(
        dict_with(a=spaces.MultiDiscrete([3, 2], start=[0, 1])),
        r"observation 'a' .* at \[0, 1\]",
        "Flatten",
        id="start in Dict",
    ),
    pytest.param(TABLE, "has several axes", "Flatten", id="MultiDiscrete 2D"),
    pytest.param(spaces.Tuple([VECTOR, VECTOR]), "observation space Tuple.* is no Box", "Flatten", id="Tuple"),
    pytest.param(dict_with(a=dict_with()), "observation 'a' of space Dict.* is no Box", "Flatten", id="Dict in Dict"),
    pytest.param(dict_with(mission=TEXT), "observation 'mission' of space Text.* is no Box", "Filter", id="Text in Dict"),
    pytest.param(dict_with(a=SEQUENCE), "observation 'a' of space Sequence.* is no Box", "Filter", id="Sequence in Dict"),
    pytest.param(dict_with(a=EMPTY), "observation 'a' of space Box.* has no numbers", "Filter", id="no numbers in Dict"),
    pytest.param(TEXT, "observation space Text.* is no Box", "an array of a fixed shape", id="Text"),
    pytest.param(spaces.Graph(VECTOR, None), "Graph.* is no Box", "an array of a fixed shape", id="Graph"),
    pytest.param(spaces.OneOf([VECTOR, BOX]), "OneOf.* is no Box", "an array of a fixed shape", id="OneOf"),
    pytest.param(EMPTY, "has no numbers", "an array of a fixed shape", id="no numbers"),
]


@pytest.mark.parametrize(("space", "fault", "remedy"), UNREADABLE)
def test_an_observation_that_no_network_can_read_is_refused_with_a_remedy_that_works(
    space: spaces.Space, fault: str, remedy: str
):
    env: Any = AnyEnv(space)
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    with pytest.raises((ValueError, NotImplementedError), match=f"{fault}.*, so no network can read it: .*{remedy}"):
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
        pytest.param(EMPTY, ValueError, "Box.* has no numbers, and no policy can act in it", id="no numbers"),
        # The errors of SB3
        pytest.param(spaces.Tuple([BOX]), AssertionError, r"only supports .* but Tuple\(", id="Tuple"),
        pytest.param(spaces.MultiBinary((2, 3)), AssertionError, "Multi-dimensional MultiBinary", id="MultiBinary 2D"),
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
    settings: dict[str, Any] = dict(rollout_buffer_class=buffer_class, normalize_observations=standardises, kl_coef=0.1)
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


def test_an_environment_whose_reset_takes_no_seed_is_refused_with_what_to_change():
    class Seedless(gym.Wrapper):
        def reset(self) -> Any:  # type: ignore[override]
            return self.env.reset()

    message = r"`Seedless\.reset\(\).*` takes no `seed`\. In an environment, define `def reset\(self, \*, seed"
    for env in (Seedless(AnyEnv()), DummyVecEnv([lambda: Monitor(Seedless(AnyEnv()))])):
        with pytest.raises(ValueError, match=message):
            make_model(env)


# --- What is accepted -------------------------------------------------------------------------------------------------


def constant(progress_remaining: float) -> float:
    return 0.1


ACCEPTED: list[dict[str, Any]] = [
    dict(policy=ActorPolicy),
    dict(learning_rate=0),
    dict(learning_rate=LinearSchedule(1e-3, 0.0, 1.0), clip_range=constant, clip_range_high=constant),
    one_env(n_steps=2, batch_size=2),
    one_env(n_steps=1, batch_size=1, normalize_advantage=False),
    one_env(n_steps=1, batch_size=1, rollout_buffer_class="outcome"),
    dict(n_steps=np.int64(8), batch_size=np.int32(4), n_epochs=np.uint8(1), group_size=np.int16(2), seed=np.uint32(7)),
    dict(gamma=0, gae_lambda=0),
    dict(gamma=1, gae_lambda=np.float32(1), ent_coef=-0.1, max_grad_norm=np.inf),
    dict(kl_coef=0.1, adaptive_kl_target=1e-9, kl_reference=np.int64(3), target_kl=1),
    dict(use_sde=True, env=AnyEnv(action_space=BOX), policy_kwargs=dict(squash_output=True)),
    dict(policy_kwargs=dict(net_arch=[], activation_fn=th.nn.ReLU, optimizer_class=th.optim.SGD)),
    dict(rollout_buffer_class=None, seed=None, share_starts=np.bool_(False), sde_sample_freq=np.int64(1)),
    dict(clip_range=lambda _: th.tensor(0.2), learning_rate=lambda _: np.array(1e-3)),
    dict(env=AnyEnv(action_space=spaces.Box(-5e8, 5e8, (2,), np.float64))),
    dict(rollout_buffer_class=KernelRolloutBuffer),
    kernel(forgetting=0, n_folds=1, n_features=1, horizon=None, reward_weights=None),
    kernel(horizon=np.int64(1)),
    kernel(forgetting=1, time_feature=False, ridge=1),
    buffer("outcome", scale="none", max_waiting=1, leave_one_out=True, tied_groups="skip"),
]


@pytest.mark.parametrize("kwargs", [pytest.param(kwargs, id=label(kwargs)) for kwargs in ACCEPTED])
def test_a_value_on_the_boundary_is_accepted_and_the_model_acts(kwargs: dict[str, Any]):
    model = make_model(**kwargs)
    assert model.action_space.contains(model.predict(np.zeros(3, dtype=np.float32))[0])


@pytest.mark.parametrize("name", ["kernel", "outcome"])
def test_observations_of_more_than_five_thousand_numbers_train_with_every_buffer(name: str):
    env = make_envs(observation_space=spaces.Box(-1, 1, (72, 72)))
    assert make_model(env, rollout_buffer_class=name).learn(64).num_timesteps == 64


# --- What is chosen, and what stays -------------------------------------------------------------------------------------


BOARD = spaces.Box(0.0, 1.0, (5, 4, 3), np.float32)
CLIPPED, NATURAL = ("clipped", 0.98, 1024, 128, 0.8), ("natural", 0.95, 2048, 512, 0.9)
CHOICES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "discrete actions": (dict(env="CartPole-v1"), CLIPPED),
    "continuous actions": (dict(), NATURAL),
    "the limit is for both": (dict(target_kl=0.05, gamma=0.9), NATURAL),
    "a learning rate": (dict(learning_rate=1e-3), CLIPPED),
    "a schedule": (dict(learning_rate=lambda progress: 3e-4), CLIPPED),
    "epochs": (dict(n_epochs=5), CLIPPED),
    "minibatches": (dict(batch_size=128), CLIPPED),
    "a clip range": (dict(clip_range=0.1), CLIPPED),
    "clipping above": (dict(clip_range_high=0.3), CLIPPED),
    "clipped gradients": (dict(max_grad_norm=1.0), CLIPPED),
    "ratios of trajectories": (dict(importance_sampling_level="trajectory"), CLIPPED),
    "an optimizer": (dict(policy_kwargs=dict(optimizer_class=th.optim.SGD)), CLIPPED),
    "a rate of its own for the deviation": (dict(policy_kwargs=dict(log_std_lr_factor=0.3)), NATURAL),
    "gSDE": (dict(use_sde=True), CLIPPED),
    "asked for": (dict(update_rule="natural"), NATURAL),
    "asked for otherwise": (dict(env="CartPole-v1", update_rule="natural"), NATURAL),
    "boards": (dict(policy="CnnPolicy", env=AnyEnv(BOARD)), NATURAL),
    "boards among vectors": (dict(policy="MultiInputPolicy", env=AnyEnv(spaces.Dict(board=BOARD, speed=VECTOR))), NATURAL),
    "boards beside an image": (dict(policy="MultiInputPolicy", env=AnyEnv(spaces.Dict(board=BOARD, eye=HWC))), CLIPPED),
    "images": (dict(policy="CnnPolicy", env=AnyEnv(HWC)), CLIPPED),
    "boards with a learning rate": (dict(policy="CnnPolicy", env=AnyEnv(BOARD), learning_rate=1e-3), CLIPPED),
    "own lambda and steps": (dict(gae_lambda=0.9, n_steps=64), ("natural", 0.9, 64, 512, 0.9)),
    "own features": (dict(rollout_buffer_kwargs=dict(n_features=64)), ("natural", 0.95, 2048, 64, 0.9)),
}


@pytest.mark.parametrize(("options", "expected"), CHOICES.values(), ids=CHOICES)
def test_the_update_rule_suits_the_actions_and_everything_that_was_asked_for(
    options: dict[str, Any], expected: tuple[Any, ...]
):
    model = GRPO(**{"policy": "MlpPolicy", "env": "Pendulum-v1", **options})
    baseline = model.rollout_buffer.baseline  # type: ignore[attr-defined]
    found = model.update_rule, model.gae_lambda, model.n_steps, baseline.n_features, baseline.forgetting
    assert found == expected


def test_a_change_that_natural_gradient_steps_do_not_use_is_named(tmp_path: Path):
    model = GRPO("MlpPolicy", "Pendulum-v1", n_steps=32).learn(32)
    model.save(tmp_path / "model")
    model.clip_range = 0.1
    model.n_epochs = 5
    with pytest.warns(UserWarning, match="clip_range, n_epochs changed, and natural-gradient steps do not use them"):
        model.learn(32)
    with pytest.warns(UserWarning, match="learning_rate changed, and natural-gradient steps do not use it"):
        GRPO.load(tmp_path / "model", learning_rate=1e-4)


def test_complete_groups_have_clipped_updates():
    assert GRPO("MlpPolicy", "Pendulum-v1", rollout_buffer_class="outcome").update_rule == "clipped"


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
    instead = rf"(pass it to GRPO.*{name}=|pass it to a new GRPO, .*`load_actor`|call `set_random_seed`).* instead"
    with pytest.raises(ValueError, match=rf"`{name}` was changed to 'new' after the model was built.*: {instead}"):
        model.learn(32)


class Stub(DummyVecEnv):
    """Answers as simulators do that do not know their environments one by one."""

    answer: Any = None

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        if attr_name != "_max_episode_steps":
            return super().get_attr(attr_name, indices)
        if isinstance(self.answer, type):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "limit"),
    [(None, None), ([], None), ([None], None), ([7], 7), (NotImplementedError, None), (RuntimeError, None)],
)
def test_a_time_limit_that_is_not_known_is_none(answer: Any, limit: int | None):
    env = Stub([AnyEnv])
    env.answer = answer
    assert time_limit(env) == limit


def test_a_number_that_is_not_finite_is_named_with_the_environment_and_the_step_of_its_episode():
    rewards = np.array([1.0, 2.0, np.nan, np.inf])
    message = "Environment 6 returned a non-finite reward in step 13 of its episode, after 96 timesteps: nan"
    with pytest.raises(ValueError, match=message):
        check_finite("reward", rewards, 96, np.array([10, 11, 12, 13]), first_env=4)
