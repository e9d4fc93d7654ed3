"""Orders that rank or predict keys while no learned order does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import Numbers

Ranks = npt.NDArray[np.float64]


class UseRates:
    """Use rates of keys, by number, which decay to 1 / e within `span` uses."""

    def __init__(self, size: int) -> None:
        self.clock = 0
        self.span = 1.0
        self._log_rate, self._counted_at = np.zeros((2, size))

    def grow(self) -> None:
        """Double the number of keys."""
        more = len(self._log_rate)
        self._log_rate = np.append(self._log_rate, np.zeros(more))
        self._counted_at = np.append(self._counted_at, np.zeros(more))

    def clear(self, number: int) -> None:
        """Reset a number: its key was never used, or it has none."""
        self._log_rate[number] = -np.inf

    def count(self, number: int) -> None:
        """Count a use."""
        self.clock += 1
        self._log_rate[number] = math.log1p(self.rate(number))
        self._counted_at[number] = self.clock

    def rate(self, number: int) -> float:
        """Return a key's current use rate."""
        passed = self.clock - self._counted_at.item(number)
        return math.exp(self._log_rate.item(number) - passed / self.span)

    def ranks(self, numbers: Numbers) -> Ranks:
        """Return ranks: the negated logarithms of rates, without the common decay since the start.

        All rates decay alike, so the order holds until a key is used.
        """
        ranks: Ranks = -(self._log_rate[numbers] + self._counted_at[numbers] / self.span)
        return ranks


class RoutedUses:
    """Use rates of routed keys, by number, relative to the uses of ordered keys.

    The experts of a model are chosen by data, some more often than others. Each has a count of
    uses that decays to 1 / e within `SPAN` ordered uses per key. It gives the average number of
    ordered uses until the key is used again, which is comparable with the next use of an ordered
    key. (Ranking by decayed use counts is LRFU, Lee et al., 2001.)
    """

    SPAN = 4.0

    def __init__(self, size: int) -> None:
        self.any = False
        self._routed = np.zeros(size, dtype=np.bool_)
        self._count, self._counted_at = np.zeros((2, size))
        self._turn = np.zeros(size, dtype=np.int64)

    def grow(self) -> None:
        """Double the number of keys."""
        more = len(self._count)
        self._turn = np.append(self._turn, np.zeros(more, dtype=np.int64))
        self._routed = np.append(self._routed, np.zeros(more, dtype=np.bool_))
        self._count = np.append(self._count, np.zeros(more))
        self._counted_at = np.append(self._counted_at, np.zeros(more))

    def clear(self, number: int) -> None:
        """Reset a number: it has another key, or none."""
        self._routed[number] = False
        self._count[number] = 0.0

    def add(self, number: int) -> None:
        """Mark the key of a number as routed."""
        self.any = True
        self._routed[number] = True

    def has(self, number: int) -> bool:
        """Return whether the key of this number is routed."""
        return bool(self._routed[number])

    def of(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask of the numbers whose keys are routed."""
        found: npt.NDArray[np.bool_] = self._routed[numbers]
        return found

    def count(self, number: int, turn: int, now: int, keys: int) -> None:
        """Count a use after `now` ordered uses, the last of which was of the number `turn`.

        `keys` is the number of known keys.
        """
        self._turn[number] = turn
        decayed = math.exp((self._counted_at.item(number) - now) / (self.SPAN * keys))
        self._count[number] = 1.0 + self._count.item(number) * decayed
        self._counted_at[number] = now

    def turns(self, numbers: Numbers) -> Numbers:
        """Return the ordered key after which each number was last used.

        A routed key is assumed not to be used again before that key.
        """
        found: Numbers = self._turn[numbers]
        return found

    def waits(self, numbers: Numbers, now: int, keys: int) -> Ranks:
        """Return the average number of ordered uses until each is used again; infinity: unknown."""
        span = self.SPAN * keys
        counts = self._count[numbers] * np.exp((self._counted_at[numbers] - now) / span)
        waits: Ranks = np.full(len(numbers), np.inf)
        np.divide(span, counts, out=waits, where=counts > 0)
        return waits


class RegistrationOrder:
    """Keys in the order of their registration."""

    def __init__(self) -> None:
        self._after: dict[str, str | None] = {}
        self._before: dict[str, str | None] = {}
        self._newest: str | None = None

    def __len__(self) -> int:
        return len(self._after)

    def add(self, key: str) -> None:
        """Append a key, moving it to the end if it is present."""
        self.remove(key)
        if self._newest is not None:
            self._after[self._newest] = key
        self._before[key] = self._newest
        self._after[key] = None
        self._newest = key

    def remove(self, key: str) -> bool:
        """Remove a key. Returns whether it was present."""
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
        """Yield the keys registered after this one; none if it is not present."""
        while key in self._after and (key := self._after[key]) is not None:
            yield key
