"""The doctor: a callback that recognises runs that cannot learn, and reports why."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo.persistence import random_state, set_random_state
from sb3_grpo.shared_inputs import check_shared_inputs

#: Number of consecutive updates with a symptom before it is reported. Updates without the metric in question do not count.
PATIENCE = 5
#: The entropy of a policy counts as collapsed below this fraction of the entropy of the uniform policy. For continuous
#: actions: if the standard deviation is below this fraction of half the action range.
COLLAPSED = 0.01


class Checkup(NamedTuple):
    """
    The state of a run after an update.

    :param metrics: Metrics of the rollout and of the update
    :param entropy_floor: Entropy below which the policy counts as collapsed
    :param max_waiting: Number of transitions that may wait for their group; infinite if the buffer keeps none waiting
    :param risen: Whether the mean return exceeds that of the first episodes by more than their standard deviation. Tied
        groups, a low entropy and an unexplained return are normal once a task is solved
    """

    metrics: dict[str, float]
    entropy_floor: float
    max_waiting: float
    risen: bool


class Symptom(NamedTuple):
    """
    A known failure pattern.

    :param name: Name of the pattern
    :param shows: Function that tells whether the pattern shows
    :param needs: Metric that the check needs
    :param sentence: Description of the problem and of the settings that usually help
    :param patience: Number of consecutive updates with the symptom before it is reported
    """

    name: str
    shows: Callable[[Checkup], bool]
    needs: str
    sentence: str
    patience: int = PATIENCE


SYMPTOMS = (
    Symptom(
        "tied groups",
        lambda it: it.metrics["rollout/groups_tied"] == 1.0 and not it.risen,
        "rollout/groups_tied",
        "The buffer finds no difference between the members of any group, so nothing is learned. Unless the task is solved, "
        "try a larger `group_size`, more exploration (`ent_coef`), or a denser reward. With a constant reward per step, use "
        "`rollout_buffer_class='return_to_go'` instead of 'process'.",
    ),
    Symptom(
        "no start to repeat",
        lambda it: it.metrics["rollout/fresh_groups_tied"] == 1.0 and it.metrics["rollout/pool_size"] == 0.0 and not it.risen,
        "rollout/fresh_groups_tied",
        "The members of none of the last 40 groups ended differently, so there is no start to repeat (`repeat_starts`). Try a "
        "larger `group_size`, more exploration (`ent_coef`), or easier starts among those of the environment.",
    ),
    Symptom(
        "clip fraction",
        # A narrow clip range clips many ratios that have hardly changed, above all those of whole trajectories (GSPO).
        lambda it: it.metrics["train/clip_fraction"] > 0.5 and it.metrics["train/effective_sample_size"] < 0.9,
        "train/clip_fraction",
        "More than half of the importance ratios are clipped (train/clip_fraction): updates are too large. Lower "
        "`learning_rate` or `n_epochs`, or stop updates early with `target_kl=0.02`.",
    ),
    Symptom(
        "entropy",
        lambda it: -it.metrics["train/entropy_loss"] < it.entropy_floor and not it.risen,
        "train/entropy_loss",
        "The entropy of the policy has collapsed (train/entropy_loss) and the return has not risen: the policy no longer "
        "explores. Raise `ent_coef`, lower `learning_rate`, or keep the policy near its initial state with "
        "`objective=dict(kl_coef=0.1)`.",
    ),
    Symptom(
        "effective sample size",
        lambda it: it.metrics["train/effective_sample_size"] < 0.1,
        "train/effective_sample_size",
        "A few transitions have nearly all the weight (train/effective_sample_size below 0.1): the policy has moved far from "
        "the one that sampled. Lower `learning_rate` or `n_epochs`. If transitions wait long for their group, use a smaller "
        "`group_size` or a larger `n_steps`.",
    ),
    Symptom(
        "incomplete groups",
        lambda it: it.metrics["rollout/groups_completed"] == 0
        and it.metrics["rollout/transitions_waiting"] > it.max_waiting / 2,
        "rollout/transitions_waiting",
        "No group has been completed for many rollouts, so nothing is learned: this buffer needs episodes that end. Use "
        "`rollout_buffer_class='kernel'`, give the environment a time limit, or lower `group_size`.",
    ),
    Symptom(
        "explained variance",
        lambda it: it.metrics["train/explained_variance"] < 0.01 and not it.risen,
        "train/explained_variance",
        "The kernel baseline does not predict returns (train/explained_variance below 0.01). Give it more transitions "
        "(`n_steps`) or observations that say more about the rewards to come, and leave `ridge` and `forgetting` at their "
        "defaults.",
        patience=2 * PATIENCE,
    ),
)


def entropy_floor(action_space: spaces.Space, squash_output: bool = False) -> float:
    """:return: Entropy below which a policy counts as collapsed, in nats. With ``squash_output``, it acts between -1 and 1"""
    if isinstance(action_space, spaces.Discrete):
        return COLLAPSED * float(np.log(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete):
        return COLLAPSED * float(np.log(action_space.nvec).sum())
    if isinstance(action_space, spaces.MultiBinary):
        return COLLAPSED * float(np.prod(action_space.shape) * np.log(2.0))
    assert isinstance(action_space, spaces.Box)
    # The entropy of a Gaussian is log(std) + log(2 pi e) / 2 per dimension.
    half_range = (action_space.high.astype(np.float64) - action_space.low) / 2.0
    half_range = half_range[half_range > 0.0]  # dimensions without a choice cannot collapse
    std = COLLAPSED * (np.ones_like(half_range) if squash_output else half_range)
    return float(np.sum(np.log(std) + 0.5 * np.log(2.0 * np.pi * np.e)))


def _recent_returns(model: Any) -> tuple[float, float]:
    """
    :return: Mean of the returns of recent episodes and their spread: the standard deviation, or without a Monitor the mean
        range within groups. NaN until an episode has ended
    """
    returns = [episode["r"] for episode in model.ep_info_buffer]
    if returns:
        return float(np.mean(returns)), float(np.std(returns))
    # Without a Monitor, only the returns in the buffer are known. VecNormalize may have scaled them.
    groups = list(getattr(model.rollout_buffer, "group_returns", {}).values())
    if not groups:
        return np.nan, np.nan
    return float(np.mean(np.concatenate(groups))), float(np.mean([max(members) - min(members) for members in groups]))


def _make_copy(venv: VecEnv) -> gym.Env:
    """
    :return: A fresh copy of the first of the environments
    :raises Exception: If it cannot be made again
    """
    envs = getattr(venv.unwrapped, "envs", None)
    if not envs:
        raise ValueError("the environments are not in this process")
    spec = envs[0].spec
    if spec is None:
        raise ValueError("the environment was not made by `gymnasium.make`")
    copied = replace(
        spec,
        # A spec does not say how to make SB3's Monitor again.
        additional_wrappers=tuple(wrapper for wrapper in spec.additional_wrappers if wrapper.name != "Monitor"),
        # The copy opens no window and records no video.
        kwargs={key: value for key, value in spec.kwargs.items() if key != "render_mode"},
    )
    return gym.make(copied)


class Doctor(BaseCallback):
    """
    A callback that checks a run after each update, and reports, once per run, each failure pattern that lasts for several
    updates. At the start of a run it plays ``check_shared_inputs`` on a copy of the environment. It does not change the
    training::

        model.learn(100_000, callback=Doctor())

    :param report: Function that gets a report; by default it is printed
    """

    def __init__(self, report: Callable[[str], None] = print):
        super().__init__()
        self.report = report
        #: Names of the patterns that have been reported so far.
        self.reported: list[str] = []
        self._streaks = dict.fromkeys((symptom.name for symptom in SYMPTOMS), 0)
        self._return_to_rise_above = np.nan
        self._is_due = False

    def _init_callback(self) -> None:
        if not hasattr(self.model, "update_metrics"):
            raise ValueError(
                f"The doctor can check runs of GRPO, not of {type(self.model).__name__}: remove it from the callbacks."
            )

    def _on_training_start(self) -> None:
        if self.model.num_timesteps == 0:  # a new run
            self._streaks = dict.fromkeys(self._streaks, 0)
            self._return_to_rise_above = np.nan
            self.reported.clear()
            self._check_inputs()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._is_due = True

    def _on_rollout_start(self) -> None:
        self._examine()

    def _on_training_end(self) -> None:
        self._examine()

    def _check_inputs(self) -> None:
        model: Any = self.model
        if not model.share_starts:
            return
        state = random_state()  # an environment may draw from the global generators
        try:
            with closing(_make_copy(self.training_env)) as env:
                found = check_shared_inputs(env)
        except Exception as error:
            self.report(
                f"Doctor (shared inputs): could not check whether the members of a group share their inputs ({error}): call "
                "`check_shared_inputs(env)` with one of the environments."
            )
            return
        finally:
            set_random_state(state)
        if found.verdict != "shared":
            self.reported.append("shared inputs")
            self.report(f"Doctor (shared inputs): {found.message}")

    def _examine(self) -> None:
        if not self._is_due:  # there has been no update since the last check
            return
        self._is_due = False
        checkup = self._checkup()
        for symptom in SYMPTOMS:
            if symptom.needs not in checkup.metrics or symptom.name in self.reported:
                continue
            self._streaks[symptom.name] = self._streaks[symptom.name] + 1 if symptom.shows(checkup) else 0
            if self._streaks[symptom.name] == symptom.patience:
                self.reported.append(symptom.name)
                self.report(f"Doctor ({symptom.name}, {symptom.patience} times in a row): {symptom.sentence}")

    def _checkup(self) -> Checkup:
        model: Any = self.model
        mean_return, deviation = _recent_returns(model)
        if np.isnan(self._return_to_rise_above):
            self._return_to_rise_above = mean_return + deviation
        return Checkup(
            metrics={**model.rollout_buffer.metrics, **model.ledger.choice.metrics, **model.update_metrics},
            entropy_floor=entropy_floor(model.action_space, model.policy.squash_output),
            max_waiting=getattr(model.rollout_buffer, "max_waiting", np.inf),
            risen=mean_return > self._return_to_rise_above,
        )
