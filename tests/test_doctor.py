"""The doctor: faulty runs are told of their fault, healthy ones of none, and training is the same with and without it."""

import itertools
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from test_grpo import (
    ACTION_SPACES,
    BOX,
    ENDLESS,
    AnyEnv,
    ContextEnv,
    assert_trained,
    make_envs,
    make_model,
    mean_return,
    reload,
    same,
    weights,
)

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.doctor import PATIENCE, SYMPTOMS, Doctor, entropy_floor

EXPLAINED_PATIENCE = 2 * PATIENCE


class Rewardless(AnyEnv):
    """No reward at all."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, info


class NoisyReward(AnyEnv):
    """A reward that has nothing to do with anything, not even with the seed that a group shares."""

    def __init__(self, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.noise = np.random.default_rng(seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.noise.normal()), terminated, truncated, info


def noisy_envs(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([partial(NoisyReward, seed, **kwargs) for seed in range(n_envs)])


def rewardless_envs(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Rewardless(**kwargs)] * n_envs)


def endless_envs(n_envs: int = 2) -> DummyVecEnv:
    return make_envs(n_envs, lengths=(ENDLESS, ENDLESS + 1))


def name_of(report: str) -> str:
    assert report.startswith("Doctor (")
    return report.removeprefix("Doctor (").split(",")[0]


def reports_of(model: Any, n_updates: int) -> list[str]:
    """:return: what the doctor says in so many rollouts"""
    reports: list[str] = []
    model.learn(model.n_steps * model.n_envs * n_updates, callback=Doctor(reports.append))
    return reports


# --- Faults ---------------------------------------------------------------------------------------------------------------


def tied() -> Any:
    return make_model(rewardless_envs(), rollout_buffer_class="outcome")


def clipped(learning_rate: float = 0.3, level: str = "step") -> Any:
    return make_model(
        noisy_envs(action_space=BOX),
        learning_rate=learning_rate,
        n_epochs=4,
        clip_range=0.001,
        importance_sampling_level=level,
    )


def collapsed(action_space: Any) -> Any:
    env = rewardless_envs(action_space=action_space)
    return make_model(env, ent_coef=-1.0, learning_rate=0.1, n_epochs=4)


def few_have_the_weight() -> Any:
    return make_model(
        noisy_envs(action_space=BOX), n_steps=64, batch_size=128, learning_rate=0.1, n_epochs=10, clip_range=10.0
    )


def never_complete() -> Any:
    return make_model(endless_envs(8), n_steps=32, rollout_buffer_class="outcome")


def unexplained() -> Any:
    buffer_kwargs = dict(ridge=1e-8, forgetting=0.0, bandwidth=3.0)
    return make_model(noisy_envs(lengths=(1, 2)), rollout_buffer_kwargs=buffer_kwargs, learning_rate=1e-4)


@pytest.mark.parametrize(
    ("make_faulty", "name", "advice", "n_updates"),
    [
        pytest.param(tied, "tied groups", ["group_size", "ent_coef"], 5, id="tied"),
        pytest.param(clipped, "clip fraction", ["learning_rate", "n_epochs", "target_kl"], 5, id="clipped"),
        *(
            pytest.param(
                partial(collapsed, *space.values),
                "entropy",
                ["ent_coef", "learning_rate", "kl_coef"],
                25,
                id=f"entropy-{space.id}",
            )
            for space in ACTION_SPACES
        ),
        pytest.param(few_have_the_weight, "effective sample size", ["learning_rate", "n_epochs"], 12, id="few-have-weight"),
        # Transitions are dropped from 20,000 on
        pytest.param(never_complete, "incomplete groups", ["'kernel'", "time limit"], 48, id="incomplete"),
        pytest.param(
            unexplained, "explained variance", ["n_steps", "ridge", "forgetting", "gae_lambda"], 10, id="unexplained"
        ),
    ],
)
def test_a_fault_is_reported_once_with_a_remedy(make_faulty: Any, name: str, advice: list[str], n_updates: int):
    reports = reports_of(make_faulty(), n_updates + 12)
    assert [name_of(report) for report in reports].count(name) == 1, reports
    (report,) = [report for report in reports if name_of(report) == name]
    (symptom,) = [symptom for symptom in SYMPTOMS if symptom.name == name]
    assert report == f"Doctor ({name}, {symptom.patience} times in a row): {symptom.sentence}"
    assert all(word in report for word in advice)


@pytest.mark.parametrize(
    ("make_faulty", "n_updates"),
    [
        pytest.param(tied, PATIENCE, id="tied"),
        pytest.param(clipped, PATIENCE, id="clipped"),
        pytest.param(unexplained, EXPLAINED_PATIENCE, id="unexplained"),
    ],
)
def test_a_fault_is_reported_in_the_update_in_which_patience_ends_and_not_before(make_faulty: Any, n_updates: int):
    assert reports_of(make_faulty(), n_updates - 1) == []
    assert len(reports_of(make_faulty(), n_updates)) == 1


class RewardedNowAndThen(AnyEnv):
    """No reward, but in one rollout of five."""

    n_calls = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        is_rewarded = self.n_calls // 16 % PATIENCE == PATIENCE - 1
        self.n_calls += 1
        return observation, reward * is_rewarded, terminated, truncated, info


def test_a_fault_that_passes_and_comes_back_begins_anew():
    # All episodes end with the rollout
    model = make_model(DummyVecEnv([lambda: RewardedNowAndThen(lengths=(4, 5))] * 2), rollout_buffer_class="outcome")
    assert reports_of(model, 4 * PATIENCE) == []


def test_groups_that_were_completed_end_the_wait_for_one():
    model = make_model(make_envs(8, lengths=(2, 4)), rollout_buffer_class="outcome", rollout_buffer_kwargs=dict(max_waiting=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transitions are dropped
        assert "incomplete groups" not in map(name_of, reports_of(model, 12))


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_ratios_that_leave_a_narrow_clip_range_are_no_fault_where_they_have_hardly_moved(level: str):
    model = clipped(learning_rate=0.01, level=level)
    assert "clip fraction" not in map(name_of, reports_of(model, 8))
    assert model.update_metrics["train/clip_fraction"] > 0.5


# --- Healthy runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_run_that_learns_until_groups_tie_and_entropy_falls_is_healthy(buffer: str):
    env = DummyVecEnv([ContextEnv] * 8)
    model = make_model(
        env, rollout_buffer_class=buffer, n_steps=32, batch_size=128, n_epochs=4, gamma=0.5, group_size=4, policy_kwargs={}
    )
    assert reports_of(model, 35) == []
    assert mean_return(model, ContextEnv(), n_episodes=50) > 3.6


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_an_ordinary_run_is_healthy_whatever_the_actions(buffer: str, action_space: spaces.Space):
    model = make_model(
        make_envs(4, action_space=action_space), n_steps=64, batch_size=64, learning_rate=3e-4, rollout_buffer_class=buffer
    )
    assert reports_of(model, 12) == []


@pytest.mark.slow
@pytest.mark.parametrize("buffer", ["kernel", "outcome", "return_to_go", "stepwise"])
def test_cartpole_at_default_settings_is_healthy(buffer: str):
    model = GRPO("MlpPolicy", make_vec_env("CartPole-v1", 8), rollout_buffer_class=buffer, seed=0, device="cpu")
    assert reports_of(model, 15) == []
    assert mean_return(model, gym.make("CartPole-v1")) > 60


@pytest.mark.slow
def test_a_constant_reward_that_process_cannot_learn_from_is_a_fault():
    model = make_model(make_vec_env("CartPole-v1", 8), rollout_buffer_class="process", n_steps=128, n_epochs=4)
    reports = reports_of(model, 8)
    assert [name_of(report) for report in reports] == ["tied groups"]
    assert "rollout_buffer_class='return_to_go'" in reports[0]


# --- A run with the doctor ------------------------------------------------------------------------------------------------


def doctors_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "Doctor" in line]


def rewardless_model(**kwargs: Any) -> Any:
    return make_model(rewardless_envs(), rollout_buffer_class="outcome", **kwargs)


def test_a_verbose_run_prints_what_the_doctor_says(capsys: pytest.CaptureFixture[str]):
    rewardless_model(verbose=1).learn(32 * 8)
    (line,) = doctors_lines(capsys)
    assert line == f"Doctor (tied groups, 5 times in a row): {SYMPTOMS[0].sentence}"


@pytest.mark.parametrize(
    "kwargs", [dict(verbose=1, doctor=False), dict(verbose=0), dict(verbose=0, doctor=True)], ids=["off", "quiet", "quiet, on"]
)
def test_the_doctor_is_silent_where_it_is_switched_off_or_nothing_is_to_be_printed(
    kwargs: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    rewardless_model(**kwargs).learn(32 * 8)
    assert doctors_lines(capsys) == []


def test_a_healthy_verbose_run_prints_nothing_of_the_doctor(capsys: pytest.CaptureFixture[str]):
    make_model(verbose=1).learn(32 * 8)
    assert doctors_lines(capsys) == []


@pytest.mark.parametrize("log_interval", [1, 3, None], ids=["every", "third", "none"])
def test_the_doctor_does_not_depend_on_what_is_logged(log_interval: int | None, capsys: pytest.CaptureFixture[str]):
    rewardless_model(verbose=1).learn(32 * 8, log_interval=log_interval)
    assert len(doctors_lines(capsys)) == 1


@pytest.mark.parametrize("second", ["goes on", "begins anew", "is loaded with its own doctor"])
def test_what_was_said_is_not_repeated_when_learning_twice(second: str, capsys: pytest.CaptureFixture[str]):
    model = rewardless_model(verbose=1)
    model.learn(32 * 6)
    assert len(doctors_lines(capsys)) == 1
    if second == "is loaded with its own doctor":  # who has said nothing yet
        model = reload(model, env=rewardless_envs())
    model.learn(32 * 6, reset_num_timesteps=second != "goes on")
    assert len(doctors_lines(capsys)) == int(second == "is loaded with its own doctor")


def test_patience_lasts_over_several_calls_of_learn(capsys: pytest.CaptureFixture[str]):
    model = rewardless_model(verbose=1)
    for n_said in [0, 0, 1, 0]:
        model.learn(32 * 2, reset_num_timesteps=False)
        assert len(doctors_lines(capsys)) == n_said


def small_run(make_faulty: Any, with_doctor: bool) -> dict[str, th.Tensor]:
    model = make_faulty()
    said: list[str] = []
    model.learn(model.n_steps * model.n_envs * 12, callback=Doctor(said.append) if with_doctor else None)
    assert bool(said) == with_doctor
    return weights(model)


@pytest.mark.parametrize("make_faulty", [clipped, unexplained, few_have_the_weight])
def test_training_is_the_same_bit_for_bit_with_a_doctor_that_has_something_to_say(make_faulty: Any):
    assert same(small_run(make_faulty, True), small_run(make_faulty, False))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_training_is_the_same_bit_for_bit_with_and_without_the_doctor(buffer: str):
    runs = []
    for verbose, doctor in [(1, True), (1, False), (0, True)]:
        model = make_model(rollout_buffer_class=buffer, verbose=verbose, doctor=doctor)
        before = weights(model)
        assert_trained(model.learn(32 * 7), before)
        runs.append(weights(model))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


def test_a_model_with_a_doctor_is_saved_and_learns_on_from_the_file():
    model = rewardless_model(verbose=1).learn(32 * 6)
    assert model._doctor.reported == ["tied groups"]
    loaded = reload(model, env=make_envs())
    assert loaded.doctor and loaded._doctor.reported == []
    assert same(weights(model), weights(loaded))
    before = weights(loaded)
    assert_trained(loaded.learn(64, reset_num_timesteps=False), before)
    assert not reload(rewardless_model(verbose=1, doctor=False), env=make_envs()).doctor


class Counter(BaseCallback):
    """Counts what it is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.n_inits, self.n_steps, self.n_rollouts = 0, 0, 0

    def _init_callback(self) -> None:
        self.n_inits += 1

    def _on_step(self) -> bool:
        self.n_steps += 1
        return True

    def _on_rollout_end(self) -> None:
        self.n_rollouts += 1


