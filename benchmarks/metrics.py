"""
What the logged metrics of healthy runs are: trains with the default settings and writes `results/metrics.csv`.

    python -m benchmarks.metrics               # about six minutes
    python -m benchmarks.metrics boards        # about eight minutes: what the value estimate explains on MinAtar's boards
    python -m benchmarks.report                # the figure in docs/games.md; --print metrics: a table of the ranges

For each metric and environment, the value of the first update, and the quantiles of 5% and 95% over all updates; on boards,
`results/board_fits.csv` has means over twentieths of the training.
"""

import argparse
import csv
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch as th
from minatar.gym import register_envs as register_minatar
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from tqdm import tqdm

from benchmarks.figures import short_name
from benchmarks.matrix import load_matrix
from benchmarks.results import RESULTS
from benchmarks.statistics import Curve
from benchmarks.tables import markdown_table
from sb3_grpo import GRPO

CSV = RESULTS / "metrics.csv"
RUNS = {
    "CartPole-v1": 30_000,  # once it is solved, returns do not vary
    "Pendulum-v1": 100_000,
    "LunarLander-v3": 300_000,
    "HalfCheetah-v5": 300_000,
    "sb3_grpo/LoadBalancing-v0": 200_000,
}
FIELDS = ("env", "metric", "first", "low", "high")
#: Of the runs on boards
BOARDS_CSV = RESULTS / "board_fits.csv"
BOARDS = dict.fromkeys(load_matrix()["suites"]["minatar"]["timesteps"], 200_000)
#: What is recorded there, by its meaning
FITS = {"explained variance": "train/explained_variance", "share of variance removed": "train/baseline_variance_reduction"}
N_PARTS = 20
#: Metrics that say how long a run has been, or that only have a meaning in the units of a task
LEFT_OUT = (
    "time/",
    "rollout/ep_",
    "train/n_updates",
    "train/learning_rate",
    "train/clip_range",
    "train/advantage_",
    "train/loss",
)


def logged(env_id: str, timesteps: int, policy: str = "MlpPolicy") -> pd.DataFrame:
    """
    :param env_id: Environment
    :param timesteps: Steps of training
    :param policy: Name of the policy
    :return: One row per update, one column per metric
    """
    with tempfile.TemporaryDirectory() as folder:
        model = GRPO(policy, make_vec_env(env_id, n_envs=8), seed=0, device="cpu")
        model.set_logger(configure(folder, ["csv"]))
        model.learn(timesteps)
        return pd.read_csv(Path(folder, "progress.csv"))


def ranges(log: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """
    :param log: One row per update
    :return: For each metric its first value and its quantiles
    """
    columns = {name: log[name].dropna() for name in sorted(log) if not name.startswith(LEFT_OUT)}
    return {
        name: (float(values.iloc[0]), float(values.quantile(0.05)), float(values.quantile(0.95)))
        for name, values in columns.items()
        if len(values)
    }


def table(rows: list[dict[str, str]]) -> str:
    """
    :param rows: Rows of the CSV
    :return: One line per metric, one column per environment
    """
    envs = list(dict.fromkeys(row["env"] for row in rows))
    cells = {}
    for row in rows:
        ends = [f"{round(float(row[end]), 6):.2g}" for end in ("low", "high")]
        cells[row["metric"], row["env"]] = " to ".join(dict.fromkeys(ends))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    header = ["metric", *(env.removeprefix("sb3_grpo/") for env in envs)]
    return markdown_table(header, [[f"`{metric}`", *(cells.get((metric, env), "") for env in envs)] for metric in metrics])


def fits(log: pd.DataFrame) -> Iterable[tuple[int, list[float]]]:
    """
    :param log: One row per update
    :return: For each part of the training its last step, and the means of :data:`FITS`
    """
    for part in np.array_split(np.arange(len(log)), N_PARTS):
        yield int(log["time/total_timesteps"].iloc[part[-1]]), [float(log[name].iloc[part].mean()) for name in FITS.values()]


def fit_curves(rows: list[dict[str, str]]) -> dict[str, dict[str, Curve]]:
    """
    :param rows: Rows of :data:`BOARDS_CSV`
    :return: For each of :data:`FITS` and environment, by its short name, the values along one training, without an interval
    """
    envs = dict.fromkeys(row["env"] for row in rows)
    values = {(name, env): np.array([float(row[name]) for row in rows if row["env"] == env]) for name in FITS for env in envs}
    return {name: {short_name(env): Curve(*3 * [values[name, env]]) for env in envs} for name in FITS}


def write(path: Path, fields: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """
    :param path: CSV to write
    :param fields: Names of its columns
    :param lines: Lines of values, of which numbers are rounded to four digits
    """
    with path.open("w", newline="") as file:
        rounded = ([f"{value:.4g}" if isinstance(value, float) else value for value in line] for line in lines)
        csv.writer(file, lineterminator="\n").writerows([fields, *rounded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["defaults", "boards"], default="defaults")
    th.set_num_threads(1)
    if parser.parse_args().what == "boards":
        register_minatar()
        logs = {env: logged(env, timesteps, "CnnPolicy") for env, timesteps in tqdm(BOARDS.items(), unit="run")}
        lines = [[env, step, *means] for env, log in logs.items() for step, means in fits(log)]
        write(BOARDS_CSV, ["env", "step", *FITS], lines)
        return
    lines = [
        [env, metric, *values]
        for env, timesteps in tqdm(RUNS.items(), unit="run")
        for metric, values in ranges(logged(env, timesteps)).items()
    ]
    write(CSV, FIELDS, lines)


if __name__ == "__main__":
    main()
