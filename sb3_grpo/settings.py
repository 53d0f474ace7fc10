"""GRPO's arguments: checks, and the choice of those that were left open."""

import inspect
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo import losses
from sb3_grpo.buffers import BUFFERS, GroupRolloutBuffer, buffer_options, check_buffer_arguments
from sb3_grpo.kl_penalty import KL_COEF_BOUNDS
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.validation import (
    constructor_arguments,
    refuse_unknown_arguments,
    require_at_least,
    require_between,
    require_bool,
    require_mapping,
    require_one_of,
    require_positive,
    require_schedule,
)

#: Arguments that are one of several words.
CHOICES = {
    "importance_sampling_level": losses.ImportanceSamplingLevel,
    "loss_aggregation": losses.LossAggregation,
    "update_rule": losses.UpdateRule,
}
NO_CRITIC = "GRPO has no value network, so leave it out"
#: Arguments of PPO and other libraries that concern a value network.
OF_A_CRITIC = re.compile(r"(^|_)(vf|vloss|value|critic)(_|$)|share_features_extractor")
#: Arguments of GRPO, and their names in other libraries.
OTHER_NAMES = {
    "learning_rate": ("lr", "policy_lr", "lr_schedule"),
    "n_steps": ("num_steps",),
    "batch_size": ("per_device_train_batch_size",),
    "n_epochs": ("num_iterations", "update_epochs"),
    "gae_lambda": ("lam", "lambda_"),
    "clip_range": ("epsilon", "clip_coef", "clip_param", "eps_clip"),
    "clip_range_high": ("epsilon_high",),
    "loss_aggregation": ("loss_type",),
    "ent_coef": ("entropy_coeff",),
    "group_size": ("num_generations",),
    "kl_coef": ("beta", "kl_beta"),
    "adaptive_kl_target": ("kl_target",),
}
#: Arguments that GRPO does not have, and what to write instead.
ELSEWHERE = {
    **{other: f"here it is `{name}`" for name, others in OTHER_NAMES.items() for other in others},
    **dict.fromkeys(
        ("n_env", "n_envs", "num_envs"),
        "pass several environments as `env`, such as `make_vec_env('CartPole-v1', n_envs=4)`",
    ),
    "total_timesteps": "the number of environment steps is an argument of `learn`, as in `learn(total_timesteps=100_000)`",
}

#: Policy arguments that GRPO sets, and their names in GRPO
SET_BY_GRPO = {
    "normalize_observations": "normalize_observations",
    "use_sde": "use_sde",
    "lr_schedule": "learning_rate",
}


