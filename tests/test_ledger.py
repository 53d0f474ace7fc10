"""The ledger alone: which start comes next, where the environments are, and parts of it for workers."""

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_grpo.starts import Ledger, Position, Start


def listed(position: Position) -> list[tuple[int, ...]]:
    """:return: Group, member and step of each environment"""
    return list(zip(*(array.tolist() for array in position), strict=True))


def run(ledger: Ledger, steps: Sequence[Sequence[int]]) -> list[Start]:
    """
    :param ledger: A ledger
    :param steps: For each step the environments that end an episode
    :return: Their next starts
    """
    starts = []
    for ending in steps:
        starts += [ledger.restart(env_idx) for env_idx in ending]
        ledger.advance()
    return starts


# --- numbers and seeds ------------------------------------------------------------------------------------------------


def test_the_jth_start_of_a_run_belongs_to_group_j_over_group_size_whichever_environment_takes_it():
    ledger = Ledger(3, seed=7)
    starts = ledger.begin_all([0] * 4) + run(ledger, [[2], [], [0, 3], [2, 1]] * 20)
    assert [start[:2] for start in starts] == [(j // 3, j % 3) for j in range(104)]
    assert all(start.seed == ledger.seed_of(start.group) for start in starts)
    seeds = [ledger.seed_of(group) for group in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**31 for seed in seeds) and max(seeds) > 2**30


def test_the_seed_of_a_group_depends_on_the_ledgers_seed_alone():
    def seeds(seed: int | None, group_size: int = 2) -> list[int]:
        ledger = Ledger(group_size, seed)
        ledger.begin_all([0] * 5)
        return [ledger.seed_of(group) for group in range(6)]

    assert seeds(3) == seeds(3, group_size=4) != seeds(4)
    np.random.seed(0)
    first, second = seeds(None), seeds(None)
    np.random.seed(0)
    assert seeds(None) == first != second


def test_seeds_apart_are_those_of_no_group_and_change_as_groups_begin():
    ledger = Ledger(2, seed=0)
    apart = []
    for _ in range(50):
        ledger.begin_all([0, 0])
        apart.append(ledger.seed_apart())
        assert ledger.seed_apart() == apart[-1]
    assert len(set(apart)) == 50 and set(apart).isdisjoint(ledger.seed_of(group) for group in range(1000))


# --- positions --------------------------------------------------------------------------------------------------------


def test_a_position_is_that_after_the_last_step_and_never_changes_afterwards():
    ledger = Ledger(2, seed=0)
    ledger.begin_all([0] * 3)
    first = ledger.position
    assert listed(first) == [(0, 0, 0), (0, 1, 0), (1, 0, 0)] and first.groups.dtype == np.int64
    ledger.advance()
    assert ledger.restart(1)[:2] == (1, 1)
    before = ledger.position
    assert listed(before) == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]  # the step is not over
    ledger.advance()
    assert listed(ledger.position) == [(0, 0, 2), (1, 1, 0), (1, 0, 2)]
    assert listed(ledger.position.take([2, 0])) == [(1, 0, 2), (0, 0, 2)]
    assert listed(before) == [(0, 0, 1), (0, 1, 1), (1, 0, 1)] and listed(first) == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]


def test_the_group_size_may_change_and_applies_to_the_groups_that_begin_afterwards():
    ledger = Ledger(2, seed=7)
    ledger.begin_all([0])
    ledger.group_size = 4
    starts = run(ledger, [[0]] * 6)
    ledger.group_size = 2
    starts += run(ledger, [[0]] * 2)
    assert [start[:2] for start in starts] == [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)]


