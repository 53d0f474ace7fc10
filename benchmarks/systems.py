"""
The experiments of the pages about real systems.

    python -m benchmarks.systems masks               # servers that can be full, with and without action masks
    python -m benchmarks.systems environments        # steps per second and memory with up to 1,024 environments
    python -m benchmarks.systems hidden-velocities   # CartPole and Pendulum without velocities, with frames and with memory
    python -m benchmarks.systems t-maze              # what was seen at the start decides at the end of a corridor
    python -m benchmarks.systems memory              # LunarLander, MiniGrid and POPGym, with frames and with memory
    python -m benchmarks.systems memory-images       # steps per second with images and memory
    python -m benchmarks.systems demonstrations      # LunarLander after five demonstrations
    python -m benchmarks.systems answers             # DeepSeek's setting: one step, a prompt, a group of answers

``memory`` needs POPGym: ``pip install --no-deps popgym mazelib cython`` installs what its tasks take of it.

Each makes the runs that ``benchmarks/results/systems.csv`` does not have yet, and prints the table of the page;
``demonstrations`` draws its figure as well. ``--table`` makes no runs. Seeds are development seeds, below 100.
"""

import argparse
import json
import multiprocessing
import pathlib
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import matplotlib
import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.envs.box2d.lunar_lander import heuristic
from gymnasium.wrappers import FlattenObservation
from minigrid.wrappers import ImgObsWrapper
from rl_zoo3.wrappers import MaskVelocityWrapper
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize, sync_envs_normalization
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.results import RESULTS, append_row, read_rows
from benchmarks.tables import markdown_table
from benchmarks.tasks.t_maze import FORWARD, LEFT
from sb3_grpo import GRPO, MaskableGRPO, RecurrentGRPO, __version__
from sb3_grpo.policies import ActorPolicy


class Experiment(NamedTuple):
    """
    :param run: Makes the run of an arm with a seed, and returns the measured numbers by name
    :param arms: Arguments of each arm besides the seed, by its name in the table
    :param n_seeds: Number of seeds
    :param digits: Number of decimals in the table
    :param draw: Draws the figure of the page from the rows, if it has one
    """

    run: Callable[..., dict[str, float]]
    arms: dict[str, tuple[Any, ...]]
    n_seeds: int
    digits: int
    draw: Callable[[Sequence[dict[str, Any]]], None] | None = None


def trained(model: Any, n_steps: int, **kwargs: Any) -> float:
    """:return: CPU seconds of a training, with further arguments of ``learn``"""
    began = time.process_time()
    model.learn(n_steps, **kwargs)
    return time.process_time() - began


# --- action masks -----------------------------------------------------------------------------------------------------


def train_on_full_servers(seed: int, use_masking: bool) -> dict[str, float]:
    """:return: Mean returns of the last 100 episodes of training, and of the last policy over 20 scenarios"""
    room = dict(max_jobs=2)
    env = make_vec_env("sb3_grpo/FullServers-v0", n_envs=8, env_kwargs=room)
    model: Any = MaskableGRPO("MlpPolicy", env, seed=seed, device="cpu").learn(30_000, use_masking=use_masking)
    scores = {"training": float(np.mean([episode["r"] for episode in model.ep_info_buffer or ()]))}
    for name, deterministic in (("sampled actions", False), ("most probable actions", True)):
        scenarios = make_vec_env("sb3_grpo/FullServers-v0", seed=10_000, env_kwargs=room)
        scores[name] = float(np.mean(evaluate_masked(model, scenarios, 20, deterministic, use_masking=use_masking)[0]))
    return scores


MASKS = Experiment(train_on_full_servers, {"with masks": (True,), "`use_masking=False`": (False,)}, n_seeds=5, digits=0)


# --- many environments ------------------------------------------------------------------------------------------------


