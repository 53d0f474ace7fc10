"""
Measure speed and memory, on one torch thread.

    python -m benchmarks.speed throughput               # CartPole-v1, 8 envs x 128 steps, kernel buffer
    python -m benchmarks.speed throughput --env image --n-envs 4 --policy CnnPolicy --n-steps 64 --batch-size 64 --n-epochs 4
    python -m benchmarks.speed scaling                  # with the number of environments, and with the size of a rollout
    python -m benchmarks.speed memory                   # peak memory on images
    python -m benchmarks.speed turns                    # seconds per step of the arms of a suite

- `throughput`: GRPO, PPO and the bare work (see `benchmarks.bound`) take turns in one process, with the same environment,
  rollout, minibatches, epochs and network; a turn is a few rollouts and updates. Printed are medians over turns, and the
  median of the ratios within each round of turns with its interval. PPO is SB3's as it comes, whose Adam is not fused;
  `--fused-ppo` gives it the one that GRPO has. sbx's PPO, on JAX, takes part where it is installed (`pip install sbx-rl`); the
  first turns, in which JAX compiles, do not count. The breakdown comes from further turns with a stopwatch around each part,
  whose overhead is in the figures.
- `scaling`: steps per second of GRPO and PPO for 1 to 64 environments with rollouts of 1024 transitions, and the seconds in
  which each rollout buffer turns a rollout of Pendulum-v1 into an update, which should not grow per transition. The time is
  that of this thread alone.
- `memory`: peak resident memory of GRPO and of PPO, each in a process of its own.
- `turns`: trainings of a suite of `benchmarks/matrix.yml` take turns, for `benchmarks.seconds`.
"""

import argparse
import contextlib
import functools
import importlib.util
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from benchmarks.bound import LeanActor
from benchmarks.matrix import Run, expand, load_matrix
from benchmarks.results import RESULTS, append_row, provenance, read_rows
from benchmarks.run import experiment
from benchmarks.statistics import median
from benchmarks.timing import Stopwatch, take_turns
from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS

#: SB3's algorithms on JAX, if they are installed
SBX = importlib.util.find_spec("sbx") is not None
ALGORITHMS: dict[str, type[GRPO] | type[PPO]] = {"GRPO": GRPO, "PPO": PPO}
THROUGHPUT_FIELDS = [
    "env", "n_envs", "n_steps", "batch_size", "n_epochs", "buffer", "fused_ppo", "pairs", "grpo", "ppo", "bound", "over_ppo",
    "over_ppo_low", "over_ppo_high", "over_bound", "over_bound_low", "over_bound_high", "fit_share", "commit", "versions",
    "sbx", "over_sbx", "over_sbx_low", "over_sbx_high",
]  # fmt: skip
TURNS_FIELDS = ["session", "arm", "env", "settings_hash", "steps", "seconds_per_step", "commit", "versions"]
SCALING_FIELDS = ["curve", "what", "x", "y"]
#: Turns of each arm of a suite, and the fewest steps in each
N_TURNS = 5
SHORTEST_TURN = 4096


class Setting(NamedTuple):
    """
    Settings that GRPO, PPO and the bare work have in common.

    :param env: Gymnasium environment, or ``"image"`` for SB3's fake one with 84 x 84 pixels
    :param policy: SB3's name of the policy
    :param n_envs: Environments side by side
    :param n_steps: Steps per environment and rollout
    :param batch_size: Minibatch size
    :param n_epochs: Passes over a rollout
    :param buffer: GRPO's rollout buffer
    :param fused_ppo: Whether PPO gets the fused Adam that GRPO has, in the place of SB3's default
    :param n_channels: Channels of the images
    """

    env: str = "CartPole-v1"
    policy: str = "MlpPolicy"
    n_envs: int = 8
    n_steps: int = 128
    batch_size: int = 256
    n_epochs: int = 10
    buffer: str = "kernel"
    fused_ppo: bool = False
    n_channels: int = 1

    def make_env(self) -> VecEnv:
        """:return: The environments, seeded"""
        if self.env != "image":
            return make_vec_env(self.env, self.n_envs, seed=0)
        images = functools.partial(FakeImageEnv, screen_height=84, screen_width=84, n_channels=self.n_channels)
        return make_vec_env(images, self.n_envs, seed=0)

    @property
    def rollout(self) -> int:
        """Transitions per rollout."""
        return self.n_envs * self.n_steps


