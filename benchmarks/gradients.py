"""
How much of the true gradient is in an update: judges estimates of advantages without the luck of whole trainings.

    python -m benchmarks.gradients --env Hopper-v5 --seed 190 --options "{gae_lambda: 0.9}"

GRPO trains a policy with its defaults, and then the policy stays as it is. The *signal* of a natural-gradient step is its
expected gain over that of a step of the same size along the true gradient of the discounted return. It is the cosine between
the two, in the metric of the Fisher matrix. Steps with other options come from the same rollouts.

The true gradient is estimated by long rollouts of other seeds, with lambda=1. Its errors are independent of the updates and
cancel in the mean over them, so ratios of signals are exact to a few percent after some minutes. They tell nothing about how
much a training gains by them.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch as th
import yaml
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.tables import markdown_table
from sb3_grpo import GRPO
from sb3_grpo.arithmetic.natural import conjugate_gradient, metric_product
from sb3_grpo.arithmetic.update import natural_learner

N_ENVS = 8
#: Transitions per rollout, and per long one
ROLLOUT, LONG_ROLLOUT = 2048, 16_384
#: Rollouts that only the fits see
N_UNSEEN = 20
#: Added to the seed of a training for that of the long rollouts
SEED_OF_THE_TRUTH = 1000


class Direction(NamedTuple):
    """
    :param gradient: Gradient of the loss, zero for the standard deviations, whose steps have a limit of their own, shape
        ``(m,)``
    :param natural: The same, multiplied by the inverse of the Fisher matrix, which is the direction of a natural-gradient step
    """

    gradient: np.ndarray
    natural: np.ndarray


class FrozenGRPO(GRPO):
    """GRPO that notes its updates instead of making them."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.directions = list[Direction]()
        super().__init__(*args, **kwargs)

    def train(self) -> None:
        learner = natural_learner(self._objective(), self.policy, self.rollout_buffer)
        _, gradient = learner.loss_and_gradient()
        gradient = gradient.where(learner.largest_changes(1.0).isinf(), 0.0)
        natural = conjugate_gradient(partial(metric_product, learner), gradient)
        self.directions.append(Direction(gradient.double().numpy(), natural.double().numpy()))


def directions(env_id: str, seed: int, policy: dict[str, Any], n_rollouts: int, size: int, **options: Any) -> list[Direction]:
    """
    :param policy: State of the policy
    :param n_rollouts: Number of updates
    :param size: Transitions per rollout, unless the options have ``n_steps``
    :param options: Arguments of GRPO
    :return: The updates, after :data:`N_UNSEEN` others
    """
    env = make_vec_env(env_id, N_ENVS, seed=seed)
    model = FrozenGRPO("MlpPolicy", env, seed=seed, device="cpu", **{"n_steps": size // N_ENVS, **options})
    model.policy.load_state_dict(policy)
    model.learn((n_rollouts + N_UNSEEN) * model.n_steps * N_ENVS)
    env.close()
    return model.directions[N_UNSEEN:]


def signals(truth: Sequence[Direction], updates: Sequence[Direction]) -> np.ndarray:
    """
    :param truth: Independent estimates of the gradient, at least two
    :param updates: Updates
    :return: Signal of each update, whose mean over updates is free of the errors of the gradient, shape ``(n_updates,)``
    :raises ValueError: If the estimates have no gradient in common
    """
    gradients, naturals = (np.stack(each) for each in zip(*truth, strict=True))
    squares = gradients @ naturals.T
    # Products of different estimates only, as those of an estimate with itself have its errors in them
    squared_norm = (squares.sum() - squares.trace()) / max(len(truth) * (len(truth) - 1), 1)
    if squared_norm <= 0:
        raise ValueError(f"{len(truth)} long rollouts have no gradient in common. Pass more `--rollouts`.")
    norms = np.array([math.sqrt(each.gradient @ each.natural) for each in updates])
    gains = np.array([gradients.mean(axis=0) @ each.natural for each in updates])
    return gains / norms / math.sqrt(squared_norm)


def main() -> None:
    """Print the signal of updates by default and with other options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--timesteps", type=int, default=150_000, help="of the training")
    parser.add_argument("--rollouts", type=int, default=300, help="updates; there are an eighth as many long rollouts")
    parser.add_argument("--options", nargs="+", default=[], type=yaml.safe_load, help="arguments of GRPO, as YAML")
    args = parser.parse_args()
    th.set_num_threads(1)
    trained = GRPO("MlpPolicy", make_vec_env(args.env, N_ENVS, seed=args.seed), seed=args.seed, device="cpu")
    policy = trained.learn(args.timesteps).policy.state_dict()
    n_long, plain = max(args.rollouts * ROLLOUT // LONG_ROLLOUT, 1), dict(gae_lambda=1.0, normalize_advantage=False)
    truth = directions(args.env, args.seed + SEED_OF_THE_TRUTH, policy, n_long, LONG_ROLLOUT, **plain)
    variants = [{}, *args.options]
    found = [signals(truth, directions(args.env, args.seed, policy, args.rollouts, ROLLOUT, **each)) for each in variants]
    by_default, lines = found[0], []
    for options, signal in zip(variants, found, strict=True):
        error = (signal - by_default).std() / by_default.mean() / math.sqrt(len(signal))
        ratio = f"{signal.mean() / by_default.mean():.2f} ({error:.2f})"
        lines.append([str(options or "default"), f"{signal.mean():.4f}", ratio])
    print(markdown_table(["options", "signal", "over the default's, with standard error"], lines))


if __name__ == "__main__":
    main()
