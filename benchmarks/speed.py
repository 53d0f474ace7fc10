"""
Measure speed and memory on one core.

    python -m benchmarks.speed              # GRPO, SB3's PPO and sbx's PPO in turns, about ten minutes
    python -m benchmarks.speed profile      # the time of GRPO's training by part
    python -m benchmarks.speed images       # steps per second and peak memory on images; --device cuda for a GPU
    python -m benchmarks.speed cold         # the first training on a machine, compilation included, and PPO's
    python -m benchmarks.speed turns        # seconds per step of the arms of a suite

- Without a word: GRPO with and without machine code, and its rivals. All have GRPO's default settings: rollouts of 1024
  transitions with discrete actions and of 2048 with continuous ones, minibatches of 64 and ten epochs, except for what the
  table names. With continuous actions GRPO takes a natural-gradient step in the place of minibatches, unless a minibatch size
  is named. They take turns in one process that is bound to one core, so that a drift of the machine favours nobody. The first
  turn of each, in which numba and JAX compile, does not count. The bare environment is a `DummyVecEnv` with `Monitor` that
  takes random actions: nobody who steps it can be faster. sbx's PPO, on JAX, takes part where it is installed
  (`pip install sbx-rl`).
- `profile`: stopwatches around the parts of GRPO's training, whose overhead is in the figures.
- `images`: GRPO, PPO and the environments alone take turns, with GRPO's defaults for images. Peak memory is that of a process
  of its own, and on a GPU that of its tensors there.
- `cold`: a short training in a new process, imports included: GRPO with an empty cache of machine code, GRPO with a full one,
  and PPO, in turns. CPU time is that of the whole process.
- `turns`: trainings of a suite of `benchmarks/matrix.yml` take turns, for `benchmarks.versus`.
"""

import argparse
import contextlib
import functools
import importlib.util
import multiprocessing
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.matrix import Run, expand, load_matrix
from benchmarks.results import RESULTS, append_row, provenance, read_rows
from benchmarks.run import experiment
from benchmarks.tables import comparison_table, markdown_table
from benchmarks.timing import Stopwatch, take_turns
from sb3_grpo import GRPO, collection

#: SB3's algorithms on JAX, if they are installed
SBX = importlib.util.find_spec("sbx") is not None
ALGORITHMS = ("GRPO", "PPO")
COMPARISON_FIELDS = [
    "env", "n_envs", "batch_size", "width", "rounds", "grpo", "torch", "ppo", "sbx", "bare", "over_ppo", "over_sbx",
    "bare_share", "commit", "versions",
]  # fmt: skip
TURNS_FIELDS = ["session", "arm", "env", "settings_hash", "steps", "seconds_per_step", "commit", "versions"]
ROLLOUTS_PER_TURN = 2
#: Turns of each arm of a suite, and the fewest steps in each
N_TURNS = 5
SHORTEST_TURN = 4096


class Setting(NamedTuple):
    """
    Settings that the algorithms have in common; ``None`` is the default. The others are GRPO's defaults.

    :param env: Gymnasium environment, or ``"image"`` for SB3's fake one with 84 x 84 pixels and four channels
    :param n_envs: Environments side by side
    :param batch_size: Minibatch size
    :param width: Units of each of two hidden layers
    :param n_epochs: Passes over a rollout
    :param rollout: Transitions of a rollout; ``None`` for what GRPO chooses
    :param device: Device of the policies
    """

    env: str = "CartPole-v1"
    n_envs: int = 8
    batch_size: int | None = None
    width: int = 64
    n_epochs: int | None = None
    rollout: int | None = None
    device: str = "cpu"

    def make_env(self) -> VecEnv:
        """:return: The environments, seeded"""
        images = functools.partial(FakeImageEnv, screen_height=84, screen_width=84, n_channels=4)
        return make_vec_env(images if self.env == "image" else self.env, self.n_envs, seed=0)


