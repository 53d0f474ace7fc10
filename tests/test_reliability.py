"""Nothing learned is lost: continuing, saving, faults of environments, interrupts, versions."""

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import same, weights
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_grpo import GRPO, EnvironmentFault
from sb3_grpo.arithmetic.choice import machine_policy
from sb3_grpo.arithmetic.machine import MachinePolicy
from sb3_grpo.arithmetic.machine_code.jit import UNAVAILABLE
from sb3_grpo.buffers import BUFFERS

BROKEN = 1  # index of the environment that fails


def is_finite(model: GRPO) -> bool:
    moments = [value for state in model.policy.optimizer.state.values() for value in state.values()]
    return all(bool(th.isfinite(tensor).all()) for tensor in (*weights(model).values(), *moments))


def make_model(env: Any = "CartPole-v1", **kwargs: Any) -> GRPO:
    settings: dict[str, Any] = dict(
        n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu", policy_kwargs=dict(net_arch=[8])
    )
    return GRPO("MlpPolicy", env, **{**settings, **kwargs})


def restart(model: GRPO) -> None:
    """Begin with a reset, as a loaded model does."""
    env = model.get_env()
    assert env is not None
    model.set_env(env)


# --- continuing -------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: dict(rollout_buffer_class=name) for name in BUFFERS},
    "schedules": dict(learning_rate=lambda progress: 1e-3 * progress, clip_range=lambda progress: 0.1 + 0.1 * progress),
    "reference every third update": dict(objective=dict(kl_coef=0.1, kl_reference=3)),
    "adaptive penalty": dict(objective=dict(kl_coef=0.1, adaptive_kl_target=0.5)),
    "gSDE": dict(env="Pendulum-v1", use_sde=True),
    "log_std_lr_factor": dict(env="Pendulum-v1", policy_kwargs=dict(net_arch=[8], log_std_lr_factor=8.0)),
}


@pytest.mark.filterwarnings("ignore:Nothing was learned")  # from CartPole's equal rewards, by "process"
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_loaded_model_goes_on_as_the_saved_one_bit_for_bit(settings: dict[str, Any], tmp_path: Path):
    env = settings.get("env", "CartPole-v1")
    model = make_model(**settings).learn(320)
    model.save(tmp_path / "model")

    restart(model)
    model.learn(320, reset_num_timesteps=False)
    expected, coefficient = weights(model), model.kl_coef

    # Whatever this process has drawn or seeded in between makes no difference
    random.seed(7), np.random.seed(7), th.manual_seed(7)
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(env, 1), device="cpu")
    before = weights(loaded)
    loaded.learn(320, reset_num_timesteps=False)
    assert same(weights(loaded), expected)
    assert loaded.num_timesteps == model.num_timesteps and loaded.kl_coef == coefficient
    # What starts from wrong statistics would differ only by what was learned since
    assert settings.get("rollout_buffer_class") == "process" or not same(before, expected)


# --- faults -----------------------------------------------------------------------------------------------------------


class FaultyEnv(gym.Env):
    """Walks at random on the line, ten steps per episode, until a fault happens; resets fail from then on."""

    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "none", at_step: int = 0):
        self.fault, self.at_step = fault, at_step
        self.steps = self.step_of_episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_of_episode = 0
        self.state = self.np_random.normal(size=3).astype(np.float32)
        is_due = self.steps > self.at_step and self.fault == "nan first observation"
        return np.full(3, np.nan, np.float32) if is_due else self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.step_of_episode += 1
        self.state = self.state + (0.1 if action else -0.1)
        observation, reward = self.state, float(self.state[0])
        is_last = self.step_of_episode == 10
        if self.steps > self.at_step:
            if self.fault == "raises":
                raise ZeroDivisionError("no way on")
            if self.fault == "dies":
                os._exit(3)
            if self.fault == "nan observation" or (self.fault == "nan final observation" and is_last):
                observation = np.full(3, np.nan, np.float32)
            if self.fault == "infinite reward":
                reward = float("inf")
        return observation, reward, False, is_last, {}


NON_FINITE = rf"Environment {BROKEN} returned a non-finite {{}} in step \d+ of its episode, after \d+ timesteps: {{}}"
FAULTS: dict[str, tuple[type[Exception], str]] = {
    "raises": (ZeroDivisionError, "no way on"),
    "dies": (EnvironmentFault, rf"Environment {BROKEN} is gone: its process has ended with exit code 3"),
    "nan observation": (ValueError, NON_FINITE.format("observation", r"\[nan nan nan\]")),
    "nan first observation": (ValueError, NON_FINITE.format("observation", r"\[nan nan nan\]")),
    "nan final observation": (ValueError, NON_FINITE.format("final observation", r"\[nan nan nan\]")),
    "infinite reward": (ValueError, NON_FINITE.format("reward", "inf")),
}
BASES: dict[str, Callable[[list[Any]], VecEnv]] = {
    "dummy": DummyVecEnv,
    "subproc": lambda env_fns: SubprocVecEnv(env_fns, start_method="fork"),
}
CASES = [
    # The first update comes after 16 steps
    ("dummy", "raises", 3),
    *(("dummy", fault, 21) for fault in FAULTS if fault != "dies"),
    *(("subproc", fault, 21) for fault in ("dies", "nan observation", "nan first observation")),
]


