"""The host tier of a worker: groups that a service serves lie in the service's memory.

What the worker puts itself lies in memory of its own, as in any store. Of a shared group, to copy
it "from disk" is to lease it of the service, and to drop it is to give the lease back; nothing is
copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tierstore.model.tiers import Tier
from tierstore.observe.journal import Journal
from tierstore.tiers.arena import Arena, Slot, Spans
from tierstore.tiers.device_tier import DeviceTier
from tierstore.tiers.entry import GroupEntry, SharedGroup
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.reading import DiskToHost
from tierstore.tiers.workers import URGENT, SerialExecutor, Workers

if TYPE_CHECKING:  # it needs a package that not every installation has
    from tierstore.tiers.service_link import ServiceLink
    from tierstore.tiers.service_wire import SharedLease


class LeasedHostTier(HostTier):
    """Slots of the worker's own in `arena`, and leases of the service behind `link`."""

    def __init__(
        self,
        arena: Arena,
        device: DeviceTier | None,
        journal: Journal,
        serial: SerialExecutor,
        makers: Workers,
    ) -> None:
        super().__init__(arena, device, journal, serial, makers)
        self._leases: dict[Slot, SharedLease] = {}
        self._served = WeakKeyDictionary[GroupEntry, SharedGroup]()
        self.link: ServiceLink

    connected = True
    budget_name = "tierstore-serve's --ram"

    def weight_budget(self, budget: int | None) -> int | None:
        return self.link.budget

    def offer(self, groups: Sequence[SharedGroup]) -> None:
        self.link.register(groups)

    def lends(self, entry: GroupEntry) -> bool:
        return entry in self._served

    def know_lent(self, entry: GroupEntry, of: SharedGroup) -> None:
        self._served[entry] = of

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        if not self.lends(entry):
            super().reserve(entry, for_caller=for_caller)
        else:
            self.left.collect()
            entry.slots[self.tier] = Slot(entry.spec.nbytes)

    def lease(self, entry: GroupEntry) -> None:
        """Have the service's copy of a group, for the room that was set aside. May wait."""
        slot = entry.slots[self.tier]
        lease = self.link.lease(self._served[entry])
        self._leases[slot] = lease
        slot.memory = lease.memory

    def drop(self, entry: GroupEntry) -> None:
        if not self.lends(entry):
            super().drop(entry)
            return
        self._drop(entry, self._give_lease_back)

    def _give_lease_back(self, slot: Slot) -> None:
        lease = self._leases.pop(slot, None)
        if lease is None:
            return  # it never came

        def give_back() -> None:
            slot.wait()
            slot.memory = None
            self.link.release(lease)

        # A device may still read it, and nobody waits for that here.
        self._makers.submit(URGENT, give_back) if slot.pending else give_back()

    def leave(self, slot: Slot, spans: Spans) -> None:
        if slot not in self._leases:  # else the lease stays until nobody looks
            super().leave(slot, spans)

    def end_left(self, slot: Slot) -> None:
        if slot in self._leases:
            self._give_lease_back(slot)
        else:
            super().end_left(slot)

    def keep_for_readers(self, entries: Iterable[GroupEntry]) -> None:
        # The service may overwrite the bytes from now on.
        leased = [entry.slots.get(self.tier) for entry in entries if self.lends(entry)]
        left = [slot for slot in self.left if slot in self._leases]
        for slot in [*leased, *left]:
            if slot is not None and slot.memory is not None:
                slot.memory.bitwise_or_(0)  # each page that is written to becomes one of our own

    def stop_waiting(self) -> None:
        """Those who have the room may wait for what this store gives back when it has ended."""
        self.link.stop()

    def close(self, entries: Iterable[GroupEntry]) -> None:
        super().close([entry for entry in entries if not self.lends(entry)])
        self.link.close()


class LeaseOrRead:
    """Brings groups into a worker's host memory: leased of the service, or read from its files."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reading: DiskToHost, host: LeasedHostTier) -> None:
        self.workers = reading.workers
        self._reading = reading
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        if not self._host.lends(entry):
            return self._reading.copy(entry, ending)
        self._host.lease(entry)
        return Copied(entry.spec.nbytes)
