"""The numbers of the kernel buffer, compared with a slow computation from scratch and with problems whose answer is known."""

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_grpo.buffers import KernelRolloutBuffer
from sb3_grpo.fit_inputs import FitInputs
from sb3_grpo.observations import map_observations
from sb3_grpo.policies import ActorCnnPolicy, ActorPolicy, MlpPolicy, MultiInputActorPolicy
from sb3_grpo.starts import Position

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
BOARD = spaces.Box(0.0, 1.0, (5, 4, 3), np.float32)
DISCRETE = spaces.Discrete(2)
POLICY = MlpPolicy(VECTOR, DISCRETE, lambda _: 1e-3)


def collect(
    buffer: KernelRolloutBuffer,
    observations: Any,
    rewards: np.ndarray,
    terminated: Any = False,
    truncated: Any = False,
    final: Any = None,
    policy: ActorPolicy = POLICY,
) -> np.ndarray:
    """
    Collect one rollout of ``n_steps`` steps.

    :param observations: Batches of observations, one more than there are steps
    :param terminated: Whether the episode terminated with the step, of a shape that fits to ``(n_steps, n_envs)``
    :param truncated: Whether a time limit ended it, in the same way
    :param final: Observations after each step, before environments are reset; needed if a time limit ends episodes
    :return: Advantages, shape ``(n_envs, n_steps)``
    """
    terminated, truncated = (np.broadcast_to(each, rewards.shape) for each in (terminated, truncated))
    zeros = np.zeros(buffer.n_envs, dtype=np.int64)
    begin = buffer.dones[:, -1] | (buffer._rollout == 0)
    position = Position(zeros, zeros, np.where(begin, 0, buffer.steps[:, -1] + 1))
    buffer.reset()
    for t in range(buffer.buffer_size):
        # Log-probabilities number the transitions, so that the shuffled update can be sorted
        numbers = th.arange(buffer.n_envs) * buffer.buffer_size + t
        infos = [
            {"TimeLimit.truncated": True, "terminal_observation": final[t][env]} if is_truncated else {}
            for env, is_truncated in enumerate(truncated[t])
        ]
        done = terminated[t] | truncated[t]
        buffer.add(observations[t], zeros[:, None], rewards[t], done, numbers.float(), position, infos)
        position = position._replace(steps=np.where(done, 0, position.steps + 1))
    buffer.finish_rollout(observations[-1], policy, open_groups={})
    (update,) = buffer.get()
    return update.advantages[update.old_log_prob.argsort()].numpy().reshape(buffer.n_envs, -1)


# --- rollouts of several trajectories ---------------------------------------------------------------------------------


@dataclass
class Segment:
    """The part of a trajectory that lies in one rollout."""

    first_step: int
    end: str = "unfinished"  # or "terminated" or "truncated"
    observations: list[Any] = field(default_factory=list)  # with the one after the last step
    rewards: list[float] = field(default_factory=list)


class Rollout(NamedTuple):
    """What was given to the buffer, the state of the baseline, and what the buffer made of it."""

    segments: list[Segment]
    state: dict[str, Any]
    advantages: np.ndarray
    metrics: dict[str, float]


def batch(observations: list[Any]) -> Any:
    first = observations[0]
    return {k: np.stack([o[k] for o in observations]) for k in first} if isinstance(first, dict) else np.stack(observations)


