"""Figures of finished runs: learning curves and performance profiles."""

import math
import pathlib
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rliable import library as rly
from rliable import plot_utils

from benchmarks.curves import WINDOW
from benchmarks.results import Suite
from benchmarks.statistics import N_RESAMPLES, seeded_numpy
from benchmarks.tables import LABELS, normalised_areas, seconds_per_step

COLOURS = {"grpo": "tab:blue", "ppo": "tab:orange", "grpo-default": "tab:cyan", "ppo-default": "tab:brown"}


def draw_curves(suite: Suite, path: pathlib.Path, by_seconds: bool) -> None:
    """
    Draw a panel per environment: mean over seeds of the training return, with the range of the seeds.

    :param suite: Finished runs
    :param path: File of the figure
    :param by_seconds: Draw seconds, at the speeds in ``speed.csv``, in the place of steps
    """
    envs = [env for env in suite.timesteps if any(suite.runs(arm, env) for arm in suite.arms)]
    columns = max(1, min(len(envs), 5))
    rows = max(1, math.ceil(len(envs) / columns))
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.6 * rows), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, env in zip(axes.flat, envs, strict=False):
        arms = [arm for arm in suite.arms if suite.runs(arm, env)]
        speeds = dict.fromkeys(arms, 1.0)
        if by_seconds:
            speeds = seconds_per_step(suite, [arm for arm in arms if seconds_per_step(suite, [arm], env)], env)
        for arm, speed in speeds.items():
            curves = suite.curves(arm, env)
            begin = max(curve.steps[0] for curve in curves)
            steps = np.linspace(begin, suite.timesteps[env], 200)
            returns = np.array([curve.smoothed(steps) for curve in curves])
            (handles[arm],) = axis.plot(steps * speed, returns.mean(axis=0), color=COLOURS[arm], lw=1.4)
            axis.fill_between(steps * speed, returns.min(axis=0), returns.max(axis=0), color=COLOURS[arm], alpha=0.15, lw=0)
        axis.set_title(env, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
    for axis in axes.flat[len(envs) :]:
        axis.remove()
    figure.supxlabel("seconds" if by_seconds else "environment steps", fontsize=9)
    figure.supylabel(f"training return, mean of {WINDOW} episodes", fontsize=9)
    figure.legend(handles.values(), [LABELS[arm] for arm in handles], loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_profile(suite: Suite, path: pathlib.Path) -> None:
    """
    Draw rliable's performance profiles: the share of runs whose area over that of PPO exceeds a value, over the environments
    and seeds that all arms have. An arm that lacks an environment is left out.

    :param suite: Finished runs
    :param path: File of the figure
    """
    _, ppo_envs, _ = normalised_areas(suite, ["ppo"], "ppo")
    arms = [arm for arm in suite.arms if normalised_areas(suite, [arm], "ppo")[1] == ppo_envs]
    scores, envs, seeds = normalised_areas(suite, arms, "ppo")
    if len(seeds) < 2:
        return
    thresholds = np.linspace(0.0, 2.5, 101)
    with seeded_numpy():
        profiles, intervals = rly.create_performance_profile(scores, thresholds, reps=N_RESAMPLES)
    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    plot_utils.plot_performance_profiles(
        {LABELS[arm]: profile for arm, profile in profiles.items()},
        thresholds,
        performance_profile_cis={LABELS[arm]: interval for arm, interval in intervals.items()},
        colors={LABELS[arm]: COLOURS[arm] for arm in scores},
        xlabel="area over that of PPO with rl-zoo3's settings",
        ax=axis,
        labelsize="medium",
        ticklabelsize="small",
    )
    axis.set_ylabel("share of runs above", fontsize="medium")
    axis.set_title(f"{len(envs)} environments, {len(seeds)} seeds", fontsize="medium")
    axis.axvline(1.0, color="grey", lw=0.8, ls=":")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
