"""The rollout buffers, watched through a callback while GRPO learns in small environments."""

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_grpo import GRPO, losses
from sb3_grpo import advantages as A
from sb3_grpo.buffers import (
    BUFFERS,
    CompleteGroupRolloutBuffer,
    GroupRolloutBuffer,
    GroupRolloutBufferSamples,
    KernelRolloutBuffer,
    OutcomeRolloutBuffer,
    ProcessRolloutBuffer,
    ReturnToGoRolloutBuffer,
    StepwiseRolloutBuffer,
    resolve_buffer_class,
    take_observations,
)

GAMMA = 0.9
COMPLETE_GROUP_BUFFERS = ["outcome", "process", "return_to_go", "stepwise"]
RATIOS = [
    pytest.param(1, 2, id="1 environment, groups of 2"),
    pytest.param(3, 2, id="3 environments, groups of 2"),
    pytest.param(8, 4, id="8 environments, groups of 4"),
]
#: Episodes of ``mixed`` have 1 to 11 steps.
ROLLOUT_LENGTHS = [pytest.param(4, id="rollouts shorter than episodes"), pytest.param(25, id="rollouts longer than episodes")]
DISCRETE = spaces.Discrete(2)

#: Environment, episode and step: what the observations of :class:`IdEnv` say.
Id = tuple[int, ...]
EpisodeLength = Callable[[int, int], int]


def mixed(env: int, episode: int) -> int:
    return 1 + (7 * env + 5 * episode + 2) % 11


def endless(env: int, episode: int) -> int:
    return 10**9


class IdEnv(gym.Env):
    """
    Each observation occurs once: it says in which environment, episode and step it was made.

    :param index: of the environment
    :param length: steps of an episode, a function of environment and episode
    :param reward: a function of the observation; by default irregular
    :param action_space: action space
    """

    def __init__(
        self,
        index: int,
        length: EpisodeLength = mixed,
        reward: Callable[[Id], float] = lambda id: float(np.sin(3 * id[0] + 5 * id[1] + 7 * id[2])),
        action_space: spaces.Space = DISCRETE,
    ):
        # Double precision shows whether observations are stored as they come
        self.observation_space = spaces.Box(0.0, 1e9, (3,), np.float64)
        self.action_space = action_space
        self.index, self.length, self.reward = index, length, reward
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self.reward(tuple(self._observe().astype(int)))
        self.step_count += 1
        return self._observe(), reward, self.step_count == self.length(self.index, self.episode), False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.index, self.episode, self.step_count], dtype=np.float64)


class SpaceEnv(gym.Env):
    """
    Random observations of any space, rewards that depend on the action and on chance, terminations by chance.

    :param observation_space: observation space
    :param termination: probability that a step terminates the episode
    """

    def __init__(self, observation_space: spaces.Space, termination: float = 0.15):
        self.observation_space = deepcopy(observation_space)  # each environment draws from its own
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.termination = termination

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action.sum() + self.np_random.normal())
        return self.observation_space.sample(), reward, bool(self.np_random.random() < self.termination), False, {}


class Seen(NamedTuple):
    """One transition, as a callback saw it being collected."""

    rollout: int
    start: int
    reward: float
    done: bool
    log_prob: float
    action: np.ndarray
    clipped_action: np.ndarray


class Sample(NamedTuple):
    """One transition of an update."""

    log_prob: float
    advantage: float
    action: np.ndarray


class Recorder(BaseCallback):
    """
    Sees every transition of :class:`IdEnv` that is collected, and each update that is about to be made.

    :param stop_after: step at which training is stopped, once; 0 for never
    """

    def __init__(self, stop_after: int = 0):
        super().__init__()
        self.stop_after = stop_after
        self.rollout = 0
        self.seen: dict[Id, Seen] = {}
        self.updates: list[dict[Id, Sample]] = []
        self.metrics: list[dict[str, float]] = []
        self.weights: list[th.Tensor] = []
        self.n_updates: list[int] = []
        self.log_prob_changes: list[float] = []

    def _on_rollout_start(self) -> None:
        self.weights.append(th.nn.utils.parameters_to_vector(self.model.policy.parameters()).detach().clone())
        self.n_updates.append(grpo(self.model)._n_updates)

    def _on_step(self) -> bool:
        for env, obs in enumerate(observations_of(self.model)):
            key = id_of(obs)
            assert key not in self.seen
            self.seen[key] = Seen(
                self.rollout,
                int(self.locals["start_indices"][env]),
                float(self.locals["rewards"][env]),
                bool(self.locals["dones"][env]),
                float(self.locals["log_probs"][env]),
                np.copy(self.locals["actions"][env]),
                np.copy(self.locals["clipped_actions"][env]),
            )
        return self.n_calls != self.stop_after

    def _on_rollout_end(self) -> None:
        update = whole_update(self.model)
        ids = [id_of(obs) for obs in update.observations]
        columns = (update.old_log_prob.numpy(), update.advantages.numpy(), update.actions.numpy())
        samples = [
            Sample(float(log_prob), float(advantage), action) for log_prob, advantage, action in zip(*columns, strict=True)
        ]
        assert len(set(ids)) == len(ids) == buffer_of(self.model).n_samples
        self.updates.append(dict(zip(ids, samples, strict=True)))
        self.metrics.append(dict(buffer_of(self.model).metrics))
        self._note_log_prob_changes(ids, update)
        self.rollout += 1

    def _note_log_prob_changes(self, ids: list[Id], update: GroupRolloutBufferSamples) -> None:
        old = [i for i, id in enumerate(ids) if self.seen[id].rollout < self.rollout]
        if old:
            with th.no_grad():
                now, _ = grpo(self.model).policy.evaluate_actions(update.observations[old], update.actions[old])  # type: ignore[index]
            self.log_prob_changes += (now - update.old_log_prob[old]).tolist()

    @property
    def trained_on(self) -> Counter[Id]:
        return Counter(id for update in self.updates for id in update)


def grpo(model: Any) -> GRPO:
    assert isinstance(model, GRPO)
    return model


def buffer_of(model: Any) -> GroupRolloutBuffer:
    return grpo(model).rollout_buffer


def observations_of(model: Any) -> Any:
    """:return: the observations in which the environments are about to act"""
    return grpo(model)._last_obs


def id_of(observation: Any) -> Id:
    return tuple(int(part) for part in observation)


def whole_update(model: Any) -> GroupRolloutBufferSamples:
    """:return: all transitions of the last rollout's update, with no effect on the random numbers of the training"""
    state = np.random.get_state()
    (update,) = buffer_of(model).get(batch_size=None)
    np.random.set_state(state)
    return update


def make_model(env: Any, buffer: Any = "kernel", policy: str = "MlpPolicy", **kwargs: Any) -> GRPO:
    small: dict[str, Any] = dict(
        n_steps=8, n_epochs=1, gamma=GAMMA, learning_rate=0.05, policy_kwargs=dict(net_arch=[8]), seed=0, device="cpu"
    )
    return GRPO(policy, env, rollout_buffer_class=buffer, **{**small, **kwargs})


def make_id_model(buffer: Any, n_envs: int, env: dict[str, Any] | None = None, **kwargs: Any) -> GRPO:
    """:return: a model for :class:`IdEnv`, which has no two equal starts"""
    envs = DummyVecEnv([lambda index=index: IdEnv(index, **(env or {})) for index in range(n_envs)])  # type: ignore[misc]
    return make_model(envs, buffer, share_starts=False, **kwargs)


def record(
    buffer: Any, n_envs: int = 3, group_size: int = 2, n_steps: int = 8, n_rollouts: int = 15, **kwargs: Any
) -> Recorder:
    recorder = Recorder()
    model = make_id_model(buffer, n_envs, group_size=group_size, n_steps=n_steps, **kwargs)
    model.learn(n_rollouts * n_steps * n_envs, callback=recorder)
    assert len(recorder.updates) == n_rollouts
    return recorder


def by_start(recorder: Recorder, ids: Any) -> dict[int, list[Id]]:
    """:return: the transitions of each start, in order"""
    trajectories: dict[int, list[Id]] = {}
    for id in sorted(ids):
        trajectories.setdefault(recorder.seen[id].start, []).append(id)
    return trajectories


