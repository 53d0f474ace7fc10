"""The runs of a suite of `benchmarks/matrix.yml`, and the hash of the settings that each of them is run with."""

import copy
import functools
import hashlib
import importlib.resources
import inspect
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_grpo import GRPO, CompleteGroupRolloutBuffer, KernelRolloutBuffer
from sb3_grpo.arithmetic.natural import CONSTANT_UNTIL, LIMIT
from sb3_grpo.buffers import resolve_buffer_class
from sb3_grpo.losses import UpdateRule
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.settings import ObjectiveOptions, chosen_n_epochs, chosen_update_rule
from sb3_grpo.zoo.experiment import HYPERPARAMS

MATRIX = pathlib.Path(__file__).with_name("matrix.yml")

#: The algorithms that GRPO is compared with, by the constructor whose arguments they have. sbx's PPO has those of
#: Stable-Baselines3's, so that its rows can be read where sbx is not installed
RIVALS: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "trpo": TRPO, "sbx": PPO}

#: Arguments that came after the first reported runs, at the values at which a run is the same without them, bit for bit. The
#: hash leaves them out there, so that a new option does not make finished runs stale.
NEUTRAL: dict[str, Any] = dict(
    clip_range_high=None,
    importance_sampling_level="step",
    loss_aggregation="step",
    adaptive_kl_target=None,
    tied_groups="keep",
    reward_weights=None,
    component_aggregation="sum_then_normalize",
    relative=False,
    normalize_observations=False,
    lr_follows_std=False,
    update_rule="clipped",
    sequence_length=None,
)


@dataclass(frozen=True)
class Run:
    """
    One training, or the random control of an environment.

    :param arm: Name of the settings
    :param algo: ``grpo``, one of :data:`RIVALS`, or ``random``
    :param env: Gymnasium environment
    :param timesteps: Budget
    :param seed: Seed of the run
    :param threshold: Mean return of 20 training episodes whose first step and second are recorded
    :param n_episodes: Episodes of the evaluation
    :param entry: Hyperparameters, as in a file of rl-zoo3
    :param is_continuous: Whether actions have a standard deviation
    :param has_images: Whether observations are images or boards
    :param has_boards: Whether they are boards
    """

    arm: str
    algo: str
    env: str
    timesteps: int
    seed: int
    threshold: float
    n_episodes: int
    entry: dict[str, Any] = field(default_factory=dict)
    is_continuous: bool = False
    has_images: bool = False
    has_boards: bool = False

    def settings_hash(self) -> str:
        """:return: Eight characters that change with whatever determines the outcome, except for seed and versions"""
        settings = self.entry
        if self.algo in RIVALS:
            settings = {**defaults(RIVALS[self.algo]), **settings}
        elif self.algo == "grpo":
            settings = self.resolved()
            settings["lr_follows_std"] = defaults(ActorPolicy)["lr_follows_std"] and self.is_continuous
            if settings["update_rule"] == "natural" and settings["target_kl"] in (None, LIMIT):  # the same in short runs
                falls = settings["target_kl"] is None and self.timesteps > CONSTANT_UNTIL
                settings["target_kl"] = f"falls after {CONSTANT_UNTIL} timesteps" if falls else None
            buffer = buffer_settings(settings)
            is_natural = settings["update_rule"] == "natural"
            # Defaults that were not options once, or had another name
            for name, default in (("learn_metric", is_natural), ("use_time", not (is_natural and self.is_continuous))):
                if buffer.get(name) == default:
                    del buffer[name]
            if "bandwidth" in buffer and buffer["bandwidth"] == defaults(KernelRolloutBuffer)["bandwidth"]:
                buffer["bandwidth"] = None
            settings = dict(without_neutral({**settings, "rollout_buffer_kwargs": without_neutral(buffer)}))
        what = (self.algo, self.env, self.timesteps, sorted(settings.items()))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:8]

    def resolved(self) -> dict[str, Any]:
        """:return: All arguments of GRPO and options of its objective, with what it chooses for ``None``"""
        settings = {**defaults(GRPO), **self.entry}
        objective = ObjectiveOptions(**evaluated(settings.pop("objective")))
        buffer_class = resolve_buffer_class(settings["rollout_buffer_class"])
        policy_kwargs = evaluated(settings["policy_kwargs"])
        about = {
            **settings,
            "rollout_buffer_class": buffer_class,
            "policy_kwargs": policy_kwargs,
            "objective": objective,
            "num_timesteps": 0,
        }
        settings["update_rule"] = settings["update_rule"] or chosen_update_rule(
            about, defaults(GRPO), self.is_continuous, self.has_boards
        )
        chosen = buffer_class.defaults(settings["update_rule"], self.is_continuous)
        if settings["gae_lambda"] is None:
            settings["gae_lambda"] = chosen.gae_lambda
            if chosen.late_gae_lambda is not None and self.timesteps > CONSTANT_UNTIL:
                settings["gae_lambda"] = f"from {chosen.gae_lambda} to {chosen.late_gae_lambda}"
        if settings["n_epochs"] is None:
            settings["n_epochs"] = chosen_n_epochs(self.has_images)
        if settings["normalize_observations"] is None:  # all arms have features extractors of SB3 or of the package
            settings["normalize_observations"] = True
        if settings["n_steps"] is None:
            settings["n_steps"] = f"{chosen.rollout_size} in all"
        settings["rollout_buffer_kwargs"] = {**chosen.arguments, **evaluated(settings["rollout_buffer_kwargs"])}
        return {**settings, **vars(objective)}

    def key(self) -> tuple[str, str, str]:
        """:return: Environment, seed and hash as they are in the CSV, which identify the row of the run"""
        return self.env, str(self.seed), self.settings_hash()

    def __str__(self) -> str:
        return f"{self.arm} {self.env} {self.timesteps:,} steps, seed {self.seed}"


