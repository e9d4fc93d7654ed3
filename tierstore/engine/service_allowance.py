"""The allowance of a worker: how much it may lease from its service, and when it must release."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.transaction import transaction
from tierstore.model import events

if TYPE_CHECKING:  # needs an optional package
    from tierstore.tiers.service_link import ServiceLink


class ServiceAllowance:
    """Handles notifications from the service, on the thread that reads the connection."""

    def __init__(self, core: Core, lease_table: LeaseTable, link: ServiceLink) -> None:
        self.core = core
        self._lease_table = lease_table
        # A weak reference: that thread must not keep a store alive that was dropped, not closed.
        listener = weakref.ref(self)

        def allowed(nbytes: int) -> None:
            if (found := listener()) is not None:
                found.allowed(nbytes)

        def reclaimed() -> None:
            if (found := listener()) is not None:
                found.reclaimed()

        link.listen(allowed, reclaimed)

    @transaction
    def allowed(self, nbytes: int) -> None:
        """Set the number of bytes that may be leased at once."""
        core = self.core
        if core.is_stopped():
            return
        core.shared_budget = nbytes
        core.apply(events.SharedBudgetChanged(nbytes))

    @transaction
    def reclaimed(self) -> None:
        """Release all leases that are not in use, because another worker is waiting for memory."""
        core = self.core
        if core.is_stopped():
            return
        self._lease_table.revoke_all()
        core.apply(events.SharedBudgetChanged(0))
        core.apply(events.SharedBudgetChanged(core.shared_budget))
