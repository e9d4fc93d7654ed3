"""Activations that autograd saves for the backward pass, under generated keys.

A saved tensor has no name. It is written once, read once or a few times, and freed with the graph.
No key is used twice: with a learned order of use, the planner would, during the forward pass,
prefetch the activations that the backward pass of the last step began with. The adapter that saves
activations prefetches them explicitly.
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
"""Host memory is scarce below this many free bytes, or budget / `shares.SCARCE` if less."""


class LeaseHolder(Protocol):
    """An object that holds leases for later use."""

    def release_idle_leases(self) -> None:
        """Release leases that can be acquired again. Called by a thread that needs memory."""


class SavedTensors:
    """Activations saved for the backward pass. `save` and `release_idle_leases` may block."""

    def __init__(self, core: Core, puts: Puts, groups: Groups) -> None:
        self.core = core
        self._puts = puts
        self._groups = groups
        self._numbers = itertools.count()
        self._unspilled: dict[int, GroupId] = {}  # by number, the oldest first
        self.lease_holders: weakref.WeakSet[LeaseHolder] = weakref.WeakSet()

    @property
    def counts(self) -> ActivationCounts:
        """Counters for the adapters that save activations."""
        return self.core.observer.activations

    def release_idle_leases(self) -> None:
        """Ask all lease holders to release leases that they hold for later use."""
        for holder in list(self.lease_holders):
            holder.release_idle_leases()

    def max_group_bytes(self) -> int:
        """Return the size of the largest possible group, in bytes.

        It must fit on every tier above the disk. 2**62 if there is no limit.
        """
        core = self.core
        budgets = {tier: core.planner.budgets[tier] for tier in core.planner.tiers[:-1]}
        capacities = [
            budget - (core.permanent_host_bytes if tier is Tier.HOST else 0)
            for tier, budget in budgets.items()
            if budget is not None
        ]
        return min(capacities, default=1 << 62)

    def lease_capacity(self) -> int:
        """Return the bytes that may be leased for long on the fastest tier.

        The largest group so far must fit beside them. About 2**62 if there is no limit.
        """
        core = self.core
        top = core.planner.top
        permanent = core.permanent_host_bytes if top is Tier.HOST else 0
        return (core.planner.budgets[top] or 1 << 62) - permanent - core.largest

    def save(self, memory: torch.Tensor) -> tuple[int, Any]:
        """Copy `memory` (1-d, uint8) into the store. A copy from the device is asynchronous.

        Returns the number of the saved tensor, and a device event. Until the event has passed,
        `memory` must not be changed or freed. The event is None if the copy is complete. Raises the
        errors of `TierStore.put`.
        """
        current = self.core.current
        number = next(n for n in self._numbers if saved_key(n) not in current)
        fill = partial(self.core.tiers.host.fill, behind=True)
        try:
            copied = self._puts.put_with(
                saved_key(number), memory, fill, use_order=UseOrder.PREFETCHED
            )
            self._spill_if_scarce(number)
            return number, copied
        except BaseException:
            self.drop(number)
            raise

    @transaction
    def _spill_if_scarce(self, number: int) -> None:
        """Write older activations to disk if host memory is scarce, as many bytes as were saved.

        The oldest are needed last. Once written, their memory can be freed as soon as it is needed.
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
                continue  # dropped in an interrupted transaction
            instructions = core.instructions_for(events.SpillAdvised(oldest))
            due -= sum(copy.nbytes for copy in instructions if isinstance(copy, Copy))
            core.deliver(instructions)

    def drop(self, number: int) -> None:
        """Discard a saved tensor at the next transaction, because finalizers may run inside one."""
        self.core.deferred.append(partial(self._forget, number))

    def _forget(self, number: int) -> None:
        self._unspilled.pop(number, None)
        self._groups.discard_in_transaction(saved_key(number))

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Hint: these saved tensors are needed next, in order. See `TierStore.prefetch`."""
        self._groups.prefetch_existing(
            [saved_key(number) for number in numbers], self.core.planner.top
        )
