"""The rollout buffers, watched through a callback while GRPO learns in small environments."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import ENDLESS, AnyEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from sb3_grpo import GRPO, losses
from sb3_grpo import advantages as A
from sb3_grpo.buffers import (
    BUFFERS,
    CompleteGroupRolloutBuffer,
    Defaults,
    GroupRolloutBuffer,
    GroupRolloutBufferSamples,
    KernelRolloutBuffer,
    OutcomeRolloutBuffer,
    StepwiseRolloutBuffer,
    resolve_buffer_class,
)
from sb3_grpo.fit_inputs import MAX_INPUTS
from sb3_grpo.policies import MlpPolicy
from sb3_grpo.starts import Ledger

GAMMA = 0.9
COMPLETE_GROUP_BUFFERS = ["outcome", "process", "return_to_go", "stepwise"]
#: One of each way to use a rollout.
BOTH_WAYS = pytest.mark.parametrize("buffer", ["kernel", "outcome"])
#: Episodes of ``mixed`` have 1 to 11 steps.
ROLLOUT_LENGTHS = [pytest.param(4, id="rollouts shorter than episodes"), pytest.param(25, id="rollouts longer than episodes")]
DISCRETE = spaces.Discrete(2)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
BOARD = spaces.Box(0.0, 1.0, (3, 9, 9), np.float32)

#: Environment, episode and step: what the observations of :class:`IdEnv` say.
Id = tuple[int, ...]
EpisodeLength = Callable[[int, int], int]


def mixed(env: int, episode: int) -> int:
    return 1 + (7 * env + 5 * episode + 2) % 11


def endless(env: int, episode: int) -> int:
    return 10**9


def irregular(id: Id) -> float:
    return float(np.sin(3 * id[0] + 5 * id[1] + 7 * id[2]))


class IdEnv(gym.Env):
    """
    Each observation occurs once: it says in which environment, episode and step it was made.

    :param index: Index of the environment
    :param length: Steps of an episode, a function of environment and episode
    :param reward: Reward of a step, a function of the observation
    :param components: Reward components of a step, a function of the observation; ``None`` for none
    :param action_space: Action space
    """

    def __init__(
        self,
        index: int,
        length: EpisodeLength = mixed,
        reward: Callable[[Id], float] = irregular,
        components: Callable[[Id], Any] | None = None,
        action_space: spaces.Space = DISCRETE,
    ):
        # Double precision shows whether observations are stored as they come
        self.observation_space = spaces.Box(0.0, 1e9, (3,), np.float64)
        self.action_space = action_space
        self.index, self.length, self.reward, self.components = index, length, reward, components
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        id = id_of(self._observe())
        self.step_count += 1
        info = {} if self.components is None else {"reward_components": self.components(id)}
        return self._observe(), self.reward(id), self.step_count == self.length(self.index, self.episode), False, info

    def _observe(self) -> np.ndarray:
        return np.array([self.index, self.episode, self.step_count], dtype=np.float64)


class Seen(NamedTuple):
    """One transition, as a callback saw it being collected."""

    rollout: int
    group: int
    member: int
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

    :param stop_after: Step at which training is stopped, once; 0 for never
    """

    def __init__(self, stop_after: int = 0):
        super().__init__()
        self.stop_after = stop_after
        self.rollout = 0
        self.seen: dict[Id, Seen] = {}
        self.updates: list[dict[Id, Sample]] = []
        self.metrics: list[dict[str, float]] = []
        self.group_returns: list[list[list[float]]] = []
        self.weights: list[th.Tensor] = []
        self.log_prob_changes: list[float] = []

    def _on_rollout_start(self) -> None:
        self.weights.append(th.nn.utils.parameters_to_vector(self.model.policy.parameters()).detach().clone())

    def _on_step(self) -> bool:
        position = self.locals["position"]
        for env, obs in enumerate(observations_of(self.model)):
            key = id_of(obs)
            assert key not in self.seen and position.steps[env] == key[2]
            self.seen[key] = Seen(
                self.rollout,
                int(position.groups[env]),
                int(position.members[env]),
                float(self.locals["rewards"][env]),
                bool(self.locals["dones"][env]),
                float(self.locals["log_probs"][env]),
                np.copy(self.locals["actions"][env]),
                np.copy(self.locals["clipped_actions"][env]),
            )
        return self.n_calls != self.stop_after

    def _on_rollout_end(self) -> None:
        update = whole_update(self.model)
        ids = ids_of(update)
        columns = (update.old_log_prob.tolist(), update.advantages.tolist(), update.actions.numpy())
        self.updates.append({id: Sample(*sample) for id, *sample in zip(ids, *columns, strict=True)})
        assert len(self.updates[-1]) == len(ids) == buffer_of(self.model).n_samples
        trajectories = [id[:2] for id in ids]
        labels = set(zip(update.trajectories.tolist(), trajectories, strict=True))
        assert len(labels) == len(set(update.trajectories.tolist())) == len(set(trajectories))
        self.metrics.append(dict(buffer_of(self.model).metrics))
        self.group_returns.append(list(buffer_of(self.model).group_returns.values()))
        old = [i for i, id in enumerate(ids) if self.seen[id].rollout < self.rollout]
        if old:
            with th.no_grad():
                now, _ = grpo(self.model).policy.evaluate_actions(*update.take(th.tensor(old))[:2])
            self.log_prob_changes += (now - update.old_log_prob[old]).tolist()
        self.rollout += 1

    @property
    def trained_on(self) -> Counter[Id]:
        return Counter(id for update in self.updates for id in update)

    @property
    def made_updates(self) -> list[bool]:
        """Whether the policy changed after each rollout but the last."""
        return [not th.equal(before, after) for before, after in zip(self.weights, self.weights[1:], strict=False)]


def grpo(model: Any) -> GRPO:
    assert isinstance(model, GRPO)
    return model


def buffer_of(model: Any) -> GroupRolloutBuffer:
    return grpo(model).rollout_buffer


def observations_of(model: Any) -> Any:
    """:return: The observations in which the environments are about to act"""
    return grpo(model)._last_obs


def id_of(observation: Any) -> Id:
    return tuple(int(part) for part in observation)


def ids_of(samples: GroupRolloutBufferSamples) -> list[Id]:
    return [id_of(obs) for obs in samples.observations]


def whole_update(model: Any) -> GroupRolloutBufferSamples:
    """:return: All transitions of the last rollout's update, with no effect on the random numbers of the training"""
    state = np.random.get_state()
    (update,) = buffer_of(model).get(batch_size=None)
    np.random.set_state(state)
    return update


def make_model(env: Any, buffer: Any = "kernel", policy: Any = "MlpPolicy", n_steps: int = 8, **kwargs: Any) -> GRPO:
    small: dict[str, Any] = dict(
        batch_size=n_steps, n_epochs=1, gamma=GAMMA, learning_rate=0.05, policy_kwargs=dict(net_arch=[8]), seed=0, device="cpu"
    )
    return GRPO(policy, env, n_steps=n_steps, rollout_buffer_class=buffer, **{**small, **kwargs})


