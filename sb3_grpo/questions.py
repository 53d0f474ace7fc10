"""
Questions about environments, which may be in other processes.

An exception other than an ``AttributeError`` in ``has_attr``, ``get_attr`` or ``env_method`` ends a worker of a
``SubprocVecEnv``. So what PPO never asks is asked by ``env_is_wrapped``, with an object that has an ``isinstance`` of its own.
"""

from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from stable_baselines3.common.vec_env import VecEnv


class ByValue:
    """An object that is pickled once, by value, so that a worker need not import this package."""

    def __init__(self, content: Any):
        self._pickled = cloudpickle.dumps(content)

    def __call__(self) -> None:
        """Called by nobody, but pickle asks whether it can be."""

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._pickled,)


def _checked(ask: Callable[[Any], bool]) -> Any:
    class Checked:
        def __instancecheck__(self, env: Any) -> bool:
            try:
                return ask(env)
            except Exception:
                return False

    return Checked()


class _Question(ByValue):
    """A question that can be sent to a worker. An environment answers "yes" by being an instance of it."""

    def __init__(self, ask: Callable[[Any], bool]):
        self._checked = _checked(ask)
        super().__init__(self._checked)

    def __instancecheck__(self, env: Any) -> bool:
        return isinstance(env, self._checked)


def holds(env: VecEnv, ask: Callable[[Any], bool]) -> bool | None:
    """
    :param ask: A question about a single environment, which is a Gymnasium environment with wrappers around it. An exception
        counts as "no"
    :return: Whether the answer of all is "yes"; ``None`` if one has no wrapper, or the ``VecEnv`` answers no questions
    """
    try:
        if not all(env.env_is_wrapped(_Question(lambda _: True))):  # type: ignore[arg-type]
            return None
        return all(env.env_is_wrapped(_Question(ask)))  # type: ignore[arg-type]
    except Exception:  # the methods of a simulator may do anything
        return None
