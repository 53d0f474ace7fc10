"""Classes of a user that PPO runs: environments, simulators, policies, optimizers and subclasses of the algorithm."""

import math
import pathlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, SMALL, AnyEnv, make_envs, make_model
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.save_util import load_from_zip_file, save_to_zip_file
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_grpo import GRPO, ActorPolicy, MaskableGRPO, RecurrentGRPO
from sb3_grpo.starts import EnvironmentFault

# --- environments -----------------------------------------------------------------------------------------------------


class LooksUpNames(AnyEnv):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"speed": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["config"][name]


class AsksASimulator(AnyEnv):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"the simulator has no {name}")


class LimitThatCannotBePickled(AnyEnv):
    def __init__(self) -> None:
        super().__init__()
        self._max_episode_steps = lambda: 10


class HasNoName(AnyEnv):
    """It is asked for its name because its starts are not reproducible."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return observation + np.random.default_rng().uniform(size=3).astype(np.float32), info

    def __str__(self) -> str:
        raise RuntimeError("no name")


@pytest.fixture(params=[DummyVecEnv, SubprocVecEnv], ids=["in this process", "in workers"])
def vec_env(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[VecEnv] = []

    def make(env_class: type[gym.Env]) -> VecEnv:
        kwargs = dict(start_method="fork") if request.param is SubprocVecEnv else {}
        made.append(make_vec_env(env_class, 2, vec_env_cls=request.param, vec_env_kwargs=kwargs))
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("env_class", [LooksUpNames, AsksASimulator, LimitThatCannotBePickled])
def test_an_environment_that_ppo_asks_nothing_may_fail_on_questions(env_class: type[gym.Env], vec_env: Any):
    env = vec_env(env_class)
    assert make_model(env).learn(64).num_timesteps == 64
    with pytest.raises(ValueError, match="has no method `action_masks`"):
        MaskableGRPO("MlpPolicy", env, n_steps=16, device="cpu").learn(32)


def test_an_environment_without_a_name_is_named_by_its_class_of_environments(vec_env: Any):
    env = vec_env(HasNoName)
    with pytest.warns(UserWarning, match=f"The environment '{type(env).__name__}' does not reproduce"):
        assert make_model(env).learn(64).num_timesteps == 64


class WithMasks(AnyEnv):
    _max_episode_steps = 9

    def action_masks(self) -> Any:
        return [True, False]


class MasksThatAreNoMethod(AnyEnv):
    action_masks = np.ones(2, dtype=bool)


@pytest.mark.parametrize("wraps", [True, False])
def test_what_an_environment_has_is_found_with_and_without_wrappers(vec_env: Any, wraps: bool):
    env = vec_env(WithMasks) if wraps else DummyVecEnv([WithMasks])
    with pytest.warns(UserWarning, match="has `action_masks`, which GRPO ignores"):
        model = make_model(env)
    assert model.rollout_buffer.horizon == 9


def test_masks_that_are_no_method_are_no_masks(vec_env: Any):
    env = vec_env(MasksThatAreNoMethod)
    make_model(env).learn(32)
    RecurrentGRPO("MlpLstmPolicy", env, n_steps=16, device="cpu").learn(32)


class EndsWith(AnyEnv):
    """The last observation of an episode is of no use."""

    last: Any = None
    truncates = False

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        ends = terminated or truncated
        return self.last if ends else observation, reward, ends and not self.truncates, ends and self.truncates, info


@pytest.mark.parametrize(("last", "truncates"), [(None, False), (np.zeros(0), False), (None, True)])
def test_nobody_looks_at_what_comes_after_the_end_of_an_episode(last: Any, truncates: bool):
    env = EndsWith()
    env.last, env.truncates = last, truncates
    assert make_model(env, n_steps=32).learn(64).num_timesteps == 64


def test_an_observation_at_a_time_limit_has_the_shape_of_all():
    env = EndsWith()
    env.last, env.truncates = np.zeros(1), True
    with pytest.raises(EnvironmentFault, match=r"an observation of shape \(1,\)"):
        make_model(env, n_steps=32).learn(64)


class Robots(VecEnv):
    """A simulator with a method that has the name of one that takes seeds."""

    render_mode = None

    def __init__(self, n_envs: int = 2):
        super().__init__(n_envs, spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
        self.t = np.zeros(n_envs, int)

    def _observations(self) -> np.ndarray:
        return np.random.uniform(-1, 1, (self.num_envs, 3)).astype(np.float32)

    def reset_envs(self, ids: Any, noise: Any = None) -> None:
        self.t[ids] = 0

    def reset(self) -> Any:
        self.reset_envs(np.arange(self.num_envs))
        return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        self.t += 1
        dones = self.t >= 7
        infos: list[Any] = [{"terminal_observation": np.zeros(3, np.float32)} if done else {} for done in dones]
        self.reset_envs(np.flatnonzero(dones))
        return self._observations(), np.asarray(self.actions, np.float32), dones, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        pass

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class AnswersEverything(Robots):
    def __getattr__(self, name: str) -> Any:
        return "anything"


@pytest.mark.parametrize("robots", [Robots, AnswersEverything])
def test_a_simulator_may_have_methods_of_any_name(robots: type[Robots]):
    with pytest.warns(UserWarning, match="cannot reset single environments with a seed"):
        assert make_model(robots()).learn(64).num_timesteps == 64


class Reseeds(DummyVecEnv):
    n_calls = 0

    def seed(self, seed: int | None = None) -> Any:
        self.n_calls += 1
        return super().seed(seed)


def test_a_simulator_that_nobody_seeds_is_not_seeded():
    env = Reseeds([AnyEnv])
    make_model(env, seed=None).learn(64)
    assert env.n_calls == 0


# --- policies ---------------------------------------------------------------------------------------------------------


class TakesFromKwargs(ActorPolicy):
    def __init__(self, *args: Any, **kwargs: Any):
        width = kwargs.pop("width", 4)
        super().__init__(*args, **kwargs)
        self.width = width


def test_a_policy_may_take_an_argument_out_of_its_keyword_arguments():
    assert make_model(policy=TakesFromKwargs, policy_kwargs=dict(width=7)).learn(32).policy.width == 7
    with pytest.raises(TypeError, match="unexpected keyword argument 'wide'"):
        make_model(policy=TakesFromKwargs, policy_kwargs=dict(wide=7))


class BonusGRPO(GRPO):
    policy_aliases: ClassVar[Any] = {"Mine": TakesFromKwargs, **GRPO.policy_aliases}

    def __init__(self, *args: Any, **kwargs: Any):
        self.bonus = kwargs.pop("bonus", 1.0)
        super().__init__(*args, **kwargs)


def test_a_subclass_may_take_an_argument_out_of_its_keyword_arguments(tmp_path: pathlib.Path):
    model = BonusGRPO("Mine", AnyEnv(), bonus=2.0, n_steps=16, policy_kwargs=SMALL, device="cpu").learn(16)
    model.save(tmp_path / "model")
    assert BonusGRPO.load(tmp_path / "model").bonus == 2.0
    assert BonusGRPO.load(tmp_path / "model", bonus=3.0).bonus == 3.0
    assert BonusGRPO(ActorPolicy, AnyEnv(), n_steps=16, device="cpu").learn(16).num_timesteps == 16


class Mixture(DiagGaussianDistribution):
    """It has no divergence in closed form."""

    def proba_distribution(self, mean_actions: th.Tensor, log_std: th.Tensor) -> "Mixture":
        std = log_std.exp() + 0 * mean_actions
        normal = th.distributions.Normal(th.stack([mean_actions, -mean_actions], 1), th.stack([std, std], 1))
        weights = th.distributions.Categorical(th.ones(len(mean_actions), 2))
        self.distribution: Any = th.distributions.MixtureSameFamily(weights, th.distributions.Independent(normal, 1))
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return self.distribution.log_prob(actions)

    def entropy(self) -> Any:
        return None

    def sample(self) -> th.Tensor:
        return self.distribution.sample()


class OfMixtures(ActorPolicy):
    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = Mixture(1)
        super()._build(lr_schedule)


def test_without_a_divergence_in_closed_form_updates_are_clipped():
    env = make_envs(action_space=spaces.Box(-1, 1, (1,), np.float32))
    model = GRPO(OfMixtures, env, n_steps=16, policy_kwargs=SMALL, seed=0, device="cpu")
    before = model.policy.action_net.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"No KL.*updates are clipped from now on"):
        model.learn(32)
    assert model.update_rule == "clipped"
    assert 0 < (model.policy.action_net.weight - before).abs().max() < 0.1
    assert model.learn(32).num_timesteps == 32  # without another warning


@pytest.mark.parametrize("action_space", [spaces.Discrete(2), BOX], ids=["clipped", "natural"])
def test_tensors_that_are_taken_before_learning_stay_the_weights(action_space: Any):
    env = make_envs(action_space=action_space)
    kwargs: dict[str, Any] = dict(n_steps=16, policy_kwargs=SMALL, device="cpu")
    for model in (GRPO("MlpPolicy", env, **kwargs), PPO("MlpPolicy", env, batch_size=16, **kwargs)):
        weight: Any = model.policy.action_net.weight
        in_dict = model.get_parameters()["policy"]["action_net.weight"]
        taken = [weight.detach(), in_dict, th.from_numpy(weight.detach().numpy())]
        before = weight.detach().clone()
        model.learn(64)
        assert not th.equal(weight, before)
        assert all(th.equal(each, weight) for each in taken)
        taken[0].zero_()
        assert weight.abs().sum() == 0


class GradientNorm(BaseCallback):
    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        gradients = [each.grad for each in self.model.policy.parameters() if each.grad is not None]
        self.norm = math.sqrt(sum(float(each.norm() ** 2) for each in gradients))


@pytest.mark.parametrize("action_space", [spaces.Discrete(2), BOX], ids=["clipped", "natural"])
def test_a_callback_sees_the_gradient(action_space: Any):
    callback = GradientNorm()
    model = GRPO("MlpPolicy", make_envs(action_space=action_space), n_steps=16, n_epochs=None, seed=0, device="cpu")
    model.learn(32, callback=callback)
    assert 0 < callback.norm < np.inf
    if model.update_rule == "natural":
        assert callback.norm == pytest.approx(model.update_metrics["train/grad_norm"], rel=1e-4)


class Lazy(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Space):
        super().__init__(observation_space, features_dim=6)
        self.layer = th.nn.LazyLinear(6)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.layer(observations)


def test_a_lazy_module_trains():
    policy_kwargs = dict(features_extractor_class=Lazy, ortho_init=False)
    assert make_model(policy_kwargs=policy_kwargs).learn(64).num_timesteps == 64


@pytest.mark.parametrize(
    ("net_arch", "sizes"),
    [(np.array([8, 6]), [8, 6]), ({"pi": np.array([8, 6])}, [8, 6]), ([{"pi": [8, 6]}], [8, 6]), ({}, []), ((5,), [5])],
    ids=["array", "array of pi", "dict in a list", "nothing", "tuple"],
)
def test_sizes_of_layers_come_in_any_sequence(net_arch: Any, sizes: list[int]):
    model = make_model(policy_kwargs=dict(net_arch=net_arch))
    linear = [each for each in model.policy.modules() if isinstance(each, th.nn.Linear)]
    assert [each.out_features for each in linear] == [*sizes, 3]


@pytest.mark.parametrize("log_std_init", [np.array([-1.0, -2.0]), th.tensor([-1.0, -2.0])], ids=["array", "tensor"])
def test_each_component_of_an_action_may_have_a_deviation_of_its_own(log_std_init: Any, tmp_path: pathlib.Path):
    env = make_envs(action_space=spaces.Box(-1, 1, (2,), np.float32))
    model = make_model(env, policy_kwargs=dict(log_std_init=log_std_init))
    assert model.policy.log_std.tolist() == [-1.0, -2.0]
    model.learn(32).save(tmp_path / "model")
    assert th.equal(GRPO.load(tmp_path / "model").policy.log_std, model.policy.log_std)
    log_std_init[0] = np.nan
    with pytest.raises(ValueError, match="`log_std_init` must be a finite number, not nan"):
        make_model(env, policy_kwargs=dict(log_std_init=log_std_init))


# --- optimizers -------------------------------------------------------------------------------------------------------


class TwoInOne:
    """An optimizer for matrices and one for vectors, without a state to save."""

    def __init__(self, params: Any, lr: float):
        params = list(params)
        self.parts: list[th.optim.Optimizer] = [
            th.optim.SGD([each for each in params if each.ndim > 1], lr=lr),
            th.optim.Adam([each for each in params if each.ndim <= 1], lr=lr),
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Locked(th.optim.SGD):
    """Its state cannot be copied."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["lock"] = threading.Lock()


