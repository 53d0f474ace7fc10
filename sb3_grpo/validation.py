"""Checks of arguments, and of the numbers that environments return. Messages quote the value and say what to do."""

import inspect
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from sb3_grpo.observations import observation_parts, space_parts
from sb3_grpo.questions import holds

#: Largest range of an action of which a quarter is an initial standard deviation, because some environments use the largest
#: float as a bound. Actuators in SI units and amounts of money stay below.
MAX_ACTION_RANGE = 1e9
#: Spaces that SB3's networks can read
READABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def constructor_arguments(cls: type) -> set[str]:
    """:return: Names of the arguments of a class's constructor, and of those that it passes on to its bases as ``**kwargs``"""
    accepted: set[str] = set()
    for each in cls.__mro__:
        if "__init__" in vars(each):
            kinds = {name: parameter.kind for name, parameter in inspect.signature(each).parameters.items()}
            variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
            accepted |= {name for name, kind in kinds.items() if kind not in variable}
            if inspect.Parameter.VAR_KEYWORD not in kinds.values():
                break
    return accepted


def takes_any(cls: type) -> bool:
    """:return: Whether a constructor outside this package has ``**kwargs``, of which it may take some for itself"""
    own = itertools.takewhile(lambda each: each.__module__.split(".")[0] != __package__, cls.__mro__)
    parameters = [each for cls in own if "__init__" in vars(cls) for each in inspect.signature(cls).parameters.values()]
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def _require(is_met: bool, name: str, value: Any, wanted: str) -> None:
    if not is_met:
        raise ValueError(f"`{name}` must be {wanted}, not {value!r}.")


def is_finite_number(value: Any) -> bool:
    """:return: Whether the value is a finite real number of Python or numpy; booleans and arrays are not"""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def require_at_least(name: str, value: Any, smallest: int, or_else: str = "") -> None:
    """Require an integer. ``or_else`` says for the message what else is accepted."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    _require(is_integer and value >= smallest, name, value, f"an integer of at least {smallest} {or_else}".rstrip())


def require_between(name: str, value: Any, smallest: float, largest: float = math.inf) -> None:
    """Require a finite number in a range."""
    limits = f" from {smallest:g} to {largest:g}" if largest < math.inf else f" of at least {smallest:g}"
    limits = "" if smallest == -math.inf else limits
    _require(is_finite_number(value) and smallest <= value <= largest, name, value, f"a finite number{limits}")


def require_positive(name: str, value: Any) -> None:
    """Require a number above zero, which may be infinite."""
    _require((is_finite_number(value) or value == math.inf) and value > 0, name, value, "a positive number")


def require_bool(name: str, value: Any) -> None:
    """Require True or False: a text such as ``"False"`` would count as true."""
    _require(isinstance(value, (bool, np.bool_)), name, value, "True or False")


def require_schedule(name: str, value: Any) -> None:
    """Require a finite number of at least 0, or a function of the remaining progress (from 1 to 0) that begins with one."""
    first = value(1.0) if callable(value) else value
    first = first.item() if isinstance(first, (np.ndarray, th.Tensor)) else first  # SB3 converts what a schedule returns
    wanted = "a finite number of at least 0, or a function that maps the remaining progress (from 1 to 0) to one"
    _require(is_finite_number(first) and first >= 0, name, first, wanted)


def require_mapping(name: str, value: Any) -> None:
    """Require a dictionary of arguments."""
    _require(isinstance(value, Mapping), name, value, "a dictionary of arguments, such as dict(...)")


def require_one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Require one of the choices."""
    *others, last = choices
    _require(value in (*others, last), name, value, f"{', '.join(map(repr, others))} or {last!r}")