def assert_whole_groups(recorder: Recorder, group_size: int) -> None:
    """Each update consists of groups that have all their members, each from its first step to its end."""
    for update in recorder.updates:
        trajectories = by_start(recorder, update)
        for ids in trajectories.values():
            assert [id[2] for id in ids] == list(range(len(ids)))
            assert [recorder.seen[id].done for id in ids] == [False] * (len(ids) - 1) + [True]
        members = Counter(start // group_size for start in trajectories)
        assert set(members.values()) <= {group_size}


def accounted_for(recorder: Recorder) -> float:
    """:return: the number of transitions that were trained on, that wait, or that were dropped"""
    last = recorder.metrics[-1]
    return len(recorder.trained_on) + last["rollout/transitions_waiting"] + last["rollout/transitions_dropped"]


# --- complete groups: what enters an update ---------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize(("n_envs", "group_size"), RATIOS)
@pytest.mark.parametrize("n_steps", ROLLOUT_LENGTHS)
def test_each_transition_is_trained_on_once_or_waits(buffer: str, n_envs: int, group_size: int, n_steps: int):
    recorder = record(buffer, n_envs, group_size, n_steps)
    assert len(recorder.seen) == 15 * n_steps * n_envs
    assert set(recorder.trained_on.values()) == {1}
    assert accounted_for(recorder) == len(recorder.seen)
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == 0
    # Most have been trained on: what waits belongs to the groups of the last episodes
    assert len(recorder.trained_on) > 0.5 * len(recorder.seen)


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize(("n_envs", "group_size"), RATIOS)
@pytest.mark.parametrize("n_steps", ROLLOUT_LENGTHS)
def test_an_update_is_all_the_groups_that_ended_in_its_rollout(buffer: str, n_envs: int, group_size: int, n_steps: int):
    recorder = record(buffer, n_envs, group_size, n_steps)
    assert_whole_groups(recorder, group_size)
    rollouts_of_ends: dict[int, list[int]] = {}
    for transition in recorder.seen.values():
        if transition.done:
            rollouts_of_ends.setdefault(transition.start // group_size, []).append(transition.rollout)
    for rollout, update in enumerate(recorder.updates):
        due = {group for group, ends in rollouts_of_ends.items() if len(ends) == group_size and max(ends) == rollout}
        assert {start // group_size for start in by_start(recorder, update)} == due
        assert recorder.metrics[rollout]["rollout/groups_completed"] == len(due)


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_waiting_transitions_keep_the_log_probabilities_they_were_sampled_with(buffer: str):
    recorder = record(buffer, n_steps=4, learning_rate=0.3)
    for update in recorder.updates:
        for id, sample in update.items():
            assert sample.log_prob == recorder.seen[id].log_prob
    # The policy has changed since: under it they are other ones
    assert len(recorder.log_prob_changes) > 20
    assert np.max(np.abs(recorder.log_prob_changes)) > 1e-3


def outcome_leave_one_out(rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return A.outcome_advantages(rewards, lengths, groups, "group", leave_one_out=True)


@pytest.mark.parametrize(
    ("buffer", "buffer_kwargs", "formula"),
    [
        pytest.param("outcome", {}, A.outcome_advantages, id="outcome"),
        pytest.param("outcome", dict(leave_one_out=True), outcome_leave_one_out, id="outcome, leave one out"),
        pytest.param(
            "outcome", dict(scale="none"), lambda r, n, g: A.outcome_advantages(r, n, g, "none"), id="outcome, unscaled"
        ),
        pytest.param("process", {}, A.process_advantages, id="process"),
        pytest.param(
            "process", dict(scale="batch"), lambda r, n, g: A.process_advantages(r, n, g, "batch"), id="process, by batch"
        ),
        pytest.param("return_to_go", {}, lambda r, n, g: A.return_to_go_advantages(r, n, g, GAMMA), id="return_to_go"),
        pytest.param(
            "return_to_go",
            dict(scale="none"),
            lambda r, n, g: A.return_to_go_advantages(r, n, g, GAMMA, "none"),
            id="return_to_go, unscaled",
        ),
        pytest.param("stepwise", {}, lambda r, n, g: A.stepwise_advantages(r, n, g, GAMMA), id="stepwise"),
        pytest.param(
            "stepwise",
            dict(scale="group"),
            lambda r, n, g: A.stepwise_advantages(r, n, g, GAMMA, "group"),
            id="stepwise, group",
        ),
    ],
)
@pytest.mark.parametrize(("n_envs", "group_size"), RATIOS)
def test_each_transition_gets_the_advantage_of_the_formula_unwhitened(
    buffer: str, buffer_kwargs: dict[str, Any], formula: Callable[..., np.ndarray], n_envs: int, group_size: int
):
    recorder = record(buffer, n_envs, group_size, rollout_buffer_kwargs=buffer_kwargs, normalize_advantage=True)
    assert any(recorder.updates)
    for update in filter(None, recorder.updates):
        trajectories = by_start(recorder, update)
        starts = sorted(trajectories)
        ids = [id for start in starts for id in trajectories[start]]
        rewards = np.array([recorder.seen[id].reward for id in ids])
        lengths = np.array([len(trajectories[start]) for start in starts])
        groups = np.arange(len(starts)) // group_size
        expected = formula(rewards, lengths, groups)
        np.testing.assert_allclose([update[id].advantage for id in ids], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_a_rollout_in_which_no_group_ended_makes_no_update(buffer: str):
    # Episodes of 10 steps, two of which make a group: the first ends in the third rollout of 7
    recorder = record(buffer, n_envs=1, n_steps=7, n_rollouts=7, env=dict(length=lambda env, episode: 10))
    assert [len(update) for update in recorder.updates] == [0, 0, 20, 0, 0, 20, 0]
    assert recorder.n_updates == [0, 0, 0, 1, 1, 1, 2]
    changed = [not th.equal(before, after) for before, after in zip(recorder.weights, recorder.weights[1:], strict=False)]
    assert changed == [False, False, True, False, False, True]
    assert [metrics["rollout/groups_completed"] for metrics in recorder.metrics] == [0, 0, 1, 0, 0, 1, 0]
    assert [metrics["rollout/transitions_waiting"] for metrics in recorder.metrics] == [7, 14, 1, 8, 15, 2, 9]
    assert [metrics["rollout/transitions_waiting_age"] for metrics in recorder.metrics] == [0, 1, 0, 1, 2, 0, 1]


# --- complete groups: what never ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_endless_episodes_are_warned_of_once_and_wait_within_bounds(buffer: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = record(buffer, env=dict(length=endless), rollout_buffer_kwargs=dict(max_waiting=100))
    (message,) = [str(warning.message) for warning in caught if "transitions wait" in str(warning.message)]
    assert "max_episode_steps" in message
    assert "rollout_buffer_class='kernel'" in message
    waiting = [metrics["rollout/transitions_waiting"] for metrics in recorder.metrics]
    assert waiting[:4] == [24, 48, 72, 96]
    assert max(waiting) <= 100
    assert not any(recorder.updates)
    assert accounted_for(recorder) == len(recorder.seen)


def test_endless_episodes_are_learned_from_without_a_warning_by_the_kernel_buffer():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = record("kernel", env=dict(length=endless))
    assert all(len(update) == 24 for update in recorder.updates)
    assert set(recorder.trained_on.values()) == {1}
    assert recorder.n_updates == list(range(15))


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_the_late_members_of_a_dropped_group_never_enter_an_update(buffer: str):
    # Every group that environment 0 has a part in waits for its long episode, and is dropped meanwhile
    length = {0: 90, 1: 3, 2: 4}
    with pytest.warns(UserWarning, match="transitions wait for their groups of 4 trajectories"):
        recorder = record(
            buffer,
            group_size=4,
            n_rollouts=40,
            env=dict(length=lambda env, episode: length[env]),
            rollout_buffer_kwargs=dict(max_waiting=40),
        )
    late = [id for id, transition in recorder.seen.items() if id[0] == 0 and transition.done]
    assert len(late) == 3
    assert not any(id[0] == 0 for id in recorder.trained_on)
    assert len(recorder.trained_on) > 100
    assert_whole_groups(recorder, 4)
    assert max(metrics["rollout/transitions_waiting"] for metrics in recorder.metrics) <= 40
    assert accounted_for(recorder) == len(recorder.seen)


@pytest.mark.parametrize(
    ("n_steps", "n_envs", "group_size", "horizon", "bound"),
    [
        pytest.param(8, 1, 2, None, 20_000, id="at least 20,000"),
        pytest.param(2048, 1, 2, None, 16 * 2048, id="16 rollouts"),
        pytest.param(8, 8, 4, 5_000, 2 * 5_000 * (8 + 4), id="two episodes of each environment and member"),
    ],
)
def test_by_default_as_many_may_wait_as_ordinary_episodes_need(
    n_steps: int, n_envs: int, group_size: int, horizon: int | None, bound: int
):
    space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    buffer = OutcomeRolloutBuffer(n_steps, space, DISCRETE, n_envs=n_envs, group_size=group_size, horizon=horizon)
    assert buffer.max_waiting == bound


# --- complete groups: stopping and starting ---------------------------------------------------------------------------

STOPS = [
    pytest.param(43, id="in the middle of a rollout"),
    pytest.param(48, id="at the last step of a rollout"),
    pytest.param(41, id="after the first step of a rollout"),
]


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize("stop_after", STOPS)
def test_a_run_that_was_stopped_goes_on_without_losing_a_transition(buffer: str, stop_after: int):
    recorder = Recorder(stop_after)
    model = make_id_model(buffer, n_envs=3)
    model.learn(1000, callback=recorder)
    assert model.num_timesteps == len(recorder.seen) == 3 * stop_after
    model.learn(500, callback=recorder, reset_num_timesteps=False)
    assert set(recorder.trained_on.values()) == {1}
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == 0
    assert accounted_for(recorder) == len(recorder.seen)
    assert_whole_groups(recorder, 2)
    stopped_at = {id for id, transition in recorder.seen.items() if transition.rollout == (stop_after - 1) // 8}
    assert len(stopped_at & set(recorder.trained_on)) > 0


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize("stop_after", [*STOPS, pytest.param(0, id="never, after a whole rollout")])
def test_a_run_that_starts_afresh_drops_and_counts_what_waits(buffer: str, stop_after: int):
    recorder = Recorder(stop_after)
    model = make_id_model(buffer, n_envs=3)
    model.learn(6 * 24, callback=recorder)
    assert model.num_timesteps == 3 * (stop_after or 48)
    abandoned = set(recorder.seen) - set(recorder.trained_on)
    assert abandoned
    model.learn(10 * 24, callback=recorder, reset_num_timesteps=True)
    assert not abandoned & set(recorder.trained_on)
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == len(abandoned)
    assert accounted_for(recorder) == len(recorder.seen)
    assert_whole_groups(recorder, 2)


# --- the kernel baseline, from scratch --------------------------------------------------------------------------------


class Segment(NamedTuple):
    """The part of a trajectory that lies in one rollout."""

    first_step: int
    inputs: list[np.ndarray]
    rewards: list[float]
    log_probs: list[float]
    end: str  # "terminated", "truncated" or "unfinished"
    final_input: np.ndarray


class KernelRollout(NamedTuple):
    """What a rollout gave to the kernel buffer, and what it made of it."""

    segments: list[Segment]
    state: dict[str, Any]
    update: GroupRolloutBufferSamples


class KernelRecorder(BaseCallback):
    """
    Collects the trajectories by environment, one after the other.

    :param encode: an observation as the input of the baseline
    """

    def __init__(self, encode: Callable[[GRPO, Any], np.ndarray]):
        super().__init__()
        self.encode = encode
        self.rollouts: list[KernelRollout] = []
        self.elapsed: Counter[int] = Counter()

    def _on_rollout_start(self) -> None:
        self.finished: list[list[Segment]] = [[] for _ in range(self.training_env.num_envs)]
        self.running: list[Segment | None] = [None] * self.training_env.num_envs

    def _encoded(self, observations: Any, env: int) -> np.ndarray:
        return self.encode(grpo(self.model), take_observations(observations, env))

    def _on_step(self) -> bool:
        for env, info in enumerate(self.locals["infos"]):
            segment = self.running[env] or Segment(self.elapsed[env], [], [], [], "", np.empty(0))
            segment.inputs.append(self._encoded(observations_of(self.model), env))
            segment.rewards.append(float(self.locals["rewards"][env]))
            segment.log_probs.append(float(self.locals["log_probs"][env]))
            self.elapsed[env] += 1
            self.running[env] = segment
            if self.locals["dones"][env]:
                end = "truncated" if info["TimeLimit.truncated"] else "terminated"
                final = self.encode(grpo(self.model), info["terminal_observation"])
                self.finished[env].append(segment._replace(end=end, final_input=final))
                self.running[env] = None
                self.elapsed[env] = 0
        return True

    def _on_rollout_end(self) -> None:
        for env, segment in enumerate(self.running):
            if segment is not None:
                final = self._encoded(self.locals["new_obs"], env)
                self.finished[env].append(segment._replace(end="unfinished", final_input=final))
        segments = [segment for of_env in self.finished for segment in of_env]
        buffer = buffer_of(self.model)
        assert isinstance(buffer, KernelRolloutBuffer)
        self.rollouts.append(KernelRollout(segments, deepcopy(buffer.baseline.get_state()), whole_update(self.model)))


class Departure(NamedTuple):
    """What the slow computation leaves out, to show that the buffer does not; nothing by default."""

    bootstraps: tuple[str, ...] = ("truncated", "unfinished")
    final_time: float = 1.0
    continues_count: bool = True
    leaves_fold_out: bool = True
    remembers: float = 0.8
    n_folds: int = 4
    episodes_ahead: float = 10.0
    time_limits_reset_the_clock: bool = True


def slow_features(state: dict[str, Any], inputs: np.ndarray, time: float) -> np.ndarray:
    statistics = state["input_statistics"]
    z = np.clip((inputs - statistics.mean) / np.sqrt(statistics.var + 1e-8), -5.0, 5.0)
    frequencies, phases = state["frequencies"].numpy(), state["phases"].numpy()
    cosines = [
        np.sqrt(2.0 / len(phases)) * np.cos(np.dot(frequencies[:, i], [*z, 2.0 * time]) + phases[i])
        for i in range(len(phases))
    ]
    return np.array([1.0, *z, time, *cosines])


class RegressionSample(NamedTuple):
    """Of a regression with instruments, which without are the features themselves."""

    instruments: np.ndarray
    features: np.ndarray
    target: float


def slow_fit(samples: list[tuple[float, RegressionSample]], n_features: int, ridge: float) -> np.ndarray:
    """
    :param samples: with the weight of each
    :param n_features: number of features
    :return: the weights of the ridge regression, from scratch
    """
    gram, moment, count = np.zeros((n_features, n_features)), np.zeros(n_features), 0.0
    for weight, sample in samples:
        gram += weight * np.outer(sample.instruments, sample.features)
        moment += weight * sample.instruments * sample.target
        count += weight
    return np.linalg.solve(gram + ridge * max(count, 1.0) * np.eye(n_features), moment)


def slow_gae(rewards: list[float], values: np.ndarray, last_value: float, gae_lambda: float, gamma: float) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    following = 0.0
    next_values = [*values[1:], last_value]
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * next_values[t] - values[t] + gamma * gae_lambda * following
        advantages[t] = following
    return advantages


def temporal_differences(
    rewards: list[float], features: np.ndarray, final: np.ndarray, gamma: float, lambda_: float
) -> list[RegressionSample]:
    """
    :param rewards: of a segment
    :param features: of each of its steps
    :param final: of what follows, zeros where nothing does
    :param gamma: discount factor
    :param lambda_: lambda
    :return: what LSTD(lambda) makes of it
    """
    samples, trace = [], np.zeros(len(final))
    for t, reward in enumerate(rewards):
        trace = gamma * lambda_ * trace + features[t]
        following = features[t + 1] if t + 1 < len(rewards) else final
        samples.append(RegressionSample(trace, features[t] - gamma * following, reward))
    return samples


def slow_advantages(
    rollouts: list[KernelRollout],
    time_unit: int | None,
    departure: Departure | None = None,
    gae_lambda: float = 0.98,
    target_lambda: float | None = None,
    lstd: bool = True,
    ridge: float = 1e-5,
    gamma: float = GAMMA,
) -> list[np.ndarray]:
    """
    :param rollouts: all rollouts so far
    :param time_unit: the horizon; ``None`` for the longest trajectory so far, rounded up to a power of two
    :param departure: what is done otherwise
    :param gae_lambda: lambda
    :param target_lambda: lambda of what the baseline is fitted to
    :param lstd: whether it is fitted to itself, where these targets leave something to the baseline
    :param ridge: weight of the penalty
    :param gamma: discount factor
    :return: the advantages of each rollout, segment by segment
    """
    departure = departure or Departure()
    lambda_ = gae_lambda if target_lambda is None else target_lambda
    history: list[list[RegressionSample]] = []  # of each earlier rollout
    rewards = [0.0]
    longest = 1
    result = []
    for segments, state, _ in rollouts:
        firsts = [segment.first_step if departure.continues_count else 0 for segment in segments]
        longest = max(longest, *(first + len(segment.inputs) for first, segment in zip(firsts, segments, strict=True)))
        unit = float(time_unit or next(2**k for k in range(30) if 2**k >= longest))
        features, finals = [], []
        for first, segment in zip(firsts, segments, strict=True):
            times = [(first + t) / unit for t in range(len(segment.inputs))]
            features.append(np.array([slow_features(state, x, tau) for x, tau in zip(segment.inputs, times, strict=True)]))
            final_time = times[-1] + departure.final_time / unit
            if lstd and departure.time_limits_reset_the_clock and gamma > 1 - 1 / unit and segment.end == "truncated":
                final_time = 0.0
            finals.append(slow_features(state, segment.final_input, final_time))

        rewards += [reward for segment in segments for reward in segment.rewards]
        discount = min(gamma, 1 - 1 / (departure.episodes_ahead * unit)) if lstd else gamma
        bounds = (min(rewards) / (1 - discount), max(rewards) / (1 - discount)) if lstd else (-np.inf, np.inf)

        def judged(
            segment: int, weights: np.ndarray, features: Any = features, finals: Any = finals, bounds: Any = bounds
        ) -> tuple[Any, float]:
            bootstraps = segments[segment].end in departure.bootstraps  # noqa: B023  # called within the iteration
            last = float(np.clip(finals[segment] @ weights, *bounds)) if bootstraps else 0.0
            return np.clip(features[segment] @ weights, *bounds), last

        def remembered(age: int) -> list[tuple[float, RegressionSample]]:
            weights = [departure.remembers ** (age + len(history) - 1 - k) for k in range(len(history))]
            return [(w, sample) for w, rollout in zip(weights, history, strict=True) for sample in rollout]

        n_features = features[0].shape[1]
        earlier = slow_fit(remembered(0), n_features, ridge)
        samples: list[list[RegressionSample]] = []
        for i, segment in enumerate(segments):
            values, last_value = judged(i, earlier)
            targets = values + slow_gae(segment.rewards, values, last_value, lambda_, discount)
            own = [RegressionSample(phi, phi, y) for phi, y in zip(features[i], targets, strict=True)]
            if lstd:
                final = finals[i] if segment.end in departure.bootstraps else np.zeros(n_features)
                own = temporal_differences(segment.rewards, features[i], final, discount, lambda_)
            samples.append(own)
        advantages = []
        for i, segment in enumerate(segments):
            others = [j for j in range(len(segments)) if j % departure.n_folds != i % departure.n_folds]
            others = others if departure.leaves_fold_out else list(range(len(segments)))
            current = [(1.0, sample) for j in others for sample in samples[j]]
            weights = slow_fit(remembered(1) + current, n_features, ridge)
            advantages.append(slow_gae(segment.rewards, *judged(i, weights), gae_lambda, discount))
        history.append([sample for own in samples for sample in own])
        result.append(np.concatenate(advantages))
    return result


def flattened(space: spaces.Space) -> Callable[[GRPO, Any], np.ndarray]:
    return lambda model, observation: np.asarray(spaces.flatten(space, observation), dtype=np.float64)


def actor_features(model: GRPO, observation: Any) -> np.ndarray:
    with th.no_grad():
        tensor, _ = model.policy.obs_to_tensor(observation)
        return model.policy.extract_features(tensor, model.policy.features_extractor)[0].double().numpy()


def record_kernel(
    space: spaces.Space,
    n_envs: int = 2,
    time_limit: int | None = 7,
    termination: float = 0.15,
    encode: Callable[[GRPO, Any], np.ndarray] | None = None,
    n_rollouts: int = 4,
    n_steps: int = 10,
    buffer_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> KernelRecorder:
    def make() -> gym.Env:
        env = SpaceEnv(space, termination)
        return env if time_limit is None else TimeLimit(env, time_limit)

    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    recorder = KernelRecorder(encode or flattened(space))
    arguments = dict(
        policy=policy,
        n_steps=n_steps,
        normalize_advantage=False,
        rollout_buffer_kwargs=dict(n_features=12, **(buffer_kwargs or {})),
    )
    model = make_model(DummyVecEnv([make] * n_envs), **{**arguments, **kwargs})
    model.learn(n_rollouts * n_steps * n_envs, callback=recorder)
    assert len(recorder.rollouts) == n_rollouts
    return recorder


def advantages_by_log_prob(rollout: KernelRollout, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The log-probabilities of continuous actions tell transitions apart, whatever the observations are.

    :param rollout: a rollout
    :param advantages: segment by segment
    :return: the advantages given, and those of the update, both in the order of the log-probabilities
    """
    log_probs = np.array([log_prob for segment in rollout.segments for log_prob in segment.log_probs], dtype=np.float32)
    assert len(np.unique(log_probs)) == len(log_probs)
    order = np.argsort(rollout.update.old_log_prob.numpy())
    np.testing.assert_array_equal(rollout.update.old_log_prob.numpy()[order], np.sort(log_probs))
    return advantages[np.argsort(log_probs)], rollout.update.advantages.numpy()[order]


def assert_kernel_advantages(recorder: KernelRecorder, time_unit: int | None, **kwargs: Any) -> None:
    for rollout, advantages in zip(recorder.rollouts, slow_advantages(recorder.rollouts, time_unit, **kwargs), strict=True):
        expected, actual = advantages_by_log_prob(rollout, advantages)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
CNN: dict[str, Any] = dict(features_extractor_kwargs=dict(features_dim=8))


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(VECTOR, id="Box"),
        pytest.param(spaces.Box(-1.0, 1.0, (2, 2), np.float64), id="Box of two dimensions"),
        pytest.param(spaces.Discrete(4), id="Discrete"),
        pytest.param(spaces.MultiDiscrete([2, 3]), id="MultiDiscrete"),
        pytest.param(spaces.MultiBinary(3), id="MultiBinary"),
        pytest.param(spaces.Dict({"b": VECTOR, "a": spaces.Discrete(3), "c": spaces.MultiBinary(2)}), id="Dict"),
    ],
)
@pytest.mark.parametrize("n_envs", [pytest.param(1, id="1 environment"), pytest.param(3, id="3 environments")])
def test_the_kernel_buffer_equals_a_slow_computation_from_scratch(space: spaces.Space, n_envs: int):
    recorder = record_kernel(space, n_envs)
    ends = {segment.end for rollout in recorder.rollouts for segment in rollout.segments}
    assert ends == {"terminated", "truncated", "unfinished"}
    assert_kernel_advantages(recorder, time_unit=7)


@pytest.mark.parametrize("departure", [Departure(time_limits_reset_the_clock=False), Departure(episodes_ahead=1.0)])
@pytest.mark.parametrize(("gamma", "looks_beyond_an_episode"), [(0.8, False), (0.95, True), (1.0, True)])
def test_lstd_that_looks_beyond_an_episode_lets_time_limits_reset_the_clock(
    gamma: float, looks_beyond_an_episode: bool, departure: Departure
):
    recorder = record_kernel(VECTOR, gamma=gamma)
    assert_kernel_advantages(recorder, time_unit=7, gamma=gamma)
    with pytest.raises(AssertionError) if looks_beyond_an_episode else nullcontext():
        assert_kernel_advantages(recorder, time_unit=7, gamma=gamma, departure=departure)


@pytest.mark.parametrize("gamma", [0.99, 1.0])
@pytest.mark.parametrize("truncated", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("length", [10, 50])
def test_what_an_action_earns_shows_in_episodes_shorter_than_the_discount_looks_ahead(
    length: int, truncated: bool, gamma: float
):
    # An action earns 0.3 more than the other; episodes of `length` steps, states that say nothing
    np.random.seed(0)
    rng = np.random.default_rng(0)
    buffer = KernelRolloutBuffer(500, VECTOR, spaces.Discrete(2), n_envs=4, gamma=gamma, horizon=length)
    for _ in range(3):
        buffer.reset()
        for step in range(500):
            observations = rng.uniform(-1, 1, (5, 4, 3)).astype(np.float32)
            actions, done = rng.integers(2, size=4), (step + 1) % length == 0
            infos = [{"TimeLimit.truncated": done and truncated, "terminal_observation": final} for final in observations[1]]
            rewards = 1.0 + 0.3 * actions
            buffer.add(
                observations[0], actions[:, None], rewards, np.full(4, done), th.zeros(4), np.full(4, step // length), infos
            )
        buffer.finish_rollout(observations[2], lambda observations, hidden=False: np.empty(0))
    (update,) = buffer.get()
    assert np.corrcoef(update.advantages.numpy(), update.actions.numpy())[0, 1] > (0.3 if length == 10 else 0.15)


@pytest.mark.parametrize("target_lambda", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("n_envs", [pytest.param(1, id="1 environment"), pytest.param(3, id="3 environments")])
def test_the_baseline_can_be_fitted_by_regression(n_envs: int, target_lambda: float | None):
    recorder = record_kernel(VECTOR, n_envs, buffer_kwargs=dict(target_lambda=target_lambda, fit="regression"), gae_lambda=0.9)
    kwargs: dict[str, Any] = dict(time_unit=7, gae_lambda=0.9)
    assert_kernel_advantages(recorder, lstd=False, target_lambda=target_lambda, **kwargs)
    others: list[dict[str, Any]] = [dict(lstd=True, target_lambda=target_lambda), dict(lstd=False, target_lambda=0.7)]
    for other in others:
        with pytest.raises(AssertionError):
            assert_kernel_advantages(recorder, **other, **kwargs)


def collect(buffer: KernelRolloutBuffer, observe: Callable[[int], np.ndarray], reward: float, done: bool = False) -> None:
    """
    A rollout with the same reward at every step.

    :param buffer: to fill
    :param observe: the observations of a step
    :param reward: of each step
    :param done: whether every step ends its episode
    """
    buffer.reset()
    for step in range(buffer.buffer_size):
        buffer.add(
            observe(step),
            np.zeros((buffer.n_envs, 1)),
            np.full(buffer.n_envs, reward),
            np.full(buffer.n_envs, done),
            th.zeros(buffer.n_envs),
            np.arange(buffer.n_envs),
            [{}] * buffer.n_envs,
        )
    buffer.finish_rollout(observe(buffer.buffer_size), lambda observations, hidden=False: np.empty(0))


def test_the_baseline_is_fitted_by_lstd_with_a_small_ridge_by_default():
    buffer = KernelRolloutBuffer(8, VECTOR, spaces.Discrete(2))
    assert buffer.baseline.instrumented and buffer.baseline.ridge == 1e-5


@pytest.mark.parametrize("target_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n_envs", [pytest.param(1, id="1 environment"), pytest.param(3, id="3 environments")])
def test_the_baseline_can_be_fitted_by_lstd(n_envs: int, target_lambda: float):
    recorder = record_kernel(VECTOR, n_envs, buffer_kwargs=dict(target_lambda=target_lambda, fit="lstd"), gae_lambda=0.9)
    ends = {segment.end for rollout in recorder.rollouts for segment in rollout.segments}
    assert ends == {"terminated", "truncated", "unfinished"}
    kwargs: dict[str, Any] = dict(time_unit=7, gae_lambda=0.9, target_lambda=target_lambda)
    assert_kernel_advantages(recorder, **kwargs)
    with pytest.raises(AssertionError):
        assert_kernel_advantages(recorder, lstd=False, **kwargs)
    departures = [
        Departure(bootstraps=("unfinished",)),
        Departure(bootstraps=("truncated",)),
        Departure(remembers=0.5),
        Departure(leaves_fold_out=False),
        Departure(n_folds=3),
    ]
    for departure in departures:
        with pytest.raises(AssertionError):
            assert_kernel_advantages(recorder, departure=departure, **kwargs)


def largest_advantage_while_drifting_off(seed: int) -> float:
    """:return: of LSTD, in rollouts without an end: observations drift off, rewards are 1 and returns 1,000"""
    np.random.seed(seed)
    rng = np.random.default_rng(seed)
    kwargs: dict[str, Any] = dict(n_features=256, bandwidth=0.3, ridge=1e-4, gamma=0.999, gae_lambda=0.95, horizon=5000)
    space = spaces.Box(-np.inf, np.inf, (3,))
    buffer = KernelRolloutBuffer(64, space, spaces.Discrete(2), n_envs=4, fit="lstd", **kwargs)
    states = [rng.normal(size=(4, 3))]
    for _ in range(6 * 64):
        states.append(1.03 * states[-1] + 0.1 * rng.normal(size=(4, 3)))
    largest = 0.0
    for first in range(0, 6 * 64, 64):
        collect(buffer, lambda step, first=first: states[first + step].astype(np.float32), reward=1.0)  # type: ignore[misc]
        (update,) = buffer.get()
        largest = max(largest, float(update.advantages.abs().max()))
    return largest


def test_lstd_predicts_nothing_that_rewards_cannot_add_up_to(monkeypatch: pytest.MonkeyPatch):
    bounded = [largest_advantage_while_drifting_off(seed) for seed in range(4)]
    monkeypatch.setattr(KernelRolloutBuffer, "_attainable_returns", lambda self, rewards, gamma: (-np.inf, np.inf))
    unbounded = [largest_advantage_while_drifting_off(seed) for seed in range(4)]
    assert max(bounded) < 500.0
    assert max(unbounded) > 2000.0


@pytest.mark.parametrize("gamma", [0.9999, 1.0])
def test_without_discount_lstd_looks_no_farther_than_ten_episodes(gamma: float):
    # A reward of 1 at every step and no end in sight: without a discount the level is anything
    buffer = KernelRolloutBuffer(64, VECTOR, spaces.Discrete(2), n_envs=4, gamma=gamma, horizon=50, time_feature=False)
    rng = np.random.default_rng(0)
    for _ in range(6):
        collect(buffer, lambda step: rng.uniform(-1, 1, (4, 3)).astype(np.float32), reward=1.0)
        (update,) = buffer.get()
    features = buffer.baseline.features(rng.uniform(-1, 1, (8, 3)), np.zeros(8))
    np.testing.assert_allclose(features @ buffer.baseline.weights, np.full(8, 500.0), rtol=0.05)
    assert update.advantages.abs().max() < 50.0


@pytest.mark.parametrize("fit", ["regression", "lstd"])
def test_rollouts_whose_every_step_ends_an_episode_are_judged(fit: Literal["regression", "lstd"]):
    buffer = KernelRolloutBuffer(30, VECTOR, spaces.Discrete(2), n_envs=2, n_folds=2, ridge=1e-6, fit=fit)
    rng = np.random.default_rng(0)
    for _ in range(3):
        collect(buffer, lambda step: rng.uniform(-1, 1, (2, 3)).astype(np.float32), reward=2.0, done=True)
    (update,) = buffer.get()
    np.testing.assert_allclose(update.advantages, np.zeros(60), atol=0.02)  # the return is 2, and foreseen


def test_neither_with_a_lambda_of_one_nor_by_lstd_does_the_baseline_lag_behind_a_value_that_jumps():
    # The same reward at every step, gamma 0.9, episodes that go on: the value is 10 times the reward, hence 10 and then 100
    errors = {}
    for target_lambda, fit in ((0.5, "regression"), (1.0, "regression"), (0.5, "lstd"), (1.0, "lstd")):
        buffer = KernelRolloutBuffer(
            200,
            VECTOR,
            spaces.Discrete(2),
            gamma=0.9,
            n_envs=2,
            n_folds=1,
            ridge=1e-6,
            forgetting=0.0,
            target_lambda=target_lambda,
            fit=fit,
        )
        rng = np.random.default_rng(0)
        states = rng.uniform(-1, 1, (201, 2, 3)).astype(np.float32)
        for reward in (1.0, 1.0, 10.0):
            collect(buffer, states.__getitem__, reward)
        features = buffer.baseline.features(states[-1], np.full(2, 0.5))
        errors[target_lambda, fit] = abs(float((features @ buffer.baseline.weights).mean()) - 100.0)
    assert errors[1.0, "regression"] < 15.0  # towards the end of the rollout the old value still stands for what follows
    assert errors[0.5, "regression"] > 40.0
    assert errors[0.5, "lstd"] < 0.1
    assert errors[1.0, "lstd"] < 0.1


@pytest.mark.parametrize(
    ("space", "policy", "policy_kwargs"),
    [
        pytest.param(IMAGE, "CnnPolicy", CNN, id="image"),
        pytest.param(
            spaces.Dict({"camera": IMAGE, "speed": VECTOR}),
            "MultiInputPolicy",
            dict(features_extractor_kwargs=dict(cnn_output_dim=8), net_arch=[8]),
            id="Dict with an image",
        ),
    ],
)
# A network rounds differently for one image and for many: with less of a ridge LSTD amplifies that
@pytest.mark.parametrize(("fit", "ridge"), [("regression", 1e-3), ("lstd", 0.1)])
def test_for_images_the_kernel_buffer_looks_at_the_actors_features(
    space: spaces.Space, policy: str, policy_kwargs: dict[str, Any], fit: str, ridge: float
):
    recorder = record_kernel(
        space,
        encode=actor_features,
        policy=policy,
        policy_kwargs=policy_kwargs,
        n_rollouts=3,
        buffer_kwargs=dict(fit=fit, ridge=ridge),
    )
    assert_kernel_advantages(recorder, time_unit=7, lstd=fit == "lstd", ridge=ridge)


@pytest.mark.parametrize(
    "departure",
    [
        pytest.param(Departure(bootstraps=("unfinished",)), id="nothing after a time limit"),
        pytest.param(Departure(bootstraps=("truncated",)), id="nothing after the rollout"),
        pytest.param(Departure(bootstraps=("truncated", "unfinished", "terminated")), id="something after a termination"),
        pytest.param(Departure(final_time=0.0), id="the clock stops before the last observation"),
        pytest.param(Departure(continues_count=False), id="each rollout counts steps from zero"),
        pytest.param(Departure(leaves_fold_out=False), id="judged by a fit to itself"),
        pytest.param(Departure(remembers=1.0), id="never forgets"),
        pytest.param(Departure(n_folds=3), id="another number of folds"),
    ],
)
@pytest.mark.parametrize("fit", ["regression", "lstd"])
def test_any_other_way_gives_other_advantages(fit: str, departure: Departure):
    recorder = record_kernel(VECTOR, buffer_kwargs=dict(fit=fit))
    assert_kernel_advantages(recorder, time_unit=7, lstd=fit == "lstd")
    otherwise = slow_advantages(recorder.rollouts, 7, departure, lstd=fit == "lstd")
    pairs = [advantages_by_log_prob(rollout, other) for rollout, other in zip(recorder.rollouts, otherwise, strict=True)]
    assert max(np.max(np.abs(other - actual)) for other, actual in pairs) > 1e-3


@pytest.mark.parametrize(
    ("buffer_kwargs", "departure"),
    [
        pytest.param(dict(forgetting=0.5), Departure(remembers=0.5), id="forgetting"),
        pytest.param(dict(forgetting=0.0), Departure(remembers=0.0), id="no memory"),
        pytest.param(dict(n_folds=2), Departure(n_folds=2), id="two folds"),
        pytest.param(dict(n_folds=1), Departure(n_folds=1), id="one fold"),
    ],
)
def test_the_kernel_buffers_options_mean_what_the_slow_computation_says(buffer_kwargs: dict[str, Any], departure: Departure):
    assert_kernel_advantages(record_kernel(VECTOR, buffer_kwargs=buffer_kwargs), time_unit=7, departure=departure)


def test_the_kernel_buffer_uses_gae_lambda():
    assert_kernel_advantages(record_kernel(VECTOR, gae_lambda=0.5), time_unit=7, gae_lambda=0.5)


def test_a_single_trajectory_is_judged_by_the_rollouts_before():
    recorder = record_kernel(VECTOR, n_envs=1, time_limit=None, termination=0.0)
    assert [len(rollout.segments) for rollout in recorder.rollouts] == [1, 1, 1, 1]
    assert [rollout.segments[0].first_step for rollout in recorder.rollouts] == [0, 10, 20, 30]
    assert_kernel_advantages(recorder, time_unit=None)
    # Nothing comes before the first: its advantages are the discounted sums of its rewards
    returns = A.discounted_returns(np.array(recorder.rollouts[0].segments[0].rewards), np.array([10]), GAMMA * 0.98)
    np.testing.assert_allclose(*advantages_by_log_prob(recorder.rollouts[0], returns), rtol=1e-4)


def test_without_a_time_limit_time_is_measured_in_longest_episodes_so_far():
    recorder = record_kernel(VECTOR, time_limit=None)
    assert_kernel_advantages(recorder, time_unit=None)


@pytest.mark.parametrize("time_limit", [pytest.param(5, id="5"), pytest.param(None, id="none")])
def test_the_time_limit_is_the_horizon(time_limit: int | None):
    env = SpaceEnv(VECTOR) if time_limit is None else TimeLimit(SpaceEnv(VECTOR), time_limit)
    assert make_model(env).rollout_buffer.horizon == time_limit


@pytest.mark.parametrize("n_envs", [pytest.param(1, id="1 environment"), pytest.param(3, id="3 environments")])
def test_normalize_advantage_whitens_the_kernel_buffers_update(n_envs: int):
    recorder = record_kernel(VECTOR, n_envs, normalize_advantage=True)
    for rollout, raw in zip(recorder.rollouts, slow_advantages(recorder.rollouts, 7), strict=True):
        expected, actual = advantages_by_log_prob(rollout, raw)
        np.testing.assert_allclose(actual, (expected - expected.mean()) / expected.std(), rtol=1e-3, atol=1e-4)
        assert actual.mean() == pytest.approx(0.0, abs=1e-6)
        assert actual.std() == pytest.approx(1.0, abs=1e-6)
        assert expected.std() != pytest.approx(1.0, abs=1e-2)


# --- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "policy", "policy_kwargs", "shape", "dtype"),
    [
        pytest.param(VECTOR, "MlpPolicy", {}, (3,), th.float32, id="Box"),
        pytest.param(spaces.Box(-1.0, 1.0, (2,), np.float64), "MlpPolicy", {}, (2,), th.float64, id="Box, double"),
        pytest.param(IMAGE, "CnnPolicy", CNN, (3, 36, 36), th.uint8, id="image"),
        pytest.param(spaces.Discrete(4), "MlpPolicy", {}, (1,), th.int64, id="Discrete"),
        pytest.param(spaces.MultiBinary(3), "MlpPolicy", {}, (3,), th.int8, id="MultiBinary"),
    ],
)
@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_observations_keep_their_dtype(
    buffer: str, space: spaces.Space, policy: str, policy_kwargs: dict[str, Any], shape: tuple[int, ...], dtype: th.dtype
):
    model = make_model(TimeLimit(SpaceEnv(space), 2), buffer, policy, policy_kwargs=policy_kwargs).learn(8)
    observations = whole_update(model).observations
    assert isinstance(observations, th.Tensor)
    assert observations.dtype == dtype
    assert observations.shape == (model.rollout_buffer.n_samples, *shape)


def test_dict_observations_keep_the_dtype_of_each_part():
    space = spaces.Dict({"camera": IMAGE, "room": spaces.Discrete(3), "speed": VECTOR})
    extractor = dict(features_extractor_kwargs=dict(cnn_output_dim=8))
    observations = whole_update(
        make_model(SpaceEnv(space), policy="MultiInputPolicy", policy_kwargs=extractor).learn(8)
    ).observations
    assert isinstance(observations, dict)
    assert {key: (part.dtype, part.shape) for key, part in observations.items()} == {
        "camera": (th.uint8, (8, 3, 36, 36)),
        "room": (th.int64, (8, 1)),
        "speed": (th.float32, (8, 3)),
    }


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        pytest.param(spaces.Box(-0.5, 0.5, (3,), np.float32), (3,), th.float32, id="Box"),
        pytest.param(spaces.Box(-0.5, 0.5, (2, 2), np.float64), (4,), th.float32, id="Box of two dimensions"),
        pytest.param(spaces.Box(-2, 2, (2,), np.int32), (2,), th.float32, id="Box of integers"),
        pytest.param(spaces.Discrete(3), (), th.int64, id="Discrete"),
        pytest.param(spaces.MultiDiscrete([2, 3]), (2,), th.float32, id="MultiDiscrete"),
        pytest.param(spaces.MultiBinary(4), (4,), th.float32, id="MultiBinary"),
    ],
)
@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_actions_are_stored_as_they_were_sampled(buffer: str, space: spaces.Space, shape: tuple[int, ...], dtype: th.dtype):
    recorder = Recorder()
    model = make_id_model(buffer, 3, env=dict(action_space=space), n_steps=25)
    model.learn(75, callback=recorder)
    actions = whole_update(model).actions
    assert actions.dtype == dtype
    assert actions.shape == (model.rollout_buffer.n_samples, *shape)
    for id, sample in recorder.updates[0].items():
        np.testing.assert_array_equal(sample.action, recorder.seen[id].action.reshape(shape))


def test_actions_that_were_clipped_for_the_environment_are_not_clipped_in_the_update():
    recorder = Recorder()
    make_id_model("kernel", 3, env=dict(action_space=spaces.Box(-0.5, 0.5, (3,), np.float32))).learn(24, callback=recorder)
    clipped = [not np.array_equal(transition.action, transition.clipped_action) for transition in recorder.seen.values()]
    assert np.mean(clipped) > 0.5
    assert max(np.abs(sample.action).max() for sample in recorder.updates[0].values()) > 0.5


# --- minibatches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def learned() -> GRPO:
    """A model whose buffer holds an update of 24 transitions."""
    return make_id_model("kernel", 3).learn(24)


def ids_of_a_pass(model: GRPO, batch_size: int | None, seed: int = 0) -> list[list[Id]]:
    np.random.seed(seed)
    return [[id_of(obs) for obs in batch.observations] for batch in model.rollout_buffer.get(batch_size)]


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [
        pytest.param(8, [8, 8, 8], id="divides"),
        pytest.param(10, [10, 10, 4], id="the last is smaller"),
        pytest.param(64, [24], id="more than there are"),
        pytest.param(None, [24], id="none given"),
    ],
)
def test_a_pass_yields_each_transition_once_in_minibatches(learned: GRPO, batch_size: int | None, sizes: list[int]):
    batches = ids_of_a_pass(learned, batch_size)
    assert [len(batch) for batch in batches] == sizes
    ids = [id for batch in batches for id in batch]
    assert len(set(ids)) == 24


def test_the_order_of_a_pass_is_random_and_follows_numpys_seed(learned: GRPO):
    first = ids_of_a_pass(learned, 10, seed=0)
    assert first == ids_of_a_pass(learned, 10, seed=0)
    assert first != ids_of_a_pass(learned, 10, seed=1)
    flat = [id for batch in first for id in batch]
    assert flat != sorted(flat)
    passes = [[batch.observations.tolist() for batch in learned.rollout_buffer.get(10)] for _ in range(2)]  # type: ignore[union-attr]
    assert passes[0] != passes[1]


def test_the_columns_of_a_minibatch_belong_together(learned: GRPO):
    whole = whole_update(learned)
    rows = {id_of(obs): i for i, obs in enumerate(whole.observations)}
    for batch in learned.rollout_buffer.get(10):
        index = [rows[id_of(obs)] for obs in batch.observations]
        assert th.equal(batch.actions, whole.actions[index])
        assert th.equal(batch.old_log_prob, whole.old_log_prob[index])
        assert th.equal(batch.advantages, whole.advantages[index])


# --- choosing a buffer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "resolved"),
    [
        pytest.param("kernel", KernelRolloutBuffer, id="kernel"),
        pytest.param("outcome", OutcomeRolloutBuffer, id="outcome"),
        pytest.param("process", ProcessRolloutBuffer, id="process"),
        pytest.param("return_to_go", ReturnToGoRolloutBuffer, id="return_to_go"),
        pytest.param("stepwise", StepwiseRolloutBuffer, id="stepwise"),
        pytest.param(None, KernelRolloutBuffer, id="None"),
        pytest.param(StepwiseRolloutBuffer, StepwiseRolloutBuffer, id="a class"),
    ],
)
def test_a_buffer_is_chosen_by_name_or_class(buffer: Any, resolved: type[GroupRolloutBuffer]):
    assert resolve_buffer_class(buffer) is resolved
    assert type(make_model(SpaceEnv(VECTOR), buffer).rollout_buffer) is resolved


def test_an_unknown_buffer_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'kernal'.*kernel, outcome, process, return_to_go, stepwise"):
        make_model(SpaceEnv(VECTOR), "kernal")
    assert list(BUFFERS) == ["kernel", *COMPLETE_GROUP_BUFFERS]


@pytest.mark.parametrize(
    ("buffer", "quoted"),
    [
        pytest.param(RolloutBuffer, "stable_baselines3.common.buffers.RolloutBuffer", id="SB3's"),
        pytest.param(int, "class 'int'", id="no buffer"),
        pytest.param(3, "is 3", id="no class"),
    ],
)
def test_what_is_no_group_rollout_buffer_is_refused(buffer: Any, quoted: str):
    with pytest.raises(ValueError, match=f"{quoted}.*subclass of `sb3_grpo.buffers.GroupRolloutBuffer`"):
        make_model(SpaceEnv(VECTOR), buffer)


@pytest.mark.parametrize(
    ("buffer", "name", "value"),
    [
        pytest.param("outcome", "scale", "std", id="scale"),
        pytest.param("outcome", "scale", "", id="scale, empty"),
        pytest.param("outcome", "tied_groups", "drop", id="tied_groups"),
        pytest.param("stepwise", "tied_groups", None, id="tied_groups, None"),
        pytest.param("outcome", "component_aggregation", "sum", id="component_aggregation"),
        pytest.param("process", "reward_weights", {}, id="reward_weights, empty"),
        pytest.param("outcome", "reward_weights", "progress", id="reward_weights, text"),
        pytest.param("outcome", "max_waiting", 0, id="max_waiting, zero"),
        pytest.param("stepwise", "max_waiting", 2.5, id="max_waiting, fraction"),
        pytest.param("kernel", "forgetting", 1.25, id="forgetting, above one"),
        pytest.param("kernel", "forgetting", -0.5, id="forgetting, negative"),
        pytest.param("kernel", "forgetting", float("nan"), id="forgetting, NaN"),
        pytest.param("kernel", "ridge", 0.0, id="ridge, zero"),
        pytest.param("kernel", "ridge", float("inf"), id="ridge, infinite"),
        pytest.param("kernel", "n_folds", 0, id="n_folds"),
        pytest.param("kernel", "n_folds", True, id="n_folds, bool"),
        pytest.param("kernel", "bandwidth", -1.5, id="bandwidth"),
        pytest.param("kernel", "bandwidth", "wide", id="bandwidth, text"),
        pytest.param("kernel", "n_features", 0, id="n_features"),
    ],
)
def test_an_option_out_of_range_is_refused_and_quoted(buffer: str, name: str, value: Any):
    with pytest.raises(ValueError, match=f"`{name}`.*not {value!r}"):
        make_model(SpaceEnv(VECTOR), buffer, rollout_buffer_kwargs={name: value})


# --- a user's own -----------------------------------------------------------------------------------------------------


class LongerIsBetter(CompleteGroupRolloutBuffer):
    """A user's own judgement of whole groups."""

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return np.repeat(np.where(lengths > 5, 1.0, -1.0), lengths)


class RewardIsAdvantage(GroupRolloutBuffer):
    """A user's own judgement of a rollout."""

    def _form_update(self, rollout: Any, last_obs: Any, actor_features: Any) -> Any:
        return rollout, rollout.rewards


def test_a_users_own_group_buffer_overrides_one_hook():
    recorder = record(LongerIsBetter)
    assert set(recorder.trained_on.values()) == {1}
    assert_whole_groups(recorder, 2)
    assert accounted_for(recorder) == len(recorder.seen)
    advantages = set()
    for update in recorder.updates:
        for ids in by_start(recorder, update).values():
            assert {update[id].advantage for id in ids} == {1.0 if len(ids) > 5 else -1.0}
            advantages |= {update[id].advantage for id in ids}
    assert advantages == {1.0, -1.0}
    assert not th.equal(recorder.weights[0], recorder.weights[-1])


def test_a_users_own_rollout_buffer_overrides_one_hook():
    recorder = record(RewardIsAdvantage)
    assert set(recorder.trained_on) == set(recorder.seen)
    for update in recorder.updates:
        for id, sample in update.items():
            assert sample.advantage == pytest.approx(recorder.seen[id].reward)
    assert recorder.n_updates == list(range(15))
    assert not th.equal(recorder.weights[0], recorder.weights[-1])


# --- metrics ----------------------------------------------------------------------------------------------------------


def explained_variance(reward: Callable[[Id], float]) -> float:
    recorder = record("kernel", n_envs=4, n_steps=50, n_rollouts=4, env=dict(length=lambda env, episode: 10, reward=reward))
    return recorder.metrics[-1]["train/explained_variance"]


def test_explained_variance_is_near_one_where_returns_can_be_foreseen():
    assert explained_variance(lambda id: 1.0) > 0.95


def test_explained_variance_is_near_zero_where_returns_are_chance():
    rng = np.random.default_rng(0)
    assert explained_variance(lambda id: float(rng.normal())) < 0.1


def alike(id: Id) -> float:
    return 1.0


def better_with_each_episode(id: Id) -> float:
    return float(id[1])


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize(
    ("reward", "tied"),
    [
        pytest.param(alike, 1.0, id="equal returns"),
        pytest.param(better_with_each_episode, 0.0, id="different returns"),
        pytest.param(lambda id: float(id[1] % 4 == 3), 0.5, id="different returns in every other group"),
    ],
)
def test_groups_tied_is_the_fraction_of_groups_that_have_nothing_to_compare(
    buffer: str, reward: Callable[[Id], float], tied: float
):
    # Episodes of one step, because `return_to_go` compares the steps of a trajectory too; consecutive ones make a group
    env = dict(length=lambda env, episode: 1, reward=reward)
    recorder = record(buffer, n_envs=1, n_steps=24, n_rollouts=3, env=env)
    assert [metrics["rollout/groups_tied"] for metrics in recorder.metrics] == [tied] * 3
    assert [metrics["rollout/groups_completed"] for metrics in recorder.metrics] == [12.0] * 3


def test_steps_without_peer_are_counted():
    # Groups are the episodes 0 and 1, 2 and 3, ... of 3 and 5 steps: two steps of each group have no peer
    recorder = record(
        "stepwise", n_envs=1, n_steps=16, n_rollouts=2, env=dict(length=lambda env, episode: 3 + 2 * (episode % 2))
    )
    assert [metrics["rollout/groups_completed"] for metrics in recorder.metrics] == [2.0, 2.0]
    assert [metrics["rollout/steps_without_peer"] for metrics in recorder.metrics] == [4.0, 4.0]
    for update in recorder.updates:
        lonely = [sample.advantage for id, sample in update.items() if id[2] >= 3]
        assert lonely == [0.0] * 4


# --- returns of groups ------------------------------------------------------------------------------------------------


def scripted(*rewards: tuple[float, ...]) -> dict[str, Any]:
    """:return: arguments of :class:`IdEnv`: the rewards of each episode, in each environment; ``()`` is reset to at the end"""
    return dict(length=lambda env, episode: len(rewards[episode]), reward=lambda id: rewards[id[1]][id[2]])


#: Groups of two have returns of 6 and 12, 3 and 3, 5 and 1.
THREE_GROUPS = scripted((1, 2, 3), (4, 4, 4), (1, 1, 1), (1, 1, 1), (0, 0, 5), (1, 0, 0), (2, 2, 2), (7, 0, 0))


def figures(recorder: Recorder, *names: str) -> list[tuple[float | None, ...]]:
    """:return: what each rollout's metrics say, ``None`` where they say nothing"""
    return [tuple(metrics.get(f"rollout/{name}") for name in names) for metrics in recorder.metrics]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_returns_of_a_group_are_reported_when_its_last_member_ends(buffer: str):
    # Episodes of 3 steps: groups end with steps 6, 12 and 18, and so in the second, third and fifth rollout of 4
    recorder = record(buffer, n_envs=1, n_steps=4, n_rollouts=5, env=THREE_GROUPS)
    reported = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    assert reported == [(0, None, None), (1, 9, 6), (1, 3, 0), (0, None, None), (1, 3, 4)]
    # `return_to_go` also compares the steps of a trajectory, where the others have nothing to learn from equal rewards;
    # `kernel` does not compare the members of a group
    tied = 0 if buffer == "return_to_go" else 1
    expected = [None] * 5 if buffer == "kernel" else [None, 0, tied, None, 0]
    assert figures(recorder, "groups_tied") == [(value,) for value in expected]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_returns_of_several_groups_are_averaged(buffer: str):
    recorder = record(buffer, n_envs=1, n_steps=18, n_rollouts=1, env=THREE_GROUPS)
    ((completed, mean, spread),) = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    assert (completed, mean) == (3, 5)  # (6 + 12 + 3 + 3 + 5 + 1) / 6
    assert spread == pytest.approx(10 / 3)  # (6 + 0 + 4) / 3


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_members_of_a_group_may_end_in_several_environments_and_rollouts(buffer: str):
    # Environment 0 has episodes of 2 steps and rewards 0, 1, 2, ...; environment 1 has 5 steps and rewards 10, 11, ...
    # Starts are taken in the order in which episodes end: group 0 is the first episode of either, group 1 the second and
    # third of environment 0, group 2 the second of environment 1 and the fourth of environment 0
    env = dict(length=lambda env, episode: (2, 5)[env], reward=lambda id: float(10 * id[0] + id[1]))
    recorder = record(buffer, n_envs=2, n_steps=4, n_rollouts=3, env=env)
    reported = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    # Returns: 0 and 50, 2 and 4; 55 and 6, of which the first ends at step 10; 8 and 10 make the fourth group
    assert reported == [(0, None, None), (2, 14, 26), (2, (55 + 6 + 8 + 10) / 4, (49 + 2) / 2)]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_returns_of_a_stopped_rollout_are_reported_by_the_next(buffer: str):
    # Stopped after the first half of the second rollout, with which the first group ends
    recorder = Recorder(stop_after=6)
    model = make_id_model(buffer, 1, THREE_GROUPS, n_steps=4)
    model.learn(100, callback=recorder)
    model.learn(8, callback=recorder, reset_num_timesteps=False)
    reported = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    assert reported == [(0, None, None), (1, 9, 6), (1, 3, 0)]


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("new_seed", "reset_num_timesteps"),
    [pytest.param(None, True, id="a new run"), pytest.param(1, False, id="starts numbered from zero again")],
)
def test_the_returns_of_a_group_that_is_abandoned_are_not_reported(
    buffer: str, new_seed: int | None, reset_num_timesteps: bool
):
    # Given up: an episode with return 6 that waits for its peer, and the first step of that, with reward 4
    recorder = Recorder()
    model = make_id_model(buffer, 1, THREE_GROUPS, n_steps=4).learn(4, callback=recorder)
    model.set_random_seed(new_seed)
    model.learn(12, callback=recorder, reset_num_timesteps=reset_num_timesteps)
    reported = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    assert reported == [(0, None, None), (0, None, None), (1, 3, 0), (1, 3, 4)]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_returns_of_a_complete_group_that_was_dropped_are_not_reported(buffer: str):
    # As above, but all environments are reset after the stop
    recorder = Recorder(stop_after=6)
    model = make_id_model(buffer, 1, THREE_GROUPS, n_steps=4)
    model.learn(100, callback=recorder)
    model.learn(8, callback=recorder)
    reported = figures(recorder, "groups_completed", "group_return_mean", "group_return_spread")
    assert (1, 9, 6) not in reported
    assert all((completed == 0) == (mean is None) for completed, mean, _ in reported)


# --- diagnostics of the advantages ------------------------------------------------------------------------------------


def test_mean_and_deviation_of_the_advantages_are_reported():
    # The returns are 1 and 3: the advantages -1, once, and 1, three times
    recorder = record(
        "outcome",
        n_envs=1,
        n_steps=4,
        n_rollouts=1,
        env=scripted((1,), (0, 3, 0), ()),
        rollout_buffer_kwargs=dict(scale="none"),
    )
    assert recorder.metrics[0]["train/advantage_mean"] == 0.5
    assert recorder.metrics[0]["train/advantage_std"] == pytest.approx(np.sqrt(0.75))


def test_without_an_update_no_mean_of_the_advantages_is_reported():
    recorder = record("outcome", n_envs=1, n_steps=4, n_rollouts=1, env=dict(length=endless))
    assert not any(name.startswith("train/") for name in recorder.metrics[0])


def test_mean_and_deviation_of_the_advantages_are_those_before_whitening():
    # Without learning the two runs see the same
    raw = record("kernel", n_rollouts=3, learning_rate=0.0, normalize_advantage=False)
    whitened = record("kernel", n_rollouts=3, learning_rate=0.0, normalize_advantage=True)
    for update, metrics, whitened_metrics in zip(raw.updates, raw.metrics, whitened.metrics, strict=True):
        advantages = [sample.advantage for sample in update.values()]
        assert abs(np.mean(advantages)) > 1e-3
        assert metrics["train/advantage_mean"] == pytest.approx(np.mean(advantages), rel=1e-4)
        assert metrics["train/advantage_std"] == pytest.approx(np.std(advantages), rel=1e-4)
        assert whitened_metrics == metrics


def test_baseline_variance_reduction_compares_advantages_with_what_they_are_without_a_baseline():
    # All episodes end with a rollout, so that A_t = r_t + gamma b_(t+1) - b_t + gamma lambda A_(t+1) tells the baseline
    recorder = record(
        "kernel",
        n_envs=4,
        n_steps=20,
        n_rollouts=3,
        env=dict(length=lambda env, episode: 5, reward=lambda id: float(id[2] + np.sin(3 * id[0] + 5 * id[1]))),
        gae_lambda=0.5,
        normalize_advantage=False,
    )
    for update, metrics in zip(recorder.updates, recorder.metrics, strict=True):
        advantages, baseline = [], []
        for ids in by_start(recorder, update).values():
            next_baseline = next_advantage = 0.0
            for id in reversed(ids):
                advantage = update[id].advantage
                following = GAMMA * next_baseline + GAMMA * 0.5 * next_advantage
                next_baseline, next_advantage = recorder.seen[id].reward + following - advantage, advantage
                baseline.append(next_baseline)
                advantages.append(advantage)
        expected = 1 - np.var(advantages) / np.var(np.add(advantages, baseline))
        assert metrics["train/baseline_variance_reduction"] == pytest.approx(expected, abs=1e-4)
        assert metrics["train/baseline_variance_reduction"] != pytest.approx(metrics["train/explained_variance"], abs=1e-3)
    assert recorder.metrics[-1]["train/baseline_variance_reduction"] > 0.3


# --- weights in the loss ----------------------------------------------------------------------------------------------


def weights_by_episode(model: GRPO) -> dict[int, list[float]]:
    """:return: the weights of the transitions of each episode in the update, from a single environment"""
    update = whole_update(model)
    assert update.weights is not None and update.weights.dtype == th.float32
    rows = sorted(zip(map(id_of, update.observations), update.weights.tolist(), strict=True))
    return {episode: [weight for id, weight in rows if id[1] == episode] for episode in {id[1] for id, _ in rows}}


def weigh(buffer: str, aggregation: str, n_rollouts: int, horizon: int | None) -> GRPO:
    """:return: a model after rollouts of 5 steps with episodes of 1, 3, 1, 3, ... steps, two of which make a group"""
    kwargs = {} if horizon is None else dict(horizon=horizon)
    env = dict(length=lambda env, episode: (1, 3)[episode % 2])
    model = make_id_model(buffer, 1, env, n_steps=5, loss_aggregation=aggregation, rollout_buffer_kwargs=kwargs)
    return model.learn(5 * n_rollouts)


@pytest.mark.parametrize(
    ("buffer", "aggregation", "horizon", "weights"),
    [
        # The group of episodes of 1 and 3 steps, 2 on average
        pytest.param("outcome", "trajectory", None, {0: [2], 1: [2 / 3] * 3}, id="group, trajectory"),
        pytest.param("outcome", "constant", None, {0: [2 / 5], 1: [2 / 5] * 3}, id="group, constant, no time limit"),
        pytest.param("outcome", "constant", 8, {0: [2 / 8], 1: [2 / 8] * 3}, id="group, constant, time limit"),
        # The rollout has 1, 3 and, of the episode that goes on or not, 1 step, 5 / 3 on average
        pytest.param("kernel", "trajectory", None, {0: [5 / 3], 1: [5 / 9] * 3, 2: [5 / 3]}, id="kernel, trajectory"),
        pytest.param("kernel", "constant", None, {0: [1 / 3], 1: [1 / 3] * 3, 2: [1 / 3]}, id="kernel, constant, no limit"),
        pytest.param("kernel", "constant", 8, {0: [5 / 24], 1: [5 / 24] * 3, 2: [5 / 24]}, id="kernel, constant, time limit"),
    ],
)
def test_transitions_weigh_as_the_length_of_their_trajectory_demands(
    buffer: str, aggregation: str, horizon: int | None, weights: dict[int, list[float]]
):
    actual = weights_by_episode(weigh(buffer, aggregation, 1, horizon))
    assert actual == {episode: pytest.approx(of_episode) for episode, of_episode in weights.items()}


@pytest.mark.parametrize(
    ("buffer", "weights"),
    [
        # The third rollout completes the group of the episodes 4 and 5, which began in the second
        pytest.param("outcome", {4: [2], 5: [2 / 3] * 3}, id="group: whole trajectories"),
        # The third rollout holds the end of episode 5 and the beginning of episode 7: 2, 1 and 2 steps
        pytest.param("kernel", {5: [5 / 6] * 2, 6: [5 / 3], 7: [5 / 6] * 2}, id="kernel: what the rollout holds of them"),
    ],
)
def test_a_trajectory_is_what_the_update_holds_of_it(buffer: str, weights: dict[int, list[float]]):
    actual = weights_by_episode(weigh(buffer, "trajectory", 3, None))
    assert actual == {episode: pytest.approx(of_episode) for episode, of_episode in weights.items()}


def test_the_time_limit_of_the_environment_is_what_a_trajectory_may_have():
    env = TimeLimit(IdEnv(0, lambda env, episode: (1, 3)[episode % 2]), 16)
    model = make_model(env, "outcome", n_steps=4, share_starts=False, loss_aggregation="constant").learn(4)
    assert weights_by_episode(model) == {0: [2 / 16], 1: [2 / 16] * 3}


@pytest.mark.parametrize("buffer", BUFFERS)
def test_per_step_all_transitions_weigh_alike_and_no_weights_are_needed(buffer: str):
    assert whole_update(weigh(buffer, "step", 1, None)).weights is None


# --- minibatches of whole trajectories --------------------------------------------------------------------------------


def long_update(buffer: str, aggregation: str = "step", n_steps: int = 30) -> GRPO:
    """:return: a model that holds an update of many trajectories of 1 to 11 steps"""
    return make_id_model(buffer, 3, n_steps=n_steps, loss_aggregation=aggregation).learn(3 * n_steps)


def irregular(batch: GroupRolloutBufferSamples) -> th.Tensor:
    """:return: in place of a loss, a function of the observations of :class:`IdEnv`"""
    assert isinstance(batch.observations, th.Tensor)
    return 1.0 + th.sin(batch.observations @ th.tensor([3.0, 5.0, 7.0], dtype=th.float64))


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
@pytest.mark.parametrize("batch_size", [1, 7, 20, 1000, None])
def test_whole_trajectories_are_dealt_out_once_each(buffer: str, batch_size: int | None):
    model = long_update(buffer)
    whole = whole_update(model)
    rows = {id_of(obs): i for i, obs in enumerate(whole.observations)}
    batches = list(model.rollout_buffer.get(batch_size, whole_trajectories=True))
    assert sorted(id_of(obs) for batch in batches for obs in batch.observations) == sorted(rows)
    assert len(batches) > 1 or batch_size in (1000, None)
    homes: dict[Id, int] = {}
    for i, batch in enumerate(batches):
        ids = [id_of(obs) for obs in batch.observations]
        assert all(homes.setdefault(id[:2], i) == i for id in ids)
        assert batch.trajectories is not None and batch.trajectories.dtype == th.int64
        labels = batch.trajectories.tolist()
        assert set(labels) == set(range(len({id[:2] for id in ids})))
        assert len(set(zip(labels, (id[:2] for id in ids), strict=True))) == len(set(labels))
        index = [rows[id] for id in ids]
        assert th.equal(batch.actions, whole.actions[index])
        assert th.equal(batch.old_log_prob, whole.old_log_prob[index])
        assert th.equal(batch.advantages, whole.advantages[index])


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_a_minibatch_has_as_many_whole_trajectories_as_it_needs(buffer: str):
    model = long_update(buffer)
    np.random.seed(0)
    batches = list(model.rollout_buffer.get(12, whole_trajectories=True))
    for batch in batches[:-1]:
        assert batch.trajectories is not None
        smaller = len(batch.trajectories) - int((batch.trajectories == batch.trajectories[-1]).sum())
        assert smaller < 12 <= len(batch.trajectories)
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        a_pass = model.rollout_buffer.get(12, whole_trajectories=True)
        orders.append([id_of(obs) for batch in a_pass for obs in batch.observations])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
@pytest.mark.parametrize("aggregation", ["step", "trajectory", "constant"])
@pytest.mark.parametrize("batch_size", [1, 7, 20, None])
def test_the_losses_of_minibatches_of_whole_trajectories_average_to_that_of_the_update(
    buffer: str, aggregation: str, batch_size: int | None
):
    model = long_update(buffer, aggregation)
    whole = whole_update(model)
    batches = list(model.rollout_buffer.get(batch_size, whole_trajectories=True))
    assert all(batch.weights is not None for batch in batches)
    means = [losses.weighted_mean(irregular(batch), batch.weights).item() for batch in batches]
    expected = losses.weighted_mean(irregular(whole), whole.weights).item()
    assert np.mean(means) == pytest.approx(expected, rel=1e-6)
    if batch_size is not None:
        assert len({len(batch.advantages) for batch in batches}) > 1
        if aggregation == "step":
            assert np.mean([irregular(batch).mean() for batch in batches]) != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_whole_trajectories_of_one_step_are_dealt_out_like_transitions(buffer: str):
    model = make_id_model(buffer, 3, dict(length=lambda env, episode: 1)).learn(24)
    passes = []
    for whole_trajectories in (False, True):
        np.random.seed(3)
        passes.append(list(model.rollout_buffer.get(8, whole_trajectories)))
    assert [len(batch.advantages) for batch in passes[1]] == [8, 8, 8]
    for plain, whole in zip(*passes, strict=True):
        assert th.equal(plain.observations, whole.observations)
        assert th.equal(plain.actions, whole.actions)
        assert th.equal(plain.old_log_prob, whole.old_log_prob)
        assert th.equal(plain.advantages, whole.advantages)
        assert whole.weights is not None and whole.weights.tolist() == [1.0] * 8
        assert plain.weights is None and plain.trajectories is None


# --- tied groups ------------------------------------------------------------------------------------------------------


def every_other_group_is_tied(id: Id) -> float:
    """In a single environment, consecutive episodes make a group: the episodes 2 and 3, 6 and 7, ... all earn nothing."""
    return 0.0 if id[1] % 4 >= 2 else float(np.sin(3 * id[1] + 7 * id[2]))


def assert_same_training(recorder: Recorder, other: Recorder) -> None:
    """All updates were the same, bit for bit, and so are the policies that they made."""
    for update, other_update in zip(recorder.updates, other.updates, strict=True):
        assert {id: sample[:2] for id, sample in update.items()} == {id: sample[:2] for id, sample in other_update.items()}
    for weights, other_weights in zip(recorder.weights, other.weights, strict=True):
        assert th.equal(weights, other_weights)
    assert any(recorder.updates)
    assert not th.equal(recorder.weights[0], recorder.weights[-1])


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("n_steps", ROLLOUT_LENGTHS)
def test_skipped_groups_are_as_if_they_had_never_been_sampled(buffer: str, scale: A.Scale, n_steps: int):
    formula: Callable[..., np.ndarray] = {
        "outcome": A.outcome_advantages,
        "process": A.process_advantages,
        "return_to_go": lambda r, n, g, scale: A.return_to_go_advantages(r, n, g, GAMMA, scale),
        "stepwise": lambda r, n, g, scale: A.stepwise_advantages(r, n, g, GAMMA, scale),
    }[buffer]
    env = dict(length=lambda env, episode: 3 + (5 * episode) % 4, reward=every_other_group_is_tied)
    kwargs: dict[str, Any] = dict(n_envs=1, n_steps=n_steps, n_rollouts=100 // n_steps, env=env, learning_rate=0.0)
    kept = record(buffer, rollout_buffer_kwargs=dict(scale=scale), **kwargs)
    skipped = record(buffer, rollout_buffer_kwargs=dict(scale=scale, tied_groups="skip"), **kwargs)
    assert len(skipped.trained_on) < len(kept.trained_on)
    assert set(skipped.trained_on.values()) == {1}
    for update, skipped_update in zip(kept.updates, skipped.updates, strict=True):
        assert set(skipped_update) == {id for id in update if id[1] % 4 < 2}
        trajectories = list(by_start(skipped, skipped_update).values())
        if trajectories:
            ids = [id for trajectory in trajectories for id in trajectory]
            rewards = np.array([skipped.seen[id].reward for id in ids])
            lengths = np.array([len(trajectory) for trajectory in trajectories])
            expected = formula(rewards, lengths, np.arange(len(lengths)) // 2, scale)
            np.testing.assert_allclose([skipped_update[id].advantage for id in ids], expected, rtol=1e-4, atol=1e-6)
        for id, sample in skipped_update.items():
            assert sample.log_prob == skipped.seen[id].log_prob
            np.testing.assert_array_equal(sample.action, skipped.seen[id].action)


def test_groups_tied_reports_the_fraction_before_any_is_skipped():
    # Groups of 1 and 3 steps; the second of three is tied
    env = scripted((1,), (0, 0, 3), (2,), (0, 2, 0), (1,), (0, 0, 3), ())
    recorder = record("outcome", 1, 2, n_steps=12, n_rollouts=1, env=env, rollout_buffer_kwargs=dict(tied_groups="skip"))
    assert figures(recorder, "groups_completed", "groups_tied") == [(3, pytest.approx(1 / 3))]
    assert {id[1] for id in recorder.updates[0]} == {0, 1, 4, 5}
    assert recorder.metrics[0]["train/advantage_mean"] == pytest.approx(0.5)
    assert recorder.metrics[0]["train/advantage_std"] == pytest.approx(np.sqrt(0.75))


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_where_no_group_is_tied_skipping_changes_nothing(buffer: str):
    kept = record(buffer, n_steps=25)
    skipped = record(buffer, n_steps=25, rollout_buffer_kwargs=dict(tied_groups="skip"))
    assert {metrics.get("rollout/groups_tied") for metrics in kept.metrics} == {0.0}
    assert_same_training(kept, skipped)
    assert kept.metrics == skipped.metrics


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_where_all_groups_are_tied_skipping_makes_no_update(buffer: str):
    recorder = record(
        buffer,
        n_rollouts=3,
        env=dict(length=lambda env, episode: 1, reward=alike),
        rollout_buffer_kwargs=dict(tied_groups="skip"),
    )
    assert [len(update) for update in recorder.updates] == [0, 0, 0]
    assert recorder.n_updates == [0, 0, 0]
    assert th.equal(recorder.weights[0], recorder.weights[-1])
    assert figures(recorder, "groups_completed", "groups_tied", "transitions_waiting") == [(12, 1, 0)] * 3


def test_with_tied_groups_skipped_a_stopped_run_trains_on_each_transition_at_most_once():
    recorder = Recorder(stop_after=43)
    env = dict(reward=lambda id: float(id[1] % 3 == 0))
    model = make_id_model("outcome", 3, env, rollout_buffer_kwargs=dict(tied_groups="skip"))
    model.learn(1000, callback=recorder)
    model.learn(500, callback=recorder, reset_num_timesteps=False)
    assert set(recorder.trained_on.values()) == {1}
    assert_whole_groups(recorder, 2)
    for update in recorder.updates:
        ends = by_start(recorder, update).values()
        assert all(update[ids[0]].advantage != 0.0 for ids in ends)
    fractions = [fraction for (fraction,) in figures(recorder, "groups_tied") if fraction is not None]
    assert 0.0 < np.mean(fractions) < 1.0


# --- reward components ------------------------------------------------------------------------------------------------

Components = Callable[[Id], Any]


class ComponentEnv(IdEnv):
    """
    Reports reward components, and a reward that has nothing to do with them.

    :param index: of the environment
    :param components: what each step reports, a function of the observation
    :param kwargs: see :class:`IdEnv`
    """

    def __init__(self, index: int, components: Components, **kwargs: Any):
        super().__init__(index, **{"reward": lambda id: 1e3 * np.sin(id[0] + id[2]), **kwargs})
        self.components = components

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        components = self.components(tuple(self._observe().astype(int)))
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"reward_components": components}


def component_envs(n_envs: int, components: Components, **kwargs: Any) -> list[Callable[[], gym.Env]]:
    return [lambda index=index: ComponentEnv(index, components, **kwargs) for index in range(n_envs)]  # type: ignore[misc]


def record_components(
    components: Components,
    buffer: str = "outcome",
    n_envs: int = 3,
    n_steps: int = 8,
    n_rollouts: int = 10,
    env: dict[str, Any] | None = None,
    vec_env: Callable[[list[Callable[[], gym.Env]]], VecEnv] = DummyVecEnv,
    stop_after: int = 0,
    **buffer_kwargs: Any,
) -> Recorder:
    recorder = Recorder(stop_after)
    envs = vec_env(component_envs(n_envs, components, **(env or {})))
    model = make_model(envs, buffer, share_starts=False, n_steps=n_steps, rollout_buffer_kwargs=buffer_kwargs)
    if stop_after:
        model.learn(10**6, callback=recorder)
    model.learn(n_rollouts * n_steps * n_envs, callback=recorder, reset_num_timesteps=not stop_after)
    return recorder


def progress(id: Id) -> float:
    """Multiples of 1/8, whose sums are exact."""
    return ((3 * id[0] + 5 * id[1] + 7 * id[2]) % 17) / 8


def energy(id: Id) -> float:
    return ((2 * id[0] + 3 * id[1] + 11 * id[2]) % 13) / 4


def both(id: Id) -> dict[str, Any]:
    return {"progress": progress(id), "energy": energy(id), "style": "none", "more": float("nan")}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("n_steps", ROLLOUT_LENGTHS)
def test_the_sum_of_components_is_trained_on_as_if_it_were_the_reward(buffer: str, n_steps: int):
    # What the environment reports beyond the components named, and its reward, are not looked at
    recorder = record_components(both, buffer, n_steps=n_steps, reward_weights={"energy": -0.5, "progress": 2})
    rewarded = record(buffer, n_steps=n_steps, n_rollouts=10, env=dict(reward=lambda id: 2 * progress(id) - 0.5 * energy(id)))
    assert_same_training(recorder, rewarded)
    assert recorder.metrics == rewarded.metrics


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_single_component_of_weight_one_is_the_reward(buffer: str, aggregation: str):
    def reward(id: Id) -> float:
        return float(np.sin(3 * id[0] + 5 * id[1] + 7 * id[2]))

    recorder = record_components(
        lambda id: {"only": reward(id)}, buffer, reward_weights={"only": 1.0}, component_aggregation=aggregation
    )
    assert_same_training(recorder, record(buffer, n_rollouts=10, env=dict(reward=reward)))


#: Two groups of two. The second member does better in ``progress``. In ``energy`` it does worse in the first group, and as
#: well as its peer in the second.
PROGRESS_OF_EPISODES = ((1.0, 0.0), (1.0, 1.0, 1.0), (4.0,), (2.0, 6.0))
ENERGY_OF_EPISODES = ((2.0, 3.0), (0.0, 0.0, 2.0), (1.0,), (0.0, 1.0))


def judge_episodes(n_steps: int, **kwargs: Any) -> list[float]:
    """:return: the advantage of each of the four episodes, in which all steps have the same"""
    recorder = record_components(
        lambda id: {"progress": PROGRESS_OF_EPISODES[id[1]][id[2]], "energy": ENERGY_OF_EPISODES[id[1]][id[2]]},
        n_envs=1,
        n_steps=n_steps,
        n_rollouts=8 // n_steps,
        env=dict(length=lambda env, episode: len(PROGRESS_OF_EPISODES[episode]) if episode < 4 else 1),
        **kwargs,
        reward_weights={"progress": 2, "energy": 0.5},
    )
    judged: dict[int, set[float]] = {}
    for update in recorder.updates:
        for id, sample in update.items():
            judged.setdefault(id[1], set()).add(sample.advantage)
    assert [len(judged[episode]) for episode in range(4)] == [1] * 4
    return [judged[episode].pop() for episode in range(4)]


@pytest.mark.parametrize(
    ("scale", "aggregation", "advantages"),
    [
        # progress: -1 and 1 in both groups; energy: 1 and -1, then none
        pytest.param("group", "normalize_then_sum", [-1.5, 1.5, -2, 2], id="by group, normalised first"),
        # The sums are 4.5, 7, 8.5 and 16.5
        pytest.param("group", "sum_then_normalize", [-1, 1, -1, 1], id="by group, summed first"),
        pytest.param("none", "normalize_then_sum", [-1.25, 1.25, -4, 4], id="unscaled, normalised first"),
        pytest.param("none", "sum_then_normalize", [-1.25, 1.25, -4, 4], id="unscaled, summed first"),
    ],
)
@pytest.mark.parametrize(
    "n_steps", [pytest.param(2, id="components wait"), pytest.param(8, id="components of a single rollout")]
)
def test_components_are_judged_on_their_own_or_in_sum(scale: str, aggregation: str, advantages: list[float], n_steps: int):
    actual = judge_episodes(n_steps, scale=scale, component_aggregation=aggregation)
    assert actual == pytest.approx(advantages, rel=1e-6)


def test_each_component_has_its_own_scale_over_the_batch():
    actual = judge_episodes(8, scale="batch", component_aggregation="normalize_then_sum")
    # progress is -1, 1, -2 and 2 above the mean of its group, energy 1.5, -1.5, 0 and 0
    progress_scale, energy_scale = np.sqrt((1 + 1 + 4 + 4) / 4), np.sqrt((2.25 + 2.25) / 4)
    first, second = -2 / progress_scale + 0.75 / energy_scale, -4 / progress_scale
    assert actual == pytest.approx([first, -first, second, -second], rel=1e-6)


def unlike(id: Id) -> dict[str, float]:
    return {"progress": float(np.sin(3 * id[0] + 5 * id[1] + 7 * id[2])), "energy": float(np.cos(2 * id[1] + 3 * id[2]))}


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize(
    ("aggregation", "is_invariant"),
    [pytest.param("normalize_then_sum", True, id="normalised first"), pytest.param("sum_then_normalize", False, id="summed")],
)
def test_the_scale_of_a_component_matters_only_in_a_sum(buffer: str, aggregation: str, is_invariant: bool):
    def record_scaled(factor: float) -> Recorder:
        return record_components(
            lambda id: {**unlike(id), "energy": factor * unlike(id)["energy"]},
            buffer,
            reward_weights={"progress": 1.0, "energy": 0.5},
            component_aggregation=aggregation,
        )

    pairs = [
        (sample.advantage, scaled[id].advantage)
        for update, scaled in zip(record_scaled(1.0).updates, record_scaled(1000.0).updates, strict=True)
        for id, sample in update.items()
    ]
    assert len(pairs) > 100
    plain, scaled_up = np.transpose(pairs)
    assert np.allclose(plain, scaled_up, rtol=1e-4, atol=1e-4) == is_invariant


@pytest.mark.parametrize("stop_after", STOPS)
def test_components_wait_like_the_transitions_they_belong_to(stop_after: int):
    recorder = record_components(
        unlike,
        n_steps=8,
        stop_after=stop_after,
        scale="none",
        component_aggregation="normalize_then_sum",
        reward_weights={"progress": 1.0, "energy": 2.0},
    )
    assert any({recorder.seen[id].rollout for id in update} - {rollout} for rollout, update in enumerate(recorder.updates))
    for update in filter(None, recorder.updates):
        trajectories = by_start(recorder, update)
        returns = {
            start: sum(unlike(id)["progress"] + 2 * unlike(id)["energy"] for id in ids) for start, ids in trajectories.items()
        }
        for start, ids in trajectories.items():
            above_mean = 0.5 * (returns[start] - returns[start ^ 1])  # the other member of a group of two
            assert [update[id].advantage for id in ids] == pytest.approx([above_mean] * len(ids), abs=1e-5)


def test_a_group_in_which_the_components_cancel_out_is_tied():
    recorder = record_components(
        lambda id: {"progress": float(id[1]), "energy": 5.0 - id[1]},
        n_envs=1,
        env=dict(length=lambda env, episode: 1),
        n_rollouts=1,
        component_aggregation="normalize_then_sum",
        reward_weights={"progress": 1.0, "energy": 1.0},
        tied_groups="skip",
    )
    assert figures(recorder, "groups_completed", "groups_tied") == [(4, 1)]
    assert recorder.updates == [{}]


@pytest.mark.parametrize(
    "vec_env",
    [
        pytest.param(lambda fns: SubprocVecEnv(fns, start_method="fork"), id="SubprocVecEnv"),
        pytest.param(lambda fns: VecNormalize(DummyVecEnv(fns), norm_obs=False), id="VecNormalize"),
        pytest.param(
            lambda fns: VecNormalize(SubprocVecEnv(fns, start_method="fork"), norm_obs=False),
            id="VecNormalize over SubprocVecEnv",
        ),
    ],
)
def test_components_arrive_as_they_were_reported_through_wrappers(vec_env: Any):
    kwargs: dict[str, Any] = dict(reward_weights={"progress": 2.0, "energy": -0.5}, scale="none", n_rollouts=5)
    venvs: list[VecEnv] = []

    def build(fns: list[Callable[[], gym.Env]]) -> VecEnv:
        venvs.append(vec_env(fns))
        return venvs[-1]

    recorder = record_components(both, vec_env=build, **kwargs)
    venvs[0].close()
    reward = dict(reward=lambda id: 2 * progress(id) - 0.5 * energy(id))
    assert_same_training(recorder, record("outcome", n_rollouts=5, env=reward, rollout_buffer_kwargs=dict(scale="none")))


@pytest.mark.parametrize(
    ("components", "message"),
    [
        pytest.param(None, r"'progress', 'energy'.*environment 1 returned None as info\['reward_components'\]", id="none"),
        pytest.param([1.0, 2.0], r"environment 1 returned \[1.0, 2.0\] .*must be a mapping", id="a list"),
        pytest.param(3.0, r"environment 1 returned 3.0 .*must be a mapping", id="a number"),
        pytest.param(
            {"progress": 1.0, "style": 2.0},
            r"Environment 1 .* without \['energy'\].*names \['progress', 'energy'\].*reports \['progress', 'style'\]",
            id="one missing",
        ),
        pytest.param({}, r"Environment 1 .* without \['progress', 'energy'\].*reports \[\]", id="all missing"),
        pytest.param(
            {"progress": 1.0, "energy": np.array([1.0, 2.0])}, r"Environment 1 .*array\(\[1., 2.\]\).*'energy'", id="no scalar"
        ),
        pytest.param({"progress": np.nan, "energy": 1.0}, r"Environment 1 returned nan .*'progress'", id="NaN"),
        pytest.param({"progress": 1.0, "energy": -np.inf}, r"Environment 1 returned -inf .*'energy'", id="infinite"),
        pytest.param(
            {"progress": 1e39, "energy": 1.0}, r"Environment 1 returned 1e\+39 .*'progress'", id="too large to store"
        ),
        pytest.param(
            {"progress": 3e38, "energy": 3e38}, r"weighted sums .*inf|weighted sums .*4.5e\+38", id="too large a sum"
        ),
        pytest.param({"progress": "2", "energy": 1.0}, r"Environment 1 returned '2' .*'progress'", id="text"),
        pytest.param({"progress": None, "energy": 1.0}, r"Environment 1 returned None .*'progress'", id="no number"),
    ],
)
def test_components_that_are_not_reported_as_numbers_are_refused_and_quoted(components: Any, message: str):
    def sometimes(id: Id) -> Any:
        return components if id[0] == 1 and id[2] == 3 else {"progress": 1.0, "energy": 1.0}

    with pytest.raises(ValueError, match=message):
        record_components(sometimes, n_envs=2, reward_weights={"progress": 1.0, "energy": 0.5})


def test_an_environment_without_components_is_told_of_the_key():
    with pytest.raises(ValueError, match=r"environment 0 returned None as info\['reward_components'\]"):
        record("outcome", rollout_buffer_kwargs=dict(reward_weights={"progress": 1.0}))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(2, id="integer"),
        pytest.param(True, id="bool"),
        pytest.param(np.float32(0.5), id="numpy scalar"),
        pytest.param(np.array(3.0), id="array of no dimension"),
        pytest.param(np.array([3]), id="array of one entry"),
    ],
)
def test_a_component_is_any_single_number(number: Any):
    recorder = record_components(
        lambda id: {"progress": number if id[1] % 2 else 0.0},
        n_envs=1,
        env=dict(length=lambda env, episode: 1),
        n_rollouts=1,
        scale="none",
        reward_weights={"progress": 2.0},
    )
    for id, sample in recorder.updates[0].items():
        assert sample.advantage == (1 if id[1] % 2 else -1) * float(np.squeeze(number))


@pytest.mark.parametrize(
    ("reward_weights", "message"),
    [
        pytest.param({}, r"`reward_weights` must be a mapping .*not \{\}", id="empty"),
        pytest.param(["progress"], r"`reward_weights` must be a mapping .*not \['progress'\]", id="list"),
        pytest.param("progress", "`reward_weights` must be a mapping .*not 'progress'", id="text"),
        pytest.param({"progress": "1"}, r"`reward_weights\['progress'\]`.*not '1'", id="text for a weight"),
        pytest.param({"a": 1.0, "b": np.nan}, r"`reward_weights\['b'\]`.*not nan", id="NaN"),
        pytest.param({"a": np.inf}, r"`reward_weights\['a'\]`.*not inf", id="infinite"),
        pytest.param({"a": None}, r"`reward_weights\['a'\]`.*not None", id="None for a weight"),
        pytest.param({"a": True}, r"`reward_weights\['a'\]`.*not True", id="bool"),
    ],
)
@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_reward_weights_that_are_no_weights_are_refused_and_quoted(buffer: str, reward_weights: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_model(SpaceEnv(VECTOR), buffer, rollout_buffer_kwargs=dict(reward_weights=reward_weights))


def test_the_kernel_baseline_can_see_the_actors_hidden_layer_instead_of_the_observations(monkeypatch):
    model = GRPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, seed=0, device="cpu", rollout_buffer_kwargs=dict(actor_features=True),
        policy_kwargs=dict(net_arch=[32, 16]),
    )  # fmt: skip
    seen: list[np.ndarray] = []
    hidden: list[np.ndarray] = []
    buffer = model.rollout_buffer
    assert isinstance(buffer, KernelRolloutBuffer)
    observe = buffer.baseline.observe

    def spy(inputs: np.ndarray) -> None:
        seen.append(inputs)
        observations = th.as_tensor(np.reshape(buffer.observations, (64, 4)))  # type: ignore[arg-type]
        with th.no_grad():
            hidden.append(model.policy.policy_net(observations).double().numpy())
        observe(inputs)

    monkeypatch.setattr(buffer.baseline, "observe", spy)
    model.learn(128)
    assert [inputs.shape for inputs in seen] == [(64, 16), (64, 16)]
    np.testing.assert_array_equal(seen, hidden)
    assert np.isfinite(buffer.metrics["train/explained_variance"])


def test_a_fit_of_the_first_commits_is_a_regression_on_observations():
    def make(**kwargs: Any) -> KernelRolloutBuffer:
        return KernelRolloutBuffer(8, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), **kwargs)

    state = make(fit="regression").get_state()
    del state["options"], state["reward_range"]
    for other in (dict(fit="lstd"), dict(fit="regression", actor_features=True)):
        with pytest.warns(UserWarning, match="its fit begins afresh"):
            make(**other).set_state(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(fit="regression").set_state(state)


@pytest.mark.parametrize("saved, present", [(False, True), (True, False)])
def test_a_fit_to_other_inputs_is_not_taken_over(saved, present):
    def make(actor_features: bool) -> KernelRolloutBuffer:
        return KernelRolloutBuffer(8, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), actor_features=actor_features)

    state = make(saved).get_state()
    with pytest.warns(UserWarning, match=f"'actor_features': {saved}.*'actor_features': {present}"):
        make(present).set_state(state)
