"""Standardisation of observations, as a part of the policy."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from torch import nn

from sb3_grpo.observations import space_parts

#: Standardised observations are clipped to this range, as in SB3's ``VecNormalize``.
MAX_STANDARDISED = 10.0
#: An input whose standard deviation is below this fraction of its mean counts as constant: it is centred and not scaled.
MIN_VARIATION = 1e-6


class ObservationNormalizer(nn.Module):
    """
    Standardises observations: ``clip((x - mean) / std, -10, 10)``, with the mean and the standard deviation of each input over
    all observations so far. The statistics are buffers of the module, so they are saved, loaded and copied with the weights.

    Observations that arrive change nothing until :meth:`renew`, so that the policy is the same function throughout a rollout
    and its update. The first call of :meth:`observe` is the exception, and takes effect at once: the first rollout acts on
    observations that are only clipped, and its update uses their statistics.

    :param observation_space: Observation space. Vectors of floating point numbers are standardised, also within a ``Dict``,
        see :func:`normalized_parts`
    """

    count: th.Tensor
    mean: th.Tensor
    var: th.Tensor
    shift: th.Tensor
    scale: th.Tensor

    def __init__(self, observation_space: spaces.Space):
        super().__init__()
        self.slices: dict[str | None, slice] = {}
        n_inputs = 0
        for name, space in normalized_parts(observation_space).items():
            self.slices[name] = slice(n_inputs, n_inputs + int(np.prod(space.shape)))
            n_inputs = self.slices[name].stop
        # The statistics so far
        self.register_buffer("count", th.zeros(()))
        self.register_buffer("mean", th.zeros(n_inputs))
        self.register_buffer("var", th.ones(n_inputs))
        # Those in use
        self.register_buffer("shift", th.zeros(n_inputs))
        self.register_buffer("scale", th.ones(n_inputs))

    def forward(self, observations: Any, latest: bool = False) -> Any:
        """
        :param observations: Observations, tensors of shape ``(n, *obs_shape)`` or a dict of such
        :param latest: Whether to use the statistics of all observations so far, before :meth:`renew` does so for good
        :return: The observations, standardised
        """
        shift, scale = self._latest() if latest else (self.shift, self.scale)

        def standardised(part: th.Tensor, own: slice) -> th.Tensor:
            result = (part.unsqueeze(-1).flatten(1) - shift[own]) * scale[own]
            return result.clamp_(-MAX_STANDARDISED, MAX_STANDARDISED).view_as(part)

        if not isinstance(observations, dict):
            return standardised(observations, slice(None))
        return {**observations, **{name: standardised(observations[name], own) for name, own in self.slices.items()}}

    def observe(self, observations: Any) -> bool:
        """
        Add observations, arrays of shape ``(..., *obs_shape)`` or a dict of such, to the statistics.

        :return: Whether they are the first, so that this module is another function now
        """
        parts = observations if isinstance(observations, dict) else {None: observations}
        inputs = [parts[name].reshape(-1, own.stop - own.start).astype(np.float64) for name, own in self.slices.items()]
        statistics = RunningMeanStd(epsilon=0.0)
        for name in ("mean", "var", "count"):
            setattr(statistics, name, getattr(self, name).cpu().double().numpy())  # not every device has doubles
        is_first = statistics.count == 0
        statistics.update(np.concatenate(inputs, axis=1))
        for name in ("mean", "var", "count"):
            # A variance that single precision cannot hold would make the scale zero.
            value = np.minimum(getattr(statistics, name), np.finfo(np.float32).max)
            getattr(self, name).copy_(th.as_tensor(value))
        if is_first:
            self.renew()
        return is_first

    def renew(self) -> None:
        """Use the statistics of all observations so far."""
        shift, scale = self._latest()
        self.shift.copy_(shift)
        self.scale.copy_(scale)

    def _latest(self) -> tuple[th.Tensor, th.Tensor]:
        std = self.var.sqrt()
        return self.mean, th.where(std > MIN_VARIATION * self.mean.abs(), 1.0 / std, 1.0)


def normalized_parts(observation_space: spaces.Space) -> dict[str | None, spaces.Box]:
    """
    :param observation_space: Observation space
    :return: The vectors of floating point numbers in it, by their name in a ``Dict``, or ``None`` for the whole. Images, other
        arrays with more than two axes, integers and discrete observations are not among them
    """
    return {
        name: space
        for name, space in space_parts(observation_space).items()
        if isinstance(space, spaces.Box) and space.dtype.kind == "f" and len(space.shape) <= 2
    }
