"""Rollouts on Ray: the same transitions as anywhere."""

import importlib
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import helpers
import numpy as np
import pytest
import ray
import torch as th
from gymnasium import spaces
from helpers import VECTOR, AnyEnv, same, weights
from ray_helpers import N_STEPS, Observer, Walk, make, monitored, ray_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan, VecNormalize

from sb3_grpo import EnvironmentFault
from sb3_grpo.distributed import RayVecEnv, vec_env
from sb3_grpo.distributed.worker import RolloutWorker
from sb3_grpo.observations import observation_parts
from sb3_grpo.persistence import VERSION
from sb3_grpo.starts import Ledger

# Ray runs once in a process of the tests
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_ends_with_the_module")]

# Workers cannot import this module
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARTS = dict(vector=VECTOR, discrete=spaces.Discrete(4), binary=spaces.MultiBinary(3), multi=spaces.MultiDiscrete([2, 3]))


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Any]:
    env = ray_env()
    yield env
    env.close()


@pytest.fixture
def env(two_workers: Any) -> Any:
    """Four walks in two workers, which take seconds to start, and so serve many tests. It warns as a new one does."""
    two_workers._has_warned = False
    return two_workers


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_and_number_of_workers_gives_the_same_weights(env: Any):
    first, again, other = (weights(make(env, seed=seed).learn(3 * N_STEPS * 4)) for seed in (0, 0, 1))
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize("n_workers", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_transitions_are_those_of_the_environments_with_these_actions(n_workers: int, env: Any):
    env, seen = env if n_workers == 2 else ray_env(n_workers=n_workers), Observer()
    model = make(env).learn(N_STEPS * 4, callback=seen)
    buffer = model.rollout_buffer
    assert seen.timesteps == [4 * (n + 1) for n in range(N_STEPS)]
    assert [row["n_steps"] for row in seen.rows] == list(range(N_STEPS))
    groups: dict[int, set[int]] = {}
    members: set[tuple[int, int]] = set()
    for env_idx in range(4):
        oracle, elapsed = Walk(), 0
        for t, row in enumerate(seen.rows):
            if buffer.steps[env_idx, t] == 0:
                elapsed, group = 0, int(buffer.groups[env_idx, t])
                observation, _ = oracle.reset(seed=model.ledger.seed_of(group))
                groups.setdefault(group, set()).add(env.worker_of_env[env_idx])
                members.add((group, int(buffer.members[env_idx, t])))
            assert buffer.groups[env_idx, t] == group and buffer.steps[env_idx, t] == elapsed
            np.testing.assert_array_equal(buffer.observations[env_idx, t], observation)
            np.testing.assert_array_equal(row["obs_tensor"][env_idx], observation)
            np.testing.assert_array_equal(row["clipped_actions"][env_idx], np.clip(row["actions"][env_idx], -1, 1))
            np.testing.assert_array_equal(buffer.actions[env_idx, t], row["actions"][env_idx])
            observation, reward, terminated, truncated, info = oracle.step(row["clipped_actions"][env_idx])
            elapsed += 1
            assert buffer.rewards[env_idx, t] == row["rewards"][env_idx] == np.float32(reward)
            assert buffer.dones[env_idx, t] == row["dones"][env_idx] == (terminated or truncated)
            its = row["infos"][env_idx]
            assert {key: its[key] for key in info} == info
            assert type(its["odd"]) is bool
            assert its["TimeLimit.truncated"] == (truncated and not terminated)
            if terminated or truncated:
                assert its["episode"]["l"] == elapsed
                np.testing.assert_array_equal(its["terminal_observation"], observation)
            else:
                np.testing.assert_array_equal(row["new_obs"][env_idx], observation)
    assert len(groups) > 4 and len(members) == (buffer.steps == 0).sum()
    assert all(len(workers) == 1 for workers in groups.values()), "a group is on several workers"
    if n_workers != 2:
        env.close()


@pytest.mark.parametrize("normalizes", [False, True], ids=["raw", "standardised"])
def test_workers_take_actions_with_the_probabilities_of_the_policy(normalizes: bool, env: Any):
    seen = Observer()
    model = make(env, normalize_observations=normalizes).learn(N_STEPS * 4)
    before = weights(model)
    model.learn(N_STEPS * 4, callback=seen, reset_num_timesteps=False)
    model.policy.load_state_dict(before)
    for row in seen.rows[::8]:
        expected = model.policy.evaluate_actions(row["obs_tensor"], th.as_tensor(row["actions"]))[0]
        th.testing.assert_close(row["log_probs"], expected.detach(), atol=1e-5, rtol=1e-5)


def test_a_callback_that_stops_drops_the_rest_and_the_next_rollout_begins_anew(env: Any):
    stopper, seen = Observer(stop_after=10), Observer()
    model = make(env).learn(10_000, callback=stopper)
    assert len(stopper.rows) == 10 and model.num_timesteps == 40
    model.learn(N_STEPS * 4, callback=seen, reset_num_timesteps=False)
    assert (model.rollout_buffer.steps[:, 0] == 0).all()
    firsts = [Walk().reset(seed=model.ledger.seed_of(group))[0] for group in model.rollout_buffer.groups[:, 0].tolist()]
    np.testing.assert_array_equal(model.rollout_buffer.observations[:, 0], firsts)


# --- the slow path ----------------------------------------------------------------------------------------------------


def test_a_wrapper_that_changes_data_is_named_once_and_honoured(env: Any):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make(VecNormalize(env), n_steps=8).learn(2 * 8 * 4)
    messages = [str(each.message) for each in caught]
    assert sum("VecNormalize needs every step of the workers" in each for each in messages) == 1
    assert any("gymnasium.wrappers.NormalizeReward" in each for each in messages)
    assert abs(model.rollout_buffer.observations).max() < 10.1


def test_if_each_step_is_a_call_an_episode_costs_one_reset_too():
    env = RayVecEnv([lambda: Monitor(Walk(), allow_early_resets=False)] * 4, n_workers=1)
    for share_starts in (True, False):
        env.set_attr("needs_reset", True)  # which allows the reset at the beginning of a run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(VecNormalize(env, norm_obs=False), n_steps=64, share_starts=share_starts).learn(64 * 4)
        buffer, begun = model.rollout_buffer, model.rollout_buffer.steps == 0
        assert len(model.ep_info_buffer) >= 8 and env.autoreset
        firsts = [Walk().reset(seed=model.ledger.seed_of(group))[0] for group in buffer.groups[begun].tolist()]
        assert np.array_equal(buffer.observations[begun], firsts) == share_starts
        if share_starts:
            oracle = Walk()
            oracle.reset(seed=model.ledger.seed_of(int(model.ledger.position.groups[3])))
            assert env.reset_infos[3] == {"first": oracle.position}
    env.close()


def test_some_of_the_environments_are_reset_with_their_seeds_and_the_others_go_on(env: Any):
    env.seed(0)
    before = env.reset().copy()
    observations, infos = env.reset_envs([3, 0], [7, 8])
    oracle = Walk()
    for observation, info, seed in zip(observations, infos, (7, 8), strict=True):
        np.testing.assert_array_equal(observation, oracle.reset(seed=seed)[0])
        assert info == {"first": oracle.position}
    np.testing.assert_array_equal(env.env_method("_observation"), [observations[1], *before[1:3], observations[0]])


def test_a_check_for_nan_is_no_reason_to_be_slow(env: Any, recwarn: pytest.WarningsRecorder):
    make(VecCheckNan(env)).learn(N_STEPS * 4)
    assert not [each for each in recwarn if "call to all" in str(each.message)]


def test_other_algorithms_can_step_it_and_a_line_tells_the_price(env: Any):
    with pytest.warns(UserWarning, match="Each step of this RayVecEnv is a call to all its workers"):
        PPO("MlpPolicy", env, n_steps=8, batch_size=32, device="cpu").learn(32)


# --- a VecEnv ---------------------------------------------------------------------------------------------------------


def test_it_gives_what_a_dummy_vec_env_gives(env: Any):
    dummy = DummyVecEnv([partial(monitored, Walk) for _ in range(4)])
    rng = np.random.default_rng(0)
    for each in (env, dummy):
        each.seed(7)
    np.testing.assert_array_equal(env.reset(), dummy.reset())
    assert env.reset_infos == dummy.reset_infos
    for _ in range(50):
        actions = rng.uniform(-1, 1, (4, 1)).astype(np.float32)
        for mine, its in zip(env.step(actions)[:3], dummy.step(actions)[:3], strict=True):
            np.testing.assert_array_equal(mine, its)
    assert env.get_attr("colour", indices=[1, 3]) == ["blue", "blue"]
    assert env.get_attr("left") == dummy.get_attr("left")
    assert [seen.tolist() for seen in env.env_method("_observation", indices=[3, 0])] == [
        seen.tolist() for seen in dummy.env_method("_observation", indices=[3, 0])
    ]
    assert env.env_is_wrapped(Monitor) == [True] * 4
    assert env.env_is_wrapped(gym.wrappers.TimeLimit, indices=2) == [False]
    assert env.has_attr("colour") and not env.has_attr("size")
    assert env.worker_of_env == [0, 0, 1, 1]
    assert len(set(env.worker_pids)) == 2


class Panel(AnyEnv):
    """Shows its index, and keeps what it was told."""

    def __init__(self, index: int, space: spaces.Space, file: str):
        super().__init__(space)
        self.render_mode = "rgb_array"
        self.index, self.file = index, file

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.options = options
        return super().reset(seed=seed)[0], {"options": options, "left": self.steps_left}

    def render(self) -> Any:
        return np.full((2, 2, 3), self.index, np.uint8)

    def sum_of(self, *numbers: int, sign: int = 1) -> int:
        return sign * (self.index + sum(numbers))

    def close(self) -> None:
        time.sleep(0.5)
        with open(self.file, "a") as file:
            print(self.index, file=file)


def panels(space: spaces.Space, folder: pathlib.Path, n_workers: int) -> tuple[Any, Any]:
    """:return: The same environments in workers and in this process"""

    def fns(where: str) -> list[Any]:
        return [partial(Panel, index, space, str(folder / where)) for index in range(3)]

    return RayVecEnv(fns("workers"), n_workers), DummyVecEnv(fns("here"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    env, dummy = panels(spaces.Dict(PARTS), tmp_path_factory.mktemp("panels"), n_workers=2)
    yield env, dummy
    env.close()


def assert_steps_are_the_same(env: Any, dummy: Any) -> None:
    assert env.seed(3) == dummy.seed(3) == [3, 4, 5]
    first, expected = env.reset(), dummy.reset()
    assert isinstance(first, (dict, tuple)) and isinstance(expected, type(first))
    np.testing.assert_equal(first, expected)
    n_ended = 0
    for _ in range(8):
        actions = [env.action_space.sample() for _ in range(3)]
        step, expected = env.step(actions), dummy.step(actions)
        np.testing.assert_equal(step, expected)
        np.testing.assert_equal(env.reset_infos, dummy.reset_infos)
        assert [array.dtype for array in step[1:3]] == [array.dtype for array in expected[1:3]]
        n_ended += sum("terminal_observation" in info for info in step[3])
    assert n_ended > 2


def test_dict_observations_and_infos_are_those_of_a_dummy_vec_env(pair: tuple[Any, Any]):
    assert_steps_are_the_same(*pair)


def test_tuple_observations_are_too_and_a_closed_one_says_so(tmp_path: pathlib.Path):
    env, dummy = panels(spaces.Tuple(tuple(PARTS.values())), tmp_path, n_workers=1)
    assert_steps_are_the_same(env, dummy)
    pids = env.worker_pids
    env.close()
    env.close()
    assert sorted((tmp_path / "workers").read_text().split()) == ["0", "1", "2"], "the environments were not closed"
    for call in (env.reset, partial(env.step, [0] * 3), partial(env.get_attr, "index"), env.get_images):
        with pytest.raises(EnvironmentFault, match="Environment 0 has no worker, because its RayVecEnv was closed"):
            call()
    assert env.worker_pids == pids


@pytest.mark.parametrize("indices", [None, 1, -1, [], [2, 0], [0, -1], (1, 1), range(1, 3)], ids=str)
def test_indices_name_the_environments_of_a_dummy_vec_env(indices: Any, pair: tuple[Any, Any]):
    for env in pair:
        env.set_attr("told", 0)
        assert env.set_attr("told", 7, indices) is None
    env, dummy = pair
    assert env.get_attr("told") == dummy.get_attr("told")
    assert env.get_attr("index", indices) == dummy.get_attr("index", indices)
    results = [each.env_method("sum_of", 10, 20, indices=indices, sign=-1) for each in pair]
    assert results[0] == results[1]
    for wrapper in (gym.Wrapper, gym.wrappers.TimeLimit):
        assert env.env_is_wrapped(wrapper, indices) == dummy.env_is_wrapped(wrapper, indices)


def test_seeds_and_options_are_for_one_reset(pair: tuple[Any, Any]):
    options = [{"level": 1}, {"level": 2}, {}]
    for env in pair:
        env.set_options(options)
    env, dummy = pair
    assert_steps_are_the_same(env, dummy)
    for each in (*options, {"level": 3}):
        for either in pair:
            either.set_options(options if each in options else each)
            either.seed(0)
            either.reset()
        assert env.get_attr("options") == dummy.get_attr("options")
        np.testing.assert_equal(env.reset_infos, dummy.reset_infos)
    seeded = env.get_attr("first_observation")
    env.reset()
    assert env.get_attr("options") == [None] * 3
    assert helpers.flat(env.get_attr("first_observation")[0]) != helpers.flat(seeded[0])


def test_an_error_in_a_reset_of_some_names_the_environment(pair: tuple[Any, Any]):
    env, _ = pair
    env.set_attr("lengths", (5, 2), indices=2)
    with pytest.raises(ValueError, match="low >= high") as raised:
        env.reset_envs([1, 2], [0, 0])
    assert sys.version_info < (3, 11) or raised.value.__notes__[0].startswith("This was raised by `reset` of environment 2.")
    env.set_attr("lengths", (2, 6), indices=2)
    assert len(env.reset()["vector"]) == 3


def test_the_weights_travel_once_however_many_workers_there_are(env: Any, monkeypatch: pytest.MonkeyPatch):
    stored: list[Any] = []
    asked: list[Any] = []
    put, ask = ray.put, env._ask

    def noted_put(value: Any) -> Any:
        stored.append(value)
        return put(value)

    def noted_ask(requests: Any) -> Any:
        asked.extend(requests)
        return ask(requests)

    monkeypatch.setattr(ray, "put", noted_put)
    monkeypatch.setattr(env, "_ask", noted_ask)
    model = make(env)
    for n_rollouts in (1, 2):
        model.learn(N_STEPS * 4, reset_num_timesteps=False)
        assert [value[1].keys() for value in stored] == [weights(model).keys()] * n_rollouts
    arguments = [args for _, method, *args in asked if method == "collect"]
    assert [len({args[0] for args in arguments[first : first + 2]}) for first in (0, 2)] == [1, 1]
    assert not [each for args in arguments for each in args if isinstance(each, (dict, tuple))]


def test_another_model_may_act_in_the_same_environments(env: Any):
    make(env).learn(N_STEPS * 4)
    second, seen = make(env, policy_kwargs=dict(net_arch=[5, 3])), Observer()
    before = weights(second)
    second.learn(N_STEPS * 4, callback=seen)
    second.policy.load_state_dict(before)
    row = seen.rows[-1]
    expected = second.policy.evaluate_actions(row["obs_tensor"], th.as_tensor(row["actions"]))[0]
    th.testing.assert_close(row["log_probs"], expected.detach(), atol=1e-5, rtol=1e-5)


MODULE = """
import gymnasium as gym

def make():
    return gym.make("CartPole-v1")
"""


def test_workers_find_the_modules_that_the_script_finds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "found_by_the_script.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    env = RayVecEnv([importlib.import_module("found_by_the_script").make], n_workers=1)
    assert len(env.reset()) == 1
    env.close()


def collected(worker: RolloutWorker, n_envs: int, n_steps: int, ledger: Ledger | None = None) -> Any:
    """:return: A rollout of CartPole by one worker, with a new ledger or with this one"""
    model = make(make_vec_env("CartPole-v1", n_envs=n_envs), n_steps=n_steps)
    ledger = ledger or model.ledger
    obs, _ = worker.reset([start.seed for start in ledger.begin_all([0] * n_envs)], [{}] * n_envs)
    recipe = cloudpickle.dumps(model._policy_recipe())
    assert len(recipe) < 20_000
    state = {name: tensor.numpy() for name, tensor in model.policy.state_dict().items()}
    states = np.zeros((n_envs, 0), np.float32)  # of a policy without memory
    return worker.collect((recipe, state), obs, states, ledger, True, 0, n_steps, -1, False, 0)


def built(n_envs: int, env_fn: Any = None, first_env: int = 0) -> RolloutWorker:
    worker = RolloutWorker(first_env)
    worker.build([cloudpickle.dumps(env_fn or partial(gym.make, "CartPole-v1"))] * n_envs, VERSION)
    return worker


def test_a_rollout_travels_in_little_more_than_its_own_bytes():
    rollout = collected(built(8), 8, 128)
    *columns, _ = rollout[0]  # without the infos
    transitions = sum(array.nbytes for each in columns for array in observation_parts(each).values())
    assert len(cloudpickle.dumps(rollout)) < 1.2 * transitions


def test_the_starts_of_a_new_run_are_not_compared_with_those_of_the_last():
    worker = built(2)
    for seed in range(3):
        ledger = Ledger(1000, seed)  # all starts of a run belong to its first group
        steps, _, mismatches, _ = collected(worker, 2, 64, ledger)
        assert mismatches == 0 and (steps.position[0] == 0).all() and ledger.position.members.max() > 1


# --- bad input --------------------------------------------------------------------------------------------------------


class TurnsToNaN(gym.Wrapper):
    def step(self, action: Any) -> Any:
        observation, *others = self.env.step(action)
        return np.full_like(observation, np.nan), *others


def test_a_worker_blames_the_environment_and_not_the_policy():
    worker = built(2, lambda: TurnsToNaN(gym.make("CartPole-v1")), first_env=2)
    with pytest.raises(ValueError, match="Environment 2 returned a non-finite observation in step 1 of its episode"):
        collected(worker, 2, 16)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(n_workers=5), "`n_workers` is 5, and there are 4 environments: pass 1 to 4."),
        (dict(n_workers=0), "`n_workers` must be an integer of at least 1, not 0."),
        (dict(timeout=0), "`timeout` must be a positive number, not 0."),
        (dict(max_replay=None), "`max_replay` must be an integer of at least 0, not None."),
        (dict(env_fns=[]), "`env_fns` is empty: pass a function for each environment."),
    ],
)
def test_an_argument_that_is_out_of_range_is_refused(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        RayVecEnv(**{"env_fns": [Walk] * 4, **kwargs})


def test_an_environment_that_cannot_be_sent_is_named():
    lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"Environment 1 cannot be sent to a worker.*cannot pickle.*lock"):
        RayVecEnv([Walk, lambda: lock and Walk()], n_workers=1)


OTHER_VERSION = rf"Node [\d.]+ has sb3-grpo {VERSION}, and the model learns with 9.9: install the same"


def test_a_worker_with_another_version_is_refused():
    with pytest.raises(ValueError, match=OTHER_VERSION):
        RolloutWorker(0).build([], "9.9")


@pytest.mark.slow
def test_workers_are_told_the_version_of_the_learner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vec_env, "VERSION", "9.9")  # the workers have their own
    with pytest.raises(ValueError, match=OTHER_VERSION):
        RayVecEnv([Walk], n_workers=1)
