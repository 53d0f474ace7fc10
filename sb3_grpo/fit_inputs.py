"""What the kernel baseline sees of observations."""

import copy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import obs_as_tensor
from torch.nn import functional as F

from sb3_grpo.extractors import has_channels_first
from sb3_grpo.observations import Observations, has_images, is_large_image, observation_parts, space_parts
from sb3_grpo.policies import ActorPolicy

#: An observation gives a fit at most this many inputs. More are hashed, see :func:`hashed_inputs`.
MAX_INPUTS = 512
#: Height and width of the pictures that :func:`pooled_pictures` makes of images
PICTURE_SIZE = 14
#: Number of past changes of the inputs that the fit sees if the policy has a memory
N_CHANGES = 2
#: Number of images that are pooled at a time
POOLING_BATCH = 16


def hashed_inputs(inputs: th.Tensor) -> th.Tensor:
    """
    Feature hashing (Weinberger et al. 2009, https://arxiv.org/abs/0902.2206): input ``i`` is added to sum ``i mod MAX_INPUTS``
    with a fixed random sign.

    Squared distances keep their expectation over the signs. An input whose sum has no other input that varies keeps all its
    information, so little is lost where most inputs are constant.

    :param inputs: Inputs, shape ``(n, d)``
    :return: Sums, shape ``(n, MAX_INPUTS)``; the inputs themselves if they are not more than that
    """
    n_inputs = inputs.shape[1]
    if n_inputs <= MAX_INPUTS:
        return inputs
    # The stream of this generator is the same in all versions of numpy.
    signs = th.as_tensor(2.0 * np.random.RandomState(0).randint(2, size=n_inputs) - 1.0).to(inputs)
    sums = inputs.new_zeros(len(inputs), MAX_INPUTS)
    for part, part_signs in zip(inputs.split(MAX_INPUTS, dim=1), signs.split(MAX_INPUTS), strict=True):
        sums[:, : part.shape[1]].addcmul_(part, part_signs)
    return sums


def n_pictures(shape: tuple[int, ...]) -> int:
    """:return: Number of pictures that :func:`pooled_pictures` makes of an image of a shape"""
    return 2 if min(shape) > 1 else 1


def pooled_pictures(images: np.ndarray, device: th.device | str = "cpu") -> th.Tensor:
    """
    Two coarse pictures of each image: the mean over the channels, averaged over the pixels of a cell, and the largest
    difference of neighbouring channels in a cell. If the channels are successive frames, the first picture shows where things
    are, and the second what moves, however small it is.

    :param images: Images, of which the channels' axis is the shortest, shape ``(n, *image_shape)``
    :param device: Device that does the arithmetic
    :return: The pictures, each of ``PICTURE_SIZE * PICTURE_SIZE`` cells; only the first if there is a single channel,
        shape ``(n, d)``
    """
    shape = images.shape[1:]
    pictures = th.empty(len(images), n_pictures(shape), PICTURE_SIZE, PICTURE_SIZE, device=device)
    for batch, part in zip(th.from_numpy(images).split(POOLING_BATCH), pictures.split(POOLING_BATCH), strict=True):
        frames = (batch if has_channels_first(shape) else batch.movedim(-1, 1)).to(device).float()
        part[:, :1] = F.adaptive_avg_pool2d(frames.mean(dim=1, keepdim=True), PICTURE_SIZE)
        if n_pictures(shape) > 1:
            change = frames.diff(dim=1).abs_().amax(dim=1, keepdim=True)
            part[:, 1:] = F.adaptive_max_pool2d(change, PICTURE_SIZE)
    return pictures.flatten(start_dim=1).cpu()


