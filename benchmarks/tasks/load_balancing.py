"""Load balancing on parallel servers."""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv

#: Work that each server does per unit of time
SERVICE_RATES = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05)


class LoadBalancingEnv(InputDrivenEnv):
    """
    Send each arriving job to one of several servers of different speeds, so that few jobs are in the system.

    **Input**: the sizes of the jobs, Pareto distributed, and the exponential gaps between their arrivals.
    **Action**: index of the server. Servers work through their queues in order of arrival.
    **Observation**: for each server the logarithm of one plus its remaining work in mean job sizes; for each server the
    logarithm of one plus its number of jobs; the logarithm of the size of the arriving job over the smallest; the share
    of jobs to come.
    **Reward**: minus the number of jobs in the system, integrated over the time until the next arrival, per server and
    per mean gap. The episode terminates with the last job; its reward includes the time until all servers are idle.

    The system, with its ten rates, Pareto shape 1.5 and scale 100 and mean gap of 55 (a load of 0.91), is the one of
    Mao et al. 2018 (https://arxiv.org/abs/1807.02264, section 6.2) and of Park (https://github.com/park-project/park,
    ``load_balance``). Departures: 256 jobs instead of 1,000; sizes and gaps are not rounded down to integers; numbers
    of jobs and the share of jobs to come are observed too; loads are observed as logarithms; rewards are divided by the
    mean gap and the number of servers.

    :param service_rates: Work that each server does per unit of time
    :param n_jobs: Number of jobs, the steps of an episode
    :param mean_gap: Mean time between two arrivals
    :param size_shape: Shape of the Pareto distribution of job sizes, above 1
    :param size_scale: Smallest job size
    """

    def __init__(
        self,
        service_rates: Sequence[float] = SERVICE_RATES,
        n_jobs: int = 256,
        mean_gap: float = 55.0,
        size_shape: float = 1.5,
        size_scale: float = 100.0,
    ):
        self.service_rates = [float(rate) for rate in service_rates]
        self.n_jobs = self._max_episode_steps = n_jobs
        self.mean_gap = mean_gap
        self.size_shape = size_shape
        self.size_scale = size_scale
        self._mean_size = size_scale * size_shape / (size_shape - 1)
        n_servers = len(self.service_rates)
        self._cost_unit = mean_gap * n_servers
        self.action_space = spaces.Discrete(n_servers)
        # A logarithm above 25 takes a job that is 10^10 times as large as the smallest
        self.observation_space = spaces.Box(0.0, 25.0, (2 * n_servers + 2,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "gaps": rng.exponential(self.mean_gap, self.n_jobs - 1),
            "sizes": self.size_scale * (1 + rng.pareto(self.size_shape, self.n_jobs)),
        }

    def _begin(self) -> None:
        self._gaps = [*self.inputs["gaps"].tolist(), math.inf]
        self._sizes = [*self.inputs["sizes"].tolist(), self.size_scale]
        self._now = 0.0
        self._unfinished: list[tuple[float, int]] = []  # heap of (time when the job is finished, server)
        #: Time at which each server has done all its work, if no more arrives
        self.idle_from = [0.0] * len(self.service_rates)
        #: Number of jobs at each server
        self.n_queued = [0] * len(self.service_rates)

    @property
    def size(self) -> float:
        """Size of the job to be sent now."""
        return self._sizes[self.n_steps_taken]

    def completion_times(self) -> list[float]:
        """:return: For each server how long the arriving job would be in the system"""
        size, now = self.size, self._now
        return [max(idle - now, 0.0) + size / rate for idle, rate in zip(self.idle_from, self.service_rates, strict=True)]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._accept(int(action))
        return self._pass_time()

    def _accept(self, server: int) -> None:
        """Put the arriving job into the queue of a server."""
        finished = max(self.idle_from[server], self._now) + self.size / self.service_rates[server]
        self.idle_from[server] = finished
        self.n_queued[server] += 1
        heapq.heappush(self._unfinished, (finished, server))

    def _pass_time(self, further_cost: float = 0.0) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Go on to the next arrival, and return what ``step`` returns."""
        now = self._now
        until = now + self._gaps[self.n_steps_taken]
        cost = 0.0
        while self._unfinished and self._unfinished[0][0] <= until:
            finished, server = heapq.heappop(self._unfinished)
            cost += finished - now
            self.n_queued[server] -= 1
        if self._unfinished:
            cost += len(self._unfinished) * (until - now)
        self._now = until
        self.n_steps_taken += 1
        return self._observe(), -cost / self._cost_unit - further_cost, self.n_steps_taken == self.n_jobs, False, {}

    def _observe(self) -> np.ndarray:
        now, mean_size = self._now, self._mean_size
        work = [
            math.log1p((idle - now) * rate / mean_size) if idle > now else 0.0
            for idle, rate in zip(self.idle_from, self.service_rates, strict=True)
        ]
        jobs = [math.log1p(n) for n in self.n_queued]
        to_come = 1 - self.n_steps_taken / self.n_jobs
        return np.array([*work, *jobs, math.log(self.size / self.size_scale), to_come], dtype=np.float32)


class FullServersEnv(LoadBalancingEnv):
    """
    :class:`LoadBalancingEnv` whose servers have room for few jobs. A job that is sent to a full server is lost.

    It says which servers have room, for :class:`~sb3_grpo.MaskableGRPO`. If none has, every action is allowed, because the job
    is lost anyway. The number of jobs at each server, and with it which are full, is observed as in the base class.

    **Reward**: that of the base class, minus the cost of a job that is lost.

    :param max_jobs: Largest number of jobs at a server, the one that it works on included
    :param loss: Cost of a lost job, in the unit of the reward: with 10 servers, that of a job that stays for ``10 loss`` mean
        gaps
    :param kwargs: Arguments of the base class
    """

    def __init__(self, max_jobs: int = 4, loss: float = 10.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_jobs = max_jobs
        self.loss = loss
        #: Number of jobs that were lost
        self.n_lost = 0

    def _begin(self) -> None:
        super()._begin()
        self.n_lost = 0

    def action_masks(self) -> np.ndarray:
        """:return: Which servers have room, shape ``(n_servers,)``; all of them if none has"""
        has_room = np.array(self.n_queued) < self.max_jobs
        return has_room if has_room.any() else np.ones_like(has_room)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.n_queued[int(action)] < self.max_jobs:
            self._accept(int(action))
            return self._pass_time(0.0)
        self.n_lost += 1
        return self._pass_time(self.loss)
