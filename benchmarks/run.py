"""
Run what is missing of a suite of `benchmarks/matrix.yml`.

    python -m benchmarks.run --dry-run                      # what is missing, with the hours it will take
    python -m benchmarks.run --jobs 2                       # run it; the same command resumes after an interruption
    python -m benchmarks.run --ray 10.0.0.1:6379            # run it on all machines of a Ray cluster
    python -m benchmarks.run --suite proof_million --envs Hopper-v5
    python -m benchmarks.run --arms default --envs Acrobot-v1 --seeds 0 1 --set gae_lambda=0.95 --results runs/try   # a trial

Models are made by rl-zoo3 from hyperparameter files: PPO by rl-zoo3's own code from the file that it ships, with nothing
changed but the budget. Every run has a process of its own with one thread. It leaves one row in the CSV of its
suite, and its learning curve (see `benchmarks.curves`). A row belongs to the settings that it was run with,
defaults of the class included: rows of other settings are ignored, and arms that come to the same settings share theirs.

With `--ray`, runs are tasks of a Ray cluster with one CPU each: `--ray` starts a cluster on this machine, and
`--ray 10.0.0.1:6379` uses that of `ray start --head` and `ray start --address=10.0.0.1:6379`. Each machine needs the same
checkout at the same path, with the same packages; the command runs in its root. Rows and curves are written here alone. A
machine that is lost costs the runs that were under way there, which are begun again on others.

`python -m benchmarks.report` makes tables and figures of the rows.
"""

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from typing import Any

import gymnasium as gym
import numpy as np
import rl_zoo3.import_envs  # noqa: F401  (registers what is installed, such as MiniGrid)
import torch as th
import yaml
from minatar.gym import register_envs as register_minatar
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization
from tqdm import tqdm

from benchmarks.curves import CurveStore, LearningCurve, TrainingCurve
from benchmarks.matrix import MATRIX, Run, expand, load_matrix
from benchmarks.references import returns
from benchmarks.results import FIELDS, RESULTS, append_row, provenance, read_rows, row_key, rows_file
from sb3_grpo.zoo import register
from sb3_grpo.zoo.experiment import GRPOExperimentManager

register_minatar()

#: Exit status of an interrupted command, by the shell's convention
INTERRUPTED = 130
#: Steps per second of a run about which nothing is known yet, for the estimate of a dry run
GUESSED_SPEED = 1000.0
#: Added to the seed of a run for the environment in which it is evaluated
EVALUATION_SEED = 10_000


