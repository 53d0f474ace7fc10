"""The doctor: it reports the fault of a faulty run, nothing about a healthy one, and does not change the training."""

import random
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from helpers import (
    ACTION_SPACES,
    BOX,
    ENDLESS,
    AnyEnv,
    ContextEnv,
    make_envs,
    make_model,
    mean_return,
    same,
    weights,
)
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from sb3_grpo import check_shared_inputs
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.doctor import PATIENCE, SYMPTOMS, Doctor, entropy_floor


class Rewardless(AnyEnv):
    """Gives no reward, or that of the action."""

    is_rewarded = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward if self.is_rewarded else 0.0, terminated, truncated, info


class NoisyReward(AnyEnv):
    """Gives a reward that depends on nothing, not even on the seed that a group shares."""

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


def doctor_for(reports: list[str]) -> Doctor:
    """:return: A doctor that adds its reports, except that it could not check inputs: most environments here have no spec"""
    return Doctor(lambda report: None if "could not check" in report else reports.append(report))


def reports_of(model: Any, n_updates: int) -> list[str]:
    """:return: What the doctor reports in some rollouts"""
    reports: list[str] = []
    model.learn(model.n_steps * model.n_envs * n_updates, callback=doctor_for(reports))
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
        target_kl=np.inf,  # the limit by default ends such updates
        objective=dict(importance_sampling_level=level),
    )


def collapsed(action_space: Any) -> Any:
    env = rewardless_envs(action_space=action_space)
    policy_kwargs = dict(lr_follows_std=False)  # which would slow the collapse down
    return make_model(env, ent_coef=-1.0, learning_rate=0.1, n_epochs=4, policy_kwargs=policy_kwargs)


def few_have_the_weight() -> Any:
    return make_model(
        noisy_envs(action_space=BOX),
        n_steps=64,
        batch_size=128,
        learning_rate=0.2,
        n_epochs=10,
        clip_range=10.0,
        target_kl=np.inf,
    )


def never_complete() -> Any:
    return make_model(endless_envs(8), n_steps=32, rollout_buffer_class="outcome")


def unexplained() -> Any:
    buffer_kwargs = dict(ridge=1e-5, forgetting=0.0, bandwidth=3.0)
    settings: dict[str, Any] = dict(n_steps=256, batch_size=256, learning_rate=1e-4)
    return make_model(noisy_envs(lengths=(1, 2)), rollout_buffer_kwargs=buffer_kwargs, **settings)


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
            for space in ACTION_SPACES[:2]
        ),
        pytest.param(few_have_the_weight, "effective sample size", ["learning_rate", "n_epochs"], 12, id="few-have-weight"),
        # Transitions are dropped from 20,000 on
        pytest.param(never_complete, "incomplete groups", ["'kernel'", "time limit"], 48, id="incomplete"),
        pytest.param(unexplained, "explained variance", ["n_steps", "ridge", "forgetting"], 10, id="unexplained"),
    ],
)
def test_a_fault_is_reported_once_with_a_remedy(make_faulty: Any, name: str, advice: list[str], n_updates: int):
    reports = reports_of(make_faulty(), n_updates + 12)
    assert [name_of(report) for report in reports].count(name) == 1, reports
    (report,) = [report for report in reports if name_of(report) == name]
    (symptom,) = [symptom for symptom in SYMPTOMS if symptom.name == name]
    assert report == f"Doctor ({name}, {symptom.patience} times in a row): {symptom.sentence}"
    assert all(word in report for word in advice)


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


# --- A run with the doctor ------------------------------------------------------------------------------------------------


def rewardless_model(**kwargs: Any) -> Any:
    return make_model(rewardless_envs(), rollout_buffer_class="outcome", **kwargs)


def test_the_doctor_prints_its_reports_by_default(capsys: pytest.CaptureFixture[str]):
    rewardless_model().learn(32 * 8, callback=Doctor(), log_interval=None)
    unchecked, report = capsys.readouterr().out.splitlines()
    assert "could not check" in unchecked and report == f"Doctor (tied groups, 5 times in a row): {SYMPTOMS[0].sentence}"
    rewardless_model().learn(32 * 8)
    assert capsys.readouterr().out == ""


def test_patience_and_reports_last_over_several_calls_of_learn_that_continue_a_run():
    reports: list[str] = []
    model, doctor = rewardless_model(), doctor_for(reports)
    for n_reports in [0, 0, 1, 1, 1]:
        model.learn(32 * 2, callback=doctor, reset_num_timesteps=False)
        assert len(reports) == n_reports


def test_patience_begins_again_with_a_new_run_and_with_a_fault_that_has_passed():
    reports: list[str] = []
    for continues in (False, True):
        model, doctor = rewardless_model(), doctor_for(reports)
        for is_rewarded in (False, continues, False):
            model.env.set_attr("is_rewarded", is_rewarded)
            model.learn(32 * (PATIENCE - 1), callback=doctor, reset_num_timesteps=not continues)
    assert reports == []


def draws_from_globals() -> Any:
    return make_model(made(DrawsFromGlobals))


