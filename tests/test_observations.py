"""What reaches the buffer: observations and rollouts as the environments gave them."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_grpo import GRPO, OutcomeRolloutBuffer
from sb3_grpo.buffers import BUFFERS


class Counts(gym.Env):
    """Random integers in episodes of twenty steps; the reward is the action."""

    observation_space = spaces.Box(0, 10, (3,), np.int32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self._observe(), float(action), self.n_steps == 20, False, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.integers(0, 11, 3).astype(np.int32)


class Observations(BaseCallback):
    """Remembers the observations after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.observations: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.observations.append(self.locals["new_obs"].copy())
        return True


def make_model(env: Any, **kwargs: Any) -> GRPO:
    return GRPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu", **kwargs)


def test_normalised_integers_are_not_rounded():
    seen = Observations()
    model = make_model(VecNormalize(DummyVecEnv([Counts]))).learn(8, callback=seen)
    stored = model.rollout_buffer.observations[0]
    np.testing.assert_allclose(stored[1:], np.concatenate(seen.observations[:-1]), rtol=1e-6)
    assert np.any(stored % 1 != 0)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_learning_goes_on_after_an_interrupt_while_the_update_was_formed(buffer: str, monkeypatch: pytest.MonkeyPatch):
    model = make_model(DummyVecEnv([Counts] * 2), rollout_buffer_class=buffer).learn(16)

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.rollout_buffer, "_form_update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.learn(16, reset_num_timesteps=False)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(96, reset_num_timesteps=False)
    assert not all(th.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))


class Mixin:
    """Has no constructor."""


class OwnBuffer(Mixin, OutcomeRolloutBuffer):
    """A user's buffer with an argument of its own."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bonus = bonus


def test_a_buffer_with_a_mixin_takes_the_arguments_of_its_base():
    kwargs = dict(bonus=1.0, leave_one_out=True, scale="none")
    buffer = make_model(Counts(), rollout_buffer_class=OwnBuffer, rollout_buffer_kwargs=kwargs).rollout_buffer
    assert {name: getattr(buffer, name) for name in kwargs} == kwargs
    with pytest.raises(TypeError, match=r"OwnBuffer does not take `bonsu=.*did you mean `bonus`"):
        make_model(Counts(), rollout_buffer_class=OwnBuffer, rollout_buffer_kwargs=dict(bonsu=1.0))
