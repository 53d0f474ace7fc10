"""
Stepping the environments of SB3's own ``VecEnv`` classes so that whatever goes wrong in one of them is told at once, by the
index of the environment.

``DummyVecEnv`` lets an exception through without saying whose it is, and broadcasts an observation of another shape into the
one it expects; ``SubprocVecEnv`` waits for the answer of a worker that has ended, for ever where the workers were forked.
"""

import time
from copy import deepcopy
from multiprocessing import connection
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.subproc_vec_env import _stack_obs

#: How long to wait for the operating system to report how a worker has ended.
DEAD_WORKER_TIMEOUT_S = 5.0


class EnvironmentFault(RuntimeError):
    """
    An environment has raised, died, hung, or returned what its spaces do not allow. No update has used the rollout in which
    it happened; the model can be saved, and learns on with another environment.

    :param env_idx: index of the environment
    :param what: has happened, after the words "Environment 3"
    :param hint: a sentence on what may help, if there is more to say
    """

    def __init__(self, env_idx: int, what: str, hint: str = ""):
        super().__init__(
            f"Environment {env_idx} {what}. No update has used this rollout: the model can be saved, and learns on with "
            f"`set_env` once the environment is mended.{' ' * bool(hint)}{hint}"
        )
        self.env_idx = env_idx
        self.what = what
        self.hint = hint
        #: Of the process of the environment, where that has ended.
        self.exit_code: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # From another process it arrives as what it is: pickle would construct it from its message
        return EnvironmentFault, (self.env_idx, self.what, self.hint), {"exit_code": self.exit_code}


def step_in_process(venv: DummyVecEnv) -> VecEnvStepReturn:
    """
    ``DummyVecEnv.step_wait`` without its automatic reset: the observation of an environment that is done is its final one.

    :param venv: after ``step_async``
    :return: observations, rewards, dones, infos
    :raises EnvironmentFault: if an environment raises, or returns an observation of another shape
    """
    for env_idx, env in enumerate(venv.envs):
        try:
            observation, reward, terminated, truncated, info = env.step(venv.actions[env_idx])
        except Exception as error:
            raise EnvironmentFault(env_idx, f"raised {type(error).__name__} in `step`: {error}") from error
        check_shape(env_idx, observation, venv.observation_space)
        info["TimeLimit.truncated"] = truncated and not terminated
        if terminated or truncated:
            info["terminal_observation"] = observation
        venv.buf_rews[env_idx] = reward
        venv.buf_dones[env_idx] = terminated or truncated
        venv.buf_infos[env_idx] = info
        venv._save_obs(env_idx, observation)
    return venv._obs_from_buf(), np.copy(venv.buf_rews), np.copy(venv.buf_dones), deepcopy(venv.buf_infos)


