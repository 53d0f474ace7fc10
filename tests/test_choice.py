"""Which starts are repeated, how often, and until when; and that runs with repeats are as reproducible as others."""

import itertools
import os
import pathlib
import pickle
import signal
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import helpers
import numpy as np
import pytest
from helpers import AnyEnv, Starts, Watcher, make_model, reload, same, saved, weights
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.starts import Ledger, Start
from sb3_grpo.starts.choice import MAX_POOL, RECENT_GROUPS, EndedGroup, StartChoice

# Workers of Ray cannot import these modules
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(helpers)


def fresh(*returns: float, seed: int = 0) -> EndedGroup:
    return EndedGroup(0, seed, True, returns)


def repeated(*returns: float, seed: int = 0) -> EndedGroup:
    return EndedGroup(0, seed, False, returns)


def choice_after(*rollouts: Iterable[EndedGroup], share: float = 1.0) -> StartChoice:
    choice = StartChoice(share)
    for groups in rollouts:
        choice.record(groups)
    return choice


#: All fail, after a success
FAILURES = [repeated(1, 1, seed=-2), *[fresh(0, 0, seed=-1)] * RECENT_GROUPS]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_probability_of_a_repeat_is_the_largest_share_times_that_of_ties_among_the_last_fresh_groups():
    assert choice_after(FAILURES).probability == 0.0, "there is nothing to repeat"
    assert choice_after(FAILURES, [fresh(0, 1)] * 10).probability == 0.75
    assert choice_after(FAILURES, [fresh(0, 1)] * 10, share=0.5).probability == 0.375
    assert choice_after(FAILURES, [fresh(0, 1)] * RECENT_GROUPS).probability == 0.0
    early = choice_after([fresh(0, 0)] * 9 + [fresh(0, 1)])
    assert early.probability == 9 / RECENT_GROUPS, "groups that are yet to come count as tied"
    assert choice_after([fresh(0, 1)], [repeated(0, 0)] * RECENT_GROUPS).probability == 0.0, "repeats count"


@pytest.mark.parametrize(
    ("groups", "are_rare"),
    [
        pytest.param([fresh(0, 0)] * 4, True, id="a tenth fails"),
        pytest.param([fresh(0, 0)] * 3, False, id="fewer fail"),
        pytest.param([fresh(0, 1e-9)] * 10, False, id="members are alike and not the same, as with dense rewards"),
        pytest.param([fresh(5, 5)] * 10, False, id="all succeed"),
        pytest.param([repeated(0, 0, seed=9)] * 10, False, id="repeats fail"),
    ],
)
def test_starts_are_repeated_while_groups_fail_alike(groups: list[EndedGroup], are_rare: bool):
    mixed = [fresh(0, 1, seed=7)]
    choice = choice_after(mixed + [fresh(1, 1 + 1e-9)] * (RECENT_GROUPS - len(groups)), groups)
    assert list(choice.pool)[:1] == [7] and choice.tied_share > 0
    assert (choice.probability > 0) == are_rare


def test_where_every_group_differs_nothing_is_repeated():
    rng = np.random.default_rng(0)
    choice = choice_after(*([fresh(*rng.normal(size=2), seed=seed + 5 * n) for seed in range(5)] for n in range(60)))
    assert len(choice.pool) > 200 and choice.tied_share < 0.2
    assert choice.draw((0.0, 0.5)) is None


@pytest.mark.parametrize(("unit", "shift"), [(1.0, 0.0), (1e-6, 0.0), (1e6, 0.0), (3.0, -1000.0)])
def test_the_unit_and_the_zero_of_the_reward_do_not_matter(unit: float, shift: float):
    def group(*returns: float, seed: int, is_fresh: bool = True) -> EndedGroup:
        return EndedGroup(0, seed, is_fresh, [unit * each + shift for each in returns])

    first = [group(0, 0, seed=1), group(0, 1, seed=2), group(0.5, 0.51, seed=3), group(0.4, 0.9, seed=4)]
    choice = choice_after(first, [group(0.9, 0.9, seed=4, is_fresh=False), group(0, 0, seed=2, is_fresh=False)])
    assert list(choice.pool) == [2] and choice.tied_share == 2 / RECENT_GROUPS
    assert choice.pool[2].score == pytest.approx(unit**2 / 8)