def run(
    space: spaces.Space = VECTOR,
    n_envs: int = 2,
    time_limit: int | None = 7,
    termination: float = 0.15,
    policy: ActorPolicy = POLICY,
    n_rollouts: int = 4,
    n_steps: int = 10,
    after_rollout: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[Rollout]:
    """:return: Rollouts of random observations and rewards, whose episodes terminate by chance"""
    np.random.seed(0)
    space.seed(0)
    rng = np.random.default_rng(0)
    # The relative term has an oracle of its own, in test_relative.py
    options = dict(n_features=12, horizon=7, gamma=0.9, relative=False) | options
    buffer = KernelRolloutBuffer(n_steps, space, DISCRETE, "cpu", n_envs=n_envs, **options)
    elapsed, following, rollouts = np.zeros(n_envs, dtype=int), [space.sample() for _ in range(n_envs)], []
    for _ in range(n_rollouts):
        by_env = [[Segment(int(first))] for first in elapsed]
        observations, final = [batch(following)], []
        rewards = rng.normal(1.0, 1.0, (n_steps, n_envs))
        terminated = rng.random((n_steps, n_envs)) < termination
        truncated = np.zeros_like(terminated)
        for t in range(n_steps):
            present, after = following, [space.sample() for _ in range(n_envs)]
            elapsed += 1
            truncated[t] = ~terminated[t] & (elapsed == (time_limit or 0))
            done = terminated[t] | truncated[t]
            elapsed[done] = 0
            following = [space.sample() if done[env] else after[env] for env in range(n_envs)]
            for env, segments in enumerate(by_env):
                segments[-1].observations.append(present[env])
                segments[-1].rewards.append(rewards[t, env])
                if done[env] or t == n_steps - 1:
                    segments[-1].observations.append(after[env])
                if done[env]:
                    segments[-1].end = "terminated" if terminated[t, env] else "truncated"
                    segments.append(Segment(0))
            observations.append(batch(following))
            final.append(after)
        advantages = collect(buffer, observations, rewards, terminated, truncated, final, policy)
        after_rollout()
        given = [segment for segments in by_env for segment in segments if segment.rewards]
        state = deepcopy(buffer.baseline.get_state())
        rollouts.append(Rollout(given, state, advantages.ravel(), dict(buffer.metrics)))
    return rollouts


# --- the same from scratch --------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """Options of the buffer, and, with a leading ``oracle_``, what only the slow computation can do otherwise."""

    horizon: int | None = 7
    gamma: float = 0.9
    gae_lambda: float = 0.98
    ridge: float = 1e-5
    forgetting: float = 0.8
    n_folds: int = 4
    oracle_bootstraps: tuple[str, ...] = ("truncated", "unfinished")
    oracle_final_time: float = 1.0
    oracle_clock_goes_on: bool = True
    oracle_leaves_fold_out: bool = True
    oracle_shrinks: bool = True


class Samples(NamedTuple):
    """Steps whose advantages against the baseline of weights ``w`` are ``constants + slopes @ w``."""

    weights: np.ndarray
    folds: np.ndarray
    features: np.ndarray
    constants: np.ndarray
    slopes: np.ndarray


def slow_features(state: dict[str, Any], inputs: np.ndarray, time: float) -> np.ndarray:
    statistics, phases = state["input_statistics"], state["phases"].numpy()
    z = np.clip((inputs - statistics.mean) / np.sqrt(np.where(statistics.var > 0, statistics.var, 1.0)), -5.0, 5.0)
    cosines = [np.cos(np.dot(f, [*z, 2.0 * time]) + c) for f, c in zip(state["frequencies"].numpy().T, phases, strict=True)]
    return np.array([1.0, *z, time, *(np.sqrt(2.0 / len(phases)) * np.array(cosines))])


def slow_gae(rewards: Any, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """:return: Sums of discounted temporal differences; values may have columns, and a last row for the step after the end"""
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return np.array([sum((gamma * lambda_) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))])


def slow_fit(samples: Samples, kept: Any, rules: Rules) -> np.ndarray:
    """
    LSTD(lambda) in its forward view, without traces: the weights make the mean product of features and advantages small. It is
    an ordinary least-squares problem, with one more row per feature for the penalty.
    """
    _, _, phi, constants, slopes = samples
    weights = samples.weights * kept
    count, penalty = max(weights.sum(), 1.0), np.sqrt(rules.ridge) * np.eye(phi.shape[1])
    total = max(samples.weights.sum(), 1.0)
    metric = phi.T @ (samples.weights[:, None] * phi) / total + rules.ridge * np.eye(phi.shape[1])
    root = np.linalg.inv(np.linalg.cholesky(metric)) @ (weights[:, None] / count * phi).T
    rows, right = root @ slopes, -root @ constants
    penalty[0, 0] = 1e-6
    q, r = np.linalg.qr(np.vstack([rows, penalty]))
    return np.linalg.solve(r, q.T @ np.append(right, np.zeros(len(penalty))))


class Expected(NamedTuple):
    advantages: np.ndarray
    shrinkage: float
    explained_variance: float
    variance_reduction: float


def from_scratch(rollouts: list[Rollout], rules: Rules, encode: Callable[[Any], Any] = np.asarray) -> list[Expected]:
    """:return: Advantages and metrics of each rollout as the documentation promises them"""
    samples: Samples | None = None
    result: list[Expected] = []
    longest = 1
    for segments, state, _, _ in rollouts:
        own = [] if samples is None else [samples._replace(weights=rules.forgetting * samples.weights)]
        firsts = [segment.first_step if rules.oracle_clock_goes_on else 0 for segment in segments]
        longest = max(longest, *(first + len(s.rewards) for first, s in zip(firsts, segments, strict=True)))
        unit = rules.horizon or next(2**k for k in range(30) if 2**k >= longest)
        known = []
        for i, (first, segment) in enumerate(zip(firsts, segments, strict=True)):
            n = len(segment.rewards)
            times = [*(first + np.arange(n)), first + n - 1 + rules.oracle_final_time]
            inputs = [encode(each) for each in segment.observations]
            phi = np.array([slow_features(state, x, t / unit) for x, t in zip(inputs, times, strict=True)])
            phi[-1] *= segment.end in rules.oracle_bootstraps
            constants = slow_gae(segment.rewards, np.zeros(n + 1), rules.gamma, rules.gae_lambda)
            slopes = slow_gae(np.zeros(n), phi, rules.gamma, rules.gae_lambda)
            known.append(phi)
            own.append(Samples(np.ones(n), np.full(n, i % rules.n_folds), phi[:-1], constants, slopes))
        samples = Samples(*map(np.concatenate, zip(*own, strict=True)))
        left_out = [i % rules.n_folds if rules.oracle_leaves_fold_out else None for i in range(len(known))]
        fits = {fold: slow_fit(samples, samples.folds != fold, rules) for fold in set(left_out)}
        predictions = [phi @ fits[fold] for phi, fold in zip(known, left_out, strict=True)]
        samples = samples._replace(folds=np.full(len(samples.folds), -1))
        result.append(shrunk(segments, predictions, rules))
    return result


def shrunk(segments: list[Segment], predictions: list[np.ndarray], rules: Rules) -> Expected:
    """:return: Advantages and metrics against the shrunk predictions, of which the last of each segment is beyond it"""
    rewards = [segment.rewards for segment in segments]
    goes_on = [np.append(np.ones(len(s.rewards)), s.end in rules.oracle_bootstraps) for s in segments]

    def advantages(lambda_: float, values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([slow_gae(r, v, rules.gamma, lambda_) for r, v in zip(rewards, values, strict=True)])

    def joined(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([each[:-1] for each in values])

    baseline = joined(predictions)
    slope = np.polyfit(baseline, baseline + advantages(1.0, predictions), 1)[0] if np.ptp(baseline) > 0 else 0.0
    kappa = min(max(slope, 0.0), 1.0) if rules.oracle_shrinks else 1.0
    shrunk = [(baseline.mean() + kappa * (v - baseline.mean())) * c for v, c in zip(predictions, goes_on, strict=True)]
    baseline, full, final = joined(shrunk), advantages(1.0, shrunk), advantages(rules.gae_lambda, shrunk)
    return Expected(final, kappa, 1 - full.var() / (baseline + full).var(), 1 - final.var() / (baseline + final).var())


def assert_as_from_scratch(rollouts: list[Rollout], rules: Rules, **kwargs: Any) -> None:
    for rollout, expected in zip(rollouts, from_scratch(rollouts, rules, **kwargs), strict=True):
        # Features have single precision, and the fit amplifies its rounding where features are dependent
        np.testing.assert_allclose(rollout.advantages, expected.advantages, atol=5e-3 * expected.advantages.std())
        assert rollout.metrics["train/baseline_shrinkage"] == pytest.approx(expected.shrinkage, abs=1e-3)
        assert rollout.metrics["train/explained_variance"] == pytest.approx(expected.explained_variance, abs=1e-3)
        assert rollout.metrics["train/baseline_variance_reduction"] == pytest.approx(expected.variance_reduction, abs=1e-3)


def assert_advantages_differ(rollouts: list[Rollout], others: Any) -> None:
    pairs = zip(rollouts, others, strict=True)
    assert (
        max(np.abs(rollout.advantages - other.advantages).max() / rollout.advantages.std() for rollout, other in pairs) > 0.02
    )


@pytest.mark.parametrize(
    "space",
    [
        VECTOR,
        spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        spaces.Discrete(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Dict({"b": VECTOR, "a": spaces.Discrete(3), "c": spaces.MultiBinary(2)}),
    ],
    ids=lambda space: f"{type(space).__name__}{space.shape or ''}",
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_advantages_and_metrics_equal_a_slow_computation_from_scratch(space: spaces.Space, n_envs: int):
    rollouts = run(space, n_envs)
    assert {s.end for rollout in rollouts for s in rollout.segments} == {"terminated", "truncated", "unfinished"}
    assert_as_from_scratch(rollouts, Rules(), encode=lambda observation: np.asarray(spaces.flatten(space, observation)))


@pytest.mark.parametrize(
    "departure",
    [
        pytest.param(dict(oracle_bootstraps=("unfinished",)), id="nothing follows a time limit"),
        pytest.param(dict(oracle_bootstraps=("truncated",)), id="nothing follows the rollout"),
        pytest.param(dict(oracle_bootstraps=("truncated", "unfinished", "terminated")), id="something follows a termination"),
        pytest.param(dict(oracle_final_time=0.0), id="the clock stops before the last observation"),
        pytest.param(dict(oracle_clock_goes_on=False), id="each rollout counts steps from zero"),
        pytest.param(dict(oracle_leaves_fold_out=False), id="a trajectory is judged by a fit to itself"),
        pytest.param(dict(oracle_shrinks=False), id="predictions are not shrunk"),
    ],
)
def test_any_other_way_leads_to_other_advantages(departure: dict[str, Any]):
    rollouts = run()
    assert_advantages_differ(rollouts, from_scratch(rollouts, Rules(**departure)))


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.8},
        *({"gamma": gamma, "oracle_bootstraps": ("unfinished",)} for gamma in (0.95, 0.9999, 1.0)),
        *({"gae_lambda": lambda_} for lambda_ in (0.0, 0.5, 1.0)),
        {"ridge": 1e-3},
        {"forgetting": 0.5},
        {"forgetting": 0.0},
        {"n_folds": 2},
        {"n_folds": 1},
        {"horizon": 20},
    ],
    ids=str,
)
def test_each_option_means_what_the_slow_computation_says(options: dict[str, Any]):
    rollouts = run(**{name: value for name, value in options.items() if not name.startswith("oracle_")})
    assert_as_from_scratch(rollouts, Rules(**options))
    assert_advantages_differ(rollouts, run())


@pytest.mark.parametrize(
    ("options", "bootstraps"),
    [
        # 0.9 ** 6 = 0.53 and 0.9 ** 7 = 0.48
        (dict(horizon=6), ("unfinished",)),
        (dict(horizon=7), ("truncated", "unfinished")),
        (dict(horizon=None, time_limit=6), ("unfinished",)),
        (dict(horizon=None, time_limit=7), ("truncated", "unfinished")),
        # A wrapper of the environment may cut episodes before their time limit, and the fit knows what follows
        (dict(horizon=20, time_limit=3), ("truncated", "unfinished")),
    ],
    ids=str,
)
def test_a_time_limit_is_an_end_if_most_of_a_value_would_stand_for_rewards_beyond_it(
    options: dict[str, Any], bootstraps: tuple[str, ...]
):
    # Few episodes terminate, so that the first rollout has one that is as long as the time limit
    rollouts = run(**options, termination=0.05, n_steps=20)
    assert_as_from_scratch(rollouts, Rules(horizon=options["horizon"], oracle_bootstraps=bootstraps))


def test_without_a_time_limit_time_is_measured_in_longest_trajectories_so_far():
    rollouts = run(time_limit=None, horizon=None)
    assert_as_from_scratch(rollouts, Rules(horizon=None))
    assert_advantages_differ(rollouts, run(time_limit=None, horizon=32))


def extracted(policy: ActorPolicy, observation: Any) -> np.ndarray:
    with th.no_grad():
        tensors = policy.obs_to_tensor(observation)[0]
        return policy.extract_features(tensors, policy.features_extractor)[0].double().numpy()


@pytest.mark.parametrize(
    ("space", "is_pooled"),
    [
        pytest.param(BOARD, False, id="board"),
        pytest.param(spaces.Box(0, 255, (3, 9, 9), np.uint8), False, id="board of bytes"),
        pytest.param(IMAGE, True, id="image"),
        pytest.param(spaces.Dict(board=BOARD, speed=VECTOR), False, id="Dict with a board"),
        pytest.param(spaces.Dict(camera=IMAGE, speed=VECTOR), True, id="Dict with an image"),
    ],
)
def test_the_inputs_of_pictures_are_pooled_or_features_of_the_actor_at_the_first_fit(space: spaces.Space, is_pooled: bool):
    policy: ActorPolicy
    if isinstance(space, spaces.Dict):
        policy = MultiInputActorPolicy(space, DISCRETE, lambda _: 1e-3, features_extractor_kwargs=dict(cnn_output_dim=8))
    else:
        policy = ActorCnnPolicy(space, DISCRETE, lambda _: 1e-3, features_extractor_kwargs=dict(features_dim=8))
    first = deepcopy(policy)

    def learn() -> None:
        with th.no_grad():
            for parameter in policy.parameters():
                parameter.add_(th.randn_like(parameter))

    def pooled(observation: Any) -> np.ndarray:
        return FitInputs(space)(map_observations(lambda array: array[None], observation), first)[0]

    # A network rounds differently for one observation and for many, which a fit with a smaller ridge amplifies
    rollouts = run(space, policy=policy, n_rollouts=3, ridge=0.1, after_rollout=learn)
    assert_as_from_scratch(rollouts, Rules(ridge=0.1), encode=pooled if is_pooled else partial(extracted, first))


# --- problems whose answer is known -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.99, 1.0])
@pytest.mark.parametrize(("time_limit", "level", "least"), [(10, 10.0, 0.42), (200, 10.0, 0.18), (None, 0.0, 0.15)])
def test_advantages_are_close_to_the_true_ones_for_every_gamma_and_time_limit(
    gamma: float, time_limit: int | None, level: float, least: float
):
    # x' = 0.9 x + 0.3 a + noise pays level + x, and time limits truncate episodes. The value is linear in x, and the advantage
    # of a is 0.3 a gamma / (1 - 0.9 gamma). Lambda-returns are noisy: the correlation is 0.45 at best
    rng = np.random.default_rng(0)
    space = spaces.Box(-9.0, 9.0, (2,))
    buffer = KernelRolloutBuffer(500, space, DISCRETE, "cpu", n_envs=4, gamma=gamma, horizon=time_limit)
    states, elapsed = 0.7 * rng.normal(size=(4, 2)), np.arange(4)
    for _ in range(5):
        actions = rng.choice([-1, 1], size=(500, 4))
        observations, final, truncated = [states], [], []
        for t in range(500):
            after = 0.9 * states + 0.1 * rng.normal(size=states.shape)
            after[:, 0] += 0.3 * actions[t]
            elapsed += 1
            done = elapsed == (time_limit or -1)
            elapsed[done] = 0
            states = np.where(done[:, None], 0.7 * rng.normal(size=states.shape), after)
            observations.append(states)
            final.append(after)
            truncated.append(done)
        rewards = level + np.array(observations)[:-1, :, 0]
        advantages = collect(buffer, observations, rewards, truncated=np.array(truncated), final=final)
    assert np.isfinite(advantages).all()
    assert np.corrcoef(advantages.ravel(), actions.T.ravel())[0, 1] > least


@pytest.mark.parametrize("lambda_", [0.5, 1.0])
def test_the_fit_does_not_lag_behind_a_value_that_jumps(lambda_: float):
    # Rewards of 1 and then of 10 in episodes that go on, with gamma 0.9: the value is 10 and then 100. A regression on returns
    # that are bootstrapped from the fit before, which says 10 of what follows after a few steps, would be far behind.
    options: dict[str, Any] = dict(gamma=0.9, n_folds=1, ridge=1e-5, forgetting=0.0, gae_lambda=lambda_)
    buffer = KernelRolloutBuffer(200, VECTOR, DISCRETE, "cpu", n_envs=2, **options)
    states = np.random.default_rng(0).uniform(-1, 1, (201, 2, 3)).astype(np.float32)
    for reward in (1.0, 1.0, 10.0):
        collect(buffer, states, np.full((200, 2), reward))
    features = buffer.baseline.features(states[-1], np.full(2, 0.5))
    assert abs((features.double() @ buffer.baseline.weights).mean().item() - 100.0) < 0.1


@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.0, th.float64), (1.0, th.float32)], ids=["all rewards are equal", "they differ"]
)
def test_the_fit_has_double_precision_while_single_precision_would_leave_rounding_errors(spread: float, dtype: th.dtype):
    rng = np.random.default_rng(0)
    buffer = KernelRolloutBuffer(100, VECTOR, DISCRETE, "cpu", n_envs=4, relative=False)
    for _ in range(4):
        observations = rng.uniform(-1, 1, (101, 4, 3)).astype(np.float32)
        advantages = collect(buffer, observations, -1.0 + spread * rng.normal(size=(100, 4)))
        assert buffer.get_state()["dtype"] == dtype
    if spread == 0.0:
        # What remains is what the penalty keeps the fit from explaining. Single precision would leave errors of 1e-5.
        assert advantages.std() < 1e-6