def make_id_model(
    buffer: Any,
    n_envs: int,
    env: dict[str, Any] | None = None,
    vec_env: Callable[[list[Callable[[], gym.Env]]], VecEnv] = DummyVecEnv,
    **kwargs: Any,
) -> GRPO:
    """:return: A model for :class:`IdEnv`, which has no two equal starts"""
    envs = vec_env([lambda index=index: IdEnv(index, **(env or {})) for index in range(n_envs)])  # type: ignore[misc]
    return make_model(envs, buffer, share_starts=False, **kwargs)


def record(
    buffer: Any, n_envs: int = 3, group_size: int = 2, n_steps: int = 8, n_rollouts: int = 15, **kwargs: Any
) -> Recorder:
    recorder = Recorder()
    model = make_id_model(buffer, n_envs, group_size=group_size, n_steps=n_steps, **kwargs)
    model.learn(n_rollouts * n_steps * n_envs, callback=recorder)
    assert len(recorder.updates) == n_rollouts
    return recorder


def by_trajectory(recorder: Recorder, ids: Any) -> dict[tuple[int, int], list[Id]]:
    """:return: The transitions of each trajectory, in order, by its group and member"""
    trajectories: dict[tuple[int, int], list[Id]] = {}
    for group, member, id in sorted((recorder.seen[id].group, recorder.seen[id].member, id) for id in ids):
        trajectories.setdefault((group, member), []).append(id)
    return trajectories


def assert_whole_groups(recorder: Recorder, group_size: int) -> None:
    """Each update consists of groups that have all their members, each from its first step to its end."""
    for update in recorder.updates:
        trajectories = by_trajectory(recorder, update)
        for ids in trajectories.values():
            assert [id[2] for id in ids] == list(range(len(ids)))
            assert [recorder.seen[id].done for id in ids] == [False] * (len(ids) - 1) + [True]
        assert set(Counter(group for group, _ in trajectories).values()) <= {group_size}


def assert_accounted_for(recorder: Recorder) -> None:
    """Each transition was trained on once, waits, or was dropped."""
    last = recorder.metrics[-1]
    assert set(recorder.trained_on.values()) <= {1}
    n_untouched = last["rollout/transitions_waiting"] + last["rollout/transitions_dropped"]
    assert len(recorder.trained_on) + n_untouched == len(recorder.seen)


def figures(recorder: Recorder, *names: str) -> list[tuple[float | None, ...]]:
    """:return: Metrics of each rollout, ``None`` where one is missing"""
    return [tuple(metrics.get(f"rollout/{name}") for name in names) for metrics in recorder.metrics]


def scripted(*rewards: tuple[float, ...]) -> dict[str, Any]:
    """:return: Arguments of :class:`IdEnv`: the rewards of each episode, in each environment; ``()`` is reset to at the end"""
    return dict(length=lambda env, episode: len(rewards[episode]), reward=lambda id: rewards[id[1]][id[2]])


# --- complete groups: what enters an update ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n_envs", "group_size"), [(1, 2), (3, 2), (8, 4)])
@pytest.mark.parametrize("n_steps", ROLLOUT_LENGTHS)
def test_an_update_is_all_the_groups_that_ended_in_its_rollout(n_envs: int, group_size: int, n_steps: int):
    recorder = record("outcome", n_envs, group_size, n_steps)
    assert_whole_groups(recorder, group_size)
    assert_accounted_for(recorder)
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == 0
    rollouts_of_ends = defaultdict(list)
    for transition in recorder.seen.values():
        if transition.done:
            rollouts_of_ends[transition.group].append(transition.rollout)
    for rollout, update in enumerate(recorder.updates):
        due = {group for group, ends in rollouts_of_ends.items() if len(ends) == group_size and max(ends) == rollout}
        assert {group for group, _ in by_trajectory(recorder, update)} == due
        assert recorder.metrics[rollout]["rollout/groups_completed"] == len(due)
    # Most have been trained on: only the groups of the last episodes wait
    assert len(recorder.trained_on) > 0.5 * len(recorder.seen)


def test_waiting_transitions_keep_the_log_probabilities_they_were_sampled_with():
    recorder = record("outcome", n_steps=4, learning_rate=0.3, normalize_observations=False)
    for update in recorder.updates:
        assert all(sample.log_prob == recorder.seen[id].log_prob for id, sample in update.items())
    # The policy has changed since: under it they are other ones
    assert len(recorder.log_prob_changes) > 20
    assert np.max(np.abs(recorder.log_prob_changes)) > 1e-3


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "outcome": A.outcome_advantages,
    "process": A.process_advantages,
    "return_to_go": lambda rewards, lengths, groups, scale: A.return_to_go_advantages(rewards, lengths, groups, GAMMA, scale),
    "stepwise": lambda rewards, lengths, groups, scale: A.stepwise_advantages(rewards, lengths, groups, GAMMA, scale),
}


def formula_of(recorder: Recorder, update: dict[Id, Sample], buffer: str, scale: str, **kwargs: Any) -> Any:
    """:return: The transitions of an update, and the advantage of each by the formula"""
    trajectories = by_trajectory(recorder, update)
    ids = [id for of_one in trajectories.values() for id in of_one]
    rewards = np.array([recorder.seen[id].reward for id in ids])
    lengths = np.array([len(of_one) for of_one in trajectories.values()])
    groups = np.unique([group for group, _ in trajectories], return_inverse=True)[1]
    return ids, FORMULAS[buffer](rewards, lengths, groups, scale, **kwargs)


@pytest.mark.parametrize(
    ("buffer", "scale", "buffer_kwargs", "kwargs"),
    [
        pytest.param("outcome", "group", dict(leave_one_out=True), dict(leave_one_out=True), id="outcome, leave one out"),
        pytest.param("outcome", "none", dict(scale="none"), {}, id="outcome, unscaled"),
        pytest.param("process", "batch", dict(scale="batch"), {}, id="process, by batch"),
        pytest.param("return_to_go", "group", {}, {}, id="return_to_go"),
        pytest.param("stepwise", "batch", {}, {}, id="stepwise"),
        pytest.param("stepwise", "group", dict(scale="group"), {}, id="stepwise, by group"),
    ],
)
def test_each_transition_gets_the_advantage_of_the_formula_unwhitened(
    buffer: str, scale: str, buffer_kwargs: dict[str, Any], kwargs: dict[str, Any]
):
    recorder = record(buffer, group_size=3, rollout_buffer_kwargs=buffer_kwargs, normalize_advantage=True)
    assert any(recorder.updates)
    for update in filter(None, recorder.updates):
        ids, expected = formula_of(recorder, update, buffer, scale, **kwargs)
        np.testing.assert_allclose([update[id].advantage for id in ids], expected, rtol=1e-4, atol=1e-6)


