"""
The choice of starts: which groups begin where an earlier group began, because its members ended differently.

A group whose members all fail, or all succeed, says nothing about which actions are better. With rare rewards and a new start
at each reset, that is nearly every group. A start at which some members succeed and others fail can be learned from, and is
repeated until all of them succeed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

#: Number of fresh groups over which the share of ties is taken.
RECENT_GROUPS = 40
#: Number of returns with which those of a group are compared.
RECENT_RETURNS = 200
#: A group is tied if the variance of its returns is at most this share of the variance of recent returns.
TIED_BELOW = 0.02
#: Rewards are rare if at least this share of fresh groups has failed.
RARE_FROM = 0.1
#: Weight of the last group in the score of a start.
SMOOTHING = 0.5
#: Number of starts that the pool keeps, those with the highest scores.
MAX_POOL = 512


class EndedGroup(NamedTuple):
    """A group all of whose members have ended; it is fresh if its start was not chosen from the pool."""

    number: int
    seed: int
    is_fresh: bool
    returns: Sequence[float]


class PooledStart(NamedTuple):
    """
    A start that may be repeated, and the number of the rollout in which its first group ended.

    The score is the variance of the returns of a group, smoothed over the groups that had this start. For returns of 0 and 1
    it is ``p (1 - p)``, where ``p`` is the rate of success (learnability, https://arxiv.org/abs/2408.15099).
    """

    score: float
    since: int


class StartChoice:
    """
    Keeps a pool of starts at which the members of a group ended differently, and chooses those that are repeated.

    Starts are repeated while rewards are rare: while at least a tenth of the last :data:`RECENT_GROUPS` fresh groups have
    failed, which means that all members have exactly the same return, below the mean of recent ones. With dense rewards that
    does not happen, and nothing is repeated. A new group then repeats a start with the probability ``share`` times the share
    of ties. Starts are taken from the pool in proportion to their scores. A start leaves the pool when its group is tied
    above the mean of recent returns: all members succeed. Where all fail, its score fades.

    The pool changes only between rollouts, and there is no random state. Workers that have a copy choose as one ledger would.

    :param share: Largest probability with which a new group repeats a start, from 0 to 1. At 0 nothing is repeated
    """

    def __init__(self, share: float):
        self.share = share
        #: Starts that may be repeated, by seed.
        self.pool: dict[int, PooledStart] = {}
        #: What the log says about the last rollout.
        self.metrics: dict[str, float] = {}
        self._rollout = 0
        self._ties: deque[bool] = deque(maxlen=RECENT_GROUPS)
        self._failures: deque[bool] = deque(maxlen=RECENT_GROUPS)
        self._returns: deque[float] = deque(maxlen=RECENT_RETURNS)
        # The pool as it was after the last rollout: seeds, and sums of their weights
        self._seeds: list[int] = []
        self._cumulative = np.zeros(0)

    @property
    def tied_share(self) -> float:
        """Share of ties among the last :data:`RECENT_GROUPS` fresh groups. Groups to come do not count as tied."""
        return sum(self._ties) / RECENT_GROUPS

    @property
    def probability(self) -> float:
        """Probability with which a new group repeats a start."""
        are_rare = sum(self._failures) >= RARE_FROM * RECENT_GROUPS
        return self.share * self.tied_share if self._seeds and are_rare else 0.0

    def draw(self, uniform: Sequence[float] | np.ndarray) -> int | None:
        """:return: Seed of a start to repeat, from two random numbers from 0 to below 1; ``None`` for a fresh start"""
        if uniform[0] >= self.probability:
            return None
        index = np.searchsorted(self._cumulative, uniform[1] * self._cumulative[-1], side="right")
        return self._seeds[int(index)]

    def record(self, groups: Iterable[EndedGroup]) -> None:
        """Learn from the groups that have ended in a rollout, in the order in which they ended."""
        groups = list(groups)
        self._rollout += 1
        repeated = [self.pool[group.seed] for group in groups if not group.is_fresh and group.seed in self.pool]
        self._update_pool(groups)
        self.metrics = {"rollout/fresh_groups_tied": self.tied_share, "rollout/pool_size": float(len(self.pool))}
        if groups:
            self.metrics["rollout/groups_repeated"] = sum(not group.is_fresh for group in groups) / len(groups)
        if repeated:
            self.metrics["rollout/repeats_score"] = float(np.mean([start.score for start in repeated]))
            self.metrics["rollout/repeats_age"] = float(np.mean([self._rollout - start.since for start in repeated]))

    def _update_pool(self, groups: Sequence[EndedGroup]) -> None:
        for group in groups:
            self._returns.extend(group.returns)
        mean, variance = (np.mean(self._returns), np.var(self._returns)) if self._returns else (0.0, 0.0)
        for group in groups:
            is_tied = bool(np.var(group.returns) <= TIED_BELOW * variance)
            if group.is_fresh:
                self._ties.append(is_tied)
                self._failures.append(bool(len(set(group.returns)) == 1 and group.returns[0] < mean))
            self._judge(group, is_tied, bool(is_tied and np.mean(group.returns) > mean))
        if len(self.pool) > MAX_POOL:
            best = sorted(self.pool, key=lambda seed: self.pool[seed].score, reverse=True)[:MAX_POOL]
            self.pool = {seed: self.pool[seed] for seed in best}
        self._seeds, self._cumulative = list(self.pool), np.cumsum(self._weights())

    def _judge(self, group: EndedGroup, is_tied: bool, succeeds: bool) -> None:
        """Take the start of a group into the pool, change its score, or remove it if its members are tied and succeed."""
        known, score = self.pool.get(group.seed), float(np.var(group.returns))
        if succeeds:
            self.pool.pop(group.seed, None)
        elif known is not None:
            self.pool[group.seed] = known._replace(score=known.score + SMOOTHING * (score - known.score))
        elif group.is_fresh and not is_tied:
            self.pool[group.seed] = PooledStart(score, self._rollout)

    def _weights(self) -> np.ndarray:
        """:return: For each start of the pool, a number in proportion to which it is chosen"""
        return np.array([start.score for start in self.pool.values()])
