"""
Other rules by which starts could be repeated, as controls of the rule of the package. `matrix.yml` names the callbacks.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

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