def test_a_rollout_in_which_no_group_ended_makes_no_update():
    # Episodes of 10 steps, two of which make a group: the first ends in the third rollout of 7
    recorder = record("outcome", n_envs=1, n_steps=7, n_rollouts=7, env=dict(length=lambda env, episode: 10))
    assert [len(update) for update in recorder.updates] == [0, 0, 20, 0, 0, 20, 0]
    assert recorder.made_updates == [False, False, True, False, False, True]
    assert figures(recorder, "groups_completed", "transitions_waiting", "transitions_waiting_age") == [
        (0, 7, 0), (0, 14, 1), (1, 1, 0), (0, 8, 1), (0, 15, 2), (1, 2, 0), (0, 9, 1),
    ]  # fmt: skip
    assert not any(name.startswith("train/") for name in recorder.metrics[0])


# --- complete groups: what never ends ---------------------------------------------------------------------------------


def test_endless_episodes_are_warned_of_once_and_wait_within_bounds():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = record("outcome", env=dict(length=endless), rollout_buffer_kwargs=dict(max_waiting=100))
    (message,) = [str(warning.message) for warning in caught if "transitions wait" in str(warning.message)]
    assert "max_episode_steps" in message and "rollout_buffer_class='kernel'" in message
    waiting = [count for (count,) in figures(recorder, "transitions_waiting") if count is not None]
    assert waiting[:4] == [24, 48, 72, 96] and max(waiting) <= 100
    assert not any(recorder.updates)
    assert_accounted_for(recorder)


def fill(
    buffer: CompleteGroupRolloutBuffer, ledger: Ledger, lengths: list[int], lanes: list[int], n_rollouts: int
) -> Iterator[Counter[Id]]:
    """
    Give a buffer rollouts that a ledger records.

    :param buffer: The buffer
    :param ledger: The ledger
    :param lengths: Number of steps of the episodes of each environment
    :param lanes: Worker of each environment
    :param n_rollouts: Number of rollouts
    :return: After each rollout, the number of transitions in its update, by group and member of their trajectory
    """
    policy, n_envs = MlpPolicy(VECTOR, DISCRETE, lambda _: 0.0), len(lengths)
    if len(ledger.position.steps) == 0:
        ledger.begin_all(lanes)
    for _ in range(n_rollouts):
        buffer.reset()
        for _ in range(buffer.buffer_size):
            before, parts = ledger.position, ledger.split()
            done = before.steps + 1 == lengths
            for lane, part in enumerate(parts):
                for env in np.flatnonzero(done[np.equal(lanes, lane)]).tolist():
                    part.restart(env)
                part.advance()
            ledger.join(parts)
            observations = np.stack(before, axis=1)  # which name the trajectory
            buffer.add(observations, np.zeros(n_envs), np.ones(n_envs), done, th.zeros(n_envs), before, [{}] * n_envs)
        buffer.finish_rollout(observations, policy, ledger.open_groups())
        assert buffer._dropped_groups <= ledger.open_groups().keys()
        yield Counter(id_of(obs)[:2] for update in buffer.get() for obs in update.observations)


def test_the_oldest_groups_are_dropped_whichever_worker_has_them_and_stay_dropped_until_they_are_closed():
    # Of the first worker, one environment has episodes of 20 steps and the other one of a single step, so that each long
    # episode shares a group with a short one; groups of the second worker are two episodes of five steps
    buffer, ledger = OutcomeRolloutBuffer(1, VECTOR, DISCRETE, n_envs=3, max_waiting=20), Ledger(2, seed=0)
    with pytest.warns(UserWarning, match="transitions wait"):
        updates = list(fill(buffer, ledger, [20, 1, 5], [0, 0, 1], n_rollouts=50))
    # When the long episode has waited for 15 steps and the second worker's group for five, the former is the oldest
    lengths = [length for update in updates for length in update.values()]
    assert (lengths.count(20), lengths.count(5)) == (0, 10)
    assert buffer.dropped == 2 * (20 + 1)
    assert sum(lengths) + buffer.dropped + buffer.metrics["rollout/transitions_waiting"] == 3 * 50


def test_a_group_is_complete_when_the_ledger_says_so_also_if_the_size_of_groups_changes():
    buffer, ledger = OutcomeRolloutBuffer(4, VECTOR, DISCRETE, n_envs=2, group_size=2), Ledger(2, seed=0)
    members: dict[int, list[int]] = {}
    for size in (2, 5, 3):
        ledger.group_size = size
        for update in fill(buffer, ledger, [3, 7], [0, 0], n_rollouts=15):
            assert set(update.values()) <= {3, 7}  # whole trajectories
            assert not members.keys() & {group for group, _ in update}
            for group, member in sorted(update):
                members.setdefault(group, []).append(member)
            sizes = Counter(group for group, _ in update).values()
            assert sorted(map(len, buffer.group_returns.values())) == sorted(sizes)
    # Groups that had begun before a change keep their size
    assert [each for each, _ in groupby(members[group] for group in sorted(members))] == [[0, 1], [*range(5)], [*range(3)]]
    assert buffer.dropped == 0


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
    buffer = OutcomeRolloutBuffer(n_steps, VECTOR, DISCRETE, n_envs=n_envs, group_size=group_size, horizon=horizon)
    assert buffer.max_waiting == bound


# --- complete groups: stopping and starting ---------------------------------------------------------------------------

STOPS = [
    pytest.param(43, id="in the middle of a rollout"),
    pytest.param(48, id="at the last step of a rollout"),
    pytest.param(41, id="after the first step of a rollout"),
]


