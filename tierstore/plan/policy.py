"""Eviction policies: rank copies by how little they would be missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier, in_memory
from tierstore.plan.schedule import Schedule
from tierstore.plan.use_history import Ranks

_UNEXPECTED = 1e12
"""Above the rank of every expected group, below infinity."""

_SHARED = 1e11
"""Added to the ranks of the stream with the most bytes in memory; below `_UNEXPECTED`."""

_FIRST = 1e14
"""Added to the rank of copies that should be evicted before all others."""

LEAVING = 3
"""Number of copies on the device that count as about to leave it, for a single stream."""
LEAVING_OF_SEVERAL = 1
"""Number of such copies if several streams of uses share the device.

Each stream has groups that pass through the device. The more of them the host also holds, the more
must be read.
"""

DISK_COSTS = 4.0
"""Approximate cost of fetching a group from disk, relative to host memory."""

HARMLESS = 3.0
"""A prefetch evicts only groups whose next use is this many times as far ahead as its own.

A group needed only a little later would soon have to be read again. Waiting costs less: a better
victim, such as the group in use, soon becomes available.
"""

_FEW = 8
_INITIAL_ROWS = 16

Scalar = TypeVar("Scalar", bound=np.generic)
Rows = npt.NDArray[np.int64]
_NONE: Rows = np.zeros(0, dtype=np.int64)


class Policy(Protocol):
    """A ranking for all tiers. The planner reports its moves, and asks for victims."""

    def admitted(self, group: GroupId, tier: Tier) -> None:
        """Note that a copy of `group` is complete on `tier`."""

    def used(self, group: GroupId) -> None:
        """Note that `group` was leased."""

    def dropped(self, group: GroupId, tier: Tier) -> None:
        """Note that the copy of `group` on `tier` was dropped."""

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        """Yield groups with a copy on `tier`, the one missed least first.

        `rival` is a group to be prefetched into the space: only groups needed much later than it
        are yielded. None: the space is required, so all groups are yielded sooner or later.
        """


class Order(Protocol):
    """Ranks the rows of a `CopyRows` by their next use, as far as that is known.

    The higher the rank, the less the copy would be missed. All arrays are float64, one value per
    row.
    """

    def ranks(self, rows: CopyRows) -> Ranks:
        """Return the rank of each row. Rows of removed groups may have any rank."""

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        """Return the ranks of copies that are used `times` times as far ahead."""

    def out_of_reach(self, rival: GroupId) -> float:
        """Return the rank above which a prefetch of `rival` may evict copies."""

    def spared(self, rows: CopyRows) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the rows to spare, because other streams' rows are evicted first.

        None if there is one stream of uses.
        """

    def number(self, group: GroupId) -> int:
        """Return the number by which `ranks` refers to a group."""


class LeastRecentlyUsed:
    """Ranks the least recently used copy highest."""

    def ranks(self, rows: CopyRows) -> Ranks:
        return -rows.touched

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        return times * (ranks + rows.clock) - rows.clock

    def out_of_reach(self, rival: GroupId) -> float:
        return -np.inf

    def spared(self, rows: CopyRows) -> npt.NDArray[np.bool_] | None:
        return None

    def number(self, group: GroupId) -> int:
        return -1  # recency alone decides


