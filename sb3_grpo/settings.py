"""GRPO's arguments: checks, and the choice of those that were left open."""

import difflib
import inspect
import math
import numbers
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import gymnasium as gym
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo import losses, validation
from sb3_grpo.arithmetic.kl_penalty import KL_COEF_BOUNDS, KLEstimator, KLPenalty, KLReference
from sb3_grpo.buffers import BUFFERS, GroupRolloutBuffer, buffer_options
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.questions import holds

#: Arguments of GRPO by their names in other libraries
OTHER_NAMES = {
    **dict.fromkeys(("lr", "policy_lr", "lr_schedule"), "learning_rate"),
    **dict.fromkeys(("epsilon", "clip_coef", "clip_param", "eps_clip"), "clip_range"),
    **dict.fromkeys(("num_iterations", "update_epochs"), "n_epochs"),
    **dict.fromkeys(("lam", "lambda_"), "gae_lambda"),
    **dict.fromkeys(("beta", "kl_beta"), "kl_coef"),
    "num_steps": "n_steps",
    "per_device_train_batch_size": "batch_size",
    "entropy_coeff": "ent_coef",
    "num_generations": "group_size",
    "epsilon_high": "clip_range_high",
    "loss_type": "loss_aggregation",
    "kl_target": "adaptive_kl_target",
}
#: Names that GRPO does not take, and what to write instead.
ELSEWHERE = {
    **dict.fromkeys(
        ("n_env", "n_envs", "num_envs"), "pass several environments as `env`, such as `make_vec_env('CartPole-v1', n_envs=4)`."
    ),
    "total_timesteps": "the number of environment steps is an argument of `learn`, as in `learn(total_timesteps=100_000)`.",
}
#: Names that concern a value network, in PPO and other libraries
CRITIC_NAMES = re.compile(r"(^|_)(vf|vloss|value|critic)(_|$)|share_features_extractor|shared_lstm")

#: Checks of values, their limits, and the arguments that they are for. ``None`` is accepted where it is the default.
CHECKS: tuple[tuple[Callable[..., None], tuple[Any, ...], str], ...] = (
    (validation.require_schedule, (), "learning_rate clip_range clip_range_high"),
    (validation.require_at_least, (1,), "n_steps batch_size n_epochs"),
    (validation.require_at_least, (2,), "group_size"),
    (validation.require_at_least, (0,), "seed"),
    (validation.require_at_least, (-1,), "sde_sample_freq"),
    (validation.require_between, (0.0, 1.0), "gamma gae_lambda"),
    (validation.require_between, (0.0,), "kl_coef"),
    (validation.require_between, (-math.inf,), "ent_coef"),
    (validation.require_positive, (), "max_grad_norm target_kl adaptive_kl_target"),
    (validation.require_bool, (), "normalize_advantage share_starts use_sde normalize_observations"),
    (validation.require_mapping, (), "policy_kwargs rollout_buffer_kwargs"),
    (validation.require_one_of, (get_args(losses.ImportanceSamplingLevel),), "importance_sampling_level"),
    (validation.require_one_of, (get_args(losses.LossAggregation),), "loss_aggregation"),
    (validation.require_one_of, (get_args(losses.UpdateRule),), "update_rule"),
)
#: Arguments of a policy that GRPO gives it
GIVEN_TO_POLICY = {"observation_space", "action_space", "lr_schedule", "use_sde", "normalize_observations"}


