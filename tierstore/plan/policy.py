"""Which copy would be missed least? A policy ranks; it never evicts."""

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
"""Above the rank of everything that is expected, below infinity."""

_SHARED = 1e11
"""Added to the rank of what the stream expects that has the most in memory; below `_UNEXPECTED`."""

_FIRST = 1e14
"""Added to the rank of what should go before all others."""

LEAVING = 3
"""How many copies on the device count as about to leave it, ..."""
LEAVING_OF_SEVERAL = 1
"""... and how many where several streams of uses share it. Each has some there that pass through:
the more of what is on the device the host keeps, too, the more has to be read."""

DISK_COSTS = 4.0
"""How many times as long a group takes from disk as from host memory, roughly."""

HARMLESS = 3.0
"""A prefetch pushes out only what is needed so many times later than it. What is needed a little
later would be read once more for nothing: soon something better to push out is there, such as the
group that is in use."""

_FEW = 8
_ROOM = 16

Scalar = TypeVar("Scalar", bound=np.generic)
Rows = npt.NDArray[np.int64]
_NONE: Rows = np.zeros(0, dtype=np.int64)


class Policy(Protocol):
    """One ranking for all tiers. The planner tells it what it does and asks for victims."""

    def admitted(self, group: GroupId, tier: Tier) -> None:
        """A copy of `group` is complete on `tier`."""

    def used(self, group: GroupId) -> None:
        """`group` was leased."""

    def dropped(self, group: GroupId, tier: Tier) -> None:
        """The copy of `group` on `tier` is gone."""

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        """Groups with a copy on `tier`, the one missed least first.

        `rival` is a group that is fetched early and wants the room: only those needed (much) later
        than it are yielded. None: the room must be had, so all are yielded sooner or later.
        """


class Order(Protocol):
    """When copies are used next, as far as it is known: the rank of each row of a `CopyRows`, the
    higher, the less its copy would be missed. All arrays are float64, one value per row."""

    def ranks(self, rows: CopyRows) -> Ranks:
        """By row. Of rows of what is gone the rank may be anything."""

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        """The ranks of copies that are missed so many times later."""

    def out_of_reach(self, rival: GroupId) -> float:
        """What is fetched early may push out what is above this rank."""

    def spared(self, rows: CopyRows) -> npt.NDArray[np.bool_] | None:
        """Which rows others should give up their copies for, by their share. None: all are of one
        stream of uses."""

    def number(self, group: GroupId) -> int:
        """By which number `ranks` tells of a group."""


class LeastRecentlyUsed:
    """The copy that was not used for longest goes first."""

    def ranks(self, rows: CopyRows) -> Ranks:
        return -rows.touched

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        return times * (ranks + rows.clock) - rows.clock

    def out_of_reach(self, rival: GroupId) -> float:
        return -np.inf

    def spared(self, rows: CopyRows) -> npt.NDArray[np.bool_] | None:
        return None

    def number(self, group: GroupId) -> int:
        return -1  # what was used lately stays


