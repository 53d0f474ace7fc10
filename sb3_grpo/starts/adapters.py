"""
How each kind of ``VecEnv`` takes the steps of a rollout, such that an environment whose episode ends is reset once, with the
seed of its next start.

SB3 has no means for this: the automatic reset at the end of an episode passes no seed. So the adapters below do what
``step_wait`` of their kind does, with the seed in the reset. They change neither the ``VecEnv`` nor its environments.

They rely on private or undocumented parts of SB3: the lists of seeds and options of a ``VecEnv``, the buffers of
``DummyVecEnv``, and the pipes, flags and messages of ``SubprocVecEnv``. The last part of ``tests/test_adapters.py`` tests each
of them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing import connection
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.subproc_vec_env import _stack_obs, _worker
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_grpo.observations import map_observations, observation_parts, space_parts
from sb3_grpo.starts.faults import EnvironmentFault, name_environment
from sb3_grpo.starts.generators import ActionForWorker, SeedForWorker, exchange

#: How long to wait until the operating system reports that a worker has ended.
DEAD_WORKER_TIMEOUT_S = 5.0

#: Ends the trajectory of an environment, given by its index, and returns the seed of its reset; ``None`` for no seed.
Restart = Callable[[int], int | None]


class VecEnvAdapter:
    """
    The adapter of any ``VecEnv`` that the package does not know.

    Its environments can be reset with seeds if it has a method ``reset_envs(env_indices, seeds)``, which resets these
    environments and no others, and returns the list of their observations and the list of their infos. It is then called
    after the ``VecEnv``'s own reset, unless the ``VecEnv`` has an attribute ``autoreset``: while that is False, ``step_wait``
    must leave environments that are done as they are. An attribute ``unseeded_because`` with a reason says that seeds cannot
    be taken after all.

    :param venv: The base ``VecEnv``
    """

    def __init__(self, venv: VecEnv):
        self.venv = venv
        self._generators: dict[str, Any] = {}  # for `exchange`
        # Simulators may have a `reset_envs` of their own, or answer to every name.
        method = getattr(type(venv), "reset_envs", None)
        self._has_seeded_resets = callable(method) and "seeds" in inspect.signature(method).parameters

    @property
    def takes_seeds(self) -> bool:
        """Whether single environments can be reset with a seed."""
        return self._has_seeded_resets and getattr(self.venv, "unseeded_because", None) is None

    @property
    def lanes(self) -> list[int]:
        """The worker of each environment that collects by itself; zeros if none does."""
        return list(vars(self.venv).get("worker_of_env", [0] * self.venv.num_envs))

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """The context in which ``reset()`` of the ``VecEnv`` is called, by whomever."""
        yield

    def seed(self, env_idx: int, seed: int) -> int:
        """:return: The seed of an environment as ``reset()`` of the ``VecEnv`` is to pass it on"""
        return seed

    def step(self, actions: np.ndarray, restart: Restart) -> VecEnvStepReturn:
        """Take a step as ``VecEnv.step`` does, which a class may define, and reset the environments that are done."""
        return self._with_resets(lambda: self.venv.step(actions), restart)

    def step_async(self, actions: np.ndarray) -> None:
        """Send actions of shape ``(n_envs, *action_shape)``."""
        with self._without_autoreset():
            self.venv.step_async(actions)

    def step_wait(self, restart: Restart) -> VecEnvStepReturn:
        """:return: The step whose actions were sent, after the resets of :meth:`step`"""
        return self._with_resets(self.venv.step_wait, restart)

    def _with_resets(self, step: Callable[[], VecEnvStepReturn], restart: Restart) -> VecEnvStepReturn:
        with self._without_autoreset() as defers:
            observations, rewards, dones, infos = step()
        # Copies, because a simulator may write the next step into the same arrays.
        observations = map_observations(np.array, observations)
        done = np.flatnonzero(dones).tolist()
        seeds = [restart(env_idx) for env_idx in done]
        given = [seed for seed in seeds if seed is not None]
        if done and (defers or given):
            exchange(self._generators, given[0] if given else None)
            try:
                first, reset_infos = self.venv.reset_envs(done, seeds)  # type: ignore[attr-defined]
            finally:
                exchange(self._generators, None)
            reset_infos_of_all = list(self.venv.reset_infos)
            for env_idx, observation, info in zip(done, first, reset_infos, strict=True):
                reset_infos_of_all[env_idx] = info
                for key, batch in observation_parts(observations).items():
                    batch[env_idx] = observation if key is None else observation[key]
            self.venv.reset_infos = reset_infos_of_all
        return observations, np.array(rewards), np.array(dones), infos

    @contextmanager
    def _without_autoreset(self) -> Iterator[bool]:
        """Yield whether the ``VecEnv`` leaves environments that are done as they are."""
        if not (self.takes_seeds and hasattr(self.venv, "autoreset")):
            yield False
            return
        self.venv.autoreset = False
        try:
            yield True
        finally:
            self.venv.autoreset = True


class KnownVecEnvAdapter(VecEnvAdapter):
    """
    The adapter of a ``VecEnv`` of SB3, whose ``step`` consists of ``step_async`` and ``step_wait``, and whose first
    environment has the index ``first_env`` among all.
    """

    takes_seeds = True

    def __init__(self, venv: VecEnv, first_env: int = 0):
        super().__init__(venv)
        self.first_env = first_env
        parts = space_parts(venv.observation_space)
        self._sizes = {key: int(np.prod(part.shape)) for key, part in parts.items() if part.shape is not None}
        self._size = self._sizes.get(None, -1)

    def _check_size(self, env_idx: int, observation: Any) -> None:
        """Raise an :class:`EnvironmentFault` for an observation of another size, which numpy would broadcast or regroup."""
        if getattr(observation, "size", None) == self._size:  # nearly always
            return
        if isinstance(self.venv.observation_space, spaces.Dict) and not isinstance(observation, dict):
            what = f"returned an observation of type {type(observation).__name__}, but its space is a Dict: return a dict"
            raise EnvironmentFault(self.first_env + env_idx, what)
        for key, size in self._sizes.items():
            part = np.asarray(observation if key is None else observation_parts(observation).get(key, ()))
            if part.size != size:
                name = "an observation" if key is None else f"an observation with {key!r}"
                expected = space_parts(self.venv.observation_space)[key].shape
                what = f"returned {name} of shape {part.shape}, but its space has shape {expected}"
                raise EnvironmentFault(self.first_env + env_idx, what)

    def step(self, actions: np.ndarray, restart: Restart) -> VecEnvStepReturn:
        self.step_async(actions)
        return self.step_wait(restart)


class DummyVecEnvAdapter(KnownVecEnvAdapter):
    """The adapter of a ``DummyVecEnv``."""

    venv: DummyVecEnv

    def __init__(self, venv: DummyVecEnv, first_env: int = 0):
        super().__init__(venv, first_env)
        is_own = venv._obs_from_buf.__func__ is not DummyVecEnv._obs_from_buf  # type: ignore[attr-defined]
        self._observations = venv._obs_from_buf if is_own else self._copied_observations

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions)

    def step_wait(self, restart: Restart | None) -> VecEnvStepReturn:
        """See :meth:`VecEnvAdapter.step_wait`. With ``None``, environments that are done are left as they are."""
        venv = self.venv
        actions, rewards, dones, infos, save = venv.actions, venv.buf_rews, venv.buf_dones, venv.buf_infos, venv._save_obs
        for env_idx, env in enumerate(venv.envs):
            try:
                observation, reward, terminated, truncated, info = env.step(actions[env_idx])
            except Exception as error:
                name_environment(error, self.first_env + env_idx, "step")
                raise
            rewards[env_idx] = reward
            dones[env_idx] = is_done = terminated or truncated
            # Nobody looks at what comes after the end of an episode.
            if restart is None or not (is_done and (terminated or observation is None)):
                self._check_size(env_idx, observation)
            info["TimeLimit.truncated"] = truncated and not terminated
            infos[env_idx] = info
            if is_done:
                # A copy, because an environment may write its first observation into the same array.
                info["terminal_observation"] = deepcopy(observation)
                if restart is not None:
                    observation = self.reset_env(env_idx, restart(env_idx))
            save(env_idx, observation)
        return self._observations(), rewards.copy(), dones.copy(), [_copied(info) for info in infos]

    def _copied_observations(self) -> VecEnvObs:
        """The same as ``_obs_from_buf``, which takes several times as long for a deep copy."""
        copies = {key: batch.copy() for key, batch in self.venv.buf_obs.items()}
        return dict_to_obs(self.venv.observation_space, copies)

    def reset_env(self, env_idx: int, seed: int | None) -> Any:
        """:return: First observation of an environment, which is reset with a seed if there is one"""
        exchange(self._generators, seed)
        try:
            seeded: dict[str, Any] = {} if seed is None else {"seed": seed}
            observation, self.venv.reset_infos[env_idx] = self.venv.envs[env_idx].reset(**seeded)
        except Exception as error:
            name_environment(error, self.first_env + env_idx, "reset")
            raise
        finally:
            exchange(self._generators, None)
        self._check_size(env_idx, observation)
        return observation


#: Types of values that nobody can change.
IMMUTABLE = frozenset({bool, int, float, str, bytes, type(None), np.float32, np.float64, np.bool_, np.int64})


def _copied(info: dict[str, Any]) -> dict[str, Any]:
    """The same as ``deepcopy``, in a small part of the time for what most infos contain."""
    if IMMUTABLE.issuperset(map(type, info.values())):
        return info.copy()
    return {key: value if type(value) in IMMUTABLE else deepcopy(value) for key, value in info.items()}


class SubprocVecEnvAdapter(KnownVecEnvAdapter):
    """
    The adapter of a ``SubprocVecEnv``. Workers reset an environment right after the last step of its episode, before a seed
    could reach them, if they are asked for a step. They do not if they are asked for a method of the environment, ``step``.
    """

    venv: SubprocVecEnv

    def __init__(self, venv: SubprocVecEnv):
        super().__init__(venv)
        self._after_reset: set[int] = set()  # environments that were reset since their last step

    @contextmanager
    def resetting(self) -> Iterator[None]:
        with self._all_or_no_answers():
            for env_idx, process in enumerate(self.venv.processes):
                if not process.is_alive():
                    raise self._fault(env_idx)
                if self.venv.waiting:  # for the answer to a step that was interrupted
                    self._receive(env_idx)
            self.venv.waiting = False
        seeds = self.venv._seeds
        try:
            yield
        except BaseException as error:
            if self.venv._seeds is not seeds:  # the reset was completed, and something else failed afterwards
                raise
            fault = self._fault_of_dead_worker() if isinstance(error, (EOFError, OSError)) else None
            self._stop()
            if fault is not None:
                raise fault from error
            raise

    def seed(self, env_idx: int, seed: int) -> int:
        self._after_reset.add(env_idx)
        return SeedForWorker(seed)

    def step_async(self, actions: np.ndarray) -> None:
        with self._all_or_no_answers():
            for env_idx, action in enumerate(actions):
                sent = ActionForWorker(action) if env_idx in self._after_reset else action
                self._send(env_idx, ("env_method", ("step", (sent,), {})))
            self._after_reset = set()
            self.venv.waiting = True

    def step_wait(self, restart: Restart) -> VecEnvStepReturn:
        with self._all_or_no_answers():
            answers = [self._receive(env_idx) for env_idx in range(self.venv.num_envs)]
            self.venv.waiting = False
            observations, rewards, terminated, truncated, infos = map(list, zip(*answers, strict=True))
            for info, has_terminated, is_truncated in zip(infos, terminated, truncated, strict=True):
                info["TimeLimit.truncated"] = is_truncated and not has_terminated
            dones = np.array([bool(ends or is_cut) for ends, is_cut in zip(terminated, truncated, strict=True)])
            done = np.flatnonzero(dones).tolist()
            for env_idx in done:
                infos[env_idx]["terminal_observation"] = observations[env_idx]
                seed = restart(env_idx)
                self._send(env_idx, ("reset", (seed if seed is None else self.seed(env_idx, seed), {})))
            reset_infos = list(self.venv.reset_infos)
            for env_idx in done:
                observations[env_idx], reset_infos[env_idx] = self._receive(env_idx)
            self.venv.reset_infos = reset_infos
            for env_idx, observation in enumerate(observations):
                self._check_size(env_idx, observation)
        return _stack_obs(observations, self.venv.observation_space), np.stack(rewards), dones, infos

    @contextmanager
    def _all_or_no_answers(self) -> Iterator[None]:
        """Stop the workers if an error or an interrupt leaves answers unread, which would be mistaken for later ones."""
        if self.venv.closed:
            raise EnvironmentFault(0, "has no process: all workers were closed, or were stopped after an earlier error")
        try:
            yield
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        # `close()` would wait for the answers of the workers.
        for process in self.venv.processes:
            process.kill()
        for process, remote in zip(self.venv.processes, self.venv.remotes, strict=True):
            process.join(DEAD_WORKER_TIMEOUT_S)
            remote.close()
        self.venv.waiting, self.venv.closed = False, True

    def _send(self, env_idx: int, message: tuple[str, Any]) -> None:
        try:
            self.venv.remotes[env_idx].send(message)
        except OSError as error:
            raise self._fault(env_idx) from error

    def _receive(self, env_idx: int) -> Any:
        # A forked worker keeps the pipes of the others open, so the end of one is no end of file.
        remote = self.venv.remotes[env_idx]
        if remote not in connection.wait([remote, self.venv.processes[env_idx].sentinel]):
            raise self._fault(env_idx)
        try:
            return remote.recv()
        except (EOFError, OSError) as error:
            raise self._fault(env_idx) from error

    def _fault(self, env_idx: int) -> EnvironmentFault:
        process = self.venv.processes[env_idx]
        process.join(DEAD_WORKER_TIMEOUT_S)
        what = f"is gone: its process has ended with exit code {process.exitcode}, and its own error is above"
        return EnvironmentFault(env_idx, what)

    def _fault_of_dead_worker(self) -> EnvironmentFault:
        ended = connection.wait([process.sentinel for process in self.venv.processes], DEAD_WORKER_TIMEOUT_S)
        dead = [env_idx for env_idx, process in enumerate(self.venv.processes) if process.sentinel in ended]
        return self._fault(dead[0] if dead else 0)


def adapter_of(venv: VecEnv) -> VecEnvAdapter:
    """:return: The adapter of a base ``VecEnv``: the general one for a class that steps in its own way, whatever its bases"""

    def is_like(kind: type[VecEnv], *others: str) -> bool:
        methods = ("step", "step_async", "step_wait", "reset", *others)
        return all(getattr(getattr(venv, name), "__func__", None) is getattr(kind, name) for name in methods)

    if isinstance(venv, DummyVecEnv) and is_like(DummyVecEnv):
        return DummyVecEnvAdapter(venv)
    # A constructor of its own may start workers that do something of their own in a step.
    if isinstance(venv, SubprocVecEnv) and is_like(SubprocVecEnv, "__init__") and _worker.__module__ == _stack_obs.__module__:
        return SubprocVecEnvAdapter(venv)
    return VecEnvAdapter(venv)
