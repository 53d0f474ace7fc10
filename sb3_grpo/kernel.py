"""
The kernel baseline: a critic's job without a critic.

An estimate ``b(s, t)`` of the expected return, linear in random Fourier features (Rahimi & Recht 2007, "Random Features for
Large-Scale Kernel Machines"), is fitted in closed form: no network, no gradient steps, one small linear solve per rollout.
Solving for the fixed point of lambda-returns is LSTD(lambda) (Bradtke & Barto 1996, Boyan 2002); regressing returns on
features of state *and time* instead follows the linear baseline of Duan et al. 2016 (https://arxiv.org/abs/1604.06778).

All tensors are double precision and live on the CPU: the problems are small, and torch's linear algebra, unlike numpy's, keeps
to the number of threads that the user has set.
"""

import copy
import functools
import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd


def fourier_features(
    inputs: th.Tensor, times: th.Tensor, frequencies: th.Tensor, phases: th.Tensor, time_feature: bool = True
) -> th.Tensor:
    """
    ``phi(s, t) = [1, z, tau, sqrt(2/D) cos(W [z, 2 tau] + c)]``; without the time feature
    ``[1, z, sqrt(2/D) cos(W z + c)]``.

    The inner product of two cosine parts approximates the Gaussian kernel ``exp(-sigma^2 |x - x'|^2 / 2)`` for frequencies of
    standard deviation ``sigma`` and phases uniform in ``[0, 2 pi)``.

    :param inputs: standardised observations ``z``, shape ``(n, d)``
    :param times: ``tau``, the step within the episode over the horizon, shape ``(n,)``
    :param frequencies: ``W^T``, shape ``(d + 1, D)``, or ``(d, D)`` without the time feature
    :param phases: ``c``, shape ``(D,)``
    :param time_feature: whether features depend on time
    :return: shape ``(n, d + 2 + D)``, or ``(n, d + 1 + D)`` without the time feature
    """
    ones = th.ones(len(inputs), 1, dtype=inputs.dtype)
    tau = times[:, None]
    linear, arguments = ([ones, inputs, tau], th.hstack([inputs, 2.0 * tau])) if time_feature else ([ones, inputs], inputs)
    cosines = th.addmm(phases, arguments, frequencies).cos_().mul_(math.sqrt(2.0 / len(phases)))
    return th.hstack([*linear, cosines])


def eligibility_traces(features: th.Tensor, continues: th.Tensor, decay: float) -> th.Tensor:
    """
    ``e_t = phi_t + decay c_{t-1} e_{t-1}``, of each environment on its own.

    With ``decay = gamma lambda`` these are the instruments of LSTD(lambda) (Boyan 2002, "Technical Update: Least-Squares
    Temporal Difference Learning", https://doi.org/10.1023/A:1017936530646).

    :param features: ``phi``, shape ``(n_envs, n_steps, p)``
    :param continues: ``c``, 0 where the trajectory ended with the step, else 1, shape ``(n_envs, n_steps)``
    :param decay: of one step
    :return: shape ``(n_envs, n_steps, p)``
    """
    # In numpy: a step is too little work for torch, whose calls take several times as long
    traces, decays = features.numpy().copy(), (decay * continues).numpy()[..., None]
    for step in range(1, features.shape[1]):
        traces[:, step] += decays[:, step - 1] * traces[:, step - 1]
    return th.from_numpy(traces)


def ridge_weights(gram: th.Tensor, moment: th.Tensor, count: th.Tensor, ridge: float, symmetric: bool = True) -> th.Tensor:
    """
    ``w = (A + lambda N I)^-1 B``, the ridge regression whose sufficient statistics are ``A = Phi' Phi`` and ``B = Phi' y``.
    Fewer than one sample count as one, so that without samples the weights are zero.

    :param gram: ``A``, shape ``(..., p, p)``
    :param moment: ``B``, shape ``(..., p)``
    :param count: ``N``, the number of samples behind the statistics (weighted, where they are), shape ``(...)``
    :param ridge: ``lambda``
    :param symmetric: whether ``A`` is symmetric and positive, as it is without instruments
    :return: shape ``(..., p)``
    """
    penalised = gram.clone()
    penalised.diagonal(dim1=-2, dim2=-1).add_(ridge * count.clamp(min=1.0)[..., None])
    if not symmetric:
        solution, info = th.linalg.solve_ex(penalised, moment)
        return solution if not info.any() else (th.linalg.pinv(penalised) @ moment[..., None])[..., 0]
    return th.cholesky_solve(moment[..., None], th.linalg.cholesky(penalised))[..., 0]


def predict_by_fold(features: th.Tensor, weights: th.Tensor, folds: th.Tensor) -> th.Tensor:
    """
    ``b_i = phi_i . w_fold(i)``

    :param features: shape ``(n, p)``
    :param weights: one row per fold, shape ``(n_folds, p)``
    :param folds: fold of each sample, shape ``(n,)``
    :return: shape ``(n,)``
    """
    return (features @ weights.T).gather(1, folds[:, None])[:, 0]


