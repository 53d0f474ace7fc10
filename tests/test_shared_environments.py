"""Environments that are also used outside `learn`, by wrappers, by workers, or through their base `VecEnv`."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import make_model
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from sb3_grpo import GRPO
from sb3_grpo.buffers.rollout import GroupReturns
from sb3_grpo.normalization import ObservationNormalizer
from sb3_grpo.relative import RelativeTerm
from sb3_grpo.starts import Ledger
from sb3_grpo.vec_wrappers import normalizes_directly


class TenSteps(gym.Env):
    """Ten steps with a reward of 1 each."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(2).astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.np_random.random(2).astype(np.float32), 1.0, self.t >= 10, False, {}


class WithoutNaN(VecEnvWrapper):
    venv: Any

    def reset(self) -> Any:
        return np.nan_to_num(self.venv.reset())

    def step_wait(self) -> Any:
        observations, *rest = self.venv.step_wait()
        return np.nan_to_num(observations), *rest


# --- several models ---------------------------------------------------------------------------------------------------


def test_a_model_begins_new_episodes_after_another_has_learned_in_its_environments():
    env = make_vec_env(TenSteps, n_envs=2)
    first, second = (make_model(env, n_steps=16, batch_size=32) for _ in range(2))
    first.learn(32)
    second.learn(32)
    first.learn(32, reset_num_timesteps=False)
    buffer = first.rollout_buffer
    assert buffer.steps[:, 0].tolist() == [0, 0]
    firsts = [TenSteps().reset(seed=first.ledger.seed_of(group))[0] for group in buffer.groups[:, 0].tolist()]
    np.testing.assert_array_equal(buffer.observations[:, 0], firsts)


# --- the base VecEnv --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 8])
def test_an_evaluation_on_the_users_own_environments_after_training_has_different_starts(group_size: int | None):
    envs: Any = make_vec_env("CartPole-v1", 8, seed=0)
    GRPO("MlpPolicy", envs, n_steps=64, group_size=group_size, seed=0, device="cpu").learn(512)
    assert len(np.unique(envs.reset(), axis=0)) == 8
    # A seed of the user comes first
    envs.seed(5)
    seeded = envs.reset()
    envs.seed(5)
    np.testing.assert_array_equal(envs.reset(), seeded)


@pytest.mark.filterwarnings("ignore:Nothing was learned")  # because all rewards are equal
def test_episodes_begin_anew_if_the_users_own_environments_were_used_between_two_learns():
    envs = DummyVecEnv([TenSteps] * 2)
    model = make_model(envs, rollout_buffer_class="outcome").learn(32)
    evaluate_policy(model, envs, n_eval_episodes=2, warn=False)
    model.learn(64, reset_num_timesteps=False)
    assert model.rollout_buffer.metrics["rollout/group_return_mean"] == 10.0


# --- wrappers and other kinds of VecEnv -------------------------------------------------------------------------------


def test_vec_normalize_is_direct_unless_another_wrapper_is_under_it():
    envs = DummyVecEnv([TenSteps])
    assert normalizes_directly(VecNormalize(envs)) and normalizes_directly(WithoutNaN(VecNormalize(envs)))
    assert not normalizes_directly(VecNormalize(WithoutNaN(envs))) and not normalizes_directly(envs)


# --- lanes of the ledger, as workers have them ------------------------------------------------------------------------


def end_all(ledger: Ledger) -> None:
    """All environments end an episode."""
    for env_idx in range(2):
        ledger.restart(env_idx)
    ledger.advance()


def test_a_group_is_complete_once_its_last_member_has_ended():
    ledger, returns, complete = Ledger(2, seed=0), GroupReturns(2), []
    ledger.begin_all([0, 1])
    for _ in range(2):
        returns.add(np.ones(2), np.ones(2, dtype=bool), ledger.position.groups)
        end_all(ledger)
        complete.append(list(returns.pop_complete(ledger.open_groups()).values()))
    assert complete == [[], [[1.0, 1.0], [1.0, 1.0]]]


def test_the_first_members_of_all_workers_wait_for_their_peers_in_the_next_rollout():
    ledger, term, awaited = Ledger(2, seed=0), RelativeTerm(), []
    ledger.begin_all([0, 1])
    for _ in range(2):
        groups = np.repeat(ledger.position.groups, 5)
        for _ in range(4):
            ledger.advance()
        end_all(ledger)
        term.apply(np.ones(10), groups, np.tile(np.arange(5), 2), ledger.open_groups())
        awaited.append(sorted(set(term._kept.groups.tolist())))
    assert awaited == [[0, 1], []]


# --- arguments and state ----------------------------------------------------------------------------------------------


def test_an_input_too_large_for_single_precision_keeps_its_sign():
    normalizer = ObservationNormalizer(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    normalizer.observe(np.array([[1e20], [0.0]], dtype=np.float32))
    low, high = normalizer(th.tensor([[0.0], [1e20]])).flatten().tolist()
    assert low < 0 < high