def test_open_groups_are_those_that_may_get_transitions_with_the_last_step_that_all_members_have_taken():
    ledger = Ledger(2, seed=0)
    ledger.begin_all([0] * 3)
    assert ledger.open_groups() == {0: -1, 1: -1}
    run(ledger, [[], []])
    assert ledger.open_groups() == {0: 1, 1: -1}  # of group 1, a member has not begun
    run(ledger, [[0]])  # which begins it
    assert listed(ledger.position) == [(1, 1, 0), (0, 1, 3), (1, 0, 3)]
    assert ledger.open_groups() == {0: 2, 1: -1}
    run(ledger, [[]])
    assert ledger.open_groups() == {0: 3, 1: 0}
    run(ledger, [[1]])
    assert listed(ledger.position) == [(1, 1, 2), (2, 0, 0), (1, 0, 5)]
    assert ledger.open_groups() == {1: 1, 2: -1}
    run(ledger, [[0, 2]])
    assert listed(ledger.position) == [(2, 1, 0), (2, 0, 1), (3, 0, 0)]
    assert ledger.open_groups() == {2: -1, 3: -1}


@pytest.mark.parametrize("n_steps", [0, 5, 6], ids=["at the start", "within a group", "between groups"])
def test_a_pickled_ledger_continues_identically(n_steps: int):
    ledger = Ledger(3, seed=None)
    ledger.begin_all([0, 1])
    run(ledger, [[0, 1]] * n_steps)
    copy = pickle.loads(pickle.dumps(ledger))
    assert run(copy, [[0], [1]] * 10) == run(ledger, [[0], [1]] * 10)
    assert listed(copy.position) == listed(ledger.position) and copy.open_groups() == ledger.open_groups()
    assert copy.seed_apart() == ledger.seed_apart()


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_each_lane_fills_groups_of_its_own():
    ledger = Ledger(2, seed=0)
    starts = ledger.begin_all([0, 0, 0, 1])
    assert [start[:2] for start in starts] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [start[:2] for start in run(ledger, [[3], [3, 1], [0]])] == [(2, 1), (3, 0), (1, 1), (4, 0)]


@given(
    lanes=st.lists(st.integers(0, 2), min_size=3, max_size=6),
    endings=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=12),
    group_size=st.integers(2, 4),
)
def test_parts_hand_out_whole_groups_as_one_ledger_would(lanes: list[int], endings: list[set[int]], group_size: int):
    """The parts differ from the whole only in the numbers of groups that begin while they are apart."""
    lanes = [sorted(set(lanes)).index(lane) for lane in lanes]
    endings = [{env_idx for env_idx in ending if env_idx < len(lanes)} for ending in endings]
    parted, whole = Ledger(group_size, seed=5), Ledger(group_size, seed=5)
    renamed: dict[int, int] = {}

    def note(of_part: Sequence[int], of_whole: Sequence[int]) -> None:
        for mine, other in zip(of_part, of_whole, strict=True):
            assert renamed.setdefault(mine, other) == other

    assert parted.begin_all(lanes) == whole.begin_all(lanes)
    for first in range(0, len(endings), 4):
        parts = parted.split()
        for ending in endings[first : first + 4]:
            expected = {env_idx: whole.restart(env_idx) for env_idx in sorted(ending)}
            whole.advance()
            for lane, part in enumerate(parts):
                envs = [env_idx for env_idx, each in enumerate(lanes) if each == lane]
                for env_idx in sorted(ending & set(envs)):
                    start = part.restart(envs.index(env_idx))
                    assert start.member == expected[env_idx].member and start.seed == parted.seed_of(start.group)
                    note([start.group], [expected[env_idx].group])
                part.advance()
        parted.join(parts)
        note(parted.position.groups.tolist(), whole.position.groups.tolist())
        assert parted.position.members.tolist() == whole.position.members.tolist()
        assert parted.position.steps.tolist() == whole.position.steps.tolist()
        assert {renamed.get(group, group): step for group, step in parted.open_groups().items()} == whole.open_groups()
    assert len(set(renamed.values())) == len(renamed), "two groups have the same number"
    taken = {*renamed, *parted.position.groups.tolist()}
    assert {start.group for start in parted.begin_all(lanes)}.isdisjoint(taken), "a number is taken twice"