def test_a_start_leaves_once_all_succeed_and_fades_where_all_fail():
    some = [fresh(0, 1, seed=7), fresh(0, 1, seed=8)]
    assert {seed: start.score for seed, start in choice_after(some).pool.items()} == {7: 0.25, 8: 0.25}
    choice = choice_after(some, [repeated(0, 0, seed=7), repeated(1, 1, seed=8)])
    assert {seed: start.score for seed, start in choice.pool.items()} == {7: 0.125}
    choice.record([repeated(0, 1, seed=7), repeated(0, 1, seed=8)])
    assert {seed: start.score for seed, start in choice.pool.items()} == {7: 0.1875}, "a start that has left comes back"
    choice.record([fresh(1, 1, seed=9), fresh(0, 0, seed=10)])
    assert list(choice.pool) == [7], "a group that was tied from the beginning enters"


def test_starts_are_drawn_in_proportion_to_their_scores():
    choice = choice_after(FAILURES, [fresh(0, 2, seed=5), fresh(0, 4, seed=6)])
    assert choice.probability == 0.95
    uniform = np.random.default_rng(0).random((20_000, 2))
    drawn = [choice.draw(row) for row in uniform]
    assert drawn.count(None) / len(drawn) == pytest.approx(0.05, abs=0.01)
    assert drawn.count(6) / drawn.count(5) == pytest.approx(4, rel=0.1)
    assert choice.draw((0.0, 1 - 2**-32)) == 6


def test_a_full_pool_keeps_the_starts_with_the_highest_scores():
    choice = choice_after([fresh(0, 100 + seed, seed=seed) for seed in range(MAX_POOL + 50)])
    assert sorted(choice.pool) == list(range(50, MAX_POOL + 50))


def test_the_log_describes_the_last_rollout():
    choice = choice_after(FAILURES, [fresh(0, 1, seed=5), fresh(0, 2, seed=6)])
    assert choice.metrics == {"rollout/fresh_groups_tied": 0.95, "rollout/pool_size": 2, "rollout/groups_repeated": 0}
    for _ in range(2):
        choice.record([])
        assert choice.metrics == {"rollout/fresh_groups_tied": 0.95, "rollout/pool_size": 2}
    choice.record([repeated(2, 2, seed=6), fresh(0, 0)])
    assert choice.metrics == {
        "rollout/fresh_groups_tied": 0.95,
        "rollout/pool_size": 1,
        "rollout/groups_repeated": 0.5,
        "rollout/repeats_score": 1.0,
        "rollout/repeats_age": 3.0,
    }


# --- the ledger -------------------------------------------------------------------------------------------------------


def taken(ledger: Ledger, n_starts: int) -> list[Start]:
    """:return: The next starts of a ledger, whose environments end one episode after another"""
    starts = []
    for j in range(n_starts):
        starts.append(ledger.restart(j % len(ledger.position.groups)))
        ledger.advance()
    return starts


def ledger_with_pool(share: float = 1.0) -> Ledger:
    """:return: A ledger with two environments, with the seed of group 0 in its pool, after many groups that were tied"""
    ledger = Ledger(2, seed=3, repeat_starts=share)
    ledger.begin_all([0, 0])
    taken(ledger, 2 * RECENT_GROUPS + 2)
    ledger.record({0: (0.0, 1.0), **dict.fromkeys(range(1, RECENT_GROUPS + 1), (0.0, 0.0))})
    return ledger


def test_groups_repeat_the_seed_of_the_pool_and_others_have_the_seeds_that_they_had_without_repeats():
    ledger, plain = ledger_with_pool(share=0.5), Ledger(2, seed=3)
    starts = taken(ledger, 400)
    assert all(start.seed == ledger.seed_of(start.group) for start in starts)
    groups = {start.group: start.seed for start in starts if start.group > RECENT_GROUPS + 1}
    again = {group for group in groups if ledger.repeats(group)}
    assert 0.35 < len(again) / len(groups) < 0.65
    for group, seed in groups.items():
        assert seed == plain.seed_of(0 if group in again else group)


def test_workers_choose_as_the_learner_would_and_their_choices_are_known_to_it():
    ledger = ledger_with_pool(share=0.5)
    ledger.begin_all([0, 1])
    parts = [pickle.loads(pickle.dumps(part)) for part in ledger.split()]
    starts = [start for part in parts for start in taken(part, 100)]
    for start in starts:
        whole = pickle.loads(pickle.dumps(ledger))
        whole._next_group = start.group
        assert whole.seed_of(whole._new_group()) == start.seed
    ledger.join(parts)
    assert all(ledger.seed_of(start.group) == start.seed for start in starts)
    assert 20 < sum(ledger.repeats(group) for group in {start.group for start in starts}) < 80


