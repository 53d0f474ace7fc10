"""The T-maze: what was seen at the start decides at the end of a corridor where to turn."""

from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv

FORWARD, LEFT, RIGHT = range(3)


class TMazeEnv(InputDrivenEnv):
    """
    Walk through a corridor and turn at its end to the side that a sign at the start has shown.

    **Input**: the side, left or right.
    **Action**: forward, left or right. In the corridor a turn ends the episode, and so does going forward at its end. The
    action masks allow only what does not.
    **Observation**: the sign, -1 or 1 in the first step and 0 later, and whether the corridor has ended.
    **Reward**: 1 for the turn to the side of the sign, else 0.

    It is the task of Bakker 2002, "Reinforcement Learning with Long Short-Term Memory", with walls that end the episode. A
    policy without memory has a mean return of 0.5 at best. Random actions get to the end of a corridor of 10 steps in one of
    59,049 episodes, and with the masks always.

    :param length: Number of steps through the corridor
    """

    def __init__(self, length: int = 10):
        self.length = length
        self._max_episode_steps = length + 1
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"side": rng.integers(LEFT, RIGHT + 1, size=1)}

    def _begin(self) -> None:
        pass

    def action_masks(self) -> np.ndarray:
        """:return: Whether going forward, left and right is possible"""
        at_end = self.n_steps_taken == self.length
        return np.array([not at_end, at_end, at_end])

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        goes_on = self.n_steps_taken < self.length and action == FORWARD
        reward = float(self.n_steps_taken == self.length and action == self.inputs["side"][0])
        self.n_steps_taken += 1
        return self._observe(), reward, not goes_on, False, {}

    def _observe(self) -> np.ndarray:
        sign = 2 * self.inputs["side"][0] - 3 if self.n_steps_taken == 0 else 0
        return np.array([sign, self.n_steps_taken >= self.length], dtype=np.float32)
