"""The relative term: it removes what members have in common, without bias, and does nothing where they share nothing."""

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import reload
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo import GRPO
from sb3_grpo import advantages as A
from sb3_grpo.relative import FORGETTING, MAX_AGE, RelativeTerm, correlation_sums, shrunk_correlation, sums_of_others
from sb3_grpo.starts import Ledger

# --- the formula ------------------------------------------------------------------------------------------------------


def test_a_part_of_the_mean_of_the_others_is_subtracted_as_worked_out_by_hand():
    advantages, peers = np.array([1.0, 4.0, 7.0, 2.0]), np.array([0, 0, 0, 1])
    np.testing.assert_allclose(A.relative_advantages(advantages, peers, 0.5), [1 - 5.5 / 2, 4 - 4 / 2, 7 - 2.5 / 2, 2])
    assert A.relative_coefficient(np.array([0.5, 0.5, 0.5, 1.0]), np.array([0, 1, 3, 0])).tolist() == [0.0, 0.5, 0.75, 0.0]


@pytest.mark.parametrize("n_others", [1, 3])
def test_the_coefficient_leaves_the_least_variance(n_others: int):
    """For advantages ``u + v_i`` with ``Var(u) = rho`` and ``Var(v_i) = 1 - rho``, the variance that is left is known."""
    rho = 0.6
    c = float(A.relative_coefficient(np.array([rho]), np.array([n_others]))[0])

    def left(c: float) -> float:
        return rho * (1 - c) ** 2 + (1 - rho) * (1 + c**2 / n_others)

    assert left(c) < min(left(c - 0.01), left(c + 0.01))


def test_without_a_baseline_and_with_all_of_it_it_is_the_stepwise_buffer():
    rng = np.random.default_rng(0)
    lengths, groups = np.array([5, 3, 4, 4, 4]), np.array([0, 0, 1, 1, 1])
    rewards, zeros = rng.normal(size=lengths.sum()), np.zeros(lengths.sum())
    returns = A.generalized_advantages(rewards, zeros, zeros, A.same_trajectory_continues(lengths), 0.9, 1.0)
    peers = A.peers_at_each_step(lengths, groups)
    relative = A.relative_advantages(returns, peers, 1.0)
    stepwise = A.stepwise_advantages(rewards, lengths, groups, gamma=0.9, scale="none")
    alone = np.bincount(peers)[peers] == 1
    assert alone.sum() == 2
    np.testing.assert_allclose(relative[~alone], stepwise[~alone], atol=1e-12)
    assert np.array_equal(relative[alone], returns[alone])  # `stepwise` makes them zero


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0])
def test_the_gradient_is_without_bias_and_a_comparison_with_oneself_is_not(c: float):
    """
    Two members choose between a reward of 0 and one of 2 with probability ``p``, and an input of -3 or 3 that they share is
    added. All outcomes are enumerated; the gradient of the expected reward in the logit is ``2 p (1 - p)``.
    """
    p, true_gradient = 0.3, 2 * 0.3 * 0.7
    gradients, with_oneself, squares = 0.0, 0.0, 0.0
    for shared, first, second in itertools.product([-3.0, 3.0], [0, 1], [0, 1]):
        actions = np.array([first, second])
        probability = 0.5 * np.prod(np.where(actions == 1, p, 1 - p))
        rewards, scores, peers = shared + 2.0 * actions, actions - p, np.array([0, 0])
        estimate = float(np.mean(scores * A.relative_advantages(rewards, peers, c)))
        gradients += probability * estimate
        squares += probability * (estimate - true_gradient) ** 2
        with_oneself += probability * float(np.mean(scores * (rewards - c * rewards.mean())))
    assert gradients == pytest.approx(true_gradient)
    assert with_oneself == pytest.approx(true_gradient * (1 - c / 2))
    assert squares == pytest.approx({0.0: 1.1508, 0.5: 0.4074, 1.0: 0.2436}[c])


# --- the coefficient --------------------------------------------------------------------------------------------------


def advantages_of_groups(n_groups: int, rho: float, rng: np.random.Generator, heavy: bool = False) -> np.ndarray:
    """:return: Advantages of pairs over ten steps that are equal within a trajectory, shape ``(n_groups, 2, 10)``"""
    draw = (lambda *shape: rng.standard_t(2.5, shape)) if heavy else (lambda *shape: rng.normal(size=shape))
    values = np.sqrt(rho) * draw(n_groups, 1, 1) + np.sqrt(1 - rho) * draw(n_groups, 2, 1)
    return np.repeat(values, 10, axis=2)


