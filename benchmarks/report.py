"""
Tables and pictures of what `benchmarks/run.py` has measured, written into pages of `docs/`, README and beside them.

    python -m benchmarks.report           # from benchmarks/results alone; nothing is run
    python -m benchmarks.report --print   # to the terminal, docs stay as they are

Definitions: the *area* is the mean over the budget of the mean return of the last 20 training episodes; an area *over PPO's*
is what lies above the return of random actions, divided by the mean of the same for PPO. Aggregates over environments are
rliable's (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264): interquartile mean over runs and environments, with 95%
intervals of a bootstrap stratified by environment, which draws PPO's seeds anew as well, and the probability that a run is
better than one of PPO. Other intervals are 95% bootstraps of the mean over seeds.
"""

import argparse
import contextlib
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rliable import library as rly
from rliable import metrics, plot_utils
from scipy import stats

from benchmarks import posture
from benchmarks.curves import WINDOW, LearningCurve
from benchmarks.learning import read_rows
from benchmarks.run import RESULTS, Run, expand, load_matrix, row_key
from benchmarks.tables import format_steps, markdown_table

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "benchmark.md", ROOT / "docs" / "which_buffer.md", ROOT / "README.md")
PICTURES = ROOT / "docs"
N_RESAMPLES = 2000
#: Smaller ones are for tuning.
FIRST_REPORTED_SEED = 100
#: Stands for infinity where a library needs a number: a mean with any of these in it is told from all others.
VERY_LARGE = 1e12
NO_ROWS = "There are no rows yet."
#: Suites of which a table of areas is made.
ABLATIONS = (
    "minigrid",
    "pendulum",
    "cheetah_reuse",
    "cheetah",
    "cheetah_full",
    "cheetah_start",
    "buffers",
    "groups",
    "starts",
    "baseline",
)
LABELS = {"grpo": "GRPO", "ppo": "PPO", "grpo-default": "GRPO, defaults", "ppo-default": "PPO, defaults"}
#: Of the upper quartile of the returns around it; an episode with less has fallen
FALLEN = 0.7
COLOURS = {"grpo": "tab:blue", "ppo": "tab:orange", "grpo-default": "tab:cyan", "ppo-default": "tab:brown"}


class Finished(NamedTuple):
    """
    :param run: what was run
    :param row: of the CSV
    """

    run: Run
    row: dict[str, str]

    def curve(self, results: pathlib.Path) -> LearningCurve:
        """
        :param results: folder
        :return: the learning curve
        """
        with np.load(self.run.curve_path(results)) as file:
            return LearningCurve(file["steps"], file["returns"])


class Suite:
    """
    The finished runs of a suite.

    :param name: of the suite
    :param results: folder
    :param matrix: from :func:`benchmarks.run.load_matrix`
    """

    def __init__(self, name: str, results: pathlib.Path = RESULTS, matrix: dict[str, Any] | None = None):
        matrix = load_matrix() if matrix is None else matrix
        self.name, self.results = name, results
        self.arms: list[str] = matrix["suites"][name]["arms"]
        self.timesteps: dict[str, int] = matrix["suites"][name]["timesteps"]
        rows = {row_key(row): row for row in read_rows(results / "runs.csv")}
        self._finished: dict[tuple[str, str], list[Finished]] = {}
        self._learns: dict[tuple[str, str], bool] = {}
        for run in expand(matrix, name):
            if (row := rows.get(run.key())) is not None:
                self._finished.setdefault((run.arm, run.env), []).append(Finished(run, row))

    def runs(self, arm: str, env: str) -> list[Finished]:
        """
        :param arm: name
        :param env: Gymnasium environment
        :return: finished runs, by seed
        """
        return self._finished.get((arm, env), [])

    def all_runs(self) -> list[Finished]:
        """:return: finished runs of all arms and environments"""
        return [each for runs in self._finished.values() for each in runs]

    def column(self, arm: str, env: str, name: str) -> np.ndarray:
        """
        :param arm: name
        :param env: Gymnasium environment
        :param name: of a column of the CSV
        :return: its values, shape ``(n_seeds,)``
        """
        return np.array([float(each.row[name]) for each in self.runs(arm, env)])

    def by_seed(self, arm: str, env: str) -> dict[int, float]:
        """
        :param arm: name
        :param env: Gymnasium environment
        :return: area of each run, by seed
        """
        return {each.run.seed: float(each.row["auc"]) for each in self.runs(arm, env)}

    def random_area(self, env: str) -> float:
        """
        :param env: Gymnasium environment
        :return: area of random actions, which is their mean return
        """
        return float(self.column("random", env, "auc")[0])

    def above_random(self, arm: str, env: str) -> float:
        """
        :param arm: name
        :param env: Gymnasium environment
        :return: mean area above the return of random actions
        """
        return float(self.column(arm, env, "auc").mean()) - self.random_area(env)

    def learns(self, arm: str, env: str) -> bool:
        """
        :param arm: name
        :param env: Gymnasium environment
        :return: whether it is better than random actions: the interval of its mean area is, of a single seed the area itself
        """
        if (arm, env) not in self._learns:
            area = mean_over_seeds(self.column(arm, env, "auc"))
            self._learns[arm, env] = bool(np.fmin(area.value, area.low) > self.random_area(env))
        return self._learns[arm, env]

    def curves(self, arm: str, env: str) -> list[LearningCurve]:
        """
        :param arm: name
        :param env: Gymnasium environment
        :return: learning curves, by seed
        """
        return [each.curve(self.results) for each in self.runs(arm, env)]

    def compared(self, *arms: str) -> list[str]:
        """
        :param arms: names
        :return: environments with finished runs of all of them
        """
        return [env for env in self.timesteps if all(self.runs(arm, env) for arm in ("random", *arms))]


