"""Environments of others, with toys in their place: the packages need not be installed. EnvPool's, where it is."""

import importlib.util
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from benchmarks import foreign
from benchmarks.pool import EnvPoolVecEnv
from benchmarks.results import read_rows
from benchmarks.tables import NO_ROWS
from sb3_grpo import GRPO

needs_envpool = pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed")


class RepeatsItsScenario(gym.Env[np.ndarray, Any]):
    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.scenario = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.t, self.scenario = 0, self.scenario if seed is None else seed
        return np.array([self.scenario % 1000], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.t], np.float32), float(action), False, self.t == 10, {}


def test_a_reset_without_a_seed_does_not_repeat_the_last_scenario() -> None:
    env, other = (foreign.FreshSeeds(RepeatsItsScenario()) for _ in range(2))
    scenarios = [env.reset(seed=seed)[0].item() for seed in (3, None, None)]
    assert len(set(scenarios)) == 3
    assert [other.reset(seed=seed)[0].item() for seed in (3, None, None)] == scenarios


def test_actions_between_minus_one_and_one_cover_a_dict_of_actions() -> None:
    env: Any = RepeatsItsScenario()
    parts = {"bounded": spaces.Box(2, 4, (2,)), "free": spaces.Box(0, np.inf, ()), "choice": spaces.Discrete(3, start=1)}
    env.action_space = spaces.Dict(parts)
    flat = foreign.FlatBox(env, bounds=(0.0, 10.0))
    assert flat.action_space == spaces.Box(-1.0, 1.0, (4,), np.float32)
    names = list(env.action_space.spaces)
    for value, bounded, free, choice in ((-1.0, 2.0, 0.0, 1), (0.0, 3.0, 5.0, 2), (1.0, 4.0, 10.0, 3)):
        action = flat.action(np.full(4, value))
        assert list(action) == names and action["choice"] == choice and action["free"] == free
        np.testing.assert_array_equal(action["bounded"], [bounded, bounded])


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> gym.Env[Any, Any]:
        raise ImportError("No module named 'somewhere'")

    monkeypatch.setitem(foreign.REGISTRY, "somewhere", foreign.Foreign("somewhere-gym", make))
    with pytest.raises(SystemExit, match=r"not installed \(No module named 'somewhere'\): pip install somewhere-gym"):
        foreign.made("somewhere")


@pytest.mark.parametrize("arm", foreign.ARMS)
def test_a_run_leaves_one_row_and_is_not_repeated(
    arm: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foreign, "ROWS", tmp_path / "foreign.csv")
    make = lambda: foreign.flat(foreign.FreshSeeds(RepeatsItsScenario()))  # noqa: E731
    monkeypatch.setitem(foreign.REGISTRY, "toy", foreign.Foreign("gymnasium", make))
    for _ in range(2):
        foreign.run("toy", arm, seed=0, timesteps=2048)
    [row] = read_rows(foreign.ROWS)
    assert (row["arm"], row["env"], row["seed"]) == (arm, "toy", "0") and 0.0 <= float(row["eval_mean"]) <= 10.0
    assert float(row["auc"]) == pytest.approx(5.0, abs=1.0) and (row["correlation"] != "") is (arm == "grpo")
    assert "There is a row of" in capsys.readouterr().out


def test_the_table_says_where_groups_are_ahead() -> None:
    scores = {
        ("execution", "grpo"): [0.02, 0.021, 0.019],
        ("execution", "ppo"): [0.008, 0.012],
        ("execution", "grpo_alone"): [0.01, 0.011, 0.012],
        ("portfolio", "grpo"): [-1234.0, 5.0],
        ("portfolio", "grpo_alone"): [1.0, 2.0],
        ("reservoir", "grpo"): [1.0, 3.0],  # nothing to compare it with
    }
    rows = [
        {"env": env, "arm": arm, "auc": str(score), "eval_mean": str(-score)}
        for (env, arm), values in scores.items()
        for score in values
    ]
    assert foreign.table(rows).splitlines()[2:] == [
        "| `reservoir` | 2.00 |  |  | -2.00 |  |  | 2 |",
        "| `portfolio` | -614 | 1.50 |  | 614 | -1.50 |  | 2 |",
        "| `execution` | 0.0200, ahead | 0.0110 | 0.0100 | -0.0200, behind | -0.0110 | -0.0100 | 2 to 3 |",
    ]
    assert foreign.table([]) == NO_ROWS


# -- EnvPool ----------------------------------------------------------------------------------------------------------


@needs_envpool
def test_an_episode_ends_and_the_next_begins_in_the_same_step() -> None:
    env = EnvPoolVecEnv("Hopper-v5", 3, seed=0)
    env.reset()
    rng, last, lengths, n_steps = np.random.default_rng(0), None, [], np.zeros(3, int)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (3, 3)).astype(np.float32)
        obs, rewards, dones, infos = env.step(actions)
        assert isinstance(obs, np.ndarray)
        n_steps += 1
        assert (rewards != 0).all()  # a step that only resets would have none
        for i in np.flatnonzero(dones).tolist():
            assert not infos[i]["TimeLimit.truncated"]  # it fell
            assert np.abs(infos[i]["terminal_observation"] - obs[i]).max() > 0.01
            assert obs[i][0] == pytest.approx(1.25, abs=0.01)  # the height at which Hopper begins
            lengths.append(n_steps[i])
            n_steps[i] = 0
        last = obs
    env.close()
    assert last is not None and len(lengths) >= 9
    assert np.std(lengths) > 0


@needs_envpool
def test_a_time_limit_is_a_truncation() -> None:
    env = EnvPoolVecEnv("HalfCheetah-v5", 2, seed=0, max_episode_steps=5)
    env.reset()
    for step in range(1, 11):
        _, _, dones, infos = env.step(np.zeros((2, 6), np.float32))
        assert dones.tolist() == [step % 5 == 0] * 2
        assert [info.get("TimeLimit.truncated", False) for info in infos] == dones.tolist()
    env.close()


@needs_envpool
def test_grpo_trains_with_it() -> None:
    env = EnvPoolVecEnv("InvertedPendulum-v5", 4, seed=0)
    with pytest.warns(UserWarning, match="cannot reset single environments with a seed"):
        model = GRPO("MlpPolicy", env, n_steps=32, seed=0).learn(256)
    assert model.num_timesteps == 256
    env.close()