def test_a_group_that_repeats_keeps_its_seed_until_its_returns_are_recorded():
    ledger = ledger_with_pool()
    begun = max(group for group in range(RECENT_GROUPS + 10) if ledger.is_open(group))
    repeats = [start.group for start in taken(ledger, 400)]
    group = next(group for group in repeats if ledger.repeats(group) and group > begun and not ledger.is_open(group))
    seed = ledger.seed_of(group)
    still_open = [each for each in repeats if ledger.is_open(each) and ledger.repeats(each)]
    ledger.record({group: (1.0, 1.0)})
    assert seed == Ledger(2, seed=3).seed_of(0) not in ledger.choice.pool
    assert not ledger.repeats(group) and all(ledger.repeats(each) for each in still_open)


# --- whole runs -------------------------------------------------------------------------------------------------------


class Lock(AnyEnv):
    """At one of three starts, an episode with a first action of 0 or 1 earns a reward at its end; at the others, none does."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.opens = self.first_observation[0] < -1 / 3
        self.is_first = True
        return observation, info

    def step(self, action: Any) -> Any:
        if self.is_first:
            self.opens, self.is_first = self.opens and action > 0, False
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.opens and (terminated or truncated)), terminated, truncated, info


class Forgetful(Lock):
    """Ignores the seed."""

    seeds: ClassVar = itertools.count()

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(seed=next(self.seeds))


class Seen(Watcher):
    """Also notes for each episode that has ended its group and whether it repeats a start, and its return."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[tuple[int, bool, float]] = []

    def _on_step(self) -> bool:
        ledger: Any = self.model.ledger  # type: ignore[attr-defined]
        for env in np.flatnonzero(self.locals["dones"]).tolist():
            group = int(self.locals["position"].groups[env])
            self.episodes.append((group, ledger.repeats(group), float(self.locals["infos"][env]["episode"]["r"])))
        return super()._on_step()


def locks(n_envs: int = 2, env_class: Any = Lock) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(env_class())] * n_envs)


def make(**kwargs: Any) -> Any:
    return make_model(**{"env": locks(), "repeat_starts": 1.0, "n_steps": 64, "learning_rate": 1e-4, **kwargs})


@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_buffer_repeats_starts_at_which_members_differed_and_members_share_them(buffer: str):
    starts, seen = Starts(), Seen()
    model = make(rollout_buffer_class=buffer).learn(64 * 2 * 6, callback=[starts, seen])
    repeats = {group for group, repeats, _ in seen.episodes if repeats}
    assert len(repeats) > 20
    assert all(len(firsts) == 1 for firsts in starts.groups(2))
    returns: dict[tuple[float, ...], list[list[float]]] = {}
    by_group: dict[int, list[float]] = {}
    for group, _, total in seen.episodes:
        by_group.setdefault(group, []).append(total)
    for group in sorted(by_group):
        first = starts.firsts[group, 0]
        if group in repeats:
            assert [0.0, 1.0] in map(sorted, returns[first]), "its members have not differed before"
        returns.setdefault(first, []).append(by_group[group])
    assert model.ledger.choice.metrics["rollout/pool_size"] > 0


@pytest.mark.parametrize("n_envs", [1, 5])
def test_any_number_of_environments_repeats_starts(n_envs: int):
    seen = Seen()
    make(env=locks(n_envs), batch_size=n_envs * 16).learn(128 * n_envs * 3, callback=seen)
    assert any(repeats for _, repeats, _ in seen.episodes)


def test_the_logged_return_is_that_of_fresh_starts():
    seen = Seen()
    model = make(stats_window_size=10_000).learn(64 * 2 * 6, callback=seen)
    of_fresh = [total for _, repeats, total in seen.episodes if not repeats]
    assert [episode["r"] for episode in model.ep_info_buffer] == of_fresh
    assert 0 < len(of_fresh) < len(seen.episodes)
    assert np.mean(of_fresh) < np.mean([total for *_, total in seen.episodes]) - 0.05