@pytest.mark.parametrize("stop_after", STOPS)
def test_a_run_that_was_stopped_goes_on_without_losing_a_transition(stop_after: int):
    recorder = Recorder(stop_after)
    model = make_id_model("outcome", n_envs=3)
    model.learn(1000, callback=recorder)
    assert model.num_timesteps == len(recorder.seen) == 3 * stop_after
    model.learn(500, callback=recorder, reset_num_timesteps=False)
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == 0
    assert_accounted_for(recorder)
    assert_whole_groups(recorder, 2)
    stopped_at = {id for id, transition in recorder.seen.items() if transition.rollout == (stop_after - 1) // 8}
    assert len(stopped_at & set(recorder.trained_on)) > 0


@pytest.mark.parametrize("stop_after", [*STOPS, pytest.param(0, id="never, after a whole rollout")])
def test_a_run_that_starts_afresh_drops_and_counts_what_waits(stop_after: int):
    recorder = Recorder(stop_after)
    model = make_id_model("outcome", n_envs=3)
    model.learn(6 * 24, callback=recorder)
    assert model.num_timesteps == 3 * (stop_after or 48)
    abandoned = set(recorder.seen) - set(recorder.trained_on)
    assert abandoned
    model.learn(10 * 24, callback=recorder, reset_num_timesteps=True)
    assert not abandoned & set(recorder.trained_on)
    assert recorder.metrics[-1]["rollout/transitions_dropped"] == len(abandoned)
    assert_accounted_for(recorder)
    assert_whole_groups(recorder, 2)


# --- the kernel buffer: what it is given ------------------------------------------------------------------------------


class TwoStates(gym.Env):
    """
    Two states, 0 and 1, of which each pays its number and the action chooses the next.

    :param observations: Space of observations, which have the lowest value everywhere in state 0 and the highest in state 1
    :param ending: Whether each step terminates the episode, truncates it, or neither
    """

    action_space = DISCRETE

    def __init__(self, observations: spaces.Space, ending: Literal["terminated", "truncated", "unfinished"]):
        self.observation_space = deepcopy(observations)
        self.ending = ending

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self._observe(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.state = float(self.state), int(action)
        return self._observe(self.observation_space), reward, self.ending == "terminated", self.ending == "truncated", {}

    def _observe(self, space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._observe(part) for key, part in space.items()}
        if isinstance(space, spaces.Discrete):
            return self.state
        return (space.high if self.state else space.low).copy()  # type: ignore[attr-defined]


#: How a step ends, and what is worth it to be in state 1 afterwards
FOLLOWING = {"terminated": 0.0, "truncated": GAMMA, "unfinished": GAMMA}
MANY_NUMBERS = spaces.Box(-1.0, 1.0, (MAX_INPUTS + 1,), np.float32)
CNN: dict[str, Any] = dict(features_extractor_kwargs=dict(features_dim=8))
COMBINED: dict[str, Any] = dict(features_extractor_kwargs=dict(cnn_output_dim=8), net_arch=[8])


@pytest.mark.parametrize(
    ("ending", "space", "policy", "policy_kwargs"),
    [
        *(pytest.param(ending, VECTOR, "MlpPolicy", {}, id=f"{ending}, Box") for ending in FOLLOWING),
        pytest.param("truncated", spaces.Dict(b=VECTOR, a=DISCRETE), "MultiInputPolicy", {}, id="truncated, Dict"),
        pytest.param("truncated", IMAGE, "CnnPolicy", CNN, id="truncated, image"),
        # Of a few features, all can be zero
        *(pytest.param(ending, BOARD, "CnnPolicy", {}, id=f"{ending}, board") for ending in FOLLOWING),
        pytest.param("truncated", MANY_NUMBERS, "MlpPolicy", {}, id="truncated, more numbers than a fit has inputs"),
    ],
)
def test_the_baseline_stands_for_what_follows_a_cut_and_nothing_follows_a_termination(
    ending: Literal["terminated", "truncated", "unfinished"], space: spaces.Space, policy: str, policy_kwargs: dict[str, Any]
):
    # Rollouts of one step, so that each transition is the last. The action that leads to state 1 is worth gamma more than the
    # other, unless the episode has terminated: then there is nothing to encode beyond the rollout
    n_envs = 256
    envs = DummyVecEnv([lambda: TwoStates(space, ending)] * n_envs)
    model = make_model(
        envs, "kernel", policy, 1, learning_rate=0.0, batch_size=n_envs, normalize_advantage=False, share_starts=False,
        policy_kwargs=policy_kwargs, rollout_buffer_kwargs=dict(horizon=64, bandwidth=0.5),
    ).learn(4 * n_envs)  # fmt: skip
    update = whole_update(model)
    assert len(update.advantages) == n_envs
    good = update.actions == 1
    assert (update.advantages[good].mean() - update.advantages[~good].mean()).item() == pytest.approx(
        FOLLOWING[ending], abs=0.15
    )


def test_normalize_advantage_whitens_the_kernel_buffers_update_and_metrics_are_those_before():
    # Without learning the two runs see the same
    raw = record("kernel", n_rollouts=3, learning_rate=0.0, normalize_advantage=False)
    whitened = record("kernel", n_rollouts=3, learning_rate=0.0, normalize_advantage=True)
    for update, whitened_update, metrics in zip(raw.updates, whitened.updates, raw.metrics, strict=True):
        advantages = np.array([update[id].advantage for id in update])
        expected = (advantages - advantages.mean()) / advantages.std()
        np.testing.assert_allclose([whitened_update[id].advantage for id in update], expected, rtol=1e-3, atol=1e-4)
        assert abs(advantages.mean()) > 1e-3 and abs(advantages.std() - 1.0) > 1e-2
        assert metrics["train/advantage_mean"] == pytest.approx(advantages.mean(), rel=1e-4)
        assert metrics["train/advantage_std"] == pytest.approx(advantages.std(), rel=1e-4)
    assert whitened.metrics == raw.metrics


# --- storage ----------------------------------------------------------------------------------------------------------


# --- minibatches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def learned() -> GRPO:
    """A model whose buffer holds an update of 24 transitions."""
    return make_id_model("kernel", 3).learn(24)


def assert_same_transitions(batch: GroupRolloutBufferSamples, whole: GroupRolloutBufferSamples) -> None:
    """The columns of the minibatch belong together."""
    rows = {id: i for i, id in enumerate(ids_of(whole))}
    expected = whole.take(th.tensor([rows[id] for id in ids_of(batch)]))
    for name in ("actions", "old_log_prob", "advantages", "trajectories"):
        assert th.equal(getattr(batch, name), getattr(expected, name))


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
    batches = list(learned.rollout_buffer.get(batch_size))
    assert [len(batch.advantages) for batch in batches] == sizes
    assert len({id for batch in batches for id in ids_of(batch)}) == 24
    for batch in batches:
        assert_same_transitions(batch, whole_update(learned))


@pytest.mark.parametrize("whole_trajectories", [False, True])
def test_the_order_of_a_pass_is_random_and_follows_numpys_seed(learned: GRPO, whole_trajectories: bool):
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        a_pass = learned.rollout_buffer.get(10, whole_trajectories)
        orders.append([id for batch in a_pass for id in ids_of(batch)])
    assert orders[0] == orders[1] != orders[2] and orders[0] != sorted(orders[0])


# --- minibatches of whole trajectories --------------------------------------------------------------------------------


def irregular_losses(batch: GroupRolloutBufferSamples) -> th.Tensor:
    """:return: In place of a loss, a function of the observations of :class:`IdEnv`"""
    return 1.0 + th.sin(batch.observations @ th.tensor([3.0, 5.0, 7.0], dtype=th.float64))  # type: ignore[operator]


@BOTH_WAYS
@pytest.mark.parametrize("aggregation", ["step", "trajectory", "constant"])
@pytest.mark.parametrize("batch_size", [1, 12, None])
def test_minibatches_of_whole_trajectories_have_them_all_once_and_losses_that_average_to_that_of_the_update(
    buffer: str, aggregation: str, batch_size: int | None
):
    # An update of many trajectories of 1 to 11 steps
    model = make_id_model(buffer, 3, n_steps=30, objective=dict(loss_aggregation=aggregation)).learn(90)
    whole = whole_update(model)
    batches = list(model.rollout_buffer.get(batch_size, whole_trajectories=True))
    assert sorted(id for batch in batches for id in ids_of(batch)) == sorted(ids_of(whole))
    homes: dict[Id, int] = {}
    for i, batch in enumerate(batches):
        assert_same_transitions(batch, whole)
        assert all(homes.setdefault(id[:2], i) == i for id in ids_of(batch))
    for batch in batches[:-1]:
        last = int((batch.trajectories == batch.trajectories[-1]).sum())
        assert batch_size is not None and len(batch.advantages) - last < batch_size <= len(batch.advantages)
    means = [losses.weighted_mean(irregular_losses(batch), batch.weights).item() for batch in batches]
    expected = losses.weighted_mean(irregular_losses(whole), whole.weights).item()
    assert np.mean(means) == pytest.approx(expected, rel=1e-6)
    if batch_size is not None and aggregation == "step":
        assert np.mean([irregular_losses(batch).mean() for batch in batches]) != pytest.approx(expected, rel=1e-4)


# --- weights in the loss ----------------------------------------------------------------------------------------------


def weights_by_episode(update: GroupRolloutBufferSamples) -> dict[int, Any]:
    """:return: The weights of the transitions of each episode in the update, from a single environment"""
    assert update.weights is not None and update.weights.dtype == th.float32
    weights: dict[int, Any] = defaultdict(list)
    for id, weight in sorted(zip(ids_of(update), update.weights.tolist(), strict=True)):
        weights[id[1]].append(pytest.approx(weight))
    return dict(weights)


def short_and_long(env: int, episode: int) -> int:
    """Episodes of 1, 3, 1, 3, ... steps, two of which make a group."""
    return (1, 3)[episode % 2]


@pytest.mark.parametrize(
    ("buffer", "aggregation", "horizon", "n_rollouts", "weights"),
    [
        # The group of episodes of 1 and 3 steps, 2 on average
        pytest.param("outcome", "trajectory", None, 1, {0: [2], 1: [2 / 3] * 3}, id="group, trajectory"),
        pytest.param("outcome", "constant", None, 1, {0: [2 / 5], 1: [2 / 5] * 3}, id="group, constant, no time limit"),
        pytest.param("outcome", "constant", 8, 1, {0: [2 / 8], 1: [2 / 8] * 3}, id="group, constant, time limit"),
        # The rollout has 1, 3 and, of the episode that goes on or not, 1 step, 5 / 3 on average
        pytest.param("kernel", "trajectory", None, 1, {0: [5 / 3], 1: [5 / 9] * 3, 2: [5 / 3]}, id="kernel, trajectory"),
        pytest.param(
            "kernel", "constant", 8, 1, {0: [5 / 24], 1: [5 / 24] * 3, 2: [5 / 24]}, id="kernel, constant, time limit"
        ),
        # The third rollout completes the group of the episodes 4 and 5, which began in the second
        pytest.param("outcome", "trajectory", None, 3, {4: [2], 5: [2 / 3] * 3}, id="group: whole trajectories"),
        # The third rollout holds the end of episode 5 and the beginning of episode 7: 2, 1 and 2 steps
        pytest.param(
            "kernel", "trajectory", None, 3, {5: [5 / 6] * 2, 6: [5 / 3], 7: [5 / 6] * 2}, id="kernel: parts of trajectories"
        ),
    ],
)
def test_transitions_weigh_as_the_length_of_their_trajectory_in_the_update_demands(
    buffer: str, aggregation: str, horizon: int | None, n_rollouts: int, weights: dict[int, list[float]]
):
    kwargs = {} if horizon is None else dict(horizon=horizon)
    model = make_id_model(
        buffer,
        1,
        dict(length=short_and_long),
        n_steps=5,
        objective=dict(loss_aggregation=aggregation),
        rollout_buffer_kwargs=kwargs,
    )
    assert weights_by_episode(whole_update(model.learn(5 * n_rollouts))) == weights


@BOTH_WAYS
def test_per_step_all_transitions_weigh_alike_and_no_weights_are_needed(buffer: str):
    assert whole_update(make_id_model(buffer, 3).learn(24)).weights is None


# --- choosing a buffer ------------------------------------------------------------------------------------------------


def test_a_buffer_is_chosen_by_name_or_class():
    assert list(BUFFERS) == ["kernel", *COMPLETE_GROUP_BUFFERS]
    for name, buffer_class in BUFFERS.items():
        assert resolve_buffer_class(name) is resolve_buffer_class(buffer_class) is buffer_class
        assert type(make_model(AnyEnv(VECTOR), name).rollout_buffer) is buffer_class
    assert resolve_buffer_class(None) is KernelRolloutBuffer
    assert type(make_model(AnyEnv(VECTOR), StepwiseRolloutBuffer).rollout_buffer) is StepwiseRolloutBuffer


# --- a user's own -----------------------------------------------------------------------------------------------------


class LongerIsBetter(CompleteGroupRolloutBuffer):
    """A user's own judgement of whole groups."""

    def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return np.repeat(np.where(lengths > 5, 1.0, -1.0), lengths)


class RewardIsAdvantage(GroupRolloutBuffer):
    """A user's own judgement of a rollout."""

    def _form_update(self, rollout: Any, last_obs: Any, policy: Any) -> Any:
        return rollout, rollout.rewards


def test_a_hook_that_does_not_return_one_finite_number_per_transition_is_named():
    class OnePerTrajectory(LongerIsBetter):
        def _group_advantages(self, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
            return np.where(lengths > 5, 1.0, -1.0)

    class TooFew(RewardIsAdvantage):
        def _form_update(self, rollout: Any, last_obs: Any, policy: Any) -> Any:
            return rollout, rollout.rewards[:10]

    class Divides(RewardIsAdvantage):
        def _form_update(self, rollout: Any, last_obs: Any, policy: Any) -> Any:
            return rollout, np.where(np.arange(len(rollout)) < 3, np.nan, 1.0)

    for buffer_class, message in [
        (OnePerTrajectory, r"`OnePerTrajectory._group_advantages` returned advantages of shape \(\d+,\) for \d+ transitions"),
        (TooFew, r"`TooFew._form_update` returned advantages of shape \(10,\) for \d+ transitions"),
        (Divides, "`Divides._form_update` returned advantages of which 3 are NaN or infinite"),
    ]:
        with pytest.raises(ValueError, match=message):
            record(buffer_class)


def test_a_users_own_group_buffer_overrides_one_hook():
    recorder = record(LongerIsBetter)
    assert_whole_groups(recorder, 2)
    assert_accounted_for(recorder)
    for update in recorder.updates:
        for ids in by_trajectory(recorder, update).values():
            assert {update[id].advantage for id in ids} == {1.0 if len(ids) > 5 else -1.0}
    assert any(recorder.made_updates)


def test_a_users_own_rollout_buffer_overrides_one_hook():
    recorder = record(RewardIsAdvantage)
    assert set(recorder.trained_on) == set(recorder.seen)
    for update in recorder.updates:
        for id, sample in update.items():
            assert sample.advantage == pytest.approx(recorder.seen[id].reward)
    assert all(recorder.made_updates)


class Own(RewardIsAdvantage):
    """A user's own settings: rollouts of 24, each of which is an update; groups of five; half the advantages."""

    @classmethod
    def defaults(cls, update_rule: losses.UpdateRule, is_continuous: bool) -> Defaults:
        return Defaults(rollout_size=24, gae_lambda=0.5)

    @classmethod
    def update_size(cls, rollout_size: int) -> int:
        return rollout_size

    def suggested_group_size(self) -> int:
        return 5

    def _scaled(self, advantages: np.ndarray, normalize_advantage: bool) -> np.ndarray:
        return advantages / 2 if normalize_advantage else advantages


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 5), (dict(group_size=3), 3), (dict(share_starts=False), 2)],
    ids=["own", "given", "alone"],
)
def test_a_users_own_buffer_chooses_sizes_and_the_scale_of_advantages(options: dict[str, Any], expected: int):
    model = make_model(AnyEnv(VECTOR), Own, n_steps=None, batch_size=8, **options)  # type: ignore[arg-type]
    assert (model.n_steps, model.gae_lambda) == (24, 0.5)
    model.learn(24)
    assert model.ledger is not None and model.ledger.group_size == expected
    expected_advantages = model.rollout_buffer.rewards.ravel() / 2
    np.testing.assert_array_equal(np.sort(whole_update(model).advantages), np.sort(expected_advantages))


