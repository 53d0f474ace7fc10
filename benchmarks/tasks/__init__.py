"""
Gymnasium environments whose seed fixes a stream of inputs that nobody controls and that drives the rewards: jobs,
demand, prices, bandwidth, wind. Members of a group live through the same inputs, whatever they do.

Importing ``benchmarks`` registers them. Their modules are imported when an environment is made, so that registering costs
next to nothing; in a process that has not imported it, such as a worker, write
``gym.make("benchmarks.tasks:sb3_grpo/LoadBalancing-v0")``.
"""

from abc import abstractmethod
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import register

#: Id of each environment, its class, and its time limit; ``None`` where episodes end by themselves.
TASKS = {
    "sb3_grpo/LoadBalancing-v0": ("load_balancing:LoadBalancingEnv", None),
    "sb3_grpo/LostSales-v0": ("lost_sales:LostSalesEnv", None),
    "sb3_grpo/EnergyStorage-v0": ("energy_storage:EnergyStorageEnv", None),
    "sb3_grpo/BitRate-v0": ("bit_rate:BitRateEnv", None),
    "sb3_grpo/GustyHalfCheetah-v0": ("gusty_half_cheetah:GustyHalfCheetahEnv", 1000),
    "sb3_grpo/Queueing-v0": ("queueing:QueueingEnv", None),
}
#: The same of environments of `benchmarks.systems`
SYSTEMS_TASKS = {
    "sb3_grpo/FullServers-v0": ("load_balancing:FullServersEnv", None),
    "sb3_grpo/TMaze-v0": ("t_maze:TMazeEnv", None),
    "sb3_grpo/Answers-v0": ("answers:AnswersEnv", None),
}


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


def make(task: str, **kwargs: Any) -> Any:
    """
    Make an environment; ``gymnasium.make`` calls this.

    It is a function because of Gymnasium's warning about a class that cannot render ``rgb_array``, the mode SB3 asks
    for first.

    :param task: Module and class of the environment, separated by a colon
    :param kwargs: Arguments of the class
    :return: The environment
    """
    module, name = task.split(":")
    return getattr(import_module(f"benchmarks.tasks.{module}"), name)(**kwargs)


for env_id, (task, max_episode_steps) in {**TASKS, **SYSTEMS_TASKS}.items():
    register(env_id, entry_point="benchmarks.tasks:make", max_episode_steps=max_episode_steps, kwargs={"task": task})
