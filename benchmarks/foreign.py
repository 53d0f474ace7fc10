"""
Environments from PyPI, written by others, in which the seed of a reset fixes inputs that drive the rewards.

    python -m benchmarks.foreign screen                                       # how much members of a group have in common
    python -m benchmarks.foreign run --env newsvendor --arm grpo --seed 100   # train, evaluate, append a row

The packages are no requirements of the benchmarks: a message names the command that installs one that is missing.
"""

import argparse
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import DtypeObservation, FlattenObservation, RescaleAction, TimeLimit
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.curves import TrainingCurve
from benchmarks.results import RESULTS, append_row, has_row, provenance
from benchmarks.statistics import difference_of_means
from benchmarks.tables import markdown_table
from benchmarks.versus import outcome
from sb3_grpo import GRPO, check_shared_inputs

ROWS = RESULTS / "foreign.csv"
FIELDS = [
    "arm", "env", "seed", "timesteps", "auc", "eval_mean", "eval_std", "correlation", "cpu_seconds", "commit", "versions",
]  # fmt: skip
N_ENVS = 8
#: Seeds of the scenarios of the evaluation, which no training uses
SCENARIOS = range(10_000, 10_020)
#: Arguments of GRPO as it comes, and without groups
OURS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_alone": dict(group_size=2, share_starts=False, rollout_buffer_kwargs=dict(relative=False)),
}
ARMS = (*OURS, "ppo")


class FreshSeeds(gym.Wrapper[Any, Any, Any, Any]):
    """Draws a seed for each reset without one, in the place of an environment that then repeats its last scenario."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env)
        self._seeds = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            seed = int(self._seeds.integers(2**31 - 1))
        else:
            self._seeds = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)


class ShowsGenerator(gym.Wrapper[Any, Any, Any, Any]):
    """Has the generator of pyRDDLGym's simulator as an attribute, where ``check_shared_inputs`` looks for generators."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        self.generator = self.env.unwrapped.sampler.rng  # type: ignore[attr-defined]
        return result


class FlatBox(gym.ActionWrapper[Any, Any, Any]):
    """
    Takes actions between -1 and 1 for a ``Dict`` of numbers or arrays: a Box is scaled to its bounds, and of a discrete space,
    the range is cut into equal parts.

    :param bounds: Bounds of Boxes that have none, such as orders of any size
    """

    def __init__(self, env: gym.Env[Any, Any], bounds: tuple[float, float] = (0.0, 1.0)):
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Dict)
        self._parts, self._bounds = env.action_space.spaces, bounds
        self._sizes = [int(np.prod(part.shape)) if isinstance(part, spaces.Box) else 1 for part in self._parts.values()]
        self.action_space = spaces.Box(-1.0, 1.0, (sum(self._sizes),), np.float32)

    def action(self, action: np.ndarray) -> dict[str, Any]:
        pieces = np.split((np.clip(action, -1.0, 1.0).astype(np.float64) + 1.0) / 2.0, np.cumsum(self._sizes)[:-1])
        return {name: self._scaled(part, piece) for (name, part), piece in zip(self._parts.items(), pieces, strict=True)}

    def _scaled(self, part: spaces.Space[Any], shares: np.ndarray) -> Any:
        if isinstance(part, spaces.Discrete):
            return int(part.start + min(int(shares[0] * part.n), part.n - 1))
        assert isinstance(part, spaces.Box)
        limit = 1e6  # what is beyond stands for infinity
        low = np.where(np.abs(part.low) > limit, self._bounds[0], part.low)
        high = np.where(np.abs(part.high) > limit, self._bounds[1], part.high)
        values = low + shares.reshape(part.shape) * (high - low)
        return np.round(values).astype(part.dtype) if part.dtype.kind in "iu" else values.astype(part.dtype)


