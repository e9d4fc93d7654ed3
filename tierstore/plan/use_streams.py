"""The orders in which groups are used, one for each stream of uses, and one ranking for all.

Where several threads (or workers) use groups at the same time, the uses of each repeat themselves.
One after the other as they happen to come, they do not. So each stream of uses is learned by
itself, with the seconds that pass from one use to the next. The next use of a group is the earliest
of all streams, in seconds.

A stream is no thread. One thread that runs several models in turn makes one stream; so do two
threads that take turns, and so do ever new threads of a pool. Only uses beside each other have
streams of their own. So a stream has a *user*, and goes from one to another:

  - A use that the user's own stream did not foresee, and that an idle stream did, goes on with that
    stream: whoever ran the model before, what was learned of it is there.
  - A user without a stream goes on with an idle one, best with one that knows the group.
  - Where no stream is idle, a new one begins. It knows all that was learned by the latest stream
    that knows the group, and so is at once in the middle of that order.

A stream is idle while the group that it used last is lent to nobody, and nobody waits for the one
that its user asked for last. That is not enough where leases are short, and two users compute
between them: then one stream would go to and fro, and foresee nothing. A stream that does is
*contested*, and stays with its user until it stops.

A stream stops when it is late by a pass over what it uses. Then it has no part in anything, until
its user goes on. If one stream is left, ranks and hints are those of its order, as if there had
never been another. A stream is forgotten when the others have made as many uses as one remembers.

To give up what is used last (Belady, 1966) misses the least in all. But what a slow stream has just
read is used later than anything of a fast one, so that it would always be given up first, and the
slow stream would read everything again in each pass. So of all streams, the one that has the most
in memory gives up first, and of that, what is used last. What several streams use counts for each
in part, and is not given up for one of them that has the most. A stream that needs less than its
share never has the most: what it leaves is for the others.
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
"""Uses that are timed together: several may follow each other at once, who looks ahead of them."""
PAUSE = 4.0
"""How many times as long as expected these uses may take at most: more of it was a pause."""
WEIGHT = 0.25
"""How much the latest of these times count."""
MOST = 64
"""Streams that there may be. More users share them, as if they took turns."""
EVEN = 0.96
"""Streams that have at least this part of what one of them has in memory share evenly: of what they
have, what is used last goes, whosever it is."""
SHORT = 4
"""A turn of fewer uses than this is short."""
CONTESTED = 6
"""Surprises from which on a stream is contested. Each short turn after which a use was not foreseen
counts twice, and each longer turn takes one away."""

_NOBODY: Numbers = np.zeros(0, dtype=np.int64)
_EXPECTED = 1e11
"""Seconds above all that are ever expected."""

Mask = npt.NDArray[np.bool_]


class UseStream:
    """The order of one stream, and its pace. It began at `now`, in seconds, as all times are.

    Its user has `asked` for a key. `place` is its own among all streams.
    `latest` is the time of the latest use, `used_at` its number among the uses of all streams.
    """

    def __init__(self, order: LearnedOrder, now: float, place: int = 0) -> None:
        self.order = order
        self.place = place
        self.asked: str | None = None
        self.latest = now
        self.used_at = 0
        self.surprises = 0
        self.turn = 0  # uses since it has this user
        self.seconds_per_use = 0.0
        self._timed_from = now
        self._uses = 0
        self._in_time: tuple[int, Ranks] | None = None  # what `times` tells while it is not late

    def use(self, key: str, now: float) -> None:
        """The group of this key is used."""
        again = key == self.order.latest
        self.order.advance_past(key)
        self._used(now)
        if not again:
            self._time(now)

    def use_out_of_order(self, key: str, now: float) -> None:
        """The same, of a group that data choose, or of which no order is learned."""
        self.order.come(key)
        self._used(now)

    def _used(self, now: float) -> None:
        self.turn += 1
        self.latest, self._in_time = now, None

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

    def knows(self, key: str) -> bool:
        """Whether it has used this key."""
        number = self.order.known.numbers.get(key)
        return number is not None and self.order.remembers(number)

    def late(self, now: float) -> float:
        """The seconds by which its next use is late."""
        return max(now - self.latest - self.seconds_per_use, 0.0)

    def stopped(self, now: float, others: int) -> bool:
        """Whether it is late by more than a pass over what it uses; or, if its pace is not known,
        whether the `others` have made more uses than two passes of it."""
        pace = self.seconds_per_use if self._uses > 1 else 0.0
        late = self.late(now) if pace else others
        if not late or (not pace and others <= TIMED):
            return False
        groups = int((self.order.history.last >= 0).sum())
        return late > groups * (pace or 2)

    def times(self, now: float) -> Ranks:
        """By number, when each group is used next; infinity: nobody knows. What is late is expected
        after as long as it is late by now."""
        as_of = self.order.known.renumbered
        if self._in_time is None or self._in_time[0] != as_of:
            # Of one that was never timed, all uses are at hand, but for those that never come.
            with np.errstate(over="ignore"):  # to infinity: it never comes
                times = self.latest + max(self.seconds_per_use, 1e-9) * self._waits()
            self._in_time = as_of, times
        late, times = self.late(now), self._in_time[1]
        return times + 2 * late if late else times

    def _waits(self) -> Ranks:
        """By number, after how many uses each is used next. Where no order is known, that is told
        by access rates: in the first pass, a group comes again after a pass that is as long as what
        was seen of it, or a little longer."""
        order = self.order
        numbers = np.arange(len(order.history.last))
        if order.trusted:
            return order.learned_ranks(numbers) - order.history.place
        rates = order.rates
        with np.errstate(over="ignore"):
            waits: Ranks = rates.span * np.exp(rates.ranks(numbers) + rates.clock / rates.span)
        return waits


class UseStreams:
    """A schedule of several streams. Each remembers the latest uses, `memory` or more.

    `clock` tells the seconds. `in_use` tells whether the group of a number is lent, or somebody
    waits for it; `nbytes`, by number, the bytes of groups. If it does not `foretell`, nothing is
    fetched early by it: then users ask for groups early.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        in_use: Callable[[int], bool],
        nbytes: Callable[[], Numbers],
        *,
        memory: int = MEMORY,
        foretell: bool = True,
    ) -> None:
        self._clock = clock
        self._is_lent = in_use
        self._nbytes = nbytes
        self._memory = memory
        self._foretell = foretell
        self.known = KnownKeys(takes_hints=foretell)
        self._streams: list[UseStream] = []
        self._users: dict[int, UseStream] = {}
        self._uses = 0
        self._seen: tuple[float, list[UseStream]] | None = None
        self._soonest: tuple[object, Ranks, npt.NDArray[np.float64]] | None = None

    # Which streams there are -------------------------------------------------------------------

    def ask(self, key: str, stream: int = 0) -> int:
        """Note that a user is about to use `key`. Returns the place of its stream."""
        one = self._users.get(stream)
        if one is None or len(self._streams) > 1:
            one = self._of(key, stream)
        one.asked = key
        return one.place

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that `key` has just been used, by this user."""
        one = self._users.get(stream)
        if one is None or len(self._streams) > 1:
            one = self._of(key, stream)
        one.asked = None
        one.use(key, self._clock())
        return self._note(one)

    def come(self, key: str, stream: int = 0) -> int:
        """Note a use of which no order is learned."""
        one = self._users.get(stream) or self._newest()
        one.use_out_of_order(key, self._clock())
        return self._note(one)

    def _note(self, one: UseStream) -> int:
        self._uses += 1
        one.used_at = self._uses
        self._seen = self._soonest = None
        return one.place

    def end(self, stream: int) -> None:
        """A user is gone, and what was learned of its uses is of no use any more."""
        one = self._users.get(stream)
        if one is not None:
            self._drop(one)

    def _of(self, key: str, user: int) -> UseStream:
        """The stream with which a user goes on, who uses this key."""
        own = self._users.get(user)
        if own is not None and own.order.foresees(key):
            return own
        idle = [one for one in self._streams if one is not own and self._is_idle(one)]
        foreseen = next((one for one in idle if one.order.foresees(key)), None)
        if foreseen is not None:
            return self._hand_over(foreseen, user, own, surprised=False)
        if own is not None:
            return own
        if idle:
            one = max(idle, key=lambda one: (one.knows(key), one.used_at))
            return self._hand_over(one, user, None, surprised=True)
        return self._begin(key, user)

    def _is_idle(self, one: UseStream) -> bool:
        numbers = self.known.numbers
        for key in (one.asked, one.order.latest):
            if key in numbers and self._is_lent(numbers[key]):
                return False
        return one.surprises < CONTESTED or one.stopped(self._clock(), self._uses - one.used_at)

    def _hand_over(
        self, one: UseStream, user: int, own: UseStream | None, *, surprised: bool
    ) -> UseStream:
        """A user goes on with a stream that was another's, or nobody's, and leaves its `own`."""
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
        """A new stream, as none is idle. It begins with what was learned by the latest one that
        knows the key."""
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
        one.order.end_all()
        self._seen = self._soonest = None

    def _newest(self) -> UseStream:
        """The stream of the latest use."""
        if not self._streams:
            return self._begin("", 0)
        return max(self._streams, key=lambda one: one.used_at)

    def _going(self) -> list[UseStream]:
        """The streams that go on now; if none does, the one of the latest use."""
        now = self._clock()
        if self._seen is None or self._seen[0] != now:
            going = self._streams
            if len(going) > 1:
                going = [s for s in going if not s.stopped(now, self._uses - s.used_at)]
            self._seen = now, going or [self._newest()]
        return self._seen[1]

    @property
    def several(self) -> bool:
        """Whether several streams go on."""
        return len(self._streams) > 1 and len(self._going()) > 1

    @property
    def place(self) -> int:
        """The place of the only stream that goes on."""
        return self._first.place

    @property
    def _first(self) -> UseStream:
        """The only stream that goes on, or one of several."""
        return self._streams[0] if len(self._streams) == 1 else self._going()[0]

    def _only(self) -> LearnedOrder | None:
        """The order of the only stream that goes on; None if there are several."""
        if len(self._streams) == 1:  # as it is nearly always: then nobody has stopped
            return self._streams[0].order
        going = self._going()
        return going[0].order if len(going) == 1 else None

    # Predicting --------------------------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet: there are hints, and no ranks."""
        if not self._foretell:
            return False
        only = self._only()
        return all(s.order.learning for s in self._going()) if only is None else only.learning

    @property
    def epoch(self) -> object:
        """Another one when ranks have changed, but not for the key that was just used alone."""
        order = self._first.order
        return id(order), order.epoch

    @property
    def routed(self) -> RoutedUses:
        """The uses of keys that data choose, of the stream that goes on."""
        return self._first.order.routed

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next; infinity: not expected."""
        only = self._only()
        if only is not None:
            return only.ranks(numbers)
        return self.known.sooner(numbers, self._look()[0][numbers])

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """The ranks of keys that are used so many times as far ahead."""
        only = self._only()
        if only is not None:
            return only.farther(ranks, times)
        now = self._clock()
        farther = now + times * (ranks - now)
        return np.where(ranks < SOON / 2, SOON + times * (ranks - SOON), farther)

    def ahead(self, count: int) -> Numbers:
        """The numbers of what the caller named, and of `count` others at most. Of several streams,
        those of one come after those of another: see `streams`."""
        if not self._foretell:
            return _NOBODY
        only = self._only()
        if only is not None:
            return only.ahead(count)
        return np.concatenate(
            [self.known.named(), *(numbers for _, numbers in self.streams(count))]
        )

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """For each stream that goes on, its place, and the numbers of the uses that it foretells,
        so many at most."""
        if not self._foretell:
            return []
        return [(one.place, one.order.learned(count)) for one in self._going()]

    def spared(self, numbers: Numbers) -> Mask:
        """By number, what a stream expects that does not have the most bytes in memory, if these
        numbers are in memory."""
        expect = self._look()[1]
        held = np.zeros(expect.shape[1])
        held[numbers] = self._nbytes()[numbers]
        shares = expect @ (held / np.maximum(expect.sum(axis=0), 1))
        spares = shares < shares.max() * EVEN
        spared: Mask = expect[spares].any(axis=0)
        return spared

    def _look(self) -> tuple[Ranks, npt.NDArray[np.float64]]:
        """By number, when each group is used next; and by stream and number, 1 if the stream
        expects it, else 0."""
        now = self._clock()
        as_of = now, self.known.renumbered, self.known.epoch
        if self._soonest is None or self._soonest[0] != as_of:
            times = np.stack([one.times(now) for one in self._going()])
            self._soonest = as_of, times.min(axis=0), (times < _EXPECTED).astype(np.float64)
        return self._soonest[1:]
