"""A small matrix, and finished runs that nobody has run."""

import math
import pathlib
from typing import Any

import numpy as np

from benchmarks.curves import CurveStore, LearningCurve
from benchmarks.matrix import expand
from benchmarks.results import FIELDS, Suite, append_row

#: One environment with two seeds, and another with one
SMALL: dict[str, Any] = {
    "arms": {
        "ppo": {"algo": "ppo", "entry": "zoo"},
        "grpo": {"algo": "grpo", "entry": "default"},
        "ppo-default": {"algo": "ppo", "entry": "default"},
    },
    "environments": {
        "CartPole-v1": {"threshold": 25},
        "Acrobot-v1": {"threshold": -100},
        "Pendulum-v1": {"threshold": -200},
        "MountainCarContinuous-v0": {"threshold": 90},
    },
    "suites": {
        "proof": {
            "arms": ["ppo", "grpo"],
            "seeds": [100],
            "seeds_of": {"CartPole-v1": [100, 101]},
            "timesteps": {"CartPole-v1": 2048, "Acrobot-v1": 1024},
        },
    },
}


def toy_suite(
    results: pathlib.Path,
    areas: dict[str, dict[str, list[float]]],
    random: float = 0.0,
    speeds: dict[str, float] | None = None,
) -> Suite:
    """
    :param results: Folder for the rows
    :param areas: By arm and environment, one area for each seed, NaN for a run that is not finished; returns rise evenly from
        0 to twice the area
    :param random: Return of random actions
    :param speeds: Seconds per step by arm
    :return: The suite, of at most three seeds from 100 on
    """
    envs = list(next(iter(areas.values())))
    toy = {"arms": list(areas), "seeds": [100, 101, 102], "timesteps": dict.fromkeys(envs, 1000)}
    matrix = {**SMALL, "suites": {"toy": toy}}
    for run in expand(matrix, "toy"):
        of_seeds = [random] if run.algo == "random" else areas[run.arm][run.env]
        index = max(run.seed - 100, 0)
        if index >= len(of_seeds) or math.isnan(area := of_seeds[index]):
            continue
        env, seed, settings = run.key()
        row = {"arm": run.arm, "env": env, "seed": seed, "settings_hash": settings, "wall_clock": 10, "steps_per_second": 1000}
        append_row(results / "toy.csv", {**row, **dict.fromkeys(("auc", "final", "eval_mean"), area)}, FIELDS)
        if run.algo != "random":
            curve = LearningCurve(np.arange(1, 101) * 10, np.linspace(0.0, 2 * area, 100))
            CurveStore(results / "toy.csv").save(run.key(), curve)
        if speeds and run.arm in speeds and run.seed == 100:
            row = {"session": 1, "env": env, "settings_hash": settings, "seconds_per_step": speeds[run.arm]}
            append_row(results / "speed.csv", row, list(row))
    return Suite("toy", results, matrix)
