"""The worker: some of the environments in a process of their own, and a policy that acts in them."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import ray
import torch as th
from gymnasium import spaces
from stable_baselines3.common import monitor
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_grpo.observations import map_observations
from sb3_grpo.persistence import VERSION
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.resets import DeferredReset
from sb3_grpo.start_queue import StartQueue
from sb3_grpo.starts import SeededVecEnv
from sb3_grpo.steps import Collected, Infos, take_steps
from sb3_grpo.validation import check_finite


@dataclass
class History:
    """
    Record that brings an environment back to its present state.

    :param seed: Seed of its last reset; ``None`` if it cannot be brought back
    :param options: Options of that reset
    :param actions: Actions since, in parts of shape ``(n, *action_shape)``
    """

    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    actions: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.actions))

    def add(self, actions: np.ndarray, max_replay: int) -> None:
        """
        :param actions: Further actions, shape ``(n, *action_shape)``
        :param max_replay: Number of actions beyond which the environment is not brought back, and no more are kept
        """
        if len(self) <= max_replay:
            self.actions.append(actions.copy())  # a part of an array would keep the whole array


class Description(NamedTuple):
    """
    A worker that has built its environments.

    :param observation_space: Their observation space
    :param action_space: Their action space
    :param pid: Process id
    :param node: IP address of its machine
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    pid: int
    node: str


class RolloutWorker:
    """
    Some of the environments, in a process of their own.

    :param index: Index of the worker
    :param first_env: Index of its first environment among all
    """

    venv: DummyVecEnv

    def __init__(self, index: int, first_env: int = 0):
        self.index = index
        self.first_env = first_env
        self.seeded: SeededVecEnv | None = None
        self.queue: StartQueue | None = None
        self.policy: ActorPolicy | None = None
        self.make_policy = b""

    def build(self, env_fns: list[bytes], version: str, n_predecessors: int = 0) -> Description:
        """
        :param env_fns: Pickled functions that construct the environments
        :param version: Version of this package where the model learns
        :param n_predecessors: Number of workers that were lost with these environments
        :return: Description of the worker
        :raises ValueError: If this package has another version here
        """
        node = ray.util.get_node_ip_address()
        if version != VERSION:
            raise ValueError(f"Node {node} has sb3-grpo {VERSION}, and the model learns with {version}: install the same.")
        th.set_num_threads(1)
        if n_predecessors > 0:  # Monitor would begin its file anew, and the episodes so far would be lost
            suffix = f".{n_predecessors}.{Monitor.EXT}"
            monitor.ResultsWriter = partial(_results_writer, suffix)  # type: ignore[assignment, misc]
        self.venv = venv = DummyVecEnv([cloudpickle.loads(env_fn) for env_fn in env_fns])
        return Description(venv.observation_space, venv.action_space, os.getpid(), node)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """:return: Result of a method of the ``VecEnv``"""
        return getattr(self.venv, method)(*args, **kwargs)

    def reset(self, seeds: list[int | None], options: list[dict[str, Any]]) -> tuple[VecEnvObs, list[dict[str, Any]]]:
        """:return: First observations and infos"""
        self.venv._seeds, self.venv._options = list(seeds), list(options)
        with self._faults_named():
            return self.venv.reset(), self.venv.reset_infos

    def step(self, actions: Any) -> tuple[Any, ...]:
        """:return: Result of a step of the ``VecEnv``, and the info of each environment's last reset"""
        return *self.venv.step(actions), self.venv.reset_infos

    def restore(self, histories: list[History]) -> list[Any]:
        """
        Bring the environments to where those of another worker were.

        :param histories: History of each; one without a seed is a reset
        :return: Observation of each; ``None`` if its episode has ended
        """
        observations = []
        with self._faults_named():
            for env, history in zip(self.venv.envs, histories, strict=True):
                observation, _ = env.reset(seed=history.seed, **({"options": history.options} if history.options else {}))
                for action in chain(*history.actions):
                    observation, _, terminated, truncated, _ = env.step(action)
                    if terminated or truncated:  # the episode of the lost worker was not over
                        observation = None
                        break
                observations.append(observation)
        return observations

    @contextlib.contextmanager
    def _faults_named(self) -> Iterator[None]:
        # Errors get the index of the environment. No episode may end within this context.
        bare = self.venv.envs
        self.venv.envs = [DeferredReset(env, env_idx) for env_idx, env in enumerate(bare)]
        try:
            yield
        finally:
            self.venv.envs = bare

    def collect(
        self,
        policy: tuple[bytes, dict[str, np.ndarray]],
        obs: VecEnvObs,
        starts: np.ndarray,
        queue: StartQueue,
        share_starts: bool,
        n_steps: int,
        sde_sample_freq: int,
        num_timesteps: int,
        seed: int,
    ) -> Collected:
        """
        :param policy: Pickled function that makes a policy, used if it is another one than last time, and weights
        :param obs: Present observations
        :param starts: Index of the start of each trajectory, shape ``(n,)``
        :param queue: Queue of the run
        :param share_starts: Whether resets get the seed of their start
        :param n_steps: Number of steps
        :param sde_sample_freq: See :func:`~sb3_grpo.steps.take_steps`
        :param num_timesteps: See :func:`~sb3_grpo.steps.take_steps`
        :param seed: Seed of the random numbers
        :return: The transitions
        """
        make_policy, weights = policy
        if self.policy is None or make_policy != self.make_policy:
            self.policy, self.make_policy = cloudpickle.loads(make_policy)().to("cpu"), make_policy
        self.policy.load_state_dict({name: th.as_tensor(np.array(array)) for name, array in weights.items()})
        if self.seeded is None or self.queue is None:
            self.seeded, self.queue = SeededVecEnv(self.venv, self.index, queue.n_parts), queue
        if queue.seed != self.queue.seed:  # another run
            self.queue = queue
        vars(self.queue).update(vars(queue))  # in place, because another queue would be another run for `attach`
        obs = map_observations(np.array, obs)  # what Ray delivers cannot be written to
        set_random_seed(seed)
        before = self.seeded.mismatches
        # The policy acts on observations before the model has seen them
        self.seeded.attach(
            self.queue, share_starts, lambda obs, *_: check_finite("observation", obs, num_timesteps, self.first_env)
        )
        self.seeded.start_indices = np.array(starts)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                steps = list(take_steps(self.policy, self.seeded, obs, n_steps, sde_sample_freq, num_timesteps))
        finally:
            self.seeded.detach()
        return Collected(
            obs=map_observations(lambda *arrays: np.stack(arrays), obs, *(step.new_obs for step in steps)),
            actions=np.stack([step.actions for step in steps]),
            log_probs=np.stack([step.log_probs.numpy() for step in steps]),
            starts=np.stack([*(step.start_indices for step in steps), self.seeded.start_indices]),
            rewards=np.stack([step.rewards for step in steps]),
            dones=np.stack([step.dones for step in steps]),
            infos=[Infos([step.infos for step in steps])],
            queue=self.queue,
            mismatches=self.seeded.mismatches - before,
            warnings=[str(each.message) for each in caught if issubclass(each.category, UserWarning)],
        )


def _results_writer(suffix: str, filename: str = "", **kwargs: Any) -> ResultsWriter:
    """:return: Writer of a file beside that of the lost worker; ``load_results`` reads both"""
    return ResultsWriter(filename.removesuffix(f".{Monitor.EXT}") + suffix, **kwargs)