def test_where_advantages_have_become_tiny_the_limit_of_a_step_falls_with_their_variance():
    rng = np.random.default_rng(0)
    buffer, restored = (KernelRolloutBuffer(100, VECTOR, DISCRETE, "cpu", n_envs=4, relative=False) for _ in range(2))
    deviations: list[float] = []
    for spread, is_short in ((1.0, False), (1.0, False), (0.3, False), (1e-3, True), (1e-6, True), (1e-6, True), (1.0, False)):
        restored.set_state(deepcopy(buffer.get_state()))
        observations = rng.uniform(-1, 1, (101, 4, 3)).astype(np.float32)
        rewards = spread * rng.normal(size=(100, 4))
        deviations.append(collect(buffer, observations, rewards).std())
        # Below a tenth of the usual deviation, the length of a step is proportional to it, down to a tenth of its length.
        length = 10 * deviations[-1] / math.sqrt(np.mean(np.square(deviations)))
        assert buffer.limit_factor == pytest.approx(np.clip(length, 0.1, 1.0) ** 2, rel=1e-4)
        assert (buffer.limit_factor < 1.0) == is_short
        collect(restored, observations, rewards)
        assert restored.limit_factor == buffer.limit_factor
    buffer = KernelRolloutBuffer(100, VECTOR, DISCRETE, "cpu", n_envs=4, relative=False, forgetting=0.0)
    for spread, factor in ((1.0, 1.0), (1e-6, 0.01)):
        collect(buffer, observations, spread * rewards)
        assert buffer.limit_factor == factor


