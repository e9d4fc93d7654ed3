"""The host tier of a worker: groups that a service serves lie in the service's memory.

Groups that the worker puts lie in its own memory, as in any store. Copying a shared group "from
disk" leases it from the service, and dropping it releases the lease; nothing is copied here.
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

if TYPE_CHECKING:  # needs an optional dependency
    from tierstore.tiers.service_link import ServiceLink
    from tierstore.tiers.service_wire import SharedLease


class LeasedHostTier(HostTier):
    """The worker's own slots in `arena`, and leases from the service behind `link`."""

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

    def is_shared(self, entry: GroupEntry) -> bool:
        return entry in self._served

    def set_shared(self, entry: GroupEntry, of: SharedGroup) -> None:
        self._served[entry] = of

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        if not self.is_shared(entry):
            super().reserve(entry, for_caller=for_caller)
        else:
            self.detached.collect()
            entry.slots[self.tier] = Slot(entry.spec.nbytes)

    def lease(self, entry: GroupEntry) -> None:
        """Lease a group from the service into its reserved slot. May block."""
        slot = entry.slots[self.tier]
        lease = self.link.lease(self._served[entry])
        self._leases[slot] = lease
        slot.memory = lease.memory

    def drop(self, entry: GroupEntry) -> None:
        if not self.is_shared(entry):
            super().drop(entry)
            return
        self._drop(entry, self._release_lease)

    def _release_lease(self, slot: Slot) -> None:
        lease = self._leases.pop(slot, None)
        if lease is None:
            return  # the lease was never granted

        def release() -> None:
            slot.wait()
            slot.memory = None
            self.link.release(lease)

        # A device may still read it; another thread waits for that.
        self._makers.submit(URGENT, release) if slot.pending else release()

    def detach(self, slot: Slot, spans: Spans) -> None:
        if slot not in self._leases:  # otherwise the lease lasts until the last view is dropped
            super().detach(slot, spans)

    def free_detached(self, slot: Slot) -> None:
        if slot in self._leases:
            self._release_lease(slot)
        else:
            super().free_detached(slot)

    def preserve_for_readers(self, entries: Iterable[GroupEntry]) -> None:
        # The service may overwrite the bytes after this.
        leased = [entry.slots.get(self.tier) for entry in entries if self.is_shared(entry)]
        detached = [slot for slot in self.detached if slot in self._leases]
        for slot in [*leased, *detached]:
            if slot is not None and slot.memory is not None:
                slot.memory.bitwise_or_(0)  # writing to a page makes it a private copy

    def stop_waiting(self) -> None:
        """Stop pending leases.

        The current holders may wait for memory that this store releases only when it is closed.
        """
        self.link.stop()

    def close(self, entries: Iterable[GroupEntry]) -> None:
        super().close([entry for entry in entries if not self.is_shared(entry)])
        self.link.close()


class LeaseOrRead:
    """Brings groups into a worker's host memory: leased from the service, or read from files."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reading: DiskToHost, host: LeasedHostTier) -> None:
        self.workers = reading.workers
        self._reading = reading
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        if not self._host.is_shared(entry):
            return self._reading.copy(entry, ending)
        self._host.lease(entry)
        return Copied(entry.spec.nbytes)
