"""
The ledger of starts: the one place that knows which start each environment runs, and where it is in its trajectory.

A *start* is the beginning of a trajectory. The starts of a group have the same seed, so its members begin in the same state.
"""

import functools
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np


class Start(NamedTuple):
    """The start of one trajectory: number of its group, from 0 over the run, number in the group, and seed of the reset."""

    group: int
    member: int
    seed: int


class Position(NamedTuple):
    """
    Where the environments are in their trajectories: group, member of that group, and number of steps since the start of each,
    arrays of shape ``(n_envs,)``. They are replaced and never modified, so callers may keep them.
    """

    groups: np.ndarray
    members: np.ndarray
    steps: np.ndarray

    def take(self, index: Sequence[int]) -> "Position":
        """:return: The positions of some environments"""
        return Position(*(array[list(index)] for array in self))


class Progress(NamedTuple):
    """A group some of whose members have not ended: number of all members, of those that have begun, and that have ended."""

    size: int
    begun: int = 0
    ended: int = 0


class Ledger:
    """
    Hands out the starts of a run, and records where each environment is.

    The j-th start of a run belongs to group ``j // group_size``, whichever environment takes it. The seed of a group is a
    function of ``(seed, group)``. So the ledger has no random state and continues identically after pickling.

    Environments may be divided into *lanes*. Each lane fills groups of its own, so it can go on without knowing what the
    others have taken.

    :param group_size: Number of trajectories in each group to come, at least 2. It may change in the course of a run
    :param seed: Seed of the run, not negative; ``None`` for a random number from numpy's global generator, as in SB3
    """

    def __init__(self, group_size: int, seed: int | None = None):
        if seed is None:
            seed = int(np.random.randint(0, np.iinfo(np.uint32).max, dtype=np.uint32))
        self.group_size = int(group_size)
        self.seed = int(seed)
        self.position = Position(*(np.zeros(0, dtype=np.int64) for _ in Position._fields))
        self._next_group, self._stride = 0, 1
        # Lane of each environment, and the group that each lane fills
        self._lanes: list[int] = []
        self._filling: dict[int, int] = {}
        self._open: dict[int, Progress] = {}
        self._restarted: dict[int, Start] = {}

    def begin_all(self, lanes: Sequence[int]) -> list[Start]:
        """
        Begin new trajectories in all environments, of new groups, and return their starts. Those in progress stay incomplete.

        :param lanes: Lane of each environment, zeros if there is only one
        """
        self._lanes = list(lanes)
        self._open, self._filling, self._restarted = {}, {}, {}
        starts = [self._take(lane) for lane in self._lanes]
        groups, members, _ = np.array(starts, dtype=np.int64).T
        self.position = Position(groups, members, np.zeros(len(starts), dtype=np.int64))
        return starts

    def restart(self, env_idx: int) -> Start:
        """End the trajectory of an environment with the present step, and return its next start. Then call :meth:`advance`."""
        group = int(self.position.groups[env_idx])
        progress = self._open[group] = self._open[group]._replace(ended=self._open[group].ended + 1)
        if progress.ended == progress.size:
            del self._open[group]
        self._restarted[env_idx] = start = self._take(self._lanes[env_idx])
        return start

    def foresee(self, env_indices: Sequence[int]) -> tuple[int, int]:
        """:return: Group and seed of the next start of the last environment, if :meth:`restart` gets all in this order"""
        trial = copy(self)
        trial._open, trial._filling = dict(self._open), dict(self._filling)
        group, _, seed = [trial._take(self._lanes[env_idx]) for env_idx in env_indices][-1]
        return group, seed

    def advance(self) -> None:
        """Note that all environments have taken a step. Those that were restarted during it are at the start again."""
        groups, members, steps = self.position
        steps = steps + 1
        if self._restarted:
            groups, members = groups.copy(), members.copy()
            for env_idx, start in self._restarted.items():
                groups[env_idx], members[env_idx], steps[env_idx] = start.group, start.member, 0
            self._restarted = {}
        self.position = Position(groups, members, steps)

    def _take(self, lane: int) -> Start:
        group = self._filling.get(lane, -1)
        progress = self._open.get(group)
        if progress is None or progress.begun == progress.size:
            group = self._filling[lane] = self._next_group
            self._next_group += self._stride
            progress = Progress(self.group_size)
        self._open[group] = progress._replace(begun=progress.begun + 1)
        return Start(group, progress.begun, self.seed_of(group))

    def seed_of(self, group: int) -> int:
        """:return: Seed with which the members of a group are reset"""
        return derived_seed(self.seed, group)

    def seed_apart(self, number: int = 0) -> int:
        """:return: A seed for resets that are not starts of this run, unlike those of groups. It changes with each start"""
        return derived_seed(self.seed, self._next_group, 2 * number)

    def open_groups(self) -> dict[int, int]:
        """
        :return: For each group that may still get transitions, the last step that all of its members have taken, from 0; -1 if
            one of them has taken none
        """
        # Of several members of a group, the slowest comes last and stays.
        order = np.argsort(-self.position.steps)
        slowest = dict(zip(self.position.groups[order].tolist(), self.position.steps[order].tolist(), strict=True))
        return {group: slowest[group] - 1 if progress.begun == progress.size else -1 for group, progress in self._open.items()}

    def split(self) -> list["Ledger"]:
        """:return: A ledger for each lane, which can go on by itself. Their new groups have different numbers"""
        n_lanes = max(self._lanes) + 1
        parts = []
        for lane in range(n_lanes):
            part = Ledger(self.group_size, self.seed)
            part.position = self.position.take([env_idx for env_idx, each in enumerate(self._lanes) if each == lane])
            part._lanes = [0] * len(part.position.groups)
            own = {*part.position.groups.tolist(), self._filling[lane]} & self._open.keys()
            part._open = {group: self._open[group] for group in own}
            part._filling = {0: self._filling[lane]}
            part._next_group, part._stride = self._next_group + lane, n_lanes
            parts.append(part)
        return parts

    def join(self, parts: Sequence["Ledger"]) -> None:
        """Take over what the ledgers of :meth:`split`, in their order, have recorded."""
        joined = [np.zeros(len(self._lanes), dtype=np.int64) for _ in Position._fields]
        for lane, part in enumerate(parts):
            for whole, own in zip(joined, part.position, strict=True):
                whole[np.array(self._lanes) == lane] = own
        self.position = Position(*joined)
        self._open = {group: progress for part in parts for group, progress in part._open.items()}
        self._filling = {lane: part._filling[0] for lane, part in enumerate(parts)}
        self._next_group = max(part._next_group - lane for lane, part in enumerate(parts))


@functools.lru_cache(maxsize=256)  # the members of a group have the same
def derived_seed(seed: int, *spawn_key: int) -> int:
    """:return: A seed for resets, a function of the seed of a run and further integers"""
    # 31 bits, because some environments pass the seed to functions that take signed 32-bit integers.
    return int(np.random.SeedSequence(seed, spawn_key=spawn_key).generate_state(1)[0] >> 1)