@contextlib.contextmanager
def experiment(run: Run) -> Iterator[tuple[ExperimentManager, BaseAlgorithm]]:
    """
    :param run: Run to set up
    :return: Context with rl-zoo3's manager and the model that it made
    """
    register()
    if run.algo.startswith("sbx"):  # on JAX, an install of its own: `pip install sbx-rl`
        import sbx
        from rl_zoo3 import ALGOS

        ALGOS[run.algo] = getattr(sbx, run.algo.removeprefix("sbx").removeprefix("_").upper() or "PPO")
    manager_class = GRPOExperimentManager if run.algo == "grpo" else ExperimentManager
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, f"{run.algo}.yml")
        config.write_text(yaml.safe_dump({run.env: run.entry}), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            manager = manager_class(
                argparse.Namespace(), run.algo, run.env, folder, eval_freq=-1, seed=run.seed, verbose=0, device="cpu",
                log_interval=-2, config=str(config),
            )  # fmt: skip
            made = manager.setup_experiment()
        assert made is not None
        yield manager, made[0]


def execute(run: Run) -> tuple[dict[str, Any], LearningCurve | None]:
    """
    Train and evaluate.

    :param run: Run to execute
    :return: Its row, and the learning curve of a training
    :raises RuntimeError: If the training was interrupted
    """
    row: dict[str, Any] = {
        **{key: getattr(run, key) for key in ("arm", "env", "timesteps", "seed", "threshold")},
        "settings_hash": run.settings_hash(),
        **provenance(),
    }
    if run.algo == "random":
        totals = returns(run.env, lambda env: env.action_space.sample(), range(run.n_episodes))
        mean = f"{totals.mean():.4f}"
        return {**row, "auc": mean, "final": mean, "eval_mean": mean, "eval_std": f"{totals.std():.4f}"}, None

    # Networks this small gain nothing from more threads, and runs side by side would compete for cores
    th.set_num_threads(1)
    with experiment(run) as (manager, model):
        curve, removed = TrainingCurve(), VarianceRemoved()
        manager.callbacks.extend([curve, removed])
        began = time.perf_counter()
        manager.learn(model)
        wall_clock = time.perf_counter() - began
        if model.num_timesteps < run.timesteps:  # rl-zoo3 takes Ctrl-C for the end of a training
            raise RuntimeError(f"interrupted after {model.num_timesteps} of {run.timesteps} steps")
        eval_mean, eval_std = evaluate(manager, model, run.n_episodes, seed=EVALUATION_SEED + run.seed)
    held = curve.first_held(run.threshold)
    row = {
        **row,
        "auc": f"{curve.area(run.timesteps):.4f}",
        "final": f"{np.mean(curve.returns[-100:]):.4f}",
        "eval_mean": f"{eval_mean:.4f}",
        "eval_std": f"{eval_std:.4f}",
        "steps_to_threshold": "" if held is None else curve.steps[held],
        "seconds_to_threshold": "" if held is None else f"{curve.seconds[held]:.1f}",
        "wall_clock": f"{wall_clock:.1f}",
        "steps_per_second": f"{model.num_timesteps / wall_clock:.0f}",
        "variance_removed": removed.mean(),
    }
    return row, LearningCurve(curve.steps, curve.returns)


class VarianceRemoved(BaseCallback):
    """Records the share of the advantages' variance that the relative term removes in each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        metrics = getattr(self.locals["rollout_buffer"], "metrics", {})
        if "train/relative_variance_removed" in metrics:
            self.shares.append(metrics["train/relative_variance_removed"])

    def mean(self) -> str:
        """:return: Mean over the training as it is in the CSV, nothing if there was no relative term"""
        return f"{np.nanmean(self.shares):.4f}" if self.shares else ""


def evaluate(manager: ExperimentManager, model: BaseAlgorithm, n_episodes: int, seed: int) -> tuple[float, float]:
    """
    :param manager: Manager that made the model
    :param model: Model to evaluate
    :param n_episodes: Number of episodes
    :param seed: Seed of the environment
    :return: Mean and standard deviation of the returns of deterministic episodes
    """
    env: VecEnv = manager.create_envs(1, eval_env=True, no_log=True)
    if (training_env := model.get_env()) is not None:
        sync_envs_normalization(training_env, env)
    env.seed(seed)
    mean, std = evaluate_policy(model, env, n_episodes)
    env.close()
    assert isinstance(mean, float) and isinstance(std, float)
    return mean, std


def execute_apart(run: Run) -> tuple[dict[str, Any], LearningCurve | None]:
    """
    Call :func:`execute` in a process of its own: no state is shared, and a crash takes down one run only.

    :param run: Run to execute
    :return: Its row, and the learning curve of a training
    """
    # The server imports everything once, which takes as long as a short training, and has run nothing when it forks
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["benchmarks.results", "rl_zoo3.import_envs", "rl_zoo3.exp_manager"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(execute, run).result()


class RayExecutor(Executor):
    """
    Makes each call in a task of a Ray cluster, with one CPU and a process of its own. A call whose machine is lost is made
    again on another; a call that raises an error is not.

    :param address: Address of the cluster, empty for one on this machine
    """

    def __init__(self, address: str):
        from sb3_grpo.distributed import connect

        connect(address or None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        import ray

        task: Any = ray.remote(num_cpus=1, max_calls=1, max_retries=3, retry_exceptions=False)(fn)
        return task.remote(*args, **kwargs).future()


def execute_in_task(run: Run) -> tuple[dict[str, Any], LearningCurve | None]:
    """
    Call :func:`execute` in a task of Ray.

    :param run: Run to execute
    :return: Its row, and the learning curve of a training
    """
    from benchmarks.run import execute  # of the worker's checkout, also where this module is the script

    return execute(run)


def execute_all(runs: list[Run], csv: pathlib.Path, jobs: int, ray_address: str | None = None) -> int:
    """
    :param runs: Runs to execute
    :param csv: File for their rows, beside which the curves go. This process alone writes them, the curve first
    :param jobs: Runs side by side
    :param ray_address: Address of a Ray cluster to run them on, empty for one on this machine; ``None`` for no Ray
    :return: Exit status: 0 if nothing failed
    """
    failures = 0
    pool = ThreadPoolExecutor(jobs) if ray_address is None else RayExecutor(ray_address)
    try:
        futures = {pool.submit(execute_apart if ray_address is None else execute_in_task, run): run for run in runs}
        for future in tqdm(as_completed(futures), total=len(runs), unit="run"):
            run = futures[future]
            try:
                row, curve = future.result()
            except Exception as error:
                failures += 1
                tqdm.write(f"FAILED: {run}: {error!r}", file=sys.stderr)
                continue
            if curve is not None:
                CurveStore(csv).save(run.key(), curve)
            append_row(csv, row, FIELDS)
            tqdm.write(f"{run}: area {row['auc']}, evaluation {row['eval_mean']}")
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        print("interrupted: what was under way is lost, the same command resumes", file=sys.stderr)
        return INTERRUPTED
    pool.shutdown()
    print(f"{len(runs) - failures} runs done, {failures} failed")
    return 1 if failures else 0


def estimated_hours(runs: list[Run], rows: list[dict[str, str]]) -> float:
    """
    :param runs: Runs to do
    :param rows: Rows of finished runs
    :return: Hours on one core: at the median speed of finished runs of the arm there, or of any arm there, or at a guess
    """

    def speed(run: Run) -> float:
        timed = [row for row in rows if row["env"] == run.env and row["steps_per_second"]]
        timed = [row for row in timed if row["arm"] == run.arm] or timed
        return float(np.median([float(row["steps_per_second"]) for row in timed])) if timed else GUESSED_SPEED

    return sum(run.timesteps / speed(run) for run in runs) / 3600


def parse_setting(text: str) -> tuple[str, Any]:
    """
    :param text: ``KEY=VALUE``
    :return: Key, and value as a Python literal or, where it is none, as the text itself
    :raises argparse.ArgumentTypeError: If there is no value
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value: pass KEY=VALUE, for example gae_lambda=0.95.")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def main() -> int:
    """:return: Exit status: 0 if nothing failed"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="proof")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="arms of the suite")
    parser.add_argument("--envs", nargs="+", default=[], metavar="ENV")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="in the place of those of the suite")
    parser.add_argument("--set", nargs="+", type=parse_setting, default=[], metavar="KEY=VALUE", help="for trials")
    parser.add_argument("--matrix", type=pathlib.Path, default=MATRIX, help="YAML file")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on a Ray cluster, one run per CPU; without ADDRESS, one on this machine",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the runs and the estimated hours, run nothing")
    args = parser.parse_args()
    if args.set and args.results.resolve() == RESULTS.resolve():
        parser.error("--set makes a trial: pass another folder than that of the report with --results.")
    matrix = load_matrix(args.matrix)
    try:
        runs = expand(matrix, args.suite, args.arms, args.envs, args.seeds, dict(args.set))
    except ValueError as error:
        parser.error(str(error))
    csv = rows_file(matrix, args.suite, args.results)
    rows = read_rows(csv)
    done = {row_key(row) for row in rows}
    missing = list({run.key(): run for run in runs if run.key() not in done}.values())
    if args.dry_run:
        for run in missing:
            print(f"{run}: {json.dumps(run.entry, sort_keys=True)}")
        hours = estimated_hours(missing, rows)
        print(f"{len(missing)} of {len(runs)} runs to do, about {hours:.1f} hours on one core, {hours / args.jobs:.1f} here")
        return 0
    return execute_all(missing, csv, args.jobs, args.ray)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends the processes of the runs as Ctrl-C does
    gym.logger.min_level = gym.logger.ERROR
    sys.exit(main())
