"""Gymnasium's vector environments as SB3's ``VecEnv``: the same transitions as ``DummyVecEnv``."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import ClipReward, RecordEpisodeStatistics
from helpers import HWC, VECTOR, AnyEnv
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

from sb3_grpo.gymnasium_vector import GymnasiumVecEnv, wrap_vector_env

N_ENVS = 3
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
OBSERVATION_SPACES = [
    pytest.param(VECTOR, id="Box"),
    pytest.param(spaces.Discrete(4), id="Discrete"),
    pytest.param(spaces.Box(-1.0, 1.0, (), np.float32), id="scalar"),
    pytest.param(spaces.Dict({"a": VECTOR, "b": spaces.Discrete(4), "eye": HWC}), id="Dict"),
]
MODES = [pytest.param(mode, id=mode.name) for mode in AutoresetMode]
KINDS = (
    [pytest.param(SyncVectorEnv, {}, mode, id=f"sync-{mode.name}") for mode in AutoresetMode]
    + [pytest.param(AsyncVectorEnv, {}, mode, id=f"async-{mode.name}") for mode in AutoresetMode]
    + [
        pytest.param(SyncVectorEnv, dict(copy=False), NEXT_STEP, id="sync-one-buffer"),
        pytest.param(AsyncVectorEnv, dict(copy=False), DISABLED, id="async-one-buffer"),
        pytest.param(AsyncVectorEnv, dict(shared_memory=False), SAME_STEP, id="async-pipes-SAME_STEP"),
        pytest.param(AsyncVectorEnv, dict(shared_memory=False), DISABLED, id="async-pipes-DISABLED"),
    ]
)


class Talkative(AnyEnv):
    """An ``AnyEnv`` with infos of every kind, some of them only in some steps. It counts its resets."""

    n_resets = 0
    label = "talkative"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.n_resets += 1
        self.seed, self.options = seed, options
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"resets": self.n_resets, "length": self.steps_left}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"steps_left": self.steps_left, "parts": {"half": reward / 2, "name": "x"}}
        if self.steps_left % 2 == 0:
            info.update(even=True, position=np.full(2, self.steps_left), words=["a"])
        is_both = terminated and bool(self.np_random.integers(2))
        return observation, reward, terminated, truncated or is_both, info

    def double(self, value: int) -> int:
        return 2 * value


class Native(VectorEnv):
    """A vector environment of a class of its own, which takes a mask and one seed for all environments."""

    def __init__(self, mode: AutoresetMode = DISABLED) -> None:
        self.envs = SyncVectorEnv(env_fns(), autoreset_mode=mode)
        self.num_envs, self.metadata = N_ENVS, {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = VECTOR, spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is None or type(seed) is int
        return self.envs.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self.envs.step(actions)


class OwnReset(gym.vector.VectorWrapper):
    """A wrapper that may keep a state for each environment."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=options)


def env_fns(observation_space: spaces.Space = VECTOR, wrapper: Callable = lambda env: env) -> list[Callable[[], gym.Env]]:
    return [lambda: wrapper(Talkative(observation_space)) for _ in range(N_ENVS)]


def sync(mode: AutoresetMode = NEXT_STEP, observation_space: spaces.Space = VECTOR) -> GymnasiumVecEnv:
    return GymnasiumVecEnv(SyncVectorEnv(env_fns(observation_space), autoreset_mode=mode, copy=False))


def history(env: VecEnv, n_steps: int = 30, actions: Any = None, seed: int = 5) -> list[tuple[Any, ...]]:
    """
    :return: Observations and infos of a reset, and then of each step what ``step`` returns and the infos of the last resets
    """
    rng = np.random.default_rng(1)
    env.seed(seed)
    # No copies: what has been returned must not change later.
    found: list[tuple[Any, ...]] = [(env.reset(), list(env.reset_infos))]
    for _ in range(n_steps):
        found.append((*env.step(rng.integers(3, size=N_ENVS) if actions is None else actions), list(env.reset_infos)))
    return found


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_equal(found, expected)
    arrays = [array for step in found[1:] for array in step[:3] if isinstance(array, np.ndarray)]
    assert [array.dtype for array in arrays] == [
        array.dtype for step in expected[1:] for array in step[:3] if isinstance(array, np.ndarray)
    ]


