"""Observations of every shape: arrays, and dicts or tuples of arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

#: A batch of observations: an array, or a dict of arrays for a Dict space. The first axis counts observations.
Observations = np.ndarray | dict[str, np.ndarray]
#: Height and width from which images count as large. SB3's ``NatureCNN`` takes no smaller ones
LARGE_IMAGE = 36


def map_observations(function: Callable[..., Any], *batches: Any) -> Any:
    """:return: Result of a function for the arrays of batches; dicts or tuples of results for dicts or tuples of arrays"""
    first = batches[0]
    if isinstance(first, dict):
        return {key: function(*(batch[key] for batch in batches)) for key in first}
    if isinstance(first, tuple):  # a VecEnv may have such a space, a policy may not
        return tuple(function(*parts) for parts in zip(*batches, strict=True))
    return function(*batches)


def take_observations(observations: Any, index: Any) -> Any:
    """:return: The observations, arrays or tensors, at an index of the first axis"""
    return map_observations(lambda array: array[index], observations)


def observation_parts(observations: Any) -> dict[Any, np.ndarray]:
    """:return: The arrays of observations by their key or position; an array alone has the key ``None``"""
    if isinstance(observations, dict):
        return dict(observations)
    if isinstance(observations, tuple):
        return dict(enumerate(observations))
    return {None: observations}


def space_parts(space: spaces.Space) -> dict[Any, spaces.Space]:
    """:return: The spaces of a ``Dict`` by their key; another space has the key ``None``, as in :func:`observation_parts`"""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}


def in_form(observations: Any, space: spaces.Space) -> Any:
    """
    :param observations: A batch, as an environment or a wrapper returned it: arrays, tensors, lists, of any type of numbers
    :param space: Space of each observation, none of which is a ``Tuple``
    :return: A copy in arrays of shape ``(n, *obs_shape)``, with numbers of the space in the place of booleans
    :raises ValueError: If observations have more or fewer numbers than the space
    """
    if type(observations) is np.ndarray and observations.shape[1:] == space.shape and observations.dtype.kind != "b":
        return np.array(observations)  # nearly always; the order in memory stays

    def formed(batch: Any, part: spaces.Space) -> np.ndarray:
        array = np.array(batch)
        if array.dtype.kind == "b":
            array = array.astype(part.dtype)
        shape: Any = part.shape
        if array.shape[1:] == shape:
            return array
        if array.shape == shape:  # of a single environment
            return array[None]
        if array.size != len(array) * np.prod(shape):
            raise ValueError(
                f"The environments returned observations of shape {array.shape[1:]}, but their space {part} has shape "
                f"{shape}: a wrapper that changes the shape of observations has to change `observation_space` as well."
            )
        return array.reshape(len(array), *shape)

    if isinstance(space, spaces.Dict):
        return {key: formed(observations[key], part) for key, part in space.spaces.items()}
    return formed(observations, space)


def one_in_form(observation: Any, space: spaces.Space) -> Any:
    """:return: A single observation as :func:`in_form` has it in a batch"""
    batch = {key: [observation[key]] for key in space.spaces} if isinstance(space, spaces.Dict) else [observation]
    return take_observations(in_form(batch, space), 0)


def has_images(space: spaces.Space) -> bool:
    """:return: Whether observations are images or boards, or contain some: arrays with three axes, of whatever type"""
    return any(isinstance(part, spaces.Box) and len(part.shape) > 2 for part in space_parts(space).values())


def is_large_image(space: spaces.Space) -> bool:
    """:return: Whether observations are arrays with three axes, of which two have at least :data:`LARGE_IMAGE` entries"""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and sorted(space.shape)[1] >= LARGE_IMAGE


def has_boards(space: spaces.Space) -> bool:
    """:return: Whether observations have boards or small images, and no large ones"""
    return has_images(space) and not any(map(is_large_image, space_parts(space).values()))


def with_axes(observations: Any, space: spaces.Space) -> Any:
    """:return: The same batch, but numbers of a Box of shape ``()`` have shape ``(n, 1)``, because networks need an axis"""
    scalars = [key for key, part in space_parts(space).items() if isinstance(part, spaces.Box) and part.shape == ()]
    if None in scalars:
        return observations.reshape(-1, 1)
    return {**observations, **{key: observations[key].reshape(-1, 1) for key in scalars}} if scalars else observations


def same_values(left: Any, right: Any) -> bool:
    """:return: Whether two nestings of dicts, lists and tuples of arrays and numbers are equal. NaN is equal to NaN"""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_values, left, right))
    if isinstance(left, (dict, list, tuple)) or isinstance(right, (dict, list, tuple)):
        return False
    left, right = np.asarray(left), np.asarray(right)
    # Only floats and complex numbers can be NaN, and `equal_nan` fails for some of the other types.
    return np.array_equal(left, right, equal_nan=np.issubdtype(left.dtype, np.inexact))
