"""
Gymnasium's vector environments (``gym.make_vec``, ``SyncVectorEnv``, ``AsyncVectorEnv``) as SB3's ``VecEnv``.

The two interfaces differ in the moment of a reset. SB3 resets an environment within the last step of its episode. Gymnasium
has three modes, see https://farama.org/Vector-Autoreset-Mode:

- ``SAME_STEP`` is like SB3, with the terminal observation and the last info in ``infos``.
- ``DISABLED`` leaves the reset to the caller, who names the environments in ``options={"reset_mask": mask}``.
- ``NEXT_STEP``, the default, ignores the next action and resets instead. ``SyncVectorEnv`` and ``AsyncVectorEnv`` forget the
  pending reset if the environment is reset with a mask before, so here this mode is like ``DISABLED``. Any other vector
  environment resets with its next step only, see :class:`GymnasiumVecEnv`.
"""

import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_grpo.observations import map_observations, observation_parts

# The values of gymnasium.vector.AutoresetMode, which Gymnasium 1.0 does not have
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"

#: The method ``reset`` of wrappers that keep no state for each environment
STATELESS_RESETS = VectorWrapper.reset, VectorObservationWrapper.reset, DictInfoToList.reset


def wrap_vector_env(env: VectorEnv) -> VecEnv:
    """
    :param env: Vector environment of Gymnasium
    :return: The same environments for SB3, with their returns and lengths logged
    """
    vec_env = GymnasiumVecEnv(env)
    return vec_env if vec_env.env_is_wrapped(Monitor)[0] else VecMonitor(vec_env)