class FarthestNextUse:
    """Ranks the copy with the farthest next use highest (Belady, 1966), by a learned schedule.

    Groups that the schedule does not expect are evicted before all others, the least recently used
    first. If there are several streams, the one with the most bytes in memory loses groups first.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._ranks = np.zeros(0)
        self._layout = -1  # of the rows that were ranked
        self._epoch: object = None  # of the schedule at that time

    @property
    def learning(self) -> bool:
        return self._schedule.learning

    def ranks(self, rows: CopyRows) -> Ranks:
        if rows.layout != self._layout:
            self._layout, self._epoch = rows.layout, None
            self._ranks = np.zeros(len(rows.touched))
        if self._schedule.several or self._epoch != self._schedule.epoch:
            # The earliest use of several streams is a time, so all ranks change as time passes.
            self._epoch = None if self._schedule.several else self._schedule.epoch
            stale = np.arange(len(rows.groups))
        else:
            stale = np.fromiter(rows.stale, dtype=np.int64, count=len(rows.stale))
            routed = self._schedule.routed
            if routed.any:  # their ranks change while others are used
                numbers = rows.number[: len(rows.groups)]
                stale = np.union1d(stale, np.flatnonzero(routed.of(numbers)))
        rows.stale.clear()
        if len(stale):
            ranks = self._schedule.ranks(rows.number[stale])
            unexpected = _UNEXPECTED - rows.touched[stale]
            self._ranks[stale] = np.where(np.isinf(ranks), unexpected, ranks)
        return self._ranks

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        # The schedule has no distances for groups that it does not expect.
        expected = ranks < _UNEXPECTED - rows.clock
        return np.where(expected, self._schedule.farther(ranks, times), times * ranks)

    def out_of_reach(self, rival: GroupId) -> float:
        if self._schedule.learning:
            return -np.inf
        number = np.array([self._schedule.known.number(rival.key)])
        return float(self._schedule.farther(self._schedule.ranks(number), HARMLESS)[0])

    def spared(self, rows: CopyRows) -> npt.NDArray[np.bool_] | None:
        if not self._schedule.several:
            return None
        numbers, there = rows.number[: len(rows)], np.zeros(len(rows), dtype=np.bool_)
        for tier in rows.absent:
            if not tier.persistent:
                there |= rows.on(tier)
        spared: npt.NDArray[np.bool_] = self._schedule.spared(numbers[there])[numbers]
        return spared

    def number(self, group: GroupId) -> int:
        return self._schedule.known.number(group.key)


class CopyRows:
    """Assigns a row to every group with a copy, so that a ranking is one array.

    Rows of removed groups stay empty until there are too many. Then, and when the arrays are full,
    they are rebuilt (`layout` counts how often); iterators over the old arrays stay valid. By row:
    the `groups`, the `number` of each, when it was `touched` last, by the `clock` of touches, and
    whether it was `used` since it arrived. `stale` has the rows touched since it was last cleared.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.groups: list[GroupId] = []
        self.row: dict[GroupId, int] = {}
        # 0 for rows with a copy, -infinity for others: adding it to all ranks selects the copies,
        # much faster than indexing does.
        self.absent: dict[Tier, Ranks] = {tier: np.full(_INITIAL_ROWS, -np.inf) for tier in tiers}
        self.copies = dict.fromkeys(self.absent, 0)
        self.number = np.zeros(_INITIAL_ROWS, dtype=np.int64)
        self.touched = np.zeros(_INITIAL_ROWS)
        self.used = np.zeros(_INITIAL_ROWS, dtype=np.bool_)
        self.clock = 0
        self.stale: set[int] = set()
        self.layout = 0

    def __len__(self) -> int:
        return len(self.groups)

    def touch(self, row: int) -> None:
        """Note that a group was used, or arrived on a tier."""
        self.clock += 1
        self.touched[row] = self.clock
        self.stale.add(row)

    def add(self, group: GroupId, number: int) -> int:
        """Add a row for a group that has none."""
        if len(self.groups) > 2 * len(self.row) + 64:
            self._rebuild(np.array(list(self.row.values()), dtype=np.int64))
        elif len(self.groups) == len(self.touched):
            self._rebuild(np.arange(len(self.groups)), spare=len(self.groups))
        row = len(self.groups)
        self.groups.append(group)
        self.row[group] = row
        self.number[row] = number
        self.used[row] = False
        return row

    def arrive(self, row: int, tier: Tier) -> None:
        """Note a copy on `tier`."""
        self.copies[tier] += not self.is_on(tier, row)
        self.absent[tier][row] = 0.0

    def leave(self, row: int, tier: Tier) -> None:
        """Note that the copy on `tier` was dropped."""
        self.copies[tier] -= self.is_on(tier, row)
        self.absent[tier][row] = -np.inf
        if all(absent.item(row) for absent in self.absent.values()):
            del self.row[self.groups[row]]

    def on(self, tier: Tier) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows with a copy on `tier`."""
        there: npt.NDArray[np.bool_] = self.absent[tier][: len(self.groups)] == 0
        return there

    def is_on(self, tier: Tier, row: int) -> bool:
        return self.absent[tier].item(row) == 0

    def saved(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows among these that have a copy on a persistent tier."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for tier, absent in self.absent.items():
            if tier.persistent:
                found |= absent[rows] == 0
        return found

    def _rebuild(self, kept: Rows, spare: int = _INITIAL_ROWS) -> None:
        """Rebuild the arrays with these rows and `spare` empty ones."""
        groups, size = [self.groups[row] for row in kept.tolist()], len(kept) + spare
        if len(groups) < len(self.groups):
            self.row = {group: row for row, group in enumerate(groups)}
        self.groups = groups
        self.touched = _extended(self.touched[kept], np.zeros(size))
        self.used = _extended(self.used[kept], np.zeros(size, dtype=np.bool_))
        self.number = _extended(self.number[kept], np.zeros(size, dtype=np.int64))
        for tier, absent in self.absent.items():
            self.absent[tier] = _extended(absent[kept], np.full(size, -np.inf))
        self.layout += 1


class RankingPolicy:
    """Ranks copies by an order of use, and by the group's copies on other tiers.

    A group on the device and in host memory takes space twice. So host copies of groups that will
    stay on the device (all but the few that it would evict next) are evicted first. A device copy
    costs less to restore from the host than from disk, so if the host has one, its next use counts
    as `DISK_COSTS` times as far ahead. Then some groups stay on the device and others pass through
    it, the two tiers together hold nearly as many groups as fit both, and groups that leave the
    device need not be copied back.

    Host memory and the disk are also such a pair if the disk caches a tier below it. While no order
    is known yet, used groups are evicted from the disk before unused ones: they are not needed
    again until the next pass.
    """

    def __init__(self, order: Order, tiers: Iterable[Tier] = TIERS.values()) -> None:
        tiers = sorted(tiers)
        *faster, self._host = in_memory(tiers)
        self._device = faster[-1] if faster else None
        self._disk, *self._below = (tier for tier in tiers if tier.persistent)
        self._order = order
        self._rows = CopyRows(tiers)

    def admitted(self, group: GroupId, tier: Tier) -> None:
        row = self._rows.row.get(group)
        if row is None:
            row = self._rows.add(group, self._order.number(group))
        self._rows.arrive(row, tier)
        self._rows.touch(row)

    def used(self, group: GroupId) -> None:
        row = self._rows.row.get(group)
        if row is not None:
            self._rows.used[row] = True
            self._rows.touch(row)

    def dropped(self, group: GroupId, tier: Tier) -> None:
        row = self._rows.row.get(group)
        if row is not None:
            self._rows.leave(row, tier)

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        spared = self._order.spared(self._rows)
        leaving = LEAVING if spared is None else LEAVING_OF_SEVERAL
        found = self._ranked(tier, rival, leaving)
        if spared is not None:
            if tier is self._device:  # a stream loses little if the host has a copy
                spared &= ~self._rows.on(self._host)
            found[~spared] += _SHARED
        return _descending(self._rows.groups, found)

    def _ranked(self, tier: Tier, rival: GroupId | None, leaving: int) -> Ranks:
        """Return the rank of each row's copy on `tier`; -infinity for copies that must stay."""
        rows = self._rows
        ranks = self._order.ranks(rows)[: len(rows)]
        found = ranks + rows.absent[tier][: len(rows)]
        bar = -np.inf if rival is None else self._order.out_of_reach(rival)
        if bar > -np.inf:
            found[ranks <= bar] = -np.inf
        if rival in rows.row:
            found[rows.row[rival]] = -np.inf
        if tier is self._host:
            settled = self._settled(ranks, self._device, leaving)
            if self._below:
                self._miss_less(found, rows.on(self._disk) & self._is_below())
            found[settled] += _FIRST
        elif tier is self._device:
            self._miss_less(found, rows.on(self._host))
        elif tier is self._disk and self._below:
            settled = self._settled(ranks, self._host, leaving)
            found[settled[self._is_below()[settled]]] += _FIRST
            if isinstance(self._order, FarthestNextUse) and self._order.learning:
                # Groups from before the first pass are needed in it: no prefetch may evict them.
                unused = ~rows.used[: len(rows)]
                found[unused] -= _FIRST if rival is None else np.inf
        return found

    def _miss_less(self, ranks: Ranks, there_too: npt.NDArray[np.bool_]) -> None:
        """Raise the ranks of copies that exist on the tier below: they are cheaper to fetch."""
        twice = (ranks > -np.inf) & there_too
        ranks[twice] = self._order.farther(self._rows, ranks[twice], DISK_COSTS)

    def _is_below(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows with a copy below the disk."""
        found: npt.NDArray[np.bool_] = np.zeros(len(self._rows), dtype=np.bool_)
        for tier in self._below:
            found |= self._rows.on(tier)
        return found

    def _settled(self, ranks: Ranks, on: Tier | None, leaving: int) -> Rows:
        """Return the rows on this tier that will stay there and are saved on a persistent tier."""
        if on is None or self._rows.copies[on] <= leaving:
            return _NONE
        there = np.flatnonzero(self._rows.on(on))
        staying: Rows = there[np.argsort(ranks[there])[:-leaving]]
        return staying.compress(self._rows.saved(staying))


def _extended(values: npt.NDArray[Scalar], array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Copy these values to the beginning of `array`, and return it."""
    array[: len(values)] = values
    return array


def _descending(groups: list[GroupId], ranks: Ranks) -> Iterator[GroupId]:
    """Yield the groups with ranks above -infinity, the highest first."""
    for _ in range(
        min(_FEW, len(ranks))
    ):  # callers rarely take more, so sorting all is not worth it
        best = int(ranks.argmax())
        if ranks[best] == -np.inf:
            return
        yield groups[best]
        ranks[best] = -np.inf
    rest = np.flatnonzero(ranks > -np.inf)
    for row in rest[np.argsort(-ranks[rest], kind="stable")]:
        yield groups[row]


POLICIES = ("next-use", "lru")


def policy_named(name: str, schedule: Schedule, tiers: Iterable[Tier] = TIERS.values()) -> Policy:
    """Return the policy of this name, which may rank by `schedule`."""
    if name == "next-use":
        return RankingPolicy(FarthestNextUse(schedule), tiers)
    if name == "lru":
        return RankingPolicy(LeastRecentlyUsed(), tiers)
    raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
