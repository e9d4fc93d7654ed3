"""The orders in which groups are used, one for each stream of uses, and a ranking over all.

If several threads (or workers) use groups at the same time, the uses of each repeat, but their
interleaving does not. So each stream of uses is learned separately, with the seconds between its
uses. The next use of a group is the earliest over all streams, in seconds.

A stream is not a thread. One thread that runs several models in turn makes one stream; so do two
threads that take turns, and so do short-lived threads of a pool. Only concurrent uses have separate
streams. So a stream has a *user*, and passes from one user to another:

  - A use that the user's own stream did not expect, but an idle stream did, continues that stream:
    the order of a model stays known whichever thread runs it.
  - A user without a stream continues an idle one, preferably one that knows the group.
  - If no stream is idle, a new one begins. It copies what was learned by the latest stream that
    knows the group, and so starts in the middle of that order.

A stream is idle if its latest group is not leased, and no caller waits for the group that its user
requested last. That test is too weak if leases are short, and two users compute between them: then
one stream would alternate between both and predict nothing. Such a stream is *contested*, and stays
with its user until it stops.

A stream stops when it is late by a pass over its groups. Then it is ignored until its user
continues. If only one stream is left, ranks and hints are those of its order, as if there had never
been another. A stream is forgotten when the others have made as many uses as one remembers.

Evicting the group with the farthest next use (Belady, 1966) minimizes the total of misses. But the
groups that a slow stream has just read are used later than all of a fast one's, so they would
always be evicted first, and the slow stream would read everything again in each pass. So the stream
with the most bytes in memory loses groups first, beginning with the one used last. The bytes
of a group that several streams use are divided among them, and the group is not evicted because of
one of them. A stream that needs less than its share never has the most: the others get the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.plan.fallback_orders import RoutedUses
from tierstore.plan.known_keys import SOON, KnownKeys
from tierstore.plan.matching import Numbers
from tierstore.plan.schedule import MEMORY, LearnedOrder
from tierstore.plan.use_history import Ranks

TIMED = 16
"""Uses that are timed together: a caller that looks ahead makes several at once."""
PAUSE = 4.0
"""Multiple of the expected time beyond which these uses count as interrupted by a pause."""
WEIGHT = 0.25
"""Weight of the latest of these times in the average."""
MOST = 64
"""Maximum number of streams. More users share them, as if they took turns."""
EVEN = 0.96
"""Streams with at least this fraction of the largest share count as even.

The group that even streams use last is evicted, whichever of them uses it.
"""
SHORT = 4
"""A turn of fewer uses is short."""
CONTESTED = 6
"""Number of surprises at which a stream becomes contested.