class GymnasiumVecEnv(VecEnv):
    """
    A vector environment of Gymnasium as SB3's ``VecEnv``. Transitions, infos and resets are those that ``DummyVecEnv`` has
    with the same environments.

    There is one exception, of which a warning tells. A vector environment that resets an environment with the step after its
    last one (``NEXT_STEP``) and cannot be told to do it earlier gives each episode one more step. It goes from the terminal
    observation to the end of the episode, its action has no effect, and its reward is 0.

    :param vector_env: The vector environment
    :raises ValueError: If it does not say when it resets, or is an ``AsyncVectorEnv`` in the mode ``NEXT_STEP`` without shared
        memory, which resets twice
    """

    def __init__(self, vector_env: VectorEnv):
        self.vector_env = vector_env
        self._base: Any = vector_env.unwrapped
        self._mode = _autoreset_mode(vector_env)
        #: Whether ``step_wait`` resets environments that are done. If not, the caller does, with :meth:`reset_envs`.
        self.autoreset = True
        self._has_single_envs = isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv))
        stateful = _stateful_wrapper(vector_env)
        self._resets_some = self._mode == DISABLED or (self._has_single_envs and stateful is None)
        # Whether the end of an episode is reported one step late, with the reset
        self._one_step_late = self._mode == NEXT_STEP and not self._resets_some
        #: Why single environments cannot be reset with a seed; ``None`` if they can.
        self.unseeded_because: str | None = None
        if not self._has_single_envs:
            self.unseeded_because = f"{type(self._base).__name__} takes one seed for all its environments"
        elif self._mode == SAME_STEP:
            self.unseeded_because = "its environments reset themselves in AutoresetMode.SAME_STEP"
        elif not self._resets_some:
            self.unseeded_because = f"{stateful} does not take resets of single environments"
        if self._one_step_late:
            instead = "gym.make_vec(..., vectorization_mode='sync')" if stateful is None else f"it without {stateful}"
            warnings.warn(
                f"{vector_env} resets an environment only with the step after the last one of its episode. Each episode gets "
                f"one step more, whose action has no effect and whose reward is 0. Pass {instead} or SB3's "
                "`make_vec_env(...)` to avoid it.",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(vector_env.num_envs, vector_env.single_observation_space, vector_env.single_action_space)
        self._forget_ends()

    def _forget_ends(self) -> None:
        # Episodes that have ended, if their end is reported one step late: which, and with which infos
        self._ended = np.zeros(self.num_envs, dtype=bool)
        self._last_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]

    def reset(self) -> VecEnvObs:
        """
        Reset all environments with the seeds and options that were set by ``seed()`` and ``set_options()``.

        :return: First observations
        :raises ValueError: If environments have different options
        """
        if any(options != self._options[0] for options in self._options):
            raise ValueError(
                f"A vector environment of Gymnasium takes the same options for all environments, got {self._options}"
            )
        seeds = _python_ints(self._seeds)
        observations, infos = self.vector_env.reset(
            seed=seeds if self._has_single_envs else seeds[0],  # type: ignore[arg-type]  # they take a list
            options=self._options[0] or None,
        )
        self.reset_infos = _infos_of_each(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        self._forget_ends()
        return map_observations(np.array, observations)

    def reset_envs(self, env_indices: Sequence[int], seeds: Sequence[int | None]) -> tuple[list[Any], list[dict[str, Any]]]:
        """
        Reset some environments and leave the others as they are.

        :param env_indices: Indices of the environments
        :param seeds: Seed for each of them
        :return: First observation and info of each
        :raises NotImplementedError: If the vector environment resets all or none, or takes one seed for all
        """
        if not self._resets_some or (not self._has_single_envs and any(seed is not None for seed in seeds)):
            raise NotImplementedError(
                f"{self.vector_env} cannot reset the environments {list(env_indices)} with {list(seeds)}"
            )
        seed_of = dict(zip(env_indices, _python_ints(seeds), strict=True))
        all_seeds = [seed_of.get(env_idx) for env_idx in range(self.num_envs)]
        observations, infos = self.vector_env.reset(
            seed=all_seeds if self._has_single_envs else None,  # type: ignore[arg-type]
            options={"reset_mask": np.isin(np.arange(self.num_envs), env_indices)},
        )
        info_of_each = _infos_of_each(infos, self.num_envs)
        for env_idx in env_indices:
            self.reset_infos[env_idx] = info_of_each[env_idx]
        return [_row(observations, env_idx) for env_idx in env_indices], [info_of_each[env_idx] for env_idx in env_indices]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        raw_observations, raw_rewards, terminated, truncated, raw_infos = self.vector_env.step(self._actions)
        # A copy, because vector environments may use the same arrays for the next step
        observations = map_observations(np.array, raw_observations)
        rewards = np.array(raw_rewards, dtype=np.float32)
        dones = np.logical_or(terminated, truncated)
        infos = _infos_of_each(raw_infos, self.num_envs)
        ended = np.flatnonzero(dones).tolist()
        for env_idx in ended:
            if self._mode == SAME_STEP:
                infos[env_idx], self.reset_infos[env_idx] = self._split_infos(infos[env_idx])
            else:
                infos[env_idx]["terminal_observation"] = _row(observations, env_idx)
        for env_idx, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(truncated[env_idx] and not terminated[env_idx])
        if self._one_step_late:
            dones = self._report_late(rewards, dones, infos)
        elif self._resets_some and self._mode != SAME_STEP and self.autoreset and ended:
            for env_idx, observation in zip(ended, self.reset_envs(ended, [None] * len(ended))[0], strict=True):
                for key, batch in observation_parts(observations).items():
                    batch[env_idx] = observation if key is None else observation[key]
        return observations, rewards, dones, infos

    def _split_infos(self, info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        :return: Info of a step in the mode ``SAME_STEP`` that ended an episode, with the terminal observation, and of the
            reset
        """
        if "final_obs" not in info:
            raise ValueError(
                f"{self.vector_env} has AutoresetMode.SAME_STEP, but at the end of an episode `infos` has {sorted(info)}. "
                "Its `step` must return the terminal observations as 'final_obs'; or use SB3's `make_vec_env(...)`."
            )
        last_info = {**info.pop("final_info", {}), "terminal_observation": info.pop("final_obs")}
        return last_info, info

    def _report_late(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> np.ndarray:
        """
        Report the episodes that ended in the last step, and keep the infos of those that end in this one.

        :return: Which episodes to report as ended
        """
        reported = self._ended
        for env_idx in np.flatnonzero(reported).tolist():
            self.reset_infos[env_idx], infos[env_idx] = infos[env_idx], self._last_infos[env_idx]
            self.reset_infos[env_idx].pop("TimeLimit.truncated")
            rewards[env_idx] = 0.0
        self._ended = dones
        for env_idx in np.flatnonzero(dones).tolist():
            self._last_infos[env_idx], infos[env_idx] = infos[env_idx], {"TimeLimit.truncated": False}
        return reported

    def close(self) -> None:
        self.vector_env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        images: Any = self.vector_env.render()
        return list(images)

    def has_attr(self, attr_name: str) -> bool:
        # A worker of AsyncVectorEnv that is asked for a missing attribute ends.
        if self._has_single_envs:
            return all(self._base.call("has_wrapper_attr", attr_name))
        return hasattr(self._base, attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Attribute of each environment. An object that simulates them all at once has one for all."""
        if not self.has_attr(attr_name):
            raise AttributeError(f"The environments of {self.vector_env} have no attribute {attr_name!r}")
        if self._has_single_envs:
            values = self._base.call("get_wrapper_attr", attr_name)  # unlike their get_attr, this does not call a method
        else:
            values = [getattr(self._base, attr_name)] * self.num_envs
        return [values[env_idx] for env_idx in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of each environment."""
        env_indices = list(self._get_indices(indices))
        is_for_all = len(env_indices) == self.num_envs
        if self._has_single_envs:
            before = [None] * self.num_envs if is_for_all else self.get_attr(attr_name)
            values = [value if env_idx in env_indices else each for env_idx, each in enumerate(before)]
            self._base.set_attr(attr_name, values)
        elif is_for_all:
            setattr(self._base, attr_name, value)
        else:
            raise NotImplementedError(f"{self._base} has one {attr_name!r} for all environments, not for {env_indices} alone")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each environment."""
        env_indices = list(self._get_indices(indices))
        if isinstance(self._base, SyncVectorEnv):
            envs = [self._base.envs[env_idx] for env_idx in env_indices]
            return [env.get_wrapper_attr(method_name)(*method_args, **method_kwargs) for env in envs]
        if not self._has_single_envs or not self.has_attr(method_name):
            raise AttributeError(f"The environments of {self.vector_env} have no method {method_name!r}")
        if len(env_indices) < self.num_envs or method_name in ("reset", "step", "close"):
            raise NotImplementedError(f"AsyncVectorEnv cannot call {method_name!r} of the environments {env_indices}")
        return list(self._base.call(method_name, *method_args, **method_kwargs))

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """
        Whether environments are in a wrapper. Those of ``AsyncVectorEnv`` are asked for the names of their classes, because an
        environment may not be sent between processes.
        """
        env_indices = self._get_indices(indices)
        if isinstance(self._base, SyncVectorEnv):
            return [is_wrapped(self._base.envs[env_idx], wrapper_class) for env_idx in env_indices]
        if isinstance(self._base, AsyncVectorEnv):
            names = [re.findall(r"<(\w+)", description) for description in self._base.call("__str__")]
            return [wrapper_class.__name__ in names[env_idx] for env_idx in env_indices]
        return [False for _ in env_indices]


def _autoreset_mode(vector_env: VectorEnv) -> str:
    """:return: The value of the environments' ``AutoresetMode``"""
    mode = vector_env.metadata.get("autoreset_mode")
    value = getattr(mode, "value", mode)
    base: Any = vector_env.unwrapped
    if value not in (NEXT_STEP, SAME_STEP, DISABLED):
        raise ValueError(
            f"{vector_env} does not say when it resets an environment, metadata['autoreset_mode'] is {mode!r}: set it to a "
            "member of gymnasium.vector.AutoresetMode (Gymnasium 1.1 and later), or use SB3's `make_vec_env(...)`."
        )
    if value == NEXT_STEP and isinstance(base, AsyncVectorEnv) and not base.shared_memory:
        raise ValueError(
            f"{vector_env} with shared_memory=False and AutoresetMode.NEXT_STEP resets twice: pass "
            "autoreset_mode=AutoresetMode.DISABLED or shared_memory=True to AsyncVectorEnv, or use SB3's `make_vec_env(...)`."
        )
    return value


def _stateful_wrapper(vector_env: VectorEnv) -> str | None:
    """
    :return: Name of the first wrapper with a ``reset`` of its own. Those of Gymnasium do not support masks:
        ``NormalizeObservation`` refuses them, and ``NormalizeReward`` and ``RecordEpisodeStatistics`` then forget the episodes
        of all environments.
    """
    while isinstance(vector_env, VectorWrapper):
        if type(vector_env).reset not in STATELESS_RESETS:
            return type(vector_env).__name__
        vector_env = vector_env.env
    return None


def _python_ints(seeds: Sequence[int | None]) -> list[int | None]:
    return [None if seed is None else int(seed) for seed in seeds]


def _row(observations: Any, env_idx: int) -> Any:
    """A copy of the observation of one environment."""
    return map_observations(lambda part: deepcopy(part[env_idx]), observations)


def _infos_of_each(infos: Any, n_envs: int) -> list[dict[str, Any]]:
    """
    :return: Info of each environment, from a dictionary of arrays. For ``"key"``, ``"_key"`` says which environments have it
    """
    if isinstance(infos, list):  # DictInfoToList
        return [dict(info) for info in infos]
    info_of_each: list[dict[str, Any]] = [{} for _ in range(n_envs)]
    for key, values in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        has_key = infos.get(f"_{key}", np.ones(n_envs, dtype=bool))
        if isinstance(values, dict):
            # Terminal observations of a Dict space are dictionaries of arrays too
            values = _infos_of_each(values, n_envs)
        for env_idx in np.flatnonzero(has_key).tolist():
            value = deepcopy(values[env_idx])
            info_of_each[env_idx][key] = value.item() if isinstance(value, np.generic) else value
    return info_of_each