class RidgeStatistics:
    """
    Sufficient statistics of a ridge regression that forgets: each update weighs all earlier samples by ``forgetting``.

    :param n_features: ``p``
    :param instrumented: whether samples come with instruments ``Z`` that take the place of the features on the left:
        ``A = Z' Phi`` and ``B = Z' y``
    """

    instrumented = False  # in files of the first commits

    def __init__(self, n_features: int, instrumented: bool = False):
        self.instrumented = instrumented
        self.gram = th.zeros(n_features, n_features, dtype=th.float64)
        self.moment = th.zeros(n_features, dtype=th.float64)
        self.count = th.zeros((), dtype=th.float64)

    def decay(self, forgetting: float) -> None:
        """
        :param forgetting: ``rho``, the weight that the samples so far keep
        """
        self.gram *= forgetting
        self.moment *= forgetting
        self.count *= forgetting

    def spread(self, known: th.Tensor) -> "RidgeStatistics":
        """
        :param known: which of the features of a wider regression are those of this one, in order, shape ``(p',)``
        :return: statistics of the wider regression on the same samples, the new features having been zero in all of them
        """
        wider = RidgeStatistics(len(known), self.instrumented)
        wider.gram[th.outer(known, known)] = self.gram.flatten()
        wider.moment[known] = self.moment
        wider.count = self.count.clone()
        return wider

    def weights(self, ridge: float) -> th.Tensor:
        """
        :param ridge: ``lambda``
        :return: of the regression on all samples, shape ``(p,)``
        """
        return ridge_weights(self.gram, self.moment, self.count, ridge, not self.instrumented)

    def leave_fold_out(
        self,
        features: th.Tensor,
        targets: th.Tensor,
        folds: th.Tensor,
        ridge: float,
        instruments: th.Tensor | None = None,
    ) -> th.Tensor:
        """
        Add samples, and return for each fold the weights of the regression on everything but that fold: by subtracting the
        fold's own statistics, without a second pass over the data.

        :param features: ``Phi``, shape ``(n, p)``
        :param targets: ``y``, shape ``(n,)``
        :param folds: fold of each sample, an integer in ``[0, n_folds)``, shape ``(n,)``
        :param ridge: ``lambda``
        :param instruments: ``Z``, shape ``(n, p)``, ``None`` for the features
        :return: shape ``(n_folds, p)``
        """
        # One fold after the other: with images p is several hundred, and a few matrices for all folds at once take more memory
        # than the rollout
        own = []
        for fold in range(int(folds.max()) + 1):
            member = folds == fold
            phi = features[member]
            z = phi if instruments is None else instruments[member]
            own.append((z.T @ phi, z.T @ targets[member], member.sum().double()))
        grams, moments, counts = zip(*own, strict=True)
        self.gram += functools.reduce(th.add, grams)
        self.moment += functools.reduce(th.add, moments)
        self.count += functools.reduce(th.add, counts)
        return th.stack(
            [
                ridge_weights(self.gram - gram, self.moment - moment, self.count - count, ridge, not self.instrumented)
                for gram, moment, count in own
            ]
        )


