"""Inventory with lost sales, a lead time, and a level of demand that wanders."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.tasks import InputDrivenEnv
from sb3_grpo.validation import require_at_least


class LostSalesEnv(InputDrivenEnv):
    """
    Order stock that arrives after a lead time, while the level of demand wanders unseen; demand that finds no stock is
    lost.

    **Input**: the demand of each period, Poisson with mean ``mean_demand * exp(x_t - volatility^2 / 2)``, where ``x_t``
    is a first-order autoregression with standard deviation ``volatility``.
    **Action**: number of units to order, which arrive ``lead_time`` periods later.
    **Observation**: the stock on hand over four times the mean demand; the orders under way, the next to arrive first,
    the sales of the last period and their exponentially smoothed mean, over twice the mean demand. The level and lost
    demand stay hidden.
    **Reward**: minus the cost of holding what is left and of losing what is lacking, in units of the mean cost of a
    period in which everything is lost. The episode is cut after ``n_periods`` periods.

    Poisson demand with mean 5, a lead time of 4, a holding cost of 1 and a penalty of 4 are an instance of the test bed
    of Zipkin 2008 ("Old and new methods for lost-sales inventory systems", Operations Research 56), which learning
    methods are compared on (Temizöz et al., https://arxiv.org/abs/2011.15122). There demand is stationary. Departures:
    the level wanders, in the form of Zeger 1988 ("A regression model for time series of counts", Biometrika 75), with a
    correlation of 0.98 from one period to the next and a standard deviation of 0.5, both chosen here so that it stays
    about the same over a lead time and changes severalfold over an episode; an order is limited to 20 and the stock on
    hand and under way to 100, so that random orders do not pile up; costs are divided by ``penalty * mean_demand``.

    :param lead_time: Periods until an order arrives, at least 1
    :param n_periods: Steps of an episode
    :param mean_demand: Mean demand per period
    :param holding_cost: Cost of a unit that is left at the end of a period
    :param penalty: Cost of a unit of demand that is lost
    :param correlation: Correlation of the log level from one period to the next
    :param volatility: Standard deviation of the log level
    :param max_order: Largest order
    :param max_position: Largest stock on hand and under way; an order that would exceed it is cut
    """

    #: Weight of the latest sales in their smoothed mean
    SMOOTHING = 0.2

    def __init__(
        self,
        lead_time: int = 4,
        n_periods: int = 200,
        mean_demand: float = 5.0,
        holding_cost: float = 1.0,
        penalty: float = 4.0,
        correlation: float = 0.98,
        volatility: float = 0.5,
        max_order: int = 20,
        max_position: int = 100,
    ):
        require_at_least("lead_time", lead_time, 1)
        self.lead_time = lead_time
        self.n_periods = self._max_episode_steps = n_periods
        self.mean_demand = mean_demand
        self.holding_cost = holding_cost
        self.penalty = penalty
        self.correlation = correlation
        self.volatility = volatility
        self.max_order = max_order
        self.max_position = max_position
        self._cost_unit = penalty * mean_demand
        self._scale = np.array([4 * mean_demand] + [2 * mean_demand] * (lead_time + 1), dtype=np.float32)
        self.action_space = spaces.Discrete(max_order + 1)
        high = max_position / self._scale
        self.observation_space = spaces.Box(np.zeros_like(high), high, dtype=np.float32)

    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        shocks = rng.standard_normal(self.n_periods)
        shocks[1:] *= math.sqrt(1 - self.correlation**2)
        log_levels, log_level = [], 0.0
        for shock in shocks.tolist():
            log_level = self.correlation * log_level + shock
            log_levels.append(log_level)
        levels = self.mean_demand * np.exp(self.volatility * np.array(log_levels) - self.volatility**2 / 2)
        return {"demand": rng.poisson(levels)}

    def _begin(self) -> None:
        self._demand = self.inputs["demand"].tolist()
        #: Stock on hand, with what has arrived in this period
        self.on_hand = round(self.mean_demand)
        #: Orders under way; the first arrives in the next period
        self.under_way = [round(self.mean_demand)] * (self.lead_time - 1)
        self.last_sales = round(self.mean_demand)
        self.smoothed_sales = self.mean_demand

    @property
    def position(self) -> int:
        """Stock on hand and under way."""
        return self.on_hand + sum(self.under_way)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        order = max(min(int(action), self.max_position - self.position), 0)
        demand = self._demand[self.n_steps_taken]
        sales = min(demand, self.on_hand)
        left = self.on_hand - sales
        cost = self.holding_cost * left + self.penalty * (demand - sales)
        self.under_way.append(order)
        self.on_hand = left + self.under_way.pop(0)
        self.last_sales = sales
        self.smoothed_sales += self.SMOOTHING * (sales - self.smoothed_sales)
        self.n_steps_taken += 1
        return self._observe(), -cost / self._cost_unit, False, self.n_steps_taken == self.n_periods, {}

    def _observe(self) -> np.ndarray:
        state = [self.on_hand, *self.under_way, self.last_sales, self.smoothed_sales]
        return np.array(state, dtype=np.float32) / self._scale
