"""
The kernel baseline: a value function without a network and without gradient steps.

An estimate ``b(s, t)`` of the expected return, linear in random Fourier features (Rahimi & Recht 2007, "Random Features for
Large-Scale Kernel Machines"), is fitted by least squares after each rollout. LSTD(lambda) (Bradtke & Barto 1996, Boyan 2002)
finds weights that are consistent with the lambda-returns bootstrapped from their own predictions; :func:`lstd_weights` solves
it in a form that has exactly one solution for every discount factor. Features of state *and time* are an idea of the
linear baseline of Duan et al. 2016 (https://arxiv.org/abs/1604.06778).

All tensors are on the CPU. Features and their products over a rollout have single precision, which is several times as fast,
unless a caller wants them in double precision. Statistics are summed, and solutions of systems corrected, in double precision.
Torch's linear algebra respects the number of threads that the user has set, which numpy's does not.
"""

import copy
import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd

#: Penalty on the weight of the constant feature. It only keeps the normal equations positive definite if the samples do not
#: determine the level of the returns, as with ``gamma=1`` and no terminations. The level then cancels out of the advantages.
LEVEL_RIDGE = 1e-12
#: Largest relative change by which iterative refinement may correct weights that were computed in single precision.
MAX_CORRECTION = 1e-2
#: Part of the metric that is the same in all directions, so that none is lost for good.
ISOTROPIC = 0.1
#: Number of steps, and number of columns, that are multiplied at a time.
BLOCK_STEPS = 32
BLOCK_COLUMNS = 192


def fourier_features(inputs: th.Tensor, times: th.Tensor, frequencies: th.Tensor, phases: th.Tensor) -> th.Tensor:
    """
    ``phi(s, t) = [1, z, tau, sqrt(2/D) cos(W [z, 2 tau] + u)]``

    The inner product of two cosine parts approximates the Gaussian kernel ``exp(-sigma^2 |x - x'|^2 / 2)`` if the frequencies
    have the standard deviation ``sigma`` and the phases are uniform in ``[0, 2 pi)``.

    :param inputs: Standardised observations ``z``, shape ``(n, d)``
    :param times: ``tau``, the step within the episode in units of time, shape ``(n,)``
    :param frequencies: ``W^T``, shape ``(d + 1, D)``
    :param phases: ``u``, shape ``(D,)``
    :return: Features, shape ``(n, d + 2 + D)``
    """
    ones = th.ones(len(inputs), 1, dtype=inputs.dtype)
    tau, frequencies, phases = times[:, None], frequencies.to(inputs), phases.to(inputs)
    cosines = th.addmm(phases, th.hstack([inputs, 2.0 * tau]), frequencies).cos_().mul_(math.sqrt(2.0 / len(phases)))
    return th.hstack([ones, inputs, tau, cosines])


def gradient_metric(
    weights: th.Tensor, inputs: th.Tensor, times: th.Tensor, frequencies: th.Tensor, phases: th.Tensor
) -> th.Tensor | None:
    """
    ``M = (1 - epsilon) k G / tr(G) + epsilon I``, where ``G`` is the mean outer product of the gradients of a value
    ``phi(s, t) . w`` with respect to ``[z, 2 tau]``. Frequencies ``M^(1/2) W`` make features that change quickly where the
    value does, and hardly with inputs that do not matter, as the first layer of a neural network learns them (Radhakrishnan et
    al. 2024, https://doi.org/10.1126/science.adi5639). Departure: a part ``epsilon`` is the same in all directions.

    :param weights: ``w``, shape ``(p,)``
    :param inputs: Where the gradients are taken, ``z``, shape ``(n, d)``
    :param times: ``tau``, shape ``(n,)``
    :param frequencies: See :func:`fourier_features`
    :param phases: See :func:`fourier_features`
    :return: ``M``, shape ``(k, k)`` with ``k = d + 1``; ``None`` if the value has no gradient, or one that is not finite
    """
    arguments = th.hstack([inputs, 2.0 * times[:, None]])
    dim = arguments.shape[1]
    linear = weights[1 : dim + 1].clone()
    linear[-1] /= 2.0
    sines = (arguments @ frequencies + phases).sin_().mul_(weights[-len(phases) :] * math.sqrt(2.0 / len(phases)))
    gradients = linear - sines @ frequencies.T
    outer = gradients.T @ gradients
    trace = outer.trace().item()
    if not 0.0 < trace < math.inf:
        return None
    return (1.0 - ISOTROPIC) * dim / trace * outer + ISOTROPIC * th.eye(dim, dtype=outer.dtype)