@pytest.mark.parametrize("optimizer_class", [TwoInOne, Locked])
def test_an_optimizer_needs_no_more_than_a_step(optimizer_class: Any):
    model = make_model(policy_kwargs=dict(net_arch=[8], optimizer_class=optimizer_class))
    before = model.policy.action_net.weight.detach().clone()
    model.learn(64)
    assert not th.equal(model.policy.action_net.weight, before)


# --- buffers and files ------------------------------------------------------------------------------------------------


def test_the_buffer_knows_the_starts_of_episodes_as_that_of_ppo_does():
    class Starts(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            self.starts = np.array(self.locals["rollout_buffer"].episode_starts)

    ours, ppos = Starts(), Starts()
    make_model(make_envs(lengths=(5, 7)), n_steps=16).learn(64, callback=ours)
    PPO("MlpPolicy", make_envs(lengths=(5, 7)), n_steps=16, batch_size=16, device="cpu").learn(64, callback=ppos)
    assert ours.starts.dtype == ppos.starts.dtype
    assert ours.starts.shape == ppos.starts.T.shape
    assert set(ours.starts.ravel()) == {0.0, 1.0}


def test_a_file_that_was_written_anew_with_functions_of_sb3_is_loaded(tmp_path: pathlib.Path):
    model = make_model().learn(64)
    model.save(tmp_path / "model")
    data, params, variables = load_from_zip_file(tmp_path / "model")
    assert data is not None
    data["gamma"] = 0.9
    save_to_zip_file(tmp_path / "changed", data=data, params=params, pytorch_variables=variables)
    loaded: Any = GRPO.load(tmp_path / "changed", env=make_envs())
    assert loaded.gamma == 0.9
    assert th.equal(loaded.policy.action_net.weight, model.policy.action_net.weight)
    loaded.learn(64)