def sums_of(advantages: np.ndarray) -> np.ndarray:
    others = advantages[:, ::-1]
    groups = np.repeat(np.arange(len(advantages)), 20)
    return correlation_sums(advantages.ravel(), others.ravel(), groups).sum(axis=0)


def test_the_shrunk_correlation_is_as_worked_out_by_hand():
    # Groups with n = (2, 6, 4) and d = (4, 8, 4): rho = 3/4, residuals -1, 0 and 1, m = 256 / 96
    sums = np.array([9.0, 12.0, 16.0, 4 + 36 + 16, 8 + 48 + 16, 16 + 64 + 16])
    m = 256 / 96
    squared_error = 2 / 256 * m / (m - 1)
    assert shrunk_correlation(sums) == pytest.approx(0.75 * (1 - 4 * squared_error / 0.75**2))


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy-tailed"])
def test_members_that_have_nothing_in_common_get_a_coefficient_of_zero(heavy: bool):
    rng = np.random.default_rng(0)
    found = np.array([shrunk_correlation(sums_of(advantages_of_groups(20, 0.0, rng, heavy))) for _ in range(400)])
    assert np.mean(found == 0.0) > 0.93
    unshrunk = np.array([sums_of(advantages_of_groups(20, 0.0, rng, heavy))[1:3] for _ in range(400)])
    assert np.mean(unshrunk[:, 0] > 0) > 0.4


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_what_members_have_in_common_is_found(rho: float):
    rng = np.random.default_rng(0)
    found = [float(shrunk_correlation(sums_of(advantages_of_groups(100, rho, rng)))) for _ in range(100)]
    assert rho - 0.1 < np.mean(found) < rho  # shrinking makes it a little smaller


def test_one_group_is_not_enough_to_tell():
    assert shrunk_correlation(sums_of(advantages_of_groups(1, 0.9, np.random.default_rng(0)))) == 0.0
    assert shrunk_correlation(np.zeros(6)) == 0.0


def test_the_sum_of_the_others_does_not_lose_small_ones_beside_a_large_one():
    values = np.array([[1e20], [1.0], [2.0]])
    assert sums_of_others(values)[0, 0] == 3.0
    assert (values.sum(axis=0) - values)[0, 0] == 0.0


# --- rollouts ---------------------------------------------------------------------------------------------------------


def shared_rollout(n_groups: int, group_size: int, n_steps: int, rng: np.random.Generator, first: int = 0) -> list[Any]:
    """:return: Advantages, groups and steps of a rollout in which groups live through inputs of their own, and are complete"""
    shared = 3.0 * rng.normal(size=(n_groups, 1, n_steps))
    advantages = shared + rng.normal(size=(n_groups, group_size, n_steps))
    groups = np.arange(n_groups).repeat(group_size * n_steps) + first
    return [advantages.ravel(), groups, np.tile(np.arange(n_steps), n_groups * group_size), {}]


@pytest.mark.parametrize("group_size, least", [(2, 0.75), (8, 0.85)])
def test_the_variance_due_to_shared_inputs_is_removed(group_size: int, least: float):
    rng, term = np.random.default_rng(0), RelativeTerm()
    for rollout in range(5):
        given = shared_rollout(8, group_size, 50, rng, 8 * rollout)
        relative = term.apply(*given)
    removed = 1 - relative.var() / given[0].var()
    assert removed > least
    assert term.metrics["train/relative_variance_removed"] == pytest.approx(removed)
    assert 0.85 < term.metrics["train/relative_coefficient"] <= 1.0


def test_the_coefficient_of_a_group_does_not_depend_on_its_own_advantages():
    advantages, *rest = shared_rollout(4, 2, 30, np.random.default_rng(0))
    own = rest[0] == 0
    changed = np.where(own, 100.0 * np.arange(1, len(own) + 1), advantages)
    coefficients = []
    for values in (advantages, changed):
        term = RelativeTerm()
        term.apply(*shared_rollout(4, 2, 30, np.random.default_rng(1), first=100))
        relative = term.apply(values, *rest)
        others = values.reshape(4, 2, 30)[:, ::-1].ravel()
        coefficients.append(((values - relative) / others).reshape(4, 2, 30))
    np.testing.assert_allclose(coefficients[0][0], coefficients[1][0])
    assert not np.allclose(coefficients[0][1:], coefficients[1][1:])


def test_advantages_of_zero_do_not_disturb():
    term = RelativeTerm()
    given = shared_rollout(4, 2, 10, np.random.default_rng(0))
    assert not term.apply(np.zeros(80), *given[1:]).any()
    assert np.isfinite(term.apply(*given)).all()


