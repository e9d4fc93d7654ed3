"""Memory that autograd saves for a while and wants back soon, under names that the store makes up.

What autograd saves has no name, is written once, read once or a few times, and goes with the graph.
No name is used twice: a learned order of use would tell the planner, in the middle of the forward
pass, to fetch what the backward pass of the last step began with. Who saves memory says itself what
it wants next.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch

from tierstore.engine.core import Core
from tierstore.engine.groups import Groups
from tierstore.engine.keys import saved_key
from tierstore.engine.puts import Puts
from tierstore.engine.transaction import transaction
from tierstore.model import events, shares
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy
from tierstore.model.tiers import Tier, UseOrder
from tierstore.observe.observer import ActivationCounts

SCARCE_BYTES = 256 << 20
"""Room in host memory is scarce when so many bytes of the budget are left, or `shares.SCARCE`."""


class LeaseHolder(Protocol):
    """One who holds leases for later."""

    def make_room(self) -> None:
        """Give them back, if they can be had again. Called by a thread that waits for room."""


class SavedTensors:
    """Memory saved for the backward pass. Only `save` may wait."""

    def __init__(self, core: Core, puts: Puts, groups: Groups) -> None:
        self.core = core
        self._puts = puts
        self._groups = groups
        self._numbers = itertools.count()
        self._unspilled: dict[int, GroupId] = {}  # by number, the oldest first
        self.lease_holders: weakref.WeakSet[LeaseHolder] = weakref.WeakSet()

    @property
    def counts(self) -> ActivationCounts:
        """Where those who save activations count what they do."""
        return self.core.observer.activations

    def make_room(self) -> None:
        """Have those who hold leases for later give them back, if they can."""
        for holder in list(self.lease_holders):
            holder.make_room()

    def largest_possible(self) -> int:
        """The bytes that any one group may have at most: what every tier above the disk can hold
        (2**62 if there is no limit)."""
        core = self.core
        budgets = {tier: core.planner.budgets[tier] for tier in core.planner.tiers[:-1]}
        rooms = [
            budget - (core.permanent_host_bytes if tier is Tier.HOST else 0)
            for tier, budget in budgets.items()
            if budget is not None
        ]
        return min(rooms, default=1 << 62)

    def room_for_leases(self) -> int:
        """The bytes that may be leased for long on the fastest tier: the largest group that was
        ever wanted there has room beside them (2**62 or so if there is no limit)."""
        core = self.core
        top = core.planner.top
        permanent = core.permanent_host_bytes if top is Tier.HOST else 0
        return (core.planner.budgets[top] or 1 << 62) - permanent - core.largest

    def save(self, memory: torch.Tensor) -> tuple[int, Any]:
        """Copy `memory` (uint8, 1-d) into the store, beside what the device does next.

        Returns its number, and an event of the device: before it has passed, nothing may change
        `memory`, nor get it from the allocator. None: it is copied. Raises what `put` raises.
        """
        current = self.core.current
        number = next(n for n in self._numbers if saved_key(n) not in current)
        fill = partial(self.core.tiers.host.fill, behind=True)
        try:
            copied = self._puts.put_with(
                saved_key(number), memory, fill, use_order=UseOrder.ANNOUNCED
            )
            self._spill_where_scarce(number)
            return number, copied
        except BaseException:
            self.drop(number)
            raise

    @transaction
    def _spill_where_scarce(self, number: int) -> None:
        """What was saved comes back some day. And where room gets scarce, write as much as has
        come: the oldest is wanted last.

        Later, who needs the room can have it at once.
        """
        core = self.core
        budget = core.planner.budgets[Tier.HOST]
        group = core.current.get(saved_key(number))
        if group is None or budget is None:
            return
        due = core.mover.entry(group).spec.nbytes
        core.largest = max(core.largest, due)
        self._unspilled[number] = group
        used = core.planner.used[Tier.HOST] - core.planner.shared_used
        if used <= budget - min(budget // shares.SCARCE, SCARCE_BYTES):
            return
        while due > 0 and self._unspilled:
            oldest = self._unspilled.pop(next(iter(self._unspilled)))
            if oldest not in core.planner:
                continue  # it was dropped in a transaction that was cut short
            instructions = core.handled(events.SpillAdvised(oldest))
            due -= sum(copy.nbytes for copy in instructions if isinstance(copy, Copy))
            core.deliver(instructions)

    def drop(self, number: int) -> None:
        """Forget what was saved, at the next transaction: finalizers may run anywhere."""
        self.core.deferred.append(partial(self._forget, number))

    def _forget(self, number: int) -> None:
        self._unspilled.pop(number, None)
        self._groups.forget_generation(saved_key(number))

    def expect(self, numbers: Iterable[int]) -> None:
        """Say what is wanted back next, in order. A hint, like `prefetch`."""
        self._groups.expect_known([saved_key(number) for number in numbers], self.core.planner.top)