@dataclass(frozen=True)
class ObjectiveOptions:
    """
    Options of the objective, with which it becomes that of a paper. ``GRPO(..., objective=dict(kl_coef=0.04))`` takes them.

    :param clip_range_high: Clipping parameter for ratios above one, a number or a function of the remaining progress (from 1
        to 0): clip-higher of DAPO. ``None`` for ``clip_range``
    :param importance_sampling_level: ``"step"``: each transition has its own importance ratio. ``"trajectory"``: all
        transitions of a trajectory have the geometric mean of their ratios (GSPO); minibatches then hold whole trajectories
    :param loss_aggregation: ``"step"``: the loss is the mean over transitions. ``"trajectory"``: all trajectories count alike
        (DeepSeekMath). ``"constant"``: sums over trajectories are divided by the time limit (Dr. GRPO)
    :param kl_coef: Coefficient of the penalty KL(pi || reference), at the beginning if ``adaptive_kl_target`` is set. The
        attribute ``kl_coef`` of the model is the current one
    :param adaptive_kl_target: Desired divergence from the reference after an update: the coefficient is doubled or halved
        after each update to reach it. ``None`` for a constant coefficient
    :param kl_reference: Reference policy. ``"old"``: the policy before the update (``"k3"`` uses the policy that
        sampled the transition). ``"initial"``: the policy at the first update. An integer: the policy of at most
        that many updates ago
    :param kl_estimator: ``"exact"``: the closed form. ``"k3"``: an estimate from the actions, see
        :func:`~sb3_grpo.losses.k3`
    :raises ValueError: If an option is out of range, or does not fit another
    """

    clip_range_high: float | Schedule | None = None
    importance_sampling_level: losses.ImportanceSamplingLevel = "step"
    loss_aggregation: losses.LossAggregation = "step"
    kl_coef: float = 0.0
    adaptive_kl_target: float | None = None
    kl_reference: KLReference = "initial"
    kl_estimator: KLEstimator = "exact"

    def __post_init__(self) -> None:
        check_values(vars(self), inspect.signature(ObjectiveOptions).parameters)
        KLPenalty(self.kl_reference, self.kl_estimator)  # which checks them
        target, (low, high) = self.adaptive_kl_target, KL_COEF_BOUNDS
        if target is not None and not low <= self.kl_coef <= high:
            raise ValueError(
                f"adaptive_kl_target={target!r} adapts `kl_coef` between {low:g} and {high:g}: start with a value in this "
                f"range, such as kl_coef=0.1, not {self.kl_coef!r}."
            )

    @classmethod
    def of(cls, objective: "ObjectiveOptions | Mapping[str, Any] | None", parameters: Iterable[str]) -> "ObjectiveOptions":
        """:return: The options of an argument of GRPO. A ``TypeError`` names one that is unknown, and knows ``parameters``"""
        if isinstance(objective, ObjectiveOptions):
            return objective
        options = {} if objective is None else objective
        validation.require_mapping("objective", options)
        accepted = inspect.signature(cls).parameters
        places = dict.fromkeys(accepted, "objective") | dict.fromkeys(parameters, "")
        _refuse_unknown("The objective", options, accepted, places)
        return cls(**options)


