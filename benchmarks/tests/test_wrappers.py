"""Environments in other units."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.wrappers import Rescaled
from sb3_grpo import GRPO


def test_observations_are_shifted_and_scaled_and_rewards_are_multiplied() -> None:
    plain, other = gym.make("Pendulum-v1"), Rescaled(gym.make("Pendulum-v1"), reward=-3.0, scale=10.0, shift=2.0)
    for env in (plain, other):
        env.reset(seed=0)
    expected, reward, *_ = plain.step(np.array([0.5], dtype=np.float32))
    found, other_reward, *_ = other.step(np.array([0.5], dtype=np.float32))
    np.testing.assert_allclose(found, 10.0 * (expected + 2.0), rtol=1e-6)
    assert other_reward == pytest.approx(-3.0 * float(reward))
    assert other.observation_space.contains(found) and other.observation_space.contains(other.reset(seed=1)[0])


@pytest.mark.parametrize(("algorithm", "is_same"), [(GRPO, True), (PPO, False)], ids=["GRPO", "PPO"])
def test_what_grpo_learns_does_not_depend_on_the_unit_of_rewards_and_what_ppo_learns_does(
    algorithm: Any, is_same: bool
) -> None:
    actions = []
    for reward in (1.0, 1024.0):
        env = make_vec_env("Pendulum-v1", 2, seed=0, wrapper_class=partial(Rescaled, reward=reward))
        model = algorithm("MlpPolicy", env, n_steps=64, batch_size=64, seed=0, device="cpu").learn(512)
        observations = np.random.default_rng(0).uniform(-1.0, 1.0, (20, 3)).astype(np.float32)
        actions.append(model.predict(observations, deterministic=True)[0])
    assert np.allclose(actions[0], actions[1], rtol=1e-2, atol=1e-4) == is_same
