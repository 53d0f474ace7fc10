"""
Gymnasium's vector environments (``gym.make_vec``, ``SyncVectorEnv``, ``AsyncVectorEnv``) as SB3's ``VecEnv``.

SB3 resets an environment within the last step of its episode, as the mode ``SAME_STEP`` does. With ``DISABLED`` the caller
resets it, with a mask, and so here with ``NEXT_STEP``, whose own reset that cancels: https://farama.org/Vector-Autoreset-Mode.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_grpo.observations import observation_parts, take_observations

STATELESS_RESETS = VectorWrapper.reset, VectorObservationWrapper.reset, DictInfoToList.reset  # keep nothing of an episode


def wrap_vector_env(env: VectorEnv) -> VecEnv:
    """:return: A vector environment of Gymnasium for SB3, with its returns and lengths logged"""
    vec_env = GymnasiumVecEnv(env)
    return vec_env if vec_env.env_is_wrapped(Monitor)[0] else VecMonitor(vec_env)


class GymnasiumVecEnv(VecEnv):
    """
    A vector environment of Gymnasium as SB3's ``VecEnv``. Transitions, infos and resets are those of ``DummyVecEnv``.

    :param vector_env: The vector environment
    :raises ValueError: If it does not say when it resets, or does so with the step after the last one of an episode only
    """

    def __init__(self, vector_env: VectorEnv):
        self.vector_env: Any = vector_env
        self._base: Any = vector_env.unwrapped
        self._has_single_envs = isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv))
        mode = vector_env.metadata.get("autoreset_mode")
        self._mode = getattr(mode, "value", mode)  # of gymnasium.vector.AutoresetMode, which Gymnasium 1.0 does not have
        if self._mode not in ("NextStep", "SameStep", "Disabled"):
            raise ValueError(
                f"{vector_env} does not say when it resets an environment, metadata['autoreset_mode'] is {mode!r}: set it to "
                "a member of gymnasium.vector.AutoresetMode (Gymnasium 1.1 and later), or use SB3's `make_vec_env(...)`."
            )
        if not isinstance(vector_env, DictInfoToList):
            self.vector_env = DictInfoToList(vector_env)
        takes_masks = self._has_single_envs and getattr(self._base, "shared_memory", True)  # without it, Async resets twice
        obstacle = None if takes_masks else type(self._base).__name__
        while isinstance(vector_env, VectorWrapper):
            obstacle = obstacle if type(vector_env).reset in STATELESS_RESETS else type(vector_env).__name__
            vector_env = vector_env.env
        if self._mode == "NextStep" and obstacle is not None:
            raise ValueError(
                f"{obstacle} in AutoresetMode.NEXT_STEP resets an environment with a step without effect: use SAME_STEP, "
                "SB3's `make_vec_env(...)`, or `gym.make_vec(..., vectorization_mode='sync')` without wrappers."
            )
        self.autoreset = True  #: Whether ``step_wait`` resets environments. If not, the caller does, with ``reset_envs``
        in_step = "its environments reset themselves in AutoresetMode.SAME_STEP" if self._mode == "SameStep" else None
        one_seed = f"{type(self._base).__name__} takes one seed for all its environments"
        #: Why single environments cannot be reset with a seed; ``None`` if they can
        self.unseeded_because = in_step if self._has_single_envs else one_seed
        super().__init__(self._base.num_envs, self.vector_env.single_observation_space, self.vector_env.single_action_space)

    def reset(self) -> VecEnvObs:
        if any(options != self._options[0] for options in self._options):
            raise ValueError(f"A vector environment takes the same options for all environments, got {self._options}")
        observations, self.reset_infos = self._reset(self._seeds, self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        return observations

    def _reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> tuple[Any, list[dict[str, Any]]]:
        ints: Any = [None if seed is None else int(seed) for seed in seeds]
        # Vector environments may use the same arrays again.
        return deepcopy(self.vector_env.reset(seed=ints if self._has_single_envs else ints[0], options=options))

    def reset_envs(self, env_indices: Sequence[int], seeds: Sequence[int | None]) -> tuple[list[Any], list[dict[str, Any]]]:
        """Reset some environments, each with its seed, and leave the others as they are."""
        if not self._has_single_envs and (self._mode == "SameStep" or any(seed is not None for seed in seeds)):
            raise NotImplementedError(f"{self._base} cannot reset the environments {list(env_indices)} with {list(seeds)}")
        seed_of = dict(zip(env_indices, seeds, strict=True))
        mask = np.isin(np.arange(self.num_envs), env_indices)
        observations, infos = self._reset([seed_of.get(env_idx) for env_idx in range(self.num_envs)], {"reset_mask": mask})
        for env_idx in env_indices:
            self.reset_infos[env_idx] = infos[env_idx]
        return [take_observations(observations, i) for i in env_indices], [infos[i] for i in env_indices]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, terminated, truncated, infos = deepcopy(self.vector_env.step(self._actions))
        dones = np.logical_or(terminated, truncated)
        ended = np.flatnonzero(dones).tolist()
        for env_idx in ended:
            if self._mode != "SameStep":
                infos[env_idx]["terminal_observation"] = deepcopy(take_observations(observations, env_idx))
                continue
            self.reset_infos[env_idx] = info = infos[env_idx]
            if "final_obs" not in info:
                raise ValueError(f"`step` of {self._base} must return the terminal observations as 'final_obs'.")
            infos[env_idx] = {"terminal_observation": info.pop("final_obs"), **info.pop("final_info", {})}
        for env_idx, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(truncated[env_idx] and not terminated[env_idx])
        if self._mode != "SameStep" and self.autoreset and ended:
            for env_idx, observation in zip(ended, self.reset_envs(ended, [None] * len(ended))[0], strict=True):
                for key, batch in observation_parts(observations).items():
                    batch[env_idx] = observation if key is None else observation[key]
        return observations, np.array(rewards, dtype=np.float32), dones, infos

    def close(self) -> None:
        self.vector_env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(self.vector_env.render())

    def has_attr(self, attr_name: str) -> bool:
        # A worker of AsyncVectorEnv that is asked for a missing attribute ends.
        return all(self._base.call("has_wrapper_attr", attr_name)) if self._has_single_envs else hasattr(self._base, attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if not self.has_attr(attr_name):
            raise AttributeError(f"The environments of {self.vector_env} have no attribute {attr_name!r}")
        if not self._has_single_envs:
            return [getattr(self._base, attr_name) for _ in self._get_indices(indices)]
        values = self._base.call("get_wrapper_attr", attr_name)  # unlike their get_attr, this does not call a method
        return [values[env_idx] for env_idx in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        env_indices = list(self._get_indices(indices))
        before = [None] * self.num_envs if len(env_indices) == self.num_envs else self.get_attr(attr_name)
        self._base.set_attr(attr_name, [value if i in env_indices else each for i, each in enumerate(before)])

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        env_indices = list(self._get_indices(indices))
        if isinstance(self._base, SyncVectorEnv):
            return [self._base.envs[i].get_wrapper_attr(method_name)(*args, **kwargs) for i in env_indices]
        cannot_call = method_name in ("reset", "step", "close") or len(env_indices) < self.num_envs
        if not self._has_single_envs or cannot_call or not self.has_attr(method_name):
            raise AttributeError(f"{self._base} has no method {method_name!r} of the environments {env_indices}")
        return list(self._base.call(method_name, *args, **kwargs))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        envs = self._base.envs if isinstance(self._base, SyncVectorEnv) else None  # those of workers cannot be asked
        return [envs is not None and is_wrapped(envs[env_idx], wrapper_class) for env_idx in self._get_indices(indices)]
