"""
Scores by the clock: GRPO and its rivals, each on one core.

    taskset -c 0 python -m benchmarks.clock --arm GRPO --env HalfCheetah-v5 --seed 445 --until 1

Time is CPU time from the start of the training, evaluations excluded. What JAX compiles is in it, and what numba compiles on
the first training on a machine is not. GRPO has its default settings and eight environments. Its rivals have the settings of
rl-zoo3, with the exceptions of `PROTOCOL.md`; those for version 4 of a MuJoCo task stand for version 5. A rival that has none
there has its defaults, eight environments and rollouts of 2,048 transitions. Those of sbx, on JAX (`pip install sbx-rl`), have
the settings of SB3's algorithms. Where a rival's own budget ends earlier, its last policy stands for the minutes after.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch as th
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.matrix import Run, entry_of, has_entry, load_matrix, with_changes
from benchmarks.results import RESULTS, append_row, has_row, provenance
from benchmarks.run import EVALUATION_SEED, evaluate, experiment
from benchmarks.statistics import format_number
from benchmarks.tables import markdown_table

ROWS = RESULTS / "clock.csv"
FIELDS = ["arm", "env", "seed", "minutes", "steps", "eval_mean", "eval_std", "commit", "versions"]
#: Minutes after which policies are evaluated
MARKS = (0.5, 1.0, 2.0, 5.0, 10.0)
#: Those between which speed is measured
BETWEEN = (0.5, 5.0)
#: Names of the algorithms in rl-zoo3
OF_SBX = {"SAC of sbx": "sbx_sac", "TQC of sbx": "sbx_tqc"}
ARMS = {"GRPO": "grpo", "PPO": "ppo", "TRPO": "trpo", "SAC": "sac", "TQC": "tqc", **OF_SBX}
ENVS = (
    "CartPole-v1",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "Pendulum-v1",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "MiniGrid-DoorKey-5x5-v0",
    "sb3_grpo/LoadBalancing-v0",
)
#: Arms of the matrix, where an entry of rl-zoo3 fails
REPLACED = {
    ("PPO", "Hopper-v5"): "ppo, entry of Ant-v4",
    ("PPO", "MiniGrid-DoorKey-5x5-v0"): "ppo, not normalized",
}
#: Budget of GRPO, and of rivals without an entry
ENDLESS = {"n_timesteps": 10_000_000}
N_EPISODES = 20


def planned(arm: str, env: str, seed: int) -> Run:
    """
    :param arm: One of ``ARMS``
    :param env: Gymnasium environment
    :param seed: Seed
    :return: The run
    """
    matrix = load_matrix()
    about, arms, algo = matrix["environments"][env], matrix["arms"], ARMS[arm].removeprefix("sbx_")
    settings = {"algo": algo, "entry": "zoo", "of": about.get("ppo_entry", env)}
    if (arm, env) in REPLACED:
        settings = arms[REPLACED[arm, env]]
    elif arm == "GRPO":
        settings = arms["now"]
    elif not has_entry(settings, env, about):
        settings = {**arms["ppo, defaults"], "algo": algo}
    budget = {} if settings["entry"] == "zoo" else ENDLESS
    entry = with_changes(entry_of(settings, env, about), settings.get("set", {}), budget)
    return Run(arm, ARMS[arm], env, int(entry["n_timesteps"]), seed, about["threshold"], N_EPISODES, entry)


class Clock(BaseCallback):
    """
    Evaluates after each of some minutes, and stops after the last. Evaluations take no time.

    :param manager: What made the model
    :param run: The run
    :param marks: The minutes
    """

    def __init__(self, manager: ExperimentManager, run: Run, marks: Sequence[float]):
        super().__init__()
        self.manager, self.run, self.marks, self.rows = manager, run, marks, list[dict[str, Any]]()

    def _on_training_start(self) -> None:
        self._began = time.process_time()

    def _on_step(self) -> bool:
        now = time.process_time()
        if now - self._began >= 60 * self.marks[len(self.rows)]:
            self._evaluate()
            self._began += time.process_time() - now
        return len(self.rows) < len(self.marks)

    def _on_training_end(self) -> None:
        if len(self.rows) < len(self.marks):  # its own budget is at an end
            self._evaluate()
            self.rows += [{**self.rows[-1], "minutes": mark} for mark in self.marks[len(self.rows) :]]

    def _evaluate(self) -> None:
        mean, std = evaluate(self.manager, self.model, N_EPISODES, EVALUATION_SEED + self.run.seed)
        scores = dict(eval_mean=f"{mean:.4f}", eval_std=f"{std:.4f}")
        self.rows.append(dict(minutes=self.marks[len(self.rows)], steps=self.num_timesteps, **scores))
        print(f"{self.run}: {self.rows[-1]}", flush=True)


def train(run: Run, marks: Sequence[float] = MARKS) -> list[dict[str, Any]]:
    """:return: A row for each of some minutes"""
    th.set_num_threads(1)
    with experiment(run) as (manager, model):
        clock = Clock(manager, run, marks)
        manager.callbacks.append(clock)
        manager.learn(model)
    return [{**dict(arm=run.arm, env=run.env, seed=run.seed), **row, **provenance()} for row in clock.rows]


def table(rows: Sequence[dict[str, str]], mark: float) -> str:
    """
    :param rows: Rows of runs
    :param mark: One of ``MARKS``
    :return: A line for each environment, and a column of scores for each arm: the mean, and of several runs the lowest and the
        highest
    """

    def cell(own: Sequence[dict[str, str]]) -> str:
        found = [float(row["eval_mean"]) for row in own]
        extremes = f" ({format_number(min(found))} to {format_number(max(found))})" if len(found) > 1 else ""
        return format_number(float(np.mean(found))) + extremes

    return _table([row for row in rows if float(row["minutes"]) == mark], cell)


def hours(rows: Sequence[dict[str, str]]) -> str:
    """
    :return: Hours that a million steps would take, at the speed ``BETWEEN`` two of ``MARKS``; a dash if a run took no more
        steps in between
    """

    def cell(own: Sequence[dict[str, str]]) -> str:
        first, last = (np.mean([int(row["steps"]) for row in own if float(row["minutes"]) == mark]) for mark in BETWEEN)
        return f"{1e6 / 60 * (BETWEEN[1] - BETWEEN[0]) / (last - first):.2f}" if last > first else "-"

    whole = {(*_about(row), row["seed"]) for row in rows if float(row["minutes"]) == BETWEEN[1]}
    return _table([row for row in rows if (*_about(row), row["seed"]) in whole], cell)


def _about(row: dict[str, str]) -> tuple[str, str]:
    return row["env"], row["arm"]


def _table(rows: Sequence[dict[str, str]], cell: Callable[[Sequence[dict[str, str]]], str]) -> str:
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines = []
    for env in (each for each in ENVS if any(row["env"] == each for row in rows)):
        runs = [[row for row in rows if _about(row) == (env, arm)] for arm in arms]
        lines.append([env.removeprefix("sb3_grpo/"), *(cell(own) if own else "" for own in runs)])
    return markdown_table(["environment", *arms], lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True, choices=ARMS)
    parser.add_argument("--env", required=True, choices=ENVS)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--until", type=float, default=MARKS[-1], choices=MARKS, help="minutes of the run")
    args = parser.parse_args()
    key = dict(arm=args.arm, env=args.env, seed=str(args.seed))
    if has_row(ROWS, key):
        return
    marks = [mark for mark in MARKS if mark <= args.until]
    for row in train(planned(args.arm, args.env, args.seed), marks):
        append_row(ROWS, row, FIELDS)


if __name__ == "__main__":
    main()
