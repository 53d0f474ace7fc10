"""
One arm against several rivals: by area, and by the evaluation after training.

A *ratio* divides what is above the return of random actions by the mean of the same for the rival. Throughout, `suite` has the
finished runs, `arm` is compared, and `rivals` has for each name the arms that stand for it, of which an environment has one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.results import Suite
from benchmarks.statistics import (
    Estimate,
    chance_of_improvement,
    format_number,
    is_positive,
    mean_over_seeds,
    over_environments,
    ratio_of_runs,
)
from benchmarks.tables import markdown_table

Arms = Mapping[str, Sequence[str]]


def arm_in(suite: Suite, arms: Sequence[str], env: str) -> str | None:
    """:return: The arm that has finished runs in an environment, if any"""
    return next((arm for arm in arms if suite.runs(arm, env)), None)


def paired_scores(suite: Suite, arm: str, arms: Sequence[str], column: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """
    :param arms: Arms that stand for the rival
    :param column: ``auc`` or ``eval_mean``
    :return: By environment the scores of both, above those of random actions and over common seeds, each of shape
        ``(n_seeds,)``. Environments in which neither is better than random actions are left out
    """
    scores = {}
    for env in suite.timesteps:
        rival = arm_in(suite, arms, env)
        if rival is None or not (seeds := suite.common_seeds((arm, rival), [env])):
            continue
        ours, theirs = (suite.values(each, env, seeds, column) - suite.random_area(env) for each in (arm, rival))
        if is_positive(ours) or is_positive(theirs):
            scores[env] = ours, theirs
    return scores


def environments_table(suite: Suite, arms: Arms, column: str, units: Mapping[str, float] | None = None) -> str:
    """
    :param arms: For each name the arms that stand for it
    :param column: ``auc`` or ``eval_mean``
    :param units: By name the unit of its returns, one by default
    :return: One line per environment, one column per name: means over the seeds that are there
    """
    lines = []
    for env in suite.timesteps:
        found = {name: arm_in(suite, each, env) for name, each in arms.items()}
        if not any(found.values()) or not suite.runs("random", env):
            continue
        means = [
            "" if each is None else mean_over_seeds(suite.column(each, env, column) / (units or {}).get(name, 1.0))
            for name, each in found.items()
        ]
        n_seeds = sorted({len(suite.runs(each, env)) for each in found.values() if each is not None})
        counts = str(n_seeds[0]) if len(n_seeds) == 1 else f"{n_seeds[0]} to {n_seeds[-1]}"
        random = format_number(suite.random_area(env))
        lines.append([env.removeprefix("sb3_grpo/"), f"{suite.timesteps[env]:,}", counts, random, *means])
    return markdown_table(["environment", "steps", "seeds", "random", *arms], lines)


def comparison(suite: Suite, arm: str, arms: Sequence[str], column: str) -> tuple[Estimate | str, Estimate | str, int, int]:
    """
    :param arms: Arms that stand for the rival
    :param column: ``auc`` or ``eval_mean``
    :return: Interquartile mean of the ratios, over the environments in which the rival is better than random actions; the
        probability of improvement, over those in which either is; and the numbers of these environments
    """
    pairs = list(paired_scores(suite, arm, arms, column).values())
    with_ratio = [(ours, theirs) for ours, theirs in pairs if is_positive(theirs)]
    ratio = over_environments(ratio_of_runs, with_ratio) if with_ratio else ""
    better = over_environments(chance_of_improvement, pairs) if pairs else ""
    return ratio, better, len(with_ratio), len(pairs)


def summary_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """:return: One line per rival: ratios and probabilities of improvement, by area and by evaluation"""
    header = ["against", "environments"]
    header += [f"{what}, {name}" for name in ("area", "evaluation") for what in ("ratio", "probability of improvement")]
    lines: list[list[Any]] = []
    for name, arms in rivals.items():
        area, evaluation = (comparison(suite, arm, arms, column) for column in ("auc", "eval_mean"))
        if area[3]:
            counts = [f"{n_ratio} of {n_either}" for _, _, n_ratio, n_either in (area, evaluation)]
            lines.append([name, " and ".join(dict.fromkeys(counts)), *area[:2], *evaluation[:2]])
    return markdown_table(header, lines)


def wins_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """
    :return: One line per rival: in how many environments the mean is ahead, by area, by evaluation, and by both. Environments
        in which neither is better than random actions are not counted
    """
    lines: list[list[Any]] = []
    for name, arms in rivals.items():
        by_column = [paired_scores(suite, arm, arms, column) for column in ("auc", "eval_mean")]
        area, evaluation = (
            {env for env, (ours, theirs) in scores.items() if ours.mean() > theirs.mean()} for scores in by_column
        )
        if counted := set().union(*by_column):
            lines.append([name, *(f"{len(each)} of {len(counted)}" for each in (area, evaluation, area & evaluation))])
    return markdown_table(["against", "ahead by area", "ahead by evaluation", "ahead by both"], lines)
