"""Collecting a rollout: the policy acts in a vectorised environment, in this process or in workers."""

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_grpo.buffers import GroupRolloutBuffer
from sb3_grpo.graphs import actor
from sb3_grpo.observations import map_observations, take_observations
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.starts import Ledger, Position, RolloutLost, SeededVecEnv
from sb3_grpo.validation import check_step
from sb3_grpo.vec_wrappers import INSIDE_WORKERS, data_changing_wrapper


class Step(NamedTuple):
    """
    One step of all environments.

    :param obs_tensor: Observations before the step, as the policy got them
    :param actions: Actions as sampled, shape ``(n_envs, *action_shape)``
    :param clipped_actions: Actions as the environments took them, same shape
    :param log_probs: Log-probabilities of the actions, shape ``(n_envs,)``
    :param action_masks: The choices that the environments allowed, shape ``(n_envs, n_choices)``; ``None`` without masks
    :param position: Where the environments were before the step
    :param new_obs: Observations after the step, shape ``(n_envs, *obs_shape)`` or a dict of such
    :param rewards: Rewards, shape ``(n_envs,)``
    :param dones: Whether the episode ended, shape ``(n_envs,)``
    :param infos: Info of each environment
    """

    obs_tensor: th.Tensor | dict[str, th.Tensor]
    actions: np.ndarray
    clipped_actions: np.ndarray
    log_probs: th.Tensor
    action_masks: np.ndarray | None
    position: Position
    new_obs: VecEnvObs
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]


def collect(
    self: Any,
    env: VecEnv,
    callback: BaseCallback,
    rollout_buffer: GroupRolloutBuffer,
    n_rollout_steps: int,
    starts: SeededVecEnv,
) -> bool:
    """
    Fill the buffer. The local names are those of SB3's ``collect_rollouts``, ``self`` among them, because callbacks read them.

    :param self: The algorithm
    :param starts: The layer through which the environments are reset and stepped
    :return: False if the callback asked to stop; the last step is kept
    :raises ValueError: If an observation, a reward or the output of the policy is not finite
    :raises RuntimeError: If the callback resets the environments
    """
    normalizer = rollout_buffer.reward_normalizer(env)
    n_steps = 0
    rollout_buffer.reset()
    self.policy.set_training_mode(False)

    callback.on_rollout_start()

    workers_act = _workers_act(env, starts)
    if workers_act:
        steps = replay_steps(_collect_in_workers(self, starts, n_rollout_steps), self.policy)
    else:
        settings = self.sde_sample_freq, self._uses_masks, self.num_timesteps
        steps = take_steps(self.policy, starts, self._last_obs, n_rollout_steps, *settings)
    for step in steps:
        obs_tensor, actions, clipped_actions, log_probs, action_masks = step[:5]
        position, new_obs, rewards, dones, infos = step[5:]
        check_step(new_obs, rewards, dones, infos, self.num_timesteps, position.steps)

        self.num_timesteps += env.num_envs

        callback.update_locals(locals())
        continue_training = callback.on_step()
        if continue_training is None:
            warnings.warn(
                f"Training ends after {self.num_timesteps} timesteps, because the callback {' or '.join(_names(callback))} "
                "has returned None, which counts as False: return True to go on.",
                UserWarning,
                stacklevel=4,
            )
        if starts.was_reset:
            raise RuntimeError(
                "A callback reset the training environment in the course of a rollout: pass `EvalCallback` (or "
                "`evaluate_policy`) a separate environment, for example `make_vec_env('CartPole-v1')`."
            )

        self._update_info_buffer(*_of_fresh_starts(infos, dones, position.groups, self.ledger))
        n_steps += 1
        rollout_buffer.add(
            self._last_obs,
            actions,
            rewards if normalizer is None else normalizer.get_original_reward(),
            dones,
            log_probs,
            position,
            infos,
            **({} if action_masks is None else {"action_masks": action_masks}),
        )
        self._last_obs = new_obs
        self._last_episode_starts = dones
        if not continue_training:
            if workers_act and n_steps < n_rollout_steps:
                self._last_obs = None  # the environments are ahead
            return False
    return True


