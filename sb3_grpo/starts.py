"""
Shared starts: the innermost ``VecEnv``, which hands out the starts of the queue.

The members of a group start from the same initial state, in any environment and at any time. SB3 has no means for this:
``VecEnv.seed`` gives each environment another seed, for one reset only, and the automatic reset at the end of an episode
passes no seed.

This module and :mod:`sb3_grpo.resets` rely on the following private or undocumented parts of SB3. ``tests/test_starts.py``
has a test for each of them, which fails when SB3 changes it:

- ``VecEnv._seeds`` holds the seeds of the next ``reset()``, which forgets them.
- ``DummyVecEnv.envs`` holds the environments; after the last step of an episode their ``reset()`` gets no argument.
- ``SubprocVecEnv.remotes`` and ``.processes`` hold the pipes to the workers and the workers, in the order of environments.
- A worker answers ``("reset", (seed, options))`` with an observation and an info, and repeats that info with each step.
- ``SubprocVecEnv.waiting`` says whether answers to a step are due; ``close()`` does nothing if ``.closed`` is true.
"""

import inspect
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_grpo.observations import observation_parts, same_values
from sb3_grpo.resets import (
    TAKE_A_SEED,
    DeferredReset,
    EnvironmentFault,
    SeededSubprocVecEnv,
    WatchedPipe,
    insert_resets,
    reset_workers,
    stop_workers,
)
from sb3_grpo.start_queue import Start, StartQueue

#: A function that checks what the environments return before a wrapper sees it: observations, and after a step also rewards,
#: dones and infos.
Check = Callable[..., None]


def _delegated(name: str) -> Any:
    """A method or an attribute of the base ``VecEnv``."""
    return property(lambda self: getattr(self.venv, name), lambda self, value: setattr(self.venv, name, value))