def refuse_arguments(arguments: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Raise a ``TypeError`` for an argument that GRPO does not take, which says what to write instead."""
    places = {name: "rollout_buffer_kwargs" for buffer_class in BUFFERS.values() for name in buffer_options(buffer_class)}
    places |= dict.fromkeys(validation.constructor_arguments(ActorPolicy), "policy_kwargs")
    places |= dict.fromkeys(inspect.signature(ObjectiveOptions).parameters, "objective") | dict.fromkeys(accepted, "")
    _refuse_unknown("GRPO", arguments, accepted, places)


def _refuse_unknown(taker: str, arguments: Mapping[str, Any], accepted: Iterable[str], places: Mapping[str, str]) -> None:
    """Raise a ``TypeError`` for an argument that is not accepted. It says what to write instead, and in which place."""
    accepted = sorted(accepted)
    for given in (each for each in arguments if each not in accepted):
        name, written = OTHER_NAMES.get(given, given), f"{OTHER_NAMES.get(given, given)}={arguments[given]!r}"
        if name in places:
            hint = f"write `GRPO(..., {f'{places[name]}=dict({written})' if places[name] else written})`."
        elif CRITIC_NAMES.search(str(name)):
            hint = "GRPO has no value network, so leave it out."
        elif given in ELSEWHERE:
            hint = ELSEWHERE[given]
        elif similar := difflib.get_close_matches(str(given), accepted, 1, 0.8):
            hint = f"did you mean `{similar[0]}`?"
        else:
            hint = f"it takes {', '.join(each for each in accepted if each[0] != '_')}."
        raise TypeError(f"{taker} does not take `{given}={arguments[given]!r}`: {hint}")


def check_policy_class(policy: Any, aliases: Mapping[str, type]) -> None:
    """
    Raise a ``ValueError`` if the argument is no policy of the algorithm.

    :param policy: Argument of the user
    :param aliases: Policies by their short names, with those that a subclass of the algorithm adds
    """
    if isinstance(policy, (gym.Env, VecEnv)):
        raise ValueError("The first argument is the policy and the second the environment: GRPO('MlpPolicy', env).")
    base = min(aliases.values(), key=lambda policy_class: len(policy_class.__mro__))
    if not (isinstance(policy, type) and issubclass(policy, base)) and policy not in aliases:
        raise ValueError(
            f"`policy` must be {', '.join(map(repr, aliases))} or a subclass of `{base.__module__}.{base.__name__}`, not "
            f"{policy!r}: SB3's own policies have a critic."
        )


def check_values(values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise a ``ValueError`` if one of the values of these parameters is out of range."""
    for check, limits, names in CHECKS:
        for name in parameters.keys() & names.split():
            if values[name] is not None or parameters[name].default is not None:
                check(name, values[name], *limits)


def check_options(settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], standardises: bool) -> None:
    """Raise an error if the policy or the buffer does not take an argument, among them ``normalize_observations``."""
    policy_class, buffer_class = settings["policy_class"], settings["rollout_buffer_class"]
    of_policy = validation.constructor_arguments(policy_class)
    places = dict.fromkeys(parameters, "")
    if not validation.takes_any(policy_class):
        _refuse_unknown(policy_class.__name__, settings["policy_kwargs"], of_policy - GIVEN_TO_POLICY, places)
    _refuse_unknown(buffer_class.__name__, settings["rollout_buffer_kwargs"], buffer_options(buffer_class), places)
    if standardises and "normalize_observations" not in of_policy:
        raise ValueError(
            f"`{policy_class.__name__}` takes no `normalize_observations`, so it cannot standardise observations: let its "
            "`__init__` accept the argument and pass it to `super().__init__`, or pass normalize_observations=False to GRPO."
        )


#: Arguments that shape what is built once, and what to do instead of assigning them later.
BUILT_ONCE = {
    **dict.fromkeys(
        ("n_steps", "objective", "rollout_buffer_class", "rollout_buffer_kwargs", "device"),
        "pass it to GRPO, or to `GRPO.load(path, env=env, ...)`",
    ),
    **dict.fromkeys(
        ("use_sde", "normalize_observations", "policy_kwargs"), "pass it to a new GRPO, and copy the weights with `load_actor`"
    ),
    "seed": "call `set_random_seed`",
}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """:return: Names of the arguments that were assigned since. A ``ValueError`` names one that has no effect any more"""
    assigned = [name for name in now if name not in before or now[name] is not before[name]]
    changed = {name for name in assigned if name not in before or now[name] != before[name]} - {"env", "policy"}
    for name in sorted(BUILT_ONCE.keys() & changed):
        raise ValueError(
            f"`{name}` was changed to {now[name]!r} after the model was built, which has no effect: {BUILT_ONCE[name]}."
        )
    return changed


def describe_settings(
    buffer: GroupRolloutBuffer, group_size: int, shares_starts: bool, update_rule: str, normalizers: Mapping[str, bool]
) -> str:
    """:return: The settings that depend on each other or on the environment, for the printed log"""
    names = {buffer_class: name for name, buffer_class in BUFFERS.items()}
    used = " and by ".join(name for name, is_used in normalizers.items() if is_used)
    return (
        f"Using the {names.get(type(buffer), type(buffer).__name__)} buffer, groups of {group_size} "
        f"({'shared' if shares_starts else 'independent'} starts), rollouts of {buffer.buffer_size * buffer.n_envs} "
        f"transitions, {update_rule} updates, observations {f'normalised by {used}' if used else 'not normalised'}"
    )


#: Arguments of GRPO, and of the policy, that only clipped updates use
CLIPPED_ONLY = ("learning_rate", "batch_size", "n_epochs", "clip_range", "max_grad_norm")
OPTIMIZER_OPTIONS = {"optimizer_class", "optimizer_kwargs", "lr_follows_std"}


