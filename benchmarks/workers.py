"""
How fast the workers of a `RayVecEnv` collect, as ratios of steps per second. Both sides of a ratio take turns.

    python -m benchmarks.workers
    python -m benchmarks.workers --rounds 9 --n-steps 512

Only collecting is timed, not the updates. With two workers, this process waits; so two cores are enough.

The last table has what a transition costs. Workers wait while the model receives and learns, so N workers take
``call / n + step / N + receive + learn`` per transition, where ``n`` is the size of the rollout. They reach half of N times
the speed of one if a step of the environment takes ``N (receive + learn)``, and more if it takes longer.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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
from sb3_grpo.collection import collect
from sb3_grpo.distributed import RayVecEnv
from sb3_grpo.observations import observation_parts

ENVIRONMENTS = ("CartPole-v1", "HalfCheetah-v5")


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

    def collect_once() -> float:
        began = time.perf_counter()
        collect(model, callback, model.rollout_buffer, n_steps, model._starts(env))
        return n_steps * env.num_envs / (time.perf_counter() - began)

    return collect_once


def ratio(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> str:
    """
    :param ours: Function that returns steps per second
    :param theirs: Function that does so for what it is compared with
    :param rounds: Number of turns of each
    :return: Median of the ratios, with an interval
    """
    ours(), theirs()  # workers build their policies
    return str(median(np.array([ours() / theirs() for _ in range(rounds)])))


class Costs(NamedTuple):
    """
    Costs of a transition, in bytes and milliseconds.

    :param env: Gymnasium environment
    :param size: Bytes that a worker sends
    :param overhead: These over the bytes of its arrays
    :param call: Time until all workers have answered with rollouts of a single step, for the whole rollout
    :param receive: Time of the model to receive it: callbacks and buffer
    :param learn: Time of the model to learn from it: baseline, advantages, update
    :param step: A step of all environments that is a call of its own
    """

    env: str
    size: float
    overhead: float
    call: float
    receive: float
    learn: float
    step: float


def transition_costs(name: str, rounds: int, n_steps: int) -> Costs:
    """
    :param name: Gymnasium environment
    :param rounds: Number of rollouts, of which the medians count
    :param n_steps: Steps of each environment in a rollout
    :return: Costs of two workers with four environments each
    """
    env = environments(name, 8, 2)
    model = GRPO("MlpPolicy", env, n_steps=n_steps, seed=0, device="cpu")
    _, callback = model._setup_learn(1, ConvertCallback(None))
    assert model.env is not None and model.ledger is not None
    parts: list[Any] = []
    waits, receives, learns = [], [], []
    ask = env._ask  # type: ignore[attr-defined]

    def timed_ask(requests: Any) -> Any:
        began = time.perf_counter()
        parts[:] = ask(requests)
        waits.append(time.perf_counter() - began)
        return parts

    env._ask = timed_ask  # type: ignore[attr-defined]
    for _ in range(rounds + 1):
        began = time.perf_counter()
        collect(model, callback, model.rollout_buffer, n_steps, model._starts(env))
        receives.append(time.perf_counter() - began - waits[-1])
        began = time.perf_counter()
        open_groups = model.ledger.open_groups()
        model.rollout_buffer.finish_rollout(model._last_obs, model.policy, open_groups, True)
        model.train()
        learns.append(time.perf_counter() - began)
        model.rollout_buffer.reset()
    n = 8 * n_steps
    columns = [each for part in parts for each in part[0][:-1]]  # without the infos
    arrays = sum(array.nbytes for each in columns for array in observation_parts(each).values())
    size = sum(len(cloudpickle.dumps(part)) for part in parts)
    receive, learn = (1000 * float(np.median(times[1:])) / n for times in (receives, learns))
    env._ask = ask  # type: ignore[attr-defined]
    short = collector(env, 1)
    short()
    call = 1000 * float(np.median([8 / short() for _ in range(rounds)]))
    model.env.reset()
    actions = np.array([env.action_space.sample() for _ in range(8)])
    calls = [time.perf_counter() for _ in range(200) if env.step(actions)]
    env.close()
    return Costs(name, size / n, size / arrays, call, receive, learn, 1000 * float(np.median(np.diff(calls))))


def cost_table(costs: list[Costs]) -> str:
    """
    :param costs: Measured costs
    :return: Table of them, and of what follows from them
    """
    names = (
        "bytes per transition (over its arrays)", "a rollout of one step, ms", "a step that is a call, ms",
        "to receive a transition, ms", "to learn from it, ms", "transitions per second, at most", "MB per second then",
        "step with which 8, 64 and 1,000 workers reach half of their speed",
    )  # fmt: skip
    columns = []
    for each in costs:
        busy = each.receive + each.learn
        columns.append([
            f"{each.size:.0f} ({each.overhead:.2f})", f"{each.call:.1f}", f"{each.step:.1f}", f"{each.receive:.3f}",
            f"{each.learn:.3f}", f"{1000 / busy:,.0f}", f"{each.size / busy / 1000:.1f}",
            ", ".join(f"{n_workers * busy:.1f} ms" for n_workers in (8, 64, 1000)),
        ])  # fmt: skip
    return markdown_table(["", *(each.env for each in costs)], zip(names, *columns, strict=True))


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
        envs = [environments(name, *each, **kwargs) for each in (ours, theirs)]
        mine, its = (collector(env, args.n_steps) for env in envs)
        lines.append([what, ratio(mine, its, args.rounds if not kwargs else 5)])  # a rollout takes ten seconds
        print(*lines[-1], sep=": ", flush=True)
        for env in envs:
            env.close()
    print(f"\n{markdown_table(['collecting', 'ratio of steps per second'], lines)}")

    print(f"\n{cost_table([transition_costs(name, args.rounds, args.n_steps) for name in ENVIRONMENTS])}")


if __name__ == "__main__":
    main()
