"""The queue that numbers and seeds the starts of a run."""

from typing import NamedTuple

import numpy as np

from sb3_grpo.validation import require_at_least


class Start(NamedTuple):
    """
    The start of one trajectory.

    :param index: Position in the queue of the run, counted from 0
    :param group: Group of the trajectory, ``index // max_group_size``
    :param seed: Seed of the reset, the same for all members of a group
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a start
    group: int
    seed: int


class StartQueue:
    """
    Numbers the starts of a run and gives each group a seed.

    The seed of a group is a function of ``(seed, group)``, so the queue has no random state and continues identically after
    pickling.

    :attr:`group_size` may change in the course of a run, up to ``max_group_size``. Smaller groups leave gaps between the
    indices of their starts, so that the group of a start is always ``index // max_group_size``.

    If several workers reset environments, each worker takes the starts of a part of its own: whole groups, whose numbers leave
    the remainder ``part`` when divided by :attr:`n_parts`. No worker has to know what the others have taken.

    :param group_size: Number of trajectories that share a start, at least 2
    :param seed: Seed of the queue, not negative; ``None`` for a random number from numpy's global generator, as in SB3
    :param max_group_size: Largest group size that the run may choose; ``None`` for ``group_size``
    :raises ValueError: If ``group_size`` is not an integer of at least 2, or ``seed`` not one of at least 0
    """

    def __init__(self, group_size: int, seed: int | None = None, max_group_size: int | None = None):
        require_at_least("group_size", group_size, 2)
        if seed is None:
            seed = int(np.random.randint(0, np.iinfo(np.uint32).max, dtype=np.uint32))
        require_at_least("seed", seed, 0)
        self.group_size = int(group_size)
        self.max_group_size = max(self.group_size, max_group_size or 0)
        self.seed = int(seed)
        # For each part the position of its next start among the starts of the part.
        self._positions = [0]

    @property
    def n_parts(self) -> int:
        """Number of parts; one, unless :meth:`split` was called."""
        return len(self._positions)

    @property
    def next_index(self) -> int:
        """Index of the next start; with several parts, the largest of theirs."""
        return max(self._index(part, position) for part, position in enumerate(self._positions))

    def _index(self, part: int, position: int) -> int:
        group, member = divmod(position, self.max_group_size)
        return (group * self.n_parts + part) * self.max_group_size + member

    def take(self, part: int = 0) -> Start:
        """
        :param part: Part of the queue, from 0
        :return: Its next start
        """
        if self._positions[part] % self.max_group_size >= self.group_size:
            self._positions[part] = self._rounded_up(self._positions[part])
        start = self.start(self._index(part, self._positions[part]))
        self._positions[part] += 1
        return start

    def start(self, index: int) -> Start:
        """
        :param index: Index of a start
        :return: That start
        """
        group = index // self.max_group_size
        return Start(index, group, self._derive_seed(group))

    def begin_group(self) -> None:
        """
        Skip to the first start of a new group. All environments are about to be reset, so unfinished groups stay incomplete.
        """
        self._positions = [self._rounded_up(position) for position in self._positions]

    def split(self, n_parts: int) -> None:
        """
        Divide the starts to come into parts. The groups so far stay incomplete, unless the number of parts is the same.

        :param n_parts: Number of parts
        """
        if n_parts != self.n_parts:
            n_groups = -(-self.next_index // self.max_group_size)
            self._positions = [-(-n_groups // n_parts) * self.max_group_size] * n_parts

    def follow(self, other: "StartQueue", part: int) -> None:
        """
        Note which starts of a part a copy of this queue has taken.

        :param other: The copy
        :param part: The part
        """
        self._positions[part] = other._positions[part]

    def _rounded_up(self, position: int) -> int:
        return -(-position // self.max_group_size) * self.max_group_size

    def seed_apart(self) -> int:
        """
        :return: A seed for resets that are not starts of this queue. It differs from the seeds of all groups, and changes as
            starts are taken
        """
        return self._derive_seed(self.next_index, 0)

    def _derive_seed(self, *spawn_key: int) -> int:
        # 31 bits, because some environments pass the seed to functions that take signed 32-bit integers.
        return int(np.random.SeedSequence(self.seed, spawn_key=spawn_key).generate_state(1)[0] >> 1)
