"""Mistakes that users make, each with the message that they see."""

import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import VECTOR, AnyEnv, make_envs, make_model, reload
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_grpo import GRPO


class OldGym(gym.Wrapper):
    """Returns what ``step`` returned before Gymnasium."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, info


class Seedless(AnyEnv):
    """Draws from a generator that is not seeded."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(seed=int(np.random.randint(1000)))


def continue_without_vec_normalize(folder: pathlib.Path) -> None:
    reload(make_model(VecNormalize(make_envs())).learn(32), env=make_envs()).learn(32, reset_num_timesteps=False)


def evaluate_on_the_training_environment(folder: pathlib.Path) -> None:
    env = DummyVecEnv([lambda: Monitor(AnyEnv())])
    make_model(env).learn(32, callback=EvalCallback(env, eval_freq=8, verbose=0))


MISTAKES: list[tuple[str, Callable[[pathlib.Path], Any], type[Exception], str]] = [
    (
        "an argument of load is misspelt",
        lambda _: reload(make_model(), clip_rnge=0.1),
        TypeError,
        "GRPO does not take `clip_rnge=0.1`: did you mean `clip_range`?",
    ),
    (
        "load gets the id of an environment",
        lambda _: reload(make_model(), env="CartPole-v1"),
        ValueError,
        "`env` is 'CartPole-v1': pass an environment, such as `gymnasium.make('CartPole-v1')`, or several, such as",
    ),
    (
        "the environment ignores its seed",
        lambda _: make_model(Seedless()).learn(64),
        UserWarning,
        "The environment 'Seedless' does not reproduce its initial state: two calls of `reset(seed=...)` with the same seed",
    ),
    (
        "the environment is written for old versions of Gym",
        lambda _: make_model(OldGym(AnyEnv())).learn(16),
        ValueError,
        "not enough values to unpack (expected 5, got 4)\nThis was raised by `step` of environment 0. The rollout was "
        "discarded; the model can be saved.\nIn Gymnasium, `step` returns `observation, reward, terminated, truncated, info`.",
    ),
    (
        "actions have bounds that stand for none",
        lambda _: make_model(AnyEnv(VECTOR, spaces.Box(-3.4e38, 3.4e38, (2,)))),
        ValueError,
        "are more than 1e+09 apart, so a quarter of its range is no useful standard deviation: give it tighter bounds",
    ),
    (
        "the evaluation uses the training environment",
        evaluate_on_the_training_environment,
        RuntimeError,
        "A callback reset the training environment in the course of a rollout: pass `EvalCallback` (or "
        "`evaluate_policy`) a separate environment, for example `make_vec_env('CartPole-v1')`.",
    ),
    (
        "the arguments are exchanged",
        lambda _: GRPO(AnyEnv(), "MlpPolicy"),  # type: ignore[arg-type]
        ValueError,
        "The first argument is the policy and the second the environment: GRPO('MlpPolicy', env).",
    ),
    (
        "training continues without VecNormalize",
        continue_without_vec_normalize,
        UserWarning,
        "The policy has learned from observations normalised by VecNormalize, and these environments have none. Wrap them as "
        "before: `VecNormalize.load(path, venv)` takes the statistics from the file of `VecNormalize.save(path)`.",
    ),
]


@pytest.mark.parametrize(("mistake", "error", "message"), [pytest.param(*case, id=name) for name, *case in MISTAKES])
def test_the_message_says_what_is_wrong_and_what_to_write(
    mistake: Callable[[pathlib.Path], Any], error: type[Exception], message: str, tmp_path: pathlib.Path
):
    with warnings.catch_warnings(), pytest.raises(error, match=re.escape(message)):
        warnings.simplefilter("error", UserWarning)
        mistake(tmp_path)


@pytest.mark.parametrize(
    "env",
    [AnyEnv, lambda: AnyEnv(), [AnyEnv()], "CartPole-v1"],
    ids=["class", "function", "list", "id"],
)
def test_only_an_environment_is_set(env: Any):
    with pytest.raises(ValueError, match=r"`env` is .*: pass an environment, such as"):
        make_model().set_env(env)


def test_arguments_of_a_subclass_can_be_changed_when_it_is_loaded(tmp_path: pathlib.Path):
    class Own(GRPO):
        def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.bonus = bonus

    Own("MlpPolicy", make_envs(), bonus=1.0, n_steps=16, batch_size=16).save(tmp_path / "own")
    assert Own.load(tmp_path / "own", bonus=2.0, gamma=0.5).bonus == 2.0
    with pytest.raises(TypeError, match=r"GRPO does not take `bonsu=1\.0`: did you mean `bonus`\?"):
        Own.load(tmp_path / "own", bonsu=1.0)


@pytest.mark.parametrize("wrap", [lambda venv: venv, VecNormalize], ids=["as they are", "normalised"])
def test_training_that_continues_with_observations_as_before_gives_no_warning(wrap: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        reload(make_model(wrap(make_envs())).learn(32), env=wrap(make_envs())).learn(32, reset_num_timesteps=False)