# --- returns of groups ------------------------------------------------------------------------------------------------

#: Groups of two have returns of 6 and 12, 3 and 3, 5 and 1.
THREE_GROUPS = scripted((1, 2, 3), (4, 4, 4), (1, 1, 1), (1, 1, 1), (0, 0, 5), (1, 0, 0), (2, 2, 2), (7, 0, 0))
RETURNS = ("groups_completed", "group_return_mean", "group_return_spread")


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_returns_of_a_group_are_reported_when_its_last_member_ends(buffer: str):
    # Episodes of 3 steps: groups end with steps 6, 12 and 18, and so in the second, third and fifth rollout of 4
    recorder = record(buffer, n_envs=1, n_steps=4, n_rollouts=5, env=THREE_GROUPS)
    assert recorder.group_returns == [[], [[6, 12]], [[3, 3]], [], [[5, 1]]]
    # `return_to_go` also compares the steps of a trajectory, where the others have nothing to learn from equal rewards;
    # `kernel` does not compare the members of a group
    tied = 0 if buffer == "return_to_go" else 1
    expected = [None] * 5 if buffer == "kernel" else [None, 0, tied, None, 0]
    assert figures(recorder, "groups_tied") == [(value,) for value in expected]


@pytest.mark.parametrize(
    ("buffer", "kwargs", "expected"),
    [
        # (6 + 12 + 3 + 3 + 5 + 1) / 6 = 5; (6 + 0 + 4) / 3
        pytest.param("outcome", {}, (3, 5, pytest.approx(10 / 3)), id="outcome"),
        pytest.param("kernel", {}, (None, None, None), id="kernel, which reports those that Monitor does not know"),
        pytest.param("kernel", dict(reward_weights={"half": 2.0}), (None, 5, None), id="kernel with weighted rewards"),
    ],
)
def test_the_returns_of_several_groups_are_averaged(buffer: str, kwargs: dict[str, Any], expected: tuple[Any, ...]):
    env = dict(THREE_GROUPS, components=lambda id: {"half": THREE_GROUPS["reward"](id) / 2})
    recorder = record(buffer, n_envs=1, n_steps=18, n_rollouts=1, env=env, rollout_buffer_kwargs=kwargs)
    assert figures(recorder, *RETURNS) == [expected]


