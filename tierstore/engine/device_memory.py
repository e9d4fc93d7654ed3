"""The store's accelerator memory: freed on request, and its budget adjusted."""

from __future__ import annotations

import logging
from dataclasses import replace

from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.settings import device_memory, grown_device_budget
from tierstore.engine.transaction import transaction
from tierstore.errors import BudgetError
from tierstore.model import events
from tierstore.model.formatting import Units, size
from tierstore.model.tiers import Tier
from tierstore.tiers.arena import Arena

logger = logging.getLogger("tierstore.engine")


class DeviceMemory:
    """The store's memory on the device. For adapters.

    `spare_bytes` and `free_idle` need an accelerator. `retries` counts forwards that were retried
    after the device ran out of memory.
    """

    def __init__(self, core: Core, lease_table: LeaseTable) -> None:
        self.core = core
        self.retries = 0
        self._lease_table = lease_table

    @property
    def _arena(self) -> Arena:
        device = self.core.tiers.device
        assert device is not None, "the store has no accelerator"
        return device.arena

    @transaction
    def spare_bytes(self) -> int:
        """Return the number of bytes that `free_idle` would free now."""
        return self.core.planner.spare_bytes() + self._arena.idle_bytes

    def free_idle(self) -> None:
        """Free the device memory that no lease uses, for other users of the device.

        Evicts only groups that have a copy on another tier; they return on demand. Waits until the
        device has finished with the memory.
        """
        self._vacate()
        self.core.mover.drain()  # then the slots of evicted groups are idle
        self._arena.free_idle()

    @transaction
    def _vacate(self) -> None:
        self.core.check_open()
        self.core.leave_loop("device memory was needed")
        self._lease_table.revoke_all()
        self.core.apply(events.DeviceVacated())

    def adjust_outside_bytes(self, nbytes: int) -> None:
        """Reduce the budget of the fastest tier by bytes that are used outside of the store.

        A negative number increases it again. Does nothing in a closed store. Raises BudgetError if
        no budget would remain.
        """
        budget = self._count_outside(nbytes)
        if nbytes and budget is not None:  # without the lock, as in `grow_budget`
            logger.info(
                "budget of %s is now %s: %s %s used outside of the store",
                self.core.tiers.top.tier.name,
                size(budget),
                size(abs(nbytes)),
                "more are" if nbytes > 0 else "fewer are",
            )

    def release_outside_bytes_later(self, nbytes: int) -> None:
        """Return bytes to the budget that are no longer used outside of the store.

        For finalizers: see `Groups.discard_from_finalizer`.
        """
        counted = [nbytes]

        def count() -> None:
            if counted:  # if interrupted, the budget stays too small rather than too large
                self._change_outside(-counted.pop())

        self.core.deferred.append(count)
        self.core.run_deferred_if_free()

    @transaction
    def _count_outside(self, nbytes: int) -> int | None:
        return self._change_outside(nbytes)

    def _change_outside(self, nbytes: int) -> int | None:
        """Return the new budget, or None in a closed store. Part of a transaction."""
        core = self.core
        if core.is_stopped():
            return None
        tier = core.tiers.top.tier
        before = core.settings.tiers.budgets[tier]
        assert before is not None, "memory has a budget"
        if nbytes >= before:
            what = "tensors outside of the store"
            advice = f"raise the budget to more than {nbytes:,} bytes, or exclude these tensors"
            raise BudgetError(what, tier.name, nbytes, before, advice)
        self._set_budget(before - nbytes)
        return before - nbytes

    def _set_budget(self, budget: int) -> None:
        core = self.core
        core.leave_loop("the budget changed")
        core.tiers.top.arena.resize(budget)  # first: the planner's instructions may need it
        tiers = core.settings.tiers
        budgets = {**tiers.budgets, core.tiers.top.tier: budget}
        core.settings = replace(core.settings, tiers=replace(tiers, budgets=budgets))
        core.apply(events.BudgetChanged(budget))

    def grow_budget(self) -> None:
        """Add half of the free device memory to an automatic device budget, once.

        Called when every model has run.
        """
        grown = self._grow_budget()
        if grown is not None:  # without the lock: a log handler may call the store
            logger.info(
                "device_budget 'auto', once every model has run: %s (%s before)",
                *(size(nbytes, Units.DECIMAL) for nbytes in grown),
            )

    @transaction
    def _grow_budget(self) -> tuple[int, int] | None:
        """Return the new budget and the one before, or None if it does not grow."""
        core = self.core
        given = core.settings
        if core.is_stopped() or not given.device_budget_may_grow:
            return None
        arena, before = self._arena, given.tiers.budgets[Tier.DEVICE]
        assert before is not None
        free, _ = device_memory(core.device)
        budget = grown_device_budget(before, arena.bytes_held, free)
        core.settings = replace(given, device_budget_may_grow=False)
        self._set_budget(budget)
        return budget, before
