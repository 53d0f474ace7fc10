"""GRPO's arguments: checks, and the choice of those that were left open."""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import gymnasium as gym
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo import losses
from sb3_grpo.buffers import BUFFERS, buffer_options, check_buffer_arguments
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

NO_CRITIC = "GRPO has no value network, so leave it out"
MINIBATCH = "the number of transitions per gradient step is `batch_size`"
DURATION = "the number of environment steps is `learn(total_timesteps)`"

#: Arguments of other libraries that people pass to GRPO, and what to write instead.
FOREIGN_ARGUMENTS = {
    "vf_coef": NO_CRITIC,
    "clip_range_vf": NO_CRITIC,
    "share_features_extractor": NO_CRITIC,
    "beta": "the coefficient of the KL penalty is `kl_coef`",
    "num_generations": "the number of trajectories per group is `group_size`",
    "epsilon": "the clip range is `clip_range`",
    "epsilon_high": "the upper clip range is `clip_range_high`",
    "num_iterations": "the number of passes over an update is `n_epochs`",
    "loss_type": "write `loss_aggregation='step'` (DAPO), 'trajectory' (DeepSeekMath) or 'constant' (Dr. GRPO)",
    "scale_rewards": "write `rollout_buffer_kwargs=dict(scale='group')`, 'batch' or 'none'",
    "multi_objective_aggregation": "write `rollout_buffer_kwargs=dict(component_aggregation=...)`",
    "sync_ref_model": "write `kl_reference=k` to renew the reference every k updates",
    "ref_model_sync_steps": "write `kl_reference=k` to renew the reference every k updates",
    "ref_model_mixup_alpha": "write `kl_reference=k` to renew the reference every k updates",
    "max_completion_length": "set the time limit of the environment, `gym.make(..., max_episode_steps=...)`",
    "temperature": "actions are sampled from the policy as it is; `ent_coef` rewards exploration",
    "generation_batch_size": "the number of transitions per rollout is `n_steps` times the number of environments",
    "per_device_train_batch_size": MINIBATCH,
    "gradient_accumulation_steps": MINIBATCH,
    "logging_steps": "write `learn(log_interval=...)`, in rollouts",
    "save_steps": "pass a `CheckpointCallback` to `learn(callback=...)`",
    "max_steps": DURATION,
    "num_train_epochs": DURATION,
    "total_timesteps": DURATION,
    "lr": "the learning rate is `learning_rate`",
    "lam": "the lambda of the advantages is `gae_lambda`",
    "n_envs": "pass several environments as `env`, such as `make_vec_env('CartPole-v1', n_envs=4)`",
    "scale": "write `rollout_buffer_kwargs=dict(scale='group')`, 'batch' or 'none'",
}

#: Policy arguments that GRPO sets, and their names in GRPO
SET_BY_GRPO = {
    "normalize_observations": "normalize_observations",
    "use_sde": "use_sde",
    "lr_schedule": "learning_rate",
}


def refuse_arguments(unknown: Mapping[str, Any], accepted: Iterable[str]) -> None:
    """
    :param unknown: Arguments that GRPO does not take
    :param accepted: Names of the arguments that it takes
    :raises TypeError: If there is an unknown argument; the message says what to write instead
    """
    if not unknown:
        return
    places = {name: "rollout_buffer_kwargs" for buffer_class in BUFFERS.values() for name in buffer_options(buffer_class)}
    places |= dict.fromkeys(constructor_arguments(ActorPolicy), "policy_kwargs")
    refuse_unknown_arguments(
        unknown,
        accepted,
        "GRPO",
        {name: f"write `{place}=dict({name}=...)`" for name, place in places.items()} | FOREIGN_ARGUMENTS,
    )


def check_policy_class(policy: Any, aliases: Iterable[str]) -> None:
    """
    :param policy: Argument of GRPO
    :param aliases: Short names of policies
    :raises ValueError: If it is neither a short name nor an actor-only policy
    """
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
    for name, smallest in (("batch_size", 1), ("n_epochs", 1)):
        require_at_least(name, settings[name], smallest)
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
    for name in ("gamma", "gae_lambda"):
        require_between(name, settings[name], 0.0, 1.0)
    require_between("ent_coef", settings["ent_coef"], -math.inf)
    require_one_of(
        "importance_sampling_level", settings["importance_sampling_level"], get_args(losses.ImportanceSamplingLevel)
    )
    require_one_of("loss_aggregation", settings["loss_aggregation"], get_args(losses.LossAggregation))
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
    require_mapping("policy_kwargs", policy_kwargs)
    accepted = constructor_arguments(policy_class) - {"observation_space", "action_space"}
    refuse_unknown_arguments(
        {each: value for each, value in policy_kwargs.items() if each not in accepted},
        accepted,
        policy_class.__name__,
        {"share_features_extractor": NO_CRITIC},
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


#: Arguments that shape what is built once, and can therefore not be assigned later.
BUILT_ONCE = {
    "n_steps",
    "use_sde",
    "kl_reference",
    "kl_estimator",
    "rollout_buffer_class",
    "rollout_buffer_kwargs",
    "normalize_observations",
    "policy_kwargs",
    "seed",
    "device",
}


def refuse_changes(changed: Iterable[str], settings: Mapping[str, Any]) -> None:
    """
    :param changed: Names of arguments that were assigned after the model was built
    :param settings: Their values, by name
    :raises ValueError: If one of them has no effect any more
    """
    for name in sorted(BUILT_ONCE.intersection(changed)):
        raise ValueError(
            f"`{name}` was changed to {settings[name]!r} after the model was built, which has no effect: pass it to GRPO, or "
            f"to `GRPO.load(path, env=env, {name}=...)`, instead."
        )


def chosen_n_steps(rollout_size: int, n_envs: int, batch_size: int) -> int:
    """
    :param rollout_size: Desired number of transitions per rollout
    :param n_envs: Number of environments
    :param batch_size: Minibatch size
    :return: Number of steps per environment for a rollout of about that size, or of a minibatch if that is larger. Minibatches
        are full, unless this would take a longer rollout
    """
    n_steps = max(max(rollout_size, batch_size) // n_envs, 1)
    multiple = batch_size // math.gcd(batch_size, n_envs)
    return max(n_steps // multiple * multiple, min(n_steps, multiple))


def check_rollout(n_steps: int, n_envs: int, batch_size: int, normalize_advantage: bool) -> None:
    """
    Warn of minibatches that are not full.

    :param n_steps: Number of steps per environment and rollout
    :param n_envs: Number of environments
    :param batch_size: Minibatch size
    :param normalize_advantage: Whether advantages are standardised
    :raises ValueError: If a rollout is too small
    """
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
    """
    :param env: The training environment
    :return: Its time limit in steps, the largest if its environments have several; ``None`` if it is unknown
    """
    # The attribute of Gymnasium's TimeLimit. The `spec` has it too, but not every worker process can send a spec.
    try:
        if env is None or not env.has_attr("_max_episode_steps"):
            return None
        limits = list(env.get_attr("_max_episode_steps"))
    except Exception:  # the methods of a simulator may do anything
        return None
    is_known = all(isinstance(limit, int) and limit > 0 for limit in limits)
    return max(limits) if is_known and limits else None
