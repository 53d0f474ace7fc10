"""A finite set of scenarios: which one an episode begins with, and that groups find those that are worth training on."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import make_model
from stable_baselines3.common.callbacks import BaseCallback
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


class Counts(BaseCallback):
    """Counts how often each scenario has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(10)

    def _on_step(self) -> bool:
        for env in np.flatnonzero(self.locals["dones"]).tolist():
            self.counts[self.training_env.reset_infos[env]["scenario"]] += 1
        return True


@pytest.mark.parametrize(("repeat_starts", "is_more"), [(0.0, False), (1.0, True)])
def test_training_spends_more_episodes_on_scenarios_whose_outcome_is_open(repeat_starts: float, is_more: bool):
    """In eight of ten scenarios no action is right."""
    scenarios = [0, 1, *[5] * 8]
    env = DummyVecEnv([lambda: Monitor(Scenarios(Guess(), scenarios, option="right"))] * 2)
    counts = Counts()
    make_model(env, n_steps=64, learning_rate=1e-5, repeat_starts=repeat_starts).learn(64 * 2 * 8, callback=counts)
    assert (counts.counts[:2].sum() > 1.5 * 0.2 * counts.counts.sum()) == is_more


def test_an_evaluation_plays_each_held_out_scenario_once():
    model = make_model(DummyVecEnv([lambda: Monitor(Scenarios(Guess(), [0, 1], option="right"))] * 2))
    held_out = Monitor(Scenarios(Guess(), [0, 5, 5, 5], option="right"))
    returns, _ = evaluate_policy(model, held_out, n_eval_episodes=4, return_episode_rewards=True)
    assert returns[1:] == [0, 0, 0]
