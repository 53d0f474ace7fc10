"""The check whether members of a group live through the same inputs."""

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from sb3_grpo import check_shared_inputs


class Walk(gym.Env[np.ndarray, Any]):
    """A position that a shock moves in each step; each subclass draws the shocks in another way."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.position = 0, float(self.np_random.normal())
        self.begin()
        return np.array([self.position], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.position += self.shock(action)
        self.t += 1
        return np.array([self.position], np.float32), -abs(self.position), False, self.t == 50, {}

    def begin(self) -> None:
        """What a subclass does at the reset."""

    def shock(self, action: int) -> float:
        raise NotImplementedError


class DrawsAtReset(Walk):
    def begin(self) -> None:
        self.shocks = self.np_random.normal(size=50)

    def shock(self, action: int) -> float:
        return float(self.shocks[self.t]) if action else 0.0


class DrawsInEachStep(Walk):
    def shock(self, action: int) -> float:
        return float(self.np_random.normal()) if action < 3 else 0.0


class DrawsForSomeActions(Walk):
    def shock(self, action: int) -> float:
        return float(self.np_random.normal()) if action == 2 else 0.0


class DrawsFromPythonsGenerator(Walk):
    def shock(self, action: int) -> float:
        return random.gauss(0, 1)


class SeedsTheGeneratorOfNumpy(Walk):
    """Repeats itself, but another environment of the same process would draw from the generator in between."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        np.random.seed(seed)
        return super().reset(seed=seed, options=options)

    def shock(self, action: int) -> float:
        return float(np.random.normal())


class NeverReseedsItsGenerator(Walk):
    def begin(self) -> None:
        self.rng = getattr(self, "rng", np.random.default_rng(0))

    def shock(self, action: int) -> float:
        return float(self.rng.normal())


class ExposesInputsOfTheActions(Walk):
    """Draws the same amount whatever the action, but from another distribution."""

    def begin(self) -> None:
        self.inputs = np.zeros(50)

    def shock(self, action: int) -> float:
        self.inputs[self.t] = self.np_random.normal() * (1 + action)
        return float(self.inputs[self.t])


