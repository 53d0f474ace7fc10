"""The learning rate of GRPO's default for other algorithms, so that they can be compared with the same settings."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback


def log_std_of(policy: Any) -> th.Tensor:
    """
    :param policy: Policy of Stable-Baselines3 or of sbx, with a Gaussian whose standard deviations are parameters
    :return: A copy of their logarithms, shape ``(n_components,)``
    """
    if hasattr(policy, "actor_state"):  # sbx's, on JAX
        return th.tensor(np.asarray(policy.actor_state.params["params"]["log_std"]))
    return policy.log_std.detach().clone()


class RateFollowsStd(BaseCallback):
    """
    Let the learning rate fall with the standard deviation of the actions, as
    :meth:`sb3_grpo.policies.ActorPolicy.learning_rate_factor` does for GRPO.
    """

    def _on_training_start(self) -> None:
        schedule, first = self.model.lr_schedule, log_std_of(self.model.policy)

        def rate(progress: float) -> float:
            return schedule(progress) * min(1.0, (log_std_of(self.model.policy) - first).mean().exp().item())

        self.model.lr_schedule = rate

    def _on_step(self) -> bool:
        return True
