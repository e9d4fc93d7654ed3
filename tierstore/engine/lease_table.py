"""Open leases: how they end, and how unused ones are revoked."""

from __future__ import annotations

from functools import partial

from tierstore.engine.core import Core
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import LeaseRecord
from tierstore.lease import Lease
from tierstore.model import events
from tierstore.model.locks import inside
from tierstore.model.tiers import Access
from tierstore.tiers.workers import Future


class LeaseTable:
    """Open leases on the fastest tier and in host memory. The `LeaseIssuer` of each `Lease`."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def add(self, record: LeaseRecord) -> None:
        """Add a new lease. Part of a transaction."""
        core = self.core
        core.leases[record] = None
        core.queue.add_lease(record.caller, record.group)

    @transaction
    def detach_owner(self, record: LeaseRecord) -> None:
        """Give a lease an owner that never waits, so that the caller can wait while it is held."""
        self.change_owner(record, object())

    def change_owner(self, record: LeaseRecord, holder: object) -> None:
        """Give a lease another owner. Part of a transaction."""
        queue = self.core.queue
        queue.remove_lease(record.caller, record.group)
        record.caller = holder
        queue.add_lease(record.caller, record.group)

    # Leases end --------------------------------------------------------------------------------

    def release(self, record: LeaseRecord) -> None:
        """End a lease. A second call does nothing. With TAKE, waits until the file is removed.

        Raises CaptureError during graph capture: a graph cannot record where the lease ends.
        """
        core = self.core
        if core.forked():
            return  # the lease belongs to the parent
        core.check_not_capturing()
        record.stream = core.current_stream()
        if inside():  # called by a finalizer inside a transaction: the next one ends the lease
            self.release_later(record)
            return
        removal = self._end_now(record)
        if removal is not None:
            core.wait_for_removal(removal)

    @transaction
    def _end_now(self, record: LeaseRecord) -> Future[None] | None:
        return self.end(record)

    def release_later(self, record: LeaseRecord) -> bool:
        """End a lease at the next transaction. For finalizers. Return False if it has ended."""
        if record not in self.core.leases:
            return False
        self.core.deferred.append(partial(self.end, record))
        return True

    def reclaim(self, record: LeaseRecord) -> None:
        """End a lease that did not reach its caller or is not in use. Part of a transaction."""
        if record.access is Access.TAKE:
            record.access = Access.READ  # the group was not read, so keep it
        if record.tensors is not None:
            record.tensors.clear()  # the holder may keep the Lease object
        self.end(record)

    def end_lease(self, lease: Lease) -> None:
        """End a lease, and invalidate its `Lease` object. Part of a transaction."""
        self.end(lease.invalidate())

    def end(self, record: LeaseRecord) -> Future[None] | None:
        """End a lease, once. Part of a transaction.

        Returns the pending removal of the file, if the group was taken.
        """
        if record.host_access is None:
            return self._end_on_top(record)
        self._end_in_host(record)
        return None

    def _end_on_top(self, record: LeaseRecord) -> Future[None] | None:
        core = self.core
        if core.is_stopped() or record not in core.leases:
            return None
        mark = None
        group, access, key = record.group, record.access, record.group.key
        entry = core.mover.entry(group)
        if (device := core.tiers.device) is not None:
            mark = device.times.mark(record.stream)
            device.used_on(entry, mark)
        core.revocable.pop(record, None)
        record.tensors = None
        # In this order, an interrupted call can be repeated.
        if access is Access.TAKE and core.current.get(key) == group:
            del core.current[key]
        del core.leases[record]
        permanent = record.caller is None
        core.queue.remove_lease(record.caller, group)
        core.observer.lease_released(record, mark)
        core.mover.poll()
        self.learn()
        core.apply(events.Released(group, access, permanent))
        if access is not Access.TAKE or key in core.current:
            return None
        return core.tiers.disk.remove(key, core.next_number(), entry.durable)

    def learn(self) -> None:
        """Pass new device measurements to the planner. Part of a transaction."""
        for measured in self.core.measurements.take():
            self.core.instructions_for(measured, free_disk=False)

    def _end_in_host(self, record: LeaseRecord) -> None:
        core = self.core
        if core.is_stopped() or record not in core.leases:
            return
        del core.leases[record]
        if record.caller is None:
            core.permanent_host_bytes -= core.mover.entry(record.group).spec.nbytes
        core.queue.remove_lease(record.caller, record.group)
        core.apply(events.HostReleased(record.group))

    # Unused leases -------------------------------------------------------------------------------

    @transaction
    def make_revocable(self, record: LeaseRecord) -> bool:
        """Let the store revoke a lease when it needs the memory.

        Returns False if a caller is already waiting, or if this is not a READ lease on the fastest
        tier.
        """
        core = self.core
        if core.is_stopped() or record not in core.leases or core.queue.has_waiters():
            return False
        if record.access is not Access.READ or record.host_access is not None:
            return False
        if (device := core.tiers.device) is not None:
            record.stream = core.current_stream()
            mark = device.times.mark(record.stream)
            device.used_on(core.mover.entry(record.group), mark)
        core.revocable[record] = None
        return True

    def resume(self, record: LeaseRecord) -> bool:
        """Mark a revocable lease as used again. Return False if it was revoked."""
        core = self.core
        core.check_not_capturing()
        # Atomic: either this caller or a revoking thread removes the record.
        try:
            del core.revocable[record]
        except KeyError:
            return False
        record.stream = core.current_stream()
        core.order_after_arrival(core.mover.entry(record.group), record.stream)
        return True

    def revoke_all(self) -> None:
        """Revoke all unused leases, because a caller would have to wait. Part of a transaction."""
        revocable = self.core.revocable
        while revocable:
            record, _ = revocable.popitem()
            self.reclaim(record)
