"""
Point estimates with their intervals, of arrays of shape ``(runs, environments)``.

Aggregates over environments are those of rliable (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264), with intervals by a
bootstrap that is stratified by environment. All intervals are of 95%.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rliable import library as rly
from rliable import metrics
from scipy import stats

N_RESAMPLES = 2000

#: For each environment the scores of both sides
Pairs = Sequence[tuple[np.ndarray, ...]]


class Estimate(NamedTuple):
    """
    :param value: Point estimate
    :param low: Lower end of its interval, NaN where there is none
    :param high: Upper end
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """:return: The estimate and, where there is one, its interval"""
        value, low, high = map(format_number, self)
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


class Curve(NamedTuple):
    """
    :param values: Point estimates, shape ``(n,)``
    :param low: Lower ends of their intervals, shape ``(n,)``
    :param high: Upper ends, shape ``(n,)``
    """

    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def format_number(value: float) -> str:
    """
    :param value: Number to print
    :return: The number, with as many digits as its size deserves, "never" for infinity
    """
    if math.isinf(value):
        return "never"
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


def interquartile_mean(scores: np.ndarray) -> Estimate:
    """
    :param scores: Shape ``(n_seeds, n_envs)``
    :return: The mean of the middle half, without an interval where there is a single seed
    """
    if len(scores) < 2:
        return Estimate(float(metrics.aggregate_iqm(scores)), math.nan, math.nan)
    with seeded_numpy():
        points, intervals = rly.get_interval_estimates(
            {"": scores}, lambda each: np.array([metrics.aggregate_iqm(each)]), reps=N_RESAMPLES
        )
    (low,), (high,) = intervals[""]
    return Estimate(float(points[""][0]), float(low), float(high))


def interval_of_means(values: np.ndarray) -> tuple[Any, Any]:
    """
    :param values: Shape ``(n_seeds, ...)``, at least two seeds
    :return: Ends of the interval of the mean over seeds, each of shape ``(...)``
    """
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=N_RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return interval.low, interval.high


def mean_over_seeds(values: np.ndarray) -> Estimate:
    """
    :param values: Shape ``(n_seeds,)``
    :return: Their mean
    """
    if len(values) < 2:
        return Estimate(float(values.mean()), math.nan, math.nan)
    if np.ptp(values) == 0.0:
        return Estimate(*[float(values[0])] * 3)
    low, high = interval_of_means(np.sort(values))
    return Estimate(float(values.mean()), float(low), float(high))


