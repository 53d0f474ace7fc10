"""Parts of SB3's ecosystem that people use with PPO, each in one short training."""

import pathlib
from typing import Any

import numpy as np
import pytest
from helpers import SMALL, weights
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
)

from sb3_grpo import GRPO


def make_model(env: VecEnv, policy: str = "MlpPolicy", **kwargs: Any) -> GRPO:
    settings: dict[str, Any] = dict(n_steps=64, batch_size=64, learning_rate=0.01, policy_kwargs=SMALL, seed=0, device="cpu")
    return GRPO(policy, env, **{**settings, **kwargs})


STOPPING = {
    "reward": (lambda: StopTrainingOnRewardThreshold(1.0), "callback_on_new_best"),
    "no improvement": (lambda: StopTrainingOnNoModelImprovement(1, min_evals=1), "callback_after_eval"),
}


@pytest.mark.parametrize("name", STOPPING)
def test_an_evaluation_stops_training(name: str, tmp_path: pathlib.Path):
    make, argument = STOPPING[name]
    further: Any = {argument: make()}
    stop = EvalCallback(make_vec_env("CartPole-v1"), eval_freq=100, n_eval_episodes=1, verbose=0, **further)
    model = make_model(make_vec_env("CartPole-v1", 2)).learn(20_000, callback=stop)
    assert 200 <= model.num_timesteps < 20_000


class Silent(BaseCallback):
    """Looks at the environments while the model learns."""

    def _on_step(self) -> bool:
        assert self.training_env.get_attr("spec")
        return True


@pytest.mark.parametrize("start_method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_start_method_of_processes_gives_the_same_weights(start_method: str):
    results = []
    for vec_env_cls, kwargs in ((DummyVecEnv, {}), (SubprocVecEnv, dict(start_method=start_method))):
        env = make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=vec_env_cls, vec_env_kwargs=kwargs)
        results.append(weights(make_model(env).learn(256, callback=Silent())))
        env.close()
    assert all(np.array_equal(results[0][key], results[1][key]) for key in results[0])
