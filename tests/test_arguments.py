"""Every argument is checked at the door: wrong types, values out of range, and combinations that do not fit together."""

import inspect
import pathlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS, CompleteGroupRolloutBuffer, GroupRolloutBuffer, KernelRolloutBuffer
from sb3_grpo.policies import ActorCnnPolicy, ActorPolicy, MultiInputActorPolicy
from sb3_grpo.zoo.experiment import PASSED_BY_ZOO, ZOO_KEYS, check_entry

VECTOR = spaces.Box(-1.0, 1.0, (3,))
BOX = spaces.Box(-1.0, 1.0, (2,))
DISCRETE = spaces.Discrete(3)
DICT = spaces.Dict({"a": VECTOR})


class TinyEnv(gym.Env):
    def __init__(self, action_space: spaces.Space = BOX):
        self.observation_space = VECTOR
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(3, dtype=np.float32), 0.0, False, False, {}

    def __repr__(self) -> str:  # gymnasium's tells the address
        return "<TinyEnv>"


# --- What is made -----------------------------------------------------------------------------------------------------


def make_model(**kwargs: Any) -> GRPO:
    small: dict[str, Any] = dict(policy="MlpPolicy", n_steps=8, policy_kwargs=dict(net_arch=[4]), device="cpu")
    if "env" not in kwargs:
        kwargs["env"] = TinyEnv()
    return GRPO(**{**small, **kwargs})


def make_buffer(buffer_class: type[GroupRolloutBuffer], **kwargs: Any) -> GroupRolloutBuffer:
    small: dict[str, Any] = dict(buffer_size=8, observation_space=VECTOR, action_space=BOX, device="cpu")
    return buffer_class(**{**small, **kwargs})


def make_policy(policy_class: type[ActorPolicy], **kwargs: Any) -> ActorPolicy:
    observation_space = DICT if policy_class is MultiInputActorPolicy else VECTOR
    small: dict[str, Any] = dict(
        observation_space=observation_space,
        action_space=BOX,
        lr_schedule=constant,
        net_arch=[4],
    )
    return policy_class(**{**small, **kwargs})


def construct_from_entry(entry: dict[str, Any]) -> None:
    """What the zoo does with an entry of a hyperparameter file."""
    check_entry(entry)
    make_model(**{key: value for key, value in entry.items() if key not in ZOO_KEYS})


# --- Schedules and factories: functions with names, for ids that are the same in every process -----------------------------


def constant(progress_remaining: float) -> float:
    return 0.1


def gives_nan(progress_remaining: float) -> float:
    return np.nan


def gives_infinity_at_the_end(progress_remaining: float) -> float:
    return 1.0 if progress_remaining > 0 else np.inf


def gives_text(progress_remaining: float) -> str:
    return "0.1"


def gives_none(progress_remaining: float) -> None:
    return None


def gives_a_flag(progress_remaining: float) -> bool:
    return True


def gives_a_list(progress_remaining: float) -> list[float]:
    return [0.1]


def turns_negative(progress_remaining: float) -> float:
    return progress_remaining - 0.75


def divides_by_zero(progress_remaining: float) -> float:
    return 0.1 / progress_remaining


def takes_no_argument() -> float:
    return 0.1


