"""Checks of arguments, and of the numbers that environments return. Messages quote the value and say what to do."""

import contextlib
import difflib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_grpo.observations import observation_parts, space_parts
from sb3_grpo.vec_wrappers import base_of

#: Largest range of an action that counts as bounded, because some environments use the largest float as a bound. The initial
#: standard deviation is a quarter of the range. Actuators in SI units and amounts of money stay below.
MAX_ACTION_RANGE = 1e9
#: Spaces that SB3's networks can read, and those that gymnasium turns into vectors.
READABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
FLATTENABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.Dict, spaces.Tuple)
NO_NUMBERS = "has no numbers"


def refuse_unknown_arguments(
    unknown: Mapping[str, Any], accepted: Iterable[str], taker: str, hints: Mapping[str, str]
) -> None:
    """Raise a ``TypeError`` for keyword arguments that a class, ``taker``, does not accept. It says what to write instead."""
    for name, value in unknown.items():
        meant = likely_argument(name, accepted)
        hint = f"did you mean `{meant}`?" if meant else f"see `help({taker})` for its arguments."
        if name in hints:
            hint = f"{hints[name]}."
        raise TypeError(f"{taker} does not take `{name}={value!r}`: {hint}")


def likely_argument(name: str, accepted: Iterable[str]) -> str | None:
    """
    :return: The argument that was probably meant: the only one that begins with the name, that has the same letters, or that
        hardly differs. ``None`` if there is none, because a wrong hint is worse than no hint
    """
    accepted = list(accepted)
    longer = [each for each in accepted if each.startswith(name) and len(name) >= 4]
    if len(longer) == 1:
        return longer[0]
    reordered = [each for each in accepted if sorted(each) == sorted(name)]
    close = [*difflib.get_close_matches(name, accepted, 1, 0.85), *difflib.get_close_matches(name, reordered, 1, 0.75)]
    return close[0] if close else None


def constructor_arguments(cls: type) -> set[str]:
    """:return: Names of the arguments of a class's constructor, and of those that it passes on to its bases as ``**kwargs``"""
    accepted: set[str] = set()
    for each in cls.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(each).parameters
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        accepted |= {name for name, parameter in parameters.items() if parameter.kind not in variable}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return accepted


def is_finite_number(value: Any) -> bool:
    """:return: Whether the value is a finite real number of Python or numpy; booleans and arrays are not"""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def require_at_least(name: str, value: Any, smallest: int, or_else: str = "") -> None:
    """Require an integer. ``or_else`` says for the message what else is accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < smallest:
        raise ValueError(f"`{name}` must be an integer of at least {smallest}{' ' * bool(or_else)}{or_else}, not {value!r}.")


def require_between(name: str, value: Any, smallest: float, largest: float = math.inf) -> None:
    """Require a finite number in a range."""
    if not is_finite_number(value) or not smallest <= value <= largest:
        if largest < math.inf:
            limits = f" from {smallest:g} to {largest:g}"
        else:
            limits = "" if smallest == -math.inf else f" of at least {smallest:g}"
        raise ValueError(f"`{name}` must be a finite number{limits}, not {value!r}.")


def require_positive(name: str, value: Any) -> None:
    """Require a finite number above zero."""
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"`{name}` must be a positive number, not {value!r}.")


def require_bool(name: str, value: Any) -> None:
    """Require True or False: a text such as ``"False"`` would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, not {value!r}.")


def require_schedule(name: str, value: Any) -> None:
    """Require a finite number of at least 0, or a function of the remaining progress (from 1 to 0) that begins with one."""
    first = value(1.0) if callable(value) else value
    if callable(value):
        with contextlib.suppress(TypeError, ValueError):  # SB3 converts what a schedule returns
            first = float(first)
    if not is_finite_number(first) or first < 0:
        gives = f", which gives {first!r} at 1" if callable(value) else ""
        raise ValueError(
            f"`{name}` must be a finite number of at least 0, or a function that maps the remaining progress (from 1 to 0) "
            f"to one, not {value!r}{gives}."
        )


