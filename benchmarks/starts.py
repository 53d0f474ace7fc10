"""
Other rules by which starts could be repeated, as controls of the rule of the package; and the figure of a training.

    python -m benchmarks.starts    # trains twice in DoorKey-6x6, some minutes, and draws docs/starts.svg

`matrix.yml` names the callbacks with the other rules.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import matplotlib
import numpy as np
import torch as th
from minigrid.wrappers import ImgObsWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.curves import TrainingCurve
from sb3_grpo import GRPO
from sb3_grpo.starts.choice import EndedGroup, PooledStart, StartChoice

#: Of prioritized level replay (https://arxiv.org/abs/2010.03934): temperature of the ranks, and weight of the staleness.
TEMPERATURE, STALENESS = 0.1, 0.1


class AnyStart(StartChoice):
    """Repeats all starts that were seen, each with the same probability. Nothing depends on how its groups ended."""

    def _judge(self, group: EndedGroup, is_tied: bool, succeeds: bool) -> None:
        if group.is_fresh:
            self.pool[group.seed] = PooledStart(1.0, self._rollout)


class ByAdvantage(StartChoice):
    """
    Prioritized level replay with the mean absolute advantage of a start's last group as the score. Departures from the
    paper: the share of repeats is that of :class:`StartChoice`, and advantages are standardised in each rollout.

    :param share: See :class:`StartChoice`
    :param buffer: Buffer of the run, the kernel buffer
    """

    def __init__(self, share: float, buffer: Any):
        super().__init__(share)
        self._buffer = buffer
        self._sums: dict[int, np.ndarray] = {}  # of absolute advantages and of transitions, by group
        self._last: dict[int, int] = {}  # number of the rollout in which a group with this start ended last

    def _update_pool(self, groups: Sequence[EndedGroup]) -> None:
        absolute = np.abs(self._buffer.update.advantages.numpy())
        numbers, labels = np.unique(self._buffer.groups.ravel(), return_inverse=True)
        sums = np.stack([np.bincount(labels, absolute), np.bincount(labels)], axis=1)
        for number, own in zip(numbers.tolist(), sums, strict=True):
            self._sums[number] = self._sums.get(number, 0.0) + own
        super()._update_pool(groups)

    def _judge(self, group: EndedGroup, is_tied: bool, succeeds: bool) -> None:
        known = self.pool.get(group.seed, PooledStart(0.0, self._rollout))
        absolute, number = self._sums.pop(group.number)
        self.pool[group.seed] = known._replace(score=absolute / number)
        self._last[group.seed] = self._rollout

    def _weights(self) -> np.ndarray:
        scores = np.array([start.score for start in self.pool.values()])
        ranks = 1 + np.argsort(np.argsort(-scores))
        by_score = ranks ** (-1 / TEMPERATURE)
        stale = np.array([self._rollout - self._last[seed] for seed in self.pool], dtype=float)
        by_staleness = stale / stale.sum() if stale.sum() > 0 else np.full(len(stale), 1 / max(len(stale), 1))
        return (1 - STALENESS) * by_score / max(by_score.sum(), 1e-300) + STALENESS * by_staleness


class Repeats(BaseCallback):
    """Base of the callbacks that replace the rule of the package."""

    rule: ClassVar[Any]

    def _on_training_start(self) -> None:
        model: Any = self.model
        model.ledger.choice = self.rule(model.repeat_starts, *self._arguments(model))

    def _arguments(self, model: Any) -> tuple[Any, ...]:
        return ()

    def _on_step(self) -> bool:
        return True


class RepeatsAnyStart(Repeats):
    """Repeats starts by :class:`AnyStart`."""

    rule = AnyStart


class RepeatsByAdvantage(Repeats):
    """Repeats starts by :class:`ByAdvantage`."""

    rule = ByAdvantage

    def _arguments(self, model: Any) -> tuple[Any, ...]:
        return (model.rollout_buffer,)


# --- the figure -------------------------------------------------------------------------------------------------------

#: The training of the figure
ENV, TIMESTEPS, SEED = "MiniGrid-DoorKey-6x6-v0", 100_000, 1


class PoolHistory(BaseCallback):
    """Notes after each rollout which starts are in the pool."""

    def __init__(self) -> None:
        super().__init__()
        #: First and last step at which each start was in the pool, by seed
        self.stays: dict[int, tuple[int, int]] = {}

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for seed in self.model.ledger.choice.pool:  # type: ignore[attr-defined]
            self.stays[seed] = self.stays.get(seed, (self.num_timesteps, 0))[0], self.num_timesteps


def flat_view(env: gym.Env) -> gym.Env:
    """:return: The environment with the view as a vector, without the mission, which is always the same"""
    return gym.wrappers.FlattenObservation(ImgObsWrapper(env))


def train(repeat_starts: float) -> tuple[TrainingCurve, PoolHistory]:
    """:return: Returns in episodes with fresh starts, and what was in the pool"""
    curve, history = TrainingCurve(), PoolHistory()
    env = make_vec_env(ENV, 8, seed=SEED, wrapper_class=flat_view)
    model = GRPO("MlpPolicy", env, ent_coef=0.01, repeat_starts=repeat_starts, seed=SEED, device="cpu")
    model.learn(TIMESTEPS, callback=[curve, history])
    env.close()
    return curve, history


def draw() -> None:
    """Train with repeats and without, and draw the figure of the page about rare rewards."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.figures import STYLE, save

    at = np.linspace(0, TIMESTEPS, 101)[1:]
    with plt.style.context(STYLE):
        figure, (left, right) = plt.subplots(1, 2)
        for share, label in ((0.5, "half of the groups"), (0.0, "none")):
            curve, history = train(share)
            left.plot(at / 1000, curve.smoothed(at), label=label)
            if share > 0:
                for number, (first, last) in enumerate(sorted(history.stays.values())):
                    right.plot([first / 1000, (last + 1024) / 1000], [number, number], color="C0", lw=1)
        left.set_title("return, fresh starts")
        left.legend(title="may repeat", loc="upper left")
        right.set_title("starts in the pool")
        figure.supxlabel("thousand environment steps")
        save(figure, STYLE.with_name("starts.svg"))


if __name__ == "__main__":
    th.set_num_threads(1)
    draw()