# --- The table --------------------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """
    A value that is refused.

    :param value: what is passed
    :param accepted: what the message says is accepted
    :param quoted: how the message quotes the value, ``None`` for its ``repr``
    :param beside: arguments passed beside it
    """

    value: Any
    accepted: str
    quoted: str | None = None
    beside: Mapping[str, Any] = {}


Table = dict[str, list[Wrong]]


def all_of(accepted: str, *values: Any, **beside: Any) -> list[Wrong]:
    return [Wrong(value, accepted, beside=beside) for value in values]


#: None of these is a finite number, or an integer, and so on; None itself is added where it is refused too.
NO_NUMBER: tuple[Any, ...] = (
    "0.5",
    "",
    True,
    np.True_,
    [0.5],
    (0.5,),
    {"a": 0.5},
    np.array([0.5]),
    np.array(0.5),
    th.tensor(0.5),
    1j,
)
NO_NUMBER = (*NO_NUMBER, np.complex64(1), np.nan, -np.inf, np.float32("nan"), 10**400, float)
NO_INTEGER = ("4", True, np.True_, 2.5, 4.0, np.float64(4), [4], np.array([4]), np.array(4), np.nan, np.inf, 4j, int)
NO_FLAG: tuple[Any, ...] = (
    "yes",
    "",
    1,
    0,
    1.0,
    np.int64(1),
    None,
    [True],
    [],
    np.array([True, False]),
    np.array(True),
    np.nan,
)
NO_CHOICE: tuple[Any, ...] = ("nonsense", "", 1, True, 0.5, None, [], ["step"], np.array(["step"]), {"step": 1}, b"step")
NO_DICT: tuple[Any, ...] = ("yes", "", 3, True, [], [("ridge", 0.1)], {"ridge"}, np.array([1.0]))
NO_PATH = (3, True, 0.5, ["runs"], np.array(["runs"]), {"runs"}, b"runs")
NO_DEVICE = ("gpu", "", "cpu:x", "AUTO", None, 2.5, True, -1, ["cpu"], np.array(["cpu", "cuda"]))
NO_SPACE = (None, 3, "Box", BOX.shape, [BOX], np.zeros(3), spaces.Box, spaces.Tuple([BOX]), spaces.Text(3))

POSITIVE = "must be a positive number"
FROM_0_TO_1 = "must be a finite number from 0 to 1"
FLAG = "must be True or False"
SCHEDULE = "must be a finite number of at least 0, or a function of the progress remaining"
GIVES = "must give a finite number of at least 0 for each progress remaining from 1 to 0"
BUFFER_NAMES = ", ".join(BUFFERS)

NO_SCHEDULE = [
    # The type float is a function of the progress
    *all_of(SCHEDULE, *[value for value in NO_NUMBER if value is not float], np.inf, -0.1),
    Wrong(gives_nan, GIVES, "gives nan at 1"),
    Wrong(gives_infinity_at_the_end, GIVES, "gives inf at 0"),
    Wrong(gives_text, GIVES, "gives '0.1' at 1"),
    Wrong(gives_none, GIVES, "gives None at 1"),
    Wrong(gives_a_flag, GIVES, "gives True at 1"),
    Wrong(gives_a_list, GIVES, "gives [0.1] at 1"),
    Wrong(turns_negative, GIVES, "gives -0.25 at 0.5"),
    Wrong(divides_by_zero, GIVES, "raises ZeroDivisionError('float division by zero') at 0"),
    Wrong(takes_no_argument, GIVES, f"{takes_no_argument!r} raises TypeError("),
]


def flags() -> list[Wrong]:
    return all_of(FLAG, *NO_FLAG)


def integers(smallest: int, *more: Any, **beside: Any) -> list[Wrong]:
    out_of_range = (smallest - 1, -8, np.int64(smallest - 1))
    return all_of(f"must be an integer of at least {smallest}", *NO_INTEGER, *out_of_range, *more, **beside)


def positives(*more: Any, **beside: Any) -> list[Wrong]:
    return all_of(POSITIVE, *NO_NUMBER, np.inf, 0, 0.0, -0.1, np.float32(-1), *more, **beside)


def fractions() -> list[Wrong]:
    return all_of(FROM_0_TO_1, *NO_NUMBER, None, np.inf, -0.1, 1.01, 2, np.float32(-1))


GRPO_TABLE: Table = {
    "policy": all_of(
        "'MlpPolicy', 'CnnPolicy'", "mlp", "", None, 3, True, [], ["MlpPolicy"], ActorCriticPolicy, th.nn.Module, b"MlpPolicy"
    ),
    # An unknown name is answered by Gymnasium, whose error names the closest one, or the package to install
    "env": [
        Wrong(None, "pass an environment, or the name", "`env` is None"),
        *all_of("must be a Gymnasium environment, a VecEnv, or the name", 3, True, [], [TinyEnv()], TinyEnv, np.zeros(3)),
    ],
    "learning_rate": [*NO_SCHEDULE, Wrong(None, SCHEDULE)],
    "n_steps": [
        *integers(1),
        # TinyEnv is a single environment: one transition, which there is nothing to compare with
        Wrong(1, "pass `n_steps` of at least 2, or more environments", "n_steps * n_envs = 1 * 1"),
    ],
    "batch_size": integers(1, None),
    "n_epochs": integers(1, None),
    "gamma": fractions(),
    "gae_lambda": fractions(),
    "clip_range": [*NO_SCHEDULE, Wrong(None, SCHEDULE), *all_of(POSITIVE, 0, 0.0)],
    "clip_range_high": [*NO_SCHEDULE, *all_of(POSITIVE, 0, 0.0)],
    "dual_clip": [*positives(), *all_of("must be greater than 1", 1, 1.0, 0.5, np.float32(0.5))],
    "importance_sampling_level": all_of("must be 'step' or 'trajectory'", *NO_CHOICE),
    "loss_aggregation": all_of("must be 'step', 'trajectory' or 'constant'", *NO_CHOICE),
    "normalize_advantage": flags(),
    "ent_coef": all_of("must be a finite number", *NO_NUMBER, None, np.inf, "auto"),
    "max_grad_norm": all_of(POSITIVE, *NO_NUMBER, None, 0, -0.5, np.array([np.inf]), np.array([1.0, 2.0])),
    "group_size": integers(2, None, 0),
    "share_starts": flags(),
    "kl_coef": [
        *all_of("must be a finite number from 0 to inf", *NO_NUMBER, None, np.inf, -0.5),
        # Nothing to double, and what no halving brings back
        *all_of("pass one of these to begin with", 0.0, 1e12, adaptive_kl_target=0.02),
    ],
    "adaptive_kl_target": [
        *positives(kl_coef=0.1),
        Wrong(0.02, "adapts `kl_coef` between", "adaptive_kl_target=0.02"),
    ],
    "kl_reference": [
        *all_of("must be an integer of at least 1 or 'old', 'initial', 'polyak'", None, *NO_INTEGER[1:], 0, -1),
        *all_of("must be 'old', 'initial', 'polyak' or the number of updates", "new", "", "4"),
    ],
    "kl_reference_tau": fractions(),
    "kl_estimator": all_of("must be 'exact', 'k1', 'k2' or 'k3'", *NO_CHOICE),
    "use_sde": [
        *flags(),
        Wrong(True, "pass use_sde=False", "Discrete(3)", dict(env=TinyEnv(DISCRETE))),
    ],
    "sde_sample_freq": integers(1, None, -2, -1.0, np.array([-1]), np.array([1, 2])),
    "rollout_buffer_class": all_of(
        BUFFER_NAMES, "critic", "", "Kernel", 3, True, [], ["kernel"], int, RolloutBuffer, np.array(["kernel"]), b"kernel"
    ),
    "rollout_buffer_kwargs": [
        *all_of("must be a dict or None", *NO_DICT),
        Wrong({"rigde": 0.1}, "it takes ['actor_features'", "['rigde']"),
        Wrong({3: 0.1, "rigde": 0.1}, "it takes ['actor_features'", "[3, 'rigde']"),
        Wrong({"tied_groups": "skip"}, "Another `rollout_buffer_class` may", "['tied_groups']"),
        Wrong({"gamma": 0.9, "n_envs": 2}, "it takes ['actor_features'", "['gamma', 'n_envs']"),
        Wrong({"group_size": 3}, "pass `group_size` to GRPO itself", "group_size=3"),
    ],
    "target_kl": positives(),
    "n_reused_rollouts": integers(0, None),
    "stats_window_size": integers(1, None),
    "tensorboard_log": all_of("must be the path of a folder or None", *NO_PATH),
    "policy_kwargs": [
        *all_of("must be a dict or None", *NO_DICT),
        *all_of("must be keyword arguments of ActorPolicy, of net_arch", {"net_arc": [8]}, {3: 1}, {"lr_schedule": constant}),
        *all_of("must be keyword arguments of ActorPolicy, of net_arch", {"use_sde": True}),
    ],
    "verbose": all_of("must be 0, 1 or 2", "yes", "1", None, [1], -1, 3, 2.5, 1.0, np.nan, np.int64(3), np.array([1])),
    "doctor": flags(),
    "seed": [
        *integers(0),
        *all_of("must be a finite number from 0 to 4.29497e+09", 2**32, 10**400),
    ],
    "device": all_of("must be 'auto' or a device of PyTorch's", "gpu", "", None, 2.5, ["cpu"]),
    "_init_setup_model": flags(),
}

BUFFER_TABLE: Table = {
    "buffer_size": integers(1, None),
    "observation_space": [
        *all_of("must be a Box, Discrete, MultiDiscrete or MultiBinary space or a Dict of these", *NO_SPACE),
        Wrong(spaces.Dict({"a": VECTOR, "b": spaces.Text(3)}), "space or a Dict of these", repr(spaces.Text(3))),
        Wrong(spaces.Dict({"a": DICT}), "space or a Dict of these", repr(DICT)),
    ],
    "action_space": all_of("must be a Box, Discrete, MultiDiscrete or MultiBinary space", *NO_SPACE, DICT),
    "device": all_of("must be 'auto' or a device of PyTorch's", *NO_DEVICE),
    "gae_lambda": fractions(),
    "gamma": fractions(),
    "n_envs": integers(1, None),
    "group_size": integers(2, None, 0),
    "horizon": integers(1),
    "reward_weights": [
        *all_of("must be a mapping from the names of reward components", *NO_DICT, {}),
        *[
            Wrong({"a": 1.0, "b": weight}, "`reward_weights['b']` must be a finite number", repr(weight))
            for weight in (*NO_NUMBER, None, np.inf)
        ],
    ],
    # of KernelRolloutBuffer
    "n_features": integers(1, None),
    "bandwidth": positives(None),
    "ridge": positives(None),
    "forgetting": fractions(),
    "n_folds": integers(1, None),
    "time_feature": flags(),
    "actor_features": flags(),
    "target_lambda": all_of(FROM_0_TO_1, *NO_NUMBER, np.inf, -0.1, 1.01, 2),
    "fit": all_of("must be 'regression' or 'lstd'", *NO_CHOICE),
    # of the four others
    "scale": all_of("must be 'group', 'batch' or 'none'", *[value for value in NO_CHOICE if value is not None]),
    "max_waiting": integers(1),
    "tied_groups": all_of("must be 'keep' or 'skip'", *NO_CHOICE),
    "component_aggregation": [
        *all_of("must be 'sum_then_normalize' or 'normalize_then_sum'", *NO_CHOICE),
        Wrong("normalize_then_sum", "name them and their weights in `reward_weights`"),
        Wrong("normalize_then_sum", "concerns several rewards", beside=dict(reward_weights=None)),
    ],
    # of OutcomeRolloutBuffer
    "leave_one_out": flags(),
}

MODULES = "must be a subclass of torch's Module"
NO_FACTORY = ("Tanh", "", 3, True, [th.nn.Tanh], th.nn.Tanh(), int, np.array([1.0]))
POLICY_TABLE: Table = {
    "observation_space": [
        *all_of("must be one of Gymnasium's spaces", None, 3, "Box", [VECTOR], np.zeros(3), spaces.Box),
        Wrong(DICT, "pass `MultiInputPolicy`, which takes Dict spaces"),
        Wrong(VECTOR, "pass `MlpPolicy`", beside=dict(features_extractor_class=CombinedExtractor)),
        Wrong(VECTOR, "use NatureCNN only with images", beside=dict(policy_class=ActorCnnPolicy)),
        Wrong(DICT, "pass `MultiInputPolicy`", beside=dict(policy_class=ActorCnnPolicy)),
        Wrong(VECTOR, "pass `MlpPolicy`", beside=dict(policy_class=MultiInputActorPolicy)),
    ],
    "action_space": [
        *[
            Wrong(value, "is not supported: pass Box, Discrete, MultiDiscrete or MultiBinary", str(value))
            for value in (*NO_SPACE, DICT)
        ],
        Wrong(spaces.MultiBinary([2, 3]), "pass MultiBinary(n) with an integer n"),
        Wrong(spaces.MultiDiscrete(np.array([[2], [3]])), "pass MultiDiscrete with a one-dimensional nvec"),
        Wrong(DISCRETE, "needs continuous actions", beside=dict(use_sde=True)),
    ],
    "lr_schedule": [
        *all_of("must be a function of the progress remaining", None, 0.1, "0.1", True, [constant], np.array([0.1])),
        *[
            Wrong(schedule, "must give a finite number of at least 0", f"gives {schedule(1)!r} at 1")
            for schedule in (gives_nan, gives_text, gives_none, gives_a_flag, gives_a_list)
        ],
    ],
    "net_arch": [
        *all_of("pass a list of positive integers", "64", "", 64, True, {}, (8, 8), np.array([8]), [8, 0], [-8], [8.0], ["8"]),
        *all_of("pass a list of positive integers", [None], [[8]], [True], {"pi": 8}, {"pi": [0]}, {"pi": [8], "qf": [8]}),
        *all_of("pass net_arch=[...] or net_arch=dict(pi=[...])", {"pi": [8], "vf": [8]}, {"vf": [8]}, {"vf": []}),
    ],
    "activation_fn": all_of(MODULES, None, *NO_FACTORY),
    "ortho_init": flags(),
    "use_sde": [*flags(), Wrong(True, "pass use_sde=False", "use_sde=True", dict(action_space=DISCRETE))],
    "log_std_init": all_of("must be a finite number", *NO_NUMBER, None, np.inf),
    "log_std_lr_factor": [
        *all_of(POSITIVE, *NO_NUMBER, None, 0.0, -1.0, np.inf),
        Wrong(2.0, "leave it out", "log_std_lr_factor=2.0 is for Box actions", dict(action_space=DISCRETE)),
    ],
    "full_std": flags(),
    "use_expln": flags(),
    "squash_output": [*flags(), Wrong(True, "pass use_sde=True too, or squash_output=False", "squash_output=True")],
    "features_extractor_class": all_of(MODULES, *NO_FACTORY),
    "features_extractor_kwargs": [
        *all_of("must be a dict or None", *NO_DICT),
        *all_of("must be keyword arguments of", {"features_dmi": 8}, {3: 8}, {"observation_space": VECTOR}),
    ],
    "normalize_images": flags(),
    "optimizer_class": all_of("must be a subclass of torch's Optimizer", None, *NO_FACTORY, th.nn.Tanh),
    "optimizer_kwargs": [
        *all_of("must be a dict or None", *NO_DICT),
        *all_of("must be keyword arguments of", {"lr": 0.1}, {"epz": 1.0}, {"eps": -1.0}, {"eps": "yes"}, {3: 1}),
    ],
}


def label(value: Any) -> str:
    """:return: an id that is the same in every process: without addresses, and on one line"""
    return re.sub(r"\s+", " ", re.sub(r" at 0x[0-9a-f]+", "", repr(value)))[:40]


def label_all(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={label(value)}" for name, value in kwargs.items())


def rows(table: Table, *before: Any, only: Callable[[str], bool] = lambda argument: True) -> list[Any]:
    cases = []
    for argument, wrongs in table.items():
        for wrong in wrongs if only(argument) else []:
            beside = ", " * bool(wrong.beside) + label_all(wrong.beside)
            prefix = "".join(f"{each.__name__}, " for each in before)
            name = f"{prefix}{argument}={label(wrong.value)}{beside}"
            cases.append(pytest.param(*before, argument, wrong, id=name))
    return cases


def assert_refused(argument: str, wrong: Wrong, construct: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong.accepted)) as error:
        construct(**{argument: wrong.value, **wrong.beside})
    message = str(error.value)
    assert re.search(rf"`{argument}[`\[]|\b{argument}=", message), message
    assert (repr(wrong.value) if wrong.quoted is None else wrong.quoted) in message


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argument", "wrong"), rows(GRPO_TABLE))
def test_a_wrong_argument_of_grpo_is_named_and_quoted_with_what_is_accepted(argument: str, wrong: Wrong):
    assert_refused(argument, wrong, make_model)


def arguments_of(buffer_class: type) -> set[str]:
    """:return: the arguments of a constructor, and of those that it hands its ``kwargs`` to"""
    names: set[str] = set()
    for each in buffer_class.__mro__:
        parameters = inspect.signature(each).parameters.values()
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


@pytest.mark.parametrize(
    ("buffer_class", "argument", "wrong"),
    # A class without a constructor of its own has the same checks as its base
    [
        row
        for each in BUFFERS.values()
        if "__init__" in vars(each)
        for row in rows(BUFFER_TABLE, each, only=arguments_of(each).__contains__)
    ],
)
def test_a_wrong_argument_of_a_buffer_is_named_and_quoted_with_what_is_accepted(
    buffer_class: type[GroupRolloutBuffer], argument: str, wrong: Wrong
):
    assert_refused(argument, wrong, partial(make_buffer, buffer_class))


@pytest.mark.parametrize(("argument", "wrong"), rows(POLICY_TABLE))
def test_a_wrong_argument_of_a_policy_is_named_and_quoted_with_what_is_accepted(argument: str, wrong: Wrong):
    beside = {**wrong.beside}
    policy_class = beside.pop("policy_class", ActorPolicy)
    assert_refused(argument, wrong._replace(beside=beside), partial(make_policy, policy_class))


# --- What is refused in an entry of a hyperparameter file ---------------------------------------------------------------

ENTRY = {"policy": "MlpPolicy", "n_timesteps": 64, "n_steps": 8}
#: The arguments of GRPO that an entry may hold.
ENTRY_KEYS = [name for name in inspect.signature(GRPO).parameters if name not in PASSED_BY_ZOO]


@pytest.mark.parametrize(
    ("argument", "wrong"),
    # What YAML can write; the values that Python alone can are the constructor's affair
    [
        row
        for row in rows({name: GRPO_TABLE[name] for name in ENTRY_KEYS if name in GRPO_TABLE})
        if type(row.values[1].value) in (str, bool, int, float, list, dict, type(None)) and not row.values[1].beside
    ],
)
def test_a_wrong_value_in_an_entry_is_named_and_quoted_with_what_is_accepted(argument: str, wrong: Wrong):
    assert_refused(argument, wrong, lambda **value: construct_from_entry({**ENTRY, **value}))


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        *[pytest.param(key, "GRPO takes policy, learning_rate|did you mean", id=f"{key}, the zoo's") for key in PASSED_BY_ZOO],
        pytest.param("vf_coef", "GRPO takes policy, learning_rate|did you mean", id="vf_coef, a critic's"),
        pytest.param("n_step", "did you mean 'n_steps'", id="n_step, misspelt"),
        pytest.param("N_STEPS", "GRPO takes policy, learning_rate", id="N_STEPS, in capitals"),
        pytest.param("", "GRPO takes policy, learning_rate", id="no name"),
    ],
)
def test_a_key_that_no_entry_has_is_quoted_with_those_it_may_have(key: str, accepted: str):
    with pytest.raises(ValueError, match=f"unknown key {key!r}.*({accepted})"):
        check_entry({**ENTRY, key: 1})


@pytest.mark.parametrize("key", ["policy", "n_timesteps"])
def test_an_entry_without_a_key_that_it_needs_is_told_which(key: str):
    with pytest.raises(ValueError, match=f"the key {key!r} is missing"):
        check_entry({name: value for name, value in ENTRY.items() if name != key})


# --- The table is complete --------------------------------------------------------------------------------------------


#: Arguments for which no wrong value exists, each with the reason. All have one; ``args`` and ``kwargs`` of a buffer, which
#: stand for its base's arguments, are looked through by ``arguments_of``.
EXEMPT: dict[str, str] = {}


@pytest.mark.parametrize(
    ("table", "classes"),
    [
        pytest.param(GRPO_TABLE, [GRPO], id="GRPO"),
        pytest.param(BUFFER_TABLE, [GroupRolloutBuffer, CompleteGroupRolloutBuffer, *BUFFERS.values()], id="buffers"),
        pytest.param(POLICY_TABLE, [ActorPolicy, ActorCnnPolicy, MultiInputActorPolicy], id="policies"),
    ],
)
def test_every_argument_has_rows_and_every_row_an_argument(table: Table, classes: list[type]):
    assert set(table) == {name for each in classes for name in arguments_of(each)} - set(EXEMPT)
    assert all(table.values())


def test_every_key_of_an_entry_is_grpos_own_or_the_zoos():
    # ZOO_KEYS are read by the zoo, which checks what it does with them; it hands none of them to GRPO
    assert set(ENTRY_KEYS) <= set(GRPO_TABLE) and not set(ENTRY_KEYS) & set(ZOO_KEYS)


# --- What is accepted -------------------------------------------------------------------------------------------------


def leaky() -> th.nn.Module:
    return th.nn.LeakyReLU(0.2)


ACCEPTED_BY_GRPO: list[dict[str, Any]] = [
    dict(policy=ActorPolicy),
    dict(env=DummyVecEnv([TinyEnv, TinyEnv]), n_steps=1),
    *[dict(learning_rate=value) for value in (0.0, 0, 1, np.float32(0.1), np.int64(1), constant)],
    dict(learning_rate=LinearSchedule(1e-3, 0.0, 1.0)),
    dict(n_steps=2),
    dict(n_steps=np.int64(8), batch_size=np.int32(4), n_epochs=np.uint8(1), group_size=np.int16(2)),
    dict(batch_size=10**9),
    *[{name: value} for name in ("gamma", "gae_lambda") for value in (0, 0.0, 1, 1.0, np.float32(0.9), np.int64(1))],
    *[dict(clip_range=value) for value in (1e-9, 5, np.float32(0.2), np.int64(1), constant, LinearSchedule(0.2, 0.0, 1))],
    *[dict(clip_range_high=value) for value in (None, 0.3, np.float32(0.3), constant)],
    *[dict(dual_clip=value) for value in (None, 1.01, 3, np.float32(3))],
    *[dict(normalize_advantage=value, share_starts=value, doctor=value) for value in (True, False, np.False_)],
    *[dict(ent_coef=value) for value in (0, -0.1, np.float64(0.01))],
    *[dict(max_grad_norm=value) for value in (np.inf, float("inf"), np.float32("inf"), 1, np.float32(0.5))],
    *[dict(kl_coef=value) for value in (0, 1, 1e9, np.float32(0.1))],
    *[dict(kl_coef=0.1, adaptive_kl_target=value) for value in (None, 1, 1e-9, np.float64(0.02))],
    *[dict(kl_reference=value) for value in ("old", "polyak", 1, np.int64(3))],
    *[dict(kl_reference_tau=value) for value in (0, 1, np.float32(0.5))],
    *[dict(use_sde=True, sde_sample_freq=value) for value in (-1, 1, np.int64(-1), np.int64(4))],
    *[dict(rollout_buffer_class=value) for value in (None, *BUFFERS, KernelRolloutBuffer)],
    *[dict(rollout_buffer_kwargs=value) for value in (None, {}, dict(ridge=1), dict(horizon=None))],
    *[dict(target_kl=value) for value in (None, 1, np.float32(0.01))],
    *[dict(n_reused_rollouts=value) for value in (0, 3, np.int64(1))],
    *[dict(stats_window_size=value) for value in (1, np.int64(10))],
    *[dict(tensorboard_log=value) for value in (None, "runs", pathlib.Path("runs"))],
    *[dict(policy_kwargs=value) for value in (None, {}, dict(activation_fn=th.nn.ReLU), dict(log_std_init=-2))],
    dict(policy_kwargs=dict(optimizer_class=th.optim.SGD, optimizer_kwargs=dict(momentum=0.9))),
    dict(policy_kwargs=dict(net_arch=[], features_extractor_class=FlattenExtractor)),
    dict(policy_kwargs=dict(activation_fn=leaky, log_std_init=np.float32(-1), ortho_init=np.False_)),
    dict(policy_kwargs=dict(squash_output=True), use_sde=True),
    *[dict(verbose=value) for value in (0, 2, np.int64(0))],
    *[dict(seed=value) for value in (None, 0, 2**32 - 1, np.int64(0), np.uint32(7))],
    *[dict(device=value) for value in ("auto", "cpu", th.device("cpu"))],
]


@pytest.mark.parametrize("kwargs", [pytest.param(kwargs, id=label_all(kwargs)) for kwargs in ACCEPTED_BY_GRPO])
def test_a_value_on_the_boundary_is_accepted_and_the_model_acts(kwargs: dict[str, Any]):
    model = make_model(**kwargs)
    action, _ = model.predict(np.zeros(3, dtype=np.float32))
    assert BOX.contains(action)


ACCEPTED_BY_BUFFERS: list[tuple[str, dict[str, Any]]] = [
    ("kernel", dict(forgetting=0, n_folds=1, n_features=np.int64(1), bandwidth=np.float32(1), ridge=1)),
    (
        "kernel",
        dict(
            forgetting=1,
            time_feature=np.False_,
            actor_features=np.True_,
            target_lambda=1,
            fit="lstd",
            horizon=1,
            device=th.device("cpu"),
        ),
    ),
    ("kernel", dict(observation_space=DICT, action_space=DISCRETE, buffer_size=1)),
    ("kernel", dict(gamma=1, gae_lambda=0, n_envs=np.int64(3), reward_weights={"a": 0, "b": np.float32(-1)})),
    ("outcome", dict(scale=None, max_waiting=1, leave_one_out=np.True_, tied_groups="skip")),
    ("process", dict(component_aggregation="normalize_then_sum", reward_weights={"a": 1})),
    ("return_to_go", dict(scale="none", gamma=0.0, group_size=np.int64(2))),
    ("stepwise", dict(horizon=None, max_waiting=None, reward_weights=None)),
]


@pytest.mark.parametrize(
    ("buffer", "kwargs"),
    [pytest.param(buffer, kwargs, id=f"{buffer}, {label_all(kwargs)}") for buffer, kwargs in ACCEPTED_BY_BUFFERS],
)
def test_a_value_on_the_boundary_is_accepted_and_the_buffer_is_empty(buffer: str, kwargs: dict[str, Any]):
    assert make_buffer(BUFFERS[buffer], **kwargs).n_samples == 0