@BOTH_WAYS
def test_the_members_of_a_group_may_end_in_several_environments_and_rollouts(buffer: str):
    # Environment 0 has episodes of 2 steps and rewards 0, 1, 2, ...; environment 1 has 5 steps and rewards 10, 11, ...
    # Starts are taken in the order in which episodes end: group 0 is the first episode of either, group 1 the second and
    # third of environment 0, group 2 the second of environment 1 and the fourth of environment 0
    env = dict(length=lambda env, episode: (2, 5)[env], reward=lambda id: float(10 * id[0] + id[1]))
    recorder = record(buffer, n_envs=2, n_steps=4, n_rollouts=3, env=env)
    # Returns: 0 and 50, 2 and 4; 55 and 6, of which the first ends at step 10; 8 and 10 make the fourth group
    assert recorder.group_returns == [[], [[0, 50], [2, 4]], [[6, 55], [8, 10]]]


@BOTH_WAYS
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_returns_of_a_stopped_rollout_are_reported_by_the_next_unless_it_starts_afresh(buffer: str, goes_on: bool):
    # Stopped after the first half of the second rollout, with which the first group ends
    recorder = Recorder(stop_after=6)
    model = make_id_model(buffer, 1, THREE_GROUPS, n_steps=4)
    model.learn(100, callback=recorder)
    model.learn(8, callback=recorder, reset_num_timesteps=not goes_on)
    reported = recorder.group_returns
    assert reported == [[], [[6, 12]], [[3, 3]]] if goes_on else [[6, 12]] not in reported


# --- rewards ----------------------------------------------------------------------------------------------------------