def without_neutral(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """
    :param arguments: Values by name
    :return: Sorted names and values, without those in :data:`NEUTRAL`
    """
    return sorted(each for each in arguments.items() if each not in NEUTRAL.items())


@functools.cache
def defaults(callable_class: type) -> dict[str, Any]:
    """
    :param callable_class: A class
    :return: The default of each argument of its constructor that has one
    """
    parameters = inspect.signature(callable_class).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def buffer_defaults(buffer: str | None) -> dict[str, Any]:
    """
    :param buffer: Short name of a rollout buffer, ``None`` for the default
    :return: The defaults of its constructor and of those of its base classes
    """
    buffer_class = resolve_buffer_class(buffer)
    merged = {key: value for base in reversed(buffer_class.__mro__[:-1]) for key, value in defaults(base).items()}
    if issubclass(buffer_class, CompleteGroupRolloutBuffer):  # this is what `scale=None` means
        merged["default_scale"] = buffer_class.default_scale
        merged["gae_lambda"] = 1.0  # the default of these buffers, which do not use it, when the rows were made
    elif issubclass(buffer_class, KernelRolloutBuffer):
        merged |= dict(fit="lstd", time_feature=True)  # options when the rows were made, of which this is what remains
    return merged


def buffer_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """
    :param settings: All arguments of GRPO, defaults included
    :return: All arguments of its rollout buffer, defaults included
    """
    return {**buffer_defaults(settings["rollout_buffer_class"]), **evaluated(settings["rollout_buffer_kwargs"])}


def evaluated(kwargs: str | dict[str, Any] | None) -> dict[str, Any]:
    """
    :param kwargs: Keyword arguments, or an expression for them, as in a file of rl-zoo3
    :return: The keyword arguments
    """
    return (eval(kwargs) if isinstance(kwargs, str) else kwargs) or {}


def load_matrix(path: pathlib.Path = MATRIX) -> dict[str, Any]:
    """
    :param path: YAML file
    :return: Its content
    """
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache
def hyperparameter_file(algo: str) -> dict[str, dict[str, Any]]:
    """
    :param algo: ``grpo`` or one of :data:`RIVALS`
    :return: The entries of this package's file, or of that of the installed rl-zoo3
    """
    file = HYPERPARAMS if algo == "grpo" else importlib.resources.files("rl_zoo3") / "hyperparams" / f"{algo}.yml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def cells(matrix: dict[str, Any], suite: str, changes: dict[str, Any] | None = None) -> list[tuple[Run, list[int]]]:
    """
    :param matrix: From :func:`load_matrix`
    :param suite: Name of one of its suites
    :param changes: Other settings, for trials
    :return: For each arm in each environment of the suite, a run with seed 0, and the seeds
    """
    chosen = matrix["suites"][suite]
    n_episodes = chosen.get("eval_episodes", 20)

    def cell(arm: str, env: str, timesteps: int, threshold: float, settings: dict[str, Any]) -> Run:
        algo = settings["algo"]
        changed = {"n_timesteps": timesteps}, settings.get("set", {}), changes or {}
        entry = with_changes(entry_of(settings, env, matrix["environments"][env]), *changed)
        about = matrix["environments"][env]
        spaces = "half_range" in about, about.get("images", False), about.get("boards", False)
        return Run(arm, algo, env, timesteps, 0, float(threshold), n_episodes, entry, *spaces)

    thresholds = {**{env: about["threshold"] for env, about in matrix["environments"].items()}, **chosen.get("thresholds", {})}
    seeds = {env: chosen.get("seeds_of", {}).get(env, chosen["seeds"]) for env in chosen["timesteps"]}
    own_seeds = chosen.get("seeds_of_arm", {})

    def seeds_for(arm: str, env: str) -> list[int]:
        own = own_seeds.get(arm, {})
        found = own if isinstance(own, list) else own.get(env, seeds[env])
        return found[: chosen.get("n_seeds_of_arm", {}).get(arm)]

    return [
        (cell(arm, env, timesteps, thresholds[env], matrix["arms"][arm]), seeds_for(arm, env))
        for env, timesteps in chosen["timesteps"].items()
        for arm in chosen.get("arms_of", {}).get(env, chosen["arms"])
        if has_entry(matrix["arms"][arm], env, matrix["environments"][env])
    ]


def with_changes(entry: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """:return: Hyperparameters with changes, one after another, of which a mapping changes a part of a mapping"""
    entry = dict(entry)
    for key, value in (each for change in changes for each in change.items()):
        both_mappings = isinstance(entry.get(key), dict) and isinstance(value, dict)
        entry[key] = {**entry[key], **value} if both_mappings else value
    return entry


def name_in_file(settings: dict[str, Any], env: str, about: dict[str, Any]) -> str:
    """
    :param settings: Arm of the matrix
    :param env: Gymnasium environment
    :param about: Entry of the environment in the matrix
    :return: The environment whose entry in the hyperparameter file the settings begin with
    """
    return settings.get("of") or about.get(f"{settings['algo']}_entry", env)


def has_entry(settings: dict[str, Any], env: str, about: dict[str, Any]) -> bool:
    """
    :param settings: Arm of the matrix
    :param env: Gymnasium environment
    :param about: Entry of the environment in the matrix
    :return: Whether the hyperparameter file has the entry that the settings begin with; for TRPO with GRPO's settings, whether
        actions are continuous, because GRPO's default has natural-gradient steps there
    """
    if settings["entry"] == "zoo":
        return name_in_file(settings, env, about) in hyperparameter_file(settings["algo"])
    is_natural = settings["entry"] == "matched" and settings["algo"] == "trpo"
    return "half_range" in about or not is_natural


def entry_of(settings: dict[str, Any], env: str, about: dict[str, Any]) -> dict[str, Any]:
    """
    :param settings: Arm of the matrix
    :param env: Gymnasium environment
    :param about: Entry of the environment in the matrix
    :return: The hyperparameters that the settings begin with, as in a file of rl-zoo3
    """
    if settings["entry"] == "zoo":
        return copy.deepcopy(hyperparameter_file(settings["algo"])[name_in_file(settings, env, about)])
    matched = {}
    if settings["entry"] == "matched":
        matched = matched_settings(about, settings["algo"], settings.get("normalize_rewards", False))
    policy = "CnnPolicy" if about.get("images", False) else "MlpPolicy"
    return {"policy": policy, **matched, **{key: about[key] for key in ("env_wrapper",) if key in about}}


def matched_settings(about: dict[str, Any], algo: str, normalize_rewards: bool) -> dict[str, Any]:
    """
    :param about: Entry of the environment in the matrix
    :param algo: One of :data:`RIVALS`
    :param normalize_rewards: Whether the rival gets normalised rewards, on which GRPO's default does not depend
    :return: Arguments that give a rival the default settings of GRPO with 8 environments: PPO those of clipped updates,
        including the learning rate that follows the standard deviation, and TRPO those of natural-gradient steps. Both get
        normalised observations and the initial deviation. The critic differs, and TRPO limits neither the change of the
        deviation nor advantages
    """
    rule: UpdateRule = "natural" if algo == "trpo" else "clipped"
    chosen = KernelRolloutBuffer.defaults(rule, "half_range" in about)
    ours = {**defaults(GRPO), "gae_lambda": chosen.gae_lambda, "target_kl": LIMIT}
    ours["n_epochs"] = chosen_n_epochs(about.get("images", False))
    of_ppo = ("learning_rate", "batch_size", "n_epochs", "clip_range", "ent_coef", "max_grad_norm")
    same = ("gamma", "gae_lambda", *(of_ppo if rule == "clipped" else ("target_kl",)))
    settings = {"n_envs": 8, "n_steps": chosen.rollout_size // 8, **{name: ours[name] for name in same}}
    normalize_observations = about.get("normalize", True)
    if normalize_observations or normalize_rewards:
        settings["normalize"] = f"dict(norm_obs={normalize_observations}, norm_reward={normalize_rewards})"
    if "half_range" in about:
        settings["policy_kwargs"] = f"dict(log_std_init={math.log(0.5 * about['half_range'])})"
        if defaults(ActorPolicy)["lr_follows_std"] and rule == "clipped":
            settings["callback"] = "benchmarks.rates.RateFollowsStd"
    return settings


def expand(
    matrix: dict[str, Any],
    suite: str,
    arms: Sequence[str] = (),
    envs: Sequence[str] = (),
    seeds: Sequence[int] = (),
    changes: dict[str, Any] | None = None,
) -> list[Run]:
    """
    List the runs seed by seed, so that an interrupted suite has something of everything, and arm by arm within an environment,
    so that runs that are compared take place close together. The random controls come first.

    :param matrix: From :func:`load_matrix`
    :param suite: Name of one of its suites
    :param arms: Arms of the suite, all of them by default
    :param envs: Environments of the suite, all of them by default
    :param seeds: Seeds in the place of those of the suite
    :param changes: Other settings, for trials
    :return: The runs
    :raises ValueError: If a name is not in the matrix
    """
    if suite not in matrix["suites"]:
        raise ValueError(f"Unknown suite {suite!r}: choose from {', '.join(matrix['suites'])}.")
    everything = cells(matrix, suite, changes)
    for what, names, known in (
        ("arm", arms, dict.fromkeys(cell.arm for cell, _ in everything)),
        ("environment", envs, dict.fromkeys(cell.env for cell, _ in everything)),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"Unknown {what} {name!r} in suite {suite!r}: choose from {', '.join(known)}.")
    wanted = [(cell, own) for cell, own in everything if cell.arm in (arms or [cell.arm]) and cell.env in (envs or [cell.env])]
    runs = []
    if n_random := matrix["suites"][suite].get("random_episodes", 100):
        runs = [Run("random", "random", env, 0, 0, 0.0, n_random) for env in dict.fromkeys(cell.env for cell, _ in wanted)]
    for seed in seeds or sorted({seed for _, own in wanted for seed in own}):
        runs += [replace(cell, seed=seed) for cell, own in wanted if seeds or seed in own]
    return runs