IMAGES = Setting(env="image", policy="CnnPolicy", n_epochs=1, n_channels=4)


def make_model(algorithm: type[OnPolicyAlgorithm], setting: Setting) -> OnPolicyAlgorithm:
    """
    :param algorithm: GRPO, PPO, or sbx's PPO
    :param setting: Setting of the comparison
    :return: A model
    """
    kwargs: dict[str, Any] = {}
    if algorithm is GRPO:
        # SB3's images are random, whatever the seed
        kwargs = dict(rollout_buffer_class=setting.buffer, share_starts=setting.env != "image")
    elif setting.fused_ppo:
        kwargs = dict(policy_kwargs=dict(optimizer_kwargs=dict(eps=1e-5, fused=True)))
    kwargs.update(n_steps=setting.n_steps, batch_size=setting.batch_size, n_epochs=setting.n_epochs)
    return algorithm(setting.policy, setting.make_env(), seed=0, device="cpu", **kwargs)


def training(model: BaseAlgorithm, timesteps: int) -> Callable[[], object]:
    """
    :param model: A model
    :param timesteps: Steps of a turn
    :return: A function that trains it further, without logs
    """
    return functools.partial(model.learn, timesteps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]


def breakdown(model: GRPO, timesteps: int) -> dict[str, float]:
    """
    :param model: Model to train further
    :param timesteps: Steps to train
    :return: Share of the time by part
    """
    watch = Stopwatch()
    assert model.env is not None
    with (
        watch.around("environment", model.env, "step"),
        watch.around("advantages", model.rollout_buffer, "finish_rollout"),
        watch.around("collecting", model, "collect_rollouts"),
        watch.around("update", model, "train"),
    ):
        began = time.perf_counter()
        training(model, timesteps)()
        total = time.perf_counter() - began
    shares = {part: seconds / total for part, seconds in watch.seconds.items()}
    shares["acting and storing"] = shares.pop("collecting") - shares["environment"] - shares["advantages"]
    return {**shares, "rest": 1.0 - sum(shares.values())}


def compare_speed(setting: Setting, pairs: int, rollouts: int) -> tuple[dict[str, Any], dict[str, float]]:
    """
    :param setting: Setting of the comparison
    :param pairs: Turns of each contestant
    :param rollouts: Rollouts per turn
    :return: A row of ``throughput.csv``, and the breakdown
    """
    timesteps = rollouts * setting.rollout
    grpo, ppo = make_model(GRPO, setting), make_model(PPO, setting)
    assert isinstance(grpo, GRPO)
    sizes = setting.n_steps, setting.batch_size, setting.n_epochs
    lean = LeanActor(setting.make_env(), setting.policy == "CnnPolicy", *sizes)
    contestants = dict(grpo=training(grpo, timesteps), ppo=training(ppo, timesteps), bound=lambda: lean.learn(timesteps))
    if SBX:
        import sbx

        contestants["sbx"] = training(make_model(sbx.PPO, setting), timesteps)
    seconds = take_turns(contestants, pairs)
    shares = breakdown(grpo, pairs * timesteps)
    row = {
        **dict.fromkeys(THROUGHPUT_FIELDS, ""),
        **{name: value for name, value in setting._asdict().items() if name in THROUGHPUT_FIELDS},
        "pairs": pairs,
        **{name: round(timesteps / float(np.median(turns))) for name, turns in seconds.items()},
        "fit_share": f"{shares['advantages']:.4f}",
        **provenance(),
    }
    for other in [name for name in seconds if name != "grpo"]:
        for suffix, value in zip(("", "_low", "_high"), median(seconds[other] / seconds["grpo"]), strict=True):
            row[f"over_{other}{suffix}"] = f"{value:.3f}"
    return row, shares


