"""The experiments of the pages about real systems."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.systems import (
    MEMORY_TASKS,
    NumpyCartPole,
    OnlyTurns,
    SeededNumpyCartPole,
    clone,
    demonstrations,
    train_on_answers,
)
from benchmarks.tasks.t_maze import TMazeEnv
from sb3_grpo import GRPO, RecurrentGRPO


def test_cart_poles_in_numpy_move_as_gymnasiums() -> None:
    copies = NumpyCartPole(3)
    reference: Any = gym.make("CartPole-v1").unwrapped
    copies.reset()
    actions = np.random.default_rng(0).integers(2, size=(200, 3))
    n_ended = 0
    for taken in actions:
        before = copies._state.copy()
        step: Any = copies.step(taken)
        observations, rewards, dones, infos = step
        for env_idx, action in enumerate(taken):
            reference.reset()
            reference.state = tuple(before[env_idx])
            expected, reward, terminated, _, _ = reference.step(action)
            seen = infos[env_idx]["terminal_observation"] if dones[env_idx] else observations[env_idx]
            np.testing.assert_allclose(seen, expected, rtol=1e-5)
            assert (rewards[env_idx], dones[env_idx]) == (reward, terminated)
        n_ended += int(dones.sum())
    assert n_ended > 5


def test_a_cart_pole_in_numpy_ends_in_time_and_begins_as_its_seed_says() -> None:
    env = SeededNumpyCartPole(2)
    env.reset()
    (first, second), _ = env.reset_envs([0, 1], [5, 6])
    (again, other), _ = env.reset_envs([0, 1], [5, 5])
    assert np.array_equal(first, again) and np.array_equal(again, other) and not np.array_equal(first, second)
    env._steps[:] = [499, 0]
    _, _, dones, infos = env.step(np.zeros(2, int))
    assert dones.tolist() == [True, False] and infos[0]["TimeLimit.truncated"] is True


def test_a_clone_prefers_the_demonstrated_actions() -> None:
    observations, actions = demonstrations(1, seed=0)
    assert observations.shape == (len(actions), 8) and set(actions) <= {0, 1, 2, 3}
    model = GRPO("MlpPolicy", "LunarLander-v3", normalize_observations=False, seed=0, device="cpu")

    def agreement() -> float:
        return float(np.mean(model.predict(observations, deterministic=True)[0] == actions))

    th.manual_seed(0)
    before = agreement()
    clone(model.policy, observations, actions, n_epochs=40)
    assert agreement() > max(0.8, before)


def test_without_masks_only_the_turn_at_the_end_of_the_corridor_counts() -> None:
    env, returns = OnlyTurns(TMazeEnv(length=4)), []
    for episode in range(20):
        (sign, _), _ = env.reset(seed=episode)
        right, at_end, done = (sign + 1) / 2, 0.0, False
        while not done:
            turn = right if at_end else 1 - right  # the wrong side in the corridor, where it does not count
            (_, at_end), reward, done, *_ = env.step(int(turn))
        returns.append(reward)
    assert returns == [1.0] * 20 and env.action_space == gym.spaces.Discrete(2)
    envs = make_vec_env(lambda: OnlyTurns(TMazeEnv(length=4)), n_envs=2)
    RecurrentGRPO("MlpLstmPolicy", envs, n_steps=16, batch_size=32, device="cpu").learn(32)  # whose masks are no hindrance


class KnowsTheSums:
    """In the place of a model: answers all prompts but those whose sum is below 10, which it answers with 10."""

    def __init__(self, policy: str, env: Any, seed: int, device: str):
        self.env = env

    def learn(self, n_steps: int, callback: Any) -> None:
        callback.locals = {"infos": [{"is_correct": True}] * (n_steps // 4)}
        callback._on_step()

    def predict(self, observations: Any, deterministic: bool) -> tuple[Any, None]:
        sums = np.maximum(observations.reshape(-1, 2, 10).argmax(axis=2).sum(axis=1), 10)
        return np.stack([sums // 10, sums % 10], axis=1), None


def test_answers_are_marked_over_all_prompts_and_during_the_training() -> None:
    scores = train_on_answers(0, KnowsTheSums, mood=1.0)
    assert scores["% correct"] == 45 and scores["% in training"] == 25  # 45 of 100 sums are at least 10


def test_the_tasks_that_need_a_memory_show_vectors_and_no_velocities() -> None:
    shapes = {}
    for task, wrapper in MEMORY_TASKS.items():
        if task.startswith("popgym"):  # no requirement
            continue
        env: Any = wrapper(gym.make(task))
        observation, _ = env.reset(seed=0)
        shapes[task] = observation.shape
        if task == "LunarLander-v3":
            raw = env.env.reset(seed=0)[0]
            assert np.flatnonzero(observation != raw).tolist() == [2, 3, 5]
    assert shapes == {"LunarLander-v3": (8,), "MiniGrid-MemoryS7-v0": (147,), "MiniGrid-MemoryS11-v0": (147,)}
