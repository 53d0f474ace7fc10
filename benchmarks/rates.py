"""The learning rate of GRPO's default for other algorithms, so that they can be compared with the same settings."""

from typing import cast

import torch as th
from stable_baselines3.common.callbacks import BaseCallback


class RateFollowsStd(BaseCallback):
    """
    Let the learning rate fall with the standard deviation of the actions, as
    :meth:`sb3_grpo.policies.ActorPolicy.learning_rate_factor` does for GRPO.
    """

    def _on_training_start(self) -> None:
        schedule, log_std = self.model.lr_schedule, cast(th.Tensor, self.model.policy.log_std)
        first = log_std.detach().clone()

        def rate(progress: float) -> float:
            return schedule(progress) * min(1.0, (log_std.detach() - first).mean().exp().item())

        self.model.lr_schedule = rate

    def _on_step(self) -> bool:
        return True
