"""
Scores of random actions and of the heuristics on the input-driven tasks, and the budgets of training.

    python -m benchmarks.references            # writes benchmarks/results/references.csv
    python -m benchmarks.references --search   # searches the parameters of the heuristics, on other scenarios

Each score is the mean return over 100 scenarios, whose seeds no training and no search uses, with a 95% interval.
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

from benchmarks import heuristics as h

RESULTS = pathlib.Path(__file__).parent / "results" / "references.csv"
REPORTED, SEARCHED = range(10_000, 10_100), range(100)

#: Steps of training on each task, in the order of `heuristics.HEURISTICS`
BUDGETS = dict(zip(h.HEURISTICS, (200_000, 200_000, 200_000, 200_000, 300_000, 200_000, 300_000), strict=True))

#: Values that are tried for each parameter
GRIDS: dict[Callable[..., Any], tuple[str, dict[str, Iterable[float]]]] = {
    h.capped_base_stock: ("LostSales", {"level": range(16, 40, 2), "cap": range(3, 12)}),
    h.forecast_base_stock: ("LostSales", {"periods": np.arange(2, 7.5, 0.5), "safety": range(0, 16, 2)}),
    h.price_thresholds: ("EnergyStorage", {"buy_below": range(14, 34, 2), "sell_above": range(26, 60, 2)}),
    h.buffer_based: ("BitRate", {"reservoir": range(0, 12, 2), "cushion": range(4, 52, 4)}),
    h.threshold_rule: ("Queueing", {"threshold": range(1, 13)}),
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
    for env_id, heuristics in h.HEURISTICS.items():
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