def require_mapping(name: str, value: Any) -> None:
    """Require a dictionary of arguments."""
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` must be a dictionary of arguments, such as dict(...), not {value!r}.")


def require_one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Require one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"`{name}` must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, not {value!r}.")


def check_environment(env: Any, uses_masks: bool = False) -> None:
    """
    Check an environment, and warn of action masks that are ignored.

    :param env: Environment, as it is passed to a model
    :param uses_masks: Whether the model uses action masks
    :raises ValueError: If it is no object of an environment, or if no policy can act in its spaces
    """
    if isinstance(env, type) or not hasattr(env, "action_space"):
        raise ValueError(
            f"`env` is {env!r}: pass an environment, such as `gymnasium.make('CartPole-v1')`, or several, such as "
            "`make_vec_env('CartPole-v1', n_envs=4)`."
        )
    _check_action_space(env.action_space)
    _check_observation_space(env.observation_space)
    base = base_of(env)[1] if isinstance(env, VecEnv) else env
    for each in base.envs if isinstance(base, DummyVecEnv) else [base]:
        _require_seed_argument(each)
    if not uses_masks and _has_action_masks(env):
        warnings.warn(
            "The environment has `action_masks`, which GRPO ignores: the policy may choose actions that are masked. Use "
            "`MaskableGRPO` if the environment cannot deal with them.",
            UserWarning,
            stacklevel=2,
        )


def _require_seed_argument(env: Any) -> None:
    """Raise a ``ValueError`` if ``reset`` of an environment or of one of its wrappers takes no seed, which SB3 passes."""
    if not isinstance(env, gym.Env):
        return
    parameters = inspect.signature(env.reset).parameters.values()
    if not any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(
            f"`{type(env).__name__}.reset{inspect.signature(env.reset)}` takes no `seed`. In an environment, define "
            "`def reset(self, *, seed=None, options=None)` and begin with `super().reset(seed=seed)`. In a wrapper, define "
            "`def reset(self, **kwargs)` and pass `**kwargs` on."
        )
    if isinstance(env, gym.Wrapper):
        _require_seed_argument(env.env)


def _check_action_space(space: spaces.Space) -> None:
    if isinstance(space, spaces.Box):
        is_bounded, low, high = space.is_bounded(), space.low, space.high
        if not is_bounded or np.any(high.astype(np.float64) - low.astype(np.float64) > MAX_ACTION_RANGE):
            though = f", because its bounds are more than {MAX_ACTION_RANGE:g} apart" if is_bounded else ""
            raise ValueError(
                f"The action space {space} is unbounded{though}: give it a finite `low` and `high` in the "
                "environment, such as those of the actuators. Actions beyond them are clipped."
            )
    fault = _unreadable(space)
    if fault and isinstance(space, READABLE):  # SB3 refuses the other types
        raise ValueError(f"The action space {space} {fault}, and no policy can act in it: change it in the environment.")


def _check_observation_space(space: spaces.Space) -> None:
    parts = space_parts(space)
    # Those that no wrapper makes readable come first.
    for key, part in sorted(parts.items(), key=lambda item: isinstance(item[1], FLATTENABLE)):
        fault = _unreadable(part)
        if not fault:
            continue
        name = "observation space" if key is None else f"observation {key!r} of space"
        if isinstance(part, FLATTENABLE) and fault != NO_NUMBERS:
            remedy = "wrap the environment in `gymnasium.wrappers.FlattenObservation`, and use 'MlpPolicy'"
        elif key is None:
            remedy = "let the environment return an array of a fixed shape, of a `Box`"
        else:
            others = [each for each, other in parts.items() if each != key and isinstance(other, READABLE + FLATTENABLE)]
            remedy = (
                f"leave it out with `gymnasium.wrappers.FilterObservation(env, {others})`, or make a vector of all "
                "observations, as `minigrid.wrappers.FlatObsWrapper` does for MiniGrid"
            )
        kind = NotImplementedError if isinstance(part, (spaces.Dict, spaces.Tuple)) else ValueError  # as in SB3
        raise kind(f"The {name} {part} {fault}, so no network can read it: {remedy}.")


def _unreadable(space: spaces.Space) -> str:
    """:return: What keeps SB3's networks from reading a space that is no ``Dict``; empty for nothing"""
    if not isinstance(space, READABLE):
        return "is no Box, Discrete, MultiDiscrete or MultiBinary"
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        if np.any(space.start != 0):
            return f"starts at {np.asarray(space.start).tolist()} instead of 0"
        return "has several axes" if np.ndim(getattr(space, "nvec", 0)) > 1 else ""
    return NO_NUMBERS if 0 in space.shape else ""


def _has_action_masks(env: Any) -> bool:
    try:
        if isinstance(env, gym.Env):
            return env.has_wrapper_attr("action_masks")
        answers = env.env_method("has_wrapper_attr", "action_masks", indices=[0])
        return isinstance(answers, list) and answers[:1] == [True]
    except Exception:  # of a simulator that does not know its environments one by one
        return False


def check_registered(env_id: str) -> None:
    """Raise ``gymnasium.error.UnregisteredEnv`` if there is no environment of this id."""
    if ":" in env_id:  # gymnasium imports the module before the colon
        return
    try:
        gym.spec(env_id)
    except gym.error.UnregisteredEnv as error:
        raise type(error)(
            f"{error} If it belongs to another package, import that package first, as in `import minigrid`."
        ) from None
    except gym.error.Error:  # an id without a version, of which gymnasium takes the latest
        pass


def check_step(
    observations: Any,
    rewards: np.ndarray,
    dones: np.ndarray,
    infos: Sequence[dict[str, Any]],
    num_timesteps: int,
    steps: np.ndarray,
) -> None:
    """
    Raise a ``ValueError`` if a step returned a number that is NaN or infinite. The final observations of truncated episodes,
    which a baseline evaluates, are in ``infos``.

    :param num_timesteps: Number of timesteps before the step
    :param steps: Number of steps that each environment had taken in its episode before, shape ``(n_envs,)``
    """
    check_finite("observation", observations, num_timesteps, steps)
    check_finite("reward", rewards, num_timesteps, steps)
    for env in np.flatnonzero(dones).tolist() if np.count_nonzero(dones) else ():
        final = infos[env].get("terminal_observation")
        if final is not None and infos[env].get("TimeLimit.truncated", False):
            batch = {key: np.array([final if key is None else final[key]]) for key in observation_parts(observations)}
            check_finite("final observation", batch, num_timesteps, steps[env : env + 1], first_env=env)


def check_finite(what: str, values: Any, num_timesteps: int, steps: np.ndarray | None = None, first_env: int = 0) -> None:
    """
    :param what: Name of the values in the message
    :param values: One entry per environment: an array, or a dict of arrays
    :param num_timesteps: Number of timesteps so far
    :param steps: Number of steps that each environment had taken in its episode, shape ``(n_envs,)``; ``None`` at a reset
    :param first_env: Index of the environment of the first entry
    :raises ValueError: If a number is NaN or infinite; the message names the environment
    """
    for key, array in values.items() if isinstance(values, dict) else [(None, values)]:
        if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) < array.size:
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            where = "" if key is None else f" under {key!r}"
            when = "the reset" if steps is None else f"step {steps[row] + 1} of its episode"
            raise ValueError(
                f"Environment {first_env + row} returned a non-finite {what}{where} in {when}, after {num_timesteps} "
                f"timesteps: {array[row]}. It was not used for learning, so the model can be saved. Fix the environment and "
                "continue with `set_env`."
            )