def common_seeds(suite: Suite, arms: Sequence[str], envs: Sequence[str]) -> list[int]:
    """
    :param suite: of finished runs
    :param arms: names
    :param envs: Gymnasium environments
    :return: seeds of which every arm has a run in every environment
    """
    return sorted(set.intersection(*(set(suite.by_seed(arm, env)) for arm in arms for env in envs)))


def raw_areas(suite: Suite, arm: str, envs: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
    """
    :param suite: of finished runs
    :param arm: name
    :param envs: Gymnasium environments
    :param seeds: of the runs
    :return: areas, shape ``(n_seeds, n_envs)``
    """
    return np.array([[suite.by_seed(arm, env)[seed] for env in envs] for seed in seeds]).reshape(len(seeds), len(envs))


def areas_and_scales(
    suite: Suite, arm: str, reference: str, envs: Sequence[str], seeds: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """
    What areas over the reference's are a fraction of.

    :param suite: of finished runs
    :param arm: name
    :param reference: by whose mean areas are divided, that of all its seeds
    :param envs: Gymnasium environments
    :param seeds: of the runs
    :return: areas above that of random actions, shape ``(n_seeds, n_envs)``, and for each environment those of the reference,
        shape ``(n,)``; where it is no better than random actions, infinity for a run that is and 0 for others, over one
    """
    above = raw_areas(suite, arm, envs, seeds) - np.array([suite.random_area(env) for env in envs])
    learns = np.array([suite.learns(reference, env) for env in envs], dtype=bool)
    scales = [
        suite.column(reference, env, "auc") - suite.random_area(env) if learned else np.ones(1)
        for env, learned in zip(envs, learns, strict=True)
    ]
    return np.where(learns, above, np.where(above > 0.0, math.inf, 0.0)), scales


def where_reference_learns(suite: Suite, arms: Sequence[str], reference: str) -> tuple[list[str], list[int]]:
    """
    :param suite: of finished runs
    :param arms: names
    :param reference: that areas are to be divided by
    :return: environments where it is better than random actions, and the seeds that all arms have in all of them
    """
    envs = [env for env in suite.compared(*arms, reference) if suite.learns(reference, env)]
    return envs, common_seeds(suite, arms, envs) if envs else []


def over_means(areas: np.ndarray, scales: Sequence[np.ndarray]) -> np.ndarray:
    """
    :param areas: shape ``(n_seeds, n_envs)``
    :param scales: of each environment, shape ``(n,)``
    :return: areas over the means of the scales, shape ``(n_seeds, n_envs)``
    """
    return areas / np.array([scale.mean() for scale in scales])


def normalised_areas(suite: Suite, arms: Sequence[str], reference: str) -> tuple[dict[str, np.ndarray], list[str], list[int]]:
    """
    :param suite: of finished runs
    :param arms: names
    :param reference: by whose mean areas are divided
    :return: areas over the reference's by arm, each of shape ``(n_seeds, n_envs)``, the environments, and the seeds, those
        that all arms have in all of them. An environment where the reference is no better than random actions has no such
        area, and is left out
    """
    envs, seeds = where_reference_learns(suite, arms, reference)
    if not envs:
        return {}, [], []
    return {arm: over_means(*areas_and_scales(suite, arm, reference, envs, seeds)) for arm in arms}, envs, seeds


class Estimate(NamedTuple):
    """
    :param value: point estimate
    :param low: lower end of a 95% interval, NaN where there is none
    :param high: upper end
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text()

    def text(self, infinity: str = "never") -> str:
        """
        :param infinity: what stands for it
        :return: the estimate and, where there is one, its interval
        """
        value, low, high = (format_number(each, infinity) for each in self)
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


def format_number(value: float, infinity: str = "never") -> str:
    """
    :param value: to print
    :param infinity: what stands for it
    :return: with as many digits as its size deserves
    """
    if math.isinf(value):
        return infinity
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2}f}"


@contextlib.contextmanager
def seeded_numpy() -> Iterator[None]:
    """Seed numpy's global generator for a while: rliable draws from it, whatever random state it is given."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)


def bootstrapped(statistic: Callable[..., float], *scores: np.ndarray) -> Estimate:
    """
    :param statistic: of scores
    :param scores: that it takes, each of shape ``(n_seeds, n_envs)``; drawn independently of one another
    :return: with rliable's stratified bootstrap interval, where the first have several seeds
    """
    if len(scores[0]) < 2:
        return Estimate(float(statistic(*scores)), math.nan, math.nan)
    with seeded_numpy():
        points, intervals = rly.get_interval_estimates(
            {"": scores if len(scores) > 1 else scores[0]}, lambda *each: np.array([statistic(*each)]), reps=N_RESAMPLES
        )
    (low,), (high,) = intervals[""]
    return Estimate(float(points[""][0]), float(low), float(high))


def interquartile_mean(scores: np.ndarray, scales: Sequence[np.ndarray] = ()) -> Estimate:
    """
    :param scores: shape ``(n_seeds, n_envs)``; infinity is larger than any number
    :param scales: by the mean of which the scores of each environment are divided, shape ``(n,)``; none for ones. They are
        drawn anew as the scores are
    :return: over all of them, infinity where infinite ones are within the middle half
    """

    def statistic(scores: np.ndarray, *scales: np.ndarray) -> float:
        ratios = over_means(scores, scales) if scales else scores
        return metrics.aggregate_iqm(np.where(np.isinf(ratios), VERY_LARGE, ratios))

    estimate = bootstrapped(statistic, scores, *(scale[:, None] for scale in scales))
    return Estimate(*(math.inf if value > VERY_LARGE / 1000 else value for value in estimate))


def probability_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """
    :param ours: shape ``(n_seeds, n_envs)``
    :param theirs: shape ``(n_seeds, n_envs)``
    :return: that a run of ours is better than one of theirs in the same environment, averaged over environments
    """
    return bootstrapped(metrics.probability_of_improvement, ours, theirs)


def mean_over_seeds(values: np.ndarray) -> Estimate:
    """
    :param values: shape ``(n_seeds,)``
    :return: mean
    """
    if len(values) < 2:
        return Estimate(float(values.mean()), math.nan, math.nan)
    if np.ptp(values) == 0.0:
        return Estimate(float(values[0]), float(values[0]), float(values[0]))
    interval = stats.bootstrap(
        (np.sort(values),), np.mean, n_resamples=N_RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(float(values.mean()), float(interval.low), float(interval.high))


def area_table(suite: Suite, arm: str, reference: str) -> str:
    """
    :param suite: of finished runs
    :param arm: to judge
    :param reference: to compare with
    :return: one line per environment
    """
    ours, theirs = LABELS[arm], LABELS[reference]
    header = (
        "environment", "steps", "seeds", "random", f"area, {ours}", f"area, {theirs}", "ratio", f"evaluation, {ours}",
        f"evaluation, {theirs}",
    )  # fmt: skip
    lines = []
    compared = suite.compared(arm, reference)
    if not compared:
        return NO_ROWS
    for env in compared:
        areas = [suite.column(each, env, "auc") for each in (arm, reference)]
        evaluations = [suite.column(each, env, "eval_mean") for each in (arm, reference)]
        ratio = f"{theirs} no better than random"
        if suite.learns(reference, env):
            ratio = format_number(suite.above_random(arm, env) / suite.above_random(reference, env))
        lines.append([
            env, f"{suite.timesteps[env]:,}", " and ".join(str(n) for n in sorted({len(each) for each in areas})),
            format_number(suite.random_area(env)), *map(mean_over_seeds, areas), ratio, *map(mean_over_seeds, evaluations),
        ])  # fmt: skip
    return markdown_table(header, lines)


def fallen(returns: np.ndarray) -> np.ndarray:
    """
    Which episodes fell behind the others of their time: on HalfCheetah those that spend a part of it lying down.

    :param returns: of neighbouring episodes, mostly positive, shape ``(n,)``
    :return: whether each is below ``FALLEN`` times their upper quartile, shape ``(n,)``
    """
    return returns < FALLEN * np.quantile(returns, 0.75)


def fall_shares(curve: LearningCurve, timesteps: int) -> tuple[float, float, float]:
    """
    :param curve: of a run, with training episodes in each fifth of the budget
    :param timesteps: budget of the run
    :return: share of fallen episodes after the first fifth, each judged within its own; mean return of the last fifth; and
        that of its episodes that did not fall
    """
    steps, returns = np.asarray(curve.steps), np.asarray(curve.returns)
    fifths = np.array_split(returns, np.searchsorted(steps, np.linspace(0, timesteps, 6)[1:-1], side="right"))
    fell = [fallen(each) for each in fifths[1:]]
    return float(np.concatenate(fell).mean()), float(fifths[-1].mean()), float(fifths[-1][~fell[-1]].mean())


def fall_table(suite: Suite, env: str, arms: Sequence[str]) -> str:
    """
    :param suite: of finished runs
    :param env: of it
    :param arms: of it
    :return: for each arm one line per seed, sorted by the share of fallen episodes, then their mean
    """
    lines = []
    for arm in arms:
        runs = suite.runs(arm, env)
        if not runs:
            return NO_ROWS
        figures = [
            (*fall_shares(each.curve(suite.results), suite.timesteps[env]), float(each.row["eval_mean"]), str(each.run.seed))
            for each in runs
        ]
        means = np.mean([each[:-1] for each in figures], axis=0)
        for share, *returns, seed in [*sorted(figures), (*means, "mean")]:
            lines.append([LABELS[arm], seed, f"{share:.0%}", *map(format_number, returns)])
    return markdown_table(("", "seed", "fallen", "last fifth", "without the fallen", "evaluation"), lines)


def ablation_table(suite: Suite) -> str:
    """
    :param suite: of finished runs
    :return: areas, one line per arm that has a seed in all environments it was run on, one column per environment, over the
        seeds that these arms share; and where several arms have more, a second table of these
    """
    envs = {arm: [env for env in suite.timesteps if suite.runs(arm, env)] for arm in suite.arms}
    seeds = {arm: set(common_seeds(suite, [arm], envs[arm])) for arm in suite.arms if envs[arm]}

    def shared_by(some: Sequence[str]) -> set[int]:
        return set.intersection(*(seeds[arm] for arm in some)) if some else set()

    arms = [arm for arm in seeds if seeds[arm]]
    longer = [arm for arm in arms if seeds[arm] > shared_by(arms)]
    compared = [arms, longer] if len(longer) > 1 else [arms]
    tables = [ablation_over(suite, some, sorted(shared_by(some))) for some in compared if shared_by(some)]
    return "\n\n".join(tables) or NO_ROWS


def ablation_over(suite: Suite, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """
    :param suite: of finished runs
    :param arms: lines
    :param seeds: of the runs
    :return: areas, one line per arm, one column per environment
    """
    envs = [env for env in suite.timesteps if any(suite.runs(arm, env) for arm in arms)]
    numbers = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))

    def area(arm: str, env: str) -> Estimate | str:
        return mean_over_seeds(raw_areas(suite, arm, [env], seeds)[:, 0]) if suite.runs(arm, env) else "not run"

    header = [numbers, *(f"{env}, {suite.timesteps[env]:,}" for env in envs)]
    return markdown_table(header, [[arm, *(area(arm, env) for env in envs)] for arm in arms])


def aggregate_table(suite: Suite, pairs: Sequence[tuple[str, str]]) -> str:
    """
    :param suite: of finished runs
    :param pairs: arms, and with what each is compared
    :return: one line per pair
    """
    header = (
        "comparison", "environments", "seeds", "area at least as large", "interquartile mean of ratios",
        "probability of improvement",
    )  # fmt: skip
    lines, notes = [], []
    for arm, reference in pairs:
        compared = suite.compared(arm, reference)
        if not compared:
            continue
        title = f"{LABELS[arm]} against {LABELS[reference]}"
        seeds = common_seeds(suite, (arm, reference), compared)
        ours, theirs = (raw_areas(suite, each, compared, seeds) for each in (arm, reference))
        at_least = [
            env for env in compared if suite.column(arm, env, "auc").mean() >= suite.column(reference, env, "auc").mean()
        ]
        envs, ratio_seeds = where_reference_learns(suite, (arm, reference), reference)
        ratio: Any = "none"
        if ratio_seeds:
            ratio = interquartile_mean(*areas_and_scales(suite, arm, reference, envs, ratio_seeds))
        better = probability_of_improvement(ours, theirs) if seeds else "none"
        lines.append([title, len(compared), len(seeds), f"{len(at_least)} of {len(compared)}", ratio, better])
        if left_out := [env for env in compared if env not in envs]:
            names = ", ".join(left_out)
            note = f"{title}: no ratio on {names}, where {LABELS[reference]} is no better than random actions."
            if ratio_seeds:
                better = probability_of_improvement(*(raw_areas(suite, each, envs, ratio_seeds) for each in (arm, reference)))
                n_at_least = len(set(at_least) & set(envs))
                note += f" On the other {len(envs)} the area is at least as large on {n_at_least}, and the probability of "
                note += f"improvement {better}."
            if seeds:
                mean = interquartile_mean(*areas_and_scales(suite, arm, reference, compared, seeds)).text(infinity="∞")
                note += f" With runs better than random counted as ∞ there, others as 0, the interquartile mean is {mean}."
            notes.append(note)
    return "\n".join([markdown_table(header, lines), *(["", *notes] if notes else [])])


def seconds_per_step(suite: Suite, arms: Sequence[str], env: str) -> dict[str, float]:
    """
    :param suite: of finished runs
    :param arms: to compare
    :param env: Gymnasium environment
    :return: by arm, the median of the turns of the latest session in ``speed.csv`` that all of them took part in; empty if
        there is none
    """
    wanted = {arm: {finished.run.settings_hash() for finished in suite.runs(arm, env)} for arm in arms}
    sessions: dict[str, dict[str, list[float]]] = {}
    for row in read_rows(suite.results / "speed.csv"):
        for arm in arms:
            if row["env"] == env and row["settings_hash"] in wanted[arm]:
                sessions.setdefault(row["session"], {}).setdefault(arm, []).append(float(row["seconds_per_step"]))
    for session in sorted(sessions, key=float, reverse=True):
        if len(sessions[session]) == len(arms):
            return {arm: float(np.median(turns)) for arm, turns in sessions[session].items()}
    return {}


def seconds_where_timed(suite: Suite, arms: Sequence[str], env: str) -> dict[str, float]:
    """
    :param suite: of finished runs
    :param arms: to compare, as far as they have rows in ``speed.csv``
    :param env: Gymnasium environment
    :return: see :func:`seconds_per_step`
    """
    return seconds_per_step(suite, [arm for arm in arms if seconds_per_step(suite, [arm], env)], env)


def steps_to(curve: LearningCurve, target: float) -> float:
    """
    :param curve: of a run
    :param target: return
    :return: first step at which 20 episodes had that mean return, infinity if there is none
    """
    # Rows and curves are rounded differently
    held = curve.first_held(target - 1e-6 * abs(target))
    return math.inf if held is None else float(curve.steps[held])


def seconds_table(suite: Suite, arm: str, reference: str) -> tuple[str, Estimate | None]:
    """
    Seconds until the mean return of 20 training episodes is what the reference's last 100 had, on average over its seeds;
    where it learned more than random actions have. A run of the reference that never gets there counts with its whole
    budget, one of the arm as never.

    :param suite: of finished runs
    :param arm: to judge
    :param reference: to compare with
    :return: one line per environment, with medians over runs, and the interquartile mean, over runs, of the arm's seconds over
        the mean of the reference's
    """
    header = [
        "environment", f"{LABELS[reference]}'s final return",
        *(f"{what}, {LABELS[each]}" for what in ("runs there", "steps", "steps/s") for each in (arm, reference)),
        "ratio of seconds",
    ]  # fmt: skip
    lines = []
    seconds: list[dict[int, float]] = []
    scales: list[np.ndarray] = []
    for env in suite.compared(arm, reference):
        speeds = seconds_per_step(suite, (arm, reference), env)
        if not speeds or not suite.learns(reference, env):
            continue
        target = suite.column(reference, env, "final").mean()
        ours, theirs = (np.array([steps_to(curve, target) for curve in suite.curves(each, env)]) for each in (arm, reference))
        scales.append(np.minimum(theirs, suite.timesteps[env]) * speeds[reference])
        seconds.append({each.run.seed: steps * speeds[arm] for each, steps in zip(suite.runs(arm, env), ours, strict=True)})
        lines.append([
            env, format_number(target), *(f"{np.isfinite(steps).sum()} of {len(steps)}" for steps in (ours, theirs)),
            *(format_steps(float(np.median(steps))) for steps in (ours, theirs)),
            *(f"{1 / speeds[each]:,.0f}" for each in (arm, reference)),
            format_number(float(np.median(ours * speeds[arm]) / scales[-1].mean())),
        ])  # fmt: skip
    if not seconds:
        return NO_ROWS, None
    seeds = sorted(set.intersection(*(set(each) for each in seconds)))
    runs = np.array([[each[seed] for each in seconds] for seed in seeds])
    return markdown_table(header, lines), interquartile_mean(runs, scales) if seeds else None


def draw_curves(suite: Suite, path: pathlib.Path, by_seconds: bool) -> None:
    """
    A panel per environment: mean over seeds of the training return, with the range of the seeds.

    :param suite: of finished runs
    :param path: of the picture
    :param by_seconds: draw seconds, at the speeds in ``speed.csv``, instead of steps
    """
    envs = [env for env in suite.timesteps if any(suite.runs(arm, env) for arm in suite.arms)]
    columns = max(1, min(len(envs), 5))
    rows = max(1, math.ceil(len(envs) / columns))
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.6 * rows), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, env in zip(axes.flat, envs, strict=False):
        arms = [arm for arm in suite.arms if suite.runs(arm, env)]
        speeds = seconds_where_timed(suite, arms, env) if by_seconds else dict.fromkeys(arms, 1.0)
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


def profiled_arms(suite: Suite) -> list[str]:
    """
    :param suite: of finished runs
    :return: PPO, and in order those of its arms that leave the environments as they are and at least two common seeds
    """
    arms = ["ppo"]
    _, envs, _ = normalised_areas(suite, arms, "ppo")
    for arm in suite.arms:
        _, together, seeds = normalised_areas(suite, [*arms, arm], "ppo")
        if arm != "ppo" and together == envs and len(seeds) >= 2:
            arms.append(arm)
    return arms


def draw_profile(suite: Suite, path: pathlib.Path) -> None:
    """
    rliable's performance profiles: the share of runs whose area over PPO's exceeds a value, over the environments and seeds
    that all arms have. An arm that lacks an environment or has a single seed is left out; nothing is drawn of PPO alone.

    :param suite: of finished runs
    :param path: of the picture
    """
    arms = profiled_arms(suite)
    if len(arms) < 2:
        return
    scores, envs, seeds = normalised_areas(suite, arms, "ppo")
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


def replaced_table(results: pathlib.Path, suites: Sequence[Suite]) -> str:
    """
    Settings that reported seeds were run with and that are shown nowhere else.

    :param results: folder
    :param suites: what is shown
    :return: one line per environment and settings that have more than one such run, with the area of the present settings of
        ``grpo`` on the same seeds, and their own on smaller ones
    """
    shown = {finished.run.key() for suite in suites for finished in suite.all_runs()}
    present = {
        (env, each.run.timesteps, str(each.run.seed)): each.row
        for suite in suites
        for env in suite.timesteps
        for each in suite.runs("grpo", env)
    }
    groups: dict[tuple[str, int, str, str], list[dict[str, str]]] = {}
    for row in read_rows(results / "runs.csv"):
        key = (row["env"], int(row["timesteps"]), row["arm"], row["settings_hash"])
        groups.setdefault(key, []).append(row)

    def mean(rows: list[dict[str, str]], name: str) -> str:
        return str(mean_over_seeds(np.array([float(row[name]) for row in rows]))) if rows else "not run"

    header = (
        "environment", "steps", "settings", "hash", "reported seeds", "area", "the present ones' there", "evaluation",
        "tuning seeds", "area",
    )  # fmt: skip
    lines = []
    for (env, timesteps, arm, settings), rows in sorted(groups.items()):
        reported = [row for row in rows if int(row["seed"]) >= FIRST_REPORTED_SEED]
        tuning = [row for row in rows if int(row["seed"]) < FIRST_REPORTED_SEED]
        if len(reported) < 2 or any(row_key(row) in shown for row in reported):
            continue
        today = [present.get((env, timesteps, row["seed"])) for row in reported]
        lines.append([
            env, f"{timesteps:,}", arm, f"`{settings}`", len(reported), mean(reported, "auc"),
            mean([row for row in today if row is not None], "auc") if all(today) else "not run", mean(reported, "eval_mean"),
            len(tuning), mean(tuning, "auc"),
        ])  # fmt: skip
    return markdown_table(header, lines) if lines else NO_ROWS


def provenance(results: pathlib.Path) -> str:
    """
    :param results: folder
    :return: which code the rows are of
    """
    rows = read_rows(results / "runs.csv")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    return f"{len(rows)} rows, of the commits {commits}, with {versions}."


def sections(results: pathlib.Path = RESULTS) -> dict[str, str]:
    """
    :param results: folder
    :return: what the page shows, by name of the place
    """
    short, full = Suite("short", results), Suite("full", results)
    ablations = {name: Suite(name, results) for name in ABLATIONS}
    seconds, ratio = seconds_table(short, "grpo", "ppo")
    if ratio is not None:
        seconds += f"\n\nInterquartile mean, over runs, of the seconds over the mean of PPO's: {ratio}."
    return {
        "provenance": provenance(results),
        "aggregate": aggregate_table(short, [("grpo", "ppo"), ("grpo-default", "ppo-default"), ("grpo-default", "ppo")]),
        "short": area_table(short, "grpo", "ppo"),
        "default": area_table(short, "grpo-default", "ppo-default"),
        "seconds": seconds,
        "full": area_table(full, "grpo", "ppo"),
        "falls": fall_table(full, "HalfCheetah-v5", ["grpo", "ppo"]),
        "replaced": replaced_table(results, [short, full, *ablations.values()]),
        "posture": posture.table(read_rows(results / "posture.csv"), posture.trainings()) or NO_ROWS,
        **{name: ablation_table(suite) for name, suite in ablations.items()},
    }


def fill(page: str, contents: dict[str, str]) -> str:
    """
    :param page: with places ``<!-- report: name -->`` ... ``<!-- end -->``
    :param contents: of each place, by name
    :return: the page with the places filled
    :raises KeyError: if the page has a place that nothing fills
    """

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- report: {match[1]} -->\n{contents[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- report: (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder")
    parser.add_argument("--print", action="store_true", dest="only_print", help="leave docs as they are")
    args = parser.parse_args()
    contents = sections(args.results)
    if args.only_print:
        for name, text in contents.items():
            print(f"\n{name}\n\n{text}")
        return
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), contents), encoding="utf-8")
    short = Suite("short", args.results)
    draw_curves(short, PICTURES / "benchmark_steps.png", by_seconds=False)
    if read_rows(args.results / "speed.csv"):
        draw_curves(short, PICTURES / "benchmark_seconds.png", by_seconds=True)
    draw_profile(short, PICTURES / "benchmark_profile.png")
    print(f"wrote {', '.join(str(page) for page in PAGES)} and the pictures in {PICTURES}")


if __name__ == "__main__":
    main()
