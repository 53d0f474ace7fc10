"""A finite set of scenarios, such as recorded days or levels, in the place of infinitely many seeds."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym


class Scenarios(gym.Wrapper[Any, Any, Any, Any]):
    """
    Begins each episode with one of a list of scenarios, which it passes to the environment's ``reset`` among the options.

    The seed of a reset chooses the scenario with the number ``seed % len(scenarios)``, so the members of a group have the same
    one, and all scenarios are equally likely. A reset without a seed takes the next in the list, so as many episodes of an
    evaluation as there are scenarios play each of them once. The number is in the info of the reset, as ``scenario``.

    :param env: Environment whose ``reset`` takes a scenario among its options
    :param scenarios: The scenarios, at least one
    :param option: Name of the option
    :raises ValueError: If there is no scenario
    """

    def __init__(self, env: gym.Env[Any, Any], scenarios: Sequence[Any], option: str = "scenario"):
        if len(scenarios) == 0:
            raise ValueError("`scenarios` is empty: pass at least one scenario.")
        super().__init__(env)
        self.scenarios = scenarios
        self.option = option
        self._next = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        number = (self._next if seed is None else int(seed)) % len(self.scenarios)
        self._next = number + 1
        chosen = {self.option: self.scenarios[number], **(options or {})}
        observation, info = self.env.reset(seed=seed, options=chosen)
        return observation, {**info, "scenario": number}
