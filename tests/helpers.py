"""Environments, callbacks and small models that several test modules use."""

import io
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import GRPO
from sb3_grpo.losses import exact_kl
from sb3_grpo.starts import Position

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
CHW = spaces.Box(0, 255, (3, 36, 36), np.uint8)
HWC = spaces.Box(0, 255, (36, 36, 3), np.uint8)
SMALL: dict[str, Any] = dict(net_arch=[8])
SMALL_CNN: dict[str, Any] = dict(net_arch=[8], features_extractor_kwargs=dict(features_dim=8))
SMALL_COMBINED: dict[str, Any] = dict(net_arch=[8], features_extractor_kwargs=dict(cnn_output_dim=8))

ACTION_SPACES = [
    pytest.param(BOX, id="Box"),
    pytest.param(spaces.Discrete(3), id="Discrete"),
    pytest.param(spaces.MultiDiscrete([2, 3]), id="MultiDiscrete"),
    pytest.param(spaces.MultiBinary(4), id="MultiBinary"),
]
OBSERVATIONS = [
    pytest.param("MlpPolicy", VECTOR, SMALL, id="vector"),
    pytest.param("MlpPolicy", spaces.Discrete(4), SMALL, id="Discrete-obs"),
    pytest.param("MlpPolicy", spaces.MultiBinary(3), SMALL, id="MultiBinary-obs"),
    pytest.param("CnnPolicy", CHW, SMALL_CNN, id="image-CHW"),
    pytest.param("CnnPolicy", HWC, SMALL_CNN, id="image-HWC"),
    pytest.param("MultiInputPolicy", spaces.Dict({"a": VECTOR, "b": spaces.Discrete(4)}), SMALL, id="Dict"),
    pytest.param("MultiInputPolicy", spaces.Dict({"a": VECTOR, "eye": HWC}), SMALL_COMBINED, id="Dict-with-image"),
]
KERNEL_AND_GROUPS = ["kernel", "return_to_go"]
ENDLESS = 10**9


class AnyEnv(gym.Env):
    """
    Random observations of any space. The reward is the mean of the action. The seed determines the start and the length.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lengths: Episodes have at least as many steps as the first number, and fewer than the second
    """

    def __init__(
        self,
        observation_space: spaces.Space = VECTOR,
        action_space: spaces.Space = spaces.Discrete(3),  # noqa: B008
        lengths: tuple[int, int] = (2, 6),
    ):
        self.observation_space = deepcopy(observation_space)  # each environment draws from its own
        self.action_space = action_space
        self.lengths = lengths

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.steps_left = int(self.np_random.integers(*self.lengths))
        self.first_observation = self.observation_space.sample()
        return self.first_observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps_left -= 1
        done = self.steps_left == 0
        by_time_limit = bool(self.np_random.integers(2))
        observation = self.observation_space.sample()
        return observation, float(np.mean(action)), done and not by_time_limit, done and by_time_limit, {}


class ContextEnv(gym.Env):
    """Four steps, each with a reward of 1 for the action that the observation names: 4/3 by chance, 4 at best."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps_left = 4
        self.context = int(self.np_random.integers(3))
        return self.context, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.context)
        self.steps_left -= 1
        self.context = int(self.np_random.integers(3))
        return self.context, reward, self.steps_left == 0, False, {}


class Starts(BaseCallback):
    """Records the first observation of each start, as the environment itself knows it, by group and member."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[tuple[int, int], tuple[float, ...]] = {}

    def _on_training_start(self) -> None:
        self._note(range(self.training_env.num_envs))

    def _on_step(self) -> bool:
        self._note(np.flatnonzero(self.locals["dones"]).tolist())
        return True

    def _note(self, begun: Any) -> None:
        groups, members, _ = self.model.ledger.position  # type: ignore[attr-defined]
        for env in begun:
            start = int(groups[env]), int(members[env])
            self.firsts[start] = flat(self.training_env.get_attr("first_observation", [env])[0])

    def groups(self, size: int) -> list[set[tuple[float, ...]]]:
        """:return: The different first observations of each group that has all its members"""
        members: dict[int, list[tuple[float, ...]]] = {}
        for (group, _), first in sorted(self.firsts.items()):
            members.setdefault(group, []).append(first)
        return [set(firsts) for firsts in members.values() if len(firsts) == size]


