"""
How does the cost grow, with the number of environments and with the size of a rollout?

    python -m benchmarks.scaling                 # both curves, a CSV and a picture in runs/scaling/
    python -m benchmarks.scaling --largest 65536

- Steps per second of GRPO and of SB3's PPO for 1 to 64 environments: rollouts of 1024 transitions, the other settings those of
  ``benchmarks.throughput``; medians over turns.
- Seconds in which each rollout buffer turns a rollout of 1k to 256k transitions into an update: random observations like
  HalfCheetah's, random rewards, episodes of 200 steps, 8 environments; medians of 3. Per transition this should not grow.

All on one torch thread.
"""

import argparse
import csv
import functools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from tqdm import tqdm

from benchmarks.throughput import Setting, make_model
from benchmarks.timing import take_turns
from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS, GroupRolloutBuffer

N_ENVS = (1, 2, 4, 8, 16, 32, 64)
EPISODE = 200
OBSERVATION_DIM = 17
ACTION_DIM = 6


class Point(NamedTuple):
    """
    One row of the CSV.

    :param curve: ``"steps per second"`` or ``"seconds per rollout"``
    :param what: algorithm or buffer
    :param x: environments or transitions
    :param y: the figure
    """

    curve: str
    what: str
    x: int
    y: float


def steps_per_second(rounds: int) -> Iterator[Point]:
    """
    :param rounds: turns of each algorithm
    :return: a point for each algorithm and number of environments
    """
    for n_envs in N_ENVS:
        setting = Setting(n_envs=n_envs, n_steps=1024 // n_envs)
        models = {"GRPO": make_model(GRPO, setting), "PPO": make_model(PPO, setting)}
        contestants: dict[str, Callable[[], object]] = {
            name: functools.partial(model.learn, setting.rollout, reset_num_timesteps=False) for name, model in models.items()
        }
        for name, seconds in take_turns(contestants, rounds).items():
            yield Point("steps per second", name, n_envs, setting.rollout / float(np.median(seconds)))


def filled_buffer(name: str, n_transitions: int, n_envs: int = 8) -> GroupRolloutBuffer:
    """
    :param name: of the buffer
    :param n_transitions: in the rollout, a multiple of ``n_envs``
    :param n_envs: number of environments
    :return: a buffer that holds a whole rollout
    """
    n_steps = n_transitions // n_envs
    observation_space = spaces.Box(-np.inf, np.inf, (OBSERVATION_DIM,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
    buffer = BUFFERS[name](n_steps, observation_space, action_space, "cpu", n_envs=n_envs, group_size=n_envs, horizon=EPISODE)
    buffer.reset()
    infos: list[dict[str, Any]] = [{}] * n_envs
    log_probs = th.zeros(n_envs)
    rng = np.random.default_rng(0)
    for step in range(n_steps):
        observations = rng.standard_normal((n_envs, OBSERVATION_DIM), dtype=np.float32)
        actions = rng.standard_normal((n_envs, ACTION_DIM), dtype=np.float32)
        starts = np.arange(n_envs) + n_envs * (step // EPISODE)
        done = np.full(n_envs, step % EPISODE == EPISODE - 1)
        buffer.add(observations, actions, rng.standard_normal(n_envs), done, log_probs, starts, infos)
    return buffer


def seconds_per_rollout(largest: int, repetitions: int) -> Iterator[Point]:
    """
    :param largest: transitions
    :param repetitions: of each measurement
    :return: a point for each buffer and number of transitions
    """
    last_obs = np.zeros((8, OBSERVATION_DIM), np.float32)
    n_transitions = 1024
    while n_transitions <= largest:
        for name in BUFFERS:
            seconds = []
            for _ in range(repetitions):
                buffer = filled_buffer(name, n_transitions)
                began = time.perf_counter()
                buffer.finish_rollout(last_obs, lambda observations, hidden=False: np.empty(0))
                seconds.append(time.perf_counter() - began)
            yield Point("seconds per rollout", name, n_transitions, float(np.median(seconds)))
        n_transitions *= 4


def draw(points: list[Point], path: pathlib.Path) -> None:
    """
    :param points: of both curves
    :param path: of the picture
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    labels = {"steps per second": "environments", "seconds per rollout": "transitions"}
    for ax, (curve, x_label) in zip(axes, labels.items(), strict=True):
        for what in dict.fromkeys(point.what for point in points if point.curve == curve):
            mine = [point for point in points if (point.curve, point.what) == (curve, what)]
            ax.plot([point.x for point in mine], [point.y for point in mine], marker="o", label=what)
        ax.set(xscale="log", yscale="log", xlabel=x_label, ylabel=curve)
        ax.legend()
        ax.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each algorithm")
    parser.add_argument("--repetitions", type=int, default=3, help="rollouts of each size and buffer")
    parser.add_argument("--largest", type=int, default=262_144, help="transitions of the largest rollout")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/scaling"))
    args = parser.parse_args()
    th.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    with (args.folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        for curve in (steps_per_second(args.rounds), seconds_per_rollout(args.largest, args.repetitions)):
            for point in tqdm(curve, unit="point"):
                points.append(point)
                writer.writerow([*point[:3], f"{point.y:.6g}"])
                file.flush()
                per = f", {1e6 * point.y / point.x:.2f} us a transition" if point.curve == "seconds per rollout" else ""
                tqdm.write(f"{point.what:>13} {point.x:>7} {point.curve}: {point.y:.4g}{per}")
    draw(points, args.folder / "scaling.png")


if __name__ == "__main__":
    main()
