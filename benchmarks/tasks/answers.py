"""DeepSeek's setting in miniature: a prompt, an answer, a verdict."""

from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv


class AnswersEnv(InputDrivenEnv):
    """
    Add two digits. The seed is the prompt, and the whole answer is one action, so that an episode is one step: a contextual
    bandit. Whoever marks the answer has a mood, which no observation shows and no answer changes.

    **Input**: the prompt, two digits, and the mood.
    **Action**: both digits of the answer, the higher one first.
    **Observation**: the digits of the prompt, each as a one-hot vector of length 10.
    **Reward**: 1 if the answer is correct, else 0, and the mood.

    It is the setting of DeepSeekMath (Shao et al. 2024, https://arxiv.org/abs/2402.03300) with a verifiable reward: one
    prompt, a group of answers, an exact check. There are 100 prompts, and a random answer is correct with probability 0.01.
    Departures: the policy is no language model, and starts without any knowledge.

    :param mood: Standard deviation of the mood
    """

    def __init__(self, mood: float = 1.0):
        self._mood, self._max_episode_steps = mood, 1
        self.action_space: spaces.Space[Any] = spaces.MultiDiscrete([10, 10])
        self.observation_space = spaces.Box(0.0, 1.0, (20,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"prompt": rng.integers(10, size=(2, 1)), "mood": self._mood * rng.standard_normal(1)}

    def _begin(self) -> None:
        #: The correct answer
        self.answer = list(divmod(int(self.inputs["prompt"].sum()), 10))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.n_steps_taken += 1
        is_correct = np.asarray(action).tolist() == self.answer
        return self._observe(), float(is_correct + self.inputs["mood"][0]), True, False, {"is_correct": is_correct}

    def _observe(self) -> np.ndarray:
        return np.eye(10, dtype=np.float32)[self.inputs["prompt"][:, 0]].ravel()