class CountingEval(EvalCallback):
    n_inits = 0

    def _init_callback(self) -> None:
        super()._init_callback()
        self.n_inits += 1


@pytest.mark.parametrize("kwargs", [dict(verbose=1), dict(verbose=1, doctor=False)], ids=["doctor", "no doctor"])
@pytest.mark.parametrize("progress_bar", [False, True], ids=["plain", "progress bar"])
def test_callbacks_of_every_kind_work_beside_the_doctor(progress_bar: bool, kwargs: dict[str, Any]):
    counters = [Counter() for _ in range(5)]
    evaluation = CountingEval(Monitor(AnyEnv()), eval_freq=16, n_eval_episodes=1, verbose=0)
    called: list[int] = []

    def function(local_variables: dict[str, Any], global_variables: dict[str, Any]) -> bool:
        called.append(local_variables["n_steps"])
        return True

    callbacks: list[Any] = [
        None,
        function,
        counters[0],
        [counters[1], evaluation, counters[2]],
        CallbackList([counters[3], counters[4]]),
    ]
    for callback in callbacks:
        model = make_model(**kwargs).learn(96, callback=callback, progress_bar=progress_bar)
        assert model.num_timesteps == 96
    assert called == list(range(16)) * 3
    assert all((counter.n_inits, counter.n_steps, counter.n_rollouts) == (1, 48, 3) for counter in counters)
    assert evaluation.n_inits == 1 and evaluation.best_mean_reward > -np.inf


