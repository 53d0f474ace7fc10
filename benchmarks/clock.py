"""
Scores by the clock: GRPO and its rivals, each on one core.

    taskset -c 0 python -m benchmarks.clock --arm GRPO --env HalfCheetah-v5 --seed 410

Time is CPU time from the start of the training, evaluations excluded. What JAX compiles is in it, and what numba compiles on
the first training on a machine is not. GRPO has its default settings and eight environments; its rivals have the settings of
rl-zoo3, where those for version 4 of a MuJoCo task stand for version 5, and PPO has on Hopper those of Ant, as in
`PROTOCOL.md`. Those of sbx, on JAX (`pip install sbx-rl`), have the settings of SB3's algorithms.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch as th
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.matrix import Run, entry_of, load_matrix
from benchmarks.results import RESULTS, append_row, has_row, provenance
from benchmarks.run import EVALUATION_SEED, evaluate, experiment
from benchmarks.statistics import format_number
from benchmarks.tables import markdown_table

ROWS = RESULTS / "clock.csv"
FIELDS = ["arm", "env", "seed", "minutes", "steps", "eval_mean", "eval_std", "commit", "versions"]
#: Minutes after which policies are evaluated
MARKS = (0.5, 1.0, 2.0, 5.0)
#: Those of them that the table shows
SHOWN = (1.0, 5.0)
#: Names of the algorithms in rl-zoo3
OF_SBX = {"SAC of sbx": "sbx_sac", "TQC of sbx": "sbx_tqc"}
ARMS = {"GRPO": "grpo", "PPO": "ppo", "TRPO": "trpo", "SAC": "sac", "TQC": "tqc", **OF_SBX}
ENVS = ("Pendulum-v1", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
#: rl-zoo3's entry of another environment, where its own fails
REPLACED = {("PPO", "Hopper-v5"): "Ant-v4"}
N_EPISODES = 20


def planned(arm: str, env: str, seed: int) -> Run:
    """
    :param arm: One of ``ARMS``
    :param env: Gymnasium environment
    :param seed: Seed
    :return: A run which is longer than the last mark
    """
    about = load_matrix()["environments"][env]
    if arm == "GRPO":
        entry = {**entry_of({"algo": "grpo", "entry": "default"}, env, about), "n_envs": 8, "n_timesteps": 10_000_000}
    else:
        named = REPLACED.get((arm, env), about.get("ppo_entry", env))
        zoo = {"algo": ARMS[arm].removeprefix("sbx_"), "entry": "zoo", "of": named}
        entry = entry_of(zoo, env, about)
    return Run(arm, ARMS[arm], env, int(entry["n_timesteps"]), seed, about["threshold"], N_EPISODES, entry)


class Clock(BaseCallback):
    """
    Evaluates after each of ``MARKS`` and stops after the last one. Evaluations take no time.

    :param manager: What made the model
    :param run: The run
    """

    def __init__(self, manager: ExperimentManager, run: Run):
        super().__init__()
        self.manager, self.run, self.rows = manager, run, list[dict[str, Any]]()

    def _on_training_start(self) -> None:
        self._began = time.process_time()

    def _on_step(self) -> bool:
        now, mark = time.process_time(), MARKS[len(self.rows)]
        if now - self._began < 60 * mark:
            return True
        mean, std = evaluate(self.manager, self.model, N_EPISODES, EVALUATION_SEED + self.run.seed)
        scores = dict(eval_mean=f"{mean:.4f}", eval_std=f"{std:.4f}")
        self.rows.append(dict(minutes=mark, steps=self.num_timesteps, **scores))
        print(f"{self.run}: {self.rows[-1]}", flush=True)
        self._began += time.process_time() - now
        return len(self.rows) < len(MARKS)


def train(run: Run) -> list[dict[str, Any]]:
    """:return: A row for each of ``MARKS`` that the run reached"""
    th.set_num_threads(1)
    with experiment(run) as (manager, model):
        clock = Clock(manager, run)
        manager.callbacks.append(clock)
        manager.learn(model)
    return [{**dict(arm=run.arm, env=run.env, seed=run.seed), **row, **provenance()} for row in clock.rows]


def means(rows: Sequence[dict[str, str]], column: str) -> dict[float, float]:
    """:return: Mean of a column over the runs that reached it, by mark"""
    at = {mark: [float(row[column]) for row in rows if float(row["minutes"]) == mark] for mark in MARKS}
    return {mark: float(np.mean(values)) for mark, values in at.items() if values}


def table(rows: Sequence[dict[str, str]]) -> str:
    """
    :return: A line for each environment and number of minutes ``SHOWN``, and a column of mean scores for each arm, with a dash
        where no run got there
    """
    return _table(rows, [(f"{mark:g} min", partial(_score, mark=mark)) for mark in SHOWN])


def hours(rows: Sequence[dict[str, str]]) -> str:
    """:return: Hours that a million steps would take, at the speed between the first mark and the last that runs reached"""

    def cell(own: Sequence[dict[str, str]]) -> str:
        steps = means(own, "steps")
        return f"{1e6 / 60 * (max(steps) - min(steps)) / (steps[max(steps)] - steps[min(steps)]):.2f}"

    return _table(rows, [("hours", cell)])


def _score(rows: Sequence[dict[str, str]], mark: float) -> str:
    found = means(rows, "eval_mean")
    return format_number(found[mark]) if mark in found else "-"


def _table(rows: Sequence[dict[str, str]], kinds: Sequence[tuple[str, Callable[[Any], str]]]) -> str:
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines = []
    for env in (each for each in ENVS if any(row["env"] == each for row in rows)):
        runs = [[row for row in rows if (row["env"], row["arm"]) == (env, arm)] for arm in arms]
        lines += [[f"{env}, {name}", *(cell(own) if own else "" for own in runs)] for name, cell in kinds]
    return markdown_table(["environment", *arms], lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True, choices=ARMS)
    parser.add_argument("--env", required=True, choices=ENVS)
    parser.add_argument("--seed", required=True, type=int)
    args = parser.parse_args()
    key = dict(arm=args.arm, env=args.env, seed=str(args.seed))
    if has_row(ROWS, key):
        return
    for row in train(planned(args.arm, args.env, args.seed)):
        append_row(ROWS, row, FIELDS)


if __name__ == "__main__":
    main()
