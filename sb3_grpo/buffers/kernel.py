"""The buffer of the kernel baseline."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch as th

from sb3_grpo import advantages as A
from sb3_grpo.baseline import KernelBaseline, calibration_slope, eligibility_traces, predict_by_fold
from sb3_grpo.buffers.base import Defaults, GroupRolloutBuffer
from sb3_grpo.buffers.rollout import Transitions
from sb3_grpo.fit_inputs import N_CHANGES, FitInputs
from sb3_grpo.losses import UpdateRule
from sb3_grpo.observations import Observations, map_observations, take_observations
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.relative import RelativeTerm
from sb3_grpo.validation import require_at_least, require_between, require_bool, require_positive

#: Group size if members of a group have more than ``LARGE_GROUP_ABOVE`` of the variance of their advantages in common. Larger
#: groups estimate what their inputs did more accurately, and leave fewer different starts in a rollout.
LARGE_GROUP = 4
LARGE_GROUP_ABOVE = 1 / 3
#: With a smaller penalty, the equations of dependent features, whose products have single precision, can be singular.
MIN_RIDGE = 1e-6
#: Advantages whose standard deviation is below this share of the largest value estimate are partly rounding errors. That
#: happens while all rewards are equal. The next fit then has double precision. What it cannot explain is similar in
#: neighbouring states and leads the policy to new ones, which rounding errors do not.
RESOLUTION = 1e-4
#: A fit that learns its metric does so after the rollout with this number, and each time the number has doubled.
FIRST_METRIC = 4
#: Number of rollouts that the fit is repeated with when its metric has changed
KEPT_ROLLOUTS = 5
#: Time limits count as ends if more than this part of a value would stand for rewards beyond them, which no episode has had.
MAX_UNSEEN = 0.5
#: Where a task is solved, advantages are mere errors of the fit, and with steps of full length along them, a policy would lose
#: what it has learned. So the limit of a natural-gradient step falls with the variance of the advantages where that is below
#: this share of its mean over all rollouts, down to the same share of itself. Then, steps have a tenth of their length, with
#: which a policy can still learn where it is the rewards that have become smaller.
QUIET = 0.01
#: Limit of standardised advantages. The largest ones are mostly errors of the value estimate.
MAX_ADVANTAGE = 3.0


class FitData(NamedTuple):
    """
    A rollout as the baseline sees it: trajectories, or the part of them that lies in the rollout, one after another.

    :param inputs: Inputs of the transitions, see :class:`~sb3_grpo.fit_inputs.FitInputs`, shape ``(n, d)``
    :param steps: Steps within the episodes, shape ``(n,)``
    :param rewards: Rewards, shape ``(n,)``
    :param continues: 0 where a trajectory or the rollout ended with the step, else 1, shape ``(n,)``
    :param cuts: Indices of the transitions after which a time limit or the end of the rollout cut a trajectory, so that the
        baseline replaces the rewards that would follow, shape ``(n_cuts,)``
    :param cut_inputs: Inputs of the observations after the cuts, shape ``(n_cuts, d)``
    :param gamma: Discount factor
    :param n_envs: Number of environments, each with the same number of transitions, one environment after another
    """

    inputs: np.ndarray
    steps: np.ndarray
    rewards: np.ndarray
    continues: np.ndarray
    cuts: np.ndarray
    cut_inputs: np.ndarray
    gamma: float
    n_envs: int

    def advantages(self, baseline: np.ndarray, cut_baseline: np.ndarray, lambda_: float) -> np.ndarray:
        """:return: Advantages for value estimates of the transitions and of the observations after the cuts, shape ``(n,)``"""
        next_baseline = np.append(baseline[1:], 0.0) * self.continues
        next_baseline[self.cuts] = cut_baseline
        return A.generalized_advantages(self.rewards, baseline, next_baseline, self.continues, self.gamma, lambda_)


class KernelRolloutBuffer(GroupRolloutBuffer):
    """
    Generalized advantage estimation with a baseline ``b(s, t)`` that is fitted by least squares after each rollout, see
    :mod:`sb3_grpo.baseline`. Short name: ``kernel``.

    Every rollout leads to an update, whether or not episodes end. No part of a rollout is judged by a baseline that was
    fitted to it: trajectories are divided into folds, and each fold gets the predictions of a fit to the other folds and to
    earlier rollouts. If a rollout has a single trajectory, the fit to earlier rollouts is used. Only ``theta`` below comes
    from the returns that it is applied to.

    Predictions are shrunk towards their mean, ``mean(b) + theta (b - mean(b))``, where ``theta`` is the slope of the
    regression of returns on predictions, see :func:`~sb3_grpo.baseline.calibration_slope`. If the fit predicts nothing, a
    constant remains.

    The inputs are those of :class:`~sb3_grpo.fit_inputs.FitInputs`. They are standardised with the statistics of the policy's
    :class:`~sb3_grpo.normalization.ObservationNormalizer`, including those of the rollout. The baseline keeps statistics of
    its own only of inputs that the policy does not standardise, and of hashed ones.

    The unit of time of the fit is ``horizon``, or without one the length of the longest trajectory so far, rounded up to a
    power of two.

    Beyond a time limit, predictions stand for the rewards that would follow, as in SB3. Departure: time limits are ends if
    ``gamma ** T`` is above 1/2, where ``T`` is ``horizon``, or without one the longest length so far. The transitions would
    not determine such predictions: where all episodes end at the limit, a value plus any multiple of ``gamma ** -t`` agrees
    with them as well.

    :param args: See :class:`GroupRolloutBuffer`
    :param n_features: Number of random Fourier features. GRPO passes 512 with natural-gradient steps
    :param bandwidth: Standard deviation of the random frequencies, times the root of the number of inputs that vary in the
        first rollout. GRPO passes 1.8 with continuous actions and natural-gradient steps
    :param ridge: Penalty on the squared weights, per sample. GRPO passes 1e-6 with continuous actions and natural-gradient
        steps
    :param forgetting: Factor for the weight of earlier rollouts in each fit. GRPO passes 0.9 with natural-gradient steps
    :param n_folds: Number of folds
    :param learn_metric: Whether the features learn the metric of the value, see
        :func:`~sb3_grpo.baseline.gradient_metric`. GRPO passes ``True`` with natural-gradient steps
    :param use_time: Whether the fit uses the time even if time limits are not ends. Where observations show the state, values
        depend on the time only if they are. GRPO passes ``False`` with continuous actions and natural-gradient steps
    :param relative: Whether to subtract a part of the mean advantage of the group's other members at the same step, see
        :mod:`sb3_grpo.relative`
    :param kwargs: See :class:`GroupRolloutBuffer`
    :raises ValueError: If an argument is out of range
    """

    def __init__(
        self,
        *args: Any,
        n_features: int = 128,
        bandwidth: float = 1.1,
        ridge: float = 1e-5,
        forgetting: float = 0.8,
        n_folds: int = 4,
        learn_metric: bool = False,
        use_time: bool = True,
        relative: bool = True,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        require_at_least("n_features", n_features, 1)
        require_positive("bandwidth", bandwidth)
        require_between("ridge", ridge, MIN_RIDGE)
        require_at_least("n_folds", n_folds, 1)
        require_between("forgetting", forgetting, 0.0, 1.0)
        require_bool("learn_metric", learn_metric)
        require_bool("use_time", use_time)
        require_bool("relative", relative)
        self.n_folds = n_folds
        # SB3 has seeded numpy's global generator with the model's seed at this point.
        seed = np.random.randint(np.iinfo(np.int32).max)
        self.baseline = KernelBaseline(n_features, bandwidth, ridge, forgetting, seed=seed)
        self.relative_term = RelativeTerm() if relative else None
        self.learn_metric = learn_metric
        self.use_time = use_time
        self._longest = 1
        self._n_fits, self._recent = 0, list[FitData]()
        self._mean_variance = 0.0  # of the advantages, over all rollouts
        self._dtype = th.float64  # of the next fit, see RESOLUTION
        # The fit keeps its unit of time, also in environments with another time limit.
        self._fixed_time_unit = self.horizon
        self.inputs = FitInputs(self.observation_space)

    @classmethod
    def update_rule(cls, is_continuous: bool, has_boards: bool) -> UpdateRule:
        return "natural" if is_continuous or has_boards else "clipped"

    @classmethod
    def defaults(cls, update_rule: UpdateRule, is_continuous: bool) -> Defaults:
        # Trajectories need not be complete, so updates can follow each other quickly. A single step needs more transitions.
        # Clipped updates ended far lower with the metric on LunarLander, and level elsewhere, so they do without.
        if update_rule == "clipped":
            return Defaults(rollout_size=1024)
        arguments: dict[str, Any] = dict(n_features=512, forgetting=0.9, learn_metric=True)
        if not is_continuous:
            return Defaults(rollout_size=2048, gae_lambda=0.95, arguments=arguments)
        arguments |= dict(bandwidth=1.8, ridge=1e-6, use_time=False)
        return Defaults(rollout_size=2048, gae_lambda=0.9, arguments=arguments, late_gae_lambda=0.98)

    @classmethod
    def update_size(cls, rollout_size: int) -> int | None:
        return rollout_size

    def suggested_group_size(self) -> int:
        is_large = self.relative_term is not None and self.relative_term.correlation > LARGE_GROUP_ABOVE
        return LARGE_GROUP if is_large else super().suggested_group_size()

    def _scaled(self, advantages: np.ndarray, normalize_advantage: bool) -> np.ndarray:
        self.metrics["train/advantage_mean"] = float(np.mean(advantages))
        return A.whiten(advantages).clip(-MAX_ADVANTAGE, MAX_ADVANTAGE) if normalize_advantage else advantages

    def _describe_groups(self, returns: list[list[float]]) -> dict[str, float]:
        # Updates do not depend on complete groups. Their returns are those of Monitor, unless rewards are weighted.
        metrics = super()._describe_groups(returns)
        return {name: value for name, value in metrics.items() if self.reward_weights and name == "rollout/group_return_mean"}

    def forget_trajectories(self) -> None:
        super().forget_trajectories()
        if self.relative_term is not None:
            self.relative_term.forget_trajectories()

    def _form_update(
        self, rollout: Transitions, last_obs: Observations, policy: ActorPolicy
    ) -> tuple[Transitions, np.ndarray]:
        time_unit = self._time_unit(rollout.steps)
        cuts, cut_obs = self._cut_observations(last_obs)
        steps = rollout.steps.reshape(self.n_envs, -1)
        inputs, cut_inputs = self.inputs.of_rollout(rollout.observations, steps, cuts, cut_obs, policy)
        self.baseline.observe(inputs, self.inputs.standardised_by(policy))
        if self.learn_metric:
            self._update_metric(time_unit)
        ends = rollout.dones.copy()
        ends[self.buffer_size - 1 :: self.buffer_size] = True
        # Copies, because the data outlive the storage of the rollout
        arrays = np.array(inputs), rollout.steps.copy(), rollout.rewards.astype(np.float64), 1.0 - ends, cuts
        data = FitData(*arrays, np.array(cut_inputs), self.gamma, self.n_envs)
        features, cut_features = self._features(self.baseline, data, time_unit)
        folds = th.as_tensor((np.cumsum(ends) - ends) % self.n_folds)  # the same for all transitions of a trajectory
        weights = self.baseline.fit(*self._for_fit(features, cut_features, data, folds))
        baseline = predict_by_fold(features, weights, folds).numpy()
        cut_baseline = predict_by_fold(cut_features, weights, folds[cuts]).numpy()
        baseline, cut_baseline = self._shrink(baseline, cut_baseline, data)
        advantages = data.advantages(baseline, cut_baseline, self.gae_lambda)
        self._n_fits += 1
        if self.learn_metric:
            self._recent = [*self._recent[1 - KEPT_ROLLOUTS :], data]
        self._dtype = th.float64 if advantages.std() < RESOLUTION * np.abs(baseline).max() else th.float32
        # Without a baseline, the lambda-returns themselves would be the advantages.
        self.metrics["train/baseline_variance_reduction"] = A.explained_variance(baseline, baseline + advantages)
        if self.relative_term is not None:
            advantages = self.relative_term.apply(advantages, rollout.groups, rollout.steps, self.open_groups)
            self.metrics.update(self.relative_term.metrics)
        variance = float(np.var(advantages))
        self._mean_variance += (variance - self._mean_variance) / self._n_fits
        share = variance / (QUIET * self._mean_variance) if variance > 0 else 1.0
        self.limit_factor = min(max(share, QUIET), 1.0)
        return rollout, advantages

    def _shrink(self, baseline: np.ndarray, cut_baseline: np.ndarray, data: FitData) -> tuple[np.ndarray, np.ndarray]:
        """:return: The predictions for transitions and for observations after the cuts, shrunk towards the former's mean"""

        def returns(baseline: np.ndarray, cut_baseline: np.ndarray) -> np.ndarray:
            # Those of the rollout. Beyond a cut, only the prediction itself can stand for them.
            return baseline + data.advantages(baseline, cut_baseline, 1.0)

        shrinkage, mean = calibration_slope(baseline, returns(baseline, cut_baseline)), baseline.mean()
        baseline, cut_baseline = (mean + shrinkage * (each - mean) for each in (baseline, cut_baseline))
        self.metrics["train/baseline_shrinkage"] = shrinkage
        self.metrics["train/explained_variance"] = A.explained_variance(baseline, returns(baseline, cut_baseline))
        return baseline, cut_baseline

    def _update_metric(self, time_unit: float) -> None:
        """Give the fit the metric of its value whenever the number of rollouts has doubled."""
        if self._n_fits < FIRST_METRIC or self._n_fits & (self._n_fits - 1) or not self._recent:
            return
        last = self._recent[-1]
        baseline = self.baseline.with_metric(last.inputs, last.steps / time_unit)
        if baseline is None:
            return
        for data in self._recent:
            features, cut_features = self._features(baseline, data, time_unit)
            no_folds = th.zeros(len(features), dtype=th.int64)
            baseline.add(*self._for_fit(features, cut_features, data, no_folds))
        self.baseline = baseline

    def _features(self, baseline: KernelBaseline, data: FitData, time_unit: float) -> tuple[th.Tensor, th.Tensor]:
        """:return: Features of the transitions, and of the observations after the cuts"""
        features = baseline.features(data.inputs, data.steps / time_unit, self._dtype)
        cut_steps = data.steps[data.cuts] + 1
        return features, baseline.features(data.cut_inputs, cut_steps / time_unit, self._dtype)

    def _for_fit(self, features: th.Tensor, cut_features: th.Tensor, data: FitData, folds: th.Tensor) -> tuple[th.Tensor, ...]:
        """:return: What LSTD(lambda) takes, which solves ``sum_t e_t (r_t + gamma phi_{t+1} . w - phi_t . w) ~ 0``"""
        goes_on = th.as_tensor(data.continues, dtype=features.dtype)
        following = features.roll(-1, dims=0).mul_(goes_on[:, None])
        following[data.cuts] = cut_features
        by_env = features.view(data.n_envs, -1, features.shape[1])
        traces = eligibility_traces(by_env, goes_on.view(data.n_envs, -1), self.gamma * self.gae_lambda)
        differences = following.mul_(-self.gamma).add_(features)
        return features, th.as_tensor(data.rewards), folds, traces.flatten(end_dim=1), differences

    def _time_unit(self, steps: np.ndarray) -> float:
        """:return: The unit of time; infinite if the fit does without the time"""
        if self._fixed_time_unit is None:
            self._longest = max(self._longest, int(steps.max()) + 1)
        if not self.use_time and not self._limits_are_ends():
            return math.inf
        return float(self._fixed_time_unit or 2 ** np.ceil(np.log2(self._longest)))

    def _limits_are_ends(self) -> bool:
        """:return: Whether time limits count as ends, see :data:`MAX_UNSEEN`"""
        return self.gamma ** (self._fixed_time_unit or self._longest) > MAX_UNSEEN

    def _cut_observations(self, last_obs: Observations) -> tuple[np.ndarray, Observations]:
        """:return: Indices of the transitions after which a trajectory was cut, and the observations after them"""
        running = np.flatnonzero(~self.dones[:, -1])
        final = [] if self._limits_are_ends() else [*self._final_observations]
        final += [(env, self.buffer_size - 1, take_observations(last_obs, env)) for env in running.tolist()]
        if not final:
            return np.empty(0, dtype=np.int64), take_observations(last_obs, slice(0))
        cuts = np.array([env * self.buffer_size + pos for env, pos, _ in final], dtype=np.int64)
        return cuts, map_observations(lambda *arrays: np.stack(arrays), *(obs for _, _, obs in final))

    def get_state(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline.get_state(),
            "longest": self._longest,
            "n_fits": self._n_fits,
            "mean_variance": self._mean_variance,
            "recent": self._recent,
            "dtype": self._dtype,
            "time_unit": self._fixed_time_unit,
            "options": self._options_of_features(),
            "relative": None if self.relative_term is None else self.relative_term.get_state(),
            "extractor": self.inputs.get_state(),
        }

    def _options_of_features(self) -> dict[str, Any]:
        options = {name: getattr(self.baseline, name) for name in ("n_features", "bandwidth")}
        memory = {"n_changes": N_CHANGES} if "states" in self._kept else {}
        return {**options, **memory, **self.inputs.kind}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.relative_term is not None and state["relative"] is not None:
            self.relative_term.set_state(state["relative"])
        if state["options"] != self._options_of_features():
            warnings.warn(
                f"The saved kernel baseline was fitted with {state['options']}, and this buffer has "
                f"{self._options_of_features()}: it starts with a new fit.",
                stacklevel=2,
            )
            return
        self.baseline.set_state(state["baseline"])
        self._longest, self._n_fits, self._recent = state["longest"], state["n_fits"], state["recent"]
        self._dtype, self._mean_variance = state["dtype"], state["mean_variance"]
        self.inputs.set_state(state["extractor"])
        self._fixed_time_unit = state["time_unit"]