def test_a_callback_beside_the_doctor_can_stop_the_run():
    for callback in (lambda *_: False, [Counter(), CallbackList([Stops()])]):
        model = make_model(verbose=1).learn(96, callback=callback)
        assert model.num_timesteps == 2


class Stops(BaseCallback):
    def _on_step(self) -> bool:
        return False


@pytest.mark.parametrize(("n_rollouts", "n_said"), [(PATIENCE - 1, 0), (PATIENCE, 1)])
def test_a_run_stopped_in_a_rollout_is_examined_up_to_the_last_whole_one(n_rollouts: int, n_said: int):
    said: list[str] = []
    steps = itertools.count(1)
    callbacks = [Doctor(said.append), ConvertCallback(lambda *_: next(steps) <= 16 * n_rollouts)]
    rewardless_model().learn(10_000, callback=callbacks)
    assert len(said) == n_said


# --- The entropy of a collapsed policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "floor"),
    [
        pytest.param(spaces.Discrete(3), 0.0109861, id="Discrete"),  # 0.01 log 3
        pytest.param(spaces.MultiDiscrete([2, 3]), 0.0179176, id="MultiDiscrete"),  # 0.01 log 6
        pytest.param(spaces.MultiBinary(4), 0.0277259, id="MultiBinary"),  # 0.04 log 2
        pytest.param(spaces.MultiBinary((2, 3)), 0.0415888, id="MultiBinary-matrix"),  # 0.06 log 2
        # Standard deviations of 0.02 and 0.005: log 0.02 + log 0.005 + log(2 pi e)
        pytest.param(BOX, -6.372463, id="Box"),
        pytest.param(spaces.Box(-1.0, 1.0, (2, 3), np.float32), 6 * -3.1862316, id="Box-matrix"),
        pytest.param(spaces.Box(0, 255, (1,), np.uint8), 1.661885, id="Box-uint8"),  # log 1.275 + log(2 pi e) / 2
    ],
)
def test_the_entropy_floor_of_each_action_space(space: spaces.Space, floor: float):
    assert entropy_floor(space) == pytest.approx(floor, abs=2e-6)


