"""Collecting a rollout: the policy acts in a vectorised environment, in this process or in workers."""

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch.nn.parameter import is_lazy

from sb3_grpo.arithmetic.choice import choose_actor
from sb3_grpo.buffers import GroupRolloutBuffer
from sb3_grpo.observations import Observations
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.starts import Position, RolloutLost, SeededVecEnv
from sb3_grpo.validation import check_step
from sb3_grpo.vec_wrappers import INSIDE_WORKERS, data_changing_wrapper


class EnvStep(NamedTuple):
    """
    One step of all environments: actions as sampled and their log-probabilities, where the environments were before the step,
    what it returned, further :class:`~sb3_grpo.buffers.Columns` by name, such as ``action_masks`` with masks, and the states
    of the policy's memory after the step. The first axis of all arrays is that of environments; ``infos`` come last.
    """

    actions: np.ndarray
    log_probs: th.Tensor
    position: Position
    new_obs: VecEnvObs
    rewards: np.ndarray
    dones: np.ndarray
    optional: dict[str, np.ndarray]
    new_states: np.ndarray
    infos: list[dict[str, Any]]


#: A step, after the observations before it, as the policy got them, and the actions as the environments took them.
ActedStep = tuple[th.Tensor | dict[str, th.Tensor], np.ndarray, EnvStep]


def collect(
    self: Any, callback: BaseCallback, rollout_buffer: GroupRolloutBuffer, n_rollout_steps: int, starts: SeededVecEnv
) -> Observations | None:
    """
    Fill the buffer. The local names are those of SB3's ``collect_rollouts``, ``self`` among them, because callbacks read them.

    :return: Observations after the last step; ``None`` if the callback asked to stop, and then the last step is kept
    """
    env = starts.env
    normalizer = rollout_buffer.reward_normalizer(env)
    n_steps = 0
    rollout_buffer.reset()
    self.policy.set_training_mode(False)

    callback.on_rollout_start()
    if starts.was_reset or self._last_obs is None:  # by the callback
        starts.ledger = self.ledger
        self._begin_episodes(starts, env.reset)

    workers_act = _workers_act(env, starts)
    last_obs: Any = None
    for each in (_run_in_workers if workers_act else _run_here)(self, starts, n_rollout_steps):
        obs_tensor, clipped_actions, step = each
        actions, log_probs, position, new_obs, rewards, dones, optional, new_states, infos = step
        action_masks = optional.get("action_masks")
        last_obs = self._last_obs if last_obs is None else last_obs
        check_step((new_obs, rewards, dones, infos), self.num_timesteps, position.steps)

        self.num_timesteps += env.num_envs

        given = rewards if normalizer is None else rewards.copy()
        callback.update_locals(locals())
        continue_training = callback.on_step()
        if continue_training is None:
            warnings.warn(
                f"Training ends after {self.num_timesteps} timesteps, because the callback {' or '.join(_names(callback))} "
                "has returned None, which counts as False: return True to go on.",
                stacklevel=4,
            )
        if starts.was_reset:
            raise RuntimeError(
                "A callback reset the training environment in the course of a rollout: pass `EvalCallback` (or "
                "`evaluate_policy`) a separate environment, for example `make_vec_env('CartPole-v1')`."
            )

        self._update_info_buffer(infos, dones)
        n_steps += 1
        stored = rewards
        if normalizer is not None:
            stored = normalizer.get_original_reward()
            if not np.array_equal(rewards, given):
                starts.warn(
                    f"A callback has changed the rewards, and {type(rollout_buffer).__name__} takes those from before "
                    "`VecNormalize`: pass norm_reward=False to `VecNormalize`, or change rewards in a wrapper."
                )
        rollout_buffer.add(last_obs, actions, stored, dones, log_probs, position, infos, **optional)
        last_obs, self._last_states, self._last_episode_starts = new_obs, new_states, dones
        # After `set_random_seed`, trajectories in progress belong to the previous ledger.
        self._last_obs = new_obs if starts.ledger is self.ledger else None
        if not continue_training:
            if workers_act and n_steps < n_rollout_steps:
                self._last_obs = None  # the environments are ahead
            return None
    return last_obs


def _names(callback: BaseCallback, seen: frozenset[int] = frozenset()) -> list[str]:
    """:return: Names of the callbacks in a callback that are not SB3's own, but for those in ``seen``"""
    if isinstance(callback, ConvertCallback):
        return [getattr(callback.callback, "__name__", repr(callback.callback))]
    if id(callback) in seen:
        return []
    seen |= {id(callback)}
    values = [value for name, value in vars(callback).items() if name != "parent"]
    inner = [each for value in values for each in (value if isinstance(value, list) else [value])]
    own = [] if type(callback).__module__.startswith("stable_baselines3.") else [type(callback).__name__]
    return own + [name for each in inner if isinstance(each, BaseCallback) for name in _names(each, seen)]


