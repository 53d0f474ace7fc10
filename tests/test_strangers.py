"""Environments, wrappers and callbacks that do unusual things which PPO copes with."""

import inspect
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import SMALL, AnyEnv, Watcher, make_envs, make_model, reload, same, weights
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EveryNTimesteps, StopTrainingOnMaxEpisodes
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize

from sb3_grpo import GRPO, MaskableGRPO, RecurrentGRPO, grpo
from sb3_grpo.arithmetic.update import UncheckedDistributions
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.observations import map_observations, take_observations
from sb3_grpo.starts import EnvironmentFault

forked = partial(SubprocVecEnv, start_method="fork")


@pytest.fixture(autouse=True)
def workers_end_with_their_test() -> Iterator[None]:
    yield
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


class Counts(gym.Env):
    """Observes the number of its steps, its reward is ten times that, and episodes have ``length`` steps."""

    observation_space = spaces.Box(-1, 1000, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)
    length = 6

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        return np.full(2, self.t, np.float32), 10.0 * self.t, False, self.t >= self.length, {}


def said(model: Any, timesteps: int = 64, **kwargs: Any) -> list[str]:
    """:return: Warnings of a training"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.learn(timesteps, **kwargs)
    return [str(each.message) for each in caught]


def rewards(model: Any) -> list[float]:
    """:return: Rewards of the first environment in the last rollout"""
    buffer = model.rollout_buffer
    by_env = buffer.rewards if buffer.rewards.shape[0] == model.n_envs else buffer.rewards.T
    return by_env.reshape(model.n_envs, -1)[0].tolist()


def under_ppo(env: Any) -> list[float]:
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, policy_kwargs=dict(net_arch=[8]), device="cpu")
    ppo_rewards: list[float] = []
    model.learn(1, callback=lambda names, _: ppo_rewards.append(float(names["rewards"][0])) or True)  # type: ignore[func-returns-value]
    return ppo_rewards


# --- the step of a user's class -----------------------------------------------------------------------------------------


class OwnStep(DummyVecEnv):
    def step(self, actions: np.ndarray) -> Any:
        observations, rewards, dones, infos = super().step(actions)
        return observations, rewards + 1, dones, infos


class OwnAsync(DummyVecEnv):
    """Sends the opposite actions, and counts calls."""

    calls = 0

    def step_async(self, actions: np.ndarray) -> None:
        self.calls += 1
        super().step_async(1 - np.asarray(actions))


class OwnWait(DummyVecEnv):
    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        return observations, rewards + 1, dones, infos


class OwnStepInWorkers(SubprocVecEnv):
    def step(self, actions: np.ndarray) -> Any:
        observations, rewards, dones, infos = super().step(actions)
        return observations, rewards + 1, dones, infos


class OwnConstructor(SubprocVecEnv):
    """May have workers of its own as well, for all that can be seen."""

    def __init__(self, env_fns: Any):
        super().__init__(env_fns, start_method="fork")


class PassThrough(VecEnvWrapper):
    venv: Any

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


class WrapperWithStep(PassThrough):
    def step(self, actions: np.ndarray) -> Any:
        observations, rewards, dones, infos = self.venv.step(actions)
        return observations, rewards + 1, dones, infos


class Repeat(PassThrough):
    """Each action lasts three steps of the base."""

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        total = np.zeros(self.num_envs, np.float32)
        for _ in range(3):
            observations, rewards, dones, infos = self.venv.step(self.actions)
            total += rewards
        return observations, total, dones, infos


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnStep([Counts] * 2),
        lambda: OwnAsync([Counts] * 2),
        lambda: OwnWait([Counts] * 2),
        lambda: OwnStepInWorkers([Counts] * 2, start_method="fork"),
        lambda: OwnConstructor([Counts] * 2),
        lambda: PassThrough(OwnStep([Counts] * 2)),
        lambda: WrapperWithStep(DummyVecEnv([Counts] * 2)),
        lambda: PassThrough(WrapperWithStep(OwnStep([Counts] * 2))),
        lambda: Repeat(DummyVecEnv([Counts] * 2)),
        lambda: Repeat(OwnStep([Counts] * 2)),
    ],
    ids=[
        *("step", "step_async", "step_wait", "step of workers", "constructor", "step under a wrapper"),
        *("wrapper's step", "inner wrapper's step", "repeats", "repeats with step"),
    ],
)
def test_rewards_come_through_the_step_of_the_users_class(make: Any):
    model = make_model(make())
    said(model, 1)
    assert rewards(model) == under_ppo(make())


def test_a_method_of_the_users_class_runs_once_a_step():
    env = OwnAsync([Counts] * 2)
    said(make_model(env), 1)
    assert env.calls == 16


@pytest.mark.parametrize(
    ("make", "is_shared"),
    [
        (lambda: OwnStep([Counts] * 2), False),
        (lambda: OwnConstructor([Counts] * 2), False),
        (lambda: WrapperWithStep(DummyVecEnv([Counts] * 2)), True),
        (lambda: Repeat(DummyVecEnv([Counts] * 2)), True),
    ],
    ids=["step", "constructor", "wrapper's step", "repeats"],
)
def test_starts_are_shared_where_a_users_step_allows_it_and_one_sentence_says_where_not(make: Any, is_shared: bool):
    model = make_model(make())
    sentences = [each for each in said(model) if "do not share their start" in each]
    assert model._seeded_env.share_starts == is_shared and len(sentences) == (not is_shared)


# --- lanes and ends of the outermost wrapper ----------------------------------------------------------------------------


class Splits(PassThrough):
    """Each environment is two lanes."""

    def __init__(self, venv: Any):
        super().__init__(venv)
        self.num_envs = 2 * venv.num_envs

    def reset(self) -> Any:
        return map_observations(lambda part: part.repeat(2, axis=0), self.venv.reset())

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions[::2])

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        return (
            observations.repeat(2, axis=0),
            rewards.repeat(2),
            dones.repeat(2),
            [dict(infos[i // 2]) for i in range(len(self))],
        )

    def __len__(self) -> int:
        return self.num_envs


class Merges(PassThrough):
    """Only the first of the environments is seen."""

    def __init__(self, venv: Any):
        super().__init__(venv)
        self.num_envs = 1

    def reset(self) -> Any:
        return take_observations(self.venv.reset(), slice(1))

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(np.repeat(actions, self.venv.num_envs, axis=0))

    def step_wait(self) -> Any:
        observations, *others = self.venv.step_wait()
        return take_observations(observations, slice(1)), *(each[:1] for each in others)


class Endless(PassThrough):
    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, rewards, np.zeros_like(dones), infos


class Limit(PassThrough):
    """A time limit of three steps. All environments are reset at once."""

    t = 0

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        self.t += 1
        if self.t == 3:
            self.t, dones = 0, np.ones_like(dones)
            infos = [
                {**info, "terminal_observation": observations[i], "TimeLimit.truncated": True} for i, info in enumerate(infos)
            ]
            observations = self.venv.reset()
        return observations, rewards, dones, infos


class Late(PassThrough):
    """Returns each step one step later, as lists."""

    late: Any = None

    def step_wait(self) -> Any:
        now = self.venv.step_wait()
        before, self.late = self.late or now, now
        return before[0], list(before[1]), list(before[2]), tuple(before[3])


WRAPPERS = {each.__name__: each for each in (Splits, Merges, Endless, Limit, Late)}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_buffer_takes_the_lanes_and_ends_of_the_outermost_wrapper(wrapper: str, buffer: str):
    model, watcher = make_model(WRAPPERS[wrapper](DummyVecEnv([Counts] * 2)), rollout_buffer_class=buffer), Watcher()
    sentences = [each for each in said(model, 64, callback=watcher) if "do not share their start" in each]
    assert len(sentences) == 1 and rewards(model)[:5] != []
    # A trajectory ends where the wrapper says so: its steps count from there.
    steps = np.stack([position.steps for position in watcher.positions])
    groups = np.stack([position.groups * 2 + position.members for position in watcher.positions])
    begins = steps[1:] == 0
    assert (steps[1:][~begins] == steps[:-1][~begins] + 1).all() and (groups[1:] == groups[:-1])[~begins].all()
    assert begins.any() == (wrapper != "Endless") and not (groups[1:] == groups[:-1])[begins].any()


def test_environments_that_share_starts_no_longer_begin_differently():
    """The members of a group have equal generators, so without other seeds they would go on alike."""
    env = Endless(DummyVecEnv([partial(AnyEnv, lengths=(3, 4))] * 2))
    model = make_model(env)
    firsts: list[Any] = []

    def note(names: Any, _: Any) -> bool:
        firsts.append([tuple(each) for each in env.get_attr("first_observation")])
        return True

    said(model, 64, callback=note)
    later = [first for step in firsts[4:] for first in [step] if step != firsts[3]]
    assert later and all(one != other for one, other in later)


# --- global generators --------------------------------------------------------------------------------------------------


class SeedsAll(AnyEnv):
    """Seeds everything in a reset, and draws from the global generators in its steps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            th.manual_seed(seed)
        super().reset(seed=seed)
        self.steps_left = 4
        return self.draw(), {}

    def step(self, action: Any) -> Any:
        _, *others = super().step(action)
        return self.draw(), *others

    def draw(self) -> np.ndarray:
        return np.array([random.random(), np.random.random(), th.rand(()).item()], np.float32)