def eligibility_traces(features: th.Tensor, continues: th.Tensor, decay: float) -> th.Tensor:
    """
    ``e_t = phi_t + decay c_{t-1} e_{t-1}``, separately for each environment. With ``decay = gamma lambda``, these are the
    traces of LSTD(lambda) (Boyan 2002, https://doi.org/10.1023/A:1017936530646).

    :param features: ``phi``, shape ``(n_envs, n_steps, p)``
    :param continues: ``c``, 0 where the trajectory ended with the step, else 1, shape ``(n_envs, n_steps)``
    :param decay: Decay per step
    :return: ``e``, shape ``(n_envs, n_steps, p)``
    """
    # A block of steps is a product with the matrix of the decays from each of its steps to each later one.
    traces = features.clone()
    trajectories = (1.0 - continues).cumsum(dim=1) - (1.0 - continues)
    lags = th.arange(BLOCK_STEPS + 1)[:, None] - th.arange(BLOCK_STEPS + 1)
    decays = (decay ** lags.clamp(min=0).double()).tril()
    for first in range(0, features.shape[1], BLOCK_STEPS):
        # The first trace of a block is the last of the block before.
        block, own = slice(first, first + BLOCK_STEPS + 1), trajectories[:, first : first + BLOCK_STEPS + 1]
        size = own.shape[1]
        connected = own[:, :, None] == own[:, None, :]
        traces[:, block] = (decays[:size, :size] * connected).to(features) @ traces[:, block]
    return traces


def lower_gram(features: th.Tensor) -> th.Tensor:
    """
    The lower triangle of ``Phi' Phi``, which is all that a Cholesky factorisation reads.

    :param features: ``Phi``, shape ``(n, p)``
    :return: ``Phi' Phi`` on and below the diagonal, other entries are arbitrary, shape ``(p, p)``
    """
    n_features = features.shape[1]
    gram = features.new_zeros(n_features, n_features)
    for first in range(0, n_features, BLOCK_COLUMNS):
        columns = slice(first, first + BLOCK_COLUMNS)
        gram[first:, columns] = features[:, first:].T @ features[:, columns]
    return gram


def cholesky(matrix: th.Tensor) -> th.Tensor:
    """
    The Cholesky factor of a matrix that is positive definite up to rounding. Its entries may come from products in single
    precision, and with many dependent features their error exceeds a small penalty. Then the diagonal gets a share of its mean
    that grows until there is a factor.

    :param matrix: Matrix, of which the lower triangle is read, shape ``(p, p)``
    :return: Its factor, shape ``(p, p)``
    :raises torch.linalg.LinAlgError: If there is none, for example because of NaN
    """
    factor, failed = th.linalg.cholesky_ex(matrix)
    share = th.finfo(th.float32).eps
    while failed and share < 1.0:
        padded = matrix.clone()
        padded.diagonal().add_(share * matrix.diagonal().mean())
        factor, failed = th.linalg.cholesky_ex(padded)
        share *= 10.0
    return th.linalg.cholesky(matrix) if failed else factor


def metric_factor(metric: th.Tensor, count: th.Tensor, ridge: float) -> th.Tensor:
    """:return: The Cholesky factor of ``C / N + ridge I``, see :func:`lstd_weights`, from ``Phi' Phi`` and ``N``"""
    penalised = metric / count.clamp(min=1.0)
    penalised.diagonal().add_(ridge)
    return cholesky(penalised)


