"""
The comparison with PPO: every arm of a suite in `benchmarks/matrix.yml` on each of its environments, for each seed.

    python -m benchmarks.run --dry-run                      # what is missing, with the hours it will take
    python -m benchmarks.run --jobs 2                       # do it; interrupted, the same command goes on
    python -m benchmarks.run --suite full --envs Hopper-v5
    python -m benchmarks.run --speed --arms ppo grpo        # seconds per step, in turns, on a quiet machine
    python -m benchmarks.run --arms grpo --envs Acrobot-v1 --seeds 0 1 --set gae_lambda=0.95 --results runs/try   # a trial

Models are made by rl-zoo3 from hyperparameter files: PPO by rl-zoo3's own code from the file that it ships, read at run time
and changed in nothing but the budget. Every run has a process of its own with one thread. It leaves one row in `runs.csv` and
its learning curve, the step, return and second of each training episode, in `curves/`. A row belongs to the settings it was
run with, defaults of the class included: those under other settings are ignored, and those of arms that come to the same
settings are shared.

`python -m benchmarks.report` makes tables and pictures of the rows.
"""

import argparse
import ast
import contextlib
import copy
import functools
import hashlib
import importlib.resources
import io
import json
import multiprocessing
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import rl_zoo3.import_envs  # noqa: F401  (registers what is installed, MiniGrid for one)
import torch as th
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, sync_envs_normalization
from tqdm import tqdm

from benchmarks.curves import N_EVAL_EPISODES, TrainingCurve
from benchmarks.learning import (
    INTERRUPTED_STATUS,
    abandon,
    append_row,
    buffer_settings,
    commit,
    defaults,
    random_return,
    read_rows,
    versions,
    without_neutral,
)
from benchmarks.timing import take_turns
from sb3_grpo import GRPO
from sb3_grpo.zoo import register
from sb3_grpo.zoo.experiment import HYPERPARAMS, GRPOExperimentManager

MATRIX = pathlib.Path(__file__).with_name("matrix.yml")
RESULTS = pathlib.Path(__file__).with_name("results")
#: Of the random control. All else is averaged over seeds.
N_RANDOM_EPISODES = 100
#: Steps per second of a run of which nothing is known yet, for the estimate of a dry run.
GUESSED_SPEED = 1000.0

FIELDS = [
    "arm", "env", "timesteps", "seed", "settings_hash", "auc", "final", "eval_mean", "eval_std", "threshold",
    "steps_to_threshold", "seconds_to_threshold", "wall_clock", "steps_per_second", "commit", "versions",
]  # fmt: skip
SPEED_FIELDS = ["session", "arm", "env", "settings_hash", "steps", "seconds_per_step", "commit", "versions"]
#: Set by Ctrl-C and `kill`.
INTERRUPTED = threading.Event()
#: Turns of each arm when speed is measured, and steps in each, at least.
N_TURNS = 5
SHORTEST_TURN = 4096


@dataclass(frozen=True)
class Run:
    """
    One cell of the matrix.

    :param arm: name of the way to train
    :param algo: ``grpo``, ``ppo`` or ``random``
    :param env: Gymnasium environment
    :param timesteps: budget
    :param seed: of the run
    :param threshold: mean return of 20 training episodes whose first step and second are of interest
    :param entry: hyperparameters, as in a file of the zoo
    """

    arm: str
    algo: str
    env: str
    timesteps: int
    seed: int
    threshold: float
    entry: dict[str, Any] = field(default_factory=dict)

    def settings_hash(self) -> str:
        """:return: eight characters that change with whatever determines the outcome, save for seed and versions"""
        settings = self.entry
        if self.algo == "ppo":
            settings = {**defaults(PPO), **settings}
        elif self.algo == "grpo":
            settings = {**defaults(GRPO), **settings}
            buffer = buffer_settings(settings)
            settings = dict(without_neutral({**settings, "rollout_buffer_kwargs": without_neutral(buffer)}))
        what = (self.algo, self.env, self.timesteps, sorted(settings.items()))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:8]

    def key(self) -> tuple[str, str, str]:
        """:return: by which its row is known: environment, seed and hash, as in the CSV"""
        return self.env, str(self.seed), self.settings_hash()

    def curve_path(self, results: pathlib.Path) -> pathlib.Path:
        """
        :param results: folder
        :return: where the learning curve is
        """
        return results / "curves" / ("-".join([self.algo, *self.key()]) + ".npz")


def row_key(row: dict[str, str]) -> tuple[str, str, str]:
    """
    :param row: of the CSV
    :return: what :meth:`Run.key` is of its run
    """
    return row["env"], row["seed"], row["settings_hash"]


