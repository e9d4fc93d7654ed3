"""The order in which groups are used, learned by watching one pass.

A denoising loop, a training step or a token loop repeats itself. `LearnedOrder` predicts by the
longest suffix match: it looks for the place in its history that was preceded by the longest run
of keys equal to the newest ones, and expects what followed there. (The idea is that of prediction
by partial matching, Cleary and Witten, 1984.) Where another place fits as well, a key is ranked by
the sooner of its next uses: to keep it for nothing costs less than to read it again. While there is
nothing to go by, keys are expected in the order in which they were registered; that is good enough
for a prefetch, and for nothing else.

Keys have numbers, so that whole histories are looked at by numpy. While predictions come true, the
match moves on by one place and only the key just used changes its rank; all ranks are computed
anew only when one of the two places foretold something else. Then `epoch` changes.
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
GUESSED = 0.5  # how much a wrong prediction counts at a place where none came true yet
TRUSTED = 0.5
HINTS = 4
"""How many keys the order of registration foretells: a wrong hint costs up to 1.85 x the reads."""

_ROOM = 16

_NOBODY: Numbers = np.zeros(0, dtype=np.int64)


class Schedule(Protocol):
    """What a planner learns the order of uses with. Groups are numbers, as `known` tells.

    `LearnedOrder` says what each of its methods does, where one order is learned of all uses;
    `UseStreams`, where there may be several. While `several` is true, ranks are seconds.
    """

    known: KnownKeys

    @property
    def epoch(self) -> object:
        """Another one when ranks have changed, but not for the key that was just used alone."""

    @property
    def several(self) -> bool:
        """Whether several streams of uses go on beside each other."""

    @property
    def place(self) -> int:
        """The place of the only order whose uses go on, unless there are `several`."""

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet."""

    @property
    def routed(self) -> RoutedUses:
        """The uses of keys that data choose, of one order."""

    def ask(self, key: str, stream: int = 0) -> int:
        """Note that the user `stream` is about to use `key`. Returns the place of its order."""

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that `key` has just been used by `stream`. Returns the place of its order."""

    def come(self, key: str, stream: int = 0) -> int:
        """Note a use of which no order is learned. Returns the place of the user's order."""

    def end(self, stream: int) -> None:
        """A user is gone, and what was learned of its uses is of no use any more."""

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next, on a scale of its own; infinity: not expected."""

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """The ranks of keys that are used so many times as far ahead."""

    def ahead(self, count: int) -> Numbers:
        """The numbers of what the caller named, and of `count` others at most, soonest first."""

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """For each stream that goes on, the place of its order, and the numbers of the uses that
        it foretells, so many at most."""

    def spared(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """By number, what a stream expects that does not have the most in memory, if these numbers
        are in memory."""


class LearnedOrder:
    """A schedule that predicts by the longest suffix match over the last `memory` uses.

    Each key has a number, which stays its own until it is forgotten. `epoch` grows when ranks
    change, but not for the key that was just used alone. Uses of one key in a row count once.
    Keys that data choose (see `RoutedUses`) have a wait instead of a place, and are never foretold.
    `trusted` is False while there is no prediction, or fewer than about half of the latest ones
    came true (wrong guesses count half); keys are then ranked by decayed access rates, or not at
    all (infinity for every key) during the first pass. The memory grows to twice the number of
    registered keys, so that a pass over them fits. `history`, `rates` and `routed` are there to be
    looked at. Orders that share `known` number keys alike.
    """

    several = False
    place = 0

    def __init__(self, memory: int = MEMORY, known: KnownKeys | None = None) -> None:
        self.known = known = KnownKeys() if known is None else known
        self._memory = memory
        self._epoch = 0
        self.history = UseHistory(_ROOM)
        self.rates = UseRates(_ROOM)
        self.routed = RoutedUses(_ROOM)
        self.latest: str | None = None  # the key used last
        self._used = 0  # how many uses had a place in the order
        self._tested = False  # whether a prediction came true since the history matches
        self._confidence = 1.0
        self._hints: tuple[int, Numbers] = -1, _NOBODY  # as of which registration
        known.orders.append(self)
        for number in range(len(known.keys)):
            self.begin_number(number)
        for number in known.routed:
            self.routed.add(number)

    def copy(self) -> LearnedOrder:
        """Another order that has learned the same, and knows the same keys."""
        other = LearnedOrder(self._memory, self.known)
        other.history, other.rates, other.routed = copy.deepcopy(
            (self.history, self.rates, self.routed)
        )
        other.latest, other._used = self.latest, self._used
        other._tested, other._confidence = self._tested, self._confidence
        return other

    def end_all(self) -> None:
        """Nothing is learned any more: the known keys need not be numbered for this order."""
        self.known.orders.remove(self)
        self.known.forget_the_unused()

    @property
    def epoch(self) -> int:
        """Grows when ranks change."""
        return self._epoch + self.known.epoch

    @property
    def trusted(self) -> bool:
        """Whether the learned order is worth ranking by."""
        return self.history.place >= 0 and self._confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet: there are hints, and no ranks."""
        return self.history.place < 0 and self._confidence >= TRUSTED

    # Keys and their numbers --------------------------------------------------------------------

    def begin_number(self, number: int) -> None:
        """This number is another key's from now on: of its uses nothing is known."""
        while number >= len(self.history.last):
            self.history.make_room()
            self.rates.make_room()
            self.routed.make_room()
        self.clear_number(number)
        span = 2.0 ** math.ceil(math.log2(max(len(self.known.numbers), 1)))
        if span != self.rates.span:
            self.rates.span = span
            self._epoch += 1

    def clear_number(self, number: int) -> None:
        """The key of this number is gone. It keeps its places in the history, for now."""
        self.rates.clear(number)
        self.routed.clear(number)

    def route_number(self, number: int) -> None:
        """Data choose the key of this number."""
        self.routed.add(number)

    def remembers(self, number: int) -> bool:
        """Whether the history has a use of this number."""
        return bool(self.history.last[number] >= 0)

    # Learning ----------------------------------------------------------------------------------

    def ask(self, key: str, stream: int = 0) -> int:
        """All uses are one order here."""
        return 0

    def advance_past(self, key: str, stream: int = 0) -> int:
        """Note that `key` has just been used. The uses of all streams are one order here."""
        again, self.latest, self._hints = key == self.latest, key, (-1, _NOBODY)
        # First of all, as it may take away this key's number, and the place that matches.
        if self.history.full and not again:
            self._forget_the_oldest()
        number = self.known.number_for_now(key)
        self.rates.count(number)
        self.known.clock += 1
        self.known.come(key)
        if not again:
            self._used += 1
            self._learn(number)
        return 0

    def foresees(self, key: str) -> bool:
        """Whether this is the key that comes next, or is in use."""
        number = self.known.numbers.get(key)
        if key == self.latest or number is None:
            return key == self.latest
        return self.history.foretells(self.history.place, number)

    def _learn(self, number: int) -> None:
        history = self.history
        before = (self.trusted, self.learning)
        foreseen = history.foretells(history.place, number)
        if history.place >= 0:
            weight = LEARNING_RATE if foreseen or self._tested else GUESSED * LEARNING_RATE
            self._confidence += weight * (foreseen - self._confidence)
        self._tested = foreseen
        changed = history.add(number)
        # Where nothing is ranked by places, only the key just used has another rank than before.
        if (self.trusted, self.learning) != before or (self.trusted and changed):
            self._epoch += 1

    def end(self, stream: int) -> None:
        """A stream is over. Of one order for all, nothing is forgotten."""

    def come(self, key: str, stream: int = 0) -> int:
        """Note that `key`, which the caller expected or data chose, was used. Of an order, nothing
        is learned from that."""
        numbers = self.known.numbers
        number = numbers.get(key)
        if number is not None and self.routed.has(number):
            self.rates.count(number)
            turn = numbers.get(self.latest or "", number)
            self.routed.count(number, turn, self._used, len(numbers))
        else:
            self.rates.clock += 1
        self.known.clock += 1
        self.known.come(key)
        return 0

    def _forget_the_oldest(self) -> None:
        """Make room, and keep the newest half, or enough for twice the registered keys."""
        self.history.forget_the_oldest(max(self._memory, 2 * len(self.known.registered)))
        self._epoch += 1
        self.known.forget_the_unused()

    # Predicting --------------------------------------------------------------------------------

    def steps_until(self, key: str) -> float:
        """How many uses ahead `key` is expected; infinity if it is not expected at all."""
        if key in self.known.expected:
            return 1.0 + list(self.known.expected).index(key)
        number = self.known.numbers.get(key)
        if number is None or self.learning:
            return math.inf
        if self.trusted:
            return float(self.ranks(np.array([number]))[0]) - self.history.place
        rate = self.rates.rate(number)
        return self.rates.span / rate if rate > 0 else math.inf

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next, on a scale of its own; infinity: not expected."""
        return self.known.sooner(numbers, self.learned_ranks(numbers))

    def learned_ranks(self, numbers: Numbers) -> Ranks:
        """`ranks`, whatever the caller expects."""
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
        """The ranks of keys that are used so many times as far ahead."""
        if self.trusted:
            place = self.history.place
            farther = place + times * (ranks - place)
        else:
            farther = ranks + math.log(times)  # ranks are logarithms of rates, or infinite
        return np.where(ranks < SOON / 2, SOON + times * (ranks - SOON), farther)

    def upcoming(self, count: int) -> Iterator[str]:
        """The keys that the caller named, and then at most `count` others, soonest first."""
        for number in self.ahead(count).tolist():
            yield self.known.keys[number]

    def ahead(self, count: int) -> Numbers:
        """`upcoming` as numbers."""
        learned = self.learned(count)
        return np.concatenate([self.known.named(), learned]) if self.known.expected else learned

    def learned(self, count: int) -> Numbers:
        """The numbers of the uses that are expected, so many at most, soonest first."""
        if self.trusted:
            return self.history.following(count)
        if not self.learning:
            return _NOBODY
        known = self.known
        if self._hints[0] != known.registrations:
            following = islice(known.registered.after(self.latest), HINTS)
            found = np.array([known.numbers[key] for key in following], dtype=np.int64)
            self._hints = known.registrations, found
        return self._hints[1][:count]

    def streams(self, count: int) -> Sequence[tuple[int, Numbers]]:
        """One, of all uses."""
        return [(0, self.learned(count))]

    def spared(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Nothing: there is nobody to share with."""
        return np.zeros(len(self.history.last), dtype=np.bool_)
