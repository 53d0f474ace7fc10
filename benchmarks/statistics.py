"""
Point estimates with their intervals.

Aggregates over environments are those of rliable (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264), but intervals draw
environments anew as well as runs. All intervals are of 95%.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

#: Enough that the ends of an interval hardly depend on the draws, also of a median where many runs count as infinite
N_RESAMPLES = 50_000
#: The same for each point of a curve, where it would take minutes
N_CURVE_RESAMPLES = 2000
#: Number of values that are aggregated at a time. Where environments have different numbers of runs, all would take gigabytes
MAX_VALUES = 2**24

#: For each environment the scores of its runs, of one side or of two, each of shape ``(n_runs, ...)``
Scores = Sequence[tuple[np.ndarray, ...]]


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


def interval_of_means(values: np.ndarray, n_resamples: int = N_RESAMPLES) -> tuple[Any, Any]:
    """
    :param values: Shape ``(n_seeds, ...)``, at least two seeds
    :param n_resamples: Number of draws
    :return: Ends of the interval of the mean over seeds, each of shape ``(...)``
    """
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=n_resamples, method="percentile", rng=np.random.default_rng(0)
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

    ours, theirs = ours - theirs[0], theirs - theirs[0]  # equal scores differ by nothing, whatever the rounding of their means
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
    if values.min() > 0 or values.mean() <= 0:
        return bool(values.min() > 0)  # which no draw changes
    mean = mean_over_seeds(values)
    return bool(np.fmin(mean.value, mean.low) > 0)


def over_environments(
    of_runs: Callable[..., np.ndarray],
    aggregate: Callable[..., np.ndarray],
    scores: Scores,
    n_resamples: int = N_RESAMPLES,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    A statistic over environments and runs. Each environment counts as much as another, whatever the number of its runs: where
    it has fewer, they are repeated.

    :param of_runs: Function of the scores of each side in an environment, of shapes ``(n_draws, n_runs, ...)``, with a result
        of shape ``(n_draws, n, ...)``
    :param aggregate: Function of the results of all environments side by side, of shape ``(n_draws, n_all, ...)``, and of
        ``axis``, which is 1
    :param scores: The scores
    :param n_resamples: Number of draws
    :return: The statistic and the ends of its interval, for which environments are drawn anew, and in each of them the runs of
        every side
    """
    observed = [of_runs(*(side[None] for side in sides)) for sides in scores]
    n_results = math.lcm(*(results.shape[1] for results in observed))

    def repeated(results: np.ndarray) -> np.ndarray:
        return results[:, np.resize(np.arange(results.shape[1]), n_results)]

    rng = np.random.default_rng(0)
    envs = rng.integers(len(scores), size=(n_resamples, len(scores)))
    drawn = []
    for env, sides in enumerate(scores):
        n_draws = int((envs == env).sum())
        drawn.append(of_runs(*(side[rng.integers(len(side), size=(n_draws, len(side)))] for side in sides)))
    width = math.prod(observed[0].shape[2:])
    statistics, seen = [], np.zeros(len(scores), dtype=int)
    for chosen in np.array_split(envs, math.ceil(envs.size * n_results * width / MAX_VALUES)):
        resampled = np.empty((*chosen.shape, n_results, *observed[0].shape[2:]))
        for env, results in enumerate(drawn):
            is_env = chosen == env
            first, seen[env] = seen[env], seen[env] + is_env.sum()
            resampled[is_env] = repeated(results[first : seen[env]])
        statistics.append(aggregate(resampled.reshape(len(chosen), -1, *resampled.shape[3:]), axis=1))
    statistic = aggregate(np.concatenate([repeated(each) for each in observed], axis=1), axis=1)[0]
    # The nearest of the values, because there is nothing between a number and infinity
    return statistic, *np.quantile(np.concatenate(statistics), [0.025, 0.975], axis=0, method="nearest")


def interquartile_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """
    :param values: Values
    :param axis: Axis over which the mean is taken
    :return: The mean of the middle half
    """
    return stats.trim_mean(values, 0.25, axis=axis)


def ratios(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """
    :param ours: Scores of one side, shape ``(n_draws, n_runs)``; may be infinite
    :param theirs: Scores of the other, shape ``(n_draws, m_runs)``, finite and with a positive mean
    :return: The first scores over the means of the second, shape ``(n_draws, n_runs)``
    """
    return ours / theirs.mean(axis=1, keepdims=True)


def chances(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """
    :param ours: Scores of one side, shape ``(n_draws, n_runs)``
    :param theirs: Scores of the other, shape ``(n_draws, m_runs)``
    :return: Probability that a run of the first is better than one of the second, half for a tie, shape ``(n_draws, 1)``
    """
    return (np.sign(ours[:, :, None] - theirs[:, None]).mean(axis=(1, 2)) + 1)[:, None] / 2


def interquartile_ratio(pairs: Scores) -> Estimate:
    """
    :param pairs: See :func:`ratios`
    :return: Interquartile mean of the ratios
    """
    return Estimate(*map(float, over_environments(ratios, interquartile_mean, pairs)))


def median_ratio(pairs: Scores) -> Estimate:
    """
    :param pairs: See :func:`ratios`
    :return: Median of the ratios
    """
    return Estimate(*map(float, over_environments(ratios, np.median, pairs)))


def chance_of_improvement(pairs: Scores) -> Estimate:
    """
    :param pairs: See :func:`chances`
    :return: rliable's probability of improvement, an average over environments
    """
    return Estimate(*map(float, over_environments(chances, np.mean, pairs)))


def performance_profile(scores: Sequence[np.ndarray], thresholds: np.ndarray) -> Curve:
    """
    Share of the runs with a score above each threshold (Agarwal et al. 2021, section 4.3). Environments count alike.

    :param scores: For each environment the scores of its runs, each of shape ``(n_seeds,)``
    :param thresholds: Shape ``(n,)``
    :return: The profile
    """
    return Curve(
        *over_environments(lambda own: own[:, :, None] > thresholds, np.mean, [(own,) for own in scores], N_CURVE_RESAMPLES)
    )


def interquartile_curve(scores: Sequence[np.ndarray]) -> Curve:
    """
    Interquartile mean over runs at each point of their learning curves (Agarwal et al. 2021, section 4.3). Environments count
    alike.

    :param scores: For each environment the curves of its runs, each of shape ``(n_seeds, n)``
    :return: The mean of the middle half at each point
    """
    return Curve(*over_environments(lambda own: own, interquartile_mean, [(own,) for own in scores], N_CURVE_RESAMPLES))


def median(sample: np.ndarray) -> Estimate:
    """
    :param sample: Shape ``(n,)``
    :return: Its median
    """
    resampled = np.random.default_rng(0).choice(sample, (N_RESAMPLES, len(sample)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(sample)), float(low), float(high))
