"""An environment in other units, for the question whether learning depends on them."""

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Rescaled(gym.Wrapper):
    """
    Multiply rewards by a factor, and give observations in other units: ``x' = scale * (x + shift)``.

    :param env: Environment with vectors as observations
    :param reward: Factor of rewards
    :param scale: Factor of observations
    :param shift: Number that is added to observations before
    """

    def __init__(self, env: gym.Env, reward: float = 1.0, scale: float = 1.0, shift: float = 0.0):
        super().__init__(env)
        self.factor, self.scale, self.shift = reward, scale, shift
        shape = env.observation_space.shape
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._rescaled(observation), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._rescaled(observation), self.factor * float(reward), terminated, truncated, info

    def _rescaled(self, observation: np.ndarray) -> np.ndarray:
        return (self.scale * (observation.astype(np.float64) + self.shift)).astype(np.float32)