def lstd_weights(gram: th.Tensor, moment: th.Tensor, count: th.Tensor, factor: th.Tensor, ridge: float) -> th.Tensor:
    """
    LSTD(lambda) as a least-squares problem:

    ``w = argmin (v - M w)' (C + ridge I)^-1 (v - M w) + ridge |w|^2``

    with ``M = Z' (Phi - gamma Phi') / N``, ``v = Z' r / N`` and ``C = Phi' Phi / N``, where ``Z`` are the eligibility traces.

    Plain LSTD solves ``M w = v``. If ``gamma`` is close to 1 and time limits cut trajectories, ``M`` is close to singular, and
    since it is not symmetric, adding a multiple of the identity does not help: noise then leads to arbitrarily large weights.
    The quadratic form has exactly one minimum for every ``gamma``. It agrees with plain LSTD where the samples determine the
    weights, and the other weights stay small. With ``lambda = 0``, the first term is the mean squared projected Bellman error.
    The two penalties are those of Hoffman et al. 2012, "Regularized Least Squares Temporal Difference Learning with Nested l2
    and l1 Penalization" (https://doi.org/10.1007/978-3-642-29946-9_13).

    Departure: the constant feature, which comes first, has the penalty ``LEVEL_RIDGE``, because the level of the returns grows
    like ``1 / (1 - gamma)``.

    The normal equations are formed and factorised in single precision, which takes about half of the time. Then a step of
    iterative refinement (Wilkinson 1963, "Rounding Errors in Algebraic Processes") with the residual in double precision about
    squares the relative error. If the step is not small, the normal equations are formed and solved in double precision.

    :param gram: ``N M``, shape ``(p, p)``
    :param moment: ``N v``, shape ``(p,)``
    :param count: ``N``, the (weighted) number of samples, shape ``()``; less than one counts as one
    :param factor: Cholesky factor of ``C + ridge I`` from :func:`metric_factor`, shape ``(p, p)``
    :param ridge: Penalty
    :return: ``w``, shape ``(p,)``
    """
    system, target = gram / count.clamp(min=1.0), moment[:, None] / count.clamp(min=1.0)
    penalties = th.full_like(target, ridge)
    penalties[0] = LEVEL_RIDGE

    def normal_matrix(dtype: th.dtype) -> th.Tensor:
        matrix = lower_gram(th.linalg.solve_triangular(factor.to(dtype), system.to(dtype), upper=False))
        matrix.diagonal().add_(penalties[:, 0])
        return matrix

    def residual(weights: th.Tensor) -> th.Tensor:
        error = th.linalg.solve_triangular(factor, target - system @ weights, upper=False)
        return system.T @ th.linalg.solve_triangular(factor.T, error, upper=True) - penalties * weights

    right = residual(th.zeros_like(target))
    root, failed = th.linalg.cholesky_ex(normal_matrix(th.float32))
    if not failed:
        weights = th.cholesky_solve(right.float(), root).double()
        correction = th.cholesky_solve(residual(weights).float(), root)
        if correction.norm() <= MAX_CORRECTION * weights.norm():
            return (weights + correction)[:, 0]
    return th.cholesky_solve(right, cholesky(normal_matrix(th.float64)))[:, 0]


def calibration_slope(predictions: np.ndarray, targets: np.ndarray) -> float:
    """
    ``theta = Cov(y, b) / Var(b)``, limited to ``[0, 1]``: the slope of the regression of targets on predictions.

    Of all predictions ``mean(b) + theta (b - mean(b))``, this one has the smallest squared error. The slope is close to 1 for
    good predictions, and close to 0 for predictions that are unrelated to the targets.

    :param predictions: ``b``, not fitted to these targets, shape ``(n,)``
    :param targets: ``y``, shape ``(n,)``
    :return: ``theta``; 0 if the predictions do not vary
    """
    centred = predictions - predictions.mean()
    variance = np.mean(centred**2)
    return float(np.clip(np.mean(centred * targets) / variance, 0.0, 1.0)) if variance > 0 else 0.0


def predict_by_fold(features: th.Tensor, weights: th.Tensor, folds: th.Tensor) -> th.Tensor:
    """:return: Predictions ``phi_i . w_fold(i)`` of each sample with the weights of its fold, shape ``(n,)``"""
    return (features @ weights.T.to(features)).gather(1, folds[:, None])[:, 0].double()