SETTINGS = [
    Setting(env, **options)  # type: ignore[arg-type]
    for options in ({}, dict(batch_size=256), dict(width=256), dict(n_envs=1), dict(n_envs=64))
    for env in ("CartPole-v1", "HalfCheetah-v5")
]
IMAGE_ROLLOUT = 1024
IMAGES = Setting(env="image", batch_size=256, n_epochs=1, rollout=IMAGE_ROLLOUT)


def make_grpo(setting: Setting) -> GRPO:
    """
    :param setting: Setting of the comparison
    :return: A model of GRPO
    """
    named = {name: getattr(setting, name) for name in ("batch_size", "n_epochs") if getattr(setting, name) is not None}
    n_steps = None if setting.rollout is None else setting.rollout // setting.n_envs
    common: dict[str, Any] = dict(n_steps=n_steps, seed=0, device=setting.device, **named)
    if setting.env == "image":  # SB3's images are random, whatever the seed
        return GRPO("CnnPolicy", setting.make_env(), share_starts=False, **common)
    return GRPO("MlpPolicy", setting.make_env(), policy_kwargs=dict(net_arch=[setting.width] * 2), **common)


def without_machine_code(model: GRPO) -> GRPO:
    """:return: The model, which acts and updates with PyTorch from now on, because of a hook that does nothing"""
    model.policy.action_net.register_forward_hook(lambda *_: None)
    return model


def make_rival(algorithm: type[OnPolicyAlgorithm], setting: Setting) -> OnPolicyAlgorithm:
    """
    :param algorithm: PPO, or sbx's PPO
    :param setting: Setting of the comparison
    :return: A model with the settings of GRPO
    """
    grpo = make_grpo(setting)
    same = {name: getattr(grpo, name) for name in ("n_steps", "batch_size", "n_epochs", "gae_lambda", "policy_kwargs")}
    policy = "CnnPolicy" if setting.env == "image" else "MlpPolicy"
    return algorithm(policy, setting.make_env(), seed=0, device=setting.device, **same)


def training(model: BaseAlgorithm, timesteps: int) -> Callable[[], object]:
    """
    :param model: A model
    :param timesteps: Steps of a turn
    :return: A function that trains it further, without logs
    """
    return functools.partial(model.learn, timesteps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]


