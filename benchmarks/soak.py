"""
Does a long run keep its memory? Resident memory of training on CartPole after the first 100,000 steps and at the end.

    python -m benchmarks.soak                    # a million steps each: workers, and each buffer that judges whole groups
    python -m benchmarks.soak --cases outcome --timesteps 300000

Each case runs in a process of its own. ``workers`` is the default buffer with a ``SubprocVecEnv`` of 4, whose workers count
too; the others have 8 environments in one process, whose episodes are of all lengths while the policy learns. The command
fails if memory has grown by more than 5%.
"""

import argparse
import multiprocessing
import os
import pathlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_grpo import GRPO

CASES: dict[str, dict[str, Any]] = {
    "workers": dict(rollout_buffer_class="kernel"),
    **{
        buffer: dict(rollout_buffer_class=buffer, group_size=8)
        for buffer in ("outcome", "process", "return_to_go", "stepwise")
    },
}
ALLOWED_GROWTH = 1.05


class Soak(NamedTuple):
    """
    :param case: what has run
    :param early: resident memory after the first part of the run, in MB
    :param late: at its end
    :param steps_per_second: of the whole run
    """

    case: str
    early: float
    late: float
    steps_per_second: float


def resident_memory() -> float:
    """:return: of this process and its children, in MB, from Linux's ``/proc``"""
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    children = multiprocessing.active_children()
    pids = [os.getpid(), *(child.pid for child in children if child.pid is not None)]
    return sum(int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids)


class MemoryProbe(BaseCallback):
    """
    Reads memory at the end of rollouts.

    :param early_at: steps after which the first figure is taken
    """

    def __init__(self, early_at: int):
        super().__init__()
        self.early_at = early_at
        self.early: float | None = None

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self.early is None and self.num_timesteps >= self.early_at:
            self.early = resident_memory()


def soak(case: str, timesteps: int, early_at: int) -> Soak:
    """
    :param case: a key of :data:`CASES`
    :param timesteps: of the run
    :param early_at: steps after which the first figure is taken
    :return: figures
    """
    th.set_num_threads(1)
    is_parallel = case == "workers"
    env = make_vec_env("CartPole-v1", 4 if is_parallel else 8, seed=0, vec_env_cls=SubprocVecEnv if is_parallel else None)
    probe = MemoryProbe(early_at)
    began = time.perf_counter()
    model = GRPO("MlpPolicy", env, seed=0, device="cpu", **CASES[case])
    model.learn(timesteps, callback=probe, log_interval=1_000_000)
    late = resident_memory()
    env.close()
    assert probe.early is not None, f"a run of {timesteps} steps ends before {early_at}"
    return Soak(case, probe.early, late, model.num_timesteps / (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--timesteps", type=int, default=1_000_000)
    parser.add_argument("--early-at", type=int, default=100_000, help="steps after which the first figure is taken")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    args = parser.parse_args()
    grown = False
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(soak, case, args.timesteps, args.early_at) for case in args.cases]
        for future in futures:
            result = future.result()
            growth = result.late / result.early
            grown |= growth > ALLOWED_GROWTH
            print(
                f"{result.case:<13} {result.early:7.1f} MB after {args.early_at:,} steps, {result.late:7.1f} MB after "
                f"{args.timesteps:,}: {growth:.3f} ({result.steps_per_second:,.0f} steps/s)",
                flush=True,
            )
    sys.exit(f"memory has grown by more than {ALLOWED_GROWTH - 1:.0%}" if grown else 0)


if __name__ == "__main__":
    main()