def env_functions(fault: str, at_step: int) -> list[Any]:
    return [FaultyEnv, lambda: FaultyEnv(fault, at_step), FaultyEnv]


@pytest.fixture
def close() -> Iterator[Callable[[VecEnv], VecEnv]]:
    envs: list[VecEnv] = []

    def remember(env: VecEnv) -> VecEnv:
        envs.append(env)
        return env

    yield remember
    for env in envs:
        env.close()


@pytest.mark.filterwarnings("ignore:The environment 'FaultyEnv'")  # the first NaN is no member's start
@pytest.mark.parametrize(("base", "fault", "at_step"), CASES)
def test_a_fault_surfaces_at_once_and_the_model_learns_on(base, fault, at_step, close, tmp_path: Path):
    env = close(VecNormalize(BASES[base](env_functions(fault, at_step))))
    model = make_model(env, n_steps=16, batch_size=48)
    initial = weights(model)
    error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        model.learn(10_000)

    # Nothing that is wrong has been learned, by the policy or by what normalises
    assert is_finite(model)
    assert same(initial, weights(model)) == (model.num_timesteps < 16 * 3)
    assert np.isfinite(env.obs_rms.mean).all() and np.isfinite(env.obs_rms.var).all() and np.isfinite(env.ret_rms.var)
    model.save(tmp_path / "model")
    assert same(weights(GRPO.load(tmp_path / "model", device="cpu")), weights(model))

    before = weights(model)
    model.set_env(VecNormalize(DummyVecEnv([FaultyEnv] * 3)))
    model.learn(16 * 3 * 2, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


@pytest.mark.parametrize("in_torch", [False, True], ids=["machine code", "torch"])
def test_an_update_whose_gradient_is_not_finite_is_undone(in_torch: bool):
    options = dict(objective=dict(kl_coef=1e-3, kl_estimator="k3")) if in_torch else {}
    model = make_model(**options).learn(64)
    machine = machine_policy(model.policy, (model._objective(), model.rollout_buffer, "clipped"))
    assert isinstance(machine, MachinePolicy) != (in_torch or bool(UNAVAILABLE))
    before, moments = weights(model), copy.deepcopy(model.policy.optimizer.state_dict()["state"])
    buffer: Any = model.rollout_buffer  # which still holds the last update
    advantages = buffer._update.advantages.clone()
    advantages[5] = float("nan")
    buffer._update = buffer._update._replace(advantages=advantages)
    with pytest.raises(ValueError, match=r"(gradient of the update|output of the policy) is not finite"):
        model.train()
    assert same(before, weights(model)) and is_finite(model)
    after = model.policy.optimizer.state_dict()["state"]
    assert all(th.equal(value, after[index][name]) for index, state in moments.items() for name, value in state.items())
    model.learn(64, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


def test_an_update_whose_weights_are_not_finite_is_undone():
    """The last step of an update has no gradient after it to tell."""
    model = make_model(n_epochs=1, batch_size=64).learn(64)
    before = weights(model)

    def step(*args: Any) -> None:
        with th.no_grad():
            next(model.policy.parameters()).fill_(float("inf"))

    model.policy.optimizer.step = step
    with pytest.raises(ValueError, match=r"weights after the update are not finite"):
        model.learn(64, reset_num_timesteps=False)
    assert same(before, weights(model))


# --- interrupts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """An alarm is what Ctrl-C is: an interrupt between two bytecodes, wherever the run is."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """
    One interrupt. It may be lost where Python swallows exceptions, as in a finaliser: then another one comes a second later.
    What runs inside has to go on until it is interrupted.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    with pytest.raises(KeyboardInterrupt):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_an_interrupt_at_any_moment_leaves_a_model_that_saves_and_goes_on(buffer: str, ctrl_c, tmp_path: Path):
    # A low rate keeps episodes short: a solved CartPole completes no group of different returns, however long it trains.
    model = make_model(make_vec_env("CartPole-v1", 4), rollout_buffer_class=buffer, n_steps=32, n_epochs=5, learning_rate=1e-6)
    model.learn(128)
    began = time.monotonic()
    model.learn(128 * 5, reset_num_timesteps=False)
    rollout = (time.monotonic() - began) / 5
    delays = np.random.default_rng(0).uniform(0.2, 3.0, size=10) * rollout
    for delay in delays:
        with interrupt_after(float(delay)):
            model.learn(100_000, reset_num_timesteps=False)
        assert is_finite(model)
        model.save(tmp_path / "model")
        loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 4), device="cpu")
        assert same(weights(loaded), weights(model))
        loaded.learn(128, reset_num_timesteps=False)
        assert is_finite(loaded)
    before = weights(model)
    model.learn(128 * 4, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


def test_an_interrupt_while_autograd_is_off_leaves_it_on_afterwards():
    def interrupted(_locals: Any, _globals: Any) -> bool:
        th.set_grad_enabled(False)  # as an interrupt finds it that comes while torch leaves `no_grad`
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model().learn(64, callback=interrupted)
    is_enabled = th.is_grad_enabled()
    th.set_grad_enabled(True)
    assert is_enabled