def load_matrix(path: pathlib.Path = MATRIX) -> dict[str, Any]:
    """
    :param path: of a matrix
    :return: its content
    """
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache
def hyperparameter_file(algo: str) -> dict[str, dict[str, Any]]:
    """
    :param algo: ``grpo`` or ``ppo``
    :return: the entries of this package's file, or of that of the installed rl-zoo3
    """
    file = HYPERPARAMS if algo == "grpo" else importlib.resources.files("rl_zoo3") / "hyperparams" / f"{algo}.yml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def zoo_entry(algo: str, env: str) -> dict[str, Any]:
    """
    :param algo: ``grpo`` or ``ppo``
    :param env: name of an entry
    :return: the entry, a copy
    """
    return copy.deepcopy(hyperparameter_file(algo)[env])


def expand(
    matrix: dict[str, Any],
    suite: str,
    arms: list[str] | None = None,
    envs: list[str] | None = None,
    seeds: list[int] | None = None,
    changes: dict[str, Any] | None = None,
) -> list[Run]:
    """
    :param matrix: from :func:`load_matrix`
    :param suite: name of one of its suites
    :param arms: of the suite, all of them by default
    :param envs: of the suite, all of them by default
    :param seeds: instead of the suite's
    :param changes: of the arms' settings, for trials
    :return: what to run: seed by seed, so that an interrupted matrix has something of everything, and arm by arm within an
        environment, so that what is compared is run close together; first of all the random controls
    :raises ValueError: if a name is not in the matrix
    """
    if suite not in matrix["suites"]:
        raise ValueError(f"Unknown suite {suite!r}: choose from {', '.join(matrix['suites'])}.")
    chosen = matrix["suites"][suite]
    for what, names, known in (("arm", arms, chosen["arms"]), ("environment", envs, chosen["timesteps"])):
        for name in names or []:
            if name not in known:
                raise ValueError(f"Unknown {what} {name!r} in suite {suite!r}: choose from {', '.join(known)}.")
    arms, envs = arms or list(chosen["arms"]), envs or list(chosen["timesteps"])
    thresholds = {env: float(matrix["environments"][env]["threshold"]) for env in envs}
    runs = [Run("random", "random", env, 0, 0, thresholds[env]) for env in envs]
    more_seeds = chosen.get("more_seeds", {})
    for seed in seeds or sorted({*chosen["seeds"], *(seed for each in more_seeds.values() for seed in each)}):
        for env in envs:
            if seeds is None and seed not in chosen["seeds"] and seed not in more_seeds.get(env, []):
                continue
            for arm in arms:
                entry = entry_of(matrix, arm, env, chosen["timesteps"][env], changes)
                algo = matrix["arms"][arm]["algo"]
                runs.append(Run(arm, algo, env, int(chosen["timesteps"][env]), seed, thresholds[env], entry))
    return runs


