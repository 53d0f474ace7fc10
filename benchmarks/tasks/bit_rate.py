"""Choice of the bit rate of a video that is played while it is downloaded."""

import math
from bisect import bisect_right
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv

#: Bit rates of the encoded video in Mbit/s
BIT_RATES = (0.3, 0.75, 1.2, 1.85, 2.85, 4.3)

#: Mean bandwidths of the ten states of the network, and the smallest bandwidth, in Mbit/s
STATES = np.linspace(0.2, 4.3, 10)
SMALLEST_BANDWIDTH = 0.1

#: Penalties for a second of stalling and for a change of the bit rate by 1 Mbit/s
STALL_PENALTY, CHANGE_PENALTY = 4.3, 1.0

#: Round-trip time in seconds, and the share of the bandwidth that carries the video
ROUND_TRIP, PAYLOAD = 0.08, 0.95

#: Index of the bit rate that counts as the one before the first chunk
FIRST_RATE = 1

#: How many past throughputs are observed
HISTORY = 8


class BitRateEnv(InputDrivenEnv):
    """
    Choose the bit rate of each chunk of a video: as high as the bandwidth permits, without stalls, and without many
    changes.

    **Input**: the bandwidth of each second, and the size of each chunk relative to its bit rate. How fast the seconds
    pass depends on the actions, so that members of a group are at the same chunk at somewhat different times.
    **Action**: index of the bit rate of the next chunk.
    **Observation**: the last bit rate over the highest; the playback buffer over 10 seconds; the share of chunks to
    come; the relative size of the next chunk; the throughputs of the last 8 chunks over the highest bit rate, the
    latest first.
    **Reward**: bit rate in Mbit/s, less 4.3 for each second of stalling, less the change of the bit rate. The episode
    terminates with the last chunk.

    Video and reward (``QoE_lin``) are those of Pensieve (Mao et al. 2017, https://doi.org/10.1145/3098822.3098843,
    section 5.1; Park's ``abr_sim`` has the same): six bit rates, 48 chunks of 4 seconds, a buffer of at most 60
    seconds, a round trip of 80 ms, 95% payload. The bandwidth is that of its synthetic traces (section 5.3 and
    ``sim/synthetic_traces.py`` of https://github.com/hongzimao/pensieve): ten states from 0.2 to 4.3 Mbit/s that last
    ``T`` seconds on average and change to near states with geometrically decreasing probability, and Gaussian noise
    redrawn every few seconds; for each trace ``T`` is uniform in 10 to 100, the seconds between two draws of the noise
    in 1 to 5, and its relative standard deviation in 0.05 to 0.5. A trace of 320 seconds starts anew when it ends.
    Departures: sizes of chunks vary by 10% around their bit rate, alike for all bit rates (as measured on Pensieve's
    video), instead of being those of one video; download times are observed as throughputs only.

    :param n_chunks: Number of chunks, the steps of an episode
    :param chunk_seconds: Playing time of a chunk
    :param max_buffer: Seconds of video beyond which the player waits before it asks for the next chunk
    :param trace_seconds: Length of the bandwidth trace
    """

    def __init__(self, n_chunks: int = 48, chunk_seconds: float = 4.0, max_buffer: float = 60.0, trace_seconds: int = 320):
        self.n_chunks = self._max_episode_steps = n_chunks
        self.chunk_seconds = chunk_seconds
        self.max_buffer = max_buffer
        self.trace_seconds = trace_seconds
        self.action_space = spaces.Discrete(len(BIT_RATES))
        high = np.array([1, (max_buffer + chunk_seconds) / 10, 1, 2] + [5] * HISTORY, dtype=np.float32)
        self.observation_space = spaces.Box(np.zeros_like(high), high)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        n = self.trace_seconds
        mean_duration, noise_seconds, relative_noise = rng.uniform([10, 1, 0.05], [100, 5, 0.5]).tolist()
        changes = np.flatnonzero(rng.random(n) < 1 / mean_duration)
        choices = rng.random(n).tolist()
        state = int(rng.integers(len(STATES)))
        states = np.empty(n, dtype=np.int64)
        begin = 0
        for change in changes.tolist():
            states[begin:change] = state
            state = _next_state(state, choices[change])
            begin = change
        states[begin:] = state
        # The noise lasts for some seconds; a change of the state redraws it
        noise_index = np.floor(np.arange(n) / noise_seconds).astype(np.int64)
        noise_index[1:] += np.cumsum(states[1:] != states[:-1])
        noise = rng.standard_normal(n + int(n / noise_seconds) + 1)[noise_index]
        bandwidth = np.clip(STATES[states] * (1 + relative_noise * noise), SMALLEST_BANDWIDTH, 4 * BIT_RATES[-1])
        relative_sizes = np.clip(1 + 0.1 * rng.standard_normal(self.n_chunks), 0.5, 2.0)
        return {"bandwidth": bandwidth, "relative_sizes": relative_sizes}

    def _begin(self) -> None:
        self._sizes = [*self.inputs["relative_sizes"].tolist(), 1.0]
        self._bandwidth = self.inputs["bandwidth"].tolist()
        # Mbit that have arrived by the beginning of each second
        self._arrived = [0.0, *np.cumsum(PAYLOAD * self.inputs["bandwidth"]).tolist()]
        self._now = 0.0
        #: Seconds of video in the buffer
        self.buffer = 0.0
        self._last_rate = BIT_RATES[FIRST_RATE]
        self._throughputs = [0.0] * HISTORY

    def _arrival(self, n_mbit: float) -> float:
        """
        :param n_mbit: Size of a download that begins now
        :return: Time at which it has arrived
        """
        n_seconds, per_trace = len(self._bandwidth), self._arrived[-1]
        rounds, now = divmod(self._now, n_seconds)
        second = int(now)
        target = self._arrived[second] + (now - second) * PAYLOAD * self._bandwidth[second] + n_mbit
        more_rounds, target = divmod(target, per_trace)
        second = min(bisect_right(self._arrived, target) - 1, n_seconds - 1)
        within = (target - self._arrived[second]) / (PAYLOAD * self._bandwidth[second])
        return (rounds + more_rounds) * n_seconds + second + within

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        rate = BIT_RATES[action]
        n_mbit = rate * self.chunk_seconds * self._sizes[self.n_steps_taken]
        arrival = self._arrival(n_mbit) + ROUND_TRIP
        seconds = arrival - self._now
        stall = max(seconds - self.buffer, 0.0)
        reward = rate - STALL_PENALTY * stall - CHANGE_PENALTY * abs(rate - self._last_rate)

        self.buffer = max(self.buffer - seconds, 0.0) + self.chunk_seconds
        wait = 0.5 * math.ceil(max(self.buffer - self.max_buffer, 0.0) / 0.5)  # the player looks every half second
        self.buffer -= wait
        self._now = arrival + wait
        self._last_rate = rate
        self._throughputs = [n_mbit / seconds, *self._throughputs[:-1]]
        self.n_steps_taken += 1
        return self._observe(), reward, self.n_steps_taken == self.n_chunks, False, {}

    def _observe(self) -> np.ndarray:
        highest = BIT_RATES[-1]
        to_come = 1 - self.n_steps_taken / self.n_chunks
        state = [self._last_rate / highest, self.buffer / 10, to_come, self._sizes[self.n_steps_taken]]
        return np.array([*state, *(throughput / highest for throughput in self._throughputs)], dtype=np.float32)


def _next_state(state: int, choice: float) -> int:
    """
    :param state: State of the network
    :param choice: Uniform random number in [0, 1)
    :return: Another state, with a probability that halves with each state further away
    """
    weights = np.exp2(-np.abs(np.arange(len(STATES)) - state).astype(float))
    weights[state] = 0
    return min(int(np.searchsorted(np.cumsum(weights), choice * weights.sum(), side="right")), len(STATES) - 1)