class FarthestNextUse:
    """The copy whose next use is farthest ahead goes first (Belady, 1966), by a learned schedule.

    Groups that the schedule does not expect go before all others, the least recently used first.
    Of several streams of uses, the one that has the most in memory gives up first.
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
            # As time passes, all ranks change that are by the earliest use of several streams.
            self._epoch = None if self._schedule.several else self._schedule.epoch
            outdated = np.arange(len(rows.groups))
        else:
            outdated = np.fromiter(rows.outdated, dtype=np.int64, count=len(rows.outdated))
            routed = self._schedule.routed
            if routed.any:  # their ranks change while others are used
                numbers = rows.number[: len(rows.groups)]
                outdated = np.union1d(outdated, np.flatnonzero(routed.of(numbers)))
        rows.outdated.clear()
        if len(outdated):
            ranks = self._schedule.ranks(rows.number[outdated])
            unexpected = _UNEXPECTED - rows.touched[outdated]
            self._ranks[outdated] = np.where(np.isinf(ranks), unexpected, ranks)
        return self._ranks

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        # Of what the schedule does not expect, it cannot say what is farther.
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
    """Every group that has a copy has a row, so that a ranking is one array.

    Rows of what is gone are left empty until there are too many. Then, and where there is no room
    for another, the arrays are made anew (`layout` counts how often); who still looks through the
    old ones may go on. By row: `groups`, the `number` of each, and when it was `touched` last, by
    the `clock` of touches, and whether it was `used` since it is there. `outdated` are the rows
    that were touched since somebody cleared it.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.groups: list[GroupId] = []
        self.row: dict[GroupId, int] = {}
        # 0 for what has a copy, -infinity for what has none. Added to all ranks, it leaves those of
        # the copies, much faster than choosing them does.
        self.absent: dict[Tier, Ranks] = {tier: np.full(_ROOM, -np.inf) for tier in tiers}
        self.copies = dict.fromkeys(self.absent, 0)
        self.number = np.zeros(_ROOM, dtype=np.int64)
        self.touched = np.zeros(_ROOM)
        self.used = np.zeros(_ROOM, dtype=np.bool_)
        self.clock = 0
        self.outdated: set[int] = set()
        self.layout = 0

    def __len__(self) -> int:
        return len(self.groups)

    def touch(self, row: int) -> None:
        """Its group was used, or came to a tier."""
        self.clock += 1
        self.touched[row] = self.clock
        self.outdated.add(row)

    def add(self, group: GroupId, number: int) -> int:
        """A row for a group that has none."""
        if len(self.groups) > 2 * len(self.row) + 64:
            self._lay_out(np.array(list(self.row.values()), dtype=np.int64))
        elif len(self.groups) == len(self.touched):
            self._lay_out(np.arange(len(self.groups)), room=len(self.groups))
        row = len(self.groups)
        self.groups.append(group)
        self.row[group] = row
        self.number[row] = number
        self.used[row] = False
        return row

    def arrive(self, row: int, tier: Tier) -> None:
        """There is a copy on `tier`."""
        self.copies[tier] += not self.is_on(tier, row)
        self.absent[tier][row] = 0.0

    def leave(self, row: int, tier: Tier) -> None:
        """There is none any more."""
        self.copies[tier] -= self.is_on(tier, row)
        self.absent[tier][row] = -np.inf
        if all(absent.item(row) for absent in self.absent.values()):
            del self.row[self.groups[row]]

    def on(self, tier: Tier) -> npt.NDArray[np.bool_]:
        """Which rows have a copy on `tier`."""
        there: npt.NDArray[np.bool_] = self.absent[tier][: len(self.groups)] == 0
        return there

    def is_on(self, tier: Tier, row: int) -> bool:
        return self.absent[tier].item(row) == 0

    def saved(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these rows have a copy on a persistent tier."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for tier, absent in self.absent.items():
            if tier.persistent:
                found |= absent[rows] == 0
        return found

    def _lay_out(self, kept: Rows, room: int = _ROOM) -> None:
        """Make the arrays anew: these rows, and room for more."""
        groups, size = [self.groups[row] for row in kept.tolist()], len(kept) + room
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
    """Ranks copies by an order of use, and by where else a copy is.

    A group on the device and in host memory is there twice. Of the host copies, those go first
    whose group will stay on the device: all but the few that the device would give up next. Of the
    device copies, one that the host has too is missed less than one that only the disk has: as
    if its next use were four times as far. So some groups stay on the device and others pass
    through it, the two tiers together hold nearly as many groups as fit both, and what leaves the
    device need not be copied back.

    Host memory and the disk are such a pair, too, where the disk caches what lies below it. While
    no order is known yet, what was used goes from there before what was not: if it comes again, it
    does so in the next pass.
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
            if tier is self._device:  # what the host has, too, is no loss for a stream
                spared &= ~self._rows.on(self._host)
            found[~spared] += _SHARED
        return _descending(self._rows.groups, found)

    def _ranked(self, tier: Tier, rival: GroupId | None, leaving: int) -> Ranks:
        """By row, how little a copy on `tier` would be missed; -infinity for what must stay."""
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
                # What was there before the first pass is needed in it: no prefetch takes its room.
                unused = ~rows.used[: len(rows)]
                found[unused] -= _FIRST if rival is None else np.inf
        return found

    def _miss_less(self, ranks: Ranks, there_too: npt.NDArray[np.bool_]) -> None:
        """Raise the ranks of copies whose groups are on the tier below, too, at less than it costs
        to bring the others."""
        twice = (ranks > -np.inf) & there_too
        ranks[twice] = self._order.farther(self._rows, ranks[twice], DISK_COSTS)

    def _is_below(self) -> npt.NDArray[np.bool_]:
        """Which rows have a copy below the disk."""
        found: npt.NDArray[np.bool_] = np.zeros(len(self._rows), dtype=np.bool_)
        for tier in self._below:
            found |= self._rows.on(tier)
        return found

    def _settled(self, ranks: Ranks, on: Tier | None, leaving: int) -> Rows:
        """What is on this tier, not about to leave it, and safe on disk or below."""
        if on is None or self._rows.copies[on] <= leaving:
            return _NONE
        there = np.flatnonzero(self._rows.on(on))
        staying: Rows = there[np.argsort(ranks[there])[:-leaving]]
        return staying.compress(self._rows.saved(staying))


def _extended(values: npt.NDArray[Scalar], room: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """`room`, beginning with these values."""
    room[: len(values)] = values
    return room


def _descending(groups: list[GroupId], ranks: Ranks) -> Iterator[GroupId]:
    """The groups whose rows rank above -infinity, those of the highest rank first."""
    for _ in range(min(_FEW, len(ranks))):  # more are hardly ever wanted: no need to sort all
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
    """The policy of this name, ranking by `schedule` where it ranks by a schedule."""
    if name == "next-use":
        return RankingPolicy(FarthestNextUse(schedule), tiers)
    if name == "lru":
        return RankingPolicy(LeastRecentlyUsed(), tiers)
    raise ValueError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