class SevenForAll(VecEnvWrapper):
    """Returns 7 as the reward, whatever the environments return."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, np.full_like(rewards, 7.0), dones, infos


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        pytest.param(lambda venv: venv, None, id="VecNormalize"),
        pytest.param(VecMonitor, None, id="VecMonitor outside"),
        pytest.param(lambda venv: VecFrameStack(VecCheckNan(venv), 2), None, id="VecFrameStack and VecCheckNan outside"),
        pytest.param(SevenForAll, 7.0, id="other rewards outside"),
        pytest.param(lambda venv: VecMonitor(SevenForAll(venv)), 7.0, id="VecMonitor and other rewards outside"),
    ],
)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_group_buffers_take_the_rewards_of_the_environments_unless_a_wrapper_outside_changes_them(
    buffer: str, outside: Callable[[VecEnv], VecEnv], expected: float | None
):
    scaled = VecNormalize(DummyVecEnv([lambda index=index: IdEnv(index, reward=lambda id: 1.0) for index in range(2)]))  # type: ignore[misc]
    rewards = make_model(outside(scaled), buffer, share_starts=False).learn(16).rollout_buffer.rewards
    if expected is not None:
        assert (rewards == expected).all()
    elif buffer == "kernel":
        np.testing.assert_allclose(rewards[:, -1], scaled.normalize_reward(np.ones(2)), rtol=1e-5)
        assert (rewards != 1.0).all()
    else:
        assert (rewards == 1.0).all()


# --- tied groups ------------------------------------------------------------------------------------------------------


def every_other_group_is_tied(id: Id) -> float:
    """In a single environment, consecutive episodes make a group: the episodes 2 and 3, 6 and 7, ... all earn nothing."""
    return 0.0 if id[1] % 4 >= 2 else float(np.sin(3 * id[1] + 7 * id[2]))


def assert_same_training(recorder: Recorder, other: Recorder) -> None:
    """All updates were the same, bit for bit, and so are the policies that they made."""
    for update, other_update in zip(recorder.updates, other.updates, strict=True):
        assert {id: sample[:2] for id, sample in update.items()} == {id: sample[:2] for id, sample in other_update.items()}
    assert all(map(th.equal, recorder.weights, other.weights))
    assert any(recorder.made_updates)


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
@pytest.mark.parametrize(("scale", "n_steps"), [("group", 4), ("batch", 25)])
def test_skipped_groups_are_as_if_they_had_never_been_sampled(buffer: str, scale: str, n_steps: int):
    env = dict(length=lambda env, episode: 3 + (5 * episode) % 4, reward=every_other_group_is_tied)
    kwargs: dict[str, Any] = dict(n_envs=1, n_steps=n_steps, n_rollouts=100 // n_steps, env=env, learning_rate=0.0)
    kwargs["normalize_observations"] = False  # which changes the log-probabilities of the first rollout
    kept = record(buffer, rollout_buffer_kwargs=dict(scale=scale), **kwargs)
    skipped = record(buffer, rollout_buffer_kwargs=dict(scale=scale, tied_groups="skip"), **kwargs)
    assert len(skipped.trained_on) < len(kept.trained_on)
    for update, skipped_update in zip(kept.updates, skipped.updates, strict=True):
        assert set(skipped_update) == {id for id in update if id[1] % 4 < 2}
        if skipped_update:
            ids, expected = formula_of(skipped, skipped_update, buffer, scale)
            np.testing.assert_allclose([skipped_update[id].advantage for id in ids], expected, rtol=1e-4, atol=1e-6)
        for id, sample in skipped_update.items():
            assert sample.log_prob == skipped.seen[id].log_prob and sample.action == skipped.seen[id].action


def test_metrics_of_groups_are_those_of_all_complete_groups_and_the_spread_of_advantages_is_that_of_the_update():
    # Groups of 1 and 3 steps; the second of three is tied
    env = scripted((1,), (0, 0, 3), (2,), (0, 2, 0), (1,), (0, 0, 3), ())
    kwargs = dict(scale="none", tied_groups="skip")
    recorder = record("outcome", 1, 2, n_steps=12, n_rollouts=1, env=env, rollout_buffer_kwargs=kwargs)
    assert figures(recorder, "groups_completed", "groups_tied") == [(3, pytest.approx(1 / 3))]
    assert {id[1] for id in recorder.updates[0]} == {0, 1, 4, 5}
    # -1 once and 1 three times, in both
    assert recorder.metrics[0]["train/advantage_std"] == pytest.approx(np.sqrt(0.75))


@pytest.mark.parametrize(("tied_groups", "episodes"), [("keep", {0, 1, 2, 3}), ("skip", {2, 3})])
def test_steps_without_peer_are_those_of_all_complete_groups(tied_groups: str, episodes: set[int]):
    # The first group is tied, with two steps at which a member is alone; in the second there is one
    env = scripted((1,), (1, 0, 0), (0,), (5, 0), ())
    kwargs = dict(tied_groups=tied_groups)
    recorder = record("stepwise", 1, 2, n_steps=7, n_rollouts=1, env=env, rollout_buffer_kwargs=kwargs)
    assert figures(recorder, "steps_without_peer", "groups_completed", "groups_tied") == [(3, 2, 0.5)]
    assert {id[1] for id in recorder.updates[0]} == episodes
    assert all(sample.advantage == 0 for id, sample in recorder.updates[0].items() if id[2] >= 1)


@pytest.mark.parametrize("buffer", COMPLETE_GROUP_BUFFERS)
def test_skipping_changes_nothing_where_no_group_is_tied_and_leaves_no_update_where_all_are(buffer: str):
    skip: dict[str, Any] = dict(rollout_buffer_kwargs=dict(tied_groups="skip"))
    kept, skipped = record(buffer, n_steps=25), record(buffer, n_steps=25, **skip)
    assert {metrics.get("rollout/groups_tied") for metrics in kept.metrics} == {0.0}
    assert_same_training(kept, skipped)
    assert kept.metrics == skipped.metrics
    equal = record(buffer, n_rollouts=3, env=dict(length=lambda env, episode: 1, reward=lambda id: 1.0), **skip)
    assert equal.updates == [{}] * 3 and not any(equal.made_updates)
    assert figures(equal, "groups_completed", "groups_tied", "transitions_waiting") == [(12, 1, 0)] * 3


# --- reward components ------------------------------------------------------------------------------------------------


def record_components(components: Callable[[Id], Any], buffer: str = "outcome", **kwargs: Any) -> Recorder:
    """:return: A record of environments that report components, and a reward that has nothing to do with them"""
    env = {"reward": lambda id: 1e3 * np.sin(id[0] + id[2]), **kwargs.pop("env", {}), "components": components}
    return record(buffer, env=env, **{"n_rollouts": 10, **kwargs})


def progress(id: Id) -> float:
    """Multiples of 1/8, whose sums are exact."""
    return ((3 * id[0] + 5 * id[1] + 7 * id[2]) % 17) / 8


def energy(id: Id) -> float:
    return ((2 * id[0] + 3 * id[1] + 11 * id[2]) % 13) / 4


def both(id: Id) -> dict[str, Any]:
    """More than is asked for."""
    return {"progress": progress(id), "energy": energy(id), "style": "none", "more": float("nan")}


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_sum_of_components_is_trained_on_as_if_it_were_the_reward(buffer: str):
    kwargs = dict(reward_weights={"energy": -0.5, "progress": 2})
    recorder = record_components(both, buffer, n_steps=4, n_rollouts=20, rollout_buffer_kwargs=kwargs)
    rewarded = record(buffer, n_steps=4, n_rollouts=20, env=dict(reward=lambda id: 2 * progress(id) - 0.5 * energy(id)))
    assert_same_training(recorder, rewarded)
    assert recorder.group_returns == rewarded.group_returns
    for metrics, other in zip(recorder.metrics, rewarded.metrics, strict=True):
        assert other.items() <= metrics.items() and metrics.keys() - other.keys() <= {"rollout/group_return_mean"}


#: Two groups of two. The second member does better in ``progress``. In ``energy`` it does worse in the first group, and as
#: well as its peer in the second.
PROGRESS_OF_EPISODES = ((1.0, 0.0), (1.0, 1.0, 1.0), (4.0,), (2.0, 6.0))
ENERGY_OF_EPISODES = ((2.0, 3.0), (0.0, 0.0, 2.0), (1.0,), (0.0, 1.0))
# progress is -1, 1, -2 and 2 above the mean of its group, energy 1.5, -1.5, 0 and 0
BATCH_FIRST = -2 / np.sqrt((1 + 1 + 4 + 4) / 4) + 0.75 / np.sqrt((2.25 + 2.25) / 4)
BATCH_SECOND = -4 / np.sqrt((1 + 1 + 4 + 4) / 4)


@pytest.mark.parametrize(
    ("scale", "aggregation", "n_steps", "expected"),
    [
        # progress: -1 and 1 in both groups; energy: 1 and -1, then none
        pytest.param("group", "normalize_then_sum", 8, [-1.5, 1.5, -2, 2], id="by group, normalised first"),
        pytest.param("group", "normalize_then_sum", 2, [-1.5, 1.5, -2, 2], id="by group, normalised first, waiting"),
        # The sums are 4.5, 7, 8.5 and 16.5
        pytest.param("group", "sum_then_normalize", 8, [-1, 1, -1, 1], id="by group, summed first"),
        pytest.param("none", "normalize_then_sum", 8, [-1.25, 1.25, -4, 4], id="unscaled, normalised first"),
        pytest.param("none", "sum_then_normalize", 2, [-1.25, 1.25, -4, 4], id="unscaled, summed first, waiting"),
        pytest.param(
            "batch", "normalize_then_sum", 8, [BATCH_FIRST, -BATCH_FIRST, BATCH_SECOND, -BATCH_SECOND], id="each by its batch"
        ),
    ],
)
def test_components_are_judged_on_their_own_or_in_sum(scale: str, aggregation: str, n_steps: int, expected: list[float]):
    recorder = record_components(
        lambda id: {"progress": PROGRESS_OF_EPISODES[id[1]][id[2]], "energy": ENERGY_OF_EPISODES[id[1]][id[2]]},
        n_envs=1,
        n_steps=n_steps,
        n_rollouts=8 // n_steps,
        env=dict(length=lambda env, episode: len(PROGRESS_OF_EPISODES[episode]) if episode < 4 else 1),
        rollout_buffer_kwargs=dict(
            scale=scale, component_aggregation=aggregation, reward_weights={"progress": 2, "energy": 0.5}
        ),
    )
    judged: dict[int, set[float]] = defaultdict(set)
    for update in recorder.updates:
        for id, sample in update.items():
            judged[id[1]].add(sample.advantage)
    assert {episode: list(advantages) for episode, advantages in judged.items()} == {
        episode: [pytest.approx(advantage, rel=1e-6)] for episode, advantage in enumerate(expected)
    }


@pytest.mark.parametrize(
    ("components", "message"),
    [
        pytest.param([1.0, 2.0], r"environment 1 returned \[1.0, 2.0\] .*a mapping", id="a list"),
        pytest.param(
            {"progress": 1.0, "style": 2.0},
            r"Environment 1 .* without \['energy'\].*names \['progress', 'energy'\].*reports \['progress', 'style'\]",
            id="one missing",
        ),
        pytest.param({"progress": np.nan, "energy": 1.0}, r"Environment 1 returned nan .*'progress'", id="NaN"),
        pytest.param({"progress": 3e38, "energy": 3e38}, r"weighted sums .*4.5e\+38", id="too large a sum"),
    ],
)
def test_components_that_are_not_reported_as_numbers_are_refused_and_quoted(components: Any, message: str):
    def sometimes(id: Id) -> Any:
        return components if id[0] == 1 and id[2] == 3 else {"progress": 1.0, "energy": 1.0}

    with pytest.raises(ValueError, match=message):
        record_components(sometimes, n_envs=2, rollout_buffer_kwargs=dict(reward_weights={"progress": 1.0, "energy": 0.5}))


# --- whole rollouts in any space --------------------------------------------------------------------------------------

OBSERVATION_SPACES: list[tuple[spaces.Space, str, dict[str, Any]]] = [
    (VECTOR, "MlpPolicy", dict(net_arch=[8])),
    (spaces.Box(-np.inf, np.inf, (2, 2), np.float64), "MlpPolicy", dict(net_arch=[8])),
    (spaces.Discrete(4), "MlpPolicy", dict(net_arch=[8])),
    (spaces.MultiDiscrete([2, 3]), "MlpPolicy", dict(net_arch=[8])),
    (spaces.MultiBinary(3), "MlpPolicy", dict(net_arch=[8])),
    (IMAGE, "CnnPolicy", CNN),
    (spaces.Box(0, 255, (36, 36, 1), np.uint8), "CnnPolicy", CNN),
    (spaces.Dict(b=VECTOR, a=spaces.Discrete(3), c=spaces.MultiBinary(2)), "MultiInputPolicy", dict(net_arch=[8])),
    (spaces.Dict(camera=IMAGE, speed=VECTOR), "MultiInputPolicy", COMBINED),
]
ACTION_SPACES: list[spaces.Space] = [
    spaces.Box(-1.0, 1.0, (2,), np.float32),
    spaces.Box(-3.0, 5.0, (2, 1), np.float64),
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
]


class RolloutRecorder(BaseCallback):
    """Counts the transitions by observation: those that were collected, by group, and those of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: Counter[tuple[int, bytes]] = Counter()
        self.ended: Counter[int] = Counter()
        self.updates: list[Counter[bytes]] = []

    def _on_step(self) -> bool:
        groups = self.locals["position"].groups
        self.collected.update(zip(groups.tolist(), as_bytes(observations_of(self.model)), strict=True))
        self.ended.update(groups[self.locals["dones"]].tolist())
        return True

    def _on_rollout_end(self) -> None:
        update = whole_update(self.model)
        assert len(update.advantages) == buffer_of(self.model).n_samples and update.advantages.isfinite().all()
        self.updates.append(Counter(as_bytes(update.observations)))


