"""
Scores of random actions and of the heuristics on the input-driven tasks, and the budgets of training.

    python -m benchmarks.references            # writes benchmarks/results/references.csv
    python -m benchmarks.references --search   # searches the parameters of the heuristics, on other scenarios

Each score is the mean return over 100 scenarios, whose seeds no training and no search uses, with a 95% interval.

The heuristics are functions of the environment: what practitioners use, and what training has to beat. Where a docstring does
not say otherwise, the parameters are the best of a grid over the searched scenarios.
"""

import argparse
import csv
import itertools
import pathlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.tasks.bit_rate import BIT_RATES, BitRateEnv
from benchmarks.tasks.energy_storage import BUY, HOLD, SELL, EnergyStorageEnv
from benchmarks.tasks.load_balancing import LoadBalancingEnv
from benchmarks.tasks.lost_sales import LostSalesEnv
from benchmarks.tasks.queueing import QueueingEnv

RESULTS = pathlib.Path(__file__).parent / "results" / "references.csv"
REPORTED, SEARCHED = range(10_000, 10_100), range(100)


def shortest_completion(env: LoadBalancingEnv) -> int:
    """
    Send the job where it will be finished first.

    :param env: The environment
    :return: Index of the server
    """
    times = env.completion_times()
    return times.index(min(times))


def shortest_queue(env: LoadBalancingEnv) -> int:
    """
    Send the job to the server with the fewest jobs, the fastest of these.

    :param env: The environment
    :return: Index of the server
    """
    return min(range(len(env.n_queued)), key=lambda server: (env.n_queued[server], -env.service_rates[server]))


def capped_base_stock(env: LostSalesEnv, level: int = 22, cap: int = 5) -> int:
    """
    Order up to a level of stock on hand and under way, but never more than a cap (Xin 2021, "Understanding the
    performance of capped base-stock policies in lost-sales inventory models", Operations Research 69).

    :param env: The environment
    :param level: Stock on hand and under way to order up to
    :param cap: Largest order
    :return: The order
    """
    return min(max(level - env.position, 0), cap)


def forecast_base_stock(env: LostSalesEnv, periods: float = 5.0, safety: float = 4.0) -> int:
    """
    Order up to a level that follows the smoothed sales, as where demand is not stationary (Graves 1999, "A single-item
    inventory model for a nonstationary demand process", Manufacturing & Service Operations Management 1).

    :param env: The environment
    :param periods: Periods of smoothed sales that stock on hand and under way has to cover
    :param safety: Units on top of that
    :return: The order
    """
    level = round(periods * env.smoothed_sales + safety)
    return min(max(level - env.position, 0), env.max_order)


def price_thresholds(env: EnergyStorageEnv, buy_below: float = 22.0, sell_above: float = 44.0) -> int:
    """
    Buy below one price and sell above another (Powell 2022, "Sequential Decision Analytics and Modeling", chapter 9).

    :param env: The environment
    :param buy_below: Price in dollars per MWh
    :param sell_above: Price in dollars per MWh
    :return: The action
    """
    if env.price <= buy_below:
        return BUY
    return SELL if env.price >= sell_above else HOLD


def buffer_based(env: BitRateEnv, reservoir: float = 5.0, cushion: float = 10.0) -> int:
    """
    Raise the bit rate with the buffer: the lowest up to the reservoir, the highest beyond reservoir and cushion (Huang
    et al. 2014, https://doi.org/10.1145/2619239.2626296). The defaults are those of Pensieve's comparison,
    ``test/bb.py``.

    :param env: The environment
    :param reservoir: Seconds of video
    :param cushion: Seconds of video
    :return: Index of the bit rate
    """
    share = min(max((env.buffer - reservoir) / cushion, 0.0), 1.0)
    return int(share * (len(BIT_RATES) - 1))


def c_mu_rule(env: QueueingEnv) -> int:
    """
    Serve the class whose completion lowers the holding cost fastest: class 3, as a job of class 1 stays in the network.

    :param env: The environment
    :return: The action
    """
    return 1


