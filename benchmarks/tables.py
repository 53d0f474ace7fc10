"""
Tables of finished runs, in Markdown.

The *area* is the mean over the budget of the mean return of the last 20 training episodes. Throughout, `suite` has the
finished runs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.matrix import default_rollout_size
from benchmarks.results import Suite
from benchmarks.statistics import Estimate, mean_over_seeds

NO_ROWS = "There are no rows yet."


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """
    :param header: Names of the columns
    :param rows: Cells of each row; a short row is filled up with empty cells
    :return: The table, without a line break at its end
    """
    body = [["", *map(str, row), *[""] * (len(header) - len(row)), ""] for row in rows]
    lines = [["", *header, ""], ["", *["---"] * len(header), ""], *body]
    return "\n".join(" | ".join(line).strip() for line in lines) if body else NO_ROWS


def progress(suite: Suite) -> str:
    """:return: How many of the trainings of a suite are finished, in a sentence"""
    n_finished, n_planned = (sum(run.algo != "random" for run in runs) for runs in (suite.finished, suite.planned))
    if n_finished == 0:
        return NO_ROWS
    if n_finished == n_planned:
        return f"All {n_planned} trainings are finished."
    return f"{n_finished} of {n_planned} trainings are finished, seed by seed, so these figures will still change."


def format_steps(steps: float) -> str:
    """
    :param steps: Number of steps
    :return: As a whole number, "never" for infinity
    """
    return "never" if math.isinf(steps) else f"{steps:,.0f}"


def variance_table(suite: Suite, arm: str) -> str:
    """:return: One line per environment: the share of the advantages' variance that the relative term removes"""
    envs = [env for env in suite.timesteps if suite.runs(arm, env)]
    lines = [
        [env.removeprefix("sb3_grpo/"), mean_over_seeds(100 * suite.column(arm, env, "variance_removed"))] for env in envs
    ]
    return markdown_table(("environment", "variance removed, %"), lines)


def variants_table(suite: Suite) -> str:
    """:return: One line per arm of a suite with one environment: area, evaluation, and runs that reached the threshold"""
    (env,) = suite.timesteps
    arms = [arm for arm in suite.arms if suite.runs(arm, env)]
    lines = []
    for arm in arms:
        steps = suite.column(arm, env, "steps_to_threshold")
        estimates = (mean_over_seeds(suite.column(arm, env, name)) for name in ("auc", "eval_mean"))
        seconds = np.median(suite.column(arm, env, "wall_clock"))
        reached = f"{np.isfinite(steps).sum()} of {len(steps)}"
        lines.append([arm.partition(", ")[2], *estimates, reached, format_steps(float(np.median(steps))), f"{seconds:.0f}"])
    return markdown_table(("arm", "area", "evaluation", "reached the threshold", "after steps", "seconds"), lines)


def zoo_table(suite: Suite) -> str:
    """:return: One line per environment: the threshold, and the returns of the runs"""
    lines = []
    for env in suite.timesteps:
        if not (runs := suite.runs("grpo", env)):
            continue
        entry = runs[0].run.entry
        n_envs = entry.get("n_envs", 1)
        rollout = n_envs * entry.get("n_steps", default_rollout_size("kernel") // n_envs)
        returns, target = suite.column("grpo", env, "eval_mean"), suite.settings["thresholds"][env]
        lines.append([
            env, f"{math.ceil(suite.timesteps[env] / rollout) * rollout:,}", f"{target:g}",
            f"{(returns >= target).sum()} of {len(returns)}", f"{returns.mean():.1f}",
            ", ".join(f"{run.run.seed}: {value:.1f}" for run, value in zip(runs, returns, strict=True)),
            f"{np.median(suite.column('grpo', env, 'wall_clock')):.0f}",
        ])  # fmt: skip
    return markdown_table(("environment", "steps", "threshold", "reached", "mean", "seed: evaluation", "seconds"), lines)


def throughput_table(rows: list[dict[str, str]]) -> str:
    """
    :param rows: Rows of ``throughput.csv``, of which the last of each setting counts
    :return: One line per setting
    """
    setting = ("env", "n_envs", "n_steps", "batch_size", "n_epochs", "buffer", "fused_ppo")
    header = (
        "environment", "envs x steps, batch, epochs", "GRPO, steps/s", "PPO", "over PPO", "over sbx's PPO", "of the bound",
        "advantages",
    )  # fmt: skip
    lines = []
    for row in {tuple(row[name] for name in setting): row for row in rows}.values():
        ppo = f"{int(row['ppo']):,}" + (", fused Adam" if row["fused_ppo"] == "True" else "")
        over = [
            Estimate(*(float(row[f"over_{other}{end}"]) for end in ("", "_low", "_high"))) if row[other] else ""
            for other in ("ppo", "sbx")
        ]
        sizes = f"{row['n_envs']} x {row['n_steps']}, {row['batch_size']}, {row['n_epochs']}"
        shares = f"{float(row['over_bound']):.2f}", f"{float(row['fit_share']):.1%}"
        lines.append([row["env"], sizes, f"{int(row['grpo']):,}", ppo, *over, *shares])
    return markdown_table(header, lines)
