"""What `learn` takes up that was assigned before, and what it says of a run that taught nothing."""

import warnings
from typing import Any

import pytest
from helpers import AnyEnv, make_envs, make_model, saved
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import GRPO

# --- attributes assigned after construction -----------------------------------------------------------------------------


READ = {
    "gamma": lambda model: model.rollout_buffer.gamma,
    "gae_lambda": lambda model: model.rollout_buffer.gae_lambda,
    "clip_range": lambda model: model.logger.name_to_value["train/clip_range"],
    "learning_rate": lambda model: model.policy.optimizer.param_groups[0]["lr"],
    "group_size": lambda model: model.ledger.group_size,
    "ent_coef": lambda model: model.ent_coef,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("clip_range", 0.1),
        ("learning_rate", 1e-5),
        ("group_size", 3),
        ("ent_coef", 0.01),
    ],
)
@pytest.mark.parametrize("when", ["between two learns", "in a callback"])
def test_an_argument_that_is_assigned_later_takes_effect_at_the_next_rollout(name: str, value: Any, when: str):
    class Assigns(BaseCallback):
        def _on_rollout_end(self) -> None:
            setattr(self.model, name, value)

        def _on_step(self) -> bool:
            return True

    model = make_model().learn(32)
    assert name in READ and READ[name](model) != value
    if when == "in a callback":
        model.learn(64, reset_num_timesteps=False, callback=Assigns())
    else:
        setattr(model, name, value)
        model.learn(32, reset_num_timesteps=False)
    assert READ[name](model) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "n_steps",
            32,
            r"`n_steps` was changed to 32 after the model was built, .* `GRPO.load\(path, env=env, ...\)`",
        ),
        ("use_sde", True, "`use_sde` was changed to True"),
        ("objective", dict(kl_coef=0.1), "`objective` was changed to {'kl_coef': 0.1}"),
        ("seed", 7, "`seed` was changed to 7"),
        ("group_size", 1, "`group_size` must be an integer of at least 2, not 1"),
        ("gamma", 1.5, "`gamma` must be a finite number from 0 to 1, not 1.5"),
        ("clip_range", "wide", "`clip_range` must be a finite number of at least 0"),
    ],
)
def test_an_argument_that_cannot_be_assigned_later_is_refused_by_name(name: str, value: Any, message: str):
    model = make_model().learn(32)
    setattr(model, name, value)
    with pytest.raises(ValueError, match=message):
        model.learn(32, reset_num_timesteps=False)


def test_arguments_that_nobody_assigned_are_not_taken_for_changed():
    model: Any = make_model(learning_rate=lambda progress: 0.01 * progress, objective=dict(clip_range_high=0.3)).learn(32)
    loaded = GRPO.load(saved(model), env=make_envs(), device="cpu", gamma=0.9, n_steps=8)
    assert loaded.learn(32).rollout_buffer.gamma == 0.9


# --- a training without a lesson ----------------------------------------------------------------------------------------


class Indifferent(AnyEnv):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


@pytest.mark.parametrize("buffer", ["kernel", "outcome", "process", "return_to_go", "stepwise"])
def test_a_run_whose_rewards_are_all_equal_says_so_and_an_ordinary_run_does_not(buffer: str):
    model = make_model(DummyVecEnv([Indifferent] * 2), rollout_buffer_class=buffer)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"Nothing was learned in 64 timesteps\. All rewards that were compared are equal"
        ):
            model.learn(64, reset_num_timesteps=False)
    model.set_env(make_envs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(96)
        model.learn(96, callback=lambda *_: False)  # which ends the first rollout


@pytest.mark.parametrize("buffer", ["outcome", "process"])
def test_a_run_in_which_no_group_was_completed_says_so(buffer: str):
    model = make_model(make_envs(lengths=(50, 60)), rollout_buffer_class=buffer, group_size=4)
    message = r"Nothing was learned in 32 timesteps\. No group of 4 trajectories was completed, .* Train longer"
    with pytest.warns(UserWarning, match=message):
        model.learn(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(32 * 16, reset_num_timesteps=False)  # in which groups are completed
