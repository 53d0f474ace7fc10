"""The worker: some of the environments in a process of their own, and a policy that acts in them."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import ray
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_grpo.collection import EnvStep, run_policy
from sb3_grpo.observations import map_observations
from sb3_grpo.persistence import VERSION
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.starts import Ledger, SeededVecEnv
from sb3_grpo.starts.adapters import DummyVecEnvAdapter
from sb3_grpo.validation import check_finite


class Description(NamedTuple):
    """Spaces of the environments that a worker has built, its process id, and the IP address of its machine."""

    observation_space: spaces.Space
    action_space: spaces.Space
    pid: int
    node: str


def merged(function: Callable[..., np.ndarray], steps: Sequence[EnvStep]) -> EnvStep:
    """:return: What a function makes of the arrays of several steps, and the list of their infos"""
    *arrays, infos = zip(*steps, strict=True)
    return EnvStep._make([*(map_observations(function, *each) for each in arrays), list(infos)])


class RolloutWorker:
    """The environments of a worker. The first has the index ``first_env`` among all."""

    venv: DummyVecEnv
    adapter: DummyVecEnvAdapter

    def __init__(self, first_env: int = 0):
        self.first_env = first_env
        self.policy: ActorPolicy | None = None
        self.make_policy = b""

    def build(self, env_fns: list[bytes], version: str, path: Sequence[str] = ()) -> Description:
        """Build the environments from pickled functions; ``path`` are further folders with modules. Check the version."""
        node = ray.util.get_node_ip_address()
        if version != VERSION:
            raise ValueError(f"Node {node} has sb3-grpo {VERSION}, and the model learns with {version}: install the same.")
        sys.path += [folder for folder in path if folder not in sys.path]
        th.set_num_threads(1)
        self.venv = venv = DummyVecEnv([cloudpickle.loads(env_fn) for env_fn in env_fns])
        self.adapter = DummyVecEnvAdapter(venv, self.first_env)
        return Description(venv.observation_space, venv.action_space, os.getpid(), node)

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """:return: Result of a method of the worker, or of the ``VecEnv`` if that alone has it"""
        return getattr(self if hasattr(self, method) else self.venv, method)(*args, **kwargs)

    def reset(self, seeds: list[int | None], options: list[dict[str, Any]]) -> tuple[VecEnvObs, list[dict[str, Any]]]:
        """:return: First observations and infos"""
        self.venv._seeds, self.venv._options = list(seeds), list(options)
        return self.venv.reset(), self.venv.reset_infos

    def reset_envs(self, seeds: dict[int, int | None], indices: list[int]) -> list[tuple[Any, dict[str, Any]]]:
        """:return: First observation and info of some environments, from seeds by their index among all"""
        resets = ((env_idx, self.adapter.reset_env(env_idx, seeds[self.first_env + env_idx])) for env_idx in indices)
        return [(observation, self.venv.reset_infos[env_idx]) for env_idx, observation in resets]

    def step(self, actions: Any, autoreset: bool) -> tuple[Any, ...]:
        """:return: Result of a step of the ``VecEnv``, and the info of each environment's last reset"""
        self.adapter.step_async(actions)
        return *self.adapter.step_wait((lambda _: None) if autoreset else None), self.venv.reset_infos

    def restore(self, seeds: list[int | None], actions: list[list[Any]]) -> VecEnvObs | None:
        """
        Bring the environments to where those of a lost worker were: reset with these seeds, and after these actions.

        :return: Their observations; ``None`` if an episode has ended, unlike that of the lost worker
        """
        has_ended = False
        for env_idx, (env, seed, taken) in enumerate(zip(self.venv.envs, seeds, actions, strict=True)):
            observation = self.adapter.reset_env(env_idx, seed)
            for action in taken:
                observation, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    has_ended = True
                    break
            self.venv._save_obs(env_idx, observation)
        return None if has_ended else self.venv._obs_from_buf()

    def collect(
        self,
        policy: tuple[bytes, dict[str, np.ndarray]],
        obs: VecEnvObs,
        states: np.ndarray,
        ledger: Ledger,
        share_starts: bool,
        seed: int,
        *settings: Any,
    ) -> tuple[EnvStep, Ledger, int, list[str]]:
        """
        Let a policy act from the present observations and states of its memory, with a seed for its random numbers, and the
        other arguments of :func:`~sb3_grpo.collection.run_policy`. The policy comes as a pickled function that makes it, used
        if it is another one than last time, and its weights.

        :return: All steps in one, with the steps as the first axis of each array; the ledger, the number of starts that did
            not begin like their group's first member, and warnings
        """
        make_policy, weights = policy
        if self.policy is None or make_policy != self.make_policy:
            self.policy, self.make_policy = cloudpickle.loads(make_policy)().to("cpu"), make_policy
        self.policy.load_state_dict({name: th.as_tensor(np.array(array)) for name, array in weights.items()})
        obs, states = map_observations(np.array, obs), np.array(states)  # what Ray delivers cannot be written to
        set_random_seed(seed)
        starts = SeededVecEnv(self.venv, ledger, share_starts, self.adapter)
        steps = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _, _, step in run_policy(self.policy, starts, obs, states, *settings):
                # The policy acts on observations before the model has seen them.
                check_finite("observation", step.new_obs, settings[-1], step.position.steps, self.first_env)
                steps.append(step)
        messages = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
        return merged(lambda *arrays: np.stack(arrays), steps), ledger, starts.mismatches, messages