def throughput(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    row, shares = compare_speed(setting_of(args), args.pairs, args.rollouts)
    print(", ".join(f"{name} {row[name]}" for name in THROUGHPUT_FIELDS[:8]))
    print(f"GRPO  {row['grpo']:>8,} steps/s")
    for other in [name for name in ("ppo", "sbx", "bound") if row[name]]:
        over, low, high = (row[f"over_{other}{suffix}"] for suffix in ("", "_low", "_high"))
        print(f"{other:<5} {row[other]:>8,} steps/s, GRPO over it {over} ({low} to {high})")
    for part, share in shares.items():
        print(f"  {part:<22}{share:>7.1%}")
    append_row(args.results / "throughput.csv", row, THROUGHPUT_FIELDS)


def scaling_points(rounds: int, largest: int) -> Iterator[tuple[str, str, int, float]]:
    """
    :param rounds: Turns of each algorithm, and rollouts of each buffer
    :param largest: Transitions of the largest rollout
    :return: Rows of ``scaling.csv``
    """
    for n_envs in (1, 2, 4, 8, 16, 32, 64):
        setting = Setting(n_envs=n_envs, n_steps=1024 // n_envs)
        contestants = {name: training(make_model(each, setting), 1024) for name, each in ALGORITHMS.items()}
        turns = take_turns(contestants, rounds, clock=time.thread_time)
        for name, seconds in turns.items():
            yield "steps per second", name, n_envs, 1024 / float(np.median(seconds))
    n_transitions = 1024
    while n_transitions <= largest:
        for buffer in BUFFERS:
            setting = Setting("Pendulum-v1", n_steps=n_transitions // 8, batch_size=n_transitions, n_epochs=1, buffer=buffer)
            model, watch = make_model(GRPO, setting), Stopwatch(time.thread_time)
            with watch.around("finish", model.rollout_buffer, "finish_rollout"):
                training(model, rounds * n_transitions)()
            yield "seconds per rollout", buffer, n_transitions, watch.seconds["finish"] / rounds
        n_transitions *= 4


def draw_scaling(points: list[tuple[str, str, int, float]], path: pathlib.Path) -> None:
    """
    :param points: Rows of ``scaling.csv``
    :param path: File of the figure
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    from benchmarks.figures import STYLE, save

    labels = {"steps per second": "environments", "seconds per rollout": "transitions"}
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(7.35, 4.2))
        for axis, (curve, x_label) in zip(axes, labels.items(), strict=True):
            for what in dict.fromkeys(point[1] for point in points if point[0] == curve):
                own = [point for point in points if point[:2] == (curve, what)]
                axis.plot([point[2] for point in own], [point[3] for point in own], marker="o", label=what)
            axis.set(xscale="log", yscale="log", xlabel=x_label, ylabel=curve)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(LogLocator(subs=(1, 2, 5)))
                side.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
                side.set_minor_formatter(NullFormatter())
            axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        save(figure, path)


def scaling(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    points = []
    csv = args.results / "scaling.csv"
    csv.unlink(missing_ok=True)
    for point in tqdm(scaling_points(args.rounds, args.largest), unit="point"):
        curve, what, x, y = point
        points.append(point)
        append_row(csv, {"curve": curve, "what": what, "x": x, "y": f"{y:.6g}"}, SCALING_FIELDS)
        per = f", {1e6 * y / x:.2f} us a transition" if curve == "seconds per rollout" else ""
        tqdm.write(f"{what:>13} {x:>7} {curve}: {y:.4g}{per}")
    draw_scaling(points, args.results / "scaling.svg")


def peak_memory(algorithm: str, setting: Setting, rollouts: int) -> float:
    """
    Train in this process, which must be a fresh one: a peak does not go down again.

    :param algorithm: ``"GRPO"`` or ``"PPO"``
    :param setting: Setting of the comparison
    :param rollouts: Rollouts to train on
    :return: Highest resident memory of the process, in MB
    """
    th.set_num_threads(1)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the process that it was made from
    make_model(ALGORITHMS[algorithm], setting).learn(rollouts * setting.rollout)
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


def compare_memory(setting: Setting, rollouts: int) -> dict[str, float]:
    """
    :param setting: Setting of the comparison
    :param rollouts: Rollouts to train on
    :return: See :func:`peak_memory`, for each algorithm
    """
    context = multiprocessing.get_context("spawn")
    memory = {}
    for algorithm in ALGORITHMS:
        with context.Pool(1) as pool:
            memory[algorithm] = pool.apply(peak_memory, (algorithm, setting, rollouts))
    return memory


def memory(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    for algorithm, peak in compare_memory(setting_of(args), args.rollouts).items():
        print(f"{algorithm:<5} peak {peak:7.1f} MB")


def turns_of(runs: list[Run]) -> list[dict[str, Any]]:
    """
    Train in turns of whole rollouts of every arm. The time is that of this thread alone.

    :param runs: One run of each arm, in the same environment
    :return: Rows of ``speed.csv``, one for each turn
    """
    with contextlib.ExitStack() as stack:
        models = {run.arm: stack.enter_context(experiment(run))[1] for run in runs}
        steps = max(*(model.n_steps * model.n_envs for model in models.values()), SHORTEST_TURN)  # type: ignore[attr-defined]
        trainings = {arm: training(model, steps) for arm, model in models.items()}
        turns = take_turns(trainings, N_TURNS, clock=time.thread_time)
        taken = {arm: model.num_timesteps / (N_TURNS + 1) for arm, model in models.items()}
    common = {"session": f"{time.time():.0f}", **provenance()}
    return [
        {
            **common,
            "arm": run.arm,
            "env": run.env,
            "settings_hash": run.settings_hash(),
            "steps": round(taken[run.arm]),
            "seconds_per_step": f"{seconds / taken[run.arm]:.4g}",
        }
        for run in runs
        for seconds in turns[run.arm]
    ]


def turns(args: argparse.Namespace) -> None:
    """Measure the environments where an arm has no row yet, each with the first seed."""
    csv = args.results / "speed.csv"
    done = {(row["env"], row["settings_hash"]) for row in read_rows(csv)}
    by_env: dict[str, dict[str, Run]] = {}
    for run in expand(load_matrix(), args.suite, args.arms, args.envs):
        if run.algo != "random":
            by_env.setdefault(run.env, {}).setdefault(run.arm, run)
    for env, arms in by_env.items():
        if any((env, run.settings_hash()) not in done for run in arms.values()):
            print(f"{env}: {', '.join(arms)}")
            for row in [] if args.dry_run else turns_of(list(arms.values())):
                append_row(csv, row, TURNS_FIELDS)


def setting_of(args: argparse.Namespace) -> Setting:
    """:return: The setting that it describes"""
    return Setting(**{name: getattr(args, name) for name in Setting._fields})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command, defaults in ((throughput, Setting()), (memory, IMAGES), (scaling, None), (turns, None)):
        own = commands.add_parser(command.__name__)
        own.set_defaults(command=command)
        own.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for rows")
        for name, default in (defaults._asdict() if defaults else {}).items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, bool):
                own.add_argument(flag, action="store_true")
            else:
                own.add_argument(
                    flag, type=type(default), default=default, choices=list(BUFFERS) if name == "buffer" else None
                )
        if defaults:
            own.add_argument("--rollouts", type=int, default=2, help="rollouts per turn, or in all")
    commands.choices["throughput"].add_argument("--pairs", type=int, default=11, help="turns of each contestant")
    commands.choices["scaling"].add_argument(
        "--rounds", type=int, default=5, help="turns of each algorithm, rollouts of each size"
    )
    commands.choices["scaling"].add_argument("--largest", type=int, default=65_536, help="transitions of the largest rollout")
    commands.choices["turns"].add_argument("--suite", default="proof")
    commands.choices["turns"].add_argument("--arms", nargs="+", default=[], metavar="ARM")
    commands.choices["turns"].add_argument("--envs", nargs="+", default=[], metavar="ENV")
    commands.choices["turns"].add_argument("--dry-run", action="store_true", help="print what would be measured")
    args = parser.parse_args()
    th.set_num_threads(1)
    args.command(args)


if __name__ == "__main__":
    main()
