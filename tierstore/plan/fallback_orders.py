"""What ranks keys, or foretells them, where no learned order does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import Numbers

Ranks = npt.NDArray[np.float64]


class UseRates:
    """How often keys are used, by number: rates that decay to 1 / e within `span` uses."""

    def __init__(self, room: int) -> None:
        self.clock = 0
        self.span = 1.0
        self._log_rate, self._counted_at = np.zeros((2, room))

    def make_room(self) -> None:
        """For twice as many numbers."""
        more = len(self._log_rate)
        self._log_rate = np.append(self._log_rate, np.zeros(more))
        self._counted_at = np.append(self._counted_at, np.zeros(more))

    def clear(self, number: int) -> None:
        """The number is of a key that was never used, or of none."""
        self._log_rate[number] = -np.inf

    def count(self, number: int) -> None:
        """A use."""
        self.clock += 1
        self._log_rate[number] = math.log1p(self.rate(number))
        self._counted_at[number] = self.clock

    def rate(self, number: int) -> float:
        """A key's rate of use now."""
        passed = self.clock - self._counted_at.item(number)
        return math.exp(self._log_rate.item(number) - passed / self.span)

    def ranks(self, numbers: Numbers) -> Ranks:
        """The logarithms of rates, negated, and all less by what has decayed since the beginning:
        as all decay alike, the order holds until a key is used."""
        ranks: Ranks = -(self._log_rate[numbers] + self._counted_at[numbers] / self.span)
        return ranks


class RoutedUses:
    """How often keys are used that data choose, by number: uses per use of a key in order.

    Experts of a model are used at random, but some more often than others. A count of uses, which
    decays to 1 / e within `SPAN` times as many uses in order as there are keys, tells how many uses
    in order will pass, on average, until a key is used again. (To rank by decayed counts of use is
    LRFU, Lee et al., 2001; as a time, it compares with the next use of a key that has an order.)
    """

    SPAN = 4.0

    def __init__(self, room: int) -> None:
        self.any = False
        self._routed = np.zeros(room, dtype=np.bool_)
        self._count, self._counted_at = np.zeros((2, room))
        self._turn = np.zeros(room, dtype=np.int64)

    def make_room(self) -> None:
        """For twice as many numbers."""
        more = len(self._count)
        self._turn = np.append(self._turn, np.zeros(more, dtype=np.int64))
        self._routed = np.append(self._routed, np.zeros(more, dtype=np.bool_))
        self._count = np.append(self._count, np.zeros(more))
        self._counted_at = np.append(self._counted_at, np.zeros(more))

    def clear(self, number: int) -> None:
        """The number is of another key, or of none."""
        self._routed[number] = False
        self._count[number] = 0.0

    def add(self, number: int) -> None:
        """The number is of a key that data choose."""
        self.any = True
        self._routed[number] = True

    def has(self, number: int) -> bool:
        """Whether this number is of such a key."""
        return bool(self._routed[number])

    def of(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these numbers are of such keys."""
        found: npt.NDArray[np.bool_] = self._routed[numbers]
        return found

    def count(self, number: int, turn: int, now: int, keys: int) -> None:
        """A use, after `now` uses of keys in order, the last of `turn`, where there are so many
        keys."""
        self._turn[number] = turn
        decayed = math.exp((self._counted_at.item(number) - now) / (self.SPAN * keys))
        self._count[number] = 1.0 + self._count.item(number) * decayed
        self._counted_at[number] = now

    def turns(self, numbers: Numbers) -> Numbers:
        """After which key in order each was used last: it is not used again before that is."""
        found: Numbers = self._turn[numbers]
        return found

    def waits(self, numbers: Numbers, now: int, keys: int) -> Ranks:
        """After how many uses in order each is used again, on average; infinity: nobody knows."""
        span = self.SPAN * keys
        counts = self._count[numbers] * np.exp((self._counted_at[numbers] - now) / span)
        waits: Ranks = np.full(len(numbers), np.inf)
        np.divide(span, counts, out=waits, where=counts > 0)
        return waits


class RegistrationOrder:
    """The keys in the order in which they were registered."""

    def __init__(self) -> None:
        self._after: dict[str, str | None] = {}
        self._before: dict[str, str | None] = {}
        self._newest: str | None = None

    def __len__(self) -> int:
        return len(self._after)

    def add(self, key: str) -> None:
        """The key was registered, maybe once more."""
        self.remove(key)
        if self._newest is not None:
            self._after[self._newest] = key
        self._before[key] = self._newest
        self._after[key] = None
        self._newest = key

    def remove(self, key: str) -> bool:
        """Returns whether it was there."""
        if key not in self._after:
            return False
        before, after = self._before.pop(key), self._after.pop(key)
        if before is not None:
            self._after[before] = after
        if after is None:
            self._newest = before
        else:
            self._before[after] = before
        return True

    def after(self, key: str | None) -> Iterator[str]:
        """The keys that were registered after this one; none if it is not there."""
        while key in self._after and (key := self._after[key]) is not None:
            yield key
