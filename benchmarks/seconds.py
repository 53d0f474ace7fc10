"""
Seconds until an arm is as good as the last policies of a rival.

The target is the rival's evaluation, averaged over seeds. A run is there when 20 training episodes have that mean return; its
seconds are its steps until then, multiplied by the seconds per step of trainings that took turns on one machine
(`python -m benchmarks.speed turns`). A run of the arm that does not get there counts as never. A run of the rival counts with
its whole budget at most, because training returns have the noise of exploration and evaluations have not.

Throughout, `suite` has the finished runs, `arm` is compared, and `rivals` has for each name the arms that stand for it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.curves import LearningCurve
from benchmarks.results import Arms, Suite
from benchmarks.statistics import Estimate, format_number, is_positive, median, median_ratio
from benchmarks.tables import markdown_table


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


def races(suite: Suite, arm: str, arms: Sequence[str], in_steps: bool = False) -> dict[str, Race]:
    """
    :param arms: Arms that stand for the rival
    :param in_steps: Whether to count steps instead of seconds
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
            found[env] = Race(ours * speeds[arm], budgets * speeds[rival], int(np.isfinite(theirs).sum()))
    return found


def ratio(suite: Suite, arm: str, arms: Sequence[str], in_steps: bool = False) -> Estimate | None:
    """
    :param in_steps: Whether to count steps instead of seconds
    :return: Median, over environments and seeds, of the seconds over the mean of the rival's, if there are any. An
        interquartile mean would say nothing as soon as a quarter of the runs does not get there
    """
    pairs = [(race.ours, race.theirs) for race in races(suite, arm, arms, in_steps).values()]
    return median_ratio(pairs) if pairs else None


def ratio_per_step(suite: Suite, arm: str, arms: Sequence[str]) -> Estimate | None:
    """:return: Median over environments of the seconds per step over those of the rival, if there are any"""
    ratios = []
    for env in suite.timesteps:
        rival = suite.arm_in(arms, env)
        if rival is not None and (speeds := seconds_per_step(suite, (arm, rival), env)):
            ratios.append(speeds[arm] / speeds[rival])
    return median(np.array(ratios)) if ratios else None


def runs_table(suite: Suite, arm: str, rivals: Arms) -> str:
    """:return: One line per rival: how many runs of either side get there"""
    lines = []
    for name, arms in rivals.items():
        if each := races(suite, arm, arms).values():
            ours = sum(int(np.isfinite(race.ours).sum()) for race in each), sum(len(race.ours) for race in each)
            theirs = sum(race.n_there for race in each), sum(len(race.theirs) for race in each)
            lines.append([name, len(each), *(f"{n} of {n_all}" for n, n_all in (ours, theirs))])
    return markdown_table(["against", "environments", "runs of GRPO that get there", "runs of the rival"], lines)


def environments_table(suite: Suite, arm: str, rivals: Arms) -> str:
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
            ratio = f"; {format_number(float(np.median(race.ours) / race.theirs.mean()))}" if race else ""
            cells.append(f"{1 / speeds[rival]:,.0f}{ratio}" if rival else "")
        lines.append(cells)
    return markdown_table(["environment", "GRPO", *rivals], lines)
