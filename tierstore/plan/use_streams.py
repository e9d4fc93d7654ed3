"""Several streams of uses, each with an order and a pace of its own, and one ranking for all.

Where several workers share one memory, the uses of each repeat themselves. One after the other as
they happen to come, they do not. So each stream is learned by itself, with the seconds that pass
from one use to the next: the next use of a group is the earliest of all streams, in seconds.

To give up what is used last (Belady, 1966) misses the least in all. But what a slow stream has just
read is used later than anything of a fast one, so that it would always be given up first, and the
slow stream would read everything again in each pass. So of all streams, the one that holds the most
gives up first, and of what it holds, what is used last. What several streams use counts for each in
part, and is not given up for one of them that holds the most.

A stream that stops has no part in this any more once it is late by a pass: what it is expected to
use recedes by as much as it is late, and makes room for others when it is farther than theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tierstore.model.groups import GroupId
from tierstore.model.tiers import UseOrder
from tierstore.plan.matching import Numbers
from tierstore.plan.policy import CopyRows
from tierstore.plan.schedule import MEMORY, LearnedOrder
from tierstore.plan.use_history import Ranks

TIMED = 16
"""Uses that are timed together: several may follow each other at once, who looks ahead of them."""
PAUSE = 4.0
"""How many times as long as expected these uses may take at most: more of it was a pause."""
WEIGHT = 0.25
"""How much the latest of these times count."""

_EXPECTED = 1e11
"""Seconds above all that are ever expected, and added for what goes before the others."""
_UNEXPECTED = 1e12
_ROOM = 16
_NOBODY = -1


class UseStream:
    """The order of one stream, and its pace. It began at `now`, in seconds, as all times are.

    The order has numbers of its own; `numbers` tells by them which groups they are for all streams,
    negative for none. `latest` is the time of the latest use.
    """

    def __init__(self, memory: int, now: float) -> None:
        self.order = LearnedOrder(memory)
        self.numbers = np.full(_ROOM, _NOBODY)
        self.latest = now
        self.seconds_per_use = 0.0
        self._timed_from = now
        self._uses = 0
        self._in_use: str | None = None
        self._known = 0
        self._in_time: Ranks | None = None  # what `times` tells while it is not late

    def use(self, key: str, number: int, now: float) -> None:
        """The group of this key, which has this number for all streams, is used."""
        again, self._in_use = key == self._in_use, key
        self._know(key, number, UseOrder.LEARNED)
        self.order.advance_past(key)
        self.latest, self._in_time = now, None
        if not again:
            self._time(now)

    def use_routed(self, key: str, number: int, now: float) -> None:
        """The same, of a group that data choose."""
        self._know(key, number, UseOrder.ROUTED)
        self.order.come(key)
        self.latest, self._in_time = now, None

    def _know(self, key: str, number: int, order: UseOrder) -> None:
        own = self.order.number(key)
        if own >= len(self.numbers):
            self.numbers = np.append(self.numbers, np.full(len(self.numbers), _NOBODY))
        if self.numbers[own] != number:
            self.order.introduce(key, order)
            self.numbers[own] = number
            self._known += 1

    def forget_number(self, key: str, number: int) -> None:
        """The group is gone."""
        if (known := self.numbers == number).any():
            self.numbers[known] = _NOBODY
            self.order.forget(key)
            self._in_time = None
            self._known -= 1

    def _time(self, now: float) -> None:
        """A use at `now`, and not of the same group as the one before it."""
        self._uses += 1
        spent = now - self._timed_from
        if self._uses <= TIMED + 1:
            self.seconds_per_use = spent / max(self._uses - 1, 1)
        elif self._uses % TIMED == 1:
            old = self.seconds_per_use
            spent = min(spent / TIMED, PAUSE * old) if old else spent / TIMED
            self.seconds_per_use += WEIGHT * (spent - old)
        if self._uses % TIMED == 1:
            self._timed_from = now

    def late(self, now: float) -> float:
        """The seconds by which its next use is late."""
        return max(now - self.latest - self.seconds_per_use, 0.0)

    def stopped(self, now: float) -> bool:
        """Whether it is late by more than a pass over what it uses, if its pace is known."""
        return self._uses > 1 and self.late(now) > self._known * self.seconds_per_use

    def times(self, now: float) -> Ranks:
        """By its own numbers, when each group is used next; infinity: nobody knows. What is late
        is expected after as long as it is late by now."""
        if self._in_time is None:
            # Of one that was never timed, all uses are at hand, but for those that never come.
            pace = max(self.seconds_per_use, 1e-9)
            self._in_time = self.latest + pace * self._waits()
            self._in_time[self.numbers == _NOBODY] = np.inf
        late = self.late(now)
        return self._in_time + 2 * late if late else self._in_time

    def _waits(self) -> Ranks:
        """By its own numbers, after how many uses each is used next. Where no order is known, that
        is told by access rates: in the first pass, a group comes again after a pass that is as long
        as what was seen of it, or a little longer."""
        order, numbers = self.order, np.arange(len(self.numbers))
        if order.trusted:
            return order.ranks(numbers) - order.history.place
        rates = order.rates
        with np.errstate(over="ignore"):
            passed = np.exp(rates.ranks(numbers) + rates.clock / rates.span)
        waits: Ranks = rates.span * passed
        return waits


class UseStreams:
    """A schedule of several streams: it numbers the groups, and each stream has its own order.

    It ranks by the seconds, on the `clock`, at which the earliest of them uses a group next. It
    foretells nothing, and nobody can tell it what comes: who uses groups asks for them early.
    """

    learning = False

    def __init__(self, clock: Callable[[], float], memory: int = MEMORY) -> None:
        self._clock = clock
        self._memory = memory
        self._numbers: dict[str, int] = {}
        self._spare: list[int] = []  # numbers that are nobody's
        self._routed: set[str] = set()
        self._streams: dict[int, UseStream] = {}
        self._looked_at: float | None = None  # when; None: something has changed since
        self._soonest = np.full(1, np.inf)  # by number, and for nobody

    def number(self, key: str) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._spare.pop() if self._spare else len(self._numbers)
            self._numbers[key] = number
            self._looked_at = None
        return number

    def introduce(self, key: str, order: UseOrder = UseOrder.LEARNED) -> None:
        self.number(key)
        if order is UseOrder.ROUTED:
            self._routed.add(key)

    def forget(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is None:
            return
        self._spare.append(number)
        self._routed.discard(key)
        for stream in self._streams.values():
            stream.forget_number(key, number)
        self._looked_at = None

    def advance_past(self, key: str, stream: int = 0) -> None:
        number = self._numbers.get(key)
        if number is not None:  # else it is an older version, of a group that is gone
            self._stream(stream).use(key, number, self._clock())

    def come(self, key: str, stream: int = 0) -> None:
        if key in self._routed:
            self._stream(stream).use_routed(key, self._numbers[key], self._clock())

    def _stream(self, stream: int) -> UseStream:
        self._looked_at = None
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = UseStream(self._memory, self._clock())
        return found

    def end(self, stream: int) -> None:
        self._streams.pop(stream, None)
        self._looked_at = None

    def expect(self, keys: Iterable[str]) -> None:
        """Hints are of one order, and here are several."""

    def expect_not(self, key: str) -> None:
        """Nothing was expected."""

    def foretold(self) -> int:
        return 0

    def ahead(self, count: int) -> Numbers:
        return np.zeros(0, dtype=np.int64)

    def round(self, number: int) -> int:
        return 0

    def repeats(self, length: int) -> bool:
        return False

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next; infinity: not expected."""
        self._look()
        ranks: Ranks = self._soonest[numbers]
        return ranks

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        now = self._clock()
        return now + times * (ranks - now)

    def spared(self, held: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """By number, which groups a stream expects that does not hold the most, if so many bytes
        are `held` of each number."""
        self._look()
        nobody = len(self._soonest) - 1
        spared = np.zeros(nobody + 1, dtype=np.bool_)
        if not self._streams:
            return spared
        used, lengths, stopped = self._used_by_streams, self._lengths, self._stopped
        users = np.bincount(used, np.repeat(~stopped, lengths), len(spared))
        each = np.zeros(len(spared))
        each[: len(held[:nobody])] = held[:nobody]
        each /= np.maximum(users, 1)
        shares = np.add.reduceat(each[used], np.cumsum(lengths) - lengths)
        shares[stopped] = -1.0
        spares = (shares < shares.max() * (1 - 1e-9)) & ~stopped
        spared[:] = np.bincount(used, np.repeat(spares, lengths), len(spared))
        return spared

    def _look(self) -> None:
        """See when each group is used next, and who uses which."""
        now, nobody = self._clock(), len(self._numbers) + len(self._spare)
        if self._looked_at == now:
            return
        self._looked_at = now
        self._soonest = np.full(nobody + 1, np.inf)
        streams = list(self._streams.values())
        if not streams:
            return
        times = np.concatenate([stream.times(now) for stream in streams])
        used = np.concatenate([stream.numbers for stream in streams])
        used = np.where(times > _EXPECTED, nobody, used)
        np.minimum.at(self._soonest, used, times)
        self._soonest[nobody] = np.inf
        self._used_by_streams = used
        self._lengths = np.array([len(stream.numbers) for stream in streams])
        self._stopped = np.array([stream.stopped(now) for stream in streams])


class EarliestNextUse:
    """The copy whose next use by any stream is farthest ahead goes first, of the stream that holds
    the most bytes in memory; before it what no stream expects, the least recently used first.

    `nbytes` tells the bytes of a group.
    """

    def __init__(self, schedule: UseStreams, nbytes: Callable[[GroupId], int]) -> None:
        self._schedule = schedule
        self._nbytes_of = nbytes
        self._nbytes = np.zeros(_ROOM)  # by number

    def ranks(self, rows: CopyRows) -> Ranks:
        count = len(rows)
        rows.outdated.clear()
        numbers, there = rows.number[:count], np.zeros(count, dtype=np.bool_)
        for tier in rows.absent:
            if not tier.persistent:
                there |= rows.on(tier)
        held = np.zeros_like(self._nbytes)
        here = numbers[there]
        held[here] = self._nbytes[here]
        ranks = self._schedule.ranks(numbers)
        ranks[~self._schedule.spared(held)[numbers]] += _EXPECTED
        return np.where(np.isinf(ranks), _UNEXPECTED - rows.touched[:count], ranks)

    def farther(self, rows: CopyRows, ranks: Ranks, times: float) -> Ranks:
        return self._schedule.farther(ranks, times)

    def out_of_reach(self, rival: GroupId) -> float:
        return -np.inf  # nothing is fetched early

    def number(self, group: GroupId) -> int:
        number = self._schedule.number(group.key)
        if number >= len(self._nbytes):
            self._nbytes = np.append(self._nbytes, np.zeros(number))
        self._nbytes[number] = self._nbytes_of(group)
        return number
