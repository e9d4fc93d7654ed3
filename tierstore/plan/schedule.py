"""The order in which groups are used, learned by watching one pass.

A denoising loop, a training step or a token loop repeats itself. `LearnedOrder` predicts by the
longest suffix match: it looks for the place in its history that was preceded by the longest run
of keys equal to the newest ones, and expects what followed there. (The idea is that of prediction
by partial matching, Cleary and Witten, 1984.) While it has nothing to go by, keys are expected in
the order in which they were registered; that is good enough for a prefetch, and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

MEMORY = 8192
LEARNING_RATE = 0.1
TRUSTED = 0.5
PATIENCE = 64
"""Uses after which a key that the caller said comes next is no longer waited for."""


class Schedule(Protocol):
    """A learned order of use."""

    def advance_past(self, key: str) -> None:
        """Note that `key` has just been used."""

    def steps_until(self, key: str) -> float:
        """How many uses ahead `key` is expected; infinity if it is not expected at all."""

    def upcoming(self, count: int) -> Iterator[str]:
        """The next `count` keys that are expected, soonest first, at most."""

    def expect(self, keys: Iterable[str]) -> None:
        """The caller says that these keys come next, in this order."""

    def introduce(self, key: str) -> None:
        """A group is registered."""

    def forget(self, key: str) -> None:
        """A group is gone."""


class LearnedOrder:
    """A schedule that predicts by the longest suffix match over the last `memory` uses.

    Uses of one key in a row count once. `trusted` is False while there is no prediction, or fewer
    than about half of the latest ones came true; `steps_until` then answers by decayed access
    rates, or not at all (infinity for every key) during the first pass.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._ids: dict[str, int] = {}
        self._keys: list[str] = []
        self._history = np.zeros(2 * memory, dtype=np.int64)
        self._matched = np.zeros(2 * memory, dtype=np.int64)
        self._length = 0
        self._place = -1  # where in the history we believe to be; -1: nowhere
        self._confidence = 1.0
        self._distances: npt.NDArray[np.float64] | None = None
        self._rate: dict[str, tuple[float, int]] = {}
        self._clock = 0
        self._registered: dict[str, str | None] = {}  # key -> the one registered after it
        self._before: dict[str, str | None] = {}  # key -> the one registered before it
        self._newest: str | None = None
        self._expected: dict[str, int] = {}  # key -> the use by which it must have come

    @property
    def trusted(self) -> bool:
        """Whether the learned order is worth ranking by."""
        return self._place >= 0 and self._confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        """Whether nothing has been seen twice yet."""
        return self._place < 0 and self._confidence >= TRUSTED

    def introduce(self, key: str) -> None:
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
        self._rate.pop(key, None)
        self._expected.pop(key, None)

    def _unlink(self, key: str) -> None:
        before, after = self._before.pop(key), self._registered.pop(key)
        if before is not None:
            self._registered[before] = after
        if after is None:
            self._newest = before
        else:
            self._before[after] = before

    def expect(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._expected.pop(key, None)
            # A caller who changes their mind must not keep the room taken for ever.
            self._expected[key] = self._clock + PATIENCE + 2 * len(self._expected)

    def advance_past(self, key: str) -> None:
        self._count(key)
        self._expected.pop(key, None)
        for late in [k for k, limit in self._expected.items() if limit < self._clock]:
            del self._expected[late]
        if self._length and self._last() == key:
            return
        self._judge(key)
        if self._length == len(self._history):
            self._forget_the_oldest_half()
        self._append(self._id(key))

    def _last(self) -> str:
        return self._keys[int(self._history[self._length - 1])]

    def _count(self, key: str) -> None:
        self._clock += 1
        self._rate[key] = (self._decayed(key) + 1.0, self._clock)

    def _decayed(self, key: str) -> float:
        rate, when = self._rate.get(key, (0.0, self._clock))
        return rate * math.exp((when - self._clock) / (4 * max(len(self._rate), 1)))

    def _judge(self, key: str) -> None:
        if self._place >= 0:
            came_true = self._keys[self._history[self._place + 1]] == key
            self._confidence += LEARNING_RATE * (came_true - self._confidence)

    def _id(self, key: str) -> int:
        if key not in self._ids:
            self._ids[key] = len(self._keys)
            self._keys.append(key)
        return self._ids[key]

    def _append(self, newest: int) -> None:
        n = self._length
        history, matched = self._history, self._matched
        matched[1:n] = np.where(history[1:n] == newest, matched[: n - 1] + 1, 0) if n > 1 else 0
        if n:
            matched[0] = history[0] == newest
        history[n] = newest
        matched[n] = 0
        self._length = n + 1
        self._place = self._best_match(n)
        self._distances = None

    def _best_match(self, n: int) -> int:
        if n == 0:
            return -1
        best = n - 1 - int(np.argmax(self._matched[:n][::-1]))
        return best if self._matched[best] else -1

    def _forget_the_oldest_half(self) -> None:
        kept = self._memory
        for array in (self._history, self._matched):
            array[:kept] = array[self._length - kept : self._length]
        self._length = kept
        self._place = -1
        self._compact_ids()

    def _compact_ids(self) -> None:
        """Drop the numbers of keys that the history no longer mentions (they may never return)."""
        seen, self._history[: self._length] = np.unique(
            self._history[: self._length], return_inverse=True
        )
        self._keys = [self._keys[i] for i in seen]
        self._ids = {key: i for i, key in enumerate(self._keys)}

    def steps_until(self, key: str) -> float:
        if key in self._expected:
            return 1.0 + list(self._expected).index(key)
        if self.trusted:
            number = self._ids.get(key)
            return math.inf if number is None else float(self._ahead()[number])
        if self.learning:
            return math.inf
        rate = self._decayed(key)
        return 1.0 / rate if rate > 0 else math.inf

    def _ahead(self) -> npt.NDArray[np.float64]:
        if self._distances is None:
            future = self._history[self._place + 1 : self._length]
            self._distances = np.full(len(self._keys), np.inf)
            # Assigned backwards, so that the first occurrence is what remains.
            self._distances[future[::-1]] = np.arange(len(future), 0, -1)
        return self._distances

    def upcoming(self, count: int) -> Iterator[str]:
        yield from list(self._expected)
        if self.trusted:
            future = self._history[self._place + 1 : self._length][:count]
            yield from [self._keys[number] for number in future]
        elif self.learning and self._length:
            yield from islice(self._registered_after(self._last()), count)

    def _registered_after(self, key: str) -> Iterator[str]:
        following = self._registered.get(key)
        while following is not None:
            yield following
            following = self._registered.get(following)