def chosen_update_rule(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], is_continuous: bool, has_boards: bool
) -> losses.UpdateRule:
    """:return: The update rule for a buffer and spaces; ``"clipped"`` with gSDE or an argument that only that one uses"""
    objective: ObjectiveOptions = settings["objective"]
    is_default = all(settings[name] == defaults[name] for name in CLIPPED_ONLY)
    is_default &= objective.clip_range_high is None and objective.importance_sampling_level == "step"
    if not is_default or OPTIMIZER_OPTIONS & set(settings["policy_kwargs"]) or settings["use_sde"]:
        return "clipped"
    return settings["rollout_buffer_class"].update_rule(is_continuous, has_boards)


def warn_of_idle_arguments(settings: Mapping[str, Any], changed: Iterable[str]) -> None:
    """Warn of arguments that were changed after the model was made, and that its update rule does not use."""
    idle = sorted(set(changed) & {*CLIPPED_ONLY, "lr_schedule", "optimizer"})
    if settings["update_rule"] == "natural" and idle:
        warnings.warn(
            f"{', '.join(idle)} changed, and natural-gradient steps do not use {'it' if len(idle) == 1 else 'them'}. "
            "`target_kl` sets the size of a step, and no `learning_rate`; for PPO's update, make a model with "
            "update_rule='clipped'.",
            stacklevel=3,
        )


def chosen_n_epochs(has_images: bool) -> int:
    """:return: Number of passes over an update. With images or boards, ten take twice the time of four, and move it too far"""
    return 4 if has_images else 10


#: Smallest number of steps per environment and rollout that GRPO chooses
MIN_STEPS = 16


def chosen_n_steps(rollout_size: int, n_envs: int, batch_size: int) -> tuple[int, str]:
    """
    :return: Number of steps per environment for a rollout of about ``rollout_size`` transitions, or of a minibatch if that is
        larger, and at least :data:`MIN_STEPS`. Minibatches are full, unless this would take a longer rollout. And a sentence
        if rollouts are longer than desired, because each environment takes :data:`MIN_STEPS`; else empty
    """
    n_steps = max(max(rollout_size, batch_size) // n_envs, MIN_STEPS)
    multiple = batch_size // math.gcd(batch_size, n_envs)
    n_steps = max(n_steps // multiple * multiple, min(n_steps, multiple))
    if n_steps > MIN_STEPS or n_steps * n_envs <= rollout_size:
        return n_steps, ""
    return n_steps, (
        f"Each of the {n_envs} environments takes {n_steps} steps per rollout, so a rollout has {n_steps * n_envs} "
        f"transitions instead of about {rollout_size}: shorter rollouts learn badly. Pass `n_steps` for another length."
    )


def check_rollout(n_steps: int, n_envs: int, batch_size: int, normalize_advantage: bool) -> None:
    """Warn of minibatches that are not full, and raise a ``ValueError`` if a rollout is too small to be normalised."""
    rollout_size = n_steps * n_envs
    if rollout_size == 1 and normalize_advantage:
        raise ValueError(
            "n_steps=1 with 1 environment gives rollouts of one transition, whose advantage cannot be normalised: pass a "
            "larger `n_steps`, or normalize_advantage=False."
        )
    if rollout_size > batch_size and rollout_size % batch_size > 0:
        warnings.warn(
            f"batch_size={batch_size} does not divide the rollout of n_steps * n_envs = {n_steps} * {n_envs} = {rollout_size} "
            f"transitions: there will be a truncated mini-batch of size {rollout_size % batch_size} in each epoch. Choose "
            "`batch_size` as a divisor of the rollout.",
            stacklevel=4,
        )


def time_limit(env: VecEnv | None) -> int | None:
    """:return: The time limit in steps, the largest if environments have several; ``None`` if it is unknown"""
    # The attribute of Gymnasium's TimeLimit. The `spec` has it too, but not every worker process can send a spec.

    def has_limit(single: gym.Env) -> bool:
        return isinstance(single.get_wrapper_attr("_max_episode_steps"), numbers.Real)

    try:
        if env is None or holds(env, has_limit) is False:
            return None
        limits = list(env.get_attr("_max_episode_steps")) if env.has_attr("_max_episode_steps") else []
    except Exception:  # the methods of a simulator may do anything
        return None
    is_known = all(isinstance(limit, numbers.Real) and float(limit).is_integer() and float(limit) > 0 for limit in limits)
    return int(max(limits)) if is_known and limits else None
