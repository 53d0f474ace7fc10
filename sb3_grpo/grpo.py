"""The algorithm: Group Relative Policy Optimization on Stable-Baselines3's ``OnPolicyAlgorithm``."""

import inspect
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.patch_gym import _patch_env

from sb3_grpo import losses, settings
from sb3_grpo.arithmetic import update
from sb3_grpo.arithmetic.averaging import WeightAverage
from sb3_grpo.arithmetic.choice import describe_choice, share_memory
from sb3_grpo.arithmetic.kl_penalty import KLPenalty, adapted_kl_coef
from sb3_grpo.arithmetic.metrics import describe_update
from sb3_grpo.arithmetic.natural import default_lambda, default_limit
from sb3_grpo.arithmetic.objective import ClipRange, Objective
from sb3_grpo.buffers import DEFAULT_GROUP_SIZE, GroupRolloutBuffer, resolve_buffer_class
from sb3_grpo.collection import collect, prepare_starts
from sb3_grpo.gymnasium_vector import wrap_vector_env
from sb3_grpo.normalization import normalized_parts
from sb3_grpo.observations import has_boards, has_images
from sb3_grpo.persistence import PersistentAlgorithm, set_random_state
from sb3_grpo.policies import ActorPolicy, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_grpo.settings import ObjectiveOptions
from sb3_grpo.starts import SeededVecEnv
from sb3_grpo.validation import check_environment

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")