class FitStatistics:
    """Sufficient statistics of :func:`lstd_weights` for a number of features ``p``."""

    def __init__(self, n_features: int):
        #: ``Z' (Phi - gamma Phi')``
        self.gram = th.zeros(n_features, n_features, dtype=th.float64)
        #: ``Z' r``
        self.moment = th.zeros(n_features, dtype=th.float64)
        self.count = th.zeros((), dtype=th.float64)
        #: ``Phi' Phi``. It contains no rewards, so all folds can share it.
        self.metric = th.zeros_like(self.gram)

    def decay(self, forgetting: float) -> None:
        """Multiply the weight of all samples so far by ``forgetting``."""
        for statistic in (self.gram, self.moment, self.count, self.metric):
            statistic *= forgetting

    def expand(self, known: th.Tensor) -> "FitStatistics":
        """:return: Statistics with further features, zero in all samples so far. ``known`` are those that exist here"""
        larger = FitStatistics(len(known))
        both = th.outer(known, known)
        larger.gram[both] = self.gram.flatten()
        larger.metric[both] = self.metric.flatten()
        larger.moment[known] = self.moment
        larger.count = self.count.clone()
        return larger

    def weights(self, ridge: float) -> th.Tensor:
        """:return: Weights of the fit to all samples, shape ``(p,)``"""
        return lstd_weights(self.gram, self.moment, self.count, metric_factor(self.metric, self.count, ridge), ridge)

    def add(
        self, features: th.Tensor, rewards: th.Tensor, folds: th.Tensor, traces: th.Tensor, differences: th.Tensor
    ) -> list[tuple[th.Tensor, th.Tensor, th.Tensor]]:
        """
        Add samples. Symbols are those of :func:`lstd_weights`.

        :param features: ``Phi``, shape ``(n, p)``, as are the traces ``Z`` and the differences ``Phi - gamma Phi'``
        :param folds: Fold of each sample, an integer in ``[0, n_folds)``, shape ``(n,)``
        :return: Statistics of the samples of each fold: their ``gram``, ``moment`` and ``count``
        """
        rewards = rewards.to(traces)
        # One fold after the other: with hundreds of features, matrices of all folds at once take more memory than the rollout.
        own = []
        for fold in range(int(folds.max()) + 1):
            member = folds == fold
            z = traces[member]
            own.append(((z.T @ differences[member]).double(), (z.T @ rewards[member]).double(), member.sum().double()))
        grams, moments, counts = zip(*own, strict=True)
        self.gram += sum(grams)
        self.moment += sum(moments)
        self.count += sum(counts)
        self.metric += lower_gram(features)
        return own

    def leave_fold_out(self, own: list[tuple[th.Tensor, th.Tensor, th.Tensor]], ridge: float) -> th.Tensor:
        """
        Compute for each fold of the samples that were added last the weights of the fit to all other samples. The statistics
        of the fold are subtracted, so no second pass over the data is needed.

        :param own: What :meth:`add` returned
        :return: Weights, shape ``(n_folds, p)``
        """
        factor = metric_factor(self.metric, self.count, ridge)
        others = ((self.gram - gram, self.moment - moment, self.count - count) for gram, moment, count in own)
        return th.stack([lstd_weights(*problem, factor, ridge) for problem in others])


