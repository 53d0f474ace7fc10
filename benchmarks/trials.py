"""Trials: changes of the default settings that are not part of the package."""

import math

from stable_baselines3.common.callbacks import BaseCallback

from sb3_grpo import GRPO


class AdaptiveRate(BaseCallback):
    """
    Let the learning rate follow the divergence of an update from the policy that sampled: two thirds of the rate if it was
    more than twice the target, and one and a half times the rate if it was less than half of it (Rudin et al. 2021,
    arXiv 2109.11978).

    :param target: Desired divergence, in nats
    :param highest: The rate never exceeds this number
    :param lowest: The rate never falls below this number
    """

    model: GRPO

    def __init__(self, target: float = 0.01, highest: float = 3e-4, lowest: float = 1e-5):
        super().__init__()
        self.target, self.highest, self.lowest = target, highest, lowest

    def _on_training_start(self) -> None:
        self.rate = self.model.lr_schedule(1.0)
        self.model.lr_schedule = lambda progress: self.rate

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        divergence = self.model.update_metrics.get("train/approx_kl", math.nan)
        if divergence > 2 * self.target:
            self.rate = max(self.rate / 1.5, self.lowest)
        elif divergence < self.target / 2:
            self.rate = min(self.rate * 1.5, self.highest)

    def _on_training_end(self) -> None:
        print(f"learning rate at the end: {self.rate:.2g}")
