"""
Variants of the relative term, compared by the variance that they remove from the same advantages.

    python -m benchmarks.relative                                    # seed 0 of the input-driven and of some ordinary tasks
    python -m benchmarks.relative --envs CartPole-v1 --group-size 8

A default run is recorded with the relative term switched off. Then each variant is applied to the recorded advantages of all
rollouts in turn. No coefficient is ever fitted to the samples that it is applied to.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.tables import markdown_table
from sb3_grpo import GRPO, KernelRolloutBuffer, relative
from sb3_grpo import advantages as A
from sb3_grpo.relative import RelativeTerm

ENVS = (
    *(f"sb3_grpo/{name}-v0" for name in ("LoadBalancing", "LostSales", "EnergyStorage", "BitRate", "GustyHalfCheetah")),
    *("CartPole-v1", "Pendulum-v1", "LunarLander-v3"),
)
N_PARTS = 4


class Recorded(NamedTuple):
    """
    A rollout.

    :param advantages: Advantages against the kernel baseline, shape ``(n,)``
    :param residuals: Whole returns minus the same baseline, shape ``(n,)``
    :param starts: See :meth:`sb3_grpo.relative.RelativeTerm.apply`
    :param steps: Likewise
    :param dones: Likewise
    """

    advantages: np.ndarray
    residuals: np.ndarray
    starts: np.ndarray
    steps: np.ndarray
    dones: np.ndarray


class RecordingBuffer(KernelRolloutBuffer):
    """Keeps all rollouts."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recorded: list[Recorded] = []

    def _form_update(self, rollout: Any, *args: Any) -> Any:
        rollout, advantages = super()._form_update(rollout, *args)
        ends = rollout.dones.copy()
        ends[self.buffer_size - 1 :: self.buffer_size] = True
        continues = 1.0 - ends
        # The residuals are sums of the same temporal differences, with lambda of 1
        differences = advantages - self.gamma * self.gae_lambda * continues * np.append(advantages[1:], 0.0)
        residuals = A.linear_recurrence(differences, self.gamma * continues)
        self.recorded.append(Recorded(advantages, residuals, rollout.starts, rollout.steps, rollout.dones))
        return rollout, advantages


def record(env: str, group_size: int, timesteps: int) -> list[Recorded]:
    """
    :param env: Gymnasium environment
    :param group_size: Number of trajectories per group
    :param timesteps: Budget
    :return: The rollouts of a default run with eight environments
    """
    model = GRPO(
        "MlpPolicy", make_vec_env(env, n_envs=8), group_size=group_size, rollout_buffer_class=RecordingBuffer,
        rollout_buffer_kwargs=dict(relative=False), seed=0, device="cpu",
    )  # fmt: skip
    model.learn(timesteps)
    return model.rollout_buffer.recorded  # type: ignore[attr-defined]


@contextmanager
def standard_errors(number: float) -> Iterator[None]:
    """
    :param number: Number of standard errors up to which a correlation counts as noise, for a while
    """
    before = relative.N_STANDARD_ERRORS
    relative.N_STANDARD_ERRORS = number
    try:
        yield
    finally:
        relative.N_STANDARD_ERRORS = before


def as_shipped(rollouts: list[Recorded], group_size: int) -> list[np.ndarray]:
    """:return: Advantages with the relative term, as the buffer computes it"""
    term = RelativeTerm(group_size)
    return [term.apply(each.advantages, each.starts, each.steps, each.dones) for each in rollouts]


def not_shrunk(rollouts: list[Recorded], group_size: int) -> list[np.ndarray]:
    """:return: The same without shrinking"""
    with standard_errors(0.0):
        return as_shipped(rollouts, group_size)


def by_part(rollouts: list[Recorded], group_size: int) -> list[np.ndarray]:
    """:return: The same with a coefficient for each quarter of the longest episode"""
    longest = max(int(each.steps.max()) for each in rollouts) + 1
    terms = [RelativeTerm(group_size) for _ in range(N_PARTS)]
    results = []
    for each in rollouts:
        part, result = each.steps * N_PARTS // longest, each.advantages.copy()
        for number, term in enumerate(terms):
            own = part == number
            if own.any():
                result[own] = term.apply(each.advantages[own], each.starts[own], each.steps[own], each.dones[own])
        results.append(result)
    return results


def against_residuals(rollouts: list[Recorded], group_size: int) -> list[np.ndarray]:
    """:return: Advantages minus a part of the other members' mean residual, by the regression of the former on the latter"""
    earlier, results = np.zeros(6), []
    for each in rollouts:
        groups = each.starts // group_size
        peers = np.unique(groups * (each.steps.max() + 1) + each.steps, return_inverse=True)[1]
        others = each.residuals - A.differences_from_others(each.residuals, peers)
        others = np.where(np.bincount(peers)[peers] > 1, others, np.nan)
        own = np.unique(groups, return_inverse=True)[1]
        sums = relative.correlation_sums(others, each.advantages + 0.0 * others, own)
        coefficient = relative.shrunk_correlation(earlier + relative.in_units_of_their_size(relative.sums_of_others(sums)))
        earlier = relative.FORGETTING * (earlier + relative.in_units_of_their_size(sums.sum(axis=0)))
        results.append(each.advantages - coefficient[own] * np.nan_to_num(others))
    return results


VARIANTS: dict[str, Callable[[list[Recorded], int], list[np.ndarray]]] = {
    "as shipped": as_shipped,
    "not shrunk": not_shrunk,
    "a coefficient for each quarter": by_part,
    "against residuals": against_residuals,
}


def share_removed(rollouts: list[Recorded], results: list[np.ndarray]) -> float:
    """
    :param rollouts: Rollouts
    :param results: Advantages that a variant made of them
    :return: Mean over rollouts of the share of the variance that is gone
    """
    pairs = zip(rollouts, results, strict=True)
    return float(np.mean([1.0 - result.var() / each.advantages.var() for each, result in pairs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--timesteps", type=int, default=120_000)
    args = parser.parse_args()
    th.set_num_threads(1)
    gym.logger.min_level = gym.logger.ERROR
    lines = []
    for env in args.envs:
        rollouts = record(env, args.group_size, args.timesteps)
        shares = [share_removed(rollouts, variant(rollouts, args.group_size)) for variant in VARIANTS.values()]
        lines.append([env.removeprefix("sb3_grpo/"), *(f"{share:.3f}" for share in shares)])
        print(", ".join(lines[-1]), flush=True)
    print(f"\n{markdown_table(['groups of ' + str(args.group_size), *VARIANTS], lines)}")


if __name__ == "__main__":
    main()
