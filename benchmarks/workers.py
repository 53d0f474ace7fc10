"""
How fast the workers of a `RayVecEnv` collect, as ratios of steps per second. Both sides of a ratio take turns.

    python -m benchmarks.workers
    python -m benchmarks.workers --rounds 9 --n-steps 512

Only collecting is timed, not the updates. With two workers, this process waits; so two cores are enough.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from benchmarks.statistics import median
from benchmarks.tables import markdown_table
from sb3_grpo import GRPO
from sb3_grpo.distributed import RayVecEnv


class Slow(gym.Wrapper):
    """Sleeps for five milliseconds in each step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return self.env.step(action)


def environments(env: str, n_envs: int, n_workers: int, **kwargs: Any) -> VecEnv:
    """
    :param env: Gymnasium environment
    :param n_envs: Number of environments
    :param n_workers: Number of workers; 0 for this process, -1 for a process for each environment
    :return: The environments
    """
    if n_workers > 0:
        kwargs |= dict(vec_env_cls=RayVecEnv, vec_env_kwargs=dict(n_workers=n_workers))
    elif n_workers < 0:
        kwargs |= dict(vec_env_cls=SubprocVecEnv)
    return make_vec_env(env, n_envs=n_envs, **kwargs)


def collector(env: VecEnv, n_steps: int) -> Callable[[], float]:
    """
    :param env: Environments
    :param n_steps: Steps of each in a rollout
    :return: Function that collects a rollout and returns steps per second
    """
    model = GRPO("MlpPolicy", env, n_steps=n_steps, batch_size=n_steps, seed=0, device="cpu")
    _, callback = model._setup_learn(1, ConvertCallback(None))

    def collect() -> float:
        began = time.perf_counter()
        model._collect(model.env, callback, model.rollout_buffer, n_steps)  # type: ignore[arg-type]
        return n_steps * env.num_envs / (time.perf_counter() - began)

    return collect


def ratio(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> str:
    """
    :param ours: Function that returns steps per second
    :param theirs: Function that does so for what it is compared with
    :param rounds: Number of turns of each
    :return: Median of the ratios, with an interval
    """
    ours(), theirs()  # workers build their policies
    return str(median(np.array([ours() / theirs() for _ in range(rounds)])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--n-steps", type=int, default=256)
    args = parser.parse_args()
    th.set_num_threads(1)
    slow: dict[str, Any] = dict(wrapper_class=Slow)
    comparisons = [
        ("CartPole-v1: 1 worker with 8 environments, over 8 in process", "CartPole-v1", (8, 1), (8, 0), {}),
        ("HalfCheetah-v5: the same", "HalfCheetah-v5", (8, 1), (8, 0), {}),
        ("CartPole-v1: 2 workers with 4 each, over a SubprocVecEnv of 2", "CartPole-v1", (8, 2), (2, -1), {}),
        ("HalfCheetah-v5: the same", "HalfCheetah-v5", (8, 2), (2, -1), {}),
        ("CartPole-v1 with 5 ms a step: 8 workers, over 1 with 8", "CartPole-v1", (8, 8), (8, 1), slow),
    ]
    lines = []
    for what, name, ours, theirs, kwargs in comparisons:
        n_steps = args.n_steps if not kwargs else 32
        envs = [environments(name, *each, **kwargs) for each in (ours, theirs)]
        mine, its = (collector(env, n_steps) for env in envs)
        lines.append([what, ratio(mine, its, args.rounds)])
        print(*lines[-1], sep=": ", flush=True)
        for env in envs:
            env.close()
    print(f"\n{markdown_table(['collecting', 'ratio of steps per second'], lines)}")

    env = environments("CartPole-v1", 8, 2)
    model = GRPO("MlpPolicy", env, n_steps=args.n_steps, seed=0, device="cpu")
    model._setup_learn(1, ConvertCallback(None))
    actions = np.zeros(8, dtype=np.int64)
    calls = [time.perf_counter() for _ in range(200) if env.step(actions)]
    print(f"\na step of 2 workers, one call each: {1000 * np.median(np.diff(calls)):.1f} ms")
    obs = env.reset()
    starts = np.arange(8, dtype=np.int64)
    assert model.start_queue is not None
    rollout = env.collect(  # type: ignore[attr-defined]
        model._policy_recipe(), model.policy, obs, starts, model.start_queue, True, args.n_steps, -1, 0
    )
    arrays = sum(getattr(rollout, name).nbytes for name in ("obs", "actions", "log_probs", "starts", "rewards", "dones"))
    size, n = len(cloudpickle.dumps(rollout)), args.n_steps * 8
    print(f"CartPole-v1: {size / n:.0f} bytes per transition, {size / arrays:.2f} of the transitions themselves")
    env.close()


if __name__ == "__main__":
    main()
