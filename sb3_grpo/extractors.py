"""A features extractor for images that are too small for SB3's ``NatureCNN``."""

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

#: Size of the convolution's kernel
KERNEL_SIZE = 3


def has_channels_first(shape: tuple[int, ...]) -> bool:
    """:return: Whether the first of a picture's three axes is the shortest, which SB3 makes of that of an image's channels"""
    return int(np.argmin(shape[::-1])) == 2


class SmallCNN(BaseFeaturesExtractor):
    """
    One convolution and one linear layer, for boards and small images. It is the network of MinAtar's paper (Young & Tian 2019,
    https://arxiv.org/abs/1903.03176). The axis of the channels is the first if it is the shortest, which is what SB3 makes of
    images, and else the last.

    :param observation_space: ``Box`` with three axes, of which those of a picture have at least three entries
    :param features_dim: Number of features
    :param n_channels: Number of channels of the convolution
    :raises ValueError: If the space has another shape
    """

    def __init__(self, observation_space: spaces.Space, features_dim: int = 128, n_channels: int = 16):
        super().__init__(observation_space, features_dim)
        shape = observation_space.shape or ()
        if len(shape) != 3:
            raise ValueError(f"`SmallCNN` is for pictures with channels, three axes in all, not for {observation_space}.")
        self.shape, self.channels_first = shape, has_channels_first(shape)
        n_inputs, height, width = shape if self.channels_first else (shape[2], *shape[:2])
        if min(height, width) < KERNEL_SIZE:
            raise ValueError(
                f"Pictures of {height} x {width} are too small for the {KERNEL_SIZE} x {KERNEL_SIZE} convolution of "
                "`SmallCNN`: pass 'MlpPolicy'."
            )
        n_outputs = n_channels * (height - KERNEL_SIZE + 1) * (width - KERNEL_SIZE + 1)
        self.cnn = nn.Sequential(nn.Conv2d(n_inputs, n_channels, KERNEL_SIZE), nn.ReLU(), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(n_outputs, features_dim), nn.ReLU())
        self._convolution = repr(self.cnn[0])

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """:return: Features of pictures, shape ``(n, features_dim)``"""
        pictures = observations if self.channels_first else observations.permute(0, 3, 1, 2)
        return self.linear(self.cnn(pictures))

    def is_as_built(self) -> bool:
        """:return: Whether the convolution is still of the kind that :meth:`patches` describes"""
        return type(self.cnn[0]) is nn.Conv2d and repr(self.cnn[0]) == self._convolution

    def patches(self) -> np.ndarray:
        """
        :return: For each input of the convolution's kernel, and each position of the kernel, the index of the entry of a
            flattened picture that it sees, shape ``(n_inputs * 9, n_positions)``, in the order of the weights
        """
        entries = th.arange(int(np.prod(self.shape)), dtype=th.float64).reshape(1, *self.shape)
        pictures = entries if self.channels_first else entries.permute(0, 3, 1, 2)
        return nn.functional.unfold(pictures, KERNEL_SIZE)[0].long().contiguous().numpy()
