"""Checks of arguments where they enter: each names the argument, quotes what came, and says what to pass instead."""

import math
from typing import Any

import numpy as np
from stable_baselines3.common.utils import get_device


def require_flag(name: str, value: Any) -> None:
    """
    :param name: of the argument
    :param value: what came
    :raises ValueError: if it is neither True nor False
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, not {value!r}.")


def require_schedule(name: str, value: Any, smallest: float) -> None:
    """
    :param name: of the argument
    :param value: what came: a number, or a function of the progress remaining
    :param smallest: least value accepted, of the number, or of the function at the beginning, half-way, and at the end
    :raises ValueError: if it is neither, or not a finite number of at least that
    """
    if not callable(value):
        if not is_finite_number(value) or value < smallest:
            raise ValueError(
                f"`{name}` must be a finite number of at least {smallest:g}, or a function of the progress remaining that "
                f"gives such numbers, not {value!r}."
            )
        return
    for progress in (1.0, 0.5, 0.0):
        try:
            current = value(progress)
        except Exception as error:
            raise ValueError(
                f"`{name}` must give a finite number of at least {smallest:g} for each progress remaining from 1 to 0, and "
                f"{value!r} raises {error!r} at {progress:g}."
            ) from error
        if not is_finite_number(current) or current < smallest:
            raise ValueError(
                f"`{name}` must give a finite number of at least {smallest:g} for each progress remaining from 1 to 0, and "
                f"gives {current!r} at {progress:g}."
            )


def require_one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """
    :param name: of the argument
    :param value: what came
    :param choices: what may come: strings, or integers
    :raises ValueError: if the value is none of these
    """
    kinds = str if isinstance(choices[0], str) else (int, np.integer)
    if isinstance(value, bool) or not isinstance(value, kinds) or value not in choices:
        raise ValueError(f"`{name}` must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, not {value!r}.")


def require_device(name: str, value: Any) -> None:
    """
    :param name: of the argument
    :param value: what came
    :raises ValueError: if PyTorch has no device of that name
    """
    try:
        get_device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be 'auto' or a device of PyTorch's, as 'cpu' or 'cuda:0', not {value!r}.") from error


def is_finite_number(value: Any) -> bool:
    """
    :param value: what came
    :return: whether it is a real number, Python's or numpy's, that is finite as a float; a bool is none, nor is an array
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def require_at_least(name: str, value: Any, smallest: int, or_else: str = "") -> None:
    """
    :param name: of the argument
    :param value: what came
    :param smallest: least integer accepted
    :param or_else: what else is, for the message
    :raises ValueError: if the value is not an integer of at least that
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < smallest:
        raise ValueError(f"`{name}` must be an integer of at least {smallest}{' ' * bool(or_else)}{or_else}, not {value!r}.")


def require_between(name: str, value: Any, smallest: float, largest: float) -> None:
    """
    :param name: of the argument
    :param value: what came
    :param smallest: least number accepted
    :param largest: greatest number accepted
    :raises ValueError: if the value is not a finite number between the two
    """
    if not is_finite_number(value) or not smallest <= value <= largest:
        limits = "" if smallest == -np.inf and largest == np.inf else f" from {smallest:g} to {largest:g}"
        raise ValueError(f"`{name}` must be a finite number{limits}, not {value!r}.")


def require_positive(name: str, value: Any) -> None:
    """
    :param name: of the argument
    :param value: what came
    :raises ValueError: if the value is not a positive, finite number
    """
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"`{name}` must be a positive number, not {value!r}.")