@pytest.fixture(params=[SyncVectorEnv, AsyncVectorEnv], ids=["sync", "async"])
def vec_env(request: pytest.FixtureRequest) -> Iterator[GymnasiumVecEnv]:
    with closing(GymnasiumVecEnv(request.param(env_fns()))) as env:
        env.seed(0)
        env.reset()
        yield env


# --- transitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "arguments", "mode"), KINDS)
def test_transitions_infos_and_resets_are_those_of_a_dummy_vec_env(
    kind: Callable[..., VectorEnv], arguments: dict[str, Any], mode: AutoresetMode
) -> None:
    expected = history(DummyVecEnv(env_fns()))
    assert sum(dones.sum() for _, _, dones, _, _ in expected[1:]) > 5
    with closing(GymnasiumVecEnv(kind(env_fns(), autoreset_mode=mode, **arguments))) as env:
        assert_same(history(env), expected)


def test_a_native_vector_environment_without_autoreset_is_reset_with_a_mask_and_no_seeds() -> None:
    env: Any = GymnasiumVecEnv(Native())
    assert_same(history(env), history(DummyVecEnv(env_fns())))
    with pytest.raises(NotImplementedError, match=r"cannot reset the environments \[1\] with \[7\]"):
        env.reset_envs([1], [7])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("observation_space", OBSERVATION_SPACES)
def test_every_observation_space_has_the_observations_of_a_dummy_vec_env(
    observation_space: spaces.Space, mode: AutoresetMode
) -> None:
    assert_same(history(sync(mode, observation_space)), history(DummyVecEnv(env_fns(observation_space))))


# --- resets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "arguments", "mode"), [kind for kind in KINDS if SAME_STEP not in kind.values])
def test_each_episode_has_one_reset_with_the_seed_that_the_caller_gives(
    kind: Callable[..., VectorEnv], arguments: dict[str, Any], mode: AutoresetMode
) -> None:
    with closing(GymnasiumVecEnv(kind(env_fns(), autoreset_mode=mode, **arguments))) as env:
        assert env.unseeded_because is None
        env.autoreset = False
        env.seed(0)
        env.reset()
        n_episodes = np.ones(N_ENVS, int)
        for _ in range(30):
            _, _, dones, infos = env.step(np.ones(N_ENVS, int))
            n_episodes += dones
            done = np.flatnonzero(dones).tolist()
            assert all("terminal_observation" in infos[env_idx] for env_idx in done)
            observations = env.reset_envs(done, [100 + env_idx for env_idx in done])[0] if done else []
            for env_idx, observation in zip(done, observations, strict=True):
                np.testing.assert_array_equal(observation, Talkative().reset(seed=100 + env_idx)[0])
        assert env.get_attr("n_resets") == n_episodes.tolist()
        assert env.get_attr("seed") == [100, 101, 102]


@pytest.mark.parametrize(("kind", "arguments", "mode"), KINDS)
def test_reset_envs_resets_these_environments_and_no_others(
    kind: Callable[..., VectorEnv], arguments: dict[str, Any], mode: AutoresetMode
) -> None:
    with closing(GymnasiumVecEnv(kind(env_fns(), autoreset_mode=mode, **arguments))) as env:
        env.seed(0)
        env.reset()
        env.step(np.ones(N_ENVS, int))
        resets, steps_left = env.get_attr("n_resets"), env.get_attr("steps_left")
        seeds: Any = np.array([7, 7])
        observations, infos = env.reset_envs([2, 0], seeds)
        start, _ = Talkative().reset(seed=7)
        np.testing.assert_array_equal(observations, [start, start])
        assert [info["length"] for info in infos] == env.get_attr("steps_left", [2, 0])
        assert env.reset_infos[2] == infos[0] and env.reset_infos[0] == infos[1]
        assert env.get_attr("n_resets") == [resets[0] + 1, resets[1], resets[2] + 1]
        assert env.get_attr("steps_left", 1) == [steps_left[1]]


@pytest.mark.parametrize(
    ("vector_env", "reason"),
    [
        pytest.param(lambda: SyncVectorEnv(env_fns(), autoreset_mode=SAME_STEP), "AutoresetMode.SAME_STEP", id="SAME_STEP"),
        pytest.param(Native, "Native takes one seed", id="native"),
    ],
)
def test_an_environment_whose_resets_take_no_seed_says_why(vector_env: Callable[[], VectorEnv], reason: str) -> None:
    env: Any = GymnasiumVecEnv(vector_env())
    assert reason in env.unseeded_because
    env.reset()
    assert sum(env.step(np.ones(env.num_envs, int))[2].any() for _ in range(30)) > 0