def check_environment(env: Any, uses_masks: bool = False) -> None:
    """Raise a ``ValueError`` if it is no environment, or no policy can act in its spaces; warn of masks that are ignored."""
    if isinstance(env, type) or not hasattr(env, "action_space"):
        raise ValueError(
            f"`env` is {env!r}: pass an environment, such as `gymnasium.make('CartPole-v1')`, or several, such as "
            "`make_vec_env('CartPole-v1', n_envs=4)`."
        )
    _check_action_space(env.action_space)
    for key, part in space_parts(env.observation_space).items():
        if fault := _unreadable(part):
            raise ValueError(
                f"The observation {'' if key is None else f'{key!r} '}of space {part} {fault}, so no network can read it. "
                "`gymnasium.wrappers.FlattenObservation` makes a vector of numbers and tuples, `FilterObservation` leaves out "
                "entries of a Dict, and `minigrid.wrappers.FlatObsWrapper` is for MiniGrid. Otherwise, let the environment "
                "return an array of a fixed shape, of a `Box`."
            )
    if not uses_masks and has_action_masks(env):
        warnings.warn(
            "The environment has `action_masks`, which GRPO ignores: the policy may choose actions that are masked. Use "
            "`MaskableGRPO` if the environment cannot deal with them.",
            stacklevel=2,
        )


def _check_action_space(space: spaces.Space) -> None:
    if isinstance(space, spaces.Box) and not space.is_bounded():
        raise ValueError(
            f"The action space {space} is unbounded: give it a finite `low` and `high` in the environment, such as those of "
            "the actuators. Actions beyond them are clipped."
        )
    fault = _unreadable(space)
    if fault and isinstance(space, READABLE):  # SB3 refuses the other types
        raise ValueError(f"The action space {space} {fault}, and no policy can act in it: change it in the environment.")


def _unreadable(space: spaces.Space) -> str:
    """:return: What keeps SB3's networks from reading a space that is no ``Dict``; empty for nothing"""
    if not isinstance(space, READABLE):
        return "is no Box, Discrete, MultiDiscrete or MultiBinary"
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        if np.any(space.start != 0):
            return f"starts at {np.asarray(space.start).tolist()} instead of 0"
        return "has several axes" if np.ndim(getattr(space, "nvec", 0)) > 1 else ""
    return "has no numbers" if 0 in space.shape else ""


def has_action_masks(env: Any) -> bool:
    """:return: Whether an environment, or each of several, has a method ``action_masks``"""

    def has_masks(single: gym.Env) -> bool:
        # Some say that they have everything.
        return callable(single.get_wrapper_attr("action_masks")) and not single.has_wrapper_attr("not_an_attribute")

    try:
        if isinstance(env, gym.Env):
            return has_masks(env)
        answer = holds(env, has_masks)
        return env.has_attr("action_masks") and not env.has_attr("not_an_attribute") if answer is None else answer
    except Exception:  # of a simulator that does not know its environments one by one
        return False


def check_step(stepped: VecEnvStepReturn, num_timesteps: int, steps: np.ndarray) -> None:
    """Raise a ``ValueError`` if a step, or a final observation in its infos, has a number that is NaN or infinite."""
    observations, rewards, dones, infos = stepped
    check_finite("observation", observations, num_timesteps, steps)
    check_finite("reward", rewards, num_timesteps, steps)
    for env in np.flatnonzero(dones).tolist() if np.count_nonzero(dones) else ():
        final = infos[env].get("terminal_observation")
        if final is not None and infos[env].get("TimeLimit.truncated", False):
            batch = {key: np.array([final if key is None else final[key]]) for key in observation_parts(observations)}
            check_finite("final observation", batch, num_timesteps, steps[env : env + 1], first_env=env)


def check_finite(what: str, values: Any, num_timesteps: int, steps: np.ndarray | None = None, first_env: int = 0) -> None:
    """
    Raise a ``ValueError`` if a number is NaN or infinite; the message names what it is, and the environment.

    :param values: One entry per environment, of which the first has the index ``first_env``: an array, or a dict of arrays
    :param steps: Number of steps that each environment had taken in its episode, shape ``(n_envs,)``; ``None`` at a reset
    """
    for key, array in observation_parts(values).items():
        if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) < array.size:
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            where = "" if key is None else f" under {key!r}"
            when = "the reset" if steps is None else f"step {steps[row] + 1} of its episode"
            raise ValueError(
                f"Environment {first_env + row} returned a non-finite {what}{where} in {when}, after {num_timesteps} "
                f"timesteps: {array[row]}. It was not used for learning: fix the environment, and continue with `set_env`."
            )