def refuse_arguments(unknown: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """Raise a ``TypeError`` for arguments that GRPO does not take, which says what to write instead."""
    if not unknown:
        return
    places = {name: "rollout_buffer_kwargs" for buffer_class in BUFFERS.values() for name in buffer_options(buffer_class)}
    places |= dict.fromkeys(constructor_arguments(ActorPolicy), "policy_kwargs")
    hints = {name: f"write `{place}=dict({name}=...)`" for name, place in places.items()} | ELSEWHERE
    refuse_unknown_arguments(unknown, accepted, "GRPO", hints | _critic_hints(unknown))


def _critic_hints(names: Iterable[str]) -> dict[str, str]:
    return {name: NO_CRITIC for name in names if OF_A_CRITIC.search(name)}


def check_policy_class(policy: Any, aliases: Iterable[str]) -> None:
    """Raise a ``ValueError`` if the argument is neither the short name of a policy nor an actor-only policy."""
    if isinstance(policy, (gym.Env, VecEnv)):
        raise ValueError("The first argument is the policy and the second the environment: GRPO('MlpPolicy', env).")
    if isinstance(policy, str):
        require_one_of("policy", policy, aliases)
    elif not (isinstance(policy, type) and issubclass(policy, ActorPolicy)):
        raise ValueError(
            f"`policy` must be {', '.join(map(repr, aliases))} or a subclass of `sb3_grpo.ActorPolicy`, not {policy!r}: SB3's "
            "own policies have a critic."
        )


def check_settings(settings: Mapping[str, Any], chooses_n_steps: bool) -> None:
    """
    :param settings: GRPO's arguments by name, with the class of the buffer
    :param chooses_n_steps: Whether the number of steps is chosen by GRPO
    :raises ValueError: If one of them is out of range, or does not fit another
    """
    for name in ("learning_rate", "clip_range", "clip_range_high"):
        if settings[name] is not None or name != "clip_range_high":
            require_schedule(name, settings[name])
    require_mapping("policy_kwargs", settings["policy_kwargs"])
    require_at_least("batch_size", settings["batch_size"], 1)
    if settings["n_epochs"] is not None:
        require_at_least("n_epochs", settings["n_epochs"], 1)
    for name in ("normalize_advantage", "share_starts", "use_sde", "normalize_observations"):
        require_bool(name, settings[name])
    if settings["sde_sample_freq"] != -1:
        require_at_least("sde_sample_freq", settings["sde_sample_freq"], 1, "or -1")
    if settings["group_size"] is not None:
        require_at_least("group_size", settings["group_size"], 2)
    if not chooses_n_steps:
        require_at_least("n_steps", settings["n_steps"], 1)
    if settings["seed"] is not None:
        require_at_least("seed", settings["seed"], 0)
    require_between("gamma", settings["gamma"], 0.0, 1.0)
    require_between("repeat_starts", settings["repeat_starts"], 0.0, 1.0)
    if settings["gae_lambda"] is not None:
        require_between("gae_lambda", settings["gae_lambda"], 0.0, 1.0)
    require_between("ent_coef", settings["ent_coef"], -math.inf)
    for name, choices in CHOICES.items():
        require_one_of(name, settings[name], get_args(choices))
    if settings["max_grad_norm"] != math.inf:
        require_positive("max_grad_norm", settings["max_grad_norm"])
    for name in ("target_kl", "adaptive_kl_target"):
        if settings[name] is not None:
            require_positive(name, settings[name])
    kl_coef, target = settings["kl_coef"], settings["adaptive_kl_target"]
    require_between("kl_coef", kl_coef, 0.0)
    smallest_coef, largest_coef = KL_COEF_BOUNDS
    if target is not None and not smallest_coef <= kl_coef <= largest_coef:
        raise ValueError(
            f"adaptive_kl_target={target!r} adapts `kl_coef` between {smallest_coef:g} and {largest_coef:g}: start with a "
            f"value in this range, such as kl_coef=0.1, not {kl_coef!r}."
        )
    check_buffer_arguments(settings["rollout_buffer_class"], settings["rollout_buffer_kwargs"])


def check_policy_kwargs(policy_class: type, policy_kwargs: Mapping[str, Any], standardises: bool) -> None:
    """
    :param policy_class: Class of the policy
    :param policy_kwargs: Argument of GRPO
    :param standardises: Whether the policy is to standardise observations
    :raises TypeError: If the policy does not take one of its arguments
    :raises ValueError: If the arguments contradict each other, or if the policy cannot standardise
    """
    accepted = constructor_arguments(policy_class) - {"observation_space", "action_space"}
    refuse_unknown_arguments(
        {each: value for each, value in policy_kwargs.items() if each not in accepted},
        accepted,
        policy_class.__name__,
        _critic_hints(policy_kwargs),
    )
    for name, of_grpo in SET_BY_GRPO.items():
        if name in policy_kwargs:
            value = f"{of_grpo}={policy_kwargs[name]!r}"
            raise ValueError(f"`policy_kwargs` has `{name}`, which GRPO sets: pass it there, as GRPO(..., {value}).")
    if standardises and "normalize_observations" not in accepted:
        raise ValueError(
            f"`{policy_class.__name__}` takes no `normalize_observations`, so it cannot standardise observations: let its "
            "`__init__` accept the argument and pass it to `super().__init__`, or pass normalize_observations=False to GRPO."
        )


_PASS_TO_LOAD = "pass it to GRPO, or to `GRPO.load(path, env=env, {name}=...)`"
_NEW_MODEL = "pass it to a new GRPO, and copy the weights with `load_actor`"
#: Arguments that shape what is built once, and what to do instead of assigning them later.
BUILT_ONCE = {
    "n_steps": _PASS_TO_LOAD,
    "kl_reference": _PASS_TO_LOAD,
    "kl_estimator": _PASS_TO_LOAD,
    "rollout_buffer_class": _PASS_TO_LOAD,
    "rollout_buffer_kwargs": _PASS_TO_LOAD,
    "device": _PASS_TO_LOAD,
    "use_sde": _NEW_MODEL,
    "normalize_observations": _NEW_MODEL,
    "policy_kwargs": _NEW_MODEL,
    "seed": "call `set_random_seed`",
}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """
    :param before: Arguments of GRPO by name, as they are in use
    :param now: The same, as they are now
    :return: Names of those that were assigned since
    :raises ValueError: If one of them has no effect any more
    """
    assigned = {name for name in now if name not in before or now[name] is not before[name]}
    changed = {name for name in assigned if name not in before or now[name] != before[name]} - {"env", "policy"}
    for name in sorted(BUILT_ONCE.keys() & changed):
        raise ValueError(
            f"`{name}` was changed to {now[name]!r} after the model was built, which has no effect: "
            f"{BUILT_ONCE[name].format(name=name)} instead."
        )
    return changed


def describe_settings(
    buffer: GroupRolloutBuffer,
    group_size: int,
    shares_starts: bool,
    rollout_size: int,
    update_rule: losses.UpdateRule,
    normalizes: Mapping[str, bool],
) -> str:
    """
    Describe the settings that depend on each other or on the environment, for the printed log. ``normalizes`` says for each
    normaliser of observations whether it is in use.
    """
    names = {buffer_class: name for name, buffer_class in BUFFERS.items()}
    normalizers = [name for name, is_used in normalizes.items() if is_used]
    observations = f"normalised by {' and by '.join(normalizers)}" if normalizers else "not normalised"
    return (
        f"Using the {names.get(type(buffer), type(buffer).__name__)} buffer, groups of {group_size} "
        f"({'shared' if shares_starts else 'independent'} starts), rollouts of {rollout_size} transitions, "
        f"{update_rule} updates, observations {observations}"
    )


#: Arguments that only clipped updates use
OF_CLIPPED_UPDATES = (
    "learning_rate",
    "batch_size",
    "n_epochs",
    "clip_range",
    "clip_range_high",
    "importance_sampling_level",
    "max_grad_norm",
)
#: Policy arguments that only clipped updates use
OF_THE_OPTIMIZER = ("optimizer_class", "optimizer_kwargs", "lr_follows_std")


def chosen_update_rule(
    settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], is_continuous: bool, has_boards: bool
) -> losses.UpdateRule:
    """
    :param settings: Arguments of GRPO by name, with the class of the buffer, and ``num_timesteps``
    :param parameters: Parameters of its constructor by name, with their defaults
    :param is_continuous: Whether actions are continuous
    :param has_boards: Whether observations have boards or small images, and no large ones
    :return: The update rule that suits the buffer and the spaces, but ``"clipped"`` if an argument has been set that would
        have no effect otherwise, with gSDE, or if the model was trained before there was a choice
    """
    is_default = all(settings[name] == parameters[name].default for name in OF_CLIPPED_UPDATES)
    if not is_default or any(name in settings["policy_kwargs"] for name in OF_THE_OPTIMIZER):
        return "clipped"
    if settings["use_sde"] or settings["num_timesteps"] > 0:
        return "clipped"
    return settings["rollout_buffer_class"].update_rule(is_continuous, has_boards)