class Watcher(BaseCallback):
    """Records the model before each update and after the last, and every step: its actions and the positions before it."""

    def __init__(self, stop_after: int = 0) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.weights: list[dict[str, th.Tensor]] = []
        self.references: list[Any] = []
        self.kl_coefs: list[float] = []
        self.logged: list[dict[str, Any]] = []
        self.timesteps: list[int] = []
        self.actions: list[np.ndarray] = []
        self.positions: list[Position] = []

    def _on_rollout_start(self) -> None:
        self._note()

    def _on_training_end(self) -> None:
        self._note()

    def _note(self) -> None:
        self.weights.append(weights(self.model))
        self.references.append(reference_weights(self.model))
        self.kl_coefs.append(self.model.kl_coef)  # type: ignore[attr-defined]
        self.logged.append(dict(self.logger.name_to_value))

    def _on_step(self) -> bool:
        self.actions.append(np.copy(self.locals["actions"]))
        self.positions.append(self.locals["position"])
        return self.n_calls != self.stop_after

    def _on_rollout_end(self) -> None:
        self.timesteps.append(self.num_timesteps)


class Evaluates(BaseCallback):
    """Evaluates at the beginning of each rollout, at each step, or at the end of each rollout."""

    def __init__(self, event: str, env: Any) -> None:
        super().__init__()
        self.event, self.env = event, env

    def _evaluate(self, event: str) -> bool:
        if event == self.event:
            evaluate_policy(self.model, self.env, n_eval_episodes=2, warn=False)
        return True

    def _on_rollout_start(self) -> None:
        self._evaluate("start")

    def _on_step(self) -> bool:
        return self._evaluate("step")

    def _on_rollout_end(self) -> None:
        self._evaluate("end")


def flat(observation: Any) -> tuple[float, ...]:
    """:return: An observation as something hashable"""
    parts = [observation[key] for key in sorted(observation)] if isinstance(observation, dict) else [observation]
    return tuple(float(number) for part in parts for number in np.ravel(part))


def make_envs(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: AnyEnv(**kwargs)] * n_envs)


def samples(space: spaces.Space, n: int) -> Any:
    """:return: ``n`` observations, the same in each run"""
    if isinstance(space, spaces.Dict):
        return {key: samples(part, n) for key, part in space.spaces.items()}
    space.seed(0)
    return np.stack([space.sample() for _ in range(n)])


def make_model(env: Any = None, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    small: dict[str, Any] = dict(
        n_steps=16, batch_size=16, n_epochs=2, learning_rate=0.01, policy_kwargs=SMALL, seed=0, device="cpu"
    )
    return GRPO(policy, make_envs() if env is None else env, **{**small, **kwargs})


def weights_of(policy: th.nn.Module) -> dict[str, th.Tensor]:
    return {key: value.clone() for key, value in policy.state_dict().items()}


def weights(model: Any) -> dict[str, th.Tensor]:
    return weights_of(model.policy)


def reference_weights(model: Any) -> dict[str, th.Tensor] | None:
    """:return: Weights of the KL reference; ``None`` as long as there is none"""
    return None if model.kl_penalty.policy is None else weights_of(model.kl_penalty.policy)


def same(left: Any, right: Any) -> bool:
    """:return: Whether weights are equal; the statistics of observations change without an update"""
    return left.keys() == right.keys() and all(
        th.equal(left[key], right[key]) for key in left if not key.startswith("normalizer.")
    )


def assert_trained(model: Any, before: dict[str, th.Tensor]) -> None:
    after = weights(model)
    assert all(th.isfinite(value).all() for value in after.values())
    # Hidden units of a rectifier may be dead, but nothing stands above the action layer.
    assert not th.equal(before["action_net.weight"], after["action_net.weight"])
    assert not same(
        {k: v for k, v in before.items() if "action" not in k}, {k: v for k, v in after.items() if "action" not in k}
    )


def saved(model: Any) -> io.BytesIO:
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    return file


def reload(model: Any, **kwargs: Any) -> Any:
    return GRPO.load(saved(model), device="cpu", **kwargs)


OBSERVED = th.as_tensor(np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32))


def kl_between(left: dict[str, th.Tensor], right: dict[str, th.Tensor]) -> float:
    """:return: Mean of KL(left || right) over fixed observations, for models of ``make_model()``"""
    models = [make_model(), make_model()]
    with th.no_grad():
        for model, state in zip(models, (left, right), strict=True):
            model.policy.load_state_dict(state)
        distributions = [model.policy.get_distribution(OBSERVED) for model in models]
        return exact_kl(*distributions).mean().item()


def mean_return(model: Any, env: gym.Env, deterministic: bool = True, n_episodes: int = 20) -> float:
    monitored = Monitor(env)
    monitored.reset(seed=1000)
    return float(np.mean(evaluate_policy(model, monitored, n_episodes, deterministic, return_episode_rewards=True)[0]))


def learned_in_context(n_updates: int, **kwargs: Any) -> float:
    """:return: Mean return in ``ContextEnv`` after some updates"""
    settings: dict[str, Any] = dict(n_steps=32, batch_size=64, n_epochs=4, gamma=0.5, group_size=4, policy_kwargs={})
    model = make_model(DummyVecEnv([ContextEnv] * 8), **{**settings, **kwargs})
    return mean_return(model.learn(256 * n_updates), ContextEnv(), n_episodes=50)
