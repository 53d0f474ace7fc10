"""A criss-cross network of queues."""

from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv

#: Events: arrivals of classes 1 and 3, and completions at the two servers if they have work
ARRIVAL_1, ARRIVAL_3, COMPLETION_1, COMPLETION_2 = range(4)

#: Rates of these events per unit of time
RATES = (0.9, 0.9, 2.0, 1.0)


class QueueingEnv(InputDrivenEnv):
    """
    Decide which of two classes of jobs a server works on, in a network of two servers and three classes.

    This task is held out: no default setting was chosen on it.

    Jobs of class 1 pass server 1, then server 2 as class 2, and leave; jobs of class 3 pass server 1 and leave.

    **Input**: the sequence of events (arrivals of both kinds, completions at both servers) of the uniformised chain. A
    completion at a server without work changes nothing.
    **Action**: the class that server 1 works on, 0 for class 1 and 1 for class 3; it takes the other if there is none
    of that class.
    **Observation**: the number of jobs of each class over 10.
    **Reward**: minus the number of jobs in the network after the event, over 10. The episode is cut after ``n_events``.

    The network is that of Harrison and Wein 1989 ("Scheduling networks of queues: heavy traffic analysis of a simple
    open network", Queueing Systems 5), with the rates of its balanced case in heavy traffic (0.9 for both arrivals, 2
    at server 1, 1 at server 2) and a holding cost of 1 for every class, as in Dai and Gluzman 2022
    (https://arxiv.org/abs/2008.01644) and QGym (https://arxiv.org/abs/2410.06170, ``criss_cross_bh``). Departures:
    episodes of 1,000 events that start empty; costs are divided by 10.

    :param n_events: Steps of an episode
    """

    def __init__(self, n_events: int = 1000):
        self.n_events = self._max_episode_steps = n_events
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0.0, n_events / 10, (3,), np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        shares = np.cumsum(RATES) / sum(RATES)
        return {"event": np.searchsorted(shares[:-1], rng.random(self.n_events), side="right")}

    def _begin(self) -> None:
        self._events = self.inputs["event"].tolist()
        #: Number of jobs of classes 1, 2 and 3
        self.n_jobs = [0, 0, 0]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        n_jobs = self.n_jobs
        event = self._events[self.n_steps_taken]
        if event == ARRIVAL_1:
            n_jobs[0] += 1
        elif event == ARRIVAL_3:
            n_jobs[2] += 1
        elif event == COMPLETION_2:
            n_jobs[1] -= n_jobs[1] > 0
        elif n_jobs[0] and (action == 0 or not n_jobs[2]):
            n_jobs[0] -= 1
            n_jobs[1] += 1
        elif n_jobs[2]:
            n_jobs[2] -= 1
        self.n_steps_taken += 1
        return self._observe(), -sum(n_jobs) / 10, False, self.n_steps_taken == self.n_events, {}

    def _observe(self) -> np.ndarray:
        return np.array(self.n_jobs, dtype=np.float32) / np.float32(10)
