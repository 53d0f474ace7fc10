"""The buffer of the kernel baseline."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs

from sb3_grpo import advantages as A
from sb3_grpo.buffers.base import ActorFeatures, GroupRolloutBuffer
from sb3_grpo.buffers.rollout import Observations, Transitions, map_observations, take_observations
from sb3_grpo.kernel import KernelBaseline, eligibility_traces, predict_by_fold
from sb3_grpo.validation import require_at_least, require_between, require_flag, require_one_of, require_positive

#: Below, the normal equations of features that depend on one another are singular in double precision.
SMALLEST_RIDGE = 1e-8
#: Episodes that LSTD looks ahead at most: with ``gamma=1`` and no end in sight, the level of returns would be anything.
EPISODES_AHEAD = 10


class KernelRolloutBuffer(GroupRolloutBuffer):
    """
    Generalized advantage estimation against a kernel baseline that is fitted in closed form: short name ``kernel``.

    Every rollout gives an update, whether or not episodes end. The baseline is the fixed point of lambda-returns, and judges
    no trajectory by a fit to itself: trajectories are dealt into folds, and each fold is judged by the fit to the others (and,
    through the statistics' memory, to earlier rollouts). With a single trajectory in the rollout that leaves the earlier
    rollouts alone.

    Its inputs are the observations, flattened and one-hot encoded where they are discrete; for spaces with images what the
    actor's features extractor makes of them takes their place.

    :param buffer_size: steps per environment and rollout
    :param observation_space: observation space
    :param action_space: action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: lambda of the advantages
    :param gamma: discount factor
    :param n_envs: number of environments
    :param group_size: trajectories per group
    :param horizon: number of steps that counts as one unit of time; ``None`` for the longest trajectory so far, rounded up
        to a power of two
    :param n_features: number of random Fourier features
    :param bandwidth: standard deviation of the random frequencies
    :param ridge: penalty on the squared weights, per sample. With ``fit="lstd"`` the same number weighs more, the more a
        feature persists: on the level of the returns as if ``(1 - gamma lambda) / (1 - gamma)`` times as large
    :param forgetting: weight that the statistics of earlier rollouts keep
    :param n_folds: number of folds
    :param time_feature: whether the baseline depends on the step within the episode
    :param actor_features: fit to the outputs of the actor's last hidden layer instead of the observations. They change with
        every update, what is kept of earlier rollouts does not
    :param target_lambda: lambda of the returns that the baseline is fitted to, ``None`` for ``gae_lambda``
    :param fit: with ``"lstd"``, what such a return leaves to the baseline is left to the new one itself, by least-squares
        temporal difference learning, LSTD(lambda) (Boyan 2002, https://doi.org/10.1023/A:1017936530646). That system can be
        close to singular: predictions are kept within what rewards such as those seen so far can add up to, and the
        discount factor is ``1 - 1 / (10 horizon)`` at most, so that ``gamma=1`` has a level. With ``gamma`` above
        ``1 - 1 / horizon`` time limits reset the clock. With ``"regression"`` it is left to the baseline of the rollout
        before, which then lags behind where ``target_lambda`` is less than 1; that wants a larger ``ridge``, such as 1e-4
    :param reward_weights: see :class:`GroupRolloutBuffer`
    """

    whitens = True

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        gae_lambda: float = 0.98,
        gamma: float = 0.99,
        n_envs: int = 1,
        group_size: int = 2,
        horizon: int | None = None,
        n_features: int = 128,
        bandwidth: float = 0.5,
        ridge: float = 1e-5,
        forgetting: float = 0.8,
        n_folds: int = 4,
        time_feature: bool = True,
        actor_features: bool = False,
        target_lambda: float | None = None,
        fit: Literal["regression", "lstd"] = "lstd",
        reward_weights: Mapping[str, float] | None = None,
    ):
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            gae_lambda,
            gamma,
            n_envs,
            group_size,
            horizon,
            reward_weights,
        )
        require_at_least("n_features", n_features, 1)
        require_positive("bandwidth", bandwidth)
        require_positive("ridge", ridge)
        if ridge < SMALLEST_RIDGE:
            raise ValueError(
                f"`ridge` must be a number of at least {SMALLEST_RIDGE:g}, not {ridge!r}: with less, features that depend on "
                "one another make the fit fail."
            )
        require_at_least("n_folds", n_folds, 1)
        require_between("forgetting", forgetting, 0.0, 1.0)
        require_flag("time_feature", time_feature)
        require_flag("actor_features", actor_features)
        if target_lambda is not None:
            require_between("target_lambda", target_lambda, 0.0, 1.0)
        require_one_of("fit", fit, ("regression", "lstd"))
        self.target_lambda = gae_lambda if target_lambda is None else target_lambda
        self.n_folds = n_folds
        self.actor_features = actor_features
        # SB3 has seeded numpy's global generator with the model's seed at this point
        self.baseline = KernelBaseline(
            n_features,
            bandwidth,
            ridge,
            forgetting,
            time_feature,
            seed=np.random.randint(np.iinfo(np.int32).max),
            instrumented=fit == "lstd",
        )
        self._longest = 1
        self._reward_range = (0.0, 0.0)
        self._fitted_horizon = self.horizon
        # Of images, which are costly to encode a second time; shape (n_envs, buffer_size, features_dim)
        self._features = th.empty(0, 0, 0)
        self._n_features_kept = 0

    def keep_features(self, features: th.Tensor) -> None:
        if not self.has_images or self.actor_features:
            return
        shape = (self.n_envs, self.buffer_size, features.shape[1])
        if self._features.shape != shape:
            self._features = th.zeros(shape, dtype=features.dtype, device=features.device)
        self._features[:, self.pos] = features
        self._n_features_kept += 1

    def reset(self) -> None:
        super().reset()
        self._n_features_kept = 0

    def _form_update(
        self, rollout: Transitions, last_obs: Observations, actor_features: ActorFeatures
    ) -> tuple[Transitions, np.ndarray]:
        encode: Callable[[Observations], np.ndarray] = actor_features if self.has_images else self._encode
        if self.actor_features:
            encode = functools.partial(actor_features, hidden=True)
        time_unit = self._time_unit(rollout.steps)
        if self._n_features_kept == self.buffer_size:
            inputs = self._features.flatten(end_dim=1).double().cpu().numpy()
        else:
            inputs = encode(rollout.observations)
        self.baseline.observe(inputs)
        features = self.baseline.features(inputs, rollout.steps / time_unit)

        # Where a time limit or the end of the rollout cut a trajectory, the baseline stands for what would have followed
        cuts, cut_obs = self._cut_observations(last_obs)
        cut_times = rollout.steps[cuts] + 1
        # If the discount looks that far, what follows a time limit would be a level that no sample ties down: it has no time
        # of its own, so that the clock may as well begin anew
        if self.baseline.instrumented and self.gamma > 1.0 - 1.0 / time_unit:
            cut_times[rollout.dones[cuts]] = 0
        cut_features = self.baseline.features(encode(cut_obs), cut_times / time_unit)

        ends = rollout.dones.copy()
        ends[self.buffer_size - 1 :: self.buffer_size] = True
        continues = 1.0 - ends
        rewards = rollout.rewards.astype(np.float64)

        gamma = self._discount_factor(time_unit)

        def advantages_against(baseline: np.ndarray, cut_baseline: np.ndarray, lambda_: float) -> np.ndarray:
            next_baseline = np.append(baseline[1:], 0.0) * continues
            next_baseline[cuts] = cut_baseline
            return A.generalized_advantages(rewards, baseline, next_baseline, continues, gamma, lambda_)

        trajectory = np.cumsum(ends) - ends
        folds = th.as_tensor(trajectory % self.n_folds)
        bounds = self._attainable_returns(rewards, gamma)
        earlier = self.baseline.weights
        prior, cut_prior = (np.clip((each @ earlier).numpy(), *bounds) for each in (features, cut_features))
        targets = prior + advantages_against(prior, cut_prior, 1.0 if self.baseline.instrumented else self.target_lambda)
        if self.baseline.instrumented:
            weights = self._fit_differences(features, cut_features, cuts, rewards, continues, folds, gamma)
        else:
            weights = self.baseline.fit(features, th.as_tensor(targets), folds)
        baseline = np.clip(predict_by_fold(features, weights, folds).numpy(), *bounds)
        cut_baseline = np.clip(predict_by_fold(cut_features, weights, folds[cuts]).numpy(), *bounds)
        advantages = advantages_against(baseline, cut_baseline, self.gae_lambda)
        self.metrics["train/explained_variance"] = A.explained_variance(baseline, targets)
        # Without a baseline a transition would be judged by its lambda-return as it is
        self.metrics["train/baseline_variance_reduction"] = A.explained_variance(baseline, baseline + advantages)
        return rollout, advantages

    def _discount_factor(self, time_unit: float) -> float:
        """
        :param time_unit: steps of an episode
        :return: of fit and advantages alike: where they differed, each advantage would have a part of the baseline in it
        """
        return min(self.gamma, 1.0 - 1.0 / (EPISODES_AHEAD * time_unit)) if self.baseline.instrumented else self.gamma

    def _fit_differences(
        self,
        features: th.Tensor,
        cut_features: th.Tensor,
        cuts: np.ndarray,
        rewards: np.ndarray,
        continues: np.ndarray,
        folds: th.Tensor,
        gamma: float,
    ) -> th.Tensor:
        """
        LSTD(lambda): weights ``w`` for which ``sum_t e_t (r_t + gamma phi_{t+1} . w - phi_t . w)`` is zero, but for the
        penalty; with ``lambda = 1`` the regression of returns whose unseen rest is the prediction itself.

        :param features: ``phi``, shape ``(n, p)``
        :param cut_features: where a trajectory went on unseen, shape ``(n_cuts, p)``
        :param cuts: after which rows it did, shape ``(n_cuts,)``
        :param rewards: shape ``(n,)``
        :param continues: 0 where a trajectory or the rollout ended with the step, else 1, shape ``(n,)``
        :param folds: fold of each sample, shape ``(n,)``
        :param gamma: discount factor
        :return: shape ``(n_folds, p)``
        """
        goes_on = th.as_tensor(continues)
        following = features.roll(-1, dims=0) * goes_on[:, None]
        following[cuts] = cut_features
        by_env = features.view(self.n_envs, self.buffer_size, -1)
        traces = eligibility_traces(by_env, goes_on.view(self.n_envs, -1), gamma * self.target_lambda)
        differences = features - gamma * following
        return self.baseline.fit(differences, th.as_tensor(rewards), folds, traces.flatten(end_dim=1))

    def _attainable_returns(self, rewards: np.ndarray, gamma: float) -> tuple[float, float]:
        """
        :param rewards: of the rollout
        :param gamma: discount factor, less than 1
        :return: for LSTD, the least and the most that such rewards, or those of earlier rollouts, can add up to; else infinity
        """
        if not self.baseline.instrumented:
            return -np.inf, np.inf
        lowest, highest = self._reward_range
        self._reward_range = min(lowest, float(rewards.min())), max(highest, float(rewards.max()))
        return self._reward_range[0] / (1.0 - gamma), self._reward_range[1] / (1.0 - gamma)

    def _time_unit(self, steps: np.ndarray) -> float:
        if self._fitted_horizon is not None:
            return float(self._fitted_horizon)
        self._longest = max(self._longest, int(steps.max()) + 1)
        return float(2 ** np.ceil(np.log2(self._longest)))

    def _cut_observations(self, last_obs: Observations) -> tuple[np.ndarray, Observations]:
        """
        :param last_obs: observations after the last step, first axis environments
        :return: the rows (in the flat rollout) after which a trajectory went on unseen, and the observations there
        """
        running = np.flatnonzero(~self.dones[:, -1])
        cuts = [env * self.buffer_size + pos for env, pos, _ in self._final_observations]
        cuts += [int(env) * self.buffer_size + self.buffer_size - 1 for env in running]
        final = [obs for _, _, obs in self._final_observations]
        final += [take_observations(last_obs, env) for env in running]
        if not cuts:
            return np.empty(0, dtype=np.int64), take_observations(last_obs, slice(0))
        return np.array(cuts, dtype=np.int64), map_observations(lambda *arrays: np.stack(arrays), *final)

    def _encode(self, observations: Observations) -> np.ndarray:
        tensors = map_observations(th.as_tensor, observations)
        encoded = preprocess_obs(tensors, self.observation_space, normalize_images=False)
        parts = list(encoded.values()) if isinstance(encoded, dict) else [encoded]
        return th.cat([part.flatten(start_dim=1).double() for part in parts], dim=1).numpy()

    def get_state(self) -> dict[str, Any]:
        state = {"baseline": self.baseline.get_state(), "longest": self._longest, "horizon": self._fitted_horizon}
        state["reward_range"] = self._reward_range
        return {**state, "options": self._options_of_features()}

    def _options_of_features(self) -> dict[str, Any]:
        options = {name: getattr(self.baseline, name) for name in ("n_features", "bandwidth", "time_feature")}
        return {
            **options,
            "actor_features": self.actor_features,
            "fit": "lstd" if self.baseline.instrumented else "regression",
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # Files of the first commits have no options, or not all of them
        earlier = {**self._options_of_features(), "actor_features": False, "fit": "regression"}
        options = {**earlier, **state.get("options", {})}
        if options != self._options_of_features():
            warnings.warn(
                f"The saved kernel baseline was fitted with {options}, this buffer asks for {self._options_of_features()}: "
                "its fit begins afresh.",
                stacklevel=2,
            )
            return
        self.baseline.set_state(state["baseline"])
        self._longest = state["longest"]
        self._reward_range = state.get("reward_range", (0.0, 0.0))
        # The fit was to times in this unit, whatever the time limit of the present environment
        self._fitted_horizon = state["horizon"]