@pytest.mark.parametrize("factor", [0.009, 0.011])
def test_the_floor_of_a_box_is_the_entropy_of_a_gaussian_of_a_hundredth_of_half_its_range(factor: float):
    gaussian = th.distributions.Normal(th.zeros(2), th.tensor(factor * (BOX.high - BOX.low) / 2))
    assert (gaussian.entropy().sum().item() < entropy_floor(BOX)) == (factor < 0.01)


def test_the_floor_of_a_box_looks_at_the_dimensions_that_leave_a_choice():
    half = spaces.Box(np.array([-2.0, 3.0], np.float32), np.array([2.0, 3.0], np.float32))
    assert entropy_floor(half) == entropy_floor(spaces.Box(-2.0, 2.0, (1,), np.float32))


def test_the_floor_of_a_box_of_integers_does_not_overflow():
    assert entropy_floor(spaces.Box(-128, 127, (1,), np.int8)) == entropy_floor(spaces.Box(-128.0, 127.0, (1,), np.float32))


def test_the_floor_of_a_squashed_policy_is_that_of_actions_between_minus_one_and_one():
    wide = spaces.Box(-1000.0, 1000.0, (2,), np.float32)
    assert entropy_floor(wide, squash_output=True) == entropy_floor(spaces.Box(-1.0, 1.0, (2,), np.float32))
    assert entropy_floor(wide) > entropy_floor(wide, squash_output=True)