def as_bytes(observations: Any) -> list[bytes]:
    """:return: The bytes of each observation of a batch"""
    parts = observations.values() if isinstance(observations, dict) else [observations]
    arrays = [np.asarray(part) for part in parts]
    return [b"".join(array[i].tobytes() for array in arrays) for i in range(len(arrays[0]))]


@pytest.mark.filterwarnings("ignore:Nothing was learned")
@pytest.mark.parametrize("n_cases", [6, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_transition_is_used_once_as_it_came_whatever_spaces_episodes_and_options(buffer: str, n_cases: int):
    rng = np.random.default_rng(list(BUFFERS).index(buffer))
    n_used = n_collected = 0
    for case in range(n_cases):
        space, policy, policy_kwargs = OBSERVATION_SPACES[rng.integers(len(OBSERVATION_SPACES))]
        action_space = ACTION_SPACES[rng.integers(len(ACTION_SPACES))]
        lengths = [(1, 2), (4, 5), (2, 8), (20, 21), (ENDLESS, ENDLESS + 1)][rng.integers(5)]
        n_envs, group_size = int(rng.integers(1, 5)), int(rng.integers(2, 4))
        kwargs: dict[str, Any] = dict(
            group_size=group_size,
            use_sde=bool(rng.integers(2)) and isinstance(action_space, spaces.Box),
            objective=dict(
                importance_sampling_level=str(rng.choice(["step", "trajectory"])),
                loss_aggregation=str(rng.choice(["step", "trajectory", "constant"])),
            ),
            policy_kwargs=policy_kwargs,
        )
        print("case", case, space, action_space, lengths, n_envs, kwargs)  # shown if the test fails
        env = DummyVecEnv([partial(AnyEnv, space, action_space, lengths)] * n_envs)
        recorder = RolloutRecorder()
        n_steps = 8
        model = make_model(env, buffer, policy, n_steps, **kwargs).learn(2 * n_steps * n_envs, callback=recorder)
        assert all(parameter.isfinite().all() for parameter in model.policy.parameters())
        used = sum(recorder.updates, Counter())
        due: Counter[bytes] = Counter()
        for (group, obs), count in recorder.collected.items():
            if buffer == "kernel" or recorder.ended[group] == group_size:
                due[obs] += count
        assert used == due
        if buffer == "kernel":
            assert [update.total() for update in recorder.updates] == [n_steps * n_envs] * 2
        n_used, n_collected = n_used + used.total(), n_collected + recorder.collected.total()
    assert n_used == n_collected if buffer == "kernel" else 0.1 < n_used / n_collected < 0.9