def test_seeds_and_options_hold_for_one_reset(vec_env: GymnasiumVecEnv) -> None:
    vec_env.seed(10)
    vec_env.set_options({"difficulty": 2})
    vec_env.reset()
    assert vec_env.get_attr("seed") == [10, 11, 12]
    assert vec_env.get_attr("options") == [{"difficulty": 2}] * N_ENVS
    vec_env.reset()
    assert vec_env.get_attr("seed") == vec_env.get_attr("options") == [None] * N_ENVS


# --- questions ---------------------------------------------------------------------------------------------------------


def test_attributes_are_read_and_set_for_single_environments(vec_env: GymnasiumVecEnv) -> None:
    vec_env.set_attr("label", ["new"], indices=[1])
    assert vec_env.get_attr("label") == ["talkative", ["new"], "talkative"]
    assert vec_env.get_attr("label", 1) == [["new"]]
    vec_env.set_attr("label", "all")
    assert vec_env.get_attr("label", [0, 2]) == ["all", "all"]
    assert vec_env.env_method("double", 4) == [8, 8, 8]
    assert vec_env.get_attr("double")[0](4) == 8  # not called


def test_a_missing_attribute_is_reported_and_ends_no_worker(vec_env: GymnasiumVecEnv) -> None:
    assert vec_env.has_attr("label") and not vec_env.has_attr("action_masks")
    with pytest.raises(AttributeError, match="action_masks"):
        vec_env.get_attr("action_masks")
    with pytest.raises(AttributeError, match="action_masks"):
        vec_env.env_method("action_masks")
    vec_env.step(np.ones(N_ENVS, int))


def test_environments_in_a_monitor_are_not_monitored_twice() -> None:
    env = wrap_vector_env(SyncVectorEnv(env_fns(wrapper=Monitor)))
    assert type(env) is GymnasiumVecEnv and env.env_is_wrapped(Monitor) == [True] * N_ENVS


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_environments_without_a_monitor_are_monitored(kind: Callable[..., VectorEnv]) -> None:
    with closing(wrap_vector_env(kind(env_fns()))) as env:
        assert type(env) is VecMonitor and env.env_is_wrapped(Monitor) == [False] * N_ENVS


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_an_environment_that_does_not_say_when_it_resets_is_refused() -> None:
    vector_env = SyncVectorEnv(env_fns())
    vector_env.metadata = {}
    with pytest.raises(ValueError, match=r"metadata\['autoreset_mode'\] is None: set it .* `make_vec_env"):
        GymnasiumVecEnv(vector_env)


@pytest.mark.parametrize(
    ("make", "obstacle"),
    [
        pytest.param(partial(AsyncVectorEnv, env_fns(), shared_memory=False), "AsyncVectorEnv", id="resets-twice"),
        pytest.param(lambda: RecordEpisodeStatistics(SyncVectorEnv(env_fns())), "RecordEpisodeStatistics", id="wrapper"),
        pytest.param(lambda: ClipReward(OwnReset(SyncVectorEnv(env_fns())), 0, 1), "OwnReset", id="wrapper-below-another"),
        pytest.param(partial(gym.make_vec, "CartPole-v1", 2), "CartPoleVectorEnv", id="native"),
    ],
)
def test_steps_without_effect_are_refused_with_what_to_do_instead(make: Callable[[], VectorEnv], obstacle: str) -> None:
    with (
        closing(make()) as vector_env,
        pytest.raises(ValueError, match=f"^{obstacle} in .*NEXT_STEP.* step without effect: use"),
    ):
        GymnasiumVecEnv(vector_env)


# --- training ----------------------------------------------------------------------------------------------------------


def test_a_model_learns_the_same_from_a_vector_environment_as_from_a_dummy_vec_env() -> None:
    weights: list[Any] = []
    for env in (wrap_vector_env(SyncVectorEnv(env_fns())), VecMonitor(DummyVecEnv(env_fns()))):
        model: Any = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0).learn(96)
        weights.append(model.policy.action_net.weight.detach().numpy())
    np.testing.assert_array_equal(weights[0], weights[1])
