"""The algorithm: Group Relative Policy Optimization on Stable-Baselines3's ``OnPolicyAlgorithm``."""

import copy
import io
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, PyTorchObs, Schedule
from stable_baselines3.common.utils import FloatSchedule, obs_as_tensor, polyak_update
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_grpo import losses
from sb3_grpo.buffers import (
    GroupRolloutBuffer,
    GroupRolloutBufferSamples,
    KernelRolloutBuffer,
    Observations,
    check_buffer_arguments,
    map_observations,
    resolve_buffer_class,
    take_observations,
)
from sb3_grpo.doctor import Doctor
from sb3_grpo.fast_actor import ClosedFormActor
from sb3_grpo.persistence import (
    RandomState,
    check_version,
    random_state,
    replace_file,
    set_random_state,
    with_suffix,
    write_version,
)
from sb3_grpo.policies import Actor, ActorPolicy, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_grpo.seeding import StartQueue, find_seeded_vec_env, insert_seeded_vec_env
from sb3_grpo.validation import (
    require_at_least,
    require_between,
    require_device,
    require_flag,
    require_one_of,
    require_positive,
    require_schedule,
)

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")

#: Transitions per rollout that ``n_steps=None`` aims at.
DEFAULT_ROLLOUT_SIZE = 2048
#: Entries of an observation that a kernel baseline can be fitted to in reasonable time and memory.
LARGEST_BASELINE_INPUT = 5000
#: Observations encoded at a time when a baseline asks for the actor's features.
ENCODING_BATCH = 1024


class ClipRange(NamedTuple):
    """
    Current bounds of the importance ratio: from ``1 - low`` to ``1 + high``.
    """

    low: float
    high: float


class MinibatchLoss(NamedTuple):
    """
    The loss of a minibatch of ``n`` transitions, and what is logged about it.

    :param loss: what is minimised, a scalar
    :param policy_gradient_loss: mean of the clipped surrogate, a scalar
    :param log_ratio: of the probabilities of the actions, now and when they were sampled, shape ``(n,)``
    :param ratio: importance ratios, before clipping, shape ``(n,)``
    :param slope: derivative of the surrogate's entries with respect to the log-probabilities, shape ``(n,)``
    :param entropy: of the policy, or its estimate, shape ``(n,)``
    :param kl: divergence from the reference, or its estimate, shape ``(n,)``; empty without a penalty
    """

    loss: th.Tensor
    policy_gradient_loss: th.Tensor
    log_ratio: th.Tensor
    ratio: th.Tensor
    slope: th.Tensor
    entropy: th.Tensor
    kl: th.Tensor

    def detached(self) -> "MinibatchLoss":
        """:return: the same without gradient"""
        return MinibatchLoss(*(field.detach() for field in self))


