"""What the input-driven environments have in common: the stream of inputs is drawn once, at the reset."""

from abc import abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np


class InputDrivenEnv(gym.Env[np.ndarray, Any]):
    """
    An environment driven by a stream of inputs that the seed fixes and that actions cannot change (Mao et al. 2018,
    https://arxiv.org/abs/1807.02264).

    ``reset`` draws the whole stream from ``np_random``; a step draws nothing. ``reset(options={"inputs": ...})``
    replaces the stream, for instance with a recorded one. Its arrays have to have the names and lengths of those in
    ``inputs``.
    """

    #: The stream of the current episode, by name
    inputs: dict[str, np.ndarray]
    #: Steps since the reset
    n_steps_taken: int

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        inputs = self._draw_inputs(self.np_random)
        if options is not None and "inputs" in options:
            given = {name: np.asarray(values) for name, values in options["inputs"].items()}
            expected = {name: values.shape for name, values in inputs.items()}
            if {name: values.shape for name, values in given.items()} != expected:
                raise ValueError(f"`options['inputs']` must have these arrays and shapes: {expected}, not {given!r}.")
            inputs = given
        self.inputs = inputs
        self.n_steps_taken = 0
        self._begin()
        return self._observe(), {}

    @abstractmethod
    def _draw_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """
        :param rng: Generator that the seed has set
        :return: The inputs of a whole episode, by name
        """

    @abstractmethod
    def _begin(self) -> None:
        """Put the environment into its first state."""

    @abstractmethod
    def _observe(self) -> np.ndarray:
        """:return: Observation of the current state"""