def flat(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """:return: The environment with vectors as observations, and with actions between -1 and 1 if they are a Box"""
    env = DtypeObservation(FlattenObservation(env), np.float32)
    if not isinstance(env.action_space, spaces.Box):
        return env
    if env.action_space.dtype.kind in "iu":
        whole = env.action_space
        floats = spaces.Box(whole.low.astype(np.float32), whole.high.astype(np.float32), dtype=np.float32)
        env = gym.wrappers.TransformAction(env, lambda action: np.round(action).astype(whole.dtype), floats)
    return RescaleAction(env, np.float32(-1.0), np.float32(1.0))


def inventory(module: str, name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """:return: An environment of or-gym-inventory"""
    return flat(getattr(importlib.import_module(f"or_gym_inventory.{module}"), name)(**kwargs))


def supply_chain(scenario: str, largest_order: float = 100.0, **demand: Any) -> gym.Env[Any, Any]:
    """
    :param scenario: "network" or "serial"
    :param largest_order: Limit of an order. That of the package is the capacity of the whole episode, thousands of units
    :param demand: Configuration of the demand
    :return: An environment of gym-invmgmt
    """
    make = importlib.import_module("gym_invmgmt").CoreEnv
    env = make(scenario=scenario, demand_config={"base_mu": 20, "use_goodwill": False, **demand}, num_periods=30)
    env.action_space = spaces.Box(0.0, largest_order, env.action_space.shape, np.float32)
    return flat(env)


def rddl(domain: str, instance: str, bounds: tuple[float, float] = (0.0, 1.0)) -> gym.Env[Any, Any]:
    """
    :param domain: Name in rddlrepository
    :param instance: Number of its instance
    :param bounds: Bounds of actions that have none
    :return: The environment of pyRDDLGym, which ends after the instance's horizon
    """
    env = importlib.import_module("pyRDDLGym").make(domain, instance, vectorized=True, enforce_action_constraints=False)
    return flat(FlatBox(TimeLimit(ShowsGenerator(env), env.horizon), bounds))


def market(module: str, name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """:return: An environment of sharpearena"""
    return flat(FreshSeeds(getattr(importlib.import_module(f"sharpearena.{module}"), name)(**kwargs)))


def by_id(module: str, env_id: str) -> gym.Env[Any, Any]:
    """:return: An environment that a package registers"""
    importlib.import_module(module)
    return flat(gym.make(env_id))


class Foreign(NamedTuple):
    """
    :param package: What pip installs, the first one giving the version
    :param make: Makes the environment
    """

    package: str
    make: Callable[[], gym.Env[Any, Any]]


RDDL, ORDERS, CHAIN = "pyrddlgym rddlrepository", "or-gym-inventory", "gym-invmgmt"
REGISTRY: dict[str, Foreign] = {
    "newsvendor": Foreign(ORDERS, partial(inventory, "newsvendor", "NewsvendorEnv")),
    "stages_backlog": Foreign(ORDERS, partial(inventory, "inventory_management", "InvManagementBacklogEnv")),
    "stages_lost_sales": Foreign(ORDERS, partial(inventory, "inventory_management", "InvManagementLostSalesEnv")),
    "serial_chain": Foreign(CHAIN, partial(supply_chain, "serial")),
    "serial_chaos": Foreign(CHAIN, partial(supply_chain, "serial", type="combined_chaos", noise_scale=2.0)),
    "serial_goodwill": Foreign(CHAIN, partial(supply_chain, "serial", type="combined_chaos", use_goodwill=True)),
    "network_chain": Foreign(CHAIN, partial(supply_chain, "network")),
    "dynamic_inventory": Foreign("stokasta", partial(by_id, "stokasta", "stokasta/DynamicInventory-v0")),
    "reservoir": Foreign(RDDL, partial(rddl, "Reservoir_Continuous", "0", (0.0, 100.0))),
    "reservoir_2023": Foreign(RDDL, partial(rddl, "Reservoir_ippc2023", "1", (0.0, 100.0))),
    "supply_chain": Foreign(RDDL, partial(rddl, "SupplyChain_or", "0", (0.0, 20.0))),
    "power": Foreign(RDDL, partial(rddl, "PowerGen_Continuous", "0", (0.0, 10.0))),
    "power_2023": Foreign(RDDL, partial(rddl, "PowerGen_ippc2023", "1", (0.0, 10.0))),
    "hvac": Foreign(RDDL, partial(rddl, "HVAC", "0", (0.0, 10.0))),
    "option": Foreign(RDDL, partial(rddl, "Option_or", "0")),
    "portfolio": Foreign("sharpearena", partial(market, "portfolio_env", "PortfolioEnv")),
    "portfolio_hard": Foreign("sharpearena", partial(market, "portfolio_env", "PortfolioEnv", distribution_mode="hard")),
    "market_making": Foreign("sharpearena", partial(market, "market_making", "MarketMakingEnv")),
    "execution": Foreign("sharpearena", partial(market, "execution", "ExecutionEnv")),
}
#: Those of the comparison, see PROTOCOL.md
CHOSEN = ("reservoir", "reservoir_2023", "portfolio_hard", "portfolio", "network_chain", "execution")


def made(name: str) -> gym.Env[Any, Any]:
    """
    :param name: Name in ``REGISTRY``
    :return: The environment
    :raises SystemExit: If its package, or one that this needs, is not installed
    """
    foreign = REGISTRY[name]
    try:
        return foreign.make()
    except ImportError as error:
        raise SystemExit(f"{name} needs a package that is not installed ({error}): pip install {foreign.package}") from error


def screen(names: list[str]) -> None:
    """Print one line of a table for each environment."""
    print("| environment | package | verdict | share | seconds per 1,000 steps |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        env, package = made(name), REGISTRY[name].package.split()[0]
        found = check_shared_inputs(env)
        share = "" if found.share is None else f"{found.share:.2f}"
        version = importlib.metadata.version(package)
        print(f"| {name} | {package} {version} | {found.verdict} | {share} | {1000 * seconds_per_step(env):.2f} |", flush=True)


def seconds_per_step(env: gym.Env[Any, Any], n_steps: int = 200) -> float:
    """:return: Processor seconds of a step with random actions, resets included"""
    began, done = time.process_time(), True
    for _ in range(n_steps):
        if done:
            env.reset(seed=0)
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        done = terminated or truncated
    return (time.process_time() - began) / n_steps


def make_model(name: str, arm: str, seed: int) -> BaseAlgorithm:
    """
    :param name: Name in ``REGISTRY``
    :param arm: One of ``ARMS``: GRPO, or SB3's PPO with normalised observations and rewards
    :param seed: Seed of the run
    :return: The model, with eight environments
    """
    envs = make_vec_env(partial(made, name), n_envs=N_ENVS, seed=seed)
    if arm == "ppo":  # with as many transitions a rollout as its default has with one environment
        return PPO("MlpPolicy", VecNormalize(envs), n_steps=2048 // N_ENVS, seed=seed, device="cpu")
    return GRPO("MlpPolicy", envs, seed=seed, device="cpu", **OURS[arm])


def evaluate(model: BaseAlgorithm, env: gym.Env[Any, Any]) -> np.ndarray:
    """:return: Returns of the deterministic policy, shape ``(n_scenarios,)``"""
    normalizer, totals = model.get_vec_normalize_env(), []
    for seed in SCENARIOS:
        observation, total, done = env.reset(seed=seed)[0], 0.0, False
        while not done:
            seen = observation if normalizer is None else normalizer.normalize_obs(observation)
            observation, reward, terminated, truncated, _ = env.step(model.predict(seen, deterministic=True)[0])
            total, done = total + float(reward), terminated or truncated
        totals.append(total)
    return np.array(totals)


def run(name: str, arm: str, seed: int, timesteps: int) -> None:
    """Train, evaluate and append a row, unless there is one."""
    key = dict(arm=arm, env=name, seed=str(seed), timesteps=str(timesteps))
    if has_row(ROWS, key):
        return
    th.set_num_threads(1)
    model, curve = make_model(name, arm, seed), TrainingCurve()
    began = time.process_time()
    model.learn(timesteps, callback=curve)
    seconds = time.process_time() - began
    totals = evaluate(model, made(name))
    term = getattr(model.rollout_buffer, "relative_term", None)  # type: ignore[attr-defined]
    row = {
        **key,
        "auc": f"{curve.area(timesteps):.4f}",
        "eval_mean": f"{totals.mean():.4f}",
        "eval_std": f"{totals.std():.4f}",
        "correlation": "" if term is None else f"{term.correlation:.4f}",
        "cpu_seconds": f"{seconds:.1f}",
        **provenance(),
    }
    row["versions"] += "".join(f" {each}={importlib.metadata.version(each)}" for each in REGISTRY[name].package.split())
    append_row(ROWS, row, FIELDS)
    print(f"{name}, {arm}, seed {seed}: area {row['auc']}, evaluation {row['eval_mean']}")


def table(rows: Sequence[dict[str, str]]) -> str:
    """:return: Means over seeds by environment, with :func:`~benchmarks.versus.outcome` of GRPO against GRPO without groups"""
    lines = []
    for name in CHOSEN:
        runs = [[row for row in rows if (row["env"], row["arm"]) == (name, arm)] for arm in ARMS]
        counts = [len(each) for each in runs if each]
        if not counts:
            continue
        line = [f"`{name}`"]
        for column in ("auc", "eval_mean"):
            ours, alone, ppo = (np.array([float(row[column]) for row in each]) for each in runs)
            word = outcome(difference_of_means(ours, alone)) if min(len(ours), len(alone)) > 1 else "level"
            mean, *others = (three_digits(each.mean()) if len(each) else "" for each in (ours, alone, ppo))
            line += [mean if word == "level" else f"{mean}, {word}", *others]
        lines.append([*line, " to ".join(str(each) for each in dict.fromkeys((min(counts), max(counts))))])
    columns = [f"{measure}, {arm}" for measure in ("area", "evaluation") for arm in ("groups", "none", "PPO")]
    return markdown_table(["environment", *columns, "seeds"], lines)


def three_digits(value: float) -> str:
    """:return: The number with about three digits that count"""
    return f"{value:,.{max(0, 2 - int(np.floor(np.log10(abs(value)))))}f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    screening = commands.add_parser("screen", help="print a table")
    screening.add_argument("--envs", nargs="+", choices=REGISTRY, default=list(REGISTRY), metavar="ENV")
    running = commands.add_parser("run", help="train, evaluate and append a row to results/foreign.csv")
    running.add_argument("--env", required=True, choices=REGISTRY)
    running.add_argument("--arm", required=True, choices=ARMS)
    running.add_argument("--seed", required=True, type=int)
    running.add_argument("--timesteps", type=int, default=100_000)
    args = parser.parse_args()
    if args.command == "screen":
        screen(args.envs)
    else:
        run(args.env, args.arm, args.seed, args.timesteps)


if __name__ == "__main__":
    gym.logger.min_level = gym.logger.ERROR
    main()