def past_changes(inputs: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """
    The changes of the inputs in the last :data:`N_CHANGES` steps, the latest first. Where observations are positions, they
    stand for velocities and accelerations. Those before an episode or a rollout are zero.

    :param inputs: Inputs, shape ``(n_envs, n, d)``
    :param steps: Steps within the episodes, shape ``(n_envs, n)``
    :return: The changes, shape ``(n_envs, n, N_CHANGES * d)``
    """
    changes, by_age = np.diff(inputs, axis=1, prepend=inputs[:, :1]), []
    for age in range(N_CHANGES):
        by_age.append(np.where(steps[..., None] > age, changes, 0.0))
        changes = np.roll(changes, 1, axis=1)
        changes[:, 0] = 0.0
    return np.concatenate(by_age, axis=2)


class FitInputs:
    """
    The inputs of the kernel baseline.

    They are the flattened observations, with one-hot encoding of discrete ones and standardisation by the policy's
    :class:`~sb3_grpo.normalization.ObservationNormalizer`. Large images (see :func:`~sb3_grpo.observations.is_large_image`)
    are replaced by :func:`pooled_pictures`.

    Of boards and small images, the inputs are the output of a features extractor: a copy of the policy's as it was at the
    first fit, which is random unless the policy was trained before. It never changes, so statistics of earlier rollouts stay
    valid. Features of the policy itself explain less.

    More than :data:`MAX_INPUTS` inputs are hashed, see :func:`hashed_inputs`.

    If the policy has a memory, :func:`past_changes` are further inputs. The state of the memory is not an input: its meaning
    changes with each update, and a fit to it explained less.

    :param observation_space: Observation space
    """

    def __init__(self, observation_space: spaces.Space):
        self._parts = space_parts(observation_space)
        small = {name: part for name, part in self._parts.items() if not is_large_image(part)}
        self._uses_network = any(has_images(part) for part in small.values())
        self._pictures = self._parts.keys() - small.keys()
        self._extractor: BaseFeaturesExtractor | None = None
        self._saved_extractor: dict[str, th.Tensor] | None = None

    @property
    def kind(self) -> dict[str, str]:
        """What images are to the fit, for its saved state. Empty if there are none."""
        if self._uses_network:
            return {"extractor": "of the first fit"}
        return {"images": "pooled"} if self._pictures else {}

    def __call__(self, observations: Observations, policy: ActorPolicy) -> np.ndarray:
        """
        :param observations: Observations, shape ``(n, *obs_shape)`` or a dict of such
        :param policy: The actor
        :return: Inputs, shape ``(n, d)``
        """
        if self._uses_network:
            if self._extractor is None:
                self._extractor = copy.deepcopy(policy.features_extractor).requires_grad_(False).eval()
                if self._saved_extractor is not None:
                    self._extractor.load_state_dict(self._saved_extractor)
            return hashed_inputs(th.from_numpy(policy.encode(observations, self._extractor.to(policy.device)))).numpy()
        arrays = observation_parts(observations)
        tensors = obs_as_tensor({name: arrays[name] for name in self._parts.keys() - self._pictures}, policy.device)
        if policy.normalizer is not None:
            # The policy keeps to the statistics that it acted with, and a fit need not.
            tensors = policy.normalizer(tensors, latest=True)

        def inputs_of(name: Any, part: spaces.Space) -> th.Tensor:
            if name in self._pictures:
                # Not every other device can pool images of every size
                return pooled_pictures(arrays[name], policy.device if policy.device.type == "cuda" else "cpu")
            values = preprocess_obs(tensors[name], part, normalize_images=False)
            assert isinstance(values, th.Tensor)
            return values.unsqueeze(-1).flatten(start_dim=1).cpu()

        return hashed_inputs(th.cat([inputs_of(*each) for each in self._parts.items()], dim=1)).double().numpy()

    def of_rollout(
        self,
        observations: Observations,
        steps: np.ndarray,
        cuts: np.ndarray,
        cut_observations: Observations,
        policy: ActorPolicy,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        :param observations: Observations, environment by environment, shape ``(n_envs * n, *obs_shape)``
        :param steps: Steps within the episodes, shape ``(n_envs, n)``
        :param cuts: Indices of the transitions after which a trajectory was cut, shape ``(n_cuts,)``
        :param cut_observations: Observations after them, shape ``(n_cuts, *obs_shape)``
        :param policy: The actor
        :return: Inputs of the transitions and of the observations after the cuts, shapes ``(n_envs * n, d)``, ``(n_cuts, d)``
        """
        inputs, after_cuts = self(observations, policy), self(cut_observations, policy)
        if policy.state_size == 0:
            return inputs, after_cuts
        changes = past_changes(inputs.reshape(*steps.shape, -1), steps).reshape(len(inputs), -1)
        at_cuts = after_cuts, after_cuts - inputs[cuts], changes[cuts, : -inputs.shape[1]]
        return np.hstack([inputs, changes]), np.hstack(at_cuts)

    def standardised_by(self, policy: ActorPolicy) -> np.ndarray | bool:
        """:return: Which inputs the policy's normaliser has standardised, shape ``(d,)``; ``False`` for none"""
        if policy.normalizer is None or self._uses_network:
            return False
        sizes = [
            n_pictures(part.shape) * PICTURE_SIZE**2 if name in self._pictures else get_flattened_obs_dim(part)  # type: ignore[arg-type]
            for name, part in self._parts.items()
        ]
        standardised = policy.normalizer.slices.keys() - self._pictures
        covered = np.repeat([name in standardised for name in self._parts], sizes)
        n_changes = N_CHANGES * len(covered) if policy.state_size > 0 else 0
        return np.append(covered, np.zeros(n_changes, bool)) if len(covered) <= MAX_INPUTS else False

    def get_state(self) -> dict[str, th.Tensor] | None:
        """:return: Weights of the features extractor; ``None`` if there is none"""
        if self._extractor is None:
            return self._saved_extractor
        return {name: weights.cpu() for name, weights in self._extractor.state_dict().items()}

    def set_state(self, state: dict[str, th.Tensor] | None) -> None:
        """Take weights of :meth:`get_state`."""
        self._saved_extractor, self._extractor = state, None
