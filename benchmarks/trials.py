"""Parts of candidates for the default settings that are not part of the package: trials, which few will outlive."""

import math

import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn
from torch.nn import functional


class NormalizedTanh(nn.Module):
    """Tanh of inputs that are standardised over the units (Ba et al. 2016, "Layer Normalization", arXiv 1607.06450)."""

    def forward(self, inputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Shape ``(n, n_units)``
        :return: Same shape
        """
        return th.tanh(functional.layer_norm(inputs, inputs.shape[-1:]))


class EntropyTarget(BaseCallback):
    """
    Let the entropy coefficient follow the entropy of the policy: it grows by a tenth after a rollout in which the entropy was
    below a target, and shrinks by a tenth otherwise (after the temperature of SAC, Haarnoja et al. 2018, arXiv 1812.05905).

    The target is a fifth of that of the uniform policy for discrete actions, and that of a deviation which is a quarter of
    the initial one otherwise.
    """

    def _on_training_start(self) -> None:
        space = self.model.action_space
        initial = sum(self.model.policy.log_std.tolist()) if isinstance(space, spaces.Box) else 0.0
        if isinstance(space, spaces.Box):
            n_actions = math.prod(space.shape)
            self.target = initial + n_actions * (0.5 * math.log(2 * math.pi * math.e) - math.log(4))
        else:
            self.target = 0.2 * math.log(space.n)
        self.model.ent_coef = 1e-3

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        entropy = self.logger.name_to_value.get("train/entropy_loss", math.nan)
        if math.isfinite(entropy):
            is_below = -entropy < self.target
            self.model.ent_coef = min(max(self.model.ent_coef * (1.1 if is_below else 0.9), 1e-5), 0.1)