@pytest.mark.parametrize(
    "options",
    [dict(repeat_starts=0.0), dict(share_starts=False), dict(env=locks(env_class=Forgetful))],
    ids=["share 0", "independent starts", "seeds are ignored"],
)
@pytest.mark.filterwarnings("ignore:The environment 'Lock|The environment 'Forgetful")
def test_repeats_are_off(options: dict[str, Any]):
    seen = Seen()
    model = make(**options).learn(64 * 2 * 6, callback=seen)
    assert not any(repeats for _, repeats, _ in seen.episodes) and model.ledger.choice.pool == {}
    assert not [key for key in model.logger.name_to_value if "repeat" in key]


def test_repeats_stop_once_a_start_has_differed_or_starts_are_no_longer_shared():
    model = make().learn(64 * 2 * 6)
    assert model.ledger.choice.pool
    seen = Seen()
    model.share_starts = False
    model.learn(64 * 2 * 2, callback=seen, reset_num_timesteps=False)
    assert model.ledger.choice.pool == {} and not any(repeats for _, repeats, _ in seen.episodes[-20:])


def test_the_share_can_be_changed_between_two_calls_of_learn():
    """Groups that have begun keep their start: pytest is set up so that the warning of a mismatch is an error."""
    model = make(repeat_starts=0.0).learn(64 * 2 * 2)
    model.repeat_starts = 1.0
    seen = Seen()
    model.learn(64 * 2 * 8, reset_num_timesteps=False, callback=seen)
    assert model.ledger.choice.share == 1.0 and any(repeats for _, repeats, _ in seen.episodes)
    model.repeat_starts = 0.0
    seen = Seen()
    model.learn(64 * 2 * 2, reset_num_timesteps=False, callback=seen, log_interval=1000)
    assert model.ledger.choice.pool == {} and not any(repeats for _, repeats, _ in seen.episodes[5:])
    assert "rollout/pool_size" not in model.logger.name_to_value
    model.repeat_starts = 1.5
    with pytest.raises(ValueError, match="`repeat_starts` must be a finite number from 0 to 1"):
        model.learn(64 * 2)


def test_a_loaded_model_continues_with_the_pool_bit_for_bit():
    model = make().learn(64 * 2 * 6)
    file = saved(model)
    assert model.ledger.choice.pool
    loaded = GRPO.load(file, env=locks(), device="cpu")
    model.set_env(locks(), force_reset=True)  # as the loaded model, this one continues from a reset
    file.seek(0)
    again = GRPO.load(file, env=locks(), device="cpu")
    seen = []
    for each in (loaded, again):
        seen.append(Seen())
        each.learn(64 * 2 * 6, callback=seen[-1], reset_num_timesteps=False)
    assert seen[0].episodes == seen[1].episodes and same(weights(loaded), weights(again))
    assert any(repeats for _, repeats, _ in seen[0].episodes[:10]), "the pool was lost"
    assert reload(model, env=locks(), repeat_starts=0.0).ledger.choice.share == 0.0


def test_a_new_run_has_an_empty_pool():
    model = make(seed=1).learn(64 * 2 * 6)
    seen = Seen()
    reload(model, env=locks()).learn(64 * 2, callback=seen)
    assert not any(repeats for _, repeats, _ in seen.episodes)


class Mortal(Lock):
    """Kills its process once, at a step of its own, if a marker file is not there yet."""

    def __init__(self, marker: str = "", at: int = 0):
        super().__init__()
        self.marker, self.at, self.n_steps = marker, at, 0

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == self.at and not os.path.exists(self.marker):
            pathlib.Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def monitored_lock(*args: Any) -> Monitor:
    return Monitor(Mortal(*args))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_workers_of_ray_repeat_starts_and_one_that_dies_changes_nothing(tmp_path: pathlib.Path):
    from sb3_grpo.distributed import RayVecEnv

    runs, marker = [], tmp_path / "marker"
    for at in (0, 200):  # in the last rollout
        functions = [monitored_lock] * 3 + [partial(monitored_lock, str(marker), at)]
        env, seen = RayVecEnv(functions, n_workers=2), Seen()
        model = make(env=env, batch_size=64).learn(64 * 4 * 4, callback=seen)
        env.close()
        runs.append((seen.episodes, weights(model)))
    assert marker.exists()
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    seeds: dict[bool, set[int]] = {True: set(), False: set()}
    for group, repeats, _ in runs[0][0]:
        seeds[repeats].add(group)
    assert len(seeds[True]) > 10 and seeds[True].isdisjoint(seeds[False])
