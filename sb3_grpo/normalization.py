"""Standardisation of observations, as a part of the policy."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from torch import nn

from sb3_grpo.observations import is_large_image, space_parts

#: Standardised observations are clipped to this range, as in SB3's ``VecNormalize``.
MAX_STANDARDISED = 10.0
#: An input whose standard deviation is below this fraction of its mean counts as constant: it is centred and not scaled.
MIN_VARIATION = 1e-6
#: Largest number of images of a rollout that count for the statistics, and number that are added at a time
MAX_IMAGES = 256
IMAGE_BATCH = 32


class ObservationNormalizer(nn.Module):
    """
    Standardises observations: ``clip((x - mean) / std, -10, 10)``, with the mean and the standard deviation of each input over
    all observations so far. The statistics are buffers of the module, so they are saved, loaded and copied with the weights.

    Each pixel of a large image has its own mean, and all have the same standard deviation, the root of their mean variance.
    So what never changes becomes zero, and what moves stands out. Without this, the features of an actor without a critic can
    become the same for all images, because the gradient is mostly noise in the direction of what they have in common. The
    statistics take in at most :data:`MAX_IMAGES` images of a rollout, evenly spaced.

    Observations that arrive change nothing until :meth:`renew`, so that the policy is the same function throughout a rollout
    and its update. The first call of :meth:`observe` is the exception, and takes effect at once: the first rollout acts on
    observations that are only clipped (and divided by 255, if they are images), and its update uses their statistics.

    :param observation_space: Observation space. Vectors of floating point numbers and large images are standardised, also
        within a ``Dict``, see :func:`normalized_parts`
    :param normalize_images: Whether images are among them
    """

    count: th.Tensor
    mean: th.Tensor
    var: th.Tensor
    shift: th.Tensor
    scale: th.Tensor

    def __init__(self, observation_space: spaces.Space, normalize_images: bool = True):
        super().__init__()
        parts = normalized_parts(observation_space, normalize_images)
        self.images = [name for name, space in parts.items() if is_large_image(space)]
        spaces_now = {
            name: spaces.Box(-MAX_STANDARDISED, MAX_STANDARDISED, space.shape) if name in self.images else space
            for name, space in space_parts(observation_space).items()
        }
        #: Space of the standardised observations: images are floating point numbers, which SB3 does not divide by 255.
        self.space: spaces.Space = spaces_now[None] if None in spaces_now else spaces.Dict(spaces_now)
        self.slices: dict[str | None, slice] = {}
        n_inputs = 0
        for name, space in sorted(parts.items(), key=lambda part: part[0] in self.images):
            self.slices[name] = slice(n_inputs, n_inputs + int(np.prod(space.shape)))
            n_inputs = self.slices[name].stop
        self.register_buffer("count", th.zeros(()))
        # The statistics so far, and those in use
        for name, start in (("mean", th.zeros), ("var", th.ones), ("shift", th.zeros), ("scale", th.ones)):
            self.register_buffer(name, start(n_inputs))
        for name in self.images:
            if parts[name].dtype == np.uint8:
                self.scale[self.slices[name]] /= 255.0  # as SB3 does, until there are statistics

    def forward(self, observations: Any, latest: bool = False) -> Any:
        """Standardise tensors, of which a dict may lack some; ``latest`` uses all statistics, also before :meth:`renew`."""
        shift, scale = self._latest() if latest else (self.shift, self.scale)

        def standardised(name: str | None, part: th.Tensor) -> th.Tensor:
            own, shape = self.slices[name], part.shape[1:]
            centre, factor = shift[own].view(shape), scale[own].view(shape)
            if name in self.images:
                part, factor = part.to(centre.dtype), scale[own.start]
                if part.is_contiguous(memory_format=th.channels_last):  # with the same format, it takes a third of the time
                    centre = centre[None].contiguous(memory_format=th.channels_last)
            return (part - centre).mul_(factor).clamp_(-MAX_STANDARDISED, MAX_STANDARDISED)

        if not isinstance(observations, dict):
            return standardised(next(iter(self.slices)), observations)
        present = self.slices.keys() & observations.keys()
        return {**observations, **{name: standardised(name, observations[name]) for name in present}}

    def observe(self, observations: Any) -> bool:
        """Add arrays of shape ``(..., *obs_shape)``, or a dict of such, and return whether they are the first."""
        parts = observations if isinstance(observations, dict) else {None: observations}
        inputs = {name: parts[name].reshape(-1, own.stop - own.start) for name, own in self.slices.items()}
        vectors = [each.astype(np.float64) for name, each in inputs.items() if name not in self.images]
        moments = [(each.mean(axis=0), each.var(axis=0)) for each in ([np.concatenate(vectors, axis=1)] if vectors else [])]
        moments += [image_moments(inputs[name]) for name in self.images]
        mean, var = (np.concatenate(each) for each in zip(*moments, strict=True))
        statistics = RunningMeanStd(epsilon=0.0)
        for name in ("mean", "var", "count"):
            setattr(statistics, name, getattr(self, name).cpu().double().numpy())  # not every device has doubles
        is_first = statistics.count == 0
        statistics.update_from_moments(mean, var, len(next(iter(inputs.values()))))
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
        var = self.var.clone()
        for name in self.images:
            var[self.slices[name]] = var[self.slices[name]].mean()
        std = var.sqrt()
        return self.mean, th.where(std > MIN_VARIATION * self.mean.abs(), 1.0 / std, 1.0)


def image_moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """:return: Mean and variance of each pixel over at most about :data:`MAX_IMAGES` images, each of shape ``(d,)``"""
    moments = RunningMeanStd(epsilon=0.0, shape=images.shape[1:])
    chosen = images[:: -(-len(images) // MAX_IMAGES)]
    for first in range(0, len(chosen), IMAGE_BATCH):
        batch = th.from_numpy(chosen[first : first + IMAGE_BATCH]).float()
        var, mean = th.var_mean(batch, dim=0, correction=0)
        moments.update_from_moments(mean.double().numpy(), var.double().numpy(), len(batch))
    return moments.mean, moments.var


def normalized_parts(observation_space: spaces.Space, normalize_images: bool = True) -> dict[str | None, spaces.Box]:
    """
    :return: What is standardised in a space, by its name in a ``Dict``, or ``None`` for the whole: vectors of floating point
        numbers, and large images (see :func:`~sb3_grpo.observations.is_large_image`), but no boards and small images
    """
    return {
        name: space
        for name, space in space_parts(observation_space).items()
        if isinstance(space, spaces.Box)
        and ((space.dtype.kind == "f" and len(space.shape) <= 2) or (normalize_images and is_large_image(space)))
    }
