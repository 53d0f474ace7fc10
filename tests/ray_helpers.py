"""Environments that can fail, in workers of Ray."""

import os
import pathlib
import signal
import sys
import time
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import helpers
import numpy as np
import torch as th
from gymnasium import spaces
from helpers import weights
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo import GRPO
from sb3_grpo.distributed import RayVecEnv

# Workers cannot import these modules
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(helpers)


N_STEPS = 64


class Walk(gym.Env):
    """A walk with drawn steps and episode lengths. It fails once, if there is a marker file to say so, else each time."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, marker: str = "", fault: str = "", at: int = 100, repeats: bool = True):
        self.marker, self.fault, self.at, self.repeats = marker, fault, at, repeats
        self.n_steps = 0
        self.colour = "blue"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if self.fault == "dies in its first reset if told so" and os.path.exists(self.marker):
            os.remove(self.marker)
            os.kill(os.getpid(), signal.SIGKILL)
        self.position, self.left = self.np_random.normal(), int(self.np_random.integers(5, 40))
        return self._observation(), {"first": self.position}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        if self.n_steps == self.at and not os.path.exists(self.marker):
            if self.marker:
                pathlib.Path(self.marker).touch()
            self._fail()
        self.position += float(action[0]) + (self.np_random.normal() if self.repeats else np.random.default_rng().normal())
        self.left -= 1
        done = self.left == 0
        info = {"position": self.position, "odd": self.left % 2 == 1, **({"last": "yes"} if done else {})}
        return self._observation(), -abs(self.position), done and self.position > 0, done and self.position <= 0, info

    def _fail(self) -> None:
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            time.sleep(1000)
        if self.fault == "raises":
            raise ZeroDivisionError("no way on")

    def _observation(self) -> np.ndarray:
        return np.array([self.position, self.left], np.float32)


def ray_env(n_workers: int = 2, faulty: int = -1, timeout: float = 60.0, **kwargs: Any) -> Any:
    """:return: Environments of which one fails"""
    fns = [partial(Walk, **(kwargs if env_idx == faulty else {})) for env_idx in range(4)]
    return RayVecEnv([partial(monitored, fn) for fn in fns], n_workers=n_workers, timeout=timeout)


def monitored(fn: Any) -> gym.Env:
    from stable_baselines3.common.monitor import Monitor

    return Monitor(fn())


def make(env: VecEnv, **kwargs: Any) -> Any:
    settings: dict[str, Any] = dict(seed=0, n_steps=N_STEPS, n_epochs=2, policy_kwargs=dict(net_arch=[8]), device="cpu")
    return GRPO("MlpPolicy", env, **{**settings, **kwargs})


def trained(env: VecEnv, n_rollouts: int = 3, **kwargs: Any) -> dict[str, th.Tensor]:
    model = make(env, **kwargs).learn(n_rollouts * N_STEPS * env.num_envs)
    env.close()
    return weights(model)


class Observer(BaseCallback):
    """Notes what callbacks see in each step."""

    def __init__(self, stop_after: int = -1):
        super().__init__()
        self.stop_after = stop_after
        self.rows: list[dict[str, Any]] = []
        self.timesteps: list[int] = []

    def _on_step(self) -> bool:
        names = ("new_obs", "rewards", "dones", "infos", "actions", "clipped_actions", "n_steps", "obs_tensor", "log_probs")
        self.rows.append({name: self.locals[name] for name in names})
        self.timesteps.append(self.num_timesteps)
        return len(self.rows) != self.stop_after
