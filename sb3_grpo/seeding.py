"""
Shared starts: the queue that numbers and seeds the starts of a run, and the innermost ``VecEnv`` that hands them out.

SB3 seeds an environment for one reset only (``VecEnv.seed``), and with a different seed for each environment; the
automatic reset at the end of an episode passes no seed. The members of a group, however, have to start from the same
initial state, whichever environment runs them and whenever it does so.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_grpo.stepping import (
    EnvironmentFault,
    reset_all_in_process,
    reset_in_process,
    reset_worker,
    reset_workers,
    send_actions,
    step_in_process,
    step_in_workers,
)

#: Looks at what the environments return, before any wrapper has seen it: observations, and after a step rewards, dones and
#: infos, else ``None``.
Check = Callable[[VecEnvObs, np.ndarray | None, np.ndarray | None, Sequence[dict[str, Any]] | None], None]


class Start(NamedTuple):
    """
    One start: the first state of one trajectory.

    :param index: Position in the run's queue, counted from 0
    :param group: The group that the trajectory belongs to, ``index // group_size``
    :param seed: What to reset the environment with; the same for all members of a group
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a start
    group: int
    seed: int


class StartQueue:
    """
    Numbers the starts of a run and gives each group its seed.

    A group's seed is a function of ``(seed, group)`` alone, so that the queue stores no random stream and
    continues identically after pickling.

    :param group_size: Number of trajectories that share a start, at least 2
    :param seed: Seed of the whole queue, not negative; drawn from numpy's global generator if None, as SB3 does for a
        ``VecEnv`` that was given no seed
    :raises ValueError: If ``group_size`` is not an integer of at least 2, or ``seed`` is negative
    """

    def __init__(self, group_size: int, seed: int | None = None):
        if not isinstance(group_size, (int, np.integer)) or group_size < 2:
            raise ValueError(f"`group_size` must be an integer of at least 2, got {group_size!r}")
        if seed is None:
            seed = int(np.random.randint(0, np.iinfo(np.uint32).max, dtype=np.uint32))
        if seed < 0:
            raise ValueError(f"`seed` must not be negative, got {seed!r}")
        self.group_size = int(group_size)
        self.seed = int(seed)
        self.next_index = 0
        self._seeded_group = -1
        self._group_seed = -1

    def take(self) -> Start:
        """
        Take the next start.

        :return: The start that the next environment to be reset is to run
        """
        index = self.next_index
        group = index // self.group_size
        if group != self._seeded_group:
            self._seeded_group, self._group_seed = group, self._derive_seed(group)
        self.next_index += 1
        return Start(index, group, self._group_seed)

    def begin_group(self) -> None:
        """
        Skip to the first start of a fresh group.

        To be called when all environments are reset: the members in flight are abandoned, their group stays incomplete.
        """
        self.next_index = -(-self.next_index // self.group_size) * self.group_size

    def seed_apart(self) -> int:
        """
        A seed for resets that are not starts of this queue. Taking a start changes it; asking for it changes nothing.

        :return: A seed that is derived unlike that of any group
        """
        return self._derive_seed(self.next_index, 0)

    def _derive_seed(self, *spawn_key: int) -> int:
        # 31 bits, because some environments hand the seed on to something that takes a signed 32-bit integer
        return int(np.random.SeedSequence(self.seed, spawn_key=spawn_key).generate_state(1)[0] >> 1)


def _delegated(name: str) -> Any:
    """
    An attribute that is the base ``VecEnv``'s own, for reading and for writing.

    :param name: The attribute's name
    :return: The property, typed as ``Any`` so that the class can annotate what it holds
    """
    return property(lambda self: getattr(self.venv, name), lambda self, value: setattr(self.venv, name, value))


class SeededVecEnv(VecEnv):
    """
    The innermost ``VecEnv``: resets each environment with the seed of the start that it takes from a ``StartQueue``.

    Detached, which it is until ``attach()``, it is the base ``VecEnv`` and nothing else. That matters because
    ``evaluate_policy(model, model.get_env())`` must not evaluate on repeated starts.

    It is not a ``VecEnvWrapper``: ``sync_envs_normalization`` walks the wrappers of the training and of the evaluation
    environment in step, and only the former has this one. For the same reason ``isinstance()`` sees the base's class
    too: ``EvalCallback`` warns if the training environment is no instance of the evaluation environment's class.

    :param venv: The base ``VecEnv``
    :raises ValueError: If ``venv`` is a ``VecEnvWrapper`` or is already seeded
    """

    num_envs: int = _delegated("num_envs")
    observation_space: spaces.Space = _delegated("observation_space")
    action_space: spaces.Space = _delegated("action_space")
    reset_infos: list[dict[str, Any]] = _delegated("reset_infos")
    render_mode: str | None = _delegated("render_mode")
    metadata: dict[str, Any] = _delegated("metadata")
    _seeds: list[int | None] = _delegated("_seeds")
    _options: list[dict[str, Any]] = _delegated("_options")

    def __init__(self, venv: VecEnv):
        # VecEnv.__init__ is not called: it would create a second copy of what belongs to the base
        if isinstance(venv, (VecEnvWrapper, SeededVecEnv)):
            raise ValueError(f"SeededVecEnv goes around a base VecEnv, got {venv!r}: use `insert_seeded_vec_env(env)`")
        self.venv = venv
        self.start_queue: StartQueue | None = None
        #: Start that each environment is running, shape (n_envs,), -1 where it is none of the queue's.
        #: Replaced, never written to, so that a caller may keep the array of an earlier step.
        self.start_indices: np.ndarray = np.full(venv.num_envs, -1, dtype=np.int64)
        #: Starts so far whose first observation differed from that of their group's first member
        self.mismatches = 0
        #: Whether somebody has stepped or reset the environments while no queue was attached, since the last ``reset()``
        #: with one: the observation and the starts known to the algorithm are then no longer those of the environments
        self.stepped_while_detached = False
        self._share_starts = False
        self._check: Check | None = None
        self._worker_timeout: float | None = None
        self._unshareable = False
        self._last_queue: StartQueue | None = None
        self._streams_coincide = False
        self._group_in_view = -1
        self._first_observation: dict[Any, np.ndarray] = {}
        self._seeded_reset_infos: dict[int, dict[str, Any]] = {}

    @property  # type: ignore[misc]  # read-only, unlike object's
    def __class__(self) -> Any:
        return self.venv.__class__

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle refuses to rebuild an object whose `__class__` is not its type
        return SeededVecEnv, (self.venv,), self.__dict__.copy()

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this class does not have. While a copy is built `venv` itself may be missing, and the
        # protocol methods of copy and pickle must not be the base's
        if name == "venv" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.venv, name)

    # -- handing out starts -------------------------------------------------------------------------------------------

    @property
    def shares_starts(self) -> bool:
        """Whether resets get their group's seed: attached, not asked otherwise, and the environments can take one."""
        return self.start_queue is not None and self._share_starts and not self._unshareable

    def attach(
        self,
        queue: StartQueue,
        share_starts: bool = True,
        check: Check | None = None,
        worker_timeout: float | None = None,
    ) -> None:
        """
        Take the starts of all resets from a queue, until ``detach()``.

        Episodes that are under way are not touched; attaching the same queue again continues where it was left.

        :param queue: The run's queue
        :param share_starts: If False, starts are numbered but resets are SB3's own: no seed is passed, nothing verified
        :param check: Called with what the environments return; raises if something is wrong
        :param worker_timeout: Seconds that the workers of a ``SubprocVecEnv`` may take for a step, None for any number
        """
        if queue is not self._last_queue:
            # Neither the numbers nor the first observation of another queue's starts mean anything in this one
            self._last_queue = queue
            self._group_in_view = -1
            self.start_indices = np.full(self.num_envs, -1, dtype=np.int64)
        self.start_queue = queue
        self._share_starts = share_starts
        self._check = check
        self._worker_timeout = worker_timeout

    def detach(self) -> None:
        """Be transparent again."""
        self.start_queue = None
        self._check = None

    def reset(self) -> VecEnvObs:
        """
        Reset all environments; while attached, each with the seed of the next start, from a fresh group on.

        :return: The first observations, shape (n_envs, ...) per part
        :raises EnvironmentFault: If the worker of a ``SubprocVecEnv`` dies or hangs
        """
        if self.start_queue is None:
            self._forget_starts()
            return self._reset_apart()
        self.start_queue.begin_group()
        starts = [self.start_queue.take() for _ in range(self.num_envs)]
        self._seeded_reset_infos.clear()
        observations = self._reset_with_seeds(starts) if self.shares_starts else self._reset_apart()
        self.start_indices = np.array([start.index for start in starts], dtype=np.int64)
        self.stepped_while_detached = False
        if self._check is not None:
            self._check(observations, None, None, None)
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        if self.start_queue is None:
            self._forget_starts()
        if self.start_queue is not None and type(self.venv) is SubprocVecEnv:
            send_actions(self.venv, actions)
        else:
            self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """
        Wait for the step; while attached, reset each environment that is done with the seed of the next start.

        :return: observations, rewards, dones, infos, as the base returns them except for the observations of
            environments that are done, which are those of the seeded reset
        :raises EnvironmentFault: If an environment raises, dies, hangs, or returns an observation of another shape
        """
        if self.start_queue is None:
            return self.venv.step_wait()
        if type(self.venv) is DummyVecEnv:
            observations, rewards, dones, infos = step_in_process(self.venv)
        elif type(self.venv) is SubprocVecEnv:
            observations, rewards, dones, infos = step_in_workers(self.venv, self._worker_timeout)
        else:
            observations, rewards, dones, infos = self.venv.step_wait()
        if np.any(dones):
            # The base may own these arrays
            observations = deepcopy(observations)
            self._begin_episodes(np.flatnonzero(dones).tolist(), observations, self.start_queue)
        self._publish_reset_infos()
        if self._check is not None:
            self._check(observations, rewards, dones, infos)
        return observations, rewards, dones, infos

    def _forget_starts(self) -> None:
        self.stepped_while_detached = True
        self._seeded_reset_infos.clear()
        self.start_indices = np.full(self.num_envs, -1, dtype=np.int64)

    def _reset_apart(self) -> VecEnvObs:
        """
        Reset all environments without shared starts.

        Environments that ran members of one group are left with equal random generators, and would go on to draw equal
        starts: the first time after that, each gets a seed of its own, unless somebody has seeded them anyway.

        :return: The first observations
        """
        if self._streams_coincide and self._last_queue is not None:
            self._streams_coincide = False
            if not self._unshareable and all(seed is None for seed in self.venv._seeds):
                self.venv.seed(self._last_queue.seed_apart())
        return self._reset_base()

    def _reset_base(self) -> VecEnvObs:
        if type(self.venv) is SubprocVecEnv:
            return reset_workers(self.venv, self._worker_timeout)
        return reset_all_in_process(self.venv) if type(self.venv) is DummyVecEnv else self.venv.reset()

    def _reset_with_seeds(self, starts: list[Start]) -> VecEnvObs:
        self.venv._seeds = [start.seed for start in starts]
        try:
            observations = self._reset_base()
        except Exception as error:
            self.venv._reset_seeds()
            self._stop_sharing(*self._not_of_the_seed(error))
            return self._reset_base()
        finally:
            self.venv._reset_seeds()
        self._streams_coincide = True
        for env_idx, start in enumerate(starts):
            self._verify(start, env_idx, observations)
        return observations

    def _begin_episodes(self, env_indices: list[int], observations: VecEnvObs, queue: StartQueue) -> None:
        """
        Start the next episode of the environments that are done.

        :param env_indices: Their indices, ascending
        :param observations: The step's observations; the rows of these environments are overwritten
        :param queue: Where the starts come from
        """
        start_indices = self.start_indices.copy()
        for env_idx in env_indices:
            start = queue.take()
            start_indices[env_idx] = start.index
            self._seeded_reset_infos.pop(env_idx, None)
            # One by one: were a call for several environments to fail halfway, nobody could tell which were reset
            reset = self._reset_with_seed(env_idx, start.seed) if self.shares_starts else None
            is_seeded = reset is not None
            if reset is None and type(self.venv) is DummyVecEnv:
                reset = reset_in_process(self.venv, env_idx)
            if reset is None:
                continue  # the observation of the base's automatic reset stays valid
            observation, self._seeded_reset_infos[env_idx] = reset
            for key, batch in _parts(observations).items():
                batch[env_idx] = observation if key is None else observation[key]
            if is_seeded:
                self._streams_coincide = True
                self._verify(start, env_idx, observations)
        self.start_indices = start_indices

    def _reset_with_seed(self, env_idx: int, seed: int) -> tuple[Any, dict[str, Any]] | None:
        """
        :param env_idx: Index of the environment
        :param seed: To reset it with
        :return: The first observation and its info, None if the environment cannot be reset with a seed
        """
        try:
            if type(self.venv) is SubprocVecEnv:
                return reset_worker(self.venv, env_idx, seed, self._worker_timeout)
            if type(self.venv) is DummyVecEnv:
                return reset_in_process(self.venv, env_idx, seed=seed)
            return self.venv.env_method("reset", seed=seed, indices=[env_idx])[0]
        except Exception as error:
            self._stop_sharing(self._not_of_the_seed(error)[0], env_idx)
            return None

    def _not_of_the_seed(self, error: Exception) -> tuple[Exception, int | None]:
        """
        :param error: Raised by a reset with a seed
        :return: The environment's own error, and its index if known: that of an environment which may do without a seed
        :raises EnvironmentFault: If it is a fault that has nothing to do with seeds, or that nothing can follow
        """
        if not isinstance(error, EnvironmentFault):
            return error, None
        if type(self.venv) is DummyVecEnv and isinstance(error.__cause__, Exception):
            return error.__cause__, error.env_idx
        if not error.exit_code:
            raise error
        # An exception ends a worker
        hint = "If the environment cannot be reset with a seed, pass `share_starts=False` to GRPO."
        raise EnvironmentFault(error.env_idx, error.what, hint) from error

    def _publish_reset_infos(self) -> None:
        # On every step: a SubprocVecEnv's workers send the info of their last automatic reset again with each step
        if self._seeded_reset_infos:
            if not isinstance(self.venv.reset_infos, list):
                self.venv.reset_infos = list(self.venv.reset_infos)
            for env_idx, info in self._seeded_reset_infos.items():
                self.venv.reset_infos[env_idx] = info

    # -- when starts cannot be shared ---------------------------------------------------------------------------------

    def _verify(self, start: Start, env_idx: int, observations: VecEnvObs) -> None:
        """
        Compare a first observation with that of the group's first member; starts are taken in order, so that only the
        current group's has to be kept.

        :param start: The start
        :param env_idx: The environment that runs it
        :param observations: The observations of all environments, so that all rows have been cast to the same dtype
        """
        observation = {key: np.array(batch[env_idx]) for key, batch in _parts(observations).items()}
        if start.group != self._group_in_view:
            self._group_in_view, self._first_observation = start.group, observation
            return
        if all(_same(observation[key], first) for key, first in self._first_observation.items()):
            return
        self.mismatches += 1
        if self.mismatches == 1:
            warnings.warn(
                f"The environment {self._env_name(env_idx)!r} does not reproduce its initial state: two calls of its "
                f"`reset(seed=...)` with the same seed returned different observations (environment {env_idx}, start "
                f"{start.index}, group {start.group}). The members of a group do not share their start. In the "
                "environment, and in each of its wrappers, call `super().reset(seed=seed)` first and draw only from "
                "`self.np_random`; or pass `share_starts=False` to GRPO to go without shared starts, as with a wrapper that "
                "does not reset at every end of an episode (Atari's `EpisodicLifeEnv`).",
                UserWarning,
                stacklevel=2,
            )

    def _stop_sharing(self, error: Exception, env_idx: int | None = None) -> None:
        """
        Go on without shared starts, after a reset with a seed has failed.

        :param error: What the reset raised
        :param env_idx: The environment that was reset, None if it was all of them
        """
        self._unshareable = True
        warnings.warn(
            f"The environment {self._env_name(env_idx or 0)!r} cannot be reset with a seed, {type(error).__name__}: "
            f"{error}. Training goes on without shared starts: the members of a group start from different states. Let "
            "`reset(seed=...)` work at any time, also right after a reset; or pass `share_starts=False` to GRPO to "
            "silence this warning.",
            UserWarning,
            stacklevel=2,
        )

    def _env_name(self, env_idx: int) -> str:
        """
        What a user calls the environment.

        :param env_idx: Index of the environment
        :return: The id it was registered under, else the name of its class
        """
        if isinstance(self.venv, DummyVecEnv):
            env = self.venv.envs[env_idx]
            return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        try:
            # Not `get_attr("spec")`: a spec that cannot be pickled would kill the worker
            description = str(self.venv.env_method("__str__", indices=[env_idx])[0])
        except Exception:
            return type(self.venv).__name__
        # "<Wrapper<Class<id>>>" or "<Wrapper<Class instance>>"
        innermost = re.search(r"<([^<>]+?)(?: instance)?>+$", description)
        return innermost.group(1) if innermost else description

    # -- the base's own -----------------------------------------------------------------------------------------------

    @property
    def unwrapped(self) -> VecEnv:
        return self.venv.unwrapped

    def close(self) -> None:
        self.venv.close()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        return self.venv.seed(seed)

    def set_options(self, options: list[dict] | dict | None = None) -> None:
        self.venv.set_options(options)

    def render(self, mode: str | None = None) -> np.ndarray | None:
        return self.venv.render(mode=mode)

    def get_images(self) -> Sequence[np.ndarray | None]:
        return self.venv.get_images()

    def has_attr(self, attr_name: str) -> bool:
        return self.venv.has_attr(attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self.venv.get_attr(attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        self.venv.set_attr(attr_name, value, indices)

    def env_method(self, method_name: str, *method_args, indices: VecEnvIndices = None, **method_kwargs) -> list[Any]:
        return self.venv.env_method(method_name, *method_args, indices=indices, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return self.venv.env_is_wrapped(wrapper_class, indices=indices)

    def _reset_seeds(self) -> None:
        self.venv._reset_seeds()

    def _reset_options(self) -> None:
        self.venv._reset_options()

    def _get_indices(self, indices: VecEnvIndices) -> Iterable[int]:
        return self.venv._get_indices(indices)


def _parts(observations: VecEnvObs) -> dict[Any, np.ndarray]:
    """
    The arrays that a batch of observations consists of, without a copy.

    :param observations: An array, or a dict or tuple of arrays
    :return: The arrays by their key or position; a single array under None
    """
    if isinstance(observations, dict):
        return dict(observations)
    if isinstance(observations, tuple):
        return dict(enumerate(observations))
    return {None: observations}


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    # Only floats (and complex numbers) can be NaN, and `equal_nan` fails for some of the other types
    return np.array_equal(left, right, equal_nan=np.issubdtype(left.dtype, np.inexact))


def insert_seeded_vec_env(env: VecEnv) -> VecEnv:
    """
    Place a ``SeededVecEnv`` innermost, right around the base ``VecEnv`` and under all wrappers, in place.

    Does nothing if there is one already.

    :param env: The environment, wrapped or not
    :return: The outermost environment: ``env``, or the new ``SeededVecEnv`` if ``env`` is a base ``VecEnv``
    :raises ValueError: If what is wrapped is no ``VecEnv``
    """
    if isinstance(env, SeededVecEnv):
        return env
    if not isinstance(env, VecEnvWrapper):
        return SeededVecEnv(env)
    wrapper = env
    while isinstance(wrapper.venv, VecEnvWrapper):
        wrapper = wrapper.venv
    if not isinstance(wrapper.venv, VecEnv):
        raise ValueError(
            f"`env` is a {type(wrapper).__name__} around {wrapper.venv!r}, which is no `VecEnv`: derive the class "
            f"{type(wrapper).__name__} from `VecEnv` instead of `VecEnvWrapper`."
        )
    if not isinstance(wrapper.venv, SeededVecEnv):
        wrapper.venv = SeededVecEnv(wrapper.venv)
    return env


def find_seeded_vec_env(env: VecEnv) -> SeededVecEnv:
    """
    Find the ``SeededVecEnv`` under the wrappers of an environment.

    :param env: The environment
    :return: Its ``SeededVecEnv``
    :raises ValueError: If it has none
    """
    innermost = env
    while isinstance(innermost, VecEnvWrapper):
        innermost = innermost.venv
    if not isinstance(innermost, SeededVecEnv):
        raise ValueError(f"No SeededVecEnv in {env!r}: pass the result of `insert_seeded_vec_env(env)`")
    return innermost
