"""The memory of the accelerator that the store holds: what it may give back, and may take more."""

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
    """For adapters, and, but for `count_outside`, only where there is an accelerator.

    `retries` counts what ran once more because the device had no memory left.
    """

    def __init__(self, core: Core, lease_table: LeaseTable) -> None:
        self.core = core
        self.retries = 0
        self._lease_table = lease_table

    @property
    def _arena(self) -> Arena:
        device = self.core.tiers.device
        assert device is not None, "there is no accelerator"
        return device.arena

    @transaction
    def spare_bytes(self) -> int:
        """The bytes that `give_back` would give back now."""
        return self.core.planner.spare_bytes() + self._arena.idle_bytes

    def give_back(self) -> None:
        """Let others have the memory that the store holds there and that nobody uses.

        What is given up has a copy elsewhere. It comes back when it is needed. Waits for the device
        to be done with it.
        """
        self._vacate()
        self.core.mover.catch_up()  # the slots of what was given up are idle by then
        self._arena.give_back_idle()

    @transaction
    def _vacate(self) -> None:
        self.core.check_open()
        self.core.leave_loop("the device's memory was wanted")
        self._lease_table.revoke_all()
        self.core.tell(events.DeviceVacated())

    def count_outside(self, nbytes: int) -> None:
        """So many bytes more (or fewer, if negative) are used outside of the store on its fastest
        tier: its budget there is smaller by as much. A store that has ended has no budget.

        Raises BudgetError if nothing would be left.
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

    def count_inside_again_soon(self, nbytes: int) -> None:
        """So many bytes fewer are used outside of the store. For finalizers: see `discard_soon`."""
        counted = [nbytes]

        def count() -> None:
            if counted:  # if it is cut short, the budget stays smaller, and is never too large
                self._change_outside(-counted.pop())

        self.core.deferred.append(count)
        self.core.collect_garbage_if_free()

    @transaction
    def _count_outside(self, nbytes: int) -> int | None:
        return self._change_outside(nbytes)

    def _change_outside(self, nbytes: int) -> int | None:
        """The new budget; None for a store that has ended. As part of a transaction."""
        core = self.core
        if core.ended():
            return None
        tier = core.tiers.top.tier
        before = core.settings.tiers.budgets[tier]
        assert before is not None, "memory has a budget"
        if nbytes >= before:
            what = "tensors outside of the store"
            advice = f"raise the budget to more than {nbytes:,} bytes, or leave them out"
            raise BudgetError(what, tier.name, nbytes, before, advice)
        self._set_budget(before - nbytes)
        return before - nbytes

    def _set_budget(self, budget: int) -> None:
        core = self.core
        core.leave_loop("the budget was changed")
        core.tiers.top.arena.resize(budget)  # first: the planner's instructions may need it
        tiers = core.settings.tiers
        budgets = {**tiers.budgets, core.tiers.top.tier: budget}
        core.settings = replace(core.settings, tiers=replace(tiers, budgets=budgets))
        core.tell(events.BudgetChanged(budget))

    def grow_budget(self) -> None:
        """Every model has run: have the device budget take half of what is free, if nobody chose
        it. Happens once."""
        grown = self._grow_budget()
        if grown is not None:  # without the lock: who handles logs may look at the store
            logger.info(
                "device_budget 'auto', once every model has run: %s (%s before)",
                *(size(nbytes, Units.DECIMAL) for nbytes in grown),
            )

    @transaction
    def _grow_budget(self) -> tuple[int, int] | None:
        """The new budget and the one before; None if it does not grow."""
        core = self.core
        given = core.settings
        if core.ended() or not given.device_budget_may_grow:
            return None
        arena, before = self._arena, given.tiers.budgets[Tier.DEVICE]
        assert before is not None
        free, _ = device_memory(core.device)
        budget = grown_device_budget(before, arena.bytes_held, free)
        core.settings = replace(given, device_budget_may_grow=False)
        self._set_budget(budget)
        return budget, before
