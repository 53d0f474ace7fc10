"""Environments of others, with toys in their place: the packages need not be installed."""

import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from benchmarks import foreign
from benchmarks.results import read_rows


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
        ("execution", "grpo_pairs"): [0.008, 0.012],
        ("execution", "grpo_alone"): [0.01, 0.011, 0.012],
        ("portfolio", "grpo"): [-1234.0, 5.0],
        ("portfolio", "grpo_alone"): [1.0, 2.0],
        ("reservoir", "grpo"): [1.0, 2.0],  # nothing to compare it with
    }
    rows = [
        {"env": env, "arm": arm, "auc": str(score), "eval_mean": str(-score)}
        for (env, arm), values in scores.items()
        for score in values
    ]
    assert foreign.table(rows).splitlines()[2:] == [
        "| `portfolio` | -614 |  | 1.50 | 614 |  | -1.50 | 2 |",
        "| `execution` | 0.0200, ahead | 0.0100 | 0.0110 | -0.0200, behind | -0.0100 | -0.0110 | 3 |",
    ]
    assert foreign.table([]) == foreign.NO_ROWS
