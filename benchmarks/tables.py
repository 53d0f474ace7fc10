"""
Tables of finished runs, in Markdown.

The *area* is the mean over the budget of the mean return of the last 20 training episodes. Throughout, `suite` has the
finished runs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results import Suite
from benchmarks.statistics import mean_over_seeds

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


def variance_table(suite: Suite, arm: str) -> str:
    """:return: One line per environment: the share of the advantages' variance that the relative term removes"""
    envs = [env for env in suite.timesteps if suite.runs(arm, env)]
    lines = [
        [env.removeprefix("sb3_grpo/"), mean_over_seeds(100 * suite.column(arm, env, "variance_removed"))] for env in envs
    ]
    return markdown_table(("environment", "variance removed, %"), lines)


def zoo_table(suite: Suite) -> str:
    """:return: One line per environment: the threshold, and the returns of the runs"""
    lines = []
    for env in suite.timesteps:
        if not (runs := suite.runs("grpo", env)):
            continue
        run = runs[0].run
        n_steps = run.resolved()["n_steps"]
        rollout = int(n_steps.split()[0]) if isinstance(n_steps, str) else run.entry.get("n_envs", 1) * n_steps
        returns, target = suite.column("grpo", env, "eval_mean"), suite.settings["thresholds"][env]
        lines.append([
            env, f"{math.ceil(suite.timesteps[env] / rollout) * rollout:,}", f"{target:g}",
            f"{(returns >= target).sum()} of {len(returns)}", f"{returns.mean():.1f}",
            ", ".join(f"{run.run.seed}: {value:.1f}" for run, value in zip(runs, returns, strict=True)),
        ])  # fmt: skip
    return markdown_table(("environment", "steps", "threshold", "reached", "mean", "seed: evaluation"), lines)


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """
    :param rows: Rows of ``comparison.csv``, of which the last of each setting counts
    :return: One line per setting
    """
    lines = []
    for row in {tuple(str(row[name]) for name in ("env", "n_envs", "batch_size", "width")): row for row in rows}.values():
        speeds = [f"{int(row[name]):,}" if row[name] else "" for name in ("grpo", "torch", "ppo", "sbx")]
        ratios = [[float(value) for value in row[name].split()] for name in ("over_ppo", "over_sbx")]
        over = [f"{ratio[0]:.1f} ({ratio[1]:.1f} to {ratio[2]:.1f})" if ratio else "" for ratio in ratios]
        share = f"{float(row['bare_share'].split()[0]):.0%}"
        sizes = [str(row["n_envs"]), str(row["batch_size"]), f"{row['width']} x {row['width']}"]
        lines.append([row["env"], *sizes, *speeds, *over, share])
    header = (
        "environment", "how many", "minibatch", "network", "GRPO, steps/s", "without machine code", "PPO", "sbx's PPO",
        "over PPO", "over sbx's PPO", "bare environment's share",
    )  # fmt: skip
    return markdown_table(header, lines)