class GRPO(OnPolicyAlgorithm):
    """
    Group Relative Policy Optimization (GRPO): PPO's clipped surrogate without a critic.

    Advantages come from comparing trajectories that start alike: a *group* is ``group_size`` trajectories whose environments
    were reset with the same seed. How they are compared is the rollout buffer's business; the default, ``kernel``, compares
    with a baseline fitted in closed form, and the others are the estimators of the literature.

    Paper: DeepSeekMath, https://arxiv.org/abs/2402.03300

    :param policy: the policy (``MlpPolicy``, ``CnnPolicy``, ``MultiInputPolicy``, or a subclass of
        :class:`~sb3_grpo.policies.ActorPolicy`)
    :param env: the environment to learn from, or the name under which it is registered in Gymnasium
    :param learning_rate: learning rate, a number or a function of the progress remaining (from 1 to 0)
    :param n_steps: steps per environment and rollout; a rollout holds ``n_steps * n_envs`` transitions. ``None`` chooses it
        so that this is 2048, or as near below as the number of environments allows
    :param batch_size: minibatch size
    :param n_epochs: passes over the transitions of an update
    :param gamma: discount factor
    :param gae_lambda: lambda of generalized advantage estimation, and, without a ``target_lambda`` of its own, of
        the targets of the kernel baseline; buffers that judge whole trajectories do not use it
    :param clip_range: clipping parameter of the surrogate, a number or a function of the progress remaining (from 1 to 0)
    :param clip_range_high: the same for ratios above one, ``None`` for ``clip_range`` (clip-higher, DAPO)
    :param dual_clip: bound, greater than 1, on the ratio of transitions with a negative advantage, ``None`` for none
        (dual-clip PPO)
    :param importance_sampling_level: ``"step"``, each transition has its own importance ratio; or ``"trajectory"``, all those
        of a trajectory have the geometric mean of theirs (GSPO), for which minibatches hold whole trajectories
    :param loss_aggregation: ``"step"``, each transition counts alike; ``"trajectory"``, each trajectory (DeepSeekMath); or
        ``"constant"``, the sum over a trajectory divided by the time limit (Dr. GRPO). It concerns all parts of the loss
    :param normalize_advantage: whether to shift and scale the advantages of an update to zero mean and unit variance. This
        concerns the ``kernel`` buffer; those that compare within groups have their own ``scale``
    :param ent_coef: coefficient of the entropy bonus
    :param max_grad_norm: maximum norm of the gradient
    :param group_size: trajectories per group, at least 2
    :param share_starts: whether the members of a group start from the same initial state; if not, environments are reset as
        in PPO and groups are merely trajectories that began one after the other
    :param kl_coef: coefficient of the penalty KL(pi || reference)
    :param adaptive_kl_target: divergence from the reference at the end of an update that ``kl_coef``, doubled or halved after
        each update, is to bring about; ``None`` leaves ``kl_coef`` as it is
    :param kl_reference: the reference policy: ``"old"``, the policy at the start of the update (for the estimates ``k1`` to
        ``k3``: the policy that sampled the transition, unless its rollout is reused); ``"initial"``, the policy when it was
        first needed; ``"polyak"``, a moving average of its weights; or an integer ``k``, the policy of at most ``k`` updates
        ago (it is renewed every ``k`` updates)
    :param kl_reference_tau: part of the way that the reference ``"polyak"`` goes towards the policy before each update
    :param kl_estimator: ``"exact"``, the closed form; or ``"k1"``, ``"k2"``, ``"k3"``, estimates from the actions taken, see
        :mod:`sb3_grpo.losses`
    :param use_sde: whether to explore with state-dependent noise (gSDE, https://arxiv.org/abs/2005.05719) instead of
        independent Gaussian noise
    :param sde_sample_freq: with gSDE, the number of steps after which the noise is drawn anew; -1 for once a rollout
    :param rollout_buffer_class: ``"kernel"``, ``"outcome"``, ``"process"``, ``"return_to_go"``, ``"stepwise"``, or a subclass
        of :class:`~sb3_grpo.buffers.GroupRolloutBuffer`
    :param rollout_buffer_kwargs: keyword arguments of the rollout buffer
    :param target_kl: an update stops early once the approximate KL divergence from the policy that sampled exceeds 1.5 times
        this
    :param n_reused_rollouts: rollouts before the latest that an update trains on once more, their actions weighed by the
        present policy's probabilities (Generalized PPO, https://arxiv.org/abs/2111.00072). An update has as many more
        minibatches: with one, a ``batch_size`` twice as large keeps their number
    :param worker_timeout: seconds that the workers of a ``SubprocVecEnv`` may take for a step before learning stops with an
        error, ``None`` for any number
    :param stats_window_size: episodes over which the logged return, length and success rate are averaged
    :param tensorboard_log: folder for TensorBoard's files, ``None`` for none
    :param policy_kwargs: keyword arguments of the policy
    :param verbose: 0 prints nothing, 1 what is set up and logged, 2 debugging messages too
    :param doctor: whether a run with ``verbose`` of at least 1 is watched for known failure patterns, see
        :class:`~sb3_grpo.doctor.Doctor`
    :param seed: of all random generators and of the starts of the environments; the same seed gives the same weights
    :param device: where the policy lives, as SB3 names devices (``"auto"``, ``"cpu"``, ``"cuda"``)
    :param _init_setup_model: whether to build policy and buffer at once; ``load`` does so later
    :raises ValueError: if an argument is out of range, or does not fit the environment
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    policy: ActorPolicy  # type: ignore[assignment]
    rollout_buffer: GroupRolloutBuffer  # type: ignore[assignment]

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int | None = None,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.98,
        clip_range: float | Schedule = 0.2,
        clip_range_high: float | Schedule | None = None,
        dual_clip: float | None = None,
        importance_sampling_level: losses.ImportanceSamplingLevel = "step",
        loss_aggregation: losses.LossAggregation = "step",
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        max_grad_norm: float = 0.5,
        group_size: int = 2,
        share_starts: bool = True,
        kl_coef: float = 0.0,
        adaptive_kl_target: float | None = None,
        kl_reference: Literal["old", "initial", "polyak"] | int = "initial",
        kl_reference_tau: float = 0.05,
        kl_estimator: losses.KLEstimator = "exact",
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: str | type[GroupRolloutBuffer] | None = "kernel",
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        n_reused_rollouts: int = 0,
        worker_timeout: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        doctor: bool = True,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        # These three the base class uses before anything else
        require_flag("use_sde", use_sde)
        require_one_of("verbose", int(verbose) if isinstance(verbose, bool) else verbose, (0, 1, 2))
        require_device("device", device)
        _check_constructor_arguments(policy, env, rollout_buffer_kwargs, policy_kwargs, tensorboard_log, _init_setup_model)
        if env is not None:
            env = maybe_make_env(env, verbose)
            _check_spaces(env.observation_space, env.action_space)
            if use_sde and not isinstance(env.action_space, spaces.Box):
                raise ValueError(
                    f"`use_sde` is {use_sde!r}, which needs continuous actions, not {env.action_space}: pass use_sde=False."
                )
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            n_steps=n_steps,  # type: ignore[arg-type]
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,
            vf_coef=0.0,  # there is no critic
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=resolve_buffer_class(rollout_buffer_class),  # type: ignore[arg-type]
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            device=device,
            seed=seed,
            _init_setup_model=False,
        )
        del self.vf_coef
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.clip_range = clip_range
        self.clip_range_high = clip_range_high
        self.dual_clip = dual_clip
        self.importance_sampling_level = importance_sampling_level
        self.loss_aggregation = loss_aggregation
        self.normalize_advantage = normalize_advantage
        self.group_size = group_size
        self.share_starts = share_starts
        #: Of the next update, where it adapts.
        self.kl_coef = kl_coef
        self.adaptive_kl_target = adaptive_kl_target
        self.kl_reference = kl_reference
        self.kl_reference_tau = kl_reference_tau
        self.kl_estimator = kl_estimator
        self.target_kl = target_kl
        self.n_reused_rollouts = n_reused_rollouts
        self.worker_timeout = worker_timeout
        self.doctor = doctor

        #: Figures on the last update, as logged; empty if the last rollout gave rise to none.
        self.update_metrics: dict[str, float] = {}
        self._doctor = Doctor()
        self.start_queue: StartQueue | None = None
        #: The policy that the KL penalty refers to, from the first update that needs it.
        self.kl_reference_policy: ActorPolicy | None = None
        #: Updates since the reference was last renewed; ``None`` while there is no reference.
        self._kl_reference_age: int | None = None
        #: State of the random generators with which a loaded model goes on.
        self._random_state: RandomState | None = None
        #: Class and state of the rollout buffer, between a file and the buffer.
        self._rollout_buffer_state: tuple[type[GroupRolloutBuffer], dict[str, Any]] | None = None

        if _init_setup_model:
            self._setup_model()

    # --- setting up ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        return insert_seeded_vec_env(OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper))

    def _setup_model(self) -> None:
        self.rollout_buffer_class = resolve_buffer_class(self.rollout_buffer_class)  # type: ignore[assignment, arg-type]
        if self.n_steps is None:
            self.n_steps = max(DEFAULT_ROLLOUT_SIZE // self.n_envs, 1)
        self._check_arguments()
        self.clip_range = FloatSchedule(self.clip_range)
        if self.clip_range_high is not None:
            self.clip_range_high = FloatSchedule(self.clip_range_high)

        start_queue, last_obs, pending_random_state = self.start_queue, self._last_obs, self._random_state
        user_kwargs = self.rollout_buffer_kwargs
        self.rollout_buffer_kwargs = {"group_size": self.group_size, "horizon": self._time_limit(), **user_kwargs}
        try:
            super()._setup_model()
        finally:
            self.rollout_buffer_kwargs = user_kwargs
        # Seeding the model has made a new queue and random stream; those that came with a saved model go on instead
        self._random_state = pending_random_state
        if start_queue is not None and start_queue.group_size == self.group_size:
            self.start_queue, self._last_obs = start_queue, last_obs
        elif self.start_queue is start_queue:  # not seeded: there is none, or one of another group size
            self.start_queue = StartQueue(self.group_size)
        if self._rollout_buffer_state is not None:
            saved_class, state = self._rollout_buffer_state
            if saved_class is self.rollout_buffer_class:  # a model can be loaded with another buffer than it was saved with
                self.rollout_buffer.set_state(state)
            self._rollout_buffer_state = None
        self._check_baseline_inputs()
        if self._kl_reference_age is not None:
            # A saved model has a reference: make the module into which it is about to be loaded
            self.kl_reference_policy = self._twin_of_policy()

    def _check_arguments(self) -> None:
        for name in ("normalize_advantage", "share_starts", "use_sde", "doctor"):
            require_flag(name, getattr(self, name))
        require_schedule("learning_rate", self.learning_rate, smallest=0.0)
        # SB3 makes a schedule of Python's numbers, and of none of numpy's but float64
        self.learning_rate = self.learning_rate if callable(self.learning_rate) else float(self.learning_rate)
        require_at_least("stats_window_size", self._stats_window_size, 1)
        if self.seed is not None:
            require_at_least("seed", self.seed, 0)
            require_between("seed", self.seed, 0, np.iinfo(np.uint32).max)
            self.seed = int(self.seed)  # Python's generator takes no numpy integer
        if not (isinstance(self.sde_sample_freq, (int, np.integer)) and self.sde_sample_freq == -1):
            require_at_least("sde_sample_freq", self.sde_sample_freq, 1, or_else="or -1, for once a rollout")
        if self.worker_timeout is not None:
            require_positive("worker_timeout", self.worker_timeout)
        require_at_least("group_size", self.group_size, 2)
        require_at_least("n_steps", self.n_steps, 1)
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("n_epochs", self.n_epochs, 1)
        require_at_least("n_reused_rollouts", self.n_reused_rollouts, 0)
        if self.n_steps * self.n_envs < 2:
            raise ValueError(
                f"A rollout of n_steps * n_envs = {self.n_steps} * {self.n_envs} transitions leaves nothing to compare: pass "
                "`n_steps` of at least 2, or more environments."
            )
        for name in ("clip_range", "clip_range_high"):
            clip_range = getattr(self, name)
            if clip_range is not None or name == "clip_range":
                require_schedule(name, clip_range, smallest=0.0)
                if not callable(clip_range):
                    require_positive(name, clip_range)
                    setattr(self, name, float(clip_range))
        if self.dual_clip is not None:
            require_positive("dual_clip", self.dual_clip)
            if self.dual_clip <= 1.0:
                raise ValueError(
                    f"`dual_clip` bounds ratios that may exceed 1, so it must be greater than 1, not {self.dual_clip!r}."
                )
        require_one_of("importance_sampling_level", self.importance_sampling_level, tuple(losses.LOG_RATIOS))
        require_one_of("loss_aggregation", self.loss_aggregation, tuple(losses.LOSS_WEIGHTS))
        self._check_kl_arguments()
        # Infinity switches clipping off
        if not (isinstance(self.max_grad_norm, (float, np.floating)) and self.max_grad_norm == np.inf):
            require_positive("max_grad_norm", self.max_grad_norm)
        if self.target_kl is not None:
            require_positive("target_kl", self.target_kl)
        require_between("gamma", self.gamma, 0.0, 1.0)
        require_between("gae_lambda", self.gae_lambda, 0.0, 1.0)
        require_between("ent_coef", self.ent_coef, -np.inf, np.inf)
        self.policy_class.check_keywords(self.policy_kwargs)  # type: ignore[attr-defined]
        check_buffer_arguments(self.rollout_buffer_class, self.rollout_buffer_kwargs)  # type: ignore[arg-type]
        if "group_size" in self.rollout_buffer_kwargs:
            raise ValueError(
                f"`rollout_buffer_kwargs` has group_size={self.rollout_buffer_kwargs['group_size']!r}: pass `group_size` to "
                "GRPO itself, which hands out the starts accordingly."
            )

    def _check_baseline_inputs(self) -> None:
        buffer = self.rollout_buffer
        if not isinstance(buffer, KernelRolloutBuffer) or buffer.actor_features:
            return
        n_inputs = (
            self.policy.features_extractor.features_dim if buffer.has_images else get_flattened_obs_dim(self.observation_space)
        )
        if n_inputs > LARGEST_BASELINE_INPUT:
            raise ValueError(
                f"The kernel baseline would be fitted to the {n_inputs} numbers of an observation ({self.observation_space}), "
                f"by a linear system of as many unknowns; it takes {LARGEST_BASELINE_INPUT} at most. Pass "
                "`rollout_buffer_kwargs=dict(actor_features=True)`, which fits it to the actor's last hidden layer instead."
            )

    def _check_kl_arguments(self) -> None:
        require_between("kl_coef", self.kl_coef, 0.0, np.inf)
        require_one_of("kl_estimator", self.kl_estimator, ("exact", *losses.KL_ESTIMATORS))
        if isinstance(self.kl_reference, str):
            if self.kl_reference not in ("old", "initial", "polyak"):
                raise ValueError(
                    "`kl_reference` must be 'old', 'initial', 'polyak' or the number of updates after which it is renewed, "
                    f"not {self.kl_reference!r}."
                )
        else:
            require_at_least("kl_reference", self.kl_reference, 1, or_else="or 'old', 'initial', 'polyak'")
        require_between("kl_reference_tau", self.kl_reference_tau, 0.0, 1.0)
        if self.adaptive_kl_target is not None:
            require_positive("adaptive_kl_target", self.adaptive_kl_target)
            smallest, largest = losses.KL_COEF_BOUNDS
            if not smallest <= self.kl_coef <= largest:
                raise ValueError(
                    f"adaptive_kl_target={self.adaptive_kl_target!r} adapts `kl_coef` between {smallest:g} and {largest:g}: "
                    f"pass one of these to begin with, such as `kl_coef=0.1`, not {self.kl_coef!r}."
                )

    def _time_limit(self) -> int | None:
        """The time limit of the environments in steps, ``None`` where it is unknown."""
        # The attribute of gymnasium's TimeLimit, rather than `spec`, which not every worker process can send
        if self.env is None or not self.env.has_attr("_max_episode_steps"):
            return None
        limits = self.env.get_attr("_max_episode_steps")
        # An environment may use that name for something else
        are_limits = all(isinstance(limit, int) and limit > 0 for limit in limits)
        return max(limits) if are_limits else None

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def set_random_seed(self, seed: int | None = None) -> None:
        super().set_random_seed(seed)
        if seed is not None:
            self.start_queue = StartQueue(self.group_size, seed)
            self._random_state = None
            # The groups in flight are the former queue's: begin anew with the starts of this one
            self._last_obs = None

    # --- collecting ---------------------------------------------------------------------------------------------------

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if self.env is not None and find_seeded_vec_env(self.env).stepped_while_detached:
            # An evaluation on the training environment, say, has left it in another state than the one to continue from
            self._last_obs = None
        is_reset = reset_num_timesteps or self._last_obs is None
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        if is_reset:
            _check_finite("observation", self._last_obs, self.num_timesteps)
            self.rollout_buffer.start_afresh()
        if "horizon" not in self.rollout_buffer_kwargs:  # there may be another environment than the model was made with
            self.rollout_buffer.horizon = self._time_limit()
        return result

    @contextmanager
    def _seeded_starts(self) -> Iterator[None]:
        """Hand out starts while learning, and only then: an evaluation on the same environment gets starts of its own."""
        assert self.env is not None and self.start_queue is not None
        seeded_env = find_seeded_vec_env(self.env)
        # Running statistics must not see what is not finite; other wrappers may be there to mend it
        check = self._check_environments if self.get_vec_normalize_env() is not None else None
        seeded_env.attach(self.start_queue, self.share_starts, check, self.worker_timeout)
        try:
            yield
        except BaseException:
            # Whatever broke off may have left the environments in another state than `_last_obs` tells
            self._last_obs = None
            raise
        finally:
            seeded_env.detach()

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: GroupRolloutBuffer,  # type: ignore[override]
        n_rollout_steps: int,
    ) -> bool:
        """
        Collect ``n_rollout_steps`` steps of each environment, and form the advantages.

        :param env: the training environment
        :param callback: called at every step, and at the beginning and end of the rollout
        :param rollout_buffer: buffer to fill
        :param n_rollout_steps: steps per environment
        :return: False if the callback asked to stop; the step it stopped at is kept
        :raises ValueError: if an observation or a reward is not finite
        """
        assert self._last_obs is not None, "No previous observation was provided"
        seeded_env = find_seeded_vec_env(env)
        self.policy.set_training_mode(False)
        actor = self.policy.actor()

        n_steps = 0
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)

        callback.on_rollout_start()

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
            sampled, log_probs = self._choose_actions(obs_tensor, actor, rollout_buffer)
            _check_policy(log_probs, self.num_timesteps)
            actions = sampled.cpu().numpy()
            clipped_actions = self._within_bounds(actions)

            start_indices = seeded_env.start_indices  # before the step, which may begin others
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self._check_environments(new_obs, rewards, dones, infos)
            judged_rewards = self._original_rewards(rewards) if rollout_buffer.takes_original_rewards else rewards

            self.num_timesteps += env.num_envs

            # Callbacks read SB3's local names
            callback.update_locals(locals())
            continue_training = callback.on_step()

            self._update_info_buffer(infos, dones)
            n_steps += 1
            rollout_buffer.add(
                self._last_obs, actions, judged_rewards, dones, log_probs, start_indices, infos  # type: ignore[arg-type]
            )
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones
            if not continue_training:
                return False

        rollout_buffer.finish_rollout(new_obs, self._actor_features)  # type: ignore[arg-type]
        if self.normalize_advantage:
            rollout_buffer.whiten_advantages()
        if self.n_reused_rollouts > 0:
            rollout_buffer.reuse_earlier(self.n_reused_rollouts, self._log_probs)
        rollout_buffer.weigh_transitions(self.loss_aggregation)
        self._log_rollout(seeded_env.mismatches)

        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    @th.no_grad()
    def _choose_actions(
        self, obs: PyTorchObs, actor: Actor | None, rollout_buffer: GroupRolloutBuffer
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        :param obs: of all environments
        :param actor: from :meth:`~sb3_grpo.policies.ActorPolicy.actor`
        :param rollout_buffer: which is told of their features
        :return: actions, shape ``(n_envs, *action_shape)``, and their log-probabilities, shape ``(n_envs,)``
        """
        if actor is None:
            return self.policy(obs)
        features = self.policy.extract_features(obs, self.policy.features_extractor)
        rollout_buffer.keep_features(features)
        return actor(features)

    def _check_environments(
        self,
        observations: VecEnvObs,
        rewards: np.ndarray | None,
        dones: np.ndarray | None,
        infos: Sequence[dict[str, Any]] | None,
    ) -> None:
        """
        :param observations: of all environments, after a reset or a step
        :param rewards: of the step, shape ``(n_envs,)``, ``None`` after a reset
        :param dones: whether the episode ended, shape ``(n_envs,)``, ``None`` after a reset
        :param infos: of the step, ``None`` after a reset
        :raises ValueError: if a number is NaN or infinite, naming the environment
        """
        _check_finite("observation", observations, self.num_timesteps)
        if rewards is not None and dones is not None and infos is not None:
            _check_finite("reward", rewards, self.num_timesteps)
            _check_final_observations(dones, infos, self.num_timesteps)

    def _original_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """
        :param rewards: of the last step, shape ``(n_envs,)``
        :return: what they were before a ``VecNormalize`` divided them by its running scale
        """
        normalizer = self.get_vec_normalize_env()
        return normalizer.get_original_reward() if normalizer is not None and normalizer.norm_reward else rewards

    def _within_bounds(self, actions: np.ndarray) -> np.ndarray:
        """
        :param actions: as sampled, shape ``(n_envs, *action_shape)``
        :return: as the environments take them
        """
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        return np.clip(actions, self.action_space.low, self.action_space.high)

    def _actor_features(self, observations: Observations, hidden: bool = False) -> np.ndarray:
        """
        :param observations: a batch of ``n``
        :param hidden: the outputs of the actor's last hidden layer, instead of those of its features extractor
        :return: shape ``(n, dim)``
        """
        n_observations = len(next(iter(observations.values())) if isinstance(observations, dict) else observations)
        features = []
        for first in range(0, n_observations, ENCODING_BATCH):
            batch = take_observations(observations, slice(first, first + ENCODING_BATCH))
            with th.no_grad():
                obs = obs_as_tensor(batch, self.device)
                extractor = self.policy.features_extractor
                features.append(self.policy._latent(obs) if hidden else self.policy.extract_features(obs, extractor))
        return th.cat(features).double().cpu().numpy()

    @th.no_grad()
    def _log_probs(self, transitions: GroupRolloutBufferSamples) -> th.Tensor:
        """
        :param transitions: ``n`` of them
        :return: log-probabilities of their actions under the present policy, shape ``(n,)``
        """
        parts = transitions.split(ENCODING_BATCH)
        return th.cat([self.policy.evaluate_actions(part.observations, part.actions)[0] for part in parts])

    def _log_rollout(self, start_mismatches: int) -> None:
        for name, value in self.rollout_buffer.metrics.items():
            self.logger.record(name, value)
        if self.share_starts:
            self.logger.record("rollout/start_mismatches", start_mismatches)

    # --- updating -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Update the policy with the transitions that the rollout buffer holds; without any, leave it as it is."""
        self._update_learning_rate(self.policy.optimizer)
        # Stable-Baselines3 knows one rate for all weights, the policy may have another for some of them
        self.policy.set_learning_rate(self.lr_schedule(self._current_progress_remaining))
        self.update_metrics = {}
        if self.rollout_buffer.n_samples == 0:
            return
        self.policy.set_training_mode(True)
        clip_range = self._current_clip_range()
        # Not passed on where it makes no difference, so that a buffer of the user's need not know of it
        dealt = {"whole_trajectories": True} if self.importance_sampling_level == "trajectory" else {}
        self._renew_kl_reference()
        before = copy.deepcopy((self.policy.state_dict(), self.policy.optimizer.state_dict(), self._n_updates))

        # The penalty refers to the distributions themselves, which only autograd sees
        closed_form = self.policy.closed_form() if self.kl_coef == 0 else None

        try:
            with th.set_grad_enabled(closed_form is None):
                self._make_update(clip_range, closed_form, dealt)
        except BaseException:  # an interrupt too: the policy is that of an update or of the next, nothing between
            self._restore(before)
            raise
        if self.adaptive_kl_target is not None:
            self._adapt_kl_coef(self.adaptive_kl_target)

    def _make_update(self, clip_range: ClipRange, closed_form: ClosedFormActor | None, dealt: dict[str, bool]) -> None:
        """
        :param clip_range: current clip range
        :param closed_form: the actor without autograd, if there is one
        :param dealt: how the buffer is to deal out minibatches
        :raises ValueError: if a gradient, or a weight after the update, is not finite
        """
        minibatches: list[MinibatchLoss] = []
        gradient_norms: list[th.Tensor] = []
        for epoch in range(self.n_epochs):
            first_of_epoch = len(minibatches)
            stopped_early = False
            for rollout_data in self.rollout_buffer.get(self.batch_size, **dealt):
                losses = self._minibatch_loss(rollout_data, clip_range, closed_form)
                minibatches.append(losses if closed_form is not None else losses.detached())
                stopped_early = self._is_too_far(losses.log_ratio, epoch)
                if stopped_early:
                    break
                gradient_norms.append(self._set_gradient(losses, rollout_data.weights, closed_form))
                self.policy.optimizer.step()
            self._n_updates += 1
            if stopped_early:
                break

        _check_update(self.policy, gradient_norms, self._n_updates)
        self._log_update(minibatches, first_of_epoch, gradient_norms, clip_range)

    def _restore(self, before: tuple[dict[str, Any], dict[str, Any], int]) -> None:
        """
        :param before: states of the policy and of its optimiser, and the number of updates, before the update
        """
        policy_state, optimizer_state, self._n_updates = before
        self.policy.load_state_dict(policy_state)
        self.policy.optimizer.load_state_dict(optimizer_state)
        self.update_metrics = {}

    def _current_clip_range(self) -> ClipRange:
        low = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]
        if self.clip_range_high is None:
            return ClipRange(low, low)
        return ClipRange(low, self.clip_range_high(self._current_progress_remaining))  # type: ignore[operator]

    def _minibatch_loss(
        self, rollout_data: GroupRolloutBufferSamples, clip_range: ClipRange, closed_form: ClosedFormActor | None
    ) -> MinibatchLoss:
        """
        :param rollout_data: a minibatch
        :param clip_range: current clip range
        :param closed_form: the actor without autograd, ``None`` to evaluate the actions with it
        :return: the loss and its parts
        """
        if closed_form is None:
            log_prob, entropy = self.policy.evaluate_actions(rollout_data.observations, rollout_data.actions)
        else:
            features = self.policy.extract_features(rollout_data.observations, self.policy.features_extractor)
            log_prob, entropy = closed_form.evaluate(features, rollout_data.actions)
        if entropy is None:
            entropy = -log_prob  # without a closed form, this estimates it
        log_ratio = log_prob - rollout_data.old_log_prob
        surrogate = losses.clipped_surrogate(
            losses.LOG_RATIOS[self.importance_sampling_level](log_ratio, rollout_data.trajectories),
            rollout_data.advantages,
            *clip_range,
            self.dual_clip,
        )
        weights = rollout_data.weights
        policy_gradient_loss = losses.weighted_mean(surrogate.loss, weights)
        loss = policy_gradient_loss
        if self.ent_coef != 0:
            loss = loss - self.ent_coef * losses.weighted_mean(entropy, weights)
        kl = entropy.new_empty(0)
        if self.kl_coef > 0:
            kl = self._kl_to_reference(rollout_data, log_prob)
            loss = loss + self.kl_coef * losses.weighted_mean(kl, weights)
        return MinibatchLoss(loss, policy_gradient_loss, log_ratio, surrogate.ratio, surrogate.slope, entropy, kl)

    def _set_gradient(
        self, losses: MinibatchLoss, weights: th.Tensor | None, closed_form: ClosedFormActor | None
    ) -> th.Tensor:
        """
        Set the gradient of the policy to that of the loss, clipped.

        :param losses: of a minibatch of ``n`` transitions
        :param weights: of the transitions in the loss, shape ``(n,)``, ``None`` for ones
        :param closed_form: what evaluated the actions, if it was not autograd
        :return: norm of the gradient before it was clipped, a scalar
        """
        if closed_form is None:
            self.policy.optimizer.zero_grad()
            losses.loss.backward()
            return th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        n = len(losses.slope)
        of_log_prob = losses.slope / n if weights is None else weights * losses.slope / n
        of_entropy = None
        if self.ent_coef != 0:
            of_entropy = th.full_like(of_log_prob, -self.ent_coef / n)
            if weights is not None:
                of_entropy *= weights
        closed_form.backward(of_log_prob, of_entropy)
        return closed_form.clip_gradient(self.max_grad_norm)

    def _is_too_far(self, log_ratio: th.Tensor, epoch: int) -> bool:
        """
        :param log_ratio: of a minibatch, shape ``(n,)``
        :param epoch: index of the epoch
        :return: whether the policy is so far from the one that sampled that the update has to stop
        """
        if self.target_kl is None:
            return False
        approx_kl = losses.approximate_kl(log_ratio).item()
        is_too_far = approx_kl > 1.5 * self.target_kl
        if is_too_far and self.verbose >= 1:
            print(f"Update stopped in epoch {epoch}: approximate KL {approx_kl:.3f} > 1.5 target_kl")
        return is_too_far

    def _kl_to_reference(self, rollout_data: GroupRolloutBufferSamples, log_prob: th.Tensor) -> th.Tensor:
        """
        :param rollout_data: a minibatch of ``n`` transitions
        :param log_prob: of its actions, shape ``(n,)``
        :return: KL(pi || reference) or its estimate, shape ``(n,)``
        """
        if self.kl_estimator != "exact" and self.kl_reference == "old":
            # The policy that sampled, or that the update began with, has left its log-probabilities: no second pass is needed
            reference_log_prob = rollout_data.old_log_prob
        else:
            assert self.kl_reference_policy is not None
            with th.no_grad():
                reference = self.kl_reference_policy.get_distribution(rollout_data.observations)
            if self.kl_estimator == "exact":
                return losses.exact_kl(self.policy.get_distribution(rollout_data.observations), reference)
            reference_log_prob = reference.log_prob(rollout_data.actions)
        estimate = losses.KL_ESTIMATORS[self.kl_estimator](log_prob, reference_log_prob)
        if self.kl_estimator == "k1":
            return losses.importance_weighted(estimate, log_prob, rollout_data.old_log_prob)
        return estimate

    def _adapt_kl_coef(self, target: float) -> None:
        """
        :param target: divergence from the reference that the update should have brought about
        """
        with th.no_grad():
            divergences = [
                self._kl_to_reference(batch, self.policy.evaluate_actions(batch.observations, batch.actions)[0])
                for batch in self.rollout_buffer.get(ENCODING_BATCH)
            ]
        kl = th.cat(divergences).mean().item()
        self.update_metrics["train/kl_to_reference"] = kl
        self.logger.record("train/kl_to_reference", kl)
        self.kl_coef = losses.adapted_kl_coef(self.kl_coef, kl, target)

    def _renew_kl_reference(self) -> None:
        """Take the current policy as the KL reference where it is due."""
        if self.kl_coef == 0:
            return
        if self.kl_reference == "old" and self.kl_estimator != "exact":
            return  # the transitions tell its log-probabilities
        lifetimes = {"old": 1, "initial": np.inf, "polyak": np.inf}
        lifetime = lifetimes[self.kl_reference] if isinstance(self.kl_reference, str) else self.kl_reference
        if self.kl_reference_policy is None or self._kl_reference_age is None:
            self.kl_reference_policy = self._twin_of_policy()
            self._kl_reference_age = 0
        elif self.kl_reference == "polyak":
            polyak_update(self.policy.parameters(), self.kl_reference_policy.parameters(), self.kl_reference_tau)
            # Running statistics of a features extractor are averages already, and some of them integers
            for ours, theirs in zip(self.policy.buffers(), self.kl_reference_policy.buffers(), strict=True):
                theirs.copy_(ours)
        elif self._kl_reference_age >= lifetime:
            self.kl_reference_policy.load_state_dict(self.policy.state_dict())
            self._kl_reference_age = 0
        self._kl_reference_age += 1

    def _twin_of_policy(self) -> ActorPolicy:
        """:return: a frozen policy with the weights of the current one"""
        # Not deepcopy: SB3's distributions hold tensors of the last backward pass, which cannot be copied
        with th.random.fork_rng(devices=[]):
            twin = self.policy_class(
                self.observation_space, self.action_space, self.lr_schedule, use_sde=self.use_sde, **self.policy_kwargs
            ).to(self.device)
        twin.load_state_dict(self.policy.state_dict())
        twin.requires_grad_(False)
        twin.set_training_mode(False)
        return twin  # type: ignore[return-value]

    def _log_update(
        self,
        minibatches: list[MinibatchLoss],
        first_of_last_epoch: int,
        gradient_norms: list[th.Tensor],
        clip_range: ClipRange,
    ) -> None:
        """
        :param minibatches: of the update
        :param first_of_last_epoch: index of the minibatch at which the last epoch began
        :param gradient_norms: norms of the gradients before clipping; none where the update was stopped at once
        :param clip_range: current clip range
        """
        all_epochs = _joined(minibatches)
        last_epoch = _joined(minibatches[first_of_last_epoch:])
        clipped = losses.clip_fractions(all_epochs.ratio, *clip_range)
        figures = {
            "train/entropy_loss": -all_epochs.entropy.mean(),
            "train/policy_gradient_loss": all_epochs.policy_gradient_loss.mean(),
            "train/approx_kl": losses.approximate_kl(last_epoch.log_ratio),
            "train/clip_fraction": clipped.low + clipped.high,
            "train/clip_fraction_low": clipped.low,
            "train/clip_fraction_high": clipped.high,
            "train/effective_sample_size": losses.effective_sample_size(last_epoch.ratio),
            "train/loss": minibatches[-1].loss,
        }
        if gradient_norms:
            figures["train/grad_norm"] = th.stack(gradient_norms).mean()
        if self.kl_coef > 0:
            figures["train/kl_loss"] = all_epochs.kl.mean()
        self.update_metrics = {name: figure.item() for name, figure in figures.items()}
        for name, value in self.update_metrics.items():
            self.logger.record(name, value)
        if self.adaptive_kl_target is not None:
            self.logger.record("train/kl_coef", self.kl_coef)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range.low)
        if self.clip_range_high is not None:
            self.logger.record("train/clip_range_high", clip_range.high)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if self.doctor and self.verbose >= 1:
            callbacks = callback if isinstance(callback, list) else [callback]
            if any(isinstance(each, Doctor) for each in callbacks):  # one is enough
                return super()._init_callback(callback, progress_bar)
            callback = [each if isinstance(each, BaseCallback) else ConvertCallback(each) for each in callbacks]
            callback = CallbackList([*callback, self._doctor])
        return super()._init_callback(callback, progress_bar)

    def learn(
        self: SelfGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfGRPO:
        if self._random_state is not None:  # of the run that a loaded model goes on with
            set_random_state(self._random_state)
            self._random_state = None
        with self._seeded_starts(), _grad_mode_kept():
            return super().learn(
                total_timesteps=total_timesteps,
                callback=callback,
                log_interval=log_interval,
                tb_log_name=tb_log_name,
                reset_num_timesteps=reset_num_timesteps,
                progress_bar=progress_bar,
            )

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """
        Save the model in a zip-file, with all that the rest of its run depends on: weights, optimiser, schedules' progress,
        kernel baseline, KL reference, start queue, random generators. Transitions that wait for their group are not saved: a
        loaded model begins with a reset of its environments, which drops them in a model that goes on as well.

        A file under the final name is always whole: the old one until the new one is complete.

        :param path: path to the file, ``.zip`` is added where it has no suffix; or a file-like object
        :param exclude: names of attributes not to save
        :param include: names of attributes to save that are left out by default
        """
        self._rollout_buffer_state = (type(self.rollout_buffer), self.rollout_buffer.get_state())
        pending = self._random_state  # of a loaded model that has not learned on
        self._random_state = pending or random_state()
        try:
            content = io.BytesIO()
            super().save(content, exclude, include)
        finally:
            self._rollout_buffer_state = None
            self._random_state = pending
        write_version(content)
        if isinstance(path, (str, pathlib.Path)):
            replace_file(with_suffix(pathlib.Path(path), ".zip"), content.getvalue())
        else:
            path.write(content.getvalue())

    @classmethod
    def load(
        cls: type[SelfGRPO],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfGRPO:
        """
        Load a model. Its first ``learn`` goes on where the saved one would have, from a reset of its environments, with the
        same random numbers; unless a ``seed`` is passed, which begins a random stream and a start queue of its own.

        .. warning::
            A saved model contains pickles, and unpickling a file runs what its author put there: load files of people whom you
            trust, and no others. From any other file take the weights alone, which are read without unpickling objects:
            ``model.set_parameters(path)`` for all of GRPO's, or :func:`~sb3_grpo.transfer.load_actor` for the actor,
            into a model that you have constructed yourself. ``custom_objects`` replaces attributes that cannot be unpickled.

        :param path: path to the file, or a file-like object
        :param env: environment to learn in, ``None`` for one that only predicts, or to set it later (``set_env``)
        :param device: where the policy is to live
        :param custom_objects: attributes to take from here instead of from the file
        :param print_system_info: whether to print the system's versions, and those that the file was saved with
        :param force_reset: whether learning begins with a reset of the environment
        :param kwargs: arguments to change
        :return: the model
        :raises ValueError: if the file was saved by a newer major version of this package
        """
        check_version(path)
        if kwargs.get("seed") is not None:
            kwargs = {"start_queue": None, "_random_state": None, **kwargs}
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def set_parameters(
        self,
        load_path_or_dict: str | dict[str, Any],
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        Load weights, and the optimiser's state, into this model, from a saved one or from :meth:`get_parameters`.

        :param load_path_or_dict: path of the file, or the parameters
        :param exact_match: whether all parameters of this model, and no others, have to be there
        :param device: where the policy lives
        """
        if isinstance(load_path_or_dict, dict):
            params = load_path_or_dict
        else:
            params = load_from_zip_file(load_path_or_dict, device=device, load_data=False)[1]
        before = self.kl_reference_policy, self._kl_reference_age
        if "kl_reference_policy" not in params and exact_match:  # they are of a model that had none: it is taken afresh
            self.kl_reference_policy = self._kl_reference_age = None
        if "kl_reference_policy" in params and self.kl_reference_policy is None:
            self.kl_reference_policy = self._twin_of_policy()
            self._kl_reference_age = 0
        try:
            super().set_parameters(params, exact_match, device)
        except Exception:
            self.kl_reference_policy, self._kl_reference_age = before
            raise

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_doctor"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, tensors = super()._get_torch_save_params()
        if self.kl_reference_policy is not None:
            state_dicts = [*state_dicts, "kl_reference_policy"]
        return state_dicts, tensors


@contextmanager
def _grad_mode_kept() -> Iterator[None]:
    """Leave autograd on or off as it was, also where an interrupt comes while torch switches it."""
    was_enabled = th.is_grad_enabled()
    try:
        yield
    finally:
        th.set_grad_enabled(was_enabled)


def _joined(minibatches: list[MinibatchLoss]) -> MinibatchLoss:
    """
    :param minibatches: at least one
    :return: the losses one after the other, shape ``(n_minibatches,)``, and so the entries of all transitions
    """
    return MinibatchLoss(
        *(th.stack(field) if field[0].dim() == 0 else th.cat(field) for field in zip(*minibatches, strict=True))
    )


def _check_constructor_arguments(
    policy: Any, env: Any, rollout_buffer_kwargs: Any, policy_kwargs: Any, tensorboard_log: Any, builds_policy: bool
) -> None:
    """
    What the base class would take for something else.

    :param policy: argument of the constructor, as are the following
    :param env: argument
    :param rollout_buffer_kwargs: argument
    :param policy_kwargs: argument
    :param tensorboard_log: argument
    :param builds_policy: whether the policy is to be built at once, so that an environment is needed
    :raises ValueError: if one of them is of another type, or the policy is unknown
    """
    if isinstance(policy, str):
        require_one_of("policy", policy, tuple(GRPO.policy_aliases))
    elif not (isinstance(policy, type) and issubclass(policy, ActorPolicy)):
        raise ValueError(
            f"`policy` must be {', '.join(map(repr, GRPO.policy_aliases))} or a subclass of `sb3_grpo.policies.ActorPolicy`, "
            f"not {policy!r}: SB3's own policies have a critic."
        )
    require_flag("_init_setup_model", builds_policy)
    if env is None and builds_policy:
        raise ValueError("`env` is None: pass an environment, or the name under which one is registered, as 'CartPole-v1'.")
    if not (env is None or isinstance(env, str) or isinstance(getattr(env, "observation_space", None), spaces.Space)):
        raise ValueError(
            "`env` must be a Gymnasium environment, a VecEnv, or the name under which one is registered, as 'CartPole-v1', "
            f"not {env!r}."
        )
    for name, value in (("rollout_buffer_kwargs", rollout_buffer_kwargs), ("policy_kwargs", policy_kwargs)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"`{name}` must be a dict or None, not {value!r}.")
    if tensorboard_log is not None and not isinstance(tensorboard_log, (str, pathlib.Path)):
        raise ValueError(f"`tensorboard_log` must be the path of a folder or None, not {tensorboard_log!r}.")


def _check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """
    :param observation_space: of the environment
    :param action_space: of the environment
    :raises ValueError: if GRPO has no policy for these spaces
    """
    supported = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(action_space, supported):
        raise ValueError(f"GRPO takes Box, Discrete, MultiDiscrete and MultiBinary action spaces, not {action_space}.")
    _check_start_of_discrete(action_space, "action space")
    if isinstance(action_space, spaces.Box) and not action_space.is_bounded():
        raise ValueError(
            f"The action space {action_space} has no finite bounds: give the environment a bounded one, to which actions clip."
        )
    parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    for key, part in parts.items():
        where = f" under {key!r}" if key else ""
        if not isinstance(part, supported):
            raise ValueError(
                f"GRPO takes Box, Discrete, MultiDiscrete and MultiBinary observations, and Dicts of these, not {part}{where}."
            )
        _check_start_of_discrete(part, f"observation space{where}")
        if part.shape is not None and 0 in part.shape:
            raise ValueError(f"The observation space {part}{where} is empty: there is nothing to learn from.")


def _check_start_of_discrete(space: spaces.Space, what: str) -> None:
    """
    :param space: of observations or actions
    :param what: it is of
    :raises ValueError: if it counts from another number than zero, which Stable-Baselines3's policies do not
    """
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start != 0):
        raise ValueError(
            f"The {what} {space} counts from {space.start!r}: let it count from 0, and shift the numbers in the environment."
        )


def _check_policy(log_probs: th.Tensor, num_timesteps: int) -> None:
    """
    :param log_probs: of the actions that the policy has chosen, shape ``(n_envs,)``
    :param num_timesteps: steps taken before
    :raises ValueError: if one is NaN or infinite: torch's distributions would have refused such parameters
    """
    if not math.isfinite(log_probs.sum().item()):
        raise ValueError(
            f"The output of the policy is not finite after {num_timesteps} timesteps: its actions have log-probabilities "
            f"{log_probs.tolist()}. Its weights or its features extractor give NaN or infinities for the present observations."
        )


def _check_update(policy: ActorPolicy, gradient_norms: list[th.Tensor], n_updates: int) -> None:
    """
    :param policy: after an update
    :param gradient_norms: of its minibatches
    :param n_updates: made so far
    :raises ValueError: if one of the gradients, or one of the weights, is NaN or infinite
    """
    is_finite = not gradient_norms or math.isfinite(th.stack(gradient_norms).sum().item())
    if is_finite and all(bool(th.isfinite(parameter).all()) for parameter in policy.parameters()):
        return
    what = f"weights after update {n_updates} are" if is_finite else f"gradient of update {n_updates} is"
    raise ValueError(
        f"The {what} not finite. The policy is what it was before: the model can be saved. Lower `learning_rate`, or bound "
        "observations and advantages: `VecNormalize`, `normalize_advantage`, `scale`."
    )


def _check_final_observations(dones: np.ndarray, infos: Sequence[dict[str, Any]], num_timesteps: int) -> None:
    """
    Check what the automatic reset has replaced: a baseline looks at it where a time limit ended the episode.

    :param dones: shape ``(n_envs,)``
    :param infos: of the step, one per environment
    :param num_timesteps: steps taken before
    :raises ValueError: if a final observation has an entry that is NaN or infinite, naming the environment
    """
    for env in np.flatnonzero(dones).tolist():
        final = infos[env].get("terminal_observation")
        if final is not None and infos[env].get("TimeLimit.truncated", False):
            batch = map_observations(lambda part: np.asarray(part)[None], final)
            _check_finite("final observation", batch, num_timesteps, first_env=env)


def _check_finite(what: str, values: Any, num_timesteps: int, first_env: int = 0) -> None:
    """
    :param what: is checked
    :param values: one entry per environment, an array or a dict of such
    :param num_timesteps: steps taken before
    :param first_env: index of the environment that the first entry belongs to
    :raises ValueError: if an entry is NaN or infinite, naming the environment
    """
    for key, array in values.items() if isinstance(values, dict) else [("", values)]:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            where = f" under {key!r}" if key else ""
            raise ValueError(
                f"Environment {first_env + row} returned a non-finite {what}{where} after {num_timesteps} timesteps: "
                f"{array[row]}. No update has used it: the model can be saved, and learns on with `set_env` once the "
                "environment is mended."
            )
