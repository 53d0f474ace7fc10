"""The doctor: a callback that recognises runs that cannot learn, and reports why."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

from sb3_grpo.masks import choices_of
from sb3_grpo.shared_inputs import check_copy
from sb3_grpo.validation import MAX_ACTION_RANGE

PATIENCE = 5  #: Updates in a row with a symptom before it is reported; those without the metric in question do not count
COLLAPSED = 0.01  #: Fraction of the entropy of the uniform policy; of Box, of a standard deviation of half the range


class Symptom(NamedTuple):
    """A known failure pattern, and the sentence with the problem and the settings that usually help."""

    name: str
    shows: Callable[[dict[str, Any]], bool]  # raises KeyError if a metric is missing
    sentence: str
    patience: int = PATIENCE


# Besides the logged metrics there are `risen` (whether the mean return has risen, because some symptoms are normal once a task
# is solved), `floor` (of the entropy), and `room` (half of the transitions that may wait).
SYMPTOMS = (
    Symptom(
        "tied groups",
        lambda m: m["rollout/groups_tied"] == 1 and not m["risen"],
        "The buffer finds no difference between the members of any group, so nothing is learned. Unless the task is solved, "
        "try a larger `group_size`, more exploration (`ent_coef`), or a denser reward. With a constant reward per step, use "
        "`rollout_buffer_class='return_to_go'` instead of 'process'.",
    ),
    # A narrow clip range clips many ratios that have hardly changed, above all those of whole trajectories (GSPO).
    Symptom(
        "clip fraction",
        lambda m: m["train/clip_fraction"] > 0.5 and m["train/effective_sample_size"] < 0.9,
        "More than half of the importance ratios are clipped (train/clip_fraction): updates are too large. Lower "
        "`learning_rate` or `n_epochs`, or stop updates early with `target_kl=0.02`.",
    ),
    Symptom(
        "entropy",
        lambda m: -m["train/entropy_loss"] < m["floor"] and not m["risen"],
        "The policy no longer explores: its entropy has collapsed (train/entropy_loss) and the return has not risen. Raise "
        "`ent_coef`, lower `learning_rate`, or keep it near its initial state with `objective=dict(kl_coef=0.1)`.",
    ),
    Symptom(
        "effective sample size",
        lambda m: m["train/effective_sample_size"] < 0.1,
        "A few transitions have nearly all the weight (train/effective_sample_size below 0.1): the policy moved too far. "
        "Lower `learning_rate` or `n_epochs`. If transitions wait long for their group, use a smaller `group_size`.",
    ),
    Symptom(
        "incomplete groups",
        lambda m: m["rollout/groups_completed"] == 0 and m["rollout/transitions_waiting"] > m["room"],
        "No group has been completed for many rollouts, so nothing is learned: this buffer needs episodes that end. Use "
        "`rollout_buffer_class='kernel'`, give the environment a time limit, or lower `group_size`.",
    ),
    Symptom(
        "explained variance",
        lambda m: m["train/explained_variance"] < 0.01 and not m["risen"],
        "The kernel baseline does not predict returns (train/explained_variance below 0.01). Use more transitions (`n_steps`) "
        "or observations that say more about the rewards to come, and leave `ridge` and `forgetting` at their defaults.",
        patience=2 * PATIENCE,
    ),
)


def entropy_floor(action_space: spaces.Space, squash_output: bool = False) -> float:
    """:return: Entropy below which a policy counts as collapsed, in nats. With ``squash_output``, it acts between -1 and 1"""
    if not isinstance(action_space, spaces.Box):
        return COLLAPSED * float(np.log(choices_of(action_space)).sum())
    half_range = (action_space.high.astype(np.float64) - action_space.low) / 2.0
    is_unit = squash_output | (half_range > MAX_ACTION_RANGE / 2.0)  # then the range says nothing about useful deviations
    std = COLLAPSED * np.where(is_unit, 1.0, half_range)[half_range > 0.0]  # no choice, no collapse
    return float(np.sum(np.log(std) + 0.5 * np.log(2.0 * np.pi * np.e)))  # the entropy of a Gaussian


class Doctor(BaseCallback):
    """
    A callback that checks a run after each update, and reports, once per run, each failure pattern that lasts for several
    updates. It begins with ``check_shared_inputs`` on a copy of the environment. It does not change the training.

    :param report: Function that gets a report; by default it is printed
    """

    model: Any

    def __init__(self, report: Callable[[str], None] = print):
        super().__init__()
        self.report = report
        self.reported: list[str] = []  #: Names of the patterns that have been reported so far
        self._streaks: dict[str, int] = {}
        self._return_to_exceed = np.nan

    def _on_training_start(self) -> None:
        if not hasattr(self.model, "update_metrics"):
            raise ValueError(f"The doctor checks runs of GRPO, not of {type(self.model).__name__}: remove the callback.")
        self._examined = self.model.update_metrics
        if self.model.num_timesteps == 0:  # a new run
            self._streaks, self.reported, self._return_to_exceed = {}, [], np.nan
            found = check_copy(self.training_env) if self.model.share_starts else None
            if found is not None and found.verdict != "shared":
                self.reported += ["shared inputs"] if found.verdict != "unknown" else []
                self.report(f"Doctor (shared inputs): {found.message}")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.model.update_metrics is self._examined:  # there has been no update since the last check
            return
        buffer, policy = self.model.rollout_buffer, self.model.policy
        self._examined = self.model.update_metrics
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        # Without a Monitor, only the returns in the buffer are known. VecNormalize may have scaled them.
        returns = returns or [each for members in buffer.group_returns.values() for each in members] or [np.nan]
        if np.isnan(self._return_to_exceed):
            self._return_to_exceed = np.mean(returns) + np.std(returns)
        metrics = {**buffer.metrics, **self.model.update_metrics}
        metrics["floor"] = entropy_floor(policy.action_space, policy.squash_output)
        metrics.update(risen=np.mean(returns) > self._return_to_exceed, room=getattr(buffer, "max_waiting", np.inf) / 2)
        for name, shows, sentence, patience in SYMPTOMS:
            try:
                self._streaks[name] = self._streaks.get(name, 0) + 1 if shows(metrics) else 0
            except KeyError:
                continue
            if self._streaks[name] == patience and name not in self.reported:
                self.reported.append(name)
                self.report(f"Doctor ({name}, {patience} times in a row): {sentence}")

    _on_training_end = _on_rollout_start
