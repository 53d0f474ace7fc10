"""
What the logged metrics of healthy runs are: trains with the default settings and writes `results/metrics.csv`.

    python -m benchmarks.metrics               # about six minutes
    python -m benchmarks.report                # the table in docs/diagnostics.md

For each metric and environment, the value of the first update, and the quantiles of 5% and 95% over all updates.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import pandas as pd
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from tqdm import tqdm

from benchmarks.results import RESULTS
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


def logged(env_id: str, timesteps: int) -> pd.DataFrame:
    """
    :param env_id: Environment
    :param timesteps: Steps of training
    :return: One row per update, one column per metric
    """
    with tempfile.TemporaryDirectory() as folder:
        model = GRPO("MlpPolicy", make_vec_env(env_id, n_envs=8), seed=0, device="cpu")
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    th.set_num_threads(1)
    lines = [
        [env, metric, *(f"{value:.4g}" for value in values)]
        for env, timesteps in tqdm(RUNS.items(), unit="run")
        for metric, values in ranges(logged(env, timesteps)).items()
    ]
    with CSV.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, *lines])


if __name__ == "__main__":
    main()