class DrawsFromAll(SeedsAll):
    """Takes no seed, so that its starts come from the global generators."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset()


@pytest.mark.parametrize(("venv_class", "n_envs"), [(DummyVecEnv, 1), (DummyVecEnv, 2), (forked, 2)])
def test_a_seeded_reset_leaves_the_global_generators_as_they_were(venv_class: Any, n_envs: int):
    model = make_model(venv_class([SeedsAll] * n_envs), normalize_observations=False, n_steps=32)
    assert not said(model)
    buffer = model.rollout_buffer
    first, later = (np.unique(buffer.observations[buffer.steps == step], axis=0) for step in (0, 1))
    assert len(first) == (buffer.steps == 0).sum() / 2  # the start is that of the group
    assert len(later) == (buffer.steps == 1).sum()  # and what follows is not


@pytest.mark.parametrize(
    ("algorithm", "last_seed"), [(PPO, lambda _: 6), (GRPO, lambda model: model.ledger.seed_of(0))], ids=["PPO", "GRPO"]
)
def test_only_the_first_reset_may_set_the_global_generators(algorithm: Any, last_seed: Any):
    """PPO passes its seed to no other reset, and they stay as the last environment has set them."""
    model = algorithm("MlpPolicy", DummyVecEnv([SeedsAll] * 2), n_steps=32, seed=5, device="cpu")
    seeds: list[int] = []
    said(model, 64, callback=lambda *_: seeds.append(th.initial_seed()) or True)  # type: ignore[func-returns-value]
    assert set(seeds) == {last_seed(model)}


def test_starts_that_are_drawn_from_the_global_generators_differ():
    """Giving generators back the state before each reset would make all starts of a rollout equal."""
    model = make_model(DummyVecEnv([DrawsFromAll] * 2), normalize_observations=False, n_steps=32)
    assert any("does not reproduce" in each for each in said(model))
    buffer = model.rollout_buffer
    assert len(np.unique(buffer.observations[buffer.steps == 0], axis=0)) == (buffer.steps == 0).sum()


class SeedsInSteps(Counts):
    action_space, length = spaces.Discrete(8), 24

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed or 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.t == 0:
            th.manual_seed(self.seed)
        return super().step(action)


@pytest.mark.parametrize("actions", [spaces.Discrete(8), spaces.Box(-1, 1, (1,))], ids=["Discrete", "Box"])
def test_copies_within_a_group_are_noticed_once(actions: spaces.Space, monkeypatch: pytest.MonkeyPatch):
    for env_class, n in ((SeedsInSteps, 1), (Counts, 0)):
        monkeypatch.setattr(env_class, "action_space", actions)
        model = make_model(DummyVecEnv([env_class]), n_steps=128)
        assert sum("the same actions" in each for each in said(model, 512)) == n


# --- forms of what environments return ----------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "tuple": lambda x: tuple(map(float, x)),
    "list": lambda x: x.tolist(),
    "tensor": th.as_tensor,
    "row": lambda x: x[None],
    "booleans": lambda x: x > 0,
    "integers": lambda x: x.astype(int),
}


class InForm(Counts):
    observation_space: Any

    def __init__(self, form: str, space: spaces.Space):
        self.form, self.observation_space = FORMS[form], space

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return self.formed(observation), info

    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return self.formed(observation), th.tensor(reward), np.array(False), th.tensor(truncated), info

    def formed(self, observation: Any) -> Any:
        observation = self.form(observation)
        return {"a": observation} if isinstance(self.observation_space, spaces.Dict) else observation


BOX = Counts.observation_space


@pytest.mark.parametrize("space", [BOX, spaces.Dict({"a": BOX})], ids=["Box", "Dict"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
def test_observations_rewards_and_ends_are_brought_into_form(venv_class: Any, form: str, space: spaces.Space):
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    model = make_model(venv_class([lambda: InForm(form, space)] * 2), policy)
    assert not said(model, 1)
    observed = model.rollout_buffer.observations
    observed = observed["a"] if isinstance(observed, dict) else observed
    steps = np.arange(16) % 6 if form != "booleans" else np.arange(16) % 6 > 0
    assert observed.dtype == np.float32 and observed[0, :, 0].tolist() == steps.astype(float).tolist()
    assert rewards(model)[:7] == [10, 20, 30, 40, 50, 60, 10]


class HidesVelocities(VecEnvWrapper):
    """Half of the numbers of two environments are as many as one environment has."""

    venv: Any

    def reset(self) -> Any:
        return self.venv.reset()[:, ::2]

    def step_wait(self) -> Any:
        observations, *others = self.venv.step_wait()
        return observations[:, ::2], *others


def test_a_wrapper_that_forgets_to_change_the_space_of_its_observations_is_told_so():
    env = HidesVelocities(make_vec_env("CartPole-v1", 2))
    with pytest.raises(ValueError, match=r"returned observations of shape \(2,\), but their space Box\(.*\) has shape \(4,\)"):
        make_model(env).learn(64)


# --- features extractors ------------------------------------------------------------------------------------------------


class Extractor(BaseFeaturesExtractor):
    def __init__(self, space: Any, layers: str):
        super().__init__(space, 8)
        self.layers, self.after = th.nn.Linear(2, 8), LAYERS[layers]()

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.after(self.layers(observations / 6))


class Attention(th.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = th.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, features: th.Tensor) -> th.Tensor:
        tokens = features.view(-1, 2, 4)
        return self.attend(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


class DoubledOnce(th.autograd.Function):
    """Its second derivative is zero, without an error."""

    @staticmethod
    def forward(ctx: Any, features: th.Tensor) -> th.Tensor:
        return 2 * features

    @staticmethod
    def backward(ctx: Any, gradient: th.Tensor) -> th.Tensor:
        return 2 * gradient.detach()


class Once(th.nn.Module):
    def forward(self, features: th.Tensor) -> th.Tensor:
        return DoubledOnce.apply(features)


class Twice(th.nn.Module):
    def forward(self, features: th.Tensor) -> th.Tensor:
        return 2 * features


LAYERS: dict[str, Any] = {
    "attention": Attention,
    "transformer": lambda: th.nn.Sequential(
        th.nn.Unflatten(1, (2, 4)), th.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), th.nn.Flatten()
    ),
    "once": Once,
    "dropout": lambda: th.nn.Dropout(0.4),
    "batch norm": lambda: th.nn.BatchNorm1d(8),
    "nothing": Twice,
}


def natural_model(layers: str) -> Any:
    class Steers(Counts):
        action_space = spaces.Box(-1, 1, (2,))

        def step(self, action: Any) -> Any:
            observation, _, *others = super().step(action)
            return observation, -float(np.square(action - np.sin(self.t)).sum()), *others

    kwargs = dict(features_extractor_class=Extractor, features_extractor_kwargs=dict(layers=layers), net_arch=[8])
    only_clipped: dict[str, Any] = dict(n_epochs=None, batch_size=64, learning_rate=3e-4)
    return make_model(DummyVecEnv([Steers] * 4), n_steps=64, policy_kwargs=kwargs, seed=1, **only_clipped)


@pytest.mark.parametrize("layers", LAYERS)
def test_natural_steps_move_every_features_extractor(layers: str):
    model = natural_model(layers)
    assert model.update_rule == "natural"
    n_tried = []
    for _ in range(8):
        before = model.policy.features_extractor.layers.weight.detach().clone()
        model.learn(256, reset_num_timesteps=False)
        assert not th.equal(before, model.policy.features_extractor.layers.weight)
        n_tried.append(model.update_metrics["train/line_search_steps"])
    assert np.mean(n_tried) < 2.5  # with unequal masks, or a part of the Fisher matrix missing, the model of it is wrong


def test_distributions_check_their_arguments_again_after_contexts_that_overlap(monkeypatch: pytest.MonkeyPatch):
    # What is compiled by torch in another test switches the checks off.
    monkeypatch.setattr(th.distributions.Distribution, "_validate_args", True)
    first, second = UncheckedDistributions(), UncheckedDistributions()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not th.distributions.Distribution._validate_args
    second.__exit__(None, None, None)
    assert th.distributions.Distribution._validate_args


# --- callbacks and models that are loaded -------------------------------------------------------------------------------


class Forgets(BaseCallback):
    def _on_step(self) -> None:  # type: ignore[override]
        pass


class Remembers(BaseCallback):
    def _on_step(self) -> bool:
        return True


def forgets(names: Any, others: Any) -> None:
    pass


def with_itself(callback: Any) -> Any:
    callback.partner = StopTrainingOnMaxEpisodes(99)
    callback.partner.partner = callback
    return callback


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (Forgets(), "Forgets"),
        (forgets, "forgets"),
        ([StopTrainingOnMaxEpisodes(99), Forgets()], "Forgets"),
        (EveryNTimesteps(1, Forgets()), "Forgets"),
        (with_itself(Forgets()), "Forgets"),
        (Remembers(), None),
    ],
    ids=["class", "function", "list", "event", "circle", "returns"],
)
def test_a_callback_that_forgets_to_return_ends_the_training_with_its_name(callback: Any, name: str | None):
    model = make_model(DummyVecEnv([Counts]))
    sentences = [each for each in said(model, 64, callback=callback) if "returned None" in each]
    assert [f"callback {name} has" in each for each in sentences] == [True] * (name is not None)
    assert model.num_timesteps == (64 if name is None else 1)


def with_attribute(thing: Any, name: str, value: Any, model: Any) -> Any:
    setattr(thing, name, value)
    return model


CHANGES: dict[str, Any] = {
    "custom_objects": lambda model: reload(model, env=model.env, custom_objects=dict(learning_rate=0.0)),
    "lr_schedule": lambda model: with_attribute(model, "lr_schedule", lambda _: 0.0, model),
    "optimizer": lambda model: with_attribute(model.policy, "optimizer", th.optim.SGD(model.policy.parameters(), 0.1), model),
    "nothing": lambda model: model,
    "loaded": lambda model: reload(model, env=model.env),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_natural_steps_ignore_is_said_once_they_learn(change: str):
    model = CHANGES[change](natural_model("nothing").learn(256))
    sentences = [each for each in said(model, 512) if "natural-gradient steps do not use it" in each]
    assert len(sentences) == (change not in ("nothing", "loaded")) and not said(model, 256)


# --- what a features extractor sees ---


class Notes(FlattenExtractor):
    """Keeps the inputs of each call in ``seen``."""

    seen: list[np.ndarray] = []  # noqa: RUF012

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.seen.append(observations.detach().numpy().copy())
        return super().forward(observations)


@pytest.mark.parametrize("image", [False, True], ids=["vector", "image"])
def test_a_features_extractor_of_the_user_sees_what_ppo_gives_it(image: bool) -> None:
    space = spaces.Box(0, 255, (3, 40, 40), np.uint8) if image else spaces.Box(0, 4, (3,), np.float32)
    env, seen = AnyEnv(observation_space=space), []
    kwargs: dict[str, Any] = dict(policy_kwargs=dict(features_extractor_class=Notes))
    for cls in (PPO, GRPO):
        Notes.seen = []
        cls("CnnPolicy" if image else "MlpPolicy", env, n_steps=16, batch_size=16, device="cpu", seed=0, **kwargs).learn(48)
        seen.append(np.unique(np.concatenate([each.ravel() for each in Notes.seen])))
    largest = 1.0 if image else 4.0
    assert all(0.0 <= each.min() and each.max() <= largest for each in seen)
    model = make_model(env, normalize_observations=True, **kwargs).learn(48)
    assert model.policy.normalizer is not None and GRPO("MlpPolicy", "CartPole-v1").policy.normalizer is not None


# --- environments of others ---


def test_an_environment_of_openais_gym_is_wrapped_as_by_sb3(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """No environment of Gymnasium, with spaces that are not Gymnasium's."""

        action_space = observation_space = "spaces of Gym"

    monkeypatch.setattr("sb3_grpo.grpo._patch_env", lambda env: Counts() if isinstance(env, Old) else env)
    model: Any = make_model(Old(), n_steps=32).learn(32)
    model.set_env(Old())
    assert model.learn(32).num_timesteps == 32


