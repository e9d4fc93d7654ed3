"""Which copy would be missed least? A policy ranks; it never evicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.model.groups import name_of
from tierstore.model.tiers import Tier
from tierstore.plan.schedule import Ranks, Schedule

_UNEXPECTED = 1e12
"""Above the rank of everything that is expected, below infinity."""

_FIRST = 1e14
"""Added to the rank of what should go before all others."""

LEAVING = 3
"""How many copies on the device count as about to leave it."""

DISK_COSTS = 4.0
"""How many times as long a group takes from disk as from host memory, roughly."""

HARMLESS = 3.0
"""A prefetch pushes out only what is needed so many times later than it. What is needed a little
later would be read once more for nothing: soon something better to push out is there, such as the
group that is in use."""

_FEW = 8
_ROOM = 16

Rows = npt.NDArray[np.int64]
_NONE: Rows = np.zeros(0, dtype=np.int64)


class Policy(Protocol):
    """One ranking for all tiers. The planner tells it what it does and asks for victims."""

    def admitted(self, key: str, tier: Tier) -> None:
        """A copy of `key` is complete on `tier`."""

    def used(self, key: str) -> None:
        """`key` was leased."""

    def dropped(self, key: str, tier: Tier) -> None:
        """The copy of `key` on `tier` is gone."""

    def keep(self, numbers: Collection[int], nearer: float) -> None:
        """These groups, by their numbers in the schedule, should stay in host memory.

        They are given up as if their next use were so many times (below 1) as far ahead.
        """

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        """Keys with a copy on `tier`, the one missed least first.

        `rival` is the key of a prefetch that wants the room: only keys needed (much) later than it
        are yielded. None: the room must be had, so every key is yielded sooner or later.
        """


class LeastRecentlyUsed:
    """The copy that was not used for longest goes first.

    A group on the device and in host memory is there twice. Of the host copies, those go first
    whose group will stay on the device: all but the few that the device would give up next. Of the
    device copies, one that the host has too is missed less than one that only the disk has: as
    if its next use were four times as far. So some groups stay on the device and others pass
    through it, the two tiers together hold nearly as many groups as fit both, and what leaves the
    device need not be copied back.
    """

    def __init__(self) -> None:
        # Copies have rows, so that a ranking is one array. Rows of what is gone are left empty
        # until there are too many; then the arrays are made anew, and who still looks through
        # the old ones may go on.
        self._row: dict[str, int] = {}
        self._keys: list[str] = []
        # 0 for what has a copy, -infinity for what has none. Added to all ranks, it leaves those of
        # the copies, much faster than choosing them does.
        self._absent: dict[Tier, Ranks] = {tier: np.full(_ROOM, -np.inf) for tier in Tier}
        self._copies = dict.fromkeys(Tier, 0)
        self._touched = np.zeros(_ROOM)
        self._clock = 0

    def admitted(self, key: str, tier: Tier) -> None:
        row = self._row.get(key)
        if row is None:
            row = self._new_row(key)
        self._copies[tier] += not self._is_on(tier, row)
        self._absent[tier][row] = 0.0
        self._touch(row)

    def used(self, key: str) -> None:
        row = self._row.get(key)
        if row is not None:
            self._touch(row)

    def dropped(self, key: str, tier: Tier) -> None:
        row = self._row.get(key)
        if row is None:
            return
        self._copies[tier] -= self._is_on(tier, row)
        self._absent[tier][row] = -np.inf
        if all(absent.item(row) for absent in self._absent.values()):
            del self._row[key]

    def keep(self, numbers: Collection[int], nearer: float) -> None:
        pass  # what was used lately stays

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        rows = len(self._keys)
        ranks = self._ranks()[:rows]
        found = ranks + self._absent[tier][:rows]
        bar = -np.inf if rival is None else self._rank_of_rival(rival)
        if bar > -np.inf:
            found[ranks <= bar] = -np.inf
        if rival in self._row:
            found[self._row[rival]] = -np.inf
        if tier is Tier.HOST:
            settled = self._settled(ranks)
            found[settled] += _FIRST
            self._spare(found, settled, rival)
        elif tier is Tier.DEVICE:
            twice = (found > -np.inf) & self._on(Tier.HOST, rows)
            found[twice] = self._farther(found[twice], DISK_COSTS)
        return _descending(self._keys, found)

    def _spare(self, ranks: Ranks, settled: Rows, rival: str | None) -> None:
        """Lower the ranks of the host copies that should stay, but not of those that are `settled`
        on the device."""

    def _settled(self, ranks: Ranks) -> Rows:
        """What is on the device, not about to leave it, and safe on disk."""
        if self._copies[Tier.DEVICE] <= LEAVING:
            return _NONE
        there = np.flatnonzero(self._on(Tier.DEVICE, len(ranks)))
        staying: Rows = there[np.argsort(ranks[there])[:-LEAVING]]
        return staying.compress(self._absent[Tier.DISK][staying] == 0)

    def _on(self, tier: Tier, rows: int) -> npt.NDArray[np.bool_]:
        """Which of the first `rows` rows have a copy on `tier`."""
        there: npt.NDArray[np.bool_] = self._absent[tier][:rows] == 0
        return there

    def _is_on(self, tier: Tier, row: int) -> bool:
        return self._absent[tier].item(row) == 0

    def _ranks(self) -> Ranks:
        """By row: the higher, the less a copy would be missed."""
        return -self._touched

    def _farther(self, ranks: Ranks, times: float) -> Ranks:
        """The ranks of copies that are missed so many times later."""
        return times * (ranks + self._clock) - self._clock

    def _rank_of_rival(self, rival: str) -> float:
        """What a prefetch may push out is above this rank."""
        return -np.inf

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._touched[row] = self._clock

    def _new_row(self, key: str) -> int:
        if len(self._keys) > 2 * len(self._row) + 64:
            self._close_ranks()
        row = len(self._keys)
        if row == len(self._touched):
            self._touched = np.append(self._touched, np.zeros(row))
            for tier, absent in self._absent.items():
                self._absent[tier] = np.append(absent, np.full(row, -np.inf))
        self._keys.append(key)
        self._row[key] = row
        return row

    def _close_ranks(self) -> None:
        """Make the arrays anew, without the empty rows."""
        rows = np.array(list(self._row.values()), dtype=np.int64)
        self._keys = list(self._row)
        self._row = {key: row for row, key in enumerate(self._keys)}
        room = len(rows) + _ROOM
        touched = np.zeros(room)
        touched[: len(rows)] = self._touched[rows]
        self._touched = touched
        for tier, old in self._absent.items():
            self._absent[tier] = np.full(room, -np.inf)
            self._absent[tier][: len(rows)] = old[rows]


def _descending(keys: list[str], ranks: Ranks) -> Iterator[str]:
    """The keys whose rows rank above -infinity, those of the highest rank first."""
    for _ in range(min(_FEW, len(ranks))):  # more are hardly ever wanted: no need to sort all
        best = int(ranks.argmax())
        if ranks[best] == -np.inf:
            return
        yield keys[best]
        ranks[best] = -np.inf
    rest = np.flatnonzero(ranks > -np.inf)
    for row in rest[np.argsort(-ranks[rest], kind="stable")]:
        yield keys[row]


class FarthestNextUse(LeastRecentlyUsed):
    """The copy whose next use is farthest ahead goes first (Belady, 1966), by a learned schedule.

    Keys that the schedule does not expect go before all others, the least recently used first.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._number = np.zeros(_ROOM, dtype=np.int64)  # by row: the number of the key's name
        self._rank = np.zeros(_ROOM)
        self._ranked_in: int | None = None  # the schedule's epoch at that time
        self._outdated: set[int] = set()  # rows
        self.keep((), nearer=1.0)

    def keep(self, numbers: Collection[int], nearer: float) -> None:
        self._kept = np.array(list(numbers), dtype=np.int64)
        self._nearer = nearer

    def _spare(self, ranks: Ranks, settled: Rows, rival: str | None) -> None:
        if not len(self._kept):
            return
        rows = len(ranks)
        kept = self._on(Tier.HOST, rows) & np.isin(self._number[:rows], self._kept)
        # Once all are there, a prefetch takes none of them: it waits for room among the others.
        closed = rival is not None and kept.sum() == len(self._kept)
        kept[settled] = False
        ranks[kept] = -np.inf if closed else self._farther(ranks[kept], self._nearer)

    def _touch(self, row: int) -> None:
        super()._touch(row)
        self._outdated.add(row)

    def _new_row(self, key: str) -> int:
        row = super()._new_row(key)
        if len(self._number) != len(self._touched):
            self._number = np.resize(self._number, len(self._touched))
            self._rank = np.resize(self._rank, len(self._touched))
        self._number[row] = self._schedule.number(name_of(key))
        return row

    def _close_ranks(self) -> None:
        rows = np.array(list(self._row.values()), dtype=np.int64)
        super()._close_ranks()
        number = np.zeros(len(self._touched), dtype=np.int64)
        number[: len(rows)] = self._number[rows]
        self._number, self._rank = number, np.zeros(len(number))
        self._ranked_in = None

    def _ranks(self) -> Ranks:
        if self._ranked_in != self._schedule.epoch:
            rows = np.arange(len(self._keys))
            self._ranked_in = self._schedule.epoch
        else:
            rows = np.fromiter(self._outdated, dtype=np.int64, count=len(self._outdated))
        self._outdated.clear()
        if len(rows):
            ranks = self._schedule.ranks(self._number[rows])
            self._rank[rows] = np.where(np.isinf(ranks), _UNEXPECTED - self._touched[rows], ranks)
        return self._rank

    def _farther(self, ranks: Ranks, times: float) -> Ranks:
        # Of what the schedule does not expect, it cannot say what is farther.
        expected = ranks < _UNEXPECTED - self._clock
        return np.where(expected, self._schedule.farther(ranks, times), times * ranks)

    def _rank_of_rival(self, rival: str) -> float:
        if self._schedule.learning:
            return -np.inf
        number = np.array([self._schedule.number(name_of(rival))])
        return float(self._schedule.farther(self._schedule.ranks(number), HARMLESS)[0])


POLICIES = ("next-use", "lru")


def policy_named(name: str, schedule: Schedule) -> Policy:
    """The policy of this name, ranking by `schedule` where it ranks by a schedule."""
    if name == "next-use":
        return FarthestNextUse(schedule)
    if name == "lru":
        return LeastRecentlyUsed()
    raise ValueError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
