"""Addition with a reward that is checked at the end, digit by digit or at once: GRPO's origin in miniature."""

from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv


class TokenArithmeticEnv(InputDrivenEnv):
    """
    Write the sum of two numbers, one token at a time. The seed is the prompt, and only a correct answer earns a reward.

    **Input**: the prompt, two numbers of ``n_digits`` digits each.
    **Action**: the next token of the answer, a digit. The answer has ``n_digits + 1`` digits, the highest first.
    **Observation**: the digits of the prompt, then those of the answer so far, each as a one-hot vector of length 10; a
    digit that has not been written yet is a vector of zeros.
    **Reward**: 1 with the last token if the answer is correct, else 0. The episode terminates with the last token.

    It is the setting of DeepSeekMath (Shao et al. 2024, https://arxiv.org/abs/2402.03300) and DeepSeek-R1
    (https://arxiv.org/abs/2501.12948) with a verifiable reward: one prompt, a group of answers, an exact check. With
    one digit there are 100 prompts, and a random answer is correct with probability 0.01. Departures: the policy is no
    language model and starts without any knowledge.

    :param n_digits: Number of digits of each number
    """

    def __init__(self, n_digits: int = 1):
        self.n_digits = n_digits
        self._max_episode_steps = n_digits + 1
        self._n_positions = 3 * n_digits + 1
        self.action_space: spaces.Space[Any] = spaces.Discrete(10)
        self.observation_space = spaces.Box(0.0, 1.0, (10 * self._n_positions,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"prompt": rng.integers(10, size=(2, self.n_digits))}

    def _begin(self) -> None:
        #: Digits of the prompt and of the answer so far
        self.tokens = self.inputs["prompt"].ravel().tolist()
        powers = 10 ** np.arange(self.n_digits - 1, -1, -1)
        total = int((self.inputs["prompt"] @ powers).sum())
        #: Digits of the correct answer
        self.answer = [int(digit) for digit in f"{total:0{self.n_digits + 1}d}"]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.tokens.append(int(action))
        self.n_steps_taken += 1
        correct = self.tokens[2 * self.n_digits :] == self.answer
        return self._observe(), float(correct), self.n_steps_taken == len(self.answer), False, {}

    def _observe(self) -> np.ndarray:
        observation = np.zeros(10 * self._n_positions, dtype=np.float32)
        for position, token in enumerate(self.tokens):
            observation[10 * position + token] = 1
        return observation


class AnswersEnv(TokenArithmeticEnv):
    """
    The same with the whole answer as one action, so that an episode is one step: a contextual bandit. And whoever marks the
    answer has a mood, which no observation shows and no answer changes.

    **Input**: the prompt, and the mood.
    **Action**: all digits of the answer, the highest first.
    **Observation**: the digits of the prompt, each as a one-hot vector of length 10.
    **Reward**: 1 if the answer is correct, else 0, and the mood.

    :param n_digits: Number of digits of each number
    :param mood: Standard deviation of the mood
    """

    def __init__(self, n_digits: int = 1, mood: float = 1.0):
        super().__init__(n_digits)
        self._mood, self._max_episode_steps, self._n_positions = mood, 1, 2 * n_digits
        self.action_space = spaces.MultiDiscrete([10] * (n_digits + 1))
        self.observation_space = spaces.Box(0.0, 1.0, (10 * self._n_positions,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {**super()._draw_inputs(rng), "mood": self._mood * rng.standard_normal(1)}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.n_steps_taken += 1
        is_correct = np.asarray(action).tolist() == self.answer
        return self._observe(), float(is_correct + self.inputs["mood"][0]), True, False, {"is_correct": is_correct}
