"""Timing on a machine that does other things as well: in turns, as ratios, by medians."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def take_turns(
    contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, np.ndarray]:
    """
    :param contestants: Functions to time, by name
    :param rounds: Turns of each
    :param clock: Tells the time in seconds. For work within this thread, ``time.thread_time`` does not count the turns that
        other processes take on the same core
    :return: Seconds of each turn, shape ``(rounds,)``
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(-1, rounds):  # the first warms up
        names = list(contestants)
        for name in names if round_ % 2 == 0 else reversed(names):
            began = clock()
            contestants[name]()
            if round_ >= 0:
                seconds[name].append(clock() - began)
    return {name: np.array(turns) for name, turns in seconds.items()}


class Stopwatch:
    """
    Seconds that parts of a run take.

    :param clock: Tells the time in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def around(self, part: str, owner: Any, method: str) -> Iterator[None]:
        """
        :param part: Name under which calls are counted
        :param owner: Object whose method is timed
        :param method: Name of the method
        """
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += self.clock() - began

        setattr(owner, method, timed)
        try:
            yield
        finally:
            delattr(owner, method)