# --- the state of the fit ---------------------------------------------------------------------------------------------


def test_a_restored_fit_goes_on_as_the_original_does():
    states = np.random.default_rng(0).uniform(-1, 1, (21, 2, 3)).astype(np.float32)
    # The fit keeps its unit of time in an environment with another time limit
    buffer, restored, fresh = (KernelRolloutBuffer(20, VECTOR, DISCRETE, "cpu", n_envs=2, horizon=h) for h in (20, 1000, 20))
    collect(buffer, states, np.ones((20, 2)), terminated=np.arange(20)[:, None] == 19)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored.set_state(deepcopy(buffer.get_state()))
    advantages = [
        collect(each, states, np.ones((20, 2)), terminated=states[1:, :, 0] > 0) for each in (buffer, restored, fresh)
    ]
    np.testing.assert_array_equal(advantages[0], advantages[1])
    assert not np.allclose(advantages[0], advantages[2])


@pytest.mark.parametrize(("option", "saved", "present"), [("bandwidth", 1.1, 0.5), ("n_features", 12, 24)])
def test_a_fit_with_other_features_is_not_taken_over(option: str, saved: Any, present: Any):
    state = KernelRolloutBuffer(8, VECTOR, DISCRETE, "cpu", **{option: saved}).get_state()
    buffer = KernelRolloutBuffer(8, VECTOR, DISCRETE, "cpu", **{option: present})
    with pytest.warns(UserWarning, match="starts with a new fit"):
        buffer.set_state(state)
