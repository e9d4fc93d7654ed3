"""What a service allows a worker to lease, and what the worker gives back when others need room."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.transaction import transaction
from tierstore.model import events

if TYPE_CHECKING:  # it needs a package that not every installation has
    from tierstore.tiers.service_link import ServiceLink


class ServiceAllowance:
    """Hears what the service says unasked, on the thread that reads the connection."""

    def __init__(self, core: Core, lease_table: LeaseTable, link: ServiceLink) -> None:
        self.core = core
        self._lease_table = lease_table
        # Whoever drops a store without closing it must not find it kept alive by that thread.
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
        """So many bytes may be leased at once from now on."""
        core = self.core
        if core.ended():
            return
        core.shared_budget = nbytes
        core.tell(events.SharedBudgetChanged(nbytes))

    @transaction
    def reclaimed(self) -> None:
        """Another worker waits for room: what nobody uses here goes back."""
        core = self.core
        if core.ended():
            return
        self._lease_table.revoke_all()
        core.tell(events.SharedBudgetChanged(0))
        core.tell(events.SharedBudgetChanged(core.shared_budget))
