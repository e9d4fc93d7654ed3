"""The order in which groups are used, learned from one pass.

A denoising loop, a training step or a token loop repeats itself. `LearnedOrder` predicts by the
longest suffix match: it finds the place in its history that was preceded by the longest run of keys
equal to the newest ones, and expects the uses that followed there. (This is the idea of prediction
by partial matching, Cleary and Witten, 1984.) If another place matches as well, a key is ranked by
the sooner of its next uses, since keeping it needlessly costs less than reading it again. Before
anything repeats, keys are expected in the order of registration, which is good enough for
prefetching but not for eviction.

Keys have numbers, so numpy can process whole histories. While predictions come true, the match
advances by one place and only the key just used changes its rank. All ranks are recomputed only
when one of the two places predicted a different use. Then `epoch` changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.plan.fallback_orders import RoutedUses, UseRates
from tierstore.plan.known_keys import SOON, KnownKeys
from tierstore.plan.matching import Numbers
from tierstore.plan.use_history import Ranks, UseHistory

MEMORY = 8192
LEARNING_RATE = 0.1
GUESSED = 0.5  # weight of a wrong prediction at a place where none has come true yet
TRUSTED = 0.5
HINTS = 4
"""Number of keys to expect in order of registration. A wrong one costs up to 1.85 x the reads."""

_INITIAL_SIZE = 16

_NO_USES: Numbers = np.zeros(0, dtype=np.int64)


class Schedule(Protocol):
    """Learns the order of uses for a planner. Groups are referred to by their number in `known`.

    `LearnedOrder` learns one order of all uses, `UseStreams` several. While `several` is True,
    ranks are seconds.
    """

    known: KnownKeys

    @property
    def epoch(self) -> object:
        """A value that changes with the ranks, unless only the key just used changed its rank."""

    @property
    def several(self) -> bool:
        """True if several streams of uses are active."""

    @property
    def place(self) -> int:
        """The place of the only active order, unless there are `several`."""

    @property
    def learning(self) -> bool:
        """True until a use has repeated."""

    @property
    def routed(self) -> RoutedUses:
        """The uses of routed keys, relative to one order."""

    def ask(self, key: str, stream: int = 0) -> int:
        """Note that the user `stream` requests `key`. Returns the place of its order."""

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that `stream` has just used `key`. Returns the place of its order."""

    def note_unordered_use(self, key: str, stream: int = 0) -> int:
        """Note a use that has no place in an order. Returns the place of the user's order."""

    def end(self, stream: int) -> None:
        """Forget what was learned from a user that has ended."""

    def ranks(self, numbers: Numbers) -> Ranks:
        """Return the rank of each number: when it is used next; infinity: not expected.

        The scale depends on the schedule.
        """

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """Return the ranks of keys that are used `times` times as far ahead."""

    def ahead(self, count: int) -> Numbers:
        """Return the prefetched numbers and then at most `count` expected ones, soonest first."""

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """Return the place of each active stream's order, and its next uses, at most `count`."""

    def spared(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask, by number, of the keys that streams with a smaller share expect.

        `numbers` are in memory. A stream with a smaller share has fewer bytes there than another.
        """


class LearnedOrder:
    """A schedule that predicts by the longest suffix match over the last `memory` uses.

    Each key has a number, which it keeps until it is forgotten. `epoch` grows when ranks change,
    unless only the key just used changed its rank. Consecutive uses of one key count once. Routed
    keys (see `RoutedUses`) have a mean wait instead of a place, and are never expected. `trusted`
    is False while there is no prediction, or while fewer than about half of the latest ones came
    true (wrong guesses count half). Keys are then ranked by decayed access rates, or not at all
    (infinity for every key) during the first pass. The memory grows to twice the number of
    registered keys, so that a pass over them fits. Callers may only read `history`, `rates` and
    `routed`.
    Orders that share `known` use the same numbers.
    """

    several = False
    place = 0

    def __init__(self, memory: int = MEMORY, known: KnownKeys | None = None) -> None:
        self.known = known = KnownKeys() if known is None else known
        self._memory = memory
        self._epoch = 0
        self.history = UseHistory(_INITIAL_SIZE)
        self.rates = UseRates(_INITIAL_SIZE)
        self.routed = RoutedUses(_INITIAL_SIZE)
        self.latest: str | None = None  # the latest key used
        self._used = 0  # number of uses that had a place in the order
        self._tested = False  # whether a prediction has come true since the match began
        self._confidence = 1.0
        self._hints: tuple[int, Numbers] = (
            -1,
            _NO_USES,
        )  # with the value of `registrations` at that time
        known.orders.append(self)
        for number in range(len(known.keys)):
            self.begin_number(number)
        for number in known.routed:
            self.routed.add(number)

    def copy(self) -> LearnedOrder:
        """Return an independent order with the same history and keys."""
        other = LearnedOrder(self._memory, self.known)
        other.history, other.rates, other.routed = copy.deepcopy(
            (self.history, self.rates, self.routed)
        )
        other.latest, other._used = self.latest, self._used
        other._tested, other._confidence = self._tested, self._confidence
        return other

    def detach(self) -> None:
        """Detach this order from `known`: its history no longer keeps numbers in use."""
        self.known.orders.remove(self)
        self.known.reclaim_numbers()

    @property
    def epoch(self) -> int:
        """A number that grows when ranks change."""
        return self._epoch + self.known.epoch

    @property
    def trusted(self) -> bool:
        """True if the learned order is reliable enough to rank by."""
        return self.history.place >= 0 and self._confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        """True until a use has repeated: keys are expected by registration, and have no ranks."""
        return self.history.place < 0 and self._confidence >= TRUSTED

    # Keys and their numbers --------------------------------------------------------------------

    def begin_number(self, number: int) -> None:
        """Assign this number to a new key, which has no uses yet."""
        while number >= len(self.history.last):
            self.history.grow()
            self.rates.grow()
            self.routed.grow()
        self.clear_number(number)
        span = 2.0 ** math.ceil(math.log2(max(len(self.known.numbers), 1)))
        if span != self.rates.span:
            self.rates.span = span
            self._epoch += 1

    def clear_number(self, number: int) -> None:
        """Clear the rates of a number whose key was forgotten. Its places in the history stay."""
        self.rates.clear(number)
        self.routed.clear(number)

    def route_number(self, number: int) -> None:
        """Mark the key of this number as routed."""
        self.routed.add(number)

    def remembers(self, number: int) -> bool:
        """Return whether the history has a use of this number."""
        return bool(self.history.last[number] >= 0)

    # Learning ----------------------------------------------------------------------------------

    def ask(self, key: str, stream: int = 0) -> int:
        """Do nothing: all uses are one order here."""
        return 0

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that `key` has just been used. The uses of all streams are one order here."""
        again, self.latest, self._hints = key == self.latest, key, (-1, _NO_USES)
        # This comes first, because it may free this key's number and remove the matching place.
        if self.history.full and not again:
            self._drop_oldest()
        number = self.known.number_for_now(key)
        self.rates.count(number)
        self.known.clock += 1
        self.known.note_use(key)
        if not again:
            self._used += 1
            self._learn(number)
        return 0

    def expects(self, key: str) -> bool:
        """Return whether `key` is the expected next key, or the latest one."""
        number = self.known.numbers.get(key)
        if key == self.latest or number is None:
            return key == self.latest
        return self.history.expects(self.history.place, number)

    def _learn(self, number: int) -> None:
        history = self.history
        before = (self.trusted, self.learning)
        is_expected = history.expects(history.place, number)
        if history.place >= 0:
            weight = LEARNING_RATE if is_expected or self._tested else GUESSED * LEARNING_RATE
            self._confidence += weight * (is_expected - self._confidence)
        self._tested = is_expected
        changed = history.add(number)
        # Unless ranks are places, only the rank of the key just used has changed.
        if (self.trusted, self.learning) != before or (self.trusted and changed):
            self._epoch += 1

    def end(self, stream: int) -> None:
        """Do nothing: one order of all users outlives each of them."""

    def note_unordered_use(self, key: str, stream: int = 0) -> int:
        """Note a use of a key that was prefetched or routed. The order learns nothing from it."""
        numbers = self.known.numbers
        number = numbers.get(key)
        if number is not None and self.routed.has(number):
            self.rates.count(number)
            turn = numbers.get(self.latest or "", number)
            self.routed.count(number, turn, self._used, len(numbers))
        else:
            self.rates.clock += 1
        self.known.clock += 1
        self.known.note_use(key)
        return 0

    def _drop_oldest(self) -> None:
        """Drop the oldest half, but keep enough for twice the registered keys."""
        self.history.drop_oldest(max(self._memory, 2 * len(self.known.registered)))
        self._epoch += 1
        self.known.reclaim_numbers()

    # Predicting --------------------------------------------------------------------------------

    def steps_until(self, key: str) -> float:
        """Return the uses until `key` is expected; infinity if it is not expected."""
        if key in self.known.prefetched:
            return 1.0 + list(self.known.prefetched).index(key)
        number = self.known.numbers.get(key)
        if number is None or self.learning:
            return math.inf
        if self.trusted:
            return float(self.ranks(np.array([number]))[0]) - self.history.place
        rate = self.rates.rate(number)
        return self.rates.span / rate if rate > 0 else math.inf

    def ranks(self, numbers: Numbers) -> Ranks:
        """Return the rank of each number: when it is used next; infinity: not expected."""
        return self.known.sooner(numbers, self.learned_ranks(numbers))

    def learned_ranks(self, numbers: Numbers) -> Ranks:
        """Return `ranks` without regard to prefetched keys."""
        if self.trusted:
            following = self.history.next_places()
            ranks = following[numbers]
            if self.routed.any:
                routed = self.routed.of(numbers)
                waits = self.routed.waits(numbers[routed], self._used, len(self.known.numbers))
                turns = following[self.routed.turns(numbers[routed])]
                ranks[routed] = np.where(np.isinf(turns), self.history.place, turns) + waits
        elif self.learning:
            ranks = np.full(len(numbers), np.inf)
        else:
            ranks = self.rates.ranks(numbers)
        return ranks

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """Return the ranks of keys that are used `times` times as far ahead."""
        if self.trusted:
            place = self.history.place
            farther = place + times * (ranks - place)
        else:
            farther = ranks + math.log(times)  # ranks are logarithms of rates, or infinite
        return np.where(ranks < SOON / 2, SOON + times * (ranks - SOON), farther)

    def upcoming(self, count: int) -> Iterator[str]:
        """Yield the prefetched keys and then at most `count` expected ones, soonest first."""
        for number in self.ahead(count).tolist():
            yield self.known.keys[number]

    def ahead(self, count: int) -> Numbers:
        """Return `upcoming` as numbers."""
        learned = self.learned(count)
        return (
            np.concatenate([self.known.prefetched_numbers(), learned])
            if self.known.prefetched
            else learned
        )

    def learned(self, count: int) -> Numbers:
        """Return the numbers of the expected uses, at most `count`, soonest first."""
        if self.trusted:
            return self.history.following(count)
        if not self.learning:
            return _NO_USES
        known = self.known
        if self._hints[0] != known.registrations:
            following = islice(known.registered.after(self.latest), HINTS)
            found = np.array([known.numbers[key] for key in following], dtype=np.int64)
            self._hints = known.registrations, found
        return self._hints[1][:count]

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """Return one stream of all uses."""
        return [(0, self.learned(count))]

    def spared(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return an all-false mask: there are no other streams."""
        return np.zeros(len(self.history.last), dtype=np.bool_)
