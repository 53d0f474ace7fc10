"""HalfCheetah in the wind."""

from typing import Any

import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

#: Largest force of the wind on the torso in N, and the standard deviation of its change from one step to the next
LARGEST_FORCE, FORCE_CHANGE = 10.0, 1.0

#: Steps of an episode, for which the wind is drawn
N_STEPS = 1000


class GustyHalfCheetahEnv(HalfCheetahEnv):
    """
    Gymnasium's HalfCheetah-v5 with gusts of horizontal force on its torso, fixed by the seed and not observed.

    **Input**: the force in each step, a random walk between -10 and 10 N: it starts uniformly in -1 to 1 and changes by
    a standard normal number in each step. The cheetah weighs 14 kg. Actions, observations and rewards are those of
    HalfCheetah-v5. It needs the extra ``mujoco``.

    Wind as a random input of locomotion is an idea of Mao et al. 2018 (https://arxiv.org/abs/1807.02264, Walker2d with wind);
    the size of the force and of its steps was chosen here. Departures: the body is the HalfCheetah, which never ends an
    episode, and the wind is not part of the observation.

    No heuristic is known for it; the references are random actions and standing still (no torque).
    """

    #: The stream of the current episode
    inputs: dict[str, np.ndarray]

    def reset_model(self) -> np.ndarray:
        observation = super().reset_model()
        force, forces = float(self.np_random.uniform(-1, 1)), []
        for change in (FORCE_CHANGE * self.np_random.standard_normal(N_STEPS)).tolist():
            forces.append(force)
            force = min(max(force + change, -LARGEST_FORCE), LARGEST_FORCE)
        self.inputs = {"force": np.array(forces)}
        self._n_steps_taken = 0
        return observation

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, Any]:
        # Without a time limit the wind starts anew
        self.data.body("torso").xfrc_applied[0] = self.inputs["force"][self._n_steps_taken % N_STEPS]
        self._n_steps_taken += 1
        return super().step(action)
