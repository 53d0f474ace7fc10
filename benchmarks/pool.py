"""
Environments of EnvPool, which are written in C++, as a `VecEnv` of Stable-Baselines3.

    pip install envpool
    python -m benchmarks.pool               # steps per second of GRPO with Gymnasium's environments and EnvPool's, in turns
"""

import argparse
import time
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from benchmarks.speed import training
from benchmarks.timing import take_turns
from sb3_grpo import GRPO


# The recipe begins here.
class EnvPoolVecEnv(VecEnv):
    """
    :param env_id: Environment of EnvPool, such as ``"HalfCheetah-v5"``
    :param n_envs: Number of environments
    :param options: Other arguments of ``envpool.make_gymnasium``, such as ``seed`` and ``num_threads``
    """

    def __init__(self, env_id: str, n_envs: int, **options: Any):
        import envpool

        self.pool = envpool.make_gymnasium(env_id, num_envs=n_envs, **options)
        space = self.pool.action_space
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        super().__init__(n_envs, self.pool.observation_space, spaces.Box(low, high))

    def reset(self) -> np.ndarray:
        return self.pool.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.pool.send(actions.astype(np.float64))

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, rewards, terminated, truncated, _ = self.pool.recv()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        over = np.flatnonzero(terminated | truncated)
        for i in over:
            infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": bool(truncated[i] and not terminated[i])}
        if len(over) > 0:  # EnvPool would begin the next episode a step later
            obs[over] = self.pool.reset(over.astype(np.int32))[0]
        return obs, rewards, terminated | truncated, infos

    def close(self) -> None:
        self.pool.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        raise AttributeError(f"Environments of EnvPool have no attributes, so no {attr_name!r}.")

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError("Environments of EnvPool have no attributes.")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(f"Environments of EnvPool have no methods, so no {method_name!r}.")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


# It ends here.


def main() -> None:
    """Print steps per second with both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--timesteps", type=int, default=16_384, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    th.set_num_threads(1)
    envs: dict[str, VecEnv] = {
        "Gymnasium": make_vec_env(args.env, n_envs=8, seed=0),
        "EnvPool": VecMonitor(EnvPoolVecEnv(args.env, 8, seed=0, num_threads=1)),
    }
    models = {name: GRPO("MlpPolicy", env, seed=0) for name, env in envs.items()}
    turns = {name: training(model, args.timesteps) for name, model in models.items()}
    # CPU time of the whole process, because EnvPool steps in a thread of its own
    seconds = take_turns(turns, args.rounds, time.process_time)
    for name, turn in seconds.items():
        print(f"{name}: {args.timesteps / np.median(turn):.0f} steps per second of CPU time")
    print(f"EnvPool over Gymnasium: {np.median(seconds['Gymnasium'] / seconds['EnvPool']):.2f}")


if __name__ == "__main__":
    main()
