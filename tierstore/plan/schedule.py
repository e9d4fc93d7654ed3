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

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from tierstore.model.tiers import UseOrder
from tierstore.plan.fallback_orders import RegistrationOrder, RoutedUses, UseRates
from tierstore.plan.matching import Numbers
from tierstore.plan.use_history import Ranks, UseHistory

MEMORY = 8192
LEARNING_RATE = 0.1
GUESSED = 0.5  # how much a wrong prediction counts at a place where none came true yet
TRUSTED = 0.5
PATIENCE = 64
"""Uses after which a key that the caller said comes next is no longer waited for."""
HINTS = 4
"""How many keys the order of registration foretells: a wrong hint costs up to 1.85 x the reads."""

SOON = -1e15
"""What the caller expects ranks above it by its steps; all other ranks are far above that."""

_ROOM = 16

_NOBODY: Numbers = np.zeros(0, dtype=np.int64)


class Schedule(Protocol):
    """What a planner learns the order of uses with. It numbers the groups, by their keys.

    `LearnedOrder` says what each of its methods does, where one order is learned of all uses.
    """

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet."""

    def number(self, key: str) -> int:
        """The number of `key`."""

    def introduce(self, key: str, order: UseOrder = UseOrder.LEARNED) -> None:
        """A group is registered."""

    def forget(self, key: str) -> None:
        """A group is gone."""

    def expect(self, keys: Iterable[str]) -> None:
        """The caller says that these keys come next, in this order."""

    def expect_not(self, key: str) -> None:
        """The caller does not expect the key any more."""

    def advance_past(self, key: str, stream: int = 0) -> None:
        """Note that `key` has just been used, in this stream of uses."""

    def come(self, key: str, stream: int = 0) -> None:
        """Note a use of which no order is learned."""

    def end(self, stream: int) -> None:
        """A stream is over."""

    def round(self, number: int) -> int:
        """After how many uses the group in use comes again; 0 if that is not known."""

    def repeats(self, length: int) -> bool:
        """Whether the next uses, so many, are expected to be what the latest ones were."""

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next, on a scale of its own; infinity: not expected."""

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """The ranks of keys that are used so many times as far ahead."""

    def ahead(self, count: int) -> Numbers:
        """The numbers of what the caller named, and of `count` others at most, soonest first."""

    def foretold(self) -> int:
        """How many of them the caller named."""


