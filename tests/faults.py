"""An environment that fails on purpose: what, where and when is chosen."""

import os
import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Fault = Literal[
    "none", "raises", "raises in reset", "hangs", "dies", "nan observation", "nan first observation", "nan final observation",
    "infinite reward", "fewer numbers", "a single number", "fewer numbers in reset", "ignores seeds",
]  # fmt: skip

EPISODE = 10


class FaultyEnv(gym.Env):
    """
    Walks at random on the line for ten steps; until something happens.

    :param fault: what happens
    :param at_step: in which step since the environment was made, from 0 on; resets fail from then on
    """

    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: Fault = "none", at_step: int = 0):
        self.fault = fault
        self.at_step = at_step
        self.steps = 0
        self.step_of_episode = 0

    @property
    def is_due(self) -> bool:
        return self.steps > self.at_step

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=None if self.fault == "ignores seeds" else seed)
        self.step_of_episode = 0
        self.state = self.np_random.normal(size=3).astype(np.float32)
        if self.is_due and self.fault == "raises in reset":
            raise ZeroDivisionError("no way to begin")
        if self.is_due and self.fault == "nan first observation":
            return np.full(3, np.nan, np.float32), {}
        if self.is_due and self.fault == "fewer numbers in reset":
            return self.state[:1], {}
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.step_of_episode += 1
        self.state = self.state + (0.1 if action else -0.1)
        observation, reward = self.state, float(self.state[0])
        is_last = self.step_of_episode == EPISODE
        if self.is_due:
            if self.fault == "raises":
                raise ZeroDivisionError("no way on")
            if self.fault == "hangs":
                time.sleep(600)
            if self.fault == "dies":
                os._exit(3)
            if self.fault == "nan observation" or (self.fault == "nan final observation" and is_last):
                observation = np.full(3, np.nan, np.float32)
            if self.fault == "infinite reward":
                reward = float("inf")
            if self.fault == "fewer numbers":
                observation = observation[:2]
            if self.fault == "a single number":
                observation = observation[:1]
        return observation, reward, False, is_last, {}