def difference_of_means(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """
    :param ours: Shape ``(n,)``
    :param theirs: Shape ``(m,)``
    :return: The difference of their means; both are drawn anew for the interval, which a single run does not have
    """

    def statistic(ours: np.ndarray, theirs: np.ndarray, axis: int) -> Any:
        return ours.mean(axis=axis) - theirs.mean(axis=axis)

    value = float(ours.mean() - theirs.mean())
    if min(len(ours), len(theirs)) < 2:
        return Estimate(value, math.nan, math.nan)
    interval = stats.bootstrap(
        (ours, theirs), statistic, n_resamples=N_RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def is_positive(values: np.ndarray) -> bool:
    """
    :param values: Shape ``(n_seeds,)``
    :return: Whether the interval of their mean, or a single value, is above zero
    """
    mean = mean_over_seeds(values)
    return bool(np.fmin(mean.value, mean.low) > 0)


def drawn_anew(scores: Sequence[tuple[np.ndarray, ...]]) -> Iterator[list[tuple[np.ndarray, ...]]]:
    """
    :param scores: For each environment the scores of one or more sides, each of shape ``(n_seeds,)``
    :return: Bootstrap samples: environments are drawn anew, and in each of them the runs of every side
    """
    rng = np.random.default_rng(0)
    for _ in range(N_RESAMPLES):
        drawn = [scores[env] for env in rng.integers(len(scores), size=len(scores))]
        yield [tuple(rng.choice(side, len(side)) for side in sides) for sides in drawn]


def over_environments(statistic: Callable[[Pairs], float], pairs: Pairs) -> Estimate:
    """
    :param statistic: Function of pairs
    :param pairs: For each environment the scores of both sides, each of shape ``(n_seeds,)``
    :return: The statistic; for its interval, environments are drawn anew, and in each of them the runs of either side
    """
    resampled = [statistic(drawn) for drawn in drawn_anew(pairs)]
    # The nearest of the values, because there is nothing between a number and infinity
    low, high = np.quantile(resampled, [0.025, 0.975], method="nearest")
    return Estimate(statistic(pairs), float(low), float(high))


def ratios_of_runs(pairs: Pairs) -> np.ndarray:
    """
    :param pairs: As in :func:`over_environments`, the second scores finite and with a positive mean
    :return: The first scores over the means of the second, shape ``(n_envs, n_runs)``. Where an environment has fewer runs
        than another, they are repeated, so that it counts as much
    """
    n_runs = math.lcm(*(len(ours) for ours, _ in pairs))
    return np.array([np.resize(ours, n_runs) / theirs.mean() for ours, theirs in pairs])


def ratio_of_runs(pairs: Pairs) -> float:
    """
    :param pairs: As in :func:`ratios_of_runs`
    :return: Interquartile mean of the ratios
    """
    return float(metrics.aggregate_iqm(ratios_of_runs(pairs)))


def median_ratio(pairs: Pairs) -> float:
    """
    :param pairs: As in :func:`ratios_of_runs`; first scores may be infinite
    :return: Median of the ratios
    """
    return float(np.median(ratios_of_runs(pairs)))


def chance_of_improvement(pairs: Pairs) -> float:
    """
    :param pairs: As in :func:`over_environments`
    :return: rliable's probability of improvement: that of the first side's run being better than one of the second, half for a
        tie, averaged over environments
    """
    return float(np.mean([np.mean(np.sign(ours[:, None] - theirs) + 1) / 2 for ours, theirs in pairs]))


def with_interval(statistic: Callable[[Sequence[np.ndarray]], np.ndarray], scores: Sequence[np.ndarray]) -> Curve:
    """
    :param statistic: Function of the scores, with a result of shape ``(n,)``
    :param scores: For each environment the scores of its runs, each of shape ``(n_seeds, ...)``
    :return: The statistic; for its interval, environments are drawn anew, and in each of them the runs
    """
    resampled = [statistic([own for (own,) in drawn]) for drawn in drawn_anew([(own,) for own in scores])]
    return Curve(statistic(scores), *np.quantile(resampled, [0.025, 0.975], axis=0))


def performance_profile(scores: Sequence[np.ndarray], thresholds: np.ndarray) -> Curve:
    """
    Share of the runs with a score above each threshold (Agarwal et al. 2021, section 4.3). Environments count alike.

    :param scores: For each environment the scores of its runs, each of shape ``(n_seeds,)``
    :param thresholds: Shape ``(n,)``
    :return: The profile
    """

    def profile(scores: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean([(own[:, None] > thresholds).mean(axis=0) for own in scores], axis=0)

    return with_interval(profile, scores)


def interquartile_curve(scores: Sequence[np.ndarray]) -> Curve:
    """
    Interquartile mean over runs at each point of their learning curves (Agarwal et al. 2021, section 4.3). Environments count
    alike.

    :param scores: For each environment the curves of its runs, each of shape ``(n_seeds, n)``
    :return: The mean of the middle half at each point
    """

    def middle(scores: Sequence[np.ndarray]) -> np.ndarray:
        n_runs = math.lcm(*map(len, scores))
        return stats.trim_mean(np.concatenate([np.resize(own, (n_runs, own.shape[1])) for own in scores]), 0.25, axis=0)

    return with_interval(middle, scores)


def median(sample: np.ndarray) -> Estimate:
    """
    :param sample: Shape ``(n,)``
    :return: Its median
    """
    resampled = np.random.default_rng(0).choice(sample, (10_000, len(sample)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(sample)), float(low), float(high))