def prepare_starts(starts: SeededVecEnv, rollout_buffer: GroupRolloutBuffer, chooses_group_size: bool) -> dict[str, float]:
    """Choose how many members the groups to come have, and return what the log says about starts."""
    if not starts.share_starts:
        return {}
    metrics = {"rollout/start_mismatches": float(starts.mismatches)}
    if chooses_group_size:
        starts.ledger.group_size = rollout_buffer.suggested_group_size()
        metrics["rollout/group_size"] = starts.ledger.group_size
    return metrics


def _workers_act(env: VecEnv, starts: SeededVecEnv) -> bool:
    """:return: Whether the workers can collect whole rollouts, and no wrapper changes what they return"""
    if not hasattr(type(starts.venv), "collect_by_workers"):
        return False
    wrapper = data_changing_wrapper(env)
    if wrapper is not None:
        starts.warn(
            f"{wrapper} needs every step of the workers, so each step is a call to all workers, which takes milliseconds. "
            f"Use {INSIDE_WORKERS.get(wrapper, 'a wrapper of Gymnasium')} inside the environments instead "
            "(`make_vec_env(..., wrapper_class=...)`)."
        )
    return wrapper is None


def _run_here(self: Any, starts: SeededVecEnv, n_steps: int) -> Iterator[ActedStep]:
    """Let the policy of the model act in this process, and another one as soon as a callback assigns it."""
    obs, states, n = self._last_obs, self._last_states, 0
    while n < n_steps:
        policy = self.policy
        settings = n_steps - n, self.sde_sample_freq, self._uses_masks, self.num_timesteps
        for each in run_policy(policy, starts, obs, states, *settings):
            yield each
            n, obs, states = n + 1, each[2].new_obs, each[2].new_states
            if self.policy is not policy:
                break


def _run_in_workers(self: Any, starts: SeededVecEnv, n_steps: int) -> Iterator[ActedStep]:
    """:return: The steps that the workers have taken. If the episodes of a lost worker cannot go on, all begin anew"""
    settings = n_steps, self.sde_sample_freq, self._uses_masks, self.num_timesteps
    while True:
        try:
            recipe, run = self._policy_recipe(), starts.venv.collect_by_workers  # type: ignore[attr-defined]
            return run(recipe, self.policy, starts, self._last_obs, self._last_states, *settings)
        except RolloutLost as error:
            env_idx, what = error.args
            warnings.warn(f"Environment {env_idx} {what}. All environments begin new episodes.", stacklevel=2)
            self._begin_episodes(starts, starts.env.reset)


def run_policy(
    policy: ActorPolicy,
    starts: SeededVecEnv,
    obs: VecEnvObs,
    states: np.ndarray,
    n_steps: int,
    sde_sample_freq: int,
    uses_masks: bool,
    num_timesteps: int,
) -> Iterator[ActedStep]:
    """
    Let a policy act in the environments of this process, and yield each step once it is taken.

    :param starts: The layer through which the environments are reset and stepped
    :param obs: Present observations
    :param states: Present states of the policy's memory, shape ``(n_envs, state_size)``, zero where an episode begins
    :param sde_sample_freq: Number of steps between two noise samples of gSDE; -1 for one sample per rollout
    :param uses_masks: Whether the environments say which actions they allow
    :param num_timesteps: Number of transitions before the first step, for messages
    """
    policy.set_training_mode(False)
    act, device, n_envs = choose_actor(policy), policy.device, starts.venv.num_envs
    tensors = [tensor for tensor in policy.parameters() if not is_lazy(tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    shares_memory = device.type == "cpu" and isinstance(obs, np.ndarray)
    if policy.use_sde:
        policy.reset_noise(n_envs)
    for n in range(n_steps):
        if policy.use_sde and sde_sample_freq > 0 and n % sde_sample_freq == 0:
            policy.reset_noise(n_envs)
        # The same tensor, in half of the time if it shares the memory of the array.
        obs_tensor = th.from_numpy(obs) if shares_memory else obs_as_tensor(obs, device)  # type: ignore[arg-type]
        optional = {"action_masks": starts.action_masks()} if uses_masks else {}
        position = starts.ledger.position
        if policy.state_size > 0:
            states[position.steps == 0] = 0.0
            optional["states"] = states
        sampled, log_probs, *remembered = act(obs, obs_tensor, **optional)
        states = remembered[0] if remembered else states
        if not math.isfinite(sum(log_probs.tolist())):  # in less time than a call of torch
            raise ValueError(
                f"The output of the policy is not finite after {num_timesteps + n * n_envs} timesteps: the sampled actions "
                f"have log-probabilities {log_probs.tolist()}. Check the weights and the features extractor."
            )
        clipped = policy.within_bounds(sampled)
        # A copy, because an environment may change the action that it is given.
        obs, rewards, dones, infos = starts.step_all(clipped.copy())
        yield obs_tensor, clipped, EnvStep(sampled, log_probs, position, obs, rewards, dones, optional, states, infos)
        if addresses != (now := [tensor.data_ptr() for tensor in tensors]):  # a callback has assigned the `data` of a tensor
            act, addresses = choose_actor(policy), now
