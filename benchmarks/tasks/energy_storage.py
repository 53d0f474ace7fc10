"""A battery that buys and sells electricity at a random price."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv

#: Mean of the log price in dollars per MWh, and the coefficients of its daily pattern: sine and cosine of once and twice a day
LOG_PRICE_MEAN = 3.386
DAILY_PATTERN = (-0.305, -0.194, -0.264, -0.036)

HOLD, BUY, SELL = 0, 1, 2


class EnergyStorageEnv(InputDrivenEnv):
    """
    Buy electricity when it is cheap, store it, and sell it when it is dear.

    **Input**: the price of each hour, ``exp(f(hour) + x_t)`` with a daily pattern ``f`` and the mean-reverting process
    with jumps ``x_t = reversion * x_(t-1) + volatility * z_t + jump_t``.
    **Action**: 0 holds, 1 buys, 2 sells, as much as the power of the battery, its capacity and its content allow.
    **Observation**: content over capacity, the logarithm of the price over its median, sine and cosine of the hour, the
    share of hours to come.
    **Reward**: what the sale earns, or minus what the purchase costs, over the median price (about 30 dollars per MWh).
    The episode terminates after ``n_hours``; what is then left in the battery is lost.

    The form of the price is that of Cartea and Figueroa 2005 ("Pricing in electricity markets: a mean reverting jump
    diffusion model with seasonality", Applied Mathematical Finance 12). Its parameters were fitted to the 192 hourly
    real-time prices of PJM (January 2005) that come with the energy storage problem of Powell 2022 ("Sequential
    Decision Analytics and Modeling", chapter 9; https://github.com/wbpowell328/stochastic-optimization,
    ``EnergyStorage_I``): least squares on log prices, floored at 5 dollars, for the daily pattern and then for the
    reversion, where residuals beyond three standard deviations count as jumps (3 of 191). The capacity of 1 MWh and the
    efficiency of 0.9 in each direction are Powell's. Departures: the battery takes four hours to fill instead of one,
    starts half full instead of full, and an episode is a week.

    :param n_hours: Steps of an episode
    :param capacity: Capacity of the battery in MWh
    :param power: Energy that can be stored or withdrawn within an hour, in MWh
    :param efficiency: Share of the energy that is left after charging, and again after discharging
    :param reversion: Share of a deviation of the log price that is left after an hour
    :param volatility: Standard deviation of the ordinary hourly shock of the log price
    :param jump_probability: Probability of a jump within an hour
    :param jump_volatility: Standard deviation of a jump of the log price
    """

    def __init__(
        self,
        n_hours: int = 168,
        capacity: float = 1.0,
        power: float = 0.25,
        efficiency: float = 0.9,
        reversion: float = 0.554,
        volatility: float = 0.290,
        jump_probability: float = 0.016,
        jump_volatility: float = 1.1,
    ):
        self.n_hours = self._max_episode_steps = n_hours
        self.capacity = capacity
        self.power = power
        self.efficiency = efficiency
        self.reversion = reversion
        self.volatility = volatility
        self.jump_probability = jump_probability
        self.jump_volatility = jump_volatility
        self.price_unit = math.exp(LOG_PRICE_MEAN)
        day = 2 * np.pi * np.arange(n_hours + 1) / 24
        harmonics = np.stack([np.sin(day), np.cos(day), np.sin(2 * day), np.cos(2 * day)])
        self._pattern = LOG_PRICE_MEAN + np.array(DAILY_PATTERN) @ harmonics
        self._sine, self._cosine = np.sin(day).tolist(), np.cos(day).tolist()
        self.action_space = spaces.Discrete(3)
        low, high = np.array([0, -10, -1, -1, 0]), np.array([1, 10, 1, 1, 1])
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        n = self.n_hours + 1  # with the price that is seen after the last step
        shocks = self.volatility * rng.standard_normal(n)
        shocks += self.jump_volatility * rng.standard_normal(n) * (rng.random(n) < self.jump_probability)
        deviations, deviation = [], 0.0
        for shock in shocks.tolist():
            deviation = self.reversion * deviation + shock
            deviations.append(deviation)
        return {"price": np.exp(self._pattern + np.array(deviations))}

    def _begin(self) -> None:
        self._prices = self.inputs["price"].tolist()
        #: Energy in the battery, in MWh
        self.content = self.capacity / 2

    @property
    def price(self) -> float:
        """Price of this hour in dollars per MWh."""
        return self._prices[self.n_steps_taken]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        revenue = 0.0
        if action == BUY:
            stored = min(self.power, self.capacity - self.content)
            self.content += stored
            revenue = -self.price * stored / self.efficiency
        elif action == SELL:
            withdrawn = min(self.power, self.content)
            self.content -= withdrawn
            revenue = self.price * withdrawn * self.efficiency
        self.n_steps_taken += 1
        return self._observe(), revenue / self.price_unit, self.n_steps_taken == self.n_hours, False, {}

    def _observe(self) -> np.ndarray:
        t = self.n_steps_taken
        log_price = min(max(math.log(self.price / self.price_unit), -10.0), 10.0)
        content = self.content / self.capacity
        return np.array([content, log_price, self._sine[t], self._cosine[t], 1 - t / self.n_hours], dtype=np.float32)