class NumpyCartPole(VecEnv):
    """
    CartPole as in Gymnasium's ``CartPole-v1``, all copies in one array.

    :param num_envs: Number of copies
    """

    def __init__(self, num_envs: int):
        high = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
        super().__init__(num_envs, spaces.Box(-high, high), spaces.Discrete(2))
        self._rng = np.random.default_rng(0)

    def reset(self) -> np.ndarray:
        for env_idx, seed in enumerate(self._seeds):
            if seed is not None:
                self._rng = np.random.default_rng(seed + env_idx)
        self._reset_seeds()
        self._reset_options()
        self._state = self._rng.uniform(-0.05, 0.05, (self.num_envs, 4))
        self._steps = np.zeros(self.num_envs, int)
        return self._state.astype(np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        _, x_dot, theta, theta_dot = self._state.T
        cos, sin, force = np.cos(theta), np.sin(theta), np.where(self._actions == 1, 10.0, -10.0)
        temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        self._state += 0.02 * np.stack([x_dot, x_acc, theta_dot, theta_acc], axis=1)
        self._steps += 1
        terminated = (np.abs(self._state[:, 0]) > 2.4) | (np.abs(self._state[:, 2]) > 0.2095)
        done = terminated | (self._steps >= 500)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for env_idx in np.flatnonzero(done).tolist():
            infos[env_idx]["terminal_observation"] = self._state[env_idx].astype(np.float32)
            infos[env_idx]["TimeLimit.truncated"] = not terminated[env_idx]
        self._state[done] = self._rng.uniform(-0.05, 0.05, (int(done.sum()), 4))
        self._steps[done] = 0
        return self._state.astype(np.float32), np.ones(self.num_envs, np.float32), done, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class SeededNumpyCartPole(NumpyCartPole):
    """:class:`NumpyCartPole` whose copies can be reset with seeds, so that groups share their starts."""

    autoreset = True

    def reset_envs(self, env_indices: list[int], seeds: list[int | None]) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
        for env_idx, seed in zip(env_indices, seeds, strict=True):
            rng = self._rng if seed is None else np.random.default_rng(seed)
            self._state[env_idx] = rng.uniform(-0.05, 0.05, 4)
            self._steps[env_idx] = 0
        return list(self._state[env_indices].astype(np.float32)), [{} for _ in env_indices]


def measure_rate(seed: int, make: Callable[..., Any], make_env: Callable[[int], VecEnv], n_envs: int) -> dict[str, float]:
    """:return: Transitions per second of the second to fifth rollout of 8 steps per environment, and the largest memory"""
    env = make_env(n_envs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = make("MlpPolicy", env, n_steps=max(8, 2048 // n_envs), batch_size=256, seed=seed, device="cpu")
    rollout = model.n_steps * n_envs
    model.learn(rollout)
    began = time.perf_counter()
    model.learn(8 * rollout, reset_num_timesteps=False)
    seconds = time.perf_counter() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"steps per second": 8 * rollout / seconds, "MiB": memory}


ENVIRONMENTS = Experiment(
    measure_rate,
    {
        f"{algorithm.__name__}, {n_envs:,} {name}": (algorithm, make_env, n_envs)
        for n_envs in (64, 256, 1024)
        for name, make_env in (
            ("in a DummyVecEnv", partial(make_vec_env, "CartPole-v1")),
            ("in numpy", NumpyCartPole),
            ("in numpy, with seeds", SeededNumpyCartPole),
        )
        for algorithm in (GRPO, PPO)
        if (algorithm, make_env) != (PPO, SeededNumpyCartPole)  # which does not use the seeds
    },
    n_seeds=5,
    digits=0,
)


# --- hidden velocities ------------------------------------------------------------------------------------------------

#: Settings of RecurrentPPO: those of rl-zoo3 for CartPoleNoVel-v1, also for tasks without an entry of their own. Only where
#: they come from rl-zoo3, they include `VecNormalize`, which harmed RecurrentPPO on a task of POPGym, see LOG.md
RECURRENT: dict[str, Any] = dict(
    n_steps=32,
    batch_size=256,
    gae_lambda=0.8,
    gamma=0.98,
    n_epochs=20,
    learning_rate=lambda progress: 0.001 * progress,
    clip_range=lambda progress: 0.2 * progress,
    policy_kwargs=dict(
        ortho_init=False,
        activation_fn=th.nn.ReLU,
        lstm_hidden_size=64,
        enable_critic_lstm=True,
        net_arch=dict(pi=[64], vf=[64]),
    ),
)
#: Those of them that RecurrentGRPO takes in the arm "RecurrentPPO's settings"
SHARED_RECURRENT = {name: RECURRENT[name] for name in ("gae_lambda", "gamma", "n_epochs")}
#: Those of rl-zoo3 for PendulumNoVel-v1, with eight environments instead of four, and as many transitions a rollout
RECURRENT_PENDULUM: dict[str, Any] = dict(
    RECURRENT,
    n_steps=512,
    batch_size=128,
    gae_lambda=0.95,
    gamma=0.9,
    n_epochs=10,
    learning_rate=1e-3,
    clip_range=0.2,
    use_sde=True,
    sde_sample_freq=4,
)


def recurrent_ppo(policy: str, env: VecEnv, **kwargs: Any) -> RecurrentPPO:
    """:return: The model with normalised observations and rewards, as rl-zoo3 makes it"""
    return RecurrentPPO(policy, VecNormalize(env, gamma=kwargs["gamma"]), **kwargs)


def evaluated(model: Any, env: VecEnv) -> float:
    """:return: Mean return of the last policy over 50 episodes, with observations as in its training"""
    if model.get_vec_normalize_env() is not None:
        env = VecNormalize(env, training=False, norm_reward=False)
        sync_envs_normalization(model.get_env(), env)
    return float(np.mean(evaluate_policy(model, env, 50)[0]))


def make_framed(
    env_id: str | Callable[[], gym.Env], wrapper: Callable[[gym.Env], gym.Env], n_frames: int, seed: int
) -> VecEnv:
    """:return: Eight wrapped environments whose observations are the last frames"""
    env = make_vec_env(env_id, n_envs=8, seed=seed, wrapper_class=wrapper)
    return env if n_frames == 1 else VecFrameStack(env, n_frames)


def train_without_velocities(
    seed: int, make: Callable[..., Any], policy: str, n_frames: int, env_id: str = "CartPole-v1"
) -> dict[str, float]:
    """:return: Mean return of the last policy over 50 episodes, and CPU seconds of the training"""
    make_env = partial(make_framed, env_id, MaskVelocityWrapper, n_frames)
    model = make(policy, make_env(seed), seed=seed, device="cpu")
    seconds = trained(model, 100_000)
    return {
        "mean return": evaluated(model, make_env(10_000)),
        "seconds": seconds,
    }


HIDDEN_VELOCITIES = Experiment(
    train_without_velocities,
    {
        "GRPO": (GRPO, "MlpPolicy", 1),
        "GRPO, 4 frames": (GRPO, "MlpPolicy", 4),
        "PPO": (partial(PPO, n_steps=256), "MlpPolicy", 1),
        "PPO, 4 frames": (partial(PPO, n_steps=256), "MlpPolicy", 4),
        "RecurrentGRPO": (RecurrentGRPO, "MlpLstmPolicy", 1),
        "RecurrentPPO": (partial(recurrent_ppo, **RECURRENT), "MlpLstmPolicy", 1),
        "RecurrentPPO, defaults": (RecurrentPPO, "MlpLstmPolicy", 1),
        "GRPO, 4 frames, Pendulum": (GRPO, "MlpPolicy", 4, "Pendulum-v1"),
        "RecurrentPPO, Pendulum": (partial(recurrent_ppo, **RECURRENT_PENDULUM), "MlpLstmPolicy", 1, "Pendulum-v1"),
        "RecurrentGRPO, Pendulum": (RecurrentGRPO, "MlpLstmPolicy", 1, "Pendulum-v1"),
        "the same, gamma=0.9": (partial(RecurrentGRPO, gamma=0.9), "MlpLstmPolicy", 1, "Pendulum-v1"),
        "the same, clipped": (partial(RecurrentGRPO, update_rule="clipped"), "MlpLstmPolicy", 1, "Pendulum-v1"),
    },
    n_seeds=5,
    digits=0,
)


# --- a memory of the start ------------------------------------------------------------------------------------------------


class OnlyTurns(gym.ActionWrapper[Any, Any, Any]):
    """The T-maze for agents without masks, who go forward whatever they do, so that only the action at the end counts."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.action_space = spaces.Discrete(2)

    def action(self, action: Any) -> int:
        return int(action) + LEFT if self.unwrapped.action_masks()[LEFT] else FORWARD  # type: ignore[attr-defined]

    def action_masks(self) -> np.ndarray:
        """:return: That both turns are allowed, in the place of the masks of the maze"""
        return np.ones(2, bool)


def train_in_t_maze(seed: int, make: Callable[..., Any], policy: str, length: int, has_masks: bool) -> dict[str, float]:
    """:return: Mean return of the last 500 episodes of a training of 40,960 steps, and its CPU seconds"""
    wrapper = None if has_masks else OnlyTurns
    env = make_vec_env("sb3_grpo/TMaze-v0", n_envs=8, seed=seed, env_kwargs=dict(length=length), wrapper_class=wrapper)
    model = make(policy, env, seed=seed, device="cpu", stats_window_size=500)
    seconds = trained(model, 40_960)
    return {"mean return": float(np.mean([episode["r"] for episode in model.ep_info_buffer])), "seconds": seconds}


LONG_MEMORY = partial(RecurrentGRPO, policy_kwargs=dict(chrono_init=100))
REMEMBERING = {
    "MaskableGRPO, masks": (MaskableGRPO, "MlpPolicy", True),
    "RecurrentGRPO, masks": (RecurrentGRPO, "MlpLstmPolicy", True),
    "RecurrentGRPO": (RecurrentGRPO, "MlpLstmPolicy", False),
    "RecurrentGRPO, masks, chrono": (LONG_MEMORY, "MlpLstmPolicy", True),
    "RecurrentGRPO, chrono": (LONG_MEMORY, "MlpLstmPolicy", False),
    "RecurrentPPO": (partial(RecurrentPPO, **RECURRENT), "MlpLstmPolicy", False),
}
T_MAZE = Experiment(
    train_in_t_maze,
    {
        f"{name}, corridor of {length}": (make, policy, length, has_masks)
        for length in (10, 50)
        for name, (make, policy, has_masks) in REMEMBERING.items()
    },
    n_seeds=5,
    digits=2,
)

# --- tasks of others that need a memory ---------------------------------------------------------------------------------


def view_only(env: gym.Env) -> gym.Env:
    """:return: A MiniGrid whose observations are what the agent sees, as a vector"""
    return FlattenObservation(ImgObsWrapper(env))


#: Environments, each with a wrapper that makes vectors of what is seen
MEMORY_TASKS: dict[str, Callable[[gym.Env], gym.Env]] = {
    "LunarLander-v3": MaskVelocityWrapper,
    "MiniGrid-MemoryS7-v0": view_only,
    "MiniGrid-MemoryS11-v0": view_only,
    "popgym:popgym-RepeatFirstEasy-v0": FlattenObservation,
    "popgym:popgym-RepeatPreviousEasy-v0": FlattenObservation,
    "popgym:popgym-CountRecallEasy-v0": FlattenObservation,
}


def train_to_remember(seed: int, make: Callable[..., Any], policy: str, n_frames: int, task: str) -> dict[str, float]:
    """:return: Mean returns of the last policy over 50 episodes and of all episodes of the training, and its CPU seconds"""
    # Not by its name, with which SB3 asks for images, for which LunarLander simulates particles
    make_env = partial(make_framed, partial(gym.make, task), MEMORY_TASKS[task], n_frames)
    model = make(policy, make_env(seed), seed=seed, device="cpu", stats_window_size=100_000)
    seconds = trained(model, 100_000)
    return {
        "mean return": evaluated(model, make_env(10_000)),
        "in training": float(np.mean([episode["r"] for episode in model.ep_info_buffer])),
        "seconds": seconds,
    }


MEMORY = Experiment(
    train_to_remember,
    {
        f"{task.split(':')[-1][:-3]}, {name}": (make, policy, n_frames, task)
        for task in MEMORY_TASKS
        for name, make, policy, n_frames in (
            ("GRPO, 4 frames", GRPO, "MlpPolicy", 4),
            ("RecurrentGRPO", RecurrentGRPO, "MlpLstmPolicy", 1),
            ("RecurrentGRPO, RecurrentPPO's settings", partial(RecurrentGRPO, **SHARED_RECURRENT), "MlpLstmPolicy", 1),
            ("RecurrentPPO", partial(RecurrentPPO, **RECURRENT), "MlpLstmPolicy", 1),
        )
    },
    n_seeds=5,
    digits=2,
)


def time_images(seed: int, make: Callable[..., Any]) -> dict[str, float]:
    """:return: Steps per CPU second after the first 1,024 or more, with eight environments of four frames of 84 x 84"""
    env = make_vec_env(partial(FakeImageEnv, screen_height=84, screen_width=84, n_channels=4), n_envs=8, seed=seed)
    model = make("CnnLstmPolicy", env, seed=seed, device="cpu").learn(1024)
    n_before, seconds = model.num_timesteps, trained(model, 1024, reset_num_timesteps=False)
    return {"steps per second": (model.num_timesteps - n_before) / seconds}


EQUAL: dict[str, Any] = dict(n_steps=64, batch_size=256, n_epochs=4, policy_kwargs=dict(lstm_hidden_size=64))
MEMORY_IMAGES = Experiment(
    time_images,
    {
        "RecurrentGRPO": (partial(RecurrentGRPO, share_starts=False),),
        "RecurrentPPO": (RecurrentPPO,),
        "RecurrentGRPO, equal settings": (partial(RecurrentGRPO, share_starts=False, **EQUAL),),
        "RecurrentPPO, equal settings": (partial(RecurrentPPO, **EQUAL),),
    },
    n_seeds=3,
    digits=0,
)

# --- demonstrations ---------------------------------------------------------------------------------------------------


def demonstrations(n_episodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """:return: Observations and actions of Gymnasium's heuristic for LunarLander, shapes ``(n, 8)`` and ``(n,)``"""
    env, observations, actions = gym.make("LunarLander-v3"), [], []
    for episode in range(n_episodes):
        observation, _ = env.reset(seed=seed + episode)
        ended = False
        while not ended:
            observations.append(observation)
            actions.append(heuristic(env.unwrapped, observation))
            observation, _, terminated, truncated, _ = env.step(actions[-1])
            ended = terminated or truncated
    return np.array(observations, np.float32), np.array(actions)


def clone(policy: ActorPolicy, observations: np.ndarray, actions: np.ndarray, n_epochs: int = 100) -> None:
    """Behavioural cloning: raise the probability of the demonstrated actions."""
    optimizer = th.optim.Adam(policy.parameters(), lr=1e-3)
    data = TensorDataset(th.as_tensor(observations), th.as_tensor(actions))
    for _ in range(n_epochs):
        for batch in DataLoader(data, batch_size=64, shuffle=True):
            log_prob, _ = policy.evaluate_actions(*batch)
            optimizer.zero_grad()
            (-log_prob.mean()).backward()
            optimizer.step()


def train_after_demonstrations(seed: int, n_episodes: int) -> dict[str, float]:
    """:return: Mean return of the policy over 50 episodes, by the number of steps before"""
    env, starts = (make_vec_env("LunarLander-v3", 8, seed=each) for each in (seed, 10_000))
    model = GRPO("MlpPolicy", env, normalize_observations=n_episodes == 0, seed=seed, device="cpu")
    if n_episodes > 0:
        clone(model.policy, *demonstrations(n_episodes, 1000 * (seed + 1)))
    scores = {}
    for steps in (0, 20_000, 40_000, 60_000, 80_000, 100_000):
        if steps > 0:
            model.learn(20_000, reset_num_timesteps=False)
        scores[f"{steps:,} steps"] = float(np.mean(evaluate_policy(model, starts, 50)[0]))
    return scores


def draw_demonstrations(rows: Sequence[dict[str, Any]]) -> None:
    """Draw the mean return of each arm against the steps, and a thin line for each seed."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.figures import STYLE, save

    columns = [name for name in rows[0] if name.endswith(" steps")]
    at = [int(name.removesuffix(" steps").replace(",", "")) / 1000 for name in columns]
    with plt.style.context(STYLE):
        figure, axes = plt.subplots()
        for colour, arm in enumerate(DEMONSTRATIONS.arms):
            runs = np.array([[row[name] for name in columns] for row in rows if row["arm"] == arm])
            axes.plot(at, runs.T, color=f"C{colour}", lw=0.5)
            axes.plot(at, runs.mean(axis=0), color=f"C{colour}", label=arm)
        axes.set_xlabel("thousand environment steps")
        axes.set_ylabel("return of the policy")
        axes.legend()
        save(figure, STYLE.with_name("demonstrations.svg"))


DEMONSTRATIONS = Experiment(
    train_after_demonstrations,
    {"after five demonstrations": (5,), "from scratch": (0,)},
    n_seeds=5,
    digits=0,
    draw=draw_demonstrations,
)

# --- one step, a prompt, a group of answers ---------------------------------------------------------------------------


class Correct(BaseCallback):
    """Counts the answers of a training that are correct."""

    n_correct = 0

    def _on_step(self) -> bool:
        self.n_correct += sum(info["is_correct"] for info in self.locals["infos"])
        return True


def train_on_answers(seed: int, make: Callable[..., Any], mood: float) -> dict[str, float]:
    """:return: Percentage of correct answers to the 100 prompts after the training and during it, and its CPU seconds"""
    env = make_vec_env("sb3_grpo/Answers-v0", n_envs=8, seed=seed, env_kwargs=dict(mood=mood))
    model, correct, n_steps = make("MlpPolicy", env, seed=seed, device="cpu"), Correct(), 100_000
    seconds = trained(model, n_steps, callback=correct)
    prompts = np.array([(first, second) for first in range(10) for second in range(10)])
    answers = model.predict(np.eye(10, dtype=np.float32)[prompts].reshape(100, 20), deterministic=True)[0]
    n_right = np.sum(answers @ [10, 1] == prompts.sum(axis=1))
    return {"% correct": float(n_right), "% in training": 100 * correct.n_correct / n_steps, "seconds": seconds}


#: Rollouts of the first have 1,024 transitions, and those of `outcome` 2,048. All else is the default of each
ANSWERING = {
    "GRPO": GRPO,
    "GRPO, rollouts of 2,048": partial(GRPO, n_steps=256),
    "GRPO without groups": partial(GRPO, share_starts=False, rollout_buffer_kwargs=dict(relative=False)),
    "`outcome`, groups of 8": partial(GRPO, rollout_buffer_class="outcome", group_size=8),
    "PPO": partial(PPO, n_steps=128),
}
ANSWERS = Experiment(
    train_on_answers,
    {f"{name}{'' if mood else ', no mood'}": (make, mood) for mood in (1.0, 0.0) for name, make in ANSWERING.items()},
    n_seeds=5,
    digits=0,
)

EXPERIMENTS = {
    "masks": MASKS,
    "environments": ENVIRONMENTS,
    "hidden-velocities": HIDDEN_VELOCITIES,
    "t-maze": T_MAZE,
    "memory": MEMORY,
    "memory-images": MEMORY_IMAGES,
    "demonstrations": DEMONSTRATIONS,
    "answers": ANSWERS,
}

# --- running and reporting --------------------------------------------------------------------------------------------


def run(name: str, arm: str, seed: int) -> dict[str, float]:
    """:return: The measured numbers of one run"""
    th.set_num_threads(1)
    experiment = EXPERIMENTS[name]
    return experiment.run(seed, *experiment.arms[arm])


def rows_of(name: str, path: pathlib.Path) -> list[dict[str, Any]]:
    """:return: The rows of an experiment, each with the arm, the seed and the numbers"""
    rows = [row for row in read_rows(path) if row["experiment"] == name]
    return [{"arm": row["arm"], "seed": int(row["seed"]), **json.loads(row["measured"])} for row in rows]


def complete(name: str, path: pathlib.Path) -> None:
    """Make the runs of an experiment that a file does not have, seed by seed, and add them to it."""
    finished = {(row["arm"], row["seed"]) for row in rows_of(name, path)}
    experiment = EXPERIMENTS[name]
    spawn = multiprocessing.get_context("spawn")
    # Each measurement of memory needs a process of its own.
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1 if name == "environments" else None) as pool:
        for seed in range(experiment.n_seeds):
            for arm in experiment.arms:
                if (arm, seed) in finished:
                    continue
                measured = json.dumps(pool.submit(run, name, arm, seed).result())
                row = {"experiment": name, "arm": arm, "seed": seed, "version": __version__, "measured": measured}
                append_row(path, row, list(row))
                print(row, flush=True)


def table(name: str, path: pathlib.Path) -> str:
    """:return: The median of each arm and number over the seeds, and the number of each seed, as a Markdown table"""
    rows, experiment = rows_of(name, path), EXPERIMENTS[name]
    numbers = [column for column in (rows[0] if rows else {}) if column not in ("arm", "seed")]
    lines = []
    for arm in experiment.arms:
        values = {number: [row[number] for row in rows if row["arm"] == arm] for number in numbers}
        if any(values.values()):
            medians = [f"{np.median(values[number]):,.{experiment.digits}f}" for number in numbers]
            each = ", ".join(f"{value:,.{experiment.digits}f}" for value in values[numbers[0]])
            lines.append([arm, *medians, each])
    return markdown_table(
        ["", *(f"{number}, median" for number in numbers), f"{numbers[0]}, by seed" if numbers else ""], lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there, make none")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the CSV file")
    arguments = parser.parse_args()
    path = arguments.results / "systems.csv"
    if not arguments.table:
        complete(arguments.name, path)
    print(table(arguments.name, path))
    if (draw := EXPERIMENTS[arguments.name].draw) and (rows := rows_of(arguments.name, path)):
        draw(rows)


if __name__ == "__main__":
    main()