class DrawsForAction2(gym.Wrapper[np.ndarray, int, np.ndarray, int]):
    """A wrapper with a generator of its own."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.rng = np.random.RandomState(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward) + (self.rng.normal() if action == 2 else 0.0), terminated, truncated, info


@pytest.mark.parametrize(
    ("env", "verdict"),
    [
        pytest.param(DrawsAtReset(), "shared", id="stream drawn at reset"),
        pytest.param(DrawsInEachStep(), "shared", id="one draw in each step"),
        pytest.param(DrawsForSomeActions(), "lost", id="draws for some actions"),
        pytest.param(DrawsForAction2(DrawsAtReset()), "lost", id="a wrapper draws for some actions"),
        pytest.param(ExposesInputsOfTheActions(), "lost", id="exposed inputs depend on actions"),
        pytest.param(DrawsFromPythonsGenerator(), "not seeded", id="generator that the seed does not reach"),
        pytest.param(SeedsTheGeneratorOfNumpy(), "not seeded", id="global generator that resets seed"),
        pytest.param(NeverReseedsItsGenerator(), "not seeded", id="generator that resets do not seed"),
    ],
)
def test_the_verdict_says_whether_members_share_their_inputs(env: gym.Env, verdict: str) -> None:
    report = check_shared_inputs(env)
    assert report.verdict == verdict
    assert ("draw the whole stream of inputs in `reset`" in report.message) == (verdict != "shared")


def test_the_message_names_the_first_step_that_differs() -> None:
    class DrawsInTheTenthStep(DrawsAtReset):
        def shock(self, action: int) -> float:
            return float(self.np_random.normal(size=1 + action)[0]) if self.t == 9 else 0.0

    message = check_shared_inputs(DrawsInTheTenthStep()).message
    assert "random generators of two members with the same seed and different actions differ from step 10 on" in message


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SeedsTheGeneratorOfNumpy(), "The reset uses the global generator of `numpy.random`: its random numbers do not come"),
        (DrawsFromPythonsGenerator(), "Step 1 uses the global generator of Python's `random`"),
    ],
)
def test_the_message_names_the_global_generator_and_the_step(env: gym.Env, message: str) -> None:
    assert message in check_shared_inputs(env, seed=1).message


def test_a_space_that_draws_its_samples_from_a_global_generator_is_no_input() -> None:
    class DrawsFromNumpy(spaces.Discrete):
        def sample(self, *_: Any) -> np.int64:
            return np.int64(np.random.randint(3))

    env = DrawsAtReset()
    env.action_space = DrawsFromNumpy(3)
    state = np.random.get_state()
    assert "global generator" not in check_shared_inputs(env).message
    np.random.set_state(state)


def test_the_check_leaves_the_action_space_as_it_is_because_other_environments_may_have_the_same() -> None:
    env, same_seed = DrawsAtReset(), spaces.Discrete(3, seed=7)
    env.action_space.seed(7)
    check_shared_inputs(env)
    assert [env.action_space.sample() for _ in range(20)] == [same_seed.sample() for _ in range(20)]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"])
def test_environments_whose_steps_are_deterministic_share_their_inputs(env_id: str) -> None:
    assert check_shared_inputs(gym.make(env_id)).verdict == "shared"


class Stream(gym.Env[np.ndarray, Any]):
    """
    The reward is the number of a hidden stream plus a part that the action alone decides, both of mean zero.

    :param own: Standard deviation of the actions' part of a reward; that of the stream's part is one
    :param walk: Whether the stream is a random walk
    :param visible: Whether observations say what the rest of the stream adds up to
    """

    def __init__(self, own: float = 0.0, walk: bool = False, visible: bool = False) -> None:
        self.own, self.walk, self.visible = own, walk, visible
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        stream = self.np_random.normal(size=50)
        self.t, self.stream = 0, stream.cumsum() if self.walk else stream
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self.stream[self.t]) + self.own * (2 * int(action) - 1)
        self.t += 1
        return self.observe(), reward, False, self.t == 50, {}

    def observe(self) -> np.ndarray:
        return np.array([self.stream[self.t :].sum() * self.visible], np.float32)


@pytest.mark.parametrize(
    ("env", "share"),
    [
        pytest.param(Stream(own=0.0), 1.0, id="nothing but a hidden stream"),
        pytest.param(Stream(own=1.0), 0.5, id="actions matter as much"),
        pytest.param(Stream(own=2.0), 0.2, id="actions matter twice as much"),
        pytest.param(Stream(own=1.0, walk=True), 1.0, id="a hidden random walk dominates"),
        pytest.param(Stream(own=1.0, walk=True, visible=True), 0.0, id="observations show the stream"),
        pytest.param(gym.make("CartPole-v1"), 0.0, id="steps are deterministic"),
    ],
)
def test_the_share_is_that_of_inputs_which_are_shared_and_hidden(env: gym.Env, share: float) -> None:
    report = check_shared_inputs(env)
    assert report.share == pytest.approx(share, abs=0.1)
    assert f"{report.share:.0%} of the variance of returns is shared and not explained" in report.message


def test_members_that_share_nothing_have_a_share_of_zero_and_equal_returns_have_none() -> None:
    class Unseeded(Stream):
        def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
            return super().reset(seed=None)

    class Costless(Stream):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            observation, _, terminated, truncated, info = super().step(action)
            return observation, 0.0, terminated, truncated, info

    assert check_shared_inputs(Unseeded()).share == pytest.approx(0.0, abs=0.1)
    assert check_shared_inputs(Costless()).share is None


class EndsWithoutSaying(DrawsAtReset):
    """An environment whose time limit is left to `gym.make`."""

    def shock(self, action: int) -> float:
        return float(np.zeros(50)[self.t])

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, False, info


class TakesNoSeed(DrawsAtReset):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


def test_the_arguments_of_the_check_are_checked() -> None:
    for several in (make_vec_env(DrawsAtReset, n_envs=2), "CartPole-v1"):
        with pytest.raises(ValueError, match=r"pass a single environment, such as `gymnasium\.make"):
            check_shared_inputs(several)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`n_members` must be an integer of at least 2, not 1"):
        check_shared_inputs(DrawsAtReset(), n_members=1)
    with pytest.raises(ValueError, match="`n_groups` must be an integer of at least 2, not 1"):
        check_shared_inputs(DrawsAtReset(), n_groups=1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (EndsWithoutSaying(), r"failed in step 51 of an episode \(IndexError.* pass it as `gym.make` returns it"),
        (TakesNoSeed(), "cannot be reset with a seed .*: let `reset` accept `seed`"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_with_what_to_do(env: gym.Env, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shared_inputs(env)