class KernelBaseline:
    """
    Running standardisation of the inputs that do not arrive standardised, random Fourier features, and a linear fit that
    forgets earlier rollouts.

    Inputs that have never varied are left out of the fit. MiniGrid's flat observations have thousands of them.

    The first arguments are options of :class:`~sb3_grpo.buffers.KernelRolloutBuffer`.

    :param clip: Limit of the standardised inputs. Without it, a single outlier can make the fit diverge
    :param seed: Seed of the random frequencies
    """

    def __init__(
        self,
        n_features: int = 128,
        bandwidth: float = 1.1,
        ridge: float = 1e-5,
        forgetting: float = 0.8,
        clip: float = 5.0,
        seed: int = 0,
    ):
        self.n_features = n_features
        self.bandwidth = bandwidth
        self.ridge = ridge
        self.forgetting = forgetting
        self.clip = clip
        self.seed = seed
        self._input_statistics: RunningMeanStd | None = None
        self._first_input = np.empty(0)
        self._varies = np.empty(0, dtype=bool)
        # Frequencies as they were drawn, and those of the present metric
        self._draws = self._frequencies = th.empty(0, 0, dtype=th.float64)
        self._phases = th.empty(0, dtype=th.float64)
        self._statistics = FitStatistics(0)

    def observe(self, inputs: np.ndarray, standardised: np.ndarray | bool = False) -> None:
        """
        Update the running mean and variance of the inputs, and which of them vary.

        :param inputs: Inputs, shape ``(n, d)``
        :param standardised: Which of them arrive standardised and need no statistics, shape ``(d,)``; ``False`` for none
        """
        if self._input_statistics is None:
            self._draw_features(inputs.shape[1], int((inputs != inputs[0]).any(axis=0).sum()))
            self._first_input = inputs[0].copy()
            self._varies = np.zeros(inputs.shape[1], dtype=bool)
            self._statistics = FitStatistics(len(self._feature_columns(self._varies)))
            updated = RunningMeanStd(epsilon=0.0, shape=(inputs.shape[1],))
        else:
            updated = self._input_statistics.copy()
        updated.update(inputs)
        updated.mean[standardised], updated.var[standardised] = 0.0, 1.0
        varies, statistics = self._varies | (inputs != self._first_input).any(axis=0), self._statistics
        if varies.sum() > self._varies.sum():
            # Standardised inputs that had not varied were zero, and so are their rows and columns of the statistics.
            known = np.isin(self._feature_columns(varies), self._feature_columns(self._varies))
            statistics = statistics.expand(th.from_numpy(known))
        # Assigned together at the end, so that an interrupt leaves a consistent state.
        self._varies, self._statistics, self._input_statistics = varies, statistics, updated

    def _feature_columns(self, varies: np.ndarray) -> np.ndarray:
        """:return: Indices of the features in use, among the features of all ``d`` inputs, of which some vary"""
        return np.flatnonzero(np.concatenate([[True], varies, np.ones(1 + self.n_features, dtype=bool)]))

    def _draw_features(self, input_dim: int, n_varying: int) -> None:
        rng = np.random.default_rng(self.seed)
        bandwidth = self.bandwidth / math.sqrt(max(n_varying, 1))  # because distances grow with the root of their number
        self._draws = self._frequencies = th.from_numpy(bandwidth * rng.standard_normal((input_dim + 1, self.n_features)))
        self._phases = th.from_numpy(rng.uniform(0.0, 2.0 * np.pi, size=self.n_features))

    def features(self, inputs: np.ndarray, times: np.ndarray, dtype: th.dtype = th.float32) -> th.Tensor:
        """
        :param inputs: Inputs, shape ``(n, d)``
        :param times: Step within the episode in units of time, shape ``(n,)``
        :param dtype: Precision of the features, and so of their products
        :return: Features, shape ``(n, p)``
        """
        z, tau = self._standardised(inputs, dtype), th.as_tensor(times, dtype=dtype)
        return fourier_features(z, tau, self._frequencies[self._rows()], self._phases)

    def _standardised(self, inputs: np.ndarray, dtype: th.dtype) -> th.Tensor:
        """:return: The inputs that vary, standardised, shape ``(n, n_varying)``"""
        assert self._input_statistics is not None, "observe() comes first"
        mean, var = self._input_statistics.mean, self._input_statistics.var
        if not self._varies.all():
            inputs, mean, var = inputs[:, self._varies], mean[self._varies], var[self._varies]
        return th.as_tensor(np.clip((inputs - mean) / np.sqrt(var), -self.clip, self.clip), dtype=dtype)

    def _rows(self) -> np.ndarray | slice:
        """:return: Index of the rows of the frequencies that belong to inputs that vary, and to the time"""
        if self._varies.all():
            return slice(None)
        return np.flatnonzero(np.append(self._varies, True))

    def with_metric(self, inputs: np.ndarray, times: np.ndarray) -> "KernelBaseline | None":
        """
        :param inputs: Inputs at which the gradients of the fit are taken, shape ``(n, d)``
        :param times: Step within the episode in units of time, shape ``(n,)``
        :return: A copy whose frequencies have the metric of the present fit, see :func:`gradient_metric`, and whose fit starts
            anew; ``None`` if there is no such metric
        """
        z, tau = self._standardised(inputs, th.float64), th.as_tensor(times, dtype=th.float64)
        rows, frequencies = self._rows(), self._draws.clone()
        metric = gradient_metric(self.weights, z, tau, self._frequencies[rows], self._phases)
        if metric is None:
            return None
        frequencies[rows] = th.linalg.cholesky(metric) @ self._draws[rows]
        copied = copy.copy(self)
        copied._frequencies, copied._statistics = frequencies, FitStatistics(len(self._statistics.moment))
        return copied

    @property
    def weights(self) -> th.Tensor:
        """Weights of the fit to all samples so far, shape ``(p,)``; zero before the first fit."""
        return self._statistics.weights(self.ridge)

    def add(self, *rollout: th.Tensor) -> None:
        """Forget a part of the earlier rollouts, and add one without a fit, as :meth:`FitStatistics.add` takes it."""
        self._statistics, _ = self._updated(*rollout)

    def fit(self, *rollout: th.Tensor) -> th.Tensor:
        """
        :meth:`add` a rollout, unless its fit fails.

        :return: Weights by fold, see :meth:`FitStatistics.leave_fold_out`. With a single fold, they are those of the earlier
            rollouts
        """
        updated, own = self._updated(*rollout)
        weights = updated.leave_fold_out(own, self.ridge)
        self._statistics = updated
        return weights

    def _updated(self, *rollout: th.Tensor) -> tuple[FitStatistics, list[tuple[th.Tensor, th.Tensor, th.Tensor]]]:
        updated = copy.deepcopy(self._statistics)
        updated.decay(self.forgetting)
        return updated, updated.add(*rollout)

    def get_state(self) -> dict[str, Any]:
        """:return: Everything that a fit depends on, for :meth:`set_state`"""
        return {
            "input_statistics": self._input_statistics,
            "first_input": self._first_input,
            "varies": self._varies,
            "draws": self._draws,
            "frequencies": self._frequencies,
            "phases": self._phases,
            "statistics": dict(vars(self._statistics)),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`get_state`."""
        for name, value in state.items():
            if name == "statistics":
                vars(self._statistics).update(value)
            else:
                setattr(self, f"_{name}", value)