class Simulator(VecEnv):
    """Steps four environments at once. It has no attributes, or ``None`` for each."""

    def __init__(self, has_everything: bool):
        super().__init__(4, spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
        self.has_everything = has_everything

    def reset(self) -> Any:
        self.t = 0
        return np.zeros((4, 3), np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        self.t += 1
        infos: list[dict[str, Any]] = [{"terminal_observation": np.zeros(3, np.float32)} for _ in range(4)]
        return np.zeros((4, 3), np.float32), self.actions.astype(np.float32), np.full(4, self.t % 10 == 0), infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode" or self.has_everything:
            return [None] * 4
        raise NotImplementedError

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        raise NotImplementedError


@pytest.mark.parametrize("has_everything", [False, True])
def test_memory_takes_no_masks_from_a_simulator_that_cannot_say_whether_it_has_them(has_everything: bool) -> None:
    options: dict[str, Any] = dict(n_steps=32, batch_size=128, share_starts=False, device="cpu")
    model = RecurrentGRPO("MlpLstmPolicy", Simulator(has_everything), **options).learn(128)
    assert model.num_timesteps == 128 and not model._uses_masks
    with pytest.raises(ValueError, match="'Simulator' has no method `action_masks`"):
        MaskableGRPO("MlpPolicy", Simulator(has_everything), share_starts=False, device="cpu").learn(128)


class Writes(VecEnvWrapper):
    """Uses attributes of the environments below it while they are reset and stepped."""

    def reset(self) -> Any:
        self.venv.level = 0  # type: ignore[attr-defined]
        return self.venv.reset()

    def step_wait(self) -> Any:
        assert isinstance(self.venv, DummyVecEnv)
        self.venv.level += 1  # type: ignore[attr-defined]
        self.seen = self.venv.ledger, self.venv.num_timesteps  # type: ignore[attr-defined]
        return self.venv.step_wait()


def test_a_wrapper_reads_and_writes_the_attributes_of_the_base() -> None:
    base: Any = DummyVecEnv([AnyEnv] * 2)
    base.ledger, base.num_timesteps = "accounts", 7
    env = Writes(base)
    make_model(env).learn(64)
    assert (base.level, env.seen) == (32, ("accounts", 7)) and env.venv is base


# --- callbacks that change the model or the environments ---


class AtStep(BaseCallback):
    """Calls a function with the model after its third step, and keeps the actions after that."""

    def __init__(self, change: Any):
        super().__init__()
        self.change, self.later = change, list[float]()

    def _on_step(self) -> bool:
        if self.n_calls == 3:
            self.change(self.model)
        elif self.n_calls > 3:
            self.later.append(self.locals["actions"].mean())
        return True


def always_zero(policy: Any) -> None:
    policy.action_net.weight.data = th.zeros_like(policy.action_net.weight)
    policy.action_net.bias.data = th.tensor([50.0, -50.0])


def assign_a_policy(model: Any) -> None:
    other = make_model(make_vec_env("CartPole-v1", 2), device="cpu").policy
    always_zero(other)
    model.policy = other


@pytest.mark.parametrize("change", [lambda model: always_zero(model.policy), assign_a_policy], ids=["data", "policy"])
def test_weights_or_a_policy_that_a_callback_assigns_act_from_the_next_step_on(change: Any) -> None:
    callback = AtStep(change)
    make_model(make_vec_env("CartPole-v1", 2), n_steps=32, device="cpu").learn(64, callback)
    assert len(callback.later) == 29 and not any(callback.later)


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
@pytest.mark.parametrize("event", ["start", "step", "end"])
def test_a_callback_may_set_the_seed(event: str, buffer: str) -> None:
    class Seeds(Watcher):
        """Sets the seed in the first rollout, at its start, its third step or its end."""

        def note(self, now: str) -> None:
            model: Any = self.model
            if now == event and model.num_timesteps <= 64 and model.ledger.seed != 5:
                model.set_random_seed(5)

        def _on_rollout_start(self) -> None:
            super()._on_rollout_start()
            self.note("start")

        def _on_step(self) -> bool:
            if self.n_calls == 3:
                self.note("step")
            return super()._on_step()

        def _on_rollout_end(self) -> None:
            self.note("end")

    watcher = Seeds()
    model: Any = make_model(make_vec_env("CartPole-v1", 2), n_steps=32, rollout_buffer_class=buffer).learn(192, watcher)
    begun = 0 if event == "start" else 32  # the rollout in which the new ledger begins
    assert model.ledger.seed == 5 and not watcher.positions[begun].steps.any()
    assert watcher.positions[begun].groups.tolist() == [0, 0] and model.num_timesteps == 192


class Anneals(GRPO):
    """Computes an argument of the constructor."""

    first = 10.0

    @property
    def ent_coef(self) -> float:
        return self.first * self._current_progress_remaining

    @ent_coef.setter
    def ent_coef(self, value: float) -> None:
        pass


def test_an_argument_that_a_subclass_has_as_a_property_counts_in_each_update() -> None:
    env = make_vec_env("CartPole-v1", n_envs=8)
    entropies = []
    for model in (GRPO("MlpPolicy", env, n_steps=64, seed=0), Anneals("MlpPolicy", env, n_steps=64, seed=0)):
        model.learn(4096)
        entropies.append(-model.update_metrics["train/entropy_loss"])
    assert entropies[1] > entropies[0] + 0.05
    with pytest.raises(ValueError, match="`ent_coef` must be a finite number, not inf"):
        type("Wrong", (Anneals,), {"first": math.inf})("MlpPolicy", env)


class Columns(VecEnvWrapper):
    """Shows some of the inputs, in an array whose columns lie one after another."""

    def __init__(self, venv: VecEnv, in_order: bool):
        super().__init__(venv, spaces.Box(-np.inf, np.inf, (2,), np.float32))
        self.in_order = in_order

    def seen(self, observations: Any) -> np.ndarray:
        chosen = observations[:, [0, 2]]
        assert not chosen.flags["C_CONTIGUOUS"]
        return np.ascontiguousarray(chosen) if self.in_order else chosen

    def reset(self) -> Any:
        return self.seen(self.venv.reset())

    def step_wait(self) -> Any:
        observations, *others = self.venv.step_wait()
        return self.seen(observations), *others


@pytest.mark.parametrize("algorithm", [GRPO, RecurrentGRPO])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_order_of_observations_in_memory_changes_nothing(env: str, algorithm: Any) -> None:
    def trained(in_order: bool) -> Any:
        name = "MlpPolicy" if algorithm is GRPO else "MlpLstmPolicy"
        return algorithm(name, Columns(make_vec_env(env, 4, seed=0), in_order), n_steps=64, seed=0, device="cpu").learn(512)

    assert same(weights(trained(False)), weights(trained(True)))


def test_a_learning_rate_that_the_user_updates_stays() -> None:
    class Own(GRPO):
        def _update_learning_rate(self, optimizers: Any) -> None:
            optimizers.param_groups[0]["lr"] = 0.0

    model = Own("MlpPolicy", "CartPole-v1", n_steps=64, device="cpu")
    before = weights(model)
    assert same(before, weights(model.learn(128)))


def test_a_stop_iteration_of_an_environment_arrives_as_one() -> None:
    class RunsOut(Counts):
        def step(self, action: Any) -> Any:
            return super().step(action) if self.t < 5 else next(iter([]))

    with pytest.raises(StopIteration):
        make_model(DummyVecEnv([RunsOut])).learn(64)


def test_compilation_is_no_part_of_the_speed_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Age(BaseCallback):
        def _on_rollout_start(self) -> None:
            self.seconds = (time.time_ns() - self.model.start_time) / 1e9

        def _on_step(self) -> bool:
            return True

    def compiles(*_: Any) -> str:
        time.sleep(1.0)
        return "Compiled"

    monkeypatch.setattr(grpo, "describe_choice", compiles)
    make_model().learn(32, age := Age())
    assert age.seconds < 0.9


def test_a_rollout_of_another_length_than_the_buffer_is_refused() -> None:
    model = make_model()
    _, callback = model._setup_learn(64)
    with pytest.raises(ValueError, match="n_rollout_steps=8 does not fill a rollout buffer of 16 steps"):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, 8)


def test_weights_of_an_actor_critic_that_are_left_out_are_noticed() -> None:
    model, ppo = make_model(), PPO("MlpPolicy", make_envs(), policy_kwargs=SMALL, device="cpu")
    with pytest.warns(UserWarning, match=r"hidden layers have other names.*load_actor"):
        model.policy.load_state_dict(ppo.policy.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(GRPO, PPO), (MaskableGRPO, MaskablePPO), (RecurrentGRPO, RecurrentPPO)],
    ids=lambda each: each.__name__,
)
def test_arguments_of_learn_have_the_order_of_the_algorithm_with_a_critic(ours: Any, theirs: Any) -> None:
    expected = list(inspect.signature(theirs.learn).parameters)
    assert list(inspect.signature(ours.learn).parameters)[: len(expected)] == expected


