"""
One arm against several rivals: by area, by the evaluation after training, and by seconds.

Seconds, or steps, count until an arm is as good as the last policies of a rival. The target is the rival's evaluation, a mean
over seeds. A run is there when 20 training episodes have that mean return; its seconds are its steps until then, multiplied by
the seconds per step of trainings that took turns on one machine (`python -m benchmarks.speed turns`). A run of the arm that
does not get there counts as never. A run of the rival counts with its whole budget at most, because training returns have the
noise of exploration and evaluations have not.

A *ratio* divides what is above the return of random actions by the mean of the same for the rival. Throughout, `suite` has the
finished runs, `arm` is compared, and `rivals` has for each name the arms that stand for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.curves import LearningCurve
from benchmarks.results import Arms, Suite
from benchmarks.statistics import (
    Estimate,
    chance_of_improvement,
    difference_of_means,
    format_number,
    interquartile_ratio,
    is_positive,
    mean_over_seeds,
    median,
    median_ratio,
)
from benchmarks.tables import NO_ROWS, markdown_table

#: Runs of either side that a verdict on an environment needs
MIN_SEEDS = 3
TOO_FEW_SEEDS = f"This table needs {MIN_SEEDS} seeds of an environment, and there are fewer so far."
NO_LOSSES = "Nowhere is a rival ahead."
MEASURES = {"auc": "area", "eval_mean": "evaluation"}


def paired_scores(suite: Suite, arm: str, arms: Sequence[str], column: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """
    :param arms: Arms that stand for the rival
    :param column: ``auc`` or ``eval_mean``
    :return: By environment the scores of both, above those of random actions, each of shape ``(n_seeds,)``. Environments in
        which neither is better than random actions are left out
    """
    scores = {}
    for env in suite.timesteps:
        rival = suite.arm_in(arms, env)
        if rival is None or not suite.runs(arm, env):
            continue
        ours, theirs = (suite.column(each, env, column) - suite.random_area(env) for each in (arm, rival))
        if is_positive(ours) or is_positive(theirs):
            scores[env] = ours, theirs
    return scores


def scores_by_arm(suite: Suite, arms: Arms, column: str) -> dict[str, list[np.ndarray]]:
    """
    :param column: ``auc`` or ``eval_mean``
    :return: For each name the scores of its runs in each environment that it has: 0 is random actions, and 1 the mean of the
        best name there. Each of shape ``(n_seeds,)``. Environments in which nobody is better than random actions are left out
    """
    return _relative_to_the_best(suite, arms, lambda arm, env: suite.column(arm, env, column))


def curves_by_arm(suite: Suite, arms: Arms, n_points: int) -> dict[str, list[np.ndarray]]:
    """
    :param n_points: Number of points
    :return: For each name the learning curves of its runs in each environment that it has, each of shape ``(n_seeds,
        n_points)``, at equal shares of the budget: 0 is random actions, and 1 the mean of the best name at the end.
        Environments in which nobody ends better than random actions are left out
    """

    def smoothed(arm: str, env: str) -> np.ndarray:
        steps = np.linspace(0, suite.timesteps[env], n_points + 1)[1:]
        return np.array([curve.smoothed(steps) for curve in suite.curves(arm, env)])

    return _relative_to_the_best(suite, arms, smoothed)


def _relative_to_the_best(suite: Suite, arms: Arms, measure: Callable[[str, str], np.ndarray]) -> dict[str, list[np.ndarray]]:
    """
    :param measure: Function of an arm and an environment, which returns one value or one curve for each seed
    :return: For each name the values in each environment that it has, where 0 is random actions, and 1 the mean of the best
        name, at the end of the curves. Environments in which nobody ends better than random actions are left out
    """

    def last(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(values), -1)[:, -1]

    scores: dict[str, list[np.ndarray]] = {name: [] for name in arms}
    for env in suite.timesteps:
        found = {name: suite.arm_in(each, env) for name, each in arms.items()}
        above = {name: measure(arm, env) - suite.random_area(env) for name, arm in found.items() if arm}
        if any(is_positive(last(values)) for values in above.values()):
            best = max(last(values).mean() for values in above.values())
            for name, values in above.items():
                scores[name].append(values / best)
    return {name: each for name, each in scores.items() if each}


def environments_table(suite: Suite, arms: Arms, column: str) -> str:
    """
    :param arms: For each name the arms that stand for it
    :param column: ``auc`` or ``eval_mean``
    :return: One line per environment, one column per name with runs: means over the seeds that are there. Numbers of steps and
        of seeds have columns if they differ
    """
    lines: list[list[Any]] = []
    arms = suite.with_runs(arms)
    for env in suite.timesteps:
        found = {name: suite.arm_in(each, env) for name, each in arms.items()}
        if not any(found.values()) or not suite.runs("random", env):
            continue
        means = ["" if each is None else mean_over_seeds(suite.column(each, env, column)) for each in found.values()]
        n_seeds = sorted({len(suite.runs(each, env)) for each in found.values() if each is not None})
        counts = str(n_seeds[0]) if len(n_seeds) == 1 else f"{n_seeds[0]}-{n_seeds[-1]}"
        random = format_number(suite.random_area(env))
        lines.append([env.removeprefix("sb3_grpo/"), f"{suite.timesteps[env]:,}", counts, random, *means])
    header = ["environment", "steps", "seeds", "random", *arms]
    shown = [i for i in range(len(header)) if i not in (1, 2) or len({line[i] for line in lines}) > 1]
    return markdown_table([header[i] for i in shown], [[line[i] for i in shown] for line in lines])


class Comparison(NamedTuple):
    """
    An arm against a rival by one measure.

    :param ratio: Interquartile mean of the ratios, if there are any
    :param improvement: Probability of improvement, if there are runs of both
    :param n_ratios: Environments with a ratio: those in which the rival is better than random actions
    :param n_envs: Environments in which either is
    """

    ratio: Estimate | None
    improvement: Estimate | None
    n_ratios: int
    n_envs: int


def comparison(suite: Suite, arm: str, arms: Sequence[str], column: str) -> Comparison:
    """
    :param arms: Arms that stand for the rival
    :param column: ``auc`` or ``eval_mean``
    :return: The comparison over all environments
    """
    pairs = list(paired_scores(suite, arm, arms, column).values())
    with_ratio = [(ours, theirs) for ours, theirs in pairs if is_positive(theirs)]
    ratio = interquartile_ratio(with_ratio) if with_ratio else None
    improvement = chance_of_improvement(pairs) if pairs else None
    return Comparison(ratio, improvement, len(with_ratio), len(pairs))


class Race(NamedTuple):
    """
    One environment.

    :param ours: Seconds of each run of the arm, infinity where it never gets there, shape ``(n_seeds,)``
    :param theirs: Seconds of each run of the rival, shape ``(n_seeds,)``
    :param n_there: Runs of the rival that get there
    """

    ours: np.ndarray
    theirs: np.ndarray
    n_there: int


def seconds_per_step(suite: Suite, arms: Sequence[str], env: str) -> dict[str, float]:
    """
    :param arms: Arms
    :param env: Gymnasium environment
    :return: By arm, the median of the turns of the latest session in ``speed.csv`` that all of them took part in; empty if
        there is none
    """
    wanted = {arm: {finished.run.settings_hash() for finished in suite.runs(arm, env)} for arm in arms}
    sessions: dict[str, dict[str, list[float]]] = {}
    for row in suite.speed_rows:
        for arm in arms:
            if row["env"] == env and row["settings_hash"] in wanted[arm]:
                sessions.setdefault(row["session"], {}).setdefault(arm, []).append(float(row["seconds_per_step"]))
    for session in sorted(sessions, key=float, reverse=True):
        if len(sessions[session]) == len(arms):
            return {arm: float(np.median(turns)) for arm, turns in sessions[session].items()}
    return {}


def steps_to(curve: LearningCurve, target: float) -> float:
    """
    :param curve: Curve of a run
    :param target: Return
    :return: First step at which 20 episodes had that mean return, infinity if there is none
    """
    # Rows and curves are rounded differently
    held = curve.first_held(target - 1e-6 * abs(target))
    return math.inf if held is None else float(curve.steps[held])


def races(suite: Suite, arm: str, arms: Sequence[str], in_steps: bool = False, compiling: float = 0.0) -> dict[str, Race]:
    """
    :param arms: Arms that stand for the rival
    :param in_steps: Whether to count steps instead of seconds
    :param compiling: Seconds that each run of ``arm`` compiles at first
    :return: By environment, where the rival's evaluation is better than random actions and the speed of both was measured
    """
    found = {}
    for env in suite.timesteps:
        rival = suite.arm_in(arms, env)
        if rival is None or not suite.runs(arm, env) or not (speeds := seconds_per_step(suite, (arm, rival), env)):
            continue
        if in_steps:
            speeds = dict.fromkeys(speeds, 1.0)
        evaluations = suite.column(rival, env, "eval_mean")
        if is_positive(evaluations - suite.random_area(env)):
            target = float(evaluations.mean())
            ours, theirs = (np.array([steps_to(each, target) for each in suite.curves(name, env)]) for name in (arm, rival))
            budgets = np.minimum(theirs, suite.timesteps[env])
            found[env] = Race(compiling + ours * speeds[arm], budgets * speeds[rival], int(np.isfinite(theirs).sum()))
    return found


def seconds_ratio(suite: Suite, arm: str, arms: Sequence[str], *how: Any) -> Estimate | None:
    """
    :param how: Further arguments of :func:`races`
    :return: Median, over environments and seeds, of the seconds over the mean of the rival's, if there are any. An
        interquartile mean would say nothing as soon as a quarter of the runs does not get there
    """
    pairs = [(race.ours, race.theirs) for race in races(suite, arm, arms, *how).values()]
    return median_ratio(pairs) if pairs else None


def seconds_ratio_per_step(suite: Suite, arm: str, arms: Sequence[str]) -> Estimate | None:
    """:return: Median over environments of the seconds per step over those of the rival, if there are any"""
    ratios = []
    for env in suite.timesteps:
        rival = suite.arm_in(arms, env)
        if rival is not None and (speeds := seconds_per_step(suite, (arm, rival), env)):
            ratios.append(speeds[arm] / speeds[rival])
    return median(np.array(ratios)) if ratios else None


def seconds_runs_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """:return: One line per rival: how many runs of either side get there"""
    lines = []
    for name, arms in rivals.items():
        if each := races(suite, arm, arms).values():
            ours = sum(int(np.isfinite(race.ours).sum()) for race in each), sum(len(race.ours) for race in each)
            theirs = sum(race.n_there for race in each), sum(len(race.theirs) for race in each)
            lines.append([name, len(each), *(f"{n} of {n_all}" for n, n_all in (ours, theirs))])
    return markdown_table(["against", "environments", "runs of GRPO that get there", "runs of the rival"], lines)


def compilation_table(suite: Suite, arm: str, rivals: Arms, seconds: Sequence[float]) -> str:
    """:return: One line per rival: the ratio of seconds if each run of the arm compiles for so long at first"""
    lines: list[list[Any]] = []
    for name, arms in rivals.items():
        ratios = [seconds_ratio(suite, arm, arms, False, each) for each in seconds]
        if None not in ratios:
            lines.append([name, *ratios])
    return markdown_table(["against", *(f"{each:g} s" for each in seconds)], lines)


def seconds_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """:return: One line per environment: steps per second of each, and after a semicolon the median ratio of seconds"""
    rivals = suite.with_runs(rivals)
    by_rival = {name: races(suite, arm, arms) for name, arms in rivals.items()}
    lines = []
    for env in suite.timesteps:
        found = {name: suite.arm_in(arms, env) for name, arms in rivals.items()}
        speeds = seconds_per_step(suite, [arm, *filter(None, found.values())], env)
        if not speeds:
            continue
        cells = [env.removeprefix("sb3_grpo/"), f"{1 / speeds[arm]:,.0f}"]
        for name, rival in found.items():
            race = by_rival[name].get(env)
            share = f"; {format_number(float(np.median(race.ours) / race.theirs.mean()))}" if race else ""
            cells.append(f"{1 / speeds[rival]:,.0f}{share}" if rival else "")
        lines.append(cells)
    return markdown_table(["environment", "GRPO", *rivals], lines)


def summary_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """:return: One line per rival: ratios of areas, of evaluations and of seconds, and the probability of improvement"""
    header = ["against", "environments", "area", "evaluation", "probability of improvement", "seconds", "seconds per step"]
    lines: list[list[Any]] = []
    for name, arms in rivals.items():
        area, evaluation = (comparison(suite, arm, arms, column) for column in ("auc", "eval_mean"))
        if area.n_envs:
            counts = [f"{each.n_ratios} of {each.n_envs}" for each in (area, evaluation)]
            times = [measured(suite, arm, arms) for measured in (seconds_ratio, seconds_ratio_per_step)]
            estimates = [area.ratio, evaluation.ratio, evaluation.improvement, *times]
            lines.append([name, " and ".join(dict.fromkeys(counts)), *("" if each is None else each for each in estimates)])
    return markdown_table(header, lines)


def verdict(ratio: Estimate, less_is_better: bool = False) -> str:
    """
    :param ratio: Ratio with its interval
    :param less_is_better: Whether a ratio below one is good
    :return: The verdict: better or worse if the interval lies on one side of one, and level otherwise. The ends count as they
        are printed, with two digits, because a third would depend on the draws of the bootstrap
    """
    if round(ratio.low, 2) <= 1.0 <= round(ratio.high, 2):
        return "level"
    return "better" if (ratio.low > 1.0) is not less_is_better else "worse"


def claim(suite: Suite, arm: str, arms: Sequence[str], opening: str) -> str:
    """
    :param arms: Arms that stand for the rival
    :param opening: Beginning of the sentence
    :return: The sentence: by area, evaluation, seconds and steps separately, whether the arm is better, level or worse, and in
        how many environments. Seconds and steps are left out where seconds were not measured
    """
    compared = {name: comparison(suite, arm, arms, column) for column, name in MEASURES.items()}
    ratios = {
        **{name: each.ratio for name, each in compared.items()},
        "seconds": seconds_ratio(suite, arm, arms),
        "steps": seconds_ratio(suite, arm, arms, True),
    }
    parts = [
        f"**{verdict(ratio, name in ('seconds', 'steps'))}** by {name}, {ratio}"
        for name, ratio in ratios.items()
        if ratio is not None
    ]
    counts = " or ".join(str(n) for n in sorted({each.n_ratios for each in compared.values()}))
    return f"{opening} {', '.join(parts[:-1])} and {parts[-1]}, in {counts} environments." if parts else NO_ROWS


def speed_claim(suite: Suite, arm: str, arms: Sequence[str], opening: str) -> str:
    """
    :param arms: Arms that stand for the rival
    :param opening: Beginning of the sentence
    :return: The sentence: the seconds per step over those of the rival
    """
    per_step = seconds_ratio_per_step(suite, arm, arms)
    return NO_ROWS if per_step is None else f"{opening} {per_step} times as long per step."


def losses_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """
    :return: One line for each environment and measure in which the mean of a rival is larger, as far as two digits show: the
        means of both, and their difference with its interval
    """
    lines: list[list[Any]] = []
    has_rows = False
    for name, arms in rivals.items():
        for column, measure in MEASURES.items():
            for env, pair in paired_scores(suite, arm, arms, column).items():
                has_rows, difference = True, difference_of_means(*pair)
                if round(difference.value, 2) < 0:
                    means = [format_number(scores.mean() + suite.random_area(env)) for scores in pair]
                    lines.append([name, measure, env.removeprefix("sb3_grpo/"), *means, difference])
    header = ["rival", "by", "environment", "GRPO", "rival's", "difference"]
    return NO_LOSSES if has_rows and not lines else markdown_table(header, lines)


def has_enough_seeds(pair: tuple[np.ndarray, np.ndarray]) -> bool:
    """:return: Whether both arms have the runs in an environment that a verdict needs"""
    return min(len(scores) for scores in pair) >= MIN_SEEDS


def outcome(difference: Estimate) -> str:
    """
    :param difference: Difference of means with its interval
    :return: ``ahead`` if the interval lies above zero, ``behind`` if it lies below, and ``level`` otherwise
    """
    return "ahead" if difference.low > 0 else "behind" if difference.high < 0 else "level"


def outcomes_by_environment(suite: Suite, arm: str, rivals: Arms) -> str:
    """
    :return: One line per environment, one column per rival: whether the arm is ahead, level or behind by evaluation and, if
        that is another word, by area. A dash where there are fewer than ``MIN_SEEDS`` seeds, no such rival, or neither is
        better than random actions
    """
    rivals, columns, lines = suite.with_runs(rivals), ("eval_mean", "auc"), []
    scores = [[paired_scores(suite, arm, arms, column) for column in columns] for arms in rivals.values()]
    for env in suite.timesteps:
        cells = []
        for by_column in scores:
            pairs = [by_env.get(env) for by_env in by_column]
            words = [outcome(difference_of_means(*pair)) if pair and has_enough_seeds(pair) else "-" for pair in pairs]
            cells.append(" / ".join(dict.fromkeys(words)).replace("behind", "**behind**"))
        if set(cells) - {"-"}:
            lines.append([env.removeprefix("sb3_grpo/"), *cells])
    return markdown_table(["environment", *rivals], lines)


def outcomes_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """
    :return: One line per rival and measure: the number of environments in which the arm is ahead, level and behind, and the
        differences where it is behind, see :func:`outcome`. Environments with fewer than ``MIN_SEEDS`` seeds, or in which
        neither is better than random actions, are not counted
    """
    lines: list[list[Any]] = []
    has_rows = False
    for name, arms in rivals.items():
        for column, measure in MEASURES.items():
            scores = paired_scores(suite, arm, arms, column)
            has_rows = has_rows or bool(scores)
            enough = {env: pair for env, pair in scores.items() if has_enough_seeds(pair)}
            differences = {env.removeprefix("sb3_grpo/"): difference_of_means(*pair) for env, pair in enough.items()}
            n_ahead = sum(outcome(each) == "ahead" for each in differences.values())
            behind = [f"{env} {each}" for env, each in differences.items() if outcome(each) == "behind"]
            if differences:
                n_level = len(differences) - n_ahead - len(behind)
                lines.append([name, measure, f"{n_ahead}, {n_level}, {len(behind)}", "<br>".join(behind)])
    if has_rows and not lines:
        return TOO_FEW_SEEDS
    return markdown_table(["against", "by", "ahead, level, behind", "behind in"], lines)