def slow_term(history: list[list[Any]]) -> list[np.ndarray]:
    """The relative term of each rollout, computed transition by transition from everything that came before."""
    seen: list[tuple[int, int, int, float]] = []  # rollout, group, step, advantage over the unit of its rollout
    earlier, results = np.zeros(6), []
    for number, (advantages, groups, steps, _) in enumerate(history):
        unit = math.sqrt(sum(a * a for a in advantages) / len(advantages))
        seen += [(number, int(g), int(t), float(a) / unit) for a, g, t in zip(advantages, groups, steps, strict=True)]
        others = []
        for own in range(len(seen) - len(groups), len(seen)):
            others.append([
                a * unit for i, (rollout, group, step, a) in enumerate(seen)
                if (group, step) == seen[own][1:3] and i != own and rollout > number - MAX_AGE
            ])  # fmt: skip
        sums = {}
        for group in set(groups):
            pairs = [(a, np.mean(x)) for a, x, g in zip(advantages, others, groups, strict=True) if x and g == group]
            n, d = sum(a * x for a, x in pairs), sum(a * a for a, _ in pairs)
            sums[group] = np.array([len(pairs), n, d, n * n, n * d, d * d])

        def in_units(total: np.ndarray) -> np.ndarray:
            square = total[2] / total[0] if total[0] > 0 else 1.0
            return total / np.array([1.0, square, square, square**2, square**2, square**2])

        relative = []
        for a, x, g in zip(advantages, others, groups, strict=True):
            of_others = sum((value for group, value in sums.items() if group != g), np.zeros(6))
            rho = float(shrunk_correlation(earlier + in_units(of_others)))
            c = rho * len(x) / (1 + (len(x) - 1) * rho) if x else 0.0
            relative.append(a - c * np.mean(x) if x else a)
        results.append(np.array(relative))
        earlier = FORGETTING * (earlier + in_units(sum(sums.values(), np.zeros(6))))
    return results


def drifting_history(n_envs: int, group_size: int, n_rollouts: int, n_steps: int = 12) -> list[list[Any]]:
    """:return: Rollouts with episodes of random length. In the middle, the size of new groups grows by one"""
    rng, ledger = np.random.default_rng(0), Ledger(group_size, seed=0)
    ledger.begin_all([0] * n_envs)
    inputs: dict[int, np.ndarray] = {}
    lengths = rng.integers(3, 40, n_envs)
    history = []
    for rollout in range(n_rollouts):
        ledger.group_size = group_size + rollout // (n_rollouts // 2)
        rows: list[list[tuple[float, int, int]]] = [[] for _ in range(n_envs)]
        for _ in range(n_steps):
            groups, _, steps = ledger.position
            for env, (group, step) in enumerate(zip(groups.tolist(), steps.tolist(), strict=True)):
                stream = inputs.setdefault(group, rng.normal(size=50))
                rows[env].append((2.0 * stream[step] + rng.normal(), group, step))
                if step == lengths[env] - 1:
                    ledger.restart(env)
                    lengths[env] = rng.integers(3, 40)
            ledger.advance()
        columns = zip(*itertools.chain(*rows), strict=True)
        history.append([*map(np.array, columns), ledger.open_groups()])
    return history


