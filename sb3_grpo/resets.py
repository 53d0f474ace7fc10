"""
Resets of single environments, in this process and in workers, and what is raised when one of them fails.

An environment is reset once per episode: :class:`DeferredReset` ignores the reset that a ``VecEnv`` makes by itself, which
passes no seed.

This module relies on private parts of SB3, see :mod:`sb3_grpo.starts`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import connection
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_grpo.observations import observation_parts, space_parts

#: How long to wait until the operating system reports that a worker has ended.
DEAD_WORKER_TIMEOUT_S = 5.0

TAKE_A_SEED = (
    "In an environment, define `def reset(self, *, seed=None, options=None)` and begin with `super().reset(seed=seed)`. In a "
    "wrapper, call `self.env.reset(seed=seed, options=options)`."
)

#: What the methods of an environment return. Those of older versions of Gym returned less.
RETURNED = {"reset": "observation, info", "step": "observation, reward, terminated, truncated, info"}


class EnvironmentFault(RuntimeError):
    """
    An environment has raised an error, its process has ended, or it has returned an observation of the wrong shape. The
    rollout was not used for learning. The model can be saved, and it can continue with another environment.

    :param env_idx: Index of the environment
    :param what: Description of the fault, which follows the words "Environment 3"
    :param hint: A sentence about a remedy
    """

    def __init__(self, env_idx: int, what: str, hint: str = ""):
        super().__init__(env_idx, what, hint)
        self.env_idx = env_idx

    def __str__(self) -> str:
        env_idx, what, hint = self.args
        return (
            f"Environment {env_idx} {what}. The rollout was discarded, so the model can be saved, and can continue after "
            f"`set_env` with an environment that works. {hint}".rstrip()
        )


class RolloutLost(EnvironmentFault):
    """A worker was lost, and its environments cannot be brought back to where they were: all of them have to be reset."""


# -- one reset per episode --------------------------------------------------------------------------------------------


class DeferredReset(gym.Wrapper):
    """
    Ignores the reset that a ``VecEnv`` makes right after the last step of an episode, because ``SeededVecEnv`` makes it later
    with the seed of the next start. Exceptions become an ``EnvironmentFault`` with the index of the environment.

    Attributes are read from and written to the wrapped environment.

    :param env: Environment
    :param env_idx: Index of the environment in the ``VecEnv``
    """

    #: Attributes of this wrapper and of ``gym.Wrapper``. All others belong to the environment.
    _OWN = ("env", "_env_idx", "_shapes", "_final", "_action_space", "_observation_space", "_metadata", "_cached_spec")

    def __init__(self, env: gym.Env, env_idx: int):
        super().__init__(env)
        self._env_idx = env_idx
        parts = space_parts(env.observation_space)
        self._shapes = {key: part.shape for key, part in parts.items() if part.shape is not None}
        self._final: Any = None

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this class does not have. While a copy is built, `env` itself may be missing.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.env, name, value)

    def get_wrapper_attr(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise self._fault("step", error) from error
        self._check_shape(observation)
        if terminated or truncated:
            self._final = observation
        return observation, reward, terminated, truncated, info

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        final, self._final = self._final, None
        if final is not None and not kwargs:
            return final, {}  # replaced by the first observation of the next episode
        try:
            observation, info = self.env.reset(**kwargs)
        except Exception as error:
            raise self._fault("reset", error) from error
        self._check_shape(observation)
        return observation, info

    def _fault(self, method: str, error: Exception) -> EnvironmentFault:
        hint = ""
        if isinstance(error, ValueError) and "values to unpack" in str(error):
            hint = f"In Gymnasium, `{method}` returns `{RETURNED[method]}`."
        return EnvironmentFault(self._env_idx, f"raised {type(error).__name__} in `{method}`: {error}", hint)

    def _check_shape(self, observation: Any) -> None:
        # DummyVecEnv would broadcast it.
        parts = observation_parts(observation)
        for key, shape in self._shapes.items():
            returned = np.shape(parts.get(key, ()))
            if returned != shape:
                name = "an observation" if key is None else f"an observation with {key!r}"
                what = f"returned {name} of shape {returned}, but its space has shape {shape}"
                raise EnvironmentFault(self._env_idx, what)


def _make_deferred(env_fn: Callable[[], gym.Env], env_idx: int) -> gym.Env:
    return DeferredReset(env_fn(), env_idx)


class SeededSubprocVecEnv(SubprocVecEnv):
    """
    A ``SubprocVecEnv`` for GRPO that resets an environment once per episode, with the seed of its start. The workers of SB3's
    ``SubprocVecEnv`` reset their environments before the seed can reach them, so GRPO has to reset them a second time. For all
    other algorithms, this class is a ``SubprocVecEnv``::

        make_vec_env("CartPole-v1", n_envs=8, vec_env_cls=SeededSubprocVecEnv)

    :param env_fns: Functions that construct the environments, each in a process of its own
    :param start_method: Start method of the processes, as for ``SubprocVecEnv``
    """

    def __init__(self, env_fns: list[Callable[[], gym.Env]], start_method: str | None = None):
        #: Whether another object resets the environments that are done.
        self.defers_resets = False
        super().__init__([partial(_make_deferred, env_fn, i) for i, env_fn in enumerate(env_fns)], start_method)

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = super().step_wait()
        if not self.defers_resets and np.any(dones):
            done = np.flatnonzero(dones).tolist()
            insert_resets(self, done, reset_workers(self, done, [None] * len(done)), observations)
        return observations, rewards, dones, infos


# -- workers ----------------------------------------------------------------------------------------------------------


class WatchedPipe:
    """
    The pipe to a worker of a ``SubprocVecEnv``. It raises an ``EnvironmentFault`` if the worker has ended. SB3 would raise an
    ``EOFError`` without an index, or wait forever, because forked workers keep each other's pipes open.

    :param pipe: The pipe
    :param process: The worker
    :param env_idx: Index of its environment
    """

    def __init__(self, pipe: Any, process: Any, env_idx: int):
        self.pipe, self.process, self.env_idx = pipe, process, env_idx
        self._asked = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def send(self, message: tuple[str, Any]) -> None:
        self._asked = message[0]
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._fault() from error

    def recv(self) -> Any:
        if self.pipe not in connection.wait([self.pipe, self.process.sentinel]):
            raise self._fault()
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._fault() from error

    def _fault(self) -> EnvironmentFault:
        self.process.join(DEAD_WORKER_TIMEOUT_S)
        hint = f"If that error says that `reset` takes no `seed`: {TAKE_A_SEED}" if self._asked == "reset" else ""
        what = f"is gone: its process has ended with exit code {self.process.exitcode}, and its own error is above"
        return EnvironmentFault(self.env_idx, what, hint)


def reset_workers(venv: SubprocVecEnv, env_indices: list[int], seeds: Sequence[int | None]) -> list[tuple[Any, dict]]:
    """
    Reset some of the environments, all at the same time.

    :param venv: The environments
    :param env_indices: Indices of those to reset
    :param seeds: Seed of each; ``None`` for none
    :return: First observation and info of each
    """
    for env_idx, seed in zip(env_indices, seeds, strict=True):
        venv.remotes[env_idx].send(("reset", (seed, {})))
    return [venv.remotes[env_idx].recv() for env_idx in env_indices]


def stop_workers(venv: SubprocVecEnv) -> None:
    """
    End all workers at once; ``close()`` would wait for their answers.

    :param venv: The environments
    """
    for process in venv.processes:
        process.kill()
    for process, remote in zip(venv.processes, venv.remotes, strict=True):
        process.join(DEAD_WORKER_TIMEOUT_S)
        remote.close()
    venv.waiting, venv.closed = False, True


def insert_resets(venv: VecEnv, env_indices: list[int], resets: list[tuple[Any, dict]], observations: VecEnvObs) -> None:
    """
    Overwrite the observations of a step, and the infos of the last reset, of environments that were reset after it.

    :param venv: The environments
    :param env_indices: Indices of those that were reset
    :param resets: First observation and info of each
    :param observations: Observations of all environments, arrays of shape ``(n_envs, *obs_shape)`` or a dict of such
    """
    venv.reset_infos = list(venv.reset_infos)
    for env_idx, (observation, info) in zip(env_indices, resets, strict=True):
        venv.reset_infos[env_idx] = info
        for key, batch in observation_parts(observations).items():
            batch[env_idx] = observation if key is None else observation[key]
