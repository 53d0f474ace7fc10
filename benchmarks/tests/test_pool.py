"""EnvPool's environments as a ``VecEnv``; skipped where EnvPool is not installed."""

import numpy as np
import pytest

from benchmarks.pool import EnvPoolVecEnv
from sb3_grpo import GRPO

pytest.importorskip("envpool")


def test_an_episode_ends_and_the_next_begins_in_the_same_step() -> None:
    env = EnvPoolVecEnv("Hopper-v5", 3, seed=0)
    env.reset()
    rng, last, lengths, n_steps = np.random.default_rng(0), None, [], np.zeros(3, int)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (3, 3)).astype(np.float32)
        obs, rewards, dones, infos = env.step(actions)
        assert isinstance(obs, np.ndarray)
        n_steps += 1
        assert (rewards != 0).all()  # a step that only resets would have none
        for i in np.flatnonzero(dones).tolist():
            assert not infos[i]["TimeLimit.truncated"]  # it fell
            assert np.abs(infos[i]["terminal_observation"] - obs[i]).max() > 0.01
            assert obs[i][0] == pytest.approx(1.25, abs=0.01)  # the height at which Hopper begins
            lengths.append(n_steps[i])
            n_steps[i] = 0
        last = obs
    env.close()
    assert last is not None and len(lengths) >= 9
    assert np.std(lengths) > 0


def test_a_time_limit_is_a_truncation() -> None:
    env = EnvPoolVecEnv("HalfCheetah-v5", 2, seed=0, max_episode_steps=5)
    env.reset()
    for step in range(1, 11):
        _, _, dones, infos = env.step(np.zeros((2, 6), np.float32))
        assert dones.tolist() == [step % 5 == 0] * 2
        assert [info.get("TimeLimit.truncated", False) for info in infos] == dones.tolist()
    env.close()


def test_grpo_trains_with_it() -> None:
    env = EnvPoolVecEnv("InvertedPendulum-v5", 4, seed=0)
    with pytest.warns(UserWarning, match="cannot reset single environments with a seed"):
        model = GRPO("MlpPolicy", env, n_steps=32, seed=0).learn(256)
    assert model.num_timesteps == 256
    env.close()