class GRPO(PersistentAlgorithm):
    """
    Group Relative Policy Optimization (GRPO): PPO's clipped surrogate, or TRPO's step, without a critic.

    Advantages come from the rollout buffer. The default, ``kernel``, is not DeepSeek's estimator: it computes generalized
    advantage estimates with a value function that is fitted by least squares after each rollout, and subtracts a part
    of the mean advantage of the group's other members at the same step. ``outcome`` is DeepSeek's estimator, and three
    others come from the literature. A *group* is ``group_size`` trajectories whose environments were reset with the same seed.

    Paper: https://arxiv.org/abs/2402.03300 (DeepSeekMath)

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``, or an :class:`~sb3_grpo.policies.ActorPolicy`
    :type policy: str | type[ActorPolicy]
    :param env: Environment to learn from, or its Gymnasium id
    :param learning_rate: Learning rate, a number or a function of the remaining progress (from 1 to 0)
    :param n_steps: Number of steps per environment and rollout. ``None`` for about 1024 transitions in all with clipped
        updates of ``"kernel"``, and 2048 otherwise, at least ``batch_size``, and a multiple of it if possible
    :param batch_size: Minibatch size
    :param n_epochs: Number of passes over the transitions of an update. ``None`` for 4 with images or boards, and 10 otherwise
    :param gamma: Discount factor
    :param gae_lambda: Lambda of generalized advantage estimation, and of the targets of the kernel baseline. ``None`` for
        0.98 with clipped updates, for 0.95 with natural ones where actions are not continuous, and where they are for 0.9 at
        first, rising in long runs, see :func:`~sb3_grpo.arithmetic.natural.default_lambda`. Buffers that compare whole
        trajectories do not use it
    :param clip_range: Clipping parameter, a number or a function of the remaining progress (from 1 to 0)
    :param normalize_advantage: Whether to standardise the advantages of a rollout. Buffers that compare within groups have
        their own ``scale`` instead
    :param ent_coef: Coefficient of the entropy bonus
    :param max_grad_norm: Maximum norm of the gradient
    :param group_size: Number of trajectories per group, at least 2. ``None`` for 2; with the ``kernel`` buffer and shared
        starts, for 4 while the members of a group share more than a third of the variance of their advantages
    :param share_starts: Whether the members of a group start from the same initial state. If not, environments are reset
        without a seed, and a group consists of trajectories that started one after the other
    :param objective: Options of the objective, which make it that of a paper: the keyword arguments of
        :class:`~sb3_grpo.ObjectiveOptions`, such as ``dict(kl_coef=0.04, loss_aggregation="trajectory")``
    :param use_sde: Whether to explore with state-dependent noise (gSDE, https://arxiv.org/abs/2005.05719)
    :param sde_sample_freq: Number of steps between two noise samples of gSDE; -1 for one sample per rollout
    :param rollout_buffer_class: ``"kernel"``, ``"outcome"``, ``"process"``, ``"return_to_go"``, ``"stepwise"``, or a subclass
        of :class:`~sb3_grpo.buffers.GroupRolloutBuffer`
    :param rollout_buffer_kwargs: Keyword arguments of the rollout buffer
    :param update_rule: ``"clipped"``: gradient steps with minibatches of a clipped surrogate, as in PPO. ``"natural"``: one
        natural-gradient step inside a trust region with all transitions of the update, as in TRPO. It does not use
        ``learning_rate``, ``batch_size``, ``n_epochs``, ``clip_range``, ``clip_range_high`` and ``max_grad_norm``. ``None``:
        ``"natural"`` for continuous actions and for boards with ``"kernel"``, unless there is gSDE, or one of these arguments
        or ``importance_sampling_level`` has another value than by default, else ``"clipped"``
    :param target_kl: Limit of the KL divergence of an update. ``"clipped"``: an update stops once the approximate divergence
        of a minibatch exceeds 1.5 times this value; ``None`` ends it after the first epoch whose mean divergence exceeds 0.05,
        and moves the weights back until it does not; ``math.inf`` for no limit. ``"natural"``: the size of the trust region, a
        mean over the components of an action as in sb3-contrib's TRPO, smaller where advantages have become tiny; ``None`` for
        0.02 at first, falling in long runs, see :func:`~sb3_grpo.arithmetic.natural.default_limit`
    :param normalize_observations: Whether the policy standardises vectors of floating point numbers and large images, see
        :class:`~sb3_grpo.normalization.ObservationNormalizer`. ``None`` for True, unless the policy has a features extractor
        that is neither SB3's nor this package's
    :param stats_window_size: Number of episodes over which the logged return, length and success rate are averaged
    :param tensorboard_log: Folder for TensorBoard logs; ``None`` for no logs
    :param policy_kwargs: Keyword arguments of the policy
    :param verbose: Verbosity level: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: Seed of the random generators and of the environments' starts
    :param device: Device of the policy: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    :param _init_setup_model: Whether to build the policy and the buffer at once
    :param unknown: Not accepted; the ``TypeError`` names the argument to use instead
    :raises ValueError: If an argument is out of range, or does not fit the environment
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    supported_action_spaces: ClassVar[Any] = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    _uses_masks = False  # whether the environments are asked for action masks, see `MaskableGRPO`
    _own_defaults: ClassVar[dict[str, Any]] = {}  # of arguments whose default is another than that of GRPO

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int | None = None,
        batch_size: int = 64,
        n_epochs: int | None = None,
        gamma: float = 0.99,
        gae_lambda: float | None = None,
        clip_range: float | Schedule = 0.2,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        max_grad_norm: float = 0.5,
        group_size: int | None = None,
        share_starts: bool = True,
        objective: dict[str, Any] | ObjectiveOptions | None = None,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: str | type[GroupRolloutBuffer] | None = "kernel",
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        update_rule: losses.UpdateRule | None = None,
        target_kl: float | None = None,
        normalize_observations: bool | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        **unknown: Any,
    ):
        settings.refuse_arguments(unknown, [name for name in GRPO.__init__.__annotations__ if name != "unknown"])
        settings.check_policy_class(policy, self.policy_aliases)
        if env is None and _init_setup_model:
            raise ValueError("`env` is None: pass an environment or its Gymnasium id, such as 'CartPole-v1'.")
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            n_steps=n_steps,  # type: ignore[arg-type]
            gamma=gamma,
            gae_lambda=gae_lambda,  # type: ignore[arg-type]
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
            supported_action_spaces=self.supported_action_spaces,
            _init_setup_model=False,
        )
        del self.vf_coef
        self._chooses_n_steps = n_steps is None  # for the environments and the buffer; again when a model is loaded
        self._chooses_gae_lambda = gae_lambda is None
        self.batch_size = batch_size
        self.n_epochs: int = n_epochs  # type: ignore[assignment]  # chosen for the observations if it is None
        self.clip_range = clip_range
        self.normalize_advantage = normalize_advantage
        self.group_size = group_size
        self.share_starts = share_starts
        self.objective: ObjectiveOptions = objective  # type: ignore[assignment]
        #: Coefficient of the KL penalty, which changes during training if it is adaptive
        self.kl_coef: float = None  # type: ignore[assignment]  # that of the objective
        self.update_rule: losses.UpdateRule = update_rule  # type: ignore[assignment]  # chosen for the spaces if it is None
        self.target_kl = target_kl
        self.normalize_observations: bool = normalize_observations  # type: ignore[assignment]  # chosen if it is None

        #: Metrics of the last update; empty if the last rollout led to no update.
        self.update_metrics: dict[str, float] = {}
        self._seeded_env: SeededVecEnv | None = None  # through which the environments are reset and stepped
        self._settings: dict[str, Any] = {}  # the arguments as they were last taken up, by name
        self._printed_settings = ""  # the settings of the run as they were last printed
        self._learned_from_normalized = False  # whether a VecNormalize normalised what the model learned from last
        self._last_states = np.zeros((0, 0), np.float32)  # of the policy's memory, after the last step
        self._has_learned: bool | None = None  # whether `learn` had something to learn from; None before a rollout

        if _init_setup_model:
            self._setup_model()

    # --- setup --------------------------------------------------------------------------------------------------------

    @classmethod
    def _wrap_env(cls, env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if isinstance(env, VectorEnv):
            env = wrap_vector_env(env)
        elif not isinstance(env, (VecEnv, type)) and hasattr(env, "action_space"):
            env = _patch_env(env)  # one of OpenAI's Gym
        check_environment(env, cls._uses_masks)
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _setup_model(self) -> None:
        self.rollout_buffer_class = resolve_buffer_class(self.rollout_buffer_class)  # type: ignore[assignment, arg-type]
        self.rollout_buffer_kwargs = self.rollout_buffer_kwargs or {}
        self.policy_kwargs = self.policy_kwargs or {}
        buffer_class: type[GroupRolloutBuffer] = self.rollout_buffer_class  # type: ignore[assignment]
        parameters = inspect.signature(GRPO.__init__).parameters
        self.objective = ObjectiveOptions.of(self.objective, parameters)
        self.kl_coef = self.objective.kl_coef if self.kl_coef is None else self.kl_coef
        is_continuous = isinstance(self.action_space, spaces.Box)
        kinds = is_continuous, has_boards(self.observation_space)
        standard = {**{name: each.default for name, each in parameters.items()}, **self._own_defaults}
        self.update_rule = self.update_rule or settings.chosen_update_rule(self._named_settings(), standard, *kinds)
        settings.check_values(self._named_settings(), parameters)
        if self.normalize_observations is None:
            policy_class: type[ActorPolicy] = self.policy_class
            self.normalize_observations = not policy_class.has_own_extractor(self.observation_space, self.policy_kwargs)
        settings.check_options(self._named_settings(), parameters, self._standardises())
        defaults = buffer_class.defaults(self.update_rule, is_continuous)
        self.gae_lambda = defaults.gae_lambda if self.gae_lambda is None else self.gae_lambda
        self._late_gae_lambda = defaults.late_gae_lambda  # where it is chosen
        if self.n_epochs is None:
            self.n_epochs = settings.chosen_n_epochs(has_images(self.observation_space))
        if self.seed is not None:
            self.seed = int(self.seed)  # Python's random generator does not accept integers of numpy
        if self._chooses_n_steps:
            self.n_steps, notice = settings.chosen_n_steps(defaults.rollout_size, self.n_envs, self.batch_size)
            if notice and self.verbose >= 1:
                print(notice)
        elif buffer_class.update_size(self.n_steps * self.n_envs) is not None:
            batch_size = self.batch_size if self.update_rule == "clipped" else 1
            settings.check_rollout(self.n_steps, self.n_envs, batch_size, self.normalize_advantage)
        self.clip_range = FloatSchedule(self.clip_range)

        saved_ledger = self.ledger
        self.ledger = None  # type: ignore[assignment]  # SB3 makes one, if there is a seed
        user_kwargs = self.rollout_buffer_kwargs, self.policy_kwargs
        by_default = {"group_size": self.group_size or DEFAULT_GROUP_SIZE, "horizon": settings.time_limit(self.env)}
        self.rollout_buffer_kwargs = {**by_default, **defaults.arguments, **user_kwargs[0]}
        self.policy_kwargs = self._policy_arguments()
        try:
            super()._setup_model()
        finally:
            self.rollout_buffer_kwargs, self.policy_kwargs = user_kwargs
        share_memory(self.policy)
        if self.policy.state_size > 0:
            self.rollout_buffer.keep("states", self.policy.state_size)
        self.kl_penalty = KLPenalty(self.objective.kl_reference, self.objective.kl_estimator)
        self.weight_average = WeightAverage()
        self._continue_run(saved_ledger)
        self._settings = self._current_settings()

    def _named_settings(self) -> dict[str, Any]:
        """:return: All attributes by name, among them the arguments of the constructor that a subclass has as properties"""
        computed = [name for name in inspect.signature(GRPO.__init__).parameters if hasattr(type(self), name)]
        return {**vars(self), **{name: getattr(self, name) for name in computed}}

    def _current_settings(self) -> dict[str, Any]:
        """:return: The arguments of the constructor that are attributes, and what was made of some, by name"""
        values = self._named_settings()
        arguments = {name: values[name] for name in inspect.signature(GRPO.__init__).parameters if name in values}
        return {**arguments, "lr_schedule": self.lr_schedule, "optimizer": self.policy.optimizer}

    def _take_up_changes(self) -> None:
        """Put attributes to use that were assigned after construction, or raise a ``ValueError`` about them."""
        changed = settings.changed_settings(self._settings, self._current_settings())
        if not changed:
            return
        settings.check_values(self._named_settings(), inspect.signature(GRPO.__init__).parameters)
        settings.warn_of_idle_arguments(self._named_settings(), changed)
        if "learning_rate" in changed:
            self._setup_lr_schedule()
        self.clip_range = FloatSchedule(self.clip_range)
        self._chooses_gae_lambda = self._chooses_gae_lambda and "gae_lambda" not in changed
        for name in changed & {"gamma", "gae_lambda"}:
            setattr(self.rollout_buffer, name, getattr(self, name))
        if "group_size" in changed:
            self.ledger.group_size = self.rollout_buffer.group_size = self.group_size or DEFAULT_GROUP_SIZE
        self._settings = self._current_settings()

    def _policy_recipe(self) -> Callable[[], ActorPolicy]:
        """:return: A function that makes a policy like the one that is trained, and that can be sent to a worker"""
        spaces_and_rate = self.observation_space, self.action_space, self.policy._dummy_schedule
        return partial(self.policy_class, *spaces_and_rate, use_sde=self.use_sde, **self._policy_arguments())  # type: ignore[return-value]

    def _standardises(self) -> bool:
        normalize_images = self.policy_kwargs.get("normalize_images", True)
        return self.normalize_observations and bool(normalized_parts(self.observation_space, normalize_images))

    def _policy_arguments(self) -> dict[str, Any]:
        # Policies of users need not know the argument as long as there is nothing to standardise.
        return {**self.policy_kwargs, **(dict(normalize_observations=True) if self._standardises() else {})}

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def set_random_seed(self, seed: int | None = None) -> None:
        super().set_random_seed(seed)
        if seed is not None:
            self.ledger = self._new_ledger(seed)
            self._random_state = None
            self._last_obs = None  # trajectories in progress belong to the previous ledger

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(
        self: SelfGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfGRPO:
        if self.env is None:
            raise ValueError(
                "The model has no environment to learn in: pass one to `load`, as GRPO.load(path, env=env), or call `set_env`."
            )
        if self._random_state is not None:  # of a saved model
            if reset_num_timesteps:
                self.ledger = self._new_ledger(self.seed)
            else:
                set_random_state(self._random_state)
            self._random_state = None
        is_grad_enabled = th.is_grad_enabled()
        self._has_learned = None
        n_before = 0 if reset_num_timesteps else self.num_timesteps
        try:
            super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
        finally:  # an interrupt that comes while torch leaves `no_grad` would leave autograd switched off in the whole process
            th.set_grad_enabled(is_grad_enabled)
            self.weight_average.show(self.policy)
        if self._has_learned is False:
            obstacle = self.rollout_buffer.obstacle()
            warnings.warn(f"Nothing was learned in {self.num_timesteps - n_before} timesteps. {obstacle}", stacklevel=2)
        return self

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        assert self.env is not None
        self._take_up_changes()
        self.weight_average.resume(self.policy)
        starts, set_up = self._starts(self.env), super()._setup_learn
        result: list[Any] = []

        def reset() -> Any:
            result[:] = set_up(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
            return self._last_obs

        if starts.was_reset:
            self._last_obs = None  # for example in an evaluation on the training environment
        if reset_num_timesteps or self._last_obs is None:
            self._begin_episodes(starts, reset)
        else:
            reset()
        if "horizon" not in self.rollout_buffer_kwargs:  # the environment may have been replaced
            self.rollout_buffer.horizon = settings.time_limit(self.env)
        vec_normalize, before = self.get_vec_normalize_env(), self._learned_from_normalized
        self._learned_from_normalized = vec_normalize is not None and vec_normalize.norm_obs
        if before and not self._learned_from_normalized:
            warnings.warn(
                "The policy has learned from observations normalised by VecNormalize, and these environments have none. Wrap "
                "them as before: `VecNormalize.load(path, venv)` takes the statistics from the file of "
                "`VecNormalize.save(path)`.",
                stacklevel=2,
            )
        buffer, rule = self.rollout_buffer, self.update_rule
        normalizers = {"VecNormalize": self._learned_from_normalized, "the policy": self.policy.normalizer is not None}
        described = settings.describe_settings(buffer, self.ledger.group_size, starts.share_starts, rule, normalizers)
        # What is not compiled yet is compiled here, and is no part of the speed in the log.
        began = time.time_ns()
        described += "\n" + describe_choice(self.policy, self._objective(), buffer, rule, self.verbose)
        self.start_time += time.time_ns() - began
        if self.verbose >= 1 and self._printed_settings != described:
            self._printed_settings = described
            print(described)
        return tuple(result)

    def _starts(self, env: VecEnv) -> SeededVecEnv:
        """:return: The layer through which the training environment is reset and stepped"""
        layer = self._seeded_env
        if layer is None or layer.env is not env or layer.wants_shared_starts != self.share_starts:
            layer = self._seeded_env = SeededVecEnv(env, self.ledger, self.share_starts)
        layer.ledger, layer.num_timesteps = self.ledger, self.num_timesteps
        return layer

    def _begin_episodes(self, starts: SeededVecEnv, reset: Callable[[], Any]) -> None:
        """Reset all environments with a function that resets them once, and returns their observations."""
        self._last_obs = None
        self.rollout_buffer.forget_trajectories()
        self._last_obs = starts.begin(reset)
        self._last_states = np.zeros((starts.env.num_envs, self.policy.state_size), np.float32)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: GroupRolloutBuffer,  # type: ignore[override]
        n_rollout_steps: int,
    ) -> bool:
        """
        Collect ``n_rollout_steps`` steps of each environment, and form the update.

        :return: False if the callback asked to stop; the last step is kept
        :raises ValueError: If the buffer has another number of steps
        """
        self._take_up_changes()
        if n_rollout_steps != rollout_buffer.buffer_size:
            raise ValueError(
                f"n_rollout_steps={n_rollout_steps} does not fill a rollout buffer of {rollout_buffer.buffer_size} steps: "
                "collect as many, or make a model with another `n_steps`."
            )
        if self._chooses_gae_lambda and self._late_gae_lambda is not None:
            rollout_buffer.gae_lambda = default_lambda(self.gae_lambda, self._late_gae_lambda, self.num_timesteps)
        starts = self._starts(env)
        try:
            if starts.was_reset or self._last_obs is None:
                self._begin_episodes(starts, env.reset)
            last_obs = collect(self, callback, rollout_buffer, n_rollout_steps, starts)
            if last_obs is None:
                return False
            if self.policy.normalizer is not None and self.policy.normalizer.observe(rollout_buffer.observations):
                rollout_buffer.policy_changed(self.policy)
            open_groups, aggregation = starts.ledger.open_groups(), self.objective.loss_aggregation
            rollout_buffer.finish_rollout(last_obs, self.policy, open_groups, self.normalize_advantage, aggregation)
        except BaseException as error:
            # The environments may have moved on, and trajectories in progress have lost their beginnings.
            self._last_obs = None
            if isinstance(error.__cause__, StopIteration):  # of an environment; Python renames it within a generator
                raise error.__cause__ from None
            raise
        finally:
            starts.release()
        if starts.share_starts and not self.use_sde:  # whose noise may be one for the whole rollout
            starts.note_copies(rollout_buffer, isinstance(self.action_space, spaces.Box))
        start_metrics = prepare_starts(starts, rollout_buffer, self.group_size is None)
        self._log("rollout/", {**rollout_buffer.metrics, **start_metrics})

        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    # --- updating -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Update the policy with the transitions in the rollout buffer. Without any, the weights stay as they are."""
        self._take_up_changes()  # which a callback may have made at the end of the rollout
        self._update_learning_rate(self.policy.optimizer)
        self.update_metrics = {}
        self._has_learned = self._has_learned or self.rollout_buffer.has_differences
        if self.rollout_buffer.n_samples > 0:
            self.weight_average.resume(self.policy)  # a callback may have changed the weights
            self._update()
            if self.update_rule == "natural":
                self.weight_average.add(self.policy)
        if self.policy.normalizer is not None:
            self.policy.normalizer.renew()

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        self.policy.set_learning_rate(self.lr_schedule(self._current_progress_remaining))
        self.logger.record("train/learning_rate", self.policy.optimizer.param_groups[0]["lr"])

    def _update(self) -> None:
        self.policy.set_training_mode(True)
        objective = self._objective()
        with update.rolled_back_on_error(self.policy, self.kl_penalty), update.UncheckedDistributions():
            if self.kl_coef > 0:
                self.kl_penalty.renew(self.policy)
            if self.update_rule == "natural":
                limit = (self.target_kl or default_limit(self.num_timesteps)) * self.rollout_buffer.limit_factor
                try:
                    report = update.natural_update(objective, self.policy, self.rollout_buffer, limit)
                except NotImplementedError as error:
                    warnings.warn(f"{error}, which natural steps need: updates are clipped from now on.", stacklevel=2)
                    self.update_rule = "clipped"
                    self._settings = self._current_settings()
            if self.update_rule == "clipped":
                report = update.clipped_update(
                    objective, self.policy, self.rollout_buffer, self.n_epochs, self.batch_size, self.target_kl
                )
            update.check_update(self.policy, report.epochs)
            metrics = describe_update(report)
            if self.objective.adaptive_kl_target is not None:
                kl = self.kl_penalty.mean(self.policy, self.rollout_buffer.get(self.policy.encoding_batch()))
                metrics["train/kl_to_reference"] = kl
                self.kl_coef = adapted_kl_coef(self.kl_coef, kl, self.objective.adaptive_kl_target)
        if report.excessive_kl is not None and self.verbose >= 1:
            print(f"Early stopping at epoch {len(report.epochs) - 1} due to reaching max kl: {report.excessive_kl:.2f}")
        self._n_updates += len(report.epochs)
        self.update_metrics = metrics
        self._log("train/", {**self.rollout_buffer.metrics, **metrics})
        if self.objective.adaptive_kl_target is not None:
            self.logger.record("train/kl_coef", self.kl_coef)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if report.natural is None:
            self.logger.record("train/clip_range", objective.clip_range.low)
            if self.objective.clip_range_high is not None:
                self.logger.record("train/clip_range_high", objective.clip_range.high)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        As :meth:`ActorPolicy.predict <sb3_grpo.ActorPolicy.predict>`, which explains the arguments. Also during training, for
        example in an ``EvalCallback``, the policy acts with its :class:`~sb3_grpo.arithmetic.averaging.WeightAverage`.
        """
        with self.weight_average.shown(self.policy):
            return super().predict(observation, state, episode_start, deterministic)

    def _log(self, prefix: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith(prefix):
                self.logger.record(name, value)

    def _objective(self) -> Objective:
        options, low = self.objective, self.clip_range
        high = low if options.clip_range_high is None else FloatSchedule(options.clip_range_high)
        clip_range = ClipRange(*(schedule(self._current_progress_remaining) for schedule in (low, high)))  # type: ignore[operator]
        level = options.importance_sampling_level
        return Objective(clip_range, level, self.ent_coef, self.kl_coef, self.kl_penalty, self.max_grad_norm)

    def _excluded_save_params(self) -> list[str]:
        own = [
            "kl_penalty",
            "weight_average",
            "_random_state",
            "_printed_settings",
            "_seeded_env",
            "_settings",
            "_last_states",
        ]
        return [*super()._excluded_save_params(), *own]
