"""Figures of finished runs: learning curves and performance profiles."""

import math
import pathlib
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rliable import library as rly
from rliable import plot_utils

from benchmarks.curves import WINDOW
from benchmarks.results import Suite
from benchmarks.statistics import N_RESAMPLES, seeded_numpy
from benchmarks.versus import Arms, above_random, arm_in, learns

#: Colours, fonts and sizes of all figures of the documentation
STYLE = pathlib.Path(__file__).parents[1] / "docs" / "figures.mplstyle"
N_POINTS = 80


def save(figure: Figure, path: pathlib.Path) -> None:
    """
    :param figure: Figure to save and close
    :param path: File, ``.svg``; the same figure gives the same bytes
    """
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def interval_of_means(returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    :param returns: Shape ``(n_seeds, n_points)``
    :return: Ends of the 95% bootstrap intervals of the means over seeds, shape ``(n_points,)``
    """
    draws = np.random.default_rng(0).integers(len(returns), size=(N_RESAMPLES, len(returns)))
    low, high = np.quantile(returns[draws].mean(axis=1), [0.025, 0.975], axis=0)
    return low, high


def draw_curves(suite: Suite, arms: Arms, path: pathlib.Path) -> None:
    """
    Draw a panel per environment: mean over seeds of the training return, with its interval.

    :param suite: Finished runs
    :param arms: For each name the arms that stand for it; dashed if the name contains "defaults"
    :param path: File of the figure
    """
    envs = [env for env in suite.timesteps if any(arm_in(suite, each, env) for each in arms.values())]
    columns = 3
    rows = max(1, math.ceil(len(envs) / columns))
    handles: dict[str, Any] = {}
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=(7.35, 2.1 * rows + 0.7), squeeze=False)
        for axis, env in zip(axes.flat, envs, strict=False):
            for i, (name, each) in enumerate(arms.items()):
                if (arm := arm_in(suite, each, env)) is None:
                    continue
                curves = suite.curves(arm, env)
                steps = np.linspace(max(curve.steps[0] for curve in curves), suite.timesteps[env], N_POINTS)
                returns = np.array([curve.smoothed(steps) for curve in curves])
                style = "--" if "defaults" in name else "-"
                (handles[name],) = axis.plot(steps, returns.mean(axis=0), style, color=f"C{i}")
                axis.fill_between(steps, *interval_of_means(returns), color=f"C{i}", alpha=0.2, lw=0)
            axis.set_title(short_name(env))
            axis.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}k" if steps else "0")
            axis.xaxis.set_major_locator(MaxNLocator(3))
            axis.yaxis.set_major_locator(MaxNLocator(4))
        for axis in axes.flat[len(envs) :]:
            axis.remove()
        figure.supxlabel("environment steps")
        figure.supylabel(f"training return, mean of {WINDOW} episodes")
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
        save(figure, path)


def short_name(env: str) -> str:
    """:return: Name of an environment that fits above a panel"""
    return (
        env.removeprefix("sb3_grpo/")
        .removeprefix("MiniGrid-")
        .rpartition("-")[0]
        .replace("MountainCarContinuous", "MountainCarCont.")
    )


def draw_profile(suite: Suite, arms: Arms, reference: str, path: pathlib.Path) -> None:
    """
    Draw rliable's performance profiles: the share of runs whose area above random actions, over the mean of that of a
    reference, exceeds a value; over the environments and seeds that all arms have, and in which the reference learns.

    :param suite: Finished runs
    :param arms: For each name the arms that stand for it
    :param reference: One of these names
    :param path: File of the figure
    """
    envs = [env for env in suite.timesteps if all(arm_in(suite, each, env) for each in arms.values())]
    found = {(name, env): str(arm_in(suite, each, env)) for name, each in arms.items() for env in envs}
    seeds = sorted(set.intersection(*(set(suite.by_seed(arm, env)) for (_, env), arm in found.items()))) if envs else []
    areas = {key: above_random(suite, arm, key[1], "auc", seeds) for key, arm in found.items()}
    envs = [env for env in envs if len(seeds) > 1 and learns(areas[reference, env])]
    if not envs:
        return
    scores = {name: np.array([areas[name, env] / areas[reference, env].mean() for env in envs]).T for name in arms}
    thresholds = np.linspace(0.0, 2.5, 101)
    with seeded_numpy():
        profiles, intervals = rly.create_performance_profile(scores, thresholds, reps=N_RESAMPLES)
    with plt.style.context(STYLE):
        figure, axis = plt.subplots(figsize=(7.35, 4.2))
        plot_utils.plot_performance_profiles(
            profiles,
            thresholds,
            performance_profile_cis=intervals,
            colors={name: f"C{i}" for i, name in enumerate(scores)},
            xlabel=f"area over that of {reference}",
            ax=axis,
            labelsize="medium",
            ticklabelsize="small",
        )
        axis.set_ylabel("share of runs above", fontsize="medium")
        axis.set_title(f"{len(envs)} environments, {len(seeds)} seeds", fontsize="medium")
        axis.axvline(1.0, color="grey", lw=0.8, ls=":")
        axis.legend()
        save(figure, path)