class LearnedOrder:
    """A schedule that predicts by the longest suffix match over the last `memory` uses.

    Each key has a number, which stays its own until it is forgotten. `epoch` grows when ranks
    change, but not for the key that was just used alone. Uses of one key in a row count once.
    Keys that data choose (see `RoutedUses`) have a wait instead of a place, and are never foretold.
    `trusted` is False while there is no prediction, or fewer than about half of the latest ones
    came true (wrong guesses count half); keys are then ranked by decayed access rates, or not at
    all (infinity for every key) during the first pass. The memory grows to twice the number of
    registered keys, so that a pass over them fits. `history`, `rates` and `routed` are there to be
    looked at.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.epoch = 0
        self._memory = memory
        self._numbers: dict[str, int] = {}
        self._keys: list[str] = []  # by number
        self._spare: list[int] = []  # numbers that are nobody's
        self._kept: set[str] = set()  # keys whose number somebody was told
        self.history = UseHistory(_ROOM)
        self.rates = UseRates(_ROOM)
        self.routed = RoutedUses(_ROOM)
        self._used = 0  # how many uses had a place in the order
        self._registered = RegistrationOrder()
        self._latest: str | None = None  # the key used last
        self._tested = False  # whether a prediction came true since the history matches
        self._confidence = 1.0
        self._hints: Numbers | None = None  # made when somebody asks
        self._expected: dict[str, int] = {}  # key -> the use by which it must have come

    @property
    def trusted(self) -> bool:
        """Whether the learned order is worth ranking by."""
        return self.history.place >= 0 and self._confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet: there are hints, and no ranks."""
        return self.history.place < 0 and self._confidence >= TRUSTED

    # Keys and their numbers --------------------------------------------------------------------

    def number(self, key: str) -> int:
        """The number of `key`."""
        self._kept.add(key)
        return self._number(key)

    def _number(self, key: str) -> int:
        found = self._numbers.get(key)
        if found is not None:
            return found
        if self._spare:
            number = self._spare.pop()
            self._keys[number] = key
        else:
            number = len(self._keys)
            self._keys.append(key)
            if number == len(self.history.last):
                self.history.make_room()
                self.rates.make_room()
                self.routed.make_room()
        self._numbers[key] = number
        self.rates.clear(number)
        self.routed.clear(number)
        span = 2.0 ** math.ceil(math.log2(len(self._numbers)))
        if span != self.rates.span:
            self.rates.span = span
            self.epoch += 1
        return number

    def introduce(self, key: str, order: UseOrder = UseOrder.LEARNED) -> None:
        """A group is registered. What data choose has no place in an order."""
        if order is UseOrder.ROUTED:
            self.routed.add(self.number(key))
            self.epoch += 1
            return
        self._hints = None
        self.number(key)
        self._registered.add(key)

    def forget(self, key: str) -> None:
        """A group is gone."""
        if self._registered.remove(key):
            self._hints = None
        self._kept.discard(key)
        if self._expected.pop(key, None) is not None:
            self.epoch += 1
        number = self._numbers.get(key)
        if number is None:
            return
        self.rates.clear(number)
        self.routed.clear(number)
        if self.history.last[number] < 0:
            self._spare.append(
                self._numbers.pop(key)
            )  # else it has a place in the history, for now

    def expect(self, keys: Iterable[str]) -> None:
        """The caller says that these keys come next, in this order."""
        for key in keys:
            self._number(key)
            self._expected.pop(key, None)
            # A caller who changes their mind must not keep the room taken for ever.
            self._expected[key] = self.rates.clock + PATIENCE + 2 * len(self._expected)
        self.epoch += 1

    def expect_not(self, key: str) -> None:
        """The caller does not expect the key any more."""
        if self._expected.pop(key, None) is not None:
            self.epoch += 1

    # Learning ----------------------------------------------------------------------------------

    def advance_past(self, key: str, stream: int = 0) -> None:
        """Note that `key` has just been used. The uses of all streams are one order here."""
        again, self._latest, self._hints = key == self._latest, key, None
        # First of all, as it may take away this key's number, and the place that matches.
        if self.history.full and not again:
            self._forget_the_oldest()
        number = self._number(key)
        self.rates.count(number)
        self._come(key)
        if not again:
            self._used += 1
            self._learn(number)

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
            self.epoch += 1

    def end(self, stream: int) -> None:
        """A stream is over. Of one order for all, nothing is forgotten."""

    def come(self, key: str, stream: int = 0) -> None:
        """Note that `key`, which the caller expected or data chose, was used. Of an order, nothing
        is learned from that."""
        number = self._numbers.get(key)
        if number is not None and self.routed.has(number):
            self.rates.count(number)
            turn = self._numbers.get(self._latest or "", number)
            self.routed.count(number, turn, self._used, len(self._numbers))
        else:
            self.rates.clock += 1
        self._come(key)

    def _come(self, key: str) -> None:
        """What was expected has come, or has not come for too long."""
        now = self.rates.clock
        over = [k for k, limit in self._expected.items() if k == key or limit < now]
        for gone in over:
            self.expect_not(gone)

    def _forget_the_oldest(self) -> None:
        """Make room, and keep the newest half, or enough for twice the registered keys."""
        self.history.forget_the_oldest(max(self._memory, 2 * len(self._registered)))
        self.epoch += 1
        for key, number in list(self._numbers.items()):
            unused = self.history.last[number] < 0
            if unused and key not in self._kept and key not in self._expected:
                self._spare.append(self._numbers.pop(key))

    # Predicting --------------------------------------------------------------------------------

    def steps_until(self, key: str) -> float:
        """How many uses ahead `key` is expected; infinity if it is not expected at all."""
        if key in self._expected:
            return 1.0 + list(self._expected).index(key)
        number = self._numbers.get(key)
        if number is None or self.learning:
            return math.inf
        if self.trusted:
            return float(self.ranks(np.array([number]))[0]) - self.history.place
        rate = self.rates.rate(number)
        return self.rates.span / rate if rate > 0 else math.inf

    def round(self, number: int) -> int:
        """After how many uses the group in use, `number`, comes again; 0 if that is not known."""
        if not self.trusted or self._expected:
            return 0
        away = float(self.history.next_places()[number]) - self.history.place
        return int(away) if math.isfinite(away) else 0

    def repeats(self, length: int) -> bool:
        """Whether the next uses, so many, are expected to be what the latest ones were."""
        return self.trusted and self.history.repeats(length)

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next, on a scale of its own; infinity: not expected."""
        if self.trusted:
            following = self.history.next_places()
            ranks = following[numbers]
            if self.routed.any:
                routed = self.routed.of(numbers)
                waits = self.routed.waits(numbers[routed], self._used, len(self._numbers))
                turns = following[self.routed.turns(numbers[routed])]
                ranks[routed] = np.where(np.isinf(turns), self.history.place, turns) + waits
        elif self.learning:
            ranks = np.full(len(numbers), np.inf)
        else:
            ranks = self.rates.ranks(numbers)
        if not self._expected:
            return ranks
        soon = np.full(len(self.history.last), np.inf)
        soon[self._named()] = SOON + np.arange(1, len(self._expected) + 1)
        sooner: Ranks = np.minimum(soon[numbers], ranks)  # than anything that was learned
        return sooner

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
            yield self._keys[number]

    def ahead(self, count: int) -> Numbers:
        """`upcoming` as numbers."""
        learned = self._learned(count)
        return np.concatenate([self._named(), learned]) if self._expected else learned

    def _named(self) -> Numbers:
        """The numbers of the keys that the caller expects, in order."""
        named = [self._numbers[key] for key in self._expected]
        return np.array(named, dtype=np.int64)

    def _learned(self, count: int) -> Numbers:
        if self.trusted:
            return self.history.following(count)
        if not self.learning:
            return _NOBODY
        if self._hints is None:
            following = islice(self._registered.after(self._latest), HINTS)
            self._hints = np.array([self._numbers[key] for key in following], dtype=np.int64)
        return self._hints[:count]

    def foretold(self) -> int:
        """How many of the upcoming keys the caller named."""
        return len(self._expected)
