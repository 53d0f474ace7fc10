"""Figures of finished runs: learning curves against steps and against time, and performance profiles."""

import io
import math
import pathlib
import re
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.results import Arms, Suite
from benchmarks.statistics import N_CURVE_RESAMPLES, Curve, interquartile_curve, interval_of_means, performance_profile
from benchmarks.versus import seconds_per_step

#: Colours, fonts and sizes of all figures of the documentation
STYLE = pathlib.Path(__file__).parents[1] / "docs" / "figures.mplstyle"
#: Points of a line, in a figure of few panels and in one of many
N_POINTS, N_PANEL_POINTS = 80, 20


def save(figure: Figure, path: pathlib.Path) -> None:
    """
    :param figure: Figure to save and close
    :param path: File, ``.svg``; the same figure gives the same bytes. Coordinates are rounded to a tenth of a point, and
        line breaks are left out, so that the file is half as large
    """
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    plt.close(figure)

    svg = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), content.getvalue())
    svg = re.sub(r" ?\n(?=L )|\n\s+(?=<)", "", svg).replace("L ", "L")
    path.write_text(svg, encoding="utf-8")


def draw_curves(suite: Suite, arms: Arms, path: pathlib.Path, by_time: bool = False) -> None:
    """
    Draw a panel per environment: mean over seeds of the training return, with its interval.

    :param suite: Finished runs
    :param arms: For each name the arms that stand for it; dashed if the name contains "defaults"
    :param path: File of the figure
    :param by_time: Whether to draw against minutes of one core instead of steps, where the speed of all arms was measured in
        turns, see :func:`~benchmarks.versus.seconds_per_step`
    """
    envs = [env for env in suite.timesteps if any(suite.arm_in(each, env) for each in arms.values())]
    minutes: dict[str, dict[str, float]] = {}
    if by_time:
        for env in envs:
            present = [arm for each in arms.values() if (arm := suite.arm_in(each, env))]
            minutes[env] = {arm: each / 60 for arm, each in seconds_per_step(suite, present, env).items()}
        envs = [env for env in envs if minutes[env]]
    columns = max(1, min(3, len(envs)))
    rows = max(1, math.ceil(len(envs) / columns))
    handles: dict[str, Any] = {}
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=(7.35, 2.1 * rows + 0.7), squeeze=False)
        for axis, env in zip(axes.flat, envs, strict=False):
            for i, (name, each) in enumerate(arms.items()):
                if (arm := suite.arm_in(each, env)) is None:
                    continue
                curves = suite.curves(arm, env)
                steps = np.linspace(max(curve.steps[0] for curve in curves), suite.timesteps[env], N_PANEL_POINTS)
                returns = np.array([curve.smoothed(steps) for curve in curves])
                style = "--" if "defaults" in name else "-"
                x = steps * minutes[env][arm] if by_time else steps
                (handles[name],) = axis.plot(x, returns.mean(axis=0), style, color=f"C{i}")
                if len(returns) > 1:
                    ends = interval_of_means(returns, N_CURVE_RESAMPLES)
                    axis.fill_between(x, *ends, color=f"C{i}", alpha=0.2, lw=0)
            axis.set_title(short_name(env))
            if not by_time:
                axis.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}k" if steps else "0")
            axis.xaxis.set_major_locator(MaxNLocator(3))
            axis.yaxis.set_major_locator(MaxNLocator(4))
        for axis in axes.flat[len(envs) :]:
            axis.remove()
        figure.supxlabel("minutes of one core" if by_time else "environment steps")
        figure.supylabel("training return")
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
        save(figure, path)


def draw_profiles(scores: dict[str, dict[str, list[np.ndarray]]], path: pathlib.Path) -> None:
    """
    Draw a panel per measure: the performance profile of each name, with its interval.

    :param scores: For each measure and name the scores in each environment, see :func:`benchmarks.versus.scores_by_arm`
    :param path: File of the figure
    """
    thresholds = np.linspace(0.0, 1.4, N_POINTS)
    panels = {
        measure: {name: performance_profile(own, thresholds) for name, own in by_name.items()}
        for measure, by_name in scores.items()
    }
    draw_panels(panels, thresholds, ("score", "share of runs above it"), path)


def draw_scores(curves: dict[str, dict[str, list[np.ndarray]]], path: pathlib.Path) -> None:
    """
    Draw a panel per group of environments: the interquartile mean of the learning curves of each name, with its interval.

    :param curves: For each group and name the curves in each environment, of ``N_POINTS`` points, see
        :func:`benchmarks.versus.curves_by_arm`
    :param path: File of the figure
    """
    panels = {group: {name: interquartile_curve(own) for name, own in by_name.items()} for group, by_name in curves.items()}
    shares = np.linspace(0.0, 1.0, N_POINTS + 1)[1:]
    draw_panels(panels, shares, ("share of the environment steps", "training score"), path)


def draw_panels(panels: dict[str, dict[str, Curve]], x: np.ndarray, labels: tuple[str, str], path: pathlib.Path) -> None:
    """
    :param panels: For each panel and name a curve; dashed if the name contains "defaults"
    :param x: Horizontal positions of the points, shape ``(n,)``
    :param labels: Labels of the axes
    :param path: File of the figure
    """
    handles: dict[str, Any] = {}
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, len(panels), figsize=(7.35, 3.6), sharey=True, squeeze=False)
        for axis, (title, by_name) in zip(axes.flat, panels.items(), strict=True):
            for i, (name, curve) in enumerate(by_name.items()):
                (handles[name],) = axis.plot(x, curve.values, "--" if "defaults" in name else "-", color=f"C{i}")
                axis.fill_between(x, curve.low, curve.high, color=f"C{i}", alpha=0.15, lw=0)
            axis.set_title(title)
        figure.supxlabel(labels[0])
        figure.supylabel(labels[1])
        if handles:
            figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
        save(figure, path)


def short_name(env: str) -> str:
    """:return: Name of an environment that fits above a panel"""
    return (
        env.removeprefix("sb3_grpo/")
        .removeprefix("MiniGrid-")
        .removeprefix("MinAtar/")
        .rpartition("-")[0]
        .removesuffix("NoFrameskip")
        .replace("MountainCarContinuous", "MountainCarCont.")
    )
