"""The steps of a rollout: a policy acts in a vectorised environment, in this process or in a worker."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_grpo.fast_actor import actor
from sb3_grpo.observations import map_observations, take_observations
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.start_queue import StartQueue
from sb3_grpo.starts import SeededVecEnv, find_seeded_vec_env


class Step(NamedTuple):
    """
    One step of all environments.

    :param obs_tensor: Observations before the step, as the policy got them
    :param actions: Actions as sampled, shape ``(n_envs, *action_shape)``
    :param clipped_actions: Actions as the environments took them, same shape
    :param log_probs: Log-probabilities of the actions, shape ``(n_envs,)``
    :param features: Output of the policy's features extractor, shape ``(n_envs, features_dim)``, if it is known
    :param start_indices: Index of the start of each trajectory, before the step, shape ``(n_envs,)``
    :param new_obs: Observations after the step, shape ``(n_envs, *obs_shape)`` or a dict of such
    :param rewards: Rewards, shape ``(n_envs,)``
    :param dones: Whether the episode ended, shape ``(n_envs,)``
    :param infos: Info of each environment
    """

    obs_tensor: th.Tensor | dict[str, th.Tensor]
    actions: np.ndarray
    clipped_actions: np.ndarray
    log_probs: th.Tensor
    features: th.Tensor | None
    start_indices: np.ndarray
    new_obs: VecEnvObs
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]


class Infos:
    """
    The infos of a rollout, column by column. A key that all of them have, with numbers of one type, becomes an array.

    :param infos: Info of each environment, step by step
    """

    def __init__(self, infos: list[list[dict[str, Any]]]):
        self.shape = len(infos), len(infos[0])
        self.arrays: dict[str, tuple[type, np.ndarray]] = {}
        self.others: dict[tuple[int, int], dict[str, Any]] = {}
        for key in dict.fromkeys(key for step in infos for info in step for key in info):
            values = [info.get(key) for step in infos for info in step]
            kind = type(values[0])
            if kind in (bool, int, float, np.float32, np.float64) and all(type(value) is kind for value in values):
                self.arrays[key] = kind, np.array(values).reshape(self.shape)
                continue
            for t, step in enumerate(infos):
                for env, info in enumerate(step):
                    if key in info:
                        self.others.setdefault((t, env), {})[key] = info[key]

    def at(self, t: int) -> list[dict[str, Any]]:
        """
        :param t: Step of the rollout
        :return: Info of each environment
        """
        columns = [map(kind, array[t].tolist()) for kind, array in self.arrays.values()]
        rows = [dict(zip(self.arrays, values, strict=True)) for values in zip(*columns, strict=True)]
        rows = rows or [{} for _ in range(self.shape[1])]
        for env, row in enumerate(rows):
            row.update(self.others.get((t, env), {}))
        return rows


class Collected(NamedTuple):
    """
    A rollout, or the part that one worker has collected: ``n`` environments over ``n_steps``.

    :param obs: Observations before each step and after the last, shape ``(n_steps + 1, n, *obs_shape)`` or a dict of such
    :param actions: Actions as sampled, shape ``(n_steps, n, *action_shape)``
    :param log_probs: Their log-probabilities, shape ``(n_steps, n)``
    :param starts: Index of each trajectory's start, before each step and after the last, shape ``(n_steps + 1, n)``
    :param rewards: Rewards, shape ``(n_steps, n)``
    :param dones: Whether the episode ended, shape ``(n_steps, n)``
    :param infos: Infos, for each worker
    :param queue: Queue after the last step; only the positions of this worker are valid
    :param mismatches: Number of starts that did not begin like their group's first member
    :param warnings: Warnings of the worker
    """

    obs: Any
    actions: np.ndarray
    log_probs: np.ndarray
    starts: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[Infos]
    queue: StartQueue
    mismatches: int
    warnings: list[str]

    @classmethod
    def joined(cls, parts: "Sequence[Collected]") -> "Collected":
        """
        :param parts: The part of each worker
        :return: The whole rollout; its queue is that of the first worker
        """

        def along_envs(*arrays: np.ndarray) -> np.ndarray:
            return np.concatenate(arrays, axis=1)

        *transitions, infos, queues, mismatches, warnings = zip(*parts, strict=True)
        arrays = (map_observations(along_envs, *each) for each in transitions)
        return cls._make([*arrays, list(chain(*infos)), queues[0], sum(mismatches), list(chain(*warnings))])


def take_steps(
    policy: ActorPolicy,
    env: VecEnv,
    obs: VecEnvObs,
    n_steps: int,
    sde_sample_freq: int,
    num_timesteps: int,
) -> Iterator[Step]:
    """
    :param policy: Policy that acts
    :param env: Environments
    :param obs: Present observations
    :param n_steps: Number of steps
    :param sde_sample_freq: Number of steps between two noise samples of gSDE; -1 for one sample per rollout
    :param num_timesteps: Number of transitions before the first step, for messages
    :return: The steps, each taken when it is asked for
    :raises ValueError: If the output of the policy is not finite
    """
    policy.set_training_mode(False)
    act, device, seeded_env = actor(policy), policy.device, find_seeded_vec_env(env)
    if policy.use_sde:
        policy.reset_noise(env.num_envs)
    for n in range(n_steps):
        if policy.use_sde and sde_sample_freq > 0 and n % sde_sample_freq == 0:
            policy.reset_noise(env.num_envs)
        obs_tensor = obs_as_tensor(obs, device)  # type: ignore[arg-type]
        with th.no_grad():
            actions, log_probs, features = act(obs_tensor)
        check_policy_output(log_probs, num_timesteps + n * env.num_envs)
        sampled = actions.cpu().numpy()
        clipped = policy.within_bounds(sampled)
        starts = seeded_env.start_indices  # the step may begin other trajectories
        obs, rewards, dones, infos = env.step(clipped)
        yield Step(obs_tensor, sampled, clipped, log_probs, features, starts, obs, rewards, dones, infos)


def check_policy_output(log_probs: th.Tensor, num_timesteps: int) -> None:
    """
    :param log_probs: Log-probabilities of the sampled actions, shape ``(n_envs,)``
    :param num_timesteps: Number of transitions so far
    :raises ValueError: If one of them is NaN or infinite
    """
    if not math.isfinite(log_probs.sum().item()):
        raise ValueError(
            f"The output of the policy is not finite after {num_timesteps} timesteps: the sampled actions have "
            f"log-probabilities {log_probs.tolist()}. Check the weights and the features extractor."
        )


def replay_steps(collected: Collected, policy: ActorPolicy, seeded_env: SeededVecEnv) -> Iterator[Step]:
    """
    :param collected: A rollout that workers have collected
    :param policy: Policy that acted
    :param seeded_env: The environments, which learn with each step which trajectories run
    :return: Its steps, as :func:`take_steps` would have given them
    """
    n_steps = len(collected.rewards)
    clipped = policy.within_bounds(collected.actions)
    log_probs = th.as_tensor(collected.log_probs)
    obs_tensors = obs_as_tensor(collected.obs, policy.device)
    arrived = 0
    try:
        for t in range(n_steps):
            seeded_env.start_indices = collected.starts[t + 1]
            arrived = t + 1
            yield Step(
                take_observations(obs_tensors, t),
                collected.actions[t],
                clipped[t],
                log_probs[t],
                None,
                collected.starts[t],
                take_observations(collected.obs, t + 1),
                collected.rewards[t],
                collected.dones[t],
                [info for infos in collected.infos for info in infos.at(t)],
            )
    finally:
        if arrived < n_steps:  # a callback has stopped the training, and the environments are ahead of it
            seeded_env.stepped_while_detached = True
