"""
Timing on a machine that does other things as well: in turns, as ratios, by medians.

Nothing here imports the package, so that a process can still choose from which folder it does.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np


def take_turns(
    contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] | None = None
) -> dict[str, np.ndarray]:
    """
    :param contestants: what to time, by name
    :param rounds: turns of each
    :param clock: tells the time in seconds, ``None`` for ``time.perf_counter``. For what runs in this thread alone,
        ``time.thread_time`` does not count the turns that other processes take on the same core
    :return: seconds of each turn, shape ``(rounds,)``
    """
    clock = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(-1, rounds):  # the first warms up
        names = list(contestants)
        for name in names if round_ % 2 == 0 else reversed(names):
            began = clock()
            contestants[name]()
            if round_ >= 0:
                seconds[name].append(clock() - began)
    return {name: np.array(turns) for name, turns in seconds.items()}


class Estimate(NamedTuple):
    """
    :param median: of a sample
    :param low: lower end of a 95% bootstrap interval for it
    :param high: upper end
    """

    median: float
    low: float
    high: float


def median_with_interval(sample: np.ndarray) -> Estimate:
    """
    :param sample: shape ``(n,)``
    :return: its median
    """
    resampled = np.random.default_rng(0).choice(sample, (10_000, len(sample)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(sample)), float(low), float(high))


class Stopwatch:
    """Seconds that parts of a run take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def around(self, part: str, owner: Any, method: str) -> Iterator[None]:
        """
        :param part: name under which calls are counted
        :param owner: object whose method is timed
        :param method: its name
        """
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        setattr(owner, method, timed)
        try:
            yield
        finally:
            delattr(owner, method)