def threshold_rule(env: QueueingEnv, threshold: int = 3) -> int:
    """
    Serve class 1 where the second server runs out of work, else class 3 (Harrison and Wein 1989, see the environment).

    :param env: The environment
    :param threshold: Smallest number of jobs of class 2 with which class 3 is served
    :return: The action
    """
    return int(env.n_jobs[1] >= threshold)


def standing_still(env: Any) -> Any:
    """
    Apply no torque.

    :param env: The environment
    :return: The action
    """
    return 0 * env.action_space.low


#: For each environment its heuristics by name; each takes the unwrapped environment and returns an action
HEURISTICS: dict[str, dict[str, Callable[..., Any]]] = {
    "sb3_grpo/LoadBalancing-v0": {"shortest completion": shortest_completion, "shortest queue": shortest_queue},
    "sb3_grpo/LostSales-v0": {"capped base stock": capped_base_stock, "forecast base stock": forecast_base_stock},
    "sb3_grpo/EnergyStorage-v0": {"price thresholds": price_thresholds},
    "sb3_grpo/BitRate-v0": {
        "buffer-based": buffer_based,
        "buffer-based, best of a grid": partial(buffer_based, reservoir=2.0, cushion=32.0),
    },
    "sb3_grpo/GustyHalfCheetah-v0": {"standing still": standing_still},
    "sb3_grpo/Queueing-v0": {"c-mu rule": c_mu_rule, "threshold rule": threshold_rule},
}

#: Steps of training on each task, in the order of :data:`HEURISTICS`
BUDGETS = dict(zip(HEURISTICS, (200_000, 200_000, 200_000, 200_000, 300_000, 200_000), strict=True))

#: Values that are tried for each parameter
GRIDS: dict[Callable[..., Any], tuple[str, dict[str, Iterable[float]]]] = {
    capped_base_stock: ("LostSales", {"level": range(16, 40, 2), "cap": range(3, 12)}),
    forecast_base_stock: ("LostSales", {"periods": np.arange(2, 7.5, 0.5), "safety": range(0, 16, 2)}),
    price_thresholds: ("EnergyStorage", {"buy_below": range(14, 34, 2), "sell_above": range(26, 60, 2)}),
    buffer_based: ("BitRate", {"reservoir": range(0, 12, 2), "cushion": range(4, 52, 4)}),
    threshold_rule: ("Queueing", {"threshold": range(1, 13)}),
}


def returns(env_id: str, policy: Callable[[Any], Any], seeds: Iterable[int | None]) -> np.ndarray:
    """
    :param env_id: Id of the environment
    :param policy: Takes the unwrapped environment and returns an action
    :param seeds: One for each scenario; ``None`` to go on with the random numbers of the one before
    :return: Return of each scenario, shape ``(n_seeds,)``
    """
    env, totals = gym.make(env_id, disable_env_checker=True), np.zeros(0)
    env.action_space.seed(0)  # not the scenario's seed, which would make random actions depend on the inputs
    for seed in seeds:
        env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(policy(env.unwrapped))
            total, done = total + float(reward), terminated or truncated
        totals = np.append(totals, total)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search the parameters of the heuristics, write nothing")
    if parser.parse_args().search:
        for policy, (name, grid) in GRIDS.items():
            points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
            scores = [returns(f"sb3_grpo/{name}-v0", partial(policy, **point), SEARCHED).mean() for point in points]
            print(f"{policy.__name__}: {points[int(np.argmax(scores))]}, mean return {max(scores):.2f}")
        return
    rows = []
    for env_id, heuristics in HEURISTICS.items():
        for name, policy in {"random actions": lambda env: env.action_space.sample(), **heuristics}.items():
            totals = returns(env_id, policy, REPORTED)
            mean, half = totals.mean(), 1.984 * totals.std(ddof=1) / len(totals) ** 0.5  # Student's t, 99 degrees
            rows.append([env_id, name, *np.round([mean, mean - half, mean + half], 3), len(totals), BUDGETS[env_id]])
            print(*rows[-1], sep=", ")
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        header = ["env", "policy", "mean", "low", "high", "n_scenarios", "budget"]
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


if __name__ == "__main__":
    main()