A short turn followed by an unexpected use adds two; a longer turn subtracts one.
"""

_NO_USES: Numbers = np.zeros(0, dtype=np.int64)
_EXPECTED = 1e11
"""Seconds beyond every expected use."""

Mask = npt.NDArray[np.bool_]


class UseStream:
    """The order of one stream, and its pace. It began at `now`; all times are in seconds.

    `asked` is the key that its user has requested. `place` identifies it among all streams.
    `latest` is the time of its latest use, `used_at` the number of that among all streams' uses.
    """

    def __init__(self, order: LearnedOrder, now: float, place: int = 0) -> None:
        self.order = order
        self.place = place
        self.asked: str | None = None
        self.latest = now
        self.used_at = 0
        self.surprises = 0
        self.turn = 0  # uses by its current user
        self.seconds_per_use = 0.0
        self._timed_from = now
        self._uses = 0
        self._in_time: tuple[int, Ranks] | None = None  # result of `times` while it is not late

    def use(self, key: str, now: float) -> None:
        """Note a use of `key` at `now`."""
        again = key == self.order.latest
        self.order.advance_past(key)
        self._used(now)
        if not again:
            self._time(now)

    def use_unordered(self, key: str, now: float) -> None:
        """Note a use of a routed group, or of one whose order is not learned."""
        self.order.note_unordered_use(key)
        self._used(now)

    def _used(self, now: float) -> None:
        self.turn += 1
        self.latest, self._in_time = now, None

    def _time(self, now: float) -> None:
        """Update the pace with a use at `now` of a different group than the previous one."""
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

    def knows(self, key: str) -> bool:
        """Return whether it remembers a use of this key."""
        number = self.order.known.numbers.get(key)
        return number is not None and self.order.remembers(number)

    def late(self, now: float) -> float:
        """Return the seconds by which its next use is late."""
        return max(now - self.latest - self.seconds_per_use, 0.0)

    def stopped(self, now: float, others: int) -> bool:
        """Return whether it is late by more than a pass over its groups.

        If its pace is unknown, returns whether the `others` have made more uses than two of its
        passes have.
        """
        pace = self.seconds_per_use if self._uses > 1 else 0.0
        late = self.late(now) if pace else others
        if not late or (not pace and others <= TIMED):
            return False
        groups = int((self.order.history.last >= 0).sum())
        return late > groups * (pace or 2)

    def times(self, now: float) -> Ranks:
        """Return the time of each number's next use; infinity: unknown.

        If the stream is late by some seconds, its next use is expected that many from now.
        """
        as_of = self.order.known.renumbered
        if self._in_time is None or self._in_time[0] != as_of:
            # Without a pace, all expected uses count as imminent.
            with np.errstate(over="ignore"):  # to infinity: it never comes
                times = self.latest + max(self.seconds_per_use, 1e-9) * self._waits()
            self._in_time = as_of, times
        late, times = self.late(now), self._in_time[1]
        return times + 2 * late if late else times

    def _waits(self) -> Ranks:
        """Return the number of uses until each number is used next.

        If no order is known, this is derived from access rates: in the first pass, a group comes
        again after a pass as long as the part seen so far, or a little longer.
        """
        order = self.order
        numbers = np.arange(len(order.history.last))
        if order.trusted:
            return order.learned_ranks(numbers) - order.history.place
        rates = order.rates
        with np.errstate(over="ignore"):
            waits: Ranks = rates.span * np.exp(rates.ranks(numbers) + rates.clock / rates.span)
        return waits


class UseStreams:
    """A schedule of several streams, each of which remembers its latest `memory` uses or more.

    `clock` returns the time in seconds. `in_use` returns whether the group of a number is leased or
    waited for; `nbytes` returns the bytes of all groups, by number. With `prefetch` False, it
    expects no uses, so nothing is prefetched: then users prefetch groups themselves.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        in_use: Callable[[int], bool],
        nbytes: Callable[[], Numbers],
        *,
        memory: int = MEMORY,
        prefetch: bool = True,
    ) -> None:
        self._clock = clock
        self._in_use = in_use
        self._nbytes = nbytes
        self._memory = memory
        self._prefetches = prefetch
        self.known = KnownKeys(takes_hints=prefetch)
        self._streams: list[UseStream] = []
        self._users: dict[int, UseStream] = {}
        self._uses = 0
        self._seen: tuple[float, list[UseStream]] | None = None
        self._soonest: tuple[object, Ranks, npt.NDArray[np.float64]] | None = None

    # Which streams there are -------------------------------------------------------------------

    def ask(self, key: str, stream: int = 0) -> int:
        """Note that a user requests `key`. Returns the place of its stream."""
        one = self._users.get(stream)
        if one is None or len(self._streams) > 1:
            one = self._of(key, stream)
        one.asked = key
        return one.place

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that a user has just used `key`. Returns the place of its stream."""
        one = self._users.get(stream)
        if one is None or len(self._streams) > 1:
            one = self._of(key, stream)
        one.asked = None
        one.use(key, self._clock())
        return self._note(one)

    def note_unordered_use(self, key: str, stream: int = 0) -> int:
        """Note a use that has no place in an order. Returns the place of the user's stream."""
        one = self._users.get(stream) or self._newest()
        one.use_unordered(key, self._clock())
        return self._note(one)

    def _note(self, one: UseStream) -> int:
        self._uses += 1
        one.used_at = self._uses
        self._seen = self._soonest = None
        return one.place

    def end(self, stream: int) -> None:
        """Forget the stream of a user that has ended."""
        one = self._users.get(stream)
        if one is not None:
            self._drop(one)

    def _of(self, key: str, user: int) -> UseStream:
        """Return the stream that a user continues by using this key."""
        own = self._users.get(user)
        if own is not None and own.order.expects(key):
            return own
        idle = [one for one in self._streams if one is not own and self._is_idle(one)]
        expecting = next((one for one in idle if one.order.expects(key)), None)
        if expecting is not None:
            return self._hand_over(expecting, user, own, surprised=False)
        if own is not None:
            return own
        if idle:
            one = max(idle, key=lambda one: (one.knows(key), one.used_at))
            return self._hand_over(one, user, None, surprised=True)
        return self._begin(key, user)

    def _is_idle(self, one: UseStream) -> bool:
        numbers = self.known.numbers
        for key in (one.asked, one.order.latest):
            if key in numbers and self._in_use(numbers[key]):
                return False
        return one.surprises < CONTESTED or one.stopped(self._clock(), self._uses - one.used_at)

    def _hand_over(
        self, one: UseStream, user: int, own: UseStream | None, *, surprised: bool
    ) -> UseStream:
        """Make `one` the stream of `user`, taking it from another user and dropping its `own`."""
        if one.stopped(self._clock(), self._uses - one.used_at):
            one.surprises = 0
        elif one.turn >= SHORT:
            one.surprises = max(one.surprises - 1, 0)
        elif surprised:
            one.surprises += 2
        one.turn = 0
        self._users = {u: s for u, s in self._users.items() if s not in (one, own)}
        self._users[user] = one
        return one

    def _begin(self, key: str, user: int) -> UseStream:
        """Begin a stream with a copy of the order of the latest stream that knows the key."""
        for one in list(self._streams):
            if self._uses - one.used_at > self._memory:
                self._drop(one)
        like = max(self._streams, key=lambda one: (one.knows(key), one.used_at), default=None)
        if like is not None and len(self._streams) >= MOST:
            return self._hand_over(like, user, None, surprised=True)
        if like is not None and like.knows(key):
            order = like.order.copy()
        else:
            order = LearnedOrder(self._memory, self.known)
        places = {one.place for one in self._streams}
        place = next(place for place in range(MOST) if place not in places)
        one = UseStream(order, self._clock(), place)
        one.used_at = self._uses
        self._streams.append(one)
        self._users[user] = one
        self._seen = self._soonest = None
        return one

    def _drop(self, one: UseStream) -> None:
        self._streams.remove(one)
        self._users = {user: s for user, s in self._users.items() if s is not one}
        one.order.detach()
        self._seen = self._soonest = None

    def _newest(self) -> UseStream:
        """Return the stream of the latest use."""
        if not self._streams:
            return self._begin("", 0)
        return max(self._streams, key=lambda one: one.used_at)

    def _active(self) -> list[UseStream]:
        """Return the active streams; if there is none, the one of the latest use."""
        now = self._clock()
        if self._seen is None or self._seen[0] != now:
            active = self._streams
            if len(active) > 1:
                active = [s for s in active if not s.stopped(now, self._uses - s.used_at)]
            self._seen = now, active or [self._newest()]
        return self._seen[1]

    @property
    def several(self) -> bool:
        """True if several streams are active."""
        return len(self._streams) > 1 and len(self._active()) > 1

    @property
    def place(self) -> int:
        """The place of the only active stream."""
        return self._first.place

    @property
    def _first(self) -> UseStream:
        """The only active stream, or one of several."""
        return self._streams[0] if len(self._streams) == 1 else self._active()[0]

    def _only(self) -> LearnedOrder | None:
        """Return the order of the only active stream; None if there are several."""
        if len(self._streams) == 1:  # the usual case: it counts even if it has stopped
            return self._streams[0].order
        active = self._active()
        return active[0].order if len(active) == 1 else None

    # Predicting --------------------------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """True until a use has repeated: keys are expected by registration, and have no ranks."""
        if not self._prefetches:
            return False
        only = self._only()
        return all(s.order.learning for s in self._active()) if only is None else only.learning

    @property
    def epoch(self) -> object:
        """A value that changes with the ranks, unless only the key just used changed its rank."""
        order = self._first.order
        return id(order), order.epoch

    @property
    def routed(self) -> RoutedUses:
        """The uses of routed keys, relative to the active stream."""
        return self._first.order.routed

    def ranks(self, numbers: Numbers) -> Ranks:
        """Return the rank of each number: when it is used next; infinity: not expected."""
        only = self._only()
        if only is not None:
            return only.ranks(numbers)
        return self.known.sooner(numbers, self._next_uses()[0][numbers])

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """Return the ranks of keys that are used `times` times as far ahead."""
        only = self._only()
        if only is not None:
            return only.farther(ranks, times)
        now = self._clock()
        farther = now + times * (ranks - now)
        return np.where(ranks < SOON / 2, SOON + times * (ranks - SOON), farther)

    def ahead(self, count: int) -> Numbers:
        """Return the prefetched numbers, and then at most `count` expected ones of each stream.

        Those of several streams are concatenated: see `streams`.
        """
        if not self._prefetches:
            return _NO_USES
        only = self._only()
        if only is not None:
            return only.ahead(count)
        return np.concatenate(
            [self.known.prefetched_numbers(), *(numbers for _, numbers in self.streams(count))]
        )

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """Return the place of each active stream, and its next uses, at most `count`."""
        if not self._prefetches:
            return []
        return [(one.place, one.order.learned(count)) for one in self._active()]

    def spared(self, numbers: Numbers) -> Mask:
        """Return a mask, by number, of the keys that streams with a smaller share expect.

        `numbers` are in memory. A stream with a smaller share has fewer bytes there than another.
        """
        expect = self._next_uses()[1]
        held = np.zeros(expect.shape[1])
        held[numbers] = self._nbytes()[numbers]
        shares = expect @ (held / np.maximum(expect.sum(axis=0), 1))
        spares = shares < shares.max() * EVEN
        spared: Mask = expect[spares].any(axis=0)
        return spared

    def _next_uses(self) -> tuple[Ranks, npt.NDArray[np.float64]]:
        """Return the time of each number's next use; and by stream and number, 1 if expected."""
        now = self._clock()
        as_of = now, self.known.renumbered, self.known.epoch
        if self._soonest is None or self._soonest[0] != as_of:
            times = np.stack([one.times(now) for one in self._active()])
            self._soonest = as_of, times.min(axis=0), (times < _EXPECTED).astype(np.float64)
        return self._soonest[1:]