def reset_in_process(venv: DummyVecEnv, env_idx: int, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """
    Reset a single environment.

    :param venv: any
    :param env_idx: index of the environment
    :param kwargs: ``seed`` or ``options``
    :return: the first observation, and the info that comes with it
    :raises EnvironmentFault: if the environment raises, or returns an observation of another shape
    """
    try:
        observation, info = venv.envs[env_idx].reset(**kwargs)
    except Exception as error:
        raise EnvironmentFault(env_idx, f"raised {type(error).__name__} in `reset`: {error}") from error
    check_shape(env_idx, observation, venv.observation_space)
    return observation, info


def reset_all_in_process(venv: DummyVecEnv) -> VecEnvObs:
    """
    ``DummyVecEnv.reset``

    :param venv: any
    :return: the first observations
    :raises EnvironmentFault: if an environment raises, or returns an observation of another shape
    """
    for env_idx in range(venv.num_envs):
        options = {"options": venv._options[env_idx]} if venv._options[env_idx] else {}
        observation, info = reset_in_process(venv, env_idx, seed=venv._seeds[env_idx], **options)
        venv.reset_infos[env_idx] = info
        venv._save_obs(env_idx, observation)
    venv._reset_seeds()
    venv._reset_options()
    return venv._obs_from_buf()


def step_in_workers(venv: SubprocVecEnv, timeout: float | None) -> VecEnvStepReturn:
    """
    ``SubprocVecEnv.step_wait``, which resets the environments that are done.

    :param venv: after ``step_async``
    :param timeout: seconds that the workers may take, ``None`` for any number
    :return: observations, rewards, dones, infos
    :raises EnvironmentFault: if a worker has ended or takes too long, or returns an observation of another shape
    """
    deadline = _deadline(timeout)
    results = [_receive(venv, env_idx, deadline) for env_idx in range(venv.num_envs)]
    venv.waiting = False
    observations, rewards, dones, infos, venv.reset_infos = zip(*results, strict=True)  # type: ignore[assignment]
    for env_idx, observation in enumerate(observations):
        check_shape(env_idx, observation, venv.observation_space)
        if dones[env_idx]:
            check_shape(env_idx, infos[env_idx]["terminal_observation"], venv.observation_space)
    stacked = _stack_obs(observations, venv.observation_space)
    return stacked, np.stack(rewards), np.stack(dones), infos  # type: ignore[return-value]


def reset_workers(venv: SubprocVecEnv, timeout: float | None) -> VecEnvObs:
    """
    ``SubprocVecEnv.reset``. Answers that nobody has waited for, because an interrupt came between, are dropped.

    :param venv: any
    :param timeout: seconds that the workers may take, ``None`` for any number
    :return: the first observations
    :raises EnvironmentFault: if a worker has ended or takes too long
    """
    deadline = _deadline(timeout)
    for env_idx in range(venv.num_envs):
        # Asked for something that is answered by True or False, as steps and resets are not, what comes before that is old
        _send(venv, env_idx, ("has_attr", "reset"))
        while not isinstance(_receive(venv, env_idx, deadline), bool):
            pass
        _send(venv, env_idx, ("reset", (venv._seeds[env_idx], venv._options[env_idx])))
    venv.waiting = False
    results = [_receive(venv, env_idx, deadline) for env_idx in range(venv.num_envs)]
    for env_idx, (observation, _) in enumerate(results):
        check_shape(env_idx, observation, venv.observation_space)
    observations, venv.reset_infos = zip(*results, strict=True)  # type: ignore[assignment]
    venv._reset_seeds()
    venv._reset_options()
    return _stack_obs(observations, venv.observation_space)


def reset_worker(venv: SubprocVecEnv, env_idx: int, seed: int, timeout: float | None) -> tuple[Any, dict[str, Any]]:
    """
    Reset a single environment.

    :param venv: that waits for nothing
    :param env_idx: index of the environment
    :param seed: to reset it with
    :param timeout: seconds that the worker may take, ``None`` for any number
    :return: the first observation, and the info that comes with it
    :raises EnvironmentFault: if the worker has ended or takes too long
    """
    _send(venv, env_idx, ("reset", (seed, None)))
    observation, info = _receive(venv, env_idx, _deadline(timeout))
    check_shape(env_idx, observation, venv.observation_space)
    return observation, info


def send_actions(venv: SubprocVecEnv, actions: np.ndarray) -> None:
    """
    ``SubprocVecEnv.step_async``

    :param venv: that waits for nothing
    :param actions: one per environment
    :raises EnvironmentFault: if a worker has ended
    """
    for env_idx, action in enumerate(actions):
        _send(venv, env_idx, ("step", action))
    venv.waiting = True


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _send(venv: SubprocVecEnv, env_idx: int, message: tuple[str, Any]) -> None:
    if venv.closed:
        raise EnvironmentFault(env_idx, "has no process any more: the workers were closed, or stopped after an earlier fault")
    try:
        venv.remotes[env_idx].send(message)
    except OSError as error:
        raise _gone(venv, env_idx) from error


def _receive(venv: SubprocVecEnv, env_idx: int, deadline: float | None) -> Any:
    remote, process = venv.remotes[env_idx], venv.processes[env_idx]
    # Where workers were forked, a pipe stays open in the others after its own worker has ended: ask for both
    ready = connection.wait([remote, process.sentinel], None if deadline is None else max(deadline - time.monotonic(), 0.0))
    if not ready:
        stop_workers(venv)
        raise EnvironmentFault(env_idx, "has taken longer than `worker_timeout` allows, and all workers were stopped")
    if remote not in ready:
        raise _gone(venv, env_idx)
    try:
        return remote.recv()
    except (EOFError, OSError) as error:
        raise _gone(venv, env_idx) from error


def _gone(venv: SubprocVecEnv, env_idx: int) -> EnvironmentFault:
    process = venv.processes[env_idx]
    process.join(DEAD_WORKER_TIMEOUT_S)
    exit_code = process.exitcode
    stop_workers(venv)
    fault = EnvironmentFault(env_idx, f"is gone: its process has ended with exit code {exit_code}, its own error is above")
    fault.exit_code = exit_code
    return fault


def stop_workers(venv: SubprocVecEnv) -> None:
    """
    End all workers at once; ``close`` would wait for their answers.

    :param venv: not to be used any more
    """
    for process in venv.processes:
        process.kill()
    for process, remote in zip(venv.processes, venv.remotes, strict=True):
        process.join(DEAD_WORKER_TIMEOUT_S)
        remote.close()
    venv.waiting = False
    venv.closed = True


def check_shape(env_idx: int, observation: Any, space: spaces.Space) -> None:
    """
    :param env_idx: index of the environment
    :param observation: that it has returned
    :param space: observation space
    :raises EnvironmentFault: if the shape of the observation, or of one of its parts, is not that of the space
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            if key not in observation:
                raise EnvironmentFault(env_idx, f"returned an observation without {key!r}, which its space has")
            check_shape(env_idx, observation[key], part)
    elif space.shape is not None and np.shape(observation) != space.shape:
        raise EnvironmentFault(
            env_idx, f"returned an observation of shape {np.shape(observation)}, but its space has shape {space.shape}"
        )