class CollectingVecEnv(VecEnv):
    """A ``VecEnv`` whose workers collect whole rollouts, and reset their environments by themselves."""

    n_workers: int
    #: Index of the worker of each environment
    worker_of_env: list[int]

    @abstractmethod
    def collect(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`sb3_grpo.distributed.RayVecEnv.collect`."""


class SeededVecEnv(VecEnv):
    """
    The innermost ``VecEnv``, which resets each environment with the seed of the next start of a ``StartQueue``.

    Until ``attach()`` it behaves like the base ``VecEnv``, so ``evaluate_policy(model, model.get_env())`` does not evaluate on
    repeated starts.

    It is not a ``VecEnvWrapper``, because ``sync_envs_normalization`` walks the wrappers of the training and the evaluation
    environment in parallel, and only the former has this one. ``isinstance()`` sees the class of the base too, because
    ``EvalCallback`` warns if the two environments have different classes.

    :param venv: The base ``VecEnv``
    :param part: Part of the queue from which its environments take their starts, if the queue has several
    :param n_parts: Number of parts of the queue. A :class:`CollectingVecEnv` has one for each worker
    :raises ValueError: If ``venv`` is a ``VecEnvWrapper`` or is already seeded, if the ``reset`` of an environment in this
        process takes no seed, or if a ``Monitor`` allows no early resets in a ``SubprocVecEnv``
    """

    num_envs: int = _delegated("num_envs")
    observation_space: spaces.Space = _delegated("observation_space")
    action_space: spaces.Space = _delegated("action_space")
    reset_infos: list[dict[str, Any]] = _delegated("reset_infos")
    render_mode: str | None = _delegated("render_mode")
    metadata: dict[str, Any] = _delegated("metadata")
    _seeds: list[int | None] = _delegated("_seeds")
    _options: list[dict[str, Any]] = _delegated("_options")
    unwrapped: Any = _delegated("unwrapped")
    close: Any = _delegated("close")
    seed: Any = _delegated("seed")
    set_options: Any = _delegated("set_options")
    render: Any = _delegated("render")
    get_images: Any = _delegated("get_images")
    has_attr: Any = _delegated("has_attr")
    get_attr: Any = _delegated("get_attr")
    set_attr: Any = _delegated("set_attr")
    env_method: Any = _delegated("env_method")
    env_is_wrapped: Any = _delegated("env_is_wrapped")

    def __init__(self, venv: VecEnv, part: int = 0, n_parts: int = 1):
        # VecEnv.__init__ is not called, because the attributes that it sets belong to the base.
        if isinstance(venv, (VecEnvWrapper, SeededVecEnv)):
            raise ValueError(f"SeededVecEnv goes around a base VecEnv, got {venv!r}: use `insert_seeded_vec_env(env)`")
        if isinstance(venv, DummyVecEnv):
            for env_idx, env in enumerate(venv.envs):
                _require_seed_argument(env_idx, env)
        if isinstance(venv, SubprocVecEnv) and not isinstance(venv.remotes[0], WatchedPipe):
            _require_early_resets(venv)
            venv.remotes = tuple(map(WatchedPipe, venv.remotes, venv.processes, range(venv.num_envs)))
        self.venv = venv
        self.start_queue: StartQueue | None = None
        #: Index of the start of each environment's trajectory, -1 if it is not from the queue, shape (n_envs,). The array is
        #: replaced and never modified, so callers may keep it.
        self.start_indices: np.ndarray = np.full(venv.num_envs, -1, dtype=np.int64)
        #: Number of starts whose first observation differed from that of their group's first member.
        self.mismatches = 0
        self._stepped_while_detached = False
        self._lists_after_reset = venv._seeds, venv._options
        #: Whether resets get the seed of their start
        self.share_starts = False
        self._resets_single_envs = True
        # The part of the queue from which each environment takes its starts
        self._parts, self._n_parts = [part] * venv.num_envs, n_parts
        if isinstance(venv, CollectingVecEnv):
            self._parts, self._n_parts = venv.worker_of_env, venv.n_workers
        self._check: Check | None = None
        self._last_queue: StartQueue | None = None
        self._streams_coincide = False
        self._seeds_apart: list[int | None] | None = None
        self._warned: set[str] = set()
        # For each part of the queue its current group, and the first observation of that group
        self._in_view: dict[int, tuple[int, dict[Any, np.ndarray]]] = {}

    @property  # type: ignore[misc]  # read-only, unlike object's
    def __class__(self) -> Any:
        return self.venv.__class__

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle refuses to restore an object whose `__class__` is not its type.
        return SeededVecEnv, (self.venv,), self.__dict__.copy()

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this class does not have. While a copy is built, `venv` itself may be missing, and
        # the methods of the copy and pickle protocols must not be those of the base.
        if name == "venv" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.venv, name)

    @property
    def stepped_while_detached(self) -> bool:
        """
        Whether the environments were stepped or reset without the present queue since the last ``reset()`` with it. The
        observation and the starts that the algorithm knows are then outdated.
        """
        # Every reset of a base makes new lists of seeds and options, also one that does not come through this object.
        seeds, options = self._lists_after_reset
        was_reset = self.venv._seeds is not seeds and self.venv._options is not options
        return self._stepped_while_detached or was_reset

    @stepped_while_detached.setter
    def stepped_while_detached(self, value: bool) -> None:
        self._stepped_while_detached = value

    def attach(self, queue: StartQueue, share_starts: bool = True, check: Check | None = None) -> None:
        """
        Take the starts of all resets from a queue until ``detach()``. Episodes in progress continue, unless they belong to
        another queue: then the environments have to be reset.

        :param queue: Queue of the run
        :param share_starts: Whether resets get the seed of their start. If not, starts are only numbered
        :param check: Function that is called with what the environments return, and raises an error if it is invalid
        """
        queue.split(self._n_parts)
        if queue is not self._last_queue:
            # Numbers and first observations of another queue do not apply to this one.
            self._last_queue = queue
            self._in_view = {}
            self._forget_starts()
        if self.start_queue is None:
            if isinstance(self.venv, DummyVecEnv):
                self.venv.envs = [DeferredReset(env, env_idx) for env_idx, env in enumerate(self.venv.envs)]
            elif isinstance(self.venv, SeededSubprocVecEnv):
                self.venv.defers_resets = True
        self.start_queue = queue
        self.share_starts = share_starts and self._resets_single_envs
        self._check = check

    def count_mismatches(self, number: int, messages: Sequence[str]) -> None:
        """
        :param number: Number of mismatches that workers have found
        :param messages: Their warnings, each printed once
        """
        self.mismatches += number
        for message in dict.fromkeys(messages):
            if message not in self._warned:
                self._warned.add(message)
                warnings.warn(message, UserWarning, stacklevel=2)

    def detach(self) -> None:
        """Be transparent again."""
        if self.start_queue is not None:
            if isinstance(self.venv, DummyVecEnv):
                self.venv.envs = [env.env for env in self.venv.envs]  # type: ignore[attr-defined]
            elif isinstance(self.venv, SeededSubprocVecEnv):
                self.venv.defers_resets = False
            self._seed_apart()
        self.start_queue = None
        self._check = None

    def _seed_apart(self) -> None:
        # Members of one group leave equal random generators behind: without other seeds, later resets would draw equal starts,
        # also if the base is reset directly. Seeds that a user has set take precedence.
        is_free = all(seed is None for seed in self.venv._seeds) or self.venv._seeds is self._seeds_apart
        if self._streams_coincide and self._last_queue is not None and is_free:
            seeds, options = self._lists_after_reset
            is_known = self.venv._seeds is seeds
            self.venv.seed(self._last_queue.seed_apart())
            self._seeds_apart = self.venv._seeds
            if is_known:
                self._lists_after_reset = self.venv._seeds, options

    def reset(self) -> VecEnvObs:
        """
        Reset all environments. While a queue is attached, each gets the seed of the next start, beginning with a new group.

        :return: First observations
        :raises EnvironmentFault: If an environment raises an error, or its process ends
        """
        if self.start_queue is None:
            self._forget_starts()
            return self._reset_base(None)
        self.start_queue.begin_group()
        starts = [self.start_queue.take(part) for part in self._parts]
        observations = self._reset_base([start.seed for start in starts] if self.share_starts else None)
        self.start_indices = np.array([start.index for start in starts], dtype=np.int64)
        self._stepped_while_detached = False
        if self.share_starts:
            for env_idx, start in enumerate(starts):
                self._verify(start, env_idx, observations)
        if self._check is not None:
            self._check(observations)
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        if self.start_queue is None:
            self._forget_starts()
        with self._all_or_no_answers():
            self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """
        Wait for the step. While a queue is attached, reset each environment that is done with the seed of the next start.

        :return: Observations, rewards, dones and infos. The observations of environments that are done are those of the reset
        :raises EnvironmentFault: If an environment raises an error, its process ends, or its observation has another shape
        """
        with self._all_or_no_answers():
            observations, rewards, dones, infos = self.venv.step_wait()
            if self.start_queue is not None and np.any(dones):
                # A copy, because the base may own these arrays.
                observations = deepcopy(observations)
                self._begin_episodes(np.flatnonzero(dones).tolist(), observations, self.start_queue)
        if self._check is not None:
            self._check(observations, rewards, dones, infos)
        return observations, rewards, dones, infos

    @contextmanager
    def _all_or_no_answers(self) -> Iterator[None]:
        """
        Stop the workers if an error or an interrupt leaves some answers unread, which would be mistaken for later ones.

        :raises EnvironmentFault: If the workers were stopped before
        """
        if not isinstance(self.venv, SubprocVecEnv):
            yield
            return
        if self.venv.closed:
            raise EnvironmentFault(0, "has no process: all workers were closed, or were stopped after an earlier error")
        try:
            yield
        except BaseException:
            stop_workers(self.venv)
            raise

    def _forget_starts(self) -> None:
        self._stepped_while_detached = True
        self.start_indices = np.full(self.num_envs, -1, dtype=np.int64)

    def _reset_base(self, seeds: list[int] | None) -> VecEnvObs:
        """Reset all environments with these seeds, or with those that were set by ``seed()``."""
        if seeds is not None:
            self.venv._seeds = list(seeds)
        else:
            self._seed_apart()
        self._streams_coincide = seeds is not None
        with self._all_or_no_answers():
            if isinstance(self.venv, SubprocVecEnv) and self.venv.waiting:
                SubprocVecEnv.step_wait(self.venv)  # discards a step that was interrupted
            observations = self.venv.reset()
        self._lists_after_reset = self.venv._seeds, self.venv._options
        return observations

    def _begin_episodes(self, env_indices: list[int], observations: VecEnvObs, queue: StartQueue) -> None:
        """Start the next episode of the environments that are done, and overwrite their observations."""
        starts = [queue.take(self._parts[env_idx]) for env_idx in env_indices]
        start_indices = self.start_indices.copy()
        start_indices[env_indices] = [start.index for start in starts]
        self.start_indices = start_indices
        if self.share_starts or isinstance(self.venv, (DummyVecEnv, SeededSubprocVecEnv)):
            seeds = [start.seed if self.share_starts else None for start in starts]
            resets = self._reset_some(env_indices, seeds)
            if resets is None:
                return
            insert_resets(self.venv, env_indices, resets, observations)
        if self.share_starts:
            self._streams_coincide = True
            for env_idx, start in zip(env_indices, starts, strict=True):
                self._verify(start, env_idx, observations)

    def _reset_some(self, env_indices: list[int], seeds: Sequence[int | None]) -> list[tuple[Any, dict]] | None:
        """
        :param env_indices: Indices of the environments
        :param seeds: Seed of each reset; ``None`` for none
        :return: First observation and info of each; ``None`` if a ``VecEnv`` of another class cannot reset single environments
        """
        if isinstance(self.venv, SubprocVecEnv):
            return reset_workers(self.venv, env_indices, seeds)
        envs_and_seeds = zip(env_indices, seeds, strict=True)
        if isinstance(self.venv, DummyVecEnv):
            return [self.venv.envs[env_idx].reset(seed=seed) for env_idx, seed in envs_and_seeds]
        try:
            answers = [self.venv.env_method("reset", seed=seed, indices=[env_idx]) for env_idx, seed in envs_and_seeds]
            resets: list[Any] = [next(iter(answer), None) for answer in answers]
            for reset in resets:
                if not isinstance(reset, (list, tuple)) or len(reset) != 2:
                    raise TypeError(f"it returned {reset!r} instead of an observation and an info")
            return resets
        except (AttributeError, NotImplementedError, TypeError) as error:
            self.share_starts = self._resets_single_envs = False
            warnings.warn(
                f"{type(self.venv).__name__}.env_method cannot reset a single environment with a seed "
                f"({type(error).__name__}: {error}), so the members of a group do not share their starts. Use `DummyVecEnv` "
                "or `SeededSubprocVecEnv`, or pass share_starts=False to GRPO.",
                UserWarning,
                stacklevel=2,
            )
            return None

    def _verify(self, start: Start, env_idx: int, observations: VecEnvObs) -> None:
        """
        Compare the first observation of an environment with that of the group's first member. The starts of a part are taken
        in order, so only the observation of its current group has to be kept.
        """
        observation = {key: np.array(batch[env_idx]) for key, batch in observation_parts(observations).items()}
        group, first_observation = self._in_view.get(self._parts[env_idx], (-1, {}))
        if start.group != group:
            self._in_view[self._parts[env_idx]] = start.group, observation
            return
        if same_values(observation, first_observation):
            return
        self.mismatches += 1
        if self.mismatches == 1:
            warnings.warn(
                f"The environment {self._env_name(env_idx)!r} does not reproduce its initial state: two calls of "
                "`reset(seed=...)` with the same seed returned different observations, so the members of a group do not share "
                "their start. In the environment and in each of its wrappers, call `super().reset(seed=seed)` first and draw "
                "random numbers only from `self.np_random`. Or pass share_starts=False to GRPO, for example with a wrapper "
                "that does not reset at every end of an episode (Atari's `EpisodicLifeEnv`).",
                UserWarning,
                stacklevel=2,
            )

    def _env_name(self, env_idx: int) -> str:
        """The id of the environment, or the name of its class."""
        try:
            # Not `get_attr("spec")`, because a spec that cannot be pickled would end the worker.
            description = str(self.venv.env_method("__str__", indices=[env_idx])[0])
        except (AttributeError, IndexError, NotImplementedError, TypeError):  # a simulator of many environments at once
            return type(self.venv).__name__
        # "<Wrapper<Class<id>>>" or "<Wrapper<Class instance>>"
        innermost = re.search(r"<([^<>]+?)(?: instance)?>+$", description)
        return innermost.group(1) if innermost else description


class LockedEnvs:
    """
    A context, for example of a callback, in which stepping or resetting the environments raises an error. It can be entered
    repeatedly. The base and the environments of a ``DummyVecEnv`` are locked as well, because users may hold references to
    them.

    :param env: The environments
    :raises RuntimeError: If they are stepped or reset within the context
    """

    def __init__(self, env: SeededVecEnv):
        refused = [(vars(each), name) for each in (env, env.venv) for name in ("step_async", "reset")]
        if isinstance(env.venv, DummyVecEnv):
            single = [getattr(each.unwrapped, "__dict__", {}) for each in env.venv.envs]
            refused += [(attributes, name) for attributes in single for name in ("step", "reset")]
        # With each attribute the value that the object has itself; ``None`` if it has that of its class.
        self._refused = [(attributes, name, attributes.get(name)) for attributes, name in refused]

    def __enter__(self) -> None:
        for attributes, name, _ in self._refused:
            attributes[name] = _refuse_to_move

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the context. If an interrupt has come while it was entered or left, nothing else does this."""
        for attributes, name, own in self._refused:
            if own is None:
                attributes.pop(name, None)
            else:
                attributes[name] = own


def _refuse_to_move(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "A callback stepped or reset the training environment in the course of a rollout: pass `EvalCallback` (or "
        "`evaluate_policy`) a separate environment, for example `make_vec_env('CartPole-v1')`."
    )


def _require_early_resets(venv: SubprocVecEnv) -> None:
    """Raise a ``ValueError`` if a ``Monitor`` would take the second reset of an episode for an early one."""
    if isinstance(venv, SeededSubprocVecEnv) or not venv.has_attr("allow_early_resets"):
        return
    if not all(venv.get_attr("allow_early_resets")):
        raise ValueError(
            "`Monitor(allow_early_resets=False)` does not work in a SubprocVecEnv, whose environments GRPO resets twice per "
            "episode: use `SeededSubprocVecEnv`, or allow_early_resets=True."
        )


def _require_seed_argument(env_idx: int, env: gym.Env) -> None:
    """Raise a ``ValueError`` if the ``reset`` of the environment, or of one of its wrappers, takes no seed."""
    signature = inspect.signature(env.reset)
    parameters = signature.parameters.values()
    if not any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(
            f"Environment {env_idx} cannot be seeded: `{type(env).__name__}.reset{signature}` takes no `seed`. {TAKE_A_SEED}"
        )
    if isinstance(env, gym.Wrapper):
        _require_seed_argument(env_idx, env.env)


def insert_seeded_vec_env(env: VecEnv) -> VecEnv:
    """
    Place a ``SeededVecEnv`` right around the base ``VecEnv``, under all wrappers, unless there is one already.

    :param env: The environment, with or without wrappers
    :return: The outermost environment: ``env``, or the new ``SeededVecEnv`` if ``env`` is a base ``VecEnv``
    :raises ValueError: If the innermost environment is not a ``VecEnv``, or if the ``reset`` of an environment takes no seed
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
    :param env: The environment, with or without wrappers
    :return: The ``SeededVecEnv`` under the wrappers
    :raises ValueError: If there is none
    """
    innermost = env
    while isinstance(innermost, VecEnvWrapper):
        innermost = innermost.venv
    if not isinstance(innermost, SeededVecEnv):
        raise ValueError(f"No SeededVecEnv in {env!r}: pass the result of `insert_seeded_vec_env(env)`")
    return innermost
