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
import numpy.typing as npt

from tierstore.plan.matching import NOWHERE, Numbers, best_matches

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
Ranks = npt.NDArray[np.float64]


class Schedule(Protocol):
    """A learned order of use. Each key has a number, which stays its own until it is forgotten."""

    @property
    def epoch(self) -> int:
        """Grows when ranks change, but not for the key that was just used alone."""

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet: there are hints, and no ranks."""

    def number(self, key: str) -> int:
        """The number of `key`."""

    def advance_past(self, key: str) -> None:
        """Note that `key` has just been used."""

    def come(self, key: str) -> None:
        """Note that `key`, which the caller expected, was used. Nothing is learned from that."""

    def steps_until(self, key: str) -> float:
        """How many uses ahead `key` is expected; infinity if it is not expected at all."""

    def round(self, number: int) -> int:
        """After how many uses the group in use, `number`, comes again; 0 if that is not known."""

    def repeats(self, length: int) -> bool:
        """Whether the next uses, so many, are expected to be what the latest ones were."""

    def ranks(self, numbers: Numbers) -> Ranks:
        """For each number, when it is used next, on a scale of its own; infinity: not expected."""

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        """The ranks of keys that are used so many times as far ahead."""

    def upcoming(self, count: int) -> Iterator[str]:
        """The keys that the caller named, and then at most `count` others, soonest first."""

    def ahead(self, count: int) -> Numbers:
        """`upcoming` as numbers."""

    def foretold(self) -> int:
        """How many of the upcoming keys the caller named."""

    def expect(self, keys: Iterable[str]) -> None:
        """The caller says that these keys come next, in this order."""

    def expect_not(self, key: str) -> None:
        """The caller does not expect the key any more."""

    def introduce(self, key: str) -> None:
        """A group is registered."""

    def forget(self, key: str) -> None:
        """A group is gone."""


class LearnedOrder:
    """A schedule that predicts by the longest suffix match over the last `memory` uses.

    Uses of one key in a row count once. `trusted` is False while there is no prediction, or fewer
    than about half of the latest ones came true (wrong guesses count half); keys are then ranked by
    decayed access rates, or not at all (infinity for every key) during the first pass. The memory
    grows to twice the number of registered keys, so that a pass over them fits.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.epoch = 0
        self._memory = memory
        self._numbers: dict[str, int] = {}
        self._keys: list[str] = []  # by number
        self._spare: list[int] = []  # numbers that are nobody's
        self._kept: set[str] = set()  # keys whose number somebody was told
        self._history: Numbers = np.zeros(0, dtype=np.int64)
        self._following = self._history  # place -> where its key comes next
        self._length = 0
        self._latest: str | None = None  # the key used last
        self._place = NOWHERE  # where in the history we believe to be; negative: nowhere
        self._rival = NOWHERE  # an older place that fits as well
        self._tested = False  # whether a prediction came true since we believe that
        self._confidence = 1.0
        self._clock = 0
        # By number: the last place in the history, the next place ahead, the rate of use.
        self._last = np.full(_ROOM, NOWHERE)
        self._next: Ranks | None = None  # made when somebody asks
        self._log_rate, self._counted_at = np.zeros((2, _ROOM))
        self._span = 1.0  # uses in which a rate decays to 1 / e
        self._registered: dict[str, str | None] = {}  # key -> the one registered after it
        self._before: dict[str, str | None] = {}  # key -> the one registered before it
        self._newest: str | None = None
        self._hints: Numbers | None = None  # made when somebody asks
        self._expected: dict[str, int] = {}  # key -> the use by which it must have come

    @property
    def trusted(self) -> bool:
        """Whether the learned order is worth ranking by."""
        return self._place >= 0 and self._confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        return self._place < 0 and self._confidence >= TRUSTED

    # Keys and their numbers --------------------------------------------------------------------

    def number(self, key: str) -> int:
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
            if number == len(self._last):
                self._make_room()
        self._numbers[key] = number
        self._log_rate[number] = -np.inf
        span = 2.0 ** math.ceil(math.log2(len(self._numbers)))
        if span != self._span:
            self._span = span
            self._rank_anew()
        return number

    def _make_room(self) -> None:
        """For twice as many numbers."""
        more = len(self._last)
        self._last = np.append(self._last, np.full(more, NOWHERE))
        self._next = None
        self._log_rate = np.append(self._log_rate, np.zeros(more))
        self._counted_at = np.append(self._counted_at, np.zeros(more))

    def _rank_anew(self) -> None:
        self.epoch += 1

    def introduce(self, key: str) -> None:
        self._hints = None
        self.number(key)
        if key in self._registered:
            self._unlink(key)
        if self._newest is not None:
            self._registered[self._newest] = key
        self._before[key] = self._newest
        self._registered[key] = None
        self._newest = key

    def forget(self, key: str) -> None:
        if key in self._registered:
            self._unlink(key)
        self._kept.discard(key)
        self._wait_no_more(key)
        number = self._numbers.get(key)
        if number is None:
            return
        self._log_rate[number] = -np.inf
        if self._last[number] < 0:
            self._release(key)  # else it has a place in the history, for now

    def _release(self, key: str) -> None:
        self._spare.append(self._numbers.pop(key))

    def _unlink(self, key: str) -> None:
        self._hints = None
        before, after = self._before.pop(key), self._registered.pop(key)
        if before is not None:
            self._registered[before] = after
        if after is None:
            self._newest = before
        else:
            self._before[after] = before

    def expect(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._number(key)
            self._expected.pop(key, None)
            # A caller who changes their mind must not keep the room taken for ever.
            self._expected[key] = self._clock + PATIENCE + 2 * len(self._expected)
        self._rank_anew()

    def expect_not(self, key: str) -> None:
        self._wait_no_more(key)

    def _wait_no_more(self, key: str) -> None:
        if self._expected.pop(key, None) is not None:
            self._rank_anew()

    # Learning ----------------------------------------------------------------------------------

    def advance_past(self, key: str) -> None:
        again, self._latest, self._hints = key == self._latest, key, None
        # First of all, as it may take away this key's number, and the place we believe to be at.
        if self._length == len(self._history) and not again:
            self._forget_the_oldest()
        number = self._number(key)
        self._count(number)
        self._come(key)
        if not again:
            self._learn(number)

    def _learn(self, number: int) -> None:
        foreseen = self._foretells(self._place, number)
        both = self._foretells(self._rival, number)
        changed = not foreseen or (self._rival >= 0 and not both)
        before = (self.trusted, self.learning)
        if self._place >= 0:
            weight = LEARNING_RATE if foreseen or self._tested else GUESSED * LEARNING_RATE
            self._confidence += weight * (foreseen - self._confidence)
        self._tested = foreseen
        seen = self._last.item(number) >= 0
        self._append(number)
        if not foreseen:
            newest = self._history[: self._length]
            self._place, self._rival = best_matches(newest) if seen else (NOWHERE, NOWHERE)
        else:
            self._place += 1
            self._rival = self._rival + 1 if both else NOWHERE
        if changed:
            self._next = None
        elif self._next is not None:
            self._next[number] = self._place_again()
        # Where nothing is ranked by places, only the key just used has another rank than before.
        if (self.trusted, self.learning) != before or (self.trusted and changed):
            self._rank_anew()

    def come(self, key: str) -> None:
        self._clock += 1
        self._come(key)

    def _come(self, key: str) -> None:
        """What was expected has come, or has not come for too long."""
        over = [k for k, limit in self._expected.items() if k == key or limit < self._clock]
        for gone in over:
            self._wait_no_more(gone)

    def _count(self, number: int) -> None:
        self._clock += 1
        rate = math.exp(self._decayed(number))
        self._log_rate[number] = math.log1p(rate)
        self._counted_at[number] = self._clock

    def _decayed(self, number: int) -> float:
        """The logarithm of a key's rate of use now."""
        passed = self._clock - self._counted_at.item(number)
        return self._log_rate.item(number) - passed / self._span

    def _append(self, number: int) -> None:
        here = self._length
        last = self._last.item(number)
        if last >= 0:
            self._following[last] = here
        self._history[here] = number
        self._last[number] = here
        self._length += 1

    def _forget_the_oldest(self) -> None:
        """Make room, and keep the newest half, or enough for twice the registered keys."""
        kept = max(self._memory, 2 * len(self._registered))
        gone = max(self._length - kept, 0)
        history, following = np.zeros((2, 2 * kept), dtype=np.int64)
        self._length -= gone
        history[: self._length] = self._history[gone:]
        following[: self._length] = self._following[gone:] - gone
        self._history, self._following = history, following
        self._last -= gone
        self._place -= gone
        self._rival -= gone
        self._next = None
        self._rank_anew()
        for key, number in list(self._numbers.items()):
            if self._last[number] < 0 and key not in self._kept and key not in self._expected:
                self._release(key)

    # Predicting --------------------------------------------------------------------------------

    def steps_until(self, key: str) -> float:
        if key in self._expected:
            return 1.0 + list(self._expected).index(key)
        number = self._numbers.get(key)
        if number is None or self.learning:
            return math.inf
        if self.trusted:
            return float(self._places()[number]) - self._place
        rate = math.exp(self._decayed(number))
        return self._span / rate if rate > 0 else math.inf

    def round(self, number: int) -> int:
        if not self.trusted or self._expected:
            return 0
        away = float(self._places()[number]) - self._place
        return int(away) if math.isfinite(away) else 0

    def repeats(self, length: int) -> bool:
        now, place = self._length, self._place + 1
        if not self.trusted or place + length > now:
            return False
        latest = self._history[now - length : now]
        return bool(np.array_equal(latest, self._history[place : place + length]))

    def ranks(self, numbers: Numbers) -> Ranks:
        if self.trusted:
            ranks = self._places()[numbers]
        elif self.learning:
            ranks = np.full(len(numbers), np.inf)
        else:
            # All rates decay alike, so this order holds until a key is used.
            ranks = -(self._log_rate[numbers] + self._counted_at[numbers] / self._span)
        if not self._expected:
            return ranks
        soon = np.full(len(self._last), np.inf)
        soon[self._named()] = SOON + np.arange(1, len(self._expected) + 1)
        sooner: Ranks = np.minimum(soon[numbers], ranks)  # than anything that was learned
        return sooner

    def farther(self, ranks: Ranks, times: float) -> Ranks:
        if self.trusted:
            farther = self._place + times * (ranks - self._place)
        else:
            farther = ranks + math.log(times)  # ranks are logarithms of rates, or infinite
        return np.where(ranks < SOON / 2, SOON + times * (ranks - SOON), farther)

    def _places(self) -> Ranks:
        """For every number, the place of its next use in the history that repeats itself: seen from
        where we believe to be, or from the rival, whichever is sooner."""
        if self._next is None:
            self._next = self._places_after(self._place)
            if self._rival >= 0:
                nearer = self._places_after(self._rival) + (self._place - self._rival)
                np.minimum(self._next, nearer, out=self._next)
        return self._next

    def _places_after(self, place: int) -> Ranks:
        found = np.full(len(self._last), np.inf)
        future = self._history[place + 1 : self._length]
        # Assigned backwards, so that the first occurrence is what remains.
        found[future[::-1]] = np.arange(self._length - 1, place, -1)
        return found

    def _place_again(self) -> int:
        """The place of the next use of the key in use."""
        place, rival = self._place, self._rival
        again = self._following.item(place)
        return again if rival < 0 else min(again, self._following.item(rival) + place - rival)

    def _foretells(self, place: int, number: int) -> bool:
        return place >= 0 and self._history.item(place + 1) == number

    def upcoming(self, count: int) -> Iterator[str]:
        for number in self.ahead(count).tolist():
            yield self._keys[number]

    def ahead(self, count: int) -> Numbers:
        learned = self._learned(count)
        return np.concatenate([self._named(), learned]) if self._expected else learned

    def _named(self) -> Numbers:
        """The numbers of the keys that the caller expects, in order."""
        named = [self._numbers[key] for key in self._expected]
        return np.array(named, dtype=np.int64)

    def _learned(self, count: int) -> Numbers:
        if self.trusted:
            return self._history[self._place + 1 : min(self._place + 1 + count, self._length)]
        if not self.learning:
            return _NOBODY
        if self._hints is None:
            following = islice(self._registered_after(self._latest), HINTS)
            self._hints = np.array([self._numbers[key] for key in following], dtype=np.int64)
        return self._hints[:count]

    def _registered_after(self, key: str | None) -> Iterator[str]:
        while key in self._registered and (key := self._registered[key]) is not None:
            yield key

    def foretold(self) -> int:
        return len(self._expected)