@pytest.mark.parametrize("n_envs, group_size", [(1, 2), (3, 2), (4, 4), (5, 3)])
def test_members_that_run_later_are_compared_with_those_before(n_envs: int, group_size: int):
    history = drifting_history(n_envs, group_size, n_rollouts=25)
    term = RelativeTerm()
    results = [term.apply(*rollout) for rollout in history]
    for found, expected in zip(results, slow_term(history), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    # Without what is kept, later members would have nobody to be compared with
    forgetful, different = RelativeTerm(), 0
    for rollout, found in zip(history, results, strict=True):
        different += not np.allclose(forgetful.apply(*rollout), found)
        forgetful.forget_trajectories()
    assert different > 10


def test_the_size_of_earlier_advantages_does_not_matter():
    history = drifting_history(n_envs=3, group_size=2, n_rollouts=25)
    terms = RelativeTerm(), RelativeTerm()
    for number, (advantages, *rest) in enumerate(history):
        scale = 1000.0**-number  # as if the task were solved more and more
        results = [term.apply(factor * advantages, *rest) / factor for term, factor in zip(terms, (1.0, scale), strict=True)]
        np.testing.assert_allclose(*results, rtol=1e-9, atol=1e-12)
    assert not terms[0].apply(0.0 * history[0][0], *history[-1][1:]).any()
    assert terms[0]._kept.advantages.any()


def test_what_is_kept_does_not_grow_while_episodes_never_end():
    term, rng, sizes = RelativeTerm(), np.random.default_rng(0), []
    for rollout in range(3 * MAX_AGE):
        # The second member of the group never runs
        term.apply(rng.normal(size=10), np.zeros(10, dtype=int), np.arange(10) + 10 * rollout, {0: -1})
        sizes.append(len(term._kept.groups))
    assert max(sizes) == sizes[-1] == 10 * MAX_AGE
    # Until all members have passed a step, or the group is closed
    for open_groups, kept in (({0: 10 * rollout + 6}, [7, 8, 9]), ({}, [])):
        term.apply(rng.normal(size=1), np.ones(1, dtype=int), np.zeros(1, dtype=int), open_groups)
        assert (term._kept.steps - 10 * rollout).tolist() == kept


# --- training ---------------------------------------------------------------------------------------------------------


class Weather(gym.Env):
    """The reward is the weather, which nobody sees, plus a little for action 1; actions end an episode early or late."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seeded: bool = True):
        self.seeded = seeded

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed if self.seeded else None)
        self.weather = 5.0 * self.np_random.normal(size=60)
        self.t = self.n_ones = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self.weather[self.t] + 0.1 * float(action)
        self.t += 1
        self.n_ones += int(action)
        return np.zeros(1, np.float32), reward, self.n_ones >= 25, self.t == 60, {}


def make(env: Any = Weather, **kwargs: Any) -> GRPO:
    env = env if isinstance(env, VecEnv) else make_vec_env(env, n_envs=4)
    settings: dict[str, Any] = dict(seed=0, n_steps=64, n_epochs=2, policy_kwargs=dict(net_arch=[8]), device="cpu")
    return GRPO("MlpPolicy", env, **{**settings, **kwargs})


def trained(model: GRPO, n_rollouts: int = 10) -> dict[str, float]:
    model.learn(n_rollouts * model.n_steps * model.n_envs)
    return model.rollout_buffer.metrics


@pytest.mark.parametrize("n_envs", [1, 3, 4])
def test_by_default_the_term_removes_what_the_seed_fixes(n_envs: int):
    metrics = trained(make(make_vec_env(Weather, n_envs=n_envs), n_steps=512 // n_envs, batch_size=512 // n_envs))
    assert metrics["train/relative_coefficient"] > 0.4
    assert metrics["train/relative_variance_removed"] > 0.4


@pytest.mark.parametrize(
    "env, kwargs", [({}, dict(share_starts=False)), (dict(seeded=False), {})], ids=["starts not shared", "seeds ignored"]
)
@pytest.mark.filterwarnings("ignore:.*does not reproduce its initial state")
def test_the_term_is_zero_where_nothing_is_shared(env: dict[str, Any], kwargs: dict[str, Any]):
    metrics = trained(make(make_vec_env(Weather, n_envs=4, env_kwargs=env), **kwargs))
    assert metrics["train/relative_coefficient"] < 0.02
    assert abs(metrics["train/relative_variance_removed"]) < 0.02


def sizes_of_groups(model: Any, n_rollouts: int = 10) -> list[int]:
    """:return: Group size at the beginning of each rollout"""
    sizes = []

    class Sizes(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            sizes.append(model.ledger.group_size)

    model.learn(n_rollouts * model.n_steps * model.n_envs, callback=Sizes())
    return sizes


def test_groups_grow_where_members_have_much_in_common():
    model = make(make_vec_env(Weather, n_envs=8))
    sizes = sizes_of_groups(model)
    assert sizes[0] == 2
    assert sizes[-1] == 4
    assert model.rollout_buffer.members.max() > 1
    # A loaded model goes on with the groups that it had
    assert reload(model, env=make_vec_env(Weather, n_envs=8)).ledger.group_size == 4


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(group_size=2),
        dict(share_starts=False),
        dict(rollout_buffer_kwargs=dict(relative=False)),
        dict(rollout_buffer_class="stepwise"),
    ],
    ids=["size given", "starts not shared", "switched off", "another buffer"],
)
def test_groups_do_not_grow(kwargs: dict[str, Any]):
    assert set(sizes_of_groups(make(make_vec_env(Weather, n_envs=8), **kwargs), 5)) == {2}


def test_a_loaded_model_knows_how_much_members_have_in_common():
    model = make(make_vec_env(Weather, n_envs=3))
    trained(model)
    loaded = reload(model, env=make_vec_env(Weather, n_envs=3))
    assert loaded.rollout_buffer.relative_term.correlation == model.rollout_buffer.relative_term.correlation > 0.4