def stepping(env: VecEnv, timesteps: int) -> Callable[[], object]:
    """
    :param env: Vectorised environment
    :param timesteps: Steps of a turn, of all environments together
    :return: A function that steps it with random actions
    """
    env.action_space.seed(0)
    actions = [np.array([env.action_space.sample() for _ in range(env.num_envs)]) for _ in range(timesteps // env.num_envs)]
    env.reset()
    return lambda: [env.step(each) for each in actions]


def compare(setting: Setting, rounds: int) -> dict[str, Any]:
    """
    :param setting: Setting of the comparison
    :param rounds: Turns of each contestant
    :return: A row of ``comparison.csv``: medians of steps per second, and medians, minima and maxima of ratios of turns
    """
    grpo = make_grpo(setting)
    models: dict[str, BaseAlgorithm] = {"grpo": grpo, "torch": without_machine_code(make_grpo(setting))}
    models["ppo"] = make_rival(PPO, setting)
    if SBX:
        import sbx

        models["sbx"] = make_rival(sbx.PPO, setting)
    timesteps = ROLLOUTS_PER_TURN * grpo.n_steps * setting.n_envs
    contestants = {name: training(model, timesteps) for name, model in models.items()}
    contestants["bare"] = stepping(setting.make_env(), timesteps)
    speeds = {name: timesteps / seconds for name, seconds in take_turns(contestants, rounds).items()}
    row: dict[str, Any] = {**dict.fromkeys(COMPARISON_FIELDS, ""), **provenance(), "rounds": rounds}
    row.update({name: getattr(setting, name) for name in ("env", "n_envs", "width")}, batch_size=grpo.batch_size)
    row.update({name: round(float(np.median(each))) for name, each in speeds.items()})
    ratios = {f"over_{name}": speeds["grpo"] / speeds[name] for name in ("ppo", "sbx") if name in speeds}
    ratios["bare_share"] = speeds["grpo"] / speeds["bare"]
    for name, each in ratios.items():
        row[name] = " ".join(f"{value:.3f}" for value in (np.median(each), each.min(), each.max()))
    return row


def comparison(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    if not SBX:
        print("sbx is not installed, so its PPO is left out: `pip install sbx-rl`.")
    for setting in SETTINGS:
        if not args.envs or setting.env in args.envs:
            row = compare(setting, args.rounds)
            append_row(args.results / "comparison.csv", row, COMPARISON_FIELDS)
            print(comparison_table([row]).splitlines()[-1], flush=True)
    print("\n" + comparison_table(read_rows(args.results / "comparison.csv")))


def breakdown(setting: Setting, n_rollouts: int) -> dict[str, float]:
    """
    :param setting: Setting of a training by GRPO
    :param n_rollouts: Its rollouts, after a first one that does not count
    :return: Share of the time by part
    """
    model = make_grpo(setting)
    assert model.env is not None
    rollout = model.n_steps * setting.n_envs
    training(model, rollout)()
    watch, inner = Stopwatch(), Stopwatch()
    with contextlib.ExitStack() as stack:
        for env in model.env.envs:  # type: ignore[attr-defined]
            stack.enter_context(inner.around("environment, with Monitor", env, "step"))
        make_actor = collection.choose_actor

        def timed_actor(policy: Any) -> Callable[..., Any]:
            owner = argparse.Namespace(act=make_actor(policy))
            stack.enter_context(inner.around("acting", owner, "act"))
            return lambda *args: owner.act(*args)

        collection.choose_actor = timed_actor
        stack.callback(setattr, collection, "choose_actor", make_actor)
        stack.enter_context(inner.around("value estimate", model.rollout_buffer, "finish_rollout"))
        stack.enter_context(watch.around("collection", model, "collect_rollouts"))
        stack.enter_context(watch.around("update", model, "train"))
        began = time.perf_counter()
        training(model, n_rollouts * rollout)()
        total = time.perf_counter() - began
    watch.seconds["collection"] -= sum(inner.seconds.values())
    shares = {part: seconds / total for part, seconds in {**inner.seconds, **watch.seconds}.items()}
    return {**shares, "rest": 1.0 - sum(shares.values())}


def profile(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    shares = {env: breakdown(Setting(env), args.rollouts) for env in ("CartPole-v1", "HalfCheetah-v5")}
    rows = [[part, *(f"{each[part]:.0%}" for each in shares.values())] for part in next(iter(shares.values()))]
    print(markdown_table(["part", *shares], rows))


def peak_memory(algorithm: str, setting: Setting, rollouts: int) -> float:
    """
    Train in this process, which must be a fresh one: a peak does not go down again.

    :param algorithm: ``"GRPO"`` or ``"PPO"``
    :param setting: Setting of the comparison
    :param rollouts: Rollouts to train on
    :return: Highest resident memory of the process, or of its tensors on a GPU, in MB
    """
    th.set_num_threads(1)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the process that it was made from
    model = make_grpo(setting) if algorithm == "GRPO" else make_rival(PPO, setting)
    model.learn(rollouts * model.n_steps * setting.n_envs)
    if setting.device != "cpu":
        return th.cuda.max_memory_allocated() / 1e6
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


def images(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    rows = []
    for batch_size in (64, 256):
        setting = IMAGES._replace(batch_size=batch_size, n_epochs=None, device=args.device)
        models = {"GRPO": make_grpo(setting), "PPO": make_rival(PPO, setting)}
        contestants = {name: training(model, IMAGE_ROLLOUT) for name, model in models.items()}
        contestants["environments"] = stepping(setting.make_env(), IMAGE_ROLLOUT)
        turns = take_turns(contestants, args.rounds)
        peaks = compare_memory(setting, rollouts=2)
        rates = {name: f"{IMAGE_ROLLOUT / np.median(turns[name]):.0f} steps/s, {peaks[name]:.0f} MB" for name in ALGORITHMS}
        alone = f"{IMAGE_ROLLOUT / np.median(turns['environments']):.0f} steps/s"
        rows.append([str(batch_size), *rates.values(), f"{np.median(turns['PPO'] / turns['GRPO']):.2f}", alone])
    print(markdown_table(["minibatch", *ALGORITHMS, "ratio of rates", "environments alone"], rows))


#: Environment and timesteps of the first training on a machine, and its limits: GRPO's time over PPO's
COLD = {"CartPole-v1": (10_000, 1.3), "Pendulum-v1": (8_192, 1.6)}
COLD_TRAINING = """
import torch, {module}
torch.set_num_threads(1)
{module}.{algorithm}("MlpPolicy", "{env}", seed=0, device="cpu").learn({timesteps})
"""


def first_training(algorithm: str, env: str, timesteps: int, cache: str) -> tuple[float, float]:
    """
    Train in a new process.

    :param algorithm: ``"GRPO"`` or ``"PPO"``
    :param env: Gymnasium environment
    :param timesteps: Steps of the training
    :param cache: Folder of numba's cache
    :return: Seconds of wall-clock time and of CPU time, from the start of the process to its end
    """
    module = "sb3_grpo" if algorithm == "GRPO" else "stable_baselines3"
    code = COLD_TRAINING.format(module=module, algorithm=algorithm, env=env, timesteps=timesteps)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cold(args: argparse.Namespace) -> None:
    """
    :param args: Command line
    """
    rows = []
    for env, (timesteps, limit) in COLD.items():
        seconds: dict[str, list[tuple[float, float]]] = {"empty cache": [], "full cache": [], "PPO": []}
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as cache:
                for name, each in seconds.items():
                    each.append(first_training("PPO" if name == "PPO" else "GRPO", env, timesteps, cache))
        wall, cpu = ({name: np.array(each)[:, i] for name, each in seconds.items()} for i in range(2))
        ratios = [np.median(each["empty cache"] / each["PPO"]) for each in (wall, cpu)]
        figures = [f"{np.median(wall[name]):.1f} ({np.median(cpu[name]):.1f})" for name in seconds]
        rows.append([env, f"{timesteps:,}", *figures, *(f"{ratio:.2f}" for ratio in ratios), f"{limit}"])
    names = "empty cache", "full cache", "PPO", "empty over PPO", "by CPU time", "limit"
    print("Seconds of a first training, in brackets those of CPU time; medians\n")
    print(markdown_table(["environment", "steps", *names], rows))


def turns_of(runs: list[Run]) -> list[dict[str, Any]]:
    """
    Train in turns of whole rollouts of every arm. The time is that of this process alone, all its threads together.

    :param runs: One run of each arm, in the same environment
    :return: Rows of ``speed.csv``, one for each turn
    """
    with contextlib.ExitStack() as stack:
        models = {run.arm: stack.enter_context(experiment(run))[1] for run in runs}
        steps = max(*(model.n_steps * model.n_envs for model in models.values()), SHORTEST_TURN)  # type: ignore[attr-defined]
        trainings = {arm: training(model, steps) for arm, model in models.items()}
        turns = take_turns(trainings, N_TURNS, clock=time.process_time)
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


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for rows")
    common.add_argument("--envs", nargs="+", default=[], metavar="ENV", help="environments of the comparison or the suite")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, parents=[common])
    parser.set_defaults(command=comparison)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each algorithm")
    commands = parser.add_subparsers()
    for command in (profile, images, cold, turns):
        commands.add_parser(command.__name__, parents=[common]).set_defaults(command=command)
    commands.choices["profile"].add_argument("--rollouts", type=int, default=20)
    commands.choices["images"].add_argument("--device", default="cpu", help="cpu or cuda")
    commands.choices["images"].add_argument("--rounds", type=int, default=5, help="turns of each algorithm")
    commands.choices["cold"].add_argument("--rounds", type=int, default=5, help="trainings of each kind")
    commands.choices["turns"].add_argument("--suite", default="proof")
    commands.choices["turns"].add_argument("--arms", nargs="+", default=[], metavar="ARM")
    commands.choices["turns"].add_argument("--dry-run", action="store_true", help="print what would be measured")
    args = parser.parse_args()
    th.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # JAX has threads of its own
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    args.command(args)


if __name__ == "__main__":
    main()
