"""The doctor: a callback that recognises runs that cannot learn, and says so in a sentence."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

#: How many times in a row a symptom has to show before it is reported; rollouts that say nothing about it do not count.
PATIENCE = 5
#: A policy whose entropy is below this fraction of the uniform one's has collapsed. For continuous actions: one whose standard
#: deviation is below this fraction of half the range.
COLLAPSED = 0.01


class Checkup(NamedTuple):
    """
    What is known after an update.

    :param metrics: what the rollout and the update logged; after a rollout without an update only the former
    :param entropy_floor: entropy below which the policy counts as collapsed
    :param max_waiting: transitions that may wait for their group, infinite for a buffer in which none wait
    :param risen: whether the mean return is above that of the first episodes by more than their standard deviation: a solved
        task ties groups, makes the policy sure of itself, and leaves the baseline nothing to explain
    """

    metrics: dict[str, float]
    entropy_floor: float
    max_waiting: float
    risen: bool


class Symptom(NamedTuple):
    """
    A known failure pattern.

    :param name: of the pattern
    :param shows: whether it shows in a checkup
    :param needs: metric without which a checkup says nothing about it
    :param sentence: what is wrong and which setting usually helps
    :param patience: how many times in a row it has to show
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
        "Nothing tells the members of any group apart, so that comparing them teaches nothing. Unless the task is solved, "
        "give them a chance to differ: a larger `group_size`, more exploration (`ent_coef`), a reward that is less sparse; "
        "under a constant reward per step, `rollout_buffer_class='return_to_go'` in the place of 'process'.",
    ),
    Symptom(
        "clip fraction",
        # A narrow clip range clips many ratios that have hardly moved, above all those of whole trajectories (GSPO)
        lambda it: it.metrics["train/clip_fraction"] > 0.5 and it.metrics["train/effective_sample_size"] < 0.9,
        "train/clip_fraction",
        "More than half of the importance ratios leave the clip range (train/clip_fraction), so that most transitions no "
        "longer count: updates are too large. Lower `learning_rate` or `n_epochs`, or stop updates early: `target_kl=0.02`.",
    ),
    Symptom(
        "entropy",
        lambda it: -it.metrics["train/entropy_loss"] < it.entropy_floor and not it.risen,
        "train/entropy_loss",
        "The entropy of the policy has collapsed (train/entropy_loss): it hardly explores any more, and the return has not "
        "risen. Raise `ent_coef`, lower `learning_rate`, or hold the policy near its initial state with `kl_coef`.",
    ),
    Symptom(
        "effective sample size",
        lambda it: it.metrics["train/effective_sample_size"] < 0.1,
        "train/effective_sample_size",
        "A few transitions have nearly all the weight (train/effective_sample_size below 0.1): the policy has moved far from "
        "the one that sampled. Lower `learning_rate` or `n_epochs`; where transitions wait for their group, a smaller "
        "`group_size` or a larger `n_steps` keeps them fresh.",
    ),
    Symptom(
        "incomplete groups",
        lambda it: it.metrics["rollout/groups_completed"] == 0
        and it.metrics["rollout/transitions_waiting"] > it.max_waiting / 2,
        "rollout/transitions_waiting",
        "No group has been completed for long, so that nothing is learned: episodes end too seldom for a buffer that judges "
        "them whole. Use `rollout_buffer_class='kernel'`, which needs no ends, give the environment a time limit, or lower "
        "`group_size`.",
    ),
    Symptom(
        "explained variance",
        lambda it: it.metrics["train/explained_variance"] < 0 and not it.risen,
        "train/explained_variance",
        "The kernel baseline predicts returns worse than a constant would (train/explained_variance below 0), so that it adds "
        "noise. Give it more transitions (`n_steps`), a stronger penalty (`rollout_buffer_kwargs=dict(ridge=1e-3)`) or a "
        "longer memory (`forgetting=0.9`), and raise `gae_lambda`, with which less is trusted to it.",
        patience=2 * PATIENCE,
    ),
)


def entropy_floor(action_space: spaces.Space, squash_output: bool = False) -> float:
    """
    :param action_space: one of those that GRPO takes
    :param squash_output: whether the policy acts between -1 and 1, from where its actions are scaled to the space
    :return: the entropy below which a policy counts as collapsed, in nats
    """
    if isinstance(action_space, spaces.Discrete):
        return COLLAPSED * float(np.log(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete):
        return COLLAPSED * float(np.log(action_space.nvec).sum())
    if isinstance(action_space, spaces.MultiBinary):
        return COLLAPSED * float(np.prod(action_space.shape) * np.log(2.0))
    assert isinstance(action_space, spaces.Box)
    # A Gaussian has the entropy log(std) + log(2 pi e) / 2 in each dimension
    half_range = (action_space.high.astype(np.float64) - action_space.low) / 2.0
    half_range = half_range[half_range > 0.0]  # where there is no choice there is nothing to collapse
    std = COLLAPSED * (np.ones_like(half_range) if squash_output else half_range)
    return float(np.sum(np.log(std) + 0.5 * np.log(2.0 * np.pi * np.e)))


def _recent_returns(model: Any, metrics: dict[str, float]) -> tuple[float, float]:
    """
    :param model: that is being trained
    :param metrics: of its last rollout
    :return: mean return of recent episodes and its deviation, NaN while none has ended
    """
    returns = [episode["r"] for episode in model.ep_info_buffer]
    if returns:
        return float(np.mean(returns)), float(np.std(returns))
    # Without a Monitor there are those that the buffer has seen, which VecNormalize may have rescaled
    return metrics.get("rollout/group_return_mean", np.nan), metrics.get("rollout/group_return_spread", np.nan)


class Doctor(BaseCallback):
    """
    Looks at a run after each update, and reports, once each, the failure patterns that show for several updates in a row.

    GRPO adds it to the callbacks where ``verbose`` is at least 1, unless ``doctor=False``. It only looks: training is the same
    with and without it.

    :param report: what to do with a report; prints it by default
    """

    def __init__(self, report: Callable[[str], None] = print):
        super().__init__()
        self.report = report
        #: Names of the symptoms reported so far.
        self.reported: list[str] = []
        self._streaks = dict.fromkeys((symptom.name for symptom in SYMPTOMS), 0)
        self._return_to_rise_above = np.nan
        self._is_due = False

    def _init_callback(self) -> None:
        if not hasattr(self.model, "update_metrics"):
            raise ValueError(
                f"The doctor knows GRPO's runs, not those of {type(self.model).__name__}: take it off the callbacks."
            )

    def _on_training_start(self) -> None:
        if self.model.num_timesteps == 0:  # another run, perhaps of another task
            self._streaks = dict.fromkeys(self._streaks, 0)
            self._return_to_rise_above = np.nan

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._is_due = True

    def _on_rollout_start(self) -> None:
        self._examine()

    def _on_training_end(self) -> None:
        self._examine()

    def _examine(self) -> None:
        if not self._is_due:  # the update that follows a rollout has not been made, or has been looked at
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
        metrics = {**model.rollout_buffer.metrics, **model.update_metrics}
        mean_return, deviation = _recent_returns(model, metrics)
        if np.isnan(self._return_to_rise_above):
            self._return_to_rise_above = mean_return + deviation
        return Checkup(
            metrics=metrics,
            entropy_floor=entropy_floor(model.action_space, model.policy.squash_output),
            max_waiting=getattr(model.rollout_buffer, "max_waiting", np.inf),
            risen=mean_return > self._return_to_rise_above,
        )
