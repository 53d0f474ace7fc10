"""GRPO as a user meets it: through environments, wrappers, callbacks, files and arguments."""

import csv
import inspect
import io
import itertools
import pathlib
import warnings
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import PPO
from stable_baselines3.common import logger
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_grpo import GRPO, Doctor, GroupRolloutBuffer, load_actor
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.losses import exact_kl
from sb3_grpo.seeding import find_seeded_vec_env

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
    Random observations of any space; the reward is the mean of the action. Start and length of an episode come from its seed.

    :param observation_space: observation space
    :param action_space: action space
    :param lengths: an episode has at least as many steps as the first, and less than the second
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


class BrokenEnv(AnyEnv):
    """
    Returns something that is not finite once.

    :param breaks_at: step, counted over all episodes, 0 for the first reset
    :param observation: added to the observation of that step
    :param reward: added to its reward
    """

    def __init__(self, breaks_at: int, observation: float = 0.0, reward: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.breaks_at, self.added_observation, self.added_reward, self.n_calls = breaks_at, observation, reward, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return self._broken(observation) if self.breaks_at == 0 else observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.n_calls += 1
        if self.n_calls == self.breaks_at:
            observation, reward = self._broken(observation), reward + self.added_reward
        return observation, reward, terminated, truncated, info

    def _broken(self, observation: Any) -> Any:
        if isinstance(observation, dict):
            return {**observation, "a": observation["a"] + np.float32(self.added_observation)}
        return observation + np.float32(self.added_observation)


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


class RewardIsAdvantage(GroupRolloutBuffer):
    """What a user might plug in."""

    def _form_update(self, rollout, last_obs, actor_features):
        return rollout, rollout.rewards


class Starts(BaseCallback):
    """The first raw observation of each start, as the environment itself knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[int, tuple[float, ...]] = {}

    def _on_training_start(self) -> None:
        self._note(range(self.training_env.num_envs))

    def _on_step(self) -> bool:
        self._note(np.flatnonzero(self.locals["dones"]).tolist())
        return True

    def _note(self, begun: Any) -> None:
        indices = find_seeded_vec_env(self.training_env).start_indices
        for env in begun:
            self.firsts[int(indices[env])] = flat(self.training_env.get_attr("first_observation", [env])[0])

    def groups(self, size: int) -> list[set[tuple[float, ...]]]:
        """:return: the different first observations within each group that has all its members"""
        labels = sorted({start // size for start in self.firsts})
        members = [[start for start in self.firsts if start // size == label] for label in labels]
        return [{self.firsts[start] for start in group} for group in members if len(group) == size]


class Watcher(BaseCallback):
    """Weights before each update and after the last, what each update logged, timesteps and stored arrays."""

    def __init__(self, stop_after: int = 0) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.weights: list[dict[str, th.Tensor]] = []
        self.references: list[Any] = []
        self.logged: list[dict[str, Any]] = []
        self.timesteps: list[int] = []
        self.actions: list[np.ndarray] = []
        self.start_indices: list[np.ndarray] = []

    def _on_rollout_start(self) -> None:
        self._note()

    def _on_training_end(self) -> None:
        self._note()

    def _note(self) -> None:
        self.weights.append(weights(self.model))
        reference = self.model.kl_reference_policy  # type: ignore[attr-defined]
        self.references.append(None if reference is None else weights_of(reference))
        self.logged.append(dict(self.logger.name_to_value))

    def _on_step(self) -> bool:
        self.actions.append(np.copy(self.locals["actions"]))
        self.start_indices.append(self.locals["start_indices"])
        return self.n_calls != self.stop_after

    def _on_rollout_end(self) -> None:
        self.timesteps.append(self.num_timesteps)


def flat(observation: Any) -> tuple[float, ...]:
    """:return: an observation as something hashable"""
    parts = [observation[key] for key in sorted(observation)] if isinstance(observation, dict) else [observation]
    return tuple(float(number) for part in parts for number in np.ravel(part))


def make_envs(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: AnyEnv(**kwargs)] * n_envs)


def make_model(env: Any = None, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    small: dict[str, Any] = dict(
        n_steps=16, batch_size=16, n_epochs=2, learning_rate=0.01, policy_kwargs=SMALL, seed=0, device="cpu"
    )
    return GRPO(policy, make_envs() if env is None else env, **{**small, **kwargs})


def weights_of(policy: th.nn.Module) -> dict[str, th.Tensor]:
    return {key: value.clone() for key, value in policy.state_dict().items()}


def weights(model: Any) -> dict[str, th.Tensor]:
    return weights_of(model.policy)


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(th.equal(left[key], right[key]) for key in left)


def assert_trained(model: Any, before: dict[str, th.Tensor]) -> None:
    after = weights(model)
    assert all(th.isfinite(value).all() for value in after.values())
    # Hidden units of a rectifier may be dead, but nothing stands above the action layer
    assert not th.equal(before["action_net.weight"], after["action_net.weight"])
    assert not same(
        {k: v for k, v in before.items() if "action" not in k}, {k: v for k, v in after.items() if "action" not in k}
    )


def reload(model: Any, **kwargs: Any) -> Any:
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    return GRPO.load(file, device="cpu", **kwargs)


OBSERVED = th.as_tensor(np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32))


def kl_between(left: dict[str, th.Tensor], right: dict[str, th.Tensor]) -> float:
    """:return: the mean of KL(left || right) over fixed observations, for models of ``make_model()``"""
    models = [make_model(), make_model()]
    with th.no_grad():
        for model, state in zip(models, (left, right), strict=True):
            model.policy.load_state_dict(state)
        distributions = [model.policy.get_distribution(OBSERVED) for model in models]
        return exact_kl(*distributions).mean().item()


# --- Spaces, wrappers, episodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
@pytest.mark.parametrize(("policy", "observation_space", "policy_kwargs"), OBSERVATIONS)
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_every_action_space_trains_on_every_observation(
    action_space: spaces.Space, policy: str, observation_space: spaces.Space, policy_kwargs: dict[str, Any], buffer: str
):
    env = make_envs(observation_space=observation_space, action_space=action_space)
    model = make_model(env, policy, policy_kwargs=policy_kwargs, rollout_buffer_class=buffer, n_epochs=1)
    before = weights(model)
    assert_trained(model.learn(64), before)
    action, _ = model.predict(model.get_env().reset())
    assert all(action_space.contains(np.asarray(single, dtype=action_space.dtype)) for single in action)


def subproc(env_fns: Any, start_method: str) -> SubprocVecEnv:
    return SubprocVecEnv(env_fns, start_method=start_method)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda fns: DummyVecEnv(fns), id="plain"),
        pytest.param(lambda fns: VecNormalize(DummyVecEnv(fns)), id="VecNormalize"),
        pytest.param(lambda fns: VecFrameStack(DummyVecEnv(fns), 3), id="VecFrameStack"),
        pytest.param(lambda fns: VecMonitor(DummyVecEnv(fns)), id="VecMonitor"),
        pytest.param(lambda fns: VecNormalize(VecFrameStack(VecMonitor(DummyVecEnv(fns)), 2)), id="all"),
        pytest.param(lambda fns: subproc(fns, "fork"), id="SubprocVecEnv-fork"),
        pytest.param(lambda fns: VecNormalize(VecMonitor(subproc(fns, "fork"))), id="all-over-SubprocVecEnv"),
        pytest.param(lambda fns: subproc(fns, "spawn"), id="SubprocVecEnv-spawn", marks=pytest.mark.slow),
    ],
)
def test_under_every_wrapper_groups_share_their_start_and_train(wrap: Any):
    env = wrap([AnyEnv] * 2)
    model = make_model(env, group_size=3)
    before, starts = weights(model), Starts()
    model.learn(128, callback=starts)
    env.close()
    assert_trained(model, before)
    groups = starts.groups(3)
    assert len(groups) >= 8
    assert all(len(group) == 1 for group in groups)
    assert len(set().union(*groups)) == len(groups)
    assert sorted(starts.firsts) == list(range(len(starts.firsts)))


def plain_firsts(env: VecEnv, n_steps: int) -> list[tuple[float, ...]]:
    """:return: the first observation of each episode, in order, with SB3's own resets"""
    env.reset()
    firsts = [flat(first) for first in env.get_attr("first_observation")]
    for _ in range(n_steps):
        dones = env.step(np.zeros(env.num_envs, dtype=int))[2]
        firsts += [flat(first) for first in env.get_attr("first_observation", np.flatnonzero(dones).tolist())]
    return firsts


@pytest.mark.parametrize("share_starts", [pytest.param(False, id="unshared"), pytest.param(True, id="shared")])
def test_resets_are_sb3s_own_where_starts_are_not_shared_and_only_there(share_starts: bool):
    starts = Starts()
    model = make_model(share_starts=share_starts)
    before = weights(model)
    assert_trained(model.learn(64, callback=starts), before)
    plain = make_envs()
    plain.seed(0)
    firsts = [starts.firsts[start] for start in sorted(starts.firsts)]
    assert (firsts == plain_firsts(plain, 32)) != share_starts
    assert (len(set(firsts)) == len(firsts)) != share_starts


def test_eval_callback_works_with_vec_normalize_on_both_sides():
    evaluation = VecNormalize(DummyVecEnv([lambda: Monitor(AnyEnv())]), training=False, norm_reward=False)
    callback = EvalCallback(evaluation, eval_freq=16, n_eval_episodes=2, verbose=0)
    training = VecNormalize(make_envs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_model(training).learn(64, callback=callback)
    assert callback.best_mean_reward > -np.inf
    # The statistics of the last evaluation, 32 steps in, are those of the training side then
    assert evaluation.obs_rms.count > 32


def test_episodes_that_never_end_are_learned_from_by_default():
    model = make_model(make_envs(lengths=(ENDLESS, ENDLESS + 1)))
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trained(model.learn(96), before)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_episodes_of_one_step_are_learned_from(buffer: str):
    model = make_model(make_envs(lengths=(1, 2)), rollout_buffer_class=buffer)
    before = weights(model)
    assert_trained(model.learn(96), before)


@pytest.mark.parametrize("n_envs", [1, 8])
def test_an_ordinary_run_warns_of_nothing(n_envs: int, tmp_path: pathlib.Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env: Any = {1: "CartPole-v1", 8: make_vec_env("CartPole-v1", 8)}[n_envs]
        evaluation = EvalCallback(
            Monitor(gym.make("CartPole-v1")), eval_freq=512 // n_envs, n_eval_episodes=1, best_model_save_path=str(tmp_path)
        )
        checkpoint = CheckpointCallback(512 // n_envs, str(tmp_path))
        # What the defaults would warn of has nothing to do with the number of epochs
        model = GRPO("MlpPolicy", env, n_epochs=1, device="cpu").learn(1024, callback=[evaluation, checkpoint])
        model.save(tmp_path / "model")
        loaded = GRPO.load(tmp_path / "rl_model_1024_steps", device="cpu")
    assert evaluation.best_mean_reward > 0
    assert (tmp_path / "best_model.zip").exists()
    assert loaded.num_timesteps == 1024


# --- Rollouts and callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
@pytest.mark.parametrize("n_envs", [1, 3, 8])
def test_a_rollout_is_n_steps_times_n_envs_transitions(n_envs: int, buffer: str):
    watcher = Watcher()
    model = make_model(make_envs(n_envs), n_steps=7, rollout_buffer_class=buffer)
    model.learn(7 * n_envs * 3 - 1, callback=watcher)
    assert watcher.timesteps == [7 * n_envs, 14 * n_envs, 21 * n_envs]
    assert model.num_timesteps == 21 * n_envs
    assert len(watcher.actions) == 21


@pytest.mark.parametrize(("n_envs", "n_steps"), [(1, 2048), (3, 682), (8, 256)])
def test_n_steps_of_none_makes_rollouts_of_2048(n_envs: int, n_steps: int):
    model = make_model(make_envs(n_envs), n_steps=None)
    assert model.n_steps == n_steps == model.rollout_buffer.buffer_size


class Locals(BaseCallback):
    """The local variables of each step, arrays copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        copies = ("new_obs", "rewards", "dones", "actions", "clipped_actions")
        self.seen.append({k: np.copy(v) if k in copies else v for k, v in self.locals.items()})
        return True


def test_callbacks_see_the_local_names_that_ppo_gives_them():
    ours, ppos = Locals(), Locals()
    env = make_envs(action_space=BOX)
    make_model(env).learn(32, callback=ours)
    PPO("MlpPolicy", env, n_steps=16, batch_size=16, policy_kwargs=SMALL, device="cpu").learn(32, callback=ppos)
    # `values` is the critic's; `idx` and `done` are left over from a loop over the environments
    expected = set(ppos.seen[0]) - {"values", "idx", "done", "terminal_obs", "terminal_value"}
    assert {"new_obs", "rewards", "dones", "infos", "actions", "clipped_actions", "rollout_buffer", "n_steps"} <= expected
    assert {"env", "obs_tensor", "log_probs", "self", "callback", "n_rollout_steps"} <= expected
    assert all(expected <= set(seen) for seen in ours.seen)
    assert not {"values", "value_loss"} & set(ours.seen[-1])


def test_the_locals_are_those_of_the_step_that_was_just_taken():
    callback = Locals()
    model = make_model(make_envs(action_space=BOX))
    model.learn(32, callback=callback)
    seen, buffer = callback.seen, model.rollout_buffer
    assert [step["n_steps"] for step in seen] == list(range(16))
    assert all(step["rollout_buffer"] is buffer and step["env"] is model.env for step in seen)
    for step, current in enumerate(seen):
        np.testing.assert_array_equal(buffer.observations[:, step], current["obs_tensor"])
        np.testing.assert_array_equal(buffer.actions[:, step], current["actions"])
        np.testing.assert_allclose(buffer.rewards[:, step], current["rewards"])
        np.testing.assert_array_equal(buffer.dones[:, step], current["dones"])
        np.testing.assert_array_equal(buffer.log_probs[:, step], current["log_probs"])
        np.testing.assert_array_equal(current["clipped_actions"], np.clip(current["actions"], BOX.low, BOX.high))
        assert len(current["infos"]) == 2
    for current, following in itertools.pairwise(seen):
        np.testing.assert_array_equal(current["new_obs"], following["obs_tensor"])
    assert any((step["clipped_actions"] != step["actions"]).any() for step in seen)


@pytest.mark.parametrize("stop_after", [1, 5, 16, 20])
def test_a_callback_that_returns_false_stops_at_that_step(stop_after: int):
    model = make_model()
    watcher = Watcher(stop_after)
    before = weights(model)
    model.learn(320, callback=watcher)
    assert model.num_timesteps == 2 * stop_after
    assert len(watcher.actions) == stop_after
    # Only a whole rollout before the stop has made an update
    assert model._n_updates == 2 * ((stop_after - 1) // 16)
    assert same(before, weights(model)) == (stop_after <= 16)


# --- Reproducible runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_seed_reproduces_a_run_bit_for_bit_and_another_seed_does_not(buffer: str):
    def run(seed: int) -> dict[str, th.Tensor]:
        return weights(make_model(rollout_buffer_class=buffer, seed=seed).learn(128))

    first = run(3)
    assert same(first, run(3))
    assert not same(first, run(4))
    # From the first weights on, and not by other starts alone
    assert not same(weights(make_model(seed=3)), weights(make_model(seed=4)))


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_seeding_a_model_anew_begins_with_the_first_starts_of_the_new_seed(buffer: str):
    model, anew, other = make_model(rollout_buffer_class=buffer).learn(64), Starts(), Starts()
    model.set_random_seed(5)
    model.learn(64, reset_num_timesteps=False, callback=anew)
    make_model(seed=5).learn(64, callback=other)
    assert anew.firsts[0] == other.firsts[0]
    assert all(len(group) == 1 for group in anew.groups(2))


def test_without_a_seed_runs_differ_and_groups_share_their_start_all_the_same():
    runs = [Starts(), Starts()]
    for starts in runs:
        model = make_model(seed=None)
        before = weights(model)
        assert_trained(model.learn(64, callback=starts), before)
        assert all(len(group) == 1 for group in starts.groups(2))
    assert set(runs[0].firsts.values()).isdisjoint(runs[1].firsts.values())


class BreaksOff(BaseCallback):
    def _on_step(self) -> bool:
        if self.n_calls == 5:
            raise RuntimeError("broken off")
        return True


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_learning_that_broke_off_goes_on_with_fresh_groups_and_one_that_ended_with_those_in_flight(buffer: str):
    def goes_on(breaks: bool) -> bool:
        model, watcher = make_model(make_envs(lengths=(50, 60)), rollout_buffer_class=buffer, group_size=4), Watcher()
        if breaks:
            with pytest.raises(RuntimeError, match="broken off"):
                model.learn(32, callback=BreaksOff())
        else:
            model.learn(32)
        model.learn(32, callback=watcher, reset_num_timesteps=False)
        first = watcher.start_indices[0].tolist()
        assert first in ([0, 1], [4, 5])
        return first == [0, 1]

    assert goes_on(breaks=False)
    assert not goes_on(breaks=True)


# --- Files and environments that change -------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_loaded_model_predicts_the_same_and_learns_on(buffer: str):
    model = make_model(rollout_buffer_class=buffer).learn(64)
    loaded = reload(model, env=make_envs())
    assert same(weights(model), weights(loaded))
    np.testing.assert_array_equal(*(m.predict(OBSERVED.numpy(), deterministic=True)[0] for m in (model, loaded)))
    assert type(loaded.rollout_buffer) is BUFFERS[buffer]
    before = weights(loaded)
    assert_trained(loaded.learn(64, reset_num_timesteps=False), before)
    assert loaded.num_timesteps == 128


def test_a_model_predicts_without_an_environment_and_learns_once_it_gets_one():
    model = make_model().learn(64)
    loaded = reload(model)
    assert loaded.get_env() is None
    np.testing.assert_array_equal(*(m.predict(OBSERVED.numpy(), deterministic=True)[0] for m in (model, loaded)))
    loaded.set_env(make_envs())
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
@pytest.mark.parametrize("n_envs", [1, 5])
def test_a_model_learns_on_with_another_number_of_environments(n_envs: int, buffer: str):
    loaded = reload(make_model(rollout_buffer_class=buffer).learn(64), env=make_envs(n_envs))
    before, watcher = weights(loaded), Watcher()
    assert_trained(loaded.learn(3 * 16 * n_envs, callback=watcher), before)
    assert watcher.timesteps == [16 * n_envs, 32 * n_envs, 48 * n_envs]


def test_the_unit_of_time_survives_a_file_that_is_loaded_without_an_environment():
    env = DummyVecEnv([lambda: TimeLimit(AnyEnv(lengths=(2, 90)), 40)])
    model = make_model(env).learn(64)
    assert reload(model).rollout_buffer._fitted_horizon == model.rollout_buffer.horizon == 40
    assert make_model().rollout_buffer.horizon is None


@pytest.mark.parametrize("attribute", [None, float("inf"), 0], ids=["None", "inf", "0"])
def test_what_is_no_time_limit_is_not_taken_for_one(attribute: Any):
    class Unlimited(AnyEnv):
        _max_episode_steps = attribute

    model = make_model(DummyVecEnv([Unlimited]))
    assert model.rollout_buffer.horizon is None
    assert_trained(model.learn(32), weights(make_model()))


def test_the_kernel_baseline_survives_a_file():
    model = make_model().learn(64)
    loaded = reload(model, env=make_envs())
    fitted = model.rollout_buffer.baseline
    other = make_model(seed=1).learn(64).rollout_buffer.baseline
    assert th.equal(loaded.rollout_buffer.baseline.weights, fitted.weights)
    assert not th.equal(other.weights, fitted.weights)
    # Same random features and same standardisation, too
    observations, times = np.random.default_rng(1).normal(size=(5, 3)), np.linspace(0, 1, 5)
    features = fitted.features(observations, times)
    assert th.equal(loaded.rollout_buffer.baseline.features(observations, times), features)
    assert not th.equal(other.features(observations, times), features)


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "unseeded"])
def test_the_start_queue_goes_on_with_the_next_fresh_group_after_a_file(seed: int | None, buffer: str):
    model = make_model(seed=seed, group_size=3, rollout_buffer_class=buffer).learn(64)
    taken, watcher, starts = model.start_queue.next_index, Watcher(), Starts()
    assert taken > 3
    loaded = reload(model, env=make_envs())
    loaded.learn(32, callback=[watcher, starts])
    assert watcher.start_indices[0].tolist() == [3 * -(-taken // 3), 3 * -(-taken // 3) + 1]
    assert loaded.start_queue.seed == model.start_queue.seed
    assert all(len(group) == 1 for group in starts.groups(3))
    fresh = Watcher()
    make_model(seed=seed, group_size=3).learn(32, callback=fresh)
    assert fresh.start_indices[0].tolist() == [0, 1]


@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "unseeded"])
def test_a_model_can_be_loaded_with_another_group_size(seed: int | None):
    loaded = reload(make_model(seed=seed).learn(64), env=make_envs(), group_size=4)
    starts = Starts()
    loaded.learn(128, callback=starts)
    assert loaded.rollout_buffer.group_size == loaded.start_queue.group_size == 4
    groups = starts.groups(4)
    assert len(groups) >= 4
    assert all(len(group) == 1 for group in groups)


def test_a_model_can_be_loaded_with_another_buffer():
    loaded = reload(make_model().learn(64), env=make_envs(), rollout_buffer_class="outcome")
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)
    assert type(loaded.rollout_buffer) is BUFFERS["outcome"]


def test_a_model_with_a_users_buffer_can_be_loaded_and_learns_on():
    loaded = reload(make_model(rollout_buffer_class=RewardIsAdvantage).learn(64), env=make_envs())
    assert type(loaded.rollout_buffer) is RewardIsAdvantage
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)


def test_a_failed_or_finished_save_leaves_no_trace_in_the_model(tmp_path: pathlib.Path):
    model = make_model().learn(32)
    model.save(tmp_path / "model")
    assert model._rollout_buffer_state is None
    before = weights(model)
    assert_trained(model.learn(32), before)


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_large_observations_are_judged_by_what_the_actor_makes_of_them(buffer: str):
    options = dict(actor_features=True) if buffer == "kernel" else {}
    env = make_envs(observation_space=spaces.Box(-1, 1, (72, 72)))
    model = make_model(env, rollout_buffer_class=buffer, rollout_buffer_kwargs=options)
    before = weights(model)
    assert_trained(model.learn(64), before)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_learning_in_another_environment_goes_by_its_time_limit(buffer: str):
    def limited(*limits: int) -> DummyVecEnv:
        return DummyVecEnv([lambda limit=limit: TimeLimit(AnyEnv(), limit) for limit in limits])  # type: ignore[misc]

    model = make_model(limited(5000, 7000), rollout_buffer_class=buffer)
    loaded = reload(model)
    assert (model.rollout_buffer.horizon, loaded.rollout_buffer.horizon) == (7000, None)
    loaded.set_env(limited(5000, 7000))
    loaded.learn(32)
    assert loaded.rollout_buffer.horizon == 7000
    if buffer != "kernel":
        assert loaded.rollout_buffer.max_waiting == model.rollout_buffer.max_waiting == 2 * 7000 * 4
    loaded.set_env(limited(3, 4))
    loaded.learn(32)
    assert loaded.rollout_buffer.horizon == 4
    assert buffer == "kernel" or loaded.rollout_buffer.max_waiting == 20_000

    chosen = make_model(limited(5, 5), rollout_buffer_class=buffer, rollout_buffer_kwargs=dict(horizon=50))
    chosen.set_env(limited(9, 9))
    chosen.learn(32)
    assert chosen.rollout_buffer.horizon == 50


class ConstantEnv(AnyEnv):
    """A reward of 1 at each of ten steps."""

    def __init__(self) -> None:
        super().__init__(lengths=(10, 11))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, 1.0, *rest


@pytest.mark.parametrize("buffer", [buffer for buffer in BUFFERS if buffer != "kernel"])
def test_a_running_scale_of_rewards_does_not_tell_equal_members_apart(buffer: str):
    # One environment: the members of a group run one after the other
    model = make_model(VecNormalize(DummyVecEnv([ConstantEnv])), rollout_buffer_class=buffer, n_steps=60)
    for _ in range(3):
        model.learn(60, reset_num_timesteps=False)
        np.testing.assert_array_equal(model.rollout_buffer.rewards, 1.0)
        assert model.rollout_buffer.metrics["rollout/group_return_spread"] == 0.0
        assert buffer == "return_to_go" or model.rollout_buffer.metrics["rollout/groups_tied"] == 1.0


def test_the_kernel_baseline_takes_normalised_rewards():
    env = VecNormalize(DummyVecEnv([ConstantEnv]))
    model = make_model(env, n_steps=60).learn(60)
    assert model.rollout_buffer.rewards[0, -1] == pytest.approx(env.normalize_reward(1.0), rel=1e-5)
    assert model.rollout_buffer.rewards[0, -1] != 1.0


def test_set_env_continues_in_the_new_environment():
    model = make_model().learn(64)
    new = make_envs(lengths=(7, 8))
    model.set_env(new)
    before, starts = weights(model), Starts()
    assert_trained(model.learn(64, reset_num_timesteps=False, callback=starts), before)
    assert find_seeded_vec_env(model.get_env()).venv is new
    assert model.num_timesteps == 128
    assert all(len(group) == 1 for group in starts.groups(2))


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(("reset", "timesteps"), [(True, 64), (False, 128)], ids=["reset", "going on"])
def test_learning_twice_counts_on_or_anew(reset: bool, timesteps: int, buffer: str):
    model = make_model(rollout_buffer_class=buffer).learn(64)
    queue = model.start_queue
    before, taken = weights(model), queue.next_index
    watcher = Watcher()
    assert_trained(model.learn(64, reset_num_timesteps=reset, callback=watcher), before)
    assert model.num_timesteps == timesteps
    assert model.start_queue is queue
    # All begin a fresh group, or each goes on with the start it was running
    assert (watcher.start_indices[0].min() >= taken) == reset


def test_evaluation_on_the_training_environment_has_starts_of_its_own():
    model, learning = make_model(), Starts()
    model.learn(64, callback=learning)
    firsts = []

    def note(evaluating: dict[str, Any], _: dict[str, Any]) -> None:
        if evaluating["done"]:
            firsts.append(flat(evaluating["env"].get_attr("first_observation", [evaluating["i"]])[0]))

    evaluate_policy(model, model.get_env(), n_eval_episodes=20, callback=note, warn=False)
    assert len(firsts) >= 20
    assert len(set(firsts)) == len(firsts)
    assert set(firsts).isdisjoint(learning.firsts.values())
    again, before, taken = Starts(), weights(model), model.start_queue.next_index
    model.learn(64, reset_num_timesteps=False, callback=again)
    # The evaluation has left the environments elsewhere: what follows begins with starts of the queue
    assert min(again.firsts) == 2 * -(-taken // 2)
    assert_trained(model, before)
    assert model.num_timesteps == 128
    for starts in (learning, again):
        groups = starts.groups(2)
        assert len(groups) >= 8
        assert all(len(group) == 1 for group in groups)


# --- The KL penalty ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_a_large_penalty_keeps_the_policy_near_the_initial_one_and_none_lets_it_go(estimator: Any):
    def distance(kl_coef: float) -> float:
        model = make_model(
            make_envs(4),
            n_steps=64,
            batch_size=64,
            n_epochs=4,
            kl_coef=kl_coef,
            kl_reference="initial",
            kl_estimator=estimator,
        )
        before = weights(model)
        return kl_between(weights(model.learn(256 * 5)), before)

    assert distance(0.0) > 0.3
    assert 0.0 < distance(20.0) < 0.02


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_a_penalty_on_the_step_from_the_old_policy_makes_updates_smaller(estimator: Any):
    def mean_step(kl_coef: float) -> float:
        watcher = Watcher()
        model = make_model(
            make_envs(4), n_steps=64, batch_size=64, n_epochs=4, kl_coef=kl_coef, kl_reference="old", kl_estimator=estimator
        )
        model.learn(256 * 4, callback=watcher)
        return float(np.mean([kl_between(new, old) for old, new in itertools.pairwise(watcher.weights)]))

    assert mean_step(20.0) < 0.5 * mean_step(0.0)


@pytest.mark.parametrize(
    ("reference", "lifetime"),
    [("old", 1), (1, 1), (2, 2), (3, 3), ("initial", 100)],
    ids=["old", "every", "every second", "every third", "initial"],
)
def test_the_reference_is_renewed_when_it_is_due(reference: Any, lifetime: int):
    watcher = Watcher()
    make_model(kl_coef=0.1, kl_reference=reference).learn(32 * 7, callback=watcher)
    assert watcher.references[0] is None
    for update in range(1, 8):
        # The n-th update (from 1) is made from the (n-1)-th snapshot
        assert same(watcher.references[update], watcher.weights[lifetime * ((update - 1) // lifetime)])
    assert all(not same(*pair) for pair in itertools.pairwise(watcher.weights))


def test_the_penalty_draws_no_random_number():
    """A penalty too small to change a weight changes nothing: only that autograd and the closed form round differently."""
    watchers = [Watcher(), Watcher()]
    # One after the other: the random generators are global
    models = [
        make_model(kl_coef=kl_coef).learn(96, callback=watcher)
        for kl_coef, watcher in zip((0.0, 1e-30), watchers, strict=True)
    ]
    np.testing.assert_array_equal(*(watcher.actions for watcher in watchers))
    th.testing.assert_close(weights(models[0]), weights(models[1]))
    assert models[0].kl_reference_policy is None and models[1].kl_reference_policy is not None
    assert "train/kl_loss" not in watchers[0].logged[-1]
    assert watchers[1].logged[-1]["train/kl_loss"] > 0


def test_the_initial_reference_survives_a_file_and_is_not_rebuilt():
    model = make_model(kl_coef=0.1, kl_reference="initial")
    load_actor(model, make_model(seed=1))  # weights that cannot be had again from the model's seed
    initial = weights(model)
    model.learn(64)
    loaded = reload(model, env=make_envs())
    assert same(weights_of(loaded.kl_reference_policy), initial)
    assert not same(weights(loaded), initial)
    loaded.learn(64)
    assert same(weights_of(loaded.kl_reference_policy), initial)
    assert not any(parameter.requires_grad for parameter in loaded.kl_reference_policy.parameters())


def test_the_age_of_the_reference_survives_a_file():
    model = make_model(kl_coef=0.1, kl_reference=3)
    load_actor(model, make_model(seed=1))
    first = weights(model)
    loaded = reload(model.learn(64), env=make_envs())  # after two updates
    loaded.learn(32)
    assert same(weights_of(loaded.kl_reference_policy), first)
    fourth = weights(loaded)
    loaded.learn(32)
    assert same(weights_of(loaded.kl_reference_policy), fourth)


def test_a_model_saved_without_a_penalty_can_be_loaded_with_one():
    model = make_model().learn(64)
    loaded = reload(model, env=make_envs(), kl_coef=0.1)
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)
    assert same(weights_of(loaded.kl_reference_policy), before)


# --- The update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [0, 1])
def test_target_kl_stops_an_update_early_and_says_so_as_ppo_does(verbose: int, capsys: pytest.CaptureFixture[str]):
    settings: dict[str, Any] = dict(learning_rate=0.1, n_epochs=10, verbose=verbose)
    assert make_model(**settings).learn(64, log_interval=None)._n_updates == 20
    assert "Update stopped" not in capsys.readouterr().out
    stopped = make_model(**settings, target_kl=0.01).learn(64, log_interval=None)
    assert 2 <= stopped._n_updates < 10
    assert ("Update stopped in epoch 0: approximate KL 0." in capsys.readouterr().out) == bool(verbose)


def test_an_update_is_stopped_before_the_minibatch_whose_kl_is_too_large():
    """With a target below any change, each update makes the one step whose divergence is zero before it is taken."""
    model = make_model(n_epochs=5, target_kl=1e-9).learn(64)
    steps = {int(state["step"]) for state in model.policy.optimizer.state.values()}
    assert steps == {2}
    assert model._n_updates == 2


def test_schedules_follow_the_progress():
    watcher = Watcher()
    model = make_model(learning_rate=lambda progress: 0.01 * progress, clip_range=lambda progress: 0.1 + 0.1 * progress)
    model.learn(32 * 4, callback=watcher)
    logged = watcher.logged[1:]
    assert [update["train/learning_rate"] for update in logged] == pytest.approx([0.0075, 0.005, 0.0025, 0.0])
    assert [update["train/clip_range"] for update in logged] == pytest.approx([0.175, 0.15, 0.125, 0.1])
    # Without a learning rate, as in the last update, nothing moves
    moved = [not same(*pair) for pair in itertools.pairwise(watcher.weights)]
    assert moved == [True, True, True, False]


def test_the_standard_deviations_rate_follows_the_schedule_at_its_factor():
    def first_update(**policy_kwargs: Any) -> dict[str, th.Tensor]:
        model = make_model(
            make_envs(action_space=BOX), n_epochs=1, batch_size=32, learning_rate=lambda progress: 0.01 * progress,
            policy_kwargs={**SMALL, **policy_kwargs},
        )  # fmt: skip
        model.learn(128, callback=(watcher := Watcher()))
        return {name: watcher.weights[1][name] - value for name, value in watcher.weights[0].items()}

    plain, fast = first_update(), first_update(log_std_lr_factor=4.0)
    # Adam's first step is as long as the learning rate, at 3/4 of the progress
    th.testing.assert_close(plain["log_std"].abs(), th.full((2,), 0.0075), rtol=0.01, atol=0.0)
    for name, step in plain.items():
        th.testing.assert_close(fast[name], step * (4.0 if name == "log_std" else 1.0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("action_space", [pytest.param(BOX, id="Box"), pytest.param(spaces.Discrete(3), id="Discrete")])
def test_the_entropy_bonus_raises_the_entropy(action_space: spaces.Space):
    def entropy(ent_coef: float) -> float:
        model = make_model(make_envs(4, action_space=action_space), n_steps=64, batch_size=64, n_epochs=4, ent_coef=ent_coef)
        model.learn(256 * 4)
        with th.no_grad():
            return model.policy.get_distribution(OBSERVED).entropy().mean().item()

    with_bonus, without, with_penalty = entropy(1.0), entropy(0.0), entropy(-1.0)
    assert with_bonus > without + 0.1
    assert with_penalty < without - 0.1


@pytest.mark.parametrize("n_epochs", [1, 3])
def test_a_batch_larger_than_the_update_is_all_of_it(n_epochs: int):
    model = make_model(batch_size=1000, n_epochs=n_epochs).learn(32)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {n_epochs}
    assert model._n_updates == n_epochs


def sgd_step(max_grad_norm: float) -> float:
    """:return: the length of one step of gradient descent with a learning rate of 1"""
    model = make_model(
        n_epochs=1,
        batch_size=32,
        learning_rate=1.0,
        max_grad_norm=max_grad_norm,
        policy_kwargs={**SMALL, "optimizer_class": th.optim.SGD},
    )
    before = th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()
    model.learn(32)
    return (th.nn.utils.parameters_to_vector(model.policy.parameters()) - before).norm().item()


def test_an_infinite_max_grad_norm_switches_clipping_off():
    assert_trained(make_model(max_grad_norm=np.inf).learn(64), weights(make_model()))


def test_the_gradient_is_clipped_to_max_grad_norm():
    assert sgd_step(1e-3) == pytest.approx(1e-3, rel=1e-2)
    assert sgd_step(1e6) > 0.01


class BeforeTheUpdate(BaseCallback):
    """Moves the policy away from the one that sampled, and gives PPO's step with PPO's actor on the same data."""

    def __init__(self, ppo: Any, noise: float, clip_range: float, ent_coef: float):
        super().__init__()
        self.ppo, self.noise, self.clip_range, self.ent_coef = ppo, noise, clip_range, ent_coef
        self.clip_fraction = 0.0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        with th.no_grad():
            for parameter in self.model.policy.parameters():
                parameter.add_(self.noise * th.randn_like(parameter))
        load_actor(self.ppo, self.model)
        (data,) = self.model.rollout_buffer.get(batch_size=None)  # type: ignore[attr-defined]
        _, log_prob, entropy = self.ppo.policy.evaluate_actions(data.observations, data.actions)
        # stable_baselines3/ppo/ppo.py
        ratio = th.exp(log_prob - data.old_log_prob)
        policy_loss_1 = data.advantages * ratio
        policy_loss_2 = data.advantages * th.clamp(ratio, 1 - self.clip_range, 1 + self.clip_range)
        policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
        loss = policy_loss - self.ent_coef * th.mean(entropy)
        self.clip_fraction = th.mean((th.abs(ratio - 1) > self.clip_range).float()).item()
        self.ppo.policy.optimizer.zero_grad()
        loss.backward()
        self.ppo.policy.optimizer.step()


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["on-policy", "off-policy"])
def test_a_step_on_a_full_batch_is_ppos_step_on_the_same_data(noise: float, action_space: spaces.Space):
    sgd: dict[str, Any] = dict(optimizer_class=th.optim.SGD)
    env = make_envs(action_space=action_space)
    ppo = PPO(
        "MlpPolicy", env, n_steps=8, batch_size=8, learning_rate=0.1, policy_kwargs=dict(net_arch=dict(pi=[8], vf=[8]), **sgd)
    )
    model = make_model(
        env,
        n_epochs=1,
        batch_size=32,
        learning_rate=0.1,
        ent_coef=0.02,
        clip_range=0.15,
        max_grad_norm=1e6,
        policy_kwargs={**SMALL, **sgd},
    )
    load_actor(model, ppo)
    before = weights(model)
    callback = BeforeTheUpdate(ppo, noise, clip_range=0.15, ent_coef=0.02)
    model.learn(32, callback=callback)
    assert (callback.clip_fraction > 0) == (noise > 0)
    ours, expected = weights(model), make_model(env)
    load_actor(expected, ppo)
    assert not same(ours, before)
    for name, value in weights(expected).items():
        th.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


class Dividing(BaseFeaturesExtractor):
    """Not finite where the first observation is zero."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=3)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return observations / observations[:, :1]


@pytest.mark.parametrize("action_space", ACTION_SPACES[:2])
def test_a_policy_whose_output_is_not_finite_is_told_from_an_environment_that_is_broken(action_space: spaces.Space):
    env = AnyEnv(spaces.Box(0.0, 0.0, (3,), np.float32), action_space)
    model = make_model(env, policy_kwargs=dict(net_arch=[8], features_extractor_class=Dividing))
    with pytest.raises(ValueError, match=r"output of the policy is not finite after 0 timesteps: .*nan.*features extractor"):
        model.learn(64)


@pytest.mark.parametrize("target_kl", [None, 0.02])
def test_an_update_that_spoils_the_policy_is_not_taken_for_one_that_went_too_far(target_kl: float | None):
    model = make_model(learning_rate=1e38, max_grad_norm=np.inf, target_kl=target_kl, n_epochs=2)
    with pytest.raises(ValueError, match="not finite"):
        model.learn(256)


class Normalising(BaseFeaturesExtractor):
    """With running statistics, one of them an integer."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=3)
        self.norm = th.nn.BatchNorm1d(3)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.norm(observations)


def test_a_moving_reference_takes_running_statistics_as_they_are():
    extractor = dict(net_arch=[8], features_extractor_class=Normalising)
    model = make_model(kl_coef=0.1, kl_reference="polyak", policy_kwargs=extractor).learn(96)
    reference = model.kl_reference_policy
    assert 0 < reference.features_extractor.norm.num_batches_tracked < model.policy.features_extractor.norm.num_batches_tracked


class OldStyleBuffer(RewardIsAdvantage):
    """Knows nothing of whole trajectories."""

    def get(self, batch_size=None):
        yield from super().get(batch_size)


def test_a_users_buffer_need_not_know_of_whole_trajectories():
    before = weights(make_model(rollout_buffer_class=OldStyleBuffer))
    assert_trained(make_model(rollout_buffer_class=OldStyleBuffer).learn(64), before)


# --- gSDE -------------------------------------------------------------------------------------------------------------


class Noise(Locals):
    """The exploration matrix of each step as well."""

    def _on_step(self) -> bool:
        super()._on_step()
        self.seen[-1]["noise"] = flat(self.model.policy.action_dist.exploration_mat.detach())  # type: ignore[operator, union-attr]
        return True


@pytest.mark.parametrize("squash_output", [False, True], ids=["clipped", "squashed"])
@pytest.mark.parametrize(("sample_freq", "n_matrices"), [(-1, 1), (4, 4), (1, 16)])
def test_gsde_draws_its_noise_as_often_as_asked(sample_freq: int, n_matrices: int, squash_output: bool):
    callback = Noise()
    model = make_model(
        make_envs(action_space=BOX),
        use_sde=True,
        sde_sample_freq=sample_freq,
        policy_kwargs={**SMALL, "squash_output": squash_output, "log_std_init": 0.0},
    )
    before = weights(model)
    assert_trained(model.learn(32, callback=callback), before)
    noise = [step["noise"] for step in callback.seen]
    assert len(set(noise)) == n_matrices
    assert all(len(set(noise[i : i + 16 // n_matrices])) == 1 for i in range(0, 16, 16 // n_matrices))
    actions = np.concatenate([step["actions"] for step in callback.seen])
    taken = np.concatenate([step["clipped_actions"] for step in callback.seen])
    expected = {
        True: BOX.low + 0.5 * (actions + 1) * (BOX.high - BOX.low),
        False: np.clip(actions, BOX.low, BOX.high),
    }[squash_output]
    np.testing.assert_allclose(taken, expected, rtol=1e-5)
    assert (np.abs(actions) <= 1).all() == squash_output


# --- Logging ----------------------------------------------------------------------------------------------------------


#: What is logged by default and has no counterpart in PPO.
OURS_ALONE = {
    "rollout/start_mismatches",
    "rollout/groups_completed",
    "rollout/group_return_mean",
    "rollout/group_return_spread",
    "train/advantage_mean",
    "train/advantage_std",
    "train/baseline_variance_reduction",
    "train/clip_fraction_low",
    "train/clip_fraction_high",
    "train/effective_sample_size",
    "train/grad_norm",
}


def logged_keys(model: Any, folder: pathlib.Path) -> set[str]:
    model.set_logger(logger.configure(str(folder), ["csv"]))
    model.learn(64)
    model.logger.close()
    with open(folder / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    # The first row is written before the first update
    assert all(np.isfinite(float(value)) for key, value in rows[1].items())
    return set(rows[1])


@pytest.mark.parametrize("action_space", ACTION_SPACES[:2])
def test_what_is_logged_is_what_ppo_logs_without_a_value_loss(action_space: spaces.Space, tmp_path: pathlib.Path):
    ours = logged_keys(make_model(Monitor(AnyEnv(action_space=action_space)), n_steps=32), tmp_path / "grpo")
    ppo = PPO("MlpPolicy", Monitor(AnyEnv(action_space=action_space)), n_steps=32, batch_size=16, device="cpu")
    ppos = logged_keys(ppo, tmp_path / "ppo")
    assert ours - ppos == OURS_ALONE
    assert ppos - ours == {"train/value_loss"}
    losses = {"train/approx_kl", "train/clip_fraction", "train/entropy_loss", "train/policy_gradient_loss", "train/loss"}
    assert losses | {"train/n_updates", "train/clip_range", "train/learning_rate", "train/explained_variance"} <= ours
    assert ("train/std" in ours) == isinstance(action_space, spaces.Box)


def test_the_penalty_is_logged_where_there_is_one_and_mismatches_where_starts_are_shared(tmp_path: pathlib.Path):
    plain = logged_keys(make_model(n_steps=16), tmp_path / "plain")
    other = logged_keys(make_model(n_steps=16, kl_coef=0.1, share_starts=False), tmp_path / "other")
    assert other - plain == {"train/kl_loss"}
    assert plain - other == {"rollout/start_mismatches"}


def test_tensorboard_gets_the_curves(tmp_path: pathlib.Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_model(tensorboard_log=str(tmp_path)).learn(96, tb_log_name="here")
    events = EventAccumulator(str(tmp_path / "here_1"))
    events.Reload()
    assert {"train/loss", "train/approx_kl", "train/explained_variance"} <= set(events.Tags()["scalars"])
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [64, 96]


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        pytest.param(dict(group_size=1), "`group_size` must be an integer of at least 2, not 1", id="group_size-1"),
        pytest.param(dict(group_size=0), "`group_size` .* not 0", id="group_size-0"),
        pytest.param(dict(group_size=True), "`group_size` .* not True", id="group_size-True"),
        pytest.param(dict(group_size=2.5), r"`group_size` .* not 2\.5", id="group_size-2.5"),
        pytest.param(dict(group_size="4"), "`group_size` .* not '4'", id="group_size-text"),
        pytest.param(
            dict(rollout_buffer_class="critic"),
            "no rollout buffer 'critic': .*kernel, outcome, process, return_to_go, stepwise",
            id="unknown-buffer",
        ),
        pytest.param(dict(n_steps=1, env=make_envs(1)), r"n_steps \* n_envs = 1 \* 1 transitions", id="one-transition"),
        pytest.param(dict(n_steps=0), "`n_steps` must be an integer of at least 1, not 0", id="n_steps-0"),
        pytest.param(dict(n_steps=2.5), r"`n_steps` .* not 2\.5", id="n_steps-2.5"),
        pytest.param(dict(batch_size=0), "`batch_size` must be an integer of at least 1, not 0", id="batch_size-0"),
        pytest.param(dict(n_epochs=0), "`n_epochs` must be an integer of at least 1, not 0", id="n_epochs-0"),
        pytest.param(dict(policy_kwargs=dict(net_arch=dict(pi=[8], vf=[8]))), "there is no value network", id="net_arch-vf"),
        pytest.param(dict(clip_range=0), "`clip_range` must be a positive number, not 0", id="clip_range-0"),
        pytest.param(dict(clip_range=-0.1), r"`clip_range` .* not -0\.1", id="clip_range-negative"),
        pytest.param(dict(clip_range="0.2"), "`clip_range` .* not '0.2'", id="clip_range-text"),
        pytest.param(dict(max_grad_norm=0), "`max_grad_norm` must be a positive number, not 0", id="max_grad_norm-0"),
        pytest.param(dict(target_kl=-1), "`target_kl` must be a positive number, not -1", id="target_kl-negative"),
        pytest.param(dict(kl_coef=-0.5), r"`kl_coef` must be a finite number from 0 to inf, not -0\.5", id="kl_coef-negative"),
        pytest.param(dict(kl_coef=np.nan), "`kl_coef` .* not nan", id="kl_coef-NaN"),
        pytest.param(dict(kl_estimator="k4"), "`kl_estimator` must be 'exact', 'k1', 'k2' or 'k3', not 'k4'", id="estimator"),
        pytest.param(
            dict(kl_reference="new"), "`kl_reference` must be 'old', 'initial', 'polyak' or .* not 'new'", id="reference"
        ),
        pytest.param(dict(kl_reference=0), "`kl_reference` .* not 0", id="reference-0"),
        pytest.param(dict(kl_reference=1.5), r"`kl_reference` .* not 1\.5", id="reference-1.5"),
        pytest.param(dict(gamma=1.01), r"`gamma` must be a finite number from 0 to 1, not 1\.01", id="gamma"),
        pytest.param(dict(gamma="0.9"), "`gamma` .* not '0.9'", id="gamma-text"),
        pytest.param(dict(gae_lambda=-0.1), r"`gae_lambda` must be a finite number from 0 to 1, not -0\.1", id="gae_lambda"),
        pytest.param(dict(ent_coef=np.nan), "`ent_coef` must be a finite number, not nan", id="ent_coef-NaN"),
        pytest.param(dict(ent_coef=None), "`ent_coef` .* not None", id="ent_coef-None"),
        pytest.param(
            dict(rollout_buffer_kwargs=dict(group_size=3)), "group_size=3: pass `group_size` to GRPO", id="two-sizes"
        ),
        pytest.param(
            dict(rollout_buffer_kwargs=dict(tied_groups="skip", ridge=0.1)),
            r"KernelRolloutBuffer does not take \['tied_groups'\] .*takes \['actor_features', .*'ridge'.*Another `rollout",
            id="option-of-another-buffer",
        ),
        pytest.param(
            dict(rollout_buffer_class="outcome", rollout_buffer_kwargs=dict(leave_one=True, leave_one_out=True, scale="none")),
            r"OutcomeRolloutBuffer does not take \['leave_one'\] .*'leave_one_out', 'max_waiting'.*'scale'",
            id="option-of-no-buffer",
        ),
        pytest.param(
            dict(rollout_buffer_kwargs=dict(gamma=0.9)), r"does not take \['gamma'\]", id="argument-that-grpo-passes"
        ),
        pytest.param(dict(rollout_buffer_kwargs=dict(horizon=0)), "`horizon` must be .* at least 1, not 0", id="horizon-0"),
    ],
)
def test_an_argument_out_of_range_is_refused_and_quoted(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_model(**kwargs)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        pytest.param(VECTOR, spaces.Tuple([BOX]), r"action spaces, not Tuple\(", id="Tuple-action"),
        pytest.param(VECTOR, spaces.Dict({"a": BOX}), r"action spaces, not Dict\(", id="Dict-action"),
        pytest.param(VECTOR, spaces.Box(-np.inf, 1, (2,)), r"Box\(-inf, 1\.0, .* no finite bounds", id="unbounded-action"),
        pytest.param(spaces.Tuple([VECTOR]), BOX, r"observations, and Dicts of these, not Tuple\(", id="Tuple"),
        pytest.param(spaces.Text(3), BOX, r"Dicts of these, not Text\(", id="Text"),
        pytest.param(spaces.Dict({"a": spaces.Text(3)}), BOX, r"not Text\(.* under 'a'", id="Text-in-Dict"),
        pytest.param(spaces.Box(0, 1, (0,)), BOX, r"Box\(.*\(0,\).* is empty", id="empty"),
        pytest.param(spaces.Dict({"a": VECTOR, "b": spaces.Box(0, 1, (0,))}), BOX, "under 'b' is empty", id="empty-in-Dict"),
        pytest.param(
            VECTOR, spaces.Discrete(2, start=1), r"action space Discrete\(2, start=1\) counts from", id="start-action"
        ),
        pytest.param(
            VECTOR, spaces.MultiDiscrete([2, 2], start=[0, 1]), r"MultiDiscrete.* counts from array\(\[0, 1\]\)", id="starts"
        ),
        pytest.param(spaces.Discrete(3, start=-1), BOX, r"observation space Discrete.* counts from .*-1", id="start"),
        pytest.param(
            spaces.Dict({"a": spaces.Discrete(3, start=1)}),
            BOX,
            "observation space under 'a' .* counts from",
            id="start-in-Dict",
        ),
        pytest.param(
            spaces.Box(-1, 1, (72, 72), np.float32),
            BOX,
            "fitted to the 5184 numbers .* at most.*actor_features=True",
            id="large",
        ),
        pytest.param(spaces.Box(0, 255, (3, 48, 48), np.uint8), BOX, "fitted to the 6912 numbers", id="image-without-CNN"),
    ],
)
def test_a_space_without_a_policy_is_refused_and_quoted(
    observation_space: spaces.Space, action_space: spaces.Space, message: str
):
    policy = {True: "MultiInputPolicy", False: "MlpPolicy"}[isinstance(observation_space, spaces.Dict)]
    with pytest.raises(ValueError, match=message):
        make_model(AnyEnv(observation_space, action_space), policy)


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        pytest.param(dict(observation=np.nan), "Environment 1 returned a non-finite observation after 40 timesteps", id="NaN"),
        pytest.param(dict(observation=-np.inf), r"Environment 1 .*\[-inf -inf -inf\]", id="infinite observation"),
        pytest.param(dict(reward=np.inf), "Environment 1 returned a non-finite reward after 40 timesteps: inf", id="reward"),
        pytest.param(
            dict(reward=np.nan), "Environment 1 returned a non-finite reward after 40 timesteps: nan", id="NaN reward"
        ),
    ],
)
def test_what_is_not_finite_is_refused_and_the_model_goes_on_elsewhere(breaks: dict[str, float], message: str, buffer: str):
    env = DummyVecEnv([AnyEnv, lambda: BrokenEnv(breaks_at=21, **breaks)])
    model, watcher = make_model(env, rollout_buffer_class=buffer), Watcher()
    with pytest.raises(ValueError, match=message):
        model.learn(64, callback=watcher)
    assert len(watcher.weights) == 2 and same(watcher.weights[-1], weights(model))  # one update, before it broke
    loaded = reload(model, env=make_envs())
    assert same(weights(model), weights(loaded))
    model.set_env(make_envs())
    for goes_on in (model, loaded):
        before = weights(goes_on)
        assert_trained(goes_on.learn(64, reset_num_timesteps=False), before)


def test_a_first_observation_that_is_not_finite_is_refused():
    model = make_model(DummyVecEnv([AnyEnv, lambda: BrokenEnv(0, observation=np.nan)]), share_starts=False)
    with pytest.raises(ValueError, match="Environment 1 returned a non-finite observation after 0 timesteps"):
        model.learn(32)
    model.set_env(make_envs())
    before = weights(model)
    assert_trained(model.learn(64), before)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_final_observation_that_is_not_finite_is_refused(buffer: str):
    """It is the automatic reset's observation that a step returns: only the infos show the one that a time limit cut off."""
    env = DummyVecEnv([AnyEnv, lambda: TimeLimit(BrokenEnv(5, observation=np.nan, lengths=(ENDLESS, ENDLESS + 1)), 5)])
    model = make_model(env, rollout_buffer_class=buffer)
    before = weights(model)
    with pytest.raises(ValueError, match="Environment 1 returned a non-finite final observation after 8 timesteps"):
        model.learn(64)
    assert same(before, weights(model))


def test_a_part_of_a_dict_that_is_not_finite_is_refused_by_its_key():
    space = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(4)})
    env = DummyVecEnv([lambda: BrokenEnv(5, observation=np.nan, observation_space=space, lengths=(9, 10))])
    with pytest.raises(ValueError, match="Environment 0 returned a non-finite observation under 'a' after 4 timesteps"):
        make_model(env, "MultiInputPolicy").learn(32)


# --- No value head ----------------------------------------------------------------------------------------------------


def test_nothing_in_the_model_is_named_after_a_value_nor_taken_as_an_argument():
    model = make_model().learn(32)
    names = [
        *vars(model),
        *vars(model.policy),
        *(name for name, _ in model.policy.named_parameters()),
        *vars(model.rollout_buffer),
    ]
    assert not [name for name in names if "value" in name or "vf" in name or "critic" in name]
    arguments = set(inspect.signature(GRPO).parameters)
    assert set(inspect.signature(PPO).parameters) - arguments == {"vf_coef", "clip_range_vf"}


# --- Learning ---------------------------------------------------------------------------------------------------------


def mean_return(model: Any, env: gym.Env, deterministic: bool = True, n_episodes: int = 20) -> float:
    monitored = Monitor(env)
    monitored.reset(seed=1000)
    return float(np.mean(evaluate_policy(model, monitored, n_episodes, deterministic, return_episode_rewards=True)[0]))


@pytest.mark.slow
def test_cartpole_is_solved_by_default_settings_and_not_without_training():
    model = GRPO("MlpPolicy", make_vec_env("CartPole-v1", 8), seed=0, device="cpu")
    cartpole = gym.make("CartPole-v1")
    assert mean_return(model, cartpole) < 100
    assert mean_return(model, cartpole, deterministic=False) < 100  # as good as random
    doctor = Doctor()
    assert mean_return(model.learn(50_000, callback=doctor), cartpole) >= 475
    assert doctor.reported == []


def learned_in_context(buffer: str, n_steps: int) -> float:
    env = DummyVecEnv([ContextEnv] * 8)
    settings: dict[str, Any] = dict(n_steps=32, batch_size=64, n_epochs=4, learning_rate=3e-3, gamma=0.5, group_size=4)
    model = make_model(env, rollout_buffer_class=buffer, policy_kwargs={}, **settings)
    doctor = Doctor()
    score = mean_return(model.learn(n_steps, callback=doctor), ContextEnv(), n_episodes=100)
    assert doctor.reported == []
    return score


@pytest.mark.slow
@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_buffer_learns_where_actions_have_different_rewards(buffer: str):
    assert learned_in_context(buffer, 0) < 2.2
    assert learned_in_context(buffer, 256 * 60) > 3.8


@pytest.mark.slow
@pytest.mark.parametrize(("buffer", "learns"), [("process", False), ("return_to_go", True)])
def test_from_a_constant_reward_normalised_rewards_teach_nothing_where_returns_do(buffer: str, learns: bool):
    model = make_model(
        make_vec_env("CartPole-v1", 8),
        rollout_buffer_class=buffer,
        n_steps=128,
        batch_size=64,
        n_epochs=10,
        learning_rate=1e-3,
    )
    before, doctor = weights(model), Doctor()
    model.learn(1024 * 15, callback=doctor)
    assert same(before, weights(model)) != learns
    assert doctor.reported == ([] if learns else ["tied groups"])
    score = mean_return(model, gym.make("CartPole-v1"), deterministic=False)
    assert (score > 100) == learns
    assert (score < 60) != learns
