import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.envs import IdentityEnvBox

from benchmarks.rates import RateFollowsStd, log_std_of
from sb3_grpo.policies import MlpPolicy


@pytest.mark.parametrize("changes", [[0.0], [-0.5], [-1.2], [0.4]])
def test_ppo_gets_the_rate_that_grpo_has(changes: list[float]) -> None:
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    policy = MlpPolicy(action_space, action_space, lambda _: 0.02, log_std_init=math.log(0.3))
    model = PPO("MlpPolicy", IdentityEnvBox(), learning_rate=lambda progress: 0.04 * progress, n_steps=8, batch_size=8)
    callback = RateFollowsStd()
    callback.init_callback(model)
    callback.on_training_start({}, {})
    for each in (policy, model.policy):
        each.log_std.data += th.tensor(changes)
    policy.set_learning_rate(0.02)
    assert model.lr_schedule(0.5) == pytest.approx(policy.optimizer.param_groups[0]["lr"])


def test_the_deviation_of_a_policy_on_jax_is_found() -> None:
    state = SimpleNamespace(params={"params": {"log_std": np.array([0.1, -0.3], np.float32)}})  # as sbx keeps it
    assert log_std_of(SimpleNamespace(actor_state=state)).tolist() == pytest.approx([0.1, -0.3])