def entry_of(
    matrix: dict[str, Any], arm: str, env: str, timesteps: int, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    :param matrix: from :func:`load_matrix`
    :param arm: name of one of its arms
    :param env: name of one of its environments
    :param timesteps: budget
    :param changes: of the arm's settings
    :return: the hyperparameters of the arm there, as in a file of the zoo
    """
    settings, about = matrix["arms"][arm], matrix["environments"][env]
    if settings["entry"] == "zoo":
        entry = zoo_entry(settings["algo"], about.get(f"{settings['algo']}_entry", env))
    else:
        entry = {"policy": "MlpPolicy", **{key: about[key] for key in ("env_wrapper",) if key in about}}
    entry = {**entry, "n_timesteps": timesteps}
    for key, value in (*settings.get("set", {}).items(), *(changes or {}).items()):
        both_mappings = isinstance(entry.get(key), dict) and isinstance(value, dict)
        entry[key] = {**entry[key], **value} if both_mappings else value
    return entry


@contextlib.contextmanager
def experiment(run: Run) -> Iterator[tuple[ExperimentManager, BaseAlgorithm]]:
    """
    :param run: to set up
    :return: context with rl-zoo3's manager, and the model that it made
    """
    register()
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


def train(manager: ExperimentManager, model: BaseAlgorithm, callback: BaseCallback, timesteps: int) -> None:
    """
    :param manager: that made the model
    :param model: to train
    :param callback: that watches, and may stop it
    :param timesteps: that it has to reach
    :raises RuntimeError: if it was interrupted before
    """
    manager.callbacks.append(callback)
    manager.learn(model)
    if model.num_timesteps < timesteps:
        # rl-zoo3 takes Ctrl-C for the end of a training
        raise RuntimeError(f"interrupted after {model.num_timesteps} of {timesteps} steps")


def execute(run: Run, results: pathlib.Path) -> dict[str, Any]:
    """
    Train, evaluate, and save the learning curve.

    :param run: to execute
    :param results: folder
    :return: a row of the CSV
    """
    row: dict[str, Any] = {
        **{key: getattr(run, key) for key in ("arm", "env", "timesteps", "seed", "threshold")},
        "settings_hash": run.settings_hash(),
        "commit": commit(),
        "versions": versions(),
    }
    if run.algo == "random":
        mean = f"{random_return(run.env, N_RANDOM_EPISODES):.4f}"
        return {**row, "auc": mean, "final": mean, "eval_mean": mean}

    # More threads only wait for one another on networks this small, and runs side by side would fight for cores
    th.set_num_threads(1)
    with experiment(run) as (manager, model):
        curve = TrainingCurve()
        began = time.perf_counter()
        train(manager, model, curve, run.timesteps)
        wall_clock = time.perf_counter() - began
        eval_mean, eval_std = evaluate(manager, model, seed=10_000 + run.seed)
    held = curve.first_held(run.threshold)
    path = run.curve_path(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        steps=np.array(curve.steps, dtype=np.int32),
        returns=np.array(curve.returns),
        seconds=np.array(curve.seconds, dtype=np.float32),
    )
    return {
        **row,
        "auc": f"{curve.area(run.timesteps):.4f}",
        "final": f"{np.mean(curve.returns[-100:]):.4f}",
        "eval_mean": f"{eval_mean:.4f}",
        "eval_std": f"{eval_std:.4f}",
        "steps_to_threshold": "" if held is None else curve.steps[held],
        "seconds_to_threshold": "" if held is None else f"{curve.seconds[held]:.1f}",
        "wall_clock": f"{wall_clock:.1f}",
        "steps_per_second": f"{model.num_timesteps / wall_clock:.0f}",
    }


def evaluate(manager: ExperimentManager, model: BaseAlgorithm, seed: int) -> tuple[float, float]:
    """
    :param manager: that made the model
    :param model: to evaluate
    :param seed: of the evaluation
    :return: mean and standard deviation of the returns of deterministic episodes
    """
    env: VecEnv = manager.create_envs(1, eval_env=True, no_log=True)
    if (training_env := model.get_env()) is not None:
        sync_envs_normalization(training_env, env)
    env.seed(seed)
    mean, std = evaluate_policy(model, env, N_EVAL_EPISODES)
    env.close()
    assert isinstance(mean, float) and isinstance(std, float)
    return mean, std


def execute_apart(run: Run, results: pathlib.Path) -> dict[str, Any]:
    """
    :func:`execute` in a process of its own: no state is shared, and a crash takes down one run only. A run that fails is tried
    once more.

    :param run: to execute
    :param results: folder
    :return: a row of the CSV
    :raises RuntimeError: if it fails twice, or the command was interrupted
    """
    for attempt in (1, 2):
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                return pool.submit(execute, run, results).result()
        except Exception as error:
            if INTERRUPTED.is_set():
                raise RuntimeError("interrupted") from error
            tqdm.write(f"FAILED (attempt {attempt} of 2): {describe(run)}: {error!r}", file=sys.stderr)
            failure = error
    raise RuntimeError(f"{describe(run)} failed twice") from failure


def measure_speed(runs: list[Run]) -> list[dict[str, Any]]:
    """
    Training in turns, each of them whole rollouts of every arm: what the machine does besides slows all arms alike.

    :param runs: to compare, of one environment
    :return: a row for each turn
    """
    th.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        models = {run.arm: stack.enter_context(experiment(run))[1] for run in runs}
        rollouts = [model.n_steps * model.n_envs for model in models.values()]  # type: ignore[attr-defined]
        steps = max(*rollouts, SHORTEST_TURN)

        def train(model: BaseAlgorithm) -> None:
            model.learn(steps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]

        turns = take_turns({arm: functools.partial(train, model) for arm, model in models.items()}, N_TURNS)
        taken = {arm: model.num_timesteps / (N_TURNS + 1) for arm, model in models.items()}
    session = f"{time.time():.0f}"
    return [
        {
            "session": session,
            "arm": run.arm,
            "env": run.env,
            "settings_hash": run.settings_hash(),
            "steps": round(taken[run.arm]),
            "seconds_per_step": f"{seconds / taken[run.arm]:.4g}",
            "commit": commit(),
            "versions": versions(),
        }
        for run in runs
        for seconds in turns[run.arm]
    ]


def describe(run: Run) -> str:
    """
    :param run: to describe
    :return: in one line
    """
    return f"{run.arm} {run.env} {run.timesteps:,} steps, seed {run.seed}"


def estimated_hours(runs: list[Run], rows: list[dict[str, str]]) -> float:
    """
    :param runs: to do
    :param rows: of finished runs
    :return: hours on one core: at the median speed of finished runs of the arm there, or of any arm there, or at a guess
    """

    def speed(run: Run) -> float:
        timed = [row for row in rows if row["env"] == run.env and row["steps_per_second"]]
        timed = [row for row in timed if row["arm"] == run.arm] or timed
        return float(np.median([float(row["steps_per_second"]) for row in timed])) if timed else GUESSED_SPEED

    return sum(run.timesteps / speed(run) for run in runs) / 3600


def parse_value(text: str) -> Any:
    """
    :param text: of a setting on the command line
    :return: a Python literal, or the text itself where it is none
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_arguments() -> argparse.Namespace:
    """:return: the command line"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="short")
    parser.add_argument("--arms", nargs="+", metavar="ARM")
    parser.add_argument("--envs", nargs="+", metavar="ENV")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those that are reported")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other hyperparameters, for trials")
    parser.add_argument("--matrix", type=pathlib.Path, default=MATRIX, help="YAML file")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--speed", action="store_true", help="measure seconds per step instead, into speed.csv")
    parser.add_argument("--dry-run", action="store_true", help="print the matrix and the estimated hours, run nothing")
    args = parser.parse_args()
    for assignment in args.set:
        if "=" not in assignment:
            parser.error(f"--set {assignment}: pass KEY=VALUE, as --set gae_lambda=0.95.")
    args.changes = {key: parse_value(value) for key, _, value in (each.partition("=") for each in args.set)}
    if args.changes and args.results.resolve() == RESULTS.resolve():
        parser.error(f"--set {' '.join(args.set)} is a trial: pass another folder than that of the report with --results.")
    return args


def run_speed(runs: list[Run], csv: pathlib.Path) -> int:
    """
    :param runs: of a suite; what has no row yet is measured, environment by environment, with the first seed
    :param csv: for the rows
    :return: exit status: 0
    """
    done = {(row["env"], row["settings_hash"]) for row in read_rows(csv)}
    by_env: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run.algo != "random":
            by_env.setdefault(run.env, {}).setdefault(run.arm, run)
    for env, arms in tqdm(by_env.items(), unit="environment"):
        if any((env, run.settings_hash()) not in done for run in arms.values()):
            for row in measure_speed(list(arms.values())):
                append_row(csv, row, SPEED_FIELDS)
    return 0


def main() -> int:
    """:return: exit status: 0 if nothing failed"""
    args = parse_arguments()
    csv = args.results / "runs.csv"
    rows = read_rows(csv)
    try:
        runs = expand(load_matrix(args.matrix), args.suite, args.arms, args.envs, args.seeds, args.changes)
    except ValueError as error:
        sys.exit(str(error))
    done = {row_key(row) for row in rows}
    missing = list({run.key(): run for run in runs if run.key() not in done}.values())
    if args.dry_run:
        for run in missing:
            print(f"{describe(run)}: {json.dumps(run.entry, sort_keys=True)}")
        hours = estimated_hours(missing, rows)
        print(f"{len(missing)} of {len(runs)} runs to do, about {hours:.1f} hours on one core, {hours / args.jobs:.1f} here")
        return 0
    if args.speed:
        return run_speed(runs, args.results / "speed.csv")
    failures = 0
    pool = ThreadPoolExecutor(args.jobs)
    try:
        futures = [pool.submit(execute_apart, run, args.results) for run in missing]
        for future in tqdm(as_completed(futures), total=len(missing), unit="run"):
            try:
                row = future.result()
            except RuntimeError as error:
                failures += 1
                tqdm.write(f"FAILED: {error}: {error.__cause__!r}", file=sys.stderr)
                continue
            append_row(csv, row, FIELDS)
            tqdm.write(f"{row['arm']} {row['env']} seed {row['seed']}: auc {row['auc']}, evaluation {row['eval_mean']}")
    except KeyboardInterrupt:
        INTERRUPTED.set()
        abandon(pool)
        return INTERRUPTED_STATUS
    pool.shutdown()
    print(f"{len(missing) - failures} runs done, {failures} failed, {len(runs) - len(missing)} were there already")
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends the processes of the runs as Ctrl-C does
    gym.logger.min_level = gym.logger.ERROR
    sys.exit(main())
