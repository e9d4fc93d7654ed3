"""The keys that a schedule knows: their numbers, and what was said of them before any use.

Several orders of use may share them (`tierstore.plan.use_streams`). So a key has one number in all
of them, and what the caller expects is expected whichever order it comes in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from tierstore.model.tiers import UseOrder
from tierstore.plan.fallback_orders import RegistrationOrder
from tierstore.plan.matching import Numbers
from tierstore.plan.use_history import Ranks

PATIENCE = 64
"""Uses after which a key that the caller said comes next is no longer waited for."""

SOON = -1e15
"""What the caller expects has this rank, and its steps more. All other ranks are far above."""


class Numbered(Protocol):
    """An order that goes by the numbers of keys."""

    def begin_number(self, number: int) -> None:
        """This number is another key's from now on."""

    def clear_number(self, number: int) -> None:
        """The key of this number is gone."""

    def route_number(self, number: int) -> None:
        """Data choose the key of this number."""

    def remembers(self, number: int) -> bool:
        """Whether a use of this number is remembered: then it cannot be another's yet."""


class KnownKeys:
    """Keys and their numbers, for the `orders` that share them.

    A key that somebody was told the number of is in `kept`. `clock` counts the uses of all orders.
    `epoch` grows when what the caller expects changes, `registrations` when a key is registered or
    forgotten, `renumbered` when a number is given to a key or its key is forgotten. `routed` are
    numbers of keys that data choose. Who fetches nothing early `takes_hints` of nobody.
    """

    def __init__(self, *, takes_hints: bool = True) -> None:
        self._takes_hints = takes_hints
        self.orders: list[Numbered] = []
        self.numbers: dict[str, int] = {}
        self.keys: list[str] = []  # by number
        self.routed: set[int] = set()
        self.registered = RegistrationOrder()
        self.expected: dict[str, int] = {}  # key -> the use by which it must have come
        self.clock = 0
        self.epoch = 0
        self.registrations = 0
        self.renumbered = 0
        self._spare: list[int] = []  # numbers that are nobody's
        self._kept: set[str] = set()

    def number(self, key: str) -> int:
        """The number of `key`, which stays its own until it is forgotten."""
        self._kept.add(key)
        return self.number_for_now(key)

    def number_for_now(self, key: str) -> int:
        """The number of `key`, for as long as it is expected or a use of it is remembered."""
        found = self.numbers.get(key)
        if found is not None:
            return found
        if self._spare:
            number = self._spare.pop()
            self.keys[number] = key
        else:
            number = len(self.keys)
            self.keys.append(key)
        self.numbers[key] = number
        self.renumbered += 1
        self.routed.discard(number)
        for order in self.orders:
            order.begin_number(number)
        return number

    def introduce(self, key: str, order: UseOrder = UseOrder.LEARNED) -> None:
        """A group is registered, maybe once more. What data choose has no place in an order."""
        number = self.number(key)
        if order is not UseOrder.ROUTED:
            self.registrations += 1
            self.registered.add(key)
            return
        self.routed.add(number)
        self.epoch += 1
        for each in self.orders:
            each.route_number(number)

    def forget(self, key: str) -> None:
        """A group is gone."""
        if self.registered.remove(key):
            self.registrations += 1
        self._kept.discard(key)
        self._stop_expecting(key)
        number = self.numbers.get(key)
        if number is None:
            return
        self.renumbered += 1
        self.routed.discard(number)
        for order in self.orders:
            order.clear_number(number)
        if not self._remembered(number):
            self._spare.append(self.numbers.pop(key))  # else it has a place in a history, for now

    def forget_the_unused(self) -> None:
        """Some order remembers less than it did: numbers that nobody uses any more are spare."""
        for key, number in list(self.numbers.items()):
            if key in self._kept or key in self.expected or self._remembered(number):
                continue
            self._spare.append(self.numbers.pop(key))

    def _remembered(self, number: int) -> bool:
        return any(order.remembers(number) for order in self.orders)

    def expect(self, keys: Iterable[str]) -> None:
        """The caller says that these keys come next, in this order."""
        for key in keys if self._takes_hints else ():
            self.number_for_now(key)
            self.expected.pop(key, None)
            # A caller who changes their mind must not keep the room taken for ever.
            self.expected[key] = self.clock + PATIENCE + 2 * len(self.expected)
        self.epoch += 1

    def expect_not(self, key: str) -> None:
        """The caller does not expect the key any more."""
        self._stop_expecting(key)

    def _stop_expecting(self, key: str) -> None:
        if self.expected.pop(key, None) is not None:
            self.epoch += 1

    def foretold(self) -> int:
        """How many keys the caller expects."""
        return len(self.expected)

    def named(self) -> Numbers:
        """The numbers of the keys that the caller expects, in order."""
        return np.array([self.numbers[key] for key in self.expected], dtype=np.int64)

    def sooner(self, numbers: Numbers, ranks: Ranks) -> Ranks:
        """These ranks of numbers, but for what the caller expects: that comes before all others."""
        if not self.expected:
            return ranks
        soon = np.full(len(self.keys), np.inf)
        soon[self.named()] = SOON + np.arange(1, len(self.expected) + 1)
        found: Ranks = np.minimum(soon[numbers], ranks)
        return found

    def come(self, key: str) -> None:
        """A key was used: it is expected no more, nor is what has not come for too long."""
        now = self.clock
        over = [k for k, limit in self.expected.items() if k == key or limit < now]
        for gone in over:
            self._stop_expecting(gone)