class KernelBaseline:
    """
    Running standardisation of the inputs, random Fourier features, and a linear fit on them that forgets: a ridge regression,
    or with instruments LSTD(lambda).

    Inputs that have had one value so far say nothing and are left out, until they vary: of the thousands that MiniGrid's flat
    observations have, all but a few dozen.

    :param n_features: ``D``, number of random Fourier features
    :param bandwidth: standard deviation of the random frequencies, hence the reciprocal of the Gaussian kernel's length
        scale in units of one standard deviation of the inputs
    :param ridge: ``lambda``, weight of the penalty on the squared weights, per sample; with instruments, what is added to the
        diagonal of ``A``, per sample
    :param forgetting: ``rho``, the weight that the statistics of earlier rollouts keep, between 0 and 1
    :param time_feature: whether the baseline depends on the step within the episode
    :param clip: standardised inputs are clipped to ``+-clip``; without a clip a single outlier makes the fit diverge
    :param seed: of the random frequencies
    :param instrumented: whether :meth:`fit` is given instruments
    """

    def __init__(
        self,
        n_features: int = 128,
        bandwidth: float = 0.5,
        ridge: float = 1e-5,
        forgetting: float = 0.8,
        time_feature: bool = True,
        clip: float = 5.0,
        seed: int = 0,
        instrumented: bool = False,
    ):
        self.n_features = n_features
        self.bandwidth = bandwidth
        self.ridge = ridge
        self.forgetting = forgetting
        self.time_feature = time_feature
        self.clip = clip
        self.seed = seed
        self.instrumented = instrumented
        self._input_statistics: RunningMeanStd | None = None
        self._first_input = np.empty(0)
        self._varies = np.empty(0, dtype=bool)
        self._frequencies = th.empty(0, 0, dtype=th.float64)
        self._phases = th.empty(0, dtype=th.float64)
        self._statistics = RidgeStatistics(0, instrumented)

    def observe(self, inputs: np.ndarray) -> None:
        """
        Update the running mean and variance by which inputs are standardised, and which of them vary.

        :param inputs: shape ``(n, d)``
        """
        if self._input_statistics is None:
            self._draw_features(inputs.shape[1])
            self._first_input = inputs[0].copy()
            self._varies = np.zeros(inputs.shape[1], dtype=bool)
            self._statistics = RidgeStatistics(len(self._feature_columns(self._varies)), self.instrumented)
            updated = RunningMeanStd(epsilon=1e-4, shape=(inputs.shape[1],))
        else:
            updated = self._input_statistics.copy()
        updated.update(inputs)
        varies, statistics = self._varies | (inputs != self._first_input).any(axis=0), self._statistics
        if varies.sum() > self._varies.sum():
            # What did not vary was zero in all features so far, and so are its rows and columns of the statistics
            known = np.isin(self._feature_columns(varies), self._feature_columns(self._varies))
            statistics = statistics.spread(th.from_numpy(known))
        # At the end and as wholes, so that an interrupt leaves the ones or the others
        self._varies, self._statistics, self._input_statistics = varies, statistics, updated

    def _feature_columns(self, varies: np.ndarray) -> np.ndarray:
        """
        :param varies: which inputs do, shape ``(d,)``
        :return: which of the features for all ``d`` inputs are in use
        """
        n_others = int(self.time_feature) + self.n_features
        return np.flatnonzero(np.concatenate([[True], varies, np.ones(n_others, dtype=bool)]))

    def _draw_features(self, input_dim: int) -> None:
        rng = np.random.default_rng(self.seed)
        argument_dim = input_dim + int(self.time_feature)
        self._frequencies = th.from_numpy(self.bandwidth * rng.standard_normal((argument_dim, self.n_features)))
        self._phases = th.from_numpy(rng.uniform(0.0, 2.0 * np.pi, size=self.n_features))

    def features(self, inputs: np.ndarray, times: np.ndarray) -> th.Tensor:
        """
        :param inputs: shape ``(n, d)``
        :param times: the step within the episode over the horizon, shape ``(n,)``
        :return: shape ``(n, p)``
        """
        assert self._input_statistics is not None, "observe() comes before features()"
        mean, var, frequencies = self._input_statistics.mean, self._input_statistics.var, self._frequencies
        if not self._varies.all():
            inputs, mean, var = inputs[:, self._varies], mean[self._varies], var[self._varies]
            frequencies = frequencies[np.flatnonzero(np.append(self._varies, [True] * self.time_feature))]
        standardised = np.clip((inputs - mean) / np.sqrt(var + 1e-8), -self.clip, self.clip)
        return fourier_features(
            th.as_tensor(standardised, dtype=th.float64),
            th.as_tensor(times, dtype=th.float64),
            frequencies,
            self._phases,
            self.time_feature,
        )

    @property
    def weights(self) -> th.Tensor:
        """The weights of the regression on all that has been fitted so far, shape ``(p,)``; zero before the first fit."""
        return self._statistics.weights(self.ridge)

    def fit(
        self, features: th.Tensor, targets: th.Tensor, folds: th.Tensor, instruments: th.Tensor | None = None
    ) -> th.Tensor:
        """
        Forget a little, add a rollout, and return for each fold the weights fitted without it. For a single fold these are the
        weights of the rollouts before.

        :param features: shape ``(n, p)``
        :param targets: shape ``(n,)``
        :param folds: fold of each sample, an integer in ``[0, n_folds)``, shape ``(n,)``
        :param instruments: of an ``instrumented`` baseline, shape ``(n, p)``
        :return: shape ``(n_folds, p)``
        :raises ValueError: if there are instruments and the baseline is not for them, or the other way round
        """
        if self.instrumented != (instruments is not None):
            raise ValueError(
                "Pass `instruments` to `fit` if and only if the baseline is constructed with `instrumented=True`."
            )
        updated = copy.deepcopy(self._statistics)
        updated.decay(self.forgetting)
        weights = updated.leave_fold_out(features, targets, folds, self.ridge, instruments)
        self._statistics = updated
        return weights

    def get_state(self) -> dict[str, Any]:
        """:return: all that a fit depends on, to be given to :meth:`set_state`"""
        return {
            "input_statistics": self._input_statistics,
            "first_input": self._first_input,
            "varies": self._varies,
            "frequencies": self._frequencies,
            "phases": self._phases,
            "statistics": self._statistics,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """
        :param state: from :meth:`get_state`
        """
        self._input_statistics = state["input_statistics"]
        # Files of the first commits have neither: there every input was in use
        n_inputs = 0 if self._input_statistics is None else len(self._input_statistics.mean)
        self._first_input = state.get("first_input", np.zeros(n_inputs))
        self._varies = state.get("varies", np.ones(n_inputs, dtype=bool))
        self._frequencies = state["frequencies"]
        self._phases = state["phases"]
        self._statistics = state["statistics"]