# --- what an environment has under names that the package reads ---


class MasksOfAPlayer(gym.Wrapper):
    def action_masks(self, player: int) -> np.ndarray:
        return np.array([True, False])


class MasksOfALargerSpace(gym.Wrapper):
    def action_masks(self) -> np.ndarray:
        return np.ones(5, bool)


@pytest.mark.parametrize("wrapper", [MasksOfAPlayer, MasksOfALargerSpace])
def test_masks_of_another_kind_end_the_training_with_what_to_pass_and_not_when_it_was_passed(wrapper: Any) -> None:
    def memory() -> RecurrentGRPO:
        return RecurrentGRPO("MlpLstmPolicy", wrapper(gym.make("CartPole-v1")), n_steps=16, device="cpu")

    with pytest.raises((TypeError, ValueError)) as raised:
        memory().learn(16)
    told = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert sys.version_info < (3, 11) or any("use_masking=False" in each for each in told)
    assert memory().learn(16, use_masking=False).num_timesteps == 16


class SaysYes(gym.Wrapper):
    """Has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


def test_an_environment_that_has_everything_has_no_masks() -> None:
    for env in (SaysYes(Counts()), DummyVecEnv([lambda: SaysYes(Counts())])):
        assert not any("action_masks" in each for each in said(make_model(env), 16))


@pytest.mark.parametrize(
    ("limit", "horizon"), [(np.int64(7), 7), (7.0, 7), (np.float32(7), 7), (7.5, None), (math.inf, None), ("7", None)]
)
def test_a_time_limit_is_any_whole_number(limit: Any, horizon: int | None) -> None:
    env = Counts()
    env._max_episode_steps = limit  # type: ignore[attr-defined]
    assert make_model(env).rollout_buffer.horizon == horizon


class TakesNoSeed(Counts):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            raise NotImplementedError("cannot be seeded")
        return super().reset()


class CannotBeReset(Counts):
    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError("cannot be reset")


def test_an_environment_that_refuses_seeds_goes_without() -> None:
    with pytest.warns(UserWarning, match=r"A reset with a seed failed with NotImplementedError\('cannot be seeded'\), so"):
        model = make_model(DummyVecEnv([Counts, TakesNoSeed])).learn(64)
    assert model.num_timesteps == 64
    assert GRPO("MlpPolicy", TakesNoSeed(), n_steps=16, share_starts=False, device="cpu").learn(16).num_timesteps == 16
    for env in (CannotBeReset(), forked([TakesNoSeed])):
        with pytest.raises((NotImplementedError, EnvironmentFault)) as raised:
            make_model(env).learn(16)
        assert sys.version_info < (3, 11) or "pass share_starts=False" in raised.value.__notes__[0]


class ReturnsAMapping(Counts):
    observation_space = spaces.Dict({"a": Counts.observation_space})  # type: ignore[assignment]

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return {"a": super().reset(**kwargs)[0]}, {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return UserDict(a=observation), *rest


def test_a_mapping_that_is_no_dict_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="of type UserDict, but its space is a Dict: return a dict"):
        make_model(ReturnsAMapping(), policy="MultiInputPolicy").learn(16)


class Bonus(BaseCallback):
    def _on_step(self) -> bool:
        self.locals["rewards"] += 100.0
        return True


@pytest.mark.parametrize("buffer", BUFFERS)
def test_rewards_that_a_callback_changes_count_or_are_warned_of(buffer: str) -> None:
    def mean_reward(env: VecEnv, expect: bool) -> float:
        model = make_model(env, rollout_buffer_class=buffer)
        messages = said(model, 32, callback=Bonus())
        assert any("A callback has changed the rewards" in each for each in messages) == expect
        return float(np.mean(model.rollout_buffer.rewards))

    assert mean_reward(make_vec_env(Counts, 2), expect=False) > 100
    has_own = buffer != "kernel"
    assert (mean_reward(VecNormalize(make_vec_env(Counts, 2)), expect=has_own) > 95) == (not has_own)
