"""What the benchmarks keep of a training run: the return of each episode, and when it ended."""

import time
from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

N_EVAL_EPISODES = 20
WINDOW = 20  # episodes over which the training return is averaged


class LearningCurve:
    """
    One entry per training episode, in the order in which they ended.

    :param steps: at which each ended, shape ``(n,)``
    :param returns: of each, shape ``(n,)``
    """

    def __init__(self, steps: Sequence[int] | np.ndarray, returns: Sequence[float] | np.ndarray):
        self.steps = steps
        self.returns = returns

    def windows(self) -> np.ndarray:
        """:return: mean returns of ``WINDOW`` consecutive episodes, one for each episode from the ``WINDOW``-th on"""
        return (
            np.convolve(self.returns, np.ones(WINDOW) / WINDOW, mode="valid") if len(self.returns) >= WINDOW else np.empty(0)
        )

    def first_held(self, threshold: float) -> int | None:
        """
        :param threshold: return
        :return: index of the first episode that ends ``WINDOW`` episodes whose mean return is at least that, ``None`` if there
            is none
        """
        reached = np.flatnonzero(self.windows() >= threshold)
        return int(reached[0]) + WINDOW - 1 if len(reached) else None

    def smoothed(self, at: np.ndarray) -> np.ndarray:
        """
        :param at: steps, shape ``(m,)``
        :return: mean return of the last (up to) 20 episodes that had ended by then, that of the first one before, shape
            ``(m,)``
        """
        totals = np.concatenate([[0.0], np.cumsum(self.returns, dtype=np.float64)])
        ended = np.maximum(np.searchsorted(self.steps, at, side="right"), 1)
        window = np.minimum(ended, WINDOW)
        return (totals[ended] - totals[ended - window]) / window

    def area(self, timesteps: int) -> float:
        """
        :param timesteps: budget of the run
        :return: mean over the budget of the mean return of the last (up to) 20 episodes, sampled at 200 steps evenly apart
        """
        return float(np.mean(self.smoothed(np.linspace(0, timesteps, 201)[1:])))


class TrainingCurve(LearningCurve, BaseCallback):
    """Keeps the return of each training episode, and the step and the second at which it ended."""

    steps: list[int]
    returns: list[float]

    def __init__(self) -> None:
        BaseCallback.__init__(self)
        LearningCurve.__init__(self, [], [])
        self.seconds: list[float] = []
        self._began = 0.0

    def _on_training_start(self) -> None:
        self._began = time.perf_counter()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.steps.append(self.num_timesteps)
                self.returns.append(float(info["episode"]["r"]))
                self.seconds.append(time.perf_counter() - self._began)
        return True