def _names(callback: BaseCallback) -> list[str]:
    """:return: Names of the callbacks in a callback that are not SB3's own"""
    if isinstance(callback, ConvertCallback):
        return [getattr(callback.callback, "__name__", repr(callback.callback))]
    values = [value for name, value in vars(callback).items() if name != "parent"]
    inner = [each for value in values for each in (value if isinstance(value, list) else [value])]
    own = [] if type(callback).__module__.startswith("stable_baselines3.") else [type(callback).__name__]
    return own + [name for each in inner if isinstance(each, BaseCallback) for name in _names(each)]


def _of_fresh_starts(
    infos: list[dict[str, Any]], dones: np.ndarray, groups: np.ndarray, ledger: Ledger
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """:return: The infos and dones from which SB3 logs returns, without those of episodes that repeated a start"""
    repeats = [env for env in np.flatnonzero(dones).tolist() if ledger.repeats(int(groups[env]))]
    if not repeats:
        return infos, dones
    return [info for env, info in enumerate(infos) if env not in repeats], np.delete(dones, repeats)


def prepare_starts(
    ledger: Ledger, starts: SeededVecEnv, rollout_buffer: GroupRolloutBuffer, chooses_group_size: bool
) -> dict[str, float]:
    """
    Prepare the starts to come after a rollout: their number in a group, and which of them are repeated.

    :param chooses_group_size: Whether the group size is that which the buffer suggests
    :return: What the log says about starts; nothing if they are not shared
    """
    if ledger.choice.share > 0.0 and starts.share_starts and starts.mismatches == 0:
        ledger.record(rollout_buffer.group_returns)
    else:  # a start that differs each time cannot be repeated either
        ledger.forget_repeats()
    if not starts.share_starts:
        return {}
    metrics = {"rollout/start_mismatches": float(starts.mismatches), **ledger.choice.metrics}
    if chooses_group_size:
        ledger.group_size = rollout_buffer.suggested_group_size()
        metrics["rollout/group_size"] = ledger.group_size
    return metrics


def _workers_act(env: VecEnv, starts: SeededVecEnv) -> bool:
    """:return: Whether the workers can collect whole rollouts, and no wrapper changes what they return"""
    if not hasattr(starts.venv, "collect_by_workers"):
        return False
    wrapper = data_changing_wrapper(env)
    if wrapper is not None:
        starts.warn(
            f"{wrapper} needs every step of the workers, so each step is a call to all workers, which takes milliseconds. "
            f"Use {INSIDE_WORKERS.get(wrapper, 'a wrapper of Gymnasium')} inside the environments instead "
            "(`make_vec_env(..., wrapper_class=...)`)."
        )
    return wrapper is None


def _collect_in_workers(self: Any, starts: SeededVecEnv, n_steps: int) -> "Collected":
    """:return: A rollout of the workers. If the episodes of a lost worker cannot go on, all environments begin new ones"""
    while True:
        try:
            collected = starts.venv.collect_by_workers(  # type: ignore[attr-defined]
                self._policy_recipe(),
                self.policy,
                self._last_obs,
                starts.ledger,
                starts.share_starts,
                n_steps,
                self.sde_sample_freq,
                self._uses_masks,
                self.num_timesteps,
            )
        except RolloutLost as error:
            env_idx, what, _ = error.args
            warnings.warn(f"Environment {env_idx} {what}. All environments begin new episodes.", UserWarning, stacklevel=2)
            self._begin_episodes(starts, starts.env.reset)
            continue
        starts.add_mismatches(collected.mismatches, collected.warnings)
        return collected


def take_steps(
    policy: ActorPolicy,
    starts: SeededVecEnv,
    obs: VecEnvObs,
    n_steps: int,
    sde_sample_freq: int,
    uses_masks: bool,
    num_timesteps: int,
) -> Iterator[Step]:
    """
    :param policy: Policy that acts
    :param starts: The layer through which the environments are reset and stepped
    :param obs: Present observations
    :param n_steps: Number of steps
    :param sde_sample_freq: Number of steps between two noise samples of gSDE; -1 for one sample per rollout
    :param uses_masks: Whether the environments say which actions they allow
    :param num_timesteps: Number of transitions before the first step, for messages
    :return: The steps, each taken when it is asked for
    :raises ValueError: If the output of the policy is not finite
    """
    policy.set_training_mode(False)
    act, device, n_envs = actor(policy), policy.device, starts.venv.num_envs
    shares_memory = device.type == "cpu" and isinstance(obs, np.ndarray)
    if policy.use_sde:
        policy.reset_noise(n_envs)
    for n in range(n_steps):
        if policy.use_sde and sde_sample_freq > 0 and n % sde_sample_freq == 0:
            policy.reset_noise(n_envs)
        # The same tensor, in half of the time if it shares the memory of the array.
        obs_tensor = th.from_numpy(obs) if shares_memory else obs_as_tensor(obs, device)  # type: ignore[arg-type]
        action_masks = starts.action_masks() if uses_masks else None
        masking = {} if action_masks is None else {"action_masks": action_masks}
        sampled, log_probs = act(obs, obs_tensor, **masking)
        check_policy_output(log_probs, num_timesteps + n * n_envs)
        clipped = policy.within_bounds(sampled)
        position = starts.ledger.position
        # A copy, because an environment may change the action that it is given.
        obs, rewards, dones, infos = starts.step_all(clipped.copy())
        yield Step(obs_tensor, sampled, clipped, log_probs, action_masks, position, obs, rewards, dones, infos)


def check_policy_output(log_probs: th.Tensor, num_timesteps: int) -> None:
    """Raise a ``ValueError`` if a log-probability of a sampled action, shape ``(n_envs,)``, is NaN or infinite."""
    # Adding up a list in Python takes less time than calling torch.
    if not math.isfinite(sum(log_probs.tolist())):
        raise ValueError(
            f"The output of the policy is not finite after {num_timesteps} timesteps: the sampled actions have "
            f"log-probabilities {log_probs.tolist()}. Check the weights and the features extractor."
        )


class Collected(NamedTuple):
    """
    A rollout, or the part that one worker has collected: ``n`` environments over ``n_steps``.

    The arrays are those of a :class:`Step` and its position, with the steps as the first axis.

    :param obs: Observations before each step and after the last, shape ``(n_steps + 1, n, *obs_shape)`` or a dict of such
    :param action_masks: Masks, shape ``(n_steps, n, n_choices)``; no columns without masks
    :param infos: Info of each environment, step by step
    :param ledgers: For each worker the ledger of its environments after the last step
    :param mismatches: Number of starts that did not begin like their group's first member
    :param warnings: Warnings of the worker
    """

    obs: Any
    actions: np.ndarray
    log_probs: np.ndarray
    groups: np.ndarray
    members: np.ndarray
    steps: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    action_masks: np.ndarray
    infos: list[list[dict[str, Any]]]
    ledgers: list[Ledger]
    mismatches: int
    warnings: list[str]

    @classmethod
    def joined(cls, parts: "Sequence[Collected]") -> "Collected":
        """:return: The whole rollout, from the part of each worker"""

        def along_envs(*arrays: np.ndarray) -> np.ndarray:
            return np.concatenate(arrays, axis=1)

        *transitions, infos, ledgers, mismatches, warnings = zip(*parts, strict=True)
        arrays = (map_observations(along_envs, *each) for each in transitions)
        infos_by_step = [list(chain(*step)) for step in zip(*infos, strict=True)]
        return cls._make([*arrays, infos_by_step, list(chain(*ledgers)), sum(mismatches), list(chain(*warnings))])


def replay_steps(collected: Collected, policy: ActorPolicy) -> Iterator[Step]:
    """
    :return: The steps of a rollout that workers have collected with the policy, as :func:`take_steps` would have given them
    """
    clipped = policy.within_bounds(collected.actions)
    log_probs = th.as_tensor(collected.log_probs)
    obs_tensors = obs_as_tensor(collected.obs, policy.device)
    for t in range(len(collected.rewards)):
        yield Step(
            take_observations(obs_tensors, t),
            collected.actions[t],
            clipped[t],
            log_probs[t],
            collected.action_masks[t] if collected.action_masks.size > 0 else None,
            Position(collected.groups[t], collected.members[t], collected.steps[t]),
            take_observations(collected.obs, t + 1),
            collected.rewards[t],
            collected.dones[t],
            collected.infos[t],
        )
