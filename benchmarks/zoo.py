"""
What the zoo's command trains with the settings that the package ships: one run per environment and seed, one CSV row each.

    python -m benchmarks.zoo                              # what is missing in the CSV, then the table
    python -m benchmarks.zoo --envs CartPole-v1 --jobs 2
    python -m benchmarks.zoo --table                      # the table alone
    python -m benchmarks.zoo --csv runs/try.csv --seeds 0 1 --envs Acrobot-v1 --params gamma:0.98   # a trial

Each run is the command in the table and nothing else, in a process of its own; what it has saved is then evaluated on 100
episodes with deterministic actions. Seeds from 100 on are reported; settings were chosen on smaller ones. Where that was not
enough, and settings were chosen again after a look at the reported seeds, those that follow are reported. A row belongs to
the settings it was run with, so that changed settings make it stale.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np
from rl_zoo3.utils import create_test_env, get_saved_hyperparams
from stable_baselines3.common.evaluation import evaluate_policy
from tqdm import tqdm

from benchmarks import run as matrix
from benchmarks.learning import append_row, commit, read_rows, versions
from benchmarks.tables import markdown_table
from sb3_grpo import GRPO

CSV = pathlib.Path(__file__).with_name("zoo.csv")
SEEDS = (100, 101, 102)
#: Where settings were chosen again after those had been looked at: others, or more.
FRESH_SEEDS = {
    "CartPole-v1": (110, 111, 112),
    "Acrobot-v1": (110, 111, 112),
    "HalfCheetah-v5": (113, 114, 115),
    "LunarLander-v3": (104, 105, 106),
    "Pendulum-v1": (100, 101, 102, 110, 111, 112),
}
N_EVAL_EPISODES = 100
FIELDS = ["env", "seed", "settings_hash", "params", "timesteps", "eval_mean", "eval_std", "wall_clock", "commit", "versions"]

#: Mean evaluation that the shipped settings are to reach.
TARGETS = {
    "CartPole-v1": 500.0,
    "Pendulum-v1": -200.0,
    "Acrobot-v1": -90.0,
    "LunarLander-v3": 200.0,
    "HalfCheetah-v5": 5000.0,
}


class Run(NamedTuple):
    """
    :param env: Gymnasium environment
    :param seed: of the run
    :param params: overwritten hyperparameters, as the zoo takes them; none in what is reported
    """

    env: str
    seed: int
    params: tuple[str, ...] = ()

    def command(self, folder: str = "logs") -> list[str]:
        """
        :param folder: of the logs
        :return: arguments of the interpreter
        """
        command = ["-m", "sb3_grpo.zoo", "train", "--algo", "grpo", "--env", self.env, "--seed", str(self.seed)]
        command += ["--num-threads", "1", "--eval-freq", "-1", "--log-interval", "50", "-f", folder]
        return [*command, "-params", *self.params] if self.params else command

    def settings_hash(self) -> str:
        """:return: of the entry in the hyperparameter file, and of the defaults for what it leaves open"""
        entry = {**matrix.zoo_entry("grpo", self.env), "params": self.params}
        return matrix.Run("zoo", "grpo", self.env, int(entry["n_timesteps"]), self.seed, 0.0, entry).settings_hash()

    def is_in(self, row: dict[str, str]) -> bool:
        """
        :param row: of the CSV
        :return: whether it is of this run under the present settings
        """
        return (row["env"], row["seed"], row["settings_hash"]) == (self.env, str(self.seed), self.settings_hash())


def execute(run: Run) -> dict[str, Any]:
    """
    :param run: to make
    :return: a row of the CSV
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *run.command(folder)], capture_output=True, text=True)
        wall_clock = time.perf_counter() - began
        if done.returncode != 0:
            raise RuntimeError(f"{run} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        saved = pathlib.Path(folder, "grpo", f"{run.env}_1")
        mean, std = evaluate(saved, run.env, seed=10_000 + run.seed)
        timesteps = GRPO.load(saved / f"{run.env}.zip", device="cpu").num_timesteps
    return {
        "env": run.env,
        "seed": run.seed,
        "settings_hash": run.settings_hash(),
        "params": " ".join(run.params),
        "timesteps": timesteps,
        "eval_mean": f"{mean:.2f}",
        "eval_std": f"{std:.2f}",
        "wall_clock": f"{wall_clock:.1f}",
        "commit": commit(),
        "versions": versions(),
    }


def evaluate(saved: pathlib.Path, env_id: str, seed: int) -> tuple[float, float]:
    """
    :param saved: folder of a run of the zoo
    :param env_id: its environment
    :param seed: of the evaluation
    :return: mean and standard deviation of the returns of deterministic episodes of the last model
    """
    hyperparams, stats_path = get_saved_hyperparams(str(saved / env_id), test_mode=True)
    env = create_test_env(env_id, 1, stats_path, seed, should_render=False, hyperparams=hyperparams)
    mean, std = evaluate_policy(GRPO.load(saved / f"{env_id}.zip", device="cpu"), env, N_EVAL_EPISODES)
    env.close()
    assert isinstance(mean, float) and isinstance(std, float)
    return mean, std


def reported_seeds(env: str) -> tuple[int, ...]:
    """
    :param env: Gymnasium environment
    :return: seeds that are reported
    """
    return FRESH_SEEDS.get(env, SEEDS)


def table(rows: list[dict[str, str]], seeds: list[int] | None = None, params: tuple[str, ...] = ()) -> str:
    """
    :param rows: of the CSV
    :param seeds: to report, ``None`` for the environment's own
    :param params: overwritten hyperparameters
    :return: in Markdown, one line per environment that has rows under these settings
    """
    lines = []
    for env, target in TARGETS.items():
        found = [row for seed in seeds or reported_seeds(env) for row in rows if Run(env, seed, params).is_in(row)]
        if not found:
            continue
        returns = np.array([float(row["eval_mean"]) for row in found])
        command = " ".join(["python", *Run(env, reported_seeds(env)[0], params).command()])
        lines.append([
            env, f"{int(found[0]['timesteps']):,}", f"{target:g}", f"{(returns >= target).sum()} of {len(found)}",
            f"{returns.mean():.1f} ({', '.join(f'{value:.1f}' for value in returns)})",
            f"{np.median([float(row['wall_clock']) for row in found]):.0f}", f"`{command}`",
        ])  # fmt: skip
    return markdown_table(("environment", "steps", "must", "reached", "evaluation", "seconds", "command"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(TARGETS), metavar="ENV")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those that are reported")
    parser.add_argument("--params", nargs="+", default=[], metavar="KEY:VALUE", help="other hyperparameters, for trials")
    parser.add_argument("--csv", type=pathlib.Path, default=CSV)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.params and args.csv.resolve() == CSV:
        parser.error(f"--params {' '.join(args.params)} is a trial: pass another --csv than that of the report")

    rows = read_rows(args.csv)
    runs = [Run(env, seed, tuple(args.params)) for env in args.envs for seed in args.seeds or reported_seeds(env)]
    missing = [] if args.table else [run for run in runs if not any(run.is_in(row) for row in rows)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in tqdm(as_completed([pool.submit(execute, run) for run in missing]), total=len(missing), unit="run"):
            row = future.result()
            append_row(args.csv, row, FIELDS)
            tqdm.write(f"{row['env']} seed {row['seed']} {row['params']}: {row['eval_mean']} in {row['wall_clock']} s")
    print(table(read_rows(args.csv), args.seeds, tuple(args.params)))


if __name__ == "__main__":
    main()