@pytest.mark.parametrize("make_faulty", [clipped, few_have_the_weight, draws_from_globals])
def test_training_is_the_same_bit_for_bit_with_and_without_a_doctor(make_faulty: Any):
    reports: list[str] = []
    runs = []
    for callback in (doctor_for(reports), None):
        model = make_faulty()
        runs.append(weights(model.learn(model.n_steps * model.n_envs * 12, callback=callback)))
    assert reports and same(*runs)


def test_a_doctor_refuses_the_runs_of_other_algorithms():
    with pytest.raises(ValueError, match="checks runs of GRPO, not of PPO"):
        PPO("MlpPolicy", AnyEnv(), n_steps=16, batch_size=16, device="cpu").learn(16, callback=Doctor())


# --- Inputs that members of a group share -----------------------------------------------------------------------------------


class DrawsForSomeActions(AnyEnv):
    """Draws a random number for one of the actions only."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 2:
            self.np_random.normal()
        return super().step(action)


class DrawsFromGlobals(AnyEnv):
    """Adds random numbers from the global generators to the reward."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        noise = random.random() + np.random.random() + th.rand(()).item()
        return observation, reward + noise, terminated, truncated, info


def spec_of(env_class: Any, **kwargs: Any) -> EnvSpec:
    return EnvSpec("Any-v0", entry_point=env_class, kwargs=dict(lengths=(8, 9), **kwargs))


def made(env_class: Any, wrap: Any = Monitor, vec_env: Any = DummyVecEnv, **kwargs: Any) -> Any:
    """:return: Two environments that have a spec"""
    return vec_env([lambda: wrap(gym.make(spec_of(env_class, **kwargs)))] * 2)


@pytest.mark.parametrize(
    ("env_class", "seen"),
    [(DrawsForSomeActions, "inputs depend on the actions"), (DrawsFromGlobals, "do not come from the seed")],
)
def test_inputs_that_members_of_a_group_do_not_share_are_reported_once_in_each_run(env_class: Any, seen: str):
    reports: list[str] = []
    doctor = doctor_for(reports)
    model = make_model(VecNormalize(made(env_class)))
    model.learn(32, callback=doctor)
    model.learn(32, callback=doctor, reset_num_timesteps=False)
    [report] = reports
    whole = f"Doctor (shared inputs): {check_shared_inputs(gym.make(spec_of(env_class))).message}"
    assert whole.startswith(report) and seen in report and "Training still works" in report
    assert doctor.reported == ["shared inputs"]
    model.learn(32, callback=doctor)
    assert reports == [report, report]


@pytest.mark.parametrize(
    ("env_class", "kwargs"), [(AnyEnv, {}), (DrawsForSomeActions, dict(share_starts=False))], ids=["inputs", "not even starts"]
)
def test_nothing_is_said_about_inputs_that_are_shared_or_need_not_be(env_class: Any, kwargs: Any):
    assert reports_of(make_model(made(env_class), **kwargs), 1) == []


@pytest.mark.parametrize(
    ("make_envs", "reason"),
    [
        pytest.param(lambda: DummyVecEnv([DrawsForSomeActions] * 2), "was not made by `gymnasium.make`", id="no spec"),
        pytest.param(partial(made, AnyEnv, vec_env=SubprocVecEnv), "are not in this process", id="in workers"),
    ],
)
def test_the_doctor_says_why_it_could_not_check_inputs_and_what_to_call(make_envs: Any, reason: str):
    env = make_envs()
    reports: list[str] = []
    try:
        make_model(env).learn(32, callback=Doctor(reports.append))
    finally:
        env.close()
    [report] = reports
    assert report.startswith("Doctor (shared inputs): could not check whether the members of a group share their inputs (")
    assert reason in report and report.endswith("): call `check_shared_inputs(env)` with one of the environments.")


# --- The entropy of a collapsed policy ------------------------------------------------------------------------------------


def test_the_entropy_floor_of_each_action_space():
    floors: list[tuple[spaces.Space, float]] = [
        (spaces.Discrete(3), 0.0109861),  # 0.01 log 3
        (spaces.MultiDiscrete([2, 3]), 0.0179176),  # 0.01 log 6
        (spaces.MultiBinary((2, 3)), 0.0415888),  # 0.06 log 2
        (BOX, -6.372463),  # standard deviations of 0.02 and 0.005: log 0.02 + log 0.005 + log(2 pi e)
        (spaces.Box(0, 255, (1,), np.uint8), 1.661885),  # log 1.275 + log(2 pi e) / 2
    ]
    for space, floor in floors:
        assert entropy_floor(space) == pytest.approx(floor, abs=2e-6), space


def test_the_floor_of_a_squashed_policy_is_that_of_actions_between_minus_one_and_one():
    wide = spaces.Box(-1000.0, 1000.0, (2,), np.float32)
    assert entropy_floor(wide, squash_output=True) == entropy_floor(spaces.Box(-1.0, 1.0, (2,), np.float32))
    assert entropy_floor(wide) > entropy_floor(wide, squash_output=True)
