"""
The relative term of the kernel buffer: it removes a part of the advantages that the members of a group have in common.

Jobs, demand, prices or wind may drive the rewards while no observation shows them. The seed fixes such inputs, so all members
of a group live through the same ones, and the advantages of the other members at the same step tell what the inputs did. A
baseline may depend on them without bias (Mao et al. 2018, https://arxiv.org/abs/1807.02264). How much to subtract is
estimated, and is zero where the members have nothing in common.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sb3_grpo import advantages as A

#: Factor for the weight of earlier rollouts in the estimate of the correlation.
FORGETTING = 0.95
#: A correlation below this many standard errors counts as noise.
N_STANDARD_ERRORS = 2.0
#: Number of rollouts after which an advantage is no longer compared with those of members that run later.
MAX_AGE = 16


def correlation_sums(advantages: np.ndarray, others: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """
    Sufficient statistics of :func:`shrunk_correlation`: ``k``, ``n``, ``d``, ``n^2``, ``n d`` and ``d^2`` of each group, shape
    ``(n_groups, 6)``. ``k`` is its number of transitions with peers, ``n = sum_t A_t x_t``, and ``d = sum_t A_t^2``, where
    ``x`` are the mean advantages of the other members at the same step, NaN where there are none.
    """
    has_peers = ~np.isnan(others)
    k, n, d = (
        A.sum_by_label(np.where(has_peers, values, 0.0), groups)
        for values in (np.ones(len(groups)), advantages * others, advantages**2)
    )
    return np.stack([k, n, d, n**2, n * d, d**2], axis=1)


def sums_of_others(values: np.ndarray) -> np.ndarray:
    """:return: For each row the sum of all other rows. Subtracting each row from the total would lose digits"""
    before, after = np.zeros_like(values), np.zeros_like(values)
    before[1:] = np.cumsum(values[:-1], axis=0)
    after[:-1] = np.cumsum(values[:0:-1], axis=0)[::-1]
    return before + after


def normalised_sums(sums: np.ndarray) -> np.ndarray:
    """:return: Sums of :func:`correlation_sums` as those of the advantages divided by their root mean square"""
    squares = np.where(sums[..., 2] > 0, sums[..., 2] / np.maximum(sums[..., 0], 1.0), 1.0)
    return sums / np.stack([np.ones_like(squares), *[squares] * 2, *[squares**2] * 3], axis=-1)


def shrunk_correlation(sums: np.ndarray) -> np.ndarray:
    """
    Intraclass correlation ``eta = sum_g n_g / sum_g d_g`` of the advantages within groups, shrunk by the non-negative garrote
    (Breiman 1995, https://doi.org/10.1080/00401706.1995.10484371): ``eta max(0, 1 - (z se / eta)^2)`` with ``z`` of
    :data:`N_STANDARD_ERRORS`.

    The steps of a group are not independent of each other, but the groups are. So the standard error is that of a ratio of
    sums over groups: ``se^2 = sum_g (n_g - eta d_g)^2 / (sum_g d_g)^2 * q / (q - 1)``, where
    ``q = (sum_g d_g)^2 / sum_g d_g^2`` is the effective number of groups.

    :param sums: Sums of :func:`correlation_sums` over groups, shape ``(..., 6)``
    :return: Shrunk ``eta`` from 0 to 1; 0 if there are fewer than two groups, shape ``(...)``
    """
    _, n, d, nn, nd, dd = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        eta, q = n / d, d**2 / dd
        variance = (nn - 2 * eta * nd + eta**2 * dd) / d**2 * q / (q - 1)
        shrunk = eta * np.maximum(1 - N_STANDARD_ERRORS**2 * variance / eta**2, 0.0)
    return np.where((eta > 0) & (q > 1 + A.TIE_TOLERANCE), np.clip(shrunk, 0.0, 1.0), 0.0)


class _Kept(NamedTuple):
    """
    Advantages that members in later rollouts can be compared with, over the root mean square of those of their rollout. All
    arrays have the same length.
    """

    groups: np.ndarray
    steps: np.ndarray
    rollouts: np.ndarray
    advantages: np.ndarray


_NOTHING = _Kept(*(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int64, np.float64)))


class RelativeTerm:
    """
    Subtracts a part of the mean advantage of the other members, see :func:`~sb3_grpo.advantages.relative_advantages`.

    Each group gets the correlation of all *other* groups of this rollout and of all groups of earlier ones, so that the
    coefficient does not depend on the actions it is applied to. Members need not run at the same time: as long as a group is
    not complete, its advantages are kept for members that run in later rollouts. Advantages shrink and grow in the course of
    training, so those of another rollout are compared in units of the root mean square of each.
    """

    def __init__(self) -> None:
        #: Metrics of the last rollout.
        self.metrics: dict[str, float] = {}
        self._sums = np.zeros(6)
        self._rollout = 0
        self._kept = _NOTHING

    def apply(
        self, advantages: np.ndarray, groups: np.ndarray, steps: np.ndarray, open_groups: Mapping[int, int]
    ) -> np.ndarray:
        """:return: The advantages of a rollout with the relative term, shape ``(n,)``, for the open groups of the ledger"""
        self._rollout += 1
        unit = np.sqrt(np.mean(advantages**2))
        now = _Kept(groups, steps, np.full(len(groups), self._rollout), advantages / (unit or 1.0))
        known = _Kept(*(np.append(mine, earlier) for mine, earlier in zip(now, self._kept, strict=True)))
        known_advantages = np.append(advantages, self._kept.advantages * unit)
        peers = np.unique(known.groups * (known.steps.max() + 1) + known.steps, return_inverse=True)[1]
        n_members = np.bincount(peers)[peers]
        is_now = slice(len(advantages))

        others = known_advantages - A.differences_from_others(known_advantages, peers)
        others = np.where(n_members > 1, others, np.nan)[is_now]
        correlation = self._correlation_of_others(advantages, others, groups)
        coefficient = np.zeros(len(peers))
        coefficient[is_now] = A.relative_coefficient(correlation, n_members[is_now] - 1)
        relative = A.relative_advantages(known_advantages, peers, coefficient)[is_now]
        self.metrics = {
            "train/relative_coefficient": float(coefficient[is_now].mean()),
            "train/relative_variance_removed": A.explained_variance(advantages - relative, advantages),
        }
        # Another member may reach the step of an advantage in a later rollout.
        known_groups, labels = np.unique(known.groups, return_inverse=True)
        passed = np.array([open_groups.get(group, np.inf) for group in known_groups.tolist()])[labels]
        awaited = (known.steps > passed) & (known.rollouts > self._rollout - MAX_AGE)
        self._kept = _Kept(*(each[awaited] for each in known))
        return relative

    def _correlation_of_others(self, advantages: np.ndarray, others: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Add the groups to the sums, and return for each transition the correlation within all groups but its own."""
        own_group = np.unique(groups, return_inverse=True)[1]
        sums = correlation_sums(advantages, others, own_group)
        # Returns grow and shrink in the course of training; in units of their size, all rollouts count alike.
        other_sums = self._sums + normalised_sums(sums_of_others(sums))
        self._sums = FORGETTING * (self._sums + normalised_sums(sums.sum(axis=0)))
        return shrunk_correlation(other_sums)[own_group]

    @property
    def correlation(self) -> float:
        """Intraclass correlation over all groups so far, see :func:`shrunk_correlation`."""
        return float(shrunk_correlation(self._sums))

    def forget_trajectories(self) -> None:
        """Forget the members of unfinished groups, because all environments were reset."""
        self._kept = _NOTHING

    def get_state(self) -> dict[str, Any]:
        """:return: State that is saved with a model, for :meth:`set_state`"""
        return {"sums": self._sums}  # a loaded model begins new trajectories

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`get_state`."""
        self._sums = state["sums"]