def test_a_squashed_policy_with_an_ordinary_deviation_has_not_collapsed():
    heard = []
    env = AnyEnv(action_space=spaces.Box(-1000.0, 1000.0, (1,), np.float32))
    kwargs = dict(use_sde=True, policy_kwargs=dict(net_arch=[8], squash_output=True), learning_rate=0.0)
    model = GRPO("MlpPolicy", env, n_steps=32, seed=0, device="cpu", **kwargs)
    model.learn(32 * 2 * PATIENCE, callback=Doctor(report=heard.append))
    assert not [sentence for sentence in heard if "entropy" in sentence]


# --- What it is no doctor for ---------------------------------------------------------------------------------------------


def test_episodes_of_equal_return_are_no_fault_where_groups_are_not_compared():
    # The reward is the action: learned from by comparison with a baseline, although all members of a group could tie
    said: list[str] = []
    env = make_envs(action_space=spaces.Discrete(1))
    make_model(env, n_steps=64, rollout_buffer_class="kernel").learn(64 * 4 * 3 * PATIENCE, callback=Doctor(said.append))
    assert not [sentence for sentence in said if "tied groups" in sentence]


def test_a_run_with_a_doctor_of_its_own_is_not_seen_by_two(capsys: pytest.CaptureFixture[str]):
    said: list[str] = []
    rewardless_model(verbose=1).learn(16 * 2 * PATIENCE, callback=[Doctor(said.append)])
    assert len(said) == 1
    assert "Doctor" not in capsys.readouterr().out


def test_a_doctor_refuses_the_runs_of_other_algorithms():
    with pytest.raises(ValueError, match="GRPO's runs, not those of PPO"):
        PPO("MlpPolicy", AnyEnv(), n_steps=16, batch_size=16).learn(16, callback=Doctor())


def test_another_run_of_the_model_is_judged_by_its_own_first_episodes():
    said: list[str] = []
    doctor = Doctor(said.append)
    model = make_model(Monitor(AnyEnv()), n_steps=32).learn(64, callback=doctor)
    first = doctor._return_to_rise_above
    model.learn(64, callback=doctor, reset_num_timesteps=False)
    assert doctor._return_to_rise_above == first
    model.learn(64, callback=doctor)
    assert np.isfinite(first) and doctor._return_to_rise_above != first
