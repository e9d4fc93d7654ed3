"""The keys that a schedule knows: their numbers, registration order and prefetch hints.

Several orders of use may share them (`tierstore.plan.use_streams`). So a key has the same number in
all of them, and a prefetch hint holds in whichever order the key is used.
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
"""Uses after which the hint for a prefetched key that was not used is dropped."""

SOON = -1e15
"""Base rank of prefetched keys, to which their position is added. All other ranks are higher."""


class Numbered(Protocol):
    """An order of use that refers to keys by number."""

    def begin_number(self, number: int) -> None:
        """Assign this number to a new key."""

    def clear_number(self, number: int) -> None:
        """Clear the records of this number, whose key was forgotten."""

    def route_number(self, number: int) -> None:
        """Mark the key of this number as routed, that is, chosen by data."""

    def remembers(self, number: int) -> bool:
        """Return whether a use of this number is remembered: then it cannot be reused yet."""


class KnownKeys:
    """Keys and their numbers, shared by `orders`.

    `clock` counts the uses of all orders. `epoch` grows when the prefetched keys change,
    `registrations` when a key is registered or forgotten, and `renumbered` when a number is
    assigned to a key or its key is forgotten. `routed` has the numbers of keys that data choose.
    With `takes_hints` False, prefetch hints are ignored.
    """

    def __init__(self, *, takes_hints: bool = True) -> None:
        self._takes_hints = takes_hints
        self.orders: list[Numbered] = []
        self.numbers: dict[str, int] = {}
        self.keys: list[str] = []  # by number
        self.routed: set[int] = set()
        self.registered = RegistrationOrder()
        self.prefetched: dict[str, int] = {}  # key -> value of `clock` at which it is dropped
        self.clock = 0
        self.epoch = 0
        self.registrations = 0
        self.renumbered = 0
        self._spare: list[int] = []  # free for reuse
        self._kept: set[str] = set()  # keys that keep their number until forgotten

    def number(self, key: str) -> int:
        """Return the number of `key`, which it keeps until it is forgotten."""
        self._kept.add(key)
        return self.number_for_now(key)

    def number_for_now(self, key: str) -> int:
        """Return a number for `key`, valid while it is prefetched or a use of it is remembered."""
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
        """Add a registered group, or move it to the end. Routed keys have no place in the order."""
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
        """Forget the key of a group that was removed."""
        if self.registered.remove(key):
            self.registrations += 1
        self._kept.discard(key)
        self._drop_hint(key)
        number = self.numbers.get(key)
        if number is None:
            return
        self.renumbered += 1
        self.routed.discard(number)
        for order in self.orders:
            order.clear_number(number)
        if not self._remembered(number):
            self._spare.append(self.numbers.pop(key))  # otherwise a history still uses it

    def reclaim_numbers(self) -> None:
        """Free the numbers that no order remembers any more."""
        for key, number in list(self.numbers.items()):
            if key in self._kept or key in self.prefetched or self._remembered(number):
                continue
            self._spare.append(self.numbers.pop(key))

    def _remembered(self, number: int) -> bool:
        return any(order.remembers(number) for order in self.orders)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Note that the caller prefetches these keys, and will use them in this order."""
        for key in keys if self._takes_hints else ():
            self.number_for_now(key)
            self.prefetched.pop(key, None)
            # If they are never used after all, they must not hold their space for ever.
            self.prefetched[key] = self.clock + PATIENCE + 2 * len(self.prefetched)
        self.epoch += 1

    def cancel_prefetch(self, key: str) -> None:
        """Note that the caller no longer prefetches a key."""
        self._drop_hint(key)

    def _drop_hint(self, key: str) -> None:
        if self.prefetched.pop(key, None) is not None:
            self.epoch += 1

    def prefetched_count(self) -> int:
        """Return the number of prefetched keys."""
        return len(self.prefetched)

    def prefetched_numbers(self) -> Numbers:
        """Return the numbers of the prefetched keys, in order."""
        return np.array([self.numbers[key] for key in self.prefetched], dtype=np.int64)

    def sooner(self, numbers: Numbers, ranks: Ranks) -> Ranks:
        """Return the ranks with prefetched keys moved before all others."""
        if not self.prefetched:
            return ranks
        soon = np.full(len(self.keys), np.inf)
        soon[self.prefetched_numbers()] = SOON + np.arange(1, len(self.prefetched) + 1)
        found: Ranks = np.minimum(soon[numbers], ranks)
        return found

    def note_use(self, key: str) -> None:
        """Note that a key was used: drop its prefetch hint, and hints that are too old."""
        now = self.clock
        ended = [k for k, limit in self.prefetched.items() if k == key or limit < now]
        for each in ended:
            self._drop_hint(each)