def warn_of_idle_arguments(settings: Mapping[str, Any], changed: Iterable[str]) -> None:
    """
    Warn of changes that have no effect.

    :param settings: Arguments of GRPO by name
    :param changed: Names of arguments that were changed after the model was made
    """
    idle = sorted(set(changed) & {*OF_CLIPPED_UPDATES, "lr_schedule", "optimizer"})
    if settings["update_rule"] == "natural" and idle:
        warnings.warn(
            f"{', '.join(idle)} changed, and natural-gradient steps do not use {'it' if len(idle) == 1 else 'them'}. "
            "`target_kl` sets the size of a step, and no `learning_rate`; for PPO's update, make a model with "
            "update_rule='clipped'.",
            stacklevel=3,
        )


def chosen_n_epochs(has_images: bool) -> int:
    """
    :param has_images: Whether observations have images or boards
    :return: Number of passes over the transitions of an update. With images, ten take twice the time of four, and the policy
        moves too far in an update
    """
    return 4 if has_images else 10


#: Smallest number of steps per environment and rollout that GRPO chooses.
MIN_STEPS = 16


def chosen_n_steps(rollout_size: int, n_envs: int, batch_size: int) -> tuple[int, str]:
    """
    :param rollout_size: Desired number of transitions per rollout
    :param n_envs: Number of environments
    :param batch_size: Minibatch size
    :return: Number of steps per environment for a rollout of about that size, or of a minibatch if that is larger, and at
        least :data:`MIN_STEPS`. Minibatches are full, unless this would take a longer rollout. And a sentence if rollouts are
        longer than desired, because each environment takes :data:`MIN_STEPS`; else empty
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


def warn_without_vec_normalize(learned_from_normalized: bool, are_normalized: bool) -> None:
    """Warn if the policy has learned from observations that a ``VecNormalize`` had normalised, and there is none now."""
    if learned_from_normalized and not are_normalized:
        warnings.warn(
            "The policy has learned from observations normalised by VecNormalize, and these environments have none. Wrap "
            "them as before: `VecNormalize.load(path, venv)` takes the statistics from the file of "
            "`VecNormalize.save(path)`.",
            UserWarning,
            stacklevel=3,
        )


def check_rollout(n_steps: int, n_envs: int, batch_size: int, normalize_advantage: bool) -> None:
    """Warn of minibatches that are not full, and raise a ``ValueError`` if a rollout is too small to be normalised."""
    rollout_size = n_steps * n_envs
    if rollout_size == 1 and normalize_advantage:
        raise ValueError(
            f"n_steps={n_steps} with {n_envs} environment gives rollouts of one transition, whose advantage cannot be "
            "normalised: pass a larger `n_steps`, or normalize_advantage=False."
        )
    if rollout_size % batch_size > 0:
        warnings.warn(
            f"batch_size={batch_size} does not divide the rollout of n_steps * n_envs = {n_steps} * {n_envs} = {rollout_size} "
            f"transitions: there will be a truncated mini-batch of size {rollout_size % batch_size} in each epoch. Choose "
            "`batch_size` as a divisor of the rollout.",
            stacklevel=4,
        )


def time_limit(env: VecEnv | None) -> int | None:
    """:return: The time limit in steps, the largest if environments have several; ``None`` if it is unknown"""
    # The attribute of Gymnasium's TimeLimit. The `spec` has it too, but not every worker process can send a spec.
    try:
        if env is None or not env.has_attr("_max_episode_steps"):
            return None
        limits = list(env.get_attr("_max_episode_steps"))
    except Exception:  # the methods of a simulator may do anything
        return None
    is_known = all(isinstance(limit, int) and limit > 0 for limit in limits)
    return max(limits) if is_known and limits else None
