"""A finite set of scenarios: which one an episode begins with."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import make_model
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import Scenarios
from sb3_grpo.starts import Ledger


class Guess(gym.Env):
    """One step, with a reward of 1 for the action that the scenario names. The observation is the scenario."""

    observation_space = spaces.Box(-1.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.right = (options or {}).get("right", 0)
        return np.array([self.right], np.float32), {"mine": self.right}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.array([self.right], np.float32), float(action == self.right), True, False, {}


def numbers(env: gym.Env, seeds: list[int | None]) -> list[int]:
    return [env.reset(seed=seed)[1]["scenario"] for seed in seeds]


def test_a_seed_chooses_the_scenario_and_resets_without_one_go_through_the_list():
    env = Scenarios(Guess(), [5, 6, 7], option="right")
    assert numbers(env, [None, None, None, None]) == [0, 1, 2, 0]
    assert numbers(env, [0, 1, 5, 10**9]) == [0, 1, 2, 1]
    assert numbers(env, [4, None, None]) == [1, 2, 0]
    observation, info = env.reset(seed=1)
    assert observation == [6] and info == {"mine": 6, "scenario": 1}
    assert env.reset(seed=1, options={"right": 9})[1]["mine"] == 9


def test_the_seeds_of_groups_choose_all_scenarios_alike():
    ledger, n_scenarios = Ledger(2, seed=0), 20
    counts = np.bincount([ledger.seed_of(group) % n_scenarios for group in range(10_000)])
    assert len(counts) == n_scenarios and (abs(counts - 500) < 100).all()


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="`scenarios` is empty"):
        Scenarios(Guess(), [])


def test_an_evaluation_plays_each_held_out_scenario_once():
    model = make_model(DummyVecEnv([lambda: Monitor(Scenarios(Guess(), [0, 1], option="right"))] * 2))
    held_out = Monitor(Scenarios(Guess(), [0, 5, 5, 5], option="right"))
    returns, _ = evaluate_policy(model, held_out, n_eval_episodes=4, return_episode_rewards=True)
    assert returns[1:] == [0, 0, 0]
